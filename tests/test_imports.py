"""The arrows of docs/reference/architecture.md: who may import whom."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import house

ROOT = Path(__file__).parent.parent
PACKAGES = ("drafter", "rl_hooks", "service")
#: Every arrow between rooms, and no other. A room is a folder; a file beside the rooms stands for itself.
ARROWS = {
    "service.cli": """service.access service.api service.capacity service.errors service.memory service.ranks
        service.settings service.storage service.worker examples.demo drafter.batch drafter.errors drafter.files
        drafter.model drafter.policy drafter.replay drafter.vocabulary rl_hooks.agent rl_hooks.durable
        rl_hooks.errors rl_hooks.format rl_hooks.hook rl_hooks.lock rl_hooks.sending rl_hooks.trainer rl_hooks.wire""",
    "service.capacity": "service.monitor service.settings rl_hooks.format rl_hooks.wire",
    "service.ranks": """service.errors service.settings service.storage service.worker drafter.batch drafter.device
        drafter.errors drafter.model drafter.training""",
    "service.api": """service.access service.errors service.memory service.monitor service.reading service.settings
        service.storage rl_hooks.format rl_hooks.wire""",
    "service.reading": "service.monitor service.storage",
    "service.access": "service.errors service.settings service.storage rl_hooks.durable rl_hooks.format",
    "service.worker": """service.errors service.memory service.monitor service.settings service.storage drafter.batch
        drafter.device drafter.errors drafter.files drafter.model drafter.policy drafter.replay drafter.training
        drafter.vocabulary rl_hooks.durable rl_hooks.format rl_hooks.wire""",
    "service.storage": """service.errors service.monitor service.settings rl_hooks.durable
        rl_hooks.format rl_hooks.lock rl_hooks.wire""",
    "service.memory": "",
    "service.monitor": "",
    "service.settings": "rl_hooks.durable",
    "service.errors": "",
    "drafter.training": """drafter.batch drafter.device drafter.errors drafter.model drafter.policy drafter.unroll
        drafter.vocabulary rl_hooks.wire""",
    "drafter.replay": "drafter.batch drafter.device drafter.errors drafter.model drafter.policy drafter.unroll",
    "drafter.files": """drafter.errors drafter.model drafter.mtp drafter.policy drafter.vocabulary rl_hooks.durable
        rl_hooks.format""",
    "drafter.mtp": """drafter.batch drafter.errors drafter.model drafter.policy drafter.unroll drafter.vocabulary
        rl_hooks.format""",
    "drafter.model": """drafter.batch drafter.device drafter.errors drafter.policy drafter.unroll drafter.vocabulary
        rl_hooks.format""",
    "drafter.unroll": "drafter.device drafter.errors",
    "drafter.policy": "drafter.batch drafter.errors drafter.vocabulary rl_hooks.wire",
    "drafter.vocabulary": "drafter.errors rl_hooks.format",
    "drafter.batch": "drafter.device drafter.errors rl_hooks.wire",
    "drafter.device": "",
    "drafter.errors": "rl_hooks.format",
    "rl_hooks.trl": "rl_hooks.errors rl_hooks.hook rl_hooks.stacks rl_hooks.trainer",
    "rl_hooks.stacks": "rl_hooks.durable rl_hooks.errors rl_hooks.sending rl_hooks.trainer",
    "rl_hooks.hook": "rl_hooks.trainer",
    "rl_hooks.agent": """rl_hooks.durable rl_hooks.engines rl_hooks.errors rl_hooks.format rl_hooks.lock
        rl_hooks.sending rl_hooks.wire""",
    "rl_hooks.trainer": "rl_hooks.errors rl_hooks.sending rl_hooks.wire",
    "rl_hooks.engines": """rl_hooks.durable rl_hooks.errors rl_hooks.format rl_hooks.sending rl_hooks.wire""",
    "rl_hooks.sending": "rl_hooks.durable rl_hooks.errors rl_hooks.format rl_hooks.wire",
    "rl_hooks.format": "rl_hooks.errors",
    "rl_hooks.errors": "",
    "rl_hooks.wire": "rl_hooks.format",
    "rl_hooks.durable": "",
    "rl_hooks.lock": "",
}


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def files(package: str) -> list[Path]:
    of_a_wheel = ROOT / package / "build"  # that `pip install ./rl_hooks` left here
    return sorted(path for path in (ROOT / package).rglob("*.py") if not path.is_relative_to(of_a_wheel))


def module_of(name: str) -> Path | None:
    """The file of a dotted name: of a module of ours, or of a room in a room. None for other names."""
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if name.count(".") > 1 and path.is_dir() else path.with_suffix(".py")
    return file if file.is_file() else None


def room_of(path: Path) -> str:
    """`service/api/app.py` -> service.api; `drafter/batch.py` -> drafter.batch; a room in a room is part of it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2])


def arrows(package: str) -> dict[str, set[str]]:
    """Which rooms every room of a package imports from, wherever in a file the import stands."""
    found: dict[str, set[str]] = {}
    for path in files(package):
        if path.parent == ROOT / package and path.stem == "__init__":
            continue
        room = found.setdefault(room_of(path), set())
        room |= {room_of(target) for name in imported(path) if (target := module_of(name))} - {room_of(path)}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arrows_between_rooms_are_these_and_no_others(package: str) -> None:
    stated = {room: set(to.split()) for room, to in ARROWS.items() if room.split(".")[0] == package}
    assert arrows(package) == stated


def floors(arrows_to: dict[str, set[str]]) -> list[set[str]]:
    """The rooms, lowest floor first: each stands above all that it imports from. Rooms in a circle are on none."""
    above, found = arrows_to, list[set[str]]()
    while floor := {room for room, to in above.items() if not to}:
        found.append(floor)
        above = {room: to - floor for room, to in above.items() if room not in floor}
    return found


def test_no_arrow_runs_in_a_circle() -> None:
    stated = {room: set(to.split()) & set(ARROWS) for room, to in ARROWS.items()}
    assert set().union(*floors(stated)) == set(ARROWS)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_entries_of_a_room_import_from_each_other(package: str) -> None:
    """An entry is a file, or a room with all that is in it: `queue` of `service/storage`, say."""
    to = {path: house.imports(ROOT, path) for path in files(package)}
    found = {folder: house.circles(house.between(to, house.entry_below(folder))) for folder in {p.parent for p in to}}
    assert {folder: circles for folder, circles in found.items() if circles} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_states_arrows_and_floors_of_each_package(package: str) -> None:
    found = arrows(package)
    within = {room: to & found.keys() for room, to in found.items()}
    row = f"| `{package}` | {sum(map(len, within.values()))} | {len(floors(within))} |"
    assert row in (ROOT / "docs/reference/architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [*PACKAGES, "tests/helpers"])
def test_no_room_holds_more_than_twelve_things(package: str) -> None:
    for folder in [ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())]:
        if folder.name == "__pycache__" or "build" in folder.parts:  # of a wheel that was made here
            continue
        code = [
            p
            for p in folder.iterdir()
            if p.suffix in (".py", ".lua", ".html")
            or (p.is_dir() and p.name[0] != "_" and p.name not in ("build", "draftalign_hooks.egg-info"))
        ]
        things = [p.name for p in code if not p.name.startswith("__")]
        assert len(things) <= 12, (folder, sorted(things))


def test_the_tests_of_a_room_lie_in_the_folder_of_the_outermost_room() -> None:
    rooms = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")}
    elsewhere = {Path("service/access"), Path("service/capacity")}  # where, CONTRIBUTING.md says
    assert {room for room in rooms if not (ROOT / "tests" / room).is_dir()} == elsewhere


def test_a_class_name_means_one_thing_in_the_three_packages() -> None:
    """A reader who searches for a class finds the one that is meant."""
    homes: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in files(package)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_class_has_more_than_twelve_attributes() -> None:
    found: dict[str, int] = {}
    for path in (path for package in PACKAGES for path in files(package)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (count := house.attributes(node)) > 12:
                found[node.name] = count
    assert found == {}


@pytest.mark.parametrize("path", files("rl_hooks"), ids=lambda p: p.name)
def test_rl_hooks_imports_no_server_but_where_an_engine_brings_one(path: Path) -> None:
    outside = set() if "engines" in path.parts else {"fastapi", "starlette"}
    assert not tops(path) & {"redis", "examples", *outside}


def test_what_is_of_one_engine_is_of_no_other() -> None:
    """A part that vLLM and SGLang share is in a room that neither owns, and so is the agent that runs in both."""
    vllm, sglang = "rl_hooks.engines.vllm", "rl_hooks.engines.sglang"
    for path in [*files("rl_hooks/engines"), ROOT / "rl_hooks/agent/in_process.py"]:
        own = {vllm: "vllm", sglang: "sglang"}
        foreign = {room for room, name in own.items() if name not in path.parts}
        assert not {name for name in imported(path) if name.startswith(tuple(foreign))}, path


@pytest.mark.parametrize("path", files("drafter"), ids=lambda p: p.name)
def test_drafter_knows_no_network(path: Path) -> None:
    assert not tops(path) & {"examples", "redis", "fastapi", "httpx", "uvicorn", "starlette"}


@pytest.mark.parametrize("room", ["api", "storage", "monitor"])
def test_the_rooms_that_the_api_lives_in_never_import_torch(room: str) -> None:
    for path in files(f"service/{room}"):
        assert not tops(path) & {"torch", "drafter", "transformers"}, path


def reachable(module: str) -> set[Path]:
    """Files of `service` that `module` imports, directly or through others, lazily or not."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = module_of(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        waiting += [other for other in imported(path) if other.startswith("service.")]
    return found


def test_nothing_that_the_api_can_reach_imports_torch_or_drafter() -> None:
    paths = reachable("service.api.app")
    assert len(paths) > 15
    for path in paths:
        assert not tops(path) & {"torch", "drafter", "transformers"}, path


@pytest.mark.parametrize("path", [*files("service"), *files("drafter"), *files("rl_hooks")], ids=lambda p: p.name)
def test_nothing_imports_pickle(path: Path) -> None:
    assert not tops(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("path", [*files("service/monitor"), ROOT / "service/errors.py"], ids=lambda p: p.name)
def test_what_judges_has_no_clock_no_network_and_no_dice(path: Path) -> None:
    assert not tops(path) & {"redis", "torch", "time", "fastapi", "random", "os"}


def test_wire_needs_numpy_and_nothing_else() -> None:
    wire, container = (ROOT / "rl_hooks" / name for name in ("wire.py", "format/container.py"))
    assert tops(container) - set(sys.stdlib_module_names) == {"numpy"}
    assert tops(wire) - set(sys.stdlib_module_names) == {"numpy", "rl_hooks"}
    assert {path for name in imported(wire) if (path := module_of(name))} == {container}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("service.api.app", {"torch", "transformers", "drafter", "trl", "obstore", "botocore"}),
        ("service.cli.main", {"torch", "transformers", "fastapi"}),
        ("service.cli.up", {"torch", "drafter"}),
        ("rl_hooks.format.engines", {"numpy", "fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("rl_hooks.format.run", {"numpy", "fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("rl_hooks", {"fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("rl_hooks.wire", {"fastapi", "redis", "transformers", "torch", "service", "drafter"}),
        ("drafter", {"redis", "fastapi", "service", "httpx"}),
    ],
)
def test_a_fresh_process_loads_nothing_that_it_does_not_need(module: str, forbidden: set[str]) -> None:
    script = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_process_that_a_test_starts_keeps_what_it_compiled(tmp_path: Path) -> None:
    """Whatever the environment says: hundreds of them import the same files."""
    (tmp_path / "one.py").touch()
    subprocess.run([sys.executable, "-c", "import one"], cwd=tmp_path, check=True)
    assert [*tmp_path.glob("__pycache__/one.*.pyc")]


def test_whatever_the_application_imports_is_among_its_core_dependencies() -> None:
    """Triton comes with CUDA builds of torch, obstore and botocore with the extra s3, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[\[<>=; ]", line)[0].replace("-", "_") for line in project["dependencies"]}
    used = set().union(*(tops(path) for package in ("drafter", "service") for path in files(package)))
    ours = {"drafter", "rl_hooks", "service", "examples"}
    brought = {"starlette", "pydantic_core", "typing_extensions"}  # by FastAPI and pydantic, whose parts they are
    assert used - set(sys.stdlib_module_names) - ours - brought - {"triton", "obstore", "botocore"} <= core


@pytest.mark.parametrize("directory", ["", "rl_hooks"])
def test_the_licence_that_is_declared_is_there(directory: str) -> None:
    project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / directory / "LICENSE").read_text()[:200]


def test_the_small_distribution_has_every_package() -> None:
    """Its packages are listed by hand: the folder is the package itself, where setuptools would find none."""
    listed = tomllib.loads((ROOT / "rl_hooks/pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {path.parent.relative_to(ROOT) for path in files("rl_hooks") if path.name == "__init__.py"}
    assert sorted(listed) == sorted(".".join(room.parts) for room in rooms)
    assert {path.parent.relative_to(ROOT) for path in files("rl_hooks")} == rooms, (
        "a folder of code without __init__.py"
    )


#: Of code: not blank, no comment, no docstring.
ADAPTER_LINES = 110


@pytest.mark.parametrize("path", sorted((ROOT / "rl_hooks/stacks").glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_is_short(path: Path) -> None:
    """It answers four questions about its stack. What another one needs too belongs in a module that both import."""
    text = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            said.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in said]
    code = [line for line in lines if line and not line.startswith("#")]
    assert len(code) <= ADAPTER_LINES
