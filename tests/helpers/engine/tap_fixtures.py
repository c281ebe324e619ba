"""Requests as an engine decodes them, for the tests of the tap: the text is fixed, drafts are right by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_hooks.engines.tap.collected import Request, RequestSampling
from rl_hooks.engines.tap.rows import Head, Step, as_told

VOCAB, HIDDEN, AUX, STOP = 30, 4, 2, 1
GENERATOR = torch.Generator().manual_seed(0)
HEAD = Head(torch.randn(VOCAB, HIDDEN, generator=GENERATOR))
PLAIN = RequestSampling(1.0, 1.0, 0)


def states(tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The target's last state after a token: a function of token and position, so that a mix-up shows."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    return table[torch.tensor(tokens)] + 0.01 * torch.tensor(positions)[:, None]


def truncated(law: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """What top-k, then top-p, leave of log-probabilities [n, V], normalised again; -inf is cut off."""
    p, order = law.exp().sort(dim=-1, descending=True)
    p[:, top_k or len(p[0]) :] = 0.0
    p /= p.sum(-1, keepdim=True)
    p *= p.cumsum(-1) - p < top_p
    p /= p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p).log()


class Script:
    """One request as an engine would decode it: the text is fixed, drafts are right or wrong by chance."""

    def __init__(self, name: str, prompt: list[int], text: list[int], *, cached: int = 0) -> None:
        self.name, self.tokens, self.prompt = name, prompt + text, len(prompt)
        self.computed = cached
        self.done = False

    def rows(self, draw: random.Random, chunk: int, depth: int) -> tuple[list[int], int, int]:
        """Tokens of this step's rows, how many of them are rejected, and the token after the last that holds."""
        if self.computed < self.prompt:  # prefill, perhaps in part
            end = min(self.prompt, self.computed + chunk)
            rows = self.tokens[self.computed : end]
            self.computed = end
            sampled = self.tokens[end] if end == self.prompt else draw.randrange(VOCAB)  # garbage, to be discarded
            return rows, 0, sampled
        right = draw.randint(0, depth)
        true = self.tokens[self.computed : self.computed + 1 + right]
        held = len(true)
        beyond = self.computed + held >= len(self.tokens)
        wrong = [draw.randrange(VOCAB) for _ in range(depth + 1 - held)]
        self.computed += held
        self.done = beyond
        # Once the text has ended the engine may still have accepted more: any token.
        return true + wrong, len(wrong), draw.randrange(VOCAB) if beyond else self.tokens[self.computed]

    def request(self, **changes: Any) -> Request:
        facts: dict[str, Any] = {"sampling": PLAIN, "stop_ids": frozenset({STOP}), "max_tokens": None}
        return Request(self.name, tuple(self.tokens[: self.prompt]), **(facts | changes))


def step(parts: list[tuple[Script, int, list[int], int, int]]) -> Step:
    """(request, first position, tokens of its rows, rejected, sampled) of each."""
    counts = np.array([len(tokens) for _, _, tokens, _, _ in parts], dtype=np.int64)
    tokens = [t for _, _, row, _, _ in parts for t in row]
    positions = [start + i for _, start, row, _, _ in parts for i in range(len(row))]
    last = states(tokens, positions)
    padding = torch.zeros(3, dtype=torch.int32)  # engines pad to a fixed shape
    return Step(
        request_ids=[sequence.name for sequence, *_ in parts],
        first_rows=np.cumsum([0, *counts[:-1]], dtype=np.int64),
        row_counts=counts,
        input_ids=torch.cat([torch.tensor(tokens, dtype=torch.int32), padding]),
        positions=torch.tensor(positions),
        aux=[last * (i + 2) for i in range(AUX)],
        last=last,
        drafted=np.zeros(len(parts), dtype=np.int64),
        told=torch.tensor([[rejected, sampled] for *_, rejected, sampled in parts]),
        outcomes=as_told,
    )


class Params:
    """Sampling parameters as vLLM's own: by default nothing is said."""

    __struct_fields__ = (
        *("temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "max_tokens", "min_p", "min_tokens"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "extra_args"),
        *("thinking_token_budget", "watermarking", "trace_decode_token_ids", "of_the_next_vllm", "_eos_token_id"),
    )

    def __init__(self, **said: Any) -> None:
        nothing: dict[str, Any] = dict.fromkeys(self.__struct_fields__)
        nothing |= dict.fromkeys(("min_p", "min_tokens", "presence_penalty", "frequency_penalty"), 0.0)
        vars(self).update(nothing | {"repetition_penalty": 1.0, "bad_words": [], "of_the_next_vllm": "plain"} | said)


def scheduled(**changes: Any) -> Any:
    """A request as vLLM's scheduler hands it to the model runner, and as the engine core gets it."""
    params = Params(
        temperature=0.7,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=[7],
        all_stop_token_ids={7, 9},
        eos_token_id=9,
        _eos_token_id=9,
        ignore_eos=False,
        max_tokens=20,
    )
    new = SimpleNamespace(
        req_id="r", request_id="r", prompt_token_ids=[1, 2], sampling_params=params, mm_features=[], lora_request=None
    )
    for name, value in changes.items():
        setattr(params if hasattr(params, name) else new, name, value)
    return new
