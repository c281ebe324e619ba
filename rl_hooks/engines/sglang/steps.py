"""What SGLang says of its requests and steps: how a request is drawn, and the target's rows in a prefill and a round.

In a prefill (`TpModelWorker.forward_batch_generation`) each request has the rows that its prefix cache does not hold.
In a round (`EAGLEWorkerV2.verify`) it has as many rows as a chain has tokens: the last token and the drafts after it.
Both return a `LogitsProcessorOutput` with the auxiliary states of all rows, packed, and (`keep_last_hidden_states`) the
final ones. On a GPU these are outputs of a captured graph: SGLang slices them after each replay, and the next graph
may write over them.

Written against 0.5.23; tests/helpers/trainer/contract_fixtures.py has what it reads.

Legend: A aux layers, H hidden size, R requests of a batch, K tokens of a round.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from rl_hooks.engines.tap.collected import Request, RequestSampling, shared_sampling
from rl_hooks.engines.tap.feature_tap import TapUnsupportedError
from rl_hooks.engines.tap.rows import Head, Ints, Step, of_counted
from rl_hooks.sending.copies import HostCopies, to_device
from rl_hooks.sending.features import score_logits
from rl_hooks.wire import HIGHEST_TEMPERATURE

#: Sampling parameters that do not change the distribution of a token: they say when a request ends, and what the answer
#: holds. temperature, top_p and top_k do change it, and are sent along.
_HARMLESS: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "n", "sampling_seed", "max_new_tokens", "ignore_eos", "stream_interval"),
        *("stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs", "stop_str_max_len", "no_stop_trim"),
        *("stop_regex_max_len", "skip_special_tokens", "spaces_between_special_tokens", "is_normalized"),
    )
)
#: What must not be set in a request: adapters, embeddings, images, a session that goes on, processors of logits.
_UNSET: Final = (
    *("lora_id", "input_embeds", "positional_embed_overrides", "token_type_ids", "multimodal_inputs", "session"),
    *("custom_logit_processor", "grammar"),
)
#: SGLang's own requests, by which it looks whether it is well.
HEALTH_CHECK: Final = "HEALTH_CHECK"
#: `top_k` where nothing is cut off.
_WHOLE_VOCABULARY: Final = 1 << 30


def is_answered(request: Any) -> bool:
    """Whether it is a client's request for an answer: no health check of SGLang's own, none of the prompt alone."""
    return bool(
        not request.rid.startswith(HEALTH_CHECK)
        and request.sampling_params.max_new_tokens != 0
        and request.origin_input_ids
    )


def unlike_policy(request: Any, *, draws: bool) -> str:
    """What makes a request draw from another distribution than the policy's plain one; "" where nothing does.

    `draws`: this server does not verify greedily. Any sampling parameter that is not known to be harmless must have its
    default, because new releases add some.
    """
    params = request.sampling_params
    for name in _UNSET:
        if getattr(request, name, None) is not None:
            return name
    sampling = sampling_of(params)
    if sampling.temperature > 0 and not draws:
        return "a temperature, which this server verifies greedily,"
    if sampling.temperature > HIGHEST_TEMPERATURE:
        return f"a temperature above {HIGHEST_TEMPERATURE}"
    if sampling.top_p < 1 and sampling.top_k:  # SGLang draws the first token of these by another rule than the others
        return "top_p together with top_k"
    unset = type(params)()
    for name in params.__struct_fields__:
        value, default = getattr(params, name), getattr(unset, name)
        if name in _HARMLESS or value == default or (not value and not default):
            continue
        if name == "min_new_tokens" and value == 1:  # the first token is no end; no drafter drafts that token
            continue
        return str(name)  # not its value, which may be a user's text
    return ""


def sampling_of(params: Any) -> RequestSampling:
    """How SGLang's sampling parameters draw a token. It turns temperature 0 into the most probable token, `top_k` 1."""
    if params.top_k == 1:
        return shared_sampling(0.0, 1.0, 0)
    return shared_sampling(float(params.temperature), float(params.top_p), int(params.top_k) % _WHOLE_VOCABULARY)


def request_of(request: Any) -> Request:
    """The facts about a plain request."""
    params, stops = request.sampling_params, set[int]()
    if not params.ignore_eos:  # it switches off all of these
        tokenizer = getattr(request, "tokenizer", None)
        stops |= {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        stops |= {*(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
        if (end := getattr(tokenizer, "eos_token_id", None)) is not None:
            stops.add(end)
    sampling = sampling_of(params)
    return Request(request.rid, request.origin_input_ids, sampling, frozenset(stops), params.max_new_tokens)


@dataclass(frozen=True, slots=True)
class LogitsHead(Head):
    """The policy's head where its logits are at hand: what is scored are these, with the policy's map on them."""

    def score(
        self, last_NH: Tensor, labels_N: Tensor, temperature_N: float | Tensor, top_p: float = 1.0, top_k: int = 0
    ) -> tuple[Tensor, Tensor]:
        """`Head.score` of logits [N, V]."""
        labels = labels_N.clamp(min=0)
        logits_NV = last_NH
        return score_logits(
            lambda rows: logits_NV[rows],
            logits_NV.shape[1],
            labels,
            temperature=temperature_N,
            top_p=top_p,
            top_k=top_k,
        )


_LOGITS: Final = LogitsHead(torch.empty(0))


def with_scores(step: Step, logits_NV: Tensor, labels_N: Tensor, samplings: Sequence[RequestSampling]) -> Step:
    """The step with the scores of its requests' newest rows: as many of each as there are logits.

    SGLang joins the logits of its ranks, of the rows that may predict an answer only: of a prompt, of the last one.
    """
    each = len(logits_NV) // len(samplings)
    scores = _LOGITS.score_step(logits_NV, labels_N, samplings, np.full(len(samplings), each, np.int64))
    ends = np.repeat(step.first_rows + step.row_counts, each)
    rows = ends - np.tile(np.arange(each, 0, -1), len(samplings))
    copies = HostCopies({"scores": scores})
    return step.scored(rows, lambda: copies.wait()["scores"])


def captured_layers(model: nn.Module) -> tuple[int, ...]:
    """The layers whose input SGLang's policy hands to the drafter, in the order in which it packs them."""
    for module in model.modules():
        layers = getattr(module, "layers_to_capture", None)
        if isinstance(layers, list | tuple) and layers:
            return tuple(sorted(int(layer) for layer in layers))
    raise TapUnsupportedError(f"{type(model).__name__} does not say which layers it hands to the drafter")


def keep_final_states(model: nn.Module) -> None:
    """Have the policy's `LogitsProcessor` return the final states of all rows, beside the auxiliary ones.

    Must be called before CUDA graphs are captured: then SGLang makes them an output of its graphs.
    """
    kept = [module for module in model.modules() if hasattr(module, "keep_last_hidden_states")]
    if not kept:
        raise TapUnsupportedError(
            "this SGLang's LogitsProcessor cannot return the final states beside the auxiliary ones (0.5.23 can)"
        )
    for module in kept:
        module.keep_last_hidden_states = True  # type: ignore[assignment]


def prefill_step(batch: Any, result: Any, wanted: Container[str]) -> Step | None:
    """The rows of a prefill, or of a chunk of one; None without a `wanted` request."""
    places = places_of(batch.reqs, wanted)
    if not len(places):
        return None
    lengths, begins = (np.array(list(each), np.int64) for each in (batch.extend_lens, batch.prefix_lens))
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) + np.repeat(begins - firsts, lengths)
    last = _last(result, len(positions))
    on_device = to_device(last.device, places)
    sampled = result.next_token_ids.index_select(0, on_device).long()
    return Step(
        request_ids=[batch.reqs[i].rid for i in places],
        first_rows=firsts[places],
        row_counts=lengths[places],
        input_ids=batch.input_ids,
        positions=to_device(last.device, positions),
        aux=(result.logits_output.hidden_states,),
        last=last,
        drafted=np.zeros(len(places), np.int64),
        told=torch.stack([torch.ones_like(sampled), sampled], dim=1),
        outcomes=of_counted,
    )


def round_step(batch: Any, chains: Any, result: Any, wanted: Container[str]) -> Step | None:
    """The rows of a round. `chains`: SGLang's `EagleVerifyInput`. None without a `wanted` request."""
    places = places_of(batch.reqs, wanted)
    if not len(places):
        return None
    R, K = len(batch.reqs), int(chains.draft_token_num)
    last = _last(result, R * K)
    on_device = to_device(last.device, places)
    tokens_RK = result.next_token_ids.view(R, K).index_select(0, on_device)
    return Step(
        request_ids=[batch.reqs[i].rid for i in places],
        first_rows=places * K,
        row_counts=np.full(len(places), K, np.int64),
        input_ids=chains.draft_token,
        positions=chains.positions,
        aux=(result.logits_output.hidden_states,),
        last=last,
        drafted=np.full(len(places), K - 1, np.int64),
        told=torch.cat([result.accept_lens.index_select(0, on_device)[:, None], tokens_RK], dim=1),
        outcomes=of_counted,
    )


def _last(result: Any, rows: int) -> Tensor:
    """The final states. Raises RuntimeError where states are missing, or are not those of `rows` rows."""
    last: Tensor | None = result.logits_output.last_hidden_states
    aux: Tensor | None = result.logits_output.hidden_states
    if last is None or aux is None or len(last) != rows or len(aux) != rows:
        found = [None if one is None else tuple(one.shape) for one in (last, aux)]
        raise RuntimeError(f"expected final and auxiliary states of {rows} rows, got {found}")
    return last


def places_of(requests: Sequence[Any], wanted: Container[str]) -> Ints:
    """Where in a batch the `wanted` requests are."""
    return np.array([place for place, one in enumerate(requests) if one.rid in wanted], np.int64)
