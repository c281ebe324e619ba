"""Which adapter speaks with an engine: chosen by name, because engines do not say what they are."""

from __future__ import annotations

from typing import Literal

import httpx

from rl_hooks.engines.protocol import Engine, SwapEngine

#: `protocol`: anything with draftalign's two calls. `vllm`: that, from the plugin.
EngineKind = Literal["protocol", "vllm"]


def connect(
    kind: EngineKind,
    url: str,
    client: httpx.AsyncClient,
    *,
    token: str | None = None,
    swap_timeout_seconds: float = 120.0,
) -> Engine:
    """Make the adapter for one engine; nothing is sent yet."""
    del kind
    return SwapEngine(url, client, token=token, swap_timeout_seconds=swap_timeout_seconds)
