"""What Redis has of a run that does not grow with the run's age, read in one step.

Every look needs it, a scrape of `/metrics` that of all runs, which it reads together. Asked for one by one the parts of
one run took ten round trips.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from redis.asyncio.cluster import RedisCluster

from service.monitor.headline import RECENT_BATCHES
from service.monitor.records import WorkerGauges, read
from service.storage.queue.keys import GOES_ON_SECONDS, OUTDATED_KEPT_SECONDS, OUTDATED_SECONDS, Keys
from service.storage.queue.rollout_queue import COUNTERS, counts, parts
from service.storage.reports.store import Changes

#: All of a run in one string: to ask for a part more costs a client more than it costs this script. Redis 6.2 commands
#: only. KEYS: eleven of each run, as `summary` names them. ARGV: dead letters wanted, names of counters. The JSON has
#: false for what is not there; fields of a hash or an entry are a list of names and values, and an empty list is {}. A
#: run alone is told its error; among others it has no answer.
_SUMMARY: Final = """
local function summary(queue, held, counters, outdated, dead, gauges, scored, reported, changes, scores, acceptance)
  local stream, first, last = redis.pcall('XINFO', 'STREAM', queue), false, false
  for i = 1, #stream, 2 do -- none in an error: there is no queue
    if stream[i] == 'first-entry' and stream[i + 1] then first = stream[i + 1][1] end
    if stream[i] == 'last-generated-id' then last = stream[i + 1] end
  end
  local worker, beat = redis.call('HGETALL', gauges), false
  for i = 1, #worker, 2 do
    if worker[i] == 'heartbeat' then beat, worker[i + 1] = worker[i + 1], '0' end
  end
  return cjson.encode({
    redis.call('TIME'), beat, first, last, redis.call('GET', held), redis.call('HMGET', counters, unpack(ARGV, 2)),
    redis.call('GET', outdated), redis.call('TTL', outdated),
    redis.call('XREVRANGE', dead, '+', '-', 'COUNT', ARGV[1]), worker, redis.call('GET', scored),
    redis.call('ZRANGE', reported, -1, -1, 'WITHSCORES')[2] or false,
    (redis.call('XREVRANGE', changes, '+', '-', 'COUNT', 1)[1] or { '0-0' })[1], redis.call('HLEN', scores),
    redis.call('HLEN', acceptance),
  })
end
if #KEYS == 11 then return { summary(unpack(KEYS)) } end
local found = {}
for i = 1, #KEYS, 11 do
  local known, text = pcall(summary, unpack(KEYS, i, i + 10))
  found[#found + 1] = known and text
end
return found
"""


class Summary(NamedTuple):
    """Of one moment.

    `counters`: all `COUNTERS`; 0 where nothing was counted yet. `oldest_queued`: arrival of the oldest batch that has
    not ended, in Unix seconds by this host's clock. `last_arrival`: of the newest batch of all, in those by the clock
    of Redis: it is compared with times of files, which may be another host's. `outdated`: whether a
    session of an earlier attempt goes on sending, and has sent of late: its batches are skipped. `dead_letters`: the
    newest `RECENT_BATCHES`, newest first. `worker`: its gauges, its `heartbeat` by this host's clock; unknown before
    its first sign of life. `times_scored`: how often a batch was scored. `last_report`: when an engine reported last,
    in Unix seconds. `changes`: up to now, none of them named.
    """

    counters: dict[str, int]
    oldest_queued: float | None
    last_arrival: float | None
    outdated: bool
    dead_letters: list[dict[str, str]]
    worker: WorkerGauges
    times_scored: int
    last_report: float | None
    changes: Changes


@dataclass(frozen=True, slots=True)
class SummaryText:
    """What the script said of a run. Answers are equal while nothing but heartbeats is written and no key expires.

    `ahead`: whole seconds of this host's clock before that of Redis. `text`: JSON of all but the time and the worker's
    heartbeat, which is 0 in it. `beat`: JSON of that.
    """

    ahead: int
    text: bytes
    beat: bytes = field(compare=False)

    @classmethod
    def of(cls, found: bytes) -> SummaryText:
        """As it came, just now."""
        time_of_redis, _, rest = found.removeprefix(b"[").partition(b"],")
        seconds, microseconds = map(int, json.loads(time_of_redis + b"]"))
        beat, _, rest = rest.partition(b",")
        return cls(round(time.time() - (seconds + microseconds / 1e6)), b"[" + rest, beat)

    @property
    def heartbeat(self) -> float | None:
        """The worker's last sign of life by this host's clock; None: there was none, or it is no number."""
        found = json.loads(self.beat)
        at = gauges({"heartbeat": found}).heartbeat if found else None
        # Whole seconds: one sign of life has one time, whenever it is read.
        return None if at is None else at + self.ahead


async def summary_of(redis: Any, run: str) -> Summary:
    """Read it by an asyncio client."""
    (found,) = await redis.eval(*_question([run]))
    return summary_in(SummaryText.of(found))


async def answers_of(redis: Any, runs: Sequence[str]) -> dict[str, SummaryText]:
    """Of many runs, in one round trip (to each node of a cluster). A run whose keys are broken is left out."""
    together = [[run] for run in runs] if isinstance(redis, RedisCluster) else [runs]  # a script has one slot's keys
    async with redis.pipeline(transaction=False) as pipe:
        for some in together:
            pipe.eval(*_question(some))
        answers = await pipe.execute(raise_on_error=False)
    found: dict[str, SummaryText] = {}
    for some, texts in zip(together, answers, strict=True):
        if not isinstance(texts, Exception):
            found |= {run: SummaryText.of(text) for run, text in zip(some, texts, strict=True) if text is not None}
    return found


def _question(runs: Sequence[str]) -> tuple[Any, ...]:
    keys: list[str] = []
    for of in map(Keys, runs):
        keys += [of.queue, of.held, of.counters, of.outdated, of.dead, of.worker, of.scored, of.reported]
        keys += [of.changes, of.scores, of.acceptance]
    return _SUMMARY, len(keys), *keys, RECENT_BATCHES, *COUNTERS


def summary_in(answer: SummaryText) -> Summary:
    """What an answer says."""
    found = json.loads(answer.text)
    first, last, held, values, outdated, kept_seconds, letters, worker, scored, report, *changes = found
    newest = last and (parts(held or None)["newest"] or last)  # not what was put back
    return Summary(
        counters=counts(values, held or None),
        oldest_queued=None if (oldest := _arrival(first)) is None else oldest + answer.ahead,  # by this host's clock
        last_arrival=_arrival(newest),
        outdated=_goes_on(outdated or "", kept_seconds),
        dead_letters=[_named(fields) for _, fields in letters],
        worker=gauges(_named(worker)).model_copy(update={"heartbeat": answer.heartbeat}),
        times_scored=int(scored or 0),
        last_report=float(report) if report else None,
        changes=Changes(changes[0], (changes[1], changes[2]), []),
    )


def gauges(fields: Mapping[str, str]) -> WorkerGauges:
    """The worker's gauges, its `heartbeat` by the clock of Redis."""
    values = ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return read(WorkerGauges, f"{{{values}}}") or WorkerGauges()


def _goes_on(told: str, kept_seconds: int) -> bool:
    """`told`: when the first and the last file of each session came, in Unix seconds. `kept_seconds`: the key's TTL."""
    times = [(int(first), int(last)) for first, last, _ in map(str.split, told.splitlines())]
    if not times:
        return False
    now = times[0][1] + OUTDATED_KEPT_SECONDS - kept_seconds
    return any(last - first >= GOES_ON_SECONDS and now - last < OUTDATED_SECONDS for first, last in times)


def _named(flat: Sequence[str]) -> dict[str, str]:
    """Fields from a list of names and values."""
    each = iter(flat)
    return dict(zip(each, each, strict=True))


def _arrival(entry_id: str | bool) -> float | None:
    """Of a stream's entry: its id begins with Unix milliseconds. None for 0-0, before the first, and for no entry."""
    milliseconds = int(str(entry_id or 0).partition("-")[0])
    return milliseconds / 1000.0 if milliseconds else None
