"""What each run serves: a pointer to one of its versions (`drafters/versions.py`); how it moves: `history/events.py`.

Invariants, also after loss of power at any line:
* `latest.json` is replaced by one atomic rename, and its `sequence` only grows: publish, rollback and push-again each
  take a new number, so a reader that remembers the last sequence can refuse anything older.
* `publish` is compare-and-set on `latest`: a drafter replaces only the version that it was judged against. So a worker
  that was paused during another publish or a rollback changes nothing (docs/guide/operating.md, "What a paused process
  can do").
* With `drafters_url`, a version's files are in the object store before `latest.json` names it.
* A hold is part of `latest.json`, so it appears and ends in the same rename as a move. While it is there, nothing but
  another hold moves `latest` to another version: what was judged before it and is published after it raises
  `LatestHeld`.
* One `flock` per run serialises the API (rollback, push-again) and the worker (publish). After `LOCK_SECONDS` the error
  names the holder: a paused process (a debugger, a paused container) keeps the lock until it goes on or is killed.

Handles files and objects only: no torch, no tensors.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

from rl_hooks.durable import replace_file
from rl_hooks.lock import LockHeld, exclusive
from service.errors import (
    LatestHeld,
    LatestMoved,
    RegistryBusy,
    RunConflict,
    RunDamaged,
    VersionNotFound,
)
from service.monitor.records import HeldVersion
from service.storage.drafters.versions import MANIFEST, Manifest, Versions, digests_of, version_number
from service.storage.history.digest import SentDrafter
from service.storage.history.events import History
from service.storage.layout import VERSION_NAME, Layout, revalidate

#: For `instead_of`: replace the served version, whichever it is.
ANY = "*"
#: How long to wait for a run's lock. It is held for renames, and for deleting old versions.
LOCK_SECONDS = 30.0
#: Events with which a version begins to be served.
OFFERS = ("published", "rolled_back")


class Registry(Versions):
    """The versions in one state directory, which of them is served, and the history of that."""

    def __init__(self, layout: Layout, drafters_url: str | None = None) -> None:
        """`drafters_url`: of the object store that gets each version before `latest` names it."""
        super().__init__(layout, drafters_url)
        self.history = History(layout)

    # --- reading
    def latest(self, run: str) -> Manifest | None:
        """Manifest of the served version, or None before the first publish.

        Its `gate` is what was found when `latest` moved to it: nothing, where a person went back to it.
        """
        pointer = self._pointer(run)
        while pointer is not None:
            try:
                manifest = self.get(run, pointer["version"])
            except VersionNotFound as error:
                moved = self._pointer(run)  # `latest` may have moved, and the old version been pruned
                if moved == pointer:
                    path = self._layout.drafter(run, pointer["version"]) / MANIFEST
                    raise RunDamaged(run, path, f"it is gone, and {pointer['version']} is served") from error
                pointer = moved
            else:
                found = None if pointer.get("event") == "rolled_back" else manifest.gate
                moved_by = {name: pointer[name] for name in ("sequence", "reason")}
                return manifest.model_copy(update=moved_by | {"gate": pointer.get("gate", found)})
        return None

    def held(self, run: str) -> HeldVersion | None:
        """The version that a person holds; None where `latest` may move."""
        pointer = self._pointer(run)
        if pointer is None or not isinstance(hold := pointer.get("held"), dict):
            return None
        return HeldVersion(pointer["version"], str(hold.get("reason")), hold.get("since"), hold.get("by"))

    def offer(self, run: str) -> dict[str, Any] | None:
        """The event with which the served version began to be served. A crash may have kept it from the history."""
        pointer = self._pointer(run)
        if pointer is not None and pointer.get("event") in OFFERS:
            return {name: value for name, value in pointer.items() if name != "held"}
        return self.history.last_of(run, OFFERS)  # of before it was pushed again

    def may_be_of(self, run: str, version: str) -> bool:
        """Whether a version is one of this run: on disk, in its history, or older than what its history remembers.

        A number is used once. So one that the run gave to another version, or has not come to, is of another run: of a
        deleted one that had the same name, say. Names of another form than ours are nobody's, and may be anybody's.
        """
        if not VERSION_NAME.fullmatch(version) or (self._layout.drafter(run, version) / MANIFEST).is_file():
            return True
        pointer = self._pointer(run)  # another host may have moved it just now
        kept = [*self.versions(run), *([] if pointer is None else [pointer["version"]])]
        number = version.partition("-")[0] + "-"
        told = [event.text for event in self.history.events(run) if number.encode() in event.text]
        told += [name.encode() for name in kept if name.startswith(number)]
        if told:
            return any(version.encode() in text for text in told)
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
        kind: Literal["eagle3", "mtp"] = "eagle3",
        alpha: Mapping[str, Any] | None = None,
        gate: Mapping[str, Any] | None = None,
        reason: str = "published",
        instead_of: str | None = ANY,
    ) -> Manifest:
        """Turn a staged directory into the next version and point `latest` at it (compare-and-set).

        `instead_of`: the version that it was judged against, None where nothing was served. Raises `LatestMoved` when
        another one is served now, `LatestHeld` when a person holds it, `ObjectStoreError` where its object store fails.
        """
        files, digest = digests_of(staged)
        self._store(run, digest, files, staged)
        with locked(self._layout, run):
            pointer = self._require_served(run, instead_of)
            self._require_free(run)
            sequence = 1 + (0 if pointer is None else pointer["sequence"])
            self._forget_unpointed(run, digest, sequence)
            manifest = Manifest(
                run=run,
                version=self._next_version(run, digest),
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
                alpha=None if alpha is None else dict(alpha),
                gate=None if gate is None else dict(gate),
            )
            self._commit(staged, manifest)
            self._point(run, manifest, reason, "published", {"parent": parent, "alpha": alpha, "gate": gate})
        return manifest

    def archive(
        self, run: str, staged: Path, *, like: Manifest, reason: str, by: str | None, most_waiting: int
    ) -> tuple[Manifest, bool]:
        """Turn a staged directory into a version that is not served: it waits for the gate. Also whether it is new.

        `like`: a version of the lineage, whose facts it shares. Files that are a version already only wait again.
        Raises RunConflict where `most_waiting` wait already, or the version is served.
        """
        files, digest = digests_of(staged)
        with locked(self._layout, run):
            known = {manifest.digest: manifest for manifest in self.manifests(run)[0]}
            manifest, waiting = known.get(digest), self.history.sent(run).keys()
            if manifest is not None and manifest.version in waiting:
                return manifest, False
            if manifest is not None and manifest.version == (self._pointer(run) or {}).get("version"):
                raise RunConflict(f"run {run!r} serves this very drafter already: it is {manifest.version}")
            if len(waiting & set(self.versions(run))) >= most_waiting:
                raise RunConflict(f"{most_waiting} drafters of run {run!r} wait for the gate already; send it later")
            new = manifest is None
            if manifest is None:
                version = self._next_version(run, digest)
                facts: dict[str, Any] = {
                    "sequence": 0,
                    "parent": None,
                    "created": time.time(),
                    "alpha": None,
                    "gate": None,
                }
                sender = SentDrafter(reason, by, 0).sender
                facts |= {"version": version, "reason": sender, "digest": digest, "files": files}
                manifest = like.model_copy(update=facts)
                self._commit(staged, manifest)
            said = {"version": manifest.version, "policy_version": manifest.policy_version, "reason": reason, "by": by}
            self.history.record(run, {"event": "sent", **said})
        return manifest, new

    def promote(
        self, run: str, version: str, reason: str, gate: Mapping[str, Any], *, instead_of: str | None
    ) -> Manifest:
        """Publish a version that was sent and that proved better: point `latest` to it. `instead_of`: as for `publish`.

        Raises what `publish` does.
        """
        self.verify(run, version)
        manifest = self.get(run, version)
        self._store(run, manifest.digest, manifest.files, self._layout.drafter(run, version))
        with locked(self._layout, run):
            self._require_served(run, instead_of)
            self._require_free(run)
            return self._repoint(run, self.get(run, version), reason, "published", more={"gate": gate})

    def rollback(
        self,
        run: str,
        version: str,
        reason: str,
        *,
        instead_of: str | None = ANY,
        gate: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> Manifest:
        """Point `latest` at an existing version again, after verifying its digests. Takes a new sequence number.

        So engines load it again where it is served already. `instead_of`, `gate`: as for `publish`; `by`: who wants it.
        Raises `LatestHeld` when a person holds what is served.
        """
        self.verify(run, version)
        with locked(self._layout, run):
            self._require_served(run, instead_of)
            self._require_free(run)
            more = ({} if gate is None else {"gate": gate}) | ({} if by is None else {"by": by})
            return self._repoint(run, self.get(run, version), reason, "rolled_back", more=more)

    def hold(self, run: str, version: str, reason: str, by: str | None = None) -> Manifest:
        """Serve a version until `release`, after verifying its digests. One that is held already is held instead.

        Takes a new sequence number where another version was served, so that engines load it; else they are left alone.
        """
        self.verify(run, version)
        with locked(self._layout, run):
            hold = {"reason": reason, "since": time.time(), "by": by}
            pointer = self._pointer(run)
            manifest = self.get(run, version)
            if pointer is None or pointer["version"] != version:
                manifest = self._repoint(run, manifest, reason, "rolled_back", held=hold)
            else:
                self._recover_history(run)
                replace_file(self._layout.latest(run), json.dumps(pointer | {"held": hold}).encode())
                manifest = manifest.model_copy(update={"sequence": pointer["sequence"], "reason": pointer["reason"]})
            facts = {"policy_version": manifest.policy_version, "reason": reason, "by": by}
            self.history.record(run, {"event": "held", "version": version, **facts})
        return manifest

    def release(self, run: str, version: str, by: str | None = None) -> Manifest:
        """End the hold of a version; the gate decides again. Raises `LatestHeld` unless that very version is held."""
        with locked(self._layout, run):
            held, pointer = self.held(run), self._pointer(run)
            if pointer is None or held is None or held.version != version:
                found = "none" if held is None else held.version
                raise LatestHeld(f"run {run!r} holds {found}, not {version[:80]}: nothing was released")
            del pointer["held"]
            replace_file(self._layout.latest(run), json.dumps(pointer).encode())
            manifest = self.get(run, version)
            facts = {"policy_version": manifest.policy_version, "by": by}
            self.history.record(run, {"event": "released", "version": version, **facts})
        return manifest.model_copy(update={"sequence": pointer["sequence"], "reason": pointer["reason"]})

    def push_again(self, run: str, reason: str, sequence: int | None = None) -> Manifest:
        """Give the served version a new sequence number, so that every engine loads it again.

        Raises `LatestMoved` where `latest` has another one than `sequence` by now.
        """
        with locked(self._layout, run):
            manifest, held = self.latest(run), (self._pointer(run) or {}).get("held")
            if manifest is None:
                raise VersionNotFound(f"run {run!r} has published no drafter yet, so none can be pushed again")
            if sequence not in (None, manifest.sequence):
                raise LatestMoved(f"run {run!r} is at sequence {manifest.sequence} by now, not {sequence}")
            # Not "pushed again": a person's rollback with those words overrides an agent's canary, and this must not.
            more = {"gate": manifest.gate}
            return self._repoint(run, manifest, f"revived: {reason}", "pushed_again", held=held, more=more)

    def discard(self, run: str, version: str) -> None:
        """Delete a version that is not served: nothing can be done with it."""
        with locked(self._layout, run):
            if (self._pointer(run) or {}).get("version") != version and version in self.versions(run):
                self._delete(run, version)

    def prune(self, run: str, keep: int, protect: set[str] | frozenset[str] = frozenset()) -> list[str]:
        """Delete all but the newest `keep` versions, the served one and those in `protect`; returns those deleted.

        Also removes staging directories that a killed publisher left behind more than an hour ago.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        with locked(self._layout, run):
            pointer = self._pointer(run)
            safe = set(protect) | set(self.versions(run)[-keep:]) | ({pointer["version"]} if pointer else set())
            gone = [version for version in self.versions(run) if version not in safe]
            used = self._objects_used(run)
            for version in gone:
                self._delete(run, version)
            self._delete_leftovers(run)
            for path in self._layout.run(run).glob(".latest-*"):
                path.unlink()
        self._delete_objects(run, used, gone)  # not under the lock, since a store may be slow
        return gone

    # --- inside
    def _next_version(self, run: str, digest: str) -> str:
        pointer, existing = self._pointer(run), self.versions(run)
        taken = [*existing[-1:], *([] if pointer is None else [pointer["version"]])]  # a pruned one's is not used again
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

    def _pointer(self, run: str) -> dict[str, Any] | None:
        revalidate(self._layout.run(run))
        try:
            text = self._layout.latest(run).read_bytes()
            pointer = json.loads(text)
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError) as error:
            raise RunDamaged(run, self._layout.latest(run), error) from error
        if not isinstance(pointer, dict) or not (
            type(pointer.get("sequence")) is int
            and isinstance(pointer.get("reason"), str)
            and VERSION_NAME.fullmatch(str(pointer.get("version")))
        ):
            raise RunDamaged(run, self._layout.latest(run), "it is no pointer of sequence, version and reason")
        return pointer

    def _require_served(self, run: str, version: str | None) -> dict[str, Any] | None:
        """Read the pointer (None: nothing was published yet); LatestMoved unless it is at `version`."""
        pointer = self._pointer(run)
        served = None if pointer is None else pointer["version"]
        if version not in (served, ANY):
            raise LatestMoved(f"run {run!r} serves {served} now, not {version}: nothing was published")
        return pointer

    def _require_free(self, run: str) -> None:
        """Raise LatestHeld while a person holds what is served."""
        if (held := self.held(run)) is not None:
            who = "a person" if held.by is None else held.by
            raise LatestHeld(
                f"run {run!r} holds {held.version}, by {who} ({held.reason}): nothing was changed. Release it first "
                f"(`draftalign release`, or DELETE /drafter/{held.version}/hold)"
            )

    def _repoint(
        self,
        run: str,
        manifest: Manifest,
        reason: str,
        kind: str,
        held: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Manifest:
        pointer = self._pointer(run)
        sequence = 1 + (0 if pointer is None else int(pointer["sequence"]))
        moved = manifest.model_copy(update={"sequence": sequence, "reason": reason})
        previous = {"previous": None if pointer is None else pointer["version"]}
        self._point(run, moved, reason, kind, previous | dict(more or {}), held)
        return moved

    def _point(
        self,
        run: str,
        manifest: Manifest,
        reason: str,
        kind: str,
        more: Mapping[str, Any],
        held: Mapping[str, Any] | None = None,
    ) -> None:
        event = {
            "time": time.time(),
            "event": kind,
            "sequence": manifest.sequence,
            "version": manifest.version,
            "policy_version": manifest.policy_version,
            "reason": reason,
        }
        self._recover_history(run)
        # With all of the event: it may be the only place that has it, after a crash before the next line.
        pointer = event | dict(more) | ({} if held is None else {"held": held})
        replace_file(self._layout.latest(run), to_json(pointer, inf_nan_mode="null"))
        self.history.record(run, event | dict(more))

    def _recover_history(self, run: str) -> None:
        """Append the event that is missing if a crash came between the pointer's rename and the append."""
        pointer = self._pointer(run)
        if pointer is None or (event := self._unrecorded(run, pointer)) is None:
            return
        self.history.record(run, {"event": "published", **event, "recovered": True})

    def _unrecorded(self, run: str, pointer: Mapping[str, Any]) -> dict[str, Any] | None:
        """The event of the last move, where the history never had it; None where it has, or had and forgot it."""
        recorded = self.history.digest(run).sequence
        if recorded is not None and recorded >= pointer["sequence"]:
            return None
        return {name: value for name, value in pointer.items() if name != "held"}


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
