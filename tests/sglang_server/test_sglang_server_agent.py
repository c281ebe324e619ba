"""Service, swap agent and SGLang, all real, under load, beside a trainer that writes the policy."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.agent_fixtures import eventually, start_agent
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts
from helpers.engine.server_load import Load, alpha, edited, logged, publish
from helpers.service.service_fixtures import RunningService
from sglang_server.sglang_process import DEPTH, PLUGIN, SGLangProcess
from sglang_server.test_sglang_server_swap import other_words, swap

from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.features import batch_of
from examples.policy import BASE_POLICY
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.engines.counting.counters import Counts


def rounds_of(follower: EngineFollower, version: str) -> int:
    return follower.ledger.version_counts(version).rounds


def counted(follower: EngineFollower, version: str, policy: int) -> int:
    """Rounds that were booked for a drafter under a policy version."""
    found = [b for b in follower.ledger.buckets() if (b.drafter_version, b.policy_version) == (version, policy)]
    return sum(bucket.counts.rounds for bucket in found)


def settled(follower: EngineFollower, version: str) -> Counts:
    """What is booked for a drafter once nothing more comes."""
    before = follower.ledger.version_counts(version)
    while True:
        time.sleep(2)
        now = follower.ledger.version_counts(version)
        if now.rounds == before.rounds:
            return now
        before = now


def write_policy(server: SGLangProcess, policy: Path, version: str) -> None:
    """As a trainer does."""
    said = server.run_beside(PLUGIN / "trainer.py", server.url, str(policy / "model.safetensors"), version)
    assert "written\n" in said, said
    server.flush_cache()


def test_the_agent_keeps_a_real_sglang_on_the_right_drafter(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    prompts = elicit_prompts(24, seed=4)  # one kind of traffic: a canary compares over time
    swap(server, drafters, drafters / "random", "before-the-agent")
    load = Load(server, prompts)
    options: dict[str, Any] = {"engine_kind": "sglang", "canary": CanaryRule(rounds=200)}
    with start_agent(service.url, server, cache=drafters / "agent", **options) as agent:
        with load.running():
            good = publish(service, drafters / "trained", trained)
            follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
            eventually(lambda: follower.loaded_version == good, 60)
            eventually(lambda: rounds_of(follower, good) > 400, 120)

            worse = publish(service, drafters / "random", trained)
            eventually(lambda: follower.loaded_version == worse, 60)
            eventually(lambda: follower.loaded_version == good, 120)
            eventually(lambda: "canary_rolled_back" in service.client.get("/drafters").text)

            labels = {"engine": server.url, "outcome": "refused"}
            publish(service, edited(drafters, other_words), trained)
            refused = "draftalign_agent_swaps_total"
            eventually(lambda: (agent.metrics.registry.get_sample_value(refused, labels) or 0) >= 1, 60)
            load.wait_for(8)
            assert follower.loaded_version == good
        assert load.failures == []
        assert load.changed == {}
        under_load = [follower.ledger.version_counts(version) for version in (good, worse)]
        print(f"alpha {[counts.alpha for counts in under_load]}; {load.served} requests")
        assert under_load[0].alpha > 1.5 > 1.2 > under_load[1].alpha

        server.flush_cache()
        counted_then, measured_then = settled(follower, good), server.counters()
        best = alpha(server, prompts)
        measured = server.counters().since(measured_then, 0.0)
        eventually(lambda: rounds_of(follower, good) >= counted_then.rounds + measured.rounds, 30)
        own = follower.ledger.version_counts(good).since(counted_then, 0.0)
    assert (own.rounds, own.emitted_tokens) == (measured.rounds, measured.emitted_tokens)
    assert own.alpha == pytest.approx(best)


def answers_over_a_swap(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path, *, left_out: int
) -> None:
    """They are counted by the drafter of each round; `left_out` are the rounds of each, after the swap, that are not.

    All are greedy, so an answer of as many tokens as there were at the swap tells how many rounds they took.
    """
    prompts = elicit_prompts(4, seed=4)
    cache = drafters / "agent-beside-long-answers"
    with start_agent(service.url, server, cache=cache, engine_kind="sglang", canary=CanaryRule(rounds=40)) as agent:
        dead = publish(service, drafters / "random", trained)
        follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
        eventually(lambda: follower.loaded_version == dead, 60)
        said: list[dict[str, Any]] = [{} for _ in prompts]

        def ask(client: int) -> None:
            for facts in server.stream(prompts[client], max_tokens=200):
                said[client] = facts

        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(ask, client) for client in range(len(prompts))]
            eventually(lambda: all(facts.get("completion_tokens", 0) > 20 for facts in said))
            server.post("/pause_generation", mode="in_place")  # the agent lets it stand
            time.sleep(1)  # what was computed arrives
            tokens_then = [facts["completion_tokens"] for facts in said]
            assert not any(future.done() for future in asked), "all run over the swap"
            good = publish(service, drafters / "trained", trained)
            eventually(lambda: follower.loaded_version == good, 60)
            server.post("/continue_generation")
            for future in asked:
                future.result()
        found = {version: settled(follower, version) for version in (dead, good)}
        aside = follower.ledger.unattributed_rounds
    swap(server, drafters, drafters / "random", "dead-again")
    rounds_then = [
        server.ask(prompt, max_tokens=tokens, stop=False)["meta_info"]["spec_verify_ct"]
        for prompt, tokens in zip(prompts, tokens_then, strict=True)
    ]
    rounds = sum(facts["spec_verify_ct"] for facts in said) - sum(rounds_then)
    tokens = sum(facts["completion_tokens"] for facts in said) - sum(tokens_then)
    print(f"swapped after {tokens_then}; then {tokens} tokens in {rounds} rounds; booked {found}, aside {aside}")
    assert sum(rounds_then) - aside <= found[dead].rounds <= sum(rounds_then)
    many = left_out * len(prompts)
    assert rounds - many - aside <= found[good].rounds <= rounds - many
    assert many <= tokens - (found[good].emitted_tokens or 0) <= (DEPTH + 1) * (many + aside)


def test_long_answers_that_run_over_a_swap_are_counted_by_the_drafter_of_each_round(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    answers_over_a_swap(server, service, trained, drafters, left_out=1)


def test_a_trainer_writes_the_policy_and_the_drafter_stays(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path, tmp_path: Path
) -> None:
    """Through `/update_weights_from_tensor` with `weight_version`, which is taken for the policy version."""
    model, _ = base_policy()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if "layers.3.mlp" in name:
                parameter.mul_(1.3)
    moved.save_pretrained(tmp_path / "moved")
    prompts = odd_prompts(12, seed=5)
    swap(server, drafters, drafters / "random", "before-the-agent")
    with start_agent(service.url, server, cache=drafters / "agent-beside-a-trainer", engine_kind="sglang") as agent:
        good = publish(service, drafters / "trained", trained)
        follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
        eventually(lambda: follower.loaded_version == good, 60)
        try:
            write_policy(server, tmp_path / "moved", "7")
            eventually(lambda: follower.seen.snapshot is not None and follower.seen.snapshot.policy_version == 7)
            answers = [server.ask(prompt) for prompt in prompts]
            rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
            eventually(lambda: counted(follower, good, 7) >= rounds, 30)
        finally:
            write_policy(server, BASE_POLICY, "default")
    texts = [answer["output_ids"] for answer in answers]
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = moved(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text
    batch = batch_of(moved, [logged(moved, p, t) for p, t in zip(prompts, texts, strict=True)])
    total = replay(trained, batch, policy_of(moved), depth=DEPTH, drafting="greedy").total()
    print(f"policy 7: {rounds} rounds, replay {total['rounds']}")
    assert rounds == total["rounds"] == counted(follower, good, 7)
