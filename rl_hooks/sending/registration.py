"""What a run sends the service about its policy: first config, embedding and head; later the head, when it has moved.

`PUT /runs/{run}` and `PUT /runs/{run}/head` carry safetensors files (`wire.RUN_FORMAT`, `wire.HEAD_FORMAT`). The
tensors are copied to the host here, because the trainer goes on changing them; the copies live until they are sent.

The service recomputes log p from `logit_map(last_hidden @ lm_head^T) / temperature`. A known model's map of its logits
(a scale, a soft cap) is sent as a `wire.LogitMap`. A head with a bias or LoRA factors is refused. A sharded weight
(FSDP, ZeRO-3) is read inside the trainer's own forward, where it is whole: gathering it is a collective, which a hook
on one rank must never start.

The embedding table is sent without the factor that Gemma and Granite multiply it by: an engine's drafter shares the
table and not the factor (docs/guide/targets.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rl_hooks import wire
from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedModelError
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.layouts import canonical_config, canonical_names, is_nested
from rl_hooks.sending.features import as_wire
from rl_hooks.sending.jobs import Job, run_path

#: Heads up to this size are sent in their own precision; larger float32 ones as bfloat16.
_EXACT_BYTES: Final = 64 << 20


def unwrap(model: nn.Module) -> nn.Module:
    """The causal language model inside DDP (`.module`), `torch.compile` (`._orig_mod`) and PEFT wrappers."""
    for _ in range(8):
        inner: Any = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "peft_config"):
            base: Any = getattr(model, "get_base_model", None)
            inner = base() if callable(base) else None
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


class _LogitRule(NamedTuple):
    """How models of these classes use a config field. Other classes may have the field and use it in another way."""

    field: str
    neutral: float  # the value that leaves logits alone
    operation: Literal["softcap", "multiply", "divide", "per hidden size"] | None = None
    classes: tuple[str, ...] = ()


#: By the class that computes the logits: Gemma3ForConditionalGeneration ignores the field that Gemma3ForCausalLM reads.
_LOGIT_RULES: Final = (
    _LogitRule(
        "final_logit_softcapping",
        0.0,
        "softcap",
        (
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "VaultGemmaForCausalLM",
            "NanoChatForCausalLM",
        ),
    ),
    _LogitRule("logits_soft_cap", 0.0, "softcap", ("RecurrentGemmaForCausalLM",)),
    _LogitRule("logit_scale", 1.0, "multiply", ("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM")),
    _LogitRule(
        "logits_scaling",
        1.0,
        "divide",
        (
            "GraniteForCausalLM",
            "GraniteMoeForCausalLM",
            "GraniteMoeSharedForCausalLM",
            "GraniteMoeHybridForCausalLM",
        ),
    ),
    _LogitRule("logits_scaling", 1.0, "multiply", ("HyperCLOVAXForCausalLM",)),
    _LogitRule("lm_head_multiplier", 1.0, "multiply", ("FalconH1ForCausalLM",)),
    # MiniCPMForCausalLM, of MiniCPM 1 to 4, comes with the checkpoint.
    _LogitRule("dim_model_base", 0.0, "per hidden size", ("MiniCPMForCausalLM", "MiniCPM3ForCausalLM")),
    _LogitRule("output_logit_soft_cap", 0.0),  # xLSTM
    _LogitRule("output_multiplier", 1.0),
    _LogitRule("logits_mup_width_multiplier", 1.0),
)


def known_logit_map(model: nn.Module, config: Mapping[str, Any]) -> wire.LogitMap:
    """What a model with this text config does to its logits after lm_head.

    Raises `UnsupportedModelError` for a field that may change them in a class that is not listed here.
    """
    scale, softcap = 1.0, None
    classes = {kind.__name__ for kind in type(unwrap(model)).__mro__}
    for field in dict.fromkeys(rule.field for rule in _LOGIT_RULES):
        rules = [rule for rule in _LOGIT_RULES if rule.field == field]
        value = config.get(field)
        if value is None or float(value) == rules[0].neutral:
            continue
        operation = next((rule.operation for rule in rules if classes & set(rule.classes)), None)
        if operation is None:
            raise UnsupportedModelError(
                f"the config says {field} = {value}, and what a {type(unwrap(model)).__name__} does with it is not "
                "known here; a wrong guess would give the drafter a wrong target. Say it: "
                "logit_map=LogitMap(scale=..., softcap=...), LogitMap() for nothing (rl_hooks.wire)"
            )
        if operation == "softcap":
            softcap = float(value)
        elif operation == "per hidden size":
            scale *= float(value) / float(config["hidden_size"])
        else:
            scale *= float(value) if operation == "multiply" else 1.0 / float(value)
    return wire.LogitMap(scale, softcap)


def text_config(model: nn.Module) -> Any:
    """The language model's transformers config (the text part of a vision-language model's); None without one."""
    config: Any = getattr(unwrap(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def target_config(model: nn.Module) -> dict[str, Any]:
    """`text_config` as plain JSON values."""
    config = text_config(model)
    if config is None or not hasattr(config, "to_dict"):
        raise UnsupportedModelError(f"{type(unwrap(model)).__name__} has no transformers config to register")
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    missing = [k for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size") if plain.get(k) is None]
    if missing:
        raise UnsupportedModelError(f"the model's config lacks {', '.join(missing)}, which the service needs")
    return dict(plain)


def head_weight(model: nn.Module) -> Tensor:
    """The policy's `lm_head` [V, H], detached; where `is_sharded`, what this rank holds of it.

    Raises `UnsupportedModelError` where it is not plain.
    """
    inner: Any = unwrap(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    # PEFT keeps the trained copy of a module beside the original.
    trained = getattr(head, "modules_to_save", None)
    if isinstance(trained, nn.ModuleDict) and len(trained):
        head = _active(head, trained)
    if head is None:
        raise UnsupportedModelError(f"{type(inner).__name__} has no output embedding (lm_head)")
    _refuse_adapter("lm_head", head)
    if _parameter(head, "bias") is not None:
        raise UnsupportedModelError("lm_head has a bias, which the rollout file cannot describe")
    weight = _parameter(head, "weight")
    if not isinstance(weight, Tensor):
        raise UnsupportedModelError(f"lm_head.weight must be a [V, H] tensor, got {type(weight).__name__}")
    return weight if is_sharded(weight) else weight.detach()


def policy_head(model: nn.Module) -> Tensor:
    """`head_weight` of a policy in training. Raises `UnsupportedModelError` where a plain tensor is a slice of it."""
    weight = head_weight(model)
    size = int(getattr(text_config(model), "vocab_size", None) or 0)
    if not is_sharded(weight) and weight.shape[0] < size:
        raise UnsupportedModelError(
            f"lm_head has {weight.shape[0]} rows, and the config's vocab_size is {size}: it is a slice (tensor "
            "parallel). Data parallelism and its sharded forms (FSDP2, ZeRO-3) are supported; else "
            f"{ENGINE_INSTEAD}"
        )
    return weight


def embedding_weight(model: nn.Module) -> Tensor:
    """The policy's embedding [V, H], detached; where `is_sharded`, what this rank holds of it.

    Raises `UnsupportedModelError` where it carries an adapter's factors: the model embeds by more than the table.
    """
    inner: Any = unwrap(model)
    embedding = inner.get_input_embeddings()
    _refuse_adapter("the input embedding", embedding)
    weight: Tensor = _parameter(embedding, "weight")
    return weight if is_sharded(weight) else weight.detach()


def _active(wrapper: Any, trained: nn.ModuleDict) -> Any:
    """Of a module that PEFT's adapters have trained copies of: the one that is used now."""
    active = getattr(wrapper, "active_adapter", [*trained][:1])  # a name, or a list of names
    active = [active] if isinstance(active, str) else active
    if getattr(wrapper, "disable_adapters", False) or not active:
        return wrapper.original_module
    if len(active) > 1:
        raise UnsupportedModelError(f"several adapters are active on lm_head ({', '.join(active)}): set one active")
    return trained[active[0]]


def _refuse_adapter(name: str, module: Any) -> None:
    """Raise where a layer of PEFT's that is not merged changes what the module computes."""
    if "base_layer" not in getattr(module, "_modules", {}) or getattr(module, "merged", False):
        return
    if any(len(getattr(module, factors, ())) for factors in getattr(module, "adapter_layer_names", ())):
        raise UnsupportedModelError(
            f"{name} carries an adapter's factors ({type(module).__module__}.{type(module).__name__}); leave it out of "
            "the adapter's target modules, or train it whole (modules_to_save)"
        )


def tied(model: nn.Module) -> bool:
    """Whether head and embedding are one matrix."""
    inner: Any = unwrap(model)
    head, embedding = head_weight(model), _parameter(inner.get_input_embeddings(), "weight")
    same_memory = not is_sharded(head) and not is_sharded(embedding) and head.data_ptr() == embedding.data_ptr()
    return same_memory or _parameter(inner.get_output_embeddings(), "weight") is embedding


def _parameter(module: Any, name: str) -> Any:
    """A module's parameter as it is, without DeepSpeed's attention.

    Inside a forward, ZeRO-3 gathers a partitioned parameter when it is read from `_parameters` by `[]`, as attribute
    access does: a collective, for which the other ranks may never come. `dict.get` is not overridden.
    """
    inner = getattr(module, "base_layer", None) if isinstance(module, nn.Module) else None  # PEFT's wrapper of a layer
    if isinstance(inner, nn.Module):
        module = inner
    if isinstance(module, nn.Module) and name in module._parameters.keys():  # noqa: SIM118 - what `in` calls is theirs
        return dict.get(module._parameters, name)
    return getattr(module, name, None)


#: Names of mesh dimensions over which ranks hold the same rollouts: each of them would send all.
_MODEL_PARALLEL: Final = frozenset({"tp", "tensor", "tensor_parallel", "cp", "context", "sp", "sequence", "pp", "pipe"})


def refuse_model_parallel(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` where the model is split over ranks that see the same rollouts."""
    for name, parameter in unwrap(model).named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        shared = _MODEL_PARALLEL & set(getattr(mesh, "mesh_dim_names", None) or ())
        if shared:
            raise UnsupportedModelError(
                f"{name} is split over the mesh dimension {', '.join(sorted(shared))}: its ranks hold the same "
                "rollouts, and each would send them. Data parallelism and its sharded forms (FSDP2, ZeRO-3) are "
                f"supported; here {ENGINE_INSTEAD}"
            )


def is_sharded(weight: Tensor) -> bool:
    """Whether this rank holds only a part of a matrix now.

    A DTensor (FSDP2, tensor parallel); empty, or still on its way (ZeRO-3); flat or without storage (FSDP1); on the
    device `meta`, until the trainer loads it.
    """
    # ZeRO-3 gives a parameter its full shape while the gather that fills it is still under way.
    status = getattr(getattr(weight, "ds_status", None), "name", "AVAILABLE")
    if status != "AVAILABLE" or hasattr(weight, "to_local") or weight.numel() == 0 or weight.ndim != 2:
        return True
    return weight.is_meta or weight.untyped_storage().nbytes() == 0


def _dtype_of_copy(weight: Tensor) -> torch.dtype:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModelError(f"weights must be float32, float16 or bfloat16, got {weight.dtype}")
    return torch.bfloat16 if weight.dtype == torch.float32 and weight.numel() * 4 > _EXACT_BYTES else weight.dtype


def snapshot(weight: Tensor) -> Tensor:
    """A contiguous copy on the host that later training steps cannot change."""
    dtype = _dtype_of_copy(weight)
    return weight.detach().to("cpu", dtype, copy=True).contiguous()


class RunRegistration:
    """Body of `PUT /runs/{run}`. Weights that are whole are copied at once; `add_...` copies the others later.

    `logit_map`: what the model does to its logits after lm_head, where its type is not known here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        aux_layers: Sequence[int],
        policy_version: int = 0,
        draft_vocab_size: int | None = None,
        initial_drafter: Path | str | None = None,
        logit_map: wire.LogitMap | None = None,
        registers: bool = True,
    ) -> None:
        """`registers`: whether this process does; else nothing is copied, and only the facts are of use."""
        self.config = target_config(model)
        self.logit_map = known_logit_map(model, self.config) if logit_map is None else logit_map
        self.fingerprint = wire.target_fingerprint(self.config, aux_layers)
        self.metadata = {
            "format": wire.RUN_FORMAT,
            "config": json.dumps(self.config),
            "aux_layers": json.dumps({"convention": wire.AUX_CONVENTION, "layers": list(aux_layers)}),
            "target_fingerprint": self.fingerprint,
            "policy_version": str(policy_version),
            **self.logit_map.metadata(),
        }
        if draft_vocab_size is not None:
            self.metadata["draft_vocab_size"] = str(draft_vocab_size)
        self.tensors: dict[str, wire.Tensor] = {}
        if initial_drafter is not None and registers:
            self._embed_drafter(Path(initial_drafter))
        head, embedding = head_weight(model), embedding_weight(model)
        for weight in (head, embedding):
            _dtype_of_copy(weight)  # refused on every rank alike
        self._head_name = "embed_tokens" if tied(model) else "lm_head"
        if registers and not is_sharded(embedding):
            self.add_embedding(embedding)
        if registers and not is_sharded(head):
            self.add_head(head)

    @property
    def complete(self) -> bool:
        """Whether embedding and head are in it."""
        return {"embed_tokens", self._head_name} <= self.tensors.keys()

    def add_embedding(self, whole_VH: Tensor) -> None:
        """Copy the embedding to the host."""
        self.tensors["embed_tokens"] = as_wire(snapshot(whole_VH))

    def add_head(self, whole_VH: Tensor) -> None:
        """Copy the head to the host, if it is not there: a tied one is the embedding."""
        if self._head_name not in self.tensors:
            self.tensors[self._head_name] = as_wire(snapshot(whole_VH))

    def _embed_drafter(self, directory: Path) -> None:
        weights, config = directory / "model.safetensors", directory / "config.json"
        for path in (weights, config):
            if not path.is_file():
                raise FileNotFoundError(f"initial_drafter must hold model.safetensors and config.json; no {path}")
        file, document = wire.MappedFile(weights), json.loads(config.read_text(encoding="utf-8"))
        names = {name: name for name in file.header.tensors}
        if isinstance(document, dict) and is_nested(document):  # as speculators publishes it, and vLLM starts with it
            try:
                document, names = canonical_config(document), canonical_names(names)
            except DrafterError as error:
                raise UnsupportedModelError(f"{directory}: {error}") from error
        for ours, theirs in names.items():
            # A copy: a file that is cut short while it waits to be sent would end the trainer by SIGBUS.
            held = file.array(theirs).copy()
            self.tensors[f"drafter.{ours}"] = wire.Tensor.of(held, file.header.tensors[theirs].dtype)
        self.metadata["drafter_config"] = json.dumps(document)

    def encode(self) -> list[bytes | memoryview]:
        """The request body, as parts. Raises `UnsupportedModelError` where a weight was never whole."""
        if not self.complete:
            raise UnsupportedModelError(
                "the embedding or lm_head is sharded over ranks, and no forward has shown it whole yet: attach before "
                "the trainer shards the model, or let another process of the run (an engine) register it"
            )
        return wire.encode(self.tensors, self.metadata)

    def job(self, run: str) -> Job:
        """The request."""
        return Job("PUT", run_path(run), self.encode, sum(t.data.nbytes for t in self.tensors.values()), keep=True)


def head_job(run: str, weight: Tensor, policy_version: int, *, went_back: bool = False, session: str = "") -> Job:
    """`PUT /runs/{run}/head` with a snapshot of `lm_head` as it is now.

    `went_back`: this process has loaded an earlier checkpoint, which no registration tells the service. `session`: the
    trainer's, if it has one.
    """
    tensors = {"lm_head": as_wire(snapshot(weight))}
    metadata = {"format": wire.HEAD_FORMAT, "policy_version": str(policy_version), "session": session}
    if went_back:
        metadata["went_back"] = "1"
    size = weight.numel() * weight.element_size()
    return Job("PUT", f"{run_path(run)}/head", lambda: wire.encode(tensors, metadata), size, keep=True)


class HeadWatch:
    """Tells when the head is to be sent again: it has moved by more than `tolerance`, or must hide other heads.

    Moved: |W' - W| / |W|, Frobenius, over at most 256 rows spread evenly over the vocabulary. A run that existed may
    hold heads of an earlier attempt, which only one that is received later hides. So there the first head of a version
    that was not registered is sent, moved or not.
    """

    ROWS: Final = 256

    def __init__(self, weight: Tensor, tolerance: float, policy_version: int) -> None:
        self.tolerance = tolerance
        V = weight.shape[0]
        self._rows = torch.linspace(0, V - 1, min(self.ROWS, V), dtype=torch.float64).long()
        self._sent = self._sample(weight)
        #: Until a head was sent after it; then None.
        self._registered_version: int | None = policy_version
        self._begun = False

    def _sample(self, weight: Tensor) -> Tensor:
        return weight.detach()[self._rows.to(weight.device)].float().cpu()

    def is_due(self, weight: Tensor, policy_version: int, *, joined: bool = False) -> bool:
        """Whether the head is to be sent before a batch of this policy version.

        It is where the weights moved, and where the run existed and its registered head is of another version.
        `joined`: the service has answered that the run existed. A first batch of another version than the registered
        one shows the same: the trainer goes on from a checkpoint.
        """
        existed, self._begun = joined or not self._begun, True
        hides = existed and self._registered_version not in (None, policy_version)
        change = (self._sample(weight) - self._sent).norm() / self._sent.norm().clamp_min(1e-30)
        return hides or float(change) > self.tolerance

    def mark(self, weight: Tensor) -> None:
        """The service has been sent this head."""
        self._sent = self._sample(weight)
        self._registered_version = None
