"""How long does a run's batch wait for the worker beside runs that flood it? Real worker, Redis and files; no API.

    PYTHONPATH=. python benchmarks/fair_share.py [--batches 8] [--seed 0]

One honest run posts a batch, waits until it is trained, and pauses. Other runs have more queued than the worker can do.
Printed: seconds from upload to `trained` of the honest run, alone and beside 1 and 4 floods, and each side's share
of the worker's time. With another version's code first in PYTHONPATH, that version is measured.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from redis import Redis

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.worker_fixtures import Bench, World

from service.worker.loop import RunWorker
from service.worker.process.worker import Worker

#: A flood's claim is one batch, about half a second of training on one core.
FLOOD_ROLLOUTS, PASSES, STEP_TOKENS = 32, 2.0, 256


class Case:
    """A worker with an honest run and some floods."""

    def __init__(self, directory: Path, url: str, floods: int, seed: int) -> None:
        self.bench = Bench(directory, url, World(seed=seed), train_passes=PASSES, train_step_tokens=STEP_TOKENS)
        self.floods = [f"flood-{number}" for number in range(floods)]
        for run in ("honest", *self.floods):
            self.bench.register(self.bench.world.run_file(drafter=self.bench.world.drafter()), run=run)
        self.posted = 0
        self.cycles: dict[str, list[float]] = {}
        self.cycle = RunWorker.cycle

    def post(self, run: str, rollouts: int) -> str:
        """Queue a batch of so many rollouts; returns its id."""
        self.posted += 1
        return self.bench.post_file(self.bench.world.rollout_file(f"{run}-{self.posted}", run=run, rollouts=rollouts))

    def keep_flooding(self, ended: threading.Event) -> None:
        """Keep every flood's queue filled."""
        while not ended.is_set():
            for run in self.floods:
                if RolloutQueue(self.bench.redis, run).depth().items < 3:
                    self.post(run, FLOOD_ROLLOUTS)
            time.sleep(0.01)

    def waits(self, batches: int) -> list[float]:
        """Seconds from upload to `trained` of each honest batch."""
        rng = random.Random(self.posted)
        worker, ended, found = Worker(self.bench.settings, self.bench.redis), threading.Event(), []
        self._measure()
        threads = [threading.Thread(target=worker.serve), threading.Thread(target=self.keep_flooding, args=(ended,))]
        for thread in threads:
            thread.start()
        queue = RolloutQueue(Redis.from_url(self.bench.redis_url), "honest")
        try:
            for number in range(batches + 2):  # the first ones pay for what is compiled and opened
                if number == 2:
                    self.cycles.clear()
                began = time.monotonic()
                batch_id = self.post("honest", 8)
                while (queue.batch(batch_id) or {}).get("state") != "trained":
                    if time.monotonic() - began > 120:
                        raise TimeoutError("the honest run's batch was not trained in two minutes")
                    time.sleep(0.005)
                found += [time.monotonic() - began] if number >= 2 else []
                time.sleep(rng.uniform(0.8, 1.2))  # less than its fair share, and in step with nothing
        finally:
            ended.set()
            worker.stop()
            for thread in threads:
                thread.join()
        return found

    def _measure(self) -> None:
        cycle, seconds = self.cycle, self.cycles

        def timed(worker: RunWorker) -> bool:
            began = time.monotonic()
            worked = cycle(worker)
            if worked:
                seconds.setdefault(worker.run, []).append(time.monotonic() - began)
            return worked

        RunWorker.cycle = timed  # type: ignore[assignment,method-assign]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print("floods  median s  largest s  a flood's cycle s  in cycles of a flood  honest share of worked seconds")
    with tempfile.TemporaryDirectory() as top:
        valkey = OwnValkey(Path(top))
        valkey.start()
        try:
            for floods in (0, 1, 4):
                with Redis.from_url(valkey.url) as client:
                    client.flushall()
                case = Case(Path(top) / str(floods), valkey.url, floods, given.seed)
                waits = case.waits(given.batches)
                RunWorker.cycle = case.cycle  # type: ignore[method-assign]
                of_floods = [s for run, cycles in case.cycles.items() if run != "honest" for s in cycles]
                cycle = statistics.median(of_floods) if of_floods else float("nan")
                own = sum(case.cycles.get("honest", []))
                middle, worst = statistics.median(waits), max(waits)
                print(
                    f"{floods:6d}  {middle:8.2f}  {worst:9.2f}  {cycle:17.2f}  {middle / cycle:20.1f}"
                    f"  {own / (own + sum(of_floods)):30.2f}"
                )
        finally:
            valkey.stop()


if __name__ == "__main__":
    main()
