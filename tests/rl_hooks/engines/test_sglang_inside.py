"""A SGLang's own part in following the service, driven as SGLang's scheduler drives it; tests/sglang_server has one."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from helpers.drafter.formats_fixtures import ENGINES_CONFIG, ENGINES_VOCABULARY
from helpers.engine.agent_fixtures import eventually
from helpers.engine.sglang_contract import DraftModel, SGLangServer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import Eagle3Drafter
from rl_hooks.agent.in_process import InProcessAgent
from rl_hooks.engines.counting.counters import NO_VERSION
from rl_hooks.engines.protocol import TREES
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.sglang import inside, loader
from rl_hooks.engines.sglang.adapter import SGLangEngine
from rl_hooks.engines.sglang.direct import MARK
from rl_hooks.engines.sglang.inside import Outcome, RankDrafter, SchedulerEngine, SchedulerLink, SwapOrder
from rl_hooks.engines.sglang.memory import MEMORY
from rl_hooks.engines.sglang.rounds import ServedRounds, StepCounter
from rl_hooks.engines.vllm.engine import CoreEngine
from rl_hooks.errors import EngineError, OtherBytesError, SwapRefusedError
from rl_hooks.format.release import Release, VerifiedManifest
from rl_hooks.wire import COUNTED_DIGITS, prompt_hash

SETTINGS = ServiceSettings("http://127.0.0.1:9", run="live")
ALONE = SimpleNamespace(world_size=1)


def drafter_in(directory: Path, seed: int, change: Callable[[dict[str, Tensor]], None] = lambda _: None) -> Path:
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(ENGINES_CONFIG, ENGINES_VOCABULARY)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter)
    directory.mkdir(parents=True)
    write_drafter(directory, drafter)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


class Updater:
    """SGLang's `WeightUpdater` of the draft's model runner."""

    def __init__(self, model: DraftModel) -> None:
        self.model, self.calls = model, list[str]()

    def begin_weight_update(self) -> None:
        self.calls.append("begin")

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
        (_,) = named_tensors  # all of a call are on the device at once
        if self.calls[-1] != "update":
            self.calls.append("update")
        self.model.load_weights(named_tensors)
        return True, "Success"

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self.calls.append("end" if not run_post_load else "end of a load that SGLang has not seen")


class Worker:
    """SGLang's `EAGLEWorkerV2`."""

    def __init__(self, directory: Path, **arguments: Any) -> None:
        self.model = DraftModel(directory, nn.Parameter(torch.ones(8, 8)))
        self.updater = Updater(self.model)
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = 1, 3, 4
        ways = {"pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "speculative_algorithm": "EAGLE3"}
        self.server_args = SimpleNamespace(**ways | arguments)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", SimpleNamespace(model=self.model, weight_updater=self.updater, device="cpu"))]


class Agent:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, _: SchedulerLink) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def join(self, timeout_seconds: float) -> None:
        assert timeout_seconds > 0
        self.calls.append("join")


@pytest.fixture(autouse=True)
def of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scheduler's process has once: its counter, who swaps there, its group of ranks."""
    counter = StepCounter()
    for module in (inside, loader):
        monkeypatch.setattr(module, "COUNTER", counter)
    monkeypatch.setattr(loader.OWNER, "refusal", None)
    monkeypatch.setattr(inside, "tp_group", lambda: ALONE)
    monkeypatch.setattr(inside, "weight_version", lambda: "default")


class Scheduler:
    """SGLang's scheduler around a link: `turn` is one pass of its loop."""

    def __init__(self, directory: Path, **arguments: Any) -> None:
        self.worker, self.agent = Worker(directory, **arguments), Agent()
        self.weight_updater = SimpleNamespace(_session=None)
        self.link = SchedulerLink(SETTINGS, lambda: self.agent)
        self.link.made(None, self.worker)
        self.seen: list[Any] = []

    @property
    def rank(self) -> RankDrafter:
        assert self.link.rank is not None
        return self.link.rank

    def turn(self, *requests: str) -> None:
        pulled: list[Any] = list(requests)
        assert self.link.pulled(pulled, "receiver") is None  # type: ignore[func-returns-value]
        assert self.link.received(self, pulled) is None  # type: ignore[func-returns-value]
        self.seen += pulled

    def swap(self, directory: Path, version: str, **sha256s: str) -> str | None:
        """As the agent swaps, in a thread of its own, while the loop goes on."""
        manifest = VerifiedManifest("live", version, 1, "", "", (), "", "")
        engine, release = SchedulerEngine("in-process:x", self.link), Release(manifest, directory, sha256s)
        with ThreadPoolExecutor(1) as pool:
            swapped: Future[str | None] = pool.submit(lambda: asyncio.run(engine.swap(release)))
            while not swapped.done():
                self.turn("request")
                time.sleep(0.001)
        return swapped.result()

    def has(self, directory: Path) -> bool:
        sent = load_file(directory / "model.safetensors")
        return torch.equal(self.worker.model.lm_head.weight, sent["lm_head.weight"])


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    return Scheduler(drafter_in(tmp_path / "initial", 0))


def test_a_drafter_is_read_beside_the_loop_and_loaded_in_one_turn_of_it(scheduler: Scheduler, tmp_path: Path) -> None:
    good = drafter_in(tmp_path / "1", 1)
    assert (scheduler.rank.version, scheduler.link.law()) == (None, (None, None))
    digest = scheduler.swap(good, "v1")
    assert scheduler.has(good)
    assert scheduler.worker.updater.calls == ["begin", "update", "end"]
    assert vars(inside)["COUNTER"]._changed_at is not None, "rounds that the older one had a part in are left out"
    state = scheduler.link.state()
    assert (state.version, state.loaded, state.swaps, state.sha256) == ("v1", True, 1, digest)
    assert (state.depth, state.drafting, state.takes) == (3, "greedy", "eagle3")
    assert state.config_fingerprint is not None
    assert state.aux_layers == ENGINES_CONFIG.aux_layers
    assert {*scheduler.seen} == {"request"}, "SGLang sees its own requests, and no other"


def not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][0] = float("nan")


def test_a_drafter_that_does_not_fit_is_refused_and_the_old_one_stays(scheduler: Scheduler, tmp_path: Path) -> None:
    good, bad = drafter_in(tmp_path / "1", 1), drafter_in(tmp_path / "2", 2, not_finite)
    scheduler.swap(good, "v1")
    with pytest.raises(SwapRefusedError, match=r"this server refused v2: norm\.weight holds NaN"):
        scheduler.swap(bad, "v2")
    with pytest.raises(OtherBytesError, match="expected sha256 000"):
        scheduler.swap(good, "v3", **{"model.safetensors": "0" * 64})
    with pytest.raises(EngineError, match="No such file"):
        scheduler.swap(tmp_path / "nowhere", "v4")
    assert scheduler.has(good)
    assert scheduler.link.law() == ("v1", None)
    assert scheduler.worker.updater.calls == ["begin", "update", "end"]


def test_nothing_is_loaded_in_a_trainers_session_nor_into_released_memory(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor read: each try would read the whole drafter on all ranks, and keep it in memory."""
    good, read = drafter_in(tmp_path / "1", 1), list[Path]()

    def reads(model: nn.Module, directory: Path, sha256s: Mapping[str, str]) -> tuple[dict[str, Tensor], str]:
        read.append(directory)
        return loader.read_drafter(model, directory, sha256s)

    monkeypatch.setattr(inside, "read_drafter", reads)
    scheduler.weight_updater._session = SimpleNamespace(selector="target")
    with pytest.raises(EngineError, match="session is open"):
        scheduler.swap(good, "v1")
    scheduler.weight_updater._session = None
    monkeypatch.setattr(MEMORY, "released", True)
    with pytest.raises(EngineError, match="released"):
        scheduler.swap(good, "v1")
    assert (read, scheduler.rank.staged) == ([], None)
    monkeypatch.setattr(MEMORY, "released", False)
    order = SwapOrder("v1", str(good), {})
    assert scheduler.rank.stage(order, scheduler.weight_updater) == []
    assert scheduler.rank.staged is not None
    assert scheduler.rank.staged.done.wait(60)
    scheduler.weight_updater._session = SimpleNamespace(selector="target")  # opened while the files were read
    (said,) = scheduler.rank.apply("v1", scheduler.weight_updater)
    assert "session is open" in said["failed"]
    assert scheduler.rank.staged is None
    assert scheduler.worker.updater.calls == []
    scheduler.weight_updater._session = None
    scheduler.swap(good, "v1")
    assert scheduler.has(good)


def test_a_load_that_breaks_half_way_puts_the_old_drafter_back(scheduler: Scheduler, tmp_path: Path) -> None:
    first, second = drafter_in(tmp_path / "1", 1), drafter_in(tmp_path / "2", 2)
    scheduler.swap(first, "v1")
    before = scheduler.worker.model.weights()
    scheduler.worker.model.break_after = 5
    with pytest.raises(EngineError, match="broke this load half-way"):
        scheduler.swap(second, "v2")
    after = scheduler.worker.model.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert scheduler.link.law() == ("v1", None)
    assert scheduler.worker.updater.calls[-1] == "end", "the model is whole again"
    scheduler.swap(second, "v2")
    assert scheduler.has(second)


class Exchange:
    """Two ranks tell each other outcomes; each is a thread here."""

    def __init__(self) -> None:
        self._barrier, self._said = threading.Barrier(2, timeout=60), dict[int, Outcome]()

    def tell(self, rank: int) -> Callable[[Outcome], list[Outcome]]:
        def tell(outcome: Outcome) -> list[Outcome]:
            self._barrier.wait()
            self._said[rank] = outcome
            self._barrier.wait()
            return [self._said[0], self._said[1]]

        return tell


@pytest.mark.parametrize("fault", ["load", "read", "not read yet"])
def test_all_ranks_load_or_none(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    initial, good = drafter_in(tmp_path / "0", 0), drafter_in(tmp_path / "1", 1)
    bad = drafter_in(tmp_path / "2", 2, not_finite)
    workers, exchange = [Worker(initial), Worker(initial)], Exchange()
    ranks = [RankDrafter(worker, LayerRanks(ALONE)) for worker in workers]
    manager = SimpleNamespace(_session=None)
    for number, rank in enumerate(ranks):
        monkeypatch.setattr(rank, "_tell", exchange.tell(number))
        rank.stage(SwapOrder("v1", str(bad if fault == "read" and number else good), {}), manager)
        assert rank.staged is not None
        assert rank.staged.done.wait(60)
    if fault == "load":
        workers[1].model.break_after = 5
    elif fault == "not read yet":
        assert ranks[1].staged is not None
        ranks[1].staged.done.clear()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: rank.apply("v1", manager), ranks))
    assert said[0] == said[1], "all know what became of all"
    assert not all(one["ok"] for one in said[0])
    heads = load_file(initial / "model.safetensors")["lm_head.weight"]
    assert all(torch.equal(worker.model.lm_head.weight, heads) for worker in workers)
    assert [rank.version for rank in ranks] == [None, None]
    assert all(rank.loaded for rank in ranks)
    assert {rank.staged is not None for rank in ranks} == {fault == "not read yet"}, "no memory for what is refused"
    if fault == "not read yet":
        assert ranks[1].staged is not None
        ranks[1].staged.done.set()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: rank.apply("v1", manager), ranks))
        assert [rank.version for rank in ranks] == ["v1", "v1"]
    del caplog


def test_a_drafter_that_another_has_written_over_is_no_versions_until_it_is_swapped_again(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    good = drafter_in(tmp_path / "1", 1)
    scheduler.swap(good, "v1")
    scheduler.link.written()  # of the policy alone
    scheduler.turn()
    assert scheduler.link.law() == ("v1", None)
    with torch.no_grad():
        scheduler.worker.model.model.fc.weight.zero_()
    scheduler.weight_updater._session = object()
    scheduler.link.written()
    scheduler.turn()
    assert scheduler.link.law() == ("v1", None), "weights are looked at when they are whole"
    scheduler.weight_updater._session = None
    scheduler.turn()
    assert scheduler.link.law() == (NO_VERSION, None)
    assert scheduler.link.state().serving is None
    scheduler.swap(good, "v1")
    assert scheduler.link.law() == ("v1", None)
    assert scheduler.has(good)


def test_a_swap_that_fails_does_not_hide_that_another_has_written(scheduler: Scheduler, tmp_path: Path) -> None:
    """The order comes with the turn that would have looked."""
    first, second = drafter_in(tmp_path / "1", 1), drafter_in(tmp_path / "2", 2)
    scheduler.swap(first, "v1")
    scheduler.rank.stage(SwapOrder("v2", str(second), {}), scheduler.weight_updater)
    assert scheduler.rank.staged is not None
    assert scheduler.rank.staged.done.wait(60)
    with torch.no_grad():
        scheduler.worker.model.model.fc.weight.zero_()
    scheduler.link.written()
    scheduler.worker.model.break_after = 5
    said = scheduler.link.ask(SwapOrder("v2", str(second), {}, apply=True))
    scheduler.turn()
    assert "half-way" in said.result(0)[0]["failed"]
    assert scheduler.link.law() == (NO_VERSION, None)


def test_the_ranks_are_asked_less_and_less_often_while_one_of_them_reads(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, pauses, sleep = [{"ok": False, "reading": True}] * 8, list[float](), asyncio.sleep

    async def slept(seconds: float) -> None:
        if len(reading) < 8:  # before that this rank reads
            pauses.append(seconds)
        await sleep(0.001)

    def tell(outcome: Outcome) -> list[Outcome]:
        return [outcome, reading.pop() if reading else outcome]

    monkeypatch.setattr(scheduler.rank, "_tell", tell)
    monkeypatch.setattr(asyncio, "sleep", slept)
    good = drafter_in(tmp_path / "1", 1)
    scheduler.swap(good, "v1")
    assert scheduler.has(good)
    assert pauses == [0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]


def test_what_nobody_waits_for_any_more_is_not_sent_and_a_fault_ends_no_turn(
    scheduler: Scheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = drafter_in(tmp_path / "1", 1)
    cancelled = scheduler.link.ask(SwapOrder("v1", str(good), {}))
    cancelled.cancel()
    scheduler.turn("request")
    assert scheduler.rank.staged is None
    scheduler.swap(good, "v1")
    scheduler.weight_updater = SimpleNamespace()  # of another shape
    with pytest.raises(EngineError, match="_session"):
        scheduler.swap(drafter_in(tmp_path / "2", 2), "v2")
    scheduler.link.written()
    scheduler.turn("request")
    del scheduler.weight_updater
    asked = scheduler.link.ask(SwapOrder("v2", str(good), {}))
    scheduler.link.written()
    scheduler.turn("request")
    assert "weight_updater" in str(asked.exception(0))
    assert "the server goes on" in caplog.text
    assert scheduler.has(good)


def test_while_the_service_is_away_the_log_says_so_once(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server may wait for it for hours, and asks every five seconds."""
    monkeypatch.setattr("rl_hooks.agent.in_process._RETRY_SECONDS", 0.01)
    agent, asked = InProcessAgent(SETTINGS, tmp_path / "cache", "host 1 dp0", CoreEngine), list[bool]()

    def away() -> None:
        asked.append(True)
        raise OSError("nobody is there")

    monkeypatch.setattr(agent, "newest_policy", away)
    agent.start(scheduler.link)
    eventually(lambda: len(asked) > 4)
    agent.stop()
    agent.join(60)
    assert caplog.text.count("joining run 'live' failed") == 1


def test_a_server_that_runs_another_way_follows_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(drafter_in(tmp_path / "0", 0), pp_size=2, dp_size=2)
    assert scheduler.link.rank is None
    said = caplog.text
    assert "does not follow the service: not with pipeline parallelism (--pp-size), data parallelism" in said
    scheduler.link.started()
    scheduler.turn("request")
    scheduler.link.ended()
    assert scheduler.agent.calls == []
    assert loader.OWNER.refusal is None, "an agent beside it may swap"


@pytest.mark.parametrize(
    "way",
    [
        {"speculative_adaptive": True},
        {"speculative_draft_model_quantization": "fp8"},
        {"quantization": "fp8"},  # the drafter is then quantized as the policy
    ],
)
def test_a_drafter_that_cannot_take_what_is_published_is_not_followed_with(
    tmp_path: Path, way: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial = drafter_in(tmp_path / "0", 0)
    if "quantization" in way:
        quantized = Worker(initial)
        quantized.model.model.fc.quant_method = type("Fp8LinearMethod", (), {})()
        monkeypatch.setattr(sys.modules[__name__], "Worker", lambda *_, **__: quantized)
    scheduler = Scheduler(initial, **way)
    assert scheduler.link.rank is None
    assert "does not follow the service: not with " in caplog.text
    assert ("--speculative-adaptive" if "speculative_adaptive" in way else "a quantized drafter") in caplog.text


def test_what_sglang_leaves_as_it_is_is_not_quantized(tmp_path: Path) -> None:
    worker = Worker(drafter_in(tmp_path / "0", 0), speculative_draft_model_quantization="unquant")
    worker.model.model.fc.quant_method = type("UnquantizedLinearMethod", (), {})()
    assert inside.quantized(worker) == []


def test_where_its_agent_cannot_be_made_a_server_starts_and_an_agent_beside_it_may_swap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_agent() -> Agent:
        raise ModuleNotFoundError("No module named 'httpx'")

    link = SchedulerLink(SETTINGS, no_agent)
    link.made(None, Worker(drafter_in(tmp_path / "0", 0)))
    assert link.rank is None
    assert (loader.OWNER.refusal, vars(inside)["COUNTER"].served) == (None, None)
    link.workers_made()
    link.started()
    link.ended()
    assert caplog.text.count("does not follow the service") == 1
    assert "No module named 'httpx'" in caplog.text


def test_a_server_without_eagle_3_says_that_it_does_not_follow(caplog: pytest.LogCaptureFixture) -> None:
    SchedulerLink(SETTINGS, Agent).workers_made()  # nothing that can follow was made
    assert "this server does not follow the service: it does not speculate with EAGLE-3" in caplog.text


def test_the_agent_lives_as_long_as_the_loop_and_joins_a_new_run_when_the_tap_has_begun(tmp_path: Path) -> None:
    told, begun, scheduler = list[int | None](), list[bool](), Scheduler(drafter_in(tmp_path / "0", 0))
    scheduler.link = SchedulerLink(SETTINGS, lambda: scheduler.agent, lambda: 5, told.append, lambda: bool(begun))
    scheduler.link.made(None, scheduler.worker)
    scheduler.link.started()
    assert scheduler.link.join(SETTINGS, 3).done()
    joined = scheduler.link.join(SETTINGS, None)
    scheduler.turn()
    assert not joined.done()
    begun.append(True)
    scheduler.turn()
    assert joined.done()
    assert told == [3, None]
    assert scheduler.link.law() == (None, 5)
    scheduler.link.ended()
    assert scheduler.agent.calls == ["start", "stop", "join"]


def test_the_policy_version_is_sglangs_where_no_tap_numbers_it(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "weight_version", lambda: "12")
    assert scheduler.link.state().policy_version == 12


def test_trees_are_told(tmp_path: Path) -> None:
    scheduler = Scheduler(drafter_in(tmp_path / "0", 0))
    scheduler.worker.topk = 4
    scheduler.link.made(None, scheduler.worker)
    assert scheduler.link.state().drafting == TREES


def test_an_agent_beside_it_reads_that_it_is_not_wanted_and_our_loader_refuses(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = drafter_in(tmp_path / "cache" / "default" / "v1", 1)
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path / "cache"))
    answer = SimpleNamespace(internal_state={})
    scheduler.link.described(answer, scheduler, "request")
    server = SGLangServer(drafter_in(tmp_path / "initial-2", 0))
    server.info["internal_states"] = [answer.internal_state]
    offered = Release(VerifiedManifest("default", "v1", 1, "", "", (), "", ""), good, {})

    async def asked(call: Callable[[SGLangEngine], Any]) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await call(SGLangEngine(server.url, client, tmp_path / "cache" / "default"))

    try:
        for call in (lambda engine: engine.state(), lambda engine: engine.swap(offered)):
            with pytest.raises(EngineError, match="follows run 'live' by itself"):
                asyncio.run(asked(call))
        assert server.calls == []
        server.info["internal_states"] = [{MARK: "life"}]  # by an agent that does not look there
        with pytest.raises(SwapRefusedError, match="follows run 'live' by itself"):
            asyncio.run(asked(lambda engine: engine.swap(offered)))
    finally:
        server.down()


class Request:
    def __init__(self, *prompt: int) -> None:
        self.origin_input_ids, self.spec_verify_ct, self.output_ids_through_stop = list(prompt), 0, [7]
        self.over = False

    def finished(self) -> bool:
        return self.over


def test_rounds_are_kept_by_the_law_of_their_steps_launch_and_by_prompt() -> None:
    """Also where SGLang shows no metrics; with overlapping schedules results come after the next step's launch."""
    law: list[tuple[str | None, int | None]] = [("v1", 1)]
    counter, served = StepCounter(), ServedRounds(lambda: law[0], 3)
    counter.served = served
    processor = SimpleNamespace(
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=False, is_stats_logging_rank=True)
    )
    a, b = Request(1, 2), Request(3)

    def launch() -> Any:
        batch = SimpleNamespace(reqs=[a, b], launch_ts=time.monotonic())
        counter.launched(None, batch)
        return batch

    def end(batch: Any, *emitted: int) -> None:
        def original(*_: Any) -> None:
            for request, tokens in zip(batch.reqs, emitted, strict=True):
                request.spec_verify_ct += tokens > 0
                request.output_ids_through_stop += [7] * tokens

        counter.decoded(original, processor, batch)

    first = launch()
    law[0] = ("v1", 2)
    second = launch()
    end(first, 1, 4)
    b.over = True
    end(second, 3, 2)
    assert not counter.failed
    exact = {(version, policy): counts for version, policy, counts in served.books.read(2).exact or ()}
    names = [prompt_hash(prompt)[:COUNTED_DIGITS] for prompt in ([1, 2], [3])]
    assert exact.keys() == {("v1", 1), ("v1", 2)}
    old, new = exact["v1", 1], exact["v1", 2]
    assert (old.rounds, old.drafted_tokens, old.accepted_tokens, old.accepted_per_position) == (2, 6, 3, (1, 1, 1))
    assert dict(old.by_prompt) == {names[0]: (1, 1), names[1]: (4, 1)}
    assert (new.rounds, new.emitted_tokens, new.accepted_per_position) == (2, 5, (2, 1))
    assert (old.finished_requests, old.running_requests) == (0, 2)
    assert (new.finished_requests, new.running_requests) == (1, 1)
    counter.drafter_changed()
    law[0] = ("v2", 2)
    end(launch(), 2, 0)  # its first token is the older drafter's
    end(launch(), 2, 0)
    exact = {(version, policy): counts for version, policy, counts in served.books.read(2).exact or ()}
    assert exact["v2", 2].rounds == 1


def test_hooks_are_put_on_all_that_is_needed_also_where_nothing_is_sampled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rl_hooks.agent import sglang
    from rl_hooks.engines.sglang import rounds

    caplog.set_level(logging.ERROR)
    put = list[str]()
    registry = SimpleNamespace(register=lambda target, *_: put.append(target))
    name = "sglang.srt.plugins.hook_registry"
    kinds = SimpleNamespace(BEFORE=1, AFTER=2, AROUND=3)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(HookRegistry=registry, HookType=kinds))
    monkeypatch.setattr(rounds, "register", lambda: rounds.PROCESSOR)
    monkeypatch.delenv("DRAFTALIGN_URL", raising=False)
    sglang.register()
    assert put == []
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("DRAFTALIGN_SAMPLE_FRACTION", "0")
    sglang.register()
    swaps, put[:] = {*put}, []
    assert f"{inside.RECEIVER}._pull_raw_reqs" in swaps
    assert f"{inside.WORKER}.verify" not in swaps
    monkeypatch.delenv("DRAFTALIGN_SAMPLE_FRACTION")
    sglang.register()
    assert swaps < {*put}
    assert f"{inside.WORKER}.verify" in put
    monkeypatch.setenv("DRAFTALIGN_SAMPLE_FRACTION", "2")
    put.clear()
    sglang.register()
    assert put == []
    assert "does not follow the service: expected a sample fraction" in caplog.text
