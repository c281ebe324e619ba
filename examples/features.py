"""Rollouts of the demo's policy as a batch with features, by one plain forward: no hook, no service.

The independent way to the same features that the hook captures: used to train the initial drafter before RL begins, to
take the fall of the frozen drafter apart, and by tests as the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from examples.policy import AUX_LAYERS


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion: token ids, and the log-probability of each under the distribution it was sampled from."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@torch.no_grad()
def batch_of(policy: Any, rollouts: Sequence[Rollout], *, policy_version: int = 0, at_once: int = 256) -> RolloutBatch:
    """Pack rollouts (temperature 1) with features from `policy`'s forward; logprobs are the rollouts' own."""
    parts = [
        _pack(policy, rollouts[i : i + at_once], policy_version, start=i) for i in range(0, len(rollouts), at_once)
    ]
    return RolloutBatch.concat(parts)


def _pack(policy: Any, rollouts: Sequence[Rollout], policy_version: int, start: int) -> RolloutBatch:
    lengths = torch.tensor([len(r.prompt_ids) + len(r.token_ids) for r in rollouts])
    padded = torch.zeros(len(rollouts), int(lengths.max()), dtype=torch.int64)  # [R, Tmax], padded on the right
    for row, rollout in enumerate(rollouts):
        padded[row, : lengths[row]] = torch.tensor(rollout.prompt_ids + rollout.token_ids)
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    output = policy.model(input_ids=padded, attention_mask=real.long(), output_hidden_states=True)
    last: Tensor = output.last_hidden_state[real]  # [T, H], after the final norm
    aux = torch.cat([output.hidden_states[layer][real] for layer in AUX_LAYERS], dim=-1)  # [T, A*H], entering
    return RolloutBatch(
        input_ids=padded[real],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=torch.cat([torch.tensor([False] * len(r.prompt_ids) + [True] * len(r.token_ids)) for r in rollouts]),
        aux_hidden=aux,
        last_hidden=last,
        logprobs=torch.cat([torch.tensor([0.0] * len(r.prompt_ids) + list(r.logprobs)) for r in rollouts]),
        logsumexp=torch.logsumexp(policy.lm_head(last).float(), dim=-1),
        rollout_ids=tuple(str(start + i) for i in range(len(rollouts))),
        policy_version=policy_version,
    )
