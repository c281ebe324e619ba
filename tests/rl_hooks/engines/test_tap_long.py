"""Long responses: the tap sends them up to what may wait, and files stay within what the sender takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.tap_fixtures import HEAD, HIDDEN, PLAIN, STOP, VOCAB, Script, states, step

from rl_hooks import wire
from rl_hooks.engines.tap.collected import Batcher, Collected, Request, rollout_file
from rl_hooks.engines.tap.feature_tap import FeatureTap


@pytest.mark.parametrize("length", [40, 200, 2000])
@pytest.mark.parametrize("depth", [1, 6])
def test_a_long_response_is_sent_up_to_what_may_wait_however_many_drafts_are_rejected(length: int, depth: int) -> None:
    """With `max_tokens` 20 its first 80 rows wait, rejected drafts included; one step more may come."""
    draw, collected = random.Random(depth), list[Collected]()
    tapped = FeatureTap(HEAD, collected.append, fraction=1.0, tokens_per_minute=10**6, max_tokens=20)
    sequence = Script("r", [2, 3], [*(draw.randrange(2, VOCAB) for _ in range(length)), STOP])
    tapped.begin(sequence.request())
    while not sequence.done:
        tapped.step(step([(sequence, sequence.computed, *sequence.rows(draw, 5, depth))]))
    tapped.end(["r"])
    eventually(lambda: collected)
    (found,) = collected
    tokens = found.input_ids.tolist()
    assert tokens == sequence.tokens[: len(tokens)]
    cut = len(tokens) < len(sequence.tokens)
    assert tapped.tally["cut_long"] == cut
    assert cut or length == 40
    assert 80 / (depth + 1) <= len(tokens) <= 80 + depth + 2
    expected = states(tokens, range(len(tokens)))
    assert torch.allclose(found.last[:-1], expected[:-1])
    law = (expected @ HEAD.weight.T).log_softmax(-1)
    own = [float(law[t - 1, tokens[t]]) if found.generated[t] else 0.0 for t in range(len(tokens))]
    assert found.logprobs.tolist() == pytest.approx(own, abs=1e-5)
    eventually(lambda: tapped.tally["rows"] == 0)
    tapped.close(5.0)


def rollout(name: str, prompt: int, tokens: int) -> Collected:
    rows = torch.arange(tokens)
    return Collected(
        request=Request(name, tuple(range(2, 2 + prompt)), PLAIN, frozenset({STOP}), None),
        input_ids=np.arange(tokens, dtype=np.int32) % VOCAB,
        generated=np.arange(tokens) >= prompt,
        logprobs=np.where(np.arange(tokens) >= prompt, -0.5, 0.0).astype(np.float32),
        aux=rows[:, None].expand(tokens, 2 * HIDDEN).float(),
        last=rows[:, None].expand(tokens, HIDDEN).float(),
        logsumexp=rows.float(),
        first_position=0,
    )


def test_files_hold_no_more_than_they_may_and_a_rollout_that_is_longer_than_one_is_cut() -> None:
    width = rollout("w", 1, 2).row_bytes
    sent: list[Sequence[Collected]] = []
    batcher = Batcher(sent.append, tokens=1000, seconds=100, file_bytes=20 * width, rollout_bytes=30 * width)
    for name, prompt, tokens in (("a", 2, 8), ("b", 2, 8), ("c", 2, 8), ("long", 2, 300), ("d", 2, 3), ("no", 50, 60)):
        batcher.add(rollout(name, prompt, tokens))
    batcher.close(5.0)
    assert [[one.request.request_id for one in batch] for batch in sent] == [["a", "b"], ["c"], ["long"], ["d"]]
    assert (batcher.tally["cut_long"], batcher.tally["skipped_long"]) == (1, 1)
    (long,) = sent[2]
    whole = rollout("long", 2, 300)
    assert len(long.input_ids) == 30
    for name in ("input_ids", "generated", "logprobs", "aux", "last", "logsumexp"):
        assert getattr(long, name).tolist() == getattr(whole, name)[:30].tolist()
    for batch in sent:
        parts, _ = rollout_file(batch, run="r", target_fingerprint="f", aux_layers=(1, 2), last_rows="predicting")
        body = b"".join(bytes(part) for part in parts)
        header = wire.check_rollout_header(wire.parse_header(body))
        assert header.rollouts == len(batch)
        data = sum(len(one.input_ids) for one in batch) * width
        assert sum(info.end - info.begin for info in wire.parse_header(body).tensors.values()) <= data + 64
