"""A vLLM that follows the service by itself: swaps, features, the policy's head and counts, from inside the engine.

    DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_RUN=math python train.py        whatever makes the engines
    attach(llm, "http://service:8400", run="math")                                the same in code, for an `LLM`

The swap agent runs in a thread of the engine core, with one engine: this one. What touches the engine runs between two
of its steps (`rl_hooks.engines.vllm.core`). `register` is vLLM's general plugin `draftalign`: it runs in every process,
and does nothing more than give the workers their RPC methods where neither form is used.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.vllm.core import CoreLink, hook, wait_for_cores
from rl_hooks.engines.vllm.worker import RPC_METHODS, check_first_load

log = logging.getLogger("vllm.draftalign")


def register() -> None:
    """General plugin: workers get the RPC methods, the engine core its link. Runs in every process, perhaps twice.

    A worker whose drafter is of an agent's cache, and is not as it was verified, does not start.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    for method in RPC_METHODS:
        setattr(WorkerBase, method.__name__, method)
    check_first_load(WorkerBase)
    hook(lambda core: link_of(core, ServiceSettings.read(os.environ)))
    if os.environ.get("DRAFTALIGN_URL"):
        wait_for_cores()
    EngineCore.draftalign_attach = _attach


def attach(
    llm: Any,
    url: str,
    *,
    run: str = "default",
    token: str | None = None,
    sample_fraction: float = 0.05,
    tokens_per_minute: int = 60_000,
) -> None:
    """Let a `vllm.LLM` follow a run of the service from now on.

    Attach as soon as `llm` is made: an update of its weights before that is not known as one. `token`: of the service,
    scopes read and write; None: that of the environment (DRAFTALIGN_TOKEN), if there is one. `sample_fraction` of the
    requests are sent with their features, at most `tokens_per_minute`; give 0 where a trainer's hook sends them. Raises
    ValueError for settings out of range or an engine that follows already.
    """
    if token is None:  # of this process: the core's may have another environment
        token = os.environ.get("DRAFTALIGN_TOKEN") or None
    settings = asdict(ServiceSettings(url, run, token, sample_fraction, tokens_per_minute))
    client = llm.llm_engine.engine_core
    if hasattr(client, "engine_core"):  # in this process
        client.engine_core.draftalign_attach(settings)
    else:
        client.call_utility("draftalign_attach", settings)


def _attach(core: Any, settings: dict[str, Any]) -> None:
    if core._draftalign is not None:
        raise ValueError("this engine follows a service already: by DRAFTALIGN_URL, or it was attached before")
    link = link_of(core, ServiceSettings(**settings))
    if link is None:
        raise ValueError("this engine does not speculate, so there is no drafter to swap")
    core._draftalign = link
    link.first_look()


def link_of(core: Any, settings: ServiceSettings | None) -> CoreLink | None:
    """The link of an engine core that is to follow the service; None without a service or without speculation.

    Raises ValueError for an engine that cannot follow; it goes on as it is.
    """
    if settings is None:
        return None
    config = core.vllm_config
    if config.speculative_config is None:
        log.info("draftalign: this engine does not speculate, and follows nothing")
        return None
    if config.parallel_config.distributed_executor_backend == "external_launcher" and (
        config.parallel_config.world_size > 1
    ):
        raise ValueError("with an external launcher its ranks are engines of their own, which could not swap as one")
    # They ask for httpx.
    from rl_hooks.agent.in_process import InProcessAgent, drafter_directory, engine_name
    from rl_hooks.engines.vllm.engine import CoreEngine

    name = engine_name(config.parallel_config.data_parallel_index)
    agent = InProcessAgent(settings, drafter_directory(os.environ), name, CoreEngine)
    fraction = settings.sample_fraction if config.speculative_config.method == "eagle3" else 0.0
    return CoreLink(core, fraction, agent.begin, agent.stop, agent.join)
