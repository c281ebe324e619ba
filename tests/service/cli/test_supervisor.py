"""Processes under one parent: they die with it, are revived, and end in order."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.forked import ROOT
from helpers.worker.worker_fixtures import alive, wait_until_gone
from redis import Redis

from service.cli.supervisor import (
    PARENT_VARIABLE,
    Child,
    Supervisor,
    spawn,
    stop,
)
from service.storage.queue.lease import WORKERS

#: A parent of three children that note their start and their end.
PARENT = """
import sys
from service.cli.supervisor import Child, Supervisor
log = sys.argv[1]
Supervisor([Child(name, ["supervised_child", name, log, *sys.argv[2:]]) for name in ("one", "two", "three")]).run()
"""
CHILD = """
import os, signal, sys, time
name, log, *options = sys.argv[1:]
def note(word):
    with open(log, "a") as file:
        file.write(f"{name} {word} {os.getpid()}\\n")
def end(*_):
    note("ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in options else end)
note("started")
if "brief" in options:
    sys.exit(3)
while True:
    time.sleep(0.05)
"""


class Parent:
    """A supervisor in a process of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        (directory / "supervised_child.py").write_text(CHILD)
        self.log = directory / "log"
        self.log.touch()
        root = str(Path(__file__).parents[3])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(self.log), *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), root])},
        )

    def lines(self, word: str) -> list[tuple[str, int]]:
        """(name, process id) of each note of `word`, in order."""
        split = [line.split() for line in self.log.read_text().splitlines()]
        return [(name, int(pid)) for name, found, pid in split if found == word]

    def wait(self, word: str, count: int, seconds: float = 60.0) -> list[tuple[str, int]]:
        deadline = time.monotonic() + seconds
        while len(self.lines(word)) < count:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return self.lines(word)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for _, pid in self.lines("started"):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    made = Parent(tmp_path)
    yield made
    made.close()


@pytest.mark.chaos
def test_children_die_when_their_parent_is_killed(parent: Parent) -> None:
    children = parent.wait("started", 3)
    parent.process.kill()
    parent.process.wait()
    for _, pid in children:
        wait_until_gone(pid, 5.0)
    assert len(parent.lines("ended")) == 3, "they were asked, not killed: SIGTERM"


@pytest.mark.chaos
def test_a_child_that_is_killed_is_started_again_and_the_others_stay(parent: Parent) -> None:
    first = dict(parent.wait("started", 3))
    os.kill(first["two"], signal.SIGKILL)
    again = parent.wait("started", 4)
    assert again[3][0] == "two"
    assert again[3][1] != first["two"]
    assert alive(first["one"])
    assert alive(first["three"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_last_started_first_and_leaves_no_process(parent: Parent, number: int) -> None:
    children = parent.wait("started", 3)
    parent.process.send_signal(number)
    assert parent.process.wait(60) == 0
    assert [name for name, _ in parent.lines("ended")] == ["three", "two", "one"]
    assert not any(alive(pid) for _, pid in children)


def test_under_nohup_the_end_of_the_terminal_stops_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup: what is started inherits it
    try:
        parent = Parent(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        first = parent.wait("started", 3)[0][1]
        parent.process.send_signal(signal.SIGHUP)
        os.kill(first, signal.SIGKILL)
        parent.wait("started", 4)  # the parent is there, and started it again
    finally:
        parent.process.terminate()
        parent.process.wait(60)


def test_a_child_that_keeps_dying_is_started_ever_later(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "brief")
    try:
        parent.wait("started", 6)
        time.sleep(1.5)
        assert len(parent.lines("started")) <= 12, "three children, at most four starts each in such a time"
        assert parent.process.poll() is None
    finally:
        parent.close()


def test_a_child_that_ignores_sigterm_is_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "supervised_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    log = tmp_path / "log"
    log.touch()
    process = spawn("stubborn", ["supervised_child", "one", str(log), "stubborn"])
    deadline = time.monotonic() + 60
    while "started" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop(process, patience_seconds=0.3)
    assert process.returncode == -signal.SIGKILL
    stop(process)


def test_a_child_whose_parent_died_before_it_was_tied_does_not_start(tmp_path: Path) -> None:
    """The kernel's promise counts from the moment it was asked for."""
    (tmp_path / "supervised_child.py").write_text(CHILD)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.child", "supervised_child", "orphan", str(tmp_path / "log")],
        env={**os.environ, PARENT_VARIABLE: "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "the parent process ended before this one had started" in done.stderr
    assert not (tmp_path / "log").exists()


def test_revival_waits_longer_after_each_fault_and_forgets_them_once_all_is_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against a clock of the test's: delays of 0, 1, 2, 4, ... seconds, at most 15. Its own log says why it died."""
    now = [1000.0]
    monkeypatch.setattr("service.cli.supervisor.time.monotonic", lambda: now[0])

    class Dead:
        pid, returncode = 1, 1

        def poll(self) -> int:
            return 1

    monkeypatch.setattr("service.cli.supervisor.spawn", lambda *_: Dead())
    (tmp_path / "log").write_text("begun\nwhat was wrong\n")
    child = Child("c", ["x"], log_file=tmp_path / "log")
    child.start()
    starts = [now[0]]
    while len(starts) < 8:
        now[0] += 0.25
        before = child.started
        child.revive()
        if child.started != before:
            starts.append(now[0])
    assert [b - a for a, b in pairwise(starts)] == [0.25, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    now[0] += 31.0
    child.revive()
    assert child.faults == 1
    assert f"{tmp_path / 'log'} says: what was wrong" in caplog.text


def test_a_machine_without_room_for_a_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("c", ["-c", "raise SystemExit"])
    child.start()
    assert child.process is not None
    child.process.wait(60)

    def full(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr("service.cli.supervisor.spawn", full)
        child.revive()
        child.revive()
    assert child.faults == 1, "it is not tried again and again"
    now = time.monotonic() + 2.0
    monkeypatch.setattr("service.cli.supervisor.time.monotonic", lambda: now)
    ended = child.process
    child.revive()
    assert child.process is not ended
    stop(child.process)


def test_nothing_to_supervise_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor([])
    supervisor._on_signal(signal.SIGTERM, None)
    supervisor._on_signal(signal.SIGTERM, None)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    try:
        supervisor.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert slept == []


#: As torchrun does, but for the ranks' addresses.
ELASTIC = """
import os, subprocess, sys, time
environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
subprocess.Popen([sys.executable, "-m", "service.cli", "worker"], env=environment, start_new_session=True)
time.sleep(600)
"""


def test_a_rank_whose_torchrun_was_killed_ends(tmp_path: Path, redis_client: Redis, redis_url: str) -> None:
    """Else it would work on, beside the ranks of the torchrun that is started next."""
    variables = {"DRAFTALIGN_REDIS_URL": redis_url, "DRAFTALIGN_STATE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen([sys.executable, "-c", ELASTIC], env=os.environ | variables)
    try:
        eventually(lambda: redis_client.hlen(WORKERS))
    finally:
        agent.kill()
        agent.wait()
    eventually(lambda: not redis_client.hlen(WORKERS))
