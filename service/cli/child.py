"""`python -m service.cli.child MODULE ARGS...`: run a module as a child that never outlives its parent."""

from __future__ import annotations

import os
import runpy
import sys

from service.cli.supervisor import PARENT_VARIABLE, parent_death_signal


def main() -> None:
    """Make this process end with its parent, then run MODULE."""
    if (tie := parent_death_signal()) is not None:
        tie()
    if os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        sys.exit("draftalign: the parent process ended before this one had started")
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # of children that MODULE starts in this way (torchrun: its ranks)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
