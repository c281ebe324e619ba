"""Stand-ins for the service and an engine, unless a file has fixtures of these names of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.engine.agent_fixtures import Engine, Service


@pytest.fixture
def service() -> Iterator[Service]:
    """A small service that speaks what the agent speaks."""
    from helpers.engine.agent_fixtures import Service

    peer = Service()
    yield peer
    peer.down()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A small engine. What waits for a swap at the end of a test goes on."""
    from helpers.engine.agent_fixtures import Engine

    peer = Engine()
    yield peer
    peer.swap_allowed.set()
    peer.down()
