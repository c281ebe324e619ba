"""A SGLang that follows the service by itself: swaps, features and counts, from inside its scheduler.

    DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_RUN=math python -m sglang.launch_server ...

`register` is SGLang's plugin `draftalign`, in every process of a server. Without the variable it counts rounds by step
for an agent beside the server, and does nothing more.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rl_hooks.engines.sglang import rounds

log = logging.getLogger("draftalign.sglang")


def register() -> None:
    """Entry point in group `sglang.srt.plugins`."""
    processor = rounds.register()
    if processor is None or not os.environ.get("DRAFTALIGN_URL"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rl_hooks.engines.settings import ServiceSettings
    from rl_hooks.engines.sglang import (  # torch and all that they need are loaded only where they are wanted
        inside,
        tap,
    )

    try:
        settings = ServiceSettings.read(os.environ)
    except ValueError as error:
        log.error("draftalign: this server does not follow the service: %s", error)
        return
    assert settings is not None  # noqa: S101 - DRAFTALIGN_URL is set

    def agent() -> inside.EngineAgent:
        from rl_hooks.agent.in_process import InProcessAgent, drafter_directory, engine_name  # it asks for httpx

        def engine(url: str, link: inside.SchedulerLink, _: Path) -> inside.SchedulerEngine:
            return inside.SchedulerEngine(url, link)

        return InProcessAgent(settings, drafter_directory(os.environ), engine_name(0), engine, log)

    if settings.sample_fraction == 0:
        inside.register(HookRegistry, HookType, inside.SchedulerLink(settings, agent))
        return
    feature_tap = tap.SGLangTap(settings, lambda: served.rank is not None)

    def tell(newest: int | None) -> None:
        feature_tap.newest = (newest,)

    served = inside.SchedulerLink(
        settings, agent, lambda: feature_tap.policy_version, tell, lambda: feature_tap.has_begun
    )
    inside.register(HookRegistry, HookType, served)
    tap.register(HookRegistry, HookType, processor, feature_tap)
