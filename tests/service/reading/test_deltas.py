"""What changed since a cursor: a reader that merges it has what a reader of everything has."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from service.reading.deltas import Deltas


def points(*policies: int, text: bytes = b"p") -> dict[int, bytes]:
    return dict.fromkeys(policies, text)


def test_only_what_changed_is_said() -> None:
    deltas = Deltas()
    first = deltas.take(points(1, 2, 3), [b"a"])
    assert deltas.take(points(1, 2, 3), [b"a"]) == first, "nothing changed"
    assert deltas.since(first) == ([], [], [], 1)
    second = deltas.take(points(2, 3) | {4: b"new", 2: b"other"}, [b"a", b"b"])
    assert deltas.since(first) == ([b"other", b"new"], [1], [b"b"], 1)
    assert deltas.since(second) == ([], [], [], 2)


def test_what_is_not_known_is_read_again() -> None:
    deltas = Deltas()
    cursor = deltas.take(points(1), [b"a", b"b"])
    assert Deltas().since(cursor) is None, "of another process"
    process = cursor.split(".")[0]
    for odd in (
        "",
        "x",
        f"{process}.9.0",
        f"{process}.1.7",
        f"{process}.-1.0",
        f"{process}.1",
        f"{process}.1.0.0",
        f"{process}.².",
    ):
        assert deltas.since(odd) is None, odd
    deltas.take(points(1), [b"b"])
    assert deltas.since(cursor) is None, "the history forgot its first events"


def test_of_those_that_are_gone_so_many_are_remembered() -> None:
    deltas = Deltas()
    with patch("service.reading.deltas._GONE", 2):
        first = deltas.take(points(1, 2, 3, 4), [])
        second = deltas.take(points(2, 3, 4), [])
        third = deltas.take(points(4), [])
        assert deltas.since(first) is None
        assert deltas.since(second) == ([], [2, 3], [], 0)
        assert deltas.since(third) == ([], [], [], 0)


@pytest.mark.parametrize("seed", range(20))
def test_readers_that_come_now_and_then_have_all_there_is(seed: int) -> None:
    rng, deltas = random.Random(seed), Deltas()
    now: dict[int, bytes] = {}
    events: list[bytes] = []
    readers: list[tuple[str, dict[int, bytes], list[bytes]]] = [(deltas.take(now, events), {}, [])] * 3
    for step in range(200):
        for _ in range(rng.randrange(3)):
            now[rng.randrange(30)] = str(step).encode()
        if now and rng.random() < 0.3:
            del now[rng.choice(sorted(now))]
        events += [str((step, n)).encode() for n in range(rng.randrange(2))]
        if rng.random() < 0.02:
            events = events[3:]
        cursor = deltas.take(now, events)
        who = rng.randrange(3)
        before, had, read = readers[who]
        found = deltas.since(before)
        if found is None:
            readers[who] = cursor, dict(now), list(events)
            continue
        changed = {policy: text for policy, text in now.items() if had.get(policy) != text}
        assert set(found.points) == set(changed.values())
        assert {policy for policy in had if policy not in now} <= set(found.gone)
        assert read[: found.kept_events] + list(found.events) == events
        readers[who] = cursor, dict(now), list(events)
