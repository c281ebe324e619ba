"""What may change under a running engine, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.engine_fixtures import (
    EOS_ID,
    base_policy,
    elicit_prompts,
    engine,
    odd_prompts,
    random_drafter,
    randomize_drafter,
    trained_drafter,
    write,
)
from safetensors.torch import load_file, save_file

from drafter.errors import DrafterError
from drafter.vocabulary import DraftVocabulary
from examples import policy
from examples.engine import Engine, EngineError, EngineStoppedError
from examples.engine_sequences import Completion, Sampling

PROMPTS = elicit_prompts(40, seed=21)
SAMPLING = Sampling(40, 0.0, EOS_ID)

Tensors = dict[str, torch.Tensor]


def _drop_norm(tensors: Tensors) -> None:
    del tensors["norm.weight"]


def _add_tensor(tensors: Tensors) -> None:
    tensors["midlayer.surprise.weight"] = torch.zeros(2)


def _reshape(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def _poison(tensors: Tensors) -> None:
    tensors["lm_head.weight"][3, 3] = torch.nan


def _shift_vocabulary(tensors: Tensors) -> None:
    ids = DraftVocabulary.from_d2t(tensors["d2t"], len(tensors["t2d"])).ids
    other = sorted({*range(len(tensors["t2d"]))} - {int(ids[0])})[: len(ids)]
    vocabulary = DraftVocabulary(torch.tensor(other), len(tensors["t2d"]))
    tensors["d2t"], tensors["t2d"] = vocabulary.d2t, vocabulary.t2d


def _state(served: Engine) -> tuple[Any, ...]:
    drafter = served.drafter
    assert drafter is not None
    weights = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    return id(drafter), served.drafter_version, served.counters().drafter_swaps, weights


def _assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[:3] == after[:3]
    assert all(torch.equal(before[3][name], weight) for name, weight in after[3].items())


def test_a_bad_drafter_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    good = write(trained_drafter(), tmp_path / "good")
    with engine(base_policy()[0], good) as served:
        expected = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        before = _state(served)
        for spoil in (_drop_norm, _add_tensor, _reshape, _poison, _shift_vocabulary):
            bad = write(trained_drafter(), tmp_path / spoil.__name__)
            tensors = load_file(bad / "model.safetensors")
            spoil(tensors)
            save_file(tensors, bad / "model.safetensors")
            with pytest.raises((DrafterError, EngineError)):
                served.swap_drafter(bad, "v2")
            _assert_same(before, _state(served))
        assert _texts(served.submit(PROMPTS, SAMPLING).result(timeout=60)) == _texts(expected)


def test_a_torn_or_missing_file_is_refused(tmp_path: Path) -> None:
    good = write(trained_drafter(), tmp_path / "good")
    torn = write(trained_drafter(), tmp_path / "torn")
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    with engine(base_policy()[0], good) as served:
        before = _state(served)
        for directory in (torn, tmp_path / "nowhere"):
            with pytest.raises(DrafterError):
                served.swap_drafter(directory, "v2")
        _assert_same(before, _state(served))


def test_a_drafter_of_other_layers_is_refused(tmp_path: Path) -> None:
    directory = write(trained_drafter(), tmp_path / "drafter")
    config = json.loads((directory / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [-1, 0, 1]
    (directory / "config.json").write_text(json.dumps(config))
    with engine(base_policy()[0]) as served:
        with pytest.raises((DrafterError, EngineError)):
            served.swap_drafter(directory, "v1")
        assert served.drafter is None


def test_an_embedding_in_a_drafters_file_never_reaches_the_policy(tmp_path: Path) -> None:
    directory = write(trained_drafter(), tmp_path / "drafter")
    tensors = load_file(directory / "model.safetensors")
    model, _ = base_policy()
    tensors["embed_tokens.weight"] = torch.full_like(model.get_input_embeddings().weight, 100.0)
    save_file(tensors, directory / "model.safetensors")
    before = model.get_input_embeddings().weight.clone()
    with engine(model) as served:
        plain = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        try:
            served.swap_drafter(directory, "v1")
        except DrafterError:
            assert served.drafter is None
        speculative = served.submit(PROMPTS, SAMPLING).result(timeout=60)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert [one.token_ids for one in plain] == [one.token_ids for one in speculative]


def test_a_dead_drafter_shows_as_one_token_a_round_and_right_text(tmp_path: Path) -> None:
    directory = write(trained_drafter(), tmp_path / "drafter")
    with engine(base_policy()[0], directory) as served:
        before = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        version = served.drafter_version
        randomize_drafter(served, seed=0)
        after = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        assert served.drafter_version == version, "a broken sync does not announce itself"
        served.swap_drafter(directory, "v1")
        again = served.submit(PROMPTS, SAMPLING).result(timeout=60)
    assert _texts(before) == _texts(after) == _texts(again)
    assert _alpha(before) == pytest.approx(_alpha(again), rel=0.01)
    assert _alpha(before) > 2
    assert _alpha(after) < 1.1


def _texts(completions: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in completions]


def _alpha(completions: list[Completion]) -> float:
    return sum(one.emitted_tokens for one in completions) / sum(one.rounds for one in completions)


# --- policy weights --------------------------------------------------------------------------------------------------


def test_new_policy_weights_give_the_text_of_the_new_policy(tmp_path: Path) -> None:
    directory = write(trained_drafter(), tmp_path / "drafter")
    other = policy.new_policy(seed=9).eval()
    with engine(copy.deepcopy(other)) as served:
        expected = [one.token_ids for one in served.submit(PROMPTS, SAMPLING).result(timeout=60)]
    with engine(copy.deepcopy(base_policy()[0]), directory) as served:
        first = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        assert served.update_policy(other.state_dict(), version=7) == 0
        done = served.submit(PROMPTS, SAMPLING).result(timeout=60)
    assert [one.token_ids for one in done] == expected
    assert {one.policy_versions for one in first} == {(0, 0)}
    assert {one.policy_versions for one in done} == {(7, 7)}


def test_tied_weights_may_be_left_out() -> None:
    model = copy.deepcopy(base_policy()[0])
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    with engine(model) as served:
        served.update_policy(weights, version=1)
        assert served.policy_version == 1


def test_a_request_that_saw_two_policies_says_so() -> None:
    model = copy.deepcopy(base_policy()[0])
    with engine(model) as served:
        future = served.submit(PROMPTS, Sampling(200, 1.0))
        while served.counters().rounds < 5:
            pass
        assert served.update_policy(base_policy()[0].state_dict(), version=3) == len(PROMPTS)
        assert {one.policy_versions for one in future.result(timeout=60)} == {(0, 3)}


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan"])
def test_bad_policy_weights_are_refused_and_change_nothing(fault: str) -> None:
    model = copy.deepcopy(base_policy()[0])
    weights = {name: weight.clone() for name, weight in policy.new_policy(seed=1).state_dict().items()}
    name = "model.layers.2.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.layers.9.mlp.up_proj.weight"] = weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:-1]
    else:
        weights[name][0, 0] = torch.inf
    with engine(model) as served:
        with pytest.raises(EngineError, match=r"model\.layers"):
            served.update_policy(weights, version=1)
        assert served.policy_version == 0
    reference = base_policy()[0].state_dict()
    assert all(torch.equal(reference[key], weight) for key, weight in model.state_dict().items())


# --- requests, counters, lifetime ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "sampling", "n", "message"),
    [
        ([], Sampling(5), 1, "expected prompts"),
        ([[]], Sampling(5), 1, "1 to 256 tokens"),
        ([[1] * 250], Sampling(7), 1, "1 to 256 tokens"),
        ([[105]], Sampling(5), 1, "token ids must be from 0 to 104"),
        ([[-1]], Sampling(5), 1, "token ids must be from 0 to 104"),
        ([[1]], Sampling(0), 1, "max_tokens"),
        ([[1]], Sampling(5), 0, "n >= 1"),
        ([[1]], Sampling(5, temperature=-0.5), 1, "temperature"),
        ([[1]], Sampling(5, temperature=float("nan")), 1, "temperature"),
    ],
)
def test_a_bad_request_is_refused(prompts: list[list[int]], sampling: Sampling, n: int, message: str) -> None:
    with engine(base_policy()[0]) as served, pytest.raises(EngineError, match=message):
        served.submit(prompts, sampling, n)


def test_counters_agree_with_the_completions(tmp_path: Path) -> None:
    directory = write(random_drafter(base_policy()[0], 8), tmp_path / "drafter")
    with engine(base_policy()[0], directory, max_sequences=16) as served:
        done = served.submit(PROMPTS, Sampling(25, 1.0, EOS_ID), n=3).result(timeout=60)
        done += served.submit(PROMPTS[:5], Sampling(1, 1.0, EOS_ID)).result(timeout=60)
        counters = served.counters()
        assert served.load() == (0, 0)
    assert len(done) == 125
    assert counters.prompt_tokens == 125 * len(PROMPTS[0])
    assert counters.generation_tokens == sum(len(one.token_ids) for one in done)
    assert counters.drafts == sum(one.rounds for one in done)
    assert counters.draft_tokens == 4 * counters.drafts
    assert counters.accepted_tokens == sum(one.accepted_tokens for one in done) == sum(counters.accepted_per_position)
    assert counters.accepted_per_position == sorted(counters.accepted_per_position, reverse=True)
    assert counters.emitted_tokens == counters.generation_tokens - len(done)
    # Accepted drafts count before a response is trimmed, emitted tokens after.
    assert counters.emitted_tokens <= counters.accepted_tokens + counters.drafts
    assert counters.finished_by_stop + counters.finished_by_length == len(done)
    assert all(one.rounds == 0 and one.drafter_versions == [] for one in done[-5:])
    assert all(len(one.logprobs) == len(one.token_ids) for one in done)


def test_plain_rounds_are_no_drafts() -> None:
    with engine(base_policy()[0]) as served:
        done = served.submit(PROMPTS, SAMPLING).result(timeout=60)
        counters = served.counters()
    assert counters.drafts == counters.draft_tokens == counters.emitted_tokens == 0
    assert {(one.rounds, one.accepted_tokens, one.emitted_tokens) for one in done} == {(0, 0, 0)}
    assert counters.rounds > 0


def test_completions_come_back_prompt_by_prompt_whatever_ends_first() -> None:
    prompts = odd_prompts(40, seed=2)
    with engine(base_policy()[0], max_sequences=7) as served:
        short = served.submit(prompts[:3], Sampling(2, 0.0), n=2)
        long = served.submit(prompts, Sampling(30, 0.0, EOS_ID))
        alone = [served.submit([prompt], Sampling(2, 0.0)).result(timeout=60)[0] for prompt in prompts[:3]]
        together = served.submit(prompts[:3], Sampling(30, 0.0, EOS_ID)).result(timeout=60)
        pairs = short.result(timeout=60)
        assert _texts(pairs[0::2]) == _texts(pairs[1::2]) == _texts(alone)
        assert _texts(long.result(timeout=60))[:3] == _texts(together)
        assert len({tuple(text) for text in _texts(together)}) == 3


def test_a_stopped_engine_fails_what_it_has_not_finished_and_takes_no_more() -> None:
    with engine(base_policy()[0], max_sequences=2) as served:
        future = served.submit(PROMPTS, Sampling(200, 1.0))
    with pytest.raises(EngineStoppedError):
        future.result(timeout=60)
    with pytest.raises(EngineStoppedError):
        served.submit(PROMPTS, SAMPLING)
    with pytest.raises(EngineStoppedError):
        served.update_policy(base_policy()[0].state_dict(), version=1)
