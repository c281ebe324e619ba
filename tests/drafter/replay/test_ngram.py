"""Prompt-lookup drafting against a plain quadratic search over the text."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.replay.ngram import NgramIndex, ngram_replay


def batch_of(*rollouts: tuple[list[int], str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack rollouts given as tokens and a mask such as "..xxx" (x: generated): tokens, mask and boundaries."""
    lengths = [len(tokens) for tokens, _ in rollouts]
    return (
        np.concatenate([np.array(tokens, dtype=np.int64) for tokens, _ in rollouts]),
        np.array([mark == "x" for _, mask in rollouts for mark in mask]),
        np.concatenate(([0], np.cumsum(lengths))),
    )


def slow_propose(text: list[int], length: int, depth: int, max_n: int, min_n: int, occurrence: str) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        if n >= length:
            continue
        suffix = text[length - n : length]
        ends = [end for end in range(n, length) if text[end - n : end] == suffix]
        if ends:
            start = ends[-1] if occurrence == "latest" else ends[0]
            return text[start : min(start + depth, length)]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["latest", "earliest"]),
)
def test_the_index_proposes_what_a_full_search_would(
    text: list[int], depth: int, min_n: int, more: int, occurrence: Literal["latest", "earliest"]
) -> None:
    index = NgramIndex(min_n + more, min_n, occurrence)
    for length in range(1, len(text) + 1):
        expected = slow_propose(text, length, depth, min_n + more, min_n, occurrence)
        assert list(index.propose(text, length, depth)) == expected


def test_a_copied_prompt_is_drafted_whole() -> None:
    # prompt 1 2 3 4 5 6, response 1 2 3 4 5 6: after 1 (prefill), "2 3 4" is proposed and 5 comes as the bonus.
    replay = ngram_replay(*batch_of(([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], "......xxxxxx")), depth=3)
    assert replay.tokens.tolist() == [5]
    assert replay.rounds.tolist() == [2]
    assert replay.accepted.tolist() == [[2, 1, 1]]
    assert replay.reached.tolist() == [[2, 1, 1]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 12), st.integers(1, 4))
def test_counts_per_position_equal_a_walk_along_the_text(text: list[int], prompt: int, depth: int) -> None:
    prompt = min(prompt, len(text) - 1)
    rounds, accepted, reached = 0, [0] * depth, [0] * depth
    begin = prompt + 1
    while begin < len(text):
        rounds += 1
        emitted = 0
        for j, token in enumerate(slow_propose(text, begin, depth, 3, 1, "latest")):
            if begin + j >= len(text):
                break
            reached[j] += 1
            if token != text[begin + j]:
                break
            accepted[j] += 1
            emitted += 1
        begin += emitted + 1
    replay = ngram_replay(*batch_of((text, "." * prompt + "x" * (len(text) - prompt))), depth=depth)
    assert replay.rounds.tolist() == [rounds]
    assert replay.accepted.tolist() == [accepted]
    assert replay.reached.tolist() == [reached]
    if rounds:
        np.testing.assert_allclose(replay.position_acceptance, np.array(accepted) / rounds)
    for j, (kept, came) in enumerate(zip(accepted, reached, strict=True)):
        np.testing.assert_equal(replay.conditional_acceptance[j], kept / came if came else np.nan)


def test_a_text_without_repetition_takes_one_round_per_token() -> None:
    replay = ngram_replay(*batch_of((list(range(10)), "...xxxxxxx")), depth=4)
    assert replay.alpha == 1.0
    assert replay.reached.sum() == 0
    assert replay.position_acceptance.tolist() == [0.0] * 4
    assert np.isnan(replay.conditional_acceptance).all()


def test_rollouts_do_not_see_each_other_and_rounds_restart_after_a_tool_call() -> None:
    rollouts = [
        ([1, 2, 3, 1, 2, 3, 1, 9, 1, 2], "...xxxxxxx"),
        ([7, 1, 2, 3, 7, 1, 2, 3], ".xx...xx"),
        ([5, 5, 5, 5, 9, 5, 5, 5], "..xxxxxx"),
        ([1, 2, 3, 4], ".xxx"),
    ]
    together, alone = (
        ngram_replay(*batch_of(*rollouts), depth=2),
        [ngram_replay(*batch_of(one), depth=2) for one in rollouts],
    )
    for name in ("tokens", "rounds", "accepted", "reached"):
        parts = [getattr(one, name) for one in alone]
        np.testing.assert_array_equal(getattr(together, name), np.concatenate(parts), name)
    assert together.tokens.tolist() == [6, 2, 5, 2]
    assert together.rounds.tolist() == [4, 2, 4, 2]


def test_a_response_of_one_token_has_no_round() -> None:
    replay = ngram_replay(*batch_of(([1, 2, 1], "..x"), ([5], ".")), depth=3)
    assert replay.rounds.tolist() == [0, 0]


@pytest.mark.parametrize(("depth", "max_n", "min_n"), [(-1, 3, 1), (2, 1, 2), (2, 3, 0)])
def test_nonsensical_settings_are_refused(depth: int, max_n: int, min_n: int) -> None:
    with pytest.raises(ValueError, match="expected depth"):
        ngram_replay(*batch_of(([1, 2], ".x")), depth=depth, max_n=max_n, min_n=min_n)


class CountedReads(list[int]):
    """A text that counts how often it is read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


def test_work_grows_linearly_with_the_text() -> None:
    text = CountedReads(np.random.default_rng(0).integers(0, 40, 3000).tolist())
    index = NgramIndex(3, 1)
    for length in range(1, len(text) + 1):
        index.propose(text, length, 4)
    assert text.reads < 8 * len(text)  # per token: three sizes indexed, three looked up, one draft
