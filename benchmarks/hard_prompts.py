"""Beside a few prompts of which next to nothing is accepted, is a sound engine named? And when a dead one? Simulated.

    python -m benchmarks.hard_prompts --runs 5               # a table of docs/lab/live_replay.md
    python -m benchmarks.hard_prompts --later --engines 100  # the worlds that were made after the rule

Each engine answers its own prompts of a step, a number of answers at once (`slots`), in the order in which they came.
Every round of an answer is drawn, and an answer takes as many as its tokens need: of a hard prompt three times as many,
and in an engine that lost its drafter too. So all of a report may be of one hard prompt. Reports and replay go through
the service's own classes, as in `benchmarks.live_replay`.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.live_replay import NO_FAULT, SOUND, Floats, odds
from service.monitor.live.blocks import MOST_PROMPTS, Block, counted
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import REPLAYED_BATCHES, Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.records import TURNS_MARK, AcceptanceRecord, DrafterSums, Replayed, ScoreRecord

STEPS_PER_VERSION = 5
DEAD_FROM = 11  # in the middle of a version: before its first replay nobody knows what it should accept


@dataclass(frozen=True)
class World:
    """What engines are asked, and how. Numbers of prompts are those of one engine in one step."""

    name: str
    share: float  # of the prompts that are hard
    hard: float = -3.0  # added to their log odds of acceptance: α is 1.1 instead of 3
    longer: float = 1.0  # answers of hard prompts, in those of others
    prompts: int = 8
    siblings: int = 8
    tokens: float = 200.0
    slots: int = 1  # answers at once
    mixed: bool = False  # answers of a prompt do not follow one another
    report_rounds: int = 512
    told: str = "sums"  # how an engine counts: "sums", "requests" or "prompts"
    #: Which prompts are hard: "any"; "sticky": always the same of an engine's `_DATASET`; "one": of engine 0 alone.
    which: str = "any"
    engines: int = 4
    batch_prompts: int = 0  # of one batch; 0: all of a step
    turns: int = 1  # requests of an answer, one after the other; all are hard or none
    hard_turns: int = 0  # of hard prompts' answers; 0: as many as of others
    joins: int = 0  # engines join one after the other in so many steps
    behind: int = 0  # policy versions by which engine 1 is behind the others
    lost: float = 0.0  # share of rounds of which an engine without its drafter accepts one draft


#: The worlds of which 8 of 100 sound engines were named, by the sums alone.
WORLDS = (
    World("1 %, at the same time", 0.01, slots=64),
    World("1 %, one after the other", 0.01),
    World("2 %, harder is longer, at the same time", 0.02, longer=3.0, slots=64),
    World("5 %, harder is longer, at the same time", 0.05, longer=3.0, slots=64),
    World("5 %, one after the other", 0.05),
)


#: Worlds that were made when the rule was done.
UNSEEN = (
    World("two prompts at a time", 0.05, hard=-3.5, prompts=2, slots=8),
    World("an engine has the same prompts in each epoch", 0.05, hard=-3.5, slots=16, which="sticky"),
    World("hard answers are ten times as long", 0.03, hard=-4.0, longer=10.0, slots=32, mixed=True),
    World("one engine has all hard prompts", 0.03, hard=-3.5, slots=16, which="one"),
)
#: Worlds that were made later yet: other shares, other α, and what a run of an RL trainer has besides.
LATER = (
    World("10 % of the prompts, nothing accepted", 0.1, hard=-9.0, prompts=16, slots=8),
    World("30 % of the prompts, α 1.02", 0.3, hard=-5.0, slots=16, lost=0.01),
    World(
        "the same prompts in each epoch, hard is twice as long", 0.08, hard=-4.0, longer=2.0, slots=16, which="sticky"
    ),
    World("hard answers are six times as long", 0.04, hard=-3.5, longer=6.0, slots=32, mixed=True),
    World("engines join in 20 steps", 0.03, hard=-5.0, slots=16, joins=20, lost=0.01),
    World("an engine is two versions behind", 0.03, hard=-4.0, longer=2.0, slots=16, behind=2),
    World("four prompts of 16 answers", 0.03, hard=-3.5, prompts=4, siblings=16, slots=16),
    World("short answers, one after the other", 0.03, hard=-6.0, longer=4.0, tokens=60.0, prompts=16),
    World("five turns", 0.03, hard=-3.5, slots=16, turns=5),
    World("ten turns, one after the other", 0.05, hard=-3.5, turns=10),
    World("three turns, hard prompts have nine", 0.03, hard=-3.5, longer=3.0, slots=16, turns=3, hard_turns=9),
    World("batches of 64 prompts", 0.02, hard=-9.0, longer=3.0, slots=16, batch_prompts=64),
)
_DATASET = 48


@dataclass
class Answers:
    """What one engine did in a step: every round, and every answer."""

    time: Any  # of each round, in engine steps
    prompt: Any  # of each round
    kept: Any  # drafts accepted in each round
    begin: Any  # of each answer
    end: Any


class Simulation:
    """One run of a world. `dead`: so many engines, from 0 on, accept nothing from `DEAD_FROM` on, a third into a step.

    `lost`: rounds of each engine without its drafter, so far.
    """

    def __init__(self, world: World, seed: int, rule: LiveRule, *, dead: int = 0) -> None:
        self._world, self._rule, self._dead = world, rule, dead
        self._random = np.random.default_rng(seed)
        self._blocks: dict[str, tuple[Block, ...]] = {f"engine {n}": () for n in range(world.engines)}
        self._scores: list[ScoreRecord] = []
        self._batches = 0
        self._sticky = np.random.default_rng([seed, 1]).random((world.engines, _DATASET)) < world.share
        self.lost: Counter[str] = Counter()

    def steps(self, first: int, end: int) -> Iterator[Watch]:
        """Verdicts after a report of each engine, and after every replay, of steps `first` to `end` - 1.

        Verdicts have no memory, so nothing is judged before.
        """
        replays = Replays(())
        for step in range(end):
            here = [n for n in range(self._world.engines) if n * self._world.joins <= step * self._world.engines]
            prompts = {number: self._prompts(number, step) for number in here}
            reports = [list(self._reports(number, step, *prompts[number])) for number in here]
            for part in range(max(map(len, reports))):
                for own in reports:
                    if part < len(own):
                        record, since = own[part]
                        name = str(record.reporter)
                        self._blocks[name] = counted(self._blocks[name], record)
                        self.lost[name] += since
                if step >= first:
                    yield watch(self._blocks, replays, self._rule)
            for policy in sorted({self._policy(number, step) for number in here}):
                of = [number for number in here if self._policy(number, step) == policy]
                self._scores += self._scored(policy, {number: prompts[number] for number in of}, step)
            replays = Replays(self._scores[-REPLAYED_BATCHES:])
            if step >= first:
                yield watch(self._blocks, replays, self._rule)

    def _policy(self, number: int, step: int) -> int:
        return max(0, step - self._world.behind) if number == 1 else step

    def _prompts(self, number: int, step: int) -> tuple[Any, Any, Any]:
        """Of one engine's prompts: shares of drafts accepted of each answer [P, S, K], tokens and requests [P, S]."""
        world, random = self._world, self._random
        hard = self._hard(number, step)
        shift = 0.35 * random.normal(size=world.prompts) + world.hard * hard
        own = 0.35 * random.normal(size=(world.prompts, world.siblings))
        survived = np.cumprod(odds(SOUND, (shift[:, None] + own)[..., None]), axis=-1)
        length = world.tokens * np.exp(0.5 * random.normal(size=world.prompts)) * np.where(hard, world.longer, 1.0)
        tokens = np.rint(length[:, None] * np.exp(0.3 * random.normal(size=own.shape))).clip(2)
        turns = np.where(hard, world.hard_turns or world.turns, world.turns)[:, None]
        return survived, tokens.clip(2 * turns), np.broadcast_to(turns, tokens.shape)

    def _hard(self, number: int, step: int) -> Any:
        world = self._world
        drawn = self._random.random(world.prompts)
        if world.which == "sticky":
            at = np.arange(step * world.prompts, (step + 1) * world.prompts)
            return self._sticky[number][at % _DATASET]
        if world.which == "one":
            return drawn < (world.share * world.engines if number == 0 else 0.0)
        return drawn < world.share

    def _answers(self, survived: Floats, tokens: Floats, turns: Any, lost_at: float) -> Answers:
        """Answer all prompts; from engine step `lost_at` on no draft is accepted."""
        world, random = self._world, self._random
        queue = [(p, s) for p in range(world.prompts) for s in range(world.siblings)]
        if world.mixed:
            queue = [queue[i] for i in random.permutation(len(queue))]
        free = [0] * world.slots
        times, owners, drafts, begins, ends = [], [], [], [], []
        for p, s in queue:
            begin, length = heapq.heappop(free), int(tokens[p, s])
            kept = (random.random(length)[:, None] < survived[p, s]).sum(axis=1)
            since = max(0, int(min(lost_at - begin, length)))
            kept[since:] = random.random(length - since) < world.lost
            rounds = int(np.searchsorted(np.cumsum(1 + kept), length)) + 1
            edges = np.linspace(begin, begin + rounds, int(turns[p, s]) + 1).round()
            times.append(np.arange(begin, begin + rounds))
            # An engine takes each turn after the first for a prompt of its own.
            turn = np.searchsorted(edges[1:-1], times[-1], side="right")
            owners.append(np.where(turn == 0, p, 10_000 + 100 * (p * world.siblings + s) + turn))
            drafts.append(kept[:rounds])
            begins.append(edges[:-1])
            ends.append(edges[1:])
            heapq.heappush(free, begin + rounds)
        time = np.concatenate(times)
        order = np.argsort(time, kind="stable")
        prompt, kept = (np.concatenate(one)[order] for one in (owners, drafts))
        return Answers(time[order], prompt, kept, np.concatenate(begins), np.concatenate(ends))

    def _reports(
        self, number: int, step: int, survived: Floats, tokens: Floats, turns: Any
    ) -> Iterator[tuple[AcceptanceRecord, int]]:
        """The reports of a step, and how many rounds of each were without the drafter."""
        world, lost_at = self._world, np.inf
        if number < self._dead and step >= DEAD_FROM:
            per_answer = world.tokens / float(1 + np.cumprod(SOUND).sum())
            lost_at = per_answer * world.prompts * world.siblings / world.slots / 3 if step == DEAD_FROM else 0.0
        found, last = self._answers(survived, tokens, turns, lost_at), -1
        policy = self._policy(number, step)
        for begin in range(0, len(found.time), world.report_rounds):
            part = slice(begin, begin + world.report_rounds)
            kept, prompt, now = found.kept[part], found.prompt[part], int(found.time[part][-1])
            over = now + 1 if begin + world.report_rounds >= len(found.time) else now
            by_position = tuple(int((kept > at).sum()) for at in range(len(SOUND)))
            rounds = len(kept)
            more: dict[str, Any] = {}
            if world.told == "prompts":
                more["by_prompt"] = {
                    _name(step, number, p): (int((1 + kept[prompt == p]).sum()), int((prompt == p).sum()))
                    for p in np.unique(prompt)
                }
                if len(more["by_prompt"]) > MOST_PROMPTS:
                    more["by_prompt"] = None
            if world.told != "sums":  # who counts by prompt tells requests too
                more["finished_requests"] = int(((found.end > last) & (found.end <= over)).sum())
                more["running_requests"] = int(((found.begin <= over) & (found.end > over)).sum())
            last = over
            record = AcceptanceRecord(
                reporter=f"engine {number}",
                drafter_version=self._version(policy),
                policy_version=policy,
                rounds=rounds,
                accepted_tokens=sum(by_position),
                drafted_tokens=len(SOUND) * rounds,
                emitted_tokens=rounds + sum(by_position),
                accepted_per_position=by_position,
                created=float(step),
                **more,
            )
            yield record, int((found.time[part] >= lost_at).sum())

    def _version(self, policy: int) -> str:
        return f"v{policy // STEPS_PER_VERSION:06d}-0a1b2c3d"

    def _scored(self, policy: int, prompts: dict[int, tuple[Any, Any, Any]], step: int) -> Iterator[ScoreRecord]:
        """Score records of these engines' answers."""
        every = [(number, p) for number, (_, tokens, _) in prompts.items() for p in range(len(tokens))]
        size = self._world.batch_prompts or len(every)
        for begin in range(0, len(every), size):
            each, accepted, rollouts, segments = {}, np.zeros(len(SOUND)), 0, 0
            for number, p in every[begin : begin + size]:
                survived, tokens, turns = (one[p] for one in prompts[number])
                rounds = tokens / (1 + survived.sum(axis=-1))
                accepted += (rounds[:, None] * survived).sum(axis=0)
                rollouts += tokens.size
                segments += int(turns.sum())
                each[_name(step, number, p)] = (float(tokens.sum()), float(rounds.sum()))
            sums = DrafterSums.of(*zip(*each.values(), strict=True))
            kept = tuple(accepted.tolist())
            mark = TURNS_MARK if self._world.turns > 1 else ""
            apart = {f"{name}{mark}": one for name, one in each.items()} if len(each) <= MOST_PROMPTS else {}
            told = Replayed(self._version(policy), sums, kept, (sums.rounds, *kept[:-1]), apart)
            self._batches += 1
            yield ScoreRecord(
                served=sums,
                replayed=(told,),
                drafter_version=told.version,
                policy_version=policy,
                entry_id=f"{self._batches}-0",
                rollouts=rollouts,
                segments=segments,
                tokens=int(sums.tokens) + rollouts,
            )


def _name(step: int, number: int, prompt: int) -> str:
    """Of a prompt, as engines and replay name it."""
    return f"{step:04x}{number:02x}{prompt:02x}"


def false_names(world: World, runs: int, seed: int, rule: LiveRule, steps: int = 40) -> Counter[str]:
    """Sound engines that were ever called sick or `depth`, by their first such name."""
    names: Counter[str] = Counter()
    for run in range(runs):
        called: set[str] = set()
        for found in Simulation(world, seed + run, rule).steps(0, steps):
            for verdict in found.engines:
                if verdict.name not in NO_FAULT and verdict.reporter not in called:
                    called.add(verdict.reporter)
                    names[verdict.name] += 1
    return names


def until_dead(world: World, seed: int, rule: LiveRule, dead: int = 1, steps: int = 30) -> list[int | None]:
    """Rounds without its drafter until each of the first engines is called dead; None: it never is."""
    run, rounds = Simulation(world, seed, rule, dead=dead), dict[str, int]()
    for found in run.steps(DEAD_FROM, DEAD_FROM + steps):
        for verdict in found.engines:
            if verdict.name == "dead" and run.lost[verdict.reporter]:
                rounds.setdefault(verdict.reporter, run.lost[verdict.reporter])
        if len(rounds) == dead:
            break
    return [rounds.get(f"engine {number}") for number in range(dead)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--later", action="store_true", help="the worlds that were made after the rule")
    parser.add_argument("--only", default="", help="worlds whose name has this in it")
    parser.add_argument("--told", nargs="+", default=["sums", "requests", "prompts"], help="how engines count")
    parser.add_argument("--engines", type=int, default=4, help="of each run")
    parser.add_argument("--dead", type=int, default=1, help="engines that lose their drafter, in other runs")
    asked = parser.parse_args()
    print("| world | counts | sound engines | named | lost drafters | named dead | after rounds: median, worst |")
    print("|---|---|---|---|---|---|---|")
    for world in LATER if asked.later else (*WORLDS, *UNSEEN):
        for told in asked.told if asked.only in world.name else ():
            one = replace(world, told=told, engines=asked.engines)
            names = false_names(one, asked.runs, asked.seed, LiveRule())
            said = ", ".join(f"{name} {count}" for name, count in names.most_common())
            rounds = [n for run in range(asked.runs) for n in until_dead(one, asked.seed + run, LiveRule(), asked.dead)]
            found = sorted(n for n in rounds if n is not None)
            delay = f"{found[len(found) // 2]:,}, {found[-1]:,}" if found else "-"
            sick = f"{names.total()} ({said})" if said else "0"
            print(
                f"| {world.name} | {told} | {asked.runs * asked.engines} | {sick} | {len(rounds)} | {len(found)} "
                f"| {delay} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
