"""What an engine has collected reaches the service when no step follows, and when the engine ends."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import elicit_prompts
from helpers.service.service_fixtures import RunningService
from vllm_server.test_vllm_server_in_process import LlmProcess, _rollouts
from vllm_server.vllm_process import FORKED, VllmServer

_PROMPTS = elicit_prompts(12, seed=3)


def _follows(service: RunningService, tmp_path: Path) -> dict[str, Any]:
    return {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
        "DRAFTALIGN_DRAFTER_DIR": str(tmp_path / "cache"),
    }


def test_an_engine_in_this_process_sends_its_last_requests_idle_or_collected_and_says_what_is_lost(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    """No step follows the last one of `generate`, and vLLM up to 0.30 does not shut such an engine down."""
    service = serve()
    environment = _follows(service, tmp_path) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    llm = LlmProcess(tmp_path / "collected", drafters / "random", forked=True, **environment)
    try:
        llm.generate(_PROMPTS)
        eventually(lambda: _rollouts(service) == Counter({0: len(_PROMPTS)}), 60)
        llm.generate(_PROMPTS)
        llm.ask("let_go")
        assert _rollouts(service) == Counter({0: 2 * len(_PROMPTS)})
    finally:
        llm.stop()
    assert llm.process.returncode == 0, llm.text()[-3000:]

    llm = LlmProcess(tmp_path / "lost", drafters / "random", forked=True, **environment)
    try:
        llm.generate(_PROMPTS)
        eventually(lambda: _rollouts(service).total() == 3 * len(_PROMPTS), 60)
        service.stop()
        llm.generate(_PROMPTS)
    finally:
        llm.stop()
    assert llm.process.returncode == 0, llm.text()[-3000:]
    assert re.search(r"closed with \d+ requests that were not sent", llm.text()), llm.text()[-3000:]


def test_an_engine_core_of_its_own_process_sends_its_last_requests_idle_and_at_its_end(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    service = serve()
    llm = LlmProcess(tmp_path / "llm", drafters / "random", forked=True, **_follows(service, tmp_path))
    try:
        llm.generate(_PROMPTS)
        eventually(lambda: _rollouts(service) == Counter({0: len(_PROMPTS)}), 60)
        llm.generate(_PROMPTS)
    finally:
        llm.stop()
    assert llm.process.returncode == 0, llm.text()[-3000:]
    assert _rollouts(service) == Counter({0: 2 * len(_PROMPTS)})


def test_a_server_that_is_told_to_end_sends_what_it_has_collected(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    """Without --shutdown-timeout vLLM kills an engine core in the instant in which it tells it to end."""
    service = serve()
    server = VllmServer(tmp_path, drafters / "random", drafters, **_follows(service, tmp_path), **FORKED)
    try:
        server.wait_until_healthy()
        server.generate([5], max_tokens=1)
        eventually(lambda: _rollouts(service).total() == 1, 60)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(server.generate, _PROMPTS))
        server.process.terminate()
        server.process.wait(60)
    finally:
        server.stop()
    assert _rollouts(service).total() == 1 + len(_PROMPTS), server.log_end()
