"""`make stacks-newest` on releases made here: what is lost is named with its version, and the job fails."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.trainer.stacks_fixtures import ROOT

JOB = """
import sys
sys.path[:0] = ["{root}/tests/stacks", "{root}/tests"]
import newest
from helpers.trainer import contract_fixtures
site = contract_fixtures.Site("tiny_stack.py", "Worker.step", ("batch",))
newest.CONTRACTS = {{"tiny": contract_fixtures.Contract(package, "", "nothing", (site,)) for package in {packages}}}
sys.exit(newest.main(newest.Path("{out}")))
"""


def release(folder: Path, version: str, takes: str) -> None:
    about = f"tiny_stack-{version}.dist-info"
    with zipfile.ZipFile(folder / f"tiny_stack-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_stack.py", f"class Worker:\n    def step(self, {takes}): ...\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-stack\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def run(tmp_path: Path, package: str) -> tuple[int, str]:
    only_here = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    job = JOB.format(root=ROOT, packages=[package], out=tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", job], env=only_here, capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("takes", "code", "said"),
    [("batch", 0, "ok\n"), ("rows", 1, "\n    LOST tiny: tiny_stack.py: Worker.step takes no batch\n")],
)
def test_the_newest_release_is_read_and_what_it_lost_is_named(tmp_path: Path, takes: str, code: int, said: str) -> None:
    release(tmp_path, "1.0", "batch")
    release(tmp_path, "1.10", takes)
    found, printed = run(tmp_path, "tiny-stack")
    assert (found, printed) == (code, f"{'tiny-stack':<16}{'1.10':<14}{said}")


def test_a_package_that_pip_cannot_fetch_is_named(tmp_path: Path) -> None:
    found, printed = run(tmp_path, "no-such-stack")
    assert found == 1
    assert "LOST ERROR: No matching distribution found for no-such-stack" in printed
