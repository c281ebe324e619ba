"""Prompts of which next to nothing is accepted: how likely is it that all prompts behind some rounds are such?

An engine that accepts nothing has lost its drafter, or answers hard prompts. One hard prompt's answers may be thousands
of rounds, so rounds alone do not tell. Several prompts in a row that are all hard do: the more, the less likely.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

from service.monitor.live.blocks import Block
from service.monitor.records import DrafterSums

#: A prompt counts as hard up to so many times what the engine accepts at most: if prompts accept that on average, they
#: have two thirds of the rounds at least.
_AS_HARD: Final = 3.0
#: Standard errors by which the engine may accept more than it did.
_SIGMAS: Final = 3.0
#: The share where no prompt was replayed.
_UNKNOWN_SHARE: Final = 0.1
#: Turns of an answer, on average, from which on prompts are not counted as an engine tells them.
_SEVERAL: Final = 1.05
#: Answers of a prompt, where no batch says it.
_SIBLINGS: Final = 8.0


@dataclass
class ReplayedPrompts:
    """The prompts that were replayed with the drafter that was served then.

    `apart`: tokens and rounds of each. `together`: sums of batches that do not tell prompts apart. `answers`: of all.
    `requests`: of all; each turn of an answer is one.
    """

    apart: list[tuple[float, float]] = field(default_factory=list)
    together: list[DrafterSums] = field(default_factory=list)
    answers: float = 0.0
    requests: float = 0.0

    @property
    def siblings(self) -> float:
        """Answers of a prompt, on average."""
        prompts = len(self.apart) + math.fsum(sums.rollouts for sums in self.together)
        return max(1.0, self.answers / prompts) if prompts and self.answers else _SIBLINGS

    @property
    def turns(self) -> float:
        """Requests of an answer, on average."""
        return max(1.0, self.requests / self.answers) if self.answers else 1.0

    @cached_property
    def _hardest_first(self) -> tuple[list[float], list[float]]:
        """α of the prompts that are known apart, ascending, and the rounds of all up to each."""
        ordered = sorted((own / took, took) for own, took in self.apart if took > 0)
        return [alpha for alpha, _ in ordered], [0.0, *accumulate(took for _, took in ordered)]

    @cached_property
    def _tokens_apart(self) -> float:
        return math.fsum(own for own, took in self.apart if took > 0)

    def hard_share(self, tokens: float, rounds: float) -> float:
        """Share of the prompts, or of their rounds if that is more, that accept as little as `tokens` in `rounds` may.

        One more hard prompt is supposed than was seen: it accepts nothing, so each of its tokens is a round.
        """
        most = hard_up_to(tokens, rounds)
        alphas, rounds_up_to = self._hardest_first
        hard = bisect_right(alphas, most)
        prompts, all_rounds = float(len(alphas)), rounds_up_to[-1]
        all_tokens = self._tokens_apart
        found, in_hard = float(hard), rounds_up_to[hard]
        for sums in self.together:
            # Each hard prompt is off by (α - most) in a round: the sum of squares bounds how many there are.
            off = max(sums.alpha - most, 0.0) * sums.rounds / sums.rollouts
            few = min(sums.rollouts, max(sums.off_squared, 0.0) / off**2) if off > 0 else sums.rollouts
            found, in_hard = found + few, in_hard + few * sums.rounds / sums.rollouts
            prompts, all_rounds = prompts + sums.rollouts, all_rounds + sums.rounds
            all_tokens += sums.tokens
        if not prompts:
            return _UNKNOWN_SHARE
        more = all_tokens / prompts
        return max((found + 1.0) / (prompts + 1.0), (in_hard + more) / (all_rounds + more))


def hard_up_to(tokens: float, rounds: float) -> float:
    """Up to this α a prompt is hard, beside an engine that emitted `tokens` in `rounds`."""
    kept = max(tokens - rounds, 0.0)
    return 1.0 + _AS_HARD * (kept + _SIGMAS * math.sqrt(kept + 1.0)) / rounds


@dataclass(slots=True)
class PromptsBehind:
    """How many prompts stand behind an engine's newest blocks, one more block with each call of `add`.

    Counted by prompt or, from the requests that ended and run, told by the `siblings` of a prompt and the `turns` of
    each. An engine that counts by prompt takes each turn for a prompt of its own, so it is not asked where there are
    several, if it tells requests.
    """

    siblings: float
    turns: float
    blocks: Sequence[Block]  # all of the engine's, oldest first
    _rounds: dict[str, int] = field(default_factory=dict)
    _told: bool = True
    _finished: int | None = 0
    _begun: int = 0  # requests that ran in the blocks added, at most
    _policy: int = 0  # of the oldest block added

    def add(self, block: Block) -> None:
        """Add the block before those that were added."""
        self._told = self._told and bool(block.by_prompt)
        for prompt, (_, rounds) in block.by_prompt.items() if self._told else ():
            self._rounds[prompt] = self._rounds.get(prompt, 0) + rounds
        known = self._finished is not None and block.finished is not None
        self._finished = (self._finished or 0) + (block.finished or 0) if known else None
        self._begun, self._policy = max(self._begun, block.running or 0), block.policy_version

    @property
    def prompts(self) -> float | None:
        """Prompts, each as much as it has rounds beside the others'; None: not known."""
        if self._told and self._rounds and (self.turns < _SEVERAL or self._finished is None):
            return math.fsum(self._rounds.values()) ** 2 / math.fsum(n * n for n in self._rounds.values())
        if self._finished is None:
            return None
        running = self.blocks[-1].running or 0  # of an answer, one request at a time
        return max(running, (self._finished + running) / self.turns) / self.siblings

    @property
    def beside(self) -> float:
        """Prompts that ran with these before and have ended since: of a step's prompts the hard ones end last."""
        ran = max((b.most_running or 0 for b in self.blocks if b.policy_version >= self._policy), default=0)
        return max(0, ran - self._begun) / self.siblings


def chance_of_hard(prompts: float, beside: float, share: float) -> float:
    """Chernoff's bound of the chance that `prompts` of these and `beside` others are hard, as a `share` of all is."""
    of_all = prompts + beside
    part = prompts / of_all if of_all else 0.0
    if part <= share:
        return 1.0
    other = (1.0 - part) * math.log((1.0 - part) / (1.0 - share)) if part < 1.0 else 0.0
    return math.exp(-of_all * (part * math.log(part / share) + other))
