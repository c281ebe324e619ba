"""Engines that start in a third of the time: forks of a process that has imported what they import.

An engine's start is mostly its imports, 13 s of CPU of 18 with vLLM. What libraries read of their environment when
they are imported is the first process's: an engine that wants something else there is started by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from helpers import made_once

_SCRIPT = Path(__file__).with_name("forks_script.py")


def written_to(fifo: Path) -> TextIO:
    """A new FIFO, open for writing: who reads it need not be there yet, and reads its end when this is closed."""
    os.mkfifo(fifo)
    return os.fdopen(os.open(fifo, os.O_RDWR), "w")


class Fork:
    """A process that another one has forked, which writes its exit code to the file `code`."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code, self._ended = pid, code, False
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True

    def poll(self, seconds: float = 0.0) -> int | None:
        """None while it runs, then 0, whatever its exit code; waits so long for its end."""
        if not self._ended and select.select([self._file], [], [], seconds)[0]:
            self._ended = True
            os.close(self._file)
        return 0 if self._ended else None

    @functools.cached_property
    def returncode(self) -> int:
        """Of one that has ended, as `Popen.returncode`."""
        deadline = time.monotonic() + 60
        while not self._code.exists():
            assert time.monotonic() < deadline, f"who forked {self.pid} does not write {self._code}: it has ended, too"
            time.sleep(0.01)
        return int(self._code.read_text())

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)

    def wait(self, timeout: float = 60.0) -> None:
        """Until it has ended; raises as `Popen.wait` does."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)


class Forks:
    """`forks_script.py` in an engine's Python, one for all test processes of a run.

    It ends with the one that began it, or with the last of its forks.

    The first to ask begins it. Another waits until it has imported, which costs it what importing would: the first
    import in a fresh environment also compiles.
    """

    def __init__(self, name: str, python: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        run = os.environ.get(made_once.VARIABLE) or tempfile.mkdtemp()
        self._place = Path(run, f"{name}-forks")
        self._argv = [str(python), "-P", str(_SCRIPT), str(self._place), *modules]
        self._environment = dict(environment)

    def fork(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stdin: Path = Path(os.devnull),
        errors: Path | None = None,
        directory: Path = Path(),
    ) -> Fork:
        """A fork that runs the program, a module or a file, with this environment and no other.

        `errors`: where its standard error goes; without it to `log`, as its standard output does.
        """
        log.touch()  # whoever looks for it at once finds it
        asked = {"program": program, "arguments": arguments, "environment": environment, "stdin": str(stdin)}
        places = {"directory": directory, "log": log, "errors": errors or log}
        asked |= {name: str(place.absolute()) for name, place in places.items()}
        for _ in range(2):
            with self._connected() as connection, connection.makefile("rw") as line:
                line.write(json.dumps(asked) + "\n")
                line.flush()
                if answer := line.readline():  # else the one that was asked ended just then, with who began it
                    return Fork(int(answer), self._place.with_name(f"{self._place.name}.{int(answer)}"))
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
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        said = b""
        while not said.endswith(b"ready\n"):  # a library may print, too
            said = stdout.readline()
            assert said, log.read_text(errors="replace")[-6000:]

        def end() -> None:
            """It ends once its forks have, too: another test process may wait for one of them."""
            stdin.close()
            stdout.close()
            process.poll()

        atexit.register(end)
