"""What rounding does to logits is never refused, and a head or a model that computes something else is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trainer.capture_fixtures import LENGTHS, TEMPERATURE, inputs, run_once
from helpers.trainer.hooks_fixtures import VOCAB, Receiver, padded_batch, receiver, tiny_qwen3
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from transformers import Qwen3ForCausalLM

from rl_hooks.errors import WrongTargetError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.agreement import Agreement
from rl_hooks.sending.features import to_e4m3
from rl_hooks.wire import LogitMap

BATCH = padded_batch(LENGTHS)
ROWS, V, H = 32, 3000, 64
CAP = LogitMap(softcap=30.0)


@pytest.fixture(name="service")
def _service() -> Iterator[Receiver]:
    with receiver() as service:
        yield service


def policy(offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """Last states, a head and the tokens that follow, which are probable; `offset`: of all logits, from one channel."""
    draw = torch.Generator().manual_seed(0)
    last, head = torch.randn(ROWS, H, generator=draw), torch.randn(V, H, generator=draw)
    next_ids = torch.randint(0, V, (ROWS,), generator=draw)
    last += head[next_ids] * 0.4
    if offset:
        last[:, 7], head[:, 7] = 50.0, offset / 50.0
    return last, head / 3, next_ids


def times(own: Tensor, last: Tensor, head: Tensor, next_ids: Tensor, logit_map: LogitMap = LogitMap()) -> float:  # noqa: B008
    agreement = Agreement(logit_map, "lm_head")
    agreement.see_logits(own, next_ids, mapped=True)
    agreement.see_head(last, head, next_ids)
    agreement.compare(TEMPERATURE)
    assert agreement._found is not None
    return float(agreement._found.wait()["times"])


def rounded(last: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    return (last.to(dtype) @ head.to(dtype).T).to(dtype)


def float8(last: Tensor, head: Tensor, _: Tensor) -> Tensor:
    both = ((quantised.float() * scale[:, None]) for quantised, scale in map(to_e4m3, (last, head)))
    return (next(both) @ next(both).T).bfloat16()


def tf32(last: Tensor, head: Tensor, _: Tensor) -> Tensor:
    last, head = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (last, head))
    return last @ head.T


def masked(last: Tensor, head: Tensor, _: Tensor) -> Tensor:
    logits = last @ head.T
    logits[:, ::3] = torch.finfo(torch.float32).min
    logits[:, 1::7] = -torch.inf
    return logits


SOUND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "float32": lambda last, head, _: last @ head.T,
    "bfloat16": lambda last, head, _: rounded(last, head, torch.bfloat16),
    "float16": lambda last, head, _: rounded(last, head, torch.float16),
    "float8": float8,
    "tf32": tf32,
    "divided by the temperature": lambda last, head, _: rounded(last, head, torch.bfloat16).div_(TEMPERATURE),
    "log-probabilities": lambda last, head, _: rounded(last, head, torch.bfloat16).log_softmax(-1),
    "masked": masked,
    "not a number": lambda last, head, _: (last @ head.T) * torch.nan,
}
WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "half": lambda last, head, _: (last @ head.T) * 0.5,
    "a fifth more": lambda last, head, _: (last @ head.T) * 1.2,
    "cosine": lambda last, head, _: 10 * normalize(last) @ normalize(head).T,
    "another head": lambda last, head, _: last @ (head + 0.3 * head.std() * torch.randn(V, H)).T,
    "soft-capped": lambda last, head, _: LogitMap(softcap=8.0).apply(last @ head.T),
    "a bias": lambda last, head, _: last @ head.T + torch.randn(V),
    "4 bits": lambda last, head, _: last @ ((head * 4 / head.abs().max()).round() / 4 * head.abs().max()).T,
}


@pytest.mark.parametrize("offset", [0.0, 20.0])
@pytest.mark.parametrize("way", SOUND)
def test_what_rounding_does_is_never_refused(way: str, offset: float) -> None:
    found = policy(offset)
    assert not times(SOUND[way](*found), *found) > 0.6
    last, head, next_ids = found
    tiny_numbers = (last, head * 1e-3, next_ids)
    assert not times(SOUND[way](*tiny_numbers), *tiny_numbers) > 0.6
    if way in ("float32", "bfloat16", "float8", "tf32"):
        assert times(CAP.apply(SOUND[way](*found).float()).bfloat16(), *found, CAP) < 0.6


def float8_whole(last: Tensor, head: Tensor) -> Tensor:
    """With one factor of each matrix, as a float8 head multiplies."""
    largest = last.abs().max(), head.abs().max()
    both = ((x * (448 / most)).to(torch.float8_e4m3fn).float() for x, most in zip((last, head), largest, strict=True))
    return ((next(both) @ next(both).T) * largest[0] * largest[1] / 448**2).bfloat16()


def test_where_few_tokens_follow_the_vocabulary_is_judged_at_once_and_these_tokens_in_a_later_forward() -> None:
    for seed in (3, 4):  # the next token's logit, alone, is further off here than rounding brings a median
        draw = torch.Generator().manual_seed(seed)
        last, head = torch.randn(1, 256, generator=draw), torch.randn(V, 256, generator=draw)
        next_ids, agreement = torch.randint(0, V, (1,), generator=draw), Agreement(LogitMap(), "lm_head")
        for number in range(16):
            assert agreement.wanted, number
            agreement.see_logits(float8_whole(last, head), next_ids, mapped=True)
            agreement.see_head(last, head, next_ids)
            agreement.compare(1.0)
            agreement.judge()
        assert not agreement.wanted
        agreement = Agreement(LogitMap(), "lm_head")
        agreement.see_logits((last @ head.T) * 0.5, next_ids, mapped=True)
        agreement.see_head(last, head, next_ids)
        agreement.compare(1.0)
        with pytest.raises(WrongTargetError):  # the first forward shows it: no file goes before
            agreement.judge()


def test_a_padded_vocabulary_and_a_head_of_zeros_are_not_refused() -> None:
    last, head, next_ids = policy(0.0)
    head[V // 2 :] = 0.0
    next_ids = next_ids % (V // 2)
    assert times(rounded(last, head, torch.bfloat16), last, head, next_ids) < 0.6
    head[:] = 0.0
    assert not times(last @ head.T, last, head, next_ids) > 1.0


@pytest.mark.parametrize("way", WRONG)
def test_what_is_no_rounding_is_found(way: str) -> None:
    torch.manual_seed(1)
    found = policy(0.0)
    assert times(WRONG[way](*found), *found) > 1.2


def test_another_vocabulary_or_one_side_alone_is_not_compared() -> None:
    last, head, next_ids = policy(0.0)
    agreement = Agreement(LogitMap(), "lm_head")
    for own in (torch.zeros(ROWS, V + 1), torch.zeros(ROWS, 1), None):
        if own is not None:
            agreement.see_logits(own, next_ids, mapped=True)
        agreement.see_head(last, head, next_ids)
        agreement.compare(1.0)
        agreement.judge()
        assert agreement.wanted
    agreement.see_logits(torch.zeros(ROWS, V), next_ids, mapped=True)
    agreement.compare(1.0)
    assert agreement.wanted, "the head's side was of an earlier forward"
    for _ in range(12):
        agreement.compare(1.0)
    assert not agreement.wanted, "sixteen forwards of a fused loss: none of them shows logits"


# --- in the hook -----------------------------------------------------------------------------------------------------


class Halving(Qwen3ForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * linear(normalize(x, dim=-1), normalize(self.weight, dim=-1))


def halving() -> Any:
    model = tiny_qwen3()
    model.__class__ = Halving
    return model


def cosine() -> Any:
    model = tiny_qwen3(tied=False)
    weight, model.lm_head = model.lm_head.weight, Cosine(32, VOCAB, bias=False)
    model.lm_head.weight = weight
    return model


def by_parts(model: Any) -> Any:
    return model.lm_head(model.model(BATCH.input_ids, attention_mask=BATCH.attention_mask)[0])


@pytest.mark.parametrize(
    ("make", "forward", "named"),
    [
        (halving, None, r"lm_head \(Linear\) of Halving"),
        (cosine, None, r"lm_head \(Cosine\) of Qwen3ForCausalLM"),
        (cosine, by_parts, r"lm_head \(Cosine\) of Qwen3ForCausalLM"),
    ],
)
def test_a_policy_whose_logits_are_others_is_said_and_nothing_of_it_is_sent(
    service: Receiver, caplog: pytest.LogCaptureFixture, make: Any, forward: Any, named: str
) -> None:
    model = make()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(3):
            told = inputs(BATCH) | {"policy_version": version}
            with torch.no_grad(), hook.capture(**told):
                (forward or (lambda m: m(BATCH.input_ids, attention_mask=BATCH.attention_mask)))(model)
            assert hook.flush(20)
    assert not service.rollouts()
    stats = hook.stats()
    assert (stats["sent"], stats["dropped_error"], stats["failures"]) == (1, 1, 0), "the registration; one file"
    assert [named.replace("\\", "") in r.message and "logit_map=LogitMap(" in r.message for r in caplog.records] == [
        True
    ]
    hook.close()


def test_a_policy_whose_map_is_said_is_sent(service: Receiver) -> None:
    model = halving()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), logit_map=LogitMap(scale=0.5), strict=True)
    run_once(hook, model, BATCH)
    assert hook.flush(20)
    assert len(service.rollouts()) == 1
    assert not hook._reader.agreement.wanted
    hook.close()


def whole(model: Any) -> Any:
    return model(BATCH.input_ids, attention_mask=BATCH.attention_mask)


def autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return whole(model)


def inference(model: Any) -> Any:
    with torch.inference_mode():
        states = model.model(BATCH.input_ids, attention_mask=BATCH.attention_mask)[0]
        return model.lm_head(states.mul_(1 / TEMPERATURE))


def kept(model: Any) -> Any:
    return model(BATCH.input_ids, attention_mask=BATCH.attention_mask, logits_to_keep=13).logits.div_(TEMPERATURE)


def chosen(model: Any) -> Any:
    return model(BATCH.input_ids, attention_mask=BATCH.attention_mask, logits_to_keep=torch.arange(2, 18))


def divided(model: Any) -> Any:
    return model.lm_head(model.model(BATCH.input_ids, attention_mask=BATCH.attention_mask)[0] / TEMPERATURE)


def backbone_first(model: Any) -> Any:
    model.model(BATCH.input_ids, attention_mask=BATCH.attention_mask)
    return model(BATCH.input_ids.flip(1), attention_mask=BATCH.attention_mask)


class Valued(nn.Module):
    """A value head's numbers, under the name of logits; its policy is called by its parts."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.module = policy

    def forward(self) -> Any:
        states = self.module.model(BATCH.input_ids, attention_mask=BATCH.attention_mask)[0]
        return SimpleNamespace(logits=states[..., :1])


@pytest.mark.parametrize(
    ("forward", "compared"),
    [
        *[(whole, True), (autocast, True), (inference, True), (kept, True), (by_parts, True)],
        *[(chosen, False), (divided, False), (backbone_first, False)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_policy_is_sent_however_its_forward_is_called(
    service: Receiver, forward: Any, compared: bool, dtype: torch.dtype
) -> None:
    model = tiny_qwen3(tied=False).to(dtype)
    model.resize_token_embeddings(64, pad_to_multiple_of=64, mean_resizing=False)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    for version in range(2):
        with torch.no_grad(), hook.capture(**inputs(BATCH), policy_version=version, temperature=TEMPERATURE):
            forward(model)
    assert hook.flush(20)
    assert len(service.rollouts()) == 2, hook.stats()
    assert hook._reader.agreement.wanted != compared
    hook.close()


def test_a_value_heads_numbers_are_not_taken_for_logits(service: Receiver) -> None:
    model = Valued(tiny_qwen3())
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with torch.no_grad(), hook.capture(**inputs(BATCH), policy_version=0):
        model()
    assert hook.flush(20)
    assert len(service.rollouts()) == 1
    assert hook._reader.agreement.wanted
    hook.close()


def test_the_error_is_not_of_the_trainer() -> None:
    last, head, next_ids = policy(0.0)
    agreement = Agreement(LogitMap(), "lm_head (Odd) of Model")
    agreement.see_logits(last @ head.T * 0.5, next_ids, mapped=False)
    agreement.see_head(last, head, next_ids)
    agreement.compare(1.0)
    with pytest.raises(WrongTargetError, match=r"lm_head \(Odd\) of Model .* logit_map=LogitMap"):
        agreement.judge()


def test_a_policy_that_is_compiled_whole_is_sent_and_not_compared(service: Receiver) -> None:
    torch._dynamo.reset()
    policy: Any = torch.compile(tiny_qwen3(tied=False), backend="eager")
    hook = DrafterHook(policy, service.url, aux_layers=(1, 2, 3), strict=True)
    for version in range(2):
        run_once(hook, policy, BATCH, version)
    assert hook.flush(20)
    assert len(service.rollouts()) == 2, hook.stats()
    assert hook._reader.agreement.wanted
    hook.close()
