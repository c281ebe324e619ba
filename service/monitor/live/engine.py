"""One engine by itself: where its counts begin to differ from replay, and how."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from service.monitor.live.blocks import Block
from service.monitor.live.replays import Cell, Replays

#: Variance of log α that is assumed at least.
_LEAST: Final = 1e-8
#: Drafts that replay expects at a position where the engine has none, before they are called missing.
MISSING: Final = 20.0
#: Rounds in a row with nothing accepted after which an engine is dead, whatever its prompts may be.
DEAD_ROUNDS: Final = 1536
#: Standard errors by which a newer stretch must lie above half of a fall for the fall to be over.
OVER: Final = 3.0


@dataclass(frozen=True, slots=True)
class LiveRule:
    """When live and replay α differ.

    `dead_band`: a fall of log α that is ignored: the natural gap between engines and replay is below 3 %.
    `above_band`: the same for live above replay; engines that count beyond a response's end are above by nature.
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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Live against replay over some rounds. `log_ratio`: log(live α / replay α), with its standard `error`."""

    rounds: int
    live_alpha: float
    replay_alpha: float
    log_ratio: float
    error: float


@dataclass(frozen=True, slots=True)
class Matched:
    """A block with its replay, and both at the depth that they have in common.

    `rounds`, `tokens`, `expected`: of those prompts of the block that were replayed where it is `paired`, else of all.
    """

    block: Block
    cell: Cell
    rounds: int
    tokens: float
    expected: float
    replayed: float  # rounds of the replay that `expected` comes of
    paired: bool = False


def at_common_depth(block: Block, replays: Replays, rule: LiveRule, cell: Cell | None = None) -> Matched | None:
    """A block beside its replay, at the depth that both have; None where that cannot be told. `cell`: another's."""
    cell = cell or replays.get(block)
    if cell is None:
        return None
    depth, ours = _drafts(block, cell), len(cell.accepted) or rule.depth
    tokens: float = block.tokens
    if depth is not None and depth > ours:
        if not block.accepted:
            return None
        tokens, depth = block.rounds + sum(block.accepted[:ours]), None
    elif replays.paired and (depth is None or depth > ours - 0.01) and (pairs := cell.on_prompts_of(block)):
        emitted, expected, rounds, replayed = (math.fsum(column) for column in zip(*pairs, strict=True))
        return Matched(block, cell, int(rounds), emitted, expected, replayed, paired=True)
    alpha = cell.alpha(depth if depth is not None and depth < ours - 0.01 else None)
    return None if alpha is None else Matched(block, cell, block.rounds, tokens, alpha * block.rounds, cell.rounds)


def compared_depth(known: Matched, rule: LiveRule) -> float:
    """At how many drafts a round a block was compared with its replay."""
    depth, ours = _drafts(known.block, known.cell), len(known.cell.accepted) or rule.depth
    return float(ours) if depth is None else min(depth, float(ours))


def _drafts(block: Block, cell: Cell) -> float | None:
    """How many tokens the engine drafts a round. It may say more: positions that never accept one do not count."""
    depth = block.depth
    kept = [n for n in block.accepted if n > 0]
    if not kept or len(kept) >= len(cell.accepted) or len(kept) >= len(cell.reached):
        return depth
    at = len(kept)
    expected = kept[-1] * cell.accepted[at] / cell.reached[at] if cell.reached[at] > 0 else 0.0
    return float(at) if expected >= MISSING else depth


class Scan:
    """Sums over the newest blocks, one more with each call of `add`.

    `outliers`: whether a stretch may hold little but one prompt that is off (`Replays.outlier`): such a prompt by
    itself must stay within `OVER` standard errors.
    """

    def __init__(self, replays: Replays, *, outliers: bool = True) -> None:
        self._replays, self._outliers = replays, outliers
        self._tokens = self._expected = self._rounds = 0.0
        self._squares = self._outlier = 0.0  # variance of the tokens; tokens that one prompt may be off
        self._of: defaultdict[int, float] = defaultdict(float)

    def add(self, known: Matched) -> Stretch:
        """Take one block in; returns the stretch from it to the newest."""
        if known.paired and self._replays.paired is not None:
            spread, outlier = self._replays.paired
            self._squares += spread * known.expected
        else:
            spread, outlier = self._replays.spread or 0.0, self._replays.outlier
            cell = id(known.cell)
            before = self._of[cell]
            self._of[cell] = now = before + known.expected
            self._squares += (spread + known.cell.flips) * known.expected**2 / known.rounds
            self._squares += spread * (now * now - before * before) / known.cell.rounds
        self._outlier = max(self._outlier, outlier * self._outliers)
        self._tokens += known.tokens
        self._expected += known.expected
        self._rounds += known.rounds
        ratio = max(self._tokens, 1.0) / self._expected
        variance = (self._squares + (self._outlier / OVER) ** 2) / self._expected**2
        rounds, error = self._rounds, math.sqrt(max(variance, _LEAST))
        return Stretch(int(rounds), self._tokens / rounds, self._expected / rounds, math.log(ratio), error)


class _Prompts:
    """The two bounds of what replay expects of blocks whose prompts are not known.

    The lower one supposes that a block's prompts are the hardest of its policy version that make as many tokens, the
    upper one the easiest. `paired` blocks count as they are: their prompts are known.
    """

    def __init__(self, replays: Replays) -> None:
        self._replays = replays
        self._told = 0.0  # tokens expected of prompts that are told apart
        self._of: dict[int, tuple[Matched, float, float]] = {}  # by cell: a block, tokens expected, tokens emitted

    def add(self, known: Matched) -> None:
        """Take one block in."""
        if known.paired:
            self._told += known.expected
        else:
            _, expected, emitted = self._of.get(id(known.cell), (known, 0.0, 0.0))
            now = (known, expected + known.expected, emitted + max(known.block.tokens, 1))
            self._of[id(known.cell)] = now

    def explain(self, stretch: Stretch, rule: LiveRule) -> bool:
        """Whether the stretch, which is of these blocks, is within what is expected."""
        hardest = easiest = all_of_them = self._told
        for known, expected, emitted in self._of.values():
            share = min(1.0, emitted / max(self._replays.answered.get(known.block.policy_version, 0.0), 1.0))
            all_of_them += expected
            hardest += expected * known.cell.of_the_hardest(share)
            easiest += expected * known.cell.of_the_easiest(share)
        low = stretch.log_ratio + math.log(all_of_them / hardest) + rule.dead_band
        above = stretch.log_ratio + math.log(all_of_them / easiest) - rule.above_band
        return -rule.certain * stretch.error <= low and above <= rule.certain * stretch.error


def explained(newest_first: Iterable[Matched], replays: Replays, rule: LiveRule, *, suffixes: bool) -> bool:
    """Whether blocks may differ from replay because of their prompts. `suffixes`: and so may every newest part."""
    scan, prompts, stretch = Scan(replays), _Prompts(replays), None
    for one in newest_first:
        stretch = scan.add(one)
        prompts.add(one)
        if suffixes and not prompts.explain(stretch, rule):
            return False
    return stretch is None or prompts.explain(stretch, rule)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the blocks of one engine say by themselves. `explained`: its prompts may be why it is low or above."""

    kind: Literal["healthy", "unknown", "depth", "dead", "low", "above"]
    text: str
    stretch: Stretch | None = None
    blocks: tuple[Matched, ...] = ()  # that the finding is about
    before: tuple[Matched, ...] = ()  # older ones
    since: float | None = None
    explained: bool = False


def find(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> Finding:
    """Judge an engine by its own blocks, oldest first."""
    dead = _find_dead(blocks, replays, rule)
    if dead is not None and dead.kind != "unknown":
        return dead
    known = [found for block in blocks if (found := at_common_depth(block, replays, rule)) is not None]
    rounds = sum(k.rounds for k in known)
    if not known:
        text = "no replay α of what it drafts with, on rollouts of the same policy version, so far"
        return dead or Finding("unknown", text)
    if replays.spread is None:
        return dead or Finding("unknown", "too few rollouts are scored to say how far live and replay α may differ")
    if rounds < rule.min_rounds:
        return dead or Finding("unknown", f"{rounds} rounds so far; {rule.min_rounds} are needed to judge")
    rule = replace(rule, above_band=_above_band(known, replays, rule))
    begin, kind = _change(known, replays, rule)
    about, scan = known[begin:], Scan(replays)
    stretch = [scan.add(one) for one in reversed(about)][-1]
    if kind == "healthy":
        if dead is not None:
            return dead
        depth = other_depth(about, rule, "it accepts what replay says")
        if depth is not None:
            return Finding("depth", depth, stretch, tuple(about))
        return Finding("healthy", f"{_evidence(stretch)}: they agree", stretch, tuple(about))
    by_prompts = explained(reversed(about), replays, rule, suffixes=True)
    return Finding(kind, _evidence(stretch), stretch, tuple(about), tuple(known[:begin]), explained=by_prompts)


def _above_band(known: Sequence[Matched], replays: Replays, rule: LiveRule) -> float:
    """How far live α may lie above replay α. Stock engines count what a response's last round emits beyond its end.

    That is at most the depth in each response. Replay does not count it; an engine that trims says fewer tokens than
    its rounds and accepted drafts make.
    """
    trimmed = all(k.block.tokens < k.block.rounds + sum(k.block.accepted) for k in known)
    if trimmed or not replays.response_tokens:
        return rule.above_band
    return rule.above_band + math.log1p(rule.depth / replays.response_tokens)


def _change(
    known: Sequence[Matched], replays: Replays, rule: LiveRule
) -> tuple[int, Literal["healthy", "low", "above"]]:
    """Where the newest stretch that differs begins, and how; 0 and healthy where none does."""
    begin = 0
    while True:
        scan, stretches = Scan(replays), []
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
        over = [i for i in range(at) if sign * (stretches[i].log_ratio - half) / stretches[i].error > OVER]
        if not over:
            return len(known) - 1 - at, "low" if kind == "low" else "above"
        begin = len(known) - 1 - over[-1]


def _find_dead(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> Finding | None:
    """Nothing is accepted of what replay accepts, over more rounds than hard prompts explain, or over `DEAD_ROUNDS`.

    It needs no replay on rollouts of the same policy version: a worker may be far behind an engine that is dead. Where
    there is one of the engine's own prompts, that is what is accepted in replay.
    """
    version = blocks[-1].drafter_version
    overall, hidden = replays.alpha(version), False
    tokens = rounds = 0
    own: list[Matched] | None = []
    for block in reversed(blocks):
        if block.drafter_version != version:
            break
        tokens, rounds = tokens + block.tokens, rounds + block.rounds
        known = at_common_depth(block, replays, rule)
        own = [*own, known] if own is not None and known is not None and known.paired else None
        replayed = math.fsum(k.expected for k in own) / math.fsum(k.rounds for k in own) if own else overall
        if rounds < rule.min_rounds:
            continue
        if tokens > rule.live_alpha * rounds:
            break
        live = tokens / rounds
        if replayed is None:
            return Finding("unknown", f"live α {live:.2f}, but no replay α of this version to compare with")
        text = f"live α {live:.2f} over {rounds:,} rounds against replay α {replayed:.2f}"
        if replayed <= rule.replay_alpha:
            return Finding("healthy", f"{text}: they agree; it is bad, not dead")
        ratio = math.log(max(live, 0.5) / replayed)
        variance = ((replays.spread or 0.0) + (replays.outlier / OVER / replayed) ** 2 / rounds) / rounds
        if ratio + rule.dead_band < -rule.certain * math.sqrt(variance) or rounds >= DEAD_ROUNDS:
            stretch = Stretch(rounds, live, replayed, ratio, math.sqrt(max(variance, 1 / rounds)))
            return Finding("dead", text, stretch, since=blocks[-1].since)
        hidden = True
    return Finding("unknown", f"{text}: a hard prompt may do that") if hidden else None


def _evidence(stretch: Stretch) -> str:
    return (
        f"live α {stretch.live_alpha:.2f} over {stretch.rounds:,} rounds against replay α {stretch.replay_alpha:.2f} "
        f"({_percent(stretch.log_ratio)} ± {100 * 2 * stretch.error:.0f} %)"
    )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.0f} %"


def other_depth(known: Sequence[Matched], rule: LiveRule, beside: str) -> str | None:
    """The verdict where the newest block has another depth than the service replays. `beside`: what else to say."""
    newest = known[-1]
    depth, ours = _drafts(newest.block, newest.cell), len(newest.cell.accepted) or rule.depth
    if depth is None or abs(depth - ours) <= 0.25:
        return None
    return (
        f"it drafts {depth:.2g} tokens a round where the service replays and trains {ours}; at the depth that "
        f"both have {beside}"
    )


def was_sound(found: Finding, replays: Replays) -> bool:
    """Whether the engine accepted, before it fell, more than halfway to what it accepts now."""
    if not found.before or found.stretch is None:
        return False
    scan = Scan(replays)
    return [scan.add(one) for one in found.before][-1].log_ratio > found.stretch.log_ratio / 2
