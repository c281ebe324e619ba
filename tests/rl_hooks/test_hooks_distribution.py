"""`draftalign-hooks`: built from the same tree, small, and usable with NumPy alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_hooks_build_as_a_distribution_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "rl_hooks"
    shutil.copytree(ROOT / "rl_hooks", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    deleted = source / "agent/deleted.py"
    deleted.touch()
    with zipfile.ZipFile(_built(source, tmp_path)) as archive:
        assert "rl_hooks/agent/deleted.py" in archive.namelist()
    deleted.unlink()
    wheel = _built(source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        archive.extractall(tmp_path / "site")
    modules = {f"rl_hooks/{p.relative_to(ROOT / 'rl_hooks')}" for p in (ROOT / "rl_hooks").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules, "and nothing that was deleted"
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert required == ["Requires-Dist: numpy>=1.26"]

    heavy = "{'torch', 'fastapi', 'redis'}"
    code = f"import sys, rl_hooks.wire, rl_hooks.sending.sender; print(sorted({heavy} & set(sys.modules)))"
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert imported.stdout.strip() == "[]", imported.stderr


def _built(source: Path, folder: Path) -> Path:
    argv = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    built = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return next(folder.glob("draftalign_hooks-*.whl"))
