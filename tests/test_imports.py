"""The arrows of docs/architecture.md: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = {"alpha", "dead_drafter", "drift", "layout", "errors"}


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", files("rl_hooks"), ids=lambda p: p.name)
def test_rl_hooks_imports_neither_drafter_nor_service(path: Path) -> None:
    # What runs inside an engine may use what the engine itself brings.
    outside = set() if path.parent.name == "engines" else {"fastapi", "starlette"}
    assert not tops(path) & {"drafter", "service", "examples", "redis", *outside}


@pytest.mark.parametrize("path", files("drafter"), ids=lambda p: p.name)
def test_drafter_imports_only_what_files_hold_durable_writing_and_no_network(path: Path) -> None:
    assert not tops(path) & {"service", "examples", "redis", "fastapi", "httpx", "uvicorn", "starlette"}
    hooks = {name for name in imported(path) if name.split(".")[0] == "rl_hooks"}
    allowed = (
        "rl_hooks.wire",
        "rl_hooks.durable",
        "rl_hooks.drafter_files",
        "rl_hooks.mtp_files",
        "rl_hooks.run_check",
    )
    assert {name for name in hooks if not name.startswith(allowed)} <= {"rl_hooks"}


def reachable(module: str) -> set[str]:
    """Modules of `service` that `module` imports, directly or through others, lazily or not."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = ROOT / (name.replace(".", "/") + ".py")
        if name in found or not path.is_file():
            continue
        found.add(name)
        waiting += [other for other in imported(path) if other.startswith("service.")]
    return found


def test_nothing_that_the_api_can_reach_imports_torch_or_drafter() -> None:
    modules = reachable("service.api")
    assert len(modules) > 15
    for name in modules:
        assert not tops(ROOT / (name.replace(".", "/") + ".py")) & {"torch", "drafter", "transformers"}, name


@pytest.mark.parametrize("path", [*files("service"), *files("drafter"), *files("rl_hooks")], ids=lambda p: p.name)
def test_nothing_imports_pickle(path: Path) -> None:
    assert not tops(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_stay_pure(name: str) -> None:
    assert not tops(ROOT / "service" / f"{name}.py") & {"redis", "torch", "time", "fastapi", "random", "os"}


def test_wire_needs_numpy_and_nothing_else() -> None:
    outside = tops(ROOT / "rl_hooks" / "wire.py") - set(sys.stdlib_module_names)
    assert outside == {"numpy"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("service.api", {"torch", "transformers", "drafter", "trl"}),
        ("service.cli", {"torch", "transformers", "fastapi"}),
        ("service.up", {"torch", "drafter"}),
        ("rl_hooks.run_check", {"numpy", "fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("rl_hooks", {"fastapi", "redis", "transformers", "service", "drafter"}),
        ("rl_hooks.wire", {"fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("drafter", {"redis", "fastapi", "service", "httpx"}),
    ],
)
def test_a_fresh_process_loads_nothing_that_it_does_not_need(module: str, forbidden: set[str]) -> None:
    script = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_whatever_the_application_imports_is_among_its_core_dependencies() -> None:
    """An image holds the core dependencies alone. Triton comes with CUDA builds of torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[\[<>=; ]", line)[0].replace("-", "_") for line in project["dependencies"]}
    used = set().union(*(tops(path) for package in ("drafter", "service") for path in files(package)))
    ours = {"drafter", "rl_hooks", "service", "examples"}
    brought = {"starlette", "pydantic_core", "typing_extensions"}  # by FastAPI and pydantic, whose parts they are
    assert used - set(sys.stdlib_module_names) - ours - brought - {"triton"} <= core


@pytest.mark.parametrize("directory", ["", "rl_hooks"])
def test_the_licence_that_is_declared_is_there(directory: str) -> None:
    project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / directory / "LICENSE").read_text()[:200]
