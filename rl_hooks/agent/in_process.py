"""The swap agent inside an engine: a thread that joins the run, then follows the service as one beside it would."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Final, Protocol

from rl_hooks.agent.agent import AgentConfig, SwapAgent
from rl_hooks.agent.download import IN_PROCESS
from rl_hooks.durable import at_home
from rl_hooks.engines.protocol import Engine
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.format.release import PublicKeys
from rl_hooks.sending.exchange import Origin, RunService
from rl_hooks.sending.standing import newest_policy

log = logging.getLogger("vllm.draftalign")

#: How long the first step of an engine waits for the service, once.
_FIRST_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 5.0


class EngineLink(Protocol):
    """The engine of this process, as its agent's thread sees it."""

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        """Call `act`; returns whether it worked. A failure is logged."""

    def join(self, settings: ServiceSettings, newest: int | None) -> Future[Any]:
        """Start the tap. `newest`: the version that the service knows, None for a new run."""


class InProcessAgent:
    """The agent of one engine: joins the run, starts the tap, then follows the service in a thread.

    `engine`: makes the engine of an address, a link and the directory of drafters. `log`: what the engine shows.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        directory: Path,
        name: str,
        engine: Callable[[str, Any, Path], Engine],
        log: logging.Logger = log,
    ) -> None:
        self._settings, self._engine, self._log = settings, engine, log
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
        self._joining: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def start(self, link: EngineLink) -> None:
        """Called once, before the engine's first step."""
        self._thread = threading.Thread(target=self._follow, args=(link,), name="draftalign-agent", daemon=True)
        self._thread.start()

    def begin(self, link: EngineLink) -> None:
        """`start`, and wait for the service's first answer, but not for long."""
        self.start(link)
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

    def _follow(self, link: EngineLink) -> None:
        def join() -> None:
            try:
                newest = self.newest_policy()
                joining = self._joining = link.join(self._settings, newest)
            finally:
                self._asked.set()
            with contextlib.suppress(CancelledError):  # the engine has ended
                joining.result()

        config = self._config

        def follow() -> None:
            agent = self._agent = SwapAgent(config, self._engine(config.engine_urls[0], link, config.cache_dir))
            if not self._stopped.is_set():
                self._log.info("draftalign: this engine follows run %r of %s", config.run, config.service_url)
                asyncio.run(agent.run())

        for what, act in ((f"joining run {config.run!r}", join), ("following the service", follow)):
            while not link.guard(what, act):  # the service, or a certificate, may come later
                if self._stopped.wait(_RETRY_SECONDS):
                    return

    def newest_policy(self) -> int | None:
        """The newest policy version of the run that the service has seen; None for a new run. Raises OSError."""
        settings = self._settings
        return newest_policy(RunService(Origin.parse(settings.url), settings.run, self._config.token))


def drafter_directory(environment: Mapping[str, str]) -> Path:
    """Where published drafters are downloaded to; ranks on other machines must see the same directory."""
    given, caches = environment.get("DRAFTALIGN_DRAFTER_DIR"), environment.get("XDG_CACHE_HOME")
    cache = Path(caches) if caches else Path.home() / ".cache"
    found = at_home(given) if given else cache / "draftalign"
    return found.resolve()  # a home is a symbolic link on many a cluster


def engine_name(rank: int) -> str:
    """A name that no other engine ever has. `rank`: the data-parallel one."""
    # A container that starts again has the same host name and process number, and another engine's counts.
    return f"{socket.gethostname()[:60]} {os.getpid()} dp{rank} {uuid.uuid4().hex[:8]}"
