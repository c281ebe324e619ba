"""Captures hidden states in the trainer's forward: the states *entering* chosen decoder layers, and the last one.

An auxiliary state is the residual stream that enters layer `i` (0-based), after the residual addition and before the
layer's own norm: `hidden_states[i]` of `output_hidden_states`. The last state is the final norm's output, which
`lm_head` multiplies. Module hooks take both. So the model need not return them, and no other state is kept in memory.

Invariants
- Only an armed forward is captured: generation, evaluation and reference forwards run through the same modules.
- Of each hook the first firing in an armed forward counts; of the norm, the first one after the chosen layers. Some
  frameworks' activation checkpointing runs a module again in the backward pass. That second firing is ignored.
- Of several forwards the first counts. Where it has no gradients and a later one has, it may be of a reference (an
  adapter that is off), so `pop` raises.
- Hooks never raise into the forward. `pop` raises the first error of a hook.
- Register the hooks before `torch.compile`. A hook that is added to a compiled model never fires, and `pop` says so.

For data parallelism and its sharded forms (FSDP, ZeRO-3). Under sequence or pipeline parallelism a rank holds a part of
a state, and `pop` finds a shape that does not fit. `rl_hooks.trainer.megatron` joins such parts.

Legend: B batch, S padded length, N selected rows, H hidden size, A auxiliary layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_hooks.errors import ENGINE_INSTEAD, AuxLayersError, CaptureMissedError, RolloutError, UnsupportedModelError
from rl_hooks.sending.features import Captured
from rl_hooks.sending.registration import unwrap
from rl_hooks.trainer.packing import boundaries_among

#: Paths of the decoder layers and the final norm in causal language models, tried in order.
DECODER_PATHS: Final[tuple[tuple[str, str], ...]] = (
    ("model.layers", "model.norm"),  # Llama, Qwen, Mistral, Gemma, DeepSeek, ...
    ("model.language_model.layers", "model.language_model.norm"),  # vision-language models, transformers 5
    ("language_model.model.layers", "language_model.model.norm"),  # vision-language models, transformers 4
    ("layers", "norm"),  # a bare backbone
    ("transformer.h", "transformer.ln_f"),  # GPT-2, Falcon
    ("gpt_neox.layers", "gpt_neox.final_layer_norm"),
)


class ModuleHook:
    """A hook of ours on a module. Its copies, deep or pickled, do nothing, and are loaded without `rl_hooks`."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Called by torch, with the module first."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext, "__exit__")


class Hooked:
    """Base of classes that have hooks on modules (`_handles`) until `close`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def close(self) -> None:
        """Remove the hooks. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default: the states entering layers 2, L//2 and L-3, as vLLM and SGLang take them."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not low < middle < high:
        some = [str(layer) for layer in sorted({0, num_layers // 2, num_layers - 1})]
        raise AuxLayersError(
            f"aux_layers='eagle3' means the layers entered at (2, L//2, L-3), which for L = {num_layers} is "
            f"{(low, middle, high)}: they must ascend and differ. Name three layers yourself, for example "
            f"aux_layers=({', '.join(some)}), or --aux-layers {','.join(some)} of `draftalign warmup`."
        )
    return low, middle, high


def dropping(model: nn.Module) -> str:
    """Name of the first module of `model` that drops values at random now; empty: none does."""
    name: str
    for name, module in model.named_modules():
        share: Any = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if module.training and isinstance(share, float) and share > 0:
            return name
    return ""


def find_decoder(
    model: nn.Module, layers_path: str | None = None, norm_path: str | None = None
) -> tuple[nn.ModuleList, nn.Module]:
    """Find the decoder layers and the final norm, by explicit dotted paths or by `DECODER_PATHS`."""
    root = unwrap(model)
    if (layers_path is None) != (norm_path is None):
        raise UnsupportedModelError("give both layers_path and norm_path, or neither")
    known = DECODER_PATHS if layers_path is None or norm_path is None else ((layers_path, norm_path),)
    for layers_name, norm_name in known:
        layers, norm = _at(root, layers_name), _at(root, norm_name)
        if isinstance(layers, nn.ModuleList) and len(layers) and norm is not None:
            return layers, norm
    tried = ", ".join(f"({a}, {b})" for a, b in known)
    raise UnsupportedModelError(
        f"no decoder layers and final norm in {type(root).__name__}: looked for {tried}. Pass layers_path= and "
        f"norm_path=, dotted paths from {type(root).__name__} to its nn.ModuleList of layers and to its final norm."
    )


def _at(root: nn.Module, path: str) -> nn.Module | None:
    here = root
    for name in path.split("."):
        child: Any = getattr(here, name, None)
        if not isinstance(child, nn.Module):
            return None
        here = child
    return here


@dataclass
class _Forward:
    """The captured states of one forward, by the name of a layer or "norm", and the shape that they must have."""

    shape: tuple[int, ...] | None = None
    packed: bool = False
    states: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    boundaries: dict[str, Tensor | None] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    gradients: bool = False  # whether it has them
    again: bool = False  # another one with gradients came after it


class FeatureCapture(Hooked):
    """Captures the states entering `aux_layers` and the final norm's output, in forwards run inside `armed`.

    >>> capture = FeatureCapture(model, aux_layers=(1, 2, 3))
    >>> with capture.armed():
    ...     model(input_ids=input_ids, attention_mask=attention_mask)
    >>> features = capture.pop()  # features.aux[i]: [B * S, H]; features.last: [B * S, H]

    Raises `AuxLayersError` for layers that do not exist and `UnsupportedModelError` for an unknown architecture.
    """

    def __init__(
        self,
        model: nn.Module,
        aux_layers: Sequence[int] | Literal["eagle3"] = "eagle3",
        *,
        layers_path: str | None = None,
        norm_path: str | None = None,
    ) -> None:
        super().__init__()
        layers, self.norm = find_decoder(model, layers_path, norm_path)
        self.aux_layers: tuple[int, ...] = _check_layers(aux_layers, len(layers))
        #: Time spent inside the hooks, copying the selected rows.
        self.hook_seconds = 0.0
        self._armed = False
        self._rows: Tensor | None = None
        self._forward = _Forward()
        for index in self.aux_layers:
            hook = ModuleHook(partial(self._entering, f"layer {index}"))
            self._handles.append(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
        self._handles.append(self.norm.register_forward_hook(ModuleHook(self._normed)))

    @contextmanager
    def armed(
        self, *, rows: Tensor | None = None, shape: tuple[int, ...] | None = None, packed: bool = False
    ) -> Iterator[FeatureCapture]:
        """Capture the next forward.

        `rows`: int64 [N], the rows of the flattened [B * S] token axis to copy. None: all rows, without a copy.
        `shape`: the [B, S] that the states must have; `pop` raises if they have another. A `packed` row may be longer
        in the forward, because trainers pad it to the size of a bucket.
        """
        self._rows, self._forward = rows, _Forward(shape, packed)
        self._armed = True
        try:
            yield self
        finally:
            self._armed = False
            self._rows = None

    def is_past_norm(self) -> bool:
        """Whether the last state of the armed forward was captured."""
        return "norm" in self._forward.states

    def normed(self) -> Tensor:
        """The last state's rows [N, H], from within the forward."""
        return self._forward.states["norm"]

    def pop(self) -> Captured:
        """The states of the last armed forward. Raises `CaptureMissedError` if any hook did not fire."""
        forward = self._forward
        self.clear()
        if forward.errors:
            # Not bound to a name: the traceback would keep this frame alive, and so the trainer's.
            raise forward.errors.pop(0)
        if forward.again and not forward.gradients:
            raise RolloutError(
                "several forwards ran inside `capture`, and the first had no gradients, but a later one had: it may be "
                "of the reference model, or without the adapter. Let `capture` hold the policy's forward alone"
            )
        wanted = [f"layer {index}" for index in self.aux_layers]
        missed = [name for name in [*wanted, "norm"] if name not in forward.states]
        if missed:
            raise CaptureMissedError(
                f"no hidden state came from {', '.join(missed)} in the armed forward. Either no forward ran, or the "
                "model was compiled before the hooks were registered (attach before torch.compile), or the modules "
                "were replaced afterwards."
            )
        for name, found in forward.shapes.items():
            _check_shape(name, found, forward.shape, packed=forward.packed)
        return Captured(tuple(forward.states[name] for name in wanted), forward.states["norm"], forward.boundaries)

    def clear(self) -> None:
        """Let go of everything from the last forward."""
        self._forward = _Forward()

    def _entering(self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._armed and name not in self._forward.states:
            self._take(name, args[0] if args else kwargs.get("hidden_states"), kwargs)

    def _normed(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        # NanoChat's norm also runs on the embedding, before any layer. The last state comes after the layers.
        if not self._armed or len(forward.states) < len(self.aux_layers):
            return
        if "norm" in forward.states:
            forward.again |= torch.is_grad_enabled()
            return
        forward.gradients = torch.is_grad_enabled()
        self._take("norm", output)

    def _take(self, name: str, state: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        # Dynamo traces through hooks, and a clock would break its graph.
        compiling = torch.compiler.is_compiling()
        started = 0.0 if compiling else time.perf_counter()
        try:
            if kwargs is not None and not self._forward.states:  # once: all layers get the same arguments
                self._forward.boundaries = boundaries_among(kwargs)
            flat = _flatten(name, state)
            # `pop` compares the shape, not this: Dynamo would compile again for each length of a batch.
            self._forward.shapes[name] = state.shape
            if self._rows is not None:
                # If the state is too short, rows beyond it would fail an assertion on the device and end the process.
                flat = flat.index_select(0, self._rows.to(flat.device).clamp(max=flat.shape[0] - 1))
            self._forward.states[name] = flat
        except Exception as error:  # noqa: BLE001 - a hook must never raise into the trainer's forward; pop raises it
            # Without its traceback, whose frames hold the trainer's tensors.
            self._forward.errors.append(error.with_traceback(None))
        if not compiling:
            self.hook_seconds += time.perf_counter() - started


def writes(tensor: Tensor) -> int | None:
    """How often a tensor was written to in place; None if that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _flatten(name: str, state: Any) -> Tensor:
    """The state as detached rows [B * S, H]; raises if it is no hidden state."""
    if not isinstance(state, Tensor) or state.ndim < 2:
        raise RolloutError(f"{name} was given {type(state).__name__}; expected a hidden state [B, S, H]")
    if state.ndim > 3:
        raise UnsupportedModelError(
            f"the hidden state of {name} is {list(state.shape)}: several residual streams (AltUp, hyper-connections). "
            "A drafter reads one [B, S, H]; such models are not supported. What works: the engine's own speculation "
            "with n-grams or the policy's MTP module, untrained; draftalign-agent beside the engine reports its "
            "acceptance"
        )
    return state.detach().reshape(-1, state.shape[-1])


def _check_shape(name: str, state: tuple[int, ...], shape: tuple[int, ...] | None, *, packed: bool) -> None:
    """Raise if a state of this shape does not fit [B, S]."""
    found = tuple(state[:-1])
    padded = packed and shape is not None and shape[0] == 1 and found[:-1] in ((), (1,)) and found[-1] >= shape[1]
    if shape is not None and found != shape and not padded:
        raise RolloutError(
            f"the hidden state of {name} is {list(state)}, but input_ids are {list(shape)}. Sequence and context "
            "parallelism, and forwards that pack (padding-free) or cut a padded batch, are not supported. Where the "
            f"batch is split over ranks, {ENGINE_INSTEAD}"
        )


def _check_layers(aux_layers: Sequence[int] | str, num_layers: int) -> tuple[int, ...]:
    if isinstance(aux_layers, str):
        if aux_layers != "eagle3":
            raise AuxLayersError(f"aux_layers must be 'eagle3' or a sequence of layer numbers, got {aux_layers!r}")
        return eagle3_layers(num_layers)
    chosen = tuple(int(index) for index in aux_layers)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise AuxLayersError(
            f"aux_layers must be ascending, distinct and from 0 to {num_layers - 1} (the state entering that layer), "
            f"got {chosen}"
        )
    return chosen
