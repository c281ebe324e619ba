"""Several hosts, one state: a change is seen whole by all or by none, in a mounted directory and in an object store."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, Store, failing, losing_answers
from helpers.service.service_fixtures import publish
from helpers.worker.record_fixtures import told
from typer.testing import CliRunner

from service.cli.main import app
from service.errors import ConfigurationError, LatestMoved, ObjectStoreError, RunConflict, RunNotFound
from service.settings import Settings
from service.storage import mirror
from service.storage.layout import Layout
from service.storage.mirror import Mirror, copy_run, state_of
from service.storage.registry import Registry
from service.storage.runs import change_state, delete_run, read_state, withdraw_run

URL = f"s3://{BUCKET}/state"
LARGE = bytes(range(256)) * 200  # above what stands in the tree
KINDS = ("directory", "objects")


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Layout]:
    """Makes the state directory of a host, by name: all of them share one state."""
    if request.param == "directory":
        return lambda _: Layout(tmp_path / "mounted")
    request.getfixturevalue("store")
    return lambda name: Mirror(tmp_path / name, URL)


def register(layout: Layout, run: str = "default") -> None:
    def work(now: Layout) -> None:
        now.make_run(run)
        now.run_json(run).write_text("{}")

    layout.change(run, work)


def write(layout: Layout, name: str, data: bytes, run: str = "default") -> None:
    def work(now: Layout) -> None:
        (now.run(run) / name).parent.mkdir(parents=True, exist_ok=True)
        (now.run(run) / name).write_bytes(data)

    layout.change(run, work)


def seen(layout: Layout, name: str, run: str = "default") -> bytes | None:
    layout.pull(run)
    path = layout.run(run) / name
    return path.read_bytes() if path.exists() else None


# --- the same for both
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\x00", LARGE], ids=["empty", "small", "no text", "large"])
def test_what_one_host_changed_another_one_reads(host: Callable[[str], Layout], data: bytes) -> None:
    one, other = host("one"), host("other")
    register(one)
    write(one, "heads/3.safetensors", data)
    assert seen(other, "heads/3.safetensors") == data
    assert other.run_names() == ["default"]
    at, there = one.head("default", 3).stat(), other.head("default", 3).stat()
    assert at.st_mtime_ns == there.st_mtime_ns, "heads are ordered by it"


def test_what_is_replaced_and_deleted_is_so_on_all_hosts(host: Callable[[str], Layout]) -> None:
    one, other = host("one"), host("other")
    register(one)
    write(one, "latest.json", b'{"a": 1}')
    write(one, "heads/1.safetensors", LARGE)
    assert seen(other, "latest.json") == b'{"a": 1}'
    write(other, "latest.json", b'{"a": 2}')  # of the same length, and maybe of the same moment
    other.change("default", lambda now: now.head("default", 1).unlink())
    assert seen(one, "latest.json") == b'{"a": 2}'
    assert seen(one, "heads/1.safetensors") is None


def test_of_many_changes_at_one_moment_none_is_lost(host: Callable[[str], Layout]) -> None:
    hosts = [host("one"), host("other")]
    register(hosts[0])
    write(hosts[0], "drafting.json", b"0")

    def add(now: Layout) -> int:
        count = int(now.run_drafting("default").read_bytes()) + 1
        now.run_drafting("default").write_bytes(str(count).encode())
        return count

    found: list[int] = []

    def work(layout: Layout) -> None:
        for _ in range(6):
            found.append(layout.change("default", add))

    threads = [threading.Thread(target=work, args=(layout,)) for layout in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 13)), "each saw what was before it, and its own answer is of its own change"
    assert seen(host("third"), "drafting.json") == b"12"


def test_a_run_that_is_deleted_is_gone_everywhere_and_its_name_is_free(host: Callable[[str], Layout]) -> None:
    one, other = host("one"), host("other")
    register(one)
    write(one, "target.safetensors", LARGE)
    assert seen(other, "target.safetensors") == LARGE
    withdraw_run(other, "default")
    one.pull("default")
    assert (one.run_names(), one.withdrawn_names()) == ([], ["default"])
    assert delete_run(one, "default")
    other.pull("default")
    assert not other.run("default").exists() or not any(p.is_file() for p in other.run("default").glob("*.json*"))
    assert not delete_run(other, "default"), "another request was faster"
    register(other)
    assert seen(one, "run.json") == b"{}"
    assert seen(one, "target.safetensors") is None


def test_the_registry_is_one_for_all_hosts(host: Callable[[str], Layout]) -> None:
    one, other = Registry(host("one")), Registry(host("other"))
    register(one._layout)
    first = publish(one, instead_of=None)
    other._layout.pull("default")
    assert other.latest("default") == first
    other.verify("default", first.version)
    second = publish(other, content=b"other" * 9000, instead_of=first.version)
    with pytest.raises(LatestMoved, match=f"serves {second.version} now"):
        publish(one, content=b"third", instead_of=first.version)  # judged before it heard of the second
    assert one.versions("default") == [first.version, second.version], "nothing of the third is left"
    back = one.rollback("default", first.version, "second was bad")
    assert (back.version, back.sequence) == (first.version, 3)
    other.hold("default", second.version, "it is better")
    one._layout.pull("default")
    assert (one.held("default") or pytest.fail("not held")).version == second.version
    for registry in (one, other):
        registry._layout.pull("default")
        assert [e["event"] for e in told(registry)] == ["published", "published", "rolled_back", "rolled_back", "held"]
    other.release("default", second.version)
    other.prune("default", 1)
    one._layout.pull("default")
    assert one.versions("default") == [second.version]


def test_a_numbered_version_is_one_drafter_whoever_sends_it(host: Callable[[str], Layout]) -> None:
    """Archives of two hosts at one moment get two numbers."""
    hosts = [Registry(host("one")), Registry(host("other"))]
    register(hosts[0]._layout)
    like = publish(hosts[0])
    versions: list[str] = []

    def send(registry: Registry, number: int) -> None:
        for turn in range(3):
            staged = registry.stage("default")
            (staged / "model.safetensors").write_bytes(f"{number} {turn}".encode())
            (staged / "config.json").write_text("{}")
            manifest, new = registry.archive("default", staged, like=like, reason="r", by=None, most_waiting=99)
            assert new
            versions.append(manifest.version)

    threads = [threading.Thread(target=send, args=(registry, n)) for n, registry in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(v[1:7]) for v in versions) == [2, 3, 4, 5, 6, 7]
    hosts[1]._layout.pull("default")
    assert hosts[1].history.sent("default").keys() == set(versions)


def test_a_state_is_obeyed_by_all(host: Callable[[str], Layout]) -> None:
    one, other = host("one"), host("other")
    register(one)
    with pytest.raises(RunNotFound):
        change_state(one, "nobody", "paused", "x")
    write(one, "run.json", _record())
    change_state(one, "default", "paused", "the GPU is needed", "ada")
    other.pull("default")
    assert read_state(other, "default").state == "paused"


def _record() -> bytes:
    facts: dict[str, Any] = {"run": "default", "target_fingerprint": "f", "aux_layers": [1], "vocab_size": 8}
    facts |= {"hidden_size": 8, "policy_version": 0, "draft_vocab_size": None, "last_rows": "all"}
    return json.dumps(facts | {"bytes": 1, "created": 1.0, "crc32": None}).encode()


# --- in an object store
@pytest.fixture
def two(store: Store, tmp_path: Path) -> tuple[Mirror, Mirror]:
    one, other = Mirror(tmp_path / "one", URL), Mirror(tmp_path / "other", URL)
    register(one)
    other.pull("default")
    return one, other


def test_a_change_that_fails_changes_nothing(two: tuple[Mirror, Mirror], store: Store) -> None:
    one, other = two
    before = store.stored()

    def work(now: Layout) -> None:
        now.latest("default").write_text("{}")
        now.target("default").write_bytes(LARGE)
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        one.change("default", work)
    assert (seen(one, "latest.json"), seen(other, "latest.json")) == (None, None)
    store.fault = failing("PUT")
    with pytest.raises(ObjectStoreError):
        write(one, "latest.json", b"{}")
    assert not one.latest("default").exists(), "this host does not say what the others do not know"
    store.fault = None
    assert store.stored() == before
    assert not list((one.root / "changes").iterdir())


@pytest.mark.parametrize("part", ["/trees/", "/files/"])
def test_a_put_whose_answer_was_lost_is_recognised(two: tuple[Mirror, Mirror], store: Store, part: str) -> None:
    one, other = two
    calls: list[Any] = []

    def work(now: Layout) -> None:
        calls.append(now)
        now.target("default").write_bytes(LARGE)

    store.fault = losing_answers(store, "PUT", part)
    one.change("default", work)
    assert len(calls) == 1, "it was done once, and not taken for another host's"
    assert seen(other, "target.safetensors") == LARGE
    assert len([key for key in store.stored() if "/files/" in key]) == 1


def test_a_change_is_begun_again_with_what_another_host_did(two: tuple[Mirror, Mirror], store: Store) -> None:
    one, other = two
    calls: list[Any] = []

    def work(now: Layout) -> bytes:
        if not calls:
            write(other, "drafting.json", b"theirs")
        calls.append(now.run_drafting("default").read_bytes() if now.run_drafting("default").exists() else b"")
        now.latest("default").write_text("mine")
        return bytes(calls[-1])

    assert one.change("default", work) == b"theirs"
    assert calls == [b"", b"theirs"]
    assert (seen(other, "latest.json"), seen(other, "drafting.json")) == (b"mine", b"theirs")


def test_a_put_whose_answer_was_lost_is_recognised_under_what_another_host_did_since(
    two: tuple[Mirror, Mirror], store: Store
) -> None:
    one, other = two
    calls: list[Any] = []
    lost = losing_answers(store, "PUT", "/trees/")

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        answer = lost(environ, start)
        if answer == [b"lost"]:
            store.fault = None
            write(other, "drafting.json", b"theirs")
        return answer

    def work(now: Layout) -> None:
        calls.append(now)
        now.target("default").write_bytes(LARGE)
        now.latest("default").write_text(str(len(calls)))

    store.fault = fault
    one.change("default", work)
    assert len(calls) == 1, "a second time it would be done twice, or be refused for what it did itself"
    for host in two:
        assert (seen(host, "latest.json"), seen(host, "drafting.json")) == (b"1", b"theirs")
        assert seen(host, "target.safetensors") == LARGE


def test_what_cannot_be_taken_back_is_not_done_where_another_host_was_faster(two: tuple[Mirror, Mirror]) -> None:
    """A host that stops after its look, while another one registers the run and takes rollouts for it."""
    one, other = two
    found: list[int | None] = []

    def delete(number: int | None) -> bool:
        found.append(number)  # as a registration deletes keys in Redis
        return True

    def work(now: Layout) -> bool:
        there = now.run_drafting("default").exists()
        if not found and not there:
            write(other, "drafting.json", b"theirs")
        if not there:
            now.fenced(delete)
        return there

    assert one.change("default", work)
    assert found == []


def test_what_cannot_be_taken_back_has_a_number_above_all_before(two: tuple[Mirror, Mirror], store: Store) -> None:
    """Also where the run's tree is gone: Redis may know the numbers that it had."""
    one, other = two
    numbers: list[int] = []

    def note(number: int | None) -> bool:
        numbers.append(number or 0)
        return True

    def work(now: Layout) -> None:
        now.fenced(note)
        now.latest("default").write_text(str(len(numbers)))

    for host in (one, other, one):
        host.change("default", work)
    store.client().delete_object(Bucket=BUCKET, Key="state/trees/default")
    Mirror(one.root.parent / "third", URL).change("default", work)
    assert numbers == sorted(set(numbers)), "each once, and higher than the one before"


def test_what_a_later_change_did_is_not_done_again(two: tuple[Mirror, Mirror]) -> None:
    """What has the numbers, Redis, had a higher one: the change begins again, with what the later one left."""
    one, other = two
    calls: list[int] = []

    def refuse(number: int | None) -> bool:
        calls.append(number or 0)
        if len(calls) == 1:
            write(other, "drafting.json", b"theirs")
        return len(calls) > 1

    def work(now: Layout) -> bool:
        now.fenced(refuse)
        now.latest("default").write_text("mine")
        return now.run_drafting("default").exists()

    assert one.change("default", work)
    assert calls == sorted(set(calls))
    assert (seen(other, "latest.json"), seen(other, "drafting.json")) == (b"mine", b"theirs")


def test_a_file_of_the_same_length_and_time_is_another_one(two: tuple[Mirror, Mirror]) -> None:
    """A head may be given the time of the one that it replaces."""
    for data in (LARGE, LARGE[::-1]):

        def work(now: Layout, data: bytes = data) -> None:
            (new := now.root / "new").write_bytes(data)
            os.utime(new, ns=(5, 5))
            new.rename(now.head("default", 1))

        two[0].change("default", work)
        assert [seen(host, "heads/1.safetensors") for host in two] == [data, data]


def test_a_host_that_was_stopped_amid_a_change_for_hours_goes_on(
    two: tuple[Mirror, Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile what it sent, and its draft, look as if it had died."""
    one, other = two
    write(one, "drafting.json", b"0")
    (upload := one.root / "upload").write_bytes(LARGE)
    one.announce("default", upload)
    calls: list[Any] = []

    def work(now: Layout) -> None:
        if not calls:
            monkeypatch.setattr(mirror, "_LEFTOVER_SECONDS", -3600.0)
            other.sweep()
            one.tidy()
        calls.append(0)
        now.own(upload).rename(now.target("default"))

    one.change("default", work)
    assert len(calls) == 2
    for host in two:
        assert (seen(host, "target.safetensors"), seen(host, "drafting.json")) == (LARGE, b"0")


def test_what_died_amid_a_change_is_tidied_away(two: tuple[Mirror, Mirror], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = two
    write(one, "target.safetensors", LARGE)
    left = [one.run("default") / ".fetched-0", one.root / "changes/0/runs/default/x", one.runs / ".deleted-0/x"]
    left.append(one.drafters("default") / ".deleted-0/x")
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(LARGE)
    one.tidy()
    assert all(path.exists() for path in left), "somebody may be at it"
    monkeypatch.setattr(mirror, "_LEFTOVER_SECONDS", -3600.0)
    with one.followed():
        assert not any(path.exists() for path in left)
    assert seen(one, "target.safetensors") == LARGE


@pytest.mark.parametrize(
    "files",
    [
        {"../../evil": {"bytes": 1, "changed_ns": 1, "text": "x"}},
        {"/evil": {"bytes": 1, "changed_ns": 1, "text": "x"}},
        {"heads/../../../evil": {"bytes": 1, "changed_ns": 1, "text": "x"}},
        {".tree.json": {"bytes": 1, "changed_ns": 1, "text": "x"}},
        {"registry.lock": {"bytes": 1, "changed_ns": 1, "text": "x"}},
        {"latest.json": {"bytes": 1, "changed_ns": 1 << 70, "text": "x"}},
        {"latest.json": {"bytes": 1, "changed_ns": 1, "object": "../../rollouts/default/x"}},
    ],
)
def test_a_tree_that_names_what_is_no_runs_file_is_damaged(
    two: tuple[Mirror, Mirror], store: Store, files: dict[str, Any], tmp_path: Path
) -> None:
    one, other = two
    register(other, "sound")
    before = sorted(one.root.rglob("*"))
    for key in ("default", ".hidden", "not/a/run", "default" * 30):
        store.client().put_object(Bucket=BUCKET, Key=f"state/trees/{key}", Body=json.dumps({"files": files}).encode())
    with pytest.raises(ObjectStoreError, match="trees/default in the object store is damaged"):
        one.pull("default")
    assert sorted(one.root.rglob("*")) == before
    with pytest.raises(ObjectStoreError, match="trees/default in the object store is damaged"):
        one.refresh()
    assert one.run_names() == ["default", "sound"], "the others are told all the same"
    with Mirror(tmp_path / "third", URL).followed():  # begins all the same
        assert Layout(tmp_path / "third").run_names() == ["sound"]
    assert not list(tmp_path.rglob("evil"))


def test_a_tree_of_a_number_that_no_clock_shows_can_be_deleted_and_keeps_no_other_from_being_swept(
    two: tuple[Mirror, Mirror], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    register(other, "sound")
    orphans = [f"state/files/{run}/{'0' * 32}" for run in ("default", "sound")]
    for key in orphans:
        store.client().put_object(Bucket=BUCKET, Key=key, Body=LARGE)
    body = json.dumps({"number": (1 << 53) - 1, "files": {"run.json": {"bytes": 2, "changed_ns": 1, "text": "{}"}}})
    store.client().put_object(Bucket=BUCKET, Key="state/trees/default", Body=body.encode())
    with pytest.raises(ObjectStoreError, match="trees/default in the object store is damaged: its number is"):
        one.pull("default")
    monkeypatch.setattr(mirror, "_LEFTOVER_SECONDS", -3600.0)
    one.sweep()
    assert [key in store.stored() for key in orphans] == [True, False]
    withdraw_run(one, "default")
    assert delete_run(one, "default")
    other.refresh()
    assert other.run_names() == ["sound"]


def test_of_a_deleted_run_the_store_keeps_a_list_of_no_files(two: tuple[Mirror, Mirror], store: Store) -> None:
    """Of the most changes that a list tells of; the number of the next run of the name is higher (decision 54)."""
    one, other = two
    register(one)
    for number in range(40):
        write(one, f"heads/{number % 3}.safetensors", LARGE + bytes([number]))
    withdraw_run(one, "default")
    assert delete_run(other, "default")
    assert [key for key in store.stored() if not key.startswith("state/tried/")] == ["state/trees/default"]
    body = store.client().get_object(Bucket=BUCKET, Key="state/trees/default")["Body"].read()
    assert len(body) < 1300
    last = mirror.Tree.read(body)
    register(one)
    body = store.client().get_object(Bucket=BUCKET, Key="state/trees/default")["Body"].read()
    assert mirror.Tree.read(body).number > last.number


def test_a_tree_that_is_too_large_is_not_read(
    two: tuple[Mirror, Mirror], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(two[1], "latest.json", b"{}")
    monkeypatch.setattr(mirror, "_TREE_BYTES", 10)
    with pytest.raises(ObjectStoreError, match="bytes, the limit is 10"):
        two[0].pull("default")


def test_what_was_announced_is_sent_once_however_often_a_change_is_begun(
    two: tuple[Mirror, Mirror], store: Store, tmp_path: Path
) -> None:
    one, other = two
    upload = one.root / "upload"
    upload.write_bytes(LARGE)
    one.announce("default", upload)
    calls: list[Any] = []

    def work(now: Layout) -> None:
        if not calls:
            write(other, "drafting.json", b"theirs")
        calls.append(0)
        now.own(upload).rename(now.target("default"))

    one.change("default", work)
    assert len(calls) == 2
    assert sum(method == "PUT" and "/files/" in path for method, path in store.requests) == 1
    assert seen(other, "target.safetensors") == LARGE


def test_objects_that_no_tree_names_go(
    two: tuple[Mirror, Mirror], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    write(one, "target.safetensors", LARGE)
    write(one, "target.safetensors", LARGE[1:])
    (left,) = (key for key in store.stored() if "/files/" in key)
    for key in (f"files/default/{'0' * 32}", f"tried/{'0' * 32}"):
        store.client().put_object(Bucket=BUCKET, Key=f"state/{key}", Body=b"of one that died")
    other.sweep()
    assert len(store.stored()) == 4, "it may be of a change that is being made"
    monkeypatch.setattr(mirror, "_LEFTOVER_SECONDS", -3600.0)
    other.sweep()
    assert store.stored() == [left, "state/trees/default"]
    assert seen(other, "target.safetensors") == LARGE[1:]


def test_a_host_whose_copy_was_meddled_with_spreads_none_of_it(two: tuple[Mirror, Mirror]) -> None:
    one, other = two
    write(one, "drafting.json", b"right")
    one.run_drafting("default").write_bytes(b"wrong")
    (one.run("default") / "latest.json").write_text("of nobody")
    write(one, "state.json", b"{}")
    assert (seen(other, "drafting.json"), seen(other, "latest.json")) == (b"right", None)
    assert one.run_drafting("default").read_bytes() == b"right"


def test_a_history_is_followed_where_it_only_grew(two: tuple[Mirror, Mirror], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Registry(two[0]), Registry(two[1])
    version = publish(one).version
    two[1].pull("default")
    other.history.events("default")
    for turn in range(5):
        one.rollback("default", version, f"turn {turn}")
        two[1].pull("default")
        assert len(other.history.events("default")) == turn + 2
    assert other.history._events["default"][0].lines_read == 6, "each line once"


def test_a_long_history_is_sent_in_small_pieces(
    two: tuple[Mirror, Mirror], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.storage.history.events._HISTORY_BYTES", 16_000)
    one, other = Registry(two[0]), Registry(two[1])
    version = publish(one).version
    for turn in range(40):
        one.rollback("default", version, f"turn {turn}")
    pieces = sorted(two[0].run("default").glob("history*.jsonl"))
    assert len(pieces) > 5
    assert max(piece.stat().st_size for piece in pieces) < 3_000
    two[1].pull("default")
    assert [e["reason"] for e in told(other)] == [e["reason"] for e in told(one)]
    assert len(told(other)) == 41


def test_checkpoints_go_to_whoever_asks(two: tuple[Mirror, Mirror], store: Store) -> None:
    one, other = two

    def save(now: Layout) -> None:
        path = now.worker("default") / "checkpoint-000000001" / "trainer"
        path.mkdir(parents=True)
        (path / "state").write_bytes(LARGE)

    one.change("default", save, checkpoints=True)
    write(one, "latest.json", b"{}")  # which knows nothing of it, and keeps it
    other.pull("default")
    assert not list(other.worker("default").iterdir())
    assert other.trained("default")
    other.pull("default", checkpoints=True)
    assert (other.worker("default") / "checkpoint-000000001/trainer/state").read_bytes() == LARGE


def test_a_host_follows_and_goes_on_when_the_store_is_back(two: tuple[Mirror, Mirror], store: Store) -> None:
    one, other = two
    with other.followed():
        write(one, "latest.json", b"1")
        _until(lambda: other.latest("default").exists())
        store.down()
        assert other.latest("default").read_bytes() == b"1", "what was known is read on"
        _until(lambda: other.away is not None)
        store.up()
        _until(lambda: other.away is None)
        write(one, "latest.json", b"2")
        _until(lambda: other.latest("default").read_bytes() == b"2")


def _until(condition: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(600):
        if condition():
            return
        ended.wait(0.05)
    pytest.fail("it did not come in 30 s")


def test_a_tree_that_somebody_deleted_deletes_nothing(
    two: tuple[Mirror, Mirror], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = two
    write(one, "target.safetensors", LARGE)
    store.client().delete_object(Bucket=BUCKET, Key="state/trees/default")
    with pytest.raises(ObjectStoreError, match="trees/default is gone from the object store; put a copy back"):
        write(one, "latest.json", b"{}")
    assert one.target("default").read_bytes() == LARGE
    monkeypatch.setattr(mirror, "_LEFTOVER_SECONDS", -3600.0)
    one.sweep()
    assert len(store.stored()) == 1, "its files are there when it is put back"


def _key(environ: dict[str, Any]) -> str:
    return str(environ["PATH_INFO"]).removeprefix(f"/{BUCKET}/")


def test_a_store_that_ignores_conditions_is_refused(two: tuple[Mirror, Mirror], store: Store) -> None:
    def forgetful(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        if not {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys() or environ["REQUEST_METHOD"] != "PUT":
            return None
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        tag = store.client().put_object(Bucket=BUCKET, Key=_key(environ), Body=body)["ETag"]
        start("200 OK", [("ETag", tag), ("Content-Length", "0")])
        return []

    store.fault = forgetful
    with (
        pytest.raises(ConfigurationError, match="this object store does a put whose condition is not met"),
        two[0].followed(),
    ):
        pass


def test_a_store_that_never_does_a_put_with_a_condition_is_refused(two: tuple[Mirror, Mirror], store: Store) -> None:
    def stubborn(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        if "HTTP_IF_MATCH" not in environ:
            return None
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start("412 Precondition Failed", [("Content-Length", "0")])
        return []

    store.fault = stubborn
    with pytest.raises(ConfigurationError, match="refuses a put whose condition is met"), two[0].followed():
        pass


def test_a_store_that_knows_tags_without_their_quotes_alone_is_used(two: tuple[Mirror, Mirror], store: Store) -> None:
    """As Ceph's gateway (16.2), which answers with quotes."""

    def unquoting(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        if not environ.get("HTTP_IF_MATCH", "").startswith('"'):
            return None
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start("412 Precondition Failed", [("Content-Length", "0")])
        return []

    one, other = two
    store.fault = unquoting
    with one.followed(), other.followed():
        write(one, "latest.json", b"1")
        write(other, "latest.json", b"2")
        before = store.count("PUT")
        write(other, "latest.json", b"3")
        assert store.count("PUT") - before == 1, "it learns which form it is"
    assert seen(one, "latest.json") == b"3"


@pytest.mark.parametrize("answer", ["done", "400 Bad Request"])
def test_a_store_that_takes_a_tag_without_quotes_for_none_or_for_a_fault_is_used(
    two: tuple[Mirror, Mirror], store: Store, answer: str
) -> None:
    def quoted_alone(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        """Here and not in the store behind it: Ceph's gateway would refuse the tag with quotes."""
        if (asked := environ.get("HTTP_IF_MATCH")) is None:
            return None
        body, where = (
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])),
            {"Bucket": BUCKET, "Key": _key(environ)},
        )
        said, headers = answer, [("Content-Length", "0")]
        if asked.startswith('"'):
            said = "done" if store.client().head_object(**where)["ETag"] == asked else "412 Precondition Failed"
        if said == "done":
            headers += [("ETag", store.client().put_object(Body=body, **where)["ETag"])]
        start("200 OK" if said == "done" else said, headers)
        return []

    one, other = two
    store.fault = quoted_alone
    with one.followed():
        register(one)
        known = one._get("default")
        assert known is not None
        write(other, "latest.json", b"theirs")
        assert one._put("default", known.tree.after({}), known.etag) is None, "it is another by now"
        write(one, "drafting.json", b"ours")
    assert (seen(other, "latest.json"), seen(other, "drafting.json")) == (b"theirs", b"ours")


def test_a_store_that_knows_tags_without_their_quotes_alone_and_ignores_them_is_refused(
    two: tuple[Mirror, Mirror], store: Store
) -> None:
    def heedless(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        if "HTTP_IF_MATCH" not in environ:
            return None
        body, headers = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])), [("Content-Length", "0")]
        quoted = environ["HTTP_IF_MATCH"].startswith('"')
        if not quoted:
            headers += [("ETag", store.client().put_object(Bucket=BUCKET, Key=_key(environ), Body=body)["ETag"])]
        start("412 Precondition Failed" if quoted else "200 OK", headers)
        return []

    store.fault = heedless
    with (
        pytest.raises(ConfigurationError, match="this object store does a put whose condition is not met"),
        two[0].followed(),
    ):
        pass


def test_a_directory_that_has_other_runs_is_refused(store: Store, tmp_path: Path) -> None:
    Layout(tmp_path / "old").make_run("default")
    with pytest.raises(ConfigurationError, match="holds runs that are not in the store; give this host a state"):
        Mirror(tmp_path / "old", URL)
    Mirror(tmp_path / "one", URL)
    with pytest.raises(ConfigurationError, match=f"is a copy of {URL}; use another state directory"):
        Mirror(tmp_path / "one", f"{URL}2")


def test_a_state_is_copied_to_an_object_store_and_back(store: Store, tmp_path: Path) -> None:
    old, run = Layout(tmp_path / "old"), "default"
    for name in (run, "second"):
        register(old, name)
        write(old, "target.safetensors", LARGE, name)
    write(old, "heads/3.safetensors", LARGE)
    write(old, "worker/checkpoint-000000001/trainer/state", LARGE)
    os.utime(old.head(run, 3), ns=(5, 5))
    first = publish(Registry(old), instead_of=None)
    Registry(old).hold(run, first.version, "it is good")

    def copied(*arguments: str) -> None:
        result = CliRunner().invoke(app, ["copy-state", *arguments])
        assert (result.exit_code, result.output) == (0, "copied run default\ncopied run second\n"), result.output

    copied(str(old.root), "--state-url", URL, "--state-dir", str(tmp_path / "copy"))
    host = Mirror(tmp_path / "host", URL)
    host.refresh()
    copied(URL, "--state-dir", str(tmp_path / "back"))
    for there in (host, Layout(tmp_path / "back")):
        there.pull(run, checkpoints=True)
        assert there.run_names() == [run, "second"]
        names = {
            path.relative_to(old.root) for path in old.runs.rglob("*") if path.is_file() and path.suffix != ".lock"
        }
        assert all((there.root / name).read_bytes() == (old.root / name).read_bytes() for name in names)
        assert there.head(run, 3).stat().st_mtime_ns == 5, "heads are ordered by it"
        registry = Registry(there)
        assert (registry.held(run) or pytest.fail("not held")).version == first.version
        registry.release(run, first.version)
        second = publish(registry, content=b"other" * 9000, instead_of=first.version)
        assert registry.latest(run) == second
        assert second.sequence == first.sequence + 1
        with pytest.raises(RunConflict, match="run 'default' is there already, and was not copied"):
            copy_run(old, there, run)
    register(old, "third")
    again = CliRunner().invoke(app, ["copy-state", str(old.root), "--state-dir", str(tmp_path / "back")])
    assert (again.exit_code, again.stdout) == (1, "copied run third\n")
    for origin, target in ((tmp_path / "copy", tmp_path / "x"), (old.root, tmp_path / "host")):
        refused = CliRunner().invoke(app, ["copy-state", str(origin), "--state-dir", str(target)])
        assert refused.exit_code != 0
        assert "is a host's copy of an object store" in str(refused.exception or refused.output)


def test_a_copy_that_was_cut_short_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, run = Layout(tmp_path / "old"), Layout(tmp_path / "new"), "default"
    register(old, run)
    write(old, "target.safetensors", LARGE)
    version = publish(Registry(old), instead_of=None).version
    names = len([path for path in old.run(run).rglob("*") if path.is_file() and path.suffix != ".lock"])
    real, left, done = shutil.copy2, [0], list[str]()

    def copy2(source: Path, to: Path) -> object:
        if len(done) == left[0]:
            raise OSError(errno.ENOSPC, "no space")
        done.append(to.name)
        return real(source, to)

    monkeypatch.setattr(shutil, "copy2", copy2)
    for left[0] in range(names):
        done.clear()
        with pytest.raises(OSError, match="no space"):
            copy_run(old, new, run)
        assert new.run_names() == [], f"half a run after {done}"
    monkeypatch.undo()
    copy_run(old, new, run)
    assert (Registry(new).latest(run) or pytest.fail("nothing is served")).version == version


def test_the_setting_chooses(store: Store, tmp_path: Path) -> None:
    assert type(state_of(Settings(state_dir=tmp_path / "a"))) is Layout
    assert type(state_of(Settings(state_dir=tmp_path / "b", state_url=URL))) is Mirror
    with pytest.raises(ValueError, match="state_url must begin with s3://: a change is a put on condition"):
        Settings(state_url="file:///tmp/x")
