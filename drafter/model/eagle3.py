"""The EAGLE-3 drafter: a Llama-style decoder layer whose attention reads token embeddings and the target's features.

    r   = fc(features)                            step 0; later steps: r = `pre` of the step before, un-normed
    x   = cat(input_layernorm(e(token)), hidden_norm(r))
    h1  = r + attention(x);   pre = h1 + mlp(post_attention_layernorm(h1))
    q   = softmax(lm_head(norm(pre)))             over the draft vocabulary

With `norm_before_residual` (an option of speculators; not every engine has it) h1 = hidden_norm(r) + attention(x).
With `norm_before_fc` (published drafters of gpt-oss) r = fc(input_norm(features)) at step 0, one norm over all A*H.
With several layers, plain Llama layers follow (x = input_layernorm(pre), H wide), and the last one's `pre` is what the
head and the next step read: as vLLM serves them and speculators trains them.

Legend: A aux layers, H hidden, V target vocabulary, D draft vocabulary, N query heads, G key-value heads, hd head size.
Parameter names are those of the published checkpoints; the embedding e is the policy's, and comes with each call.
`examples.reference.cached` is the same layer with a key-value cache, for decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from drafter.batch import RolloutBatch
from drafter.errors import DrafterError
from drafter.model.draft_model import DraftModel
from drafter.model.eagle3_layer import LaterWeights, LayerWeights
from drafter.model.eagle3_unroll import unroll
from drafter.policy import Policy
from drafter.unroll.plan import Plan
from drafter.unroll.unrolled import Unrolled
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.eagle3 import DrafterConfig

__all__ = ["DrafterConfig", "Eagle3Drafter", "LaterWeights", "LayerWeights"]


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig, width: int) -> None:
        super().__init__()
        hd = config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * hd, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    """The first layer also reads embeddings; its norm of the states comes before the other parameters."""

    def __init__(self, config: DrafterConfig, *, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        if first:
            self.hidden_norm = nn.RMSNorm(size, eps)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config, 2 * size if first else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = _MLP(config)


class Eagle3Drafter(DraftModel):
    """The drafter of one target. It has a head of its own, over the draft vocabulary; the embedding is the policy's."""

    kind = "eagle3"
    config: DrafterConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        if (len(vocabulary), vocabulary.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise DrafterError(
                f"the config wants {config.draft_vocab_size} draft of {config.vocab_size} target tokens, "
                f"the vocabulary has {len(vocabulary)} of {vocabulary.vocab_size}"
            )
        self.config = config
        self.vocabulary = vocabulary
        width = len(config.aux_layers) * config.target_hidden_size
        self.input_norm = nn.RMSNorm(width, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, first=True)
        #: The others, under the numbers by which checkpoints name them.
        later = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(number): _Layer(config, first=False) for number in later})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering states it reads."""
        return self.config.aux_layers

    @property
    def every_row(self) -> bool:
        """Whether it has layers after the first."""
        return self.config.num_hidden_layers > 1

    def unroll(self, plan: Plan, batch: RolloutBatch, policy: Policy, *, dtype: torch.dtype | None = None) -> Unrolled:
        """Run every step of `plan` on the auxiliary states; see `DraftModel.unroll`."""
        embed_tokens = policy.embedding(self.config.vocab_size, self.config.hidden_size)
        return unroll(self, plan, batch.input_ids, batch.aux_hidden, embed_tokens, dtype=dtype)

    def init_from_target(self, lm_head_rows: Tensor) -> None:
        """Start lm_head from the target's own rows [D, H] of the draft vocabulary."""
        if lm_head_rows.shape != self.lm_head.weight.shape:
            raise DrafterError(
                f"expected lm_head rows {tuple(self.lm_head.weight.shape)}, got {tuple(lm_head_rows.shape)}"
            )
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head_rows)

    def weights(self, dtype: torch.dtype | None = None) -> LayerWeights:
        """The layer's weights in `dtype` (default: as stored), cast and stacked once for many uses; gradients flow."""
        cast = dtype or self.fc.weight.dtype
        return LayerWeights(
            fc=self.fc.weight.to(cast),
            hidden_norm=self.midlayer.hidden_norm.weight.to(cast),
            **_own_weights(self.midlayer, cast)._asdict(),
            norm=self.norm.weight.to(cast),
            lm_head=self.lm_head.weight.to(cast),
            later=tuple(_own_weights(layer, cast) for layer in self.layers.values()),
            feature_norm=None if self.input_norm is None else self.input_norm.weight.to(cast),
        )

    def logits(self, pre: Tensor) -> Tensor:
        """Logits [.., D] over the draft vocabulary from `pre` [.., H]."""
        return F.linear(self.norm(pre), self.lm_head.weight)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids (d2t is an offset)."""
        return draft_ids + self.d2t[draft_ids]


def _own_weights(layer: Any, cast: torch.dtype) -> LaterWeights:
    """What every layer has, the first one among them."""
    attention, mlp = layer.self_attn, layer.mlp
    stacked = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return LaterWeights(
        input_norm=layer.input_layernorm.weight.to(cast),
        qkv=torch.cat([w.to(cast) for w in stacked]),
        o=attention.o_proj.weight.to(cast),
        post_norm=layer.post_attention_layernorm.weight.to(cast),
        gate_up=torch.cat([mlp.gate_proj.weight.to(cast), mlp.up_proj.weight.to(cast)]),
        down=mlp.down_proj.weight.to(cast),
    )
