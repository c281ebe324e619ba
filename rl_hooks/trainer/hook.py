"""The hook for custom training loops: wrap the forward over a batch of rollouts; its features go to the service.

>>> hook = DrafterHook(model, "http://127.0.0.1:8400", run="my-run")
>>> with hook.capture(input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step, temperature=1.0):
...     loss = compute_loss(model, ids, mask)        # the forward that happens anyway
>>> hook.stats()

Only rows of sampled rollouts are copied. Their normalisers are computed inside the forward: from its own logits, or
where the trainer has the head whole (FSDP2 and ZeRO-3 have it whole nowhere else), and with no collective of ours. A
background thread sends them. Only whole rollouts are sent. No failure of ours reaches the trainer unless
`strict=True`: it is counted (`failures`), the newest is in `stats()["last_failure"]`, each kind is logged once, and the
step goes on without a rollout.

The forward must run with the weights that generated the rollouts, and with PEFT the adapter must be active.

Legend: B batch, S padded length, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from rl_hooks.sending.agreement import Agreement
from rl_hooks.sending.registration import is_sharded, policy_head, refuse_model_parallel, unwrap
from rl_hooks.trainer.base import HookOptions, TrainerHook
from rl_hooks.trainer.capture import FeatureCapture, dropping
from rl_hooks.trainer.own_scores import Kind, OwnRows, OwnScores, Scores
from rl_hooks.trainer.packing import check_forward, how_it_reads
from rl_hooks.trainer.plan import BatchPlan, CaptureArguments, checked_version, plan_batch
from rl_hooks.trainer.registrar import Registrar
from rl_hooks.trainer.staging import RolloutStaging, Targets
from rl_hooks.trainer.whole import WholeWeight

#: Said once where the head is gathered by hand, or split over the vocabulary.
NEVER_WHOLE: Final = (
    "no rank holds lm_head whole at any place of the forward: rollouts are sent without normalisers, which the service "
    "computes with the head that it has, and no head is sent from here. Let an engine's tap send it, or wrap lm_head "
    "with the root of the model"
)
#: Said once where the captured forward has dropout.
DROPPED: Final = (
    "the captured forward drops values at random ({name}), so its features and log-probabilities are not those of the "
    "policy that generated: set dropout to 0 (lora_dropout; disable_dropout=True of TRL), or capture a forward in "
    "eval mode"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(HookOptions):
    """`HookOptions`, and what `DrafterHook` is told besides."""

    #: Dotted paths to the decoder layers and the final norm of an unknown architecture.
    layers_path: str | None = None
    norm_path: str | None = None
    #: The model may return `log_probs` [B, S - 1], of every generated token at the temperature that `capture` is told,
    #: as in TRL's GRPO; then normalisers are made of them.
    own_log_probs: bool = False


class DrafterHook(TrainerHook):
    """Feature capture, sampling, registration and sending for one model and one run.

    `options` are the fields of `DrafterOptions`. Rank 0 registers the run, at once or (where the model is sharded
    already) in the first captured forward.
    """

    def __init__(self, model: nn.Module, url: str, **options: Any) -> None:
        told = DrafterOptions(**options)
        # Made before the hooks are registered: a refused model is left as it was found.
        refuse_model_parallel(model)
        waits = bool(told.rank) or is_sharded(policy_head(model))
        super().__init__(url, told, asks=not told.rank, waits_for_run=waits)
        self._closed = False
        self._model = model
        self._looked_for_dropout = False
        self._features = FeatureCapture(model, told.aux_layers, layers_path=told.layers_path, norm_path=told.norm_path)
        try:
            registration = self._registration(model, self._features.aux_layers, told.logit_map)
        except BaseException:
            self._features.close()
            raise
        head: Any = unwrap(model)
        lm_head = head.get_output_embeddings()
        named = f"lm_head ({type(lm_head).__name__}) of {type(head).__name__}"
        self._agreement = Agreement(registration.logit_map, named)
        self._staging = RolloutStaging(
            self.sender,
            self.tally,
            self.session,
            told,
            registration.fingerprint,
            self._features.aux_layers,
            registration.logit_map,
            self._agreement,
        )
        self._head: WholeWeight[Scores | Tensor | None] = WholeWeight(
            partial(policy_head, model), [self._features.norm, lm_head]
        )
        self._own = OwnScores([model, head], self._features.norm, lm_head, log_probs=told.own_log_probs)
        # Rank 0 registers the run, and sends the head for all.
        self._registrar = (
            None if told.rank else Registrar(model, registration, self.sender, self.tally, told.head_tolerance)
        )

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer, hooks inside the forward included."""
        return self.guard.seconds + self._features.hook_seconds + self._head.seconds + self._own.seconds

    @contextmanager
    def capture(self, **told: Any) -> Iterator[None]:
        """Capture the features of the one forward over `input_ids` that happens inside.

        `told` are the fields of `CaptureArguments`: `input_ids`, `loss_mask`, `policy_version`, and so on.
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
        plan = self.guard(plan_batch, self.ids, self._choice, arguments)
        # Copied before the forward: a copy inside would make the device wait.
        targets = None if plan is None else self.guard(self._staging.targets, plan, arguments.input_ids.device)
        if plan is None or targets is None:
            with self._unsampled(version):
                yield
            return
        score = partial(self._at_head, plan, targets, self._own.expected)
        try:
            with ExitStack() as armed:
                may_pad = plan.layout.packed and plan.layout.tree is None
                armed.enter_context(
                    self._features.armed(rows=targets.rows, shape=plan.layout.forward_shape, packed=may_pad)
                )
                armed.enter_context(self._head.armed(score, self._features.is_past_norm))
                score_logits = partial(self._staging.score_logits, plan, targets)
                see = partial(self._staging.see_logits, targets)
                rows = plan.rows[plan.scored()[0]]
                armed.enter_context(self._own.armed(rows, score_logits, see, self._features.is_past_norm))
                if self._registrar is not None:
                    armed.enter_context(self._registrar.armed())
                yield
            self.guard(self._submit, plan, targets)
        finally:  # where the trainer's forward raises too: the device's memory is the trainer's
            self._features.clear()
            self._head.clear()
            self._own.clear()
            self._agreement.clear()

    def stats(self) -> dict[str, Any]:
        """As of any hook, and the wall time that it took from the trainer."""
        return super().stats() | {"overhead_seconds": self.overhead_seconds}

    def metrics(self) -> dict[str, float]:
        """As of any hook, and the wall time that it took from the trainer."""
        return super().metrics() | {"draftalign/overhead_seconds": self.overhead_seconds}

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Remove the hooks, then flush and stop the sender. True if nothing was lost."""
        self._closed = True
        self._features.close()
        self._head.close()
        self._own.close()
        if self._registrar is not None:
            self._registrar.close()
        return self.sender.close(timeout_seconds)

    # --- in the forward: score; after it: stage, queue --------------------------------------------------------------

    @contextmanager
    def _unsampled(self, policy_version: int) -> Iterator[None]:
        """Around a forward of which no rollout is sent: rank 0 speaks for the ranks that send some."""
        registrar = self._registrar
        if registrar is None or not registrar.wants(policy_version):
            yield
            return
        with self._head.armed(partial(registrar.saw, policy_version=policy_version)), registrar.armed():
            yield
        self.guard(self._head.pop)
        self.guard(registrar.check)

    def _at_head(
        self, plan: BatchPlan, targets: Targets, expected: Kind | None, head_VH: Tensor
    ) -> Scores | Tensor | None:
        """The head is whole: tell the service of it, and do what scoring takes of it."""
        if self._registrar is not None:
            self._registrar.saw(head_VH, plan.policy_version)
        self._staging.see_head(targets, self._features.normed(), head_VH)
        if expected == "logits":
            return None
        work = self._staging.score if expected is None else self._staging.chosen_logits
        return work(plan, targets, self._features.normed(), head_VH)

    def _submit(self, plan: BatchPlan, targets: Targets) -> None:
        captured, of_head, own = self._features.pop(), self._head.pop(), self._own.pop()
        if isinstance(of_head, Tensor):  # the logits of the tokens, to whose log-probabilities they belong
            scored = self._staging.score_log_probs(plan, targets, own, of_head) if isinstance(own, OwnRows) else None
        else:
            scored = own if isinstance(own, tuple) else of_head
        self._agreement.compare(plan.temperature)
        if self._registrar is not None:
            self._registrar.check()
        if self._model.training and not self._looked_for_dropout:
            self._looked_for_dropout = True  # once: a large model has many modules
            if name := dropping(self._model):
                self.tally.warn("dropout", DROPPED.format(name=name))
        attention, recurrent = how_it_reads(self._model)
        check_forward(captured.boundaries, plan.layout, attention, recurrent=recurrent)
        if scored is None:
            refuse_model_parallel(self._model)  # it may have been split after the hook was attached
            self.tally.warn("sharded", NEVER_WHOLE)
        self._staging.submit(plan, captured, scored, targets.scored)
