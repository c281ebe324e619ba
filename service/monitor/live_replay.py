"""Live α of every engine beside replay α of the same drafter version, on rollouts of the same policy version.

Both must agree: replay says what the drafter would accept with the trainer's features, an engine counts what it accepts
with its own. Where they differ beyond chance, the difference names who is to blame:

    positions beyond K' all missing         depth             the engine drafts another number of tokens
    nothing accepted                        dead              a weight sync, sleep or refit lost the drafter
    lower since a drafter version or a
      moment, or as another version would   stale weights     the engine does not run what it says
    lower from the start, or from the
      second draft on                       engine features   aux layers or feedback are wrong in the engine
    lower in all engines, or falling while
      replay heals, or live above replay    trainer features  what is replayed and trained on is wrong

The rule is sequential. Of each engine the last stretches of rounds (`Block`) are kept; after every report all of its
newest stretches are tested at once, so that a change shows however old the engine is. The statistic of a stretch is

    d = log(tokens emitted / sum of rounds_i · replay α_i),   i: drafter version and policy version
    var d = (s + r)/rounds + s · sum w_i²/replayed rounds_i,   w_i: share of the expected tokens

with s the variance of log α that one round's worth of text brings (prompts differ: measured between them), and r that
of the coin flips in one round. It is called low where
(d + `dead_band`)/sd < -`certain`: a scan over change points with a fixed limit. Its error over a whole run is measured,
not derived: benchmarks/live_replay.py.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from service.monitor.records import AcceptanceRecord, DrafterSums, ScoreRecord

#: Score records that are read: the replay side.
REPLAYED_BATCHES: Final = 256
#: A block is closed at so many rounds; a report with more is a block of its own.
_BLOCK_ROUNDS: Final = 256
#: Blocks kept per engine. Beyond them the oldest neighbours are joined, or the oldest is forgotten.
KEPT_BLOCKS: Final = 32
_JOINED_ROUNDS: Final = 4096
_NEWEST_APART: Final = 8
#: Draft positions that are kept; the service replays no more.
_POSITIONS: Final = 16
#: An engine that accepts less drafts nothing of use: whether it has done so without a break is kept with its blocks.
_NOTHING_ACCEPTED: Final = 1.05
#: Fewest prompts from which it is measured how unlike they are.
_CLUSTERS: Final = 8
#: Variance of log α below which nothing is told from nothing.
_LEAST: Final = 1e-8
#: Variance of clustered rounds over that of rollouts taken for independent, where no sums by prompt are known.
_DESIGN_EFFECT: Final = 4.0
#: Variance of log α from one round's coin flips, at most, for depths up to 4, where no positions are known.
_COIN_FLIPS: Final = 0.45
#: Drafts that replay expects at a position where the engine has none, before they are called missing.
_MISSING: Final = 20.0
#: Standard errors by which a newer stretch must lie above half of a fall for the fall to be over.
_OVER: Final = 3.0
#: What moves a prompt's α moves the shares of its first drafts and of its later ones alike, but for so much of it.
_COMMON: Final = 0.25
#: Share of the judged engines that makes a trouble everybody's.
_ALL: Final = 0.8
#: Pushes that did not revive a drafter before it is said that pushing does not help.
UNREVIVED_PUSHES: Final = 3
_LONGEST_PAUSE_SECONDS: Final = 1800.0
#: An engine that has reported nothing for so long is not judged.
EVIDENCE_SECONDS: Final = 1800.0

VerdictName = Literal["healthy", "unknown", "depth", "dead", "stale weights", "engine features", "trainer features"]


class _Settings(Protocol):
    @property
    def depth(self) -> int: ...
    @property
    def dead_min_rounds(self) -> int: ...
    @property
    def dead_live_alpha(self) -> float: ...
    @property
    def dead_replay_alpha(self) -> float: ...
    @property
    def push_again_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LiveRule:
    """When live and replay α differ.

    `dead_band`: a fall of log α that is not worth a word: the natural gap between engines and replay is below 3 %.
    `above_band`: the same for live above replay, where engines that do not count trimmed tokens are by nature.
    `certain`: standard errors. `depth`: K that the service replays. `min_rounds`, `live_alpha`, `replay_alpha`: a
    drafter is dead that emits at most `live_alpha` over `min_rounds` and more than `replay_alpha` in replay.
    `push_again_seconds`: pause after the first push; it doubles with each one that does not help, up to 30 min.
    """

    depth: int = 4
    min_rounds: int = 200
    live_alpha: float = 1.05
    replay_alpha: float = 1.3
    push_again_seconds: float = 30.0
    dead_band: float = 0.04
    above_band: float = 0.15
    certain: float = 4.5

    @classmethod
    def of(cls, settings: _Settings) -> LiveRule:
        """The rule of a service with these settings."""
        return cls(
            depth=settings.depth,
            min_rounds=settings.dead_min_rounds,
            live_alpha=settings.dead_live_alpha,
            replay_alpha=settings.dead_replay_alpha,
            push_again_seconds=settings.push_again_seconds,
        )


# --- the live side
@dataclass(frozen=True, slots=True)
class Block:
    """What one engine counted with one drafter and policy version over a stretch of rounds.

    `tokens`: emitted. `drafted`: None where it is not known. `accepted`: by position, empty where it is not known.
    `since`: Unix seconds; since when the engine has accepted nothing, or without a break something, up to this block.
    """

    drafter_version: str
    policy_version: int
    rounds: int
    tokens: int
    drafted: int | None
    accepted: tuple[int, ...]
    since: float

    @property
    def alpha(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds

    @property
    def depth(self) -> float | None:
        """Tokens drafted per round; None where nobody knows."""
        if self.drafted:
            return self.drafted / self.rounds
        return float(len(self.accepted)) if self.accepted else None

    def joins(self, other: Block) -> bool:
        """Whether both are of one drafter and policy version, and of one kind."""
        same = (self.drafter_version, self.policy_version, self._idle) == (
            other.drafter_version,
            other.policy_version,
            other._idle,
        )
        return (
            same and bool(self.accepted) == bool(other.accepted) and (self.drafted is None) == (other.drafted is None)
        )

    @property
    def _idle(self) -> bool:
        return self.alpha <= _NOTHING_ACCEPTED

    def __add__(self, newer: Block) -> Block:
        long, short = sorted((self.accepted, newer.accepted), key=len, reverse=True)
        padded = (*short, *[0] * (len(long) - len(short)))
        drafted = None if self.drafted is None or newer.drafted is None else self.drafted + newer.drafted
        return replace(
            self,
            rounds=self.rounds + newer.rounds,
            tokens=self.tokens + newer.tokens,
            drafted=drafted,
            accepted=tuple(a + b for a, b in zip(long, padded, strict=True)),
        )


def counted(blocks: Sequence[Block], more: AcceptanceRecord) -> tuple[Block, ...]:
    """`blocks` (oldest first) with what a report counted more than the one before it. Never more than `KEPT_BLOCKS`."""
    tokens = more.emitted
    if not more.ours or more.rounds <= 0 or tokens is None or more.policy_version is None:
        return tuple(blocks)
    if more.accepted_tokens is not None:
        tokens = min(tokens, more.accepted_tokens + more.rounds)  # no engine emits more
    new = Block(
        str(more.drafter_version),
        more.policy_version,
        more.rounds,
        tokens,
        more.drafted_tokens,
        _positions(more),
        more.reported,
    )
    last = blocks[-1] if blocks else None
    if last is not None and last._idle == new._idle:
        new = replace(new, since=last.since)
    if last is not None and last.rounds < _BLOCK_ROUNDS and last.joins(new):
        return (*blocks[:-1], last + new)
    kept = [*blocks, new]
    if len(kept) > KEPT_BLOCKS:
        _shorten(kept)
    return tuple(kept[-KEPT_BLOCKS:])


def _positions(more: AcceptanceRecord) -> tuple[int, ...]:
    """Counts by position; empty where they contradict the others."""
    found = more.accepted_per_position
    falling = all(a >= b for a, b in zip((more.rounds, *found), found, strict=False))
    return found[:_POSITIONS] if falling and sum(found) == more.accepted_tokens else ()


def _shorten(blocks: list[Block]) -> None:
    """Join the oldest neighbours that may be, of all but the newest blocks."""
    for at in range(len(blocks) - _NEWEST_APART - 1):
        if blocks[at].joins(blocks[at + 1]) and blocks[at].rounds + blocks[at + 1].rounds <= _JOINED_ROUNDS:
            blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
            return


# --- the replay side
@dataclass(frozen=True, slots=True)
class _Cell:
    """Replay of one drafter version on the rollouts of one policy version."""

    tokens: float
    rounds: float
    accepted: tuple[float, ...]
    reached: tuple[float, ...]

    def alpha(self, depth: float | None = None) -> float | None:
        """Tokens per round, for an engine that drafts `depth` tokens; None where that cannot be told."""
        if depth is None or depth >= len(self.accepted) > 0:
            return self.tokens / self.rounds
        if not self.accepted:
            return None
        whole = int(depth)
        kept = math.fsum(self.accepted[:whole]) + (depth - whole) * self.accepted[whole]
        return 1.0 + kept / self.rounds

    @property
    def flips(self) -> float:
        """Variance of log α from the coin flips of one round: E[a²] = sum (2i + 1) P_i of the drafts kept."""
        if not self.accepted:
            return _COIN_FLIPS
        mean = math.fsum(self.accepted) / self.rounds
        square = math.fsum((2 * i + 1) * kept for i, kept in enumerate(self.accepted)) / self.rounds
        return max(square - mean * mean, 0.0) / (1.0 + mean) ** 2


class Replays:
    """Replay of every drafter version that was scored of late, by policy version.

    `spread`: variance of log α that one round's worth of text brings; None where there are too few rollouts to say.
    """

    def __init__(self, scores: Iterable[ScoreRecord]) -> None:
        found: defaultdict[tuple[str, int | None], list[_Cell]] = defaultdict(list)
        prompts: defaultdict[tuple[str, int | None], DrafterSums] = defaultdict(lambda: DrafterSums(0.0, 0.0))
        rollouts: list[DrafterSums] = []
        for score in sorted(scores, key=lambda one: one.arrival):
            for version, cell in _replayed(score):
                found[version, score.policy_version].append(cell)
            for one in score.replayed or ():
                if one.version == score.drafter_version:  # pooled, for a batch may be of one prompt
                    prompts[one.version, score.policy_version] += one.sums
            rollouts += [sums for sums in [score.sums("served")] if sums is not None]
        self._cells = {key: _pooled(cells) for key, cells in found.items()}
        self._of: defaultdict[int | None, dict[str, _Cell]] = defaultdict(dict)
        for (version, policy), cell in self._cells.items():
            self._of[policy][version] = cell
        spread = _spread([*prompts.values()], 1.0)
        self.spread = _spread(rollouts, _DESIGN_EFFECT) if spread is None else spread
        responses = math.fsum(sums.rollouts for sums in rollouts)
        #: Tokens that rounds emit in one response, on average; None where nobody knows.
        self.response_tokens = math.fsum(sums.tokens for sums in rollouts) / responses if responses > 0 else None

    def get(self, block: Block) -> _Cell | None:
        """Replay of the block's drafter version on rollouts of its policy version."""
        return self._cells.get((block.drafter_version, block.policy_version))

    def others(self, block: Block) -> Mapping[str, _Cell]:
        """Replay of the other versions that were scored on rollouts of the block's policy version."""
        return {v: c for v, c in self._of.get(block.policy_version, {}).items() if v != block.drafter_version}

    def survival(self, drafter_version: str) -> list[float]:
        """Share of a version's rounds that keep the first draft, the first two, ...; empty where nobody knows."""
        cells = [cell for (version, _), cell in self._cells.items() if version == drafter_version]
        pooled = _pooled(cells) if cells else None
        return [] if pooled is None else [min(max(kept / pooled.rounds, 0.0), 1.0) for kept in pooled.accepted]

    def alpha(self, drafter_version: str) -> float | None:
        """Replay α of a version over all policy versions."""
        cells = [cell for (version, _), cell in self._cells.items() if version == drafter_version]
        return sum(c.tokens for c in cells) / sum(c.rounds for c in cells) if cells else None


def _replayed(score: ScoreRecord) -> Iterable[tuple[str, _Cell]]:
    if score.replayed is not None:
        for one in score.replayed:
            if one.sums.rounds > 0 and one.sums.tokens > 0:
                yield one.version, _Cell(one.sums.tokens, one.sums.rounds, one.accepted, one.reached)
    elif score.drafter_version is not None and (sums := score.sums("served")) is not None and sums.tokens > 0:
        yield score.drafter_version, _Cell(sums.tokens, sums.rounds, (), ())


def _pooled(cells: Sequence[_Cell]) -> _Cell:
    """Sum of cells; positions only where all have as many."""
    alike = len({(len(c.accepted), len(c.reached)) for c in cells}) == 1
    accepted = tuple(map(math.fsum, zip(*(c.accepted for c in cells), strict=True))) if alike else ()
    reached = tuple(map(math.fsum, zip(*(c.reached for c in cells), strict=True))) if alike else ()
    return _Cell(math.fsum(c.tokens for c in cells), math.fsum(c.rounds for c in cells), accepted, reached)


def _spread(clustered: Sequence[DrafterSums], effect: float) -> float | None:
    """Variance of log α times rounds, from sums by prompt, or by rollout with their design `effect`.

    With n clusters the estimate is off by sqrt(2/n) itself: it is taken two of these higher. None below `_CLUSTERS` of
    them.
    """
    known = [sums for sums in clustered if sums.rollouts >= 2 and sums.tokens > 0]
    clusters = math.fsum(s.rollouts for s in known) - len(known)
    if clusters < _CLUSTERS:
        return None
    residual = math.fsum(
        (s.tokens_squared - 2 * s.alpha * s.tokens_rounds + s.alpha**2 * s.rounds_squared)
        / s.alpha**2
        * s.rollouts
        / (s.rollouts - 1)
        for s in known
    )
    within = max(residual, 0.0) / math.fsum(s.rounds for s in known)
    return effect * within * (1 + 2 * math.sqrt(2 / clusters))


# --- one engine
@dataclass(frozen=True, slots=True)
class Stretch:
    """Live against replay over some rounds. `log_ratio`: log(live α / replay α), with its standard `error`."""

    rounds: int
    live_alpha: float
    replay_alpha: float
    log_ratio: float
    error: float


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """What is the matter with one engine. `text`: the evidence, a sentence. `since`: Unix seconds, of `dead` only."""

    reporter: str
    name: VerdictName
    text: str
    drafter_version: str | None = None
    stretch: Stretch | None = None
    since: float | None = None

    @property
    def sick(self) -> bool:
        """Whether what it counts says nothing about the drafter."""
        return self.name not in ("healthy", "unknown", "depth", "trainer features")

    @property
    def rounds(self) -> int:
        """Rounds that the verdict rests on."""
        return 0 if self.stretch is None else self.stretch.rounds


@dataclass(frozen=True, slots=True)
class _Known:
    """A block with its replay, and both at the depth that they have in common."""

    block: Block
    cell: _Cell
    tokens: float
    expected: float


def _at_common_depth(block: Block, replays: Replays, rule: LiveRule) -> _Known | None:
    cell = replays.get(block)
    if cell is None:
        return None
    depth, ours = _drafts(block, cell), len(cell.accepted) or rule.depth
    tokens: float = block.tokens
    if depth is not None and depth > ours:
        if not block.accepted:
            return None
        tokens, depth = block.rounds + sum(block.accepted[:ours]), None
    alpha = cell.alpha(depth if depth is not None and depth < ours - 0.01 else None)
    return None if alpha is None else _Known(block, cell, tokens, alpha * block.rounds)


def _drafts(block: Block, cell: _Cell) -> float | None:
    """Tokens that the engine drafts a round: fewer than it says where later positions never accept one."""
    depth = block.depth
    kept = [n for n in block.accepted if n > 0]
    if not kept or len(kept) >= len(cell.accepted) or len(kept) >= len(cell.reached):
        return depth
    at = len(kept)
    expected = kept[-1] * cell.accepted[at] / cell.reached[at] if cell.reached[at] > 0 else 0.0
    return float(at) if expected >= _MISSING else depth


class _Scan:
    """Sums over the newest blocks, one more with each call of `add`."""

    def __init__(self, spread: float) -> None:
        self._spread = spread
        self._tokens = self._expected = self._flips = self._rounds = 0.0
        self._replayed = 0.0  # sum of expected_i² / replayed rounds_i
        self._of: defaultdict[int, float] = defaultdict(float)

    def add(self, known: _Known) -> Stretch:
        """Take one block in; returns the stretch from it to the newest."""
        cell = id(known.cell)
        before = self._of[cell]
        self._of[cell] = now = before + known.expected
        self._replayed += (now * now - before * before) / known.cell.rounds
        self._tokens += known.tokens
        self._expected += known.expected
        self._rounds += known.block.rounds
        self._flips += known.cell.flips * known.block.rounds
        ratio = max(self._tokens, 1.0) / self._expected
        variance = (self._spread + self._flips / self._rounds) / self._rounds
        variance += self._spread * self._replayed / self._expected**2
        rounds, error = self._rounds, math.sqrt(max(variance, _LEAST))
        return Stretch(int(rounds), self._tokens / rounds, self._expected / rounds, math.log(ratio), error)


@dataclass(frozen=True, slots=True)
class _Finding:
    """What the blocks of one engine say by themselves."""

    kind: Literal["healthy", "unknown", "depth", "dead", "low", "above"]
    text: str
    stretch: Stretch | None = None
    blocks: tuple[_Known, ...] = ()  # that the finding is about
    before: tuple[_Known, ...] = ()  # older ones
    since: float | None = None


def _find(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> _Finding:
    """Judge an engine by its own blocks, oldest first."""
    dead = _find_dead(blocks, replays, rule)
    if dead is not None:
        return dead
    known = [found for block in blocks if (found := _at_common_depth(block, replays, rule)) is not None]
    rounds = sum(k.block.rounds for k in known)
    if not known:
        return _Finding("unknown", "no replay α of what it drafts with, on rollouts of the same policy version, so far")
    if replays.spread is None:
        return _Finding("unknown", "too few rollouts are scored to say how far live and replay α may differ")
    if rounds < rule.min_rounds:
        return _Finding("unknown", f"{rounds} rounds so far; {rule.min_rounds} are needed to judge")
    begin, kind = _change(known, replays.spread, replace(rule, above_band=_above_band(known, replays, rule)))
    about, scan = known[begin:], _Scan(replays.spread)
    stretch = [scan.add(k) for k in reversed(about)][-1]
    if kind == "healthy":
        depth = _other_depth(about, rule)
        if depth is not None:
            return _Finding("depth", depth, stretch, tuple(about))
        return _Finding("healthy", f"{_evidence(stretch)}: they agree", stretch, tuple(about))
    return _Finding(kind, _evidence(stretch), stretch, tuple(about), tuple(known[:begin]))


def _above_band(known: Sequence[_Known], replays: Replays, rule: LiveRule) -> float:
    """How far live α may lie above replay α. Stock engines count what a response's last round emits beyond its end.

    That is at most the depth in each response. Replay does not count it; an engine that trims says fewer tokens than
    its rounds and accepted drafts make.
    """
    trimmed = all(k.block.tokens < k.block.rounds + sum(k.block.accepted) for k in known)
    if trimmed or not replays.response_tokens:
        return rule.above_band
    return rule.above_band + math.log1p(rule.depth / replays.response_tokens)


def _change(known: Sequence[_Known], spread: float, rule: LiveRule) -> tuple[int, Literal["healthy", "low", "above"]]:
    """Where the newest stretch that differs begins, and how; 0 and healthy where none does."""
    begin = 0
    while True:
        scan, stretches = _Scan(spread), []
        for one in reversed(known[begin:]):
            stretches.append(scan.add(one))
        low = min(range(len(stretches)), key=lambda i: (stretches[i].log_ratio + rule.dead_band) / stretches[i].error)
        high = max(range(len(stretches)), key=lambda i: (stretches[i].log_ratio - rule.above_band) / stretches[i].error)
        if (stretches[low].log_ratio + rule.dead_band) / stretches[low].error < -rule.certain:
            at, sign, kind = low, 1.0, "low"
        elif (stretches[high].log_ratio - rule.above_band) / stretches[high].error > rule.certain:
            at, sign, kind = high, -1.0, "above"
        else:
            return (begin, "healthy")
        half = stretches[at].log_ratio / 2
        over = [i for i in range(at) if sign * (stretches[i].log_ratio - half) / stretches[i].error > _OVER]
        if not over:
            return len(known) - 1 - at, "low" if kind == "low" else "above"
        begin = len(known) - 1 - over[-1]


def _find_dead(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> _Finding | None:
    """The old rule, which needs no variance: nothing is accepted of what replay accepts."""
    tokens = rounds = 0
    for block in reversed(blocks):
        if block.drafter_version != blocks[-1].drafter_version:
            return None
        tokens, rounds = tokens + block.tokens, rounds + block.rounds
        if rounds >= rule.min_rounds:
            break
    if rounds < rule.min_rounds or tokens > rule.live_alpha * rounds:
        return None
    live, replayed = tokens / rounds, replays.alpha(blocks[-1].drafter_version)
    if replayed is None:
        return _Finding("unknown", f"live α {live:.2f}, but no replay α of this version to compare with")
    text = f"live α {live:.2f} over {rounds:,} rounds against replay α {replayed:.2f}"
    if replayed <= rule.replay_alpha:
        return _Finding("healthy", f"{text}: they agree; it is bad, not dead")
    stretch = Stretch(rounds, live, replayed, math.log(max(live, 0.5) / replayed), 1 / math.sqrt(rounds))
    return _Finding("dead", text, stretch, since=blocks[-1].since)


def _evidence(stretch: Stretch) -> str:
    return (
        f"live α {stretch.live_alpha:.2f} over {stretch.rounds:,} rounds against replay α {stretch.replay_alpha:.2f} "
        f"({_percent(stretch.log_ratio)} ± {100 * 2 * stretch.error:.0f} %)"
    )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.0f} %"


def _other_depth(known: Sequence[_Known], rule: LiveRule) -> str | None:
    """What to say where the newest block was drafted at another depth than the service replays."""
    newest = known[-1]
    depth, ours = _drafts(newest.block, newest.cell), len(newest.cell.accepted) or rule.depth
    if depth is None or abs(depth - ours) <= 0.25:
        return None
    return (
        f"it drafts {depth:.2g} tokens a round where the service replays and trains {ours}; at the depth that "
        "both have it accepts what replay says"
    )


# --- the shape
@dataclass(frozen=True, slots=True)
class Shape:
    """log(live / replay) of the share that is accepted of the drafts that are verified: the first, and the later."""

    first: float
    later: float
    error: float  # of the difference


def _shape(known: Sequence[_Known], spread: float) -> Shape | None:
    """None where too little is known by position."""
    depth = min((min(len(k.block.accepted), len(k.cell.accepted), len(k.cell.reached)) for k in known), default=0)
    if depth < 2:
        return None
    rounds = float(sum(k.block.rounds for k in known))
    live_first = float(sum(k.block.accepted[0] for k in known))
    live_later = float(sum(sum(k.block.accepted[1:depth]) for k in known))
    first = math.fsum(k.block.rounds * _share(k.cell, 0) for k in known)
    later = math.fsum(k.block.accepted[j - 1] * _share(k.cell, j) for k in known for j in range(1, depth))
    if min(live_first, first, later) < _MISSING:
        return None
    chances = 1 / max(live_first, 1.0) + 1 / max(live_later, 1.0) + 1 / later
    return Shape(
        math.log(live_first / first),
        math.log(max(live_later, 0.5) / later),
        math.sqrt(chances + _COMMON * spread / rounds),
    )


def _share(cell: _Cell, position: int) -> float:
    return cell.accepted[position] / cell.reached[position] if cell.reached[position] > 0 else 0.0


def _only_later(shape: Shape | None) -> bool:
    """The first draft is what it should be, and the later ones are not."""
    if shape is None:
        return False
    return shape.first > 0.25 * shape.later and shape.later - shape.first < -4.0 * shape.error


def _fell_while_replay_healed(known: Sequence[_Known], spread: float) -> bool:
    """Whether live fell from one version to a newer one, and replay rose, both beyond chance."""
    by_version: dict[str, list[_Known]] = {}
    for one in known:
        by_version.setdefault(one.block.drafter_version, []).append(one)
    sides = []
    for found in by_version.values():
        rounds = float(sum(k.block.rounds for k in found))
        replayed = math.fsum({id(k.cell): k.cell.rounds for k in found}.values())
        live, expected = math.fsum(k.tokens for k in found), math.fsum(k.expected for k in found)
        sides.append((math.log(max(live, 1.0) / rounds), math.log(expected / rounds), rounds, replayed))
    if len(sides) < 2:
        return False
    new = sides[-1]
    for old in sides[:-1]:
        live_error = math.sqrt((spread + _COIN_FLIPS) * (1 / new[2] + 1 / old[2]))
        replay_error = math.sqrt(spread * (1 / new[3] + 1 / old[3]))
        if new[0] - old[0] < -3 * live_error and new[1] - old[1] > 3 * replay_error:
            return True
    return False


def _as_another(known: Sequence[_Known], replays: Replays) -> str | None:
    """The version that accepts, in replay, what this engine accepts; None where none does or nobody knows."""
    spread = replays.spread or 0.0
    names = set.intersection(*(set(replays.others(k.block)) for k in known)) if known else set()
    best = None
    for name in sorted(names):
        scan, stretch = _Scan(spread), None
        for one in known:
            cell = replays.others(one.block)[name]
            stretch = scan.add(_Known(one.block, cell, one.tokens, one.block.rounds * (cell.alpha() or 1.0)))
        if stretch is not None and abs(stretch.log_ratio) < 2 * stretch.error and stretch.error < 0.1:
            distance = abs(stretch.log_ratio) / stretch.error
            best = min(best or (distance, name), (distance, name))
    return None if best is None else best[1]


# --- all engines
@dataclass(frozen=True, slots=True)
class Watch:
    """What all engines' counts say. `hold`: why nothing may be published now; None where it may."""

    engines: tuple[EngineVerdict, ...] = ()
    hold: str | None = None

    def get(self, reporter: str) -> EngineVerdict | None:
        """The verdict on one engine."""
        return next((one for one in self.engines if one.reporter == reporter), None)

    @property
    def sick(self) -> frozenset[tuple[str, str | None]]:
        """Reporter and drafter version of the engines whose counts are no evidence about the drafter."""
        return frozenset((one.reporter, one.drafter_version) for one in self.engines if one.sick)

    @property
    def gap(self) -> Stretch | None:
        """Live against replay over all engines that are judged and not sick; None where there are none."""
        found = [e.stretch for e in self.engines if e.stretch is not None and not e.sick]
        rounds = sum(s.rounds for s in found)
        if not rounds:
            return None
        live = math.fsum(s.live_alpha * s.rounds for s in found) / rounds
        replayed = math.fsum(s.replay_alpha * s.rounds for s in found) / rounds
        # The replay side is the same for all of them, so their errors do not shrink like independent ones.
        error = math.fsum(s.error * s.rounds for s in found) / rounds
        return Stretch(rounds, live, replayed, math.log(live / replayed) if live > 0 else -math.inf, error)


def watch(engines: Mapping[str, Sequence[Block]], replays: Replays, rule: LiveRule) -> Watch:
    """Judge all engines: their blocks by reporter, oldest first."""
    findings = {reporter: _find(blocks, replays, rule) for reporter, blocks in engines.items() if blocks}
    judged = {r: f for r, f in findings.items() if f.kind != "unknown"}
    above = [r for r, f in judged.items() if f.kind == "above"]
    together = _together(engines, judged, replays, rule)
    all_above = len(above) >= _ALL * len(judged) > 0
    verdicts = []
    for reporter, found in sorted(findings.items()):
        name, text = _named(found, replays, together=together, all_above=all_above)
        verdicts.append(
            EngineVerdict(reporter, name, text, engines[reporter][-1].drafter_version, found.stretch, found.since)
        )
    return Watch(tuple(verdicts), _hold(verdicts, together=together, judged=len(judged)))


def _together(
    engines: Mapping[str, Sequence[Block]], judged: Mapping[str, _Finding], replays: Replays, rule: LiveRule
) -> bool:
    """Whether all engines are low: nearly all of them each by itself, or the other ones as one sum.

    The sum is over what they counted since the first low one fell: it shows sooner than each of them.
    """
    low = [r for r, found in judged.items() if found.kind == "low"]
    others = [r for r, found in judged.items() if found.kind not in ("low", "dead")]
    alive = sum(found.kind != "dead" for found in judged.values())
    if not low or alive < 2:
        return False
    if len(others) <= (1 - _ALL) * alive:
        return True
    began = min(judged[r].blocks[0].block.policy_version for r in low)
    scan, found = _Scan(replays.spread or 0.0), None
    for reporter in others:
        for block in engines[reporter]:
            if block.policy_version >= began and (known := _at_common_depth(block, replays, rule)) is not None:
                found = scan.add(known)
    return found is not None and (found.log_ratio + rule.dead_band) / found.error < -_OVER


def _named(found: _Finding, replays: Replays, *, together: bool, all_above: bool) -> tuple[VerdictName, str]:
    if found.kind in ("healthy", "unknown", "depth", "dead"):
        return found.kind, found.text
    if found.kind == "above":
        if all_above:
            blame = "the trainer's features or log-probabilities that are replayed are wrong, or of other weights"
            return "trainer features", f"{found.text}: more than the drafter could accept; {blame}"
        return "unknown", f"{found.text}: other engines agree with replay, so its traffic is easier than the trainer's"
    spread = replays.spread or 0.0
    if _fell_while_replay_healed([*found.before, *found.blocks], spread):
        blame = "live fell from version to version while replay rose: it trains on features that engines do not have"
        return "trainer features", f"{found.text}: {blame}"
    if _only_later(_shape(found.blocks, spread)):
        blame = "its first drafts are accepted as in replay and the later ones are not: what it feeds back is wrong"
        return "engine features", f"{found.text}: {blame}"
    if together:
        blame = "so it is in all engines; the trainer's features are wrong, or the weights that the service serves"
        return "trainer features", f"{found.text}: {blame}"
    other = _as_another(found.blocks, replays)
    if other is not None:
        return "stale weights", f"{found.text}: it accepts what {other} would"
    if _was_sound(found, spread):
        versions = {k.block.drafter_version for k in found.before}
        new = found.blocks[0].block.drafter_version not in versions
        began = "with this version" if new else "in the middle of a version"
        return "stale weights", f"{found.text}: it began {began}, so the engine does not run the weights that it names"
    blame = "so it has been from its first rounds: aux layers in another order, or other states than the trainer sends"
    return "engine features", f"{found.text}: {blame}"


def _was_sound(found: _Finding, spread: float) -> bool:
    """Whether the engine accepted, before it fell, significantly more than halfway to what it accepts now."""
    if not found.before or found.stretch is None:
        return False
    scan = _Scan(spread)
    before = [scan.add(one) for one in found.before][-1]
    return (before.log_ratio - found.stretch.log_ratio / 2) / before.error > _OVER


def _hold(verdicts: Sequence[EngineVerdict], *, together: bool, judged: int) -> str | None:
    blamed = [v for v in verdicts if v.name == "trainer features"]
    if not blamed:
        blamed = [v for v in verdicts if v.sick] if together else []
    if not blamed:
        return None
    worst = max(blamed, key=lambda v: v.rounds)
    return f"live and replay α disagree in {len(blamed)} of {judged} engines: {worst.reporter}: {worst.text}"


# --- pushing a dead drafter again
def push_is_due(rule: LiveRule, verdict: EngineVerdict, pushes: Sequence[float], now: float) -> bool:
    """Whether to push again what `verdict` calls dead or stale: at once, then after 30 s, 1, 2, ... 30 min.

    `pushes`: times of the last ones, oldest first. Only those count that did not help: since the engine went wrong.
    """
    failed = failed_pushes(verdict, pushes)
    if not failed:
        last = max((when for when in pushes if when <= now), default=None)
        return last is None or now - last >= rule.push_again_seconds
    pause = min(rule.push_again_seconds * 2.0 ** (len(failed) - 1), _LONGEST_PAUSE_SECONDS)
    # A clock that was set back: the last push is ahead of now, and a dead engine need not wait for it.
    return not 0 <= now - failed[-1] < pause


def failed_pushes(verdict: EngineVerdict, pushes: Sequence[float]) -> list[float]:
    """The pushes since which the engine has gone on accepting nothing."""
    return [when for when in pushes if verdict.since is not None and when > verdict.since]
