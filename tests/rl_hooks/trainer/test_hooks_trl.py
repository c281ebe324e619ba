"""A real GRPOTrainer with the hook on it, against a receiver that works, and one that fails in every way it can."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.ports import free_port
from helpers.trainer.hooks_fixtures import VOCAB, Receiver, as_float, mapped, receiver
from helpers.trainer.trl_fixtures import make_trainer, reward_of_even_tokens

from rl_hooks import wire
from rl_hooks.errors import AuxLayersError, UnsupportedTrainerError
from rl_hooks.sending.features import score_rows
from rl_hooks.trainer import staging
from rl_hooks.trl import Attachment, attach

pytestmark = [
    pytest.mark.slow,
    # TRL calls names that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
AUX = (1, 2, 3)


def trained(trainer: Any) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Loss and gradient norm of every step, and all final weights."""
    trainer.train()
    curve = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    return curve, torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


def files_of(service: Receiver, attachment: Attachment, directory: Path) -> list[wire.MappedFile]:
    assert attachment.flush(30), attachment.stats()
    files = [mapped(r, directory) for r in service.rollouts()]
    for file in files:
        header = wire.check_rollout_header(file.header)
        wire.check_index(header, file.array("input_ids"), file.array("cu_seqlens"), file.array("loss_mask"), VOCAB)
    return files


def gap(file: wire.MappedFile, head: torch.Tensor) -> float:
    """Mean |log p recomputed from the features and this head - log p sent|, nats."""
    ids, mask = torch.from_numpy(file.array("input_ids").astype(np.int64)), file.array("loss_mask") == 1
    scores = torch.log_softmax(as_float(file, "last_hidden") @ head.T / file_temperature(file), dim=1)
    again = scores[:-1].gather(1, ids[1:, None])[:, 0]
    return float((again - torch.from_numpy(file.array("logprobs").copy())[1:]).abs()[mask[1:]].mean())


def normaliser_gap(file: wire.MappedFile, head: torch.Tensor) -> float:
    """Mean |normaliser recomputed from the features and this head - the one sent|, nats."""
    mask = file.array("loss_mask") == 1
    again = torch.logsumexp(as_float(file, "last_hidden") @ head.T / file_temperature(file), dim=1)
    return float((again - torch.from_numpy(file.array("logsumexp").copy()))[:-1].abs()[mask[1:]].mean())


def file_temperature(file: wire.MappedFile) -> float:
    return float(file.header.metadata["temperature"])


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_three_steps_deliver_every_rollout_once_with_its_version_and_reward(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    product = mock.Mock(side_effect=score_rows)
    monkeypatch.setattr(staging, "score_rows", product)
    trainer = make_trainer(tmp_path, kind=kind, temperature=0.8, beta=0.0)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, head_tolerance=0.0, strict=True)
    initial_head = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    (tmp_path / "files").mkdir()
    files = files_of(service, attachment, tmp_path / "files")
    headers = [wire.check_rollout_header(file.header) for file in files]
    assert [h.policy_version for h in headers] == [0, 1, 2]
    assert len({i for h in headers for i in h.rollout_ids}) == 24
    assert {len(i) for h in headers for i in h.rollout_ids} == {24}, "they are unique, and get no digest"
    for file, header in zip(files, headers, strict=True):
        cu, ids, mask = (file.array(n) for n in ("cu_seqlens", "input_ids", "loss_mask"))
        for i, reward in enumerate(header.rewards or ()):
            mine = slice(cu[i], cu[i + 1])
            # The reward rode through TRL's shuffle beside its own tokens.
            assert reward == pytest.approx(reward_of_even_tokens([ids[mine][mask[mine] == 1].tolist()])[0])
        assert header.temperature == 0.8
    assert gap(files[0], initial_head) < 0.05
    paths = [r.path for r in service.requests]
    assert paths[0] == "/runs/r"
    assert paths[1:] == ["/rollouts?run=r", *["/runs/r/head", "/rollouts?run=r"] * 2]
    heads = [as_float(mapped(r, tmp_path / "files"), "lm_head") for r in service.requests if r.path.endswith("/head")]
    assert [gap(file, head) < 0.05 for file, head in zip(files[1:], heads, strict=True)] == [True, True]
    assert max(normaliser_gap(file, head) for file, head in zip(files[1:], heads, strict=True)) < 0.005
    assert normaliser_gap(files[2], initial_head) > 0.01
    assert product.call_count == 1, "later steps take TRL's own log-probabilities"
    assert gap(files[2], initial_head) > 0.05  # the check tells a stale head
    stats = attachment.stats()
    assert (stats["captured_rollouts"], stats["sent"], stats["failures"]) == (24, 6, 0)
    assert 0.0 < attachment.overhead_seconds < attachment.step_seconds
    assert attachment.close()
    assert "_compute_loss" not in vars(trainer)


def test_a_column_of_the_training_data_is_sent_as_the_kind_of_each_prompt(service: Receiver, tmp_path: Path) -> None:
    """Of two iterations over two micro-batches, which TRL shuffles."""
    trainer = make_trainer(tmp_path, steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strata="kind", strict=True)
    trainer.train()
    (tmp_path / "files").mkdir()
    files = files_of(service, attachment, tmp_path / "files")
    kinds = set()
    for file in files:
        header = wire.check_rollout_header(file.header)
        assert header.strata is not None
        cu, mask = file.array("cu_seqlens"), file.array("loss_mask")
        for kind, begin in zip(header.strata, cu[:-1], strict=True):
            assert kind == f"of {int(np.argmax(mask[begin:] > 0))}", "named by the tokens of its prompt"
            kinds.add(kind)
    assert len(kinds) > 1
    assert attachment.stats()["failures"] == 0
    attachment.close()


@pytest.mark.parametrize(
    ("column", "changes", "words"),
    [("source", {}, "no such column, but prompt, kind"), ("kind", {"remove_unused_columns": True}, "Set it to False")],
)
def test_a_column_that_would_send_no_strata_is_refused_when_attaching(
    tmp_path: Path, column: str, changes: dict[str, Any], words: str
) -> None:
    trainer = make_trainer(tmp_path, **changes)
    with pytest.raises(UnsupportedTrainerError, match=words):
        attach(trainer, "http://127.0.0.1:9", aux_layers=AUX, strata=column)


def test_the_groups_of_a_step_share_the_states_of_their_prompts(service: Receiver, tmp_path: Path) -> None:
    """TRL shuffles a step's rollouts, and pads them; each file holds two groups of four."""
    service.answer = lambda _request: (202, {}, {"duplicate": False, "optional_tensors": ["aux_rows"]})
    trainer = make_trainer(tmp_path)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True, dtype="float8_e4m3_all")
    trainer.train()
    (tmp_path / "files").mkdir()
    first, *later = files_of(service, attachment, tmp_path / "files")
    assert len(later) == 2
    for file in (first, *later):
        ids, starts, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
        prompts = [ids[a:b][mask[a:b] == 0].tobytes() for a, b in pairwise(starts.tolist())]
        assert Counter(Counter(prompts).values()) == {4: 2}
        repeated = sum(len(one) for one in prompts) - sum(len(one) for one in {*prompts})
        assert len(file.array("aux_hidden")) == len(ids) - repeated // ids.itemsize
        wire.check_index(wire.check_rollout_header(file.header), ids, starts, mask, VOCAB, file.array("aux_rows"))
    attachment.close()


@pytest.mark.parametrize("trouble", ["works", "down", "reset", "garbage", "slow"])
def test_training_is_bit_identical_whatever_the_service_does(tmp_path: Path, trouble: str) -> None:
    expected_curve, expected_weights = trained(make_trainer(tmp_path))
    with receiver() as service:
        service.misbehave = "" if trouble == "works" else trouble
        trainer = make_trainer(tmp_path)
        url = f"http://127.0.0.1:{free_port()}" if trouble == "down" else service.url
        attachment = attach(trainer, url, aux_layers=AUX)
        curve, weights = trained(trainer)
        assert curve == expected_curve
        assert len(curve) == 3
        assert torch.equal(weights, expected_weights)
        stats = attachment.stats()
        assert (stats["captured_rollouts"], stats["failures"]) == (24, 0)
        started = time.monotonic()
        attachment.close(0.5)
        assert time.monotonic() - started < 10, "nobody waits for an answer that takes 20 s"


def test_what_the_trainers_data_loader_forks_changes_nothing(service: Receiver, tmp_path: Path) -> None:
    """The workers are forked after attaching, anew for each epoch, and end within the run."""
    expected_curve, expected_weights = trained(make_trainer(tmp_path, dataloader_num_workers=2))
    trainer = make_trainer(tmp_path, dataloader_num_workers=2)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX, strict=True)
    curve, weights = trained(trainer)
    assert curve == expected_curve
    assert torch.equal(weights, expected_weights)
    assert attachment.flush(20)
    headers = [wire.parse_header(one.body) for one in service.rollouts()]
    assert [int(one.metadata["policy_version"]) for one in headers] == [0, 1, 2]
    names = [name for one in headers for name in json.loads(one.metadata["rollout_ids"])]
    assert len(names) == len({*names}) == attachment.stats()["captured_rollouts"] == 24
    assert [one.path for one in service.requests if one.method == "PUT"].count("/runs/r") == 1
    attachment.close()


def test_a_capture_that_fails_at_every_step_leaves_training_bit_identical(service: Receiver, tmp_path: Path) -> None:
    expected_curve, expected_weights = trained(make_trainer(tmp_path))
    trainer = make_trainer(tmp_path)
    attachment = attach(trainer, service.url, aux_layers=AUX)
    attachment.hook._reader.features.close()  # as if compiled before: no hook ever fires
    curve, weights = trained(trainer)
    assert curve == expected_curve
    assert torch.equal(weights, expected_weights)
    assert attachment.stats()["failures"] == 3
    assert attachment.stats()["captured_rollouts"] == 0
    attachment.close()


@pytest.mark.parametrize(
    ("changes", "captured", "stale"),
    [
        # Two optimizer steps over one generation: the second pass runs under other weights.
        ({"num_iterations": 2, "gradient_accumulation_steps": 1}, 16, 16),
        # A generation of two micro-batches, one optimizer step each: only the first is still of its policy.
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, 16, 16),
        # Two passes in one optimizer step: the weights are the same, but once is enough.
        ({"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 32, 32),
        # Micro-batches of one optimizer step are all of the same policy.
        ({"gradient_accumulation_steps": 2}, 64, 0),
    ],
)
def test_each_rollout_is_captured_once_and_only_under_the_weights_that_made_it(
    service: Receiver, tmp_path: Path, changes: dict[str, Any], captured: int, stale: int
) -> None:
    trainer = make_trainer(tmp_path, steps=4, **changes)
    attachment = attach(trainer, service.url, aux_layers=AUX, strict=True)
    trainer.train()
    (tmp_path / "files").mkdir()
    files = files_of(service, attachment, tmp_path / "files")
    ids = [i for file in files for i in wire.check_rollout_header(file.header).rollout_ids]
    stats = attachment.stats()
    assert len(ids) == len(set(ids)) == stats["captured_rollouts"] == captured
    assert stats["skipped_stale"] == stale
    attachment.close()


def test_gradient_checkpointing_masked_truncations_and_top_p(
    service: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, mask_truncated_completions=True, top_p=0.9, top_k=20)
    attachment = attach(trainer, service.url, aux_layers=AUX, strict=True)
    trainer.train()
    (tmp_path / "files").mkdir()
    files = files_of(service, attachment, tmp_path / "files")
    stats = attachment.stats()
    assert stats["captured_rollouts"] + stats["skipped_empty"] == 24
    assert stats["skipped_empty"] > 0  # most completions of this model run into the length limit
    for file in files:
        header = wire.check_rollout_header(file.header)
        assert (header.top_p, header.top_k) == (0.9, 20)
        ends = file.array("input_ids")[file.array("cu_seqlens")[1:] - 1]
        assert set(ends.tolist()) <= {0, 1}  # those left ended by themselves
    attachment.close()
    assert caplog.text.count("top_p=0.9, top_k=20 changes what is drawn") == 1


def test_the_samplers_own_log_probabilities_and_tool_masks_are_sent(
    service: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        encoded = [trainer.processing_class(p)["input_ids"] for p in prompts]
        rng = np.random.default_rng(1)
        completions = [rng.integers(2, VOCAB, int(rng.integers(3, 9))).tolist() for _ in prompts]
        return {
            "prompt_ids": encoded,
            "completion_ids": completions,
            "logprobs": [[-0.5] * len(c) for c in completions],
            "env_mask": [[1, 0] + [1] * (len(c) - 2) for c in completions],
        }

    trainer = make_trainer(tmp_path, steps=1, rollout_func=rollout, top_p=0.9)
    attachment = attach(trainer, service.url, aux_layers=AUX, strict=True)
    trainer.train()
    (tmp_path / "files").mkdir()
    (file,) = files_of(service, attachment, tmp_path / "files")
    mask, logprobs, cu = (file.array(n) for n in ("loss_mask", "logprobs", "cu_seqlens"))
    assert set(logprobs[mask == 1].tolist()) == {-0.5}
    assert set(logprobs[mask == 0].tolist()) == {0.0}
    for begin, end in itertools.pairwise(cu):
        first = begin + int(mask[begin:end].argmax())
        assert mask[first : first + 3].tolist() == [1, 0, 1]  # the environment's token is not the policy's
    attachment.close()
    assert "changes what is drawn" not in caplog.text


@pytest.mark.parametrize("breaks", [False, True])
def test_what_the_trainer_logs_gets_the_hooks_numbers_and_nothing_of_it_is_lost(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """`log_history` is what every integration of `report_to` is given."""
    expected_curve, expected_weights = trained(make_trainer(tmp_path))
    trainer = make_trainer(tmp_path)
    attachment = attach(trainer, service.url, aux_layers=AUX)
    said = {"trained": 7.0, "alpha": 2.5, "drafter_version": "v000001-00000000"}
    broken = mock.Mock(side_effect=RuntimeError("no")) if breaks else lambda: said
    monkeypatch.setattr(attachment.hook.sender, "standing", broken)
    curve, weights = trained(trainer)
    assert (curve, torch.equal(weights, expected_weights)) == (expected_curve, True)
    logged = [log for log in trainer.state.log_history if "loss" in log]
    assert all("reward" in log for log in logged), "TRL's own numbers"
    found = [{n: v for n, v in log.items() if n.startswith("draftalign/")} for log in logged]
    if breaks:
        assert found == [{}] * 3
    else:
        assert [(log["draftalign/trained"], log["draftalign/alpha"]) for log in found] == [(7.0, 2.5)] * 3
        assert set(found[0]) == {f"draftalign/{n}" for n in ("trained", "alpha", "dropped", "overhead_seconds")}
    attachment.close(1.0)
    assert "log" not in vars(trainer)


def test_a_callback_of_the_trainers_log_is_told_alpha_headroom_and_the_drafters_number(
    service: Receiver, tmp_path: Path
) -> None:
    """As W&B's and TensorBoard's are; as the service answers `GET /runs/r`."""
    from transformers import TrainerCallback

    seen: list[dict[str, float]] = []

    class Records(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            seen.append(dict(logs))

    rollouts = {"trained_total": 5, "dead_total": 0, "skipped_total": 0, "waiting": 1, "last_dead_reason": ""}
    service.stands = {"alpha": 2.25, "alpha_live": 2.125, "headroom": 0.03125, "drafter": "v000012-0a1b2c3d"}
    service.stands["rollouts"] = rollouts
    trainer = make_trainer(tmp_path)
    trainer.add_callback(Records())
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX)
    assert attachment.flush(20.0)  # at its end the service is asked
    trainer.train()
    steps = [log for log in seen if "loss" in log]
    assert len(steps) == 3
    for log in steps:
        found = {name.removeprefix("draftalign/"): value for name, value in log.items() if "draftalign/" in name}
        assert found.pop("overhead_seconds") >= 0.0
        expected = {"alpha": 2.25, "alpha_live": 2.125, "headroom": 0.03125, "drafter_number": 12}
        assert found == expected | {"trained": 5, "dead": 0, "skipped": 0, "waiting": 1, "dropped": 0}
    attachment.close(1.0)


def test_a_trainer_without_the_wrapped_methods_is_refused_when_attaching_by_version() -> None:
    class Strange:
        model = state = accelerator = args = None

        def _compute_loss(self) -> None: ...

    with pytest.raises(UnsupportedTrainerError, match=r"Strange of TRL 1\.\d+.*_generate_and_score_completions"):
        attach(Strange(), "http://127.0.0.1:1")


@pytest.mark.parametrize("asks", [False, True])
def test_a_trainer_whose_loss_goes_past_the_wrapped_method_is_refused_when_attaching(
    tmp_path: Path, asks: bool
) -> None:
    """As Unsloth's does; one that asks TRL's own is served."""
    trainer = make_trainer(tmp_path)
    trl_s = type(trainer)

    class Own(trl_s):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            return super().compute_loss(model, inputs, **more)

    class OwnWithoutAsking(trl_s):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return model(inputs["prompt_ids"]).logits.mean()

    trainer.__class__ = Own if asks else OwnWithoutAsking
    if asks:
        attach(trainer, "http://127.0.0.1:1", aux_layers=AUX).close(0.0)
        return
    with pytest.raises(UnsupportedTrainerError, match=r"OwnWithoutAsking.compute_loss does not call _compute_loss"):
        attach(trainer, "http://127.0.0.1:1", aux_layers=AUX)
    assert "_compute_loss" not in vars(trainer)


def test_a_shallow_model_is_refused_when_attaching_and_left_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(AuxLayersError, match="aux_layers="):
        attach(trainer, "http://127.0.0.1:1")
    assert "_compute_loss" not in vars(trainer)
    assert not trainer.model.model.norm._forward_hooks


def test_registration_is_sent_before_the_first_step_and_describes_the_trainers_model(
    service: Receiver, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    attachment = attach(trainer, service.url, run="r", aux_layers=AUX)
    service.wait(1)
    file = mapped(service.requests[0], tmp_path)
    assert json.loads(file.header.metadata["config"])["model_type"] == "qwen3"
    assert torch.equal(as_float(file, "embed_tokens"), trainer.model.model.embed_tokens.weight)
    attachment.close()


def test_the_guide_names_all_that_stats_has(tmp_path: Path) -> None:
    attachment = attach(make_trainer(tmp_path), f"http://127.0.0.1:{free_port()}", aux_layers=AUX)
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "hook.md").read_text(encoding="utf-8")
    table = guide.partition("\n`stats()` has, of this process:\n")[2].partition("\n\nLog lines")[0]
    assert set(re.findall(r"`([a-z_]+)`", table)) == attachment.stats().keys()
    attachment.close(0.5)


def test_the_guides_server_for_trl_has_the_options_that_trl_gives_it() -> None:
    """By TRL's own code: the command of its server, and that its colocated engine takes no drafter."""
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    guide = (Path(__file__).parents[3] / "docs" / "guide" / "trainers.md").read_text(encoding="utf-8")
    section = guide.partition("\n### TRL with vLLM\n")[2].partition("\n### ")[0]
    shown = shlex.split(section.partition("```bash\n")[2].partition("```")[0], comments=True)
    words = shown[shown.index("serve") :]
    given = {option: value for option, value in pairwise(words) if option.startswith("--")}
    drafter = given["--speculative-config"]
    theirs = build_command(ScriptArguments(model=words[1], speculative_config=drafter))
    told = theirs[theirs.index("--speculative-config") :]
    assert given == {option: value for option, value in pairwise(told) if option.startswith("--")}
    assert json.loads(drafter)["model"] in section.partition("initial_drafter=")[2], "the same for both"
    assert "DRAFTALIGN_SAMPLE_FRACTION=0" in shown
    assert "VLLM_SERVER_DEV_MODE=1" in shown
    assert [name for name in inspect.signature(VLLMGeneration).parameters if "spec" in name] == []
