"""What the tests of deploy/ share: where its files are, its tools, and what commands, settings and metrics exist."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from service.cli.main import app
from service.cli.valkey import MAX_MEMORY
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not installed")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(*command: str, cwd: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def check_command(arguments: Sequence[str]) -> None:
    """Of draftalign: a command that exists, with options that it has."""
    command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    for argument in arguments[1:]:
        assert argument.split("=")[0] in options, argument


def check_environment(names: set[str]) -> None:
    fields = {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields} | {"DRAFTALIGN_TOKEN"}
    assert {name for name in names if name.startswith("DRAFTALIGN_")} <= fields


def check_redis_server(command: Sequence[str]) -> None:
    """It may not lose what was acknowledged, and has room for what is remembered of all runs together."""
    options = dict(itertools.pairwise(command))
    assert (options["--appendonly"], options["--appendfsync"]) == ("yes", "always")
    assert (options["--maxmemory"], options["--maxmemory-policy"]) == (MAX_MEMORY, "noeviction")
    assert options["--protected-mode"] == "no", "Redis would answer its own container alone"


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:draftalign_\w+|\w+:draftalign_\w+:\w+)", re.sub(r'"[^"]*"', "", expression)))


def documented_metrics() -> set[str]:
    """Of `GET /metrics`."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return set(re.findall(r"^\| `(draftalign_\w+)", text, re.MULTILINE))
