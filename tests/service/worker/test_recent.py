"""The bounded memory of recent rollouts: what stays, what is drawn, what a restart finds again."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.service.service_fixtures import with_last_rows
from helpers.worker.rollout_files import as_fp8, prompts_once_of
from helpers.worker.worker_fixtures import World, joined
from torch import Tensor

import drafter.policy
from drafter.batch import RolloutBatch, load_batch, prompt_hashes, screen
from drafter.errors import BatchRejected
from drafter.replay.lossless import drafters_favour
from drafter.replay.replay import replay
from drafter.training.ranks import Ranks
from drafter.training.trainer import DrafterTrainer, TrainConfig
from rl_hooks import wire
from service.monitor.alpha import Abandoned
from service.worker.recent import KeptBatch, RecentRollouts, Task, _packed, taken


class Memory:
    """Recent rollouts over a spool of the test's own."""

    def __init__(self, directory: Path, capacity_tokens: int = 10_000) -> None:
        self.spool, self.directory = directory / "spool", directory / "recent"
        self.spool.mkdir(exist_ok=True)
        self.recent = RecentRollouts(self.directory, capacity_tokens=capacity_tokens, run="math")
        self.world = World()

    def add(
        self, name: str, policy_version: int = 0, rollouts: int = 8, prompts: Sequence[int] | None = None
    ) -> KeptBatch:
        path = self.spool / f"{name}.safetensors"
        body = self.world.rollout_file(name, policy_version=policy_version, rollouts=rollouts, prompts=prompts)
        path.write_bytes(body)
        return self.recent.add(path, load_batch(path))

    def files(self, where: Path) -> list[str]:
        return sorted(p.stem for p in where.iterdir())


def test_files_take_no_more_than_is_free_beside_them_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path)
    size = memory.add("a").states_bytes
    free = 10 * size
    monkeypatch.setattr("service.worker.recent.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    for name in "bcd":
        memory.add(name)
    assert len(memory.recent.names()) == 4
    free = 5 * size // 2
    memory.add("e")
    assert memory.recent.names() == ["d.safetensors", "e.safetensors"]
    free = 0
    memory.add("f")
    memory.recent.settle()
    assert memory.files(memory.directory) == ["f"]


def test_a_batch_that_was_dropped_and_comes_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis failed in between, and the claim comes for the second time."""
    memory = Memory(tmp_path)
    first = memory.add("first")
    monkeypatch.setattr("service.worker.recent.shutil.disk_usage", lambda _: SimpleNamespace(free=first.states_bytes))
    memory.add("second")
    assert memory.recent.names() == ["second.safetensors"]
    monkeypatch.undo()
    memory.add("first")
    memory.recent.settle()
    assert memory.files(memory.directory) == ["first", "second"]


def test_a_file_that_cannot_be_read_is_left_out_and_what_may_pass_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path)
    memory.add("bad")
    memory.recent.settle()
    number = errno.EIO

    def fail(_: Path) -> None:
        raise OSError(number, "of the disk")

    monkeypatch.setattr("service.worker.recent.check_blob", fail)
    again = Memory(tmp_path)
    again.recent.restore(["bad.safetensors"], again.spool, {})
    assert again.recent.names() == []
    number = errno.EMFILE
    with pytest.raises(OSError, match="of the disk"):
        Memory(tmp_path).recent.restore(["bad.safetensors"], again.spool, {})


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def test_it_knows_the_prompts_that_the_candidate_is_trained_on_and_the_newest_policy_that_answered_each(
    tmp_path: Path,
) -> None:
    memory = Memory(tmp_path, capacity_tokens=300)
    first = memory.add("first", policy_version=1, prompts=[1, 1, 2])
    memory.add("again", policy_version=5, prompts=[2, 3])
    one, _, two = prompt_hashes(first.batch)
    assert (memory.recent.prompts[one], memory.recent.prompts[two], len(memory.recent.prompts)) == (1, 5, 3)
    memory.recent.settle()
    again = Memory(tmp_path, capacity_tokens=300)
    again.recent.restore(memory.recent.names(), again.spool, {})
    assert again.recent.prompts == memory.recent.prompts
    again.add("many", policy_version=6, rollouts=16)
    assert one not in again.recent.prompts, "what is forgotten is not trained on either"


def test_files_stay_in_the_spool_until_a_checkpoint_lists_them(memory: Memory) -> None:
    memory.add("a")
    assert (memory.files(memory.spool), memory.files(memory.directory)) == (["a"], [])
    memory.recent.settle()
    assert (memory.files(memory.spool), memory.files(memory.directory)) == ([], ["a"])
    memory.recent.settle()


def test_the_oldest_go_when_there_are_too_many_tokens_and_their_files_at_the_next_checkpoint(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=250)
    for name in "abc":
        memory.add(name)
        memory.recent.settle()
    kept = memory.files(memory.directory)
    memory.add("d")
    assert memory.files(memory.directory) == kept, "the last checkpoint still lists them"
    memory.recent.settle()
    assert "d" in memory.files(memory.directory)
    assert "a" not in memory.files(memory.directory)
    assert memory.recent.names() == [f"{n}.safetensors" for n in memory.files(memory.directory)]


def test_the_newest_batch_stays_however_large(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=1)
    memory.add("a")
    memory.add("b")
    memory.recent.settle()
    assert memory.files(memory.directory) == ["b"]
    assert memory.files(memory.spool) == []


def test_weights_are_not_kept(memory: Memory) -> None:
    """Replays read them. In training, batches with and without would not be packed together. Other ranks have none."""
    plain = memory.add("a").batch
    weighed = replace(plain, log_weights=torch.zeros(plain.tokens), older=torch.ones(plain.tokens, dtype=torch.bool))
    kept = memory.recent.add(memory.spool / "a.safetensors", weighed).batch
    assert (kept.log_weights, kept.older, kept.kind) == (None, None, plain.kind)


def test_who_drew_a_token_is_not_kept_through_a_restart(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    plain = memory.add("a").batch

    def told(tensors: dict[str, torch.Tensor]) -> None:
        tensors["versions_behind"] = torch.zeros(len(tensors["input_ids"]), dtype=torch.int32)

    path = memory.spool / "told.safetensors"
    path.write_bytes(memory.world.rollout_file("told", change=told))
    assert load_batch(path).older is not None
    memory.recent.add(path, load_batch(path))
    again = Memory(tmp_path)
    again.recent.restore(memory.recent.names(), again.spool, {})
    assert [kept.batch.kind for kept in again.recent.but([])] == [plain.kind] * 2


def test_a_redelivered_batch_is_kept_once(memory: Memory) -> None:
    memory.add("a")
    memory.add("b")
    memory.add("a")
    assert memory.recent.names() == ["b.safetensors", "a.safetensors"]


def test_a_restart_finds_what_was_listed_wherever_it_lies_and_deletes_the_rest(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.add("settled")
    memory.recent.settle()
    memory.add("unsettled")
    listed = memory.recent.names()
    (memory.directory / "stray.safetensors").write_bytes(b"left by a checkpoint that never was")
    again = Memory(tmp_path)
    again.recent.restore([*listed, "lost.safetensors"], again.spool, {})
    assert again.recent.names() == listed
    again.recent.settle()
    assert (memory.files(memory.spool), memory.files(memory.directory)) == ([], ["settled", "unsettled"])


def train_steps(recent: RecentRollouts, newest: Sequence[KeptBatch], **how: Any) -> Iterator[list[RolloutBatch]]:
    return map(taken, Task(newest, recent.but(newest), **how).drawn())


def test_training_draws_every_rollout(memory: Memory) -> None:
    newest = [memory.add(name) for name in "abcdef"][-2:]
    steps = train_steps(memory.recent, newest, passes=40.0, step_tokens=64, seed=0)
    drawn = {rollout for step in steps for batch in step for rollout in batch.rollout_ids}
    assert drawn == {f"{name}/{i}" for name in "abcdef" for i in range(8)}


def test_old_rollouts_are_drawn_alike_however_many_their_version_has(memory: Memory) -> None:
    old = [memory.add(f"v{v}", policy_version=v, rollouts=2 if v == 7 else 60) for v in range(8)]
    newest = [memory.add("new", policy_version=9, rollouts=60)]
    seen: Counter[str] = Counter()
    for step in train_steps(memory.recent, newest, passes=40.0, step_tokens=150, seed=0):
        seen.update(rollout for batch in step for rollout in batch.rollout_ids)

    def times(kept: KeptBatch) -> float:
        return sum(seen[i] for i in kept.batch.rollout_ids) / kept.batch.rollouts

    usual = sum(times(kept) for kept in old[:7]) / 7
    assert times(old[7]) < 2.5 * usual
    assert all(0.5 * usual < times(kept) < 2 * usual for kept in old[:7])


def test_a_step_is_half_new_half_old_within_its_budget(memory: Memory) -> None:
    for name in "abc":
        memory.add(name)
    newest = [memory.add("d", policy_version=1)]
    for step in train_steps(memory.recent, newest, passes=8.0, step_tokens=120, seed=1):
        new, old = step
        assert new.rollout_ids[0].startswith("d/")
        assert not old.rollout_ids[0].startswith("d/")
        for part in step:
            assert part.tokens <= 60 + 20, "whole rollouts: at most one more than fits"


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_steps_share_of_the_newest_is_what_was_asked_for(memory: Memory, share: float) -> None:
    for number in range(4):
        memory.add(f"old{number}", policy_version=0, rollouts=64)
    newest = [memory.add("new", policy_version=1, rollouts=64)]
    tokens = Counter[int]()
    for step in train_steps(memory.recent, newest, passes=8.0, step_tokens=800, seed=0, newest_share=share):
        for batch in step:
            tokens[batch.policy_version] += batch.tokens
    assert tokens[1] / tokens.total() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("files", "rollouts"), [(1, 64), (8, 8), (32, 2)])
def test_small_files_are_trained_on_as_often_as_large_ones(memory: Memory, files: int, rollouts: int) -> None:
    for number in range(4):
        memory.add(f"old{number}", policy_version=0, rollouts=32)
    newest = [memory.add(f"new{number}", policy_version=1, rollouts=rollouts) for number in range(files)]
    tokens = sum(k.batch.tokens for k in newest)
    seen: Counter[str] = Counter()
    drawn = 0
    for step in train_steps(memory.recent, newest, passes=8.0, step_tokens=200, seed=0):
        assert len(step) <= 2, "one batch of each policy version"
        drawn += sum(batch.tokens for batch in step)
        seen.update(r for batch in step if batch.policy_version == 1 for r in batch.rollout_ids)
    assert 7.0 < drawn / tokens < 10.0
    trained = {r for k in newest for r in k.batch.rollout_ids}
    assert len(seen) > 0.9 * len(trained)
    assert max(seen.values()) <= 15


def test_a_small_file_beside_a_large_one_is_trained_on_as_often(memory: Memory) -> None:
    large = memory.add("large", policy_version=1, rollouts=60)
    small = memory.add("small", policy_version=1, rollouts=3)
    seen: Counter[str] = Counter()
    for step in train_steps(memory.recent, [large, small], passes=40.0, step_tokens=150, seed=0):
        seen.update(r for batch in step for r in batch.rollout_ids)

    def times(kept: KeptBatch) -> float:
        return sum(seen[i] for i in kept.batch.rollout_ids) / kept.batch.rollouts

    assert times(small) < 1.5 * times(large)


def test_the_older_half_is_of_one_policy_version_where_that_has_enough(memory: Memory) -> None:
    for version in range(4):
        for number in range(3):
            memory.add(f"v{version}n{number}", policy_version=version, rollouts=8)
    newest = [memory.add("new", policy_version=9)]
    seen: set[int] = set()
    for step in train_steps(memory.recent, newest, passes=20.0, step_tokens=120, seed=0):
        assert len(step) == 2
        seen.add(step[1].policy_version)
    assert seen == {0, 1, 2, 3}
    large = next(train_steps(memory.recent, newest, passes=0.1, step_tokens=100_000, seed=0))
    assert {batch.policy_version for batch in large} == {0, 1, 2, 3, 9}


def test_what_may_not_be_packed_together_is_kept_apart(memory: Memory) -> None:
    kept = [memory.add(name, policy_version=1) for name in "ab"]
    other = kept[1].batch
    eighths, cold = replace(other, aux_hidden=other.aux_hidden.double()), replace(other, temperature=0.5)
    packed = _packed([kept[0].batch, eighths, cold, cold, kept[0].batch])
    assert [b.tokens for b in packed] == [2 * kept[0].batch.tokens, other.tokens, 2 * other.tokens]


@pytest.mark.parametrize("step_tokens", [1, 2, 64])
def test_as_many_tokens_are_drawn_as_passes_ask_for(memory: Memory, step_tokens: int) -> None:
    memory.add("old")
    newest = [memory.add("new", policy_version=1)]
    drawn = [
        batch.tokens
        for s in train_steps(memory.recent, newest, passes=3.0, step_tokens=step_tokens, seed=0)
        for batch in s
    ]
    assert sum(drawn[:-2]) < 3 * newest[0].batch.tokens <= sum(drawn)


def test_steps_of_few_tokens_are_more(memory: Memory) -> None:
    memory.add("old", policy_version=0)
    newest = [memory.add("new", policy_version=1)]
    steps = list(train_steps(memory.recent, newest, passes=8.0, step_tokens=100_000, seed=0))
    assert 3 <= len(steps) <= 6, "each takes all there is, half of it new"
    assert all({b.policy_version for b in step} == {0, 1} for step in steps)


def test_the_same_seed_draws_the_same(memory: Memory) -> None:
    newest = [memory.add(name) for name in "abc"][-1:]

    def drawn(seed: int) -> list[tuple[str, ...]]:
        steps = train_steps(memory.recent, newest, passes=2.0, step_tokens=64, seed=seed)
        return [batch.rollout_ids for step in steps for batch in step]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_an_empty_memory_has_nothing_to_give(memory: Memory) -> None:
    assert memory.recent.prompts == {}
    assert list(train_steps(memory.recent, [], passes=3.0, step_tokens=64, seed=0)) == []
    assert memory.recent.oldest_policy_version() is None


class Rank(Ranks):
    """One of several."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


@pytest.mark.parametrize("world", [2, 3, 11])
def test_the_shares_of_all_ranks_are_what_one_process_trains_on(memory: Memory, world: int) -> None:
    """Each rollout of each window once, on ranks that have as many as each other; a rank may have none."""
    older = [memory.add("a"), memory.add("b", policy_version=1, rollouts=3)]
    task = Task([memory.add("c", policy_version=2, rollouts=5)], older, passes=6.0, step_tokens=150, seed=3)
    whole = list(train_steps(memory.recent, task.newest, passes=6.0, step_tokens=150, seed=3))
    assert len(whole) > 2
    again = Task.of(
        json.loads(json.dumps(task.order())), lambda name, _: next(k for k in (*older, *task.newest) if k.name == name)
    )
    for window, drawn in zip(whole, again.drawn(), strict=True):
        shares = [[i for batch in taken(drawn, Rank(r, world)) for i in batch.rollout_ids] for r in range(world)]
        assert sorted(i for share in shares for i in share) == sorted(i for b in window for i in b.rollout_ids)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def copied(path: Path) -> RolloutBatch:
    """What `load_batch` gave while it copied features out and widened fp8 at once."""
    file = wire.MappedFile(path)

    def features(name: str) -> Tensor:
        raw = torch.from_numpy(file.array(name).copy())
        if file.header.tensors[name].dtype == "BF16":
            return raw.view(torch.bfloat16)
        scale = torch.from_numpy(file.array(f"{name}_scale").copy())
        tokens, layers = scale.shape
        return (raw.view(torch.float8_e4m3fn).float().view(tokens, layers, -1) * scale[:, :, None]).view(tokens, -1)

    aux, last = features("aux_hidden"), features("last_hidden")
    return replace(load_batch(path), aux_hidden=aux, last_hidden=last, aux_scale=None, last_scale=None)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8, last_hidden too"])
def test_what_is_learnt_and_scored_from_mapped_files_is_what_copies_gave_to_the_last_bit(
    tmp_path: Path, kind: str
) -> None:
    """Losses, gradients and weights of training on kept batches, replay, log p check, normalisers, lossless check."""
    outcomes = []
    for load in (copied, load_batch):
        bodies = [World().rollout_file(name, rollouts=12) for name in ("a", "b", "c")]
        if kind != "bfloat16":
            bodies = [as_fp8(body, tmp_path / "x", last="too" in kind) for body in bodies]
        outcomes.append(learnt_and_scored(bodies, load, tmp_path / load.__name__))
    assert_equal(*outcomes)


def learnt_and_scored(bodies: Sequence[bytes], load: Callable[[Path], RolloutBatch], directory: Path) -> list[object]:
    """All that is computed from rollout files: training on the last of them and on those before, then its scores."""
    world, recent = World(), RecentRollouts(directory, capacity_tokens=10_000, run="math")
    for number, body in enumerate(bodies):
        path = directory / f"{number}.safetensors"
        path.write_bytes(body)
        newest = recent.add(path, load(path))
    trainer = DrafterTrainer(world.drafter(), TrainConfig(optimizer="adamw"))
    found: list[object] = []
    policy = world.policy()
    for window in train_steps(recent, [newest], passes=3, step_tokens=96, seed=5):
        report = trainer.step([(batch, policy) for batch in window])
        trainer._optimizer.forget_gradients()
        for batch in window:
            trainer._accumulate(trainer.prepare(batch), policy, 50)
        found += [report.loss, report.grad_norm, report.acceptance_per_step]
        found += [p.grad.clone() for p in trainer.drafter.parameters() if p.grad is not None]
    assert len(found) > 6
    assert trainer.windows > 1
    found += [p.detach().clone() for p in trainer.drafter.parameters()]
    batch = newest.batch
    screen(batch)
    found.append(replay(trainer.drafter, batch, policy, depth=4).alpha)
    with mock.patch.object(drafter.policy, "_UNFORESEEN", random.Random(0)):
        found.append(policy.needed_head().logprob_gap(batch))
    normalised = policy.needed_head().normalise(replace(batch, normalised=False)).logsumexp
    found.append(normalised[wire.predicting_rows(batch.loss_mask.numpy())])
    found.append(str(drafters_favour(trainer.drafter, batch, policy)))
    return found


def assert_equal(before: list[object], now: list[object]) -> None:
    assert len(before) == len(now)
    for a, b in zip(before, now, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def last_rows_of(body: bytes, last_rows: wire.LastRows, scratch: Path) -> bytes:
    """The same rollouts as a file with these rows of the last state."""
    scratch.write_bytes(body)
    file = wire.MappedFile(scratch)
    tensors = {n: wire.Tensor.of(file.array(n).copy(), i.dtype) for n, i in file.header.tensors.items()}
    metadata = {**file.header.metadata, "format": wire.FORMATS[last_rows]}
    return joined(wire.encode(with_last_rows(tensors, last_rows), metadata))


def tool_turns(tensors: dict[str, Tensor]) -> None:
    """The fifth token of each rollout is a tool's; the ninth too."""
    for start in tensors["cu_seqlens"][:-1].tolist():
        tensors["loss_mask"][[start + 4, start + 8]] = 0


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8, last_hidden too"])
def test_what_is_learnt_and_scored_does_not_need_the_rows_that_predict_no_response_token(
    tmp_path: Path, kind: str
) -> None:
    bodies = [World().rollout_file(name, rollouts=12, change=tool_turns) for name in ("a", "b", "c")]
    if kind != "bfloat16":
        bodies = [as_fp8(body, tmp_path / "x", last="too" in kind) for body in bodies]
    fewer = [last_rows_of(body, "predicting", tmp_path / "x") for body in bodies]
    assert all(len(b) < len(a) for a, b in zip(bodies, fewer, strict=True))
    full = learnt_and_scored(bodies, load_batch, tmp_path / "full")
    assert_equal(full, learnt_and_scored(fewer, load_batch, tmp_path / "fewer"))
    path = tmp_path / "x"
    path.write_bytes(fewer[0])
    batch = load_batch(path)
    assert len(batch.last_hidden) == batch.response_tokens
    mapped = batch.last_hidden.untyped_storage().nbytes()
    assert mapped >= len(fewer[0]) - 8, "it lies in the file, of which nothing was copied"


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8, last_hidden too"])
def test_what_is_learnt_and_scored_is_the_same_where_a_shared_prompt_was_sent_once(tmp_path: Path, kind: str) -> None:
    prompts = [number // 4 for number in range(12)]
    bodies = [World().rollout_file(name, prompts=prompts) for name in ("a", "b", "c")]
    if kind != "bfloat16":
        bodies = [as_fp8(body, tmp_path / "x", last="too" in kind) for body in bodies]
    once = [prompts_once_of(body, tmp_path / "x") for body in bodies]
    assert all(len(b) < len(a) for a, b in zip(bodies, once, strict=True))
    full = learnt_and_scored(bodies, load_batch, tmp_path / "full")
    assert_equal(full, learnt_and_scored(once, load_batch, tmp_path / "once"))
    mixed = learnt_and_scored([bodies[0], *once[1:]], load_batch, tmp_path / "mixed")
    assert_equal(full, mixed)
    path = tmp_path / "y"
    path.write_bytes(once[0])
    batch = load_batch(path)
    assert len(batch.aux_hidden) == batch.tokens - 9 * 3, "nine of twelve share a prompt of three tokens"
    mapped = batch.aux_hidden.untyped_storage().nbytes()
    assert mapped >= len(once[0]) - 8, "it lies in the file, of which nothing was copied"


def test_batches_with_and_without_those_rows_are_trained_on_beside_each_other(tmp_path: Path) -> None:
    bodies = [World().rollout_file(name, rollouts=12) for name in ("a", "b", "c")]
    mixed = [bodies[0], *(last_rows_of(body, "predicting", tmp_path / "x") for body in bodies[1:])]
    found = learnt_and_scored(mixed, load_batch, tmp_path / "mixed")
    assert all(math.isfinite(one) for one in found if isinstance(one, float))


@pytest.mark.parametrize("where", ["first", "last", "one more"])
def test_a_row_too_few_or_too_many_is_refused(tmp_path: Path, where: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(last_rows_of(World().rollout_file("a"), "predicting", path))
    file = wire.MappedFile(path)
    tensors = {n: wire.Tensor.of(file.array(n).copy(), i.dtype) for n, i in file.header.tensors.items()}
    for name in ("last_hidden", "logsumexp"):
        rows = file.array(name)
        rows = {"first": rows[1:], "last": rows[:-1], "one more": np.concatenate([rows, rows[:1]])}[where]
        tensors[name] = wire.Tensor.of(rows.copy(), tensors[name].dtype)
    (tmp_path / "y").write_bytes(joined(wire.encode(tensors, file.header.metadata)))
    with pytest.raises(wire.WireError, match="has one row for each, of the token before it"):
        load_batch(tmp_path / "y")


@pytest.mark.parametrize("fp8", [False, True])
def test_features_are_read_from_the_file_which_may_be_moved_and_deleted_and_keep_no_descriptor(
    tmp_path: Path, fp8: bool
) -> None:
    memory = Memory(tmp_path)
    path = memory.spool / "a.safetensors"
    body = memory.world.rollout_file("a")
    path.write_bytes(as_fp8(body, tmp_path / "x", last=True) if fp8 else body)
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = memory.recent.add(path, load_batch(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "thousands of small batches are kept"
    want = copied(path)
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(path) in mapped
    memory.recent.settle()
    (memory.directory / path.name).unlink()
    got = kept.batch.to("cpu")
    assert torch.equal(got.aux_hidden, want.aux_hidden)
    assert torch.equal(got.last_hidden, want.last_hidden)
    kept.batch.aux_hidden.view(torch.uint8)[0] = 0  # its own page only: the mapping is private


def test_a_damaged_scale_is_found_where_the_batch_is_screened(tmp_path: Path) -> None:
    body = as_fp8(World().rollout_file("a", rollouts=600), tmp_path / "x", last=False)
    path = tmp_path / "a.safetensors"
    path.write_bytes(body)
    batch = load_batch(path)
    assert batch.tokens > 2 * 4096, "more than is screened at once"
    screen(batch)
    assert batch.aux_scale is not None
    batch.aux_scale[5000, 1] = float("inf")
    with pytest.raises(BatchRejected, match=r"aux_hidden holds NaN or infinity in 1 of .*first at row 5000"):
        screen(batch)


def test_what_an_abandoned_attempt_brought_is_dropped_and_a_head_that_is_late_drops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 3 and 4 came before their batches, that of 5 after it; then the trainer went back to 3."""
    memory = Memory(tmp_path)
    for second, version in enumerate((2, 3, 4, 5), start=1):
        memory.add(f"v{version}", policy_version=version)
        os.utime(memory.spool / f"v{version}.safetensors", (second, second))
    heads = [(2, 0), (3, 1_500_000_000), (4, 2_500_000_000), (5, 4_500_000_000)]
    memory.recent.forget_abandoned(heads, lambda: Abandoned(7000.0))
    assert memory.recent.names() == [f"v{version}.safetensors" for version in (2, 3, 4, 5)]
    memory.add("new", policy_version=3)
    os.utime(memory.spool / "new.safetensors", (9, 9))
    memory.recent.forget_abandoned([*heads, (3, 8_000_000_000)], Abandoned)
    assert len(memory.recent.names()) == 5, "a late head of another engine is no return"
    with caplog.at_level(logging.INFO):
        memory.recent.forget_abandoned([*heads, (3, 8_000_000_000)], lambda: Abandoned(7000.0))
    assert caplog.messages == ["math: the trainer went back: 3 recent batches of before are not trained on again"]
    assert memory.recent.names() == ["v2.safetensors", "new.safetensors"]
    memory.recent.settle()
    assert memory.files(memory.directory) == ["new", "v2"]


def test_of_an_attempt_that_a_session_gave_up_the_newest_version_is_dropped_too(tmp_path: Path) -> None:
    """It has no batch of a higher version than the head that may have replaced its own."""
    memory = Memory(tmp_path)
    for second, version in enumerate((0, 1), start=1):
        memory.add(f"v{version}", policy_version=version)
        os.utime(memory.spool / f"v{version}.safetensors", (second, second))
    heads = [(1, 4_000_000_000)]
    memory.recent.forget_abandoned(heads, lambda: Abandoned(2000.0))
    assert len(memory.recent.names()) == 2, "guessed: it may be a late head"
    memory.recent.forget_abandoned(heads, lambda: Abandoned(1500.0, told=True))
    assert len(memory.recent.names()) == 2, "it came afterwards"
    memory.recent.forget_abandoned(heads, lambda: Abandoned(2000.0, told=True))
    assert memory.recent.names() == ["v0.safetensors"]
