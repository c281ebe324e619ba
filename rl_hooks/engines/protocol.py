"""HTTP adapter for engines that speak draftalign's swap protocol (the example engine, the vLLM plugin).

GET  /drafter/state                          {"version", "loaded", "swaps", "config_fingerprint"?, "policy_version"?,
                                              "method"?, "takes"?, "sha256"?, "verifies"?, "d2t_sha256"?, "aux_layers"?}
POST /drafter/swap {"path", "version",       200 {"version", "previous", "sha256"?}, or an error with nothing changed;
                    "sha256"?}               412: the files are not those of these digests
GET  /metrics                                vLLM's counters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from rl_hooks.engines.bounded import MAX_ANSWER_BYTES, MAX_PAGE_BYTES, Answer, ask
from rl_hooks.engines.counting.counters import Snapshot
from rl_hooks.errors import AnswerError, EngineError, MetricsError, OtherBytesError, SwapRefusedError, cut
from rl_hooks.format.release import Release, layers_of

#: vLLM's methods that propose no tokens: they use the drafter's place to store states.
_NOT_SPECULATION = frozenset({"extract_hidden_states"})

#: `drafting` of an engine that proposes several tokens at a position: the service compares its counts with nothing.
TREES = "trees"

#: Statuses with which an engine refuses this drafter for good. Other errors may pass.
REFUSALS = frozenset({400, 409, 413, 415, 422})
#: Status of an engine that read files of other digests than it was given.
OTHER_BYTES = 412
NOT_FOUND = 404
_NO_PLUGIN = (
    "Is that the engine's own address? vLLM knows this call with draftalign's plugin: `pip install ./rl_hooks` in its "
    "environment, and VLLM_PLUGINS=draftalign when it starts. Give --engine sglang for SGLang"
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the engine says is loaded. `swaps` counts swaps since it started, so a lower one reveals a restart."""

    version: str | None
    loaded: bool
    swaps: int
    config_fingerprint: str | None = None
    policy_version: int | None = None
    #: Kind of drafter that can be swapped in ("eagle3", "mtp"); None: the agent can only count.
    takes: str | None = "eagle3"
    #: How it speculates without a drafter of ours (n-grams, its policy's own MTP module): the name of its counts.
    method: str | None = None
    #: How many tokens it drafts a round, and whether as `greedy`, `probabilistic` or `TREES`; None: it does not say.
    depth: int | None = None
    drafting: str | None = None
    #: SHA-256 of the model file that it read for `version`; None where it does not say.
    sha256: str | None = None
    #: Whether it compares the files with digests that a swap names before it loads them.
    verifies: bool = False
    #: Identity of its draft vocabulary, and the layers that its drafter reads, where it says so: for messages.
    d2t_sha256: str | None = None
    aux_layers: tuple[int, ...] = ()
    #: Mark of its process, which a restart changes; None where only its counters show a restart.
    life: str | None = None

    @property
    def serving(self) -> str | None:
        """The version or method that proposes tokens now; None if nothing does, or a drafter without a name."""
        return (self.version or self.method) if self.loaded else None


def counting_only(method: str | None, policy_version: int | None = None, life: str | None = None) -> EngineState:
    """State of an engine that speculates by a method of its own; None: it does not speculate."""
    return EngineState(None, method is not None, 0, policy_version=policy_version, takes=None, method=method, life=life)


class Engine(Protocol):
    """An engine as the agent uses it. Methods raise EngineError when it does not answer, or not usably."""

    url: str

    async def state(self) -> EngineState:
        """What is loaded now."""

    async def swap(self, release: Release) -> str | None:
        """Load a drafter; returns the SHA-256 of the model file that the engine read, None where it does not say.

        Raises SwapRefusedError if the engine will never take it, with nothing changed.
        """

    async def snapshot(self) -> Snapshot:
        """Its counters now. Raises MetricsError if it does not count."""


class EngineHttp:
    """Calls to one engine. `token` is the engine's own, sent as a bearer token."""

    def __init__(
        self, url: str, client: httpx.AsyncClient, *, token: str | None = None, swap_timeout_seconds: float = 120.0
    ) -> None:
        self.url = url.rstrip("/")
        self._client = client
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._swap_timeout_seconds = swap_timeout_seconds

    async def _ask(self, method: str, path: str, *, most_bytes: int = MAX_ANSWER_BYTES, **options: Any) -> Answer:
        """The answer, whatever its status. Raises EngineError where none comes."""
        try:
            url = self.url + path
            return await ask(self._client, method, url, most_bytes=most_bytes, headers=self._headers, **options)
        except httpx.HTTPError as error:
            raise EngineError(f"{method} {path}: {cut(repr(error), 400)}") from error
        except AnswerError as error:
            raise EngineError(str(error)) from error

    async def _call(
        self,
        method: str,
        path: str,
        fault: Callable[[int], type[EngineError]] = lambda _: EngineError,
        *,
        unknown: str = "",
        **options: Any,
    ) -> Answer:
        """The answer 200. Raises EngineError where none comes, and what `fault` makes of another status.

        `unknown`: what to do where the engine does not know the call (404).
        """
        answer = await self._ask(method, path, **options)
        if (status := answer.status_code) != 200:
            helps = f". {unknown}" if unknown and status == NOT_FOUND else ""
            raise fault(status)(f"{method} {self.url}{path} answered {status}: {answer.text[:400]}{helps}")
        return answer

    async def _page(self) -> str:
        """Read its metrics page. Raises MetricsError where there is none, or one of no usable size."""
        try:
            return (await self._call("GET", "/metrics", lambda _: MetricsError, most_bytes=MAX_PAGE_BYTES)).text
        except EngineError as error:
            if isinstance(error.__cause__, AnswerError):
                raise MetricsError(str(error)) from error
            raise

    async def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The answer, as a JSON object. Raises EngineError where it is none."""
        answer = await self._call(method, path, **options)
        try:
            document = answer.json()
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: the answer is not JSON: {answer.text[:200]!r}") from error
        if not isinstance(document, dict):
            raise EngineError(f"{self.url}{path}: expected a JSON object, got {str(document)[:200]}")
        return document


class SwapEngine(EngineHttp):
    """One engine that speaks the protocol."""

    _verifies = False

    async def state(self) -> EngineState:
        """What is loaded now."""
        found = await self._object("GET", "/drafter/state", unknown=_NO_PLUGIN)
        state = engine_state(f"{self.url}/drafter/state", found)
        self._verifies = state.verifies
        return state

    async def swap(self, release: Release) -> str | None:
        """Ask for a swap; an answer that names another version is an EngineError."""
        version = release.version
        body: dict[str, Any] = {"path": str(release.path), "version": version}
        if self._verifies and release.sha256s:  # an engine may refuse what it does not know
            body["sha256"] = dict(release.sha256s)
        options = {"json": body, "timeout_seconds": self._swap_timeout_seconds}
        document = await self._object("POST", "/drafter/swap", fault=failure, **options)
        if (answered := document.get("version")) != version:
            raise EngineError(f"{self.url}/drafter/swap: asked for {version}, the engine answered {answered!r:.200}")
        return _digest(document, "sha256")

    async def snapshot(self) -> Snapshot:
        """Its counters now."""
        return Snapshot.parse(await self._page())


def failure(status: int) -> type[EngineError]:
    """What an engine means that answers a swap with this status."""
    if status == OTHER_BYTES:
        return OtherBytesError
    return SwapRefusedError if status in REFUSALS else EngineError


def _digest(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    return cut(value) if isinstance(value, str) and value else None


def engine_state(source: str, document: dict[str, Any]) -> EngineState:
    """What an engine's answer says; raises EngineError, naming the source, if it is none of the protocol."""
    version, loaded, swaps = document.get("version"), document.get("loaded"), document.get("swaps")
    fingerprint, policy = document.get("config_fingerprint"), document.get("policy_version")
    if not (
        isinstance(version, str | None)
        and isinstance(loaded, bool)
        and type(swaps) is int
        and isinstance(fingerprint, str | None)
        and (policy is None or type(policy) is int)
    ):
        raise EngineError(
            f"{source}: expected version (string or null), loaded (boolean), swaps (integer), got {str(document)[:200]}"
        )
    version, fingerprint = (None if name is None else cut(name) for name in (version, fingerprint))
    method, depth, drafting = (document.get(name) for name in ("method", "depth", "drafting"))
    found = EngineState(version, loaded, swaps, fingerprint, policy)
    if isinstance(method, str) and method != "eagle3":
        method = cut(method)
        if document.get("takes") != "mtp":
            return counting_only(None if method in _NOT_SPECULATION else method, policy)
        found = replace(found, takes="mtp", method=method)
    return replace(
        found,
        depth=depth if type(depth) is int else None,
        drafting=cut(drafting) if isinstance(drafting, str) else None,
        sha256=_digest(document, "sha256"),
        d2t_sha256=_digest(document, "d2t_sha256"),
        aux_layers=layers_of(document.get("aux_layers")),
        verifies=document.get("verifies") is True,
    )
