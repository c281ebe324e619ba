"""Engines that start in a third of the time: forks of a process that has imported what they import.

An engine's start is mostly its imports, 13 s of CPU of 18 with vLLM. What libraries read of their environment when
they are imported is the first process's: an engine that wants something else there is started by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import made_once

_SCRIPT = Path(__file__).with_name("forks_script.py")


class Fork:
    """A process that another one has forked: its end is known here, and not its exit code."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True

    def poll(self, seconds: float = 0.0) -> int | None:
        """None while it runs; waits so long for its end."""
        if not self._ended and select.select([self._file], [], [], seconds)[0]:
            self._ended = True
            os.close(self._file)
        return 0 if self._ended else None

    def terminate(self) -> None:
        """Ask it to end."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, signal.SIGTERM)

    def wait(self, timeout: float = 60.0) -> None:
        """Until it has ended; raises as `Popen.wait` does."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)


class Forks:
    """`forks_script.py` in an engine's Python, one for all test processes of a run; it ends with the one that began it.

    The first to ask begins it. Another waits until it has imported, which costs it what importing would: the first
    import in a fresh environment also compiles.
    """

    def __init__(self, name: str, python: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        run = os.environ.get(made_once.VARIABLE) or tempfile.mkdtemp()
        self._place = Path(run, f"{name}-forks")
        self._argv = [str(python), "-P", str(_SCRIPT), str(self._place), *modules]
        self._environment = dict(environment)

    def fork(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """A fork that runs the program, a module or a file, with this environment and no other."""
        log.touch()  # whoever looks for it at once finds it
        asked = {"program": program, "arguments": arguments, "environment": environment, "log": str(log)}
        for _ in range(2):
            with self._connected() as connection, connection.makefile("rw") as line:
                line.write(json.dumps(asked) + "\n")
                line.flush()
                if answer := line.readline():  # else the one that was asked ended just then, with who began it
                    return Fork(int(answer))
        raise RuntimeError(f"{self._argv} ended twice before it answered")

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        with self._place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(str(self._place))
            except OSError:  # there is none yet, or it has ended
                self._begin()
                connection.connect(str(self._place))
        return connection

    def _begin(self) -> None:
        self._place.unlink(missing_ok=True)
        log = self._place.with_suffix(".log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._argv, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        assert process.stdout is not None
        said = b""
        while not said.endswith(b"ready\n"):  # a library may print, too
            said = process.stdout.readline()
            assert said, log.read_text(errors="replace")[-6000:]
        atexit.register(process.__exit__, None, None, None)  # its stdin is closed, and it ends
