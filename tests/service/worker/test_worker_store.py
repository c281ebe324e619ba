"""A worker whose object store fails for one run: that run waits and says so, the others publish."""

from __future__ import annotations

import pytest
from helpers.worker.worker_fixtures import Bench
from redis import Redis

pytest.importorskip("obstore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, Store, failing
from helpers.service.storage_fixtures import Store as Reports

import service.worker.process.worker
from service.storage.registry import Registry
from service.worker.process.worker import Worker

FIRST = "before-default"  # runs are served in this order


@pytest.mark.parametrize("trouble", ["it refuses", "it is away"])
def test_a_run_whose_publish_the_store_refuses_is_left_alone_and_published_later(
    bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    for run in ("default", FIRST):
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
    settings = bench.settings.model_copy(update={"drafters_url": f"s3://{BUCKET}/p"})
    worker, registry = Worker(settings, Redis.from_url(bench.redis_url)), Registry(bench.layout)
    told = Reports(bench.redis, FIRST), Reports(bench.redis, "default")
    if trouble == "it is away":
        store.down()
    else:

        def refuses(environ, start):  # type: ignore[no-untyped-def]
            theirs = FIRST in environ["PATH_INFO"]
            return failing("PUT", "403 Forbidden")(environ, start) if theirs else None

        store.fault = refuses
    worker._turn()
    assert registry.latest(FIRST) is None
    assert "the object store failed at runs/before-default/" in (told[0].worker().error or "")
    assert worker._runs[FIRST].failures == 1
    if trouble == "it is away":
        assert registry.latest("default") is None
        store.up()
        worker._runs["default"].retry_at = 0.0
        worker._turn()
    served = registry.latest("default")
    assert served is not None
    batch = bench.post("a")
    for _ in range(4):
        worker._turn()
    assert bench.state(batch) == "trained"
    assert told[1].worker().error is None
    store.fault = None
    worker._runs[FIRST].retry_at = 0.0
    for _ in range(3):
        worker._turn()
    theirs = registry.latest(FIRST)
    assert theirs is not None
    assert {name.split("/")[3] for name in store.stored() if "/runs/before-default/" in f"/{name}"} == {theirs.digest}
    worker._close()
