"""A policy that can decode, and a drafter trained for it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.drafter.decode_fixtures import default_target, schooled

from drafter.model.eagle3 import Eagle3Drafter


@pytest.fixture
def target() -> Any:
    return default_target()


@pytest.fixture
def trained() -> Eagle3Drafter:
    return schooled()
