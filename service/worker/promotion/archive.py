"""Archived versions where the served drafter falls: when they are asked, and which of them is judged."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafter.batch import RolloutBatch
from drafter.replay.acceptance import Replay, log_ratio
from drafter.replay.gate import Verdict
from service.settings import Settings
from service.worker.lineage import Lineage
from service.worker.promotion.evidence import LEAST_PROMPTS, Fresh, Pool

#: Rollouts of the first round of the halving; the next have twice as many each.
_FIRST_ROUND: Final = 4
#: Claims after which the archive is asked without a fall: α does not fall where prompts become easier for all drafters.
_UNASKED_CLAIMS: Final = 16
#: Most looks at the chosen version, while each claim has too few prompts and it seems better.
_ASKED_LOOKS: Final = 4
#: Standard errors by which the served drafter must fall for the archive to be asked.
_FALL: Final = 3.0
#: Weight of the newest claim in the level that it falls from.
_LEVEL_MEMORY: Final = 0.25


@dataclass(slots=True)
class Level:
    """Where the served drafter's log α has been of late."""

    mean: float = math.nan
    variance: float = 0.0  # of one claim about it
    fallen: bool = False  # and the archive was not asked since

    def to_json(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before the first claim."""
        return None if math.isnan(self.mean) else asdict(self)

    def take(self, replay: Replay, groups: npt.NDArray[np.int64] | None) -> None:
        """Take in a claim, and see whether α fell significantly. The level then starts there."""
        found = log_ratio(replay.tokens, replay.rounds, groups)
        if not math.isfinite(found.centre) or not math.isfinite(found.error):
            return
        change = 0.0 if math.isnan(self.mean) else found.centre - self.mean
        fell = change < -_FALL * math.sqrt(max(self.variance, found.error**2) + _LEVEL_MEMORY * found.error**2)
        if fell or math.isnan(self.mean):
            self.mean, self.variance = found.centre, found.error**2
        else:
            self.mean += _LEVEL_MEMORY * change
            self.variance += _LEVEL_MEMORY * (change**2 - self.variance)
        self.fallen = self.fallen or fell


class Archive:
    """The archived versions of a run, against the drafter that is served now."""

    def __init__(self, settings: Settings, lineage: Lineage) -> None:
        self._settings = settings
        self._lineage = lineage
        self._unasked = 0  # claims since it was asked
        self.begin()

    def begin(self, level: Level | None = None) -> None:
        """Begin against another served drafter, or go on from the level that a checkpoint holds."""
        self.level = level or Level()
        self._pool = Pool()
        self._asked: str | None = None  # the version that was chosen at a fall, and is not judged yet

    def watch(self, fresh: Fresh, served: Replay) -> None:
        """Take in the served drafter's replay of a claim: a fall asks the archive."""
        if pooled := self._pool.add(fresh, [served], range(len(fresh.prompts))):
            (replay,), groups = pooled
            self.level.take(replay, groups)

    def due(self, scored: Container[str]) -> list[str]:
        """Count a claim. Returns the versions to choose from: if the archive is asked, those not scored anyway."""
        self._unasked += 1
        asks = self.level.fallen or self._unasked > _UNASKED_CLAIMS
        return [version for version in self._lineage.archived() if version not in scored] if asks else []

    def choose(self, fresh: Fresh, versions: Sequence[str]) -> tuple[str, list[int]]:
        """The version to judge, and the rollouts that judge it. One that has no verdict yet is chosen again."""
        self._unasked = 0
        if self._asked is None or self._asked not in versions:
            return self._fittest(fresh, versions)
        return self._asked, list(fresh.evidence)

    def judged(self, version: str, verdict: Verdict, fresh: Fresh, *, waits: bool) -> None:
        """Take in the verdict on the version that was chosen. `waits`: it had too little evidence.

        The same version is judged again on the next claims while `waits`. It also is, a few times, where a claim has
        few prompts and the gain is large enough: the archive's part of the error is small, and needs several looks.
        """
        few = len({fresh.prompts[rollout] for rollout in fresh.evidence}) < LEAST_PROMPTS
        hopes = few and verdict.gain >= self._settings.gate_min_gain and verdict.looks < _ASKED_LOOKS
        self.level.fallen = not verdict.promote and (hopes or waits)
        self._asked = version if self.level.fallen else None

    def _fittest(self, fresh: Fresh, versions: Sequence[str]) -> tuple[str, list[int]]:
        """The archived version that fits best, by successive halving, and rollouts of prompts that did not choose it.

        Where there is a single prompt, it chooses, and the next claims judge.
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
                rounds[version] += float(self.replay(version, part).rounds.sum())
            left, wanted = sorted(left, key=rounds.__getitem__)[: (len(left) + 1) // 2], 2 * wanted
        return left[0], judging

    def replay(self, version: str, batches: Sequence[RolloutBatch]) -> Replay:
        """What a version would have accepted of all these rollouts."""
        return Replay.concat([self._lineage.replay(version, batch) for batch in batches])
