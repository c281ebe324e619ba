"""The state directory of one host that shares its runs with other hosts by an object store (`state_url`).

    <url>/trees/<run>           a run's tree: names, sizes and times of its files, and the contents of small files
    <url>/files/<run>/<uuid>    the contents of one large file

The shared part of the directory is a copy of what the trees describe. Invariants:
* A run's tree is replaced by one put, on condition that it is still the tree with which the change began (If-Match; for
  a run's first tree If-None-Match: *). So a change appears whole or not at all. Of two changes at one moment the second
  begins again, with the result of the first. No clock, lock or lease decides.
* Effects of a change outside the store (deleting a run's keys in Redis) are fenced. The change first puts its tree
  unchanged, under a number higher than all before. It passes that number on to Redis, which refuses lower ones.
* A tree names the change that made it. So a put whose answer was lost is recognised.
* A large file has its object before a tree names it. An object is never written again, and is deleted only after no
  tree names it any more.
* This directory follows the trees and is never ahead of them: all hosts see whatever is read here. A file appears
  before other files name it: a version's files before its manifest, and all of these before `latest.json`.
* Checkpoints, which only the worker reads, are fetched when it asks. Recent rollouts and the spool are not shared.

Every error of the store is an `ObjectStoreError`, which is an OSError, and comes within a bounded time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import random
import re
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rl_hooks.durable import replace_file, sync
from rl_hooks.wire import RUN_NAME
from service.errors import ConfigurationError, ObjectStoreError, RegistryBusy, RunConflict, ServiceError, TreeDamaged
from service.settings import Settings
from service.storage.drafters.objects import ObjectStore
from service.storage.layout import FILE_NAME, Layout, is_there, locked

log = logging.getLogger("draftalign.storage")

T = TypeVar("T")
#: The contents of a file of up to this size are in the tree itself.
_SMALL_BYTES: Final = 16 << 10
#: As `Layout.pieces`. Each event sends the newest piece again, so pieces are small: 128 KiB at most.
_PIECES: Final = 16
#: Seconds between two looks at what other hosts have changed.
_LOOK_SECONDS: Final = 1.0
#: How often a change is tried while other hosts are faster, and the longest pause between two tries.
_TRIES: Final = 12
_PAUSE_SECONDS: Final = 2.0
#: Objects, files and directories of a change that are older than this are taken for leftovers of a dead process.
_LEFTOVER_SECONDS: Final = 3600.0
#: A tree of 1,000 versions and heads is a tenth of this.
_TREE_BYTES: Final = 64 << 20
#: How many changes before it a tree names. A process whose answer was lost asks again before as many more are made.
_CHANGES_TOLD: Final = 32
#: The file that names the URL whose copy a directory is.
_MARK: Final = "mirror.json"
#: A tree's number is below this. No clock's milliseconds reach it, and there is room above it to count on.
_NUMBERS: Final = 1 << 52
#: The shared files in a run's directory. Names that begin with a dot are temporary.
_SHARED: Final = ("*.json", "*.json.deleted", "*.jsonl", "*.safetensors", "heads/*", "drafters/*/*")
_CHECKPOINTS: Final = "worker/checkpoint-*/**/*"
#: The names of both; each part is a `FILE_NAME`.
_NAME: Final = re.compile(
    r"[^/]+\.(json|json\.deleted|jsonl|safetensors)|heads/[^/]+|drafters/[^/]+/[^/]+|worker/checkpoint-[^/]+/.+"
)
#: The order in which files appear: those that are not named here come first.
_LATER: Final = {"manifest.json": 1, "run.json": 2, "state.json": 2, "drafting.json": 2, "latest.json": 3}


def _shared_name(name: str) -> str:
    """The name, if it is that of a shared file in a run's directory; else ValueError."""
    if _NAME.fullmatch(name) and all(map(FILE_NAME.fullmatch, name.split("/"))):
        return name
    raise ValueError(f"{name[:80]!r} is not the name of a file that hosts share")


class FileEntry(BaseModel):
    """One file: its contents (UTF-8), or the name of the object that has them."""

    model_config = ConfigDict(frozen=True)
    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    changed_ns: Annotated[int, Field(ge=0, lt=1 << 63)]
    text: str | None = None
    object: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None


class Tree(BaseModel):
    """What is stored under `trees/<run>`. No files: the run was deleted."""

    model_config = ConfigDict(frozen=True)
    change: str = ""
    #: Higher than that of the tree before, also where that one was lost: at least the clock's Unix milliseconds.
    number: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    changes: tuple[str, ...] = ()  # those before it, newest first
    files: dict[Annotated[str, AfterValidator(_shared_name)], FileEntry] = {}

    @classmethod
    def read(cls, body: bytes) -> Tree:
        """Read a tree from its JSON. Raises ValueError where it is none."""
        tree = cls.model_validate_json(body)
        if tree.number >= _NUMBERS:
            raise ValueError(f"its number is {tree.number}, of a time that no clock shows")
        return tree

    def after(self, files: dict[str, FileEntry]) -> Tree:
        """The tree that follows this one, with these files."""
        before = (self.change, *self.changes) if self.change else ()
        number = max(self.number + 1, time.time_ns() // 1_000_000)
        return Tree(change=uuid.uuid4().hex, number=number, changes=before[:_CHANGES_TOLD], files=files)


class _Known(NamedTuple):
    """A tree, and the entity tag under which it was read. Tag None: the store has no tree yet."""

    tree: Tree
    etag: str | None


class _Sent(NamedTuple):
    """A file that was sent during a change, and the name of its object."""

    name: str
    file: BinaryIO
    at: float  # Unix time


class _Changed(Exception):  # noqa: N818 - reads as what happened
    """Another host changed the run while a change was tried."""


class _Draft(Layout):
    """A copy of a run's shared files in which one change is tried. Large files are links; nobody writes into them."""

    pieces = _PIECES

    def __init__(self, root: Path, known: _Known, put: Callable[[Tree, str | None], _Known | None]) -> None:
        """`known`: the tree that is copied. `put`: replaces the tree that has this entity tag."""
        super().__init__(root)
        self.known, self._put = known, put

    def fenced(self, work: Callable[[int | None], bool]) -> None:
        """As in `Layout`. After the put no change succeeds that began before it."""
        before = self.known.tree
        found = self._put(own := before.after(before.files), self.known.etag)
        if found is None or found.tree.change != own.change:
            raise _Changed
        self.known = found
        if not work(own.number):
            raise _Changed

    def change(self, run: str, work: Callable[[Layout], T], *, alone: bool = True, checkpoints: bool = False) -> T:  # noqa: ARG002
        """Do `work` as a part of the change that is being tried."""
        return work(self)

    def own(self, path: Path) -> Path:
        """A copy made of links. The original stays where it is, for another try."""
        copy = self.root / uuid.uuid4().hex
        if path.is_dir():
            shutil.copytree(path, copy, copy_function=os.link)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, copy)
        return copy

    def trained(self, run: str) -> bool:  # noqa: ARG002
        """As in `Layout`, by the tree."""
        return _trained(self.known.tree)


class Mirror(Layout):
    """The state directory of this host. Several of its processes may use it at once."""

    pieces = _PIECES

    def __init__(self, state_dir: Path, url: str) -> None:
        """Raises ConfigurationError where the URL, the environment or the directory cannot be used."""
        super().__init__(state_dir)
        self._store = ObjectStore("state_url", url)
        self._sent: dict[str, dict[tuple[int, int], _Sent]] = {}  # by run, by the file's identity
        self._seen: dict[str, str] = {}  # by run: entity tag of the tree that was copied last
        self._claim(url)

    def _claim(self, url: str) -> None:
        """Refuse a directory of another URL, or of none: its files would be deleted, since no tree names them."""
        mark = self.root / _MARK
        if not mark.exists():
            if self.runs.is_dir() and any(self.runs.iterdir()):
                raise ConfigurationError(
                    f"state_url {url}: {self.root} holds runs that are not in the store; give this host a state "
                    "directory that is empty (DRAFTALIGN_STATE_DIR)"
                )
            self.root.mkdir(parents=True, exist_ok=True)
            replace_file(mark, json.dumps({"url": url}).encode())
        elif (found := json.loads(mark.read_bytes())["url"]) != url:
            raise ConfigurationError(f"state_url {url}: {self.root} is a copy of {found}; use another state directory")

    # --- a change
    def change(self, run: str, work: Callable[[Layout], T], *, alone: bool = True, checkpoints: bool = False) -> T:  # noqa: ARG002
        """As in `Layout`: `work` changes a copy, and one put makes the change visible to all hosts."""
        try:
            with locked(self, run):  # processes of this host take turns
                for turn in range(_TRIES):
                    known = self._pull(run, checkpoints)
                    with self._draft(run, known, checkpoints) as draft, contextlib.suppress(_Changed):
                        found = work(draft)
                        if self._commit(run, draft, checkpoints):
                            return found
                    time.sleep(random.uniform(0.0, min(0.02 * 2**turn, _PAUSE_SECONDS)))  # noqa: S311
        finally:
            for sent in self._sent.pop(run, {}).values():
                sent.file.close()
        raise RegistryBusy(
            f"run {run!r} was changed by other hosts each of {_TRIES} times that this was tried; nothing was changed. "
            "Try again"
        )

    def announce(self, run: str, path: Path) -> None:
        """Send large files now, so that under the lock only their names are left to send."""
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            if file.stat().st_size > _SMALL_BYTES:
                self._sent_as(run, file)

    @contextlib.contextmanager
    def _draft(self, run: str, known: _Known, checkpoints: bool) -> Iterator[_Draft]:
        root = self.root / "changes" / uuid.uuid4().hex
        draft = _Draft(root, known, functools.partial(self._put, run))
        root.mkdir(parents=True)
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # against `tidy`: a file that is missing here is deleted on all hosts
            draft.make_run(run)
            for name, kept in known.tree.files.items():
                if _is_wanted(name, checkpoints):
                    own, path = self.run(run) / name, draft.run(run) / name
                    if not _is_same(own, kept):  # this host's copy was changed by hand
                        self._place(run, own, kept)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    copy = shutil.copy2 if _is_copied(path, kept) else os.link
                    copy(own, path)
            yield draft
        finally:
            shutil.rmtree(root, ignore_errors=True)
            os.close(held)

    def _commit(self, run: str, draft: _Draft, checkpoints: bool) -> bool:
        """Publish a draft as the run's tree. False: another host has changed the run since."""
        known = draft.known
        root, own, before = draft.run(run), self.run(run), known.tree.files
        files = (
            {} if checkpoints or not root.exists() else {n: k for n, k in before.items() if not _is_wanted(n, False)}
        )
        for name, path in _shared(root, checkpoints).items():
            old = before.get(name)
            same = old is not None and _is_same(path, old) and (_is_copied(path, old) or _is_linked(path, own / name))
            files[name] = old if old is not None and same else self._keep(run, path)
        if files == before:
            return True
        after = known.tree.after(files)
        there = self._put(run, after, known.etag)
        if there is None:
            return False
        try:
            self._take_over(run, there, checkpoints, draft if there.tree.change == after.change else None)
            gone = {kept.object for kept in before.values()} - {kept.object for kept in files.values()} - {None}
            self._store.delete([_object(run, str(name)) for name in gone])
        except OSError as error:  # the change is published: this host catches up, and the sweep deletes objects
            log.warning("run %s was changed, and this host's copy is not what it was changed to yet: %s", run, error)
        return True

    def _keep(self, run: str, path: Path) -> FileEntry:
        found = path.stat()
        if found.st_size <= _SMALL_BYTES:
            with contextlib.suppress(UnicodeDecodeError):
                return FileEntry(bytes=found.st_size, changed_ns=found.st_mtime_ns, text=path.read_text("utf-8"))
        return FileEntry(bytes=found.st_size, changed_ns=found.st_mtime_ns, object=self._sent_as(run, path))

    # --- the store
    def _sent_as(self, run: str, path: Path) -> str:
        """The name of a file's object. The object is sent now, unless this change has sent it already."""
        found, sent = path.stat(), self._sent.setdefault(run, {})
        identity = found.st_dev, found.st_ino
        if identity in sent and time.time() - sent[identity].at > _LEFTOVER_SECONDS / 2:
            sent.pop(identity).file.close()  # after a pause: a sweep may have deleted it (docs/reference/paused.md)
        if identity not in sent:
            name, at = uuid.uuid4().hex, time.time()
            file = path.open("rb")  # while it is open, no other file gets its inode
            with self._store.errors(_object(run, name)):
                self._store.send(_object(run, name), path)
            sent[identity] = _Sent(name, file, at)
        return sent[identity].name

    def _get(self, run: str, etag: str | None = None) -> _Known | None:
        """A run's present tree; None if it still has this entity tag."""
        try:
            found = self._store.look(_tree(run), etag, most_bytes=_TREE_BYTES)
            if found is None:
                return None
            body, tag = found
            return _Known(Tree() if tag is None else Tree.read(body), tag)
        except ValueError as error:  # pydantic's too
            raise TreeDamaged(_tree(run), error) from error

    def _put(self, run: str, tree: Tree, etag: str | None) -> _Known | None:
        """Replace the tree that has this entity tag. Returns the present tree; None: another one was there."""
        trouble = None
        try:
            if tag := self._store.replace(_tree(run), tree.model_dump_json(exclude_defaults=True).encode(), etag):
                return _Known(tree, tag)
        except ObjectStoreError as error:
            trouble = error
        there = self._get(run)  # if only the answer was lost, this tree is there, or one that followed it
        if there is not None and tree.change in (there.tree.change, *there.tree.changes):
            return there
        if trouble is not None:
            raise trouble
        return None

    def abandon(self, run: str) -> None:
        """As in `Layout`, for a run whose tree is damaged. The sweep deletes its objects."""
        self.run(run)  # refuses impossible names
        etag = self._store.tag(_tree(run))
        try:
            self._get(run)
        except TreeDamaged as error:
            record = FileEntry(bytes=2, changed_ns=time.time_ns(), text="{}")
            if self._put(run, Tree().after({self.withdrawn(run).name: record}), etag) is None:
                raise RegistryBusy(f"run {run!r} was changed by another host meanwhile; try again") from error
            log.warning("run %s is given up, as it is to be deleted: %s", run, error)
            self.pull(run)

    # --- this host's copy
    def trained(self, run: str) -> bool:
        """As in `Layout`, by the tree: checkpoints themselves may not have been fetched."""
        return _trained(self._copy(run).tree)

    def pull(self, run: str, *, checkpoints: bool = False) -> None:
        """As in `Layout`."""
        copy = self._copy(run)
        found = self._get(run, copy.etag)
        unknown = found is not None and found.etag is None and copy.etag is None
        if unknown or (found is None and not checkpoints):  # nothing is new
            return
        with locked(self, run):
            self._pull(run, checkpoints)

    def _pull(self, run: str, checkpoints: bool) -> _Known:
        """Copy what the run's present tree describes, under the run's lock. Returns the tree."""
        for last in (False, False, True):
            copy = self._copy(run)
            found = self._get(run, copy.etag)
            if found is not None and found.etag is None and copy.etag is not None:
                raise ObjectStoreError(f"{_tree(run)} is gone from the object store; put a copy back")
            if found is None and not checkpoints:
                return copy
            known = copy if found is None else found
            try:
                self._take_over(run, known, checkpoints)
            except FileNotFoundError:  # another host changed it meanwhile
                if last:
                    raise
            else:
                return known
        raise AssertionError("unreachable")

    def _copy(self, run: str) -> _Known:
        """The tree that this directory is a copy of."""
        try:
            found = json.loads((self.run(run) / ".tree.json").read_bytes())
            return _Known(Tree.model_validate(found["tree"]), found["etag"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return _Known(Tree(), None)

    def _take_over(self, run: str, known: _Known, checkpoints: bool, draft: _Draft | None = None) -> None:
        """Make this directory's files those of a tree. `draft`: has the files, so that they need not be fetched."""
        root, files = self.run(run), known.tree.files
        if not files:
            if known.etag is not None:
                self._forget(run)
            return
        self.make_run(run)
        had = self._copy(run).tree.files
        for name in sorted(files, key=_order):
            path, kept = root / name, files[name]
            other = name in had and had[name].object != kept.object  # another file, perhaps of equal length and time
            if _is_wanted(name, checkpoints) and (other or not _is_same(path, kept)):
                self._place(run, path, kept, None if draft is None else draft.run(run) / name)
        self._remove(root, _shared(root, checkpoints).keys() - files.keys(), files)
        replace_file(root / ".tree.json", json.dumps({"etag": known.etag, "tree": known.tree.model_dump()}).encode())

    def _place(self, run: str, path: Path, kept: FileEntry, at_hand: Path | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        passing = self.run(run) / f".fetched-{uuid.uuid4().hex}"
        try:
            if at_hand is not None and at_hand.exists():
                os.link(at_hand, passing)
            elif kept.text is not None:
                passing.write_text(kept.text, "utf-8")
            else:
                self._store.fetch(_object(run, str(kept.object)), kept.bytes, passing)
            os.utime(passing, ns=(kept.changed_ns, kept.changed_ns))
            sync(passing)
            # A history that only grew is appended to, so that its readers go on where they are.
            if path.suffix == ".jsonl" and (new := _grown(path, passing)) is not None:
                with path.open("ab") as file:
                    file.write(new)
                    file.flush()
                    os.fsync(file.fileno())
                os.utime(path, ns=(kept.changed_ns, kept.changed_ns))
            else:
                passing.replace(path)
                sync(path.parent)
        finally:
            passing.unlink(missing_ok=True)

    def _remove(self, root: Path, names: Collection[str], left: Collection[str]) -> None:
        """Delete files. A whole version or checkpoint is renamed first, so that nobody sees a part of it."""
        for directory in {_directory(name) for name in names} - {_directory(name) for name in left} - {None}:
            path = root / str(directory)
            path.rename(gone := path.with_name(f".deleted-{uuid.uuid4().hex}"))
            shutil.rmtree(gone, ignore_errors=True)
        for name in names:
            (root / name).unlink(missing_ok=True)

    def _forget(self, run: str) -> None:
        """Delete this host's files of a run that was deleted."""
        for directory in (self.run(run), self.spool(run)):
            with contextlib.suppress(FileNotFoundError):
                directory.rename(gone := directory.with_name(f".deleted-{uuid.uuid4().hex}"))
                shutil.rmtree(gone, ignore_errors=True)

    # --- what other hosts do
    def refresh(self) -> None:
        """Copy all runs that were changed. Blocks. One request per thousand runs, and some per changed run."""
        trouble: Exception | None = None
        try:
            tags = self._store.tags("trees/")
        except ObjectStoreError as error:
            self.away = str(error)
            raise
        self.away = None
        for key, etag in tags.items():
            run = key.removeprefix("trees/")
            if RUN_NAME.fullmatch(run) and self._seen.get(run) != etag:
                try:
                    self.pull(run)
                except (OSError, ServiceError) as error:  # the other runs go on
                    trouble = error
                else:
                    self._seen[run] = etag
        if trouble is not None:
            raise trouble

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """As in `Layout`. Copies everything at first, and raises OSError if the store does not answer.

        A run whose tree is damaged stays as this host knows it. The others are followed.
        """
        if (trouble := self._store.trouble_with_conditions(f"tried/{uuid.uuid4().hex}")) is not None:
            raise ConfigurationError(
                f"state_url: this object store {trouble} (If-Match, If-None-Match), and hosts would undo what others "
                "did, or change nothing; use a store that has conditional writes, or share a directory"
            )
        self.tidy()
        try:
            self.refresh()
        except (OSError, ServiceError) as error:
            if self.away is not None:
                raise
            log.error("a run is not known as other hosts have it: %s", error)  # one damaged tree ends no process
        ended = threading.Event()

        def follow() -> None:
            said, tidied = "", time.monotonic()
            while not ended.wait(_LOOK_SECONDS):
                try:
                    if time.monotonic() - tidied > _LEFTOVER_SECONDS:
                        tidied = time.monotonic()
                        self.tidy()
                    self.refresh()
                    said = ""
                except (OSError, ServiceError) as error:
                    if said != (said := type(error).__name__):
                        log.warning("what other hosts do is not known now: %s", error)
                except Exception:
                    log.exception("what other hosts do is not known now")

        thread = threading.Thread(target=follow, name="mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)

    def sweep(self) -> None:
        """Delete objects that no tree names, and leftovers of tests of the store."""
        old = time.time() - _LEFTOVER_SECONDS
        self._store.delete([key for key, written in self._store.listed("tried/") if written < old])
        found = defaultdict[str, list[str]](list)
        for key, written in self._store.listed("files/"):
            if written < old:
                found[key.split("/")[1]].append(key)
        for run, keys in found.items():
            try:
                known = self._get(run) if RUN_NAME.fullmatch(run) else None
            except TreeDamaged as error:
                log.warning("what no list of files names of run %s stays: %s", run, error)
                continue
            if known is not None and known.etag is not None:  # without a tree: a person may put it back
                named = {_object(run, str(kept.object)) for kept in known.tree.files.values()}
                gone = [key for key in keys if key not in named]
                # First another tree: a paused change that sent one of these begins again (docs/reference/paused.md).
                if gone and self._put(run, known.tree.after(known.tree.files), known.etag) is not None:
                    self._store.delete(gone)

    def tidy(self) -> None:
        """Delete what processes of this host left when they died during a change."""
        left = [(self.root, "changes/*"), (self.runs, ".deleted-*"), (self.runs, "*/.fetched-*")]
        left += [(self.runs, "*/drafters/.deleted-*"), (self.runs, "*/worker/.deleted-*")]
        for path in (path for top, pattern in left for path in top.glob(pattern)):
            with contextlib.suppress(OSError):
                if path.lstat().st_ctime < time.time() - _LEFTOVER_SECONDS:
                    _delete_unless_held(path)


def state_of(settings: Settings) -> Layout:
    """The state directory of these settings: of one host, or shared by an object store."""
    if settings.state_url is None:
        return Layout(settings.state_dir)
    return Mirror(settings.state_dir, settings.state_url)


def is_copy(state_dir: Path) -> bool:
    """Whether a directory is a host's copy of an object store."""
    return (state_dir / _MARK).exists()


def copy_run(origin: Layout, target: Layout, run: str) -> None:
    """Copy a run's shared files and checkpoints from one state directory to another. Blocks.

    Nobody may change the run meanwhile. Raises RunConflict where the other state has a run of this name.
    """
    origin.pull(run, checkpoints=True)
    root, names = origin.run(run), _shared(origin.run(run), True)

    def work(now: Layout) -> None:
        if is_there(now.run_json(run)) or is_there(now.withdrawn(run)):
            raise RunConflict(f"run {run!r} is there already, and was not copied; delete it first, or leave it")
        now.make_run(run)
        for name in sorted(names, key=lambda name: (name == "run.json", name)):  # `run.json` last: it makes the run
            path = now.run(run) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, path)  # with its time: heads are ordered by time
            sync(path)

    target.change(run, work, checkpoints=True)


def _order(name: str) -> tuple[int, str]:
    return _LATER.get(Path(name).name, 0), name


def _delete_unless_held(path: Path) -> None:
    """Delete a file, or a directory that no process has locked. Raises OSError where one has."""
    if not path.is_dir():
        path.unlink()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _tree(run: str) -> str:
    return f"trees/{run}"


def _object(run: str, name: str) -> str:
    return f"files/{run}/{name}"


def _directory(name: str) -> str | None:
    """The directory of the version or checkpoint that a file belongs to; None: it belongs to neither."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] in ("drafters", "worker") else None


def _trained(tree: Tree) -> bool:
    return any(not _is_wanted(name, False) for name in tree.files)


def _is_wanted(name: str, checkpoints: bool) -> bool:
    return checkpoints or not name.startswith("worker/")


def _shared(root: Path, checkpoints: bool) -> dict[str, Path]:
    """The shared files of a run's directory, by name."""
    found = (path for pattern in (*_SHARED, *([_CHECKPOINTS] if checkpoints else [])) for path in root.glob(pattern))
    named = {path.relative_to(root).as_posix(): path for path in found}
    return {n: p for n, p in named.items() if not any(part.startswith(".") for part in n.split("/")) and p.is_file()}


def _is_copied(path: Path, kept: FileEntry) -> bool:
    """Whether a draft has a copy of a file: small ones and those that are appended to. Others are links."""
    return kept.text is not None or path.suffix == ".jsonl"


def _is_linked(path: Path, own: Path) -> bool:
    """Whether a draft's file is the link that it began with."""
    with contextlib.suppress(FileNotFoundError):  # the run was deleted while a process waited for its lock
        return path.samefile(own)
    return False


def _is_same(path: Path, kept: FileEntry) -> bool:
    """Whether a file has the length and time of a tree's entry, and its text: equal times do not prove equal text."""
    try:
        found = path.stat()
        same = (found.st_size, found.st_mtime_ns) == (kept.bytes, kept.changed_ns)
        return same and kept.text in (None, path.read_text("utf-8") if kept.text is not None else None)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _grown(path: Path, newer: Path) -> bytes | None:
    """The bytes that `newer` has beyond `path`; None where `newer` does not begin with what `path` holds."""
    try:
        old = path.read_bytes()
    except FileNotFoundError:
        return None
    new = newer.read_bytes()
    return new[len(old) :] if new.startswith(old) else None
