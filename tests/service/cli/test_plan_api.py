"""`draftalign plan`: what the API has to do, what a store takes off it, and how soon a queue is acknowledged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.deployment import World
from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.sending import delivery
from rl_hooks.sending.registration import head_job
from service.capacity.estimate import Fact, Traffic, estimate
from service.capacity.sizes import DIRECT_BYTES, GIB, POLICIES, Deployment, drafter_bytes, head_bytes, sent_file
from service.capacity.work import GPU_TFLOPS, Work
from service.cli.main import app
from service.settings import Settings

EIGHT = DrafterConfig.from_target(POLICIES["8b"], (2, 18, 33), 32_000)
#: A rank's files are of 60 MiB.
GIVEN = Deployment(EIGHT, 120.0, 128, 1024, ranks=64, engines=8, head_share=0.0)
STORE = {"rollouts_url": "s3://bucket/rollouts"}
DRAFTERS = {"drafters_url": "s3://bucket/drafters"}
STATE = {"state_url": "s3://bucket/state"}


def traffic(given: Deployment = GIVEN, /, **urls: str) -> Traffic:
    return Traffic(given, Settings(**urls))  # type: ignore[arg-type]


def facts(given: Deployment = GIVEN, gpus: float | None = None, /, **urls: str) -> dict[str, Fact]:
    return estimate(given, Settings(**urls), worker_gpus=gpus)  # type: ignore[arg-type]


# --- what goes by an object store


def test_from_the_size_on_from_which_a_hook_uses_the_store_the_plan_does() -> None:
    assert DIRECT_BYTES == delivery._SMALLEST_DIRECT_BYTES
    small = replace(GIVEN, tokens=64)
    assert sent_file(small)[1] < DIRECT_BYTES < sent_file(GIVEN)[1]
    for urls in (STORE, STATE):
        assert traffic(**urls).by_store
        assert not traffic(small, **urls).by_store
    assert not traffic(**DRAFTERS).by_store
    assert traffic(small, **STORE).cores == traffic(small).cores


@pytest.mark.parametrize(("tokens", "measured_ms"), [(1024, 19.1), (64, 7.9)])
def test_a_file_costs_the_api_what_was_measured(tokens: int, measured_ms: float) -> None:
    """docs/lab/uploads.md, "Rollouts by an object store": 64 MiB by the store, 4 MiB through the API."""
    file = traffic(replace(GIVEN, tokens=tokens), **STORE)
    assert file.file_cpu * 1000 == pytest.approx(measured_ms, rel=0.25)


@pytest.mark.parametrize(("mib", "alone_ms", "in_a_store_ms"), [(4, 38.5, 71.0), (64, 138.5, 281.0)])
def test_a_head_costs_the_api_what_was_measured(
    mib: int, alone_ms: float, in_a_store_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/lab/uploads.md, "What the plan takes a head and a download for"; this and the next test."""
    monkeypatch.setattr("service.capacity.estimate.head_bytes", lambda _: mib << 20)
    given = replace(GIVEN, head_share=1.0)
    planned = [traffic(given, **urls).head_cpu * 1000 for urls in ({}, STATE)]
    assert planned == pytest.approx([alone_ms, in_a_store_ms], rel=0.2)


@pytest.mark.parametrize(
    ("mib", "engines", "urls", "measured_ms"),
    [
        (4, 1, {}, 5.9 + 3.0),  # its two files
        (64, 1, {}, 39.5 + 3.0),
        (256, 1, {}, 162.5 + 3.0),
        (64, 1, DRAFTERS, 2.8 * 2),
        (4, 0, STATE, 45.0),  # the API's host fetches it
        (64, 0, STATE, 192.0),
    ],
)
def test_a_drafter_costs_the_api_what_was_measured(
    mib: int, engines: int, urls: dict[str, str], measured_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.capacity.estimate.drafter_bytes", lambda _: mib << 20)
    planned = traffic(replace(GIVEN, engines=engines), **urls).cores_of["downloads"] * GIVEN.step_seconds
    assert planned * 1000 == pytest.approx(measured_ms, rel=0.25)


def test_with_object_stores_a_deployment_fits_that_does_not_without() -> None:
    given = replace(GIVEN, runs=30)
    for urls, fits in (({}, False), (STORE, False), (DRAFTERS, False), (STORE | DRAFTERS, True)):
        fact = facts(given, **urls)["api_cores"]
        assert fact.load is not None
        assert (fact.load <= 1) == fits, fact
        for name in ("rollouts_url", "drafters_url"):  # what would help is named
            assert (f"DRAFTALIGN_{name.upper()}" in fact.text) == (name not in urls), fact.text


def test_an_advised_store_takes_off_what_the_advice_says() -> None:
    given = replace(GIVEN, runs=10)
    said = facts(given)["api_cores"].text
    for urls in (STORE, DRAFTERS):
        assert f"(an object store) {facts(given, **urls)['api_cores'].value:,.3g}" in said
    waits = Work.of(given, Settings(**STORE), GPU_TFLOPS).bring  # type: ignore[arg-type]
    assert said.count("the worker waits") == 1
    assert f"the worker waits {waits:,.1f} s a step of a run" in said


def test_where_the_api_has_little_to_do_no_store_is_advised() -> None:
    fact = facts()["api_cores"]
    assert fact.value < 0.5
    assert "object store" not in fact.text


def test_engines_that_download_from_a_store_take_nothing_of_the_line() -> None:
    through = facts(replace(GIVEN, engines=400))["download"]
    by_store = facts(replace(GIVEN, engines=400), **DRAFTERS)["download"]
    publish = drafter_bytes(EIGHT) / (100e9 / 8)
    assert through.value == pytest.approx(400 * publish)
    assert by_store.value == pytest.approx(2 * publish)  # the worker's put, and an engine's get
    assert by_store.load == pytest.approx(publish / GIVEN.step_seconds)
    assert (through.basis, by_store.basis) == ("arithmetic", "assumed")
    lags = [facts(replace(GIVEN, engines=400), **urls)["lag"].value for urls in ({}, DRAFTERS)]
    assert lags[0] - lags[1] == pytest.approx(398 * publish / GIVEN.step_seconds, rel=0.01)


def test_nothing_of_a_copy_in_a_directory_can_be_signed_so_the_api_sends_its_own_bytes() -> None:
    assert traffic(drafters_url="file:///copy").cores == traffic().cores


@pytest.mark.parametrize(("tokens", "urls"), [(1024, STORE), (1024, STATE), (64, STATE)])
def test_the_worker_waits_for_what_it_brings_from_the_store(tokens: int, urls: dict[str, str]) -> None:
    """Nothing is fetched ahead: each byte at the line's rate, and its SHA-256. Without a shared directory, of all."""
    given = replace(GIVEN, network_gbit=1.0, tokens=tokens)
    bytes_of_step = traffic(given).step_bytes
    bare, brings = (Work.of(given, Settings(**urls), GPU_TFLOPS) for urls in ({}, urls))  # type: ignore[arg-type]
    assert brings.bring > bytes_of_step / (1e9 / 8)
    assert brings.score - bare.score == brings.passed_over - bare.passed_over == pytest.approx(brings.bring)
    assert facts(given, **urls)["worker_gpus"].value > facts(given)["worker_gpus"].value
    assert brings.rate(64) < (brings.train + brings.score) / brings.bring  # one rank brings, and the others wait
    assert brings.rate(8) < bare.rate(8)


def test_small_files_are_in_the_spool_where_hosts_share_a_directory() -> None:
    small = replace(GIVEN, tokens=64)
    assert Work.of(small, Settings(**STORE), GPU_TFLOPS).bring == 0  # type: ignore[arg-type]


def test_hosts_that_share_no_directory_fetch_each_drafter_and_the_api_puts_what_came_through_it() -> None:
    small = replace(GIVEN, tokens=64, head_share=1.0)
    own, shared = traffic(small), traffic(small, **STATE)
    assert shared.inward_bytes - own.inward_bytes == drafter_bytes(EIGHT)
    assert shared.cores_of["rollouts"] > own.cores_of["rollouts"]
    assert shared.cores_of["heads"] > own.cores_of["heads"]
    assert traffic(**STATE).file_cpu == traffic(**STORE).file_cpu


@pytest.mark.parametrize("tokens", [64, 1024])
def test_what_the_api_puts_into_the_store_takes_the_line_outward(tokens: int) -> None:
    given = replace(GIVEN, tokens=tokens, head_share=1.0, runs=3)
    own, shared = (facts(given, **urls)["download"] for urls in ({}, STATE))
    assert own.load is not None
    assert shared.load is not None
    through = traffic(given).step_bytes if tokens == 64 else 0.0  # larger files go past the API
    seconds = 3 * (head_bytes(EIGHT) + through) / (100e9 / 8)
    assert (shared.load - own.load) * given.step_seconds == pytest.approx(seconds)
    assert own.value == shared.value


# --- heads and drafters


def test_a_heads_bytes_are_those_of_its_request() -> None:
    small = DrafterConfig(64, 64, 128, 4, 2, 16, 100, 50, (1, 2, 3))
    job = head_job("default", torch.zeros(small.vocab_size, small.target_hidden_size, dtype=torch.bfloat16), 1)
    assert head_bytes(small) == job.size_bytes
    assert 0 <= wire.parts_bytes(job.body()) - head_bytes(small) < 512  # its header


def test_heads_that_move_are_in_wire_and_cores_and_one_that_stays_is_not() -> None:
    head = 151_936 * 4096 * 2
    still, moves, half = (replace(GIVEN, runs=3, head_share=share) for share in (0.0, 1.0, 0.5))
    wires = [facts(given)["wire"].value for given in (still, half, moves)]
    assert wires[2] - wires[0] == pytest.approx(3 * head * 8e-9 / 120)
    assert wires[1] - wires[0] == pytest.approx((wires[2] - wires[0]) / 2)
    spent = [traffic(given).cores * 120 / 3 for given in (still, half, moves)]
    assert spent[2] - spent[0] == pytest.approx(0.04 + 1.4 * head / GIB)
    assert spent[1] - spent[0] == pytest.approx((spent[2] - spent[0]) / 2)


@pytest.mark.parametrize(("ranks", "waits"), [(1, True), (2, False)])
def test_the_only_ranks_first_file_waits_for_its_head(ranks: int, waits: bool) -> None:
    lags = [facts(replace(GIVEN, ranks=ranks, head_share=share))["lag"].value * 120 for share in (0.0, 1.0)]
    cpu = 0.04 + 1.4 * head_bytes(EIGHT) / GIB
    assert lags[1] - lags[0] == pytest.approx(cpu + head_bytes(EIGHT) * 8e-11 if waits else 0.0, abs=0.2)


def test_downloads_take_the_apis_time_and_as_many_as_the_line_lets_out() -> None:
    some, more = traffic(), traffic(replace(GIVEN, engines=28))
    assert (more.cores_of["downloads"] - some.cores_of["downloads"]) * 120 / 20 == pytest.approx(
        0.73 * drafter_bytes(EIGHT) / GIB + 0.006
    )
    late = replace(GIVEN, engines=4000)  # 256 s of the line
    assert traffic(late).outward > 2 * late.step_seconds
    assert traffic(late).cores_of["downloads"] == pytest.approx(
        4000 * (0.73 * drafter_bytes(EIGHT) / GIB + 0.006) / traffic(late).outward
    )


def test_at_the_full_size_heads_and_downloads_are_more_than_half_of_the_apis_work() -> None:
    """1,000 ranks of each of 100 runs, 10,000 engines: 16.6 cores and 84 Gbit/s without them."""
    given = replace(GIVEN, step_seconds=300.0, rollouts=1000, ranks=1000, runs=100, engines=100, network_gbit=400.0)
    found = facts(replace(given, head_share=1.0))
    assert found["wire"].value == pytest.approx(83.9 + 3.3, rel=0.01)
    assert found["api_cores"].value == pytest.approx(16.6 + 18.4 + 0.55, rel=0.01)


@pytest.mark.parametrize("urls", [{}, STORE, DRAFTERS, STORE | DRAFTERS, STATE | DRAFTERS])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_the_simulation_counts_heads_downloads_and_stores_as_the_plan_does(urls: dict[str, str], tokens: int) -> None:
    given = replace(GIVEN, tokens=tokens, ranks=8, rollouts=16, runs=2, engines=20, head_share=0.5)
    settings = Settings(queue_max_bytes=1 << 50, **urls)  # type: ignore[arg-type]
    planned = estimate(given, settings, worker_gpus=2.0)
    found = World(given, settings, "even", 2.0, GPU_TFLOPS, 0).run().facts
    for name in ("wire", "api_cores"):
        assert planned[name].value == pytest.approx(found[name], rel=0.12), (name, planned[name])


def test_the_option_says_that_a_head_does_not_move() -> None:
    def told(*arguments: str) -> Any:
        found = CliRunner().invoke(app, ["plan", "--json", *arguments])
        assert found.exit_code == 0, found.output
        return json.loads(found.output)

    assert told("--head-share", "0")["wire"]["value"] < told()["wire"]["value"]
    refused = CliRunner().invoke(app, ["plan", "--head-share", "1.5"])
    assert type(refused.exception).__name__ == "ConfigurationError"


# --- queue


@pytest.mark.parametrize(
    ("step_seconds", "pause", "steps"),
    [
        (20.0, 10.0, 0.75),  # the first of four files is acknowledged as soon as it is done: the last checkpoint is old
        (120.0, 10.0, 0.75),
        (15.0, 10.0, 1.0),  # the last checkpoint is of 5 s ago, and all four wait for the next
        (8.0, 10.0, 1.25),  # more than a step comes while nothing is acknowledged
        (120.0, 100.0, 1.0),
    ],
)
def test_the_queue_is_what_no_checkpoint_has_acknowledged(step_seconds: float, pause: float, steps: float) -> None:
    """Of four files, which the worker takes at once; beside simulations, whose files come when it happens."""
    given = Deployment(EIGHT, step_seconds, 4, 64, ranks=4, engines=1, post_share=5 / step_seconds / 2, head_share=0.0)
    settings = Settings(checkpoint_seconds=pause, queue_max_bytes=1 << 50)
    step_bytes = traffic(given).step_bytes
    fact = estimate(given, settings, worker_gpus=1.0)["queue"]
    assert "if the gate agrees" in fact.text  # a publish writes a checkpoint
    planned = fact.value / step_bytes
    assert planned == pytest.approx(steps, abs=0.06)
    worlds = (World(given, settings, "even", 1.0, GPU_TFLOPS, seed).run() for seed in range(5))
    found = sorted(world.facts["queue"] / step_bytes for world in worlds)
    assert planned == pytest.approx(found[2], abs=0.26), found


# --- what was measured


@pytest.mark.parametrize(
    ("runs", "gpus", "urls", "basis"),
    [
        (1, 1.0, {}, "measured on one H200"),
        (8, 8.0, {}, "measured on one H200"),  # each a worker by itself
        (1, 2.0, {}, "assumed"),
        (7, 8.0, {}, "assumed"),
        (1, 1.0, STORE, "assumed"),  # it waits for files
    ],
)
def test_several_gpus_of_one_run_are_computed_and_not_measured(
    runs: int, gpus: float, urls: dict[str, str], basis: str
) -> None:
    given = replace(GIVEN, rollouts=64, runs=runs)
    found = facts(given, gpus, **urls)
    assert {found[name].basis for name in ("worker_gpus", "busy", "scoring")} == {basis}


def test_where_more_than_one_gpu_is_needed_for_a_run_that_is_assumed() -> None:
    found = facts(replace(GIVEN, step_seconds=5.0))
    assert found["worker_gpus"].value > 1
    assert found["worker_gpus"].basis == "assumed"
