"""What an adapter reads from the environment, and what it says: that it is on, or that it is OFF and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

#: What a trainer's processes need of it.
VARIABLES = ("DRAFTALIGN_URL", "DRAFTALIGN_RUN", "DRAFTALIGN_TOKEN")
_log = logging.getLogger("rl_hooks")
_Made = TypeVar("_Made")


def attached(trainer: str, rank: int, attach: Callable[[str, str, str | None], _Made]) -> _Made | None:
    """What `attach(url, run, token)` makes; None where it fails. The trainer goes on without us then.

    `trainer`, `rank`: for the log.
    """
    url, run = os.environ.get("DRAFTALIGN_URL", ""), os.environ.get("DRAFTALIGN_RUN", "default")
    if not url:
        _log.error("draftalign is OFF: DRAFTALIGN_URL=http://host:port is not set")
        return None
    try:
        made = attach(url, run, os.environ.get("DRAFTALIGN_TOKEN"))
    except Exception:  # noqa: BLE001 - the trainer goes on without us
        _log.exception("draftalign is OFF: this policy's rollouts are not sent")
        return None
    _log.warning("draftalign is on: %s's rank %d sends rollouts to %s", trainer, rank, url)
    return made
