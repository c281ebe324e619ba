"""Two tensor-parallel workers of a real vLLM on a CPU: one head in two slices, one tap, one drafter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import EOS_ID, odd_prompts
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from redis import Redis
from safetensors.torch import load_file
from vllm_server.test_vllm_server_in_process import _PROMPTS, Books, LlmProcess, moved, swap_under_way
from vllm_server.test_vllm_server_tap import TOLERANCE, expected
from vllm_server.vllm_process import DEPTH, FORKED

from drafter.model.eagle3 import Eagle3Drafter
from service.storage.layout import Layout
from service.worker.loop import RunWorker


@pytest.fixture
def service(serve: Callable[..., RunningService]) -> RunningService:
    return serve(drafting="greedy", depth=DEPTH, train_step_tokens=400)


@pytest.fixture
def llm(service: RunningService, drafters: Path, tmp_path: Path) -> Iterator[LlmProcess]:
    made = LlmProcess(
        tmp_path / "llm",
        drafters / "trained",
        ranks=2,
        DRAFTALIGN_URL=service.url,
        DRAFTALIGN_SAMPLE_FRACTION="1.0",
        DRAFTALIGN_TOKENS_PER_MINUTE="10000000",
        DRAFTALIGN_DRAFTER_DIR=str(tmp_path / "cache"),
        **FORKED,
    )
    try:
        yield made
    finally:
        made.stop()


def test_two_ranks_score_one_head_send_once_and_swap_together(
    service: RunningService,
    llm: LlmProcess,
    redis_url: str,
    drafters: Path,
    trained: Eagle3Drafter,
    tmp_path: Path,
) -> None:
    llm.generate([[5]])  # the tap begins with the first step
    eventually(lambda: service.client.get("/runs/default").status_code == 200, 30)
    llm.ask("rpc", "tests_keep_collected")
    before = llm.rounds()
    texts = llm.generate()
    greedy = llm.rounds()
    warm = odd_prompts(8, seed=31)
    drawn: list[list[int]] = llm.ask("generate", warm, 0.7, 40, EOS_ID)
    after = llm.rounds()
    stats = eventually(lambda: _delivered(llm, len(_PROMPTS) + len(warm)), 60)
    assert "failures" not in stats

    # --- rows and their scores are those of the whole policy
    kept = llm.ask("rpc", "tests_take_collected", str(tmp_path / "kept.safetensors"))
    tensors = load_file(tmp_path / "kept.safetensors")
    worst = dict.fromkeys(("aux", "last", "logprobs", "logsumexp"), 0.0)
    wanted = {tuple(p + t): (len(p), 1.0) for p, t in zip(_PROMPTS, texts, strict=True)}  # greedy is scored at 1
    wanted |= {tuple(p + t): (len(p), 0.7) for p, t in zip(warm, drawn, strict=True)}
    found = set()
    for n, facts in enumerate(kept):
        ids = tuple(tensors[f"{n}.input_ids"].tolist())
        if ids not in wanted:
            continue
        found.add(ids)
        assert facts["first"] == 0
        prompt, temperature = wanted[ids]
        aux, last, logits = expected(list(ids))
        logits = logits / temperature
        own = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        truth = {"aux": aux[:-1], "last": last[:-1], "logsumexp": logits[:-1].logsumexp(-1)}
        for name, value in truth.items():
            worst[name] = max(worst[name], float((tensors[f"{n}.{name}"][: len(ids) - 1] - value).abs().max()))
        logged = tensors[f"{n}.logprobs"][prompt:]
        worst["logprobs"] = max(worst["logprobs"], float((logged - own[prompt - 1 :]).abs().max()))
    print(f"{len(found)} of {len(wanted)} requests token-exact, largest differences {worst}; {stats}")
    assert found == set(wanted)
    assert max(worst.values()) < TOLERANCE

    # --- of all that follows, what the drafter of the start brings; it replays the same greedy texts two times more
    rounds = after[0] - before[0] + 2 * (greedy[0] - before[0])
    live = 1 + (after[1] - before[1] + 2 * (greedy[1] - before[1])) / rounds

    # --- one rank reads other bytes: both refuse, and go on with what they have
    answers = _swap(llm, drafters / "random", drafters / "trained")
    assert "another rank" in answers[0]["error"]
    assert "another one read" in answers[1]["error"]
    assert [state["version"] for state in llm.ask("rpc_all", "draftalign_state")] == [None, None]
    # --- one rank fails half-way through its load: both put back what they had
    llm.ask("rpc_all", "tests_fail_a_rank", 1)
    assert all("error" in answer for answer in _swap(llm, drafters / "random", drafters / "random"))
    states = llm.ask("rpc_all", "draftalign_state")
    assert [(state["version"], state["loaded"]) for state in states] == [(None, True)] * 2
    start = llm.rounds()
    assert llm.generate() == texts
    again = llm.rounds()
    as_before = 1 + (greedy[1] - before[1]) / (greedy[0] - before[0])
    assert 1 + (again[1] - start[1]) / (again[0] - start[0]) == pytest.approx(as_before, rel=0.02)

    # --- a good one serves from the next step on, on both
    assert [answer["version"] for answer in _swap(llm, drafters / "random", drafters / "random")] == ["v1", "v1"]
    start = llm.rounds()
    assert llm.generate() == texts
    end = llm.rounds()
    swapped = 1 + (end[1] - start[1]) / (end[0] - start[0])
    print(f"α after the swap {swapped:.4f}")
    assert swapped < 1.5 < 2.0 < live

    # --- the service takes them, and replays what the engine counted; only now it has a drafter that the engine takes
    llm.generate([[5]])
    rollouts = 3 * len(_PROMPTS) + len(warm)
    eventually(lambda: _delivered(llm, rollouts), 60)
    score = _score(service, redis_url, rollouts)
    print(f"live α {live:.4f}, replay α {score:.4f}")
    assert math.isclose(score, live, rel_tol=3 * math.sqrt(0.45 / rounds))

    # --- the worker has published it, and it serves again
    offered = service.client.get("/drafter/latest").json()["version"]
    eventually(lambda: llm.ask("rpc", "draftalign_staged").get("version") == offered, 30)
    eventually(lambda: all(one["done"] for one in llm.ask("rpc_all", "draftalign_staged")), 30)
    assert llm.generate() == texts
    assert llm.state()["version"] == offered

    # --- one that is published while requests run: both ranks swap between two of their steps, and no text changes
    with Redis.from_url(redis_url) as redis:
        books, random = Books(Store(redis, "default"), start), drafters / "random"
        version, older, newer = swap_under_way(service, llm, texts, lambda: publish(service, random, trained), books)
    assert [state["version"] for state in llm.ask("rpc_all", "draftalign_state")] == [version] * 2
    assert older == pytest.approx(as_before, rel=0.1)  # another mix of the prompts
    assert newer == pytest.approx(swapped, abs=0.002)  # what the one before had drafted is not among them

    # --- a policy whose head has moved: gathered and sent, and both ranks count the same version
    number = 5 if llm.ask("reload", str(moved(tmp_path / "p5", 5, head=True)), "5") else 1  # told, or counted
    llm.generate()
    eventually(lambda: service.client.get("/runs/default").json().get("latest_head") == number, 30)
    head = load_file(service.layout.head("default", number))["lm_head"].float()
    own_head = load_file(tmp_path / "p5" / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(head, own_head)


def _delivered(llm: LlmProcess, count: int) -> dict[str, Any] | None:
    stats: dict[str, Any] = llm.state()["tap"]
    return stats if stats.get("delivered", 0) >= count and stats["sender_sent"] >= 2 else None


def _swap(llm: LlmProcess, *paths: Path) -> list[dict[str, Any]]:
    """Each rank reads its own path, then both apply; what each answered."""
    llm.ask("rpc_all", "tests_stage_by_rank", [str(path) for path in paths], "v1")
    eventually(lambda: all(one["done"] for one in llm.ask("rpc_all", "draftalign_staged")), 60)
    first = llm.ask("rpc_all", "draftalign_staged")[0]
    assert "error" not in first
    answers: list[dict[str, Any]] = llm.ask("rpc_all", "draftalign_apply", "v1", first["sha256"])
    return answers


def _score(service: RunningService, redis_url: str, rollouts: int) -> float:
    """Replay α of the drafter that the run began with, after a worker has checked and scored the rollouts."""
    with Redis.from_url(redis_url) as redis:
        queue, store = RolloutQueue(redis, "default"), Store(redis, "default")
        worker = RunWorker(service.settings, Layout(service.settings.state_dir), queue, store, "default")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            worker.cycle()
            points = service.client.get("/alpha", params={"run": "default"}).json()["points"]
            if points and points[0]["rollouts"] >= rollouts:
                return float(points[0]["alpha_served"])
    raise AssertionError("the worker did not score the rollouts")
