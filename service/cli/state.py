"""The command that copies a state: from a directory to an object store, or back. It works without the service."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from service.errors import ConfigurationError, RunConflict
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.mirror import Mirror, copy_run, is_copy, state_of


def copy_state(
    origin: Annotated[str, typer.Argument(help="A state directory, or the s3:// URL of a state.")],
    state_dir: Annotated[str | None, typer.Option(metavar="PATH", help="State directory to copy to.")] = None,
    state_url: Annotated[str | None, typer.Option(help="Object store to copy to: s3://bucket/prefix.")] = None,
) -> None:
    """Copy all runs of one state into another: from a directory to an object store, or back.

    Stop all parts of both states first. It copies into --state-dir and --state-url, or into what DRAFTALIGN_STATE_DIR
    and DRAFTALIGN_STATE_URL name. Not copied: rollouts that wait, files of dead batches, recent rollouts, the audit
    log, Redis. Runs that are there already are left as they are and named, with exit code 1: so it can be called
    again after a failure.
    """
    target = state_of(Settings.with_options(state_dir=state_dir, state_url=state_url))
    if not isinstance(target, Mirror):
        _check_no_copy(target.root)
    target.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".copied-", dir=target.root) as copy:  # not where a few GB may be too much
        found: Layout
        if origin.startswith("s3://"):
            found = Mirror(Path(copy), origin)
            found.refresh()
        else:
            _check_no_copy(Path(origin))
            found = Layout(Path(origin))
        runs = found.run_names()
        if not runs:
            raise ConfigurationError(
                f"{origin} holds no runs; give a state directory of draftalign, or s3://bucket/prefix"
            )
        left = False
        for run in runs:
            try:
                copy_run(found, target, run)
            except RunConflict as error:
                typer.echo(str(error), err=True)
                left = True
            else:
                typer.echo(f"copied run {run}")
    if left:
        raise typer.Exit(1)


def _check_no_copy(directory: Path) -> None:
    """Refuse the directory of a host that has an object store: checkpoints of other hosts are not in it."""
    if is_copy(directory):
        raise ConfigurationError(f"{directory} is a host's copy of an object store; give the store's URL")
