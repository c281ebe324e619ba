"""What can go wrong between the swap agent, the service and an engine.

AgentError
├── ManifestError     the service's manifest breaks the contract; nothing was downloaded
├── DownloadError     the files could not be brought here; nothing was swapped
│   └── DigestError   they came, but are not what the manifest describes
├── ReportError       the service did not take a report; counts are cumulative, so nothing is lost
├── CheckpointError   they are what the manifest describes, but not a drafter that is safe to load
└── EngineError       the engine did not answer, or not usefully; worth another try
    ├── SwapRefusedError  the engine looked at the drafter and said no: the same drafter will be refused again
    └── MetricsError      its /metrics lacks a counter or holds nonsense
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of everything that the swap agent raises by itself."""


class ManifestError(AgentError):
    """The service's manifest breaks the contract."""


class DownloadError(AgentError):
    """A file could not be downloaded."""


class ReportError(AgentError):
    """The service did not take an acceptance report."""


class DigestError(DownloadError):
    """A file's bytes are not those that the manifest describes."""


class CheckpointError(AgentError):
    """The checkpoint must not be shown to an engine."""


class EngineError(AgentError):
    """The engine did not answer, or not usefully."""


class SwapRefusedError(EngineError):
    """The engine refused this drafter and changed nothing."""


class MetricsError(EngineError):
    """The engine's /metrics does not hold what is needed."""
