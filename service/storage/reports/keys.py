"""Redis keys of what the worker and the engines report."""

from __future__ import annotations

from service.storage.queue.keys import Keys


class _Key:
    """A Redis key of a run, called by the name of the attribute."""

    def __set_name__(self, owner: type[StoreKeys], name: str) -> None:
        self._name = name

    def __get__(self, keys: StoreKeys, owner: type[StoreKeys]) -> str:
        return keys.prefix + self._name


class StoreKeys:
    """Redis keys of one run's reports."""

    scores, recent_scores, worker, latest_head, latest_policy = _Key(), _Key(), _Key(), _Key(), _Key()
    acceptance, reporters, reported, idle, live = _Key(), _Key(), _Key(), _Key(), _Key()
    live_order, unplaced, drift = _Key(), _Key(), _Key()
    changes, scored, returns, awaited_head = _Key(), _Key(), _Key(), _Key()
    sessions, attempt, fence = _Key(), _Key(), _Key()

    def __init__(self, run: str) -> None:
        self.prefix = Keys(run).prefix
