"""Each cause of a drift alarm, for real: `draftalign up`, Prometheus with the shipped rules, and Alertmanager.

    python benchmarks/alarm_trial.py       some minutes; ends by itself, with 1 where a cause was not named rightly

Needs `prometheus` and `prometheus-alertmanager` (Debian's names) on the path. The policy is the tests' Markov chain,
the drafter is trained on it for some seconds, and the engines are counts that this script makes from replays with the
features that engines have. Everything listens on loopback and lives in a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.worker.worker_fixtures import HIDDEN, World

from drafter.batch import load_batch
from drafter.files.kinds import write_kind
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.demo import free_port
from rl_hooks.wire import CONTENT_TYPE
from service.storage.layout import Layout
from service.storage.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
CALM_TICKS, TROUBLED_TICKS, ROLLOUTS = 45, 25, 64
ENVIRONMENT = {
    "DRAFTALIGN_GATE_MIN_GAIN": "1000000",  # what is served changes by hand only
    "DRAFTALIGN_TRAIN_PASSES": "0.1",
    "DRAFTALIGN_CHECKPOINT_SECONDS": "1",
    "DRAFTALIGN_LOG_LEVEL": "WARNING",
}


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Send the aux layers in another order."""
    tensors["aux_hidden"] = tensors["aux_hidden"].roll(HIDDEN, dims=1)


@dataclass
class Case:
    """A run, what happens to it, and the cause that must be named (None: no alarm)."""

    run: str
    cause: str | None
    alarm: bool = True
    head: Callable[[torch.Tensor], torch.Tensor] | None = None
    change: Callable[[dict[str, torch.Tensor]], None] | None = None
    short_answers: bool = False
    tagged: bool = True
    live: bool = True
    damaged: bool = False
    world: World = field(default_factory=World)


def moved(head: torch.Tensor) -> torch.Tensor:
    """A policy that does something else."""
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(5))
    return 0.98 * head + 0.2 * noise


def sharpened(head: torch.Tensor) -> torch.Tensor:
    """A policy that is surer of itself, and a little of something else."""
    return 1.75 * moved(head)


CASES = (
    Case("calm", None, alarm=False),
    Case("moved", "policy moved", head=moved),
    Case("sharpened", "policy sharpened", head=sharpened),
    Case("aux-swapped", "features or selection", change=swapped),
    Case("aux-swapped-no-engines", "features or policy", change=swapped, live=False),
    Case("other-prompts", "prompts", alarm=False, short_answers=True),
    Case("other-prompts-untagged", "policy moved, or prompts", short_answers=True, tagged=False),
    Case("damaged-drafter", "drafter", damaged=True),
)


class Trial:
    """The programs, and what is sent to them."""

    def __init__(self, place: Path, drafter: Eagle3Drafter) -> None:
        self.place, self.drafter = place, drafter
        self.ports = {name: free_port() for name in ("api", "prometheus", "alertmanager")}
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.ports['api']}", timeout=30)
        self.registry = Registry(Layout(place / "state"))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start all three, and stop them at the end."""
        rules = ROOT / "deploy" / "prometheus" / "rules.yml"
        (self.place / "prometheus.yml").write_text(
            "global: {scrape_interval: 5s, evaluation_interval: 5s}\n"
            f"rule_files: [{rules}]\n"
            "alerting: {alertmanagers: [{static_configs: "
            f"[{{targets: ['127.0.0.1:{self.ports['alertmanager']}']}}]}}]}}\n"
            "scrape_configs: [{job_name: draftalign, static_configs: "
            f"[{{targets: ['127.0.0.1:{self.ports['api']}']}}]}}]\n"
        )
        (self.place / "alertmanager.yml").write_text(
            "route: {receiver: none, group_wait: 1s}\nreceivers: [{name: none}]\n"
        )
        up = [sys.executable, "-m", "service.cli", "up", "--state-dir", str(self.place / "state")]
        commands = {
            "draftalign": [*up, "--port", str(self.ports["api"])],
            "prometheus": [
                *("prometheus", f"--config.file={self.place}/prometheus.yml", f"--storage.tsdb.path={self.place}/tsdb"),
                f"--web.listen-address=127.0.0.1:{self.ports['prometheus']}",
            ],
            "alertmanager": [
                *("prometheus-alertmanager", f"--config.file={self.place}/alertmanager.yml"),
                *(f"--storage.path={self.place}/alerts", "--cluster.listen-address="),
                f"--web.listen-address=127.0.0.1:{self.ports['alertmanager']}",
            ],
        }
        started = []
        try:
            for name, command in commands.items():
                log = (self.place / f"{name}.log").open("w")
                environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            wait(lambda: self.api.get("/readyz").status_code == 200, 120)
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)

    def register(self, case: Case) -> None:
        """Register the run with the drafter."""
        headers = {"Content-Type": CONTENT_TYPE}
        body = case.world.run_file(drafter=self.drafter)
        self.api.put(f"/runs/{case.run}", content=body, headers=headers).raise_for_status()

    def post(self, case: Case, tick: int, *, troubled: bool) -> None:
        """Send one tick of rollouts."""
        tokens = lengths(case, troubled)
        more: dict[str, Any] = {"strata": ["short" if n < 10 else "long" for n in tokens]} if case.tagged else {}
        body = case.world.rollout_file(
            f"{case.run}-{tick}",
            policy_version=int(troubled),
            lengths=tokens,
            change=case.change if troubled else None,
            run=case.run,
            **more,
        )
        self.api.post("/rollouts", content=body, headers={"Content-Type": CONTENT_TYPE}).raise_for_status()

    def report(self, case: Case, *, troubled: bool) -> None:
        """Report what an engine would have counted: it has the right features, and the drafter that is served."""
        if not case.live:
            return
        path = self.place / "live.safetensors"
        path.write_bytes(case.world.rollout_file("live", policy_version=int(troubled), lengths=lengths(case, troubled)))
        drafter = damaged(self.drafter) if troubled and case.damaged else self.drafter
        found = replay(drafter, load_batch(path), case.world.policy(int(troubled)), depth=4, drafting="probabilistic")
        scale = 3000 / float(found.rounds.sum())
        tokens = round(float(found.tokens.sum()) * scale)
        wait(lambda: self.registry.latest(case.run) is not None, 60)  # the worker publishes the drafter that was sent
        served = self.registry.latest(case.run)
        report = {
            **{"run": case.run, "reporter": f"engine/{case.run}", "engine": "trial", "rounds": 3000},
            **{"drafter_version": "" if served is None else served.version, "policy_version": int(troubled)},
            **{"accepted_tokens": tokens - 3000, "emitted_tokens": tokens, "drafted_tokens": 12000},
        }
        self.api.post("/acceptance", json=report).raise_for_status()

    def make_trouble(self, case: Case) -> None:
        """Change the policy's head, or serve a damaged drafter, as a person might."""
        if case.head is not None:
            case.world.heads[1] = case.head(case.world.heads[0])
            body = case.world.head_file(1)
            self.api.put(
                f"/runs/{case.run}/head", content=body, headers={"Content-Type": CONTENT_TYPE}
            ).raise_for_status()
        if case.damaged:
            before = self.registry.latest(case.run)
            assert before is not None
            staged = self.registry.stage(case.run)
            staged.mkdir(parents=True, exist_ok=True)
            write_kind(staged, damaged(self.drafter))
            self.registry.publish(
                case.run,
                staged,
                policy_version=1,
                parent=before.version,
                config_fingerprint=before.config_fingerprint,
                d2t_sha256=before.d2t_sha256,
                aux_layers=before.aux_layers,
                reason="by hand",
            )

    def drained(self) -> bool:
        """Whether every queue is empty."""
        lines = self.api.get("/metrics").text.splitlines()
        return all(float(line.split()[-1]) == 0 for line in lines if line.startswith("draftalign_queue_entries"))

    def alerts(self) -> dict[str, str]:
        """What Alertmanager has of the drift alarm: description by run."""
        found = httpx.get(f"http://127.0.0.1:{self.ports['alertmanager']}/api/v2/alerts", timeout=30).json()
        names = ("DraftalignAlphaFalling", "DraftalignAlphaDrifting")
        return {a["labels"]["run"]: a["annotations"]["description"] for a in found if a["labels"]["alertname"] in names}

    def drift_command(self, action: str, run: str) -> None:
        """`draftalign drift`, as a person types it."""
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "drift",
            action,
            "--run",
            run,
            "--service",
            str(self.api.base_url),
        ]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def lengths(case: Case, troubled: bool) -> list[int]:
    """Tokens of a tick's rollouts: a third are short answers, or nearly all."""
    short = 58 if troubled and case.short_answers else 20
    return [6] * short + [24] * (ROLLOUTS - short)


def damaged(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The drafter with noise in its weights; always the same."""
    worse = Eagle3Drafter(drafter.config, drafter.vocabulary)
    worse.load_state_dict(drafter.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in worse.parameters():
            parameter.add_(0.6 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return worse


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for something; False if it did not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return True
        time.sleep(1)
    return False


def main() -> int:
    """Run all cases at once; prints a line for each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    missing = [name for name in ("prometheus", "prometheus-alertmanager") if shutil.which(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        trial = Trial(place, World().trained_drafter(place, steps=150))
        with trial.running():
            for troubled in (False, True):
                for case in CASES:
                    (trial.make_trouble if troubled else trial.register)(case)
                    trial.report(case, troubled=troubled)
                ticks = range(CALM_TICKS, CALM_TICKS + TROUBLED_TICKS) if troubled else range(CALM_TICKS)
                for tick in ticks:
                    for case in CASES:
                        trial.post(case, tick, troubled=troubled)
                wait(trial.drained, 300)
            expected = {case.run for case in CASES if case.alarm}
            wait(lambda: expected <= set(trial.alerts()), 150)
            alerts = trial.alerts()
            right = 0
            for case in CASES:
                found = trial.api.get("/alpha", params={"run": case.run}).json()
                why = found["cause"] or {"cause": None, "text": "unknown"}
                named = why["cause"] == case.cause and (case.run in alerts) == case.alarm
                named = named and (not case.alarm or f"Cause: {case.cause} (" in alerts[case.run])
                right += int(named)
                print(f"{'right' if named else 'WRONG'}  {case.run}: wanted {case.cause}")
                print(f"       /alpha: {why['text']}\n       page:   {found['headline']['text']}")
                print(f"       alert:  {alerts.get(case.run, 'none')}")
            print(f"{right} of {len(CASES)} named rightly")
            trial.drift_command("reset", "moved")
            trial.drift_command("acknowledge", "sharpened")
            gone = wait(lambda: not {"moved", "sharpened"} & set(trial.alerts()), 420)
            print(f"the alarms that a person reset and acknowledged are {'gone' if gone else 'STILL THERE'}")
    return 0 if right == len(CASES) and gone else 1


if __name__ == "__main__":
    sys.exit(main())
