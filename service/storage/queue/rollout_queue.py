"""The queue of rollouts: Redis Streams carry metadata and the name of a spooled file, never tensors.

This is the API's side. `deliveries` is the worker's, where each batch is delivered at least once. `dead` is what people
do with dead batches. Each rollout has its effect once: the script that enqueues compares ids.

Enqueue, end, heartbeat, disown, discard and sweep are one Lua script each, so every count is exact. Never MAXLEN on the
queue: trimming deletes unread work silently. Redis 6.2 commands only. Keys and counters:
docs/reference/state.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import redis.asyncio
from redis.exceptions import ResponseError

from service.storage.queue.keys import (
    ENDED_SECONDS,
    GROUP,
    OUTDATED_KEPT_SECONDS,
    REMEMBERED_BYTES,
    Keys,
    lua,
    strings,
    text,
)

#: Rollouts that may wait in one run's queue: Redis has a key of some 270 bytes for each, so 35 MiB.
QUEUED_ROLLOUTS: Final = 131_072
COUNTERS: Final = (
    *("items", "bytes", "accepted_total", "duplicates_total", "rejected_total", "acked_total", "skipped_total"),
    *("dead_total", "put_back_total", "dead_file_bytes", "not_finite_total"),
)
#: What `held.lua` keeps in one string: all but the last are counters.
HELD: Final = ("items", "bytes", "rollouts", "accepted_total", "put_back_total", "newest")
#: Batches that one call of `shorten.lua` looks at, and bytes of them after which it stops: Redis does nothing else for
#: up to 8 ms, with batches of 2,000 rollouts.
_SHORTENED_AT_ONCE: Final = 64
_SHORTENED_BYTES: Final = 512 * 1024


class Depth(NamedTuple):
    """Size of the queue now, pending entries included."""

    items: int
    bytes: int
    rollouts: int


_EMPTY: Final = Depth(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the API enqueues it. `session`, `session_began`: of its trainer (`rl_hooks.wire`); empty: not told."""

    batch_id: str
    blob: str
    bytes: int
    tokens: int
    rollouts: int
    policy_version: int
    policy_version_max: int
    rollout_ids: tuple[str, ...]
    session: str = ""
    session_began: int = 0


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Outcome of an enqueue. `replaced`: the damaged file that this one replaces; delete it.

    `disowned`: the reaper had already marked the file as an orphan, and may have deleted it. `gone`: the dead batch
    that was to be put back has no file any more. `outdated`: another session has begun a later attempt; the batch is
    skipped. `known`: how many of its rollouts came in an earlier batch; of a batch that was accepted before, how many
    had come then. `other`: the first file with these ids has another size. `held`: what a full queue holds.
    """

    outcome: Literal["accepted", "duplicate", "full", "disowned", "gone", "outdated"]
    state: str
    replaced: str | None = None
    dead_total: int = 0  # of the run so far
    last_dead_reason: str = ""  # of the newest of them
    known: int = 0
    other: bool = False
    held: Depth = _EMPTY


class AsyncRolloutQueue:
    """The queue of one run: admission, enqueue, and the state of a batch. `remembered_bytes`: as of `RolloutQueue`.

    `max_rollouts`: that may wait in the queue; Redis has a key for each.
    """

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        run: str,
        remembered_bytes: int = REMEMBERED_BYTES,
        max_rollouts: int = QUEUED_ROLLOUTS,
    ) -> None:
        self.run = run
        self._redis: Any = redis
        self._keys = Keys(run)
        self._remembered_bytes = remembered_bytes
        self._max_rollouts = max_rollouts
        self._enqueue = redis.register_script(lua("held") + lua("remember") + lua("enqueue"))
        self._disown = redis.register_script(lua("disown"))
        self._shorten = redis.register_script(lua("remember") + lua("shorten"))

    async def ensure_group(self) -> None:
        """Create the stream and its consumer group, and list the run; idempotent."""
        try:
            await self._redis.xgroup_create(self._keys.queue, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        await self._redis.sadd(Keys.RUNS, self.run)

    async def remembered(self) -> int:
        """Bytes of Redis that the batches of this run take that ended and are remembered."""
        return (await self._shortened(0, 0))[0]

    async def shorten(self, most_bytes: int) -> int:
        """Forget batches that ended, the first ones first, until the rest takes `most_bytes`; returns what it takes.

        Of dead batches whose files are kept, only once all take twice that.
        """
        held, looked, left = await self._shortened(most_bytes, _SHORTENED_AT_ONCE)
        while held > most_bytes and looked and left > 0:  # once around: those that stay go to the end of the list
            held, looked, _ = await self._shortened(most_bytes, min(left, _SHORTENED_AT_ONCE))
            left -= looked
        return held

    async def _shortened(self, most_bytes: int, looks: int) -> tuple[int, int, int]:
        """Bytes that are remembered then, batches that were looked at, and batches that are left."""
        args: list[str | int] = [self._keys.prefix, most_bytes, looks, _SHORTENED_BYTES]
        held, looked, left = await self._shorten(keys=[self._keys.counters], args=args)
        return int(held), int(looked), int(left)

    async def depth(self) -> Depth:
        """Items, bytes and rollouts in the queue now."""
        held = await self._held()
        return Depth(*(int(held[name] or 0) for name in Depth._fields))

    async def dead_file_bytes(self) -> int:
        """Bytes of the files of dead batches that are kept."""
        return int(await self._redis.hget(self._keys.counters, "dead_file_bytes") or 0)

    async def count_rejected(self) -> None:
        """Count an upload that was refused before its body was read."""
        await self._redis.hincrby(self._keys.counters, "rejected_total", 1)

    async def enqueue(self, batch: Batch, *, max_items: int, max_bytes: int, put_back: str = "") -> Enqueued:
        """Enqueue a batch whose file is already in the spool, unless it is a duplicate or the queue is full.

        `put_back`: the id of a dead letter, to queue that dead batch again with its kept file. It is a duplicate if
        it is not dead any more, or has died again since.
        """
        keys = self._keys
        args: list[str | int] = [max_items, max_bytes, keys.prefix]
        args += [batch.batch_id, batch.blob, batch.bytes, batch.tokens, batch.rollouts]
        args += [batch.policy_version, batch.policy_version_max, json.dumps(batch.rollout_ids)]
        args += [put_back, ENDED_SECONDS, self._remembered_bytes, self._max_rollouts]
        args += [batch.session, batch.session_began, OUTDATED_KEPT_SECONDS]
        of_batch = [keys.queue, keys.counters, keys.batch(batch.batch_id), keys.dead, keys.dead_files]
        reply = [text(v) for v in await self._enqueue(keys=of_batch, args=args)]
        match reply[0]:
            case "accepted":
                replaced = reply[5] if reply[5:] else None
                return Enqueued("accepted", "queued", replaced, int(reply[2]), reply[3], int(reply[4]))
            case "duplicate":
                return Enqueued("duplicate", reply[1], None, int(reply[2]), reply[3], int(reply[4]))
            case "outdated":
                return Enqueued("outdated", reply[1], None, int(reply[2]), reply[3])
            case "disowned" | "gone":
                return Enqueued(reply[0], "")
            case _:
                return Enqueued("full", "", held=Depth(*map(int, reply[1:4])))

    async def disown(self, batch_id: str, blob: str) -> bool:
        """Mark a spooled file as an orphan, so that it can be deleted. False, and no mark, if its entry names it."""
        keys = [self._keys.batch(batch_id), self._keys.orphan(blob), self._keys.dead_files]
        return bool(await self._disown(keys=keys, args=[blob, ENDED_SECONDS]))

    async def batch(self, batch_id: str) -> dict[str, str] | None:
        """The state of one batch, or None if it is unknown or has expired."""
        return strings(await self._redis.hgetall(self._keys.batch(batch_id))) or None

    async def batch_of(self, rollout_id: str) -> str | None:
        """The batch that a rollout came in."""
        value = await self._redis.get(self._keys.rollout(rollout_id))
        return None if value is None else text(value)

    async def _held(self) -> dict[str, Any]:
        """Values of `HELD`."""
        return parts(await self._redis.get(self._keys.held))


def parts(held: object) -> dict[str, str]:
    """The string `held` by the names in `HELD`; None: nothing has come yet."""
    return dict(zip(HELD, ("0 0 0 0 0 " if held is None else text(held)).split(" "), strict=True))


def counts(values: Sequence[Any], held: object) -> dict[str, int]:
    """All `COUNTERS` from the hash's values and the string `held`, None where there is none yet."""
    both = dict(zip(COUNTERS, values, strict=True)) | parts(held)
    return {name: int(both[name] or 0) for name in COUNTERS}


def fair_bound(held: Sequence[int], most: int) -> int:
    """The bound for each of several runs with which they hold at most `most` together.

    It is the largest such bound. A run that holds less gives up nothing.
    """
    left = most
    for place, one in enumerate(sorted(held)):
        share = left // (len(held) - place)
        if one > share:
            return share
        left -= one
    return most
