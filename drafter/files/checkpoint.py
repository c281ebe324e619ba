"""A drafter on disk, in the layout that SGLang and vLLM load as it stands: model.safetensors and config.json.

Reading is strict, because engines are not: a missing lm_head or d2t, a wrong layer id or an old embedding loads there
without an error and only shows as a poor α, or worse, as a changed policy. Whatever does not fit raises
`CheckpointError`. `embed_tokens` is never written and never accepted: engines that share it with the target would
overwrite the policy's own embedding. A drafter over the target's whole vocabulary has no `d2t` and `t2d`: vLLM refuses
to start with them, and they would say nothing.

Not here: other projects' layouts (`drafter.files.formats`), and publishing a directory atomically (the registry does
that). Files are complete and synced when `write_drafter` returns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.errors import CheckpointError, VocabularyError
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.mtp.module import MtpConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.durable import sync
from rl_hooks.format.drafter import CONFIG_FILE as CONFIG_FILE
from rl_hooks.format.drafter import MODEL_FILE as MODEL_FILE
from rl_hooks.format.drafter import fingerprint, read_object
from rl_hooks.format.eagle3 import FIXED, MAPS, SIZES, check_header, parse_config, tensor_shapes

#: Of the fixed fields, what an export states. The others are newer switches, which are off where they are absent.
_STATED: Final = ("norm_output", "attention_bias", "bias", "tie_word_embeddings")
_STORAGE: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class StoredDrafter:
    """A drafter as files hold it: weights [canonical name] in one dtype, without maps."""

    config: DrafterConfig
    vocabulary: DraftVocabulary
    weights: Mapping[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Storage of the weights."""
        return next(iter(self.weights.values())).dtype

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the canonical layout, `d2t` and `t2d` included where the vocabulary is reduced."""
        if len(self.vocabulary) == self.vocabulary.vocab_size:
            return dict(self.weights)
        return {**self.weights, "d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}


def write_drafter(directory: Path, drafter: Eagle3Drafter, *, dtype: torch.dtype = torch.float32) -> None:
    """Write model.safetensors and config.json into an existing `directory`, synced to disk.

    `dtype` is the storage of the weights. Refuses a drafter with weights that are not finite, also once rounded.
    """
    if dtype not in _STORAGE.values():
        raise CheckpointError(f"weights are stored as float32, bfloat16 or float16, got {dtype}")
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in drafter.named_parameters()}
    write_stored(directory, StoredDrafter(drafter.config, drafter.vocabulary, weights))


def write_stored(directory: Path, stored: StoredDrafter) -> None:
    """`write_drafter` for weights that no model was made of."""
    tensors = stored.tensors()
    check_tensors(tensors, stored.config)
    write_files(directory, tensors, export_config(stored.config, stored.dtype))


def write_files(directory: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write both files, and sync them and their directory to the disk."""
    save_file(dict(tensors), str(directory / MODEL_FILE), metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n")
    for path in (directory / MODEL_FILE, directory / CONFIG_FILE, directory):
        sync(path)


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """Raise `CheckpointError` unless names and shapes are the config's, in one dtype, and every value is finite."""
    expected = tensor_shapes(config)
    for name in expected.keys() | tensors.keys():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != expected.get(name):
            raise CheckpointError(f"{name} of this drafter is {shape}, its config says {expected.get(name)}")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in MAPS}
    if len(dtypes) != 1 or not dtypes <= set(_STORAGE.values()):
        raise CheckpointError(
            f"weights must share one dtype of float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} is not finite as {tensor.dtype}; go back to the last good weights, do not publish"
            )


def read_drafter(directory: Path) -> Eagle3Drafter:
    """Read what `write_drafter` wrote, or another's export in the same layout, as float32 on the CPU.

    Raises `CheckpointError`: names, shapes, dtypes, vocabulary, values.
    """
    return build_drafter(read_stored(directory))


def read_stored(directory: Path) -> StoredDrafter:
    """Read the files of a drafter without building it. Raises `CheckpointError`."""
    config = parse_config(read_config(directory / CONFIG_FILE))
    tensors = _read_tensors(directory / MODEL_FILE, config)
    vocabulary = read_vocabulary(tensors, config)
    return StoredDrafter(config, vocabulary, {n: t for n, t in tensors.items() if n not in MAPS})


def build_drafter(stored: StoredDrafter) -> Eagle3Drafter:
    """Make the model of stored weights, in float32 on the CPU."""
    # The constructor draws initial weights; a reader must not advance the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        drafter = Eagle3Drafter(stored.config, stored.vocabulary)
    maps = {"d2t": stored.vocabulary.d2t, "t2d": stored.vocabulary.t2d}
    drafter.float().load_state_dict({**{name: t.float() for name, t in stored.weights.items()}, **maps})
    return drafter


def export_config(config: DrafterConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The engines' config.json. vLLM reads the top-level layer ids ("entering"); SGLang adds 1 to eagle_config's."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_type": config.model_type,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in SIZES},
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **_rope_fields(config),
        "norm_before_residual": config.norm_before_residual,
        **({"norm_before_fc": True} if config.norm_before_fc else {}),
        "num_hidden_layers": config.num_hidden_layers,
        **{name: FIXED[name] for name in _STATED},
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
    }


def _rope_fields(config: DrafterConfig) -> dict[str, Any]:
    """Rotary positions as transformers 5 reads them, and scaled ones under the name of transformers 4 and SpecForge."""
    if config.rope_scaling is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    scaling = {"rope_type": "llama3", **asdict(config.rope_scaling)}
    return {"rope_parameters": {**scaling, "rope_theta": config.rope_theta}, "rope_scaling": scaling}


def config_fingerprint(config: DrafterConfig | MtpConfig, vocabulary: DraftVocabulary) -> str:
    """`rl_hooks.format.drafter.fingerprint` of a drafter's sizes and its vocabulary."""
    return fingerprint(config, vocabulary.digest)


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a JSON object of bounded size. Raises `CheckpointError`."""
    try:
        return read_object(path)
    except OSError as error:
        raise CheckpointError(f"a drafter needs {CONFIG_FILE} beside {MODEL_FILE}: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, to be read tensor by tensor. Raises `CheckpointError` where it cannot be."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error


def _read_tensors(path: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Load a file after its header has been compared with the config. Values are checked to be finite."""
    with opened(path) as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        check_header({n: (tuple(s.get_shape()), s.get_dtype()) for n, s in found.items()}, config)
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in found}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds NaN or infinity; this drafter must not be served")
    return tensors


def read_vocabulary(tensors: Mapping[str, Tensor], config: DrafterConfig) -> DraftVocabulary:
    """The draft vocabulary that d2t gives, held against t2d; without them the target's whole one."""
    if "d2t" not in tensors and "t2d" not in tensors and config.draft_vocab_size == config.vocab_size:
        return DraftVocabulary.full(config.vocab_size)
    if "d2t" not in tensors:
        raise CheckpointError("d2t is missing: without it engines take the first draft tokens for the target's")
    try:
        vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size)
    except VocabularyError as error:
        raise CheckpointError(str(error)) from error
    if "t2d" not in tensors:
        return vocabulary
    wrong = torch.nonzero(vocabulary.t2d != tensors["t2d"]).flatten()
    if wrong.numel():
        raise CheckpointError(
            f"d2t and t2d disagree on {wrong.numel()} tokens, first on {int(wrong[0])}: they come from two exports"
        )
    return vocabulary
