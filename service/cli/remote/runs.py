"""The commands about runs of a running service: list, delete, change their state, dead batches, drift, worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from rl_hooks.sending.jobs import run_path
from service.cli.remote.client import LOCAL, AsJson, Reason, Run, Service, call, name_of, whoami
from service.errors import ConfigurationError
from service.storage.layout import BATCH_ID


def runs(
    delete: Annotated[
        str | None, typer.Option(help="Name of a run to delete, with all that was received of it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    service: Service = LOCAL,
    as_json: AsJson = False,
) -> None:
    """List the runs, those in trouble first, each with the worst thing that is true of it; or delete one.

    DRAFTALIGN_TOKEN: token for the service, of scope read; to delete, of scope admin.
    """
    if delete is not None:
        path = run_path(name_of(service, delete))
        if not yes:
            what = "its rollouts, drafters, checkpoints and history (--yes: without asking)"
            typer.confirm(f"Delete run {delete}: {what}?", abort=True)
        answer = call("DELETE", service, path)
        typer.echo(answer.json()["detail"] if answer.status_code == 202 else f"run {delete} is deleted")
        return
    answer = call("GET", service, "/runs").json()
    if as_json:
        typer.echo(json.dumps(answer))
        return
    found = answer["runs"]
    if not found:
        typer.echo("no run is registered yet: a trainer's hook or an engine does it with its first rollouts", err=True)
    trouble = {"bad": 0, "warn": 1}
    for one in sorted(found, key=lambda one: trouble.get(one["headline"]["level"], 2)):
        state = one["state"]
        said = "" if state == "active" else f"[{state}]  "
        typer.echo(f"{one['run']}  {one['drafter'] or 'no drafter yet'}  {said}{one['headline']['text']}")


def state(
    wanted: Annotated[
        Literal["active", "paused", "draining", "archived"] | None,
        typer.Argument(help="The state to set. Without it, say what it is now."),
    ] = None,
    reason: Reason = "by hand",
    service: Service = LOCAL,
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """Say what state a run is in and what is true of it, worst first, or change it; worker and API obey within seconds.

    active: all goes on. paused: rollouts are queued, nothing is scored or trained, the worker frees its memory.
    draining: rollouts are refused and trainers stop sending; the queue is worked off. archived: drafters can be
    fetched, nothing else; what is in the queue is dropped.

    DRAFTALIGN_TOKEN: token for the service, of scope read; to change the state, of scope admin.
    """
    run = name_of(service, run)
    path = run_path(run)
    if wanted is None:
        found = call("GET", service, path).json()
    else:
        body = {"state": wanted, "reason": reason, "by": whoami()}
        found = call("PATCH", service, path, json=body).json()
    said = [f"run {run} is {found['state']}: {found['headline']['text']}", *found["headline"]["also"]]
    typer.echo(json.dumps(found) if as_json else "\n  ".join(said))


def dead(
    run: Run = None,
    retry: Annotated[str | None, typer.Option(help="Put the batch of this id back into the queue.")] = None,
    discard: Annotated[
        str | None, typer.Option(help="Take the batch of this id from the list, and delete its file.")
    ] = None,
    save: Annotated[
        tuple[str, Path] | None, typer.Option(help="Write the file of the batch of this id to this path.")
    ] = None,
    service: Service = LOCAL,
    as_json: AsJson = False,
) -> None:
    """List the batches that could not be used (dead ones) and why; or put one back, discard it, save its file.

    DRAFTALIGN_TOKEN: token for the service, of scope read; for anything but the list, of scope admin.
    """
    path = f"{run_path(name_of(service, run))}/dead"
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
        destination.write_bytes(call("GET", service, f"{path}/{batch_id}/file").content)
        typer.echo(f"{destination}  {destination.stat().st_size} bytes")
    else:
        _list_dead(service, path, as_json)


def _list_dead(service: str, path: str, as_json: bool) -> None:
    older: str | None = ""
    while older is not None:
        page = call("GET", service, path, params={"before": older} if older else {}).json()
        older = page["older"]
        if as_json:  # one line a page: there may be many
            typer.echo(json.dumps(page))
            continue
        for one in page["dead"]:
            died = datetime.fromtimestamp(one["died"]).astimezone().isoformat(" ", "seconds")
            file = f"{one['bytes']} bytes" if one["has_file"] else "file gone"
            typer.echo(f"{one['batch_id']}  {died}  policy {one['policy_version']}  {one['rollouts']} rollouts  {file}")
            typer.echo(f"    {one['reason']}")
    if not as_json:
        typer.echo(f"{page['total']} dead batches; {page['file_bytes']} bytes of their files are kept")


def drift(
    action: Annotated[
        Literal["acknowledge", "reset"],
        typer.Argument(
            help="`acknowledge`: the cause is dealt with, keep the baseline. `reset`: today's α is right, learn it."
        ),
    ],
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """End a drift alarm: keep its baseline, or learn a new one.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    asked = call("POST", service, f"{run_path(run)}/drift/{action}").json()
    none = "" if asked["alarm"] else "; there is no alarm now"
    typer.echo(f"asked; the worker of run {run} does it within seconds{none}")


def worth(
    generation_share: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Share of an RL step that generation takes without speculation, e.g. 0.7."),
    ] = None,
    service: Service = LOCAL,
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """Show what acceptance is worth in time: speed-up and best draft depth by batch size.

    It is fitted to the step times that engines report. DRAFTALIGN_TOKEN: token for the service, of scope read.
    """
    asked = {} if generation_share is None else {"generation_share": str(generation_share)}
    found = call("GET", service, f"{run_path(name_of(service, run))}/worth", params=asked).json()
    if as_json:
        typer.echo(json.dumps(found))
        return
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
        _print_plan(found["plan"], found["depth"])


def _print_plan(plan: Sequence[tuple[int, int, int]], depth: int) -> None:
    """Print the list for vLLM, and what follows for an engine that gets it."""
    typer.echo(f"vLLM: num_speculative_tokens_per_batch_size = {json.dumps(plan)}")
    none = [f"{first} to {last}" for first, last, best in plan if best == 0]
    if none:
        typer.echo(
            f"Depth 0 is no speculation: at {', '.join(none)} sequences a step no round is counted, so neither α "
            "nor an engine's verdict tells of those steps."
        )
    if any(best not in (0, depth) for _, _, best in plan):
        typer.echo(
            f"An engine that keeps this list has the verdict `depth`, with an alert, while its rounds have other than "
            f"{depth} tokens on average. α is then compared at the depth that both have; the service goes on to "
            f"replay, train and judge at {depth}."
        )
