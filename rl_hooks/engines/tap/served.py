"""The policy that an engine serves, as a run's registration sees a trainer's, and the run as that engine sends it.

The registration goes out first: config, embedding and head, and the drafter that the engine was started with. Then
rollouts with features, and the head again when it has moved.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from rl_hooks.engines.policy_watch import WeightSample
from rl_hooks.engines.ranks import Joiner, LayerRanks, slice_of
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.tap.collected import Batcher, Collected, rollout_file
from rl_hooks.engines.tap.feature_tap import FeatureTap, TapUnsupportedError
from rl_hooks.engines.tap.rows import Head
from rl_hooks.sending.jobs import Job
from rl_hooks.sending.registration import (
    HeadWatch,
    RunRegistration,
    head_job,
    head_weight,
    known_logit_map,
    target_config,
)
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.wire import LogitMap

#: Where vLLM and SGLang look for the embedding that a drafter shares; gpt-oss has the second in vLLM.
_EMBEDDINGS: Final = ("model.embed_tokens", "model.embedding")
#: The head is sent again when it has moved by more than this, relative to its norm, as a trainer's hook does.
HEAD_TOLERANCE: Final = 0.005


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of the embedding or head that one rank holds, from token `begin` on. Views of the policy's own memory."""

    weight: Tensor
    padded: Tensor  # with the rows that the engine adds
    begin: int

    @classmethod
    def of(cls, padded: Tensor, rows: int, begin: int = 0) -> Self:
        """The first `rows` rows are tokens."""
        padded = padded.detach()
        return cls(padded[:rows], padded, begin)


class ServedPolicy(nn.Module):
    """The served model as the registration sees a trainer's: its transformers config, embedding and head."""

    def __init__(self, config: Any, embedding: Matrix, head: Matrix) -> None:
        super().__init__()
        self.config, self.embedding, self.head = config, embedding, head

    @classmethod
    def on(cls, ranks: LayerRanks, config: Any, model: nn.Module) -> Self:
        """With what this rank holds of both matrices."""
        rows = int(config.vocab_size)
        embedding = _weight(_module(model, *_EMBEDDINGS), rows, ranks)
        head = embedding if config.tie_word_embeddings else _weight(_module(model, "lm_head"), rows, ranks)
        return cls.named(config, model)(config, embedding, head)

    def whole(self, ranks: LayerRanks) -> Self | None:
        """With all of both matrices, gathered to the first rank's host; None on other ranks. All ranks call it."""
        rows = int(self.config.vocab_size)
        embedding = ranks.whole(self.embedding.padded, rows)
        head = embedding if self.head is self.embedding else ranks.whole(self.head.padded, rows)
        if embedding is None or head is None:
            return None
        first = Matrix.of(embedding, rows)
        return type(self)(self.config, first, first if head is embedding else Matrix.of(head, rows))

    def with_head(self, before: Self | None, ranks: LayerRanks) -> Self | None:
        """`before`, what `whole` has returned, with the head as it is now. All ranks call it."""
        rows = int(self.config.vocab_size)
        head = ranks.whole(self.head.padded, rows)
        if head is None or before is None:
            return None
        first = Matrix.of(head, rows)
        return type(self)(self.config, first if self.head is self.embedding else before.embedding, first)

    @classmethod
    def named(cls, config: Any, model: nn.Module) -> type[Self]:
        """A class by the architecture's name, by which the registration finds the map of its logits."""
        architectures = getattr(config, "architectures", None) or [type(model).__name__]
        return type(str(architectures[0]), (cls,), {})

    @property
    def logit_map(self) -> LogitMap:
        """What the policy does to its logits after the head. Raises `UnsupportedModelError`."""
        config = target_config(self)
        config.pop("dim_model_base", None)  # MiniCPM's states come divided (vLLM's minicpm.py, `scale_width`)
        return known_logit_map(self, config)

    def get_input_embeddings(self) -> Matrix:
        """The matrix with the weight [V, H]."""
        return self.embedding

    def get_output_embeddings(self) -> Matrix:
        """The matrix with the weight [V, H]."""
        return self.head


def _module(model: nn.Module, *paths: str) -> nn.Module:
    """The first of these modules that exists."""
    for path in paths:
        with contextlib.suppress(AttributeError):
            return model.get_submodule(path)
    raise TapUnsupportedError(f"{type(model).__name__} has no {' or '.join(paths)}")


def _weight(module: nn.Module, rows: int, ranks: LayerRanks) -> Matrix:
    weight: Any = getattr(module, "weight", None)
    begin, count = (0, rows) if ranks.size == 1 else slice_of(module)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[0] < count or not weight.is_floating_point():
        raise TapUnsupportedError("the policy's embedding or head is quantised or packed, and cannot be read")
    return Matrix.of(weight, count, begin)


class ServedRun:
    """A run as one engine sends it, on each rank that holds a part of the policy; the first one sends.

    `policy`: returns the policy with what this rank holds now. `drafter`: finds the one that the engine was started
    with. `version`: of the weights. `joined`: the run is registered already, perhaps with the head of other weights.
    `answers_only`: as for `FeatureTap`; then steps bring their scores, as they do with several ranks. The constructor,
    `settled` and `send_head` are collectives.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        policy: Callable[[], ServedPolicy],
        ranks: LayerRanks,
        layers: Sequence[int],
        drafter: Callable[[], Path | None],
        weights: WeightSample,
        version: int,
        moved: Callable[[], None],
        *,
        joined: bool,
        answers_only: bool = False,
    ) -> None:
        self.policy, self._ranks, self.version, self._run = policy, ranks, version, settings.run
        self._scored = answers_only or ranks.size > 1
        with ranks.together():
            own = policy()
            self.logit_map = own.logit_map
            self._heads = HeadWatch(head_weight(own), HEAD_TOLERANCE, -1 if joined else version)
        whole = own.whole(ranks)
        self.sender: RolloutSender | None = None
        with ranks.together():
            if whole is not None:
                registration = RunRegistration(
                    whole,
                    aux_layers=layers,
                    policy_version=version,
                    initial_drafter=drafter(),
                    logit_map=self.logit_map,
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
        sender = self.sender
        bounds = (math.inf, math.inf) if sender is None else (sender.file_bytes, sender.rollout_bytes)
        self.batcher = Batcher(self._send, file_bytes=bounds[0], rollout_bytes=bounds[1])
        self.tap = FeatureTap(
            self._head(),
            self.batcher.add,
            fraction=settings.sample_fraction if sender else 0.0,
            tokens_per_minute=settings.tokens_per_minute,
            weights=weights,
            policy_version=version,
            moved=moved,
            answers_only=answers_only,
        )
        self.batcher.tally = self.tap.tally

    @property
    def refused(self) -> bool:
        """Whether the run is another policy's, closed or not there, as the service said."""
        return self.sender is not None and self.sender.refused

    def settled(self, version: int, *, tainted: bool, again: bool = False) -> None:
        """The weights are of this version now. `tainted`: they changed under requests, unannounced.

        `again`: collect again after a cut, although the number is the same. Else another policy may have it: vLLM's
        weights may be counted as the number by which later ones are named.

        Ranks gather a head that has moved here: all of them call this, whatever the service has said to the first.
        """
        if self.refused:
            self.tap.cut()  # for good
            if self._ranks.size == 1:
                return
        if version == self.version and not (again and self.tap.policy_version is None):
            return
        self.version = version
        if not tainted:
            self.tap.cut()
        job = self._head_job()
        if not self.refused:
            self.tap.turn(version, self._head(), lambda: self._turned(job))

    def send_head(self) -> None:
        """Send the head, if it is due."""
        self._submit(self._head_job())

    def _turned(self, head: Job | None) -> None:
        # In the tap's thread: rollouts of older policies are queued first, because none of them needs this head.
        self.batcher.flush()
        self._submit(head)

    def _submit(self, head: Job | None) -> None:
        if head is not None and self.sender is not None:
            self.sender.submit_job(head)

    def _head_job(self) -> Job | None:
        with self._ranks.together():
            own = self.policy()
            due = self._heads.is_due(head_weight(own), self.version)
        if self._ranks.all_agree(ok=not due):
            return None
        self._heads.mark(head_weight(own))
        whole = own.whole(self._ranks)
        return None if whole is None else head_job(self._run, head_weight(whole), self.version)

    def _head(self) -> Head:
        return Head(torch.empty(0) if self._scored else head_weight(self.policy()), self.logit_map)

    def _send(self, batch: Sequence[Collected]) -> None:
        assert self.sender is not None  # noqa: S101 - other ranks collect nothing
        told = "versions_behind" in self.sender.optional_tensors
        parts, _ = self._file(batch, last_rows=self.sender.last_rows, told=told)
        self.sender.submit(parts)

    def close(self, seconds: float, joiner: Joiner | None = None) -> None:
        """Send what was collected, for these seconds and one more at most. The log says how much was not.

        `joiner`: of the scores that the tap waits for.
        """
        began = time.monotonic()
        for part in (self.tap, joiner, self.batcher, self.sender):
            if part is not None:
                part.close(max(0.0, began + seconds - time.monotonic()))

    def counts(self) -> dict[str, Any]:
        """Counters of the tap and of its sender."""
        stats = {} if self.sender is None else self.sender.stats()
        return {**self.tap.tally.counts(), **{f"sender_{name}": value for name, value in stats.items()}}
