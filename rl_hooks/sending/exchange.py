"""One HTTP/1.1 request with a large body, which is not sent if the server refuses the headers.

`http.client` cannot wait for `100 Continue`, and most clients copy the body. Here the headers go first with
`Expect: 100-continue`. The body follows, from memoryviews and without a copy, when the server asks for it or has not
answered for a second. One connection per request: none is left over from before a restart of the service.
"""

from __future__ import annotations

import email.utils
import functools
import http.client
import io
import json
import os
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from rl_hooks.durable import at_home

#: How long to wait for `100 Continue` before sending the body anyway (RFC 9110 §10.1.1 asks for a limit).
CONTINUE_SECONDS: Final = 1.0
SLICE_BYTES: Final = 4 << 20
_MAX_REPLY_BYTES: Final = 64 << 10
_MAX_INTERIM: Final = 8
_MAX_TOKEN_FILE_BYTES: Final = 4096


class ReplyError(OSError):
    """What came is no answer of the service (no HTTP, or a 2xx of something else), or nothing could be asked."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the service is."""

    scheme: str
    host: str
    port: int
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Split `http(s)://host[:port][/base]`. Raises ValueError for anything else."""
        if "@" in url:  # not told: it may hold a password
            raise ValueError("the service URL has a user or a password (an @); a token goes into DRAFTALIGN_TOKEN")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"the service URL must look like http://host:port, got {url!r}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Reply:
    """The final answer to a request."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    body_bytes_sent: int

    @property
    def retry_after_seconds(self) -> float | None:
        """`Retry-After` as seconds from now, whether it was given as a number or as a date."""
        text = self.headers.get("retry-after", "").strip()
        if not text:
            return None
        if text.isascii() and text.isdigit():
            return float(text[:9])
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None

    @property
    def document(self) -> Mapping[str, object] | None:
        """The body as a JSON object; None if it is none."""
        try:
            parsed = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None

    @property
    def fields(self) -> Mapping[str, object]:
        """The body as a JSON object; empty if it is none."""
        return self.document or {}

    @property
    def detail(self) -> str:
        """The detail of a problem document, or the first 500 characters of any other body."""
        said = self.fields.get("detail") or self.fields.get("title") or self.body.decode("utf-8", "replace")
        return str(said)[:500]


def exchange(
    origin: Origin,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Iterable[bytes | memoryview],
    *,
    timeout_seconds: float,
    of_a_store: bool = False,
) -> Reply:
    """Send one request and read its answer. Raises OSError (ReplyError among them) if there is none.

    `timeout_seconds` bounds the connection attempt, each slice of at most 4 MiB, and then the whole answer.
    `of_a_store`: over https the system's authorities are trusted too, whatever DRAFTALIGN_CA_FILE says.
    """
    connection = _connect(origin, timeout_seconds, of_a_store)
    try:
        connection.putrequest(method, origin.base_path + path, skip_accept_encoding=True)
        for name, value in (*headers.items(), ("Expect", "100-continue"), ("Connection", "close")):
            connection.putheader(name, value)
        connection.endheaders()
        sock = connection.sock
        incoming = _Incoming(sock)
        with io.BufferedReader(incoming) as reader:
            incoming.begin(CONTINUE_SECONDS)
            try:
                reader.peek(1)  # not a look at the socket: TLS sends what is no part of an answer
            except TimeoutError:
                pass
            else:
                incoming.begin(timeout_seconds)
                early = _read_reply(reader, 0, stop_at_continue=True)
                if early is not None:
                    return early
            sent = 0
            try:
                sock.settimeout(timeout_seconds)
                for piece in _slices(body):
                    sock.sendall(piece)
                    sent += len(piece)
            except OSError:
                incoming.begin(timeout_seconds)
                # The server may have refused in mid-body and hung up: its answer says why, the broken pipe does not.
                late = _read_reply(reader, sent)
                if late is None:
                    raise
                return late
            incoming.begin(timeout_seconds)
            reply = _read_reply(reader, sent)
            if reply is None:
                raise ReplyError("the service closed the connection without an answer")
            return reply
    except http.client.HTTPException as error:
        raise ReplyError(f"not an HTTP answer: {error!r}") from error
    finally:
        connection.close()


def bearer(token: str | None) -> dict[str, str]:
    """The headers of a token. `@path` is one in a file, which is read for each request: a person may change it there.

    Raises ReplyError for a file that cannot be read, or that holds no token.
    """
    if token is None or not token.startswith("@"):
        return {} if token is None else {"Authorization": f"Bearer {token}"}
    named = f"the file {token[1:]} that DRAFTALIGN_TOKEN names"
    try:
        # The agent's loop waits for this, so it never waits itself: for somebody to write into a FIFO.
        descriptor = os.open(at_home(token[1:]), os.O_RDONLY | os.O_NONBLOCK)
        try:
            held = os.read(descriptor, _MAX_TOKEN_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
        found = clean_token(held.decode("latin-1"), named)
    except (OSError, ValueError) as error:
        raise ReplyError(f"{named} cannot be used, so nothing is asked: {error}") from error
    if found is None or len(held) > _MAX_TOKEN_FILE_BYTES:
        fault = "is empty" if found is None else f"holds more than {_MAX_TOKEN_FILE_BYTES} bytes"
        raise ReplyError(f"{named} {fault}; expected a token")
    return {"Authorization": f"Bearer {found}"}


def clean_token(token: str | None, named: str) -> str | None:
    """The token without the white space around it, which secrets and files often have; None for none.

    Raises ValueError, which names it as `named` and does not tell it, for one that no header can hold.
    """
    token = (token or "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{named} has a character that is not printable ASCII; tokens have none")
    return token or None


@dataclass(frozen=True, slots=True)
class RunService:
    """The service of one run, and the token for it."""

    origin: Origin
    run: str
    token: str | None = field(default=None, repr=False)

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Iterable[bytes | memoryview],
        *,
        timeout_seconds: float,
    ) -> Reply:
        """`exchange`, with the token."""
        headers = {**headers, **bearer(self.token)}
        return exchange(self.origin, method, path, headers, body, timeout_seconds=timeout_seconds)


class _Incoming(io.RawIOBase):
    """What comes from a socket, all of it within the seconds that `begin` gives, however slowly it drips."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._deadline = sock, 0.0

    def begin(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def _connect(origin: Origin, timeout_seconds: float, of_a_store: bool) -> http.client.HTTPConnection:
    connection: http.client.HTTPConnection
    if origin.scheme == "https":
        context = (trusted_of_store if of_a_store else trusted)(os.environ.get("DRAFTALIGN_CA_FILE"))
        connection = http.client.HTTPSConnection(origin.host, origin.port, timeout=timeout_seconds, context=context)
    else:
        connection = http.client.HTTPConnection(origin.host, origin.port, timeout=timeout_seconds)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise ReplyError(
            f"the certificate of https://{origin.host}:{origin.port} is not trusted: {error.verify_message}; set "
            "DRAFTALIGN_CA_FILE to the PEM file of the authority that signed it"
        ) from error
    except ssl.SSLError as error:
        raise ReplyError(
            f"no TLS with https://{origin.host}:{origin.port}: {error}; does that port speak plain http?"
        ) from error
    return connection


@functools.lru_cache(1)
def trusted(ca_file: str | None) -> ssl.SSLContext:
    """Trusts what the authorities in a PEM file signed; without a file, those of the system. Raises OSError.

    Reading the certificates takes longer than most requests, so this is done once.
    """
    try:
        return ssl.create_default_context(cafile=at_home(ca_file) if ca_file else None)
    except OSError as error:
        raise OSError(f"DRAFTALIGN_CA_FILE {ca_file}: {error}; expected a PEM file of certificates") from error


@functools.lru_cache(1)
def trusted_of_store(ca_file: str | None) -> ssl.SSLContext:
    """Trusts the system's authorities, as for a public object store, and those in a PEM file. Raises OSError."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(at_home(ca_file))
    return context


def _slices(body: Iterable[bytes | memoryview]) -> Iterable[memoryview]:
    for part in body:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        for begin in range(0, len(view), SLICE_BYTES):
            yield view[begin : begin + SLICE_BYTES]


def _read_reply(reader: BinaryIO, sent: int, *, stop_at_continue: bool = False) -> Reply | None:
    """Read to the final answer, past interim ones. None: the connection ended, or (`stop_at_continue`) one came."""
    for _ in range(_MAX_INTERIM):
        line = reader.readline(_MAX_REPLY_BYTES)
        if not line:
            return None
        words = line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (len(words[1]) == 3 and words[1].isdigit()):
            raise ReplyError(f"expected an HTTP status line, got {line[:60]!r}")
        status = int(words[1])
        headers = {name.lower(): value for name, value in http.client.parse_headers(reader).items()}
        if status >= 200:
            return Reply(status, headers, _read_body(reader, headers), sent)
        if stop_at_continue:  # 102 and 103 tell as well that it lives, and 100 need not follow them
            return None
    raise ReplyError(f"more than {_MAX_INTERIM} interim answers")


def _read_body(reader: BinaryIO, headers: Mapping[str, str]) -> bytes:
    """At most 64 KiB of the answer: it is only ever a small JSON document."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = b""
        while (size := _chunk_bytes(reader.readline(64))) and len(body) < _MAX_REPLY_BYTES:
            body += reader.read(min(size, _MAX_REPLY_BYTES))
            reader.readline(64)
        return body[:_MAX_REPLY_BYTES]
    text = headers.get("content-length", "")
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else _MAX_REPLY_BYTES
    return reader.read(min(size, _MAX_REPLY_BYTES))


def _chunk_bytes(line: bytes) -> int:
    """Of the chunk that begins with this line; 0 for the last one, and for a line that is none."""
    first = line.split(b";")[0].strip()
    return int(first, 16) if first and all(c in b"0123456789abcdefABCDEF" for c in first) else 0
