"""Our plugin in the vLLM that OpenRLHF pins (0.29.0), inside OpenRLHF's own engine actor (`openrlhf_vllm.py`)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, trained_drafter
from helpers.engine.engines_within import ALL_OF_THEM, DEPTH, check_books, check_labels, engine_environment
from helpers.engine.server_load import publish, write_drafters
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.trainer.stacks_fixtures import HERE, Stack
from redis import Redis

from examples.policy import BASE_POLICY, load

STACK = Stack("openrlhf_vllm", "openrlhf_vllm.py", "a real OpenRLHF with its vLLM")
ANSWERS = 2

pytestmark = [*STACK.marks, pytest.mark.timeout(900)]


class Engine:
    """`openrlhf_vllm.py` in its environment."""

    def __init__(self, scratch: Path, drafter: Path, **environment: str) -> None:
        self.answers, self.log, self.number = scratch / "answers", scratch / "log", 0
        self.answers.mkdir(parents=True)
        variables = engine_environment(scratch / "plugin", "0.29.0", "openrlhf_vllm_plugin:register")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(STACK.python), str(HERE / STACK.script), *map(str, (self.answers, BASE_POLICY, drafter, DEPTH))],
                env=variables | {"DS_ACCELERATOR": "cpu"} | environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Wait for the engine, which starts Ray and vLLM."""
        self._answer(0)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run one command to its end."""
        self.number += 1
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer(self.number)

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def _answer(self, number: int) -> Any:
        path, deadline = self.answers / str(number), time.monotonic() + 600
        while not path.exists():
            assert self.process.poll() is None, self.text()[-6000:]
            assert time.monotonic() < deadline, self.text()[-6000:]
            time.sleep(0.05)
        return json.loads(path.read_text())

    def stop(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(name="service")
def _service(serve: Callable[..., RunningService]) -> RunningService:
    return serve()


@pytest.fixture(name="engine")
def _engine(service: RunningService, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(
        tmp_path / "engine",
        write_drafters(tmp_path / "drafters") / "random",
        DRAFTALIGN_URL=service.url,
        DRAFTALIGN_DRAFTER_DIR=str(tmp_path / "cache"),
        **ALL_OF_THEM,
    )
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.stop()
        print(made.text()[-20000:])


def test_openrlhfs_engine_swaps_labels_and_sends_through_its_own_refits(
    service: RunningService, engine: Engine, redis_url: str, tmp_path: Path
) -> None:
    """Its default sampling parameters, its transfer weight by weight, a drafter that is published between two steps."""
    _, tokenizer = base_policy()
    prompts = [tokenizer.decode(ids) for ids in elicit_prompts(12, seed=3)]

    def generate() -> tuple[float, float]:
        """Rounds and accepted drafts of one of OpenRLHF's generations."""
        before = engine.ask("metrics")
        answers = engine.ask("generate", prompts, 1.0)
        assert len(answers) == ANSWERS * len(prompts)
        after = engine.ask("metrics")
        return after[0] - before[0], after[1] - before[1]

    random = generate()
    record = eventually(lambda: (a := service.client.get("/runs/default")).status_code == 200 and a.json(), 30)
    assert (record["policy_version"], record["latest_head"]) == (0, None)

    version = publish(service, tmp_path / "drafters/trained", trained_drafter())
    eventually(lambda: engine.ask("rpc", "draftalign_staged").get("version") == version, 30)
    eventually(lambda: engine.ask("rpc", "draftalign_staged")["done"], 30)
    trained = generate()
    assert engine.ask("rpc", "draftalign_state")["version"] == version

    policies = {0: base_policy()[0]}
    counts = {0: trained}
    for number in (1, 2):
        engine.ask("step", number, str(tmp_path / f"policy-{number}"))
        counts[number] = generate()
        policies[number] = load(tmp_path / f"policy-{number}")[0]

    alphas = [1 + accepted / rounds for rounds, accepted in (random, *counts.values())]
    print("α with the drafter it began with, and of three policies with the one published", alphas)
    assert alphas[0] < 1.5 < 2.0 < alphas[1]
    each = ANSWERS * len(prompts)
    check_labels(service, policies, {0: 2 * each, 1: each, 2: each})
    with Redis.from_url(redis_url) as redis:
        check_books(Store(redis, "default"), version, counts)
