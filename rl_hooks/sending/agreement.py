"""Whether what is registered gives the policy's own logits; the service computes every probability from it.

A head that does something of its own (a subclass of Linear, an adapter), or a model that changes its logits in a way
that is not known here, would give the drafter a wrong target. So logit_map(last @ head^T) is compared with logits that
the policy's forward made, in some rows and columns of the first captured forward that has both, if one of the first 16
has. Where that is of fewer than 8 rows, the tokens that follow are left for a later one: a median over so few can be
far off. One figure travels to the host; the sender's thread reads it before the file of that forward goes.

What rounding can do is never refused: each product rounded to 3 bits (float8 e4m3, the coarsest that a head is
multiplied in), the logit to bfloat16. Medians are compared, without what a model masks. What is added to all logits of
a row changes no probability. The logits may be divided by the temperature already.

Legend: n rows, V vocabulary, H hidden size, c columns: some of the vocabulary, and last the token that follows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import WrongTargetError
from rl_hooks.sending.copies import HostCopies

_COLUMNS: Final = 1024
#: Forwards that are looked at: where none of them shows both, as with a fused loss, no later one is expected to.
_FORWARDS: Final = 16
#: Rows from which the tokens that follow are judged.
_ROWS: Final = 8
#: Rounding, relative: of each product of a logit, and of the logit.
_OF_A_PRODUCT: Final = 2.0**-4
_OF_A_LOGIT: Final = 2.0**-7
#: Logits of tokens that a model forbids are at most this.
_MASKED: Final = -1e4


class _Own(NamedTuple):
    logits_nc: Tensor
    vocab_size: int
    mapped: bool


class Agreement:
    """Compares once. `named`: the head, for the message."""

    def __init__(self, logit_map: wire.LogitMap, named: str) -> None:
        self._logit_map, self._named = logit_map, named
        self._own: _Own | None = None
        self._product: tuple[Tensor, Tensor, int] | None = None  # [n, c], of the squares, V
        self._found: HostCopies | None = None
        self._worst = torch.zeros(())  # how many times as far apart as allowed, at most, in the forwards so far
        self._done = False
        self._compared = 0

    @property
    def wanted(self) -> bool:
        """Whether some part was not compared yet, and may be."""
        return not self._done and self._compared < _FORWARDS

    @torch.no_grad()
    def see_logits(self, own_nV: Tensor, next_ids_n: Tensor, *, mapped: bool) -> None:
        """Logits of the policy's forward: lm_head's output, or (`mapped`) what the model returned. The last counts."""
        V = own_nV.shape[1]
        chosen = own_nV.gather(1, next_ids_n.clamp(0, V - 1)[:, None])
        self._own = _Own(torch.cat([own_nV[:, :: _step(V)], chosen], 1).float(), V, mapped)

    @torch.no_grad()
    def see_head(self, last_nH: Tensor, head_VH: Tensor, next_ids_n: Tensor) -> None:
        """The captured states of the same rows, and the whole head."""
        V, last = len(head_VH), last_nH.float()
        chosen_nH = head_VH.index_select(0, next_ids_n.clamp(0, V - 1)).float()
        some_cH = head_VH[:: _step(V)].float()
        with torch.autocast(last.device.type, enabled=False):
            product = torch.cat([last @ some_cH.T, (last * chosen_nH).sum(1, keepdim=True)], 1)
            squares = torch.cat([last**2 @ (some_cH**2).T, ((last * chosen_nH) ** 2).sum(1, keepdim=True)], 1)
        self._product = product, squares, V

    @torch.no_grad()
    def compare(self, temperature: float) -> None:
        """Compare what was seen of one forward, if it was both sides. The host does not wait for the device."""
        own, product = self._own, self._product
        self.clear()
        self._compared += 1
        if own is None or product is None or own.vocab_size != product[2]:
            return
        self._done = len(product[0]) >= _ROWS
        ours, rounding = product[0], _OF_A_PRODUCT * product[1].sqrt()
        seen = (own.logits_nc > _MASKED) & (rounding > 0)  # rows that only pad the vocabulary may be zeros
        if own.mapped:
            ours, rounding = self._logit_map.apply(ours), rounding * self._logit_map.scale
        own_nc = torch.where(seen, own.logits_nc, torch.nan)
        allowed = rounding + _OF_A_LOGIT * (own_nc.abs() + ours.abs())
        times = [_times(own_nc * factor - ours, allowed) for factor in (1.0, temperature or 1.0)]
        self._worst = torch.maximum(self._worst.to(ours.device), torch.stack(times).min())
        self._found = HostCopies({"times": self._worst})

    def clear(self) -> None:
        """Hold nothing of a forward any longer."""
        self._own = self._product = None

    def judge(self) -> None:
        """Raise `WrongTargetError` where the two are not the same; waits for the figure. In the sender's thread."""
        times = 0.0 if self._found is None else float(self._found.wait()["times"])
        if times > 1.0:
            raise WrongTargetError(
                f"{self._named} gives other logits than logit_map(last state @ lm_head.weight^T) with "
                f"{self._logit_map}: they are {times:.1f} times as far apart as rounding can bring them, so the "
                "drafter would learn another policy. A model that scales or soft-caps its logits is served with "
                "logit_map=LogitMap(scale=..., softcap=...) (rl_hooks.wire), under another run name (run=), since this "
                "one is registered without it; a head that computes anything else is not"
            )


def _step(vocab_size: int) -> int:
    return -(-vocab_size // _COLUMNS)


def _times(off_nc: Tensor, allowed_nc: Tensor) -> Tensor:
    """How many times larger than allowed: of the vocabulary, or of the tokens that follow. NaN is left out."""
    off_nc = (off_nc - off_nc.nanquantile(0.5, 1, keepdim=True)).abs()  # a median of torch may be refused on a GPU
    parts = (slice(None, -1), slice(-1, None))[: 1 if len(off_nc) < _ROWS else 2]
    times = [off_nc[:, part].nanquantile(0.5) / allowed_nc[:, part].nanquantile(0.5) for part in parts]
    return torch.stack(times).nan_to_num(0.0).max()
