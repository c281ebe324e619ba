"""Whether the API's port can be had, said before anything is started for it."""

from __future__ import annotations

import errno
import socket

from service.errors import ConfigurationError


def check_port(host: str, port: int) -> None:
    """Raise a ConfigurationError where the API cannot listen on this port; 0 is a free one."""
    if not port:
        return
    place = f"port {port} on {host}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is taken; stop what listens there or choose another with --port"
        else:  # another machine's address, a port that root alone may have
            why = f"cannot be had: {error.strerror}; choose others with DRAFTALIGN_HOST and --port"
        raise ConfigurationError(f"{place} {why}") from error
