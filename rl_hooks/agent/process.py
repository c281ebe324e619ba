"""Facts about an engine: those of the last tick, those of its present process, and which release it should have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from rl_hooks.agent.canary import CanaryResult
from rl_hooks.agent.download import cached_release
from rl_hooks.engines.counting.counters import Snapshot
from rl_hooks.engines.protocol import EngineState
from rl_hooks.errors import AgentError
from rl_hooks.format.release import Release, VerifiedManifest, parse_manifest

#: A swap that another client undoes within this time is a turn of a contest.
_TURN_SECONDS: Final = 300.0
#: Turns after which the agent gives the engine up. An agent that found another's drafter there gives up sooner.
_TURNS_YOUNGER: Final = 3
_TURNS: Final = 5

#: Raised by reading a memory that is damaged, or that another release of draftalign wrote.
UNREADABLE: Final = (AgentError, KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The drafter that the engine answered is loaded."""

    version: str | None
    swaps: int

    def __str__(self) -> str:
        return f"{self.version or 'one without a name'} (after {self.swaps} swaps)"


@dataclass(frozen=True, slots=True)
class Since:
    """The time from the tick before to this one."""

    known: LoadedVersion | None  # at the tick before
    snapshot: Snapshot | None  # at the tick before
    seconds: float
    restarted: bool

    @property
    def version(self) -> str | None:
        """What was loaded at the tick before."""
        return None if self.known is None else self.known.version


class Between(Enum):
    """What happened between two ticks. It decides to which drafter the rounds between them belong."""

    SAME = "same"  # one drafter: any swaps were the agent's own, and loaded the version that was there
    OWN_SWAP = "own swap"  # the agent's request was done, but its answer was lost or the agent died before it came
    OTHER_SWAP = "other swap"  # by another client, unless this is the first tick
    RESTART = "restart"  # without a swap since: one drafter since the start
    RESTART_AND_SWAP = "restart and swap"


def between(since: Since, now: LoadedVersion, pending: str | None, *, repeated: bool) -> Between:
    """What happened since. `now`: what is loaded. `pending`: the version that the agent has asked for.

    `repeated`: the result of `EngineProcess.repeated`.
    """
    if since.restarted:
        return Between.RESTART if now.swaps == 0 else Between.RESTART_AND_SWAP
    if pending is not None and now.version == pending and since.known != now:
        return Between.OWN_SWAP
    return Between.SAME if repeated or since.known == now else Between.OTHER_SWAP


@dataclass(slots=True)
class Seen:
    """The engine as the last tick left it."""

    at: float
    known: LoadedVersion | None = None
    snapshot: Snapshot | None = None
    #: Tokens drafted in a round, and `greedy` or `probabilistic`; None where the engine does not answer it.
    depth: int | None = None
    drafting: str | None = None
    #: The engine's newest mark of its process.
    life: str | None = None

    def look(self, snapshot: Snapshot | None, state: EngineState, now: float) -> Since:
        """Take in a scrape and the state that was read after it; returns what happened since the tick before."""
        # Some engines have the policy version in their metrics, others in their state.
        if snapshot is not None and snapshot.policy_version is None:
            snapshot = replace(snapshot, policy_version=state.policy_version)
        known, before = self.known, self.snapshot
        life = state.life or (None if snapshot is None else snapshot.life)
        if life is not None and self.life is not None:
            other = life != self.life
        else:
            # There are no two marks to compare. Counters that fell show that it is another process, unless by now the
            # new counts exceed the old ones. An engine with exact counts is in the agent's
            # own process: the two end together.
            exact = snapshot is None or snapshot.exact is not None
            other = before is not None and snapshot is not None and not exact and snapshot.has_fallen(before)
        since = Since(known, before, now - self.at, other or (known is not None and state.swaps < known.swaps))
        self.life = life or self.life
        self.at, self.known, self.snapshot = now, LoadedVersion(state.serving, state.swaps), snapshot
        self.depth, self.drafting = state.depth, state.drafting
        return since

    def dump(self) -> dict[str, Any]:
        """The state that the next agent needs, as JSON takes it."""
        return {
            "known": None if self.known is None else asdict(self.known),
            "snapshot": None if self.snapshot is None else asdict(self.snapshot),
            "life": self.life,
        }

    @classmethod
    def restore(cls, document: dict[str, Any], now: float) -> Seen:
        """Inverse of `dump`."""
        known, snapshot = document["known"], document["snapshot"]
        return cls(
            now,
            None if known is None else LoadedVersion(**known),
            None if snapshot is None else Snapshot.load(snapshot),
            life=document["life"],
        )


@dataclass(slots=True)
class RivalClient:
    """Another client that undoes the agent's swaps, such as an agent of another run.

    Neither would stop by itself. The first one to give up leaves the engine to the other. Their limits differ, so that
    they do not both give up.
    """

    turns: int = 0
    younger: bool = False
    _took_at: float | None = None

    @property
    def lost(self) -> bool:
        """Whether the engine is given up."""
        return self.turns >= (_TURNS_YOUNGER if self.younger else _TURNS)

    def took(self, now: float, *, others: bool) -> None:
        """Note a swap by the agent. `others`: it replaced a drafter that is not of the agent's run."""
        if self._took_at is None:
            self.younger = others
        self._took_at = now

    def undone(self, now: float) -> None:
        """Note that another client has replaced the agent's drafter."""
        soon = self._took_at is not None and now - self._took_at <= _TURN_SECONDS
        self.turns = self.turns + 1 if soon else 0


@dataclass(slots=True)
class EngineProcess:
    """Facts about one process of the engine. A restarted engine gets a new object."""

    #: The engine was restarted, and so lost the drafter that was swapped into it.
    replaced: bool = False
    loaded: Release | None = None
    #: The engine was asked to load this release, and has not been seen with it yet.
    pending: Release | None = None
    #: Version for which the engine read other bytes than were verified.
    mistrusted: str | None = None
    #: Version that was downloaded again because the engine found other bytes of it and loaded nothing.
    fetched_again: str | None = None
    #: Sequences that the engine refused for good.
    given_up: set[int] = field(default_factory=set)
    contest: RivalClient = field(default_factory=RivalClient)
    #: Requests for `_asked_for` for which no swap was seen yet: the engine may still be working on them.
    unseen_swaps: int = 0
    _asked_for: str | None = None
    _shape: tuple[str, str] | None = None  # (config fingerprint, d2t digest) of drafters that fit

    def __post_init__(self) -> None:
        if self.pending is not None:  # the agent before this one asked for it
            self._asked_for, self.unseen_swaps = self.pending.version, 1

    def asks(self, release: Release) -> None:
        """Note that the engine is asked to load the release."""
        if release.version != self._asked_for:
            self._asked_for, self.unseen_swaps = release.version, 0
        self.pending, self.unseen_swaps = release, self.unseen_swaps + 1

    def did_nothing(self) -> None:
        """Note the engine's answer that it did not load the release."""
        self.pending, self.unseen_swaps = None, self.unseen_swaps - 1

    def repeated(self, before: LoadedVersion | None, now: LoadedVersion | None) -> bool:
        """Whether the swaps between two ticks are all the agent's own, and left the version as it was.

        While the engine is busy, the answer to a request may be lost. The agent asks again, and the engine then does
        both requests: the second swap loads the same version again.
        """
        if before is None or now is None or now.version != self._asked_for:
            return False
        swaps, asked = now.swaps - before.swaps, self.unseen_swaps
        self.unseen_swaps = max(0, asked - swaps)
        return before.version == now.version and swaps <= asked

    def took(self, release: Release) -> None:
        """Note that the engine has loaded the release that it was asked for."""
        self._shape = (release.manifest.config_fingerprint, release.manifest.d2t_sha256)
        self.loaded, self.pending, self.replaced = release, None, False

    def misfit(self, release: Release, state: EngineState) -> str | None:
        """Why the release cannot be loaded into this process; None if it can."""
        manifest, (taken, vocabulary) = release.manifest, self._shape or (None, None)
        if state.takes != manifest.kind:
            return f"its kind is {manifest.kind}, the engine was started for {state.takes}; restart the engine"
        fits = (state.config_fingerprint or taken) in (None, manifest.config_fingerprint)
        if fits and vocabulary in (None, manifest.d2t_sha256):
            return None
        remedy = "Restart the engine"
        if manifest.kind == "eagle3":
            remedy = (
                f"Start the engine with one of this run: `draftalign download DIR --run {manifest.run}`, then DIR as "
                "the drafter in its speculative configuration"
            )
        return (
            f"it has {self._unlike(manifest, state)} than the drafter that the engine was started with, which an "
            f"engine cannot change. {remedy}"
        )

    def _unlike(self, manifest: VerifiedManifest, state: EngineState) -> str:
        """How a drafter differs, in words, from the engine's in what an engine cannot change."""
        vocabulary, other = state.d2t_sha256 or (self._shape and self._shape[1]), []
        if vocabulary not in (None, manifest.d2t_sha256):
            other.append("another draft vocabulary")
        if state.aux_layers and manifest.aux_layers and state.aux_layers != manifest.aux_layers:
            other.append(f"other layers ({_listed(manifest.aux_layers)}; the engine's: {_listed(state.aux_layers)})")
        if not other:
            other.append("other sizes" if vocabulary else "another draft vocabulary, other sizes or other layers")
        return " and ".join(other)


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


@dataclass(slots=True)
class ReleaseChoice:
    """Which offers one engine has loaded and rejected."""

    #: Of the newest offer that was loaded, by an earlier agent perhaps; -1 before the first.
    sequence: int = -1
    #: The release of the canary's good version.
    fallback: Release | None = None
    #: Version -> sequence at which its canary failed.
    rejected: dict[str, int] = field(default_factory=dict)

    def judged(self, verdict: CanaryResult, loaded: Release | None) -> int:
        """Take in the canary's verdict on the loaded release; returns the sequence that it was offered with."""
        sequence = self.sequence if loaded is None else loaded.sequence
        if verdict.passed:  # None: it is not known, by a memory that an older release wrote
            self.fallback = loaded or self.fallback
        else:
            self.rejected[verdict.version] = sequence
        return sequence

    def wanted(self, offer: Release | None, serving: str | None, given_up: Collection[int]) -> Release | None:
        """The release for an engine that serves this version now; None: it keeps what it has.

        Without an offer, because the service was not reached yet, or with one that the engine refused, what it serves
        stays, on trial perhaps. An engine that serves none, or a rejected one, gets the fallback.
        """
        if offer is None or offer.sequence in given_up:
            return self.fallback if serving is None or serving in self.rejected else None
        rejected_at = self.rejected.get(offer.version)
        if rejected_at is None or (offer.sequence > rejected_at and offer.manifest.override_canary):
            return offer
        return self.fallback

    def dump(self) -> dict[str, Any]:
        """The state that the next agent needs, as JSON takes it."""
        return {"sequence": self.sequence, "rejected": self.rejected, "fallback": dump_release(self.fallback)}

    @classmethod
    def restore(cls, document: dict[str, Any]) -> ReleaseChoice:
        """Inverse of `dump`; raises one of `UNREADABLE` on anything else.

        Files that are gone are downloaded again when they are needed. A rejected version stays rejected even without a
        version that the engine could go back to.
        """
        return cls(int(document["sequence"]), load_release(document["fallback"]), rejected_in(document))


def rejected_in(document: dict[str, Any]) -> dict[str, int]:
    """The rejected versions of a memory, and at which sequence: also of one that cannot be read otherwise."""
    found = document.get("rejected")
    return {str(name): at for name, at in found.items() if type(at) is int} if isinstance(found, dict) else {}


def dump_release(release: Release | None) -> dict[str, Any] | None:
    """A release as JSON takes it."""
    if release is None:
        return None
    gate = {"alpha_served": release.manifest.replayed_alpha}  # where `parse_manifest` looks for it
    return {"manifest": asdict(release.manifest) | {"gate": gate}, "path": str(release.path)}


def load_release(document: dict[str, Any] | None) -> Release | None:
    """Inverse of `dump_release`."""
    if document is None:
        return None
    manifest = document["manifest"]
    return cached_release(parse_manifest(manifest, manifest["run"]), Path(document["path"]))
