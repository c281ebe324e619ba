"""One engine by itself: where its counts begin to differ from replay, and how."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from service.monitor.live.blocks import Block
from service.monitor.live.hard import PromptsBehind, chance_of_hard
from service.monitor.live.replays import COVERED, Replays, VersionReplay

#: The variance of a log ratio is never taken to be lower.
_LEAST: Final = 1e-8
#: Where an engine accepts no draft at a position, and replay expects so many, it does not draft there.
MISSING: Final = 20.0
#: ... so many, where nothing is known of how hard its prompts are: of hard ones it accepts a sixth of that.
_UNDRAFTED: Final = 80.0
#: Rounds in a row with nothing accepted after which an engine is dead, however hard its prompts may be.
DEAD_ROUNDS: Final = 1536
#: An engine is not dead where all of its prompts are as hard as that by a chance above this.
_RARE: Final = 2e-5
#: By more than so many tokens a round a depth is another one.
_OTHER_DEPTH: Final = 0.25
#: Standard errors beyond which a single comparison is not chance. A scan makes many, and asks for `LiveRule.certain`.
SIGMAS: Final = 3.0


@dataclass(frozen=True, slots=True)
class LiveRule:
    """When live and replay α differ.

    `dead_band`: a fall of log α that is ignored; sound engines are less than 3 % below replay.
    `above_band`: the same for live above replay; engines that count beyond a response's end are above by nature.
    `certain`: standard errors beyond which a scan calls a difference real. `depth`: K that the service replays.
    `min_rounds`, `live_alpha`, `replay_alpha`: a drafter is dead if its live α is at most `live_alpha` over
    `min_rounds`, and its replay α above `replay_alpha`.
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

    def errors_above(self, log_ratio: float) -> float:
        """How many standard errors it lies above `log_ratio`."""
        return (self.log_ratio - log_ratio) / self.error


@dataclass(frozen=True, slots=True)
class Matched:
    """A block with its replay, both at the lower of their depths.

    `tokens`: emitted. `expected`: what replay expects instead. `paired`: `rounds`, `tokens` and `expected` are of those
    prompts of the block that were replayed; else of all.
    """

    block: Block
    replay: VersionReplay
    rounds: int
    tokens: float
    expected: float
    replayed: float  # rounds of the replay that `expected` comes of
    paired: bool = False


def at_common_depth(
    block: Block, replays: Replays, rule: LiveRule, replay: VersionReplay | None = None
) -> Matched | None:
    """Match a block with its replay, or with `replay` of another version, at the lower of their depths.

    Where an engine's depth varies, by the first draft of each round. None: there is no replay, or the deeper side has
    no counts by position.
    """
    replay = replay or replays.get(block)
    if replay is None:
        return None
    depth, ours = _drafted_depth(block, replay), len(replay.accepted) or rule.depth
    tokens: float = block.tokens
    if _depth_varies(block):
        tokens, depth = block.rounds + block.accepted[0], 1.0
    elif depth is not None and depth > ours:
        if not block.accepted:
            return None
        tokens, depth = block.rounds + sum(block.accepted[:ours]), None
    elif (own := _on_replayed_prompts(block, replay, replays, rule)) and own.rounds >= COVERED * block.rounds:
        return own
    alpha = replay.alpha(depth if depth is not None and depth < ours - 0.01 else None)
    return None if alpha is None else Matched(block, replay, block.rounds, tokens, alpha * block.rounds, replay.rounds)


def _on_replayed_prompts(block: Block, replay: VersionReplay, replays: Replays, rule: LiveRule) -> Matched | None:
    """What a block has of the prompts that were replayed; None: nothing is known, or it was drafted otherwise."""
    depth, ours = _drafted_depth(block, replay), len(replay.accepted) or rule.depth
    alike = replays.paired is not None and (depth is None or abs(depth - ours) <= 0.01)
    if not (alike and (pairs := replay.on_prompts_of(block))):
        return None
    emitted, expected, rounds, replayed = (math.fsum(column) for column in zip(*pairs, strict=True))
    return Matched(block, replay, int(rounds), emitted, expected, replayed, paired=True)


def compared_depth(matched: Matched, rule: LiveRule) -> float:
    """The depth at which a block was compared with its replay."""
    depth, ours = _drafted_depth(matched.block, matched.replay), len(matched.replay.accepted) or rule.depth
    if _depth_varies(matched.block):
        return 1.0
    return float(ours) if depth is None else min(depth, float(ours))


def _depth_varies(block: Block) -> bool:
    """Whether rounds of several depths are counted together: only the first draft is known to be in each of them.

    α at their mean depth is above their mean α, since each draft is accepted less often than the one before it.
    """
    return block.depth is not None and sum(kept > 0 for kept in block.accepted) > block.depth + _OTHER_DEPTH


def _drafted_depth(block: Block, replay: VersionReplay) -> float | None:
    """How many tokens the engine drafts per round; None: not known.

    It may report more than it drafts. The first position without an accepted draft ends the drafts if replay expects
    `_UNDRAFTED` there.
    """
    depth = block.depth
    kept = [n for n in block.accepted if n > 0]
    if not kept or len(kept) >= len(replay.accepted) or len(kept) >= len(replay.reached):
        return depth
    at = len(kept)
    expected = kept[-1] * replay.accepted[at] / replay.reached[at] if replay.reached[at] > 0 else 0.0
    return float(at) if expected >= _UNDRAFTED else depth


class Scan:
    """Sums over the newest blocks, one more with each call of `add`.

    `outliers`: widen the error so that one prompt which is far off (`Replays.outlier`) stays within `SIGMAS` standard
    errors by itself.
    """

    def __init__(self, replays: Replays, *, outliers: bool = True) -> None:
        self._replays, self._outliers = replays, outliers
        self._tokens = self._expected = self._rounds = 0.0
        self._squares = self._outlier = 0.0  # variance of the tokens; tokens that one prompt may be off
        self._of: defaultdict[int, float] = defaultdict(float)

    def add(self, matched: Matched) -> Stretch:
        """Add one block; returns the stretch from it to the newest."""
        if matched.paired and self._replays.paired is not None:
            spread, outlier = self._replays.paired
            self._squares += spread * matched.expected
        else:
            spread, outlier = self._replays.spread or 0.0, self._replays.outlier
            replay = id(matched.replay)
            before = self._of[replay]
            self._of[replay] = now = before + matched.expected
            self._squares += (spread + matched.replay.flips) * matched.expected**2 / matched.rounds
            # Two windows of versions that no engine named share one of them.
            own = matched.replay.rounds / (1 if matched.block.named else 2)
            self._squares += spread * (now * now - before * before) / own
        self._outlier = max(self._outlier, outlier * self._outliers)
        self._tokens += matched.tokens
        self._expected += matched.expected
        self._rounds += matched.rounds
        ratio = max(self._tokens, 1.0) / self._expected
        variance = (self._squares + (self._outlier / SIGMAS) ** 2) / self._expected**2
        rounds, error = self._rounds, math.sqrt(max(variance, _LEAST))
        return Stretch(int(rounds), self._tokens / rounds, self._expected / rounds, math.log(ratio), error)


class _PromptBounds:
    """Two bounds of what replay expects of an engine whose prompts are not known.

    The lower bound supposes the hardest prompts of the policy version that make as many tokens as the engine emitted,
    the upper bound the easiest. Of `paired` blocks the prompts are known: both bounds are what replay expects of these.
    """

    def __init__(self, replays: Replays) -> None:
        self._replays = replays
        self._paired = 0.0  # tokens expected of `paired` blocks
        self._of: dict[int, tuple[Matched, float, float]] = {}  # by replay: a block, tokens expected, tokens emitted

    def add(self, matched: Matched) -> None:
        """Add one block."""
        if matched.paired:
            self._paired += matched.expected
        else:
            _, expected, emitted = self._of.get(id(matched.replay), (matched, 0.0, 0.0))
            now = (matched, expected + matched.expected, emitted + max(matched.block.tokens, 1))
            self._of[id(matched.replay)] = now

    def hold(self, stretch: Stretch, rule: LiveRule) -> bool:
        """Whether the stretch of these blocks lies between the bounds, up to the rule's bands and errors."""
        hardest = easiest = all_of_them = self._paired
        for matched, expected, emitted in self._of.values():
            share = min(1.0, emitted / max(self._replays.answered.get(matched.block.policy_version, 0.0), 1.0))
            all_of_them += expected
            hardest += expected * matched.replay.hardest_ratio(share)
            easiest += expected * matched.replay.easiest_ratio(share)
        low = stretch.log_ratio + math.log(all_of_them / hardest) + rule.dead_band
        above = stretch.log_ratio + math.log(all_of_them / easiest) - rule.above_band
        return -rule.certain * stretch.error <= low and above <= rule.certain * stretch.error


def explained_by_prompts(newest_first: Iterable[Matched], replays: Replays, rule: LiveRule, *, suffixes: bool) -> bool:
    """Whether the choice of prompts can explain the difference. `suffixes`: also of every stretch up to the newest."""
    blocks = list(newest_first)
    if _agrees_on_replayed_prompts(blocks, replays, rule, alone=suffixes):
        return True
    scan, prompts, stretch = Scan(replays), _PromptBounds(replays), None
    for one in blocks:
        stretch = scan.add(one)
        prompts.add(one)
        if suffixes and not prompts.hold(stretch, rule):
            return False
    return stretch is None or prompts.hold(stretch, rule)


def _agrees_on_replayed_prompts(
    newest_first: Sequence[Matched], replays: Replays, rule: LiveRule, *, alone: bool = False
) -> bool:
    """Whether the prompts that were replayed agree, and lie clearly on replay's side of half of the difference.

    A trainer may drop prompts before it sends, such as those of which all answers failed. `alone`: of a single engine
    that counts by prompt nothing is said by other prompts than these, so it is enough that they are not clearly low.
    """
    found = (_on_replayed_prompts(one.block, one.replay, replays, rule) for one in newest_first)
    own, overall = stretch_over((one for one in found if one is not None), replays), stretch_over(newest_first, replays)
    known = all(one.block.by_prompt and one.replay.by_prompt for one in newest_first)
    if alone and known and overall is not None and overall.log_ratio < 0:
        return own is None or own.rounds < rule.min_rounds or own.errors_above(-rule.dead_band) > -SIGMAS
    if own is None or overall is None or own.rounds < rule.min_rounds:
        return False
    half = overall.log_ratio / 2
    if half < 0:
        return own.errors_above(half) > SIGMAS and own.errors_above(-rule.dead_band) > -SIGMAS
    return own.errors_above(half) < -SIGMAS and own.errors_above(rule.above_band) < SIGMAS


def stretch_over(newest_first: Iterable[Matched], replays: Replays) -> Stretch | None:
    """Live against replay over all of the blocks; None without one."""
    scan, stretch = Scan(replays), None
    for one in newest_first:
        stretch = scan.add(one)
    return stretch


@dataclass(frozen=True, slots=True)
class Finding:
    """What the blocks of one engine say by themselves. `explained`: its choice of prompts may be the reason.

    `blocks`: those that the finding rests on. `before`: the older ones. `since`: as `Block.since`, where it is dead.
    """

    kind: Literal["healthy", "unknown", "depth", "dead", "low", "above"]
    text: str
    stretch: Stretch | None = None
    blocks: tuple[Matched, ...] = ()
    before: tuple[Matched, ...] = ()
    since: float | None = None
    explained: bool = False


def find_difference(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> Finding:
    """Judge an engine by its own blocks, oldest first."""
    dead = _find_dead(blocks, replays, rule)
    if dead is not None and dead.kind != "unknown":
        return dead
    matched = [found for block in blocks if (found := at_common_depth(block, replays, rule)) is not None]
    rounds = sum(k.rounds for k in matched)
    if not matched:
        text = "no replay α of what it drafts with, on rollouts drawn evenly from the same policy version, so far"
        return dead or Finding("unknown", text)
    if replays.spread is None:
        return dead or Finding("unknown", "too few rollouts are scored to say how far live and replay α may differ")
    if rounds < rule.min_rounds:
        return dead or Finding("unknown", f"{rounds} rounds so far; {rule.min_rounds} are needed to judge")
    rule = replace(rule, above_band=_above_band(matched, replays, rule))
    begin, kind, stretch = _change(matched, replays, rule)
    about = matched[begin:]
    if kind == "healthy":
        if dead is not None:
            return dead
        depth = depth_differs(about, rule, "it accepts what replay says")
        if depth is not None:
            return Finding("depth", depth, stretch, tuple(about))
        return Finding("healthy", f"{_evidence(stretch)}: they agree", stretch, tuple(about))
    by_prompts = explained_by_prompts(reversed(about), replays, rule, suffixes=True)
    return Finding(kind, _evidence(stretch), stretch, tuple(about), tuple(matched[:begin]), explained=by_prompts)


def _above_band(matched: Sequence[Matched], replays: Replays, rule: LiveRule) -> float:
    """How far live α may lie above replay α.

    A stock engine counts tokens that a response's last round emits past its end, at most the depth per response. Replay
    does not count them. An engine that trims them reports fewer tokens than its rounds and accepted drafts add up to.
    """
    trimmed = all(k.block.tokens < k.block.rounds + sum(k.block.accepted) for k in matched)
    if trimmed or not replays.response_tokens:
        return rule.above_band
    return rule.above_band + math.log1p(rule.depth / replays.response_tokens)


def _change(
    matched: Sequence[Matched], replays: Replays, rule: LiveRule
) -> tuple[int, Literal["healthy", "low", "above"], Stretch]:
    """Where the newest stretch that differs begins, how, and the stretch. Healthy: from there on nothing differs.

    A stretch has `min_rounds`. Where its prompts are known it is low only if it is so with all rounds of these
    (`_with_rounds_before`): the last ones are those of the longest answers.
    """
    begin = 0
    while True:
        scan = Scan(replays)
        stretches = [scan.add(one) for one in reversed(matched[begin:])]
        told = [i for i, stretch in enumerate(stretches) if stretch.rounds >= rule.min_rounds]
        if not told:
            return begin, "healthy", stretches[-1]
        fallen = [
            i
            for i in told
            if _is_low(stretches[i], rule)
            and _is_low(_with_rounds_before(matched, len(matched) - 1 - i, replays, rule), rule)
        ]
        low = min(fallen, key=lambda i: stretches[i].errors_above(-rule.dead_band), default=None)
        high = max(told, key=lambda i: stretches[i].errors_above(rule.above_band))
        if low is not None:
            at, sign = low, 1.0
        elif stretches[high].errors_above(rule.above_band) > rule.certain:
            at, sign = high, -1.0
        else:
            return begin, "healthy", stretches[-1]
        half = stretches[at].log_ratio / 2
        over = [i for i in range(at) if sign * stretches[i].errors_above(half) > SIGMAS]  # the difference is over
        if not over:
            return len(matched) - 1 - at, "low" if sign > 0 else "above", stretches[at]
        begin = len(matched) - 1 - over[-1]


def _is_low(stretch: Stretch, rule: LiveRule) -> bool:
    return stretch.errors_above(-rule.dead_band) < -rule.certain


def _with_rounds_before(matched: Sequence[Matched], begin: int, replays: Replays, rule: LiveRule) -> Stretch:
    """The stretch from `begin` on, with what the blocks before it have of its prompts, where these are known.

    Replay of a prompt is of all its answers. Those that accept little take more rounds, and run when the others have
    ended: the last rounds of a sound engine lie below replay, and its first ones above, in all prompts alike.
    """
    scan, asked = Scan(replays), defaultdict[int, set[str]](set)
    for one in reversed(matched[begin:]):
        stretch = scan.add(one)
        if one.paired:
            asked[id(one.replay)].update(one.block.by_prompt)
    for one in reversed(matched[:begin]):
        known = asked[id(one.replay)]
        own = {prompt: counts for prompt, counts in one.block.by_prompt.items() if prompt in known}
        if found := _on_replayed_prompts(replace(one.block, by_prompt=own), one.replay, replays, rule):
            stretch = scan.add(found)
    return stretch


def _find_dead(blocks: Sequence[Block], replays: Replays, rule: LiveRule) -> Finding | None:
    """Whether it accepts nothing of what replay accepts, over more rounds than hard prompts explain, or `DEAD_ROUNDS`.

    The replay may be of any policy version, for a worker may be far behind the engine. Where the engine's own prompts
    were replayed, these alone count. None: it is not dead; other tests decide.
    """
    version = blocks[-1].drafter_version
    overall, hidden = replays.alpha(version), False
    tokens = rounds = 0
    own: list[Matched] | None = []
    behind = PromptsBehind(replays.siblings, replays.prompts.turns, blocks)
    for block in reversed(blocks):
        if block.drafter_version != version:
            break
        behind.add(block)
        tokens, rounds = tokens + block.tokens, rounds + block.rounds
        matched = at_common_depth(block, replays, rule)
        own = [*own, matched] if own is not None and matched is not None and matched.paired else None
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
        variance = ((replays.spread or 0.0) + (replays.outlier / SIGMAS / replayed) ** 2 / rounds) / rounds
        beyond = ratio + rule.dead_band < -rule.certain * math.sqrt(variance) or rounds >= DEAD_ROUNDS
        if beyond and (own or not _may_be_hard(behind, replays, tokens, rounds)):
            stretch = Stretch(rounds, live, replayed, ratio, math.sqrt(max(variance, 1 / rounds)))
            return Finding("dead", text, stretch, since=blocks[-1].since)
        hidden = True
    return Finding("unknown", f"{text}: a hard prompt may do that") if hidden else None


def _may_be_hard(behind: PromptsBehind, replays: Replays, tokens: int, rounds: int) -> bool:
    """Whether all prompts behind these rounds may be hard ones. False where their number is not known."""
    prompts = behind.prompts
    if prompts is None:
        return False
    return chance_of_hard(prompts, behind.beside, replays.prompts.hard_share(tokens, rounds)) > _RARE


def _evidence(stretch: Stretch) -> str:
    return (
        f"live α {stretch.live_alpha:.2f} over {stretch.rounds:,} rounds against replay α {stretch.replay_alpha:.2f} "
        f"({_percent(stretch.log_ratio)} ± {100 * 2 * stretch.error:.0f} %)"
    )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.0f} %"


def depth_differs(matched: Sequence[Matched], rule: LiveRule, beside: str) -> str | None:
    """Say that the newest block has another depth than the service replays, and `beside`; None where it has not."""
    newest = matched[-1]
    depth, ours = _drafted_depth(newest.block, newest.replay), len(newest.replay.accepted) or rule.depth
    if depth is None or abs(depth - ours) <= _OTHER_DEPTH:
        return None
    return (
        f"it drafts {depth:.2g} tokens a round where the service replays and trains {ours}; at the depth that "
        f"both have {beside}"
    )


def was_sound_before(found: Finding, replays: Replays) -> bool:
    """Whether the engine was less than half as low before as it is now: it fell, and was not low from its start."""
    before = stretch_over(found.before, replays)
    return before is not None and found.stretch is not None and before.log_ratio > found.stretch.log_ratio / 2
