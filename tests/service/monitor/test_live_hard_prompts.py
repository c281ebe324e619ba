"""A few prompts of which next to nothing is accepted: an engine that answers one of them is sound, and is not named.

The world is not one that the rule was made for. Each engine answers its own quarter of a step's prompts, one after the
other, so all of a report may be of one hard prompt. The rest is as in benchmarks/live_replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.worker.record_fixtures import acceptance

from benchmarks import hard_prompts
from benchmarks.live_replay import SOUND, odds
from service.monitor.live.blocks import Block, counted
from service.monitor.live.engine import DEAD_ROUNDS, LiveRule
from service.monitor.live.hard import chance_of_hard
from service.monitor.live.replays import Replays
from service.monitor.live.watch import Watch, watch
from service.monitor.records import DrafterSums, Replayed, ScoreRecord

Counts = npt.NDArray[np.int64]
ENGINES, PROMPTS, SIBLINGS, REPORT_ROUNDS = 4, 8, 8, 512
HARD = -3.0  # added to the log odds of acceptance: α is 1.1 instead of 3
DEAD_FROM = 11  # in the middle of a version: before its first replay nobody knows what it should accept


def run(share: float, seed: int, *, steps: int = 40, dead: bool = False) -> Iterator[tuple[int, Watch]]:
    """After every report and replay: rounds of engine 0 since step `DEAD_FROM`, and the verdicts.

    `share` of the prompts are hard. `dead`: engine 0 accepts nothing from then on.
    """
    rng = np.random.default_rng(seed)
    blocks: dict[str, tuple[Block, ...]] = {f"engine {n}": () for n in range(ENGINES)}
    scores: list[ScoreRecord] = []
    rounds_since = 0
    for step in range(steps):
        version = f"v{step // 5:06d}-0a1b2c3d"
        replays = Replays(scores)
        tokens_of, rounds_of, kept_of = [], [], np.zeros(len(SOUND))
        for number, name in enumerate(blocks):
            shift = 0.35 * rng.normal(size=PROMPTS) + HARD * (rng.random(PROMPTS) < share)
            own = 0.35 * rng.normal(size=(PROMPTS, SIBLINGS))
            survived = np.cumprod(odds(SOUND, (shift[:, None] + own)[..., None]), axis=-1).reshape(-1, len(SOUND))
            length = 200 * np.exp(0.5 * rng.normal(size=PROMPTS))
            tokens = (length[:, None] * np.exp(0.3 * rng.normal(size=own.shape))).clip(2).ravel()
            rounds = tokens / (1 + survived.sum(axis=1))
            tokens_of += tokens.reshape(PROMPTS, -1).sum(axis=1).tolist()
            rounds_of += rounds.reshape(PROMPTS, -1).sum(axis=1).tolist()
            kept_of += rounds @ survived
            whole = np.maximum(1, np.rint(rounds)).astype(int)
            lost = dead and number == 0 and step >= DEAD_FROM
            for answered in reports(whole):
                drafts = [0] * len(SOUND) if lost else kept(rng, answered, survived)
                count = int(answered.sum())
                report = {
                    **{"reporter": name, "drafter_version": version, "policy_version": step, "rounds": count},
                    **{"accepted_tokens": sum(drafts), "drafted_tokens": len(SOUND) * count},
                    **{"emitted_tokens": count + sum(drafts), "accepted_per_position": drafts, "created": float(step)},
                }
                blocks[name] = counted(blocks[name], acceptance(report))
                rounds_since += count * (number == 0 and step >= DEAD_FROM)
                yield rounds_since, watch(blocks, replays, LiveRule())
        sums = DrafterSums.of(tokens_of, rounds_of)
        told = Replayed(version, sums, tuple(kept_of.tolist()), (sums.rounds, *kept_of.tolist()[:-1]))
        scores.append(
            ScoreRecord(
                served=sums, replayed=(told,), drafter_version=version, policy_version=step, entry_id=f"{step + 1}-0"
            )
        )
        yield rounds_since, watch(blocks, Replays(scores), LiveRule())


def reports(rounds: Counts) -> Iterator[Counts]:
    """Rounds of each answer in each report, where one answer is written after the other."""
    ends = np.cumsum(rounds)
    for begin in range(0, int(ends[-1]), REPORT_ROUNDS):
        yield np.clip(np.minimum(ends, begin + REPORT_ROUNDS) - np.maximum(ends - rounds, begin), 0, None)


def kept(rng: np.random.Generator, rounds: Counts, survived: npt.NDArray[Any]) -> list[int]:
    """Rounds that keep the first draft, the first two, ...: drawn."""
    edges = np.concatenate([np.ones((len(rounds), 1)), survived, np.zeros((len(rounds), 1))], axis=1)
    counts = rng.multinomial(rounds, -np.diff(edges, axis=1)).sum(axis=0)
    return [int(n) for n in counts[::-1].cumsum()[::-1][1:]]


def test_engines_that_answer_hard_prompts_are_sound() -> None:
    """Of 24 engines; the rule of before named 8."""
    named = {
        (share, seed, verdict.reporter): verdict.text
        for share in (0.01, 0.05)
        for seed in range(3)
        for _, found in run(share, seed)
        for verdict in found.engines
        if verdict.sick
    }
    assert len(named) <= 2, named


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_an_engine_that_lost_its_drafter_is_named_dead_beside_hard_prompts(share: float) -> None:
    for seed in range(3):
        answers = (
            rounds
            for rounds, found in run(share, seed, steps=DEAD_FROM + 8, dead=True)
            if (verdict := found.get("engine 0")) is not None and verdict.name == "dead" and rounds
        )
        assert 0 < next(answers, 0) <= 2000


def test_one_report_of_a_hard_prompt_does_not_hide_what_was_proven_of_an_engine() -> None:
    """Nor end the hold on publishing, which needs that no engine of several is sound."""
    version, accepted = "v000001-0a1b2c3d", (110_000.0, 60_000.0, 20_000.0, 10_000.0)
    sums = DrafterSums.of([300_000.0], [100_000.0])
    told = Replayed(version, sums, accepted, (100_000.0, *accepted[:-1]))
    score = ScoreRecord(served=sums, replayed=(told,), drafter_version=version, policy_version=1, entry_id="1-0")
    replays = Replays([score])
    replays.spread, replays.outlier = 0.3, 1500.0  # of rollouts of which a few are very hard

    def block(alpha: float, rounds: int) -> Block:
        drafts = [int(rounds * (alpha - 1) * part) for part in (0.55, 0.28, 0.12, 0.05)]
        tokens = rounds + sum(drafts)
        return Block(version, 1, rounds, tokens, 4 * rounds, tuple(drafts), 0.0)

    low = tuple(block(2.0, 256) for _ in range(28))
    before = watch({"a": low, "b": low}, replays, LiveRule())
    after = watch({"a": (*low, block(1.03, 512)), "b": low}, replays, LiveRule())
    assert before.hold is not None
    assert [one.name for one in after.engines] == [one.name for one in before.engines] == ["trainer features"] * 2
    assert after.hold is not None


# --- how many prompts stand behind the rounds
def replayed(hard: int, prompts: int, *, told_apart: bool = True, more: Sequence[ScoreRecord] = ()) -> Replays:
    """So many prompts of eight answers, of which some are hard: α is 1.02 instead of 3. `more`: other batches."""
    version, per_step, scores = "v000001-0a1b2c3d", 32, list(more)
    for step in range(prompts // per_step):
        at = range(step * per_step, (step + 1) * per_step)
        each = {f"{n:08x}": (1600.0, 1600.0 / (1.02 if n * hard % prompts < hard else 3.0)) for n in at}
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        kept = [(sums.tokens - sums.rounds) * part for part in (0.4, 0.3, 0.2, 0.1)]
        told = Replayed(version, sums, tuple(kept), (sums.rounds, *kept[:-1]), each if told_apart else {})
        record: dict[str, Any] = {
            "served": sums,
            "replayed": (told,),
            "drafter_version": version,
            "rollouts": 8 * per_step,
        }
        scores.append(ScoreRecord(**record, policy_version=step, entry_id=f"{step + 1}-0", tokens=1600 * per_step))
    return Replays(scores)


def idle(rounds: int, policy: int = 99, **more: Any) -> Block:
    """An engine that accepted one draft in a hundred rounds, with a policy version that was not replayed so far."""
    drafts = (rounds // 100, 0, 0, 0)
    return Block("v000001-0a1b2c3d", policy, rounds, rounds + drafts[0], 4 * rounds, drafts, 0.0, **more)


def name_of(replays: Replays, *blocks: Block) -> str:
    return watch({"a": blocks}, replays, LiveRule()).engines[0].name


def test_a_sound_engine_at_work_on_one_hard_prompt_is_not_dead_however_many_rounds_it_takes() -> None:
    replays = replayed(16, 320)
    rounds = 4 * DEAD_ROUNDS
    assert name_of(replays, idle(rounds)) == "dead", "it says neither requests nor prompts"
    assert name_of(replays, idle(rounds, finished=0, running=8)) == "unknown"
    assert name_of(replays, idle(rounds, finished=8, running=0)) == "unknown"
    assert name_of(replays, *[idle(rounds // 8, finished=2, running=1)] * 8) == "unknown"
    assert name_of(replays, idle(rounds, by_prompt={"a": (rounds + 61, rounds)})) == "unknown"
    most = {"a": (rounds, rounds - 100)} | {f"b{n}": (10, 10) for n in range(10)}
    assert name_of(replays, idle(rounds, by_prompt=most)) == "unknown", "of the others are hardly any rounds"


def test_an_engine_that_accepts_nothing_of_many_prompts_is_dead_after_as_many_rounds_as_before() -> None:
    replays = replayed(16, 320)
    assert name_of(replays, idle(DEAD_ROUNDS, finished=32, running=32)) == "dead"
    assert name_of(replays, *[idle(DEAD_ROUNDS // 8, finished=8, running=0)] * 8) == "dead"
    many = Block("v000001-0a1b2c3d", 99, 512, 1536, None, (), 0.0, finished=0, running=64, most_running=64)
    assert name_of(replays, idle(DEAD_ROUNDS, finished=24, running=24)) == "dead"
    assert name_of(replays, many, idle(DEAD_ROUNDS, finished=24, running=24)) == "unknown", "the hard ones end last"
    each = DEAD_ROUNDS // 8
    assert name_of(replays, idle(8 * each, by_prompt={f"{n}": (each + 1, each) for n in range(8)})) == "dead"


def test_the_more_prompts_are_hard_the_more_must_accept_nothing() -> None:
    least = []
    for hard in (0, 2, 16, 80):
        replays = replayed(hard, 320)
        names = [name_of(replays, idle(2 * DEAD_ROUNDS, finished=8 * n, running=0)) for n in range(1, 24)]
        assert names == sorted(names, reverse=True), "unknown, then dead"
        least.append(names.index("dead") + 1)
    assert least == sorted(least)
    assert (least[0], least[-1]) == (3, 16)


def test_prompts_that_a_batch_does_not_tell_apart_are_supposed_to_be_hard() -> None:
    apart, together = (replayed(16, 320, told_apart=told).prompts.hard_share(1515, 1500) for told in (True, False))
    assert together >= apart >= 16 / 320
    assert replayed(0, 320, told_apart=False).prompts.hard_share(1515, 1500) < 0.05


def test_a_batch_whose_answers_are_one_token_each_has_no_rounds_and_says_nothing() -> None:
    """It came beside an engine that accepts nothing: no verdict was found for any engine of the run."""
    before, nothing = replayed(16, 320), DrafterSums(0.0, 0.0)
    told = Replayed("v000001-0a1b2c3d", nothing, (0.0,) * 4, (0.0,) * 4)
    empty = ScoreRecord(
        served=nothing, replayed=(told,), drafter_version=told.version, policy_version=1, rollouts=8, entry_id="9-0"
    )
    assert Replays([empty]).prompts.hard_share(1515, 1500) == pytest.approx(0.1), "no prompt is known"
    for finished in (8, 400):
        block = idle(DEAD_ROUNDS, finished=finished, running=0)
        assert name_of(Replays([empty]), block) == "unknown"
        assert name_of(replayed(16, 320, more=[empty]), block) == name_of(before, block)


def test_batches_that_hold_a_part_of_the_answers_make_requests_fewer_prompts() -> None:
    """By the engines' own counts: they emitted four times the tokens of the batches."""
    replays = replayed(16, 320)
    more = [Block("v000001-0a1b2c3d", step, 68_000, 204_800, None, (), 0.0) for step in range(10)]
    found = replays.with_counts_of([more])
    assert replays.siblings == 8
    assert found.siblings == pytest.approx(8 * 4, rel=0.01)


def test_the_chance_is_that_of_the_binomial_law_or_more() -> None:
    rng = np.random.default_rng(0)
    for prompts, beside, share in ((2, 0, 0.2), (3, 5, 0.1), (6, 14, 0.2)):
        drawn = rng.random((200_000, prompts + beside)) < share
        assert chance_of_hard(prompts, beside, share) >= 0.95 * (drawn.sum(axis=1) >= prompts).mean()
    assert chance_of_hard(3, 0, 0.1) == pytest.approx(0.001)
    assert chance_of_hard(1, 9, 0.1) == 1.0


@pytest.mark.parametrize("told", ["requests", "prompts"])
def test_no_sound_engine_is_named_beside_hard_prompts_and_a_lost_drafter_soon_is(told: str) -> None:
    """A short form of `python -m benchmarks.hard_prompts`."""
    for world in (hard_prompts.WORLDS[3], hard_prompts.WORLDS[4]):
        world = replace(world, told=told)
        assert not hard_prompts.false_names(world, 1, 50, LiveRule(), steps=24)
    (rounds,) = hard_prompts.until_dead(replace(hard_prompts.WORLDS[3], told=told), 50, LiveRule(), steps=2)
    assert rounds is not None
    assert rounds <= 2000
