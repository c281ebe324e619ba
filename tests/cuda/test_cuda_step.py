"""The training step and replay on a CUDA device, against the CPU's float64, which other tests hold to references."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, World, cast, mask_of, rollouts, world
from helpers.drafter.mtp_worlds import CONFIGS, drafter_for, glm_config
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.device import is_device_fault, is_out_of_memory, prefetch
from drafter.model.draft_model import DraftModel
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.replay import replay
from drafter.training.loss import DraftLoss
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, Prepared, TrainConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.sending.features import score_rows, to_e4m3

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # Of what only runs here, compilers and torch's debugging among it, warnings are theirs.
    pytest.mark.filterwarnings("default"),
]

HIDDEN, VOCAB, DRAFT, STEPS = 64, 96, 48, 3
#: Errors of sums and gradients. In bfloat16 the same step on a CPU is as far away.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}


def flash_world(shape: str, *, layers: int = 1, temperature: float = 1.0) -> World:
    """Heads of 16, which FlashAttention takes, and rows of whole 16 bytes."""
    g = torch.Generator().manual_seed(5)
    config = DrafterConfig(HIDDEN, HIDDEN, 96, 4, 2, 16, VOCAB, DRAFT, (1, 2, 3), num_hidden_layers=layers)
    kept = torch.randperm(VOCAB, generator=g)[:DRAFT].sort().values
    drafter = Eagle3Drafter(config, DraftVocabulary(kept, VOCAB)).double()
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        parameter.data = noise * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1 + 0.3 * noise
    embed = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    head = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64) * HIDDEN**-0.5
    return World(drafter, embed, head, rollouts(SHAPES[shape], head, temperature, 3))


def loss_and_gradients(
    drafter: DraftModel, batch: RolloutBatch, policy: Policy, config: TrainConfig, device: str
) -> tuple[DraftLoss, dict[str, Tensor]]:
    """As the trainer has them before it clips, on the CPU in float64."""
    dtype = getattr(torch, config.compute_dtype)
    wide = torch.promote_types(dtype, torch.float32)
    head = TargetHead(policy.needed_head().lm_head.to(dtype))
    policy = Policy(0, policy.embed_tokens.to(device, dtype), head)
    trainer = DrafterTrainer(drafter.to(device), config)
    prepared = trainer.prepare(cast(batch, dtype if dtype == torch.float64 else torch.float32))
    plan, moved = prepared.plan.to(trainer.device), prepared.taken()
    product = dtype if device == "cuda" else wide
    target = draft_target(moved, plan, drafter.vocabulary, policy.needed_head(), product)
    found = trainer.loss_of(plan, moved, policy, target, 7.0)
    torch.autograd.backward(found.loss)
    return found, {n: p.grad.double().cpu() for n, p in drafter.named_parameters() if p.grad is not None}


def deviation(got: tuple[DraftLoss, dict[str, Tensor]], want: tuple[DraftLoss, dict[str, Tensor]]) -> float:
    """Largest relative error of the sums, and of the gradients by their norms."""
    worst = 0.0
    for name in ("kl_sums", "acceptance_sums"):
        one, other = getattr(got[0], name).double().cpu(), getattr(want[0], name).double()
        worst = max(worst, float(((one - other).abs() / other.abs().clamp(min=1e-3)).max()))
    assert got[1].keys() == want[1].keys()
    for name, gradient in got[1].items():
        assert gradient.isfinite().all(), name
        worst = max(worst, float((gradient - want[1][name]).norm() / want[1][name].norm()))
    return worst


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layers", "temperature"), [(1, 1.0), (1, 0.7), (2, 1.0)])
def test_losses_and_gradients_are_those_of_the_cpu_in_float64(
    dtype: Any, shape: str, layers: int, temperature: float
) -> None:
    config = TrainConfig(steps_ahead=STEPS, compute_dtype="float64")
    w = flash_world(shape, layers=layers, temperature=temperature)
    want = loss_and_gradients(w.drafter, w.batch, w.policy, config, "cpu")
    w = flash_world(shape, layers=layers, temperature=temperature)
    got = loss_and_gradients(w.drafter, w.batch, w.policy, replace(config, compute_dtype=dtype), "cuda")
    assert deviation(got, want) < TOLERANCES[dtype]


def test_widths_that_no_kernel_is_aligned_to_are_right_too() -> None:
    config = TrainConfig(steps_ahead=STEPS, compute_dtype="float64")
    w = world(SHAPES["packed, awkward"])
    want = loss_and_gradients(w.drafter, w.batch, w.policy, config, "cpu")
    for dtype in ("float32", "bfloat16"):
        w = world(SHAPES["packed, awkward"])
        got = loss_and_gradients(w.drafter, w.batch, w.policy, replace(config, compute_dtype=dtype), "cuda")
        assert deviation(got, want) < TOLERANCES[dtype]


@pytest.mark.parametrize("kind", ["experts", "dense", "glm", "glm, grouped product"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mtp_modules_train_as_on_the_cpu(kind: str, dtype: Any) -> None:
    config = TrainConfig(steps_ahead=2, compute_dtype="float64")
    drafter, policy, batch = _mtp(kind)
    want = loss_and_gradients(drafter, batch, policy, config, "cpu")
    drafter, policy, batch = _mtp(kind)
    got = loss_and_gradients(drafter, batch, policy, replace(config, compute_dtype=dtype), "cuda")
    # In bfloat16 a token near the edge of its router's choice goes to another expert: sums hold, single entries do not.
    assert deviation(got, want) < (TOLERANCES[dtype] if dtype == "float32" or kind == "dense" else 1.0)
    error = float((got[0].kl_sums.cpu().double() - want[0].kl_sums).abs().max() / want[0].kl_sums.abs().max())
    assert error < 0.1


def _mtp(kind: str) -> tuple[DraftModel, Policy, RolloutBatch]:
    config = glm_config(moe_intermediate_size=16) if kind == "glm, grouped product" else CONFIGS[kind]()
    drafter, policy = drafter_for(config)
    head = policy.needed_head().lm_head * config.hidden_size**-0.5
    policy = replace(policy, head=TargetHead(head))
    return drafter, policy, rollouts(SHAPES["packed, awkward"], head, 1.0, 3)


def test_a_step_never_waits_for_the_device() -> None:
    w = flash_world("packed, awkward")
    config = TrainConfig(steps_ahead=STEPS, compute_dtype="bfloat16")
    trainer = DrafterTrainer(w.drafter.to("cuda"), config)
    batch = cast(w.batch, torch.float32)
    policy = Policy(0, w.embed_tokens.cuda().bfloat16(), TargetHead(w.head.bfloat16()))

    def step() -> None:
        prepared = trainer.prepare(batch)
        plan, moved = prepared.plan.to(trainer.device), prepared.taken()
        target = draft_target(moved, plan, w.drafter.vocabulary, policy.needed_head(), torch.bfloat16)
        torch.autograd.backward(trainer.loss_of(plan, moved, policy, target, 7.0).loss)

    step()  # what is compiled, and the head's copy
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            w.drafter.lm_head.weight.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_are_not_compiled_for() -> None:
    from torch._dynamo.utils import counters

    w = flash_world("one document, half response")
    trainer = DrafterTrainer(w.drafter.to("cuda"), TrainConfig(steps_ahead=STEPS, compute_dtype="bfloat16"))
    policy = Policy(0, w.embed_tokens.cuda().bfloat16(), TargetHead(w.head.bfloat16()))

    def step(*lengths: int) -> None:
        batch = rollouts(tuple(mask_of(n, n // 2) for n in lengths), w.head, 1.0, sum(lengths))
        trainer.step([(cast(batch, torch.float32), policy)])

    for lengths in ((40, 31), (52,), (33, 20, 47)):
        step(*lengths)
    compiled = counters["stats"]["unique_graphs"]
    for other in ((64,), (21, 22, 23), (90, 17), (35, 36, 37, 38)):
        step(*other)
    assert compiled > 0
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_windows_move_a_drafter_as_on_the_cpu_and_its_state_comes_back(optimizer: Any, tmp_path: Path) -> None:
    reports: dict[str, list[float]] = {}
    for device in ("cpu", "cuda"):
        w = flash_world("packed, half response")
        config = TrainConfig(steps_ahead=STEPS, learning_rate=1e-2, optimizer=optimizer, compute_dtype="float32")
        trainer = DrafterTrainer(w.drafter.to(device), config)
        policy = Policy(0, w.embed_tokens.to(device, torch.float32), TargetHead(w.head.float()))
        batch = cast(w.batch, torch.float32)
        reports[device] = [trainer.step([(batch, policy)]).loss for _ in range(8)]
    assert reports["cuda"] == pytest.approx(reports["cpu"], rel=0.02)
    assert reports["cuda"][-1] < 0.8 * reports["cuda"][0]
    trainer.save(tmp_path)
    again = DrafterTrainer(w.drafter, config)
    again.load(tmp_path)
    for name, moment in trainer._optimizer.moments().items():
        assert torch.equal(again._optimizer.moments()[name], moment), name
    assert again.step([(batch, policy)]).skipped is None


def test_what_is_prepared_ahead_is_what_a_step_prepares() -> None:
    w = flash_world("packed, awkward")
    trainer = DrafterTrainer(w.drafter.to("cuda"), TrainConfig(steps_ahead=STEPS))
    batch = cast(w.batch, torch.float32)
    for prepared in prefetch((trainer.prepare(batch) for _ in range(3)), trainer.device):
        assert isinstance(prepared, Prepared)
        assert torch.equal(prepared.taken().aux_hidden.cpu(), batch.aux_hidden)


def test_trainings_one_after_another_keep_no_more_memory() -> None:
    device, sizes, floats = torch.device("cuda", torch.cuda.current_device()), [], 1 << 22
    for _ in range(6):
        for copied in prefetch((torch.zeros(floats).to(device) for _ in range(4)), device):
            copied.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[1] + 4 * floats, "each stream would keep its own"


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_replay_gives_what_it_gives_on_the_cpu(drafting: Any) -> None:
    w = flash_world("packed, awkward")
    batch, embed = cast(w.batch, torch.float32), w.embed_tokens.float()
    want = replay(w.drafter.float(), batch, Policy(0, embed), depth=STEPS, drafting=drafting)
    got = replay(w.drafter.cuda(), batch, Policy(0, embed.cuda()), depth=STEPS, drafting=drafting)
    assert got.alpha == pytest.approx(want.alpha, rel=0.02)  # bfloat16 there


def test_eight_bit_features_are_the_numbers_that_the_cpu_makes_of_them() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-2, 2, 50)[:, None, None]
    values, scales = zip(*(to_e4m3(x[:, i].cuda()) for i in range(3)), strict=True)
    on_cpu = [to_e4m3(x[:, i]) for i in range(3)]
    for i in range(3):
        torch.testing.assert_close(scales[i].cpu(), on_cpu[i][1], rtol=1e-6, atol=0)
        same = values[i].cpu().float() == on_cpu[i][0].float()  # a scale's last bit can move one to its neighbour
        assert same.float().mean() > 0.999
    batch = replace(
        rollouts((mask_of(50, 20),), torch.randn(VOCAB, HIDDEN), 1.0, 0),
        aux_hidden=torch.cat(values, -1).cpu(),
        aux_scale=torch.stack(scales, -1).cpu(),
    )
    wide = batch.to("cpu", torch.float32).aux_hidden
    assert torch.equal(batch.to("cuda", torch.float32).aux_hidden.cpu(), wide)
    assert torch.equal(batch.to("cuda", torch.bfloat16).aux_hidden.cpu(), wide.bfloat16())


def test_rows_are_scored_as_on_the_cpu() -> None:
    last, head = torch.randn(40, HIDDEN), torch.randn(VOCAB, HIDDEN)
    ids = torch.randint(VOCAB, (40,))
    want = score_rows(last, head, ids, temperature=0.8)
    got = score_rows(last.cuda(), head.cuda(), ids.cuda(), temperature=0.8)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


def test_memory_that_ran_out_is_known_and_the_next_step_runs() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, device="cuda")
    assert is_out_of_memory(caught.value)
    assert not is_device_fault(caught.value)
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_an_assertion_in_a_kernel_is_a_device_fault() -> None:
    script = """
import torch
from drafter.device import is_device_fault, is_out_of_memory
try:
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")].cpu()
except Exception as error:
    print("FAULT", is_device_fault(error), is_out_of_memory(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert "FAULT True False" in done.stdout, done.stderr


def test_a_share_of_the_memory_is_all_that_is_taken() -> None:
    pytest.importorskip("pydantic_settings")
    script = """
import torch
from service.worker.process.device import use_device
use_device("cuda", 0.1)
total = torch.cuda.get_device_properties(0).total_memory
held = torch.empty(total // 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(total // 10, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("CAPPED")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert "CAPPED" in done.stdout, done.stderr
