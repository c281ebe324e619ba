"""Arithmetic of acceptance counts: differences of cumulative counts, sums, and α by server.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from service.monitor.records import Z_95, AcceptanceRecord

_Number = TypeVar("_Number", int, float)


def since(now: AcceptanceRecord, before: AcceptanceRecord | None) -> AcceptanceRecord:
    """The growth of cumulative counts since a record; all counts if they began again.

    Another `life` shows that they did. If the reporter names none, a count that fell does: a restart.
    """
    if before is None or other_life(now, before) or (has_fallen(now, before) and not is_late(now, before)):
        return now
    older, newer = before.by_prompt or {}, now.by_prompt or {}
    if before.rounds and not older:  # earlier rounds without prompts: the prompts' counts now include those
        newer = {}
    more = {
        prompt: (tokens - older.get(prompt, (0, 0))[0], rounds - older.get(prompt, (0, 0))[1])
        for prompt, (tokens, rounds) in newer.items()
    }
    grown = {prompt: counts for prompt, counts in more.items() if counts[0] >= 0 and counts[1] > 0}
    return replace(_combined(now, before, -1), by_prompt=grown)


def other_life(now: AcceptanceRecord, before: AcceptanceRecord) -> bool:
    """Whether both name their life, and it is not the same."""
    return now.life is not None and before.life is not None and now.life != before.life


def has_fallen(now: AcceptanceRecord, before: AcceptanceRecord) -> bool:
    """Whether a count is lower than before."""
    return any(new < old for new, old in _pairs(now, before))


def is_late(now: AcceptanceRecord, before: AcceptanceRecord) -> bool:
    """Whether `now` is older than `before` although it came later: within a life, counts only grow."""
    return now.life is not None and now.life == before.life and has_fallen(now, before)


def _pairs(now: AcceptanceRecord, before: AcceptanceRecord) -> Iterator[tuple[int, int]]:
    """Pairs (now, before) of the counts that both have and that never fall.

    Emitted tokens are left out: they are a difference of two counters, which may be read at different times.
    """
    for name in ("rounds", "accepted_tokens", "drafted_tokens"):
        new, old = getattr(now, name), getattr(before, name)
        if new is not None and old is not None:
            yield new, old
    yield from zip(now.accepted_per_position, before.accepted_per_position, strict=False)


def total(more: AcceptanceRecord, so_far: AcceptanceRecord | None) -> AcceptanceRecord:
    """`more` with the sum of both counts. Counts by prompt are not summed, but left out."""
    return replace(more if so_far is None else _combined(more, so_far, 1), by_prompt=None)


def _combined(a: AcceptanceRecord, b: AcceptanceRecord, sign: int) -> AcceptanceRecord:
    places = zip_longest(a.accepted_per_position, b.accepted_per_position, fillvalue=0)
    return replace(
        a,
        rounds=max(0, a.rounds + sign * b.rounds),
        accepted_tokens=_sum(a.accepted_tokens, b.accepted_tokens, sign),
        drafted_tokens=_sum(a.drafted_tokens, b.drafted_tokens, sign),
        emitted_tokens=_sum(a.emitted_tokens, b.emitted_tokens, sign),
        window_seconds=_sum(a.window_seconds, b.window_seconds, sign),
        finished_requests=_sum(a.finished_requests, b.finished_requests, sign),
        accepted_per_position=tuple(max(0, x + sign * y) for x, y in places),
    )


def _sum(one: _Number | None, other: _Number | None, sign: int) -> _Number | None:
    return None if one is None or other is None else max(0, one + sign * other)


def sound(records: Iterable[AcceptanceRecord], sick: Collection[tuple[str, str | None]]) -> list[AcceptanceRecord]:
    """Leave out the counts of `sick` engines (reporter, drafter version), which are no evidence of the drafter."""
    return [r for r in records if r.reporter is None or (r.reporter, r.drafter_version) not in sick]


def live_sums(records: Iterable[AcceptanceRecord]) -> tuple[float, float] | None:
    """Pool acceptance records to (emitted tokens, rounds); None without a round. What lacks either adds nothing."""
    tokens = rounds = 0.0
    for record in records:
        if record.rounds > 0 and (emitted := record.emitted) is not None:
            tokens += emitted
            rounds += record.rounds
    return (tokens, rounds) if rounds > 0 else None


@dataclass(frozen=True, slots=True)
class LiveAlpha:
    """Live α: tokens per round, and the number of rounds behind it."""

    alpha: float
    rounds: int


def by_method(records: Iterable[AcceptanceRecord]) -> dict[str, LiveAlpha]:
    """Live α of every method other than a published drafter."""
    groups: defaultdict[str, list[AcceptanceRecord]] = defaultdict(list)
    for record in records:
        if not record.ours:
            groups[record.method].append(record)
    found = {name: live_sums(records) for name, records in sorted(groups.items())}
    return {name: LiveAlpha(s[0] / s[1], int(s[1])) for name, s in found.items() if s is not None}


@dataclass(frozen=True, slots=True)
class ServerLine:
    """The counts of one server by one method, with the drafter that it reported last."""

    reporter: str
    engine: str
    method: str
    drafter_version: str | None
    alpha: float
    half_width: float | None
    rounds: int
    kept_per_position: list[float]
    reported: float | None


def servers(records: Iterable[AcceptanceRecord]) -> list[ServerLine]:
    """One line per server and method, over all policies.

    `half_width` is that of a 95 % interval, as if rounds were independent. It follows from the counts per position:
    if P_i is the share of rounds that kept at least i drafts, the number kept has mean Σ P_i and mean square
    Σ (2i - 1) P_i.
    """
    groups: defaultdict[tuple[str, str], list[AcceptanceRecord]] = defaultdict(list)
    for record in records:
        if record.reporter is not None:  # not a sum over all reporters
            groups[record.reporter, record.method].append(record)
    lines = []
    for (reporter, method), all_records in sorted(groups.items()):
        newest = max(all_records, key=lambda r: (r.reported, -1 if r.policy_version is None else r.policy_version))
        own = [r for r in all_records if r.drafter_version == newest.drafter_version]
        pooled = live_sums(own)
        if pooled is None:
            continue
        tokens, rounds = pooled
        kept = [sum(counts) / rounds for counts in zip_longest(*(r.accepted_per_position for r in own), fillvalue=0)]
        lines.append(
            ServerLine(
                reporter=reporter,
                engine=newest.engine,
                method=method,
                drafter_version=newest.drafter_version,
                alpha=tokens / rounds,
                half_width=_half_width(kept, rounds),
                rounds=int(rounds),
                kept_per_position=kept,
                reported=newest.created,
            )
        )
    return lines


def _half_width(kept: Sequence[float], rounds: float) -> float | None:
    if not kept or rounds < 2:
        return None
    mean = math.fsum(kept)
    square = math.fsum((2 * i + 1) * share for i, share in enumerate(kept))
    return Z_95 * math.sqrt(max(square - mean * mean, 0.0) / rounds)
