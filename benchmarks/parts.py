"""What of its rollouts a trainer could send where all is too much: fronts, windows, or all of fewer rollouts.

Each has about as many rows. A front is a prompt and the first third of its response. A window is a third of the
response that begins anywhere in it, over all rollouts evenly, and as many rows before it as the prompt has: those are
read and not learnt from. The hook sends all of fewer rollouts (`sample_fraction`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Final, Literal

import torch

from drafter.batch import RolloutBatch, prompt_hashes

#: "": all of all rollouts.
Part = Literal["", "fronts", "windows", "fewer"]
_SHARE: Final = 1 / 3


def part_of(batch: RolloutBatch, part: Part) -> RolloutBatch:
    """That part of a batch of rollouts with one response each. What is learnt from is a part of what was."""
    if not part:
        return batch
    spans = _spans(batch, part)
    kept = [at for at, (first, _, last) in enumerate(spans) if last > first]
    index = torch.cat([torch.arange(first, last) for first, _, last in spans])
    learnt = torch.cat([torch.arange(first, last) >= begin for first, begin, last in spans])
    lengths = torch.tensor([0] + [spans[at][2] - spans[at][0] for at in kept])
    last_rows = index if batch.every_last_row else batch.last_places(index[learnt] - 1)
    hashes = prompt_hashes(batch)
    return replace(
        batch,
        cu_seqlens=lengths.cumsum(0),
        loss_mask=learnt,
        input_ids=batch.input_ids[index],
        aux_hidden=batch.spread().aux_hidden[index],
        aux_rows=None,
        last_hidden=batch.last_hidden[last_rows],
        logprobs=batch.logprobs[index],
        logsumexp=batch.logsumexp[index],
        rollout_ids=tuple(batch.rollout_ids[at] for at in kept) if batch.rollout_ids else (),
        prompt_hashes=tuple(hashes[at] for at in kept),
        strata=tuple(batch.strata[at] for at in kept) if batch.strata else (),
        rewards=None if batch.rewards is None else tuple(batch.rewards[at] for at in kept),
    )


def _spans(batch: RolloutBatch, part: Part) -> list[tuple[int, int, int]]:
    """Of each rollout: the first row that is sent, the first that is learnt from, and one behind the last."""
    found: list[tuple[int, int, int]] = []
    owed = 0.0  # rows that whole rollouts may still have
    for at, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        begin = start + int(batch.loss_mask[start:end].to(torch.int64).argmax())
        prompt, response = begin - start, end - begin
        length = math.ceil(_SHARE * response)
        owed += prompt + length
        if part == "fronts":
            found.append((start, begin, begin + length))
        elif part == "windows":
            # The golden ratio spreads beginnings evenly over any number of rollouts, siblings too.
            skipped = round(math.modf((at + 0.5) * 0.6180339887)[0] * (response - length))
            found.append((start + skipped, begin + skipped, begin + skipped + length))
        elif owed >= prompt + response:
            found.append((start, begin, end))
            owed -= prompt + response
        else:
            found.append((start, start, start))
    return found
