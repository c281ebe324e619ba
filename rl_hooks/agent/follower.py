"""Keeps one engine on the drafter that the service offers, and counts what that drafter achieves there.

One `tick`: scrape the counters, ask what is loaded, book the difference, judge a running canary, and swap if another
release is wanted. What is loaded is what the engine answers. The agent's memory only shows whether that has changed.

Restart of the agent: `engines/<digest of the URL>.json` in the cache keeps counts and verdicts, so that cumulative
reports never go backwards and a rejected version stays rejected. A swap is written there before the engine is asked for
it, so the next agent judges the version even if this one dies during the swap.

Every load: the cached files are verified first. The engine gets their digests, and an engine that can compare them
loads no other bytes. Afterwards the digest in the engine's answer is compared. Files that differ from the download are
deleted, downloaded again, and loaded at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_hooks.agent.books import EngineBooks
from rl_hooks.agent.canary import CanaryResult, CanaryRule
from rl_hooks.agent.download import cached_release, in_thread, is_intact
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.agent.process import (
    UNREADABLE,
    Between,
    EngineProcess,
    LoadedVersion,
    ReleaseChoice,
    RivalClient,
    Seen,
    Since,
    between,
    dump_release,
    load_release,
    rejected_in,
)
from rl_hooks.durable import replace_file
from rl_hooks.engines.counting.counters import Counts, Ledger, Snapshot, VersionCounts
from rl_hooks.engines.protocol import Engine, EngineState
from rl_hooks.errors import AgentError, EngineError, MetricsError, OtherBytesError, SwapRefusedError
from rl_hooks.format.release import PLAIN_NAME, Release, VerifiedManifest

log = logging.getLogger("draftalign.agent")


class EngineFollower:
    """One engine's loop body. `tick` raises EngineError when the engine cannot be reached.

    `fetch(manifest, again)` downloads a version into the cache, with `again` even if it is there. It runs in a thread.
    """

    def __init__(
        self,
        engine: Engine,
        rule: CanaryRule,
        metrics: AgentMetrics,
        cache: Path,
        fetch: Callable[[VerifiedManifest, bool], Release],
    ) -> None:
        self.url = engine.url
        self.books = EngineBooks(rule)
        self.seen = Seen(time.monotonic())
        self._metrics_error = ""  # the last error of the counters, which is logged once
        self._last_fault = ""  # the last fault of a version's files; empty once a version was loaded
        self.withheld = ""  # why the engine does not have the newest offer; empty if it has
        self._choice = ReleaseChoice()
        self._process = EngineProcess()
        self._engine = engine
        self._metrics = metrics
        self._fetch = fetch
        self._memory = cache / "engines" / f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.json"
        self._recall()

    @property
    def sequence(self) -> int:
        """Sequence number of the newest offer that was loaded, by this agent or an earlier one; -1: none was."""
        return self._choice.sequence

    @property
    def ledger(self) -> Ledger:
        """The engine's rounds, by the version that made them."""
        return self.books.ledger

    @property
    def loaded_version(self) -> str | None:
        """The version that the engine served at the last tick."""
        return None if self.seen.known is None else self.seen.known.version

    def versions_in_use(self) -> set[str]:
        """Versions whose files must stay in the cache."""
        releases = (self._choice.fallback, self._process.loaded, self._process.pending)
        return {release.version for release in releases if release is not None}

    async def tick(self, offer: Release | None) -> bool:
        """Bring the engine and the books up to date. Returns whether a swap took place."""
        snapshot = await self._scrape()
        # After the scrape: if nothing has changed since the last tick, one version made all rounds between.
        state = await self._engine.state()
        self._metrics.last_contact.labels(self.url).set_to_current_time()
        verdict = self._account(snapshot, state)
        if verdict is not None:
            self._judge(verdict)
        given_up, contest = self._process.given_up, self._process.contest
        serving = None if self._process.replaced or not state.loaded else state.version
        wanted = self._choice.wanted(offer, serving, given_up)
        try:
            if wanted is None or wanted.sequence in given_up or _only_counted(state, wanted):
                return False
            if contest.lost:
                if state.version != wanted.version:
                    return False
                self._process.contest = RivalClient()  # the other client has gone
                self.ledger.begin_life()
                self._metrics.contested.labels(self.url).set(0)
            needed = self._needs(wanted, state)
            if needed:
                await self._swap(wanted, state)
            else:
                self._adopt(wanted)
            if wanted is offer:
                self._choice.sequence = offer.sequence
                self.withheld = ""
        except AgentError as error:  # the engine's, or of files that have to be downloaded again
            self.withheld = str(error)
            raise
        else:
            return needed
        finally:
            self._publish_metrics()
            self._store()

    def is_loaded(self, bucket: VersionCounts) -> bool:
        """Whether counts may still be added to this bucket soon."""
        policy = None if self.seen.snapshot is None else self.seen.snapshot.policy_version
        now = (self.ledger.life, self.loaded_version, policy)
        return (bucket.life, bucket.drafter_version, bucket.policy_version) == now

    # --- counting
    async def _scrape(self) -> Snapshot | None:
        try:
            return await self._engine.snapshot()
        except MetricsError as error:
            # An engine without counters still gets its drafters.
            self._metrics.errors.labels(self.url, "metrics").inc()
            log.log(logging.DEBUG if str(error) == self._metrics_error else logging.ERROR, "%s: %s", self.url, error)
            self._metrics_error = str(error)
            return None

    def _account(self, snapshot: Snapshot | None, state: EngineState) -> CanaryResult | None:
        since = self.seen.look(snapshot, state, time.monotonic())
        pending, known = self._process.pending, LoadedVersion(state.serving, state.swaps)
        repeated = self._process.repeated(since.known, known)
        found = between(since, known, None if pending is None else pending.version, repeated=repeated)
        if since.restarted:
            self._forget_process(state, since.known)
        elif found is Between.OTHER_SWAP:
            self._contend(state)
        verdict = self._book(found, since, state)
        self._keep_good()
        if pending is not None and found is Between.OWN_SWAP:
            self._took(pending, since.version)
        return verdict

    def _book(self, found: Between, since: Since, state: EngineState) -> CanaryResult | None:
        before, after, mistrusted = since.snapshot, self.seen.snapshot, self._process.mistrusted
        if after is None:
            return None
        if after.exact is not None:  # the engine itself knows which version made each round
            earlier = None if since.restarted else before
            now, anothers = time.monotonic(), self._anothers(state)
            return self.books.book_exact(earlier, after, state, since.seconds, now, mistrusted, anothers)
        if since.restarted:
            before = Snapshot(Counts())
        if before is None:
            return None
        if found in (Between.SAME, Between.RESTART):
            counts, now = after.counts.since(before.counts, since.seconds), time.monotonic()
            if state.version is not None:  # drafts by n-grams or MTP take another time than ours
                self.books.step_times.add(before, after)
            return self.books.book(counts, state, after.policy_version, mistrusted, now, self._anothers(state))
        if found is Between.OTHER_SWAP:
            level = logging.DEBUG if self._process.contest.lost else logging.WARNING
            text = "%s: another client changed the drafter from %s to %s"
            log.log(level, text, self.url, since.known, self.seen.known)
            self.books.canary.interrupted()
        self.books.set_aside(before, after)
        return None

    def _forget_process(self, state: EngineState, known: LoadedVersion | None) -> None:
        was = None if known is None else known.version
        log.warning("%s restarted: it had %s, now has %s after %d swaps", self.url, was, state.serving, state.swaps)
        self.books.canary.interrupted(restarted=True)
        self.ledger.begin_life()
        self._process = EngineProcess(replaced=True)
        self._metrics.contested.labels(self.url).set(0)

    def _anothers(self, state: EngineState) -> str | None:
        """The version that an engine which was given up has instead of the run's; None for any other engine."""
        return state.version if self._process.contest.lost else None

    def _contend(self, state: EngineState) -> None:
        """Note that another client changed the drafter. If it undoes swaps again and again, give the engine up."""
        contest, ours = self._process.contest, self._process.loaded
        if contest.lost or ours is None or state.version in (None, ours.version):
            return
        contest.undone(time.monotonic())
        if not contest.lost:
            return
        self.ledger.begin_life()  # counts of a version from now on are apart from those before
        run, root = ours.manifest.run, self._memory.parent.parent.parent
        named = PLAIN_NAME.fullmatch(str(state.version))  # an engine may answer anything, a pattern too
        others = sorted(path.parent.name for path in root.glob(f"*/{state.version}")) if named else []
        whose = " or ".join(f"run {other!r}" for other in others if other != run)
        whose = whose or (f"run {run!r} too" if others else "a run that is not in this cache")
        self.withheld = (
            f"{contest.turns} times another client undid a swap of run {run!r} at once; {state.version}, which it puts "
            f"there, is of {whose}. One of the two must leave: end that agent, then restart this one, or the engine"
        )
        self._metrics.contested.labels(self.url).set(1)
        log.error("%s is given up, and is only counted from now on: %s", self.url, self.withheld)

    def _is_ours(self, version: str | None) -> bool:
        """Whether a version is one of the run's, as far as the cache knows."""
        if version is None:
            return True
        return PLAIN_NAME.fullmatch(version) is not None and (self._memory.parent.parent / version).is_dir()

    def _keep_good(self) -> None:
        """Keep the canary's good version as the fallback, also where it was accepted without a trial."""
        loaded = self._process.loaded
        if loaded is not None and loaded.version == self.books.canary.good:
            self._choice.fallback = loaded

    # --- deciding
    def _judge(self, verdict: CanaryResult) -> None:
        self.books.verdicts.append((verdict, self._choice.judged(verdict, self._process.loaded)))
        if not verdict.passed:
            self.withheld = (
                f"its canary swapped {verdict.version} back: α {verdict.alpha:.2f} over {verdict.rounds} rounds, "
                f"{verdict.previous_alpha:.2f} with {verdict.previous}"
            )
            log.error(
                "%s: canary of %s failed: α %.3f over %d rounds, %.3f with %s; swapping back",
                *(self.url, verdict.version, verdict.alpha, verdict.rounds, verdict.previous_alpha, verdict.previous),
            )

    def _needs(self, wanted: Release, state: EngineState) -> bool:
        process = self._process
        if state.serving != wanted.version or process.replaced or process.mistrusted == wanted.version:
            return True
        if wanted.sha256 is not None and state.sha256 not in (None, wanted.sha256):
            self._note_mismatch(_other_bytes(wanted.version, wanted.sha256, state.sha256))
            return True
        # The same version under a higher sequence number was pushed again.
        return 0 <= self.sequence < wanted.sequence

    def _adopt(self, release: Release) -> None:
        """Take note of a wanted release that the engine already has."""
        if self._process.loaded is not None:
            return
        self._process.loaded = release  # it was loaded before this agent began, and no memory names it
        if release.version != self.books.canary.trial:
            self.books.canary.loaded(release.version, exempt=True)
            self._choice.fallback = release

    # --- swapping
    async def _swap(self, release: Release, state: EngineState) -> None:
        if (fault := self._process.misfit(release, state)) is not None:
            self._give_up(release)
            raise SwapRefusedError(f"{release.version} cannot be swapped into {self.url}: {fault}")
        before, died = self.seen.snapshot, state.version == release.version and not state.loaded
        try:
            after, confirmed = await self._load(release)
        except SwapRefusedError:
            self._give_up(release)
            self._process.did_nothing()
            raise
        except EngineError:
            self._metrics.swaps.labels(self.url, "failed").inc()
            raise
        since = self.seen.look(after, confirmed, time.monotonic())
        if since.restarted:  # the engine did, before it loaded the drafter
            self.ledger.begin_life()
        self._process.repeated(since.known, self.seen.known)
        if after is not None and after.exact is not None:
            verdict = self.books.book_exact(before, after, state, since.seconds, time.monotonic())
            self._keep_good()
            if verdict is not None:
                self._judge(verdict)
        else:
            self.books.set_aside(before, after)
        self._took(release, state.serving, died=died)

    def _give_up(self, release: Release) -> None:
        self._process.given_up.add(release.sequence)
        self._metrics.swaps.labels(self.url, "refused").inc()

    async def _load(self, release: Release) -> tuple[Snapshot | None, EngineState]:
        """Have the engine load the downloaded bytes and no others. Returns its counters and state afterwards.

        If the engine read other bytes, the files are downloaded again and loaded once more. If it reads other bytes
        again, the files are not the cause: EngineError, and the next tick tries again.
        """
        again = False
        while True:
            verified = await self._verify(release, again=again)
            self._process.asks(release)
            try:
                self._store(durable=True)
            except OSError as error:  # a full disk must not keep a drafter from its engine
                log.warning("%s: the swap that begins now could not be written down: %s", self.url, error)
            try:
                answered = await self._engine.swap(release)
            except OtherBytesError as error:  # nothing was loaded
                self._process.did_nothing()
                self._note_mismatch(str(error))
                if self._process.fetched_again == release.version:
                    raise
                self._process.fetched_again, again = release.version, True
                continue
            after, confirmed = await self._scrape(), await self._engine.state()
            if confirmed.serving != release.version:
                raise EngineError(f"{self.url} accepted {release.version}, but says that {confirmed.serving} is loaded")
            wrong = {answered, confirmed.sha256} - {None, verified.sha256}
            if not wrong:
                self._process.mistrusted = self._process.fetched_again = None
                return after, confirmed
            last = self._process.mistrusted == release.version
            self._process.mistrusted, self._process.pending = release.version, None
            fault = _other_bytes(release.version, verified.sha256, wrong.pop())
            self._note_mismatch(fault)
            if last:
                raise EngineError(f"{self.url}: {fault}; does it read the same disk as this agent?")
            again = True

    async def _verify(self, release: Release, *, again: bool) -> Release:
        """Make sure that the release's files are as downloaded. `again`: download them in any case."""
        if not again:
            if await in_thread(is_intact, release):
                return cached_release(release.manifest, release.path)
            if release.path.exists():
                self._note_mismatch(f"{release.version} in the cache is not what was downloaded; downloading it again")
            else:
                self._say(logging.INFO, f"{release.version} is not in the cache any more; downloading it again")
        return await in_thread(self._fetch, release.manifest, again)

    def _note_mismatch(self, fault: str) -> None:
        self._metrics.errors.labels(self.url, "digest").inc()
        self._say(logging.ERROR, fault)

    def _say(self, level: int, fault: str) -> None:
        """Log once what is wrong with a version's files, which are tried again at every tick."""
        log.log(logging.DEBUG if fault == self._last_fault else level, "%s: %s", self.url, fault)
        self._last_fault = fault

    def _took(self, release: Release, before: str | None, *, died: bool = False) -> None:
        """Take note that the engine has loaded our release. `before`: the version that it served until then."""
        canary, outcome = self.books.canary, "swapped"
        if release.version == canary.good and before != release.version:
            if self._process.replaced or died:
                outcome = "restored"
            elif before in self._choice.rejected:  # else another client's swap is undone, or a person went back
                outcome = "rolled_back"
        insisted = self._choice.rejected.pop(release.version, None) is not None
        canary.loaded(release.version, exempt=insisted, replayed=release.manifest.replayed_alpha)
        self._process.contest.took(time.monotonic(), others=not self._is_ours(before))
        self._process.took(release)
        self._last_fault = ""
        self._choice.sequence = max(self._choice.sequence, release.sequence)
        if canary.trial is None:
            self._choice.fallback = release
        self._metrics.swaps.labels(self.url, outcome).inc()
        log.info("%s: %s %s (before: %s)", self.url, outcome, release.version, before or "one without a version")

    # --- remembering
    def _publish_metrics(self) -> None:
        self._metrics.loaded(self.url, self.loaded_version)
        self._metrics.unattributed.labels(self.url).set(self.ledger.unattributed_rounds)
        if self.loaded_version is not None:
            self._metrics.alpha(self.url, self.loaded_version, self.ledger.version_counts(self.loaded_version).alpha)

    def _store(self, *, durable: bool = False) -> None:
        """Write the memory. `durable`: it must survive a power cut; else a cut costs counts only."""
        document = {
            "engine": self.url,
            **self.seen.dump(),
            **self._choice.dump(),
            "loaded": dump_release(self._process.loaded),
            "pending": dump_release(self._process.pending),
            "mistrusted": self._process.mistrusted,
            "withheld": self.withheld,
            **self.books.dump(time.monotonic()),
        }
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._memory, json.dumps(document).encode(), durable=durable)

    def forget(self) -> None:
        """Delete the memory, because the engine ends and its name is never used again."""
        self._memory.unlink(missing_ok=True)

    def _recall(self) -> None:
        """Go on from an earlier agent's memory. If it cannot be read, only the rejected versions are kept."""
        document: object = None
        try:
            self._restore(document := json.loads(self._memory.read_text()))
        except FileNotFoundError:
            pass
        except (OSError, *UNREADABLE) as error:
            log.warning("%s: ignoring what an earlier agent left in %s: %r", self.url, self._memory, error)
            self._choice = ReleaseChoice(rejected=rejected_in(document) if isinstance(document, dict) else {})

    def _restore(self, document: dict[str, Any]) -> None:
        now, away = time.monotonic(), max(0.0, time.time() - self._memory.stat().st_mtime)
        choice, seen = ReleaseChoice.restore(document), Seen.restore(document, now)
        books = EngineBooks.restore(self.books.canary.rule, document, now - away)
        # "loaded" was not written before 30 November 2026.
        loaded, pending = load_release(document.get("loaded")), load_release(document["pending"])
        process = EngineProcess(loaded=loaded, pending=pending, mistrusted=document["mistrusted"])
        self.withheld = str(document["withheld"])
        self._choice, self.seen, self.books, self._process = choice, seen, books, process


def _other_bytes(version: str, expected: str | None, found: str | None) -> str:
    return f"{version} was loaded from other bytes than were downloaded: expected sha256 {expected}, got {found}"


def _only_counted(state: EngineState, wanted: Release) -> bool:
    """Whether the engine drafts by a method of its own that this release cannot replace."""
    return state.takes is None or (state.method is not None and state.takes != wanted.manifest.kind)
