"""Clients of Redis, a cluster or Sentinel; whether it takes the service's writes; if not, what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis import Redis
from redis import exceptions as redis_errors
from redis.connection import parse_url
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from service.settings import redis_members
from service.storage.queue.keys import Keys

log = logging.getLogger("draftalign.api")

#: Most seconds that a probe of Redis waits: a command by itself would wait 15 s for one that hangs.
PROBE_SECONDS: Final = 1.5
#: After a pause of this process itself, Redis' answer may have come already: reading it takes a moment.
AWAKE_SECONDS: Final = 0.2
#: How long the outcome of a test write stands: whoever asks meanwhile is told it, and causes no write.
_TESTED_SECONDS: Final = 1.0
#: A write as the service makes its own: by a script, which a user may be denied where MSET is allowed.
_TEST_WRITE: Final = "return redis.call('MSET', KEYS[1], 1, KEYS[2], 1)"
_CLUSTER: Final = (
    "is a node of a cluster",
    "give it as redis+cluster://HOST:PORT, or a server that is no node",
)
_NOT_ALLOWED: Final = "does not let its user write", "allow that user all commands on the keys da:*"
#: What answers without an error class of their own say.
_ANSWERS: Final = {
    "ACL failure": _NOT_ALLOWED,  # of a command within a script
    "unknown command": (
        "lacks a command: it is a Sentinel's own port, or too old",
        "give the address of the primary, a Redis from 6.2 on or a Valkey, or redis+sentinel://HOST:PORT/SERVICE_NAME",
    ),
    "protected mode": (
        "has no password, and so takes connections from its own machine only",
        "set one, or on a network of its own start it with --protected-mode no",
    ),
    "MISCONF": ("cannot save to its disk, and takes no writes", "make room on that disk"),
    "NOREPLICAS": ("takes no writes without its replicas", "see to those, or set its min-replicas-to-write to 0"),
    "DB index is out of range": ("has no database of this number", "correct it in DRAFTALIGN_REDIS_URL"),
}


@contextlib.contextmanager
def _as_away() -> Iterator[None]:
    """What a cluster says while it lacks a node, as the ConnectionError that every caller waits out.

    redis-py has errors for it that are no RedisError, and a ResponseError for CLUSTERDOWN. Keys of two slots in one
    command stay the fault that they are: no failover mends them.
    """
    try:
        yield
    except (redis_errors.CrossSlotTransactionError, redis_errors.ClusterCrossSlotError):
        raise
    except (RedisClusterException, redis_errors.ClusterError) as error:
        raise redis_errors.ConnectionError(f"the cluster lacks a node: {error}") from error


class _Cluster(redis.cluster.RedisCluster):
    def __init__(self, **options: Any) -> None:
        with _as_away():
            super().__init__(**options)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with _as_away():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        pipe = super().pipeline(transaction, shard_hint)  # type: ignore[no-untyped-call]
        pipe.execute = _as_away()(pipe.execute)
        return pipe


class _AsyncCluster(redis.asyncio.cluster.RedisCluster):
    async def initialize(self, *args: Any, **options: Any) -> Any:
        with _as_away():
            return await super().initialize(*args, **options)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with _as_away():
            return await super().execute_command(*args, **options)

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        pipe: Any = super().pipeline(transaction, shard_hint)
        execute = pipe.execute

        async def told(*args: Any, **options: Any) -> Any:
            with _as_away():
                return await execute(*args, **options)

        pipe.execute = told
        return pipe


@contextlib.asynccontextmanager
async def soon() -> AsyncIterator[None]:
    """Redis' TimeoutError where its answers are not here within `PROBE_SECONDS`.

    The last `AWAKE_SECONDS` of them begin when this process gets there: it may itself have had no processor until then.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            begin_last = loop.call_later(
                PROBE_SECONDS - AWAKE_SECONDS, lambda: limit.reschedule(loop.time() + AWAKE_SECONDS)
            )
            try:
                yield
            finally:
                begin_last.cancel()
    except TimeoutError as error:
        raise redis_errors.TimeoutError(f"no answer in {PROBE_SECONDS} s") from error


class _AsyncBehindSentinel(redis.asyncio.Redis):
    """redis-py closes its connection to the primary, and leaves those to the Sentinels open."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]
            await sentinel.aclose()


def connect(url: str, **options: Any) -> Any:
    """A blocking client of the Redis, cluster or Sentinel at `url`. A cluster is asked for its nodes at once.

    Raises ValueError for a URL that names none, RedisError for a cluster of which no node answers.
    """
    return _connect(redis, _Cluster, Redis, url, options)


def connect_async(url: str, **options: Any) -> Any:
    """The same for asyncio; it connects only when it is used."""
    return _connect(redis.asyncio, _AsyncCluster, _AsyncBehindSentinel, url, options)


def _connect(package: Any, cluster: Any, behind_sentinel: Any, url: str, options: Mapping[str, Any]) -> Any:
    """`package`: `redis` or `redis.asyncio`. `behind_sentinel`: class of a client whose server a Sentinel names."""
    kind = urlsplit(url).scheme.partition("+")[2]
    if kind == "cluster":
        nodes = [package.cluster.ClusterNode(*member) for member in redis_members(url)]
        return cluster(startup_nodes=nodes, **_cluster_options(url), **options)
    if kind == "sentinel":
        name, of_sentinels, given = _sentinel_options(url)
        sentinel = package.sentinel.Sentinel(redis_members(url), sentinel_kwargs=of_sentinels, **{**given, **options})
        return sentinel.master_for(name, redis_class=behind_sentinel)
    return package.Redis.from_url(url, **options)


def _plain_options(url: str, path: str) -> dict[str, Any]:
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    given: dict[str, Any] = dict(parse_url(f"redis://{user}{at}host{path}?{parts.query}"))  # type: ignore[no-untyped-call]
    del given["host"]
    return given | ({"ssl": True} if parts.scheme.startswith("rediss") else {})


def _cluster_options(url: str) -> dict[str, Any]:
    if urlsplit(url).path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has no databases: drop what follows its hosts")
    return _plain_options(url, "")


def _sentinel_options(url: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The service's name, options for the Sentinels' own connections, and those for the server's."""
    name, _, db = urlsplit(url).path.strip("/").partition("/")
    if not name or (db and not db.isdigit()):
        raise ValueError("a Sentinel's URL ends with /SERVICE_NAME or /SERVICE_NAME/DB_NUMBER")
    given = _plain_options(url, f"/{db}")
    of_sentinels = {k.removeprefix("sentinel_"): given.pop(k) for k in [*given] if k.startswith("sentinel_")}
    shared = {k: v for k, v in given.items() if k.startswith("ssl")}
    return name, {"socket_timeout": 1.0, "socket_connect_timeout": 1.0} | shared | of_sentinels, given


def _ready_keys(client: Any) -> tuple[str, ...]:
    return Keys.READY_CLUSTER if isinstance(client, _Cluster | _AsyncCluster) else Keys.READY


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
            async with soon():
                keys = _ready_keys(self._redis)
                await self._redis.eval(_TEST_WRITE, len(keys), *keys)
        except RedisError as error:
            return error
        finally:
            self._ended = time.monotonic()
        return None


def write_test(redis: Redis) -> None:
    """Make one real write, as the service will; raises the RedisError with which Redis refuses it."""
    keys = _ready_keys(redis)
    redis.eval(_TEST_WRITE, len(keys), *keys)


class Memory(NamedTuple):
    """Of a Redis, or of a cluster's fullest node: bytes in use, and how many it may use before it refuses writes."""

    used_bytes: int
    limit_bytes: int

    @property
    def fill(self) -> float:
        """Share of the limit that is in use."""
        return self.used_bytes / self.limit_bytes


async def memory_of(client: Any) -> Memory | None:
    """Ask Redis, by an asyncio client, for its memory. None: it has no limit, or does not say."""
    try:
        found = await client.info("memory")
    except ResponseError:  # no permission; or the command is renamed, as some services have it
        return None
    nodes = found.values() if all(isinstance(one, dict) for one in found.values()) else [found]
    told = [(node.get("used_memory"), node.get("maxmemory")) for node in nodes]
    limited = [Memory(used, limit) for used, limit in told if used is not None and limit]
    return max(limited, key=lambda memory: memory.fill, default=None)


def is_of_one_key(error: BaseException) -> bool:
    """Whether Redis is well, and a key of one run holds what the service did not write: that run's trouble alone."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


async def asked_of(runs: Iterable[str], ask: Callable[[str], Awaitable[int]]) -> dict[str, int]:
    """What each run's queue says. A run of which a key is broken is left out, so that it holds up no other."""
    found = {}
    for run in runs:
        try:
            found[run] = await ask(run)
        except ResponseError as error:
            if not is_of_one_key(error):
                raise
            log.error("run %s: %s", run, error)
    return found


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
    said = str(error).partition(". ")[0].rstrip(".")  # some go on with a paragraph of advice
    return None if what is None else f"{what[0]} ({said}); {what[1]}"
