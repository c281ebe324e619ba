"""The documentation is tested: what can be set, called or scraped is in it, and what it points to exists."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi import FastAPI
from helpers.service.deploy_fixtures import PROMETHEUS, read_yaml
from pydantic import SecretStr

from rl_hooks.agent.agent import AgentConfig
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.engines.vllm import KNOWN_RELEASES
from service.api.acceptance import AcceptanceReport
from service.api.app import create_app
from service.api.auth import allowed_scopes
from service.api.context.answers import AlphaAnswer
from service.cli.main import app as command_line
from service.monitor import records
from service.monitor.events import KINDS, Event, RunEvent
from service.settings import SCOPES, Settings
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.queue.rollout_queue import COUNTERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("drafter", "rl_hooks", "service")
OTHERS = [ROOT / name / "README.md" for name in ("deploy", "benchmarks", "tests/vllm_server")]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *OTHERS])


@functools.cache
def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def all_pages() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- settings, commands, options ------------------------------------------------------------------------------------


def shown(default: object) -> str:
    """How a default is written in docs/reference/settings.md."""
    if default is None:
        return "unset"
    if isinstance(default, SecretStr):
        return "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def rows(text: str) -> dict[str, list[str]]:
    """First cell, without its backticks -> the other cells, of every table row."""
    table: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            first, *others = (cell.strip() for cell in line.strip().strip("|").split(" | "))
            for name in re.findall(r"`([^`]+)`", first):
                table[name] = others
    return table


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    cells = rows(page("docs/reference/settings.md"))[f"DRAFTALIGN_{name.upper()}"]
    assert cells[0] == shown(Settings.model_fields[name].default)
    assert len(cells[1]) > 10, "say what it does and when to change it"


def test_the_setting_of_tokens_names_every_scope() -> None:
    said = rows(page("docs/reference/settings.md"))["DRAFTALIGN_TOKENS"][1]
    assert f"scopes {', '.join(SCOPES)} ([" in said


def test_no_setting_is_documented_that_does_not_exist() -> None:
    documented = {name for name in rows(page("docs/reference/settings.md")) if name.startswith("DRAFTALIGN_")}
    own = {"DRAFTALIGN_LOG_LEVEL", "DRAFTALIGN_TOKEN", "DRAFTALIGN_ENGINE_TOKEN", "DRAFTALIGN_DRAFTER_DIR"}
    own |= {"DRAFTALIGN_PUBLIC_KEYS", "DRAFTALIGN_INITIAL_DRAFTER", "DRAFTALIGN_AUX_LAYERS", "DRAFTALIGN_HOOK_OPTIONS"}
    own |= {"DRAFTALIGN_SWAP_TOKEN", "DRAFTALIGN_POLICY_DIR", "DRAFTALIGN_VLLM_PYTHON", "DRAFTALIGN_CA_FILE"}
    own |= {f"DRAFTALIGN_{name}" for name in ("URL", "RUN", "SAMPLE_FRACTION", "TOKENS_PER_MINUTE")}
    assert documented - own == {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields}


def test_every_variable_that_the_code_names_is_documented() -> None:
    named = {n for path in sources() for n in re.findall(r"DRAFTALIGN_[A-Z_]*[A-Z]", path.read_text("utf-8"))}
    named.discard("DRAFTALIGN_X")  # stands for any
    assert named
    assert [name for name in sorted(named) if name not in page("docs/reference/settings.md")] == []


@pytest.mark.parametrize("kind", [AgentConfig, CanaryRule])
def test_every_field_of_the_agent_is_documented(kind: Any) -> None:
    text = page("docs/reference/settings.md")
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in text, field.name
        if isinstance(field.default, (int, float, str)) and field.default:
            assert f"`{field.default}`" in text, field.name


def options_of(path: str, name: str) -> list[str]:
    """Names of the fields of a dataclass."""
    found = [node for node in syntax(ROOT / path).body if isinstance(node, ast.ClassDef) and node.name == name]
    return [ast.unparse(one.target) for node in found for one in node.body if isinstance(one, ast.AnnAssign)]


def test_every_option_of_the_hook_is_documented() -> None:
    # Read from the source: importing the hook costs torch.
    options = options_of("rl_hooks/trainer/base.py", "HookOptions") + options_of(
        "rl_hooks/trainer/hook.py", "DrafterOptions"
    )
    arguments = options_of("rl_hooks/trainer/plan.py", "CaptureArguments")
    assert len(options) > 20
    assert len(arguments) > 14
    assert [name for name in options if f"`{name}`" not in page("docs/reference/settings.md")] == []
    assert [name for name in arguments if f"`{name}`" not in page("docs/guide/trainers.md")] == []


def test_every_command_and_option_is_documented() -> None:
    commands = typer.main.get_command(command_line).commands  # type: ignore[attr-defined]
    assert commands
    for name, command in commands.items():
        options = rows(page("docs/reference/settings.md"))[f"draftalign {name}"][0].strip("`").split()
        wanted = {text for p in command.params for text in (*p.opts, *p.secondary_opts)}
        assert set(options) == wanted, name


# --- calls and metrics ----------------------------------------------------------------------------------------------


@functools.cache
def api() -> FastAPI:
    # Never started: nothing is bound, and Redis is not asked.
    settings: dict[str, Any] = {"redis_url": SecretStr("redis://127.0.0.1:1/0")}
    return create_app(Settings(**settings))


def calls() -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in api().openapi()["paths"].items() for method in methods]


def anonymous(call: str) -> str:
    """Parameters by position: `/rollouts/{id}` and `/rollouts/{rollout_id}` are the same call."""
    return re.sub(r"\{[^}]*\}", "{}", call)


@pytest.mark.parametrize("document", ["docs/reference/api.md", "docs/guide/access.md"])
def test_every_call_of_the_api_is_in_the_tables(document: str) -> None:
    text = anonymous(page(document))
    missing = []
    for method, path in calls():
        wanted = anonymous(path)
        # api.md lists what operators read by path alone.
        if f"{method} {wanted}" not in text and f"`{wanted}`" not in text:
            missing.append(f"{method} {path}")
    assert missing == []


def test_the_scopes_in_the_table_are_those_that_are_checked() -> None:
    table = rows(page("docs/guide/access.md"))
    documented = {anonymous(call): cells[0] for call, cells in table.items()}
    for method, path in calls():
        if path in ("/healthz", "/readyz"):
            continue
        scopes = " or ".join(sorted(allowed_scopes(method, path)))
        assert documented[anonymous(f"{method} {path}")] == scopes, (method, path)


def test_every_metric_is_documented() -> None:
    tree = syntax(ROOT / "service" / "monitor" / "metrics.py")
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in literals if re.fullmatch(r"draftalign_[a-z_]*[a-z]", text)}
    prefixes = {text for text in literals if re.fullmatch(r"draftalign_[a-z_]*_", text)}
    assert len(names) > 15
    documented = set(re.findall(r"draftalign_[a-z_]+", page("docs/reference/metrics.md")))
    assert names - documented == set()
    assert [p for p in prefixes if not any(name.startswith(p) for name in documented)] == []


def test_every_metric_of_the_agent_is_documented() -> None:
    families = list(AgentMetrics().registry.collect())
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert names
    assert [name for name in sorted(names) if f"`{name}{{" not in page("docs/guide/engines.md")] == []


# --- what is stored -------------------------------------------------------------------------------------------------


def dict_keys(path: str, function: str) -> set[str]:
    """String keys of the dictionaries that a function or method builds."""
    found = {
        key.value
        for node in ast.walk(syntax(ROOT / path))
        if isinstance(node, ast.FunctionDef) and node.name == function
        for table in ast.walk(node)
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    assert found, (path, function)
    return found


def missing_words(words: Iterable[str], document: str) -> list[str]:
    text = set(re.findall(r"\w+", page(document)))
    return sorted(word for word in words if word not in text)


STATE = "docs/reference/state.md"
KEYS = [name for name, value in vars(Keys).items() if hasattr(value, "__set_name__")]


def test_every_redis_key_is_documented() -> None:
    keys = [getattr(Keys("r"), name) for name in KEYS]
    keys += [Keys.RUNS, Keys("r").batch("<batch_id>"), Keys("r").rollout("<rollout_id>"), Keys("r").orphan("<blob>")]
    assert len(keys) > 10
    named = [f"`{key.replace('{r}', '{run}')}`" for key in keys]
    assert [key for key in named if key not in page(STATE)] == []


def test_no_other_redis_key_is_built_from_the_prefix() -> None:
    built = {
        suffix
        for path in (ROOT / "service").rglob("*.py")
        for suffix in re.findall(r"prefix(?:\}| \+ \")([a-z_]+)", path.read_text("utf-8"))
    }
    assert built == {"batch", "orphan", "rollout"}
    assert [getattr(Keys("r"), name) for name in KEYS] == [Keys("r").prefix + name for name in KEYS]
    assert len(KEYS) == 28


def test_every_counter_and_field_that_is_stored_is_documented() -> None:
    assert missing_words(COUNTERS, STATE) == []
    assert missing_words(AcceptanceReport.model_fields, STATE) == []
    for module, function in (("learner", "save"), ("journal", "state")):
        assert missing_words(dict_keys(f"service/worker/{module}.py", function), STATE) == [], function


def fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def section(document: str, heading: str) -> str:
    """What a page says under a heading."""
    return page(document).partition(f"\n## {heading}")[2].partition("\n## ")[0]


def test_the_tables_of_records_have_the_fields_of_the_models_and_no_others() -> None:
    scores = section(STATE, "Score record")
    assert {name for cell in rows(scores) for name in cell.split(", ")} == set(fields(records.ScoreRecord))
    [sums] = re.findall(r"`\{([^}]*)\}`", scores)
    assert sums.split(", ") == fields(records.DrafterSums)
    for heading, kind in (("Acceptance record", records.AcceptanceRecord), ("Worker's gauges", records.WorkerGauges)):
        named = [name for cell in rows(section(STATE, heading)) for name in cell.split(", ")]
        assert sorted(named) == sorted(getattr(kind, "model_fields", None) or fields(kind)), heading
    answer = section(STATE, "`GET /alpha`")
    assert [name for name in fields(RunEvent) if name != "text" and f"`{name}`" not in answer] == []
    named = [name for cell in rows(answer) for name in cell.split(", ")]
    assert sorted(named) == sorted(AlphaAnswer.model_fields)


def test_the_table_of_events_has_the_kinds_and_fields_of_the_models_and_no_others() -> None:
    table = rows(section(STATE, "Events"))
    assert table.keys() == KINDS.keys()
    for kind, (cell,) in table.items():
        named = {name for code in re.findall(r"`([^`]*)`", cell) for name in code.split(", ")}
        assert named == KINDS[kind].model_fields.keys() - Event.model_fields.keys(), kind


def test_every_path_of_the_state_directory_is_documented() -> None:
    layout, tree = Layout(Path("/state")), page(STATE)
    of_run = [layout.run_json, layout.target, layout.heads, layout.drafters, layout.latest]
    of_run += [layout.history, layout.verdicts, layout.registry_lock, layout.worker, layout.spool]
    paths = [layout.spool_tmp, layout.valkey, *(path_of("RUN") for path_of in of_run)]
    named = [str(path.relative_to("/state")).replace("RUN", "<run>") for path in paths]
    assert [name for name in named if name not in tree] == []


# --- the walks and rooms of docs/reference/architecture.md ----------------------------------------------------------

#: Where the columns of a walk begin: what it says, and the files. The files' folder is in the nearest heading above.
SAYS, FILES = 32, 65


def steps_of_the_walks() -> list[tuple[str, list[Path]]]:
    """Names in the first column of each step, and the paths in its third."""
    text = page("docs/reference/architecture.md").partition("\n## Walk 1")[2].partition("\n## Read these")[0]
    found, folder = [], ROOT
    for line in "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).splitlines():
        if heading := re.search(r"  ([\w/]+)/$", line):
            folder = ROOT / heading.group(1)
        elif line[:2] == "  " and (named := re.findall(r"[\w/]+(?:\.(?:py|lua)|/(?= |$|;|,))", line[FILES:])):
            package = ROOT / folder.relative_to(ROOT).parts[0]
            bases = [folder, package, ROOT]
            paths = [next((base / n for base in bases if (base / n).exists()), folder / n) for n in named]
            found.append((line[:SAYS].strip(), paths))
    return found


def test_every_file_of_the_walks_exists() -> None:
    steps = steps_of_the_walks()
    assert len(steps) > 45
    assert [name_of(path) for _, paths in steps for path in paths if not path.exists()] == []


def names_of(tree: ast.Module) -> set[str]:
    """Functions and classes of a module, by name, and the functions of its classes, as `Class.function`."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
            found |= {f"{node.name}.{getattr(child, 'name', '')}" for child in getattr(node, "body", [])}
    return found


def test_every_name_of_the_walks_is_defined_in_the_files_beside_it() -> None:
    missing, looked_up = [], 0
    for said, paths in steps_of_the_walks():
        python = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.py")))]
        defined = set().union(*(names_of(syntax(file)) for file in python if file.suffix == ".py"))
        for name in re.findall(r"(?<![/\w])[A-Za-z_][\w.]*\b(?!:)", said.removeprefix("POST /acceptance")):
            looked_up += 1
            if name not in defined:
                missing.append((name, [name_of(path) for path in paths]))
    assert missing == []
    assert looked_up > 50


def test_the_list_of_rooms_has_every_room_and_no_other() -> None:
    block = (
        section("docs/reference/architecture.md", "Rooms and arrows")
        .partition("```\n")[2]
        .partition("```")[0]
        .splitlines()
    )
    begins = [block[0].index(f"{package}/") for package in ("service", "drafter", "rl_hooks")]
    for package, begin, end in zip(("service", "drafter", "rl_hooks"), begins, [*begins[1:], None], strict=True):
        cells = [line[begin:end].strip() for line in block[1:]]
        rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert {cell.partition("/")[0] for cell in cells if re.match(r"\w+/ ", cell)} == rooms, package


# --- links, proofs, sizes -------------------------------------------------------------------------------------------


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def heading_anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


def test_each_alert_names_a_heading_that_says_what_to_do() -> None:
    alerts = [rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]
    for alert in (rule for rule in alerts if "alert" in rule):
        path, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert anchor in heading_anchors(ROOT / path), alert["alert"]


def links(path: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in heading_anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or not path.is_file():
            continue
        reached.add(path)
        if path.suffix == ".md":
            waiting += [(path.parent / link.partition("#")[0]).resolve() for link in links(path)]
    assert [name_of(path) for path in PAGES if path not in reached] == []


def test_every_test_and_file_that_the_pages_name_exists() -> None:
    tests = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    functions = {name for path in tests for name in re.findall(r"def (test_\w+)\(", path.read_text("utf-8"))}
    modules = {path.stem for path in tests}
    named = set(re.findall(r"\b(test_[a-z0-9_]+)\b", all_pages()))
    assert len(named) > 40
    assert sorted(named - functions - modules) == []
    files = set(re.findall(r"`((?:drafter|rl_hooks|service|examples|tests|deploy)/[\w/.]+\.\w+)", all_pages()))
    assert sorted(file for file in files if not (ROOT / file).exists()) == []


def test_the_releases_of_vllm_are_the_same_wherever_they_are_said() -> None:
    first, last = re.fullmatch(r"vLLM 0\.(\d+) to 0\.(\d+)", KNOWN_RELEASES).groups()  # type: ignore[union-attr]
    known = {f"0.{minor}" for minor in range(int(first), int(last) + 1)}
    table = re.findall(r"^\| (0\.\d+)\.\d, .*?\| (run|read)", page("docs/guide/vllm.md"), re.MULTILINE)
    assert {release for release, _ in table} == known, "the table of what was run and what was read"
    run = sorted({release for release, how in table if how == "run"})
    assert f"| engines | vLLM {', '.join(run[:-1])} and {run[-1]}, " in page("README.md"), "those that were run"
    said = re.findall(r"\[(0\.\d+ to 0\.\d+)\]\((?:[\w/]*/)?vllm\.md#versions\)", all_pages())
    assert said
    assert set(said) == {KNOWN_RELEASES.removeprefix("vLLM ")}


def test_what_the_pages_install_is_in_the_checkout_with_its_extras() -> None:
    """By path: neither distribution is in a package index."""
    said = re.findall(r"pip install '?([^\s'`]*)", all_pages())
    ours = [name for name in said if name.startswith((".", "draftalign", "rl_hooks"))]
    assert len(ours) > 6
    for name in ours:
        folder, extras = name.rstrip("]").partition("[")[::2]
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"]), name


def promises() -> dict[str, str]:
    """Number and name of each promise -> what docs/reference/guarantees.md says under it."""
    parts = page("docs/reference/guarantees.md").split("\n## ")[1:]
    return {heading: text for heading, _, text in (part.partition("\n") for part in parts)}


def test_every_promise_has_its_tests_its_figure_and_its_limits() -> None:
    assert [int(heading.partition(".")[0]) for heading in promises()] == list(range(1, 21))
    for heading, text in promises().items():
        parts = re.findall(r"^\* \*\*([A-Z][a-z ]+)\.?\*\*", text, re.MULTILINE)
        assert parts == ["Promised", "Held by", "Figure", "Not promised"], heading
        promised = (
            text.partition("* **Promised.** ")[2].partition("\n* **")[0].partition("\n  * ")[0].partition("\n  |")[0]
        )
        assert len(re.split(r"\.\s+(?=[A-Z])", promised)) <= 4, f"{heading}: more belongs in a list below"
        held, figure = (text.partition(f"* **{name}")[2].partition("\n* **")[0] for name in ("Held by", "Figure"))
        assert re.search(r"`(pytest|python|make|DRAFTALIGN_\w+=\d+) ", figure), f"{heading}: which command prints it?"
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held)
        assert named, heading
        for path, function in named:
            assert f"def {function}(" in (ROOT / path).read_text("utf-8"), (heading, path, function)


def under(path: Path, anchor: str) -> str:
    """What a page says under the heading of that anchor, its sub-headings included; all of it without an anchor."""
    text = path.read_text(encoding="utf-8")
    headings = list(re.finditer(r"^(#+) (.+)$", text, re.MULTILINE))
    for place, heading in enumerate(headings):
        if anchor_of(heading[2]) == anchor:
            ends = (later.start() for later in headings[place + 1 :] if len(later[1]) <= len(heading[1]))
            return text[heading.end() : next(ends, len(text))]
    return "" if anchor else text


def figures(text: str) -> set[str]:
    """Numbers of two digits and more, those with a point, and counts (`9 of 11`). Others would be found on any page."""
    text = " ".join(text.replace("**", "").split())
    found = re.findall(r"(?<![\w.,])\d(?:,\d\d\d|\d)*(?:\.\d+)?(?![\w])", text)
    numbers = {f"{float(one.replace(',', '')):g}" for one in found if len(one) > 1}
    return numbers | set(re.findall(r"(?<![\w.,])\d[\d,]* of \d[\d,]*(?<!,)", text))


def judgements() -> list[tuple[str, str, str, str, list[tuple[str, str]]]]:
    """Number, *found*, verdict and command of each row of docs/lab/judgement.md, with its links: page, anchor."""
    found = []
    for line in page("docs/lab/judgement.md").splitlines():
        if re.match(r"\| \d+ \|", line):
            number, _, what, verdict, command = (cell.strip() for cell in line.strip("| ").split(" | "))
            linked = re.findall(r"\]\(([^)#\s]+)#?([^)\s]*)\)", line)
            found.append((number, what, verdict, command, linked))
    return found


def test_the_judgement_says_first_how_much_is_missed_and_each_row_is_short() -> None:
    text = page("docs/lab/judgement.md")
    verdicts = [re.match(r"held|\*\*missed\*\*|\*\*in part\*\*", verdict) for _, _, verdict, _, _ in judgements()]
    assert None not in verdicts
    words = [match.group() for match in verdicts if match]
    missed, in_part, held = (words.count(word) for word in ("**missed**", "**in part**", "held"))
    said = f"Of {len(words)} promises {missed} are missed, {in_part} are held in part, and {held} are held."
    assert text.splitlines()[2] == said
    assert [number for number, what, *_ in judgements() if len(what.split()) > 25] == []
    self_evident = {"3", "26"}  # the row says where it is missed
    fallen_short = {number for number, _, verdict, _, _ in judgements() if verdict.startswith("**")}
    assert fallen_short - set(bullets_of_the_judgement()) == self_evident


def bullets_of_the_judgement() -> dict[str, str]:
    """Number of a row -> what is said of it below the table."""
    below = page("docs/lab/judgement.md").partition("\n## ")[2].partition("\n## ")[0]
    below = re.sub(r"\(row \d+\)", "", below)
    said = re.findall(r"^\* \*\*([\d and]+)\.\*\*(.*?)(?=^\* |\Z)", below, re.MULTILINE | re.DOTALL)
    return {number: text for numbers, text in said for number in numbers.split(" and ")}


def test_what_the_judgement_found_stands_on_its_page() -> None:
    """Under the linked heading, or in a test that the row names; but a figure that says something else there passes.

    What is said of a row below the table is checked with it. Rows that link to no page are not checked.
    """
    missing, looked_up, lab, below = {}, 0, ROOT / "docs" / "lab", bullets_of_the_judgement()
    for number, what, _, command, linked in judgements():
        if not linked:
            continue
        there = "".join(under((lab / target).resolve(), anchor) for target, anchor in linked)
        there += "".join((ROOT / name).read_text("utf-8") for name in re.findall(r"`(tests/[\w/]+\.py)`", command))
        said = figures(f"{what} {below.get(number, '')}")
        looked_up += len(said)
        if away := said - figures(there):
            missing[number] = sorted(away)
    assert missing == {}
    assert looked_up > 130


def test_each_script_of_the_benchmarks_has_its_row() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    begun = set(re.findall(r"^\| `(\w+\.py)`", table, re.MULTILINE))
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    scripts = {path.name for path in files if "main" in names_of(syntax(path))}
    assert len(scripts) > 25
    assert begun == scripts
    named = set(re.findall(r"`(\w+\.py)`", table))
    assert {path.name for path in files} - {"__init__.py"} - named == set()


#: Run in the checkout without tests/ on the path, as a reader would. Each script is a fork, with torch imported.
_PARSED = """
import argparse, io, json, os, runpy, sys, traceback
import torch

parse = argparse.ArgumentParser.parse_args
def parsed(*arguments, **named):
    parse(*arguments, **named)
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = parsed

for script, lines in json.load(sys.stdin).items():
    sys.stdout.flush()
    if os.fork():
        if os.wait()[1]:
            print("refused:", script, "died")
        continue
    for line in lines:
        sys.argv, sys.stderr, taken, why = [script, *line], io.StringIO(), 1, ""
        try:
            if script.endswith(".py"):
                sys.path[0] = "benchmarks"
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            taken, why = ended.code, sys.stderr.getvalue()
        except Exception:
            why = traceback.format_exc()
        if taken:
            print("refused:", script, *line, why.strip().splitlines()[-1:])
    sys.stdout.flush()
    os._exit(0)
"""


def test_each_command_of_a_benchmark_that_the_pages_name_is_taken_by_it() -> None:
    """Its argument parser takes the line; nothing is run."""
    asked: dict[str, list[list[str]]] = {}
    for options in re.findall(r"\bpython (-m benchmarks\.\w+|benchmarks/\w+\.py)([^`\n|#]*)", all_pages()):
        line = shlex.split(re.split(r"  |\\|\.\.\.", re.sub(r"[\[\]]", "", options[1]))[0])
        lines = asked.setdefault(options[0].removeprefix("-m "), [])
        if (line := line or ["--help"]) not in lines:
            lines.append(line)
    assert len(asked) > 25
    command = [sys.executable, "-c", _PARSED]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert re.findall("^refused:.*", done.stdout, re.MULTILINE) == []


def test_every_method_that_the_pages_name_exists() -> None:
    classes = [node for path in sources() for node in ast.walk(syntax(path)) if isinstance(node, ast.ClassDef)]
    known = {node.name for node in classes}
    members = {
        f"{node.name}.{name}"
        for node in classes
        for part in ast.walk(node)
        if (name := getattr(part, "name", None) or getattr(part, "attr", None) or getattr(part, "id", None))
    }
    named = set(re.findall(r"\b([A-Z]\w+\.[a-z_]\w+)", all_pages()))
    found = {name for name in named if name.partition(".")[0] in known}
    assert len(found) > 20
    assert sorted(found - members) == []


def test_every_command_that_readme_and_contributing_name_exists() -> None:
    made_by = "".join(path.read_text() for path in (ROOT / "Makefile", *(ROOT / "make").iterdir()))
    targets = set(re.findall(r"^([a-z]+):", made_by, re.MULTILINE))
    commands = set(typer.main.get_command(command_line).commands)  # type: ignore[attr-defined]
    text = "\n".join(page(name) for name in ("README.md", "CONTRIBUTING.md", "docs/guide/quickstart.md"))
    made = set(re.findall(r"(?:^|`|[a-z] )make ([a-z]+)\b", text, re.MULTILINE))
    run = set(re.findall(r"(?:^|[`/])draftalign[ -]([a-z]+)\b", text, re.MULTILINE))
    assert {"demo", "up", "test"} <= made
    assert {"agent", "convert"} <= run
    assert (made - targets, run - commands) == (set(), set())


def test_no_page_writes_a_drafter_where_the_checkout_has_a_folder() -> None:
    """A user types the quick start in the checkout, in which `drafter/` is a package."""
    said = r"(?:draftalign (?:convert|download) (?:[A-Z]+ )?|--out |initial_drafter=\")([\w-]+)/"
    named = set(re.findall(said, all_pages()))
    assert "my-drafter" in named
    assert [name for name in sorted(named) if (ROOT / name).exists()] == []


def test_every_path_that_contributing_names_exists() -> None:
    named = re.findall(r"\b((?:docs|tests|drafter|rl_hooks|service|benchmarks)/[\w/.]*\w/?)", page("CONTRIBUTING.md"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(page("README.md").splitlines()) < 100


def terms() -> set[str]:
    """Words that docs/words.md gives a meaning, without symbols."""
    own = page("docs/words.md").partition("## Mechanisms")[0]
    return {re.sub(r" (α|K)$", "", name) for name in re.findall(r"^\| ([^|]+) \|", own, re.MULTILINE)} - {"word"}


def test_a_term_of_the_glossary_has_one_row() -> None:
    own = page("docs/words.md").partition("## Mechanisms")[0]
    named = [name for name in re.findall(r"^\| ([^|]+) \|", own, re.MULTILINE) if name != "word"]
    assert [name for name in sorted(set(named)) if named.count(name) > 1] == []


def test_every_term_of_the_glossary_is_used() -> None:
    assert len(terms()) >= 30
    read = (*PAGES, *sources(), ROOT / "service" / "api" / "page.html")
    used = "\n".join(path.read_text("utf-8") for path in read if path.name != "words.md").lower()
    assert [term for term in sorted(terms()) if term not in used] == []


#: Rooms and pages whose words were gone through.
WRITTEN_AGAIN = (
    *("service", "drafter", "rl_hooks"),
    *("docs", "deploy/README.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
#: What docs/words.md replaces, by what to say.
BANNED = {
    r"heirs?": "successor",
    r"innocent|acquit\w*|blameless|to blame": "say which delivery is not counted",
    r"bury|buried|doomed": "end as a dead letter; deleted",
    r"anew": "again, from scratch",
    r"likeliest": "most probable",
    r"for ever": "never ends; say what ends it",
    r"wakes? up": "a paused process goes on",
    r"so (many|long|much) ([a-z]+ ){0,3}(as|that|is|at)": "say the number's meaning",
}


@pytest.mark.parametrize("place", WRITTEN_AGAIN)
def test_words_that_have_to_be_read_twice_do_not_come_back(place: str) -> None:
    root = ROOT / place
    paths = [root] if root.is_file() else [p for p in root.rglob("*") if p.suffix in (".py", ".lua", ".md")]
    paths = [path for path in paths if path.name != "words.md"]  # which names them, to say what to use
    assert paths
    found = {
        f"{name_of(path)}: {match.group()}": instead
        for path in paths
        for word, instead in BANNED.items()
        for match in re.finditer(rf"(?<![a-z])({word})(?![a-z])", path.read_text("utf-8"), re.IGNORECASE)
    }
    assert found == {}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_do_not_sell(path: Path) -> None:
    sold = r"\b(blazing|seamless\w*|cutting-edge|effortless\w*|state-of-the-art|world-class|game-chang\w+|leverag\w+)\b"
    assert re.findall(sold, path.read_text(encoding="utf-8").lower()) == []


# --- docstrings -----------------------------------------------------------------------------------------------------


def undocumented(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Public names of a module or class, and it itself, that lack a docstring."""
    if ast.get_docstring(node) is None:
        yield name
    for child in node.body:
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, f"{name}.{child.name}")
        elif ast.get_docstring(child) is None:
            yield f"{name}.{child.name}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert list(undocumented(syntax(path), name_of(path))) == []


def test_the_docstring_check_notices_what_is_missing() -> None:
    tree = ast.parse('"""m"""\nclass A:\n  """a"""\n  def b(self): ...\n  def _c(self): ...\ndef d():\n  """d"""\n')
    assert list(undocumented(tree, "m")) == ["m.A.b"]


# --- exported names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_an_export_list_is_sorted_and_names_what_exists(path: Path) -> None:
    tree = syntax(path)
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    for exported in (ast.literal_eval(value) for value in lists):
        assert list(exported) == sorted(exported)
        lazily = [inner for node in tree.body if isinstance(node, ast.If) for inner in node.body]
        defined = {name for node in [*tree.body, *lazily] for name in defined_names(node)}
        assert set(exported) - defined == set()


def defined_names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.ImportFrom() | ast.Import():
            yield from (alias.asname or alias.name for alias in node.names)
        case ast.Assign():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        case ast.AnnAssign():
            yield ast.unparse(node.target)


def test_what_is_listed_as_not_quick_exists() -> None:
    for listed in (ROOT / "tests/not_quick.txt").read_text().split():
        path, _, function = listed.partition("::")
        assert (ROOT / path).is_file(), listed
        assert f"def {function}(" in (ROOT / path).read_text() or not function, listed
