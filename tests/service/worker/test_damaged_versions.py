"""A bit flips on the service's own disk: the worker uses no drafter, checkpoint or rollouts that are not as written.

`DRAFTALIGN_FLIPS` sets how many flips a checkpoint gets (100; `make chaos` 1,000), `DRAFTALIGN_CHAOS_SEED` where.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.storage_fixtures import Store
from helpers.worker.worker_fixtures import Bench, joined
from redis import Redis
from xxhash import xxh3_64

import service.worker.process.worker
from drafter.errors import CheckpointError
from drafter.files.checkpoint import export_config
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.errors import BlobDamaged, RegistryError, RunDamaged
from service.monitor.events import GateEvidence
from service.storage.registry import Registry
from service.storage.runs import crc32_of
from service.storage.spool import check_blob
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.process.worker import Worker
from service.worker.target import Target

RUN = "default"
FLIPS = int(os.environ.get("DRAFTALIGN_FLIPS", "100"))
SEED = int(os.environ.get("DRAFTALIGN_CHAOS_SEED", "14"))


@pytest.fixture
def worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker that serves the run `default`, which has one version; a refused run is tried again at once."""
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    for module in (service.worker.process.worker, service.worker.process.runs):
        monkeypatch.setattr(module, "REFUSED_SECONDS", 0.0)
    bench.world.rollouts = 4
    bench.begin()
    made = Worker(bench.settings, Redis.from_url(bench.redis_url))
    made._turn()
    assert Registry(bench.layout).versions("default")
    yield made
    made._close()


def flip(path: Path, rng: random.Random) -> bytes:
    """Flip one bit; returns what was there."""
    before = path.read_bytes()
    data = bytearray(before)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return before


def model(bench: Bench, version: str) -> Path:
    return bench.layout.drafter_file("default", version, "model.safetensors")


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_compares_by_no_served_drafter_that_is_not_as_published(
    bench: Bench, worker: Worker, seed: int
) -> None:
    version = Registry(bench.layout).versions("default")[0]
    worker._close()
    before = flip(model(bench, version), random.Random(seed))
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("a")
    for _ in range(5):  # more than the deliveries after which a batch is dead
        restarted._turn()
    error = Store(bench.redis, "default").worker().error
    assert error == f"{version}/model.safetensors no longer matches its manifest; do not serve this version"
    assert bench.state(batch) == "queued", "no batch is to blame"
    model(bench, version).write_bytes(before)
    for _ in range(5):
        restarted._turn()
    assert bench.state(batch) == "trained"
    assert not Store(bench.redis, "default").worker().error
    restarted._close()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "manifest.json"])
def test_an_archived_drafter_that_is_not_as_published_is_left_out_and_the_run_goes_on(
    bench: Bench, worker: Worker, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    registry = Registry(bench.layout)
    lineage = worker.served["default"].learner.lineage
    (first,) = registry.versions("default")
    second = lineage.promote("candidate", first, 1, "better", GateEvidence()).version
    path = bench.layout.drafter(RUN, first) / file
    path.write_bytes(path.read_bytes()[:-7]) if file == "manifest.json" else flip(path, random.Random(3))
    worker._close()
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("a", drafter_version=first)
    for _ in range(5):
        restarted._turn()
    assert bench.state(batch) == "trained"
    assert not Store(bench.redis, "default").worker().error
    of_run = restarted.served["default"].learner.lineage
    assert of_run.archived() == [second]
    assert of_run.existing(first) is None
    said = [r.message for r in caplog.records if first in r.message and "left out" in r.message]
    assert len(said) == 1, "once"
    with pytest.raises((RegistryError, RunDamaged)):
        of_run.train_from(first)
    restarted._close()


@pytest.mark.chaos
def test_a_bit_that_flips_in_a_checkpoint_is_refused(bench: Bench, worker: Worker) -> None:
    """In any of its files, that of the sums too."""
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    checkpoint, rng = WorkerCheckpoint(bench.layout, RUN), random.Random(SEED)
    files = sorted(p for p in bench.checkpoint().rglob("*") if p.is_file())
    assert len(files) >= 6
    for number in range(FLIPS):
        path = files[number % len(files)]
        before = flip(path, rng)
        with pytest.raises(CheckpointError, match="put back a copy, or move the directory away"):
            checkpoint.drafter()
        path.write_bytes(before)
    checkpoint.drafter()


@pytest.mark.parametrize("damaged", [b"\xff{", b'{"drift_heeded": '], ids=["text", "JSON"])
def test_a_run_without_work_whose_checkpoint_is_damaged_says_what_to_do(
    bench: Bench, worker: Worker, damaged: bytes
) -> None:
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    (bench.checkpoint() / "state.json").write_bytes(damaged)
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    for _ in range(3):
        restarted._turn()
    assert "state.json not as written (CRC-32 differs); put back" in (Store(bench.redis, RUN).worker().error or "")
    restarted._close()


def test_rollouts_that_are_not_as_they_were_uploaded_are_not_trained_on_and_may_be_sent_again(
    bench: Bench, worker: Worker, serve: Callable[..., RunningService], caplog: pytest.LogCaptureFixture
) -> None:
    service, rng = serve(), random.Random(SEED)
    assert service.settings.state_dir == bench.layout.root
    body = bench.world.rollout_file("a")

    def post() -> tuple[int, dict[str, Any]]:
        reply = service.client.post("/rollouts", content=body, headers=HEADERS)
        return reply.status_code, reply.json()

    status, receipt = post()
    assert status == 202
    batch = receipt["batch_id"]
    (path,) = bench.layout.spool(RUN).iterdir()
    assert path.name.split(".")[2] == xxh3_64(body).hexdigest()
    for _ in range(FLIPS):
        before = flip(path, rng)
        with pytest.raises(BlobDamaged, match="is damaged: its bytes have the XXH3"):
            check_blob(path)
        path.write_bytes(before)
    check_blob(path)
    away = path.rename(path.with_name("away"))
    path.symlink_to("/dev/zero")
    with pytest.raises(BlobDamaged, match="no regular file"):
        check_blob(path)
    away.rename(path)
    flip(path, rng)
    other = bench.post("b")
    while worker._turn():
        pass
    assert (bench.state(batch), bench.code(batch), bench.state(other)) == ("dead", "blob_damaged", "trained")
    assert f"{path} is damaged" in caplog.text
    assert path.exists(), "a person may look at it, or put a copy back"
    status, receipt = post()
    assert (status, receipt["duplicate"], receipt["dead_total"]) == (202, False, 1)
    assert not path.exists(), "another came in its place"
    assert bench.queue.counters()["dead_file_bytes"] == 0
    while worker._turn():
        pass
    assert bench.state(batch) == "trained"
    assert post()[1]["duplicate"]


def test_recent_rollouts_that_are_not_as_they_were_uploaded_are_left_out_when_a_worker_begins(
    bench: Bench, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        bench.post(name)
    while worker._turn():
        pass
    worker._close()
    recent = bench.layout.worker(RUN) / "recent"
    first, second = sorted(recent.iterdir())
    flip(first, random.Random(SEED))
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("c")
    while restarted._turn():
        pass
    assert bench.state(batch) == "trained"
    assert f"{first.name} is left out of the recent rollouts: {first} is damaged" in caplog.text
    assert second.name in restarted.served[RUN].learner.recent.names()
    assert first.name not in restarted.served[RUN].learner.recent.names()
    restarted._close()


def test_a_bit_that_flips_in_what_a_run_was_registered_with_is_refused(bench: Bench) -> None:
    """In the weights too: an embedding with one huge value makes every drafter of the run useless."""
    bench.begin()
    path, rng = bench.layout.target(RUN), random.Random(SEED)
    for _ in range(FLIPS):
        before = flip(path, rng)
        with pytest.raises(
            RunDamaged, match=r"target\.safetensors of run 'default' is damaged: .*put a copy of it back"
        ):
            Target.open(bench.layout, RUN)
        path.write_bytes(before)
    target = Target.open(bench.layout, RUN)
    flip(path, rng)
    for read in (target.lm_head, lambda: target.initial_drafter):
        with pytest.raises(RunDamaged):
            read()


def test_a_run_whose_target_is_damaged_says_so_and_goes_on_when_a_copy_is_put_back(
    bench: Bench, worker: Worker, tmp_path: Path
) -> None:
    worker._close()
    path = bench.layout.target(RUN)
    copy = shutil.copy2(path, tmp_path / "copy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("b")
    for _ in range(5):
        restarted._turn()
    error = Store(bench.redis, RUN).worker().error
    assert error is not None
    assert "target.safetensors of run 'default' is damaged: its bytes are not those that were registered" in error
    assert bench.state(batch) == "queued", "no batch is to blame"
    shutil.copy2(copy, path)
    for _ in range(5):
        restarted._turn()
    assert bench.state(batch) == "trained"
    assert not Store(bench.redis, RUN).worker().error
    restarted._close()


def test_a_checkpoint_without_its_sums_is_refused_by_name(bench: Bench, worker: Worker, tmp_path: Path) -> None:
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    (bench.checkpoint() / "crc32.json").unlink()
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("b")
    for _ in range(5):
        restarted._turn()
    error = Store(bench.redis, RUN).worker().error
    assert error is not None
    assert f"{bench.checkpoint()}/crc32.json cannot be read" in error
    assert "move the directory away" in error
    shutil.move(bench.checkpoint(), tmp_path)
    for _ in range(5):
        restarted._turn()
    assert not Store(bench.redis, RUN).worker().error
    assert bench.state(batch) == "trained"
    restarted._close()


@pytest.mark.parametrize(
    "place", ["controller", "gate", "recent", "recent_known", "applied", "totals", "drift_heeded", "gate.kept",
              "gate.trials", "gate.level", "totals.batches of old"],
)  # fmt: skip
def test_a_checkpoint_of_another_layout_is_named_and_the_run_goes_on_without_it(
    bench: Bench, worker: Worker, tmp_path: Path, place: str
) -> None:
    """Its sums are right: it is as it was written, by a version that kept other things."""
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    path, (first, _, second) = bench.checkpoint() / "state.json", place.partition(".")
    state = json.loads(path.read_bytes())
    if second:
        state[first].pop(second, None)
        state[first] |= {second: 0} if " " in second else {}
    else:
        del state[first]
    path.write_text(json.dumps(state))
    sums = json.loads((bench.checkpoint() / "crc32.json").read_bytes())
    sums[path.relative_to(bench.checkpoint()).as_posix()] = crc32_of(path)
    (bench.checkpoint() / "crc32.json").write_text(json.dumps(sums))
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("b")
    for _ in range(3):
        restarted._turn()
    error = Store(bench.redis, RUN).worker().error or ""
    assert error.startswith(f"{bench.checkpoint()} holds a state that another version of draftalign wrote (")
    assert error.endswith("move the directory away: the run then goes on from its newest published drafter")
    shutil.move(bench.checkpoint(), tmp_path)
    for _ in range(5):
        restarted._turn()
    assert not Store(bench.redis, RUN).worker().error
    assert bench.state(batch) == "trained"
    restarted._close()


@pytest.mark.parametrize("name", ["checkpoint-000000001.old", "checkpoint-1"])
def test_a_checkpoint_that_a_person_renamed_is_neither_read_nor_deleted(
    bench: Bench, worker: Worker, name: str
) -> None:
    """`move the directory away`, the error says; beside the others is away too."""
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    aside = bench.checkpoint().rename(bench.checkpoint().with_name(name))
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    for file in "bc":
        batch = bench.post(file)
        for _ in range(4):
            restarted._turn()
        assert bench.state(batch) == "trained"
    restarted._close()
    assert not Store(bench.redis, RUN).worker().error
    assert (aside / "state.json").is_file()


def test_a_bit_that_flips_in_a_head_costs_that_head_alone(
    bench: Bench, serve: Callable[..., RunningService], caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin()
    service = serve()
    rng, world, sent = random.Random(SEED), bench.world, {}
    for version in (1, 2):
        world.heads[version] = world.heads[0] * (1 + 0.01 * version)
        body = world.head_file(version)
        assert service.client.put(f"/runs/{RUN}/head", content=body, headers=HEADERS).status_code == 201
        sent[version] = world.heads[version]
    path = bench.layout.head(RUN, 2)
    stat = path.stat()
    for _ in range(FLIPS):
        before = flip(path, rng)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a disk that damages bytes says nothing of it
        used = Target.open(bench.layout, RUN).at(2).needed_head().lm_head
        assert torch.equal(used, sent[1]), "the one before is the nearest that is sound"
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(Target.open(bench.layout, RUN).at(2).needed_head().lm_head, sent[2])
    assert "the head of policy version 2 is not used" in caplog.text
    Target.open(bench.layout, RUN).received.forget_before(2, newest=2)
    assert not path.with_name("1.crc32").exists()


def test_a_death_while_a_head_is_replaced_leaves_the_one_before_in_use(
    bench: Bench, serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    service, world = serve(), bench.world
    first = world.heads[0].clone()

    def register(factor: float) -> int:
        world.heads[0] = first * factor
        return service.client.put(f"/runs/{RUN}", content=world.run_file(), headers=HEADERS).status_code

    assert register(1.01) == 200
    kept = world.heads[0]
    world.heads[5] = first * 1.02
    assert service.client.put(f"/runs/{RUN}/head", content=world.head_file(5), headers=HEADERS).status_code == 201

    def dies(_upload: Path, _path: Path) -> None:
        raise OSError(errno.EIO, "in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        assert register(1.03) == 503
    assert torch.equal(Target.open(bench.layout, RUN).at(0).needed_head().lm_head, kept)


@pytest.mark.parametrize("way", ["a copy is put back", "it is moved away"])
def test_a_run_whose_checkpoint_is_damaged_says_so_and_goes_on_when_it_is_mended(
    bench: Bench, worker: Worker, way: str, tmp_path: Path
) -> None:
    bench.post("a")
    while worker._turn():
        pass
    worker._close()
    damaged = next(bench.checkpoint().rglob("*.safetensors"))
    before = flip(damaged, random.Random(SEED))
    restarted = Worker(bench.settings, Redis.from_url(bench.redis_url))
    batch = bench.post("b")
    for _ in range(5):
        restarted._turn()
    error = Store(bench.redis, RUN).worker().error
    assert error is not None
    assert f"{damaged.relative_to(bench.checkpoint())} not as written" in error
    assert bench.state(batch) == "queued", "no batch is to blame"
    if way == "a copy is put back":
        damaged.write_bytes(before)
    else:
        shutil.move(bench.checkpoint(), tmp_path)
    for _ in range(5):
        restarted._turn()
    assert bench.state(batch) == "trained"
    assert not Store(bench.redis, RUN).worker().error
    restarted._close()


def test_versions_are_read_once_however_many_are_archived(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look may need the served one, the first and one before; the others are read when α falls."""
    lineage = worker.served[RUN].learner.lineage
    served = Registry(bench.layout).versions(RUN)[0]
    for number in range(10):
        served = lineage.promote("candidate", served, number, "better", GateEvidence()).version
    read: list[str] = []
    real = Registry.verify

    def noted(self: Registry, run: str, version: str) -> None:
        read.append(version)
        real(self, run, version)

    monkeypatch.setattr(Registry, "verify", noted)
    for number in range(6):
        batch = bench.post(f"b{number}", policy_version=number)
        for _ in range(3):
            worker._turn()
        assert bench.state(batch) == "trained"
    assert len(read) <= 2 * len({*read}), Counter(read)
    assert len({*read}) <= 4, "of eleven"


def test_a_drafter_that_was_sent_and_is_not_as_sent_is_refused(bench: Bench, worker: Worker, redis_url: str) -> None:
    drafter = bench.world.drafter(seed=3)
    metadata = {"format": wire.DRAFTER_FORMAT, "drafter_config": json.dumps(export_config(drafter.config))}
    body = joined(wire.encode({n: as_wire(t.detach()) for n, t in drafter.state_dict().items()}, metadata))
    api = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        version = api.client.post("/drafters?run=default", content=body, headers=HEADERS).json()["version"]
        flip(model(bench, version), random.Random(5))
        batch = bench.post("a")
        for _ in range(5):
            worker._turn()
        assert bench.state(batch) == "trained"
        history = api.client.get("/drafters").json()["history"]
    finally:
        api.stop()
    (refused,) = [event for event in history if event["event"] == "refused" and event.get("version") == version]
    assert "no longer matches its manifest" in refused["reason"]
