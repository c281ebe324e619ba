"""From a captured forward to the rollout file: its metadata, and the normalisers of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.features import Captured, FeatureDtype, StagedRollouts, score_rows
from rl_hooks.trainer.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class Targets:
    """Where a forward is read, on its device."""

    rows: Tensor  # int64 [N], of the flattened [B * S] token axis
    scored: Tensor  # int64 [M], rows among these N whose next token the policy generated
    next_ids: Tensor  # int64 [M], that token


@dataclass(frozen=True, slots=True)
class RolloutStaging:
    """The facts that all files of one hook share."""

    run: str
    target_fingerprint: str
    aux_layers: tuple[int, ...]
    logit_map: wire.LogitMap
    dtype: FeatureDtype
    rank: int
    world_size: int
    drafter_version: Callable[[], str] | None

    def metadata(self, plan: BatchPlan) -> Mapping[str, str]:
        """The file's metadata."""
        return wire.rollout_metadata(
            run=self.run,
            policy_version=plan.policy_version,
            rollout_ids=plan.rollout_ids,
            target_fingerprint=self.target_fingerprint,
            aux_layers=self.aux_layers,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            rewards=plan.rewards,
            strata=plan.strata,
            drafter_version="" if self.drafter_version is None else self.drafter_version(),
            extra={
                "rank": str(self.rank),
                "world_size": str(self.world_size),
                "logprobs_source": "trainer" if plan.index.logprobs is None else "sampler",
            },
        )

    def targets(self, plan: BatchPlan, device: torch.device) -> Targets:
        """What the forward is to be read at, on its device."""
        scored = wire.predicting_rows(plan.index.loss_mask)
        next_ids = plan.index.input_ids[scored + 1].astype(np.int64)
        rows = plan.rows.astype(np.int64)
        return Targets(to_device(rows, device), to_device(scored, device), to_device(next_ids, device))

    def score(self, plan: BatchPlan, targets: Targets, last_NH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Normaliser and log p, [N] each, of the tokens that the policy generated; with the head as it is now."""
        generated = plan.index.input_ids[plan.index.loss_mask == 1]
        if generated.min() < 0 or generated.max() >= len(head_VH):
            # On the device the gather would be an assertion, which ends the trainer's process.
            raise RolloutError(
                f"generated tokens are {generated.min()} to {generated.max()}, but lm_head has {len(head_VH)} rows: "
                "loss_mask is 1 at a token that the policy cannot have generated, or the head is a slice"
            )
        device = last_NH.device
        at = targets.scored.to(device)
        lse, logp = score_rows(
            last_NH.index_select(0, at),
            head_VH,
            targets.next_ids.to(device),
            temperature=plan.temperature,
            logit_map=self.logit_map,
        )
        logsumexp_N = torch.zeros(len(plan.rows), dtype=torch.float32, device=device).index_copy_(0, at, lse)
        return logsumexp_N, torch.zeros_like(logsumexp_N).index_copy_(0, at + 1, logp)

    def stage(
        self, plan: BatchPlan, captured: Captured, scored: tuple[Tensor, Tensor] | None, predicting: Tensor | None
    ) -> StagedRollouts:
        """Start the copies to the host. `predicting`: see `StagedRollouts`.

        Raises RolloutError where nobody says the log-probabilities.
        """
        index = plan.index
        unknown = index.logprobs is None or bool(np.isnan(index.logprobs[index.loss_mask == 1]).any())
        if scored is None and unknown:
            raise RolloutError(
                "no rank held the whole lm_head in this forward, so log-probabilities cannot be recomputed: pass the "
                "trainer's own as logprobs= of `capture`"
            )
        return StagedRollouts(index, captured, scored, dtype=self.dtype, predicting=predicting)


def to_device(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """An array as a tensor there."""
    return torch.from_numpy(array).to(device)
