"""The commands about who may do what, and who did: token, audit. Both work on files, without the service."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from service.access.audit import AuditLog
from service.access.tokens import ALL_RUNS, TokenEntry, append_entry, hashed, new_secret
from service.cli.checks import given_path
from service.errors import ConfigurationError
from service.settings import Settings
from service.storage.layout import Layout


def token(
    name: Annotated[str, typer.Argument(help="Name of the token, for the audit log.")],
    scope: Annotated[list[str], typer.Option(help="What it may do: write, report, read or admin; repeat for several.")],
    run: Annotated[
        list[str] | None,
        typer.Option(help="Run that it is for, or a pattern like 'math-*'; repeat for several. Default: all."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Token file. Default: DRAFTALIGN_TOKEN_FILE.", callback=given_path)
    ] = None,
) -> None:
    """Make a token: print it once, and add its hash to the token file. A running service takes it at once.

    To take a token back, delete its line from the file. DRAFTALIGN_TOKENS takes such lines too: "$(cat FILE)".
    """
    path = file or Settings().token_file
    if path is None:
        raise ConfigurationError("which token file? Give --file, or set DRAFTALIGN_TOKEN_FILE as for the service")
    if not path.parent.is_dir():
        raise ConfigurationError(f"the directory {path.parent} of the token file does not exist; make it first")
    secret = new_secret()
    given: dict[str, Any] = {"name": name, "scopes": scope, "runs": run or ALL_RUNS, "sha256": hashed(secret.encode())}
    try:
        entry = TokenEntry.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where}: {first['msg']}, got {first['input']!r}") from None
    append_entry(path, entry)
    typer.echo(f"added to {path}; the token is printed only now:", err=True)
    typer.echo(secret)


def audit(
    run: Annotated[str | None, typer.Option(help="Only what was done to this run.")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="PATH", help="The service's state directory.")] = None,
) -> None:
    """Print who changed what, oldest first: time, token, run, action, its object, and the answer's status.

    The status `-` means that there is no answer yet, or that the process ended before it.
    """
    settings = Settings.with_options(state_dir=state_dir)
    if not Layout(settings.state_dir).audit.is_dir():
        raise ConfigurationError(f"there is no audit log under {settings.state_dir}; give the service's --state-dir")
    entry = None
    for entry in AuditLog(Layout(settings.state_dir)).read(run):
        said = {name: entry[name] for name in entry if name not in _COLUMNS}
        more = " ".join(f"{name}={value!r}" for name, value in said.items() if value is not None)
        when = datetime.fromtimestamp(entry["time"], UTC).isoformat(sep=" ", timespec="seconds")
        what = entry.get("action") or entry["call"]
        status = entry.get("status") or "-"
        line = f"{when}  {entry['token']}  {entry['run'] or '-'}  {what}  {status}  {more}".rstrip()
        # A path is as a client wrote it: it may hold codes that a terminal would obey.
        typer.echo("".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line))
    if entry is None:
        typer.echo("the audit log has no entry" + (f" about a run {run!r}" if run else ""), err=True)


_COLUMNS = ("time", "id", "token", "run", "action", "call", "status", "ended")
