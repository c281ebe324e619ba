"""The head in slices: the same normaliser and log p as whole, and no answer where a rank has none."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine.tap_fixtures import HEAD, Script, scheduled, step
from helpers.forked import ROOT, run_fork
from torch import Tensor

from rl_hooks.engines.policy_watch import PolicyWatch
from rl_hooks.engines.ranks import LayerRanks, Shard
from rl_hooks.engines.tap.collected import Collected
from rl_hooks.engines.tap.feature_tap import FeatureTap
from rl_hooks.engines.tap.rows import Step, labelled_rows
from rl_hooks.engines.vllm.tap import VllmTap, _SplitScores
from rl_hooks.sending.features import joined_scores, score_rows
from rl_hooks.wire import LogitMap

ROWS, HIDDEN, VOCABULARY, PADDED = 40, 16, 105, 192


class Group:
    """vLLM's group as one rank sees it."""

    rank_in_group = 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(scale=0.25, softcap=3.0)])
def test_slices_give_the_scores_of_the_whole_head(size: int, logit_map: LogitMap) -> None:
    generator = torch.Generator().manual_seed(size)
    last, head = (torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, VOCABULARY))
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[:6] = torch.tensor([0, 47, 48, 63, 64, 104])  # at the slices' edges
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    each = PADDED // size
    parts = [
        Shard(head[begin : begin + each], begin, logit_map).partial(last, labels, temperature)
        for begin in range(0, PADDED, each)  # the last of 3 and 4 hold nothing but padding, or little else
    ]
    logsumexp, logprob = score_rows(last, head, labels, temperature=temperature, logit_map=logit_map)
    found = joined_scores(torch.stack(parts))
    assert torch.allclose(found[0], logsumexp, atol=1e-5)
    assert torch.allclose(found[1], logprob, atol=1e-5)
    for missing in range(size):
        lacking = [torch.full_like(part, torch.nan) if i == missing else part for i, part in enumerate(parts)]
        assert bool(joined_scores(torch.stack(lacking)).isnan().all())


@pytest.mark.parametrize("cases", ["scores disagree steps", "silent", "dies"])
def test_two_ranks_join_their_scores_and_neither_waits_in_its_engine(cases: str) -> None:
    """Processes: a rank that dies, is silent, is a step ahead, or counts other rows or another policy version."""
    script = str(Path(__file__).with_name("joining_ranks.py"))
    done = run_fork("trainer", script, *cases.split(), directory=ROOT, environment=os.environ, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]


def play(tap: FeatureTap, name: str, scores: Callable[[Step], Callable[[], Tensor] | None]) -> None:
    script, draw = Script(name, [2, 3, 4], [5, 6, 7, 8, 1]), random.Random(0)
    tap.begin(script.request())
    while not script.done:
        start = script.computed
        rows, rejected, sampled = script.rows(draw, 8, 2)
        one = step([(script, start, rows, rejected, sampled)])
        tap.step(replace(one, scores=scores(one)))
    tap.end([name])


def test_a_rollout_takes_the_joined_scores_and_is_dropped_and_counted_where_there_are_none() -> None:
    delivered: list[Collected] = []
    tap = FeatureTap(HEAD, delivered.append, fraction=1.0, tokens_per_minute=10**6)

    def known(one: Step) -> Callable[[], Tensor]:
        rows_N, labels_N = labelled_rows(one, np.array([0]))
        placed = torch.full((2, len(one.last)), torch.nan)
        placed[:, rows_N] = torch.stack(HEAD.score(one.last[rows_N], labels_N, torch.ones(len(rows_N))))
        return lambda: placed

    play(tap, "alone", lambda _: None)
    play(tap, "joined", known)
    play(tap, "unknown", lambda one: lambda: torch.full((2, len(one.last)), torch.nan))
    tap.close(20)
    assert [one.request.request_id for one in delivered] == ["alone", "joined"]
    assert delivered[0].logprobs.tolist() == delivered[1].logprobs.tolist()
    assert torch.equal(delivered[0].logsumexp, delivered[1].logsumexp)
    assert (tap.tally["skipped_unscored"], tap.tally["failures"], tap.tally["rows"]) == (1, 0, 0)
    assert "not scored" in tap.tally.last_error


@pytest.mark.parametrize(("sampled", "begun"), [(False, ["cut", "plain"]), (True, ["plain"])])
def test_where_drafts_are_sampled_no_rank_scores_a_request_with_top_p(sampled: bool, begun: list[str]) -> None:
    """What top-p leaves of a whole distribution no rank sees; only replay of sampled drafts asks for it."""
    tapped = VllmTap.__new__(VllmTap)
    tapped.tap = FeatureTap(HEAD, lambda _: None, fraction=1.0, tokens_per_minute=10**6)
    joiner: Any = SimpleNamespace(gone=False)
    tapped._shares = _SplitScores(joiner, 1.0, lambda: 0, whole_only=sampled)
    new = [scheduled(req_id="plain"), scheduled(req_id="cut", top_p=0.9)]
    output = SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=new, num_scheduled_tokens={"plain": 2, "cut": 2}
    )
    tapped._watch(lambda one: {"scheduler_output": one}, (output,), {})
    assert sorted(tapped._shares._temperatures) == sorted(tapped.tap._tracked) == begun
    assert tapped.tap.tally["skipped_truncated"] == 2 - len(begun)
    tapped.tap.close(20)


def test_requests_of_another_distribution_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Else nothing of a framework that asks for such in each request would arrive, and nothing would say why."""
    tapped = VllmTap.__new__(VllmTap)
    tapped.tap = FeatureTap(HEAD, lambda _: None, fraction=1.0, tokens_per_minute=10**6)
    tapped._shares = None
    resumed = scheduled(req_id="resumed", prefill_token_ids=[1, 2, 3])
    others = [scheduled(req_id=name, min_tokens=4) for name in ("first", "second")]
    new = [*others, scheduled(req_id="third", logit_bias={3: 1.0}), resumed, scheduled(req_id="plain")]
    output = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, num_scheduled_tokens={})
    tapped._watch(lambda one: {"scheduler_output": one}, (output,), {})
    assert list(tapped.tap._tracked) == ["plain"]
    assert tapped.tap.tally["skipped_distribution"] == 3
    said = [one.getMessage() for one in caplog.records]
    assert [text.split(" are not sent")[0] for text in said] == [
        f"draftalign: requests with {name}" for name in ("min_tokens", "logit_bias")
    ]
    tapped.tap.close(20)


def test_a_request_that_is_not_sampled_is_not_read() -> None:
    """Most are not, and to read one takes ten times as long as to know that."""
    tapped = VllmTap.__new__(VllmTap)
    tapped.tap = FeatureTap(HEAD, lambda _: None, fraction=0.0, tokens_per_minute=10**6)
    tapped._shares = None
    unread = SimpleNamespace(req_id="r")  # to read more of it would fail
    output = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[unread], num_scheduled_tokens={})
    tapped._watch(lambda: {"scheduler_output": output}, (), {})
    assert tapped.tap.tally.counts() == {}
    tapped.tap.close(20)


class Recorded(LayerRanks):
    """A rank whose others answer as told."""

    def __init__(self, *, others: bool) -> None:
        super().__init__(None)
        self.said: list[bool] = []
        self._others = others

    def all_agree(self, *, ok: bool) -> bool:
        self.said.append(ok)
        return ok and self._others


def test_a_rank_that_fails_answers_and_one_that_did_its_part_raises_with_it() -> None:
    ranks = Recorded(others=True)
    with pytest.raises(ValueError, match="mine"), ranks.together():
        raise ValueError("mine")
    assert ranks.said == [False]
    with pytest.raises(RuntimeError, match="another rank"), Recorded(others=False).together():
        pass
    with Recorded(others=True).together():
        pass


class Uncopied:
    """A slice of a head that cannot be copied to the host."""

    def detach(self) -> Any:
        raise MemoryError("no room on the host")


def test_a_slice_that_cannot_be_copied_is_told_before_any_rank_waits_for_it() -> None:
    ranks = Recorded(others=True)
    ranks.group = Group()
    with pytest.raises(MemoryError):
        ranks.whole(Uncopied(), 3)  # type: ignore[arg-type]
    assert ranks.said == [False]
    ranks = Recorded(others=False)
    ranks.group = Group()
    with pytest.raises(RuntimeError, match="another rank"):  # and no gather is begun, which this group has not
        ranks.whole(torch.zeros(2, 2), 3)


def test_weights_that_only_another_rank_has_seen_to_move_are_a_new_version_here_too() -> None:
    model = torch.nn.Linear(4, 4)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    others = {"same": True}
    watch = PolicyWatch(worker, lambda same: same and others["same"])
    watch.number(None, 3)
    assert (watch.settle(None), watch.version) == (False, 3)
    others["same"] = False
    assert (watch.settle(None), watch.version) == (True, 4)
    others["same"] = True
    assert (watch.settle(None), watch.version) == (False, 4)
