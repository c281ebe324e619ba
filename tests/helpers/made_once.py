"""What takes seconds to make and is only read: one test process of a run makes it, the others load it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

_T = TypeVar("_T")
#: Names the run's directory, which `conftest.py` makes and removes.
VARIABLE: Final = "MADE_ONCE_IN"


def made_once(name: str, make: Callable[[], _T]) -> _T:
    """The result of `make`, as a file of the run keeps it; outside of a run it is made."""
    import torch

    directory = os.environ.get(VARIABLE)
    if directory is None:
        return make()
    file = Path(directory, name)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            torch.save(make(), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
    found: _T = torch.load(file, weights_only=False)
    return found
