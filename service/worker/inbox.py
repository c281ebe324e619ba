"""Every delivery of one run, from its claim to its acknowledgement. Knows Redis and files, and no training.

Delivery is at least once, effect once:
* An entry is acknowledged as trained only once a checkpoint holds its effect: by `commit`, or, if it is delivered
  again after that, unread.
* The queue counts deliveries, so that an entry that kills its worker again and again ends. Deliveries that ended for
  another reason (Redis, the disk, memory, a wait for the draft vocabulary) must not count. They are marked here, and
  the mark stays until Redis has taken it.
* Rollouts that came in an earlier batch are left out. The script that enqueues has named them in the entry.
* A batch that cannot be loaded, or that the learner rejects, ends as a dead letter with the reason; its file is kept.
* A batch whose file cannot be read now (too many open files, a bad sector, no memory and none can be made by closing
  runs) is put off until its entry is idle; other batches go on. If memory runs out for it `MEMORY_TRIES` times, in
  loading or scoring, it ends as a dead letter: a rollout may be too long for this worker.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from redis.exceptions import RedisError

from drafter.batch import RolloutBatch, load_batch, screen, without
from drafter.device import is_device_fault, is_out_of_memory
from drafter.errors import BatchRejected, DrafterError, NotFinite
from rl_hooks.wire import WireError
from service.errors import BlobDamaged, ObjectStoreError, ServiceError
from service.settings import Settings
from service.storage.layout import BLOB_NAME, Layout, is_there
from service.storage.queue.deliveries import EndState, Entry, RolloutQueue
from service.storage.queue.incoming import Incoming, sha256_in
from service.storage.queue.keys import DeathCode
from service.storage.spool import Spool, check_blob

log = logging.getLogger("draftalign.worker")
#: Why a batch is dead whose file was lost, for people.
_GONE: Final = "its file is gone from where the service keeps it; send the batch again"
#: Likewise, where the file is there, under a name of another form.
_OF_ANOTHER: Final = "another version of draftalign queued it, whose file this one does not find; send the batch again"

#: One consumer name per run: a restarted worker finds its own unfinished entries at once.
CONSUMER: Final = "worker"
#: The newest policy is the newest of this many last batches, so that a trainer that went back to an earlier checkpoint
#: is followed after as many.
RECENT_BATCHES: Final = 8
_ARRIVALS_KEPT: Final = 16
#: A time between two policy versions is a pause of the run from this multiple of all other times together.
_PAUSE: Final = 4.0
#: Tokens kept in memory while the draft vocabulary is gathered: few response tokens may come with many prompt tokens.
_MOST_WAITING_TOKENS: Final = 1 << 20
#: Tries before the batch is dead; an hour together: an engine on the same GPU may have the memory while it generates.
MEMORY_TRIES: Final = 60
#: A try counts only if the last one that counted is this long ago: a run that is opened again tries at once.
MEMORY_TRY_SECONDS: Final = 60.0


class Phase(Enum):
    """Where a delivery is."""

    CLAIMED = auto()  # worked on in this turn
    WAITING = auto()  # for the draft vocabulary; its batch stays in memory
    DONE = auto()  # in the drafter's weights or in the recent rollouts; the next checkpoint acknowledges it
    UNREADABLE = auto()  # its file could not be read; claimed again once it is idle
    NO_MEMORY = auto()  # memory ran out for it; claimed again once it is idle
    INTERRUPTED = auto()  # something else failed while it was worked on; redelivered at once


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A claimed batch, loaded. `path`: its file in the spool.

    `left_out`: places in the file of the rollouts that `batch` lacks: known ones, and those of NaN or infinity, of
    which `why` tells.
    """

    entry: Entry
    path: Path
    batch: RolloutBatch
    left_out: tuple[int, ...] = ()
    why: str = ""

    @property
    def not_finite(self) -> int:
        """How many rollouts are left out for NaN or infinity."""
        return len(self.left_out) - len(self.entry.known)

    def screened(self) -> Loaded:
        """The same without rollouts of NaN or infinity. Raises `BatchRejected` as `screen` does."""
        try:
            screen(self.batch)
        except NotFinite as found:
            return self.sound(found)
        return self

    def sound(self, found: NotFinite) -> Loaded:
        """The same without the rollouts that `found` names."""
        rollouts = self.batch.rollouts + len(self.left_out)
        places = [place for place in range(rollouts) if place not in self.left_out]
        left_out = (*self.left_out, *(places[place] for place in found.places))
        why = f"{len(found.places)} of {rollouts} rollouts are left out: {found.reason}"
        log.warning("batch %s: %s", self.entry.batch_id, why)
        return replace(self, batch=without(self.batch, found.places), left_out=left_out, why=why)


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One delivery of an entry."""

    entry: Entry
    phase: Phase
    loaded: Loaded | None = None  # of a WAITING one
    uncounted: bool = False  # Redis has still to be told that this delivery does not count
    not_finite: int = 0  # as in `Loaded`
    why: str = ""


class ArrivedVersions:
    """Policy versions of the batches that arrived: the newest one, and how fast they follow each other."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque([0], maxlen=RECENT_BATCHES)
        self._arrived = 0.0
        self._attempt = 0  # the latest that a session told of
        self._first_seen: list[tuple[float, int]] = []  # (arrival in Unix seconds, version), ascending

    def note(self, entry: Entry) -> None:
        """Take in the arrival of a batch, unless it is belated."""
        arrival = float(entry.entry_id.partition("-")[0]) / 1000.0  # stream ids begin with Unix milliseconds
        if entry.belated or arrival < self._arrived:  # delivered again: it was noted, or another worker had it
            return
        self._arrived = arrival
        if (entry.attempt or 0) > self._attempt:
            self._attempt = entry.attempt or 0
            self._recent.clear()  # of an earlier start of the trainer
        self._recent.append(entry.policy_version_max)
        if self._first_seen and self.newest < self._first_seen[-1][1]:
            self._first_seen = []  # the trainer went back to an earlier checkpoint
        last_arrival, last_version = self._first_seen[-1] if self._first_seen else (-math.inf, -1)
        # Redis' clock may have been set back: until it has caught up, all stream ids have one time, which says nothing.
        if entry.policy_version > last_version and arrival > last_arrival:
            self._first_seen = [*self._first_seen[1 - _ARRIVALS_KEPT :], (arrival, entry.policy_version)]

    @property
    def newest(self) -> int:
        """Of the last batches, not of all: a trainer that goes on from an earlier checkpoint counts on from there."""
        return max(self._recent)

    @property
    def seconds_per_version(self) -> float | None:
        """Mean time between policy versions that came, by the arrival of their rollouts. None: only one was seen.

        Only arrivals count. Versions are labels, such as an optimizer's steps: their distances tell nothing. A pause
        far longer than all other times together is the run's, and tells nothing of the time that a version takes. But
        where most others are short, what was made in that time came at once after it: the service was away.
        """
        times = sorted(after[0] - before[0] for before, after in pairwise(self._first_seen))
        others = times[:-1]
        if len(others) > 1 and times[-1] > _PAUSE * sum(others) and 2 * median(others) > sum(others) / len(others):
            times = others
        return sum(times) / len(times) if times else None


class Inbox:
    """The deliveries of one run. `held` may be read by another thread; all else is the worker loop's alone."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        queue: RolloutQueue,
        vocab_size: int,
        ends_for_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        """`ends_for_memory`: whether to raise where memory runs out for a batch.

        Else it is put off, like one that cannot be read.
        """
        self.versions = ArrivedVersions()
        self.backlog = True  # entries of an earlier life, or that Redis took from this one, may be left
        self._settings = settings
        self._layout = layout
        self._queue = queue
        self._vocab_size = vocab_size
        self._incoming = Incoming.of(settings)
        self._deliveries: dict[str, Delivery] = {}  # by entry id, the one that was claimed first comes first
        self.applied = set[str]()  # unacknowledged batches whose effect the last checkpoint holds
        self._ends_for_memory = ends_for_memory
        self._backlog_uncounted = False  # the backlog comes from a failure that is no batch's, not from a death

    def forget_brought(self) -> None:
        """Delete files that an earlier worker fetched from the store: another host may have ended their batches."""
        if self._kept is not None:
            for path in self._layout.spool(self._queue.run).glob("*.safetensors"):
                path.unlink(missing_ok=True)

    # --- the ledger
    def _set(self, delivery: Delivery) -> None:
        # One assignment, so that the heartbeat's thread always finds the delivery, old or new.
        self._deliveries[delivery.entry.entry_id] = delivery

    def _forget(self, entry: Entry) -> None:
        self._deliveries.pop(entry.entry_id, None)

    def _in(self, *phases: Phase) -> list[Delivery]:
        snapshot = tuple(self._deliveries.values())  # copied in one step; deliveries are frozen
        return [delivery for delivery in snapshot if delivery.phase in phases]

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of the entries that no other worker may claim. A snapshot: complete, whichever thread takes it."""
        return tuple(d.entry.entry_id for d in self._in(Phase.CLAIMED, Phase.WAITING, Phase.DONE))

    @property
    def done(self) -> int:
        """Batches that the next checkpoint acknowledges."""
        return len(self._in(Phase.DONE))

    @property
    def waiting(self) -> int:
        """Batches that wait for the draft vocabulary."""
        return len(self._in(Phase.WAITING))

    @property
    def put_off(self) -> list[str]:
        """Ids of the entries that are put off: their file cannot be read now, or there is no memory."""
        return [delivery.entry.entry_id for delivery in self._in(Phase.UNREADABLE, Phase.NO_MEMORY)]

    @property
    def short_of_memory(self) -> bool:
        """Whether a batch is put off because memory ran out for it."""
        return bool(self._in(Phase.NO_MEMORY))

    # --- claiming
    def renew(self) -> None:
        """Renew the hold on all held entries. Without that, `claim` takes them for abandoned after a long outage."""
        if self.held:
            self._queue.heartbeat(CONSUMER, self.held)

    def redeliver(self) -> list[Entry]:
        """Claim again what a failure or an earlier process left unfinished. Empty: nothing is left."""
        self._release_uncounted()
        entries = self._queue.own_pending(CONSUMER, skip=self._deliveries.keys())
        for entry in entries:
            self._set(Delivery(entry, Phase.CLAIMED, uncounted=self._backlog_uncounted))
        self._release_uncounted()
        return entries

    def claim(self) -> list[Entry]:
        """Claim new entries. Call it only when `redeliver` has nothing left."""
        self.backlog = self._backlog_uncounted = False
        self.applied.clear()  # each was delivered again, and is acknowledged
        entries = self._queue.claim(
            CONSUMER, self._settings.claim_tokens, min_idle_seconds=self._settings.claim_idle_seconds
        )
        for entry in entries:
            self._set(Delivery(entry, Phase.CLAIMED))
        return entries

    def load(self, entries: Sequence[Entry], *, screened: bool = True) -> list[Loaded]:
        """Load claimed entries. An entry that is missing in the result has ended, or was put off.

        `screened`: without rollouts of NaN or infinity. Else several ranks screen a batch as they score it.
        """
        for entry in entries:  # before any is loaded: a claim's newest policy decides which entries are too old
            self.versions.note(entry)
        return [loaded for entry in entries if (loaded := self._load(entry, screened)) is not None]

    def _load(self, entry: Entry, screened: bool) -> Loaded | None:
        if entry.batch_id in self.applied:
            self._acknowledge(entry, "trained")
            self.applied.discard(entry.batch_id)
            return None
        try:
            path = self._layout.blob(self._queue.run, entry.blob)
        except ValueError as error:  # not raised: it must not hold up the batches behind this one
            log.error("%s: %s: another version of draftalign queued it", self._queue.run, error)
            self._end_dead(entry, _OF_ANOTHER, "blob_missing", keep_file=False)
            return None
        lag = None if entry.put_back else self._settings.max_policy_lag
        if lag is not None and (behind := self._newest_policy(entry) - entry.policy_version_max) > lag:
            if self._acknowledge(entry, "skipped", f"{behind} policy versions old; limit {lag}"):
                path.unlink(missing_ok=True)  # not where another worker ended it: it may have been put back since
            return None
        try:
            if not self._bring(entry, path):
                check_blob(path)
            batch = without(load_batch(path, vocab_size=self._vocab_size), entry.known)
            loaded = Loaded(entry, path, batch, entry.known)
            if screened:
                loaded = loaded.screened()
        except FileNotFoundError as error:
            if self._is_kept(entry):  # another worker of this host opened the run, and deleted what was fetched
                self._put_off(entry, error, Phase.UNREADABLE)
            else:
                self.reject(entry, _GONE, "blob_missing")
        except BlobDamaged as error:
            log.error("%s: %s", self._queue.run, error)
            self.reject(entry, f"{error}; send the batch again", "blob_damaged")
        except (WireError, BatchRejected) as error:
            self.reject(entry, str(error))
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            if isinstance(error, OSError) and not is_out_of_memory(error):  # a bad sector, say
                self._put_off(entry, error, Phase.UNREADABLE)
            else:
                self.fail(entry, error, "cannot be loaded")
        else:
            return loaded
        return None

    def _bring(self, entry: Entry, path: Path) -> bool:
        """Fetch the file unless this host has it. Returns whether it was fetched, which compares its SHA-256."""
        if not sha256_in(entry.blob) or is_there(path):
            return False
        if self._incoming is None:
            raise ObjectStoreError("it lies in the object store, and this worker's DRAFTALIGN_ROLLOUTS_URL is not set")
        free, sync = self._settings.spool_min_free_bytes, self._settings.spool_fsync
        try:
            self._incoming.bring(
                self._queue.run, entry.blob, entry.bytes, Spool(self._layout), least_free_bytes=free, sync=sync
            )
        except FileNotFoundError:
            if not is_there(path):
                raise
            return False  # another worker, whose lease ran out, fetched it meanwhile
        return True

    def _newest_policy(self, entry: Entry) -> int:
        """The newest policy version of the last batches, and of those in the queue that came after this one."""
        return max(self.versions.newest, self._queue.newest_policy(after=entry.entry_id) or 0)

    def newest_waiting(self, after: Loaded) -> int | None:
        """The newest policy version in the queue behind this batch. None: nothing waits there."""
        return self._queue.newest_policy(after=after.entry.entry_id)

    def unfinished(self) -> list[Entry]:
        """The oldest entries of the queue, those that are worked on included."""
        return self._queue.unfinished()

    # --- what became of a batch
    def finish(self, loaded: Loaded) -> None:
        """Nothing is left to do with a batch: the next checkpoint acknowledges it."""
        self._set(Delivery(loaded.entry, Phase.DONE, not_finite=loaded.not_finite, why=loaded.why))

    def reject(self, entry: Entry, reason: str, code: DeathCode = "unusable") -> None:
        """End a batch as a dead letter."""
        self._end_dead(entry, reason, code, keep_file=self._layout.blob(self._queue.run, entry.blob).exists())

    def _end_dead(self, entry: Entry, reason: str, code: DeathCode, *, keep_file: bool) -> None:
        log.warning("%s: batch %s is dead: %s", self._queue.run, entry.batch_id, reason)
        self._queue.dead_letter(entry, reason, code=code, keep_file=keep_file)
        self._forget(entry)
        seconds, most = self._settings.dead_letter_seconds, self._settings.dead_letter_bytes
        for blob in self._queue.sweep_dead(older_than_seconds=seconds, max_bytes=most):
            self._delete(blob)
        if self._kept is not None and BLOB_NAME.fullmatch(entry.blob):  # the store has it
            self._layout.blob(self._queue.run, entry.blob).unlink(missing_ok=True)

    def _delete(self, blob: str) -> None:
        self._layout.blob(self._queue.run, blob).unlink(missing_ok=True)
        if self._kept is not None:
            self._kept.discard(self._queue.run, [blob])

    @property
    def _kept(self) -> Incoming | None:
        """The store that keeps files until they are acknowledged."""
        return Incoming.keeper(self._incoming)

    def _is_kept(self, entry: Entry) -> bool:
        """Whether the store has a batch's file, or nobody knows."""
        try:
            return self._kept is not None and self._kept.holds(self._queue.run, entry.blob)
        except ObjectStoreError:
            return True

    def fail(self, entry: Entry, error: Exception, what: str) -> None:
        """Handle an unforeseen exception: end the batch, put it off, or raise again what no batch can have caused."""
        if is_out_of_memory(error) and not is_device_fault(error):
            self._put_off_for_memory(entry, error, what)
            return
        if not is_batch_fault(error):
            raise error
        log.error("%s: batch %s %s", self._queue.run, entry.batch_id, what, exc_info=error)
        self.reject(entry, f"{what}: {error_text(error)}")

    def _put_off_for_memory(self, entry: Entry, error: Exception, what: str) -> None:
        if self._ends_for_memory():
            raise error
        if self._queue.memory_ran_out(entry, MEMORY_TRY_SECONDS) < MEMORY_TRIES:
            self._put_off(entry, error, Phase.NO_MEMORY)
            return
        told = f"memory ran out {MEMORY_TRIES} times, so it {what}; raise the memory or send shorter rollouts"
        self.reject(entry, f"{told}: {error_text(error)}")

    def _put_off(self, entry: Entry, error: Exception, phase: Phase) -> None:
        """Put a batch off until its entry is idle. Other batches do not wait for it."""
        log.error("%s: batch %s is put off: %s", self._queue.run, entry.batch_id, error_text(error))
        self._set(Delivery(entry, phase, uncounted=True))
        self._release_uncounted()

    def _acknowledge(self, entry: Entry, end: EndState, reason: str = "", not_finite: int = 0) -> bool:
        ended = self._queue.ack(entry, end, reason, not_finite)
        self._forget(entry)
        if ended and self._kept is not None:
            self._kept.discard(self._queue.run, [entry.blob])
        return ended

    def wait(self, batches: Sequence[Loaded]) -> None:
        """Keep batches in memory until there is a draft vocabulary. Their deliveries do not count.

        Beyond `_MOST_WAITING_TOKENS` the oldest batches are skipped. Their tokens are in the vocabulary's counts. So is
        the oldest where uploads are refused since the last call, because all that fills the queue waits here.
        """
        for loaded in batches:
            self._set(Delivery(loaded.entry, Phase.WAITING, loaded=loaded, uncounted=True))
        waiting = [(one.loaded, one.loaded.batch.tokens) for one in self._in(Phase.WAITING) if one.loaded is not None]
        excess = sum(tokens for _, tokens in waiting) - _MOST_WAITING_TOKENS
        gives_way = self._queue.was_refused() and not batches
        for loaded, tokens in waiting[:1] if gives_way else waiting[:-1]:
            if excess <= 0 and not gives_way:
                break
            if self._acknowledge(loaded.entry, "skipped", "passed over while the draft vocabulary was gathered"):
                loaded.path.unlink(missing_ok=True)
            excess -= tokens
        self._release_uncounted()

    def resume(self) -> list[Loaded]:
        """Return the batches that waited for the draft vocabulary. From now on their deliveries count."""
        resumed = []
        for delivery in self._in(Phase.WAITING):
            self._set(Delivery(delivery.entry, Phase.CLAIMED))
            resumed += [delivery.loaded] if delivery.loaded is not None else []
        counted = [replace(loaded.entry, deliveries=loaded.entry.deliveries + 1) for loaded in resumed]
        self._queue.release(CONSUMER, counted)
        return resumed

    # --- what a failure leaves
    def uncount(self, *phases: Phase) -> None:
        """Have Redis not count the deliveries that are in these phases."""
        for delivery in self._in(*phases):
            self._set(replace(delivery, uncounted=True))
        self._release_uncounted()

    def _release_uncounted(self) -> None:
        marked = [delivery for delivery in self._deliveries.values() if delivery.uncounted]
        self._queue.release(CONSUMER, [delivery.entry for delivery in marked])
        for delivery in marked:
            if delivery.phase is Phase.INTERRUPTED:
                self._forget(delivery.entry)
            else:
                self._set(replace(delivery, uncounted=False))

    def interrupt(self) -> None:
        """End a turn after a failure that no batch caused: claimed entries come again at once, and none counts."""
        for delivery in self._in(Phase.CLAIMED, Phase.DONE):
            phase = Phase.INTERRUPTED if delivery.phase is Phase.CLAIMED else Phase.DONE
            self._set(replace(delivery, phase=phase, uncounted=True))
        self._backlog_uncounted = self._backlog_uncounted or not self.backlog
        self.backlog = True

    def end_turn(self) -> None:
        """Forget what is still claimed: a batch's own fault interrupted it, or another worker has it now."""
        for delivery in self._in(Phase.CLAIMED):
            self._forget(delivery.entry)

    # --- checkpoint, then acknowledge
    def commit(self, write_checkpoint: Callable[[Sequence[str]], None]) -> None:
        """Write a checkpoint, then acknowledge what it holds. No other code does both.

        `write_checkpoint` gets the ids of the batches whose effect is in the checkpoint but which are not acknowledged
        yet. If the process dies or Redis fails between the two, these entries are delivered again, and acknowledged
        unread.
        """
        done = self._in(Phase.DONE)
        write_checkpoint(sorted(self.applied | {delivery.entry.batch_id for delivery in done}))
        for delivery in done:
            self._acknowledge(delivery.entry, "trained", delivery.why, delivery.not_finite)


def is_batch_fault(error: Exception) -> bool:
    """Whether the batch that was worked on alone may have caused this error.

    No batch causes an error of Redis, the disk, memory or the device, or a drafter or head that does not fit.
    """
    if isinstance(error, BatchRejected):
        return True
    elsewhere = isinstance(error, RedisError | OSError | ServiceError | DrafterError)
    return not elsewhere and not is_out_of_memory(error) and not is_device_fault(error)


def error_text(error: Exception) -> str:
    """An exception for a dead letter's reason."""
    return f"{type(error).__name__}: {error}"
