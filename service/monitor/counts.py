"""Arithmetic of acceptance counts: differences of cumulative ones, sums, and what a server's counts say about α.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Counts = dict[str, Any]
#: Two-sided 95 % quantile of the normal distribution.
Z_95: Final = 1.959963984540054
#: Method of counts that were made with a published drafter; others carry the engine's name for theirs (ngram, mtp).
OUR_DRAFTER: Final = "drafter"
_SUMS: Final = ("rounds", "accepted_tokens", "drafted_tokens", "emitted_tokens", "window_seconds")


def since(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Counts:
    """Give what cumulative counts grew by; all of them where they began anew (a restart: fewer rounds than before)."""
    if before is None or now["rounds"] < before["rounds"] or now["accepted_tokens"] < before["accepted_tokens"]:
        return _combined(now, {}, 0)
    return _combined(now, before, -1)


def total(more: Mapping[str, Any], so_far: Mapping[str, Any] | None) -> Counts:
    """Sum of two sets of counts."""
    return _combined(more, so_far or {}, 1)


def _combined(a: Mapping[str, Any], b: Mapping[str, Any], sign: int) -> Counts:
    result: Counts = {}
    for name in _SUMS:
        known = a.get(name) is not None and (not b or b.get(name) is not None)
        result[name] = max(0, a[name] + sign * (b.get(name) or 0)) if known else None
    left, right = list(a.get("accepted_per_position") or ()), list(b.get("accepted_per_position") or ())
    right += [0] * (len(left) - len(right))
    left += [0] * (len(right) - len(left))
    result["accepted_per_position"] = [max(0, x + sign * y) for x, y in zip(left, right, strict=True)]
    return result


def live_sums(records: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Pool acceptance records to (emitted tokens, rounds); None without a round.

    `emitted_tokens` is what rounds emitted after trimming at the end of a response, which is what replay α counts.
    Where the engine does not know it, every round is taken to have emitted its accepted drafts and one token more,
    which is high by what was trimmed.
    """
    tokens = rounds = 0.0
    for record in records:
        count = number(record.get("rounds"))
        emitted = number(record.get("emitted_tokens"))
        accepted = number(record.get("accepted_tokens"))
        if emitted is None and accepted is not None and count is not None:
            emitted = accepted + count
        if count is None or count <= 0 or emitted is None:
            continue
        tokens += emitted
        rounds += count
    return (tokens, rounds) if rounds > 0 else None


def method_of(record: Mapping[str, Any]) -> str:
    """How the engine speculated."""
    found = record.get("method")
    return found if isinstance(found, str) and found else OUR_DRAFTER


def by_method(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Live α and rounds of every method other than a published drafter: `{"ngram": {"alpha", "rounds"}}`."""
    return _pooled((method_of(r), r) for r in records if method_of(r) != OUR_DRAFTER)


def by_drafter(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Live α and rounds per published drafter: counts of two drafters are never one number here."""
    return _pooled((str(r.get("drafter_version")), r) for r in records if method_of(r) == OUR_DRAFTER)


def _pooled(pairs: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, record in pairs:
        groups[name].append(record)
    found = {name: live_sums(records) for name, records in sorted(groups.items())}
    return {name: {"alpha": s[0] / s[1], "rounds": int(s[1])} for name, s in found.items() if s is not None}


def servers(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per server and method: what it counted with the drafter that it reported last, over all policies.

    `half_width` is of a 95 % interval that takes rounds for independent, from the counts per position: with P_i the
    share of rounds that kept at least i drafts, the number kept has mean sum P_i and mean square sum (2i - 1) P_i.
    """
    groups: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record.get("reporter") is not None:  # else it is the sum over all of them
            groups[str(record.get("reporter")), method_of(record)].append(record)
    lines = []
    for (reporter, method), all_records in sorted(groups.items()):
        newest = max(all_records, key=lambda r: number(r.get("created")) or 0.0)
        own = [r for r in all_records if r.get("drafter_version") == newest.get("drafter_version")]
        pooled = live_sums(own)
        if pooled is None:
            continue
        tokens, rounds = pooled
        counts = _positions(own)
        kept = [count / rounds for count in counts]
        lines.append(
            {
                "reporter": reporter,
                "engine": newest.get("engine") or "",
                "method": method,
                "drafter_version": newest.get("drafter_version"),
                "alpha": tokens / rounds,
                "half_width": _half_width(kept, rounds),
                "rounds": int(rounds),
                "kept_per_position": kept,
                "reported": newest.get("created"),
            }
        )
    return lines


def _positions(records: Sequence[Mapping[str, Any]]) -> list[float]:
    columns: list[float] = []
    for record in records:
        for i, value in enumerate(record.get("accepted_per_position") or ()):
            columns += [0.0] * (i + 1 - len(columns))
            columns[i] += number(value) or 0.0
    return columns


def _half_width(kept: Sequence[float], rounds: float) -> float | None:
    if not kept or rounds < 2:
        return None
    mean = math.fsum(kept)
    square = math.fsum((2 * i + 1) * share for i, share in enumerate(kept))
    return Z_95 * math.sqrt(max(square - mean * mean, 0.0) / rounds)


def number(value: object) -> float | None:
    """`value` as a finite float; None for anything else (JSON true and "3" are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
