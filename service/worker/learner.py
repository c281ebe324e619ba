"""What one run's rollouts do to its drafters: score, decide, train, judge. Knows no queue; an entry only names a score.

Invariants
* A batch is scored before it is trained on.
* What is served changes only through the gate, an archived version that proved better, or a person. A candidate is
  published after the checkpoint that holds it, or a redelivered batch would be scored by what was trained on it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import torch

from drafter.batch import RolloutBatch
from drafter.device import ahead
from drafter.errors import BatchRejected
from drafter.replay.gate import Verdict
from service.errors import LatestMoved, WorkerError
from service.monitor.controller import DEFERRED, Action, Controller, Decision, Economy
from service.monitor.records import DrafterSums
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue import EndState
from service.storage.reports import Store
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.inbox import RECENT_BATCHES, Loaded
from service.worker.journal import Journal
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.promotion import Contest, contest
from service.worker.recent import KeptBatch, RecentRollouts
from service.worker.scoring import Scores, score
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: Heads are kept this many policy versions back where `max_policy_lag` does not say how late a batch may be.
_HEADS_KEPT_VERSIONS = 64

#: A batch that was scored.
Scored = tuple[Loaded, Scores]


def _served_alpha(scored: Sequence[Scored]) -> float | None:
    """Replay α of the served drafter, pooled over a claim; None where none serves."""
    sums = [found for _, scores in scored if (found := scores.record.sums("served")) is not None]
    return sum(sums, DrafterSums(0.0, 0.0)).alpha if sums else None


def _standard_error(verdict: Verdict, confidence: float) -> float | None:
    """Standard error of a gain, from its bounds, which are one-sided at `confidence`; None where it has none."""
    width = verdict.high - verdict.low
    return width / (2.0 * NormalDist().inv_cdf(confidence)) if math.isfinite(width) else None


class TrainingStopped(WorkerError):  # noqa: N818 - reads as what happened
    """Training failed half way, so part of it is in the candidate: reload the last checkpoint."""


class Fates(Protocol):
    """Where the learner says what became of a batch; `service.worker.inbox.Inbox` is one."""

    def finish(self, loaded: Loaded, end: EndState) -> None:
        """All that was to be done with it is done."""

    def reject(self, loaded: Loaded, reason: str) -> None:
        """It cannot be used."""

    def fail(self, loaded: Loaded, error: Exception, what: str) -> None:
        """An unforeseen exception ends it; raised again where the batch cannot be to blame."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of `learn` did, for the log line and the gauges."""

    scores: Scores  # of the newest batch
    decision: Decision
    contest: Contest | None = None
    trained_with_recent: bool = False  # and nothing failed


class Learner:
    """The drafters of one run, and what they learn from."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        store: Store,
        run: str,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stopping`: whether somebody waits for the process to end."""
        self.run = run
        self._settings = settings
        self._layout = layout
        self._stopping = stopping
        self.target = Target.open(layout, run, settings.device)
        self.lineage = Lineage(settings, layout, run, self.target)
        self.recent = self._empty_memory()
        self.journal = Journal(store, run)
        self.controller = Controller()
        self.token_counts = torch.zeros(self.vocab_size, dtype=torch.int64)  # [V], until there is a draft vocabulary
        self._split_by_prompt: bool | None = None  # how the last evidence was split from what is trained on

    def _empty_memory(self) -> RecentRollouts:
        return RecentRollouts(
            self._layout.worker(self.run) / "recent",
            capacity_tokens=self._settings.recent_tokens,
            holdout_one_in=self._settings.holdout_one_in,
        )

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.embed_tokens.shape[0]

    @property
    def begun(self) -> bool:
        """Whether there is a candidate: not before the draft vocabulary of a run from scratch is known."""
        return self.lineage.trainer is not None

    # --- start
    def begin(self) -> None:
        """Begin with the run's drafter, if it has one."""
        self.lineage.begin()
        self._require_head_rows()

    def resume(self, checkpoint: WorkerCheckpoint) -> dict[str, Any]:
        """Go on from the newest checkpoint; returns the state in it."""
        stored = checkpoint.drafter()
        state = checkpoint.restore(self.lineage.set_candidate(stored))
        self.controller = Controller.from_json(state["controller"])
        self.journal.restore(state)
        self.lineage.check_vocabulary()
        self._require_head_rows()
        self.recent.restore(state["recent"], self._layout.spool(self.run), state.get("first_prompts"))
        self.recent.settle()  # the checkpoint lists them: the crash came before it could be done
        log.info("%s: resumed after %d batches, %d tokens trained", self.run, self.journal.totals.batches,
                 self.journal.totals.trained_tokens)  # fmt: skip
        return state

    def save(self, checkpoint: WorkerCheckpoint, applied: Sequence[str]) -> None:
        """Write a checkpoint, which names the `applied` batches; what it lists of the recent rollouts moves there."""
        if self.lineage.trainer is None:
            raise RuntimeError("the lineage has not begun")
        self.journal.send()  # first: what a checkpoint holds is not scored again
        checkpoint.save(
            self.lineage.trainer,
            {
                "controller": self.controller.to_json(),
                **self.journal.state,
                "applied": list(applied),
                "recent": self.recent.names(),
                "first_prompts": self.recent.first_prompts,
            },
        )
        self.recent.settle()

    def _require_head_rows(self) -> None:
        """Heads that lack rows of the draft vocabulary are of no use from now on."""
        if self.begun:
            self.target.require_rows(self.lineage.candidate.vocabulary.ids)

    # --- from scratch
    def count_tokens(self, batches: Sequence[RolloutBatch]) -> None:
        """Count the response tokens from which the draft vocabulary is to be chosen."""
        for batch in batches:
            self.token_counts += torch.bincount(batch.input_ids[batch.loss_mask], minlength=self.vocab_size)

    def begin_from_scratch(self) -> bool:
        """Choose the draft vocabulary and begin. False: too few tokens were counted yet."""
        if int(self.token_counts.sum()) < self._settings.vocab_min_tokens:
            return False
        self.lineage.begin_from_scratch(self.token_counts)
        self._require_head_rows()
        return True

    def report_vocabulary(self, batches_waiting: int) -> None:
        """Say how far the draft vocabulary is, or that it is known."""
        if self.begun:
            self.journal.vocabulary_known()
        else:
            self.journal.gathered(int(self.token_counts.sum()), self._settings.vocab_min_tokens, batches_waiting)

    # --- score, decide, train, judge
    def learn(
        self,
        fresh: Sequence[Loaded],
        fates: Fates,
        *,
        before_publishing: Callable[[str], None],
        newest_waiting: int | None = None,
        version_seconds: float | None = None,
        isolated: bool = False,
    ) -> Outcome | None:
        """Score all; train on what the newest policy wrote, here or still in the queue. The rest joins the mix.

        A worker that is behind spends its time where it counts: not on updates towards policies that are gone.
        `before_publishing` gets the version that won. It must checkpoint a candidate, and raise where nothing may be
        published. `newest_waiting`: newest policy version in the queue. `version_seconds`: between two of them.
        `isolated`: no recent rollouts are mixed in, and nothing is judged, so what is raised is the fault of `fresh`.
        """
        newest_version = max(loaded.batch.policy_version for loaded in fresh[-RECENT_BATCHES:])
        behind = self.controller.defers(newer_waits=newest_waiting is not None and newest_waiting > newest_version)
        scored, rest = ([], fresh) if behind else self._score_newest(fresh, fates)
        passed_over = self._score_all(rest, fates, compare=False)
        if passed_over:
            self._keep(passed_over, fates)
            self._record(passed_over, DEFERRED)
        if not scored:
            return Outcome(passed_over[-1][1], DEFERRED) if passed_over else None
        newest, scores = [self._remember(loaded) for loaded, _ in scored], scored[-1][1]
        economy = Economy(worker_cost=self._settings.worker_cost)
        decision = self.controller.decide(economy, _served_alpha(scored), warming_up=self.lineage.warming_up)
        trained = decision.action is not Action.IDLE
        try:
            with self._without_recent() if isolated else contextlib.nullcontext():
                seconds = self.train(newest) if trained else 0.0
        except OSError as error:
            raise TrainingStopped(
                f"training stopped half way: {error}; it is done again from the last checkpoint"
            ) from error
        self._finish(scored, newest, fates)
        self._record(scored, decision, seconds)
        if isolated or (trained and self._stopping()):
            return Outcome(scores, decision)
        best_version = scores.record.best_version
        outcome = self.judge(
            newest,
            best_version,
            before_publishing=before_publishing,
            train_seconds=seconds if trained else None,
            version_seconds=version_seconds,
        )
        return Outcome(scores, decision, outcome, trained_with_recent=trained)

    def report(self, outcome: Outcome) -> None:
        """Say in one line what was done, and set the gauges."""
        size = len(self.lineage.candidate.vocabulary)
        self.journal.report(outcome.scores, outcome.decision, size, self.controller.curve, outcome.contest)

    @contextlib.contextmanager
    def _without_recent(self) -> Iterator[None]:
        recent, self.recent = self.recent, self._empty_memory()
        try:
            yield
        finally:
            self.recent = recent

    def _score_newest(self, fresh: Sequence[Loaded], fates: Fates) -> tuple[list[Scored], Sequence[Loaded]]:
        """Score what the newest policy wrote with all drafters; also returns what other policies wrote.

        The newest of the last batches: a trainer that went back counts on from there. And of those that can be used: a
        trainer whose batches are all rejected must not keep the worker from the others'.
        """
        rest = fresh
        for version in sorted({loaded.batch.policy_version for loaded in fresh[-RECENT_BATCHES:]}, reverse=True):
            scored = self._score_all([p for p in rest if p.batch.policy_version == version], fates, compare=True)
            rest = [p for p in rest if p.batch.policy_version != version]
            if scored:
                return scored, rest
        return [], rest

    def _score_all(self, fresh: Sequence[Loaded], fates: Fates, *, compare: bool) -> list[Scored]:
        scored = ((loaded, self.score(loaded, fates, compare=compare)) for loaded in fresh)
        return [(loaded, scores) for loaded, scores in scored if scores is not None]

    def _remember(self, loaded: Loaded) -> KeptBatch:
        return self.recent.add(loaded.path, loaded.batch)

    def _keep(self, scored: Sequence[Scored], fates: Fates) -> None:
        self._finish(scored, [self._remember(loaded) for loaded, _ in scored], fates)

    def _finish(self, scored: Sequence[Scored], kept: Sequence[KeptBatch], fates: Fates) -> None:
        for (loaded, _), one in zip(scored, kept, strict=True):
            fates.finish(loaded, "trained" if one.train else "held_out")

    def _record(self, scored: Sequence[Scored], decision: Decision, seconds: float = 0.0) -> None:
        latest = self._latest()
        self.journal.record([(loaded.entry, scores) for loaded, scores in scored], decision, seconds, latest=latest)

    def score(self, loaded: Loaded, fates: Fates, *, compare: bool) -> Scores | None:
        """Score a batch and check its features against its log-probabilities; None when it was rejected.

        `compare`: with all drafters of the lineage, not only with the one that served it.
        """
        batch = loaded.batch
        policy = self.target.at(batch.policy_version, batch=loaded.path)
        try:
            gap, checked = policy.needed_head().logprob_gap(batch)
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            fates.fail(loaded, error, "cannot be compared with the policy's head")
            return None
        if checked and not gap <= self._settings.logprob_gap_nats:
            fates.reject(loaded, self._gap_reason(gap))
            return None
        current = self._latest()
        by = self.lineage.existing(batch.drafter_version) or current
        roles = self.lineage.roles(by, current) if compare else self.lineage.served_only(by)
        if by is not None and (watched := self.lineage.existing(self.journal.watched or "")) is not None:
            roles.setdefault("watched", (watched, self.lineage.version(watched)))
        try:
            return score(
                batch,
                roles,
                policy,
                depth=self._settings.depth,
                drafting=self._settings.drafting,
                batch_id=loaded.entry.batch_id,
                entry_id=loaded.entry.entry_id,
                drafter_version=by,
                logprob_gap=gap if checked else None,
            )
        except BatchRejected as error:
            fates.reject(loaded, str(error))
            return None
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            fates.fail(loaded, error, "cannot be scored")
            return None

    def _latest(self) -> str | None:
        """The version that engines are offered now."""
        manifest = self.lineage.served()
        return None if manifest is None else manifest.version

    def _gap_reason(self, gap: float) -> str:
        return (
            f"log-probabilities disagree with the features by {gap:.3g} nats on average (limit "
            f"{self._settings.logprob_gap_nats:g}): a state taken before the final norm, a stale "
            "head, a wrong temperature or a shifted mask; compare logprobs[t] with last_hidden[t-1] @ lm_head"
        )

    def train(self, newest: Sequence[KeptBatch]) -> float:
        """Train on the newest batches mixed with recent ones; returns the seconds it took."""
        trainer = self.lineage.trainer
        if trainer is None:
            raise RuntimeError("the lineage has not begun")
        started = time.perf_counter()
        drawn = self.recent.train_steps(
            newest,
            passes=self._settings.train_passes,
            step_tokens=self._settings.train_step_tokens,
            seed=self._settings.seed * 1_000_003 + self.journal.totals.batches,
        )
        for window in ahead(([trainer.prepare(b) for b in batches] for batches in drawn), trainer.device):
            report = trainer.step([(p, self.target.at(p.batch.policy_version)) for p in window])
            if report.skipped is None:
                self.journal.totals.trained_tokens += report.response_tokens
            if self._stopping():  # what is learnt so far is kept; the rest and the gate are left out
                break
        seconds = time.perf_counter() - started
        self.journal.totals.train_seconds += seconds
        return seconds

    def judge(
        self,
        newest: Sequence[KeptBatch],
        best_version: str | None,
        *,
        before_publishing: Callable[[str], None],
        train_seconds: float | None,
        version_seconds: float | None,
    ) -> Contest | None:
        """Let the gate compare candidate and, where it scored best, an archived version with the served drafter.

        `train_seconds`: of the training before; None: there was none, and the candidate is not judged.
        """
        served = self._latest()
        versions = [] if train_seconds is None else [CANDIDATE]
        if best_version not in (None, CANDIDATE, served):
            versions.append(str(best_version))
        evidence = self.recent.held_out(self._settings.gate_rollouts)
        if not versions or not evidence.batches:
            return None
        self._log_how_evidence_is_split(evidence.by_prompt)
        policy_version = max(kept.policy_version for kept in newest)
        policy = self.target.at(policy_version)
        outcomes = contest(self._settings, self.lineage, evidence, policy, versions)
        winner = outcomes[0]
        if winner.verdict.promote:
            before_publishing(winner.version)
            try:
                self.lineage.promote(winner.version, served, policy_version, winner.verdict.reason, winner.facts)
            except LatestMoved as moved:  # by a person or another worker: the next contest is against theirs
                log.info("%s: %s", self.run, moved)
                return None
        candidate = next((o for o in outcomes if o.version == CANDIDATE), None)
        self.journal.judged(winner, refused=candidate is not None and not candidate.verdict.promote)
        if candidate is not None:
            if not candidate.verdict.promote:
                self.lineage.refuse(policy_version, candidate.verdict.reason, candidate.facts)
            self.controller.learn(
                gain=candidate.verdict.gain,
                error=_standard_error(candidate.verdict, self._settings.gate_confidence),
                promoted=winner is candidate and winner.verdict.promote,
                train_seconds=train_seconds or 0.0,
                version_seconds=version_seconds,
            )
        return winner

    def _log_how_evidence_is_split(self, by_prompt: bool) -> None:
        """Log once where the prompts are too few to hold some out, and once when they are enough."""
        if by_prompt == self._split_by_prompt:
            return
        self._split_by_prompt = by_prompt
        if by_prompt:
            log.info("%s: candidates are judged on prompts that were never trained on", self.run)
        else:
            log.warning(
                "%s: too few prompts so far (%d) to hold some out: candidates are judged on groups of rollouts that "
                "were not trained on, whose prompts may have been; they may promise too much",
                self.run,
                len(self.recent.first_prompts),
            )

    # --- forgetting
    def forget_recent(self) -> None:
        """Delete the recent rollouts. What was learnt from them stays; held-out ones are gathered again."""
        memory = self._empty_memory()
        memory.restore([], self._layout.spool(self.run), self.recent.first_prompts)  # deletes their files
        self.recent = memory

    def forget_heads(self, newest_policy: int) -> None:
        """Delete heads that neither a kept batch nor one still to come can need."""
        kept = self.recent.oldest_policy_version()
        if kept is None:
            return
        lag = self._settings.max_policy_lag
        still_to_come = newest_policy - (_HEADS_KEPT_VERSIONS if lag is None else lag)
        self.target.forget_before(min(kept, still_to_come), newest=newest_policy)
