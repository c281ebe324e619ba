"""Files whose tensors are missing, odd or contradict each other."""

from __future__ import annotations

import numpy as np
from helpers.service.service_fixtures import VOCAB, i32, rollout_file, rollout_tensors

from attacks.making import Attack, attack, mask, tensor
from rl_hooks import wire


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


@attack
def tokens_and_log_probabilities_alone() -> Attack:
    without = dict.fromkeys(("aux_hidden", "last_hidden", "logsumexp"))
    return Attack(422, "aux_hidden: is missing", tensor(**without))


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


@attack
def tokens_of_weights_before_the_first_version() -> Attack:
    return Attack(422, "must be from 0 to policy_version_max", tensor(versions_behind=i32(*[0] * 10, 2**31 - 1)))


@attack
def tokens_of_weights_that_are_to_come() -> Attack:
    return Attack(422, "must be from 0 to policy_version_max", tensor(versions_behind=i32(*[0] * 10, -(2**31))))


@attack
def a_prompt_that_older_weights_drew() -> Attack:
    return Attack(422, "versions_behind: must be 0 at tokens", tensor(versions_behind=i32(*[1] * 11)))


@attack
def versions_of_other_tokens() -> Attack:
    return Attack(422, "versions_behind", tensor(versions_behind=i32(*[0] * 10)))


@attack
def versions_in_64_bits() -> Attack:
    return Attack(422, "versions_behind", tensor(versions_behind=wire.Tensor.of(np.zeros(11, np.int64), "I64")))


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
def boundaries_that_wrap_around_and_come_back() -> Attack:
    """Each step is of two tokens or more, in the arithmetic of their own 32 bits."""
    boundaries = i32(0, (1 << 31) - 1, 1 - (1 << 31), 0, 11)
    return Attack(
        422, "cu_seqlens", rollout_file(("a", "b", "c", "d"), lengths=(6, 5), tensors={"cu_seqlens": boundaries})
    )


@attack
def boundaries_that_start_late() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(1, 6, 11)))


@attack
def a_rollout_of_one_token() -> Attack:
    return Attack(422, "cu_seqlens", tensor(cu_seqlens=i32(0, 1, 11)))


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
