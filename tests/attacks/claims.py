"""Files whose metadata lie."""

from __future__ import annotations

import json

from helpers.service.service_fixtures import LAYERS, rollout_metadata, rollout_tensors

from attacks.making import Attack, attack, metadata, without
from rl_hooks import wire


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
def a_batch_drawn_from_one_number() -> Attack:
    return Attack(422, "offered", metadata(offered="[8]"))


@attack
def a_batch_drawn_from_fewer_than_no_tokens() -> Attack:
    return Attack(422, "offered", metadata(offered="[8, -1]"))


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
