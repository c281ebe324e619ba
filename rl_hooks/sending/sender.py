"""Sends rollouts in the background: never blocks the trainer, never raises into it, never grows without bound.

One daemon thread sends jobs in the order in which they were submitted, so that a head update precedes the rollouts of
its policy version. Rollouts wait in a queue bounded by bytes; when it is full the *oldest* goes, because in RL stale
data is worth little. Jobs marked `keep` (the registration, head updates) are retried until `close`, and none is dropped
for space but one that a newer one of its kind replaces: once no rollout needs it, and where such take more than the
bound themselves, together with the rollouts that do.

| what comes back | what happens |
|---|---|
| 2xx | done; `duplicate: true` is counted apart; `warning` is logged, and what became of earlier batches: see `_heed` |
| 409 to the registration | the run is another policy's: nothing more is sent, all of it counts as dropped |
| 429, 5xx, no connection, not HTTP | again after a backoff with jitter, or after Retry-After, while patience lasts |
| any other status | dropped and counted, never retried; one warning per status and call tells what the service said |

What it does not do: write to disk. Rollouts still queued when the process ends are lost (`flush` first if you care).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from rl_hooks import wire
from rl_hooks.sending.exchange import Origin, Reply, exchange

logger = logging.getLogger("rl_hooks")

Parts: TypeAlias = Sequence["bytes | memoryview"]
MIB: Final = 1 << 20
_FIRST_BACKOFF_SECONDS: Final = 0.25
_MAX_BACKOFF_SECONDS: Final = 15.0
_MAX_RETRY_AFTER_SECONDS: Final = 60.0


@dataclass(slots=True)
class Job:
    """One request. `body` is called in the sender's thread, once, and may wait for a copy from the device."""

    method: str
    path: str
    body: Callable[[], Parts]
    size_bytes: int
    headers: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False
    #: Statuses worth another try although they blame the request (404 before another rank has registered the run).
    retry_statuses: frozenset[int] = frozenset()
    started: float = 0.0
    attempts: int = 0
    parts: Parts | None = None


class RolloutSender:
    """A bounded queue and a thread that empties it into the service.

    >>> sender = RolloutSender("http://127.0.0.1:8400", run="default")
    >>> sender.submit(wire.encode(tensors, metadata), batch_id=batch_id)  # True: queued
    >>> sender.stats()["sent"], sender.flush(10.0)

    Raises ValueError for a URL that is none; nothing else, ever.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str = "default",
        token: str | None = None,
        queue_bytes: int = 256 * MIB,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 120.0,
        retry_statuses: frozenset[int] = frozenset(),
    ) -> None:
        self.origin = Origin.parse(url)
        self.run = run
        self.queue_limit_bytes = queue_bytes
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._retry_statuses = retry_statuses
        self._jitter = random.Random()  # noqa: S311 - and its own generator: the trainer's must not move
        self._warned: set[str] = set()
        #: The run is another policy's: what is sent to it could only die there.
        self.refused = False
        self._reset()

    def _reset(self) -> None:
        """Start empty: at first, and in a forked child, which must not send its parent's jobs a second time."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._current: Job | None = None
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._counts: dict[str, int] = dict.fromkeys(
            ("submitted", "sent", "duplicates", "dropped_full", "dropped_error", "dropped_closed", "retries"), 0
        )
        self._counts["bytes_sent"] = 0
        self._counts["dead"] = 0
        self._dead_before: int | None = None  # what the service counted when it answered last; None before it did
        self._last_dead_reason = ""
        self._last_error = ""

    def _guard(self) -> threading.Condition:
        """What guards everything here. A forked child gets its own, and an empty queue with it.

        Its copy of the parent's may be locked for ever: the thread that would release it is the parent's alone.
        """
        if os.getpid() != self._pid:
            self._reset()
        return self._changed

    def submit(
        self,
        body: Parts | Callable[[], Parts],
        *,
        size_bytes: int | None = None,
        batch_id: str = "",
        policy_version: int | None = None,
    ) -> bool:
        """Queue a rollout file: its parts, or a function that makes them (then `size_bytes` says how many bytes).

        False if it was not queued. Queuing it may have pushed out older rollouts (`dropped_full` counts them).
        """
        headers = {"x-rollout-id": batch_id} if batch_id else {}
        if policy_version is not None:
            headers["x-policy-version"] = str(policy_version)
        try:
            make: Callable[[], Parts] = body if callable(body) else _constant(body)
            size = size_bytes if size_bytes is not None else wire.parts_bytes(make())
        except Exception as error:  # noqa: BLE001 - the trainer must never feel this
            self._note("submit", f"a rollout could not be queued: {error!r}")
            return False
        path = f"/rollouts?run={quote(self.run, safe='')}"
        return self.submit_job(Job("POST", path, make, size, headers, retry_statuses=self._retry_statuses))

    def submit_job(self, job: Job) -> bool:
        """Queue any request, behind all that was queued before it."""
        try:
            with self._guard():
                return self._enqueue(job)
        except Exception as error:  # noqa: BLE001 - as above: out of threads, out of memory, ...
            self._note("submit", f"a request could not be queued: {error!r}")
            return False

    def _enqueue(self, job: Job) -> bool:
        self._counts["submitted"] += 1
        if self.refused:
            self._counts["dropped_error"] += 1
            return False
        if self._closed:
            self._counts["dropped_closed"] += 1
            return False
        if not job.keep:
            if job.size_bytes > self.queue_limit_bytes:
                self._counts["dropped_full"] += 1
                self._note("size", f"a rollout file of {job.size_bytes} bytes exceeds queue_bytes; lower max_tokens")
                return False
            while self._queued_bytes + job.size_bytes > self.queue_limit_bytes and self._drop_oldest():
                pass
            self._queued_bytes += job.size_bytes
        self._queue.append(job)
        if job.keep:
            self._drop_needless()
            while self._replaced_bytes() > self.queue_limit_bytes and self._drop_oldest():
                pass
        if self._thread is None:
            self._start_thread()
        self._changed.notify_all()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="rollout-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # out of threads: what is queued waits for the next submit to find one
            self._note("thread", f"rollouts cannot be sent yet: {error}")
        else:
            self._thread = thread

    def _drop_oldest(self) -> bool:
        victim = next((job for job in self._queue if not job.keep), None)
        if victim is None:
            return False
        self._queue.remove(victim)
        self._queued_bytes -= victim.size_bytes
        self._counts["dropped_full"] += 1
        self._note("full", "the queue to the drafter service is full; the oldest rollouts are dropped")
        self._drop_needless()
        return True

    def _drop_needless(self) -> None:
        """A head that no rollout follows any more before the next head describes nothing that will be sent."""
        for job, following in itertools.pairwise(list(self._queue)):
            if job.keep and following.keep and job.path == following.path:
                self._queue.remove(job)

    def _replaced_bytes(self) -> int:
        """Of heads that wait before a newer one: only the rollouts between still need them."""
        newest = {job.path: job for job in self._queue if job.keep}
        return sum(job.size_bytes for job in self._queue if job.keep and newest[job.path] is not job)

    def stats(self) -> dict[str, Any]:
        """Counters since the start; `queue_bytes` and `queue_items` are now; `last_error` is the latest trouble.

        `dead`: batches of the run (of all its senders) that the worker refused since the first answer, as far as the
        newest answer told; `last_dead_reason`: why it refused the newest of them.
        """
        with self._guard():
            waiting = len(self._queue) + (self._current is not None)
            return {
                **self._counts,
                "queue_bytes": self._queued_bytes,
                "queue_items": waiting,
                "last_error": self._last_error,
                "last_dead_reason": self._last_dead_reason,
            }

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything queued was sent or dropped; False if that took longer than `timeout_seconds`."""
        with self._guard():
            return self._changed.wait_for(lambda: not self._queue and self._current is None, timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Flush for at most `timeout_seconds`, then give the rest up (`dropped_closed`). True if nothing was lost."""
        flushed = self.flush(timeout_seconds)
        with self._guard():
            self._closed = True
            self._counts["dropped_closed"] += len(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(min(timeout_seconds, 1.0))
        return flushed

    # --- the sender's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                job = self._current = self._queue.popleft()
            try:
                outcome = self._deliver(job)
            except Exception as error:  # noqa: BLE001 - one bad job must not end the thread
                self._note("job", f"a request to the drafter service failed: {error!r}")
                outcome = "dropped_error"
            with self._changed:
                self._counts[outcome] += 1
                self._current = None
                if not job.keep and not self._closed:
                    self._queued_bytes -= job.size_bytes
                self._changed.notify_all()

    def _deliver(self, job: Job) -> str:
        """Try until there is a verdict; returns the counter that it belongs to."""
        if self.refused:  # queued before that was known
            return "dropped_error"
        job.started = time.monotonic()
        job.parts = job.body()
        headers = {"Content-Type": wire.CONTENT_TYPE, "Content-Length": str(wire.parts_bytes(job.parts)), **job.headers}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        while True:
            pause = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0 ** min(job.attempts, 10))
            pause *= self._jitter.uniform(0.5, 1.0)
            job.attempts += 1
            try:
                reply = exchange(
                    self.origin, job.method, job.path, headers, job.parts, timeout_seconds=self._timeout_seconds
                )
            except OSError as error:
                self._note("connection", f"{self._name(job)}: {error or type(error).__name__}")
            else:
                verdict = self._judge(job, reply)
                if verdict is not None:
                    return verdict
                wished = reply.retry_after_seconds
                if wished is not None:
                    pause = min(max(wished, 0.05), _MAX_RETRY_AFTER_SECONDS)
            if not job.keep and time.monotonic() + pause - job.started > self._patience_seconds:
                return "dropped_error"
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return "dropped_closed"
                self._counts["retries"] += 1

    def _judge(self, job: Job, reply: Reply) -> str | None:
        """The counter for a final answer; None for one that is worth another try."""
        with self._changed:
            self._counts["bytes_sent"] += reply.body_bytes_sent
        if 200 <= reply.status < 300:
            fields = reply.fields
            self._heed(fields)
            return "duplicates" if fields.get("duplicate") is True else "sent"
        said = f"{self._name(job)} was answered {reply.status}: {reply.detail}"
        if reply.status == 409 and job.path == f"/runs/{quote(self.run, safe='')}":
            self.refused = True
            said += ". Nothing of this process is sent until it is attached anew; its own work goes on"
        self._note(f"{job.method} {job.path} {reply.status}", said)
        if reply.status == 429 or reply.status >= 500 or reply.status in job.retry_statuses:
            return None
        return "dropped_error"

    def _heed(self, fields: Mapping[str, object]) -> None:
        """Hear what a good answer says of the run: a warning, and that batches died, which the worker finds out later.

        Batches of the run that had died before the first answer are not this trainer's.
        """
        warning, total, reason = (fields.get(name) for name in ("warning", "dead_total", "last_dead_reason"))
        if isinstance(warning, str) and warning:
            self._note(f"warning {warning}", f"the drafter service says: {warning}")
        if type(total) is not int or not isinstance(reason, str):
            return  # no answer to a batch, or an older service
        with self._guard():
            # Fewer than before: the run was made anew, or Redis was emptied, and counting began again.
            before = total if self._dead_before is None else min(self._dead_before, total)
            self._dead_before = total
            if total == before:
                return
            self._counts["dead"] += total - before
            self._last_dead_reason = reason
            dead = self._counts["dead"]
        # The figures in a reason differ from batch to batch; what stands before the first of them names its kind.
        kind = re.split(r"[0-9]", reason, maxsplit=1)[0]
        self._note(
            f"dead {kind}",
            f"batches of run {self.run!r} die in the drafter service ({dead} so far) and train nothing: {reason}",
        )

    def _name(self, job: Job) -> str:
        return f"{job.method} {self.origin.scheme}://{self.origin.host}:{self.origin.port}{job.path}"

    def _note(self, kind: str, text: str) -> None:
        """Remember the trouble; log it only the first time that its kind comes up."""
        with self._guard():
            self._last_error = text
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning("%s (said once; see stats())", text)


def _constant(parts: Parts) -> Callable[[], Parts]:
    return lambda: parts
