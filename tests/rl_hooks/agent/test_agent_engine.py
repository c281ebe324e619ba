"""Service, swap agent and example engine, all real, with drafters that really draft."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from helpers.engine.agent_fixtures import eventually, start_agent
from helpers.engine.engine_fixtures import (
    EOS_ID,
    base_policy,
    elicit_prompts,
    engine,
    meanwhile,
    random_drafter,
    trained_drafter,
    write,
)
from helpers.service.service_fixtures import HEADERS, RunningService, run_file
from safetensors.torch import load_file, save_file

from drafter.files.checkpoint import config_fingerprint
from drafter.model.eagle3 import Eagle3Drafter
from examples.engine import Engine
from examples.engine_sequences import Sampling
from examples.engine_server import create_app
from rl_hooks.agent.agent import SwapAgent
from rl_hooks.agent.canary import CanaryRule

GREEDY = Sampling(64, temperature=0.0, eos_id=EOS_ID)


@pytest.fixture
def service(running_service: RunningService) -> RunningService:
    return running_service


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
        self.thread.join(60)


@contextmanager
def served_engine() -> Iterator[ServedEngine]:
    with engine(base_policy()[0]) as served:
        running = ServedEngine(served)
        try:
            yield running
        finally:
            running.stop()


def _publish(
    service: RunningService,
    drafter: Eagle3Drafter,
    directory: Path,
    spoil: Callable[[Path], None] = lambda _: None,
    run: str = "default",
    **changes: Any,
) -> str:
    write(drafter, directory)
    spoil(directory)
    staged = service.registry.stage(run)
    for path in directory.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    facts: dict[str, Any] = {"policy_version": 0, "parent": None, "aux_layers": drafter.config.aux_layers}
    facts["config_fingerprint"] = config_fingerprint(drafter.config, drafter.vocabulary)
    facts["d2t_sha256"] = drafter.vocabulary.digest
    return service.registry.publish(run, staged, **(facts | changes)).version


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


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return spoil


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = change(path.read_bytes())
        path.unlink()
        path.write_bytes(data)

    return spoil


def _config(**fields: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "config.json"
        document = json.loads(path.read_text()) | fields
        path.unlink()
        path.write_text(json.dumps(document))

    return spoil


#: Each of them is published; how far it comes differs: the agent's manifest, its download, the engine.
BAD: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "NaN": (_tensors(lambda t: t["lm_head.weight"][3].fill_(torch.nan)), {}),
    "infinity": (_tensors(lambda t: t["fc.weight"][0].fill_(torch.inf)), {}),
    "missing tensor": (_tensors(lambda t: t.pop("midlayer.mlp.down_proj.weight")), {}),
    "another tensor": (_tensors(lambda t: t.update({"midlayer.surprise.weight": torch.zeros(2)})), {}),
    "wrong shape": (_tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1]})), {}),
    "wrong vocabulary": (_tensors(lambda t: t.update({"d2t": t["d2t"] - 1})), {}),
    "another vocabulary, and it says so": (lambda _: None, {"d2t_sha256": "0" * 64}),
    "cut off": (_bytes(lambda data: data[:-100]), {}),
    "no safetensors": (_bytes(lambda data: b"\xff" * len(data)), {}),
    "empty": (_bytes(lambda _: b""), {}),
    "other sizes": (_config(hidden_size=32), {}),
    "other layers": (_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2], eagle_config={}), {}),
    "no config": (lambda directory: (directory / "config.json").unlink(), {}),
}


@pytest.mark.slow
def test_bad_drafters_one_after_the_other_cost_no_request_and_leave_the_good_one_serving(
    service: RunningService, tmp_path: Path
) -> None:
    prompts = elicit_prompts(8)
    drafters = [random_drafter(base_policy()[0], seed=seed, draft_vocab_size=96) for seed in (1, 2)]
    with served_engine() as running:
        text = [done.token_ids for done in running.engine.submit(prompts, GREEDY).result(timeout=60)]
        served = 0

        def generate() -> None:
            nonlocal served
            done = running.engine.submit(prompts, GREEDY).result(timeout=60)
            assert [one.token_ids for one in done] == text
            served += len(done)

        with start_agent(service.url, running, cache=tmp_path / "cache", canary=CanaryRule(rounds=0)) as agent:
            good = _publish(service, drafters[0], tmp_path / "good")
            eventually(lambda: running.engine.drafter_version == good)
            with meanwhile(generate) as raised:
                for name, (spoil, changes) in BAD.items():
                    before = failures(agent)
                    _publish(service, drafters[1], tmp_path / name, spoil, **changes)
                    eventually(lambda before=before: failures(agent) > before)  # type: ignore[misc]
                    asked = served
                    eventually(lambda asked=asked: served > asked or raised)  # type: ignore[misc]
                    assert running.engine.drafter_version == good, name
                last = _publish(service, drafters[1], tmp_path / "last")
                eventually(lambda: running.engine.drafter_version == last)
            assert raised == []
            assert served >= len(prompts) * len(BAD)
            assert running.engine.counters().drafter_swaps == 2


def failures(agent: SwapAgent) -> float:
    """Errors and refused swaps that the agent has counted."""
    return sum(
        sample.value
        for family in agent.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "draftalign_agent_errors_total" or sample.labels.get("outcome") == "refused"
    )


@contextmanager
def agent_process(service: RunningService, engine_url: str, run: str, cache: Path, log: Path) -> Iterator[None]:
    """`draftalign-agent` as it is typed, in a process of its own."""
    command = [sys.executable, "-c", "from rl_hooks.agent.cli import main; main()", "--url", engine_url]
    command += ["--service", service.url, "--run", run, "--cache-dir", str(cache), "--report-seconds", "0.2"]
    command += ["--agent-id", f"agent-{run}", "--canary-rounds", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.mark.slow
def test_of_two_agents_of_two_runs_one_gives_the_engine_up_and_both_runs_are_named(
    service: RunningService, tmp_path: Path
) -> None:
    """The younger one goes. It goes on counting, and its run's headline says why it has no drafter in the engine."""
    service.client.put("/runs/second", content=run_file(), headers=HEADERS).raise_for_status()
    one = _publish(service, trained_drafter(), tmp_path / "one")
    other = random_drafter(base_policy()[0], seed=5, draft_vocab_size=96)
    two = _publish(service, other, tmp_path / "two", run="second")
    logs, cache = (tmp_path / "first.log", tmp_path / "second.log"), tmp_path / "cache"
    prompts = elicit_prompts(8)

    def contested(run: str) -> str:
        said = service.client.get(f"/runs/{run}").json()["headline"]
        return next((text for text in (said["text"], *said["also"]) if text.startswith("Contested")), "")

    def generate() -> bool:
        running.engine.submit(prompts, GREEDY).result(timeout=60)
        return True

    with served_engine() as running, agent_process(service, running.url, "default", cache, logs[0]):
        eventually(lambda: running.engine.drafter_version == one)
        with agent_process(service, running.url, "second", cache, logs[1]):
            eventually(lambda: generate() and "is given up" in logs[1].read_text(), 20.0)
            text = eventually(lambda: generate() and contested("second"))
            swaps = running.engine.counters().drafter_swaps
            for _ in range(10):
                generate()
                time.sleep(0.1)
            assert running.engine.counters().drafter_swaps == swaps
            assert running.engine.drafter_version == one
            servers = service.client.get("/alpha", params={"run": "second"}).json()["servers"]
    assert "3 times another client undid a swap of run 'second' at once" in text
    assert f"{one}, which it puts there, is of run 'default'" in text
    assert logs[1].read_text().count("is given up") == 1
    assert "is given up" not in logs[0].read_text()
    assert contested("default") == ""
    assert ("anothers-drafter", one) in [(line["method"], line["drafter_version"]) for line in servers]
    assert 6 <= swaps <= 8, "the first of each, three turns of the younger and those that undid them"
    assert two != one
