"""Follows which drafter is served, and measures how much it differs from the one before it on the same rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.records import SamplingSettings

#: So many batches in a row that were scored with the previous version alone may have been scored before the change.
#: After more, or if a batch has neither version, the watched one is taken for deleted.
_SCORED_BEFORE: Final = 64
#: Number of versions whose order is remembered. No engine is further behind.
_OFFERED_VERSIONS: Final = 32
#: Rollouts on which a drafter is compared with its predecessor, one tick's worth, before its α is watched.
_COMPARED_ROLLOUTS: Final = 64
#: ... and after that, until so many prompts tell the two apart, or so many rollouts.
_FOLLOWED_PROMPTS: Final = 64
_FOLLOWED_ROLLOUTS: Final = 512


@dataclass(slots=True)
class Succession:
    """Follows which drafter is served, and compares each new one with the one before it on the same rollouts.

    The reason of the change does not matter: a publish, a rollback by a person, another worker. The rollouts came after
    the change, so the drafter was not selected on them.
    """

    watched: str | None = None  # the version whose α feeds the monitor
    offered: list[str] = field(default_factory=list)  # versions, in the order in which they last became the latest
    returned: list[str] = field(default_factory=list)  # versions that became the latest more than once
    successor: str | None = None  # the version that is being compared with the watched one
    previous: str | None = None  # the version that was watched before
    passed: int = 0  # batches in a row that were scored with `previous` and not with `watched`
    differences: dict[str, list[float]] = field(default_factory=dict)  # prompt -> [sum of differences of α, rollouts]
    followed: dict[str, list[float]] = field(default_factory=dict)  # the same of `watched` and `previous`

    @property
    def follows(self) -> str | None:
        """The version that the watched one is still compared with: few prompts have told by how much they differ.

        None while a newer one is compared with the watched one.
        """
        return self.previous if self.followed and self.successor is None else None

    def feed(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
        *,
        served: str,
        latest: str | None,
        strata: Sequence[str] | None = None,
        entropies: Sequence[float] | None = None,
        arrived: float | None = None,
        sampling: SamplingSettings | None = None,
    ) -> list[DriftReading]:
        """Feed the monitor one batch. `replays`: per version, the rollouts' tokens and rounds.

        Returns one reading per closed tick. `strata`, `entropies`, `arrived`, `sampling`: as of `DriftMonitor.observe`.
        `served` drafted the batch's rollouts. `latest` is offered to engines now. `prompts`: of each rollout.

        Engines load a new version one after another. Rollouts of an engine that still has an older version count too,
        replayed with the watched version. If the watched version was deleted, and so was not replayed, the monitor's
        baseline starts from scratch with the served one.
        """
        if latest is not None and self.offered[-1:] != [latest]:
            self.returned = sorted({*self.returned, latest} & {*self.offered})
            self.offered = [*(v for v in self.offered if v != latest), latest][-_OFFERED_VERSIONS:]
        if self.watched is None:
            self.watched = served
        elif self.watched not in replays and self.previous in replays and self.passed < _SCORED_BEFORE:
            self.passed += 1
            return []  # the batch was scored before that version was watched
        elif self.watched not in replays:
            monitor.rebase(0.0, math.inf)
            self._watch(served)
        elif self._is_newer(served):
            if self.successor not in (None, served):  # a third version came before the comparison was done
                self._succeed(monitor)
                return []  # this batch was not replayed with the version now watched
            self._compare(monitor, replays, prompts, served)
        else:
            self._follow(monitor, replays, prompts)
        self.passed = 0
        tokens, rounds = replays[self.watched]
        return monitor.observe(tokens, rounds, strata, entropies=entropies, arrived=arrived, sampling=sampling)

    def _is_newer(self, version: str) -> bool:
        """Whether a version became the latest after the watched one. False if it was never seen as the latest."""
        places = {v: place for place, v in enumerate(self.offered)}
        return places.get(version, -1) > places.get(self.watched or "", -1)

    def _compare(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
        successor: str,
    ) -> None:
        self.successor = successor
        _add(self.differences, prompts, replays[self.watched or successor], replays[successor])
        if _rollouts(self.differences) >= _COMPARED_ROLLOUTS:
            self._succeed(monitor)

    def _follow(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
    ) -> None:
        """Go on comparing the watched version with the one before it, and let the monitor know.

        A trainer that asks each prompt eight times has eight prompts in `_COMPARED_ROLLOUTS`, which tell little.
        """
        old, new = self.previous or "", self.watched or ""
        if not self.followed or self.successor is not None or old not in replays:
            return
        _add(self.followed, prompts, replays[old], replays[new])
        if not monitor.correct(*_difference(self.followed)) or self._is_told():
            self.followed = {}

    def _is_told(self) -> bool:
        return len(self.followed) >= _FOLLOWED_PROMPTS or _rollouts(self.followed) >= _FOLLOWED_ROLLOUTS

    def _succeed(self, monitor: DriftMonitor) -> None:
        """Watch the successor from now on."""
        found = self.differences
        monitor.rebase(*_difference(found), decided=self._served_again(self.successor or ""))
        self._watch(self.successor)
        self.followed = found
        if self._is_told():
            self.followed = {}

    def _served_again(self, version: str) -> bool:
        """Whether a version was the latest before: it was seen as that, or its number is below the watched one's."""
        return version in self.returned or _number(version) < _number(self.watched or "")

    def _watch(self, version: str | None) -> None:
        self.previous, self.watched, self.successor, self.differences = self.watched, version, None, {}
        self.followed = {}

    def difference(self) -> tuple[float, float]:
        """Mean over rollouts of the successor's α minus the watched one's, and the variance of that mean.

        Rollouts of one prompt are one observation; of fewer than two prompts the variance is infinite.
        """
        return _difference(self.differences)


def _add(
    into: dict[str, list[float]],
    prompts: Sequence[str],
    old: tuple[Sequence[float], Sequence[float]],
    new: tuple[Sequence[float], Sequence[float]],
) -> None:
    """Add by how much α of each rollout is higher in `new`."""
    for prompt, token, before, now in zip(prompts, old[0], old[1], new[1], strict=True):
        if before > 0 and now > 0:
            sums = into.setdefault(prompt, [0.0, 0.0])
            sums[0] += token / now - token / before
            sums[1] += 1


def _rollouts(differences: Mapping[str, Sequence[float]]) -> float:
    return math.fsum(count for _, count in differences.values())


def _difference(differences: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    if not differences:
        return 0.0, math.inf
    n = _rollouts(differences)
    mean = math.fsum(total for total, _ in differences.values()) / n
    clusters = len(differences)
    if clusters < 2:
        return mean, math.inf
    squares = math.fsum((total - count * mean) ** 2 for total, count in differences.values())
    return mean, squares / n**2 * clusters / (clusters - 1)


def _number(version: str) -> int:
    digits = version.partition("-")[0].removeprefix("v")
    return int(digits) if digits.isascii() and digits.isdigit() else 0
