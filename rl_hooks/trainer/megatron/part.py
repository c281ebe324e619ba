"""One rank's part of a `GPTModel`: what it is, and what an armed forward shows of it.

Megatron's states are [S, B, H], sequence first; under sequence parallelism a rank has S / size of the S. Its logits are
[S, B, v], always of the whole sequence.

Legend: S tokens of a row, B rows, N rows (tokens) that are sent, M of them scored, A auxiliary layers, H hidden size, v
a rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.errors import ENGINE_INSTEAD, CaptureMissedError, RolloutError, UnsupportedModelError
from rl_hooks.sending.registration import known_logit_map, unwrap
from rl_hooks.trainer.capture import FeatureCapture, Hooked, ModuleHook
from rl_hooks.trainer.megatron.ranks import TensorRanks, part_scores
from rl_hooks.trainer.packing import PackedRollouts

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reading:
    """What rank 0 tells the others of a forward: where to read it."""

    policy_version: int
    temperature: float
    shape: tuple[int, int]  # [B, S]
    rows: Ints  # [N], of the flattened [B * S]; empty: no rollout of it is sent
    scored: Ints  # [M], rows among these N whose next token the policy generated
    next_ids: Ints  # [M], that token
    renews: bool  # the run is registered again after the forward, since the service has lost it


class ModelPart(Hooked):
    """One rank's part of the model: what it is, and what an armed forward shows of it."""

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        aux_layers: Sequence[int] | Literal["eagle3"],
        logit_map: wire.LogitMap | None,
        ranks: TensorRanks,
    ) -> None:
        super().__init__()
        inner: Any = unwrap(model)
        _refuse(inner, config, ranks.size)
        self._model = inner
        self.config = config
        self.vocab_size = int(config["vocab_size"])
        #: Each rank holds a slice of the sequence.
        self.sliced = bool(inner.config.sequence_parallel) and ranks.size > 1
        self.logit_map = known_logit_map(model, config) if logit_map is None else logit_map
        self._ranks = ranks
        self._scores: Tensor | None = None
        self._error: Exception | None = None
        self._reading: Reading | None = None
        #: Where the forward's packed sequences begin, and the end of the last; None: it was not packed.
        self.packing: Tensor | None = None
        self.features = FeatureCapture(
            model, aux_layers, layers_path="decoder.layers", norm_path="decoder.final_layernorm"
        )
        self._handles = [
            inner.output_layer.register_forward_hook(ModuleHook(self._at_logits)),
            inner.decoder.layers[0].register_forward_pre_hook(ModuleHook(self._entering), with_kwargs=True),
        ]

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one matrix."""
        return bool(self._model.share_embeddings_and_output_weights)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The rank's rows of embedding and head."""
        embedding = self._model.embedding.word_embeddings.weight
        head = embedding if self.tied else self._model.output_layer.weight
        return embedding.detach(), head.detach()

    @contextmanager
    def armed(self, reading: Reading) -> Iterator[None]:
        """Read the forward that happens inside."""
        self.clear()
        with ExitStack() as armed:
            if len(reading.rows):
                self._reading = reading
                try:
                    _, rows, shape = self._mine(reading)
                    armed.enter_context(self.features.armed(rows=rows, shape=shape))
                except Exception as error:  # noqa: BLE001 - never into the trainer's forward; `pop` raises it
                    self._error = error.with_traceback(None)
            try:
                yield
            finally:
                self._reading = None

    def pop(self, reading: Reading) -> tuple[Tensor | None, Tensor | None]:
        """The rank's rows [N, (A + 1) * H], zeros where another has them, and its `part_scores`."""
        if self._error is not None:
            raise self._error
        if not len(reading.rows):
            return None, None
        captured = self.features.pop()
        if self._scores is None:
            raise CaptureMissedError("the output layer gave no logits in the armed forward (a fused loss, or a graph)")
        states = torch.cat((*captured.aux, captured.last), dim=1)
        at, _, _ = self._mine(reading)
        if not self.sliced:
            return states, self._scores
        rows_NX = states.new_zeros(len(reading.rows), states.shape[1])
        return rows_NX.index_copy_(0, at.to(states.device), states), self._scores

    def clear(self) -> None:
        """Hold nothing of a forward any longer."""
        self._scores = self._error = self.packing = None
        self.features.clear()

    def close(self) -> None:
        """Remove the hooks. Safe to call twice."""
        self.features.close()
        super().close()

    def _mine(self, reading: Reading) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Which of the N rows this rank holds, where in its states [S, B, H], and those states' [S, B]."""
        B, S = reading.shape
        b, s = np.divmod(reading.rows, S)
        length, begin = S, 0
        if self.sliced:
            length = S // self._ranks.size
            begin = length * self._ranks.rank
        at = np.flatnonzero((s >= begin) & (s < begin + length))
        return torch.from_numpy(at), torch.from_numpy(((s - begin) * B + b)[at]), (length, B)

    def _entering(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        told = kwargs.get("packed_seq_params")
        if self._reading is not None and told is not None:
            padded = getattr(told, "cu_seqlens_q_padded", None)
            self.packing = told.cu_seqlens_q if padded is None else padded

    def _at_logits(self, _module: nn.Module, _args: Any, output: Any) -> None:
        reading = self._reading
        if reading is None or self._scores is not None or self._error is not None:
            return
        try:
            logits = (output[0] if isinstance(output, tuple) else output).detach()  # [S, B, v]
            B, S = reading.shape
            if tuple(logits.shape[:2]) != (S, B):
                raise RolloutError(  # noqa: TRY301 - kept below, as any other
                    f"logits are {list(logits.shape)}, but input_ids are {[B, S]}: not the whole rows"
                )
            if reading.next_ids.min() < 0 or reading.next_ids.max() >= self.vocab_size:
                raise RolloutError(  # noqa: TRY301
                    f"generated tokens are {reading.next_ids.min()} to {reading.next_ids.max()}, but the vocabulary "
                    f"has {self.vocab_size}: loss_mask is 1 at a token that the policy cannot have generated"
                )
            part = len(self.weights()[1])
            first = part * self._ranks.rank
            if logits.shape[2] != part:  # gathered: each rank takes its part again
                logits = logits[..., first : first + part]
            b, s = np.divmod(reading.rows[reading.scored], S)
            self._scores = part_scores(
                logits.reshape(S * B, part),
                torch.from_numpy(s * B + b).to(logits.device),
                torch.from_numpy(reading.next_ids).to(logits.device),
                first,
                self.vocab_size,
                reading.temperature,
                self.logit_map,
            )
        except Exception as error:  # noqa: BLE001 - never into the trainer's forward; `pop` raises it
            self._error = error.with_traceback(None)


def check_packing(told: Tensor | None, layout: PackedRollouts) -> None:
    """Raise RolloutError where the forward was packed in another way than `capture` was told."""
    if told is None and not layout.packed:
        return
    if told is None or not layout.packed:
        raise RolloutError(
            "give the packed forward packed_seq_params and `capture` its cu_seqlens, or neither: "
            f"the forward had {'none' if told is None else 'some'}, and `capture` {'some' if layout.packed else 'none'}"
        )
    bounds = told.flatten().tolist()
    for places in layout.rollouts:
        if not len(places):
            continue
        first, last = int(places[0]), int(places[-1])
        seams = [bound for bound in bounds if first < bound <= last]
        if first not in bounds or last + 1 not in bounds or seams:
            raise RolloutError(
                f"packed_seq_params say that sequences begin at {bounds[:8]}, and `capture` was told of a rollout at "
                f"tokens {first} to {last}: it saw another, or is not whole"
            )


def _refuse(model: Any, config: dict[str, Any], size: int) -> None:
    """Raise `UnsupportedModelError` for what is not covered, or is not the model of this config."""
    lacks = [name for name in ("decoder", "embedding", "output_layer", "config") if not hasattr(model, name)]
    if lacks:
        raise UnsupportedModelError(f"{type(model).__name__} lacks {', '.join(lacks)}: it is no whole GPTModel")
    own = model.config
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(own, name, 1) > 1:
            raise UnsupportedModelError(f"{name} = {getattr(own, name)}: set it to 1, or {ENGINE_INSTEAD}")
    if getattr(own, "mtp_num_layers", None):
        raise UnsupportedModelError("mtp_num_layers: multi-token prediction in the trainer is not supported")
    if getattr(model.output_layer, "bias", None) is not None:
        raise UnsupportedModelError("the output layer has a bias, which the rollout file cannot describe")
    rows = len(model.embedding.word_embeddings.weight) * size
    found = {"hidden_size": own.hidden_size, "num_hidden_layers": own.num_layers, "vocab_size": rows}
    for name, value in found.items():
        if config[name] != value and not (name == "vocab_size" and config[name] < value):
            raise UnsupportedModelError(f"the config's {name} is {config[name]}, and the model's is {value}")
    if bool(config.get("tie_word_embeddings")) != bool(model.share_embeddings_and_output_weights):
        raise UnsupportedModelError("the config's tie_word_embeddings is not the model's")


def as_target(config: Any, embedding: Tensor | None = None, head: Tensor | None = None, *, tied: bool = False) -> Any:
    """What the registration asks of a model of transformers: its config, embedding and head."""
    embedded = SimpleNamespace(weight=embedding)
    heads = embedded if tied else SimpleNamespace(weight=head)
    return SimpleNamespace(config=config, get_input_embeddings=lambda: embedded, get_output_embeddings=lambda: heads)
