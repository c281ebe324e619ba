"""The bounded memory of recent rollouts: what stays, what is held out, what a restart finds again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from worker_fixtures import World

from drafter.batch import load_batch, prompt_hashes
from drafter.replay.gate import MIN_ROLLOUTS
from rl_hooks import wire
from service.worker.recent import (
    KeptBatch,
    RecentRollouts,
    _packed,
    is_held_out,
)


class Memory:
    """Recent rollouts over a spool of the test's own."""

    def __init__(self, directory: Path, capacity_tokens: int = 10_000) -> None:
        self.spool, self.directory = directory / "spool", directory / "recent"
        self.spool.mkdir(exist_ok=True)
        self.recent = RecentRollouts(self.directory, capacity_tokens=capacity_tokens)
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


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def test_one_key_in_n_is_held_out_and_always_the_same_ones() -> None:
    ids = [f"step{i // 64}/rollout{i % 64}" for i in range(8000)]
    held = [i for i in ids if is_held_out(i, 8)]
    assert abs(len(held) / len(ids) - 1 / 8) < 0.02
    assert held == [i for i in ids if is_held_out(i, 8)]
    assert not any(is_held_out(i, 0) for i in ids)


# --- what is held out
FIRST = MIN_ROLLOUTS * 4
"""Prompts that are split by group: the memory holds one in four out."""


def held(kept: KeptBatch) -> set[int]:
    return {*kept.held_out, *kept.held_out_groups}


def drawn_prompts(memory: Memory, kept: Sequence[KeptBatch]) -> set[str]:
    steps = memory.recent.train_steps(kept, passes=40.0, step_tokens=200, seed=0)
    return {prompt for step in steps for batch in step for prompt in prompt_hashes(batch)}


def test_siblings_of_a_held_out_rollout_are_never_trained_on(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=100_000)
    memory.add("first", prompts=range(FIRST))
    groups = [n for n in range(1000, 1120) for _ in range(4)]
    again = [memory.add(f"epoch{i}", policy_version=i, prompts=groups) for i in range(3)]
    evidence = memory.recent.held_out(32)
    assert evidence.by_prompt
    tested = {prompt for batch in evidence.batches for prompt in prompt_hashes(batch)}
    assert 16 <= len(tested) < 60
    assert not tested & drawn_prompts(memory, again)
    assert [k.held_out for k in again] == [again[0].held_out] * 3, "the same prompts in every epoch"
    assert not any(k.held_out_groups for k in again)


def test_a_prompt_that_was_trained_on_before_prompts_were_enough_is_never_evidence_by_prompt(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=100_000)
    first = [memory.add(f"f{i}", prompts=range(16 * i, 16 * i + 16)) for i in range(4)]
    assert not any(k.held_out for k in first)
    later = memory.add("later", prompts=[*range(FIRST), *range(1000, 1100)])
    of_first = {h for k in first for h in prompt_hashes(k.batch)}
    assert not of_first & {prompt_hashes(later.batch)[i] for i in later.held_out}
    assert len(later.held_out) > 10


def test_a_group_is_held_out_as_a_whole_while_prompts_are_few(memory: Memory) -> None:
    """Three prompts: by prompt, all or none of their rollouts might be held out."""
    kept = [memory.add(f"b{i}", prompts=[n for n in range(3) for _ in range(4)]) for i in range(8)]
    for one in kept:
        assert {i // 4 for i in held(one)}.isdisjoint({i // 4 for i in one.train})
    assert 0 < sum(len(held(one)) for one in kept) < 8 * 12 / 2
    assert all(any(n in {i // 4 for i in one.train} for one in kept) for n in range(3)), "each prompt is trained on"
    evidence = memory.recent.held_out(8)
    assert not evidence.by_prompt
    assert sum(batch.rollouts for batch in evidence.batches) >= 8


def test_evidence_of_a_handful_of_prompts_is_not_taken_for_enough(tmp_path: Path) -> None:
    """A few prompts beyond the first ones: groups give more of them, whatever number of siblings these few have."""
    memory = Memory(tmp_path, capacity_tokens=1_000_000)
    for n in range(4):
        memory.add(f"b{n}", policy_version=n, prompts=[p for p in range(FIRST + 12) for _ in range(8)])
    few = {prompt for k in memory.recent._kept for prompt in (prompt_hashes(k.batch)[i] for i in k.held_out)}
    assert 0 < len(few) < MIN_ROLLOUTS
    evidence = memory.recent.held_out(16)
    assert not evidence.by_prompt
    assert len({prompt for batch in evidence.batches for prompt in prompt_hashes(batch)}) >= MIN_ROLLOUTS


def test_rollouts_without_a_prompt_are_split_by_batch(memory: Memory) -> None:
    kept = [memory.add(f"b{i}", prompts=[0] * 8) for i in range(24)]
    whole = [held(one) == set(range(8)) for one in kept]
    assert all(held(one) in (set(), set(range(8))) for one in kept)
    assert 0 < sum(whole) < 16


def test_the_split_is_the_same_after_a_restart(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=100_000)
    before = [memory.add(f"b{i}", prompts=range(30 * i, 30 * i + 30)) for i in range(4)]
    memory.recent.settle()
    again = Memory(tmp_path, capacity_tokens=100_000)
    again.recent.restore(memory.recent.names(), again.spool, memory.recent.first_prompts)
    assert again.recent.first_prompts == memory.recent.first_prompts
    assert len(again.recent.first_prompts) == FIRST
    after = again.recent._kept
    assert [(k.train, k.held_out, k.held_out_groups) for k in after] == [
        (k.train, k.held_out, k.held_out_groups) for k in before
    ]


def test_prompts_of_a_checkpoint_that_split_by_rollout_are_no_evidence_by_prompt(tmp_path: Path) -> None:
    memory = Memory(tmp_path, capacity_tokens=100_000)
    memory.add("old", prompts=range(3 * FIRST))
    memory.recent.settle()
    again = Memory(tmp_path, capacity_tokens=100_000)
    again.recent.restore(memory.recent.names(), again.spool, None)
    assert not any(kept.held_out for kept in again.recent._kept)
    assert not again.add("new", prompts=range(3 * FIRST)).held_out


def test_what_the_sender_says_of_the_prompt_counts_where_its_first_rows_are_missing(tmp_path: Path) -> None:
    """An engine's prefix cache leaves a part of the prompt: two siblings then begin differently."""
    memory = Memory(tmp_path, capacity_tokens=100_000)
    memory.add("first", prompts=range(FIRST))
    said = [wire.prompt_hash([n // 4]) for n in range(160)]
    path = memory.spool / "tapped.safetensors"
    path.write_bytes(memory.world.rollout_file("tapped", rollouts=160, prompt_hashes=said))
    kept = memory.recent.add(path, load_batch(path))
    assert kept.held_out
    assert {i // 4 for i in kept.held_out}.isdisjoint({i // 4 for i in kept.train})


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
    again.recent.restore([*listed, "lost.safetensors"], again.spool, memory.recent.first_prompts)
    assert again.recent.names() == listed
    again.recent.settle()
    assert (memory.files(memory.spool), memory.files(memory.directory)) == ([], ["settled", "unsettled"])


def test_training_never_draws_what_is_held_out(memory: Memory) -> None:
    newest = [memory.add(name) for name in "abcdef"][-2:]
    drawn = {
        rollout
        for step in memory.recent.train_steps(newest, passes=40.0, step_tokens=64, seed=0)
        for batch in step
        for rollout in batch.rollout_ids
    }
    every = {f"{name}/{i}" for name in "abcdef" for i in range(8)}
    held_out = {r for batch in memory.recent.held_out(1000).batches for r in batch.rollout_ids}
    assert 4 < len(held_out) < 24
    assert drawn == every - held_out


def test_old_rollouts_are_drawn_alike_however_many_their_version_has(memory: Memory) -> None:
    old = [memory.add(f"v{v}", policy_version=v, rollouts=2 if v == 7 else 60) for v in range(8)]
    newest = [memory.add("new", policy_version=9, rollouts=60)]
    seen: Counter[str] = Counter()
    for step in memory.recent.train_steps(newest, passes=40.0, step_tokens=150, seed=0):
        seen.update(rollout for batch in step for rollout in batch.rollout_ids)

    def times(kept: KeptBatch) -> float:
        return sum(seen[kept.batch.rollout_ids[i]] for i in kept.train) / len(kept.train)

    usual = sum(times(kept) for kept in old[:7]) / 7
    assert times(old[7]) < 2.5 * usual
    assert all(0.5 * usual < times(kept) < 2 * usual for kept in old[:7])


def test_evidence_is_what_came_last(memory: Memory) -> None:
    for version in (200, 201, 100, 101):
        memory.add(f"v{version}", policy_version=version, rollouts=16)
    found = [batch.policy_version for batch in memory.recent.held_out(1000).batches]
    assert found == [101, 100, 201, 200]


def test_a_step_is_half_new_half_old_within_its_budget(memory: Memory) -> None:
    for name in "abc":
        memory.add(name)
    newest = [memory.add("d", policy_version=1)]
    for step in memory.recent.train_steps(newest, passes=8.0, step_tokens=120, seed=1):
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
    for step in memory.recent.train_steps(newest, passes=8.0, step_tokens=800, seed=0, newest_share=share):
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
    for step in memory.recent.train_steps(newest, passes=8.0, step_tokens=200, seed=0):
        assert len(step) <= 2, "one batch of each policy version"
        drawn += sum(batch.tokens for batch in step)
        seen.update(r for batch in step if batch.policy_version == 1 for r in batch.rollout_ids)
    assert 7.0 < drawn / tokens < 10.0
    trained = {r for k in newest for r in (k.batch.rollout_ids[i] for i in k.train)}
    assert len(seen) > 0.9 * len(trained)
    assert max(seen.values()) <= 15


def test_a_small_file_beside_a_large_one_is_trained_on_as_often(memory: Memory) -> None:
    large = memory.add("large", policy_version=1, rollouts=60)
    small = memory.add("small", policy_version=1, rollouts=3)
    seen: Counter[str] = Counter()
    for step in memory.recent.train_steps([large, small], passes=40.0, step_tokens=150, seed=0):
        seen.update(r for batch in step for r in batch.rollout_ids)

    def times(kept: KeptBatch) -> float:
        return sum(seen[kept.batch.rollout_ids[i]] for i in kept.train) / len(kept.train)

    assert times(small) < 1.5 * times(large)


def test_the_older_half_is_of_one_policy_version_where_that_has_enough(memory: Memory) -> None:
    for version in range(4):
        for number in range(3):
            memory.add(f"v{version}n{number}", policy_version=version, rollouts=8)
    newest = [memory.add("new", policy_version=9)]
    seen: set[int] = set()
    for step in memory.recent.train_steps(newest, passes=20.0, step_tokens=120, seed=0):
        assert len(step) == 2
        seen.add(step[1].policy_version)
    assert seen == {0, 1, 2, 3}
    large = next(memory.recent.train_steps(newest, passes=0.1, step_tokens=100_000, seed=0))
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
        for s in memory.recent.train_steps(newest, passes=3.0, step_tokens=step_tokens, seed=0)
        for batch in s
    ]
    assert sum(drawn[:-2]) < 3 * newest[0].batch.tokens <= sum(drawn)


def test_steps_of_few_tokens_are_more(memory: Memory) -> None:
    memory.add("old", policy_version=0)
    newest = [memory.add("new", policy_version=1)]
    steps = list(memory.recent.train_steps(newest, passes=8.0, step_tokens=100_000, seed=0))
    assert 3 <= len(steps) <= 6, "each takes all there is, half of it new"
    assert all({b.policy_version for b in step} == {0, 1} for step in steps)


def test_the_same_seed_draws_the_same(memory: Memory) -> None:
    newest = [memory.add(name) for name in "abc"][-1:]

    def drawn(seed: int) -> list[tuple[str, ...]]:
        steps = memory.recent.train_steps(newest, passes=2.0, step_tokens=64, seed=seed)
        return [batch.rollout_ids for step in steps for batch in step]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_held_out_evidence_is_of_the_newest_policies(memory: Memory) -> None:
    for version, name in enumerate("abcdefgh"):
        memory.add(name, policy_version=version, rollouts=48)
    found = memory.recent.held_out(6).batches
    versions = [batch.policy_version for batch in found]
    assert versions == sorted(versions, reverse=True)
    assert versions[0] == 7
    assert sum(b.rollouts for b in found) >= 6
    assert memory.recent.oldest_policy_version() == 0


def test_an_empty_memory_has_nothing_to_give(memory: Memory) -> None:
    assert memory.recent.held_out(8).batches == []
    assert list(memory.recent.train_steps([], passes=3.0, step_tokens=64, seed=0)) == []
    assert memory.recent.oldest_policy_version() is None
