"""The swap agent inside an engine: a thread that joins the run, then follows the service as one beside it would."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rl_hooks.agent.agent import AgentConfig, SwapAgent
from rl_hooks.agent.download import IN_PROCESS
from rl_hooks.engines.counters import Snapshot
from rl_hooks.engines.protocol import EngineState, engine_state, failure
from rl_hooks.engines.tap import ServiceSettings
from rl_hooks.engines.vllm.core import CoreLink
from rl_hooks.engines.vllm.swapper import Swapper, SwapProblem
from rl_hooks.errors import MetricsError
from rl_hooks.release import PublicKeys, Release
from rl_hooks.sending.exchange import Origin, RunService
from rl_hooks.sending.standing import newest_policy

log = logging.getLogger("vllm.draftalign")

#: How long the first step of an engine waits for the service, once.
_FIRST_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 5.0


class InProcessAgent:
    """The agent of one engine core: joins the run, starts the tap, then follows the service in a thread."""

    def __init__(self, settings: ServiceSettings, directory: Path, name: str) -> None:
        self._settings = settings
        self._config = AgentConfig(
            settings.url,
            (f"{IN_PROCESS}{name}",),
            run=settings.run,
            cache_dir=directory,
            agent_id=name,
            token=settings.token,
            public_keys=PublicKeys.of_environment(os.environ),
        )
        self._agent: SwapAgent | None = None
        self._stopped, self._asked = threading.Event(), threading.Event()
        self._joining: Future[list[Any]] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, link: CoreLink) -> None:
        """Called once, before the engine's first step, which waits for the service's first answer, but not for long."""
        self._thread = threading.Thread(target=self._follow, args=(link,), name="draftalign-agent", daemon=True)
        self._thread.start()
        self._asked.wait(_FIRST_SECONDS)

    def stop(self) -> None:
        """The engine ends: the last counts are reported from now on."""
        self._stopped.set()
        if self._agent is not None:
            self._agent.stop()
        if self._joining is not None:
            self._joining.cancel()  # no further step will run it

    def join(self, timeout_seconds: float) -> None:
        """Wait until it has stopped."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _follow(self, link: CoreLink) -> None:
        def join() -> None:
            try:
                newest = self.newest_policy()
                joining = self._joining = link.call("draftalign_follow", asdict(self._settings), newest)
            finally:
                self._asked.set()
            with contextlib.suppress(CancelledError):  # the engine has ended
                joining.result()

        config = self._config

        def follow() -> None:
            agent = self._agent = SwapAgent(config, InProcessEngine(config.engine_urls[0], link, config.cache_dir))
            if not self._stopped.is_set():
                log.info("draftalign: this engine follows run %r of %s", config.run, config.service_url)
                asyncio.run(agent.run())

        for what, act in ((f"joining run {config.run!r}", join), ("following the service", follow)):
            while not link.guard(what, act):  # the service, or a certificate, may come later
                if self._stopped.wait(_RETRY_SECONDS):
                    return

    def newest_policy(self) -> int | None:
        """The newest policy version of the run that the service has seen; None for a new run. Raises OSError."""
        settings = self._settings
        return newest_policy(RunService(Origin.parse(settings.url), settings.run, settings.token or None))


class InProcessEngine:
    """An engine core as the agent uses it: `Engine` without HTTP."""

    def __init__(self, url: str, link: CoreLink, directory: Path) -> None:
        self.url, self._link = url, link
        self._swapper = Swapper(self, directory)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """What `Swapper` needs of vLLM's engine client."""
        return await asyncio.wrap_future(self._link.call(method, *args))

    async def state(self) -> EngineState:
        """What is loaded now, as the last look between two steps found it."""
        state = self._link.state
        return replace(engine_state(self.url, state), policy_version=state["policy_version"])

    async def swap(self, release: Release) -> str | None:
        """Swap before the next step of the engine; returns once that has come."""
        try:
            answer = await self._swapper.swap(str(release.path), release.version, release.sha256s)
        except SwapProblem as problem:
            raise failure(problem.status)(f"{problem.title}: {problem}") from problem
        return str(answer["sha256"])

    async def snapshot(self) -> Snapshot:
        """Its rounds by drafter and policy version."""
        snapshot = self._link.snapshot()
        if snapshot is None:
            raise MetricsError("this vLLM's scheduler is not known, so its rounds are not counted")
        return snapshot
