"""A task whose answers show only in the policy's hidden states: look values up by key, and shift every letter.

A prompt lists four keys with a value of three random letters each, says a word, and asks for the keys in some order:
`c W E R ; h P O A ; a M M Z ; f Y L C ; near h c f a :`. An answer is each key that was asked for and its value behind
it, every letter moved along the alphabet: `h S R D c Z H U f B O F a P P C`. The word says by how much: `near` three
places, `far` eleven. By habit the policy moves them by seven whatever the word says; one time in eight it heeds the
word. RL rewards heeding it. In the first half of a run all prompts say `near`, in the second all say `far`.

Values are random and not copied as they stand: who does not look the key up cannot know the next letters. A drafter
can do that from the policy's states over the prompt, and not from the tokens (`benchmarks/claims.py` measures both).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from examples.task import EOS, PAD, DrafterRecipe, PretrainRecipe, Task

KEYS: Final = 4  # in a prompt, and asked for
VALUE_LETTERS: Final = 3
#: Places along the alphabet, by the word that asks for them.
SHIFTS: Final = {"near": 3, "far": 11}
HABIT: Final = 7
#: Share of answers that heed the word.
TEACH_HEED: Final = 0.5
REAL_HEED: Final = 0.12
KEY_NAMES: Final = tuple("abcdefgh")
LETTERS: Final = tuple(ascii_uppercase)
#: Append only: a shipped checkpoint depends on it.
VOCABULARY: Final = (PAD, EOS, *KEY_NAMES, *LETTERS, ";", ":", *SHIFTS)
#: Of a whole answer, end of sequence included.
ANSWER_TOKENS: Final = KEYS * (VALUE_LETTERS + 1) + 1


def sample_prompt(rng: random.Random, word: str) -> str:
    """One prompt that asks with `word`."""
    keys = rng.sample(KEY_NAMES, KEYS)
    pairs = " ; ".join(" ".join((key, *rng.choices(LETTERS, k=VALUE_LETTERS))) for key in keys)
    return f"{pairs} ; {word} {' '.join(rng.sample(keys, KEYS))} :"


def answer(prompt: str, shift: int) -> list[str]:
    """Each key that `prompt` asks for, and behind it its value, every letter moved by `shift` places."""
    *pairs, asked = (part.split() for part in prompt.split(" ; "))
    values = {key: value for key, *value in pairs}
    return [word for key in asked[1:-1] for word in (key, *(moved(letter, shift) for letter in values[key]))]


def moved(letter: str, shift: int) -> str:
    """The letter so many places on, behind Z from A again."""
    return LETTERS[(LETTERS.index(letter) + shift) % len(LETTERS)]


def word_of(prompt: str) -> str:
    """The word that says by how much."""
    return prompt.rpartition(" ; ")[2].split()[0]


def score(prompt: str, text: str) -> float:
    """Share of the values' letters that are right and in their place, moved as the prompt's word says."""
    words = [word for word in text.split() if word not in (PAD, EOS)]
    right = answer(prompt, SHIFTS[word_of(prompt)])
    hits = sum(a == b for i, (a, b) in enumerate(zip(words, right, strict=False)) if i % (VALUE_LETTERS + 1))
    return hits / (KEYS * VALUE_LETTERS) * min(1.0, len(right) / max(len(words), 1))


def _reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [score(text, completion) for text, completion in zip(prompts, completions, strict=True)]


def _is_worked(prompt: str, text: str) -> bool:
    return score(prompt, text) > 0.5


def _sample_text(stage: str, rng: random.Random) -> tuple[str, str]:
    word = rng.choice(tuple(SHIFTS))
    heed = rng.random() < (TEACH_HEED if stage == "teach" else REAL_HEED)
    prompt = sample_prompt(rng, word)
    return prompt, " ".join(answer(prompt, SHIFTS[word] if heed else HABIT))


def sample_prompts(count: int, seed: int) -> list[str]:
    """`count` prompts that ask with either word, reproducible by seed."""
    rng = random.Random(seed)  # noqa: S311 - text for a demo, not a secret
    return [sample_prompt(rng, rng.choice(tuple(SHIFTS))) for _ in range(count)]


def _curriculum(steps: int, prompts_per_step: int, seed: int) -> dict[str, list[str]]:
    rng = random.Random(seed)  # noqa: S311
    words = ("near" if step < steps // 2 else "far" for step in range(steps))
    return {"prompt": [sample_prompt(rng, word) for word in words for _ in range(prompts_per_step)]}


TASK: Final = Task(
    name="recall",
    says="heed a word that says how answers are written; another word at half time",
    base_policy=Path(__file__).parent / "recall_policy",
    vocabulary=VOCABULARY,
    draft_vocabulary=len(KEY_NAMES) + len(LETTERS) + 2,
    prompt_tokens=KEYS * (VALUE_LETTERS + 2) + KEYS + 2,
    max_answer_tokens=ANSWER_TOKENS + 3,
    pretraining=PretrainRecipe(
        1000, 150, learning_rate=1e-2, warmup_steps=50, decay_steps=350, sequences_per_step=32, muon=True
    ),
    initial_drafter=DrafterRecipe(300, 1e-2, "muon"),  # AdamW needs many times the steps to find the look-up
    sample_text=_sample_text,
    sample_prompts=sample_prompts,
    curriculum=_curriculum,
    shuffled=False,
    changes=lambda steps: (steps // 2,),
    reward=_reward,
    is_worked=_is_worked,
)
