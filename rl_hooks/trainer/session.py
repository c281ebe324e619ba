"""One start of a trainer. The service tells it from another by its id: after a restart another attempt may begin.

All ranks of a start have one id. Each makes one, and the store of their process group keeps the first: no collective,
and no rank waits for another. Where ranks have no such group in common they have no session, and the service guesses.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rl_hooks import wire

#: Sessions that began in a process group, by its store and by run: ranks make their hooks in the same order.
_begun: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
#: Sessions that this process had.
_had: set[str] = set()


class Session:
    """What a hook says of its start in each file. `id` is empty where ranks have none in common."""

    def __init__(self, run: str, rank: int, world_size: int) -> None:
        try:
            self.id = _agreed(run, rank, world_size)
        except Exception:  # noqa: BLE001 - a store that cannot do it, or whose host is gone: the trainer goes on without
            self.id = ""
        self._began: int | None = None

    def saw(self, policy_version: int) -> None:
        """A forward of this policy version is captured; the first one tells where the trainer begins."""
        if self._began is None:
            self._began = policy_version

    def of_run(self) -> dict[str, str]:
        """Its entry in the metadata of a registration or a head."""
        return {"session": self.id} if self.id else {}

    def of_rollouts(self) -> dict[str, str]:
        """Its entries in the metadata of a rollout file."""
        return {"session": self.id, "session_began": str(self._began or 0)} if self.id else {}


def _agreed(run: str, rank: int, world_size: int) -> str:
    own, ranks = uuid.uuid4().hex, max(rank + 1, world_size, int(os.environ.get("WORLD_SIZE", "1")))
    if not (dist.is_available() and dist.is_initialized()):
        return own if ranks == 1 else ""
    if dist.get_world_size() == 1 == ranks:
        return own
    if dist.get_world_size() < ranks:
        return ""
    store: Any = dist.distributed_c10d._get_default_store()
    begun = _begun.setdefault(store, Counter())
    # torchrun's store outlives a process group and a start of its ranks, and has the sessions of those before. Agents
    # of several hosts count starts each by itself.
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    found = ""
    while not found or found in _had:
        begun[run] += 1
        kept: bytes = store.compare_set(f"draftalign/session/{run}/{start}/{begun[run]}", "", own)
        found = kept.decode()
        if not wire.SESSION.fullmatch(found):
            return ""
    _had.add(found)
    return found
