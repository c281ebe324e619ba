"""`draftalign demo --engine vllm` in a short form: RL, service, agent and vLLM as processes.

The first new version comes after 12 to 20 steps or more, as the machine allows; swaps on a real vLLM are proved by
test_vllm_server_agent.py. What this shows is that the whole loop runs and counts right.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path

import pytest
from helpers.engine.engine_fixtures import demo_drafter, write
from helpers.forked import ROOT, run_fork
from helpers.ports import free_port

from examples.demo_report import StepRow

STEPS = 12


def test_the_demo_runs_on_a_real_vllm_and_its_alphas_agree(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = str(Path(__file__).parents[1] / "examples/begun_demo.py")
    argv = [script, str(write(demo_drafter(), tmp_path / "first")), "demo", "--engine", "vllm"]
    argv += ["--steps", str(STEPS), "--out", str(out), "--port", str(free_port())]
    done = run_fork("trainer", *argv, directory=ROOT, environment=os.environ, seconds=450)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))

    served = sorted({row["drafter_version"] for row in rows})
    print(f"served {served}; {rows[-1]['versions_published']} versions published")
    assert len(served) <= 1 + rows[-1]["versions_published"]  # the first drafter is not among the published

    # The same quantity, by vLLM's counters and by replay; the interval is of 95 %: 3 of 12 are outside in 2 % of runs.
    agree = [found for row in rows if (found := StepRow(**row).replay_agrees) is not None]
    print(f"replay α inside the interval of live α in {sum(agree)} of {len(agree)} steps")
    assert len(agree) >= 0.8 * STEPS
    assert sum(agree) >= 0.75 * len(agree)
    pure = [row for row in rows if row["drafter_versions"] == 1 and row["alpha_served"] is not None]
    live, replayed = (statistics.fmean(row[name] for row in pure) for name in ("alpha_live", "alpha_served"))
    assert replayed == pytest.approx(live, rel=0.04)
    # So early in the run the policy moves faster than its drafter can follow; but a dead drafter's α is 1.
    assert all(1.0 < row["alpha_live_low"] <= row["alpha_live"] <= 5.0 for row in rows)

    answers = re.findall(r'"(?:GET|POST) (?:/v1|/drafter|/policy|/rounds)\S* HTTP/1.1" (\d+)', _log(out))
    assert len(answers) > STEPS
    assert set(answers) == {"200"}


def _log(out: Path) -> str:
    (log,) = out.rglob("vllm.log")
    return log.read_text(errors="replace")
