"""Rows of live requests become whole rollouts: rejected drafts, chunks, preemption, ends, budgets, files."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.tap_fixtures import (
    AUX,
    HEAD,
    HIDDEN,
    PLAIN,
    STOP,
    VOCAB,
    Script,
    scheduled,
    states,
    step,
    truncated,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_hooks import wire
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.tap.collected import Batcher, Collected, Request, RequestSampling, assemble, rollout_file
from rl_hooks.engines.tap.feature_tap import FeatureTap, TapUnsupportedError
from rl_hooks.engines.tap.rows import Step
from rl_hooks.engines.vllm.steps import (
    V1_ARGUMENTS,
    V2_ARGUMENTS,
    named_arguments,
    request_of,
    step_v1,
    step_v2,
)
from rl_hooks.engines.vllm.tap import VllmTap
from rl_hooks.sending.sampling import sampling_position

#: Of a row on the host: positions, tokens, labels; states; logsumexp, log p.
ROW_BYTES = 3 * 8 + 4 * HIDDEN * (AUX + 1) + 2 * 4


def tap(deliver: Any, **changes: Any) -> FeatureTap:
    return FeatureTap(HEAD, deliver, **({"fraction": 1.0, "tokens_per_minute": 10**6} | changes))


def decode(sequences: list[Script], seed: int, *, depth: int = 3, preempt: float = 0.0) -> list[Collected]:
    """Run all of them through a tap as an engine would, several at a time."""
    draw, collected = random.Random(seed), list[Collected]()
    tapped = tap(collected.append)
    for sequence in sequences:
        tapped.begin(sequence.request())
    running = list(sequences)
    while running:
        chosen = draw.sample(running, draw.randint(1, len(running)))
        parts = []
        for sequence in chosen:
            if sequence.computed > sequence.prompt and draw.random() < preempt:
                sequence.computed = 0 if draw.random() < 0.5 else sequence.prompt
            start = sequence.computed
            parts.append((sequence, start, *sequence.rows(draw, draw.randint(1, 5), depth)))
        tapped.step(step(parts))
        tapped.end([sequence.name for sequence in chosen if sequence.done])
        running = [sequence for sequence in running if not sequence.done]
    eventually(lambda: tapped.tally["delivered"] + tapped.tally["skipped_short"] == len(sequences))
    assert tapped.tally["failures"] == 0
    return collected


def check(collected: Collected, sequence: Script, first: int = 0) -> None:
    tokens = sequence.tokens[first:]
    assert collected.input_ids.tolist() == tokens
    assert collected.generated.tolist() == [first + i >= sequence.prompt for i in range(len(tokens))]
    T = len(tokens)
    expected = states(tokens, range(first, first + T))
    computed = slice(0, T - 1)  # the last token's row may be zeros: it is never read
    assert torch.allclose(collected.last[computed], expected[computed])
    assert torch.allclose(collected.aux[computed, HIDDEN:], 3 * expected[computed])
    law = (expected @ HEAD.weight.T).log_softmax(-1)
    own = [float(law[t - 1, tokens[t]]) if collected.generated[t] else 0.0 for t in range(T)]
    assert collected.logprobs.tolist() == pytest.approx(own, abs=1e-5)
    assert collected.logsumexp[computed].tolist() == pytest.approx(
        (expected @ HEAD.weight.T).logsumexp(-1)[computed].tolist(), abs=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), preempt=st.sampled_from([0.0, 0.2]))
def test_requests_come_out_token_exact_however_the_engine_cuts_and_rejects(seed: int, preempt: float) -> None:
    draw = random.Random(seed)
    sequences = [
        Script(
            f"r{i}",
            [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 12))],
            [*(draw.randrange(2, VOCAB) for _ in range(draw.randint(0, 15))), STOP],
        )
        for i in range(4)
    ]
    done = {one.request.request_id: one for one in decode(sequences, seed, preempt=preempt)}
    for sequence in sequences:
        check(done[sequence.name], sequence)


def test_what_the_prefix_cache_held_has_no_rows_and_is_left_out() -> None:
    sequence = Script("r", list(range(2, 12)), [5, 6, 7, STOP], cached=8)
    (done,) = decode([sequence], 3)
    check(done, sequence, first=8)
    assert done.first_position == 8


@pytest.mark.parametrize(
    ("changes", "length"), [({"max_tokens": 3}, 5), ({"stop_ids": frozenset({6})}, 5), ({}, 7)], ids=str
)
def test_an_answer_ends_where_the_engine_ends_it(changes: dict[str, Any], length: int) -> None:
    sequence = Script("r", [2, 3], [4, 5, 6, 7, 8])
    rows = step([(sequence, 0, [2, 3], 0, 4), (sequence, 2, [4, 5, 6, 7], 0, 8)][:1])
    more = step([(sequence, 2, [4, 5, 6, 7], 0, 8)])
    collected: list[Collected] = []
    tapped = tap(collected.append)
    tapped.begin(sequence.request(**changes))
    tapped.step(rows)
    tapped.step(more)
    tapped.end(["r"])
    eventually(lambda: collected)
    assert len(collected[0].input_ids) == length


def test_a_request_without_an_answer_or_with_missing_rows_is_not_sent() -> None:
    request = Script("r", [2, 3, 4], [5]).request()
    assert assemble(request, []) is None
    tensors = {
        "positions": torch.tensor([0, 1]),
        "input_ids": torch.tensor([2, 3]),
        "labels": torch.tensor([3, 9]),
        "aux": torch.zeros(2, 2),
        "last": torch.zeros(2, 1),
        "logsumexp": torch.zeros(2),
        "logprob": torch.zeros(2),
    }
    assert assemble(request, [tensors]) is None  # ended within its prompt
    assert assemble(request, [tensors | {"positions": torch.tensor([0, 2])}]) is None  # position 1 is missing


def test_only_the_sampled_fraction_is_collected_and_only_within_the_budget() -> None:
    tapped = tap(lambda _: None, fraction=0.25)
    for i in range(400):
        tapped.begin(Request(f"r{i}", [2] * 5, PLAIN, frozenset(), None))
    assert 60 < tapped.tally["begun"] < 140
    assert tapped.tally["begun"] == sum(sampling_position(f"r{i}", "tap") < 0.25 for i in range(400))
    poor = tap(lambda _: None, tokens_per_minute=41)  # the fifth is the last that finds any left
    for i in range(40):
        poor.begin(Request(f"r{i}", [2] * 10, PLAIN, frozenset(), None))
    assert poor.tally["begun"] == 5
    assert poor.tally["skipped_budget"] == 35


def test_a_budget_that_is_too_small_does_not_go_to_the_shortest_answers() -> None:
    """As in RL: all requests of a step begin together, and the shortest answers end first."""
    lengths, limit, collected = [48, 3, 22, 60, 9, 35, 16, 54, 28, 41] * 3, 300, list[Collected]()
    tapped, started = tap(collected.append, tokens_per_minute=limit), time.monotonic()
    for burst in range(8):
        tapped._budget.correct(-limit)  # a minute has passed
        scripts = [Script(f"{burst}/{n}", [2], [3] * (length - 1) + [STOP]) for n, length in enumerate(lengths)]
        for one in scripts:
            tapped.begin(one.request())
        for position in range(max(lengths)):
            under_way = [one for one in scripts if one.name in tapped.collected]
            rows = [(one, position, [one.tokens[position]], 0, one.tokens[position + 1]) for one in under_way]
            if rows:
                tapped.step(step(rows))
            tapped.end([one.name for one in under_way if len(one.tokens) == position + 2])
        assert not tapped.collected
        eventually(lambda: tapped.tally["delivered"] == tapped.tally["begun"] and tapped.tally["rows"] == 0)
    sent = [int(one.generated.sum()) for one in collected]
    assert np.mean(sent) == pytest.approx(np.mean(lengths), rel=0.15)
    minutes = 8 + (time.monotonic() - started) / 60
    assert 7 * limit < sum(len(one.input_ids) for one in collected) < minutes * limit + max(lengths)


def test_what_was_reserved_for_requests_that_are_not_sent_is_given_back() -> None:
    tapped = tap(lambda _: None, tokens_per_minute=45)
    for name in "abc":
        tapped.begin(Script(name, [2] * 40, []).request())
    assert (tapped.tally["begun"], tapped.tally["skipped_budget"]) == (2, 1)
    tapped.turn(1, HEAD, lambda: None)
    tapped.begin(Script("d", [2] * 40, []).request())
    assert tapped.tally["begun"] == 3


def test_a_first_request_reserves_no_more_than_is_collected_of_it() -> None:
    """Its client may ask for any number of tokens."""
    tapped = tap(lambda _: None, max_tokens=20, tokens_per_minute=50)
    for name in "abcd":
        tapped.begin(Request(name, [2] * 5, PLAIN, frozenset(), 10**9))
    assert (tapped.tally["begun"], tapped.tally["skipped_budget"]) == (3, 1)


def test_beyond_the_bound_of_memory_the_request_that_goes_beyond_it_is_dropped() -> None:
    tapped = tap(lambda _: None, max_tokens=10, tokens_per_minute=50)  # 50 rows, and twice as many at the most
    first, second = Script("first", [2], []), Script("second", [2], [])
    tapped.begin(first.request())
    tapped.begin(second.request())
    tapped.step(step([(first, 0, [3] * 35, 0, 3), (second, 0, [3] * 35, 0, 3)]))
    tapped.flush()
    dropped = tapped._tracked["second"]
    eventually(lambda: len(dropped.parts) == 1)
    tapped.step(step([(first, 35, [3] * 5, 0, 3), (second, 35, [3] * 30, 0, 3)]))
    assert list(tapped.collected) == ["first"]
    assert (tapped.tally["skipped_memory"], tapped.tally["rows"]) == (1, 40)
    assert dropped.parts == [], "its rows are gone, although its last step still waits"


def test_rejected_drafts_take_no_room_that_long_answers_need() -> None:
    collected = list[Collected]()
    tapped = tap(collected.append, max_tokens=10, tokens_per_minute=50)  # 100 rows at the most, of a request 40
    one = Script("one", [2], [3] * 30 + [STOP])
    tapped.begin(one.request())
    for position in range(31):
        tapped.step(step([(one, position, [one.tokens[position]] + [4] * 7, 7, one.tokens[position + 1])]))
        tapped.flush()
        eventually(lambda: tapped.tally["rows"] == position + 1)  # noqa: B023 - called at once
    assert held_bytes(tapped) == 31 * ROW_BYTES
    tapped.end(["one"])
    eventually(lambda: tapped.tally["delivered"] == 1 and tapped.tally["rows"] == 0)
    assert collected[0].input_ids.tolist() == one.tokens


def test_a_request_of_which_every_row_was_rejected_is_no_failure() -> None:
    tapped, one = tap(lambda _: None), Script("one", [2], [])
    tapped.begin(one.request())
    tapped.step(step([(one, 0, [2, 3], 2, 4)]))
    tapped.end(["one"])
    eventually(lambda: tapped.tally["skipped_short"] == 1)
    assert (tapped.tally["failures"], tapped.tally["rows"]) == (0, 0)


def held_bytes(tapped: FeatureTap) -> int:
    """Host memory of the rows of the requests under way."""
    rows = [rows for tracked in tapped._tracked.values() for part in tracked.parts for rows in part]
    return sum((whole.base if whole.base is not None else whole).nbytes for whole in rows)


def test_a_long_request_keeps_no_rows_of_the_short_ones_beside_it() -> None:
    done: list[str] = []
    tapped, long = tap(lambda one: done.append(one.request.request_id)), Script("long", [2], [])
    tapped.begin(long.request())
    for wave in range(10):
        short = [Script(f"s{wave}_{i}", [2], []) for i in range(20)]
        for one in short:
            tapped.begin(one.request())
        tapped.step(step([(long, wave, [2], 0, 2), *((one, 0, [2], 0, STOP) for one in short)]))
        tapped.end([one.name for one in short])
    eventually(lambda: len(done) == 200)
    eventually(lambda: tapped.tally["rows"] == 10)
    assert held_bytes(tapped) == 10 * ROW_BYTES


def test_rows_of_all_requests_together_are_bounded_and_freed() -> None:
    tapped = tap(lambda _: None, tokens_per_minute=40, max_tokens=10)
    scripts = [Script(f"r{i}", [2], []) for i in range(20)]
    most = 0
    for one in scripts:
        tapped.begin(one.request())
    for position in range(12):
        tapped.step(step([(one, position, [2], 0, 2) for one in scripts]))
        most = max(most, tapped.tally["rows"])
    assert 40 < most <= 2 * 40
    assert tapped.tally["skipped_memory"] == 14  # six hold 12 rows each
    tapped.begin(Script("late", [2], []).request())
    assert tapped.tally["skipped_memory"] == 15
    tapped.end([one.name for one in scripts])
    eventually(lambda: tapped.tally["rows"] == 0)
    tapped._budget.correct(-80)  # two minutes have passed
    tapped.begin(Script("later", [2], []).request())
    tapped.step(step([(Script("later", [2], []), 0, [2], 0, 2)]))
    assert tapped.tally["rows"] == 1
    tapped.turn(1, HEAD, lambda: None)
    assert tapped.tally["rows"] == 0


def test_a_step_that_makes_no_sense_costs_its_requests_and_nothing_else() -> None:
    collected: list[Collected] = []
    tapped = tap(collected.append)
    bad, good = Script("bad", [2], [3, STOP]), Script("good", [2], [3, STOP])
    tapped.begin(bad.request())
    broken = step([(bad, 0, [2], 0, 3)])
    tapped.step(Step(**{n: getattr(broken, n) for n in broken.__slots__} | {"positions": torch.zeros(0)}))
    assert tapped.tally["failures"] == 1
    tapped.begin(good.request())
    tapped.step(step([(good, 0, [2], 0, 3)]))
    tapped.step(step([(good, 1, [3, 9], 1, STOP)]))
    tapped.end(["bad", "good"])
    eventually(lambda: collected)
    check(collected[0], good)
    assert len(collected) == 1


def test_a_request_whose_rows_did_not_all_arrive_is_not_sent() -> None:
    """Without the last step, what is left would look like a shorter rollout."""
    collected: list[Collected] = []
    tapped, lost, whole = tap(collected.append), Script("lost", [2], [3, 4, STOP]), Script("whole", [2], [3, STOP])

    def no_scores() -> torch.Tensor:
        raise RuntimeError("a rank is gone")

    tapped.begin(lost.request())
    tapped.step(step([(lost, 0, [2, 3], 0, 4)]))
    tapped.flush()
    tapped.step(replace(step([(lost, 2, [4], 0, STOP)]), scores=no_scores))
    tapped.flush()
    tapped.begin(whole.request())
    tapped.step(step([(whole, 0, [2, 3], 0, STOP)]))
    tapped.end(["lost", "whole"])
    eventually(lambda: collected)
    eventually(lambda: not tapped.tally["rows"])
    assert [one.request.request_id for one in collected] == ["whole"]
    assert tapped.tally["failures"] == 2, "the step, and its request"


def test_a_file_of_collected_rollouts_is_a_rollout_file() -> None:
    sequences = [Script(f"r{i}", [2, 3, 4], [5 + i, 6, STOP]) for i in range(3)]
    done = decode(sequences, 1)
    parts, batch_id = rollout_file(done, run="live", target_fingerprint="f" * 32, aux_layers=(1, 3))
    assert "versions_behind" not in wire.parse_header(b"".join(bytes(part) for part in parts)).tensors
    body = b"".join(bytes(part) for part in parts)
    header = wire.check_rollout_header(wire.parse_header(body))
    assert (header.rollouts, header.tokens, header.hidden_size, header.batch_id) == (3, 18, HIDDEN, batch_id)
    assert header.header.metadata["source"] == "engine"
    assert header.prompt_hashes == (wire.prompt_hash([2, 3, 4]),) * 3


def test_a_file_says_that_the_features_own_weights_drew_all(tmp_path: Path) -> None:
    done = decode([Script(f"r{i}", [2, 3, 4], [5 + i, 6, STOP]) for i in range(3)], 1)
    parts, _ = rollout_file(done, run="live", target_fingerprint="f" * 32, aux_layers=(1, 3), told=True)
    (tmp_path / "told").write_bytes(b"".join(bytes(part) for part in parts))
    file = wire.MappedFile(tmp_path / "told")
    header, behind = wire.check_rollout_header(file.header), file.array("versions_behind")
    ids, starts, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    wire.check_index(header, ids, starts, mask, VOCAB, versions_behind=behind)
    assert behind.tolist() == [0] * 18


def test_a_file_leaves_out_the_last_states_that_the_service_does_not_want(tmp_path: Path) -> None:
    done = decode([Script(f"r{i}", [2, 3, 4], [5 + i, 6, STOP]) for i in range(3)], 1)
    files = []
    for last_rows in wire.FORMATS:
        parts, _ = rollout_file(done, run="live", target_fingerprint="f" * 32, aux_layers=(1, 3), last_rows=last_rows)
        (tmp_path / last_rows).write_bytes(b"".join(bytes(part) for part in parts))
        files.append(wire.MappedFile(tmp_path / last_rows))
    full, fewer = files
    header = wire.check_rollout_header(fewer.header)
    ids, starts, mask = (fewer.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    wire.check_index(header, ids, starts, mask, VOCAB)
    rows = wire.predicting_rows(full.array("loss_mask"))
    assert rows.tolist() == [2, 3, 4, 8, 9, 10, 14, 15, 16]
    for name in full.header.tensors:
        kept = full.array(name)[rows] if name in ("last_hidden", "logsumexp") else full.array(name)
        assert np.array_equal(kept, fewer.array(name)), name


def test_a_file_names_the_whole_prompt_whatever_the_prefix_cache_held() -> None:
    """The siblings of a group share a prompt; the first computes its rows, the others read them from the cache."""
    prompt = list(range(2, 12))
    done = decode([Script(f"r{cached}", list(prompt), [5, 6, STOP], cached=cached) for cached in (0, 4, 9)], 3)
    assert sorted(one.first_position for one in done) == [0, 4, 9]
    parts, _ = rollout_file(done, run="live", target_fingerprint="f" * 32, aux_layers=(1, 3))
    header = wire.check_rollout_header(wire.parse_header(b"".join(bytes(part) for part in parts)))
    assert header.prompt_hashes == (wire.prompt_hash(prompt),) * 3


def test_a_prompt_that_the_engine_appends_to_stays_what_it_was_when_the_request_began() -> None:
    collected: list[Collected] = []
    tapped = tap(collected.append)
    sequence, prompt = Script("r", [2, 3], [4, STOP]), [2, 3]
    tapped.begin(Request("r", prompt, PLAIN, frozenset({STOP}), None))
    prompt += [9, 9, 9]  # a session goes on
    tapped.step(step([(sequence, 0, [2, 3], 0, 4)]))
    tapped.step(step([(sequence, 2, [4], 0, STOP)]))
    tapped.end(["r"])
    eventually(lambda: collected)
    check(collected[0], sequence)
    assert list(collected[0].request.prompt_ids) == [2, 3]


def test_files_hold_one_kind_of_sampling_and_do_not_wait_for_ever() -> None:
    sent: list[list[str]] = []
    batcher = Batcher(lambda batch: sent.append([one.request.request_id for one in batch]), tokens=10, seconds=0.2)
    done = decode([Script(f"r{i}", [2, 3, 4], [5, 6, STOP]) for i in range(3)], 1)
    cold = RequestSampling(0.5, 1.0, 0)
    batcher.add(done[0])
    batcher.add(
        Collected(
            **{n: getattr(done[1], n) for n in done[1].__slots__}
            | {"request": Request("c", (2, 3, 4), cold, frozenset(), None)}
        )
    )
    assert sent == []
    batcher.add(done[2])
    assert sent == [[done[0].request.request_id, done[2].request.request_id]]
    eventually(lambda: len(sent) == 2)
    assert sent[1] == ["c"]


def test_an_engine_that_idles_sends_its_last_file_soon() -> None:
    sent: list[str] = []
    batcher = Batcher(lambda batch: sent.append(batch[0].request.request_id), tokens=1000, seconds=1000)
    batcher.add(decode([Script("r", [2, 3, 4], [5, 6, STOP])], 1)[0])
    batcher.soon()
    eventually(lambda: sent == ["r"])


def test_a_file_that_cannot_be_made_does_not_end_the_sending_of_others() -> None:
    tried: list[str] = []

    def send(batch: Sequence[Collected]) -> None:
        tried.append(batch[0].request.request_id)
        if len(tried) == 1:
            raise RuntimeError("out of memory")

    batcher = Batcher(send, tokens=1000, seconds=0.1)
    for number, done in enumerate(decode([Script(f"r{i}", [2, 3, 4], [5, 6, STOP]) for i in range(2)], 1), 1):
        batcher.add(done)
        eventually(lambda number=number: len(tried) == number)  # type: ignore[misc]


def test_each_request_is_scored_by_the_distribution_that_it_is_drawn_from() -> None:
    kinds = [PLAIN, RequestSampling(0.7, 0.6, 0), RequestSampling(1.0, 1.0, 4), RequestSampling(1.3, 0.8, 9)]
    scripts = [Script(f"r{i}", [2, 3, 4, 5 + i], [6, 7, 8 + i, 9, 10, STOP]) for i in range(8)]
    draw, collected = random.Random(0), list[Collected]()
    tapped = tap(collected.append)
    for i, script in enumerate(scripts):
        tapped.begin(script.request(sampling=kinds[i % 4]))
    while running := [script for script in scripts if not script.done]:
        tapped.step(step([(script, script.computed, *script.rows(draw, 3, 2)) for script in running]))
        tapped.end([script.name for script in running if script.done])
    eventually(lambda: len(collected) == len(scripts))
    for one in collected:
        sampling, ids = one.request.sampling, torch.from_numpy(one.input_ids).long()
        law = (one.last @ HEAD.weight.T / sampling.temperature).log_softmax(-1)
        whole = law.gather(1, ids.roll(-1)[:, None])[:-1, 0]
        kept = law.exp() * truncated(law, sampling.top_p, sampling.top_k).isfinite()
        wanted = whole - kept.sum(-1).log()[:-1]  # also of a token that would have been cut off
        generated = torch.from_numpy(one.generated)[1:]
        logged = torch.from_numpy(one.logprobs)[1:]
        assert logged[generated].tolist() == pytest.approx(wanted[generated].tolist(), abs=1e-5)


@pytest.mark.parametrize(("sampling", "sent"), [(PLAIN, 1), (RequestSampling(1.0, 0.9, 0), 0)])
def test_a_truncated_request_is_dropped_and_counted_where_many_of_its_rows_come_at_once(
    sampling: RequestSampling, sent: int
) -> None:
    """What top-p leaves is not computed for thousands of rows, most of which are a prompt's."""
    script, collected = Script("r", [2, 3], [4, *[5] * 80, STOP]), list[Collected]()
    tapped = tap(collected.append)
    tapped.begin(script.request(sampling=sampling))
    tapped.step(step([(script, 0, [2, 3], 0, 4)]))
    tapped.step(step([(script, 0, script.tokens[:-1], 0, STOP)]))
    tapped.end(["r"])
    eventually(lambda: tapped.tally["delivered"] + tapped.tally["skipped_unscored"] == 1)
    assert (len(collected), tapped.tally["failures"]) == (sent, 0)


def test_a_truncated_request_that_was_preempted_keeps_the_scores_of_before() -> None:
    """All its rows come again at once, and the first of them are not scored again. A draft was rejected on the way."""
    text, law = [4, *[5, 6] * 40, STOP], RequestSampling(0.8, 0.9, 0)
    whole, cut = Script("whole", [2, 3], text), Script("cut", [2, 3], text)
    collected = list[Collected]()
    tapped = tap(collected.append)
    for script in (whole, cut):
        tapped.begin(script.request(sampling=law))
        tapped.step(step([(script, 0, [2, 3], 0, 4)]))
        tapped.step(step([(script, 2, [4, 9], 1, 5)]))
        for place in range(3, len(script.tokens) - 2):
            tapped.step(step([(script, place, [script.tokens[place]], 0, script.tokens[place + 1])]))
    tapped.step(step([(cut, 0, cut.tokens[:-2], 0, cut.tokens[-2])]))
    for script in (whole, cut):
        tapped.step(step([(script, len(script.tokens) - 2, [script.tokens[-2]], 0, STOP)]))
    tapped.end(["whole", "cut"])
    eventually(lambda: tapped.tally["delivered"] + tapped.tally["skipped_unscored"] == 2)
    assert [one.input_ids.tolist() for one in collected] == [whole.tokens] * 2
    assert collected[0].logprobs.tolist() == pytest.approx(collected[1].logprobs.tolist(), abs=1e-6)


def test_a_truncated_request_with_a_long_prompt_is_scored() -> None:
    script, collected = Script("r", [2] * 200, [4, 5, STOP]), list[Collected]()
    tapped = tap(collected.append)
    tapped.begin(script.request(sampling=RequestSampling(1.0, 0.9, 0)))
    for first, rows, sampled in ((0, [2] * 150, 7), (150, [2] * 50, 4), (200, [4, 5], STOP)):
        tapped.step(step([(script, first, rows, 0, sampled)]))
    tapped.end(["r"])
    eventually(lambda: len(collected) == 1)
    assert collected[0].input_ids.tolist() == script.tokens


# --- what vLLM hands over


def test_a_request_of_vllm_is_described_by_what_ends_it_and_how_it_is_drawn() -> None:
    assert request_of(scheduled()) == Request("r", [1, 2], RequestSampling(0.7, 1.0, 0), frozenset({7, 9}), 20)
    assert request_of(scheduled(ignore_eos=True)) == Request(
        "r", [1, 2], RequestSampling(0.7, 1.0, 0), frozenset({7}), 20
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.1},
        {"min_p": 0.05},
        {"logit_bias": {3: 1.0}},
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_token_ids": None},
        {"min_tokens": 4},
        {"thinking_token_budget": 0},
        {"watermarking": True},
        {"trace_decode_token_ids": [5, 6]},
        {"extra_args": {"a_logits_processor": 1}},
        {"of_the_next_vllm": "biased"},
    ],
)
def test_requests_that_are_not_drawn_from_the_plain_policy_are_left_out(changes: dict[str, Any]) -> None:
    assert request_of(scheduled(**changes)) is None


@pytest.mark.parametrize(
    "changes", [{"watermarking": False}, {"extra_args": {"kv_transfer_params": {"a": 1}}}, {"min_tokens": 1}]
)
def test_requests_whose_parameters_change_no_distribution_are_collected(changes: dict[str, Any]) -> None:
    assert request_of(scheduled(**changes)) is not None


def outcomes(one: Step) -> tuple[list[int], list[int]]:
    rejected, last_sampled = one.outcomes(one.told, torch.from_numpy(one.drafted))
    return rejected.tolist(), last_sampled.tolist()


@pytest.mark.parametrize("as_lists", [False, True])
def test_steps_of_both_model_runners_say_the_same(as_lists: bool) -> None:
    """Three requests: one in prefill, one with one of three drafts accepted, one with all."""
    counts, tokens = [5, 4, 4], torch.arange(2, 15, dtype=torch.int32)
    sampled: Any = torch.tensor([[20, -1, -1, -1], [21, 22, -1, -1], [23, 24, 25, 26]])
    if as_lists:
        sampled = [[t for t in row if t >= 0] for row in sampled.tolist()]
    hidden, aux = torch.randn(16, HIDDEN), [torch.randn(16, HIDDEN)]
    output = SimpleNamespace(scheduled_spec_decode_tokens={"b": [-1, -1, -1], "c": [1, 2, 3]})
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_id_to_index={"b": 1, "c": 2, "a": 0}),
        query_start_loc=SimpleNamespace(np=np.array([0, 5, 9, 13, 13], dtype=np.int32)),  # it has room for more
        input_ids=SimpleNamespace(gpu=tokens),
        positions=torch.arange(16),
    )
    given_v1 = dict(zip(V1_ARGUMENTS, (output, sampled, hidden, aux), strict=True))
    wanted = {"a", "b", "c"}
    first = step_v1(runner, given_v1, wanted)
    batch = SimpleNamespace(
        num_reqs=3,
        req_ids=["a", "b", "c"],
        query_start_loc_np=np.array([0, *np.cumsum(counts)], dtype=np.int32),
        input_ids=tokens,
        positions=torch.arange(16),
        idx_mapping=torch.tensor([4, 0, 2]),
    )
    by_state = torch.tensor([[22], [0], [26], [0], [20]])
    rejected = torch.tensor([0, 2, 0], dtype=torch.int32)
    second = step_v2(None, dict(zip(V2_ARGUMENTS, (batch, hidden, aux, rejected, by_state), strict=True)), wanted)
    assert first is not None
    assert second is not None
    for one in (first, second):
        assert list(one.request_ids) == ["a", "b", "c"]
        assert one.first_rows.tolist() == [0, 5, 9]
        assert one.row_counts.tolist() == counts
        assert outcomes(one) == ([0, 2, 0], [20, 22, 26])
    assert step_v1(runner, given_v1 | {"aux_hidden_states": None}, wanted) is None
    given_v2 = dict(zip(V2_ARGUMENTS, (batch, hidden, aux, rejected, by_state), strict=True))
    for some in (step_v1(runner, given_v1, {"a", "c", "ended"}), step_v2(None, given_v2, {"a", "c", "ended"})):
        assert some is not None, "only what is collected is read"
        assert list(some.request_ids) == ["a", "c"]
        assert (some.first_rows.tolist(), some.row_counts.tolist()) == ([0, 9], [5, 4])
        assert outcomes(some) == ([0, 0], [20, 26])
    assert step_v1(runner, given_v1, ()) is step_v2(None, given_v2, ()) is None


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_prompt_that_is_computed_in_parts_is_collected_in_either_form(as_lists: bool) -> None:
    """Of a part, vLLM samples a token that it throws away, or leaves the list empty."""
    collected: list[Collected] = []
    tapped, script = tap(collected.append), Script("r", [2, 3, 4, 5], [6, STOP])
    tapped.begin(script.request())
    for tokens, first, kept, thrown in (([2, 3], 0, [], [9]), ([4, 5], 2, [6], []), ([6, 7], 4, [STOP], [-1])):
        sampled: Any = [kept] if as_lists else torch.tensor([kept + thrown])
        drafts = {"r": [7]} if first == 4 else {}
        output = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_id_to_index={"r": 0}),
            query_start_loc=SimpleNamespace(np=np.array([0, 2], dtype=np.int32)),
            input_ids=torch.tensor(tokens),
            positions=torch.tensor([first, first + 1]),
        )
        last = states(tokens, [first, first + 1])
        given_v1 = dict(zip(V1_ARGUMENTS, (output, sampled, last, [2 * last, 3 * last]), strict=True))
        read = step_v1(runner, given_v1, {"r"})
        assert read is not None
        tapped.step(read)
    tapped.end(["r"])
    eventually(lambda: tapped.tally["delivered"] + tapped.tally["skipped_short"] == 1)
    check(collected[0], script)


class Runner:
    """A model runner whose parameters stand in another order than today's, with new ones between."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def execute_model(self, new: int, scheduler_output: Any) -> str:
        self.ran.append((new, scheduler_output))
        return "executed"

    def propose_draft_token_ids(
        self, aux_hidden_states: Any, new: int, hidden_states: Any, sampled_token_ids: Any, *, scheduler_output: Any
    ) -> str:
        self.ran.append((aux_hidden_states, new, hidden_states, sampled_token_ids, scheduler_output))
        return "drafted"


class Renamed(Runner):
    """One whose states have another name."""

    def propose_draft_token_ids(  # type: ignore[override]
        self, scheduler_output: Any, sampled_token_ids: Any, states: Any
    ) -> tuple[Any, ...]:
        return scheduler_output, sampled_token_ids, states


def tap_on(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Wrap `runner` with a tap that only notes what it is given."""
    seen: list[dict[str, Any]] = []

    def note(_: Any, given: dict[str, Any], wanted: Any) -> None:
        assert list(wanted) == ["r"]
        seen.append(dict(given))

    monkeypatch.setattr("rl_hooks.engines.vllm.steps.step_v1", note)
    tap = VllmTap.__new__(VllmTap)
    tap._shares = None
    tap.tap = FeatureTap(HEAD, lambda _: None, fraction=1.0, tokens_per_minute=1000)
    tap._wrap(runner)
    return seen


def test_parameters_that_moved_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    seen = tap_on(runner, monkeypatch)
    output = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[], num_scheduled_tokens={})
    assert runner.propose_draft_token_ids("aux", 8, "hidden", "sampled", scheduler_output=output) == "drafted"
    assert runner.ran.pop() == ("aux", 8, "hidden", "sampled", output)
    assert seen == [], "nothing is read of a step where nothing is collected"
    output.scheduled_new_reqs = [scheduled()]
    assert runner.execute_model(7, output) == "executed"
    assert runner.propose_draft_token_ids("aux", 8, "hidden", "sampled", scheduler_output=output) == "drafted"
    assert seen == [
        {
            "aux_hidden_states": "aux",
            "new": 8,
            "hidden_states": "hidden",
            "sampled_token_ids": "sampled",
            "scheduler_output": output,
        }
    ]
    assert runner.ran == [(7, output), ("aux", 8, "hidden", "sampled", output)]


def test_an_unknown_signature_turns_the_tap_off_and_leaves_the_engine_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Renamed()
    with pytest.raises(TapUnsupportedError, match=r"no parameter hidden_states, aux_hidden_states .* it takes"):
        tap_on(runner, monkeypatch)
    assert vars(runner) == {"ran": []}, "half of a tap is on"
    other = Runner()
    monkeypatch.setattr(Runner, "execute_model", lambda self, output: (self, output))
    with pytest.raises(TapUnsupportedError, match="scheduler_output"):
        tap_on(other, monkeypatch)
    assert vars(other) == {"ran": []}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
        ({"speculative_config": None}, "EAGLE-3"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "EAGLE-3"),
        ({"speculative_config": SimpleNamespace(method="eagle3", enable_adaptive_verification=True)}, "adaptive"),
        ({"speculative_config": SimpleNamespace(method="eagle3", rejection_sample_method="synthetic")}, "made-up"),
        ({"watermark_config": object()}, "watermarks"),
    ],
)
def test_an_engine_whose_rows_cannot_be_told_gets_no_tap(changes: dict[str, Any], why: str) -> None:
    usual = {
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "speculative_config": SimpleNamespace(method="eagle3", enable_adaptive_verification=False),
    }
    VllmTap._check(SimpleNamespace(vllm_config=SimpleNamespace(**usual)))  # an older vLLM has no watermarks
    VllmTap._check(SimpleNamespace(vllm_config=SimpleNamespace(**usual, watermark_config=None)))
    with pytest.raises(TapUnsupportedError, match=why):
        VllmTap._check(SimpleNamespace(vllm_config=SimpleNamespace(**usual | changes)))


def test_a_call_that_does_not_fit_its_own_signature_is_the_engines_to_raise() -> None:
    read = named_arguments(Runner().execute_model, ("scheduler_output",))
    assert read(1, scheduler_output=2) == {"new": 1, "scheduler_output": 2}
    with pytest.raises(TypeError, match="missing"):
        read(1)


def test_settings_come_from_the_environment_or_are_off() -> None:
    assert ServiceSettings.read({}) is None
    assert ServiceSettings.read({"DRAFTALIGN_URL": "http://s"}) == ServiceSettings("http://s")
    variables = {"URL": "http://s", "RUN": "math", "TOKEN": "t", "SAMPLE_FRACTION": "0", "TOKENS_PER_MINUTE": "9"}
    read = ServiceSettings.read({f"DRAFTALIGN_{name}": value for name, value in variables.items()})
    assert read == ServiceSettings("http://s", "math", "t", 0.0, 9)
    verl = {"DRAFTALIGN_URL": "http://s", "VERL_ENGINE_VENDOR": "draftalign"}  # its own hook sends rollouts
    assert ServiceSettings.read(verl) == ServiceSettings("http://s", sample_fraction=0.0)
    assert ServiceSettings.read(verl | {"DRAFTALIGN_SAMPLE_FRACTION": "0.1"}) == ServiceSettings(
        "http://s", sample_fraction=0.1
    )
    assert "'t'" not in repr(read)


@pytest.mark.parametrize(
    ("name", "value"),
    [("SAMPLE_FRACTION", "2"), ("SAMPLE_FRACTION", "nan"), ("TOKENS_PER_MINUTE", "0"), ("RUN", "../x"), ("URL", "s:1")],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"expected|plain name|look like"):
        ServiceSettings.read({"DRAFTALIGN_URL": "http://s", f"DRAFTALIGN_{name}": value})


@pytest.mark.parametrize("name", ["SAMPLE_FRACTION", "TOKENS_PER_MINUTE"])
def test_a_setting_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"DRAFTALIGN_{name}: expected (int|float), got '5%'"):
        ServiceSettings.read({"DRAFTALIGN_URL": "http://s", f"DRAFTALIGN_{name}": "5%"})


def three_ways() -> tuple[FeatureTap, list[Collected], Script]:
    """A tap with a request that has ended, and one under way."""
    collected: list[Collected] = []
    tapped = tap(collected.append, policy_version=4)
    done, going = Script("done", [2], [3, STOP]), Script("going", [2, 3], [4, 5, 6, STOP])
    tapped.begin(done.request())
    tapped.begin(going.request())
    tapped.step(step([(done, 0, [2], 0, 3), (going, 0, [2, 3], 0, 4)]))
    tapped.step(step([(done, 1, [3, 9], 1, STOP), (going, 2, [4, 9], 1, 5)]))
    tapped.end(["done"])
    return tapped, collected, going


def test_an_update_of_the_policy_ends_what_the_old_weights_drew_and_begins_nothing_before_the_new_ones() -> None:
    tapped, collected, going = three_ways()
    tapped.cut()
    tapped.begin(Script("between", [2], [3]).request())
    order: list[str] = []
    tapped.turn(5, HEAD, lambda: order.append(f"head after {len(collected)}"))
    tapped.step(step([(going, 3, [5, 6], 0, STOP)]))  # of the new weights
    tapped.end(["going", "between"])
    new = Script("new", [2], [3, STOP])
    tapped.begin(new.request())
    tapped.step(step([(new, 0, [2], 0, 3)]))
    tapped.step(step([(new, 1, [3], 0, STOP)]))
    tapped.end(["new"])
    eventually(lambda: len(collected) == 3)
    assert order == ["head after 2"]
    tokens = {one.request.request_id: (one.policy_version, one.input_ids.tolist()) for one in collected}
    assert tokens == {"done": (4, [2, 3, STOP]), "going": (4, [2, 3, 4, 5]), "new": (5, [2, 3, STOP])}
    assert (tapped.tally["cut"], tapped.tally["skipped_update"]) == (1, 1)


def test_an_update_that_nobody_announced_drops_what_either_weights_may_have_drawn() -> None:
    tapped, collected, _ = three_ways()
    eventually(lambda: collected)
    tapped.turn(5, HEAD, lambda: None)
    tapped.end(["going"])
    assert [one.request.request_id for one in collected] == ["done"]


def test_a_request_that_an_update_preempts_is_not_collected_again_under_the_next_policy() -> None:
    """V2's scheduler resumes it as a new request that has generated already (`pause_generation(mode="keep")`)."""
    collected: list[Collected] = []
    tapped = VllmTap.__new__(VllmTap)
    tapped._shares = None
    tapped.tap = tap(collected.append, policy_version=3)
    named, script = named_arguments(Runner().execute_model, ("scheduler_output",)), Script("r", [2, 3], [])

    def schedule(*prefills: list[int], finished: Sequence[str] = ()) -> None:
        news = [scheduled(prompt_token_ids=[2, 3], prefill_token_ids=prefill) for prefill in prefills]
        output = SimpleNamespace(finished_req_ids=finished, scheduled_new_reqs=news, num_scheduled_tokens={"r": 1})
        tapped._watch(named, (0, output), {})

    schedule([2, 3])
    tapped.tap.step(step([(script, 0, [2, 3], 0, 4)]))
    tapped.tap.step(step([(script, 2, [4], 0, 5)]))
    tapped.tap.cut()
    tapped.tap.turn(4, HEAD, lambda: None)
    schedule([2, 3, 4, 5])
    tapped.tap.step(step([(script, 0, [2, 3, 4, 5], 0, 6)]))
    schedule(finished=["r"])
    schedule([2, 3])  # another one of that name, from its beginning
    tapped.tap.step(step([(script, 0, [2, 3], 0, 9)]))
    schedule(finished=["r"])
    eventually(lambda: len(collected) > 1)
    assert [(c.policy_version, c.input_ids.tolist()) for c in collected] == [(3, [2, 3, 4, 5]), (4, [2, 3, 9])]


def test_files_hold_one_policy_version() -> None:
    sent: list[list[int]] = []
    batcher = Batcher(lambda batch: sent.append([one.policy_version for one in batch]), seconds=1000)
    done = decode([Script(f"r{i}", [2, 3, 4], [5, 6, STOP]) for i in range(4)], 1)
    for number, one in enumerate(done):
        batcher.add(replace(one, policy_version=number % 2))
    batcher.flush()
    assert sorted(sent) == [[0, 0], [1, 1]]


def test_the_engines_thread_does_not_wait_for_a_slow_receiver() -> None:
    release, received = threading.Event(), list[bool]()
    tapped = tap(lambda _: received.append(release.wait(60)))
    for i in range(20):
        sequence = Script(f"r{i}", [2], [3, STOP])
        tapped.begin(sequence.request())
        tapped.step(step([(sequence, 0, [2], 0, 3)]))
        tapped.end([sequence.name])
    assert received == [], "the first is still being received"
    release.set()
    eventually(lambda: tapped.tally["delivered"] == 20)
