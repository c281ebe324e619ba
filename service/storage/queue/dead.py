"""The dead batches of a run as people see them: listed, put back, discarded, and swept.

A dead batch's file stays in the spool, where it was. So one script makes each change: the batch dies, is put back, or
its file is given up. A process that is killed between two scripts leaves nothing half done. A file that was given up
and not deleted is an orphan: the reaper deletes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import redis.asyncio
from pydantic import BaseModel, ConfigDict

from service.storage.queue.keys import NUMBERS, DeathCode, Keys, death_code, lua, strings, sweep_bounds, text
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch, Enqueued

#: Rollout ids of a letter that are listed; `GET /rollouts/{id}` has all.
_IDS_LISTED: Final = 16


class BatchFacts(BaseModel):
    """What is told of a batch. `bytes`: of its file. `code`: why it died, where a program may act on that."""

    model_config = ConfigDict(frozen=True)
    batch_id: str
    reason: str
    code: DeathCode | None
    bytes: int
    tokens: int
    rollouts: int
    policy_version: int
    policy_version_max: int
    rollout_ids: tuple[str, ...]


class DeadBatch(BatchFacts):
    """One dead batch, as it is listed. `died`: Unix seconds. `has_file`: it can be put back.

    `rollout_ids`: the first 16; empty: not known any more.
    """

    letter_id: str
    died: float
    has_file: bool


class DeadLetter(DeadBatch):
    """The same with the name of its file."""

    blob: str


class DeadLetters:
    """The dead batches of one run; the API's side."""

    def __init__(self, redis: redis.asyncio.Redis, queue: AsyncRolloutQueue) -> None:
        self._redis: Any = redis
        self._queue = queue
        self._keys = Keys(queue.run)

    async def total(self) -> int:
        """How many are listed."""
        return int(await self._redis.xlen(self._keys.dead))

    async def page(self, count: int, before: str | None = None) -> list[DeadLetter]:
        """The newest ones first; with `before`, those that died before the letter with that id."""
        found = await self._redis.xrevrange(self._keys.dead, f"({before}" if before else "+", "-", count=count)
        letters = [(text(letter_id), strings(fields)) for letter_id, fields in found]
        async with self._redis.pipeline(transaction=False) as pipe:
            for _, fields in letters:
                pipe.zscore(self._keys.dead_files, f"{fields['blob']}:{fields['bytes']}")
                pipe.hget(self._keys.batch(fields["batch_id"]), "rollout_ids")
            known = await pipe.execute()
        return [_letter(*letter, kept, ids) for letter, kept, ids in zip(letters, known[::2], known[1::2], strict=True)]

    async def put_back(self, batch_id: str, known: Mapping[str, str], *, max_items: int, max_bytes: int) -> Enqueued:
        """Queue a dead batch again. It is a duplicate if it is not dead any more, or has died again since.

        `known`: the batch's state as it was when somebody asked for this.
        """
        size, tokens, rollouts, policy, policy_max = (int(known[name]) for name in NUMBERS)
        ids = tuple(json.loads(known["rollout_ids"]))
        batch = Batch(batch_id, known["blob"], size, tokens, rollouts, policy, policy_max, ids)
        return await self._queue.enqueue(
            batch, max_items=max_items, max_bytes=max_bytes, put_back=known.get("letter_id", "alive")
        )

    async def discard(self, batch_id: str) -> tuple[str | None, str | None]:
        """Take a dead batch from the list and give its file up. Returns its state, and the name of a file to delete."""
        keys = [self._keys.counters, self._keys.batch(batch_id), self._keys.dead, self._keys.dead_files]
        reply = [
            text(v) for v in await self._redis.eval(lua("held") + lua("discard"), len(keys), *keys, self._keys.prefix)
        ]
        state, blob, *_ = (*reply, None, None)
        return state, blob

    async def sweep(self, *, older_than_seconds: float, max_bytes: int) -> list[str]:
        """As `RolloutQueue.sweep_dead`."""
        keys, bounds = (self._keys.counters, self._keys.dead_files), sweep_bounds(older_than_seconds, max_bytes)
        return [text(blob) for blob in await self._redis.eval(lua("sweep"), 2, *keys, *bounds)]


def _letter(letter_id: str, fields: Mapping[str, str], kept: object, ids: bytes | None) -> DeadLetter:
    told: dict[str, Any] = {"letter_id": letter_id, "died": int(letter_id.partition("-")[0]) / 1000.0}
    told |= {"code": death_code(fields.get("code")), "has_file": kept is not None}
    told |= {"rollout_ids": () if ids is None else json.loads(ids)[:_IDS_LISTED]}
    return DeadLetter.model_validate({**fields, **told})
