"""Our plugin in the vLLM that prime-rl pins (0.26.0), inside prime-rl's own inference server (`prime_rl_vllm.py`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, trained_drafter
from helpers.engine.engines_within import ALL_OF_THEM, DEPTH, check_books, check_labels, engine_environment
from helpers.engine.server_load import publish, write_drafters
from helpers.ports import free_port
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.trainer.stacks_fixtures import HERE, Stack
from redis import Redis
from vllm_server.vllm_process import VllmServer
from vllm_server.vllm_refits import next_policy

from examples.policy import BASE_POLICY

SOURCE = os.environ.get("PRIME_RL_SOURCE", "")
STACK = Stack("prime_rl_vllm", "prime_rl_vllm.py", "a real prime-rl with its vLLM")
PROMPTS = elicit_prompts(24, seed=3)

pytestmark = [
    *STACK.marks,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SOURCE, reason="PRIME_RL_SOURCE names no checkout"),
]


class PrimeRlServer(VllmServer):
    """prime-rl's server: vLLM's, with prime-rl's routes, worker extension and patches."""

    def __init__(self, scratch: Path, drafter: Path, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=240, limits=httpx.Limits(keepalive_expiry=2.0))
        self.log = scratch / "vllm.log"
        speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DEPTH}
        engine = {"model": str(BASE_POLICY), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
        more = {"served_model_name": ["policy"], "max_num_seqs": 8, "generation_config": "vllm"}
        configuration = {
            "server": {"host": "127.0.0.1", "port": self.port},
            "router": None,
            "vllm": engine | more | {"speculative_config": speculative, "enable_prefix_caching": True},
            "weight_broadcast": {"type": "filesystem"},
            "enable_fp32_lm_head": False,  # `torch.mm(..., out_dtype=)` has no CPU kernel; float32 it is anyway
        }
        (scratch / "inference.json").write_text(json.dumps(configuration))
        plugin = "prime_rl.inference.patches:apply_shared_vllm_patches"
        sources = (Path(SOURCE) / "src", Path(SOURCE) / "packages/prime-rl-configs/src")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(STACK.python), str(HERE / STACK.script), str(scratch / "inference.json")],
                env=engine_environment(scratch / "plugin", "0.26.0", plugin, sources) | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def staged(self) -> dict[str, Any]:
        """What it has read of a published drafter, to be swapped in with the next step."""
        answer = self.client.post("/test/rpc", json={"method": "draftalign_staged", "args": []}).raise_for_status()
        return answer.json()[0]  # type: ignore[no-any-return]

    def update_weights(self, folder: Path) -> None:
        """As prime-rl's orchestrator does (`update_weights` of prime_rl/utils/client.py)."""
        self.client.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        self.client.post("/update_weights", json={"weight_dir": folder.as_posix()}).raise_for_status()
        self.client.post("/resume").raise_for_status()


@pytest.fixture(name="service")
def _service(serve: Callable[..., RunningService]) -> RunningService:
    return serve()


@pytest.fixture(name="server")
def _server(service: RunningService, tmp_path: Path) -> Iterator[PrimeRlServer]:
    drafter = write_drafters(tmp_path / "drafters") / "random"
    cache = str(tmp_path / "cache")
    made = PrimeRlServer(tmp_path, drafter, DRAFTALIGN_URL=service.url, DRAFTALIGN_DRAFTER_DIR=cache, **ALL_OF_THEM)
    try:
        made.wait_until_healthy()
        yield made
    finally:
        made.stop()


def test_prime_rls_server_swaps_labels_and_sends_through_its_own_refits(
    service: RunningService, server: PrimeRlServer, redis_url: str, tmp_path: Path
) -> None:
    """Its sampling parameters, its routes for new weights from a folder, its prefix cache that is salted by version."""

    def generate(step: int) -> tuple[int, int]:
        """Rounds and accepted drafts of one group of answers."""
        more: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "cache_salt": str(step)}
        before = server.counters()
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda prompt: server.generate(prompt, temperature=1.0, **more), PROMPTS))
        after = server.counters()
        return after.rounds - before.rounds, after.accepted_tokens - before.accepted_tokens

    random = generate(0)
    record = eventually(lambda: (a := service.client.get("/runs/default")).status_code == 200 and a.json(), 30)
    assert (record["policy_version"], record["latest_head"]) == (0, None)
    version = publish(service, tmp_path / "drafters/trained", trained_drafter())
    eventually(lambda: (found := server.staged()).get("version") == version and found["done"], 60)
    trained = generate(0)
    assert server.state()["version"] == version

    policies = {0: base_policy()[0]}
    counts = {0: trained}
    for number in (1, 2):
        policies[number] = next_policy(policies[number - 1], number, whole=True)
        policies[number].save_pretrained(tmp_path / f"policy-{number}")
        server.update_weights(tmp_path / f"policy-{number}")
        counts[number] = generate(number)
    alphas = [1 + accepted / rounds for rounds, accepted in (random, *counts.values())]
    print("α with the drafter it began with, and of three policies with the one published", alphas)
    assert alphas[0] < 1.5 < 2.0 < alphas[1]
    check_labels(service, policies, {0: 2 * len(PROMPTS), 1: len(PROMPTS), 2: len(PROMPTS)})
    with Redis.from_url(redis_url) as redis:
        check_books(Store(redis, "default"), version, counts)
