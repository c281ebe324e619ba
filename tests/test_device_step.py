"""A training step as it runs off the CPU, on torch's `meta` device: no wait, no mixed devices, and its memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_memory import LiveBytes, peak_of
from benchmarks.step_peers import SIZES, Size
from drafter.attention_layout import Packed
from drafter.model import DrafterConfig, Eagle3Drafter
from drafter.packed_attention import runs_flash
from drafter.plan import make_plan
from drafter.trainer import Loss
from drafter.unroll import unroll
from drafter.vocabulary import DraftVocabulary


@pytest.mark.parametrize("loss", ["kl", "lk", "nla", "alpha"])
@pytest.mark.parametrize("response", [1.0, 0.4])
def test_a_whole_step_never_waits_for_the_device(loss: Loss, response: float) -> None:
    # Reading a number from a meta tensor raises, as does mixing devices; gradients of every parameter are checked.
    found = peak_of(SIZES["S"], tokens=96, documents=3, response=response, steps=3, loss=loss)
    assert found.step > found.resident > 0


def test_a_meta_tensor_would_say_if_it_were_read() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        float(torch.ones((), device="meta"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_half_precision_takes_flash_attention_and_float32_the_plain_kernel(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(torch.tensor([0, 40, 64]), torch.arange(64) % 40 > 5, 2).to("meta")
    assert isinstance(plan.layout, Packed)
    config = DrafterConfig(32, 32, 64, 4, 2, 8, 50, 20, (1, 2, 3))
    vocabulary = DraftVocabulary(torch.arange(20), 50)
    drafter = Eagle3Drafter(config, vocabulary, torch.zeros(50, 32)).to("meta", getattr(torch, dtype))
    calls: list[torch.dtype] = []
    kernel = torch.ops.aten._flash_attention_forward

    def counted(*arguments: object, **named: object) -> object:
        calls.append(arguments[0].dtype)  # type: ignore[attr-defined]
        return kernel(*arguments, **named)

    monkeypatch.setattr("drafter.packed_attention._flash_forward", counted)
    unroll(drafter, plan, torch.zeros(64, dtype=torch.int64, device="meta"), torch.zeros(64, 96, device="meta"))
    assert calls == ([torch.bfloat16] * 2 if dtype == "bfloat16" else [])


@pytest.mark.parametrize(("width", "fits"), [(64, True), (96, True), (256, True), (264, False), (12, False)])
def test_flash_attention_is_asked_only_for_heads_that_it_takes(width: int, fits: bool) -> None:
    assert runs_flash(torch.empty(3, 2, width, dtype=torch.bfloat16, device="meta")) is fits
    assert not runs_flash(torch.empty(3, 2, width, dtype=torch.bfloat16))


def test_the_training_state_of_an_8b_drafter_with_16k_tokens_fits_in_40_gb() -> None:
    for documents in (1, 16):
        found = peak_of(SIZES["8B"], tokens=16_384, documents=documents, steps=7)
        assert found.step * 1.0737 < 40


def test_live_bytes_counts_each_storage_while_it_lives() -> None:
    with LiveBytes() as memory:
        a = torch.empty(1000, device="meta")
        view = a.view(10, 100)
        assert memory.live == 4000
        del a
        assert memory.live == 4000
        del view
        b = torch.empty(10, device="meta")
        assert memory.live == 40
        assert memory.peak == 4000
        del b


def test_scores_of_a_long_document_are_never_held_whole() -> None:
    # One document of 4096 tokens: all its scores in float32 would take 4 heads x 4096 x 4096 x 4 bytes = 256 MiB.
    size = Size(64, 128, 4, 2, 16, 256, 128)
    config = DrafterConfig(64, 64, 128, 4, 2, 16, 256, 128, (1, 2, 3))
    drafter = Eagle3Drafter(config, DraftVocabulary(torch.arange(128), 256), torch.empty(256, 64)).to("meta")
    with LiveBytes() as memory:
        plan = make_plan(torch.tensor([0, 4096]), torch.ones(4096, dtype=torch.bool), 1).to("meta")
        unrolled = unroll(
            drafter,
            plan,
            torch.zeros(4096, dtype=torch.int64, device="meta"),
            torch.zeros(4096, 192, device="meta"),
        )
        unrolled.pre[0].sum().backward()
    assert size.heads * 4096 * 4096 * 4 > 2.0 * memory.peak
