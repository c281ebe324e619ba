"""The feed-forward half of a DeepSeek-V3 layer: dense SwiGLU, or routed experts beside shared ones.

    scores  = sigmoid(gate(x))                                  float32
    choice  = scores + e_score_correction_bias                  only to choose; the bias is not trained
    groups  = the topk_group groups with the largest sum of their two best choices
    experts = the num_experts_per_tok best choices in those groups
    weight  = scores, normalised over the chosen (norm_topk_prob), times routed_scaling_factor
    out     = sum weight * expert(x) + shared_experts(x)

No token is dropped. Parameter names are the published ones, one module per expert. Rows are sorted by expert, so that
each expert multiplies one block. A CPU walks over the experts that were chosen; a GPU, which must not be asked which
those are, multiplies all blocks in one call, with the weights stacked.

Legend: n rows, H hidden, I intermediate, E experts, k chosen, m = n*k pairs of a row and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from rl_hooks.format.mtp import ExpertSizes

__all__ = ["Cast", "ExpertSizes", "Experts", "SwiGLU", "grouped", "groups", "one_by_one"]


class Cast:
    """Weights in the dtype to compute in, each cast at its first use and kept: one copy serves every step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[tuple[int, ...], Tensor] = {}  # by identity: parameters outlive the unroll of this

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight in this dtype; gradients flow."""
        return self._once([weight], lambda: weight.to(self._dtype))

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """Weights of one shape as one tensor [number, ...] in this dtype; gradients flow."""
        return self._once(weights, lambda: torch.stack([w.to(self._dtype) for w in weights]))

    def _once(self, weights: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        key = tuple(map(id, weights))
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cast: Cast) -> Tensor:
        """[n, H] from x [n, H]."""
        gate, up, down = (cast(p.weight) for p in (self.gate_proj, self.up_proj, self.down_proj))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Router(nn.Module):
    """Chooses experts. `e_score_correction_bias` is the base model's load balancing; here it stays as it came."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.zeros(sizes.routed, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.routed))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [n, k] in at least float32 and expert numbers int64[n, k] of x [n, H]."""
        s = self.sizes
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(x.to(wide), self.weight.to(wide)).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias.to(wide)
        grouped = choice.view(-1, s.groups, s.routed // s.groups)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(s.chosen_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
        experts = choice.topk(s.chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if s.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * s.scaling, experts


class Experts(nn.Module):
    """Routed experts and, unless there are none, shared ones."""

    def __init__(self, hidden_size: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.gate = Router(hidden_size, sizes)
        self.experts = nn.ModuleList(SwiGLU(hidden_size, sizes.intermediate_size) for _ in range(sizes.routed))
        self.shared_experts: SwiGLU | None = None
        if sizes.shared:
            self.shared_experts = SwiGLU(hidden_size, sizes.shared * sizes.intermediate_size)

    def forward(self, x: Tensor, cast: Cast) -> Tensor:
        """[n, H] from x [n, H]."""
        weights, chosen = self.gate(x)
        n, k = chosen.shape
        order = chosen.flatten().argsort(stable=True)  # int64[m]: pairs in the order of their experts
        counts = torch.zeros(len(self.experts), dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))  # bincount would wait for the device
        pairs = x.index_select(0, order // k)  # [m, H]
        multiply = grouped if groups(x, self.gate.sizes.intermediate_size) else one_by_one
        blocks = multiply(self.experts, pairs, counts, cast)
        parts = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=x.device))
        parts = blocks.index_select(0, parts).view(n, k, -1)
        out: Tensor = (parts * weights[..., None].to(x.dtype)).sum(1)
        return out if self.shared_experts is None else out + self.shared_experts(x, cast)


def groups(x: Tensor, intermediate_size: int) -> bool:
    """Whether experts of this width are multiplied in one call: what its kernel takes, off the CPU."""
    aligned = x.shape[-1] % 8 == 0 and intermediate_size % 8 == 0  # rows of whole 16 bytes
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and aligned


def one_by_one(experts: nn.ModuleList, pairs: Tensor, counts: Tensor, cast: Cast) -> Tensor:
    """[m, H] of pairs [m, H] sorted by expert, int64[E] of them each. An expert that nobody chose is not touched."""
    if not pairs.shape[0]:
        return pairs
    parts = torch.split(pairs, counts.tolist())
    return torch.cat([expert(part, cast) for expert, part in zip(experts, parts, strict=True) if part.shape[0]])


def grouped(experts: nn.ModuleList, pairs: Tensor, counts: Tensor, cast: Cast) -> Tensor:
    """As `one_by_one`, without asking the device for the counts."""
    ends = counts.cumsum(0).to(torch.int32)

    def times(x: Tensor, name: str) -> Tensor:
        stacked = cast.stack([getattr(expert, name).weight for expert in experts])  # [E, outputs, inputs]
        return F.grouped_mm(x, stacked.transpose(1, 2), offs=ends)

    return times(F.silu(times(pairs, "gate_proj")) * times(pairs, "up_proj"), "down_proj")
