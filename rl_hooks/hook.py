"""The hook for custom training loops: wrap the forward over a batch of rollouts; its features go to the service.

>>> hook = DrafterHook(model, "http://127.0.0.1:8400", run="my-run")
>>> with hook.capture(input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step, temperature=1.0):
...     loss = compute_loss(model, ids, mask)        # the forward that happens anyway
>>> hook.stats()

Only rows of sampled rollouts are copied, their normalisers are computed from the head as it is at that moment, and a
background thread sends them. Whole rollouts only: nothing is cut inside one. No failure of ours reaches the trainer
unless `strict=True`: it is counted and logged once, and the step goes on without a rollout.

The forward must be that of the policy that generated the rollouts (same weights), and with PEFT its adapter active.

Legend: B batch, S padded length, N selected rows (tokens), R selected rollouts, V vocabulary, H hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.features import (
    FeatureDtype,
    PackedIndex,
    StagedRollouts,
    score_rows,
)
from rl_hooks.sending.registration import (
    HeadWatch,
    RunRegistration,
    head_body,
    head_weight,
    is_sharded,
)
from rl_hooks.sending.sender import Job, RolloutSender
from rl_hooks.trainer.capture import FeatureCapture
from rl_hooks.trainer.packing import UNPACK, refuse_packed

logger = logging.getLogger("rl_hooks")
_Result = TypeVar("_Result")


def sampling_position(rollout_id: str) -> float:
    """Where a rollout falls in [0, 1): it is sampled if that is below the fraction.

    Salted, so that it is independent of every other choice made by hashing the id (the service's held-out rollouts).
    """
    digest = hashlib.sha256(b"draftalign-sample:" + rollout_id.encode()).digest()
    return int.from_bytes(digest[:6], "big") / float(1 << 48)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows of a padded batch to copy, and what is said about them."""

    rows: npt.NDArray[np.int64]  # [N] into the flattened [B * S]
    index: PackedIndex
    rollout_ids: tuple[str, ...]  # R
    rewards: tuple[float, ...] | None
    real: npt.NDArray[np.bool_]  # [B, S]: which tokens of the padded batch are no padding
    policy_version: int
    temperature: float
    top_p: float
    top_k: int


class DrafterHook:
    """Feature capture, sampling, registration and sending for one model and one run.

    `sample_fraction` and `max_tokens_per_step` bound what is sent per policy version and rank. `dtype` is of the
    auxiliary states ("float8_e4m3" halves them, with one scale per token and layer). `head_tolerance`: the relative
    change of `lm_head` after which it is sent again. `drafter_version`: asked, at each capture, for the version that
    drafted these rollouts, where the loop knows it; replay α is then of exactly that drafter. `logit_map`: what the
    model does to its logits after lm_head, where its type is not known here. `rank` 0 registers the run; the others
    wait until it exists.
    """

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        run: str = "default",
        token: str | None = None,
        aux_layers: Sequence[int] | Literal["eagle3"] = "eagle3",
        layers_path: str | None = None,
        norm_path: str | None = None,
        initial_drafter: Path | str | None = None,
        draft_vocab_size: int | None = None,
        policy_version: int = 0,
        sample_fraction: float = 1.0,
        max_tokens_per_step: int = 65_536,
        dtype: FeatureDtype = "bfloat16",
        head_tolerance: float = 0.005,
        rank: int = 0,
        world_size: int = 1,
        queue_bytes: int = 256 << 20,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 120.0,
        drafter_version: Callable[[], str] | None = None,
        logit_map: wire.LogitMap | None = None,
        strict: bool = False,
    ) -> None:
        if not 0.0 < sample_fraction <= 1.0 or max_tokens_per_step < 2:
            raise ValueError("sample_fraction must be in (0, 1] and max_tokens_per_step at least 2")
        self.run, self.strict = run, strict
        self.sample_fraction, self.max_tokens_per_step, self.dtype = sample_fraction, max_tokens_per_step, dtype
        self._model = model
        self._drafter_version = drafter_version
        self._rank, self._world_size = rank, world_size
        # Made before the hooks are registered: a refused model is left as it was found.
        wait_for_run = frozenset({404}) if rank else frozenset()
        self.sender = RolloutSender(
            url,
            run=run,
            token=token,
            queue_bytes=queue_bytes,
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
            retry_statuses=wait_for_run,
        )
        self._features = FeatureCapture(model, aux_layers, layers_path=layers_path, norm_path=norm_path)
        try:
            registration = RunRegistration(
                model,
                aux_layers=self._features.aux_layers,
                policy_version=policy_version,
                draft_vocab_size=draft_vocab_size,
                initial_drafter=initial_drafter,
                logit_map=logit_map,
            )
        except BaseException:
            self._features.close()
            raise
        self.fingerprint = registration.fingerprint
        self._logit_map = registration.logit_map
        self._watch = HeadWatch(head_weight(model), head_tolerance)
        # Until the first batch has been seen; then None.
        self._registered_version: int | None = policy_version
        if rank == 0:
            size = sum(tensor.data.nbytes for tensor in registration.tensors.values())
            self.sender.submit_job(Job("PUT", f"/runs/{quote(run, safe='')}", registration.encode, size, keep=True))
        self._id_prefix = uuid.uuid4().hex
        self._ids_made = 0
        self._budget_version, self._budget_used = -1, 0
        self._warned: set[str] = set()
        self._overhead_seconds = 0.0
        self._counts = dict.fromkeys(
            ("captured_rollouts", "captured_tokens", "skipped_empty", "skipped_sampling", "skipped_budget"), 0
        )
        self._counts |= {"head_updates": 0, "failures": 0}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers whose entering state is captured."""
        return self._features.aux_layers

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer, hooks inside the forward included."""
        return self._overhead_seconds + self._features.hook_seconds

    @contextmanager
    def capture(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        policy_version: int,
        logprobs: Tensor | None = None,
        rewards: Sequence[float] | Tensor | None = None,
        temperature: float = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        rollout_ids: Sequence[str] | None = None,
    ) -> Iterator[None]:
        """Capture the features of the one forward over `input_ids` that happens inside.

        All of `input_ids`, `attention_mask`, `loss_mask` and `logprobs` are [B, S], padded on either side or both.
        `loss_mask` is 1 where the policy generated the token itself. `logprobs[b, s]` is log p of `input_ids[b, s]`
        under the distribution it was sampled from; those left out or NaN are recomputed from the features.
        """
        if self.sender.refused:
            yield
            return
        plan = self.guard(
            self._plan,
            input_ids=input_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            logprobs=logprobs,
            rewards=rewards,
            rollout_ids=rollout_ids,
            policy_version=policy_version,
            temperature=float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            # vLLM and transformers say "no top-k" as -1, 0 or None.
            top_k=max(0, int(top_k or 0)),
        )
        rows = None if plan is None else self.guard(_to_device, plan.rows, input_ids.device)
        if plan is None or rows is None:
            yield
            return
        with self._features.armed(rows=rows, shape=plan.real.shape):
            yield
        self.guard(self._submit, plan)

    def stats(self) -> dict[str, Any]:
        """Counters of the hook and of its sender."""
        return {**self._counts, "overhead_seconds": self.overhead_seconds, **self.sender.stats()}

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything captured was sent or dropped."""
        return self.sender.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Remove the hooks, then flush and stop the sender. True if nothing was lost."""
        self._features.close()
        return self.sender.close(timeout_seconds)

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning the first time that its kind comes up."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s (said once)", text)

    def guard(self, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result | None:
        """Run our own work: time it, and keep its failure from the trainer unless `strict`."""
        started = time.perf_counter()
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self._counts["failures"] += 1
            if self.strict:
                raise
            self.warn_once(type(error).__name__, f"rollouts were not captured: {type(error).__name__}: {error}")
            return None
        finally:
            self._overhead_seconds += time.perf_counter() - started

    # --- before the forward: which rows -----------------------------------------------------------------------------

    def _plan(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        logprobs: Tensor | None,
        rewards: Sequence[float] | Tensor | None,
        rollout_ids: Sequence[str] | None,
        policy_version: int,
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> _Plan | None:
        if input_ids.ndim != 2 or input_ids.is_nested:
            got = "a nested tensor" if input_ids.is_nested else list(input_ids.shape)
            raise RolloutError(f"input_ids must be [B, S], got {got}. {UNPACK}")
        if attention_mask is None:
            raise RolloutError(f"attention_mask is None; where nothing is padded it is all ones. {UNPACK}")
        ids_BS = _host(input_ids, np.int32)
        B, S = ids_BS.shape
        for name, tensor in (("attention_mask", attention_mask), ("loss_mask", loss_mask), ("logprobs", logprobs)):
            if tensor is not None and tuple(tensor.shape) != (B, S):
                raise RolloutError(f"{name} must be {[B, S]} like input_ids, got {list(tensor.shape)}")
        real_BS = _host(attention_mask, np.bool_)
        refuse_packed({"attention_mask": _host(attention_mask, np.int64)}, real_BS)
        generated_BS = _host(loss_mask, np.bool_) & real_BS
        names = [self._next_id(policy_version) for _ in range(B)] if rollout_ids is None else list(rollout_ids)
        values = None if rewards is None else [float(value) for value in rewards]
        if len(names) != B or (values is not None and len(values) != B):
            raise RolloutError(f"rollout_ids and rewards must hold one entry per row ({B})")
        # The first token of a rollout has no features before it, so nothing can be predicted there.
        first_B = real_BS.argmax(axis=1)
        generated_BS[np.arange(B), first_B] = False
        chosen = self._choose(names, real_BS, generated_BS, policy_version)
        if not chosen:
            return None
        positions = [np.flatnonzero(real_BS[b]) for b in chosen]
        rows = np.concatenate([b * S + where for b, where in zip(chosen, positions, strict=True)])
        index = PackedIndex(
            input_ids=ids_BS.reshape(-1)[rows],
            cu_seqlens=np.cumsum([0, *(len(where) for where in positions)], dtype=np.int32),
            loss_mask=generated_BS.reshape(-1)[rows].astype(np.uint8),
            logprobs=None if logprobs is None else _host(logprobs.float(), np.float32).reshape(-1)[rows],
        )
        return _Plan(
            rows=rows.astype(np.int64),
            index=index,
            rollout_ids=tuple(names[b] for b in chosen),
            rewards=None if values is None else tuple(values[b] for b in chosen),
            real=real_BS,
            policy_version=policy_version,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )

    def _choose(
        self,
        names: Sequence[str],
        real_BS: npt.NDArray[np.bool_],
        generated_BS: npt.NDArray[np.bool_],
        policy_version: int,
    ) -> list[int]:
        """Sampled rollouts of the batch, within what is left of this policy version's budget, in batch order."""
        if policy_version != self._budget_version:
            self._budget_version, self._budget_used = policy_version, 0
        tokens_B = real_BS.sum(axis=1)
        usable = [b for b in range(len(names)) if tokens_B[b] >= 2 and generated_BS[b].any()]
        self._counts["skipped_empty"] += len(names) - len(usable)
        place = {b: sampling_position(names[b]) for b in usable}
        sampled = sorted((b for b in usable if place[b] < self.sample_fraction), key=place.__getitem__)
        self._counts["skipped_sampling"] += len(usable) - len(sampled)
        chosen: list[int] = []
        for b in sampled:
            if self._budget_used + int(tokens_B[b]) > self.max_tokens_per_step:
                # Stop at the first that does not fit: going on would favour short rollouts. One that could never fit
                # is passed over, or it would block the rest for good.
                if int(tokens_B[b]) <= self.max_tokens_per_step:
                    break
                continue
            self._budget_used += int(tokens_B[b])
            chosen.append(b)
        self._counts["skipped_budget"] += len(sampled) - len(chosen)
        return sorted(chosen)

    def rollout_id(self, policy_version: int, number: int) -> str:
        """A rollout's id: unique over attachments, ranks and numbers, and the same whenever it is asked for."""
        text = f"{self._id_prefix}/{policy_version}/{self._rank}/{number}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _next_id(self, policy_version: int) -> str:
        self._ids_made += 1
        return self.rollout_id(policy_version, -self._ids_made)

    # --- after the forward: score, stage, queue ---------------------------------------------------------------------

    def _submit(self, plan: _Plan) -> None:
        captured = self._features.pop()
        refuse_packed({name: _host(value, np.int64) for name, value in captured.boundaries.items()}, plan.real)
        head_VH = head_weight(self._model)
        if is_sharded(head_VH):
            self.warn_once("sharded", "lm_head is sharded over ranks (FSDP, ZeRO-3), so rollouts cannot be scored")
            self._counts["failures"] += 1
            return
        # A first batch of another version means a resumed run: the service may know it by a head that we never saw.
        resumed = self._registered_version not in (None, plan.policy_version)
        self._registered_version = None
        if self._rank == 0 and (resumed or self._watch.moved(head_VH)):
            self._send_head(head_VH, plan.policy_version)
        staged = self._score(plan, captured, head_VH)
        metadata = wire.rollout_metadata(
            run=self.run,
            policy_version=plan.policy_version,
            rollout_ids=plan.rollout_ids,
            target_fingerprint=self.fingerprint,
            aux_layers=self.aux_layers,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            rewards=plan.rewards,
            drafter_version="" if self._drafter_version is None else self._drafter_version(),
            extra={
                "rank": str(self._rank),
                "world_size": str(self._world_size),
                "logprobs_source": "trainer" if plan.index.logprobs is None else "sampler",
            },
        )
        self._counts["captured_rollouts"] += len(plan.rollout_ids)
        self._counts["captured_tokens"] += len(plan.rows)
        self.sender.submit(
            lambda: staged.encode(metadata),
            size_bytes=staged.data_bytes,
            batch_id=wire.batch_id(self.run, plan.policy_version, plan.rollout_ids),
            policy_version=plan.policy_version,
        )

    def _score(self, plan: _Plan, captured: Any, head_VH: Tensor) -> StagedRollouts:
        """Normalisers and log p, from the head as it is now, of the rows whose next token the policy generated."""
        mask = plan.index.loss_mask
        scored = np.flatnonzero(mask) - 1
        device = captured.last.device
        at = _to_device(scored, device)
        next_ids = _to_device(plan.index.input_ids[scored + 1].astype(np.int64), device)
        lse, logp = score_rows(
            captured.last.index_select(0, at),
            head_VH,
            next_ids,
            temperature=plan.temperature,
            logit_map=self._logit_map,
        )
        logsumexp_N = torch.zeros(len(mask), dtype=torch.float32, device=device).index_copy_(0, at, lse)
        logprob_N = torch.zeros_like(logsumexp_N).index_copy_(0, at + 1, logp)
        return StagedRollouts(plan.index, captured, logsumexp_N, logprob_N, dtype=self.dtype)

    def _send_head(self, head_VH: Tensor, policy_version: int) -> None:
        body = head_body(head_VH, policy_version)
        size = head_VH.numel() * head_VH.element_size()
        job = Job("PUT", f"/runs/{quote(self.run, safe='')}/head", body, size, keep=True)
        if self.sender.submit_job(job):
            self._watch.mark(head_VH)
            self._counts["head_updates"] += 1


def _to_device(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _host(tensor: Tensor, dtype: type) -> npt.NDArray[Any]:
    return tensor.detach().cpu().numpy().astype(dtype)
