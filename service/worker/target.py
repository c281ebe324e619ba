"""The target of one run as the worker sees it: what PUT /runs said, and the head and embedding of each policy version.

Heads arrive now and then (`PUT /runs/{run}/head`). A batch of policy version v is scored and trained with the head that
was received last among those that are not of a version above v. In a run that goes forward that is the one of the
highest version; a trainer that goes back to an earlier checkpoint sends its head there, and that one hides those of the
attempt that it abandoned, whose versions it reaches again. Batches that came before it are still checked against
those. With tied embeddings a full head is the embedding as well; engines share the target's live embedding with the
drafter, so the worker must move with it.

What is large stays in the type that it was sent in. Heads stay on the host, the rows that a drafter needs of one are
copied to the device once (`TargetHead.rows`); embeddings, which rows are looked up in, are on the device.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from drafter.errors import TargetHeadError
from drafter.target import TargetHead
from rl_hooks.wire import LogitMap, MappedFile, WireError
from service.errors import WorkerError
from service.storage.layout import Layout
from service.storage.runs import check_registered

log = logging.getLogger("draftalign.worker")

#: Batches that are trained on again come from about as many policy versions.
_KEPT_HEADS = 8


def read_tensor(file: MappedFile, name: str) -> Tensor:
    """One tensor of a mapped file, copied out in the type that it is stored in."""
    array = torch.from_numpy(np.array(file.array(name)))  # a copy: the map is read-only
    return array.view(torch.bfloat16) if file.header.tensors[name].dtype == "BF16" else array


class Upload(NamedTuple):
    """Which file a head came in, also where another of the same version has taken its place since."""

    changed_ns: int
    inode: int


def _received(head: tuple[int, Upload]) -> tuple[int, int]:
    """The order in which heads, by version, were received; of the same moment, by version."""
    version, file = head
    return file.changed_ns, version


def _in_force(heads: Mapping[int, Upload], batch_ns: int | None) -> int:
    late = {v for v, file in heads.items() if batch_ns is not None and file.changed_ns > batch_ns}
    there = max(((v, file) for v, file in heads.items() if v not in late), key=_received, default=(-1, None))
    return max(there[0], *late) if late else there[0]


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """Head and embedding in force at some policy version."""

    policy_version: int
    embed_tokens: Tensor  # [V, Ht] as it was sent, on the worker's device
    head: TargetHead  # on the host
    file: Upload | None  # where it was read; None: registered with the run


class Target:
    """The target of a run. `config` is the target's transformers configuration; `device` is where drafters run."""

    def __init__(self, layout: Layout, run: str, device: torch.device) -> None:
        self._layout = layout
        self._run = run
        self._device = device
        file = MappedFile(layout.target(run))  # closed again: runs are many, and few of them are at work
        self._header = file.header
        metadata = self._header.metadata
        self.config: Mapping[str, Any] = json.loads(metadata["config"])
        self.aux_layers: tuple[int, ...] = tuple(json.loads(metadata["aux_layers"])["layers"])
        self.policy_version = int(metadata.get("policy_version", "0"))
        self.draft_vocab_size = int(metadata["draft_vocab_size"]) if "draft_vocab_size" in metadata else None
        self.logit_map = LogitMap.from_metadata(metadata)
        self.embed_tokens = read_tensor(file, "embed_tokens").to(device)  # [V, Ht]
        self.tied = "lm_head" not in file
        self._heads: OrderedDict[int, PolicyHead] = OrderedDict()  # least recently used first
        self._useless: set[tuple[int, Upload]] = set()  # heads that cannot be used
        self._required: Tensor | None = None  # token ids whose rows a head must have

    @classmethod
    def open(cls, layout: Layout, run: str, device: torch.device | str = "cpu") -> Self:
        """Read a registered run; WorkerError when its file is not what PUT /runs accepts."""
        try:
            return cls(layout, run, torch.device(device))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise WorkerError(f"run {run!r} cannot be opened: {error}; PUT /runs/{run} again") from error

    @property
    def initial_drafter(self) -> dict[str, Tensor] | None:
        """Tensors of the drafter that came with the run, by canonical name, or None."""
        names = [n for n in self._header.tensors if n.startswith("drafter.")]
        if not names:
            return None
        file = MappedFile(self._layout.target(self._run))
        tensors = {n.removeprefix("drafter."): read_tensor(file, n) for n in names}
        return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}  # as all that is published

    @property
    def initial_drafter_config(self) -> dict[str, Any]:
        """The configuration that came with `initial_drafter`."""
        config: dict[str, Any] = json.loads(self._header.metadata["drafter_config"])
        return config

    def check(self) -> None:
        """Raise `DrafterError` unless a lineage can begin on what was registered: what PUT /runs has asked as well."""
        check_registered(self.config, self.aux_layers, self._header)

    @property
    def ending_tokens(self) -> list[int]:
        """Tokens that end a response, as the target's configuration names them: always worth drafting."""
        named = self.config.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        return sorted({i for i in ids if type(i) is int and 0 <= i < self.embed_tokens.shape[0]})

    def lm_head(self) -> Tensor:
        """The registered head, [V, Ht] on the host as it was sent."""
        file = MappedFile(self._layout.target(self._run))
        return read_tensor(file, "embed_tokens" if self.tied else "lm_head")

    def at(self, policy_version: int, *, batch: Path | None = None) -> PolicyHead:
        """The head that was received last among those of `policy_version` and below.

        `batch`: the file of the batch that asks. A head that was received after it hides none of those that were there:
        the batch is of the attempt before. It counts if it is of a higher version: the head has come late.
        """
        found, batch_ns = self._uploads(policy_version), None
        if batch is not None:
            with contextlib.suppress(FileNotFoundError):
                batch_ns = batch.stat().st_mtime_ns
        while found:
            version = _in_force(found, batch_ns)
            file = found.pop(version)
            if (version, file) in self._useless:
                continue
            try:
                return self._cached(version, file)
            except (WireError, TargetHeadError) as error:
                log.warning("run %s: the head of policy version %d is not used: %s", self._run, version, error)
                self._useless.add((version, file))
        return self._cached(-1, None)

    def _cached(self, version: int, file: Upload | None) -> PolicyHead:
        if version not in self._heads or self._heads[version].file != file:
            self._heads[version] = self._load(version, file)
            while len(self._heads) > _KEPT_HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(version)
        return self._heads[version]

    def require_rows(self, ids: Tensor) -> None:
        """From now on use only heads that hold the rows of these token ids: the draft vocabulary's."""
        self._required = ids
        self._heads.clear()
        self._useless.clear()

    def forget_before(self, policy_version: int, *, newest: int) -> None:
        """Delete received heads that no batch of `policy_version` or later can need.

        `newest`: policy version of the newest batch seen. What came after its head stays: a trainer that went back to
        an earlier checkpoint has sent it, and its batches are still to come.
        """
        older, known = self._uploads(policy_version), self._uploads(max(policy_version, newest))
        in_force = max((v for v in known if v <= newest), default=None)
        if in_force is None or not older:
            return
        needed = {max(older), max(older.items(), key=_received)[0]}
        for version in older.keys() - needed:
            if older[version].changed_ns <= known[in_force].changed_ns:
                self._layout.head(self._run, version).unlink(missing_ok=True)

    def _upload(self, version: int) -> Upload | None:
        """The file that holds a version's head now; None when it has gone."""
        try:
            found = self._layout.head(self._run, version).stat()
        except FileNotFoundError:
            return None
        return Upload(found.st_mtime_ns, found.st_ino)

    def _uploads(self, policy_version: int) -> dict[int, Upload]:
        """The files of the heads of `policy_version` and below, by version."""
        stems = [p.stem for p in self._layout.heads(self._run).glob("*.safetensors")]
        versions = [int(stem) for stem in stems if stem.isdigit() and int(stem) <= policy_version]
        return {v: file for v in versions if (file := self._upload(v)) is not None}

    def _load(self, version: int, upload: Upload | None) -> PolicyHead:
        if version < 0:
            head = TargetHead(self.lm_head(), self.policy_version, logit_map=self.logit_map)
            return PolicyHead(self.policy_version, self.embed_tokens, head, None)
        file = MappedFile(self._layout.head(self._run, version))
        rows = read_tensor(file, "lm_head")
        ids = torch.from_numpy(np.array(file.array("ids"))).long() if "ids" in file else None
        if ids is not None and self._required is not None:
            missing = int((~torch.isin(self._required, ids)).sum())
            if missing:
                raise TargetHeadError(f"{missing} of {self._required.numel()} draft tokens have no row in it")
        embed = rows.to(self._device) if self.tied and ids is None else self.embed_tokens
        return PolicyHead(version, embed, TargetHead(rows, version, ids, self.logit_map), upload)
