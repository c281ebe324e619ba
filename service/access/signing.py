"""The private key that signs manifests, as the settings name it."""

from __future__ import annotations

from pathlib import Path

from rl_hooks.format.release import SigningKey
from service.errors import ConfigurationError


def signing_key(path: Path | None) -> SigningKey | None:
    """The key in that file; None where none is named. Raises ConfigurationError where it cannot be used."""
    if path is None:
        return None
    try:
        return SigningKey(path)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"signing_key_file: {error}") from error
