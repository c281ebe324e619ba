"""The commands about drafter versions of a running service: list, download, publish, hold, release, roll back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from rl_hooks.sending.jobs import run_path
from service.cli.drafters.commands import AuxLayers, From, Norm, Source, check_free, write_body
from service.cli.remote.client import LOCAL, AsJson, Reason, Run, Service, call, client_of, name_of, whoami
from service.errors import ConfigurationError

if TYPE_CHECKING:
    from rl_hooks.format.release import PublicKeys, VerifiedManifest

#: A drafter version as page and headline have it.
_NUMBER = re.compile(r"v([0-9]+)")


def drafters(service: Service = LOCAL, run: Run = None, as_json: AsJson = False) -> None:
    """List a run's drafter versions, newest first: α, policy version, and which is served, waits or was refused.

    DRAFTALIGN_TOKEN: token for the service, of scope read.
    """
    run = name_of(service, run)
    found = call("GET", service, "/drafters", params={"run": run}).json()
    if as_json:
        typer.echo(json.dumps(found))
        return
    served = (found["latest"] or {}).get("version")
    held = (found["held"] or {}).get("version")
    judged = {one.get("version"): one for one in found["history"] if one["event"] in ("published", "refused")}
    refused = {name: one.get("reason") for name, one in judged.items() if one["event"] == "refused"}
    outcome = {name: f"refused: {reason or 'why was not written'}" for name, reason in refused.items()}
    outcome |= dict.fromkeys(found["waiting"], "waits for the gate")
    for one in reversed(found["versions"]):
        alpha = (one["gate"] or {}).get("alpha_candidate")
        facts = [f"policy {one['policy_version']}", "" if alpha is None else f"α {alpha:.2f} when it was published"]
        facts.append(outcome.get(one["version"], ""))
        when = datetime.fromtimestamp(one["created"]).astimezone().isoformat(sep=" ", timespec="seconds")
        said = "  ".join([when, *filter(None, facts)])
        typer.echo(f"{'*' if one['version'] == served else ' '} {one['version']}  {said}")
    until = ", and held until `draftalign release`" if held is not None else ""
    typer.echo(f"* is served by run {run}{until}" if served else f"run {run} serves no drafter yet", err=True)


def rollback(
    version: Annotated[str, typer.Argument(help="Drafter version to serve again: v000007-0a1b2c3d, or v000007.")],
    reason: Reason = "by hand",
    override_canary: Annotated[
        bool, typer.Option("--override-canary", help="Load it in engines whose canary has rejected it, too.")
    ] = False,
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Serve an earlier drafter version now, until the gate finds a better one. To keep it longer: `hold`.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    version = _whole(service, run, version)
    before = _served(service, run)
    body = {"reason": reason, "by": whoami(), "override_canary": override_canary}
    path = f"/drafter/{quote(version, safe='')}/rollback"
    now = call("POST", service, path, params={"run": run}, json=body).json()
    again = ", as before: its engines load it again" if before.get("version") == version else ""
    if before.get("sequence") == now["sequence"]:
        again = (
            ", as before: nothing was changed, for the last rollback was to it and for the same reason; with another "
            "--reason its engines load it again"
        )
    typer.echo(f"run {run} serves {version}{again}")


def hold(
    version: Annotated[str, typer.Argument(help="Drafter version to serve: v000007-0a1b2c3d, or v000007.")],
    reason: Reason = "by hand",
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Serve a drafter version until `draftalign release`. Scoring and training go on; nothing is published.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    version = _whole(service, run, version)
    body = {"reason": reason, "by": whoami()}
    call("PUT", service, f"/drafter/{quote(version, safe='')}/hold", params={"run": run}, json=body)
    typer.echo(f"run {run} serves {version} until it is released")


def release(service: Service = LOCAL, run: Run = None) -> None:
    """End a hold: the version stays served until the gate finds a better one.

    DRAFTALIGN_TOKEN: token for the service, of scope admin.
    """
    run = name_of(service, run)
    held = call("GET", service, run_path(run)).json()["held"]
    if held is None:
        raise ConfigurationError(f"run {run} holds no version, so nothing was released")
    call("DELETE", service, f"/drafter/{held['version']}/hold", params={"run": run, "by": whoami()})
    typer.echo(f"run {run}: {held['version']} is released")


def publish(
    source: Source,
    reason: Reason = "trained elsewhere",
    service: Service = LOCAL,
    run: Run = None,
    from_: From = None,
    aux_layers: AuxLayers = None,
    norm_before_residual: Norm = None,
) -> None:
    """Send a drafter that was trained elsewhere, in any layout. It is served once the gate finds it better.

    It must have the sizes and the draft vocabulary of the run's drafters. DRAFTALIGN_TOKEN: token for the service, of
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
    version = answer.json()["version"]
    typer.echo(f"{version} waits for the gate{again}; draftalign drafters --run {run} tells the outcome")


def download(
    destination: Annotated[Path, typer.Argument(help="Directory to write; it must not hold files yet.")],
    version: Annotated[
        str | None, typer.Option(help="Drafter version: v000007-0a1b2c3d, or v000007. Default: the served one.")
    ] = None,
    service: Service = LOCAL,
    run: Run = None,
) -> None:
    """Download a drafter version, verified, into a directory that engines can load.

    DRAFTALIGN_TOKEN: token for the service, of scope read. With DRAFTALIGN_PUBLIC_KEYS, what
    none of these keys has signed is refused.
    """
    run = name_of(service, run)
    require_free(destination)
    typer.echo(f"{fetch_to(destination, service, run, version)} of run {run} is in {destination}")


def require_free(destination: Path) -> None:
    """Raise a ConfigurationError unless this directory is free (`check_free`) and the public keys are valid."""
    public_keys()
    check_free(destination)


def fetch_to(destination: Path, service: str, run: str, version: str | None = None) -> str:
    """Write a version, by default the served one, to a free directory. It is verified as by an agent. Returns its name.

    The directory may be a mount point, so the files are downloaded to a directory inside of it, and then renamed.
    config.json comes last: without it nothing loads.
    """
    from rl_hooks.agent.download import fetch_release
    from rl_hooks.errors import AgentError
    from rl_hooks.format.drafter import CONFIG_FILE

    made = not destination.exists()
    destination.mkdir(parents=True, exist_ok=True)
    try:
        manifest = _offered(service, run, version)
        with (
            tempfile.TemporaryDirectory(prefix=".", dir=destination) as staging,
            client_of(service, timeout=60.0) as client,
        ):
            found = fetch_release(client, manifest, Path(staging)).path
            for name in sorted((file.name for file in manifest.files), key=CONFIG_FILE.__eq__):
                (found / name).rename(destination / name)
    except BaseException as error:
        if made:
            with contextlib.suppress(OSError):  # it is not empty if the disk failed half way
                destination.rmdir()
        if isinstance(error, AgentError):
            raise ConfigurationError(str(error)) from error
        raise
    return manifest.version


def public_keys() -> PublicKeys | None:
    """The service's keys that the environment names. Raises ConfigurationError."""
    from rl_hooks.format.release import PublicKeys

    try:
        return PublicKeys.of_environment(os.environ)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _offered(service: str, run: str, version: str | None) -> VerifiedManifest:
    """The manifest of a version, by default of the served one. With public keys its signature is checked."""
    from rl_hooks.format.release import SIGNATURE_HEADER, new_nonce, parse_manifest

    keys = public_keys()
    if version is None:
        nonce = new_nonce()
        answer = call("GET", service, "/drafter/latest", params={"run": run} | ({"nonce": nonce} if keys else {}))
        if keys is not None:
            keys.check(nonce, answer.content, answer.headers.get(SIGNATURE_HEADER))
        return parse_manifest(answer.json(), run)
    if keys is not None:
        raise ConfigurationError(
            "only the version that is served is signed: leave --version out, or unset DRAFTALIGN_PUBLIC_KEYS"
        )
    version = _whole(service, run, version)
    known = call("GET", service, "/drafters", params={"run": run}).json()["versions"]
    found = next((one for one in known if one["version"] == version), None)
    if found is None:
        there = ", ".join(one["version"] for one in known) or "none"
        raise ConfigurationError(f"run {run} has no {version}; expected one of: {there}")
    return parse_manifest(found, run)


def _whole(service: str, run: str, version: str) -> str:
    """The full name of a version: page and headline leave its digest out."""
    if not (short := _NUMBER.fullmatch(version)):
        return version
    known = [one["version"] for one in call("GET", service, "/drafters", params={"run": run}).json()["versions"]]
    if not known:
        raise ConfigurationError(f"run {run} has no drafter version yet")
    found = [one for one in known if one.startswith(f"v{short[1]:0>6}-")]
    if len(found) != 1:
        wrong = f"{version} is {len(found)} versions of run {run}" if found else f"run {run} has no version {version}"
        raise ConfigurationError(f"{wrong}; expected one of: {', '.join(found or known)}")
    return str(found[0])


def _served(service: str, run: str) -> dict[str, Any]:
    """The manifest that a run serves; empty where there is none, or no answer: a rollback must not depend on it."""
    try:
        return dict(call("GET", service, "/drafter/latest", 5.0, params={"run": run}).json())
    except ConfigurationError:
        return {}
