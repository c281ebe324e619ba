"""TRL's GRPO and a speculating vLLM server, two processes, with draftalign in both: what the guide's section says.

On a CPU, so TRL's NCCL does not carry the weights: a file does (`trl_script.py`). All else is TRL's own.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, random_drafter, write
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from redis import Redis
from safetensors.torch import load_file
from vllm_server.vllm_process import DEPTH, FORKED, PYTHON, VllmServer, cpu_environment, plugins

from examples.policy import BASE_POLICY
from service.monitor.records import DrafterSums
from service.storage.layout import Layout
from service.worker.loop import RunWorker

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def service(serve: Callable[..., RunningService]) -> RunningService:
    return serve(
        drafting="greedy", depth=DEPTH, train_step_tokens=900, learning_rate=1e-2, recent_tokens=8000, gate_rollouts=64
    )


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """What run and engine begin with: an untrained drafter."""
    return write(random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), tmp_path / "first")


@pytest.fixture
def follower(service: RunningService, first: Path, tmp_path: Path) -> Iterator[VllmServer]:
    """A server as the guide starts it for TRL, with another transport of the weights."""
    options = ("--weight-transfer-config", '{"backend": "files"}', "--logprobs-mode", "processed_logprobs")
    started = VllmServer(
        tmp_path / "vllm",
        first,
        tmp_path,
        options=(*options, "--max-logprobs", "-1", "--max-num-seqs", "64"),
        VLLM_SERVER_DEV_MODE="1",
        DRAFTALIGN_URL=service.url,
        DRAFTALIGN_RUN="trl",
        DRAFTALIGN_SAMPLE_FRACTION="0",
        **FORKED,
    )
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()


def test_grpo_and_a_speculating_server_of_its_own_stay_in_step(
    service: RunningService, follower: VllmServer, first: Path, redis_url: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prompts = elicit_prompts(24, seed=9)
    before = [follower.generate(prompt) for prompt in prompts]
    with Redis.from_url(redis_url) as redis:
        store = Store(redis, "trl")
        _train(service, follower, first, redis, store, out)
        found = json.loads((out / "found.json").read_text())
        scores = {record.policy_version: record for record in store.scores().values()}
    rows, stats = found["rows"], found["stats"]
    assert "needs a CUDA device" in found["refused"][0], "TRL carries weights without CUDA by now: use its own way"

    # --- what the hook sent is whole, and nothing was refused
    assert (stats["failures"], stats["dead"], stats["dropped_error"], stats["skipped_stale"]) == (0, 0, 0, 0)
    assert stats["captured_rollouts"] == 64 * len(rows)

    # --- the weights follow: each step was drawn by the weights that it was trained with
    apart = [row["sampling/sampling_logp_difference/max"] for row in rows]
    print("largest differences of log p between vLLM's sampler and TRL's forward, by step:", apart)
    assert max(apart) < 1e-3
    followed, texts = follower.rpc("policy_digest"), [follower.generate(prompt) for prompt in prompts]
    follower.rpc("refit", "reload_weights", str(out / "policy"))
    assert follower.rpc("policy_digest") == followed
    assert [follower.generate(prompt) for prompt in prompts] == texts
    assert texts != before
    own = load_file(BASE_POLICY / "model.safetensors")
    moved = load_file(out / "policy" / "model.safetensors")
    assert not any(torch.equal(tensor.float(), own[name].float()) for name, tensor in moved.items() if name in own)

    # --- what was published serves, and its α is that of replay on the very rollouts that it drafted
    assert len({row["drafter"] for row in rows[-3:]}) == 1, rows
    pairs = list(zip(rows[-3:], rows[-2:], strict=False))
    assert all(scores[row["policy"]].drafter_version == row["drafter"] for _, row in pairs)
    replayed = DrafterSums(0.0, 0.0)
    for _, row in pairs:
        served = scores[row["policy"]].served
        assert served is not None
        replayed += served
    rounds, accepted = (rows[-1][name] - rows[-3][name] for name in ("rounds", "accepted"))
    begun, live = 1 + rows[0]["accepted"] / rows[0]["rounds"], 1 + accepted / rounds
    print(f"α {begun:.3f} at first; then {live:.4f} counted, {replayed.alpha:.4f} ± {replayed.half_width:.4f} replayed")
    assert live > 1.2 * begun
    assert abs(live - replayed.alpha) < (replayed.half_width or 0.0)
    (engine,) = service.client.get("/alpha", params={"run": "trl"}).json()["engines"]
    assert (engine["drafter_version"], engine["verdict"]) == (rows[-1]["drafter"], "healthy"), engine


def _train(service: RunningService, server: VllmServer, drafter: Path, redis: Redis, store: Store, out: Path) -> None:
    """TRL's process, with the run's worker at work here; the first drafter that it publishes is held."""
    weights = out / "weights"
    weights.mkdir()
    script = Path(__file__).parent / "trl_script.py"
    arguments = [sysconfig.get_path("purelib"), server.url, service.url, str(drafter), str(weights), str(out)]
    environment = cpu_environment(plugins(out / "plugin")) | {"VLLM_PLUGINS": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    log = out / "trl.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(PYTHON), str(script), *arguments], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    worker: RunWorker | None = None
    held = False
    try:
        while process.poll() is None:
            if worker is None and service.client.get("/runs/trl").status_code == 200:
                queue = RolloutQueue(redis, "trl")
                worker = RunWorker(service.settings, Layout(service.settings.state_dir), queue, store, "trl")
            if worker is None or not worker.cycle():
                time.sleep(0.05)
            elif not held:
                held = _hold_what_was_published(service)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text(errors="replace")[-6000:]


def _hold_what_was_published(service: RunningService) -> bool:
    """Hold the run's newest drafter, unless it is the one that the run began with; whether it is held."""
    version = service.client.get("/drafter/latest", params={"run": "trl"}).json()["version"]
    if version.startswith("v000001-"):
        return False
    body = {"reason": "its α is to be compared with replay over several steps"}
    return service.client.put(f"/drafter/{version}/hold", params={"run": "trl"}, json=body).is_success
