"""Adds up the reports of engines: constant work for each report, and a bounded number of records for any run.

Reports are cumulative per (reporter, drafter version, policy version). A reporter's *account* holds the order of its
last reports and running sums per drafter version. A report adds its difference to the report that it replaces, so a
drafter is judged by these sums alone.

The newest `KEPT_APART` records of a reporter stay separate. Older ones are added to two sums, so that no round is lost:
one record per reporter and drafter version (policy version null), and the live sums of their drafter and policy version
over all reporters, which the α chart draws. An agent reports at most 32 (drafter, policy) pairs, its newest ones
(`rl_hooks.engines.counting.counters.MAX_BUCKETS`), so it never reports again what was added up here.

A trainer that goes back reaches policy versions again, while engines go on counting. Counts of a drafter and policy
version from *after* that are a record of their own (`_parted`). The older record is added up as above, to the live sums
of its attempt. The newest report is kept beside (`unplaced`), because its counts still include the older ones.

A reporter may name the *life* of its counts. Under another name they begin again at 0. The counts of the old life are
added up in the same way, and its blocks end there. If a reporter names no life, a count that fell is the sign.

One script (`lua/book.lua`) writes all changes of a report, by compare-and-set on the reporter's account: a crash books
a report completely or not at all, and a repeated report changes nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Final

from service.errors import EndedLife, TooManyReporters
from service.monitor.counts import is_late, other_life, since, total
from service.monitor.live.blocks import Block, counted
from service.monitor.records import AWAY_SECONDS, AcceptanceRecord, StepSample, read, written
from service.storage.queue.keys import Keys, lua

#: Records of a reporter that stay apart: twice what an agent keeps, which reports all of them again after a restart.
KEPT_APART: Final = 64
#: Drafter versions of a reporter with sums of their own; the agent's 32 pairs cannot name more.
KEPT_DRAFTERS: Final = 32
#: For one reporter too many, the one that was silent longest is dropped, if it was silent for this time. Should it come
#: back, its cumulative counts would count twice. So an active reporter with rounds is never dropped. A reporter without
#: rounds has nothing to count twice: it is dropped at once for one that has rounds.
_SILENT_SECONDS: Final = 3600.0
#: For how many pairs of drafter and policy version live sums over all reporters are kept (those of each attempt apart).
MAX_LIVE: Final = 4096
#: Readers follow by the names of changes (`lua/follow.lua`). So many are kept; a reader that is further behind reads
#: everything. A report leaves four names at most, so these are the last four reports of each of 1,024 reporters.
KEPT_CHANGES: Final = 16 * 1024
#: If a reporter counts a policy version again after one that is higher by more than this, the trainer went back.
_WENT_BACK: Final = 16
#: So many names of a reporter's last lives are kept. Late reports of any but the newest are refused.
_LIVES: Final = 8
_BOOK: Final = lua("book")


@dataclass
class Account:
    """One reporter's account: sums `[rounds, accepted tokens]` by drafter, and its separate records, oldest first.

    `blocks`: its last rounds, for the comparison of live with replay α. `steps`: the times of its steps, cumulative, by
    its last report that had some. `lives`: names of the last lives of its counts, the newest last. `behind`, if it
    drafts with a replaced version: that version, the time of its last report, and `AcceptanceRecord.behind`.
    """

    sums: dict[str, list[int]] = field(default_factory=dict)
    apart: list[tuple[str, int | None]] = field(default_factory=list)
    blocks: tuple[Block, ...] = ()
    steps: tuple[StepSample, ...] = ()
    lives: tuple[str, ...] = ()
    behind: tuple[str, float, float] | None = None

    @property
    def idle(self) -> bool:
        """Whether the reporter certainly never counted a round: not if older drafters may have been forgotten."""
        return len(self.sums) < KEPT_DRAFTERS and not any(rounds for rounds, _ in self.sums.values())

    @classmethod
    def read(cls, text: str | bytes) -> Account:
        """Read `text()`."""
        document = json.loads(text)
        sums, apart = document["sums"], [(drafter, policy) for drafter, policy in document["apart"]]
        with contextlib.suppress(KeyError, TypeError, ValueError):  # edited by hand: the comparison begins again
            blocks, steps = tuple(map(_block, document["blocks"])), tuple(map(_step, document["steps"]))
            lives, behind = tuple(map(str, document["lives"])), document["behind"]
            return cls(sums, apart, blocks, steps, lives, None if behind is None else tuple(behind))
        return cls(sums, apart)

    def text(self) -> str:
        """Write it for Redis."""
        # `astuple` would copy each prompt's counts. `named` is last, and written only where it is False: an API of
        # before 30 November 2026 beside this one would drop all blocks.
        values = ([getattr(block, one.name) for one in fields(Block)] for block in self.blocks)
        blocks = [value[:-1] if value[-1] else value for value in values]
        steps = list(map(astuple, self.steps))
        document: dict[str, Any] = {"sums": self.sums, "apart": self.apart, "blocks": blocks, "steps": steps}
        document |= {"lives": self.lives, "behind": self.behind}
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    def add(
        self,
        record: AcceptanceRecord,
        previous: AcceptanceRecord | None,
        more: AcceptanceRecord,
        *,
        named: bool = True,
    ) -> None:
        """Add to the sums the difference between `record` and `previous`, which it replaces.

        `more`: the counts since the report before. `named`: whether they name their policy version. The drafter, and
        its pair with the policy version, become the newest ones. Without a `previous`, kept blocks of this pair are of
        another attempt, and are dropped.
        """
        drafter, key = str(record.drafter_version), (str(record.drafter_version), record.policy_version)
        before = previous or AcceptanceRecord()
        rounds, accepted = self.sums.pop(drafter, (0, 0))
        rounds += record.rounds - before.rounds
        accepted += (record.accepted_tokens or 0) - (before.accepted_tokens or 0)
        self.sums[drafter] = [rounds, accepted]
        kept = [b for b in self.blocks if previous is not None or (b.drafter_version, b.policy_version) != key]
        if record.life is not None and record.life not in self.lives:
            kept = kept if not self.lives else []
            self.lives = (*self.lives, record.life)[-_LIVES:]
        self.blocks = counted(kept, more, named=named)
        if more.rounds and key in self.apart:
            self.apart.remove(key)
        if key not in self.apart:
            self.apart.append(key)

    def note(self, report: AcceptanceRecord, *, outdated: bool) -> float | None:
        """Note whether `latest` names another version than the report's. Returns for how many seconds; None: no.

        Only times of reports are compared: the clocks of hosts that publish and that take reports in may differ. A
        silence of over 3 min is not counted.
        """
        if report.final or not report.ours:  # nothing more is counted here, or it is no drafter of ours
            return None
        version, last, seconds = self.behind or ("", 0.0, 0.0)
        if not outdated:
            self.behind = None
            return None
        gone = report.reported - last
        seconds = 0.0 if version != report.drafter_version else seconds + (gone if 0 <= gone <= AWAY_SECONDS else 0.0)
        self.behind = str(report.drafter_version), report.reported, seconds
        return seconds

    def newer(self, drafter: str, policy: int | None) -> list[tuple[str, int | None]]:
        """The pairs that were counted after this one; empty if this pair is the newest, or was not counted."""
        key = (drafter, policy)
        return self.apart[self.apart.index(key) + 1 :] if key in self.apart else []

    def shrink(self) -> tuple[list[str], list[tuple[str, int | None]]]:
        """Remove the oldest drafters and records beyond the bounds. Returns both."""
        dropped = list(self.sums)[:-KEPT_DRAFTERS]
        for drafter in dropped:
            del self.sums[drafter]
        folded = [key for key in self.apart if key[0] in dropped]
        kept = [key for key in self.apart if key[0] not in dropped]
        self.apart = kept[-KEPT_APART:]
        return dropped, folded + kept[:-KEPT_APART]


def _block(values: list[Any]) -> Block:
    drafter, policy, rounds, tokens, drafted, accepted, since_, by_prompt, *requests = values  # older ones have none
    return Block(drafter, policy, rounds, tokens, drafted, tuple(accepted), since_, dict(by_prompt), *requests)


def _step(values: Sequence[Any]) -> StepSample:
    batch, depth, steps, seconds = values
    if type(depth) is not int or type(steps) is not int or not 0 < steps < 1 << 53:
        raise ValueError(f"expected whole numbers, got depth {depth!r} and steps {steps!r}")
    return StepSample(float(batch), depth, steps, float(seconds))


@dataclass
class _Changes:
    """All that one call of the script writes."""

    set: dict[str, AcceptanceRecord] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)
    unplaced: dict[str, AcceptanceRecord] = field(default_factory=dict)
    forget: list[str] = field(default_factory=list)
    live: list[tuple[str, str, str, float]] = field(default_factory=list)

    def fold(
        self, record: AcceptanceRecord, into: str, older: AcceptanceRecord | None, drafter: str | None
    ) -> AcceptanceRecord:
        """Add a record to the one of older policy versions at `into`, and return that."""
        created = max(r.reported for r in (record, older or record))
        merged = replace(total(record, older), drafter_version=drafter, policy_version=None, created=created)
        of_one = {"canary": None, "withheld": None, "life": None, "behind": None, "running_requests": None}
        self.set[into] = replace(merged, **of_one)  # type: ignore[arg-type]
        return self.set[into]

    def pool(self, record: AcceptanceRecord, returns: Sequence[int]) -> None:
        """Add a record to the live sums over all reporters. `returns`: see `live_name`."""
        if record.policy_version is not None and record.rounds > 0 and (emitted := record.emitted) is not None:
            self.live.append((live_name(record, returns), str(record.rounds), str(emitted), record.reported))

    def text(self) -> str:
        """The script's argument. Sums are text in it, because Lua's numbers have 53 bits."""
        document = {
            "set": [(name, written(record)) for name, record in self.set.items()],
            "del": self.delete,
            "unplaced": [(name, written(record)) for name, record in self.unplaced.items()],
            "forget": self.forget,
            "live": self.live,
        }
        return json.dumps(document, ensure_ascii=False)


class EngineCounts:
    """The reports of one run, from `max_reporters` reporters."""

    def __init__(self, redis: Any, keys: Keys, max_reporters: int) -> None:
        self._redis = redis
        self._keys = keys
        self._most = max_reporters
        self._book = redis.register_script(_BOOK)

    async def book(
        self, record: AcceptanceRecord, steps: Sequence[StepSample] = (), *, outdated: bool = False
    ) -> tuple[Block, ...]:
        """Book a report. Returns its reporter's last rounds, oldest first.

        `steps`: replace the reporter's earlier ones. `outdated`: whether `latest` names another version than the
        report. Raises TooManyReporters if there is no room for a new reporter, and EndedLife if a later life of the
        reporter has begun. Nothing is changed then.
        """
        while True:  # again, if another report of this reporter, or another new reporter, was booked meanwhile
            blocks = await self._try(record, tuple(steps), outdated=outdated)
            if blocks is not None:
                return blocks

    async def _try(
        self, report: AcceptanceRecord, steps: tuple[StepSample, ...], *, outdated: bool
    ) -> tuple[Block, ...] | None:
        reporter, drafter = str(report.reporter), str(report.drafter_version)
        of_all = report.policy_version is None  # the counts are of all policy versions together
        own = f"{reporter}/{drafter}" if of_all else acceptance_key(reporter, drafter, report.policy_version)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._keys.reporters, reporter)
            pipe.hget(self._keys.unplaced, own)
            pipe.get(self._keys.latest_policy)
            pipe.xrange(self._keys.returns)
            known, unplaced, latest, marks = await pipe.execute()
        returns = [int(name.partition(b"-")[0]) for name, _ in marks]
        if known is None:
            await self._make_room(report, returns)
        account = Account() if known is None else Account.read(known)
        _check_life(account, report)
        account.steps = steps or account.steps
        changes, placed = _Changes(), report
        said = None if unplaced is None else read(AcceptanceRecord, unplaced)
        if of_all:
            placed = replace(report, policy_version=None if latest is None else int(latest))
        name = acceptance_key(reporter, drafter, placed.policy_version)
        previous = await self._record(name)
        whole = not of_all and said is None  # the record says the same as the report
        base = previous if whole else said
        if base is not None and is_late(report, base):
            return account.blocks
        more = since(placed, base)
        newer = account.newer(drafter, placed.policy_version)
        parted = None
        if previous is not None and (other_life(placed, previous) or _parted(previous, newer, returns)):
            parted = previous
        if parted is not None and more.rounds:
            await self._part(reporter, parted, changes, returns)
            previous, whole = None, False
        if more.rounds or parted is None:  # otherwise nothing new is reported, and the record keeps its attempt
            record = placed if whole else total(more, previous)
            if not more.rounds and previous is not None:  # nothing new is reported: the record keeps its time
                record = replace(record, created=previous.created, behind=previous.behind)
            if not whole:
                changes.unplaced[own] = report
            if more.rounds:
                record = replace(record, behind=account.note(report, outdated=outdated))
            account.add(record, previous, more, named=not of_all)
            changes.set[name] = record
            await self._shrink(reporter, account, changes, returns)
        booked = await self._write(reporter, known, account, report.reported, changes)
        return account.blocks if booked else None

    async def _part(self, reporter: str, record: AcceptanceRecord, changes: _Changes, returns: Sequence[int]) -> None:
        """Add up a record of an abandoned attempt, or of an ended life."""
        target = older_key(reporter, str(record.drafter_version))
        changes.fold(record, target, await self._record(target), record.drafter_version)
        changes.pool(record, returns)

    async def _shrink(self, reporter: str, account: Account, changes: _Changes, returns: Sequence[int]) -> None:
        """Add up the account's oldest records, if it has too many."""
        dropped, folded = account.shrink()
        if not (dropped or folded):
            return
        sources = [acceptance_key(reporter, d, p) for d, p in folded]
        sources += [older_key(reporter, drafter) for drafter in dropped]
        names = [d for d, _ in folded] + dropped
        into = [None if drafter in dropped else drafter for drafter in names]
        targets = sorted({older_key(reporter, drafter) for drafter in into})
        found = await self._records([*sources, *targets])
        olders = {**dict(zip(targets, found[len(sources) :], strict=True)), **changes.set}
        for source, drafter, record in zip(sources, into, found, strict=False):
            if record is None:
                continue
            target = older_key(reporter, drafter)
            olders[target] = changes.fold(record, target, olders[target], drafter)
            changes.pool(record, returns)
            changes.delete.append(source)
        changes.forget += [f"{reporter}/{drafter}" for drafter in dropped]
        changes.forget += sources[: len(folded)]

    async def _make_room(self, report: AcceptanceRecord, returns: Sequence[int]) -> None:
        """Make room for a new reporter. Raises TooManyReporters if none can be made."""
        if await self._redis.zcard(self._keys.reported) < self._most:
            return
        ((silent, last),) = await self._redis.zrange(self._keys.reported, 0, 0, withscores=True)
        if report.reported - last >= _SILENT_SECONDS:
            await self._forget(silent.decode(), returns)
            return
        while report.rounds and (idle := await self._redis.zrange(self._keys.idle, 0, 0)):
            if await self._forget(idle[0].decode(), returns, idle=True):
                return
        raise TooManyReporters(
            f"the run has {self._most} reporters already, as many as it may, and all of them have reported "
            f"within the last hour; {report.reporter!r} is not counted. Report through fewer agents, raise "
            "DRAFTALIGN_MAX_REPORTERS, or split the engines over several runs"
        )

    async def _forget(self, reporter: str, returns: Sequence[int], *, idle: bool = False) -> bool:
        """Drop a reporter; its rounds stay in the live sums. `idle`: only if it has none. Returns whether it did."""
        known = await self._redis.hget(self._keys.reporters, reporter)
        account = Account() if known is None else Account.read(known)
        if idle and (known is None or not account.idle):
            await self._redis.zrem(self._keys.idle, reporter)
            return False
        names = [acceptance_key(reporter, d, p) for d, p in account.apart]
        changes = _Changes(forget=[*names, *(f"{reporter}/{drafter}" for drafter in account.sums)])
        for record in await self._records(names):
            if record is not None:
                changes.pool(record, returns)
        changes.delete = [*names, *(older_key(reporter, drafter) for drafter in (*account.sums, None))]
        return await self._write(reporter, known, None, 0.0, changes)

    async def _write(
        self, reporter: str, known: bytes | None, now: Account | None, created: float, changes: _Changes
    ) -> bool:
        keys = self._keys
        names = [keys.reporters, keys.acceptance, keys.unplaced, keys.reported, keys.live, keys.live_order]
        names += [keys.changes, keys.idle]
        text, idle = ("", False) if now is None else (now.text(), now.idle)
        arguments = [reporter, known or "", text, created, MAX_LIVE, changes.text()]
        arguments += [KEPT_CHANGES, int(idle), self._most]
        return bool(await self._book(keys=names, args=arguments))

    async def _record(self, name: str) -> AcceptanceRecord | None:
        return (await self._records([name]))[0]

    async def _records(self, names: Sequence[str]) -> list[AcceptanceRecord | None]:
        if not names:
            return []
        found = await self._redis.hmget(self._keys.acceptance, list(names))
        return [None if value is None else read(AcceptanceRecord, value) for value in found]


def acceptance_key(reporter: str, drafter_version: str, policy_version: int | None) -> str:
    """Identity of an acceptance record."""
    return f"{reporter}/{drafter_version}/{policy_version}"


def older_key(reporter: str, drafter: str | None) -> str:
    """Identity of the sum of a reporter's older records with a drafter version; None: with forgotten ones."""
    return f"{reporter}/{drafter or ''}/older"


def _check_life(account: Account, report: AcceptanceRecord) -> None:
    if report.life is not None and report.life in account.lives[:-1]:
        raise EndedLife(
            f"{report.reporter!r} has counted in another life, {account.lives[-1]!r}, since {report.life!r}, so these "
            "counts are not booked. A report that comes late does no harm; if it goes on, two agents report under one "
            "name: give each its own (--agent-id), or restart this one with an empty cache"
        )


def _parted(previous: AcceptanceRecord, newer: Sequence[tuple[str, int | None]], returns: Sequence[int]) -> bool:
    """Whether a trainer went back since a reporter counted `previous`, so that new counts are of another attempt.

    `newer`: the pairs that it has counted since. If there are none, the attempt is the same: a registration alone is no
    sign, because engines register too. With some, a registration is a sign, and so is a fall that no late batch makes.
    """
    came = previous.policy_version
    registered = any(at / 1000.0 > previous.reported for at in returns)
    fell = any(p is not None and came is not None and p > came + _WENT_BACK for _, p in newer)
    return bool(newer) and (registered or fell)


def live_name(record: AcceptanceRecord, returns: Sequence[int]) -> str:
    """Identity of the live sum to which a record is added. `returns`: Unix ms at which trainers went back, ascending.

    The last return before the report is part of the identity, so that attempts have sums of their own. Sums of a run's
    first attempt have none.
    """
    before = [at for at in returns if at / 1000.0 <= record.reported]
    return json.dumps([record.method, record.drafter_version, record.policy_version, *before[-1:]])


def live_record(identity: str, rounds: int, tokens: int, created: float) -> AcceptanceRecord:
    """One live sum, as a record without a reporter. `created`: when it was reported last, in Unix seconds."""
    method, drafter, policy, *_ = json.loads(identity)
    return AcceptanceRecord(
        method=method,
        drafter_version=drafter,
        policy_version=policy,
        rounds=rounds,
        emitted_tokens=tokens,
        created=created,
    )
