"""Whether Redis takes the service's writes; if not, what is wrong with it, and what to do."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import redis.asyncio
from redis import Redis
from redis import exceptions as redis_errors
from redis.exceptions import RedisError, ResponseError

from service.storage.queue import Keys

#: Most seconds that a probe of Redis waits: a command by itself would wait 15 s for one that hangs.
PROBE_SECONDS: Final = 1.5
#: How long the outcome of a test write stands: whoever asks meanwhile is told it, and causes no write.
_TESTED_SECONDS: Final = 1.0
#: A write as the service makes its own: by a script, which a user may be denied where MSET is allowed.
_TEST_WRITE: Final = "return redis.call('MSET', KEYS[1], 1, KEYS[2], 1)"
_CLUSTER: Final = "is a node of a cluster", "give a server that is not in cluster mode"
_NOT_ALLOWED: Final = "does not let its user write", "allow that user all commands on the keys da:*"
#: What answers without an error class of their own say.
_ANSWERS: Final = {
    "ACL failure": _NOT_ALLOWED,  # of a command within a script
    "unknown command": (
        "lacks a command: it is a Sentinel's own port, or too old",
        "give the address of the primary, a Redis from 6.2 on or a Valkey",
    ),
    "protected mode": (
        "has no password, and so takes connections from its own machine only",
        "set one, or on a network of its own start it with --protected-mode no",
    ),
    "MISCONF": ("cannot save to its disk, and takes no writes", "make room on that disk"),
    "NOREPLICAS": ("takes no writes without its replicas", "see to those, or set its min-replicas-to-write to 0"),
    "DB index is out of range": ("has no database of this number", "correct it in DRAFTALIGN_REDIS_URL"),
}


class WriteTest:
    """Whether Redis takes writes, told to all who ask at the cost of one write a second."""

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis: Any = redis
        self._test: asyncio.Task[RedisError | None] | None = None
        self._ended = 0.0  # monotonic

    async def check(self) -> None:
        """Raise the RedisError with which the last test write failed; it is at most a second old."""
        if self._test is None or (self._test.done() and time.monotonic() - self._ended > _TESTED_SECONDS):
            self._test = asyncio.create_task(self._write())
        error = await asyncio.shield(self._test)  # who leaves does not end it for the others
        if error is not None:
            raise error.with_traceback(None)  # the others raise the same object: it must not grow

    async def _write(self) -> RedisError | None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._redis.eval(_TEST_WRITE, len(Keys.READY), *Keys.READY)
        except TimeoutError:
            return redis_errors.TimeoutError(f"no answer in {PROBE_SECONDS} s")
        except RedisError as error:
            return error
        finally:
            self._ended = time.monotonic()
        return None


def write_test(redis: Redis) -> None:
    """Make one real write, as the service will; raises the RedisError with which Redis refuses it."""
    redis.eval(_TEST_WRITE, len(Keys.READY), *Keys.READY)


def why_unusable(error: Exception) -> str | None:
    """What is wrong with a Redis that answers and does not take writes, and what to do; None for any other error."""
    what: tuple[str, str] | None = None
    match error:
        case redis_errors.AuthenticationError() | redis_errors.AuthorizationError():  # redis-py: a ConnectionError
            what = "refuses the user or password", "correct them in DRAFTALIGN_REDIS_URL"
        case redis_errors.AskError() | redis_errors.ClusterCrossSlotError() | redis_errors.ClusterDownError():
            what = _CLUSTER
        case redis_errors.TryAgainError():  # while its slots move
            what = _CLUSTER
        case redis_errors.ReadOnlyError() | redis_errors.MasterDownError():
            what = "is a read-only replica", "give the address of its primary"
        case redis_errors.NoPermissionError():
            what = _NOT_ALLOWED
        case ResponseError():
            what = next((found for said, found in _ANSWERS.items() if said in str(error)), None)
    said = str(error).partition(". ")[0]  # some go on with a paragraph of advice
    return None if what is None else f"{what[0]} ({said}); {what[1]}"
