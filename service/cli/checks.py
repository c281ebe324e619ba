"""Checks before anything starts: torch, the given Redis, and misspelt variables."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Final

from rl_hooks.durable import at_home
from service.errors import ConfigurationError
from service.settings import Settings, redis_place

log = logging.getLogger("draftalign")

#: `draftalign up` starts its Redis beside the parts that use it. Only a Redis that is away for longer is logged.
_START_SECONDS: Final = 2.0
#: Variables that other parts read: logging, the agent's and the engine plugin's tokens, child processes.
_OTHER_VARIABLES = {
    *("DRAFTALIGN_LOG_LEVEL", "DRAFTALIGN_TOKEN", "DRAFTALIGN_CHILD", "DRAFTALIGN_PARENT"),
    *("DRAFTALIGN_DRAFTER_DIR", "DRAFTALIGN_SWAP_TOKEN", "DRAFTALIGN_ENGINE_TOKEN", "DRAFTALIGN_POLICY_DIR"),
    *("DRAFTALIGN_URL", "DRAFTALIGN_RUN", "DRAFTALIGN_SAMPLE_FRACTION", "DRAFTALIGN_TOKENS_PER_MINUTE"),
    *("DRAFTALIGN_VLLM_PYTHON", "DRAFTALIGN_CA_FILE", "DRAFTALIGN_PUBLIC_KEYS"),
    *("DRAFTALIGN_INITIAL_DRAFTER", "DRAFTALIGN_AUX_LAYERS", "DRAFTALIGN_HOOK_OPTIONS"),
}


def check_torch() -> None:
    """ConfigurationError where torch is not installed, as in the image of the API; it is not loaded."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError(
            "this command needs torch, which is not installed here (nor in the image draftalign-api); take the image "
            "draftalign, or install torch"
        )


def check_redis(url: str, *, may_be_away: bool = False) -> None:
    """Make one real write; raises a ConfigurationError of one line that says what is wrong with the Redis at `url`.

    A full Redis is only logged: work may make room in it. With `may_be_away`, so is one that does not answer after
    `_START_SECONDS`: it may be starting. Anything else is an error: no waiting turns a replica into a primary.
    """
    import redis

    from service.storage.ready import connect, why_unusable, write_test

    place, begun = checked_redis(url), time.monotonic()
    while True:
        try:
            with connect(url, socket_connect_timeout=3.0, socket_timeout=3.0) as client:
                write_test(client)
        except (redis.RedisError, ValueError, OSError) as error:
            if (reason := why_unusable(error)) is not None:
                raise ConfigurationError(f"the Redis at {place} {reason}") from error
            full = isinstance(error, redis.exceptions.OutOfMemoryError)
            trouble = f"the Redis at {place} is full: {error}" if full else f"no Redis answers at {place}: {error}"
            if not full and not may_be_away:
                raise ConfigurationError(f"{trouble}; check --redis-url or DRAFTALIGN_REDIS_URL") from error
            if full or time.monotonic() - begun > _START_SECONDS:
                log.warning("%s; waiting for it", trouble)
                return
            time.sleep(0.05)
        else:
            return


def checked_redis(url: str) -> str:
    """A Redis URL without its secrets; ConfigurationError when no client can be made of it."""
    import redis

    from service.storage.ready import connect_async

    try:
        place = redis_place(url)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    try:
        client = connect_async(url)
        if not isinstance(client, redis.asyncio.RedisCluster):  # a cluster's client has checked its options
            client.connection_pool.make_connection()  # checks the options; it connects only when it is used
    except (ValueError, TypeError, redis.RedisError) as error:
        # Errors other than ValueError repeat the input, which may hold part of a password.
        reason = str(error) if isinstance(error, ValueError) else "an option after its ? is unknown or has a bad value"
        raise ConfigurationError(
            f"redis_url {place} cannot be used: {reason.rstrip('.')}; correct or drop it"
        ) from None
    return place


def given_path(path: Path | None) -> Path | None:
    """An option's path, with `~` as the home directory: a shell leaves it as it is in `--out=~/x`."""
    return None if path is None else at_home(path)


def unknown_variables() -> list[str]:
    """Names in the environment that look like settings but are none: probably misspelt."""
    known = {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    return sorted(name for name in os.environ if name.startswith("DRAFTALIGN_") and name not in known)
