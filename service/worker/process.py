"""The worker process: serves every registered run in turn, holds a lease on each, and says that it is alive.

One worker trains one run at a time: two would pull the same drafter apart. The lease is a key with an expiry, renewed
by the heartbeat thread; a second worker waits for it and takes over when the first one dies.

An exception ends at the run in which it was raised: the run is closed, its error is told (`worker_error`), and it is
opened again from its last checkpoint later. Only Redis being away holds all runs up, and only a fault of the device
ends the process, because CUDA works for no run after it.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from drafter.device import is_device_fault
from drafter.errors import DrafterError
from service.errors import ConfigurationError, ServiceError, WorkerError
from service.settings import Settings
from service.storage.layout import FileId, Layout, file_id
from service.storage.queue import Keys, RolloutQueue
from service.storage.reports import Store
from service.worker.checkpoint import CheckpointSuperseded
from service.worker.loop import (
    CONSUMER,
    LeaseLost,
    RegisteredAnew,
    RunWorker,
)

log = logging.getLogger("draftalign.worker")

_LEASE_SECONDS = 15.0
_BEAT_SECONDS = 3.0
_IDLE_SECONDS = 0.05
_RETRY_SECONDS = 0.5
#: After an error of the disk.
_DISK_SECONDS = 5.0
_LOOK_FOR_RUNS_SECONDS = 1.0
#: A run that cannot be worked on is tried again after this.
_REFUSED_SECONDS = 60.0
_ERROR_CHARACTERS = 2000
#: After an exception that nobody foresaw; twice as long after each further one, up to `_REFUSED_SECONDS`.
_FAILED_SECONDS = 1.0
#: Take or renew the lease in one step: a worker that is stopped between two would renew what is another's by then. DEL
#: before SET: a server that is full refuses what needs room as a script's first write, and not afterwards.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if holder and holder ~= ARGV[3] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_DELETE_IF = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Worker:
    """All runs of one service."""

    def __init__(self, settings: Settings, redis: Redis) -> None:
        self._settings = settings
        self._redis: Any = redis
        self._layout = Layout(settings.state_dir)
        self._runs: dict[str, RunWorker] = {}
        self._refused: dict[str, tuple[float, FileId]] = {}  # run -> when to try it again, and its target's file
        self._files: dict[str, FileId] = {}  # run -> its target's file when it was opened
        self._failures: dict[str, int] = {}  # run -> unforeseen exceptions since it last worked
        self._doubted: set[str] = set()  # runs whose recent rollouts may be to blame for that
        self._unproven: set[str] = set()  # runs that were opened, and have not worked since
        self._name = f"{_machine()}/{os.getpid()}/{uuid.uuid4().hex}"
        self._lost: set[str] = set()  # runs whose lease another worker took while this one was stopped
        self._looked = 0.0
        # Not an Event: `stop` runs in a signal handler, maybe while this very thread holds the Event's lock.
        self._stopping = False
        self._ended = False
        self._beat_failures: set[type[Exception]] = set()  # kinds that were logged
        self._giving_back = threading.Lock()  # or a heartbeat would take a lease again that was just given back

    def stop(self) -> None:
        """Finish the optimizer step in hand, checkpoint, and return from `serve`."""
        self._stopping = True

    def serve(self) -> None:
        """Work until `stop`. Redis going away is waited out; nothing in hand is lost by it."""
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        while not self._stopping:
            try:
                if not self._turn():
                    self._pause(_IDLE_SECONDS)
            except RedisError as error:
                log.warning("Redis does not answer (%s); trying again", error)
                self._pause(_RETRY_SECONDS)
            except OSError as error:
                log.error("%s; nothing was acknowledged, trying again", error)
                self._pause(_DISK_SECONDS)
        self._close()
        self._ended = True

    def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond a `stop`."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _IDLE_SECONDS))

    def _turn(self) -> bool:
        self._find_runs()
        worked = False
        trouble: OSError | None = None
        for run in list(self._runs):
            if self._stopping:
                break
            if run in self._lost:
                self._drop(run, "the lease is gone")
                continue
            try:
                worked |= self._runs[run].cycle()
                self._proven(run)
            except RedisError:
                raise
            except (LeaseLost, CheckpointSuperseded) as error:
                self._drop(run, str(error))
            except RegisteredAnew as error:
                log.warning("%s", error)
                self._runs.pop(run)  # to be opened again at once
            except (ServiceError, DrafterError, torch.OutOfMemoryError) as error:
                self._refuse(run, error)  # one run's trouble is not the others'
            except OSError as error:  # nor is that of its part of the disk
                trouble = error
            except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
                self._fail(run, error)
        if trouble is not None:
            raise trouble
        return worked

    def _drop(self, run: str, reason: str) -> None:
        """Leave a run to another worker, without a checkpoint: theirs is newer."""
        log.warning("run %s is another worker's now: %s", run, reason)
        self._lost.discard(run)
        del self._runs[run]

    def _refuse(self, run: str, error: Exception, seconds: float = _REFUSED_SECONDS) -> None:
        log.error("run %s: %s", run, error)
        self._close_until(run, seconds, str(error))

    def _fail(self, run: str, error: Exception) -> None:
        """Close a run for an exception that nobody foresaw; raises it again where the whole process is of no use."""
        if is_device_fault(error):
            raise error
        log.error("run %s: it is closed, and opened again from its last checkpoint", run, exc_info=error)
        failures = self._failures[run] = self._failures.get(run, 0) + 1
        seconds = min(_FAILED_SECONDS * 2.0 ** min(failures - 1, 10), _REFUSED_SECONDS)
        self._close_until(run, seconds, f"{type(error).__name__}: {error}")

    def _close_until(self, run: str, seconds: float, error: str) -> None:
        self._runs.pop(run, None)
        self._refused[run] = time.monotonic() + seconds, self._files.get(run)
        error = error[:_ERROR_CHARACTERS].encode("utf-8", "backslashreplace").decode()  # it may quote what is not UTF-8
        Store(self._redis, run).set_worker({"error": error})  # GET /runs/{run} tells it

    def _proven(self, run: str) -> None:
        """Take back what was said of a run's trouble: it was opened, and has worked."""
        if run in self._unproven:
            Store(self._redis, run).set_worker({"error": None})
            self._unproven.discard(run)
            self._failures.pop(run, None)

    def _find_runs(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_FOR_RUNS_SECONDS:
            return
        self._looked = now
        for run in self._layout.run_names():
            file = file_id(self._layout.target(run))
            if run in self._runs and self._files[run] != file:
                self._runs.pop(run)
                log.warning("run %s was registered anew", run)
            until, refused = self._refused.get(run, (0.0, file))
            if run in self._runs or (until > now and refused == file) or not self._lease(run):
                continue
            self._files[run] = file
            try:
                opened = RunWorker(
                    self._settings,
                    self._layout,
                    RolloutQueue(self._redis, run),
                    Store(self._redis, run),
                    run,
                    holds_lease=functools.partial(self._lease, run),
                    stopping=lambda: self._stopping,
                    doubted=self._doubted,
                )
                Store(self._redis, run).forget_refusal()
                self._runs[run] = opened
                self._unproven.add(run)
                log.info("serving run %s", run)
            except RedisError:
                raise
            except (ServiceError, DrafterError, torch.OutOfMemoryError) as error:
                if _is_the_files(error):
                    Store(self._redis, run).set_worker({"refused": file})
                self._refuse(run, error)
            except OSError as error:
                self._refuse(run, error, _DISK_SECONDS)
            except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
                self._fail(run, error)

    def _lease_key(self, run: str) -> str:
        return f"{Keys(run).prefix}lease"

    def _lease(self, run: str) -> bool:
        """Take or renew the lease on a run."""
        key = self._lease_key(run)
        if self._take(key, ""):
            return True
        holder = self._redis.get(key)
        name = holder.decode() if isinstance(holder, bytes) else holder
        # Of a worker killed on this machine: no need to wait for its lease to expire.
        return name is not None and _died_here(name) and self._take(key, name)

    def _take(self, key: str, instead_of: str) -> bool:
        return bool(self._redis.eval(_TAKE, 1, key, self._name, int(_LEASE_SECONDS * 1000), instead_of))

    def _free(self, key: str, holder: str) -> None:
        """Delete a lease, but only `holder`'s: another may have taken it since it was read."""
        self._redis.eval(_DELETE_IF, 1, key, holder)

    def _beat(self) -> None:
        """Renew leases, holds on entries and the sign of life, also during a long training step or the last save.

        It ends with `serve` and for nothing else: without it every lease would expire while the worker works on.
        """
        while not self._ended:
            time.sleep(_BEAT_SECONDS)
            try:
                self._beat_once()
            except Exception as error:  # noqa: BLE001 - without it every lease would expire
                self._log_failed_beat("a heartbeat failed", error)

    def _beat_once(self) -> None:
        for run, worker in list(self._runs.items()):
            try:
                self._beat_run(run, worker)
            except RedisError as error:
                log.debug("no heartbeat for %s: %s", run, error)
            except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
                self._log_failed_beat(f"no heartbeat for run {run}", error)

    def _log_failed_beat(self, what: str, error: Exception) -> None:
        if type(error) not in self._beat_failures:
            self._beat_failures.add(type(error))
            log.error("%s (said once for each kind of error)", what, exc_info=error)

    def _beat_run(self, run: str, worker: RunWorker) -> None:
        with self._giving_back:
            if run not in self._runs:
                return
            if not self._lease(run):
                self._lost.add(run)
                return
        RolloutQueue(self._redis, run).heartbeat(CONSUMER, worker.pending)
        Store(self._redis, run).set_worker({"heartbeat": time.time()})

    def _close(self) -> None:
        for run, worker in list(self._runs.items()):
            try:
                worker.close()
                with self._giving_back:
                    del self._runs[run]
                    self._free(self._lease_key(run), self._name)
            except Exception as error:
                foreseen = isinstance(error, RedisError | OSError | ServiceError | DrafterError)
                log.warning(
                    "%s: not closed in order (%s); its entries will be delivered again",
                    run,
                    error,
                    exc_info=None if foreseen else error,
                )


def _is_the_files(error: Exception) -> bool:
    """Whether a run could not be opened for what was registered, and not for a disk that could not read it now."""
    return isinstance(error, DrafterError | WorkerError) and not isinstance(error.__cause__, OSError)


def _machine() -> str:
    """Identity of this boot of this machine (or container): process ids mean something within it only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex  # unknown: then nobody is ever taken for dead


def _died_here(name: str) -> bool:
    """Whether the lease's holder was a process of this machine that is no more."""
    machine, _, rest = name.partition("/")
    pid = rest.partition("/")[0]
    return machine == _machine() and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def connect(url: str) -> Redis:
    """A client that waits out short interruptions."""
    return Redis.from_url(url, retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5), socket_timeout=10.0)


def checked_device(name: str) -> torch.device:
    """The device of that name. Raises `ConfigurationError` when there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"DRAFTALIGN_DEVICE={name!r} names no device: cpu, cuda or cuda:1, say") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        build = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
        raise ConfigurationError(
            f"DRAFTALIGN_DEVICE={name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices{build}"
        )
    return device


def run_worker(settings: Settings, on_signal: Callable[[int, Callable[..., None]], Any] = signal.signal) -> None:
    """Run a worker in this process until SIGTERM or SIGINT."""
    if settings.redis_url is None:
        raise ConfigurationError("a worker needs a Redis: set DRAFTALIGN_REDIS_URL, or use `draftalign up`")
    if settings.device == "cpu":
        torch.set_num_threads(1)  # on shared cores, threads that wait for each other are far slower than one
    elif (device := checked_device(settings.device)).type == "cuda":
        torch.cuda.set_device(device.index or 0)  # Triton starts its kernels on the current one
    worker = Worker(settings, connect(settings.redis_url.get_secret_value()))
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(number, lambda *_: worker.stop())
    worker.serve()
