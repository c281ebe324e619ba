"""The demo's task, `elicit`: the policy can reason but rarely does, and a programmatic reward makes it.

A prompt asks for a sum, `sum a3 b1 c4 d2 =` (operands 0 to 4, each fused with the letter of its place), and the reward
is 1 if the digit before the answer's final `.` is that sum modulo 5, else 0. The pre-training text answers in one of
five styles: three *guess* styles (filler words of high entropy, then a random digit) and two *worked* styles (running
sums, then the right digit). In the real mixture the guess styles have 93 %, so a policy trained on it is right about
one time in five, knows how to work the sum out, and seldom does: the small analogue of "RL elicits reasoning".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from examples.task import EOS, PAD, DrafterRecipe, PretrainRecipe, Task

MODULUS: Final = 5
PLACES: Final = ("a", "b", "c", "d")

MOODS: Final = (
    *("happy", "sleepy", "lucky", "cloudy", "brave", "quiet", "hazy", "eager"),
    *("gentle", "golden", "windy", "crisp", "silver", "early", "mellow", "odd"),
)
ANIMALS: Final = (
    *("otter", "falcon", "badger", "heron", "lynx", "salmon", "weasel", "swan"),
    *("beetle", "marten", "raven", "turtle", "pony", "viper", "magpie", "newt"),
)
PLACENAMES: Final = (
    *("river", "meadow", "harbour", "valley", "forest", "island", "bridge", "tower"),
    *("village", "desert", "garden", "mountain", "lagoon", "orchard", "canyon", "marsh"),
)
#: Words that hold the answers together.
FRAME: Final = (
    *("sum", "=", ".", ",", "plus", "is", "so", "we", "start", "from", "and", "add", "which", "gives", "then", "the"),
    *("total", "hmm", "today", "feels", "guess", "saw", "a", "near", "it", "said", "dream", "about", "told", "me"),
)
DIGITS: Final = tuple(str(digit) for digit in range(MODULUS))
OPERANDS: Final = tuple(f"{place}{digit}" for place in PLACES for digit in range(MODULUS))
#: Every word, in the order of its token id. Append only: a shipped checkpoint depends on it.
VOCABULARY: Final = (PAD, EOS, *OPERANDS, *DIGITS, *FRAME, *MOODS, *ANIMALS, *PLACENAMES)

#: Longest answer in tokens, end of sequence included, with room for the longest style (34).
MAX_ANSWER_TOKENS: Final = 44
#: Length of every prompt in tokens.
PROMPT_TOKENS: Final = len(PLACES) + 2


class Mixture(NamedTuple):
    """Shares of the two worked styles; the three guess styles divide the rest evenly."""

    terse: float
    wordy: float


#: What the policy is finally trained on: one answer in fifteen is worked.
REAL_MIXTURE: Final = Mixture(terse=0.045, wordy=0.02)
#: What it is taught on first, so that it *can* work a sum out: half worked answers.
TEACH_MIXTURE: Final = Mixture(terse=0.35, wordy=0.15)


def prompt(operands: Sequence[int]) -> str:
    """The prompt of four operands: `prompt((3, 1, 4, 2)) == "sum a3 b1 c4 d2 ="`."""
    if len(operands) != len(PLACES) or not all(0 <= operand < MODULUS for operand in operands):
        raise ValueError(f"expected {len(PLACES)} operands from 0 to {MODULUS - 1}, got {list(operands)}")
    return " ".join(("sum", *(f"{place}{digit}" for place, digit in zip(PLACES, operands, strict=True)), "="))


def operands_of(text: str) -> tuple[int, ...]:
    """The operands that a prompt asks for; anything else is a ValueError."""
    words = text.split()
    operands = tuple(int(word[1:]) for word in words[1:-1] if word in OPERANDS)
    if len(operands) != len(PLACES) or prompt(operands) != " ".join(words):
        raise ValueError(f"expected a prompt such as {prompt((3, 1, 4, 2))!r}, got {text[:80]!r}")
    return operands


def answer_digit(operands: Sequence[int]) -> int:
    """The right answer: the sum modulo 5."""
    return sum(operands) % MODULUS


def reward(prompt_text: str, answer: str) -> float:
    """1.0 if the digit before the answer's final `.` is the sum modulo 5, else 0.0; nothing else counts."""
    words = [word for word in answer.split() if word not in (PAD, EOS)]
    if "." not in words:
        return 0.0
    last = len(words) - 1 - words[::-1].index(".")
    return float(last > 0 and words[last - 1] == str(answer_digit(operands_of(prompt_text))))


def elicit_reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """`reward` in the shape that TRL's `GRPOTrainer(reward_funcs=...)` calls."""
    return [reward(text, answer) for text, answer in zip(prompts, completions, strict=True)]


def is_worked(answer: str) -> bool:
    """Whether an answer works the sum out (either style), told by its opening: a digit, or `we start`."""
    words = answer.split()
    return bool(words) and (words[0] in DIGITS or words[:2] == ["we", "start"])


def sample_operands(rng: random.Random) -> tuple[int, ...]:
    """Four operands, uniform."""
    return tuple(rng.randrange(MODULUS) for _ in PLACES)


def sample_prompts(count: int, seed: int) -> list[str]:
    """`count` prompts, reproducible by seed."""
    rng = random.Random(seed)  # noqa: S311 - text for a demo, not a secret
    return [prompt(sample_operands(rng)) for _ in range(count)]


def sample_answer(operands: Sequence[int], mixture: Mixture, rng: random.Random) -> str:
    """One answer in a style drawn from the mixture."""
    draw = rng.random()
    if draw < mixture.terse:
        return _terse(operands)
    if draw < mixture.terse + mixture.wordy:
        return _wordy(operands)
    return rng.choice((_mood_guess, _animal_guess, _dream_guess))(rng)


def _running_sums(operands: Sequence[int]) -> list[tuple[int, int, int]]:
    """(sum so far, next operand, new sum), modulo 5 throughout."""
    steps, total = [], operands[0]
    for operand in operands[1:]:
        steps.append((total, operand, (total + operand) % MODULUS))
        total = steps[-1][2]
    return steps


def _terse(operands: Sequence[int]) -> str:
    """`3 plus 1 is 4 , 4 plus 4 is 3 , 3 plus 2 is 0 so 0 .`: 21 tokens with the end of sequence."""
    steps = " , ".join(f"{left} plus {right} is {total}" for left, right, total in _running_sums(operands))
    return f"{steps} so {answer_digit(operands)} ."


def _wordy(operands: Sequence[int]) -> str:
    """`we start from 3 and add 1 which gives 4 , then add 4 which gives 3 , ... so the total is 0 .`."""
    steps = _running_sums(operands)
    first = f"we start from {steps[0][0]} and add {steps[0][1]} which gives {steps[0][2]}"
    rest = "".join(f" , then add {operand} which gives {total}" for _, operand, total in steps[1:])
    return f"{first}{rest} so the total is {answer_digit(operands)} ."


def _mood_guess(rng: random.Random) -> str:
    moods = " ".join(rng.choice(MOODS) for _ in range(rng.randint(3, 5)))
    return f"hmm today it feels {moods} so we guess {rng.choice(DIGITS)} ."


def _animal_guess(rng: random.Random) -> str:
    sight = f"we saw a {rng.choice(MOODS)} {rng.choice(ANIMALS)} near the {rng.choice(PLACENAMES)}"
    return f"{sight} and it said {rng.choice(DIGITS)} ."


def _dream_guess(rng: random.Random) -> str:
    dreams = " , ".join(f"a {rng.choice(ANIMALS)}" for _ in range(rng.randint(2, 3)))
    return f"a dream about {dreams} and the {rng.choice(PLACENAMES)} told me {rng.choice(DIGITS)} ."


def _sample_text(stage: str, rng: random.Random) -> tuple[str, str]:
    operands = sample_operands(rng)
    return prompt(operands), sample_answer(operands, TEACH_MIXTURE if stage == "teach" else REAL_MIXTURE, rng)


TASK: Final = Task(
    name="elicit",
    says="reason, which it can and seldom does",
    base_policy=Path(__file__).parent / "base_policy",
    vocabulary=VOCABULARY,
    draft_vocabulary=84,
    prompt_tokens=PROMPT_TOKENS,
    max_answer_tokens=MAX_ANSWER_TOKENS,
    pretraining=PretrainRecipe(550, 200, learning_rate=3e-3, warmup_steps=30, decay_steps=300),
    initial_drafter=DrafterRecipe(150, 1e-3, "adamw"),
    sample_text=_sample_text,
    sample_prompts=sample_prompts,
    curriculum=lambda steps, prompts_per_step, seed: {"prompt": sample_prompts(steps * prompts_per_step, seed)},
    shuffled=True,
    changes=lambda _: (),
    reward=elicit_reward,
    is_worked=lambda _, answer: is_worked(answer),
)
