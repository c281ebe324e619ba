"""The hook for Megatron-Core's `GPTModel`, tensor-parallel, with or without sequence parallelism.

>>> from rl_hooks.trainer.megatron.hook import attach
>>> hook = attach(model, "http://127.0.0.1:8400", config=AutoConfig.from_pretrained(checkpoint))  # on every rank
>>> with hook.capture(input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step):
...     logits = model(ids, position_ids, None)                                                   # on every rank

Rank 0 of each tensor-parallel group chooses the rollouts, tells the others which rows, and sends. What is read: the
states entering the layers, the final norm's output, and the output layer's own logits, of which each rank has a part of
the vocabulary. Under sequence parallelism each rank has a slice of the states. Each forward costs the group two small
exchanges on the host, two small all-reduces, and with slices one reduction of the rows to rank 0. The head is gathered
where it has moved. Pipeline and context parallelism and multi-token prediction are refused when attaching. Written
against Megatron-Core 0.16.1.

Legend: S tokens of a row, B rows, N rows (tokens) that are sent, H hidden size, v a rank's part of the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.errors import RolloutError, UnsupportedModelError
from rl_hooks.sending.features import Captured, FeatureDtype, checked_dtype
from rl_hooks.sending.registration import HeadWatch, RunRegistration, head_job, target_config
from rl_hooks.sending.sender import QUEUE_BYTES, RolloutSender
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.guard import TrainerGuard
from rl_hooks.trainer.megatron.part import ModelPart, Reading, as_target, check_packing
from rl_hooks.trainer.megatron.ranks import TensorRanks
from rl_hooks.trainer.plan import BatchPlan, RolloutChoice, RolloutIds, VersionOrder, checked_version, plan_batch
from rl_hooks.trainer.session import Session
from rl_hooks.trainer.staging import COUNTERS, RolloutStaging, placed

_Made = TypeVar("_Made")


def attach(model: nn.Module, url: str, *, config: Any, **options: Any) -> MegatronHook:
    """Hook this rank's `GPTModel` (in its wrappers or not). Call it on every rank, with the same arguments.

    `config`: the transformers config of the checkpoint. `options`: those of `MegatronHook`. Raises
    `UnsupportedModelError` on every rank of the group where any of them cannot be served.
    """
    from megatron.core import parallel_state

    return MegatronHook(
        model,
        url,
        config=config,
        group=parallel_state.get_tensor_model_parallel_group(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        **options,
    )


class MegatronHook:
    """Feature capture, registration and sending for one tensor-parallel group.

    Options that `DrafterHook` has too mean the same. `group`: the tensor-parallel ranks. `data_rank`, `data_size`:
    which of the groups that see other rollouts this is; group 0 registers the run. `wait_seconds`: how long a rank
    waits for the others, once, before it captures nothing more.
    """

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        config: Any,
        group: Any,
        data_rank: int = 0,
        data_size: int = 1,
        run: str = "default",
        token: str | None = None,
        aux_layers: Sequence[int] | Literal["eagle3"] = "eagle3",
        initial_drafter: Path | str | None = None,
        draft_vocab_size: int | None = None,
        policy_version: int = 0,
        sample_fraction: float = 1.0,
        max_tokens_per_step: int = 65_536,
        dtype: FeatureDtype = "bfloat16",
        queue_bytes: int = QUEUE_BYTES,
        head_tolerance: float = 0.005,
        logit_map: wire.LogitMap | None = None,
        wait_seconds: float = 60.0,
        strict: bool = False,
    ) -> None:
        policy_version, dtype = checked_version(policy_version), checked_dtype(dtype)
        self.tally = Tally(logging.getLogger("rl_hooks"), *COUNTERS)
        self.guard = TrainerGuard(self.tally, strict=strict)
        self.ranks = TensorRanks(group, wait_seconds)
        #: Whether this rank's hook asks the service how the run stands.
        self.leads = self.ranks.rank == 0 and data_rank == 0
        retried = frozenset[int]() if data_rank == 0 else frozenset({404})
        self.sender = RolloutSender(
            url, run=run, token=token, queue_bytes=queue_bytes, retry_statuses=retried, asks=self.leads
        )
        self._ids, self._choice = RolloutIds(data_rank), RolloutChoice(sample_fraction, max_tokens_per_step, self.tally)
        self._part: ModelPart | None = None
        self._watch: HeadWatch | None = None
        #: The head is to be sent, and has not been: a batch in between has failed on some rank.
        self._due = False
        self._compared_version: int | None = None
        self._versions = VersionOrder()
        self._went_back = False  # to an earlier checkpoint, in this very process; until its head was sent
        registration: RunRegistration | None = None
        try:
            part = self._part = self._alone(
                lambda: ModelPart(model, target_config(as_target(config)), aux_layers, logit_map, self.ranks)
            )
            # Whole on rank 0 only, on the host.
            weights = [self.ranks.whole(weight) for weight in part.weights()] if data_rank == 0 else []

            def register() -> RunRegistration | None:
                whole = [weight[: part.vocab_size] for weight in weights if weight is not None]
                if not whole:
                    return None
                return RunRegistration(
                    as_target(config, *whole, tied=part.tied),
                    aux_layers=part.features.aux_layers,
                    policy_version=policy_version,
                    draft_vocab_size=draft_vocab_size,
                    initial_drafter=initial_drafter,
                    logit_map=part.logit_map,
                )

            registration = self._alone(register)
        except BaseException:
            self.close()
            raise
        self._session = Session(run, data_rank, data_size)
        self._staging = RolloutStaging(
            sender=self.sender,
            tally=self.tally,
            target_fingerprint=wire.target_fingerprint(part.config, part.features.aux_layers),
            aux_layers=part.features.aux_layers,
            logit_map=part.logit_map,
            dtype=dtype,
            rank=data_rank,
            world_size=data_size,
            session=self._session,
            drafter_version=None,
        )
        if data_rank == 0:
            self._watch = HeadWatch(part.weights()[1], head_tolerance, policy_version)
        if registration is not None:
            registration.metadata |= self._session.of_run()
            self.sender.submit_job(registration.job(run))

    def _alone(self, work: Callable[[], _Made]) -> _Made:
        """What `work` returns. Raises `UnsupportedModelError` on every rank where it fails on any."""
        made, error = None, ""
        try:
            made = work()
        except Exception as wrong:  # noqa: BLE001 - the other ranks hear of it first
            error = f"{type(wrong).__name__}: {wrong}"
        try:
            self.ranks.agree(error, due=False)
        except RolloutError as wrong:
            raise UnsupportedModelError(str(wrong)) from None
        return cast("_Made", made)

    @contextmanager
    def capture(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        loss_mask: Tensor,
        policy_version: int,
        cu_seqlens: Tensor | None = None,
        logprobs: Tensor | None = None,
        rewards: Sequence[float] | Tensor | None = None,
        temperature: float = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        rollout_ids: Sequence[str] | None = None,
        strata: Sequence[str] | None = None,
    ) -> Iterator[None]:
        """Capture the one forward over `input_ids` [B, S] that happens inside; on every rank of the group.

        The arguments are those of `DrafterHook.capture`; those of rank 0 are used. `attention_mask` is 1 at tokens and
        0 at padding, whatever the forward itself is given.

        A packed row [1, T] is said by `cu_seqlens` [R + 1], and the forward must be given `packed_seq_params` of the
        same rollouts. `input_ids` are then as long as in the forward, padding at the end included.
        """
        part = self._part
        if part is None or self.ranks.off:
            yield
            return
        plan, reading = None, None
        error = ""
        if self.ranks.rank == 0 and not self.sender.refused:
            try:
                plan, reading = self._read(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    loss_mask=loss_mask,
                    cu_seqlens=cu_seqlens,
                    logprobs=logprobs,
                    rewards=rewards,
                    strata=strata,
                    rollout_ids=rollout_ids,
                    policy_version=policy_version,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                )
            except Exception as wrong:  # noqa: BLE001 - told to the other ranks, then counted
                error = f"{type(wrong).__name__}: {wrong}"
        reading = self.guard(self.ranks.tell, reading)
        if reading is None:
            self.guard(_raise, error)
            yield
            return
        try:
            with part.armed(reading):
                yield
            self.guard(self._together, part, reading, plan)
        finally:  # where the trainer's forward raises too: the device's memory is the trainer's
            part.clear()

    def _read(self, *, policy_version: int, **told: Any) -> tuple[BatchPlan | None, Reading]:
        """The plan of a batch, None where no rollout is chosen; and where the forward is to be read. On rank 0."""
        policy_version = checked_version(policy_version)
        self._session.saw(policy_version)
        plan = plan_batch(
            self._ids, self._choice, policy_version=policy_version, position_ids=None, tree_places=None, **told
        )
        if plan is None:
            none = np.empty(0, np.int64)
            return None, Reading(policy_version, 1.0, (0, 0), none, none, none)
        return plan, Reading(policy_version, plan.temperature, plan.layout.shape, plan.rows, *plan.scored())

    def _together(self, part: ModelPart, reading: Reading, plan: BatchPlan | None) -> None:
        """What this rank can do alone; then the exchanges, which no rank leaves out; then rank 0 sends."""
        rows = scores = None
        error = ""
        try:
            rows, scores = part.pop(reading)
            if plan is not None:
                check_packing(part.packing, plan.layout)
            head = part.weights()[1]
            if self._watch is not None and reading.policy_version != self._compared_version:  # it waits for the device
                due = self._watch.is_due(head, reading.policy_version, joined=self.sender.joined)
                self._went_back |= self._versions.went_back(reading.policy_version)
                self._due = due or self._went_back or self._due
                self._compared_version = reading.policy_version
        except Exception as wrong:  # noqa: BLE001 - told to the other ranks; `agree` raises it on all
            error = f"{type(wrong).__name__}: {wrong}"
        due = self.ranks.agree(error, self._due)
        went_back = self._went_back
        whole_head = self.ranks.whole(head) if due else None
        if part.sliced and rows is not None:
            rows = self.ranks.join_rows(rows)
        scored = None if scores is None else self.ranks.join_scores(scores)
        if due and self._watch is not None:
            self._watch.mark(head)
            self._due = self._went_back = False
        if whole_head is not None:
            whole_head, version = whole_head[: part.vocab_size], reading.policy_version
            job = head_job(self.sender.run, whole_head, version, went_back=went_back, session=self._session.id)
            if self.sender.submit_job(job):
                self.tally.add("head_updates")
        if plan is not None and rows is not None and scored is not None:
            self._send(plan, reading, rows, scored)

    def _send(self, plan: BatchPlan, reading: Reading, rows_NX: Tensor, scored: tuple[Tensor, Tensor]) -> None:
        *aux, last = rows_NX.chunk(len(self._staging.aux_layers) + 1, dim=1)
        at = torch.from_numpy(reading.scored).to(rows_NX.device)
        self._staging.submit(plan, Captured(tuple(aux), last), placed(len(plan.rows), at, *scored), at)

    def stats(self) -> dict[str, Any]:
        """Counters of the hook and of its sender (rank 0's sends)."""
        own = {**self.tally.counts(), "last_failure": self.tally.last_error}
        return own | self.sender.stats() | {"run_stands": self.sender.standing()}

    def metrics(self) -> dict[str, float]:
        """Numbers for the trainer's own log, `draftalign/...` (rank 0 asks the service). No network, no waiting."""
        return self.sender.metrics()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything captured was sent or dropped."""
        return self.sender.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Remove the hooks, then flush and stop the sender. True if nothing was lost."""
        if self._part is not None:
            self._part.close()
        return self.sender.close(timeout_seconds)


def _raise(error: str) -> None:
    if error:
        raise RolloutError(error)
