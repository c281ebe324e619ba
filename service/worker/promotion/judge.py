"""Lets the gate judge each claim, serves what won, and tells the controller what trainings gained.

Invariants
* What is served changes only through the gate, an archived version that proved better, or a person.
* A candidate is published after the checkpoint that holds it. That checkpoint is written before the candidate is
  trained on the batches that judged it. So redelivered batches never meet a drafter that was trained on them, and no
  look counts twice.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from drafter.batch import RolloutBatch
from drafter.replay.gate import CLAIM_SD
from service.errors import LatestMoved
from service.monitor.controller import Controller
from service.monitor.events import GateEvidence, Realised
from service.monitor.headroom import LearningCurve
from service.monitor.records import arrival
from service.settings import Settings
from service.worker.journal import Journal
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.promotion.evidence import Fresh
from service.worker.promotion.gate import Contest, Gate
from service.worker.recent import RecentRollouts
from service.worker.scoring import Scores

log = logging.getLogger("draftalign.worker")


class Judge:
    """The judge of one run: its gate, and what follows from the verdicts."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        lineage: Lineage,
        journal: Journal,
        recent: RecentRollouts,
        before_publishing: Callable[[], None],
    ) -> None:
        """`recent`: its prompts were trained on, so they judge nothing.

        `before_publishing` must write a checkpoint, and raise if nothing may be published.
        """
        self.run = run
        self._lineage = lineage
        self._journal = journal
        self._recent = recent
        self._before_publishing = before_publishing
        self.gate = Gate(settings, lineage)
        self.controller = Controller()

    def measure_from_scratch(self) -> None:
        """Forget gains and evidence. They are of another α, since engines draft in another way now."""
        known = self.controller
        self.controller = Controller(train_seconds=known.train_seconds, version_seconds=known.version_seconds)
        self._record(self.gate.begin(self.gate.served))

    def follow(self) -> None:
        """Follow a change of the served version that the gate does not know of.

        This worker published it and ended before the next checkpoint, or a person chose it.
        """
        served = self._lineage.served_version()
        if served == self.gate.served:
            return
        evidence = self._lineage.chosen_after(self.gate.served)
        if served is None or evidence is None:
            if self.gate.served is not None:
                self.controller.curve = LearningCurve()  # its verdicts were beside another drafter
            event = self.gate.begin(served)
        else:
            event = self._go_on_from(served, evidence)
            self.gate.training.concluded()
        self._record(event)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo the gate's looks if anything is raised within it, because the same batches come again then."""
        before = self.gate.state
        try:
            yield
        except Exception:  # a full disk, say
            if self.gate.served == before["served"]:
                self.gate.restore(before)
            else:  # a version was published, which ends the looks
                self.gate.training.concluded()
            raise

    def judge(self, scored: Sequence[tuple[RolloutBatch, Scores]]) -> list[Contest]:
        """Let the gate judge on batches that were scored with the candidate, and promote the winner.

        Returns all contests, best first.
        """
        served = self.gate.served
        compared = [(batch, scores) for batch, scores in scored if CANDIDATE in scores.versions]
        if not compared:
            return []
        fresh = Fresh.of(compared, self._recent.prompts)
        if served is not None and served not in fresh.replays:  # it changed while the claim was scored
            return []
        with_all = [(batch, scores) for batch, scores in compared if "frozen" in scores.replays]
        wider = Fresh.of(with_all, self._recent.prompts) if with_all else fresh
        before = self.gate.state
        entries = sorted((scores.record.entry_id or "" for _, scores in compared), key=arrival)
        realised = self.gate.outcomes.settle(wider) if self.gate.outcomes.measures(entries[0]) else None
        contests = [replace(one, judged_to=entries[-1] or None) for one in self.gate.judge(fresh, served, wider)]
        if contests and contests[0].verdict.promote:
            after = self.gate.state
            self.gate.restore(before)  # in the checkpoint: after a crash the gate looks at these batches again
            self._before_publishing()
            self.gate.restore(after)
            policy_version = max(batch.policy_version for batch in fresh.batches)
            try:
                realised = self._promote(contests, served, policy_version) or realised
            except LatestMoved as moved:  # a person or another worker moved it: the next contest is with that version
                log.info("%s: %s", self.run, moved)
                self.gate.restore(before)
                return []
        self.gate.dismiss_sent(contests)
        self._record(realised)
        return contests

    def _promote(self, contests: Sequence[Contest], served: str | None, policy_version: int) -> Realised | None:
        """Serve the winner. Training goes on from it if it is archived or sent, and better than the candidate.

        Returns the gate's event about the version that was served before. Raises `LatestMoved` if another version is
        served by now.
        """
        winner = contests[0]
        candidate = _of_candidate(contests)
        keeps = candidate is not None and candidate.verdict.gain >= winner.verdict.gain
        its = {} if winner.version == CANDIDATE else {"train_on": not keeps}
        evidence = winner.evidence.model_copy(update=its)
        manifest = self._lineage.promote(winner.version, served, policy_version, winner.verdict.reason, evidence)
        return self._go_on_from(manifest.version, evidence)

    def _go_on_from(self, version: str, evidence: GateEvidence) -> Realised | None:
        """Go on with the version that the gate chose. After a crash `evidence` is all that is known of the choice."""
        if evidence.train_on:
            self._lineage.train_from(version)
        self._journal.totals.published += 1
        if evidence.archived:  # gains so far were measured beside another drafter
            self.controller.curve = LearningCurve()
            self.gate.training.concluded()
        elif self.gate.training.seconds is None:  # it was refused when it was judged; nothing was trained since
            self.controller.published()
        return self.gate.promoted(version, self.gate.served, evidence)

    def conclude(self, contests: Sequence[Contest], policy_version: int) -> None:
        """Write the gate's finding into history and controller, once for each whole training.

        A part of a training gains little beside the error of a look, so it is left out, unless it is published.
        """
        candidate, training = _of_candidate(contests), self.gate.training
        if candidate is None or training.seconds is None or candidate.look.prompts < 2:
            return  # with too few prompts the next claims decide
        if training.is_part and not candidate.verdict.promote:
            return
        if not candidate.verdict.promote:
            self._lineage.refuse(policy_version, candidate.verdict.reason, candidate.evidence)
            self._journal.totals.refused += 1
        look = candidate.look
        self.controller.learn(
            gain=look.gain,
            error=None if look.fault and not look.same else math.hypot(look.error, CLAIM_SD),
            promoted=candidate is contests[0] and candidate.verdict.promote,
            train_seconds=training.seconds,
        )
        training.concluded()

    def conclude_unasked(self) -> None:
        """Leave the last training unjudged, because nothing may be published."""
        self.gate.training.concluded()
        self.gate.training.unjudged = 0

    def _record(self, realised: Realised | None) -> None:
        """Write an event about the version that was served before into the run's history, if there is one."""
        if realised is not None:
            self._lineage.record_gain(realised)


def _of_candidate(contests: Sequence[Contest]) -> Contest | None:
    return next((contest for contest in contests if contest.version == CANDIDATE), None)
