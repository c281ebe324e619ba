"""The target of one run, as the worker sees it: the registration, and head and embedding of each policy version.

Heads arrive now and then (`PUT /runs/{run}/head`). A batch of policy version v is scored and trained with one of the
heads of versions up to v: the one that was received last. In a run that goes forward this is the head of the highest
version. A trainer that goes back to an earlier checkpoint sends its head again. That head hides the heads of the
abandoned attempt, whose versions the trainer reaches again. Batches that came before it are still checked against the
hidden heads.

With tied embeddings a full head is the embedding as well. Engines share the target's live embedding with the drafter,
so the worker's embedding must follow it.

Large tensors keep the type in which they were sent. Heads stay on the host; the rows that a drafter needs are copied to
the device once (`TargetHead.rows`). Embeddings are on the device, where their rows are looked up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.errors import TargetHeadError
from drafter.policy import Policy, TargetHead
from rl_hooks.wire import LogitMap, MappedFile, WireError
from service.errors import WorkerError
from service.storage.layout import Layout
from service.storage.runs import check_head_bytes, check_registered, delete_heads, load_target

log = logging.getLogger("draftalign.worker")

#: About how many policy versions recent batches, which are trained on again, come from.
_KEPT_HEADS = 8


def read_tensor(file: MappedFile, name: str) -> Tensor:
    """A copy of one tensor of a mapped file, in its stored type."""
    array = torch.from_numpy(np.array(file.array(name)))  # a copy: the map is read-only
    return array.view(torch.bfloat16) if file.header.tensors[name].dtype == "BF16" else array


class HeadFile(NamedTuple):
    """Identity of a head's file. A later head of the same version replaces the file, and has another identity."""

    changed_ns: int
    inode: int


def _received(head: tuple[int, HeadFile]) -> tuple[int, int]:
    """Sort key: by the time at which a head was received, then by version."""
    version, file = head
    return file.changed_ns, version


def _in_force(heads: Mapping[int, HeadFile], batch_ns: int | None) -> int:
    late = {v for v, file in heads.items() if batch_ns is not None and file.changed_ns > batch_ns}
    there = max(((v, file) for v, file in heads.items() if v not in late), key=_received, default=(-1, None))
    return max(there[0], *late) if late else there[0]


class ReceivedHeads:
    """The files of heads that came after the run's registration. It remembers which of them cannot be used."""

    def __init__(self, layout: Layout, run: str) -> None:
        self._layout = layout
        self._run = run
        self._useless: set[tuple[int, HeadFile]] = set()

    def path(self, version: int) -> Path:
        """Where a version's head lies."""
        return self._layout.head(self._run, version)

    def refuse(self, version: int, file: HeadFile) -> None:
        """Never offer this file again."""
        self._useless.add((version, file))

    def in_force(self, policy_version: int, batch: Path | None) -> Iterator[tuple[int, HeadFile]]:
        """The heads of `policy_version` and below: first the one in force, then what would be in force without it."""
        found, batch_ns = self._up_to(policy_version), None
        if batch is not None:
            with contextlib.suppress(FileNotFoundError):
                batch_ns = batch.stat().st_mtime_ns
        while found:
            version = _in_force(found, batch_ns)
            file = found.pop(version)
            if (version, file) not in self._useless:
                yield version, file

    def forget_before(self, policy_version: int, *, newest: int) -> None:
        """Delete the heads that no batch of `policy_version` or later can need.

        `newest`: policy version of the newest batch seen. Heads that came after that batch's head stay: a trainer that
        went back to an earlier checkpoint has sent them, and its batches are still to come.
        """
        older, known = self._up_to(policy_version), self._up_to(max(policy_version, newest))
        in_force = max((v for v in known if v <= newest), default=None)
        if in_force is None or not older:
            return
        needed = {max(older), max(older.items(), key=_received)[0]}
        gone = [v for v in older.keys() - needed if older[v].changed_ns <= known[in_force].changed_ns]
        delete_heads(self._layout, self._run, list(map(self.path, gone)))

    def times(self) -> list[tuple[int, int]]:
        """Policy version of each head, and when it was received (Unix ns)."""
        return [(version, file.changed_ns) for version, file in self._up_to(sys.maxsize).items()]

    def _up_to(self, policy_version: int) -> dict[int, HeadFile]:
        stems = [p.stem for p in self._layout.heads(self._run).glob("*.safetensors")]
        versions = [int(stem) for stem in stems if stem.isdigit() and int(stem) <= policy_version]
        return {v: file for v in versions if (file := self.upload(v)) is not None}

    def upload(self, version: int) -> HeadFile | None:
        """The file that holds a version's head now; None when it has gone."""
        try:
            found = self.path(version).stat()
        except FileNotFoundError:
            return None
        return HeadFile(found.st_mtime_ns, found.st_ino)


class Target:
    """The target of a run. `config` is the target's transformers configuration; `device` is where drafters run."""

    def __init__(self, layout: Layout, run: str, device: torch.device) -> None:
        self._layout, self._run = layout, run
        self._device = device
        file = load_target(layout, run, whole=True)  # closed again: runs are many, and few of them are at work
        self._header = file.header
        metadata = self._header.metadata
        self.config: Mapping[str, Any] = json.loads(metadata["config"])
        self.aux_layers: tuple[int, ...] = tuple(json.loads(metadata["aux_layers"])["layers"])
        self.policy_version = int(metadata.get("policy_version", "0"))
        self.draft_vocab_size = int(metadata["draft_vocab_size"]) if "draft_vocab_size" in metadata else None
        self.logit_map = LogitMap.from_metadata(metadata)
        self.embed_tokens = read_tensor(file, "embed_tokens").to(device)  # [V, Ht]
        self.received = ReceivedHeads(layout, run)
        self._policies: OrderedDict[tuple[int, HeadFile | None], Policy] = OrderedDict()  # least recently used first

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.embed_tokens.shape[0]

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head."""
        return "lm_head" not in self._header.tensors

    @classmethod
    def open(cls, layout: Layout, run: str, device: torch.device | str = "cpu") -> Self:
        """Read a run. WorkerError: its file is no body of PUT /runs. RunDamaged: the file was changed since it came."""
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
        file = load_target(self._layout, self._run, whole=True)
        tensors = {n.removeprefix("drafter."): read_tensor(file, n) for n in names}
        return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}  # as all that is published

    @property
    def initial_drafter_config(self) -> dict[str, Any]:
        """The configuration that came with `initial_drafter`."""
        config: dict[str, Any] = json.loads(self._header.metadata["drafter_config"])
        return config

    def check(self) -> None:
        """Raise `DrafterError` unless a lineage can begin on the registration. PUT /runs has checked the same."""
        check_registered(self.config, self.aux_layers, self._header)

    @property
    def ending_tokens(self) -> list[int]:
        """Tokens that end a response, as the target's configuration names them: always worth drafting."""
        named = self.config.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        return sorted({i for i in ids if type(i) is int and 0 <= i < self.vocab_size})

    def lm_head(self) -> Tensor:
        """The registered head, [V, Ht] on the host as it was sent. Raises RunDamaged, which is no batch's fault."""
        file = load_target(self._layout, self._run, whole=True)
        return read_tensor(file, "embed_tokens" if self.tied else "lm_head")

    @property
    def registered(self) -> Policy:
        """The policy as PUT /runs brought it."""
        return self._cached(self.policy_version, None)

    def at(self, policy_version: int, *, batch: Path | None = None) -> Policy:
        """The policy with the head that was received last among those of `policy_version` and below.

        `batch`: file of the batch that is to be scored. A head that came after the batch hides no head of its version
        or above that was there before: the batch may be of an earlier attempt. A later head of a higher version than
        the head in force before does count: it came late.
        """
        return self._cached(*self.head_of(policy_version, batch=batch))

    def head_of(self, policy_version: int, *, batch: Path | None = None) -> tuple[int, HeadFile | None]:
        """Policy version and file of the head that `at` takes, for `with_head`. File None: the registered head."""
        for version, file in self.received.in_force(policy_version, batch):
            try:
                self._cached(version, file)
            except (WireError, TargetHeadError) as error:
                log.warning("run %s: the head of policy version %d is not used: %s", self._run, version, error)
                self.received.refuse(version, file)
            else:
                return version, file
        return self.policy_version, None

    def later_head_ns(self, policy_version: int, batch: Path) -> int | None:
        """When the head that `at` takes came (Unix ns), if it came after the batch: late, or of another attempt.

        None: it came before the batch, it is the registered one, or the batch's file is gone.
        """
        _, file = self.head_of(policy_version, batch=batch)
        late = file is not None and batch.exists() and file.changed_ns > batch.stat().st_mtime_ns
        return file.changed_ns if file is not None and late else None

    def with_head(self, version: int, file: Sequence[int] | None) -> Policy:
        """The policy with a head that `head_of` named in another process. OSError: the file was replaced since."""
        upload = None if file is None else HeadFile(*file)
        if upload is not None and (version, upload) not in self._policies and self.received.upload(version) != upload:
            raise OSError(f"the head of policy version {version} is no longer the file that is trained with")
        return self._cached(version, upload)

    def normalised(self, batch: RolloutBatch, path: Path | None = None) -> RolloutBatch:
        """The batch with the normalisers that its sender could not compute. `path`: its file.

        Raises `TargetHeadError` where the policy's head is not there.
        """
        return self.at(batch.policy_version, batch=path).needed_head().normalise(batch)

    def _cached(self, version: int, file: HeadFile | None) -> Policy:
        key = (version, file)
        if key not in self._policies:
            if file is None:
                registered = TargetHead(self.lm_head(), self.logit_map)
                self._policies[key] = Policy(version, self.embed_tokens, registered)
            else:
                self._policies[key] = self._load(version)
            while len(self._policies) > _KEPT_HEADS:
                self._policies.popitem(last=False)
        self._policies.move_to_end(key)
        return self._policies[key]

    def _load(self, version: int) -> Policy:
        check_head_bytes(self.received.path(version))
        file = MappedFile(self.received.path(version))
        head = read_tensor(file, "lm_head")  # [V, Ht]
        if head.shape != self.embed_tokens.shape:
            wanted = list(self.embed_tokens.shape)
            raise TargetHeadError(f"it is {list(head.shape)}, expected {wanted}; send the whole head")
        embed = head.to(self._device) if self.tied else self.embed_tokens
        return Policy(version, embed, TargetHead(head, self.logit_map))
