"""A run that skips for want of environments says so in its last line, and fails where `make stacks` made them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.trainer.stacks_fixtures import ROOT

SOURCES = ("SLIME_SOURCE", "MILES_SOURCE", "NEMO_RL_SOURCE", "ROLL_SOURCE")


@pytest.mark.parametrize("made", ["", "nowhere elsewhere"])
def test_what_was_not_run_is_said_and_is_a_failure_where_it_was_made(made: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SOURCES} | {"STACKS_MADE": made}
    command = [sys.executable, "-m", "pytest", "-q", "tests/stacks/test_call_sites.py", "-p", "no:cacheprovider"]
    chosen = ["-k", "test_what_we_rely_on or another_order"]
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    lines = done.stdout.strip().splitlines()
    said = [line for line in lines if line.startswith("stacks:")]
    assert lines[-len(said) :] == said, "after all else"
    wanted = ", ".join(f"{name} 1" for name in sorted(SOURCES))
    assert said[0] == (f"stacks: tests run, by environment: no environment 1; not run, by what is not there: {wanted}")
    if not made:
        assert (done.returncode, len(said)) == (0, 1)
        return
    assert done.returncode == 1
    assert said[1:] == ["stacks: FAILED: `make stacks` made .venv-nowhere, .venv-elsewhere, and no test ran there"]
