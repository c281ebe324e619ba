"""Judges what may replace the served drafter: the candidate as it stands, an archived version, or a sent drafter.

They are judged on each claim's rollouts, before anything is trained on these. Such rollouts are not selected, are of
newer policies than the candidate was trained on, and are scored anyway. Rollouts whose prompt is among the recent
rollouts are left out, because the candidate was trained on their siblings.

Two archived versions, the first one and the one served before, are compared whenever they are scored anyway. When the
served drafter falls, all archived versions compete, by successive halving on a part of the claim's prompts. The winner
is judged on the other part, which did not choose it.

The gain of a published version over the one before it is then measured on later rollouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from drafter.batch import RolloutBatch
from drafter.device import is_device_fault, is_out_of_memory
from drafter.policy import Policy
from drafter.replay.acceptance import Replay
from drafter.replay.gate import ClaimSpread, Look, Trial, Verdict, compare
from service.monitor.events import GateEvidence, Realised
from service.settings import Settings
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.promotion.archive import Archive, Level
from service.worker.promotion.evidence import FEWEST_PROMPTS, POOLED_CLAIMS, Fresh, Pool
from service.worker.promotion.outcomes import Outcomes
from service.worker.promotion.training import Training

#: Archived versions may spend this part of the error together. The candidate has the rest.
_ARCHIVE_SHARE: Final = 0.1
#: A version that a person sent is given up after so many looks against one served drafter,
SENT_LOOKS: Final = 64
#: or after so many others were published: its trial begins again with each of them.
_SENT_OUTRUN: Final = 3
_ALL_TRAINED_ON: Final = "no evidence: all these prompts were trained on already, by answers of the same policy version"


@dataclass(frozen=True, slots=True)
class Contest:
    """The outcome for one challenger. `version`: CANDIDATE, or an archived or a sent version."""

    version: str
    verdict: Verdict
    look: Look  # the last one
    trained_to: int | None = None  # policy version of the candidate's last training; None: not known
    correction: float = 1.0  # of the promise, from what earlier promises brought
    judged_to: str | None = None  # newest queue entry of the claim; None: not known

    @property
    def promised(self) -> float:
        """The expected gain over the served version on later rollouts; nan without a look."""
        return math.expm1(self.correction * math.log1p(self.verdict.gain))

    @property
    def evidence(self) -> GateEvidence:
        """As the manifest and the history keep it."""
        verdict, look = self.verdict, self.look
        found = GateEvidence(
            gain=verdict.gain,
            promised=self.promised,
            low=verdict.low,
            high=verdict.high,
            looks=verdict.looks,
            error=verdict.error,
            rollouts=look.rollouts,
            prompts=look.prompts,
            alpha_candidate=look.alpha_challenger,
            alpha_served=look.alpha_served,
        )
        known = {"trained_to": self.trained_to, "judged_to": self.judged_to}
        return found.model_copy(update={name: value for name, value in known.items() if value is not None})


class Gate:
    """All evidence so far against the drafter that is served now. One per run; `state` survives restarts."""

    def __init__(self, settings: Settings, lineage: Lineage) -> None:
        self._settings = settings
        self._lineage = lineage
        self.served: str | None = None  # the version that all trials are against
        self._trials = {CANDIDATE: Trial(1.0 - _ARCHIVE_SHARE)}
        self.training = Training()
        self.archive = Archive(settings, lineage)
        self.outcomes = Outcomes(lineage)
        self._pools = defaultdict[str, Pool](Pool)  # by challenger; not in `state`: a restart pools from nothing

    # --- state
    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON values."""
        return {
            "served": self.served,
            "trials": {version: trial.to_json() for version, trial in self._trials.items()},
            "level": self.archive.level.to_json(),
            **self.outcomes.state,
            **asdict(self.training),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.served = state["served"]
        self._pools.clear()
        self._trials = {version: Trial.from_json(trial) for version, trial in state["trials"].items()}
        self.archive.begin(Level(**state["level"] or {}))
        self.outcomes.restore(state)
        self.training = Training(**{one.name: state[one.name] for one in fields(Training)})

    def trained(self, seconds: float | None, policy_version: int, share: float = 1.0) -> None:
        """Note that the candidate was trained on that policy's rollouts, for a share of a whole training.

        `seconds`: how long it took; None if this training shows no price.
        """
        self.training.add(seconds, policy_version, share)
        self._trial(CANDIDATE).trained(share)

    # --- looks
    def judge(self, fresh: Fresh, served: str | None, wider: Fresh | None = None) -> list[Contest]:
        """Look at all challengers on a claim, best first. `served`: the version that engines are offered.

        `wider`: the part of `fresh` on which archived versions were scored too; None: all of it.
        A run from scratch judges nothing before its first training. Random layers may be a few per cent better than no
        drafter at all, but cost an engine more than that.
        """
        wider = wider or fresh
        if served != self.served:
            self.begin(served)
        if served is None and self.training.trained_to is None:
            return []
        if fresh.evidence:
            self.training.unjudged = 0
        incumbent = _without_drafter(fresh.replays[CANDIDATE]) if served is None else fresh.replays[served]
        index = np.array(fresh.evidence, dtype=np.int64)
        found = []
        for version, replay in fresh.replays.items():
            if version != served:
                pair = replay.select(index), incumbent.select(index)
                self.training.tested += int(np.count_nonzero(pair[1].tokens)) if version == CANDIDATE else 0
                found.append(self._take(version, self._look(version, fresh, *pair, fresh.evidence)))
        for version in sorted(wider.replays.keys() - fresh.replays.keys()):  # the order decides each trial's share
            part = np.array(wider.evidence, dtype=np.int64)
            pair = wider.replays[version].select(part), wider.replays[str(served)].select(part)
            found.append(self._take(version, self._look(version, wider, *pair, wider.evidence)))
        if served is not None:
            self.archive.watch(fresh, incumbent)
        if (archived := self.archive.due(wider.replays)) and fresh.evidence:
            found.append(self._ask(fresh, incumbent, archived))
        return sorted(found, key=lambda c: (c.verdict.promote, np.nan_to_num(c.verdict.gain, nan=-1.0)), reverse=True)

    def _look(self, version: str, fresh: Fresh, challenger: Replay, incumbent: Replay, rollouts: Sequence[int]) -> Look:
        """A look at `rollouts` of a claim; both replays are of these. Claims are pooled if one has too few prompts.

        The candidate is trained between claims, so a pooled look is of its mean state. That gives a candidate that was
        never better no more chances. An archived version whose wins did not last always gets pooled claims: where kinds
        of prompts alternate, one claim does not predict the next.
        """
        claims = 1 if self.outcomes.lasts(version) else POOLED_CLAIMS
        pooled = self._pools[version].add(fresh, (challenger, incumbent), rollouts, alone=FEWEST_PROMPTS, claims=claims)
        if pooled is not None:
            (ours, theirs), groups = pooled
            return compare(ours, theirs, groups)
        look = compare(challenger, incumbent)
        waiting = self._pools[version].claims
        known = len({prompt for _, of_one in waiting for prompt in of_one})
        why = f"too little evidence: {known} prompts in {len(waiting)} claims so far"
        if not rollouts:
            why = _ALL_TRAINED_ON if fresh.prompts and not fresh.evidence else look.fault
        return replace(look, prompts=0, fault=why)

    def _ask(self, fresh: Fresh, incumbent: Replay, versions: Sequence[str]) -> Contest:
        """Look at the archived version that fits best, and go on with later claims if this one has too few prompts."""
        version, judging = self.archive.choose(fresh, versions)
        ours = self.archive.replay(version, fresh.select(judging)) if judging else incumbent.select([])
        theirs = incumbent.select(np.array(judging, dtype=np.int64))
        contest = self._take(version, self._look(version, fresh, ours, theirs, judging))
        waits = bool(self._pools[version].claims) or not judging
        self.archive.judged(version, contest.verdict, fresh, waits=waits)
        return contest

    def _take(self, version: str, look: Look) -> Contest:
        trial = self._trial(version)
        # A candidate that was not trained since it was published is the served drafter: no look at it.
        if version != CANDIDATE or not look.same or self.training.seconds is not None:
            trial.take(look)
        verdict = trial.verdict(min_gain=self._settings.gate_min_gain, confidence=self._settings.gate_confidence)
        verdict = replace(verdict, reason=look.fault or verdict.reason)
        trained_to = self.training.trained_to if version == CANDIDATE else None
        return Contest(version, verdict, look, trained_to, self.outcomes.correction)

    def begin(self, served: str | None) -> Realised | None:
        """Begin all trials again, against `served`. How far a training moves the candidate stays known (`Trial.next`).

        The promise of the version before is not measured any longer, since that version does not serve. Returns the
        event of that promise with what was measured; None: nothing was.
        """
        event = self.outcomes.end()
        self.served, self._trials = served, {CANDIDATE: self._trials[CANDIDATE].next()}
        self.archive.begin()
        self._pools.clear()
        return event

    def _trial(self, version: str) -> Trial:
        if version not in self._trials:
            self._trials[version] = archive_trial(len(self._trials))  # the candidate's trial is number 0
        return self._trials[version]

    # --- drafters that people sent
    def replay_sent(self, batch: RolloutBatch, policy: Policy) -> dict[str, Replay]:
        """Replay the sent drafter that has waited longest for its verdict. Empty: none waits.

        A drafter that cannot be replayed is refused; no batch has caused that.
        """
        version = next(iter(self._lineage.waiting()), None)
        if version is None:
            return {}
        try:
            return {version: self._lineage.replay(version, batch, policy)}
        except Exception as error:
            if isinstance(error, OSError) or is_out_of_memory(error) or is_device_fault(error):
                raise
            self._lineage.refuse_sent(version, f"it cannot be replayed: {error}"[:400], usable=False)
            return {}

    def dismiss_sent(self, contests: Sequence[Contest]) -> None:
        """Refuse sent drafters that are no better, or were not shown to be better in the time that they had."""
        waiting = self._lineage.waiting()
        for contest in contests:
            if contest.version not in waiting or contest.verdict.promote:
                continue
            others = self._lineage.published - waiting[contest.version].published
            if why := given_up(contest.verdict, others, self._settings.gate_min_gain):
                self._lineage.refuse_sent(contest.version, f"{why}: {contest.verdict.reason}", contest.evidence)
                if contest.version in self._trials:  # its part of the error stays spent: sent again, it has a new trial
                    self._trials[f"{contest.version} {len(self._trials)}"] = self._trials.pop(contest.version)

    def promoted(self, version: str, before: str | None, evidence: GateEvidence) -> Realised | None:
        """Note that `version` is served now instead of `before`, by `evidence`. Returns what `begin` does."""
        event = self.begin(version)
        if before is not None:
            self.outcomes.begin(version, before, evidence)
        if evidence.train_on is not False:  # the candidate is the served drafter now
            self._trials[CANDIDATE].promise.known()
        return event


def archive_trial(place: int) -> Trial:
    """The trial of the `place`-th archived version that is looked at, from 1. All together spend `_ARCHIVE_SHARE`.

    Each has little of the error, and a single claim must be enough for a version that fits again. So its gain is
    assumed to vary by only `CLAIM_SD` from claim to claim, until three looks show more.
    """
    return Trial(_ARCHIVE_SHARE / (place * (place + 1)), claims=ClaimSpread(0.0))


def given_up(verdict: Verdict, others: int, min_gain: float) -> str:
    """Why a sent version is refused; empty while it may still prove better.

    `others`: how many versions were published since it came. `min_gain`: the least gain that is worth a swap.
    """
    if verdict.looks and verdict.high < min_gain:
        return "it is no better"
    if verdict.looks >= SENT_LOOKS:
        return f"{verdict.looks} looks have not shown it to be better"
    if others >= _SENT_OUTRUN:
        return f"{others} other versions were published while it waited"
    return ""


def _without_drafter(found: Replay) -> Replay:
    """The replay of plain decoding on the same rollouts: one token a round."""
    nothing = np.zeros_like(found.accepted)
    return Replay(found.tokens, found.tokens.copy(), nothing, nothing.copy())
