"""The command line. Heavy imports happen inside the commands, so that `--help` and the API process stay light."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError

from rl_hooks.agent.cli import agent, start_logging
from service.cli.access import audit, token
from service.cli.checks import check_redis, check_torch, checked_redis, given_path, unknown_variables
from service.cli.drafters.commands import convert, evaluate, inspect
from service.cli.plan import plan
from service.cli.remote.drafters import download, drafters, hold, publish, release, rollback
from service.cli.remote.runs import dead, drift, runs, state, worth
from service.cli.state import copy_state
from service.cli.supervisor import parent_death_signal
from service.cli.warmup import warmup
from service.errors import ConfigurationError, ServiceError
from service.memory import importing
from service.settings import Settings, redis_place

app = typer.Typer(
    name="draftalign",
    help="Keeps a speculative-decoding drafter in step with a policy that reinforcement learning keeps changing.\n\n"
    "`draftalign demo` shows it on a real RL run. `draftalign up` starts the service on this machine. "
    "`draftalign runs` says how each run stands. Settings come from DRAFTALIGN_* variables "
    "(docs/reference/settings.md). Words with a fixed meaning, such as gate, claim or headroom: docs/words.md.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # else a paragraph keeps the line breaks of its docstring
    pretty_exceptions_enable=False,
)

StateDir = Annotated[
    str | None,  # a Path of "" would be the current directory
    typer.Option(
        metavar="PATH",
        help="Where spool, registry and checkpoints live. Default: DRAFTALIGN_STATE_DIR, else .draftalign.",
    ),
]
Port = Annotated[int | None, typer.Option(help="TCP port of the API. Default: DRAFTALIGN_PORT, else 8400.")]
# Every user of the machine can see a program's options, but not its variables.
_SECRET: Final = "One with a password belongs in DRAFTALIGN_REDIS_URL."  # noqa: S105 - a help text
RedisUrl = Annotated[str | None, typer.Option(help=f"Redis or Valkey to use; required. {_SECRET}")]
OwnRedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help=f"Redis or Valkey to use; unset starts an embedded Valkey. {_SECRET}")
]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM file with the API's certificate chain. The API then speaks https.")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file with that certificate's private key.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftalign {version('draftalign')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _settings(**given: Any) -> Settings:
    """The environment's settings, with the options that were given."""
    settings = Settings.with_options(**given)
    if settings.redis_url is not None:
        checked_redis(settings.redis_url.get_secret_value())
    log = logging.getLogger("draftalign")
    if unknown := unknown_variables():
        log.warning("no setting is called %s; see docs/reference/settings.md for the names", ", ".join(unknown))
    differing = settings.model_dump(exclude_defaults=True, mode="json")
    if settings.redis_url is not None:
        differing["redis_url"] = redis_place(settings.redis_url.get_secret_value())
    log.info("settings that differ from the defaults: %s", differing)
    return settings


def _with_redis(settings: Settings) -> Settings:
    """Test the settings' Redis by a write, and return them. A Redis that does not answer yet is only logged."""
    if settings.redis_url is not None:
        check_redis(settings.redis_url.get_secret_value(), may_be_away=True)
    return settings


def serve(
    state_dir: StateDir = None,
    port: Port = None,
    redis_url: RedisUrl = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run the HTTP API (needs a Redis; `up` brings its own)."""
    settings = _settings(state_dir=state_dir, port=port, redis_url=redis_url, tls_cert=tls_cert, tls_key=tls_key)
    with importing():
        from service.api.app import run_api  # loaded only once the settings are known to be right

    run_api(_with_redis(settings))


def worker(state_dir: StateDir = None, redis_url: RedisUrl = None) -> None:
    """Run the worker, which scores rollouts, trains the drafter and publishes it (needs a Redis; `up` brings its own).

    Under `torchrun` it is one of several ranks, which train one drafter together.
    """
    started_by = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ and (tie := parent_death_signal()) is not None:
        tie()  # else a rank whose torchrun was killed would work on by itself
        if os.getppid() != started_by:
            sys.exit("draftalign: torchrun ended before this rank had started")
    check_torch()
    settings = _with_redis(_settings(state_dir=state_dir, redis_url=redis_url))
    with importing():
        from service.ranks import run_on_ranks  # it loads torch, which takes two seconds

    run_on_ranks(settings)


def up(
    state_dir: StateDir = None,
    port: Port = None,
    redis_url: OwnRedisUrl = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Start the whole service: an embedded Valkey, API and worker. Restarts what dies; Ctrl-C stops all.

    With --redis-url or DRAFTALIGN_REDIS_URL that Redis is used, and no Valkey is started.
    """
    settings = _settings(state_dir=state_dir, port=port, redis_url=redis_url, tls_cert=tls_cert, tls_key=tls_key)
    from service.cli.up import run_up

    run_up(settings)


def keygen(
    file: Annotated[Path, typer.Argument(help="Where the private key is written; it must not exist yet.")],
) -> None:
    """Make a key that signs manifests. The private half goes into FILE; the public half is printed, for the agents."""
    from rl_hooks.format.release import new_key

    try:
        private, public = new_key()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{file} exists; name a new file, as a key that is in use is not replaced") from None
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror}; name a file in a folder that exists and that is yours"
        raise ConfigurationError(why) from error
    with os.fdopen(descriptor, "wb") as out:
        out.write(private)
    typer.echo(public)


def demo(
    steps: Annotated[int, typer.Option(min=2, help="RL steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of the RL run, its prompts and the first drafter.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Directory for steps.jsonl, summary.json and alpha.png.", callback=given_path)
    ] = Path("demo-out"),
    port: Annotated[int, typer.Option(help="TCP port of the API and its page.")] = 8400,
    redis_url: OwnRedisUrl = None,
    task: Annotated[
        str, typer.Option(help="`elicit`, or `recall`: a task in which a drafter needs hidden states.")
    ] = "elicit",
    engine: Annotated[
        str,
        typer.Option(help="`example` (built in), `vllm` (a real one, after `make vllm`), or an example engine's URL."),
    ] = "example",
    start: Annotated[
        str,
        typer.Option(
            help="What the first drafter learnt from: `in-domain` (the policy's answers to the run's kind of prompts), "
            "`general` (its answers to random words), or `scratch` (nothing; the service builds it)."
        ),
    ] = "in-domain",
    keep: Annotated[bool, typer.Option(help="Keep the service running (and its state) after the run.")] = False,
) -> None:
    """Run real RL on a small policy and see its drafter stay in step (a few minutes on two cores)."""
    with importing():
        from examples.demo import DemoConfig, run_demo

    run_demo(DemoConfig(steps, seed, out, port, redis_url, engine, keep, task, start))


#: As `--help` lists them.
_COMMANDS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Start it": (demo, up, serve, worker, agent),
    "Look": (runs, drafters, worth, dead, audit),
    "Act on a run": (state, publish, hold, release, rollback, drift),
    "Drafters as files": (warmup, download, convert, inspect, evaluate),
    "Before a deployment": (plan, token, keygen, copy_state),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command("eval" if _command is evaluate else None, rich_help_panel=_panel)(_command)


def _allow_descriptors() -> None:
    """Let this process and its children open as many files and connections as the hard limit says.

    The soft one is usually 1,024, for programs that call select(2); no process of ours does.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a kernel that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run() -> None:
    """Run the command; ConfigurationError where it lacks torch."""
    try:
        app()
    except ModuleNotFoundError:
        check_torch()  # torch, or what comes with it
        raise


def main() -> None:
    """Entry point. An error that a user can act on ends in one line; only a bug shows a traceback."""
    start_logging("draftalign", f"{os.environ.get('DRAFTALIGN_CHILD', 'draftalign'):<8}")
    _allow_descriptors()
    try:
        _run()
    except ValidationError as error:
        first = error.errors()[0]
        named = ".".join(str(part) for part in first["loc"])
        told = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if first["type"] != "value_error":  # pydantic's own words, which do not say what came; a secret is any string
            told += f", got {str(first['input'])[:40]!r}"
        if not named:
            sys.exit(f"draftalign: settings: {told}")
        sys.exit(f"draftalign: setting {named} (DRAFTALIGN_{named.upper()}): {told}")
    except (ServiceError, OSError) as error:
        sys.exit(f"draftalign: {error}")
