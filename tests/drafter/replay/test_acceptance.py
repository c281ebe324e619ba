"""The recursion behind replay α, against brute force, against live rounds, and against hand-worked cases."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from helpers.worker.live_interval import live_interval, rounds_variance
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from drafter.replay import acceptance
from drafter.replay.acceptance import Replay, Segments, find_segments, log_ratio, replay_rounds, student_quantile


def segments_of(lengths: list[int], rollout: list[int] | None = None) -> Segments:
    rollout = list(range(len(lengths))) if rollout is None else rollout
    zeros = np.zeros(len(lengths), dtype=np.int64)
    return Segments(zeros, np.array(lengths, dtype=np.int64), np.array(rollout), zeros, max(rollout, default=-1) + 1)


def brute_force(c: np.ndarray, begin: int = 0) -> dict[int, float]:
    """Law of the number of rounds over a segment [n, K], by following every accept/reject outcome."""
    n, depth = c.shape
    if begin >= n:
        return {0: 1.0}
    law: dict[int, float] = {}
    survived = 1.0
    for j in range(depth + 1):
        past_end = begin + j >= n
        stop = survived if j == depth or past_end else survived * (1 - c[begin, j])
        for rounds, probability in brute_force(c, begin + j + 1).items():
            law[rounds + 1] = law.get(rounds + 1, 0.0) + stop * probability
        if j == depth or past_end:
            return law
        survived *= c[begin, j]
    raise AssertionError


def walk(kept: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Rounds along a segment whose draft j of a round begun at i is accepted iff kept[i, j]: also accepted, reached."""
    n, depth = kept.shape
    begin, rounds, accepted, reached = 0, 0, np.zeros(depth), np.zeros(depth)
    while begin < n:
        rounds += 1
        j = 0
        while j < depth and begin + j < n:
            reached[j] += 1
            if not kept[begin, j]:
                break
            accepted[j] += 1
            j += 1
        begin += j + 1
    return rounds, accepted, reached


def live_rounds(c: np.ndarray, rng: np.random.Generator) -> tuple[int, np.ndarray, np.ndarray]:
    return walk(rng.random(c.shape) < c)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(0, 4))
def test_expected_rounds_and_their_variance_equal_brute_force(seed: int, n: int, depth: int) -> None:
    c = np.random.default_rng(seed).random((n, depth))
    law = brute_force(c)
    mean = sum(k * p for k, p in law.items())
    variance = sum(k * k * p for k, p in law.items()) - mean**2
    replay = replay_rounds(c, segments_of([n]))
    assert sum(law.values()) == pytest.approx(1.0)
    assert replay.rounds[0] == pytest.approx(mean, rel=1e-12)
    assert rounds_variance(c, segments_of([n]))[0] == pytest.approx(variance, abs=1e-9)


@pytest.mark.parametrize(("n", "depth"), [(1, 3), (2, 3), (3, 3), (4, 2), (9, 1)])
def test_expected_counts_per_position_equal_the_sum_over_all_outcomes(n: int, depth: int) -> None:
    c = np.random.default_rng(n).random((n, depth))
    rounds, accepted, reached = 0.0, np.zeros(depth), np.zeros(depth)
    for outcome in product([False, True], repeat=n * depth):
        kept = np.array(outcome).reshape(n, depth)
        probability = np.where(kept, c, 1 - c).prod()
        counts = walk(kept)
        rounds, accepted, reached = (
            total + probability * count for total, count in zip((rounds, accepted, reached), counts, strict=True)
        )
    replay = replay_rounds(c, segments_of([n]))
    np.testing.assert_allclose(replay.accepted[0], accepted, rtol=1e-12)
    np.testing.assert_allclose(replay.reached[0], reached, rtol=1e-12)
    np.testing.assert_allclose(replay.position_acceptance, accepted / rounds, rtol=1e-12)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(replay.conditional_acceptance, accepted / reached, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 4))
def test_shares_by_position_are_shares(seed: int, lengths: list[int], depth: int) -> None:
    """Short responses, where few rounds have a last draft, and drafters that are sure or certain to be right."""
    rng = np.random.default_rng(seed)
    c = rng.choice([0.0, 0.9, 1.0], (sum(lengths), depth))
    replay = replay_rounds(c, segments_of(lengths))
    for share in (replay.position_acceptance, replay.conditional_acceptance):
        known = share[~np.isnan(share)]
        assert np.all((known >= 0) & (known <= 1))
    assert np.all(np.diff(replay.position_acceptance[: int(sum(lengths) > 0) * depth]) <= 1e-12)


def test_a_certain_drafter_keeps_every_draft_that_it_comes_to_and_not_one_in_every_round() -> None:
    replay = replay_rounds(np.ones((5, 3)), segments_of([5]))  # a round of four tokens and one that the end cuts short
    assert replay.conditional_acceptance.tolist() == [1.0, 1.0, 1.0]
    assert replay.position_acceptance.tolist() == [1.0, 0.5, 0.5]
    short = replay_rounds(np.ones((1, 3)), segments_of([1]))
    np.testing.assert_array_equal(short.conditional_acceptance, [1.0, np.nan, np.nan])
    assert short.position_acceptance.tolist() == [1.0, 0.0, 0.0]


def test_expected_counts_equal_live_rounds_on_average() -> None:
    rng = np.random.default_rng(0)
    c = rng.beta(2, 1, (40, 3))
    replay = replay_rounds(c, segments_of([40]))
    runs = [live_rounds(c, rng) for _ in range(3000)]
    rounds = np.array([run[0] for run in runs], dtype=float)
    accepted = np.array([run[1] for run in runs])
    assert abs(rounds.mean() - replay.rounds[0]) < 4 * rounds.std() / math.sqrt(rounds.size)
    variance = rounds_variance(c, segments_of([40]))[0]
    assert rounds.var() == pytest.approx(variance, rel=0.12)
    reached = np.array([run[2] for run in runs])
    for counted, expected in ((accepted, replay.accepted[0]), (reached, replay.reached[0])):
        error = 4 * counted.std(axis=0) / math.sqrt(rounds.size)
        assert np.all(np.abs(counted.mean(axis=0) - expected) < error)
    low, high = live_interval(replay, variance, 0.95)
    covered = np.mean([low <= 40 / count <= high for count in rounds])
    assert 0.90 < covered <= 1.0


def test_live_alpha_and_replay_alpha_agree_on_a_whole_batch() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 60, 200)
    rows = [rng.beta(3, 1, (int(n), 4)) for n in lengths]
    both = np.concatenate(rows), segments_of(lengths.tolist())
    replay = replay_rounds(*both)
    live = lengths.sum() / sum(live_rounds(c, rng)[0] for c in rows)
    low, high = live_interval(replay, rounds_variance(*both).sum(), 0.999)
    assert low < live < high
    assert high - low < 0.25


def test_a_drafter_that_is_never_right_has_alpha_one_and_one_that_always_is_has_depth_plus_one() -> None:
    assert replay_rounds(np.zeros((12, 3)), segments_of([12])).alpha == 1.0
    assert replay_rounds(np.ones((12, 3)), segments_of([12])).alpha == 4.0
    assert replay_rounds(np.ones((13, 3)), segments_of([13])).alpha == 13 / 4  # the last round is cut off
    assert replay_rounds(np.ones((12, 0)), segments_of([12])).alpha == 1.0  # no drafts at all


def test_drafts_past_the_end_of_a_segment_do_not_matter() -> None:
    c = np.random.default_rng(2).random((6, 3))
    changed = c.copy()
    changed[5, 1:] = changed[4, 2:] = np.nan
    before, after = (replay_rounds(x, segments_of([6])) for x in (c, changed))
    assert before.rounds == after.rounds
    np.testing.assert_array_equal(before.accepted, after.accepted)
    np.testing.assert_allclose(before.reached[0, 0], before.rounds[0])


def test_rounds_restart_after_a_tool_call() -> None:
    c = np.random.default_rng(3).random((9, 2))
    both = replay_rounds(c, segments_of([4, 5], [0, 0]))
    apart = replay_rounds(c, segments_of([4, 5]))
    assert both.rollouts == 1
    assert both.rounds[0] == pytest.approx(apart.rounds.sum())
    assert both.tokens[0] == 9


def test_segments_follow_the_mask_and_never_cross_a_rollout() -> None:
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0], dtype=bool)
    found = find_segments(mask, np.array([0, 8, 11, 14]))
    assert found.first.tolist() == [2, 6, 9, 11]
    assert found.tokens.tolist() == [2, 1, 1, 0]
    assert found.rollout.tolist() == [0, 0, 1, 2]
    assert found.document.tolist() == [0, 0, 8, 11]
    assert found.rows().tolist() == [3, 4, 7, 10]


def test_a_response_of_one_token_has_no_round_and_an_empty_batch_no_alpha() -> None:
    found = find_segments(np.array([0, 1, 0, 0], dtype=bool), np.array([0, 2, 4]))
    replay = replay_rounds(np.zeros((0, 3)), found)
    assert replay.tokens.tolist() == [0, 0]
    assert replay.rounds.tolist() == [0, 0]
    assert math.isnan(replay.alpha)
    assert all(math.isnan(bound) for bound in replay.interval())
    assert np.isnan(replay.position_acceptance).all()
    assert np.isnan(replay.conditional_acceptance).all()
    assert find_segments(np.zeros(0, bool), np.array([0])).rollouts == 0


def test_alpha_pools_sums_before_it_divides() -> None:
    easy, hard = np.ones((20, 3)), np.zeros((20, 3))
    replay = replay_rounds(np.concatenate((easy, hard)), segments_of([20, 20]))
    pooled = Replay.concat([replay.select([0]), replay.select([1])])
    assert pooled.alpha == replay.alpha == 40 / 25
    assert pooled.total() == {"tokens": 40.0, "rounds": 25.0}
    with pytest.raises(ValueError, match="one depth"):
        Replay.concat([replay, replay_rounds(np.ones((5, 2)), segments_of([5]))])
    with pytest.raises(ValueError, match="at least one"):
        Replay.concat([])


def test_blocks_of_padding_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 30, 50).tolist()
    c = rng.random((sum(lengths), 3))
    whole = replay_rounds(c, segments_of(lengths))
    monkeypatch.setattr(acceptance, "_BLOCK_ELEMENTS", 100)
    parts = replay_rounds(c, segments_of(lengths))
    np.testing.assert_allclose(whole.rounds, parts.rounds, rtol=1e-12)
    np.testing.assert_allclose(whole.accepted, parts.accepted, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 90), st.integers(0, 3))
def test_a_block_takes_the_next_longer_segments_as_long_as_their_padding_is_within_the_bound(
    lengths: list[int], bound: int, depth: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "_BLOCK_ELEMENTS", bound)
        blocks = [[lengths[s] for s in block] for block in acceptance._blocks(segments_of(lengths), depth)]
    assert [n for block in blocks for n in block] == sorted(n for n in lengths if n), "each once, the shortest first"

    def padded(block: list[int]) -> int:
        return len(block) * max(block) * (depth + 1)

    assert all(len(block) == 1 or padded(block) <= bound for block in blocks)
    assert all(padded([*block, later[0]]) > bound for block, later in pairwise(blocks)), "no block ends too soon"


def test_half_precision_is_computed_as_the_numbers_it_stands_for() -> None:
    c = np.random.default_rng(7).random((20, 3)).astype(np.float16)
    half, double = (replay_rounds(x, segments_of([12, 8])) for x in (c, c.astype(np.float64)))
    for name in ("rounds", "accepted", "reached"):
        np.testing.assert_array_equal(getattr(half, name), getattr(double, name))


def test_sums_that_differ_in_their_last_bits_make_no_share_above_one() -> None:
    """Of 100 such batches a fifth have a share above 1 by 1e-16."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        c = rng.random((30, 3))
        c[:, 0] = 1.0
        assert 1.0 - 1e-12 < replay_rounds(c, segments_of([30])).position_acceptance[0] <= 1.0


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1])
def test_an_impossible_probability_is_refused(bad: float) -> None:
    c = np.full((4, 2), 0.5)
    c[1, 1] = bad
    with pytest.raises(ValueError, match="must lie in"):
        replay_rounds(c, segments_of([4]))


@pytest.mark.parametrize(("tokens", "depth"), [(40, 1), (40, 3), (200, 4), (1, 2)])
def test_weighted_rounds_are_those_of_the_law_that_the_weights_are_of(tokens: int, depth: int) -> None:
    """Each token is drawn by `older`, whatever came before it. Then by `newer` a draft is kept with one probability."""
    rng = np.random.default_rng([tokens, depth])
    older, newer, other = (np.array(law) for law in ([0.5, 0.3, 0.1, 0.1], [0.3, 0.3, 0.3, 0.1], [0.1, 0.1, 0.1, 0.7]))
    segments = segments_of([tokens] * (60_000 // tokens))
    said = rng.choice(4, int(segments.tokens.sum()) + depth, p=older)
    places = np.arange(said.size - depth)[:, None] + np.arange(depth)  # of the tokens that a round drafts
    alpha: dict[str, tuple[float, float]] = {}
    for fits, q in (("older", 0.8 * older + 0.2 * other), ("newer", 0.8 * newer + 0.2 * other)):
        exact = replay_rounds(np.full((tokens, depth), np.minimum(newer, q).sum()), segments_of([tokens]))
        found = replay_rounds((np.minimum(newer, q) / older)[said[places]], segments, weighted=True)
        assert found.alpha == pytest.approx(exact.alpha, rel=0.03)
        share = found.position_acceptance - exact.position_acceptance
        assert np.all(np.abs(share) < 0.03)
        blind = replay_rounds(np.minimum(q / older, 1.0)[said[places]], segments)
        alpha[fits] = found.alpha, blind.alpha
    if tokens > 1:
        assert alpha["newer"][0] > 1.05 * alpha["older"][0], "the drafter of the newer law is the better one"
        assert alpha["newer"][1] < alpha["older"][1], "and seems the worse one without weights"


def test_weights_of_one_change_nothing() -> None:
    c = np.random.default_rng(4).random((30, 3))
    plain, weighted = (replay_rounds(c, segments_of([10, 0, 20]), weighted=one) for one in (False, True))
    for name in ("tokens", "rounds", "accepted", "reached"):
        np.testing.assert_allclose(getattr(weighted, name), getattr(plain, name), rtol=1e-12)


def test_no_weights_make_a_round_emit_more_than_depth_plus_one_tokens() -> None:
    replay = replay_rounds(np.full((12, 3), 10.0), segments_of([12]), weighted=True)
    assert replay.alpha == 4.0


def markov_texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All texts of 12 tokens, each 0 or 1 by the one before: acceptances and weights, and how likely by either law."""
    older, newer, q = (np.array([[same, 1.0 - same], [1.0 - same, same]]) for same in (0.6, 0.5, 0.8))
    texts = np.array([(0, *text) for text in product(range(2), repeat=12)])
    at = texts[:, :-1], texts[:, 1:]
    accepted = np.minimum(1.0, q[at] / newer[at])
    return accepted, newer[at] / older[at], np.stack([law[at].prod(axis=1) for law in (older, newer)])


def rounds_of(c: np.ndarray, *, weighted: bool, depth: int = 3) -> Replay:
    """Replay of texts [R, n] whose token i is accepted with c[:, i], whichever draft it is."""
    R, n = c.shape
    beside = np.concatenate((c, np.zeros((R, depth))), axis=1)
    conditional = np.stack([beside[:, j : j + n] for j in range(depth)], axis=2)
    return replay_rounds(conditional.reshape(R * n, depth), segments_of([n] * R), weighted=weighted)


def test_positions_of_weighted_texts_are_those_of_every_text_counted() -> None:
    """Of the rounds that came to a draft. Of all rounds the share is too low in such short texts, as α is."""
    accepted, weights, (older, newer) = markov_texts()
    every = rounds_of(accepted, weighted=False)
    exact = newer @ every.accepted / (newer @ every.reached)
    drawn = np.random.default_rng(1).choice(len(older), 4_000, p=older / older.sum())
    found = rounds_of((accepted * weights)[drawn], weighted=True)
    assert found.tells_positions
    np.testing.assert_allclose(found.conditional_acceptance, exact, rtol=0.02)
    blind = rounds_of(accepted[drawn], weighted=False).conditional_acceptance
    assert np.all(blind > 1.04 * exact), "as the older law accepts more"


def test_positions_that_one_rollouts_large_weights_make_are_not_told() -> None:
    """The weights of three tokens multiply to 1,000: without the rule, all rounds would keep all their drafts."""
    accepted, weights, (older, newer) = markov_texts()
    every = rounds_of(accepted, weighted=False)
    exact = newer @ every.accepted / (newer @ every.rounds)
    for seed in range(20):
        drawn = np.random.default_rng(seed).choice(len(older), 64, p=older / older.sum())
        c = (accepted * weights)[drawn]
        assert rounds_of(c, weighted=True).tells_positions
        c[0, :3] = 10.0
        spoiled = rounds_of(c, weighted=True)
        assert exact[-1] < 0.85
        assert spoiled.position_acceptance[-1] == 1.0
        assert not spoiled.tells_positions
        assert 1.0 <= spoiled.alpha <= 4.0


def test_sums_that_rise_from_one_position_to_the_next_are_not_told() -> None:
    """All rollouts alike: by their effective number nothing is wrong."""
    assert not rounds_of(np.full((64, 7), 2.0), weighted=True).tells_positions
    assert rounds_of(np.full((64, 7), 1.0), weighted=True).tells_positions
    assert rounds_of(np.zeros((64, 7)), weighted=True).tells_positions, "nothing was accepted, of nobody"
    assert rounds_of(np.eye(64, 7), weighted=True).tells_positions, (
        "few rollouts accept a draft, and no more than one a round"
    )


@pytest.mark.parametrize("bad", [np.nan, -0.1])
def test_an_impossible_weighted_probability_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        replay_rounds(np.full((4, 2), bad), segments_of([4]), weighted=True)


def test_acceptances_must_match_the_segments() -> None:
    with pytest.raises(ValueError, match="one row per token"):
        replay_rounds(np.ones((3, 2)), segments_of([4]))


@pytest.mark.parametrize(
    ("mask", "bounds", "why"),
    [
        (np.ones(4, bool), np.array([0, 3]), "run from 0 to the 4 tokens"),
        (np.ones(4, bool), np.array([1, 4]), "run from 0 to the 4 tokens"),
        (np.ones(4, bool), np.zeros(0, np.int64), "run from 0 to the 4 tokens"),
        (np.ones(4, bool), np.array([[0, 4]]), "run from 0 to the 4 tokens"),
        (np.ones((2, 2), bool), np.array([0, 4]), "run from 0 to the 4 tokens"),
        (np.ones(4, bool), np.array([0, 3, 1, 4]), "must not decrease"),
        (np.ones(4, bool), np.array([0, 3, 1, 4], np.uint32), "must not decrease"),
    ],
)
def test_boundaries_that_are_none_are_refused(mask: np.ndarray, bounds: np.ndarray, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_segments(mask, bounds)


def test_a_rollout_without_tokens_is_a_rollout_without_segments() -> None:
    found = find_segments(np.ones(3, bool), np.array([0, 0, 3, 3], np.int32))
    assert (found.rollouts, found.rollout.tolist(), found.tokens.tolist()) == (3, [1], [2])
    replay = replay_rounds(np.zeros((2, 1)), found)
    assert replay.tokens.tolist() == [0, 2, 0]
    nobody = replay.select([])
    assert (nobody.rollouts, nobody.depth) == (0, 1)


def test_the_interval_covers_the_true_alpha_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    ease = rng.gamma(2.0, 1.0, 4000)
    world = [rng.beta(a, 1.0, (int(rng.integers(2, 50)), 3)) for a in ease]
    everything = replay_rounds(np.concatenate(world), segments_of([len(c) for c in world]))
    truth, hits = everything.alpha, 0
    for _ in range(400):
        low, high = everything.select(rng.integers(0, 4000, 40)).interval(0.9)
        hits += low < truth < high
    assert 0.85 < hits / 400 < 0.95


def _prompts(rng: np.random.Generator, prompts: int) -> Replay:
    """Three answers a prompt, summed: hard prompts have longer answers, which are the usual reason for few degrees."""
    ease = rng.normal(0.8, 0.6, prompts)[:, None] + rng.normal(0, 0.3, (prompts, 3))
    lengths = rng.normal(0, 0.5, prompts)[:, None] + rng.normal(0, 0.5, (prompts, 3))
    tokens = np.exp(math.log(200) + lengths - 0.4 * ease).clip(8, 8000)
    rounds = tokens / (1 + 4 / (1 + np.exp(-ease)))
    return Replay(tokens.ravel(), rounds.ravel(), *(np.zeros((tokens.size, 4)) for _ in "ar"))


@pytest.mark.parametrize(("prompts", "least"), [(4, 0.925), (8, 0.92), (16, 0.915)])
def test_an_interval_of_few_prompts_covers_the_truth_and_one_of_many_is_not_much_wider(
    prompts: int, least: float
) -> None:
    """Student's t about the delta method's error, with a degree less than there are prompts, held it in 87 to 91 %."""
    rng = np.random.default_rng(prompts)
    truth = _prompts(rng, 200_000).alpha
    bounds = [_prompts(rng, prompts).interval(groups=np.repeat(np.arange(prompts), 3)) for _ in range(1000)]
    assert least < np.mean([low < truth < high for low, high in bounds]) < 0.985
    many = _prompts(rng, 64 * 8)
    low, high = many.interval(groups=np.repeat(np.arange(64 * 8), 3))
    known = log_ratio(many.tokens, many.rounds, np.repeat(np.arange(64 * 8), 3))
    assert math.log(high / low) < 1.3 * 2 * known.reach(0.975)


def test_an_interval_of_prompts_that_are_all_alike_is_a_point_and_of_one_there_is_none() -> None:
    alike = Replay(np.full(4, 30.0), np.full(4, 10.0), *(np.zeros((4, 3)) for _ in "ar"))
    assert alike.interval() == pytest.approx((3.0, 3.0))
    assert all(map(math.isnan, alike.interval(groups=np.zeros(4, np.int64))))


def test_an_interval_stays_where_alpha_can_be() -> None:
    c = np.concatenate((np.ones((12, 3)), np.zeros((4, 3))))
    low, high = replay_rounds(c, segments_of([12, 4])).interval()
    assert (low, high) == (1.0, 4.0)


def test_the_interval_over_groups_is_that_over_rollouts_that_were_pooled_by_group() -> None:
    rng = np.random.default_rng(8)
    c = rng.random((60, 2))
    groups = np.array([0, 0, 1, 1, 2, 2])
    apart = replay_rounds(c, segments_of([10] * 6))
    assert apart.interval(groups=groups) == replay_rounds(c, segments_of([10] * 6, groups.tolist())).interval()
    assert apart.interval(groups=groups) != apart.interval()


def test_the_live_interval_is_of_95_percent_and_stays_below_depth_plus_one() -> None:
    """Four tokens, one draft: the law of the rounds is counted by hand, and its upper α is cut off at 2."""
    c = np.full((4, 1), 0.5)
    law = brute_force(c)
    mean = sum(k * p for k, p in law.items())
    reach = stats.norm.ppf(0.975) * math.sqrt(sum((k - mean) ** 2 * p for k, p in law.items()))
    replay = replay_rounds(c, segments_of([4]))
    assert mean - reach < 2 < mean + reach
    variance = rounds_variance(c, segments_of([4])).sum()
    assert live_interval(replay, variance) == pytest.approx((4 / (mean + reach), 2.0))
    assert live_interval(replay, variance, 0.1)[1] < 2.0


@pytest.mark.parametrize(
    ("numerator", "denominator", "clusters"),
    [
        ([0.0, 0.0], [1.0, 2.0], 2),
        ([1.0, 2.0], [0.0, 0.0], 2),
        ([math.inf], [1.0], 1),
        ([1.0], [math.inf], 1),
        ([], [], 0),
    ],
)
def test_a_ratio_of_what_is_not_positive_has_no_logarithm(
    numerator: list[float], denominator: list[float], clusters: int
) -> None:
    ratio = log_ratio(np.array(numerator), np.array(denominator))
    assert np.isnan([ratio.centre, ratio.error, ratio.effective]).all()
    assert ratio.clusters == clusters


def test_a_ratio_is_known_from_two_clusters_on_and_those_without_anything_are_none() -> None:
    ratio = log_ratio(np.array([0.3, 0.0, 0.0]), np.array([0.2, 0.3, 0.0]))
    assert (ratio.clusters, ratio.centre) == pytest.approx((2, math.log(0.3 / 0.5)))
    weight = np.array([(1 + 0.4) / 2, 0.6 / 2])
    assert ratio.error == pytest.approx(math.sqrt((0.6**2 / (1 - weight)).sum()))
    assert ratio.effective == pytest.approx(1 / (weight**2).sum())
    alone = log_ratio(np.array([0.3]), np.array([0.2]))
    assert (alone.clusters, alone.effective, alone.centre) == pytest.approx((1, 1.0, math.log(1.5)))
    assert math.isnan(alone.error)
    crumb = log_ratio(np.array([1.0, 1e-20]), np.array([2.0, 1e-20]))
    assert crumb.error < 1e-9, "a weight of 1 divides by no 0"


@pytest.mark.parametrize("wrong", range(4))
def test_a_replay_whose_parts_are_of_other_rollouts_is_refused(wrong: int) -> None:
    parts = [*(np.zeros(3) for _ in range(2)), *(np.zeros((3, 2)) for _ in range(2))]
    Replay(*parts)
    parts[wrong] = parts[wrong][:2]
    with pytest.raises(ValueError, match="tokens and rounds"):
        Replay(*parts)


def test_the_reach_of_a_ratio_over_equal_clusters_is_students_with_one_degree_less() -> None:
    ratio = log_ratio(np.full(8, 100.0), 40.0 + np.array([1.0, -1.0] * 4))
    assert ratio.effective == pytest.approx(8.0, rel=1e-3)
    assert ratio.reach(0.975) / ratio.error == pytest.approx(stats.t.ppf(0.975, 7), rel=0.001)


def test_rollouts_of_one_prompt_widen_the_interval_when_grouped() -> None:
    rng = np.random.default_rng(6)
    tokens = np.full(64, 100.0)
    rounds = np.repeat(rng.uniform(25, 80, 8), 8)
    alone = log_ratio(tokens, rounds)
    grouped = log_ratio(tokens, rounds, np.repeat(np.arange(8), 8))
    assert (alone.clusters, grouped.clusters) == (64, 8)
    assert grouped.error > 2 * alone.error


def test_one_rollout_that_holds_most_tokens_leaves_little_certainty() -> None:
    ratio = log_ratio(np.array([1000.0, 10, 10, 10]), np.array([300.0, 5, 2, 4]))
    assert ratio.effective < 1.2
    assert ratio.reach(0.95) > 2 * 1.645 * ratio.error


@pytest.mark.parametrize(
    ("probability", "degrees", "tabulated"),
    [
        (0.95, 5, 2.0150),
        (0.975, 5, 2.5706),
        (0.99, 7, 2.9980),
        (0.95, 10, 1.8125),
        (0.975, 30, 2.0423),
        (0.95, 1000, 1.6464),
    ],
)
def test_student_quantiles_equal_the_tables(probability: float, degrees: int, tabulated: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(tabulated, rel=0.005)
    assert math.isnan(student_quantile(probability, 0))


@pytest.mark.parametrize("probability", [0.6, 0.8, 0.95, 0.975, 0.995])
def test_the_expansion_is_exact_to_the_third_order(probability: float) -> None:
    """What it lacks falls as 1/n⁴: a wrong coefficient of 1/n, 1/n² or 1/n³ would fall more slowly."""
    degrees = np.array([50, 100, 200, 400])
    lacks = [(stats.t.ppf(probability, n) - student_quantile(probability, n)) * n**4 for n in degrees.tolist()]
    assert lacks == pytest.approx([lacks[-1]] * 4, rel=0.1)
