"""Key-value storage that is ragged over sequences, and the policy's forward on top of it.

Every sequence owns a *slot*, and slots 0..B-1 are the running ones, so a batch is a view and never a gather. A forward
writes rows [start, start + q) of each slot before anything reads them, and a query at position i reads positions <= i.
So whatever lies beyond a sequence's end (rejected drafts, rows that only padded the batch) is overwritten before it is
ever attended to: nothing needs rolling back.

Legend: S slots, B running sequences, q new rows of each, T positions, H hidden size, A aux layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of `layers` layers for S slots of T positions, in the shape that transformers' models call."""

    def __init__(self, layers: int, slots: int, positions: int, kv_heads: int, head_dim: int) -> None:
        shape = (layers, slots, positions, kv_heads, head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self._rows: tuple[Tensor, Tensor] = (torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 0, dtype=torch.long))
        self._reach = 0

    @property
    def positions(self) -> int:
        """T: how many positions a slot holds."""
        return int(self.keys.shape[2])

    def begin(self, slots: Tensor, start: Tensor, q: int) -> tuple[Tensor, Tensor]:
        """Say where the next forward writes: rows [start, start + q) of `slots` (both int64 [B]).

        Return its position ids, int64 [B, q], and its attention mask, bool [B, 1, q, reach].
        """
        positions = start[:, None] + torch.arange(q)
        self._reach = int(positions.max()) + 1
        if self._reach > self.positions:
            raise ValueError(f"position {self._reach - 1} is beyond the {self.positions} positions of a slot")
        self._rows = (slots[:, None], positions)
        return positions, (torch.arange(self._reach) <= positions[:, :, None])[:, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, kv_heads, q, head_dim] of one layer; return all up to the reach."""
        slots, positions = self._rows
        self.keys[layer_idx].index_put_((slots, positions), keys.transpose(1, 2))
        self.values[layer_idx].index_put_((slots, positions), values.transpose(1, 2))
        return self._read(self.keys[layer_idx]), self._read(self.values[layer_idx])

    def _read(self, stored: Tensor) -> Tensor:
        slots = self._rows[0][:, 0]
        first, count = int(slots[0]), slots.shape[0]
        # Slots of a batch are consecutive, so this is a view.
        return stored[first : first + count, : self._reach].transpose(1, 2)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another's."""
        self.keys[:, destination, :length] = self.keys[:, source, :length]
        self.values[:, destination, :length] = self.values[:, source, :length]


class Target:
    """The policy: a transformers causal LM over a `SlotCache`, whose forward also hands out the drafter's features."""

    def __init__(self, model: Any, aux_layers: Sequence[int], slots: int, positions: int) -> None:
        config = model.config
        if not aux_layers or not all(0 <= layer < config.num_hidden_layers for layer in aux_layers):
            raise ValueError(
                f"aux layers are named by the layer they enter, 0 to {config.num_hidden_layers - 1}; got {aux_layers}"
            )
        self.model = model.eval().requires_grad_(False)
        self.aux_layers = tuple(aux_layers)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = SlotCache(config.num_hidden_layers, slots, positions, config.num_key_value_heads, head_dim)
        self._entering: dict[int, Tensor] = {}
        for layer in aux_layers:
            model.base_model.layers[layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)

    def _capture(self, layer: int) -> Any:
        def hook(_: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
            self._entering[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    @property
    def feature_size(self) -> int:
        """A·H: width of the features of one token."""
        return len(self.aux_layers) * int(self.model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.model.config.vocab_size)

    def forward(self, tokens: Tensor, slots: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Consume tokens [B, q] at positions [start, start + q): (final hidden [B, q, H], features [B, q, A·H])."""
        positions, mask = self.cache.begin(slots, start, tokens.shape[1])
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True
        )
        features = torch.cat([self._entering[layer] for layer in self.aux_layers], dim=-1)
        return output.last_hidden_state, features

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of final hidden states [..., H]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def embedding(self) -> Tensor:
        """The input embedding [V, H], shared with the model."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse weights that do not fit this model whole: names, shapes and finiteness. Changes nothing."""
        own = self.model.state_dict()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        missing, unknown = set(own) - set(weights) - tied, set(weights) - set(own)
        if missing or unknown:
            raise ValueError(f"weights must be whole: missing {sorted(missing)[:4]}, unknown {sorted(unknown)[:4]}")
        for name, weight in weights.items():
            if weight.shape != own[name].shape:
                raise ValueError(f"{name}: expected shape {list(own[name].shape)}, got {list(weight.shape)}")
            if not bool(torch.isfinite(weight).all()):
                raise ValueError(f"{name}: holds NaN or infinity")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy checked weights in place. Keys and values of running sequences stay as the old weights made them."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
