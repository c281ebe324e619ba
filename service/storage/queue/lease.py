"""The lease on a run: a Redis key that expires. Only the worker that holds it trains the run.

A second worker takes the lease once the first one has died or given it back. A deletion takes it too, so that no worker
begins with a run that is being deleted. Workers also note here how many runs each has: they share the runs out by that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from pathlib import Path
from typing import Any, Final

import redis.asyncio
from redis import Redis
from redis.exceptions import OutOfMemoryError

from service.storage.queue.keys import Keys, text

LEASE_SECONDS = 15.0
#: Holder of the lease on a run that is being deleted, and how long at most.
_DELETING: Final = b"deleting"
_DELETING_SECONDS: Final = 600
#: Take or renew the lease in one step: a worker could be paused between two (docs/reference/paused.md). DEL comes
#: before SET because Redis may be full (docs/reference/state.md, "Scripts").
_TAKE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if holder and holder ~= ARGV[3] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_DELETE_IF: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


#: Hash: each worker's name, when it last looked (milliseconds, by the clock of Redis) and how many runs it had.
WORKERS: Final = "da:workers"
_NOTE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now, ARGV[2]))
local others = redis.call('HGETALL', KEYS[1])
local living = {}
for i = 1, #others, 2 do
  local seen, runs = string.match(others[i + 1], '^(%d+) (%d+)$')
  -- A time in the future is of before the clock of Redis was set back: how long ago that was, nobody knows.
  if not seen or math.abs(now - tonumber(seen)) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], others[i])
  elseif others[i] ~= ARGV[1] then
    living[#living + 1] = others[i]
    living[#living + 1] = runs
  end
end
return living
"""


class Leases:
    """The leases of one worker process."""

    def __init__(self, redis: Redis) -> None:
        self.holder = f"{_machine()}/{os.getpid()}/{uuid.uuid4().hex}"
        self._redis: Any = redis
        self._others: dict[str, int] = {}

    @staticmethod
    def key(run: str) -> str:
        """The key that has the holder's name."""
        return Keys(run).lease

    def hold(self, run: str) -> bool:
        """Take or renew the lease on a run. False: another worker has it."""
        key = self.key(run)
        if self._take(key, ""):
            return True
        holder = text(self._redis.get(key) or "")
        # Of a worker killed on this machine: no need to wait for its lease to expire.
        return _died_here(holder) and self._take(key, holder)

    def is_anothers(self, run: str) -> bool:
        """Whether another worker has the lease on a run."""
        return text(self._redis.get(self.key(run)) or self.holder) != self.holder

    def others(self, runs: int) -> dict[str, int]:
        """Note how many runs this worker has. Returns the runs of each other living worker, by its name."""
        with contextlib.suppress(OutOfMemoryError):  # then what was known before stands
            found = self._redis.eval(_NOTE, 1, WORKERS, self.holder, runs, int(LEASE_SECONDS * 1000))
            each = zip(map(text, found[::2]), found[1::2], strict=True)
            self._others = {name: int(n) for name, n in each if not _died_here(name)}
        return self._others

    def leave(self) -> None:
        """Take this worker from the list of those that live."""
        self._redis.hdel(WORKERS, self.holder)

    def _take(self, key: str, instead_of: str) -> bool:
        return bool(self._redis.eval(_TAKE, 1, key, self.holder, int(LEASE_SECONDS * 1000), instead_of))

    def give_back(self, run: str) -> None:
        """Delete the lease on a run, but only this worker's: another may have taken it since."""
        self._redis.eval(_DELETE_IF, 1, self.key(run), self.holder)


async def take_from_workers(redis: redis.asyncio.Redis, run: str) -> bool:
    """Take the lease on a run that is being deleted. False: a worker holds it. The deletion deletes the key, too."""
    key = Keys(run).lease
    taken = await redis.set(key, _DELETING, nx=True, ex=_DELETING_SECONDS)
    return bool(taken) or await redis.get(key) == _DELETING


async def is_worked_on(redis: redis.asyncio.Redis, run: str) -> bool:
    """Whether a worker holds the lease on a run."""
    return await redis.get(Keys(run).lease) not in (None, _DELETING)


async def give_back(redis: redis.asyncio.Redis, run: str) -> None:
    """Undo `take_from_workers`."""
    key = Keys(run).lease
    if await redis.get(key) == _DELETING:
        await redis.delete(key)


def _machine() -> str:
    """Identity of this boot of this machine (or container): process ids mean something within it only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex  # unknown: no holder is ever taken for dead


def _died_here(name: str) -> bool:
    """Whether a holder of a lease was a process of this machine and has ended."""
    machine, _, rest = name.partition("/")
    pid = rest.partition("/")[0]
    return machine == _machine() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
