"""Live α of every engine beside replay α of the same drafter version, on rollouts of the same policy version.

Both must agree: replay says what the drafter would accept with the trainer's features, an engine counts what it accepts
with its own. Where they differ beyond chance, the difference names whose fault it is:

    positions beyond K' all missing         depth             the engine drafts another number of tokens
    nothing accepted                        dead              a weight sync, sleep or refit lost the drafter
    lower since a drafter version or a
      moment, or as another version would   stale weights     the engine does not run what it says
    lower from the start, or from the
      second draft on                       engine features   aux layers or feedback are wrong in the engine
    lower in all engines, or falling while
      replay heals, or live above replay    trainer features  what is replayed and trained on is wrong
    lower, but not than the hardest prompts
      would be, and not counted by prompt   lower             its prompts may be harder: nobody is blamed

The rule is sequential. Of each engine the last stretches of rounds (`Block`) are kept; after every report all of its
newest stretches are tested at once, so that a change shows however old the engine is. The statistic of a stretch is

    d = log(tokens emitted / sum of rounds_i · replay α_i),   i: drafter version and policy version
    var d = (s + r)/rounds + s · sum w_i²/replayed rounds_i + (o/3/expected tokens)²,  w_i: share of the expected tokens

with s the variance of log α that one round's worth of text brings (prompts differ: measured between them), r that of
the coin flips in one round, and o the tokens by which one prompt alone may be off. Where an engine counts by prompt,
both sums are over the prompts that were replayed, and the variance is that of these differences (`Replays.beside`).

It is called low where (d + `dead_band`)/sd < -`certain`: a scan over change points with a fixed limit. Its error over a
whole run is measured, not derived: benchmarks/live_replay.py.

Pure: no torch, no Redis, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from service.monitor.live.blocks import Block
from service.monitor.live.engine import (
    OVER,
    Finding,
    LiveRule,
    Matched,
    Scan,
    Stretch,
    at_common_depth,
    compared_depth,
    explained,
    find,
    other_depth,
    was_sound,
)
from service.monitor.live.replays import Replays
from service.monitor.live.shape import as_another, fell_while_replay_healed, only_later, shape_of

#: Share of the judged engines that must differ for all to be taken to.
_ALL: Final = 0.8
#: Pushes that did not revive a drafter before it is said that pushing does not help.
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
        """Whether what it counts says nothing about the drafter."""
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
    replays = replays.beside(engines.values())
    findings = {reporter: find(blocks, replays, rule) for reporter, blocks in engines.items() if blocks}
    judged = {r: f for r, f in findings.items() if f.kind != "unknown"}
    above = [f.blocks for f in judged.values() if f.kind == "above"]
    together = _together(engines, judged, replays, rule)
    all_above = len(above) >= _ALL * len(judged) > 0 and not explained(
        chain.from_iterable(above), replays, rule, suffixes=False
    )
    verdicts = []
    for reporter, found in sorted(findings.items()):
        beside = [other for name, other in judged.items() if name != reporter]
        features = not _another_is_sound(found, beside, replays, rule)
        name, text = _named(found, replays, rule, together=together, all_above=all_above, features=features)
        verdicts.append(
            EngineVerdict(reporter, name, text, engines[reporter][-1].drafter_version, found.stretch, found.since)
        )
    return Watch(tuple(verdicts), _hold(verdicts, together=together, judged=len(judged)))


def _another_is_sound(found: Finding, others: Sequence[Finding], replays: Replays, rule: LiveRule) -> bool:
    """Whether another engine drafts as replay says with the versions in which this one is low, beyond chance.

    Then the trainer's features are right: wrong ones lower every engine that serves what was trained on them. With the
    versions that both have, this one must be low, and the other above half of its fall. One that drafts fewer tokens
    is not asked: the first drafts may be right where the later ones are not.
    """
    depth = max((compared_depth(known, rule) for known in found.blocks), default=0.0)
    for other in others if found.kind == "low" else ():
        asked = other.blocks if other.kind in ("healthy", "depth") else ()
        asked = tuple(known for known in asked if compared_depth(known, rule) > depth - 0.25)
        low = _with_versions_of(found.blocks, asked, replays)
        sound = _with_versions_of(asked, found.blocks, replays)
        if low is None or sound is None or (low.log_ratio + rule.dead_band) / low.error >= -OVER:
            continue
        if (sound.log_ratio - low.log_ratio / 2) / sound.error > OVER:
            return True
    return False


def _with_versions_of(blocks: Sequence[Matched], others: Sequence[Matched], replays: Replays) -> Stretch | None:
    """Live against replay over those of the blocks whose drafter version some of the others have too."""
    versions = {known.block.drafter_version for known in others}
    scan, stretch = Scan(replays), None
    for known in reversed(blocks):
        if known.block.drafter_version in versions:
            stretch = scan.add(known)
    return stretch


def _together(
    engines: Mapping[str, Sequence[Block]], judged: Mapping[str, Finding], replays: Replays, rule: LiveRule
) -> bool:
    """Whether all engines are low: nearly all are, each by itself, or the sum of the others is.

    The sum takes what they counted since the first low one fell. A sum is known sooner than each of its parts.
    """
    low = [r for r, found in judged.items() if found.kind == "low"]
    others = [r for r, found in judged.items() if found.kind not in ("low", "dead")]
    alive = sum(found.kind != "dead" for found in judged.values())
    if not low or alive < 2:
        return False
    began = min(judged[r].blocks[0].block.policy_version for r in low)
    since = {
        reporter: [
            known
            for block in engines[reporter]
            if block.policy_version >= began and (known := at_common_depth(block, replays, rule)) is not None
        ]
        for reporter in (*low, *others)
    }
    if len(others) > (1 - _ALL) * alive:
        scan, found = Scan(replays), None
        for known in (one for reporter in others for one in since[reporter]):
            found = scan.add(known)
        if found is None or (found.log_ratio + rule.dead_band) / found.error >= -OVER:
            return False
    return not explained(chain.from_iterable(since.values()), replays, rule, suffixes=False)


def _named(
    found: Finding, replays: Replays, rule: LiveRule, *, together: bool, all_above: bool, features: bool
) -> tuple[VerdictName, str]:
    """`features`: whether the trainer's may be the reason, if it is low alone."""
    if found.kind in ("healthy", "unknown", "depth", "dead"):
        return found.kind, found.text
    if found.kind == "above":
        if all_above:
            blame = "the trainer's features or log-probabilities that are replayed are wrong, or of other weights"
            return "trainer features", f"{found.text}: more than the drafter could accept; {blame}"
        return "unknown", f"{found.text}: its traffic is easier than the trainer's, or than that of other engines"
    spread = replays.spread or 0.0
    by_prompts = found.explained and not together
    if features and not by_prompts and fell_while_replay_healed([*found.before, *found.blocks], spread):
        blame = "live fell from version to version while replay rose: it trains on features that engines do not have"
        return "trainer features", f"{found.text}: {blame}"
    if only_later(shape_of(found.blocks, spread)):
        blame = "its first drafts are accepted as in replay and the later ones are not: what it feeds back is wrong"
        return "engine features", f"{found.text}: {blame}"
    if together:
        blame = "so it is in all engines; the trainer's features are wrong, or the weights that the service serves"
        return "trainer features", f"{found.text}: {blame}"
    name, blame = _own_fault(found, replays, rule)
    if by_prompts:
        depth = other_depth(found.blocks, rule, "harder prompts may be why it accepts less")
        if depth is not None:
            return "depth", f"{found.text}: {depth}"
        why = "harder prompts may be why, for it does not count them one by one"
        return "lower", f"{found.text}: {why}; if they are not, {blame}"
    return name, f"{found.text}: {blame}"


def _own_fault(found: Finding, replays: Replays, rule: LiveRule) -> tuple[VerdictName, str]:
    """What is wrong in an engine that is lower than replay, if its prompts are not the reason."""
    other = as_another(found.blocks, replays, rule)
    if other is not None:
        return "stale weights", f"it accepts what {other} would"
    if was_sound(found, replays):
        versions = {k.block.drafter_version for k in found.before}
        new = found.blocks[0].block.drafter_version not in versions
        began = "with this version" if new else "in the middle of a version"
        why = "so it does not run the weights that it names, or samples at another temperature"
        return "stale weights", f"it began {began}, {why}"
    return (
        "engine features",
        "so it has been from its first rounds: aux layers in another order, or other states than the trainer sends",
    )


def _hold(verdicts: Sequence[EngineVerdict], *, together: bool, judged: int) -> str | None:
    blamed = [v for v in verdicts if v.name == "trainer features"]
    if not blamed:
        blamed = [v for v in verdicts if v.sick] if together else []
    if not blamed:
        return None
    worst = max(blamed, key=lambda v: v.rounds)
    return f"live and replay α disagree in {len(blamed)} of {judged} engines: {worst.reporter}: {worst.text}"


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
