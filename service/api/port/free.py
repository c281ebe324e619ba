"""Whether the API's port can be had, said before anything is started for it."""

from __future__ import annotations

import socket

from service.errors import ConfigurationError
from service.settings import Settings


def check_port(settings: Settings) -> None:
    """Raise a ConfigurationError where something listens on the API's port."""
    if settings.port and not port_is_free(settings.host, settings.port):
        raise ConfigurationError(
            f"port {settings.port} on {settings.host} is taken; stop what listens there or choose another with --port"
        )


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
