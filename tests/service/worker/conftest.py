"""The API over the state directory of a `bench`, and worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.worker.worker_fixtures import Bench, Nest, nest


@pytest.fixture
def service(bench: Bench) -> Iterator[RunningService]:
    """With default settings; the bench registers runs."""
    started = RunningService(state_dir=bench.layout.root, redis_url=bench.redis_url)
    yield started
    started.stop()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Nest]:
    """What starts worker processes; all of them end with the test."""
    with nest(tmp_path / "workers.log") as made:
        yield made
