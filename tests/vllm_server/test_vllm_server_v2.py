"""vLLM's V2 model runner, on a CPU through Triton's interpreter: swaps, conformance, replay α."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import base_policy, elicit_prompts
from helpers.engine.server_load import logged
from vllm_server.vllm_conformance import check_conformance
from vllm_server.vllm_process import DEPTH, FORKED, V2_RUNNER, VllmServer

from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.features import batch_of


@pytest.fixture(scope="module")
def v2(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with the V2 runner and a random drafter."""
    server = VllmServer(tmp_path_factory.mktemp("vllm"), drafters / "random", drafters, **V2_RUNNER, **FORKED)
    try:
        server.wait_until_healthy()
        assert "Using V2 Model Runner" in server.log.read_text()
        yield server
    finally:
        server.stop()


def test_the_drafter_is_the_same_function_as_ours(v2: VllmServer, drafters: Path, tmp_path: Path) -> None:
    check_conformance(v2, drafters, tmp_path, "trained", every_row=False)


def test_a_swap_changes_alpha_as_replay_says_and_no_text(v2: VllmServer, trained: Eagle3Drafter) -> None:
    prompts, texts, alphas = elicit_prompts(12, seed=41), {}, {}
    for name in ("random", "trained"):
        assert v2.swap(name, f"v2-{name}").status_code == 200
        before = v2.counters()
        texts[name] = [v2.generate(prompt) for prompt in prompts]
        after = v2.counters()
        assert after.emitted_tokens is not None
        assert before.emitted_tokens is not None
        alphas[name] = (after.emitted_tokens - before.emitted_tokens) / (after.rounds - before.rounds)
    assert texts["random"] == texts["trained"]
    model, _ = base_policy()
    batch = batch_of(model, [logged(model, p, t) for p, t in zip(prompts, texts["trained"], strict=True)])
    result = replay(trained, batch, policy_of(model), depth=DEPTH, drafting="greedy")
    print(f"counted {alphas}, replayed {result.alpha:.4f}")
    assert alphas["trained"] == pytest.approx(result.alpha, rel=1e-9)
    assert alphas["random"] < 0.7 * alphas["trained"]


def test_a_drafter_that_cannot_do_is_refused(v2: VllmServer, drafters: Path) -> None:
    refused = v2.swap("nowhere", "x")
    assert 400 <= refused.status_code < 500
