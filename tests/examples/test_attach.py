"""The scripts of examples/attach, as a reader runs them, against a real service."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.forked import ROOT, run_fork
from helpers.ports import free_port
from helpers.service.service_fixtures import RunningService
from helpers.trainer.async_grpo_fixtures import Sampler, on_a_cpu
from helpers.trainer.hooks_fixtures import tiny_qwen3
from helpers.trainer.sent_fixtures import first_drafter
from helpers.trainer.trl_fixtures import make_tokenizer

from drafter.batch import load_batch
from examples.attach import trl_async_grpo
from examples.demo import child


def run_example(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the examples to its end."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    module = f"examples.attach.{script}"
    return run_fork("trainer", module, *arguments, directory=ROOT, environment=environment, seconds=800)


@pytest.mark.slow
def test_the_loop_of_ones_own_ends_with_the_drafter_that_its_text_promises(tmp_path: Path) -> None:
    """As its text says to start it, without `--steps`: however slow the worker is."""
    port = free_port()
    up = ["service.cli", "up", "--port", str(port), "--state-dir", str(tmp_path / "state")]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
        child("up", up, {"DRAFTALIGN_VOCAB_MIN_TOKENS": "500"}),
    ):
        done = run_example("own_loop", "--url", str(client.base_url))
        assert done.returncode == 0, done.stderr[-2000:]
        stats = ast.literal_eval(done.stdout.strip().splitlines()[-1])
        assert (stats["dead"], "drafter_version" in stats["run_stands"]) == (0, True), stats
        assert client.get("/runs/own-loop").json()["headline"]["level"] == "good"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "run"), [("trl_grpo", "trl"), ("own_loop", "own-loop")])
def test_a_script_registers_its_run_and_what_it_captured_arrives(
    service: RunningService, script: str, run: str
) -> None:
    done = run_example(script, "--url", service.url, "--steps", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    stats = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert (stats["failures"], stats["captured_rollouts"]) == (0, 32), stats
    files = [load_batch(path) for path in service.layout.spool(run).glob("*.safetensors")]
    assert {batch.policy_version for batch in files} == {0, 1}
    assert sum(batch.rollouts for batch in files) == 32


def draws(sampler: Sampler, version: int) -> Iterator[Any]:
    """Four groups of five: two micro-batches of eight, of which one is taken before it is trained on."""
    for group in range(4):
        yield from sampler.group(version, 10 * version + group)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_async_grpos_script_registers_its_run_and_what_it_captured_arrives(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own `main` and TRL's own trainer; of the tests' are the sampler, the transfer of weights and the kernel."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental import async_grpo

    on_a_cpu()
    policy, sampler = tmp_path / "policy", Sampler(draws)
    model = tiny_qwen3(layers=8)  # as many as EAGLE-3's own choice needs
    model.save_pretrained(policy)
    drafter = first_drafter(tmp_path / "drafter", model.config)
    make_tokenizer().save_pretrained(policy)
    config = partial(async_grpo.AsyncGRPOConfig, use_cpu=True, bf16=False, token_budget=0, disable_tqdm=True)
    trainer = partial(async_grpo.AsyncGRPOTrainer, rollout_worker=sampler, weight_transfer=sampler)
    monkeypatch.setattr(async_grpo, "AsyncGRPOConfig", config)
    monkeypatch.setattr(async_grpo, "AsyncGRPOTrainer", trainer)
    told = ["--model", str(policy), "--url", service.url, "--initial-drafter", drafter, "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["trl_async_grpo", *told])
    trl_async_grpo.main()
    stats = ast.literal_eval(capsys.readouterr().out.strip().splitlines()[-1])
    assert (stats["failures"], stats["captured_rollouts"], stats["dead"]) == (0, 24, 0), stats
    files = [load_batch(path) for path in service.layout.spool("async-grpo").glob("*.safetensors")]
    assert {batch.policy_version for batch in files} == {1, 2, 3}
    assert sum(batch.rollouts for batch in files) == 24


def test_async_grpos_reward_is_one_that_trl_can_give_to_its_sampler() -> None:
    """In another process, so it is pickled; called with conversations and with the columns of the data."""
    reward = pickle.loads(pickle.dumps(trl_async_grpo.reward))  # noqa: S301 - our own
    said = [[{"role": "assistant", "content": text}] for text in ("1234", " 1234 \n", "It is 1234", "1243", "")]
    assert reward(completions=said, prompts=[], completion_ids=[], number=["1234"] * 5) == [1.0, 1.0, 0.4, 0.0, 0.0]
