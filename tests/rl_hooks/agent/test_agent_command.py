"""`draftalign-agent` as it is typed: what is wrong with it ends in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

START = "from rl_hooks.agent.cli import main; main()"


def refused(directory: Path, *words: str, **environment: str) -> str:
    """Start it, and give the one line by which it ends."""
    command = [sys.executable, "-c", START, "--url", "http://127.0.0.1:1", "--cache-dir", str(directory), *words]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DRAFTALIGN_TOKEN", "\N{LATIN SMALL LETTER E WITH ACUTE}", "not printable ASCII"),
        ("DRAFTALIGN_ENGINE_TOKEN", "s3\ncret", "not printable ASCII"),
        ("DRAFTALIGN_LOG_LEVEL", "loud", "must be DEBUG, INFO, WARNING or ERROR, got 'LOUD'"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variable: str, value: str, words: str, tmp_path: Path) -> None:
    line = refused(tmp_path, **{variable: value})
    assert line.startswith(f"draftalign agent: {variable} ")
    assert words in line
    assert "cret" not in line


def test_service_and_run_are_the_environments_unless_they_are_given(tmp_path: Path) -> None:
    assert "must look like http://host:port, got 'ftp://s'" in refused(tmp_path, DRAFTALIGN_URL="ftp://s")
    assert "run: 'no name' is not a plain name" in refused(tmp_path, DRAFTALIGN_RUN="no name")
    given = refused(tmp_path, "--service", "gopher://s", DRAFTALIGN_URL="ftp://s")
    assert "got 'gopher://s'" in given
    assert "a token goes into DRAFTALIGN_TOKEN" in refused(tmp_path, DRAFTALIGN_URL="http://trainer:s3cret@s")


def test_a_port_for_metrics_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tmp_path, "--metrics-port", str(port))
    assert f"the agent's own metrics cannot be served at 127.0.0.1:{port}: " in line


def test_a_cache_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file" / "cache") in refused(tmp_path / "file" / "cache")


def test_a_tilde_in_the_caches_path_is_the_home_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(tmp_path, "--cache-dir=~/file/cache", HOME=str(tmp_path))
    assert str(tmp_path / "file" / "cache") in line
