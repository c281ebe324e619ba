"""The swap agent's own Prometheus metrics. They are served on loopback unless told otherwise."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

#: Only so many of the newest versions of an engine are label values: their number is bounded.
MAX_VERSIONS: Final = 10


class AgentMetrics:
    """One registry per agent, so that several agents fit in one process (and in one test run)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._info = Gauge(
            "draftalign_agent_drafter_info",
            "1 for the drafter version that the engine has loaded.",
            ["engine", "version"],
            registry=self.registry,
        )
        self.swaps = Counter(
            "draftalign_agent_swaps",
            "Swaps by outcome: swapped, restored (after an engine restart), rolled_back, refused, failed.",
            ["engine", "outcome"],
            registry=self.registry,
        )
        self._alpha = Gauge(
            "draftalign_agent_alpha",
            "Acceptance length of one drafter version in one engine, bonus token included (last 10 versions).",
            ["engine", "drafter_version"],
            registry=self.registry,
        )
        self.last_contact = Gauge(
            "draftalign_agent_last_contact_timestamp_seconds",
            "Unix time of the last useful answer of the service or of an engine.",
            ["peer"],
            registry=self.registry,
        )
        self.errors = Counter(
            "draftalign_agent_errors", "Failures by peer and kind.", ["peer", "kind"], registry=self.registry
        )
        self.unattributed = Gauge(
            "draftalign_agent_unattributed_rounds",
            "Rounds around a swap or restart, which belong to no single drafter version.",
            ["engine"],
            registry=self.registry,
        )
        self.contested = Gauge(
            "draftalign_agent_contested",
            "1 for an engine that was given up to another client, which undid every swap.",
            ["engine"],
            registry=self.registry,
        )
        self._versions: dict[str, OrderedDict[str, None]] = {}
        self._loaded: dict[str, str] = {}

    def loaded(self, engine: str, version: str | None) -> None:
        """Set the version that `engine` has loaded (None: no drafter, or one without a name)."""
        previous = self._loaded.pop(engine, None)
        if previous is not None and previous != version:
            self._info.remove(engine, previous)
        if version is not None:
            self._loaded[engine] = version
            self._info.labels(engine, version).set(1)

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


class MetricsServer:
    """Serves an agent's metrics at http://host:port/metrics until closed; port 0 takes a free one."""

    def __init__(self, metrics: AgentMetrics, port: int, host: str = "127.0.0.1") -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=metrics.registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
