"""What a process holds free goes back to the system."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from redis import Redis
from service_fixtures import RunningService
from worker_fixtures import Bench

import service.api.app
import service.worker.process.worker
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
        assert all(returned.acquire(timeout=10) for _ in range(3))
    finally:
        running.stop()


def test_the_worker_returns_it_again_and_again(returned: threading.Semaphore, bench: Bench) -> None:
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    serving = threading.Thread(target=worker.serve)
    serving.start()
    try:
        assert all(returned.acquire(timeout=10) for _ in range(3))
    finally:
        worker.stop()
        serving.join(20)
