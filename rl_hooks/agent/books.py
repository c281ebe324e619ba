"""Which drafter an engine's rounds are credited to, and what its canary finds in them."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from rl_hooks.agent.canary import Canary, CanaryResult, CanaryRule
from rl_hooks.engines.counting.counters import ANOTHERS_DRAFTER, NO_VERSION, Counts, Ledger, Snapshot
from rl_hooks.engines.counting.step_times import StepSums
from rl_hooks.engines.protocol import EngineState

log = logging.getLogger("draftalign.agent")


class EngineBooks:
    """One engine's counts. `verdicts` are to be reported, each with the sequence of the offer that was judged."""

    def __init__(self, rule: CanaryRule) -> None:
        self.ledger = Ledger()
        self.step_times = StepSums()  # those of an earlier agent are not kept
        self.canary = Canary(rule)
        self.verdicts: list[tuple[CanaryResult, int]] = []

    def book(
        self,
        counts: Counts,
        state: EngineState,
        policy_version: int | None,
        mistrusted: str | None,
        now: float,
        anothers: str | None = None,
    ) -> CanaryResult | None:
        """Credit counts to what the engine serves, and to its trial. `anothers`: a version that is not of the run."""
        served = state.serving
        if state.version is None and served is not None:  # a method without a drafter
            self.ledger.book(served, policy_version, counts.with_rounds_without_drafts(), method=served)
            return None
        return self._credit(served, policy_version, counts, mistrusted, now, anothers)

    def book_exact(
        self,
        before: Snapshot | None,
        after: Snapshot,
        state: EngineState,
        seconds: float,
        now: float,
        mistrusted: str | None = None,
        anothers: str | None = None,
    ) -> CanaryResult | None:
        """Credit the counts of an engine that knows whose each round is; a drafter without a name gets none.

        The policy's own MTP module goes by its method. N-grams get none: their rounds without drafts are not counted.
        """
        method = None if state.takes is None else state.method
        earlier = {(version, policy): counts for version, policy, counts in (before and before.exact) or ()}
        verdict = None
        for version, policy, counts in after.exact or ():
            new = counts.since(earlier.get((version, policy), Counts()), seconds)
            if new.rounds <= 0:
                continue
            if version is None and method is not None:
                self.ledger.book(method, policy, new, method=method)
            else:
                verdict = self._credit(version, policy, new, mistrusted, now, anothers) or verdict
        idle = not any(counts.rounds for _, _, counts in after.exact or ())  # also rounds that are set aside are drafts
        if idle and not self.ledger.buckets() and state.version not in (None, NO_VERSION, mistrusted, anothers):
            self.ledger.book(str(state.version), after.policy_version, Counts())
        return verdict

    def _credit(
        self,
        version: str | None,
        policy_version: int | None,
        counts: Counts,
        mistrusted: str | None,
        now: float,
        anothers: str | None,
    ) -> CanaryResult | None:
        """Credit rounds to a version; to none where it has no name, or is not the version that it names."""
        if version is None or version in (NO_VERSION, mistrusted):
            self.ledger.set_aside(counts.rounds)
        elif version == anothers:
            self.ledger.book(version, policy_version, counts, method=ANOTHERS_DRAFTER)
        else:
            self.ledger.book(version, policy_version, counts)
            return self.canary.count(version, counts, now)
        return None

    def set_aside(self, before: Snapshot | None, after: Snapshot | None) -> None:
        """Count the rounds between two scrapes for no version: two drafters share them, for a swap fell between."""
        if before is not None and after is not None:
            self.ledger.set_aside(after.counts.rounds - before.counts.rounds)

    def dump(self, now: float) -> dict[str, Any]:
        """The state that the next agent needs, as JSON takes it."""
        return {
            "ledger_life": self.ledger.life,  # `Seen.dump` has the `life` of the engine's process
            "buckets": self.ledger.dump(),
            "canary": self.canary.dump(now),
            "verdicts": [[asdict(verdict), sequence] for verdict, sequence in self.verdicts],
        }

    @classmethod
    def restore(cls, rule: CanaryRule, document: dict[str, Any], now: float) -> EngineBooks:
        """Inverse of `dump`, which was called at `now`; raises one of `UNREADABLE` on anything else."""
        books = cls(rule)
        books.ledger.restore(document["buckets"], document["ledger_life"])
        books.canary.restore(document["canary"], now)
        books.verdicts = [(CanaryResult(**verdict), int(sequence)) for verdict, sequence in document["verdicts"]]
        return books
