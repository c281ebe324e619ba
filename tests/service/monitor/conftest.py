"""Fixtures of the monitor's tests."""

from __future__ import annotations

import pytest
from helpers.made_once import made_once
from helpers.worker.drift_fixtures import SEED

from benchmarks.alarms import Bank, make_bank


@pytest.fixture(scope="session")
def bank() -> Bank:
    return made_once("bank", lambda: make_bank(800, SEED))
