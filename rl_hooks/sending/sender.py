"""Sends rollouts in the background: never blocks the trainer, never raises into it, never grows without bound.

One daemon thread sends jobs in the order in which they were submitted, so that a head update precedes the rollouts of
its policy version. The queue is bounded (`rl_hooks.sending.jobs`). When it is full, the oldest rollouts are dropped,
because stale data is worth little in RL. Which answers are retried: `rl_hooks.sending.delivery`.

Nothing is written to disk. Rollouts still queued when the process ends are lost: call `close` or `flush` first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from rl_hooks import wire
from rl_hooks.sending.delivery import ServiceClient
from rl_hooks.sending.exchange import Origin, RunService, clean_token
from rl_hooks.sending.jobs import Job, JobQueue, Parts, run_path
from rl_hooks.sending.standing import Standing
from rl_hooks.sending.tally import Tally, log_warning

logger = logging.getLogger("rl_hooks")

#: Bytes of rollouts that may wait to be sent, by default. Of a policy of 8 B, 1 GiB is 32,768 tokens in bfloat16.
QUEUE_BYTES: Final = 1 << 30
#: Largest rollout file: the service takes 512 MiB, unless its `max_body_bytes` says otherwise.
_LARGEST_FILE_BYTES: Final = 511 << 20
#: Rollouts share a file up to a quarter of the queue's bytes: those of one forward may be more than fit into the queue.
_FILES_IN_QUEUE: Final = 4

#: While `flush` waits, the log says so at this interval. Then it waits this long, by default, for how the run stands.
_SAY_SECONDS: Final = 10.0
_LAST_ANSWER_SECONDS: Final = 5.0
#: The longest wait of `flush`, by default: other ranks may wait in a collective, which times out after minutes.
_LONGEST_FLUSH_SECONDS: Final = 300.0

_COUNTERS: Final = (
    *("submitted", "sent", "duplicates", "dropped_full", "dropped_error", "dropped_closed", "retries"),
    *("bytes_sent", "dead", "known_rollouts"),
)


class RolloutSender:
    """A bounded queue and a thread that empties it into the service.

    >>> sender = RolloutSender("http://127.0.0.1:8400", run="default")
    >>> sender.submit(wire.encode(tensors, metadata))  # True: queued
    >>> sender.stats()["sent"], sender.flush(10.0)

    Raises ValueError for an invalid URL or a token that no header can hold, and nothing else.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str = "default",
        token: str | None = None,
        queue_bytes: int = QUEUE_BYTES,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 120.0,
        retry_statuses: frozenset[int] = frozenset(),
        asks: bool = False,
    ) -> None:
        """`asks`: the thread also asks the service how the run stands (`standing`), every 10 s.

        `token`: of scope write. None: that of the environment (DRAFTALIGN_TOKEN), if there is one.
        """
        self.run = run
        token = clean_token(os.environ.get("DRAFTALIGN_TOKEN") if token is None else token, "DRAFTALIGN_TOKEN (token=)")
        self._asks = asks
        self._retry_statuses = retry_statuses
        self._queue = JobQueue(queue_bytes)
        self._delivery = ServiceClient(
            RunService(Origin.parse(url), run, token), timeout_seconds, patience_seconds, Tally(logger)
        )
        self._start_empty()

    def _start_empty(self) -> None:
        """Begin with an empty queue: at first, and in a forked child, which must not send its parent's jobs again."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue = JobQueue(self._queue.limit_bytes)
        self._delivery = replace(self._delivery, tally=Tally(logger, *_COUNTERS))
        self._standing = Standing(self._delivery.service)
        self._thread: threading.Thread | None = None
        self._asked = 0  # questions to the service that have ended
        self._closed = False

    def _guard(self) -> threading.Condition:
        """The lock of everything here. A forked child begins empty, with a lock of its own.

        A thread of the parent may have held the parent's lock at the fork, and no thread of the child would release it.
        """
        if os.getpid() != self._pid:
            self._start_empty()
        return self._changed

    @property
    def joined(self) -> bool:
        """Whether the run existed when it was registered, by the service's answer."""
        return self._delivery.joined

    @property
    def refused(self) -> bool:
        """Whether the service answered that the run is another policy's, closed or missing: nothing more is sent."""
        return self._delivery.refused

    @property
    def lost(self) -> bool:
        """Whether the run that was registered from here is there no more, and no queued job registers it again."""
        with self._guard():
            return self._delivery.lost and not self._queue.has(run_path(self.run))

    @property
    def file_bytes(self) -> int:
        """The most bytes of rollouts that share a file. A single rollout may have more (`rollout_bytes`)."""
        return min(self._queue.limit_bytes // _FILES_IN_QUEUE, _LARGEST_FILE_BYTES)

    @property
    def rollout_bytes(self) -> int:
        """Bytes of the longest rollout that can be sent."""
        return min(self._queue.limit_bytes, _LARGEST_FILE_BYTES)

    @property
    def last_rows(self) -> wire.LastRows:
        """Rows of the last state that the service wants in the run's files (`wire.LastRows`)."""
        return self._delivery.wanted.last_rows

    @property
    def optional_tensors(self) -> frozenset[str]:
        """Tensors that the service takes besides the format's own, by its newest answer."""
        return self._delivery.wanted.optional_tensors

    def standing(self) -> dict[str, float | str]:
        """How the run stands, by the service's newest answer (`Standing.facts`). What is not known is left out.

        Nothing is said where the registration was refused: a run of that name is another policy's.
        """
        if self._delivery.not_registered:
            return {}
        with self._guard():
            return self._standing.facts()

    def submit(self, body: Parts | Callable[[], Parts], *, size_bytes: int | None = None) -> bool:
        """Queue a rollout file: its parts, or a function that makes them, with their `size_bytes`.

        Returns False if it was not queued. Older rollouts may have been dropped for it (`dropped_full` counts them).
        """
        try:
            make: Callable[[], Parts] = body if callable(body) else partial(tuple, body)
            size = size_bytes if size_bytes is not None else wire.parts_bytes(make())
        except Exception as error:  # noqa: BLE001 - the trainer must never feel this
            self._note("submit", f"a rollout could not be queued: {error!r}")
            return False
        path = f"/rollouts?run={quote(self.run, safe='')}"
        return self.submit_job(Job("POST", path, make, size, retry_statuses=self._retry_statuses))

    def submit_job(self, job: Job) -> bool:
        """Queue any request, behind all earlier ones."""
        try:
            with self._guard():
                return self._enqueue(job)
        except Exception as error:  # noqa: BLE001 - as above: out of threads, out of memory, ...
            self._note("submit", f"a request could not be queued: {error!r}")
            return False

    def _enqueue(self, job: Job) -> bool:
        tally = self._delivery.tally
        tally.add("submitted")
        if self.refused or self._closed:
            tally.add("dropped_error" if self.refused else "dropped_closed")
            return False
        if not job.keep and job.size_bytes > self._queue.limit_bytes:
            tally.add("dropped_full")
            tally.note("size", f"a rollout file of {job.size_bytes} bytes exceeds queue_bytes")
            return False
        if dropped := self._queue.put(job):
            tally.add("dropped_full", dropped)
            tally.note("full", "the queue to the drafter service is full; the oldest rollouts are dropped")
        if self._thread is None:
            self._start_thread()
        self._changed.notify_all()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="rollout-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # out of threads: the next submit tries again
            self._note("thread", f"rollouts cannot be sent yet: {error}")
        else:
            self._thread = thread

    def metrics(self) -> dict[str, float]:
        """Numbers for a trainer's own log, `draftalign/...`. It waits for nothing and asks nobody.

        Numbers of the service that are older than a minute, or that it does not know, are left out.
        """
        sent = self.stats()
        dropped = sum(sent[f"dropped_{why}"] for why in ("full", "error", "closed"))
        found = {**self.standing(), "dropped": float(dropped)}
        return {f"draftalign/{name}": value for name, value in found.items() if not isinstance(value, str)}

    def stats(self) -> dict[str, Any]:
        """Counters since the start; `queue_bytes` and `queue_items` are now; `last_error` is the newest error.

        `dead`: batches of the run (of all its senders) that the worker has refused since the first answer, by the
        newest answer; `last_dead_reason`: why it refused the newest of them. `known_rollouts`: those that came in an
        earlier batch, by their ids, and were not used again.
        """
        with self._guard():
            return {
                **self._delivery.tally.counts(),
                "queue_bytes": self._queue.rollout_bytes,
                "queue_items": len(self._queue),
                "last_error": self._delivery.tally.last_error,
                "last_dead_reason": self._delivery.last_dead_reason,
            }

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything queued was sent or dropped. Returns False if the time was over first.

        None: as long as files arrive, at most `patience_seconds` for the next one, and 300 s in all. Every 10 s the log
        says how much waits. A sender that `asks` how the run stands does so once more at the end, if time is left.
        """
        limit = None if timeout_seconds is None else min(timeout_seconds, threading.TIMEOUT_MAX)
        began = time.monotonic()
        flushed = self._wait_until_empty(limit)
        with self._guard():
            left = _LAST_ANSWER_SECONDS if limit is None else began + limit - time.monotonic()
            asked = self._asked
            if flushed and left > 0 and self._asks and self._thread is not None and self._standing.hurry():
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._asked > asked or self._closed, left)
            return flushed

    def _wait_until_empty(self, limit: float | None) -> bool:
        """Wait for the queue, with the limits of `flush`. Logging happens without the lock."""
        began = heard = time.monotonic()
        patience, arrived = self._delivery.patience_seconds, self._arrived()
        while True:
            with self._guard():
                now = time.monotonic()
                if self._arrived() != arrived:
                    heard, arrived = now, self._arrived()
                left = began + (_LONGEST_FLUSH_SECONDS if limit is None else limit) - now
                if limit is None:
                    left = min(left, heard + patience - now)
                if not len(self._queue) or left <= 0:
                    return not len(self._queue)
                self._changed.wait_for(lambda: not len(self._queue), min(left, _SAY_SECONDS))
                waits, size_bytes = len(self._queue), self._queue.rollout_bytes
                last_error = self._delivery.tally.last_error
            if waits and left > _SAY_SECONDS:
                log_warning(
                    logger,
                    f"draftalign: {waits} requests ({size_bytes / 1e6:.1f} MB of rollouts) are still to be sent to the "
                    f"service; at most {left - _SAY_SECONDS:.0f} s more"
                    f"{' without one that arrives' if limit is None else ''}. {last_error}",
                )

    def _arrived(self) -> int:
        tally = self._delivery.tally
        return tally["sent"] + tally["duplicates"]

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Do a `flush`, then drop the rest (`dropped_closed`) and log it. Returns what `flush` does."""
        flushed = self.flush(timeout_seconds)
        tally = self._delivery.tally
        with self._guard():
            self._closed = True
            before = tally["dropped_closed"]
            tally.add("dropped_closed", self._queue.clear())
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(1.0 if timeout_seconds is None else min(timeout_seconds, 1.0))
        with self._guard():  # the request in progress has ended by now, or hangs
            lost = tally["dropped_closed"] - before + len(self._queue)
        if lost:
            tally.warn("closed", f"closed with {lost} requests that were not sent: what they hold is lost")
        return flushed

    # --- the sender's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                seconds = self._standing.seconds_left if self._asks else None
                self._changed.wait_for(lambda: self._queue.waiting or self._closed or self._is_to_ask(), seconds)
                if self._closed:
                    return
                job = self._queue.take() if self._queue.waiting else None
            if self._is_to_ask():
                self._delivery.read_deaths(self._standing.ask())
                with self._changed:
                    self._asked += 1
                    self._changed.notify_all()
            if job is None:
                continue
            try:
                outcome = self._delivery.deliver(job, self._pause)
            except Exception as error:  # noqa: BLE001 - one bad job must not end the thread
                self._note("job", f"a request to the drafter service failed: {error!r}")
                outcome = "dropped_error"
            with self._changed:
                self._delivery.tally.add(outcome)
                self._queue.finish()
                self._changed.notify_all()

    def _is_to_ask(self) -> bool:
        return self._asks and not self._standing.seconds_left

    def _pause(self, seconds: float) -> bool:
        """Wait. Returns whether the sender was closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _note(self, kind: str, text: str) -> None:
        self._guard()  # a forked child has a tally of its own
        self._delivery.tally.note(kind, text)
