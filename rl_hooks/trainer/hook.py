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

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.sending.agreement import Agreement
from rl_hooks.sending.features import FeatureDtype, checked_dtype
from rl_hooks.sending.registration import RunRegistration, is_sharded, policy_head, refuse_model_parallel, unwrap
from rl_hooks.sending.sender import QUEUE_BYTES, RolloutSender
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.capture import FeatureCapture, dropping
from rl_hooks.trainer.guard import TrainerGuard
from rl_hooks.trainer.own_scores import Kind, OwnRows, OwnScores, Scores
from rl_hooks.trainer.packing import check_forward, how_it_reads
from rl_hooks.trainer.plan import BatchPlan, RolloutChoice, RolloutIds, checked_version, plan_batch
from rl_hooks.trainer.registrar import Registrar
from rl_hooks.trainer.session import Session
from rl_hooks.trainer.staging import COUNTERS, RolloutStaging, Targets
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


class DrafterHook:
    """Feature capture, sampling, registration and sending for one model and one run.

    `token`: of scope write; None: DRAFTALIGN_TOKEN of the environment.

    `sample_fraction` and `max_tokens_per_step` bound the tokens sent per policy version and rank. `dtype`: how the
    auxiliary states are sent ("float8_e4m3" halves them, with one scale per token and layer). `head_tolerance`: the
    relative change of `lm_head` after which it is sent again. `drafter_version`: called at each capture; returns the
    version that drafted these rollouts, so that replay α is measured with that drafter. `logit_map`: what the model
    does to its logits after lm_head, for models that this package does not know. `own_log_probs`: the model may return
    `log_probs` [B, S - 1], of every generated token at the temperature that `capture` is told, as in TRL's GRPO; then
    normalisers are made of them. `rank` 0 registers the run, at once or (where the model is sharded already) in the
    first captured forward; the other ranks wait until it exists.
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
        queue_bytes: int = QUEUE_BYTES,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 120.0,
        drafter_version: Callable[[], str] | None = None,
        logit_map: wire.LogitMap | None = None,
        own_log_probs: bool = False,
        strict: bool = False,
    ) -> None:
        if not wire.RUN_NAME.fullmatch(run):
            raise ValueError(f"run: {run!r} is no run's name: 1 to 64 of A-Z a-z 0-9 . _ - after a letter or digit")
        policy_version, dtype = checked_version(policy_version), checked_dtype(dtype)
        self._closed = False
        #: Counters, and the newest failure.
        self.tally = Tally(logging.getLogger("rl_hooks"), *COUNTERS)
        #: Runs our own work: times it, and keeps its failures from the trainer.
        self.guard = TrainerGuard(self.tally, strict=strict)
        self._choice = RolloutChoice(sample_fraction, max_tokens_per_step, self.tally)
        #: Names rollouts.
        self.ids = RolloutIds(rank)
        self._model = model
        self._looked_for_dropout = False
        self.run = run
        # Made before the hooks are registered: a refused model is left as it was found.
        refuse_model_parallel(model)
        sharded = is_sharded(policy_head(model))
        wait_for_run = frozenset({404}) if rank or sharded else frozenset()
        self.sender = RolloutSender(
            url,
            run=run,
            token=token,
            queue_bytes=queue_bytes,
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
            retry_statuses=wait_for_run,
            asks=not rank,
        )
        self._features = FeatureCapture(model, aux_layers, layers_path=layers_path, norm_path=norm_path)
        try:
            registration = RunRegistration(
                model,
                aux_layers=self._features.aux_layers,
                policy_version=policy_version,
                draft_vocab_size=draft_vocab_size,
                initial_drafter=None if rank else initial_drafter,  # rank 0 sends it; no other node needs the folder
                logit_map=logit_map,
            )
        except BaseException:
            self._features.close()
            raise
        session = Session(run, rank, world_size)
        registration.metadata |= session.of_run()
        head: Any = unwrap(model)
        lm_head = head.get_output_embeddings()
        named = f"lm_head ({type(lm_head).__name__}) of {type(head).__name__}"
        self._agreement = Agreement(registration.logit_map, named)
        self._staging = RolloutStaging(
            sender=self.sender,
            tally=self.tally,
            target_fingerprint=registration.fingerprint,
            aux_layers=self._features.aux_layers,
            logit_map=registration.logit_map,
            dtype=dtype,
            rank=rank,
            world_size=world_size,
            session=session,
            drafter_version=drafter_version,
            agreement=self._agreement,
        )
        self._head: WholeWeight[Scores | Tensor | None] = WholeWeight(
            partial(policy_head, model), [self._features.norm, lm_head]
        )
        self._own = OwnScores([model, head], self._features.norm, lm_head, log_probs=own_log_probs)
        # Rank 0 registers the run, and sends the head for all.
        self._registrar = None if rank else Registrar(model, registration, self.sender, self.tally, head_tolerance)

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer, hooks inside the forward included."""
        return self.guard.seconds + self._features.hook_seconds + self._head.seconds + self._own.seconds

    @contextmanager
    def capture(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        loss_mask: Tensor,
        policy_version: int,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        tree_places: Tensor | None = None,
        logprobs: Tensor | None = None,
        rewards: Sequence[float] | Tensor | None = None,
        temperature: float = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        rollout_ids: Sequence[str] | None = None,
        strata: Sequence[str] | None = None,
        prompt_hashes: Sequence[str] | None = None,
    ) -> Iterator[None]:
        """Capture the features of the one forward over `input_ids` that happens inside.

        All of `input_ids`, `attention_mask`, `loss_mask` and `logprobs` are [B, S], padded on either side or both.
        `loss_mask` is 1 where the policy generated the token itself. `logprobs[b, s]` is log p of `input_ids[b, s]`
        under the distribution it was sampled from; those left out or NaN are recomputed from the features. `strata`
        says of which kind each row's prompt is (its source, say): another mix of kinds is then no drift.
        `prompt_hashes` tell prompts apart whose tokens are the same (`wire.prompt_hash` of what does): rollouts of a
        prompt that was trained on judge no drafter.

        A packed row [1, T] holds several rollouts. Say where they begin by `cu_seqlens` [R + 1], or by `position_ids`
        that begin again at 0, or give nested tensors. `rewards` and the like then have one entry per rollout. The
        forward may pad the row at its end, and must keep the rollouts apart: what it says of itself is compared.

        `tree_places` int64 [T]: where the forward has each token of this row, if it is over a prefix tree, [1, N]: what
        several rollouts begin with is there once. `input_ids` and the like then hold each rollout whole.
        """
        if self._closed:
            self.tally.warn("closed", "`capture` was called after `close`: nothing is captured any more")
        version = None if self.sender.refused or self._closed else self.guard(checked_version, policy_version)
        if version is None:
            yield
            return
        self._staging.session.saw(version)
        plan = self.guard(
            plan_batch,
            self.ids,
            self._choice,
            input_ids=input_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            tree_places=tree_places,
            logprobs=logprobs,
            rewards=rewards,
            strata=strata,
            rollout_ids=rollout_ids,
            policy_version=version,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            prompt_hashes=prompt_hashes,
        )
        # Copied before the forward: a copy inside would make the device wait.
        targets = None if plan is None else self.guard(self._staging.targets, plan, input_ids.device)
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

    @property
    def session(self) -> Session:
        """What tells this start of the trainer from others."""
        return self._staging.session

    def stats(self) -> dict[str, Any]:
        """Counters of the hook and of its sender, and how the run stands (`run_stands`; rank 0 asks the service)."""
        own = {**self.tally.counts(), "last_failure": self.tally.last_error, "overhead_seconds": self.overhead_seconds}
        return own | self.sender.stats() | {"run_stands": self.sender.standing()}

    def metrics(self) -> dict[str, float]:
        """Numbers for the trainer's own log, `draftalign/...`: `wandb.log(hook.metrics())`. No network, no waiting.

        What the service has not said within a minute is left out, and so is what it does not know.
        """
        return self.sender.metrics() | {"draftalign/overhead_seconds": self.overhead_seconds}

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything captured was sent or dropped."""
        return self.sender.flush(timeout_seconds)

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
