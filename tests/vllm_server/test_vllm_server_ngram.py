"""A vLLM that drafts by n-grams: counted under that name, comparable with our replay of the same texts, left alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import eventually, start_agent
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts
from helpers.engine.server_load import logged
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from vllm_server.vllm_process import DEPTH, FORKED, VllmServer

from drafter.replay.ngram import ngram_replay
from examples.features import batch_of
from rl_hooks.agent.follower import EngineFollower


def test_ngram_speculation_is_counted_as_replay_counts_it(
    serve: Callable[..., RunningService], redis_url: str, drafters: Path, tmp_path: Path
) -> None:
    service = serve()
    service.register()
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": DEPTH,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    server = VllmServer(tmp_path / "vllm", drafters / "random", drafters, speculative=speculative, **FORKED)
    try:
        server.wait_until_healthy()
        assert server.state()["method"] == "ngram"
        refused = server.swap("trained", "an-eagle3-drafter")
        assert (refused.status_code, "speculates with ngram" in refused.text) == (409, True), refused.text
        # Repetition, which n-grams live on, and ordinary answers.
        prompts = [p * 3 for p in odd_prompts(24, seed=5)] + elicit_prompts(48, seed=5)
        with start_agent(service.url, server, cache=tmp_path / "cache", engine_kind="vllm") as agent:
            follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
            eventually(lambda: follower.loaded_version == "ngram")
            with ThreadPoolExecutor(6) as pool:
                texts = list(pool.map(lambda prompt: server.generate(prompt, max_tokens=40), prompts))
            after = server.counters()
            emitted = sum(len(text) - 1 for text in texts)
            counts = eventually(
                lambda: (c := follower.ledger.version_counts("ngram")).emitted_tokens == emitted and c, 30
            )
            with Redis.from_url(redis_url) as redis:
                store = Store(redis, "default")
                eventually(lambda: any(r.drafter_version == "ngram" and r.rounds for r in store.acceptances()))
        # Before it stops: vLLM's processes do not always end without one.
        assert server.log.read_text().count("Traceback") == 0
    finally:
        server.stop()
    model, _ = base_policy()
    pairs = [(p, t) for p, t in zip(prompts, texts, strict=True) if len(t) > 1]
    batch = batch_of(model, [logged(model, p, t) for p, t in pairs])
    packed = batch.input_ids, batch.loss_mask, batch.cu_seqlens
    expected = ngram_replay(*packed, depth=DEPTH, occurrence="earliest")
    live = emitted / counts.rounds
    print(f"n-gram: live {live:.4f} over {counts.rounds} rounds, replay {expected.alpha:.4f}")
    itself = 1 + after.accepted_tokens / after.rounds
    print(f"vLLM itself counted {after.rounds} rounds, those with drafts: α {itself:.3f}")
    assert after.rounds < counts.rounds
    assert live == pytest.approx(expected.alpha, rel=0.03)
