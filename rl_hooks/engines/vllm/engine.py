"""An engine core as the agent's thread in it drives it: what `rl_hooks.engines.vllm.plugin` answers, without HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_hooks.engines.counting.counters import Snapshot
from rl_hooks.engines.protocol import EngineState, engine_state, failure
from rl_hooks.engines.vllm.core import CoreLink
from rl_hooks.engines.vllm.swapper import Swapper, SwapProblem
from rl_hooks.errors import MetricsError
from rl_hooks.format.release import Release


class CoreEngine:
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
