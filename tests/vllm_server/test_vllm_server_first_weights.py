"""A real `vllm.LLM` whose trainer brings the policy before the engine's first step: made-up weights, a resumed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import EOS_ID, base_policy, elicit_prompts
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file
from vllm_server.test_vllm_server_in_process import LlmProcess, _ok, _rollouts, moved

from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import BASE_POLICY

_PROMPTS = elicit_prompts(12, seed=3)


@pytest.fixture
def start(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> tuple[RunningService, Callable[..., LlmProcess]]:
    service = serve()

    def started(name: str, **dummy: str) -> LlmProcess:
        environment: dict[str, Any] = {
            "DRAFTALIGN_URL": service.url,
            "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
            "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
            "DRAFTALIGN_DRAFTER_DIR": str(tmp_path / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **dummy,
        }
        return LlmProcess(tmp_path / name, drafters / "random", forked=True, **environment)

    return service, started


def test_weights_that_are_brought_before_the_first_step_are_the_runs_in_a_new_run_and_in_one_that_goes_on(
    start: tuple[RunningService, Callable[..., LlmProcess]], drafters: Path, trained: Eagle3Drafter, tmp_path: Path
) -> None:
    service, started = start
    llm = started("first", DRAFTALIGN_TESTS_DUMMY="1")
    try:
        # --- vLLM has made the policy up, and has read the drafter; the trainer brings the policy by vLLM's session
        state = llm.state()
        assert (state["problem"], state["takes"]) == (None, "eagle3")
        _session(llm, BASE_POLICY)
        begin = llm.rounds()
        texts = llm.generate(_PROMPTS)
        model, _ = base_policy()
        own = model.generate(torch.tensor([_PROMPTS[0]]), max_new_tokens=40, do_sample=False, eos_token_id=EOS_ID)
        assert own[0, len(_PROMPTS[0]) :].tolist()[: len(texts[0])] == texts[0]
        before = llm.rounds()
        record = eventually(lambda: _ok(service, "/runs/default"), 30)
        assert record["policy_version"] == 0

        # --- a drafter is published while a session is open: it is read, and waits for the end of the session
        version = publish(service, drafters / "trained", trained)
        llm.ask("start_update")
        moved(tmp_path / "p1", 5, head=True)
        llm.ask("update", str(tmp_path / "p1"), 0, 2)
        eventually(lambda: llm.ask("rpc", "draftalign_staged").get("version") == version, 30)
        eventually(lambda: llm.ask("rpc", "draftalign_staged")["done"], 30)
        llm.ask("update", str(tmp_path / "p1"), 1, 2)
        assert llm.state()["version"] is None
        llm.ask("finish_update")
        llm.generate(_PROMPTS)
        assert llm.state()["version"] == version
        after = llm.rounds()
        alphas = [1 + (b[1] - a[1]) / (b[0] - a[0]) for a, b in ((begin, before), (before, after))]
        print("α", alphas)
        assert alphas[0] < 1.5 < 2.0 < alphas[1]
        _check_head(service, tmp_path / "p1", 1)
        eventually(lambda: _rollouts(service) == Counter({0: len(_PROMPTS), 1: len(_PROMPTS)}), 60)
    finally:
        llm.stop()
    assert "no features are sent" not in llm.text()

    # --- the run goes on in an engine that has started again: with the policy of the beginning, which nobody is sent
    llm = started("second")
    try:
        moved(tmp_path / "p2", 6, head=True)
        llm.ask("load_past_the_core", str(tmp_path / "p2"))
        llm.generate(_PROMPTS)
        _check_head(service, tmp_path / "p2", 2)
    finally:
        llm.stop()
    assert "no features are sent" not in llm.text()
    assert _rollouts(service)[2] == len(_PROMPTS)


def _session(llm: LlmProcess, path: Path) -> None:
    llm.ask("start_update")
    for part in range(2):
        llm.ask("update", str(path), part, 2)
    llm.ask("finish_update")


def _check_head(service: RunningService, policy: Path, version: int) -> None:
    eventually(lambda: _ok(service, "/runs/default")["latest_head"] == version, 30)
    head = load_file(service.layout.head("default", version))["lm_head"].float()
    assert torch.equal(head, load_file(policy / "model.safetensors")["model.embed_tokens.weight"].float())
