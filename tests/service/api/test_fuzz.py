"""schemathesis on the API's own OpenAPI document: single calls, and sequences of calls that use each other's answers.

`DRAFTALIGN_FUZZ_EXAMPLES` sets the most cases for each call (5; `make fuzz` 460), `DRAFTALIGN_FUZZ_SEED` the seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from service_fixtures import HEADERS, publish, rollout_file, run_file

from service.storage.layout import Layout
from service.storage.registry import Registry

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

EXAMPLES = int(os.environ.get("DRAFTALIGN_FUZZ_EXAMPLES", "5"))
SEED = int(os.environ.get("DRAFTALIGN_FUZZ_SEED", str(random.SystemRandom().randrange(1 << 30))))
TESTS = Path(__file__).resolve().parents[2]
#: A request that its schema allows may still name a run that is not there, and one that it does not may be harmless.
#: `/drafter/{version}/rollback` has GET too: it is a `/drafter/{version}/{file}`.
NOT_OURS = "positive_data_acceptance,negative_data_rejection,allow_header_conformance"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180 + 2 * EXAMPLES)]


@contextmanager
def api(state_dir: Path, redis_url: str) -> Iterator[tuple[int, str]]:
    """The API as a process of its own: its id and address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {"STATE_DIR": str(state_dir), "REDIS_URL": redis_url, "PORT": str(port), "LONG_POLL_MAX_SECONDS": "0.1"}
    environment = os.environ | {f"DRAFTALIGN_{name}": value for name, value in variables.items()}
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


def test_no_request_and_no_sequence_of_requests_makes_the_api_break_its_own_description(
    tmp_path: Path, redis_url: str
) -> None:
    state = tmp_path / "state"
    with api(state, redis_url) as (pid, url):
        for run in ("default", "other"):
            httpx.put(f"{url}/runs/{run}", content=run_file(), headers=HEADERS).raise_for_status()
        versions = [publish(Registry(Layout(state)), content=content).version for content in (b"one", b"two")]
        httpx.post(f"{url}/rollouts", content=rollout_file(), headers=HEADERS).raise_for_status()
        names = {
            "run": ["default", "default", "other"],
            "version": versions,
            "file": ["model.safetensors", "config.json", "manifest.json"],
            "rollout_id": ["a", "b"],
        }
        before = resident_mib(pid)
        command = [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", f"{url}/openapi.json", "--checks", "all", "--exclude-checks", NOT_OURS),
            *("--phases", "coverage,fuzzing,stateful", "--max-examples", str(EXAMPLES), "--seed", str(SEED)),
            *("--no-shrink", "--continue-on-failure", "--request-timeout", "10", "--max-response-time", "5"),
            *("--warnings", "off"),
        ]
        environment = os.environ | {
            "SCHEMATHESIS_HOOKS": str(TESTS / "fuzz_hooks.py"),
            "FUZZ_NAMES": json.dumps(names),
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
