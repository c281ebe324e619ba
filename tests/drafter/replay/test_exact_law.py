"""Replay α against the exact law of live decoding: every text and every draft on its way is counted, none is drawn.

The policy's states depend on a token and its position, so that texts of four tokens can all be written down. What is
live is written from the definition of rejection sampling alone, with the drafter of `drafter_reference`, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers.drafter.drafter_reference import Row, rms
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.acceptance import Replay
from drafter.replay.replay import Drafting, replay
from drafter.vocabulary import DraftVocabulary

Text = tuple[int, ...]
VOCAB, HIDDEN, LONGEST = 4, 8, 12
DRAFTED, EOS = (0, 1, 3), 3
TOOL = (2, 1)


@dataclass(frozen=True)
class Case:
    """How a prompt is answered. `turns`: most tokens of each; after each but the last comes `TOOL`."""

    prompt: Text
    turns: tuple[int, ...]
    depth: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return self.temperature or 1.0


class Engine:
    """A policy and its drafter. Laws are lists of probabilities over the whole vocabulary."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64) * scale

        config = DrafterConfig(HIDDEN, HIDDEN, 10, 2, 1, 4, VOCAB, len(DRAFTED), (1, 2, 3))
        self.drafter = Eagle3Drafter(config, DraftVocabulary(torch.tensor(DRAFTED), VOCAB)).double()
        for parameter in self.drafter.parameters():
            parameter.data = draw(*parameter.shape, scale=0.5) + (parameter.ndim == 1)
        self.weights = {name: p.detach() for name, p in self.drafter.named_parameters()}
        self.embed, self.head = draw(VOCAB, HIDDEN), draw(VOCAB, HIDDEN, scale=0.25)
        self._aux = draw(VOCAB, LONGEST, 3 * HIDDEN)
        self._last = draw(VOCAB, LONGEST, HIDDEN)

    def states(self, text: Text) -> tuple[Tensor, Tensor]:
        """Auxiliary and last states of all tokens."""
        at = torch.arange(len(text))
        return self._aux[list(text), at], self._last[list(text), at]

    def policy_law(self, text: Text, case: Case) -> list[float]:
        """Of the next token: top-k, then top-p of what it leaves."""
        p = (self.head @ self._last[text[-1], len(text) - 1] / case.divisor).softmax(0).tolist()
        falling = sorted(range(VOCAB), key=lambda token: -p[token])[: case.top_k or VOCAB]
        whole, kept = sum(p[token] for token in falling), set[int]()
        for token in falling:
            if sum(p[k] for k in kept) < case.top_p * whole:
                kept.add(token)
        left = sum(p[token] for token in kept)
        return [p[token] / left if token in kept else 0.0 for token in range(VOCAB)]

    def emission_law(self, text: Text, case: Case) -> list[float]:
        """As `policy_law`; at temperature 0 the likeliest token is certain."""
        p = self.policy_law(text, case)
        return p if case.temperature else [float(token == p.index(max(p))) for token in range(VOCAB)]

    @cache  # noqa: B019 - one engine, for the module
    def _first(self, row: int, token: int, following: int) -> Row:
        r = self.weights["fc.weight"] @ self._aux[token, row]
        return Row(self.weights, self.drafter.config, self.embed[following], r, row)

    @cache  # noqa: B019
    def _pre(self, text: Text, path: Text) -> tuple[Tensor, tuple[Row, ...]]:
        """State after drafting `path` behind `text`, and the rows that this took."""
        t = len(text) - 2
        seen = [self._first(row, text[row], text[row + 1]) for row in range(t + 1)]
        if not path:
            return seen[-1].pre(seen), ()
        pre, own = self._pre(text, path[:-1])
        here = Row(self.weights, self.drafter.config, self.embed[path[-1]], pre, t + len(path))
        return here.pre([*seen, *own, here]), (*own, here)

    def draft_law(self, text: Text, path: Text, case: Case) -> list[float]:
        """What the draft behind `text` and the drafts `path` is drawn from."""
        pre, _ = self._pre(text, path)
        normed = rms(pre, self.weights["norm.weight"], self.drafter.config.rms_norm_eps)
        q = (self.weights["lm_head.weight"] @ normed / case.divisor).softmax(0).tolist()
        if case.greedy or not case.temperature:
            q = [float(place == q.index(max(q))) for place in range(len(q))]
        law = dict(zip(DRAFTED, q, strict=True))
        return [law.get(token, 0.0) for token in range(VOCAB)]


ENGINE = Engine()


def texts(
    case: Case, text: Text, mask: Text, turn: int, left: int, chance: float
) -> Iterator[tuple[Text, Text, float]]:
    """Every rollout, where the policy made its tokens, and its probability."""
    if left and not (mask[-1] and text[-1] == EOS):
        for token, p in enumerate(ENGINE.emission_law(text, case)):
            if p:
                yield from texts(case, (*text, token), (*mask, 1), turn, left - 1, chance * p)
    elif turn + 1 < len(case.turns):
        yield from texts(case, text + TOOL, mask + (0,) * len(TOOL), turn + 1, case.turns[turn + 1], chance)
    else:
        yield text, mask, chance


def live(case: Case) -> tuple[float, float]:
    """Expected rounds, and expected tokens that they emit."""

    @cache
    def after(text: Text, turn: int, left: int, prefilled: bool) -> tuple[float, float]:
        if not left or (prefilled and text[-1] == EOS):
            more = turn + 1 < len(case.turns)
            return after(text + TOOL, turn + 1, case.turns[turn + 1], False) if more else (0.0, 0.0)
        rounds, tokens = float(prefilled), 0.0

        def emit(made: Text, chance: float) -> None:
            nonlocal rounds, tokens
            made = made[:left]  # as engines cut them, and behind the end of the response
            made = made[: made.index(EOS) + 1] if EOS in made else made
            later = after(text + made, turn, left - len(made), True)
            rounds += chance * later[0]
            tokens += chance * (later[1] + len(made) * prefilled)

        def draft(path: Text, chance: float) -> None:
            p = ENGINE.emission_law(text + path, case)
            if len(path) == left or EOS in path:
                emit(path, chance)
                return
            drafts = prefilled and len(path) < case.depth
            q = ENGINE.draft_law(text, path, case) if drafts else [0.0] * VOCAB
            kept = [min(a, b) for a, b in zip(p, q, strict=True)]
            emitted = [
                max(a - b, 0.0) for a, b in zip(p, q, strict=True)
            ]  # in place of a rejected draft, or behind all
            for token, share in enumerate(kept):
                if share:
                    draft((*path, token), chance * share)
            for token, share in enumerate(emitted):
                if share:
                    emit((*path, token), chance * share * (1 - sum(kept)) / sum(emitted))

        draft((), 1.0)
        return rounds, tokens

    return after(case.prompt, 0, case.turns[0], False)


def packed(case: Case, rollouts: list[tuple[Text, Text, float]]) -> RolloutBatch:
    """The rollouts as a trainer would send them."""
    aux, last = (torch.cat(parts) for parts in zip(*(ENGINE.states(text) for text, _, _ in rollouts), strict=True))
    logprobs = [
        math.log(ENGINE.policy_law(text[:place], case)[token]) if generated else 0.0
        for text, mask, _ in rollouts
        for place, (token, generated) in enumerate(zip(text, mask, strict=True))
    ]
    return RolloutBatch(
        input_ids=torch.tensor([token for text, _, _ in rollouts for token in text]),
        cu_seqlens=torch.tensor([0] + [len(text) for text, _, _ in rollouts]).cumsum(0),
        loss_mask=torch.tensor([bool(m) for _, mask, _ in rollouts for m in mask]),
        aux_hidden=aux,
        logprobs=torch.tensor(logprobs),
        last_hidden=last,
        logsumexp=(last @ ENGINE.head.T / case.divisor).logsumexp(-1),
        temperature=case.temperature,
        top_p=case.top_p,
        top_k=case.top_k,
    )


CASES = {
    "as it is": Case((0, 2), (5,), 2),
    "cold": Case((1,), (5,), 2, temperature=0.4),
    "top-p": Case((0, 2), (5,), 2, top_p=0.7),
    "top-k, then top-p": Case((0, 2, 1), (5,), 3, temperature=0.8, top_p=0.8, top_k=3),
    "greedy drafts": Case((0, 2), (5,), 2, greedy=True),
    "greedy drafts, top-p": Case((0, 2), (5,), 2, top_p=0.9, greedy=True),
    "two turns": Case((0,), (2, 3), 2),
    "a first turn of one token": Case((2,), (1, 4), 3),
    "two turns, top-p": Case((2,), (4, 2), 2, top_p=0.8),
    "greedy policy": Case((3, 1, 0), (6, 3), 2, temperature=0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_replay_is_the_expectation_of_live_decoding(name: str) -> None:
    case = CASES[name]
    rollouts = list(texts(case, case.prompt, (0,) * len(case.prompt), 0, case.turns[0], 1.0))
    chances = np.array([chance for _, _, chance in rollouts])
    assert chances.sum() == pytest.approx(1)
    batch = packed(case, rollouts)
    rounds, tokens = live(case)
    found = replayed(case, batch)
    assert chances @ found.tokens == pytest.approx(tokens, rel=1e-12)
    assert chances @ found.rounds == pytest.approx(rounds, rel=1e-6)
    assert tokens > 1.05 * rounds, "no draft is kept"
    if case.top_p < 1 and not case.greedy:  # log-probabilities of what was not cut off are too low
        whole = replayed(case, replace(batch, logprobs=packed(replace(case, top_p=1.0, top_k=0), rollouts).logprobs))
        assert chances @ whole.rounds < 0.9999 * rounds


def replayed(case: Case, batch: RolloutBatch) -> Replay:
    drafting: Drafting = "greedy" if case.greedy else "probabilistic"
    policy = Policy(0, ENGINE.embed, TargetHead(ENGINE.head))
    return replay(ENGINE.drafter, batch, policy, depth=case.depth, drafting=drafting)
