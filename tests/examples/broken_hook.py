"""`python broken_hook.py KIND STEPS ARGUMENTS...`: the command line `draftalign` with a hook that sends wrong features.

KIND is `zeros`, `shuffled` (another rollout's), `order` (the layers exchanged) or `stale` (the base policy's); `none`
changes nothing. The initial drafter of task recall is trained for STEPS steps: 300 is what the demo takes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from examples import TASKS, recall
from examples.features import Rollout, batch_of
from examples.policy import AUX_LAYERS, load
from rl_hooks.hook import DrafterHook
from rl_hooks.sending import features
from rl_hooks.trainer.plan import BatchPlan
from rl_hooks.trainer.staging import Targets
from service.cli.main import main

Layers = tuple[torch.Tensor, ...]


def zeros(aux: Layers) -> Layers:
    return tuple(torch.zeros_like(layer) for layer in aux)


def shuffled(aux: Layers) -> Layers:
    # By half of the batch: a group's rollouts share a prompt, so a neighbour's features would be nearly right.
    return tuple(layer.roll(len(layer) // 2, 0) for layer in aux)


def order(aux: Layers) -> Layers:
    return aux[::-1]


class Stale:
    """The base policy's states on the tokens that are about to be sent."""

    def __init__(self) -> None:
        self.policy = load(recall.TASK.base_policy)[0]
        self.index: features.PackedIndex | None = None
        submit = DrafterHook._submit

        def noting(self_: DrafterHook, plan: BatchPlan, targets: Targets) -> None:
            self.index = plan.index
            submit(self_, plan, targets)

        DrafterHook._submit = noting  # type: ignore[method-assign, assignment]

    def __call__(self, _aux: Layers) -> Layers:
        assert self.index is not None, "nothing was captured yet"
        bounds, ids = self.index.cu_seqlens.tolist(), self.index.input_ids.tolist()
        rollouts = [
            Rollout(tuple(ids[a : a + 1]), tuple(ids[a + 1 : b]), (0.0,) * (b - a - 1))
            for a, b in itertools.pairwise(bounds)
        ]
        states = batch_of(self.policy, rollouts).aux_hidden.view(len(ids), len(AUX_LAYERS), -1)
        return tuple(states.unbind(1))


if __name__ == "__main__":
    kind, steps = sys.argv.pop(1), int(sys.argv.pop(1))
    TASKS["recall"] = replace(recall.TASK, initial_drafter=replace(recall.TASK.initial_drafter, steps=steps))
    kinds: dict[str, Callable[[Layers], Layers]] = {"none": tuple, "zeros": zeros, "shuffled": shuffled, "order": order}
    breaking = Stale() if kind == "stale" else kinds[kind]
    cast = features._cast
    features._cast = lambda captured, dtype: cast(replace(captured, aux=breaking(captured.aux)), dtype)
    main()
