"""What may be registered, what is refused by name, and the numerics of normalisers and 8-bit rows."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers.trainer.hooks_fixtures import HIDDEN, VOCAB, tiny_qwen3
from torch import nn

from drafter.policy import _kept_mass
from rl_hooks import wire
from rl_hooks.errors import UnsupportedModelError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending import features, registration
from rl_hooks.sending.features import score_rows, to_e4m3
from rl_hooks.sending.registration import (
    HeadWatch,
    RunRegistration,
    embedding_weight,
    head_weight,
    is_sharded,
    refuse_model_parallel,
    snapshot,
    target_config,
    tied,
)
from rl_hooks.wire import LogitMap


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_normalisers_do_not_depend_on_the_chunking(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    torch.manual_seed(0)
    last, head, ids = torch.randn(37, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randint(VOCAB, (37,))
    expected = last @ head.T / (temperature or 1.0)
    for at_once in (1, 5 * VOCAB, 1 << 25):
        monkeypatch.setattr(features, "LOGITS_AT_ONCE", at_once)
        lse, logp = score_rows(last, head, ids, temperature=temperature)
        assert torch.allclose(lse, expected.logsumexp(-1), atol=1e-5)
        assert torch.allclose(logp, expected.log_softmax(-1).gather(1, ids[:, None])[:, 0], atol=1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (0.5, 0), (1.0, 3), (0.9, 3), (0.6, 300), (1.0, 10**6)])
@pytest.mark.parametrize("sharpness", [0.0, 0.2, 4.0])
def test_log_p_of_truncated_sampling_is_of_what_is_left(top_p: float, top_k: int, sharpness: float) -> None:
    """As the worker's own check computes what is left; for top-p of a flat distribution to one token's probability."""
    torch.manual_seed(0)
    last, head, ids = torch.randn(37, HIDDEN), torch.randn(2000, HIDDEN), torch.randint(2000, (37,))
    last *= sharpness
    lse, logp = score_rows(last, head, ids, temperature=0.7, top_p=top_p, top_k=top_k)
    whole, all_p = score_rows(last, head, ids, temperature=0.7)
    batch: Any = types.SimpleNamespace(top_p=top_p, top_k=top_k)
    left = _kept_mass(last @ head.T / 0.7, batch)
    assert torch.equal(lse, whole)
    assert torch.allclose((all_p - logp).exp(), left, atol=1e-5 if top_k else 1 / 256)
    sharp = (last @ head.T / 0.7).softmax(-1).topk(256).values.sum(-1) > top_p
    assert torch.allclose((all_p - logp).exp()[sharp], left[sharp], atol=1e-5)


def test_8_bit_rows_survive_outliers_zeros_and_tiny_values() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 256)
    x[0] = 0.0
    x[1, 7] = 1000.0  # an outlier channel, as residual streams have
    x[2] *= 1e-20
    quantised, scale = to_e4m3(x)
    back = quantised.float() * scale[:, None]
    assert back.isfinite().all()
    assert torch.equal(back[0], x[0])
    for row in range(1, 5):
        others = torch.arange(256) != 7
        error = (back[row] - x[row])[others].norm() / x[row][others].norm()
        assert error < 0.04  # 3 mantissa bits: 2.7 % measured on Gaussian rows


@pytest.mark.parametrize("largest", [1e-45, 2e-43, 3e-43, 1e-42, 7e-42, 1e-40, 5e-36, 6e-36])
def test_8_bit_rows_below_the_range_of_a_scale_are_zeros_and_never_nan(largest: float) -> None:
    x = torch.linspace(-largest, largest, 257)[None]  # with a zero: 0 / 0 is NaN
    quantised, scale = to_e4m3(x)
    back = quantised.float() * scale[:, None]
    assert torch.allclose(back, x if largest > 448 * torch.finfo(torch.float32).tiny else x * 0, rtol=1 / 16, atol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("final_logit_softcapping", 30.0), ("logit_scale", 0.5), ("logits_scaling", 8.0)],
        *[("logits_soft_cap", 30.0), ("output_logit_soft_cap", 30.0)],
    ],
)
def test_a_field_that_may_change_the_logits_of_a_model_not_known_to_read_it_is_refused(
    field: str, value: float
) -> None:
    model = tiny_qwen3()
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedModelError, match=rf"{field} = {value}.*Qwen3ForCausalLM.*logit_map=LogitMap"):
        RunRegistration(model, aux_layers=(1, 2, 3))
    said = RunRegistration(model, aux_layers=(1, 2, 3), logit_map=LogitMap())
    assert not {"logit_scale", "logit_softcap"} & set(said.metadata)


def test_heads_that_the_rollout_file_cannot_describe_are_refused() -> None:
    biased = tiny_qwen3()
    biased.lm_head.bias = nn.Parameter(torch.zeros(VOCAB))
    with pytest.raises(UnsupportedModelError, match="bias"):
        head_weight(biased)
    with pytest.raises(UnsupportedModelError, match="no transformers config"):
        target_config(nn.Linear(2, 2))


class Adapted(nn.Module):
    """As PEFT's layers of LoRA, IA3, LoHa and OFT are built around one of the model's."""

    adapter_layer_names = ("lora_A", "lora_embedding_A", "ia3_l")

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.ia3_l, self.merged = base, nn.ParameterDict(), False


def test_a_head_or_embedding_with_an_adapters_factors_is_refused_by_name_until_they_are_merged() -> None:
    model = tiny_qwen3(tied=False)
    model.lm_head, model.model.embed_tokens = head, embedding = (
        Adapted(model.lm_head),
        Adapted(model.model.embed_tokens),
    )
    for layer, named in ((head, "lm_head"), (embedding, "the input embedding")):
        assert RunRegistration(model, aux_layers=(1, 2, 3)).complete
        layer.ia3_l["default"] = nn.Parameter(torch.ones(1, VOCAB))
        with pytest.raises(UnsupportedModelError, match=rf"{named} carries an adapter's factors \(.*\.Adapted\)"):
            RunRegistration(model, aux_layers=(1, 2, 3))
        layer.merged = True
    assert RunRegistration(model, aux_layers=(1, 2, 3)).complete


def test_of_several_adapters_that_save_the_head_it_is_the_active_ones() -> None:
    model = tiny_qwen3(tied=False)
    original = model.lm_head
    saved: Any = nn.Module()  # as PEFT's wrapper of `modules_to_save`
    model.lm_head = saved
    saved.original_module = original
    saved.modules_to_save = nn.ModuleDict({name: nn.Linear(HIDDEN, VOCAB, bias=False) for name in "ab"})
    saved.disable_adapters, saved.active_adapter = False, "b"
    assert torch.equal(head_weight(model), saved.modules_to_save["b"].weight)
    saved.active_adapter = ["a", "b"]
    with pytest.raises(UnsupportedModelError, match=r"several adapters are active on lm_head \(a, b\)"):
        head_weight(model)
    saved.disable_adapters = True
    assert torch.equal(head_weight(model), original.weight)


def test_weights_that_are_sharded_are_awaited_and_nothing_is_registered_without_them() -> None:
    model = tiny_qwen3(tied=False)
    whole = model.lm_head.weight.data
    assert not is_sharded(head_weight(model))
    model.lm_head.weight.data = torch.empty(0)  # what ZeRO-3 leaves between forwards
    assert is_sharded(head_weight(model))
    registration = RunRegistration(model, aux_layers=(1, 2, 3))
    with pytest.raises(UnsupportedModelError, match=r"sharded over ranks.*whole"):
        registration.encode()
    registration.add_head(whole)
    assert registration.complete
    assert set(registration.tensors) == {"embed_tokens", "lm_head"}
    assert registration.encode()


def test_what_is_no_whole_matrix_is_sharded() -> None:
    still_gathering: Any = nn.Parameter(torch.empty(4, 2))
    still_gathering.ds_status = types.SimpleNamespace(name="INFLIGHT")  # ZeRO-3 fills it in the background
    freed = torch.empty(4, 2)
    freed.untyped_storage().resize_(0)  # FSDP1 frees the storage and leaves the views
    assert all(map(is_sharded, (still_gathering, freed, torch.empty(8), torch.empty(0))))
    still_gathering.ds_status.name = "AVAILABLE"
    assert not is_sharded(still_gathering)


def test_a_dtensor_is_recognised_as_sharded() -> None:
    class Part(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    assert is_sharded(torch.ones(2, 2).as_subclass(Part).detach())


def test_a_snapshot_is_exact_when_small_half_as_wide_when_large_and_never_shares_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(8, 4)
    copy = snapshot(weight)
    assert torch.equal(copy, weight)
    weight.zero_()
    assert not torch.equal(copy, weight)
    monkeypatch.setattr(registration, "_EXACT_BYTES", 100)
    assert snapshot(weight).dtype == torch.bfloat16
    with pytest.raises(UnsupportedModelError, match="float64"):
        snapshot(weight.double())


def test_head_movement_is_the_relative_frobenius_change_of_sampled_rows() -> None:
    torch.manual_seed(0)
    for V in (10, 5000):
        head = torch.randn(V, 16)
        watch = HeadWatch(head, 0.01, policy_version=0)
        assert not watch.is_due(head, 0)
        assert not watch.is_due(head * 1.0099, 1)
        assert watch.is_due(head * 1.0101, 1)
        watch.mark(head * 1.02)
        assert not watch.is_due(head * 1.02, 1)


def test_the_head_is_due_where_the_first_batch_is_of_another_version_than_was_registered() -> None:
    head = torch.randn(10, 16)
    watch = HeadWatch(head, 0.01, policy_version=3)
    assert watch.is_due(head, 4)
    watch.mark(head)
    assert not watch.is_due(head, 5)


def test_in_a_run_that_existed_the_head_is_sent_once_however_little_it_has_moved() -> None:
    """What an earlier attempt has sent of later versions is hidden by it; the registered version needs none."""
    head = torch.randn(10, 16)
    watch = HeadWatch(head, 0.01, policy_version=0)
    assert not watch.is_due(head, 0, joined=True)
    assert watch.is_due(head, 1, joined=True)
    assert watch.is_due(head, 2, joined=True)  # it could not be queued
    watch.mark(head)
    assert not watch.is_due(head, 3, joined=True)

    answered_late = HeadWatch(head, 0.01, policy_version=0)
    assert [answered_late.is_due(head, v, joined=v > 1) for v in (0, 1, 2)] == [False, False, True]


def test_an_initial_drafter_that_is_written_over_while_it_waits_is_sent_as_it_was(tmp_path: Path) -> None:
    """The trainer would be ended by SIGBUS if it read from a mapped file that was cut short meanwhile."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"norm.weight": np.ones(4, np.float32)}, path)
    (tmp_path / "config.json").write_text("{}")
    registration = RunRegistration(tiny_qwen3(), aux_layers=(1, 2, 3), initial_drafter=tmp_path)
    path.write_bytes(path.read_bytes().replace(np.float32(1).tobytes(), np.float32(2).tobytes()))
    sent = tmp_path / "sent"
    sent.write_bytes(b"".join(registration.encode()))
    assert wire.MappedFile(sent).array("drafter.norm.weight").tolist() == [1.0] * 4


def test_a_missing_initial_drafter_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors and config\.json"):
        RunRegistration(tiny_qwen3(), aux_layers=(1, 2, 3), initial_drafter="/nonexistent")


def test_only_rank_0_reads_the_initial_drafter_and_copies_weights() -> None:
    """It alone registers the run: other nodes need not have the folder, nor the memory."""
    assert not RunRegistration(tiny_qwen3(), aux_layers=(1, 2), registers=False).tensors
    with pytest.raises(UnsupportedModelError, match=r"got torch\.float64"):  # what is refused, all ranks refuse
        RunRegistration(tiny_qwen3().double(), aux_layers=(1, 2), registers=False)
    facts: dict[str, Any] = {"aux_layers": (1, 2), "initial_drafter": "/on/the/first/node/only", "world_size": 2}
    DrafterHook(tiny_qwen3(), "http://127.0.0.1:9", rank=1, **facts).close()
    with pytest.raises(FileNotFoundError):
        DrafterHook(tiny_qwen3(), "http://127.0.0.1:9", rank=0, **facts)


@pytest.mark.parametrize("bad", [{"sample_fraction": 0.0}, {"sample_fraction": 1.5}, {"max_tokens_per_step": 1}])
def test_impossible_limits_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample_fraction"):
        DrafterHook(tiny_qwen3(), "http://127.0.0.1:9", aux_layers=(1, 2), **bad)


@pytest.mark.parametrize("run", ["", "my run/7", ".hidden", "x" * 65])
def test_a_name_that_no_run_can_have_is_refused_when_attaching(run: str) -> None:
    with pytest.raises(ValueError, match="is no run's name: 1 to 64 of"):
        DrafterHook(tiny_qwen3(), "http://127.0.0.1:9", aux_layers=(1, 2), run=run)


def test_a_model_whose_ranks_hold_the_same_rollouts_is_refused_by_name() -> None:
    """Tensor parallelism: each rank would send all. FSDP2's mesh is of ranks that hold their own."""
    model = tiny_qwen3()
    parameter = next(model.parameters())
    for names in (("fsdp",), ("dp_replicate", "dp_shard"), None):
        parameter.device_mesh = types.SimpleNamespace(mesh_dim_names=names)
        refuse_model_parallel(model)
    parameter.device_mesh = types.SimpleNamespace(mesh_dim_names=("dp", "tp"))
    with pytest.raises(UnsupportedModelError, match=r"mesh dimension tp.*same rollouts"):
        refuse_model_parallel(model)


def test_a_weight_is_read_past_the_container_that_gathers_it() -> None:
    """As DeepSpeed's, whose `[]` starts a collective inside a forward."""

    class Gathering(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(f"{name} would be gathered")

    model = tiny_qwen3()
    was_tied = tied(model)
    for module in (model.get_output_embeddings(), model.get_input_embeddings()):
        module._parameters = Gathering(module._parameters)
    assert head_weight(model).shape == embedding_weight(model).shape
    assert tied(model) == was_tied
