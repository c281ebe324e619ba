"""What one SGLang server sends: the run's registration, rollouts with features, and the head when it has moved.

As vLLM's tap (`rl_hooks.engines.vllm.tap`), of whose parts it is made. Its methods are called by the scheduler's thread
(`rl_hooks.engines.sglang.tap`); requests go out from threads of their own.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rl_hooks.engines.collected import Batcher, Collected, rollout_file
from rl_hooks.engines.rows import Head
from rl_hooks.engines.sglang.updates import PolicyUpdates
from rl_hooks.engines.tap import HEAD_TOLERANCE, FeatureTap, ServiceSettings
from rl_hooks.engines.vllm.policy import ServedPolicy
from rl_hooks.engines.vllm.steps import TapUnsupportedError
from rl_hooks.sending.jobs import Job
from rl_hooks.sending.registration import HeadWatch, RunRegistration, head_job, head_weight
from rl_hooks.sending.sender import RolloutSender

_CLOSE_SECONDS: Final = 2.0


class ServedRun:
    """A run as one server sends it. The constructor copies embedding and head to the host.

    `served`: returns the policy as it is now. `version`: of its weights. `joined`: the run is registered already,
    perhaps with the head of other weights. `split`: the head is split over ranks, so steps bring their scores.
    """

    def __init__(
        self,
        served: Callable[[], ServedPolicy],
        layers: Sequence[int],
        drafter: Path,
        settings: ServiceSettings,
        updates: PolicyUpdates,
        version: int,
        *,
        joined: bool,
        split: bool = False,
    ) -> None:
        self._served, self._run = served, settings.run
        #: Of the weights.
        self.version = version
        policy = served()
        self._logit_map, self._split = policy.logit_map, split
        self._heads = HeadWatch(head_weight(policy), HEAD_TOLERANCE, -1 if joined else version)
        registration = RunRegistration(
            policy, aux_layers=layers, policy_version=version, initial_drafter=drafter, logit_map=self._logit_map
        )
        self._file = functools.partial(
            rollout_file,
            run=settings.run,
            target_fingerprint=registration.fingerprint,
            aux_layers=tuple(layers),
            source=uuid.uuid4().hex,
        )
        self.sender = RolloutSender(settings.url, run=settings.run, token=settings.token)
        self.sender.submit_job(registration.job(settings.run))
        self.batcher = Batcher(self._send, file_bytes=self.sender.file_bytes, rollout_bytes=self.sender.rollout_bytes)
        self.tap = FeatureTap(
            self._head(),
            self.batcher.add,
            fraction=settings.sample_fraction,
            tokens_per_minute=settings.tokens_per_minute,
            weights=updates.weights,
            policy_version=version,
            moved=updates.notice,
            answers_only=split,
        )
        self.batcher.tally = self.tap.tally
        updates.changing, updates.leaving = self.tap.cut, self.tap.flush
        if (job := self._head_job(version)) is not None:
            self.sender.submit_job(job)

    def turn(self, version: int | None, *, tainted: bool) -> None:
        """The weights are of this version now. `tainted`: they changed under requests, unannounced."""
        if version is None or (version == self.version and self.tap.policy_version is not None):
            return
        self.version = version
        if not tainted:
            self.tap.cut()
        job = self._head_job(version)
        self.tap.turn(version, self._head(), lambda: self._turned(job))

    def _turned(self, head: Job | None) -> None:
        # In the tap's thread: rollouts of older policies are queued first, because none of them needs this head.
        self.batcher.flush()
        if head is not None:
            self.sender.submit_job(head)

    def _head_job(self, version: int) -> Job | None:
        weight = head_weight(self._served())
        if not self._heads.is_due(weight, version):
            return None
        self._heads.mark(weight)
        return head_job(self._run, weight, version)

    def _head(self) -> Head:
        if self._split:
            return Head(torch.empty(0), self._logit_map)  # never read
        return Head(head_weight(self._served()), self._logit_map)

    def _send(self, batch: Sequence[Collected]) -> None:
        parts, _ = self._file(batch, last_rows=self.sender.last_rows)
        self.sender.submit(parts)

    def abandon(self) -> None:
        """Collect nothing more; what was collected is sent by the threads."""
        self.tap.drop()

    def close(self) -> None:
        """Send what was collected, for some seconds at most."""
        self.tap.drop()
        self.tap.close(_CLOSE_SECONDS)
        self.batcher.close(_CLOSE_SECONDS)
        self.sender.close(_CLOSE_SECONDS)

    def counts(self) -> dict[str, int]:
        """Counters of the tap and of its sender."""
        sender = {f"sender_{name}": value for name, value in self.sender.stats().items() if isinstance(value, int)}
        return {**self.tap.tally.counts(), **sender}


def captured_layers(model: nn.Module) -> tuple[int, ...]:
    """The layers whose input SGLang's policy hands to the drafter, in the order in which it packs them."""
    for module in model.modules():
        layers = getattr(module, "layers_to_capture", None)
        if isinstance(layers, list | tuple) and layers:
            return tuple(sorted(int(layer) for layer in layers))
    raise TapUnsupportedError(f"{type(model).__name__} does not say which layers it hands to the drafter")


def keep_final_states(model: nn.Module) -> None:
    """Have the policy's `LogitsProcessor` return the final states of all rows, beside the auxiliary ones.

    Must be called before CUDA graphs are captured: then SGLang makes them an output of its graphs.
    """
    kept = [module for module in model.modules() if hasattr(module, "keep_last_hidden_states")]
    if not kept:
        raise TapUnsupportedError(
            "this SGLang's LogitsProcessor cannot return the final states beside the auxiliary ones (0.5.23 can)"
        )
    for module in kept:
        module.keep_last_hidden_states = True  # type: ignore[assignment]


def stats_text(counts: dict[str, Any]) -> str:
    """Counters other than 0, for a line of the log."""
    return ", ".join(f"{name} {value}" for name, value in sorted(counts.items()) if value)
