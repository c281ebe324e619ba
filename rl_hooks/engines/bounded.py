"""Answers of engines and of the service, read up to a bound: the peer does not choose how much memory they take.

One hostile engine must not end the agent that serves the others, and the in-process agent lives inside vLLM. So every
answer that is held in memory comes through `ask`. It asks for no encoding and accepts none, because a few KB can
inflate to hundreds of MB. It stops at `most_bytes`, and at its time limit, however slowly bytes come. The files of a
drafter, which go to the disk, are bounded in `rl_hooks.agent.download`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final

import httpx

from rl_hooks.errors import AnswerError, cut

#: Most bytes of a manifest, a state, or the answer to a swap or a report. These have some KB; SGLang's
#: `/server_info` has ten or more.
MAX_ANSWER_BYTES: Final = 1 << 20
#: Most bytes of an engine's metrics page. vLLM 0.32 prints 61 KB for one engine core and 46 KB for each further one, so
#: this is enough for 180.
MAX_PAGE_BYTES: Final = 8 << 20
#: Asks for the bytes as they are.
IDENTITY: Final = {"Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of bounded size."""

    status_code: int
    headers: httpx.Headers
    content: bytes

    @property
    def text(self) -> str:
        """The body as UTF-8; bytes that are none are replaced."""
        return self.content.decode("utf-8", "replace")

    def refusal(self) -> tuple[str, str]:
        """Type of the service's problem document, and its detail with what helps.

        Of any other answer "", and its detail or the body's beginning.
        """
        try:
            problem = self.json()
            detail, kind = str(problem["detail"]), str(problem["type"])
        except (ValueError, TypeError, KeyError):
            return "", self.text[:300]
        if not kind.startswith("urn:draftalign:"):  # another server's, in the same form
            return "", detail[:300]
        return kind, detail[:300] + (" (set DRAFTALIGN_TOKEN)" if kind.endswith(":no-token") else "")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError, for JSON of a depth that cannot be read too."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("nested too deep") from error


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    most_bytes: int = MAX_ANSWER_BYTES,
    timeout_seconds: float | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Answer:
    """Send a request, and read an answer of at most `most_bytes` within `timeout_seconds` (None: the client's).

    Raises AnswerError if the answer is encoded, too long or too slow, and httpx.HTTPError if none comes.
    """
    seconds = client.timeout.read if timeout_seconds is None else timeout_seconds
    status, body = None, bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, headers=(headers or {}) | IDENTITY, timeout=seconds, **options) as response,
        ):
            status = response.status_code
            refuse_encoded(response, f"{method} {response.url}")
            said = response.headers.get("Content-Length", "")
            if said.isdecimal() and len(said) < 20 and int(said) > most_bytes:
                raise _too_long(method, response.url, f"the peer announces {said}", most_bytes)
            async for chunk in response.aiter_raw():
                if len(body) + len(chunk) > most_bytes:
                    raise _too_long(method, response.url, "more came", most_bytes)
                body += chunk
            return Answer(status, response.headers, bytes(body))
    except TimeoutError:
        if status is None:
            raise httpx.ReadTimeout(f"no answer within {seconds} s") from None
        raise AnswerError(
            f"{method} {url}: expected the whole answer within {seconds} s, got {len(body)} bytes; nothing of it was "
            "used. See what the peer or the proxy before it does"
        ) from None


def refuse_encoded(response: httpx.Response, asked: str) -> None:
    """Raise AnswerError for an answer whose body must be decoded: its size would be known only afterwards."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise AnswerError(
            f"{asked}: expected no Content-Encoding, as asked for, got {cut(encoding)!r}; nothing of it was read. "
            "Have the peer, or the proxy before it, send answers as they are"
        )


def _too_long(method: str, url: httpx.URL, came: str, most_bytes: int) -> AnswerError:
    return AnswerError(
        f"{method} {cut(str(url))}: expected an answer of at most {most_bytes} bytes, {came}; nothing of it was used. "
        "See what answers at this address"
    )
