"""A training step as it runs off the CPU, on torch's `meta` device: no wait, no mixed devices, and its memory."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from helpers.drafter.drafter_worlds import SHAPES, gradients, ours, world
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step_memory import LiveBytes, peak_of
from benchmarks.step_peers import SIZES, Size
from drafter.device import fused_on_cuda, has_triton, prefetch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.model.pointwise import rms_norm
from drafter.policy import TargetHead
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.layout import Packed
from drafter.unroll.packed import runs_flash
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary


@pytest.mark.parametrize("response", [1.0, 0.4])
def test_a_whole_step_never_waits_for_the_device(response: float) -> None:
    # Reading a number from a meta tensor raises, as does mixing devices; gradients of every parameter are checked.
    found = peak_of(SIZES["S"], tokens=96, documents=3, response=response, steps=3)
    assert found.step > found.resident > 0


class HostTensorError(AssertionError):
    """An operation had to do with a tensor of the host."""


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that read or make tensors of the host: a captured CUDA graph would not do them again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((args, kwargs, found)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                raise HostTensorError(f"{func} has to do with a tensor {tuple(value.shape)} of the host")
        return found


def test_a_step_of_fixed_shapes_can_be_captured_once_it_ran() -> None:
    w = world(SHAPES["packed, awkward"])
    trainer = DrafterTrainer(w.drafter.to("meta"), TrainConfig(steps_ahead=3, compute_dtype="bfloat16"))
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 3).to("meta")
    batch = w.batch.to("meta", torch.bfloat16)
    policy = replace(w, embed_tokens=w.embed_tokens.to("meta")).policy
    target = draft_target(batch, plan, w.drafter.vocabulary, policy.needed_head(), torch.bfloat16)
    torch.autograd.backward(trainer.loss_of(plan, batch, policy, target, 1.0).loss)  # as before any capture
    on_device = OnDevice()  # type: ignore[no-untyped-call]
    with on_device:
        torch.autograd.backward(trainer.loss_of(plan, batch, policy, target, 1.0).loss)
    with pytest.raises(HostTensorError), on_device:
        w.batch.to("meta")


def test_the_target_of_a_batch_is_found_without_waiting_for_the_device() -> None:
    w = world(SHAPES["packed, awkward"])
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 2).to("meta")
    target = draft_target(w.batch.to("meta"), plan, w.drafter.vocabulary, TargetHead(w.head))
    rows = plan.target_rows.numel()
    assert target.logprobs(0, rows, torch.float32).shape == (rows, len(w.drafter.vocabulary))


def test_what_a_plan_has_on_the_host_is_not_copied_to_a_device() -> None:
    """It has an integer for each token, and goes to the device for each window."""
    plan = make_plan(torch.tensor([0, 40, 64]), torch.arange(64) % 40 > 5, 2)
    moved = plan.to("meta")
    assert moved.target_starts is plan.target_starts
    assert moved.spans is plan.spans


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
    drafter = Eagle3Drafter(config, vocabulary).to("meta", getattr(torch, dtype))
    calls: list[torch.dtype] = []
    kernel = torch.ops.aten._flash_attention_forward

    def counted(*arguments: object, **named: object) -> object:
        calls.append(arguments[0].dtype)  # type: ignore[attr-defined]
        return kernel(*arguments, **named)

    monkeypatch.setattr("drafter.unroll.packed._flash_forward", counted)
    ids = torch.zeros(64, dtype=torch.int64, device="meta")
    unroll(drafter, plan, ids, torch.zeros(64, 96, device="meta"), torch.zeros(50, 32, device="meta"))
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
    # One document of 8192 tokens: all its scores in float32 would take 4 heads x 8192 x 8192 x 4 bytes = 1 GiB.
    size = Size(64, 128, 4, 2, 16, 256, 128)
    config = DrafterConfig(64, 64, 128, 4, 2, 16, 256, 128, (1, 2, 3))
    drafter = Eagle3Drafter(config, DraftVocabulary(torch.arange(128), 256)).to("meta")
    with LiveBytes() as memory:
        plan = make_plan(torch.tensor([0, 8192]), torch.ones(8192, dtype=torch.bool), 1).to("meta")
        unrolled = unroll(
            drafter,
            plan,
            torch.zeros(8192, dtype=torch.int64, device="meta"),
            torch.zeros(8192, 192, device="meta"),
            torch.zeros(256, 64, device="meta"),
        )
        torch.autograd.backward(unrolled.pre[0].sum())
    assert size.heads * 8192 * 8192 * 4 > 2.0 * memory.peak


@pytest.fixture
def compiler_settings() -> Iterator[Any]:
    """What older torch is set to for the whole process, put back afterwards."""
    settings = import_module("torch._dynamo").config
    with settings.patch(recompile_limit=settings.recompile_limit):
        yield settings


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(_compiler() is None, reason="no C++ compiler here: what is compiled on CUDA cannot be compiled")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_is_compiled_on_cuda_computes_what_it_computes_uncompiled(
    monkeypatch: pytest.MonkeyPatch, compiler_settings: Any
) -> None:
    w = world(SHAPES["packed, awkward"], dtype=torch.float64)
    plain = gradients(w, ours(w, 3).loss)
    compiled: list[str] = []

    def fuses(x: torch.Tensor) -> bool:
        compiled.append(str(x.shape))
        return True

    monkeypatch.setattr("drafter.device.fuses", fuses)
    fused = gradients(w, ours(w, 3).loss)
    assert len(compiled) > 10
    for name, gradient in fused.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_each_number_of_draft_steps_is_compiled_once_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch, compiler_settings: Any
) -> None:
    graphs: list[Any] = []
    whole = torch.compile

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @wraps(whole)  # what it says that it takes decides how it is told of the variants
    def compile_with_backend(function: Any, **options: Any) -> Any:
        return whole(function, backend=backend, **options)

    monkeypatch.setattr("torch.compile", compile_with_backend)
    monkeypatch.setattr("drafter.device.fuses", lambda _: True)

    @fused_on_cuda
    def total(first: torch.Tensor, rest: list[torch.Tensor]) -> torch.Tensor:
        for one in rest:
            first = first + one
        return first

    for steps in range(1, 16):
        for rows in (3, 4, 9):
            for wants_gradients in (False, True):
                x = torch.ones(rows, 2, requires_grad=wants_gradients)
                assert float(total(x, [x] * steps).sum()) == 2 * rows * (steps + 1)
    assert len(graphs) == 15


@pytest.mark.parametrize("theirs", [8, 100])
def test_torch_that_takes_a_limit_of_variants_is_told_and_older_torch_set_to_it(
    theirs: int, monkeypatch: pytest.MonkeyPatch, compiler_settings: Any
) -> None:
    compiler_settings.recompile_limit = theirs
    monkeypatch.setattr("drafter.device.fuses", lambda _: True)
    told: list[int] = []

    def newer(model: Any, *, recompile_limit: int | None = None) -> Any:  # as in torch 2.13
        told.append(recompile_limit or 0)
        return model

    def older(model: Any, *, dynamic: bool | None = None) -> Any:  # as in torch 2.11
        return model

    def limit_seen(compiler: Callable[..., Any]) -> int:
        monkeypatch.setattr("torch.compile", compiler)
        return int(fused_on_cuda(lambda _: compiler_settings.recompile_limit)(torch.ones(2)))

    assert limit_seen(newer) == theirs, "what else the process compiles keeps its own"
    assert told == [64]
    assert limit_seen(older) == max(64, theirs)


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ({"triton"}, "missing: Triton (install triton)"),
        ({"gcc", "clang"}, "missing: a C compiler (install gcc and the C headers)"),
        ({"Python.h"}, "missing: Python's own headers (install python3-dev)"),
        ({"gcc"}, None),  # Triton takes clang too
        ({"gcc", "clang", "Python.h"}, "a C compiler (install gcc and the C headers), Python's own headers"),
        (set(), None),
    ],
)
def test_what_triton_lacks_to_start_a_kernel_is_named(
    lacks: set[str],
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "Python.h" not in lacks:
        (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("drafter.device.find_spec", lambda name: None if name in lacks else name)
    monkeypatch.setattr("drafter.device.shutil.which", lambda name: None if name in {"cc", *lacks} else name)
    monkeypatch.setattr("drafter.device.sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with caplog.at_level(logging.WARNING, "draftalign.drafter"):
        assert has_triton.__wrapped__() is (named is None)
    assert len(caplog.records) == (named is not None)
    assert (named or "") in caplog.text


def test_a_compiler_that_is_named_to_triton_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "/opt/some/cc")
    monkeypatch.setattr("drafter.device.find_spec", lambda name: name)
    monkeypatch.setattr("drafter.device.shutil.which", lambda _: None)
    monkeypatch.setattr("drafter.device.sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert has_triton.__wrapped__()


def test_what_is_made_ahead_comes_in_order_with_its_errors() -> None:
    made: list[tuple[int, str]] = []

    def items() -> Iterator[int]:
        for i in range(4):
            made.append((i, threading.current_thread().name))
            yield i
        raise OSError("the last one")

    for device, thread in (("cpu", "MainThread"), ("meta", "prefetch_0")):
        made.clear()
        found: list[int] = []
        with pytest.raises(OSError, match="the last one"):
            found.extend(prefetch(items(), torch.device(device)))
        assert found == [0, 1, 2, 3]
        assert {name for _, name in made} == {thread}
    assert list(prefetch([], torch.device("meta"))) == []


def test_torchs_own_rms_norm_which_cuda_takes_is_ours() -> None:
    x = torch.randn(7, 48, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(48, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 48, dtype=torch.float64)
    one, two = rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (48,), weight, 1e-6)
    torch.testing.assert_close(one, two)
    for a, b in zip(
        torch.autograd.grad(one, (x, weight), grad), torch.autograd.grad(two, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(a, b)
