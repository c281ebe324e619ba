"""What the API's handlers share: one object per process, reached through `Context`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal, NamedTuple, ParamSpec, TypeVar

import redis.asyncio
import redis.exceptions
from fastapi import Depends, Query, Request

from service.access.signing import signing_key
from service.access.tokens import Tokens
from service.api.context.disk import Disk
from service.api.context.evidence import Evidence
from service.api.context.looks import Looks
from service.api.problems import Problem
from service.errors import RegistryBusy
from service.monitor.headline import REDIS_NEARLY_FULL
from service.monitor.live.engine import LiveRule
from service.reading.pointer import Pointer
from service.reading.quiet import Quiet
from service.reading.series import Series
from service.reading.shared import Shared
from service.settings import Settings
from service.storage.layout import FileId, Stamps, file_id, is_there
from service.storage.mirror import state_of
from service.storage.queue.dead import DeadLetters
from service.storage.queue.incoming import Incoming
from service.storage.queue.lease import give_back, is_worked_on, take_from_workers
from service.storage.queue.rollout_queue import AsyncRolloutQueue, fair_bound
from service.storage.ready import WriteTest, asked_of, memory_of, soon
from service.storage.registry import Registry
from service.storage.reports.drafting import settings_of
from service.storage.reports.store import AsyncStore
from service.storage.reports.summary import Summary, SummaryText, summary_of
from service.storage.runs import RunRecord, delete_run, load_run, sweep_deleted

log = logging.getLogger("draftalign.api")

P = ParamSpec("P")
T = TypeVar("T")
#: Where Redis is nearly full (`REDIS_NEARLY_FULL`), memories of ended batches are cut until this share of it is in use.
_LEFT_FULL: Final = 0.8
#: But all runs together keep 1 / 16 of what one run may: an upload that is sent again soon is still recognised.
_LEAST_SHARE: Final = 16
#: Most requests that may wait for registry locks at a time.
_LOCKING_THREADS: Final = 4
#: Why a run cannot begin.
_ANOTHERS_RUN: Final = (
    "a worker works on a run {run!r} in this Redis, and this state has none: a Redis is one state's, so give this "
    "service one of its own, or another database number (redis://HOST:6379/1). If the run was here and is lost, its "
    "worker lets go once its training in hand has ended: send this again"
)
#: A chart and a history that nobody has asked for in this time are dropped: they take up to 12 MiB a run.
_UNASKED_SECONDS: Final = 3600.0


class Lifetime:
    """How long this process lives."""

    def __init__(self) -> None:
        self.began = time.time()
        #: Set when the server is asked to stop, so that long polls end at once.
        self.stopping = asyncio.Event()


class Access:
    """Who may call, and the key that signs manifests. Raises ConfigurationError."""

    def __init__(self, settings: Settings) -> None:
        self.signer = signing_key(settings.signing_key_file)
        if self.signer is not None:
            log.info("manifests are signed; the public key is %s", self.signer.public)
        self.tokens = Tokens(settings)


class RedisServer:
    """The Redis of this process, for calls that wait only briefly."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client: Any = client
        self.writes = WriteTest(client)

    async def check(self) -> None:
        """Raise a RedisError unless Redis answers soon."""
        await self.soon(self.client.ping())

    async def soon(self, asked: Awaitable[T]) -> T:
        """What Redis answers; a RedisError unless it does so soon."""
        async with soon():
            return await asked


#: What is made of a run again and again: its part of `/metrics`, the snapshot that its headline is of.
MadeOf = Literal["part", "snapshot"]


class KeptOfRun(NamedTuple):
    """What was made of a run last: of what, and the two counters by which the disk bounds its queue."""

    answer: SummaryText
    has_beat: bool
    stamps: Stamps
    limit_bytes: int
    counters: Mapping[str, int]
    made: Any


class OfRun:
    """What this process keeps of one run."""

    def __init__(self, context: ServiceContext, run: str) -> None:
        self.record: tuple[FileId, RunRecord] | None = None  # with the file that it was read from
        #: Whether this process accepted a batch of it.
        self.accepted = False
        #: What stands while nothing is written.
        self.made: dict[MadeOf, KeptOfRun] = {}
        #: Of calls that take turns in the run.
        self.turn = asyncio.Lock()
        self._asked = 0.0  # when somebody asked for the series, by the monotonic clock
        self._series: Series | None = None
        self._context, self._run = context, run

    @functools.cached_property
    def queue(self) -> AsyncRolloutQueue:
        """Its queue."""
        settings = self._context.settings
        bounds = settings.remembered_bytes, settings.queue_max_rollouts
        return AsyncRolloutQueue(self._context.redis.client, self._run, *bounds)

    @functools.cached_property
    def pointer(self) -> Pointer:
        """What it serves."""
        read = functools.partial(self._context.registry.latest, self._run)
        return Pointer(self._context.layout.latest(self._run), read, self._context.lifetime.stopping)

    @functools.cached_property
    def evidence(self) -> Evidence:
        """What its newest batches and its engines show."""
        of, run = self._context, self._run
        rule = functools.partial(of.live_rule, run)
        return Evidence(rule, of.answers, of.store(run), self.pointer, of.runs_with_evidence)

    @functools.cached_property
    def quiet(self) -> Quiet:
        """Reads it while nothing happens in it."""
        return Quiet(self._context.store(self._run), self._context.settings.max_policy_lag)

    @property
    def series(self) -> Series:
        """Its α series."""
        self._asked = time.monotonic()
        if self._series is None:
            self._series = Series(self._context.store(self._run), self._context.settings.max_policy_lag)
        return self._series

    def drop_unasked(self) -> None:
        """Drop a series that nobody has asked for in a while. A call that uses it has a reference of its own."""
        if time.monotonic() - self._asked > _UNASKED_SECONDS:
            self._series = None


class ServiceContext:
    """Settings, state directory and Redis of the API process."""

    def __init__(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        self.settings = settings
        self.lifetime = Lifetime()
        self.redis = RedisServer(client)
        self.layout = state_of(settings)
        self.registry = Registry(self.layout, settings.drafters_url)
        self.access = Access(settings)
        #: Answers that are being computed. Equal requests share one.
        self.answers = Shared()
        #: For what other hosts did.
        self.looks = Looks(self.layout, self.registry, self.answers, share=settings.state_url is not None)
        self.disk = Disk(settings, self.layout, lambda run: self.of(run).queue, self.dead)
        self._kept: dict[str, OfRun] = {}
        self._locking = ThreadPoolExecutor(_LOCKING_THREADS, "registry")

    def run(self, run: str) -> RunRecord:
        """The record of a registered run; raises RunNotFound. It is read again when its file was replaced."""
        file = file_id(self.layout.run_json(run))
        kept = self._kept.get(run)
        if kept is None or kept.record is None or kept.record[0] != file:
            record = load_run(self.layout, run)  # before anything is kept of a run that is not there
            kept = self.of(run)
            kept.record = file, record
        return kept.record[1]

    @property
    def kept(self) -> Incoming | None:
        """The store that keeps rollout files until their batches have ended; None: the spool does."""
        return Incoming.keeper(self.disk.incoming)

    def settings_of(self, run: str) -> Settings:
        """The settings, with how the run's engines draft."""
        return settings_of(self.settings, self.layout, run)

    def live_rule(self, run: str) -> LiveRule:
        """When live and replay α of a run differ."""
        return LiveRule(self.settings_of(run).depth)

    def drop(self, run: str) -> None:
        """Keep nothing of a run that was deleted."""
        self._kept.pop(run, None)
        self.disk.drop(run)
        self.registry.history.drop(run)

    def of(self, run: str) -> OfRun:
        """What this process keeps of a run."""
        if run not in self._kept:
            self._kept[run] = OfRun(self, run)
        return self._kept[run]

    def runs_with_evidence(self) -> int:
        """How many runs have evidence here that is computed again and again."""
        return sum(kept.evidence.computes for kept in self._kept.values() if "evidence" in vars(kept))

    def dead(self, run: str) -> DeadLetters:
        """The dead batches of a run."""
        return DeadLetters(self.redis.client, self.of(run).queue)

    def store(self, run: str) -> AsyncStore:
        """The store of a run."""
        return AsyncStore(self.redis.client, run, self.settings.max_reporters)

    async def summary(self, run: str) -> Summary:
        """What Redis has of a run, but for scores and engines' counts."""
        return await summary_of(self.redis.client, run)

    async def locking(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run in a thread some work that takes the lock of a run's registry or history.

        The threads are separate from asyncio's: while another process keeps the lock, waiting requests could occupy all
        of those, and uploads need some.
        """
        return await asyncio.get_running_loop().run_in_executor(self._locking, functools.partial(work, *args, **named))

    async def in_turn(self, run: str, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """As `locking`, with at most one thread for each run.

        For calls that trainers make again and again: a kept lock (docs/reference/paused.md) delays one run only.
        """
        async with self.of(run).turn:
            return await self.locking(work, *args, **named)

    def forgetting(self, run: str) -> Callable[[int | None], bool]:
        """For a thread: delete a run's keys, in the event loop, which owns the Redis client (`Layout.fenced`)."""
        loop = asyncio.get_running_loop()

        def forget(fence: int | None) -> bool:
            return asyncio.run_coroutine_threadsafe(self.store(run).forget(fence), loop).result() is not None

        return forget

    async def check_no_worker(self, run: str) -> None:
        """For a run that this state does not have: a Problem while a worker has its keys, which are another state's."""
        if not await is_worked_on(self.redis.client, run):
            return
        with contextlib.suppress(OSError):  # another host of this state may have begun it
            await self.locking(self.layout.pull, run)
        if not is_there(self.layout.run_json(run)):
            raise Problem(503, "run-of-another-state", _ANOTHERS_RUN.format(run=run))

    async def finish_deletion(self, run: str) -> bool:
        """Delete all of a withdrawn run. False while a worker still has it; True also if another deleted it."""
        if not await take_from_workers(self.redis.client, run):
            return not is_there(self.layout.withdrawn(run))
        forget = self.forgetting(run)
        # What is there now: another host may finish this deletion, and register a new run, while this one is stopped.
        stores = [objects for objects in (self.registry.objects, self.disk.incoming) if objects is not None]
        left = [(objects, await asyncio.to_thread(objects.of_run, run)) for objects in stores]

        def forget_all(fence: int | None) -> bool:  # where the object store is away, the next attempt finds the rest
            known = forget(fence)
            for objects, keys in left if known else ():
                objects.delete(keys)
            return known

        if is_there(self.layout.withdrawn(run)) and await self.locking(delete_run, self.layout, run, forget_all):
            self.drop(run)
            log.warning("run %s was deleted", run)
        else:
            await give_back(self.redis.client, run)  # another was faster; the lease is of a new run of that name
        return True

    def close(self) -> None:
        """Shut the pools of waiting threads down."""
        self._locking.shutdown(wait=False, cancel_futures=True)
        self.looks.close()

    async def reap(self) -> int:
        """Delete what nobody needs any more: spooled files without an entry, deleted runs; returns how many files."""
        await asyncio.to_thread(sweep_deleted, self.layout)
        try:
            await asyncio.to_thread(self.layout.sweep)
        except OSError as error:
            log.warning("the object store was not swept: %s", error)
        for run in await asyncio.to_thread(self.layout.withdrawn_names):
            try:
                await self.finish_deletion(run)
            except (redis.exceptions.RedisError, OSError, RegistryBusy) as error:
                log.warning("run %s is not deleted yet: %s", run, error)
        registered = await asyncio.to_thread(self.layout.run_names)
        for run in {*self._kept, *self.disk.runs}.difference(registered):
            self.drop(run)  # another process deleted it
        self._drop_unasked()
        gone = await self.disk.sweep(registered)
        await self._shorten_memory(registered)  # while Redis is full, this is what helps
        return gone

    def _drop_unasked(self) -> None:
        self.registry.history.drop_events(_UNASKED_SECONDS)
        for kept in self._kept.values():
            kept.drop_unasked()

    async def _shorten_memory(self, runs: Sequence[str]) -> None:
        """Keep what Redis remembers of ended batches, for all runs, below twice what one run may take.

        The runs that have most are cut first. Runs that ended keep theirs for 7 days, and would fill Redis for those
        that go on. Where Redis is nearly full all the same (another limit, queues, scores), they are cut until a fifth
        of it is free, or hardly anything is left.
        """
        held = await asked_of(runs, lambda run: self.of(run).queue.remembered())
        together, memory = 2 * self.settings.remembered_bytes, await self.redis.soon(memory_of(self.redis.client))
        if memory is not None and memory.fill > REDIS_NEARLY_FULL:
            excess = memory.used_bytes - int(_LEFT_FULL * memory.limit_bytes)
            together = min(together, max(sum(held.values()) - excess, self.settings.remembered_bytes // _LEAST_SHARE))
        most = fair_bound(list(held.values()), together)
        for run in (run for run, size in held.items() if size > most):
            size = await self.of(run).queue.shorten(most)
            if size < held[run]:
                log.info("run %s: what Redis remembers of ended batches was cut to %.1f MiB", run, size / (1 << 20))


async def _context(request: Request) -> ServiceContext:  # a plain function would take a thread for each request
    context: ServiceContext = request.app.state.context
    return context


Context = Annotated[ServiceContext, Depends(_context)]
RunQuery = Annotated[str, Query(description="Name of the run.")]
#: For calls that change a run's drafter. It has no default: a forgotten name must not move another run's engines.
NamedRun = Annotated[str, Query(description="Name of the run. It must be given.")]
