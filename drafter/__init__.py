"""The drafter core in pure torch: model, unroll, losses, replay α, trainer, gate, checkpoint formats.

No HTTP, no Redis; of this project it imports what files hold (`rl_hooks.wire`, `rl_hooks.format.eagle3` and the two
beside it), and durable writing. Everywhere: p = target, q = drafter.
"""
