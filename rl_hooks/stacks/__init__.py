"""RL frameworks that train a policy in a process of their own: one adapter each, on `rl_hooks.trainer.hook`."""
