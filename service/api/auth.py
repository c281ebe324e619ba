"""Who may call what: bearer tokens with scopes and runs, checked before routing and before any byte of a body is read.

Deny by default: what is not listed here needs `admin`. A token also passes as the password of HTTP Basic, so that a
browser can open the page. With no tokens configured the service binds to loopback only, and answers only requests that
name a loopback host: a web page elsewhere cannot reach it by pointing its own name at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Final
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.tokens import LOOPBACK, Token, Tokens
from service.api.context.audited import AUDITED, AuditedCall, Auditor
from service.api.problems import BODY_STATE, Problem, ProblemResponse
from service.errors import ConfigurationError
from service.settings import SCOPES, Settings
from service.settings import Scope as TokenScope

log = logging.getLogger("draftalign.api")

#: Probes carry no secrets, and whatever runs the container must be able to call them.
PUBLIC: Final = frozenset({"/healthz", "/readyz"})
#: One header line each: Chromium reads a line as one challenge, and knows Basic only.
_CHALLENGES: Final = ('Basic realm="draftalign"', 'Bearer realm="draftalign"')
_AS: Final = "as `Authorization: Bearer <token>`"
_REPORTERS: Final[frozenset[TokenScope]] = frozenset({"report", "write"})
_TRAINERS_TOO: Final[frozenset[TokenScope]] = frozenset({"read", "write"})
_WRITERS: Final[frozenset[TokenScope]] = frozenset({"write"})
_READERS: Final[frozenset[TokenScope]] = frozenset({"read"})
_ADMINS: Final[frozenset[TokenScope]] = frozenset({"admin"})
_READS: Final = frozenset({"GET", "HEAD"})
#: Calls whose body names the run, and that change nothing but what is queued and counted.
_RUN_IN_BODY: Final = frozenset({("POST", "/rollouts"), ("POST", "/rollouts/direct"), ("POST", "/acceptance")})
_RUN_IN_QUERY: Final = frozenset({"rollouts", "drafter", "drafters", "alpha"})
#: Calls that tell of no run, or only of those that the caller's token is for.
_NO_RUN: Final = frozenset({"/", "/metrics", "/openapi.json", *PUBLIC})
_HEAD: Final = re.compile(r"/runs/[^/]+/head")
#: Requests other than probes that may begin in one turn of the event loop: a millisecond of work or two.
_BEGIN_AT_ONCE: Final = 4
#: Turns in a row in which none begins while others come. After these some begin in each turn, however many come: else
#: a stranger who connects again and again would hold up all.
_TAKEN_IN_FIRST: Final = 1024
#: Scope key: the caller's `Token`.
CALLER: Final = "draftalign.caller"
_LOOPBACK: Final = Token(LOOPBACK, frozenset(SCOPES))
_NOBODY: Final = Token("nobody", frozenset())


def allowed_scopes(method: str, path: str) -> frozenset[TokenScope]:
    """Scopes any one of which permits the call."""
    first, *rest = path.removeprefix("/").split("/")
    if first == "runs" and rest[1:2] == ["dead"] and len(rest) > 2:
        return _ADMINS  # a dead batch's file: what the policy wrote, word for word
    if method in _READS:
        return _TRAINERS_TOO if first in ("runs", "rollouts") else _READERS
    if (method, first) in (("PUT", "runs"), ("POST", "rollouts")):
        return _WRITERS
    if (method, first) == ("POST", "acceptance"):
        return _REPORTERS  # not for readers: counts are trusted. A trainer may have its engines in its own processes
    return _ADMINS


def named_runs(method: str, path: str, query: bytes) -> list[str] | None:
    """Runs that a call's path and query name. None: only a token for all runs may make this call.

    Deny by default: a new call must be in a table here before a limited token may make it.
    """
    first, *rest = path.removeprefix("/").split("/")  # not always a /: `OPTIONS *`
    if first == "runs":
        return rest[:1]
    # Parsed as the handlers parse it. All values are checked: a handler uses one of them.
    asked = [value for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if name == "run"]
    if (method, path) in _RUN_IN_BODY:
        return asked
    if first in _RUN_IN_QUERY:
        return asked or ["default"]
    return [] if path in _NO_RUN or first == "docs" else None


def brings_data(method: str, path: str) -> bool:
    """Whether trainers and engines make this call all the time: it is not audited at its beginning."""
    return (method, path) in _RUN_IN_BODY or (method == "PUT" and _HEAD.fullmatch(path) is not None)


def check_binding(settings: Settings) -> None:
    """Refuse to serve beyond this machine without tokens."""
    if not settings.binds_loopback and not settings.token_entries() and settings.token_file is None:
        raise ConfigurationError(
            f"refusing to listen on {settings.host} without tokens; set DRAFTALIGN_TOKENS or DRAFTALIGN_TOKEN_FILE, "
            "or DRAFTALIGN_HOST=127.0.0.1"
        )


async def _caller(request: Request) -> Token:
    caller: Token = request.scope[CALLER]
    return caller


#: The token of a request. A handler whose body names the run, or that lists runs, must check it.
Caller = Annotated[Token, Depends(_caller)]


def check_covers(caller: Token, run: str) -> None:
    """Refuse a token that is not for this run, whether the run exists or not."""
    if not caller.covers(run):
        patterns = " ".join(caller.runs)
        raise Problem(403, "run", f"token {caller.name!r} is for runs {patterns}, not for {run[:80]!r}", field="run")


class Throttle:
    """Lets few requests begin in one turn of the event loop, and none while others come.

    A turn of uvloop accepts one connection. When a thousand agents reconnect at once, they are taken in before they are
    answered, which takes a third of the time. So a probe among them waits for that only, and for few requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._due = self._came = False  # whether `_next` is to come; whether a request came since it did
        self._turns = 0  # in a row in which one came

    async def wait(self) -> None:
        """Return when the request may begin; first come, first served."""
        self._came = True
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def _next(self) -> None:
        self._turns, self._came = self._turns + 1 if self._came else 0, False
        left = 0 if 0 < self._turns <= _TAKEN_IN_FIRST else _BEGIN_AT_ONCE
        while self._waiting and left > 0:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                left -= 1
        self._due = self._turns > 0 or bool(self._waiting)
        if self._due:
            asyncio.get_running_loop().call_soon(self._next)


class Guard:
    """ASGI middleware that lets through only what the caller's token permits, and audits what changes anything."""

    def __init__(self, app: ASGIApp, tokens: Tokens, auditor: Auditor, find: Callable[[str], Awaitable[None]]) -> None:
        """`find`: looks for a run that is named, before the call is answered."""
        self._app = app
        self._find = find
        self._tokens = tokens
        self._auditor = auditor
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with 400, 401, 403, 421 or 503, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in PUBLIC:
            await self._throttle.wait()
        try:
            caller = scope[CALLER] = self._admit(scope)
            for run in named_runs(scope["method"], scope["path"], scope["query_string"]) or ():
                await self._find(run)
            if scope["method"] in _READS:
                await self._app(scope, receive, self._while_valid(caller, scope, receive, send))
            elif caller is _NOBODY:
                await self._app(scope, receive, send)
            else:
                await self._audited(caller, scope, receive, send)
        except Problem as problem:
            await _refuse(problem, scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and has waited long enough for what runs
            scope[BODY_STATE] = "read"  # nobody may wait for the rest of the body: the loop ends
            with contextlib.suppress(RuntimeError):  # an answer has begun: uvicorn closes the connection
                await _refuse(Problem(503, "stopping", "the service stops; send it again"), scope, receive, send)

    def _admit(self, scope: Scope) -> Token:
        """The caller; raises Problem where the call is not for it."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise Problem(400, "two-hosts", "the request has more than one Host header")
        method, path = scope["method"], scope["path"]
        if path in PUBLIC:
            return _NOBODY
        if method not in _READS and _is_of_another_site(headers):
            raise Problem(403, "cross-site", "a web page of another site may not change anything here")
        if not self._tokens.required:
            host = headers.get(b"host", "")
            if _is_loopback(host):
                return _LOOPBACK
            raise Problem(
                421, "wrong-host", f"no tokens are configured, so only loopback names are served, not {host!r}"
            )
        authorization = headers.get(b"authorization", "")
        caller = self._token(authorization)
        if caller is None:
            raise _unknown() if authorization else Problem(401, "no-token", f"no token came; send one {_AS}")
        allowed = allowed_scopes(method, path)
        if not caller.scopes & allowed:
            wanted = " or ".join(sorted(allowed))
            raise Problem(403, "scope", f"{method} {path} needs scope {wanted}; this token does not have it")
        runs = named_runs(method, path, scope["query_string"])
        if runs is None and caller.is_limited:
            raise Problem(403, "run", f"{method} {path} is for tokens of all runs; token {caller.name!r} is limited")
        for run in runs or ():
            check_covers(caller, run)
        return caller

    def _token(self, authorization: str) -> Token | None:
        kind, _, credential = authorization.partition(" ")
        secret = credential.strip().encode()
        if kind.lower() == "basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != "bearer":
            return None
        return self._tokens.find(secret)

    def _while_valid(self, caller: Token, scope: Scope, receive: Receive, send: Send) -> Send:
        """Refuse instead of answering if the token was revoked during the call, such as a long poll."""
        if caller in (_NOBODY, _LOOPBACK):
            return send
        refused = False

        async def checked(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and not self._tokens.holds(caller):
                refused = True
                await _refuse(_unknown(), scope, receive, send)
            elif not refused:
                await send(message)

        return checked

    async def _audited(self, caller: Token, scope: Scope, receive: Receive, send: Send) -> None:
        """Audit the request, handle it, and audit the outcome."""
        method, path = scope["method"], scope["path"]
        runs = named_runs(method, path, scope["query_string"])
        client = (scope.get("client") or ("",))[0]
        call = scope[AUDITED] = AuditedCall(self._auditor, caller.name, client, method, path, runs[0] if runs else None)
        if not brings_data(method, path):
            await call.begin()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                await call.end(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            await call.end(None)


def _unknown() -> Problem:
    return Problem(401, "no-token", f"this token is not known; send a known one {_AS}")


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    response = ProblemResponse(problem, scope)
    for challenge in _CHALLENGES if problem.status == 401 else ():
        response.headers.append("WWW-Authenticate", challenge)
    await response(scope, receive, send)


def _is_of_another_site(headers: Mapping[bytes, str]) -> bool:
    """Whether a page of another site made the request, by headers that browsers set and pages cannot.

    To a plain http:// name browsers send no Sec-Fetch-Site. They send an Origin with every request that may change
    something.
    """
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None or origin is None:
        return site == "cross-site"
    return origin.lower().partition("://")[2] != headers.get(b"host", "").lower()


def _is_loopback(host: str) -> bool:
    """Whether a Host header is `localhost` or a loopback address, which no name server can redirect."""
    name = re.fullmatch(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]*)?", host.lower())
    if name is None or name[1] == "localhost":
        return name is not None
    try:
        return ipaddress.ip_address(name[1].strip("[]")).is_loopback
    except ValueError:
        return False
