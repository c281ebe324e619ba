"""Several engines (`service/monitor/live/watch.py`): which of them count, and what their verdicts say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.worker.live_fixtures import ALPHAS, RULE, VERSION, block, known, score, sound

from service.monitor.live.blocks import Block
from service.monitor.live.engine import DEAD_ROUNDS, Scan, at_common_depth
from service.monitor.live.replays import Replays
from service.monitor.live.watch import EngineVerdict, Watch, failed_pushes, push_is_due, watch


def replays(**more: Any) -> Replays:
    """Beside policy versions 1 and 2, an older one and a newer one."""
    found = Replays([score(0, ALPHAS), score(1, ALPHAS[:8], **more), score(2, ALPHAS[8:], **more), score(3, ALPHAS)])
    found.spread = 0.3
    return found


def dead() -> Block:
    return block(DEAD_ROUNDS, (15, 0, 0, 0), drafted=4)


def names(found: Watch) -> dict[str, str]:
    return {one.reporter: one.name for one in found.engines}


def test_engines_that_are_low_since_their_start_or_fell_say_so() -> None:
    low = [sound(1024, factor=0.5) for _ in range(4)]
    part = watch({"a": low, "b": [sound(4096)]}, replays(), RULE)
    assert names(part) == {"a": "lower", "b": "healthy"}, "it may have prompts that the trainer did not send"
    found = watch({"a": low, "b": [sound(4096)]}, replays(tokens=100_000), RULE)
    assert names(found) == {"a": "engine features", "b": "healthy"}
    assert found.engines[0].text.endswith(
        "so it has been from its first rounds: aux layers in another order, or other states than the trainer sends"
    )
    fell = watch({"a": [*[sound(1024) for _ in range(4)], *low], "b": [sound(4096)]}, replays(tokens=100_000), RULE)
    assert names(fell) == {"a": "stale weights", "b": "healthy"}
    assert fell.engines[0].text.endswith(
        "it began in the middle of a version, so it does not run the weights that it names, or samples at another "
        "temperature"
    )
    assert (found.hold, fell.hold) == (None, None)
    assert (fell.engines[0].sick, fell.engines[1].sick) == (True, False)
    assert fell.sick == {("a", VERSION)}


def test_all_engines_with_a_living_drafter_are_low_together() -> None:
    low = [sound(1024, factor=0.5) for _ in range(4)]
    both = watch({"a": low, "b": low, "c": [dead()], "d": [dead()]}, replays(tokens=100_000), RULE)
    assert names(both) == {"a": "trainer features", "b": "trainer features", "c": "dead", "d": "dead"}
    assert both.hold is not None
    assert both.hold.startswith("live and replay α disagree in 2 of 4 engines: a: live α")
    assert both.engines[0].text.endswith(
        ": so it is in all engines; the trainer's features are wrong, or the weights that the service serves"
    )
    alone = watch({"a": low, "c": [dead()]}, replays(tokens=100_000), RULE)
    assert names(alone) == {"a": "engine features", "c": "dead"}, "dead engines are no others"
    unknown = watch({"a": low, "b": low, "c": [sound(100)], "d": [sound(100)]}, replays(tokens=100_000), RULE)
    assert names(unknown)["a"] == "trainer features"
    assert unknown.hold is not None
    assert "in 2 of 2 engines" in unknown.hold, "who has too few rounds is not judged"


def test_all_engines_are_low_together_where_batches_hold_a_part_of_what_they_emitted() -> None:
    """The trainer may not have sent its hardest prompts."""
    low = [sound(1024, factor=0.5) for _ in range(4)]
    found = watch({"a": low, "b": low}, replays(), RULE)
    assert (names(found), found.hold) == ({"a": "lower", "b": "lower"}, None)
    assert found.engines[0].text.endswith(
        "so it is in all engines, and with no newer drafter more than with the oldest that is known; the trainer "
        "may send only its easier prompts, for batches are of a part of what engines emitted (engines that count by "
        "prompt tell), or its features are wrong"
    )
    assert watch({"a": low, "b": low, "c": [dead()]}, replays(), RULE).hold is None, "dead engines are no others"
    later = [replace(one, accepted=(one.accepted[0] * 2, *one.accepted[1:])) for one in low]
    assert watch({"a": later, "b": later}, replays(), RULE).hold is not None, "its first drafts are accepted"
    told = [replace(one, by_prompt={"0a1b2c3d": (one.tokens, one.rounds)}) for one in low]
    assert watch({"a": told, "b": told}, replays(), RULE).hold is not None, "they count by prompt"


def test_a_trainer_that_offered_all_of_it_to_its_hook_has_left_nothing_out() -> None:
    """The hook draws a part of it at random, which is not of the easier prompts."""
    low = [sound(1024, factor=0.5) for _ in range(4)]
    times = 2 * sum(one.tokens for one in low) / (100 * sum(ALPHAS[:8]))  # what both engines emitted, over the batch

    def held(answers: float, tokens: float, low: list[Block] = low) -> bool:
        """Whether publishing is, if batches were drawn from so many times the answers and tokens that make all."""
        scored = [score(policy, ALPHAS[:8]) for policy in range(3)]
        all_ = 64 * times, times * 100 * sum(ALPHAS[:8]) + 64 * times
        found = Replays([replace(one, offered=(round(answers * all_[0]), round(tokens * all_[1]))) for one in scored])
        found.spread = 0.3
        return watch({"a": low, "b": low}, found, RULE).hold is not None

    assert held(1.0, 1.0)
    assert not held(0.94, 0.94), "6 % were not offered"
    assert not held(0.8, 1.0), "what was sent is of shorter answers"
    assert not held(1.2, 1.0), "longer"
    assert held(0.95, 1.0)
    full = [replace(one, rounds=128, tokens=one.tokens // 8, drafted=512) for one in low for _ in range(8)]
    full = [replace(one, accepted=tuple(n // 8 for n in one.accepted)) for one in full]
    assert held(1.0, 1.0, full[1:]), "nothing of it is lost"
    assert not held(1.0, 1.0, full), "of 32 blocks the oldest may be the rest of a policy version"
    for answers, tokens in itertools.product((0.0, 1.0, 1e12), repeat=2):
        assert held(answers, tokens) == (answers == tokens > 0), "whatever a hook claims: what is odd does not count"


def test_what_policy_versions_without_a_batch_were_offered_is_compared_with_what_engines_emitted_for_them() -> None:
    """A hook says it with its next batch. Engines serve 30 versions, of which every tenth has one."""
    low = [replace(sound(128, factor=0.5), policy_version=policy) for policy in range(31)]
    each = 2 * low[0].tokens  # of both engines

    def held(share: float, engine: list[Block] = low) -> bool:
        """Whether publishing is, if hooks were offered this share of what engines emitted."""
        offered = round(share * 4000), round(share * 10 * each)
        found = Replays(
            [
                replace(score(policy, ALPHAS), rollouts=100, segments=0, tokens=each // 4, offered=offered)
                for policy in (0, 10, 20, 30)
            ]
        )
        found.spread = 0.3
        return watch({"a": engine, "b": engine}, found, RULE).hold is not None

    assert held(1.0)
    assert not held(0.6), "a trainer that dropped 40 %: the versions after the first batch count, not its own"
    assert held(1.0, low[11:]), "what the batch of version 20 was drawn from"
    assert not held(1.0, low[12:]), "a part of that, which nobody counted"
    assert held(1.0, low[:15])
    assert not held(0.7, low[:15]), "what the batch of version 20 was drawn from, nobody counted"


@pytest.mark.parametrize("booked", [lambda drawn: drawn, lambda drawn: drawn - drawn % 2, lambda drawn: drawn - 1])
def test_rounds_that_come_under_the_newest_version_of_a_batch_are_summed_over_versions(
    booked: Callable[[int], int],
) -> None:
    """Engines do not name theirs. Steps are of unlike size, and rounds of two may come under one."""
    sizes = [1024, 1536, 768, 1280, 1024, 896, 1664, 1152, 1024, 1280, 768, 1408]

    def held(share: float) -> bool:
        """Whether publishing is, if the trainer sends this share of what engines emitted."""
        low = [sound(rounds, factor=0.5) for rounds in sizes]
        engine = [replace(one, policy_version=booked(1 + n), named=False) for n, one in enumerate(low)]
        sent = [round(share * 2 * one.tokens) for one in (low[0], *low)]
        found = Replays([score(policy, ALPHAS[:8], segments=0, tokens=tokens) for policy, tokens in enumerate(sent)])
        found.spread = 0.3
        return watch({"a": engine, "b": engine}, found, RULE).hold is not None

    assert held(1.0)
    assert not held(0.7), "a trainer that drops 30 %"


def test_rounds_that_name_no_version_are_compared_with_the_next_one_too() -> None:
    """The batch of what an engine draws now comes later."""
    found = Replays([score(1, [2.0] * 8), score(3, [4.0] * 8), score(4, [4.0] * 8)])
    named, unnamed = sound(256), replace(sound(256), named=False)
    alphas = [replay.alpha() for one in (named, unnamed) if (replay := found.get(one)) is not None]
    assert alphas == [2.0, 3.0]
    assert found.get(unnamed) is found.get(unnamed), "their error is one"
    before = replace(unnamed, policy_version=0)
    assert found.get(before) is None
    newest = found.get(replace(unnamed, policy_version=4))
    assert newest is not None
    assert newest.alpha() == 4.0, "nothing is known of the next one"
    assert not named.joins(unnamed)
    found.spread = 0.3
    own, shared = (
        Scan(found).add(one).error
        for one_ in (named, unnamed)
        if (one := at_common_depth(replace(one_, policy_version=4), found, RULE)) is not None
    )
    assert shared > own, "the next window holds this version's replay as well"


def test_a_gap_that_grows_with_each_drafter_is_not_of_prompts_that_were_not_sent() -> None:
    versions = [f"v{n:06d}-0a1b2c3d" for n in range(1, 7)]
    scored = [score(1, ALPHAS, version=version, tokens=200) for version in versions]
    found = Replays([score(0, ALPHAS), *scored, score(2, ALPHAS)])

    def engine(rounds: int, *factors: float) -> list[Block]:
        return [
            replace(sound(rounds, factor=factor), drafter_version=version)
            for version, factor in zip(versions, factors, strict=False)
        ]

    steady, grows = engine(2048, *[0.6] * 6), engine(2048, 0.8, 0.8, 0.6, 0.5, 0.4, 0.3)
    assert watch({"a": steady, "b": steady}, found, RULE).hold is None
    assert watch({"a": grows, "b": grows}, found, RULE).hold is not None
    new = [*grows[:5], replace(sound(400, factor=0.75), drafter_version=versions[5])]
    assert watch({"a": new, "b": new}, found, RULE).hold is not None, "a new drafter's first rounds say little"
    lost = [replace(dead(), drafter_version=versions[0])]
    assert watch({"a": grows, "b": grows, "c": lost}, found, RULE).hold is not None, "a dead engine tells no gap"
    for first in (scored, [score(0, ALPHAS), *scored], [*scored, score(2, ALPHAS)]):
        assert watch({"a": steady, "b": steady}, Replays(first), RULE).hold is None, (
            "fewer than three versions are scored"
        )
    heals = engine(2048, 0.8, 0.8, 0.4, 0.5, 0.8, 0.8)
    assert watch({"a": heals, "b": heals}, found, RULE).hold is None, (
        "with the newest two it is as it was with the first"
    )
    few = engine(RULE.min_rounds // 2 - 1, *[0.2] * 6)
    assert watch({"a": few, "b": few}, found, RULE).hold is not None, "no drafter has enough rounds to tell"


def test_a_gap_that_was_as_large_before_is_not_of_features_that_heal_in_replay() -> None:
    """Beside a trainer that drops prompts live may fall while replay rises, by another choice of prompts."""
    versions = [f"v{n:06d}-0a1b2c3d" for n in range(1, 4)]
    alphas = (ALPHAS, [alpha - 0.8 for alpha in ALPHAS], ALPHAS)
    scored = [score(1, own, version=version, tokens=200) for version, own in zip(versions, alphas, strict=True)]
    found = Replays([score(0, ALPHAS), *scored, score(2, ALPHAS)])
    engine = [
        replace(sound(4096, factor=factor), drafter_version=version)
        for version, factor in zip(versions, (0.6, 0.7, 0.6), strict=True)
    ]
    verdicts = watch({"a": engine, "b": engine}, found, RULE)
    assert (names(verdicts), verdicts.hold) == ({"a": "lower", "b": "lower"}, None)


@pytest.mark.parametrize(("high", "held"), [(4, True), (3, False)])
def test_four_of_five_above_replay_are_the_trainers(high: int, held: bool) -> None:
    above, known_ = sound(4096, factor=1.9), replays()
    known_.response_tokens = None
    engines = {f"{n}": [above] for n in range(high)} | {f"{n}": [sound(4096)] for n in range(high, 5)}
    found = watch(engines, known_, RULE)
    assert set(names(found).values()) == {"healthy", "trainer features" if held else "unknown"}
    assert found.engines[0].text.endswith(
        "more than the drafter could accept; the trainer's features or log-probabilities that are replayed are wrong, "
        "or of other weights"
        if held
        else "its prompts are easier than the trainer's, or than those of other engines"
    )
    assert (found.hold is not None) == held
    assert watch({"a": [sound(100)]}, known_, RULE).hold is None


def test_an_engine_that_may_have_harder_prompts_is_told_how_to_tell() -> None:
    found_ = known()
    found_.spread, found_.answered = 0.0005, {1: 4 * 4096 * 2.775}
    found = watch({"a": [sound(4096, factor=0.88)], "b": [sound(4096)]}, found_, RULE)
    assert names(found) == {"a": "lower", "b": "healthy"}
    assert (
        ": harder prompts may be why (spread each prompt's answers over the engines to tell); if they are not, so it "
        "has been from its first rounds: aux layers"
    ) in found.engines[0].text
    assert not found.engines[0].sick


def test_a_dead_engine_is_pushed_to_again_after_pauses_that_double() -> None:
    verdict = EngineVerdict("a", "dead", "", since=100.0)
    assert push_is_due(RULE, verdict, [], 100.0)
    assert not push_is_due(RULE, verdict, [90.0], 119.9), "a push before it died keeps the next one away as well"
    assert push_is_due(RULE, verdict, [90.0], 120.0)
    for failed, pause in (([110.0], 30.0), ([110.0, 140.0], 60.0), ([110.0 + n for n in range(9)], 1800.0)):
        assert failed_pushes(verdict, [100.0, *failed]) == failed
        assert not push_is_due(RULE, verdict, failed, failed[-1] + pause - 0.1)
        assert push_is_due(RULE, verdict, failed, failed[-1] + pause)
    assert push_is_due(RULE, verdict, [500.0], 400.0), "a clock was set back"
    assert failed_pushes(replace(verdict, since=None), [110.0]) == []
