"""A call that changes something is audited before it does so, and its outcome before it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fastapi import Request

from service.access.audit import AuditLog
from service.api.context.disk import is_full
from service.api.problems import Problem

log = logging.getLogger("draftalign.api")

_AUDIT_SECONDS: Final = 10.0
#: Scope key: the request's `AuditedCall`.
AUDITED: Final = "draftalign.audited"


class Auditor:
    """Writes the audit log of this process, in a thread of its own: a slow disk delays only audited calls."""

    def __init__(self, audit_log: AuditLog) -> None:
        self._audit_log = audit_log
        self._writing = ThreadPoolExecutor(1, "audit")

    def intent(self, document: dict[str, Any]) -> asyncio.Future[None]:
        """Record what is asked."""
        return self._run(functools.partial(self._audit_log.append, document))

    def outcome(self, document: dict[str, Any]) -> asyncio.Future[None]:
        """Record the outcome of a call that is done already."""
        return self._run(functools.partial(self._outcome, document))

    def _run(self, write: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._writing, write)

    def _outcome(self, document: dict[str, Any]) -> None:
        try:
            self._audit_log.append(document)
        except OSError:  # what was asked is in the log
            log.exception("the audit log lacks the outcome of %s", document)


class AuditedCall:
    """One call. Nothing of it is in the log until `begin`."""

    def __init__(self, auditor: Auditor, token: str, client: str, method: str, path: str, run: str | None) -> None:
        self._auditor = auditor
        self._asked: dict[str, Any] = {
            "time": time.time(),
            "id": uuid.uuid4().hex,
            "token": token,
            "client": client,
            "run": run,
            "call": f"{method} {path}"[:400],
        }
        self._said: dict[str, Any] = {}
        self._open = False  # whether the request is recorded, and its outcome is not

    def say(self, action: str, **said: str | int | None) -> None:
        """What it does, in words."""
        shortened = {name: value[:400] if isinstance(value, str) else value for name, value in said.items()}
        self._said.update(shortened, action=action)

    async def begin(self) -> None:
        """Record what is asked. Raises Problem if that fails: then nothing may be done."""
        try:
            async with asyncio.timeout(_AUDIT_SECONDS):
                await self._auditor.intent(self._asked | self._said)
        except (OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError):  # the record may still be written: then this one follows it
                self._auditor.outcome(self._asked | self._said | {"status": 503, "ended": time.time()})
            log.error("the audit log cannot be written, so nothing is changed: %r", error)
            raise Problem(503, "audit", self._refusal(error)) from error
        self._open = True

    async def end(self, status: int | None) -> None:
        """Record the outcome, once. `status`: of the answer; None: there was none."""
        if not self._open:
            return
        self._open = False
        writing = self._auditor.outcome(self._asked | self._said | {"status": status, "ended": time.time()})
        with contextlib.suppress(TimeoutError):  # it is still being written
            await asyncio.wait_for(asyncio.shield(writing), _AUDIT_SECONDS)

    def _refusal(self, error: OSError) -> str:
        if not is_full(error):
            return "the audit log cannot be written, so nothing was done; the service's log has the cause"
        return (
            "the state directory's disk is full: the audit log cannot be written, so nothing was done; free 1 MiB on "
            "it, or an inode (df -i), and ask again"
        )


def audit(request: Request, action: str, **said: str | int | None) -> None:
    """Say in words what a call that changes something does: `audit(request, "rollback", version=version)`.

    Every call but GET, `POST /rollouts`, `POST /acceptance` and `PUT .../head` is in the audit log anyway, with its
    time, token, run, path and status; this adds to that.
    """
    call: AuditedCall = request.scope[AUDITED]
    call.say(action, **said)


async def audit_now(request: Request, action: str, **said: str | int | None) -> None:
    """As `audit`, for a call that is not recorded at its beginning: it is now. Raises Problem if that fails."""
    audit(request, action, **said)
    call: AuditedCall = request.scope[AUDITED]
    await call.begin()
