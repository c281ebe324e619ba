"""The hook where each rank computes a part of every forward: Megatron-Core's tensor parallelism."""
