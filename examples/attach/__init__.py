"""One short script for each way in: start the service (`make up`), then run one. Each runs on a CPU in a minute."""
