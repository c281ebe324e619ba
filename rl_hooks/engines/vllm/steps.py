"""What vLLM says of its requests and steps: new requests of the scheduler, and the arguments of the drafter's call.

That call is `propose_draft_token_ids` in the V1 model runner, `speculator.propose` in V2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl_hooks.engines.tap.collected import Request, RequestSampling, shared_sampling
from rl_hooks.engines.tap.feature_tap import TapUnsupportedError
from rl_hooks.engines.tap.rows import Step, as_told, of_tokens
from rl_hooks.engines.vllm import KNOWN_RELEASES
from rl_hooks.sending.copies import to_device

#: Sampling parameters that do not change the distribution of a token: they say when a request ends, and what the answer
#: holds. temperature, top_p and top_k do change it, and are sent along.
_HARMLESS: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("repetition_detection", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length"),
        *("skip_reading_prefix_cache", "truncate_prompt_tokens", "routed_experts_prompt_start"),
    )
)
#: Keys of `extra_args` that vLLM itself reads, and that do not change a token's distribution.
_TRANSFERS: Final = frozenset(("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"))
#: The parameters that the tap reads, by name, so that vLLM may add and reorder others.
V1_ARGUMENTS: Final = ("scheduler_output", "sampled_token_ids", "hidden_states", "aux_hidden_states")
V2_ARGUMENTS: Final = ("input_batch", "last_hidden_states", "aux_hidden_states", "num_rejected", "last_sampled")

Named = Callable[..., dict[str, Any]]
#: (model runner, arguments of the drafter's call, requests that are wanted) -> the step of those.
Read = Callable[[Any, Mapping[str, Any], Collection[str]], Step | None]


def named_arguments(function: Callable[..., Any], wanted: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """A function that maps a call's arguments to parameter names; raises TapUnsupportedError if a name is missing."""
    signature = inspect.signature(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    if missing := [one for one in wanted if one not in signature.parameters]:
        raise TapUnsupportedError(
            f"{name} has no parameter {', '.join(missing)} in this vLLM; it takes {', '.join(signature.parameters)}. "
            f"The tap knows {KNOWN_RELEASES}"
        )
    return lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments


def unlike_policy(request: Any) -> str:
    """What makes a request draw from another distribution than the policy's plain one; "" where nothing does.

    It may be vLLM's own request or the scheduler's. Any sampling parameter that is not known to be harmless must have
    its default, because new vLLM releases add some.
    """
    params = request.sampling_params
    if params is None:
        return "no sampling parameters"
    if not request.prompt_token_ids or getattr(request, "prompt_embeds", None) is not None:
        return "a prompt that is not token ids"
    if request.mm_features:
        return "images"
    if request.lora_request is not None:
        return "LoRA"
    unset = type(params)()
    for name in params.__struct_fields__:
        if name in _HARMLESS or name.startswith("_"):
            continue
        value = getattr(params, name)
        if value != getattr(unset, name) and not _means_nothing(name, value):
            return str(name)  # not its value, which may be a user's text
    return ""


def _means_nothing(name: str, value: Any) -> bool:
    if name == "extra_args":
        return set(value or ()) <= _TRANSFERS
    if name == "min_tokens":
        # 1 keeps the first token from being an end. No drafter drafts that token, so no round depends on it.
        return bool(value <= 1)
    return name == "watermarking" and value is False  # vLLM resolves None to what this engine does


def request_of(new: Any) -> Request | None:
    """A request of the scheduler's, if it can be collected from its beginning."""
    params = new.sampling_params
    if is_resumed(new) or unlike_policy(new):
        return None
    stop = frozenset(params.stop_token_ids or ()) if params.ignore_eos else frozenset(params.all_stop_token_ids)
    if not params.ignore_eos and params.eos_token_id is not None:
        stop |= {params.eos_token_id}
    return Request(new.req_id, new.prompt_token_ids, sampling_of(params), stop, params.max_tokens)


def is_resumed(new: Any) -> bool:
    """Whether the scheduler brings a preempted request again, with what it has generated, as V2 does.

    Older weights may have drawn that.
    """
    return len(getattr(new, "prefill_token_ids", None) or ()) > len(new.prompt_token_ids or ())


def sampling_of(params: Any) -> RequestSampling:
    """How vLLM's sampling parameters draw a token."""
    return shared_sampling(float(params.temperature), float(params.top_p), max(0, int(params.top_k)))


def leaves_out_truncated(config: Any) -> bool:
    """Whether an engine of this configuration collects no request with top_p or top_k.

    Where the head is split over ranks, no rank sees what they leave of the distribution. Replay needs it if drafts are
    sampled.
    """
    sampled = getattr(config.speculative_config, "draft_sample_method", None) not in (None, "greedy")
    return sampled and config.parallel_config.tensor_parallel_size > 1


def drafter_call(runner: Any) -> tuple[Any, str, Read, tuple[str, ...]]:
    """Where the drafter gets the target's states: the object, its method, how to read the arguments, and which."""
    if hasattr(runner, "propose_draft_token_ids"):
        return runner, "propose_draft_token_ids", step_v1, V1_ARGUMENTS
    if hasattr(getattr(runner, "speculator", None), "propose"):
        return runner.speculator, "propose", step_v2, V2_ARGUMENTS
    raise TapUnsupportedError(f"{type(runner).__name__} calls its drafter in a way that the tap does not know")


def step_v1(runner: Any, given: Mapping[str, Any], wanted: Collection[str]) -> Step | None:
    """Read a step from V1_ARGUMENTS of `propose_draft_token_ids`; None without a `wanted` request.

    sampled_token_ids is a tensor [requests, drafts + 1] padded with -1, or a list of lists.
    """
    scheduled, sampled, hidden, aux = (given[name] for name in V1_ARGUMENTS)
    drafts = scheduled.scheduled_spec_decode_tokens
    # By the names that are wanted: those of all that run are many.
    found = runner.input_batch.req_id_to_index
    placed = sorted((found[name], name) for name in wanted if name in found)
    if aux is None or not placed:
        return None
    chosen, device = [name for _, name in placed], hidden.device
    places = np.array([place for place, _ in placed])
    begins = runner.query_start_loc.np
    if isinstance(sampled, Tensor):
        told = sampled.index_select(0, to_device(device, places))  # [requests, drafts + 1]
    else:
        lists = [sampled[i] for i in places]
        width = max((len(tokens) for tokens in lists), default=0) or 1
        told = torch.tensor([[*tokens, *[-1] * (width - len(tokens))] for tokens in lists], device=device)
    return Step(
        request_ids=chosen,
        first_rows=begins[places].astype(np.int64),
        row_counts=(begins[places + 1] - begins[places]).astype(np.int64),
        input_ids=getattr(runner.input_ids, "gpu", runner.input_ids),
        positions=getattr(runner.positions, "gpu", runner.positions),
        aux=aux,
        last=hidden,
        drafted=np.array([len(drafts.get(name, ())) for name in chosen]),
        told=told,
        outcomes=of_tokens,
    )


def step_v2(_: Any, given: Mapping[str, Any], wanted: Collection[str]) -> Step | None:
    """Read a step from V2_ARGUMENTS of `speculator.propose`, where `last_sampled` is by request state; else as V1."""
    batch, hidden, aux, rejected, last_sampled = (given[name] for name in V2_ARGUMENTS)
    names = batch.req_ids[: batch.num_reqs]
    places = np.flatnonzero(np.fromiter(map(wanted.__contains__, names), np.bool_, len(names)))
    if aux is None or not len(places):
        return None
    begins = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
    on_device = to_device(hidden.device, places)
    last = last_sampled[batch.idx_mapping[on_device]]
    return Step(
        request_ids=[names[i] for i in places],
        first_rows=begins[places],
        row_counts=np.diff(begins)[places],
        input_ids=batch.input_ids,
        positions=batch.positions,
        aux=aux,
        last=hidden,
        drafted=np.zeros(len(places), np.int64),  # not asked for
        told=torch.stack([rejected[on_device].long(), last.reshape(len(places)).long()], dim=1),
        outcomes=as_told,
    )
