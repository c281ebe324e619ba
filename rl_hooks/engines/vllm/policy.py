"""The policy that a vLLM worker serves, as a run's registration sees a trainer's: its config, embedding and head."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Final, Self

from torch import Tensor, nn

from rl_hooks.engines.vllm.ranks import LayerRanks, slice_of
from rl_hooks.engines.vllm.steps import TapUnsupportedError
from rl_hooks.sending.registration import known_logit_map, target_config
from rl_hooks.wire import LogitMap

#: Where vLLM looks for the embedding that a drafter shares; gpt-oss has the second.
_EMBEDDINGS: Final = ("model.embed_tokens", "model.embedding")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of the embedding or head that one rank holds, from token `begin` on. Views of the policy's own memory."""

    weight: Tensor
    padded: Tensor  # with the rows that vLLM adds
    begin: int

    @classmethod
    def of(cls, padded: Tensor, rows: int, begin: int = 0) -> Self:
        """The first `rows` rows are tokens."""
        padded = padded.detach()
        return cls(padded[:rows], padded, begin)


class ServedPolicy(nn.Module):
    """The served model as the registration sees a trainer's: its transformers config, embedding and head."""

    def __init__(self, config: Any, embedding: Matrix, head: Matrix) -> None:
        super().__init__()
        self.config, self.embedding, self.head = config, embedding, head

    @classmethod
    def on(cls, ranks: LayerRanks, config: Any, model: nn.Module) -> Self:
        """With what this rank holds of both matrices."""
        rows = int(config.vocab_size)
        embedding = _weight(_module(model, *_EMBEDDINGS), rows, ranks)
        head = embedding if config.tie_word_embeddings else _weight(_module(model, "lm_head"), rows, ranks)
        return cls.named(config, model)(config, embedding, head)

    def whole(self, ranks: LayerRanks) -> Self | None:
        """With all of both matrices, gathered to the first rank's host; None on other ranks. All ranks call it."""
        rows = int(self.config.vocab_size)
        embedding = ranks.whole(self.embedding.padded, rows)
        head = embedding if self.head is self.embedding else ranks.whole(self.head.padded, rows)
        if embedding is None or head is None:
            return None
        first = Matrix.of(embedding, rows)
        return type(self)(self.config, first, first if head is embedding else Matrix.of(head, rows))

    def with_head(self, before: Self | None, ranks: LayerRanks) -> Self | None:
        """`before`, what `whole` has returned, with the head as it is now. All ranks call it."""
        rows = int(self.config.vocab_size)
        head = ranks.whole(self.head.padded, rows)
        if head is None or before is None:
            return None
        first = Matrix.of(head, rows)
        return type(self)(self.config, first if self.head is self.embedding else before.embedding, first)

    @classmethod
    def named(cls, config: Any, model: nn.Module) -> type[Self]:
        """A class by the architecture's name, by which the registration finds the map of its logits."""
        architectures = getattr(config, "architectures", None) or [type(model).__name__]
        return type(str(architectures[0]), (cls,), {})

    @property
    def logit_map(self) -> LogitMap:
        """What the policy does to its logits after the head. Raises `UnsupportedModelError`."""
        config = target_config(self)
        config.pop("dim_model_base", None)  # MiniCPM's states come divided (vLLM's minicpm.py, `scale_width`)
        return known_logit_map(self, config)

    def get_input_embeddings(self) -> Matrix:
        """The matrix with the weight [V, H]."""
        return self.embedding

    def get_output_embeddings(self) -> Matrix:
        """The matrix with the weight [V, H]."""
        return self.head


def _module(model: nn.Module, *paths: str) -> nn.Module:
    """The first of these modules that exists."""
    for path in paths:
        with contextlib.suppress(AttributeError):
            return model.get_submodule(path)
    raise TapUnsupportedError(f"{type(model).__name__} has no {' or '.join(paths)}")


def _weight(module: nn.Module, rows: int, ranks: LayerRanks) -> Matrix:
    weight: Any = getattr(module, "weight", None)
    begin, count = (0, rows) if ranks.size == 1 else slice_of(module)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[0] < count or not weight.is_floating_point():
        raise TapUnsupportedError("the policy's embedding or head is quantised or packed, and cannot be read")
    return Matrix.of(weight, count, begin)
