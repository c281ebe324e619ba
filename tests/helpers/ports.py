"""Ports of loopback for servers that tests start."""

from __future__ import annotations

import random
import socket

#: Below those that Linux and macOS give to outgoing connections (from 32768 and 49152): none of them takes one that was
#: found before its server listens, which may be half a minute later.
_RANGE = range(20_000, 32_768)


def free_port() -> int:
    """A port that nobody listens at. Processes that test at one time draw at random, whatever the tests' seed is."""
    for port in random.SystemRandom().sample(_RANGE, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of 100 ports from 20000 to 32767 is free")
