"""The command line. Heavy imports happen inside the commands, so that `--help` and the API process stay light."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from pydantic import ValidationError

from rl_hooks.agent.cli import agent
from service.cli.access import audit, token
from service.cli.checks import check_redis, checked_redis, unknown_variables
from service.cli.drafters.commands import convert, evaluate, inspect
from service.cli.plan import plan
from service.cli.remote import (
    LOCAL,
    Run,
    Service,
    call,
    drafters,
    hold,
    name_of,
    publish,
    release,
    rollback,
    state,
)
from service.cli.warmup import warmup
from service.errors import ConfigurationError, ServiceError
from service.settings import Settings, redis_place
from service.storage.layout import BATCH_ID

app = typer.Typer(
    name="draftalign",
    help="Keeps a speculative-decoding drafter in step with a policy that reinforcement learning keeps changing.\n\n"
    "`draftalign up` starts everything on this machine; `draftalign demo` shows a real RL run on it. Settings come "
    "from DRAFTALIGN_* variables (docs/reference/settings.md).",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # else a paragraph keeps the line breaks of its docstring
    pretty_exceptions_enable=False,
)

StateDir = Annotated[
    Path | None,
    typer.Option(help="Where spool, registry and checkpoints live. Default: DRAFTALIGN_STATE_DIR, else .draftalign."),
]
Port = Annotated[int | None, typer.Option(help="TCP port of the API. Default: DRAFTALIGN_PORT, else 8400.")]
# Every user of the machine can see a program's options, but not its variables.
_SECRET: Final = "One with a password belongs in DRAFTALIGN_REDIS_URL."  # noqa: S105 - a help text
RedisUrl = Annotated[str | None, typer.Option(help=f"Redis or Valkey to use; required. {_SECRET}")]
OwnRedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help=f"Redis or Valkey to use; unset starts an embedded Valkey. {_SECRET}")
]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file with the API's certificate chain: it then speaks https.")]
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


class DriftAction(StrEnum):
    """What can be done about a drift alarm."""

    ACKNOWLEDGE = "acknowledge"
    RESET = "reset"


def _settings(state_dir: Path | None, **given: Any) -> Settings:
    """The environment's settings, with the options that were given."""
    settings = Settings(**{k: v for k, v in (given | {"state_dir": state_dir}).items() if v is not None})
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
    """The same, once their Redis took a write; one that is not there yet is waited for."""
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
    settings = _settings(state_dir, port=port, redis_url=redis_url, tls_cert=tls_cert, tls_key=tls_key)
    from service.api.app import run_api  # what is wrong with the settings is said before this is loaded

    run_api(_with_redis(settings))


def worker(state_dir: StateDir = None, redis_url: RedisUrl = None) -> None:
    """Run the worker: scores rollouts, trains the drafter, gates and publishes (needs a Redis, as `serve`).

    Under `torchrun` it is one of several ranks, which train one drafter together.
    """
    settings = _with_redis(_settings(state_dir, redis_url=redis_url))
    from service.ranks import run_on_ranks  # torch: two seconds, for which no wrong setting waits

    run_on_ranks(settings)


def up(
    state_dir: StateDir = None,
    port: Port = None,
    redis_url: OwnRedisUrl = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Start an embedded Valkey, API and worker as child processes; restart those that die; stop all on Ctrl-C.

    With --redis-url or DRAFTALIGN_REDIS_URL that Redis is used, and no Valkey is started.
    """
    settings = _settings(state_dir, port=port, redis_url=redis_url, tls_cert=tls_cert, tls_key=tls_key)
    from service.cli.up import run_up

    run_up(settings)


def keygen(
    file: Annotated[Path, typer.Argument(help="Where the private key is written; it must not exist yet.")],
) -> None:
    """Make a key that signs manifests: the private half into FILE, the public one printed, for the agents."""
    from rl_hooks.release import new_key

    try:
        private, public = new_key()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(private)
    typer.echo(public)


def drift(
    action: Annotated[
        DriftAction,
        typer.Argument(help="`acknowledge`: the cause is dealt with. `reset`: this level is the right one."),
    ],
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Take a drift alarm back: keep its baseline, or learn a new one.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    asked = call("POST", service, f"/runs/{quote(run, safe='')}/drift/{action.value}").json()
    none = "" if asked["alarm"] else "; there is no alarm now"
    typer.echo(f"asked; the worker of run {run} does it within seconds{none}")


def runs(
    delete: Annotated[
        str | None, typer.Option(help="Name of a run to delete, with all that was received of it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    service: Service = LOCAL,
) -> None:
    """List the runs with their headlines, or delete one.

    DRAFTALIGN_TOKEN: token for the service, of scope read; to delete, admin.
    """
    if delete is not None:
        if not yes:
            typer.confirm(f"Delete run {delete}: its rollouts, drafters, checkpoints and history?", abort=True)
        call("DELETE", service, f"/runs/{quote(delete, safe='')}", timeout=60.0)
        typer.echo(f"run {delete} is deleted")
        return
    found = call("GET", service, "/runs").json()
    if not found:
        typer.echo("no run is registered yet: a trainer's hook or an engine does it with its first rollouts", err=True)
    for one in found:
        typer.echo(f"{one['run']}  {one['drafter'] or 'no drafter yet'}  {one['headline']['text']}")


def dead(
    run: Run = None,
    retry: Annotated[str | None, typer.Option(help="Id of a batch to put back into the queue.")] = None,
    discard: Annotated[str | None, typer.Option(help="Id of a batch to take from the list, with its file.")] = None,
    save: Annotated[
        tuple[str, Path] | None, typer.Option(help="Id of a batch, and where its file is to be written.")
    ] = None,
    service: Service = LOCAL,
) -> None:
    """List the dead batches, newest first, with why they died; or put one back, discard it, or save its file.

    DRAFTALIGN_TOKEN: token for the service, of scope read; for anything but the list, admin.
    """
    path = f"/runs/{quote(name_of(service, run), safe='')}/dead"
    named = [*filter(None, (retry, discard, save and save[0]))]
    if len(named) > 1:
        raise ConfigurationError("give one of --retry, --discard and --save at a time")
    if named and not BATCH_ID.fullmatch(named[0]):  # `..` in an address would name the run itself
        raise ConfigurationError(f"{named[0][:80]!r} is no batch id: 32 hexadecimal digits, as `draftalign dead` lists")
    if retry is not None:
        found = call("POST", service, f"{path}/{retry}/retry").json()
        also = f"; {found['known_rollouts']} of its rollouts are known already" if found["known_rollouts"] else ""
        typer.echo(f"{retry} is {found['state']}{'' if found['put_back'] else ' already'}{also}")
    elif discard is not None:
        call("DELETE", service, f"{path}/{discard}")
        typer.echo(f"{discard} is discarded")
    elif save is not None:
        batch_id, destination = save
        if destination.exists():
            raise ConfigurationError(f"{destination} exists; name a new file")
        destination.write_bytes(call("GET", service, f"{path}/{batch_id}/file", timeout=60.0).content)
        typer.echo(f"{destination}  {destination.stat().st_size} bytes")
    else:
        _list_dead(service, path)


def _list_dead(service: str, path: str) -> None:
    older: str | None = ""
    while older is not None:
        page = call("GET", service, path, params={"before": older} if older else {}).json()
        for one in page["dead"]:
            died = datetime.fromtimestamp(one["died"]).astimezone().isoformat(" ", "seconds")
            file = f"{one['bytes']} bytes" if one["has_file"] else "file gone"
            typer.echo(f"{one['batch_id']}  {died}  policy {one['policy_version']}  {one['rollouts']} rollouts  {file}")
            typer.echo(f"    {one['reason']}")
        older = page["older"]
    typer.echo(f"{page['total']} dead batches; {page['file_bytes']} bytes of their files are kept")


def worth(
    generation_share: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Share of an RL step that generation takes without speculation, e.g. 0.7."),
    ] = None,
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Show what acceptance is worth in time: speed-up and best draft depth by batch size.

    It is fitted to the step times that engines report. DRAFTALIGN_TOKEN: token for the service, of scope read.
    """
    asked = {} if generation_share is None else {"generation_share": str(generation_share)}
    found = call("GET", service, f"/runs/{quote(name_of(service, run), safe='')}/worth", params=asked).json()
    if found["unknown"]:
        typer.echo(f"unknown: {found['unknown']}")
        return
    typer.echo(f"batch  best depth  its speed-up  speed-up at depth {found['depth']}  of the RL step")
    for row in found["batches"]:
        whole = f"{row['step_speedup']:.2f}" if "step_speedup" in row else "-"
        best = f"{row['best_depth']:10d}  {row['best_speedup']:12.2f}"
        typer.echo(f"{row['batch']:5d}  {best}  {row['speedup']:19.2f}  {whole:>14}")
    if found["costs_from"] is not None:
        typer.echo(f"From {found['costs_from']} sequences a step on, depth {found['depth']} is slower than no drafts.")
    if found["plan"]:
        typer.echo(f"vLLM: num_speculative_tokens_per_batch_size = {json.dumps(found['plan'])}")


def demo(
    steps: Annotated[int, typer.Option(min=2, help="RL steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of the RL run, its prompts and the initial drafter.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for steps.jsonl, summary.json and alpha.png.")] = Path(
        "demo-out"
    ),
    port: Annotated[int, typer.Option(help="TCP port of the API and its page.")] = 8400,
    redis_url: OwnRedisUrl = None,
    task: Annotated[str, typer.Option(help="`elicit`, or `recall`, where a drafter needs hidden states.")] = "elicit",
    engine: Annotated[
        str,
        typer.Option(help="`example` (built in), `vllm` (a real one, after `make vllm`), or an example engine's URL."),
    ] = "example",
    keep: Annotated[bool, typer.Option(help="Keep the service running (and its state) after the run.")] = False,
) -> None:
    """Run real RL on a small policy whose drafter stays in step through the service (a few minutes on two cores)."""
    from examples.demo import DemoConfig, run_demo

    run_demo(DemoConfig(steps, seed, out, port, redis_url, engine, keep, task))


#: As `--help` lists them.
_COMMANDS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Start it": (demo, up, serve, worker, agent),
    "Look": (runs, drafters, worth, dead, audit),
    "Act on a run": (state, publish, hold, release, rollback, drift),
    "Drafters as files": (warmup, convert, inspect, evaluate),
    "Before a deployment": (plan, token, keygen),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command("eval" if _command is evaluate else None, rich_help_panel=_panel)(_command)


def main() -> None:
    """Entry point. An error that a user can act on ends in one line; only a bug shows a traceback."""
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
        named = ".".join(str(part) for part in first["loc"])
        told = first["msg"].removeprefix("Value error, ")
        if not named:
            sys.exit(f"draftalign: settings: {told}")
        sys.exit(f"draftalign: setting {named} (DRAFTALIGN_{named.upper()}): {told}")
    except (ServiceError, OSError) as error:
        sys.exit(f"draftalign: {error}")
