"""What the API's handlers share: one object per process, reached through `Context`."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import redis.asyncio
import redis.exceptions
from fastapi import Depends, Query, Request

from rl_hooks.release import SigningKey
from service.access.tokens import Tokens
from service.errors import ConfigurationError
from service.monitor.current import Newest
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import EVIDENCE_SECONDS, Watch, watch
from service.monitor.records import ScoreRecord, StepSample
from service.monitor.worth import Worth, worth
from service.reading.pointer import Pointer
from service.reading.series import Series
from service.reading.shared import Shared
from service.settings import Settings
from service.storage.layout import FileId, Layout, file_id
from service.storage.queue import AsyncRolloutQueue, fair_bound
from service.storage.queue.dead import DeadLetters
from service.storage.ready import PROBE_SECONDS, WriteTest
from service.storage.registry import Registry
from service.storage.reports import AsyncStore
from service.storage.reports.engine_counts import Account
from service.storage.runs import RunRecord, kept_bytes, load_run, sweep_deleted
from service.storage.spool import Spool

log = logging.getLogger("draftalign.api")

P = ParamSpec("P")
#: What all engines say together is kept for this multiple of the time that telling it took.
_REST: Final = 4.0
T = TypeVar("T")
#: Most requests that may wait for registry locks at a time.
_LOCKING_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Engines:
    """What all engines of a run say together: live beside replay α, and what acceptance is worth in time."""

    watch: Watch
    worth: Worth


@dataclass(frozen=True, slots=True)
class Recent:
    """The batches that arrived last. `times`: as the store counted when they were read."""

    times: tuple[int, int]
    records: Mapping[str, ScoreRecord]
    newest: Newest
    replays: Replays

    @classmethod
    def of(cls, times: tuple[int, int], records: Mapping[str, ScoreRecord], before: Newest | None) -> Recent:
        """Reckon what they say; not on the event loop. `before`: the newest before."""
        newest = Newest(records.values(), before)
        return cls(times, records, newest, Replays(newest))


def _worth(steps: Sequence[StepSample], survival: Sequence[float]) -> Worth:
    """What the step times tell; whatever they hold, the engines' verdicts do not fail for it."""
    try:
        return worth(steps, survival)
    except (ArithmeticError, ValueError) as error:  # LinAlgError is a ValueError
        log.warning("the engines' step times cannot be fitted: %s", error)
        return Worth(f"the step times cannot be fitted: {error}")


class ServiceContext:
    """Settings, state directory and Redis of the API process."""

    def __init__(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        self.settings = settings
        self.began = time.time()
        self.redis: Any = client
        self.writes = WriteTest(client)
        self.layout = Layout(settings.state_dir)
        self.registry = Registry(self.layout, settings.drafters_url)
        self.spool = Spool(self.layout)
        self.signer = _signing_key(settings.signing_key_file)
        #: Set when the server is asked to stop, so that long polls end at once.
        self.stopping = asyncio.Event()
        self.live_rule = LiveRule.of(settings)
        self.tokens = Tokens(settings)
        #: Runs for which this process has accepted a batch: the log says the first of each.
        self.accepted_for: set[str] = set()
        self._runs: dict[str, tuple[FileId, RunRecord]] = {}  # with the file that it was read from
        self._recent: dict[str, Recent] = {}
        self._engines: dict[str, tuple[float, float, Engines]] = {}  # told at, seconds that it took
        self._telling: dict[str, asyncio.Task[Engines]] = {}
        self._queues: dict[str, AsyncRolloutQueue] = {}
        self._pointers: dict[str, Pointer] = {}
        self._series: dict[str, Series] = {}
        #: Answers that are being computed: those who ask for the same share one.
        self.answers = Shared()
        self._locking = ThreadPoolExecutor(_LOCKING_THREADS, "registry")
        self._kept_bytes: dict[str, int] = {}  # what the worker keeps of each run, as of the last sweep
        #: Set when uploads find no room: files of dead batches may be in their way. And the bytes that they need.
        self.room_wanted = asyncio.Event()
        self._wanted_bytes: set[int] = set()

    def run(self, run: str) -> RunRecord:
        """The record of a registered run; raises RunNotFound. It is read again when its file was replaced."""
        file = file_id(self.layout.run_json(run))
        if run not in self._runs or self._runs[run][0] != file:
            self._runs[run] = file, load_run(self.layout, run)
        return self._runs[run][1]

    def drop(self, run: str) -> None:
        """Keep nothing of a run that was deleted."""
        for kept in (
            self._runs, self._recent, self._engines, self._queues, self._pointers, self._series, self._kept_bytes
        ):  # fmt: skip
            kept.pop(run, None)
        self.accepted_for.discard(run)
        self.registry.history.drop(run)

    def queue(self, run: str) -> AsyncRolloutQueue:
        """The queue of a run."""
        if run not in self._queues:
            self._queues[run] = AsyncRolloutQueue(
                self.redis, run, self.settings.remembered_bytes, self.settings.queue_max_rollouts
            )
        return self._queues[run]

    def pointer(self, run: str) -> Pointer:
        """What a run serves."""
        if run not in self._pointers:
            read = functools.partial(self.registry.latest, run)
            self._pointers[run] = Pointer(self.layout.latest(run), read, self.stopping)
        return self._pointers[run]

    def series(self, run: str) -> Series:
        """The α series of a run."""
        if run not in self._series:
            self._series[run] = Series(self.store(run), self.settings.max_policy_lag)
        return self._series[run]

    def share_bytes(self, held: int, run: str = "") -> int:
        """Bytes that one run may have of the spool's disk, where its files there take `held`, with those on their way.

        Three quarters of those and of what is free, so that others always find room. (Dynamic thresholds: Choudhury and
        Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.)
        """
        return (held + self._spare_bytes(run)) * 3 // 4

    def _spare_bytes(self, run: str) -> int:
        """What a run has on its way, and what is free."""
        free = self.spool.free_bytes() - self.settings.spool_min_free_bytes
        return self.spool.reserved_bytes(run) + max(free, 0)

    def queue_share_bytes(self, held: int, run: str, dead: int = 0) -> int:
        """Bytes of the disk that a run's queue may have. It holds `held`; files of `dead` batches make room for it.

        They and what the worker keeps (drafters, checkpoints, recent rollouts) count as the run's own, so that it takes
        three quarters of the disk at most, whatever becomes of its rollouts. A quarter of what the worker's files leave
        is the least: a run whose drafters fill a small disk goes on.
        """
        there, kept = held + dead + self._spare_bytes(run), self._kept_bytes.get(run, 0)
        return max((there + kept) * 3 // 4 - kept, there // 4)

    def queue_limit_bytes(self, held: int, run: str, dead: int = 0) -> int:
        """Bytes at which the queue of a run is full: its share, or `queue_max_bytes` where that is less."""
        share = self.queue_share_bytes(held, run, dead)
        return share if self.settings.queue_max_bytes is None else min(share, self.settings.queue_max_bytes)

    def dead(self, run: str) -> DeadLetters:
        """The dead batches of a run."""
        return DeadLetters(self.redis, self.queue(run))

    def store(self, run: str) -> AsyncStore:
        """The store of a run."""
        return AsyncStore(self.redis, run, self.settings.max_reporters)

    async def check_redis(self) -> None:
        """Raise a RedisError unless Redis answers soon."""
        await self.soon(self.redis.ping())

    async def soon(self, asked: Awaitable[T]) -> T:
        """What Redis answers; a RedisError unless it does so soon."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return await asked
        except TimeoutError as error:
            raise redis.exceptions.TimeoutError(f"no answer in {PROBE_SECONDS} s") from error

    async def recent(self, run: str) -> Recent:
        """Scores of the batches that arrived last, and replay α by them; read again where another was scored."""
        return await self.answers.get(("recent", run), lambda: self._read_recent(run))

    async def _read_recent(self, run: str) -> Recent:
        store, before = self.store(run), self._recent.get(run)
        times = await store.times_scored()
        if before is not None and before.times == times:
            return before
        records = await store.recent_scores({} if before is None else before.records)
        if before is not None and len(records.keys() - before.records.keys()) != times[0] - before.times[0]:
            records = await store.recent_scores()  # one was scored for the second time
        newest = None if before is None else before.newest
        found = await asyncio.to_thread(lambda: Recent.of(times, records, newest))
        self._recent[run] = found
        return found

    async def engines(self, run: str) -> Engines:
        """What the engines say. Telling it for all runs takes at most a fifth of a core: else the last is told."""
        known = self._engines.get(run)
        if known is not None and time.monotonic() - known[0] < _REST * known[1] * len(self._engines):
            return known[2]
        if run not in self._telling:
            self._telling[run] = asyncio.create_task(self._tell(run))
            self._telling[run].add_done_callback(lambda _: self._telling.pop(run, None))
        return await asyncio.shield(self._telling[run])

    async def _tell(self, run: str) -> Engines:
        found = await self.store(run).engines(time.time() - EVIDENCE_SECONDS)
        replays = (await self.recent(run)).replays
        served = self.pointer(run).served()
        survival = [] if served is None else replays.survival(served.manifest.version)

        def tell() -> tuple[Engines, float]:
            began = time.thread_time()
            accounts = {reporter: Account.read(text) for reporter, text in found.items()}
            watched = watch({name: account.blocks for name, account in accounts.items()}, replays, self.live_rule)
            steps = [one for account in accounts.values() for one in account.steps]
            return Engines(watched, _worth(steps, survival)), time.thread_time() - began

        told, seconds = await asyncio.to_thread(tell)
        self._engines[run] = time.monotonic(), seconds, told
        return told

    async def locking(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run in a thread some work that takes the lock of a run's registry.

        The threads are separate from asyncio's: while another process keeps the lock, waiting requests could occupy all
        of those, and uploads need some.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._locking, functools.partial(work, *args, **named))

    def close(self) -> None:
        """Shut the pool of lock-waiting threads down."""
        self._locking.shutdown(wait=False, cancel_futures=True)

    async def reap(self) -> int:
        """Delete spooled files that no entry will ever name; returns how many.

        They come from a crash between rename and enqueue, or between acknowledgement and deletion; or they are of dead
        batches, and kept for too long, too large together, or in the way of an upload.
        """
        settings = self.settings
        gone = await asyncio.to_thread(self.spool.reap_uploads, settings.orphan_age_seconds)
        await asyncio.to_thread(sweep_deleted, self.layout)
        registered = self.layout.run_names()
        known = {*self._runs, *self._series, *self._engines, *self._recent, *self._kept_bytes}
        for run in known.difference(registered):
            self.drop(run)  # another process deleted it
        for run in registered:
            try:
                gone += await self._reap_run(run, settings.dead_letter_bytes)
                self._kept_bytes[run] = await asyncio.to_thread(kept_bytes, self.layout, run)
            except (redis.exceptions.RedisError, OSError) as error:  # while Redis is full, the cut below is what helps
                log.warning("run %s: its spool was not swept: %s", run, error)
        await self._shorten_memory(registered)
        return gone

    def want_room(self, spare_bytes: int) -> None:
        """Note that an upload found the disk too full. `spare_bytes`: what must be free for it."""
        self._wanted_bytes.add(spare_bytes)
        self.room_wanted.set()

    async def make_room(self) -> None:
        """Give files of dead batches up for uploads that found no room, of the runs that have most of them first.

        As many as the largest of those uploads needs that finds room then.
        """
        wanted, self._wanted_bytes = self._wanted_bytes, set()
        self.room_wanted.clear()
        least = self.settings.spool_min_free_bytes - self.spool.free_bytes()
        held = {run: await self.queue(run).dead_file_bytes() for run in self.layout.run_names()}
        total = sum(held.values())
        missing = max((found for length in wanted if (found := least + length) <= total), default=0)
        if missing <= 0:
            return
        most = fair_bound(list(held.values()), total - missing)
        for run in (run for run, size in held.items() if size > most):
            await self.sweep_dead(run, most)
            log.warning("run %s: files of dead batches were deleted: uploads found no room on the disk", run)

    async def sweep_dead(self, run: str, most_bytes: int) -> None:
        """Delete files of a run's dead batches: those that are kept for too long, and all beyond so many bytes."""
        seconds = self.settings.dead_letter_seconds
        for blob in await self.dead(run).sweep(older_than_seconds=seconds, max_bytes=most_bytes):
            self.spool.delete(run, blob)

    async def _reap_run(self, run: str, dead_bytes: int) -> int:
        settings, gone = self.settings, 0
        await self.sweep_dead(run, dead_bytes)
        for blob in await asyncio.to_thread(self.spool.old_blobs, run, settings.orphan_age_seconds):
            # One atomic step: a paused API process may enqueue this file now (docs/guide/operating.md).
            if await self.queue(run).disown(blob.partition(".")[0], blob):
                self.spool.delete(run, blob)
                gone += 1
        return gone

    async def _shorten_memory(self, runs: Sequence[str]) -> None:
        """Keep what Redis remembers of all runs together below twice what one may take: those that have most give way.

        Runs that ended keep theirs for 7 days, and would fill Redis for those that go on.
        """
        held = {run: await self.queue(run).remembered() for run in runs}
        most = fair_bound(list(held.values()), 2 * self.settings.remembered_bytes)
        for run in (run for run, size in held.items() if size > most):
            size = await self.queue(run).shorten(most)
            if size < held[run]:
                log.info("run %s: what Redis remembers of ended batches was cut to %.1f MiB", run, size / (1 << 20))


def _signing_key(path: Path | None) -> SigningKey | None:
    if path is None:
        return None
    try:
        key = SigningKey(path)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"signing_key_file: {error}") from error
    log.info("manifests are signed; the public key is %s", key.public)
    return key


async def _context(request: Request) -> ServiceContext:  # a plain function would take a thread for each request
    context: ServiceContext = request.app.state.context
    return context


Context = Annotated[ServiceContext, Depends(_context)]
RunQuery = Annotated[str, Query(description="Name of the run.")]
