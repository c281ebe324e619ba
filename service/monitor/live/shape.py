"""Which drafts and which versions differ: this names the fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.monitor.live.engine import MISSING, LiveRule, Matched, Scan, at_common_depth
from service.monitor.live.replays import COIN_FLIPS, Replays, VersionReplay

#: Share of the variance between prompts that does not move first and later drafts alike.
_APART: Final = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """log(live / replay) of the share of verified drafts that is accepted: of first drafts, and of later ones."""

    first: float
    later: float
    error: float  # of the difference


def shape_of(matched: Sequence[Matched], spread: float) -> Shape | None:
    """The shape over these blocks; None where too few drafts are known by position."""
    depth = min((min(len(k.block.accepted), len(k.replay.accepted), len(k.replay.reached)) for k in matched), default=0)
    if depth < 2:
        return None
    rounds = float(sum(k.block.rounds for k in matched))
    live_first = float(sum(k.block.accepted[0] for k in matched))
    live_later = float(sum(sum(k.block.accepted[1:depth]) for k in matched))
    first = math.fsum(k.block.rounds * _share(k.replay, 0) for k in matched)
    later = math.fsum(k.block.accepted[j - 1] * _share(k.replay, j) for k in matched for j in range(1, depth))
    if min(live_first, first, later) < MISSING:
        return None
    chances = 1 / live_first + 1 / max(live_later, 1.0) + 1 / later
    return Shape(
        math.log(live_first / first),
        math.log(max(live_later, 0.5) / later),
        math.sqrt(chances + _APART * spread / rounds),
    )


def _share(replay: VersionReplay, position: int) -> float:
    return replay.accepted[position] / replay.reached[position] if replay.reached[position] > 0 else 0.0


def only_later_drafts_differ(shape: Shape | None) -> bool:
    """Whether first drafts are accepted as in replay, and later ones are not."""
    if shape is None:
        return False
    return shape.first > 0.25 * shape.later and shape.later - shape.first < -4.0 * shape.error


def fell_while_replay_healed(matched: Sequence[Matched], spread: float) -> bool:
    """Whether the newest version has a lower live α than an older one, and a higher replay α, both beyond chance."""
    by_version: dict[str, list[Matched]] = {}
    for one in matched:
        by_version.setdefault(one.block.drafter_version, []).append(one)
    sides = []
    for found in by_version.values():
        rounds = float(sum(k.rounds for k in found))
        of_replay: dict[int, float] = {}
        for k in found:  # blocks may rest on the same replayed rounds: only those of one block are sure
            of_replay[id(k.replay)] = max(k.replayed, of_replay.get(id(k.replay), 0.0))
        replayed = math.fsum(of_replay.values())
        live, expected = math.fsum(k.tokens for k in found), math.fsum(k.expected for k in found)
        sides.append((math.log(max(live, 1.0) / rounds), math.log(expected / rounds), rounds, replayed))
    if len(sides) < 2:
        return False
    new = sides[-1]
    for old in sides[:-1]:
        live_error = math.sqrt((spread + COIN_FLIPS) * (1 / new[2] + 1 / old[2]))
        replay_error = math.sqrt(spread * (1 / new[3] + 1 / old[3]))
        if new[0] - old[0] < -3 * live_error and new[1] - old[1] > 3 * replay_error:
            return True
    return False


def version_that_fits(matched: Sequence[Matched], replays: Replays, rule: LiveRule) -> str | None:
    """The version that accepts, in replay, what this engine accepts; None where none does or nobody knows."""
    names = set.intersection(*(set(replays.others(k.block)) for k in matched)) if matched else set()
    best = None
    for name in sorted(names):
        scan, stretch = Scan(replays, outliers=False), None
        for one in matched:
            other = at_common_depth(one.block, replays, rule, replays.others(one.block)[name])
            stretch = stretch if other is None else scan.add(other)
        if stretch is not None and abs(stretch.log_ratio) < 2 * stretch.error and stretch.error < 0.1:
            distance = abs(stretch.log_ratio) / stretch.error
            best = min(best or (distance, name), (distance, name))
    return None if best is None else best[1]
