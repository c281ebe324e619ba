"""schemathesis on the API's own OpenAPI document: single calls, and sequences of calls that use each other's answers.

Once without tokens, and once with a token file, where some calls bear a token for other runs, an unknown one, or none.

`DRAFTALIGN_FUZZ_EXAMPLES` sets the most cases for each call (5; `make fuzz` 460), `DRAFTALIGN_FUZZ_SEED` the seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from attacks.runs import SIZES, drafter_tensors, with_drafter
from helpers.ports import free_port
from helpers.service.access_fixtures import TokenFile
from helpers.service.service_fixtures import HEADERS, HIDDEN, joined, publish, rollout_file, run_file
from redis import Redis

from drafter.files.checkpoint import export_config
from rl_hooks import wire
from rl_hooks.format.drafter import vocabulary_digest
from service.storage.layout import Layout
from service.storage.queue.deliveries import RolloutQueue
from service.storage.registry import Registry

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

EXAMPLES = int(os.environ.get("DRAFTALIGN_FUZZ_EXAMPLES", "5"))
SEED = int(os.environ.get("DRAFTALIGN_FUZZ_SEED", str(random.SystemRandom().randrange(1 << 30))))
TESTS = Path(__file__).resolve().parents[2]
#: A request that its schema allows may still name a run that is not there, and one that it does not may be harmless.
#: `/drafter/{version}/rollback` has GET too: it is a `/drafter/{version}/{file}`.
NOT_OURS = "positive_data_acceptance,negative_data_rejection,allow_header_conformance"

#: Calls whose good answer needs what is seeded. The long form has to see all of them, the short one, of a few random
#: calls each, at least one.
WENT_WELL = {
    "POST /drafters 201",
    "GET /runs/{run}/dead/{batch_id}/file 200",
    "POST /runs/{run}/dead/{batch_id}/retry 202",
    "DELETE /runs/{run}/dead/{batch_id} 204",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 6 * EXAMPLES)]


@contextmanager
def api(state_dir: Path, redis_url: str, **settings: str) -> Iterator[tuple[int, str]]:
    """The API as a process of its own: its id and address."""
    port = free_port()
    variables = {"STATE_DIR": str(state_dir), "REDIS_URL": redis_url, "PORT": str(port), "LONG_POLL_MAX_SECONDS": "0.1"}
    environment = os.environ | {f"DRAFTALIGN_{name}": value for name, value in (variables | settings).items()}
    with subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], env=environment) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                try:
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield process.pid, url
        finally:
            process.terminate()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def drafter_file(weight: float) -> bytes:
    """A sound drafter of the run: the body of POST /drafters."""
    tensors = {name.removeprefix("drafter."): tensor for name, tensor in drafter_tensors().items()}
    tensors["norm.weight"] = wire.Tensor.of(np.full(HIDDEN, weight, np.float32), "F32")
    document = json.dumps(export_config(SIZES))
    return joined(wire.encode(tensors, {"format": wire.DRAFTER_FORMAT, "drafter_config": document}))


def published(registry: Registry, weight: float) -> str:
    """A version with such a drafter in the run `default`, as the worker publishes it."""
    ids = np.arange(SIZES.draft_vocab_size, dtype="<i8").tobytes()
    facts = {"d2t_sha256": vocabulary_digest(SIZES.vocab_size, ids)}
    config = json.dumps(export_config(SIZES))
    return publish(registry, content=drafter_file(weight), config=config, **facts).version


def dead_batch(client: httpx.Client, queue: RolloutQueue, version: int) -> str:
    """A batch of that policy version that died, its file kept; returns its id."""
    reply = client.post("/rollouts", content=rollout_file(policy_version=version), headers=HEADERS)
    (entry,) = queue.claim("fuzz", 1, 60.0)
    assert entry.batch_id == reply.json()["batch_id"]
    assert queue.dead_letter(entry, "the log-probabilities disagree")
    return entry.batch_id


@pytest.mark.parametrize("with_tokens", [False, True])
def test_no_request_and_no_sequence_of_requests_makes_the_api_break_its_own_description(
    tmp_path: Path, redis_url: str, redis_client: Redis, with_tokens: bool
) -> None:
    state, log, good = tmp_path / "state", tmp_path / "calls.jsonl", tmp_path / "good"
    log.touch()
    good.mkdir()
    (good / "drafter").write_bytes(drafter_file(0.5))
    (good / "run").write_bytes(with_drafter())
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add("admin", "admin")
    tokens.add("foreign", "admin", ("elsewhere-*",))
    settings = {"TOKEN_FILE": str(tokens.path)} if with_tokens else {}
    with (
        api(state, redis_url, **settings) as (pid, url),
        httpx.Client(base_url=url, headers=tokens.headers("admin")) as client,
    ):
        for run in ("default", "other"):
            client.put(f"/runs/{run}", content=run_file(), headers=HEADERS).raise_for_status()
        versions = [published(Registry(Layout(state)), weight) for weight in (1.0, 2.0)]
        queue = RolloutQueue(redis_client, "default")
        batches = [dead_batch(client, queue, version) for version in range(100, 116)]
        client.post("/rollouts", content=rollout_file(), headers=HEADERS).raise_for_status()
        names = {
            "run": ["default", "default", "other"],
            "version": versions,
            "file": ["model.safetensors", "config.json", "manifest.json"],
            "rollout_id": ["a", "b", *batches[:2]],
            "batch_id": batches,
        }
        document = tmp_path / "openapi.json"
        document.write_bytes(client.get("/openapi.json").content)
        # The first phase is no other with tokens, and takes three quarters of the time.
        phases = "fuzzing,stateful" if with_tokens else "coverage,fuzzing,stateful"
        before = resident_mib(pid)
        command = [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", str(document), "--url", url, "--checks", "all", "--exclude-checks", NOT_OURS),
            *("--phases", phases, "--max-examples", str(EXAMPLES), "--seed", str(SEED)),
            *("--no-shrink", "--continue-on-failure", "--request-timeout", "10", "--max-response-time", "5"),
            *("--warnings", "off"),
        ]
        environment = os.environ | {
            "SCHEMATHESIS_HOOKS": str(TESTS / "helpers/service/fuzz_hooks.py"),
            "FUZZ_NAMES": json.dumps(names),
            "FUZZ_GOOD": str(good),
            "FUZZ_TOKENS": json.dumps(tokens.secrets if with_tokens else {}),
            "FUZZ_LOG": str(log),
            "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        after = resident_mib(pid)
    print(done.stdout[-6000:], done.stderr[-2000:])
    print(f"API: {before:.0f} MiB before, {after:.0f} MiB after")
    assert done.returncode == 0
    assert after < 2 * before
    assert int(re.findall(r"(\d+) generated", done.stdout)[-1]) > 19 * EXAMPLES
    assert "✅  Stateful" in done.stdout
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    calls = {(one["who"], f"{one['call']} {one['status']}") for one in noted}
    if with_tokens:
        assert {who for who, _ in calls} == {"admin", "foreign", "stranger", "nobody"}
    else:
        missing = WENT_WELL - {call for _, call in calls}
        assert len(missing) < (len(WENT_WELL) if EXAMPLES < 50 else 1), missing
