"""TRL's AsyncGRPOTrainer with the hook on it. Of the tests' own, for want of CUDA: its attention's kernel.

The sampler, in this process, draws whenever the trainer gives it weights. What is expected to be sent is told from what
`compute_loss` was given, and from its weights at that moment.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked import ROOT, run_fork
from helpers.ports import free_port
from helpers.trainer.async_grpo_fixtures import (
    ROWS,
    Sampler,
    Sent,
    expected,
    far_from_its_own_forward,
    make_async_trainer,
    rollouts_of,
    sample_of,
    save_policy,
    watch,
)
from helpers.trainer.hooks_fixtures import Receiver, as_float, mapped, receiver

from rl_hooks import wire
from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.stacks.async_grpo import AsyncAttachment
from rl_hooks.stacks.attachment import PromptKinds
from rl_hooks.trl import attach

pytestmark = [
    pytest.mark.slow,
    # TRL calls names that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
#: How `accelerate launch` says FSDP2.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
#: The first is the embedding, which no order of summing can change.
AUX = (0, 1, 3)
#: Of the largest value: a forward over a tree sums in another order than one of the sample alone.
NEAR = 1e-6


def draws(sampler: Sampler, version: int, *, micros: int = 3) -> Iterator[Any]:
    """Groups for the micro-batches of a version, and the one taken too early; of some, one is of the version before."""
    for group in range(micros + (version == 1)):
        *of_now, last = sampler.group(version, 10 * version + group)
        yield from of_now
        last.model_version -= group % 2
        yield last


def trained(trainer: Any) -> tuple[list[dict[str, float]], torch.Tensor]:
    """What is logged of every step, but for times and our own numbers; and all final weights."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    curve = [{n: v for n, v in log.items() if not n.startswith(("perf/", "draftalign/"))} for log in logs]
    return curve, torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


def sent_to(service: Receiver, directory: Path) -> list[Sent]:
    directory.mkdir()
    return [sent for request in service.rollouts() for sent in rollouts_of(mapped(request, directory))]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        # Of each step but the first, accelerate takes the first micro-batch from the queue a step before.
        ({}, 45),
        ({"gradient_checkpointing": True, "tied": False, "temperature": 0.8}, 45),
        ({"token_budget": 50}, 47),
        # All but the first step's were drawn a step before.
        ({"gradient_accumulation_steps": 1, "steps": 4}, 20),
        # In every other step the weights are of no version.
        ({"weight_sync_steps": 2, "steps": 4}, 30),
    ],
)
def test_what_is_sent_equals_each_samples_own_forward_with_the_weights_that_trained_on_it(
    service: Receiver, tmp_path: Path, changes: dict[str, Any], count: int
) -> None:
    changes = {**changes}  # they are the parameters of other runs, too
    policy = save_policy(tmp_path, tied=changes.pop("tied", True))
    micros_of_version = 3 * changes.get("weight_sync_steps", 1) + ("token_budget" in changes)
    trainer = make_async_trainer(tmp_path, policy, partial(draws, micros=micros_of_version), **changes)
    micros = watch(trainer)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, head_tolerance=0.0, strict=True)
    trainer.train()
    assert attachment.flush(30)
    sampler = trainer.rollout_worker
    wanted, others = expected(micros, sampler.samples, sampler.weights)
    sent = sent_to(service, tmp_path / "files")
    samples = [sample_of(one, sampler.samples) for one in sent]
    labelled = [(id(sample), one.version) for one, sample in zip(sent, samples, strict=True)]
    assert sorted(labelled) == sorted((id(sample), version) for sample, version in wanted)
    assert (len(sent), others > 0) == (count, "weight_sync_steps" in changes)
    assert any(sample.model_version < version for sample, version in wanted), "older weights drew some"
    temperature = changes.get("temperature", 1.0)
    far = []
    for one, sample in zip(sent, samples, strict=True):
        assert one.reward == sample.metrics["reward"]
        far.append(far_from_its_own_forward(one, sampler.weights[one.version], AUX, temperature))
    assert max(far) <= NEAR
    stats = attachment.stats()
    assert (stats["captured_rollouts"], stats["skipped_stale"], stats["failures"]) == (len(wanted), others, 0)
    assert 0.0 < attachment.overhead_seconds < attachment.step_seconds
    # Each version's head comes before its rollouts.
    head = None
    for number, request in enumerate(service.requests):
        file = mapped(request, tmp_path / "files")
        if request.path.endswith("/head"):
            head = as_float(file, "lm_head")
        elif number:
            header = wire.check_rollout_header(file.header)
            assert head is not None
            weights = sampler.weights[header.policy_version]
            assert torch.equal(head, weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))
            assert (header.temperature, header.top_p, header.top_k) == (temperature, 1.0, 0)
    assert len({i for r in service.rollouts() for i in ids_of(r, tmp_path / "files")}) == len(sent)
    attachment.close()


def ids_of(request: Any, directory: Path) -> tuple[str, ...]:
    return wire.check_rollout_header(mapped(request, directory).header).rollout_ids


def test_a_groups_prompt_is_sent_once_and_each_sample_says_how_old_its_weights_are(
    service: Receiver, tmp_path: Path
) -> None:
    service.answer = lambda _: (
        202,
        {},
        {"duplicate": False, "last_rows": "predicting", "optional_tensors": [*wire.OPTIONAL_TENSORS]},
    )
    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True)
    trainer.train()
    assert attachment.flush(30)
    sampler = trainer.rollout_worker
    (tmp_path / "files").mkdir()
    shared = [f for r in service.rollouts() if "aux_rows" in (f := mapped(r, tmp_path / "files")).header.tensors]
    assert len(shared) == 9
    told = set[int]()
    for file in shared:
        sent = [*rollouts_of(file)]
        of_one_prompt = sum(one.mask.index(1) == 5 for one in sent)  # the cut one's prompt is longer
        assert len(file.array("input_ids")) - len(file.array("aux_hidden")) == 5 * (of_one_prompt - 1)
        for one in sent:
            assert far_from_its_own_forward(one, sampler.weights[one.version], AUX, 1.0) <= NEAR
            behind = one.version - sample_of(one, sampler.samples).model_version
            assert one.behind == [behind * own for own in one.mask]
            told.add(behind)
    assert told == {0, 1, 2}
    attachment.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_training_that_goes_on_from_weights_of_no_version_sends_nothing_until_they_are_given_to_the_sampler(
    service: Receiver, tmp_path: Path, *, again: bool
) -> None:
    trainer = make_async_trainer(
        tmp_path, save_policy(tmp_path), partial(draws, micros=14), steps=2, weight_sync_steps=3
    )
    micros = watch(trainer)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True)
    trainer.train()
    others_before = attachment.stats()["skipped_stale"] if again else 0
    if again:  # it cannot know what the weights are of
        assert attachment.close()
        attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True)
    trainer.train()  # TRL gives the sampler no weights when it begins a second time
    trainer._sync_weight()
    trainer.train()
    assert attachment.flush(30)
    sent = sent_to(service, tmp_path / "files")
    assert [one.version for one in sent] == [1] * 15 + [2] * 15
    sampler = trainer.rollout_worker
    wanted, others = expected(micros, sampler.samples, sampler.weights)
    assert len(sent) == len(wanted)
    assert others_before + attachment.stats()["skipped_stale"] == others
    attachment.close()


def test_weights_given_to_the_sampler_before_an_optimizer_step_are_not_those_after_it(
    service: Receiver, tmp_path: Path
) -> None:
    from transformers import TrainerCallback

    class Early(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer._sync_weight()

    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws, weight_sync_steps=100)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True)
    trainer.add_callback(Early())
    trainer.train()
    assert attachment.flush(30)
    assert [one.version for one in sent_to(service, tmp_path / "files")] == [1] * 15, "of the first step"
    assert attachment.stats()["skipped_stale"] == 30
    attachment.close()


@pytest.mark.parametrize("trouble", ["works", "down", "reset", "garbage"])
def test_training_is_bit_identical_whatever_the_service_does(tmp_path: Path, trouble: str) -> None:
    expected_curve, expected_weights = trained(make_async_trainer(tmp_path, save_policy(tmp_path), draws))
    with receiver() as service:
        service.misbehave = "" if trouble == "works" else trouble
        trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws)
        url = f"http://127.0.0.1:{free_port()}" if trouble == "down" else service.url
        attachment = attach(trainer, url, aux_layers=AUX)
        curve, weights = trained(trainer)
        assert len(curve) == 3
        assert curve == expected_curve
        assert torch.equal(weights, expected_weights)
        assert (attachment.stats()["captured_rollouts"], attachment.stats()["failures"]) == (45, 0)
        logged = [log for log in trainer.state.log_history if "loss" in log]
        assert all("draftalign/overhead_seconds" in log and "reward" in log for log in logged)
        attachment.close(0.5)


@pytest.mark.parametrize("broken", ["_features", "_label", "_columns", "_request"])
def test_work_of_ours_that_always_fails_leaves_training_bit_identical(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    expected_curve, expected_weights = trained(make_async_trainer(tmp_path, save_policy(tmp_path), draws))
    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws)
    attachment = attach(trainer, service.url, aux_layers=AUX)
    if broken == "_features":
        attachment.hook._reader.features.close()  # as if compiled before: no hook ever fires
    else:
        monkeypatch.setattr(attachment, broken, lambda *_: 1 / 0)
    curve, weights = trained(trainer)
    assert (curve, torch.equal(weights, expected_weights)) == (expected_curve, True)
    assert attachment.stats()["failures"] > 0
    assert attachment.stats()["captured_rollouts"] == 0
    attachment.close()


def test_detaching_leaves_the_trainer_as_it_was(service: Receiver, tmp_path: Path) -> None:
    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws)
    watch(trainer)  # another tool's wrapper, which stays
    before, callbacks = dict(vars(trainer)), [*trainer.callback_handler.callbacks]
    queue, collators = dict(vars(trainer.rollout_queue)), []
    attachment = attach(trainer, service.url, aux_layers=AUX)
    loaders = trainer.get_train_dataloader

    def load() -> Any:
        loader = loaders()
        collators.append(loader.collate_fn)
        return loader

    trainer.get_train_dataloader = load
    trainer.train()
    trainer.get_train_dataloader = loaders
    assert "torch_call" in vars(collators[0])
    assert attachment.close()
    now = vars(trainer)
    assert {name for name in now if now[name] is not before.get(name)} >= {"state"}
    for name in ("compute_loss", "log", "get_train_dataloader"):
        assert now.get(name) is before.get(name)
    assert vars(trainer.rollout_queue).keys() == queue.keys()
    assert "torch_call" not in vars(collators[0])
    assert trainer.callback_handler.callbacks == callbacks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("lacking", ["compute_loss", "get_train_dataloader", "rollout_queue"])
def test_a_trainer_without_what_is_wrapped_is_refused_when_attaching_by_version(tmp_path: Path, lacking: str) -> None:
    parts: dict[str, Any] = dict.fromkeys(("model", "state", "accelerator", "args", "model_version", "rollout_queue"))
    parts |= {name: lambda *_: None for name in AsyncAttachment.METHODS}
    del parts[lacking]
    strange = type("Mine", (type("AsyncGRPOTrainer", (), parts),), {})()
    with pytest.raises(UnsupportedTrainerError, match=rf"Mine of TRL 1\.\d+.* lacks {lacking}, "):
        attach(strange, "http://127.0.0.1:1")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_send_each_the_rollouts_of_its_own_row(tmp_path: Path, how: str) -> None:
    """Rank 0 takes from the queue and counts versions; rank 1 hears of both in the batch."""
    script = str(Path(__file__).with_name("async_ranks.py"))
    environment = os.environ | (FSDP2 if how == "fsdp2" else {})
    done = run_fork("trainer", script, str(tmp_path), how, directory=ROOT, environment=environment, seconds=280)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert found["sharded"] == (how == "fsdp2")
        assert found["stats"] == {"failures": 0, "captured_rollouts": len(found["numbers"]), "last_failure": ""}
        assert [found[name] for name in ("wanted", "rewards", "kinds", "same losses", "weights")] == [True] * 5
        assert found["others"] == [0, 0]
        assert found["far"] <= NEAR
    numbers = ranks[0]["numbers"] + ranks[1]["numbers"]
    assert len(numbers) == len({*numbers})
    # Rank 0 speaks of the policy for both.
    assert [found["versions"] for found in ranks] == [[1, 2, 3], [1, 2, 3]]
    assert ranks[0]["requests"].count("PUT /runs/r/head") == 3
    assert set(ranks[1]["requests"]) == {"POST /rollouts?run=r"}
    assert ranks[0]["requests"][0] == "PUT /runs/r"


def test_a_column_of_the_training_data_is_sent_as_the_kind_of_each_prompt(
    service: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked up by the prompt. To one, an environment has added what it says of itself."""
    added: list[Any] = []

    def draw(sampler: Sampler, version: int) -> Iterator[Any]:
        for sample in draws(sampler, version):
            if not added or sample.group_id == added[0].group_id:
                sample.prompt = [{"role": "user", "content": "w0 and what the environment said"}]
                added.append(sample)
            yield sample

    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draw)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strata="kind", strict=True)
    trainer.train()
    assert attachment.flush(30)
    sampler = trainer.rollout_worker
    kinds = []
    for one in sent_to(service, tmp_path / "files"):
        sample = sample_of(one, sampler.samples)
        known = all(sample is not other for other in added)
        assert one.stratum == (ROWS["kind"][sample.group_id % 3] if known else "")
        kinds.append(one.stratum)
    assert (len(kinds), {*kinds}) == (45, {"math", "code", ""})
    assert caplog.text.count("prompts that the training data has not are sent without their kind") == 1
    attachment.close()


def test_a_prompt_of_several_kinds_has_none() -> None:
    kinds = PromptKinds(["a", "b", "a", "c"], ["math", "math", "code", "code"])
    assert [kinds.names[kinds.number(prompt)] for prompt in "abcd"] == ["", "math", "code", ""]


@pytest.mark.parametrize(
    ("column", "stream", "words"), [("source", False, "no such column, but prompt, kind"), ("kind", True, "no stream")]
)
def test_a_column_that_would_send_no_strata_is_refused_when_attaching(
    tmp_path: Path, column: str, words: str, *, stream: bool
) -> None:
    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), draws)
    if stream:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(UnsupportedTrainerError, match=words):
        attach(trainer, "http://127.0.0.1:9", aux_layers=AUX, strata=column)


def test_rewards_that_are_not_known_are_not_made_up(service: Receiver, tmp_path: Path) -> None:
    """A rollout that no reward function could score has NaN; a sampler of one's own may say none."""

    def unscored(sampler: Sampler, version: int) -> Iterator[Any]:
        for number, sample in enumerate(itertools.chain(*(sampler.group(version, group) for group in range(5)))):
            sample.metrics = [{"reward": float("nan")}, {}, {"reward": 0.5}][number // 5 % 3]
            yield sample

    trainer = make_async_trainer(tmp_path, save_policy(tmp_path), unscored, steps=1)
    attachment = attach(trainer, service.url, aux_layers=AUX, strict=True)
    trainer.train()
    assert attachment.flush(30)
    assert [one.reward for one in sent_to(service, tmp_path / "files")] == [None] * 10 + [0.5] * 5
    attachment.close()
