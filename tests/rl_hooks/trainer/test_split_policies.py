"""A policy that is split over ranks otherwise than by data is refused by each adapter, by name, with what works.

Rows or heads of which a rank has a part: Ulysses, ring attention, context, sequence, tensor and pipeline parallelism.
What the adapters are given here has the attributes that they read; tests/stacks holds those against the real packages.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trainer.capture_fixtures import inputs
from helpers.trainer.hooks_fixtures import Receiver, padded_batch, receiver, tiny_qwen3
from torch import nn

from rl_hooks.errors import HookError
from rl_hooks.hook import DrafterHook
from rl_hooks.stacks import nemo_rl, openrlhf, prime_rl, skyrl
from rl_hooks.trainer.megatron.part import _refuse

#: What each says that works.
INSTEAD = r".*let the engine send instead: .*DRAFTALIGN_SAMPLE_FRACTION=0\.05.*docs/guide/vllm\.md"
_MODULES: dict[str, dict[str, Any]] = {
    "verl.utils.device": {"get_device_name": lambda: "cpu"},
    "verl.workers.engine.base": {"EngineRegistry": SimpleNamespace(register=lambda *_, **__: lambda made: made)},
    "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": object},
    "areal.engine.fsdp_engine": {"FSDPPPOActor": object},
    "areal.trainer.rl_trainer": {"PPOTrainer": object},
    "areal.utils.environ": {"is_single_controller": bool},
}


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, members in _MODULES.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield
    sys.modules.pop("rl_hooks.stacks.areal", None)  # it was made of these


def verl() -> None:
    engine = importlib.import_module("rl_hooks.stacks.verl").register()()
    engine.ulysses_sequence_parallel_size, engine.use_remove_padding = 2, True
    engine._attach({})


def areal(**sizes: int) -> None:
    actor = importlib.import_module("rl_hooks.stacks.areal").DraftalignPPOActor()
    actor.parallel_helper, actor.enable_tree_training = SimpleNamespace(**{"tp_size": 1, "sp_size": 1} | sizes), False
    actor._attach({})


def megatron(name: str) -> None:
    parts = dict.fromkeys(("decoder", "embedding", "output_layer"))
    _refuse(SimpleNamespace(**parts, config=SimpleNamespace(**{name: 2})), {}, 1)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (verl, "set ulysses_sequence_parallel_size to 1"),
        (partial(areal, sp_size=2), "only data parallelism in the actor's allocation"),
        (partial(areal, tp_size=2), "only data parallelism in the actor's allocation"),
        (lambda: skyrl._SkyrlPolicy(SimpleNamespace(sequence_parallel_size=2), {}), "set sequence_parallel_size to 1"),
        (lambda: nemo_rl._NemoPolicy(SimpleNamespace(tp_size=2, cp_size=1), {}), "set tensor_parallel_size and"),
        (lambda: nemo_rl._NemoPolicy(SimpleNamespace(tp_size=1, cp_size=2), {}), "and context_parallel_size to 1"),
        (lambda: prime_rl._Run().attach(None, SimpleNamespace(cp_enabled=True), {}), r"set model\.cp to 1"),
        (partial(megatron, "context_parallel_size"), "context_parallel_size = 2: set it to 1"),
        (partial(megatron, "pipeline_model_parallel_size"), "pipeline_model_parallel_size = 2: set it to 1"),
    ],
    ids=["verl", "areal", "areal-tp", "skyrl", "nemo_rl-tp", "nemo_rl", "prime_rl", "megatron", "megatron-pp"],
)
def test_each_stack_names_the_setting_and_what_works(refused: Callable[[], object], named: str) -> None:
    with pytest.raises(HookError, match=named + INSTEAD):
        refused()


def test_openrlhf_leaves_passes_of_ring_attention_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Actor:
        packing_samples, temperature, model = False, 1.0, tiny_qwen3()

        def forward(self, sequences: Any, action_mask: Any, attention_mask: Any, ring_attn_group: Any) -> Any:  # noqa: ARG002
            return self.model(sequences, attention_mask=attention_mask).logits

    batch = padded_batch([(3, 9)])
    actor: Any = Actor()
    with receiver() as service:
        hook = openrlhf.attach(actor, service.url, rank=0, world_size=1, aux_layers=(1, 2, 3))
        with torch.no_grad():
            actor.forward(batch.input_ids, batch.loss_mask, batch.attention_mask, ring_attn_group=object())
        assert (hook.flush(20), hook.stats()["captured_rollouts"]) == (True, 0)
        hook.close()
    (said,) = [one.message for one in caplog.records if "ring attention" in one.message]
    assert "set ring_attn_size to 1, or let the engine send instead" in said


class Split(nn.Module):
    """A policy that computes the first half of each row, as a context-parallel rank does."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model, self.lm_head, self.config = whole.model, whole.lm_head, whole.config
        self.get_input_embeddings, self.get_output_embeddings = whole.get_input_embeddings, whole.get_output_embeddings

    def forward(self, input_ids: Any, attention_mask: Any, **more: Any) -> Any:
        half = input_ids.shape[1] // 2
        return self.lm_head(self.model(input_ids[:, :half], attention_mask=attention_mask[:, :half], **more)[0])


def test_a_forward_of_half_of_each_row_is_refused_in_any_trainer() -> None:
    """TRL's, accelerate's and your own: nothing says that ranks share a row, but its length."""
    model, batch = Split(tiny_qwen3()), padded_batch([(3, 9), (5, 7)])
    service: Receiver
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
        with hook.capture(**inputs(batch), policy_version=0):
            model(batch.input_ids, batch.attention_mask)
        assert hook.flush(20)
        stats = hook.stats()
        assert (stats["failures"], stats["captured_rollouts"], service.rollouts()) == (1, 0, [])
        assert "Sequence and context parallelism" in stats["last_failure"]
        assert "let the engine send instead" in stats["last_failure"]
        hook.close()
