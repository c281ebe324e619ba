"""Our drafter and vLLM's are the same function: α alone does not notice a layer that is off by one.

A request is recorded inside the worker: the features the target handed over, and every input and output of the
engine's drafter. Features are compared with a plain forward of the policy; each recorded call is then repeated with
our drafter and its own key-value cache, and must give the same `pre` and the same logits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import EOS_ID, base_policy, elicit_prompts
from helpers.engine.server_load import logged
from vllm_server.vllm_conformance import check_conformance
from vllm_server.vllm_process import DEPTH, VllmServer

from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.features import batch_of


@pytest.mark.parametrize("name", ["trained", "random"])
def test_features_pre_and_logits_are_those_of_our_drafter(
    server: VllmServer, drafters: Path, tmp_path: Path, name: str
) -> None:
    check_conformance(server, drafters, tmp_path, name)


def test_replay_gives_the_alpha_that_vllm_counted(server: VllmServer, trained: Eagle3Drafter) -> None:
    """Drafts are greedy, so the emitted tokens determine every round: replay is exact, not only in the mean."""
    assert server.swap("trained", "replayed").status_code == 200
    prompts = elicit_prompts(96, seed=21)
    before = server.counters()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda i: server.generate(prompts[i], temperature=1.0, seed=i), range(len(prompts))))
    after = server.counters()
    assert after.emitted_tokens is not None
    assert before.emitted_tokens is not None
    live_rounds, live_tokens = after.rounds - before.rounds, after.emitted_tokens - before.emitted_tokens
    assert sum(text[-1] == EOS_ID for text in texts) > 80
    model, _ = base_policy()
    batch = batch_of(model, [logged(model, p, t) for p, t in zip(prompts, texts, strict=True)])
    expected = replay(trained, batch, policy_of(model), depth=DEPTH, drafting="greedy")
    assert live_tokens == expected.total()["tokens"]
    low, high = expected.interval()
    alpha = live_tokens / live_rounds
    print(f"live alpha {alpha:.4f}, replay {expected.alpha:.4f} [{low:.4f}, {high:.4f}], {live_rounds} rounds")
    assert alpha == pytest.approx(expected.alpha, rel=0.01)
    assert low <= alpha <= high
