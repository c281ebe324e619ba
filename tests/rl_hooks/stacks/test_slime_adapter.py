"""What the slime adapter tells the hook, labels and leaves out. (tests/stacks runs slime's own actor.)"""

from __future__ import annotations

import logging
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_hooks.sending.tally import Tally
from rl_hooks.stacks import slime as adapter
from rl_hooks.trainer.base import TrainerGuard

SIZES = ((3, 4), (2, 5))  # prompt, response
PADDED = 16


def micro_batch(**changes: Any) -> dict[str, Any]:
    """As slime's `get_batch` makes it of two rollouts: a row padded at its end."""
    T = sum(prompt + response for prompt, response in SIZES)
    batch: dict[str, Any] = {
        "tokens": torch.nn.functional.pad(torch.arange(3, 3 + T), (0, PADDED - T))[None],
        "total_lengths": [prompt + response for prompt, response in SIZES],
        "loss_masks": [torch.tensor([1, 0, 1, 1]), torch.ones(5, dtype=torch.int)],
        "rollout_log_probs": [-torch.arange(1.0, 5.0), -torch.arange(11.0, 16.0)],
        "local_raw_reward": [0.5, 1],
        "source_names": ["math", "unknown"],
        "multimodal_train_inputs": None,
    }
    return batch | changes


class Hook:
    """Keeps what `capture` is told."""

    def __init__(self, model: nn.Module, url: str, **options: Any) -> None:
        self.model, self.url, self.options = model, url, options
        self.tally = Tally(logging.getLogger("rl_hooks"))
        self.guard = TrainerGuard(self.tally, strict=True)
        self.told: list[dict[str, Any]] = []
        self.leads = False

    @contextmanager
    def capture(self, **told: Any) -> Iterator[None]:
        self.told.append(told)
        yield


class Loop:
    """What slime calls, in its order."""

    def __init__(self, module: Any, **changes: Any) -> None:
        settings = {"start_rollout_id": 0, "rollout_temperature": 0.7, "rollout_top_p": 0.9, "rollout_top_k": -1}
        self.args = Namespace(hf_checkpoint="policy", **(settings | changes))
        self.module, self.model = module, nn.Linear(2, 2)
        self.batch = micro_batch()
        self.keys: list[str] = []
        module.get_batch = self._get_batch

    def _get_batch(self, iterator: Any, keys: list[str], pad_multiplier: int, allgather_cp: bool = False) -> Any:
        assert (iterator, pad_multiplier, allgather_cp) == ("iterator", 8, False)
        self.keys = list(keys)
        return self.batch

    def forward(self) -> None:
        assert self.module.get_batch("iterator", ["tokens"], 8, allgather_cp=False) is self.batch
        self.model(torch.ones(1, 2))

    @torch.no_grad()
    def log_probs(self, prefix: str = "") -> None:
        adapter.before_log_prob(self.args, [self.model], prefix)
        self.forward()

    def train(self, rollout_id: int, steps: int = 1) -> None:
        for step in range(steps):
            adapter.before_train_step(self.args, rollout_id, step, [self.model], "optimizer", "scheduler")
            self.forward()

    @property
    def versions(self) -> list[int]:
        actor = adapter._actors[self.model]
        assert actor is not None
        hook: Any = actor.hook
        return [told["policy_version"] for told in hook.told]


@pytest.fixture(name="module", params=adapter.MODULES)
def _module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of slime or of miles, and a hook of the test's own."""
    for name in adapter.MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = types.ModuleType(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.setattr(adapter, "attach", Hook)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda path, **_: {"read": path})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:9")
    return module


def test_a_micro_batch_is_told_rollout_by_rollout() -> None:
    told = adapter.micro_batch_rollouts(micro_batch())
    assert told["cu_seqlens"].tolist() == [0, 7, 14], "the padding is of no rollout"
    assert told["loss_mask"][0].tolist() == [
        *[False] * 3,
        True,
        False,
        True,
        True,
        *[False] * 2,
        *[True] * 5,
        *[False] * 2,
    ]
    logprobs: Tensor = told["logprobs"][0]
    assert logprobs[3:7].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert logprobs[9:14].tolist() == [-11.0, -12.0, -13.0, -14.0, -15.0]
    assert logprobs[[0, 1, 2, 7, 8, 14, 15]].isnan().all()
    assert told["rewards"] == [0.5, 1]
    assert told["strata"] == ["math", "unknown"]


def test_a_batch_without_sources_as_miles_has_it_sends_no_strata() -> None:
    assert adapter.micro_batch_rollouts(micro_batch(source_names=None))["strata"] is None


@pytest.mark.parametrize("rewards", [None, [{"accuracy": 1.0}, {"accuracy": 0.0}]])
def test_rewards_that_are_no_numbers_are_left_out(rewards: Any) -> None:
    assert adapter.micro_batch_rollouts(micro_batch(local_raw_reward=rewards))["rewards"] is None


def test_with_a_pass_that_one_is_captured_and_no_other_forward(module: Any) -> None:
    loop = Loop(module)
    for rollout in range(3):
        loop.log_probs("ref_")
        loop.log_probs()
        loop.train(rollout, steps=2)
    assert loop.versions == [0, 1, 2]
    assert loop.keys == ["tokens", *adapter.WANTED]
    actor: Any = adapter._actors[loop.model]
    told = actor.hook.told[0]
    assert (told["temperature"], told["top_p"], told["top_k"]) == (0.7, 0.9, -1)
    assert (actor.hook.url, actor.hook.options["config"]) == ("http://127.0.0.1:9", {"read": "policy"})


def test_without_a_pass_the_first_steps_forwards_are_captured(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(module, start_rollout_id=None)
    for rollout in (5, 6):
        loop.log_probs("ref_")
        loop.train(rollout, steps=2)
    assert loop.versions == [5, 6]
    assert "rollouts of later steps are left out" in caplog.text


def test_a_forward_of_another_kind_is_not_captured(module: Any) -> None:
    loop = Loop(module)
    loop.train(0)
    with torch.no_grad():  # somebody's evaluation, of weights that have moved
        loop.forward()
    loop.log_probs()
    loop.forward()  # the update's, whose hook is not called in time
    assert loop.versions == [0, 1]


def test_it_attaches_before_no_pass_of_other_weights(module: Any) -> None:
    loop = Loop(module)
    loop.log_probs("ref_")
    assert loop.model not in adapter._actors
    loop.log_probs()
    assert loop.versions == [0]


def test_an_unknown_version_is_left_out_and_said(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    resumed = Loop(module, start_rollout_id=None)
    resumed.log_probs()
    resumed.train(7)
    resumed.log_probs()
    assert resumed.versions == [8]
    assert "their version is not known" in caplog.text


def test_without_the_other_option_nothing_is_labelled_with_a_version_that_never_moves(module: Any) -> None:
    loop = Loop(module)
    for _ in range(3):
        loop.log_probs()
    assert loop.versions == [0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"multimodal_train_inputs": {"pixel_values": torch.ones(1)}}, "images are in them"),
        ({"rollout_log_probs": None}, "no log-probabilities of the sampler's"),
    ],
)
def test_what_is_left_out_is_said(
    module: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    loop = Loop(module)
    loop.batch = micro_batch(**changes)
    loop.train(0)
    assert loop.versions == []
    assert said in caplog.text


def test_a_mixed_run_s_batches_without_images_are_captured(module: Any) -> None:
    loop = Loop(module)
    loop.batch = micro_batch(multimodal_train_inputs={})
    loop.train(0)
    assert loop.versions == [0]


def test_a_critic_is_left_alone(module: Any) -> None:
    loop = Loop(module)
    loop.model.role = "critic"  # type: ignore[assignment]
    loop.log_probs()
    loop.train(0)
    assert loop.model not in adapter._actors


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"qkv_format": "bshd"}, "only packed rows"), ({"keep_old_actor": True}, "older weights"), ({}, "no get_batch")],
)
def test_where_it_cannot_attach_it_is_off_and_the_training_goes_on(
    module: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    loop = Loop(module, **changes)
    if not changes:
        del module.get_batch
    adapter.before_train_step(loop.args, 0, 0, [loop.model], "optimizer", "scheduler")
    assert adapter._actors[loop.model] is None
    assert "draftalign is OFF" in caplog.text
    assert said in caplog.text
