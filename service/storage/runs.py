"""Registered runs: the check of a registration, and what is kept of a run. That is record, target, heads and state.

The body of PUT /runs/{run} is a safetensors file: `embed_tokens` and `lm_head` [V, H] (no `lm_head` where they are
tied), optionally `drafter.*`; its metadata hold the target's configuration and the captured layers. It is stored
unchanged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rl_hooks.durable import replace_file
from rl_hooks.format.drafter import kind_of
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.run import check_run
from rl_hooks.wire import (
    AUX_CONVENTION,
    HEAD_FORMAT,
    RUN_FORMAT,
    Header,
    LastRows,
    LogitMap,
    MappedFile,
    TensorInfo,
    WireError,
    int_field,
    json_field,
    layers_field,
    target_fingerprint,
)
from service.errors import RunClosed, RunConflict, RunDamaged, RunNotFound, RunWithdrawn
from service.monitor.events import RunStateSet
from service.monitor.records import RunState, State
from service.storage.history.events import History
from service.storage.layout import FileId, Layout, is_there, revalidate
from service.storage.spool import Upload

_FLOATS: Final = ("F32", "BF16", "F16")
#: Prefix of what is being deleted; no run's name begins so.
_DELETED: Final = ".deleted-"
_READ_BYTES: Final = 1 << 20
_CONFIG_INTS: Final = ("hidden_size", "num_hidden_layers", "vocab_size")
#: Most differing config fields that an error names.
_NAMED_AT_MOST: Final = 6
_STATE: Final = TypeAdapter(RunState)


class Registered(BaseModel):
    """What a run was registered with, as it is kept and told."""

    model_config = ConfigDict(frozen=True)
    run: str
    target_fingerprint: str
    aux_layers: tuple[int, ...]
    aux_layers_convention: Literal["entering"]
    vocab_size: int
    hidden_size: int
    policy_version: int
    draft_vocab_size: int | None
    last_rows: LastRows  # that its drafters read
    bytes: int
    created: float


class RunRecord(Registered):
    """`run.json`."""

    aux_layers_convention: Literal["entering"] = "entering"
    crc32: int | None  # of target.safetensors; None until that is kept


def read_run_header(run: str, header: Header, *, begins: bool = True) -> RunRecord:
    """Verify the header of a PUT /runs/{run} body; raises WireError.

    `begins`: the worker will begin the run with this file; False: the run exists and keeps its own.
    """
    meta = header.metadata
    if meta.get("format") != RUN_FORMAT:
        raise WireError("format", f"expected {RUN_FORMAT!r}, got {meta.get('format')!r}")
    config = json_field(meta, "config", dict)
    for key in _CONFIG_INTS:
        if type(config.get(key)) is not int or not 0 < config[key] < 1 << 31:
            raise WireError("config", f"{key} must be a positive integer, got {str(config.get(key))[:40]}")
    layers, depth = layers_field(meta), config["num_hidden_layers"]
    if layers[0] < 0 or layers[-1] > depth:
        raise WireError("aux_layers", f"layers must be from 0 to {depth}, got {str(layers)[:80]}")
    fingerprint = target_fingerprint(config, layers)
    if meta.get("target_fingerprint") != fingerprint:
        raise WireError(
            "target_fingerprint", f"config and aux_layers give {fingerprint}; compute it with rl_hooks.wire"
        )
    _check_run_tensors(header, config)
    if begins:
        _check_for_worker(header, config, layers)
    LogitMap.from_metadata(meta)
    size = int_field(meta, "draft_vocab_size") if "draft_vocab_size" in meta else None
    if size is not None and not 0 < size <= config["vocab_size"]:
        raise WireError("draft_vocab_size", f"must be from 1 to {config['vocab_size']}, got {size}")
    return RunRecord(
        run=run,
        target_fingerprint=fingerprint,
        aux_layers=tuple(layers),
        aux_layers_convention=AUX_CONVENTION,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        policy_version=int_field(meta, "policy_version"),
        draft_vocab_size=size,
        last_rows=_last_rows(meta),
        bytes=header.file_bytes,
        created=time.time(),
        crc32=None,
    )


def _last_rows(metadata: Mapping[str, str]) -> LastRows:
    """Rows of the last state that a run's drafters read. All drafters of a run are of one kind."""
    if "drafter_config" not in metadata:  # the run begins with an EAGLE-3 drafter
        return "predicting"
    try:
        mtp = kind_of(json_field(metadata, "drafter_config", dict)) == "mtp"
    except DrafterError:  # of a run that exists and keeps its own
        return "all"
    return "all" if mtp else "predicting"


def _check_for_worker(header: Header, config: dict[str, Any], layers: list[int]) -> None:
    """Refuse what the worker would refuse, so that the sender learns of it at once."""
    try:
        check_registered(config, layers, header)
    except DrafterError as error:
        raise WireError("drafter_config" if "drafter_config" in header.metadata else "config", str(error)) from error


def check_registered(config: Mapping[str, Any], aux_layers: Sequence[int], header: Header) -> None:
    """Raise `DrafterError` unless the worker can begin a run with a file of this header."""
    meta = header.metadata
    drafter_config = json_field(meta, "drafter_config", dict) if "drafter_config" in meta else None
    tensors = {n.removeprefix("drafter."): i for n, i in header.tensors.items() if n.startswith("drafter.")}
    check_run(config, aux_layers, drafter_config, {n: (info.shape, info.dtype) for n, info in tensors.items()})


def _check_run_tensors(header: Header, config: dict[str, Any]) -> None:
    wanted = (config["vocab_size"], config["hidden_size"])
    tensors = header.tensors
    if "embed_tokens" not in tensors:
        raise WireError("embed_tokens", "is missing; it is required")
    for name, info in tensors.items():
        if name in ("embed_tokens", "lm_head"):
            _check_matrix(name, info, wanted)
        elif not name.startswith("drafter."):
            raise WireError(name[:80], "is not a tensor of this format; leave it out")
    has_drafter = any(name.startswith("drafter.") for name in tensors)
    if has_drafter != ("drafter_config" in header.metadata):
        raise WireError("drafter_config", "must be there exactly when drafter.* tensors are")
    if has_drafter:
        json_field(header.metadata, "drafter_config", dict)


def _check_matrix(name: str, info: TensorInfo, shape: tuple[int, int]) -> None:
    if info.dtype not in _FLOATS:
        raise WireError(name, f"dtype must be one of {_FLOATS}, got {info.dtype}")
    if info.shape != shape:
        raise WireError(name, f"shape must be {list(shape)} (vocab_size, hidden_size), got {list(info.shape)}")


def read_head_header(record: RunRecord, header: Header) -> int:
    """Verify the header of a PUT /runs/{run}/head body; returns its policy version."""
    if header.metadata.get("format") != HEAD_FORMAT:
        raise WireError("format", f"expected {HEAD_FORMAT!r}, got {header.metadata.get('format')!r}")
    tensors = dict(header.tensors)
    head = tensors.pop("lm_head", None)
    if tensors:  # `ids` too: with some rows of the head nobody can tell whether log-probabilities are the policy's
        raise WireError(min(tensors)[:80], "is not a tensor of this format; leave it out")
    if head is None:
        raise WireError("lm_head", "is missing; it is required")
    _check_matrix("lm_head", head, (record.vocab_size, record.hidden_size))
    return int_field(header.metadata, "policy_version")


def load_run(layout: Layout, run: str) -> RunRecord:
    """The record of a registered run; raises RunNotFound, or RunDamaged."""
    path = layout.run_json(run)
    revalidate(path.parent)
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunNotFound(f"run {run!r} is not registered; a trainer's hook or an engine registers it") from error
    except (ValidationError, IsADirectoryError) as error:
        raise RunDamaged(run, path, error) from error
    if record.run != run:
        raise RunDamaged(run, path, f"it is of run {record.run!r}")
    return record


def load_target(layout: Layout, run: str, *, whole: bool = False) -> MappedFile:
    """The file that a run was registered with; raises RunDamaged. `whole`: compare each byte with what was registered.

    A PUT does not replace a damaged one: nobody could tell whether it is the same policy's. Other OSErrors pass as they
    are: a service with too many open files has no damaged target.
    """
    path = layout.target(run)
    try:
        file = MappedFile(path)
        read_run_header(run, file.header, begins=False)
    except (WireError, FileNotFoundError, IsADirectoryError) as error:
        raise RunDamaged(run, path, error) from error
    if whole and crc32_of(path) != load_run(layout, run).crc32:
        raise RunDamaged(run, path, "its bytes are not those that were registered (CRC-32 differs)")
    return file


def crc32_of(path: Path) -> int:
    """CRC-32 of a file, which finds what a disk damages; whoever writes here can forge it. Blocks."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            found = zlib.crc32(piece, found)
    return found


def check_same(layout: Layout, existing: RunRecord, record: RunRecord, header: Header) -> None:
    """Raise RunConflict when the run is registered with another target. `header`: of the file that gave `record`."""
    if existing.target_fingerprint == record.target_fingerprint:
        return
    registered = load_target(layout, record.run).header
    raise RunConflict(
        f"run {record.run!r} is registered with another target. This one has "
        f"{differences(_identity(registered), _identity(header))}. Use another run name (the hook's run=)"
    )


def differences(registered: Mapping[str, Any], offered: Mapping[str, Any]) -> str:
    """Name the first few fields in which two configs differ; empty if they agree."""
    fields = [k for k in dict.fromkeys([*registered, *offered]) if registered.get(k) != offered.get(k)]
    values = ((k, str(offered.get(k))[:60], str(registered.get(k))[:60]) for k in fields[:_NAMED_AT_MOST])
    more = f" and {len(fields) - _NAMED_AT_MOST} more" if len(fields) > _NAMED_AT_MOST else ""
    return ", ".join(f"{k} {value} (the run's: {own})" for k, value, own in values) + more


def _identity(header: Header) -> dict[str, Any]:
    """The fields that `target_fingerprint` hashes."""
    config = json_field(header.metadata, "config", dict)
    layers = layers_field(header.metadata)
    return {key: config.get(key) for key in ("model_type", *_CONFIG_INTS)} | {"aux_layers": layers}


def untouched(layout: Layout, run: str) -> bool:
    """Whether nothing was trained or published for a run yet, so that its target may be replaced."""
    published = any(not path.name.startswith(".") for path in layout.drafters(run).glob("*"))
    return not layout.trained(run) and not published and not layout.latest(run).exists()


def commit_run(
    layout: Layout,
    record: RunRecord,
    upload: Upload,
    forget: Callable[[int | None], bool] = lambda _: True,
    *,
    refused: FileId = None,
) -> bool:
    """Register a run durably, `run.json` last. False if the run exists by then. Blocks.

    `forget` deletes what an earlier run of this name left in Redis. It is called only if the run does not exist, under
    the lock or with a number (`Layout.fenced`), so it never deletes keys of this run. `refused`: id of the target file
    that the worker refused. If that is still the run's target, this one replaces it; queued batches stay, heads of the
    old target are deleted.
    """
    run = record.run
    layout.make_run(run)
    upload.sync()
    text = record.model_copy(update={"crc32": crc32_of(upload.path)}).model_dump_json(indent=1).encode()
    layout.announce(run, upload.path)

    def work(now: Layout) -> bool:
        now.make_run(run)
        check_not_withdrawn(now, run)
        if not is_there(now.run_json(run)):
            now.fenced(forget)
        elif refused is not None and refused == now.target_id(run) and untouched(now, run):
            for head in now.heads(run).glob("*.safetensors"):
                delete_head(head)  # of the replaced target
            # The record first: who dies before the rename leaves the refused file, which the next PUT replaces.
            replace_file(now.run_json(run), text)
        else:
            check_same(now, load_run(now, run), record, MappedFile(upload.path).header)
            return False
        now.own(upload.path).rename(now.target(run))
        replace_file(now.run_json(run), text)
        return True

    return layout.change(run, work)


def keep_head(
    layout: Layout,
    run: str,
    version: int,
    upload: Upload,
    crc32: int,
    as_of_ns: int | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Store an uploaded head, with the time of its arrival or with an earlier one, and the sum of its bytes. Blocks.

    Heads are ordered by their files' times (`Target.at`). So a later head gets a later time whatever the clock says.
    `check` raises if the head is unwanted by now. It is called under the run's lock, under which all heads are stored.
    So it sees all that happened before any head that this one could hide.
    """
    arrived_ns = upload.path.stat().st_mtime_ns
    layout.announce(run, upload.path)

    def work(now: Layout) -> None:
        load_run(now, run)  # else it was deleted meanwhile, and the next run of this name would find the head
        check()
        later, path = arrived_ns, now.head(run, version)
        for head in now.heads(run).glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # the worker deletes old heads
                later = max(later, head.stat().st_mtime_ns + 1)
        came_ns, own = later if as_of_ns is None else as_of_ns, now.own(upload.path)
        os.utime(own, ns=(came_ns, came_ns))
        _sum_of(path).unlink(missing_ok=True)  # a death before the end leaves a head without one, never another head's
        path.parent.mkdir(parents=True, exist_ok=True)
        own.rename(path)
        replace_file(_sum_of(path), f"{came_ns} {crc32}".encode())

    layout.change(run, work)


def check_head_bytes(path: Path) -> None:
    """Raise WireError where a head is not as it was received. Blocks.

    One without a sum passes: the process that kept it died before it wrote the sum.
    """
    try:
        came_ns, known = map(int, _sum_of(path).read_text().split())
    except (FileNotFoundError, ValueError):
        return
    if path.stat().st_mtime_ns == came_ns and crc32_of(path) != known:
        raise WireError("file", "its bytes are not those that were received (CRC-32 differs)")


def delete_heads(layout: Layout, run: str, paths: Collection[Path]) -> None:
    """Delete heads of a run; missing is fine. Blocks."""
    versions = [int(path.stem) for path in paths]

    def work(now: Layout) -> None:
        for version in versions:
            delete_head(now.head(run, version))

    if versions:
        layout.change(run, work, alone=False)


def delete_head(path: Path) -> None:
    """Delete a head, and the sum beside it; idempotent. Within `Layout.change`."""
    path.unlink(missing_ok=True)
    _sum_of(path).unlink(missing_ok=True)


def _sum_of(head: Path) -> Path:
    return head.with_suffix(".crc32")


def kept_bytes(layout: Layout, run: str) -> int:
    """Bytes of what is kept of a run but its heads: drafters, checkpoints, recent rollouts. Blocks."""
    total, heads = 0, str(layout.heads(run))
    for directory, _, files in os.walk(layout.run(run)):
        if directory == heads:
            continue
        for name in files:
            with contextlib.suppress(OSError):  # deleted or moved meanwhile
                total += os.lstat(f"{directory}/{name}").st_size
    return total


def heads_bytes(layout: Layout, run: str) -> int:
    """Bytes of the heads that were received of a run. Blocks."""
    return sum(found.st_size for _, found in _heads(layout, run))


def heads_since(layout: Layout, run: str, seconds: float) -> int:
    """How many of a run's heads came after this Unix time, which may be another host's. Blocks."""
    return sum(found.st_mtime > seconds for _, found in _heads(layout, run))


def _heads(layout: Layout, run: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in layout.heads(run).glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # the worker deletes heads too
            yield path, path.stat()


def forget_unneeded_heads(layout: Layout, run: str, newest_policy: int, most: int, last_batch_ns: int = 0) -> int:
    """Where a run has `most` received heads, delete those that no batch needs; returns how many are left. Blocks.

    They are those that came after all batches and are above `newest_policy`, the version of the batch accepted last: a
    batch uses no head of a higher version than its own, and none that came after that of its own version. The newest
    half of `most` stays all the same: batches that use it may be on their way. `last_batch_ns`: when the last batch
    came (Unix ns), where it does not lie in this spool.
    """
    found: dict[Path, tuple[int, int]] = {}  # when it came (ns), version
    for path, stat in _heads(layout, run):
        with contextlib.suppress(ValueError):
            found[path] = stat.st_mtime_ns, int(path.stem)
    if len(found) < most:
        return len(found)
    for batch in layout.spool(run).glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            last_batch_ns = max(last_batch_ns, batch.stat().st_mtime_ns)
    spare = [path for path, (came, version) in found.items() if came > last_batch_ns and version > newest_policy]
    spare.sort(key=found.__getitem__)
    spare = spare[: max(0, len(spare) - most // 2)]
    delete_heads(layout, run, spare)
    return len(found) - len(spare)


def read_state(layout: Layout, run: str) -> RunState:
    """What a person wants of a run. A file that cannot be read pauses it: nothing is lost until it is mended."""
    path = layout.run_state(run)
    revalidate(path.parent)
    try:
        found: RunState = _STATE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return RunState()
    except (ValidationError, OSError) as error:
        return RunState("paused", f"its {path.name} cannot be read ({type(error).__name__}); PATCH the run again")
    return found


def change_state(layout: Layout, run: str, state: State, reason: str, by: str | None = None) -> RunState:
    """Write down what a person wants of a run, and an event in its history. Blocks.

    To ask for the state that it is in gives that another reason.
    """

    def work(now: Layout) -> RunState:
        load_run(now, run)
        before = read_state(now, run)
        if before.since is not None and (before.state, before.reason, before.by) == (state, reason, by):
            return before
        since = before.since if before.state == state else None
        after = RunState(state, reason, by, since or time.time())
        replace_file(now.run_state(run), _STATE.dump_json(after))
        event = {"event": f"run_{state}", "reason": reason, "by": by, "previous": before.state}
        History(now).record(run, RunStateSet.model_validate(event))
        return after

    return layout.change(run, work)


def check_open(layout: Layout, run: str, *, for_rollouts: bool = False) -> None:
    """Raise RunClosed where a run takes no more rollouts, or (without `for_rollouts`) nothing at all any more."""
    found = read_state(layout, run)
    if found.state == "archived" or (for_rollouts and found.state == "draining"):
        who = f" by {found.by}" if found.by else ""
        what = "it is read-only" if found.state == "archived" else "it takes no more rollouts"
        raise RunClosed(
            f"run {run!r} is {found.state}{who} ({found.reason}): {what}. Do not send it again; a person makes the run "
            f"active by PATCH /runs/{run}"
        )


def check_not_withdrawn(layout: Layout, run: str) -> None:
    """Raise RunWithdrawn while a run of this name is being deleted: a new one would go on from its files."""
    if is_there(layout.withdrawn(run)):
        raise RunWithdrawn(
            f"run {run!r} is being deleted, which ends some minutes after its worker has let go of it, or with another "
            f"DELETE /runs/{run}. Send this again until the name is free"
        )


def withdraw_run(layout: Layout, run: str) -> None:
    """Unregister a run: nobody finds it any more, and no other may take its name. Raises RunNotFound. Blocks."""
    layout.abandon(run)
    if not is_there(layout.run_json(run)) and not layout.withdrawn(run).exists():
        raise RunNotFound(f"run {run!r} is not registered")

    def work(now: Layout) -> None:
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt came as far
            now.run_json(run).rename(now.withdrawn(run))

    layout.change(run, work)


def delete_run(layout: Layout, run: str, forget: Callable[[int | None], bool] = lambda _: True) -> bool:
    """Delete the files of a withdrawn run. Nothing may work on it. False: another request was faster. Blocks.

    `forget` deletes its keys in Redis, as in `commit_run`. It is called before the name is free, or it would delete a
    new run's keys. Two renames take the files away, so nobody finds half a run, and no other run of its name is
    touched. What a process leaves that dies after them, `sweep_deleted` deletes.
    """

    def work(now: Layout) -> Sequence[Path] | None:
        name = f"{_DELETED}{uuid.uuid4().hex}"
        spool, files = now.spool(run).with_name(name), now.run(run).with_name(name)
        if not is_there(now.withdrawn(run)):
            return None  # the name may be another run's by now
        now.fenced(forget)
        with contextlib.suppress(FileNotFoundError):
            now.spool(run).rename(spool)
        now.run(run).rename(files)
        return spool, files

    left = layout.change(run, work)
    for path in left or ():
        shutil.rmtree(path, ignore_errors=True)
    return left is not None


def sweep_deleted(layout: Layout) -> None:
    """Delete what deletions left that were cut short. Blocks."""
    for top in (layout.runs, layout.root / "spool" / "runs"):
        for path in top.glob(f"{_DELETED}*"):
            shutil.rmtree(path, ignore_errors=True)
