"""The worker's own checkpoints: candidate, optimizer, controller, what is in hand. One directory, one rename.

Parameters are there once, as the drafter's own files in float32: what the trainer adds is moments and counters. The
CRC-32 of each file lies beside them, and is compared before any of them is read: a bit that flipped on the disk would
otherwise be trained on and published. No digest that an attacker could not forge: who writes here owns the worker.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drafter.device import is_device_fault
from drafter.errors import CheckpointError
from drafter.files.kinds import read_kind, write_kind
from drafter.model.draft_model import DraftModel
from drafter.training.ranks import Ranks
from drafter.training.trainer import DrafterTrainer
from rl_hooks.durable import AtomicDirectory
from service.errors import WorkerError
from service.storage.layout import Layout, is_there
from service.storage.runs import crc32_of

_PREFIX = "checkpoint-"
_DIGITS = 9  # of a number, so that names are in the order of numbers
_SUMS = "crc32.json"
_MOVE = "move the directory away: the run then goes on from its newest published drafter"
_MEND = f"put back a copy, or {_MOVE}"


class CheckpointSuperseded(WorkerError):  # noqa: N818 - reads as what happened
    """Another worker has written a checkpoint since this one last did, or is about to."""


class WorkerCheckpoint:
    """The newest checkpoint of a run."""

    def __init__(self, layout: Layout, run: str) -> None:
        self._layout, self._run = layout, run
        newest = self.newest()
        self._mine = newest.name if newest else None  # what this object read or wrote last

    def newest(self, directory: Path | None = None) -> Path | None:
        """The newest complete checkpoint, or None. `directory`: as a change in hand has it."""
        return max(_complete(directory or self._directory), default=None)

    @property
    def _directory(self) -> Path:
        return self._layout.worker(self._run)

    def save(self, trainer: DrafterTrainer, state: Mapping[str, Any]) -> None:
        """Write the next checkpoint durably, then remove those before.

        Raises OSError when the disk takes no more, and `CheckpointSuperseded`, writing nothing, when another worker
        has written one meanwhile: its state is newer.
        """
        number = 1 + (int(self._mine.removeprefix(_PREFIX)) if self._mine else 0)
        mine = f"{_PREFIX}{number:0{_DIGITS}d}"
        self._clear_leftovers()
        with AtomicDirectory.make(self._directory, ".writing-") as staged:
            _write(trainer, staged.path)
            (staged.path / "state.json").write_text(json.dumps(state))
            (staged.path / _SUMS).write_text(json.dumps(_sums(staged.path)))
            self._layout.announce(self._run, staged.path)

            def work(now: Layout) -> None:
                directory = now.worker(self._run)
                directory.mkdir(parents=True, exist_ok=True)
                own = staged if now is self._layout else AtomicDirectory(now.own(staged.path))
                try:
                    own.commit(directory / mine, check=lambda: self._check_not_superseded(directory))
                finally:
                    self._mine = mine if staged.renamed else self._mine
                for before in _complete(directory):  # also one that an earlier life could not remove
                    if before.name < mine:  # a successor's are newer (docs/reference/paused.md)
                        shutil.rmtree(before, ignore_errors=True)

            self._layout.change(self._run, work, alone=False, checkpoints=True)
            self._mine = mine

    def _check_not_superseded(self, directory: Path) -> None:
        newest = self.newest(directory)
        if (newest.name if newest else None) != self._mine:
            raise CheckpointSuperseded(f"another worker wrote {newest} after {self._mine}; its state is newer")

    def _clear_leftovers(self) -> None:
        """Delete what workers that were killed while they wrote have left.

        Renamed away first, so that the next step of a worker that was paused fails (docs/reference/paused.md).
        """
        for leftover in self._directory.glob(".writing-*"):
            with contextlib.suppress(FileNotFoundError):
                leftover.rename(self._directory / f".deleted-{uuid.uuid4().hex}")
        for leftover in self._directory.glob(".deleted-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def drafter(self) -> DraftModel:
        """The candidate, as the newest checkpoint holds it; CheckpointError unless all of it is as it was written."""
        newest = self._require()
        _check_sums(newest)
        return read_kind(newest / "drafter")

    def restore(self, trainer: DrafterTrainer) -> dict[str, Any]:
        """Load the optimizer's state into a trainer of `drafter()`; returns the state that was saved beside it."""
        trainer.load(self._require() / "trainer")
        state: dict[str, Any] = json.loads((self._require() / "state.json").read_text())
        return state

    @contextlib.contextmanager
    def reading_state(self) -> Iterator[None]:
        """Raise CheckpointError where the state lacks what is read of it inside, or has what nobody knows."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.newest()} holds a state that another version of draftalign wrote "
                f"({type(error).__name__}: {error}); go back to that version, or {_MOVE}"
            ) from error

    def _require(self) -> Path:
        newest = self.newest()
        if newest is None:
            raise FileNotFoundError(f"{self._directory} holds no checkpoint")
        return newest


def _complete(directory: Path) -> list[Path]:
    """All complete ones; one that a person renamed (`checkpoint-000000001.old`, `checkpoint-1`) is none."""
    names = {p: p.name.removeprefix(_PREFIX) for p in directory.glob(f"{_PREFIX}*")}
    return [p for p, number in names.items() if number.isdecimal() and len(number) == _DIGITS]


def _write(trainer: DrafterTrainer, directory: Path) -> None:
    for part in ("trainer", "drafter"):
        (directory / part).mkdir()
    with full_disk_as_os_error():
        trainer.save(directory / "trainer")
        write_kind(directory / "drafter", trainer.drafter)


def _sums(directory: Path) -> dict[str, int]:
    return {p.relative_to(directory).as_posix(): crc32_of(p) for p in sorted(directory.rglob("*")) if p.is_file()}


def _check_sums(directory: Path) -> None:
    """Raise CheckpointError unless each file has the bytes that were written."""
    path = directory / _SUMS
    try:
        wanted = dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {_MEND}") from error
    found = {name: crc32_of(directory / name) if (directory / name).is_file() else None for name in wanted}
    if damaged := sorted(name for name in wanted if found[name] != wanted[name]):
        raise CheckpointError(f"{directory}: {', '.join(damaged)} not as written (CRC-32 differs); {_MEND}")


def copy_to_ranks(trainer: DrafterTrainer, directory: Path) -> None:
    """Rank 0's part of `taken_over`; `directory` may hold a copy for as long as it takes to read it.

    Raises `CheckpointSuperseded` where another worker, which has the run now, cleared the copy, be it written or not.
    """
    ranks = trainer.ranks
    ranks.shared(trainer.fingerprint)
    if any(ranks.add([0])):
        with contextlib.ExitStack() as stack:
            made: list[Path] = []

            def written() -> str:
                staged = stack.enter_context(AtomicDirectory.make(directory, ".writing-"))
                made.append(staged.path)
                _write(trainer, staged.path)
                return staged.path.name

            try:
                ranks.shared(written)
                ranks.together(lambda: None)  # they read it
            except Exception as error:
                if is_device_fault(error) or not made or is_there(made[0]):
                    raise
                raise ranks.agreed(
                    CheckpointSuperseded(f"{made[0]} is gone: another worker has the run, and cleared what it found")
                ) from error


def taken_over(
    ranks: Ranks, mine: DrafterTrainer | None, directory: Path, make: Callable[[DraftModel], DrafterTrainer]
) -> DrafterTrainer:
    """The trainer as rank 0 has it: `mine` where its fingerprint is the same, else made from a copy."""
    fingerprint = ranks.shared(str)
    same = mine if mine is not None and mine.fingerprint() == fingerprint else None
    if not any(ranks.add([same is None])) and same is not None:
        return same
    copy = directory / ranks.shared(str)

    def read() -> DrafterTrainer:
        trainer = make(read_kind(copy / "drafter"))
        trainer.load(copy / "trainer")
        return trainer

    return ranks.together(lambda: same or read())


@contextlib.contextmanager
def full_disk_as_os_error() -> Iterator[None]:
    """Raise what safetensors meets while it writes as the OSError that it was."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"could not be written: {error}") from error
