"""The corpus. An attack is a file that lies, a request that lies, or a name that leads elsewhere.

To add one: write a function that returns an `Attack`, decorated with `@attack`. tests/service/api/test_attacks.py
does the rest.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from service_fixtures import LAYERS, VOCAB, i32, rollout_file, rollout_metadata, rollout_tensors

from rl_hooks import wire


@dataclass(frozen=True)
class Attack:
    """One hostile request. `status` must come, with `names` in its detail or field."""

    status: int
    names: str
    body: bytes = b""
    method: str = "POST"
    path: str = "/rollouts"
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Content-Length to announce; None: the body's own; -1: none at all.
    announced: int | None = None


MAKERS: Final[dict[str, Callable[[], Attack]]] = {}


def attack(make: Callable[[], Attack]) -> Callable[[], Attack]:
    """Add a maker to the corpus."""
    MAKERS[make.__name__] = make
    return make


def with_header(text: bytes, data: bytes = b"") -> bytes:
    """A file whose header is exactly `text`."""
    return struct.pack("<Q", len(text)) + text + data


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A valid file whose header was edited afterwards."""
    body = rollout_file()
    size = wire.header_size(body[:8])
    table = json.loads(body[8:size])
    change(table)
    return with_header(json.dumps(table).encode(), body[size:])


def metadata(**changes: str) -> bytes:
    """A valid file but for some metadata."""
    return rollout_file(raw_metadata=changes)


def without(key: str) -> bytes:
    """A valid file but for one missing metadata key."""
    return edited(lambda table: table["__metadata__"].pop(key))


def tensor(**changes: wire.Tensor | None) -> bytes:
    """A valid file but for some tensors (None: left out)."""
    return rollout_file(tensors=changes)


# --- the header's own size -------------------------------------------------------------------------------------------


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


# --- the header's JSON -----------------------------------------------------------------------------------------------


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


# --- the table of tensors --------------------------------------------------------------------------------------------


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


@attack
def an_unknown_extra_tensor() -> Attack:
    return Attack(422, "payload", tensor(payload=i32(1, 2, 3)))


def top_entries(**others: wire.Tensor | None) -> bytes:
    """A file with the top entries of each row, which the format does not have."""
    return tensor(
        top_ids=wire.Tensor.of(np.zeros((11, 2), np.int32), "I32"),
        top_logprobs=wire.Tensor.of(np.full((11, 2), -1, np.float16), "F16"),
        **others,
    )


@attack
def top_entries_beside_hidden_states() -> Attack:
    return Attack(422, "top_ids: is not a tensor of this format", top_entries())


@attack
def top_entries_instead_of_hidden_states() -> Attack:
    return Attack(422, "last_hidden: is missing", top_entries(last_hidden=None, logsumexp=None))


@attack
def a_missing_tensor() -> Attack:
    return Attack(422, "logprobs", tensor(logprobs=None))


@attack
def no_targets_at_all() -> Attack:
    return Attack(422, "last_hidden", tensor(last_hidden=None, logsumexp=None))


@attack
def a_wrong_dtype() -> Attack:
    return Attack(422, "input_ids", tensor(input_ids=wire.Tensor.of(np.zeros(11, np.int64), "I64")))


@attack
def features_in_half_precision() -> Attack:
    return Attack(422, "aux_hidden", tensor(aux_hidden=wire.Tensor.of(np.zeros((11, 24), np.float16), "F16")))


@attack
def fp8_without_its_scale() -> Attack:
    features = wire.Tensor.of(np.zeros((11, 24), np.uint8), "F8_E4M3")
    return Attack(422, "aux_hidden_scale", tensor(aux_hidden=features))


@attack
def one_row_of_features_too_few() -> Attack:
    return Attack(422, "aux_hidden", tensor(aux_hidden=wire.Tensor.of(np.zeros((10, 24), np.uint16), "BF16")))


# --- files in which tokens share rows of the auxiliary states --------------------------------------------------------


def sharing(rows: list[int], held: int = 9, **others: wire.Tensor | None) -> bytes:
    """A file of 11 tokens that have these of `held` rows."""
    aux = wire.Tensor.of(np.zeros((held, 24), np.uint16), "BF16")
    return tensor(**{"aux_hidden": aux, "aux_rows": wire.Tensor.of(np.array(rows, np.int32), "I32"), **others})


@attack
def rows_beyond_those_that_are_there() -> Attack:
    return Attack(422, "must name each of the 9 rows", sharing([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))


@attack
def rows_of_a_negative_number() -> Attack:
    return Attack(422, "must name each of the 9 rows", sharing([0, 1, 2, 3, 4, 5, 6, 7, 8, -1, 0]))


@attack
def rows_up_to_the_largest_number() -> Attack:
    return Attack(422, "must name each of the 9 rows", sharing([0, 1, 2, 3, 4, 5, 6, 7, 8, 2**31 - 1, 0]))


@attack
def a_row_that_no_token_has() -> Attack:
    return Attack(422, "must name each of the 9 rows", sharing([0, 1, 2, 3, 4, 5, 6, 7, 7, 0, 0]))


@attack
def many_more_rows_than_tokens() -> Attack:
    return Attack(422, "must name each of the 5000 rows", sharing(list(range(11)), 5000))


@attack
def rows_for_other_tokens() -> Attack:
    return Attack(422, "aux_rows", sharing(list(range(9))))


@attack
def rows_as_fractions() -> Attack:
    return Attack(422, "aux_rows", sharing([], aux_rows=wire.Tensor.of(np.zeros(11, np.float32), "F32")))


@attack
def scales_of_every_token_where_rows_are_shared() -> Attack:
    codes = wire.Tensor.of(np.zeros((9, 24), np.uint8), "F8_E4M3")
    scale = wire.Tensor.of(np.ones((11, 3), np.float32), "F32")
    return Attack(
        422, "aux_hidden_scale", sharing([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1], aux_hidden=codes, aux_hidden_scale=scale)
    )


@attack
def fewer_features_than_tokens_without_their_rows() -> Attack:
    return Attack(422, "aux_hidden", sharing([], aux_rows=None))


# --- files that leave out the last states of prompts --------------------------------------------------------------


def fewer(rows: int = 9, *, normalisers: int | None = None, **others: wire.Tensor | None) -> bytes:
    """A file with so many rows of `last_hidden`, and `normalisers` of its normalisers; its mask asks for 9."""
    last = wire.Tensor.of(np.zeros((rows, 8), np.uint16), "BF16")
    lse = wire.Tensor.of(np.zeros(rows if normalisers is None else normalisers, np.float32), "F32")
    return rollout_file(tensors={"last_hidden": last, "logsumexp": lse, **others}, last_rows="predicting")


@attack
def all_rows_where_some_are_claimed() -> Attack:
    return Attack(422, "has 11 rows, and loss_mask 9 tokens", fewer(11))


@attack
def a_last_state_too_few() -> Attack:
    return Attack(422, "has 8 rows, and loss_mask 9 tokens", fewer(8))


@attack
def no_last_state_at_all() -> Attack:
    return Attack(422, "has 0 rows, and loss_mask 9 tokens", fewer(0))


@attack
def many_more_last_states_than_tokens() -> Attack:
    return Attack(422, "has 5000 rows, and loss_mask 9 tokens", fewer(5000))


@attack
def last_states_of_a_negative_number() -> Attack:
    body = fewer()
    size = wire.header_size(body[:8])
    return Attack(
        422, "non-negative", with_header(body[8:size].replace(b'"shape":[9,8]', b'"shape":[-9,8]'), body[size:])
    )


@attack
def other_normalisers_than_last_states() -> Attack:
    return Attack(422, "logsumexp", fewer(9, normalisers=11))


@attack
def scales_of_rows_that_were_left_out() -> Attack:
    last = wire.Tensor.of(np.zeros((9, 8), np.uint8), "F8_E4M3")
    scales = wire.Tensor.of(np.ones((11, 1), np.float32), "F32")
    return Attack(422, "last_hidden_scale", fewer(last_hidden=last, last_hidden_scale=scales))


@attack
def last_states_left_out_that_nothing_claims() -> Attack:
    last = wire.Tensor.of(np.zeros((9, 8), np.uint16), "BF16")
    return Attack(422, "last_hidden: shape must be [11, 8]", tensor(last_hidden=last))


@attack
def last_states_of_prompts_alone() -> Attack:
    return Attack(422, "no token that the policy generated", fewer(0, loss_mask=mask(*[0] * 11)))


@attack
def last_states_for_a_mask_of_255() -> Attack:
    return Attack(422, "must hold 0 and 1", fewer(9, loss_mask=mask(0, 255, 1, 1, 1, 1, 0, 1, 1, 1, 1)))


@attack
def rows_left_out_of_a_rollout_that_begins_with_a_response() -> Attack:
    return Attack(422, "first token of a rollout", fewer(10, loss_mask=mask(1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1)))


@attack
def a_token_that_belongs_to_no_rollout() -> Attack:
    return Attack(422, "cu_seqlens", fewer(cu_seqlens=i32(0, 6, 6)))


# --- what the metadata claim -----------------------------------------------------------------------------------------


@attack
def a_format_of_the_future() -> Attack:
    return Attack(422, "format", metadata(format="draftalign.rollouts.v3"))


@attack
def no_run() -> Attack:
    return Attack(422, "run", without("run"))


@attack
def no_temperature() -> Attack:
    return Attack(422, "temperature", without("temperature"))


@attack
def a_policy_version_of_nan() -> Attack:
    return Attack(422, "policy_version", metadata(policy_version="NaN"))


@attack
def a_negative_policy_version() -> Attack:
    return Attack(422, "policy_version", metadata(policy_version="-3"))


@attack
def a_policy_version_of_a_million_digits() -> Attack:
    return Attack(422, "policy_version", metadata(policy_version="9" * 1_000_000))


@attack
def a_policy_version_in_another_script() -> Attack:
    return Attack(422, "policy_version", metadata(policy_version="٣"))


@attack
def policy_versions_in_the_wrong_order() -> Attack:
    return Attack(422, "policy_version_max", metadata(policy_version="5", policy_version_max="4"))


@attack
def a_temperature_of_nan() -> Attack:
    return Attack(422, "temperature", metadata(temperature="nan"))


@attack
def an_infinite_reward() -> Attack:
    return Attack(422, "rewards", metadata(rewards="[0, Infinity]"))


@attack
def a_reward_too_large_for_a_float() -> Attack:
    return Attack(422, "rewards", metadata(rewards=f"[0, {'9' * 400}]"))


@attack
def rewards_of_another_count() -> Attack:
    return Attack(422, "rewards", metadata(rewards="[1.0]"))


@attack
def prompt_hashes_of_another_count() -> Attack:
    return Attack(422, "prompt_hashes", metadata(prompt_hashes=json.dumps(["0" * 16])))


@attack
def a_prompt_hash_that_is_no_text() -> Attack:
    return Attack(422, "prompt_hashes", metadata(prompt_hashes=json.dumps(["0" * 16, 7])))


@attack
def a_prompt_hash_that_is_no_hexadecimal_number() -> Attack:
    return Attack(422, "prompt_hashes", metadata(prompt_hashes=json.dumps(["0" * 16, "../../../latest/"])))


@attack
def a_prompt_hash_without_end() -> Attack:
    return Attack(422, "prompt_hashes", metadata(prompt_hashes=json.dumps(["0" * 16, "0" * 5000])))


@attack
def prompt_hashes_that_are_no_list() -> Attack:
    return Attack(422, "prompt_hashes", metadata(prompt_hashes='{"0000000000000000": 0}'))


@attack
def strata_of_another_count() -> Attack:
    return Attack(422, "strata", metadata(strata='["math"]'))


@attack
def a_stratum_that_is_no_text() -> Attack:
    return Attack(422, "strata", metadata(strata='["math", 7]'))


@attack
def a_stratum_with_a_newline() -> Attack:
    return Attack(422, "strata", metadata(strata='["math", "a\\nb"]'))


@attack
def a_stratum_without_end() -> Attack:
    return Attack(422, "strata", metadata(strata=json.dumps(["math", "x" * 65])))


@attack
def the_same_id_twice() -> Attack:
    return Attack(422, "appears twice", metadata(rollout_ids='["a", "a"]'))


@attack
def ids_that_are_numbers() -> Attack:
    return Attack(422, "rollout_ids", metadata(rollout_ids="[1, 2]"))


@attack
def an_id_with_half_a_surrogate_pair() -> Attack:
    return Attack(422, "rollout_ids", metadata(rollout_ids='["\\ud800", "b"]'))


@attack
def an_id_with_a_newline() -> Attack:
    return Attack(422, "rollout_ids", metadata(rollout_ids='["a\\r\\nSET x y", "b"]'))


@attack
def an_id_of_a_megabyte() -> Attack:
    return Attack(422, "rollout_ids", metadata(rollout_ids=json.dumps(["a" * 500_000, "b"])))


@attack
def ids_nested_10000_deep() -> Attack:
    return Attack(422, "rollout_ids", metadata(rollout_ids="[" * 100_000))


@attack
def more_ids_than_rollouts() -> Attack:
    return Attack(422, "cu_seqlens", metadata(rollout_ids='["a", "b", "c"]'))


@attack
def another_aux_convention() -> Attack:
    leaving = json.dumps({"convention": "leaving", "layers": LAYERS})
    return Attack(422, "convention", metadata(aux_layers=leaving))


@attack
def other_aux_layers_than_the_run() -> Attack:
    return Attack(422, "captures", metadata(aux_layers=json.dumps({"convention": "entering", "layers": [1, 4, 5]})))


@attack
def aux_layers_out_of_order() -> Attack:
    return Attack(422, "ascending", metadata(aux_layers=json.dumps({"convention": "entering", "layers": [5, 4, 2]})))


@attack
def another_hidden_size_than_the_run() -> Attack:
    body = b"".join(bytes(p) for p in wire.encode(rollout_tensors(hidden=16), rollout_metadata()))
    return Attack(422, "hidden size", body)


@attack
def another_targets_fingerprint() -> Attack:
    return Attack(422, "target_fingerprint", metadata(target_fingerprint="0" * 32))


# --- the integer tensors ---------------------------------------------------------------------------------------------


@attack
def a_token_beyond_the_vocabulary() -> Attack:
    return Attack(422, f"token {VOCAB}", tensor(input_ids=i32(*range(10), VOCAB)))


@attack
def a_negative_token() -> Attack:
    return Attack(422, "token -1", tensor(input_ids=i32(*range(10), -1)))


@attack
def boundaries_that_descend() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(0, 12, 11)))


@attack
def boundaries_beyond_the_tokens() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(0, 6, 1 << 30)))


@attack
def boundaries_that_wrap_around() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(0, -(1 << 31), 11)))


@attack
def boundaries_that_start_late() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(1, 6, 11)))


@attack
def a_rollout_of_one_token() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(0, 1, 11)))


def mask(*values: int) -> wire.Tensor:
    """A loss mask."""
    return wire.Tensor.of(np.array(values, np.uint8), "U8")


@attack
def a_mask_of_two() -> Attack:
    return Attack(422, "loss_mask", tensor(loss_mask=mask(0, 1, 2, 1, 1, 1, 0, 1, 1, 1, 1)))


@attack
def a_mask_without_a_token_of_one_rollout() -> Attack:
    return Attack(422, "loss_mask", tensor(loss_mask=mask(0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0)))


@attack
def a_mask_on_the_first_token() -> Attack:
    return Attack(422, "loss_mask", tensor(loss_mask=mask(1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1)))


@attack
def a_batch_of_no_tokens() -> Attack:
    empty = {
        name: wire.Tensor.of(np.zeros((0, *t.shape[1:]), wire.NUMPY_DTYPE[t.dtype]), t.dtype)
        for name, t in rollout_tensors().items()
        if name != "cu_seqlens"
    }
    return Attack(422, "no tokens", tensor(cu_seqlens=i32(0, 0, 0), **empty))


# --- names that lead elsewhere ---------------------------------------------------------------------------------------


@attack
def a_run_in_the_file_that_climbs() -> Attack:
    return Attack(404, "run", metadata(run="../../etc"))


@attack
def a_run_in_the_file_that_is_not_registered() -> Attack:
    return Attack(404, "not registered", metadata(run="other"))


@attack
def a_run_in_the_file_with_braces() -> Attack:
    return Attack(404, "run", metadata(run="a}:queue{b"))


@attack
def a_run_in_the_query_that_climbs() -> Attack:
    return Attack(404, "run", rollout_file(), path="/rollouts?run=..%2F..%2Fetc")


@attack
def a_run_in_the_query_that_is_not_the_files() -> Attack:
    return Attack(422, "the file", metadata(run="elsewhere"), path="/rollouts?run=default")


@attack
def a_drafter_version_that_climbs() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/..%2F..%2F..%2Fetc/passwd")


@attack
def a_drafter_version_with_plain_dots() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/../../../../etc/passwd")


@attack
def a_drafter_file_with_a_zero_byte() -> Attack:
    return Attack(404, "", method="GET", path="/drafter/v000001-00000000/model%00.safetensors")


@attack
def a_run_name_with_a_newline() -> Attack:
    return Attack(422, "run", rollout_file(), method="PUT", path="/runs/a%0Ab")


# --- the request itself ----------------------------------------------------------------------------------------------


@attack
def a_gzip_body() -> Attack:
    return Attack(415, "gzip", gzip.compress(rollout_file()), headers={"Content-Encoding": "gzip"})


@attack
def a_body_of_another_type() -> Attack:
    return Attack(415, "application/x-safetensors", rollout_file(), headers={"Content-Type": "application/json"})


@attack
def a_pickle() -> Attack:
    body = b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R."
    return Attack(415, "octet-stream", body, headers={"Content-Type": "application/octet-stream"})


@attack
def a_pickle_under_our_type() -> Attack:
    return Attack(422, "length word", b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")


@attack
def a_chunked_body_without_length() -> Attack:
    body = b"5\r\nhello\r\n0\r\n\r\n"
    return Attack(411, "Content-Length", body, headers={"Transfer-Encoding": "chunked"}, announced=-1)


@attack
def no_length_at_all() -> Attack:
    return Attack(411, "Content-Length", b"", announced=-1)


@attack
def a_gigabyte_against_the_cap() -> Attack:
    return Attack(413, "the limit is", b"", announced=1 << 30)


@attack
def a_length_of_a_hundred_digits() -> Attack:
    return Attack(400, "", b"", announced=10**100)


@attack
def a_longer_announcement_than_the_file_describes() -> Attack:
    body = rollout_file()
    return Attack(422, "Content-Length says", body, announced=len(body) + 1000)


@attack
def a_shorter_announcement_than_the_file_describes() -> Attack:
    body = rollout_file()[:-1]
    return Attack(422, "Content-Length says", body)


@attack
def a_byte_more_than_announced() -> Attack:
    body = rollout_file()
    return Attack(400, "", body, announced=len(body) - 1)  # to HTTP, the last byte begins another request


@attack
def a_delete_of_the_queue() -> Attack:
    return Attack(405, "", method="DELETE")
