"""The spool's disk: what one run may have of it, and what is deleted where it runs short."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Collection

import redis.exceptions

from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue.dead import DeadLetters
from service.storage.queue.incoming import Incoming
from service.storage.queue.rollout_queue import AsyncRolloutQueue, fair_bound
from service.storage.ready import asked_of
from service.storage.runs import kept_bytes
from service.storage.spool import Spool

log = logging.getLogger("draftalign.api")


def is_full(error: OSError) -> bool:
    """Whether the disk, or the quota on it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The spool, shares of its disk, and the files of dead batches, which give way first."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        queue: Callable[[str], AsyncRolloutQueue],
        dead: Callable[[str], DeadLetters],
    ) -> None:
        self._settings, self._layout, self._queue, self._dead = settings, layout, queue, dead
        self.spool = Spool(layout)
        #: The store that trainers put rollout files into, past this process and its disk.
        self.incoming = Incoming.of(settings)
        self._kept_bytes: dict[str, int] = {}  # what the worker keeps of each run, as of the last sweep
        #: Set when uploads find no room: files of dead batches may be in their way.
        self.room_wanted = asyncio.Event()
        self._wanted_bytes: set[int] = set()  # that these uploads need

    @property
    def runs(self) -> set[str]:
        """Runs of which something is kept."""
        return {*self._kept_bytes}

    def drop(self, run: str) -> None:
        """Keep nothing of a run that was deleted."""
        self._kept_bytes.pop(run, None)

    def share_bytes(self, held: int, run: str = "") -> int:
        """Bytes that one run may have of the spool's disk: three quarters of its own files and of what is free.

        `held`: its files there; those on their way are added. So others always find room. (Dynamic thresholds:
        Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.)
        """
        return (held + self._spare_bytes(run)) * 3 // 4

    def _spare_bytes(self, run: str) -> int:
        """Bytes that a run has on their way, and those that are free."""
        free = self.spool.free_bytes() - self._settings.spool_min_free_bytes
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
        return share if self._settings.queue_max_bytes is None else min(share, self._settings.queue_max_bytes)

    async def sweep(self, runs: Collection[str]) -> int:
        """Delete spooled files of these runs that no entry will ever name, and unfinished uploads; returns how many.

        And note what the worker keeps of each. The files come from a crash between rename and enqueue, or between
        acknowledgement and deletion; or they are of dead batches, and kept for too long or too large together.
        """
        gone = await asyncio.to_thread(self.spool.reap_uploads, self._settings.orphan_age_seconds)
        for run in runs:
            try:
                gone += await self._sweep_run(run)
                self._kept_bytes[run] = await asyncio.to_thread(kept_bytes, self._layout, run)
            except (redis.exceptions.RedisError, OSError) as error:  # other runs' files are no less in the way
                log.warning("run %s: its spool was not swept: %s", run, error)
        return gone + await self._sweep_incoming(runs)

    async def _sweep_incoming(self, runs: Collection[str]) -> int:
        """Delete files in the object store that no entry will ever name: a sender did not come back, say."""
        gone, incoming = 0, self.incoming
        if incoming is None:
            return 0
        try:
            for run in runs:
                old = await asyncio.to_thread(incoming.old, run, self._settings.orphan_age_seconds)
                blobs = [blob for blob in old if await self._queue(run).disown(blob.partition(".")[0], blob)]
                await asyncio.to_thread(incoming.remove, run, blobs)
                gone += len(blobs)
        except (redis.exceptions.RedisError, OSError) as error:  # another run's would fail as slowly
            log.warning("the object store was not swept: %s", error)
        return gone

    def want_room(self, spare_bytes: int) -> None:
        """Note that an upload found the disk too full. `spare_bytes`: what must be free for it."""
        self._wanted_bytes.add(spare_bytes)
        self.room_wanted.set()

    async def make_room(self) -> None:
        """Delete files of dead batches for uploads that found no room, first those of the runs that have most.

        As many are deleted as the largest of those uploads needs that fits then.
        """
        wanted, self._wanted_bytes = self._wanted_bytes, set()
        self.room_wanted.clear()
        least = self._settings.spool_min_free_bytes - self.spool.free_bytes()
        runs = await asyncio.to_thread(self._layout.run_names)
        held = await asked_of(runs, lambda run: self._queue(run).dead_file_bytes())
        total = sum(held.values())
        missing = max((found for length in wanted if (found := least + length) <= total), default=0)
        if missing <= 0:
            return
        most = fair_bound(list(held.values()), total - missing)
        for run in (run for run, size in held.items() if size > most):
            await self.sweep_dead(run, most)
            log.warning("run %s: files of dead batches were deleted: uploads found no room on the disk", run)

    async def sweep_dead(self, run: str, most_bytes: int) -> None:
        """Delete files of a run's dead batches: those that are kept for too long, and all beyond `most_bytes`."""
        seconds = self._settings.dead_letter_seconds
        for blob in await self._dead(run).sweep(older_than_seconds=seconds, max_bytes=most_bytes):
            self.spool.delete(run, blob)

    async def _sweep_run(self, run: str) -> int:
        settings, gone = self._settings, 0
        await self.sweep_dead(run, settings.dead_letter_bytes)
        for blob in await asyncio.to_thread(self.spool.old_blobs, run, settings.orphan_age_seconds):
            # One atomic step: a paused API process may enqueue this file now (docs/reference/paused.md).
            if await self._queue(run).disown(blob.partition(".")[0], blob):
                self.spool.delete(run, blob)
                gone += 1
        return gone
