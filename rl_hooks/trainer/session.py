"""One start of a trainer. The service tells it from another by its id: after a restart another attempt may begin.

All ranks of a start have one id, which the store of their process group keeps: no collective, and no rank waits for
another. Where ranks have no such group in common they have no session, and the service guesses.

torchrun's store outlives a start of its ranks, and has the ids of those before. So each rank notes in the store which
id it has joined. An id that another process of the same rank has joined is of an earlier start: a new one replaces it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rl_hooks import wire

#: Hooks that were made in a process group, by its store and by run: ranks make them in the same order.
_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
#: Policy versions at which a rank looks whether its id is still that of all. At the second one each has its hook.
_LOOKS: Final = 2
#: Seconds that a hook waits for the store, whose host may be stopped: at its start, and at each look.
_WAIT_SECONDS: Final = 2.0
#: What says, in the environment of a process, that it is one of several: torchrun and Open MPI. Slurm's variables do
#: not: srun also starts Ray's nodes, and engines beside one trainer.
_TOLD_BY: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


class Session:
    """What a hook says of its start in each file. `id` is empty where ranks have none in common."""

    def __init__(self, run: str, rank: int, world_size: int) -> None:
        self._agreed: _Agreed | None = None
        self.id = ""
        try:
            if _processes(rank, world_size) == 1:
                self.id = uuid.uuid4().hex
            elif _grouped() >= _processes(rank, world_size):
                self._agreed = _Agreed(run)
                self._ask(self._agreed.join)
        except Exception:  # noqa: BLE001 - no store that can do it: the trainer goes on without
            self._agreed = None
        self._began: int | None = None
        self._seen = set[int]()

    def saw(self, policy_version: int) -> None:
        """A forward of this policy version is captured; the first one tells where the trainer begins."""
        if self._began is None:
            self._began = policy_version
        if self._agreed is not None and len(self._seen) < _LOOKS and policy_version not in self._seen:
            self._seen.add(policy_version)
            agreed, joined = self._agreed, self.id
            self._ask(lambda: agreed.look(joined) if joined else agreed.join())

    def of_run(self) -> dict[str, str]:
        """Its entry in the metadata of a registration or a head."""
        return {"session": self.id} if self.id else {}

    def of_rollouts(self) -> dict[str, str]:
        """Its entries in the metadata of a rollout file."""
        return {"session": self.id, "session_began": str(self._began or 0)} if self.id else {}

    def _ask(self, ask: Callable[[], str]) -> None:
        """Take the id that the store answers with, now or when it answers: a forward must not wait for its host."""

        def work() -> None:
            with contextlib.suppress(Exception):  # it cannot do it, or its host is gone
                self.id = ask()

        thread = threading.Thread(target=work, name="draftalign-session", daemon=True)
        with contextlib.suppress(RuntimeError):  # this process may begin no more threads
            thread.start()
            thread.join(_WAIT_SECONDS)


class _Agreed:
    """The id that the ranks of this process group have in common for one hook of each."""

    def __init__(self, run: str) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        made = _made.setdefault(self._store, Counter())
        made[run] += 1
        # A start of another number of ranks is another one.
        self._key = f"draftalign/session/{run}/{dist.get_world_size()}/{made[run]}"
        self._me = uuid.uuid4().hex

    def join(self) -> str:
        """The id of this start: that which is there, or a new one where a process of this rank has joined that."""
        found = self._set(self._key, "", uuid.uuid4().hex)
        while not self._joins(found):
            found = self._set(self._key, found, uuid.uuid4().hex)
        return found

    def look(self, joined: str) -> str:
        """The id that a rank has which came later, where `joined` was of a start that died half-way; else `joined`."""
        found = self._set(self._key, joined, joined)
        return found if found == joined or self._joins(found) else joined

    def _joins(self, found: str) -> bool:
        return self._set(f"{self._key}/{found}/{dist.get_rank()}", "", self._me) == self._me

    def _set(self, key: str, expected: str, value: str) -> str:
        kept: bytes = self._store.compare_set(key, expected, value)
        if not wire.SESSION.fullmatch(text := kept.decode()):
            raise ValueError(f"{key} holds {text[:40]!r}, which is no session")
        return text


def untold(rank: int, world_size: int) -> str:
    """What to say of a process that is one of several, whose hook was told of one; empty where it was told more."""
    if max(rank + 1, world_size, _grouped()) > 1:
        return ""
    several = [f"{name}={count}" for name, count in _launched().items() if count > 1]
    if not several:
        return ""
    return (
        f"{several[0]} says that this process is one of several, which this hook was not told. If they train one "
        "policy, give each hook its rank= and world_size=: else each registers the run and sends heads, and a restart "
        "is not told from late rollouts. If each trains alone, give each a run of its own (run=)"
    )


def _launched() -> dict[str, int]:
    """What launchers say of the number of processes; of what is no number, that it is not one."""
    said = {name: os.environ.get(name) or "1" for name in _TOLD_BY}
    return {name: int(text) if text.isdecimal() else 2 for name, text in said.items()}


def _processes(rank: int, world_size: int) -> int:
    """How many train together, as far as a hook is told, and its environment and process group say."""
    return max(rank + 1, world_size, _grouped(), *_launched().values())


def _grouped() -> int:
    """How many are in this process's group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
