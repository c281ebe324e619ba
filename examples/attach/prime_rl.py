"""prime-rl's own `rl` with draftalign in the trainer that it starts: the options and files of `rl` follow.

In prime-rl's environment, where `pip install './rl_hooks[agent]'` of draftalign's checkout (here /src/draftalign) was
run. That installs no examples, hence PYTHONPATH; and run as a file, this one would hide prime-rl's own package:

> export DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_INITIAL_DRAFTER=/models/drafter PYTHONPATH=/src/draftalign
> python -m examples.attach.prime_rl @ rl.toml --model.name /models/policy

Its launcher starts the trainer by torchrun; here torchrun is given our module in the place of prime-rl's, and all else
is as prime-rl has it. To have its vLLM speculate, add what you would give `vllm serve`:

> --inference.vllm.speculative_config '{"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4}'

DRAFTALIGN_INITIAL_DRAFTER names the same drafter: without it the run makes its own, and vLLM refuses every swap.
What was run of the vLLM that prime-rl installs is in docs/guide/stacks.md.

For SLURM: the module's name stands in the script that `rl` writes; change it there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from prime_rl.entrypoints import rl

from rl_hooks.stacks import prime_rl

_start = rl.Popen


def start(command: Sequence[str], *args: Any, **more: Any) -> Any:
    """Start one of prime-rl's processes; of the trainer, with the hook."""
    if not isinstance(command, str):
        command = [prime_rl.__name__ if word == prime_rl.TRAINER else word for word in command]
    return _start(command, *args, **more)


if __name__ == "__main__":
    os.environ.setdefault("DRAFTALIGN_SAMPLE_FRACTION", "0")  # of its vLLM: the trainer sends the rollouts
    rl.Popen = start
    rl.main()
