"""Fixtures of the API's tests."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService


@pytest.fixture
def bare(serve: Any) -> RunningService:
    """The API without any run."""
    started: RunningService = serve()
    return started
