"""The hook for Megatron-Core's `GPTModel`, tensor-parallel, with or without sequence parallelism.

>>> from rl_hooks.trainer.megatron.hook import attach
>>> hook = attach(model, "http://127.0.0.1:8400", config=AutoConfig.from_pretrained(checkpoint))  # on every rank
>>> with hook.capture(input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step):
...     logits = model(ids, position_ids, None)                                                   # on every rank

Rank 0 of each tensor-parallel group chooses the rollouts, tells the others which rows, and sends. What is read: the
states entering the layers, the final norm's output, and the output layer's own logits, of which each rank has a part of
the vocabulary. Under sequence parallelism each rank has a slice of the states. Each forward costs the group two small
exchanges on the host, one on the devices, and with slices one reduction of the rows to rank 0. The head is gathered
where it has moved, and with the embedding where the service has lost the run. Pipeline and context parallelism and
multi-token prediction are refused when attaching. Written against Megatron-Core 0.16.1.

Legend: S tokens of a row, B rows, N rows (tokens) that are sent, H hidden size, v a rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.errors import RolloutError, UnsupportedModelError
from rl_hooks.sending.features import Captured
from rl_hooks.sending.registration import RunRegistration, target_config
from rl_hooks.trainer.base import AttachKeywords, HookKeywords, HookOptions, TrainerHook
from rl_hooks.trainer.megatron.part import ModelPart, Reading, as_target, check_packing
from rl_hooks.trainer.megatron.ranks import TensorRanks
from rl_hooks.trainer.plan import BatchPlan, CaptureArguments, MegatronCaptureKeywords, checked_version, plan_batch
from rl_hooks.trainer.registrar import HeadUpdates, Renewal
from rl_hooks.trainer.staging import RolloutStaging, placed

_Made = TypeVar("_Made")


class MegatronKeywords(AttachKeywords, total=False):
    """The names and types of the options of `attach`."""

    policy_version: int
    wait_seconds: float


def attach(model: nn.Module, url: str, *, config: Any, **options: Unpack[MegatronKeywords]) -> MegatronHook:
    """Hook this rank's `GPTModel` (in its wrappers or not). Call it on every rank, with the same arguments.

    `config`: the transformers config of the checkpoint. `options`: those of `MegatronHook`, but for rank and world
    size. Raises `UnsupportedModelError` on every rank of the group where any of them cannot be served.
    """
    from megatron.core import parallel_state

    return MegatronHook(
        model,
        url,
        config=config,
        group=parallel_state.get_tensor_model_parallel_group(),
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        **options,
    )


class MegatronHook(TrainerHook):
    """Feature capture, registration and sending for one tensor-parallel group.

    `group`: the tensor-parallel ranks. `wait_seconds`: how long a rank waits for the others, once, before it captures
    nothing more. `options` are the fields of `HookOptions`; `rank` and `world_size` count the groups, which see other
    rollouts each.
    """

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        config: Any,
        group: Any,
        wait_seconds: float = 60.0,
        **options: Unpack[HookKeywords],
    ) -> None:
        told = HookOptions(**options)
        self.ranks = TensorRanks(group, wait_seconds)
        #: Whether this rank's hook asks the service how the run stands.
        self.leads = self.ranks.rank == 0 and told.rank == 0
        super().__init__(url, told, asks=self.leads, waits_for_run=told.rank != 0)
        self._config = config
        self._part: ModelPart | None = None
        #: Group 0 registers the run, and sends the head for all.
        self._updates: HeadUpdates | None = None
        try:
            part = self._part = self._agreed(
                lambda: ModelPart(model, target_config(as_target(config)), told.aux_layers, told.logit_map, self.ranks)
            )
            if told.rank == 0:
                self._register(part, told.policy_version)
        except BaseException:
            self.close()
            raise
        fingerprint = wire.target_fingerprint(part.config, part.features.aux_layers)
        self._staging = RolloutStaging(
            self.sender, self.tally, self.session, told, fingerprint, part.features.aux_layers, part.logit_map
        )
        self._renewal = Renewal(self.sender, self.tally)

    def _register(self, part: ModelPart, policy_version: int) -> None:
        """Register the run with the weights of now, which all ranks of group 0 gather.

        Raises `UnsupportedModelError` on every rank where it fails on any.
        """
        weights = [self.ranks.whole(weight) for weight in part.weights()]  # whole on rank 0 only, on the host

        def register() -> RunRegistration | None:
            whole = [weight[: part.vocab_size] for weight in weights if weight is not None]
            if not whole:
                return None
            target = as_target(self._config, *whole, tied=part.tied)
            return self._registration(target, part.features.aux_layers, part.logit_map)

        registration = self._agreed(register)
        self._updates = HeadUpdates(part.weights()[1], self._options.head_tolerance, policy_version)
        if registration is not None:
            registration.metadata |= {"policy_version": str(policy_version)}
            self.sender.submit_job(registration.job(self._options.run))

    def _agreed(self, work: Callable[[], _Made]) -> _Made:
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
    def capture(self, **told: Unpack[MegatronCaptureKeywords]) -> Iterator[None]:
        """Capture the one forward over `input_ids` [B, S] that happens inside; on every rank of the group.

        `told` are the fields of `CaptureArguments`, but for `position_ids` and `tree_places`; those of rank 0 are used.
        `attention_mask` is 1 at tokens and 0 at padding, whatever the forward itself is given.

        A packed row [1, T] is said by `cu_seqlens` [R + 1], and the forward must be given `packed_seq_params` of the
        same rollouts. `input_ids` are then as long as in the forward, padding at the end included.
        """
        arguments = CaptureArguments(position_ids=None, tree_places=None, **told)  # TypeError where they are told
        part = self._part
        if part is None or self.ranks.off:
            yield
            return
        plan, reading = None, None
        error = ""
        if self.ranks.rank == 0 and not self.sender.refused:
            try:
                plan, reading = self._read(arguments)
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
            if reading.renews:  # only now: an optimizer may gather its weights in the forward (overlap_param_gather)
                self.guard(self._register, part, reading.policy_version)
            self.guard(self._together, part, reading, plan)
        finally:  # where the trainer's forward raises too: the device's memory is the trainer's
            part.clear()

    def _read(self, arguments: CaptureArguments) -> tuple[BatchPlan | None, Reading]:
        """The plan of a batch, None where no rollout is chosen; and where the forward is to be read. On rank 0."""
        policy_version = checked_version(arguments.policy_version)
        self.session.saw(policy_version)
        plan = plan_batch(self.ids, self._choice, arguments)
        if plan is None:
            none = np.empty(0, np.int64)
            return None, Reading(policy_version, 1.0, (0, 0), none, none, none, self._renews())
        rows = plan.rows, *plan.scored()
        return plan, Reading(policy_version, plan.temperature, plan.layout.shape, *rows, self._renews())

    def _renews(self) -> bool:
        return self._options.rank == 0 and self._renewal.is_due()

    def _together(self, part: ModelPart, reading: Reading, plan: BatchPlan | None) -> None:
        """What this rank can do alone; then the exchanges, which no rank leaves out; then rank 0 sends."""
        rows = scores = None
        error, due, updates = "", False, self._updates
        try:
            rows, scores = part.pop(reading)
            if plan is not None:
                check_packing(part.packing, plan.layout)
            head = part.weights()[1]
            if updates is not None:
                due = updates.is_due(head, reading.policy_version, joined=self.sender.joined)
        except Exception as wrong:  # noqa: BLE001 - told to the other ranks; `agree` raises it on all
            error = f"{type(wrong).__name__}: {wrong}"
        due = self.ranks.agree(error, due)
        whole_head = self.ranks.whole(head) if due else None
        if part.sliced and rows is not None:
            rows = self.ranks.join_rows(rows)
        scored = None if scores is None else self.ranks.join_scores(scores)
        if due and updates is not None:
            queued = whole_head is None
            if whole_head is not None:
                whole_head, version = whole_head[: part.vocab_size], reading.policy_version
                queued = self.sender.submit_job(updates.job(self.sender.run, whole_head, version, self.session.id))
                self.tally.add("head_updates", queued)
            if queued:  # else it stays due on rank 0, and what is due on any rank is sent
                updates.sent(head)
        if plan is not None and rows is not None and scored is not None:
            self._send(plan, reading, rows, scored)

    def _send(self, plan: BatchPlan, reading: Reading, rows_NX: Tensor, scored: tuple[Tensor, Tensor]) -> None:
        *aux, last = rows_NX.chunk(len(self._staging.aux_layers) + 1, dim=1)
        at = torch.from_numpy(reading.scored).to(rows_NX.device)
        self._staging.submit(plan, Captured(tuple(aux), last), placed(len(plan.rows), at, *scored), at)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Remove the hooks, send what is queued as `flush` does, drop the rest. True if that was nothing."""
        if self._part is not None:
            self._part.close()
        return super().close(timeout_seconds)


def _raise(error: str) -> None:
    if error:
        raise RolloutError(error)
