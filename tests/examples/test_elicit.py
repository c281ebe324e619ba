"""The demo's task and base policy: text, reward, tokenizer, and the shipped checkpoint's figures."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import elicit, policy

OPERANDS = st.tuples(*[st.integers(0, elicit.MODULUS - 1)] * len(elicit.PLACES))


@settings(deadline=None)
@given(OPERANDS)
def test_a_prompt_tells_its_operands(operands: tuple[int, ...]) -> None:
    assert elicit.operands_of(elicit.prompt(operands)) == operands


def test_the_prompt_is_the_one_of_the_documentation() -> None:
    assert elicit.prompt((3, 1, 4, 2)) == "sum a3 b1 c4 d2 ="
    assert len(elicit.prompt((3, 1, 4, 2)).split()) == elicit.PROMPT_TOKENS


@pytest.mark.parametrize("operands", [(1, 2, 3), (1, 2, 3, 5), (1, 2, 3, -1), (1, 2, 3, 4, 0)])
def test_operands_out_of_range_are_refused(operands: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected 4 operands from 0 to 4"):
        elicit.prompt(operands)


@pytest.mark.parametrize("text", ["", "sum a3 b1 c4 =", "sum b1 a3 c4 d2 =", "sum a3 b1 c4 d2", "add a3 b1 c4 d2 ="])
def test_another_text_is_not_a_prompt(text: str) -> None:
    with pytest.raises(ValueError, match="expected a prompt"):
        elicit.operands_of(text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("so 0 .", 1.0),
        ("so 0 . <eos>", 1.0),
        ("so 0 . <eos> <pad> <pad>", 1.0),
        ("3 plus 1 is 4 , 4 plus 4 is 3 , 3 plus 2 is 0 so 0 .", 1.0),
        ("so 1 . 0 .", 1.0),
        ("so 0 . 1 .", 0.0),
        ("so 1 .", 0.0),
        ("so 0", 0.0),
        (". 0", 0.0),
        ("0 so .", 0.0),
        (".", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_digit_before_the_final_stop(answer: str, expected: float) -> None:
    assert elicit.reward("sum a3 b1 c4 d2 =", answer) == expected
    assert elicit.elicit_reward(["sum a3 b1 c4 d2 ="], [answer], trainer_state=None) == [expected]


@settings(deadline=None)
@given(OPERANDS, st.integers(0, 2**32))
def test_every_worked_answer_is_right_and_every_answer_fits(operands: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    question = elicit.prompt(operands)
    for mixture in (elicit.Mixture(1, 0), elicit.Mixture(0, 1)):
        answer = elicit.sample_answer(operands, mixture, rng)
        assert elicit.is_worked(answer)
        assert elicit.reward(question, answer) == 1.0
        assert len(answer.split()) < elicit.MAX_ANSWER_TOKENS
    guess = elicit.sample_answer(operands, elicit.Mixture(0, 0), rng)
    assert not elicit.is_worked(guess)
    assert len(guess.split()) < elicit.MAX_ANSWER_TOKENS


def test_guesses_are_right_one_time_in_five() -> None:
    rng = random.Random(0)
    rewards = []
    for _ in range(4000):
        operands = elicit.sample_operands(rng)
        rewards.append(
            elicit.reward(elicit.prompt(operands), elicit.sample_answer(operands, elicit.Mixture(0, 0), rng))
        )
    assert sum(rewards) / len(rewards) == pytest.approx(0.2, abs=0.03)


@settings(max_examples=30, deadline=None)
@given(OPERANDS, st.integers(0, 2**32))
def test_the_tokenizer_gives_one_token_a_word_and_the_text_back(operands: tuple[int, ...], seed: int) -> None:
    tokenizer = _TOKENIZER
    text = f"{elicit.prompt(operands)} {elicit.sample_answer(operands, elicit.TEACH_MIXTURE, random.Random(seed))}"
    ids = tokenizer(text)["input_ids"]
    assert [elicit.VOCABULARY[i] for i in ids] == text.split()
    assert tokenizer.decode(ids) == text


_TOKENIZER = elicit.TASK.build_tokenizer()


def test_a_word_outside_the_vocabulary_is_an_error_and_not_a_pad() -> None:
    with pytest.raises(Exception, match="UNK"):
        _TOKENIZER("sum zebra")


def test_the_vocabulary_names_no_word_twice() -> None:
    assert len(set(elicit.VOCABULARY)) == len(elicit.VOCABULARY)


def test_only_answers_carry_loss() -> None:
    ids, labels = policy.sample_batch(elicit.TASK, _TOKENIZER, "teach", 16, random.Random(0))
    assert ids.shape == labels.shape
    assert (labels[:, : elicit.PROMPT_TOKENS] == -100).all()
    learnt = labels != -100
    assert torch.equal(labels[learnt], ids[learnt])
    assert (ids[:, 0] == elicit.VOCABULARY.index("sum")).all()
    # Each answer ends by the end of sequence, which is learnt, and padding is not.
    assert (labels.eq(_TOKENIZER.eos_token_id).sum(1) == 1).all()
    assert not labels.eq(_TOKENIZER.pad_token_id).any()


def test_the_shipped_policy_guesses_mostly_and_is_right_when_it_works_the_sum_out() -> None:
    figures = policy.measure(policy.load()[0], elicit.TASK, prompts=1024, seed=11)
    # Sampling error of 1024 prompts is 0.013 on the reward and 0.008 on the fraction.
    assert figures.reward == pytest.approx(0.245, abs=0.045), figures
    assert figures.worked_fraction == pytest.approx(0.065, abs=0.03), figures
    assert figures.accuracy_given_worked >= 0.93, figures
    assert figures.answer_tokens == pytest.approx(15.7, abs=1.0), figures
    assert figures.entropy_nats == pytest.approx(0.82, abs=0.1), figures


def test_the_shipped_policy_is_small_and_computes_in_float32() -> None:
    files = [path for path in policy.BASE_POLICY.iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in files) < 1_000_000
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.BASE_POLICY, local_files_only=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(elicit.VOCABULARY)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_shipped_tokenizer_is_the_recipes(tmp_path: Path) -> None:
    _TOKENIZER.save_pretrained(tmp_path)
    assert (policy.BASE_POLICY / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_checkpoint_survives_storage_to_bfloat16_precision(tmp_path: Path) -> None:
    model = policy.new_policy(seed=3)
    policy.save(model, tmp_path)
    again, _ = policy.load(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.to(torch.bfloat16).float()), name


@pytest.mark.slow
def test_the_recipe_learns_the_styles_and_is_reproducible() -> None:
    recipe = replace(elicit.TASK.pretraining, teach_steps=80, real_steps=20, sequences_per_step=32, decay_steps=30)
    _, losses = policy.pretrain(elicit.TASK, 0, recipe)
    # From uniform over the vocabulary to knowing the styles' words (the sums come later, from step 300 on).
    assert losses[0] == pytest.approx(5.1, abs=0.4)
    assert sum(losses[70:80]) / 10 < 1.1
    assert sum(losses[-10:]) / 10 < 1.0
    short = replace(recipe, teach_steps=3, real_steps=1, sequences_per_step=4, decay_steps=300)
    assert policy.pretrain(elicit.TASK, 5, short)[1] == policy.pretrain(elicit.TASK, 5, short)[1]
    assert policy.pretrain(elicit.TASK, 5, short)[1] != policy.pretrain(elicit.TASK, 6, short)[1]
