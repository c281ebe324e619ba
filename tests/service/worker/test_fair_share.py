"""The worker's time is shared between runs by the seconds that they take, and a modest run waits for one claim at most.

`benchmarks/fair_share.py` measures the same on the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.worker_fixtures import Bench

from drafter.training.trainer import DrafterTrainer, StepReport
from service.storage.queue.deliveries import Entry
from service.worker import learner
from service.worker.loop import RunWorker
from service.worker.process import turns
from service.worker.process import worker as process
from service.worker.process.turns import AHEAD_SECONDS, Turns
from service.worker.process.worker import Worker


def one_pass(turns: Turns, runs: list[str], cycle: Callable[[str], float]) -> dict[str, float]:
    """What `Worker._turn` does, on a clock of its own. Returns the seconds that runs worked; 0: it had nothing."""
    took: dict[str, float] = {}
    for run in turns.order(runs):
        if sum(took.values()) > AHEAD_SECONDS:
            break
        if turns.may(run):
            seconds = cycle(run)
            turns.asked(run, seconds, at_work=seconds > 0)
            took[run] = seconds
    return took


@pytest.mark.parametrize("seed", range(5))
def test_runs_that_always_have_work_get_equal_seconds_however_long_their_claims(seed: int) -> None:
    rng = random.Random(seed)
    longest = {f"r{i}": 10 ** rng.uniform(-2, 1.5) for i in range(6)}
    total, turns = dict.fromkeys(longest, 0.0), Turns()
    while sum(total.values()) < 3000:
        for run, seconds in one_pass(turns, list(longest), lambda r: rng.uniform(0.1, 1) * longest[r]).items():
            total[run] += seconds
    assert max(total.values()) - min(total.values()) < max(longest.values()) + AHEAD_SECONDS + max(longest.values())


@pytest.mark.parametrize("floods", [1, 3, 8])
def test_a_run_that_takes_less_than_its_share_waits_for_one_claim_of_the_others(floods: int) -> None:
    rng, turns = random.Random(floods), Turns()
    now, due, waited = 0.0, 1000.0, list[float]()  # every flood had claims by then

    def cycle(run: str) -> float:
        nonlocal now, due
        if run != "honest":
            seconds = rng.uniform(5, 30)
        elif now < due:
            return 0.0
        else:
            waited.append(now - due)  # until its own claim begins
            seconds = 10.0
            due = now + seconds + 30.0 * (floods + 1)  # it takes half its share
        now += seconds
        return seconds

    runs = [*(f"flood{i}" for i in range(floods)), "honest"]
    while len(waited) < 200:
        one_pass(turns, runs, cycle)
    assert 20.0 < max(waited) <= 30.0


def test_nobody_waits_for_seconds_that_were_taken_long_ago_nor_saves_any_up() -> None:
    turns = Turns()
    for _ in range(100):
        one_pass(turns, ["old"], lambda _: 30.0)
    one_pass(turns, ["old"], lambda _: 0.0)
    for _ in range(100):
        one_pass(turns, ["old", "new"], lambda run: 1.0 if run == "new" else 0.0)
    total = {"old": 0.0, "new": 0.0}
    for _ in range(100):
        for run, seconds in one_pass(turns, ["old", "new"], lambda _: 1.0).items():
            total[run] += seconds
    assert abs(total["old"] - total["new"]) <= 2.0


def test_a_run_that_is_closed_or_fails_keeps_nobody_waiting() -> None:
    turns = Turns()
    one_pass(turns, ["gone", "here"], lambda _: 0.1)  # both at work
    for _ in range(10):
        assert one_pass(turns, ["here"], lambda _: 5.0) == {"here": 5.0}
    for _ in range(10):
        turns.asked("fails", 0.01, at_work=False)
        assert one_pass(turns, ["here"], lambda _: 5.0) == {"here": 5.0}


@pytest.mark.parametrize(
    ("waits", "isolated"),
    [(True, False), (False, False), (True, True)],
    ids=["another waits", "alone", "another waits for a batch that may have killed a worker"],
)
def test_a_long_training_ends_where_another_run_has_work_and_only_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, waits: bool, isolated: bool
) -> None:
    """Not of a batch that is tried alone: what is left out of it may be what fails."""
    monkeypatch.setattr(learner, "LONGEST_CLAIM_SECONDS", 0.0)  # every claim is long
    if isolated:
        monkeypatch.setattr(Entry, "suspect", True)
    for run in ("long", "other"):
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
    worker, step = Worker(bench.settings.model_copy(update={"train_passes": 8.0}), bench.redis), DrafterTrainer.step
    worker._turn()
    lengths, tokens = [16] * 8, dict.fromkeys(worker.served, 0)
    of = {id(worker.served[run].learner.lineage.needed_trainer): run for run in worker.served}

    def watched(self: DrafterTrainer, window: Any) -> StepReport:
        if waits and tokens["long"] == 0:
            bench.post_file(bench.world.rollout_file("other", run="other", lengths=lengths))
        report = step(self, window)
        tokens[of[id(self)]] += report.tokens
        return report

    monkeypatch.setattr(DrafterTrainer, "step", watched)
    posted = bench.post_file(bench.world.rollout_file("long", run="long", lengths=lengths))
    for _ in range(6):
        worker._turn()
    whole = 8 * sum(lengths)
    assert RolloutQueue(bench.redis, "long").batch(posted)["state"] == "trained"  # type: ignore[index]
    assert whole / 8 <= tokens["long"] < whole / 2 if waits and not isolated else tokens["long"] == whole
    assert tokens["other"] == (whole if waits else 0), "nobody waits for it"


def test_beside_four_floods_an_honest_run_is_trained_after_the_claim_in_hand(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real worker: its batch comes amid a flood's claim, and no other claim begins before its own."""
    for module in (process, turns):
        monkeypatch.setattr(module, "AHEAD_SECONDS", 1e-6)  # claims are short here
    asked = Turns.asked

    def alike(self: Turns, run: str, seconds: float, *, at_work: bool) -> None:
        """Else a claim of the honest run that took long, on a busy machine, would count against it."""
        asked(self, run, 1e-3 if at_work else seconds, at_work=at_work)

    monkeypatch.setattr(Turns, "asked", alike)
    runs = ["a-flood", "b-flood", "honest", "y-flood", "z-flood"]
    for run in runs:
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
        for number in range(0 if run == "honest" else 12):
            bench.post_file(bench.world.rollout_file(f"{run}{number}", run=run, rollouts=2))
    worker, cycle = Worker(bench.settings, bench.redis), RunWorker.cycle
    order: list[str] = []

    def watched(self: RunWorker) -> bool:
        if len(order) in (6, 17, 29) and self.run != "honest":
            bench.post_file(bench.world.rollout_file(f"honest{len(order)}", run="honest", rollouts=2))
        found = cycle(self)
        order.extend([self.run] if found else [])
        return found

    monkeypatch.setattr(RunWorker, "cycle", watched)
    for _ in range(400):
        worker._turn()
        if len(order) == 4 * 12 + 3:
            break
    assert [place for place, run in enumerate(order) if run == "honest"] == [7, 18, 30]
    assert {run: order.count(run) for run in runs} == dict.fromkeys(runs, 12) | {"honest": 3}
