"""How soon is an engine that accepts otherwise than replay says named, and how often is a sound one? Simulated.

    python -m benchmarks.live_replay --runs 8   # the tables of docs/lab/live_replay.md

The classes are the product's own: reports go through `counted`, replay through score records, verdicts come from
`watch`; what a hook takes of a step is chosen by its `RolloutChoice`. Drawn are prompts (8 rollouts each, alike),
rollouts, and every round's accepted drafts by position. A policy version is one step; its replay is known when the step
is over, as in a service. In `WORLDS` engines answer other prompts than are replayed, in `SHARED` these very ones, and
count their rounds by prompt; in `UNCOUNTED` they do not. In `UNEVEN` they do not either, and prompts are shared out
unevenly; the rule was not made on these worlds. In `SELECTED` and `DYNAMIC` the trainer sends a part of the prompts,
chosen by what became of them. `restarted` has engines that begin again, and pass what they had reported before between
two reports.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.plan import RolloutChoice
from service.monitor.counts import other_life, since
from service.monitor.live.blocks import Block, counted
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.records import AcceptanceRecord, DrafterSums, Replayed, ScoreRecord
from service.storage.reports.engine_counts import Account

Floats = npt.NDArray[np.float64]

K = 4
#: Acceptance of each draft given those before it, of a drafter of α 3.1.
SOUND = np.array([0.72, 0.83, 0.80, 0.86])
ROLLOUTS_PER_PROMPT = 8
#: Verdicts that blame nobody: of `lower` harder prompts may be the cause.
NO_FAULT = ("healthy", "unknown", "lower")
STEPS_KEPT = 64  # score records that `watch` is given


@dataclass(frozen=True)
class World:
    """Where engines and replay agree but for what the world says."""

    name: str
    prompts: int = 16  # replayed per step
    prompt_spread: float = 0.35  # sd of a prompt's log odds of acceptance
    rollout_spread: float = 0.35
    natural_bias: float = 0.0  # of the engines' log odds: bf16, kernels
    rounds_per_step: int = 512  # of each engine
    reports_per_step: int = 2
    drift: float = 0.02  # sd of the drafter's log odds from step to step: the policy moves
    steps_per_version: int = 5
    answer_tokens: int = 60
    #: Of the replayed prompts: "whole", "spread", "by difficulty", "in turns"; empty: engines answer others.
    routing: str = ""
    siblings: int = ROLLOUTS_PER_PROMPT  # of each prompt that are replayed, of what engines answered
    mix: float = 0.0  # prompts' log odds rise and fall by so much in 19 steps
    counted: bool = True  # by prompt, where engines answer what is replayed
    #: What each engine's prompts add to the log odds, and their answers' length in `answer_tokens`.
    kinds: tuple[tuple[float, float], ...] = ()
    very_hard: float = 0.0  # share of the prompts that are three lower in log odds
    silent: tuple[int, ...] = ()  # engines that report nothing
    dropped: float = 0.0  # share of the prompts that the trainer does not send: mostly the hardest
    #: Correlation of a prompt's α and success, where a trainer sends no prompt whose answers all succeed, or all fail.
    dynamic: float | None = None
    success: tuple[float, float] = (0.0, 0.0)  # its mean log odds at the first step, and after 40
    taken: float = 1.0  # share of the tokens that a trainer sends in a step of usual size which its hook may take
    sorted: bool = False  # hard prompts have long answers, and the trainer shows its hook the shortest ones first
    says: bool = True  # with each batch, what the hook took it from


WORLDS = (
    World("usual"),
    World("prompts unlike each other", prompt_spread=0.9, rollout_spread=0.6),
    World("engines 2 % lower by nature", natural_bias=-0.055),
    World("4 prompts replayed a step", prompts=4),
    World("policy moves fast", drift=0.12),
    World("32 rounds a report", rounds_per_step=64, reports_per_step=2),
    World("8,192 rounds a step", rounds_per_step=8192, reports_per_step=8),
    World("answers of 8 tokens", answer_tokens=8),
)

#: Where little scatters, so that a small difference of live and replay α is blamed.
ALIKE = World("prompts alike", prompt_spread=0.1, rollout_spread=0.1)

UNLIKE: dict[str, Any] = {"prompt_spread": 0.9, "rollout_spread": 0.6}
SHARED = (
    World("a prompt at one engine", routing="whole"),
    World("a prompt at all engines", routing="spread"),
    World("a prompt at one, unlike each other", routing="whole", **UNLIKE),
    World("a prompt at all, unlike each other", routing="spread", **UNLIKE),
    World("the same, 2 of 8 answers replayed", routing="spread", siblings=2, **UNLIKE),
    World("one engine has the hardest prompts", routing="by difficulty", siblings=2, **UNLIKE),
    World("a mix of prompts that moves", routing="whole", siblings=2, mix=1.0, **UNLIKE),
)
#: As by an agent that only reads an engine's sums: stock vLLM and SGLang.
UNCOUNTED = tuple(
    replace(world, name=f"{world.name}, not counted by prompt", counted=False)
    for world in (SHARED[2], SHARED[3], SHARED[5], SHARED[6])
)
_SUMS: dict[str, Any] = {"counted": False, "siblings": 2}
_LONG: dict[str, Any] = {"very_hard": 0.05, "answer_tokens": 200, "rounds_per_step": 2048, "reports_per_step": 4}
UNEVEN = (
    World(
        "each engine has a dataset",
        routing="whole",
        prompt_spread=0.5,
        kinds=((-0.8, 1.0), (-0.2, 1.0), (0.2, 1.0), (0.8, 1.0)),
        **_SUMS,
    ),
    World(
        "one engine has long contexts",
        routing="whole",
        kinds=((-0.8, 2.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
        **_SUMS,
    ),
    World("the hardest go to another engine each 10 versions", routing="in turns", **_SUMS, **UNLIKE),
    World("the hardest of 112 prompts", routing="by difficulty", rounds_per_step=4096, **_SUMS, **UNLIKE),
    World("the hardest half reports alone", routing="by difficulty", silent=(2, 3), **_SUMS, **UNLIKE),
    World("the easiest quarter reports alone", routing="by difficulty", silent=(0, 1, 2), **_SUMS, **UNLIKE),
    World("5 % very hard", routing="whole", **_SUMS, **_LONG),
    World("5 % very hard, at one engine", routing="by difficulty", **_SUMS, **_LONG),
)

#: Of the hardest prompts all answers fail, and are not sent: a correlation of 0.7 between that and α.
_DROPPED: dict[str, Any] = {"dropped": 0.6, "routing": "whole", "rounds_per_step": 1024, **UNLIKE}
#: As DAPO's dynamic sampling, while the policy learns: at first hard prompts are dropped, then easy ones.
_DYNAMIC: dict[str, Any] = {"routing": "whole", "rounds_per_step": 1024, "success": (-2.5, 2.5), **UNLIKE}
DYNAMIC = (
    World("dynamic sampling, a correlation of 0.7", dynamic=0.7, **_DYNAMIC),
    World("dynamic sampling, 0.7, not counted by prompt", dynamic=0.7, counted=False, **_DYNAMIC),
    World("dynamic sampling, 0.4, not counted by prompt", dynamic=0.4, counted=False, **_DYNAMIC),
    World(
        "dynamic sampling, 0.7, answers of 600 tokens",
        dynamic=0.7,
        counted=False,
        **_DYNAMIC | {"answer_tokens": 600, "rounds_per_step": 8192},
    ),
)
SELECTED = (
    World("60 % of the prompts are not sent", **_DROPPED),
    World("60 % of the prompts are not sent, not counted by prompt", counted=False, **_DROPPED),
    World("a quarter of the prompts is taken", counted=False, **_DROPPED | {"dropped": 0.0, "taken": 0.25}),
    World("a quarter of the 40 % that are sent is taken", counted=False, **_DROPPED, taken=0.25),
)


def odds(shares: Floats, shift: Floats | float) -> Floats:
    """Shares with `shift` added to their log odds."""
    found: Floats = 1.0 / (1.0 + (1.0 - shares) / shares * np.exp(-np.asarray(shift)))
    return found


@dataclass
class Case:
    """What is wrong. `engine(step, number, replayed shares)`: the shares that an engine really accepts.

    `replay(step, shares)`: what the service replays. `named`: the verdicts that are right. `sick`: numbers of the
    engines that are to be named, from step `onset`. `depth`: tokens drafted by those.
    """

    name: str
    named: tuple[str, ...]
    engine: Callable[[int, int, Floats], Floats] = lambda _step, _number, shares: shares
    replay: Callable[[int, Floats], Floats] = lambda _step, shares: shares
    engines: int = 4
    sick: tuple[int, ...] = (0,)
    depth: int = K
    onset: int = 8

    def wrong(self, step: int, number: int) -> bool:
        """Whether an engine is wrong at a step."""
        return step >= self.onset and number in self.sick


def scaled(target: float) -> Callable[[Floats], Floats]:
    """Lower all log odds alike, until a drafter of SOUND has an α of `target`."""

    def alpha(shift: float) -> float:
        return float(1 + np.cumprod(odds(SOUND, shift)).sum())

    low, high = -12.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if alpha(middle) < target else (low, middle)
    return lambda shares: odds(shares, low)


def only(change: Callable[[Floats], Floats], sick: tuple[int, ...], onset: int) -> Callable[[int, int, Floats], Floats]:
    """Change what these engines accept, from a step on."""
    return lambda step, number, shares: change(shares) if step >= onset and number in sick else shares


def feedback(shares: Floats) -> Floats:
    """Lower what is accepted from the second draft on."""
    return np.concatenate([shares[..., :1], odds(shares[..., 1:], -2.0)], axis=-1)


def cases() -> list[Case]:
    """All that can be wrong."""
    half, aux, stale, nothing = scaled(1.75), scaled(2.2), scaled(2.5), scaled(1.01)
    all_four = (0, 1, 2, 3)
    return [
        Case("half dead (1.75 against 3.04)", ("stale weights",), only(half, (0,), 8)),
        Case("half dead, the only engine", ("stale weights",), only(half, (0,), 8), engines=1),
        Case("lost weights (1.01)", ("dead",), only(nothing, (0,), 8)),
        Case("drafts 2 and not 4", ("depth",), depth=2),
        Case("drafts 3 and not 4", ("depth",), depth=3),
        Case("stale weights (2.5 of 3.1)", ("stale weights",), only(stale, (0,), 10), onset=10),
        Case("aux layers wrong from the start", ("engine features",), only(aux, (0,), 0), onset=0),
        Case("feedback wrong", ("engine features",), only(feedback, (0,), 8)),
        Case("all engines low", ("trainer features",), only(stale, all_four, 8), sick=all_four),
        Case(
            "trainer's features break",
            ("trainer features",),
            replay=lambda step, shares: half(shares) if step >= 8 else shares,
            sick=all_four,
        ),
        poisoned(1),
    ]


def sick_among_sound() -> list[Case]:
    """Cases in which some of four engines are sick, and the trainer is not: publishing must go on."""
    one = [case for case in cases() if case.engines == 4 and case.sick == (0,)]
    half = scaled(1.75)
    return [*one, Case("two of four half dead", ("stale weights",), only(half, (0, 1), 8), sick=(0, 1))]


def poisoned(engines: int) -> Case:
    """Replay heals on features that engines do not have, and live falls: nothing may be published."""
    return Case(
        f"poisoned: replay heals, live falls; {'one engine' if engines == 1 else f'{engines} engines'}",
        ("trainer features",),
        engine=lambda step, _number, shares: odds(shares, -0.16 * max(0, step - 8)),
        replay=lambda step, shares: odds(shares, -1.5 + 0.15 * max(0, step - 8) if step >= 8 else 0.0),
        engines=engines,
        sick=tuple(range(engines)),
    )


class Simulation:
    """One run of one case in one world."""

    def __init__(self, world: World, case: Case, seed: int, rule: LiveRule) -> None:
        self._world, self._case, self._rule = world, case, rule
        self._random = np.random.default_rng(seed)
        self._shift = 0.0
        self._scores: list[ScoreRecord] = []
        self._blocks: dict[str, tuple[Block, ...]] = {f"engine {n}": () for n in range(case.engines)}
        self._seed = seed
        emitted = case.engines * world.rounds_per_step * float(1 + np.cumprod(SOUND).sum())
        most = max(2, round(world.taken * (1.0 - world.dropped) * emitted))
        counters = ("skipped_empty", "skipped_sampling", "skipped_budget")
        self._choice = RolloutChoice(1.0, most, Tally(logging.getLogger("rl_hooks"), *counters))

    def steps(self, count: int) -> Iterator[tuple[int, Mapping[str, int], Watch]]:
        """Run; after every report: the step, rounds counted since by each engine, and the verdicts."""
        world, replays = self._world, Replays(())
        for step in range(count):
            self._shift = 0.95 * self._shift + world.drift * float(self._random.normal())
            shares = odds(SOUND, self._shift)
            if world.routing:
                self._draw(step)
            for part in range(world.reports_per_step):
                report = self._answer if world.routing else self._report
                rounds = {name: report(step, number, shares, part) for number, name in enumerate(self._blocks)}
                yield step, rounds, watch(self._blocks, replays, self._rule)
            self._scores.append(self._replay(step, shares) if world.routing else self._score(step, shares))
            replays = Replays(self._scores[-STEPS_KEPT:])
            yield step, {}, watch(self._blocks, replays, self._rule)

    def _version(self, step: int) -> str:
        return f"v{step // self._world.steps_per_version:06d}-0a1b2c3d"

    def _rollouts(self, shares: Floats, prompts: int) -> Floats:
        """Shares of rollouts, [R, K]: those of one prompt are alike."""
        prompt = self._random.normal(0.0, self._world.prompt_spread, prompts).repeat(ROLLOUTS_PER_PROMPT)
        own = self._random.normal(0.0, self._world.rollout_spread, prompts * ROLLOUTS_PER_PROMPT)
        return odds(shares, (prompt + own)[:, None])

    def _report(self, step: int, number: int, shares: Floats, _part: int) -> int:
        wanted = self._world.rounds_per_step / self._world.reports_per_step
        return self._record(self._counts(step, number, shares, wanted))

    def _counts(self, step: int, number: int, shares: Floats, wanted: float) -> AcceptanceRecord:
        """What an engine counts in about so many rounds, of prompts of its own."""
        world, case = self._world, self._case
        per_answer = world.answer_tokens / (1 + np.cumprod(shares).sum())
        prompts = max(1, round(wanted / per_answer / ROLLOUTS_PER_PROMPT))
        found = self._rollouts(odds(case.engine(step, number, shares), world.natural_bias), prompts)
        return self._counted(step, number, found, np.full(len(found), wanted / len(found)), scale=True)

    def lives(self, rounds: Sequence[int]) -> list[AcceptanceRecord]:
        """What one sound engine counts of the newest version in lives of about so many rounds; α differs by 3 %."""
        step, shifts = len(self._scores) - 1, self._random.normal(self._shift, 0.08, len(rounds))
        return [self._counts(step, 0, odds(SOUND, s), n) for s, n in zip(shifts, rounds, strict=True)]

    @property
    def replays(self) -> Replays:
        """What was replayed."""
        return Replays(self._scores[-STEPS_KEPT:])

    def _draw(self, step: int) -> None:
        """The step's prompts, their answers' log odds and tokens [P, 8], and which engine answers each."""
        world, engines, size = self._world, self._case.engines, ROLLOUTS_PER_PROMPT
        answers = engines * world.rounds_per_step * float(1 + np.cumprod(SOUND).sum()) / world.answer_tokens
        count = max(2, round(answers / size))
        prompt = self._random.normal(world.mix * np.sin(step / 3), world.prompt_spread, count)
        if world.very_hard:
            prompt -= 3.0 * (self._random.random(count) < world.very_hard)
        by_difficulty = world.routing in ("by difficulty", "in turns")
        if by_difficulty:
            prompt.sort()
        self._odds = prompt[:, None] + self._random.normal(0.0, world.rollout_spread, (count, size))
        self._tokens = self._random.poisson(world.answer_tokens, (count, size)).clip(2)
        place = np.arange(count) if by_difficulty else self._random.permutation(count)
        engine = place * engines // count
        if world.routing == "in turns":
            engine = (engine + step // 10) % engines
        if world.kinds:
            shift, length = np.array(world.kinds)[engine % len(world.kinds)].T
            self._odds += shift[:, None]
            self._tokens = np.rint(self._tokens * length[:, None]).clip(2).astype(int)
        if world.sorted:
            self._tokens = np.rint(self._tokens * np.exp(-prompt)[:, None]).clip(2).astype(int)
        self._engine = np.repeat(engine[:, None], size, axis=1)
        self._part = np.repeat(self._random.integers(0, world.reports_per_step, count)[:, None], size, axis=1)
        if world.routing == "spread":
            self._engine = (np.arange(size) + self._random.integers(0, engines, (count, 1))) % engines
        self._names = [f"{step:04x}{number:04x}" for number in range(count)]

    def _answer(self, step: int, number: int, shares: Floats, part: int) -> int:
        """What an engine counts of its prompts of this step."""
        prompt, answer = np.nonzero((self._engine == number) & (self._part == part))
        if not len(prompt) or number in self._world.silent:
            return 0
        shares = odds(self._case.engine(step, number, shares), self._world.natural_bias)
        found = odds(shares, self._odds[prompt, answer][:, None])
        told = prompt if self._world.counted else None
        return self._record(self._counted(step, number, found, self._tokens[prompt, answer].astype(float), told))

    def _record(self, record: AcceptanceRecord) -> int:
        """Take a report in; returns its rounds."""
        name = str(record.reporter)
        self._blocks[name] = counted(self._blocks[name], record)
        return record.rounds

    def _counted(
        self, step: int, number: int, found: Floats, tokens: Floats, prompt: Any = None, *, scale: bool = False
    ) -> AcceptanceRecord:
        """Count answers of so many tokens; `scale`: of so many rounds, all together."""
        case = self._case
        depth = case.depth if case.wrong(step, number) else K
        survived = np.cumprod(found[:, :depth], axis=1)
        alphas = 1 + survived.sum(axis=1)  # an answer has its tokens, however many rounds they take
        wanted = tokens.sum() / alphas / (1 / alphas).sum() if scale else tokens / alphas
        rounds = np.maximum(1, np.rint(wanted)).astype(int)
        law = np.diff(np.concatenate([np.ones((len(found), 1)), survived, np.zeros((len(found), 1))], axis=1), axis=1)
        each = self._random.multinomial(rounds, -law)  # rounds that kept 0..depth drafts
        kept = each.sum(axis=0)
        by_prompt = None
        if prompt is not None:
            emitted = rounds + each @ np.arange(depth + 1)
            by_prompt = {
                self._names[p]: (int(emitted[prompt == p].sum()), int(rounds[prompt == p].sum()))
                for p in np.unique(prompt)
            }
        by_position = tuple(int(n) for n in kept[::-1].cumsum()[::-1][1:])
        total = int(rounds.sum())
        return AcceptanceRecord(
            reporter=f"engine {number}",
            drafter_version=self._version(step),
            policy_version=step,
            rounds=total,
            accepted_tokens=sum(by_position),
            drafted_tokens=depth * total,
            emitted_tokens=total + sum(by_position),
            accepted_per_position=by_position,
            created=float(step),
            by_prompt=by_prompt,
        )

    def _score(self, step: int, shares: Floats) -> ScoreRecord:
        found = self._rollouts(self._case.replay(step, shares), self._world.prompts)
        tokens = self._random.poisson(self._world.answer_tokens, len(found)).clip(2).astype(float)
        names = [f"{step:04x}{number:04x}" for number in range(self._world.prompts)]
        return self._scored(step, found, tokens, np.arange(len(names)).repeat(ROLLOUTS_PER_PROMPT), names)

    def _replay(self, step: int, shares: Floats) -> ScoreRecord:
        """Replay of what the engines answered, or of a part of it."""
        world, sent = self._world, np.arange(len(self._names))
        if world.dropped:
            seen = self._odds.mean(axis=1) + self._random.normal(0.0, world.prompt_spread, len(sent))
            sent = np.sort(seen.argsort()[int(world.dropped * len(sent)) :])
        if world.dynamic is not None:
            sent = self._mixed(step, world.dynamic)
        sampled = world.taken < 1.0
        prompt, answer = self._taken(step, sent) if sampled else np.indices((len(sent), world.siblings)).reshape(2, -1)
        at = sent[prompt], answer
        kept, number = np.unique(prompt, return_inverse=True)
        names = [self._names[one] for one in sent[kept]]
        found = odds(self._case.replay(step, shares), self._odds[at][:, None])
        tokens = self._tokens[at].astype(float)
        scored = self._scored(step, found, tokens, number, names if len(names) <= 64 else [])
        if not sampled:
            return replace(scored, tokens=int(self._tokens[sent].sum()))
        said = self._offered if world.says else None
        return replace(scored, tokens=int(tokens.sum()), rollouts=len(tokens), offered=said)

    def _mixed(self, step: int, correlation: float) -> npt.NDArray[np.int64]:
        """Prompts of which some answers succeed and some fail: what dynamic sampling keeps. Two at least."""
        world = self._world
        like_alpha = self._odds.mean(axis=1) / world.prompt_spread
        other = self._random.normal(size=len(like_alpha))
        first, last = world.success
        ability = first + (last - first) * min(1.0, step / 40)
        success = ability + 2.5 * (correlation * like_alpha + np.sqrt(1.0 - correlation**2) * other)
        right = (self._random.random(self._odds.shape) < odds(np.array(0.5), success)[:, None]).sum(axis=1)
        kept = np.flatnonzero((right > 0) & (right < self._odds.shape[1]))
        return kept if len(kept) > 1 else np.arange(2)

    def _taken(self, step: int, sent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What a hook takes that is shown one prompt after the other, [2, R]: places in `sent`, and answers."""
        lengths, taken, said = self._tokens[sent], list[tuple[int, int]](), list[tuple[int, int]]()
        for prompt in lengths.sum(axis=1).argsort() if self._world.sorted else self._random.permutation(len(sent)):
            names = [f"{self._seed}/{self._names[sent[prompt]]}/{answer}" for answer in range(ROLLOUTS_PER_PROMPT)]
            tokens = lengths[prompt].tolist()
            if chosen := self._choice.choose(names, tokens, tokens, step):  # a file
                taken += [(prompt, answer) for answer in chosen]
                said.append(self._choice.take_offered())
        known = all(of_tokens for _, of_tokens in said)
        self._offered = sum(rollouts for rollouts, _ in said), sum(of_tokens for _, of_tokens in said) * known
        return np.array(sorted(taken), dtype=np.int64).reshape(-1, 2).T

    def _scored(
        self, step: int, found: Floats, tokens: Floats, prompt: npt.NDArray[np.int64], names: Sequence[str]
    ) -> ScoreRecord:
        """`prompt`: the number of each rollout's prompt, from 0 on without a gap."""
        survived = np.cumprod(found, axis=1)
        rounds = tokens / (1 + survived.sum(axis=1))
        accepted = (rounds[:, None] * survived).sum(axis=0)
        reached = np.concatenate([[rounds.sum()], accepted[:-1]])
        by_prompt = [np.bincount(prompt, counts).tolist() for counts in (tokens, rounds)]
        sums = DrafterSums.of(*by_prompt)
        each = dict(zip(names, zip(*by_prompt, strict=True), strict=True)) if names else {}
        version = self._version(step)
        return ScoreRecord(
            served=sums,
            replayed=(Replayed(version, sums, tuple(accepted.tolist()), tuple(reached.tolist()), each),),
            drafter_version=version,
            policy_version=step,
            entry_id=f"{step + 1}-0",
        )


def until_named(
    world: World, case: Case, seed: int, rule: LiveRule, most: int = 8192
) -> tuple[list[int | None], list[int | None], Counter[str]]:
    """Rounds of each sick engine until it is named, and until it is named or `lower`; other names, of sound ones too.

    None: not within `most` rounds. What is wrong before the case's onset counts as wrong too.
    """
    since: defaultdict[int, int] = defaultdict(int)
    named: dict[int, int] = {}
    said: dict[int, int] = {}
    wrong: Counter[str] = Counter()
    for step, rounds, found in Simulation(world, case, seed, rule).steps(case.onset + 40):
        for verdict in found.engines:
            number = int(verdict.reporter.split()[1])
            now = since[number] + rounds.get(verdict.reporter, 0)
            if case.wrong(step, number):
                if verdict.name in case.named:
                    named.setdefault(number, now)
                elif verdict.name not in NO_FAULT:
                    wrong[verdict.name] += 1
                if verdict.name in (*case.named, "lower"):
                    said.setdefault(number, now)
                since[number] = now
            elif verdict.name not in NO_FAULT:
                wrong[f"sound engine: {verdict.name}"] += 1
        if all(number in named or since[number] > most for number in case.sick) and step >= case.onset:
            break
    return [named.get(number) for number in case.sick], [said.get(number) for number in case.sick], wrong


def readings_held(world: World, case: Case, seed: int, rule: LiveRule, steps: int) -> int:
    """Readings at which nothing may be published."""
    return sum(found.hold is not None for _, _, found in Simulation(world, case, seed, rule).steps(steps))


def false_names(
    world: World, engines: int, steps: int, seed: int, rule: LiveRule
) -> tuple[int, int, int, Counter[str]]:
    """Sound engines that were ever called sick, reports, holds, and by what names, `lower` too."""
    case = Case("sound", (), sick=(), engines=4)
    called: set[tuple[int, str]] = set()
    names: Counter[str] = Counter()
    reports = holds = 0
    for run in range(-(-engines // case.engines)):
        held, lower = False, set[str]()
        for _, rounds, found in Simulation(world, case, seed + run, rule).steps(steps):
            reports += len(rounds)
            held = held or found.hold is not None
            for verdict in found.engines:
                if verdict.name == "lower":
                    lower.add(verdict.reporter)
                elif verdict.name not in NO_FAULT:
                    names[verdict.name] += (run, verdict.reporter) not in called
                    called.add((run, verdict.reporter))
        holds += held
        names["lower"] += len(lower)
    return len(called), reports, holds, names


def restarted(rounds: int, engines: int, seed: int, rule: LiveRule, *, said: bool) -> Counter[str]:
    """Verdicts on sound engines that restart and report next when they have counted up to a tenth more than before.

    `said`: whether their reporters say of which life their counts are.
    """
    random, names = np.random.default_rng(seed), Counter[str]()
    simulation = Simulation(ALIKE, Case("sound", (), sick=(), engines=1), seed, rule)
    for _ in simulation.steps(12):
        pass
    for _ in range(engines):
        old, new = simulation.lives((rounds, rounds + int(random.integers(rounds // 10))))
        if said:
            old, new = replace(old, life="one"), replace(new, life="two")
        account = Account()
        account.add(old, None, old)
        account.add(new, None if other_life(new, old) else old, since(new, old))
        names[watch({"engine 0": account.blocks}, simulation.replays, rule).engines[0].name] += 1
    return names


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000, help="sound engines in the first world; in others a fifth")
    parser.add_argument("--steps", type=int, default=40, help="policy versions that a sound engine serves")
    parser.add_argument("--runs", type=int, default=20, help="runs of each case")
    parser.add_argument(
        "--sampled", type=int, metavar="SEED", help="only the table of hooks that take a part, from this seed on"
    )
    asked = parser.parse_args()
    rule = LiveRule()
    if asked.sampled is not None:
        _sampled(range(asked.sampled, asked.sampled + asked.runs), rule)
        return
    print("sound engines (simulated): ever called sick, or `lower`, which blames nobody\n")
    print("| world | engines | reports | called sick | lower | runs held |\n|---|---|---|---|---|---|")
    for number, world in enumerate((*WORLDS, *SHARED, *UNCOUNTED, *UNEVEN, *SELECTED, *DYNAMIC)):
        engines = asked.engines if world is WORLDS[0] else max(4, asked.engines // 5)
        called, reports, holds, names = false_names(world, engines, asked.steps, 1000 * number, rule)
        lower = names.pop("lower")
        said = f" ({', '.join(f'{n} {c}' for n, c in names.items())})" if names else ""
        print(f"| {world.name} | {engines} | {reports:,} | {called}{said} | {lower} | {holds} |", flush=True)
    print("\nsound engines that restart, and report next when they have counted more than before: called sick\n")
    print("| rounds of both lives | engines | where no reporter says it | where they do |\n|---|---|---|---|")
    for rounds in (1_000, 10_000, 100_000):
        blamed = [_blamed(restarted(rounds, asked.engines // 2, 0, rule, said=said)) for said in (False, True)]
        print(f"| {rounds:,} | {asked.engines // 2} | {blamed[0]} | {blamed[1]} |", flush=True)
    print("\nrounds of the engine until it is named (simulated): median, worst of the runs; other names meanwhile")
    print("in brackets: the median until it is called `lower`, where that comes first\n")
    for worlds in (WORLDS[:4], SHARED[:5], (*UNCOUNTED[:3], UNEVEN[0])):
        _until_named(worlds, asked.runs, rule)
    fast = WORLDS[4]
    worlds = (WORLDS[0], fast, SHARED[0], replace(SHARED[2], name=f"{SHARED[2].name}, {fast.name}", drift=fast.drift))
    print(f"\nruns of {asked.runs} in which publishing was ever held, {asked.steps} versions (simulated)\n")
    print("| case | may be held | " + " | ".join(w.name for w in worlds) + " |\n|---|---|" + "---|" * len(worlds))
    for case in (*sick_among_sound(), poisoned(4)):
        held = [sum(readings_held(w, case, n, rule, asked.steps) > 0 for n in range(asked.runs)) for w in worlds]
        may = "yes" if "trainer features" in case.named else "no"
        print(f"| {case.name} | {may} | {' | '.join(map(str, held))} |", flush=True)


def _sampled(seeds: Sequence[int], rule: LiveRule) -> None:
    """Print at how many readings of 30 versions publishing is held where hooks take a part of the prompts."""
    part, of_easiest = SELECTED[2:]
    usual = replace(
        part, name=f"{part.name}, usual", prompt_spread=World.prompt_spread, rollout_spread=World.rollout_spread
    )
    worlds, every = (part, usual, of_easiest), (0, 1, 2, 3)
    wrong = [
        Case(f"wrong from the start, α {alpha}", (), only(scaled(alpha), every, 0), sick=every, onset=0)
        for alpha in (2.2, 2.5)
    ]
    low = [case for case in cases() if case.name == "all engines low"]
    print("readings held, in each run, where batches do not say what hooks took them from: where they do (simulated)\n")
    print("| case | " + " | ".join(w.name for w in worlds) + " |\n|---|" + "---|" * len(worlds))
    for case in (Case("sound", ()), *wrong, *low, poisoned(4)):
        cells = []
        for world in worlds:
            of = [
                [readings_held(replace(world, says=says), case, n, rule, 30) for n in seeds] for says in (False, True)
            ]
            cells.append(": ".join(", ".join(map(str, held)) for held in of))
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def _blamed(names: Counter[str]) -> str:
    sick = Counter({name: count for name, count in names.items() if name not in NO_FAULT})
    said = ", ".join(f"{name} {count}" for name, count in sick.most_common())
    return f"{sick.total()} ({said})" if sick else "0"


def _until_named(worlds: Sequence[World], runs: int, rule: LiveRule) -> None:
    """Print the table of these worlds."""
    print("| case | name | " + " | ".join(w.name for w in worlds) + " | other names |")
    print("|---|---|" + "---|" * (len(worlds) + 1))
    for case in cases():
        cells, wrong = [], Counter[str]()
        for world in worlds:
            found: list[int | None] = []
            lower: list[int | None] = []
            for seed in range(runs):
                rounds, said_lower, others = until_named(world, case, seed, rule)
                found += rounds
                lower += said_lower
                wrong += others
            middle = _summary(found)
            if lower != found and any(lower):
                middle += f" [{_summary(lower).split(', ')[0]}]"
            cells.append(middle)
        said = ", ".join(f"{name} {count}" for name, count in wrong.most_common(3)) or "none"
        print(f"| {case.name} | {case.named[0]} | {' | '.join(cells)} | {said} |", flush=True)


def _summary(found: Sequence[int | None]) -> str:
    """Median and worst of those that are known, and how many are not."""
    known = sorted(n for n in found if n is not None)
    middle = f"{known[len(known) // 2]:,}, {known[-1]:,}" if known else "-"
    return middle + (f" ({len(found) - len(known)} of {len(found)} not)" if len(known) < len(found) else "")


if __name__ == "__main__":
    main()
