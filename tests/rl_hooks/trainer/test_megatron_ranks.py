"""What tensor-parallel ranks tell each other and join (`rl_hooks.trainer.megatron`), without Megatron-Core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked import ROOT, run_fork

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.trainer.megatron.part import check_packing
from rl_hooks.trainer.megatron.ranks import part_scores
from rl_hooks.trainer.packing import lay_out


def run(*cases: str) -> tuple[int, str]:
    """Exit status and the end of the standard error of `tensor_ranks.py`, which checks these cases on each rank."""
    script = str(Path(__file__).with_name("tensor_ranks.py"))
    done = run_fork("trainer", script, *cases, directory=ROOT, environment=os.environ, seconds=200)
    return done.returncode, done.stderr[-3000:] if done.returncode else ""


def test_scores_from_parts_are_those_of_the_whole_and_one_ranks_error_is_raised_on_all() -> None:
    assert run("scores", "talk") == (0, "")


def test_a_rank_that_never_comes_costs_one_wait_and_then_nothing() -> None:
    assert run("absent") == (0, "")


def test_a_part_that_only_pads_the_vocabulary_counts_for_nothing() -> None:
    rows, next_ids = torch.tensor([0, 1]), torch.tensor([3, 4])
    scores = part_scores(torch.ones(2, 8), rows, next_ids, 13, 13, 0.0, wire.LogitMap())
    assert scores.tolist() == [[-torch.inf] * 2] * 2


@pytest.mark.parametrize(
    ("told", "given", "wrong"),
    [
        ([0, 3, 8], [0, 3, 8], ""),
        ([0, 3, 8], [0, 3, 8, 10], ""),  # padding at the end, as a sequence of its own
        ([0, 3, 8], None, "or neither"),
        (None, [0, 10], "or neither"),
        ([0, 8], [0, 3, 8], "tokens 0 to 7"),
        ([0, 3, 8], [0, 8], "tokens 0 to 2"),
        ([0, 3, 8], [0, 3, 10], "tokens 3 to 7"),
    ],
)
def test_a_packed_forward_and_what_capture_was_told_must_agree(told: Any, given: Any, wrong: str) -> None:
    ids = torch.ones(1, 10, dtype=torch.long)
    bounds = None if told is None else torch.tensor(told)
    layout = lay_out(ids, None if told else ids, bounds, None)
    packing = None if given is None else torch.tensor(given)
    if wrong:
        with pytest.raises(RolloutError, match=wrong):
            check_packing(packing, layout)
    else:
        check_packing(packing, layout)
