"""Prompts behind an engine's rounds (`service/monitor/live/hard.py`): each figure beside what it should be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule
from service.monitor.live.hard import PromptsBehind, ReplayedPrompts, chance_of_hard, hard_up_to
from service.monitor.live.replays import Replays
from service.monitor.live.watch import watch
from service.monitor.records import TURNS_MARK, DrafterSums, Replayed, ScoreRecord

VERSION = "v000001-0a1b2c3d"


def block(tokens: int, rounds: int, policy: int = 1, **more: Any) -> Block:
    return Block(VERSION, policy, rounds, tokens, None, (), 0.0, **more)


# --- how hard, and how many
def test_hard_is_three_times_what_the_engine_accepts_and_three_errors() -> None:
    assert hard_up_to(1000, 1000) == pytest.approx(1 + 3 * 3 / 1000)
    assert hard_up_to(1100, 1000) == pytest.approx(1 + 3 * (100 + 3 * math.sqrt(101)) / 1000)
    assert hard_up_to(900, 1000) == hard_up_to(1000, 1000), "who emits less than a token a round accepts nothing"


def test_one_hard_prompt_more_is_supposed_than_was_seen() -> None:
    known = ReplayedPrompts(apart=[(300.0, 100.0)] * 9 + [(300.0, 298.0)])
    most = hard_up_to(1010, 1000)
    assert 300 / 298 < most < 3
    assert known.hard_share(1010, 1000) == pytest.approx((298 + 300) / (1198 + 300)), "hard ones took more rounds"
    short = ReplayedPrompts(apart=[(110.0, 100.0)] * 90 + [(1.0, 0.999)] * 10)
    assert short.hard_share(1000, 1000) == pytest.approx(11 / 101), "hard ones took fewer"
    assert ReplayedPrompts().hard_share(1010, 1000) == 0.1


@pytest.mark.parametrize("hard", [0, 1, 7, 40])
def test_of_prompts_that_are_summed_up_the_squares_bound_the_hard_ones(hard: int) -> None:
    tokens, rounds = [300.0] * 40, [298.0] * hard + [100.0] * (40 - hard)
    sums, most = DrafterSums.of(tokens, rounds), hard_up_to(1010, 1000)
    off = (sums.alpha - most) * sums.rounds / 40
    few = min(40.0, sums.off_squared / off**2) if off > 0 else 40.0
    share = max((few + 1) / 41, (few * sums.rounds / 40 + 300) / (sums.rounds + 300))
    assert ReplayedPrompts(together=[sums]).hard_share(1010, 1000) == pytest.approx(share)
    assert share >= hard / 40
    both = ReplayedPrompts(apart=[(300.0, 100.0)] * 10, together=[sums])
    expected = max((few + 1) / 51, (few * sums.rounds / 40 + 300) / (1000 + sums.rounds + 300))
    assert both.hard_share(1010, 1000) == pytest.approx(expected)


@pytest.mark.parametrize("hard", [1, 10])
def test_of_prompts_that_are_summed_up_their_number_may_bound_more_than_their_rounds(hard: int) -> None:
    sums = DrafterSums.of([110.0] * 90 + [1.0] * hard, [100.0] * 90 + [0.999] * hard)
    off = (sums.alpha - hard_up_to(1000, 1000)) * sums.rounds / sums.rollouts
    few, more = min(sums.rollouts, sums.off_squared / off**2), sums.tokens / sums.rollouts
    rounds = few * sums.rounds / sums.rollouts + more
    share = max((few + 1) / (sums.rollouts + 1), rounds / (sums.rounds + more))
    assert ReplayedPrompts(together=[sums]).hard_share(1000, 1000) == pytest.approx(share)


def test_the_chance_that_so_many_are_hard() -> None:
    """KL(n / (n + b) || h), n + b times."""
    assert chance_of_hard(0, 0, 0.1) == 1.0
    assert chance_of_hard(4, 0, 0.1) == pytest.approx(1e-4)
    for prompts, beside, share in ((3, 5, 0.1), (6, 2, 0.3), (2.5, 0.5, 0.2)):
        part, n = prompts / (prompts + beside), prompts + beside
        kl = part * math.log(part / share) + (1 - part) * math.log((1 - part) / (1 - share))
        assert chance_of_hard(prompts, beside, share) == pytest.approx(math.exp(-n * kl))
    assert chance_of_hard(1, 9, 0.1) == chance_of_hard(1, 19, 0.1) == 1.0
    assert chance_of_hard(3, 0, 1.0) == 1.0


# --- how many prompts stand behind rounds
def test_prompts_are_weighed_by_their_rounds_over_all_blocks() -> None:
    behind = PromptsBehind(8.0, 1.0, ())
    behind.add(block(90, 30, by_prompt={"a": (60, 20), "b": (30, 10)}))
    assert behind.prompts == pytest.approx(30**2 / (20**2 + 10**2))
    behind.add(block(60, 20, by_prompt={"a": (30, 10), "c": (30, 10)}))
    assert behind.prompts == pytest.approx(50**2 / (30**2 + 10**2 + 10**2))
    behind.add(block(60, 20))
    assert behind.prompts is None, "one block tells neither prompts nor requests"
    behind.add(block(60, 20, by_prompt={"d": (60, 20)}))
    assert behind.prompts is None


def test_requests_that_ended_and_those_that_run_are_of_so_many_prompts() -> None:
    quiet = block(60, 20, finished=8, running=0, most_running=8)
    behind = PromptsBehind(4.0, 1.0, [quiet])
    behind.add(quiet)
    assert (behind.prompts, behind.beside) == (2.0, 2.0)
    newest = block(60, 20, finished=5, running=3, most_running=12)
    blocks = [block(9, 3, 0, running=99, most_running=99), block(9, 3, finished=0, running=5, most_running=20), newest]
    behind = PromptsBehind(4.0, 1.0, blocks)
    behind.add(newest)
    assert behind.prompts == pytest.approx((5 + 3) / 4)
    assert behind.beside == pytest.approx((20 - 3) / 4), "what ran with an older policy version ran not beside these"
    behind.add(blocks[1])
    assert behind.prompts == pytest.approx((5 + 3) / 4)
    assert behind.beside == pytest.approx((20 - 5) / 4)
    behind.add(block(9, 3, finished=7))
    assert behind.prompts == pytest.approx((12 + 3) / 4)
    assert behind.beside == pytest.approx((20 - 5) / 4)
    behind.add(blocks[0])
    assert behind.prompts is None, "of one block it is not known how many ended"
    behind.add(newest)
    assert behind.prompts is None


def test_each_turn_of_an_answer_is_a_request() -> None:
    newest = block(60, 20, finished=40, running=8, by_prompt={f"{n}": (3, 1) for n in range(20)})
    for turns, prompts in ((1.0, 20.0), (1.01, 20.0), (5.0, (40 + 8) / 5 / 8), (100.0, 1.0)):
        behind = PromptsBehind(8.0, turns, [newest])
        behind.add(newest)
        assert behind.prompts == pytest.approx(prompts), "turns are prompts to an engine; those that run are apart"
    untold = block(60, 20, by_prompt=newest.by_prompt)
    behind = PromptsBehind(8.0, 5.0, [untold])
    behind.add(untold)
    assert behind.prompts == 20, "nothing better is known"


def test_answers_and_their_turns_are_counted_from_the_batches() -> None:
    assert (ReplayedPrompts().siblings, ReplayedPrompts().turns) == (8.0, 1.0)
    sums = DrafterSums.of([100.0] * 6, [40.0] * 6)
    told = Replayed(VERSION, sums, (), (), {f"{n}": (100.0, 40.0) for n in range(6)})
    more: dict[str, Any] = {"served": sums, "replayed": (told,), "drafter_version": VERSION, "policy_version": 1}
    talks = ScoreRecord(rollouts=24, segments=72, tokens=672, entry_id="1-0", **more)
    found = Replays([talks]).prompts
    assert (found.siblings, found.turns) == (4.0, 3.0)
    assert Replays([talks]).answered == {1: 600.0}, "the first token of each turn is no round's"
    older = ScoreRecord(rollouts=24, tokens=672, entry_id="1-0", **more)
    assert (Replays([older]).prompts.turns, Replays([older]).answered) == (1.0, {1: 648.0})
    drawn = [replace(older, offered=offered) for offered in ((48, 1344), (4, 112))]
    assert Replays(drawn[:1]).offered == {1: 1296.0}
    assert Replays(drawn[1:]).offered == {1: 648.0}, "never less than what was sent"


def test_a_version_of_which_a_batch_says_rollouts_and_no_tokens_is_not_compared() -> None:
    """As of a start's first: the shortest answers may have come first. Other lengths alone may be chance."""
    sums = DrafterSums(100.0, 40.0, 0.0, 8.0)
    more: dict[str, Any] = {"replayed": (Replayed(VERSION, sums, (), ()),), "rollouts": 10, "tokens": 1000}
    scored = ScoreRecord(served=sums, drafter_version=VERSION, policy_version=5, entry_id="1-0", **more)
    for offered, compared in (
        (None, True),
        ((0, 0), True),
        ((20, 0), False),
        ((0, 2000), True),
        ((20, 2000), True),
        ((20, 2400), True),
        ((20, 2700), True),
    ):
        found = Replays([replace(scored, offered=offered)])
        assert (found.get(counts(300, 2.5)) is not None) == compared, offered
    for second, compared in (((0, 0), True), ((1, 0), False), (None, True)):
        twice = [replace(scored, offered=(20, 2000)), replace(scored, entry_id="2-0", offered=second)]
        found = Replays(twice)
        assert (found.get(counts(300, 2.5)) is not None) == compared, "what its files were drawn from is said once"
        assert found.get(replace(counts(300, 2.5), policy_version=6)) is None
    other = replace(scored, entry_id="3-0", policy_version=6, offered=(20, 2000))
    part = Replays([*twice[:1], replace(twice[0], offered=(1, 0)), other])
    assert (part.uneven, part.offered[6]) == ({5}, 1980.0), "what is said of other versions counts"
    assert Replays([replace(scored, offered=(20, 2700)), other]).offered[6] == 1980.0, "nor do other lengths spoil it"
    assert Replays([replace(scored, offered=(20, 2450)), other]).offered[6] == 990.0, "by 18 %: not drawn evenly"


# --- what follows for an engine
def replays(*, turns: int = 1, steps: int = 10, hard: int = 1) -> Replays:
    """Of 32 prompts a step, of which `hard` accept nothing. The rest scatter a little around α = 3."""
    rng, scores = np.random.default_rng(0), list[ScoreRecord]()
    for step in range(steps):
        alphas = 3.0 * np.exp(0.05 * rng.normal(size=32))
        alphas[:hard] = 1.0
        each = {
            f"{step:04x}{n:04x}{TURNS_MARK if turns > 1 else ''}": (1600.0, 1600.0 / a) for n, a in enumerate(alphas)
        }
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        kept = [(sums.tokens - sums.rounds) * part for part in (0.4, 0.3, 0.2, 0.1)]
        told = Replayed(VERSION, sums, tuple(kept), (sums.rounds, *kept[:-1]), each)
        record: dict[str, Any] = {"served": sums, "replayed": (told,), "drafter_version": VERSION, "rollouts": 256}
        record |= {"segments": 256 * turns, "tokens": 32 * 1600 + 256 * turns, "policy_version": step}
        scores.append(ScoreRecord(entry_id=f"{step + 1}-0", **record))
    return Replays(scores)


def counts(rounds: int, alpha: float, **more: Any) -> Block:
    drafts = [round(rounds * (alpha - 1) * part) for part in (0.4, 0.3, 0.2, 0.1)]
    return Block(VERSION, 5, rounds, rounds + sum(drafts), 4 * rounds, tuple(drafts), 0.0, **more)


def name_of(known: Replays, *blocks: Block) -> str:
    return watch({"a": blocks}, known, LiveRule()).engines[0].name


def test_a_sound_engine_on_one_hard_conversation_is_not_dead() -> None:
    """Eight answers of twenty turns, each of which looks like a prompt of its own to the engine."""
    each = {f"{n}": (61, 60) for n in range(60)}
    talk = counts(3600, 1.0, by_prompt=each, finished=52, running=8, most_running=8)
    assert name_of(replays(turns=20), talk) in ("unknown", "lower")
    assert name_of(replays(), talk) == "dead"
    many = counts(3600, 1.0, by_prompt=each, finished=1000, running=8, most_running=8)
    assert name_of(replays(turns=20), many) == "dead"
    at_once = counts(3600, 1.0, by_prompt=each, finished=0, running=64, most_running=64)
    assert name_of(replays(turns=20), at_once) == "dead", "each that runs is another answer"
