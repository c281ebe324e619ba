"""Drafters in the layouts of other projects: read into ours (`drafter.files.checkpoint`), and written back.

    sglang       flat config, `midlayer.*`: SafeAILab EAGLE, SGLang, TorchSpec, and what draftalign itself publishes
    specforge    the same, as SpecForge's own trainer reads it: `d2t` and `t2d` always, no `norm_output`
    speculators  nested config with a verifier, `layers.0.*`

Weights are never converted: an import and an export give the same bits. What changes are names, the config, and what
must not travel (`embed_tokens`, the verifier's head). What another project computes differently is refused by name.

Weights come as safetensors. Pickles (SafeAILab's `pytorch_model.bin`, SpecForge's `training_state.pt`) are read only
where a person asks for it, with `draftalign convert --pickle`. torch's restricted unpickler builds tensors from them
and runs no code of theirs. The service and the agent read safetensors alone, by other functions.

Facts on layouts: vLLM 0.33, SGLang 0.5.23, SpecForge 0.2.0, speculators 0.9.0, as read in their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from drafter.errors import CheckpointError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    StoredDrafter,
    check_tensors,
    export_config,
    opened,
    read_config,
    read_vocabulary,
    write_files,
    write_stored,
)
from drafter.files.pickles import STATE_DICT, TRAINING_STATE, tensors_of
from drafter.model.eagle3 import DrafterConfig
from rl_hooks.format.drafter import INDEX_FILE, Sizes
from rl_hooks.format.eagle3 import parse_config, tensor_shapes, with_defaults
from rl_hooks.format.engines import EngineName, limits
from rl_hooks.format.layouts import (
    RESIDUAL_UNSAID,
    ROPE_THETA,
    canonical_names,
    flattened,
    is_nested,
    with_rope_theta,
)

Layout = Literal["sglang", "speculators", "specforge"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Positions below which policies are often served longer than a drafter's config says.
_LONG: Final = 32_768
#: What a speculators config proposes where nobody said otherwise.
_SPECULATIVE_TOKENS: Final = 3


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as a speculators config names it."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A drafter that was read, the layout that it came in, and what a person should know about it."""

    stored: StoredDrafter
    layout: Layout
    notes: tuple[str, ...]
    verifier: Verifier
    speculative_tokens: int  # drafted per round, as a speculators config proposes


def import_drafter(
    directory: Path,
    *,
    layout: Layout | None = None,
    aux_layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
    config_file: Path | None = None,
    pickles: bool = False,
) -> Imported:
    """Read model.safetensors and config.json in any layout (default: found out). Raises `CheckpointError`.

    `aux_layers` ("entering" ids) and `norm_before_residual` say what the config leaves open, and must agree with what
    it does say. `config_file` stands for a config.json that `directory` lacks. With `pickles`, pytorch_model.bin or
    SpecForge's training_state.pt is read where there is no model.safetensors; without, they are refused unread.
    """
    path = _weights_file(directory, pickles=pickles)
    document = read_config(_config_path(directory, config_file))
    if is_mtp(document):
        raise CheckpointError(
            f"{directory} holds an MTP module, which has one layout in every project (DeepSeek-V3's): "
            "`draftalign convert --to mtp` takes it out of a policy's checkpoint"
        )
    if path.name == MODEL_FILE and _is_model(path):
        raise CheckpointError(f"{directory} holds a whole model, not a drafter: its {MODEL_FILE} has no fc.weight")
    nested = is_nested(document)
    if layout is None:
        layout = "speculators" if nested else "specforge" if path.name == TRAINING_STATE else "sglang"
    elif (layout == "speculators") != nested:
        raise CheckpointError(f"{directory} is not in the {layout} layout; leave the layout out to have it found")
    notes: list[str] = []
    flat = flattened(document) if nested else dict(document)
    _settle_norms(flat, layout, norm_before_residual, notes)
    _settle_aux_layers(flat, aux_layers)
    _settle_defaults(flat, notes)
    config = parse_config(flat)
    tensors = _read_tensors(path, config, notes)
    vocabulary = read_vocabulary(tensors, config)
    weights = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    stored = StoredDrafter(config, vocabulary, weights)
    check_tensors(stored.tensors(), config)
    stated = document.get("speculators_config") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"config.json: speculators_config must be an object, got {stated!r}")
    return Imported(stored, layout, (*notes, *engine_limits(config)), _verifier(stated), _speculative_tokens(stated))


def export_drafter(
    directory: Path,
    stored: StoredDrafter,
    layout: Layout,
    *,
    verifier: Verifier | None = None,
    speculative_tokens: int = _SPECULATIVE_TOKENS,
) -> None:
    """Write a drafter into an existing `directory` in one of `LAYOUTS`, synced to disk.

    `verifier` names the target in a speculators config, `speculative_tokens` is what that proposes to draft per round;
    the other layouts have no place for them. Raises `CheckpointError` for a drafter that the layout's readers would
    silently compute otherwise.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"a layout is one of {', '.join(LAYOUTS)} (vLLM reads the first two), got {layout!r}")
    if layout != "speculators" and stored.config.norm_before_residual:
        raise CheckpointError(
            f"norm_before_residual is true, which readers of the {layout} layout do not know: they would compute "
            "another function without an error. Export it as speculators (for vLLM), or train one without"
        )
    if layout == "specforge" and stored.config.num_hidden_layers > 1:
        raise CheckpointError(
            f"the drafter has {stored.config.num_hidden_layers} layers, and SpecForge's model has one: it would leave "
            "the others out without an error. Export it as sglang (its names are those that vLLM reads) or speculators"
        )
    if layout == "specforge" and stored.config.norm_before_fc:
        raise CheckpointError(
            "norm_before_fc is true, which SpecForge's model does not have: it would leave input_norm.weight out "
            "without an error. Export it as sglang or speculators"
        )
    if layout == "sglang":
        write_stored(directory, stored)
        return
    check_tensors(stored.tensors(), stored.config)
    if layout == "specforge":
        maps = {"d2t": stored.vocabulary.d2t, "t2d": stored.vocabulary.t2d}
        tensors, document = {**stored.weights, **maps}, export_config(stored.config, stored.dtype)
        del document["norm_output"]  # false would make SpecForge leave out the norm before lm_head
    else:
        renamed = {name.replace("midlayer.", "layers.0."): t for name, t in stored.tensors().items()}
        tensors, document = renamed, _speculators_config(stored, verifier or Verifier(), speculative_tokens)
    write_files(directory, tensors, document)


def is_mtp(document: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an MTP module (`drafter.files.mtp`) or of a policy that has one."""
    own = document.get("draftalign")
    return bool(document.get("num_nextn_predict_layers")) or (isinstance(own, Mapping) and own.get("kind") == "mtp")


def engine_limits(sizes: Sizes) -> tuple[str, ...]:
    """What engines cannot do with such a drafter, a sentence each."""
    return tuple(sentence for engine in get_args(EngineName) for sentence in limits(engine, sizes))


# --- reading --------------------------------------------------------------------------------------------------------


def _weights_file(directory: Path, *, pickles: bool) -> Path:
    """The file that holds the weights. Refuses, by what is there, a directory that has none which may be read."""
    if (directory / MODEL_FILE).is_file():
        return directory / MODEL_FILE
    names = sorted(path.name for path in directory.iterdir() if path.is_file()) if directory.is_dir() else []
    found = [name for name in (STATE_DICT, TRAINING_STATE) if name in names]
    if found and not pickles:
        raise CheckpointError(
            f"{directory / found[0]} is a pickle, and only safetensors is read; `draftalign convert --pickle` makes "
            "it one"
        )
    if len(found) > 1:
        raise CheckpointError(f"{directory} holds {' and '.join(found)}; leave only the one that is the drafter")
    if found:
        return directory / found[0]
    others = [name for name in names if name.endswith(_PICKLES)]
    if others:
        raise CheckpointError(
            f"{directory / others[0]} is a pickle of unknown content; expected {MODEL_FILE}, {STATE_DICT} (tensors by "
            f"name) or SpecForge's {TRAINING_STATE}. Name it so if it is one of them"
        )
    if INDEX_FILE in names:
        raise CheckpointError(f"{directory} holds a sharded checkpoint; save the drafter as one {MODEL_FILE}")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; expected one with {MODEL_FILE} and {CONFIG_FILE}")
    raise CheckpointError(f"{directory} has no {MODEL_FILE}; expected it beside {CONFIG_FILE}")


def _config_path(directory: Path, given: Path | None) -> Path:
    beside = directory / CONFIG_FILE
    if given is None:
        if not beside.is_file():
            raise CheckpointError(
                f"{directory} has no {CONFIG_FILE}; put it there (or name it: convert --draft-config FILE)"
            )
        return beside
    if beside.exists():
        raise CheckpointError(f"{directory} has its own {CONFIG_FILE}, and you name {given}; leave out one of them")
    if not given.is_file():
        raise CheckpointError(f"{given} is no file; name the drafter's {CONFIG_FILE}")
    return given


def _settle_norms(flat: dict[str, Any], layout: Layout, given: bool | None, notes: list[str]) -> None:
    """Two switches whose absence or value means different things to different readers."""
    stated = flat.get("norm_before_residual")
    if given is not None and stated is not None and stated != given:
        raise CheckpointError(f"config.json says norm_before_residual {stated!r}, you say {given}; which is right?")
    if stated is None:
        if layout == "speculators" and given is None:
            raise CheckpointError(f"{RESIDUAL_UNSAID} (--norm-before-residual or --no-norm-before-residual)")
        flat["norm_before_residual"] = bool(given)
    if layout == "specforge":
        if flat.pop("norm_output", True) is not True:
            raise CheckpointError("norm_output is false, which in SpecForge leaves out the norm before lm_head")
    elif flat.get("norm_output"):
        raise CheckpointError(
            "norm_output is true, which to engines feeds normed states back (EAGLE 3.1; not supported) and to "
            "SpecForge 0.2 only means the usual norm before lm_head. If SpecForge wrote this, say so (--from specforge)"
        )
    # HF writes null for what is off.
    for name in [name for name, value in flat.items() if value is None]:
        del flat[name]
    if flat.get("norm_before_residual") and layout == "specforge":
        notes.append("SpecForge itself has no norm_before_residual for EAGLE-3; make sure the config is this drafter's")


def _settle_aux_layers(flat: dict[str, Any], given: Sequence[int] | None) -> None:
    """Put "entering" ids at the top level, from eagle_config's output ids or from the caller where they are missing."""
    nested = flat.get("eagle_config")
    outputs = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, Mapping) else None
    if "eagle_aux_hidden_state_layer_ids" not in flat:
        if isinstance(outputs, list) and all(type(i) is int for i in outputs):
            flat["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in outputs]
        elif given is not None:
            flat["eagle_aux_hidden_state_layer_ids"] = list(given)
        else:
            raise CheckpointError(
                "config.json does not name the layers whose states the drafter reads. Engines then capture those "
                "entering layers 2, L//2 and L-3 of a target with L; say them (--aux-layers 2,18,33 for L = 36)"
            )
    if given is not None and flat["eagle_aux_hidden_state_layer_ids"] != list(given):
        raise CheckpointError(
            f"config.json names layers {flat['eagle_aux_hidden_state_layer_ids']} (entering), you say {list(given)}"
        )


def _settle_defaults(flat: dict[str, Any], notes: list[str]) -> None:
    """What transformers' LlamaConfig assumes where a config is silent."""
    silent = "max_position_embeddings" not in flat
    flat.update(with_defaults(flat))
    limit = flat["max_position_embeddings"]
    if type(limit) is int and limit < _LONG:
        said = "config.json gives no max_position_embeddings, so transformers assumes" if silent else "it says"
        notes.append(
            f"{said} max_position_embeddings {limit}: vLLM's V1 model runner drafts for no request while one of the "
            "batch is longer; raise it in config.json to the length that the policy is served with (it is a limit only)"
        )
    if (filled := with_rope_theta(flat)) != flat:
        flat.update(filled)
        notes.append(f"config.json gives no rope_theta: {ROPE_THETA:g} is assumed, as transformers does")


def _read_tensors(path: Path, config: DrafterConfig, notes: list[str]) -> dict[str, Tensor]:
    """Tensors by canonical name, without those of the target, those that the config knows of its sizes.

    The maps, where there are any, as int64 and bool.
    """
    tensors = _read_safetensors(path, notes) if path.name == MODEL_FILE else _read_pickle(path, notes)
    sizes = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,), **tensor_shapes(config)}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != sizes.get(name, tuple(tensor.shape)):
            raise CheckpointError(f"{path}: {name} is {tuple(tensor.shape)}, its config says {sizes[name]}")
    for name, kinds, wanted in (
        ("d2t", (torch.int64, torch.int32), torch.int64),
        ("t2d", (torch.bool, torch.uint8), torch.bool),
    ):
        if name in tensors:
            if tensors[name].dtype not in kinds:
                raise CheckpointError(f"{name} must be {wanted}, got {tensors[name].dtype}")
            tensors[name] = tensors[name].to(wanted)
    return tensors


def _is_model(path: Path) -> bool:
    """Whether a file holds layers of a whole model, such as the policy, and nothing that joins its states."""
    with opened(path) as file:
        names = file.keys()
    return "fc.weight" not in names and any(name.startswith("model.layers.") for name in names)


def _read_safetensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    with opened(path) as file:
        names = _canonical_names(file.keys(), path, notes)
        return {ours: file.get_tensor(theirs) for ours, theirs in names.items()}


def _read_pickle(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """Copies, each of its own: what torch maps may overlap, repeat itself and change with the file."""
    found = tensors_of(path)
    tensors = {ours: found[theirs] for ours, theirs in _canonical_names(found, path, notes).items()}
    # One element may stand for many (a stride of 0): a small file must not ask for any amount of memory.
    needed, there = sum(tensor.nbytes for tensor in tensors.values()), path.stat().st_size
    if needed > there:
        raise CheckpointError(
            f"{path} has {there} bytes, and its tensors would take {needed}: some share their elements. Save "
            f"contiguous ones as {MODEL_FILE}"
        )
    return {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}


def _canonical_names(names: Iterable[str], path: Path, notes: list[str]) -> dict[str, str]:
    """The file's name of each tensor by its canonical one, without the target's."""
    theirs = list(names)
    try:
        found = canonical_names(theirs)
    except CheckpointError as error:
        raise CheckpointError(f"{path} holds {error}") from error
    left_out = (name for name in theirs if name not in found.values())
    notes.extend(f"{n} is left out: it is the target's, and engines would overwrite the policy's" for n in left_out)
    return found


def _verifier(stated: Mapping[str, Any]) -> Verifier:
    verifier = stated.get("verifier") or {}
    names = verifier.get("architectures") or [] if isinstance(verifier, Mapping) else None
    if not isinstance(verifier, Mapping) or not isinstance(names, list):
        raise CheckpointError(
            f"config.json: verifier must be an object with a list of architectures, got {verifier!r:.200}"
        )
    name = verifier.get("name_or_path")
    return Verifier(None if name is None else str(name), tuple(str(a) for a in names))


def _speculative_tokens(stated: Mapping[str, Any]) -> int:
    """What the default method proposes, or the first one where the default is not among them."""
    methods = stated.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise CheckpointError(f"config.json: proposal_methods must be a list of objects, got {methods!r:.200}")
    default = stated.get("default_proposal_method")
    chosen = [method for method in methods if method.get("proposal_type") == default] or methods
    tokens = chosen[0].get("speculative_tokens", _SPECULATIVE_TOKENS) if chosen else _SPECULATIVE_TOKENS
    if type(tokens) is not int or tokens < 1:
        raise CheckpointError(f"config.json: speculative_tokens must be a positive integer, got {tokens!r}")
    return tokens


# --- writing --------------------------------------------------------------------------------------------------------


def _speculators_config(stored: StoredDrafter, verifier: Verifier, speculative_tokens: int) -> dict[str, Any]:
    """The nested config. Its aux ids are "entering" ones, as vLLM reads them; it has no second field for SGLang."""
    flat = export_config(stored.config, stored.dtype)
    layer = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("num_hidden_layers", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
        *("rope_theta", "rope_parameters", "rope_scaling", "attention_bias", "tie_word_embeddings", "model_type"),
    )
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{name: flat[name] for name in ("draft_vocab_size", "target_hidden_size", "norm_before_residual")},
        "norm_before_fc": stored.config.norm_before_fc,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        "target_model_type": flat["target_model_type"],
        "tie_word_embeddings": False,
        "torch_dtype": flat["torch_dtype"],
        "transformer_layer_config": {**{name: flat[name] for name in layer if name in flat}, "mlp_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
    }
