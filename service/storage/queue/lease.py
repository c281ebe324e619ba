"""The lease on a run: a Redis key with an expiry. One worker trains one run at a time, or two would pull the same
drafter apart. A second worker waits for the lease, and takes over when the first one dies.

Workers note how many runs each has, so that several of them share the runs out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.exceptions import OutOfMemoryError

from service.storage.reports.keys import StoreKeys

LEASE_SECONDS = 15.0
#: Take or renew the lease in one step: a worker could be paused between two (docs/guide/failures.md). DEL before SET:
#: a server that is full refuses a script whose first write needs room, and no later write.
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
  -- One that is ahead is of a Redis whose clock was: nobody knows when.
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
        """Where the holder's name stands."""
        return StoreKeys(run).lease

    def hold(self, run: str) -> bool:
        """Take or renew the lease on a run. False: another worker has it."""
        key = self.key(run)
        if self._take(key, ""):
            return True
        holder = self._redis.get(key)
        name = holder.decode() if isinstance(holder, bytes) else holder
        # Of a worker killed on this machine: no need to wait for its lease to expire.
        return name is not None and _died_here(name) and self._take(key, name)

    def is_anothers(self, run: str) -> bool:
        """Whether another worker has the lease on a run."""
        holder = self._redis.get(self.key(run))
        return holder is not None and holder not in (self.holder, self.holder.encode())

    def others(self, runs: int) -> dict[str, int]:
        """Note that this worker lives and has so many runs; returns how many each other one has that lives, by name."""
        with contextlib.suppress(OutOfMemoryError):  # then as it was before
            found = self._redis.eval(_NOTE, 1, WORKERS, self.holder, runs, int(LEASE_SECONDS * 1000))
            names = (name.decode() if isinstance(name, bytes) else str(name) for name in found[::2])
            self._others = {name: int(n) for name, n in zip(names, found[1::2], strict=True) if not _died_here(name)}
        return self._others

    def leave(self) -> None:
        """End: this worker has no share any more."""
        self._redis.hdel(WORKERS, self.holder)

    def _take(self, key: str, instead_of: str) -> bool:
        return bool(self._redis.eval(_TAKE, 1, key, self.holder, int(LEASE_SECONDS * 1000), instead_of))

    def give_back(self, run: str) -> None:
        """Delete the lease on a run, but only this worker's: another may have taken it since."""
        self._redis.eval(_DELETE_IF, 1, self.key(run), self.holder)


def _machine() -> str:
    """Identity of this boot of this machine (or container): process ids mean something within it only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex  # unknown: then no holder is ever taken for dead


def _died_here(name: str) -> bool:
    """Whether the lease's holder was a process of this machine that is no more."""
    machine, _, rest = name.partition("/")
    pid = rest.partition("/")[0]
    return machine == _machine() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
