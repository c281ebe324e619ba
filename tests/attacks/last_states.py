"""Files that leave out the last states of prompts, or lie about it."""

from __future__ import annotations

import numpy as np
from helpers.service.service_fixtures import i32, rollout_file

from attacks.making import Attack, attack, mask, tensor, with_header
from rl_hooks import wire


def fewer(rows: int = 9, *, normalisers: int | None = None, **others: wire.Tensor | None) -> bytes:
    """A file with `rows` rows of `last_hidden` and `normalisers` normalisers; its mask asks for 9."""
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
