"""Hostile rollouts that the API takes, because it never looks at the features: the worker has to live with them.

`ACCEPTED` maps what is wrong to the body for run `evil`, whose target is that of service_fixtures. To add one: a
function that returns the file's changes, decorated with `@accepted`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from helpers.service.service_fixtures import HIDDEN, LAYERS, VOCAB, rollout_file, rollout_tensors

from rl_hooks import wire

TOKENS: Final = 11  # of rollout_file
Changes = dict[str, Any]
ACCEPTED: Final[dict[str, Callable[[], bytes]]] = {}


def accepted(make: Callable[[], Changes]) -> Callable[[], Changes]:
    """Add a maker to the corpus; each batch has ids of its own."""
    name = make.__name__

    def body() -> bytes:
        changes = make()
        ids = changes.pop("ids", (f"{name}/a", f"{name}/b"))
        return rollout_file(ids, run="evil", **changes)

    ACCEPTED[name] = body
    return make


def bf16(value: float, width: int) -> wire.Tensor:
    """Every element `value`, rounded down to bfloat16."""
    bits = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return wire.Tensor.of(np.full((TOKENS, width), bits[0], np.uint16), "BF16")


def every(value: float) -> wire.Tensor:
    """One float32 a token."""
    return wire.Tensor.of(np.full(TOKENS, value, np.float32), "F32")


def fp8(scale: float, code: int = 0x7E) -> Changes:
    """Features in eight bits, all of one code (0x7E: 448), with this scale."""
    return {
        "tensors": {
            "aux_hidden": wire.Tensor.of(np.full((TOKENS, len(LAYERS) * HIDDEN), code, np.uint8), "F8_E4M3"),
            "aux_hidden_scale": wire.Tensor.of(np.full((TOKENS, len(LAYERS)), scale, np.float32), "F32"),
        }
    }


@accepted
def nothing_wrong() -> Changes:
    return {}


@accepted
def features_of_nan() -> Changes:
    return {"tensors": {"aux_hidden": bf16(float("nan"), 24)}}


def nan_in_the_second_rollout() -> wire.Tensor:
    """Features of zeros, and of NaN in its last row."""
    bits = np.zeros((TOKENS, 24), np.uint16)
    bits[-1] = 0x7FC0
    return wire.Tensor.of(bits, "BF16")


@accepted
def features_of_nan_in_one_rollout() -> Changes:
    """The other is sound."""
    return {"tensors": {"aux_hidden": nan_in_the_second_rollout()}}


@accepted
def features_of_nan_in_one_rollout_and_probabilities_above_one_in_the_other() -> Changes:
    logprobs = np.full(TOKENS, -3.0, np.float32)
    logprobs[1] = 1.0
    return {"tensors": {"aux_hidden": nan_in_the_second_rollout(), "logprobs": wire.Tensor.of(logprobs, "F32")}}


@accepted
def features_of_nan_in_one_rollout_and_squares_that_overflow_in_the_other() -> Changes:
    bits = np.full((TOKENS, 24), 0x7F7F, np.uint16)  # the largest bfloat16
    bits[-1] = 0x7FC0
    return {"tensors": {"aux_hidden": wire.Tensor.of(bits, "BF16")}}


@accepted
def features_of_infinity() -> Changes:
    return {"tensors": {"aux_hidden": bf16(float("-inf"), 24)}}


@accepted
def features_whose_squares_overflow() -> Changes:
    return {"tensors": {"aux_hidden": bf16(3.3e38, 24)}}


@accepted
def hidden_states_whose_squares_overflow() -> Changes:
    return {"tensors": {"last_hidden": bf16(3.3e38, 8)}}


@accepted
def hidden_states_of_nan() -> Changes:
    return {"tensors": {"last_hidden": bf16(float("nan"), 8)}}


@accepted
def the_last_states_of_prompts_left_out() -> Changes:
    return {"last_rows": "predicting"}


@accepted
def the_last_states_of_prompts_left_out_and_nan_in_the_others() -> Changes:
    nan = np.full((9, HIDDEN), 0x7FC0, np.uint16)
    return {"last_rows": "predicting", "tensors": {"last_hidden": wire.Tensor.of(nan, "BF16")}}


@accepted
def all_tokens_share_one_row() -> Changes:
    row = wire.Tensor.of(np.zeros((1, 24), np.uint16), "BF16")
    return {"tensors": {"aux_hidden": row, "aux_rows": wire.Tensor.of(np.zeros(TOKENS, np.int32), "I32")}}


@accepted
def a_shared_row_of_nan() -> Changes:
    row = wire.Tensor.of(np.full((1, 24), 0x7FC0, np.uint16), "BF16")
    return {"tensors": {"aux_hidden": row, "aux_rows": wire.Tensor.of(np.zeros(TOKENS, np.int32), "I32")}}


@accepted
def all_drawn_by_the_newest_weights_and_log_probabilities_of_others() -> Changes:
    told = wire.Tensor.of(np.zeros(TOKENS, np.int32), "I32")
    return {"tensors": {"versions_behind": told, "logprobs": every(-50.0)}}


@accepted
def all_drawn_by_weights_of_long_ago() -> Changes:
    made = rollout_tensors()
    behind = np.frombuffer(made["loss_mask"].data, np.uint8).astype(np.int32) * (2**31 - 1)
    return {"policy_version": 2**31 - 1, "tensors": {"versions_behind": wire.Tensor.of(behind, "I32")}}


@accepted
def a_scale_of_nan() -> Changes:
    return fp8(float("nan"))


@accepted
def a_scale_that_overflows() -> Changes:
    return fp8(3e38)


@accepted
def a_negative_scale() -> Changes:
    return fp8(-1.0)


@accepted
def eight_bits_that_are_nan() -> Changes:
    return fp8(1.0, 0x7F)


@accepted
def a_huge_normaliser() -> Changes:
    return {"tensors": {"logsumexp": every(3e38)}}


@accepted
def a_normaliser_far_below_zero() -> Changes:
    return {"tensors": {"logsumexp": every(-3e38)}}


@accepted
def log_probabilities_of_nan() -> Changes:
    return {"tensors": {"logprobs": every(float("nan"))}}


@accepted
def log_probabilities_of_a_certainty_and_more() -> Changes:
    return {"tensors": {"logprobs": every(50.0)}, "top_p": 0.9}


@accepted
def log_probabilities_that_cannot_be() -> Changes:
    return {"tensors": {"logprobs": every(-3e38)}}


@accepted
def normalisers_that_hide_log_probabilities() -> Changes:
    return {"tensors": {"logprobs": every(-50.0), "logsumexp": every(50.0)}}


@accepted
def the_coldest_temperature() -> Changes:
    return {"temperature": 1e-6}


@accepted
def a_temperature_that_float32_takes_for_zero() -> Changes:
    return {"temperature": 5e-324}


@accepted
def a_truncation_to_nothing() -> Changes:
    return {"top_p": 0.0, "top_k": 999_999_999_999_999}


@accepted
def greedy_decoding() -> Changes:
    return {"temperature": 0.0}


@accepted
def the_hottest_temperature() -> Changes:
    return {"temperature": 100.0}


@accepted
def a_drafter_version_that_climbs() -> Changes:
    return {"drafter_version": "../../../etc/passwd"}


@accepted
def a_drafter_version_of_a_zero_byte_and_half_a_surrogate_pair() -> Changes:
    return {"drafter_version": "v\x00\ud800*"}


@accepted
def a_drafter_version_of_half_a_megabyte() -> Changes:
    return {"drafter_version": "v" * 500_000}


@accepted
def a_drafter_version_that_never_was() -> Changes:
    return {"drafter_version": "v999999-00000000"}


@accepted
def the_newest_policy_of_all() -> Changes:
    return {"policy_version": 999_999_999_999_999}


@accepted
def an_end_of_policy_versions_far_above_their_begin() -> Changes:
    return {"policy_version_max": 999_999_999_999_999}


@accepted
def a_session_that_began_at_the_newest_policy_of_all() -> Changes:
    return {"extra": {"session": "a" * 32, "session_began": "999999999999999"}}


@accepted
def features_that_cancel_though_each_is_huge() -> Changes:
    bits = np.tile(np.array([0x7F60, 0xFF60], np.uint16), (TOKENS, 12))  # 3e38 and -3e38
    return {"tensors": {"aux_hidden": wire.Tensor.of(bits, "BF16")}}


@accepted
def one_huge_hidden_state() -> Changes:
    bits = np.zeros((TOKENS, HIDDEN), np.uint16)
    bits[3, 0] = 0x7F60
    return {"tensors": {"last_hidden": wire.Tensor.of(bits, "BF16")}}


@accepted
def a_huge_log_probability_of_a_prompts_token() -> Changes:
    logprobs = np.full(TOKENS, -np.log(VOCAB), np.float32)
    logprobs[0] = 3e38
    return {"tensors": {"logprobs": wire.Tensor.of(logprobs, "F32")}}


@accepted
def one_long_rollout_among_many_short_ones() -> Changes:
    lengths = (3000, *(4,) * 200)
    return {"ids": tuple(f"uneven/{i}" for i in range(201)), "lengths": lengths}


@accepted
def rewards_that_add_up_to_infinity() -> Changes:
    return {"rewards": [9e299, 9e299]}


@accepted
def drawn_from_more_than_all_engines_could_emit() -> Changes:
    return {"offered": ((1 << 53) - 1, (1 << 53) - 1)}


@accepted
def drawn_from_rollouts_without_a_token() -> Changes:
    return {"offered": ((1 << 53) - 1, 0)}


@accepted
def two_tokens_a_rollout() -> Changes:
    ids = tuple(f"tiny/{i}" for i in range(500))
    return {"ids": ids, "lengths": (2,) * 500, "tensors": rollout_tensors((2,) * 500)}


@accepted
def always_the_same_token() -> Changes:
    return {"tensors": {"input_ids": wire.Tensor.of(np.full(TOKENS, VOCAB - 1, np.int32), "I32")}}


@accepted
def strata_that_look_like_markup() -> Changes:
    return {"strata": ["", '"} 1\\ <script>{{ . }}']}


@accepted
def a_prompt_that_all_share() -> Changes:
    return {"prompt_hashes": ["0" * 16, "0" * 16]}
