"""The command line. Heavy imports happen inside the commands, so that `--help` and the API process stay light."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError

from service.drafter_commands import add_commands
from service.errors import ConfigurationError, ServiceError
from service.settings import Settings, redis_place

app = typer.Typer(
    name="draftalign",
    help="Keeps a speculative-decoding drafter in step with a policy that reinforcement learning keeps changing.\n\n"
    "`draftalign up` starts everything on this machine; `draftalign demo` shows a real RL run on it. Settings come "
    "from DRAFTALIGN_* variables (docs/settings.md).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

#: Variables that other parts read: logging, the agent's and the engine plugin's tokens, child processes.
_OTHER_VARIABLES = {
    *("DRAFTALIGN_LOG_LEVEL", "DRAFTALIGN_TOKEN", "DRAFTALIGN_CHILD", "DRAFTALIGN_PARENT"),
    *("DRAFTALIGN_DRAFTER_DIR", "DRAFTALIGN_SWAP_TOKEN", "DRAFTALIGN_ENGINE_TOKEN", "DRAFTALIGN_POLICY_DIR"),
    *(f"DRAFTALIGN_TAP_{name}" for name in ("URL", "RUN", "TOKEN", "FRACTION", "TOKENS_PER_MINUTE")),
    "DRAFTALIGN_VLLM_PYTHON",
}

StateDir = Annotated[Path | None, typer.Option(help="Where spool, registry and checkpoints live.")]
Port = Annotated[int | None, typer.Option(help="TCP port of the API.")]
# Every user of the machine sees a program's options, and none sees its variables.
_SECRET: Final = "One with a password belongs in DRAFTALIGN_REDIS_URL."  # noqa: S105 - a help text
RedisUrl = Annotated[str | None, typer.Option(help=f"Redis or Valkey to use; required. {_SECRET}")]
OwnRedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help=f"Redis or Valkey to use; unset starts an embedded Valkey. {_SECRET}")
]


def _settings(state_dir: Path | None, port: int | None, redis_url: str | None) -> Settings:
    given = {"state_dir": state_dir, "port": port, "redis_url": redis_url}
    settings = Settings(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    if settings.redis_url is not None:
        _redis_place(settings.redis_url.get_secret_value())
    log = logging.getLogger("draftalign")
    if unknown := unknown_variables():
        log.warning("no setting is called %s; see docs/settings.md for the names", ", ".join(unknown))
    log.info("settings that differ from the defaults: %s", settings.model_dump(exclude_defaults=True, mode="json"))
    return settings


@app.command()
def serve(state_dir: StateDir = None, port: Port = None, redis_url: RedisUrl = None) -> None:
    """Run the HTTP API (needs a Redis; `up` brings its own)."""
    from service.api import run_api

    run_api(_settings(state_dir, port, redis_url))


@app.command()
def worker(state_dir: StateDir = None, redis_url: RedisUrl = None) -> None:
    """Run the worker: scores rollouts, trains the drafter, gates and publishes (needs a Redis, as `serve`)."""
    from service.worker import run_worker

    run_worker(_settings(state_dir, None, redis_url))


@app.command()
def up(state_dir: StateDir = None, port: Port = None, redis_url: OwnRedisUrl = None) -> None:
    """Start an embedded Valkey, API and worker as processes under this one; revive what dies; end all on Ctrl-C.

    With --redis-url or DRAFTALIGN_REDIS_URL that Redis is used, and no Valkey is started.
    """
    from service.up import run_up

    run_up(_settings(state_dir, port, redis_url))


@app.command()
def agent(
    url: Annotated[list[str], typer.Option(help="URL of an inference engine; repeat for several.")],
    engine: Annotated[str, typer.Option(help="What the engines are: protocol, vllm or sglang.")] = "protocol",
    service: Annotated[str, typer.Option(help="URL of the draftalign service.")] = "http://127.0.0.1:8400",
    run: Annotated[str, typer.Option(help="Name of the RL run.")] = "default",
    cache_dir: Annotated[Path, typer.Option(help="Where drafters are downloaded to; engines must see it.")] = Path(
        ".draftalign/agent"
    ),
    report_seconds: Annotated[float, typer.Option(help="How often acceptance counters are read and reported.")] = 5.0,
    metrics_port: Annotated[int | None, typer.Option(help="Serve the agent's own /metrics here.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Address for that.")] = "127.0.0.1",
    agent_id: Annotated[str | None, typer.Option(help="Name in reports; the host's, unless given.")] = None,
    canary_rounds: Annotated[
        int | None, typer.Option(min=0, help="Rounds on which a new version is compared with the last; 0: never.")
    ] = None,
) -> None:
    """Keep inference engines on the newest drafter, and report their acceptance back.

    DRAFTALIGN_TOKEN: the service's token. DRAFTALIGN_ENGINE_TOKEN: the engines', where they ask for one.
    DRAFTALIGN_SIGNING_KEY: the service's; manifests without its signature are then refused.
    """
    from rl_hooks.agent import AgentConfig, run_agent
    from rl_hooks.canary import CanaryRule

    try:
        config = AgentConfig(
            service_url=service,
            engine_urls=tuple(url),
            run=run,
            cache_dir=cache_dir,
            agent_id=agent_id or socket.gethostname(),
            report_seconds=report_seconds,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            engine_kind=engine,  # type: ignore[arg-type]
            canary=CanaryRule() if canary_rounds is None else CanaryRule(rounds=canary_rounds),
            token=os.environ.get("DRAFTALIGN_TOKEN"),
            engine_token=os.environ.get("DRAFTALIGN_ENGINE_TOKEN"),
            signing_key=os.environ.get("DRAFTALIGN_SIGNING_KEY"),
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    run_agent(config)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="RL steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of the RL run, its prompts and the initial drafter.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for steps.jsonl, summary.json and alpha.png.")] = Path(
        "demo-out"
    ),
    port: Annotated[int, typer.Option(help="TCP port of the API and its page.")] = 8400,
    redis_url: OwnRedisUrl = None,
    engine: Annotated[
        str,
        typer.Option(help="`example` (built in), `vllm` (a real one, after `make vllm`), or the URL of an example."),
    ] = "example",
    keep: Annotated[bool, typer.Option(help="Keep the service running (and its state) after the run.")] = False,
) -> None:
    """Run real RL on a small policy whose drafter stays in step through the service (a few minutes on two cores)."""
    from examples.demo import DemoConfig, run_demo

    run_demo(DemoConfig(steps=steps, seed=seed, out=out, port=port, redis_url=redis_url, engine=engine, keep=keep))


add_commands(app)


def check_redis(url: str) -> None:
    """ConfigurationError, in one line, when no Redis answers at `url`."""
    import redis

    place = _redis_place(url)
    try:
        redis.Redis.from_url(url, socket_connect_timeout=3.0, socket_timeout=3.0).ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise ConfigurationError(f"no Redis answers at {place}: {error}; check --redis-url") from error


def _redis_place(url: str) -> str:
    """Where a Redis URL leads, without its secrets; ConfigurationError when no client can be made of it."""
    import redis

    try:
        place = redis_place(url)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    try:
        redis.Redis.from_url(url).connection_pool.make_connection()  # connects only when it is used
    except (ValueError, TypeError, redis.RedisError) as error:
        # Other errors than ValueError repeat what was given, which may be part of a password.
        reason = str(error) if isinstance(error, ValueError) else "an option after its ? is unknown or has a bad value"
        raise ConfigurationError(
            f"redis_url {place} cannot be used: {reason.rstrip('.')}; correct or drop it"
        ) from None
    return place


def unknown_variables() -> list[str]:
    """Names in the environment that look like settings and are none: most likely misspelt."""
    known = {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    return sorted(name for name in os.environ if name.startswith("DRAFTALIGN_") and name not in known)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def main() -> None:
    """Entry point: one line for an error that a person can act on, a traceback only for a bug."""
    name = os.environ.get("DRAFTALIGN_CHILD", "draftalign")
    level = os.environ.get("DRAFTALIGN_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        sys.exit(f"draftalign: DRAFTALIGN_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {level[:40]!r}")
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s {name:<8} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except ValidationError as error:
        first = error.errors()[0]
        sys.exit(f"draftalign: setting {'.'.join(str(p) for p in first['loc'])}: {first['msg']}")
    except (ServiceError, OSError) as error:
        sys.exit(f"draftalign: {error}")


if __name__ == "__main__":
    main()
