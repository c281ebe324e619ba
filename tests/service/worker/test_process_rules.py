"""When a worker process tries a run again, sets it aside, and whose turn it is: by numbers alone."""

from __future__ import annotations

import pytest
from redis import Redis

from service.storage.reports.store import Store
from service.worker.process import deaths
from service.worker.process.deaths import Deaths
from service.worker.process.runs import Run
from service.worker.process.turns import AHEAD_SECONDS, Turns

NOW = 1_000_000.0
FILE = (7, 1_700_000_000)


@pytest.fixture
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.worker.process.deaths.time.time", lambda: NOW)


@pytest.mark.parametrize(
    ("died", "ago", "aside"),
    [
        (2, 0.0, None),
        (3, 0.0, 20.0),
        (3, 15.0, 5.0),
        (3, 20.0, None),
        (4, 0.0, 40.0),
        (5, 10.0, 70.0),
        (100, 0.0, 86_400.0),
        (3, -20.0, 20.0),  # a clock was set back since: longer than the pause nobody waits
        (3, -20.5, None),  # by so much that nobody knows how long ago it was
    ],
)
@pytest.mark.usefixtures("_noon")
def test_each_further_death_sets_a_run_aside_for_twice_as_long(died: int, ago: float, aside: float | None) -> None:
    found = deaths._set_aside("r", "opened", died, NOW - ago, 3)
    assert (None if found is None else found[0]) == aside
    assert found is None or f"died {died} times while it opened this run" in found[1]


@pytest.mark.usefixtures("_noon")
def test_only_the_end_of_a_process_is_a_death_and_only_with_the_same_target(redis_client: Redis) -> None:
    store, living = Store(redis_client, "r"), Deaths(redis_client)
    for _ in range(5):  # Redis went away before the end could be noted
        assert living.begin("r", FILE) is None
        assert not living.happened("r", FILE)
    assert store.begun("opening", FILE) == (1, NOW)
    assert Deaths(redis_client).happened("r", FILE)
    living.end("r")
    assert not Deaths(redis_client).happened("r", FILE)
    assert store.begun("opening", FILE) == (0, 0.0)
    assert [Deaths(redis_client).begin("r", FILE) for _ in range(2)] == [None] * 2
    for _ in range(2):
        assert living.begin("r", FILE) is None, "it had ended, and others died since"
    assert store.begun("opening", FILE) == (3, NOW)
    last = Deaths(redis_client)
    aside = last.begin("r", FILE)
    assert aside is not None
    assert aside[0] == 20.0
    assert store.begun("opening", FILE) == (3, NOW), "that was no try"
    assert last.begin("r", (8, 0)) is None, "another target is tried at once"
    last.end("r")
    store.begin("working", FILE, 1)
    assert last.happened("r", FILE)
    store.begin("working", FILE, 3)
    assert last.begin("r", FILE) is None
    store.begin("working", FILE, 4)
    aside = last.begin("r", FILE)
    assert aside is not None
    assert "died 4 times while it worked on this run" in aside[1]
    last.forget("r")
    assert not Deaths(redis_client).happened("r", FILE)
    assert last.begin("r", FILE) is None


def test_a_run_that_fails_again_and_again_is_tried_after_a_minute_at_most() -> None:
    run = Run()
    assert [run.back_off(1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert run.failures == 8
    assert [Run(failures=2000).back_off(seconds) for seconds in (5.0, 0.001)] == [60.0, 0.001 * 2.0**10]


def test_of_runs_at_work_who_took_least_is_next_and_nobody_gets_far_ahead() -> None:
    turns = Turns()
    assert turns.order(["b", "a"]) == ["b", "a"]
    assert turns.may("a")
    turns.asked("a", 1.0, at_work=True)
    turns.asked("b", AHEAD_SECONDS, at_work=True)  # it begins where the other one stands
    assert turns.order(["b", "a"]) == ["a", "b"]
    assert [turns.may("a"), turns.may("b")] == [True, True]
    turns.asked("b", 0.01, at_work=True)
    assert [turns.may("a"), turns.may("b")] == [True, False]
    assert turns.order(["a", "new", "b"]) == ["new", "a", "b"], "a new one stands at the fewest, and is asked first"
    turns.asked("new", 0.5, at_work=True)
    turns.asked("a", 9.0, at_work=False)
    assert turns.order(["a", "b", "new"]) == ["b", "new", "a"]
    turns.asked("b", 5.0, at_work=False)
    turns.asked("new", 100.0, at_work=True)
    turns.asked("new", 0.0, at_work=False)
    turns.asked("late", 1.0, at_work=True)
    assert turns.order(["late", "a"]) == ["a", "late"], "who had no work begins where the last one at work stood"
    assert turns.order(["a"]) == ["a"]
    assert turns.may("a"), "one that is closed keeps nobody waiting"
