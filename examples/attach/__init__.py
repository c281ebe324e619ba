"""One short script for each way in: start the service, then run one. Each runs on a CPU in a minute.

The scripts say how: with `DRAFTALIGN_VOCAB_MIN_TOKENS=500`, else their few tokens wait for more.
"""
