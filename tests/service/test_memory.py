"""What a process holds free goes back to the system."""

from __future__ import annotations

import subprocess
import sys

FRAGMENTED = """
from pathlib import Path

from service.memory import return_freed_memory


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


pieces = [bytearray(100_000) for _ in range(3000)]
held = resident_mib()
del pieces[:-1]  # the last one lies at the heap's end, so nothing before it is returned by itself
kept = resident_mib()
return_freed_memory()
assert kept > held - 50, "glibc has returned it by itself: the test shows nothing"
assert resident_mib() < held - 200, (held, kept, resident_mib())
"""


def test_memory_between_pieces_that_are_in_use_is_returned() -> None:
    """In a process of its own: others have been at the heap before."""
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
