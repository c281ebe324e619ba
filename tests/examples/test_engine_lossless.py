"""Speculation changes speed and nothing else: greedy text is identical, sampled text has the policy's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.engine_fixtures import (
    EOS_ID,
    base_policy,
    elicit_prompts,
    engine,
    meanwhile,
    odd_prompts,
    random_drafter,
    trained_drafter,
    write,
)
from scipy import stats
from transformers import Qwen3Config, Qwen3ForCausalLM

import examples.engine
from drafter.model.eagle3 import Eagle3Drafter
from examples.engine_drafting import Draft, DraftingMode, verify
from examples.engine_sequences import Completion, Sampling

PROMPTS = elicit_prompts(80) + odd_prompts(60)
GREEDY = Sampling(max_tokens=30, temperature=0.0, eos_id=EOS_ID)
#: Without an end of sequence the text runs on into states that the policy never saw, where drafters do badly.
ENDLESS = Sampling(max_tokens=30, temperature=0.0)


def _texts(completions: list[Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


@cache
def _plain(sampling: Sampling) -> list[list[int]]:
    """What the policy says without a drafter; greedy, so once is enough."""
    with engine(base_policy()[0]) as plain:
        return _texts(plain.submit(PROMPTS, sampling).result(timeout=60))


def test_greedy_text_without_a_drafter_is_that_of_transformers() -> None:
    model, _ = base_policy()
    ours = _plain(ENDLESS)
    for prompt, text in zip(PROMPTS[::7], ours[::7], strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=30,
            min_new_tokens=30,
            eos_token_id=[],
        )
        assert text == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
@pytest.mark.parametrize("sampling", [GREEDY, ENDLESS])
@pytest.mark.parametrize("make", [lambda: random_drafter(base_policy()[0], 3, 60), trained_drafter])
def test_greedy_text_is_identical_with_a_drafter(
    tmp_path: Path, make: Any, sampling: Sampling, drafting: DraftingMode
) -> None:
    directory = write(make(), tmp_path / "drafter")
    with engine(base_policy()[0], directory, max_sequences=32, drafting=drafting) as served:
        done = served.submit(PROMPTS, sampling).result(timeout=60)
    assert _texts(done) == _plain(sampling)
    assert sum(one.accepted_tokens for one in done) > 0


def test_greedy_text_is_identical_before_during_and_after_swaps(tmp_path: Path) -> None:
    model, _ = base_policy()
    size = len(trained_drafter().vocabulary)
    directories = [write(trained_drafter(), tmp_path / "trained")]
    for seed in (1, 2):
        drafter = Eagle3Drafter(trained_drafter().config, trained_drafter().vocabulary)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
        directories.append(write(drafter, tmp_path / f"random{seed}"))
    assert size < model.config.vocab_size
    versions = itertools.cycle(enumerate(directories))
    with engine(model, max_sequences=24) as served:

        def swap() -> None:
            number, directory = next(versions)
            served.swap_drafter(directory, f"v{number}")

        before = _texts(served.submit(PROMPTS, ENDLESS).result(timeout=60))
        with meanwhile(swap) as raised:
            during = served.submit(PROMPTS, ENDLESS).result(timeout=100)
        after = _texts(served.submit(PROMPTS, ENDLESS).result(timeout=60))
        swaps = served.counters().drafter_swaps
    assert not raised
    assert before == _texts(during) == after == _plain(ENDLESS)
    assert swaps >= 6, "the test is only worth something if drafters changed while requests ran"
    assert any(len(one.drafter_versions) > 1 for one in during)


def test_a_drafter_that_arrives_mid_request_serves_the_running_sequences_at_once(tmp_path: Path) -> None:
    model, _ = base_policy()
    directory = write(trained_drafter(), tmp_path / "drafter")
    with engine(model, max_sequences=64) as served:
        future = served.submit(elicit_prompts(64), Sampling(200, temperature=1.0))
        while served.counters().rounds < 5:
            pass
        served.swap_drafter(directory, "v1")
        done = future.result(timeout=60)
    assert all(one.drafter_versions == ["v1"] for one in done)
    # Tokens of plain rounds belong to no drafted round.
    assert all(0 < one.emitted_tokens < len(one.token_ids) - 5 for one in done)


# --- sampled text against the exact distribution ---------------------------------------------------------------------

VOCAB_SIZE = 5
LENGTH = 3
EOS = 4
SAMPLES = 6000


def _small_policy() -> Any:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Qwen3ForCausalLM(config).eval()


def _exact_law(model: Any, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every response of at most LENGTH tokens that ends at EOS."""
    law: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(LENGTH):
        texts = list(open_texts)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        steps = (logits.double() / temperature).softmax(-1).tolist()
        following: dict[tuple[int, ...], float] = {}
        for text, probabilities in zip(texts, steps, strict=True):
            for token, probability in enumerate(probabilities):
                ended = token == EOS or step == LENGTH - 1
                (law if ended else following)[(*text, token)] = open_texts[text] * probability
        open_texts = following
    return law


def _p_value(law: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square goodness of fit; outcomes too rare for it are pooled."""
    assert set(counts) <= set(law)
    samples = sum(counts.values())
    common = [text for text, probability in law.items() if probability * samples >= 5]
    expected = [law[text] * samples for text in common]
    observed = [counts[text] for text in common]
    rest = samples - sum(expected)
    if rest > 1e-9:
        expected.append(rest)
        observed.append(samples - sum(observed))
    assert len(expected) > 10
    return float(stats.chisquare(observed, [value * samples / sum(expected) for value in expected]).pvalue)


def _sample(directory: Path | None, model: Any, temperature: float, drafting: DraftingMode) -> Counter[tuple[int, ...]]:
    with engine(model, directory, depth=3, drafting=drafting, max_sequences=500, seed=17) as served:
        done = served.submit([[1, 2]], Sampling(LENGTH, temperature, EOS), n=SAMPLES // 2).result(timeout=60)
        done += served.submit([[1, 2]], Sampling(LENGTH, temperature, EOS), n=SAMPLES // 2).result(timeout=60)
    return Counter(tuple(one.token_ids) for one in done)


@pytest.mark.parametrize(
    ("temperature", "drafting", "draft_vocab_size"),
    [
        (1.0, "probabilistic", 5),
        (1.0, "probabilistic", 3),
        (0.7, "probabilistic", 4),
        (1.0, "greedy", 5),
        (1.5, "greedy", 3),
    ],
)
def test_sampled_text_has_exactly_the_policys_distribution(
    tmp_path: Path, temperature: float, drafting: DraftingMode, draft_vocab_size: int
) -> None:
    model = _small_policy()
    directory = write(random_drafter(model, 1, draft_vocab_size), tmp_path / "drafter")
    law = _exact_law(model, [1, 2], temperature)
    assert sum(law.values()) == pytest.approx(1)
    assert _p_value(law, _sample(directory, model, temperature, drafting)) > 1e-3


def test_plain_sampling_has_exactly_the_policys_distribution() -> None:
    model = _small_policy()
    assert _p_value(_exact_law(model, [1, 2], 1.0), _sample(None, model, 1.0, "probabilistic")) > 1e-3


def test_the_chi_square_test_notices_a_verifier_that_accepts_every_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_all(
        p: torch.Tensor, draft: Draft | None, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, emitted = verify(p, draft, generator)
        if draft is None:
            return accepted, emitted
        return torch.full_like(accepted, draft.tokens.shape[1]), torch.cat([draft.tokens, emitted[:, -1:]], dim=1)

    monkeypatch.setattr(examples.engine, "verify", accept_all)
    model = _small_policy()
    directory = write(random_drafter(model, 1), tmp_path / "drafter")
    assert _p_value(_exact_law(model, [1, 2], 1.0), _sample(directory, model, 1.0, "probabilistic")) < 1e-6
