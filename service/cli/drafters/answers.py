"""Rollouts before RL begins: the policy answers prompts, and the features of its answers go to the service.

A drafter that learnt from the policy's own answers to the prompts of the RL run begins it with a higher acceptance
length than one that was trained on other text. The service needs nothing new for it: to its worker these are rollouts
of policy version 0, and the RL run goes on from there under the same name.

Legend: B rollouts, S tokens of the longest one, prompt included.
"""

from __future__ import annotations

import inspect
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_hooks.errors import HookError
from rl_hooks.trainer.hook import DrafterHook
from rl_hooks.trainer.plan import UniqueId
from rl_hooks.wire import prompt_hash

POLICY_VERSION = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. The drafter fits the RL run only if that draws them alike."""

    batch: int = 16  # answers drawn at once
    max_new_tokens: int = 512
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One batch on its way to the service."""

    rollout_id: str  # its first
    rollouts: int
    response_tokens: int


def read_prompts(path: Path, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[list[int]]:
    """Token ids of each line's prompt.

    A `.jsonl` line is an object whose `prompt` (or `messages`) is a text, taken as it stands, or a list of chat
    messages, to which the tokenizer's chat template is applied, with `chat_template_kwargs` and the line's own `tools`
    and `chat_template_kwargs`. An answer that `messages` ends with, as in files for SFT, is left out. A line of any
    other file is a text. Raises HookError, which names the line.
    """
    found = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line = raw.decode().removesuffix("\r")
            if line.strip():
                ids = _tokens(line, tokenizer, chat_template_kwargs or {}, rows=path.suffix == ".jsonl")
                found.append([int(token) for token in ids])
        except Exception as error:  # a chat template may raise anything
            raise HookError(f"{path}, line {number}: {error}") from error
    if not found:
        raise HookError(f"{path} holds no prompts; expected one in each line")
    return found


def _tokens(line: str, tokenizer: Any, chat_template_kwargs: Mapping[str, Any], *, rows: bool) -> Sequence[int]:
    """Token ids of one line's prompt. `rows`: it is a JSON object, and no text. Raises HookError among others."""
    prompt: Any = line
    options: dict[str, Any] = {}
    ids: Sequence[int]
    if rows:
        try:
            prompt, options = _asked(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise HookError(f"expected an object with a prompt or messages, got {line[:60]!r}") from None
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif not prompt or prompt[-1]["role"] == "assistant":
        raise HookError(
            f"expected a chat that ends with a message to the policy, got {line[:60]!r}. "
            "Leave the answer out of the prompt"
        )
    else:
        options = {**chat_template_kwargs, **options}
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
    if not ids:
        raise HookError("the prompt has no tokens")
    return ids


def _asked(row: Any) -> tuple[Any, dict[str, Any]]:
    """A line's prompt and what it gives the chat template. Raises KeyError or TypeError where it is no such line."""
    prompt = row["prompt"] if "prompt" in row else row["messages"]
    if not isinstance(prompt, str):
        roles = [message["role"] for message in prompt]
        answers = 0 if "prompt" in row else sum(1 for _ in itertools.takewhile("assistant".__eq__, reversed(roles)))
        prompt = prompt[: len(roles) - answers]
    tools = {"tools": row["tools"]} if row.get("tools") else {}  # some templates mention tools for an empty list, too
    return prompt, {**tools, **(row.get("chat_template_kwargs") or {})}


def send_rollouts(
    model: Any, hook: DrafterHook, prompts: Sequence[Sequence[int]], rollouts: int, sampling: Sampling, *, seed: int
) -> Iterator[Sent]:
    """Draw `rollouts` answers, the prompts in random order, and yield each batch once it was handed to the hook.

    From the second pass on, prompts get other hashes, so that they count as new ones: a prompt that was trained on
    judges no drafter. RL's own prompts must count as new, too.
    """
    hook.session.id = ""  # no start of the trainer: the RL run begins at this version, too, and goes on with this one's
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(prompts), generator=generator).tolist() for _ in itertools.count())
    chosen = itertools.islice(itertools.chain.from_iterable(orders), rollouts)
    attempt = uuid.uuid4().hex[:8]  # rollouts of another warm-up of the run have other ids
    salt = int(attempt[:7], 16)
    for number in itertools.count():
        passes = number * sampling.batch // len(prompts)
        part = [prompts[n] for n in itertools.islice(chosen, sampling.batch)]
        if not part:
            return
        ids_BS, answer_BS, real_BS = _answers(model, part, sampling)
        names = [UniqueId(f"warmup-{attempt}-{number}-{n}") for n in range(len(part))]
        narrow = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        with (
            torch.no_grad(),
            hook.capture(
                input_ids=ids_BS,
                attention_mask=real_BS,
                loss_mask=answer_BS,
                policy_version=POLICY_VERSION,
                temperature=sampling.temperature,
                rollout_ids=names,
                prompt_hashes=[prompt_hash([passes, salt, *prompt]) for prompt in part] if passes else None,
            ),
        ):
            model(input_ids=ids_BS, attention_mask=real_BS, use_cache=False, **narrow)
        yield Sent(names[0], len(part), int(answer_BS.sum()))


@torch.no_grad()
def _answers(model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one answer to each prompt: ids, whether a token is the answer's, whether it is one at all; all [B, S].

    They are padded on the right, so that positions are what a forward counts by itself.
    """
    from transformers import GenerationConfig

    ends, pad = _ending_tokens(model)
    width = max(map(len, prompts))
    asked = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)  # [B, width]
    known = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
    )
    own = model.generation_config
    model.generation_config = config  # the model's own may draw from another distribution than the head's (a penalty)
    try:
        drawn = model.generate(asked, attention_mask=known)
    finally:
        model.generation_config = own
    answers = [_until_the_end(row, ends) for row in drawn[:, width:].tolist()]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], device=model.device)
    place = torch.arange(longest, device=model.device)
    lengths = torch.tensor([[len(text)] for text in texts], device=model.device)
    begins = torch.tensor([[len(prompt)] for prompt in prompts], device=model.device)
    real = place < lengths
    return ids, (place >= begins) & real, real.long()


def _ending_tokens(model: Any) -> tuple[list[int], int]:
    """The tokens that end an answer, and one to pad with."""
    own = model.generation_config
    ends = own.eos_token_id if own.eos_token_id is not None else model.config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = own.pad_token_id if own.pad_token_id is not None else ends[0] if ends else 0
    return [int(one) for one in ends], int(pad)


def _until_the_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends an answer, that one included."""
    for place, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens)
