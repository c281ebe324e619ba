"""Our training step against speculators 0.9.0: float32, same weights, loss per step and every gradient within 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drafter.parity_fixtures import VOCAB, Case, case, deviation, ours, theirs
from torch import Tensor

import drafter.model.eagle3_unroll as unroll_module
from drafter.model.pointwise import rotary
from drafter.unroll.attention import attend

pytest.importorskip("hs_connectors", reason="pip install --no-deps -r tests/peers_requirements.txt")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]

LIMIT = 1e-5
#: The prompts of "half response" are longer than the deepest unroll, or the peer would score across documents.
DOCUMENTS = {"one document": (96,), "packed": (40, 18, 64, 21)}


@pytest.mark.parametrize("draft", [VOCAB, 23], ids=["whole vocabulary", "draft vocabulary"])
@pytest.mark.parametrize("response", [1.0, 0.5], ids=["all response", "half response"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_losses_and_gradients_agree(steps: int, documents: str, response: float, draft: int) -> None:
    c = case(DOCUMENTS[documents], response=response, draft=draft)
    packed = response < 1 or steps == 1
    assert deviation(ours(c, steps), theirs(c, steps, packed=packed)) < LIMIT


def _moved(x: Tensor) -> Tensor:
    return x.roll(1, 0)


MUTATIONS: dict[str, Callable[[Case], Case]] = {
    "mask one token late": lambda c: replace(c, batch=replace(c.batch, loss_mask=_moved(c.batch.loss_mask))),
    "tokens one place late": lambda c: replace(c, batch=replace(c.batch, input_ids=_moved(c.batch.input_ids))),
    "features one row late": lambda c: replace(c, batch=replace(c.batch, aux_hidden=_moved(c.batch.aux_hidden))),
    "states before the final norm": lambda c: replace(c, batch=replace(c.batch, last_hidden=c.raw_last)),
    "one document for two": lambda c: replace(
        c, batch=replace(c.batch, cu_seqlens=c.batch.cu_seqlens[[0, *range(2, c.batch.cu_seqlens.numel())]])
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_input_is_noticed(mutation: str) -> None:
    c = case(DOCUMENTS["packed"], response=0.5, draft=23)
    assert deviation(ours(MUTATIONS[mutation](c), 3), theirs(c, 3, packed=True)) > 100 * LIMIT


def test_a_dropped_diagonal_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(DOCUMENTS["packed"], response=0.5, draft=23)
    monkeypatch.setattr(unroll_module, "attend", lambda p, step, q, keys, own: attend(p, step, q, keys, own[-1:]))
    assert deviation(ours(c, 3), theirs(c, 3, packed=True)) > 100 * LIMIT


def test_a_position_that_stays_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(DOCUMENTS["one document"], response=1.0, draft=VOCAB)
    first: list[Tensor] = []

    def behind(positions: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        first.append(positions)
        return rotary(first[0][: positions.numel()], **rest)

    monkeypatch.setattr(unroll_module, "rotary", behind)
    assert deviation(ours(c, 3), theirs(c, 3, packed=True)) > 100 * LIMIT


def test_the_peer_scores_rows_across_documents_and_ours_does_not() -> None:
    """Why fully supervised documents go through it one by one: packed, its last rows meet the next one's targets."""
    c = case(DOCUMENTS["packed"], response=1.0, draft=VOCAB)
    leaking, exact = theirs(c, 3, packed=True), theirs(c, 3, packed=False)
    torch.testing.assert_close(leaking.sums[0], exact.sums[0])
    assert bool((leaking.sums[1:] > exact.sums[1:]).all())
    assert deviation(leaking, exact) > 100 * LIMIT
    assert deviation(ours(c, 3), exact) < LIMIT
