"""What files of weights are let in: by their numbers alone, without a service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_hooks.wire import HEAD_FORMAT, MappedFile, Tensor, WireError, encode
from service.errors import RunConflict
from service.storage.admission import nearness
from service.storage.admission.nearness import _check_near, _compare, _Head, _same_bytes, check_finite, join_run
from service.storage.admission.sent import draft_ids
from service.storage.layout import Layout


def stored(path: Path, **tensors: Tensor) -> Path:
    path.write_bytes(b"".join(bytes(part) for part in encode(tensors, {"format": "pt"})))
    return path


def f32(values: Any) -> Tensor:
    return Tensor.of(np.asarray(values, dtype=np.float32), "F32")


def bf16(values: Any) -> Tensor:
    return Tensor.of((np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16), "BF16")


def f16(values: Any) -> Tensor:
    return Tensor.of(np.asarray(values, dtype=np.float16), "F16")


BELOW = float(np.nextafter(np.float32(2**20), np.float32(0)))


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (f32, [BELOW, -BELOW], [2.0**20, -(2.0**20), np.inf, -np.inf, np.nan]),
        (bf16, [2.0**19 * 1.984375, -(2.0**19)], [2.0**20, -np.inf, np.nan]),
        (f16, [65504.0, -65504.0], [np.inf, -np.inf, np.nan]),
    ],
)
def test_a_number_that_no_trained_weight_is_near_is_refused_wherever_it_stands(
    make: Any, good: list[float], bad: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearness, "_SCANNED_AT_ONCE", 4)
    ids = Tensor.of(np.array([2**62, -1], dtype=np.int64), "I64")
    check_finite(stored(tmp_path / "good", a=ids, b=make([*good, 0.0] * 3), c=f32([])))
    for value in bad:
        for place in (0, 3, 4, 8):
            values = np.zeros((3, 3))
            values.flat[place] = value
            with pytest.raises(WireError, match="b: holds NaN, infinity"):
                check_finite(stored(tmp_path / "bad", a=make([0.0]), b=make(values)))


@pytest.mark.parametrize(
    ("offsets", "t2d", "ids"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (None, [1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
        ([0, 0, 2], None, [0, 1, 4]),
        ([0, 0, 2], [1, 1, 0, 0, 1], [0, 1, 4]),
        ([0, 0, 2], [1, 0, 1, 0, 1], "t2d: names other tokens than d2t"),
        (None, [1, 1, 1, 1, 0], "t2d: names other tokens"),
        ([], None, "ids that ascend within 5"),
        ([-1, 0], None, "ids that ascend within 5"),
        ([0, 4], None, "ids that ascend within 5"),
        ([1, 0], None, "ids that ascend within 5"),
        ([2, 0], None, "ids that ascend within 5"),
        ([4], None, [4]),
    ],
)
def test_a_draft_vocabulary_names_tokens_of_the_policy_in_their_order(
    offsets: list[int] | None, t2d: list[int] | None, ids: list[int] | str, tmp_path: Path
) -> None:
    tensors = {"other": f32([0.0])}
    if offsets is not None:
        tensors["drafter.d2t"] = Tensor.of(np.array(offsets, dtype=np.int64), "I64")
    if t2d is not None:
        tensors["drafter.t2d"] = Tensor.of(np.array(t2d, dtype=np.bool_), "BOOL")
    file = MappedFile(stored(tmp_path / "drafter", **tensors))
    assert draft_ids(file, 5).tolist() == [0, 1, 2, 3, 4], "of the part that is asked for"
    if isinstance(ids, str):
        with pytest.raises(WireError, match=ids):
            draft_ids(file, 5, "drafter.")
    else:
        assert draft_ids(file, 5, "drafter.").tolist() == ids


def head(path: Path, values: Any, version: int = 0, make: Any = f32) -> _Head:
    return _Head.of(MappedFile(stored(path, lm_head=make(values))), version)


def test_heads_are_compared_by_distance_and_cosine_over_rows_from_first_to_last(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((300, 4)).astype(np.float32)
    one = head(tmp_path / "one", base)
    assert _compare(one, head(tmp_path / "same", base)) == pytest.approx((0.0, 1.0))
    assert _compare(one, head(tmp_path / "half", base / 2)) == pytest.approx((0.5, 1.0))
    assert _compare(head(tmp_path / "half", base / 2), one) == pytest.approx((0.5, 1.0))
    assert _compare(one, head(tmp_path / "against", -base)) == pytest.approx((2.0, -1.0))
    none = head(tmp_path / "none", np.zeros((300, 4)))
    assert [_compare(one, none), _compare(none, none)] == [(1.0, 0.0), (0.0, 0.0)]
    assert _compare(one, head(tmp_path / "bf16", base, make=bf16))[0] < 0.01
    for row, seen in ((0, True), (299, True), (1, True), (6, False)):
        moved = base.copy()
        moved[row] += 1.0
        assert (_compare(one, head(tmp_path / "moved", moved))[0] > 0.0) is seen
    few = base[:3]
    assert _compare(head(tmp_path / "few", few), head(tmp_path / "few2", few)) == pytest.approx((0.0, 1.0))


def test_a_head_is_near_where_it_is_near_one_of_the_run_and_else_the_nearest_is_told(tmp_path: Path) -> None:
    base = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    kept = [head(tmp_path / "r", base, -1), head(tmp_path / "3", base * 4, 3)]
    _check_near("r", head(tmp_path / "new", base * 2), kept)
    _check_near("r", head(tmp_path / "new", base * 8), kept)
    with pytest.raises(
        RunConflict, match=r"lm_head is 0\.58 .*one of its policy version 3 .*at most 0\.5; cosine 1\.00"
    ):
        _check_near("r", head(tmp_path / "new", base * 9.6), kept, ". More")
    with pytest.raises(RunConflict, match=r"is 0\.60 .*the one registered with it .*run=\)\. More"):
        _check_near("r", head(tmp_path / "new", base * 0.4), kept, ". More")
    _check_near("r", head(tmp_path / "new", base * 0.4), kept, farthest=0.7)


BASE = np.random.default_rng(1).standard_normal((20, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("version", "moved", "came_last", "kept", "as_of"),
    [
        (0, 0, 5, False, None),  # a trainer that starts again, or an engine's tap
        (0, 9, 5, True, "registered"),
        (5, 5, 5, False, None),
        (5, 9, 5, True, None),
        (7, 9, 5, True, None),
        (7, 5, 5, False, None),
        (2, 2, 5, True, None),  # it went back, and hides what came since
        (3, 2, 5, True, None),
        (5, 5, 2, True, None),  # after somebody else went back, that head is in force
        (2, 2, 2, False, None),
    ],
)
def test_the_head_of_a_trainer_that_joins_is_kept_where_another_one_is_in_force(
    version: int, moved: int, came_last: int, kept: bool, as_of: str | None, tmp_path: Path
) -> None:
    """The run has its head of version 0, and those of 2 and 5, of which one came last."""
    layout = Layout(tmp_path)
    layout.make_run("r")

    def policy(path: Path, by: int, number: int) -> Path:
        metadata = {"config": "{}", "policy_version": str(number)}
        tensors = {"embed_tokens": f32(BASE * (1 + by / 100))}
        path.write_bytes(b"".join(bytes(part) for part in encode(tensors, metadata)))
        return path

    policy(layout.target("r"), 0, 0)
    for number in (2, 5):
        path = stored(layout.head("r", number), lm_head=f32(BASE * (1 + number / 100)))
        came = 2_000_000_000 if number == came_last else 1_000_000_000
        os.utime(path, ns=(came, came))
    joined = join_run(layout, "r", MappedFile(layout.target("r")), policy(tmp_path / "offered", moved, version))
    assert joined.warning is None
    assert (joined.new_head is not None) is kept
    if joined.new_head is not None:
        assert joined.as_of_ns == (None if as_of is None else layout.target("r").stat().st_mtime_ns)
        (tmp_path / "head").write_bytes(b"".join(bytes(part) for part in joined.new_head))
        made = MappedFile(tmp_path / "head")
        assert made.header.metadata == {"format": HEAD_FORMAT, "policy_version": str(version)}
        assert np.array_equal(made.array("lm_head"), (BASE * (1 + moved / 100)).astype(np.float32))


def test_large_weights_are_compared_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearness, "_SCANNED_AT_ONCE", 8)
    one = np.arange(5, dtype=np.float32)
    assert _same_bytes(one, one.copy())
    for place in range(5):
        other = one.copy()
        other[place] += 1
        assert not _same_bytes(one, other)
