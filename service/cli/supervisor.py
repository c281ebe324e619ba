"""Runs the parts of the service as child processes of one parent, and restarts those that die.

Invariants: a child never outlives its parent (the kernel ends it when the parent is killed); children are stopped in
reverse order, by SIGTERM before SIGKILL. Children are started by one thread: `PR_SET_PDEATHSIG` follows the
*thread* that forked.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

log = logging.getLogger("draftalign.up")

#: Tells a child which process it must not outlive.
PARENT_VARIABLE: Final = "DRAFTALIGN_PARENT"
_PR_SET_PDEATHSIG = 1
#: A child that lived this long counts as healthy: its next fault counts as its first.
_HEALTHY_SECONDS = 30.0
_MAX_DELAY_SECONDS = 15.0


def parent_death_signal() -> Callable[[], object] | None:
    """A call that asks the kernel to end the calling process (SIGTERM) when its parent dies. None: not on Linux.

    libc is loaded here, so that the call itself may run between fork and exec.
    """
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn(name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `python -m <argv>` in a session of its own (the terminal's Ctrl-C then reaches the parent alone)."""
    environment = {**os.environ, **(env or {}), "DRAFTALIGN_CHILD": name, PARENT_VARIABLE: str(os.getpid())}
    return subprocess.Popen([sys.executable, "-m", "service.cli.child", *argv], env=environment, start_new_session=True)


def stop(process: subprocess.Popen[bytes], *, patience_seconds: float = 10.0) -> None:
    """End a child: SIGTERM, then SIGKILL if it has not ended in time."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(patience_seconds)
    except subprocess.TimeoutExpired:
        log.warning("process %d ignored SIGTERM for %.0f s; killing it", process.pid, patience_seconds)
        process.kill()
        process.wait()


@dataclass
class Child:
    """One supervised process: how to start it, and how often it failed."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    patience_seconds: float = 10.0  # from SIGTERM to SIGKILL
    log_file: Path | None = None  # that it writes by itself
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    faults: int = 0

    def start(self) -> None:
        """Start (again)."""
        self.process = spawn(self.name, self.argv, self.env)
        self.started = time.monotonic()
        log.info("%s runs as process %d", self.name, self.process.pid)

    def _last_log_line(self) -> str:
        """The last line of a log file that the child writes by itself; empty where there is none."""
        try:
            lines = [] if self.log_file is None else self.log_file.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return f". {self.log_file} says: {lines[-1][:300]}" if lines else ""

    def revive(self) -> None:
        """Restart it if it died, with a growing delay while it keeps dying."""
        if self.process is None or self.process.poll() is None:
            return
        alive_seconds = time.monotonic() - self.started
        delay_seconds = min(_MAX_DELAY_SECONDS, 0.5 * 2.0**self.faults) if self.faults else 0.0
        if alive_seconds < delay_seconds:
            return
        self.faults = 1 if alive_seconds > _HEALTHY_SECONDS else self.faults + 1
        log.warning("%s ended (exit code %s) after %.1f s; starting it again%s", self.name, self.process.returncode,
                    alive_seconds, self._last_log_line())  # fmt: skip
        try:
            self.start()
        except OSError as error:  # no memory or no process id now; the other children go on
            log.error("%s cannot be started: %s", self.name, error)
            self.started = time.monotonic()


class Supervisor:
    """Starts children in order, revives them, stops them in reverse order."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._stopping = False

    def run(self) -> None:
        """Run until SIGINT, SIGTERM, or the terminal's end (SIGHUP, unless `nohup` has it ignored)."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            for child in self.children:
                child.start()
            while not self._stopping:
                time.sleep(0.2)
                for child in self.children:
                    if not self._stopping:
                        child.revive()
        finally:
            for child in reversed(self.children):
                if child.process is not None:
                    stop(child.process, patience_seconds=child.patience_seconds)

    def _on_signal(self, number: int, _frame: object) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        self._stopping = True
