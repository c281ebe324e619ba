"""What became of a trainer's rollouts reaches its own log; what is not known is absent, nothing hurts."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.service.service_fixtures import RunningService
from helpers.trainer.hooks_fixtures import AUX, padded_batch, step
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from helpers.worker.worker_fixtures import Bench

from rl_hooks.hook import DrafterHook
from rl_hooks.sending import standing
from rl_hooks.sending.exchange import Origin, RunService
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.sending.standing import Standing

OWN = {"draftalign/dropped", "draftalign/overhead_seconds"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_ASK_SECONDS", 0.05)
    monkeypatch.setattr(standing, "_AWAY_SECONDS", 0.05)


def test_what_became_of_its_rollouts_reaches_the_trainer_and_its_log(
    bench: Bench, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url, tokens="t:write;boss:admin")
    model = tiny(tied=False)
    hook = DrafterHook(model, service.url, token="t", aux_layers=AUX)
    try:
        assert hook.flush(20)
        assert hook.stats()["run_stands"].get("trained", 0) == 0
        worker = bench.worker()
        step(hook, model, 0)
        step(hook, model, 1)
        eventually(lambda: hook.stats()["run_stands"].get("waiting") == 2)
        bench.drain(worker)
        eventually(lambda: hook.stats()["run_stands"].get("trained") == 2)
        step(hook, model, 2, wrong=3.0)
        bench.drain(worker)
        eventually(lambda: hook.stats()["run_stands"].get("dead") == 1)
        stands = hook.stats()["run_stands"]
        assert (stands["trained"], stands["waiting"], stands["skipped"]) == (2, 0, 0)
        assert "log-probabilities disagree" in stands["last_dead_reason"]
        # Its last batch died, and it hears of it without sending another. Its thread says so after it has counted.
        eventually(lambda: hook.stats()["dead"] == 1 and "die in the drafter service" in caplog.text)
        assert "NaN" not in caplog.text
        batch = padded_batch([(3, 9), (7, 4), (1, 12), (5, 6)], seed=3)
        others = set(batch.input_ids[[0, 1, 3]].flatten().tolist())
        with torch.no_grad():  # the policy overflows at a token of one rollout
            token = next(token for token in batch.input_ids[2].tolist() if token not in others)
            model.model.embed_tokens.weight[token] = torch.inf
        step(hook, model, 3, batch)
        bench.drain(worker)
        eventually(lambda: hook.stats()["run_stands"].get("not_finite") == 1)
        stands = hook.stats()["run_stands"]
        assert (stands["trained"], stands["dead"]) == (3, 1)
        assert caplog.text.count("hold NaN or infinity (") == 1, "it hears of rollouts that were left out, once"
        described = service.client.get("/runs/default", headers={"Authorization": "Bearer boss"}).json()
        numbers = hook.metrics()
        assert set(numbers) >= OWN | {f"draftalign/{name}" for name in ("trained", "dead", "waiting", "skipped")}
        for name in ("alpha", "alpha_live", "headroom"):  # no drafter is served, no candidate was judged
            assert described[name] is None
            assert f"draftalign/{name}" not in numbers, "what is not known is absent, not 0"
        assert not any(isinstance(value, str) for value in numbers.values())
    finally:
        service.stop()
    assert "draftalign/trained" in hook.metrics(), "known a moment ago"
    monkeypatch.setattr(standing, "_OLD_SECONDS", 0.0)
    assert set(hook.metrics()) == OWN
    assert hook.stats()["run_stands"] == {}
    hook.close(1.0)


def test_a_trainer_whose_policy_is_not_the_runs_is_told_nothing_of_that_run(bench: Bench, redis_url: str) -> None:
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        with DrafterHook(tiny(tied=False), service.url, aux_layers=AUX) as own:
            assert own.flush(60)
        with DrafterHook(tiny(), service.url, aux_layers=AUX) as another:
            eventually(lambda: another.sender.refused and another.sender._standing.facts())
            assert "another policy's" in another.stats()["last_error"]
            assert set(another.metrics()) == OWN
    finally:
        service.stop()


def test_a_service_that_never_answers_costs_the_trainer_nothing_and_tells_it_nothing() -> None:
    """It takes connections and is silent: whoever asks it 200 times waits until the test's own end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hook = DrafterHook(tiny(), url, aux_layers=AUX, patience_seconds=0.1)
        try:
            assert [set(hook.metrics()) for _ in range(200)] == [OWN] * 200
            assert hook.stats()["failures"] == 0
        finally:
            hook.close(0.1)


class Liar:
    """Answers every question with what it is given."""

    def __init__(self) -> None:
        liar = self
        self.status, self.body = 200, b""
        self.answers = threading.Event()  # until it is set, none comes
        self.answers.set()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(202)
                self.send_header("Content-Length", "17")
                self.end_headers()
                self.wfile.write(b'{"run":"default"}')

            def do_GET(self) -> None:
                liar.answers.wait(60)
                self.send_response(liar.status)
                self.send_header("Content-Length", str(len(liar.body)))
                self.end_headers()
                self.wfile.write(liar.body)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"null",
        b'{"rollouts": null}',
        b'{"rollouts": []}',
        b'{"rollouts": "trained_total"}',
        b'{"rollouts": {"trained_total": ' + b"9" * 500 + b"}}",
        b'{"rollouts": {"trained_total": NaN, "dead_total": true, "waiting": "7"}, "alpha": Infinity, "headroom": []}',
        b'{"rollouts": {}, "alpha": {"a": 1}, "drafter": "v' + b"9" * 400 + b'-aa"}',
        b'{"rollouts": {"last_dead_reason": 5}, "drafter": ["v000001-aaaaaaaa"]}',
        b"[" * 60_000,
    ],
)
def test_nonsense_is_not_believed(liar: Liar, body: bytes) -> None:
    liar.body = body
    asked = Standing(RunService(Origin.parse(liar.url), "r"))
    heard = asked.ask()
    assert not {name for name, value in heard.items() if name == "dead_total" and type(value) is int}
    assert {name for name, value in asked.facts().items() if not isinstance(value, str)} == set()


def test_only_numbers_that_are_known_are_taken_over(liar: Liar) -> None:
    said = {
        "rollouts": {"trained_total": 3, "dead_total": 0, "waiting": None},
        "alpha": 2.5,
        "alpha_live": None,
        "headroom": 0.07,
    }
    liar.body = json.dumps(said | {"drafter": "v000012-0a1b2c3d"}).encode()
    asked = Standing(RunService(Origin.parse(liar.url), "r"))
    asked.ask()
    assert asked.facts() == {
        "trained": 3,
        "dead": 0,
        "alpha": 2.5,
        "headroom": 0.07,
        "drafter_version": "v000012-0a1b2c3d",
        "drafter_number": 12,
    }
    liar.status = 404
    assert asked.ask() == {}


def test_a_flush_ends_with_what_the_service_says_then(
    bench: Bench, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short trial is over long before it is time to ask."""
    monkeypatch.setattr(standing, "_ASK_SECONDS", 600.0)
    monkeypatch.setattr(standing, "_SOONEST_SECONDS", 0.0)
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    model = tiny(tied=False)
    hook = DrafterHook(model, service.url, aux_layers=AUX)
    try:
        for waiting in (1, 2):
            step(hook, model, waiting)
            assert hook.flush(20)
            assert hook.stats()["run_stands"]["waiting"] == waiting
    finally:
        service.stop()
        hook.close(1.0)


def test_a_trainer_that_flushes_often_does_not_ask_as_often(
    bench: Bench, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "_ASK_SECONDS", 600.0)
    monkeypatch.setattr(standing, "_SOONEST_SECONDS", 600.0)
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    sender = RolloutSender(service.url, asks=True)
    try:
        bench.register()
        sender.submit([b"z"])
        assert sender.flush(20.0)
        assert sender.flush(math.inf)
        assert sender._asked == 1
        sender._standing._soonest = -math.inf
        assert sender.flush(0.0), "which leaves no time for a question"
        assert sender._asked == 1
    finally:
        service.stop()
        sender.close(1.0)


def test_a_flush_asks_no_service_that_did_not_answer_a_moment_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_AWAY_SECONDS", 600.0)
    found = Standing(RunService(Origin.parse("http://127.0.0.1:1"), "default"))
    assert found.hurry()
    assert found.ask() == {}
    assert not found.hurry()
    assert found.seconds_left > 500.0


def test_a_flush_waits_for_no_answer_beyond_its_own_time(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_ASK_SECONDS", 600.0)
    liar.answers.clear()
    sender = RolloutSender(liar.url, asks=True)
    sender.submit([b"z"])
    began = time.monotonic()
    assert sender.flush(1.0), "all was sent"
    assert time.monotonic() - began > 0.9
    assert sender._asked == 0, "the answer has not come"
    sender.close(0.0)
    assert sender._thread is not None
    assert sender._thread.is_alive()
    liar.answers.set()
    sender._thread.join(60)
    again = threading.Thread(target=sender.flush, args=(600.0,), daemon=True)
    again.start()
    again.join(60)
    assert not again.is_alive(), "nobody asks any more"
