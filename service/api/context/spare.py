"""A file that keeps a little of the disk. It is deleted for the calls that make room on a full one.

To archive or delete a run takes some room itself: for the audit log, and for the run's new state.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

#: Of the file: what dozens of such calls write, and a Redis on the same disk that goes on meanwhile.
SPARE_BYTES: Final = 4 << 20
#: What one such call writes, at most.
_CALL_BYTES: Final = 64 << 10


def is_full(error: OSError) -> bool:
    """Whether the disk, or the quota on it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class SpareFile:
    """The file of one state directory, which several processes may share. All of it blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self, free_bytes: int) -> None:
        """Write the file, unless it is there or takes more than a sixteenth of what is free. Raises OSError."""
        if free_bytes < 16 * SPARE_BYTES or (self._path.exists() and self._path.stat().st_size == SPARE_BYTES):
            return
        self._path.write_bytes(os.urandom(SPARE_BYTES))  # some file systems would compress zeros to nothing

    def give_up(self) -> None:
        """Delete the file where the disk takes no such call's writing. Raises OSError, where the disk does not work."""
        try:
            with tempfile.TemporaryFile(dir=self._path.parent) as trial:
                trial.write(os.urandom(_CALL_BYTES))
                trial.flush()
                os.fsync(trial.fileno())
        except OSError as error:
            if not is_full(error):
                raise
            self._path.unlink(missing_ok=True)
