"""One download, without an agent: what is asked for, resumed, refused, kept and deleted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import MTP_CONFIG, Service, drafter_bytes, drafter_config, mtp_bytes

from rl_hooks.agent import download
from rl_hooks.agent.download import fetch_release, in_thread, is_intact, prune_cache, strip_shared
from rl_hooks.errors import DigestError, DownloadError, InvalidDrafterError, NoRoomError
from rl_hooks.format.release import RECEIPT, Release, VerifiedManifest, parse_manifest
from rl_hooks.wire import MappedFile

MODEL, CONFIG = "model.safetensors", "config.json"
BYTES = drafter_bytes(1)
SIZE = len(BYTES)
Told = tuple[int, dict[str, str], bytes]


class Source(Service):
    """Whose next answers for the model a test tells: bytes after which it breaks off, or an answer; None: its own."""

    def __init__(self) -> None:
        self.told: list[int | Told | None] = []
        self.asked: list[tuple[str, str | None, str | None]] = []  # file, `direct`, range
        super().__init__()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        name = path.rpartition("/")[2]
        self.asked.append((name, query.get("direct"), handler.headers.get("Range")))
        assert handler.headers["Accept-Encoding"] == "identity"
        told = self.told.pop(0) if self.told and name == MODEL else None
        if isinstance(told, tuple):
            status, headers, content = told
            self.send(handler, status, content, headers)
            return
        self.cut_after = told
        super().answer(handler, path, query, body)

    def of_the_model(self) -> list[tuple[str | None, str | None]]:
        return [(direct, range_) for name, direct, range_ in self.asked if name == MODEL]


class Bench:
    """A service with one version, an object store that has its files too, and an empty cache."""

    def __init__(self, cache: Path) -> None:
        self.service, self.store, self.cache = Source(), Source(), cache
        self.version = self.service.publish(1, files={MODEL: BYTES})
        self.store.files = self.service.files
        self.client = httpx.Client(base_url=self.service.url, headers={"Authorization": "Bearer secret"})
        self.redirect: Told = (307, {"Location": f"{self.store.url}/drafter/{self.version}/{MODEL}"}, b"")

    @property
    def manifest(self) -> VerifiedManifest:
        return parse_manifest(self.service.manifest, "default")

    @property
    def home(self) -> Path:
        return self.cache / "default"

    def under_way(self, name: str, data: bytes) -> Path:
        """A file that an earlier download left."""
        path = self.home / f"{self.version}.part" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def fetch(self, **options: Any) -> Release:
        return fetch_release(self.client, self.manifest, self.cache, **options)

    def close(self) -> None:
        self.client.close()
        self.service.down()
        self.store.down()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_whole(bench: Bench, release: Release) -> None:
    assert (release.path / MODEL).read_bytes() == BYTES
    assert is_intact(release)
    assert release.sha256 == sha256(BYTES)
    assert sorted(path.name for path in bench.home.iterdir()) == [".lock", bench.version]
    assert sorted(path.name for path in release.path.iterdir()) == sorted([MODEL, CONFIG, RECEIPT])
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "no deadline of one file ends the next"


def test_a_version_is_downloaded_once_and_again_where_it_was_touched_or_must_be(bench: Bench) -> None:
    once = [(CONFIG, None, None), (MODEL, None, None)]
    check_whole(bench, bench.fetch())
    check_whole(bench, bench.fetch())
    assert bench.service.asked == once, "the config first: it tells how large the model can be"
    check_whole(bench, bench.fetch(again=True))
    assert bench.service.asked == 2 * once
    another = b'{"digest": "another", "sha256": {}}'
    for name, damaged in ((CONFIG, b"{}"), *((RECEIPT, text) for text in (b"{", b"{}", b"[]", another))):
        (bench.home / bench.version / name).write_bytes(damaged)
        check_whole(bench, bench.fetch())
    (bench.home / bench.version / MODEL).unlink()
    check_whole(bench, bench.fetch())
    assert bench.service.asked == 8 * once
    assert bench.service.authorizations == {"Bearer secret"}


@pytest.mark.parametrize("cuts", [[100], [100, 200, 1]])
def test_a_connection_that_breaks_is_resumed_as_long_as_each_brings_bytes(bench: Bench, cuts: list[int]) -> None:
    bench.service.told = [*cuts]
    check_whole(bench, bench.fetch())
    at = [sum(cuts[:n]) for n in range(1, len(cuts) + 1)]
    assert bench.service.of_the_model() == [(None, None), *((None, f"bytes={n}-") for n in at)]


def test_one_that_brings_nothing_ends_and_the_next_call_goes_on(bench: Bench) -> None:
    bench.service.told = [100, 0]
    with pytest.raises(DownloadError, match=f"{bench.version}/{MODEL} stopped at byte 100: .*peer closed"):
        bench.fetch()
    assert not (bench.home / bench.version).exists()
    check_whole(bench, bench.fetch())
    assert bench.service.of_the_model()[-1] == (None, "bytes=100-")


@pytest.mark.parametrize(
    ("left", "asked"),
    [
        (BYTES[:100], [(None, "bytes=100-")]),
        (b"x" + BYTES[1:100], [(None, "bytes=100-"), ("true", None)]),
        (BYTES, []),
        (b"x" + BYTES[1:], [("true", None)]),
        (BYTES + b"x", [(None, None)]),
        (b"", [(None, None)]),
    ],
    ids=["a beginning", "a damaged beginning", "all", "all, damaged", "more than all", "nothing"],
)
def test_what_an_earlier_download_left_is_taken_up_where_it_is_right(
    bench: Bench, left: bytes, asked: list[tuple[str | None, str | None]]
) -> None:
    bench.under_way(f"{MODEL}.part", left)
    check_whole(bench, bench.fetch())
    assert bench.service.of_the_model() == asked


@pytest.mark.parametrize("right", [True, False])
def test_a_file_that_was_whole_before_an_interruption_is_verified(bench: Bench, right: bool) -> None:
    bench.under_way(MODEL, BYTES if right else BYTES[1:] + b"x")
    check_whole(bench, bench.fetch())
    assert bench.service.of_the_model() == ([] if right else [(None, None)])


def test_other_bytes_are_refused_and_not_asked_for_twice(bench: Bench) -> None:
    bench.service.told = [(200, {}, b"x" + BYTES[1:]), None]
    expected = f"{SIZE} bytes, sha256 {sha256(BYTES)}, got {SIZE} bytes, sha256 {sha256(b'x' + BYTES[1:])}"
    with pytest.raises(DigestError, match=f"{bench.version}/{MODEL}: expected {expected}"):
        bench.fetch()
    assert bench.service.of_the_model() == [(None, None)]
    assert not (bench.home / f"{bench.version}.part" / f"{MODEL}.part").exists()


@pytest.mark.parametrize(
    ("left", "told", "said"),
    [
        (b"", (404, {}, b"no such file, " + 400 * b"x"), "answered 404: no such file, x{286}$"),
        (b"", (206, {"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}"}, BYTES), "answered 206"),
        (BYTES[:9], (206, {"Content-Range": f"bytes 8-{SIZE - 1}/{SIZE}"}, BYTES[8:]), "from byte 9 answered 'bytes 8"),
        (BYTES[:9], (206, {}, BYTES[9:]), "from byte 9 answered None"),
        (b"", (200, {}, BYTES + b"x"), f"is longer than its {SIZE} bytes"),
        (BYTES[:9], (206, {"Content-Range": "bytes 9-"}, BYTES[9:] + b"x"), f"is longer than its {SIZE} bytes"),
        (b"", (200, {}, BYTES[:-1]), f"got {SIZE - 1} bytes"),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_named(bench: Bench, left: bytes, told: Told, said: str) -> None:
    if left:
        bench.under_way(f"{MODEL}.part", left)
    bench.service.told = [told]
    with pytest.raises(DownloadError, match=said):
        bench.fetch()
    check_whole(bench, bench.fetch())


def test_a_service_that_knows_no_ranges_sends_the_file_from_its_first_byte(bench: Bench) -> None:
    bench.under_way(f"{MODEL}.part", b"x" * 100)
    bench.service.told = [(200, {}, BYTES)]
    check_whole(bench, bench.fetch())


# --- the object store


def test_what_a_store_sends_is_taken_past_any_proxy_and_it_never_sees_the_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    bench.under_way(f"{MODEL}.part", BYTES[:100])
    bench.service.told = [bench.redirect]
    check_whole(bench, bench.fetch())
    assert bench.store.asked == [(MODEL, None, "bytes=100-")]
    assert bench.store.authorizations == {None}
    assert bench.service.of_the_model() == [(None, "bytes=100-")]


@pytest.mark.parametrize(
    ("told", "goes_on"),
    [
        (100, "bytes=100-"),
        ((404, {}, b""), None),
        ((200, {}, BYTES + b"x"), None),
        ((200, {}, b"x" + BYTES[1:]), None),
        ((200, {}, BYTES[:-1]), None),
        ("http://127.0.0.1:1/gone", None),
        ("http://[", None),
        ("", None),
    ],
    ids=["breaks off", "has none", "too long", "other bytes", "too short", "is away", "is no address", "is not named"],
)
def test_where_a_store_fails_the_service_itself_is_asked(bench: Bench, told: Any, goes_on: str | None) -> None:
    elsewhere = isinstance(told, str)
    bench.service.told = [(307, {"Location": told} if told else {}, b"") if elsewhere else bench.redirect]
    bench.store.told = [] if elsewhere else [told]
    check_whole(bench, bench.fetch())
    assert bench.service.of_the_model() == [(None, None), ("true", goes_on)]


def test_a_service_that_sends_elsewhere_what_it_was_asked_for_itself_has_not_answered(bench: Bench) -> None:
    bench.service.told, bench.store.told = [bench.redirect, bench.redirect], [(503, {}, b"")]
    with pytest.raises(DownloadError, match="answered 307"):
        bench.fetch()


# --- stopping, time and room


@pytest.mark.parametrize("where", ["service", "store"])
def test_a_stop_ends_a_download_and_the_next_call_resumes_it(bench: Bench, where: str) -> None:
    bench.service.told = [bench.redirect] if where == "store" else []
    bench.under_way(CONFIG, bench.service.files[bench.version, CONFIG])
    with pytest.raises(DownloadError, match=f"stopped at byte [0-9]+ of {MODEL}; the next start resumes it"):
        bench.fetch(stopped=lambda: True)
    assert len(bench.service.of_the_model()) == 1
    check_whole(bench, bench.fetch())


def test_a_download_whose_time_is_over_says_how_far_it_came(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_SECONDS", -1.0)
    bench.under_way(CONFIG, bench.service.files[bench.version, CONFIG])
    bench.under_way(f"{MODEL}.part", BYTES[:100])
    with pytest.raises(DownloadError, match=f"expected {SIZE} bytes within .*, got 100"):
        bench.fetch()
    bench.under_way(f"{MODEL}.part", BYTES)
    check_whole(bench, bench.fetch())
    assert bench.service.of_the_model() == []


@pytest.mark.parametrize("have", [0, 100, SIZE])
def test_the_last_free_bytes_of_a_disk_are_not_taken(bench: Bench, have: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.under_way(CONFIG, bench.service.files[bench.version, CONFIG])
    bench.under_way(f"{MODEL}.part", BYTES[:have])
    free = SimpleNamespace(free=download.MIN_FREE_BYTES + SIZE - have - 1)
    monkeypatch.setattr("rl_hooks.agent.download.shutil.disk_usage", lambda _: free)
    if have < SIZE:
        with pytest.raises(NoRoomError, match=f"{MODEL}: expected {SIZE - have} bytes .* found {free.free}; nothing"):
            bench.fetch()
        assert bench.service.of_the_model() == []
        free.free += 1
    check_whole(bench, bench.fetch())


def test_work_beside_the_loop_gives_back_what_it_returns_or_raises_and_keeps_no_process_alive() -> None:
    async def ask() -> None:
        thread = await in_thread(threading.current_thread)
        assert thread.daemon
        assert await in_thread(int, "10", base=2) == 2
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread(int, "x")

    asyncio.run(ask())


# --- what an engine may load


@pytest.mark.parametrize(
    ("files", "kind", "said"),
    [
        ({MODEL: b"no tensors"}, "eagle3", f"{MODEL} is not a usable safetensors file"),
        ({MODEL: drafter_bytes(1, without="fc.weight")}, "eagle3", "no drafter that an engine could serve"),
        ({MODEL: BYTES, CONFIG: b'{"hidden_size": "x"}'}, "eagle3", "no drafter that an engine could serve"),
        ({MODEL: BYTES}, "mtp", "is that of a drafter of kind mtp|is that of a drafter of kind eagle3"),
        ({"notes.txt": b"", CONFIG: json.dumps(drafter_config()).encode()}, "eagle3", f"the version has no {MODEL}"),
    ],
)
def test_what_is_no_drafter_gets_no_name_in_the_cache(
    bench: Bench, files: dict[str, bytes], kind: str, said: str
) -> None:
    files = dict(files)
    if kind == "mtp":
        files[CONFIG] = json.dumps(drafter_config()).encode()
    bench.version = bench.service.publish(2, files=files, kind=kind)
    with pytest.raises(InvalidDrafterError, match=said):
        bench.fetch()
    assert not (bench.home / bench.version).exists()


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_policys_own_weights_are_taken_out_and_the_rest_stays_as_it_was(bench: Bench, kind: str) -> None:
    make = mtp_bytes if kind == "mtp" else drafter_bytes
    bench.version = bench.service.publish(2, files={MODEL: make(2, poisoned=True)}, kind=kind)
    release = bench.fetch()
    kept, plain = MappedFile(release.path / MODEL), bench.cache / "plain"
    plain.write_bytes(make(2))
    names = set(kept.header.tensors)
    assert names == set(MappedFile(plain).header.tensors)
    assert kept.header.metadata == {"format": "pt"}
    sent = bench.cache / "sent"
    sent.write_bytes(make(2, poisoned=True))
    before = MappedFile(sent)
    assert all((kept.array(name) == before.array(name)).all() for name in names)
    assert {kept.header.tensors[name].dtype for name in names} <= {"F32", "I64", "BOOL"}
    assert release.sha256 == sha256((release.path / MODEL).read_bytes())
    assert is_intact(release)
    mtime = plain.stat().st_mtime_ns
    assert (strip_shared(plain), plain.stat().st_mtime_ns) == ([], mtime)
    gone = strip_shared(sent)
    copies = [
        f"model.layers.{MTP_CONFIG['num_hidden_layers']}.{n}"
        for n in ("embed_tokens.weight", "shared_head.head.weight")
    ]
    assert gone == (copies if kind == "mtp" else ["embed_tokens.weight"])
    assert not list(bench.cache.glob("*.stripped"))


# --- what is deleted


def test_only_versions_that_nobody_keeps_are_deleted(tmp_path: Path) -> None:
    home = tmp_path / "default"
    for name in ("v1", "v2.part", "v3", "v3.part", "v4", "v5", "engines"):
        (home / name / "in").mkdir(parents=True)
    (home / "notes").write_text("")
    (home / "v0").symlink_to(tmp_path)
    memory = {
        "engine": "http://a",
        "fallback": None,
        "pending": {"manifest": {"version": "v4"}},
        "known": {"version": 5},
    }
    (home / "engines" / "a.json").write_text(json.dumps(memory | {"known": {"version": "v5"}}))
    (home / "engines" / "b.json").write_text(json.dumps(memory | {"fallback": {}}))
    assert prune_cache(tmp_path, "default", {"v3"}) == ["v1", "v2.part"]
    left = {path.name for path in home.iterdir()}
    assert left == {".lock", "engines", "notes", "v0", "v3", "v3.part", "v4", "v5"}
