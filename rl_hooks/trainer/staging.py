"""From a captured forward to the rollout file: the normalisers of its rows, its metadata, and the sender's queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.agreement import Agreement
from rl_hooks.sending.features import (
    Captured,
    StagedRollouts,
    chosen_logits,
    row_bytes,
    score_logits,
    score_rows,
)
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.base import HookOptions
from rl_hooks.trainer.own_scores import OwnRows, Scores
from rl_hooks.trainer.plan import BatchPlan
from rl_hooks.trainer.session import Session

#: So many rows of a forward are compared with the policy's own logits.
_COMPARED: Final = 32
#: Bytes of a file besides its rows: offsets of one rollout. `rollout_bytes` leaves room enough for the header.
_HEAD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Targets:
    """The rows at which a forward is read, on its device."""

    rows: Tensor  # int64 [N], of the flattened [B * S] token axis
    scored: Tensor  # int64 [M], rows among these N whose next token the policy generated
    next_ids: Tensor  # int64 [M], that token

    def some(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """A few of the M rows, spread evenly: their place among the N, in the forward, and the token that follows."""
        few = slice(0, None, -(-len(self.scored) // _COMPARED))
        at = self.scored[few]
        return at.to(device), self.rows.index_select(0, at).to(device), self.next_ids[few].to(device)


@dataclass(frozen=True, slots=True)
class RolloutStaging:
    """The facts that all files of one hook share, with the sender and the counters."""

    sender: RolloutSender
    tally: Tally
    session: Session
    options: HookOptions
    target_fingerprint: str
    aux_layers: tuple[int, ...]
    logit_map: wire.LogitMap
    agreement: Agreement | None = None

    def _metadata(self, plan: BatchPlan) -> Mapping[str, str]:
        options = self.options
        return wire.rollout_metadata(
            run=options.run,
            policy_version=plan.policy_version,
            rollout_ids=plan.rollout_ids,
            target_fingerprint=self.target_fingerprint,
            aux_layers=self.aux_layers,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            rewards=plan.rewards,
            strata=plan.strata,
            prompt_hashes=plan.prompt_hashes,
            offered=plan.offered,
            drafter_version="" if options.drafter_version is None else options.drafter_version(),
            extra={  # `rank` and `world_size` are for people who look into a refused file
                "rank": str(options.rank),
                "world_size": str(options.world_size),
                **self.session.of_rollouts(),
            },
        )

    def targets(self, plan: BatchPlan, device: torch.device) -> Targets:
        """The rows at which to read the forward, on its device."""
        return Targets(*(torch.from_numpy(array).to(device) for array in (plan.rows, *plan.scored())))

    def score(self, plan: BatchPlan, targets: Targets, last_NH: Tensor, head_VH: Tensor) -> Scores:
        """Normaliser and log p, [N] each, of the tokens that the policy generated, by a product with the head."""
        _check_generated(plan, len(head_VH))
        at = targets.scored.to(last_NH.device)
        lse, logp = score_rows(
            last_NH.index_select(0, at),
            head_VH,
            targets.next_ids.to(at.device),
            temperature=plan.temperature,
            logit_map=self.logit_map,
        )
        return placed(len(plan.rows), at, lse, logp)

    def see_head(self, targets: Targets, last_NH: Tensor, head_VH: Tensor) -> None:
        """Compare this head's logits with the policy's own, once."""
        if self.agreement is not None and self.agreement.wanted:
            at, _, next_ids = targets.some(last_NH.device)
            self.agreement.see_head(last_NH.index_select(0, at), head_VH, next_ids)

    def see_logits(self, targets: Targets, own: OwnRows, mapped: bool) -> None:
        """Note the policy's own logits for the comparison: lm_head's output, or (`mapped`) the model's."""
        if self.agreement is not None and self.agreement.wanted:
            _, rows, next_ids = targets.some(own.values.device)
            self.agreement.see_logits(own.values.index_select(0, own.at(rows)), next_ids, mapped=mapped)

    def score_logits(self, plan: BatchPlan, targets: Targets, logits: OwnRows) -> Scores:
        """Normaliser and log p, as of `score`, from the trainer's own logits."""
        V = logits.values.shape[-1]
        _check_generated(plan, V)
        at = targets.scored.to(logits.values.device)
        places_M = logits.at(targets.rows.to(at.device).index_select(0, at))
        lse, logp = score_logits(
            lambda some: logits.values.index_select(0, places_M[some]),
            V,
            targets.next_ids.to(at.device),
            temperature=plan.temperature,
            logit_map=self.logit_map,
        )
        return placed(len(plan.rows), at, lse, logp)

    def chosen_logits(self, plan: BatchPlan, targets: Targets, last_NH: Tensor, head_VH: Tensor) -> Tensor:
        """The logit of each token that the policy generated, divided by the temperature, [M]."""
        _check_generated(plan, len(head_VH))
        at = targets.scored.to(last_NH.device)
        return chosen_logits(
            last_NH.index_select(0, at),
            head_VH,
            targets.next_ids.to(at.device),
            temperature=plan.temperature,
            logit_map=self.logit_map,
        )

    @staticmethod
    def score_log_probs(plan: BatchPlan, targets: Targets, log_probs: OwnRows, chosen_M: Tensor) -> Scores:
        """Normaliser and log p from the trainer's own log-probabilities and the result of `chosen_logits`."""
        at = targets.scored.to(chosen_M.device)
        rows_M = targets.rows.to(at.device).index_select(0, at)
        logp = log_probs.values.index_select(0, log_probs.at(rows_M).to(log_probs.values.device)).to(at.device)
        return placed(len(plan.rows), at, chosen_M - logp, logp)

    def submit(self, plan: BatchPlan, captured: Captured, scored: Scores | None, at: Tensor) -> None:
        """Start the copies to the host, and queue the files. `at`: rows whose next token the policy generated.

        Rollouts of one forward are one file, or several if they are too large for one. Raises RolloutError if
        log-probabilities are neither given nor computed.
        """
        index = plan.index
        unknown = index.logprobs is None or not np.isfinite(index.logprobs[index.loss_mask == 1]).all()
        if scored is None and unknown:
            raise RolloutError(
                "no rank held the whole lm_head in this forward, so log-probabilities cannot be recomputed: pass the "
                "trainer's own as logprobs= of `capture`"
            )
        width = row_bytes(len(captured.aux), captured.last.shape[1], self.options.dtype)
        tokens, longest = self.sender.file_bytes // width, (self.sender.rollout_bytes - _HEAD_BYTES) // width
        if len(plan.rows) <= tokens:
            self._send(plan, captured, scored, at)
            return
        files = plan.files(tokens, longest)
        self._count_cut(plan, files, longest)
        predicting = plan.scored()[0]  # `at` on the host: reading it from the device would wait for the forward
        for rows, part in files:
            begin, end = np.searchsorted(predicting, [rows.start, rows.stop - 1]).tolist()
            of_part = Captured(tuple(state[rows] for state in captured.aux), captured.last[rows])
            scores = None if scored is None else (scored[0][rows], scored[1][rows])
            self._send(part, of_part, scores, at[begin:end] - rows.start)

    def _count_cut(self, plan: BatchPlan, files: Sequence[tuple[slice, BatchPlan]], longest: int) -> None:
        """Count the rollouts that are longer than a file, and log it once."""
        self.tally.add("skipped_budget", len(plan.rollout_ids) - sum(len(part.rollout_ids) for _, part in files))
        if cut := int(np.count_nonzero(np.diff(plan.index.cu_seqlens) > longest)):
            self.tally.add("cut_long", cut)
            self.tally.warn(
                "long",
                f"rollouts of more than {longest} tokens are sent up to there: a file has at most "
                f"{self.sender.rollout_bytes} bytes (queue_bytes, but 511 MiB at most); dtype='float8_e4m3' holds more",
            )

    def _send(self, plan: BatchPlan, captured: Captured, scored: Scores | None, at: Tensor) -> None:
        """Queue one file. `at`: as for `submit`."""
        sender, predicting = self.sender, at if self.sender.last_rows == "predicting" else None
        staged = StagedRollouts(plan.index, captured, scored, dtype=self.options.dtype, predicting=predicting)
        metadata = self._metadata(plan)
        self.tally.add("captured_rollouts", len(plan.rollout_ids))
        self.tally.add("captured_tokens", len(plan.rows))

        def body() -> Sequence[bytes | memoryview]:
            if self.agreement is not None:
                self.agreement.judge()
            return staged.encode(metadata, takes=sender.optional_tensors)

        sender.submit(body, size_bytes=staged.data_bytes)


def _check_generated(plan: BatchPlan, vocab_size: int) -> None:
    generated = plan.index.input_ids[plan.index.loss_mask == 1]
    if generated.min() < 0 or generated.max() >= vocab_size:
        # On the device the gather would fail an assertion, which ends the trainer's process.
        raise RolloutError(
            f"generated tokens are {generated.min()} to {generated.max()}, but lm_head has {vocab_size} rows: "
            "loss_mask is 1 at a token that the policy cannot have generated, or the head is a slice"
        )


def placed(rows: int, at: Tensor, lse: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Place values of the M rows `at` among all N `rows`: `lse` at the row itself, `logp` at the token after it."""
    logsumexp_N = torch.zeros(rows, dtype=torch.float32, device=at.device).index_copy_(0, at, lse)
    return logsumexp_N, torch.zeros_like(logsumexp_N).index_copy_(0, at + 1, logp)
