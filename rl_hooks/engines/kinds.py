"""The adapter for an engine, chosen by name: an engine does not tell its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import httpx

from rl_hooks.engines.protocol import Engine, SwapEngine
from rl_hooks.engines.sglang.adapter import SGLangEngine

#: `protocol`: anything with draftalign's two calls. `vllm`: that, from the plugin. `sglang`: SGLang's own calls.
EngineKind = Literal["protocol", "vllm", "sglang"]


def connect(
    kind: EngineKind,
    url: str,
    client: httpx.AsyncClient,
    *,
    cache: Path,
    token: str | None = None,
    swap_timeout_seconds: float = 120.0,
) -> Engine:
    """Make the adapter for one engine; nothing is sent yet. `cache` is the run's directory in the agent's cache."""
    if kind == "sglang":
        return SGLangEngine(url, client, cache, token=token, swap_timeout_seconds=swap_timeout_seconds)
    return SwapEngine(url, client, token=token, swap_timeout_seconds=swap_timeout_seconds)
