"""The example engine over HTTP: answers, problem documents, metrics by vLLM's names, and the process itself."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from helpers.engine.engine_fixtures import EOS_ID, base_policy, elicit_prompts, trained_drafter, write
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save

from examples import policy
from examples.engine import Engine
from examples.engine_server import create_app
from rl_hooks.engines.counting.counters import Snapshot

PROMPTS = elicit_prompts(12, seed=4)


class _Server(uvicorn.Server):
    """uvicorn in a thread: signals belong to the test runner."""

    def install_signal_handlers(self) -> None:  # pragma: no cover - older uvicorn
        return


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A client of a server whose policy is a copy."""
    served = Engine(copy.deepcopy(base_policy()[0]), policy.AUX_LAYERS)
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(create_app(served), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as http:
        yield http
    server.should_exit = True
    thread.join()
    listener.close()


def _generate(client: httpx.Client, **options: Any) -> Any:
    body = {"prompts": PROMPTS, "max_tokens": 40, "temperature": 0.0, "eos_id": EOS_ID} | options
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def _metrics(client: httpx.Client) -> dict[str, float]:
    """Samples as `name{label}`, without the labels that all have."""
    samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            rest = [value for name, value in sample.labels.items() if name not in ("engine", "model_name")]
            assert set(sample.labels) >= {"engine", "model_name"} or sample.name.startswith("process_")
            samples[sample.name + "".join(f"{{{value}}}" for value in rest)] = sample.value
    return samples


def _assert_problem(response: httpx.Response, status: int, detail: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert re.search(detail, document["detail"]), document["detail"]


def test_the_whole_life_of_a_server(client: httpx.Client, tmp_path: Path) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/drafter/state").json() == {
        "version": None,
        "loaded": False,
        "swaps": 0,
        "depth": 4,
        "drafting": "probabilistic",
        "policy_version": 0,
        "aux_layers": [1, 2, 3],
        "aux_layers_convention": "entering",
        "config_fingerprint": None,
    }
    plain = _generate(client)
    assert plain["policy_version"] == 0
    assert _metrics(client)["vllm:spec_decode_num_drafts_total"] == 0
    assert Snapshot.parse(client.get("/metrics").text).life, "so an agent can tell a restart"

    directory = write(trained_drafter(), tmp_path / "drafter")
    reply = client.post("/drafter/swap", json={"path": str(directory), "version": "v000001-abcdef01"})
    assert reply.json() == {"version": "v000001-abcdef01", "previous": None}
    state = client.get("/drafter/state").json()
    assert (state["version"], state["loaded"], state["swaps"]) == ("v000001-abcdef01", True, 1)
    assert re.fullmatch("[0-9a-f]{32}", state["config_fingerprint"])

    speculative = _generate(client)
    texts = [one["token_ids"] for one in plain["completions"]]
    assert [one["token_ids"] for one in speculative["completions"]] == texts
    assert {tuple(one["drafter_versions"]) for one in speculative["completions"]} == {("v000001-abcdef01",)}
    metrics = _metrics(client)
    rounds = sum(one["rounds"] for one in speculative["completions"])
    accepted = sum(one["accepted_tokens"] for one in speculative["completions"])
    tokens = sum(len(text) for text in texts)
    assert metrics["vllm:spec_decode_num_drafts_total"] == rounds
    assert metrics["vllm:spec_decode_num_draft_tokens_total"] == 4 * rounds
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert accepted == sum(metrics[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{i}}}"] for i in range(4))
    assert metrics["vllm:generation_tokens_total"] == 2 * tokens
    assert metrics["draftalign:spec_decode_emitted_tokens_total"] == tokens - len(PROMPTS)
    assert metrics["vllm:request_success_total{stop}"] + metrics["vllm:request_success_total{length}"] == 24

    weights = policy.new_policy(seed=2).state_dict()
    reply = client.post("/policy?version=5", content=save({k: v.clone() for k, v in weights.items()}))
    assert reply.json() == {"policy_version": 5, "running_sequences": 0}
    changed = _generate(client)
    assert changed["policy_version"] == 5
    assert [one["token_ids"] for one in changed["completions"]] != texts


def test_n_completions_of_each_prompt_come_in_order(client: httpx.Client) -> None:
    done = _generate(client, prompts=PROMPTS[:2], n=3, temperature=1.0)["completions"]
    assert len(done) == 6
    assert len({tuple(one["token_ids"]) for one in done}) > 2
    greedy = _generate(client, prompts=PROMPTS[:2], n=2, top_p=1, top_k=0)["completions"]  # these two cut nothing
    assert greedy[0]["token_ids"] == greedy[1]["token_ids"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"prompts": []}, "body.prompts"),
        ({"prompts": [[1]], "top_p": 0.9}, "body.top_p"),
        ({"prompts": [[1]], "top_p": 1.1}, "body.top_p"),
        ({"prompts": [[1]], "top_k": 5}, "body.top_k"),
        ({"prompts": [[1]], "temperature": -1}, "body.temperature"),
        ({"prompts": [[1]], "max_tokens": 0}, "body.max_tokens"),
        ({"prompts": [[1]], "stop": ["x"]}, "body.stop"),
        ({"prompts": [["one"]]}, r"body.prompts.0.0"),
        ({"prompts": [[1, 105]]}, "token ids must be from 0 to 104"),
        ({"prompts": [[1]], "max_tokens": 256}, "1 to 256 tokens"),
        ({"prompts": [[1]], "n": 5000}, "at most 4096 completions"),
    ],
)
def test_a_bad_request_is_a_422_that_names_the_fault(client: httpx.Client, body: dict[str, Any], detail: str) -> None:
    _assert_problem(client.post("/generate", json=body), 422, detail)
    assert client.get("/healthz").status_code == 200


def test_refused_drafters_and_weights_are_problems_and_change_nothing(client: httpx.Client, tmp_path: Path) -> None:
    _assert_problem(client.post("/drafter/swap", json={"path": str(tmp_path), "version": "v1"}), 422, "config.json")
    _assert_problem(client.post("/drafter/swap", json={"path": str(tmp_path)}), 422, "body.version")
    assert client.get("/drafter/state").json()["loaded"] is False
    _assert_problem(client.post("/policy?version=1", content=b"no tensors"), 422, "safetensors")
    _assert_problem(client.post("/policy", content=b""), 422, "query.version")
    poisoned = {k: torch.full_like(v, torch.nan) for k, v in base_policy()[0].state_dict().items()}
    _assert_problem(client.post("/policy?version=1", content=save(poisoned)), 422, "NaN")
    assert client.get("/drafter/state").json()["policy_version"] == 0
    _assert_problem(client.get("/nowhere"), 404, "Not Found")


def test_requests_of_many_clients_share_rounds(client: httpx.Client) -> None:
    """Continuous batching: the engine needs far fewer rounds than the requests would one by one."""
    texts: list[Any] = [None] * 8

    def ask(index: int) -> None:
        texts[index] = _generate(client, prompts=[PROMPTS[index]], temperature=1.0, eos_id=None, max_tokens=150)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(text["completions"][0]["token_ids"]) == 150 for text in texts)
    assert _metrics(client)["draftalign:engine_rounds_total"] < 8 * 149 / 2


@pytest.mark.slow
def test_the_process_serves_says_where_and_goes_on_a_signal(tmp_path: Path) -> None:
    directory = write(trained_drafter(), tmp_path / "drafter")
    command = [sys.executable, "-m", "examples.engine_server", "--policy", str(policy.BASE_POLICY), "--depth", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--port", "0", "--drafter", str(directory), "--drafter-version", "v0", "--drafting", "greedy"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with httpx.Client(base_url=url, timeout=60) as client:
                state = client.get("/drafter/state").json()
                assert (state["version"], state["depth"], state["drafting"]) == ("v0", 3, "greedy")
                assert len(_generate(client)["completions"]) == len(PROMPTS)
                port = url.rsplit(":", 1)[1]
                taken = subprocess.run([*command, "--port", port], capture_output=True, text=True, env=environment)
                assert taken.returncode == 2
                assert f"cannot listen on 127.0.0.1:{port}" in taken.stderr
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
