"""The commands that ask a running service: hold, release and send a drafter version, change the state of a run."""

from __future__ import annotations

import getpass
import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from service.cli.drafters.commands import AuxLayers, From, Norm, Source, write_body
from service.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx

Service = Annotated[str, typer.Option(help="URL of the draftalign service.")]
Run = Annotated[
    str | None, typer.Option(help="Name of the RL run; unset: the only one there is, or `default`.", show_default=False)
]
LOCAL = "http://127.0.0.1:8400"

#: What helps where a connection failed with such words.
_HINTS = {
    "CERTIFICATE_VERIFY": "set DRAFTALIGN_CA_FILE to its authority's PEM file",
    "WRONG_VERSION_NUMBER": "it speaks http there, not https",
    "refused": "is `draftalign up` running?",
}


class WantedState(StrEnum):
    """What a person may want of a run."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    ARCHIVED = "archived"


def drafters(service: Service = LOCAL, run: Run = None) -> None:
    """List the drafter versions of a run, newest first: which is served, of which policy version, and its α.

    DRAFTALIGN_TOKEN: token for the service, of scope read.
    """
    run = name_of(service, run)
    from datetime import datetime

    found = call("GET", service, "/drafters", params={"run": run}).json()
    served = (found["latest"] or {}).get("version")
    for one in reversed(found["versions"]):
        alpha = (one["gate"] or {}).get("alpha_candidate")
        facts = [f"policy {one['policy_version']}", "" if alpha is None else f"α {alpha:.2f} when it was published"]
        when = datetime.fromtimestamp(one["created"]).astimezone().isoformat(sep=" ", timespec="seconds")
        said = "  ".join([when, *filter(None, facts)])
        typer.echo(f"{'*' if one['version'] == served else ' '} {one['version']}  {said}")
    typer.echo(f"* is served by run {run}" if served else f"run {run} serves no drafter yet", err=True)


def rollback(
    version: Annotated[str, typer.Argument(help="Drafter version to serve again, e.g. v000007-0a1b2c3d.")],
    reason: Annotated[str, typer.Option(help="Why, for the page and the history.")] = "by hand",
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Serve an earlier drafter version now. The next one that the gate finds better replaces it; `hold` keeps it.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    served = call("GET", service, f"/runs/{quote(run, safe='')}").json()["drafter"]
    body = {"reason": reason, "by": whoami()}
    call("POST", service, f"/drafter/{quote(version, safe='')}/rollback", params={"run": run}, json=body)
    again = ", as before: its engines load it again" if served == version else ""
    typer.echo(f"run {run} serves {version}{again}")


def hold(
    version: Annotated[str, typer.Argument(help="Drafter version to serve, e.g. v000007-0a1b2c3d.")],
    reason: Annotated[str, typer.Option(help="Why, for the page and the history.")] = "by hand",
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Serve a drafter version until `draftalign release`: scoring and training go on, nothing is published.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    body = {"reason": reason, "by": whoami()}
    call("PUT", service, f"/drafter/{quote(version, safe='')}/hold", params={"run": run}, json=body)
    typer.echo(f"run {run} serves {version} until it is released")


def release(service: Service = LOCAL, run: Run = None) -> None:
    """Release the held drafter version: it is served until the gate finds a better one.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    held = call("GET", service, f"/runs/{quote(run, safe='')}").json()["held"]
    if held is None:
        raise ConfigurationError(f"run {run} holds no version, so nothing was released")
    call("DELETE", service, f"/drafter/{held['version']}/hold", params={"run": run, "by": whoami()})
    typer.echo(f"run {run}: {held['version']} is released")


def state(
    wanted: Annotated[
        WantedState | None, typer.Argument(help="What the run shall be; without it, say what it is.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the page and the history.")] = "by hand",
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Say what state a run is in, or change it; worker and API obey within seconds.

    active: all goes on. paused: rollouts are queued, nothing is scored or trained, the worker frees its memory.
    draining: rollouts are refused and trainers stop sending; the queue is worked off. archived: drafters can be
    fetched, nothing else; what is in the queue is dropped.

    DRAFTALIGN_TOKEN: token for the service, of scope read; to change the state, admin.
    """
    run = name_of(service, run)
    path = f"/runs/{quote(run, safe='')}"
    if wanted is None:
        found = call("GET", service, path).json()
    else:
        body = {"state": wanted.value, "reason": reason, "by": whoami()}
        found = call("PATCH", service, path, json=body).json()
    typer.echo(f"run {run} is {found['state']['state']}: {found['headline']['text']}")


def publish(
    source: Source,
    reason: Annotated[str, typer.Option(help="Why, for the page and the history.")] = "trained elsewhere",
    service: Service = LOCAL,
    run: Run = None,
    from_: From = None,
    aux_layers: AuxLayers = None,
    norm_before_residual: Norm = None,
) -> None:
    """Send a drafter that was trained elsewhere, in any layout; it is served once the gate finds it better.

    It must be of the run's lineage: same sizes, same draft vocabulary. DRAFTALIGN_TOKEN: token for the service, of
    scope admin.
    """
    run = name_of(service, run)
    from rl_hooks.wire import CONTENT_TYPE

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "drafter.safetensors"
        write_body(file, source, from_, aux_layers, norm_before_residual)
        asked = {"run": run, "reason": reason, "by": whoami()}
        headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(file.stat().st_size)}
        with file.open("rb") as body:
            answer = call("POST", service, "/drafters", params=asked, headers=headers, content=body, timeout=600.0)
    again = "" if answer.status_code == 201 else " again"
    typer.echo(f"{answer.json()['version']} waits for the gate{again}; GET /drafters?run={run} tells the outcome")


def name_of(service: str, run: str | None) -> str:
    """The run that is meant where none is named: `default`, or the only one that there is."""
    if run is not None:
        return run
    names = [one["run"] for one in call("GET", service, "/runs", timeout=60.0).json()]
    if not names:
        raise ConfigurationError(f"{service} has no run, or none that the token is for; a trainer's hook registers one")
    if "default" not in names and len(names) > 1:
        raise ConfigurationError(f"which run? Give --run: {', '.join(names)}")
    return "default" if "default" in names else names[0]


def whoami() -> str:
    """Who asks, for the page and the history."""
    try:
        return getpass.getuser()[:80]
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()}"


def client_of(service: str, **more: Any) -> httpx.Client:
    """A client of the service, with the token and the authorities that the environment names."""
    import httpx

    from rl_hooks.sending.exchange import trusted

    token = os.environ.get("DRAFTALIGN_TOKEN")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    tls = trusted(os.environ.get("DRAFTALIGN_CA_FILE"))
    try:
        return httpx.Client(base_url=service.rstrip("/"), headers=headers, verify=tls, **more)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--service {service!r} is no URL: {error}") from error


def call(method: str, service: str, path: str, timeout: float = 5.0, **more: Any) -> httpx.Response:
    """Ask the service; what it refuses is a ConfigurationError. `timeout` in seconds."""
    import httpx

    try:
        with client_of(service, timeout=timeout) as client:
            answer = client.request(method, path, **more)
    except httpx.UnsupportedProtocol as error:
        raise ConfigurationError(f"--service {service!r} is no URL; expected one like {LOCAL}") from error
    except httpx.HTTPError as error:
        hint = next((f"; {hint}" for sign, hint in _HINTS.items() if sign in str(error)), "")
        raise ConfigurationError(f"{service} does not answer: {error}{hint}") from error
    if not answer.is_success:
        raise ConfigurationError(f"{service} answered {answer.status_code}: {_told(answer)}")
    return answer


def _told(answer: httpx.Response) -> str:
    """What a refusal says, and the command that helps."""
    try:
        problem = answer.json()
        kind, detail = str(problem["type"]).rpartition(":")[2], str(problem["detail"])
    except (ValueError, KeyError, TypeError):  # of something in front of the service
        return f"{answer.text[:300]} (is it a draftalign service?)"
    helps = {
        "no-token": "set DRAFTALIGN_TOKEN",
        "not-found": "is it a draftalign service?",
        "drafter-held": "`draftalign release` ends the hold",
        "no-such-run": "`draftalign runs` lists them",
    }
    return detail + (f" ({helps[kind]})" if kind in helps else "")
