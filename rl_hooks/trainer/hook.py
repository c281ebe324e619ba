"""The hook for custom training loops: wrap the forward over a batch of rollouts; its features go to the service.

>>> hook = DrafterHook(model, "http://127.0.0.1:8400", run="my-run")
>>> with hook.capture(input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step, temperature=1.0):
...     loss = compute_loss(model, ids, mask)        # the forward that happens anyway
>>> hook.stats()

The forward must run with the weights that generated the rollouts, and with PEFT the adapter must be active.

Only rows of sampled rollouts are copied. Their normalisers are computed inside the forward: from its own logits, or
where the trainer has the whole head (FSDP2 and ZeRO-3 have it nowhere else). That takes no collective of ours. A
background thread sends whole rollouts; one that is too long for a file is cut (`cut_long`).

No failure of ours reaches the trainer unless `strict=True`. It is counted (`failures`), the newest is in
`stats()["last_failure"]`, each kind is logged once, and the step goes on without its rollouts.

Legend: B batch, S padded length, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypedDict, Unpack

from torch import Tensor, nn

from rl_hooks.sending.agreement import Agreement
from rl_hooks.sending.features import Captured
from rl_hooks.sending.registration import is_sharded, policy_head, refuse_model_parallel, unwrap
from rl_hooks.trainer.base import HookKeywords, HookOptions, TrainerHook
from rl_hooks.trainer.capture import FeatureCapture, dropping
from rl_hooks.trainer.own_scores import Kind, OwnRows, OwnScores, Scores
from rl_hooks.trainer.packing import check_forward, how_it_reads
from rl_hooks.trainer.plan import BatchPlan, CaptureArguments, CaptureKeywords, checked_version, plan_batch
from rl_hooks.trainer.registrar import Registrar
from rl_hooks.trainer.staging import RolloutStaging, Targets
from rl_hooks.trainer.whole import WholeWeight

#: Logged once if the head is gathered by hand, or split over the vocabulary.
NEVER_WHOLE: Final = (
    "no rank holds lm_head whole at any place of the forward: rollouts are sent without normalisers, which the service "
    "computes with the head that it has, and no head is sent from here. Let an engine's tap send it, or wrap lm_head "
    "with the root of the model"
)
#: Logged once if the captured forward has dropout.
DROPPED: Final = (
    "the captured forward drops values at random ({name}), so its features and log-probabilities are not those of the "
    "policy that generated: set dropout to 0 (lora_dropout; disable_dropout=True of TRL), or capture a forward in "
    "eval mode"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(HookOptions):
    """`HookOptions`, and the further options of `DrafterHook`."""

    #: Dotted paths to the decoder layers and the final norm of an unknown architecture.
    layers_path: str | None = None
    norm_path: str | None = None
    #: Whether the model may return `log_probs` [B, S - 1] of every generated token, at the temperature that `capture`
    #: gets, as in TRL's GRPO. Normalisers are then computed from them.
    own_log_probs: bool = False


class PathKeywords(TypedDict, total=False):
    """Paths to the captured modules of an unknown architecture."""

    layers_path: str | None
    norm_path: str | None


class DrafterKeywords(HookKeywords, PathKeywords, total=False):
    """The names and types of `DrafterOptions`."""

    own_log_probs: bool


class ForwardReader:
    """The hooks on one model. They take features, the forward's own scores and the whole head of an armed forward."""

    def __init__(
        self,
        model: nn.Module,
        features: FeatureCapture,
        agreement: Agreement,
        staging: RolloutStaging,
        registrar: Registrar | None,
        *,
        own_log_probs: bool,
    ) -> None:
        inner: Any = unwrap(model)
        lm_head = inner.get_output_embeddings()
        self.features, self.agreement = features, agreement
        self._staging, self._registrar = staging, registrar
        self.head: WholeWeight[Scores | Tensor | None] = WholeWeight(
            partial(policy_head, model), [features.norm, lm_head]
        )
        self.own = OwnScores([model, inner], features.norm, lm_head, log_probs=own_log_probs)

    @property
    def seconds(self) -> float:
        """Wall time of all work inside forwards."""
        return self.features.hook_seconds + self.head.seconds + self.own.seconds

    @contextmanager
    def armed(self, plan: BatchPlan, targets: Targets) -> Iterator[None]:
        """Read the one forward that happens inside."""
        staging, layout, is_past_norm = self._staging, plan.layout, self.features.is_past_norm
        may_pad = layout.packed and layout.tree is None
        at_head = partial(self._at_head, plan, targets, self.own.expected)
        score, see = partial(staging.score_logits, plan, targets), partial(staging.see_logits, targets)
        with (
            self.features.armed(rows=targets.rows, shape=layout.forward_shape, packed=may_pad),
            self.head.armed(at_head, is_past_norm),
            self.own.armed(plan.rows[plan.scored()[0]], score, see, is_past_norm),
            nullcontext() if self._registrar is None else self._registrar.armed(),
        ):
            yield

    @contextmanager
    def armed_for_head(self, policy_version: int) -> Iterator[None]:
        """Read the head of a forward without sent rollouts: rank 0 registers the run and sends the head, for all."""
        registrar = self._registrar
        if registrar is None or not registrar.wants(policy_version):
            yield
            return
        with self.head.armed(partial(registrar.saw, policy_version=policy_version)), registrar.armed():
            yield

    def pop_head(self) -> None:
        """Raise the error of a forward that was armed for its head."""
        try:
            self.head.pop()
        finally:
            if self._registrar is not None:
                self._registrar.check()

    def pop(self, plan: BatchPlan, targets: Targets) -> tuple[Captured, Scores | None]:
        """Features and scores of the forward. Raises its error."""
        captured, of_head, own = self.features.pop(), self.head.pop(), self.own.pop()
        if isinstance(of_head, Tensor):  # logits of the tokens, which go with the model's log-probabilities
            scored = self._staging.score_log_probs(plan, targets, own, of_head) if isinstance(own, OwnRows) else None
        else:
            scored = own if isinstance(own, tuple) else of_head
        self.agreement.compare(plan.temperature)
        if self._registrar is not None:
            self._registrar.check()
        return captured, scored

    def clear(self) -> None:
        """Let go of everything from the last forward."""
        for part in (self.features, self.head, self.own, self.agreement):
            part.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for part in (self.features, self.head, self.own, self._registrar):
            if part is not None:
                part.close()

    def _at_head(
        self, plan: BatchPlan, targets: Targets, expected: Kind | None, head_VH: Tensor
    ) -> Scores | Tensor | None:
        """Register the run or send the head, which is whole now, and do the part of scoring that needs it."""
        if self._registrar is not None:
            self._registrar.saw(head_VH, plan.policy_version)
        self._staging.see_head(targets, self.features.normed(), head_VH)
        if expected == "logits":
            return None
        work = self._staging.score if expected is None else self._staging.chosen_logits
        return work(plan, targets, self.features.normed(), head_VH)


class DrafterHook(TrainerHook):
    """Feature capture, sampling, registration and sending for one model and one run.

    `model`: the policy, before `torch.compile`. `options` are the fields of `DrafterOptions`. Close it, or use `with`:
    else what is queued at the end is lost. Rank 0 registers the run, at once or (where the model is sharded already)
    in the first captured forward. Raises `UnsupportedModelError` and `AuxLayersError` for a model it cannot read, and
    ValueError for an option out of range. Later only `capture` raises, TypeError for a wrong keyword, unless `strict`.
    """

    def __init__(self, model: nn.Module, url: str, **options: Unpack[DrafterKeywords]) -> None:
        told = DrafterOptions(**options)
        # Before any hook is registered, so that a refused model is left as it was.
        refuse_model_parallel(model)
        waits = bool(told.rank) or is_sharded(policy_head(model))
        super().__init__(url, told, asks=not told.rank, waits_for_run=waits)
        self._closed = False
        self._model = model
        self._looked_for_dropout = False
        features = FeatureCapture(model, told.aux_layers, layers_path=told.layers_path, norm_path=told.norm_path)
        layers = features.aux_layers
        register = partial(self._registration, model, layers, told.logit_map)
        try:
            run = register()
        except BaseException:
            features.close()
            raise
        inner: Any = unwrap(model)
        named = f"lm_head ({type(inner.get_output_embeddings()).__name__}) of {type(inner).__name__}"
        agreement = Agreement(run.logit_map, named)
        self._staging = RolloutStaging(
            self.sender, self.tally, self.session, told, run.fingerprint, layers, run.logit_map, agreement
        )
        # Rank 0 registers the run, and sends the head for all.
        about = (self.sender, self.tally, self.session, told.head_tolerance)
        self._registrar = None if told.rank else Registrar(model, register, run, *about)
        self._reader = ForwardReader(
            model, features, agreement, self._staging, self._registrar, own_log_probs=told.own_log_probs
        )

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer, including hooks inside the forward."""
        return self.guard.seconds + self._reader.seconds

    @contextmanager
    def capture(self, **told: Unpack[CaptureKeywords]) -> Iterator[None]:
        """Capture the features of the one forward over `input_ids` that happens inside.

        `told` are the fields of `CaptureArguments`: `input_ids`, `loss_mask`, `policy_version`, and so on. An unknown
        or missing name raises TypeError. What else is wrong is counted (`failures`, `dropped_error`), and not sent.
        """
        arguments = CaptureArguments(**told)
        if self._closed:
            self.tally.warn("closed", "`capture` was called after `close`: nothing is captured any more")
        stopped = self.sender.refused or self._closed
        version = None if stopped else self.guard(checked_version, arguments.policy_version)
        if version is None:
            yield
            return
        self.session.saw(version)
        if self._registrar is not None:
            self.guard(self._registrar.renew, version)
        plan = self.guard(plan_batch, self.ids, self._choice, arguments)
        # Copied before the forward, because a copy inside would make the device wait.
        targets = None if plan is None else self.guard(self._staging.targets, plan, arguments.input_ids.device)
        if plan is None or targets is None:
            with self._reader.armed_for_head(version):
                yield
            self.guard(self._reader.pop_head)
            return
        try:
            with self._reader.armed(plan, targets):
                yield
            self.guard(self._submit, plan, targets)
        finally:  # also if the trainer's forward raises: the trainer needs the device's memory
            self._reader.clear()

    def stats(self) -> dict[str, Any]:
        """As of any hook, and the wall time that it took from the trainer."""
        return super().stats() | {"overhead_seconds": self.overhead_seconds}

    def metrics(self) -> dict[str, float]:
        """As of any hook, and the wall time that it took from the trainer."""
        return super().metrics() | {"draftalign/overhead_seconds": self.overhead_seconds}

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Remove the hooks, send what is queued as `flush` does, drop the rest. True if that was nothing."""
        self._closed = True
        self._reader.close()
        return super().close(timeout_seconds)

    def _submit(self, plan: BatchPlan, targets: Targets) -> None:
        captured, scored = self._reader.pop(plan, targets)
        if self._model.training and not self._looked_for_dropout:
            self._looked_for_dropout = True  # only once, because a large model has many modules
            if name := dropping(self._model):
                self.tally.warn("dropout", DROPPED.format(name=name))
        attention, recurrent = how_it_reads(self._model)
        check_forward(captured.boundaries, plan.layout, attention, recurrent=recurrent)
        if scored is None:
            refuse_model_parallel(self._model)  # it may have been split after the hook was attached
            self.tally.warn("sharded", NEVER_WHOLE)
        self._staging.submit(plan, captured, scored, targets.scored)
