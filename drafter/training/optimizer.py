"""What moves a drafter's parameters: Muon for its matrices and AdamW for the rest, or AdamW for everything.

Muon (muon.py) replaces a matrix's momentum by the nearest orthogonal one, so that all its directions move alike. Its
steps are scaled to the size of AdamW's, so one learning rate serves both. An lm_head is a table of tokens and no map
between states: AdamW moves it, and all that is not a matrix.

Where several ranks train, each moves a part of Muon's matrices, and they exchange the moved ones. Each rank keeps the
momentum of all matrices, which costs little. So moments and weights are the same on every rank, to the bit those that
one rank would compute from the same gradients.

No class of `torch.optim` is used: the first to be made imports torch's compiler, of which a worker on a CPU has no use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from drafter.training import muon
from drafter.training.ranks import ALONE, Ranks

#: What moves matrices.
Method = Literal["muon", "adamw"]

#: A drafter's own head among its parameters.
HEAD: Final = "lm_head.weight"

_ADAMW: Final = ("exp_avg", "exp_avg_sq", "step")
_MUON: Final = ("momentum_buffer",)


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


class Optimizer:
    """Moves named parameters by their gradients. Its state is tensors by name, saved and loaded exactly."""

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
        self._weight_decay, self._betas, self._epsilon = weight_decay, betas, epsilon
        # AdamW's own kernel on CUDA counts its steps on the device, else the CPU does.
        self._fused = all(p.device.type == "cuda" for p in named.values())
        self._held: dict[str, dict[str, Tensor]] = {}  # moments by name, of the parameters that were moved

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every parameter that has a gradient; Muon moves none whose gradient is zero. Waits for no device.

        A matrix that another rank moves only loses its gradient here; `exchange` brings it.
        """
        others = {n: p for n, p in self._named.items() if n not in self._by_muon}
        self._move_by_adamw({n: p for n, p in others.items() if p.ndim == 2}, learning_rate, self._weight_decay)
        self._move_by_adamw({n: p for n, p in others.items() if p.ndim != 2}, learning_rate, 0.0)
        for name in self._by_muon:
            self._move_by_muon(name, learning_rate)

    def _move_by_adamw(self, named: Mapping[str, nn.Parameter], learning_rate: float, weight_decay: float) -> None:
        moved: dict[str, tuple[Tensor, Tensor]] = {n: (p, p.grad) for n, p in named.items() if p.grad is not None}
        for name, (parameter, _) in moved.items():
            if name not in self._held:
                count = torch.zeros((), device=parameter.device if self._fused else "cpu")
                moments = torch.zeros_like(parameter), torch.zeros_like(parameter), count
                self._held[name] = dict(zip(_ADAMW, moments, strict=True))
        first, second, counts = ([self._held[name][moment] for name in moved] for moment in _ADAMW)
        adamw(
            [parameter for parameter, _ in moved.values()],
            [gradient for _, gradient in moved.values()],
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
        momentum.mul_(parameter.grad.any())
        if self._movers[name] == self._ranks.rank:
            muon.move(parameter, parameter.grad, momentum, learning_rate, self._weight_decay)
        else:
            momentum.lerp_(parameter.grad, 1 - muon.MOMENTUM)
            parameter.grad = None

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
