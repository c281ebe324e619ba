"""The dashboard and the rules on a real Prometheus that scrapes a real service with a run, an engine and an agent."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import Engine, eventually, start_agent
from helpers.ports import free_port
from helpers.service.deploy_fixtures import DEPLOY, PROMETHEUS
from helpers.worker.worker_fixtures import World
from torch import Tensor

from benchmarks.soak import ready, service
from rl_hooks.wire import CONTENT_TYPE

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
SETTINGS = {
    "DRAFTALIGN_TRAIN_STEP_TOKENS": "400",
    "DRAFTALIGN_LEARNING_RATE": "1e-4",
    "DRAFTALIGN_RECENT_TOKENS": "2000",
    "DRAFTALIGN_WORKER_COST": "0.001",
    "DRAFTALIGN_LOG_LEVEL": "WARNING",
}
#: The drift alarm says nothing in the first 20 ticks of 64 rollouts.
FILES, ROLLOUTS = 22, 64


@contextlib.contextmanager
def prometheus(place: Path, *targets: str) -> Iterator[httpx.Client]:
    """One with the shipped rules, which scrapes and evaluates twice a second."""
    rules = (PROMETHEUS / "rules.yml").read_text()
    (place / "rules.yml").write_text(rules.replace("interval: 15s", "interval: 500ms"))
    configuration = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(place / "rules.yml")],
        "scrape_configs": [{"job_name": "draftalign", "static_configs": [{"targets": list(targets)}]}],
    }
    (place / "prometheus.yml").write_text(json.dumps(configuration))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={place}/prometheus.yml", f"--web.listen-address={address}"]
    with (place / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={place}/data"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60.0) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


def series(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """What it gives now; nothing while Prometheus does not answer yet."""
    with contextlib.suppress(httpx.TransportError):
        answer = client.get("/api/v1/query", params={"query": expression})
        if answer.status_code != 503:
            found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]
            return found
    return []


def shown(client: httpx.Client, target: dict[str, str], go_on: Callable[[], None]) -> None:
    """Return once a panel draws the run, all of it numbers, each line with a legend of its own.

    `go_on` makes more of what is counted: what was counted before the first scrape has no rate.
    """
    expression = target["expr"].replace("$run", "default")

    def drawn() -> list[dict[str, Any]]:  # a rate over scrapes between which nothing was counted is 0 / 0
        found = series(client, expression)
        if found and all(math.isfinite(float(one["value"][1])) for one in found):
            return found
        go_on()
        return []

    found = eventually(drawn)
    parts = re.split(r"{{(\w+)}}", target["legendFormat"])
    legends = ["".join(one["metric"][part] if odd % 2 else part for odd, part in enumerate(parts)) for one in found]
    assert len(set(legends)) == len(legends), (expression, legends)


def wrong(tensors: dict[str, Tensor]) -> None:
    """Log-probabilities that are not those of the features: the batch ends dead."""
    tensors["logprobs"] -= 3.0 * (tensors["loss_mask"] > 0)


def test_every_panel_shows_a_live_run_and_an_alert_what_is_wrong_with_it(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    (alerts,) = [target for target in targets if "ALERTS" in target["expr"]]
    world = World()
    drafter = world.trained_drafter(tmp_path)
    headers = {"Content-Type": CONTENT_TYPE}
    engine = Engine()
    with contextlib.ExitStack() as stack:
        process, url = stack.enter_context(service(tmp_path, SETTINGS))
        ready(url, process)
        stack.callback(engine.down)
        agent = stack.enter_context(
            start_agent(url, engine, cache=tmp_path / "cache", metrics_port=0, report_seconds=0.5)
        )
        address = url.removeprefix("http://")
        own = f"127.0.0.1:{eventually(lambda: agent.metrics_port)}"
        client = stack.enter_context(prometheus(tmp_path, address, own))
        api = stack.enter_context(httpx.Client(base_url=url, timeout=60.0))
        api.put("/runs/default", content=world.run_file(drafter=drafter), headers=headers).raise_for_status()
        eventually(lambda: series(client, 'draftalign_queue_entries{run="default"}'))
        eventually(lambda: engine.version)
        engine.policy_version = 0
        numbers = itertools.count()

        def send(rollouts: int = 8) -> None:
            body = world.rollout_file(f"batch-{next(numbers)}", rollouts=rollouts)
            api.post("/rollouts", content=body, headers=headers).raise_for_status()
            for accepted in (1, 2, 2, 2, 3):
                engine.play(20, accepted, requests=10)

        for _ in range(FILES):
            send(ROLLOUTS)
        for target in targets:
            if target is not alerts:
                shown(client, target, send)
        expression = alerts["expr"].replace("$run", "default")
        assert series(client, expression) == [], "a run without a fault"
        bad = world.rollout_file("bad", change=wrong)
        api.post("/rollouts", content=bad, headers=headers).raise_for_status()
        (fired,) = eventually(lambda: series(client, expression))
        assert (fired["metric"]["alertname"], fired["metric"]["run"]) == ("DraftalignDeadLetters", "default")
