"""Records are read once, from JSON; what is odd about them is dealt with there."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, gauges, score
from helpers.worker.whole_fixtures import run_document
from redis import Redis

from service.monitor.events import Event, Moved, Moves, read_event
from service.monitor.metrics import RunSnapshot, render
from service.monitor.records import (
    AcceptanceRecord,
    DrafterSums,
    LaneGauges,
    ScoreRecord,
    ServedDrafter,
    WorkerGauges,
    read,
    written,
)
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.registry import Registry
from service.storage.reports.summary import summary_of

RECORDED = Path(__file__).with_name("recorded")


def test_what_is_stored_reads_as_it_did(redis_url: str, redis_client: Redis, tmp_path: Path) -> None:
    """`stored.json` holds records, and odd gauges; `metrics.txt` and `alpha.jsonl` are what was once made of them."""
    stored = json.loads((RECORDED / "stored.json").read_text())
    layout, keys = Layout(tmp_path), Keys("default")
    layout.run("default").mkdir(parents=True)
    layout.history("default").write_text(stored["history"])

    async def snapshot(gauges: str | None, **more: Any) -> RunSnapshot:
        redis_client.flushall()
        tables = {keys.scores: "scores", keys.acceptance: "acceptance", keys.live: "live", keys.worker: gauges}
        for key, name in tables.items():
            if name is not None:
                redis_client.hset(key, mapping=stored[name])
        client = redis.asyncio.Redis.from_url(redis_url)
        read_now: dict[str, Any] = {
            "now": 1362.0,
            "scores": list(Store(redis_client, "default").scores().values()),
            "acceptances": Store(redis_client, "default").acceptances(),
            "history": Registry(layout).history.events("default"),
            "moves": Registry(layout).history.digest("default").moves,
            "counters": {"items": 2, "bytes": 4096, "accepted_total": 47, "duplicates_total": 0},
            "worker": (await summary_of(client, "default")).worker,
            "latest": ServedDrafter("v000003-0a1b2c3d", 6, 99.5),
            "dead_letters": [
                {"entry_id": "1345000-0", "reason": "blob_missing"},
                {"entry_id": "1351000-0", "reason": "r"},
            ],
            "oldest_queued": 1300.0,
            "last_arrival": 1350.0,
            "registered": 900.0,
        }
        await client.aclose()
        return RunSnapshot(**(read_now | more))

    runs = {
        "default": asyncio.run(snapshot("worker")),
        "odd": asyncio.run(snapshot("worker_odd", history=[], moves=Moves(), scores=[])),
        "no-engines": asyncio.run(snapshot(None, acceptances=[])),
        "new": RunSnapshot(now=5.0),
    }
    rendered = render(runs).decode()
    assert rounded(rendered) == rounded((RECORDED / "metrics.txt").read_text())
    documents = [run_document(run, found, Settings()) for run, found in runs.items()]
    assert [(one.pop("attempt"), len(one.pop("attempts"))) for one in documents] == [(1, 1)] * len(runs)
    replayed = [point.pop("rollouts_replayed") for one in documents for point in one["points"]]
    assert set(replayed) == {18, 36, None}, "None where none was scored"
    assert {one["current"].pop("newest_gap") for one in documents if one["current"]} == {None}
    lines = [json.dumps(one, allow_nan=False) for one in documents]
    assert parsed(lines) == parsed((RECORDED / "alpha.jsonl").read_text().splitlines())


def parsed(lines: list[str]) -> list[object]:
    """Documents, numbers to nine digits: a Redis hash has no order, so names and the last bits of sums move."""
    return [json.loads(line, parse_float=lambda number: float(f"{float(number):.9g}")) for line in lines]


def rounded(text: str) -> list[str]:
    """Lines, numbers to nine digits, for the same reason."""
    return re.sub(r"\d+\.\d+(?:e[-+]?\d+)?", lambda found: f"{float(found[0]):.9g}", text).splitlines()


def test_what_is_written_is_what_was_read() -> None:
    stored = json.loads((RECORDED / "stored.json").read_text())
    for text in list(stored["scores"].values())[:36]:
        record = read(ScoreRecord, text)
        assert record is not None
        assert written(record) == text


def test_what_is_of_another_type_is_unknown() -> None:
    sums = dataclasses.asdict(DrafterSums.of([8, 4], [2, 2]))
    odd = {"policy_version": 7, "tokens": True, "created": "noon", "best_version": 3, "later": {"x": 1}}
    found = score(odd | {"served": {**sums, "rollouts": None}, "frozen": {"rounds": 3.0}, "best": sums})
    assert found == ScoreRecord(policy_version=7, best=DrafterSums.of([8, 4], [2, 2]))
    counted = acceptance({"rounds": None, "method": "", "accepted_per_position": [1, None], "policy_version": "7"})
    assert counted == AcceptanceRecord()
    lanes = {"fast": {"statistic": None, "limit": 9.5}}
    assert gauges({"drift": lanes, "rounds_total": {"served": 3, "frozen": "x"}}) == WorkerGauges(
        drift={"fast": LaneGauges(limit=9.5)}
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"x"', b"\xff", '{"batch_id": "\\ud800", "tokens": "x"}'])
def test_what_is_no_record_is_passed_over(text: str | bytes, redis_url: str, redis_client: Redis) -> None:
    assert read(ScoreRecord, text) is None
    keys = Keys("default")
    redis_client.hset(keys.scores, mapping={"a": text, "b": written(ScoreRecord(batch_id="b", policy_version=3))})

    assert list(Store(redis_client, "default").scores()) == ["b"]


def test_of_an_event_that_is_damaged_the_rest_is_known_and_of_an_unknown_kind_what_all_have() -> None:
    found = read_event({"event": "rolled_back", "sequence": True, "version": "v1", "by": 3, "time": 5, "later": [1]})
    assert isinstance(found, Moved)
    assert (found.sequence, found.by, found.time, found.version) == (None, None, 5.0, "v1")
    assert found.written == {"time": 5.0, "event": "rolled_back", "version": "v1", "later": [1]}
    unknown = read_event({"event": "of_later", "sequence": 3, "time": math.inf, "reason": {"x": 1}})
    assert type(unknown) is Event
    assert unknown.written == {"event": "of_later", "sequence": 3, "reason": {"x": 1}}
    no_kinds: list[object] = [None, 3, [], {"x": 1}]
    for no_kind in no_kinds:
        assert read_event({"event": no_kind, "sequence": 4}).written == {"sequence": 4}
