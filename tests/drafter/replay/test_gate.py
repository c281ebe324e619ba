"""How often the gate is wrong over a run, by simulation, what it promises, and what it refuses to judge."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from benchmarks.gate_error import WORLDS, World, batch, publishes, run, table
from drafter.replay import gate
from drafter.replay.acceptance import Replay, log_ratio
from drafter.replay.gate import GainPosterior, Look, Trial, compare
from service.worker.promotion.gate import given_up

DEPTH = 4


def replay_of(tokens: np.ndarray, alpha: np.ndarray) -> Replay:
    R = tokens.size
    empty = np.zeros((R, DEPTH))
    rounds = tokens / np.clip(alpha, 1.0, DEPTH + 1.0)
    return Replay(tokens.astype(float), rounds, empty, empty)


def pair(rng: np.random.Generator, rollouts: int, gain: float) -> tuple[Replay, Replay]:
    """Lengths and α of prompts spread widely (heavy tails); the two drafters share the prompt and differ by 8 %."""
    tokens = np.ceil(rng.lognormal(4.0, 1.0, rollouts))
    alpha = 1.2 + 3.0 * rng.beta(0.7, 0.7, rollouts)
    noise = rng.standard_t(3, rollouts) * 0.05
    served = replay_of(tokens, alpha)
    rounds = np.clip(served.rounds / (1.0 + gain) * np.exp(noise), tokens / (DEPTH + 1), tokens)
    return Replay(served.tokens, rounds, served.accepted, served.reached), served


def over(seed: int, prompts: int, siblings: int, looks: int = 3000) -> float:
    """Share of single looks at an equal challenger that lie above the 95 % quantile."""
    rng, found = np.random.default_rng(seed), 0
    world = World("", prompts, siblings)
    for _ in range(looks):
        look = compare(*batch(world, 0.0, rng))
        found += look.log_gain > 1.6449 * look.error
    return found / looks


@pytest.mark.parametrize(("prompts", "siblings"), [(4, 8), (8, 4), (32, 1)])
def test_a_look_at_few_prompts_is_as_honest_as_one_at_many(prompts: int, siblings: int) -> None:
    """Rollouts as clusters passed 18 % at 4 prompts of 8 siblings."""
    assert over(1, prompts, siblings) < 0.065


def published(world: str, gain: float, runs: int) -> float:
    """Share of runs of 100 looks in which a challenger is published (a short form of benchmarks/gate_error.py)."""
    (found,) = (w for w in WORLDS if w.name == world)
    rng = np.random.default_rng(2)
    return sum(run(found, gain, rng).looks is not None for _ in range(runs)) / runs


@pytest.mark.parametrize(
    "world",
    [
        *("32 prompts", "4 prompts of 8 siblings", "heavy tails", "prompt mix that moves"),
        *("gain varies by 0.5 % a claim", "gain varies by 1 % a claim"),
    ],
)
def test_an_equal_challenger_is_hardly_ever_published_in_a_run_of_100_looks(world: str) -> None:
    assert published(world, 0.0, 40) <= 0.05
    assert published(world, -0.01, 10) == 0.0


def test_one_world_alone_is_printed_as_among_all() -> None:
    alone, among = list[str](), list[str]()
    table(WORLDS[1:2], 1, 1, alone.append)
    table(WORLDS[:2], 1, 1, among.append)
    assert alone[2:] == [row for row in among[2:] if WORLDS[1].name in row]


def test_a_challenger_that_is_much_worse_on_few_prompts_is_seldom_taken_for_a_better_one() -> None:
    """Looks without such a prompt show a small gain and a small error. 99 of 100 runs published it once."""
    assert published("2 % better on 95 % of the prompts, 38 % worse on 5 %", 0.0, 40) <= 0.2


def test_a_better_challenger_is_published_soon_and_its_gain_is_not_oversold() -> None:
    rng = np.random.default_rng(3)
    for gain, looks in ((0.02, 10), (0.05, 2)):
        found = [run(WORLDS[0], gain, rng) for _ in range(40)]
        after, promised = [r.looks for r in found if r.looks], [r.promised for r in found if r.promised]
        assert len(after) == 40
        assert np.median(after) <= looks
        assert np.mean(promised) < gain + 0.01


def test_how_far_a_training_moves_the_gain_is_learnt() -> None:
    """Where each training brings 7 %, that is promised, and not the half of it; begun with a challenger not known."""
    trial = Trial()
    promised = []
    for _ in range(8):
        trial.trained()
        trial.take(Look(0.07, 0.025, 30, 240, 2.14, 2.0))
        promised.append(trial.verdict().gain)
        trial = Trial(promise=trial.promise.next().known())  # published
    assert min(promised) > 0.055
    assert promised[-1] == pytest.approx(0.07, abs=0.008)
    for _ in range(40):  # and then nothing any more
        trial.trained()
        trial.take(Look(0.0001, 0.025, 30, 240, 2.0, 2.0))
    trial.trained()
    trial.take(Look(0.03, 0.025, 30, 240, 2.06, 2.0))
    assert trial.verdict().gain < 0.02


@pytest.mark.parametrize(("share", "gain"), [(1.0, 0.05), (0.125, 0.05), (0.125, 0.1)])
def test_the_promise_is_kept_where_trainings_are_cut_into_parts(share: float, gain: float) -> None:
    """A part counted as a whole training promised a third too much; one step that is learnt, up to 14 % too little."""
    rng = np.random.default_rng(5)
    found = [one for _ in range(25) for one in publishes(share, gain, rng)]
    assert len(found) == 100
    promised, true = (sum(getattr(one, of) or 0.0 for one in found) for of in ("promised", "gain"))
    assert promised / true == pytest.approx(1.0, abs=0.09)


def test_against_the_next_served_drafter_the_gain_is_unknown_and_its_rise_is_not() -> None:
    trial = Trial(0.4)
    for _ in range(4):
        trial.trained()
        trial.take(Look(0.07, 0.02, 32, 256, 2.14, 2.0))
    begun, walks = trial.next(), trial.promise.walks
    assert (begun.share, begun.spent, begun.look_error, begun.same) == (0.4, Trial().spent, Trial().look_error, 0)
    assert begun.promise.moved == 0.0
    for walk, before in zip(begun.promise.walks, walks, strict=True):
        assert before.rise > 0.0
        assert (walk.step, walk.chance, walk.rise) == (before.step, before.chance, before.rise)
        assert (walk.mean, walk.variance, walk.covariance) == (0.0, 0.5**2, 0.0)
        assert walk.rise_variance == walk.step**2
    known = begun.promise.known()
    assert (known.mean, known.variance) == (0.0, 0.0), "it is the served drafter itself"
    assert {walk.rise for walk in known.walks} == {walk.rise for walk in walks}


def test_a_look_far_above_what_was_expected_begins_anew() -> None:
    """So it is where the policy came back. The rise that trainings bring stays known."""
    walk = gate.Walk(0.03, 0.3, mean=0.0, variance=0.01**2, rise=0.02, rise_variance=0.03**2, covariance=1e-4)
    edge = 3.0 * math.hypot(0.01, 0.02)
    walk.forget(edge * 0.999, 0.02**2)
    assert (walk.mean, walk.variance, walk.covariance) == (0.0, 0.01**2, 1e-4)
    walk.forget(edge * 1.001, 0.02**2)
    assert (walk.mean, walk.variance, walk.covariance) == (0.0, 0.5**2, 0.0)
    assert (walk.rise, walk.rise_variance) == (0.02, 0.03**2)


def test_one_look_that_shows_enough_is_enough() -> None:
    trial = Trial()
    trial.take(Look(0.3, 0.01, 256, 2048, 2.6, 2.0))
    assert trial.verdict().promote


def test_a_gain_that_comes_faster_than_before_is_promised() -> None:
    """Six looks of a demo's run, after publishes to which each part of a training brought 0.5 %.

    One step that is learnt from looks had fallen to its least value: 4.2 % with an error of 1.2 was promised. 13 came.
    """
    promise = GainPosterior().known()
    for _ in range(4):
        for number in range(1, 9):
            promise.trained(0.125)
            promise.learn(0.005 * number, 0.02**2 + 0.01**2)
        promise = promise.next().known()
    found = ((0.019, 0.011), (0.042, 0.018), (0.029, 0.032), (0.035, 0.029), (0.082, 0.031), (0.123, 0.041))
    for log_gain, error in found:
        promise.trained(0.125)
        promise.learn(log_gain, error**2 + 0.01**2)
    assert promise.mean > 0.055
    assert math.sqrt(promise.variance) > 0.02


def test_looks_pool() -> None:
    """No single one shows it."""
    trial, look = Trial(), Look(0.01, 0.01, 32, 32, 2.02, 2.0)
    errors = []
    for _ in range(40):
        trial.take(look)
        errors.append(trial.error)
    assert errors[0] > 0.2
    assert errors[-1] < 5e-3
    assert trial.verdict().promote
    assert trial.verdict().looks == 40
    assert 0.008 < trial.verdict().gain < 0.01, "shrunk, by less the more it is known"


def test_long_nothing_does_not_blind_it_to_what_comes_after() -> None:
    trial = Trial()
    for number in range(200):
        trial.trained()
        trial.take(Look(-0.02 + 0.001 * (number % 3), 0.01, 32, 32, 2.0, 2.0))
    looks = 0
    while not trial.verdict().promote:
        trial.trained()
        trial.take(Look(0.06, 0.01, 32, 32, 2.12, 2.0))
        looks += 1
    assert looks <= 3


@pytest.mark.parametrize("claims", [5, 45, 300])
@pytest.mark.parametrize(("before", "after", "most"), [(-0.47, 0.7, 1), (-0.2, 0.2, 3), (-0.05, 0.1, 10)])
def test_an_archived_version_that_fits_again_is_taken_however_long_it_did_not(
    claims: int, before: float, after: float, most: int
) -> None:
    """The policy goes back. Looks of before kept the promise below 0: a drafter twice as good was never published."""
    rng, looks, promised = np.random.default_rng(6), [], []
    for _ in range(20):
        trial, taken = Trial(0.05), 0
        for gain in rng.normal(before, 0.045, claims):
            trial.take(Look(math.expm1(gain), 0.045, 8, 64, 2.0, 2.0))
            assert not trial.verdict().promote
        while not trial.verdict().promote and taken < 40:
            trial.take(Look(math.expm1(rng.normal(after, 0.045)), 0.045, 8, 64, 2.0, 2.0))
            taken += 1
        looks.append(taken)
        promised.append(trial.verdict().gain)
    assert np.median(looks) <= most
    assert np.mean(promised) == pytest.approx(math.expm1(after), abs=0.03, rel=0.05)


def test_what_an_archived_version_may_spend_does_not_depend_on_what_it_showed() -> None:
    """The policy moves to and fro, and the version is never better: forgetting makes no error more likely."""
    rng, published = np.random.default_rng(7), 0
    for _ in range(200):
        trial = Trial()
        for number in range(100):
            level = -0.3 if number % 20 < 10 else 0.0
            trial.take(Look(math.expm1(rng.normal(level, 0.045)), 0.045, 8, 64, 2.0, 2.0))
            if trial.verdict(min_gain=0.0).promote:
                published += 1
                break
    assert published <= 15, "of 200; 10 are allowed on average"


def test_a_gain_that_no_swap_is_worth_is_not_published_however_sure() -> None:
    trial = Trial()
    for _ in range(3000):
        trial.take(Look(0.003, 0.002, 64, 64, 2.006, 2.0))
    verdict = trial.verdict()
    assert verdict.error < 0.05
    refused(trial, "a swap is worth +0.50%")
    assert trial.verdict(min_gain=0.001).promote


def mixture(s: float, n: float) -> float:
    """The mean of the likelihood ratio exp(δ·s - δ²·n/2) over δ of a half-normal law of 0.5, by integration."""
    peak = max(0.0, s / (n + 4.0))

    def part(effect: float) -> float:
        return math.exp(effect * s - effect**2 * n / 2) * 2 * float(stats.norm.pdf(effect, scale=0.5))

    width = 12.0 / math.sqrt(n + 4.0)
    return float(integrate.quad(part, max(0.0, peak - width), peak + width, epsabs=0.0)[0])


@pytest.mark.parametrize("n", [1.0, 7.0, 100.0, 4000.0])
@pytest.mark.parametrize("z", [-3.0, -0.5, 0.0, 0.7, 4.0])
def test_evidence_is_the_mean_likelihood_ratio_over_the_effects_that_are_expected(n: float, z: float) -> None:
    assert gate._log_e(z * math.sqrt(n), n) == pytest.approx(math.log(mixture(z * math.sqrt(n), n)), abs=1e-6)


@pytest.mark.parametrize("z", [-37.0, -39.0, -60.0, -1000.0])
def test_evidence_far_below_nothing_has_a_logarithm(z: float) -> None:
    n = 1e6
    width = 1 + 0.25 * n
    below = z * math.sqrt(0.25 * n / width)
    exact = math.log(2) - math.log(width) / 2 + below**2 / 2 + float(special.log_ndtr(below))
    assert gate._log_e(z * math.sqrt(n), n) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("deviates", [(4.0,), (0.0, 4.0), (2.0, 1.0, 1.5), (-1.0, -2.0), (1.5, 1.8, 1.6, 1.7, 1.9)])
def test_the_error_is_that_of_the_best_single_look_or_of_all_pooled_and_each_has_half_of_it(
    deviates: tuple[float, ...],
) -> None:
    """Look k has 6 / (π·k)² of either half, which add up to 1: of single looks, and of processes that begin there."""
    trial, prompts = Trial(0.8), [10 + 7 * k for k in range(len(deviates))]
    shares = [6 / (math.pi * k) ** 2 for k in range(1, len(deviates) + 1)]
    assert sum(6 / (math.pi * k) ** 2 for k in range(1, 100_000)) == pytest.approx(1.0, abs=1e-5)
    for z, n in zip(deviates, prompts, strict=True):
        trial.take(Look(math.expm1(z * math.hypot(0.03, trial.claims.sd)), 0.03, n, n, 2.0, 2.0))
    single = min(float(stats.norm.sf(z)) / share for z, share in zip(deviates, shares, strict=True))
    evidence = 0.0
    for begin, share in enumerate(shares):
        later = list(zip(deviates, prompts, strict=True))[begin:]
        evidence += share * mixture(sum(z * math.sqrt(n) for z, n in later), sum(n for _, n in later))
    assert trial.error == pytest.approx(min(1.0, 2 * min(single, 1 / evidence) / 0.8), rel=1e-6)


def test_the_processes_that_are_kept_are_those_of_the_last_looks_and_the_best_before() -> None:
    """Looks that show nothing are worth the less the later their process begins, for it has the smaller share."""
    trial = Trial()
    for _ in range(30):
        trial.take(Look(0.0, 0.03, 32, 32, 2.0, 2.0))
    begun = [round(math.sqrt(6 / math.exp(weight)) / math.pi) for weight, _, _ in trial.spent.starts]
    assert begun == [1, *range(23, 31)]
    assert [n / 32 for _, _, n in trial.spent.starts] == [30, *range(8, 0, -1)]


def test_parts_of_a_training_move_the_promise_as_far_as_the_whole() -> None:
    """Where a training brings the same each time; the rise may change between parts, which adds a little variance."""
    whole, parts = (GainPosterior().known(0.02**2) for _ in range(2))
    for one in (whole, parts):
        for walk in one.walks:
            walk.rise, walk.rise_variance = 0.03, 0.05**2
    whole.trained(1.0)
    for share in (0.5, 0.25, 0.25):
        parts.trained(share)
    assert (parts.mean, parts.moved) == pytest.approx((whole.mean, whole.moved)) == (0.03, 1.0)
    for of_whole, of_parts in zip(whole.walks, parts.walks, strict=True):
        assert of_whole.variance == pytest.approx(0.02**2 + 0.05**2 + of_whole.step**2)
        assert of_whole.variance <= of_parts.variance <= of_whole.variance + 0.5 * of_whole.step**2


def test_the_promise_is_the_posterior_of_a_mixture_of_gaussian_laws() -> None:
    """Beside one computation for all looks together: the joint normal law of gain and looks, of each assumption."""
    rng, shares, noise = np.random.default_rng(4), [1.0, 0.125, 0.25, 0.0, 0.125, 1.0], 0.02**2
    gains = np.cumsum(0.02 * np.array(shares)) + rng.normal(0.0, 0.02, len(shares))
    promise = GainPosterior().known(0.01**2)
    for share, log_gain in zip(shares, gains.tolist(), strict=True):
        promise.trained(share)
        promise.learn(log_gain, noise)
    logs, means, variances = [], [], []
    before = {0.001: 0.05, 0.003: 0.05, 0.01: 0.1, 0.03: 0.3, 0.1: 0.5}
    for step, chance in before.items():
        # What is drawn: the gain at first, the rise at first, then of each training its amount and its change of rise.
        law = np.diag([0.01**2, step**2] + [share * step**2 for share in shares for _ in range(2)])
        gain, rise, rows = np.zeros(len(law)), np.zeros(len(law)), []
        gain[0] = rise[1] = 1.0
        for number, share in enumerate(shares):
            gain = gain + share * rise
            gain[2 + 2 * number] += 1.0
            rise = rise.copy()
            rise[3 + 2 * number] += 1.0
            rows.append(gain)
        of_looks = np.array(rows) @ law @ np.array(rows).T + noise * np.eye(len(shares))
        weights = np.linalg.solve(of_looks, np.array(rows) @ law @ rows[-1])
        means.append(weights @ gains)
        variances.append(rows[-1] @ law @ rows[-1] - weights @ (np.array(rows) @ law @ rows[-1]))
        logs.append(math.log(chance) + stats.multivariate_normal.logpdf(gains, np.zeros(len(shares)), of_looks))
    assert [walk.mean for walk in promise.walks] == pytest.approx(means)
    assert [walk.variance for walk in promise.walks] == pytest.approx(variances)
    chances = np.exp(logs - np.max(logs))
    chances /= chances.sum()
    assert [walk.chance for walk in promise.walks] == pytest.approx(chances, abs=0.02)  # a little is forgotten
    told = np.array([walk.chance for walk in promise.walks])
    assert promise.mean == pytest.approx(told @ means)
    assert promise.variance == pytest.approx(told @ (np.array(variances) + np.square(means)) - (told @ means) ** 2)


@pytest.mark.parametrize("gain", [0.0, 20.0])
def test_impossible_looks_leave_the_promise_finite(gain: float) -> None:
    trial = Trial()
    for number in range(300):
        trial.trained()
        trial.take(Look((1 + gain) ** (-1) ** number - 1, 0.001, 32, 32, 2.0, 2.0))
    assert all(abs(walk.rise) <= 0.2 for walk in trial.promise.walks)
    assert math.fsum(walk.chance for walk in trial.promise.walks) == pytest.approx(1.0)
    assert 0.0 < trial.promise.variance < 1.0


def test_a_promise_stays_finite_where_nothing_is_looked_at_for_thousands_of_trainings() -> None:
    trial = Trial(promise=GainPosterior().known())
    for number in range(20):
        trial.trained()
        trial.take(Look(math.expm1(0.1 * number), 0.02, 50, 100, 2.0, 1.8))
    for _ in range(10_000):
        trial.trained()
    verdict = trial.verdict()
    assert -1.0 <= verdict.low <= verdict.gain <= verdict.high < 150.0


def test_an_archived_version_that_comes_back_is_known_by_that_look_alone() -> None:
    trial, alone, look = Trial(), Trial(), Look(0.5, 0.04, 32, 32, 3.0, 2.0)
    for _ in range(30):
        trial.take(Look(-0.4, 0.04, 32, 32, 1.2, 2.0))
    for one in (trial, alone):
        one.take(look)
    found, known = ([(walk.mean, walk.variance) for walk in one.promise.walks] for one in (trial, alone))
    assert found == known
    noise = 0.04**2 + 0.01**2
    assert alone.promise.mean == pytest.approx(math.log(1.5) * 0.25 / (0.25 + noise))


def test_a_verdict_states_the_promise_its_bounds_and_the_error_that_it_is_allowed() -> None:
    trial = Trial(promise=GainPosterior().known(0.05**2))
    trial.take(Look(0.04, 0.02, 32, 32, 2.08, 2.0))
    verdict = trial.verdict(confidence=0.9)
    reach = float(stats.norm.ppf(0.9)) * math.sqrt(trial.promise.variance)
    assert (verdict.gain, verdict.low, verdict.high) == pytest.approx(
        tuple(math.expm1(trial.promise.mean + part) for part in (0, -reach, reach))
    )
    said = f"not enough evidence yet: expected gain {verdict.gain:+.2%} ({verdict.low:+.2%} to {verdict.high:+.2%}) "
    said += "after 1 look; a drafter that is no better would look this good "
    said += f"in {100 * trial.error:.3g} % of trials at most (10 % allowed)"
    assert verdict.reason == said
    said = said.removeprefix("not enough evidence yet: ")
    assert trial.verdict(confidence=0.9, min_gain=0.5).reason == said + "; a swap is worth +50.00%"
    trial.take(Look(0.04, 0.02, 32, 32, 2.08, 2.0))
    assert "after 2 looks;" in trial.verdict().reason


def test_a_challenger_is_promoted_from_the_error_and_from_the_gain_that_are_allowed() -> None:
    trial = Trial()
    for _ in range(3):
        trial.take(Look(0.04, 0.02, 32, 32, 2.08, 2.0))
    error, gain = trial.error, trial.verdict().gain
    assert error < 0.25
    assert trial.verdict(confidence=1.0 - error).promote
    assert not trial.verdict(confidence=1.0 - error * 0.99).promote
    assert trial.verdict(confidence=0.5, min_gain=gain).promote
    assert not trial.verdict(confidence=0.5, min_gain=gain * 1.0001).promote


def test_shares_of_the_error_are_spent_apart() -> None:
    looks = [Look(0.05, 0.02, 32, 32, 2.1, 2.0)] * 2
    errors = []
    for share in (1.0, 0.1):
        trial = Trial(share)
        for look in looks:
            trial.take(look)
        errors.append(trial.error)
    assert errors[1] == pytest.approx(min(1.0, 10 * errors[0]))


def test_the_state_survives_json() -> None:
    rng, trial = np.random.default_rng(4), Trial(0.9)
    for _ in range(12):
        trial.trained()
        trial.take(compare(*pair(rng, 32, 0.01)))
    again = Trial.from_json(json.loads(json.dumps(trial.to_json())))
    assert again == trial
    for one in (trial, again):
        one.take(Look(0.02, 0.01, 32, 32, 2.04, 2.0))
    assert again.verdict() == trial.verdict()


def test_numbers_that_no_float_holds_are_no_trouble() -> None:
    for gain in (-0.99, 1e6):
        trial = Trial()
        for _ in range(50):
            trial.take(Look(gain, 1e-9, 1_000_000, 1_000_000, 4.0, 1.0))
        assert trial.error == (1.0 if gain < 0 else 0.0)
        assert trial.verdict().promote == (gain > 0)


def test_a_look_states_the_ratio_of_sums() -> None:
    challenger, served = pair(np.random.default_rng(5), 100, 0.03)
    look = compare(challenger, served)
    assert look.gain == pytest.approx(challenger.alpha / served.alpha - 1)
    assert (look.prompts, look.rollouts, look.fault) == (100, 100, "")
    assert compare(challenger, served) == look


@pytest.mark.parametrize(("gain", "least"), [(0.2, 0.186), (0.5, 0.43)])
def test_a_large_gain_is_promised_at_the_first_look_though_its_prompts_are_few(gain: float, least: float) -> None:
    """The error that makes a gain of 0 as unlikely as Student's t does is the wider, the larger the gain is."""
    promised = []
    for seed in range(40):
        trial = Trial(promise=GainPosterior().known())
        trial.trained()
        trial.take(compare(*batch(World("", 8, 4), gain, np.random.default_rng(seed))))
        promised.append(trial.verdict().gain)
    assert least < float(np.mean(promised)) < gain


def test_a_gain_below_five_standard_errors_has_one_error() -> None:
    tokens, ahead = np.full(8, 100.0), np.array([1.0, 1.01, 1.02, 1.03] * 2)
    served = replay_of(tokens, np.full(8, 2.0))
    small, large = (compare(replay_of(tokens, 2.0 * (ahead + gain)), served) for gain in (0.0, 0.2))
    ratio = log_ratio(served.rounds, served.rounds / (ahead + 0.2))
    assert small.error_above == small.error
    assert large.error_above == pytest.approx(gate._widened(5.0 * ratio.error, ratio.error, ratio.effective - 1.0))
    assert large.error_above < large.error / 3


def test_rollouts_of_one_prompt_count_once() -> None:
    challenger, served = pair(np.random.default_rng(6), 20, 0.0)
    many = np.repeat(np.arange(20), 16)
    copies = challenger.select(many), served.select(many)
    alone, grouped = compare(challenger, served), compare(*copies, many)
    assert (grouped.prompts, grouped.rollouts) == (20, 320)
    assert grouped.error == pytest.approx(alone.error)
    assert compare(*copies).error < grouped.error / 2


@pytest.mark.parametrize(("degrees", "careful"), [(1.0, 0.121), (2.0, 0.032), (5.0, 0.004), (30.0, 0.0002)])
def test_a_widened_error_makes_students_deviate_a_normal_one_or_a_smaller_one(degrees: float, careful: float) -> None:
    for deviate in np.linspace(0.01, 2.0, 40).tolist():
        t = float(stats.t.isf(stats.norm.sf(deviate), degrees))
        found = t * 0.03 / gate._widened(t * 0.03, 0.03, degrees)
        assert -careful <= found - deviate <= 0.0085 / degrees
        assert gate._widened(-t * 0.03, 0.03, degrees) == gate._widened(t * 0.03, 0.03, degrees)
    slope = float(stats.norm.pdf(0.0) / stats.t.pdf(0.0, degrees))
    for t in (0.0, 1e-4, 2e-3):
        assert gate._widened(t, 1.0, degrees) == pytest.approx(slope, rel=0.026)


def test_the_error_of_a_look_is_students_with_one_degree_less_than_there_are_prompts() -> None:
    tokens, gains = np.full(5, 100.0), np.array([0.02, 0.03, 0.04, 0.05, 0.06])
    served = replay_of(tokens, np.full(5, 2.0))
    ratio = log_ratio(served.rounds, served.rounds / (1.0 + gains))
    assert ratio.effective == pytest.approx(5.0, rel=1e-3)
    look = compare(replay_of(tokens, 2.0 * (1.0 + gains)), served)
    deviate = float(stats.norm.isf(stats.t.sf(ratio.centre / ratio.error, 4)))
    assert look.log_gain / look.error == pytest.approx(deviate, rel=0.01)


def refused(trial: Trial, why: str) -> None:
    verdict = trial.verdict()
    assert not verdict.promote
    assert why in verdict.reason


def fault_of(look: Look) -> str:
    """Why a look is no evidence; a trial that takes it knows as little as before."""
    trial = Trial()
    trial.take(look)
    assert trial == Trial()
    refused(trial, "too little evidence")
    verdict = trial.verdict()
    assert all(math.isnan(number) for number in (verdict.gain, verdict.low, verdict.high))
    assert (verdict.looks, verdict.error) == (0, 1.0)
    return look.fault


def test_the_same_drafter_is_no_evidence_and_is_known_to_gain_nothing() -> None:
    """Greedy drafts that agree: none of the error is spent, and a sent drafter gets its verdict."""
    _, served = pair(np.random.default_rng(7), 100, 0.0)
    look, trial = compare(served, served), Trial()
    assert "no difference" in look.fault
    assert look == Look(0.0, 0.0, 100, 100, served.alpha, served.alpha, look.fault)
    assert look.same
    expected = GainPosterior()
    expected.learn(0.0, gate.CLAIM_SD**2)
    trial.take(look)
    assert trial.promise == expected
    for _ in range(15):
        trial.take(look)
    assert trial.spent == Trial().spent
    verdict = Trial.from_json(trial.to_json()).verdict()
    assert (verdict.promote, verdict.looks, verdict.error) == (False, 16, 1.0)
    trial.promise.learn(0.2, 1e-6)
    assert not trial.verdict(confidence=0.5).promote, "such looks are no evidence, whatever is expected"
    assert given_up(verdict, 0, 0.005) == "it is no better"


def test_what_bounds_nothing_is_no_evidence() -> None:
    tokens = np.full(16, 100.0)
    better, worse = replay_of(tokens, np.full(16, 4.0)), replay_of(tokens, np.full(16, 1.5))
    assert "at least 2 prompts" in fault_of(compare(better, worse, np.zeros(16, dtype=np.int64)))
    assert not compare(better, worse).fault, "the same gain everywhere is a gain"
    nothing = replay_of(np.zeros(50), np.full(50, 2.0))
    assert "no evidence" in fault_of(compare(nothing, nothing))
    empty = replay_of(np.zeros(0), np.zeros(0))
    assert "no evidence" in fault_of(compare(empty, empty))


def test_rollouts_without_a_round_are_not_counted() -> None:
    tokens = np.concatenate((np.full(10, 50.0), np.zeros(90)))
    look = compare(replay_of(tokens, np.full(100, 4.0)), replay_of(tokens, np.full(100, 1.5)))
    assert (look.rollouts, look.prompts) == (10, 10)


def test_values_that_cannot_be_are_no_evidence() -> None:
    challenger, served = pair(np.random.default_rng(8), 50, 0.5)
    challenger.rounds[3] = math.nan
    assert "not finite" in fault_of(compare(challenger, served))
    challenger.rounds[3] = 0.0
    assert "impossible" in fault_of(compare(challenger, served))


@pytest.mark.parametrize(("alpha", "possible"), [(0.99, False), (1.0, True), (5.0, True), (5.01, False)])
def test_a_round_emits_a_token_at_least_and_the_drafts_and_one_at_most(alpha: float, possible: bool) -> None:
    tokens = np.full(16, 100.0)
    served = replay_of(tokens, np.full(16, 2.0))
    odd = Replay(tokens, tokens / alpha, served.accepted, served.reached)
    for challenger, other, name in ((odd, served, "challenger"), (served, odd, "served drafter")):
        look = compare(challenger, other)
        wanted = "" if possible else f"the {name}'s replay is impossible: a round emits 1 to 5 tokens"
        assert look.fault == wanted
        assert (look.rollouts, look.alpha_challenger, look.alpha_served) == (16, challenger.alpha, other.alpha)
        if look.fault:
            assert math.isnan(look.gain)
            assert math.isnan(look.error)
            assert look.prompts == 0


def test_two_prompts_are_evidence_and_so_is_a_gain_of_nothing_that_differs_between_them() -> None:
    tokens = np.full(4, 100.0)
    served = replay_of(tokens, np.full(4, 2.0))
    mixed = Replay(tokens, np.array([45.0, 45.0, 55.0, 55.0]), served.accepted, served.reached)
    for groups, prompts in ((None, 4), (np.array([0, 0, 1, 1]), 2)):
        look = compare(mixed, served, groups)
        assert (look.fault, look.prompts, look.gain) == ("", prompts, 0.0)
        assert look.error > 0.05
    spread = math.hypot(0.05 / math.sqrt(1 - 0.475), 0.05 / math.sqrt(1 - 0.525))
    student = float(stats.norm.pdf(0.0) / stats.t.pdf(0.0, 1))
    assert look.error == pytest.approx(spread * student, rel=0.03), "two prompts leave one degree of freedom"


def test_replays_of_other_rollouts_or_depths_are_no_evidence() -> None:
    challenger, served = pair(np.random.default_rng(9), 50, 0.5)
    assert "not paired" in fault_of(compare(challenger.select(range(49)), served))
    assert "not paired" in fault_of(compare(challenger.select(list(range(49, -1, -1))), served))
    deeper = Replay(served.tokens, served.rounds, np.zeros((50, 5)), np.zeros((50, 5)))
    assert "depth" in fault_of(compare(challenger, deeper))
    assert "one prompt per rollout" in fault_of(compare(challenger, served, np.arange(3)))


@pytest.mark.parametrize("settings", [{"confidence": 1.0}, {"confidence": 0.3}, {"min_gain": math.nan}])
def test_nonsensical_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Trial().verdict(**settings)


def test_the_spread_from_claim_to_claim_is_learnt_from_three_looks_in_a_row() -> None:
    """The more the looks' own errors are of it, the less an observation weighs."""
    trial, gains, errors = Trial(), [0.01, -0.03, 0.05, 0.02, 0.02], [0.004, 0.006, 0.05, 0.004, 0.003]
    seen = [(4.0, 0.018**2)]  # weight, variance: an inverse gamma law of 6 observations, of which the mean takes 2 off
    for place, (gain, error) in enumerate(zip(gains, errors, strict=True)):
        known = sum(weight * variance for weight, variance in seen) / sum(weight for weight, _ in seen)
        assert trial.claims.sd == pytest.approx(max(known, 0.01**2) ** 0.5), "before it is looked at"
        trial.take(Look(math.expm1(gain), error, 10**place, 64, 2.0, 2.0))
        if place >= 2:  # the more prompts, the less the look's own error is raised to what the others had
            mean = [np.mean([e**2 * 10**i for i, e in enumerate(errors[: k + 1])]) / 10**k for k in range(5)]
            a, b, c = [max(e**2, float(m)) for e, m in zip(errors, mean, strict=True)][place - 2 : place + 1]
            noise = a + 4 * b + c
            second = (gains[place - 2] - 2 * gains[place - 1] + gain) ** 2 - noise
            seen.append((1 / (1 + noise / (6 * 0.018**2)) ** 2, min(second / 6, 0.03**2)))
    again = Trial.from_json(json.loads(json.dumps(trial.to_json())))
    assert again == trial
    for gain in (0.02,) * 400:
        trial.take(Look(gain, 0.003, 64, 64, 2.0, 2.0))
    assert trial.claims.sd == 0.01
    assert 31.5 < trial.claims.observations < 32.0, "the last 32 count, and none weighs 1 in full"
    assert trial.next().claims.observations == 6.0
    assert trial.next().claims.sd == pytest.approx(0.018), "a quiet past does not say that it stays quiet"
    for gain in (0.03, -0.03) * 15:
        trial.take(Look(gain, 0.003, 64, 64, 2.0, 2.0))
    after = trial.next()
    assert after.claims.sd > 0.02
    assert (after.claims.sd, after.spent.looks, after.claims.last) == (trial.claims.sd, 0, [])


def test_looks_of_few_prompts_do_not_unlearn_what_looks_of_many_show() -> None:
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(60):
        trial = Trial(0.9)
        for number in range(100):
            prompts = 64 if number % 2 else 4
            error = 0.08 / math.sqrt(prompts)
            gain = rng.normal(0.0, math.hypot(error, 0.02))
            trial.take(Look(math.expm1(gain), error, prompts, 4 * prompts, 2.0, 2.0))
            if trial.verdict().promote:
                wrong += 1
                break
            trial.trained()
    assert wrong <= 10, "24 % with all observations weighing as much; 13 % in 250 runs now"


@pytest.mark.parametrize(("sd", "rise"), [(0.0, 0.0), (0.0, 0.02), (0.02, 0.0), (0.02, 0.02)])
def test_what_trainings_bring_is_not_taken_for_what_the_gain_varies_by(sd: float, rise: float) -> None:
    rng, found = np.random.default_rng(8), []
    for _ in range(20):
        trial = Trial(promise=GainPosterior().known())
        for number in range(60):
            trial.trained()
            trial.take(Look(math.expm1(rise * number + rng.normal(0.0, math.hypot(sd, 0.01))), 0.01, 32, 32, 2.0, 2.0))
        found.append(trial.claims.sd)
    assert np.mean(found) == pytest.approx(max(sd, 0.01), abs=0.003)


@pytest.mark.parametrize("past", ["", ", after 40 quiet looks"])
@pytest.mark.parametrize("name", ["gain varies by 2 % a claim", "gain varies by 2 % a claim, 64 of 8"])
def test_where_the_gain_varies_by_more_than_is_assumed_an_equal_challenger_is_seldom_published(
    name: str, past: str
) -> None:
    """With 1 % assumed, and nothing learnt, 39 and 71 of 100; and so after a publish that came after quiet looks."""
    world = next(world for world in WORLDS if world.name == name + past)
    wrong = sum(run(world, 0.0, np.random.default_rng([11, number])).looks is not None for number in range(60))
    assert wrong <= 9
