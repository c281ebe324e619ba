"""The session of a trainer: a random id of one start, by which the service knows one start from another.

All ranks of a start share one id. The store of their process group keeps it: that takes no collective, and no rank
waits for another. Ranks that share no process group have no session. The service then guesses the trainer's attempts
(docs/reference/state.md, "Attempts").

torchrun starts its ranks again with the same store, which still has the ids of earlier starts. So each rank notes in
the store which id it has joined. If another process of the same rank has joined an id, that id is of an earlier start,
and a new one replaces it.
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

#: How many hooks were made, by the process group's store and by run. All ranks make their hooks in the same order, so
#: the n-th hooks of all ranks belong together.
_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
#: At how many policy versions a rank compares its id with the store's. By the second one every rank has made its hook.
_LOOKS: Final = 2
#: Seconds that a hook waits for the store, at its start and at each look: the store's host may be stopped.
_WAIT_SECONDS: Final = 2.0
#: Variables by which torchrun and Open MPI tell a process how many there are. Slurm's are not used: srun also starts
#: Ray's nodes, and engines beside one trainer.
_TOLD_BY: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


class Session:
    """The session of one hook. `id` is empty where the ranks have no session."""

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
        """Note that a forward of this policy version is captured. The first one is where this start began."""
        if self._began is None:
            self._began = policy_version
        if self._agreed is not None and len(self._seen) < _LOOKS and policy_version not in self._seen:
            self._seen.add(policy_version)
            agreed, joined = self._agreed, self.id
            self._ask(lambda: agreed.look(joined) if joined else agreed.join())

    def of_run(self) -> dict[str, str]:
        """The session's entry in the metadata of a registration or a head."""
        return {"session": self.id} if self.id else {}

    def of_rollouts(self) -> dict[str, str]:
        """The session's entries in the metadata of a rollout file."""
        return {"session": self.id, "session_began": str(self._began or 0)} if self.id else {}

    def _ask(self, ask: Callable[[], str]) -> None:
        """Take the id that `ask` returns. If the store does not answer soon, the id is taken when it does.

        A forward must not wait for the store's host, so a thread asks.
        """

        def work() -> None:
            with contextlib.suppress(Exception):  # it cannot do it, or its host is gone
                self.id = ask()

        thread = threading.Thread(target=work, name="draftalign-session", daemon=True)
        with contextlib.suppress(RuntimeError):  # this process may begin no more threads
            thread.start()
            thread.join(_WAIT_SECONDS)


class _Agreed:
    """The session id that the ranks of a process group share for one hook of each rank."""

    def __init__(self, run: str) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        made = _made.setdefault(self._store, Counter())
        made[run] += 1
        # A start of another number of ranks is another one.
        self._key = f"draftalign/session/{run}/{dist.get_world_size()}/{made[run]}"
        self._me = uuid.uuid4().hex

    def join(self) -> str:
        """Join the id in the store, or a new one where another process of this rank has joined that; returns it."""
        found = self._set(self._key, "", uuid.uuid4().hex)
        while not self._joins(found):
            found = self._set(self._key, found, uuid.uuid4().hex)
        return found

    def look(self, joined: str) -> str:
        """Join the id that is in the store now; returns the id to use.

        It differs from `joined` where that was of a start that died half-way, and a rank that came later replaced it.
        """
        found = self._set(self._key, joined, joined)
        return found if found == joined or self._joins(found) else joined

    def _joins(self, found: str) -> bool:
        return self._set(f"{self._key}/{found}/{dist.get_rank()}", "", self._me) == self._me

    def _set(self, key: str, expected: str, value: str) -> str:
        kept: bytes = self._store.compare_set(key, expected, value)
        if not wire.SESSION.fullmatch(text := kept.decode()):
            raise ValueError(f"{key} holds {text[:40]!r}, which is no session")
        return text


def rank_warning(rank: int, world_size: int) -> str:
    """A warning for a hook that was told of one process while its launcher started several; else empty."""
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
    """How many processes there are, by each launcher's variable. A value that is no number counts as several (2)."""
    said = {name: os.environ.get(name) or "1" for name in _TOLD_BY}
    return {name: int(text) if text.isdecimal() else 2 for name, text in said.items()}


def _processes(rank: int, world_size: int) -> int:
    """How many processes train together: the most that the hook's arguments, environment and process group say."""
    return max(rank + 1, world_size, _grouped(), *_launched().values())


def _grouped() -> int:
    """How many processes are in this one's process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
