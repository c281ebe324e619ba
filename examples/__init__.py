"""The embedded demo: a small policy, its task, an inference server with real speculation, and the RL run."""
