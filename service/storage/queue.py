"""The queue of rollouts: Redis Streams carry metadata and the name of a spooled file, never tensors.

At-least-once: an entry stays pending until `ack`; the next claim takes a dead worker's entries; one that was delivered
more than `MAX_DELIVERIES` times becomes a dead letter. Effect once per rollout: the ids decide, in the script that
enqueues. Enqueue, end, heartbeat, disown, discard and sweep are one Lua script each, so every count is exact. Never
MAXLEN on the queue: trimming deletes unread work silently.

`AsyncRolloutQueue` is the API's side and `RolloutQueue` the worker's, over the same scripts and keys. Redis 6.2
commands only. Keys and counters: docs/reference/architecture.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import redis.asyncio
from redis import Redis
from redis.exceptions import OutOfMemoryError, ResponseError

GROUP: Final = "workers"
#: Most deliveries of an entry. One that was delivered this often without an ack is taken to kill its worker.
MAX_DELIVERIES: Final = 3
KILLER: Final = f"killed its worker {MAX_DELIVERIES} times"
#: How long a batch's state is kept after its end, to answer for it and to recognise duplicates: 7 days.
ENDED_SECONDS: Final = 7 * 86_400
#: Redis' memory for that, of one run; those that ended first are forgotten sooner where it is full: 128 MiB.
REMEMBERED_BYTES: Final = 128 * 2**20
#: Rollouts that may wait in one run's queue: Redis has a key of some 270 bytes for each, so 35 MiB.
QUEUED_ROLLOUTS: Final = 131_072
DEAD_LETTERS_KEPT: Final = 10_000
COUNTERS: Final = (
    "items",
    "bytes",
    "accepted_total",
    "duplicates_total",
    "rejected_total",
    "acked_total",
    "skipped_total",
    "dead_total",
    "dropped_total",
    "put_back_total",
    "dead_file_bytes",
)
#: What `held.lua` keeps in one string: all but the last are counters.
HELD: Final = ("items", "bytes", "rollouts", "accepted_total", "put_back_total", "newest")
EndState = Literal["trained", "skipped"]
_LUA: Final = Path(__file__).with_name("lua")
#: Batches that one call of `shorten.lua` looks at, and bytes of them after which it stops: Redis does nothing else for
#: up to 8 ms, with batches of 2,000 rollouts.
_SHORTENED_AT_ONCE: Final = 64
_SHORTENED_BYTES: Final = 512 * 1024


class Keys:
    """Redis keys of one run. The braces are a literal hash tag: a cluster keeps one run in one slot."""

    RUNS: Final = "da:runs"
    #: Written by a probe: two slots, so a single node of a cluster refuses them.
    READY: Final = ("da:ready:1", "da:ready:2")
    #: The same through a cluster's client: one slot, as a run's keys.
    READY_CLUSTER: Final = ("da:{ready}:1", "da:{ready}:2")

    def __init__(self, run: str) -> None:
        self.prefix = f"da:{{{run}}}:"
        self.queue = self.prefix + "queue"
        self.counters = self.prefix + "counters"
        self.held = self.prefix + "held"
        self.last_death = self.prefix + "last_death"
        self.dead = self.prefix + "dead"
        self.dead_files = self.prefix + "dead_files"

    def batch(self, batch_id: str) -> str:
        """Hash with the state of one batch."""
        return f"{self.prefix}batch:{batch_id}"

    def orphan(self, blob: str) -> str:
        """Exists while the reaper has marked a spooled file as an orphan: `enqueue` refuses to name it."""
        return f"{self.prefix}orphan:{blob}"

    def rollout(self, rollout_id: str) -> str:
        """String: the batch that a rollout came in."""
        return f"{self.prefix}rollout:{rollout_id}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One claimed batch. `deliveries` counts this one; `bytes` and `tokens` are of the spooled file `blob`.

    `known`: places in the file of the rollouts that came in an earlier batch. They are not to be used again.
    `put_back`: it had died, and a person wants it to be worked on however old it is. `first_id`: of one that was put
    back when newer policies had come, the entry as which it came first.
    """

    entry_id: str
    batch_id: str
    blob: str
    bytes: int
    tokens: int
    rollouts: int
    policy_version: int
    policy_version_max: int
    deliveries: int
    known: tuple[int, ...] = ()
    put_back: bool = False
    first_id: str = ""

    @property
    def belated(self) -> bool:
        """Whether it is of another time than now: it says nothing about the newest policy."""
        return bool(self.first_id)

    @property
    def arrived(self) -> str:
        """The id that says when its rollouts came."""
        return self.first_id or self.entry_id

    @property
    def suspect(self) -> bool:
        """True on the last delivery: work on it alone, and checkpoint before the next entry."""
        return self.deliveries >= MAX_DELIVERIES


class Arrivals(NamedTuple):
    """Arrival of the oldest batch that has not ended, and of the newest batch of all; Unix seconds."""

    oldest: float | None
    last: float | None


class Depth(NamedTuple):
    """Size of the queue now, pending entries included."""

    items: int
    bytes: int
    rollouts: int


class RolloutQueue:
    """The worker's side: claim, heartbeat, ack, dead-letter. Blocking.

    `remembered_bytes`: of Redis, for batches that ended and their rollouts; beyond it those that ended first are
    forgotten before `ENDED_SECONDS` are over.
    """

    def __init__(self, redis: Redis, run: str, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self.run = run
        self._redis: Any = redis  # redis-py types every reply as "maybe awaitable"
        self._keys = Keys(run)
        self._remembered_bytes = remembered_bytes
        self._finish = redis.register_script(lua("held") + lua("remember") + lua("finish"))
        self._sweep = redis.register_script(lua("sweep"))
        self._heartbeat = redis.register_script(lua("heartbeat"))

    def ensure_group(self) -> None:
        """Create the stream and its consumer group; idempotent. Left to `claim` while Redis is full."""
        try:
            self._redis.xgroup_create(self._keys.queue, GROUP, id="0", mkstream=True)
        except OutOfMemoryError:  # raised also if the group exists, whose entries can be worked on
            return
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def claim(
        self, consumer: str, max_tokens: int, min_idle_seconds: float, *, block_seconds: float = 0.0
    ) -> list[Entry]:
        """Take entries until `max_tokens` is reached: those of dead workers first, then new ones.

        A suspect comes alone, so that a death it causes is not counted as a delivery of other entries. Waits up to
        `block_seconds` for a first entry. An entry above `MAX_DELIVERIES` becomes a dead letter and is not returned.
        """
        entries: list[Entry] = []
        tokens = 0
        stale = self._stale(consumer, min_idle_seconds)
        try:
            while tokens < max_tokens:
                entry = next(stale, None) or self._claim_new(consumer, 0.0 if entries else block_seconds)
                if entry is None:
                    break
                entries.append(entry)
                tokens += entry.tokens
                if entry.suspect:
                    break
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.ensure_group()  # the server was emptied meanwhile
        return entries

    def own_pending(self, consumer: str, skip: Collection[str] = ()) -> list[Entry]:
        """Deliver again the entries that are pending under this consumer name, oldest first.

        A suspect is returned alone: call again until the list is empty. `skip`: ids of entries that are in hand now;
        they are not delivered again.
        """
        entries: list[Entry] = []
        last = ""
        while True:
            try:
                pending = self._redis.xpending_range(
                    self._keys.queue,
                    GROUP,
                    f"({last}" if last else "-",
                    "+",
                    1,
                    consumername=consumer,
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                self.ensure_group()  # the server was emptied meanwhile
                return entries
            if not pending:
                return entries
            if entries and int(pending[0]["times_delivered"]) >= MAX_DELIVERIES - 1:
                return entries
            entry_id = last = text(pending[0]["message_id"])
            if entry_id in skip:
                continue
            claimed = self._redis.xclaim(self._keys.queue, GROUP, consumer, 0, [entry_id])
            if not claimed or claimed[0][0] is None:  # deleted from the stream: drop it from the pending list
                self._redis.xack(self._keys.queue, GROUP, entry_id)
                continue
            entry = self._delivered(claimed[0])
            if entry is None:
                continue
            entries.append(entry)
            if entry.suspect:
                return entries

    def heartbeat(self, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Reset the idle time of entries; returns those still held. Other consumers have claimed the rest."""
        if not entry_ids:
            return []
        return [text(i) for i in self._heartbeat(keys=[self._keys.queue], args=[GROUP, consumer, "", *entry_ids])]

    def release(self, consumer: str, entries: Sequence[Entry]) -> None:
        """Take this delivery back from the count of each entry, e.g. before an orderly stop."""
        for entry in entries:
            self._heartbeat(
                keys=[self._keys.queue], args=[GROUP, consumer, max(0, entry.deliveries - 1), entry.entry_id]
            )

    def ack(self, entry: Entry, state: EndState = "trained", reason: str = "") -> bool:
        """End an entry. False if it had ended before (another worker claimed and finished it)."""
        return self._end(entry, state, reason)

    def dead_letter(self, entry: Entry, reason: str, *, keep_file: bool = True) -> bool:
        """End an entry as undeliverable; its fields and the reason go to the dead-letter stream.

        `keep_file`: its file stays in the spool, where it can be put back from, until `sweep_dead` names it.
        """
        return self._end(entry, "dead", reason, keep_file=keep_file)

    def sweep_dead(self, *, older_than_seconds: float, max_bytes: int) -> list[str]:
        """Give up files of dead batches, the oldest first; returns their names. Delete them."""
        args = sweep_bounds(older_than_seconds, max_bytes)
        return [text(blob) for blob in self._sweep(keys=[self._keys.counters, self._keys.dead_files], args=args)]

    def newest_policy(self, after: str | None = None) -> int | None:
        """Highest policy version of the newest 16 entries that have not ended; None when there are none.

        `after`: of those that arrived after the entry with this id. Belated ones do not count.
        """
        found: list[int] = []
        newest, least = "+", "-" if after is None else f"({after}"
        while len(found) < 16 and (page := self._redis.xrevrange(self._keys.queue, newest, least, count=64)):
            entries = [_entry(message, 0) for message in page]
            found += [entry.policy_version_max for entry in entries if not entry.belated]
            newest = f"({entries[-1].entry_id}"
        return max(found[:16], default=None)

    def _end(self, entry: Entry, state: str, reason: str, *, keep_file: bool = False) -> bool:
        keys = self._keys
        reason = reason[:2000].encode("utf-8", "backslashreplace").decode()  # it may quote bytes that are not UTF-8
        return bool(
            self._finish(
                keys=[keys.queue, keys.counters, keys.batch(entry.batch_id), keys.dead, keys.dead_files],
                args=[
                    *(GROUP, entry.entry_id, state, reason),
                    *(ENDED_SECONDS, keys.prefix, DEAD_LETTERS_KEPT, int(keep_file), self._remembered_bytes),
                ],
            )
        )

    def _stale(self, consumer: str, min_idle_seconds: float) -> Iterator[Entry]:
        """Claim entries that were idle too long, one at a time, in one pass over the pending ones."""
        cursor = "0-0"
        while True:
            reply = self._redis.xautoclaim(
                self._keys.queue, GROUP, consumer, int(min_idle_seconds * 1000), cursor, count=1
            )
            cursor = text(reply[0])
            for message in reply[1]:
                if message[0] is None:  # Redis 6.2 returns deleted entries as nil
                    continue
                entry = self._delivered(message)
                if entry is not None:
                    yield entry
            if cursor == "0-0":
                return

    def _claim_new(self, consumer: str, block_seconds: float) -> Entry | None:
        block = max(1, int(block_seconds * 1000)) if block_seconds > 0 else None
        reply = self._redis.xreadgroup(GROUP, consumer, {self._keys.queue: ">"}, count=1, block=block)
        if not reply:
            return None
        streams = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        message = streams[0][0] if isinstance(streams[0], list) else streams[0]
        return _entry(message, 1)

    def _delivered(self, message: Any) -> Entry | None:
        """Entry of a redelivered message; None if it was above `MAX_DELIVERIES` and became a dead letter."""
        entry_id = text(message[0])
        pending = self._redis.xpending_range(self._keys.queue, GROUP, entry_id, entry_id, 1)
        entry = _entry(message, int(pending[0]["times_delivered"]) if pending else 1)
        if entry.deliveries > MAX_DELIVERIES:
            self.dead_letter(entry, KILLER)
            return None
        return entry


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the API enqueues it."""

    batch_id: str
    blob: str
    bytes: int
    tokens: int
    rollouts: int
    policy_version: int
    policy_version_max: int
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Outcome of an enqueue. `dropped`: blobs of batches that were dropped for this one; delete their files.

    `disowned`: the reaper had already marked the file as an orphan, and may have deleted it. `gone`: the dead batch
    that was to be put back has no file any more. `known`: its rollouts that came in an earlier batch; a duplicate's all
    did, or its `known` were left out when it was accepted. `other`: the first file with these ids has another size.
    """

    outcome: Literal["accepted", "duplicate", "full", "disowned", "gone"]
    state: str
    dropped: tuple[str, ...] = ()
    dead_total: int = 0  # of the run so far
    last_dead_reason: str = ""  # of the newest of them
    known: int = 0
    other: bool = False


class AsyncRolloutQueue:
    """The API's side: admission, enqueue, and the state of a batch. `remembered_bytes`: as of `RolloutQueue`.

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

    async def arrivals(self) -> Arrivals:
        """When batches arrived, by the clock of Redis."""
        try:
            stream = await self._redis.xinfo_stream(self._keys.queue)
        except ResponseError:  # there is no stream: Redis was emptied
            return Arrivals(None, None)
        first = stream["first-entry"]
        newest = (await self._held())["newest"]  # not what was put back
        return Arrivals(None if first is None else _seconds(first[0]), _seconds(newest or stream["last-generated-id"]))

    async def dead_letters(self, count: int) -> list[dict[str, str]]:
        """The newest dead letters, newest first."""
        return [_strings(fields) for _, fields in await self._redis.xrevrange(self._keys.dead, count=count)]

    async def count_rejected(self) -> None:
        """Count an upload that was refused before its body was read."""
        await self._redis.hincrby(self._keys.counters, "rejected_total", 1)

    async def enqueue(
        self,
        batch: Batch,
        *,
        max_items: int,
        max_bytes: int,
        overflow: Literal["reject", "drop_oldest"] = "reject",
        put_back: str = "",
    ) -> Enqueued:
        """Enqueue a batch whose file is already in the spool, unless it is a duplicate or the queue is full.

        `put_back`: a dead batch, with the file that was kept of it: the letter id of the death that was seen. It is a
        duplicate if it is dead no more, or has died again.
        """
        keys = self._keys
        args = [max_items, max_bytes, overflow, GROUP, ENDED_SECONDS, keys.prefix]
        args += [batch.batch_id, batch.blob, batch.bytes, batch.tokens, batch.rollouts]
        args += [batch.policy_version, batch.policy_version_max, json.dumps(batch.rollout_ids)]
        args += [put_back, self._remembered_bytes, self._max_rollouts]
        of_batch = [keys.queue, keys.counters, keys.batch(batch.batch_id), keys.dead, keys.dead_files]
        reply = [text(v) for v in await self._enqueue(keys=of_batch, args=args)]
        match reply[0]:
            case "accepted":
                return Enqueued("accepted", "queued", tuple(reply[5:]), int(reply[2]), reply[3], int(reply[4]))
            case "duplicate":
                return Enqueued("duplicate", reply[1], (), int(reply[2]), reply[3], int(reply[4]))
            case "disowned" | "gone":
                return Enqueued(reply[0], "")
            case _:
                return Enqueued("full", f"{reply[1]} batches, {reply[2]} bytes, {reply[3]} rollouts", tuple(reply[4:]))

    async def disown(self, batch_id: str, blob: str) -> bool:
        """Mark a spooled file as an orphan, so that it can be deleted. False, and no mark, if its entry names it."""
        keys = [self._keys.batch(batch_id), self._keys.orphan(blob), self._keys.dead_files]
        return bool(await self._disown(keys=keys, args=[blob, ENDED_SECONDS]))

    async def batch(self, batch_id: str) -> dict[str, str] | None:
        """The state of one batch, or None if it is unknown or has expired."""
        return _record(await self._redis.hgetall(self._keys.batch(batch_id)))

    async def batch_of(self, rollout_id: str) -> str | None:
        """The batch that a rollout came in."""
        value = await self._redis.get(self._keys.rollout(rollout_id))
        return None if value is None else text(value)

    async def counters(self) -> dict[str, int]:
        """All counters at one moment, zero where nothing was counted yet."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(self._keys.counters, *COUNTERS)
            pipe.get(self._keys.held)
            return counts(*await pipe.execute())

    async def _held(self) -> dict[str, Any]:
        """Values of `HELD`; those of a run whose queue no service of now has changed yet are in the hash."""
        if value := await self._redis.get(self._keys.held):
            return parts(value)
        async with self._redis.pipeline(transaction=True) as pipe:  # one moment: a script moves them
            pipe.get(self._keys.held)
            pipe.hmget(self._keys.counters, *HELD)
            value, before = await pipe.execute()
        return parts(value) if value else dict(zip(HELD, before, strict=True))


def parts(held: object) -> dict[str, str]:
    """The string `held` by the names in `HELD`."""
    return dict(zip(HELD, text(held).split(" "), strict=True))


def counts(values: Sequence[Any], held: object) -> dict[str, int]:
    """All `COUNTERS` from the hash's values and the string `held`, None where there is none yet."""
    both = dict(zip(COUNTERS, values, strict=True)) | (parts(held) if held else {})
    return {name: int(both[name] or 0) for name in COUNTERS}


def fair_bound(held: Sequence[int], most: int) -> int:
    """The largest bound for each of several runs at which what they hold is at most `most` together.

    Who holds less than the bound gives up nothing.
    """
    left = most
    for place, one in enumerate(sorted(held)):
        share = left // (len(held) - place)
        if one > share:
            return share
        left -= one
    return most


def lua(name: str) -> str:
    """Text of one of the scripts."""
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")


def text(value: object) -> str:
    """Replies are bytes or text, depending on the client's `decode_responses`."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _seconds(entry_id: object) -> float | None:
    """Arrival of a stream's entry: its id begins with Unix milliseconds. None for 0-0, before the first."""
    milliseconds = int(text(entry_id).partition("-")[0])
    return milliseconds / 1000.0 if milliseconds else None


def sweep_bounds(older_than_seconds: float, max_bytes: int) -> list[int]:
    """Arguments of the script `sweep`: Unix milliseconds, bytes."""
    return [int((time.time() - older_than_seconds) * 1000), max_bytes]


def _strings(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {text(k): text(v) for k, v in fields.items()}


def _record(fields: Mapping[Any, Any]) -> dict[str, str] | None:
    return _strings(fields) or None


def _entry(message: Any, deliveries: int) -> Entry:
    fields = _strings(message[1])
    return Entry(
        entry_id=text(message[0]),
        batch_id=fields["batch_id"],
        blob=fields["blob"],
        bytes=int(fields["bytes"]),
        tokens=int(fields["tokens"]),
        rollouts=int(fields["rollouts"]),
        policy_version=int(fields["policy_version"]),
        policy_version_max=int(fields["policy_version_max"]),
        deliveries=deliveries,
        put_back=fields.get("put_back") == "1",
        first_id=fields.get("arrived", ""),
        known=tuple(json.loads(fields.get("known", "[]"))),  # of an older service: none
    )
