"""What the plugin does in vLLM's engine core: between two steps, only where there is something to do."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.engine.rounds_fixtures import Scheduler
from helpers.engine.tap_fixtures import scheduled

from rl_hooks.agent.books import EngineBooks
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.vllm import attach
from rl_hooks.engines.protocol import engine_state
from rl_hooks.engines.vllm.core import CoreLink, hook, wait_for_cores
from rl_hooks.engines.vllm.swapper import SwapProblem

STATE: dict[str, Any] = {"version": None, "sha256": None, "loaded": True, "shared_modules": [], "policy_version": None}


class Executor:
    """One worker in this process: notes what it is asked."""

    is_sleeping = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.version: str | None = None
        self.broken = False
        self.answers: dict[str, list[Any]] = {}
        swap = SimpleNamespace(watch=SimpleNamespace(noticed=None))
        self.driver_worker = SimpleNamespace(worker=SimpleNamespace(_draftalign_swap=swap))

    def collective_rpc(self, method: str, _timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        if self.broken:
            raise RuntimeError("a worker's failure")
        if method == "draftalign_apply":
            self.version = args[0]
        if method in self.answers:
            return self.answers[method]
        return [STATE | {"version": self.version}]


class Core:
    """The calls of vLLM's EngineCore that are wrapped."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1, tensor_parallel_size=1),
            speculative_config=SimpleNamespace(draft_sample_method="greedy"),
        )
        self.model_executor = Executor()
        self._weight_version = "default"
        self.done: list[str] = []
        self._initialize_kv_caches()
        self.done.clear()
        self.scheduler = Scheduler(0)

    def _initialize_kv_caches(self) -> None:
        """The model is loaded; the scheduler is made after this."""
        self.collective_rpc("update_max_model_len")  # where vLLM finds the length by itself

    def step(self) -> str:
        self.done.append("step")
        return "outputs"

    def post_step(self, model_executed: bool) -> None:
        """After the outputs of a step have gone out."""

    def add_request(self, request: Any, _wave: int = 0) -> None:
        self.done.append(request.request_id)

    def collective_rpc(self, method: str, *_: Any) -> list[Any]:
        self.done.append(method)
        return []

    def set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def sleep(self, level: int = 1) -> None:
        self.done.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.done.append("wake_up")

    def shutdown(self) -> None:
        self.done.append("shutdown")


Hooked = Callable[[Callable[[Any], CoreLink | None]], type[Core]]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    """Wrap a fresh class as vLLM's, with this maker of links."""

    def wrap(link_of: Callable[[Any], CoreLink | None]) -> type[Core]:
        fresh = type("EngineCore", (Core,), dict(vars(Core)))
        for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core", "vllm.v1.engine.core_client"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["vllm.v1.engine.core"].EngineCore = fresh  # type: ignore[attr-defined]
        client = type("InprocClient", (), {"__init__": lambda self: setattr(self, "engine_core", fresh())})
        sys.modules["vllm.v1.engine.core_client"].InprocClient = client  # type: ignore[attr-defined]
        hook(link_of)
        hook(link_of)  # plugins may be loaded twice
        return fresh

    return wrap


def linked(core: Any, begun: list[CoreLink] | None = None, fraction: float = 1.0) -> CoreLink:
    return CoreLink(core, fraction, (begun if begun is not None else []).append, lambda: None, lambda _: None)


def forget(core: Core) -> None:
    """As if the plugin had not known of it until now."""
    vars(core).pop("_draftalign")
    core.model_executor.asked.clear()


@pytest.mark.parametrize(("given", "told"), [(None, "of the environment"), ("given", "given")])
def test_an_llm_that_is_attached_in_code_has_the_token_of_the_environment(
    given: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_TOKEN", "of the environment")
    asked: list[dict[str, Any]] = []
    core = SimpleNamespace(draftalign_attach=asked.append)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    attach(llm, "http://127.0.0.1:8400", token=given)
    assert [one["token"] for one in asked] == [told]


def test_a_step_asks_the_workers_only_after_something_may_have_changed_weights(hooked: Hooked) -> None:
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    for _ in range(1000):
        assert core.step() == "outputs"
    asked = core.model_executor.asked
    assert asked == ["draftalign_settle"] * 2  # when the model was loaded, and before the first step
    assert len(begun) == 1
    changes: list[Callable[[], Any]] = [
        lambda: core.collective_rpc("load"),
        core.wake_up,
        core.sleep,
        lambda: core.set_weight_version("3"),
        core.model_executor.driver_worker.worker._draftalign_swap.watch.noticed,
    ]
    for number, change in enumerate(changes, 3):
        change()
        assert len(asked) == number - 1, "not before a step is about to run"
        core.step()
        core.step()
        assert asked == ["draftalign_settle"] * number


def test_a_swap_waits_for_a_step_and_reading_a_file_does_not(hooked: Hooked) -> None:
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.step()
    (link,) = begun
    assert link.call("draftalign_stage", "/x", "v2").result(60)
    applied = link.call("draftalign_apply", "v2", "digest")
    time.sleep(0.05)
    core.collective_rpc("load_weights")  # a trainer's update, in several calls
    core.collective_rpc("load_weights")
    assert not applied.done()
    assert "draftalign_apply" not in core.model_executor.asked
    core.step()
    assert applied.done()
    assert link.state["version"] == "v2"


def test_calls_for_an_engine_core_that_waits_for_work_wake_it(hooked: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of several processes are called by the engine's thread alone, which blocks on its queue."""
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.vllm_config.parallel_config.world_size = 2
    core.step()
    types = SimpleNamespace(WAKEUP="wake up")
    monkeypatch.setattr(sys.modules["vllm.v1.engine"], "EngineCoreRequestType", types, raising=False)
    callbacks: list[Callable[[Any], None]] = []
    woken: list[Any] = []
    waiting: Any = core
    waiting._idle_state_callbacks, waiting.input_queue = callbacks, SimpleNamespace(put_nowait=woken.append)
    applied, staged = begun[0].call("draftalign_apply", "v2", ""), begun[0].call("draftalign_stage", "/x", "v2")
    assert not staged.done()
    assert woken == [("wake up", None)]
    callbacks[0](core)
    assert staged.done()
    assert not applied.done()
    core.step()
    assert applied.done()


def test_an_engine_that_follows_nothing_is_left_as_it_is(hooked: Hooked) -> None:
    core = hooked(lambda _: None)()
    request = SimpleNamespace(request_id="r", skip_reading_prefix_cache=False)
    core.add_request(request)
    core.sleep(2)
    core.wake_up()
    assert core.step() == "outputs"
    core.shutdown()
    assert core.done == ["r", "sleep 2", "wake_up", "step", "shutdown"]
    assert core.model_executor.asked == []
    assert not request.skip_reading_prefix_cache


def _tapped(hooked: Hooked) -> Core:
    core = hooked(linked)()
    core.model_executor.answers |= {"draftalign_settle": [STATE | {"tap": {}}], "draftalign_rest": [None]}
    core.step()
    core.model_executor.asked.clear()
    scheduler: Any = core.scheduler
    scheduler.finished_req_ids = {"r"}
    scheduler.unfinished = 1
    return core


def test_once_no_request_is_left_the_tap_is_told_which_have_ended_once(hooked: Hooked) -> None:
    """With the next step vLLM would tell it, and that may be far away."""
    core = _tapped(hooked)
    scheduler: Any = core.scheduler
    core.add_request(scheduled(request_id="r", skip_reading_prefix_cache=False))
    for _ in range(3):
        core.step()
        core.post_step(True)
    assert core.model_executor.asked == []
    scheduler.unfinished = 0
    for _ in range(3):
        core.step()
        core.post_step(False)
    assert core.model_executor.asked == ["draftalign_rest"]
    core.model_executor.is_sleeping = True
    core.add_request(scheduled(request_id="s", skip_reading_prefix_cache=False))
    core.post_step(False)
    assert core.model_executor.asked == ["draftalign_rest"], "a sleeping engine's weights must not be read"


def test_an_engine_without_a_tapped_request_is_asked_nothing_when_it_idles(hooked: Hooked) -> None:
    core = _tapped(hooked)
    scheduler: Any = core.scheduler
    scheduler.unfinished = 0
    core.add_request(scheduled(request_id="r", min_p=0.1))
    core.step()
    core.post_step(True)
    assert core.model_executor.asked == []


def test_an_engine_in_this_process_ends_when_its_client_is_collected_and_does_so_once(hooked: Hooked) -> None:
    """Up to 0.30 vLLM shuts no such core down."""
    ends: list[str] = []
    hooked(lambda core: CoreLink(core, 1.0, lambda _: None, lambda: ends.append("stop"), lambda _: ends.append("join")))
    client = sys.modules["vllm.v1.engine.core_client"].InprocClient()
    core = client.engine_core
    core.step()
    core.model_executor.asked.clear()
    del client
    gc.collect()
    assert ends == ["stop", "join"]
    assert core.model_executor.asked == ["draftalign_end"]
    core.shutdown()
    assert ends == ["stop", "join"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_of_a_trainer_that_holds_an_engine_does_not_end_it(hooked: Hooked) -> None:
    """A data loader's worker that leaves by `sys.exit` would use a GPU of its parent, or a lock that was held."""
    ends: list[str] = []
    hooked(lambda core: CoreLink(core, 1.0, lambda _: None, lambda: ends.append("stop"), lambda _: ends.append("join")))
    client = sys.modules["vllm.v1.engine.core_client"].InprocClient()
    core = client.engine_core
    core.step()
    core.model_executor.asked.clear()
    child = os.fork()
    if child == 0:
        core.shutdown()
        os._exit(1 if ends or core.model_executor.asked else 0)
    assert os.waitpid(child, 0)[1] == 0
    core.shutdown()
    assert ends == ["stop", "join"]


def test_vllm_waits_some_seconds_for_a_core_that_it_would_kill_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    utils = ModuleType("vllm.v1.engine.utils")
    utils.shutdown = lambda _, timeout=None: waits.append(timeout)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    for name, child in (("vllm", "v1"), ("vllm.v1", "engine"), ("vllm.v1.engine", "utils")):
        monkeypatch.setattr(sys.modules[name], child, sys.modules[f"{name}.{child}"], raising=False)
    wait_for_cores()
    wait_for_cores()
    for timeout in (0, 2.0, 30.0, None):
        utils.shutdown([], timeout=timeout)
    assert waits == [5.0, 5.0, 30.0, None]


def test_only_requests_that_will_be_tapped_compute_their_whole_prompt(hooked: Hooked) -> None:
    core = hooked(lambda core: linked(core, fraction=0.25))()
    requests = [scheduled(request_id=f"r{i}", skip_reading_prefix_cache=False) for i in range(400)]
    for request in requests:
        core.add_request(request)
    assert 60 < sum(request.skip_reading_prefix_cache for request in requests) < 140


@pytest.mark.parametrize(("tap", "connector", "skips"), [({}, None, True), (None, None, False), ({}, object(), False)])
def test_an_engine_without_a_tap_or_with_a_kv_connector_keeps_its_prefix_cache(
    hooked: Hooked, tap: Any, connector: Any, skips: bool
) -> None:
    core = hooked(linked)()
    scheduler: Any = core.scheduler
    scheduler.connector = connector
    core.model_executor.answers["draftalign_settle"] = [STATE | {"tap": tap}]
    core.step()
    request = scheduled(skip_reading_prefix_cache=False)
    core.add_request(request)
    assert request.skip_reading_prefix_cache is skips


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [2] * 8193},
        {"prompt_token_ids": None},
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"min_p": 0.1},
        {"sampling_params": None},
    ],
    ids=("long", "embeddings", "lora", "images", "min_p", "pooling"),
)
def test_a_request_that_the_tap_will_refuse_keeps_its_prefix_cache(hooked: Hooked, changes: dict[str, Any]) -> None:
    core = hooked(linked)()
    core.model_executor.answers["draftalign_settle"] = [STATE | {"tap": {}}]
    core.step()
    request = scheduled(**changes, skip_reading_prefix_cache=False)
    core.add_request(request)
    assert not request.skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("ranks", "drafting", "changes", "skips"),
    [
        (2, "probabilistic", {"top_p": 0.9}, False),
        (2, "probabilistic", {"top_k": 20}, False),
        (2, "probabilistic", {}, True),
        (2, "greedy", {"top_p": 0.9}, True),
        (1, "probabilistic", {"top_p": 0.9}, True),
    ],
)
def test_a_truncated_request_that_the_ranks_cannot_score_keeps_its_prefix_cache(
    hooked: Hooked, ranks: int, drafting: str, changes: dict[str, Any], skips: bool
) -> None:
    core = hooked(linked)()
    core.vllm_config.parallel_config.tensor_parallel_size = ranks
    core.vllm_config.speculative_config.draft_sample_method = drafting
    core.model_executor.answers["draftalign_settle"] = [STATE | {"tap": {}}]
    core.step()
    request = scheduled(**changes, skip_reading_prefix_cache=False)
    core.add_request(request)
    assert request.skip_reading_prefix_cache is skips


def test_an_engine_that_fails_to_start_is_not_asked(hooked: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Core] = []

    def fails(core: Core) -> None:
        made.append(core)
        core.collective_rpc("update_max_model_len")
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(Core, "_initialize_kv_caches", fails)
    kind = hooked(linked)
    with pytest.raises(MemoryError):
        kind()
    assert made[0].model_executor.asked == []


def test_the_weights_are_watched_from_when_the_model_is_loaded(hooked: Hooked) -> None:
    """A trainer that goes on from a checkpoint brings its weights before the first step, perhaps past every call."""
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    watch = core.model_executor.driver_worker.worker._draftalign_swap.watch
    assert core.model_executor.asked == ["draftalign_settle"]
    assert watch.noticed == vars(core)["_draftalign"].touch
    assert begun == [], "nothing is asked of the service before the first step"


@pytest.mark.parametrize(
    "first", [lambda core: core.sleep(2), lambda core: core.collective_rpc("sleep"), lambda core: core.wake_up()]
)
def test_an_engine_that_was_not_looked_at_when_it_was_made_is_before_the_first_call(
    hooked: Hooked, first: Callable[[Core], Any]
) -> None:
    """So the draft vocabulary is on the host before a deep sleep takes it. An engine that sleeps is not read."""
    core, asleep = (hooked(linked)() for _ in range(2))
    asleep.model_executor.is_sleeping = True
    for one, asked in ((core, ["draftalign_settle"]), (asleep, [])):
        forget(one)
        first(one)
        assert one.model_executor.asked == asked


def test_an_engine_that_sleeps_before_its_first_step_joins_nothing_yet(hooked: Hooked) -> None:
    """Its weights may be made up: verl starts vLLM with dummy weights, lets it sleep, and brings the policy then."""
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.sleep(2)
    assert begun == []
    core.wake_up()
    core.step()
    assert len(begun) == 1


def test_an_empty_step_of_a_sleeping_engine_reads_no_weights(hooked: Hooked) -> None:
    core = hooked(linked)()
    core.step()
    asked = len(core.model_executor.asked)
    core.model_executor.is_sleeping = True
    core.collective_rpc("anything")
    core.step()
    assert len(core.model_executor.asked) == asked
    core.model_executor.is_sleeping = False
    core.step()
    assert len(core.model_executor.asked) == asked + 1


def test_failures_of_ours_cost_a_line_and_no_step(hooked: Hooked, caplog: pytest.LogCaptureFixture) -> None:
    def refuses(_: Any) -> CoreLink:
        raise ValueError("settings that make no sense")

    core = hooked(refuses)()
    with caplog.at_level(logging.WARNING, "vllm.draftalign"):
        for _ in range(3):
            assert core.step() == "outputs"
    assert caplog.text.count("settings that make no sense") == 1
    caplog.clear()
    core = hooked(linked)()
    core.step()  # from here on there is something to end
    core.model_executor.broken = True
    with caplog.at_level(logging.WARNING, "vllm.draftalign"):
        for _ in range(3):
            core.collective_rpc("load")
            assert core.step() == "outputs"
        core.shutdown()
    assert caplog.text.count("looking at the weights failed") == 1
    assert caplog.text.count("ending failed") == 1
    assert core.done[-1] == "shutdown"


def test_what_a_vllm_lacks_of_the_names_that_are_used_is_told_once(
    hooked: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    core = hooked(linked)()
    forget(core)
    del core._weight_version
    caplog.clear()
    for _ in range(3):
        core.step()
    assert caplog.text.count("has no EngineCore.step_with_batch_queue, EngineCore._weight_version;") == 1


def test_a_call_that_fails_tells_its_caller(hooked: Hooked) -> None:
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.step()
    future = begun[0].call("draftalign_apply", "v2", "")
    core.model_executor.broken = True
    stepping = threading.Thread(target=core.step)
    stepping.start()
    stepping.join(60)
    with pytest.raises(RuntimeError, match="a worker's failure"):
        future.result(60)


def test_a_call_that_nobody_waits_for_any_more_costs_the_engine_no_step(hooked: Hooked) -> None:
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.step()
    future = begun[0].call("draftalign_apply", "v2", "")
    assert future.cancel()
    assert core.step() == "outputs"
    assert "draftalign_apply" not in core.model_executor.asked


def test_a_bug_of_ours_around_a_step_costs_one_line(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = hooked(linked)()

    def broken(_: CoreLink) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(CoreLink, "before_step", broken)
    monkeypatch.setattr(CoreLink, "touch", broken)
    with caplog.at_level(logging.ERROR, "vllm.draftalign"):
        for _ in range(3):
            assert core.step() == "outputs"
            core.wake_up()
    assert caplog.text.count("a failure of ours around step;") == 1
    assert caplog.text.count("a failure of ours around wake_up;") == 1


def test_rounds_with_weights_that_are_not_the_versions_are_not_credited_to_it(hooked: Hooked) -> None:
    """A restore failed, or a trainer has loaded other weights over it. The policy's own module is not credited too."""
    core = hooked(linked)()
    state = STATE | {"version": "v7", "loaded": False, "swaps": 1, "method": "mtp", "takes": "mtp"}
    core.model_executor.answers["draftalign_settle"] = [state]
    core.step()
    scheduler = core.scheduler
    while sum(scheduler.truth.values()) < 10:
        output = scheduler.schedule()
        scheduler.update_from_output(output, scheduler.execute(output))
    snapshot = vars(core)["_draftalign"].snapshot()
    books = EngineBooks(CanaryRule())
    books.book_exact(None, snapshot, engine_state("engine", state), 1.0, 0.0)
    assert books.ledger.buckets() == []
    assert books.ledger.unattributed_rounds == sum(scheduler.truth.values())


def test_a_rank_that_fails_is_told_after_all_have_answered_and_the_counts_get_what_is_loaded_then(
    hooked: Hooked,
) -> None:
    begun: list[CoreLink] = []
    core = hooked(lambda core: linked(core, begun))()
    core.step()
    (link,) = begun
    answers = core.model_executor.answers
    answers["draftalign_apply"] = [{"error": "apply: RuntimeError: no room", "status": 503}, {"previous": None}]
    answers["draftalign_settle"] = [STATE | {"version": "half"}]
    future = link.call("draftalign_apply", "v2", "")
    assert core.step() == "outputs"
    with pytest.raises(SwapProblem, match="apply: RuntimeError: no room"):
        future.result(60)
    assert link.state["version"] == "half"
    assert link._rounds is not None
    assert link._rounds.serving[0] == "half"
