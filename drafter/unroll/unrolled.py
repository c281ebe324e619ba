"""What an unroll gives: each step's rows, and the drafter's state at each of them.

Legend: T tokens, K steps, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from drafter.unroll.plan import Plan


class HeadWeights(Protocol):
    """What loss and replay apply to `pre`, of any kind of drafter."""

    @property
    def norm(self) -> Tensor:
        """[H]."""

    @property
    def lm_head(self) -> Tensor:
        """[D, H]."""


@dataclass(frozen=True, eq=False)
class Unrolled:
    """Result of an unroll. Entry i of step j is row `rows[j][i]`, whose draft is compared with x[row+2+j]."""

    plan: Plan
    rows: tuple[Tensor, ...]  # per step: int64[rows_j] in [0, T)
    pre: tuple[Tensor, ...]  # per step: [rows_j, H], before the final norm
    weights: HeadWeights  # in the dtype that `pre` was computed in

    @property
    def steps(self) -> int:
        """K."""
        return len(self.pre)
