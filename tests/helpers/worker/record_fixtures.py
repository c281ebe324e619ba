"""Records as tests write them: plain fields, read as what lies in Redis is read."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from service.monitor.counts import LiveAlpha, live_sums
from service.monitor.events import Moves, RunEvent, read_event
from service.monitor.live.blocks import Block, counted
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.metrics import RunSnapshot
from service.monitor.records import AcceptanceRecord, ScoreRecord, ServedDrafter, WorkerGauges, read
from service.storage.registry import Registry

Fields = Mapping[str, Any]


def told(registry: Registry, run: str = "default") -> list[Fields]:
    """A run's history, as it is written."""
    return [event.written for event in registry.history.events(run)]


def score(fields: Fields) -> ScoreRecord:
    """A score record with these fields."""
    found = read(ScoreRecord, to_json(dict(fields)))
    assert found is not None
    return found


def acceptance(fields: Fields) -> AcceptanceRecord:
    """An acceptance record with these fields."""
    found = read(AcceptanceRecord, to_json(dict(fields)))
    assert found is not None
    return found


def gauges(fields: Fields) -> WorkerGauges:
    """A worker's gauges, these and no others."""
    found = read(WorkerGauges, to_json(dict(fields)))
    assert found is not None
    return found


def compared(entry: int, ratios: Sequence[float], drafter: str = "v2") -> ScoreRecord:
    """A batch of prompts, each with its α of the served drafter over that of the first one."""
    first = {f"{entry}/{n}": (300.0, 100.0) for n in range(len(ratios))}
    served = {name: (300.0, 100.0 / ratio) for (name, _), ratio in zip(first.items(), ratios, strict=True)}
    replayed = [
        {"version": version, "sums": sums(by_prompt), "by_prompt": by_prompt}
        for version, by_prompt in (("v1", first), (drafter, served))
    ]
    fields = {"entry_id": f"{entry}-0", "batch_id": str(entry), "policy_version": entry, "drafter_version": drafter}
    return score(fields | {"served": sums(served), "frozen": sums(first), "replayed": replayed})


def sums(by_prompt: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Tokens and rounds of all these prompts."""
    tokens, rounds = (math.fsum(column) for column in zip(*by_prompt.values(), strict=True))
    return {"tokens": tokens, "rounds": rounds}


def watched(scores: Iterable[ScoreRecord], counts: Iterable[AcceptanceRecord]) -> Watch:
    """What live and replay α say of each other."""
    blocks: dict[str, tuple[Block, ...]] = {}
    for record in counts:
        if record.reporter is not None:
            blocks[record.reporter] = counted(blocks.get(record.reporter, ()), record)
    return watch(blocks, Replays(scores), LiveRule())


def stored(
    scores: Iterable[Fields] = (),
    acceptances: Iterable[Fields] = (),
    history: Iterable[Fields] = (),
    counters: Mapping[str, int] | None = None,
    worker: Fields | None = None,
    latest: Fields | None = None,
    **more: Any,
) -> RunSnapshot:
    """What is stored about a run, from plain fields. Engines are judged by these scores and counts."""
    scored, counts = [score(one) for one in scores], [acceptance(one) for one in acceptances]
    moves = Moves()
    for event in history:
        moves.add(read_event(event))
    return RunSnapshot(
        **{"now": time.time(), "published": moves.counts["published"], "watch": watched(scored, counts), **more},
        scores=scored,
        acceptances=counts,
        history=[RunEvent.of(one) for one in history],
        moves=moves,
        counters=counters or {},
        worker=gauges(worker or {}),
        latest=None if latest is None else ServedDrafter(**latest),
    )


def by_drafter(records: Iterable[AcceptanceRecord]) -> dict[str, LiveAlpha]:
    """Live α of each published drafter."""
    groups: defaultdict[str, list[AcceptanceRecord]] = defaultdict(list)
    for record in records:
        if record.ours:
            groups[str(record.drafter_version)].append(record)
    found = {name: live_sums(group) for name, group in sorted(groups.items())}
    return {name: LiveAlpha(sums[0] / sums[1], int(sums[1])) for name, sums in found.items() if sums is not None}
