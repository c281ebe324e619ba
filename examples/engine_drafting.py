"""Chain drafting with an EAGLE-3 drafter and its verification, batched over sequences of different lengths.

The drafter has a cache of its own. Its row t holds what the drafter computed from the features of token t and from
token t+1 (step 0). A chain that starts after row t writes its steps 1..K-1 at rows t+1 and on, where the next round's
step 0 overwrites them: by then the target has verified what is there.

Legend: B sequences, K draft depth, D draft vocabulary, V target vocabulary, F = A·H features of a token, S slots, T
positions of a slot, G key-value heads, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafter.model.eagle3 import Eagle3Drafter
from examples.reference.cached import attend, cache_heads, embed, fuse
from examples.reference.decode import verify_chain

DraftingMode = Literal["probabilistic", "greedy"]


@dataclass(frozen=True, slots=True)
class Draft:
    """K drafted tokens of each of B sequences."""

    tokens: Tensor  # int64 [B, K], target ids
    logprobs: Tensor  # float32 [B, K, D]: what each was drawn from; 0 and -inf where drafting is greedy
    vocabulary_ids: Tensor  # int64 [D], ascending: target id of each entry


class Drafting:
    """One drafter with its key-value cache of S slots. A swap makes a new one; its cache is filled again on demand."""

    def __init__(self, drafter: Eagle3Drafter, embed_tokens: Tensor, version: str, slots: int, positions: int) -> None:
        self.drafter = drafter.eval().requires_grad_(False)
        self.version = version
        self._weights = drafter.weights()
        self._embed_tokens = embed_tokens  # the policy's live one
        config = drafter.config
        # [2 (keys, values), S, G, T, hd]
        self._cache = torch.zeros(2, slots, cache_heads(drafter), positions, config.head_dim)
        #: Rows of each slot that hold step 0 of verified tokens: int64 [S].
        self.filled = torch.zeros(slots, dtype=torch.long)

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another's."""
        rows = int(self.filled[source])
        self._cache[:, destination, :, :rows] = self._cache[:, source, :, :rows]
        self.filled[destination] = rows

    def propose(
        self,
        tokens: Tensor,
        features: Tensor,
        lengths: Tensor,
        temperatures: Tensor,
        depth: int,
        mode: DraftingMode,
        generator: torch.Generator,
    ) -> Draft:
        """Draft `depth` tokens after each of the B sequences that hold the first B slots.

        tokens int64 [B, T]; features [B, T, F], known for all tokens but the last; lengths int64 [B] (at least 2).
        """
        pre = self._catch_up(tokens, features, lengths)
        # Draft logits are divided by the request's temperature, as engines do, and as training and replay do.
        sharpness = torch.zeros_like(temperatures) if mode == "greedy" else temperatures
        drafted: list[Tensor] = []
        logprobs: list[Tensor] = []
        for step in range(depth):
            if step > 0:
                pre = self._attend(drafted[-1][:, None], pre[:, None], lengths - 2 + step)[:, 0]
            law = log_law(self.drafter.logits(pre), sharpness)  # [B, D]
            choice = torch.multinomial(law.exp(), 1, generator=generator)[:, 0]  # certain where the law is one-hot
            drafted.append(self.drafter.to_target(choice))
            logprobs.append(law)
        return Draft(torch.stack(drafted, 1), torch.stack(logprobs, 1), self.drafter.vocabulary.ids)

    def _catch_up(self, tokens: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Step 0 of every row not yet in the cache; return `pre` [B, H] of each sequence's last row."""
        B = tokens.shape[0]
        start = self.filled[:B].clone()
        last = lengths - 2  # the last row whose features and next token are both known
        rows = int((last - start).max()) + 1
        # Shorter sequences repeat their edge: such rows lie beyond their end and are overwritten before they are read.
        index = (start[:, None] + torch.arange(rows)).clamp_max(tokens.shape[1] - 2)
        r = fuse(self.drafter, features.gather(1, index[:, :, None].expand(-1, -1, features.shape[2])))
        pre = self._attend(tokens.gather(1, index + 1), r, start)
        self.filled[:B] = last + 1
        return pre[torch.arange(B), last - start]

    def _attend(self, tokens: Tensor, r: Tensor, start: Tensor) -> Tensor:
        """Run the layer over new rows [start, start + rows) and keep their keys and values: pre [B, rows, H]."""
        B, rows = tokens.shape
        positions = start[:, None] + torch.arange(rows)
        past = int(start.max())
        mask = torch.cat(
            [
                (torch.arange(past) < start[:, None])[:, None].expand(B, rows, past),
                torch.ones(rows, rows, dtype=torch.bool).tril().expand(B, rows, rows),
            ],
            dim=2,
        )
        keys, values = self._cache[0, :B, :, :past], self._cache[1, :B, :, :past]
        pre, new_keys, new_values = attend(
            self.drafter,
            embed(self.drafter, tokens, self._embed_tokens),
            r,
            positions,
            keys,
            values,
            mask,
            self._weights,
        )
        capacity = self._cache.shape[3]
        slots = torch.arange(B)[:, None].expand(B, rows)
        inside = positions < capacity
        self._cache[0][slots[inside], :, positions[inside]] = new_keys.transpose(1, 2)[inside]
        self._cache[1][slots[inside], :, positions[inside]] = new_values.transpose(1, 2)[inside]
        return pre


def log_law(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probabilities that a token is drawn by: logits [B, ..., V] at each row's temperature [B].

    Temperature 0 is certain of the best token: 0 there and -inf elsewhere.
    """
    temperature = temperatures.view(-1, *[1] * (logits.ndim - 1))
    soft = (logits.float() / torch.where(temperature > 0, temperature, 1.0)).log_softmax(-1)
    certain = torch.full_like(soft, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    return torch.where(temperature > 0, soft, certain)


def token_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability [B, n] of tokens [B, n] under logits [B, n, V], at each row's temperature [B] (where 0: 1)."""
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
    return (logits.float() / scale).log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]


def verify(p_logprobs: Tensor, draft: Draft | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rejection sampling: (accepted drafts int64 [B], tokens int64 [B, K+1] of which accepted + 1 are emitted).

    p_logprobs [B, K+1, V]; no draft means K = 0.
    """
    if draft is None:
        return torch.zeros(len(p_logprobs), dtype=torch.long), draw(p_logprobs[:, 0], generator)
    accepted, follow = verify_chain(
        p_logprobs, draft.logprobs, draft.tokens, vocabulary_ids=draft.vocabulary_ids, generator=generator
    )
    emitted = torch.cat([draft.tokens, follow[:, None]], dim=1)
    return accepted, emitted.scatter(1, accepted[:, None], follow[:, None])


def draw(logprobs: Tensor, generator: torch.Generator) -> Tensor:
    """One token [B, 1] of each row of log-probabilities [B, V]."""
    return torch.multinomial(logprobs.exp(), 1, generator=generator)
