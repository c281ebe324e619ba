"""A drafter that was trained elsewhere: sent over HTTP, judged by a real worker, and its verdict told in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from helpers.service.service_fixtures import HEADERS, RunningService, publish
from helpers.worker.worker_fixtures import DRAFT, Bench, Nest, joined
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.gate_error import WORLDS, World
from benchmarks.sent import NOISY
from benchmarks.sent import send as send_to
from drafter.files.checkpoint import export_config, write_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.gate import Look, Verdict
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.access.audit import AuditLog
from service.cli.main import app
from service.monitor.events import GateEvidence
from service.storage.admission import sent as admission
from service.storage.registry import Registry
from service.worker.promotion import gate as promotion

#: The candidate learns nothing, so that what was sent is what changes.
SETTINGS: dict[str, Any] = {"gate_min_gain": 0.005, "learning_rate": 1e-12, "keep_versions": 3}


@pytest.fixture
def served(bench: Bench, service: RunningService) -> str:
    """The run serves a random drafter."""
    bench.begin()
    bench.worker(**SETTINGS).close()
    return str(service.client.get("/drafter/latest").json()["version"])


def body(drafter: Eagle3Drafter, change: Callable[[dict[str, Tensor]], None] | None = None, **config: Any) -> bytes:
    """Body of POST /drafters; `change` may spoil the tensors, `config` the configuration."""
    tensors = dict(drafter.state_dict())
    if change is not None:
        change(tensors)
    document = json.dumps(export_config(drafter.config) | config)
    metadata = {"format": wire.DRAFTER_FORMAT, "drafter_config": document}
    return joined(wire.encode({n: as_wire(t.detach()) for n, t in tensors.items()}, metadata))


def send(service: RunningService, content: bytes, run: str = "default") -> httpx.Response:
    asked = {"run": run, "by": "ada", "reason": "from the lab"}
    return service.client.post("/drafters", content=content, headers=HEADERS, params=asked)


def history(service: RunningService, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in service.client.get("/drafters").json()["history"] if e["event"] in kinds]


def test_a_better_drafter_from_elsewhere_is_served_once_rollouts_have_shown_it(
    bench: Bench, service: RunningService, workers: Nest, served: str, tmp_path: Path
) -> None:
    directory = tmp_path / "from-the-lab"
    directory.mkdir()
    better = bench.world.trained_drafter(tmp_path)
    write_drafter(directory, better, dtype=torch.bfloat16)
    told = CliRunner().invoke(
        app, ["publish", str(directory), "--service", service.url, "--reason", "a longer training"]
    )
    assert told.exit_code == 0, told.output
    version = told.output.split()[0]
    assert "waits for the gate" in told.output
    *_, written = AuditLog(service.layout).read(None)
    assert (written["action"], written["status"], written["version"]) == ("send a drafter", 201, version)
    assert (written["reason"], written["client"]) == ("a longer training", "127.0.0.1")
    assert service.client.get("/drafters").json()["waiting"] == [version]
    assert service.client.get("/drafter/latest").json()["version"] == served, "nothing has shown it yet"
    workers.start(bench, settings=SETTINGS)
    for n in range(8):
        batch = bench.post(f"b{n}", rollouts=32)
        bench.wait(lambda batch=batch: bench.state(batch) == "trained")  # type: ignore[misc]
        if service.client.get("/drafter/latest").json()["version"] == version:
            break
    latest = service.client.get("/drafter/latest").json()
    assert latest["version"] == version
    (sent,) = history(service, "sent")
    assert sent["reason"] == "a longer training"
    published = history(service, "published")[-1]
    assert published["reason"].startswith(f"sent by {sent['by']} (a longer training): expected gain +")
    assert published["gate"]["looks"] >= 1
    assert published["previous"] == served
    listing = service.client.get("/drafters").json()
    assert listing["waiting"] == []
    assert latest["config_fingerprint"] == listing["versions"][0]["config_fingerprint"], "engines can swap to it"
    bench.wait(lambda: bench.checkpoint() is not None)
    workers.kill_all()
    candidate = bench.worker(**SETTINGS).learner.lineage.candidate.state_dict()
    for name, value in better.state_dict().items():
        assert torch.allclose(candidate[name].float(), value.bfloat16().float(), atol=1e-3), "trained on from it"


def test_a_drafter_that_is_no_better_is_refused_in_words_and_never_served(
    bench: Bench, service: RunningService, workers: Nest, tmp_path: Path
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.trained_drafter(tmp_path)))
    workers.start(bench, settings=SETTINGS)
    bench.wait(lambda: service.client.get("/drafter/latest").status_code == 200)
    version = send(service, body(bench.world.drafter(seed=3))).json()["version"]
    for n in range(6):
        batch = bench.post(f"b{n}", rollouts=32)
        bench.wait(lambda batch=batch: bench.state(batch) == "trained")  # type: ignore[misc]
        if history(service, "refused"):
            break
    (refused,) = [e for e in history(service, "refused") if e.get("version") == version]
    assert refused["reason"].startswith("sent by ada (from the lab): it is no better: expected gain -")
    assert refused["by"] == "ada"
    assert service.client.get("/drafter/latest").json()["version"] != version
    assert service.client.get("/drafters").json()["waiting"] == []
    assert f"{version}  " in listed(service)
    assert "  refused: sent by ada (from the lab): it is no better: " in listed(service)
    again = send(service, body(bench.world.drafter(seed=3)))
    assert (again.status_code, again.json()["version"]) == (200, version), "the same files may be judged again"
    assert service.client.get("/drafters").json()["waiting"] == [version]
    assert "  waits for the gate\n" in listed(service)
    assert "refused" not in listed(service)


def listed(service: RunningService) -> str:
    return CliRunner().invoke(app, ["drafters", "--service", service.url]).output


def spoilt(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return change


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["extra.weight"] = tensors.pop("norm.weight")


def flipped(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


HOSTILE: dict[str, tuple[Callable[[Bench], bytes], int, str]] = {
    "NaN": (lambda b: body(b.world.drafter(), spoilt("fc.weight", float("nan"))), 422, "holds NaN, infinity, or"),
    "an overflow": (lambda b: body(b.world.drafter(), spoilt("fc.weight", -3e38)), 422, "or values of 2^20 and more"),
    "a name": (lambda b: body(b.world.drafter(), renamed), 422, "tensors missing: norm.weight"),
    "two exports": (lambda b: body(b.world.drafter(), flipped), 422, "they come from two exports"),
    "a width": (lambda b: body(b.world.drafter(), intermediate_size=25), 422, "must be"),
    "a rotary base": (lambda b: body(b.world.drafter(), rope_theta=5.0, rope_parameters={}), 409, "rope_theta is"),
    "a kind": (lambda b: body(b.world.drafter(), draftalign={"kind": "medusa"}), 422, "must be eagle3 or mtp"),
    "no drafter": (lambda b: b.world.run_file(), 422, "expected 'draftalign.drafter.v1'"),
    "no file": (lambda _: b"x" * 100, 422, "header"),
    "another vocabulary": (
        lambda b: body(b.world.drafter(vocabulary=torch.arange(1, DRAFT + 1))),
        409,
        "its draft vocabulary is another one",
    ),
    "a smaller vocabulary": (
        lambda b: body(b.world.drafter(vocabulary=torch.arange(DRAFT - 1))),
        409,
        "draft_vocab_size is 32 in the run, 31 in the drafter",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_drafter_of_the_lineage_is_refused_when_it_is_sent(
    bench: Bench, service: RunningService, served: str, name: str
) -> None:
    make, status, words = HOSTILE[name]
    reply = send(service, make(bench))
    assert (reply.status_code, words in reply.json()["detail"]) == (status, True), reply.text
    assert Registry(bench.layout).versions("default") == [served]
    assert not [p for p in bench.layout.drafters("default").iterdir() if p.name.startswith(".")]
    assert history(service, "sent") == []


def test_weights_that_overflow_are_the_senders_fault_and_no_batchs(
    bench: Bench, service: RunningService, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service before this one let them in: they are finite, so nothing but a replay shows it."""
    monkeypatch.setattr(admission, "check_finite", lambda _: None)
    wild = body(
        bench.world.drafter(), lambda t: t.update({n: v * 1e30 for n, v in t.items() if n.endswith("proj.weight")})
    )
    reply = send(service, wild)
    assert reply.status_code == 201, reply.text
    worker = bench.worker(**SETTINGS)
    batch = bench.post("a", rollouts=16)
    bench.drain(worker)
    assert bench.state(batch) == "trained"
    (refused,) = [e for e in history(service, "refused") if "version" in e]
    assert "it cannot be replayed: replay gives NaN" in refused["reason"]
    assert Registry(bench.layout).versions("default") == [served], "nothing can be done with it"
    record = bench.store.scores()[batch]
    assert record.best is not None


def test_only_so_many_wait_each_once_and_pruning_spares_them(
    bench: Bench, service: RunningService, served: str
) -> None:
    bodies = [body(bench.world.drafter(seed=10 + n)) for n in range(5)]
    versions = [send(service, one).json()["version"] for one in bodies[:4]]
    full = send(service, bodies[4])
    assert full.status_code == 409
    assert "4 drafters of run 'default' wait" in full.json()["detail"]
    repeated = send(service, bodies[0])
    assert (repeated.status_code, repeated.json()["version"]) == (200, versions[0])
    worker = bench.worker(**SETTINGS)
    worker.learner.lineage._prune()  # keeps three
    assert Registry(bench.layout).versions("default") == [served, *versions]
    rolled = service.client.post(f"/drafter/{versions[1]}/rollback?run=default", json={"reason": "by hand"})
    assert rolled.status_code == 200, "a person may serve it unproven"
    assert service.client.get("/drafters").json()["waiting"] == [versions[0], *versions[2:]]
    taken = send(service, bodies[1])
    assert taken.status_code == 409
    assert "serves this very drafter already" in taken.json()["detail"]


def test_a_run_that_serves_nothing_has_nothing_to_compare_with(bench: Bench, service: RunningService) -> None:
    bench.register()
    reply = send(service, body(bench.world.drafter()))
    assert reply.status_code == 409
    assert "register the run with this one" in reply.json()["detail"]
    assert send(service, body(bench.world.drafter()), run="nobody").status_code == 404


def test_a_held_run_judges_what_was_sent_when_it_is_released(
    bench: Bench, service: RunningService, served: str, tmp_path: Path
) -> None:
    version = send(service, body(bench.world.trained_drafter(tmp_path))).json()["version"]
    assert service.client.put(f"/drafter/{served}/hold?run=default", json={"reason": "x"}).status_code == 200
    worker = bench.worker(**SETTINGS)
    for n in range(3):
        bench.post(f"held {n}", rollouts=32)
        bench.drain(worker)
    assert service.client.get("/drafters").json()["waiting"] == [version]
    assert service.client.delete(f"/drafter/{served}/hold?run=default").status_code == 204
    bench.post("one", rollouts=1)
    bench.drain(worker)
    for n in range(4):
        bench.post(f"b{n}", rollouts=32)
        bench.drain(worker)
    assert service.client.get("/drafter/latest").json()["version"] == version


def test_a_worker_that_is_behind_judges_what_was_sent_on_some_siblings(
    bench: Bench, service: RunningService, served: str, tmp_path: Path
) -> None:
    version = send(service, body(bench.world.trained_drafter(tmp_path))).json()["version"]
    worker = bench.worker(**SETTINGS)
    for n in range(4):
        worker.learner.scorer.keeps_up = False
        bench.post(f"b{n}", prompts=[p for p in range(16 * n, 16 * n + 16) for _ in range(4)], policy_version=n)
        bench.drain(worker)
    assert service.client.get("/drafter/latest").json()["version"] == version != served


@pytest.mark.parametrize("world", [WORLDS[0], NOISY[0]], ids=lambda world: world.name)
def test_an_equal_or_worse_drafter_is_not_served_and_a_better_one_is(world: World) -> None:
    """A short form of benchmarks/sent.py."""
    rng = np.random.default_rng(5)
    for gain in (-0.2, -0.01, 0.0):
        assert not any(send_to(world, gain, rng).published for _ in range(15)), gain
    better = [send_to(world, 0.1, rng) for _ in range(15)]
    assert sum(one.published for one in better) == 15


def test_a_refused_drafter_that_is_sent_again_is_looked_at_again(bench: Bench, tmp_path: Path) -> None:
    """What it spent of the gate's error stays spent: its second trial has a smaller share."""
    bench.register(bench.world.run_file(drafter=bench.world.trained_drafter(tmp_path)))
    worker = bench.worker(**SETTINGS)
    registry = Registry(bench.layout)
    first, shares = registry.latest("default"), []
    assert first is not None
    staged = registry.stage("default")
    write_drafter(staged, bench.world.drafter(seed=3))
    sent, _ = registry.archive("default", staged, like=first, reason="x", by=None, most_waiting=1)
    for n in range(2):
        for k in range(6):
            bench.post(f"b{n} {k}", rollouts=32)
            bench.drain(worker)
            if not registry.history.sent("default"):
                break
        assert registry.history.sent("default") == {}
        trials = worker.learner.judge.gate.state["trials"]
        shares.append({name: trial["share"] for name, trial in trials.items() if name.startswith(sent.version)})
        staged = registry.stage("default")
        write_drafter(staged, bench.world.drafter(seed=3))
        assert registry.archive("default", staged, like=first, reason="x", by=None, most_waiting=1) == (sent, False)
    assert (len(shares[0]), len(shares[1])) == (1, 2)
    assert sum(shares[1].values()) <= 0.1


def test_what_is_sent_and_the_candidate_are_both_refused_on_one_claim(
    bench: Bench, service: RunningService, served: str
) -> None:
    version = send(service, body(bench.world.drafter(seed=5))).json()["version"]
    lineage, evidence = bench.worker(**SETTINGS).learner.lineage, GateEvidence(judged_to="7-1")
    lineage.refuse_sent(version, "no better", evidence)
    for _ in range(2):  # a worker that died judges the claim again
        lineage.refuse(1, "no gain", evidence)
    assert [event.get("version") for event in history(service, "refused")] == [version, None]
    lineage.refuse(1, "no gain", GateEvidence(judged_to="8-1"))
    assert len(history(service, "refused")) == 3


def test_a_drafter_whose_gain_stays_in_doubt_is_given_up(
    bench: Bench, service: RunningService, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = Verdict(False, 0.01, -0.02, 0.04, promotion.SENT_LOOKS - 1, 0.5, "in doubt")
    version = send(service, body(bench.world.drafter(seed=5))).json()["version"]
    gate = bench.worker(**SETTINGS).learner.judge.gate
    contest = promotion.Contest(version, doubt, Look(0.0, 1.0, 4, 4, 1.0, 1.0))
    gate.dismiss_sent([contest])
    assert service.client.get("/drafters").json()["waiting"] == [version]
    looked = Verdict(False, 0.01, -0.02, 0.04, promotion.SENT_LOOKS, 0.5, "in doubt")
    gate.dismiss_sent([promotion.Contest(version, looked, contest.look)])
    (refused,) = history(service, "refused")
    assert f"{promotion.SENT_LOOKS} looks have not shown it to be better: in doubt" in refused["reason"]
    again = send(service, body(bench.world.drafter(seed=5))).json()["version"]
    registry = Registry(bench.layout)
    for n in range(promotion._SENT_OUTRUN):
        publish(registry, content=b"%d" % n)
    assert again == version
    gate.dismiss_sent([contest])
    assert "3 other versions were published while it waited" in history(service, "refused")[-1]["reason"]
    assert registry.history.sent("default") == {}
