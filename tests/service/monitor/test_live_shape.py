"""Which drafts and which versions differ: each figure beside its formula, each limit from both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule, Matched, Scan, at_common_depth
from service.monitor.live.replays import COIN_FLIPS, Replays, VersionReplay
from service.monitor.live.shape import (
    Shape,
    fell_while_replay_healed,
    only_later_drafts_differ,
    shape_of,
    version_that_fits,
)
from service.monitor.records import DrafterSums, Replayed, ScoreRecord

SPREAD = 2.0


def replay(accepted: Sequence[float], reached: Sequence[float]) -> VersionReplay:
    return VersionReplay(DrafterSums(3000.0, 1000.0), tuple(accepted), tuple(reached))


def matched(
    accepted: Sequence[int], rounds: int, of: VersionReplay, version: str = "v1", expected: float = 0.0, policy: int = 0
) -> Matched:
    tokens = rounds + sum(accepted)
    block = Block(version, policy, rounds, tokens, None, tuple(accepted), 0.0)
    return Matched(block, of, rounds, tokens, expected, of.rounds)


# --- first drafts beside later ones
def test_the_shape_is_the_ratio_of_accepted_drafts_to_those_that_replay_expects_of_the_verified() -> None:
    one = matched((300, 200, 90), 400, replay((700.0, 400.0, 200.0), (1000.0, 700.0, 400.0)))
    two = matched((60, 30, 5), 100, replay((500.0, 100.0, 20.0), (1000.0, 500.0, 100.0)))
    first = 400 * 0.7 + 100 * 0.5
    later = 300 * 4 / 7 + 200 * 0.5 + 60 * 0.2 + 30 * 0.2
    shape = shape_of([one, two], SPREAD)
    assert shape is not None
    assert (shape.first, shape.later) == pytest.approx((math.log(360 / first), math.log((290 + 35) / later)))
    chances = 1 / 360 + 1 / 325 + 1 / later
    assert shape.error == pytest.approx(math.sqrt(chances + 0.25 * SPREAD / 500))


def test_only_the_depth_that_all_blocks_and_replays_have_is_compared() -> None:
    deep = replay((700.0, 400.0, 200.0), (1000.0, 700.0, 400.0))
    both = shape_of([matched((300, 200, 90), 400, deep), matched((60, 30), 100, deep)], SPREAD)
    assert both == shape_of([matched((300, 200), 400, deep), matched((60, 30), 100, deep)], SPREAD)
    shallow = replay((700.0, 400.0), (1000.0, 700.0))
    assert shape_of([matched((300, 200, 90), 400, shallow)], SPREAD) is not None
    assert shape_of([matched((300,), 400, deep)], SPREAD) is None, "one draft has no later ones"
    assert shape_of([matched((300, 200), 400, replay((700.0,), (1000.0, 700.0)))], SPREAD) is None
    assert shape_of([matched((300, 200), 400, replay((700.0, 400.0), (1000.0,)))], SPREAD) is None
    assert shape_of([], SPREAD) is None


@pytest.mark.parametrize(
    ("kept", "rounds", "first", "known"),
    [((20, 20), 400, 0.7, True), ((19, 19), 400, 0.7, False), ((20, 20), 28, 0.7, False), ((20, 20), 400, 0.04, False)],
)
def test_twenty_drafts_are_needed_of_each_kind(kept: tuple[int, int], rounds: int, first: float, known: bool) -> None:
    """Accepted first ones; first ones that replay expects of the rounds; later ones that it expects."""
    of = replay((1000 * first, 1000 * first, 500 * first), (1000.0, 1000 * first, 1000 * first))
    assert (shape_of([matched((*kept, 0), rounds, of)], SPREAD) is not None) is known
    assert shape_of([matched((20, 0), 400, replay((700.0, 690.0), (1000.0, 700.0)))], SPREAD) is None


def test_no_later_draft_at_all_counts_as_half_a_draft() -> None:
    shape = shape_of([matched((300, 0), 400, replay((700.0, 350.0), (1000.0, 700.0)))], SPREAD)
    assert shape is not None
    assert shape.later == pytest.approx(math.log(0.5 / 150))
    assert shape.error == pytest.approx(math.sqrt(1 / 300 + 1 / 1 + 1 / 150 + 0.25 * SPREAD / 400))


def test_a_position_that_replay_never_came_to_expects_no_draft() -> None:
    known = shape_of([matched((300, 200, 90), 400, replay((700.0, 400.0, 0.0), (1000.0, 700.0, 0.0)))], SPREAD)
    assert known is not None
    assert known.later == pytest.approx(math.log(290 / (300 * 4 / 7)))
    part = shape_of([matched((300, 200, 90), 400, replay((700.0, 400.0, 0.4), (1000.0, 700.0, 0.8)))], SPREAD)
    assert part is not None
    assert part.later == pytest.approx(math.log(290 / (300 * 4 / 7 + 200 / 2)))


@pytest.mark.parametrize(
    ("first", "later", "error", "differ"),
    [
        (0.0, -0.41, 0.1, True),
        (0.0, -0.39, 0.1, False),
        (-0.24, -1.0, 0.1, True),
        (-0.26, -1.0, 0.1, False),
        (-0.24, -1.0, 0.2, False),
        (0.3, 0.0, 0.1, False),
    ],
)
def test_only_later_drafts_differ_by_four_errors_and_first_ones_by_less_than_a_quarter_of_it(
    first: float, later: float, error: float, differ: bool
) -> None:
    assert only_later_drafts_differ(Shape(first, later, error)) is differ
    assert not only_later_drafts_differ(None)


# --- versions that fall in engines while they heal in replay
def stretch(version: str, live: float, expected: float, rounds: int, of: VersionReplay | None = None) -> Matched:
    """`rounds` of a version with these log α; `of`: the replay that it shares with others, else one of 1,000 rounds."""
    block = Block(version, 0, rounds, 0, None, (), 0.0)
    of = of or replay((), ())
    return Matched(block, of, rounds, math.exp(live) * rounds, math.exp(expected) * rounds, of.rounds)


def errors(new: int, old: int, new_replayed: float = 1000.0, old_replayed: float = 1000.0) -> tuple[float, float]:
    live = 3 * math.sqrt((SPREAD + COIN_FLIPS) * (1 / new + 1 / old))
    return live, 3 * math.sqrt(SPREAD * (1 / new_replayed + 1 / old_replayed))


@pytest.mark.parametrize("sizes", [(400, 4000), (4000, 400)])
def test_both_the_fall_and_the_healing_must_be_beyond_three_errors(sizes: tuple[int, int]) -> None:
    new, old = sizes
    live, expected = errors(new, old)
    for fall, rise, found in ((1.01, 1.01, True), (0.99, 1.01, False), (1.01, 0.99, False), (-1.01, 1.01, False)):
        both = [stretch("v1", 2.0, 0.5, old), stretch("v2", 2.0 - fall * live, 0.5 + rise * expected, new)]
        assert fell_while_replay_healed(both, SPREAD) is found, (fall, rise)
    assert not fell_while_replay_healed([stretch("v2", 1.0, 1.5, new)], SPREAD), "one version has not fallen"
    assert not fell_while_replay_healed([], SPREAD)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_newest_version_is_compared_with_each_older_one(place: int) -> None:
    live, expected = errors(1000, 1000)
    older = [stretch(f"v{n}", 1.0, 1.0, 1000) for n in range(3)]
    new = stretch("v9", 1.0, 1.0, 1000)
    assert not fell_while_replay_healed([*older, new], SPREAD)
    older[place] = stretch(f"v{place}", 1.0 + 1.1 * live, 1.0 - 1.1 * expected, 1000)
    assert fell_while_replay_healed([*older, new], SPREAD)
    assert not fell_while_replay_healed([new, *older], SPREAD) or place < 2, "the fall of an older version is over"


def test_blocks_of_a_version_are_one_and_a_replay_that_they_share_counts_once() -> None:
    for replays, replayed in (((replay((), ()),) * 4, 1000.0), (tuple(replay((), ()) for _ in range(4)), 4000.0)):
        live, expected = errors(1000, 1000, replayed, 1000.0)
        for rise, found in ((1.01, True), (0.99, False)):
            new = [stretch("v2", 2.0 - 1.1 * live, 0.5 + rise * expected, 250, of) for of in replays]
            assert fell_while_replay_healed([stretch("v1", 2.0, 0.5, 1000), *new], SPREAD) is found


def test_of_blocks_that_share_a_replay_the_one_that_rests_on_most_of_it_counts() -> None:
    shared = replay((), ())
    live, expected = errors(1000, 1000, 800.0, 1000.0)
    for rise, found in ((1.01, True), (0.99, False)):
        new = []
        for part in (100.0, 800.0, 300.0, 0.25):
            one = stretch("v2", 2.0 - 1.1 * live, 0.5 + rise * expected, 250, shared)
            new.append(Matched(one.block, shared, one.rounds, one.tokens, one.expected, part, paired=True))
        assert fell_while_replay_healed([stretch("v1", 2.0, 0.5, 1000), *new], SPREAD) is found


def test_a_version_that_emitted_nothing_counts_as_one_token() -> None:
    live, expected = errors(400, 400)
    for log_alpha, found in ((1.01 * live - math.log(400), True), (0.99 * live - math.log(400), False)):
        both = [stretch("v1", log_alpha, 0.5, 400), stretch("v2", -math.inf, 0.5 + 1.1 * expected, 400)]
        assert fell_while_replay_healed(both, SPREAD) is found


# --- another version that fits
RULE = LiveRule()
KEPT = (0.7, 0.5, 0.4, 0.3)  # of the version that the engine names: α 2.9


def replayed(*versions: tuple[str, Sequence[float]], until: int = 8) -> Replays:
    """Replay on 16 prompts a step, half of them a tenth harder: `v1` on eight steps, the others before `until`."""
    records = []
    for step in range(8):
        found = []
        for version, kept in (("v1", KEPT), *(versions if step < until else ())):
            tokens = [480.0] * 16
            rounds = [480.0 / (1 + sum(kept)) * (1.05 if n % 2 else 0.95) for n in range(16)]
            accepted = tuple(sum(rounds) * share for share in kept)
            found.append(Replayed(version, DrafterSums.of(tokens, rounds), accepted, (sum(rounds), *accepted[:-1])))
        records.append(
            ScoreRecord(replayed=tuple(found), drafter_version="v1", policy_version=step, entry_id=f"{step + 1}-0")
        )
    return Replays(records)


def counted(replays: Replays, alpha: float, rounds: int, steps: int = 8) -> list[Matched]:
    """Blocks of an engine that names `v1`, with counts by position, and accepts `alpha` tokens per round."""
    by_position = [int(rounds * share * (alpha - 1) / sum(KEPT)) for share in KEPT]
    found = []
    for step in range(steps):
        block = Block("v1", step, rounds, rounds + sum(by_position), 4 * rounds, tuple(by_position), 0.0)
        one = at_common_depth(block, replays, RULE)
        assert one is not None
        found.append(one)
    return found


def scaled(alpha: float) -> tuple[float, ...]:
    return tuple(share * (alpha - 1) / sum(KEPT) for share in KEPT)


def test_the_version_that_replay_has_where_the_engine_is_fits() -> None:
    replays = replayed(("far", scaled(2.5)), ("near", scaled(1.62)), ("nearest", scaled(1.6)))
    found = counted(replays, 1.6, 512)
    assert version_that_fits(found, replays, RULE) == "nearest"
    assert version_that_fits([], replays, RULE) is None
    assert version_that_fits(found, replayed(("far", scaled(2.5))), RULE) is None, "none accepts so little"
    assert version_that_fits(found, replayed(), RULE) is None, "no other was replayed"


def test_two_errors_are_the_limit_of_what_fits() -> None:
    replays = replayed(("other", scaled(1.6)))
    other = [replays.others(one.block)["other"] for one in counted(replays, 1.6, 512)]
    for alpha, fits in ((1.6, True), (1.65, True), (1.67, False), (1.55, True), (1.53, False)):
        found = counted(replays, alpha, 512)
        scan = Scan(replays, outliers=False)
        for one, its in zip(found, other, strict=True):
            matched = at_common_depth(one.block, replays, RULE, its)
            assert matched is not None
            stretch = scan.add(matched)
        assert (abs(stretch.log_ratio) < 2 * stretch.error) is fits, (alpha, stretch)
        assert version_that_fits(found, replays, RULE) == ("other" if fits else None), alpha


def test_few_rounds_fit_nothing_however_near_they_are() -> None:
    replays = replayed(("other", scaled(1.6)))
    assert version_that_fits(counted(replays, 1.6, 16)[:1], replays, RULE) is None
    assert version_that_fits(counted(replays, 1.6, 512), replays, RULE) == "other"


def test_a_version_fits_only_where_it_was_replayed_on_each_policy_version() -> None:
    replays = replayed(("other", scaled(1.6)))
    known = replayed(("other", scaled(1.6)), until=6)
    assert version_that_fits(counted(replays, 1.6, 512), known, RULE) is None
    assert version_that_fits(counted(known, 1.6, 512)[:6], known, RULE) == "other"


def test_blocks_that_cannot_be_compared_with_it_do_not_speak_for_or_against_a_version() -> None:
    """An engine that drafts more than was replayed, and does not count by position."""
    replays = replayed(("other", scaled(1.6)))
    found = counted(replays, 1.6, 512)
    deep = [replace(one, block=replace(one.block, drafted=6 * 512, accepted=())) for one in found]
    assert version_that_fits([*found[:6], *deep[6:]], replays, RULE) == "other"
    assert version_that_fits([*deep[:2], *found[2:]], replays, RULE) == "other"
    assert version_that_fits(deep, replays, RULE) is None


def test_what_one_prompt_may_be_off_makes_no_version_fit_less() -> None:
    replays = replayed(("other", scaled(1.6)))
    replays.outlier = 10_000.0
    assert version_that_fits(counted(replays, 1.6, 512), replays, RULE) == "other"
