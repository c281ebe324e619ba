"""A swap through an engine's RPC calls: stage on every worker, then apply on every worker in one call.

The HTTP plugin does it through vLLM's engine client, the in-process agent through the engine core's own executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rl_hooks.format.drafter import MODEL_FILE

_POLL_SECONDS: Final = 0.02
_STAGE_TIMEOUT_SECONDS: Final = 600.0
_ASLEEP: Final = "the engine sleeps or is paused"


class SwapProblem(Exception):  # noqa: N818 - it becomes a problem document
    """An answer other than 200: becomes a problem document."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


#: Title of a worker's failure by its status. Where ranks failed in several ways, the first of these is reported.
_FAILURES: Final = {412: "Other bytes", 409: "Drafter refused", 503: "Engine error"}


def answered(answers: Sequence[Any]) -> list[Any]:
    """The answers of all ranks to a call; raises SwapProblem where one of them failed."""
    failed = [answer for answer in answers if isinstance(answer, dict) and "error" in answer]
    for status, title in _FAILURES.items():
        for answer in failed:
            if answer["status"] == status:
                raise SwapProblem(status, title, str(answer["error"])[:600])
    return list(answers)


class Swapper:
    """Swaps through an engine client's calls to its workers; one swap at a time."""

    def __init__(self, engine: Any, directory: Path | None) -> None:
        self._engine = engine
        self._directory = None if directory is None else directory.resolve()  # as the paths that are compared with it
        self._lock = asyncio.Lock()

    async def state(self) -> dict[str, Any]:
        """The state of the drafter, from a rank that has one (in a pipeline only the last has)."""
        asleep = await self._sleeps()
        # A sleeping engine drafts nothing, so the drafter of its counts is known without a look at the weights. The
        # workers are asked because a swap may have come through another API process.
        state = joint_state(await self._call("draftalign_state", asleep))
        return state | {"problem": _ASLEEP} if asleep else state

    async def swap(self, path: str, version: str, expected: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Stage on every worker; when all have accepted the drafter, swap on every worker in one call.

        `expected`: SHA-256 by file name, where they are known; files with other digests are not loaded.
        """
        directory = self._resolve(path)
        self._check_cores()
        async with self._lock:
            await self._check_awake()
            await self._call("draftalign_stage", str(directory), version, dict(expected or {}))
            sha256 = await self._await_staged(version)
            # Each worker has compared it, but another API process may have staged other bytes meanwhile.
            if expected and sha256 != expected[MODEL_FILE]:
                detail = f"the workers read {sha256} for {version}, {expected[MODEL_FILE]} was asked for; ask again"
                raise SwapProblem(412, "Other bytes", detail)
            await self._check_awake()  # it may have been put to sleep while the drafter was staged
            results = await self._call("draftalign_apply", version, sha256)
        return {"version": version, "previous": results[0]["previous"], "sha256": sha256}

    def _resolve(self, path: str) -> Path:
        """The requested directory, if it lies under the configured one. Symbolic links are resolved first."""
        if self._directory is None:
            raise SwapProblem(503, "Swapping is off", "set DRAFTALIGN_DRAFTER_DIR to the directory drafters come from")
        try:
            resolved = (self._directory / path).resolve()
            if not resolved.is_relative_to(self._directory) or resolved == self._directory:
                # The same answer whether it exists or not: it must not reveal the file system.
                raise SwapProblem(
                    403,
                    "Not allowed",
                    f"path must name a directory under {self._directory}, this server's DRAFTALIGN_DRAFTER_DIR: the "
                    "agent's --cache-dir must lie there too",
                )
            if not resolved.is_dir():
                raise SwapProblem(404, "No such drafter", f"{resolved} is not a directory on this machine")
        except (ValueError, OSError) as error:  # a NUL byte, a lone surrogate, too long
            raise SwapProblem(422, "Invalid request", f"path is no path: {type(error).__name__}") from error
        return resolved

    def _check_cores(self) -> None:
        core = getattr(self._engine, "engine_core", None)
        if len(getattr(core, "core_engines", ())) > 1 and not hasattr(core, "call_utility_all_async"):
            raise SwapProblem(
                503,
                "Several engine cores",
                "this vLLM (0.31, say) tells only what its first data-parallel core answers, so a swap that fails in "
                "another one would not be seen: take vLLM 0.32, or start a server for each core",
            )

    async def _check_awake(self) -> None:
        # A paused engine (RL's weight sync) can take a drafter; a sleeping one has given its memory away. vLLM answers
        # "sleeping" to both, so engines that can sleep must be awake and running.
        if await self._sleeps():
            raise SwapProblem(503, "Engine asleep", f"{_ASLEEP}; ask again when it runs")

    async def _sleeps(self) -> bool:
        can_sleep = getattr(getattr(self._engine, "model_config", None), "enable_sleep_mode", False)
        return bool(can_sleep and await self._engine.is_sleeping())

    async def _await_staged(self, version: str) -> str:
        deadline = time.monotonic() + _STAGE_TIMEOUT_SECONDS
        while True:
            ranks = await self._call("draftalign_staged")
            if all(rank["done"] for rank in ranks):
                break
            if time.monotonic() > deadline:
                raise SwapProblem(503, "Too slow", f"reading {version} took over {_STAGE_TIMEOUT_SECONDS:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)
        digests = {rank["sha256"] for rank in ranks if rank["sha256"]}
        if len(digests) != 1:
            raise SwapProblem(503, "Drafter not read", f"workers read different files for {version}: {sorted(digests)}")
        return str(digests.pop())

    async def _call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        try:
            return answered(await self._ask(method, arguments))
        except SwapProblem:
            raise
        except Exception as error:  # vLLM's own, of any kind
            raise SwapProblem(503, "Engine error", f"{method}: {str(error)[:500]}") from error

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """What every rank of every data-parallel core answers: `collective_rpc` returns the first core's answers."""
        ask_all = getattr(getattr(self._engine, "engine_core", None), "call_utility_all_async", None)
        if ask_all is None:
            return list(await self._engine.collective_rpc(method, args=arguments))
        cores = await ask_all("collective_rpc", method, None, arguments, None)
        return [answer for answers in cores for answer in answers]


def joint_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of an engine from those of its workers (in a pipeline only the last has a drafter)."""
    drafting = [s for s in states if "shared_modules" in s]
    state = dict((drafting or states)[0])
    state["loaded"] = bool(drafting) and all(s["loaded"] for s in drafting)
    if len({(s["version"], s["sha256"]) for s in drafting}) > 1:
        versions = [s["version"] for s in drafting]
        state |= {"loaded": False, "problem": f"workers hold different drafters ({versions}); push one again"}
    return state
