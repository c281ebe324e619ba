"""What the trainer's forward says of its distribution is what the product with lm_head would say, or is not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.trainer.capture_fixtures import LENGTHS, TEMPERATURE, inputs
from helpers.trainer.hooks_fixtures import VOCAB, Padded, Receiver, mapped, padded_batch
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import chosen_logits, score_rows
from rl_hooks.trainer import staging
from rl_hooks.trainer.own_scores import OwnRows, _logits

Forward = Callable[[Any, Padded], Any]
BATCH = padded_batch(LENGTHS)
PACKED = [token for sequence in BATCH.sequences for token in sequence]


def whole(model: Any, batch: Padded) -> Any:
    return model(batch.input_ids, attention_mask=batch.attention_mask)


def kept(model: Any, batch: Padded) -> Any:
    """As many trainers call it: logits of the responses only, which are then divided in place."""
    prompt = int(batch.loss_mask.argmax(1).min())
    out = model(
        batch.input_ids, attention_mask=batch.attention_mask, logits_to_keep=batch.input_ids.shape[1] - prompt + 1
    )
    with torch.no_grad():
        out.logits.div_(17.0)
    return out


def twice(model: Any, batch: Padded) -> Any:
    """The rollouts, and then other tokens: the first forward is what is captured."""
    out = whole(model, batch)
    model(batch.input_ids.flip(1), attention_mask=batch.attention_mask)
    return out


def fused(model: Any, batch: Padded) -> Any:
    """As TRL's fused head does it: log-probabilities, and no call of lm_head."""
    states = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state[:, :-1]
    logits = (states @ model.lm_head.weight.T).float() / TEMPERATURE
    found = torch.log_softmax(logits, -1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    out = CausalLMOutputWithPast()
    out.log_probs = found
    return out


def gathering(model: Any, batch: Padded) -> Any:
    """lm_head is given some rows, in an order of their own."""
    states = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return model.lm_head(states[:, torch.arange(states.shape[1]).flip(0)])


def in_chunks(model: Any, batch: Padded) -> Any:
    states = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return [model.lm_head(states[:, begin : begin + 3]) for begin in range(0, states.shape[1], 3)]


def without_head(model: Any, batch: Padded) -> Any:
    return model.model(batch.input_ids, attention_mask=batch.attention_mask)


def transposed(model: Any, batch: Padded) -> Any:
    """A view of the states too, of as many numbers: not by rows."""
    states = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return model.lm_head(states.transpose(0, 1))


def scaled_in_place(model: Any, batch: Padded) -> Any:
    """lm_head is given the states' memory, with other numbers in it."""
    states = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return model.lm_head(states.mul_(0.5))


def fused_of_others(model: Any, batch: Padded) -> Any:
    """The states of the rollouts, and then log-probabilities of other tokens, of the same shape."""
    without_head(model, batch)
    return fused(model, replace(batch, input_ids=batch.input_ids.flip(1)))


class Through(nn.Module):
    """A model whose forward is another one, as trainers replace it."""

    def __init__(self, inner: Any, forward: Forward) -> None:
        super().__init__()
        self.module, self.way = inner, forward

    def forward(self, batch: Padded) -> Any:
        return self.way(self.module, batch)


def sent(service: Receiver, hook: DrafterHook, model: nn.Module, ways: list[Forward], **changes: Any) -> list[int]:
    """Run a forward of each way; returns how many rollouts each sent."""
    counts = []
    for version, way in enumerate(ways):
        before = hook.stats()["captured_rollouts"]
        model.way = way  # type: ignore[assignment]
        told = inputs(BATCH) | {"policy_version": version, "temperature": TEMPERATURE} | changes
        with torch.no_grad(), hook.capture(**told):
            model(BATCH)
        counts.append(hook.stats()["captured_rollouts"] - before)
    assert hook.flush(20), hook.stats()
    return counts


def numbers(service: Receiver, directory: Path) -> list[tuple[Tensor, Tensor]]:
    """Normalisers and log-probabilities of all files, in the order in which they came."""
    files = [mapped(request, directory) for request in service.rollouts()]
    return [tuple(torch.from_numpy(f.array(n).copy()) for n in ("logsumexp", "logprobs")) for f in files]  # type: ignore[misc]


def capped(softcap: float | None, _module: nn.Module, _args: Any, out: Any) -> None:
    """What a model of that soft cap returns."""
    if softcap is not None:
        out.logits = wire.LogitMap(softcap=softcap).apply(out.logits.float())


def noting(monkeypatch: pytest.MonkeyPatch) -> Mock:
    product = Mock(side_effect=score_rows)
    monkeypatch.setattr(staging, "score_rows", product)
    return product


@pytest.mark.parametrize(
    ("way", "softcap"), [(whole, None), (whole, 3.0), (kept, None), (kept, 3.0), (twice, None), (fused, None)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_forward_made_is_what_the_product_would_be(
    service: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: Forward,
    dtype: torch.dtype,
    softcap: float | None,
) -> None:
    product = noting(monkeypatch)
    inner = tiny(tied=False).to(dtype)
    logit_map = None if softcap is None else wire.LogitMap(softcap=softcap)
    inner.register_forward_hook(partial(capped, softcap))
    model = Through(inner, way)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True, logit_map=logit_map)
    assert sent(service, hook, model, [way] * 3) == [len(BATCH.sequences)] * 3
    assert product.call_count == 1, "the first forward only"
    (lse, logp), *own = numbers(service, tmp_path)
    # A bfloat16 policy's logits are rounded, by its own forward and by the product alike: its sums may differ in order.
    atol = 1e-5 if dtype == torch.float32 else 0.06
    for own_lse, own_logp in own:
        torch.testing.assert_close(own_lse, lse, rtol=0.0, atol=atol)
        torch.testing.assert_close(own_logp, logp, rtol=0.0, atol=atol)
        assert float((own_lse - lse).abs().mean()) < atol / 4
    hook.close()


def test_a_loss_that_changes_log_probabilities_in_place_changes_none_of_ours(service: Receiver, tmp_path: Path) -> None:
    model = Through(tiny(tied=False), fused)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    for version in range(2):
        told = inputs(BATCH) | {"policy_version": version, "temperature": TEMPERATURE}
        with torch.no_grad(), hook.capture(**told):
            model(BATCH).log_probs.mul_(0.5)
    assert hook.flush(20)
    of_the_product, own = numbers(service, tmp_path)
    for ours, products in zip(own, of_the_product, strict=True):
        torch.testing.assert_close(ours, products, rtol=0.0, atol=1e-5)
    hook.close()


@pytest.mark.parametrize("way", [gathering, in_chunks, without_head, transposed, scaled_in_place, fused_of_others])
def test_where_it_cannot_be_told_whose_the_logits_are_the_product_is_made(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Forward
) -> None:
    product = noting(monkeypatch)
    model = Through(tiny(tied=False), way)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    assert sent(service, hook, model, [way] * 3) == [len(BATCH.sequences)] * 3
    assert product.call_count == 3
    first, *others = numbers(service, tmp_path)
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    hook.close()


@pytest.mark.parametrize(
    ("before", "after"), [(whole, in_chunks), (fused, without_head), (whole, fused), (fused, whole)]
)
def test_a_forward_that_does_otherwise_than_the_one_before_costs_its_rollouts_once(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Forward, after: Forward
) -> None:
    product = noting(monkeypatch)
    model = Through(tiny(tied=False), before)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True)
    R = len(BATCH.sequences)
    ways = [before, before, after, after, before, before, after]
    assert sent(service, hook, model, ways) == [R, R, 0, R, R, R, R]
    assert product.call_count == 5, "all but the second, and the third, which was lost"
    assert hook.stats()["failures"] == 1
    assert "as the one before did" in hook.stats()["last_failure"]
    first, *others = numbers(service, tmp_path)
    for found in others:
        for a, b in zip(found, first, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)
    hook.close()


def test_log_probabilities_are_used_only_where_somebody_vouches_for_them(
    service: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of one's own may leave labels out, or divide by another temperature."""
    product = noting(monkeypatch)
    model = Through(tiny(tied=False), fused)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    assert sent(service, hook, model, [fused] * 3) == [len(BATCH.sequences)] * 3
    assert product.call_count == 3
    hook.close()


def test_logits_that_lack_a_generated_token_are_not_used(service: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """More is said to be generated than the trainer keeps logits of."""
    product = noting(monkeypatch)
    model = Through(tiny(tied=False), kept)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    every = BATCH.attention_mask.clone()
    assert sent(service, hook, model, [kept] * 3, loss_mask=every) == [len(BATCH.sequences)] * 3
    assert product.call_count == 3
    hook.close()


def test_a_packed_row_and_one_that_the_forward_pads(
    service: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = noting(monkeypatch)
    model = tiny(tied=False)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    lengths = [len(sequence) for sequence in BATCH.sequences]
    ids = torch.tensor([PACKED])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    generated = torch.cat([(torch.arange(n) >= p).long() for n, p in zip(lengths, BATCH.prompt_lengths, strict=True)])[
        None
    ]
    for version, padding in enumerate((0, 0, 5)):
        told: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "loss_mask": generated}
        given = {name: nn.functional.pad(tensor, (0, padding)) for name, tensor in (("i", ids), ("p", positions))}
        mask = nn.functional.pad(apart(lengths), (0, padding, 0, padding), value=torch.finfo(torch.float32).min)
        with torch.no_grad(), hook.capture(**told, policy_version=version, temperature=TEMPERATURE):
            model(given["i"], position_ids=given["p"], attention_mask=mask[None, None])
    assert hook.flush(20)
    assert product.call_count == 1
    first, *others = numbers(service, tmp_path)
    assert len(others) == 2
    for found in others:
        for a, b in zip(found, first, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)
    hook.close()


def apart(lengths: list[int]) -> Tensor:
    """The mask [T, T] that keeps the rollouts of a packed row apart."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    T = len(owner)
    sees = (owner[:, None] == owner[None]) & torch.ones(T, T).tril().bool()
    return torch.where(sees, 0.0, torch.finfo(torch.float32).min)


def test_nothing_of_the_forward_is_kept_and_nothing_hooked_is_left(service: Receiver) -> None:
    model = Through(tiny(tied=False), whole)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    sent(service, hook, model, [whole] * 2)
    assert (hook._reader.own._made, hook._reader.own._forward, hook._reader.own._errors) == (None, None, [])
    assert hook._reader.own.expected == "logits"
    hook._reader.own.expected = None
    sent(service, hook, model, [without_head])
    without_head(model.module, BATCH)
    assert hook._reader.own._forward is None, "no capture is on"
    hook.close()
    left = [one for m in model.modules() for one in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    assert not left


def test_a_fused_forward_that_is_expected_holds_no_state_longer_for_us(service: Receiver) -> None:
    model = Through(tiny(tied=False), fused)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), own_log_probs=True, strict=True)
    bytes_of_last = []

    def note(*_: Any) -> None:
        last = hook._reader.own._forward.last if hook._reader.own._forward else None
        bytes_of_last.append(None if last is None else last.untyped_storage().nbytes())

    model.module.model.register_forward_hook(note)
    sent(service, hook, model, [fused] * 3)
    assert bytes_of_last[0], "the first forward may still make logits"
    assert bytes_of_last[1:] == [0, 0]
    hook.close()


def test_only_a_slice_of_whole_rows_is_taken_for_one() -> None:
    last = torch.randn(4, 4, 8)
    other = torch.randn(4, 4, 8)
    taken = {"all": last, "the last two": last[:, 2:], "rows in a row": last.reshape(16, 8), "the first": last[:, :1]}
    left = {
        "every second": last[:, ::2],
        "turned": last.transpose(0, 1),
        "another": other,
        "a copy": last.clone(),
        "half of each": last[:, :, :4],
        "two rollouts": last[:2],
        "one for all": last[:, :1].expand(4, 4, 8),
        "over the seam": last.reshape(-1)[4:-4].reshape(15, 8),
    }
    for name, given in (taken | left).items():
        found = _logits(last, given, torch.zeros(*given.shape[:-1], 5))
        assert (found is not None) == (name in taken), name
    assert _logits(last, last, torch.zeros(4, 3, 5)) is None, "not of its rows"
    assert _logits(last, last, torch.zeros(4, 4, 5, dtype=torch.int64)) is None


def test_rows_are_found_where_a_plain_look_finds_them() -> None:
    """Against indices written out, for positions 3 to 8 of 11 in 4 rows."""
    table = torch.arange(4 * 11).reshape(4, 11)
    part = OwnRows(table[:, 3:8].reshape(-1), begin=3, kept=5, length=11)
    rows = table[:, 3:8].reshape(-1)
    assert part.hold(rows.numpy())
    assert torch.equal(part.values[part.at(rows)], rows)
    for outside in (2, 8, 4 * 11 + 3):
        assert not part.hold(torch.tensor([3, outside]).numpy())


def test_the_logits_of_chosen_tokens_are_those_of_the_product() -> None:
    torch.manual_seed(0)
    last, head = torch.randn(50, 32, dtype=torch.float64), torch.randn(VOCAB, 32, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (50,))
    for logit_map in (wire.LogitMap(), wire.LogitMap(softcap=5.0), wire.LogitMap(scale=0.5)):
        logits = logit_map.apply(last @ head.T) / 0.7
        found = chosen_logits(last.float(), head.float(), ids, temperature=0.7, logit_map=logit_map)
        torch.testing.assert_close(found.double(), logits.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
