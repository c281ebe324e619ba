"""Shared fixtures: one real Valkey per test session, an empty key space per test, and the API under real uvicorn.

Imports of ours, and of whatever takes long to import, stand in the fixtures: a test that needs none starts at once.
"""

from __future__ import annotations

import contextlib
import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: threads that share two cores wait for each other

import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from helpers.service.object_fixtures import Store
    from helpers.service.service_fixtures import RunningService
    from helpers.service.valkey_fixtures import OwnValkey
    from helpers.worker.worker_fixtures import Bench
    from redis import Redis

# Hundreds of processes import the same files: each is compiled once, and a test module's asserts are rewritten once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every httpx client reads whom it may trust: 25 ms for 140 authorities. Tests bring their own, or need none.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))

_NOT_QUICK = frozenset(Path(__file__).with_name("not_quick.txt").read_text().split())  # written by seconds.py
_LONG = "chaos", "demo", "slow"
_ENGINES = "vllm_server", "sglang_server"
#: Files with the `server` of an engine's conftest.py: each process that has one of them starts it, for a minute.
_ONE_SERVER = {
    f"tests/{engine}_server/test_{engine}_server_{name}.py": engine
    for engine, names in (("vllm", ("agent", "conformance", "swap")), ("sglang", ("agent", "swap")))
    for name in names
}
#: A file of which each test goes to whichever process is free: three of its tests take a minute each.
_APART = "tests/examples/test_demo.py"
#: What takes longest is begun first: begun last, one of them would leave all processes but its own idle.
_LONGEST = (
    *("tests/vllm_server/test_vllm_server_demo.py", "tests/vllm_server/test_vllm_server_trl.py", _APART),
    *("tests/test_slurm.py", "tests/examples/test_recall.py", "tests/service/cli/test_warmup.py"),
)
_MEMORY = Path("/dev/shm")  # noqa: S108 - a tmpfs on Linux
# Docker mounts it without the right to run programs, which some tests make.
_RUNS = _MEMORY.is_dir() and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
_ROOMY = _RUNS and shutil.disk_usage(_MEMORY).free > 4 << 30
_KERNELS = Path(__file__).parent / "drafter/training/test_triton_loss.py"


def pytest_configure(config: pytest.Config) -> None:
    """Temporary directories are in memory, where there is room: what may not be lost is synced, thousands of times.

    Whatever needs a disk needs a fault of one, and brings it.
    """
    if _ROOMY and config.option.basetemp is None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    if not hasattr(config, "workerinput"):  # the processes of xdist find the variable
        made = tempfile.TemporaryDirectory(prefix="made-once", dir=_MEMORY if _ROOMY else None)
        os.environ["MADE_ONCE_IN"] = made.name
        config.add_cleanup(made.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Choose Triton's interpreter before any test module imports Triton, where the tests of its kernels may run.

    Nothing looks for garbage in what is imported and collected: that stays.
    """
    given = [session.config.invocation_params.dir / argument.split("::")[0] for argument in session.config.args]
    if any(_KERNELS.is_relative_to(path.resolve()) for path in given):
        from helpers.drafter import triton_fixtures  # noqa: F401
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the quick tests before `-m` chooses."""
    names = {item.nodeid.split("[")[0], item.nodeid.split("::")[0]}
    if names.isdisjoint(_NOT_QUICK) and not any(map(item.get_closest_marker, _LONG)):
        item.add_marker("quick")


@pytest.hookimpl(trylast=True)  # after pytest-randomly: the order stays random within both parts
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, others of long tests, then by how many are not quick: processes end together."""
    marked = {item.path for item in items if any(map(item.get_closest_marker, _LONG))}
    slow = Counter(item.path for item in items if item.get_closest_marker("quick") is None)

    longest = {name: place for place, name in enumerate(_LONGEST)}

    def place(item: pytest.Item) -> tuple[int, bool, int]:
        long = item.path in marked or item.path.parent.name in _ENGINES
        return longest.get(item.nodeid.split("::")[0], len(longest)), not long, -slow[item.path]

    items.sort(key=place)


def _set_apart() -> None:
    """Have no garbage collection look again at what is there now, 800,000 objects of tests, torch and transformers.

    A worker that closes runs collects garbage each time, which took 0.4 s, a hundred times.
    """
    gc.collect()
    gc.freeze()


def _end_workers(test: str, url: str) -> None:
    """End workers that a test left behind, and say so: they would have their share of the next tests' runs."""
    from redis import Redis, RedisError

    from service.storage.queue.lease import WORKERS, Leases

    names: list[bytes] = []
    with contextlib.suppress(RedisError), Redis.from_url(url) as client:
        names = client.hkeys(WORKERS)
        here = Leases(client).holder.partition("/")[0].encode()
        names = [name for name in names if name.startswith(here + b"/")]
    for pid in {int(name.split(b"/")[1]) for name in names} - {os.getpid()}:
        command = b""  # of a process that has ended, and of a zombie
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"python" in command:  # and no other that has the number of one that was killed
            print(f"\n{test} left worker {pid} behind: it is killed", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pytest_collection_finish() -> None:
    """What was imported and collected stays."""
    _set_apart()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file's last test, whose fixtures are gone then, what is left stays too."""
    url = getattr(item, "funcargs", {}).get("redis_url")
    yield
    if url is not None:
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            _end_workers(item.nodeid, url)
    if nextitem is None or nextitem.path != item.path:
        _set_apart()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but files that share a server go to one process, and tests of one file apart."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if file == _APART else _ONE_SERVER.get(file, file)

    return ByServer(config, log)


@pytest.fixture(scope="session")
def valkey() -> Iterator[OwnValkey]:
    """A real server on a unix socket, for the whole session.

    It syncs its file before each answer: in memory where there is room. What needs a disk has a server of its own.
    """
    from helpers.service.valkey_fixtures import OwnValkey

    with tempfile.TemporaryDirectory(prefix="valkey", dir=_MEMORY if _ROOMY else None) as name:
        server = OwnValkey(Path(name))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    """One that may be stopped, or spoilt, without harm to other tests."""
    from helpers.service.valkey_fixtures import OwnValkey

    server = OwnValkey(tmp_path / "own")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey: OwnValkey) -> str:
    """URL of an empty key space."""
    from redis import Redis

    with Redis.from_url(valkey.url) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    """A blocking client on an empty key space."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def bench(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A state directory and an empty Redis, for workers in this process.

    These do not beat between their turns: on a busy machine a turn took longer than a lease.
    """
    from helpers.worker.worker_fixtures import Bench

    from service.storage.queue import lease

    monkeypatch.setattr(lease, "LEASE_SECONDS", 600.0)
    with Bench(tmp_path / "state", redis_url) as made:
        yield made


@pytest.fixture
def serve(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., RunningService]]:
    """Start the API with the settings given; every server started is stopped at the end."""
    from helpers.service.service_fixtures import RunningService

    running: list[RunningService] = []

    def start(**settings: Any) -> RunningService:
        service = RunningService(**{"state_dir": tmp_path / "state", "redis_url": redis_url, **settings})
        running.append(service)
        return service

    yield start
    for service in running:
        service.stop()


@pytest.fixture
def running_service(serve: Callable[..., RunningService]) -> RunningService:
    """The API with default settings and the run `default` registered."""
    started = serve()
    started.register()
    return started


@pytest.fixture
def service(running_service: RunningService) -> RunningService:
    """The same, where a folder has no `service` of its own."""
    return running_service


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty object store, which the environment names."""
    from helpers.service.object_fixtures import running_store

    yield from running_store(monkeypatch)
