"""The worker: one process trains the drafters of all runs. `process` takes turns, `loop` serves one run."""
