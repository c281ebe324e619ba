"""Alarms for real: `draftalign up`, Prometheus with the shipped rules, and Alertmanager.

    python benchmarks/alarm_trial.py           each cause of a drift alarm, all at once: some minutes
    python benchmarks/alarm_trial.py alerts    the other alerts, by faults: a quarter of an hour

For the alerts `for` above two minutes and the half hour of DraftalignNothingPublished are cut to a minute.

It ends by itself, with 1 where a cause was not named rightly, an alert did not fire or end, or one fired in peace.
Needs `prometheus` and `prometheus-alertmanager` (Debian's names) on the path. The policy is the tests' Markov chain,
the drafter is trained on it for some seconds, and the engines are counts that this script makes from replays with the
features that engines have. Everything listens on loopback and lives in a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.engine.agent_fixtures import Engine
from helpers.worker.worker_fixtures import HIDDEN, World

from benchmarks.soak import processes
from drafter.batch import load_batch
from drafter.files.kinds import write_kind
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.demo import free_port
from rl_hooks.wire import CONTENT_TYPE
from service.storage.layout import Layout
from service.storage.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
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

    def __init__(
        self, place: Path, drafter: Eagle3Drafter, *, rules: Path = RULES, seconds: int = 5, agents: Sequence[int] = ()
    ) -> None:
        """`seconds`: from one scrape to the next. `agents`: ports at which agents show their metrics."""
        self.place, self.drafter = place, drafter
        self._watched = (rules, seconds, [f"127.0.0.1:{port}" for port in agents])
        self.ports = {name: free_port() for name in ("api", "prometheus", "alertmanager")}
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.ports['api']}", timeout=30)
        self.registry = Registry(Layout(place / "state"))

    @contextlib.contextmanager
    def running(self, settings: dict[str, str] | None = None) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """Start all three, with these settings too, and stop them at the end; gives the processes by name."""
        rules, seconds, agents = self._watched
        (self.place / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {seconds}s, evaluation_interval: {seconds}s}}\n"
            f"rule_files: [{rules}]\n"
            "alerting: {alertmanagers: [{static_configs: "
            f"[{{targets: ['127.0.0.1:{self.ports['alertmanager']}']}}]}}]}}\n"
            "scrape_configs: [{job_name: draftalign, static_configs: "
            f"[{{targets: ['127.0.0.1:{self.ports['api']}']}}]}},\n"
            f" {{job_name: draftalign-agents, static_configs: [{{targets: {agents}}}]}}]\n"
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
        started = {}
        try:
            for name, command in commands.items():
                log = (self.place / f"{name}.log").open("w")
                environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | (settings or {})
                started[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            wait(lambda: self.api.get("/readyz").status_code == 200, 120)
            yield started
        finally:
            for process in started.values():
                process.terminate()
            for process in started.values():
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
            self.publish_damaged(case.run)

    def publish_damaged(self, run: str) -> None:
        """Serve the damaged drafter, as if a person had published it."""
        before = self.registry.latest(run)
        assert before is not None
        staged = self.registry.stage(run)
        staged.mkdir(parents=True, exist_ok=True)
        write_kind(staged, damaged(self.drafter))
        self.registry.publish(
            run,
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


# --- the other alerts
SETTINGS = {
    "DRAFTALIGN_QUEUE_MAX_BYTES": "3000000",
    "DRAFTALIGN_MAX_BODY_BYTES": "1000000",
    "DRAFTALIGN_TRAIN_PASSES": "1",
    "DRAFTALIGN_TRAIN_STEP_TOKENS": "900",
}
#: Alerts by the fault that raises each: of one run or agent, all at once.
FAULTS = {
    "dead": ["DeadLetters"],
    "not-finite": ["RolloutsNotFinite"],
    "lost-drafter": ["DrafterDead", "DrafterUnrevived", "NoDraftAccepted"],
    "depth": ["EngineDiffers"],
    "too-good": ["PublishingHeld"],
    "lossy": ["NotLossless"],
    "unusable": ["WorkerError"],
    "unreadable": ["RunUnreadable"],
    "agents": ["SwapFailed", "CanaryRolledBack", "EngineBehind", "AgentLostPeer", "TargetDown", "NothingPublished"],
}
#: Of a hundred rounds of a sound engine, those in which 0, 1, ... drafts are accepted.
ROUNDS = (28, 20, 15, 10, 27)
REPORTED = ("dead", "not-finite", "lost-drafter", "depth", "too-good", "lossy")


def shorter(place: Path) -> Path:
    """The shipped rules, those that take long cut to a minute."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "2s"
        for rule in group["rules"]:
            if re.fullmatch(r"([3-9]|\d\d)m", rule.get("for", "")):
                rule["for"] = "60s"
            rule["expr"] = rule["expr"].replace("> 1800", "> 60")
    path = place / "rules.yml"
    path.write_text(yaml.safe_dump(rules, allow_unicode=True))
    return path


def untrue(tensors: dict[str, torch.Tensor]) -> None:
    """Log-probabilities that are not those of the features."""
    tensors["logprobs"] -= 3.0 * (tensors["loss_mask"] > 0)


def one_of_nan(tensors: dict[str, torch.Tensor]) -> None:
    """A rollout that holds NaN."""
    tensors["aux_hidden"][2:5] = float("nan")


def told_of(world: World, tensors: dict[str, torch.Tensor]) -> None:
    """Say of the tokens what this world's policy says, whatever drew them."""
    tokens = tensors["input_ids"].long()
    logits = world.states.float() @ world.heads[0].T
    said = torch.zeros(len(tokens))
    said[1:] = torch.log_softmax(logits, -1)[tokens[:-1], tokens[1:]]
    tensors["logprobs"] = torch.where(tensors["loss_mask"] > 0, said, 0.0)
    tensors["logsumexp"] = torch.logsumexp(logits, -1)[tokens]


class FourDeep(Engine):
    """An engine that drafts as many tokens as the service replays."""

    depth = 4


class FaultyTrial(Trial):
    """Runs, engines and agents, and a fault of each."""

    def __init__(self, place: Path, drafter: Eagle3Drafter) -> None:
        self.agent_ports = [free_port() for _ in range(4)]
        super().__init__(place, drafter, rules=shorter(place), seconds=2, agents=self.agent_ports)
        self.cases = {run: Case(run, None, tagged=False) for run in FAULTS}
        self.engines = [FourDeep() for _ in self.agent_ports]
        self.faulty = False
        self.seen: dict[str, dict[str, Any]] = {}  # of each alert that fires: what Prometheus says of it
        self._numbers = itertools.count()
        self._counts: dict[tuple[str, bool], list[int]] = {}

    def agent(self, number: int) -> subprocess.Popen[bytes]:
        """Start the agent of an engine."""
        command = [sys.executable, "-m", "service.cli", "agent", "--run", "agents", "--report-seconds", "1"]
        command += ["--service", str(self.api.base_url), "--url", self.engines[number].url]
        command += ["--cache-dir", str(self.place / f"cache-{number}"), "--metrics-port", str(self.agent_ports[number])]
        log = (self.place / f"agent-{number}.log").open("w")
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def turn(self, runs: Sequence[str], *, paced: bool = False) -> None:
        """Send a file of each run, a report of each engine, and look at the alerts. `paced`: as the worker keeps up."""
        if paced:  # else a slow machine's worker falls behind, and rollouts are refused
            wait(self.drained, 10)
        for run in runs:
            with contextlib.suppress(httpx.HTTPError):  # refused, or nobody is there: that is the trial
                self._send(run)
                self._report(run)
        for engine in self.engines:
            for accepted, rounds in enumerate((100,) if engine.swapped[1:] else ROUNDS):
                engine.play(rounds, accepted, requests=2)
        with contextlib.suppress(httpx.HTTPError):
            address = f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/alerts"
            found = httpx.get(address, timeout=30).json()["data"]["alerts"]
            firing = {
                one["labels"]["alertname"].removeprefix("Draftalign"): one for one in found if one["state"] == "firing"
            }
            self.seen = firing
        time.sleep(0.2)

    def until(self, condition: Callable[[], bool], runs: Sequence[str], seconds: float) -> bool:
        """Take paced turns until then; whether it came."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.turn(runs, paced=True)
        return condition()

    def _send(self, run: str) -> None:
        number, world = next(self._numbers), self.cases[run].world
        change: Callable[[dict[str, torch.Tensor]], None] | None = None
        if self.faulty and run == "dead":
            change = untrue
        elif self.faulty and run == "not-finite":
            change = one_of_nan
        elif self.faulty and run == "lossy":  # drawn from a sharper law than the one that is told
            world, change = (
                World(heads={0: 1.5 * world.heads[0]}),
                lambda tensors: told_of(self.cases[run].world, tensors),
            )
        version = int(self.faulty)
        body = world.rollout_file(f"{run}-{number}", policy_version=version, rollouts=32, change=change, run=run)
        self.api.post("/rollouts", content=body, headers={"Content-Type": CONTENT_TYPE}).raise_for_status()

    def _report(self, run: str) -> None:
        if run not in REPORTED or (served := self.registry.latest(run)) is None:
            return
        accepted = {"lost-drafter": 0, "depth": 500, "too-good": 1600}.get(run, 740) if self.faulty else 740
        counts = self._counts.setdefault((run, self.faulty), [0, 0, 0])
        drafted = 800 if self.faulty and run == "depth" else 1600
        counts[:] = [counts[0] + 400, counts[1] + accepted, counts[2] + drafted]
        report = {
            **{"run": run, "reporter": f"host http://{run}:8000", "engine": f"http://{run}:8000"},
            **{"drafter_version": served.version, "policy_version": int(self.faulty), "rounds": counts[0]},
            **{"accepted_tokens": counts[1], "emitted_tokens": counts[0] + counts[1], "drafted_tokens": counts[2]},
            **{"finished_requests": counts[0] // 6, "running_requests": 8},
        }
        self.api.post("/acceptance", json=report).raise_for_status()

    def await_alerts(self, names: Sequence[str], runs: Sequence[str], seconds: float = 420.0) -> bool:
        """Take turns until all of them fire; a line for each, and for what fires beside them."""
        began, told = time.monotonic(), set(self.seen)
        while time.monotonic() < began + seconds and not set(names) <= told:
            self.turn(runs)
            for name in self.seen.keys() - told:
                summary = self.seen[name]["annotations"]["summary"]
                beside = "" if name in names else "  BESIDE"
                print(f"{time.monotonic() - began:6.0f} s  {name}: {summary}{beside}", flush=True)
                told.add(name)
        for name in set(names) - told:
            print(f"         {name} DID NOT FIRE")
        return set(names) <= told

    def await_peace(self, runs: Sequence[str], seconds: float = 120.0, *, ignored: Sequence[str] = ()) -> bool:
        """Take turns for that long, and until nothing fires that is not ignored."""
        self.until(lambda: False, runs, seconds)
        self.until(lambda: not set(self.seen) - set(ignored), runs, seconds)
        left = sorted(set(self.seen) - set(ignored))
        print(f"         at peace{f' BUT FOR {left}' if left else ''}", flush=True)
        return not left


def lasting(trial: FaultyTrial) -> list[str]:
    """What fires for a quarter of an hour after the mend, and longer: counters are looked back at."""
    found = ["DeadLetters", "RolloutsNotFinite", "SwapFailed", "CanaryRolledBack", "RolloutsRefused", "NotLossless"]
    return [name for name in found if name in trial.seen]


def run_faults(trial: FaultyTrial, programs: dict[str, subprocess.Popen[bytes]]) -> bool:
    """All faults, one after another; whether each was told, ended, and nothing was told in peace."""
    runs = list(FAULTS)
    for case in trial.cases.values():
        trial.register(case)
    wait(lambda: all(trial.registry.latest(run) for run in runs), 60)
    agents = [trial.agent(number) for number in range(len(trial.engines))]
    state = trial.place / "state"
    try:
        good = trial.await_peace(runs)
        print("runs, engines, agents", flush=True)
        trial.faulty = True
        (state / "runs" / "unusable" / "worker").rename(trial.place / "worker")
        (state / "runs" / "unusable" / "worker").write_text("a file where a directory must be")
        latest = (state / "runs" / "unreadable" / "latest.json").read_text()
        (state / "runs" / "unreadable" / "latest.json").write_text("{")
        trial.engines[0].refusal = (409, "another vocabulary")
        trial.engines[1].down()
        agents[3].kill()
        trial.publish_damaged("agents")
        good &= trial.await_alerts([name for names in FAULTS.values() for name in names], runs)

        print("all is mended; the worker and the API are killed", flush=True)
        trial.faulty, trial.engines[0].refusal = False, None
        trial.engines[1].up()
        agents[3].wait()
        agents[3] = trial.agent(3)
        (state / "runs" / "unusable" / "worker").unlink()
        (trial.place / "worker").rename(state / "runs" / "unusable" / "worker")
        (state / "runs" / "unreadable" / "latest.json").write_text(latest)
        trial.api.delete("/runs/agents").raise_for_status()
        for name in ("worker", "api"):
            os.kill(processes(programs["draftalign"].pid)[name], signal.SIGKILL)
        sound = [run for run in runs if run != "agents"]
        for agent in agents:
            agent.terminate()
        good &= trial.await_peace(sound, ignored=[*lasting(trial), "TargetDown"])

        print("the worker is stopped, and a run begins", flush=True)
        worker = processes(programs["draftalign"].pid)["worker"]
        os.kill(worker, signal.SIGSTOP)
        trial.cases["late"] = Case("late", None, tagged=False)
        trial.register(trial.cases["late"])
        names = ["WorkerSilent", "WorkerAbsent", "QueueNearlyFull", "RolloutsRefused"]
        good &= trial.await_alerts(names, [*sound, "late"])
        os.kill(worker, signal.SIGCONT)
        good &= trial.await_peace(sound, ignored=[*lasting(trial), "TargetDown"])

        print("Redis is stopped", flush=True)
        valkey = processes(programs["draftalign"].pid)["valkey"]
        os.kill(valkey, signal.SIGSTOP)
        good &= trial.await_alerts(["ServiceAbsent"], [])
        os.kill(valkey, signal.SIGCONT)
        return trial.await_peace([], 10, ignored=[*lasting(trial), "TargetDown"]) and good
    finally:
        for part in processes(programs["draftalign"].pid).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(part, signal.SIGCONT)  # a part that is stopped ends at no signal but SIGKILL
        for agent in agents:
            agent.kill()
            agent.wait()
        for engine in trial.engines:
            engine.down()


def main() -> int:
    """Run all cases at once; prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("causes", "alerts"), default="causes")
    what = parser.parse_args().what
    missing = [name for name in ("prometheus", "prometheus-alertmanager") if shutil.which(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        drafter = World().trained_drafter(place, steps=150)
        if what == "alerts":
            faulty = FaultyTrial(place, drafter)
            with faulty.running(SETTINGS) as programs:
                return 0 if run_faults(faulty, programs) else 1
        trial = Trial(place, drafter)
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
