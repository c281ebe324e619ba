"""What the verl adapter reads of a micro-batch, and what it says without verl. (tests/stacks runs the real one.)"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.sending.tally import Tally
from rl_hooks.stacks.verl import micro_batch_rollouts, register, told_of
from rl_hooks.trainer.base import TrainerGuard

ROOT = Path(__file__).parents[3]
#: Two rollouts: 2 + 3 tokens, and 1 + 2; the first response has a tool's token in the middle.
IDS = torch.nested.nested_tensor([torch.tensor([5, 6, 7, 8, 9]), torch.tensor([3, 4, 5])], layout=torch.jagged)
PADDED: dict[str, Any] = {
    "input_ids": IDS,
    "responses": torch.tensor([[7, 8, 9], [4, 5, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]),
    "loss_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
    "rollout_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]),
    "temperature": 0.7,
}


def nested(*rows: list[Any]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


NESTED: dict[str, Any] = {
    "input_ids": IDS,
    "responses": nested([7, 8, 9], [4, 5]),
    "loss_mask": nested([1, 0, 1], [1, 1]),
    "rollout_log_probs": nested([-1.0, -2.0, -3.0], [-4.0, -5.0]),
    "temperature": torch.tensor([0.5, 0.5]),
}


@pytest.mark.parametrize(("batch", "temperature"), [(PADDED, 0.7), (NESTED, 0.5)], ids=["padded", "nested"])
def test_values_of_responses_are_laid_along_whole_rollouts(batch: dict[str, Any], temperature: float) -> None:
    told = micro_batch_rollouts(batch)
    assert told["input_ids"].tolist() == [5, 6, 7, 8, 9, 3, 4, 5]
    assert told["cu_seqlens"].tolist() == [0, 5, 8]
    assert told["loss_mask"].tolist() == [0, 0, 1, 0, 1, 0, 1, 1]
    assert told["logprobs"].nan_to_num(9.0).tolist() == [9.0, 9.0, -1.0, -2.0, -3.0, 9.0, -4.0, -5.0]
    assert told["temperature"] == temperature
    assert micro_batch_rollouts({k: v for k, v in batch.items() if k != "rollout_log_probs"})["logprobs"] is None


def test_a_prompts_data_source_is_its_stratum() -> None:
    """By it the drift alarm tells another mix of prompts from a drafter that fits less."""
    held = [types.SimpleNamespace(data="math"), types.SimpleNamespace(data="code")]  # as tensordict holds it
    for sources in (["math", "code"], np.array(["math", "code"]), held):
        assert micro_batch_rollouts(PADDED | {"data_source": sources})["strata"] == ["math", "code"]
    assert micro_batch_rollouts(PADDED)["strata"] is None
    assert micro_batch_rollouts(PADDED | {"data_source": ["math"]})["strata"] is None, "of which rollout?"


def test_rollouts_of_several_temperatures_are_refused() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"several temperatures.*\[0.5, 1.0\]"):
        micro_batch_rollouts(NESTED | {"temperature": torch.tensor([0.5, 1.0])})


def test_rollouts_with_images_are_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(logging.getLogger("rl_hooks"))
    text_only: dict[str, Any]
    for text_only in ({}, {"multi_modal_inputs": [None, {}]}):
        assert told_of(PADDED | text_only, tally) is not None
    assert not caplog.records
    image = {"pixel_values": torch.zeros(4, 8)}
    for one in (image, types.SimpleNamespace(data=image)):  # as tensordict holds it
        assert told_of(PADDED | {"multi_modal_inputs": [None, one]}, tally) is None
    assert [record.message for record in caplog.records if "images" in record.message] == [caplog.records[0].message]


@pytest.mark.parametrize(("vendor", "refused"), [("draftalign", True), ("nvidia", False)])
def test_a_verl_that_cannot_be_extended_is_named_and_another_vendor_touches_nothing(vendor: str, refused: bool) -> None:
    environment = os.environ | {"VERL_ENGINE_VENDOR": vendor}
    command = [sys.executable, "-c", "import rl_hooks.stacks.verl"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0, "draftalign is OFF: this verl" in done.stderr) == (refused, refused)
    assert refused or not done.stderr


class Engine:
    """What the adapter's engine inherits in verl 0.9.1 and calls in `train_batch`."""

    rank = 0
    collects = True

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.collects

    def train_batch(self, data: Any, loss_function: Any) -> Any:  # noqa: ARG002
        return {"model_output": {}, "loss": [data], "metrics": {"pg_loss": [0.1, 0.2]}}


class Hook:
    """A hook that knows two numbers, or fails to say them."""

    def __init__(self, *, fails: bool = False) -> None:
        self.guard = TrainerGuard(Tally(logging.getLogger("rl_hooks"), "failures"), strict=False)
        self._fails = fails

    def metrics(self) -> dict[str, float]:
        if self._fails:
            raise OSError("no")
        return {"draftalign/alpha": 2.5, "draftalign/dropped": 0}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine as `register` makes it of a verl that has only what it names."""

    class EngineRegistry:
        @staticmethod
        def register(*_: Any, **__: Any) -> Any:
            return lambda made: made

    parts: dict[str, dict[str, Any]] = {
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "verl.workers.engine.base": {"EngineRegistry": EngineRegistry},
        "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": Engine},
    }
    for name, members in parts.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return register()()


@pytest.mark.parametrize(("rank", "collects"), [(0, True), (1, True), (0, False)])
def test_the_metrics_of_an_update_get_the_hooks_numbers_once(engine: Any, rank: int, collects: bool) -> None:
    """As lists: verl joins those of the ranks, `chain`s them and takes the mean."""
    engine.rank, engine.collects, engine.hook = rank, collects, Hook()
    output = engine.train_batch(7.0, None)
    ours = {"draftalign/alpha": [2.5], "draftalign/dropped": [0]} if rank == 0 and collects else {}
    assert output == {"model_output": {}, "loss": [7.0], "metrics": {"pg_loss": [0.1, 0.2]} | ours}


@pytest.mark.parametrize("hook", [None, Hook(fails=True)])
def test_an_update_without_a_hook_or_whose_numbers_fail_is_verls_own(engine: Any, hook: Hook | None) -> None:
    engine.hook = hook
    assert engine.train_batch(7.0, None)["metrics"] == {"pg_loss": [0.1, 0.2]}
