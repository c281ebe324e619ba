"""The drafter core in pure torch: model, unroll, losses, replay α, trainer, gate, checkpoint formats.

No HTTP, no Redis; imports `rl_hooks.wire` and nothing else of this project. Everywhere: p = target, q = drafter.
"""
