"""The session of a trainer of several ranks: one for all of a start, and never that of an earlier start.

Starts are played over one store, as torchrun keeps it; and real ones by two of its agents, as on two hosts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
from helpers.ports import free_port
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

import rl_hooks.trainer.session
from rl_hooks.trainer.session import Session

ROOT = Path(__file__).parents[3]
_SCRIPT = """
import datetime, os, sys, time
import torch.distributed as dist
from rl_hooks.trainer.session import Session
mark, dies = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))  # torch itself may read old addresses
session = Session("default", dist.get_rank(), dist.get_world_size())
dist.barrier()
for version in range(2):
    session.saw(version)
    dist.barrier()
print("SESSION", os.path.exists(mark), session.id, flush=True)
dist.barrier()
if os.environ["HOST"] == dies and not os.path.exists(mark):
    open(mark, "w").close()
    os._exit(3)
time.sleep(1)
dist.barrier()
"""


class Start:
    """Processes that are ranks of one start of a trainer, over a store that earlier starts have used."""

    def __init__(self, store: Store, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = ranks
        # Of each process: its own client of the store, and what it remembers.
        self._stores = [PrefixStore("group", store) for _ in range(ranks)]
        self._made: list[WeakKeyDictionary[Any, Any]] = [WeakKeyDictionary() for _ in range(ranks)]
        self._patch = monkeypatch

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        with self._patch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda: rank)
            patch.setattr(dist, "get_world_size", lambda: self.ranks)
            patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: self._stores[rank])
            patch.setattr(rl_hooks.trainer.session, "_made", self._made[rank])
            yield

    def attach(self, rank: int) -> Session:
        with self.as_rank(rank):
            return Session("default", rank, self.ranks)

    def step(self, sessions: dict[int, Session], version: int) -> None:
        for rank, session in sessions.items():
            with self.as_rank(rank):
                session.saw(version)


Begin = Callable[[int], Start]


@pytest.fixture(name="begin")
def _begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    store = HashStore()
    return lambda ranks: Start(store, ranks, monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_first_and_wherever_starts_die_the_ranks_of_a_start_have_one_session_of_their_own(
    begin: Begin, seed: int
) -> None:
    """A start may die when some ranks have their hooks and others do not yet; the next may have other ranks."""
    rng, before = random.Random(seed), set[str]()
    for _ in range(8):
        ranks = rng.choice([2, 3, 3, 4])
        start, order = begin(ranks), rng.sample(range(ranks), ranks)
        dies = rng.random() < 0.5
        found = {rank: start.attach(rank) for rank in order[: rng.randrange(1, ranks) if dies else ranks]}
        if not dies:
            start.step(found, 5)
            ids = {session.id for session in found.values()}
            assert len(ids) == 1
            assert not ids & before
            assert "" not in ids
        before |= {session.id for session in found.values()}


def test_a_rank_whose_first_step_comes_before_another_rank_has_its_hook_is_of_the_session_by_its_second(
    begin: Begin,
) -> None:
    died = begin(2)
    died.attach(0)
    start = begin(2)
    found = {1: start.attach(1)}
    start.step(found, 0)
    found[0] = start.attach(0)
    assert found[0].id != found[1].id
    start.step(found, 1)
    assert found[0].id == found[1].id


def test_ranks_that_make_several_hooks_have_a_session_for_each(begin: Begin) -> None:
    start = begin(2)
    found = [[start.attach(0), start.attach(0)], [start.attach(1), start.attach(1)]]
    ids = [[session.id for session in sessions] for sessions in found]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


def test_a_process_of_an_earlier_start_that_goes_on_keeps_its_own_session(begin: Begin) -> None:
    old = begin(2)
    before = {rank: old.attach(rank) for rank in (0, 1)}
    start = begin(2)
    new = {rank: start.attach(rank) for rank in (0, 1)}
    own = before[0].id
    old.step(before, 3)
    assert [session.id for session in before.values()] == [own, own]
    assert own != new[0].id


def test_a_stores_host_that_is_stopped_holds_up_neither_a_hook_nor_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of torchrun, say: the ranks train on without it."""
    port = free_port()
    script = f"import torch.distributed as d, time; s = d.TCPStore('127.0.0.1', {port}, None, True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", script]) as host:
        try:
            store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=300))
            start = Start(store, 2, monkeypatch)
            monkeypatch.setattr(rl_hooks.trainer.session, "_WAIT_SECONDS", 60.0)
            session = start.attach(0)
            before = session.id
            host.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, host.pid, os.WSTOPPED)  # each of its threads
            monkeypatch.setattr(rl_hooks.trainer.session, "_WAIT_SECONDS", 0.2)
            start.step({0: session}, 0)
            assert session.id == before != ""
            assert start.attach(1).id == ""
        finally:
            host.kill()


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_on_two_hosts_begin_another_session(tmp_path: Path) -> None:
    """Each agent counts its own restarts, and the store of the ranks stays.

    torch's own `init_process_group` sometimes waits for addresses of before the restart, without our code too: then the
    two agents are begun anew, with more time each time.
    """
    script = tmp_path / "trainer.py"
    script.write_text(_SCRIPT)
    for attempt in range(1, 5):
        if (lines := _two_hosts(script, tmp_path / f"died-{attempt}", 50 * attempt)) is not None:
            break
    assert lines is not None
    said = [line.split(" ")[1:] for line in lines if line.startswith("SESSION")]
    first, second = ({its for again, its in said if again == when} for when in ("False", "True"))
    assert len(first) == len(second) == 1
    assert first != second


def _two_hosts(script: Path, mark: Path, seconds: float) -> list[str] | None:
    """What the ranks of two agents of torchrun print; None where they did not end in time."""
    port, agents = free_port(), list[subprocess.Popen[str]]()
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr", "127.0.0.1", *where]
    for host in "ab":
        environment = os.environ | {"HOST": host, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        arguments = [*command, str(script), str(mark), "b"]
        agents.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        lines = [line for one in agents for line in one.communicate(timeout=seconds)[0].splitlines()]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for one in agents:
            one.terminate()  # it ends its ranks
            one.wait()
            if one.stdout is not None:
                one.stdout.close()  # after a timeout nobody has
    return lines if [one.returncode for one in agents] == [0, 0] else None
