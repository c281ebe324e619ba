"""Forwards that hold more than one rollout file may: they are sent as several, and what is too long is cut."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.trainer.capture_fixtures import LENGTHS, logprob_gap, run_once
from helpers.trainer.hooks_fixtures import HIDDEN, VOCAB, Receiver, mapped, names_of, padded_batch, tiny_qwen3

from drafter.batch import RolloutBatch, load_batch
from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import FeatureDtype, row_bytes
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.trainer.plan import BatchPlan

NAMES = tuple("abcd")
#: Of each rollout in `LENGTHS`.
TOKENS = dict(zip(NAMES, map(sum, LENGTHS), strict=True))


def sent(
    service: Receiver, directory: Path, dtype: FeatureDtype, last_rows: wire.LastRows, **options: Any
) -> tuple[list[wire.MappedFile], dict[str, Any]]:
    """The files of one forward, and the hook's counters."""
    service.requests.clear()
    model, batch = tiny_qwen3(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), dtype=dtype, strict=True, **options)
    delivery = hook._staging.sender._delivery
    delivery.wanted = replace(delivery.wanted, last_rows=last_rows)
    run_once(
        hook, model, batch, rollout_ids=list(NAMES), rewards=[0.0, 1.0, 2.0, 3.0], strata=[f"kind {n}" for n in NAMES]
    )
    assert hook.flush(20), hook.stats()
    stats = hook.stats()
    hook.close()
    found = []
    for n, request in enumerate(service.rollouts()):
        place = directory / f"{n}"
        place.mkdir(parents=True)
        found.append(mapped(request, place))
    return found, stats


def by_rollout(files: list[wire.MappedFile]) -> dict[str, dict[str, Any]]:
    """What each rollout has, whichever file it is in: the bytes of its rows of every tensor."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        header = wire.check_rollout_header(file.header)
        ids, cu, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
        wire.check_index(header, ids, cu, mask, VOCAB)
        predicting = wire.predicting_rows(mask)
        for n, name in enumerate(names_of(header)):
            rows = np.arange(cu[n], cu[n + 1])
            few = np.flatnonzero((predicting >= cu[n]) & (predicting < cu[n + 1]))
            of: dict[str, Any] = {"reward": (header.rewards or ())[n], "stratum": (header.strata or ())[n]}
            for tensor in file.header.tensors:
                if tensor != "cu_seqlens":
                    array = file.array(tensor)
                    of[tensor] = array[few if len(array) == len(predicting) != len(ids) else rows].tolist()
            found[name] = of
    return found


def read(directory: Path) -> list[RolloutBatch]:
    """The files of `sent` as the worker reads them."""
    return [load_batch(path) for path in sorted(directory.rglob("*.safetensors"))]


def limits(monkeypatch: pytest.MonkeyPatch, dtype: FeatureDtype, tokens: int, longest: int) -> None:
    """A file has at most `tokens` tokens; a rollout of its own at most `longest`."""
    width = row_bytes(3, HIDDEN, dtype)
    monkeypatch.setattr(RolloutSender, "file_bytes", property(lambda _: tokens * width))
    monkeypatch.setattr(RolloutSender, "rollout_bytes", property(lambda _: longest * width + 64))


@pytest.mark.parametrize("last_rows", ["all", "predicting"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e4m3_all"])
@pytest.mark.parametrize(
    ("tokens", "files"), [(1, ["a", "b", "c", "d"]), (13, ["a", "b", "c", "d"]), (24, ["ab", "cd"])]
)
def test_the_rollouts_of_a_forward_are_the_same_in_several_files(
    service: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: FeatureDtype,
    last_rows: wire.LastRows,
    tokens: int,
    files: list[str],
) -> None:
    whole, _ = sent(service, tmp_path / "whole", dtype, last_rows)
    assert len(whole) == 1
    limits(monkeypatch, dtype, tokens, longest=1000)
    parts, stats = sent(service, tmp_path / "parts", dtype, last_rows)
    assert ["".join(names_of(wire.check_rollout_header(part.header))) for part in parts] == files
    assert by_rollout(parts) == by_rollout(whole)
    assert (stats["captured_rollouts"], stats["captured_tokens"], stats["cut_long"]) == (4, sum(TOKENS.values()), 0)
    for part in parts:
        if last_rows == "all":  # `logprob_gap` reads a state for each row
            assert logprob_gap(part, tiny_qwen3().lm_head.weight, 0.7) < 0.05
    assert [batch.rollouts for batch in read(tmp_path / "parts")] == [len(names) for names in files]


@pytest.mark.parametrize("last_rows", ["all", "predicting"])
def test_a_rollout_that_is_too_long_is_sent_up_to_there(
    service: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    last_rows: wire.LastRows,
) -> None:
    caplog.set_level(logging.WARNING, "rl_hooks")
    whole = by_rollout(sent(service, tmp_path / "whole", "bfloat16", last_rows)[0])
    limits(monkeypatch, "bfloat16", tokens=6, longest=6)  # of b the policy generated none of the first six
    files, stats = sent(service, tmp_path / "cut", "bfloat16", last_rows)
    found = by_rollout(files)
    assert [*found] == ["a", "c", "d"]
    for name, of in found.items():
        for tensor, rows in of.items():
            if isinstance(rows, list):
                assert rows == whole[name][tensor][: len(rows)], tensor
        assert len(of["input_ids"]) == min(6, TOKENS[name])
    assert (stats["cut_long"], stats["skipped_budget"], stats["captured_rollouts"]) == (3, 1, 3)
    (said,) = [r.getMessage() for r in caplog.records if "sent up to there" in r.getMessage()]
    assert said.startswith("draftalign: rollouts of more than 6 tokens")
    assert [batch.rollouts for batch in read(tmp_path / "cut")] == [1, 1, 1]


def test_a_forward_of_an_8b_policy_is_sent_by_the_defaults() -> None:
    """16,384 tokens, as verl packs them by default, and one rollout of 20,000."""
    H, tokens = 4096, 16_384
    sender = RolloutSender("http://127.0.0.1:9")
    width = row_bytes(3, H, "bfloat16")
    assert tokens * width <= sender._queue.limit_bytes
    lengths = [1024] * 16
    plan = plan_of(lengths)
    files = plan.files(sender.file_bytes // width, sender.rollout_bytes // width)
    assert sum(len(part.rows) for _, part in files) == tokens
    assert all(len(part.rows) * width <= sender.file_bytes for _, part in files)
    (_, long), *more = plan_of([20_000]).files(sender.file_bytes // width, sender.rollout_bytes // width)
    assert not more
    assert 16_000 < len(long.rows) < 20_000
    assert len(long.rows) * width <= sender.rollout_bytes < 512 << 20
    for _, part in [*files, (slice(0), long)]:
        assert sender.submit(lambda: [b""], size_bytes=len(part.rows) * width)
    assert sender.stats()["dropped_full"] == 0
    sender.close(0.0)


def test_prompts_are_named_by_hashes_which_go_with_their_rollouts() -> None:
    names = [wire.prompt_hash([n]) for n in range(3)]
    plan = plan_of([4, 5, 6], prompt_hashes=names)
    assert [part.prompt_hashes for _, part in plan.files(9, 9)] == [tuple(names[:2]), (names[2],)]
    assert [part.offered for _, part in plan.files(9, 9)] == [(3, 12), (0, 0)], "of all of them, said once"
    for wrong in (names[:2], [*names[:2], "x"], [*names[:2], names[2].upper()]):
        with pytest.raises(RolloutError, match="prompt_hashes"):
            plan_of([4, 5, 6], prompt_hashes=wrong)


def test_answers_that_are_the_same_are_several_without_ids_too() -> None:
    assert plan_of([3] * 16).offered == (16, 32)
    assert plan_of([3, 4, 3, 4]).offered == (4, 10)


def plan_of(lengths: list[int], **more: Any) -> BatchPlan:
    """Rollouts of zeros, of which the policy generated all but the first token."""
    from rl_hooks.sending.tally import Tally
    from rl_hooks.trainer.plan import CaptureArguments, RolloutChoice, RolloutIds, plan_batch

    cu = torch.tensor(np.cumsum([0, *lengths]))
    ids = torch.zeros(1, int(cu[-1]), dtype=torch.long)
    choice = RolloutChoice(1.0, 1 << 30, Tally(logging.getLogger("test"), "skipped_empty"))
    told = CaptureArguments(input_ids=ids, loss_mask=torch.ones_like(ids), policy_version=0, cu_seqlens=cu, **more)
    plan = plan_batch(RolloutIds(0), choice, told)
    assert plan is not None
    return plan
