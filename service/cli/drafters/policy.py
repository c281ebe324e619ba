"""The policy that a drafter is evaluated with: of a run, or of files of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rl_hooks.durable import at_home
from rl_hooks.format.drafter import INDEX_FILE, read_index
from service.errors import ConfigurationError
from service.settings import Settings
from service.storage.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from drafter.policy import Policy
    from rl_hooks.wire import LogitMap
    from service.worker.target import Target

#: Names of a target's token embedding: a run's own, and those of transformers checkpoints.
_EMBEDDINGS: Final = (
    *("embed_tokens", "embed_tokens.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    *("language_model.model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight"),
)
_HEADS: Final = ("lm_head", "lm_head.weight", "language_model.lm_head.weight", "output.weight")


class _FixedPolicy:
    """The policy in a safetensors file or in a model's directory, sharded or not: the same for all versions."""

    def __init__(self, path: Path, *, with_head: bool) -> None:
        from drafter.policy import Policy, TargetHead

        self._path = path
        self._directory = path if path.is_dir() else path.parent
        embed_tokens = self._find(_EMBEDDINGS)
        if embed_tokens is None:
            raise ConfigurationError(f"{path} holds no token embedding; looked for {', '.join(_EMBEDDINGS)}")
        head = TargetHead(self._lm_head(embed_tokens), self._logit_map()) if with_head else None
        self.registered = Policy(0, embed_tokens, head)

    def at(self, policy_version: int) -> Policy:
        """The same, under this version."""
        return replace(self.registered, version=policy_version)

    def _lm_head(self, embed_tokens: Tensor) -> Tensor:
        head = self._find(_HEADS)
        if head is None and not self._tied():
            raise ConfigurationError(
                f"{self._path} holds no head (looked for {', '.join(_HEADS)}) and no config.json that says that it is "
                "the embedding (tie_word_embeddings true); give a file or directory that has the policy's head"
            )
        return embed_tokens if head is None else head

    def _tied(self) -> bool:
        """Whether the embedding is the head, by config.json; without one, true of a single file."""
        if self._config is not None:
            return self._config.get("tie_word_embeddings") is True
        # Of several shards, another may hold the head.
        return not self._path.is_dir() and read_index(self._directory) is None

    def _logit_map(self) -> LogitMap:
        """What the policy does to its logits after the head, by config.json; without one, nothing."""
        from torch import nn

        from rl_hooks.errors import UnsupportedModelError
        from rl_hooks.sending.registration import known_logit_map

        config = self._config or {}
        kinds = config.get("architectures")
        name = str(kinds[0]) if isinstance(kinds, list) and kinds else "model of no named architecture"
        text = config.get("text_config")
        try:  # it looks at the name of the model's class
            return known_logit_map(type(name, (nn.Module,), {})(), text if isinstance(text, dict) else config)
        except (UnsupportedModelError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigurationError(
                f"{self._directory}: {error}. Or give --target a run of this policy: its registration says it"
            ) from error

    @cached_property
    def _config(self) -> Mapping[str, Any] | None:
        """The policy's config.json, if it is there."""
        from drafter.files.checkpoint import CONFIG_FILE, read_config

        path = self._directory / CONFIG_FILE
        return read_config(path) if path.exists() else None

    def _find(self, names: Sequence[str]) -> Tensor | None:
        from rl_hooks.wire import MappedFile
        from service.worker.target import read_tensor

        files = [MappedFile(path) for path in (_shards(self._path) if self._path.is_dir() else [self._path])]
        return next((read_tensor(file, name).float() for name in names for file in files if name in file), None)


def open_policy(target: str | None, state_dir: str | None, *, with_head: bool) -> _FixedPolicy | Target:
    """The policy that `--target` names, with `at` (the `Policy` of a version) and `registered` (the first one).

    `target` None: the policy of the only run there is, else of run `default`.
    """
    from service.worker.target import Target

    path = None if target is None else at_home(target)
    if path is not None and (path.is_dir() or path.suffix == ".safetensors"):
        return _FixedPolicy(path, with_head=with_head)
    layout = Layout(Settings.with_options(state_dir=state_dir).state_dir)
    names = layout.run_names()
    if target is None:
        if "default" not in names and len(names) > 1:
            raise ConfigurationError(f"the policy of which run? Give --target: {', '.join(names)}")
        target = names[0] if len(names) == 1 else "default"
    if target not in names:
        raise ConfigurationError(
            f"no run {target!r} under {layout.runs}, and no such file; --target takes a run's name, a safetensors file "
            "with the target's embedding, or the directory of a transformers model"
        )
    return Target.open(layout, target)


def _shards(directory: Path) -> list[Path]:
    """Files of a model: all those that its index names; without an index, all in the directory."""
    index = read_index(directory)
    if index is not None:
        files = [directory / name for name in sorted(set(index.values()))]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise ConfigurationError(
                f"{directory} lacks {', '.join(absent)}, which {INDEX_FILE} names; fetch the model again"
            )
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{directory} holds no safetensors file to take the target's embedding from")
    return files
