"""What the newest batches and the engines of each run show: replay α, live α beside it, step times.

It is computed again when another batch was scored, or an engine may have reported. What engines say takes at most a
fifth of a core for all runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.monitor.current import Newest
from service.monitor.headline import ENGINE_SILENT_SECONDS
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import EVIDENCE_SECONDS, Watch, watch
from service.monitor.records import ScoreRecord, StepSample
from service.monitor.worth import Worth, worth
from service.reading.pointer import Pointer
from service.reading.shared import Shared
from service.storage.reports.drafting import Drafting
from service.storage.reports.engine_counts import Account
from service.storage.reports.store import AsyncStore
from service.storage.reports.summary import Summary

log = logging.getLogger("draftalign.api")

#: What all engines say together is kept for this multiple of the time that computing it took.
_REST: Final = 4.0
#: Whether all engines of a run draft alike may be asked with every report. A no is kept for this time.
_ASK_AGAIN_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Engines:
    """What all engines of a run say together: live beside replay α, and what acceptance is worth in time."""

    watch: Watch
    worth: Worth


@dataclass(frozen=True, slots=True)
class Recent:
    """The batches that arrived last. `times`: as the store counted when they were read."""

    times: int
    records: Mapping[str, ScoreRecord]
    newest: Newest
    replays: Replays


def _worth(steps: Sequence[StepSample], survival: Sequence[float]) -> Worth:
    """The worth of drafts by the step times. Odd ones must not fail the engines' verdicts, so errors are caught."""
    try:
        return worth(steps, survival)
    except (ArithmeticError, ValueError) as error:  # LinAlgError is a ValueError
        log.warning("the engines' step times cannot be fitted: %s", error)
        return Worth(f"the step times cannot be fitted: {error}")


class Evidence:
    """The newest evidence on one run that this process has read."""

    def __init__(
        self,
        rule: Callable[[], LiveRule],
        answers: Shared,
        store: AsyncStore,
        pointer: Pointer,
        runs: Callable[[], int],
    ) -> None:
        """`runs`: how many runs share what computing it may take."""
        self._rule, self._answers, self._store, self._pointer, self._runs = rule, answers, store, pointer, runs
        self._recent: Recent | None = None
        self._engines: tuple[float, float, Engines] | None = None  # when it was computed, seconds that it took
        self._unlike = -math.inf  # when the engines were found not to draft alike

    @property
    def computes(self) -> bool:
        """Whether what the engines say was computed."""
        return self._engines is not None

    async def recent(self, summary: Summary | None = None) -> Recent:
        """Scores of the batches that arrived last, and replay α by them; read again where another was scored.

        `summary`: of the run, read just now, which tells it; None: the store is asked.
        """
        if summary is not None and self._recent is not None and self._recent.times == summary.times_scored:
            return self._recent
        return await self._answers.get(self, self._read_recent)

    async def _read_recent(self) -> Recent:
        store, before = self._store, self._recent
        times = await store.times_scored()
        if before is not None and before.times == times:
            return before
        records = await store.recent_scores({} if before is None else before.records)
        if before is not None and len(records.keys() - before.records.keys()) != times - before.times:
            records = await store.recent_scores()  # one was scored for the second time
        returns = await store.returns()

        def compute() -> Recent:
            newest = Newest(records.values(), None if before is None else before.newest, returns)
            return Recent(times, records, newest, Replays(newest, returns))

        self._recent = await asyncio.to_thread(compute)
        return self._recent

    async def engines(self, summary: Summary | None = None, *, fresh: bool = False) -> Engines:
        """What the engines say, or said: computing it for all runs takes at most a fifth of a core.

        `summary`: as of `recent`. `fresh`: what they say now.
        """
        if summary is not None and (summary.last_report or 0.0) < time.time() - EVIDENCE_SECONDS:
            return Engines(Watch(), Worth())
        return await self._answers.get((self, fresh), self._compute if fresh else self._kept)

    async def _kept(self) -> Engines:
        known = self._engines
        if known is not None and time.monotonic() - known[0] < _REST * known[1] * self._runs():
            return known[2]
        return await self._compute()

    async def all_draft(self, drafting: Drafting) -> bool:
        """Whether all engines that have reported lately draft so. A no is kept for some seconds."""
        now = time.monotonic()
        if now - self._unlike < _ASK_AGAIN_SECONDS:
            return False
        found = await self._store.newest_acceptances(time.time() - ENGINE_SILENT_SECONDS)
        if drafting.agrees_with(found):
            return True
        self._unlike = now
        return False

    async def _compute(self) -> Engines:
        rule = self._rule()
        found = await self._store.engines(time.time() - EVIDENCE_SECONDS)
        replays = (await self.recent()).replays
        served = self._pointer.served()
        survival = [] if served is None else replays.survival(served.manifest.version)

        def compute() -> tuple[Engines, float]:
            began = time.thread_time()
            accounts = {reporter: Account.read(text) for reporter, text in found.items()}
            watched = watch({name: account.blocks for name, account in accounts.items()}, replays, rule)
            steps = [one for account in accounts.values() for one in account.steps]
            return Engines(watched, _worth(steps, survival)), time.thread_time() - began

        computed, seconds = await asyncio.to_thread(compute)
        self._engines = time.monotonic(), seconds, computed
        return computed
