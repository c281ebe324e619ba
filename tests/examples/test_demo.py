"""The whole loop in its short form: real RL, a real engine, the service as processes; the worker is killed half-way."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.engine_fixtures import demo_drafter, write
from helpers.forked import ROOT, forks, run_fork
from helpers.ports import free_port

from examples import elicit
from examples.composition import explain
from examples.demo import DemoConfig, LiveCount, Session, _warm_up_prompts, scored_points
from examples.demo_report import StepRow, _part_reach, _table, features_verdict, kept_promises, plot_title
from service.errors import ServiceError
from service.monitor.records import DrafterSums

STEPS = 40
FIELDS = {
    *("step", "policy_version", "drafter_version", "reward", "entropy"),
    *("alpha_live", "alpha_served", "alpha_frozen", "alpha_ngram", "publication_lag"),
}


def child_of(out: Path, name: str) -> int | None:
    """Process id of the service's child `name` that works below `out`, by its environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        state = [v for v in environment if v.startswith(f"DRAFTALIGN_STATE_DIR={out}/".encode())]
        if state and f"DRAFTALIGN_CHILD={name}".encode() in environment:
            return int(entry.name)
    return None


def left_over(out: Path) -> list[str]:
    """Command lines of processes that still mention the demo's directory."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(out) in line and "pytest" not in line:
                lines.append(line)
    return lines


def run_to_its_end(*argv: str) -> subprocess.CompletedProcess[str]:
    """A demo, which is a fork of what has imported TRL."""
    return run_fork("trainer", *argv, directory=ROOT, environment=os.environ, seconds=850)


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


@pytest.mark.demo
def test_the_drafter_stays_in_step_and_a_killed_worker_is_not_noticed(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    first = write(demo_drafter(), tmp_path / "first")
    argv = [str(first), "demo", "--steps", str(STEPS), "--seed", "3", "--out", str(out), "--port", str(free_port())]
    script = str(Path(__file__).with_name("begun_demo.py"))
    demo = forks("trainer").fork(script, argv, os.environ | {"PYTHONPATH": str(ROOT)}, log)
    killed = False
    try:
        while demo.poll(0.2) is None:
            if not killed and b"step  20 " in log.read_bytes():
                worker = child_of(out, "worker")
                assert worker is not None
                os.kill(worker, signal.SIGKILL)
                killed = True
    finally:
        demo.kill()
    text = log.read_text(errors="replace")
    assert demo.returncode == 0, text[-4000:]
    assert killed
    assert "worker ended" in text  # the supervisor said so

    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row.keys() >= FIELDS for row in rows)
    assert all(row["alpha_served"] is not None for row in rows), "a step was lost when the worker was killed"
    assert rows[-1]["versions_published"] >= 1
    assert rows[-1]["tokens_trained"] > 0

    # RL is real: the policy learns. The aligned drafter follows; the frozen one does not.
    assert mean(rows[-5:], "reward") > mean(rows[:5], "reward") + 0.2
    compared = [row for row in rows if row["alpha_frozen"] is not None]  # a worker that is behind compares some
    assert len(compared) >= 2, "a busy machine leaves few; the means below need two"
    assert mean(compared[-2:], "alpha_served") > mean(compared[-2:], "alpha_frozen") + 0.1
    assert all(1.0 <= row[name] <= 5.0 for row in rows for name in ("alpha_live", "alpha_served"))
    assert all(1.0 <= row["alpha_frozen"] <= 5.0 for row in compared)

    # Live α and replay α are the same quantity: rollouts that one drafter version served, within sampling error.
    pure = [row for row in rows if row["drafter_versions"] == 1]
    inside = [StepRow(**row).replay_agrees for row in pure]
    assert inside.count(True) >= 0.85 * len(inside)
    assert math.isclose(mean(pure, "alpha_live"), mean(pure, "alpha_served"), rel_tol=0.03)

    summary = json.loads((out / "summary.json").read_text())
    assert summary["versions_published"] >= 2
    # On a loaded machine the worker may have scored too few steps by then; the report says so.
    assert set(summary["drift_share_of_limit"]) == {"fast", "slow"} or "drift: not watched yet" in text
    assert summary["tokens_trained"] > 0
    assert "does not always fall" in summary["explanation"]
    assert summary["features_wrong"] is None
    decoders = summary["decoders"]
    assert decoders["greedy_texts_equal"] == decoders["prompts"] == 64
    assert 1.2 < decoders["alpha_chain"] < decoders["alpha_tree"] <= 5
    assert decoders["alpha_chain_greedy"] < decoders["alpha_tree_greedy"] <= 5
    assert (out / "alpha.png").stat().st_size > 10_000
    assert sorted(p.name for p in out.iterdir()) == ["alpha.png", "steps.jsonl", "summary.json"]
    assert left_over(out) == []


@pytest.mark.demo
def test_a_hook_that_sends_garbage_fails_the_demo(tmp_path: Path) -> None:
    """Each rollout has another one's features; zeros, which are further from the truth, are in `test_recall`."""
    arguments = ["demo", "--task", "recall", "--steps", "16", "--seed", "1", "--out", str(tmp_path / "out")]
    script = [str(Path(__file__).with_name("broken_hook.py")), "shuffled", "100"]
    found = run_to_its_end(*script, *arguments, "--port", str(free_port()))
    assert found.returncode != 0, found.stdout[-4000:]
    assert "the hook's features are not the engine's" in found.stderr, found.stderr[-4000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "the hook's features" in summary["features_wrong"]


@pytest.mark.demo
def test_a_run_from_scratch_says_how_far_its_first_drafter_is_and_then_drafts_with_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["demo", "--start", "scratch", "--steps", "30", "--out", str(out), "--port", str(free_port())]
    found = run_to_its_end("service.cli", *arguments)
    assert found.returncode == 0, found.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(30))
    drafted = [row for row in rows if row["drafter_version"]]
    assert rows[0]["drafter_version"] == ""  # there was none
    assert rows[0]["live_rounds"] == 0
    assert len(drafted) >= 3
    assert drafted[0]["drafter_version"].startswith("v000001-")
    assert all(row["alpha_served"] is not None for row in drafted)
    told = found.stdout.replace("\n", " ")  # rich breaks lines
    assert re.search(r"no drafter yet\. .*[\d,]+ of 4,000 response tokens gathered", told), told[:4000]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["versions_published"] >= 1
    assert summary["features_wrong"] is None


def test_a_general_drafter_learns_from_answers_to_other_prompts_of_the_same_length() -> None:
    tokenizer = elicit.TASK.build_tokenizer()
    own, other = (_warm_up_prompts(DemoConfig(start=start), tokenizer) for start in ("in-domain", "general"))
    assert len(own) == len(other)
    assert {len(prompt) for prompt in own} == {len(prompt) for prompt in other} == {elicit.PROMPT_TOKENS}
    sums = {tokenizer.encode("sum")[0]}
    assert all(prompt[0] in sums for prompt in own)
    assert sum(prompt[0] in sums for prompt in other) < 0.1 * len(other)
    assert not {0, elicit.TASK.eos_id} & {token for prompt in other for token in prompt}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--start", "warm"], "in-domain, general, scratch"), (["--start", "scratch", "--engine", "vllm"], "--start in")],
)
def test_a_start_that_cannot_be_is_said_in_one_line(arguments: list[str], expected: str, tmp_path: Path) -> None:
    command = ["service.cli", "demo", *arguments, "--out", str(tmp_path / "out")]
    found = run_to_its_end(*command)
    assert found.returncode != 0
    assert expected in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_whose_first_drafter_came_after_its_last_step_says_so() -> None:
    said = "3,100 of 4,000 response tokens gathered"
    nothing = types.SimpleNamespace(flush=lambda _: None)
    run = types.SimpleNamespace(attachment=nothing, live={0: LiveCount(), 1: LiveCount()}, _headline=lambda: said)
    with pytest.raises(ServiceError, match=f"any of 2 steps.*--steps. {said}"):
        Session.finish(run)  # type: ignore[arg-type]


def step_row(step: int, **known: Any) -> StepRow:
    fields: dict[str, Any] = dict.fromkeys(StepRow.__dataclass_fields__)
    fields |= {"step": step, "drafter_version": "v000001-aa", "hook_overhead_seconds": 0.004}
    for name in ("reward", "entropy", "alpha_live", "alpha_ngram"):
        fields[name] = 1.0
    return StepRow(**fields | known)


def passed_over_rows() -> list[StepRow]:
    """As a worker leaves them that is behind: every fifth step was compared with all drafters."""
    compared = {
        "alpha_frozen": 2.0,
        "publication_lag": 0.1,
        "versions_published": 1,
        "versions_refused": 0,
        "tokens_trained": 9,
    }
    alphas = [3.75, *[2.0] * 10, *[4.7] * 9]
    return [step_row(n, alpha_served=a, **compared if n % 5 == 0 else {}) for n, a in enumerate(alphas)]


def test_the_table_has_no_empty_cells() -> None:
    found = _table(passed_over_rows())
    cells = [list(column.cells) for column in found.columns]
    assert [len(column) for column in cells] == [4] * len(cells)
    assert not any(cell == "-" for column in cells for cell in column)
    assert "4 of 20 RL steps" in str(found.title)


def test_the_plot_is_titled_by_what_it_shows() -> None:
    """Both means are of the same steps: 3.75, 2.0, 2.0 and 4.7 beside 2.0, though the last five steps have 4.7."""
    said = "3.8 at the start, 2.0 at its lowest (step 1)"
    both = "over the last 4 steps that compared both (0 to 15): aligned 3.1, frozen 2.0"
    assert plot_title(passed_over_rows()) == f"α over 20 RL steps: {said}; {both}"
    alone = [step_row(n, alpha_served=3.0) for n in range(3)]
    assert plot_title(alone).endswith("3.0 at its lowest (step 0), 3.0 over the last 3 with a figure")
    assert plot_title([step_row(0, alpha_served=None)]) == "α over 1 RL steps"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "went from 9% to 88%, and on those the first drafter had only 2.24 from the start. Drift"),
        ({"first_worked": 4.0}, "from 9% to 88%, and on those the first drafter had 4.00 from the start."),
        ({"first_worked": None}, "What is written changed: answers that work the task out went from 9% to 88%. Drift"),
        ({"last_worked_share": 0.09}, "stayed at 9%, and on those the first drafter had only 2.24"),
        ({"first_all": None}, "Too few rollouts"),
    ],
)
def test_what_a_run_wrote_is_said_in_words_in_every_case(changed: dict[str, float | None], said: str) -> None:
    parts: dict[str, float | None] = {
        "first_all": 3.81,
        "last_all": 1.68,
        "first_worked": 2.24,
        "last_with_initial_features": 2.11,
    }
    shares = {"first_worked_share": 0.09, "last_worked_share": 0.88}
    assert said in explain(parts | shares | changed, 2.49)
    assert "drafters that served them" not in explain(parts | shares | changed, None)


def test_the_plot_of_a_task_that_changes_names_both_falls() -> None:
    rows = [step_row(n, alpha_served=a) for n, a in enumerate([3.5, 2.5, 3.0, 3.5, 3.4, 2.0, 3.0, 3.0])]
    said = plot_title(rows, changes=(4,))
    assert said.startswith(
        "α over 8 RL steps: 3.5 at the start, 2.5 at its lowest (step 1), 2.0 after the task changed (step 5)"
    )


@pytest.mark.parametrize(("replayed", "wrong"), [(3.0, False), (2.8, False), (2.6, True), (1.1, True), (3.5, True)])
def test_features_that_are_not_the_engines_are_named(replayed: float, wrong: bool) -> None:
    rows = [step_row(n, drafter_versions=1, alpha_served=replayed, alpha_live=3.0) for n in range(20)]
    verdict = features_verdict(rows)
    assert bool(verdict) is wrong
    assert not wrong or f"{replayed:.2f} replayed" in str(verdict)
    mixed = [step_row(n, drafter_versions=2, alpha_served=replayed, alpha_live=3.0) for n in range(20)]
    assert features_verdict(mixed) is None  # which drafter wrote what is not known


@pytest.mark.parametrize(
    ("low", "high", "reach", "agrees"),
    [
        (2.9, 3.3, 0.0, True),  # 3.2 within the interval of live α
        (2.9, 3.1, 0.0, False),
        (2.9, 3.1, None, False),
        (2.9, 3.1, 0.18, True),  # the hypotenuse of 0.1 and 0.18 is 0.206
        (2.9, 3.1, 0.17, False),  # of 0.17, 0.197
        (3.0, 3.0, 0.21, True),
    ],
)
def test_replay_of_a_part_may_differ_from_live_by_what_a_part_may_say(
    low: float, high: float, reach: float | None, agrees: bool
) -> None:
    known = {"alpha_live": 3.0, "alpha_live_low": low, "alpha_live_high": high, "alpha_served_reach": reach}
    assert step_row(0, drafter_versions=1, alpha_served=3.2, **known).replay_agrees is agrees
    assert step_row(0, drafter_versions=2, alpha_served=3.2, **known).replay_agrees is None
    assert step_row(0, drafter_versions=1, alpha_served=None, **known).replay_agrees is None


def test_a_part_reaches_as_far_as_what_was_not_replayed_can_move_it() -> None:
    """Of 24 drawn out of 96 without replacement, 95 % of the intervals hold the α of all."""
    draw = random.Random(7)
    held = 0
    for _ in range(1000):
        all_rounds = [(draw.randint(1, 40), draw.randint(8, 12)) for _ in range(96)]  # tokens, rounds
        alpha = sum(t for t, _ in all_rounds) / sum(r for _, r in all_rounds)
        part = DrafterSums.of(*zip(*draw.sample(all_rounds, 24), strict=True))
        point = {"alpha_served_half_width": part.half_width, "rollouts_replayed": int(part.rollouts)}
        reach = _part_reach(point, rollouts=96)
        assert reach is not None
        held += abs(part.alpha - alpha) <= reach
    assert 0.92 <= held / 1000 <= 0.97
    assert _part_reach({"alpha_served_half_width": 0.1, "rollouts_replayed": 96}, rollouts=96) == 0.0
    assert _part_reach({"alpha_served_half_width": None, "rollouts_replayed": 1}, rollouts=96) is None


def test_a_policy_version_that_only_the_engine_counted_is_not_taken_for_scored() -> None:
    counted, scored = {"policy_version": 4, "alpha_served": None}, {"policy_version": 3, "alpha_served": 2.0}
    assert scored_points({"points": [scored, counted]}) == {3: scored}


def test_a_redis_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    argv = ["service.cli", "demo", "--out", str(tmp_path / "out"), "--port", str(free_port())]
    url = f"redis://127.0.0.1:{free_port()}"
    found = run_to_its_end(*argv, "--redis-url", url)
    assert found.returncode != 0
    assert f"no Redis answers at {url}" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["service.cli", "demo", "--out", str(tmp_path / "out"), "--port", str(port)]
        found = run_to_its_end(*argv)
    assert found.returncode != 0
    assert f"port {port} on 127.0.0.1 is taken" in found.stderr
    assert "Traceback" not in found.stderr


def test_promises_are_added_up_beside_what_came_of_them() -> None:
    events = [
        {"event": "published", "promised": 9.0},
        {"event": "realised", "promised": 0.10, "realised": 0.05},
        {"event": "realised", "promised": 0.20, "realised": -0.02},
    ]
    found = kept_promises(events)
    assert found["promises_measured"] == 2
    assert found["promised_log_gain"] == pytest.approx(math.log(1.1 * 1.2))
    assert found["realised_to_promised"] == pytest.approx(math.log(1.05 * 0.98) / math.log(1.1 * 1.2))
    assert kept_promises([])["realised_to_promised"] is None
