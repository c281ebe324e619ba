"""The agent inside an engine joins a run when the service answers, and books each round as the engine counted it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.service.service_fixtures import HEADERS, RunningService, head_file
from helpers.service.storage_fixtures import Store
from redis import Redis

from rl_hooks.agent import in_process
from rl_hooks.agent.agent import AgentConfig, SwapAgent
from rl_hooks.agent.books import EngineBooks
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.in_process import InProcessAgent, drafter_directory, engine_name
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.agent.process import Seen
from rl_hooks.agent.vllm import link_of
from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.protocol import EngineState
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.vllm.core import CoreLink
from rl_hooks.engines.vllm.engine import CoreEngine
from rl_hooks.engines.vllm.swapper import Swapper
from rl_hooks.format.release import Release, VerifiedManifest
from service.storage.queue.keys import Keys


@pytest.fixture
def service(running_service: RunningService) -> RunningService:
    return running_service


class Link:
    """A link whose engine counts what the test says, and swaps nothing."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"version": "v1", "loaded": True, "swaps": 1, "policy_version": 3, "depth": 4}
        self.exact: list[tuple[str | None, int | None, Counts]] = []
        self.followed: list[int | None] = []
        self.warned: list[str] = []
        self.joined = threading.Event()

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as the real one
            self.warned.append(f"{what}: {error!r}")
            return False
        return True

    def join(self, _: ServiceSettings, newest: int | None) -> Future[list[Any]]:
        self.followed.append(newest)
        self.joined.set()
        future: Future[list[Any]] = Future()
        future.set_result([])
        return future

    def snapshot(self) -> Snapshot:
        return Snapshot.of_exact(tuple(self.exact), Counts(), 3)


def end(agent: InProcessAgent) -> None:
    agent.stop()
    agent.join(60)


def agent(url: str, tmp_path: Path, **settings: Any) -> InProcessAgent:
    return InProcessAgent(ServiceSettings(url, **settings), tmp_path / "cache", "host 1 dp0", CoreEngine)


def test_a_run_is_joined_at_the_version_that_the_service_knows(
    service: RunningService, redis_url: str, tmp_path: Path
) -> None:
    assert agent(service.url, tmp_path, run="new").newest_policy() is None
    assert agent(service.url, tmp_path).newest_policy() == 0
    service.client.put("/runs/default/head", content=head_file(7), headers=HEADERS).raise_for_status()
    assert agent(service.url, tmp_path).newest_policy() == 7
    with Redis.from_url(redis_url) as redis:
        redis.set(Keys("default").latest_policy, 57)  # as the queue does when a batch arrives
    assert agent(service.url, tmp_path).newest_policy() == 57


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """A server that says this to everybody; None: nothing, while it keeps the connection open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if reply is not None:
                    with contextlib.suppress(OSError):
                        connection.recv(65536)
                        connection.sendall(reply)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    ("reply", "joined_at"),
    [
        (None, []),
        (b"SSH-2.0-OpenSSH\r\n", []),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", []),
        (b'HTTP/1.1 200 OK\r\n\r\n{"policy_version": "9"}', []),
        (b'HTTP/1.1 200 OK\r\n\r\n{"policy_version": -1, "latest_head": true}', []),
        (b'HTTP/1.1 200 OK\r\n\r\n{"policy_version": 2, "latest_head": true}', [2]),
        (b'HTTP/1.1 200 OK\r\n\r\n{"policy_version": 2, "latest_head": null, "latest_policy": 5}', [5]),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'14;by=proxy\r\n{"policy_version": 2\r\n15\r\n, "latest_policy": 5}\r\n0\r\n\r\n',
            [5],
        ),
        (b"HTTP/1.1 404 no\r\n\r\n404 page not found", []),
        (b'HTTP/1.1 404 no\r\n\r\n{"type": "urn:draftalign:not-found"}', []),
        (b'HTTP/1.1 404 no\r\n\r\n{"type": "urn:draftalign:no-such-run"}', [None]),
        (b"HTTP/1.1 401 no\r\n\r\n", []),
        (b"HTTP/1.1 500 no\r\n\r\n", []),
    ],
)
def test_a_service_that_is_slow_or_talks_nonsense_does_not_hold_the_first_step_up_for_good(
    reply: bytes | None, joined_at: list[int], tmp_path: Path
) -> None:
    link: Any = Link()
    with answering(reply) as url:
        found = agent(url, tmp_path)
        found.begin(link)
        if reply is None:
            assert not found._asked.is_set(), "it waited for the answer"
    end(found)  # the connection is closed: nobody waits for an answer any more
    assert link.followed == joined_at
    if reply is not None:  # otherwise it may still be waiting
        assert bool(link.warned) == (joined_at == [])


def test_a_service_that_answers_a_byte_at_a_time_holds_the_first_step_no_longer(tmp_path: Path) -> None:
    """No wait of the request is long, and all of them together have no end."""
    link: Any = Link()
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nX-Pad: " + b"a" * 1000:
                    connection.send(bytes([byte]))
                    if ended.wait(0.2):
                        return

        threading.Thread(target=drip, daemon=True).start()
        found = agent(f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path)
        found.begin(link)
        assert not found._asked.is_set(), "it waited for the answer"
        assert link.followed == []
        ended.set()
        end(found)


def test_a_trainer_that_ends_waits_for_no_download() -> None:
    script = """
import asyncio, threading, time
from rl_hooks.agent.download import in_thread
started = threading.Event()
def download():
    started.set()
    time.sleep(60)
async def follow():
    assert await in_thread(max, 3, 5) == 5
    await in_thread(download)
threading.Thread(target=lambda: asyncio.run(follow()), daemon=True).start()
assert started.wait(60)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


def test_a_service_that_comes_later_is_joined_then(
    serve: Callable[..., RunningService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "_RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found, link = agent(f"http://127.0.0.1:{port}", tmp_path), Link()
    untyped: Any = link
    found.begin(untyped)
    assert link.followed == []
    assert "joining run 'default'" in link.warned[0]
    service = serve()
    monkeypatch.setattr(found, "_settings", ServiceSettings(service.url))
    assert link.joined.wait(60)
    assert link.followed == [None]
    end(found)


def test_an_engine_whose_certificates_come_later_follows_then(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is mounted late; the service itself is reached by plain http."""
    monkeypatch.setattr(in_process, "_RETRY_SECONDS", 0.05)
    file = tmp_path / "ca.pem"
    monkeypatch.setenv("DRAFTALIGN_CA_FILE", str(file))
    link: Any = Link()
    found = agent(service.url, tmp_path)
    found.begin(link)
    eventually(lambda: any("following the service" in said for said in link.warned), 20)
    shutil.copy(certifi.where(), file)
    name = "draftalign_agent_last_contact_timestamp_seconds"
    eventually(
        lambda: (
            found._agent and found._agent.metrics.registry.get_sample_value(name, {"peer": "in-process:host 1 dp0"})
        ),
        20,
    )
    end(found)


def test_counts_of_two_drafters_and_two_policies_between_two_looks_are_all_booked(
    service: RunningService, redis_url: str, tmp_path: Path
) -> None:
    link: Any = Link()
    first = ("v1", 2, Counts(10, 40, 15, (8, 4, 2, 1), 25))
    link.exact = [(None, None, Counts(5, 20, 0, (), 5)), first]
    found = agent(service.url, tmp_path)
    found.begin(link)
    with Redis.from_url(redis_url) as client:
        store = Store(client, "default")

        def booked() -> dict[tuple[str | None, int | None], tuple[int, int | None, bool]]:
            records = [r for r in store.acceptances() if r.reporter]
            return {(r.drafter_version, r.policy_version): (r.rounds, r.accepted_tokens, r.final) for r in records}

        eventually(lambda: booked() == {("v1", 2): (10, 15, True)}, 20)
        link.exact = [
            link.exact[0],
            ("v1", 2, Counts(12, 48, 17, (9, 5, 2, 1), 29)),
            ("v1", 3, Counts(3, 12, 1, (1,), 4)),
            ("v2", 3, Counts(7, 28, 9, (4, 3, 1, 1), 16)),
        ]
        link.state |= {"version": "v2", "swaps": 2}
        end(found)  # the last counts are reported at the engine's end
        assert booked() == {("v1", 2): (12, 17, True), ("v1", 3): (3, 1, True), ("v2", 3): (7, 9, False)}
    remembered = tmp_path / "cache" / "default" / "engines"
    assert remembered.is_dir()
    eventually(lambda: not list(remembered.iterdir()), 20)  # no other engine ever has its name


def core(**parallel: Any) -> Any:
    facts = {"distributed_executor_backend": "mp", "world_size": 1, "data_parallel_index": 0} | parallel
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(method="eagle3"), parallel_config=SimpleNamespace(**facts)
        )
    )


def test_the_policys_own_module_is_counted_under_its_method_and_n_grams_are_not() -> None:
    """Rounds in which n-grams proposed nothing are not told to the engine's own counter."""
    counts = Counts(10, 30, 12, (8, 4), 22)
    after = Snapshot.of_exact(((None, 4, counts),), Counts(), 4)
    for method, takes, booked in (("mtp", "mtp", [("mtp", "mtp", 4, 10)]), ("ngram", None, [])):
        books = EngineBooks(CanaryRule())
        books.book_exact(None, after, EngineState(None, True, 0, takes=takes, method=method), 1.0, 0.0)
        found = [(b.drafter_version, b.method, b.policy_version, b.counts.rounds) for b in books.ledger.buckets()]
        assert found == booked
        assert books.ledger.unattributed_rounds == (0 if booked else 10)


def test_a_version_of_which_the_engine_read_other_bytes_gets_no_rounds() -> None:
    counts = Counts(10, 30, 12, (8, 4), 22)
    after = Snapshot.of_exact((("v1", 4, counts), ("v2", 4, counts)), Counts(), 4)
    books = EngineBooks(CanaryRule())
    books.book_exact(None, after, EngineState("v2", True, 1), 1.0, 0.0, "v2")
    assert [bucket.drafter_version for bucket in books.ledger.buckets()] == ["v1"]
    assert books.ledger.unattributed_rounds == 10


def test_counts_that_an_engine_tells_exactly_are_never_taken_for_a_restart() -> None:
    state, counts = EngineState("v1", True, 1), Counts(10, 40, 15, (8,), 25)
    seen = Seen(0.0)
    for exact in ((("v1", 2, counts),), (("v1", 3, Counts(3, 12, 1, (1,), 4)),)):
        assert not seen.look(Snapshot.of_exact(exact, Counts(), 2), state, 1.0).restarted


def test_an_engine_whose_rounds_are_not_counted_is_complained_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link: Any = SimpleNamespace(
        state={"version": None, "loaded": True, "swaps": 0, "policy_version": None}, snapshot=lambda: None
    )
    engine = CoreEngine("in-process:x", link, tmp_path)

    def fetch(_: VerifiedManifest, _again: bool) -> Release:
        raise AssertionError("nothing is offered")

    follower = EngineFollower(engine, CanaryRule(), AgentMetrics(), tmp_path, fetch)
    with caplog.at_level(logging.INFO, "draftalign.agent"):
        for _ in range(3):
            asyncio.run(follower.tick(None))
    assert caplog.text.count("its rounds are not counted") == 1


def test_a_swap_that_waits_for_an_idle_engine_makes_way_for_a_newer_offer_and_holds_up_no_report(
    tmp_path: Path,
) -> None:
    config = AgentConfig("http://s", ("in-process:x",), cache_dir=tmp_path, report_seconds=0.02)
    engine: Any = object()
    agent, ticks, ended = SwapAgent(config, engine), list[Any](), list[Any]()

    class Follower:
        async def tick(self, offer: Any) -> None:
            ticks.append(offer)
            try:
                if offer == "first":
                    await asyncio.Event().wait()  # for a step
            finally:
                ended.append(offer)

    async def follow() -> None:
        untyped: Any = agent
        untyped.offer, offered = "first", asyncio.Event()
        follower: Any = Follower()
        step = asyncio.create_task(agent._follow_engine(follower, offered))
        await asyncio.wait_for(agent._reports.counted.wait(), 5)
        assert (ticks, ended) == (["first"], [])
        untyped.offer = "second"
        offered.set()
        await asyncio.wait_for(step, 5)
        assert ended == ["first"]
        await asyncio.wait_for(agent._follow_engine(follower, offered), 5)

    asyncio.run(follow())
    assert ticks == ["first", "second"]


def test_no_two_engines_go_by_one_name() -> None:
    """A container that starts again has the same host name and process number."""
    assert engine_name(0) != engine_name(0)
    assert len(engine_name(0)) <= 90  # twice in a reporter's name, which the service takes up to 200 of


def test_only_an_engine_that_could_follow_does(caplog: pytest.LogCaptureFixture) -> None:
    settings = ServiceSettings("http://s", sample_fraction=0.5)
    assert link_of(core(), None) is None
    link = link_of(core(), settings)
    assert isinstance(link, CoreLink)
    assert link.sample_fraction == 0.5
    plain = core()
    plain.vllm_config.speculative_config = None
    with caplog.at_level(logging.INFO, "vllm.draftalign"):
        assert link_of(plain, settings) is None
    assert "does not speculate" in caplog.text
    with pytest.raises(ValueError, match="external launcher"):
        link_of(core(distributed_executor_backend="external_launcher", world_size=2), settings)
    module = core()
    module.vllm_config.speculative_config.method = "mtp"
    swapped = link_of(module, settings)
    assert swapped is not None
    assert swapped.sample_fraction == 0.0  # no rows are tapped, so no prompt is computed twice


def test_drafters_go_where_the_variable_says_or_into_the_users_cache(tmp_path: Path) -> None:
    assert drafter_directory({"DRAFTALIGN_DRAFTER_DIR": str(tmp_path)}) == tmp_path
    assert drafter_directory({"DRAFTALIGN_DRAFTER_DIR": "~/drafters"}) == (Path.home() / "drafters").resolve()
    assert drafter_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "draftalign"
    assert drafter_directory({}) == (Path.home() / ".cache" / "draftalign").resolve()


@pytest.mark.parametrize("unset", [True, False])
def test_an_engine_whose_cache_lies_behind_a_link_takes_what_is_downloaded_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: bool
) -> None:
    """A home on another disk, or `~/.cache -> /scratch`, as clusters have them; and a relative XDG_CACHE_HOME."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    cache = drafter_directory({} if unset else {"XDG_CACHE_HOME": "home/caches"})
    for directory in (cache, tmp_path / "home" / "given"):  # the swapper itself, too
        path = directory / "default" / "v1"
        path.mkdir(parents=True)
        assert Swapper(None, directory)._resolve(str(path)) == path.resolve()
    assert cache.is_absolute()
    monkeypatch.chdir("/")
    assert Swapper(None, cache)._resolve(str(cache / "default" / "v1")).is_dir()
