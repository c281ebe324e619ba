"""The EAGLE-3 drafter's module, its vocabulary, and the fused passes that it is made of."""
