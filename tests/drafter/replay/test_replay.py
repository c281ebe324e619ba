"""Replay α against live counting: the same drafter, the same policy, the same text, and other texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter.decode_fixtures import (
    EOS,
    default_target,
    log_rollouts,
    make_drafter,
    make_prompts,
    policy_of,
    schooled,
    schooling,
    train_lightly,
)
from helpers.drafter.drafter_worlds import SHAPES, world
from helpers.worker.live_interval import replay_live

from drafter.batch import RolloutBatch, prompt_hashes
from drafter.errors import BatchRejected, DrafterError
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.acceptance import find_segments
from drafter.replay.replay import conditional_acceptance, numbered, replay
from examples.reference.decode import Generation, generate

DEPTH = 3
Live = Callable[..., tuple[Generation, RolloutBatch]]
PROMPTS = make_prompts(80, 64)
POLICY = policy_of(default_target())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target() -> Any:
    return default_target()


@pytest.fixture(scope="module")
def plain(target: Any) -> RolloutBatch:
    """Rollouts generated with no speculation at all."""
    made = generate(target, None, PROMPTS, max_tokens=20, eos_id=EOS, generator=seeded(0))
    return log_rollouts(target, PROMPTS, made)


@pytest.fixture(scope="module")
def drafters(target: Any) -> dict[str, Eagle3Drafter]:
    """An untrained one and two trained apart, as before and after a swap."""
    return {
        "untrained": make_drafter(target, 56).eval(),
        "trained": schooled(),
        "swapped": train_lightly(target, make_drafter(target, 40, seed=4), schooling(), steps=10),
    }


@pytest.fixture(scope="module")
def live(target: Any, drafters: dict[str, Eagle3Drafter]) -> Live:
    """Serve the prompts with a drafter; returns what the engine counted and what a trainer would log. Cached."""

    @cache
    def serve(name: str, drafting: Any = "probabilistic", temperature: float = 1.0) -> tuple[Generation, RolloutBatch]:
        made = generate(
            target,
            drafters[name],
            PROMPTS,
            max_tokens=20,
            eos_id=EOS,
            depth=DEPTH,
            drafting=drafting,
            temperature=temperature,
            generator=seeded(1),
        )
        assert set(made.finished) == {"eos", "length"}
        return made, log_rollouts(target, PROMPTS, made, temperature)

    return serve


@pytest.mark.parametrize("name", ["untrained", "trained", "swapped"])
def test_replay_equals_live_counting_for_probabilistic_drafts(live: Live, drafters: Any, name: str) -> None:
    made, batch = live(name)
    result, (low, high) = replay_live(0.999, drafters[name], batch, POLICY, depth=DEPTH)
    assert low < made.alpha < high
    assert high - low < 0.1 * made.alpha  # the interval is narrow enough to mean something
    assert result.tokens.tolist() == made.emitted


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", ["untrained", "trained", "swapped"])
def test_replay_of_greedy_drafts_equals_live_counting_round_for_round(
    live: Live, drafters: Any, name: str, temperature: float
) -> None:
    """Greedy drafts leave nothing to chance: every rollout's rounds must come out exactly."""
    made, batch = live(name, "greedy", temperature)
    result = replay(drafters[name], batch, POLICY, depth=DEPTH, drafting="greedy")
    np.testing.assert_allclose(result.rounds, made.rounds, atol=1e-9)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
@pytest.mark.parametrize("name", ["untrained", "trained", "swapped"])
def test_rollouts_made_without_speculation_foretell_live_alpha(
    live: Live, plain: RolloutBatch, drafters: Any, name: str, drafting: Any
) -> None:
    """What the controller does: predict a drafter that did not serve. Two independent samples, so two intervals."""
    foretold = replay(drafters[name], plain, POLICY, depth=DEPTH, drafting=drafting)
    made, batch = live(name, drafting)
    low, high = replay(drafters[name], batch, POLICY, depth=DEPTH, drafting=drafting).interval(0.99)
    foretold_low, foretold_high = foretold.interval(0.99)
    assert max(low, foretold_low) < min(high, foretold_high)
    assert math.isclose(made.alpha, foretold.alpha, rel_tol=0.1)


def test_a_temperature_below_one_is_part_of_p(live: Live, drafters: Any) -> None:
    made, batch = live("trained", temperature=0.6)
    _, (low, high) = replay_live(0.999, drafters["trained"], batch, POLICY, depth=DEPTH)
    assert low < made.alpha < high


def test_training_shows_in_replay(plain: RolloutBatch, drafters: Any) -> None:
    alphas = {name: replay(drafter, plain, POLICY, depth=DEPTH).alpha for name, drafter in drafters.items()}
    assert alphas["untrained"] < alphas["swapped"] < alphas["trained"]


def test_a_greedy_target_is_replayed_greedily_whatever_is_asked(live: Live, drafters: Any) -> None:
    _, batch = live("trained", "greedy", 0.0)
    asked = replay(drafters["trained"], batch, POLICY, depth=DEPTH, drafting="probabilistic")
    greedy = replay(drafters["trained"], batch, POLICY, depth=DEPTH, drafting="greedy")
    np.testing.assert_array_equal(asked.rounds, greedy.rounds)


def test_groups_of_rollouts_do_not_change_the_result(plain: RolloutBatch, drafters: Any) -> None:
    whole = replay(drafters["trained"], plain, POLICY, depth=DEPTH)
    parts = replay(drafters["trained"], plain, POLICY, depth=DEPTH, tokens_at_once=50)
    np.testing.assert_allclose(whole.rounds, parts.rounds, rtol=1e-4)
    np.testing.assert_allclose(whole.accepted, parts.accepted, atol=1e-3)


def test_chunks_of_logits_do_not_change_the_result(
    plain: RolloutBatch, drafters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replay(drafters["trained"], plain, POLICY, depth=DEPTH)
    monkeypatch.setattr("drafter.replay.replay._LOGITS_ELEMENTS_ON_CPU", 1000)
    np.testing.assert_allclose(replay(drafters["trained"], plain, POLICY, depth=DEPTH).rounds, whole.rounds, rtol=1e-5)


def test_tokens_outside_the_draft_vocabulary_are_never_accepted(plain: RolloutBatch, drafters: Any) -> None:
    drafter = drafters["swapped"]
    segments = find_segments(plain.loss_mask.numpy(), plain.cu_seqlens.numpy())
    for greedy in (False, True):
        c = conditional_acceptance(drafter, plain, POLICY, segments, depth=DEPTH, greedy=greedy)
        outside = ~drafter.vocabulary.t2d[plain.input_ids[segments.rows()]]
        assert bool(outside.any())
        assert not bool(c[outside, 0].any())
        assert bool((c[~outside, 0] > 0).any())


def test_rounds_restart_after_a_tool_call(plain: RolloutBatch, drafters: Any) -> None:
    """Two calls of the policy in one rollout: as one response, less the token after the tool's, which is prefilled."""
    one = plain.select([next(i for i in range(plain.rollouts) if _length(plain, i) >= 24)])
    mask = one.loss_mask.clone()
    first = int(torch.nonzero(mask)[0])
    mask[first + 6 : first + 9] = False
    split = replay(drafters["trained"], replace(one, loss_mask=mask), POLICY, depth=DEPTH)
    head = one.loss_mask & (torch.arange(one.tokens) < first + 6)
    tail = one.loss_mask & (torch.arange(one.tokens) >= first + 9)
    parts = [replay(drafters["trained"], replace(one, loss_mask=m), POLICY, depth=DEPTH) for m in (head, tail)]
    assert split.rounds[0] == pytest.approx(sum(part.rounds[0] for part in parts), rel=1e-5)
    assert split.tokens[0] == int(mask.sum()) - 2


def _length(batch: RolloutBatch, index: int) -> int:
    return int(batch.cu_seqlens[index + 1] - batch.cu_seqlens[index])


def test_a_response_of_one_token_or_without_a_prompt_is_counted_and_not_crashed_on(
    plain: RolloutBatch, drafters: Any
) -> None:
    one = plain.select([0])
    single = torch.zeros_like(one.loss_mask)
    single[-1] = True
    none = replay(drafters["trained"], replace(one, loss_mask=single), POLICY, depth=DEPTH)
    assert (none.tokens[0], none.rounds[0]) == (0, 0)
    everything = torch.ones_like(one.loss_mask)
    whole = replay(drafters["trained"], replace(one, loss_mask=everything), POLICY, depth=DEPTH)
    assert whole.tokens[0] == one.tokens - 1
    assert whole.alpha >= 1.0
    silent = replay(drafters["trained"], replace(one, loss_mask=~everything), POLICY, depth=DEPTH)
    assert math.isnan(silent.alpha)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_features_that_are_not_numbers_are_refused(plain: RolloutBatch, drafters: Any, drafting: Any) -> None:
    broken = replace(plain, aux_hidden=plain.aux_hidden.clone().fill_(math.nan))
    with pytest.raises(BatchRejected, match="NaN"):
        replay(drafters["trained"], broken, POLICY, depth=DEPTH, drafting=drafting)


def test_nonsensical_settings_are_refused(plain: RolloutBatch, drafters: Any) -> None:
    with pytest.raises(DrafterError, match="depth"):
        replay(drafters["trained"], plain, POLICY, depth=0)


def test_rollouts_of_one_prompt_form_a_group(target: Any) -> None:
    prompts = [[1, 2, 3], [4], [1, 2, 3], [1, 2]]
    made = generate(target, None, prompts, max_tokens=6, generator=seeded(0))
    assert numbered(prompt_hashes(log_rollouts(target, prompts, made))).tolist() == [0, 1, 0, 2]


# --- mutations: a mistake in what is fed in must show, or agreement would prove nothing ------------------------------


def shifted_features(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, aux_hidden=batch.aux_hidden.roll(1, dims=0))


def layers_swapped(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, aux_hidden=batch.aux_hidden.roll(64, dims=1))


def tokens_shifted(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, input_ids=batch.input_ids.roll(1))


@pytest.mark.parametrize("mutate", [shifted_features, layers_swapped, tokens_shifted])
def test_a_wrong_input_breaks_the_agreement(live: Live, drafters: Any, mutate: Any) -> None:
    """Each of these is a mistake that a capture has made somewhere. Greedy drafts: not one round may differ."""
    made, batch = live("trained", "greedy")
    right = replay(drafters["trained"], batch, POLICY, depth=DEPTH, drafting="greedy")
    wrong = replay(drafters["trained"], mutate(batch), POLICY, depth=DEPTH, drafting="greedy")
    np.testing.assert_allclose(right.rounds, made.rounds, atol=1e-9)
    assert np.abs(wrong.rounds - made.rounds).sum() > 10


def test_logprobs_at_the_wrong_temperature_inflate_alpha(target: Any, live: Live, drafters: Any) -> None:
    """Untempered, p(x) of the likely tokens is too small, so min(1, q/p) is too large: hence the worker's gap check."""
    made, batch = live("trained", temperature=0.3)
    untempered = log_rollouts(target, PROMPTS, made, 1.0)
    right = replay(drafters["trained"], batch, POLICY, depth=DEPTH).alpha
    wrong = replay(drafters["trained"], replace(batch, logprobs=untempered.logprobs), POLICY, depth=DEPTH).alpha
    assert wrong > 1.01 * right


def test_d2t_read_as_absolute_ids_breaks_the_agreement(live: Live, drafters: Any) -> None:
    made, batch = live("trained", "greedy")
    drafter = drafters["trained"]
    right = drafter.vocabulary
    absolute = type(right)(torch.arange(len(right)), right.vocab_size)
    drafter.vocabulary = absolute
    try:
        wrong = replay(drafter, batch, POLICY, depth=DEPTH, drafting="greedy")
    finally:
        drafter.vocabulary = right
    assert not np.array_equal(wrong.rounds, made.rounds)


def test_scoring_in_bfloat16_as_on_cuda_stays_near_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(SHAPES["packed, full response"], dtype=torch.float32)
    exact = replay(w.drafter, w.batch, w.policy, depth=3)
    monkeypatch.setattr("drafter.replay.replay.working_dtype", lambda _: torch.bfloat16)
    rounded = replay(w.drafter, w.batch, w.policy, depth=3)
    assert rounded.alpha != exact.alpha
    assert rounded.alpha == pytest.approx(exact.alpha, rel=0.02)


def test_a_token_of_another_law_counts_by_its_weight(plain: RolloutBatch, drafters: dict[str, Eagle3Drafter]) -> None:
    """By hand: min(1, q / p) * p / s is min(q / s, p / s), with s the law that drew the token."""
    segments = find_segments(plain.loss_mask.numpy(), plain.cu_seqlens.numpy())

    def of(log_weight: float | None, *, greedy: bool = False) -> Any:
        weights = None if log_weight is None else torch.full((plain.tokens,), log_weight)
        batch = replace(plain, log_weights=weights)
        return conditional_acceptance(drafters["trained"], batch, POLICY, segments, depth=DEPTH, greedy=greedy)

    over = of(9.0)  # q / s itself, up to e^9
    assert float(over.max()) > 1.5, "else nothing is cut"
    for log_weight in (-0.5, 0.0, 0.4):
        torch.testing.assert_close(of(log_weight), over.clamp(max=math.exp(log_weight)))
        torch.testing.assert_close(of(log_weight, greedy=True), of(None, greedy=True) * math.exp(log_weight))
    torch.testing.assert_close(of(None), of(0.0))
    half = replace(plain, log_weights=torch.full((plain.tokens,), -0.7))
    assert (
        replay(drafters["trained"], half, POLICY, depth=DEPTH).alpha
        < replay(drafters["trained"], plain, POLICY, depth=DEPTH).alpha
    ), "and the replay knows of it"
