"""The swap agent's own Prometheus metrics. They are served on loopback unless told otherwise."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

#: How many of the newest versions of an engine are label values: their number is bounded.
MAX_VERSIONS: Final = 10


class AgentMetrics:
    """One registry per agent, so that several agents fit in one process (and in one test run)."""

    def __init__(self, run: str = "default") -> None:
        """`run`: the one whose drafters the engines follow."""
        self._run = run
        self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        text = "1 for the drafter version that the engine has loaded."
        self._info = gauge("draftalign_agent_drafter_info", text, ["run", "engine", "version"])
        text = "Swaps by outcome: swapped, restored (after an engine restart), rolled_back, refused, failed."
        self.swaps = counter("draftalign_agent_swaps", text, ["engine", "outcome"])
        text = "Acceptance length of one drafter version in one engine, bonus token included (last 10 versions)."
        self._alpha = gauge("draftalign_agent_alpha", text, ["engine", "drafter_version"])
        text = "Unix time of the last useful answer of the service or of an engine."
        self.last_contact = gauge("draftalign_agent_last_contact_timestamp_seconds", text, ["peer"])
        self.errors = counter("draftalign_agent_errors", "Failures by peer and kind.", ["peer", "kind"])
        text = "Rounds around a swap or restart, which belong to no single drafter version."
        self.unattributed = gauge("draftalign_agent_unattributed_rounds", text, ["engine"])
        text = "1 for an engine that was given up to another client, which undid every swap."
        self.contested = gauge("draftalign_agent_contested", text, ["engine"])
        self._versions: dict[str, OrderedDict[str, None]] = {}
        self._loaded: dict[str, str] = {}

    def loaded(self, engine: str, version: str | None) -> None:
        """Set the version that `engine` has loaded (None: no drafter, or one without a name)."""
        previous = self._loaded.pop(engine, None)
        if previous is not None and previous != version:
            # Inside a SGLang that shows metrics, labels are not removed.
            self._info.labels(self._run, engine, previous).set(0)
            self._info.remove(self._run, engine, previous)
        if version is not None:
            self._loaded[engine] = version
            self._info.labels(self._run, engine, version).set(1)

    def alpha(self, engine: str, version: str, alpha: float) -> None:
        """Set α of a version, and forget the engine's oldest version beyond the bound."""
        if math.isnan(alpha):
            return
        versions = self._versions.setdefault(engine, OrderedDict())
        versions[version] = None
        versions.move_to_end(version)
        while len(versions) > MAX_VERSIONS:
            self._alpha.remove(engine, versions.popitem(last=False)[0])
        self._alpha.labels(engine, version).set(alpha)
