"""Files whose safetensors header lies: its size, its JSON, the table of its tensors."""

from __future__ import annotations

import struct
from typing import Any

from helpers.service.service_fixtures import rollout_file

from attacks.making import Attack, attack, edited, with_header


@attack
def an_empty_body() -> Attack:
    return Attack(422, "header", b"")


@attack
def a_body_shorter_than_a_length_word() -> Attack:
    return Attack(422, "header", b"\x05\x00\x00")


@attack
def a_header_of_two_to_the_64th_bytes() -> Attack:
    return Attack(422, "length word", b"\xff" * 8 + b"{}")


@attack
def a_header_larger_than_the_limit() -> Attack:
    return Attack(422, "length word", with_header(b'{"__metadata__":{"x":"' + b"a" * (1 << 20) + b'"}}'))


@attack
def a_header_longer_than_the_file() -> Attack:
    return Attack(422, "the whole body has", struct.pack("<Q", 5000) + b"{}")


@attack
def a_header_of_no_bytes() -> Attack:
    return Attack(422, "length word", struct.pack("<Q", 0))


@attack
def a_header_that_is_not_json() -> Attack:
    return Attack(422, "is not JSON", with_header(b"{{{{{{{{"))


@attack
def a_header_that_is_not_utf8() -> Attack:
    return Attack(422, "is not JSON", with_header(b'{"\xff\xfe": 1}'))


@attack
def a_header_nested_100000_deep() -> Attack:
    return Attack(422, "is not JSON", with_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000))


@attack
def a_header_that_is_a_list() -> Attack:
    return Attack(422, "JSON object", with_header(b"[[1,2],[3,4]]"))


@attack
def an_integer_of_5000_digits() -> Attack:
    return Attack(422, "is not JSON", with_header(b'{"a": ' + b"9" * 5000 + b"}"))


@attack
def a_tensor_named_twice() -> Attack:
    entry = b'"input_ids":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}'
    return Attack(422, "appears twice", with_header(b"{" + entry + b"," + entry + b"}", b"1234"))


@attack
def metadata_that_is_not_text() -> Attack:
    return Attack(422, "__metadata__", edited(lambda t: t["__metadata__"].update(policy_version=3)))


@attack
def metadata_that_is_a_list() -> Attack:
    return Attack(422, "__metadata__", edited(lambda t: t.update(__metadata__=["run"])))


@attack
def a_dtype_that_does_not_exist() -> Attack:
    return Attack(422, "F4096", edited(lambda t: t["logprobs"].update(dtype="F4096")))


@attack
def a_dtype_that_is_a_list() -> Attack:
    return Attack(422, "logprobs", edited(lambda t: t["logprobs"].update(dtype=["F32"])))


@attack
def a_negative_shape() -> Attack:
    return Attack(422, "non-negative", edited(lambda t: t["input_ids"].update(shape=[-11])))


@attack
def a_shape_whose_product_overflows() -> Attack:
    return Attack(422, "aux_hidden", edited(lambda t: t["aux_hidden"].update(shape=[1 << 52, 1 << 52, 1 << 52])))


@attack
def a_shape_with_a_fraction() -> Attack:
    return Attack(422, "input_ids", edited(lambda t: t["input_ids"].update(shape=[11.0])))


@attack
def a_shape_of_nan() -> Attack:
    return Attack(422, "input_ids", edited(lambda t: t["input_ids"].update(shape=[float("nan")])))


@attack
def a_shape_of_booleans() -> Attack:
    return Attack(422, "input_ids", edited(lambda t: t["input_ids"].update(shape=[True])))


@attack
def a_shape_of_a_thousand_dimensions() -> Attack:
    return Attack(422, "input_ids", edited(lambda t: t["input_ids"].update(shape=[1] * 1000)))


@attack
def tensors_that_overlap() -> Attack:
    def change(table: dict[str, Any]) -> None:
        table["logsumexp"]["data_offsets"] = table["logprobs"]["data_offsets"]

    return Attack(422, "overlaps", edited(change))


@attack
def a_gap_between_tensors() -> Attack:
    def change(table: dict[str, Any]) -> None:
        begin, end = table["loss_mask"]["data_offsets"]
        table["loss_mask"]["data_offsets"] = [begin + 7, end + 7]

    return Attack(422, "gap", edited(change))


@attack
def offsets_that_run_backwards() -> Attack:
    def change(table: dict[str, Any]) -> None:
        table["loss_mask"]["data_offsets"].reverse()

    return Attack(422, "data_offsets", edited(change))


@attack
def offsets_beyond_the_file() -> Attack:
    def change(table: dict[str, Any]) -> None:
        table["loss_mask"]["shape"] = [1 << 40]
        begin = table["loss_mask"]["data_offsets"][0]
        table["loss_mask"]["data_offsets"] = [begin, begin + (1 << 40)]

    return Attack(422, "describes a file of", edited(change))


@attack
def bytes_after_the_last_tensor() -> Attack:
    return Attack(422, "Content-Length says", rollout_file() + b"MZ\x90\x00")
