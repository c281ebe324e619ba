"""Live traffic of a real SGLang trains its drafter: features come out exactly, by policy version, and replay agrees."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file
from sglang_server.sglang_process import DEPTH, PLUGIN, SGLangProcess
from sglang_server.test_sglang_server_swap import replayed_of

from drafter.batch import RolloutBatch, load_batch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.policy import AUX_LAYERS, BASE_POLICY
from rl_hooks import wire

TOLERANCE = 1e-4
#: Of one rounding to bfloat16, in which states travel.
ROUNDING = 2.0**-8
#: As on a GPU: schedules overlap. Prompts are cut into chunks, and a cache too small for all preempts requests.
BUSY = ("--chunked-prefill-size", "16", "--max-total-tokens", "180", "--schedule-conservativeness", "0.1")


@pytest.fixture(params=["plain", "overlapping", "two ranks"])
def fleet(
    request: pytest.FixtureRequest, serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> Iterator[tuple[RunningService, SGLangProcess]]:
    """A service without any run, and a server that sends it all of its traffic."""
    service = serve(drafting="greedy", depth=DEPTH)
    environment = {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
    }
    busy = request.param == "overlapping"
    options = BUSY if busy else ("--tp-size", "2") if request.param == "two ranks" else ()
    environment |= {"DRAFTALIGN_TESTS_OVERLAP": "1"} if busy else {}
    environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if request.param == "two ranks" else {}
    process = SGLangProcess(tmp_path, drafters / "trained", drafters, *options, **environment)
    try:
        process.wait_until_ready()
        yield service, process
    finally:
        process.stop()


def texts_of(batch: RolloutBatch) -> list[tuple[int, ...]]:
    """The tokens of each rollout."""
    return [tuple(batch.input_ids[a:b].tolist()) for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]


def is_asked(text: tuple[int, ...]) -> bool:
    """Whether this test asked for it. SGLang's first request is its own; it is sent if the service has answered."""
    return text[:3] != (10, 11, 12)


def arrived(service: RunningService, server: SGLangProcess, count: int, policy: int) -> list[RolloutBatch]:
    """The files of a policy version in the spool, once they hold `count` rollouts of this test's requests."""

    def read() -> list[RolloutBatch]:
        files = (load_batch(path) for path in service.spooled() if path.suffix == ".safetensors")
        return [one for one in files if one.policy_version == policy]

    try:
        eventually(lambda: sum(is_asked(text) for one in read() for text in texts_of(one)) >= count, 30)
    except AssertionError:
        print(server.log_end())
        raise
    time.sleep(1)  # more than these would come now
    return read()


@torch.no_grad()
def check_rows(batches: Sequence[RolloutBatch], model: Any) -> dict[tuple[int, ...], int]:
    """Hold every row to a plain forward of the policy; returns how often each text came."""
    worst, found = dict.fromkeys(("aux", "last", "logprobs", "logsumexp"), 0.0), dict[tuple[int, ...], int]()
    for batch in batches:
        held = torch.from_numpy(wire.predicting_rows(batch.loss_mask.numpy()))
        held = torch.arange(len(batch.input_ids)) if batch.every_last_row else held
        aux, last = batch.aux_hidden.float(), torch.zeros(len(batch.input_ids), batch.last_hidden.shape[1])
        last[held] = batch.last_hidden.float()
        for number, (begin, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
            ids, rows = batch.input_ids[begin:end], slice(begin, end - 1)
            out = model.model(ids[None], output_hidden_states=True)
            law = model.lm_head(out.last_hidden_state[0])
            own = torch.cat([out.hidden_states[layer][0] for layer in AUX_LAYERS], dim=-1)[:-1]
            answered = batch.loss_mask[begin + 1 : end]
            prompt = int((~batch.loss_mask[begin:end]).sum())
            found[tuple(ids.tolist())] = found.get(tuple(ids.tolist()), 0) + 1
            assert batch.prompt_hashes[number] == wire.prompt_hash(ids[:prompt].tolist())
            assert int(answered.sum()) == end - begin - prompt > 0, "prompt, then answer"
            pairs = {
                "aux": (aux[rows], own),
                "last": (last[rows][answered], out.last_hidden_state[0, :-1][answered]),
                "logsumexp": (batch.logsumexp[rows][answered], law[:-1].logsumexp(-1)[answered]),
                "logprobs": (
                    batch.logprobs[begin + 1 : end][answered],
                    law.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][answered],
                ),
            }
            for name, (sent, expected) in pairs.items():
                allowed = ROUNDING * expected.abs() if name in ("aux", "last") else 0.0
                worst[name] = max(worst[name], float(((sent - expected).abs() - allowed).max()))
    print(f"{sum(found.values())} rollouts, largest differences beyond rounding {worst}")
    assert max(worst.values()) < TOLERANCE
    return found


def rounds_of(
    batches: Sequence[RolloutBatch], drafter: Eagle3Drafter, model: Any, leave_out: Collection[tuple[int, ...]] = ()
) -> tuple[int, int]:
    """(tokens, rounds) by replay of what was sent, but for these texts."""
    tokens = rounds = 0
    for batch in batches:
        kept = [i for i, text in enumerate(texts_of(batch)) if text not in leave_out]
        total = replay(drafter, batch.select(kept), policy_of(model), depth=DEPTH, drafting="greedy").total()
        tokens, rounds = tokens + int(total["tokens"]), rounds + int(total["rounds"])
    return tokens, rounds


def moved_policy() -> Any:
    """The shipped policy with another last layer, embedding and head."""
    moved = copy.deepcopy(base_policy()[0])
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if "layers.3.mlp" in name or "embed_tokens" in name:  # which is the head, too
                parameter.mul_(1.3)
    return moved


def test_live_traffic_comes_out_exactly_and_replay_counts_the_rounds_that_the_engine_counted(
    fleet: tuple[RunningService, SGLangProcess], trained: Eagle3Drafter, tmp_path: Path
) -> None:
    service, server = fleet
    model, _ = base_policy()
    prompts = elicit_prompts(24, seed=31) + odd_prompts(16, seed=31)
    prompts += prompts[:8]  # in the cache of those that came first
    longer = elicit_prompts(6, seed=77)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(server.ask, prompts))
        answers += pool.map(lambda prompt: server.ask(prompt, max_tokens=100, stop=False), longer)
    prompts += longer
    texts = [answer["output_ids"] for answer in answers]
    for prompt in prompts[:2]:  # not the policy's own distribution
        server.post("/generate", input_ids=prompt, sampling_params={"temperature": 0, "frequency_penalty": 0.5})
    counts = server.client.get("/server_info").raise_for_status().json()["internal_states"][0]["draftalign_tap"]
    assert (counts["skipped_distribution"], counts.get("failures", 0)) == (2, 0)
    batches = arrived(service, server, len(prompts), 0)
    found = check_rows(batches, model)
    wanted = [tuple(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    own = {one for one in found if not is_asked(one)}
    assert {one: count for one, count in found.items() if one not in own} == {one: wanted.count(one) for one in wanted}
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0] * len(answers)
    # A preempted request computes its text again, and draws the next token there without a round.
    preempted = {one for one, answer in zip(wanted, answers, strict=True) if answer["meta_info"]["num_retractions"]}
    counted = [i for i, one in enumerate(wanted) if one not in preempted]
    rounds = sum(answers[i]["meta_info"].get("spec_verify_ct", 0) for i in counted)
    tokens = sum(len(texts[i]) - 1 for i in counted)
    replayed = rounds_of(batches, trained, model, own | preempted)
    print(f"engine {tokens, rounds}, replay {replayed}; {len(preempted)} were preempted")
    assert replayed_of(trained, [prompts[i] for i in counted], [texts[i] for i in counted]) == (tokens, rounds)
    assert replayed[0] == tokens
    assert abs(replayed[1] - rounds) <= rounds // 250, "states travel in bfloat16: a draft may be another"
    check_an_update(service, server, trained, tmp_path, len(prompts))


def small_cache(server: SGLangProcess) -> bool:
    """Whether it cannot hold the requests of all clients."""
    return bool(server.client.get("/server_info").raise_for_status().json()["max_total_tokens"] < 1000)


def write_policy(server: SGLangProcess, model: Path, version: str, ranks: str) -> str:
    """What a trainer says that writes this policy into all ranks."""
    return server.run_beside(PLUGIN / "trainer.py", server.url, str(model), version, ranks)


def check_an_update(
    service: RunningService, server: SGLangProcess, trained: Eagle3Drafter, tmp_path: Path, before: int
) -> None:
    """A trainer writes a policy under requests: each rollout is of the version that drew it, whole or up to there."""
    model, moved = base_policy()[0], moved_policy()
    moved.save_pretrained(tmp_path / "moved")
    longest = elicit_prompts(1 if small_cache(server) else 4, seed=78)  # as many as its cache holds
    said: list[list[int]] = [[] for _ in longest]

    def ask(client: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
        body = {"input_ids": longest[client], "sampling_params": sampling, "stream": True}
        with server.client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said[client] = json.loads(line.removeprefix("data: "))["output_ids"]

    with ThreadPoolExecutor(len(longest)) as pool:
        asked = [pool.submit(ask, client) for client in range(len(longest))]
        eventually(lambda: all(len(ids) > 8 for ids in said))
        server.post("/pause_generation", mode="in_place")  # until the trainer, which has to start first, lets it go on
        assert not any(future.done() for future in asked), "all run over the update"
        ranks = str(server.client.get("/server_info").raise_for_status().json()["tp_size"])
        assert "written\n" in write_policy(server, tmp_path / "moved/model.safetensors", "7", ranks)
        for future in asked:
            future.result()
    cut = arrived(service, server, before + len(longest), 0)
    texts = check_rows(cut, model)
    for prompt, ids in zip(longest, said, strict=True):
        (part,) = [text for text in texts if list(text[: len(prompt)]) == prompt and len(text) > len(prompt) + 8]
        assert len(prompt) + 8 < len(part) < len(prompt) + len(ids), "it ends at the update"
        assert list(part) == (prompt + ids)[: len(part)]
    server.flush_cache()
    prompts = odd_prompts(12, seed=5)
    answers = [server.ask(prompt) for prompt in prompts]
    newer = arrived(service, server, len(prompts), 7)
    found = check_rows(newer, moved)
    assert found == {tuple(p + a["output_ids"]): 1 for p, a in zip(prompts, answers, strict=True)}
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    assert abs(rounds_of(newer, trained, moved)[1] - rounds) <= 1
    said_then = write_policy(server, BASE_POLICY / "model.safetensors", "8", ranks)
    assert "written\n" in said_then
    server.flush_cache()
    for prompt in prompts[:4]:
        server.ask(prompt)
    check_rows(arrived(service, server, 4, 8), model)
    for version, policy in ((7, moved), (8, model)):
        head = load_file(service.layout.head("live", version))["lm_head"]
        assert torch.equal(head, policy.get_output_embeddings().weight)
