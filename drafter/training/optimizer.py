"""What moves a drafter's parameters: Muon for its matrices and AdamW for the rest, or AdamW for everything.

Muon (muon.py) replaces a matrix's momentum by the nearest orthogonal one, so that all its directions move alike. Its
steps are scaled to the size of AdamW's, so one learning rate serves both. An lm_head is a table of tokens and no map
between states: AdamW moves it, and all that is not a matrix.

Where several ranks train, each moves a part of Muon's matrices, and they exchange the moved ones. Each rank keeps the
momentum of all matrices, which costs little. So moments and weights are the same on every rank, to the bit those that
one rank would compute from the same gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from drafter.training.muon import MOMENTUM, Muon
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
        fused = all(p.device.type == "cuda" for p in named.values())
        self._counts_on_device = fused  # AdamW's own kernel there counts its steps on the device, else the CPU does
        others = {n: p for n, p in named.items() if n not in self._by_muon}
        adamw = [
            {"params": [p for p in others.values() if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in others.values() if p.ndim != 2], "weight_decay": 0.0},
        ]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(adamw, lr=0.0, betas=betas, eps=epsilon, fused=True if fused else None)
        ]
        if self._by_muon:
            matrices = [self._named[n] for n in sorted(self._by_muon)]
            self._optimizers.append(Muon(matrices, weight_decay=weight_decay))

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> None:
        """Move every parameter that has a gradient; Muon moves none whose gradient is zero. Waits for no device.

        A matrix that another rank moves only loses its gradient here; `exchange` brings it.
        """
        for name in self._by_muon:
            parameter, state = self._named[name], self._state(name)[0]
            if parameter.grad is None:
                continue
            momentum = state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                # Muon makes a whole step of any momentum, however old: an expert that no row chose would walk away.
                momentum.mul_(parameter.grad.any())
            if self._movers[name] != self._ranks.rank:
                momentum = torch.zeros_like(parameter.grad) if momentum is None else momentum
                state[parameter] = {"momentum_buffer": momentum.lerp_(parameter.grad, 1 - MOMENTUM)}
                parameter.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def exchange(self) -> None:
        """After `step`: give every rank the matrices that another one moved."""
        for rank in range(self._ranks.world):
            self._ranks.give([self._named[n].detach() for n, mover in self._movers.items() if mover == rank], rank)

    def _state(self, name: str) -> tuple[dict[Any, Any], tuple[str, ...]]:
        """Where a parameter's moments are kept, and their names."""
        muon = name in self._by_muon
        return self._optimizers[1 if muon else 0].state, _MUON if muon else _ADAMW

    def moments(self) -> dict[str, Tensor]:
        """The moments of all parameters that were moved, as `moment.parameter`, where they are."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            state, moments = self._state(name)
            held = state.get(parameter, {})
            found |= {f"{m}.{name}": held[m] for m in moments if m in held}
        return found

    def state(self) -> dict[str, Tensor]:
        """Copies of all moments on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.moments().items()}

    def expected(self, stored: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Names and shapes of what `load` takes of a stored state. Moments of another method are left out of it.

        A parameter that was never moved, or by another method, has none: it begins from scratch.
        """
        found: dict[str, torch.Size] = {}
        for name, parameter in self._named.items():
            moments = self._state(name)[1]
            if any(f"{m}.{name}" in stored for m in moments):
                found |= {f"{m}.{name}": torch.Size() if m == "step" else parameter.shape for m in moments}
        return found

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; `stored` holds what `expected` names, in the parameters' types."""
        made = []
        for name, parameter in self._named.items():
            state, moments = self._state(name)
            if any(f"{m}.{name}" in stored for m in moments):
                where = {m: parameter.device if m != "step" or self._counts_on_device else "cpu" for m in moments}
                made.append((state, parameter, {m: stored[f"{m}.{name}"].to(where[m]) for m in moments}))
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for state, parameter, moments_of_it in made:
            state[parameter] = moments_of_it
