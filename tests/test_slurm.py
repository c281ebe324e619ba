"""deploy/slurm is checked, and run on this machine: `srun`, `scancel` and `scontrol` are scripts here."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.service.deploy_fixtures import DEPLOY, ROOT, check_command, check_redis_server, run
from helpers.worker.worker_fixtures import World

SCRIPT = DEPLOY / "slurm" / "draftalign.sbatch"
BESIDE = Path(sys.executable).parent
#: As Slurm's: the command once for each node; a task that fails ends the others; SIGTERM kills the tasks.
SRUN = """#!/bin/bash
echo "$*" >> "$STUBS/srun.log"
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" & tasks+=($!)
done
echo "${tasks[*]}" > "$STUBS/step"
trap 'kill -KILL "${tasks[@]}"' TERM
for task in "${tasks[@]}"; do
    wait -n || kill -TERM "${tasks[@]}" 2>/dev/null
done
wait
"""
#: Signals the tasks of the step, which is what it does without --batch.
SCANCEL = """#!/bin/bash
echo "$*" >> "$STUBS/scancel.log"
read -ra tasks < "$STUBS/step"
kill -TERM "${tasks[@]}"
"""
SCONTROL = '#!/bin/bash\necho "$*" >> "$STUBS/scontrol.log"\n'


def test_shellcheck_finds_nothing() -> None:
    assert run("bash", "-n", str(SCRIPT)).returncode == 0
    result = run(str(BESIDE / "shellcheck"), str(SCRIPT))
    assert result.returncode == 0, result.stdout


def test_the_script_names_commands_that_exist_and_loses_nothing() -> None:
    text = SCRIPT.read_text()
    commands = re.findall(r"(?:exec|--no-python) draftalign (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        check_command(command.split())
    (options,) = re.findall(r"<<END\n(.*?)\nEND\n", text, re.DOTALL)
    words = [word.strip('"') for word in re.sub(r"^", "--", options, flags=re.MULTILINE).split()]
    check_redis_server([*words, "--protected-mode", "no"])  # with a password it does not matter
    assert re.search(r"^requirepass ", options, re.MULTILINE)


class Job:
    """One job of two nodes without GPUs."""

    def __init__(self, folder: Path, number: int) -> None:
        self.stubs, self.state = folder / "bin", folder / "state"
        self.stubs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)
        own = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "localhost"}
        own |= {"DRAFTALIGN_STATE_DIR": str(self.state), "STUBS": str(self.stubs), "PYTHONPATH": str(ROOT)}
        own |= {"PATH": f"{self.stubs}:{BESIDE}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DRAFTALIGN_", "REDIS_"))}
        (self.state / "slurm.env").unlink(missing_ok=True)
        self.process = subprocess.Popen(["bash", str(SCRIPT)], env=kept | own, cwd=folder, start_new_session=True)
        eventually((self.state / "slurm.env").exists, 30)
        variables = dict(re.findall(r"(\w+)=(\S+)", (self.state / "slurm.env").read_text()))
        self.client = httpx.Client(
            base_url=variables["DRAFTALIGN_URL"],
            headers={
                "Authorization": f"Bearer {variables['DRAFTALIGN_TOKEN']}",
                "Content-Type": "application/x-safetensors",
            },
            timeout=30,
        )
        eventually(self.ready, 60)

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def programs(self) -> dict[str, list[int]]:
        """Its programs, by name."""
        found: dict[str, list[int]] = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                group = os.getsid(int(place.name))
                argv = (place / "cmdline").read_bytes().split(b"\0")
                variables = (place / "environ").read_bytes()
            except (OSError, ProcessLookupError):
                continue
            if group == self.process.pid or f"STUBS={self.stubs}".encode() in variables:
                name = "worker" if b"worker" in argv[:4] else Path(os.fsdecode(argv[0]).partition(" ")[0]).name
                found.setdefault(name, []).append(int(place.name))
        return found

    def trained(self, body: bytes) -> None:
        """Send a batch as a hook does, which sends it again after a 503, and wait until it is trained."""
        answers: list[httpx.Response] = []

        def taken() -> bool:
            answers.append(self.client.post("/rollouts", content=body))
            assert answers[-1].status_code in (202, 503), answers[-1].text
            return answers[-1].status_code == 202

        eventually(taken, 30)
        batch = answers[-1].json()["batch_id"]
        eventually(lambda: self.client.get(f"/rollouts/{batch}").json().get("state") == "trained", 150)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(90)
        self.client.close()
        return code


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    jobs: list[Job] = []

    def start(number: int) -> Job:
        jobs.append(Job(tmp_path, number))
        return jobs[-1]

    yield start
    for one in jobs:
        for pid in itertools.chain(*one.programs().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.wait(60)


@pytest.mark.slow
def test_a_job_trains_and_goes_on_after_its_valkey_is_killed_and_when_its_time_is_over(
    job: Callable[[int], Job],
) -> None:
    world, first = World(), job(1234)
    registered = first.client.put("/runs/default", content=world.run_file(drafter=world.drafter()))
    assert registered.status_code in (200, 201), registered.text
    first.trained(world.rollout_file("a", policy_version=0, rollouts=3))
    programs = first.programs()
    assert len(programs["worker"]) == 2, "a rank for each node"
    (server,) = programs["valkey-server"]
    os.kill(server, signal.SIGKILL)
    first.trained(world.rollout_file("b", policy_version=0, rollouts=3))
    assert first.end(signal.SIGUSR1) == 0
    assert first.programs() == {}, "nothing is left running"
    assert (first.stubs / "scontrol.log").read_text() == "requeue 1234\n"
    assert (first.stubs / "scancel.log").read_text() == "--signal=TERM 1234\n"
    assert "--kill-on-bad-exit=1" in (first.stubs / "srun.log").read_text()
    again = job(1234)
    again.trained(world.rollout_file("c", policy_version=1, rollouts=3))
    assert again.end(signal.SIGTERM) == 0
    assert (first.stubs / "scontrol.log").read_text() == "requeue 1234\n", "who ends it does not want it back"
