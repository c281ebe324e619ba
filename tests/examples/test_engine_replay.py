"""α counted live by the engine is replay α of the same rollouts, whose features come from a plain forward."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import (
    EOS_ID,
    base_policy,
    elicit_prompts,
    engine,
    random_drafter,
    rollouts,
    trained_drafter,
    write,
)
from helpers.worker.live_interval import replay_live

from drafter.files.checkpoint import read_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from examples.elicit import MAX_ANSWER_TOKENS
from examples.engine_drafting import DraftingMode
from examples.engine_sequences import Completion, Sampling
from examples.features import batch_of

PROMPTS = elicit_prompts(400, seed=5)


def untrained_drafter() -> Eagle3Drafter:
    """Draft vocabulary of 60 of the policy's words: many tokens are out of its reach."""
    return random_drafter(base_policy()[0], 4, draft_vocab_size=60)


def _live(completions: list[Completion]) -> tuple[int, int]:
    """Tokens and rounds as an engine's operator would take them from completions."""
    tokens = sum(len(done.token_ids) - 1 for done in completions)
    assert tokens == sum(done.emitted_tokens for done in completions)
    return tokens, sum(done.rounds for done in completions)


@pytest.mark.parametrize("make", [trained_drafter, untrained_drafter])
@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
@pytest.mark.parametrize(("max_tokens", "eos_id"), [(MAX_ANSWER_TOKENS, EOS_ID), (10, None)])
def test_live_alpha_lies_where_replay_says(
    tmp_path: Path, make: Any, drafting: DraftingMode, max_tokens: int, eos_id: int | None
) -> None:
    model, _ = base_policy()
    directory = write(make(), tmp_path / "drafter")
    with engine(model, directory, drafting=drafting, seed=3) as served:
        done = served.submit(PROMPTS, Sampling(max_tokens, 1.0, eos_id)).result(timeout=100)
    ends = {one.finish_reason for one in done}
    assert ends == ({"length"} if eos_id is None else {"stop"})
    batch = batch_of(model, rollouts(PROMPTS, done))
    predicted, (low, high) = replay_live(0.999, make(), batch, policy_of(model), depth=4, drafting=drafting)
    tokens, rounds = _live(done)
    assert tokens == predicted.total()["tokens"]
    assert low <= tokens / rounds <= high, f"live {tokens / rounds:.4f}, replay {predicted.alpha:.4f} [{low}, {high}]"
    # The interval is narrow enough to notice an alignment that is off by one.
    assert high - low < 0.2 * predicted.alpha


def test_greedy_requests_replay_exactly(tmp_path: Path) -> None:
    """Nothing is random at temperature 0, so the number of rounds is predicted to the last one."""
    model, _ = base_policy()
    directory = write(trained_drafter(), tmp_path / "drafter")
    with engine(model, directory) as served:
        done = served.submit(PROMPTS[:100], Sampling(40, 0.0)).result(timeout=60)
    batch = batch_of(model, rollouts(PROMPTS[:100], done))
    predicted = replay(trained_drafter(), batch, policy_of(model), depth=4, drafting="greedy")
    assert [one.rounds for one in done] == predicted.rounds.round(9).tolist()


def test_a_drafter_served_since_the_middle_of_a_request_accepts_as_one_served_from_the_start(tmp_path: Path) -> None:
    """Its cache of the running sequences is computed again at the swap, so nothing stale lowers its acceptance."""
    model, _ = base_policy()
    trained, other = write(trained_drafter(), tmp_path / "a"), tmp_path / "b"
    weak = Eagle3Drafter(trained_drafter().config, trained_drafter().vocabulary)
    write(weak, other)
    prompts, sampling = PROMPTS[:48], Sampling(120, 0.0)
    with engine(model, trained) as served:
        texts = [one.token_ids for one in served.submit(prompts, sampling).result(timeout=60)]
    with engine(model, other) as served:
        future = served.submit(prompts, sampling)
        while served.counters().rounds < 20:
            pass
        served.swap_drafter(trained, "v2")
        at_swap = served.counters()
        done = future.result(timeout=60)
        finished = served.counters()
    assert [one.token_ids for one in done] == texts
    live = (finished.emitted_tokens - at_swap.emitted_tokens) / (finished.drafts - at_swap.drafts)
    batch = batch_of(model, rollouts(prompts, done))
    whole = replay(trained_drafter(), batch, policy_of(model), depth=4, drafting="greedy").alpha
    assert live == pytest.approx(whole, rel=0.1)


def test_the_live_logprobs_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    model, _ = base_policy()
    directory = write(trained_drafter(), tmp_path / "drafter")
    with engine(model, directory) as served:
        done = served.submit(PROMPTS[:64], Sampling(MAX_ANSWER_TOKENS, 1.0, EOS_ID)).result(timeout=60)
    batch = batch_of(model, rollouts(PROMPTS[:64], done))
    logits = model.lm_head(batch.last_hidden).log_softmax(-1)
    expected = logits[:-1].gather(1, batch.input_ids[1:, None])[:, 0]
    mask = batch.loss_mask[1:]
    assert (expected[mask] - batch.logprobs[1:][mask]).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_live_alpha_is_replay_alpha_at_other_temperatures(tmp_path: Path, temperature: float) -> None:
    """Draft logits are divided by the request's temperature, in the engine and in the replay."""
    model, _ = base_policy()
    directory = write(trained_drafter(), tmp_path / "drafter")
    with engine(model, directory, seed=6) as served:
        done = served.submit(PROMPTS, Sampling(30, temperature)).result(timeout=100)
    batch = dataclasses.replace(batch_of(model, rollouts(PROMPTS, done)), temperature=temperature)
    tokens, rounds = _live(done)
    _, (low, high) = replay_live(0.999, trained_drafter(), batch, policy_of(model), depth=4)
    assert low <= tokens / rounds <= high
    as_drawn_at_1 = dataclasses.replace(batch, temperature=1.0)
    _, untempered = replay_live(0.999, trained_drafter(), as_drawn_at_1, policy_of(model), depth=4)
    assert not untempered[0] <= tokens / rounds <= untempered[1], "the test must be able to tell temperatures apart"


def test_drafters_read_the_policys_live_embedding(tmp_path: Path) -> None:
    """As in vLLM and SGLang: after a policy update live α is the replay of the drafter on the new embedding."""
    model = copy.deepcopy(base_policy()[0])
    directory = write(trained_drafter(), tmp_path / "drafter")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    noise = torch.randn(weights["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] += 0.3 * weights[name].std() * noise
    with engine(model, directory, seed=8) as served:
        served.update_policy(weights, version=1)
        done = served.submit(PROMPTS, Sampling(30)).result(timeout=100)
    tokens, rounds = _live(done)
    batch = batch_of(model, rollouts(PROMPTS, done))
    _, new = replay_live(0.999, read_drafter(directory), batch, policy_of(model), depth=4)
    assert new[0] <= tokens / rounds <= new[1]
