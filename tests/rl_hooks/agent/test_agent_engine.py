"""Service, swap agent and example engine, all real, with drafters that really draft."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from agent_fixtures import eventually, start_agent
from engine_fixtures import EOS_ID, base_policy, elicit_prompts, engine, random_drafter, trained_drafter, write
from service_fixtures import RunningService

from drafter.files.checkpoint import config_fingerprint
from drafter.model.eagle3 import Eagle3Drafter
from examples.engine import Engine
from examples.engine_sequences import Sampling
from examples.engine_server import create_app
from rl_hooks.agent.canary import CanaryRule

GREEDY = Sampling(64, temperature=0.0, eos_id=EOS_ID)


class ServedEngine:
    """An example engine under real uvicorn."""

    def __init__(self, served: Engine) -> None:
        self.engine = served
        self.server = uvicorn.Server(uvicorn.Config(create_app(served), port=0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        eventually(lambda: self.server.started)
        self.url: str = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@contextmanager
def served_engine() -> Iterator[ServedEngine]:
    with engine(base_policy()[0]) as served:
        running = ServedEngine(served)
        try:
            yield running
        finally:
            running.stop()


def _publish(service: RunningService, drafter: Eagle3Drafter, directory: Path) -> str:
    write(drafter, directory)
    staged = service.registry.stage("default")
    for path in directory.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    facts: dict[str, Any] = {"policy_version": 0, "parent": None, "aux_layers": drafter.config.aux_layers}
    facts["config_fingerprint"] = config_fingerprint(drafter.config, drafter.vocabulary)
    facts["d2t_sha256"] = drafter.vocabulary.digest
    return service.registry.publish("default", staged, **facts).version


@pytest.mark.slow
def test_a_worse_drafter_is_tried_counted_and_swapped_back_while_text_stays_the_same(
    service: RunningService, tmp_path: Path
) -> None:
    good, bad = trained_drafter(), random_drafter(base_policy()[0], seed=5, draft_vocab_size=96)
    prompts = elicit_prompts(24)
    with served_engine() as running:
        text = [done.token_ids for done in running.engine.submit(prompts, GREEDY).result(timeout=60)]

        def generate() -> None:
            done = running.engine.submit(prompts, GREEDY).result(timeout=60)
            assert [one.token_ids for one in done] == text

        with start_agent(service.url, running, cache=tmp_path / "cache", canary=CanaryRule(rounds=200)) as agent:
            first = _publish(service, good, tmp_path / "good")
            follower = eventually(lambda: agent.followers.get(running.url))
            eventually(lambda: follower.loaded_version == first)
            while follower.ledger.version_counts(first).rounds < 250:
                generate()
            second = _publish(service, bad, tmp_path / "bad")
            eventually(lambda: follower.loaded_version == second)
            while running.engine.drafter_version == second:
                generate()
            eventually(lambda: follower.loaded_version == first)
            generate()
            drafts = running.engine.counters().drafts
            ledger = follower.ledger
            booked = eventually(
                lambda: (
                    ledger.version_counts(first).rounds
                    + ledger.version_counts(second).rounds
                    + ledger.unattributed_rounds
                    == drafts
                )
            )
            assert booked
            alphas = [ledger.version_counts(version).alpha for version in (first, second)]
            eventually(lambda: "canary_rolled_back" in service.client.get("/drafters").text)
    assert alphas[1] < 0.9 * alphas[0]
    emitted = ledger.version_counts(first).emitted_tokens
    assert emitted is not None
    # Trimming at the end of a response only ever takes tokens away.
    assert emitted <= ledger.version_counts(first).rounds + ledger.version_counts(first).accepted_tokens
    point = next(p for p in service.client.get("/alpha").json()["points"] if p["policy_version"] == 0)
    assert point["live_rounds"] == sum(ledger.version_counts(version).rounds for version in (first, second))
