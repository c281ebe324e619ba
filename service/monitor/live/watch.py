"""Live α of every engine beside replay α of the same drafter version, on rollouts of the same policy version.

Both must agree. Replay says what would be accepted of the drafter's tokens with the trainer's features; an engine
counts what it accepts with its own features. Where they differ beyond chance, the shape of the difference names the
fault:

    positions beyond K' all missing         depth             the engine drafts another number of tokens
    nothing accepted                        dead              a weight sync, sleep or refit lost the drafter
    lower since a drafter version or a
      moment, or as another version would   stale weights     the engine does not run what it says
    lower from the start, or from the
      second draft on                       engine features   aux layers or feedback are wrong in the engine
    lower in all engines, or falling while
      replay rises, or live above replay    trainer features  what is replayed and trained on is wrong
    lower, not lower than with the hardest
      prompts, and not counted by prompt    lower             its prompts may be harder: no fault is named
    lower in all engines from the start,
      and batches hold a part of the tokens lower             the trainer may not send its hardest prompts

The rule is sequential. The last blocks of rounds (`Block`) of each engine are kept. Each report tests every stretch
that ends with the newest block, so that a change shows however old the engine is. The statistic of a stretch is

    d = log(tokens emitted / sum of rounds_i · replay α_i),   i: drafter version and policy version
    var d = (s + r)/rounds + s · sum w_i²/replayed rounds_i + (o/3/expected tokens)²,  w_i: share of the expected tokens

with s the variance of log α between prompts, for one round's worth of text, r that of the coin flips in one round, and
o the tokens by which one prompt alone may be off. Where an engine counts by prompt, both sums are over the prompts that
were replayed, and the variance is that of these differences (`Replays.paired`).

An engine is low where (d + `dead_band`)/sd < -`certain`: a scan over change points with a fixed limit. How often that
is false over a whole run is measured, not derived: benchmarks/live_replay.py.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from service.monitor.live.blocks import KEPT_BLOCKS, Block
from service.monitor.live.engine import (
    SIGMAS,
    Finding,
    LiveRule,
    Matched,
    Stretch,
    at_common_depth,
    compared_depth,
    depth_differs,
    explained_by_prompts,
    find_difference,
    stretch_over,
    was_sound_before,
)
from service.monitor.live.replays import COVERED, Replays
from service.monitor.live.shape import fell_while_replay_healed, only_later_drafts_differ, shape_of, version_that_fits

#: From this share of the engines on, a difference counts as one of all engines.
_ALL: Final = 0.8
#: After this number of pushes that revived no drafter, the headline says that pushing does not help.
UNREVIVED_PUSHES: Final = 3
_LONGEST_PAUSE_SECONDS: Final = 1800.0
#: An engine that has reported nothing for this time is not judged.
EVIDENCE_SECONDS: Final = 1800.0
VerdictName = Literal[
    "healthy", "unknown", "lower", "depth", "dead", "stale weights", "engine features", "trainer features"
]


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
        """Whether the engine itself is at fault: its counts say nothing about the drafter."""
        return self.name not in ("healthy", "unknown", "lower", "depth", "trainer features")

    @property
    def rounds(self) -> int:
        """Rounds that the verdict rests on."""
        return 0 if self.stretch is None else self.stretch.rounds


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


def watch(engines: Mapping[str, Sequence[Block]], replays: Replays, rule: LiveRule) -> Watch:
    """Judge all engines: their blocks by reporter, oldest first."""
    sent, replays = replays.answered, replays.with_counts_of(engines.values())
    findings = {reporter: find_difference(blocks, replays, rule) for reporter, blocks in engines.items() if blocks}
    judged = {r: f for r, f in findings.items() if f.kind != "unknown"}
    above = [f.blocks for f in judged.values() if f.kind == "above"]
    all_low = _are_all_low(engines, judged, replays, rule)
    all_above = len(above) >= _ALL * len(judged) > 0 and not explained_by_prompts(
        chain.from_iterable(above), replays, rule, suffixes=False
    )
    alive = {reporter: engines[reporter] for reporter, found in judged.items() if found.kind != "dead"}
    unsent = (
        any(found.kind == "low" for found in judged.values())
        and _unsent_prompts_explain(alive, sent, replays, rule)
        and not _all_was_offered(engines.values(), sent, replays)
    )
    verdicts = []
    for reporter, found in sorted(findings.items()):
        beside = [other for name, other in judged.items() if name != reporter]
        features = not _another_is_sound(found, beside, replays, rule)
        name, text = _name_verdict(
            found, replays, rule, all_low=all_low, unsent=unsent, all_above=all_above, features=features
        )
        verdicts.append(
            EngineVerdict(reporter, name, text, engines[reporter][-1].drafter_version, found.stretch, found.since)
        )
    if unsent and not any(verdict.name == "engine features" for verdict in verdicts):
        all_low = False
    return Watch(tuple(verdicts), _hold(verdicts, all_low=all_low, judged=len(judged)))


def _another_is_sound(found: Finding, others: Sequence[Finding], replays: Replays, rule: LiveRule) -> bool:
    """Whether another engine accepts what replay says with the drafter versions with which this one is low.

    Then the trainer's features are right: wrong ones lower every engine that serves what was trained on them. Only
    versions that both have are compared: with them this engine must be low beyond chance, and the other one above half
    of its fall. Blocks of a lower depth do not count: first drafts may be right where later ones are not.
    """
    depth = max((compared_depth(matched, rule) for matched in found.blocks), default=0.0)
    for other in others if found.kind == "low" else ():
        asked = other.blocks if other.kind in ("healthy", "depth") else ()
        asked = tuple(matched for matched in asked if compared_depth(matched, rule) > depth - 0.25)
        low = _with_versions_of(found.blocks, asked, replays)
        sound = _with_versions_of(asked, found.blocks, replays)
        if low is None or sound is None or low.errors_above(-rule.dead_band) >= -SIGMAS:
            continue
        if sound.errors_above(low.log_ratio / 2) > SIGMAS:
            return True
    return False


def _with_versions_of(blocks: Sequence[Matched], others: Sequence[Matched], replays: Replays) -> Stretch | None:
    """Live against replay over the blocks whose drafter version is among those of `others`."""
    versions = {matched.block.drafter_version for matched in others}
    return stretch_over((one for one in reversed(blocks) if one.block.drafter_version in versions), replays)


def _are_all_low(
    engines: Mapping[str, Sequence[Block]], judged: Mapping[str, Finding], replays: Replays, rule: LiveRule
) -> bool:
    """Whether the fall is one of all engines, and their prompts do not explain it.

    So it is where `_ALL` of those with a living drafter are low, or where the others are low in sum since the first
    one fell: a sum shows a fall sooner than each of its parts.
    """
    low = [r for r, found in judged.items() if found.kind == "low"]
    others = [r for r, found in judged.items() if found.kind not in ("low", "dead")]
    alive = sum(found.kind != "dead" for found in judged.values())
    if not low or alive < 2:
        return False
    began = min(judged[r].blocks[0].block.policy_version for r in low)
    since = {
        reporter: [
            matched
            for block in engines[reporter]
            if block.policy_version >= began and (matched := at_common_depth(block, replays, rule)) is not None
        ]
        for reporter in (*low, *others)
    }
    if len(others) > (1 - _ALL) * alive:
        found = stretch_over((one for reporter in others for one in since[reporter]), replays)
        if found is None or found.errors_above(-rule.dead_band) >= -SIGMAS:
            return False
    return not explained_by_prompts(chain.from_iterable(since.values()), replays, rule, suffixes=False)


def _unsent_prompts_explain(
    engines: Mapping[str, Sequence[Block]], sent: Mapping[int | None, float], replays: Replays, rule: LiveRule
) -> bool:
    """Whether engines may be low because the trainer does not send its hardest prompts. `sent`: `Replays.answered`.

    So it may be where scored batches hold fewer tokens than engines emitted, no engine counts by prompt, and the first
    drafter version lies as far below replay as each of the newest two. With wrong features each training makes it
    worse. Of the oldest and the newest policy version that were scored a part may be missing: their tokens are compared
    only while there are no others.
    """
    every = chain.from_iterable(engines.values())
    matched = [found for block in every if (found := at_common_depth(block, replays, rule)) is not None]
    scored = sorted(policy for policy in sent if policy is not None)
    known = {one.block.policy_version for one in matched}
    policies = known & {*scored[1:-1]} or known & {*scored}
    in_batches = math.fsum(sent[policy] for policy in policies)
    emitted = math.fsum(replays.answered[policy] for policy in policies)
    if matched and (sums := _sums_unnamed(engines.values(), scored)) is not None:
        emitted, in_batches = sums[0], math.fsum(sent.get(policy, 0.0) for policy in sums[1])
    if any(one.block.by_prompt for one in matched) or not 0 < in_batches < COVERED * emitted:
        return False
    versions = defaultdict[str, list[Matched]](list)
    for one in sorted(matched, key=lambda one: one.block.policy_version):
        versions[one.block.drafter_version].append(one)
    told = [s for of in versions.values() if (s := stretch_over(of, replays)) and s.rounds >= rule.min_rounds]
    return bool(told) and not any(
        one.log_ratio - told[0].log_ratio < -SIGMAS * math.hypot(one.error, told[0].error) for one in told[1:][-2:]
    )


def _all_was_offered(engines: Collection[Sequence[Block]], sent: Mapping[int | None, float], replays: Replays) -> bool:
    """Whether the trainer's hooks drew their batches from all that engines emitted, so that nobody left prompts out.

    A hook says with a file what it was shown since the file before, of policy versions without a file too. So what it
    says is compared with all that engines emitted after one scored version, up to and with a later one. The newest is
    scored in part. Of the oldest policy version of an engine whose blocks are full a part is not known any more.
    """
    full = [blocks[0].policy_version for blocks in engines if len(blocks) >= KEPT_BLOCKS]
    known = [block.policy_version for blocks in engines for block in blocks]
    begun = max(full, default=min(known) - 1)
    scored = sorted(policy for policy in sent if policy is not None)
    ends = [policy for policy in scored[:-1] if begun <= policy <= max(known)]
    span = [p for p in replays.answered if p is not None and ends[0] < p <= ends[-1]] if ends else []
    emitted = math.fsum(replays.answered[policy] for policy in span)
    return 0 < COVERED * emitted <= math.fsum(replays.offered.get(policy, 0.0) for policy in span)


def _sums_unnamed(engines: Collection[Sequence[Block]], scored: Sequence[int]) -> tuple[float, range] | None:
    """Tokens that engines emitted for a range of policy versions, and this range, where some do not name theirs.

    None: all do, or too little is known. `scored`: versions with scored batches, ascending. Such rounds are booked
    under the newest version of which a batch had come: one may have those of two versions, and another none. So sums
    are compared, from the first version to the last but one under which rounds are booked.
    """
    blocks = [block for of in engines for block in of]
    if len(scored) < 3 or all(block.named for block in blocks):
        return None
    full = [of[0].policy_version for of in engines if len(of) >= KEPT_BLOCKS]
    booked = sorted({block.policy_version for block in blocks})
    first = max(scored[0], *full, booked[0])
    whole = [policy for policy in booked[:-1] if first < policy <= scored[-2]]
    if not whole:
        return None
    emitted = math.fsum(block.tokens for block in blocks if first < block.policy_version <= whole[-1])
    return emitted, range(first + 1, whole[-1] + 1)


def _name_verdict(
    found: Finding, replays: Replays, rule: LiveRule, *, all_low: bool, unsent: bool, all_above: bool, features: bool
) -> tuple[VerdictName, str]:
    """Name the verdict and its evidence. `features`: whether the trainer's may be why this engine alone is low.

    `unsent`: whether prompts that the trainer does not send may be why engines are low.
    """
    if found.kind in ("healthy", "unknown", "depth", "dead"):
        return found.kind, found.text
    if found.kind == "above":
        if all_above:
            blame = "the trainer's features or log-probabilities that are replayed are wrong, or of other weights"
            return "trainer features", f"{found.text}: more than the drafter could accept; {blame}"
        return "unknown", f"{found.text}: its prompts are easier than the trainer's, or than those of other engines"
    spread = replays.spread or 0.0
    by_prompts = found.explained and not all_low
    if features and not by_prompts and not unsent and fell_while_replay_healed([*found.before, *found.blocks], spread):
        blame = "live fell from version to version while replay rose: it trains on features that engines do not have"
        return "trainer features", f"{found.text}: {blame}"
    if only_later_drafts_differ(shape_of(found.blocks, spread)):
        blame = "its first drafts are accepted as in replay and the later ones are not: what it feeds back is wrong"
        return "engine features", f"{found.text}: {blame}"
    if all_low and unsent:
        blame = "so it is in all engines, and with no newer drafter more than with the oldest that is known"
        why = "the trainer may send only its easier prompts, for batches are of a part of what engines emitted"
        return "lower", f"{found.text}: {blame}; {why} (engines that count by prompt tell), or its features are wrong"
    if all_low:
        blame = "so it is in all engines; the trainer's features are wrong, or the weights that the service serves"
        return "trainer features", f"{found.text}: {blame}"
    name, blame = _own_fault(found, replays, rule)
    if by_prompts or unsent:
        depth = depth_differs(found.blocks, rule, "harder prompts may be why it accepts less")
        if depth is not None:
            return "depth", f"{found.text}: {depth}"
        why = "harder prompts may be why (spread each prompt's answers over the engines to tell)"
        if not by_prompts:
            why = "the trainer may send only its easier prompts, for batches are of a part of what engines emitted"
            why += " (engines that count by prompt tell)"
        return "lower", f"{found.text}: {why}; if they are not, {blame}"
    return name, f"{found.text}: {blame}"


def _own_fault(found: Finding, replays: Replays, rule: LiveRule) -> tuple[VerdictName, str]:
    """What is wrong with an engine that is below replay, if its prompts are not the reason."""
    other = version_that_fits(found.blocks, replays, rule)
    if other is not None:
        return "stale weights", f"it accepts what {other} would"
    if was_sound_before(found, replays):
        versions = {k.block.drafter_version for k in found.before}
        new = found.blocks[0].block.drafter_version not in versions
        began = "with this version" if new else "in the middle of a version"
        why = "so it does not run the weights that it names, or samples at another temperature"
        return "stale weights", f"it began {began}, {why}"
    return (
        "engine features",
        "so it has been from its first rounds: aux layers in another order, or other states than the trainer sends",
    )


def _hold(verdicts: Sequence[EngineVerdict], *, all_low: bool, judged: int) -> str | None:
    blamed = [v for v in verdicts if v.name == "trainer features"]
    if not blamed:
        blamed = [v for v in verdicts if v.sick] if all_low else []
    if not blamed:
        return None
    worst = max(blamed, key=lambda v: v.rounds)
    return f"live and replay α disagree in {len(blamed)} of {judged} engines: {worst.reporter}: {worst.text}"


def push_is_due(rule: LiveRule, verdict: EngineVerdict, pushes: Sequence[float], now: float) -> bool:
    """Whether to push again to an engine that `verdict` calls dead: at once, then after 30 s, 1 min, 2, ... 30 min.

    `pushes`: times of the last ones, oldest first. The pause doubles with each push since the drafter died; one before
    that only keeps the next one at least `push_again_seconds` away.
    """
    failed = failed_pushes(verdict, pushes)
    if not failed:
        last = max((when for when in pushes if when <= now), default=None)
        return last is None or now - last >= rule.push_again_seconds
    pause = min(rule.push_again_seconds * 2.0 ** (len(failed) - 1), _LONGEST_PAUSE_SECONDS)
    # After a clock was set back, the last push lies in the future. A dead engine does not wait for it.
    return not 0 <= now - failed[-1] < pause


def failed_pushes(verdict: EngineVerdict, pushes: Sequence[float]) -> list[float]:
    """The pushes that did not help: those after the drafter died."""
    return [when for when in pushes if verdict.since is not None and when > verdict.since]
