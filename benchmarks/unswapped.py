"""How often is an engine called *Not swapped* that swaps? Simulated.

    python -m benchmarks.unswapped --engines 500 --hours 24   # the table of docs/lab/engines.md

The classes are the service's own: reports go through an engine's account, publishes through the run's events, words
come from the headline. Drawn are publishes every 2 to 30 minutes; engines whose agents report every 5 to 60 s and take
up to a minute to download and a minute to swap. Some sleep between two generations, as verl's do, and can then not
swap; of some the agent is away for a while, and the engine goes on. The clocks of who publishes and who takes reports
in differ by up to 5 s.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from service.monitor.events import Moved, Moves
from service.monitor.headline import RunFacts, headline
from service.monitor.records import AcceptanceRecord, WorkerGauges
from service.storage.reports.engine_counts import Account

KINDS: Final = ("always there", "asleep between generations", "agent away", "both")
_ROUNDS_PER_SECOND: Final = 50
_LAST_POLL_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Publish:
    """A version, and when `latest` came to name it by the clock of the engines."""

    at: float
    version: str


@dataclass
class Stretches:
    """Times at which something is so, in turns with times at which it is not: [begins, ends, begins, ...]."""

    edges: Sequence[float]

    def now(self, at: float) -> bool:
        """Whether it is so."""
        return bool(np.searchsorted(self.edges, at, side="right") % 2)

    def since(self, at: float) -> float:
        """When it became as it is."""
        place = int(np.searchsorted(self.edges, at, side="right"))
        return self.edges[place - 1] if place else 0.0


def _turns(random: np.random.Generator, yes: tuple[float, float], no: tuple[float, float], end: float) -> Stretches:
    edges, at = [0.0], 0.0
    while at < end:
        for span in (yes, no):
            at += float(random.uniform(*span))
            edges.append(at)
    return Stretches(edges)


class SimulatedEngine:
    """An engine with its agent; `tick` is one look of the agent, and returns the time of the next."""

    def __init__(self, number: int, kind: str, random: np.random.Generator, end: float, *, stuck: bool = False) -> None:
        self.name, self.kind, self.stuck = f"agent {number}", kind, stuck
        self._random = random
        self._period = float(random.uniform(5, 60))
        sleeps, leaves = kind in ("asleep between generations", "both"), kind in ("agent away", "both")
        always = Stretches([0.0])
        self._awake = _turns(random, (60, 300), (60, 1200), end) if sleeps else always
        self._there = _turns(random, (1200, 5400), (120, 2400), end) if leaves else always
        self.loaded = "v000001-0a"
        self._rounds: Counter[str] = Counter()
        self._looked = 0.0
        self._swap: tuple[float, str] | None = None  # when it is done, and the version
        self._known: dict[str, float] = {}  # when a version is in the cache

    def tick(self, at: float, published: Sequence[Publish]) -> tuple[float, list[tuple[str, int, bool]]]:
        """What is reported now: version, rounds so far, whether it is loaded no more."""
        again = at + self._period
        if not self._there.now(at):
            return again, []
        reports = []
        if self._swap is not None and at >= self._swap[0]:
            reports += [(self.loaded, self._rounds[self.loaded], True)]
            self.loaded, self._swap = self._swap[1], None
        if self._generated(at):
            self._rounds[self.loaded] += round(_ROUNDS_PER_SECOND * min(at - self._looked, 600.0))
            reports += [(self.loaded, self._rounds[self.loaded], False)]
        self._looked = at
        offer = self._offered(at, published)
        if offer != self.loaded and self._swap is None and self._awake.now(at) and not self.stuck:
            self._swap = at + float(self._random.uniform(1, 60)), offer
        return again, reports

    def _generated(self, at: float) -> bool:
        return self._awake.now(at) or self._awake.since(at) > self._looked

    def _offered(self, at: float, published: Sequence[Publish]) -> str:
        """The newest version that the agent has downloaded: it polls when it comes back, and then at once."""
        newest = published[-1]
        polled = max(newest.at, self._there.since(at))
        if newest.version not in self._known:
            late = float(self._random.uniform(0, _LAST_POLL_SECONDS)) if polled > newest.at else 0.0
            self._known[newest.version] = polled + late + float(self._random.uniform(1, 60))
        return newest.version if at >= self._known[newest.version] else self.loaded


@dataclass
class Found:
    """How often engines were called not swapped (`words`), by kind, in `hours` of engines.

    `old_words`: by the rule of before, which took a report for evidence of all the time before it. `named`: of those
    that never swap, how many minutes after the first publish.
    """

    words: Counter[str]
    old_words: Counter[str]
    hours: dict[str, float]
    named: list[float]


def simulate(engines: int, hours: float, seed: int, stuck: int = 0) -> Found:
    """Run a fleet, of which some engines never swap."""
    random, end = np.random.default_rng(seed), 3600 * hours
    fleet = [SimulatedEngine(n, KINDS[n % len(KINDS)], random, end, stuck=n < stuck) for n in range(engines)]
    apart = float(random.uniform(-5, 5))
    moves, published = Moves(), list[Publish]()
    due = 0.0
    accounts = {one.name: Account() for one in fleet}
    since: dict[str, tuple[str, int]] = {}
    named_now: dict[str, set[str]] = {"words": set(), "old_words": set()}
    found = Found(Counter(), Counter(), dict.fromkeys(KINDS, 0.0), [])
    first: dict[str, float] = {}
    queue = [(float(random.uniform(0, 60)), number) for number in range(engines)]
    heapq.heapify(queue)
    while queue and queue[0][0] < end:
        at, number = heapq.heappop(queue)
        while due <= at:
            version = f"v{len(published) + 1:06d}-0a"
            published.append(Publish(due, version))
            moves.add(Moved(time=due + apart, sequence=len(published), version=version))
            due += float(random.uniform(120, 1800))
        one = fleet[number]
        again, reports = one.tick(at, published)
        heapq.heappush(queue, (again, number))
        account = accounts[one.name]
        newest: AcceptanceRecord | None = None
        for version, rounds, final in reports:
            before = since.get(one.name, ("", 0))
            if before == (version, rounds):
                continue
            since[one.name] = version, rounds
            record = AcceptanceRecord(
                reporter=one.name, drafter_version=version, rounds=rounds, final=final, created=at
            )
            outdated = version != published[-1].version
            newest = replace(record, behind=account.note(record, outdated=outdated))
        if newest is None:
            continue
        replaced = moves.replaced(newest.drafter_version)
        late = replaced is not None and not newest.final and at - replaced > 600.0
        says = late and _says(newest, moves, at)
        for name, word in (("words", says), ("old_words", late)):
            counts: Counter[str] = getattr(found, name)
            if word and one.name not in named_now[name] and not one.stuck:
                counts[one.kind] += 1
            (named_now[name].add if word else named_now[name].discard)(one.name)
        if says and one.stuck and one.name not in first:
            first[one.name] = at
    for one in fleet:
        if not one.stuck:
            found.hours[one.kind] += hours
    found.named = sorted((first.get(one.name, end) - published[1].at) / 60 for one in fleet if one.stuck)
    return found


def _says(record: AcceptanceRecord, moves: Moves, now: float) -> bool:
    said = headline(
        RunFacts(now=now, worker=WorkerGauges(heartbeat=now), registered=0.0, engines=[record], moves=moves)
    )
    return any(text.startswith("Not swapped") for text in (said.text, *said.also))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--stuck", type=int, default=20, help="engines among them that never swap")
    asked = parser.parse_args()
    found = simulate(asked.engines, asked.hours, 0, asked.stuck)
    print("| engines (simulated) | engine hours | words by the rule of before | words now |\n|---|---|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {found.hours[kind]:,.0f} | {found.old_words[kind]:,} | {found.words[kind]:,} |")
    middle = found.named[len(found.named) // 2]
    print(f"\nnever swapped: named {middle:.0f} min after the first publish (median), {found.named[-1]:.0f} at most")


if __name__ == "__main__":
    main()
