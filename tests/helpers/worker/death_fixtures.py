"""Deaths and failures of a worker, at a moment that a test names, in this process."""

from __future__ import annotations

from typing import Any

import pytest


class Stopped(BaseException):
    """The process dies here."""


def die_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False, calls: int = 1) -> None:
    """From the `calls`-th call on, `owner.name` ends the process, before or after doing its work."""
    real = getattr(owner, name)
    count = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count < calls:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise Stopped

    monkeypatch.setattr(owner, name, dying)


def fails_with(error: Exception) -> Any:
    """A stand-in for whatever meets that error."""

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing
