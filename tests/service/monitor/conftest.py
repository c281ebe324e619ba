"""Fixtures of the monitor's tests."""

from __future__ import annotations

import pytest
from drift_fixtures import SEED

from benchmarks.alarms import Bank, make_bank


@pytest.fixture(scope="session")
def bank() -> Bank:
    return make_bank(800, SEED)
