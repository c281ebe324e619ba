"""An RL stack's own script in an environment of its own: where that is, and what is said without it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HERE = ROOT / "tests/stacks"


def environment(name: str) -> Path:
    """The folder of `.venv-NAME`, with STACKS_NEWEST of `.venv-NAME-newest`; of `.venv` where there is no name."""
    newest = "-newest" if os.environ.get("STACKS_NEWEST") else ""
    return ROOT / (f".venv-{name}{newest}" if name else ".venv")


def in_environment(name: str, of: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs `.venv-NAME`, whole; `of` is what it checks, for people."""
    folder = environment(name)
    reason = f"no {folder.name} (`make stacks`): nothing was checked on {of}"
    return [pytest.mark.stack(folder.name), pytest.mark.skipif(not (folder / ".ready").exists(), reason=reason)]


@dataclass(frozen=True)
class Stack:
    """`name` of the environment `.venv-NAME` that `make stacks` sets up, and the script of tests/stacks run in it."""

    name: str
    script: str
    of: str  # the package, for people
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return environment(self.name) / "bin/python"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of the test module."""
        return [pytest.mark.slow, pytest.mark.timeout(600), *in_environment(self.name, self.of)]

    def run(self, out: Path, *arguments: str) -> None:
        """Have the script write what it found into `out`."""
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **self.variables}
        command = [str(self.python), "-W", "ignore", str(HERE / self.script), str(out), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
        assert done.returncode == 0, done.stderr[-6000:]

    def ranks(self, out: Path, *arguments: str) -> list[dict[str, Any]]:
        """What each of two ranks found."""
        self.run(out, *arguments)
        return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
