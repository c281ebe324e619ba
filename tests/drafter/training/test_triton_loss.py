"""The Triton kernels of the loss in Triton's interpreter, against the torch code, float64 and brute force."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, gradients, ours, world
from helpers.drafter.loss_reference import brute_force
from helpers.drafter.triton_fixtures import interpreted
from torch import Tensor

from drafter.training import loss


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels for the interpreter, in blocks that no row fills evenly."""
    module = interpreted("drafter.training.triton_loss", monkeypatch)
    monkeypatch.setattr(module, "_BLOCK", 16)
    return module


def case(e: int, n: int, D: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(D)
    logp = torch.log_softmax(3 * torch.randn(n, D + 3, generator=g, dtype=torch.float64), -1)[:, :D]  # mass below 1
    logits = 4 * torch.randn(e, D, generator=g, dtype=torch.float64)
    pick = torch.randint(n, (e,), generator=g).sort().values
    return logits.to(dtype), logp.to(dtype).contiguous(), pick


def reference(logits: Tensor, logp: Tensor, pick: Tensor, divisor: float) -> dict[str, Tensor]:
    p, z = logp.double().exp()[pick], logits.double() / divisor
    logq, mass = torch.log_softmax(z, -1), p.sum(-1)
    q = logq.exp()
    kl = (torch.special.xlogy(p, p) - p * logq).sum(-1) - torch.special.xlogy(mass, mass)
    return {"kl": kl, "acceptance": torch.minimum(p, q).sum(-1), "logsumexp": z.logsumexp(-1), "p": p, "q": q}


@pytest.mark.parametrize("D", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("divisor", [1.0, 0.75])
def test_the_kernels_measure_what_the_formulas_say(kernels: ModuleType, D: int, divisor: float) -> None:
    logits, logp, pick = case(9, 4, D)
    want = reference(logits, logp, pick, divisor)
    p = logp.clone()
    mass, own = kernels.target(p)
    torch.testing.assert_close(p, logp.exp())
    torch.testing.assert_close(mass, logp.exp().sum(-1))
    found = kernels.measure(logits, p, own, pick, divisor)
    for name in ("kl", "acceptance", "logsumexp"):
        torch.testing.assert_close(getattr(found, name), want[name], rtol=1e-10, atol=1e-12)
    factor = torch.randn(9, dtype=torch.float64)
    slope = kernels.slope(logits, p, mass, pick, found, factor, divisor, torch.float64)
    by_kl = want["p"].sum(-1, keepdim=True) * want["q"] - want["p"]
    torch.testing.assert_close(slope, factor[:, None] * by_kl, rtol=1e-9, atol=1e-12)


def test_extreme_logits_and_empty_targets_stay_exact(kernels: ModuleType) -> None:
    logits, logp, pick = case(9, 4, 50)
    logits[0], logits[1, 3], logits[2, :] = -1e4, 1e4, 0.0
    logp[:, 7:20] = -torch.inf  # the target never draws these
    logp[pick[4]] = -torch.inf  # a target without mass on the draft vocabulary
    want = reference(logits, logp, pick, 1.0)
    p = logp.clone()
    _, own = kernels.target(p)
    found = kernels.measure(logits, p, own, pick, 1.0)
    for name in ("kl", "acceptance", "logsumexp"):
        torch.testing.assert_close(getattr(found, name), want[name], rtol=1e-10, atol=1e-9)
    assert float(found.kl[4]) == 0.0
    assert bool(found.kl.isfinite().all())


def test_float32_rows_lose_no_more_than_float32_must(kernels: ModuleType) -> None:
    logits, logp, pick = case(7, 3, 333, torch.float32)
    want = reference(logits, logp, pick, 1.0)
    p = logp.clone()
    _, own = kernels.target(p)
    found = kernels.measure(logits, p, own, pick, 1.0)
    assert found.kl.dtype == torch.float32
    torch.testing.assert_close(found.kl.double(), want["kl"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.acceptance.double(), want["acceptance"], rtol=1e-5, atol=1e-6)


def test_a_broken_row_shows_and_stays_in_its_row(kernels: ModuleType) -> None:
    logits, logp, pick = case(5, 2, 20)
    logits[2, 11] = torch.nan
    p = logp.clone()
    _, own = kernels.target(p)
    found = kernels.measure(logits, p, own, pick, 1.0)
    assert found.kl.isnan().tolist() == [False, False, True, False, False]


@pytest.fixture
def routed(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The loss as it runs on CUDA."""
    monkeypatch.setattr(loss, "kernels", lambda *_: kernels)
    return kernels


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("temperature", [0.75, 0.0])
def test_the_loss_through_the_kernels_equals_brute_force(temperature: float) -> None:
    w = world(SHAPES["packed, awkward"], temperature=temperature or 1.0)
    w = replace(w, batch=replace(w.batch, temperature=temperature))  # greedy: logits are not divided
    expected, slopes = brute_force(w, 3)
    result = ours(w, 3, chunk=120)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for name, gradient in gradients(w, result.loss).items():
        torch.testing.assert_close(gradient, slopes[name], rtol=1e-7, atol=1e-10, msg=name)


def test_kl_through_the_kernels_equals_kl_without_them(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(SHAPES["packed, awkward"], temperature=0.75)
    plain = ours(w, 3)
    wanted = gradients(w, plain.loss)
    monkeypatch.setattr(loss, "kernels", lambda *_: kernels)
    fused = ours(w, 3, chunk=120)
    torch.testing.assert_close(fused.kl_sums, plain.kl_sums, rtol=1e-10, atol=0)
    torch.testing.assert_close(fused.acceptance_sums, plain.acceptance_sums, rtol=1e-10, atol=0)
    for name, gradient in gradients(w, fused.loss).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-11, msg=name)


def _without_mass(module: Any) -> Any:
    slope = module.slope
    return {"slope": lambda logits, p, mass, *rest: slope(logits, p, torch.ones_like(mass), *rest)}


def _wrong_pick(module: Any) -> Any:
    measure = module.measure
    return {"measure": lambda logits, p, own, pick, divisor: measure(logits, p, own, pick * 0, divisor)}


def _untempered(module: Any) -> Any:
    measure = module.measure
    return {"measure": lambda logits, p, own, pick, _divisor: measure(logits, p, own, pick, 1.0)}


@pytest.mark.parametrize("break_it", [_without_mass, _untempered, _wrong_pick])
def test_a_broken_kernel_would_be_noticed(routed: ModuleType, monkeypatch: pytest.MonkeyPatch, break_it: Any) -> None:
    w = world(SHAPES["packed, awkward"], temperature=0.75)
    expected, slopes = brute_force(w, 3)
    for name, function in break_it(routed).items():
        monkeypatch.setattr(routed, name, function)
    result = ours(w, 3)
    found = gradients(w, result.loss)
    worst = max(float((found[n] - slopes[n]).norm() / slopes[n].norm()) for n in slopes)
    assert max(worst, abs(result.loss.item() / expected.item() - 1)) > 1e-2


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("m * q - target_p", "q - target_p"),
        ("total = total * kept +", "total = total +"),
    ],
)
def test_a_slip_inside_a_kernel_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str, instead: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    source = (Path(loss.__file__).parent / "triton_loss.py").read_text()
    assert source.count(written) == 1
    path = tmp_path / "broken_kernels.py"
    path.write_text(source.replace(written, instead))
    spec = importlib.util.spec_from_file_location("broken_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    monkeypatch.setattr(broken, "_BLOCK", 4)
    with pytest.raises(AssertionError):
        test_the_kernels_measure_what_the_formulas_say(broken, 50, 0.75)


#: Compiles every kernel for a draft vocabulary that is a multiple of 16 and for one that is not, and prints what ptxas
#: says of its registers: spills show there, never in PTX.
_COMPILE = """
import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from drafter.training import triton_loss as kernels

ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
types = {"pick": "*i64", "e": "i32", "D": "i32", "divisor": "fp32", "BLOCK": "constexpr", "out": "*bf16"}
for kernel in (kernels._target, kernels._measure, kernels._slope):
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    sixteens = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if (signature[p.name].startswith("*") or p.name == "D") and not p.do_not_specialize_on_alignment
    }
    for attributes in (sixteens, {}):
        source = ASTSource(kernel, signature=signature, constexprs={"BLOCK": kernels._BLOCK}, attrs=attributes)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels._WARPS})
        assert built.asm["cubin"]
        path = Path(sys.argv[1]) / "kernel.ptx"
        path.write_text(built.asm["ptx"])
        command = [ptxas, "-v", "-arch=sm_90a", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        stack, stores, loads = re.search(
            r"(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads", said
        ).groups()
        print(kernel.__name__, len(attributes), stack, stores, loads)
"""

#: Prints how many variants of each kernel chunks of many sizes would have compiled, asking what Triton asks.
_VARIANTS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from drafter.training import triton_loss as kernels

backend = make_backend(GPUTarget("cuda", 90, 32))
found = {}
def counted(kernel):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    variants = found[kernel.__name__] = set()
    kernel.run = lambda *args, grid, warmup, **options: variants.add(str(bind(*args, **options)[1]))
for kernel in (kernels._target, kernels._measure, kernels._slope):
    counted(kernel)
for e in (1, 2, 5, 16, 48, 50):
    pick = torch.zeros(e + 7, dtype=torch.int64)[e % 3 : e % 3 + e]
    logits, p, value = torch.zeros(e, 32), torch.zeros(3, 32), torch.zeros(e + 3)[e % 2 : e % 2 + e]
    mass, own = kernels.target(p)
    measured = kernels.measure(logits, p, own, pick, 1.0)
    kernels.slope(logits, p, mass, pick, measured, value, 1.0, torch.bfloat16)
print(*(f"{name} {len(variants)}" for name, variants in found.items()), sep="\\n")
"""


def compiled(script: str, directory: Path) -> list[list[str]]:
    """The words of each line that a script prints which runs Triton's compiler in place of its interpreter."""
    if sys.platform != "linux":
        pytest.skip("Triton compiles for NVIDIA on Linux only")
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=Path(loss.__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_a_gpu_that_is_not_here_and_fits_its_registers(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does, and says nothing of spills."""
    found = compiled(_COMPILE, tmp_path)
    assert [(name, aligned != "0") for name, aligned, *_ in found] == [
        (name, aligned) for name in ("_target", "_measure", "_slope") for aligned in (True, False)
    ]
    assert all(spilled == ["0", "0", "0"] for _, _, *spilled in found), found


def test_chunks_of_any_number_of_entries_share_one_compiled_kernel(tmp_path: Path) -> None:
    assert compiled(_VARIANTS, tmp_path) == [["_target", "1"], ["_measure", "1"], ["_slope", "1"]]
