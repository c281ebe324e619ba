"""The task `recall`: its texts, its reward, and that a drafter needs the policy's hidden states for it."""

from __future__ import annotations

import random

import pytest

from benchmarks.claims import BARS, quick_table
from examples import recall

PROMPT = "c W E R ; h P O A ; a M M Z ; f Y L C ; near h c f a :"
RIGHT = "h S R D c Z H U f B O F a P P C"
HABIT = "h W V H c D L Y f F S J a T T G"


def test_an_answer_is_the_values_in_the_order_asked_for_moved_by_what_the_word_says() -> None:
    assert " ".join(recall.answer(PROMPT, recall.SHIFTS["near"])) == RIGHT
    assert " ".join(recall.answer(PROMPT, recall.HABIT)) == HABIT
    assert recall.word_of(PROMPT) == "near"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (RIGHT, 1.0),
        (f"{RIGHT} <eos> <pad> <pad>", 1.0),
        (HABIT, 0.0),
        (" ".join(RIGHT.split()[:8]), 0.5),  # half of it
        (f"{RIGHT} {RIGHT}", 0.5),  # as much again
        ("", 0.0),
        (" ".join(RIGHT.split()[4:8] + RIGHT.split()[:4] + RIGHT.split()[8:]), 0.5),  # two values exchanged
    ],
)
def test_the_reward_is_the_share_of_digits_in_their_place(text: str, score: float) -> None:
    assert recall.score(PROMPT, text) == pytest.approx(score)


def test_prompts_have_one_length_and_no_two_keys_alike() -> None:
    for text in recall.sample_prompts(50, seed=1):
        assert len(text.split()) == recall.TASK.prompt_tokens
        assert len({part.split()[0] for part in text.split(" ; ")[:-1]}) == recall.KEYS


def test_the_word_changes_at_half_time() -> None:
    prompts = recall.TASK.curriculum(6, 2, 0)["prompt"]
    assert [recall.word_of(p) for p in prompts] == ["near"] * 6 + ["far"] * 6
    assert not recall.TASK.shuffled


def test_real_text_mostly_follows_habit() -> None:
    rng = random.Random(0)
    texts = [recall.TASK.sample_text("real", rng) for _ in range(400)]
    heeded = sum(recall.TASK.is_worked(*text) for text in texts) / len(texts)
    assert heeded == pytest.approx(recall.REAL_HEED, abs=0.05)


@pytest.mark.slow
def test_a_drafter_needs_right_features() -> None:
    table = quick_table(["zeros"], steps=150)  # α of right features rises between the 80th and the 120th
    right = table["three layers"]["both"]
    # Over the last layer alone the bar of `benchmarks.claims` is not met yet (1.05; measured 0.99).
    assert right > BARS["zeros"] * table["zeros"]["both"], table
    assert right > BARS["zeros"] * table["zeros"]["served"], table
