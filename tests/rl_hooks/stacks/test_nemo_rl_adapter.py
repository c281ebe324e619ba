"""What the NeMo-RL adapter calls, labels and leaves out. (tests/stacks runs the real NeMo-RL.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trainer.hooks_fixtures import Receiver, receiver
from helpers.trainer.sent_fixtures import small_policy

from rl_hooks import wire
from rl_hooks.stacks import nemo_rl

LENGTHS = torch.tensor([12, 11])
PLACES = torch.arange(16)
#: Padded at the right; the policy drew all but the first three tokens.
ROWS = {
    "input_ids": torch.randint(3, 512, (2, 16), generator=torch.Generator().manual_seed(0)),
    "input_lengths": LENGTHS,
    "token_mask": ((PLACES >= 3) & (LENGTHS[:, None] > PLACES)).float(),
}
DRAWN = {"generation_logprobs": torch.full((2, 16), -0.25)}


class Batch(dict[str, Any]):
    """What the adapter asks of NeMo-RL's batches: here one micro-batch."""

    pictures: tuple[str, ...] = ()

    def make_microbatch_iterator(self, _size: int) -> Iterator[Batch]:
        yield self

    def get_multimodal_dict(self) -> dict[str, Any]:
        return dict.fromkeys(self.pictures)


class Worker:
    """What the adapter reads of NeMo-RL's workers; methods have their signatures."""

    tp_size = cp_size = 1
    enable_seq_packing = _is_reward_model = False
    is_generation_colocated = True
    _dp_client: Any = None
    optimizer: Any = "of it"

    def __init__(self, **sampling: Any) -> None:
        self.sampling_params = SimpleNamespace(**{"temperature": 1.0, "top_p": 1.0, "top_k": None} | sampling)
        self.model, self.scheduler = small_policy(512), SimpleNamespace(last_epoch=0)
        self.cfg: dict[str, Any] = {"generation": {"vllm_cfg": {}}}

    def get_logprobs(self, data: Any, micro_batch_size: int | None = None) -> int:
        passes = (data.make_microbatch_iterator(micro_batch_size or 2) for _ in range(2))
        batches = itertools.chain.from_iterable(passes)  # the second time only so that ranks keep in step
        return len([self.model(one["input_ids"], attention_mask=None) for one in batches])

    def get_reference_policy_logprobs(self, *, data: Any) -> int:
        return self.get_logprobs(data=data)

    def train(self, _data: Any) -> dict[str, Any]:
        self.scheduler.last_epoch += 1
        return {"all_mb_metrics": {"loss": [0.5]}}


@contextmanager
def extended(monkeypatch: pytest.MonkeyPatch, rank: int = 0, **changes: Any) -> Iterator[tuple[Any, Receiver]]:
    """A worker whose class is extended, and the service; `changes` are attributes of the class."""
    methods = {name: vars(Worker)[name] for name in ("__init__", "get_logprobs", "train")}  # `extend` works in place
    kind: Any = type("Extended", (Worker,), methods | changes)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    nemo_rl.extend(kind)
    with receiver() as service:
        monkeypatch.setenv("DRAFTALIGN_URL", service.url)
        worker = kind()
        yield worker, service
        if worker.draftalign is not None:
            worker.draftalign.hook.close()


def sent(worker: Any, service: Receiver) -> list[wire.Header]:
    assert worker.draftalign.hook.flush(20), worker.draftalign.hook.stats()
    return [wire.parse_header(one.body) for one in service.rollouts()]


def test_a_pass_is_sent_once_under_the_version_that_its_weights_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with extended(monkeypatch) as (worker, service):
        for _ in range(2):
            assert worker.get_logprobs(data=Batch(ROWS), micro_batch_size=2) == 2
            assert worker.get_reference_policy_logprobs(data=Batch(ROWS)) == 2
            assert worker.train("data")["all_mb_metrics"].keys() > {"loss", "draftalign/dropped"}
        assert [one.metadata["policy_version"] for one in sent(worker, service)] == ["0", "1"]
        assert worker.draftalign.hook.stats()["captured_rollouts"] == 4


def test_another_rank_than_the_first_adds_nothing_to_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    with extended(monkeypatch, rank=1) as (worker, _):
        assert worker.train("data")["all_mb_metrics"] == {"loss": [0.5]}


@pytest.mark.parametrize(
    ("worker_is", "generation", "row", "comes"),
    [
        ({}, {}, {}, 1),
        ({"is_generation_colocated": False}, {}, {}, 1),
        ({"is_generation_colocated": False, "_dp_client": "of it"}, {}, {}, 0),
        ({"is_generation_colocated": False, "_dp_client": "of it"}, {}, DRAWN, 1),
        ({"is_generation_colocated": False, "temperature": 0.7}, {}, {}, 1),
        ({"is_generation_colocated": False, "temperature": 0.7}, {}, DRAWN, 0),
        ({"is_generation_colocated": False, "top_k": 20}, {"logprobs_mode": "raw_logprobs"}, DRAWN, 0),
        ({"is_generation_colocated": False, "top_p": 0.9}, {"logprobs_mode": "processed_logprobs"}, DRAWN, 1),
    ],
)
def test_what_older_weights_may_have_drawn_needs_the_samplers_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    worker_is: dict[str, Any],
    generation: dict[str, Any],
    row: dict[str, Any],
    comes: int,
) -> None:
    sampling = {name: worker_is[name] for name in ("temperature", "top_p", "top_k") if name in worker_is}
    with extended(monkeypatch, **{k: v for k, v in worker_is.items() if k not in sampling}) as (worker, service):
        vars(worker.sampling_params).update(sampling)
        worker.cfg["generation"]["vllm_cfg"] = generation
        worker.get_logprobs(Batch(ROWS | row))
        assert len(sent(worker, service)) == comes
        assert worker.draftalign.hook.stats()["failures"] == 0
    assert ("older weights may have drawn them" in caplog.text) is (comes == 0)


def test_a_packed_micro_batch_is_told_without_its_padding() -> None:
    told = nemo_rl.micro_batch_rollouts(Batch(ROWS | DRAWN), packed=True)
    assert told["cu_seqlens"].tolist() == [0, 12, 23]
    ids = ROWS["input_ids"]
    assert told["input_ids"].tolist() == [*ids[0, :12].tolist(), *ids[1, :11].tolist()]
    assert told["loss_mask"].tolist() == ([False] * 3 + [True] * 9) + ([False] * 3 + [True] * 8)
    assert told["logprobs"].tolist() == [-0.25] * 23


def test_images_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(ROWS)
    batch.pictures = ("pixel_values",)
    with extended(monkeypatch) as (worker, service):
        worker.get_logprobs(batch)
        assert not sent(worker, service)
    assert "rollouts with images are left out" in caplog.text


@pytest.mark.parametrize("changes", [{"optimizer": None}, {"_is_reward_model": True}, {"tp_size": 2}, {"cp_size": 2}])
def test_what_does_not_train_a_policy_or_splits_it_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    with extended(monkeypatch, **changes) as (worker, service):
        assert worker.draftalign is None
        assert worker.get_logprobs(Batch(ROWS)) == 2
        assert worker.get_reference_policy_logprobs(data=Batch(ROWS)) == 2
        assert worker.train("data") == {"all_mb_metrics": {"loss": [0.5]}}
        assert not service.requests
    split = "tp_size" in changes or "cp_size" in changes
    assert ("only data parallelism" in caplog.text) is split
    assert ("draftalign is O" in caplog.text) is split, "what trains no policy says nothing of it"


@pytest.mark.parametrize("field", ["_is_reward_model", "optimizer", "tp_size"])
def test_a_worker_of_another_nemo_rl_trains_without_us(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    monkeypatch.delattr(Worker, field)
    with extended(monkeypatch) as (worker, _):
        assert worker.get_logprobs(Batch(ROWS)) == 2
        assert worker.draftalign is None
    assert "draftalign is OFF" in caplog.text


def test_updates_without_a_pass_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with extended(monkeypatch) as (worker, _):
        worker.train("data")
    assert "NeMo-RL updates without a pass for prev_logprobs" in caplog.text


def test_a_pass_that_fails_leaves_the_batch_as_it_was_and_the_next_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Batch(ROWS)
    with extended(monkeypatch) as (worker, service):
        model, worker.model = worker.model, None
        with pytest.raises(TypeError):
            worker.get_logprobs(data)
        assert not vars(data)
        worker.model = model
        worker.get_logprobs(data)
        assert len(sent(worker, service)) == 1
