"""An RL stack's own script in an environment of its own: where that is, and what is said without it.

`learnt`: what the real service and a real worker make of what such a script has sent.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.worker_fixtures import Bench

from rl_hooks import wire
from service.worker.loop import RunWorker

ROOT = Path(__file__).parents[3]
HERE = ROOT / "tests/stacks"


def environment(name: str) -> Path:
    """The folder of `.venv-NAME`, with STACKS_NEWEST of `.venv-NAME-newest`; of `.venv` where there is no name."""
    newest = "-newest" if os.environ.get("STACKS_NEWEST") else ""
    return ROOT / (f".venv-{name}{newest}" if name else ".venv")


def in_environment(name: str, of: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs `.venv-NAME`, whole; `of` is what it checks, for people."""
    folder = environment(name)
    reason = f"no {folder.name} (`make stacks`): nothing was checked on {of}"
    return [pytest.mark.stack(folder.name), pytest.mark.skipif(not (folder / ".ready").exists(), reason=reason)]


@dataclass(frozen=True)
class Stack:
    """`name` of the environment `.venv-NAME` that `make stacks` sets up, and the script of tests/stacks run in it."""

    name: str
    script: str
    of: str  # the package, for people
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return environment(self.name) / "bin/python"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of the test module."""
        return [pytest.mark.slow, *in_environment(self.name, self.of)]

    def run(self, out: Path, *arguments: str) -> None:
        """Have the script write what it found into `out`."""
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **self.variables}
        command = [str(self.python), "-W", "ignore", str(HERE / self.script), str(out), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
        assert done.returncode == 0, done.stderr[-6000:]

    def ranks(self, out: Path, *arguments: str) -> list[dict[str, Any]]:
        """What each of two ranks found."""
        self.run(out, *arguments)
        return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def learnt(sent: Sequence[str], service: RunningService, bench: Bench) -> dict[int, int]:
    """Have the service take what each rank has sent, and a worker train on it; rollouts by policy version.

    `sent`: the ranks' folders, as `keep` of sent_fixtures writes them; rank 0 first. Of a policy version all heads go
    first: in the trainer the ranks' forward is one, here their files come one after the other. `bench` has the
    service's directory and Redis.
    """
    requests = []
    for path in sorted(path for folder in sent for path in Path(folder).glob("*.json")):
        body = path.with_suffix(".body").read_bytes()
        requests.append((json.loads(path.read_text()), wire.parse_header(body), body))
    requests.sort(key=lambda one: (int(one[1].metadata["policy_version"]), one[0]["method"] == "POST"))
    queue: RolloutQueue | None = None
    worker: RunWorker | None = None
    batches: dict[str, wire.RolloutHeader] = {}
    for about, header, body in requests:
        answer = service.client.request(about["method"], about["path"], content=body, headers=about["headers"])
        assert answer.status_code in (200, 201, 202), (about, answer.status_code, answer.text)
        if about["method"] == "PUT":
            continue
        rollouts = wire.check_rollout_header(header)
        assert not answer.json()["duplicate"], answer.text
        batches[rollouts.batch_id] = rollouts
        if worker is None:
            queue = RolloutQueue(bench.redis, rollouts.run)
            worker = RunWorker(bench.settings, bench.layout, queue, Store(bench.redis, rollouts.run), rollouts.run)
        bench.drain(worker)
    assert queue is not None, "nothing was sent"
    assert worker is not None
    records = [queue.batch(batch) or {} for batch in batches]
    assert [record.get("state") for record in records] == ["trained"] * len(batches), records
    found: Counter[int] = Counter()
    for one in batches.values():
        found[one.policy_version] += one.rollouts
    trained = bench.trainer_counts(worker.run)
    assert trained["windows"] >= len(found), trained
    return dict(found)
