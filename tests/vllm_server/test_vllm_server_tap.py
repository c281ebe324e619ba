"""Live traffic of a real vLLM trains its drafter: features come out exactly, and the worker takes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts
from helpers.engine.tap_fixtures import truncated
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from redis import Redis
from safetensors.torch import load_file
from vllm_server.vllm_process import DEPTH, FORKED, V2_RUNNER, VllmServer
from vllm_server.vllm_refits import check_refits

from drafter.batch import load_batch
from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import AUX_LAYERS
from service.storage.layout import Layout
from service.worker.loop import RunWorker

TOLERANCE = 1e-4


@pytest.fixture(params=[{}, V2_RUNNER], ids=["V1 runner", "V2 runner"])
def fleet(
    request: pytest.FixtureRequest,
    serve: Callable[..., RunningService],
    redis_url: str,
    drafters: Path,
    tmp_path: Path,
) -> Iterator[tuple[RunningService, VllmServer]]:
    """A service without any run, and a server that sends it all of its traffic."""
    service = serve(drafting="greedy", depth=DEPTH, train_step_tokens=400)
    environment = {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
        **request.param,
        **FORKED,
    }
    options = ("--weight-transfer-config", '{"backend": "files"}', "--block-size", "32")
    server = VllmServer(tmp_path / "vllm", drafters / "trained", drafters, options=options, **environment)
    try:
        server.wait_until_healthy()
        yield service, server
    finally:
        server.stop()


@torch.no_grad()
def expected(token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(aux states [T, A*H], last state [T, H], log-probabilities [T, V]) by a plain forward of the policy."""
    model, _ = base_policy()
    out = model.model(torch.tensor([token_ids]), output_hidden_states=True)
    aux = torch.cat([out.hidden_states[layer][0] for layer in AUX_LAYERS], dim=-1)
    last = out.last_hidden_state[0]
    return aux, last, model.lm_head(last)


def test_live_traffic_comes_out_exactly_and_the_worker_learns_from_it_by_policy_version(
    fleet: tuple[RunningService, VllmServer],
    redis_url: str,
    drafters: Path,
    trained: Eagle3Drafter,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    service, server = fleet
    server.generate([5], max_tokens=1)  # the tap begins with the first request
    server.rpc("keep_collected")
    interpreted = "V2" in request.node.name  # its kernels are: half a second of CPU for each answer
    some_of = 4 if interpreted else 1
    prompts = elicit_prompts(72 // some_of, seed=31) + odd_prompts(24 // some_of, seed=31)
    temperatures = [(0.0, 0.7, 1.0, 1.0)[i % 4] for i in range(len(prompts))]
    # V2's kernel for top-k and top-p does not run in Triton's interpreter.
    some: dict[str, Any] = {} if interpreted else {"top_p": 0.9, "top_k": 8}
    cut = [some if i % 4 == 3 else {} for i in range(len(prompts))]
    before = server.counters()
    with ThreadPoolExecutor(6) as pool:
        texts = list(
            pool.map(
                lambda i: server.generate(prompts[i], temperature=temperatures[i], seed=i, **cut[i]),
                range(len(prompts)),
            )
        )
    after = server.counters()
    waiting, left = server.rpc("sleep_lightly")
    assert (waiting, left) == (0, 0), "the rows of the last steps wait for a step that may never come"
    stats = eventually(lambda: _delivered(server, len(prompts) + 1), 60)
    assert stats["failures"] == 0

    kept = server.rpc("take_collected", str(tmp_path / "kept.safetensors"))
    tensors = load_file(tmp_path / "kept.safetensors")
    worst = dict.fromkeys(("aux", "last", "logprobs"), 0.0)
    wanted = {tuple(p + t): (i, len(p)) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))}
    found = set()
    for n, _ in enumerate(kept):
        first, ids = kept[n]["first"], tensors[f"{n}.input_ids"].tolist()
        whole = next((w for w in wanted if list(w[first:]) == ids), None)
        if whole is None:
            assert len(ids) <= 2, "tokens that nobody was given"  # the single token of the last request
            continue
        number, prompt = wanted[whole]
        found.add(number)
        T = len(ids)
        aux, last, logits = expected(list(whole))
        worst["aux"] = max(worst["aux"], float((tensors[f"{n}.aux"][: T - 1] - aux[first:-1]).abs().max()))
        worst["last"] = max(worst["last"], float((tensors[f"{n}.last"][: T - 1] - last[first:-1]).abs().max()))
        law = truncated((logits / (temperatures[number] or 1.0)).log_softmax(-1), **cut[number])
        own = law[prompt - 1 : -1].gather(-1, torch.tensor(whole[prompt:])[:, None])[:, 0]
        logged = tensors[f"{n}.logprobs"][prompt - first :]
        worst["logprobs"] = max(worst["logprobs"], float((logged - own).abs().max()))
        assert tensors[f"{n}.generated"].tolist() == [first + i >= prompt for i in range(T)]
    print(f"{len(found)} of {len(prompts)} requests token-exact, largest differences {worst}; {stats}")
    assert len(found) == len({tuple(p + t) for p, t in zip(prompts, texts, strict=True)})
    assert worst["aux"] < TOLERANCE
    assert worst["last"] < TOLERANCE
    assert worst["logprobs"] < TOLERANCE
    _check_service(service, redis_url, (before, after), len(prompts))
    check_refits(service, server, redis_url, (drafters / "trained", trained), tmp_path, 4 if interpreted else 12)


def _delivered(server: VllmServer, count: int) -> dict[str, Any] | None:
    stats: dict[str, Any] = server.state()["tap"]
    stats = {"failures": 0} | stats
    return stats if stats.get("delivered", 0) >= count and stats["sender_sent"] >= 2 else None


def _check_service(service: RunningService, redis_url: str, counters: tuple[Any, Any], requests: int) -> None:
    """The files are taken, scored and trained on; replay α of the served drafter is what the engine counted."""
    eventually(lambda: service.client.get("/runs/live").status_code == 200, 30)
    files = eventually(lambda: [p for p in service.spooled() if "live" in p.parts], 30)
    # The newest: what is made before the service has answered the registration has all rows.
    batch = load_batch(max(files, key=lambda path: path.stat().st_mtime_ns))
    assert bool(batch.last_hidden.isfinite().all())
    assert not batch.every_last_row, "the service wants the predicting rows only"
    with Redis.from_url(redis_url) as redis:
        queue, store = RolloutQueue(redis, "live"), Store(redis, "live")
        worker = RunWorker(service.settings, Layout(service.settings.state_dir), queue, store, "live")
        scores: dict[str, Any] = {}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            worker.cycle()
            scores = service.client.get("/alpha", params={"run": "live"}).json()
            if scores["points"] and scores["points"][0]["rollouts"] >= requests:
                break
    (point,) = scores["points"]
    assert point["rollouts"] >= requests
    before, after = counters
    rounds = after.rounds - before.rounds
    live = (after.emitted_tokens - before.emitted_tokens) / rounds
    print(f"live α {live:.4f}, replay α of the served drafter {point['alpha_served']:.4f}")
    # Replay is the mean over coin flips that the engine threw once: their variance of log α is at most 0.45 a round.
    assert math.isclose(point["alpha_served"], live, rel_tol=3 * math.sqrt(0.45 / rounds))
