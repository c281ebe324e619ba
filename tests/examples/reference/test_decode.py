"""Speculation changes nothing but speed: greedy text is identical, sampled text has the same law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter.decode_fixtures import (
    EOS,
    chi_square_excess,
    exact_law,
    greedy_texts,
    log_rollouts,
    make_drafter,
    make_prompts,
    make_target,
    read_whole,
    seeded,
    train_lightly,
)
from torch import Tensor

from drafter.errors import DrafterError
from drafter.model.eagle3 import Eagle3Drafter
from examples.reference.decode import Generation, generate, sampling_logprobs, verify_chain

# --- one verification, by itself ------------------------------------------------------------------------------------


class Chain:
    """Explicit laws p(next | last) over V tokens and q(next | last) over D of them, to draft and verify many rows."""

    def __init__(self, seed: int, *, greedy: bool, vocabulary: list[int], V: int = 5, depth: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.p = torch.tensor(rng.dirichlet(np.full(V, 0.7), (depth + 1, V)), dtype=torch.float32)
        self.q = torch.tensor(rng.dirichlet(np.full(len(vocabulary), 0.7), (depth, V)), dtype=torch.float32)
        self.ids = torch.tensor(vocabulary)
        self.greedy, self.depth, self.V = greedy, depth, V

    def draft(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
        """Target log-laws along the drafts [B, K+1, V], drafts [B, K], and the log-laws they came from."""
        last = torch.zeros(rows, dtype=torch.int64)
        p, q, drafts = [self.p[0][last]], [], []
        for step in range(self.depth):
            law = self.q[step][last]
            pick = law.argmax(1) if self.greedy else torch.multinomial(law, 1, generator=generator)[:, 0]
            last = self.ids[pick]
            q.append(law)
            drafts.append(last)
            p.append(self.p[step + 1][last])
        return torch.stack(p, 1).log(), torch.stack(drafts, 1), None if self.greedy else torch.stack(q, 1).log()

    def joint(self) -> np.ndarray:
        """Exact law of the first two tokens: [V, V]."""
        return (self.p[0][0][:, None] * self.p[1]).double().numpy()

    def emitted_pairs(self, verify: Callable[..., tuple[Tensor, Tensor]], rows: int) -> np.ndarray:
        """Counts of the first two emitted tokens [V, V]; a round that emits one token is continued from p itself."""
        generator = seeded(3)
        p, drafts, q = self.draft(rows, generator)
        accepted, latest = verify(p, q, drafts, vocabulary_ids=self.ids, generator=generator)
        first = torch.where(accepted > 0, drafts[:, 0], latest)
        continued = torch.multinomial(self.p[1][first], 1, generator=generator)[:, 0]
        second = torch.where(accepted > 1, drafts[:, 1], torch.where(accepted == 1, latest, continued))
        return np.bincount((first * self.V + second).numpy(), minlength=self.V**2).reshape(self.V, self.V)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocabulary", [[0, 1, 2, 3, 4], [1, 2, 4], [3]])
@pytest.mark.parametrize("seed", [0, 1])
def test_verified_tokens_have_the_law_of_the_target(seed: int, vocabulary: list[int], greedy: bool) -> None:
    chain = Chain(seed, greedy=greedy, vocabulary=vocabulary)
    counts = chain.emitted_pairs(verify_chain, 100_000)
    assert chi_square_excess(counts.ravel(), 100_000 * chain.joint().ravel()) < 4


def test_the_law_test_notices_faulty_verifiers() -> None:
    def without_residual(p: Tensor, q: Tensor, drafts: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        accepted, _ = verify_chain(p, q, drafts, **options)
        return accepted, torch.multinomial(p[torch.arange(len(p)), accepted].exp(), 1, generator=seeded(4))[:, 0]

    def offsets_as_ids(p: Tensor, q: Tensor, drafts: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options["vocabulary_ids"] = torch.arange(q.shape[2])
        return verify_chain(p, q, drafts.clamp(max=q.shape[2] - 1), **options)

    for faulty in (without_residual, offsets_as_ids):
        chain = Chain(0, greedy=False, vocabulary=[1, 2, 4])
        counts = chain.emitted_pairs(faulty, 100_000)
        assert chi_square_excess(counts.ravel(), 100_000 * chain.joint().ravel()) > 20


def test_acceptance_equals_the_overlap_of_the_two_laws() -> None:
    chain = Chain(2, greedy=False, vocabulary=[0, 1, 2, 3, 4], depth=1)
    p, drafts, q = chain.draft(200_000, seeded(5))
    accepted, _ = verify_chain(p, q, drafts, generator=seeded(6))
    overlap = float(torch.minimum(chain.p[0][0], chain.q[0][0]).sum())
    assert float(accepted.float().mean()) == pytest.approx(overlap, abs=0.005)


def test_a_perfect_drafter_is_always_accepted_and_an_impossible_draft_never() -> None:
    p = torch.log_softmax(torch.randn(500, 3, 7, generator=seeded(0)), dim=-1)
    drafts = torch.stack([torch.multinomial(p[:, j].exp(), 1, generator=seeded(j))[:, 0] for j in (0, 1)], dim=1)
    accepted, _ = verify_chain(p, p[:, :2], drafts, generator=seeded(1))
    assert bool((accepted == 2).all())
    forbidden = p.scatter(2, drafts[:, :1, None].expand(-1, 3, 1), -torch.inf)
    accepted, latest = verify_chain(forbidden, None, drafts, generator=seeded(2))
    assert bool((accepted == 0).all())
    assert bool((latest != drafts[:, 0]).all())


def test_drafts_that_do_not_exist_are_not_accepted_and_cost_nothing() -> None:
    p = torch.log_softmax(torch.randn(4000, 3, 5, generator=seeded(0))[:1].expand(4000, 3, 5), dim=-1)
    drafts = torch.zeros(4000, 2, dtype=torch.int64)
    lengths = torch.zeros(4000, dtype=torch.int64)
    accepted, latest = verify_chain(p, None, drafts, draft_lengths=lengths, generator=seeded(1))
    assert bool((accepted == 0).all())
    assert chi_square_excess(np.bincount(latest, minlength=5), 4000 * p[0, 0].exp().double().numpy()) < 4


def test_shapes_that_do_not_fit_are_refused() -> None:
    p = torch.zeros(2, 3, 5)
    with pytest.raises(DrafterError, match="p_logprobs"):
        verify_chain(p, None, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(DrafterError, match="q_logprobs"):
        verify_chain(p, torch.zeros(2, 2, 5), torch.zeros(2, 2, dtype=torch.int64), vocabulary_ids=torch.arange(3))
    with pytest.raises(DrafterError, match="negative"):
        sampling_logprobs(p, -1.0)


# --- whole responses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
def test_greedy_text_is_identical_with_and_without_a_drafter(target: Any, trained: Eagle3Drafter, depth: int) -> None:
    prompts, plain = make_prompts(120, 64), greedy_texts()
    fast = generate(target, trained, prompts, max_tokens=24, eos_id=EOS, temperature=0.0, depth=depth)
    raw = generate(target, make_drafter(target, 56), prompts, max_tokens=24, eos_id=EOS, temperature=0.0, depth=depth)
    assert fast.tokens == raw.tokens == plain.tokens
    assert fast.alpha > 1.3  # the drafter did take part
    assert set(plain.finished) == {"eos", "length"}


def test_greedy_text_is_the_argmax_of_a_clean_forward_pass(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(25, 64, seed=3)
    fast = generate(target, trained, prompts, max_tokens=20, temperature=0.0)
    for prompt, response in zip(prompts, fast.tokens, strict=True):
        logits, _ = read_whole(target, torch.tensor([prompt + response]))
        assert logits[0, len(prompt) - 1 : -1].argmax(dim=1).tolist() == response


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_clean_forward_pass(target: Any, trained: Eagle3Drafter, temperature: float) -> None:
    prompts = make_prompts(25, 64, seed=4)
    made = generate(target, trained, prompts, max_tokens=16, temperature=temperature, generator=seeded(1))
    clean = log_rollouts(target, prompts, made, temperature)
    own = torch.tensor([value for row in made.logprobs for value in row])
    torch.testing.assert_close(own, clean.logprobs[clean.loss_mask], atol=2e-4, rtol=0)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_sampled_text_has_the_law_of_plain_sampling(drafting: Any) -> None:
    target = make_target(vocab_size=8, sharpness=3.0)
    prompts, rows = [[3, 1, 4], [1]], 2000
    plain = generate(target, None, make_prompts(40, 8), max_tokens=12, generator=seeded(0))
    drafter = train_lightly(target, make_drafter(target, 6), log_rollouts(target, make_prompts(40, 8), plain), steps=15)
    made = generate(target, drafter, prompts * rows, max_tokens=3, depth=2, drafting=drafting, generator=seeded(7))
    assert 1.1 < made.alpha < 2.9
    for which, prompt in enumerate(prompts):
        codes = np.array(made.tokens[which::2]) @ np.array([64, 8, 1])
        assert chi_square_excess(np.bincount(codes, minlength=8**3), rows * exact_law(target, prompt, 3)) < 4


def test_plain_sampling_has_the_law_of_the_target() -> None:
    target = make_target(vocab_size=8, sharpness=3.0)
    made = generate(target, None, [[3, 1, 4]] * 2000, max_tokens=3, generator=seeded(8))
    codes = np.array(made.tokens) @ np.array([64, 8, 1])
    assert chi_square_excess(np.bincount(codes, minlength=8**3), 2000 * exact_law(target, [3, 1, 4], 3)) < 4


def test_counts_follow_the_engines(target: Any, trained: Eagle3Drafter) -> None:
    """Accepted drafts count before the text is cut, emitted tokens after; the first token belongs to no round."""
    prompts = make_prompts(100, 64)
    made = generate(target, trained, prompts, max_tokens=9, eos_id=EOS, depth=4, generator=seeded(2))
    for tokens, rounds, accepted, emitted, finished in zip(
        made.tokens, made.rounds, made.accepted, made.emitted, made.finished, strict=True
    ):
        assert emitted == len(tokens) - 1
        assert emitted <= accepted + rounds
        assert (tokens[-1] == EOS) if finished == "eos" else len(tokens) == 9
        assert EOS not in tokens[:-1]
    assert sum(made.accepted) + sum(made.rounds) > sum(made.emitted)  # something was cut
    assert made.alpha == sum(made.emitted) / sum(made.rounds)


def test_one_token_needs_no_round(target: Any, trained: Eagle3Drafter) -> None:
    made: Generation = generate(target, trained, [[1, 2], [3]], max_tokens=1, generator=seeded(0))
    assert [len(row) for row in made.tokens] == [1, 1]
    assert made.rounds == made.accepted == made.emitted == [0, 0]
    assert np.isnan(made.alpha)


def test_a_sequence_is_not_touched_by_those_beside_it(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(12, 64, seed=5)
    together = generate(target, trained, prompts, max_tokens=16, temperature=0.0)
    for row in (0, 5, 11):
        alone = generate(target, trained, [prompts[row]], max_tokens=16, temperature=0.0)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.rounds[0] == together.rounds[row]


def upto(text: list[int], ends: set[int]) -> list[int]:
    """The text up to the first of `ends`, which is part of it."""
    return text[: next((place for place, token in enumerate(text) if token in ends), len(text)) + 1]


def test_a_text_ends_with_any_of_several_tokens(target: Any, trained: Eagle3Drafter) -> None:
    prompts, size = make_prompts(40, 64), {"max_tokens": 24, "temperature": 0.0}
    whole = generate(target, None, prompts, **size).tokens  # type: ignore[arg-type]
    common = max(set(range(64)) - {EOS}, key=lambda token: sum(token in text for text in whole))
    made = generate(target, trained, prompts, eos_id=[common, EOS], **size)  # type: ignore[arg-type]
    assert made.tokens == [upto(text, {common, EOS}) for text in whole]
    assert {text[-1] for text, how in zip(made.tokens, made.finished, strict=True) if how == "eos"} == {common, EOS}
    for none in (None, list[int]()):
        assert generate(target, trained, prompts[:5], eos_id=none, **size).tokens == whole[:5]  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_text(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(6, 64)
    runs = [generate(target, trained, prompts, max_tokens=10, generator=seeded(seed)).tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_prompts_and_settings_that_cannot_work_are_refused(target: Any, trained: Eagle3Drafter) -> None:
    for prompts in ([], [[1], []]):
        with pytest.raises(DrafterError, match="at least one token"):
            generate(target, trained, prompts, max_tokens=4)
    with pytest.raises(DrafterError, match="max_tokens"):
        generate(target, trained, [[1]], max_tokens=0)


def test_a_layer_that_the_target_does_not_have_is_refused(target: Any) -> None:
    drafter = make_drafter(target)
    object.__setattr__(drafter.config, "aux_layers", (1, 2, 4))  # 4 would be the state after the final norm
    with pytest.raises(DrafterError, match="4 layers"):
        generate(target, drafter, [[1]], max_tokens=4)
