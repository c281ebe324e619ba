"""What a vLLM worker does when weights may have changed: a lost drafter comes back, and foreign weights stay."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_hooks.engines.candidate import DrafterRefusedError
from rl_hooks.engines.policy_watch import PolicyVersions, WeightSample
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.tap.served import Matrix, ServedPolicy, ServedRun
from rl_hooks.engines.vllm import worker as module
from rl_hooks.engines.vllm.draft import RunningDraft
from rl_hooks.engines.vllm.weights import LoadedDrafter
from rl_hooks.engines.vllm.worker import DrafterSwap, Staged

OURS = {"weight": torch.full((4, 4), 2.0)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


class Worker:
    """A vLLM worker of which memory can be lost."""

    def __init__(self, load_format: str = "auto") -> None:
        self.target, self.draft = Model(), Model()
        self.model_runner = SimpleNamespace(get_model=lambda: self.target, get_draft_model=lambda: self.draft)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(method="eagle3"),
            load_config=SimpleNamespace(load_format=load_format),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            for model in (self.target, self.draft):
                model.layer.weight.data.uniform_()  # whatever the next tenant of the memory left there

    def wake_up(self, tags: Any = None) -> None:
        pass


class Tap:
    """Notes when it began."""

    def __init__(self, _worker: Any, _settings: Any, _layers: Any, watch: Any, _ranks: Any, *, joined: bool) -> None:
        self.begun = (watch.version, joined)
        self.run = SimpleNamespace(refused=False, counts=dict)

    def settled(self, *, tainted: bool) -> None:
        pass


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Tensor]]:
    """The drafters that we loaded; loading, checking and the tap are as if vLLM were there."""
    loaded: list[Mapping[str, Tensor]] = []

    def load(self: RunningDraft, tensors: Mapping[str, Tensor]) -> None:
        loaded.append(tensors)
        self.module.load_weights(tensors.items())  # type: ignore[operator]

    def unknown(_: DrafterSwap) -> None:
        raise DrafterRefusedError("no vLLM here")

    monkeypatch.setattr(RunningDraft, "load", load)
    monkeypatch.setattr(RunningDraft, "check", lambda _: None)
    monkeypatch.setattr(DrafterSwap, "_check_method", unknown)
    monkeypatch.setattr(module, "VllmTap", Tap)
    monkeypatch.setattr(RunningDraft, "captured_layers", lambda _: (1,))
    return loaded


def serving(worker: Worker) -> DrafterSwap:
    """With a drafter of ours in it."""
    swap = DrafterSwap(worker)
    assert swap.draft is not None
    swap.settle(None)
    worker.draft.load_weights(OURS.items())
    swap.weights.served, swap.weights._marks = LoadedDrafter("v1", "digest", OURS), swap.draft.fingerprint()
    return swap


def test_one_file_is_read_at_a_time_and_what_was_replaced_before_is_not(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap that fails at another rank is asked for again while this one still reads from a slow disk."""
    entered, read, go_on = threading.Semaphore(0), list[str](), threading.Event()

    def slowly(swap: DrafterSwap) -> None:
        assert swap._staged is not None
        read.append(swap._staged.version)
        entered.release()
        assert go_on.wait(60)
        raise DrafterRefusedError("no vLLM here")

    monkeypatch.setattr(DrafterSwap, "_check_method", slowly)
    swap = DrafterSwap(Worker())
    swap.stage("/nowhere", "v1")
    assert entered.acquire(timeout=60)
    swap.stage("/nowhere", "v2")
    swap.stage("/nowhere", "v3")
    assert not entered.acquire(timeout=0.05)
    go_on.set()
    assert swap._staged is not None
    assert swap._staged.done.wait(60)
    assert read == ["v1", "v3"]


def test_a_drafter_that_a_deep_sleep_took_comes_back_once(loads: list[Any]) -> None:
    worker = Worker()
    swap = serving(worker)
    worker.sleep(level=2)
    worker.wake_up()
    assert swap.settle(None)["loaded"] is True
    assert torch.equal(worker.draft.layer.weight, OURS["weight"])
    assert swap.settle(None)["loaded"] is True
    assert len(loads) == 1


def test_a_worker_that_sleeps_takes_no_drafter_and_keeps_what_is_staged(loads: list[Any]) -> None:
    worker = Worker()
    swap = serving(worker)
    swap._staged = staged = Staged("/v2", "v2", OURS, "digest")
    staged.done.set()
    worker.sleep(level=2)
    with pytest.raises(RuntimeError, match="sleeps"):
        swap.apply("v2", "digest")
    assert loads == []
    worker.wake_up()
    assert swap.apply("v2", "digest") == {"previous": "v1", "version": "v2"}


def test_a_sleeping_worker_tells_what_it_serves_without_a_look_at_its_weights(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = serving(Worker())
    swap.watch = None  # as in a server that an agent beside it swaps
    monkeypatch.setattr(RunningDraft, "fingerprint", lambda _: pytest.fail("memory that is not mapped was read"))
    assert (swap.state(True)["version"], swap.state(True)["loaded"]) == ("v1", True)
    assert loads == []


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_drafter_without_any_value_comes_back_though_nobody_has_told(loads: list[Any], value: float) -> None:
    worker = Worker()
    swap = serving(worker)
    worker.draft.layer.weight.data.fill_(value)
    assert swap.settle(None)["loaded"] is True
    assert len(loads) == 1


def test_what_a_trainer_loads_over_ours_stays_and_is_not_called_ours(loads: list[Any]) -> None:
    worker = Worker()
    swap = serving(worker)
    theirs = torch.full((4, 4), 5.0)
    worker.draft.layer.weight.data.copy_(theirs)
    state = swap.settle(None)
    assert (state["loaded"], "other weights" in state["problem"]) == (False, True)
    worker.sleep(level=2)  # and the trainer brings it again itself
    worker.wake_up()
    worker.draft.load_weights([("weight", theirs)])
    assert swap.settle(None)["loaded"] is False
    assert torch.equal(worker.draft.layer.weight, theirs)
    assert loads == []


def test_a_module_that_the_trainer_refits_with_the_policy_is_the_policys(loads: list[Any]) -> None:
    worker = Worker()
    swap = DrafterSwap(worker)
    for step in range(3):
        worker.draft.load_weights([("weight", torch.full((4, 4), 1.0 + step))])
        assert swap.settle(None)["loaded"] is True
    assert loads == []


def test_a_drafter_that_cannot_be_restored_is_tried_once_for_each_loss(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def unreadable(_: RunningDraft) -> None:
        tried.append(True)

    monkeypatch.setattr(RunningDraft, "read_initial", unreadable)
    worker = Worker()
    swap = DrafterSwap(worker)
    swap.settle(None)
    for losses in (1, 2):
        worker.sleep(level=2)
        for _ in range(3):
            state = swap.settle(None) if not (swap.watch and swap.watch.asleep) else {}
            worker.wake_up()
        assert (state["loaded"], len(tried)) == (False, losses)
        assert "could not be read" in state["problem"]
    worker.draft.layer.weight.data.fill_(3.0)
    assert swap.settle(None)["loaded"] is True  # somebody brought one
    assert loads == []


def test_the_drafter_of_the_start_is_read_once_however_often_it_is_lost(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bool] = []

    def initial(_: RunningDraft) -> dict[str, Tensor]:
        read.append(True)
        return OURS

    monkeypatch.setattr(RunningDraft, "read_initial", initial)
    worker = Worker()
    swap = DrafterSwap(worker)
    swap.settle(None)
    for losses in (1, 2, 3):
        worker.sleep(level=2)
        worker.wake_up()
        assert swap.settle(None)["loaded"] is True
        assert len(loads) == losses
    assert len(read) == 1


def test_a_run_that_is_another_policys_gets_nothing_more(loads: list[Any]) -> None:
    del loads
    swap = DrafterSwap(Worker())
    swap.follow(SETTINGS, None, None)
    tap: Any = swap.tap
    assert swap.state()["tap"] == {}
    tap.run.refused = True
    assert swap.state()["tap"] is None
    ended: list[bool] = []
    real = ServedRun.__new__(ServedRun)
    parts: Any = {"sender": SimpleNamespace(refused=True), "tap": SimpleNamespace(cut=lambda: ended.append(True))}
    vars(real).update(parts | {"_ranks": SimpleNamespace(size=1)})
    real.settled(3, tainted=False)
    assert ended == [True]


def test_weights_that_are_named_as_the_ones_before_were_counted_are_not_collected() -> None:
    """A trainer's first name may come with its second update, and be the number that the first one has."""
    versions = PolicyVersions.start(None, 0)
    assert [versions.next(None, moved=True), versions.next("1", moved=True)] == [1, 1]
    sizes = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 8}
    config: Any = SimpleNamespace(**sizes, to_dict=lambda: sizes)
    model, alone, matrix = Model(), LayerRanks(None), Matrix.of(torch.randn(8, 4), 8)
    run = ServedRun(
        ServiceSettings("http://127.0.0.1:9", sample_fraction=1.0),
        lambda: ServedPolicy.named(config, model)(config, matrix, matrix),
        alone,
        (0, 1),
        lambda: None,
        WeightSample(model),
        1,
        lambda: None,
        joined=True,
    )
    run.tap.cut()  # as the second update is announced
    run.settled(1, tainted=False)
    assert run.tap.policy_version is None
    run.settled(2, tainted=False)
    assert run.tap.policy_version == 2
    run.close(0.1)


SETTINGS = asdict(ServiceSettings("http://s"))


@pytest.mark.parametrize(
    ("load_format", "newest", "at_once", "later"),
    [
        ("auto", None, 0, 1),  # a new run
        ("auto", 0, 0, 1),  # another engine of a run that has just begun
        ("auto", 7, None, 8),  # an engine that was started again: it holds the policy of the beginning
        ("dummy", None, None, 0),  # weights that vLLM made up
        ("dummy", 7, None, 8),
    ],
)
def test_features_wait_for_weights_that_are_the_runs(
    load_format: str,
    newest: int | None,
    at_once: int | None,
    later: int,
    loads: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    del loads
    worker = Worker(load_format)
    swap = DrafterSwap(worker)
    swap.settle(None)
    assert swap.follow(SETTINGS, None, newest)["policy_version"] == at_once
    assert (swap.tap is None) == (at_once is None)
    why = "vLLM made the policy's weights up" if load_format == "dummy" else f"the run is at policy version {newest}"
    assert (f"draftalign: {why}" in caplog.text) == (at_once is None)
    assert ("no features are sent until weights are loaded" in caplog.text) == (at_once is None)
    worker.sleep(level=2)  # takes weights, and brings none
    worker.wake_up()
    if at_once is None:
        assert swap.settle(None)["policy_version"] is None
        assert swap.tap is None
    worker.target.load_weights([("weight", torch.ones(4, 4))])
    assert swap.settle(None)["policy_version"] == later
    tap: Any = swap.tap
    assert tap.begun == (at_once if at_once is not None else later, newest is not None)


@pytest.mark.parametrize("named", ["9", "step-9"])
def test_weights_that_have_a_name_or_were_brought_before_are_the_runs(named: str, loads: list[Any]) -> None:
    del loads
    swap = DrafterSwap(Worker())
    swap.settle(named)
    assert swap.follow(SETTINGS, named, 7)["policy_version"] == (9 if named == "9" else 8)


@pytest.mark.parametrize(
    ("load_format", "newest", "first"), [("dummy", None, 0), ("dummy", 7, 8), ("auto", 7, 8), ("auto", None, 0)]
)
def test_weights_that_were_brought_before_the_first_step_are_the_runs(
    load_format: str, newest: int | None, first: int, loads: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that goes on from a checkpoint refits first; the engine has looked at its weights when they loaded."""
    del loads
    worker = Worker(load_format)
    swap = DrafterSwap(worker)
    swap.settle(None)  # the model was loaded
    worker.target.load_weights([("weight", torch.ones(4, 4))])
    swap.settle(None)  # the first step
    assert swap.follow(SETTINGS, None, newest)["policy_version"] == first
    tap: Any = swap.tap
    assert tap.begun == (first, newest is not None)
    assert "no features are sent" not in caplog.text
    worker.target.load_weights([("weight", torch.full((4, 4), 2.0))])
    assert swap.settle(None)["policy_version"] == first + 1
