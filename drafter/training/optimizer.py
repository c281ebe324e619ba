"""What moves a drafter's parameters: Muon for its matrices and AdamW for the rest, or AdamW for everything.

Muon (Keller Jordan, 2024; to the bit what `torch.optim.Muon` computes) replaces a matrix's momentum by the nearest
orthogonal one, so that all its directions move alike. Its steps are scaled to the size of AdamW's (Liu et al., arXiv
2502.16982), so one learning rate serves both. An lm_head is a table of tokens and no map between states: AdamW moves
it, and all that is not a matrix.

None of torch's optimizer classes is used: the first to be made imports torch's compiler, which costs every start of a
worker two seconds, and 145 MiB.

Of several ranks each moves a part of Muon's matrices, and they exchange them; momentum, which costs little, each keeps
of all. So moments and weights are the same on every rank, to the bit what one rank would make of the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from drafter.training.ranks import ALONE, Ranks

#: What moves matrices.
Method = Literal["muon", "adamw"]

#: A drafter's own head among its parameters.
HEAD: Final = "lm_head.weight"

_ADAMW: Final = ("exp_avg", "exp_avg_sq", "step")
_MUON: Final = ("momentum_buffer",)
_MUON_MOMENTUM: Final = 0.95
#: Jordan's coefficients of an iteration of Newton and Schulz.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5


def _shared_out(shapes: Mapping[str, torch.Size], world: int) -> dict[str, int]:
    """Which rank moves which matrix: the dearest first, each to the rank that has least to do.

    An iteration of Muon on a matrix of m x n, m <= n, costs 4 m^2 n + 2 m^3 operations.
    """
    costs = {name: 4 * min(shape) * shape.numel() + 2 * min(shape) ** 3 for name, shape in shapes.items()}
    load, movers = [0] * world, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        movers[name] = load.index(min(load))
        load[movers[name]] += costs[name]
    return movers


def _orthogonal(update: Tensor) -> Tensor:
    """An orthogonal matrix near `update`, which is overwritten where it is in bfloat16: the iterations run in that."""
    a, b, c = _COEFFICIENTS
    tall = update.shape[0] > update.shape[1]
    x = update.bfloat16().T if tall else update.bfloat16()
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Optimizer:
    """Moves named parameters by their gradients. Its state is tensors by name, to be saved and taken up exactly."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        method: Method,
        *,
        weight_decay: float,  # of matrices only
        betas: tuple[float, float],  # AdamW's
        epsilon: float,
        ranks: Ranks = ALONE,
    ) -> None:
        self._named = dict(named)
        self._by_muon = {n for n, p in named.items() if method == "muon" and p.ndim == 2 and n != HEAD}
        self._ranks = ranks
        self._movers = _shared_out({n: named[n].shape for n in sorted(self._by_muon)}, ranks.world)
        self._weight_decay = weight_decay
        self._betas = betas
        self._epsilon = epsilon
        # On CUDA one kernel moves all of AdamW's and counts its steps on the device, else the CPU counts them.
        self._fused = all(p.device.type == "cuda" for p in named.values())
        self._held: dict[str, dict[str, Tensor]] = {}  # moments of the parameters that were moved, by name

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every parameter that has a gradient; by Muon, none whose gradient is zero. Waits for no device.

        Of several ranks: but those that other ranks move, which `exchange` brings. They lose their gradient here.
        """
        others = {n: p for n, p in self._named.items() if n not in self._by_muon and p.grad is not None}
        self._move_by_adamw({n: p for n, p in others.items() if p.ndim == 2}, learning_rate, self._weight_decay)
        self._move_by_adamw({n: p for n, p in others.items() if p.ndim != 2}, learning_rate, 0.0)
        for name in self._by_muon:
            self._move_by_muon(name, learning_rate)

    def _move_by_adamw(self, moved: dict[str, nn.Parameter], learning_rate: float, weight_decay: float) -> None:
        for name, parameter in moved.items():
            if name not in self._held:
                count = torch.zeros((), device=parameter.device if self._fused else "cpu")
                averages = torch.zeros_like(parameter), torch.zeros_like(parameter)
                self._held[name] = dict(zip(_ADAMW, (*averages, count), strict=True))
        first, second, counts = ([self._held[name][moment] for name in moved] for moment in _ADAMW)
        adamw(
            list(moved.values()),
            [p.grad for p in moved.values() if p.grad is not None],
            first,
            second,
            [],
            counts,
            fused=True if self._fused else None,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._epsilon,
            maximize=False,
        )

    def _move_by_muon(self, name: str, learning_rate: float) -> None:
        parameter = self._named[name]
        if parameter.grad is None:
            return
        if name not in self._held:
            self._held[name] = {_MUON[0]: torch.zeros_like(parameter.grad)}
        momentum = self._held[name][_MUON[0]]
        # Muon makes a whole step of any momentum, however old: an expert that no row chose would walk away.
        momentum.mul_(parameter.grad.any()).lerp_(parameter.grad, 1 - _MUON_MOMENTUM)
        if self._movers[name] != self._ranks.rank:
            parameter.grad = None
            return
        update = _orthogonal(parameter.grad.lerp(momentum, _MUON_MOMENTUM))
        parameter.mul_(1 - learning_rate * self._weight_decay)
        parameter.add_(update, alpha=-learning_rate * (0.2 * math.sqrt(max(parameter.shape))))  # as large as AdamW's

    def exchange(self) -> None:
        """After `step`: give every rank the matrices that another one moved."""
        for rank in range(self._ranks.world):
            self._ranks.give([self._named[n].detach() for n, mover in self._movers.items() if mover == rank], rank)

    def _moments(self, name: str) -> tuple[str, ...]:
        """The names of a parameter's moments."""
        return _MUON if name in self._by_muon else _ADAMW

    def moments(self) -> dict[str, Tensor]:
        """The moments of all parameters that were moved, as `moment.parameter`, where they are."""
        return {f"{m}.{n}": self._held[n][m] for n in self._named if n in self._held for m in self._moments(n)}

    def state(self) -> dict[str, Tensor]:
        """Copies of all moments on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.moments().items()}

    def expected(self, stored: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Names and shapes of what `load` takes of a stored state. Moments of another method are left out of it.

        A parameter that was never moved, or by another method, has none: it begins from scratch.
        """
        found: dict[str, torch.Size] = {}
        for name, parameter in self._named.items():
            moments = self._moments(name)
            if any(f"{m}.{name}" in stored for m in moments):
                found |= {f"{m}.{name}": torch.Size() if m == "step" else parameter.shape for m in moments}
        return found

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; `stored` holds what `expected` names, in the parameters' types."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._named.items():
            moments = self._moments(name)
            if any(f"{m}.{name}" in stored for m in moments):
                where = {m: parameter.device if m != "step" or self._fused else "cpu" for m in moments}
                held[name] = {m: stored[f"{m}.{name}"].to(where[m]) for m in moments}
        self._held = held
