"""The token budget holds whatever threads spend from it; warnings are logged once and counters lose nothing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rl_hooks.sending.sampling import TokenBudget, sampling_position
from rl_hooks.sending.tally import Tally, kind_of

LOGGER = logging.getLogger("rl_hooks")


@pytest.fixture
def switching_threads() -> Iterator[None]:
    """Python changes threads as often as it can, or a lost update would be rare."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[], None], number: int = 4) -> None:
    begin = threading.Barrier(number)

    def run() -> None:
        begin.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("switching_threads")
def test_threads_together_never_spend_more_than_the_budget() -> None:
    started, budget, spent = time.monotonic(), TokenBudget(20_000), []
    in_threads(lambda: spent.append(sum(budget.spend(1) for _ in range(10_000))))
    minutes = (time.monotonic() - started) / 60
    assert 20_000 <= sum(spent) <= 20_000 * (1 + minutes) + 1


def test_a_budget_refills_in_a_minute_and_holds_no_more_than_one() -> None:
    budget = TokenBudget(6_000_000)
    budget.correct(-6_000_000)
    assert budget.spend(12_000_000), "as long as any are left, however many"
    assert not budget.spend(1), "a minute's tokens are owed"
    budget.correct(-5_990_000)
    time.sleep(0.2)  # 100,000 a second
    assert budget.spend(1)


def test_two_salts_place_an_id_independently() -> None:
    places = [(sampling_position(f"r{i}", "sample"), sampling_position(f"r{i}", "tap")) for i in range(2000)]
    both = sum(a < 0.5 and b < 0.5 for a, b in places) / len(places)
    assert abs(both - 0.25) < 0.05


@pytest.mark.usefixtures("switching_threads")
def test_counters_of_several_threads_lose_nothing() -> None:
    tally = Tally(LOGGER, "sent", "lost")

    def add() -> None:
        for _ in range(5_000):
            tally.add("sent")

    in_threads(add)
    assert tally.counts() == {"sent": 20_000, "lost": 0}


def test_what_a_service_says_fills_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(LOGGER)
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for number in range(1000):
            tally.note(f"warning {number}" + "y" * 60_000, "\ud800" + "x" * 60_000)
    assert len(caplog.records) < 500
    assert max(len(record.message) for record in caplog.records) < 3000
    assert len(tally.last_error.encode()) < 3000, "half a surrogate pair would be an error of who prints it"


def test_each_kind_is_logged_once_and_the_newest_error_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(LOGGER)
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for text in ("answered 413: too large", "answered 413: too large", "answered 500", "no connection"):
            tally.note(kind_of(text), text)
        tally.warn("no connection", "no connection")
        tally.warn("images", "images are left out")
    assert [record.message.partition(" (")[0].removeprefix("draftalign: ") for record in caplog.records] == [
        *("answered 413: too large", "no connection", "images are left out"),
    ]
    assert tally.last_error == "no connection"
