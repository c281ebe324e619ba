"""The worker's view of the target: which head and which embedding hold at a policy version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.worker.worker_fixtures import CONFIG, HIDDEN, LAYERS, VOCAB, Bench, World, joined

from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.errors import RunDamaged
from service.worker.inbox import is_batch_fault
from service.worker.target import Target, read_tensor


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url) as made:
        made.register()
        yield made


def put(bench: Bench, version: int, lm_head: torch.Tensor, ids: list[int] | None = None) -> None:
    tensors = {"lm_head": as_wire(lm_head)}
    if ids is not None:  # as an older service took them
        tensors["ids"] = wire.Tensor.of(np.array(ids, np.int32), "I32")
    meta = {"format": wire.HEAD_FORMAT, "policy_version": str(version)}
    bench.layout.head("default", version).write_bytes(joined(wire.encode(tensors, meta)))


def head(value: float, rows: int = VOCAB) -> torch.Tensor:
    return torch.full((rows, HIDDEN), value)


def in_force(target: Target, version: int) -> float:
    return float(target.at(version).needed_head().lm_head[0, 0])


def test_it_reads_what_was_registered(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    assert target.config == CONFIG
    assert target.aux_layers == LAYERS
    assert not target.tied
    assert target.initial_drafter is None
    assert torch.equal(target.embed_tokens, bench.world.embed)
    assert torch.equal(target.at(0).needed_head().lm_head, bench.world.heads[0])


def test_a_target_that_is_damaged_while_the_run_is_open_is_no_batchs_fault(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    path = bench.layout.target("default")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(RunDamaged, match=r"target\.safetensors of run 'default' is damaged") as raised:
        target.at(0)
    assert not is_batch_fault(raised.value)


def test_the_newest_head_not_newer_than_asked_is_used_also_when_it_comes_later(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    registered = in_force(target, 9)
    put(bench, 4, head(4.0))
    put(bench, 8, head(8.0))
    assert [in_force(target, v) for v in (3, 4, 7, 8, 9)] == [registered, 4.0, 4.0, 8.0, 8.0]
    put(bench, 6, head(6.0))
    assert in_force(target, 7) == 6.0


def test_an_old_policys_head_is_found_after_many_newer_ones(bench: Bench) -> None:
    """More than are cached."""
    target = Target.open(bench.layout, "default")
    for version in range(1, 13):
        put(bench, version, head(float(version)))
        assert in_force(target, version) == version
    assert in_force(target, 1) == 1.0
    assert in_force(target, 0) == float(bench.world.heads[0][0, 0])
    assert in_force(target, 12) == 12.0


def test_a_useless_head_is_passed_over_and_named_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    target = Target.open(bench.layout, "default")
    put(bench, 1, head(1.0))
    put(bench, 2, head(float("nan")))
    put(bench, 3, head(3.0))
    path = bench.layout.head("default", 3)
    path.write_bytes(path.read_bytes()[:-8])
    assert in_force(target, 3) == 1.0
    assert in_force(target, 3) == 1.0
    assert caplog.text.count("the head of policy version 2 is not used: lm_head holds NaN") == 1
    assert caplog.text.count("the head of policy version 3 is not used: file") == 1


def test_a_tied_embedding_follows_the_head(tmp_path: Path, redis_url: str) -> None:
    world = World(tied=True)
    with Bench(tmp_path / "tied", redis_url, world) as bench:
        bench.register()
        target = Target.open(bench.layout, "default")
        assert target.tied
        assert torch.equal(target.at(0).needed_head().lm_head, world.embed)
        put(bench, 1, head(1.0))
        assert torch.equal(target.at(1).embed_tokens, head(1.0))


def test_an_untied_embedding_does_not_follow_the_head_and_is_held_once(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    put(bench, 1, head(1.0))
    put(bench, 2, head(2.0))
    assert torch.equal(target.at(1).embed_tokens, bench.world.embed)
    assert target.at(1).embed_tokens is target.at(2).embed_tokens


def test_forgetting_keeps_the_head_that_the_oldest_batch_needs(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    for version in (1, 3, 5, 7):
        put(bench, version, head(float(version)))
    target.received.forget_before(6, newest=7)
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [5, 7]
    assert in_force(target, 6) == 5.0
    target.received.forget_before(0, newest=7)
    target.received.forget_before(-5, newest=7)
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [5, 7]


def test_a_head_sent_again_takes_the_place_of_the_one_before(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    put(bench, 4, head(4.0))
    assert in_force(target, 5) == 4.0
    later = bench.layout.head("default", 4).stat().st_mtime_ns + 1
    put(bench, 4, head(40.0))
    os.utime(bench.layout.head("default", 4), ns=(later, later))
    assert in_force(target, 5) == 40.0


def test_forgetting_keeps_what_came_after_the_newest_batchs_head(bench: Bench) -> None:
    """A trainer went back from version 500 to 100, has sent that head, and its batches wait behind the last of 500."""
    target = Target.open(bench.layout, "default")
    for order, version in enumerate((440, 499, 500, 100, 101)):
        put(bench, version, head(float(version)))
        os.utime(bench.layout.head("default", version), ns=(10**9 * (order + 1),) * 2)
    target.received.forget_before(480, newest=500)
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [100, 101, 440, 499, 500]
    target.received.forget_before(500, newest=500)
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [100, 101, 500]


def put_in_turn(bench: Bench, *versions: int) -> None:
    for order, version in enumerate(versions):
        put(bench, version, head(float(version)))
        os.utime(bench.layout.head("default", version), ns=(10**9 * (order + 1),) * 2)


def test_a_head_gives_way_to_a_later_one_of_a_lower_version(bench: Bench) -> None:
    """The trainer went back to 3 from an attempt that had sent heads for 5 and 6."""
    target = Target.open(bench.layout, "default")
    put_in_turn(bench, 1, 5, 6, 3, 8)
    assert [in_force(target, v) for v in (1, 2, 3, 4, 5, 6, 7, 8)] == [1, 1, 3, 3, 3, 3, 3, 8]


def test_a_batch_of_before_keeps_the_head_of_its_time_and_a_head_may_come_after_its_batch(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    put_in_turn(bench, 1, 5, 6, 3, 8)

    batch = bench.layout.root / "batch"
    batch.touch()

    def then(version: int, seconds: float) -> float:
        os.utime(batch, (seconds, seconds))
        found = target.at(version, batch=batch)
        return float(found.needed_head().lm_head[0, 0])

    assert [then(v, 3.5) for v in (4, 5, 6, 7, 8)] == [3, 5, 6, 6, 8]
    assert [then(v, 4.5) for v in (3, 5, 6, 7, 8)] == [3, 3, 3, 3, 8]
    assert [then(v, 2.5) for v in (5, 6)] == [5, 6]


def test_a_later_head_that_cannot_be_used_hides_none(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    put(bench, 5, head(5.0))
    os.utime(bench.layout.head("default", 5), ns=(10**9,) * 2)
    put(bench, 3, head(float("nan")))
    assert in_force(target, 6) == 5.0


def test_forgetting_keeps_the_head_that_hides_the_abandoned_ones(bench: Bench) -> None:
    target = Target.open(bench.layout, "default")
    put_in_turn(bench, 1, 5, 3, 8)
    target.received.forget_before(6, newest=8)
    assert [in_force(target, v) for v in (6, 7, 8)] == [3, 3, 8]
    assert not bench.layout.head("default", 1).exists()


def test_strangers_among_the_heads_are_ignored(bench: Bench) -> None:
    (bench.layout.heads("default") / "notes.txt").write_text("not a head")
    (bench.layout.heads("default") / "v1.safetensors").write_text("not a version")
    assert in_force(Target.open(bench.layout, "default"), 5) == float(bench.world.heads[0][0, 0])


@pytest.mark.parametrize("spoil", ["gone", "torn", "config"])
def test_a_run_whose_file_is_damaged_says_what_to_do(bench: Bench, spoil: str) -> None:
    path = bench.layout.target("default")
    if spoil == "gone":
        path.unlink()
    elif spoil == "torn":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(bench.world.run_file(metadata={"config": "not JSON"}))
    with pytest.raises(RunDamaged, match=r"target\.safetensors of run 'default' is damaged: .*put a copy of it back"):
        Target.open(bench.layout, "default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_every_float_type_are_read_as_they_were_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    path = tmp_path / "t.safetensors"
    path.write_bytes(joined(wire.encode({"x": as_wire(values)} if dtype != torch.float16 else {
        "x": wire.Tensor.of(values.numpy(), "F16")}, {})))  # fmt: skip
    read = read_tensor(wire.MappedFile(path), "x")
    assert read.dtype == dtype
    assert torch.equal(read, values)


def test_heads_wait_on_the_host_and_embeddings_on_the_device_in_the_type_they_were_sent_in(
    tmp_path: Path, redis_url: str
) -> None:
    world = World(tied=True)
    with Bench(tmp_path / "state", redis_url, world) as bench:
        bench.register()
        for version in range(1, 12):
            put(bench, version, head(float(version)).bfloat16())
        target = Target.open(bench.layout, "default", "meta")
        heads = [target.at(version) for version in range(1, 12)]
        assert {h.embed_tokens.device.type for h in heads} == {target.embed_tokens.device.type} == {"meta"}
        assert {h.needed_head().lm_head.device.type for h in heads} == {target.lm_head().device.type} == {"cpu"}
        assert {h.needed_head().lm_head.dtype for h in heads} == {torch.bfloat16}
        assert target.at(11).head is heads[-1].head
        assert len(target._policies) == 8


@pytest.mark.parametrize(("named", "wanted"), [(3, [3]), ([7, 3], [3, 7]), ([3, 99, "x"], [3]), (None, [])])
def test_tokens_that_end_a_response_are_always_worth_drafting(named: object, wanted: list[int]) -> None:
    target = Target.__new__(Target)
    target.config, target.embed_tokens = {"eos_token_id": named}, torch.zeros(10, 2)
    assert target.ending_tokens == wanted
