"""The worker's side of the queue: deliveries, from a claim to the end of an entry.

An entry stays pending until it is ended, by `ack` or as a dead letter. The next claim takes the entries of a dead
worker. One that was delivered more than `MAX_DELIVERIES` times becomes a dead letter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis import Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from service.storage.queue.keys import (
    ENDED_SECONDS,
    GROUP,
    NUMBERS,
    REMEMBERED_BYTES,
    DeathCode,
    Keys,
    lua,
    strings,
    sweep_bounds,
    text,
)

#: Most deliveries of an entry. One that was delivered this often without an ack is taken to kill its worker.
MAX_DELIVERIES: Final = 3
KILLER: Final = f"killed its worker {MAX_DELIVERIES} times"
DEAD_LETTERS_KEPT: Final = 10_000
EndState = Literal["trained", "skipped"]
#: Counts that memory ran out for a batch, once in the given seconds of the clock of Redis; `finish.lua` forgets it.
#: HDEL comes first because Redis may be full (docs/reference/state.md, "Scripts").
_MEMORY_RAN_OUT: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
local now = tonumber(redis.call('TIME')[1])
local found = redis.call('HMGET', KEYS[1], 'memory_tries', 'memory_tried')
local tries, last = tonumber(found[1] or '0'), tonumber(found[2] or '0')
if now < last or now - last >= tonumber(ARGV[1]) then
  tries = tries + 1
  redis.call('HDEL', KEYS[1], 'memory_tries', 'memory_tried')
  redis.call('HSET', KEYS[1], 'memory_tries', tries, 'memory_tried', now)
end
return tries
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One claimed batch. `deliveries` counts this one; `bytes` and `tokens` are of the spooled file `blob`.

    `known`: places in the file of the rollouts that came in an earlier batch. They are not to be used again.
    `put_back`: it had died, and a person wants it to be worked on however old it is. `first_id`: the id of its first
    entry, if newer policies had come before it was put back; else empty. `attempt`: of the trainer, as its session
    tells it.
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
    attempt: int | None = None

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


class RolloutQueue:
    """The queue of one run. Blocking.

    `remembered_bytes`: most memory of Redis for batches that ended and the ids of their rollouts. Beyond it the batches
    that ended first are forgotten, before `ENDED_SECONDS` are over.
    """

    def __init__(self, redis: Redis, run: str, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self.run = run
        self._redis: Any = redis  # redis-py types every reply as "maybe awaitable"
        self._keys = Keys(run)
        self._remembered_bytes = remembered_bytes
        self._refused: int | None = None  # uploads that had found the queue full when `was_refused` looked last
        self._finish = redis.register_script(lua("held") + lua("remember") + lua("finish"))
        self._sweep = redis.register_script(lua("sweep"))
        self._heartbeat = redis.register_script(lua("heartbeat"))

    def ensure_group(self) -> None:
        """Create the stream and its consumer group; idempotent. While Redis is full, `claim` does it later."""
        try:
            self._redis.xgroup_create(self._keys.queue, GROUP, id="0", mkstream=True)
        except OutOfMemoryError:  # raised also if the group exists, whose entries can be worked on
            return
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def claim(self, consumer: str, max_tokens: int, min_idle_seconds: float) -> list[Entry]:
        """Take entries until `max_tokens` is reached: those of dead workers first, then new ones.

        A suspect comes last, and the worker ends those before it first: a death that it causes is hardly ever counted
        as their delivery. An entry above `MAX_DELIVERIES` becomes a dead letter and is not returned.
        """
        entries: list[Entry] = []
        tokens = 0
        stale = self._stale(consumer, min_idle_seconds)
        with self._group_made_again():
            while tokens < max_tokens:
                entry = next(stale, None) or self._claim_new(consumer)
                if entry is None:
                    break
                entries.append(entry)
                tokens += entry.tokens
                if entry.suspect:
                    break
        return entries

    def own_pending(self, consumer: str, skip: Collection[str] = ()) -> list[Entry]:
        """Deliver again the entries that are pending under this consumer name, oldest first.

        A suspect is returned alone: call again until the list is empty. `skip`: ids of entries that are in hand now;
        they are not delivered again.
        """
        entries: list[Entry] = []
        last = ""
        while True:
            pending: list[Any] = []
            with self._group_made_again():
                after = f"({last}" if last else "-"
                pending = self._redis.xpending_range(self._keys.queue, GROUP, after, "+", 1, consumername=consumer)
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
        return self._beat(consumer, "", entry_ids) if entry_ids else []

    def release(self, consumer: str, entries: Sequence[Entry]) -> None:
        """Take this delivery back from the count of each entry, e.g. before an orderly stop."""
        for entry in entries:
            self._beat(consumer, max(0, entry.deliveries - 1), [entry.entry_id])

    def memory_ran_out(self, entry: Entry, pause_seconds: float) -> int:
        """Count that memory ran out for a batch; returns the count so far, of all workers that had it.

        Within `pause_seconds` after a call that counted none counts: a run that is opened again tries at once.
        """
        return int(self._redis.eval(_MEMORY_RAN_OUT, 1, self._keys.batch(entry.batch_id), pause_seconds))

    def ack(self, entry: Entry, state: EndState = "trained", reason: str = "", not_finite: int = 0) -> bool:
        """End an entry. False if it had ended before (another worker claimed and finished it).

        `not_finite`: rollouts of it that were left out for NaN or infinity, to be counted.
        """
        return self._end(entry, state, reason, not_finite=not_finite)

    def dead_letter(self, entry: Entry, reason: str, *, code: DeathCode = "unusable", keep_file: bool = True) -> bool:
        """End an entry as undeliverable; its fields, the reason and its code go to the dead-letter stream.

        `keep_file`: its file stays in the spool, where it can be put back from, until `sweep_dead` names it.
        """
        return self._end(entry, "dead", reason, code=code, keep_file=keep_file)

    def sweep_dead(self, *, older_than_seconds: float, max_bytes: int) -> list[str]:
        """Give up files of dead batches: those that died longer ago than this, then the oldest beyond `max_bytes`.

        Returns their names. The caller deletes them.
        """
        args = sweep_bounds(older_than_seconds, max_bytes)
        return [text(blob) for blob in self._sweep(keys=[self._keys.counters, self._keys.dead_files], args=args)]

    def was_refused(self) -> bool:
        """Whether an upload found the queue full since the last call; False at the first."""
        before, self._refused = self._refused, int(self._redis.hget(self._keys.counters, "rejected_total") or 0)
        return before is not None and self._refused > before

    def unfinished(self) -> list[Entry]:
        """The oldest entries that have not ended, at most 256."""
        return [_entry(message, 0) for message in self._redis.xrange(self._keys.queue, count=256)]

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

    @contextlib.contextmanager
    def _group_made_again(self) -> Iterator[None]:
        """Make the consumer group again where Redis was emptied: nothing is pending in it, and nothing held."""
        try:
            yield
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.ensure_group()

    def _beat(self, consumer: str, deliveries: int | str, entry_ids: Sequence[str]) -> list[str]:
        held: list[Any] = []
        with self._group_made_again():
            held = self._heartbeat(keys=[self._keys.queue], args=[GROUP, consumer, deliveries, *entry_ids])
        return [text(entry_id) for entry_id in held]

    def _end(
        self,
        entry: Entry,
        state: str,
        reason: str,
        *,
        code: DeathCode | None = None,
        keep_file: bool = False,
        not_finite: int = 0,
    ) -> bool:
        keys = self._keys
        reason = reason[:2000].encode("utf-8", "backslashreplace").decode()  # it may quote bytes that are not UTF-8
        return bool(
            self._finish(
                keys=[keys.queue, keys.counters, keys.batch(entry.batch_id), keys.dead, keys.dead_files],
                args=[
                    *(GROUP, entry.entry_id, state, reason),
                    *(ENDED_SECONDS, keys.prefix, DEAD_LETTERS_KEPT, int(keep_file), self._remembered_bytes),
                    *(code or "", not_finite),
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

    def _claim_new(self, consumer: str) -> Entry | None:
        reply = self._redis.xreadgroup(GROUP, consumer, {self._keys.queue: ">"}, count=1)
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


def _entry(message: Any, deliveries: int) -> Entry:
    fields = strings(message[1])
    return Entry(
        entry_id=text(message[0]),
        batch_id=fields["batch_id"],
        blob=fields["blob"],
        **{name: int(fields[name]) for name in NUMBERS},
        deliveries=deliveries,
        put_back=fields.get("put_back") == "1",
        first_id=fields.get("arrived", ""),
        known=tuple(json.loads(fields["known"])),
        attempt=int(fields["attempt"]) if "attempt" in fields else None,
    )
