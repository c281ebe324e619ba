"""A run whose policy ships an MTP head: registered, scored, trained, published, resumed, like any other drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.command_fixtures import LATENT
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.worker.worker_fixtures import CONFIG, FINGERPRINT, HIDDEN, LAYERS, Bench, World, joined, recorded_windows
from safetensors.torch import load_file
from typer.testing import CliRunner

from drafter.batch import load_batch
from drafter.errors import TargetHeadError
from drafter.files.checkpoint import write_drafter
from drafter.files.kinds import read_kind
from drafter.files.mtp import write_mtp
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy
from drafter.replay.replay import replay
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.cli.main import app
from service.storage.registry import Registry

OPEN: dict[str, Any] = {"gate_min_gain": 0.0, "recent_tokens": 100_000, "learning_rate": 1e-2}
SIZES = CONFIG | LATENT


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url) as made:
        yield made


def module() -> MtpDrafter:
    torch.manual_seed(0)
    return MtpDrafter(MtpConfig.from_target(SIZES))


def run_file(world: World, directory: Path) -> bytes:
    """Body of PUT /runs/{run} as the hook makes it from `initial_drafter=directory`."""
    directory.mkdir()
    write_mtp(directory, module())
    tensors = {"embed_tokens": as_wire(world.embed), "lm_head": as_wire(world.heads[0])}
    tensors |= {f"drafter.{n}": as_wire(t) for n, t in load_file(directory / "model.safetensors").items()}
    meta = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(CONFIG),
        "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
        "target_fingerprint": FINGERPRINT,
        "policy_version": "0",
        "drafter_config": (directory / "config.json").read_text(),
    }
    return joined(wire.encode(tensors, meta))


def test_an_mtp_head_is_scored_trained_published_and_resumed(bench: Bench, tmp_path: Path) -> None:
    bench.register(run_file(bench.world, tmp_path / "initial"))
    worker = bench.worker(**OPEN)
    registry = Registry(bench.layout)
    first = registry.latest("default")
    assert first is not None
    assert (first.reason, first.kind, first.aux_layers) == ("initial drafter", "mtp", ())
    for name in "abcdefghijkl":
        bench.post(name)
        bench.drain(worker)
    latest = registry.latest("default")
    assert latest is not None
    assert latest.version != first.version, "the gate let a trained one through"
    assert latest.config_fingerprint == first.config_fingerprint
    assert latest.gate is not None
    gate = latest.gate.model_dump()
    assert gate["alpha_candidate"] > gate["alpha_served"]
    scores = bench.store.scores()
    assert all(scores[bench.posted[-1]].sums(name) for name in ("served", "candidate", "frozen", "ngram"))
    published = load_file(bench.layout.drafter("default", latest.version) / "model.safetensors")
    assert all(name.startswith("model.layers.8.") for name in published)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in published)
    assert {tuple(t.shape) for n, t in published.items() if n.endswith("eh_proj.weight")} == {(HIDDEN, 2 * HIDDEN)}
    worker.close()
    again = bench.worker(**OPEN)
    for name, parameter in worker.learner.lineage.candidate.named_parameters():
        assert torch.equal(parameter, dict(again.learner.lineage.candidate.named_parameters())[name]), name
    bench.post("m")
    bench.drain(again)
    assert bench.state(bench.posted[-1]) == "trained"


def test_a_rollout_that_is_not_finite_is_left_out_of_an_mtp_runs_batch_and_the_others_train(
    bench: Bench, tmp_path: Path
) -> None:
    def overflow(t: dict[str, torch.Tensor]) -> None:
        t["last_hidden"][int(t["cu_seqlens"][2]) + 1] = float("-inf")  # of a prompt, which an MTP module reads too

    bench.register(run_file(bench.world, tmp_path / "initial"))
    batch_id = bench.post("a", change=overflow)
    worker = bench.worker(**OPEN)
    bench.drain(worker)
    assert bench.state(batch_id) == "trained", bench.reason(batch_id)
    assert bench.reason(batch_id).startswith("1 of 8 rollouts are left out: last_hidden holds NaN or infinity")
    assert bench.store.scores()[batch_id].rollouts == 7
    assert all(torch.isfinite(p).all() for p in worker.learner.lineage.candidate.parameters())


def test_a_module_that_was_trained_elsewhere_is_looked_at_by_the_gate(bench: Bench, tmp_path: Path) -> None:
    bench.register(run_file(bench.world, tmp_path / "initial"))
    worker = bench.worker(learning_rate=1e-12, gate_min_gain=0.005)
    (tmp_path / "lab").mkdir()
    torch.manual_seed(1)
    write_mtp(tmp_path / "lab", MtpDrafter(MtpConfig.from_target(SIZES)))
    (tmp_path / "eagle").mkdir()
    write_drafter(tmp_path / "eagle", bench.world.drafter())
    service = RunningService(state_dir=bench.layout.root, redis_url=bench.redis_url)
    try:
        sent, other = (
            CliRunner().invoke(app, ["publish", str(tmp_path / name), "--service", service.url])
            for name in ("lab", "eagle")
        )
    finally:
        service.stop()
    assert sent.exit_code == 0, sent.output
    assert "its kind is eagle3" in str(other.exception)
    version = sent.output.split()[0]
    manifest = Registry(bench.layout).get("default", version)
    assert (manifest.kind, manifest.sequence) == ("mtp", 0)
    bench.post("a", rollouts=16)
    bench.drain(worker)
    looks = {name: trial["spent"]["looks"] for name, trial in worker.learner.judge.gate.state["trials"].items()}
    assert [n for name, n in looks.items() if name.startswith(version)] == [1], "also where it was refused by then"


def test_it_draws_from_the_head_of_each_batchs_policy(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = recorded_windows(monkeypatch)
    bench.register(run_file(bench.world, tmp_path / "initial"))
    worker = bench.worker(**OPEN)
    bench.post("a")
    bench.drain(worker)
    bench.world.move_head(1)
    bench.put_head(1)
    bench.post("b", policy_version=1)
    bench.drain(worker)
    assert any({version for version, _ in window} == {0, 1} for window in windows), "or nothing was tested"
    for window in windows:
        for version, policy in window:
            assert torch.equal(policy.needed_head().lm_head, bench.world.heads[version])


def test_it_cannot_be_replayed_without_the_policys_head(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    path.write_bytes(bench.world.rollout_file("a"))
    with pytest.raises(TargetHeadError, match="lm_head of policy version 0 is needed"):
        replay(module(), load_batch(path), Policy(0, bench.world.embed), depth=2)


def test_rollouts_without_the_prompts_states_are_refused_and_the_hook_is_told_so(bench: Bench, tmp_path: Path) -> None:
    service = RunningService(state_dir=bench.layout.root, redis_url=bench.redis_url)
    try:
        body = run_file(bench.world, tmp_path / "initial")
        registered = service.client.put("/runs/default", content=body, headers=HEADERS)
        refused = service.post(bench.world.rollout_file("a", last_rows="predicting"))
        taken = service.post(bench.world.rollout_file("a"))
    finally:
        service.stop()
    assert registered.json()["last_rows"] == "all"
    assert (refused.status_code, refused.json()["field"]) == (422, "last_hidden")
    assert "send draftalign.rollouts.v1" in refused.json()["detail"]
    assert (taken.status_code, taken.json()["last_rows"]) == (202, "all")


def test_such_a_file_in_the_spool_is_a_dead_letter_and_no_dead_worker(bench: Bench, tmp_path: Path) -> None:
    bench.register(run_file(bench.world, tmp_path / "initial"))
    worker = bench.worker(**OPEN)
    bad = bench.post("a", last_rows="predicting")
    bench.drain(worker)
    good = bench.post("b")
    bench.drain(worker)
    assert bench.state(bad) == "dead"
    assert "reads last_hidden of all" in (bench.queue.batch(bad) or {})["reason"]
    assert bench.state(good) == "trained"


def test_the_kind_is_read_from_the_config(bench: Bench, tmp_path: Path) -> None:
    write_mtp(tmp_path, module())
    assert isinstance(read_kind(tmp_path), MtpDrafter)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draftalign": {"kind": "medusa"}}))
    with pytest.raises(Exception, match=r"kind must be eagle3 or mtp, got 'medusa'"):
        read_kind(tmp_path)
