"""What the SkyRL adapter calls, labels and leaves out. (tests/stacks runs the real SkyRL.)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trainer.hooks_fixtures import Receiver, as_float, mapped, padded_batch, receiver
from helpers.trainer.sent_fixtures import small_policy

from rl_hooks import wire
from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.stacks import skyrl

BATCH = padded_batch([(3, 9), (7, 4)])
RESPONSE = 9


def experience(**changes: Any) -> Any:
    """A micro-batch whose last nine tokens are responses, with what engines said of them."""
    of_responses = BATCH.loss_mask[:, -RESPONSE:]
    fields: dict[str, Any] = {
        "sequences": BATCH.input_ids,
        "attention_mask": BATCH.attention_mask,
        "loss_mask": of_responses,
    }
    fields |= {"rollout_logprobs": torch.full(of_responses.shape, -0.25), "pixel_values": None}
    return SimpleNamespace(**fields | changes)


class Worker:
    """What the adapter reads of SkyRL's worker; methods have SkyRL's signatures."""

    sequence_parallel_size = 1

    def __init__(self, **algorithm: Any) -> None:
        said = {"policy_loss_type": "regular", "temperature": 1.0} | algorithm
        self.cfg = SimpleNamespace(
            fully_async=SimpleNamespace(enabled=False),
            algorithm=SimpleNamespace(**said),
            remove_microbatch_padding=False,
        )
        self.called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def init_model(self, _path: str) -> str:
        self.model = SimpleNamespace(model=small_policy(512))
        return "made"

    def forward_backward(self, batch: Any) -> Any:
        return SimpleNamespace(metrics={"loss": self._forward_backward_micro(batch, 1.0).item()})

    def _forward_backward_micro(self, *args: Any, **more: Any) -> Any:
        self.called.append((args, more))
        one = args[0] if args else next(iter(more.values()))
        return self.model.model(one.sequences, attention_mask=one.attention_mask).logits.sum()

    def optim_step(self) -> float:
        return 0.5

    def load_checkpoint(
        self,
        ckpt_dir: Any,
        load_optimizer_states: bool = True,  # noqa: ARG002
        load_lr_scheduler_states: bool = True,  # noqa: ARG002
    ) -> dict[str, Any]:
        return {"world_size": 1, "read": ckpt_dir}

    async def broadcast_to_inference_engines(self, engines: str) -> str:
        return engines


@contextmanager
def extended(monkeypatch: pytest.MonkeyPatch, worker: Worker, kind: type[Worker]) -> Iterator[Receiver]:
    """The service of a worker whose class is extended, and whose model is made."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    skyrl.extend(kind)
    with receiver() as service:
        monkeypatch.setenv("DRAFTALIGN_URL", service.url)
        assert worker.init_model("path") == "made"
        yield service
        if worker.draftalign is not None:  # type: ignore[attr-defined]
            worker.draftalign.hook.close()  # type: ignore[attr-defined]


@pytest.fixture(name="kind")
def _kind() -> type[Worker]:
    class Extended(Worker):
        pass

    names = ("init_model", "forward_backward", "_forward_backward_micro", "optim_step", "load_checkpoint")
    for name in (*names, "broadcast_to_inference_engines"):
        setattr(Extended, name, getattr(Worker, name))  # `extend` works in place
    return Extended


def sent(worker: Any, service: Receiver) -> list[wire.Header]:
    assert worker.draftalign.hook.flush(20), worker.draftalign.hook.stats()
    return [wire.parse_header(one.body) for one in service.rollouts()]


def test_the_version_rises_where_trained_weights_are_sent(monkeypatch: pytest.MonkeyPatch, kind: type[Worker]) -> None:
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        steps = ("push", "see", "see", "push", "see", "train", "see", "train", "push", "see", "push", "see")
        assert versions(worker, service, *steps) == [0, 0, 0, 1, 1]
        assert asyncio.run(worker.broadcast_to_inference_engines("them")) == "them"
        assert worker.optim_step() == 0.5
        assert worker.draftalign.hook.stats()["skipped_stale"] == 2, "the rollouts of the pass after an update"


def versions(worker: Any, service: Receiver, *steps: str) -> list[int]:
    """Those of what is sent in these steps: push, see, train, or the folder of a checkpoint that is loaded."""
    for step in steps:
        if step == "push":
            asyncio.run(worker.broadcast_to_inference_engines("them"))
        elif step == "train":
            worker.optim_step()
        elif step == "see":
            worker._forward_backward_micro(experience(), 1.0)
        else:
            assert worker.load_checkpoint(ckpt_dir=step, load_optimizer_states=True)["read"] == step
    return [int(one.metadata["policy_version"]) for one in sent(worker, service)]


def test_a_policy_that_resumes_goes_on_counting_where_its_checkpoint_stands(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker]
) -> None:
    """SkyRL's trainers load, then send the weights, then train; they save step N before they send its weights."""
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        path = "/ckpts/global_step_9/run/global_step_7/policy"
        steps = (path, "push", "see", "train", "push", "see", "train", path, "push", "see")
        assert versions(worker, service, *steps) == [7, 8, 7]
        registered = next(one for one in service.requests if one.method == "PUT")
        assert wire.parse_header(registered.body).metadata["policy_version"] == "0", "when its model was made"
        assert worker.draftalign.hook.stats()["failures"] == 0


def test_the_weights_of_a_checkpoint_that_says_no_step_get_the_next_version_when_they_are_sent(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """SkyRL's Tinker server unpacks each checkpoint into a temporary folder."""
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        steps = ("push", "see", "/staging/tmp3x/", "see", "push", "see", "/ckpts/global_step_x/policy", "push", "see")
        assert versions(worker, service, *steps) == [0, 1, 2]
        assert worker.draftalign.hook.stats()["skipped_stale"] == 2, "between loading and sending"
    assert caplog.text.count("whose folder is no global_step_N/policy: policy versions go on from 0") == 1


def test_versions_begin_where_the_options_say(monkeypatch: pytest.MonkeyPatch, kind: type[Worker]) -> None:
    monkeypatch.setenv("DRAFTALIGN_HOOK_OPTIONS", '{"policy_version": 5}')
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        assert versions(worker, service, "push", "see", "train", "push", "see") == [5, 6]


def test_fully_async_rollouts_need_the_engines_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Older weights drew the tokens."""
    worker: Any = kind()
    worker.cfg.fully_async.enabled = True
    with extended(monkeypatch, worker, kind) as service:
        worker._forward_backward_micro(experience(rollout_logprobs=None), 1.0)
        assert not sent(worker, service)
        worker._forward_backward_micro(experience(), 1.0)
        assert len(sent(worker, service)) == 1
    assert "fully_async rollouts without the engines' log-probabilities are left out" in caplog.text


def test_an_update_s_metrics_get_the_hooks_numbers_and_nothing_of_it_breaks(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker]
) -> None:
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        assert worker.forward_backward(experience()).metrics.keys() >= {"loss", "draftalign/dropped"}
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        assert worker.forward_backward(experience()).metrics.keys() == {"loss"}, "SkyRL logs rank 0's"
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(worker.draftalign.hook.sender, "metrics", lambda: 1 / 0)
        assert worker.forward_backward(experience()).metrics.keys() == {"loss"}
        assert len(sent(worker, service)) == 3


@pytest.mark.parametrize(
    ("changes", "loss", "said"),
    [
        ({}, "cross_entropy", "supervised batches"),
        ({"pixel_values": torch.zeros(4, 8)}, None, "rollouts with images"),
        ({"loss_mask": None}, None, "rollouts without a loss mask"),
    ],
)
def test_what_cannot_be_used_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Worker],
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    loss: str | None,
    said: str,
) -> None:
    worker: Any = kind()
    with extended(monkeypatch, worker, kind) as service:
        worker._forward_backward_micro(experience(**changes), 1.0, loss_fn=loss)
        worker._forward_backward_micro(experience(), 1.0)
        assert len(sent(worker, service)) == 1
    assert sum(said in record.message for record in caplog.records) == 1
    assert len(worker.called) == 2


def test_the_configured_loss_counts_where_none_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker]
) -> None:
    worker: Any = kind(policy_loss_type="cross_entropy")
    with extended(monkeypatch, worker, kind) as service:
        worker._forward_backward_micro(experience(), 1.0)
        worker._forward_backward_micro(experience(), 1.0, "regular")
        assert len(sent(worker, service)) == 1


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, True), (0.7, False)])
def test_what_the_engines_said_is_sent_where_it_is_of_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker], temperature: float, kept: bool, tmp_path: Path
) -> None:
    """SkyRL's engines give log-probabilities before the temperature."""
    worker: Any = kind(temperature=temperature)
    with extended(monkeypatch, worker, kind) as service:
        worker._forward_backward_micro(experience(), 1.0)
        (header,) = sent(worker, service)
        assert float(header.metadata["temperature"]) == temperature
        file = mapped(service.rollouts()[0], tmp_path)
        drawn = as_float(file, "logprobs")[torch.from_numpy(file.array("loss_mask").astype(bool))]
    assert bool((drawn == -0.25).all()) is kept
    assert (drawn < 0).all()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda worker, one: worker._forward_backward_micro(one, 1.0, "regular", "a fourth of a later SkyRL"),
        lambda worker, one: worker._forward_backward_micro(one, 1.0, mini_batch_of_a_later_one=3),
        lambda worker, one: worker._forward_backward_micro(one, renamed=1.0),
        lambda worker, one: worker._forward_backward_micro(renamed=one),
    ],
)
def test_other_arguments_than_skyrl_has_now_reach_it_as_they_came(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker], call: Callable[[Any, Any], Any], attached: bool
) -> None:
    plain: Any = Worker()
    plain.init_model("path")
    worker: Any = kind()
    with extended(monkeypatch, worker, kind):
        hook, one = worker.draftalign, experience()
        worker.draftalign = hook if attached else None
        call(plain, one)
        call(worker, one)
        assert worker.called == plain.called
        worker.draftalign = hook


@pytest.mark.parametrize("wrong", ["sequence parallelism", "fully_async"])
def test_what_is_not_covered_is_refused_and_skyrl_goes_on(
    monkeypatch: pytest.MonkeyPatch, kind: type[Worker], caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    worker: Any = kind(temperature=0.7)  # at 1 `fully_async` is covered
    worker.sequence_parallel_size = 2 if wrong == "sequence parallelism" else 1
    worker.cfg.fully_async.enabled = wrong == "fully_async"
    with extended(monkeypatch, worker, kind) as service:
        assert worker.draftalign is None
        worker._forward_backward_micro(experience(), 1.0)
        assert worker.optim_step() == 0.5
        assert asyncio.run(worker.broadcast_to_inference_engines("them")) == "them"
        assert not service.requests
    assert "draftalign is OFF" in caplog.text


def test_a_worker_that_sends_weights_otherwise_is_not_extended(kind: type[Worker]) -> None:
    before = kind.optim_step
    setattr(kind, "broadcast_to_inference_engines", lambda _, engines: engines)  # noqa: B010 - of another type
    with pytest.raises(UnsupportedTrainerError, match=r"no SkyRL 0\.3\.0"):
        skyrl.extend(kind)
    assert kind.optim_step is before
    assert not hasattr(kind, "draftalign")
