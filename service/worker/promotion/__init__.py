"""Who may replace the served drafter: the candidate as it stands, or an archived version.

They are judged on the rollouts of each claim when it comes, before anything is trained on them: nobody chose them, they
are of newer policies than the candidate was trained on, and they are scored anyway. Rollouts whose prompt is among the
recent rollouts are left out, for the candidate was trained on their siblings.

Archived versions are compared where they are scored anyway (the first one; the one served before). When the served
drafter falls, all of them enter: by successive halving on a part of the claim's prompts, and the winner is judged on
the other part, which did not choose it.

What a published version then really gains over the one before it is measured on the rollouts that come after.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from drafter.batch import RolloutBatch
from drafter.device import is_device_fault, is_out_of_memory
from drafter.replay.acceptance import Replay
from drafter.replay.gate import Look, Trial, Verdict, compare
from service.monitor.records import arrival
from service.settings import Settings
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.promotion.evidence import FEWEST_PROMPTS, LEAST_PROMPTS, POOLED_CLAIMS, Fresh, Pool
from service.worker.promotion.level import Level
from service.worker.promotion.promises import Kept, Promise
from service.worker.scoring import replay_each
from service.worker.target import Target

#: Part of the error that archived versions may spend together; the candidate has the rest.
_ARCHIVE_SHARE: Final = 0.1
#: Rollouts of the first round of the halving; the next have twice as many each.
_FIRST_ROUND: Final = 4
#: Claims after which it is asked without one: where the prompts become easier for all, α does not fall.
_UNASKED_CLAIMS: Final = 16
#: The archived version that fits best then is looked at so often at most where claims are pooled, if it seems better.
_ASKED_LOOKS: Final = 4
#: An archived version whose wins brought less than this part of what was expected of them wins by `POOLED_CLAIMS`
#: together. Where claims alternate, a win brings -1 if each is unlike the one before, 0 if two are alike, 1/3 if three.
_LASTED: Final = 1.0 / 6.0
#: A version that a person sent is given up after so many looks against one served drafter,
SENT_LOOKS: Final = 64
#: or after so many others were published: its trial begins again with each of them.
_SENT_OUTRUN: Final = 3


@dataclass(frozen=True, slots=True)
class Contest:
    """The outcome for one challenger. `version` is CANDIDATE or an archived version."""

    version: str
    verdict: Verdict
    look: Look  # the last one
    trained_to: int | None = None  # newest policy version that the candidate was trained on, where that is known
    correction: float = 1.0  # of the promise, by what earlier ones brought

    @property
    def promised(self) -> float:
        """The gain to expect on the rollouts to come, over the version that is served now. Nan without a look."""
        return math.expm1(self.correction * math.log1p(self.verdict.gain))

    @property
    def facts(self) -> dict[str, Any]:
        """The evidence, as the manifest and the history keep it."""
        verdict, look = self.verdict, self.look
        return {
            "gain": verdict.gain,
            "promised": self.promised,
            "low": verdict.low,
            "high": verdict.high,
            "looks": verdict.looks,
            "error": verdict.error,
            "rollouts": look.rollouts,
            "prompts": look.prompts,
            "alpha_candidate": look.alpha_challenger,
            "alpha_served": look.alpha_served,
            **({} if self.trained_to is None else {"trained_to": self.trained_to}),
        }


class Gate:
    """What has been shown so far against the drafter that is served now. One per run; `state` survives restarts."""

    def __init__(self, settings: Settings, lineage: Lineage, target: Target) -> None:
        self._settings = settings
        self._lineage = lineage
        self._target = target
        self.served: str | None = None  # the version that all trials are against
        self._trials = {CANDIDATE: Trial(1.0 - _ARCHIVE_SHARE)}
        self._level = Level()
        self._promise: Promise | None = None
        self._won: dict[str, Kept] = {}  # archived versions that won, and what came of it
        # Not in `state`: a restart begins to pool from nothing.
        self._pools = defaultdict[str, Pool](Pool)  # by challenger
        self._level_pool, self._promise_pool = Pool(), Pool()
        self._asked: str | None = None  # the archived version that was chosen at a fall, and is not judged yet
        self._unasked = 0  # claims since the archive was asked
        self._kept = Kept()
        self.trained_to: int | None = None  # newest policy version that the candidate was trained on
        self.untested: float | None = None  # seconds of the last training, parts together, until it has been judged
        self.done = 0.0  # share of a whole training that those are
        self.tested = 0  # rollouts that the candidate was judged on since then

    # --- state
    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON values."""
        return {
            "served": self.served,
            "trials": {version: trial.to_json() for version, trial in self._trials.items()},
            "level": None if math.isnan(self._level.mean) else asdict(self._level),
            "promise": None if self._promise is None else asdict(self._promise),
            "kept": asdict(self._kept),
            "won": {version: asdict(won) for version, won in self._won.items()},
            "trained_to": self.trained_to,
            "untested": self.untested,
            "done": self.done,
            "tested": self.tested,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state`; without one, from nothing: a checkpoint of a version before there was any."""
        if state is None:
            return
        self.served = state["served"]
        self._forget_pools()
        self._trials = {
            # A checkpoint of before the spread was learnt has none; others than the candidate begin at the least.
            version: Trial.from_json(trial if version == CANDIDATE else {"claims": 0.0} | trial)
            for version, trial in state["trials"].items()
        }
        self._level = Level(**state["level"] or {})
        promise = state["promise"]
        self._promise = None if promise is None else Promise(**{"expected": promise["promised"]} | promise)
        self._kept = Kept(**state.get("kept", {}))
        self._won = {version: Kept(**won) for version, won in state.get("won", {}).items()}
        self.trained_to, self.done = state.get("trained_to"), state.get("done", 1.0)
        self.untested, self.tested = state["untested"], state["tested"]

    @property
    def watched(self) -> str | None:
        """The version served before, while the newest one's gain is being measured: every batch needs its score."""
        return None if self._promise is None else self._promise.before

    @property
    def unmeasured(self) -> bool:
        """Whether nothing is known yet of what the newest version really gains, and it can be measured."""
        promise = self._promise
        return promise is not None and promise.rollouts == 0 and self._lineage.existing(promise.before) is not None

    def hungry(self, more: int = 0) -> bool:
        """Whether the candidate, since it was trained, was judged on too few rollouts, with `more` of them."""
        return self.untested is not None and self.tested + more < self._settings.gate_rollouts

    def trained(self, seconds: float | None, policy_version: int, share: float = 1.0) -> None:
        """The candidate was trained on that policy's rollouts, for a share of a whole training.

        None: nothing can be learnt from how that went.
        """
        self.tested, self.trained_to = 0, policy_version
        if seconds is None:
            self.concluded()
        else:
            self.untested, self.done = (self.untested or 0.0) + seconds, self.done + share
        self._trial(CANDIDATE).trained(share)

    def concluded(self) -> None:
        """What was trained until now is judged, or will not be."""
        self.untested, self.done = None, 0.0

    # --- looks
    def judge(self, fresh: Fresh, served: str | None, wider: Fresh | None = None) -> list[Contest]:
        """Look at all challengers on a claim, best first. `served`: the version that engines are offered.

        `wider`: the part of `fresh` on which archived versions were scored too; all of it, without one.
        A run from scratch has nothing to judge before its first training: random layers may be worth a few per cent
        beside no drafter at all, and cost an engine more.
        """
        wider = wider or fresh
        if served != self.served:
            self.begin(served)
        if served is None and self.trained_to is None:
            return []
        incumbent = _without_drafter(fresh.replays[CANDIDATE]) if served is None else fresh.replays[served]
        index = np.array(fresh.evidence, dtype=np.int64)
        found = []
        for version, replay in fresh.replays.items():
            if version != served:
                pair = replay.select(index), incumbent.select(index)
                self.tested += int(np.count_nonzero(pair[1].tokens)) if version == CANDIDATE else 0
                found.append(self._take(version, self._look(version, fresh, *pair, fresh.evidence)))
        for version in wider.replays.keys() - fresh.replays.keys():
            part = np.array(wider.evidence, dtype=np.int64)
            pair = wider.replays[version].select(part), wider.replays[str(served)].select(part)
            found.append(self._take(version, self._look(version, wider, *pair, wider.evidence)))
        if served is not None and (pooled := self._level_pool.add(fresh, [incumbent], range(len(fresh.prompts)))):
            (replay,), groups = pooled
            self._level.take(replay, groups)
        self._unasked += 1
        asks = self._level.fallen or self._unasked > _UNASKED_CLAIMS
        archive = [v for v in self._lineage.archived() if v not in wider.replays] if asks else []
        if archive and fresh.evidence:
            self._unasked = 0
            found.append(self._ask(fresh, incumbent, archive))
        return sorted(found, key=lambda c: (c.verdict.promote, _or(c.verdict.gain, -1.0)), reverse=True)

    def _look(self, version: str, fresh: Fresh, challenger: Replay, incumbent: Replay, rollouts: Sequence[int]) -> Look:
        """A look at `rollouts` of a claim, of which both replays are; where they say too little, at claims of late too.

        The candidate was trained in between: what is shown is of its mean state, and one that never was better passes
        no more often for that. An archived version whose wins did not last is looked at on several claims together,
        however many prompts they have: the kind of the prompts may alternate, and then one claim does not tell what
        the next one brings.
        """
        won = self._won.get(version)
        claims = 1 if won is None or won.share >= _LASTED else POOLED_CLAIMS
        pooled = self._pools[version].add(fresh, (challenger, incumbent), rollouts, alone=FEWEST_PROMPTS, claims=claims)
        if pooled is not None:
            (ours, theirs), groups = pooled
            return compare(ours, theirs, groups)
        look = compare(challenger, incumbent)
        waiting = self._pools[version].claims
        known = len({prompt for _, of_one in waiting for prompt in of_one})
        why = f"too little evidence: {known} prompts in {len(waiting)} claims so far"
        return replace(look, prompts=0, fault=why if rollouts else look.fault)

    def _ask(self, fresh: Fresh, incumbent: Replay, versions: Sequence[str]) -> Contest:
        """Look at the archived version that fits best; where a claim says too little, also on the next ones.

        One look of four claims of a prompt each is not enough: the archive has a small part of the error.
        """
        version, judging = self._asked, list(fresh.evidence)
        if version is None or version not in versions:
            version, judging = self._fittest(fresh, versions)
        ours = self._replay(version, fresh.select(judging)) if judging else incumbent.select([])
        theirs = incumbent.select(np.array(judging, dtype=np.int64))
        look = self._look(version, fresh, ours, theirs, judging)
        contest = self._take(version, look)
        verdict, few = contest.verdict, len({fresh.prompts[rollout] for rollout in fresh.evidence}) < LEAST_PROMPTS
        hopes = few and verdict.gain >= self._settings.gate_min_gain and verdict.looks < _ASKED_LOOKS
        waits = bool(look.fault) and (bool(self._pools[version].claims) or not judging)
        self._level.fallen = not verdict.promote and (hopes or waits)
        self._asked = version if self._level.fallen else None
        return contest

    def _take(self, version: str, look: Look) -> Contest:
        trial = self._trial(version)
        trial.take(look)
        verdict = trial.verdict(min_gain=self._settings.gate_min_gain, confidence=self._settings.gate_confidence)
        verdict = replace(verdict, reason=look.fault or verdict.reason)
        trained_to = self.trained_to if version == CANDIDATE else None
        return Contest(version, verdict, look, trained_to, self._kept.correction)

    def begin(self, served: str | None) -> dict[str, Any] | None:
        """Begin all trials again, against `served`; how far a training moves the candidate stays known (`Trial.next`).

        What the version before was promised to gain is no longer measured: it does not serve. Returns the event of that
        promise, with what is known of it; None where nothing is.
        """
        event = self._settled() if self._promise is not None and self._promise.rollouts else None
        candidate = self._trials[CANDIDATE].next()
        self.served, self._level, self._promise = served, Level(), None
        self._forget_pools()
        self._trials = {CANDIDATE: candidate}
        return event

    def _forget_pools(self) -> None:
        self._pools.clear()
        self._level_pool, self._promise_pool, self._asked = Pool(), Pool(), None

    def _trial(self, version: str) -> Trial:
        if version not in self._trials:
            self._trials[version] = archive_trial(len(self._trials))  # the candidate's is the first
        return self._trials[version]

    # --- drafters that people sent
    def replay_sent(self, batch: RolloutBatch, path: Path) -> dict[str, Replay]:
        """Replay of the version that has waited longest for its verdict; empty where none waits.

        Where it cannot be replayed it is refused: no batch is to blame for what somebody sent.
        """
        version = next(iter(self._lineage.waiting()), None)
        if version is None:
            return {}
        policy, settings = self._target.at(batch.policy_version, batch=path), self._settings
        try:
            drafters = {version: self._lineage.version(version)}
            return replay_each(drafters, policy, [batch], settings.depth, settings.drafting)
        except Exception as error:
            if isinstance(error, OSError) or is_out_of_memory(error) or is_device_fault(error):
                raise
            self._lineage.refuse_sent(version, f"it cannot be replayed: {error}"[:400], usable=False)
            return {}

    def dismiss_sent(self, contests: Sequence[Contest]) -> None:
        """Refuse what was sent and is no better, or has not been shown to be in all the time that it had."""
        waiting = self._lineage.waiting()
        for contest in contests:
            if contest.version not in waiting or contest.verdict.promote:
                continue
            others = self._lineage.published - waiting[contest.version].published
            if why := given_up(contest.verdict, others, self._settings.gate_min_gain):
                self._lineage.refuse_sent(contest.version, f"{why}: {contest.verdict.reason}", contest.facts)
                if contest.version in self._trials:  # what it spent stays spent; sent again, it has another trial
                    self._trials[f"{contest.version} {len(self._trials)}"] = self._trials.pop(contest.version)

    def _fittest(self, fresh: Fresh, versions: Sequence[str]) -> tuple[str, list[int]]:
        """The archived version that fits best, by successive halving, and rollouts of prompts that did not choose it.

        Those of a single prompt all choose, and the next claims judge.
        """
        order: dict[str, list[int]] = {}
        for rollout in fresh.evidence:
            order.setdefault(fresh.prompts[rollout], []).append(rollout)
        choosing = [rollout for prompt in list(order)[::2] for rollout in order[prompt]] if len(versions) > 1 else []
        judging = sorted({*fresh.evidence} - {*choosing})
        left, wanted, rounds = list(versions), _FIRST_ROUND, dict.fromkeys(versions, 0.0)
        while len(left) > 1 and choosing:
            part, choosing = fresh.select(choosing[:wanted]), choosing[wanted:]
            for version in left:
                rounds[version] += float(self._replay(version, part).rounds.sum())
            left, wanted = sorted(left, key=rounds.__getitem__)[: (len(left) + 1) // 2], 2 * wanted
        return left[0], judging

    def _replay(self, version: str, batches: Sequence[RolloutBatch]) -> Replay:
        drafter, depth, drafting = self._lineage.version(version), self._settings.depth, self._settings.drafting
        parts = [
            replay_each({version: drafter}, self._target.at(batch.policy_version), [batch], depth, drafting)[version]
            for batch in batches
        ]
        return Replay.concat(parts)

    # --- what became of it
    def measures(self, entry_id: str) -> bool:
        """Whether the rollouts of a queue entry may measure the version published last: they did not choose it."""
        after = None if self._promise is None else self._promise.after
        return after is None or arrival(entry_id) > arrival(after)

    def settle(self, fresh: Fresh) -> dict[str, Any] | None:
        """Measure the gain of the version published last; its event once that is known well enough."""
        promise = self._promise
        if promise is None or not {promise.version, promise.before} <= fresh.replays.keys():
            return None
        index = np.array(fresh.evidence, dtype=np.int64)
        pair = [fresh.replays[version].select(index) for version in (promise.version, promise.before)]
        if (pooled := self._promise_pool.add(fresh, pair, fresh.evidence)) is not None:
            (new, old), groups = pooled
            promise.add(new, old, groups, max(batch.policy_version for batch in fresh.batches))
        return self._settled() if promise.settled else None

    def promoted(
        self, version: str, before: str | None, facts: Mapping[str, Any], *, is_candidate: bool
    ) -> dict[str, Any] | None:
        """`version` is served now instead of `before`. All trials begin again.

        `facts`: its evidence (`Contest.facts`), with the newest queue entry of it as `judged_to`. `is_candidate`:
        training goes on from it. Returns what `begin` does.
        """
        event = self.begin(version)
        if before is not None:
            gain = facts["gain"]
            promised, after = facts.get("promised", gain), facts.get("judged_to")
            self._promise = Promise(version, before, promised, gain, after=after, archived="train_on" in facts)
        if is_candidate:
            self._trials[CANDIDATE].variance = 0.0
        return event

    def _settled(self) -> dict[str, Any] | None:
        promise, self._promise = self._promise, None
        if promise is None:
            return None
        if (
            promise.archived
        ):  # each win is one turn, however few rollouts it had; the candidate's promises are not like it
            self._won.setdefault(promise.version, Kept()).add(promise, weight=1.0)
            self._won = {version: won for version, won in self._won.items() if self._lineage.existing(version)}
        else:
            self._kept.add(promise, weight=promise.weight)
        return promise.event()


def archive_trial(place: int) -> Trial:
    """The trial of the archived version that is looked at as the `place`-th, from 1: all together spend one share.

    Each has little of the error, and one claim must be enough for a version that fits again: its gain is taken to vary
    from claim to claim by no more than it must, until three looks show more.
    """
    return Trial(_ARCHIVE_SHARE / (place * (place + 1)), claims=0.0)


def given_up(verdict: Verdict, others: int, min_gain: float) -> str:
    """Why a version that a person sent is refused; empty while it may still prove better.

    `others`: versions that were published since it came. `min_gain`: the gain that a swap is worth.
    """
    if verdict.looks and verdict.high < min_gain:
        return "it is no better"
    if verdict.looks >= SENT_LOOKS:
        return f"{verdict.looks} looks have not shown it to be better"
    if others >= _SENT_OUTRUN:
        return f"{others} other versions were published while it waited"
    return ""


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _without_drafter(found: Replay) -> Replay:
    """What plain decoding does with the same rollouts: one token a round."""
    nothing = np.zeros_like(found.accepted)
    return Replay(found.tokens, found.tokens.copy(), np.zeros_like(found.rounds), nothing, nothing.copy())
