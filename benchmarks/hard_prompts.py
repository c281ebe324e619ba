"""Beside a few prompts of which next to nothing is accepted, is a sound engine named? And when a dead one? Simulated.

    python -m benchmarks.hard_prompts --runs 5      # a table of docs/reference/live_replay.md

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

from benchmarks.live_replay import NO_FAULT, SOUND, STEPS_KEPT, Floats, odds
from service.monitor.live.blocks import Block, counted
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.records import AcceptanceRecord, DrafterSums, Replayed, ScoreRecord

ENGINES = 4
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
    """One run of a world. `dead`: engine 0 accepts nothing from `DEAD_FROM` on, a third into that step's answers."""

    def __init__(self, world: World, seed: int, rule: LiveRule, *, dead: bool = False) -> None:
        self._world, self._rule, self._dead = world, rule, dead
        self._random = np.random.default_rng(seed)
        self._blocks: dict[str, tuple[Block, ...]] = {f"engine {n}": () for n in range(ENGINES)}
        self._scores: list[ScoreRecord] = []
        self._sticky = np.random.default_rng([seed, 1]).random((ENGINES, _DATASET)) < world.share

    def steps(self, count: int) -> Iterator[tuple[int, int, Watch]]:
        """After a report of each, and every replay: the step, rounds of engine 0 without its drafter, the verdicts."""
        lost, replays = 0, Replays(())
        for step in range(count):
            prompts = [self._prompts(number, step) for number in range(ENGINES)]
            reports = [list(self._reports(number, step, *prompts[number])) for number in range(ENGINES)]
            for part in range(max(map(len, reports))):
                for number, own in enumerate(reports):
                    if part < len(own):
                        record, since = own[part]
                        name = str(record.reporter)
                        self._blocks[name] = counted(self._blocks[name], record)
                        lost += since if number == 0 else 0
                yield step, lost, watch(self._blocks, replays, self._rule)
            self._scores.append(self._score(step, prompts))
            replays = Replays(self._scores[-STEPS_KEPT:])
            yield step, lost, watch(self._blocks, replays, self._rule)

    def _prompts(self, number: int, step: int) -> tuple[Any, Any]:
        """Of one engine's prompts: shares of drafts accepted of each answer, [P, S, K], and their tokens [P, S]."""
        world, random = self._world, self._random
        hard = self._hard(number, step)
        shift = 0.35 * random.normal(size=world.prompts) + world.hard * hard
        own = 0.35 * random.normal(size=(world.prompts, world.siblings))
        survived = np.cumprod(odds(SOUND, (shift[:, None] + own)[..., None]), axis=-1)
        length = world.tokens * np.exp(0.5 * random.normal(size=world.prompts)) * np.where(hard, world.longer, 1.0)
        return survived, np.rint(length[:, None] * np.exp(0.3 * random.normal(size=own.shape))).clip(2)

    def _hard(self, number: int, step: int) -> Any:
        world = self._world
        drawn = self._random.random(world.prompts)
        if world.which == "sticky":
            at = np.arange(step * world.prompts, (step + 1) * world.prompts)
            return self._sticky[number][at % _DATASET]
        if world.which == "one":
            return drawn < (world.share * ENGINES if number == 0 else 0.0)
        return drawn < world.share

    def _answers(self, survived: Floats, tokens: Floats, lost_at: float) -> Answers:
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
            kept[max(0, int(min(lost_at - begin, length))) :] = 0
            rounds = int(np.searchsorted(np.cumsum(1 + kept), length)) + 1
            times.append(np.arange(begin, begin + rounds))
            owners.append(np.full(rounds, p))
            drafts.append(kept[:rounds])
            begins.append(begin)
            ends.append(begin + rounds)
            heapq.heappush(free, begin + rounds)
        time = np.concatenate(times)
        order = np.argsort(time, kind="stable")
        prompt, kept = (np.concatenate(one)[order] for one in (owners, drafts))
        return Answers(time[order], prompt, kept, np.array(begins), np.array(ends))

    def _reports(
        self, number: int, step: int, survived: Floats, tokens: Floats
    ) -> Iterator[tuple[AcceptanceRecord, int]]:
        """The reports of a step, and how many rounds of each were without the drafter."""
        world, lost_at = self._world, np.inf
        if self._dead and number == 0 and step >= DEAD_FROM:
            per_answer = world.tokens / float(1 + np.cumprod(SOUND).sum())
            lost_at = per_answer * world.prompts * world.siblings / world.slots / 3 if step == DEAD_FROM else 0.0
        found, last = self._answers(survived, tokens, lost_at), -1
        for begin in range(0, len(found.time), world.report_rounds):
            part = slice(begin, begin + world.report_rounds)
            kept, prompt, now = found.kept[part], found.prompt[part], int(found.time[part][-1])
            over = now + 1 if begin + world.report_rounds >= len(found.time) else now
            by_position = tuple(int((kept > at).sum()) for at in range(len(SOUND)))
            rounds = len(kept)
            more: dict[str, Any] = {}
            if world.told == "prompts":
                more["by_prompt"] = {
                    f"{step:04x}{number:02x}{p:02x}": (int((1 + kept[prompt == p]).sum()), int((prompt == p).sum()))
                    for p in np.unique(prompt)
                }
            if world.told == "requests":
                more["finished_requests"] = int(((found.end > last) & (found.end <= over)).sum())
                more["running_requests"] = int(((found.begin <= over) & (found.end > over)).sum())
            last = over
            record = AcceptanceRecord(
                reporter=f"engine {number}",
                drafter_version=self._version(step),
                policy_version=step,
                rounds=rounds,
                accepted_tokens=sum(by_position),
                drafted_tokens=len(SOUND) * rounds,
                emitted_tokens=rounds + sum(by_position),
                accepted_per_position=by_position,
                created=float(step),
                **more,
            )
            yield record, int((found.time[part] >= lost_at).sum())

    def _version(self, step: int) -> str:
        return f"v{step // STEPS_PER_VERSION:06d}-0a1b2c3d"

    def _score(self, step: int, prompts: list[tuple[Floats, Floats]]) -> ScoreRecord:
        each, accepted, rollouts = {}, np.zeros(len(SOUND)), 0
        for number, (survived, tokens) in enumerate(prompts):
            rounds = tokens / (1 + survived.sum(axis=-1))
            accepted += (rounds[..., None] * survived).sum(axis=(0, 1))
            rollouts += tokens.size
            for p in range(len(tokens)):
                each[f"{step:04x}{number:02x}{p:02x}"] = (float(tokens[p].sum()), float(rounds[p].sum()))
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        kept = tuple(accepted.tolist())
        told = Replayed(self._version(step), sums, kept, (sums.rounds, *kept[:-1]), each if len(each) <= 64 else {})
        return ScoreRecord(
            served=sums,
            replayed=(told,),
            drafter_version=told.version,
            policy_version=step,
            entry_id=f"{step + 1}-0",
            rollouts=rollouts,
            tokens=int(sums.tokens) + rollouts,
        )


def false_names(world: World, runs: int, seed: int, rule: LiveRule, steps: int = 40) -> Counter[str]:
    """Sound engines that were ever called sick or `depth`, by their first such name."""
    names: Counter[str] = Counter()
    for run in range(runs):
        called: set[str] = set()
        for _, _, found in Simulation(world, seed + run, rule).steps(steps):
            for verdict in found.engines:
                if verdict.name not in NO_FAULT and verdict.reporter not in called:
                    called.add(verdict.reporter)
                    names[verdict.name] += 1
    return names


def until_dead(world: World, seed: int, rule: LiveRule, steps: int = 30) -> int | None:
    """Rounds without its drafter until engine 0 is called dead; None: it never is."""
    for _, lost, found in Simulation(world, seed, rule, dead=True).steps(DEAD_FROM + steps):
        verdict = found.get("engine 0")
        if verdict is not None and verdict.name == "dead" and lost:
            return lost
    return None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each world, with four engines")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(
        "| world | counts | sound engines | called sick | rounds until a lost drafter is named |\n|---|---|---|---|---|"
    )
    for world in (*WORLDS, *UNSEEN):
        for told in ("sums", "requests", "prompts"):
            one = replace(world, told=told)
            names = false_names(one, asked.runs, asked.seed, LiveRule())
            said = ", ".join(f"{name} {count}" for name, count in names.most_common())
            found = sorted(n for run in range(asked.runs) if (n := until_dead(one, asked.seed + run, LiveRule())))
            delay = f"{found[len(found) // 2]:,}, {found[-1]:,}" if found else "-"
            missed = f" ({asked.runs - len(found)} of {asked.runs} not)" if len(found) < asked.runs else ""
            print(
                f"| {world.name} | {told} | {asked.runs * ENGINES} | {names.total()}{f' ({said})' if said else ''} | "
                f"{delay}{missed} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
