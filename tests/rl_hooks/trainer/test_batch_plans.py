"""What is captured of a batch and under which ids (`rl_hooks/trainer/plan.py`), without a model and a service."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.plan import (
    BatchPlan,
    CaptureArguments,
    RolloutChoice,
    RolloutIds,
    UniqueId,
    VersionOrder,
    checked_version,
    content_id,
    plan_batch,
)

LENGTHS = (3, 5, 4)


def tally() -> Tally:
    return Tally(logging.getLogger("rl_hooks"), "skipped_empty", "skipped_sampling", "skipped_budget")


def plan_of(*, budget: int = 1 << 20, **more: Any) -> BatchPlan | None:
    """A packed row of rollouts of `LENGTHS`; the policy generated all but the first two tokens of each."""
    cu = [0, *np.cumsum(LENGTHS).tolist()]
    mask = [int(place >= 2) for tokens in LENGTHS for place in range(tokens)]
    told: dict[str, Any] = {"policy_version": 3, "cu_seqlens": torch.tensor(cu), "rollout_ids": list("abc")}
    ids = torch.arange(100, 100 + cu[-1])[None]
    told |= {"input_ids": ids, "loss_mask": torch.tensor([mask])} | more
    return plan_batch(RolloutIds(0), RolloutChoice(1.0, budget, tally()), CaptureArguments(**told))


def planned(**more: Any) -> BatchPlan:
    plan = plan_of(**more)
    assert plan is not None
    return plan


# --- the weights that drew a token
def test_by_how_many_versions_weights_were_behind_is_read_where_the_policy_generated() -> None:
    said = torch.arange(12)[None] % 4  # of policy version 3
    behind = planned(versions_behind=torch.where(torch.arange(12) < 2, -9, said)).index.versions_behind
    assert behind is not None
    assert behind.dtype == np.int32
    assert behind.tolist() == [0, 0, 2, 0, 0, 1, 2, 3, 0, 0, 2, 3]
    assert planned(versions_behind=said.bool()).index.versions_behind is not None, "older or not"
    assert planned().index.versions_behind is None


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_versions_that_cannot_be_cost_what_is_told_and_not_the_rollouts(
    bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = torch.zeros(1, 12, dtype=torch.int64)
    said[0, 2] = bad
    plan = planned(versions_behind=said)
    assert (len(plan.rollout_ids), plan.index.versions_behind) == (3, None)
    assert f"{min(bad, 0)} to {max(bad, 0)}, expected 0 to policy_version (3)" in caplog.text


@pytest.mark.parametrize(
    "bad", [torch.full((1, 12), math.nan), torch.zeros(1, 11).int(), torch.zeros(2, 12).int(), [[0] * 12], 0]
)
def test_what_is_told_of_other_tokens_or_in_no_integers_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(RolloutError, match="versions_behind must be"):
        plan_of(versions_behind=bad)


# --- ids
def test_an_id_names_the_attachment_the_process_the_version_the_rank_and_the_number() -> None:
    ids = RolloutIds(5)
    text = f"{ids._prefix}/{os.getpid()}/7/5/11"
    assert ids.of(7, 11) == hashlib.sha256(text.encode()).hexdigest()[:24]
    assert ids.of(7, 11) == ids.of(7, 11)
    assert len({ids.of(7, 11), ids.of(7, 12), ids.of(8, 11), RolloutIds(5).of(7, 11)}) == 4
    assert [ids.next(7), ids.next(7)] == [ids.of(7, -1), ids.of(7, -2)], "a trainer numbers from 0 on"


def test_a_trainers_name_is_followed_by_a_digest_of_the_rollout() -> None:
    tokens, generated = np.array([1, 300], dtype=np.int32), np.array([False, True])
    digest = hashlib.sha256(bytes([1, 0, 0, 0, 44, 1, 0, 0, 0, 1])).hexdigest()[:16]
    assert content_id("a", tokens, generated) == f"a-{digest}"
    assert content_id(7, tokens, generated) == f"7-{digest}"
    assert content_id("a", tokens.astype(">i4"), generated) == f"a-{digest}"
    assert content_id("a", tokens + 1, generated) != f"a-{digest}" != content_id("a", tokens, ~generated)
    own = UniqueId("own")
    assert content_id(own, tokens, generated) is own
    longest = "é" * 111
    assert content_id(longest, tokens, generated) == f"{longest}-{digest}"
    for odd in ("x" * 112, "a\nb", "\ud800"):
        short = hashlib.sha256(odd.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        assert content_id(odd, tokens, generated) == f"{short}-{digest}"


# --- versions that come again
@pytest.mark.parametrize(
    ("versions", "back"),
    [
        ([8, 4, 5], [2]),
        ([8, 5, 6], [2]),
        ([8, 6, 7], []),
        ([8, 4, 9], []),
        ([8, 5, 3, 9], []),
        ([8, 4, 4, 5], [3]),
        ([8, 4, 8, 5], []),
        ([8, 3, 5, 9, 5, 6], [2]),  # the 9 came by more than one: late rollouts
        ([8, 3, 5, 9, 4, 5], [2]),
        ([8, 3, 5, 9, 10, 5, 6], [2]),
        ([8, 3, 5, 6, 9, 5, 6], [2]),
        ([8, 3, 5, 7, 9, 5, 6], [2]),
        ([8, 4, 5, 8, 4, 5], [2]),  # the same of the 8 itself
        ([8, 3, 5, 9, 3, 4], [2, 5]),
        ([0, 4, 8, 4, 5, 9, 5, 6], [4, 7]),  # a step of four is usual
        ([0, 3, 8, 4, 5, 9, 5, 6], [4]),
        ([8, 3, 5, 6, 7, 8, 4, 5], [2, 7]),  # it came by ones: a return
        ([8, 4, 5, 1, 2, 9, 2, 3], [2, 4]),
        ([8, 4, 5, 1, 2, 9, 1, 2], [2, 4, 7]),
        ([3, 0, 1], [2]),
        ([2, 0, 1], []),
    ],
)
def test_a_return_is_a_fall_of_three_and_a_version_between(versions: list[int], back: list[int]) -> None:
    order = VersionOrder()
    assert [at for at, version in enumerate(versions) if order.went_back(version)] == back


@pytest.mark.parametrize("version", [0, 10**15 - 1, np.int64(3), torch.tensor(3)])
def test_any_integer_that_a_file_can_hold_is_a_policy_version(version: Any) -> None:
    assert checked_version(version) == int(version)


@pytest.mark.parametrize(("version", "said"), [(-1, "-1"), (10**15, "1000000000000000"), (1.0, "1.0"), ("1", "'1'")])
def test_no_other_is(version: Any, said: str) -> None:
    expected = f"policy_version must be an integer from 0 on, of at most 15 digits, got {said}"
    with pytest.raises(RolloutError) as told:
        checked_version(version)
    assert str(told.value) == expected


# --- the batch
def test_a_plan_holds_what_the_batch_said() -> None:
    logprobs = -torch.arange(12, dtype=torch.float64)[None] / 7
    hashes = [wire.prompt_hash([n]) for n in range(3)]
    strata = ["x" * 65, "a\nb", 7]
    plan = planned(logprobs=logprobs, rewards=torch.tensor([1.0, 0.5, 2.0]), temperature=0.5, strata=strata,
                   top_p=0.9, top_k=20, prompt_hashes=hashes)  # fmt: skip
    assert plan.rows.dtype == np.int64
    assert plan.rows.tolist() == list(range(12))
    assert plan.index.input_ids.dtype == np.int32
    assert plan.index.input_ids.tolist() == list(range(100, 112))
    assert plan.layout.lengths == LENGTHS
    assert plan.index.cu_seqlens.dtype == np.int32
    assert plan.index.cu_seqlens.tolist() == [0, 3, 8, 12]
    assert plan.index.loss_mask.dtype == np.uint8
    assert plan.index.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert plan.index.logprobs is not None
    assert plan.index.logprobs.dtype == np.float32
    assert plan.index.logprobs.tolist() == logprobs[0].float().tolist()
    assert [one[:2] for one in plan.rollout_ids] == ["a-", "b-", "c-"]
    assert (plan.rewards, plan.strata, plan.prompt_hashes) == ((1.0, 0.5, 2.0), ("x" * 64, "ab", "7"), tuple(hashes))
    assert (plan.policy_version, plan.temperature, plan.top_p, plan.top_k, plan.offered) == (3, 0.5, 0.9, 20, (3, 6))
    rows, tokens = plan.scored()
    assert tokens.dtype == np.int64
    assert (rows.tolist(), tokens.tolist()) == ([1, 4, 5, 6, 9, 10], [102, 105, 106, 107, 110, 111])
    bare = planned(top_p=None, top_k=None)
    assert (bare.index.logprobs, bare.rewards, bare.strata, bare.prompt_hashes) == (None,) * 4
    assert (bare.temperature, bare.top_p, bare.top_k) == (1.0, 1.0, 0)
    assert planned(top_k=-1).top_k == 0


def test_what_is_not_chosen_is_in_no_list() -> None:
    plan = planned(budget=8, rewards=[1.0, 2.0, float("nan")], strata=list("xyz"), rollout_ids=list("abc"))
    assert len(plan.rollout_ids) in (1, 2)
    assert (len(plan.index.cu_seqlens), len(plan.strata or ())) == (len(plan.rollout_ids) + 1, len(plan.rollout_ids))
    assert plan_of(loss_mask=torch.zeros(1, 12)) is None
    assert plan_of(loss_mask=torch.tensor([[1, 0, 0] + [0] * 9])) is None, "no features precede the first token"


def test_a_reward_that_is_no_number_of_a_file_costs_the_rewards(caplog: pytest.LogCaptureFixture) -> None:
    assert planned(rewards=[1.0, 9e299, -9e299]).rewards == (1.0, 9e299, -9e299)
    assert not caplog.text
    assert planned(rewards=[1.0, float("nan"), 1.0]).rewards is None
    assert "a reward is not finite, or beyond 1e300: those of its batch are not sent" in caplog.text


@pytest.mark.parametrize("name", ["rollout_ids", "rewards", "strata", "prompt_hashes"])
def test_each_list_has_one_entry_per_rollout(name: str) -> None:
    entry: Any = {"rewards": 1.0, "prompt_hashes": "0" * 16}.get(name, "x")
    for count in (2, 4):
        with pytest.raises(RolloutError) as told:
            planned(**{"rollout_ids": None} | {name: [entry] * count})
        assert str(told.value) == "rollout_ids, rewards, strata and prompt_hashes must hold one entry per rollout (3)"
    rows = {
        "cu_seqlens": None,
        "input_ids": torch.ones(2, 3),
        "loss_mask": torch.ones(2, 3),
        "attention_mask": torch.ones(2, 3),
    }
    with pytest.raises(RolloutError, match=r"must hold one entry per row \(2\)$"):
        planned(**rows | {"rollout_ids": None} | {name: [entry] * 3})


def test_padding_at_the_end_of_a_packed_row_is_no_rollout() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0]])
    told: dict[str, Any] = {"cu_seqlens": None, "position_ids": positions, "loss_mask": mask}
    assert len(planned(**told, rewards=[1.0, 2.0], strata=None, rollout_ids=None).rollout_ids) == 2
    with pytest.raises(RolloutError, match="per rollout"):
        planned(**told, rollout_ids=["a"])
    assert len(planned(**told, rollout_ids=None).rollout_ids) == 2


def test_rollouts_without_a_name_are_offered_once_each() -> None:
    same = torch.ones(1, 12, dtype=torch.long)
    choice, ids = RolloutChoice(1.0, 1 << 20, tally()), RolloutIds(0)
    offered, names = [], list[str]()
    for tokens in (same, same, 2 * same):
        cu = torch.tensor([0, 4, 8, 12])
        told = CaptureArguments(input_ids=tokens, loss_mask=same, policy_version=3, cu_seqlens=cu)
        plan = plan_batch(ids, choice, told)
        assert plan is not None
        offered.append(plan.offered)
        names += plan.rollout_ids
    assert offered == [(3, 9), (0, 0), (3, 9)], "the second time the tokens are the same"
    assert names == [ids.of(3, -number) for number in range(1, 10)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "hot"}, "temperature: expected a number, got hot"),
        ({"temperature": -1}, "temperature must be from 0 to 100, got -1.0"),
        ({"temperature": 100.5}, "temperature must be from 0 to 100, got 100.5"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 100, got nan"),
        ({"top_p": -1}, "top_p must be from 0 to 1, got -1.0"),
        ({"top_p": float("nan")}, "top_p must be from 0 to 1, got nan"),
        ({"top_k": 10**15}, "top_k must be from -1 to 999999999999999, got 1000000000000000.0"),
        ({"top_k": 10**400}, f"top_k: expected a number, got 1{'0' * 79}"),
        ({"top_k": float("nan")}, "top_k must be from -1 to 999999999999999, got nan"),
        ({"top_k": "all"}, "top_k: expected a number, got all"),
        ({"rewards": [1.0, "x" * 100, 1.0]}, f"rewards: expected a number, got {'x' * 80}"),
        ({"prompt_hashes": ["0" * 16, "0" * 16, "x"]},
         "prompt_hashes must be of `rl_hooks.wire.prompt_hash`: 16 hexadecimal digits each"),
    ],
)  # fmt: skip
def test_what_no_file_can_say_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RolloutError) as told:
        planned(**fields)
    assert str(told.value) == said


# --- files
def parts(tokens: int, longest: int) -> list[tuple[list[int], list[str], list[int]]]:
    hashes = {name: wire.prompt_hash([n]) for n, name in enumerate("abc")}
    listed: dict[str, Any] = {"rewards": [1.0, 2.0, 3.0], "strata": list("xyz"), "prompt_hashes": [*hashes.values()]}
    plan = planned(logprobs=-torch.arange(12.0)[None], versions_behind=torch.arange(12)[None] % 4, **listed)
    found = []
    for rows, part in plan.files(tokens, longest):
        names = [one[0] for one in part.rollout_ids]
        assert part.rows.tolist() == plan.rows[rows].tolist() == list(range(rows.start, rows.stop))
        assert part.index.input_ids.tolist() == plan.index.input_ids[rows].tolist()
        assert part.index.loss_mask.tolist() == plan.index.loss_mask[rows].tolist()
        assert part.index.logprobs is not None
        assert part.index.versions_behind is not None
        assert part.index.versions_behind.tolist() == [
            row % 4 * mask for row, mask in zip(part.rows.tolist(), part.index.loss_mask.tolist(), strict=True)
        ]
        assert part.index.logprobs.tolist() == [-float(row) for row in range(rows.start, rows.stop)]
        assert part.index.cu_seqlens.dtype == np.int32
        assert part.rewards == tuple("abc".index(name) + 1.0 for name in names)
        assert part.strata == tuple("xyz"["abc".index(name)] for name in names)
        assert part.prompt_hashes == tuple(hashes[name] for name in names)
        assert part.offered == ((3, 6) if names[0] == "a" else (0, 0))
        found.append(([rows.start, rows.stop], names, part.index.cu_seqlens.tolist()))
    return found


def test_files_hold_whole_rollouts_up_to_their_tokens() -> None:
    whole = [([0, 12], ["a", "b", "c"], [0, 3, 8, 12])]
    assert parts(12, 99) == whole
    assert parts(11, 99) == [([0, 8], ["a", "b"], [0, 3, 8]), ([8, 12], ["c"], [0, 4])]
    assert parts(8, 99) == parts(11, 99)
    assert parts(7, 99) == [([0, 3], ["a"], [0, 3]), ([3, 8], ["b"], [0, 5]), ([8, 12], ["c"], [0, 4])]
    later = planned(cu_seqlens=torch.tensor([0, 5, 8, 12]), loss_mask=torch.ones(1, 12))
    assert [rows for rows, _ in later.files(7, 99)] == [slice(0, 5), slice(5, 12)]
    assert parts(9, 4) == [([0, 8], ["a", "b"], [0, 3, 8]), ([8, 12], ["c"], [0, 4])]


def test_a_rollout_that_is_longer_is_cut_and_left_out_without_a_generated_token() -> None:
    assert parts(4, 4) == [([0, 3], ["a"], [0, 3]), ([3, 7], ["b"], [0, 4]), ([8, 12], ["c"], [0, 4])]
    assert parts(1, 3) == [([0, 3], ["a"], [0, 3]), ([3, 6], ["b"], [0, 3]), ([8, 11], ["c"], [0, 3])]
    assert parts(1, 2) == []
    bare = planned()
    assert [(p.rewards, p.strata, p.prompt_hashes, p.index.logprobs) for _, p in bare.files(3, 9)] == [(None,) * 4] * 3
