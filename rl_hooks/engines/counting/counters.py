"""The engine's speculative-decoding counters, by drafter version.

Engines count rounds without saying which drafter proposed them. So the agent takes snapshots, and `Ledger` books each
difference under the drafter version that was loaded all the time between. Rounds around a swap belong to no single
version; they are counted apart.

An engine that restarts counts from 0, and so does its ledger: each *life* of the counts has a name, which reports
carry. A restart shows in the engine's own mark of its process (`Snapshot.life`). Its counters alone do not always show
it: they may have passed their earlier values by the next snapshot.

Pure: no clock, no network. α = 1 + accepted / rounds, the bonus token included; vLLM counts accepted tokens *before*
trimming at EOS, so `emitted_tokens` is what compares with replay α.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from rl_hooks.errors import MetricsError, cut
from rl_hooks.wire import COUNTED_PROMPTS

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

ROUNDS: Final = "vllm:spec_decode_num_drafts_total"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
#: Compares with replay α. Where an engine does not count it, it is computed from the next three.
EMITTED: Final = "draftalign:spec_decode_emitted_tokens_total"
GENERATED: Final = "vllm:generation_tokens_total"
#: Counts a request when its first token leaves; preferred to the next, which counts it when it has finished.
STARTED: Final = "vllm:time_to_first_token_seconds_count"
FINISHED: Final = "vllm:request_success_total"
POLICY_VERSION: Final = "draftalign_policy_version"
#: Engine steps; requests' waits from one step to their next, and the seconds of these; requests that run now.
STEPS: Final = "vllm:iteration_tokens_total_count"
OUTPUTS: Final = "vllm:inter_token_latency_seconds_count"
OUTPUT_SECONDS: Final = "vllm:inter_token_latency_seconds_sum"
RUNNING: Final = "vllm:num_requests_running"
#: When the process that counts began, and when its counter of rounds did, for where the first is missing. Another value
#: means another process.
STARTED_AT: Final = "process_start_time_seconds"
CREATED_AT: Final = "vllm:spec_decode_num_drafts_created"

_COUNTED: Final = (ROUNDS, DRAFTED, ACCEPTED, ACCEPTED_PER_POSITION)
_TIMES: Final = (OUTPUTS, STEPS, OUTPUT_SECONDS, RUNNING)
_NAMES: Final = (*_COUNTED, EMITTED, GENERATED, STARTED, FINISHED, POLICY_VERSION, *_TIMES, STARTED_AT, CREATED_AT)
_MAX_POSITIONS: Final = 64
#: Most characters in a page's lines of these names: 64 engine cores with 64 positions each have 0.7 million.
_MAX_COUNTED: Final = 1 << 20
_MAX_LINE: Final = 4096
#: Method of counts that were made with a published drafter.
OUR_DRAFTER: Final = "drafter"
#: Method of counts that were made with another client's drafter.
ANOTHERS_DRAFTER: Final = "anothers-drafter"
#: Buckets kept per engine: the oldest that the service has acknowledged goes first.
MAX_BUCKETS: Final = 32


@dataclass(frozen=True, slots=True)
class Counts:
    """Speculation over some stretch of time."""

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    #: Tokens that rounds emitted, after trimming; None where the engine does not count them.
    emitted_tokens: int | None = 0
    window_seconds: float = 0.0
    #: Tokens emitted and rounds by prompt (`COUNTED_DIGITS` of its hash); empty where the engine does not count so.
    by_prompt: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Requests that ended meanwhile, and those that run at its end; None where the engine does not tell.
    finished_requests: int | None = 0
    running_requests: int | None = None

    def __add__(self, other: Counts) -> Counts:
        told = self._tells_prompts and other._tells_prompts
        both = {p: self._of(p, 1, other) for p in (*self.by_prompt, *other.by_prompt)} if told else {}
        known = self.emitted_tokens is not None and other.emitted_tokens is not None
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Counts(
            self.rounds + other.rounds,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            tuple(a + b for a, b in positions),
            (self.emitted_tokens or 0) + (other.emitted_tokens or 0) if known else None,
            self.window_seconds + other.window_seconds,
            both if len(both) <= COUNTED_PROMPTS else {},
            _and(self.finished_requests, other.finished_requests, 1),
            other.running_requests,
        )

    @property
    def _tells_prompts(self) -> bool:
        """Whether its rounds are known by prompt. Once there were too many prompts, they no longer are."""
        return not self.rounds or bool(self.by_prompt)

    def _of(self, prompt: str, sign: int, other: Counts) -> tuple[int, int]:
        (tokens, rounds), (more, also) = (one.by_prompt.get(prompt, (0, 0)) for one in (self, other))
        return tokens + sign * more, rounds + sign * also

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict` after a trip through JSON."""
        by_prompt = {p: (int(tokens), int(rounds)) for p, (tokens, rounds) in document["by_prompt"].items()}
        positions = tuple(document["accepted_per_position"])
        return cls(**{**document, "accepted_per_position": positions, "by_prompt": by_prompt})

    @property
    def alpha(self) -> float:
        """Acceptance length, bonus included; nan before the first round."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else math.nan

    def since(self, earlier: Counts, seconds: float) -> Counts:
        """What was counted after `earlier`, `seconds` ago."""
        before = earlier.accepted_per_position[: len(self.accepted_per_position)]
        positions = zip_longest(self.accepted_per_position, before, fillvalue=0)
        known = self.emitted_tokens is not None and earlier.emitted_tokens is not None
        return Counts(
            self.rounds - earlier.rounds,
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - then for now, then in positions),
            (self.emitted_tokens or 0) - (earlier.emitted_tokens or 0) if known else None,
            seconds,
            {p: more for p in self.by_prompt if (more := self._of(p, -1, earlier))[1] > 0 and more[0] >= 0}
            if earlier._tells_prompts
            else {},
            _and(self.finished_requests, earlier.finished_requests, -1),
            self.running_requests,
        )

    def with_rounds_without_drafts(self) -> Counts:
        """The same, with the rounds in which nothing was proposed: they emit one token each.

        vLLM counts a round only if it had drafts. An EAGLE-3 drafter always has some; n-gram drafting mostly has none,
        and α over its drafted rounds alone would not be its acceptance length.
        """
        if self.emitted_tokens is None:
            return self
        return replace(self, rounds=max(self.rounds, self.emitted_tokens - self.accepted_tokens))


def _and(one: int | None, other: int | None, sign: int) -> int | None:
    return None if one is None or other is None else max(0, one + sign * other)


#: Drafter of rounds that are no version's: its weights were lost, or somebody has loaded others.
NO_VERSION: Final = ""
#: (drafter version, policy version, counts) of an engine that counts by both; None: it does not know that version.
ExactCounts: TypeAlias = tuple[tuple[str | None, int | None, Counts], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's counters at one moment. `policy_version` is None where the engine has no such gauge.

    `times`: waits of requests for their next step, engine steps, seconds of these waits, and the requests that run in
    each engine core; None where it does not tell.
    """

    counts: Counts
    policy_version: int | None = None
    times: tuple[float, float, float, float] | None = None
    #: The same by drafter and policy version, where the engine knows whose each round is; else None.
    exact: ExactCounts | None = None
    #: Mark of the process that counts, which a restart changes; None where it does not tell.
    life: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a /metrics page. Raises MetricsError naming a missing counter: absent is not zero."""
        samples = read_samples(text, _NAMES)
        rounds, drafted, accepted = (_total(samples, name) for name in (ROUNDS, DRAFTED, ACCEPTED))
        counts = Counts(
            rounds,
            drafted,
            accepted,
            per_position(samples, ACCEPTED_PER_POSITION),
            _emitted(samples),
            finished_requests=told(samples, FINISHED),
            running_requests=told(samples, RUNNING),
        )
        return cls(counts, _gauge(samples, POLICY_VERSION), _times(samples), life=_life(samples))

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict` after a trip through JSON."""
        times, exact = document["times"], document["exact"]
        return cls(
            Counts.load(document["counts"]),
            document["policy_version"],
            tuple(times) if isinstance(times, list) and len(times) == len(_TIMES) else None,
            None if exact is None else tuple((v, p, Counts.load(counts)) for v, p, counts in exact),
            document["life"],
        )

    @classmethod
    def of_exact(cls, exact: ExactCounts, gone: Counts, policy_version: int | None) -> Self:
        """Make one of counts by version. `gone`: what the engine counted for versions that it no longer lists."""
        total = sum((replace(counts, by_prompt={}) for _, _, counts in exact), gone)
        return cls(total, policy_version, exact=exact)

    def has_fallen(self, since: Snapshot) -> bool:
        """Whether a counter is below its earlier value: the engine has restarted."""
        now, before = (
            (one.rounds, one.accepted_tokens, one.drafted_tokens, *one.accepted_per_position)
            for one in (self.counts, since.counts)
        )
        return any(a < b for a, b in zip(now, before, strict=False))


@dataclass(slots=True)
class VersionCounts:
    """Everything counted for one drafter version under one policy version."""

    drafter_version: str
    policy_version: int | None
    counts: Counts = field(default_factory=Counts)
    #: How the engine speculated: with a drafter of ours, or as it names it ("ngram", "mtp").
    method: str = OUR_DRAFTER
    #: The counts, and whether the drafter was still loaded, as the service last acknowledged them.
    reported: tuple[int, bool] | None = None
    #: The ledger's `life` when this was counted.
    life: str = ""

    @property
    def unreported_rounds(self) -> int:
        """Rounds that the service has not acknowledged."""
        return self.counts.rounds - (self.reported[0] if self.reported else 0)


class Ledger:
    """Cumulative counts of one engine per (drafter version, policy version), since the engine or the ledger began.

    `life`: a random name of that time. It is no timestamp, because clocks of hosts differ and are set back.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str, str, int | None], VersionCounts] = {}
        self._dropped: set[tuple[str, str, str, int | None]] = set()  # in this life; counted again, they begin at 0
        self.unattributed_rounds = 0
        self.life = uuid.uuid4().hex

    def begin_life(self) -> None:
        """Count from 0, for instance after a restart of the engine. Counts stay until the service acknowledges them."""
        self.life = uuid.uuid4().hex
        self._dropped.clear()
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Drop what was counted in an earlier life, once the service has acknowledged it as final."""
        for key, one in list(self._buckets.items()):
            if one.life != self.life and one.reported == (one.counts.rounds, False):
                del self._buckets[key]

    def book(self, version: str, policy_version: int | None, counts: Counts, method: str = OUR_DRAFTER) -> None:
        """Add counts that were made with `version` loaded throughout.

        A difference across a policy update is booked under the newer policy: with synchronous RL, rounds resume only
        after the update; with asynchronous RL at most one scrape interval is misplaced. The first counts are kept, also
        those of no round: by their report the service knows that the engine is followed.
        """
        key = (self.life, method, version, policy_version)
        if counts.rounds == 0 and self._buckets and key not in self._buckets:
            return
        if key in self._dropped:  # a trainer went far back. The service takes counts that fall within a life for late
            self.begin_life()
            key = (self.life, method, version, policy_version)
        self._forget_ended()
        bucket = self._buckets.pop(key, None) or VersionCounts(version, policy_version, method=method, life=self.life)
        bucket.counts += counts
        self._buckets[key] = bucket  # last in order: most recently used
        while len(self._buckets) > MAX_BUCKETS:
            gone = min(self._buckets, key=lambda one: self._buckets[one].unreported_rounds > 0)  # the first of such
            self.set_aside(self._buckets.pop(gone).unreported_rounds)
            if gone[0] == self.life:
                self._dropped.add(gone)

    def set_aside(self, rounds: int) -> None:
        """Count rounds that belong to no single version."""
        self.unattributed_rounds += max(rounds, 0)

    def buckets(self) -> list[VersionCounts]:
        """Every bucket, least recently used first; so those of an earlier life come first."""
        return list(self._buckets.values())

    def version_counts(self, version: str) -> Counts:
        """Sum over policy versions."""
        return sum((b.counts for b in self._buckets.values() if b.drafter_version == version), Counts())

    def dump(self) -> list[dict[str, Any]]:
        """JSON form, so that cumulative counts survive a restart of the agent."""
        return [asdict(bucket) for bucket in self._buckets.values()]

    def restore(self, documents: Iterable[Mapping[str, Any]], life: str) -> None:
        """Inverse of `dump` in this `life`; raises KeyError or TypeError on anything else. All counts as unreported."""
        self.life = life
        for document in documents:
            version, policy, method, of = (
                str(document["drafter_version"]),
                document["policy_version"],
                str(document["method"]),
                str(document["life"]),
            )
            counts = Counts.load(document["counts"])
            self._buckets[of, method, version, policy] = VersionCounts(version, policy, counts, method, life=of)


def read_samples(text: str, names: tuple[str, ...]) -> dict[str, list[Sample]]:
    """The samples of a /metrics page, by name. Raises MetricsError where it is not in Prometheus's text format."""
    # An engine's page has thousands of lines and is read every second or so: parse only the ones that matter. They are
    # found one by one: a list of all lines of a hostile page would be far larger than the page.
    lines, size = list[str](), 0
    for found in _beginning(names).finditer(text):
        lines.append(found.group())
        size += len(lines[-1])
        if size > _MAX_COUNTED or len(lines[-1]) > _MAX_LINE:  # parsed, they take many times as much, and seconds
            raise MetricsError(
                f"/metrics: expected at most {_MAX_COUNTED} characters of the counters that are read, and {_MAX_LINE} "
                f"of a line, found {size} and {len(lines[-1])}; is this the engine's own page?"
            )
    # Here: an engine may have to say first where its processes share their counters, which this reads when imported.
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
    except (ValueError, IndexError) as error:
        raise MetricsError(f"/metrics is not in the Prometheus text format: {cut(str(error))}") from error
    return samples


@functools.cache
def _beginning(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"^(?:{'|'.join(map(re.escape, names))}).*$", re.MULTILINE)


def whole(name: str, value: float) -> int:
    """A sample of a counter; MetricsError where a counter cannot have that value."""
    if not 0 <= value < 2.0**53:
        raise MetricsError(f"{name} is {value}; expected a number from 0 to 2^53")
    return int(value)


def _total(samples: Mapping[str, list[Sample]], name: str) -> int:
    """Sum of a counter over its labels (data-parallel ranks, models)."""
    if name not in samples:
        raise MetricsError(
            f"the engine's /metrics has no {name}; start it with speculative decoding, or check that its version "
            "still uses this name (a missing counter is never read as 0)"
        )
    return sum(whole(name, sample.value) for sample in samples[name])


def told(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    """Sum over the labels of what α does not need; None where it is missing, or cannot be."""
    values = [sample.value for sample in samples.get(name, ())]
    return int(math.fsum(values)) if values and all(0 <= value < 2.0**53 for value in values) else None


def _emitted(samples: Mapping[str, list[Sample]]) -> int | None:
    if EMITTED in samples:
        return _total(samples, EMITTED)
    first = STARTED if STARTED in samples else FINISHED
    if GENERATED not in samples or first not in samples:
        return None
    # A request's first token comes from its prefill and belongs to no round.
    return _total(samples, GENERATED) - _total(samples, first)


def _gauge(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    return max(whole(name, sample.value) for sample in samples[name]) if name in samples else None


def _life(samples: Mapping[str, list[Sample]]) -> str | None:
    """A mark of the process; the first of several creations, because a counter of more labels may come later."""
    for name in (STARTED_AT, CREATED_AT):
        if name in samples:
            first = min(repr(sample.value) for sample in samples[name])
            return hashlib.sha256(f"{name} {first}".encode()).hexdigest()[:32]
    return None


def _times(samples: Mapping[str, list[Sample]]) -> tuple[float, float, float, float] | None:
    """Sums over the labels; None where one is missing or cannot be: α is counted all the same."""
    found = [[sample.value for sample in samples.get(name, ())] for name in _TIMES]
    if not all(values and all(0 <= value < 2.0**53 for value in values) for values in found):
        return None
    outputs, steps, seconds, running = map(math.fsum, found)
    return outputs, steps, seconds, running / len(found[-1])


def per_position(samples: Mapping[str, list[Sample]], name: str) -> tuple[int, ...]:
    """A counter by its label `position`, the first draft's first. Raises MetricsError where it is missing."""
    _total(samples, name)
    table: dict[int, int] = {}
    for sample in samples[name]:
        position = sample.labels.get("position", "")
        if not position.isdecimal() or len(position) > 4 or int(position) >= _MAX_POSITIONS:
            raise MetricsError(f"{name}: label position is {position!r:.200}; expected 0 to {_MAX_POSITIONS - 1}")
        table[int(position)] = table.get(int(position), 0) + whole(name, sample.value)
    return tuple(table.get(position, 0) for position in range(max(table) + 1))
