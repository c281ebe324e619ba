"""The command that copies a state: from a directory to an object store, or back. It works without the service."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from service.errors import ConfigurationError
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.mirror import Mirror, copy_run, state_of


def copy_state(
    origin: Annotated[str, typer.Argument(help="A state directory, or the s3:// URL of a state.")],
    state_dir: Annotated[Path | None, typer.Option(help="State directory to copy to.")] = None,
    state_url: Annotated[str | None, typer.Option(help="Object store to copy to: s3://bucket/prefix.")] = None,
) -> None:
    """Copy all runs of one state into another: from a directory to an object store, or back.

    Stop all parts of both first. Where to is as for the service: DRAFTALIGN_STATE_DIR, DRAFTALIGN_STATE_URL. Not
    copied: rollouts that wait, recent rollouts, the audit log, Redis.
    """
    options: dict[str, Any] = {"state_dir": state_dir, "state_url": state_url}
    target = state_of(Settings(**{name: value for name, value in options.items() if value is not None}))
    with tempfile.TemporaryDirectory(prefix="draftalign-") as copy:
        found: Layout
        if origin.startswith("s3://"):
            found = Mirror(Path(copy), origin)
            found.refresh()
        else:
            found = Layout(Path(origin))
        runs = found.run_names()
        if not runs:
            raise ConfigurationError(
                f"{origin} holds no runs; give a state directory of draftalign, or s3://bucket/prefix"
            )
        for run in runs:
            copy_run(found, target, run)
            typer.echo(f"copied run {run}")
