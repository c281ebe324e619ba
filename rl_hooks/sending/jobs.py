"""The requests that wait to be sent, within a bound of bytes. When the queue is full the *oldest* rollouts go.

Jobs marked `keep` (the registration, head updates) stay. One head is dropped when a newer one replaces it and no
rollout between the two still needs it. Where replaced heads exceed the bound themselves, the rollouts that need them
are dropped, and the heads with them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

Parts: TypeAlias = Sequence["bytes | memoryview"]


def run_path(run: str) -> str:
    """Path of a run's resource."""
    return f"/runs/{quote(run, safe='')}"


@dataclass(slots=True)
class Job:
    """One request. `body` is called in the sender's thread, once, and may wait for a copy from the device."""

    method: str
    path: str
    body: Callable[[], Parts]
    size_bytes: int
    keep: bool = False
    #: Statuses that are retried although they blame the request (404 before another rank has registered the run).
    retry_statuses: frozenset[int] = frozenset()


class JobQueue:
    """First in, first out. Its user locks it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        #: Bytes of rollouts, the one that is being sent included.
        self.rollout_bytes = 0
        self.waiting: deque[Job] = deque()
        self._sending: Job | None = None

    def __len__(self) -> int:
        return len(self.waiting) + (self._sending is not None)

    def has(self, path: str) -> bool:
        """Whether a job of this path waits, or is being sent."""
        return any(job is not None and job.path == path for job in (*self.waiting, self._sending))

    def put(self, job: Job) -> int:
        """Add a job, which must fit into an empty queue; returns how many rollouts were dropped to make room."""
        dropped = 0
        if not job.keep:
            while self.rollout_bytes + job.size_bytes > self.limit_bytes and self._drop_oldest():
                dropped += 1
            self.rollout_bytes += job.size_bytes
        self.waiting.append(job)
        if job.keep:
            self._drop_unneeded()
            while self._replaced_bytes() > self.limit_bytes and self._drop_oldest():
                dropped += 1
        return dropped

    def take(self) -> Job:
        """The oldest job; it counts as queued until `finish`."""
        self._sending = self.waiting.popleft()
        return self._sending

    def finish(self) -> None:
        """The job that was taken is sent or given up."""
        if self._sending is not None and not self._sending.keep:
            self.rollout_bytes = max(0, self.rollout_bytes - self._sending.size_bytes)
        self._sending = None

    def clear(self) -> int:
        """Drop everything that waits; returns how many jobs that were."""
        dropped = len(self.waiting)
        self.waiting.clear()
        self.rollout_bytes = 0
        return dropped

    def _drop_oldest(self) -> bool:
        oldest = next((job for job in self.waiting if not job.keep), None)
        if oldest is None:
            return False
        self.waiting.remove(oldest)
        self.rollout_bytes -= oldest.size_bytes
        self._drop_unneeded()
        return True

    def _drop_unneeded(self) -> None:
        """Drop each head that the next head follows with no rollout between them."""
        for job, following in itertools.pairwise(list(self.waiting)):
            if job.keep and following.keep and job.path == following.path:
                self.waiting.remove(job)

    def _replaced_bytes(self) -> int:
        """Bytes of the heads that wait before a newer one."""
        newest = {job.path: job for job in self.waiting if job.keep}
        return sum(job.size_bytes for job in self.waiting if job.keep and newest[job.path] is not job)
