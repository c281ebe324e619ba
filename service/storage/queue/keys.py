"""Redis keys of a run; scripts, and how replies are read, for both sides of the queue and its dead batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

GROUP: Final = "workers"
#: Why a batch is dead, for programs. `blob_missing`, `blob_damaged`: its file was lost, and it may be sent again.
#: `unusable`: the reason says why. `discarded`: a person took it from the list.
DeathCode = Literal["blob_missing", "blob_damaged", "unusable", "discarded"]


def death_code(written: str | None) -> DeathCode | None:
    """The code that Redis holds; None where it has none, or one of a version to come."""
    return next((code for code in get_args(DeathCode) if code == written), None)


#: Codes of batches whose file was lost before anything was judged of it. `enqueue.lua` has them too.
LOST: Final[tuple[DeathCode, ...]] = ("blob_missing", "blob_damaged")
#: How long a batch's state is kept after its end, to answer for it and to recognise duplicates: 7 days.
ENDED_SECONDS: Final = 7 * 86_400
#: Most memory of Redis for that, of one run: 128 MiB. Beyond it the batches that ended first are forgotten sooner.
REMEMBERED_BYTES: Final = 128 * 2**20
#: The headline names a trainer whose rollouts are skipped, until this time after its last file.
OUTDATED_SECONDS: Final = 600
#: It does so only if the trainer's files came over at least this time. The last files of an ended one come at once.
GOES_ON_SECONDS: Final = 60
#: Redis keeps the times of a trainer's first and last file for this time: longer than an RL step takes.
OUTDATED_KEPT_SECONDS: Final = 6 * 3600
#: What an entry, a batch's state and a dead letter say in numbers.
NUMBERS: Final = ("bytes", "tokens", "rollouts", "policy_version", "policy_version_max")
_LUA: Final = Path(__file__).parents[1] / "lua"


class _Key:
    """A Redis key of a run, called by the name of the attribute."""

    def __set_name__(self, owner: type[Keys], name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, owner: type[Keys]) -> str:
        return keys.prefix + self._name


class Keys:
    """Redis keys of one run. The braces are a literal hash tag: a cluster keeps one run in one slot."""

    RUNS: Final = "da:runs"
    #: Written by a probe: two slots, so a single node of a cluster refuses them.
    READY: Final = ("da:ready:1", "da:ready:2")
    #: The same through a cluster's client: one slot, as a run's keys.
    READY_CLUSTER: Final = ("da:{ready}:1", "da:{ready}:2")
    #: Of the queue.
    queue, counters, held, lease = _Key(), _Key(), _Key(), _Key()
    last_death, outdated, dead, dead_files = _Key(), _Key(), _Key(), _Key()
    #: Of what the worker and the engines report (`service.storage.reports`).
    scores, recent_scores, worker, latest_head, latest_policy = _Key(), _Key(), _Key(), _Key(), _Key()
    acceptance, reporters, reported, idle, live = _Key(), _Key(), _Key(), _Key(), _Key()
    live_order, unplaced, drift = _Key(), _Key(), _Key()
    changes, scored, returns, awaited_head = _Key(), _Key(), _Key(), _Key()
    sessions, attempt, fence = _Key(), _Key(), _Key()

    def __init__(self, run: str) -> None:
        self.prefix = f"da:{{{run}}}:"

    def batch(self, batch_id: str) -> str:
        """Hash with the state of one batch."""
        return f"{self.prefix}batch:{batch_id}"

    def orphan(self, blob: str) -> str:
        """Exists while the reaper has marked a spooled file as an orphan: `enqueue` refuses to name it."""
        return f"{self.prefix}orphan:{blob}"

    def rollout(self, rollout_id: str) -> str:
        """String: the batch that a rollout came in."""
        return f"{self.prefix}rollout:{rollout_id}"


def lua(name: str) -> str:
    """Text of one of the scripts."""
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")


def text(value: object) -> str:
    """Replies are bytes or text, depending on the client's `decode_responses`."""
    return value.decode() if isinstance(value, bytes) else str(value)


def strings(fields: Mapping[Any, Any]) -> dict[str, str]:
    """The same for all fields of a hash, or of a stream's entry."""
    return {text(k): text(v) for k, v in fields.items()}


def sweep_bounds(older_than_seconds: float, max_bytes: int) -> list[int]:
    """Arguments of the script `sweep`: Unix milliseconds, bytes."""
    return [int((time.time() - older_than_seconds) * 1000), max_bytes]
