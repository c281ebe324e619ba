"""A real SGLang that has two variables in its environment, and nobody beside it: it follows the service by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import elicit_prompts, odd_prompts
from helpers.engine.server_load import Load, edited, publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from sglang_server.sglang_process import DEPTH, PLUGIN, SGLangProcess
from sglang_server.test_sglang_server_swap import nan, release, replayed, with_engine

from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import BASE_POLICY
from rl_hooks import wire
from rl_hooks.errors import EngineError
from service.monitor.records import AcceptanceRecord


class Alone(SGLangProcess):
    """A server that was started for no agent: without a loader of ours, and without metrics."""

    def _options(self, drafter: Path) -> list[str]:
        given = super()._options(drafter)
        at = given.index("--custom-weight-loader")
        return [one for one in (*given[:at], *given[at + 2 :]) if one != "--enable-metrics"]

    def has_taken(self, version: str) -> bool:
        """Whether it says so."""
        return f"draftalign: drafter {version} in " in self.log.read_text(errors="replace")


@contextmanager
def following(
    service: RunningService, drafters: Path, scratch: Path, *arguments: str, **environment: str
) -> Iterator[Alone]:
    """A server with the drafter `random`."""
    ours = {"DRAFTALIGN_URL": service.url, "DRAFTALIGN_RUN": "live"} | environment
    process = Alone(scratch, drafters / "random", scratch / "cache", *arguments, **ours)
    try:
        process.wait_until_ready()
        yield process
    except BaseException:
        print(process.log_end())
        raise
    finally:
        process.stop()


def records(redis_url: str) -> list[AcceptanceRecord]:
    """What engines have reported."""
    with Redis.from_url(redis_url) as client:
        return [one for one in Store(client, "live").acceptances() if one.reporter]


@pytest.mark.parametrize("way", ["plain", "overlapping", "two ranks"])
def test_a_server_with_variables_alone_follows_the_service(
    serve: Callable[..., RunningService],
    redis_url: str,
    drafters: Path,
    trained: Eagle3Drafter,
    tmp_path: Path,
    way: str,
) -> None:
    service = serve(drafting="greedy")
    environment = {"DRAFTALIGN_SAMPLE_FRACTION": "0.5", "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000"}
    environment |= {} if way == "plain" else {"DRAFTALIGN_TESTS_OVERLAP": "1"}
    environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if way == "two ranks" else {}
    ranks = ("--tp-size", "2") if way == "two ranks" else ()
    with following(service, drafters, tmp_path, *ranks, **environment) as server:
        load = Load(server)
        eventually(lambda: service.client.get("/runs/live").status_code == 200, 30)
        with load.running():
            load.wait_for(8)
            good = publish(service, drafters / "trained", trained, "live")
            eventually(lambda: server.has_taken(good), 60)
            load.wait_for(8)

            # --- one that does not fit is refused, with a reason that the service has
            bad = publish(service, edited(drafters, nan), trained, "live")
            eventually(lambda: any("NaN" in (one.withheld or "") for one in records(redis_url)), 60)
            load.wait_for(8)
            assert not server.has_taken(bad)
        assert load.failures == []
        assert load.changed == {}

        # --- its rounds are those of replay, and what it reports is what SGLang says of each request
        check_rounds(server, redis_url, good, trained)
        assert any(path.suffix == ".safetensors" for path in service.spooled()), "its requests are sent as well"
        check_an_agent_is_left_out(server, drafters)
        newest = check_a_session(server, service, redis_url, trained, drafters)
        check_the_end(server, redis_url, newest)


def check_rounds(server: Alone, redis_url: str, version: str, trained: Eagle3Drafter) -> None:
    """Under a policy version that a trainer names, rounds are those of replay and of the report."""
    ranks = str(server.client.get("/server_info").raise_for_status().json()["tp_size"])
    said = server.run_beside(PLUGIN / "trainer.py", server.url, str(BASE_POLICY / "model.safetensors"), "7", ranks)
    assert "written\n" in said, said
    prompts = odd_prompts(20, seed=7) + elicit_prompts(20, seed=21)
    tokens, rounds, expected_tokens, expected_rounds = replayed(server, trained, prompts)
    assert (tokens, rounds) == (expected_tokens, expected_rounds)

    def reported() -> AcceptanceRecord | None:
        found = [one for one in records(redis_url) if (one.drafter_version, one.policy_version) == (version, 7)]
        return found[0] if found and found[0].rounds >= rounds else None

    record: AcceptanceRecord = eventually(reported, 60)
    assert (record.rounds, record.emitted_tokens) == (rounds, tokens)
    by_prompt = record.by_prompt or {}
    assert [sum(counts) for counts in zip(*by_prompt.values(), strict=True)] == [tokens, rounds]
    assert {*by_prompt} <= {wire.prompt_hash(prompt)[: wire.COUNTED_DIGITS] for prompt in prompts}
    assert (record.depth, record.drafting) == (DEPTH, "greedy")
    assert len(prompts) - 4 <= (record.finished_requests or 0) <= len(prompts), "an answer of one token has no round"
    assert record.running_requests == 0


def check_an_agent_is_left_out(server: Alone, drafters: Path) -> None:
    """One that is started beside it swaps nothing and counts nothing, and is told why."""
    server.environment["DRAFTALIGN_DRAFTER_DIR"] = str(drafters)
    offered = release(drafters, drafters / "random", "from-outside")
    for call in (lambda engine: engine.state(), lambda engine: engine.swap(offered)):
        with pytest.raises(EngineError, match="follows run 'live' by itself"):
            with_engine(server, call)


def check_a_session(
    server: Alone, service: RunningService, redis_url: str, trained: Eagle3Drafter, drafters: Path
) -> str:
    """While a trainer's session is open no drafter is taken; returns the one that is taken after it."""
    server.post("/begin_weight_update", selector="target")
    dead = publish(service, drafters / "random", trained, "live")

    def told() -> bool:
        assert server.generate([1, 5, 9])  # reasons go with counts, and these with rounds
        return any("session is open" in (one.withheld or "") for one in records(redis_url))

    eventually(told, 60)
    assert not server.has_taken(dead)
    server.post("/end_weight_update")
    eventually(lambda: server.has_taken(dead), 60)
    return dead


def check_the_end(server: Alone, redis_url: str, version: str) -> None:
    """What was counted last, with the newest drafter, is reported when the server is told to end."""
    answers = [server.ask(prompt) for prompt in elicit_prompts(4, seed=10)]
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    server.process.terminate()
    server.process.wait(60)
    assert [one.rounds for one in records(redis_url) if one.drafter_version == version] == [rounds]


def test_a_service_that_is_away_costs_no_request(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    service = serve()
    service.stop()
    with following(service, drafters, tmp_path, DRAFTALIGN_SAMPLE_FRACTION="0") as server:
        assert len(server.generate([1, 5, 9])) > 0
        eventually(lambda: "joining run 'live' failed" in server.log_end(), 30)
        assert len(server.generate([1, 5, 9])) > 0


def test_where_its_agent_cannot_be_made_no_rank_follows_and_all_start(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    variables = {"DRAFTALIGN_PUBLIC_KEYS": "", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with following(serve(), drafters, tmp_path, "--tp-size", "2", **variables) as server:
        assert len(server.generate([1, 5, 9])) > 0
        said = server.log.read_text(errors="replace")
        assert said.count("this server does not follow the service: ") == 2, "once on each rank"
        assert said.count("draftalign: no features are captured: ") == 2
        assert "draftalign_follows" not in server.client.get("/server_info").text
