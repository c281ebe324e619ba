"""What a rollout file may be, at its edges; and the corpus of hostile files without a server: each refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from attacks.corpus import MAKERS
from helpers.service.service_fixtures import FINGERPRINT, LAYERS, VOCAB, i32, rollout_file

from rl_hooks import wire
from rl_hooks.format.container import MAX_HEADER_BYTES, MappedFile, Tensor, WireError, encode, parse_header

#: Attacks that the file alone does not show: it is another's than the run's, or not as long as was announced.
ELSEWHERE: Final = {
    "a_longer_announcement_than_the_file_describes",
    "another_hidden_size_than_the_run",
    "another_targets_fingerprint",
    "other_aux_layers_than_the_run",
}


def read(body: bytes, path: Path) -> wire.RolloutHeader:
    """Verify all that a file says of itself, as API and worker do together."""
    path.write_bytes(body)
    mapped = MappedFile(path)
    header = wire.check_rollout_header(mapped.header)
    arrays = [mapped.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask")]
    optional = [mapped.array(name) if name in mapped else None for name in wire.OPTIONAL_TENSORS]
    wire.check_index(header, arrays[0], arrays[1], arrays[2], VOCAB, *optional)
    return header


def test_each_hostile_file_is_refused_where_it_is_read(tmp_path: Path) -> None:
    refused, passed = dict[str, WireError](), set[str]()
    of_files = {name: made for name, make in MAKERS.items() if (made := make()).path == "/rollouts" and made.body}
    for name, attack in of_files.items():
        if attack.method != "POST" or attack.status != 422:
            continue
        try:
            read(attack.body, tmp_path / "file")
            passed.add(name)
        except WireError as error:
            refused[name] = error
    assert passed == ELSEWHERE
    assert len(refused) > 85
    for name, fault in refused.items():
        assert of_files[name].names in f"{fault} {fault.field}" or fault.field in ("file", "header"), name
        assert len(str(fault)) < 600, name


LARGEST: Final = "9" * 15


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("policy_version", ["0", "3"], ["", "-1", "+1", "1.0", "\u0663", " 1"]),
        ("policy_version_max", ["3", LARGEST], ["2", LARGEST + "9", "0" * 16]),
        ("temperature", ["0", "0.7", "100", "1e2"], ["-0.1", "100.1", "nan", "inf", "x", ""]),
        ("top_p", ["0", "1.0"], ["1.01", "-0.1", "nan"]),
        ("top_k", ["0", "50"], ["-1", "0.5"]),
        (
            "rollout_ids",
            ['["' + "x" * 128 + '", "\u00e9"]'],
            ["[]", '["a", ""]', '["a", "a"]', '["a", "b\\n"]', '["a", 1]'],
        ),
        ("rollout_ids", ['["1", "2"]'], ['["a", "' + "x" * 129 + '"]', '{"a": 1}', "[", '"ab"']),
        ("rewards", ["[0, -1.5]", "[9e299, -9e299]"], ["[0]", "[0, 1, 2]", "[0, 1e300]", "[0, -1e300]", "[0, true]"]),
        ("rewards", [], ["[0, null]", '[0, "1"]', "[0, NaN]", "[0, Infinity]"]),
        ("prompt_hashes", [json.dumps(["0123456789abcdef", "f" * 16])], [json.dumps(["0" * 15, "0" * 16])]),
        ("prompt_hashes", [], [json.dumps(["0" * 17, "0" * 16]), json.dumps(["A" * 16, "0" * 16]), "[0, 1]"]),
        ("strata", ['["", "code"]', json.dumps(["x" * 64, "y"])], [json.dumps(["x" * 65, "y"]), '["a\\n", "b"]']),
        ("offered", ["[0, 0]", f"[2, {2**53 - 1}]"], ["[1]", "[1, 2, 3]", "[-1, 2]", "[1.0, 2]", f"[1, {2**53}]"]),
        (
            "aux_layers",
            [],
            ['{"convention": "leaving", "layers": [1, 2, 3]}', '{"convention": "entering"}', "[1, 2, 3]"],
        ),
        *(
            ("aux_layers", [], [json.dumps({"convention": "entering", "layers": layers})])
            for layers in ([], [1, 1, 2], [2, 1, 3], [-1, 0, 1], [True, 2, 3], "123")
        ),
        ("format", list(wire.FORMATS.values())[:1], ["draftalign.rollouts.v3", ""]),
        ("run", ["x"], [""]),
        ("target_fingerprint", ["x"], [""]),
    ],
)
def test_a_field_is_taken_up_to_its_edges_and_refused_by_its_name_beyond(
    key: str, good: list[str], bad: list[str], tmp_path: Path
) -> None:
    for value in good:
        read(rollout_file(raw_metadata={key: value}), tmp_path / "file")
    for value in bad:
        with pytest.raises(WireError) as refused:
            read(rollout_file(raw_metadata={key: value}), tmp_path / "file")
        assert refused.value.field == ("policy_version_max" if (key, value) == ("policy_version_max", "2") else key), (
            value
        )
        assert len(str(refused.value)) < 300


def test_what_a_header_says_is_what_was_sent(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "policy_version_max": 4,
        "drafter_version": "v1",
        "rewards": (1, 0.5),
        "prompt_hashes": ("0" * 16, "f" * 16),
        "strata": ("code", ""),
        "offered": (8, 99),
    }
    session = {"session": "a" * 32, "session_began": "2"}
    header = read(rollout_file(("b", "a"), raw_metadata=session, policy_version=3, **facts), tmp_path / "file")
    assert {name: getattr(header, name) for name in facts} == facts
    assert (header.run, header.policy_version, header.rollout_ids) == ("default", 3, ("b", "a"))
    assert (header.session, header.session_began, header.last_rows) == ("a" * 32, 2, "all")
    assert (header.tokens, header.rollouts, header.aux_layers) == (11, 2, tuple(LAYERS))
    assert header.target_fingerprint == FINGERPRINT
    assert header.states_bytes == 11 * header.hidden_size * len(LAYERS) * 2
    assert header.batch_id == wire.batch_id("default", 3, ("a", "b")), "in whatever order they come"
    assert len({header.batch_id, wire.batch_id("x", 3, "ab"), wire.batch_id("default", 4, "ab")}) == 3
    bare = read(rollout_file(), tmp_path / "file")
    assert (bare.temperature, bare.top_p, bare.top_k, bare.drafter_version) == (1.0, 1.0, 0, "")
    assert (bare.rewards, bare.prompt_hashes, bare.strata, bare.offered) == (None, None, None, None)
    assert (bare.session, bare.session_began, bare.policy_version_max) == ("", 0, 3)
    some = read(rollout_file(last_rows="predicting"), tmp_path / "file")
    assert (some.last_rows, some.header.tensors["last_hidden"].shape[0]) == ("predicting", 9)
    for wrong in ({"session": "a" * 31}, {"session": "A" * 32}, {"session": "a" * 32}):
        with pytest.raises(WireError, match="session"):
            read(rollout_file(raw_metadata=wrong), tmp_path / "file")


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"input_ids": i32(*[0] * 10, VOCAB - 1)}, None),
        ({"input_ids": i32(*[0] * 10, VOCAB)}, "input_ids"),
        ({"input_ids": i32(*[0] * 10, -1)}, "input_ids"),
        ({"cu_seqlens": i32(0, 9, 11)}, None),  # a rollout of two tokens
        ({"cu_seqlens": i32(0, 10, 11)}, "cu_seqlens"),
        ({"cu_seqlens": i32(1, 6, 11)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 6, 10)}, "cu_seqlens"),
        ({"cu_seqlens": i32(0, 11)}, "cu_seqlens"),
        ({"aux_rows": i32(*range(11))}, None),
        ({"aux_rows": i32(*range(10), 9)}, "aux_rows"),
        ({"aux_rows": i32(*range(1, 11), 1)}, "aux_rows"),
        ({"aux_rows": i32(*range(10), 11)}, "aux_rows"),
        ({"aux_rows": i32(*range(10))}, "aux_rows"),
        ({"versions_behind": i32(0, *[0] * 5, 0, 3, 2, 3, 0)}, None),  # policy version 3; it rises and falls
        ({"versions_behind": i32(*[0] * 10, 4)}, "versions_behind"),
        ({"versions_behind": i32(*[0] * 10, -1)}, "versions_behind"),
        ({"versions_behind": i32(1, *[0] * 10)}, "versions_behind"),  # of a prompt's token
        ({"versions_behind": i32(*[0] * 10)}, "versions_behind"),
        ({"versions_behind": Tensor.of(np.zeros(11, np.float32), "F32")}, "versions_behind"),
        ({"logsumexp": None}, None),
        ({"aux_hidden": Tensor.of(np.zeros((11, 0), np.uint16), "BF16")}, "aux_hidden"),
        ({"aux_hidden": Tensor.of(np.zeros((11, 25), np.uint16), "BF16")}, "aux_hidden"),
    ],
)
def test_tensors_are_taken_up_to_their_edges(
    tensors: dict[str, Tensor | None], field: str | None, tmp_path: Path
) -> None:
    mask = np.ones(11, np.uint8)
    bounds = tensors.get("cu_seqlens") or i32(0, 6, 11)
    firsts = [n for n in np.frombuffer(bounds.data, np.int32)[:-1] if n < 11]
    mask[firsts] = 0
    body = rollout_file(tensors={"loss_mask": Tensor.of(mask, "U8")} | tensors)
    if field is None:
        read(body, tmp_path / "file")
        return
    with pytest.raises(WireError) as refused:
        read(body, tmp_path / "file")
    assert refused.value.field == field


# --- the container


def file_of(table: object, data: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def at(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"a": at(0, 3, [3]), "b": at(3, 3, [0]), "c": at(3, 7, [1], "F32")}, None),
        ({"a": at(0, 6, [1, 2, 3, 1])}, None),
        ({"a": at(0, 1, [])}, None),
        ({"__metadata__": {"x": "y"}}, None),
        ({"a": at(0, 6, [1, 2, 3, 1, 1])}, "a: shape must be at most four"),
        ({"a": at(0, 3, [4])}, "a: U8 .4. takes 4 bytes"),
        ({"a": at(0, 3, [3]), "b": at(2, 5, [3])}, "b: overlaps the tensor before it: it begins at 2, expected 3"),
        ({"a": at(0, 3, [3]), "b": at(4, 5, [1])}, "b: leaves a gap before it"),
        ({"a": at(1, 2, [1])}, "a: leaves a gap"),
        ({"a": at(3, 0, [3])}, "a: data_offsets must be two ascending"),
        ({"a": {**at(0, 1, [1]), "data_offsets": [0, 1, 2]}}, "a: data_offsets must be two"),
        ({"a": {**at(0, 1, [1]), "more": 1}}, "a: must have exactly"),
        ({"a": at(0, 1, [True])}, "a: shape must be"),
        ({"a": at(0, 1, [1], "F64")}, "a: dtype 'F64' is not one of"),
        ({"a": 7}, "a: must have exactly"),
        ({"__metadata__": {"x": 1}}, "__metadata__: must map"),
        ({"__metadata__": []}, "__metadata__: must map"),
        ([], "header: must be a JSON object, got list"),
    ],
)
def test_a_header_is_a_table_of_tensors_one_after_the_other(table: object, fault: str | None) -> None:
    if fault is None:
        found = parse_header(file_of(table))
        assert isinstance(table, dict)
        assert found.file_bytes == len(file_of(table)) + max((info.end for info in found.tensors.values()), default=0)
        assert found.metadata == table.get("__metadata__", {})
        return
    with pytest.raises(WireError, match=fault):
        parse_header(file_of(table))


def test_a_header_has_two_bytes_to_a_mebibyte_with_its_length_and_no_more_than_came() -> None:
    limit = MAX_HEADER_BYTES - 8
    assert [wire.header_size(struct.pack("<Q", size)) for size in (2, limit)] == [10, MAX_HEADER_BYTES]
    for prefix in (struct.pack("<Q", 1), struct.pack("<Q", limit + 1), b"\0" * 7):
        with pytest.raises(WireError, match="header: "):
            wire.header_size(prefix)
    whole = file_of({})
    assert parse_header(whole + b"more").header_bytes == len(whole)
    with pytest.raises(WireError, match="only 9 came"):
        parse_header(whole[:-1])
    for text in (b'{"a": 1, "a": 2}', b"{ ", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000):
        with pytest.raises(WireError, match=r"header: (a name appears twice|is not JSON)"):
            parse_header(struct.pack("<Q", len(text)) + text)


def test_a_file_is_laid_out_aligned_and_read_back_as_it_was(tmp_path: Path) -> None:
    arrays: dict[str, tuple[np.ndarray[Any, Any], str]] = {
        "bytes": (np.arange(3, dtype=np.uint8), "U8"),
        "wide": (np.arange(6, dtype=np.int64).reshape(2, 3), "I64"),
        "half": (np.arange(5, dtype=np.uint16)[::2], "BF16"),
        "none": (np.zeros((0, 4), np.float32), "F32"),
    }
    parts = encode({name: Tensor.of(array, dtype) for name, (array, dtype) in arrays.items()}, {"k": "v"})
    (tmp_path / "file").write_bytes(b"".join(parts))
    assert wire.parts_bytes(parts) == (tmp_path / "file").stat().st_size
    mapped = MappedFile(tmp_path / "file")
    assert mapped.header.header_bytes % 8 == 0
    for name, (array, dtype) in arrays.items():
        info = mapped.header.tensors[name]
        assert (info.dtype, info.begin % array.itemsize) == (dtype, 0)
        np.testing.assert_array_equal(mapped.array(name), array)
        assert not mapped.array(name).flags.writeable
    assert "wide" in mapped
    assert "other" not in mapped
    with pytest.raises(WireError, match="BF16 is carried by NumPy uint16, got float32"):
        Tensor.of(np.zeros(1, np.float32), "BF16")
    body = (tmp_path / "file").read_bytes()
    for wrong, fault in (
        (body + b"x", "its header describes"),
        (body[:-1], "its header describes"),
        (b"1234567", "at least 8"),
    ):
        (tmp_path / "file").write_bytes(wrong)
        with pytest.raises(WireError, match=f"file: file is .*{fault}"):
            MappedFile(tmp_path / "file")


# --- what is told of logits


def test_a_map_of_logits_is_read_as_it_was_written_and_refused_beyond_a_million() -> None:
    for scale, softcap in ((1.0, None), (0.5, None), (1.0, 30.0), (1e6, 1e-6)):
        logit_map = wire.LogitMap(scale, softcap)
        assert wire.LogitMap.from_metadata(logit_map.metadata()) == logit_map
    assert wire.LogitMap().metadata() == {}
    for key in ("logit_scale", "logit_softcap"):
        for wrong in ("0", "-1", "1.1e6", "nan", "x", ""):
            with pytest.raises(WireError, match=f"{key}: "):
                wire.LogitMap.from_metadata({key: wrong})
    for scale, softcap in ((0.0, None), (1.0, 2e6), (9e-7, None)):
        with pytest.raises(WireError, match="must be a positive number"):
            wire.LogitMap(scale, softcap)
