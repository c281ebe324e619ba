"""Puts a rollout file straight into the service's object store, past its API, where the service says that it takes it.

ask   `POST /rollouts/direct` with the file's header, length and SHA-256: all checks are made before a tensor travels
put   to the URL of its answer (201), which is signed for this length and digest; our token is not sent along
ask   again, by the name of that answer: the batch is queued (202), or the store has no such file (201 again)

Whatever is lost on the way, the next question says what is still to be done, so each of them may be repeated. Where the
store cannot be reached from here, or the service takes no such uploads any more, the file goes through the API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from rl_hooks import wire
from rl_hooks.sending.exchange import Origin, Reply, exchange
from rl_hooks.sending.jobs import Parts

#: How often a file is put until the service finds it.
_PUTS: Final = 2
#: What a service says that takes no such uploads now.
_NOT_TAKEN: Final = ("urn:draftalign:no-direct-uploads", "urn:draftalign:object-store-away")


class StoreUnreachable(Exception):  # noqa: N818 - reads as what happened
    """The file cannot go by the object store; it can through the API."""


class DirectUpload:
    """One file on its way. `ask`: send a body to a path of the service."""

    def __init__(self, run: str, parts: Parts, ask: Callable[[str, Parts], Reply], timeout_seconds: float) -> None:
        """Reads the whole file once, for its digest. Raises ValueError for what does not begin with a header."""
        self._parts, self._ask_of, self._timeout_seconds = parts, ask, timeout_seconds
        self._prefix = bytes(parts[0])
        if wire.header_size(self._prefix[:8]) != len(self._prefix):
            raise ValueError("the first part is no safetensors header")
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        size = wire.parts_bytes(parts)
        self._path = f"/rollouts/direct?run={quote(run, safe='')}&bytes={size}&sha256={digest.hexdigest()}"
        self._upload = ""
        self._bytes_put = 0

    def take_bytes_put(self) -> int:
        """Bytes that went to the store since this was asked last."""
        found, self._bytes_put = self._bytes_put, 0
        return found

    def attempt(self) -> Reply:
        """Ask the service; while it answers 201 (put the file there), put it and ask again. Returns another answer.

        Raises StoreUnreachable, and OSError where the service does not answer: then try again.
        """
        why = ""
        for _ in range(_PUTS):
            reply = self._ask()
            if reply.status != 201:
                return reply
            why = self._put(reply.fields)
        if (reply := self._ask()).status != 201:
            return reply
        raise StoreUnreachable(why or "it took the file, and the service does not find it there")

    def _ask(self) -> Reply:
        named = f"&upload={quote(self._upload, safe='')}" if self._upload else ""
        reply = self._ask_of(self._path + named, [self._prefix])
        if reply.fields.get("type") in _NOT_TAKEN:
            raise StoreUnreachable(f"the service says: {reply.detail}")
        return reply

    def _put(self, place: Mapping[str, object]) -> str:
        """Put the file; returns what failed. It may be there all the same."""
        upload, url, headers = (place.get(name) for name in ("upload", "url", "headers"))
        if not (isinstance(upload, str) and isinstance(url, str) and isinstance(headers, dict)):
            raise StoreUnreachable("the service's answer names no place")
        self._upload = upload
        try:
            found = urlsplit(url)
            origin = Origin.parse(f"{found.scheme}://{found.netloc}")
            named = {str(name): str(value) for name, value in headers.items()}
            path = f"{found.path}?{found.query}"
            seconds = self._timeout_seconds
            reply = exchange(origin, "PUT", path, named, self._parts, timeout_seconds=seconds, of_a_store=True)
        except (OSError, ValueError) as error:  # ValueError: nothing that can be sent
            return f"{error or type(error).__name__}"
        self._bytes_put += reply.body_bytes_sent
        return "" if reply.status < 300 else f"it answered {reply.status}: {reply.detail}"
