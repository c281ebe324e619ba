"""The swap agent: brings the service's newest drafter into inference engines, and their acceptance back.

    run_agent(AgentConfig(service_url="http://127.0.0.1:8400", engine_urls=("http://127.0.0.1:8000",)))

It runs beside the engines (their file system must hold `cache_dir` under the same path) and needs no torch. One task
follows the service, one follows each engine, one reports. None of them ends on an error: the service and the engines
may restart in any order. Reports are cumulative, so the next one makes up for a lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, Final, Literal, get_args

import httpx
from prometheus_client import start_http_server

from rl_hooks import wire
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.download import IN_PROCESS, fetch_release, in_thread, prune_cache
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.agent.reports import MAX_LOGGED, SERVICE, Reports
from rl_hooks.engines.bounded import Answer, ask
from rl_hooks.engines.protocol import Engine, SwapEngine
from rl_hooks.engines.sglang.adapter import SGLangEngine
from rl_hooks.errors import MAX_NAME, AgentError, EngineError, ManifestError, NoRoomError, SignatureError, cut
from rl_hooks.format.release import (
    PLAIN_NAME,
    SIGNATURE_HEADER,
    PublicKeys,
    Release,
    VerifiedManifest,
    new_nonce,
    parse_manifest,
)
from rl_hooks.sending.delivery import NO_SUCH_RUN
from rl_hooks.sending.exchange import Origin, ReplyError, bearer, clean_token, trusted

log = logging.getLogger("draftalign.agent")

#: At least this long between two polls: a service or proxy may answer a long poll at once.
_MIN_POLL_SECONDS: Final = 0.5
_CANCEL_AGAIN_SECONDS: Final = 0.5
_JITTER: Final = random.Random()  # noqa: S311 - not the global generator: an engine may be in a trainer's process
#: An engine does not tell its kind. `protocol`: anything with draftalign's two calls. `vllm`: that, from the plugin.
#: `sglang`: SGLang's own calls.
EngineKind = Literal["protocol", "vllm", "sglang"]
#: vLLM and SGLang close a connection that was idle for 5 seconds, and the agent asks them every 5 seconds. A request on
#: a connection that the engine is closing fails, so idle connections are given up earlier.
_LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Settings of an agent.

    `engine_urls`: one that begins with "in-process:" is of the engine that is given to `SwapAgent`. `token` is the
    service's and is sent to nobody else; `engine_token` is the engines'. With `public_keys` nothing is taken that the
    service did not sign for this agent's own request. `metrics_port`: of the agent's own metrics; None: none.
    """

    service_url: str
    engine_urls: tuple[str, ...]
    run: str = "default"
    cache_dir: Path = Path(".draftalign/agent")
    agent_id: str = field(default_factory=socket.gethostname)
    token: str | None = field(default=None, repr=False)
    engine_kind: EngineKind = "protocol"
    engine_token: str | None = field(default=None, repr=False)
    public_keys: PublicKeys | None = None
    wait_seconds: float = 30.0
    report_seconds: float = 5.0
    request_timeout_seconds: float = 10.0
    swap_timeout_seconds: float = 120.0
    max_backoff_seconds: float = 30.0
    canary: CanaryRule = field(default_factory=CanaryRule)
    keep_versions: int = 3
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for name, variable in (("token", "DRAFTALIGN_TOKEN"), ("engine_token", "DRAFTALIGN_ENGINE_TOKEN")):
            object.__setattr__(self, name, clean_token(getattr(self, name), variable))
        reached = [url for url in self.engine_urls if not url.startswith(IN_PROCESS)]
        Origin.parse(self.service_url)
        for url in reached:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an http:// or https:// address")
        if not self.engine_urls or len(set(self.engine_urls)) != len(self.engine_urls):
            raise ValueError(f"engine_urls: expected at least one engine, each named once, got {self.engine_urls}")
        if not PLAIN_NAME.fullmatch(self.run):
            raise ValueError(f"run: {self.run!r} is not a plain name of letters, digits, '.', '_' and '-'")
        if self.engine_kind not in get_args(EngineKind):
            kinds = ", ".join(get_args(EngineKind))
            raise ValueError(f"--engine (engine_kind): expected one of {kinds}; got {self.engine_kind!r}")
        if not 0 < len(self.agent_id) <= 100 or not self.agent_id.isprintable() or self.agent_id[0] in " /":
            raise ValueError(f"agent_id: expected 1 to 100 printable characters, got {self.agent_id!r}")
        if not 0 <= self.wait_seconds <= 60 or self.report_seconds <= 0:
            raise ValueError(
                f"expected wait_seconds of 0 to 60 and report_seconds above 0, got {self.wait_seconds} and "
                f"{self.report_seconds}"
            )


def pause_seconds(failures: int, limit_seconds: float) -> float:
    """How long to pause after `failures` in a row: longer each time, up to the limit.

    By chance up to half of it is left out, so that a fleet of agents does not return all at once.
    """
    return min(limit_seconds, 0.125 * 2.0 ** min(failures, 30)) * _JITTER.uniform(0.5, 1.0)


@dataclass(slots=True)
class _Answers:
    """What is remembered of the service's answers."""

    etag: str = ""  # of the one that made the newest offer
    recent: list[str] = field(default_factory=list)  # versions, oldest first
    waits: str = ""  # why there is nothing to load, as the service said last
    other: str = ""  # what was logged of the service's contract


class SwapAgent:
    """One agent for one run and any number of engines. `await run()` returns only after `stop()`.

    `engine`: the one engine of an agent that runs inside it.
    """

    def __init__(self, config: AgentConfig, engine: Engine | None = None) -> None:
        self.config, self._engine = config, engine
        self.metrics = AgentMetrics(config.run)
        self.metrics_port: int | None = None
        self.offer: Release | None = None
        self.followers: dict[str, EngineFollower] = {}
        self._stopped = threading.Event()  # the download thread looks at it too
        self._interrupt: Callable[[], None] = lambda: None
        self._offered: dict[str, asyncio.Event] = {}
        self._reports = Reports(config.run, config.agent_id, self.followers, self.metrics)
        self._answers = _Answers()

    def stop(self) -> None:
        """End `run` soon. Safe from any thread and from signal handlers."""
        self._stopped.set()
        self._interrupt()

    async def run(self) -> None:
        """Follow the service and the engines until stopped."""
        config, stopping, loop = self.config, asyncio.Event(), asyncio.get_running_loop()

        def interrupt() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stopping.set)

        self._interrupt = interrupt
        if self._stopped.is_set():
            return
        server = None
        if config.metrics_port is not None:
            try:
                server, _ = start_http_server(config.metrics_port, config.metrics_host, self.metrics.registry)
            except OSError as error:
                place = f"{config.metrics_host}:{config.metrics_port}"
                raise AgentError(f"the agent's own metrics cannot be served at {place}: {error}") from error
            self.metrics_port = server.server_port
        # Two clients: an engine never sees the service's token.
        async with (
            httpx.AsyncClient(**_any_peer(config), **_service(config)) as service,
            httpx.AsyncClient(**_any_peer(config), limits=_LIMITS) as engines,
        ):
            tasks = [asyncio.create_task(steps) for steps in self._loops(service, engines)]
            try:
                await stopping.wait()
            finally:
                await _end(tasks)
                if server is not None:
                    server.shutdown()
                    server.server_close()
            # An engine in this process ends with it: nobody else will read its last counts.
            own = None if self._engine is None else self.followers[config.engine_urls[0]]
            if own is not None:
                with contextlib.suppress(httpx.HTTPError, AgentError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await own.tick(None)
            with contextlib.suppress(httpx.HTTPError, AgentError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._reports.send(service)
            if own is not None:
                own.forget()

    def _loops(self, service: httpx.AsyncClient, engines: httpx.AsyncClient) -> list[Coroutine[Any, Any, None]]:
        config = self.config
        loops = [
            self._repeat(SERVICE, functools.partial(self._follow_service, service), config.max_backoff_seconds),
            self._repeat("report", functools.partial(self._reports.send_counted, service), config.max_backoff_seconds),
        ]
        for url in config.engine_urls:
            follower, event = self._follower(url, engines), self._offered[url]
            # An engine is near, and is without the newest drafter until it answers: short pauses.
            limit = min(config.max_backoff_seconds, 2 * config.report_seconds + 1)
            loops.append(self._repeat(url, functools.partial(self._follow_engine, follower, event), limit))
        return loops

    def _follower(self, url: str, client: httpx.AsyncClient) -> EngineFollower:
        cache = self.config.cache_dir.absolute() / self.config.run
        engine = self._engine or self._adapter(url, client, cache)
        follower = EngineFollower(engine, self.config.canary, self.metrics, cache, self._download)
        self.followers[url] = follower
        self._offered[url] = asyncio.Event()
        return follower

    def _adapter(self, url: str, client: httpx.AsyncClient, cache: Path) -> Engine:
        token, seconds = self.config.engine_token, self.config.swap_timeout_seconds
        if self.config.engine_kind == "sglang":
            return SGLangEngine(url, client, cache, token=token, swap_timeout_seconds=seconds)
        return SwapEngine(url, client, token=token, swap_timeout_seconds=seconds)

    async def _repeat(self, peer: str, step: Callable[[], Awaitable[None]], limit_seconds: float) -> None:
        """Repeat `step`, after a pause where it failed.

        Each kind of failure is logged once in a row of failures, and again as the 8th, 16th, 32nd, ... of the row. An
        agent inside an engine logs the first of a row only: its log is a trainer's.
        """
        failures, told = 0, set[str]()
        while True:
            try:
                await step()
                if failures:
                    log.info("%s: goes on after %d failures", self._name(peer), failures)
                failures = 0
                told.clear()
                continue
            except (AgentError, httpx.HTTPError, OSError) as error:
                failures, kind = failures + 1, re.sub(r"\d+", "", repr(error))  # numbers may differ each time
                again = failures > 1 and (
                    self._engine is not None or (kind in told and (failures < 8 or failures.bit_count() > 1))
                )
                told.add(kind)
                self._note(peer, error, again=again)
            except Exception as error:  # a bug that one answer brings out must not end the agent
                failures += 1
                self._note(peer, error)
                log.exception("%s: unexpected", peer)
            await asyncio.sleep(pause_seconds(failures, limit_seconds))

    def _note(self, peer: str, error: Exception, *, again: bool = False) -> None:
        self.metrics.errors.labels(peer, type(error).__name__).inc()
        text = cut(str(error) or repr(error), MAX_LOGGED)
        cause = error.__cause__ if isinstance(error, EngineError) else error
        silent = isinstance(cause, httpx.TransportError)
        line = f"{self._name(peer)} does not answer ({text})" if silent else f"{self._name(peer)}: {text}"
        wanted = "%s" if self._engine is None else "draftalign: %s; the engine goes on"
        log.log(logging.DEBUG if again else logging.WARNING, wanted, line)

    def _name(self, peer: str) -> str:
        url = self.config.service_url
        return {SERVICE: f"service {url}", "report": f"service {url}, reports"}.get(peer, f"engine {peer}")

    # --- the service
    async def _follow_service(self, client: httpx.AsyncClient) -> None:
        """One long poll, and the download of the version that it offers."""
        config, began, nonce = self.config, time.monotonic(), new_nonce()
        signed = {"nonce": nonce} if config.public_keys else {}
        headers = {"If-None-Match": self._answers.etag} if self._answers.etag else {}
        response = await ask(
            client,
            "GET",
            "/drafter/latest",
            params={"run": config.run, "wait": config.wait_seconds, **signed},
            headers=headers,
            timeout_seconds=config.request_timeout_seconds + config.wait_seconds,
        )
        status = response.status_code
        if (other := wire.other_api(response.headers, "the agent")) and other != self._answers.other:
            self._answers.other = other
            log.warning("%s: %s. It goes on", self._name(SERVICE), other)
        if status not in (200, 304, 404):
            raise ManifestError(f"GET /drafter/latest answered {status}: {response.refusal()[1]}")
        if config.public_keys is not None:
            if status == 200:
                config.public_keys.check(nonce, response.content, response.headers.get(SIGNATURE_HEADER))
            elif self.offer is not None or status == 304:
                raise SignatureError(f"signature: GET /drafter/latest answered {status}, which nobody signed")
        if status == 404 and not response.refusal()[0]:
            raise ManifestError(f"GET /drafter/latest answered 404, not of the service: {response.text[:300]}")
        manifest = _manifest(response, config.run) if status == 200 else None  # else a proxy's page were a contact
        self.metrics.last_contact.labels(SERVICE).set_to_current_time()
        if manifest is not None and await self._take(manifest, response.headers.get("ETag", "")):
            return
        if status == 404 and self.offer is None:
            await self._wait_for_a_drafter(client, response)
        if self.offer is not None:  # the engines had time to take it
            await self._keep({*self._answers.recent})
        await asyncio.sleep(max(0.0, _MIN_POLL_SECONDS - (time.monotonic() - began)))

    async def _wait_for_a_drafter(self, client: httpx.AsyncClient, response: Answer) -> None:
        """Log why there is none, once: a misspelt run answers like one whose trainer is still to come."""
        kind, why = response.refusal()
        if why == self._answers.waits:
            return
        level, text = logging.INFO, f"nothing to load yet, it is asked again: {why}"
        if kind == NO_SUCH_RUN and (others := await self._runs(client)):
            level = logging.WARNING
            text += f". This service has: {', '.join(others)}. Is the run's name (--run, DRAFTALIGN_RUN) misspelt?"
        self._reports.say(self._name(SERVICE), level, text)
        self._answers.waits = why

    async def _runs(self, client: httpx.AsyncClient) -> list[str]:
        """The runs that the token may read; none where the service does not say."""
        try:
            answer = await ask(client, "GET", "/runs")
            return [str(one["run"]) for one in answer.json()["runs"]] if answer.status_code == 200 else []
        except (AgentError, httpx.HTTPError, ValueError, TypeError, KeyError):
            return []

    async def _take(self, manifest: VerifiedManifest, etag: str) -> bool:
        """Download what the manifest offers; False where that is offered already."""
        newest, offer = max((follower.sequence for follower in self.followers.values()), default=-1), self.offer
        if offer is not None:
            if (manifest.sequence, manifest.version) == (offer.sequence, offer.version):
                return False
            newest = max(newest, offer.sequence + 1)  # what has this one's number is another version
        if manifest.sequence < newest:
            raise ManifestError(
                f"sequence {manifest.sequence}: expected {newest} or more after what was offered or loaded before; "
                "latest never goes back (was the service's state directory replaced? then restart the agent with an "
                "empty cache)"
            )
        try:
            release = await in_thread(self._download, manifest)
        except (NoRoomError, OSError) as error:
            if isinstance(error, NoRoomError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
                await self._keep({manifest.version} if offer is None else {manifest.version, offer.version})
            raise
        log.info("offered %s, sequence %d: %s", release.version, release.sequence, manifest.reason)
        version, answers = release.version, self._answers
        answers.recent = [*(v for v in answers.recent if v != version), version][-max(self.config.keep_versions, 1) :]
        # One that a request cannot hold is not sent back.
        self.offer, answers.etag = release, etag if etag.isascii() and len(etag) <= MAX_NAME else ""
        for event in self._offered.values():
            event.set()
        return True

    def _download(self, manifest: VerifiedManifest, again: bool = False) -> Release:
        config = self.config
        with httpx.Client(**_any_peer(config), **_service(config)) as client:
            return fetch_release(client, manifest, config.cache_dir, again=again, stopped=self._stopped.is_set)

    async def _keep(self, versions: set[str]) -> None:
        """Delete all versions but these and what engines use or would go back to."""
        # Asked here and not in the thread: the engines' tasks change what they use.
        in_use = versions.union(*(follower.versions_in_use() for follower in self.followers.values()))
        await in_thread(prune_cache, self.config.cache_dir, self.config.run, in_use)

    # --- the engines
    async def _follow_engine(self, follower: EngineFollower, offered: asyncio.Event) -> None:
        """One tick, then a pause that a new offer cuts short.

        An engine swaps before its next step, for which an idle one may wait for hours. Meanwhile counts are reported,
        and in an engine of this process a newer offer replaces the one that waits.
        """
        offered.clear()
        tick, newer = asyncio.ensure_future(follower.tick(self.offer)), asyncio.ensure_future(offered.wait())
        awaited = {tick} if self._engine is None else {tick, newer}
        try:
            while not tick.done():
                await asyncio.wait(awaited, timeout=self.config.report_seconds, return_when=asyncio.FIRST_COMPLETED)
                self._reports.counted.set()  # counts are reported also where the swap after them failed
                if newer in awaited and newer.done() and not tick.done():
                    return
            await tick
        finally:
            await _end([tick, newer])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.report_seconds):
                await offered.wait()


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended.

    Once is not enough: a cancellation that comes together with what a task waits for can be lost on its way through a
    library (`asyncio.wait_for` before Python 3.12, cpython issue 86296). The task would then go on and never end.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_SECONDS)


def _manifest(response: Answer, run: str) -> VerifiedManifest:
    """What the service offers. Raises ManifestError."""
    try:
        document = response.json()
    except ValueError as error:
        raise ManifestError(f"GET /drafter/latest did not answer JSON: {response.text[:200]!r}") from error
    return parse_manifest(document, run)


def _any_peer(config: AgentConfig) -> dict[str, Any]:
    """How an HTTP client reaches the service or an engine."""
    # trust_env: the environment's proxy leads to the internet, not to the machines of this cluster.
    tls = trusted(os.environ.get("DRAFTALIGN_CA_FILE"))
    # Cookies would be kept without a bound, and sent to every port of the host.
    none = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    return {"timeout": config.request_timeout_seconds, "trust_env": False, "verify": tls, "cookies": none}


def _service(config: AgentConfig) -> dict[str, Any]:
    """What a client of the service needs besides."""

    def signed_in(request: httpx.Request) -> httpx.Request:
        try:
            request.headers.update(bearer(config.token))
        except ReplyError as error:  # an OSError would be taken for the cache's disk, or end the agent's last report
            raise AgentError(str(error)) from error
        return request

    return {"base_url": config.service_url, "auth": signed_in}


def run_agent(config: AgentConfig) -> None:
    """Run an agent until SIGINT or SIGTERM; called outside the main thread, until the process ends."""
    agent = SwapAgent(config)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: agent.stop())
    asyncio.run(agent.run())
