"""Rollout files that trainers put into an object store: the worker brings each, once, whole, and nothing is lost."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, Store, failing, signed_only
from helpers.service.service_fixtures import RunningService
from helpers.trainer.hooks_fixtures import AUX, step, tiny_qwen3
from helpers.worker.worker_fixtures import VOCAB, Bench, World, final_state

from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from rl_hooks.sending import delivery
from service.storage.layout import Layout
from service.storage.queue.incoming import Incoming, new_name
from service.worker.inbox import Inbox, Loaded, Phase

URL = f"s3://{BUCKET}/in"


@pytest.fixture
def bench(store: Store, tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url, rollouts_url=URL) as made:
        made.begin()
        yield made


@pytest.fixture
def inbox(bench: Bench) -> Inbox:
    return opened(bench)


def opened(bench: Bench, **changes: Any) -> Inbox:
    settings = bench.settings.model_copy(update={"claim_tokens": 10_000, **changes})
    return Inbox(settings, bench.layout, bench.queue, VOCAB)


def key(blob: str) -> str:
    return f"in/rollouts/default/{blob}"


def put(bench: Bench, store: Store, name: str, *, body: bytes | None = None, **options: Any) -> tuple[str, str]:
    """Queue one batch that lies in the store, as `body` where that is another; its batch id and its file's name."""
    file = bench.world.rollout_file(name, **options)
    header = wire.check_rollout_header(wire.parse_header(file))
    blob = new_name(header.batch_id, hashlib.sha256(file).hexdigest(), time.time_ns())
    store.client().put_object(Bucket=BUCKET, Key=key(blob), Body=file if body is None else body)
    assert bench.enqueue(header.run, bench._spooled(header, blob, len(file))) == "accepted"
    bench.posted.append(header.batch_id)
    return header.batch_id, blob


def new(inbox: Inbox) -> list[Loaded]:
    assert not inbox.redeliver()
    return inbox.load(inbox.claim())


# --- the whole path
def test_a_trainers_rollouts_reach_the_drafter_past_the_api(
    store: Store, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fault = signed_only()
    monkeypatch.setattr(delivery, "_SMALLEST_DIRECT_BYTES", 0)
    with Bench(tmp_path / "own", redis_url, rollouts_url=URL) as bench:
        service = RunningService(state_dir=bench.layout.root, redis_url=redis_url, rollouts_url=URL)
        model = tiny_qwen3(tied=False)
        hook = DrafterHook(model, service.url, aux_layers=AUX)
        try:
            assert hook.flush(20)
            worker = bench.worker()
            for version in range(3):
                step(hook, model, version)
                (name,) = store.stored()
                assert bench.spooled() == [], "no tensor went through the API, not even of the first file"
                bench.drain(worker)
                assert store.stored() == []
            records = bench.store.scores()
            assert len(records) == 3
            assert all(bench.state(batch) == "trained" for batch in records)
            assert hook.stats()["dead"] == 0
            assert name.startswith("in/rollouts/default/")
        finally:
            hook.close(1.0)
            service.stop()


def test_what_comes_by_the_store_is_learnt_as_what_comes_through_the_api_to_the_bit(
    store: Store, tmp_path: Path, redis_url: str
) -> None:
    found = []
    for by_store in (True, False):
        with Bench(tmp_path / str(by_store), redis_url, World(), rollouts_url=URL) as bench:
            bench.redis.flushdb()
            bench.begin()
            for name in "abc":
                put(bench, store, name) if by_store else bench.post(name)
            worker = bench.worker()
            bench.drain(worker)
            worker.close()
            found.append(final_state(bench))
    assert store.stored() == []
    assert found[0] == found[1]


# --- each file once, whole
def test_a_file_is_in_the_spool_before_its_object_is_deleted(
    bench: Bench, inbox: Inbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, blob = put(bench, store, "a")
    there: list[list[str]] = []
    delete = Incoming.delete

    def looked(self: Incoming, keys: list[str]) -> None:
        there.append(bench.spooled())
        delete(self, keys)

    monkeypatch.setattr(Incoming, "delete", looked)
    (loaded,) = new(inbox)
    assert (loaded.entry.batch_id, loaded.path.name) == (batch, blob)
    assert there == [[blob]]
    assert store.stored() == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from service.storage.drafters import objects
from service.storage.layout import Layout
from service.storage.queue import incoming
from service.storage.queue.incoming import Incoming
from service.storage.spool import Spool, Upload
url, state, blob, size, where, at = sys.argv[1:]
owner = Incoming if hasattr(Incoming, where) else Upload
objects._PIECE_BYTES, objects.FETCHED_BYTES, incoming.FETCHED_BYTES = 100, 200, 200
found, calls = getattr(owner, where), []
def killed(*args):
    calls.append(1)
    if len(calls) == 2 or where not in ("pieces", "write"):
        if at == "after":
            found(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return found(*args)
setattr(owner, where, killed)
spool = Spool(Layout(Path(state)))
Incoming(url).bring("default", blob, int(size), spool, least_free_bytes=0, sync=True)
"""


@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("size", "before"),
        ("pieces", "before"),
        ("write", "after"),
        ("sync", "after"),
        ("keep", "before"),
        ("keep", "after"),
        ("delete", "before"),
        ("delete", "after"),
    ],
)
def test_a_worker_that_is_killed_while_it_brings_a_file_loses_nothing(
    bench: Bench, inbox: Inbox, store: Store, where: str, at: str
) -> None:
    batch, blob = put(bench, store, "a")
    (entry,) = inbox.claim()
    command = [sys.executable, "-c", _KILLED, URL, str(bench.layout.root), blob, str(entry.bytes), where, at]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment).returncode == -9
    assert [*bench.layout.spool("default").glob(blob), *store.stored()], "in one place at least"
    again = opened(bench)
    (loaded,) = again.load(again.redeliver())
    assert loaded.entry.batch_id == batch
    again.finish(loaded)
    again.commit(lambda _: None)
    assert bench.state(batch) == "trained"
    left = [key(blob)] if (where, at) in (("keep", "after"), ("delete", "before")) else []
    assert store.stored() == left, "what is left the sweep deletes"


@pytest.mark.parametrize("where", ["size", "pieces", "delete"])
def test_a_step_that_raises_is_tried_again_and_loses_nothing(
    bench: Bench, inbox: Inbox, store: Store, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    batch, blob = put(bench, store, "a")
    store.fault = failing({"size": "HEAD", "pieces": "GET", "delete": "POST"}[where], "403 Forbidden")
    found = new(inbox)
    if where == "delete":
        (loaded,) = found
        assert store.stored() == [key(blob)]
    else:
        assert found == []
        assert inbox.put_off == [entry.entry_id for entry in bench.queue.unfinished()]
        assert [*bench.layout.spool_tmp.iterdir()] == []
        store.fault = None
        again = opened(bench, claim_idle_seconds=1e-3)
        (loaded,) = again.load(again.redeliver())
        assert loaded.entry.deliveries == 1, "a store that fails counts no delivery"
    assert (loaded.entry.batch_id, bench.state(batch)) == (batch, "queued")


def test_a_file_that_is_in_the_spool_is_not_asked_for_and_is_compared(bench: Bench, inbox: Inbox, store: Store) -> None:
    batch, blob = put(bench, store, "a")
    new(inbox)
    asked = len(store.requests)
    again = opened(bench)
    assert len(again.load(again.redeliver())) == 1
    assert len(store.requests) == asked
    path = bench.layout.blob("default", blob)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    third = opened(bench)
    assert third.load(third.redeliver()) == []
    assert (bench.state(batch), bench.code(batch)) == ("dead", "blob_damaged")


def test_a_file_that_another_worker_brings_meanwhile_is_not_missing(
    bench: Bench, inbox: Inbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose lease has run out, and that knows nothing of it yet."""
    put(bench, store, "a")
    bring = Incoming.bring

    def twice(self: Incoming, *args: Any, **options: Any) -> None:
        bring(self, *args, **options)
        bring(self, *args, **options)

    monkeypatch.setattr(Incoming, "bring", twice)
    assert len(new(inbox)) == 1


# --- what is not what was announced
def other_bytes(file: bytes) -> bytes:
    return file[:-1] + bytes([file[-1] ^ 1])


@pytest.mark.parametrize("change", [other_bytes, lambda file: file[:-1], lambda file: file + b"\0"])
def test_an_object_that_was_overwritten_ends_its_batch_and_the_others_go_on(
    bench: Bench, inbox: Inbox, store: Store, change: Callable[[bytes], bytes]
) -> None:
    file = bench.world.rollout_file("a")
    bad, blob = put(bench, store, "a", body=change(file))
    good, _ = put(bench, store, "b")
    (loaded,) = new(inbox)
    assert loaded.entry.batch_id == good
    assert (bench.state(bad), bench.code(bad)) == ("dead", "blob_damaged")
    assert [path.name for path in bench.layout.spool("default").iterdir()] == [loaded.path.name]
    assert [*bench.layout.spool_tmp.iterdir()] == []
    assert store.stored() == [key(blob)], "until it is swept"
    again, _ = put(bench, store, "a")
    assert again == bad
    assert [one.entry.batch_id for one in inbox.load(inbox.claim())] == [bad], "it may come again"


def test_an_object_that_is_gone_ends_its_batch(bench: Bench, inbox: Inbox, store: Store) -> None:
    batch, blob = put(bench, store, "a")
    store.client().delete_object(Bucket=BUCKET, Key=key(blob))
    assert new(inbox) == []
    assert (bench.state(batch), bench.code(batch)) == ("dead", "blob_missing")


def test_a_file_has_the_time_at_which_it_came_and_not_that_at_which_it_was_brought(
    bench: Bench, inbox: Inbox, store: Store
) -> None:
    """A head that came while it waited is of the trainer's next attempt, or of a later policy version."""
    put(bench, store, "a")
    later = time.time_ns()
    (loaded,) = new(inbox)
    assert later - 10**10 < loaded.path.stat().st_mtime_ns < later


# --- what fails meanwhile
def test_while_the_store_is_away_its_batches_wait_and_the_others_go_on(
    bench: Bench, inbox: Inbox, store: Store
) -> None:
    waiting = [put(bench, store, name)[0] for name in "abc"]
    through = bench.post("d")
    store.fault = failing("HEAD", "403 Forbidden")
    before = len(store.requests)
    (loaded,) = new(inbox)
    assert loaded.entry.batch_id == through
    assert len(inbox.put_off) == 3
    assert len(store.requests) == before + 1, "it is not asked again for each"
    assert [bench.state(batch) for batch in waiting] == ["queued"] * 3
    store.fault = None
    again = opened(bench)
    assert {one.entry.batch_id for one in again.load(again.redeliver())} == {*waiting, through}


def test_a_full_disk_is_waited_for(bench: Bench, store: Store) -> None:
    batch, blob = put(bench, store, "a")
    full = opened(bench, spool_min_free_bytes=1 << 60)
    assert new(full) == []
    assert len(full._in(Phase.UNREADABLE)) == 1
    assert (bench.state(batch), bench.spooled(), store.stored()) == ("queued", [], [key(blob)])
    again = opened(bench)
    assert len(again.load(again.redeliver())) == 1


def test_a_disk_that_fills_meanwhile_leaves_nothing_behind(
    bench: Bench, inbox: Inbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = put(bench, store, "a")
    with monkeypatch.context() as patch:
        patch.setattr("service.storage.spool.os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert new(inbox) == []
    assert [*bench.layout.spool_tmp.iterdir()] == []
    assert bench.state(batch) == "queued"
    again = opened(bench)
    assert len(again.load(again.redeliver())) == 1


def test_a_worker_without_the_setting_leaves_the_batch_to_one_that_has_it(
    bench: Bench, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    batch, _ = put(bench, store, "a")
    bare = opened(bench, rollouts_url=None)
    assert new(bare) == []
    assert bench.state(batch) == "queued"
    assert "this worker's DRAFTALIGN_ROLLOUTS_URL is not set" in caplog.text


_BROUGHT = """
import sys
from pathlib import Path
from service.storage.layout import Layout
from service.storage.queue.incoming import Incoming
from service.storage.spool import Spool
url, state, small, large = sys.argv[1:]
incoming, spool = Incoming(url), Spool(Layout(Path(state)))
def peak():  # of this program alone: ru_maxrss may be the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def bring(name):
    blob, size = name.split(":")
    incoming.bring("default", blob, int(size), spool, least_free_bytes=0, sync=False)
bring(small)
before = peak()
bring(large)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_brought_in_pieces_of_which_memory_holds_few(store: Store, tmp_path: Path) -> None:
    names = []
    for size in (1, 160 << 20):
        blob = new_name("0" * 32, hashlib.sha256(bytes(size)).hexdigest(), time.time_ns())
        store.client().put_object(Bucket=BUCKET, Key=key(blob), Body=bytes(size))
        names.append(f"{blob}:{size}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _BROUGHT, URL, str(tmp_path), *names]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 96 << 10, "KiB"
    assert Layout(tmp_path).blob("default", names[1].split(":")[0]).stat().st_size == 160 << 20
    assert store.stored() == []
