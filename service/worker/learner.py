"""Scores one run's rollouts, decides whether to train, trains, and has the result judged.

Invariants
* A batch is scored, and the candidate judged on it, before it is trained on. So the gate's evidence arrived after the
  training that it judges.
* A training ends early when rollouts of a newer policy wait. These judge the candidate as it stands, which is trained
  on them next. So a long training is published in parts, and each part is judged on rollouts that came after it. The
  gate has one budget for all looks at one served drafter, however many there are.
* A training also ends early when it takes long and another run has work, or when Redis cannot say. What was done of it
  stays, and its batches are done with: the candidate has seen them.
* What is published, and when: `service.worker.promotion.judge`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from drafter.device import is_device_fault, is_out_of_memory
from drafter.replay.gate import Verdict
from service.errors import WorkerError
from service.monitor.controller import DEFERRED, NO_MEMORY, UNJUDGED, Action, Controller, Decision, Economy
from service.monitor.headroom import LearningCurve
from service.monitor.live.engine import LiveRule
from service.monitor.records import DrafterSums
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.reports.drafting import Drafting
from service.storage.reports.store import Store
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.claim import ClaimPlan, ClaimScorer, Scored
from service.worker.inbox import Inbox, Loaded
from service.worker.journal import Journal
from service.worker.lineage import Lineage
from service.worker.promotion.judge import Judge
from service.worker.recent import KeptBatch, RecentRollouts, Task, windows, with_normalisers
from service.worker.scoring import Scores
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: For how many policy versions heads are kept where no `max_policy_lag` limits how late a batch may be.
_HEADS_KEPT_VERSIONS = 64

#: At least this share of a training is done before newer rollouts or another run may end it: judging takes time too.
_LEAST_PART = 0.125
#: A claim's training ends after this time if another run of this worker has work. On a GPU a claim of the default
#: size takes half of it. The work grows with the square of a rollout's length.
LONGEST_CLAIM_SECONDS = 30.0


class TrainingStopped(WorkerError):  # noqa: N818 - reads as what happened
    """Training failed half way, so part of it is in the candidate: reload the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one call of `learn` did, for the log line and the gauges."""

    scores: Scores  # of the newest batch
    decision: Decision
    verdict: Verdict | None = None  # of the best challenger
    trained_with_recent: bool = False  # and nothing failed


class Learner:
    """The drafters of one run, and what they learn from."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        store: Store,
        run: str,
        target: Target,
        inbox: Inbox,
        before_publishing: Callable[[], None],
        stopping: Callable[[], bool] = lambda: False,
        others_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """`inbox` is told what becomes of each batch. `before_publishing`: as for `Judge`.

        `stopping`: whether the process is asked to end. `others_wait`: whether another run has work.
        """
        self.run = run
        self._settings = settings
        self._layout = layout
        self._stopping = stopping
        self._others_wait = others_wait
        self.target = target
        self.lineage = Lineage(settings, layout, run, target)
        self.inbox = inbox
        self.recent = RecentRollouts(layout.worker(run) / "recent", capacity_tokens=settings.recent_tokens, run=run)
        self.journal = Journal(settings, store, run)
        self.judge = Judge(settings, run, self.lineage, self.journal, self.recent, before_publishing)
        self.scorer = ClaimScorer(settings, target, self.lineage, self.journal, self.judge.gate, inbox)

    # --- start
    def resume(self, checkpoint: WorkerCheckpoint) -> dict[str, Any]:
        """Go on from the newest checkpoint; returns the state in it."""
        trainer = self.lineage.set_candidate(checkpoint.drafter())
        self.lineage.check_vocabulary()
        with checkpoint.reading_state():
            state = checkpoint.restore(trainer)
            self.judge.controller = Controller.from_json(state["controller"])
            self.journal.restore(state)
            self.judge.gate.restore(state["gate"])
            recent, known, drafting, _ = (state[name] for name in ("recent", "recent_known", "drafting", "applied"))
        if drafting != Drafting.supposed(self._settings).model_dump():
            self._measure_from_scratch()
        self.recent.restore(recent, self._layout.spool(self.run), known, self.target.normalised)
        self.recent.settle()  # a crash may have come between the checkpoint and this step
        log.info("%s: resumed after %d batches, %d tokens trained", self.run, self.journal.totals.batches,
                 self.journal.totals.trained_tokens)  # fmt: skip
        return state

    def _measure_from_scratch(self) -> None:
        """Forget gains, baseline and evidence. They are of another α, since engines draft in another way now."""
        log.info("%s: gains and the baseline of α are measured from scratch: engines draft otherwise now", self.run)
        self.journal.drift.forget_baseline()
        self.judge.measure_from_scratch()

    def save(self, checkpoint: WorkerCheckpoint, applied: Sequence[str]) -> None:
        """Write a checkpoint that names the `applied` batches. Then move recent rollouts' files to `worker/recent`."""
        trainer = self.lineage.needed_trainer
        self.journal.send()  # first: what a checkpoint holds is not scored again
        checkpoint.save(
            trainer,
            {
                "drafting": Drafting.supposed(self._settings).model_dump(),
                "controller": self.judge.controller.to_json(),
                **self.journal.state,
                "applied": list(applied),
                "recent": self.recent.names(),
                "recent_known": self.recent.known_rollouts(),
                "gate": self.judge.gate.state,
            },
        )
        self.recent.settle()

    # --- score, decide, train, judge
    def learn(self, fresh: Sequence[Loaded], *, isolated: bool = False) -> Learnt | None:
        """Score all batches of a claim, judge, then train on the newest policy's rollouts.

        If the queue has rollouts of a newer policy, the claim is passed over, unless the controller is idle or too many
        were passed over in a row (`Controller.defers`): a worker that is behind spends no time on policies that are
        gone.
        `isolated`: mix in no recent rollouts and judge nothing, so that `fresh` causes whatever is raised.
        """
        plan = ClaimPlan.of(fresh, isolated=isolated)
        began = time.monotonic()

        def newer_waits() -> bool:
            waiting = self.inbox.newest_waiting(after=fresh[-1])
            return waiting is not None and waiting > plan.newest

        waits = newer_waits()
        # A claim that is trained on although newer rollouts wait: enough claims were passed over before it.
        overdue = waits and not self.judge.controller.idle
        if plan.to_train and self.judge.controller.defers(newer_waits=waits):
            plan = plan.without_training()
        scored, passed_over = self.scorer.score_claim(plan)
        version_seconds = self.inbox.versions.seconds_per_version
        held = self.journal.engines.compare(LiveRule(self._settings.depth), version_seconds)
        may_publish = held is None and not self.lineage.held()
        verdict = self._look(scored, passed_over, plan.newest, may_publish=may_publish, isolated=isolated)
        if not scored:
            told = passed_over and not passed_over[-1][0].entry.belated
            return Learnt(passed_over[-1][1], DEFERRED, verdict) if told else None
        decision = self._decide(scored, held, version_seconds)

        def ends() -> bool:
            if isolated:  # a part of a training cannot show that the batch is sound
                return False
            try:
                if time.monotonic() - began > LONGEST_CLAIM_SECONDS and self._others_wait():
                    return True
                return not overdue and newer_waits()  # an overdue training is done whole
            except RedisError:  # not raised: the batches would come again, to a candidate that has seen them
                return True

        share, undisturbed = self._train_on(scored, decision, ends, isolated)
        self.scorer.keeps_up = share == 1.0 and not overdue
        return Learnt(scored[-1][1], decision, verdict, trained_with_recent=undisturbed)

    def _look(
        self,
        scored: Sequence[Scored],
        passed_over: Sequence[Scored],
        newest_version: int,
        *,
        may_publish: bool,
        isolated: bool,
    ) -> Verdict | None:
        """Judge the challengers on the scored batches, and finish those that are not trained on.

        Returns the verdict on the best of them. `may_publish`: False where replay does not describe the engines, or
        a person holds the served version.
        """
        judged = may_publish and not isolated
        if judged:
            self.judge.follow()
        with self.judge.attempt():
            both = [(loaded.batch, scores) for loaded, scores in (*passed_over, *scored)]
            contests = self.judge.judge(both) if judged else []
            best = contests[0] if contests else None
            if not may_publish:
                self.judge.conclude_unasked()
            elif scored or (best and best.verdict.promote):  # else more evidence comes before the next training
                self.judge.conclude(contests, newest_version)
            self._pass_over(passed_over)
        return best.verdict if best else None

    def _pass_over(self, scored: Sequence[Scored]) -> None:
        """Finish batches that are not trained on now. They join the recent rollouts."""
        if scored:
            for loaded, _ in scored:
                self.recent.add(loaded.path, loaded.batch, loaded.left_out)
            self._finish(scored, DEFERRED)

    def _train_on(
        self, scored: Sequence[Scored], decision: Decision, ends: Callable[[], bool], isolated: bool
    ) -> tuple[float, bool]:
        """Train if that was decided, and finish the batches. `ends`: as for `train`.

        Returns the share of the training that was done, and whether it was undisturbed: recent rollouts were mixed in,
        and the process is not asked to end.
        """
        newest = [self.recent.add(loaded.path, loaded.batch, loaded.left_out) for loaded, _ in scored]
        try:
            self.recent.forget_abandoned(
                self.target.received.times(), lambda: self.journal.abandoned(self.inbox.unfinished())
            )
            left = set(self.recent.names())
            newest = [kept for kept in newest if kept.name in left]
            trained = decision.action is not Action.IDLE and bool(newest)
            older = [] if isolated else self.recent.but(newest)
            seconds, share = self.train(newest, older, ends) if trained else (0.0, 1.0)
            trained = trained and share > 0.0  # not where all of the newest are too long
            undisturbed = trained and not isolated and not self._stopping()
            if trained:
                known = seconds if undisturbed else None  # others do not show how long one takes
                self.judge.gate.trained(known, scored[-1][0].batch.policy_version, share)
            self._finish(scored, decision, seconds)
        except OSError as error:
            raise TrainingStopped(
                f"training stopped half way: {error}; it is done again from the last checkpoint"
            ) from error
        return share, undisturbed

    def _decide(self, scored: Sequence[Scored], held: str | None, version_seconds: float | None) -> Decision:
        """Decide what to do with the newest rollouts. `held`: why engines and replay disagree, or None."""
        if held is not None:  # gains are not known, and training on wrong features may do harm
            self.judge.controller.deferred = 0
            return Decision(Action.IDLE, f"nothing is trained while nothing may be published: {held}")
        served = [sums for _, scores in scored if (sums := scores.record.sums("served")) is not None]
        alpha = sum(served, DrafterSums(0.0, 0.0)).alpha if served else None
        if alpha is None and any(scores.record.drafter_version is not None for _, scores in scored):
            return Decision(Action.IDLE, "no answer here has a second token, so there is nothing to learn")
        if self.recent.limit.tokens == 0:
            self.recent.limit.trained()
            return NO_MEMORY
        if self.judge.gate.training.is_blind:
            return UNJUDGED
        engines = self.journal.engines.drafting
        may_pay = engines.share == 0.0 and engines.may_pay  # no engine drafts, but a better drafter may make it faster
        economy = Economy(self._settings.worker_cost, engines.share, may_pay=may_pay)
        return self.judge.controller.decide(
            economy,
            alpha,
            version_seconds=version_seconds,
            warming_up=self.lineage.needed_trainer.warming_up,
            unfinished=self.judge.gate.training.is_part,
        )

    def report(self, outcome: Learnt) -> None:
        """Log in one line what was done, and set the gauges."""
        size = len(self.lineage.candidate.vocabulary)
        # While the learning rate rises, small gains are no sign that little is left to gain.
        curve = LearningCurve() if self.lineage.needed_trainer.warming_up else self.judge.controller.curve
        self.journal.report(outcome.scores, outcome.decision, size, curve, outcome.verdict)

    def _finish(self, scored: Sequence[Scored], decision: Decision, seconds: float = 0.0) -> None:
        """Finish batches and record their scores. `seconds`: of the training."""
        latest = self.lineage.served_version()  # first: it may raise, and what is finished does not come again
        for loaded, _ in scored:
            self.inbox.finish(loaded)
        self.journal.record([(loaded.entry, scores) for loaded, scores in scored], decision, seconds, latest=latest)

    def train(
        self, newest: Sequence[KeptBatch], older: Sequence[KeptBatch], ends: Callable[[], bool]
    ) -> tuple[float, float]:
        """Train on the newest batches, mixed with older ones. Returns the seconds it took, and the share that was done.

        After `_LEAST_PART` of the training `ends` is asked, after each step, whether to end it.
        """
        trainer = self.lineage.needed_trainer
        started = time.perf_counter()
        task = Task(
            newest,
            older,
            passes=self._settings.train_passes,
            step_tokens=self._settings.train_step_tokens,
            seed=self._settings.seed * 1_000_003 + self.journal.totals.batches,
            longest=self.recent.limit.tokens,
        )
        whole, done = task.tokens, 0  # tokens
        if not whole:  # all of the newest are too long
            self.recent.limit.trained()  # else the limit would never be lifted
            return 0.0, 0.0

        def over() -> bool:
            if self._stopping():  # the candidate keeps what it has learnt so far
                return True
            return _LEAST_PART * whole <= done < whole and ends()

        ranks, left_out = trainer.ranks, list[str]()
        try:
            with ranks.in_step():
                if ranks.world > 1:
                    self.lineage.lead({"train": task.order()})
                    task = with_normalisers(ranks, task)
                for window in windows(task.drawn(), trainer, self.target):
                    report = trainer.step(window)
                    if report.skipped is None:
                        self.journal.totals.trained_tokens += report.response_tokens
                    else:
                        left_out.append(report.skipped)
                    done += report.tokens
                    if ranks.shared(over):
                        break
        except Exception as error:
            if is_out_of_memory(error) and not is_device_fault(error):
                self.recent.ran_out_of_memory(self._settings.train_step_tokens)
            raise
        if left_out:
            said = "%s: %d optimizer steps of this training changed nothing; the first one: %s"
            log.warning(said, self.run, len(left_out), left_out[0])
        self.recent.limit.trained()
        seconds = time.perf_counter() - started
        self.journal.totals.train_seconds += seconds
        return seconds, min(done / whole, 1.0)

    def forget_heads(self, newest_policy: int) -> None:
        """Delete heads that no kept batch and no batch still to come can need."""
        kept = self.recent.oldest_policy_version()
        if kept is None:
            return
        lag = self._settings.max_policy_lag
        still_to_come = newest_policy - (_HEADS_KEPT_VERSIONS if lag is None else lag)
        self.target.received.forget_before(min(kept, still_to_come), newest=newest_policy)
