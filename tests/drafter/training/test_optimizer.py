"""What moves the parameters: Muon against its formula in float64, AdamW for the rest, and states that are taken up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drafter.training.optimizer import Method, Optimizer

RATE, DECAY = 0.01, 0.1
ADAMW, MUON = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
SHAPES = {"wide": (6, 10), "tall": (9, 4), "lm_head.weight": (12, 5), "gain": (7,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(*shape, generator=g)) for n, shape in SHAPES.items()}


def optimizer(named: dict[str, nn.Parameter], method: Method = "muon") -> Optimizer:
    return Optimizer(named, method, weight_decay=DECAY, betas=(0.9, 0.95), epsilon=1e-8)


def move(named: dict[str, nn.Parameter], made: Optimizer, seeds: range, rate: float = RATE) -> None:
    for seed in seeds:
        g = torch.Generator().manual_seed(100 + seed)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        made.step(rate)
        made.forget_gradients()


def orthogonalised(x: Tensor) -> Tensor:
    """Five steps of Newton and Schulz with Jordan's coefficients, in float64."""
    x = x.double() / x.double().norm()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize("name", ["wide", "tall"])
def test_matrices_move_by_the_formula_of_muon(name: str) -> None:
    named = parameters()
    made, expected = optimizer(named), named[name].detach().double()
    momentum = torch.zeros_like(expected)
    for seed in range(4):
        g = torch.Generator().manual_seed(100 + seed)
        gradient = {n: torch.randn(p.shape, generator=g) for n, p in named.items()}[name].double()
        momentum = 0.95 * momentum + 0.05 * gradient
        step = 0.2 * max(expected.shape) ** 0.5 * orthogonalised(0.05 * gradient + 0.95 * momentum)
        expected = expected * (1 - RATE * DECAY) - RATE * step
        before = named[name].detach().clone()
        move(named, made, range(seed, seed + 1))
        moved = (before * (1 - RATE * DECAY) - named[name].detach()).double() / RATE
        assert float((moved - step).norm() / step.norm()) < 1e-4  # in float32
        sizes = torch.linalg.svdvals(moved) / (0.2 * max(expected.shape) ** 0.5)
        assert float(sizes.min()) > 0.5
        assert float(sizes.max()) < 1.4


def test_muon_moves_matrices_as_torchs_own_does() -> None:
    named, twin = parameters(), parameters()
    made = optimizer(named)
    torchs = torch.optim.Muon([twin["wide"], twin["tall"]], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        move(named, made, range(seed, seed + 1))
        g = torch.Generator().manual_seed(100 + seed)
        for parameter in twin.values():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        torchs.step()  # type: ignore[no-untyped-call]
    for name in ("wide", "tall"):
        ours, theirs = named[name].detach(), twin[name].detach()
        moved = ours - parameters()[name].detach()
        assert float((ours - theirs).norm() / moved.norm()) < 0.02  # torch's iterates in bfloat16
        assert torch.allclose(made.state()[f"momentum_buffer.{name}"], torchs.state[twin[name]]["momentum_buffer"])


def test_what_is_no_map_between_states_moves_as_by_adamw() -> None:
    one, other = parameters(), parameters()
    move(one, optimizer(one), range(3))
    move(other, optimizer(other, "adamw"), range(3))
    for name in SHAPES:
        assert torch.equal(one[name], other[name]) is (name in ("lm_head.weight", "gain"))


@pytest.mark.parametrize("method", ["muon", "adamw"])
def test_a_state_is_taken_up_exactly(method: Method) -> None:
    straight, first = parameters(), parameters()
    move(straight, optimizer(straight, method), range(5))
    made = optimizer(first, method)
    move(first, made, range(3))
    stored, again = made.state(), optimizer(first, method)
    assert set(again.expected(stored)) == set(stored)
    moments = {"lm_head.weight": ADAMW, "gain": ADAMW, "wide": MUON, "tall": MUON}
    moments |= {"wide": ADAMW, "tall": ADAMW} if method == "adamw" else {}
    assert set(stored) == {f"{moment}.{name}" for name in SHAPES for moment in moments[name]}, (
        "as checkpoints have them"
    )
    again.load(stored)
    move(first, again, range(3, 5))
    assert all(torch.equal(first[n], straight[n]) for n in SHAPES)


def test_another_method_takes_up_what_it_knows_and_begins_the_rest_anew() -> None:
    named = parameters()
    made = optimizer(named, "adamw")
    move(named, made, range(3))
    stored, muon = made.state(), optimizer(named, "muon")
    known = {n: t for n, t in stored.items() if n.partition(".")[2] in ("lm_head.weight", "gain")}
    assert set(muon.expected(stored)) == set(known)
    muon.load(stored)
    for name, tensor in known.items():
        assert torch.equal(muon.state()[name], tensor)
    assert set(muon.state()) == set(known)
    move(named, muon, range(3, 4))


@pytest.mark.parametrize("zero", [True, False])
def test_a_matrix_that_nothing_used_stays_where_it_is(zero: bool) -> None:
    """An expert that no row chose: a GPU's grouped product gives it a zero gradient, a CPU's loop none."""
    named = parameters()
    made = Optimizer(named, "muon", weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    move(named, made, range(2))
    before = named["wide"].detach().clone()
    for _ in range(3):
        named["wide"].grad = torch.zeros_like(before) if zero else None
        named["tall"].grad = torch.ones_like(named["tall"])
        made.step(RATE)
    assert torch.equal(named["wide"], before)


def test_adamw_is_torchs_own_with_the_settings_given() -> None:
    named, twin = parameters(), parameters()
    move(named, optimizer(named, "adamw"), range(3))
    matrices = [p for p in twin.values() if p.ndim == 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": [twin["gain"]], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(3):
        g = torch.Generator().manual_seed(100 + seed)
        for parameter in twin.values():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        torchs.step()
    assert all(torch.equal(named[n], twin[n]) for n in SHAPES)


def test_a_state_replaces_what_was_there() -> None:
    named = parameters()
    moved = optimizer(named)
    move(named, moved, range(2))
    stored = moved.state()
    kept = {name: tensor.clone() for name, tensor in stored.items()}
    move(named, moved, range(2, 3))
    assert all(torch.equal(stored[name], tensor) for name, tensor in kept.items()), "it is a copy"
    moved.load({})
    assert moved.state() == {}


def test_a_step_moves_nothing_without_a_gradient() -> None:
    named = parameters()
    made = optimizer(named)
    before = {n: p.detach().clone() for n, p in named.items()}
    made.step(RATE)
    assert all(torch.equal(named[n], before[n]) for n in SHAPES)
    assert made.state() == {}
