"""What the shape of a difference tells: which drafts, which versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.monitor.live.engine import MISSING, LiveRule, Matched, Scan, at_common_depth
from service.monitor.live.replays import COIN_FLIPS, Cell, Replays

#: What moves a prompt's α moves the shares of its first drafts and of its later ones alike, but for so much of it.
_COMMON: Final = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """log(live / replay) of the share that is accepted of the drafts that are verified: the first, and the later."""

    first: float
    later: float
    error: float  # of the difference


def shape_of(known: Sequence[Matched], spread: float) -> Shape | None:
    """None where too little is known by position."""
    depth = min((min(len(k.block.accepted), len(k.cell.accepted), len(k.cell.reached)) for k in known), default=0)
    if depth < 2:
        return None
    rounds = float(sum(k.block.rounds for k in known))
    live_first = float(sum(k.block.accepted[0] for k in known))
    live_later = float(sum(sum(k.block.accepted[1:depth]) for k in known))
    first = math.fsum(k.block.rounds * _share(k.cell, 0) for k in known)
    later = math.fsum(k.block.accepted[j - 1] * _share(k.cell, j) for k in known for j in range(1, depth))
    if min(live_first, first, later) < MISSING:
        return None
    chances = 1 / max(live_first, 1.0) + 1 / max(live_later, 1.0) + 1 / later
    return Shape(
        math.log(live_first / first),
        math.log(max(live_later, 0.5) / later),
        math.sqrt(chances + _COMMON * spread / rounds),
    )


def _share(cell: Cell, position: int) -> float:
    return cell.accepted[position] / cell.reached[position] if cell.reached[position] > 0 else 0.0


def only_later(shape: Shape | None) -> bool:
    """The first draft is what it should be, and the later ones are not."""
    if shape is None:
        return False
    return shape.first > 0.25 * shape.later and shape.later - shape.first < -4.0 * shape.error


def fell_while_replay_healed(known: Sequence[Matched], spread: float) -> bool:
    """Whether live fell from one version to a newer one, and replay rose, both beyond chance."""
    by_version: dict[str, list[Matched]] = {}
    for one in known:
        by_version.setdefault(one.block.drafter_version, []).append(one)
    sides = []
    for found in by_version.values():
        rounds = float(sum(k.rounds for k in found))
        of_cell: dict[int, float] = {}
        for k in found:  # blocks may be of other prompts: what is known of one of them is the least that is known
            of_cell[id(k.cell)] = max(k.replayed, of_cell.get(id(k.cell), 0.0))
        replayed = math.fsum(of_cell.values())
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


def as_another(known: Sequence[Matched], replays: Replays, rule: LiveRule) -> str | None:
    """The version that accepts, in replay, what this engine accepts; None where none does or nobody knows."""
    names = set.intersection(*(set(replays.others(k.block)) for k in known)) if known else set()
    best = None
    for name in sorted(names):
        scan, stretch = Scan(replays, outliers=False), None
        for one in known:
            other = at_common_depth(one.block, replays, rule, replays.others(one.block)[name])
            stretch = stretch if other is None else scan.add(other)
        if stretch is not None and abs(stretch.log_ratio) < 2 * stretch.error and stretch.error < 0.1:
            distance = abs(stretch.log_ratio) / stretch.error
            best = min(best or (distance, name), (distance, name))
    return None if best is None else best[1]
