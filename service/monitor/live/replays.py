"""The replay side: replay α of every drafter version, by policy version."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Final

from service.monitor.alpha import attempts
from service.monitor.live.blocks import Block
from service.monitor.live.hard import ReplayedPrompts
from service.monitor.records import DrafterSums, Return, ScoreRecord

#: So many of the newest score records are read.
REPLAYED_BATCHES: Final = 256
#: Fewest degrees of freedom (clusters less steps) from which a spread is measured.
_CLUSTERS: Final = 8
#: Rollouts of one prompt are alike. Where no sums by prompt are known, the variance between rollouts counts so often.
_DESIGN_EFFECT: Final = 4.0
#: A step's sum of squares is usual up to so many times the first quartile of all steps. What exceeds that is taken for
#: one prompt's. By chance alone, one of 64 steps of 16 prompts has 2.5 times the quartile.
_USUAL: Final = 3.0
#: A block is compared on its replayed prompts if they have this share of its rounds. Prompts that make this share of
#: all tokens count as all.
COVERED: Final = 0.95
#: Where the spreads of `_ENGINES_TOLD` engines are known, an engine counts only up to so many times their median.
_SCATTERS: Final = 6.0
_ENGINES_TOLD: Final = 3
#: Answers in batches are drawn evenly if their mean length differs by less than this share from that of all.
_LENGTHS: Final = 0.1
#: A policy version of which they differ so much says nothing of the others.
_OTHER_LENGTHS: Final = 0.25
#: The easiest prompts have at most so many times the α of all.
_MOST: Final = 64.0
#: Variance of log α from one round's coin flips where no positions are known: the highest at depths up to 4.
COIN_FLIPS: Final = 0.45


@dataclass(frozen=True, slots=True)
class VersionReplay:
    """Replay of one drafter version on the rollouts of one policy version. `sums`: by prompt, or by rollout."""

    sums: DrafterSums
    accepted: tuple[float, ...]
    reached: tuple[float, ...]
    by_prompt: Mapping[str, Sequence[float]] = field(default_factory=dict)  # tokens and rounds

    @property
    def tokens(self) -> float:
        """Tokens that replay emits."""
        return self.sums.tokens

    @property
    def rounds(self) -> float:
        """Rounds of the replay."""
        return self.sums.rounds

    def alpha(self, depth: float | None = None) -> float | None:
        """Tokens per round, for an engine that drafts `depth` tokens; None where that cannot be told."""
        if depth is None or depth >= len(self.accepted) > 0:
            return self.tokens / self.rounds
        if not self.accepted:
            return None
        whole = int(depth)
        kept = math.fsum(self.accepted[:whole]) + (depth - whole) * self.accepted[whole]
        return 1.0 + kept / self.rounds

    def hardest_ratio(self, share: float) -> float:
        """α of the hardest prompts, which make this `share` of the tokens, over α of all; 1 if that is nearly all."""
        return 1.0 if share >= COVERED else self._hardest(share)

    def easiest_ratio(self, share: float) -> float:
        """The same of the easiest prompts: those that remain without the hardest ones, which make the other tokens."""
        if share >= COVERED:
            return 1.0
        rounds = 1.0 - (1.0 - share) / self._hardest(1.0 - share)
        return share / rounds if rounds > share / _MOST else _MOST

    def _hardest(self, share: float) -> float:
        """`hardest_ratio` for a share between 0 and 1.

        Where prompts are not told apart, it is a lower bound from the second moments (Cauchy and Schwarz).
        """
        known = [one for one in self.by_prompt.values() if min(one) > 0]
        tokens, rounds = math.fsum(own for own, _ in known), 0.0
        if tokens < COVERED * self.tokens:
            off = math.sqrt(max(self.sums.off_squared, 0.0) * self.sums.rollouts * share * (1.0 - share))
            return 1.0 / (1.0 + off / (share * self.tokens))
        left = share * tokens
        for own, took in sorted(known, key=lambda one: one[0] / one[1]):
            part = min(1.0, left / own)
            left, rounds = left - part * own, rounds + part * took
            if part < 1.0:
                break
        return share * tokens / rounds * self.rounds / self.tokens

    def on_prompts_of(self, block: Block) -> list[tuple[float, float, int, float]]:
        """Of each of its prompts that were replayed: tokens, tokens that replay expects, rounds, rounds replayed."""
        pairs = list[tuple[float, float, int, float]]()
        for prompt, (tokens, rounds) in block.by_prompt.items():
            replayed = self.by_prompt.get(prompt)
            if replayed is not None and min(rounds, *replayed) > 0:
                pairs.append((tokens, rounds * replayed[0] / replayed[1], rounds, replayed[1]))
        return pairs

    @property
    def flips(self) -> float:
        """Variance of log α from the coin flips of one round: E[a²] = sum (2i + 1) P_i of the drafts kept."""
        if not self.accepted:
            return COIN_FLIPS
        mean = math.fsum(self.accepted) / self.rounds
        square = math.fsum((2 * i + 1) * kept for i, kept in enumerate(self.accepted)) / self.rounds
        return max(square - mean * mean, 0.0) / (1.0 + mean) ** 2


class Replays:
    """Replay of every drafter version in the given scores, by policy version.

    Where a trainer went back to a policy version, only the batches of its last attempt with it count: they say what
    engines should accept now. `returns`: see `service.monitor.alpha.attempts`.
    `spread`: variance of log α between prompts, for one round's worth of text; None: too few rollouts.
    `outlier`: the most tokens by which a single prompt was off what its rounds should have emitted. `spread` is an
    average, which hides such a prompt. 0 where no step's prompts scatter more than is usual.
    `paired`: (spread, outlier) of engines' tokens beside replay's on the same prompts; None: too few are known.
    `answered`: tokens that rounds emitted for all answers of a policy version: as the batches say or, where that is
    more, as the engines counted.
    `offered`: the same of all answers that the trainer's hooks drew batches from, or, where nothing says that they drew
    evenly, of the answers in batches. A hook says with a version's batch what it was shown since the batch before,
    of that version and of earlier ones.
    `uneven`: policy versions that are not compared. Their hooks say rollouts and no tokens: what comes first was taken.
    `prompts`: those that were replayed. `siblings`: answers of a prompt, of which batches may hold a part.
    """

    def __init__(self, scores: Iterable[ScoreRecord], returns: Sequence[Return] = ()) -> None:
        alike = _drafted_alike(sorted(scores, key=lambda one: one.arrival))
        prompts, rollouts = list[DrafterSums](), list[DrafterSums]()
        self.answered: dict[int | None, float] = {}
        self.offered: dict[int | None, float] = {}
        self._replays: dict[tuple[str, int | None], VersionReplay] = {}
        self.prompts = ReplayedPrompts()
        of_policy: defaultdict[int | None, list[ScoreRecord]] = defaultdict(list)
        for score in alike:
            of_policy[score.policy_version].append(score)
        differ = {policy: _lengths_differ(of) for policy, of in of_policy.items()}
        self.uneven = {policy for policy, share in differ.items() if share == math.inf}
        even = [one for one in alike if differ[one.policy_version] < _OTHER_LENGTHS]
        drawn_evenly = any(one.offered for one in even) and _lengths_differ(even) < _LENGTHS
        placeless = [score for score in alike if score.policy_version is None]
        for together in (placeless, *(attempt.scores for attempt in attempts(alike, returns=returns))):
            found: defaultdict[tuple[str, int | None], list[VersionReplay]] = defaultdict(list)
            own: defaultdict[tuple[str, int | None], DrafterSums] = defaultdict(lambda: DrafterSums(0.0, 0.0))
            answered: defaultdict[int | None, float] = defaultdict(float)
            offered: defaultdict[int | None, float] = defaultdict(float)
            apart: dict[tuple[int | None, str], tuple[float, float]] = {}
            for score in together:
                for version, replay in _replayed(score):
                    found[version, score.policy_version].append(replay)
                answers = score.rollouts or 0
                requests = answers if score.segments is None else score.segments
                # No round emits the first token that answers a request: the prefill does.
                emitted = max(0.0, (score.tokens or 0) - requests)
                answered[score.policy_version] += emitted
                if drawn_evenly and score.offered is not None:
                    emitted = max(0.0, score.offered[1] - score.offered[0] * requests / max(1, answers))
                offered[score.policy_version] += emitted
                for one in score.replayed or ():
                    if one.version == score.drafter_version:  # pooled, for a batch may be of one prompt
                        own[one.version, score.policy_version] += one.sums
                        self.prompts.answers += answers
                        self.prompts.requests += requests
                        if not one.by_prompt and one.sums.rollouts > 0:  # none where each answer is one token
                            self.prompts.together.append(one.sums)
                        for prompt, (tokens, rounds) in one.by_prompt.items():
                            before = apart.get((score.policy_version, prompt), (0.0, 0.0))
                            apart[score.policy_version, prompt] = (before[0] + tokens, before[1] + rounds)
                rollouts += [sums for sums in [score.sums("served")] if sums is not None]
            self._replays |= {key: _pooled(replays) for key, replays in found.items()}
            self.answered |= answered
            # Hooks may have noted fewer than they sent: identical answers without ids are one to them.
            self.offered |= {policy: max(tokens, answered[policy]) for policy, tokens in offered.items()}
            self.prompts.apart += apart.values()
            prompts += own.values()
        self._of: defaultdict[int | None, dict[str, VersionReplay]] = defaultdict(dict)
        for (version, policy), replay in self._replays.items():
            self._of[policy][version] = replay
        self._windows: dict[tuple[str, int | None], VersionReplay] = {}
        self.siblings = self.prompts.siblings
        spread = _spread(prompts, 1.0)
        self.spread = _spread(rollouts, _DESIGN_EFFECT) if spread is None else spread
        self.outlier = _outlier(prompts)
        self.paired: tuple[float, float] | None = None
        responses = math.fsum(sums.rollouts for sums in rollouts)
        #: Tokens that rounds emit in one response, on average; None where nobody knows.
        self.response_tokens = math.fsum(sums.tokens for sums in rollouts) / responses if responses > 0 else None

    def with_counts_of(self, engines: Iterable[Sequence[Block]]) -> Replays:
        """A copy with `paired` and `answered` from these engines' counts.

        `paired` is the scatter around each engine's own level in each drafter and policy version: an engine that is off
        by one factor on all prompts adds nothing. What blocks have of a prompt is taken together, and apart: a block
        may have some of its answers, which scatter more than all of them. The larger scatter counts.
        """
        whole, apart = list[list[DrafterSums]](), list[list[DrafterSums]]()
        emitted = defaultdict[int | None, float](float)
        for blocks in engines:
            parts = defaultdict[tuple[str, int], list[Block]](list)
            for block in blocks:
                emitted[block.policy_version] += block.tokens
                parts[block.drafter_version, block.policy_version].append(block)
            told = [of for of in parts.values() if any(block.by_prompt for block in of)]
            whole.append(self._paired([reduce(add, of)] for of in told))
            apart.append(self._paired(told))
        found = copy.copy(self)
        known = [(spread, _outlier(a)) for a in map(_alike, (whole, apart)) if (spread := _spread(a, 1.0)) is not None]
        found.paired = (max(s for s, _ in known), max(o for _, o in known)) if known else None
        found.answered = self.answered.copy()
        for policy, tokens in emitted.items():
            found.answered[policy] = max(tokens, self.answered.get(policy, 0.0))
        answered = math.fsum(self.answered.values())
        if answered > 0:  # batches may hold a part of each prompt's answers
            found.siblings *= math.fsum(found.answered[policy] for policy in self.answered) / answered
        return found

    def _paired(self, versions: Iterable[Sequence[Block]]) -> list[DrafterSums]:
        """Tokens of an engine and what replay expects, by prompt and block, of each drafter and policy version."""
        found = list[DrafterSums]()
        for blocks in versions:
            known = [(block, replay) for block in blocks if (replay := self.get(block)) is not None]
            pairs = [pair for block, replay in known for pair in replay.on_prompts_of(block)]
            if pairs:
                found.append(DrafterSums.of([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
        return found

    def get(self, block: Block) -> VersionReplay | None:
        """Replay of the block's drafter version on rollouts of its policy version.

        Where the engine names none, those of the next one count as well: the batch of what it draws has not come yet.
        """
        if block.policy_version in self.uneven or block.policy_version not in self._of:
            return None
        key = block.drafter_version, block.policy_version
        if block.named:
            return self._replays.get(key)
        if key not in self._windows:
            later = (policy for policy in self._of if policy is not None and policy > key[1])
            after = min((policy for policy in later if policy not in self.uneven), default=None)
            around = (self._replays.get((key[0], policy)) for policy in {key[1], after} - {None})
            known = [replay for replay in around if replay is not None]
            if not known:
                return None
            self._windows[key] = _pooled(known)  # one object for all blocks: its error is common to them
        return self._windows[key]

    def others(self, block: Block) -> Mapping[str, VersionReplay]:
        """Replay of the other versions that were scored on rollouts of the block's policy version."""
        return {v: c for v, c in self._of.get(block.policy_version, {}).items() if v != block.drafter_version}

    def survival(self, drafter_version: str) -> list[float]:
        """Shares of a version's rounds that keep the first draft, the first two, ...; empty where not known."""
        pooled = self._over_policies(drafter_version)
        return [] if pooled is None else [min(max(kept / pooled.rounds, 0.0), 1.0) for kept in pooled.accepted]

    def alpha(self, drafter_version: str) -> float | None:
        """Replay α of a version over all policy versions."""
        pooled = self._over_policies(drafter_version)
        return None if pooled is None else pooled.alpha()

    def _over_policies(self, drafter_version: str) -> VersionReplay | None:
        found = [replay for (version, _), replay in self._replays.items() if version == drafter_version]
        return _pooled(found) if found else None


def _drafted_alike(scores: Sequence[ScoreRecord]) -> list[ScoreRecord]:
    """The records that were replayed with the depth and the drafting of the newest one, as engines draft now."""
    return [one for one in scores if (one.depth, one.drafting) == (scores[-1].depth, scores[-1].drafting)]


def _lengths_differ(scores: Sequence[ScoreRecord]) -> float:
    """By what share the batches' answers are longer or shorter than those that they were drawn from; 0: nobody says.

    Infinite where a hook says rollouts and no tokens: its budget may not have reached the last ones.
    """
    told = [(score.tokens or 0, score.rollouts or 0, *score.offered) for score in scores if score.offered is not None]
    tokens, answers, of_answers, of_tokens = map(sum, zip(*told, strict=True)) if told else (0, 0, 0, 0)
    if any(own[2] > 0 == own[3] for own in told):
        return math.inf
    return abs(tokens * of_answers / (of_tokens * answers) - 1.0) if of_tokens * answers else 0.0


def _replayed(score: ScoreRecord) -> Iterable[tuple[str, VersionReplay]]:
    if score.replayed is not None:
        for one in score.replayed:
            if one.sums.rounds > 0 and one.sums.tokens > 0:
                yield one.version, VersionReplay(one.sums, one.accepted, one.reached, one.by_prompt)
    elif score.drafter_version is not None and (sums := score.sums("served")) is not None and sums.tokens > 0:
        yield score.drafter_version, VersionReplay(sums, (), ())


def _pooled(replays: Sequence[VersionReplay]) -> VersionReplay:
    """Sum of replays; counts by position only where all that tell them have equally many positions.

    Those that tell none are taken to be like the others.
    """
    told = [c for c in replays if c.accepted]
    alike = len({(len(c.accepted), len(c.reached)) for c in told}) == 1
    by_position = [(*c.accepted, *c.reached) for c in told] if alike else []
    share = math.fsum(c.rounds for c in told) / math.fsum(c.rounds for c in replays)
    sums = [math.fsum(counts) / share for counts in zip(*by_position, strict=True)]
    depth = len(told[0].accepted) if alike else 0
    accepted, reached = tuple(sums[:depth]), tuple(sums[depth:])
    by_prompt: dict[str, list[float]] = {}
    for replay in replays:
        for prompt, (tokens, rounds) in replay.by_prompt.items():
            so_far = by_prompt.get(prompt, (0.0, 0.0))
            by_prompt[prompt] = [so_far[0] + tokens, so_far[1] + rounds]
    return VersionReplay(sum((c.sums for c in replays), DrafterSums(0.0, 0.0)), accepted, reached, by_prompt)


def _alike(by_engine: Sequence[Sequence[DrafterSums]]) -> list[DrafterSums]:
    """The sums of all engines without those that scatter far more: such a one would widen the error of the others."""
    own = [(_spread(steps, 1.0), steps) for steps in by_engine]
    known = sorted(spread for spread, _ in own if spread is not None)
    most = _SCATTERS * known[(len(known) - 1) // 2] if len(known) >= _ENGINES_TOLD else math.inf
    kept = [steps for spread, steps in own if most == math.inf or (spread is not None and spread <= most)]
    return [one for steps in kept for one in steps]


def _spread(clustered: Sequence[DrafterSums], effect: float) -> float | None:
    """Variance of log α times rounds, from sums by prompt, or by rollout with their design `effect`.

    From n clusters the estimate has a relative error of sqrt(2/n): two of these are added. None below `_CLUSTERS`.
    """
    known = [sums for sums in clustered if sums.rollouts >= 2 and sums.tokens > 0]
    clusters = math.fsum(s.rollouts for s in known) - len(known)
    if clusters < _CLUSTERS:
        return None
    residual = math.fsum(s.off_squared / s.alpha**2 * s.rollouts / (s.rollouts - 1) for s in known)
    within = max(residual, 0.0) / math.fsum(s.rounds for s in known)
    return effect * within * (1 + 2 * math.sqrt(2 / clusters))


def _outlier(steps: Sequence[DrafterSums]) -> float:
    """The most tokens by which one prompt can be off, from sums by prompt of each step.

    Of a step only the sum of its prompts' squares is known. What exceeds the usual sum is taken for one prompt's.
    """
    known = [s for s in steps if s.rollouts >= 2 and s.tokens > 0]
    if not known:
        return 0.0
    shares = sorted(s.off_squared * s.rollouts / s.tokens**2 for s in known)
    usual = _USUAL * shares[len(shares) // 4]
    return math.sqrt(max(0.0, *(s.off_squared - usual * s.tokens**2 / s.rollouts for s in known)))
