"""What an engine counted, as blocks of rounds (`service/monitor/live/blocks.py`): each rule from both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.monitor.live.blocks import KEPT_BLOCKS, Block, counted
from service.monitor.records import TREES, AcceptanceRecord


def more(rounds: int = 100, **fields: Any) -> AcceptanceRecord:
    """Rounds of one draft of which half are accepted."""
    kept = rounds // 2
    told: dict[str, Any] = {"accepted_tokens": kept, "drafted_tokens": rounds, "accepted_per_position": (kept,)}
    told |= {"drafter_version": "v1", "policy_version": 1, "rounds": rounds, "created": 5.0}
    return AcceptanceRecord(**told | fields)


def first(**fields: Any) -> Block:
    """The block of one report."""
    (block,) = counted((), more(**fields))
    return block


# --- one report
def test_a_block_holds_what_a_report_counted() -> None:
    by_prompt = {"0000000a": (60, 40)}
    block = first(emitted_tokens=140, finished_requests=3, running_requests=2, by_prompt=by_prompt)
    assert block == Block("v1", 1, 100, 140, 100, (50,), 5.0, by_prompt, 3, 2, 2)
    assert (block.alpha, block.depth, block.idle) == (1.4, 1.0, False)
    assert first(drafted_tokens=350).depth == 3.5
    assert first(drafted_tokens=None, accepted_per_position=(30, 20)).depth == 2.0
    assert first(drafted_tokens=0, accepted_per_position=(30, 20), life="a").depth == 2.0
    assert first(drafted_tokens=None, accepted_per_position=()).depth is None


def test_no_round_emits_more_than_its_accepted_drafts_and_one() -> None:
    assert first(emitted_tokens=149).tokens == 149
    assert first(emitted_tokens=151).tokens == 150
    assert first(emitted_tokens=None).tokens == 150
    unknown = first(accepted_tokens=None, accepted_per_position=(), emitted_tokens=300)
    assert (unknown.tokens, unknown.accepted) == (300, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "ngram"},
        {"drafting": TREES},
        {"rounds": 0, "accepted_tokens": 0, "accepted_per_position": ()},
        {"rounds": -1, "accepted_tokens": -1, "accepted_per_position": ()},
        {"accepted_tokens": None, "accepted_per_position": ()},
        {"policy_version": None},
        {"accepted_tokens": 101, "accepted_per_position": ()},
        {"accepted_tokens": 101, "accepted_per_position": (101,), "drafted_tokens": 400},
        {"accepted_tokens": 31, "accepted_per_position": (10, 10, 11), "drafted_tokens": 400},
    ],
    ids=[
        "method",
        "trees",
        "no round",
        "negative",
        "no tokens",
        "no policy",
        "beyond drafts",
        "beyond rounds",
        "rising",
    ],
)
def test_what_says_nothing_or_comes_of_two_processes_is_left_out(fields: dict[str, Any]) -> None:
    before = counted((), more())
    assert counted(before, replace(more(), **fields)) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"drafting": "greedy"},
        {"drafted_tokens": 0},
        {"rounds": 1},
        {"accepted_tokens": 100, "accepted_per_position": ()},
        {"accepted_tokens": 100, "accepted_per_position": (100,)},
        {"accepted_tokens": 30, "accepted_per_position": (10, 10, 10), "drafted_tokens": 400},
        {"accepted_tokens": 101, "accepted_per_position": (101,), "drafted_tokens": None, "life": "a"},
        {"accepted_tokens": 101, "accepted_per_position": (), "drafted_tokens": None},
        {"accepted_tokens": 31, "accepted_per_position": (10, 11), "drafted_tokens": 400},
    ],
    ids=[
        "chains",
        "no drafts",
        "a round",
        "all accepted",
        "by position",
        "level",
        "one life",
        "drafted unknown",
        "contradicts",
    ],
)
def test_what_a_single_process_may_have_counted_is_a_block(fields: dict[str, Any]) -> None:
    nothing: dict[str, Any] = {"accepted_tokens": 0, "accepted_per_position": ()}
    assert len(counted((), replace(more(), **nothing | fields))) == 1


def test_counts_by_position_are_16_and_add_up_to_the_accepted() -> None:
    kept = tuple(range(20, 0, -1))
    assert first(accepted_tokens=sum(kept), accepted_per_position=kept, drafted_tokens=2000).accepted == kept[:16]
    assert first(accepted_tokens=sum(kept) + 1, accepted_per_position=kept, drafted_tokens=2000).accepted == ()


@pytest.mark.parametrize(
    ("by_prompt", "taken"),
    [
        ({"a": (100, 60), "b": (50, 40)}, True),
        ({"a": (101, 60), "b": (50, 40)}, False),
        ({"a": (100, 60), "b": (50, 41)}, False),
        ({}, False),
        (None, False),
    ],
)
def test_counts_by_prompt_are_at_most_those_of_the_report(by_prompt: Any, taken: bool) -> None:
    assert first(by_prompt=by_prompt).by_prompt == (by_prompt if taken else {})
    assert first(by_prompt={"a": (150, 1)}, emitted_tokens=200).by_prompt == {"a": (150, 1)}
    assert first(by_prompt={"a": (151, 1)}, emitted_tokens=200).by_prompt == {}, "of what it may have emitted"


# --- one block of several reports
def test_reports_become_one_block_up_to_256_rounds() -> None:
    found = counted(counted((), more(255)), more(300))
    assert [block.rounds for block in found] == [555]
    three = counted(counted(found, more(10)), more(20))
    assert [block.rounds for block in three] == [555, 30]
    assert [block.rounds for block in counted(counted((), more(256)), more(10))] == [256, 10]


def test_the_sum_of_two_blocks_is_that_of_their_counts() -> None:
    one = Block("v1", 1, 100, 150, 300, (30, 20), 5.0, {"a": (60, 40), "b": (30, 20)}, 3, 2, 7)
    two = Block("v1", 1, 20, 35, 90, (8, 4, 3), 9.0, {"b": (10, 5), "c": (4, 3)}, 4, 1, 5)
    summed = {"a": (60, 40), "b": [40, 25], "c": (4, 3)}
    assert one + two == Block("v1", 1, 120, 185, 390, (38, 24, 3), 5.0, summed, 7, 1, 7)
    assert (two + one).accepted == (38, 24, 3)
    assert ((two + one).since, (two + one).running, (two + one).most_running) == (9.0, 2, 7)
    bare = replace(one, drafted=None, finished=None)
    assert ((bare + bare).drafted, (bare + bare).finished) == (None, None)
    assert (replace(one, most_running=None) + two).most_running == 5
    assert (one + replace(two, most_running=None)).most_running == 7
    assert (replace(one, most_running=0) + replace(two, most_running=None)).most_running == 0
    assert (replace(one, most_running=None) + replace(two, most_running=0)).most_running == 0


def test_blocks_of_one_kind_alone_are_joined() -> None:
    one = first(finished_requests=1)
    for other in (
        {"drafter_version": "v2"},
        {"policy_version": 2},
        {"accepted_tokens": 5, "accepted_per_position": (5,)},  # idle
        {"accepted_per_position": ()},
        {"drafted_tokens": None},
        {"finished_requests": None},
    ):
        two = first(**{"finished_requests": 1} | other)
        assert not one.joins(two), other
        assert two.joins(two)
        assert len(counted((one,), more(**{"finished_requests": 1} | other))) == 2
    assert one.joins(first(finished_requests=0, by_prompt={"a": (1, 1)}, accepted_per_position=(30, 20)))


def test_an_engine_is_idle_up_to_one_accepted_draft_in_20_rounds() -> None:
    assert first(accepted_tokens=5, accepted_per_position=(5,)).idle
    assert not first(accepted_tokens=6, accepted_per_position=(6,)).idle


def test_it_is_known_since_when_an_engine_is_idle() -> None:
    idle: dict[str, Any] = {"accepted_tokens": 0, "accepted_per_position": (0,)}
    blocks: tuple[Block, ...] = ()
    for when, fields in enumerate(({}, {"policy_version": 2}, idle, idle | {"policy_version": 2}, {})):
        blocks = counted(blocks, more(300, created=float(when), **fields))
    assert [block.since for block in blocks] == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert first(created=None).since == 0.0


# --- many blocks
def block(rounds: int, policy: int = 1) -> Block:
    return Block("v1", policy, rounds, 2 * rounds, rounds, (rounds,), 0.0)


def test_one_block_more_than_are_kept_joins_the_oldest_two_that_may_be_joined() -> None:
    blocks = tuple(block(300, policy) for policy in (1, 2, 3, 3, 3, *range(4, KEPT_BLOCKS - 1)))
    assert len(counted(blocks[1:], more(10, policy_version=99))) == KEPT_BLOCKS
    found = counted(blocks, more(10, policy_version=99))
    assert [one.rounds for one in found] == [300, 300, 600, *[300] * (KEPT_BLOCKS - 4), 10]
    assert [one.policy_version for one in found[:4]] == [1, 2, 3, 3]


@pytest.mark.parametrize(("rounds", "joined"), [(2048, True), (2049, False)])
def test_blocks_are_joined_up_to_4096_rounds(rounds: int, joined: bool) -> None:
    blocks = (block(rounds), block(2048), *(block(300, policy) for policy in range(2, KEPT_BLOCKS)))
    found = counted(blocks, more(10, policy_version=99))
    assert [one.rounds for one in found[:2]] == ([4096, 300] if joined else [2048, 300])
    assert len(found) == KEPT_BLOCKS


@pytest.mark.parametrize(("newer", "joined"), [(8, True), (7, False)])
def test_the_newest_eight_blocks_stay_apart(newer: int, joined: bool) -> None:
    """The second of the two that may be joined has so many blocks after it, the new one among them."""
    older = [block(300, policy) for policy in range(100, 100 + KEPT_BLOCKS - 1 - newer)]
    blocks = (*older, block(300), block(300), *(block(300, policy) for policy in range(2, newer + 1)))
    assert len(blocks) == KEPT_BLOCKS
    found = counted(blocks, more(10, policy_version=99))
    assert sorted({one.rounds for one in found}) == ([10, 300, 600] if joined else [10, 300])
    assert found[0] == (blocks[0] if joined else blocks[1])
