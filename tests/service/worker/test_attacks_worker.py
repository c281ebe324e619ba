"""A worker process lives through the whole corpus: hostile runs and rollouts are marked, an honest run is trained.

What the API refuses cannot reach the worker. So the runs are put on the disk as a service without the check did, and
the rollouts are those that the API takes: it never looks at the features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attacks.accepted import ACCEPTED
from attacks.runs import RUNS, TAKEN
from attacks.sent import DRAFTERS, HEADS, REPORTS, Change, report
from helpers.service.command_fixtures import LATENT
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.service_fixtures import run_file as plain_run_file
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.worker_fixtures import CONFIG, LAYERS, Bench, Nest, alive, joined
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from drafter.files.checkpoint import export_config
from drafter.model.eagle3 import Eagle3Drafter
from drafter.mtp.module import MtpDrafter
from rl_hooks import wire
from rl_hooks.format.eagle3 import Llama3Rope
from rl_hooks.format.mtp import LatentSizes, MtpConfig, Yarn
from rl_hooks.sending.features import as_wire

#: Of these files the worker uses the other rollout.
HALF_SOUND: Final = (
    "features_of_nan_in_one_rollout",
    "features_of_nan_in_one_rollout_and_squares_that_overflow_in_the_other",
)


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url) as made:
        yield made


def states(bench: Bench, run: str, batches: list[str]) -> dict[str, dict[str, str]]:
    queue = RolloutQueue(bench.redis, run)
    return {batch: queue.batch(batch) or {"state": "unknown"} for batch in batches}


def errors(bench: Bench, runs: list[str]) -> dict[str, Any]:
    return {run: Store(bench.redis, run).worker().error or None for run in runs}


def test_a_worker_lives_through_every_hostile_run_and_trains_the_honest_one(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="honest")
    hostile = [f"evil-{number}" for number in range(len(RUNS))]
    pid = workers.start(bench)
    first = bench.post_file(bench.world.rollout_file("first", run="honest"))
    for run, attack in zip(hostile, RUNS.values(), strict=True):
        bench.register(attack.body, run=run, checked=False)
    bench.wait(lambda: all(errors(bench, hostile).values()))
    later = [bench.post_file(bench.world.rollout_file(name, run="honest")) for name in ("b", "c", "d")]
    bench.wait(lambda: all(b["state"] == "trained" for b in states(bench, "honest", [first, *later]).values()))
    assert alive(pid)
    assert errors(bench, ["honest"]) == {"honest": None}
    for run, (name, attack) in zip(hostile, RUNS.items(), strict=True):
        reply = service.client.get(f"/runs/{run}")
        assert reply.status_code == 200, f"{name}: {reply.text}"
        told = reply.json()["worker_error"]
        assert attack.words in told, f"{name}: {told}"
    metrics = service.client.get("/metrics").text
    assert 'draftalign_worker_error{run="honest"} 0.0' in metrics
    assert metrics.count("draftalign_worker_error{") == len(hostile) + 1
    text = workers.log.read_text()
    assert text.count(f"{pid} ") > 0
    assert "Traceback" not in text, "every one of them is foreseen, and named"


def test_a_drafter_with_the_largest_figures_that_are_taken_is_trained_beside_an_honest_one(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    """Stretched positions, a norm before `fc`, an MTP module: what the API takes is nothing that the worker dies of."""
    world = bench.world
    plain = world.drafter()
    figures = Llama3Rope(1e300, low_freq_factor=1e-300, high_freq_factor=1e300, original_max_position_embeddings=1)
    config = replace(plain.config, rope_scaling=figures, norm_before_fc=True)
    extreme = Eagle3Drafter(config, plain.vocabulary)
    extreme.init_from_target(world.heads[0][plain.vocabulary.ids])
    yarn = Yarn(1 << 20, 1, beta_fast=1e6, beta_slow=1e-3, mscale=128.0, mscale_all_dim=128.0)
    sizes = MtpConfig.from_target(CONFIG | LATENT | {"routed_scaling_factor": 1024.0})
    assert isinstance(sizes.attention, LatentSizes)
    attention = replace(sizes.attention, rope_theta=math.nextafter(1.0, 2.0), yarn=yarn)
    torch.manual_seed(0)
    module = MtpDrafter(replace(sizes, attention=attention))
    for run, drafter in (("honest", plain), ("extreme", extreme), ("module", module)):
        reply = service.client.put(f"/runs/{run}", content=world.run_file(drafter=drafter), headers=HEADERS)
        assert reply.status_code == 201, reply.text
    pid = workers.start(bench)
    posted = {
        run: [bench.post_file(world.rollout_file(f"{run}{number}", run=run)) for number in range(3)]
        for run in ("honest", "extreme", "module")
    }
    bench.wait(lambda: not any(b["state"] == "queued" for r in posted for b in states(bench, r, posted[r]).values()))
    assert {b["state"] for run in posted for b in states(bench, run, posted[run]).values()} == {"trained"}
    assert alive(pid)
    assert errors(bench, list(posted)) == dict.fromkeys(posted)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_drafter_that_drafts_nan_is_never_published_and_a_sound_one_takes_its_place(
    bench: Bench, service: RunningService, workers: Nest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The API lets in what overflows, as it does what no bound of its own foresees, so that the worker meets it."""
    monkeypatch.setattr("service.api.runs.check_finite", lambda _: None)
    world = bench.world

    def made() -> Eagle3Drafter | MtpDrafter:
        torch.manual_seed(0)
        return world.drafter() if kind == "eagle3" else MtpDrafter(MtpConfig.from_target(CONFIG | LATENT))

    poisoned = made()
    for weight in poisoned.parameters():
        weight.data.fill_(1e30)
    bodies = {"honest": world.run_file(drafter=made()), "evil": world.run_file(drafter=poisoned)}
    for run, body in bodies.items():
        assert service.client.put(f"/runs/{run}", content=body, headers=HEADERS).status_code == 201
    pid = workers.start(bench)
    posted = {run: [bench.post_file(world.rollout_file(f"{run}{n}", run=run)) for n in range(2)] for run in bodies}
    bench.wait(lambda: errors(bench, ["evil"])["evil"] and "queued" not in ended(bench, posted, "honest"))
    assert "cannot draft" in errors(bench, ["evil"])["evil"]
    assert service.client.get("/drafter/latest", params={"run": "evil"}).status_code == 404
    reply = service.client.put("/runs/evil", content=bodies["honest"], headers=HEADERS)
    assert reply.status_code == 201, "it replaces the file"
    bench.wait(lambda: "queued" not in ended(bench, posted, "evil"))
    assert ended(bench, posted, "honest") == ended(bench, posted, "evil") == {"trained"}
    assert errors(bench, list(bodies)) == dict.fromkeys(bodies)
    assert alive(pid)
    assert "Traceback" not in workers.log.read_text()


def ended(bench: Bench, posted: dict[str, list[str]], run: str) -> set[str]:
    """The states of a run's batches."""
    return {batch["state"] for batch in states(bench, run, posted[run]).values()}


def test_every_odd_run_that_is_taken_is_trained_beside_the_honest_one(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    """What PUT takes, the worker can begin with: that also depends on values, and on this service's settings."""
    world, runs = bench.world, {"honest": dict[str, Any]()}
    runs |= {f"odd-{number}": fields for number, fields in enumerate(TAKEN.values())}
    pid = workers.start(bench)
    for run, fields in runs.items():
        config = CONFIG | fields
        about = {"config": json.dumps(config), "target_fingerprint": wire.target_fingerprint(config, LAYERS)}
        reply = service.client.put(f"/runs/{run}", content=world.run_file(metadata=about), headers=HEADERS)
        assert reply.status_code == 201, reply.text
    posted = {run: [bench.post_file(world.rollout_file(f"{run}{n}", run=run)) for n in range(2)] for run in runs}

    bench.wait(lambda: all("queued" not in ended(bench, posted, run) or errors(bench, [run])[run] for run in runs), 90)
    assert errors(bench, list(runs)) == dict.fromkeys(runs)
    assert {b["state"] for run in runs for b in states(bench, run, posted[run]).values()} == {"trained"}
    assert alive(pid)
    assert "Traceback" not in workers.log.read_text()


def test_a_worker_lives_through_every_hostile_batch_and_trains_the_honest_run(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="honest")
    reply = service.client.put("/runs/evil", content=plain_run_file(), headers=HEADERS)
    assert reply.status_code == 201
    pid = workers.start(bench, settings={})
    honest, hostile = [], {}
    for number, (name, make) in enumerate(sorted(ACCEPTED.items())):
        reply = service.post(make())
        assert reply.status_code == 202, f"{name}: {reply.text}"
        hostile[reply.json()["batch_id"]] = name
        if number % 4 == 0:
            body = bench.world.rollout_file(f"b{number}", run="honest")
            reply = service.post(body)
            assert reply.status_code == 202, reply.text
            honest.append(reply.json()["batch_id"])
    bench.wait(lambda: all(b["state"] == "trained" for b in states(bench, "honest", honest).values()), 90)
    bench.wait(lambda: not any(b["state"] == "queued" for b in states(bench, "evil", list(hostile)).values()), 90)
    assert alive(pid)
    assert errors(bench, ["honest", "evil"]) == {"honest": None, "evil": None}
    assert not any(b["state"] == "dead" for b in states(bench, "honest", honest).values())
    ended = {hostile[batch]: record for batch, record in states(bench, "evil", list(hostile)).items()}
    assert ended["nothing_wrong"]["state"] == "trained"
    for name, record in ended.items():
        assert record["state"] != "dead" or record["reason"], name
        assert "nan" not in name or record["state"] == "dead" or name in HALF_SOUND, name
    for name in HALF_SOUND:
        assert ended[name]["state"] == "trained"
        assert "1 of 2 rollouts are left out" in ended[name]["reason"]
    assert RolloutQueue(bench.redis, "evil").counters()["not_finite_total"] == len(HALF_SOUND)
    assert RolloutQueue(bench.redis, "honest").counters()["not_finite_total"] == 0
    assert "above 0" in ended["log_probabilities_of_a_certainty_and_more"]["reason"]
    for lie in ("log_probabilities_that_cannot_be", "normalisers_that_hide_log_probabilities"):
        assert "disagree with the features" in ended[lie]["reason"]
    assert RolloutQueue(bench.redis, "honest").counters()["dead_total"] == 0


def spoilt(tensors: dict[str, Tensor], change: Change, metadata: dict[str, str]) -> bytes:
    """A file of these tensors after the change."""
    change(tensors)
    return joined(wire.encode({name: as_wire(tensor.detach()) for name, tensor in tensors.items()}, metadata))


def test_hostile_heads_drafters_and_reports_of_one_run_leave_the_other_one_trained(
    bench: Bench, service: RunningService, workers: Nest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API lets in what overflows, as a service before this one did, so that the worker meets it."""
    for module in ("service.api.runs", "service.storage.admission.sent"):
        monkeypatch.setattr(f"{module}.check_finite", lambda _: None)
    world, drafter = bench.world, bench.world.trained_drafter(tmp_path)
    for run in ("honest", "evil", "lab"):
        bench.register(world.run_file(drafter=drafter), run=run)
    pid = workers.start(bench, settings={"gate_min_gain": 0.005})
    bench.wait(lambda: service.client.get("/drafter/latest", params={"run": "evil"}).status_code == 200)
    bench.wait(lambda: service.client.get("/drafter/latest", params={"run": "lab"}).status_code == 200)
    served = service.client.get("/drafter/latest", params={"run": "evil"}).json()["version"]
    sent: dict[str, list[str]] = {"honest": [], "evil": [], "lab": []}

    def send(name: str, policy_version: int = 0) -> None:
        """A batch for each run, sound but for the head."""
        for run, batches in sent.items():
            reply = service.post(world.rollout_file(name, run=run, policy_version=policy_version))
            assert reply.status_code == 202, reply.text
            batches.append(reply.json()["batch_id"])

    def judged() -> bool:
        return not any(b["state"] == "queued" for run in sent for b in states(bench, run, sent[run]).values())

    taken = 0
    for fields in REPORTS.values():
        reply = service.client.post("/acceptance", json=report("evil", served, fields))
        assert reply.status_code in {200, 422}, reply.text
        taken += reply.status_code == 200
    assert taken >= 15, "or the worker meets none of them"
    send("reported")
    for number, (name, change) in enumerate(HEADS.items(), 1):
        metadata = {"format": wire.HEAD_FORMAT, "policy_version": str(number)}
        body = spoilt({"lm_head": world.heads[0].clone()}, change, metadata)
        reply = service.client.put("/runs/evil/head", content=body, headers=HEADERS)
        assert reply.status_code in {201, 409, 422}, f"{name}: {reply.text}"
        if reply.status_code != 201:  # another vocabulary may hide such rows from the API; an older one took parts
            bench.layout.head("evil", number).write_bytes(body)
        send(f"head {number}", number)
    bench.wait(judged, 90)
    dead = [b["state"] for b in states(bench, "evil", sent["evil"]).values()].count("dead")
    assert dead >= 5, "heads that are not the policy's: its log-probabilities say so"
    document = json.dumps(export_config(drafter.config))
    for number, (name, change) in enumerate(DRAFTERS.items()):
        metadata = {"format": wire.DRAFTER_FORMAT, "drafter_config": document}
        body = spoilt(dict(drafter.state_dict()), change, metadata)
        reply = service.client.post("/drafters", content=body, headers=HEADERS, params={"run": "lab"})
        assert reply.status_code == 201, f"{name}: {reply.text}"
        for look in range(24):
            send(f"drafter {number} {look}", 100)
            bench.wait(judged, 90)
            listing = service.client.get("/drafters", params={"run": "lab"}).json()
            if not listing["waiting"]:
                break
        assert not listing["waiting"], f"{name} has no verdict"
    assert alive(pid)
    assert {b["state"] for b in states(bench, "honest", sent["honest"]).values()} == {"trained"}
    assert {b["state"] for b in states(bench, "lab", sent["lab"]).values()} == {"trained"}
    assert errors(bench, list(sent)) == dict.fromkeys(sent)
    for run in sent:
        for path in ("/alpha", "/drafters", "/drafter/latest"):
            assert service.client.get(path, params={"run": run}).status_code == 200, path
        for path in (f"/runs/{run}", f"/runs/{run}/worth"):
            assert service.client.get(path).status_code == 200, path
    metrics = service.client.get("/metrics")
    assert metrics.status_code == 200
    families = {family.name for family in text_string_to_metric_families(metrics.text)}
    assert "draftalign_worker_error" in families
    history = service.client.get("/drafters", params={"run": "lab"}).json()["history"]
    assert not [e for e in history if e["event"] == "published" and "sent by" in e["reason"]], "none is better"
    assert "Traceback" not in workers.log.read_text()


def test_log_probabilities_that_abuse_the_weights_die_or_stay_in_bounds_and_touch_no_other_run(
    bench: Bench, service: RunningService, workers: Nest, tmp_path: Path
) -> None:
    """One token of 12, drawn at a tenth of what the features say: a gap that is taken, at the largest weight."""
    world, drafter = bench.world, bench.world.trained_drafter(tmp_path)
    for run in ("honest", "evil"):
        bench.register(world.run_file(drafter=drafter), run=run)
    pid = workers.start(bench, settings={})

    def lower(tensors: dict[str, Tensor]) -> None:
        tensors["logprobs"][tensors["loss_mask"].bool().nonzero()[::12]] -= 2.4

    def every(value: float) -> Change:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors["logprobs"].fill_(value)

        return change

    lies: dict[str, Change] = {"sometimes tiny": lower} | {
        str(value): every(value) for value in (-30.0, 0.0, 0.5, math.nan, -math.inf)
    }
    sent: dict[str, list[str]] = {"honest": [], "evil": []}
    for number in range(3):
        for name, change in lies.items():
            for run in sent:
                spoiled = change if run == "evil" else None
                reply = service.post(world.rollout_file(f"{name} {number}", run=run, change=spoiled))
                assert reply.status_code == 202, reply.text
                sent[run].append(reply.json()["batch_id"])
    bench.wait(
        lambda: not any(b["state"] == "queued" for run in sent for b in states(bench, run, sent[run]).values()), 90
    )
    assert alive(pid)
    assert errors(bench, ["honest", "evil"]) == {"honest": None, "evil": None}
    ended = states(bench, "evil", sent["evil"])
    for place, batch in enumerate(sent["evil"]):
        taken = place % len(lies) == 0
        assert ended[batch]["state"] == ("trained" if taken else "dead"), (place, ended[batch])
    assert not any(b["state"] == "dead" for b in states(bench, "honest", sent["honest"]).values())
    for record in Store(bench.redis, "evil").scores().values():
        assert record.logprob_gap is None or 0.02 < record.logprob_gap < 0.25
        for one in record.replayed or ():
            assert one.sums.rounds > 0.0
            assert list(one.accepted) == sorted(one.accepted, reverse=True)
            assert all(n <= one.sums.rounds + 0.001 for n in one.accepted)
