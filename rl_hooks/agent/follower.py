"""Keeps one engine on the drafter that the service offers, and counts what that drafter achieves there.

One `tick` = scrape, ask what is loaded, book the difference, judge a running canary, swap if something else is wanted.
The engine's own answer is the truth about what is loaded; what this object remembers only tells whether it changed.

Restart of the agent: `engines/<digest of the URL>.json` in the cache keeps counts and verdicts, so that cumulative
reports never go backwards and a rejected version stays rejected. What a swap is about to do is written there before the
engine is asked, so that an agent that dies over it leaves a version on trial and not one that nobody judges.

Every load: the cached files are verified first, and the digest that the engine answers is compared afterwards. Files
that are not what was downloaded are deleted and downloaded again, and the engine gets them at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_hooks.agent.canary import Canary, CanaryRule, Verdict
from rl_hooks.agent.download import cached_release, is_intact
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.durable import replace_file
from rl_hooks.engines.counters import Bucket, Ledger, Snapshot
from rl_hooks.engines.protocol import Engine, EngineState
from rl_hooks.errors import (
    AgentError,
    EngineError,
    MetricsError,
    SwapRefusedError,
)
from rl_hooks.release import Manifest, Release, parse_manifest

log = logging.getLogger("draftalign.agent")


@dataclass(frozen=True, slots=True)
class Known:
    """The engine as the last tick left it."""

    version: str | None
    swaps: int


class EngineFollower:
    """One engine's loop body; `tick` raises EngineError when the engine cannot be reached.

    `fetch(manifest, anew)` brings a version into the cache; it is called in a thread.
    """

    def __init__(
        self,
        engine: Engine,
        rule: CanaryRule,
        metrics: AgentMetrics,
        cache: Path,
        clock: Callable[[], float],
        fetch: Callable[[Manifest, bool], Release],
    ) -> None:
        self.url = engine.url
        self.ledger = Ledger()
        self.verdicts: list[tuple[Verdict, int]] = []  # to be reported; with the sequence of the offer judged
        self._engine = engine
        self._canary = Canary(rule)
        self._metrics = metrics
        self._clock = clock
        self._fetch = fetch
        self._memory = cache / "engines" / f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.json"
        self._known: Known | None = None
        self._snapshot: Snapshot | None = None
        self._snapshot_at = clock()
        self._sequence = -1  # of the newest offer that was loaded
        self._fallback: Release | None = None  # the release of the canary's good version
        self._loaded_release: Release | None = None
        self._shape: tuple[str, str] | None = None  # (config fingerprint, d2t digest) that this engine process takes
        self._rejected: dict[str, int] = {}  # version -> sequence at which its canary failed
        self._given_up: set[int] = set()  # sequences that the engine itself refused
        self._lost = False  # the process that we swapped into is gone
        self._pending: Release | None = None  # the engine was asked for it, and nobody has seen it done
        self._mistrusted: str | None = None  # version for which the engine read other bytes than were verified
        self.depth: int | None = None  # tokens that the engine drafts a round, where it says so
        self.drafting: str | None = None  # `greedy` or `probabilistic`, where it says so
        self._recall()

    @property
    def sequence(self) -> int:
        """Of the newest offer that was loaded, by an earlier agent perhaps; -1 before the first."""
        return self._sequence

    @property
    def loaded_version(self) -> str | None:
        """The version that the engine served at the last tick."""
        return None if self._known is None else self._known.version

    def versions_in_use(self) -> set[str]:
        """Versions whose files must stay in the cache."""
        releases = (self._fallback, self._loaded_release, self._pending)
        return {release.version for release in releases if release is not None}

    async def tick(self, offer: Release | None) -> bool:
        """Bring the engine and the books up to date; returns whether a swap took place."""
        snapshot = await self._scrape()
        # Asked *after* the scrape: if nothing changed since the last tick, all of the difference is one version's.
        state = await self._engine.state()
        self._metrics.contact(self.url)
        self.depth, self.drafting = state.depth, state.drafting
        verdict = self._account(snapshot, state)
        if verdict is not None:
            self._judge(verdict)
        wanted = self._wanted(offer)
        try:
            if wanted is None or wanted.sequence in self._given_up or _only_counted(state, wanted):
                return False
            needed = self._needs(wanted, state)
            if needed:
                await self._swap(wanted, state)
            else:
                self._adopt(wanted)
            if wanted is offer:
                self._sequence = offer.sequence
            return needed
        finally:
            self._publish_metrics()
            self._store()

    def is_loaded(self, bucket: Bucket) -> bool:
        """Whether counts may still be added to this bucket soon."""
        policy = None if self._snapshot is None else self._snapshot.policy_version
        return bucket.drafter_version == self.loaded_version and bucket.policy_version == policy

    # --- counting
    async def _scrape(self) -> Snapshot | None:
        try:
            return await self._engine.snapshot()
        except MetricsError as error:
            # Counting fails loudly, but an engine without counters still deserves a drafter.
            self._metrics.error(self.url, "metrics")
            log.error("%s: %s", self.url, error)
            return None

    def _account(self, snapshot: Snapshot | None, state: EngineState) -> Verdict | None:
        snapshot = _with_policy(snapshot, state)
        known, before, seconds = self._known, self._snapshot, self._clock() - self._snapshot_at
        fallen = before is not None and snapshot is not None and snapshot.has_fallen(before)
        restarted = fallen or (known is not None and state.swaps < known.swaps)
        self._known = Known(state.serving, state.swaps)
        self._snapshot, self._snapshot_at = snapshot, self._clock()
        if restarted:
            self._forget_process(state, known)
        if self._pending is not None and known != self._known and state.serving == self._pending.version:
            # Asked for, and done since: the answer was lost, or the agent that asked died before it came.
            self._set_aside(before, snapshot)
            self._took(self._pending, None if known is None else known.version)
            return None
        if snapshot is None:
            return None
        if restarted:
            if state.swaps == 0:  # everything since its start is the work of what it started with
                return self._book(state, snapshot, Snapshot.zero(snapshot), seconds)
            self.ledger.set_aside(snapshot.rounds)
        elif before is not None and known == self._known:
            return self._book(state, snapshot, before, seconds)
        elif before is not None:
            log.warning("%s: somebody else changed the drafter from %s to %s", self.url, known, self._known)
            self._canary.interrupted()
            self._set_aside(before, snapshot)
        return None

    def _set_aside(self, before: Snapshot | None, after: Snapshot | None) -> None:
        """From the scrape before a swap to the one after it: partly the old drafter's work, partly the new one's."""
        if before is not None and after is not None:
            self.ledger.set_aside(after.rounds - before.rounds)

    def _book(self, state: EngineState, snapshot: Snapshot, before: Snapshot, seconds: float) -> Verdict | None:
        counts, version = snapshot.since(before, seconds), state.serving
        if version is None or version == self._mistrusted:  # nobody to credit: no name, or not what the name says
            self.ledger.set_aside(counts.rounds)
            return None
        if state.version is None:
            self.ledger.book(version, snapshot.policy_version, counts.with_rounds_without_drafts(), method=version)
            return None
        self.ledger.book(version, snapshot.policy_version, counts)
        return self._canary.count(version, counts, self._clock())

    def _forget_process(self, state: EngineState, known: Known | None) -> None:
        was = None if known is None else known.version
        log.warning("%s restarted: it had %s, now has %s after %d swaps", self.url, was, state.serving, state.swaps)
        self._canary.interrupted()
        self._shape = self._loaded_release = self._pending = self._mistrusted = None
        self._given_up.clear()
        self._lost = True

    # --- deciding
    def _judge(self, verdict: Verdict) -> None:
        sequence = self._sequence if self._loaded_release is None else self._loaded_release.sequence
        self.verdicts.append((verdict, sequence))
        if verdict.passed:
            self._fallback = self._loaded_release
            return
        self._rejected[verdict.version] = sequence
        log.error(
            "%s: canary of %s failed: α %.3f over %d rounds, %.3f with %s; swapping back",
            *(self.url, verdict.version, verdict.alpha, verdict.rounds, verdict.previous_alpha, verdict.previous),
        )

    def _wanted(self, offer: Release | None) -> Release | None:
        """What this engine should have: the offer, or the last good release when the offer was found bad here."""
        if offer is None:  # the service was not reached yet; a failed canary's verdict does not wait for it
            return self._fallback if self.loaded_version in self._rejected else None
        if offer.sequence in self._given_up:
            return self._fallback
        rejected_at = self._rejected.get(offer.version)
        if rejected_at is None or (offer.sequence > rejected_at and offer.manifest.pushed_again):
            return offer
        return self._fallback

    def _needs(self, wanted: Release, state: EngineState) -> bool:
        if state.serving != wanted.version or self._lost or self._mistrusted == wanted.version:
            return True
        if wanted.sha256 is not None and state.sha256 not in (None, wanted.sha256):
            self._note_mismatch(_other_bytes(wanted.version, wanted.sha256, state.sha256))
            return True
        # Sequence numbers only grow: the same version under a higher one was pushed again.
        return 0 <= self._sequence < wanted.sequence

    def _adopt(self, release: Release) -> None:
        """The engine has what it should have."""
        if self._loaded_release is not None:
            return
        self._loaded_release = release  # it was there before this agent
        if release.version != self._canary.trial:
            self._canary.loaded(release.version, exempt=True)
            self._fallback = release

    # --- swapping
    async def _swap(self, release: Release, state: EngineState) -> None:
        self._check_shape(release, state)
        before, died = self._snapshot, state.version == release.version and not state.loaded
        try:
            after, confirmed = await self._load(release)
        except SwapRefusedError:
            self._given_up.add(release.sequence)
            self._pending = None
            self._metrics.swap(self.url, "refused")
            raise
        except EngineError:
            self._metrics.swap(self.url, "failed")
            raise
        self._set_aside(before, after)
        self._known = Known(confirmed.serving, confirmed.swaps)
        self._snapshot, self._snapshot_at = _with_policy(after, confirmed), self._clock()
        self._took(release, state.serving, died=died)

    async def _load(self, release: Release) -> tuple[Snapshot | None, EngineState]:
        """Have the engine load what was downloaded and nothing else; what it counts and says afterwards.

        If it read other bytes, the files are downloaded again and loaded once more; if it does so again, they are not
        at fault, and it is asked again after a pause.
        """
        anew = False
        while True:
            verified = await self._verify(release, anew=anew)
            self._pending = release
            try:
                self._store(durable=True)
            except OSError as error:  # a full disk must not keep a drafter from its engine
                log.warning("%s: what is about to be swapped could not be written down: %s", self.url, error)
            answered = await self._engine.swap(release)
            after, confirmed = await self._scrape(), await self._engine.state()
            if confirmed.serving != release.version:
                raise EngineError(f"{self.url} accepted {release.version}, but says that {confirmed.serving} is loaded")
            wrong = {answered, confirmed.sha256} - {None, verified.sha256}
            if not wrong:
                self._mistrusted = None
                return after, confirmed
            last = anew or self._mistrusted == release.version
            self._mistrusted, self._pending = release.version, None
            fault = _other_bytes(release.version, verified.sha256, wrong.pop())
            self._note_mismatch(fault)
            if last:
                raise EngineError(f"{self.url}: {fault}; does it read the same disk as this agent?")
            anew = True

    async def _verify(self, release: Release, *, anew: bool) -> Release:
        """Make sure that the release's files are what was downloaded; `anew`: download them whatever they are."""
        if not anew:
            if await asyncio.to_thread(is_intact, release):
                return cached_release(release.manifest, release.path)
            self._note_mismatch(f"{release.version} in the cache is not what was downloaded; downloading it again")
        return await asyncio.to_thread(self._fetch, release.manifest, anew)

    def _note_mismatch(self, fault: str) -> None:
        self._metrics.error(self.url, "digest")
        log.error("%s: %s", self.url, fault)

    def _took(self, release: Release, before: str | None, *, died: bool = False) -> None:
        """The engine has loaded what we asked for; `before` is what it served until then."""
        back = release.version == self._canary.good
        outcome = "swapped"
        if back and before != release.version:
            outcome = "restored" if self._lost or died else "rolled_back"
        insisted = self._rejected.pop(release.version, None) is not None
        self._canary.loaded(release.version, exempt=insisted, replayed=release.manifest.replayed_alpha)
        self._shape = (release.manifest.config_fingerprint, release.manifest.d2t_sha256)
        self._loaded_release, self._pending = release, None
        self._sequence = max(self._sequence, release.sequence)
        if self._canary.trial is None:
            self._fallback = release
        self._lost = False
        self._metrics.swap(self.url, outcome)
        log.info("%s: %s %s (was %s)", self.url, outcome, release.version, before)

    def _check_shape(self, release: Release, state: EngineState) -> None:
        """Refuse what cannot fit the running process, before it is touched."""
        manifest = release.manifest
        expected = state.config_fingerprint or (self._shape[0] if self._shape else None)
        fault = None
        if state.takes != manifest.kind:
            fault = f"its kind is {manifest.kind}, the engine was started for {state.takes}"
        elif expected is not None and expected != manifest.config_fingerprint:
            fault = f"its configuration is {manifest.config_fingerprint}, the engine runs {expected}"
        elif self._shape is not None and self._shape[1] != manifest.d2t_sha256:
            fault = f"its draft vocabulary is {manifest.d2t_sha256[:12]}, the engine runs {self._shape[1][:12]}"
        if fault is not None:
            self._given_up.add(release.sequence)
            self._metrics.swap(self.url, "refused")
            raise SwapRefusedError(f"{release.version} cannot be swapped into {self.url}: {fault}; restart the engine")

    # --- remembering
    def _publish_metrics(self) -> None:
        self._metrics.loaded(self.url, self.loaded_version)
        self._metrics.unattributed(self.url, self.ledger.unattributed_rounds)
        if self.loaded_version is not None:
            self._metrics.alpha(self.url, self.loaded_version, self.ledger.version_counts(self.loaded_version).alpha)

    def _store(self, *, durable: bool = False) -> None:
        """Remember; `durable` for what must survive a power cut. Losing the rest loses counts only."""
        document = {
            "engine": self.url,
            "known": None if self._known is None else asdict(self._known),
            "snapshot": None if self._snapshot is None else asdict(self._snapshot),
            "sequence": self._sequence,
            "rejected": self._rejected,
            "fallback": _dump_release(self._fallback),
            "pending": _dump_release(self._pending),
            "mistrusted": self._mistrusted,
            "buckets": self.ledger.dump(),
            "canary": self._canary.dump(self._clock()),
            "verdicts": [[asdict(verdict), sequence] for verdict, sequence in self.verdicts],
        }
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._memory, json.dumps(document).encode(), durable=durable)

    def _recall(self) -> None:
        try:
            self._restore(json.loads(self._memory.read_text()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AgentError) as error:
            log.warning("%s: ignoring what an earlier agent left in %s: %r", self.url, self._memory, error)
            self.ledger = Ledger()

    def _restore(self, document: dict[str, Any]) -> None:
        self.ledger.restore(document["buckets"])
        known, snapshot = document["known"], document["snapshot"]
        rejected = {str(version): int(sequence) for version, sequence in document["rejected"].items()}
        self._snapshot = None if snapshot is None else Snapshot.load(snapshot)
        self._known = None if known is None else Known(**known)
        self._rejected = rejected
        self._canary.restore(document["canary"], self._clock())
        self.verdicts = [(Verdict(**verdict), int(sequence)) for verdict, sequence in document["verdicts"]]
        self._sequence = int(document["sequence"])
        # Files that are gone are downloaded again when they are needed.
        self._fallback = _load_release(document["fallback"])
        self._pending = _load_release(document.get("pending"))
        self._mistrusted = document.get("mistrusted")


def _other_bytes(version: str, expected: str | None, found: str | None) -> str:
    return f"{version} was loaded from other bytes than were downloaded: expected sha256 {expected}, got {found}"


def _dump_release(release: Release | None) -> dict[str, Any] | None:
    if release is None:
        return None
    gate = {"alpha_served": release.manifest.replayed_alpha}  # where `parse_manifest` looks for it
    return {"manifest": asdict(release.manifest) | {"gate": gate}, "path": str(release.path)}


def _load_release(document: dict[str, Any] | None) -> Release | None:
    if document is None:
        return None
    manifest = document["manifest"]
    return cached_release(parse_manifest(manifest, manifest["run"]), Path(document["path"]))


def _only_counted(state: EngineState, wanted: Release) -> bool:
    """Whether the engine drafts by a method of its own, and the release is no better one of the same kind."""
    return state.takes is None or (state.method is not None and state.takes != wanted.manifest.kind)


def _with_policy(snapshot: Snapshot | None, state: EngineState) -> Snapshot | None:
    """Engines tell the policy version in their metrics, or else in their state."""
    if snapshot is None or snapshot.policy_version is not None:
        return snapshot
    return replace(snapshot, policy_version=state.policy_version)
