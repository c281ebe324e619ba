"""The bounded memory of recent rollouts: what stays, what is drawn, what a restart finds again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from worker_fixtures import World

from drafter.batch import load_batch, prompt_hashes
from drafter.training.ranks import Ranks
from service.worker.recent import KeptBatch, RecentRollouts, Task, _packed, taken


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
    again.recent.restore(memory.recent.names(), again.spool)
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
    again.recent.restore([*listed, "lost.safetensors"], again.spool)
    assert again.recent.names() == listed
    again.recent.settle()
    assert (memory.files(memory.spool), memory.files(memory.directory)) == ([], ["settled", "unsettled"])


def test_training_draws_every_rollout(memory: Memory) -> None:
    newest = [memory.add(name) for name in "abcdef"][-2:]
    steps = memory.recent.train_steps(newest, passes=40.0, step_tokens=64, seed=0)
    drawn = {rollout for step in steps for batch in step for rollout in batch.rollout_ids}
    assert drawn == {f"{name}/{i}" for name in "abcdef" for i in range(8)}


def test_old_rollouts_are_drawn_alike_however_many_their_version_has(memory: Memory) -> None:
    old = [memory.add(f"v{v}", policy_version=v, rollouts=2 if v == 7 else 60) for v in range(8)]
    newest = [memory.add("new", policy_version=9, rollouts=60)]
    seen: Counter[str] = Counter()
    for step in memory.recent.train_steps(newest, passes=40.0, step_tokens=150, seed=0):
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
    trained = {r for k in newest for r in k.batch.rollout_ids}
    assert len(seen) > 0.9 * len(trained)
    assert max(seen.values()) <= 15


def test_a_small_file_beside_a_large_one_is_trained_on_as_often(memory: Memory) -> None:
    large = memory.add("large", policy_version=1, rollouts=60)
    small = memory.add("small", policy_version=1, rollouts=3)
    seen: Counter[str] = Counter()
    for step in memory.recent.train_steps([large, small], passes=40.0, step_tokens=150, seed=0):
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


def test_an_empty_memory_has_nothing_to_give(memory: Memory) -> None:
    assert memory.recent.prompts == {}
    assert list(memory.recent.train_steps([], passes=3.0, step_tokens=64, seed=0)) == []
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
    whole = list(memory.recent.train_steps(task.newest, passes=6.0, step_tokens=150, seed=3))
    assert len(whole) > 2
    again = Task.of(
        json.loads(json.dumps(task.order())), lambda name, _: next(k for k in (*older, *task.newest) if k.name == name)
    )
    for window, drawn in zip(whole, again.drawn(), strict=True):
        shares = [[i for batch in taken(drawn, Rank(r, world)) for i in batch.rollout_ids] for r in range(world)]
        assert sorted(i for share in shares for i in share) == sorted(i for b in window for i in b.rollout_ids)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
