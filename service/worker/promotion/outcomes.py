"""What became of published versions: the newest one's gain is measured, and corrects what is promised of the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from service.monitor.events import GateEvidence, Realised
from service.monitor.records import arrival
from service.worker.lineage import Lineage
from service.worker.promotion.evidence import Fresh, Pool
from service.worker.promotion.promises import Kept, Promise

#: If an archived version's wins brought less than this part of what was expected, it wins by several claims together
#: only. Where kinds of prompts alternate, a win brings -1 if each claim is of another kind than the one before, 0 if
#: the kind changes after every second claim, 1/3 if after every third.
_LASTED: Final = 1.0 / 6.0


class Outcomes:
    """The promise that is being measured, and what earlier ones brought."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._promise: Promise | None = None
        self._pool = Pool()
        self._kept = Kept()
        self._won: dict[str, Kept] = {}  # archived versions that won, and what came of it

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON values. Claims that are pooled are not in it."""
        return {
            "promise": None if self._promise is None else asdict(self._promise),
            "kept": asdict(self._kept),
            "won": {version: asdict(won) for version, won in self._won.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._promise = None if state["promise"] is None else Promise(**state["promise"])
        self._pool = Pool()
        self._kept = Kept(**state["kept"])
        self._won = {version: Kept(**won) for version, won in state["won"].items()}

    @property
    def correction(self) -> float:
        """Factor for the logarithmic gain that a look expects, by what earlier versions brought."""
        return self._kept.correction

    def lasts(self, version: str) -> bool:
        """Whether an archived version may win by one claim: it has never won, or what it won lasted."""
        won = self._won.get(version)
        return won is None or won.kept_share >= _LASTED

    @property
    def watched(self) -> str | None:
        """The version served before, while the newest one's gain is being measured: every batch needs its score."""
        return None if self._promise is None else self._promise.before

    @property
    def unmeasured(self) -> bool:
        """Whether nothing is known yet of what the newest version really gains, and it can be measured."""
        promise = self._promise
        return promise is not None and promise.rollouts == 0 and self._lineage.existing(promise.before) is not None

    def begin(self, version: str, before: str, evidence: GateEvidence) -> None:
        """Measure from now on what `version`, which won by `evidence`, gains over `before`."""
        gain = math.nan if evidence.gain is None else evidence.gain
        promised = gain if evidence.promised is None else evidence.promised
        self._promise = Promise(
            version,
            before,
            promised,
            gain,
            after=evidence.judged_to,
            archived=evidence.archived,
            trained_to=evidence.trained_to,
        )

    def measures(self, entry_id: str) -> bool:
        """Whether rollouts of this queue entry may measure the newest version: not if they helped to choose it."""
        after = None if self._promise is None else self._promise.after
        return after is None or arrival(entry_id) > arrival(after)

    def settle(self, fresh: Fresh) -> Realised | None:
        """Measure the gain of the version published last; its event once that is known well enough.

        A trainer that goes back ends that: the version was made for a policy that is gone, so no promise was broken.
        """
        promise = self._promise
        if promise is None or not {promise.version, promise.before} <= fresh.replays.keys():
            return None
        if promise.trainer_went_back(max(batch.policy_version for batch in fresh.batches)):
            return self.end()
        index = np.array(fresh.evidence, dtype=np.int64)
        pair = [fresh.replays[version].select(index) for version in (promise.version, promise.before)]
        if (pooled := self._pool.add(fresh, pair, fresh.evidence)) is not None:
            (new, old), groups = pooled
            promise.add(new, old, groups, max(batch.policy_version for batch in fresh.batches))
        return self._counted(promise) if promise.settled else None

    def end(self) -> Realised | None:
        """Another drafter serves: measure no more. The event of what is known by now; None where nothing is."""
        promise, self._pool = self._promise, Pool()
        self._promise = None
        return self._counted(promise) if promise is not None and promise.rollouts else None

    def _counted(self, promise: Promise) -> Realised:
        self._promise = None
        if promise.archived:  # each win is one turn, however few rollouts; the candidate's promises are not like it
            self._won.setdefault(promise.version, Kept()).add(promise, weight=1.0)
            self._won = {version: won for version, won in self._won.items() if self._lineage.existing(version)}
        else:
            self._kept.add(promise, weight=promise.weight)
        return promise.event()
