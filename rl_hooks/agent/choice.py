"""Which release an engine should have: the offer, or the last good one where the offer was found bad there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rl_hooks.agent.canary import CanaryResult
from rl_hooks.agent.download import cached_release
from rl_hooks.errors import AgentError
from rl_hooks.release import Release, parse_manifest

#: What a memory raises that another release wrote, or that is damaged.
UNREADABLE: Final = (AgentError, KeyError, TypeError, ValueError, AttributeError)


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
        if verdict.passed:
            self.fallback = loaded
        else:
            self.rejected[verdict.version] = sequence
        return sequence

    def wanted(self, offer: Release | None, serving: str | None, given_up: Collection[int]) -> Release | None:
        """The release for an engine that serves this version now; None: it keeps what it has."""
        if offer is None:  # the service was not reached yet; a failed canary is swapped back without it
            return self.fallback if serving in self.rejected else None
        if offer.sequence in given_up:  # what it serves stays, on trial perhaps
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
