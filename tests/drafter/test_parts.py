"""What of each rollout the benchmark of parts sends: slices of it, as many rows, and every token in some rollout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.drafter.drafter_worlds import mask_of, world

from benchmarks.parts import Part, part_of
from drafter.batch import RolloutBatch, prompt_hashes

PROMPT, RESPONSE = 4, 12
LENGTH = PROMPT + RESPONSE
PARTS: tuple[Part, ...] = ("fronts", "windows", "fewer")


@pytest.fixture(scope="module", params=["all", "predicting"])
def whole(request: pytest.FixtureRequest) -> RolloutBatch:
    batch = world((mask_of(LENGTH, PROMPT),) * 30).batch
    rows = batch.loss_mask.nonzero().flatten() - 1
    return batch if request.param == "all" else replace(batch, last_hidden=batch.last_hidden[rows])


def places(part: RolloutBatch, whole: RolloutBatch) -> list[tuple[int, int, int]]:
    """Of each rollout: the one it is of, its first row there, and the first that is learnt from."""
    found = []
    for at, (begin, end) in enumerate(pairwise(part.cu_seqlens.tolist())):
        rollout = whole.rollout_ids.index(part.rollout_ids[at])
        rows = whole.aux_hidden[rollout * LENGTH : (rollout + 1) * LENGTH]
        first = int((rows == part.aux_hidden[begin]).all(dim=1).nonzero()[0])
        assert torch.equal(part.aux_hidden[begin:end], rows[first : first + end - begin])
        found.append((rollout, first, first + int(part.loss_mask[begin:end].to(torch.int64).argmax())))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_rows_of_its_rollouts_and_states_stay_with_their_tokens(part: Part, whole: RolloutBatch) -> None:
    sent = part_of(whole, part)
    for at, (rollout, first, _) in enumerate(places(sent, whole)):
        one, origin = sent.select([at]), whole.select([rollout])
        rows = slice(first, first + one.tokens)
        assert torch.equal(one.input_ids, origin.input_ids[rows])
        assert torch.equal(one.logprobs, origin.logprobs[rows])
        predicting = one.loss_mask.nonzero().flatten() - 1
        assert torch.equal(one.last_rows(predicting), origin.last_rows(predicting + first))
        assert one.prompt_hashes == prompt_hashes(origin)


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_as_many_rows(part: Part, whole: RolloutBatch) -> None:
    third = RESPONSE // 3
    assert abs(part_of(whole, part).tokens - whole.rollouts * (PROMPT + third)) < LENGTH
    if part != "fewer":
        assert part_of(whole, part).response_tokens == whole.rollouts * third


def test_fronts_begin_with_the_prompt_and_windows_anywhere(whole: RolloutBatch) -> None:
    assert {(first, begin) for _, first, begin in places(part_of(whole, "fronts"), whole)} == {(0, PROMPT)}
    windows = places(part_of(whole, "windows"), whole)
    assert all(begin == first + PROMPT for _, first, begin in windows)
    assert {first for _, first, _ in windows} == set(range(RESPONSE - RESPONSE // 3 + 1))
    covered = {begin + step for _, _, begin in windows for step in range(RESPONSE // 3)}
    assert covered == set(range(PROMPT, LENGTH)), "every token of a response is learnt from in some rollout"
