"""An engine notices in every way that its policy moved, and what it sends names the weights that drew it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.tap_fixtures import HEAD, STOP, Script, step
from torch import nn

from rl_hooks.engines.policy_watch import PolicyVersions, PolicyWatch, WeightSample, on_reload
from rl_hooks.engines.tap.collected import Collected
from rl_hooks.engines.tap.feature_tap import FeatureTap


class Model(nn.Module):
    """Loads weights as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(30)])
        self.experts = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded += [name for name, _ in weights]
        return set(self.loaded)


class Worker:
    """The calls of vLLM 0.32's worker that load or discard weights."""

    def __init__(self) -> None:
        target, draft = Model(), Model()
        self.called: list[str] = []
        called = self.called

        class Runner:
            def get_model(self) -> Model:
                return target

            def reload_weights(self, weights_path: str | None = None) -> None:
                called.append(f"reload_weights {weights_path}")

        self.model_runner, self.target, self.draft = Runner(), target, draft

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.reload_weights(*args, **kwargs)

    def start_weight_update(self) -> None:
        self.called.append("start_weight_update")

    def start_draft_weight_update(self) -> None:
        self.called.append("start_draft_weight_update")

    def sleep(self, level: int = 1) -> None:
        self.called.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.called.append(f"wake_up {tags}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.called.append(f"discard {tags}")


WEIGHTS = [("a", torch.zeros(1))]
RELOADS: list[tuple[Callable[[Worker], Any], str]] = [
    (lambda w: w.target.load_weights(iter(WEIGHTS)), "load_weights"),
    (lambda w: w.target.load_weights(weights=iter(WEIGHTS)), "load_weights"),
    (lambda w: w.reload_weights(weights_path="/policy"), "reload_weights"),
    (lambda w: w.start_weight_update(), "start_weight_update"),
    (lambda w: w.sleep(level=2), "sleep of level 2"),
    (lambda w: w.sleep(2), "sleep of level 2"),
    (lambda w: w.discard(("weights", "kv_cache")), "discard of the weights"),
]
NO_RELOADS: list[Callable[[Worker], Any]] = [
    lambda w: w.draft.load_weights(iter(WEIGHTS)),
    lambda w: w.start_draft_weight_update(),
    lambda w: w.sleep(),
    lambda w: w.sleep(level=1),
    lambda w: w.wake_up(["weights"]),
    lambda w: w.discard(("kv_cache",)),
]


@pytest.mark.parametrize(("reload", "says"), RELOADS)
def test_whatever_loads_or_discards_the_policy_is_noticed_and_done(reload: Callable[[Worker], Any], says: str) -> None:
    worker, noticed = Worker(), list[str]()
    on_reload(worker, noticed.append)
    reload(worker)
    assert noticed == [says]
    assert worker.called or worker.target.loaded == ["a"]


@pytest.mark.parametrize("harmless", NO_RELOADS)
def test_the_drafter_and_a_light_sleep_are_not_taken_for_a_new_policy(harmless: Callable[[Worker], Any]) -> None:
    worker, noticed = Worker(), list[str]()
    on_reload(worker, noticed.append)
    harmless(worker)
    assert noticed == []
    assert worker.called or worker.draft.loaded == ["a"]


def test_a_trainer_does_not_feel_a_fault_of_ours_and_an_old_vllm_lacks_some_calls() -> None:
    worker = Worker()
    model = worker.target
    old = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))

    def broken(_: str) -> None:
        raise RuntimeError("a bug")

    on_reload(old, broken)
    assert model.load_weights(iter(WEIGHTS)) == {"a"}
    with pytest.raises(TypeError):
        model.load_weights()  # type: ignore[call-arg]  # the caller's own mistake is still the caller's


def a_few_weights(model: Model) -> None:
    """What a step of RL leaves changed in bfloat16: one weight in a hundred. No loader was called."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.01 * (torch.rand(parameter.shape, generator=generator) < 0.01))


def the_head_alone(model: Model) -> None:
    model.lm_head.weight.data.copy_(model.lm_head.weight.data * 1.001)


def another_tensor(model: Model) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)


def a_layer_under_way(model: Model) -> None:
    model.lm_head.to("meta")


def a_layer_gone(model: Model) -> None:
    del model.lm_head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64, torch.bool])
def test_weights_of_any_width_are_compared_by_their_bytes(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_parameter("plain", nn.Parameter(torch.randn(700)))
    model.register_parameter("other", nn.Parameter(torch.randn(700).to(dtype), requires_grad=False))
    sample = WeightSample(model)
    assert sample.look()()
    model.get_parameter("other").view(torch.uint8)[dtype.itemsize - 1] ^= 1
    assert not sample.look()()


@pytest.mark.parametrize("change", [a_few_weights, the_head_alone, another_tensor, a_layer_under_way, a_layer_gone])
def test_weights_that_nobody_announced_are_found_by_looking(change: Callable[[Model], None]) -> None:
    model = Model()
    sample = WeightSample(model)
    assert sample.look()()
    change(model)
    assert not sample.look()()


def test_the_same_weights_again_are_the_same_and_experts_may_move() -> None:
    model = Model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")  # equal to itself here: bytes are compared
    sample = WeightSample(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.clone())
        model.experts.weight.zero_()
    assert sample.look()()


def collecting(model: Model) -> tuple[PolicyWatch, FeatureTap, list[Collected]]:
    collected: list[Collected] = []
    watch = PolicyWatch(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    watch.number(None, 3)
    tap = FeatureTap(
        HEAD,
        collected.append,
        fraction=1.0,
        tokens_per_minute=10**6,
        weights=watch.weights,
        policy_version=3,
        moved=lambda: watch.noticed(),  # noqa: PLW0108 - it is set later
    )
    watch.changing, watch.leaving = tap.cut, tap.flush
    return watch, tap, collected


def run(tap: FeatureTap, name: str, *, ends: bool = True) -> Script:
    sequence = Script(name, [2], [3, STOP])
    tap.begin(sequence.request())
    tap.step(step([(sequence, 0, [2], 0, 3)]))
    if ends:
        tap.step(step([(sequence, 1, [3], 0, STOP)]))
        tap.end([name])
    return sequence


def test_a_request_goes_out_only_once_the_weights_were_seen_to_be_the_same() -> None:
    model = Model()
    watch, tap, collected = collecting(model)
    noticed: list[bool] = []
    watch.noticed = lambda: noticed.append(True)
    run(tap, "before")
    assert tap.tally["delivered"] == 0  # the engine may sleep now: its weights are not touched
    tap.release()
    eventually(lambda: tap.tally["delivered"] == 1)
    run(tap, "during")
    a_few_weights(model)
    tap.release()
    eventually(lambda: noticed)
    assert watch.settle(None)  # nobody had announced it
    assert watch.version == 4
    tap.turn(4, HEAD, lambda: None)
    run(tap, "after")
    tap.release()
    eventually(lambda: tap.tally["delivered"] == 2)
    assert [(c.request.request_id, c.policy_version) for c in collected] == [("before", 3), ("after", 4)]
    assert not watch.settle(None)
    assert watch.version == 4


def test_an_announced_update_is_one_version_however_many_buckets_bring_it() -> None:
    model = Model()
    watch, tap, collected = collecting(model)
    run(tap, "drawn before")
    sequence = run(tap, "under way", ends=False)
    for _ in range(5):
        model.load_weights(iter(WEIGHTS))
    a_few_weights(model)
    assert not watch.settle(None)
    assert watch.version == 4
    tap.turn(4, HEAD, lambda: None)
    tap.step(step([(sequence, 1, [3], 0, STOP)]))
    tap.end(["under way"])
    eventually(lambda: tap.tally["delivered"] == 2)
    assert {(c.request.request_id, c.policy_version) for c in collected} == {("drawn before", 3), ("under way", 3)}
    assert not watch.settle(None)
    assert watch.version == 4


def test_engines_that_count_come_apart_where_one_idles_and_a_number_that_they_are_told_joins_them() -> None:
    """Of two replicas that get the same two updates, one has no request between them. vllm.md says what that does."""
    workers = [Worker(), Worker()]
    watches = [PolicyWatch(worker) for worker in workers]
    for watch in watches:
        watch.number(None, 0)
    for update in range(2):
        for worker in workers:
            worker.reload_weights(weights_path=f"/policy-{update}")
        watches[0].settle(None)  # before its next step; the other one makes none
    watches[1].settle(None)
    assert [watch.version for watch in watches] == [2, 1]
    for watch in watches:
        watch.settle("7")
    assert [watch.version for watch in watches] == [7, 7]


def test_a_look_that_is_judged_after_its_update_was_counted_does_not_count_it_again() -> None:
    """The comparison waits while the tap's thread sends; an RPC or the clock brings the settle before it."""
    model = Model()
    watch, tap, collected = collecting(model)
    busy = threading.Event()

    def send() -> None:
        busy.wait(60)

    tap._sender.call(send)
    run(tap, "of both")
    a_few_weights(model)
    tap.release()
    assert watch.settle(None)
    tap.turn(4, HEAD, lambda: None)
    run(tap, "good")
    busy.set()
    eventually(lambda: tap.tally["skipped_moved"] == 1)
    assert not watch.settle(None)
    assert watch.version == 4
    tap.release()
    eventually(lambda: collected)
    assert [(c.request.request_id, c.policy_version) for c in collected] == [("good", 4)]


def test_weights_that_came_and_went_between_two_settles_are_counted() -> None:
    model = Model()
    watch, _, _ = collecting(model)
    weight = model.lm_head.weight.data.clone()
    the_head_alone(model)
    assert not watch.weights.look()()
    model.lm_head.weight.data.copy_(weight)
    assert watch.settle(None)
    assert not watch.settle(None)
    assert watch.version == 4


def test_a_parameter_that_an_update_leaves_unreadable_is_one_update(caplog: pytest.LogCaptureFixture) -> None:
    """FP8 kernels keep a transposed weight."""
    model = Model()
    watch, _, _ = collecting(model)
    model.load_weights(iter(WEIGHTS))
    model.layers[3].weight = nn.Parameter(torch.randn(64, 64).t(), requires_grad=False)
    for _ in range(3):
        assert not watch.settle(None)
    assert watch.version == 4
    the_head_alone(model)
    assert watch.settle(None), "the others are still compared"
    model.to("meta")
    assert watch.settle(None)
    for _ in range(3):
        assert not watch.settle(None)
    assert watch.version == 6
    assert caplog.text.count("no weight of the policy can be read") == 1


@pytest.mark.parametrize(
    ("start", "said", "numbers"),
    [
        ((None, 7), [(None, False), (None, True), (None, True)], [7, 8, 9]),
        (("5", 7), [("5", False), ("6", True), ("6", False)], [5, 6, 6]),
        (("5", 0), [("5", True), ("6", False)], [6, 6]),  # loaded first, named a step later
        (("5", 0), [("3", True)], [3]),  # the trainer went back to a checkpoint
        (("step-1", 2), [("step-1", False), ("step-2", True), ("step-3", False)], [2, 3, 4]),
        ((None, 0), [("9" * 5000, False), ("٣", False), ("-1", True), ("", False)], [1, 2, 3, 4]),
    ],
)
def test_a_version_is_what_vllm_was_told_or_else_a_count(
    start: tuple[str | None, int], said: list[tuple[str | None, bool]], numbers: list[int]
) -> None:
    versions = PolicyVersions.start(*start)
    assert [versions.next(named, moved=moved) for named, moved in said] == numbers


def test_without_sampling_only_a_number_that_vllm_was_told_counts() -> None:
    """The trainer's hook numbers policies by itself; a count of ours would be another number for the same weights."""
    model = Model()
    watch = PolicyWatch(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    model.load_weights(iter(WEIGHTS))
    watch.settle(None)
    assert watch.version is None
    watch.settle("12")
    assert watch.version == 12


def test_what_a_worker_lacks_of_the_names_that_are_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    PolicyWatch(Worker())
    assert "worker has no _weight_update_active: updates may go unnoticed" in caplog.text


def test_an_engine_that_sleeps_is_known_to_sleep_until_its_weights_are_back() -> None:
    worker, left = Worker(), list[list[str]]()
    watch = PolicyWatch(worker)
    watch.leaving = lambda: left.append(list(worker.called))
    calls: list[Callable[[], Any]] = [
        lambda: worker.sleep(1),
        lambda: worker.wake_up(["kv_cache"]),
        lambda: worker.wake_up(tags=["weights"]),
        lambda: worker.sleep(level=2),
        worker.wake_up,
    ]
    asleep = []
    for call in calls:
        call()
        asleep.append(watch.asleep)
    assert asleep == [True, True, False, True, False]
    assert [len(before) for before in left] == [0, 3], "told before each sleep"
