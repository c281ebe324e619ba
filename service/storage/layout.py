"""The state directory: its paths, and how API and worker processes change the files that they share.

This is the only place that builds a path from a name given by a client. Every method that takes a name checks it
against a strict pattern first, so no name leads out of the directory. docs/reference/state.md draws the tree.

`runs/`, but for `worker/recent`, is shared in one of two ways. `Layout` is a directory that all processes have mounted;
a run's lock is an `flock`. `Mirror` (`service.storage.mirror`) is a directory of one host, whose shared part is a copy
of an object store. In both, files are read by their paths, and changed within a `change`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from rl_hooks.lock import LockHeld, exclusive
from rl_hooks.wire import RUN_NAME
from service.errors import RegistryBusy, RunNotFound, VersionNotFound

T = TypeVar("T")
#: How long to wait for a run's lock, which is held for renames, and while old versions are deleted.
LOCK_SECONDS = 30.0

#: Drafter versions: `v`, a number of at least six digits, and the first eight digits of the content digest.
VERSION_NAME: Final = re.compile(r"v[0-9]{6,12}-[0-9a-f]{8}")
BATCH_ID: Final = re.compile(r"[0-9a-f]{32}")
#: A rollout file: its batch's id, a name of its own, the digest of its bytes (XXH3; SHA-256 if it came by a store).
BLOB_NAME: Final = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}\.([0-9a-f]{16}|[0-9a-f]{64})\.safetensors")
#: Files inside a drafter version.
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

#: Inode (or size) and time of change of a file; None: there is no such file.
FileId = tuple[int, int] | None
#: Inode, time of change and size of each of some files; None: there is no such file.
Stamps = tuple[tuple[int, int, int] | None, ...]
_RECORD, _STATE, _LATEST, _HISTORY = _STAMPED = "run.json", "state.json", "latest.json", "history.jsonl"


class Layout:
    """One state directory, which several hosts may have mounted. Only `make_run` and `change` create anything."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir.absolute()
        #: `runs/`, one directory per run. An attribute, as the next: each upload needs them a dozen times.
        self.runs: Final = self.root / "runs"
        #: Uploads in progress.
        self.spool_tmp: Final = self.root / "spool" / "tmp"

    #: Why other hosts' changes cannot be seen now; None: they can.
    away: str | None = None
    #: Into how many each piece of a history is cut (`History`); in a mounted directory it stays whole.
    pieces = 1

    # --- what several processes share
    def change(self, run: str, work: Callable[[Layout], T], *, alone: bool = True, checkpoints: bool = False) -> T:  # noqa: ARG002
        """Change files of a run by `work`, which gets the layout to change. Blocks.

        If another host was faster, `work` is called again. So its other effects must be such that it can repeat them.
        `alone`: under the run's lock. `checkpoints`: `work` changes checkpoints too. Raises `RegistryBusy`, and
        whatever `work` raises. Then nothing is changed, but in a mounted directory by what `work` had done already.
        """
        if not alone:
            return work(self)
        with locked(self, run):
            return work(self)

    def fenced(self, work: Callable[[int | None], bool]) -> None:
        """Within `change`: do `work`, which cannot be undone. Begin again if another host was faster.

        `work` gets a fencing token: a number higher than that of every change before. None: the run's lock is held
        instead. It must do nothing and return False if a later change was done before it.
        """
        work(None)

    def own(self, path: Path) -> Path:
        """Within `change`: a file or directory like that at `path`, which may be renamed into the layout."""
        return path

    def announce(self, run: str, path: Path) -> None:
        """Before `change`: announce a file, or a directory's files, that will become the run's. It may take long."""

    def abandon(self, run: str) -> None:
        """Before a run is withdrawn: if its shared part cannot be read, mark it as being deleted."""

    def pull(self, run: str, *, checkpoints: bool = False) -> None:
        """Fetch what other hosts have changed. Blocks. Raises OSError if that cannot be known."""

    def followed(self) -> contextlib.AbstractContextManager[object]:
        """While the context lasts, see other hosts' changes within a second."""
        return contextlib.nullcontext()

    def trained(self, run: str) -> bool:
        """Whether a worker has written a checkpoint of a run."""
        return any(self.worker(run).glob("checkpoint-*"))

    def sweep(self) -> None:
        """Delete leftovers of changes that did not end. Blocks."""

    # --- shared by all runs
    @property
    def valkey(self) -> Path:
        """The embedded server's append-only file, log and socket."""
        return self.root / "valkey"

    @property
    def audit(self) -> Path:
        """The audit log of all runs. It stays when a run is deleted."""
        return self.root / "audit"

    # --- of one run
    def run(self, run: str) -> Path:
        """`runs/<run>/`."""
        return self.runs / run_name(run)

    def run_json(self, run: str) -> Path:
        """The registration's record."""
        return self.run(run) / _RECORD

    def stamps(self, run: str) -> Stamps:
        """What differs once something small of a run was written: its record, state, served version or history."""
        directory = self.run(run)
        revalidate(directory)
        return tuple(_stamp(f"{directory}/{name}") for name in _STAMPED)  # a scrape asks it of all runs: no `Path`

    def run_state(self, run: str) -> Path:
        """What a person wants of the run; absent where nobody has said anything."""
        return self.run(run) / _STATE

    def run_drafting(self, run: str) -> Path:
        """How the run's engines draft; absent where none has said it."""
        return self.run(run) / "drafting.json"

    def withdrawn(self, run: str) -> Path:
        """The record of a run that is being deleted, under which nobody finds it."""
        return self.run(run) / "run.json.deleted"

    def target(self, run: str) -> Path:
        """The PUT body: embed_tokens, lm_head, optionally drafter.*."""
        return self.run(run) / "target.safetensors"

    def target_id(self, run: str) -> FileId:
        """Identity of that file, the same on every host; None: it cannot be read."""
        found = _stat(self.target(run))
        return None if found is None else (found.st_size, found.st_mtime_ns)

    def heads(self, run: str) -> Path:
        """`heads/`, one safetensors file per policy version."""
        return self.run(run) / "heads"

    def head(self, run: str, policy_version: int) -> Path:
        """Body of PUT /runs/{run}/head for one policy version."""
        return self.heads(run) / f"{int(policy_version)}.safetensors"

    def drafters(self, run: str) -> Path:
        """`drafters/`, one immutable directory per version."""
        return self.run(run) / "drafters"

    def drafter(self, run: str, version: str) -> Path:
        """One published version's directory."""
        if not VERSION_NAME.fullmatch(version):
            raise VersionNotFound(f"{version[:80]!r} is not a drafter version; one looks like v000001-0a1b2c3d")
        return self.drafters(run) / version

    def drafter_file(self, run: str, version: str, name: str) -> Path:
        """One file of a published version."""
        if not FILE_NAME.fullmatch(name):
            raise VersionNotFound(f"{name[:80]!r} is not the name of a drafter's file")
        return self.drafter(run, version) / name

    def latest(self, run: str) -> Path:
        """The pointer `{sequence, version, reason}`."""
        return self.run(run) / _LATEST

    def history(self, run: str) -> Path:
        """Every move of `latest` and every verdict of the gate, one JSON object per line."""
        return self.run(run) / _HISTORY

    def verdicts(self, run: str) -> Path:
        """Every verdict of a canary, one JSON object per line."""
        return self.run(run) / "verdicts.jsonl"

    def registry_lock(self, run: str) -> Path:
        """The lock of every process that moves `latest`."""
        return self.run(run) / "registry.lock"

    def worker(self, run: str) -> Path:
        """The worker's own checkpoints."""
        return self.run(run) / "worker"

    def spool(self, run: str) -> Path:
        """Accepted rollout files of a run. Prefixed, so that a run named `tmp` does not meet `spool/tmp`."""
        return self.root / "spool" / "runs" / run_name(run)

    def blob(self, run: str, blob: str) -> Path:
        """One accepted rollout file, by the name that its queue entry carries."""
        if not BLOB_NAME.fullmatch(blob):
            raise ValueError(f"{blob[:80]!r} is not the name of a spooled file")
        return self.spool(run) / blob

    def run_names(self) -> list[str]:
        """Runs that were registered, sorted."""
        return self._runs_with(_RECORD)

    def withdrawn_names(self) -> list[str]:
        """Runs that are being deleted, sorted."""
        return self._runs_with("run.json.deleted")

    def _runs_with(self, file: str) -> list[str]:
        if not is_there(self.runs):
            return []
        named = [path for path in self.runs.iterdir() if RUN_NAME.fullmatch(path.name)]
        return sorted(path.name for path in named if _may_be_there(path / file))

    def make_run(self, run: str) -> None:
        """Create the run's directories; idempotent."""
        for path in (self.heads(run), self.drafters(run), self.worker(run), self.spool(run), self.spool_tmp):
            path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(layout: Layout, run: str) -> Iterator[None]:
    """Hold a run's lock, also against other processes. Raises `RegistryBusy` after `LOCK_SECONDS`."""
    try:
        with exclusive(layout.registry_lock(run), LOCK_SECONDS):
            yield
    except LockHeld as held:
        raise RegistryBusy(
            f"the registry of run {run!r} has been locked for {LOCK_SECONDS:.0f} s by {held.holder}: is it stopped? "
            "Nothing was changed; let it go on or kill it"
        ) from None


def revalidate(directory: Path) -> None:
    """Make this host's file system read a directory's names again. A directory that cannot be opened is left alone.

    For up to a minute an NFS client's cache may lack a new name, or have an old file under a name. Opening the
    directory makes the client ask the server (close-to-open consistency). A local disk's names are never old.
    """
    above = [directory]
    while not _opens(above[-1]) and above[-1] != above[-1].parent:  # the cache may lack the directory itself
        above.append(above[-1].parent)
    for one in reversed(above[:-1]):
        if not _opens(one):
            return


def _opens(directory: Path) -> bool:
    """Open a directory and close it; False where there is none of this name."""
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def is_there(path: Path) -> bool:
    """Whether a path exists, also where another host made or deleted it just now. Raises OSError where nobody knows."""
    revalidate(path.parent)
    return path.exists()


def file_id(path: Path) -> FileId:
    """Identity of a file, which differs after it was replaced, by another host too; None: it cannot be read."""
    found = _stat(path)
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _stat(path: Path) -> os.stat_result | None:
    """The status of a file that another host may have replaced just now; None: it cannot be read."""
    revalidate(path.parent)
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Of a file as it is now, also where another host appended to it: an NFS client asks the server when it opens."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(opened)
    finally:
        os.close(opened)
    return found.st_ino, found.st_mtime_ns, found.st_size


def _may_be_there(path: Path) -> bool:
    """Whether there is a file. True also where nobody knows: opening it says why, and the other runs are listed."""
    revalidate(path.parent)
    try:
        return path.is_file()
    except OSError:
        return True


def run_name(run: str) -> str:
    """The name as it is. Raises RunNotFound where no run can have that name."""
    if not RUN_NAME.fullmatch(run):
        raise RunNotFound(f"{run[:80]!r} is not a run's name: 1 to 64 of A-Z a-z 0-9 . _ - after a letter or digit")
    return run
