"""The file lock: one at a time, never waited for without end, and it says who has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.engine.agent_fixtures import manifest

from rl_hooks.agent.download import fetch_release, prune_cache
from rl_hooks.errors import DownloadError
from rl_hooks.format.release import parse_manifest
from rl_hooks.lock import LockHeld, exclusive

HOLDER = """
import sys, time
from pathlib import Path
from rl_hooks.lock import exclusive
with exclusive(Path(sys.argv[1]), 1.0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "below" / ".lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_who_has_it_is_named_and_only_its_death_frees_it(lock: Path, holder: subprocess.Popen[bytes]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    text = rf"locked for \d+ s by process {holder.pid} of "
    with pytest.raises(LockHeld, match=text) as held, exclusive(lock, 0.1):
        pass
    assert holder.poll() is None
    assert held.value.holder.startswith(f"process {holder.pid} of ")
    holder.kill()
    with exclusive(lock, 10.0):
        assert lock.read_text().startswith(f"process {os.getpid()} of ")


def test_whoever_is_asked_to_stop_waits_no_longer(lock: Path, holder: subprocess.Popen[bytes]) -> None:
    asked = threading.Event()
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(LockHeld), exclusive(lock, 60.0, asked.is_set):
        pass
    assert holder.poll() is None


def test_an_error_inside_frees_it(lock: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(lock, 0.0):
        raise ZeroDivisionError
    with exclusive(lock, 0.0):
        pass


def test_one_at_a_time(lock: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with exclusive(lock, 30.0):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (inside, most) == (0, 1)


def test_an_agent_is_told_who_is_in_its_cache_and_deletes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = parse_manifest(manifest(1, {"model.safetensors": b"x"}, 1, "published"), "default")
    monkeypatch.setattr("rl_hooks.agent.download.LOCK_SECONDS", 0.05)
    old = tmp_path / "default" / "v000000-00000000"
    old.mkdir(parents=True)
    with exclusive(tmp_path / "default" / ".lock", 0.0), httpx.Client() as client:
        with pytest.raises(DownloadError, match=f"by process {os.getpid()} of .*shares this cache"):
            fetch_release(client, offered, tmp_path)
        assert prune_cache(tmp_path, "default", set()) == []
    assert prune_cache(tmp_path, "default", set()) == [old.name]
