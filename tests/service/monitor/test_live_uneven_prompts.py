"""An engine that counts no prompts apart may have the harder ones: it is blamed only for what these do not explain.

The worlds are those of `UNEVEN` in benchmarks/live_replay.py, on which the rule was not made.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.live_replay import (
    SELECTED,
    UNCOUNTED,
    UNEVEN,
    WORLDS,
    Case,
    cases,
    false_names,
    only,
    poisoned,
    readings_held,
    scaled,
    sick_among_sound,
    until_named,
)
from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays, VersionReplay
from service.monitor.live.watch import watch
from service.monitor.records import DrafterSums, Replayed, ScoreRecord

RULE = LiveRule()
NAMED = {world.name: world for world in (*WORLDS, *UNCOUNTED, *UNEVEN)}
#: Worlds, and whether an engine is lower than replay there for its prompts.
SOUND = {
    "one engine has the hardest prompts, not counted by prompt": True,
    "each engine has a dataset": True,
    "one engine has long contexts": True,
    "the hardest go to another engine each 10 versions": True,
    "the hardest half reports alone": True,
    "the easiest quarter reports alone": False,
}


@pytest.mark.parametrize(("name", "lower"), SOUND.items(), ids=SOUND)
def test_a_sound_engine_is_not_blamed_for_its_prompts(name: str, lower: bool) -> None:
    """Nor is the trainer, whichever of the engines report; publishing goes on."""
    called, _, holds, names = false_names(NAMED[name], 4, 24, 900, RULE)
    assert (called, holds) == (0, 0), names
    assert (names["lower"] > 0) == lower, "else this shows nothing"


SICK = [
    ("usual", "half dead (1.75 against 3.04)", 2048),
    ("one engine has the hardest prompts, not counted by prompt", "lost weights (1.01)", 2048),
    ("one engine has the hardest prompts, not counted by prompt", "drafts 2 and not 4", 2048),
    ("each engine has a dataset", "half dead (1.75 against 3.04)", 6144),
]


@pytest.mark.parametrize(("name", "fault", "most"), SICK)
def test_a_sick_engine_is_named_where_its_prompts_do_not_explain_it(name: str, fault: str, most: int) -> None:
    case = next(case for case in cases() if case.name == fault)
    rounds, _, others = until_named(NAMED[name], case, 900, RULE)
    assert max(n or math.inf for n in rounds) <= most
    assert not [said for said in others if said.startswith("sound")], others


@pytest.mark.parametrize("seed", [5005, 5007])
def test_sick_engines_do_not_hold_publishing_where_the_policy_moves_fast(seed: int) -> None:
    """Their live α falls while replay rises with the policy; sound engines beside them show that replay is right."""
    for case in (case for case in sick_among_sound() if "half dead" in case.name):
        assert readings_held(NAMED["policy moves fast"], case, seed, RULE, 20) == 0, case.name


def test_features_that_no_engine_has_hold_publishing_where_the_policy_moves_fast() -> None:
    assert readings_held(NAMED["policy moves fast"], poisoned(4), 5005, RULE, 20) > 5


def test_prompts_that_a_trainer_does_not_send_hold_nothing_where_engines_count_by_prompt() -> None:
    """By the sums all engines are a fifth below replay, of which the hardest prompts are missing."""
    called, _, holds, names = false_names(SELECTED[0], 4, 10, 900, RULE)
    assert (called, holds) == (0, 0), names
    assert names["lower"] > 0, "else this shows nothing"
    low = next(case for case in cases() if case.name == "all engines low")
    rounds, _, _ = until_named(SELECTED[0], low, 900, RULE)
    assert max(n or math.inf for n in rounds) <= 8192


def test_prompts_that_a_trainer_does_not_send_hold_nothing_where_engines_do_not_count_by_prompt() -> None:
    """The first drafter is as far below replay as each later one."""
    called, _, holds, names = false_names(SELECTED[1], 4, 20, 900, RULE)
    assert (called, holds) == (0, 0), names
    assert names["lower"] == 4, "else this shows nothing"


def test_features_that_break_beside_prompts_that_are_not_sent_hold_publishing() -> None:
    """Later drafters are further below replay than the first one."""
    low = next(case for case in cases() if case.name == "all engines low")
    assert readings_held(SELECTED[1], low, 900, RULE, 20) > 5
    assert readings_held(SELECTED[1], poisoned(4), 900, RULE, 25) > 5


def test_features_that_are_wrong_from_the_start_hold_publishing_where_the_hook_takes_a_part_at_random() -> None:
    """It says what it drew from. In the second world that is less than engines emitted, so prompts may be missing."""
    every = (0, 1, 2, 3)
    wrong = Case("wrong from the start", ("trainer features",), only(scaled(2.2), every, 0), sick=every, onset=0)
    sound = Case("sound", ())
    whole, selected = SELECTED[2:]
    assert readings_held(whole, wrong, 900, RULE, 12) > 10
    assert readings_held(selected, wrong, 900, RULE, 12) <= 3, "held while two policy versions are known"
    assert readings_held(whole, sound, 900, RULE, 12) == 0
    shortest = replace(whole, sorted=True)
    assert readings_held(shortest, sound, 901, RULE, 20) <= 6, "of a start's first version nobody knows the size"


# --- what the hardest prompts give
PROMPTS = st.lists(st.tuples(st.integers(20, 60), st.floats(1.0, 5.0)), min_size=2, max_size=12)


def cell(prompts: Any, *, told_apart: bool) -> VersionReplay:
    """Replay of prompts, of each its tokens and α."""
    each = {f"{n:08x}": (float(tokens), tokens / alpha) for n, (tokens, alpha) in enumerate(prompts)}
    return VersionReplay(DrafterSums.of(*zip(*each.values(), strict=True)), (), (), each if told_apart else {})


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.data())
def test_no_part_of_the_prompts_is_harder_than_the_hardest_or_easier_than_the_easiest(prompts: Any, data: Any) -> None:
    found = cell(prompts, told_apart=True)
    part = data.draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=len(prompts) - 1, unique_by=id))
    tokens = sum(own for own, _ in part)
    ratio = tokens / sum(own / alpha for own, alpha in part) / (found.tokens / found.rounds)
    share = tokens / found.tokens
    assume(share < 0.95)  # else it is taken for all
    assert found.hardest_ratio(share) <= ratio * 1.000001
    assert found.easiest_ratio(share) >= ratio * 0.999999


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1.0, 5.0), min_size=2, max_size=12), st.integers(1, 11))
def test_prompts_that_are_not_told_apart_are_taken_to_be_harder_yet(alphas: list[float], count: int) -> None:
    """Of as many tokens each."""
    prompts, share = [(40, alpha) for alpha in alphas], min(count, len(alphas) - 1) / len(alphas)
    apart, sums = (cell(prompts, told_apart=told_apart) for told_apart in (True, False))
    assert sums.hardest_ratio(share) <= apart.hardest_ratio(share) * 1.000001
    assert sums.easiest_ratio(share) >= apart.easiest_ratio(share) * 0.999999


def test_an_engine_that_answers_everything_has_no_harder_prompts() -> None:
    found = cell([(40, 1.5), (40, 4.0)], told_apart=True)
    assert (found.hardest_ratio(0.95), found.easiest_ratio(0.95)) == (1.0, 1.0)
    assert math.isclose(found.hardest_ratio(0.5), 1.5 * found.rounds / found.tokens)


@pytest.mark.parametrize(("others", "name"), [(0, "engine features"), (3, "lower")])
def test_what_others_answered_is_known_from_the_batches_though_they_report_nothing(others: int, name: str) -> None:
    """One engine at α 2, of prompts of which half have α 2 and half α 4."""
    scores, blocks = [], []
    for step in range(8):
        each = {f"{step:04x}{n:04x}": (120.0, 120.0 / (2.0 + 2.0 * (n % 2))) for n in range(16)}
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        told = (Replayed("v1", sums, by_prompt=each),)
        scores.append(
            ScoreRecord(
                replayed=told,
                drafter_version="v1",
                policy_version=step,
                entry_id=f"{step + 1}-0",
                tokens=1024 * (1 + others),
            )
        )
        blocks.append(Block("v1", step, 512, 1024, None, (), 0.0))
    assert [one.name for one in watch({"a": blocks}, Replays(scores), RULE).engines] == [name]
