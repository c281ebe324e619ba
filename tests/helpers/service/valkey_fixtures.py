"""A Valkey that a test or a benchmark starts, as `draftalign up` would have it; it ends with this process."""

from __future__ import annotations

import subprocess
import time

from service.cli import supervisor
from service.cli.valkey import EmbeddedValkey


class OwnValkey(EmbeddedValkey):
    """The server itself, without the start of a Python (`python -m service.cli.valkey`) before it."""

    process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start, and return when it answers. From the main thread: the server dies with the thread."""
        with self.exclusive_directory() as lock:
            self.process = subprocess.Popen(
                self.argv(),
                pass_fds=(lock,),
                start_new_session=True,
                preexec_fn=supervisor.parent_death_signal(),  # noqa: PLW1509 - one prctl, with libc loaded beforehand
            )
        deadline = time.monotonic() + 60
        while not self.ping():
            assert self.process.poll() is None, (self.directory / "valkey.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        """End it; idempotent."""
        supervisor.stop(self.process)
