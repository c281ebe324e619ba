"""Rows of the requests that are collected: copied out of each step, labelled and scored for several steps at once.

An engine may write over what it hands over as soon as its next step begins, so each step's rows are copied, by one
small operation for each tensor. All else is done for the rows of several steps together: some twenty operations, which
launch as fast for many rows as for few, and the product with the head, which reads the whole head each time.

Legend: N rows, S segments (the rows of one request in one step), A aux layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_hooks import wire
from rl_hooks.engines.tap.collected import REJECTED, RequestSampling
from rl_hooks.sending.copies import to_device
from rl_hooks.sending.features import score_rows

#: Rows of a request in a step that may predict generated tokens: the last token, and as many drafts as engines make.
_VERIFIED: Final = 65
#: top_p and top_k where nothing is cut off.
_WHOLE: Final = (1.0, 0)
#: Behind the tokens that hold, in what a step tells of its drafts.
_NOTHING: Final = -1

Ints = npt.NDArray[np.int64]
#: (what steps tell of their drafts [S, width], drafts [S]) -> (rejected drafts [S], the token behind the last row that
#: holds [S]), int64.
Outcomes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the target, and what it says of some requests: those that are collected, at least.

    Tensors on its device; `first_rows`, `row_counts` and `drafted` on the host, one per request.
    """

    request_ids: Sequence[str]
    first_rows: Ints
    row_counts: Ints
    input_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    aux: Sequence[Tensor]  # A tensors [rows, H], entering the aux layers
    last: Tensor  # [rows, H], after the final norm
    drafted: Ints
    #: [requests, width]: which drafts hold, as the engine tells it and `outcomes` reads it. Nobody writes to it again.
    told: Tensor
    outcomes: Outcomes
    #: Where the head is split over ranks: returns (logsumexp, log p of the label by `labelled_rows`) [2, rows] on the
    #: host, NaN where they are unknown. It waits for other ranks, so only the tap's thread calls it.
    scores: Callable[[], Tensor] | None = None

    def scored(self, rows: Ints, wait: Callable[[], Tensor]) -> Step:
        """The step with scores of these rows. `wait` returns them, float32 [2, len(rows)], and may wait for ranks."""
        return replace(self, scores=functools.partial(_placed, rows, wait, len(self.last)))


def _placed(rows: Ints, wait: Callable[[], Tensor], count: int) -> Tensor:
    placed = torch.full((2, count), torch.nan)
    placed[:, torch.from_numpy(rows)] = wait()
    return placed


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of some requests in one step, copied; the segments follow one another."""

    counts: Ints  # [S]
    drafted: Ints  # [S]
    told: Tensor  # [S, width]
    outcomes: Outcomes
    input_ids: Tensor  # [N]
    positions: Tensor  # [N]
    aux: tuple[Tensor, ...]  # A tensors [N, H]
    last: Tensor  # [N, H]
    rows: Ints  # [N], of the step
    scores: Callable[[], Tensor] | None


def gather(step: Step, chosen: Sequence[int]) -> Gathered:
    """Start to copy the rows of the requests at these places, on the device."""
    places, device = np.asarray(chosen), step.last.device
    rows = rows_of(step, places)
    rows_N = to_device(device, rows)
    whole = len(places) == len(step.request_ids)
    return Gathered(
        counts=step.row_counts[places],
        drafted=step.drafted[places],
        told=step.told if whole else step.told.index_select(0, to_device(device, places)),
        outcomes=step.outcomes,
        input_ids=step.input_ids.index_select(0, rows_N),
        positions=step.positions.index_select(0, rows_N),
        aux=tuple(state.index_select(0, rows_N) for state in step.aux),
        last=step.last.index_select(0, rows_N),
        rows=rows,
        scores=step.scores,
    )


def rows_of(step: Step, places: Ints) -> Ints:
    """[N]: the rows of the requests at these places."""
    counts = step.row_counts[places]
    ends = np.cumsum(counts)
    rows: Ints = np.arange(ends[-1]) + np.repeat(step.first_rows[places] - ends + counts, counts)
    return rows


def labelled_rows(step: Step, places: Ints) -> tuple[Tensor, Tensor]:
    """(rows [N], labels [N]) of the requests at these places. A label is the row's next token, -1 at a rejected row."""
    on_device, rows_N = (to_device(step.last.device, indices) for indices in (places, rows_of(step, places)))
    told, input_ids = step.told.index_select(0, on_device), step.input_ids.index_select(0, rows_N)
    return rows_N, _labels(input_ids, step.row_counts[places], told, step.drafted[places], step.outcomes)


def labels_of(parts: Sequence[Gathered]) -> Tensor:
    """The labels [N] of these steps' rows, one step after the other."""
    widths = [part.told.shape[1] for part in parts]
    told = [part.told for part in parts]
    if len({*widths}) > 1:  # a step without drafts may be narrower
        told = [pad(one, (0, max(widths) - width), value=_NOTHING) for one, width in zip(told, widths, strict=True)]
    counts, drafted = (np.concatenate([getattr(part, name) for part in parts]) for name in ("counts", "drafted"))
    return _labels(joined([part.input_ids for part in parts]), counts, joined(told), drafted, parts[0].outcomes)


def _labels(input_ids_N: Tensor, counts: Ints, told: Tensor, drafted: Ints, outcomes: Outcomes) -> Tensor:
    device = input_ids_N.device
    owner = np.repeat(np.arange(len(counts)), counts)
    owner_N, from_end_N = to_device(device, np.stack([owner, _from_end(counts)]))
    rejected, last_sampled = outcomes(told, to_device(device, drafted))
    behind_N = from_end_N - rejected[owner_N]  # 0: the last accepted row; below: rejected
    # The last row of a segment is the last accepted one, or rejected: what follows it is never its label.
    labels_N = torch.where(behind_N == 0, last_sampled[owner_N], input_ids_N.roll(-1).long())
    return labels_N.masked_fill_(behind_N < 0, REJECTED)


def as_told(told: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """`Outcomes` of what holds both: rejected drafts and last token, [S, 2]."""
    rejected, last_sampled = told.long().unbind(1)
    return rejected, last_sampled


def of_counted(told: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """`Outcomes` of how many tokens hold, and the tokens: [S, 1 + width]."""
    held = told[:, :1].long()
    return drafted + 1 - held[:, 0], told.gather(1, held)[:, 0].long()


def of_tokens(told: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """`Outcomes` of the tokens that hold, [S, width], -1 behind them."""
    accepted = (told != _NOTHING).sum(dim=1)
    # Without drafts (a prefill) nothing was rejected, whatever stands in the sampled tokens.
    rejected = (drafted + 1 - accepted) * (drafted > 0)
    # -1 comes with a part of a prompt, whose last row is not rejected.
    last = told.gather(1, (accepted - 1).clamp_(min=0)[:, None])[:, 0].long().clamp_(min=0)
    return rejected, last


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _from_end(counts: Ints) -> Ints:
    """[N]: how many rows of the same segment come after each."""
    ends = np.cumsum(counts)
    return np.repeat(ends, counts) - 1 - np.arange(ends[-1])


@dataclass(frozen=True, slots=True)
class Head:
    """The policy's head: logits = map(last @ weight^T)."""

    weight: Tensor  # [V, H]
    logit_map: wire.LogitMap = field(default_factory=wire.LogitMap)

    def score(
        self, last_NH: Tensor, labels_N: Tensor, temperature_N: float | Tensor, top_p: float = 1.0, top_k: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(logsumexp [N], log p of the labels [N]) as `score_rows` computes them, float32. A label of -1: any."""
        return score_rows(
            last_NH,
            self.weight,
            labels_N.clamp(min=0),
            temperature=temperature_N,
            top_p=top_p,
            top_k=top_k,
            logit_map=self.logit_map,
        )

    def score_step(
        self, last_NH: Tensor, labels_N: Tensor, samplings: Sequence[RequestSampling], counts: npt.NDArray[np.int64]
    ) -> Tensor:
        """`score` of a step's rows, [2, N]: `counts` rows of each request, one after another, and how each is drawn.

        With top_p or top_k, log p is computed only for rows that may predict a generated token: for the thousands of
        rows of a prompt it would cost the engine time. So log p is NaN in all but the last rows of such a request. A
        request that was preempted computes all its tokens again at once; `assemble` takes the earlier scores.
        """
        first = samplings[0]
        if first.scored_at == 1.0 and (first.top_p, first.top_k) == _WHOLE and samplings.count(first) == len(samplings):
            return torch.stack(self.score(last_NH, labels_N, 1.0))  # most steps of most RL runs
        device = last_NH.device
        temperature_N = to_device(device, np.repeat(np.array([one.scored_at for one in samplings], np.float32), counts))
        kinds = sorted({_WHOLE, *((one.top_p, one.top_k) for one in samplings)})
        kind_N = np.repeat([kinds.index((one.top_p, one.top_k)) for one in samplings], counts)
        early_N = _from_end(counts) >= _VERIFIED
        early_N &= kind_N != kinds.index(_WHOLE)
        kind_N[early_N] = kinds.index(_WHOLE)
        scores = torch.empty(2, len(kind_N), device=device)
        for number, (top_p, top_k) in enumerate(kinds):
            found = np.flatnonzero(kind_N == number)
            rows = to_device(device, found) if len(found) < len(kind_N) else slice(None)
            if len(found):
                scored = self.score(last_NH[rows], labels_N[rows], temperature_N[rows], top_p, top_k)
                scores[:, rows] = torch.stack(scored)
        scores[1, to_device(device, np.flatnonzero(early_N))] = torch.nan
        return scores
