"""The worker process: serves every registered run, holds a lease on each, and says that it is alive.

Its time is shared fairly between the runs that have work, by the seconds that they took (`Turns`). A batch of a run
that took less than others waits for the claim in hand, and for nothing else, however much the others have queued.

An exception ends at the run in which it was raised: the run is closed, its error is told (`worker_error`), and it is
opened again from its last checkpoint later. Where the disk failed it stays open, with what it holds in memory, and is
left alone for a while. Only Redis being away holds all runs up; a key of one run that holds what the service did not
write is that run's trouble. Only a fault of the device ends the process, because CUDA works for no run after it.

A run that a person has paused or archived is closed after a checkpoint, so it holds no memory. What an archived one had
in its queue ends as skipped.

`Room` decides which idle runs are closed where memory runs out for one that has work, and which runs without work are
opened: one a turn, because to open one may take as long as a claim.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from drafter.device import is_device_fault, is_out_of_memory
from drafter.errors import DrafterError
from service.errors import ConfigurationError, ServiceError, WorkerError
from service.memory import RETURN_MEMORY_SECONDS, return_freed_memory
from service.monitor.records import WorkerGauges
from service.settings import Settings
from service.storage import ready
from service.storage.layout import FileId, is_there
from service.storage.mirror import state_of
from service.storage.queue.deliveries import Entry, RolloutQueue
from service.storage.queue.incoming import Incoming
from service.storage.queue.lease import Leases
from service.storage.ready import is_of_one_key, why_unusable
from service.storage.reports.drafting import Drafting, settings_of
from service.storage.reports.store import Store
from service.storage.runs import read_state, untouched
from service.worker.checkpoint import CheckpointSuperseded
from service.worker.inbox import CONSUMER
from service.worker.loop import LeaseLost, RegisteredAgain, RunWorker
from service.worker.process.deaths import Deaths
from service.worker.process.device import advised, use_device
from service.worker.process.heartbeat import Heartbeat
from service.worker.process.room import Room
from service.worker.process.runs import REFUSED_SECONDS, Run, served
from service.worker.process.share import BUSY, Share
from service.worker.process.turns import AHEAD_SECONDS, Turns

log = logging.getLogger("draftalign.worker")

_IDLE_SECONDS = 0.05
_RETRY_SECONDS = 0.5
#: Pause between two log lines of the same trouble with Redis, which is met again twice a second.
_TOLD_SECONDS = 60.0
#: Pause after an error of the disk; twice as long after each further one in a row, up to `REFUSED_SECONDS`.
_DISK_SECONDS = 5.0
#: Pause between two looks for runs. A look begins with calls to the file system for each run, which take long on a
#: network's. So the pause is 25 times as long as these took (ten times a whole look that opens nothing), 10 s at most.
_LOOK_FOR_RUNS_SECONDS = 1.0
_TIMES_LONGER, _MOST_TIMES_LONGER = 25.0, 10.0
#: A worker whose look is overdue by more than this is in a long turn. It is handed no run before the turn's end.
_BUSY_SECONDS = 10.0
#: Pause between two looks at the queue of an archived run: a batch may have been on its way.
_LOOK_AT_ARCHIVED_SECONDS = 60.0
_ERROR_CHARACTERS = 2000
#: Pause after an unforeseen exception; twice as long after each further one, up to `REFUSED_SECONDS`.
_FAILED_SECONDS = 1.0
#: Pause before a run is tried again that cannot begin with its file, and of which there is nothing but that file. Each
#: try reads the file and writes the drafter in it. Another file, or a person who makes the run active, ends the pause.
_USELESS_SECONDS = 3600.0
_NO_ROOM = "memory ran out, and to close idle runs did not help, or none was idle"


class Worker:
    """All runs of one service."""

    def __init__(self, settings: Settings, redis: Redis) -> None:
        self._settings = settings
        self._redis: Any = redis
        self._layout = state_of(settings)
        self._leases = Leases(redis)
        self._runs: dict[str, Run] = {}
        self._look_at = 0.0  # when the next look for runs is due (monotonic)
        self._share = Share(redis, self._leases)
        self._deaths = Deaths(redis)
        self._turns = Turns()
        # Not an Event: `stop` runs in a signal handler, maybe while this very thread holds the Event's lock.
        self._stopping = False
        self._heartbeat = Heartbeat(redis, self._layout, self._leases, self._runs, self._has, lambda: self._stopping)
        self._room = Room(redis, self._layout, self._runs, self._heartbeat.lock, self._checkpoint_and_close)

    @property
    def served(self) -> dict[str, RunWorker]:
        """The runs that are open now."""
        return served(self._runs)

    def _has(self) -> int:
        """How many runs this worker announces. In a long turn it announces `BUSY` more, so that it is handed none."""
        busy = time.monotonic() - self._look_at > _BUSY_SECONDS
        return len(self.served) + (BUSY if busy else 0)

    def stop(self) -> None:
        """Finish the optimizer step in hand, checkpoint, and return from `serve`."""
        self._stopping = True

    def serve(self) -> None:
        """Work until `stop`. While Redis is away it waits, and loses nothing."""
        with self._layout.followed(), self._heartbeat.beating():
            returned = time.monotonic()
            told: dict[str, float] = {}  # what was logged of Redis, and when
            while not self._stopping:
                if time.monotonic() - returned > RETURN_MEMORY_SECONDS:
                    return_freed_memory()
                    returned = time.monotonic()
                self._room.send_open_runs()
                try:
                    if not self._turn():
                        self._pause(_IDLE_SECONDS)
                except RedisError as error:
                    why = f"answers {error}" if isinstance(error, ResponseError) else f"does not answer ({error})"
                    why, now = why_unusable(error) or why, time.monotonic()
                    told = {text: at for text, at in told.items() if now - at < _TOLD_SECONDS}
                    if why not in told:
                        told[why] = now
                        log.warning("Redis %s; trying again, without a word for a minute", why)
                    self._pause(_RETRY_SECONDS)
                except OSError as error:
                    log.error("%s; nothing was acknowledged, trying again", error)
                    self._pause(_DISK_SECONDS)
            self._close()

    def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond a `stop`."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _IDLE_SECONDS))

    def _turn(self) -> bool:
        if self._room.close_wanted():
            self._look_at = 0.0
        self._find_runs()
        if not self._stopping and (idle := self._room.next_idle()) is not None:
            self._attend_to(idle, time.monotonic(), due=True)
        worked = False
        began = time.monotonic()
        for run in self._turns.order(self.served):
            if self._stopping or (worked and time.monotonic() - began > AHEAD_SECONDS):
                break
            worker = self._runs[run].worker  # this frees the worker before, if its run was closed
            if worker is None or self._runs[run].retry_at > began or not self._turns.may(run):
                continue
            if self._runs[run].lost:
                self._drop(run, "the lease is gone")
                continue
            asked, found, failed = time.monotonic(), False, True
            try:
                found, failed = worker.cycle(), False
                worked |= found
                if found:
                    self._runs[run].worked_at = time.monotonic()
                if not worker.inbox.short_of_memory:
                    self._note_work(run)
            except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
                self._handle_error(run, error)
            finally:
                seconds = time.monotonic() - asked if found or failed else 0.0
                self._turns.asked(run, seconds, at_work=found)
        return worked

    def _handle_error(self, run: str, error: Exception) -> None:
        """Leave, close or open again the run in which an exception was raised, by its kind.

        Raises it again if it concerns all runs: Redis is away, or the device has failed.
        """
        if is_device_fault(error) or (isinstance(error, RedisError) and not is_of_one_key(error)):
            raise error
        self._runs.setdefault(run, Run())  # it may just have been let go
        match error:
            case LeaseLost() | CheckpointSuperseded():
                self._drop(run, str(error))
            case RegisteredAgain():
                log.warning("%s", error)
                self._runs[run].worker = None  # to be opened again at once
            case _ if is_out_of_memory(error):
                self._want_room(run, error)
            case ServiceError() | DrafterError():
                self._close_until(run, REFUSED_SECONDS, str(error))
            case OSError():
                self._leave_alone(run, error)
            case _:  # unforeseen
                seconds = self._runs[run].back_off(_FAILED_SECONDS)
                self._close_until(run, seconds, advised(f"{type(error).__name__}: {error}"), trace=error)

    def _want_room(self, run: str, error: Exception) -> None:
        """Close a run for which memory ran out. It is tried again once idle runs are closed, or refused if none is."""
        state = self._runs[run]
        state.worker = None  # it goes on from its last checkpoint
        if not self._room.needs(run):
            log.info("run %s has no work, and there is no memory: it is opened when a batch comes", run)
            self._note_work(run)  # the batch for which memory ran out is gone
            state.closed = self._room.closed(run)
            self._give_back(run)
        elif not self._room.close_idle_for(run):
            seconds = state.back_off(_FAILED_SECONDS)  # counted in any case, for `Room.closes_for_memory`
            seconds = REFUSED_SECONDS if isinstance(error, torch.OutOfMemoryError) else seconds
            told = advised(f"{_NO_ROOM}: {type(error).__name__}: {error}")
            self._close_until(run, seconds, told, for_memory=True)
            self._share.leave(run, time.monotonic())

    def _drop(self, run: str, reason: str) -> None:
        """Leave a run to another worker, whose checkpoint is newer: none is written."""
        log.warning("run %s is another worker's now: %s", run, reason)
        state = self._runs[run]
        state.worker, state.suspicion.recent = None, False

    def _leave_alone(self, run: str, error: Exception) -> None:
        """Neither open nor close a run for a while, because its files cannot be read or written."""
        if self._runs[run].retry_at > time.monotonic():
            return  # it is left alone already
        seconds = self._runs[run].back_off(_DISK_SECONDS)
        log.error("run %s: %s; nothing was acknowledged, trying again in %.0f s", run, error, seconds)
        self._report_error(run, seconds, str(error))

    def _close_until(
        self, run: str, seconds: float, told: str, *, trace: Exception | None = None, for_memory: bool = False
    ) -> None:
        """Close a run. It is opened again from its last checkpoint, here or by another worker."""
        log.error("run %s: %s; it is closed for up to %.0f s", run, told, seconds, exc_info=trace)
        state = self._runs[run]
        state.worker = None
        # Before the lease is given back, because the next worker clears the error.
        self._report_error(run, seconds, told, for_memory=for_memory)
        if not (trace and state.suspicion.recent):  # another worker would not know the suspicion
            self._give_back(run)

    def _report_error(self, run: str, seconds: float, error: str, *, for_memory: bool = False) -> None:
        state = self._runs[run]
        state.proven, state.retry_at = False, time.monotonic() + seconds
        error = error[:_ERROR_CHARACTERS].encode("utf-8", "backslashreplace").decode()  # it may quote what is not UTF-8
        with _despite_broken_keys(run):
            if not self._leases.is_anothers(run):  # another worker reports on its run, and would not clear this
                # GET /runs/{run} answers it as `worker_error`.
                Store(self._redis, run).set_worker(WorkerGauges(error=error, for_memory=for_memory))

    def _note_work(self, run: str) -> None:
        """Clear a run's error, because the run was opened and has worked, or has no work any more."""
        state = self._runs[run]
        if not state.proven and not self._leases.is_anothers(run):
            Store(self._redis, run).set_worker(WorkerGauges(error=None))
            state.proven, state.failures, state.short = True, 0, 0

    def _find_runs(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_FOR_RUNS_SECONDS
        names = self._layout.run_names()
        for run in self._runs.keys() - names:
            self._let_go(run)
        wanted = sum(self._is_wanted(run, now) for run in names)
        times_longer = min(max(1.0, _TIMES_LONGER * (time.monotonic() - now)), _MOST_TIMES_LONGER)
        if self._share.look(len(self.served), wanted, now):
            self._hand_one_over(now)
        for run in names:
            self._runs.setdefault(run, Run())
        for run in sorted(names, key=lambda run: not self._runs[run].short):  # first those that others were closed for
            if self._stopping:  # opening the rest may take minutes
                return
            self._attend_to(run, now)
        self._look_at = time.monotonic() + _LOOK_FOR_RUNS_SECONDS * times_longer

    def _hand_one_over(self, now: float) -> None:
        """Hand a run that has work to another worker, which has fewer runs."""
        idle = self._room.idle()  # an idle run gains nothing from it, and the other worker may not even open it
        # The run that took the most seconds stays, and the next one goes: so the busiest runs are separated.
        others = self._turns.order(self.served)[:-1]
        at_work = [run for run in others if run not in idle and self._share.may_hand_over(run, now)]
        if at_work:
            run = at_work[-1]
            log.info("run %s is left to another worker, which has fewer", run)
            self._checkpoint_and_close(run)
            self._share.note_handed_over(run, time.monotonic())  # after the close: until then this worker served it

    def _attend_to(self, run: str, now: float, *, due: bool = False) -> None:
        try:
            self._look_after(run, self._runs[run], now, due=due)
        except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
            if is_out_of_memory(error) and not is_device_fault(error):  # looking at its files needed the memory
                self._leave_alone(run, error)
            else:
                self._handle_error(run, error)

    def _look_after(self, run: str, state: Run, now: float, *, due: bool) -> None:
        """Open, close or rest a run, by its files. `due`: it was put off because it had no work, and is opened now."""
        file = self._layout.target_id(run)
        wanted = read_state(self._layout, run)
        if not wanted.worked_on:
            self._keep_closed(run, state)
            if wanted.state == "archived" and state.empty_until <= now:
                self._clear(run, state)
            return
        if state.worker is not None and state.file != file:
            state.worker = None
            log.warning("run %s was registered again", run)
        drafting = Drafting.supposed(settings_of(self._settings, self._layout, run))
        if state.worker is not None and state.worker.drafting != drafting:
            log.warning("run %s: its engines draft %s now, %d tokens a round", run, drafting.drafting, drafting.depth)
            self._close_in_order(run, state.worker)
            state.worker = None  # to be opened again at once
        refused = state.retry_at > now and state.file == file
        if state.worker is not None or refused or self._room.stays_closed(run, state, file):
            return
        taken = due or self._share.may_take(run, len(self.served) + len(self._room.put_off), now)
        if not taken or not self._leases.hold(run):
            state.suspicion.recent = False
        elif not is_there(self._layout.run_json(run)):  # it was deleted meanwhile
            self._let_go(run)
        elif not due and self._room.puts_off(run, state, file):
            self._leases.give_back(run)  # another worker may take it first
        else:
            with self._heartbeat.opening(run):
                self._open(run, state, file)

    def _keep_closed(self, run: str, state: Run) -> None:
        """Close a run that a person has paused or archived. Once active again, it is tried at once."""
        if state.worker is not None:
            log.warning("run %s is not worked on until it is active again, as a person wants it", run)
        self._checkpoint_and_close(run)
        with self._heartbeat.lock:
            state.closed = None
        self._share.forget(run)
        if state.worker is None and state.retry_at:
            self._deaths.forget(run)
            state.retry_at = 0.0

    def _is_wanted(self, run: str, now: float) -> bool:
        """Whether a run is to be worked on, and can be as far as this worker knows."""
        state = self._runs.get(run)
        tried = state is None or state.retry_at <= now or state.file != self._layout.target_id(run)
        return tried and read_state(self._layout, run).worked_on

    def _let_go(self, run: str) -> None:
        """Close a run that was deleted, without a checkpoint, and let its files go."""
        with self._heartbeat.lock:
            held = self._runs.pop(run).worker is not None
        if held:
            log.warning("run %s was deleted", run)
        self._share.forget(run)
        self._leases.give_back(run)

    def _checkpoint_and_close(self, run: str) -> bool:
        """Close a run after a checkpoint, and give its lease back; whether that went well."""
        state = self._runs[run]
        if state.worker is None:
            return True
        ended = self._close_in_order(run, state.worker)
        state.retry_at = 0.0
        self._give_back(run)
        return ended

    def _give_back(self, run: str) -> None:
        """Serve the run no more, and let other workers have it."""
        self._runs[run].suspicion.recent = False  # the next worker finds that out by itself
        with _despite_broken_keys(run):
            self._heartbeat.give_back(run)

    def _clear(self, run: str, state: Run) -> None:
        """End what the queue of an archived run holds, at most a claim of it at a time, and delete its files."""
        entries: list[Entry] = []
        try:
            if not self._leases.hold(run):
                return
            queue = self._queue(run)
            entries = queue.own_pending(CONSUMER) or queue.claim(CONSUMER, self._settings.claim_tokens, 0.0)
            for entry in entries:
                queue.ack(entry, "skipped", "the run was archived before it was worked on")
                self._layout.blob(run, entry.blob).unlink(missing_ok=True)  # an object is swept
        except Exception as error:
            if isinstance(error, RedisError) and not is_of_one_key(error):
                raise
            log.error("the queue of archived run %s is not cleared: %s", run, error)
            entries = []
        if not entries:
            state.empty_until = time.monotonic() + _LOOK_AT_ARCHIVED_SECONDS
            self._leases.give_back(run)

    def _queue(self, run: str) -> RolloutQueue:
        return RolloutQueue(self._redis, run, self._settings.remembered_bytes)

    def _open(self, run: str, state: Run, file: FileId) -> None:
        state.short = state.short if state.file == file else 0
        state.file, state.retry_at, state.lost = file, 0.0, False
        store = Store(self._redis, run)
        died = file is not None and self._deaths.happened(run, file)
        if file is not None and (aside := self._deaths.begin(run, file)) is not None:
            self._close_until(run, *aside)
            return
        if died:  # maybe for memory that idle runs had: only a death without them is its own
            self._room.sparing = True
            self._room.close_idle()
        try:
            self._layout.pull(run, checkpoints=True)  # the one before may have been another host's
            opened = RunWorker(
                settings_of(self._settings, self._layout, run),
                self._layout,
                self._queue(run),
                store,
                run,
                holds_lease=lambda: not state.lost and self._leases.hold(run),
                stopping=lambda: self._stopping or not read_state(self._layout, run).worked_on,
                others_wait=functools.partial(self._room.others_wait, run),
                suspicion=state.suspicion,
                ends_for_memory=functools.partial(self._room.closes_for_memory, run),
            )
            store.forget_refusal()
            state.worker, state.proven, state.worked_at = opened, False, time.monotonic()
            log.info("serving run %s", run)
        except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
            unreadable_now = isinstance(error.__cause__, OSError) or is_out_of_memory(error)
            refused = isinstance(error, DrafterError | WorkerError) and not unreadable_now
            if refused:  # what was registered is at fault
                store.set_worker(WorkerGauges(refused=file))
            if not is_device_fault(error):
                self._deaths.end(run)  # before the run is given back: another worker may begin to open it then
            if refused and untouched(self._layout, run):
                self._close_until(run, _USELESS_SECONDS, str(error))
            else:
                self._handle_error(run, error)
        else:
            self._deaths.end(run)

    def _close(self) -> None:
        with contextlib.suppress(RedisError):
            self._leases.leave()
        for run, worker in self.served.items():
            if self._close_in_order(run, worker):
                with contextlib.suppress(RedisError):  # else the lease expires
                    self._give_back(run)
        with contextlib.suppress(RedisError):
            for run in self._runs.keys() - self.served.keys():
                self._leases.give_back(run)

    @staticmethod
    def _close_in_order(run: str, worker: RunWorker) -> bool:
        """Checkpoint a run before it is closed; returns whether that went well."""
        try:
            worker.close()
        except Exception as error:
            trace = None if isinstance(error, RedisError | OSError | ServiceError | DrafterError) else error
            log.warning("%s: not closed in order (%s); its entries will be delivered again", run, error, exc_info=trace)
            return False
        return True


@contextlib.contextmanager
def _despite_broken_keys(run: str) -> Iterator[None]:
    """Go on where a key of this run cannot be written: it may be the trouble that is being told."""
    try:
        yield
    except ResponseError as error:
        if not is_of_one_key(error):
            raise
        log.error("run %s: %s", run, error)


def connect(url: str) -> Redis:
    """A client that waits out short interruptions; a cluster of which no node answers is waited for."""
    client: Redis | None = None
    while client is None:
        try:
            client = ready.connect(url, retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5), socket_timeout=10.0)
        except RedisError as error:
            log.warning("no cluster answers: %s; it is waited for", error)
            time.sleep(_RETRY_SECONDS)
    return client


def run_worker(settings: Settings) -> None:
    """Run a worker in this process until SIGTERM or SIGINT."""
    if settings.redis_url is None:
        raise ConfigurationError("a worker needs a Redis: set DRAFTALIGN_REDIS_URL, or use `draftalign up`")
    Incoming.of(settings)  # refused here, not once for each run
    use_device(settings.device, settings.gpu_memory_share)
    worker = Worker(settings, connect(settings.redis_url.get_secret_value()))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.serve()
