"""What the worker and the engines report, kept in Redis: scores, acceptance counts, the worker's gauges.

Every record is keyed by what it is about (a batch; a reporter with its drafter and policy version), so writing it
again replaces it and nothing is counted twice. `Store` blocks (worker), `AsyncStore` does not (API); record shapes are
in docs/reference/state.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import redis.asyncio
from redis import Redis
from redis.exceptions import OutOfMemoryError

from service.monitor.current import LOOK_BACK
from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import REPLAYED_BATCHES, Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.records import AcceptanceRecord, Return, ScoreRecord, StepSample, WorkerGauges, read, written
from service.storage.layout import FileId
from service.storage.queue.keys import Keys, lua
from service.storage.queue.keys import text as _text
from service.storage.reports.engine_counts import KEPT_CHANGES, Account, EngineCounts, acceptance_key

#: Score records kept per run; beyond these, and an eighth more, the oldest are forgotten.
MAX_SCORES: Final = 4096
#: Number of the last batches whose order of arrival is kept: a headline is made of these alone.
RECENT_SCORES: Final = LOOK_BACK
#: So many of the last times at which trainers went back are kept.
_RETURNS: Final = 64
#: Sessions of trainers that are known, those of the last attempts. `enqueue.lua` has both numbers too.
_SESSIONS: Final = 256
#: A trainer that has registered again sends its head, if it moved, before its first rollouts; then it is too late.
_AWAITED_SECONDS: Final = 24 * 3600
#: How many records of a reporter a headline looks at: those that it used last.
NEWEST_REPORTS: Final = 8
#: Batches of one millisecond that are told apart in order: a float64 has no more places beside today's milliseconds.
_IN_A_MILLISECOND: Final = 4096
#: Records that are read at once.
_AT_ONCE: Final = 256
#: Keys that are deleted at once: a run may have a million, and nothing else is answered meanwhile.
_KEYS_AT_ONCE: Final = 1000
_FOLLOW: Final = lua("follow")
_FORGET: Final = lua("forget")
#: The worker's gauges, with the time of Redis: hosts' clocks differ. HDEL comes first because Redis may be full
#: (docs/reference/state.md, "Scripts").
_SET_WORKER: Final = """
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'heartbeat')
redis.call('HSET', KEYS[1], 'heartbeat', string.format('%d.%06d', time[1], time[2]), unpack(ARGV))
"""
#: Let the newest attempt begin at this policy version, unless another attempt has begun since (compare-and-set).
_BEGIN_BELOW: Final = """
local version = ARGV[2]
if string.match(redis.call('GET', KEYS[1]) or '', '^%d+') == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. version .. ' ' .. version)
end
"""
_WORKER: Final = "return {redis.call('TIME'), redis.call('HGETALL', KEYS[1])}"
#: What may kill the worker's process. A note is kept in Redis while it does one of these.
Deadly: TypeAlias = Literal["opening", "working"]


class Store:
    """The worker's side."""

    def __init__(self, redis: Redis, run: str) -> None:
        self._redis: Any = redis
        self._keys = Keys(run)

    def put_score(self, batch_id: str, record: ScoreRecord) -> bool:
        """Record the scores of one batch; a redelivered batch replaces its own. False: Redis is full."""
        try:
            with self._redis.pipeline(transaction=True) as pipe:  # whoever follows sees a record and its name, or none
                pipe.hset(self._keys.scores, batch_id, written(record))
                pipe.xadd(self._keys.changes, {"s": batch_id}, maxlen=KEPT_CHANGES)
                pipe.incr(self._keys.scored)
                pipe.zadd(self._keys.recent_scores, {batch_id: _order(record)})
                pipe.execute()
        except OutOfMemoryError:
            return False
        self._shorten(self._redis.zrange(self._keys.recent_scores, 0, -RECENT_SCORES - 1))
        self._redis.zremrangebyrank(self._keys.recent_scores, 0, -RECENT_SCORES - 1)
        if self._redis.hlen(self._keys.scores) > MAX_SCORES + MAX_SCORES // 8:
            oldest = list(self.scores())[:-MAX_SCORES]
            self._redis.hdel(self._keys.scores, *oldest)
        return True

    def _shorten(self, batch_ids: Sequence[bytes]) -> None:
        """Drop `replayed`, three quarters of a record: only newer batches are compared with engines."""
        for batch_id in batch_ids:
            text = self._redis.hget(self._keys.scores, batch_id)
            record = None if text is None else read(ScoreRecord, text)
            if record is not None and record.replayed is not None:
                with contextlib.suppress(OutOfMemoryError):
                    self._redis.hset(self._keys.scores, batch_id, written(replace(record, replayed=None)))

    def scores(self) -> dict[str, ScoreRecord]:
        """Score records by batch id, oldest first."""
        return _scores(self._redis.hgetall(self._keys.scores))

    def recent_scores(self) -> list[ScoreRecord]:
        """The score records of the `RECENT_SCORES` batches that arrived last, oldest first."""
        newest = self._redis.zrange(self._keys.recent_scores, -RECENT_SCORES, -1)
        return _known(ScoreRecord, self._redis.hmget(self._keys.scores, newest) if newest else [])

    def accounts(self, since: float) -> dict[str, tuple[float, Account]]:
        """Every engine that has reported since then, and when it did so last (Unix seconds)."""
        last = self._redis.zrangebyscore(self._keys.reported, since, "+inf", withscores=True)
        found = self._redis.hmget(self._keys.reporters, [name for name, _ in last]) if last else []
        pairs = zip(last, found, strict=True)
        return {_text(name): (at, Account.read(text)) for (name, at), text in pairs if text is not None}

    def watch(self, accounts: Mapping[str, Account], rule: LiveRule) -> Watch:
        """What these engines say beside the batches scored last."""
        if not accounts:
            return Watch()
        newest = self._redis.zrange(self._keys.recent_scores, -REPLAYED_BATCHES, -1)
        found = self._redis.hmget(self._keys.scores, newest) if newest else []
        blocks = {reporter: account.blocks for reporter, account in accounts.items()}
        return watch(blocks, Replays(_known(ScoreRecord, found), self.returns()), rule)

    def returns(self) -> list[Return]:
        """As `AsyncStore.returns`."""
        return _returns(self._redis.xrange(self._keys.returns))

    def served_ago(self) -> float | None:
        """Seconds since a worker last had the run; None: none ever had it, or the last one could not work on it.

        Below 0 where the clock of Redis was set back.
        """
        now, gauges = _of_worker(self._redis.eval(_WORKER, 1, self._keys.worker))
        if "heartbeat" not in gauges or gauges.get("error", "null") != "null":
            return None
        return now - float(gauges["heartbeat"])

    def set_worker(self, gauges: WorkerGauges | None = None) -> None:
        """Update the gauges that are named, and the `heartbeat` (Unix seconds by the clock of Redis).

        Also while Redis is full: a worker that lives is not to be called silent.
        """
        named = {} if gauges is None else gauges.model_dump(exclude_unset=True)
        fields = (part for name, value in named.items() for part in (name, json.dumps(value)))
        self._redis.eval(_SET_WORKER, 1, self._keys.worker, *fields)

    def told(self, gauge: str) -> Any:
        """A gauge of the worker, as it was told last; None: never."""
        text = self._redis.hget(self._keys.worker, gauge)
        return None if text is None else json.loads(text)

    def drift_requests(self) -> dict[str, str]:
        """What people asked of the drift alarm: the id of the newest request by what is to be done."""
        return {_text(action): _text(request) for action, request in self._redis.hgetall(self._keys.drift).items()}

    def forget_refusal(self) -> None:
        """Take back that the run's file was refused; by deletion, which works while Redis is full."""
        self._redis.hdel(self._keys.worker, "refused")

    def begun(self, what: Deadly, file: FileId) -> tuple[int, float]:
        """How often this was begun with this target file and has not ended, and when last (Unix seconds)."""
        text = self._redis.hget(self._keys.worker, what)
        inode, changed_ns, times, since = (0, 0, 0, 0.0) if text is None else json.loads(text)
        return (times, since) if (inode, changed_ns) == file else (0, 0.0)

    def begin(self, what: Deadly, file: tuple[int, int], times: int) -> None:
        """Note before the run is opened or worked on that this is begun."""
        self.set_worker(WorkerGauges.model_validate({what: (*file, times, time.time())}))

    def end(self, *what: Deadly) -> None:
        """Note that it has ended, well or by an error: the process lives; works while Redis is full."""
        self._redis.hdel(self._keys.worker, *what)


#: What changed: `s` a batch's score, `a` an acceptance record, `l` a live sum; its name; its value, None if it is gone.
Change = tuple[str, str, bytes | None]


class Changes(NamedTuple):
    """What happened up to `cursor`. `sizes`: how many scores and acceptance records there are then."""

    cursor: str
    sizes: tuple[int, int]
    changed: list[Change]


def _order(record: ScoreRecord) -> float:
    """Where a batch stands among others. Many have one millisecond where the clock of Redis was set back."""
    _, milliseconds, number_in_it = record.arrival
    return milliseconds + min(number_in_it, _IN_A_MILLISECOND - 1) / _IN_A_MILLISECOND


class AsyncStore:
    """The API's side. `max_reporters`: engines whose counts are kept."""

    def __init__(self, redis: redis.asyncio.Redis, run: str, max_reporters: int = 1024) -> None:
        self._redis: Any = redis
        self._max_reporters = max_reporters
        self._keys = Keys(run)
        self._follow = self._redis.register_script(_FOLLOW)

    async def recent_scores(self, known: Mapping[str, ScoreRecord] | None = None) -> dict[str, ScoreRecord]:
        """The score records of the `RECENT_SCORES` batches that arrived last, by batch id, oldest first.

        `known`: those that are not to be read again.
        """
        known = known or {}
        newest = [_text(name) for name in await self._redis.zrange(self._keys.recent_scores, -RECENT_SCORES, -1)]
        unknown = [name for name in newest if name not in known]
        found = await self._redis.hmget(self._keys.scores, unknown) if unknown else []
        more = await asyncio.to_thread(_by_name, unknown, found)
        return {name: record for name in newest if (record := known.get(name) or more.get(name)) is not None}

    async def book(
        self, record: AcceptanceRecord, steps: Sequence[StepSample] = (), *, outdated: bool = False
    ) -> tuple[Block, ...]:
        """Record an engine's cumulative counts; returns the engine's last rounds, oldest first.

        The newest report of one reporter, drafter and policy version replaces. Where it names no policy version, what
        came since the last such report goes to the version of the batch that arrived last. A crash loses no report and
        counts none twice. `outdated`: whether `latest` names another version than the report.
        """
        counts = EngineCounts(self._redis, self._keys, self._max_reporters)
        return await counts.book(record, steps, outdated=outdated)

    async def engines(self, since: float) -> dict[str, bytes]:
        """Every engine that has reported since then (Unix seconds), as `Account.read` reads it.

        Not read here: a thousand of them take a second, and this is the event loop's thread.
        """
        reporters = [_text(name) for name in await self._redis.zrangebyscore(self._keys.reported, since, "+inf")]
        found = await self._redis.hmget(self._keys.reporters, reporters) if reporters else []
        return {name: text for name, text in zip(reporters, found, strict=True) if text is not None}

    async def times_scored(self) -> int:
        """How often a batch was scored."""
        return int(await self._redis.get(self._keys.scored) or 0)

    async def changes(self, cursor: str) -> Changes | None:
        """What changed since `cursor`, of scores and acceptance counts; None where that was forgotten: read all."""
        names = [self._keys.changes, self._keys.scores, self._keys.acceptance, self._keys.live]
        found = await self._follow(keys=names, args=[cursor, KEPT_CHANGES])
        if not found:
            return None
        last, scores, acceptances, flat = found
        each = zip(map(_text, flat[::3]), map(_text, flat[1::3]), flat[2::3], strict=True)
        return Changes(_text(last), (scores, acceptances), list(each))

    async def newest_change(self) -> str:
        """Cursor for `changes` of what happens from now on."""
        newest = await self._redis.xrevrange(self._keys.changes, count=1)
        return _text(newest[0][0]) if newest else "0-0"

    async def all_records(self, kinds: str = "sal") -> AsyncIterator[list[Change]]:
        """All records of these kinds, as `changes` tells them, in pieces. One that changes meanwhile may be missing."""
        for kind, key in (("s", self._keys.scores), ("a", self._keys.acceptance)):
            if kind not in kinds:
                continue
            cursor, first = 0, True
            while first or cursor:
                cursor, found = await self._redis.hscan(key, cursor, count=_AT_ONCE)
                first = False
                yield [(kind, _text(name), value) for name, value in found.items()]
        if "l" not in kinds:
            return
        live = {_text(name): value for name, value in (await self._redis.hgetall(self._keys.live)).items()}
        sums = [name.removesuffix(":rounds") for name in live if name.endswith(":rounds")]
        parts = ("rounds", "tokens", "created")
        yield [("l", name, b" ".join(live.get(f"{name}:{part}", b"0") for part in parts)) for name in sums]

    async def scores_of(self, batch_ids: Sequence[str]) -> list[ScoreRecord]:
        """The score records of these batches, in this order; those that are gone are left out."""
        found = await self._redis.hmget(self._keys.scores, batch_ids) if batch_ids else []
        return await asyncio.to_thread(_known, ScoreRecord, found)

    async def newest_acceptances(self, since: float) -> list[AcceptanceRecord]:
        """The `NEWEST_REPORTS` last records of each reporter that has reported since then (Unix seconds)."""
        names = [
            acceptance_key(reporter, drafter, policy)
            for reporter, account in (await self.engines(since)).items()
            for drafter, policy in Account.read(account).apart[-NEWEST_REPORTS:]
        ]
        found = await self._redis.hmget(self._keys.acceptance, names) if names else []
        return _known(AcceptanceRecord, found)

    async def ask_of_drift(self, action: str) -> str:
        """Ask the worker to do something with the drift alarm; returns the request's id.

        It replaces a request that the worker has not done yet, so two at once count as one.
        """
        request = uuid.uuid4().hex
        await self._redis.hset(self._keys.drift, action, request)
        return request

    async def forget_refusal(self) -> None:
        """Take back what the worker said of a file that was replaced."""
        await self._redis.hdel(self._keys.worker, "error", "refused")

    async def latest_head(self) -> int | None:
        """Policy version of the head that was received last; None before the first."""
        value = await self._redis.get(self._keys.latest_head)
        return None if value is None else int(value)

    async def latest_policy(self) -> int | None:
        """Policy version of the batch that was accepted last; None before the first."""
        value = await self._redis.get(self._keys.latest_policy)
        return None if value is None else int(value)

    async def forget(self, fence: int | None = None) -> int | None:
        """Delete every key of the run, those of the queue included; returns how many there were.

        `fence`: the number of the change in which that is done (`Layout.fenced`). If a later change has done it
        already, nothing is deleted, and None is returned.
        """
        pattern, gone = f"{glob_escape(self._keys.prefix)}*", 0
        found = [key async for key in self._redis.scan_iter(match=pattern, count=_KEYS_AT_ONCE)]
        for first in range(0, len(found) or 1, _KEYS_AT_ONCE):  # once without any: the number is noted
            some = found[first : first + _KEYS_AT_ONCE]
            if fence is not None:
                keys = [self._keys.fence, *(key for key in some if _text(key) != self._keys.fence)]
                deleted = int(await self._redis.eval(_FORGET, len(keys), *keys, fence))
                if deleted < 0:
                    return None
                gone += deleted
            elif some:
                gone += int(await self._redis.delete(*some))
        return gone

    async def note_head(self, policy_version: int, *, went_back: bool = False, session: str = "") -> None:
        """Note that a head was received. The last counts, not the highest: trainers go back, or name nonsense.

        The first after a registration says at which version that trainer really begins: many register at version 0.
        `went_back`: the trainer says that its versions fell, without a registration. That is noted whatever the newest
        batch's version is: a batch of the low version came before this head. `session`: that of this trainer.
        """
        await self._redis.set(self._keys.latest_head, policy_version)
        awaited = await self._redis.delete(self._keys.awaited_head)
        number = await self._attempt_of(session)
        if went_back:
            await self._add_return(policy_version, number)
            if number is not None:
                await self._redis.eval(_BEGIN_BELOW, 1, self._keys.attempt, number, policy_version)
        elif awaited:
            await self._note_return(policy_version, number)

    async def note_registration(self, policy_version: int, session: str = "") -> None:
        """Note that a trainer registered again, if it did so three or more below the policy version that came last.

        Engines register as well, and may be a step or two behind. Once sessions tell attempts, a new `session` is noted
        up to the version that came last, and for engines' counts only: batches themselves tell their attempt.
        """
        if session and await self._last_attempt() is not None:
            with contextlib.suppress(OutOfMemoryError):
                newest = await self.latest_policy()
                if newest is None or policy_version > newest:
                    return  # should its batches begin below, they are a return themselves
                new = await self._redis.zadd(self._keys.sessions, {session: 0}, nx=True)
                await self._redis.zremrangebyrank(self._keys.sessions, 0, -_SESSIONS - 1)
                if new:
                    await self._add_return(policy_version, 0)
        elif await self._note_return(policy_version, await self._attempt_of(session)):
            with contextlib.suppress(OutOfMemoryError):
                await self._redis.set(self._keys.awaited_head, policy_version, ex=_AWAITED_SECONDS)

    async def _last_attempt(self) -> int | None:
        """The newest attempt that a session has told of."""
        value = await self._redis.get(self._keys.attempt)
        return None if value is None else int(_text(value).split(" ")[0])

    async def _attempt_of(self, session: str) -> int | None:
        """The attempt of a session's batches: 1 until it has sent one. None: no session is told."""
        return int(await self._redis.zscore(self._keys.sessions, session) or 1) if session else None

    async def was_followed(self, session: str) -> bool:
        """Whether an attempt has begun after that of this session. False for a session that has sent no batch yet."""
        own = int(await self._redis.zscore(self._keys.sessions, session) or 0) if session else 0
        return 0 < own < (await self._last_attempt() or 0)

    async def _note_return(self, policy_version: int, attempt: int | None) -> bool:
        newest = await self.latest_policy()
        if newest is None or policy_version >= newest - 2:
            return False
        await self._add_return(policy_version, attempt)
        return True

    async def _add_return(self, policy_version: int, attempt: int | None) -> None:
        fields = {"to": policy_version} | ({} if attempt is None else {"attempt": attempt})
        with contextlib.suppress(OutOfMemoryError):  # curves of two attempts are one then
            await self._redis.xadd(self._keys.returns, fields, maxlen=_RETURNS, approximate=False)

    async def returns(self) -> list[Return]:
        """When trainers registered again or went back, and to which policy version; oldest first."""
        return _returns(await self._redis.xrange(self._keys.returns))


def glob_escape(text: str) -> str:
    """`text` as a Redis pattern that matches nothing else."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def _returns(found: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Return]:
    return [
        Return(
            int(_text(name).partition("-")[0]) / 1000.0,
            int(fields[b"to"]),
            int(fields[b"attempt"]) if b"attempt" in fields else None,
        )
        for name, fields in found
    ]


_Kind = TypeVar("_Kind", ScoreRecord, AcceptanceRecord)


def _known(kind: type[_Kind], texts: Iterable[bytes | str | None]) -> list[_Kind]:
    """The records among `texts`: what cannot be read is passed over."""
    return [record for text in texts if text is not None and (record := read(kind, text)) is not None]


def _by_name(names: Sequence[str], texts: Sequence[bytes | None]) -> dict[str, ScoreRecord]:
    pairs = zip(names, texts, strict=True)
    return {name: found for name, text in pairs if text is not None and (found := read(ScoreRecord, text)) is not None}


def _scores(table: Mapping[Any, Any]) -> dict[str, ScoreRecord]:
    records = {_text(i): record for i, text in table.items() if (record := read(ScoreRecord, text)) is not None}
    return dict(sorted(records.items(), key=lambda item: item[1].arrival))


def _of_worker(found: Sequence[Any]) -> tuple[float, dict[str, str]]:
    """The time of Redis (Unix seconds), and the fields of the worker's gauges."""
    (seconds, microseconds), fields = found
    texts = [_text(field) for field in fields]
    return int(seconds) + int(microseconds) / 1e6, dict(zip(texts[::2], texts[1::2], strict=True))
