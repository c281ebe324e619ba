"""The test-time-training unroll: where every row goes, and the attention over it."""
