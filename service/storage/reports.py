"""What the worker and the engines report, kept in Redis: scores, acceptance counts, the worker's gauges.

Every record is keyed by what it is about (a batch; a reporter with its drafter and policy version), so writing it
again replaces it and nothing is counted twice. `Store` blocks (worker), `AsyncStore` does not (API); record shapes are
in docs/reference/architecture.md.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Final

import redis.asyncio
from redis import Redis
from redis.exceptions import OutOfMemoryError

from service.monitor.current import LOOK_BACK, arrival
from service.storage.engine_counts import (
    Account,
    EngineCounts,
    acceptance_key,
    encoded,
    live_records,
)
from service.storage.queue import Keys

Record = dict[str, Any]
#: Score records kept per run; beyond these, and an eighth more, the oldest are forgotten.
MAX_SCORES: Final = 4096
#: The order in which so many of the last scored batches arrived is kept: all that a headline is made of.
RECENT_SCORES: Final = LOOK_BACK
#: Records of a reporter, its last used ones, that a headline looks at.
NEWEST_REPORTS: Final = 8


class StoreKeys:
    """Redis keys of one run's reports."""

    def __init__(self, run: str) -> None:
        self.prefix = prefix = Keys(run).prefix
        self.scores = prefix + "scores"
        self.recent_scores = prefix + "recent_scores"
        self.acceptance = prefix + "acceptance"
        self.worker = prefix + "worker"
        self.latest_head = prefix + "latest_head"
        self.reporters = prefix + "reporters"
        self.reported = prefix + "reported"
        self.live = prefix + "live"
        self.live_order = prefix + "live_order"
        self.judged = prefix + "judged"
        self.unplaced = prefix + "unplaced"
        self.latest_policy = prefix + "latest_policy"


class Store:
    """The worker's side."""

    def __init__(self, redis: Redis, run: str) -> None:
        self._redis: Any = redis
        self._keys = StoreKeys(run)

    def put_score(self, batch_id: str, record: Mapping[str, Any]) -> bool:
        """Record the scores of one batch; a redelivered batch replaces its own. False: Redis is full."""
        try:
            self._redis.hset(self._keys.scores, batch_id, encoded(record))
            self._redis.zadd(self._keys.recent_scores, {batch_id: arrival(record)[1]})
        except OutOfMemoryError:
            return False
        self._redis.zremrangebyrank(self._keys.recent_scores, 0, -RECENT_SCORES - 1)
        if self._redis.hlen(self._keys.scores) > MAX_SCORES + MAX_SCORES // 8:
            oldest = list(self.scores())[:-MAX_SCORES]
            self._redis.hdel(self._keys.scores, *oldest)
        return True

    def scores(self) -> dict[str, Record]:
        """Score records by batch id, oldest first."""
        return _scores(self._redis.hgetall(self._keys.scores))

    def acceptances(self) -> list[Record]:
        """All acceptance records, and the live sums that older ones were added to (those without a reporter)."""
        with self._redis.pipeline(transaction=True) as pipe:  # a report moves records from one to the other
            pipe.hgetall(self._keys.acceptance)
            pipe.hgetall(self._keys.live)
            return _acceptances(*pipe.execute())

    def set_worker(self, gauges: Mapping[str, Any]) -> None:
        """Update some of the worker's gauges and its `heartbeat` (Unix seconds). Numbers and short text only.

        Nothing is done while Redis is full: the next ones replace these.
        """
        fields = {"heartbeat": time.time(), **gauges}
        with contextlib.suppress(OutOfMemoryError):
            self._redis.hset(self._keys.worker, mapping={k: json.dumps(v) for k, v in fields.items()})

    def forget_refusal(self) -> None:
        """Take back that the run's file was refused; by deletion, which works while Redis is full."""
        self._redis.hdel(self._keys.worker, "refused")

    def worker(self) -> Record:
        """The worker's gauges; empty before its first sign of life."""
        return _gauges(self._redis.hgetall(self._keys.worker))

    def latest_head(self) -> int | None:
        """Highest policy version whose head was received."""
        value = self._redis.get(self._keys.latest_head)
        return None if value is None else int(value)


class AsyncStore:
    """The API's side."""

    def __init__(self, redis: redis.asyncio.Redis, run: str) -> None:
        self._redis: Any = redis
        self._keys = StoreKeys(run)

    async def scores(self) -> dict[str, Record]:
        """Score records by batch id, oldest first."""
        return _scores(await self._redis.hgetall(self._keys.scores))

    async def recent_scores(self, count: int = RECENT_SCORES) -> list[Record]:
        """The score records of the batches that arrived last, at most `RECENT_SCORES`, oldest first."""
        newest = await self._redis.zrange(self._keys.recent_scores, -count, -1)
        if len(newest) < min(count, await self._redis.hlen(self._keys.scores)):
            return (await self._order_scores())[-count:]
        found = await self._redis.hmget(self._keys.scores, newest) if newest else []
        return [json.loads(value) for value in found if value is not None]

    async def _order_scores(self) -> list[Record]:
        """Keep the order of records that were scored before so many were kept in order, so that all are read once."""
        newest = dict(list((await self.scores()).items())[-RECENT_SCORES:])
        with contextlib.suppress(OutOfMemoryError):  # the next reader tries again
            if newest:
                await self._redis.zadd(self._keys.recent_scores, {i: arrival(r)[1] for i, r in newest.items()})
        return list(newest.values())

    async def book(self, record: Mapping[str, Any]) -> tuple[int, int]:
        """Record an engine's cumulative counts; returns rounds and accepted tokens of its drafter over all policies.

        The newest report of one reporter, drafter and policy version replaces. Where it names no policy version, what
        came since the last such report goes to the version of the batch that arrived last. A crash loses no report and
        counts none twice.
        """
        return await EngineCounts(self._redis, self._keys).book(dict(record))

    async def judged(self, reporter: str, drafter_version: str) -> tuple[int, int]:
        """Rounds and accepted tokens of a reporter's drafter when it was last judged dead or alive."""
        value = await self._redis.hget(self._keys.judged, f"{reporter}/{drafter_version}")
        rounds, accepted = (0, 0) if value is None else json.loads(value)
        return rounds, accepted

    async def set_judged(self, reporter: str, drafter_version: str, rounds: int, accepted_tokens: int) -> None:
        """Remember the counts that a judgement has used up."""
        await self._redis.hset(
            self._keys.judged, f"{reporter}/{drafter_version}", json.dumps([rounds, accepted_tokens])
        )

    async def acceptances(self) -> list[Record]:
        """All acceptance records, and the live sums that older ones were added to (those without a reporter)."""
        async with self._redis.pipeline(transaction=True) as pipe:  # a report moves records from one to the other
            pipe.hgetall(self._keys.acceptance)
            pipe.hgetall(self._keys.live)
            return _acceptances(*await pipe.execute())

    async def newest_acceptances(self, since: float) -> list[Record]:
        """The `NEWEST_REPORTS` last records of each reporter that has reported since then (Unix seconds)."""
        reporters = [_text(name) for name in await self._redis.zrangebyscore(self._keys.reported, since, "+inf")]
        accounts = await self._redis.hmget(self._keys.reporters, reporters) if reporters else []
        names = [
            acceptance_key({"reporter": reporter, "drafter_version": drafter, "policy_version": policy})
            for reporter, account in zip(reporters, accounts, strict=True)
            if account is not None
            for drafter, policy in Account.read(account).apart[-NEWEST_REPORTS:]
        ]
        found = await self._redis.hmget(self._keys.acceptance, names) if names else []
        return [json.loads(value) for value in found if value is not None]

    async def last_report(self) -> float | None:
        """When an engine reported last, in Unix seconds."""
        newest = await self._redis.zrange(self._keys.reported, -1, -1, withscores=True)
        return float(newest[0][1]) if newest else None

    async def worker(self) -> Record:
        """The worker's gauges; empty before its first sign of life."""
        return _gauges(await self._redis.hgetall(self._keys.worker))

    async def forget_refusal(self) -> None:
        """Take back what the worker said of a file that was replaced."""
        await self._redis.hdel(self._keys.worker, "error", "refused")

    async def latest_head(self) -> int | None:
        """Highest policy version whose head was received."""
        value = await self._redis.get(self._keys.latest_head)
        return None if value is None else int(value)

    async def forget(self) -> int:
        """Delete every key of the run, those of the queue included; returns how many there were."""
        keys = [key async for key in self._redis.scan_iter(match=f"{glob_escape(self._keys.prefix)}*", count=1000)]
        return int(await self._redis.delete(*keys)) if keys else 0

    async def raise_latest_head(self, policy_version: int) -> int:
        """Note that a head was received; returns the highest policy version so far."""
        return int(await self._redis.eval(_RAISE, 1, self._keys.latest_head, policy_version))


#: Compare and set in one step: several API replicas may receive heads at once.
_RAISE = """
local highest = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', highest))
return highest
"""


def glob_escape(text: str) -> str:
    """`text` as a Redis pattern that matches nothing else."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def _acceptances(table: Mapping[Any, Any], live: Mapping[Any, Any]) -> list[Record]:
    return [*(json.loads(value) for value in table.values()), *live_records({_text(k): v for k, v in live.items()})]


def _scores(table: Mapping[Any, Any]) -> dict[str, Record]:
    records = {_text(batch_id): json.loads(value) for batch_id, value in table.items()}
    return dict(sorted(records.items(), key=lambda item: arrival(item[1])))


def _gauges(table: Mapping[Any, Any]) -> Record:
    return {_text(k): json.loads(v) for k, v in table.items()}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
