"""The registry: publish is atomic, latest never goes back by itself, and every byte is accounted for."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET
from helpers.service.service_fixtures import publish
from helpers.worker.record_fixtures import told

from service.errors import RegistryBusy, RegistryError, RunNotFound, VersionNotFound
from service.monitor.events import CanaryVerdict, GateEvidence, Moved, Refused
from service.storage.drafters.versions import MANIFEST
from service.storage.history import lines
from service.storage.history.digest import SentDrafter, canary_key
from service.storage.history.events import History
from service.storage.layout import Layout, locked
from service.storage.mirror import Mirror
from service.storage.registry import Registry

URL = f"s3://{BUCKET}/state"
#: Of what a death between two lines leaves, or who keeps a lock: in an object store a change is whole.
MOUNTED = pytest.mark.parametrize("registry", ["directory"], indirect=True)


@pytest.fixture(params=["directory", "objects"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """In a mounted directory, and in an object store: then `tmp_path` is this host's copy."""
    if request.param == "objects":
        request.getfixturevalue("store")
    layout = Mirror(tmp_path, URL) if request.param == "objects" else Layout(tmp_path)
    layout.make_run("default")
    return Registry(layout)


def test_a_run_without_a_drafter_has_no_latest(registry: Registry) -> None:
    assert registry.latest("default") is None
    assert registry.versions("default") == []
    assert told(registry) == []


def test_a_published_version_is_latest_and_verifies(registry: Registry) -> None:
    manifest = publish(registry, content=b"abc", policy_version=5, reason="gate passed")
    assert registry.latest("default") == manifest
    assert manifest.version.startswith("v000001-")
    assert manifest.version.endswith(manifest.digest[:8])
    assert (manifest.sequence, manifest.policy_version, manifest.reason) == (1, 5, "gate passed")
    assert [f.name for f in manifest.files] == ["config.json", "model.safetensors"]
    assert registry.path("default", manifest.version, "model.safetensors").read_bytes() == b"abc"
    registry.verify("default", manifest.version)
    (event,) = told(registry)
    assert (event["event"], event["version"], event["sequence"]) == ("published", manifest.version, 1)


def test_only_a_new_version_is_forced_to_the_disk(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback verifies first, and reads a drafter of gigabytes then: it has nothing to write."""
    forced = list[str]()
    real = os.fsync

    def noted(descriptor: int) -> None:
        forced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    version = publish(registry).version
    assert {"config.json", "model.safetensors"} < set(forced)
    forced.clear()
    registry.verify("default", version)
    assert forced == []


def test_sequence_grows_with_every_move_and_a_rollback_is_a_new_one(registry: Registry) -> None:
    first, second = publish(registry), publish(registry, content=b"other")
    assert second.sequence == 2
    back = registry.rollback("default", first.version, "second was bad")
    assert (back.version, back.sequence, back.reason) == (first.version, 3, "second was bad")
    again = registry.push_again("default", "engine lost it")
    assert (again.version, again.sequence, again.reason) == (first.version, 4, "engine lost it")
    assert registry.latest("default") == again
    third = publish(registry, content=b"third")
    assert third.sequence == 5
    assert third.version.startswith("v000003-")
    assert len({first.etag, second.etag, back.etag, again.etag, third.etag}) == 5
    assert [e["event"] for e in told(registry)] == [
        "published",
        "published",
        "rolled_back",
        "pushed_again",
        "published",
    ]


def test_what_is_repeated_writes_the_event_that_was_cut_off(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full after the move, and whoever asked asks again."""
    first = publish(registry)
    publish(registry, content=b"other")

    def cut_off(work: Callable[[], object]) -> None:
        with monkeypatch.context() as full:
            full.setattr(History, "record", Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space"):
                work()
        work()
        work()

    cut_off(lambda: registry.rollback("default", first.version, "it was better"))
    cut_off(lambda: registry.hold("default", first.version, "keep it"))
    cut_off(lambda: registry.release("default", first.version))
    assert [e["event"] for e in told(registry)] == ["published", "published", "rolled_back", "held", "released"]


def test_a_version_that_serves_again_is_offered_with_what_the_gate_found_then(registry: Registry) -> None:
    """Engines ask a new version for the α that the gate replayed for the one before it: not for one of long ago."""
    first = publish(registry, gate=GateEvidence(alpha_served=1.5))
    publish(registry, content=b"other", gate=GateEvidence(alpha_served=2.0))
    registry.rollback("default", first.version, "a person's")
    served = registry.latest("default")
    assert served is not None
    assert (served.version, served.gate) == (first.version, None)
    registry.push_again("default", "an engine lost it")
    served = registry.latest("default")
    assert served is not None
    assert served.gate is None
    registry.rollback("default", first.version, "the gate's", gate=GateEvidence(alpha_served=2.8))
    registry.push_again("default", "an engine lost it")
    served = registry.latest("default")
    assert served is not None
    assert served.gate == GateEvidence(alpha_served=2.8)


def test_a_version_that_was_tampered_with_is_not_rolled_back_to(registry: Registry) -> None:
    first = publish(registry)
    second = publish(registry, content=b"other")
    registry.path("default", first.version, "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(RegistryError, match="no longer matches its manifest"):
        registry.rollback("default", first.version, "try")
    assert registry.latest("default") == second


def test_unknown_and_malformed_versions_are_not_found(registry: Registry) -> None:
    manifest = publish(registry)
    for version in ("v000009-00000000", "../v000001", "", "v1", "latest", manifest.version + "\n", "v000001-0000000G"):
        with pytest.raises(VersionNotFound):
            registry.get("default", version)
    for name in ("../run.json", "model.bin", "", ".", "..", "/etc/passwd"):
        with pytest.raises(VersionNotFound):
            registry.path("default", manifest.version, name)
    for run in ("..", "a/b", "", "a" * 65, ".hidden", "a\n", "{x}"):
        with pytest.raises(RunNotFound):
            registry.latest(run)


def test_a_staged_directory_must_hold_plain_files_only(registry: Registry, tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "policy_version": 0,
        "parent": None,
        "config_fingerprint": "",
        "d2t_sha256": "",
        "aux_layers": (1,),
    }
    empty = registry.stage("default")
    with pytest.raises(RegistryError, match="is empty"):
        registry.publish("default", empty, **facts)
    linked = registry.stage("default")
    (linked / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(RegistryError, match="expected plain files"):
        registry.publish("default", linked, **facts)
    assert registry.latest("default") is None


def test_a_nan_in_the_evidence_becomes_null(registry: Registry) -> None:
    published = publish(registry, gate=GateEvidence(gain=0.5, low=math.nan))
    latest, text = registry.latest("default"), registry.path("default", published.version, MANIFEST).read_bytes()
    assert latest is not None
    assert latest.gate == GateEvidence(gain=0.5, low=None)
    assert json.loads(text)["gate"] == told(registry)[0]["gate"] == {"gain": 0.5, "low": None}


@MOUNTED
def test_the_gates_evidence_stays_in_manifest_and_history_as_it_was_written(registry: Registry) -> None:
    """A manifest of an earlier version has less in it, one of a later version may have more."""
    version = publish(registry).version
    path = registry.path("default", version, MANIFEST)
    for gate in (
        None,
        {},
        {"gain": 0.25, "looks": 3, "error": 0.01, "judged_to": "7-0", "train_on": False, "odd": [1]},
    ):
        written = json.loads(path.read_bytes()) | {"alpha": None, "gate": gate}  # `alpha`: of earlier versions
        path.chmod(0o644)
        path.write_text(json.dumps(written))
        read = registry.get("default", version)
        assert json.loads(read.model_dump_json()) | {"alpha": None} == written
        assert list(read.model_dump()["gate"] or {}) == list(gate or {})
        if gate is not None:
            moved = registry.rollback("default", version, "the gate's", gate=read.gate)
            assert moved.gate == read.gate
            assert told(registry)[-1]["gate"] == gate
            assert registry.latest("default") == moved


def test_prune_keeps_the_newest_the_served_and_the_protected(registry: Registry) -> None:
    manifests = [publish(registry, content=str(n).encode()) for n in range(6)]
    names = [m.version for m in manifests]
    registry.rollback("default", names[1], "older fits better")
    assert registry.prune("default", 2, protect={names[0]}) == names[2:4]
    assert registry.versions("default") == [names[0], names[1], names[4], names[5]]
    latest = registry.latest("default")
    assert latest is not None
    assert latest.version == names[1]
    registry.rollback("default", names[5], "newest")
    registry.prune("default", 1)
    assert registry.versions("default") == [names[5]]
    assert publish(registry, content=b"next").version.startswith("v000007-"), "a pruned number is never used again"


def test_prune_clears_old_leftovers_but_not_a_publish_in_progress(registry: Registry) -> None:
    publish(registry)
    old, fresh = registry.stage("default"), registry.stage("default")
    os.utime(old, (0, 0))
    registry.prune("default", 1)
    assert not old.exists()
    assert fresh.exists()


def test_a_torn_last_line_of_the_history_hides_no_other(registry: Registry, tmp_path: Path) -> None:
    publish(registry)
    with Layout(tmp_path).history("default").open("ab") as file:
        file.write(b'{"event": "publis')
    registry.history.record("default", Refused())
    assert [e["event"] for e in told(registry)] == ["published", "refused"]


@MOUNTED
def test_an_event_lost_between_pointer_and_history_is_written_by_the_next_move(
    registry: Registry, tmp_path: Path
) -> None:
    first = publish(registry)
    Layout(tmp_path).history("default").unlink()  # as if killed before the append
    publish(registry, content=b"second")
    events = told(registry)
    assert (events[0]["version"], events[0]["sequence"]) == (first.version, 1)
    assert events[0]["recovered"]
    assert len(events) == 2


def test_what_a_full_history_deletes_is_neither_forgotten_nor_made_up(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's refusals fill it too. A reader that begins later knows what one knows that read every line."""
    monkeypatch.setattr("service.storage.history.events._HISTORY_BYTES", 2000)
    first = publish(registry)
    staged = registry.stage("default")
    (staged / "model.safetensors").write_bytes(b"sent")
    sent, _ = registry.archive("default", staged, like=first, reason="better", by="ada", most_waiting=4)
    for number in range(40):
        registry.history.record("default", Refused(policy_version=number, reason="x" * 100))
    later = Registry(registry._layout)
    by_ada = {sent.version: SentDrafter("better", "ada", 1)}
    assert later.history.sent("default") == registry.history.sent("default") == by_ada
    assert later.history.digest("default").published == 1
    assert all(event["event"] == "refused" for event in told(later))
    later.hold("default", first.version, "under test")
    assert [event["event"] for event in told(later) if event["event"] != "refused"] == ["held"]
    later.history.record("default", Refused(version=sent.version, reason="no better"))
    for number in range(40):
        registry.history.record("default", Refused(policy_version=number, reason="x" * 100))
    assert not Registry(registry._layout).history.sent("default"), "it does not wait again"


def test_a_drafter_that_is_sent_while_the_history_is_full_is_not_lost(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API opened the old piece for it, and was stopped; the worker began the next piece meanwhile."""
    monkeypatch.setattr("service.storage.history.events._HISTORY_BYTES", 2000)
    first = publish(registry)
    for number in range(30):
        registry.history.record("default", Refused(policy_version=number, reason="x" * 100))
    older = max(Layout(tmp_path).history("default").parent.glob("history-*.jsonl"))
    late = {"event": "sent", "version": first.version, "reason": "better", "by": "ada", "time": 1.0}
    with older.open("a") as file:
        file.write(json.dumps(late) + "\n")
    assert Registry(Layout(tmp_path)).history.sent("default") == {first.version: SentDrafter("better", "ada", 1)}


@MOUNTED
def test_of_a_history_the_oldest_piece_goes_though_the_clock_was_set_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.storage.history.events._HISTORY_BYTES", 1000)
    real, ahead = time.time_ns, 86_400 * 10**9
    monkeypatch.setattr(lines, "time", SimpleNamespace(time_ns=lambda: real() + ahead))
    for number in range(40):
        ahead = 0 if number >= 20 else ahead  # a day, until it is put right
        registry.history.record("default", Refused(policy_version=number, reason="x" * 60))
    kept = [event["policy_version"] for event in told(registry)]
    assert kept == list(range(kept[0], 40))
    assert 5 < len(kept) < 20


def test_a_verdict_is_read_among_the_moves_and_a_repeat_is_none(registry: Registry) -> None:
    first = publish(registry)
    verdict = CanaryVerdict(version=first.version, reporter="a", offer=1)
    for _ in range(2):
        registry.history.record_verdict("default", verdict)
    second = publish(registry, content=b"other")
    found = [(event["event"], event["version"]) for event in told(registry)]
    assert found == [("published", first.version), ("canary_passed", first.version), ("published", second.version)]


@MOUNTED
def test_a_move_whose_event_is_lost_leaves_all_of_it_in_the_pointer(registry: Registry, tmp_path: Path) -> None:
    """A sent version's manifest was written before the gate knew of it: nothing else has the evidence."""
    first = publish(registry)
    staged = registry.stage("default")
    (staged / "model.safetensors").write_bytes(b"sent")
    sent, _ = registry.archive("default", staged, like=first, reason="better", by=None, most_waiting=4)
    history = Layout(tmp_path).history("default")
    before = history.read_bytes()
    registry.promote("default", sent.version, "better", GateEvidence(gain=0.1, low=math.nan), instead_of=first.version)
    whole = registry.offer("default")
    history.write_bytes(before)  # as if killed before the append
    offer = Registry(Layout(tmp_path)).offer("default")
    assert offer is not None
    assert offer == whole
    assert (offer.version, offer.previous, offer.gate and offer.gate.gain) == (sent.version, first.version, 0.1)
    registry.push_again("default", "lost")
    recovered, pushed = told(registry)[-2:]
    assert (recovered["recovered"], recovered["gate"]["gain"], pushed["event"]) == (True, 0.1, "pushed_again")
    assert registry.history.last_of("default", ["published"]) == registry.offer("default")


@MOUNTED
def test_what_a_publisher_that_died_had_not_pointed_to_is_the_same_version_when_it_comes_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor publishes the same files: no second name for them, and no number is left out."""
    first = publish(registry)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_point", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            publish(registry, content=b"next")
    (left,) = set(registry.versions("default")) - {first.version}
    second = publish(registry, content=b"next", reason="judged again")
    assert (second.version, second.sequence) == (left, 2)
    assert registry.get("default", left).reason == "judged again"
    third = publish(registry, content=b"next")
    assert registry.versions("default") == [first.version, left, third.version], "one that was offered stays"
    registry.path("default", third.version, MANIFEST).write_text("{")
    fourth = publish(registry, content=b"next")
    assert fourth.sequence == 4


def test_parallel_publishers_and_rollbacks_never_share_a_sequence(registry: Registry) -> None:
    first = publish(registry)

    def work(number: int) -> None:
        for turn in range(4):
            publish(registry, content=f"{number} {turn}".encode())
            registry.rollback("default", first.version, f"{number} {turn}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sequences = [e["sequence"] for e in told(registry)]
    assert sequences == list(range(1, 34))
    assert len(registry.versions("default")) == 17


@MOUNTED
def test_a_lock_that_somebody_keeps_is_an_error_that_names_him_and_hides_no_event(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that was stopped while it published keeps it."""
    first = publish(registry)
    monkeypatch.setattr("service.storage.layout.LOCK_SECONDS", 0.05)
    with locked(Layout(tmp_path), "default"):
        with pytest.raises(RegistryBusy, match=f"by process {os.getpid()} of .*is it stopped.*Nothing was changed"):
            registry.rollback("default", first.version, "back")
        with pytest.raises(RegistryBusy):
            publish(registry, content=b"second")
        registry.history.record("default", Refused())
    assert registry.latest("default") == first
    assert [e["event"] for e in told(registry)] == ["published", "refused"]
    assert publish(registry, content=b"second").sequence == first.sequence + 1


def test_events_of_many_writers_are_whole_lines(registry: Registry) -> None:
    turns = 15 if isinstance(registry._layout, Mirror) else 50  # a store takes longer, and a change of it is whole

    def work(number: int) -> None:
        for turn in range(turns):
            registry.history.record("default", Refused(by=f"{number} {turn}", reason="x" * 3000))

    publish(registry)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    events = told(registry)[1:]
    assert {e["by"] for e in events} == {f"{n} {t}" for n in range(4) for t in range(turns)}
    assert len(events) == 4 * turns
    assert all(len(e["reason"]) == 3000 for e in events)


#: Forks a publisher for each line it reads, kills it after that many seconds: one interpreter start for all kills.
#: Of four, one is killed only after its first publish: a busy machine may not come to one in any of these times.
PUBLISHER = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.service.service_fixtures import publish
from service.settings import Settings
from service.storage.mirror import state_of
from service.storage.registry import Registry

def work(n):
    registry = Registry(state_of(Settings(state_dir=Path(sys.argv[1]), state_url=sys.argv[2] or None)))
    while True:
        n += 1
        publish(registry, content=bytes([n % 256]) * 50_000)
        os.write(published, b".")
        if n % 3 == 0:
            registry.rollback("default", registry.versions("default")[0], "back")
            registry.push_again("default", "again")

for n, line in enumerate(sys.stdin):
    heard, published = os.pipe()
    child = os.fork()
    if child == 0:
        work(n)
    if n % 4 == 0:
        os.read(heard, 1)
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(heard), os.close(published)
"""


@pytest.mark.chaos
def test_a_publisher_killed_anywhere_leaves_latest_valid_and_never_older(registry: Registry, tmp_path: Path) -> None:
    """SIGKILL at 40 random moments, with a reader polling: every manifest read verifies, no sequence goes down."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    highest = 0
    faults: list[str] = []
    stop = threading.Event()

    def read() -> None:
        nonlocal highest
        reader = Registry(Layout(tmp_path))
        while not stop.is_set():
            try:
                latest = reader.latest("default")
                if latest is not None:
                    if latest.sequence < highest:
                        faults.append(f"sequence fell from {highest} to {latest.sequence}")
                    highest = max(highest, latest.sequence)
                    reader.verify("default", latest.version)
            except Exception as error:  # noqa: BLE001 - whatever a reader can meet is a fault
                faults.append(repr(error))
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    script = PUBLISHER.format(tests=str(Path(__file__).parents[2]))
    url = URL if isinstance(registry._layout, Mirror) else ""
    delays = "".join(f"{rng.uniform(0.0, 0.3 if url else 0.1)}\n" for _ in range(40))
    try:
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), url], input=delays.encode(), check=True, timeout=600
        )
    finally:
        stop.set()
        thread.join()
    assert not faults
    assert highest > 0
    registry._layout.pull("default")
    latest = registry.latest("default")
    assert latest is not None
    assert latest.sequence >= max(10, highest), "as many lives published to their end"
    for version in registry.versions("default"):
        registry.verify("default", version)
    after = publish(registry, content=b"after")
    assert after.sequence == latest.sequence + 1
    sequences = [e["sequence"] for e in told(registry)]
    assert sequences == sorted(set(sequences)), "no event is lost or doubled"
    assert set(sequences) == set(range(1, after.sequence + 1))


def test_a_manifest_on_disk_is_plain_json(registry: Registry, tmp_path: Path) -> None:
    manifest = publish(registry)
    document = json.loads((Layout(tmp_path).drafter("default", manifest.version) / MANIFEST).read_text())
    assert document["aux_layers_convention"] == "entering"
    assert document["files"][0].keys() == {"name", "bytes", "sha256"}


def test_a_digest_of_the_history_reads_each_line_once(registry: Registry, tmp_path: Path) -> None:
    assert not registry.history.digest("default").pushed
    publish(registry)
    registry.history.record("default", Moved(event="pushed_again", time=5.0))
    canary = CanaryVerdict(version="v1", reporter="a", offer=1)
    registry.history.record("default", canary)
    digest = registry.history.digest("default")
    assert (list(digest.pushed), list(digest.canaries)) == ([5.0], [canary_key(canary)])
    path = Layout(tmp_path).history("default")
    assert digest.bytes_read == path.stat().st_size
    whole = path.read_bytes()
    path.write_bytes(
        b"x" * (len(whole) - 1) + b"\n" + b'{"event": "pushed_again", "time": 7.0'
    )  # torn by loss of power
    assert registry.history.digest("default").pushed == deque([5.0]), (
        "what was read is not read again, and half a line is none"
    )
    registry.history.record("default", Moved(event="pushed_again", time=9.0))
    assert registry.history.digest("default").pushed == deque([5.0, 9.0])
    path.write_bytes(whole[: whole.index(b"\n") + 1])
    assert registry.history.digest("default").pushed == deque(), "a shorter file is another one"


def test_a_digest_remembers_a_bounded_number_of_verdicts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.storage.history.digest._CANARIES_REMEMBERED", 3)
    for offer in range(5):
        registry.history.record("default", CanaryVerdict(version="v1", reporter="a", offer=offer))
    assert [key[-1] for key in registry.history.digest("default").canaries] == ["2", "3", "4"]
