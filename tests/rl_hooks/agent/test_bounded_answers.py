"""No answer of an engine, of the service or of whoever stands between takes more memory or disk than it may."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest
from helpers.engine.agent_fixtures import (
    Engine,
    Peer,
    Service,
    drafter_config,
    eventually,
    running_agent,
    settle,
    start_agent,
)

from rl_hooks.agent import download
from rl_hooks.agent.agent import SwapAgent
from rl_hooks.agent.download import fetch_release
from rl_hooks.agent.in_process import InProcessAgent
from rl_hooks.engines.bounded import MAX_ANSWER_BYTES, MAX_PAGE_BYTES
from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.sglang.adapter import SGLangEngine
from rl_hooks.engines.sglang.direct import LOADER, MARK
from rl_hooks.engines.vllm.engine import CoreEngine
from rl_hooks.errors import DigestError, DownloadError, EngineError, ManifestError
from rl_hooks.format.drafter import MAX_CONFIG_BYTES, most_bytes, parse_drafter
from rl_hooks.format.release import PublicKeys, new_key, parse_manifest
from rl_hooks.sending.delivery import NO_SUCH_RUN

MIB = 1 << 20
#: 64 KiB that inflate to this.
INFLATED = 64 * MIB
BOMB = gzip.compress(b" " * INFLATED, 9)
CHUNK = b"#" * 65535 + b"\n"
#: A hostile peer ends here, so that a test without its mend ends too. Up to so much of it lies in sockets' buffers.
ENOUGH, BUFFERS = 160 * MIB, 24 * MIB
ATTACKS = ("gzip", "endless", "announced")

PeerT = TypeVar("PeerT", bound=Peer)


class Hostile:
    """Answers the path `at` by `mode` instead; `sent` are the bytes of each such answer that went out."""

    mode = at = ""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.healed = threading.Event()
        super().__init__()

    def attack(self, mode: str, at: str) -> None:
        self.at, self.mode = at, mode

    def heal(self) -> None:
        self.mode = self.at = ""
        self.healed.set()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        mode = self.mode
        if not mode or not path.endswith(self.at):
            super().answer(handler, path, query, body)  # type: ignore[misc]
            return
        handler.close_connection = True
        handler.send_response(200)
        if mode == "gzip":
            handler.send_header("Content-Encoding", "gzip")
            handler.send_header("Content-Length", str(len(BOMB)))
        elif mode == "announced":
            handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        self.sent.append(0)
        place = len(self.sent) - 1
        try:
            if mode == "gzip":
                handler.wfile.write(BOMB)
                self.sent[place] = len(BOMB)
                return
            while self.sent[place] < ENOUGH and not self.healed.is_set():
                piece = b" " if mode == "drip" else CHUNK
                handler.wfile.write(piece)
                self.sent[place] += len(piece)
                if mode == "drip":
                    time.sleep(0.02)
        except OSError:
            pass


class BadEngine(Hostile, Engine):
    """An engine that lies."""


class BadService(Hostile, Service):
    """A service that lies, or somebody who stands before it. It knows no run by its name."""

    model_bytes: int | None = None  # in manifests, in place of the model's size

    def heal(self) -> None:
        self.model_bytes = None
        super().heal()

    def _offer(self, document: dict[str, Any]) -> None:
        for file in document["files"]:
            if file["name"] == "model.safetensors" and self.model_bytes is not None:
                file["bytes"] = self.model_bytes
        super()._offer(document)

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        if path.startswith("/runs/") and not (self.mode and path.endswith(self.at)):
            self.send_json(handler, 404, {"title": "no such run", "type": NO_SUCH_RUN})
        else:
            super().answer(handler, path, query, body)


@pytest.fixture
def service() -> Iterator[BadService]:
    with serving(BadService()) as peer:
        yield peer


@pytest.fixture
def bad() -> Iterator[BadEngine]:
    with serving(BadEngine()) as peer:
        yield peer


@pytest.fixture
def engine() -> Iterator[Engine]:
    with serving(Engine()) as peer:
        yield peer


@contextmanager
def serving(peer: PeerT) -> Iterator[PeerT]:
    """Ends the peer, and what it is in the middle of, with the test."""
    try:
        yield peer
    finally:
        if isinstance(peer, Hostile):
            peer.heal()
        peer.down()


@contextmanager
def memory_of(most: int) -> Iterator[None]:
    """Fails where more than `most` bytes are allocated at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak / MIB:.0f} MiB"


def errors(agent: SwapAgent, peer: str, kind: str) -> float:
    labels = {"peer": peer, "kind": kind}
    return agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", labels) or 0.0


def files_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


# --- engines
@pytest.mark.parametrize("mode", ATTACKS)
@pytest.mark.parametrize(("at", "kind"), [("/drafter/state", "EngineError"), ("/metrics", "metrics")])
def test_an_engine_that_answers_without_end_costs_a_bound_and_nobody_else(
    mode: str, at: str, kind: str, service: BadService, bad: BadEngine, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, bad, engine, cache=tmp_path) as agent:
        eventually(lambda: bad.version == engine.version == first)
        with memory_of(INFLATED // 2):
            bad.attack(mode, at)
            eventually(lambda: errors(agent, bad.url, kind) >= 2)
            second = service.publish(2)
            eventually(lambda: engine.version == second)  # the honest one
        assert max(bad.sent) < BUFFERS
        bad.heal()
        eventually(lambda: bad.version == second)
    assert bad.swapped == [first, second]


@pytest.mark.parametrize("status", [403, 404, 503])
def test_an_engine_that_shows_no_counters_still_gets_its_drafters(
    service: BadService, tmp_path: Path, status: int
) -> None:
    """SGLang without --enable-metrics, or a gateway that hides the page."""

    class NoPage(Engine):
        def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
            if path == "/metrics":
                self.send_json(handler, status, {"title": "not here"})
            else:
                super().answer(handler, path, query, body)

    engine, version = NoPage(), service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    engine.down()


def test_an_engine_without_the_swap_calls_is_named_with_what_it_needs(
    service: BadService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vLLM without the plugin, or an SGLang."""

    class Plain(Engine):
        def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
            if path.startswith("/drafter/"):
                self.send_json(handler, 404, {"detail": "Not Found"})
            else:
                super().answer(handler, path, query, body)

    engine = Plain()
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: "VLLM_PLUGINS=draftalign" in caplog.text)
    assert "--engine sglang" in caplog.text
    engine.down()


def test_an_engine_whose_page_is_too_long_still_gets_its_drafters(
    service: BadService, bad: BadEngine, tmp_path: Path
) -> None:
    bad.attack("endless", "/metrics")
    version = service.publish(1)
    with running_agent(service, bad, cache=tmp_path):
        eventually(lambda: bad.version == version)
    assert all(sent < MAX_PAGE_BYTES + BUFFERS for sent in bad.sent)


def test_the_page_of_64_engine_cores_is_read_and_one_of_endless_counters_is_not() -> None:
    def page(cores: int) -> str:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        lines = [f'vllm:spec_decode_{name}_total{{engine="{core}"}} 1' for core in range(cores) for name in names]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{core}",position="{position}"}} 1'
            for core in range(cores)
            for position in range(64)
        ]
        return "\n".join([*lines, "# other lines", "python_info 1", ""])

    assert Snapshot.parse(page(64)).counts.rounds == 64
    labels = ",".join(f'a{i}="1"' for i in range(90_000))
    long = f"vllm:spec_decode_num_drafts_total{{{labels}}} 1\n"
    for endless in (page(640), long):
        with memory_of(4 * MIB), pytest.raises(EngineError, match="expected at most 1048576 characters"):
            Snapshot.parse(endless)


def test_a_page_of_short_lines_is_not_made_a_list_of_them() -> None:
    page = "ab\n" * (MAX_PAGE_BYTES // 3)
    with memory_of(4 * MIB), pytest.raises(EngineError, match="has no vllm:spec_decode"):
        Snapshot.parse(page)


@pytest.mark.parametrize("at", ["/drafter/state", "/metrics", "/drafter/swap"])
def test_an_engine_that_drips_is_left_when_the_time_is_over(
    at: str, service: BadService, bad: BadEngine, engine: Engine, tmp_path: Path
) -> None:
    times = {"request_timeout_seconds": 0.3, "swap_timeout_seconds": 0.3}
    with running_agent(service, bad, engine, cache=tmp_path, **times) as agent:
        bad.attack("drip", at)
        version = service.publish(1)
        eventually(lambda: len(bad.sent) >= 3 and engine.version == version)  # each byte came within the time
        kind = "metrics" if at == "/metrics" else "EngineError"
        eventually(lambda: errors(agent, bad.url, kind) >= 2)
        bad.heal()
        eventually(lambda: bad.version == version)


@pytest.mark.parametrize("length", [5 * MIB, MAX_ANSWER_BYTES // 2])
def test_a_long_version_is_neither_logged_nor_kept_whole(
    length: int, service: BadService, bad: BadEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = service.publish(1)
    with caplog.at_level(logging.DEBUG, "draftalign.agent"), running_agent(service, bad, cache=tmp_path) as agent:
        eventually(lambda: bad.version == first)
        settle(bad)
        bad.restart(version="v" * length)
        if length > MAX_ANSWER_BYTES:
            eventually(lambda: errors(agent, bad.url, "EngineError") >= 2)
            assert bad.swaps == 0
        else:
            eventually(lambda: bad.version == first)
            settle(bad)
    assert max(len(record.getMessage()) for record in caplog.records) < 1200
    assert files_of(tmp_path / "default" / "engines") < 10_000


@pytest.mark.parametrize("field", ["method", "drafting", "config_fingerprint", "sha256"])
def test_other_names_of_an_engine_are_cut(
    field: str, service: BadService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Talker(Engine):
        def send_json(self, handler: BaseHTTPRequestHandler, status: int, document: Any, **headers: str) -> None:
            super().send_json(handler, status, document | {field: "x" * 100_000, "takes": None}, **headers)

    service.publish(1)
    with (
        caplog.at_level(logging.DEBUG, "draftalign.agent"),
        serving(Talker()) as talker,
        running_agent(service, talker, cache=tmp_path) as agent,
    ):
        settle(talker)
        talker.play(100, 2)
        settle(talker, 5)
        metrics = "".join(str(family) for family in agent.metrics.registry.collect())
    assert "x" * 201 not in caplog.text + metrics
    assert all("x" * 201 not in str(report) for report in service.reports)
    assert all("x" * 201 not in path.read_text() for path in tmp_path.glob("default/engines/*.json"))


class SGLang(Hostile, Peer):
    """As much of an SGLang server as the first call takes."""

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        if self.mode and path.endswith(self.at):
            super().answer(handler, path, query, body)
        elif path == "/metrics":
            self.send(handler, 200, b"sglang:generation_tokens_total 1\n")
        else:
            self.send_json(handler, 200, {"startup_time": {}, "speculative_algorithm": "NGRAM" * 1000})


@pytest.mark.parametrize(("mode", "at"), [("gzip", "/server_info"), ("endless", "/model_info"), ("gzip", "/metrics")])
def test_an_sglang_server_is_bounded_alike(
    mode: str, at: str, service: BadService, engine: Engine, tmp_path: Path
) -> None:
    with (
        memory_of(INFLATED // 2),
        serving(SGLang()) as server,
        start_agent(service.url, server, cache=tmp_path, engine_kind="sglang") as agent,
    ):
        server.attack(mode, at)
        kind = "metrics" if at == "/metrics" else "EngineError"
        eventually(lambda: errors(agent, server.url, kind) >= 2)
        server.heal()
        eventually(lambda: agent.followers[server.url].loaded_version)
        assert len(agent.followers[server.url].loaded_version or "") == 200
    assert max(server.sent) < BUFFERS


@pytest.mark.parametrize("size", [1 << 40, -1, "many"])
def test_an_sglang_server_does_not_choose_how_many_copies_are_made(size: Any, tmp_path: Path) -> None:
    info = {
        "speculative_algorithm": "EAGLE3",
        "custom_weight_loader": [LOADER],
        "internal_states": [{MARK: "life"}],
        "speculative_draft_model_path": str(tmp_path),
        "tp_size": size,
    }
    (tmp_path / "config.json").write_text(json.dumps(drafter_config()))
    body = json.dumps(info).encode()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/server_info" else 405, stream=httpx.ByteStream(body))

    transport = httpx.MockTransport(answer)
    server = SGLangEngine("http://engine", httpx.AsyncClient(transport=transport), tmp_path)
    release: Any = SimpleNamespace(path=tmp_path, version="v1", sha256s={})
    with pytest.raises(EngineError, match="expected tp_size of 1 to 1024"):
        asyncio.run(server.swap(release))


# --- the service
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("mode", ATTACKS)
def test_a_service_that_answers_without_end_is_refused_with_and_without_keys(
    mode: str, keys: bool, service: BadService, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if keys:
        pytest.importorskip("cryptography", reason="signatures need the extra `signing`")
    service.attack(mode, "/drafter/latest")
    service.publish(1)
    public = PublicKeys.parse(new_key()[1]) if keys else None
    with memory_of(INFLATED // 2), running_agent(service, engine, cache=tmp_path, public_keys=public) as agent:
        eventually(lambda: errors(agent, "service", "AnswerError") >= 2)
    assert max(service.sent) < MAX_ANSWER_BYTES + BUFFERS
    assert engine.swapped == []
    if mode == "announced":
        assert f"the peer announces {1 << 40}" in caplog.text  # and none of it was waited for


def test_a_service_that_lies_for_a_while_costs_nothing_that_was_loaded(
    service: BadService, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == first)
        service.attack("endless", "/drafter/latest")
        eventually(lambda: errors(agent, "service", "AnswerError") >= 2)
        second = service.publish(2)
        settle(engine)
        assert engine.swapped == [first]
        assert agent.offer is not None
        assert agent.offer.version == first
        service.heal()
        eventually(lambda: engine.version == second)


def test_a_service_that_drips_is_asked_again_when_the_time_is_over(
    service: BadService, engine: Engine, tmp_path: Path
) -> None:
    service.attack("drip", "/drafter/latest")
    times = {"request_timeout_seconds": 0.3, "wait_seconds": 0.1}
    with running_agent(service, engine, cache=tmp_path, **times) as agent:
        eventually(lambda: errors(agent, "service", "AnswerError") >= 2)
        service.heal()
        version = service.publish(1)
        eventually(lambda: engine.version == version)


@pytest.mark.parametrize("tag", ["x" * 300, "\u00e9"], ids=["long", "not ASCII"])
def test_a_tag_that_no_request_can_hold_is_not_sent_back(tag: str, engine: Engine, tmp_path: Path) -> None:
    class Tagging(BadService):
        def send_json(self, handler: BaseHTTPRequestHandler, status: int, document: Any, **headers: str) -> None:
            super().send_json(handler, status, document, **(headers | {"ETag": tag}))

    with serving(Tagging()) as service, running_agent(service, engine, cache=tmp_path) as agent:
        for number in (1, 2):
            version = service.publish(number)
            eventually(lambda version=version: engine.version == version)  # type: ignore[misc]
        assert errors(agent, "service", "UnicodeEncodeError") == 0


class Baker(Peer):
    """Gives each request another cookie."""

    def __init__(self) -> None:
        self.came_back: list[str | None] = []
        super().__init__()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        self.came_back.append(handler.headers.get("Cookie"))
        super().answer(handler, path, query, body)  # type: ignore[safe-super]

    @staticmethod
    def send(
        handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        cookie = {"Set-Cookie": f"c{time.monotonic_ns()}={'x' * 4000}; Path=/"}
        Peer.send(handler, status, body, (headers or {}) | cookie)


class BakingService(Baker, Service):
    pass


class BakingEngine(Baker, Engine):
    pass


def test_no_peers_cookies_are_kept(tmp_path: Path) -> None:
    """They would grow without a bound, until the service refused the requests that hold them."""
    with (
        serving(BakingService()) as service,
        serving(BakingEngine()) as engine,
        running_agent(service, engine, cache=tmp_path),
    ):
        version = service.publish(1)
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(100, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 100)
        assert {*service.came_back, *engine.came_back} == {None}
        assert min(len(service.came_back), len(engine.came_back)) > 1


@pytest.mark.parametrize("host", ["a" * 64, "a..b", ".", "127.0.0.1:99999"])
def test_a_file_at_a_host_that_cannot_be_comes_from_the_service(host: str, engine: Engine, tmp_path: Path) -> None:
    class Elsewhere(BadService):
        def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
            if path.count("/") == 3 and "direct" not in query:
                self.send(handler, 307, headers={"Location": f"http://{host}/file"})
            else:
                super().answer(handler, path, query, body)

    with serving(Elsewhere()) as service, running_agent(service, engine, cache=tmp_path):
        version = service.publish(1)
        eventually(lambda: engine.version == version)


@pytest.mark.parametrize("mode", ATTACKS)
def test_answers_to_reports_are_bounded(mode: str, service: BadService, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    service.attack(mode, "/acceptance")
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == version)
        settle(engine)
        with memory_of(INFLATED // 2):
            engine.play(100, 2)
            eventually(lambda: errors(agent, "report", "AnswerError") >= 2)
        assert max(service.sent) < MAX_ANSWER_BYTES + BUFFERS
        service.heal()
        eventually(lambda: service.last_report(version).get("rounds") == 100)


def test_json_that_is_nested_too_deep_is_a_broken_answer_and_no_bug(service: BadService, tmp_path: Path) -> None:
    class Nested(Engine):
        def send_json(self, handler: BaseHTTPRequestHandler, status: int, *_: Any, **__: str) -> None:
            self.send(handler, status, b"[" * 500_000)

    with serving(Nested()) as nested, running_agent(service, nested, cache=tmp_path) as agent:
        eventually(lambda: errors(agent, nested.url, "EngineError") >= 2)
        assert errors(agent, nested.url, "RecursionError") == 0


# --- downloads
@pytest.mark.parametrize("size", [1 << 52, 20 * MIB])
def test_a_size_that_no_drafter_has_is_refused_before_a_byte_is_asked_for(
    size: int, service: BadService, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == first)
        service.attack("endless", "/model.safetensors")
        service.model_bytes = size
        service.publish(2)
        eventually(lambda: errors(agent, "service", "ManifestError") >= 2)
        assert service.sent == []
        assert files_of(tmp_path) < MIB
        service.heal()
        third = service.publish(3)
        eventually(lambda: engine.version == third)
    assert engine.swapped == [first, third]


@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_files_beside_the_model_are_small(name: str, service: BadService, tmp_path: Path) -> None:
    service.publish(1, files={"model.safetensors": b"", "notes.txt": b"x"})
    assert service.manifest is not None
    for file in service.manifest["files"]:
        if file["name"] == name:
            file["bytes"] = MAX_CONFIG_BYTES + 1
    with httpx.Client(base_url=service.url) as client, pytest.raises(ManifestError, match=f"{name}: expected at most"):
        fetch_release(client, parse_manifest(service.manifest, "default"), tmp_path)
    assert not any(path.endswith(name) for _, path in service.requests)


def test_the_bound_has_room_for_what_published_drafters_carry() -> None:
    """By hand, of the drafter of Llama 3 8B: 0.4 billion weights, and copies of an embedding and a head."""
    config = drafter_config() | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "draft_vocab_size": 32_000,
    }
    weights = (
        3 * 4096 * 4096 + 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 32_000 * 4096 + 4 * 4096
    )
    copies = 2 * 128_256 * 4096
    maps = 32_000 * 8 + 128_256
    found = most_bytes(parse_drafter(config))
    assert 4 * (weights + copies) + maps <= found < 4 * (weights + copies) + maps + 4 * MIB


def test_a_body_that_is_longer_than_announced_is_never_written(service: BadService, tmp_path: Path) -> None:
    version = service.publish(1)
    service.attack("endless", "/model.safetensors")
    part = tmp_path / "default" / f"{version}.part" / "model.safetensors.part"
    assert service.manifest is not None
    wanted = parse_manifest(service.manifest, "default")
    with httpx.Client(base_url=service.url) as client, pytest.raises(DigestError, match="is longer than its"):
        fetch_release(client, wanted, tmp_path)
    size = next(file.bytes for file in wanted.files if file.name == "model.safetensors")
    assert part.stat().st_size <= size
    assert max(service.sent) < BUFFERS
    service.heal()
    with httpx.Client(base_url=service.url) as client:
        assert fetch_release(client, wanted, tmp_path).version == version


def test_an_encoded_file_is_named_as_one(service: BadService, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    service.attack("gzip", "/model.safetensors")
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: errors(agent, "service", "AnswerError") >= 2)
        service.heal()
        eventually(lambda: engine.version == version)


def test_a_download_leaves_free_bytes_on_the_disk(
    service: BadService, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == first)
        free = SimpleNamespace(free=download.MIN_FREE_BYTES + 1000)
        with monkeypatch.context() as patch:
            patch.setattr("rl_hooks.agent.download.shutil.disk_usage", lambda _: free)
            second = service.publish(2)
            eventually(lambda: errors(agent, "service", "NoRoomError") >= 2)
            assert ("GET", f"/drafter/{second}/model.safetensors?run=default") not in service.requests
            assert engine.swapped == [first]
        eventually(lambda: engine.version == second)


def test_a_download_that_drips_lets_the_service_be_asked_again_and_goes_on_where_it_was(
    service: BadService, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_SECONDS", 0.2)
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        service.attack("drip", "/model.safetensors")
        eventually(lambda: errors(agent, "service", "DownloadError") >= 2)
        polls = [path for _, path in service.requests if path.startswith("/drafter/latest")]
        assert len(polls) >= 2
        monkeypatch.setattr(download, "DOWNLOAD_SECONDS", 600.0)
        service.heal()
        eventually(lambda: engine.version == version)


@pytest.mark.parametrize("at", ["service", "store"])
@pytest.mark.parametrize(
    ("first", "more"),
    [(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"), (b"", b"HTTP/1.1 102 Processing\r\n\r\n")],
    ids=["headers", "1xx"],
)
def test_an_answer_whose_headers_never_end_holds_no_download(
    first: bytes, more: bytes, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has half of the time that is left, and the service what is left after it."""
    held: list[str] = []
    given: list[float] = []
    real = threading.Timer

    class Endless(BadService):
        def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
            if path == "/of/the/store" or (path.count("/") == 3 and at == "service"):
                with contextlib.suppress(OSError):  # until nobody reads any more
                    handler.wfile.write(first)
                    for _ in range(600):
                        handler.wfile.write(more)
                        time.sleep(0.1)
                    held.append(path)
            elif path.count("/") == 3 and "direct" not in query:
                self.send(handler, 307, headers={"Location": f"{self.url}/of/the/store"})
            else:
                super().answer(handler, path, query, body)

    def timer(seconds: float, act: Callable[[], None]) -> threading.Timer:
        given.append(seconds)
        return real(2.0 if len(given) % 3 == 2 else seconds, act)  # 2 s for the store

    if at == "service":
        monkeypatch.setattr(download, "DOWNLOAD_SECONDS", 2.0)
    else:
        monkeypatch.setattr(threading, "Timer", timer)
    with serving(Endless()) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        service.publish(1)
        assert service.manifest is not None
        wanted = parse_manifest(service.manifest, "default")
        refused = pytest.raises(DownloadError, match=r"expected .* bytes within .*, got 0")
        with refused if at == "service" else contextlib.nullcontext():
            fetch_release(client, wanted, tmp_path)
    assert held == []
    for redirected, of_the_store, direct in zip(*[iter(given)] * 3, strict=True):
        assert redirected <= 600.0
        assert of_the_store <= redirected / 2
        assert direct <= redirected - 2.0, "the two together have no more than one file may take"


# --- inside vLLM
class Link:
    """An engine core that speculates and is asked for nothing else."""

    def __init__(self) -> None:
        self.state = {"version": "v1", "loaded": True, "swaps": 0, "policy_version": 0}
        self.warned: list[str] = []

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as the real one
            self.warned.append(f"{what}: {error!r}")
            return False
        return True

    def join(self, *_: Any) -> Any:
        return SimpleNamespace(result=lambda: [], cancel=lambda: None)

    def snapshot(self) -> Snapshot:
        return Snapshot.of_exact((), Counts(), 0)


@pytest.mark.parametrize("mode", ATTACKS)
@pytest.mark.parametrize("at", ["/drafter/latest", "/runs/default"])
def test_the_agent_inside_an_engine_is_bounded_alike(
    mode: str, at: str, service: BadService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link: Any = Link()
    service.publish(1)
    service.attack(mode, at)
    inside = InProcessAgent(ServiceSettings(service.url), tmp_path, "host 1 dp0", CoreEngine)
    with memory_of(INFLATED // 2):
        inside.begin(link)
        if at == "/runs/default":  # what it says of the run is no JSON object: it is asked again later
            eventually(lambda: service.sent)
        else:
            eventually(lambda: inside._agent is not None and errors(inside._agent, "service", "AnswerError") >= 2)
        inside.stop()
        inside.join(60)
    assert max(service.sent) < BUFFERS
    assert link.state["version"] == "v1"
    assert all(len(record.getMessage()) < 1200 for record in caplog.records)
