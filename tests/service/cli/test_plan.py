"""`draftalign plan`: bytes of the wire's own writer, work of the true shapes, queueing as a simulation has it."""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.capacity import compare, error
from benchmarks.deployment import PATIENCE, World
from benchmarks.step_peers import SIZES, floating_point_operations
from drafter.model.eagle3 import Eagle3Drafter
from drafter.training.optimizer import Method, Optimizer, _shared_out
from drafter.vocabulary import DraftVocabulary
from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig, tensor_shapes
from rl_hooks.sending.features import Captured, PackedIndex, StagedRollouts
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.trainer.base import HookOptions
from service.api.context.disk import Disk
from service.capacity.estimate import REDIS_BYTES, _waiting, estimate, money, worst_first
from service.capacity.sizes import (
    GIB,
    HOOK_BYTES,
    HOOK_TOKENS,
    POLICIES,
    Deployment,
    FeatureDtype,
    checkpoint_bytes,
    drafter_bytes,
    file_bytes,
)
from service.capacity.work import EXCHANGE_BYTES, GPU_TFLOPS, MOST_RANKS, Work, muon_flops, pass_flops
from service.cli.main import app
from service.cli.valkey import MAX_MEMORY
from service.settings import Settings
from service.storage.layout import Layout

EIGHT = DrafterConfig.from_target(POLICIES["8b"], (2, 18, 33), 32_000)
SMALL = DrafterConfig(64, 64, 128, 4, 2, 16, 100, 50, (1, 2, 3))
GIVEN = Deployment(EIGHT, 120.0, 256, 2048, ranks=8, engines=8)


@pytest.mark.parametrize("dtype", get_args(FeatureDtype))
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("rollouts", "tokens", "prompt"), [(1, 2, 1), (3, 17, 5), (8, 200, 50)])
def test_a_files_bytes_are_those_that_the_hook_writes(
    dtype: FeatureDtype, rollouts: int, tokens: int, prompt: int, together: bool
) -> None:
    """`together`: all answer one prompt, and share its states."""
    N = rollouts * tokens
    index = PackedIndex(
        np.zeros(N, np.int32) if together else np.arange(N, dtype=np.int32),
        np.arange(0, N + 1, tokens, dtype=np.int32),
        (np.arange(N) % tokens >= prompt).astype(np.uint8),
        np.zeros(N, np.float32),
    )
    state = torch.zeros(N, 64, dtype=torch.bfloat16)
    scored = torch.zeros(N), torch.zeros(N)
    predicting = torch.from_numpy(wire.predicting_rows(index.loss_mask))
    staged = StagedRollouts(index, Captured((state,) * 3, state), scored, dtype=dtype, predicting=predicting)
    ids = [f"{i:024d}" for i in range(rollouts)]
    metadata = wire.rollout_metadata(
        run="default", policy_version=0, rollout_ids=ids, target_fingerprint="0" * 32, aux_layers=(1, 2, 3),
        rewards=[0.0] * rollouts,
    )  # fmt: skip
    written = wire.parts_bytes(staged.encode(metadata, takes=["aux_rows"] if together else []))
    planned = file_bytes(SMALL, rollouts, tokens, dtype, prompt / tokens, rollouts if together else 1)
    assert abs(planned - written) <= 256  # of offsets in the header


def test_the_hooks_defaults_are_those_of_the_hook() -> None:
    hook, sender = HookOptions(), inspect.signature(RolloutSender).parameters
    assert hook.queue_bytes == sender["queue_bytes"].default == HOOK_BYTES
    assert hook.max_tokens_per_step == HOOK_TOKENS
    assert hook.patience_seconds == sender["patience_seconds"].default == PATIENCE


def test_a_drafters_bytes_are_those_of_its_weights() -> None:
    model = Eagle3Drafter(SMALL, DraftVocabulary(torch.arange(50), 100))
    held = sum(p.numel() * 2 for p in model.parameters()) + model.d2t.nbytes + model.t2d.nbytes
    assert drafter_bytes(SMALL) == held


@pytest.mark.parametrize("method", get_args(Method))
def test_a_checkpoints_bytes_are_those_of_weights_and_moments(method: Method) -> None:
    named = dict(Eagle3Drafter(SMALL, DraftVocabulary(torch.arange(50), 100)).named_parameters())
    optimizer = Optimizer(named, method, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    moments = {name: moment for name, moment in optimizer.moments().items() if not name.startswith("step.")}
    held = sum(tensor.nbytes for tensor in (*named.values(), *moments.values()))
    assert checkpoint_bytes(SMALL, method) == held


@pytest.mark.parametrize("more", [{}, {"keep_versions": 2, "recent_tokens": 1}, {"queue_max_bytes": 1 << 30}])
@pytest.mark.parametrize("runs", [1, 8])
def test_on_the_disk_of_the_plan_no_queue_is_refused_and_on_a_smaller_one_some_are(
    runs: int, more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, settings = replace(GIVEN, runs=runs), Settings(**more)  # type: ignore[arg-type]
    facts = estimate(given, settings)
    queued = int(min(2 * facts["queue"].value, settings.queue_max_bytes or math.inf))
    found = re.search(r"keeps ([\d.]+) GiB of each", facts["disk"].text)
    assert found is not None
    kept = int(float(found[1]) * GIB)
    disk = Disk(settings, Layout(tmp_path), Mock(), Mock())
    disk._kept_bytes["a"] = kept
    for size, has_room in ((facts["disk"].value * 1.01, True), (facts["disk"].value * 0.97, False)):
        free = int(size) - runs * (kept + queued)
        monkeypatch.setattr(disk.spool, "free_bytes", lambda free=free: free)
        assert (disk.queue_limit_bytes(queued, "a") >= queued) == has_room


def test_what_redis_remembers_of_all_runs_is_bounded_and_compared_with_the_embedded_ones_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = replace(GIVEN, runs=10)
    bounded = estimate(given, Settings())["redis"]
    assert 2 * (128 << 20) < bounded.value < 512 << 20
    in_a_file = [estimate(replace(given, rollouts=8 * n, tokens=64), Settings())["redis"].value for n in (64, 65)]
    assert in_a_file[1] < in_a_file[0], "of more than 64 prompts a batch's scores keep 16 shares"
    assert bounded.load == bounded.value / REDIS_BYTES
    monkeypatch.setenv("DRAFTALIGN_REMEMBERED_BYTES", str(1 << 30))
    more = estimate(given, Settings())["redis"]
    assert more.load is not None
    assert more.load > 1
    assert f"{REDIS_BYTES >> 20}mb" == MAX_MEMORY


@pytest.mark.parametrize(("depth", "responses", "documents"), [(1, 4096, 1), (3, 4096, 1), (4, 1000, 4), (7, 2048, 2)])
def test_the_work_of_a_pass_is_the_rooflines_count(depth: int, responses: int, documents: int) -> None:
    true = floating_point_operations(
        SIZES["8B"], tokens=4096, responses=responses, steps=depth, train_head=True, documents=documents
    )
    assert pass_flops(EIGHT, 4096, responses, documents, depth) == pytest.approx(true, rel=1e-9)


def test_muon_costs_what_performance_md_says() -> None:
    assert muon_flops(EIGHT) == pytest.approx(25.1e12, rel=0.01)


def one_run(**changes: Any) -> Deployment:
    """A batch of 16,384 tokens a step, half of them response."""
    return replace(GIVEN, **{"rollouts": 16, "tokens": 1024, "prompt_share": 0.5, "runs": 1, "ranks": 1} | changes)


def test_ranks_are_as_fast_as_the_guide_computes() -> None:
    """Its table, in ms of an optimizer step: rollouts, Muon, exchange, what is shared out of scoring, what is not."""
    work = Work.of(one_run(), Settings(), GPU_TFLOPS)
    for ranks, muon, told in ((4, 0.329, 2.8), (8, 0.192, 4.1)):
        exchange = (2 * (ranks - 1) / ranks * 1.6 + 1.07) / 260 * 1000
        step = 153 / ranks + 43 * muon + exchange + (21 + 32) / ranks + 6 + 10
        assert 265 / step == pytest.approx(told, abs=0.05)
        assert work.rate(ranks) == pytest.approx(told, abs=0.1)
    larger = Work.of(one_run(), Settings(train_step_tokens=65_536), GPU_TFLOPS)
    assert larger.rate(8) == pytest.approx(4.9, abs=0.15)
    assert work.rate(1) == 1.0
    rates = [work.rate(ranks) for ranks in range(1, 20)]
    assert all(rate < ranks for ranks, rate in enumerate(rates[1:], 2))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_plan_shares_muons_matrices_out_as_the_optimizer_does(ranks: int) -> None:
    shapes = {n: torch.Size(s) for n, s in tensor_shapes(EIGHT).items() if len(s) == 2 and n != "lm_head.weight"}
    cost = {n: 4.0 * min(s) ** 2 * max(s) + 2.0 * min(s) ** 3 for n, s in shapes.items()}
    loads = [sum(cost[n] for n, rank in _shared_out(shapes, ranks).items() if rank == r) for r in range(ranks)]
    work = replace(Work.of(one_run(), Settings(), GPU_TFLOPS), score=0.0)
    bare = replace(work, muon=0.0, train=work.train - work.muon)
    matrices = 4 * sum(math.prod(s) for n, s in tensor_shapes(EIGHT).items() if n != "lm_head.weight")
    seconds = work.train / work.rate(ranks) - bare.train / bare.rate(ranks) - work.steps * matrices / EXCHANGE_BYTES
    assert seconds == pytest.approx(max(loads) / sum(cost.values()) * work.muon, rel=1e-6)


def test_gpus_beyond_the_runs_are_ranks_and_others_are_workers() -> None:
    work = Work.of(one_run(), Settings(), GPU_TFLOPS)
    assert work.speed(8, 8) == 8.0
    assert work.speed(0.5, 1) == 0.5
    assert work.speed(8, 1) == work.rate(8)
    assert work.speed(3, 2) == pytest.approx(1 + work.rate(2))
    assert work.gpus(work.rate(5) - 0.01, 1) == 5
    assert work.gpus(0.4, 1) == 0.4
    assert work.gpus(100.0, 1) == MOST_RANKS


def test_the_plan_says_at_what_rate_ranks_run_and_no_longer_that_they_fit() -> None:
    """2.5 GPUs' work: three GPUs of one run are not enough, of three runs they are."""
    given = one_run(rollouts=64, step_seconds=1.0)
    asked = Work.of(given, Settings(), GPU_TFLOPS)
    given = replace(given, step_seconds=(asked.train + asked.score) / 2.5)
    for runs, fits in ((1, False), (3, True)):
        planned = replace(given, runs=runs, step_seconds=given.step_seconds * runs)
        fact = estimate(planned, Settings(), worker_gpus=3.0)["worker_gpus"]
        assert fact.load is not None
        assert (fact.load <= 1) == fits, fact
        assert ("one run on 3 GPUs (ranks) runs at 2." in fact.text) == (runs == 1), fact.text
        assert ("DRAFTALIGN_TRAIN_STEP_TOKENS=65536" in fact.text) == (runs == 1)
    assert estimate(given, Settings())["worker_gpus"].value == asked.gpus(2.5, 1) > 3


def test_the_simulation_has_the_ranks_rate() -> None:
    given = one_run(rollouts=64, step_seconds=4.0)
    for gpus, runs in ((1.0, 1), (8.0, 1), (8.0, 8)):
        world = World(replace(given, runs=runs), Settings(), "even", gpus, GPU_TFLOPS, 0)
        assert world.speed == world.work.speed(gpus, runs)
        assert (world.speed < gpus) == (gpus > runs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_the_plan_agrees_with_the_simulation(seed: int, factor: float) -> None:
    """In the world that the plan is of. Others: docs/lab/capacity.md."""
    given = replace(GIVEN, ranks=2 + 6 * seed, runs=1 + 2 * seed, step_seconds=60.0 + 100 * seed)
    gpus = factor * estimate(given, Settings())["worker_gpus"].value
    plan, found = compare(given, gpus, seed, "even")
    # trained: 0.128 with two ranks, and 0.064 without heads: the files of rank 0 wait for its head
    for name, most in {"busy": 0.08, "trained": 0.14, "wire": 0.08, "api_cores": 0.12, "queue": 0.5}.items():
        assert error(plan[name], found.facts[name]) <= most, (name, plan, found.facts)
    assert not found.refused


@pytest.mark.parametrize("runs", [2, 4, 30, 100])
@pytest.mark.parametrize("load", [0.3, 0.7, 0.98])
def test_a_run_waits_for_others_as_periodic_streams_do(runs: int, load: float) -> None:
    """Against Lindley's recursion over two steps of streams whose phases are drawn."""
    rng, waits = np.random.default_rng(0), []
    for _ in range(300):
        wait, before = 0.0, 0.0
        for when in np.concatenate([phases := np.sort(rng.uniform(size=runs)), 1 + phases]):
            wait = max(0.0, wait + load / runs - (when - before)) if before else 0.0
            before = float(when)
            if when >= 1:
                waits.append(wait * runs / load)  # in pieces of work
    assert _waiting(runs, load) == pytest.approx(statistics.fmean(waits), rel=0.25)
    assert _waiting(1, load) == 0


def test_thousands_of_runs_that_do_little_wait_as_random_arrivals_do() -> None:
    waits = [_waiting(runs, 0.1) for runs in (900, 1800, 100_000)]
    assert waits == sorted(waits)
    assert waits == pytest.approx([0.05 / 0.9] * 3, rel=0.01)


def test_where_the_queue_is_too_small_posts_are_refused_and_the_plan_says_so() -> None:
    for limit, fits in ((1 << 40, True), (1 << 30, False)):
        settings = Settings(queue_max_bytes=limit, max_body_bytes=1 << 29)
        facts = estimate(GIVEN, settings, worker_gpus=1.0)
        refused = World(GIVEN, settings, "even", 1.0, GPU_TFLOPS, 0).run().refused
        load = facts["queue"].load
        assert load is not None
        assert (load <= 1, refused == 0) == (fits, fits)


def test_the_worst_comes_first_and_what_nothing_limits_last() -> None:
    loads = [fact.load for _, fact in worst_first(estimate(GIVEN, Settings()))]
    known = [load for load in loads if load is not None]
    assert known == sorted(known, reverse=True)
    assert loads[: len(known)] == known


def test_more_of_anything_never_makes_it_cheaper() -> None:
    less = estimate(GIVEN, Settings())
    for more in ({"ranks": 16, "rollouts": 512}, {"runs": 3}, {"engines": 80}, {"step_seconds": 60.0}):
        found = estimate(replace(GIVEN, **more), Settings())
        for name in ("worker_gpus", "wire", "api_cores", "redis"):
            assert found[name].value >= less[name].value - 1e-12, (more, name)


def test_money_and_what_alpha_is_worth() -> None:
    found = money(2.0, 3.0, 100, (2.0, 0.5, 0.7))
    assert found["cost"].value == 144.0
    assert found["cost_a_point"].value == pytest.approx(144 / 50)
    assert found["saved"].value == pytest.approx(
        100 * 24 * 3 * 0.7 * 0.2
    )  # α by 1.25: generation takes 0.8 of its time
    assert found["saved"].load == pytest.approx(144 / 1008)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_policy_with_fewer_tokens_than_the_draft_vocabularys_setting_is_planned_for(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**POLICIES["8b"], "vocab_size": 105}))
    told = run("--policy", str(path))
    assert told.exit_code == 0, told.exception


def test_the_command_prints_json_that_can_be_read(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": dict(POLICIES["8b"])}))
    mine = run("--policy", str(path), "--json", "--gpu-hour-price", "3", "--alpha-now", "2", "--alpha-gain", "0.2")
    named = run("--policy", "8b", "--json", "--gpu-hour-price", "3", "--alpha-now", "2", "--alpha-gain", "0.2")
    facts = json.loads(mine.output)
    assert facts == json.loads(named.output)
    bases = {"arithmetic", "measured on two cores", "measured on one H200", "assumed"}
    assert {fact["basis"] for fact in facts.values()} == bases
    assert all(math.isfinite(fact["value"]) for fact in facts.values())


def test_what_does_not_fit_and_what_costs_more_than_it_saves_are_said_apart() -> None:
    told = run("--ranks", "64", "--gpu-hour-price", "3", "--alpha-now", "2.2", "--alpha-gain", "0.01").output
    over = [line.split()[0] for line in told.splitlines() if " DOES NOT " in line]
    assert "api_cores" in over
    assert [line.split()[0] for line in told.splitlines() if " DOES NOT PAY " in line] == ["saved"]
    assert told.count(" DOES NOT FIT ") == len(over) - 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--step-seconds", "0"], ["--step-seconds", "nan"], ["--tokens-a-rollout", "1"], ["--prompt-share", "1"],
        ["--sampled-share", "1.5"], ["--ranks", "0"], ["--engines", "-1"], ["--worker-gpus", "0"],
        ["--policy", "no-such-file"], ["--alpha-now", "2"], ["--gpu-hour-price", "nan"], ["--network-gbit", "inf"],
        ["--gpu-hour-price", "3", "--alpha-now", "2", "--alpha-gain", "0.1", "--generation-share", "2"],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(wrong: list[str]) -> None:
    found = run(*wrong)
    assert found.exit_code != 0
    assert type(found.exception).__name__ == "ConfigurationError"


def test_another_dtype_than_the_hooks_is_refused_by_name() -> None:
    found = run("--dtype", "int4")
    assert found.exit_code == 2
    assert "int4" in found.output
    assert "float8_e4m3_all" in found.output


def test_the_errors_of_the_plan_over_random_deployments_stay_small() -> None:
    errors = []
    for seed in range(4):
        given = replace(GIVEN, ranks=1 + 10 * seed, step_seconds=40.0 + 30 * seed, sampled_share=0.3)
        gpus = estimate(given, Settings())["worker_gpus"].value * (0.7 + 0.4 * seed)
        plan, found = compare(given, gpus, seed, "tail")
        errors.append(error(plan["busy"], found.facts["busy"]))
    assert statistics.median(errors) < 0.3
