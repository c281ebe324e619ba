"""What features in 8 bits cost: the target distribution, the α that a worker measures, the drafter that it trains.

    python -m benchmarks.eight_bits [--seeds 6]          # ten minutes

On the base policy of `examples.recall`, whose drafter needs its hidden states; as it is, and with two channels of every
state 100 times as large, as LLMs have (the head's are as much smaller, so the policy is the same). Each form is what a
hook sends with that dtype. Columns, all against bfloat16 and paired by seed, with the standard error:

* *KL*: of the target distribution that the file holds from the true one, nats a token.
* *measured*: replay α of one drafter, trained on bfloat16, on test rollouts in this form.
* *trained*: replay α of a drafter trained on this form, on the test rollouts in bfloat16. Training is chaotic: two runs
  that differ by rounding differ by some 0.5 %.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from benchmarks.claims import Stage, alpha, quick_stage, train
from drafter.batch import RolloutBatch
from drafter.policy import Policy, TargetHead
from examples.policy import AUX_LAYERS
from rl_hooks.sending.features import to_e4m3

ROLLOUTS: Final = 500
OUTLIERS: Final = (1.0, 100.0)
_LAYERS: Final = len(AUX_LAYERS)


def bfloat16(states: Tensor, layers: int = 1) -> Tensor:  # noqa: ARG001 - the forms have one signature
    """Rounded to bfloat16."""
    return states.bfloat16().float()


def eight_bits(states: Tensor, layers: int = 1) -> Tensor:
    """To float8_e4m3 and back, one scale for each token and layer."""
    values, scale = to_e4m3(states.view(states.shape[0] * layers, -1))
    return (values.float() * scale[:, None]).view(states.shape)


#: dtype of the hook -> what becomes of the auxiliary states and of the last one.
FORMS: Final[dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]] = {
    "bfloat16": (bfloat16, bfloat16),
    "float8_e4m3": (eight_bits, bfloat16),
    "float8_e4m3_all": (eight_bits, eight_bits),
}


def sent(batch: RolloutBatch, form: str) -> RolloutBatch:
    """The batch as the worker reads it."""
    of_aux, of_last = FORMS[form]
    return replace(
        batch, aux_hidden=of_aux(batch.aux_hidden.float(), _LAYERS), last_hidden=of_last(batch.last_hidden.float())
    )


def with_outliers(stage: Stage, factor: float) -> Stage:
    """The same policy with two channels that are `factor` times as large."""
    head = stage.policy.needed_head().lm_head.clone()
    channels = torch.randperm(head.shape[1], generator=torch.Generator().manual_seed(1))[:2]
    head[:, channels] /= factor

    def larger(batch: RolloutBatch) -> RolloutBatch:
        last, aux = batch.last_hidden.clone(), batch.aux_hidden.view(batch.tokens, _LAYERS, -1).clone()
        last[:, channels] *= factor
        aux[:, :, channels] *= factor
        return replace(batch, last_hidden=last, aux_hidden=aux.flatten(1))

    policy = Policy(stage.policy.version, stage.policy.embed_tokens, TargetHead(head))
    return replace(stage, train=larger(stage.train), test=larger(stage.test), policy=policy)


def divergence(stage: Stage, form: str) -> float:
    """Mean KL(true target || target of the file) of a token, nats."""
    head = stage.policy.needed_head().lm_head
    true = torch.log_softmax(stage.test.last_hidden.float() @ head.T, -1)
    held = torch.log_softmax(sent(stage.test, form).last_hidden @ head.T, -1)
    return float((true.exp() * (true - held)).sum(-1).mean())


def measure(stage: Stage, seed: int) -> dict[str, tuple[float, float, float]]:
    """Form -> KL, α measured, α trained."""
    drafters = {form: train(sent(stage.train, form), stage.policy, layers=_LAYERS, seed=seed) for form in FORMS}
    clean = sent(stage.test, "bfloat16")
    return {
        form: (
            divergence(stage, form),
            alpha(drafters["bfloat16"], sent(stage.test, form), stage.policy),
            alpha(drafters[form], clean, stage.policy),
        )
        for form in FORMS
    }


def _change(values: list[float], base: list[float]) -> str:
    changes = [100 * (value / other - 1) for value, other in zip(values, base, strict=True)]
    return f"{statistics.mean(changes):+.2f} ± {statistics.stdev(changes) / math.sqrt(len(changes)):.2f} %"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="at least 2")
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| large channels | dtype | KL, nats | α measured | α of what was trained |\n|---|---|---|---|---|")
    for factor in OUTLIERS:
        found = [measure(with_outliers(quick_stage(ROLLOUTS, seed), factor), seed) for seed in seeds]
        for form in FORMS:
            columns = list(zip(*(one[form] for one in found), strict=True))
            bases = list(zip(*(one["bfloat16"] for one in found), strict=True))
            changes = [_change(list(columns[i]), list(bases[i])) for i in (1, 2)]
            cells = [f"{factor:g}x", form, f"{statistics.mean(columns[0]):.1e}", *changes]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
