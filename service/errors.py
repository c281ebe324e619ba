"""Errors of the service.

`ObjectStoreError` is an OSError instead: what waits for a full disk waits for it too.

A broken rollout file is `rl_hooks.wire.WireError`. The HTTP layer turns all of them into problem documents.
"""

from __future__ import annotations

from pathlib import Path


class ServiceError(Exception):
    """Base of everything that the service raises on purpose."""


class ConfigurationError(ServiceError):
    """A setting, or the machine, does not allow what was asked for."""


class RunNotFound(ServiceError):  # noqa: N818 - reads as what happened
    """No such run has been registered."""


class RunConflict(ServiceError):  # noqa: N818
    """The run exists with another target."""


class RunWithdrawn(ServiceError):  # noqa: N818
    """The run is being deleted; its name is free once that has ended."""


class RunClosed(ServiceError):  # noqa: N818
    """A person has closed the run for what was sent; nothing of it was kept."""


class RunDamaged(ServiceError):  # noqa: N818
    """A file of the run on the service's disk is not what was written, or is gone."""

    def __init__(self, run: str, path: Path, why: object) -> None:
        said = " ".join(str(why).partition("For further information")[0].split())[:300]
        super().__init__(f"{path.name} of run {run!r} is damaged: {said}; put a copy of it back, or DELETE /runs/{run}")


class BlobDamaged(ServiceError):  # noqa: N818
    """A rollout file on the service's disk has not the bytes that were uploaded."""


class TooManyReporters(ServiceError):  # noqa: N818
    """A run has as many reporters as it may, and none of them was silent for long; nothing was counted."""


class EndedLife(ServiceError):  # noqa: N818
    """Counts of a life that another one of the same reporter has followed; nothing was counted."""


class VersionNotFound(ServiceError):  # noqa: N818
    """No such drafter version, or no such file in it."""


class RegistryError(ServiceError):
    """The registry on disk contradicts itself, or a staged drafter is unusable."""


class RegistryBusy(RegistryError):  # noqa: N818
    """Another process keeps the registry's lock; nothing was changed."""


class LatestMoved(RegistryError):  # noqa: N818
    """Another drafter is served than the one that was to be replaced; nothing was changed."""


class LatestHeld(LatestMoved):
    """A person holds the served drafter, so nothing may take its place; nothing was changed."""


class ValkeyError(ServiceError):
    """The embedded server is missing, or would not start."""


class WorkerError(ServiceError):
    """The worker cannot go on with a run."""


class ObjectStoreError(OSError):
    """An object store (`drafters_url`, `rollouts_url`) does not answer, refuses, or holds something else; try again."""


class TreeDamaged(ObjectStoreError):  # noqa: N818
    """What the object store says of one run is none of ours: the run's own trouble, and not the store's."""

    def __init__(self, key: str, why: object) -> None:
        said = " ".join(str(why).partition("For further information")[0].split())[:300]
        super().__init__(f"{key} in the object store is damaged: {said}; put a copy of it back, or delete the run")
