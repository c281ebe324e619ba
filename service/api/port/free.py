"""Whether the API's port can be had, said before anything is started for it."""

from __future__ import annotations

import errno
import socket

from service.errors import ConfigurationError
from service.settings import Settings


def check_port(settings: Settings) -> None:
    """Raise a ConfigurationError where the API cannot listen on its port."""
    if not settings.port:
        return
    place = f"port {settings.port} on {settings.host}"
    try:
        _bind(settings.host, settings.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is taken; stop what listens there or choose another with --port"
        else:  # another machine's address, a port that root alone may have
            why = f"cannot be had: {error.strerror}; choose others with DRAFTALIGN_HOST and --port"
        raise ConfigurationError(f"{place} {why}") from error


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
