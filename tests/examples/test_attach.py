"""The scripts of examples/attach, as a reader runs them, against a real service."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ports import free_port
from service_fixtures import RunningService

from drafter.batch import load_batch
from examples.demo import child

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_of_ones_own_ends_with_the_drafter_that_its_text_promises(tmp_path: Path) -> None:
    """As its text says to start it, without `--steps`: however slow the worker is."""
    port = free_port()
    up = ["service.cli", "up", "--port", str(port), "--state-dir", str(tmp_path / "state")]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
        child("up", up, {"DRAFTALIGN_VOCAB_MIN_TOKENS": "500"}),
    ):
        command = [sys.executable, "-m", "examples.attach.own_loop", "--url", str(client.base_url)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        stats = ast.literal_eval(done.stdout.strip().splitlines()[-1])
        assert (stats["dead"], "drafter_version" in stats["run_stands"]) == (0, True), stats
        assert client.get("/runs/own-loop").json()["headline"]["level"] == "good"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("script", "run"), [("trl_grpo", "trl"), ("own_loop", "own-loop")])
def test_a_script_registers_its_run_and_what_it_captured_arrives(
    service: RunningService, script: str, run: str
) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"examples.attach.{script}", "--url", service.url, "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    stats = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert (stats["failures"], stats["captured_rollouts"]) == (0, 32), stats
    files = [load_batch(path) for path in service.layout.spool(run).glob("*.safetensors")]
    assert {batch.policy_version for batch in files} == {0, 1}
    assert sum(batch.rollouts for batch in files) == 32
