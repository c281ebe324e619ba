"""What each run serves: a pointer to one of its versions (`drafters/versions.py`); how it moves: `history/events.py`.

Invariants, also after loss of power at any line:
* `latest.json` is replaced by one atomic rename, and its `sequence` only grows: publish, rollback and push-again each
  take a new number, so a reader that remembers the last sequence can refuse anything older.
* `publish` is compare-and-set on `latest`: a drafter replaces only the version that it was judged against, also where
  the worker was paused meanwhile (docs/reference/paused.md).
* With `drafters_url`, a version's files are in the object store before `latest.json` names it.
* A hold is part of `latest.json`, so it appears and ends in the same rename as a move. While it is there, nothing but
  another hold moves `latest` to another version: what was judged before it and is published after it raises
  `LatestHeld`.
* One `flock` per run serialises the API (rollback, push-again) and the worker (publish). After `LOCK_SECONDS` the error
  names the holder. With `state_url` a change is one conditional put instead (`Layout.change`), and appears whole.

Handles files and objects only: no torch, no tensors.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic_core import to_json

from rl_hooks.durable import replace_file
from rl_hooks.format.drafter import DrafterKind
from service.errors import LatestHeld, LatestMoved, RunConflict, RunDamaged, VersionNotFound
from service.monitor.events import DrafterSent, Event, GateEvidence, HoldChanged, Moved, lenient
from service.monitor.records import HeldVersion
from service.storage.drafters.versions import MANIFEST, Manifest, Versions, digests_of, version_number
from service.storage.history.digest import SentDrafter
from service.storage.history.events import History
from service.storage.layout import VERSION_NAME, Layout, revalidate

#: Value of `instead_of`: replace whichever version is served.
ANY = "*"
T = TypeVar("T")
_Move = Literal["published", "rolled_back", "pushed_again"]
#: Events with which a version begins to be served.
OFFERS = ("published", "rolled_back")


@dataclass(frozen=True, slots=True)
class ServedPointer:
    """The content of `latest.json`. `moved`: the event that moved it. `held`: the hold of this version, if any."""

    version: str
    sequence: int
    reason: str
    moved: Moved
    held: HeldVersion | None = None

    @classmethod
    def of(cls, moved: Moved, held: HeldVersion | None = None) -> Self | None:
        """None where version, sequence or reason are missing."""
        version, sequence, reason = moved.version, moved.sequence, moved.reason
        if sequence is None or reason is None or not VERSION_NAME.fullmatch(str(version)):
            return None
        return cls(str(version), sequence, reason, moved, held)

    def offered(self, manifest: Manifest) -> Manifest:
        """The version's manifest, with the sequence number, the reason and the `override_canary` of this offer."""
        of = {"sequence": self.sequence, "reason": self.reason, "override_canary": self.moved.override_canary}
        return manifest.model_copy(update=of)

    @property
    def written(self) -> dict[str, Any]:
        """The JSON object of the file."""
        if self.held is None:
            return self.moved.written
        return self.moved.written | {"held": {name: getattr(self.held, name) for name in ("reason", "since", "by")}}


class Registry(Versions):
    """The versions in one state directory, which of them each run serves, and the runs' histories."""

    def __init__(self, layout: Layout, drafters_url: str | None = None) -> None:
        """`drafters_url`: URL of the object store that gets each version before `latest` names it."""
        super().__init__(layout, drafters_url)
        self.history = History(layout)

    # --- reading
    def latest(self, run: str) -> Manifest | None:
        """Manifest of the served version, or None before the first publish.

        Its `gate` is the evidence with which `latest` moved to it; None if a person went back to it.
        """
        pointer = self._pointer(run)
        while pointer is not None:
            try:
                manifest = self.get(run, pointer.version)
            except VersionNotFound as error:
                now = self._pointer(run)  # `latest` may have moved, and the old version may have been pruned
                if now == pointer:
                    path = self._layout.drafter(run, pointer.version) / MANIFEST
                    raise RunDamaged(run, path, f"it is gone, and {pointer.version} is served") from error
                pointer = now
            else:
                moved = pointer.moved
                told = "gate" in moved.model_fields_set or moved.event == "rolled_back"
                return pointer.offered(manifest).model_copy(update={"gate": moved.gate if told else manifest.gate})
        return None

    def held(self, run: str) -> HeldVersion | None:
        """The version that a person holds. None: `latest` may move."""
        pointer = self._pointer(run)
        return None if pointer is None else pointer.held

    def offer(self, run: str) -> Moved | None:
        """The event with which the served version began to be served. After a crash the history may lack it."""
        pointer = self._pointer(run)
        if pointer is not None and pointer.moved.event in OFFERS:
            return pointer.moved
        found = self.history.last_of(run, OFFERS)  # the pointer has the push that came after it
        return found if isinstance(found, Moved) else None

    def may_be_of(self, run: str, version: str) -> bool:
        """Whether a version may be one of this run: on disk, in its history, or older than its history goes.

        Each number is used once. If the run gave the number to another version, or has not reached it, the version is
        of another run, such as a deleted run of the same name. Names of another form than ours may be anybody's.
        """
        if not VERSION_NAME.fullmatch(version) or (self._layout.drafter(run, version) / MANIFEST).is_file():
            return True
        pointer = self._pointer(run)  # newer than the history, if another host has just moved it
        kept = [*self.versions(run), *([] if pointer is None else [pointer.version])]
        number = version.partition("-")[0] + "-"
        told = {event.version for event in self.history.events(run) if event.version}.union(kept)
        if any(name.startswith(number) for name in told):
            return version in told
        return version_number(version) < max(map(version_number, kept), default=0)

    # --- writing
    def publish(
        self,
        run: str,
        staged: Path,
        *,
        policy_version: int,
        parent: str | None,
        config_fingerprint: str,
        d2t_sha256: str,
        aux_layers: Sequence[int],
        kind: DrafterKind = "eagle3",
        gate: GateEvidence | None = None,
        reason: str = "published",
        instead_of: str | None = ANY,
    ) -> Manifest:
        """Turn a staged directory into the next version and point `latest` at it (compare-and-set).

        `instead_of`: the version that it was judged against; None if nothing was served. Raises `LatestMoved` if
        another version is served now, `LatestHeld` if a person holds it, `ObjectStoreError` if `drafters_url` fails.
        """
        files, digest = digests_of(staged)
        self._store(run, digest, files, staged)
        self._layout.announce(run, staged)

        def work(now: Registry) -> Manifest:
            pointer = now._require_served(run, instead_of)
            now._require_free(run)
            sequence = 1 + (0 if pointer is None else pointer.sequence)
            now._forget_unpointed(run, digest, sequence)
            manifest = Manifest(
                run=run,
                version=now._next_version(run, digest),
                sequence=sequence,
                reason=reason,
                digest=digest,
                files=files,
                parent=parent,
                policy_version=policy_version,
                kind=kind,
                config_fingerprint=config_fingerprint,
                d2t_sha256=d2t_sha256,
                aux_layers=tuple(aux_layers),
                created=time.time(),
                gate=gate,
            )
            now._commit(staged, manifest)
            now._point(run, _moved("published", manifest, {"parent": parent, "gate": gate}))
            return manifest

        return self._change(run, work)

    def archive(
        self, run: str, staged: Path, *, like: Manifest, reason: str, by: str | None, most_waiting: int
    ) -> tuple[Manifest, bool]:
        """Turn a staged directory into a version that waits for the gate. Returns it, and whether it is new.

        `like`: a version of the lineage, whose facts it shares. If the files are those of a known version, that version
        waits again. Raises RunConflict if `most_waiting` wait already, or if the version is served.
        """
        files, digest = digests_of(staged)
        self._layout.announce(run, staged)

        def work(now: Registry) -> tuple[Manifest, bool]:
            known = {manifest.digest: manifest for manifest in now.manifests(run)[0]}
            manifest, waiting = known.get(digest), now.history.sent(run).keys()
            if manifest is not None and manifest.version in waiting:
                return manifest, False
            if manifest is not None and manifest.version == now._served_version(run):
                raise RunConflict(f"run {run!r} serves this very drafter already: it is {manifest.version}")
            if len(waiting & set(now.versions(run))) >= most_waiting:
                raise RunConflict(f"{most_waiting} drafters of run {run!r} wait for the gate already; send it later")
            new = manifest is None
            if manifest is None:
                version = now._next_version(run, digest)
                sender = SentDrafter(reason, by, 0).sender
                its = {"version": version, "reason": sender, "digest": digest, "files": files, "created": time.time()}
                none = {"sequence": 0, "parent": None, "gate": None, "override_canary": False}
                manifest = like.model_copy(update=its | none)
                now._commit(staged, manifest)
            policy_version = manifest.policy_version
            sent = DrafterSent(version=manifest.version, policy_version=policy_version, reason=reason, by=by)
            now.history.record(run, sent)
            return manifest, new

        return self._change(run, work)

    def promote(self, run: str, version: str, reason: str, gate: GateEvidence, *, instead_of: str | None) -> Manifest:
        """Publish a sent version that proved better: point `latest` to it.

        `instead_of`, and the errors: as of `publish`.
        """
        self.verify(run, version)
        manifest = self.get(run, version)
        self._store(run, manifest.digest, manifest.files, self._layout.drafter(run, version))

        def work(now: Registry) -> Manifest:
            now._require_served(run, instead_of)
            now._require_free(run)
            return now._repoint(run, now.get(run, version), reason, "published", more={"gate": gate})

        return self._change(run, work)

    def rollback(
        self,
        run: str,
        version: str,
        reason: str,
        *,
        instead_of: str | None = ANY,
        gate: GateEvidence | None = None,
        by: str | None = None,
        override_canary: bool = False,
    ) -> Manifest:
        """Point `latest` at an existing version again, after verifying its digests.

        It gets a new sequence number, so that engines load it even if it is served already. If a person (`gate` is
        None) repeats the same request while `latest` is as it left it, the answer is the same and nothing changes: a
        client that got no answer may ask again.

        `instead_of`, `gate`: as of `publish`. `by`: who wants it. `override_canary`: as in the manifest. Raises
        `LatestHeld` if a person holds the served version.
        """
        self.verify(run, version)
        wanted = Moved(event="rolled_back", version=version, reason=reason, by=by, override_canary=override_canary)

        def work(now: Registry) -> Manifest:
            pointer = now._require_served(run, instead_of)
            now._require_free(run)
            if gate is None and pointer is not None and _asked(pointer.moved) == _asked(wanted):
                now._recover_history(run)
                return pointer.offered(now.get(run, version))
            more: dict[str, Any] = {} if gate is None else {"gate": gate}
            more |= ({} if by is None else {"by": by}) | ({"override_canary": True} if override_canary else {})
            return now._repoint(run, now.get(run, version), reason, "rolled_back", more=more)

        return self._change(run, work)

    def hold(self, run: str, version: str, reason: str, by: str | None = None) -> Manifest:
        """Serve a version until `release`, after verifying its digests. It replaces an earlier hold.

        If another version was served, it gets a new sequence number, so that engines load it. Else engines are left
        alone. The same hold again changes nothing.
        """
        self.verify(run, version)

        def work(now: Registry) -> Manifest:
            hold = HeldVersion(version, reason, time.time(), by)
            pointer = now._pointer(run)
            manifest = now.get(run, version)
            if pointer is not None and pointer.held is not None and replace(pointer.held, since=hold.since) == hold:
                manifest = pointer.offered(manifest)
            elif pointer is None or pointer.version != version:
                manifest = now._repoint(run, manifest, reason, "rolled_back", held=hold, more={"to_hold": True})
            else:
                now._recover_history(run)
                replace_file(now._layout.latest(run), json.dumps(replace(pointer, held=hold).written).encode())
                manifest = pointer.offered(manifest)
            of = manifest.policy_version
            told, last = HoldChanged(version=version, policy_version=of, reason=reason, by=by), now._last_hold(run)
            if last is None or last.model_dump(exclude={"time"}) != told.model_dump(exclude={"time"}):
                now.history.record(run, told)  # a repeat writes the event that a crash cut off
            return manifest

        return self._change(run, work)

    def release(self, run: str, version: str, by: str | None = None) -> bool:
        """End the hold of a version: the gate decides again. False: none is held. LatestHeld: another one is."""

        def work(now: Registry) -> bool:
            pointer = now._pointer(run)
            of = now.get(run, version).policy_version  # raises for a name that is no version's
            released = HoldChanged(event="released", version=version, policy_version=of, by=by)
            if pointer is None or pointer.held is None:
                last = now._last_hold(run)
                if last is not None and (last.event, last.version) == ("held", version):
                    now.history.record(run, released)  # a crash cut the event off
                return False
            if pointer.version != version:
                raise LatestHeld(f"run {run!r} holds {pointer.version}, not {version[:80]}: nothing was released")
            replace_file(now._layout.latest(run), json.dumps(pointer.moved.written).encode())
            now.history.record(run, released)
            return True

        return self._change(run, work)

    def push_again(self, run: str, reason: str, sequence: int | None = None) -> Manifest:
        """Give the served version a new sequence number, so that every engine loads it again.

        Raises `LatestMoved` where `latest` has another one than `sequence` by now.
        """

        def work(now: Registry) -> Manifest:
            manifest, held = now.latest(run), now.held(run)
            if manifest is None:
                raise VersionNotFound(f"run {run!r} has published no drafter yet, so none can be pushed again")
            if sequence not in (None, manifest.sequence):
                raise LatestMoved(f"run {run!r} is at sequence {manifest.sequence} by now, not {sequence}")
            return now._repoint(run, manifest, reason, "pushed_again", held=held, more={"gate": manifest.gate})

        return self._change(run, work)

    def discard(self, run: str, version: str) -> None:
        """Delete a version that is not served: nothing can be done with it."""

        def work(now: Registry) -> None:
            if now._served_version(run) != version and version in now.versions(run):
                now._delete(run, version)

        self._change(run, work)

    def prune(self, run: str, keep: int, protect: set[str] | frozenset[str] = frozenset()) -> list[str]:
        """Delete all but the newest `keep` versions, the served one and those in `protect`; returns those deleted.

        Also removes staging directories that a killed publisher left behind more than an hour ago.
        """

        def work(now: Registry) -> tuple[list[str], tuple[dict[str, str], dict[str, str]]]:
            safe = {*protect, *now.versions(run)[-keep:], now._served_version(run)}
            gone = [version for version in now.versions(run) if version not in safe]
            used = now._objects_used(run)
            for version in gone:
                now._delete(run, version)
            for path in now._layout.run(run).glob(".latest-*"):
                path.unlink()
            return gone, used

        gone, used = self._change(run, work)
        self._delete_leftovers(run)
        self._delete_objects(run, used, gone)  # not under the lock, since a store may be slow
        return gone

    # --- inside
    def _change(self, run: str, work: Callable[[Registry], T]) -> T:
        return self._layout.change(run, lambda files: work(self if files is self._layout else self._within(files)))

    def _within(self, files: Layout) -> Registry:
        """The same, of what a `Layout.change` may change."""
        found = Registry(files)
        found.objects = self.objects
        return found

    def _next_version(self, run: str, digest: str) -> str:
        served, existing = self._served_version(run), self.versions(run)
        taken = [*existing[-1:], *([] if served is None else [served])]  # a pruned one's is not used again
        return f"v{1 + max(map(version_number, taken), default=0):06d}-{digest[:8]}"

    def _forget_unpointed(self, run: str, digest: str, sequence: int) -> None:
        """Delete the newest version where its publisher died before `latest` pointed to it, and it comes again now.

        Else a version that nobody was ever offered would stay in the archive, and the same files would have two names.
        """
        for version in self.versions(run)[-1:]:
            with contextlib.suppress(RunDamaged):  # of its manifest: then it stays, and hinders nothing
                manifest = self.get(run, version)
                if manifest.digest == digest and manifest.sequence == sequence:
                    self._delete(run, version)

    def _pointer(self, run: str) -> ServedPointer | None:
        revalidate(self._layout.run(run))
        try:
            text = self._layout.latest(run).read_bytes()
            found = json.loads(text)
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError) as error:
            raise RunDamaged(run, self._layout.latest(run), error) from error
        pointer, hold = None, None
        if isinstance(found, dict):
            hold = found.pop("held", None)
            pointer = ServedPointer.of(lenient(Moved, found))
        if pointer is None:
            raise RunDamaged(run, self._layout.latest(run), "it is no pointer of sequence, version and reason")
        if not isinstance(hold, dict):
            return pointer
        held = HeldVersion(pointer.version, str(hold.get("reason")), hold.get("since"), hold.get("by"))
        return replace(pointer, held=held)

    def _served_version(self, run: str) -> str | None:
        pointer = self._pointer(run)
        return None if pointer is None else pointer.version

    def _require_served(self, run: str, version: str | None) -> ServedPointer | None:
        """Read the pointer (None: nothing was published yet); LatestMoved unless it is at `version`."""
        pointer = self._pointer(run)
        served = None if pointer is None else pointer.version
        if version not in (served, ANY):
            raise LatestMoved(f"run {run!r} serves {served} now, not {version}: nothing was published")
        return pointer

    def _require_free(self, run: str) -> None:
        """Raise LatestHeld while a person holds what is served."""
        if (held := self.held(run)) is not None:
            who = "a person" if held.by is None else held.by
            raise LatestHeld(
                f"run {run!r} holds {held.version}, by {who} ({held.reason}): nothing was changed. Release it first "
                f"(`draftalign release`, or DELETE /drafter/{held.version}/hold?run={run})"
            )

    def _repoint(
        self,
        run: str,
        manifest: Manifest,
        reason: str,
        kind: _Move,
        held: HeldVersion | None = None,
        *,
        more: Mapping[str, Any],
    ) -> Manifest:
        pointer = self._pointer(run)
        sequence = 1 + (0 if pointer is None else pointer.sequence)
        override = bool(more.get("override_canary"))
        moved = manifest.model_copy(update={"sequence": sequence, "reason": reason, "override_canary": override})
        previous = {"previous": None if pointer is None else pointer.version}
        self._point(run, _moved(kind, moved, {**previous, **more}), held)
        return moved

    def _point(self, run: str, moved: Moved, held: HeldVersion | None = None) -> None:
        self._recover_history(run)
        # With all of the event: it may be the only place that has it, after a crash before the next line.
        pointer = ServedPointer(str(moved.version), moved.sequence or 0, moved.reason or "", moved, held)
        replace_file(self._layout.latest(run), to_json(pointer.written, inf_nan_mode="null"))
        self.history.record(run, moved)

    def _last_hold(self, run: str) -> Event | None:
        return self.history.last_of(run, ("held", "released"))

    def _recover_history(self, run: str) -> None:
        """Append the event that is missing if a crash came between the pointer's rename and the append."""
        pointer, recorded = self._pointer(run), self.history.digest(run).sequence
        if pointer is not None and (recorded is None or recorded < pointer.sequence):  # else it had it once
            self.history.record(run, pointer.moved.model_copy(update={"recovered": True}))


def _asked(moved: Moved) -> tuple[object, ...]:
    """What a person's rollback says; a hold and the gate make no such move."""
    by_gate = "gate" in moved.model_fields_set
    return moved.event, moved.version, moved.reason, moved.by, moved.override_canary, moved.to_hold, by_gate


def _moved(kind: _Move, manifest: Manifest, facts: Mapping[str, Any]) -> Moved:
    of = {name: getattr(manifest, name) for name in ("sequence", "version", "policy_version", "reason")}
    return Moved(time=time.time(), event=kind, **of, **facts)
