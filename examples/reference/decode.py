"""Reference speculative decoding: an EAGLE-3 chain, verified without loss. Written to be read and to be compared with.

Each round the drafter proposes K tokens, the target reads them in one forward pass, and rejection sampling keeps a
prefix and adds one token, so that the text is distributed exactly as without a drafter (Leviathan et al., Chen et al.
2023). After each round the drafter reads the kept tokens again with the target's true features, so that its step-0
keys are those of training, and replay α (drafter.replay.replay) is exact.

Sequences of different length share a batch: caches are addressed by slot, a mask says which slots hold text that was
kept, and positions are passed explicitly. Nothing is ever moved or cropped: a rejected draft leaves a masked slot.
So every layer of the target must be full attention: there the mask alone decides what a token sees. A sliding window
or a chunk would count slots, rejected ones included. A recurrent layer cannot forget a rejected draft. Such targets are
refused; draft for them with an engine (docs/guide/engines.md).

Legend: B sequences, L tokens read at once, K draft depth, V target vocabulary, D draft vocabulary, A aux layers,
H hidden, G key-value heads, hd head size, S slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.model.eagle3 import Eagle3Drafter
from examples.reference.cached import attend, embed, fuse

Drafting = Literal["probabilistic", "greedy"]

#: Models without attention whose configs name no kinds of layers.
_RECURRENT = ("rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba")


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses and how they came about, per prompt, in the order of the prompts."""

    tokens: list[list[int]]  # response, its EOS included
    logprobs: list[list[float]]  # of each response token under the sampling distribution (temperature 0: under 1)
    rounds: list[int]  # verification rounds; the first token comes from the prefill and belongs to none
    accepted: list[int]  # accepted drafts as engines count them: before the text is cut at EOS or max_tokens
    emitted: list[int]  # tokens that rounds added to the response, after the cut: len(tokens) - 1
    finished: list[Literal["eos", "length"]]

    @property
    def alpha(self) -> float:
        """Tokens per round, pooled over prompts; nan without a round."""
        rounds = sum(self.rounds)
        return sum(self.emitted) / rounds if rounds else float("nan")


def sampling_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Natural logarithm of p [.., V], what tokens are drawn from; temperature 0 puts all of it on the argmax."""
    if temperature < 0:
        raise DrafterError(f"temperature must not be negative, got {temperature}")
    if temperature == 0:
        certain = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        return certain.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def verify_chain(
    p_logprobs: Tensor,
    q_logprobs: Tensor | None,
    draft_ids: Tensor,
    *,
    vocabulary_ids: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Lossless verification of drafted chains: number of accepted drafts [B] and the token that follows them [B].

    p_logprobs [B, K+1, V]: the target's sampling distribution after the text and after each draft (-inf where p = 0, so
    top-p, top-k and temperature 0 work as they stand). q_logprobs [B, K, D]: what the drafts were *drawn from*, or None
    for greedy drafts, whose q is all on the draft. draft_ids [B, K]: *target* token ids. vocabulary_ids [D], ascending:
    target id of each draft-vocabulary entry (default: the target's own vocabulary). draft_lengths [B]: drafts of each
    sequence that exist (default: K).

    Draft j is accepted with probability min(1, p(x)/q(x)); after the first rejection the token is drawn from
    max(p - q, 0) normalised, after K acceptances from p.
    """
    B, K = draft_ids.shape
    if p_logprobs.ndim != 3 or p_logprobs.shape[:2] != (B, K + 1):
        raise DrafterError(
            f"expected p_logprobs [{B}, {K + 1}, V] for drafts [{B}, {K}], got {tuple(p_logprobs.shape)}"
        )
    V = p_logprobs.shape[2]
    device = p_logprobs.device
    if vocabulary_ids is None:
        vocabulary_ids = torch.arange(V, device=device)
    if q_logprobs is not None and q_logprobs.shape != (B, K, vocabulary_ids.numel()):
        raise DrafterError(f"expected q_logprobs [{B}, {K}, {vocabulary_ids.numel()}], got {tuple(q_logprobs.shape)}")
    lengths = torch.full((B,), K, device=device) if draft_lengths is None else draft_lengths

    p_draft = p_logprobs[:, :K].gather(2, draft_ids[:, :, None])[:, :, 0]  # [B, K]
    if q_logprobs is None:
        q_draft = torch.zeros_like(p_draft)
    else:
        columns = torch.searchsorted(vocabulary_ids, draft_ids.contiguous())
        q_draft = q_logprobs.gather(2, columns[:, :, None])[:, :, 0]
    # log(u) < log(p/q). A draft with p = 0 compares with -inf and is never accepted, not even for u = 0.
    draw = torch.rand(B, K, generator=generator, device=device, dtype=torch.float64).log()
    kept = (draw < (p_draft - q_draft).double()) & (torch.arange(K, device=device) < lengths[:, None])
    accepted = kept.long().cumprod(dim=1).sum(dim=1)  # [B]

    row = torch.arange(B, device=device)
    weights = p_logprobs[row, accepted].exp()  # [B, V]
    if K:
        # Only meaningful where a draft was rejected; the index is clamped for the others.
        at = accepted.clamp(max=K - 1)
        q = torch.zeros_like(weights)
        if q_logprobs is None:
            q.scatter_(1, draft_ids[row, at][:, None], 1.0)
        else:
            q[:, vocabulary_ids] = q_logprobs[row, at].exp().to(q.dtype)
        residual = (weights - q).clamp(min=0)
        # Where p = q to the last bit nothing is left, and a rejection could only come from rounding: p itself will do.
        use = (accepted < lengths) & (residual.sum(dim=1) > 0)
        weights = torch.where(use[:, None], residual, weights)
    return accepted, torch.multinomial(weights, 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    target: Any,
    drafter: Eagle3Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int | Collection[int] | None = None,
    temperature: float = 1.0,
    depth: int = 4,
    drafting: Drafting = "probabilistic",
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue every prompt until `eos_id` (or one of them) or `max_tokens`, with a drafter or (None) token by token.

    `target` is a transformers causal LM in eval mode, all its layers full attention (else `DrafterError`). Drafts are
    drawn from the drafter's softmax at the same temperature (as engines do), or are its argmax (`drafting="greedy"`,
    and always at temperature 0).
    """
    if not prompts or any(not prompt for prompt in prompts):
        raise DrafterError("expected one or more prompts of at least one token: generation starts from a prefill")
    if max_tokens < 1 or depth < 0 or drafting not in ("probabilistic", "greedy"):
        raise DrafterError(
            f"expected max_tokens >= 1, depth >= 0 and a drafting mode: {max_tokens=} {depth=} {drafting=}"
        )
    device = next(target.parameters()).device
    K = depth if drafter is not None else 0
    ids, lengths = _pad(prompts, device)
    columns = torch.arange(max(ids.shape[1], K + 1), device=device)
    real = columns[: ids.shape[1]] < lengths[:, None]

    reader = _TargetReader(target, drafter.config.aux_layers if drafter is not None else ())
    logits, aux = reader.read(ids, columns[: ids.shape[1]].expand_as(ids))
    reader.keep(real)
    logits = logits[torch.arange(len(prompts), device=device), lengths - 1][:, None]
    drafts, q = ids[:, :0], None
    accepted, latest = verify_chain(sampling_logprobs(logits, temperature), None, drafts, generator=generator)
    ledger = _Ledger(len(prompts), max_tokens, eos_id)
    ledger.add(latest[:, None], logits, accepted, temperature)
    chain = None
    if drafter is not None and K:
        draft_temperature = 0.0 if drafting == "greedy" else temperature
        chain = _DrafterReader(drafter, embedding(target), temperature=draft_temperature, generator=generator)
        chain.read(aux, _followed_by(ids[:, 1:], latest, lengths - 1), columns[: ids.shape[1]], real)
    position = lengths  # of `latest`, which the target has not read yet

    while not ledger.done():
        if chain is not None:
            drafts, q = chain.draft(K)
        positions = position[:, None] + columns[: K + 1]
        logits, aux = reader.read(torch.cat([latest[:, None], drafts], dim=1), positions)
        p = sampling_logprobs(logits, temperature)
        vocabulary_ids = None if chain is None else chain.vocabulary_ids
        accepted, latest = verify_chain(p, q, drafts, vocabulary_ids=vocabulary_ids, generator=generator)
        kept = columns[: K + 1] <= accepted[:, None]
        reader.keep(kept)
        emitted = _followed_by(drafts, latest, accepted)
        ledger.add(emitted, logits, accepted, temperature, is_round=True)
        if chain is not None:
            chain.read(aux, emitted, positions, kept)
        position = position + accepted + 1
    return ledger.result()


def embedding(target: Any) -> Tensor:
    """The embedding [V, H] of a transformers model, which its drafter shares."""
    weight: Tensor = target.get_input_embeddings().weight
    return weight.detach()


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] padded on the right, and their lengths [B].

    A padding row on the right still sees the text before it, so no row of attention is empty (which would give NaN).
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    return ids, lengths


def _followed_by(ids: Tensor, latest: Tensor, column: Tensor) -> Tensor:
    """Tokens [B, L+1]: those of ids [B, L], with `latest` [B] in place of number `column` [B]; the rest is padding."""
    return torch.cat([ids, latest[:, None]], dim=1).scatter(1, column[:, None], latest[:, None])


def _require_full_attention(target: Any) -> None:
    """Refuse targets whose layers look at more than the mask: they would give other text without any error."""
    config = target.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    found = [f"{kind} layers" for kind in sorted(kinds - {"full_attention"})]
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        found.append(f"sliding_window {config.sliding_window}")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        found.append("local layers")
    if config.model_type in _RECURRENT:
        found.append(f"recurrent layers ({config.model_type})")
    if getattr(config, "attention_chunk_size", None):
        found.append(f"attention_chunk_size {config.attention_chunk_size}")
    if found:
        raise DrafterError(
            f"the reference decoders need a target whose layers are all full attention, but {type(target).__name__} "
            f"has {', '.join(found)}: its rejected drafts would count as text. Decode it with an engine"
        )


class _TargetReader:
    """The target with its cache: reads tokens at positions, returns logits and the features the drafter wants."""

    def __init__(self, target: Any, aux_layers: Sequence[int]) -> None:
        """Raises `DrafterError` for a target with layers other than full attention."""
        _require_full_attention(target)
        self.target = target
        self.aux_layers = aux_layers
        self.cache: Any = None
        self.kept: Tensor | None = None  # bool[B, S]

    def read(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] and features [B, L, A·H] of ids [B, L], which see all kept slots and what precedes them."""
        new = torch.ones_like(ids, dtype=torch.bool)
        seen = new if self.kept is None else torch.cat([self.kept, new], dim=1)
        out = self.target(
            input_ids=ids,
            attention_mask=seen.long(),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(self.aux_layers),
        )
        self.cache, self.kept = out.past_key_values, seen
        if not self.aux_layers:
            return out.logits, out.logits[:, :, :0]
        # hidden_states[i] enters layer i; the last one is after the final norm and enters nothing.
        if max(self.aux_layers) >= len(out.hidden_states) - 1:
            raise DrafterError(f"aux layers {self.aux_layers} of a target with {len(out.hidden_states) - 1} layers")
        return out.logits, torch.cat([out.hidden_states[i] for i in self.aux_layers], dim=-1)

    def keep(self, kept: Tensor) -> None:
        """Say which of the slots just read [B, L] hold text that stays."""
        if self.kept is not None:
            self.kept[:, -kept.shape[1] :] = kept


class _DrafterReader:
    """The drafter with its cache of step-0 keys; the keys of later steps live for one chain only."""

    def __init__(
        self, drafter: Eagle3Drafter, embed_tokens: Tensor, *, temperature: float, generator: torch.Generator | None
    ) -> None:
        self.drafter = drafter
        self.embed_tokens = embed_tokens  # [V, H], the target's
        self.temperature = temperature  # of the drafts; 0 takes the best token
        self.generator = generator
        self.weights = drafter.weights()
        self.vocabulary_ids = drafter.to_target(
            torch.arange(drafter.config.draft_vocab_size, device=drafter.d2t.device)
        )
        self.keys: Tensor | None = None  # [B, G, S, hd]
        self.values: Tensor | None = None
        self.kept: Tensor | None = None  # bool[B, S]
        self.pre: Tensor | None = None  # [B, H] at the last kept row
        self.position: Tensor | None = None  # [B] of that row

    def read(self, aux: Tensor, following: Tensor, positions: Tensor, kept: Tensor) -> None:
        """Step 0 on rows with true features aux [B, L, A·H] and the token after each [B, L]; `kept` is a prefix."""
        B, L = following.shape
        old = kept[:, :0] if self.kept is None else self.kept
        causal = torch.ones(L, L, dtype=torch.bool, device=kept.device).tril().expand(B, L, L)
        positions = positions.expand(B, L)
        pre, keys, values = attend(
            self.drafter,
            embed(self.drafter, following, self.embed_tokens),
            fuse(self.drafter, aux),
            positions,
            self.keys,
            self.values,
            torch.cat([old[:, None, :].expand(B, L, -1), causal], dim=2),
            self.weights,
        )
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        self.kept = torch.cat([old, kept], dim=1)
        last = kept.sum(dim=1) - 1
        row = torch.arange(B, device=kept.device)
        self.pre, self.position = pre[row, last], positions[row, last]

    def draft(self, depth: int) -> tuple[Tensor, Tensor | None]:
        """A chain of drafts: target ids [B, K], and the log q that they were drawn from [B, K, D] (greedy: None)."""
        if self.pre is None or self.position is None or self.kept is None:
            raise DrafterError("the drafter drafts after it has read the prompt")
        pre, keys, values, seen = self.pre[:, None], self.keys, self.values, self.kept
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(depth):
            if step:
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
                embedding = embed(self.drafter, drafts[-1], self.embed_tokens)
                where = self.position[:, None] + step
                pre, key, value = attend(
                    self.drafter, embedding, pre, where, keys, values, seen[:, None, :], self.weights
                )
                keys, values = torch.cat([_some(keys), key], dim=2), torch.cat([_some(values), value], dim=2)
            logits = self.drafter.logits(pre)[:, 0].float()
            log_q = torch.log_softmax(logits / (self.temperature or 1.0), dim=-1)  # [B, D]
            if self.temperature == 0:
                choice = log_q.argmax(dim=-1, keepdim=True)
            else:
                choice = torch.multinomial(log_q.exp(), 1, generator=self.generator)
            drafts.append(self.drafter.to_target(choice))
            laws.append(log_q)
        return torch.cat(drafts, dim=1), None if self.temperature == 0 else torch.stack(laws, dim=1)


def _some(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise DrafterError("the drafter drafts after it has read the prompt")
    return tensor


@dataclass
class _Ledger:
    """What has been emitted; cuts each response at EOS or at its length and then counts no more for it."""

    sequences: int
    max_tokens: int
    eos_id: int | Collection[int] | None
    ends: frozenset[int] = field(init=False)
    tokens: list[list[int]] = field(init=False)
    logprobs: list[list[float]] = field(init=False)
    rounds: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    finished: list[Literal["eos", "length"] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = frozenset([self.eos_id] if isinstance(self.eos_id, int) else self.eos_id or ())
        self.tokens = [[] for _ in range(self.sequences)]
        self.logprobs = [[] for _ in range(self.sequences)]
        self.rounds = [0] * self.sequences
        self.accepted = [0] * self.sequences
        self.finished = [None] * self.sequences

    def add(
        self, emitted: Tensor, logits: Tensor, accepted: Tensor, temperature: float, *, is_round: bool = False
    ) -> None:
        """Append emitted[b, : accepted[b] + 1] to each unfinished response; logits [B, L, V] gave those tokens."""
        log_p = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        values = log_p.gather(2, emitted[:, :, None])[:, :, 0].tolist()
        for row, (ids, count) in enumerate(zip(emitted.tolist(), accepted.tolist(), strict=True)):
            if self.finished[row] is not None:
                continue
            self.rounds[row] += is_round
            self.accepted[row] += count
            for token, value in zip(ids[: count + 1], values[row], strict=False):
                self.tokens[row].append(token)
                self.logprobs[row].append(value)
                if token in self.ends:
                    self.finished[row] = "eos"
                elif len(self.tokens[row]) == self.max_tokens:
                    self.finished[row] = "length"
                if self.finished[row] is not None:
                    break

    def done(self) -> bool:
        return all(state is not None for state in self.finished)

    def result(self) -> Generation:
        return Generation(
            self.tokens,
            self.logprobs,
            self.rounds,
            self.accepted,
            [len(response) - 1 for response in self.tokens],
            [state for state in self.finished if state is not None],
        )
