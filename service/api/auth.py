"""Who may call what: bearer tokens with scopes, checked before a request reaches routing or any byte of its body.

Deny by default: what is not listed here needs `admin`. A token also passes as the password of HTTP Basic, so that a
browser can open the page. With no tokens configured the service binds to loopback only, and answers only requests that
name a loopback host: a web page elsewhere cannot reach it by pointing its own name at 127.0.0.1.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import Problem, ProblemResponse
from service.errors import ConfigurationError
from service.settings import Scope as TokenScope
from service.settings import Settings

#: Probes carry no secrets and must work for whatever runs the container.
PUBLIC: Final = frozenset({"/healthz", "/readyz"})
#: One header line each: Chromium reads a line as one challenge, and knows Basic only.
_CHALLENGES: Final = ('Basic realm="draftalign"', 'Bearer realm="draftalign"')
_READERS: Final[frozenset[TokenScope]] = frozenset({"read", "write"})
_WRITERS: Final[frozenset[TokenScope]] = frozenset({"write"})
_READ_ONLY: Final[frozenset[TokenScope]] = frozenset({"read"})
_ADMINS: Final[frozenset[TokenScope]] = frozenset({"admin"})


def allowed_scopes(method: str, path: str) -> frozenset[TokenScope]:
    """Scopes any one of which permits the call."""
    first, *rest = path.split("/")[1:] if path.startswith("/") else [""]
    if first == "runs" and rest[1:2] == ["dead"] and len(rest) > 2:
        return _ADMINS  # a dead batch's file: what the policy wrote, word for word
    if method in ("GET", "HEAD"):
        return _READERS if first in ("runs", "rollouts") else _READ_ONLY
    if (method, first) in (("PUT", "runs"), ("POST", "rollouts")):
        return _WRITERS
    if (method, first) == ("POST", "acceptance"):
        return _READERS  # the swap agent beside an engine reads drafters and reports counts; so may a trainer
    return _ADMINS


def check_binding(settings: Settings) -> None:
    """Refuse to serve beyond this machine without tokens."""
    if not settings.binds_loopback and not settings.token_scopes():
        raise ConfigurationError(
            f"refusing to listen on {settings.host} without tokens; set DRAFTALIGN_TOKENS, or host 127.0.0.1"
        )


class Guard:
    """ASGI middleware that lets through only what `allowed_scopes` permits."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._tokens = [(secret.encode(), scopes) for secret, scopes in settings.token_scopes().items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with 401, 403 or 421, or pass the request on."""
        if scope["type"] == "http" and (problem := self._refusal(scope)) is not None:
            response = ProblemResponse(problem, scope)
            for challenge in _CHALLENGES if problem.status == 401 else ():
                response.headers.append("WWW-Authenticate", challenge)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return Problem(400, "two-hosts", "the request has more than one Host header")
        if scope["path"] in PUBLIC:
            return None
        if not self._tokens:
            host = headers.get(b"host", "")
            if _is_loopback(host):
                return None
            return Problem(
                421, "wrong-host", f"no tokens are configured, so only loopback names are served, not {host!r}"
            )
        granted = self._granted(headers.get(b"authorization", ""))
        if granted is None:
            return Problem(401, "no-token", "send `Authorization: Bearer <token>` with a known token")
        allowed = allowed_scopes(scope["method"], scope["path"])
        if granted & allowed:
            return None
        wanted = " or ".join(sorted(allowed))
        return Problem(403, "scope", f"{scope['method']} {scope['path']} needs scope {wanted}; this token has not")

    def _granted(self, authorization: str) -> frozenset[TokenScope] | None:
        kind, _, credential = authorization.partition(" ")
        secret = credential.strip().encode()
        if kind.lower() == "basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != "bearer":
            return None
        found: frozenset[TokenScope] | None = None
        for known, scopes in self._tokens:  # no early exit: the time taken must not tell which token matched
            if hmac.compare_digest(secret, known):
                found = scopes
        return found


def _is_loopback(host: str) -> bool:
    """Whether a Host header is `localhost` or a loopback address, which no name server can redirect."""
    name = re.fullmatch(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]*)?", host.lower())
    if name is None or name[1] == "localhost":
        return name is not None
    try:
        return ipaddress.ip_address(name[1].strip("[]")).is_loopback
    except ValueError:
        return False
