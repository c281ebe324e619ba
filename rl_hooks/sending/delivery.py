"""Sends one request at a time to the service, until it is accepted or given up, and reads the answer.

| what comes back | what happens |
|---|---|
| 2xx | done; `duplicate: true` is counted apart, and logged of a first try in a run that existed; `warning` is logged |
| 409 to the registration | the run is another policy's: nothing more is sent, all of it counts as dropped |
| nothing: a body raises `WrongTargetError` | nothing more is sent, all of it counts as dropped |
| `run-closed` to anything | a person drains or archived the run: the same |
| `no-such-run` after the registration was refused | nobody else has registered the run: the same |
| `no-such-run` after it was accepted | dropped; `lost` asks for another registration |
| 401, 403, 429, 5xx, no connection, no HTTP | retried after a backoff or Retry-After, while patience lasts |
| 2xx of something else | retried likewise |
| 401, 403, and any refusal by a proxy, of a job with `keep` | the same without an end: a person may mend it |
| `too-many-runs`, `run-damaged` | a person has to act: the same, but after a minute |
| `StoreUnreachable` from an upload by the object store | the same file through the API, and all for five minutes |
| any other status | dropped and counted, never retried; one warning per status and call has the service's answer |
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rl_hooks import wire
from rl_hooks.errors import MAX_REASON, WrongTargetError, cut
from rl_hooks.sending.direct import DirectUpload, StoreUnreachable
from rl_hooks.sending.exchange import Reply, ReplyError, RunService
from rl_hooks.sending.jobs import Job, Parts, run_path
from rl_hooks.sending.tally import Tally, kind_of

_FIRST_BACKOFF_SECONDS: Final = 0.25
_MAX_BACKOFF_SECONDS: Final = 15.0
_MAX_RETRY_AFTER_SECONDS: Final = 60.0
#: Problem type: a person drains or archived the run.
_CLOSED: Final = "urn:draftalign:run-closed"
#: Problem type: the service has no such path.
_NOT_FOUND: Final = "urn:draftalign:not-found"
#: Problem type: no run of this name is registered.
NO_SUCH_RUN: Final = "urn:draftalign:no-such-run"
#: Problem types that last until a person acts. Such a request is sent again, at this interval.
_TAKES_A_PERSON: Final = ("urn:draftalign:too-many-runs", "urn:draftalign:run-damaged")
_PERSON_SECONDS: Final = 60.0
#: A smaller file costs the API less if the API itself takes it: docs/lab/uploads.md.
_SMALLEST_DIRECT_BYTES: Final = 8 << 20
#: How long files go through the API after the store could not be used.
_STORE_AWAY_SECONDS: Final = 300.0
_THROUGH: Final = "Rollouts go through the service's API for five minutes, then it is tried again"
_STOPPED: Final = "This process sends nothing until it is attached again; its own work goes on"
_AGAIN: Final = "It is tried again, and training goes on"
_CAME_BEFORE: Final = (
    "rollouts that this run has had before, token by token, are not used again. Has the trainer begun again with the "
    "same seed? Another training needs another run name (the hook's run=); one that goes on from a checkpoint does not"
)
_GONE: Final = "This process had registered it: it was deleted since, or the service has another state directory"
_JITTER: Final = random.Random()  # noqa: S311 - not the global generator: the trainer's draws must stay as they are


def _may_pass(job: Job, status: int, kind: object) -> bool:
    """Whether a refusal may end, by itself or by what a person does. `kind`: the type of its problem document.

    A token is changed while trainings run. A job with `keep` is also sent again after any refusal by a proxy.
    """
    if status in (401, 403, 429) or status >= 500 or status in job.retry_statuses or kind in _TAKES_A_PERSON:
        return True
    ours = status in (409, 422) or (isinstance(kind, str) and kind.startswith("urn:draftalign:"))
    return job.keep and not ours


def _passes_soon(status: int, kind: object) -> bool:
    """Whether such a refusal may end within seconds. Else it ends when a person changes the service or a proxy."""
    return kind not in _TAKES_A_PERSON and (status in (401, 403, 404, 429) or status >= 500)


@dataclass(frozen=True, slots=True)
class FilesWanted:
    """What the service wants of the run's files, by its newest answer. At first: what any service takes."""

    #: Rows that the run wants of the last state.
    last_rows: wire.LastRows = "all"
    #: Tensors that it takes besides the format's own (`wire.OPTIONAL_TENSORS`).
    optional_tensors: frozenset[str] = frozenset()
    #: Whether it takes files by an object store.
    direct_uploads: bool = False

    def after(self, fields: Mapping[str, object]) -> FilesWanted:
        """What it wants after this answer. The answer to a head changes nothing."""
        rows, named = fields.get("last_rows"), fields.get("optional_tensors")
        return FilesWanted(
            "predicting" if rows == "predicting" else "all" if rows == "all" else self.last_rows,
            frozenset(map(str, named)) if isinstance(named, list) else self.optional_tensors,
            fields.get("direct_uploads", self.direct_uploads) is True,
        )


@dataclass
class ServiceClient:
    """How requests of one run reach the service. `deliver` is called by one thread."""

    service: RunService
    timeout_seconds: float
    patience_seconds: float
    tally: Tally
    #: The service has answered that it accepts nothing from this trainer: the run is another policy's, or closed.
    refused: bool = False
    #: The service has answered the registration: the run existed.
    joined: bool = False
    #: The run that was registered from here is there no more.
    lost: bool = False
    #: What the run's next files may be.
    wanted: FilesWanted = FilesWanted()
    #: Why the worker refused the newest dead batch of the run.
    last_dead_reason: str = field(init=False, default="")
    #: Why the service refused to register the run; empty: it took it; None: it has not answered yet.
    not_registered: str | None = field(init=False, default=None)
    _dead_total: int | None = field(init=False, default=None)  # of the newest answer
    _store_away_until: float = field(init=False, default=-math.inf)  # monotonic

    def deliver(self, job: Job, pause: Callable[[float], bool]) -> str:
        """Send a job until it is accepted or given up. Returns the counter to raise.

        `pause` waits for the seconds that it is given, and returns True to stop trying.
        """
        if self.refused:  # queued before that was known
            return "dropped_error"
        started = time.monotonic()
        try:
            parts = job.body()
        except WrongTargetError as wrong:
            self.refused = True
            self.tally.note("target", f"{wrong}. {_STOPPED}")
            return "dropped_error"
        headers = {"Content-Type": wire.CONTENT_TYPE, "Content-Length": str(wire.parts_bytes(parts))}
        direct = self._direct(job, parts, headers)
        for attempt in itertools.count():
            seconds = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0 ** min(attempt, 10))
            seconds *= _JITTER.uniform(0.5, 1.0)
            try:
                reply = self._send(job.method, job.path, headers, parts) if direct is None else direct.attempt()
            except StoreUnreachable as error:
                direct, self._store_away_until = None, time.monotonic() + _STORE_AWAY_SECONDS
                self.tally.note("store", f"the object store cannot be used from here: {error}. {_THROUGH}")
                continue
            except OSError as error:
                up = "Is `draftalign up` running there? " if isinstance(error, ConnectionRefusedError) else ""
                self.tally.note("connection", f"{self._name(job)}: {error or type(error).__name__}. {up}{_AGAIN}")
            else:
                if direct is not None:
                    self.tally.add("bytes_sent", direct.take_bytes_put())
                verdict = self._judge(job, reply, first=attempt == 0)
                if verdict is not None:
                    return verdict
                if not _passes_soon(reply.status, reply.fields.get("type")):
                    seconds = _PERSON_SECONDS * _JITTER.uniform(0.5, 1.0)
                elif reply.retry_after_seconds is not None:
                    seconds = min(max(reply.retry_after_seconds, 0.05), _MAX_RETRY_AFTER_SECONDS)
            if not job.keep and time.monotonic() + seconds - started > self.patience_seconds:
                break
            if pause(seconds):
                return "dropped_closed"
            self.tally.add("retries")
        return "dropped_error"

    def _send(self, method: str, path: str, headers: Mapping[str, str], parts: Parts) -> Reply:
        """Ask the service. Raises ReplyError for a 2xx of something else, such as a proxy: nothing took the file.

        The service's own has its number, which a proxy may remove, or names our run. A 201 to a direct upload has taken
        nothing yet, whoever says it.
        """
        reply = self.service.ask(method, path, headers, parts, timeout_seconds=self.timeout_seconds)
        ours = wire.API_HEADER.lower() in reply.headers or reply.fields.get("run") == self.service.run
        ours |= reply.status == 201 and path.startswith("/rollouts/direct?")
        if 200 <= reply.status < 300 and (reply.document is None or not ours):
            raise ReplyError(
                f"expected the service's JSON, got {reply.status} with {reply.body[:60]!r}, which is a proxy's, maybe"
            )
        return reply

    def _direct(self, job: Job, parts: Parts, headers: Mapping[str, str]) -> DirectUpload | None:
        """The file's upload by the object store; None: it goes through the API."""
        if not (self.wanted.direct_uploads and job.path.startswith("/rollouts?")):
            return None
        if wire.parts_bytes(parts) < _SMALLEST_DIRECT_BYTES or time.monotonic() < self._store_away_until:
            return None

        def ask(path: str, prefix: Parts) -> Reply:
            return self._send("POST", path, {**headers, "Content-Length": str(wire.parts_bytes(prefix))}, prefix)

        try:
            return DirectUpload(self.service.run, parts, ask, self.timeout_seconds)
        except ValueError:  # no rollout file: the API says what is wrong with it
            return None

    def _judge(self, job: Job, reply: Reply, *, first: bool) -> str | None:
        """The counter that belongs to a final answer; None: try again. `first`: to the first try."""
        self.tally.add("bytes_sent", reply.body_bytes_sent)
        if other := wire.other_api(reply.headers, "rl_hooks"):
            self.tally.warn("api", f"{self._name(job)}: {other}. It goes on")
        registers, kind = job.path == run_path(self.service.run), reply.fields.get("type")
        if 200 <= reply.status < 300:
            fields = reply.fields
            if registers:
                self.not_registered, self.lost = "", False  # an earlier try was refused
                self.joined = reply.status == 200
            warning = fields.get("warning")
            if isinstance(warning, str) and warning:
                self.tally.note(f"warning {fields.get('warning_code')}", f"the drafter service says: {warning}")
            if type(known := fields.get("known_rollouts")) is int:
                self.tally.add("known_rollouts", known)
            self.read_deaths(fields)
            self.wanted = self.wanted.after(fields)
            if fields.get("duplicate") is not True:
                return "sent"
            # A later try may repeat one whose answer was lost; in a run that began here a loop shows rollouts twice.
            if first and not warning and self.joined:
                self.tally.note("duplicate", _CAME_BEFORE)
            return "duplicates"
        text = f"{self._name(job)} was answered {reply.status}: {reply.detail}"
        if reply.status == 401:
            text += " (give token=, or set DRAFTALIGN_TOKEN in this process's environment; @FILE may be changed)"
        elif reply.status == 404 and kind in (None, _NOT_FOUND):
            text += " (is it a draftalign service?)"
        if registers:
            self.not_registered = text
        elif reply.status == 404 and self.not_registered:  # the cause must not be hidden by what follows from it
            text += f". Before that, {self.not_registered}"
            self.refused = kind == NO_SUCH_RUN
        if self.refused or (reply.status == 409 and (registers or kind == _CLOSED)):
            self.refused = True
            text += f". {_STOPPED}"
        gone = kind == NO_SUCH_RUN and self.not_registered == ""
        if gone:
            self.lost = True
            text += f". {_GONE}"
        passes = not self.refused and not gone and _may_pass(job, reply.status, kind)
        if passes and kind == NO_SUCH_RUN:
            text += ". It is tried again: rank 0 registers the run in its first forward"
        elif passes:
            text += f". {_AGAIN}"
        self.tally.note(f"{job.method} {job.path} {reply.status}", text)
        if passes:
            return None
        if job.method == "POST":  # a run of this name with another kind of drafter, maybe
            self.wanted = FilesWanted(direct_uploads=self.wanted.direct_uploads)
        return "dropped_error"

    def read_deaths(self, fields: Mapping[str, object]) -> None:
        """Count the batches of the run that the worker has refused since the first answer.

        The worker reads a batch after the API has accepted it. So its verdict comes with the answer to a later batch,
        or to the question how the run stands.
        """
        left_out = fields.get("not_finite_total")
        if type(left_out) is int and left_out > 0:
            self.tally.warn(
                "not finite",
                f"rollouts of run {self.service.run!r} hold NaN or infinity ({left_out} so far, of all its trainers): "
                "the drafter service leaves them out, and uses the others of their batches",
            )
        total, reason = fields.get("dead_total"), fields.get("last_dead_reason")
        if type(total) is not int or not isinstance(reason, str):
            return  # this answer has no count: of a head, say
        # Batches that died before the first answer are another trainer's. A smaller total: the run was deleted and
        # registered again, or Redis was emptied, and the count began at 0.
        before = total if self._dead_total is None else min(self._dead_total, total)
        self._dead_total = total
        if total == before:
            return
        self.last_dead_reason = cut(reason, MAX_REASON)
        self.tally.add("dead", total - before)
        self.tally.note(
            f"dead {kind_of(reason)}",
            f"batches of run {self.service.run!r} die in the drafter service ({self.tally['dead']} so far) and train "
            f"nothing: {reason}",
        )

    def _name(self, job: Job) -> str:
        origin = self.service.origin
        return f"{job.method} {origin.scheme}://{origin.host}:{origin.port}{origin.base_path}{job.path}"
