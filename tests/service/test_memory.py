"""What a process holds free goes back to the system."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import NoReturn

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.api.app
import service.worker.process.worker
from service.errors import ConfigurationError
from service.settings import Settings
from service.worker.process.worker import Worker

FRAGMENTED = """
from pathlib import Path

from service.memory import return_freed_memory


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


pieces = [bytearray(100_000) for _ in range(3000)]
held = resident_mib()
del pieces[:-1]  # the last one lies at the heap's end, so nothing before it is returned by itself
kept = resident_mib()
return_freed_memory()
assert kept > held - 50, "glibc has returned it by itself: the test shows nothing"
assert resident_mib() < held - 200, (held, kept, resident_mib())
"""


THREADS = """
import ctypes
import os
import sys
import threading

from service.memory import share_one_heap

libc = ctypes.CDLL(None)
libc.fdopen.restype = libc.malloc.restype = ctypes.c_void_p
libc.fdopen.argtypes = (ctypes.c_int, ctypes.c_char_p)
libc.fclose.argtypes = (ctypes.c_void_p,)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
libc.malloc.argtypes = (ctypes.c_size_t,)


def arenas():
    reading, writing = os.pipe()
    stream = libc.fdopen(writing, b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    return open(reading).read().count("<heap nr=")


if "share" in sys.argv:
    share_one_heap()
everyone_is_here = threading.Barrier(4)
threads = [threading.Thread(target=lambda: (everyone_is_here.wait(), libc.malloc(1000))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(arenas())
"""


def test_threads_share_one_heap_where_they_are_asked_to() -> None:
    """In processes of their own: an arena once made stays."""

    def arenas(*asked: str) -> int:
        command = [sys.executable, "-c", THREADS, *asked]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)

    assert arenas("share") == 1
    assert arenas() > 1, "this C library gives threads no heaps of their own: the test shows nothing"


def test_the_api_has_its_threads_share_one_heap_before_it_starts_any(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def make_server(_: Settings) -> NoReturn:
        done.append("server")
        raise ConfigurationError("no server here")

    monkeypatch.setattr(service.api.app, "share_one_heap", lambda: done.append("one heap"))
    monkeypatch.setattr(service.api.app, "make_server", make_server)
    with pytest.raises(ConfigurationError):
        service.api.app.run_api(Settings())
    assert done == ["one heap", "server"]


def test_memory_between_pieces_that_are_in_use_is_returned() -> None:
    """In a process of its own: others have been at the heap before."""
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(name="returned")
def _returned(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time that API or worker returns memory, which they do all the time."""
    times = threading.Semaphore(0)
    for where in (service.api.app, service.worker.process.worker):
        monkeypatch.setattr(where, "RETURN_MEMORY_SECONDS", 0.05)
        monkeypatch.setattr(where, "return_freed_memory", times.release)
    return times


def test_the_api_returns_it_again_and_again(returned: threading.Semaphore, redis_url: str, bench: Bench) -> None:
    running = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        assert all(returned.acquire(timeout=60) for _ in range(3))
    finally:
        running.stop()


def test_the_worker_returns_it_again_and_again(returned: threading.Semaphore, bench: Bench) -> None:
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    serving = threading.Thread(target=worker.serve)
    serving.start()
    try:
        assert all(returned.acquire(timeout=60) for _ in range(3))
    finally:
        worker.stop()
        serving.join(60)
