"""One engine beside replay (`service/monitor/live/engine.py`): depth, sums, bounds and words, each by its figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.worker.live_fixtures import ALPHAS, RULE, VERSION, block, known, score, sound

from service.monitor.live.blocks import Block
from service.monitor.live.engine import (
    DEAD_ROUNDS,
    LiveRule,
    Matched,
    Scan,
    Stretch,
    _above_band,
    _agrees_on_replayed_prompts,
    _may_be_hard,
    _PromptBounds,
    at_common_depth,
    compared_depth,
    depth_differs,
    explained_by_prompts,
    find_difference,
    was_sound_before,
)
from service.monitor.live.hard import PromptsBehind, chance_of_hard
from service.monitor.live.replays import Replays, VersionReplay
from service.monitor.live.watch import EngineVerdict, Watch
from service.monitor.records import DrafterSums, Replayed, ScoreRecord


# --- the depth that both have
def test_a_deeper_engine_is_compared_by_its_first_positions() -> None:
    replays = known(parts=(3, 1))
    deep = block(1000, (900, 800, 400, 200))
    found = at_common_depth(deep, replays, RULE)
    assert found is not None
    assert found.tokens == 1000 + 900 + 800
    assert found.expected == pytest.approx(1000 * found.replay.tokens / found.replay.rounds)
    assert compared_depth(found, RULE) == 2.0
    assert depth_differs([found], RULE, "?") == (
        "it drafts 4 tokens a round where the service replays and trains 2; at the depth that both have ?"
    )
    untold = Block(VERSION, 1, 1000, 3300, 4000, (), 0.0)
    assert at_common_depth(untold, replays, RULE) is None, "its first positions are not known"


def test_a_shallower_engine_is_compared_with_the_first_positions_of_replay() -> None:
    found = at_common_depth(block(1000, (600, 450)), known(), RULE)
    assert found is not None
    assert found.tokens == 2050
    accepted, rounds = found.replay.accepted, found.replay.rounds
    assert found.expected == pytest.approx(1000 * (1 + sum(accepted[:2]) / rounds))
    assert compared_depth(found, RULE) == 2.0
    part = at_common_depth(Block(VERSION, 1, 1000, 2050, 2500, (), 0.0), known(), RULE)
    assert part is not None
    assert part.expected == pytest.approx(1000 * (1 + (sum(accepted[:2]) + accepted[2] / 2) / rounds))


@pytest.mark.parametrize("parts", [(8, 7, 6, 5, 4, 3, 2, 1), (4, 3, 2, 1)], ids=["as deep as replay", "deeper"])
@pytest.mark.parametrize("bad", [1.0, 0.1])
def test_an_engine_whose_depth_varies_is_compared_by_the_first_draft_of_each_round(
    parts: tuple[int, ...], bad: float
) -> None:
    """Half of its rounds have 8 drafts and half have 1, as by vLLM's list of depths by batch size."""
    replays = known(parts=parts)
    replay = replays._replays[VERSION, 1]
    shares = [kept / replay.rounds for kept in replay.accepted] + [replay.accepted[-1] / replay.rounds / 2] * 4
    kept = tuple(round(100_000 * bad * share / (2 if place else 1)) for place, share in enumerate(shares[:8]))
    engine = Block(VERSION, 1, 100_000, 100_000 + sum(kept), 450_000, kept, 0.0)
    found = at_common_depth(engine, replays, RULE)
    assert found is not None
    assert compared_depth(found, RULE) == 1.0
    assert found.tokens == pytest.approx(100_000 * (1 + bad * shares[0]), abs=1)
    assert found.expected == pytest.approx(100_000 * (1 + shares[0]))
    assert find_difference([engine], replays, RULE).kind in (("low",) if bad < 1 else ("depth", "healthy"))


def test_counts_of_positions_that_it_does_not_draft_do_not_make_its_depth_vary() -> None:
    """An engine may count more positions than it drafts, without a draft there."""
    padded = at_common_depth(block(1000, (600, 450, 0, 0), drafted=2), known(), RULE)
    assert padded is not None
    assert compared_depth(padded, RULE) == 2.0
    for drafted, tokens, depth in ((1000, 1600, 1.0), (1750, 1601, 1.75), (1749, 1600, 1.0)):
        found = at_common_depth(Block(VERSION, 1, 1000, 1601, drafted, (600, 1), 0.0), known(parts=(3, 1)), RULE)
        assert found is not None
        assert (found.tokens, compared_depth(found, RULE)) == (tokens, depth)


def test_where_no_depth_is_known_it_is_that_of_replay_or_the_rule() -> None:
    untold = Block(VERSION, 1, 1000, 3000, None, (), 0.0)
    found = at_common_depth(untold, known(), RULE)
    assert found is not None
    assert compared_depth(found, RULE) == 4.0
    assert depth_differs([found], RULE, "?") is None
    between = at_common_depth(Block(VERSION, 1, 1000, 2700, 3500, (), 0.0), known(), RULE)
    assert between is not None
    assert between.expected == pytest.approx(1000 * (between.replay.alpha(3.5) or 0.0))
    whole = at_common_depth(Block(VERSION, 1, 1000, 2700, 3995, (), 0.0), known(), RULE)
    assert whole is not None
    assert whole.expected == pytest.approx(1000 * (whole.replay.alpha() or 0.0), rel=1e-12), "a hundredth is no part"
    bare = Replays([ScoreRecord(served=DrafterSums.of([300.0], [100.0]), drafter_version=VERSION, policy_version=1)])
    found = at_common_depth(untold, bare, LiveRule(depth=3))
    assert found is not None
    assert compared_depth(found, LiveRule(depth=3)) == 3.0
    flips = found.replay.flips
    assert Scan(bare).add(found).error == pytest.approx(math.sqrt(flips / 1000)), "of prompts' spread nothing is known"
    as_deep = at_common_depth(Block(VERSION, 1, 1000, 3000, 3000, (), 0.0), bare, LiveRule(depth=3))
    assert as_deep is not None
    assert as_deep.expected == pytest.approx(1000 * 3.0)
    shallow = Block(VERSION, 1, 1000, 2000, 2000, (), 0.0)
    assert at_common_depth(shallow, bare, RULE) is None, "replay has no counts by position"
    assert at_common_depth(block(100, (50,), policy=7), known(), RULE) is None


@pytest.mark.parametrize(("last", "depth"), [(400, 3.0), (399, 4.0), (80, 4.0)])
def test_an_engine_does_not_draft_where_nothing_is_accepted_and_replay_expects_80(last: int, depth: float) -> None:
    """Of drafts kept at the third position replay keeps a fifth at the fourth."""
    replays = Replays([score(1, ALPHAS[:8], parts=(5, 4, 2.5, 0.5))])
    found = at_common_depth(block(2000, (900, 700, last, 0), drafted=4), replays, RULE)
    assert found is not None
    assert compared_depth(found, RULE) == depth
    assert (depth_differs([found], RULE, "?") is None) == (depth == 4.0)


def test_a_first_position_alone_may_be_all_that_is_drafted() -> None:
    found = at_common_depth(block(2000, (900, 0, 0, 0), drafted=4), known(), RULE)
    assert found is not None
    assert compared_depth(found, RULE) == 1.0
    nothing = at_common_depth(block(2000, (0, 0, 0, 0), drafted=4), known(), RULE)
    assert nothing is not None
    assert compared_depth(nothing, RULE) == 4.0, "that it accepts nothing says nothing of its depth"
    one = at_common_depth(block(2000, (900, 700, 500, 1), drafted=4), known(), RULE)
    assert one is not None
    assert compared_depth(one, RULE) == 4.0


def test_a_position_that_replay_did_not_come_to_expects_nothing() -> None:
    sums = DrafterSums.of([300.0] * 9, [100.0] * 9)
    told = Replayed(VERSION, sums, (900.0, 900.0, 0.0), (900.0, 900.0, 0.0))
    replays = Replays([ScoreRecord(served=sums, replayed=(told,), drafter_version=VERSION, policy_version=1)])
    found = at_common_depth(block(2000, (2000, 1900, 0), drafted=3), replays, RULE)
    assert found is not None
    assert compared_depth(found, RULE) == 3.0


def test_a_quarter_of_a_token_is_no_other_depth() -> None:
    for drafted, differs in ((4250, False), (4251, True), (3750, False), (3749, True)):
        one = at_common_depth(Block(VERSION, 1, 1000, 2700, drafted, (850, 450, 250, 150), 0.0), known(), RULE)
        assert one is not None
        assert (depth_differs([one], RULE, "?") is not None) == differs
    last = at_common_depth(block(1000, (600, 450)), known(), RULE)
    first = at_common_depth(sound(1000), known(), RULE)
    assert last is not None
    assert first is not None
    assert depth_differs([first, last], RULE, "?") is not None
    assert depth_differs([last, first, first], RULE, "?") is None, "the newest block counts"


# --- the statistic
def test_the_variance_of_a_stretch_is_that_of_its_rounds_and_of_the_replay_it_rests_on() -> None:
    replays = known()
    replays.outlier = 300.0
    blocks = [sound(700, 1), sound(500, 2), sound(300, 2)]
    matched = [found for one in blocks if (found := at_common_depth(one, replays, RULE)) is not None]
    scan, by_replay, squares = Scan(replays), dict[int, float](), 0.0
    spread = replays.spread
    assert spread is not None
    for n, one in enumerate(matched, 1):
        stretch = scan.add(one)
        by_replay[id(one.replay)] = by_replay.get(id(one.replay), 0.0) + one.expected
        squares += (spread + one.replay.flips) * one.expected**2 / one.rounds
        expected = sum(k.expected for k in matched[:n])
        shared = {id(k.replay): k.replay.rounds for k in matched[:n]}
        variance = squares + sum(spread * by_replay[key] ** 2 / rounds for key, rounds in shared.items()) + 100.0**2
        tokens, rounds = sum(k.tokens for k in matched[:n]), sum(k.rounds for k in matched[:n])
        assert stretch.error == pytest.approx(math.sqrt(variance) / expected)
        assert stretch.log_ratio == pytest.approx(math.log(tokens / expected))
        assert stretch.rounds == rounds
        assert stretch.live_alpha == pytest.approx(tokens / rounds)
        assert stretch.replay_alpha == pytest.approx(expected / rounds)
    without = Scan(replays, outliers=False).add(matched[0])
    assert without.error < Scan(replays).add(matched[0]).error
    nothing = Matched(matched[0].block, matched[0].replay, 700, 0.0, 2000.0, 800.0)
    assert Scan(replays).add(nothing).log_ratio == pytest.approx(math.log(1 / 2000))


def test_the_variance_of_blocks_that_are_known_by_prompt_is_that_of_the_differences() -> None:
    replays = known()
    replays.paired = (2.5, 60.0)
    found = at_common_depth(sound(500, by_prompt={"00010000": (1000, 400), "00010003": (300, 100)}), replays, RULE)
    assert found is not None
    assert found.paired
    assert (found.rounds, found.tokens) == (500, 1300)
    assert found.expected == pytest.approx(400 * 2.6 + 100 * 2.75)
    assert found.replayed == 200
    scan, expected, before = Scan(replays), found.expected, Scan(replays).add(found)
    assert before.error == pytest.approx(math.sqrt(2.5 * expected + 20.0**2) / expected)
    scan.add(found)
    assert scan.add(found).error == pytest.approx(math.sqrt(2.5 * 2 * expected + 20.0**2) / (2 * expected))
    shallow = sound(500, by_prompt=found.block.by_prompt)
    shallow = replace(shallow, drafted=1500, accepted=shallow.accepted[:3])
    other = at_common_depth(shallow, replays, RULE)
    assert other is not None
    assert not other.paired, "replay by prompt is of the whole depth"
    for rounds, paired in ((526, True), (527, False)):
        most = at_common_depth(replace(found.block, rounds=rounds, drafted=4 * rounds), replays, RULE)
        assert most is not None
        assert most.paired == paired, "of 95 % of its rounds the prompts must be known"
    whole = Matched(found.block, found.replay, 500, 1300.0, expected, 800.0)
    unpaired = Scan(replays).add(whole).error
    replays.paired = None
    assert Scan(replays).add(whole).error == unpaired, "a block that is not known by prompt has the prompts' spread"


@pytest.mark.parametrize(("accepted", "reached"), [(4, 1), (4, 2), (2, 4), (1, 4)])
def test_a_replay_that_counted_few_positions_says_nothing_of_the_next(accepted: int, reached: int) -> None:
    replay = VersionReplay(DrafterSums.of([300.0] * 9, [100.0] * 9), (700.0,) * accepted, (900.0,) * reached)
    one = Matched(block(2000, (900, 800, 0, 0), drafted=4), replay, 2000, 1.0, 1.0, 1.0)
    assert compared_depth(one, RULE) == min(4.0, accepted)


def test_a_position_that_replay_hardly_came_to_tells_a_share_too() -> None:
    replay = VersionReplay(DrafterSums.of([300.0] * 9, [100.0] * 9), (800.0, 0.4), (900.0, 0.5))
    one = Matched(block(2000, (900, 0), drafted=2), replay, 2000, 1.0, 1.0, 1.0)
    assert compared_depth(one, RULE) == 1.0


# --- what the choice of prompts explains
def test_the_share_that_an_engine_answers_is_of_the_tokens_of_its_policy_version() -> None:
    replays, error = known(), 0.0001
    replay = replays._replays[VERSION, 1]
    replays.answered = {1: 4.0}
    limit = -RULE.dead_band - RULE.certain * error
    for policy, ratio in ((1, replay.hardest_ratio(0.25)), (7, 1.0)):
        bounds = _PromptBounds(replays)
        bounds.add(Matched(Block(VERSION, policy, 1, 1, None, (), 0.0), replay, 1, 1.0, 2.0, 800.0))
        for more, held in ((0.001, True), (-0.001, False)):
            assert bounds.hold(Stretch(1, 1.0, 1.0, math.log(ratio) + limit + more, error), RULE) == held


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("hardest", [True, False])
def test_an_engine_is_beyond_its_prompts_by_the_band_and_errors(share: float, hardest: bool) -> None:
    replays, error = known(), 0.01
    replay = replays._replays[VERSION, 1]
    ratio = replay.hardest_ratio(share) if hardest else replay.easiest_ratio(share)
    bound = math.log(ratio) + (-RULE.dead_band if hardest else RULE.above_band)
    limit = bound + (-1 if hardest else 1) * RULE.certain * error
    tokens = round(share * replays.answered[1])
    one = Matched(Block(VERSION, 1, 100, tokens, None, (), 0.0), replay, 100, float(tokens), 280.0, 800.0)
    half = Matched(Block(VERSION, 1, 50, tokens // 2, None, (), 0.0), replay, 50, tokens / 2, 140.0, 800.0)
    for parts in ([one], [half, half]):
        bounds = _PromptBounds(replays)
        for part in parts:
            bounds.add(part)
        for more, held in ((0.002, hardest), (-0.002, not hardest)):
            assert bounds.hold(Stretch(100, 1.0, 1.0, limit + more, error), RULE) == held
    paired = _PromptBounds(replays)
    for _ in range(2):
        paired.add(Matched(one.block, replay, 100, 100.0, 280.0, 800.0, paired=True))
    assert not paired.hold(Stretch(100, 1.0, 1.0, math.log(ratio) + (-0.1 if hardest else 0.2), error), RULE)
    paired.add(one)
    mean = (560 + 280 * ratio) / 840
    limit = math.log(mean) + (-RULE.dead_band if hardest else RULE.above_band) + (-1 if hardest else 1) * 4.5 * error
    for more, held in ((0.002, hardest), (-0.002, not hardest)):
        assert paired.hold(Stretch(100, 1.0, 1.0, limit + more, error), RULE) == held


def test_each_part_up_to_the_newest_must_be_explained_where_that_is_asked() -> None:
    replays = known()
    replays.spread = 0.01
    low, high = (at_common_depth(sound(2000, factor=f), replays, RULE) for f in (0.3, 1.1))
    assert low is not None
    assert high is not None
    assert explained_by_prompts([], replays, RULE, suffixes=True)
    assert not explained_by_prompts([low], replays, RULE, suffixes=False)
    assert explained_by_prompts([high], replays, RULE, suffixes=True)
    newest_low = [low, *[high] * 60]
    assert explained_by_prompts(newest_low, replays, RULE, suffixes=False)
    assert not explained_by_prompts(newest_low, replays, RULE, suffixes=True)


# --- findings and their words
def told(*blocks: Block, replays: Replays | None = None) -> tuple[str, str]:
    found = find_difference(blocks, known() if replays is None else replays, RULE)
    return found.kind, found.text


def test_what_cannot_be_judged_says_why() -> None:
    assert told(sound(500, policy=1, drafted=4), replays=Replays([])) == (
        "unknown",
        "no replay α of what it drafts with, on rollouts drawn evenly from the same policy version, so far",
    )
    assert told(sound(199)) == ("unknown", "199 rounds so far; 200 are needed to judge")
    assert told(sound(200))[0] == "healthy"
    few = Replays([score(1, ALPHAS[:3])])
    assert told(sound(500), replays=few) == (
        "unknown",
        "too few rollouts are scored to say how far live and replay α may differ",
    )


def test_a_sound_engine_and_one_that_drafts_less_say_by_how_much() -> None:
    found = find_difference([sound(1000)], known(), RULE)
    stretch = found.stretch
    assert stretch is not None
    text = f"live α 2.77 over 1,000 rounds against replay α 2.77 (-0 % ± {200 * stretch.error:.0f} %)"
    assert (found.kind, found.text.replace("+0", "-0")) == ("healthy", f"{text}: they agree")
    shallow = find_difference([block(1000, (716, 536))], known(), RULE)
    assert shallow.kind == "depth"
    assert shallow.text.endswith("at the depth that both have it accepts what replay says")


def test_an_engine_that_accepts_nothing_says_so_since_when() -> None:
    nothing = block(DEAD_ROUNDS, (15, 0, 0, 0), drafted=4, since=7.0)
    found = find_difference([sound(500), nothing], known(), RULE)
    assert (found.kind, found.since) == ("dead", 7.0)
    assert found.text == "live α 1.01 over 1,536 rounds against replay α 2.98"
    assert found.stretch is not None
    assert found.stretch.rounds == 1536
    assert found.stretch.live_alpha == pytest.approx(1551 / 1536)
    assert found.stretch.replay_alpha == pytest.approx(2.975)
    assert found.stretch.log_ratio == pytest.approx(math.log(1551 / 1536 / 2.975))
    spread = known().spread
    assert spread is not None
    assert found.stretch.error == pytest.approx(math.sqrt(max(spread, 1.0) / 1536))


def test_before_so_many_rounds_hard_prompts_may_be_why() -> None:
    replays = known()
    replays.outlier = 10_000.0
    nothing = block(400, (4, 0, 0, 0), drafted=4, policy=9)
    assert told(nothing, replays=replays) == (
        "unknown",
        "live α 1.01 over 400 rounds against replay α 2.98: a hard prompt may do that",
    )
    assert told(nothing)[0] == "dead"
    assert told(block(199, (0, 0, 0, 0), drafted=4, policy=9))[0] == "unknown", "200 rounds are needed"
    for rounds, kind in ((DEAD_ROUNDS, "dead"), (DEAD_ROUNDS - 1, "unknown")):
        assert told(block(rounds, (15, 0, 0, 0), drafted=4, policy=9), replays=replays)[0] == kind
    older, newest = (block(rounds, (0, 0, 0, 0), drafted=4, policy=9) for rounds in (300, 100))
    assert told(older, newest)[0] == "dead", "200 rounds of all blocks with the version"
    other = block(400, (4, 0, 0, 0), drafted=4)
    unscored = Replays([score(1, ALPHAS[:8], version="v000002-0a1b2c3d")])
    assert told(other, replays=unscored) == (
        "unknown",
        "live α 1.01, but no replay α of this version to compare with",
    )


@pytest.mark.parametrize(("alpha", "kind"), [(1.3, "healthy"), (1.31, "dead")])
def test_a_drafter_that_is_bad_in_replay_too_is_not_dead(alpha: float, kind: str) -> None:
    replays = Replays([score(1, [alpha] * 16)])
    nothing = block(DEAD_ROUNDS, (15, 0, 0, 0), drafted=4, policy=9)
    assert told(nothing, replays=replays)[0] == kind
    if kind == "healthy":
        assert told(nothing, replays=replays)[1].endswith("against replay α 1.30: they agree; it is bad, not dead")


def test_live_at_most_one_and_a_twentieth_is_dead() -> None:
    for kept, kind in ((100, "dead"), (101, "low")):
        found = find_difference([block(2000, (kept, 0, 0, 0), drafted=4)], known(), RULE)
        assert found.kind == kind


def test_how_far_one_prompt_may_be_off_widens_what_hard_prompts_explain() -> None:
    replays = known()
    spread, ratio, rounds = replays.spread, math.log(404 / 400 / 2.975), 400
    assert spread is not None
    limit = ((ratio + RULE.dead_band) / RULE.certain) ** 2 * rounds
    outlier = 3 * 2.975 * math.sqrt((limit - spread) * rounds)
    for factor, kind in ((0.98, "dead"), (1.02, "unknown")):
        replays.outlier = factor * outlier
        assert told(block(400, (4, 0, 0, 0), drafted=4, policy=9), replays=replays)[0] == kind
    for older in (sound(1000), replace(sound(1000), drafter_version="v000000-0a1b2c3d")):
        found = find_difference([older, block(400, (4, 0, 0, 0), drafted=4, policy=9)], replays, RULE)
        assert found.kind == "unknown"
        assert found.text.endswith("a hard prompt may do that")


def test_all_prompts_behind_the_rounds_may_be_hard() -> None:
    replays, held = known(), set()
    share = replays.prompts.hard_share(1550, 1536)
    for requests in range(8, 4000, 8):
        newest = block(1536, (14, 0, 0, 0), drafted=4, finished=requests, running=0, most_running=16)
        behind = PromptsBehind(8.0, 1.0, [newest])
        behind.add(newest)
        chance = chance_of_hard(requests / 8, 2.0, share)
        assert _may_be_hard(behind, replays, 1550, 1536) == (chance > 2e-5)
        held.add(chance > 2e-5)
    assert held == {True, False}


# --- how far above replay
def test_tokens_past_the_end_of_an_answer_may_put_an_engine_above_replay() -> None:
    replays = known()
    replays.response_tokens, replays.spread = 10.0, 0.1
    untrimmed = at_common_depth(sound(4096), replays, RULE)
    assert untrimmed is not None
    trimmed = replace(untrimmed, block=replace(untrimmed.block, tokens=untrimmed.block.tokens - 1))
    assert _above_band([untrimmed, trimmed], replays, RULE) == pytest.approx(0.15 + math.log1p(4 / 10))
    assert _above_band([trimmed, trimmed], replays, RULE) == 0.15
    high = sound(4096, factor=1.45)
    assert told(high, replays=replays)[0] == "healthy"
    assert told(replace(high, tokens=high.tokens - 1), replays=replays)[0] == "above"
    replays.response_tokens = None
    assert _above_band([untrimmed], replays, RULE) == 0.15


# --- stretches that are judged
@pytest.mark.parametrize(("factor", "kind"), [(0.4, "low"), (1.9, "above")])
def test_a_difference_begins_with_its_first_block_and_ends_when_newer_ones_say_so(factor: float, kind: str) -> None:
    replays = known()
    replays.spread, replays.response_tokens = 0.3, None
    before, now = [sound(512) for _ in range(6)], [sound(512, factor=factor) for _ in range(4)]
    found = find_difference([*before, *now], replays, RULE)
    assert (found.kind, len(found.before), len(found.blocks)) == (kind, 6, 4)
    stretch = found.stretch
    assert stretch is not None
    difference = 100 * math.expm1(stretch.log_ratio)
    assert found.text == (
        f"live α {stretch.live_alpha:.2f} over 2,048 rounds against replay α {stretch.replay_alpha:.2f} "
        f"({difference:+.0f} % ± {200 * stretch.error:.0f} %)"
    )
    assert abs(difference) > 30
    after = find_difference([*before, *now, *before[:3]], replays, RULE)
    assert (after.kind, len(after.blocks)) == ("healthy", 3)
    again = find_difference([*before, *now, *before[:3], *now], replays, RULE)
    assert (again.kind, len(again.blocks)) == (kind, 4)


def part(rounds: int, alpha: float, *prompts: int, policy: int = 1) -> Block:
    """Rounds of these prompts, equally many of each, which `known` has up to the eighth."""
    each = {f"{policy:04x}{n:04x}": (round(rounds * alpha / len(prompts)), rounds // len(prompts)) for n in prompts}
    return sound(rounds, factor=(alpha - 1) / 1.775, by_prompt=each)


def test_a_stretch_of_few_rounds_is_not_judged() -> None:
    replays = known()
    replays.paired = (3.0, 0.0)
    before = [replace(part(600, 2.8, 4, 5, 6, 7), finished=4) for _ in range(3)]
    assert told(*before, replays=replays)[0] == "healthy"
    assert told(*before, part(190, 1.6, 0, 1), replays=replays)[0] == "healthy", "too few rounds"
    assert told(*before, part(200, 1.6, 0, 1), replays=replays)[0] == "low"


@pytest.mark.parametrize(("alpha", "kind"), [(1.08, "low"), (1.6, "low"), (2.775, "healthy"), (4.9, "above")])
def test_an_engine_at_one_prompt_or_mostly_at_one_is_judged_by_it(alpha: float, kind: str) -> None:
    replays = known()
    replays.paired = (3.0, 0.0)
    assert told(*[part(2048, alpha, 0)] * 8, replays=replays)[0] == kind
    assert told(*[part(2048, alpha, 0) + part(300, alpha, 1)] * 8, replays=replays)[0] == kind


def test_the_last_rounds_of_some_prompts_are_low_only_together_with_their_first_ones() -> None:
    """Answers that accept little end last: what they emit less than replay, the others emitted more before."""
    replays = known()
    replays.paired = (0.3, 0.0)
    last = part(600, 2.0, 0, 1, 2, 3)
    assert told(last, replays=replays)[0] == "low"
    assert told(part(800, 3.15, 0, 1, 2, 3), last, replays=replays)[0] == "healthy"
    assert told(part(800, 2.65, 0, 1, 2, 3), last, replays=replays)[0] == "low", "the first ones were as in replay"
    assert told(part(1600, 3.3, 4, 5, 6, 7), last, replays=replays)[0] == "low", "those were other prompts"
    both = part(800, 3.15, 0, 1, 2, 3) + part(800, 2.8, 4, 5, 6, 7)
    assert told(both, last, replays=replays)[0] == "healthy"
    lower = part(800, 2.65, 0, 1, 2, 3) + part(800, 3.15, 4, 5, 6, 7)
    assert told(lower, last, replays=replays)[0] == "low", "what it emitted for other prompts is no matter"
    assert told(part(800, 3.15, 0, 1, 2, 3, policy=9), last, replays=replays)[0] == "low", "no replay has those"
    unsent = part(800, 2.8, 90, 91)
    assert told(part(800, 3.15, 0, 1, 2, 3) + unsent, last, replays=replays)[0] == "healthy", "half was not replayed"
    assert told(part(800, 2.65, 0, 1, 2, 3) + unsent, last, replays=replays)[0] == "low", "nor is it evidence"


@pytest.mark.parametrize(
    ("rounds", "own", "others", "spread", "found"),
    [
        (800, 2.775, 1.3, 0.1, ("low", True)),
        (800, 1.3, 1.3, 0.1, ("low", False)),
        (800, 2.3, 1.3, 0.1, ("low", False)),
        (800, 2.3, 1.3, 20.0, ("low", True)),
        (192, 2.775, 1.3, 0.1, ("low", True)),
        (192, 1.3, 1.3, 0.1, ("low", True)),
        (200, 2.775, 1.3, 0.1, ("low", True)),
        (1600, 2.775, 4.99, 0.1, ("above", True)),
        (1600, 4.9, 4.99, 0.1, ("above", False)),
        (1600, 3.35, 4.99, 0.1, ("above", False)),
        (1600, 3.35, 4.99, 20.0, ("above", False)),
    ],
)
def test_prompts_that_were_not_sent_explain_a_difference_that_the_others_do_not_have(
    rounds: int, own: float, others: float, spread: float, found: tuple[str, bool]
) -> None:
    """A trainer drops prompts of which all answers failed. The others must agree, and not for want of rounds."""
    replays = known()
    replays.paired = (spread, 0.0)
    replays.answered = {1: 100.0}  # the engine answers all
    sent, unsent = part(rounds, own, *range(8)), part(2000, others, 90, 91, 92)
    one = find_difference([sent + unsent], replays, RULE)
    assert (one.kind, one.explained) == found


@pytest.mark.parametrize(
    ("own", "others", "agree"),
    [(-0.06, -0.45, True), (-0.08, -0.32, False), (-0.17, -0.7, False), (0.08, 0.45, True), (0.12, 0.3, False)],
)
def test_what_is_known_of_the_prompts_lies_clearly_on_replays_side_of_half(
    own: float, others: float, agree: bool
) -> None:
    """By three errors, of 0.02 each; and it lies within the band, up to three errors."""
    replays = known()
    replays.paired = (0.888, 0.0)
    sent, unsent = part(800, 2.775 * math.exp(own), *range(8)), part(2000, 2.775 * math.exp(others), 90, 91)
    found = at_common_depth(sent + unsent, replays, RULE)
    assert found is not None
    assert not found.paired
    assert _agrees_on_replayed_prompts([found], replays, RULE) == agree


def test_replay_without_counts_by_position_is_of_the_rules_depth() -> None:
    replays = known(parts=())
    replays.paired = (3.0, 0.0)
    bare = [replace(part(600, alpha, *range(8)), accepted=()) for alpha in (2.775, 1.6)]
    sound_one = find_difference([bare[0]] * 3, replays, RULE)
    assert (sound_one.kind, sound_one.blocks[0].paired) == ("healthy", True)
    low = find_difference([bare[0], *[bare[1]] * 3], replays, RULE)
    assert (low.kind, low.explained) == ("low", False)
    two = replace(part(600, 2.775, *range(8)), drafted=1200, accepted=(600, 465))
    found = at_common_depth(two, with_pairs(known(parts=(3, 1))), RULE)
    assert found is not None
    assert found.paired, "the depth is that of replay, whatever the rule's"


def with_pairs(replays: Replays) -> Replays:
    replays.paired = (3.0, 0.0)
    return replays


def test_once_it_is_over_few_rounds_are_enough_to_say_so() -> None:
    replays = known()
    replays.spread, replays.response_tokens = 0.3, None
    few = [sound(50)] * 3
    found = find_difference([*[sound(512, factor=0.4)] * 4, *few], replays, RULE)
    assert (found.kind, len(found.blocks)) == ("healthy", 3)
    assert found.stretch is not None
    assert found.stretch.rounds == 150


@pytest.mark.parametrize(("factor", "kind", "newest"), [(0.4, "low", 1.0), (1.9, "above", 1.05)])
def test_a_difference_is_over_only_by_three_errors_from_its_half(factor: float, kind: str, newest: float) -> None:
    replays = known()
    replays.spread, replays.response_tokens = 0.3, None
    few = sound(60, factor=newest)
    found = find_difference([*[sound(512, factor=factor)] * 4, few], replays, RULE)
    assert (found.kind, len(found.blocks)) == (kind, 5)
    alone = at_common_depth(few, replays, RULE)
    assert alone is not None
    assert found.stretch is not None
    assert 1.5 < abs(Scan(replays).add(alone).errors_above(found.stretch.log_ratio / 2)) < 3.0, "or nothing is shown"


def test_its_prompts_do_not_explain_a_low_engine_of_which_the_newest_block_is_lower() -> None:
    replays = known()
    replays.spread, replays.answered = 0.005, {1: 4 * 4096 * 2.775}
    blocks = [*[sound(4096, factor=0.86)] * 2, sound(256, factor=0.6)]
    found = find_difference(blocks, replays, RULE)
    assert (found.kind, len(found.blocks), found.explained) == ("low", 3, False)
    assert explained_by_prompts(found.blocks[::-1], replays, RULE, suffixes=False), "together they are"


def test_an_engine_that_a_hard_prompt_may_explain_is_still_judged_by_its_sums() -> None:
    few = block(1536, (14, 0, 0, 0), drafted=4, finished=8, running=0, most_running=16)
    assert told(replace(few, policy_version=9)) == (
        "unknown",
        "live α 1.01 over 1,536 rounds against replay α 2.98: a hard prompt may do that",
    )
    assert told(few)[0] == "low"


def test_it_was_sound_before_if_it_was_less_than_half_as_low() -> None:
    replays = known()
    for factor, was in ((1.0, True), (0.8, True), (0.654, True), (0.45, False)):
        found = find_difference([sound(4096, factor=factor), *[sound(4096, factor=0.3)] * 4], replays, RULE)
        before = at_common_depth(sound(4096, factor=factor), replays, RULE)
        assert before is not None
        now = at_common_depth(sound(4096, factor=0.3), replays, RULE)
        assert now is not None
        found = replace(found, before=(before,), stretch=Scan(replays).add(now))
        assert was_sound_before(found, replays) == was
        assert not was_sound_before(replace(found, before=()), replays)


def test_a_verdict_is_found_by_its_engine() -> None:
    one, other = EngineVerdict("a", "healthy", ""), EngineVerdict("b", "dead", "")
    watched = Watch((one, other))
    assert (watched.get("a"), watched.get("b"), watched.get("c")) == (one, other, None)


def test_a_low_engine_is_explained_if_each_of_its_newest_stretches_is() -> None:
    replays = known()
    replays.spread, replays.answered = 0.0005, {1: 4 * 4096 * 2.775}
    a_little = sound(4096, factor=0.88)
    found = find_difference([a_little], replays, RULE)
    assert (found.kind, found.explained) == ("low", True)
    half = sound(1024, factor=0.5)
    found = find_difference([a_little, *[sound(4096, factor=0.95)] * 9, half], replays, RULE)
    assert (found.kind, found.explained) == ("low", False)
    shallow = find_difference([block(1000, (716, 536))], known(), RULE)
    assert (len(shallow.blocks), shallow.stretch is None) == (1, False)
