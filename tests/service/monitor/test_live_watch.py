"""Several engines (`service/monitor/live/watch.py`): which of them count, and what their verdicts say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from live_fixtures import RULE, VERSION, block, known, sound

from service.monitor.live.blocks import Block
from service.monitor.live.engine import DEAD_ROUNDS
from service.monitor.live.replays import Replays
from service.monitor.live.watch import EngineVerdict, Watch, failed_pushes, push_is_due, watch


def replays() -> Replays:
    found = known()
    found.spread = 0.3
    return found


def dead() -> Block:
    return block(DEAD_ROUNDS, (15, 0, 0, 0), drafted=4)


def names(found: Watch) -> dict[str, str]:
    return {one.reporter: one.name for one in found.engines}


def test_engines_that_are_low_since_their_start_or_fell_say_so() -> None:
    low = [sound(1024, factor=0.5) for _ in range(4)]
    found = watch({"a": low, "b": [sound(4096)]}, replays(), RULE)
    assert names(found) == {"a": "engine features", "b": "healthy"}
    assert found.engines[0].text.endswith(
        "so it has been from its first rounds: aux layers in another order, or other states than the trainer sends"
    )
    fell = watch({"a": [*[sound(1024) for _ in range(4)], *low], "b": [sound(4096)]}, replays(), RULE)
    assert names(fell) == {"a": "stale weights", "b": "healthy"}
    assert fell.engines[0].text.endswith(
        "it began in the middle of a version, so it does not run the weights that it names, or samples at another "
        "temperature"
    )
    assert (found.hold, fell.hold) == (None, None)
    assert (fell.engines[0].sick, fell.engines[1].sick) == (True, False)
    assert fell.sick == {("a", VERSION)}


def test_all_engines_with_a_living_drafter_are_low_together() -> None:
    low = [sound(1024, factor=0.5) for _ in range(4)]
    both = watch({"a": low, "b": low, "c": [dead()], "d": [dead()]}, replays(), RULE)
    assert names(both) == {"a": "trainer features", "b": "trainer features", "c": "dead", "d": "dead"}
    assert both.hold is not None
    assert both.hold.startswith("live and replay α disagree in 2 of 4 engines: a: live α")
    assert both.engines[0].text.endswith(
        ": so it is in all engines; the trainer's features are wrong, or the weights that the service serves. It is as low "
        "where the trainer does not send its hardest prompts: engines that count by prompt would tell, and features that "
        "engines send hold all prompts"
    )
    counts = [replace(block, by_prompt={"0a1b2c3d": (block.tokens, block.rounds)}) for block in low]
    told = watch({"a": counts, "b": counts}, replays(), RULE)
    assert told.engines[0].text.endswith("or the weights that the service serves"), "they would tell"
    alone = watch({"a": low, "c": [dead()]}, replays(), RULE)
    assert names(alone) == {"a": "engine features", "c": "dead"}, "dead engines are no others"
    unknown = watch({"a": low, "b": low, "c": [sound(100)], "d": [sound(100)]}, replays(), RULE)
    assert names(unknown)["a"] == "trainer features"
    assert unknown.hold is not None
    assert "in 2 of 2 engines" in unknown.hold, "who has too few rounds is not judged"


@pytest.mark.parametrize(("high", "held"), [(4, True), (3, False)])
def test_four_of_five_above_replay_are_the_trainers(high: int, held: bool) -> None:
    above, known_ = sound(4096, factor=1.9), replays()
    known_.response_tokens = None
    engines = {f"{n}": [above] for n in range(high)} | {f"{n}": [sound(4096)] for n in range(high, 5)}
    found = watch(engines, known_, RULE)
    assert set(names(found).values()) == {"healthy", "trainer features" if held else "unknown"}
    assert found.engines[0].text.endswith(
        "more than the drafter could accept; the trainer's features or log-probabilities that are replayed are wrong, "
        "or of other weights"
        if held
        else "its prompts are easier than the trainer's, or than those of other engines"
    )
    assert (found.hold is not None) == held
    assert watch({"a": [sound(100)]}, known_, RULE).hold is None


def test_an_engine_that_may_have_harder_prompts_is_told_how_to_tell() -> None:
    found_ = known()
    found_.spread, found_.answered = 0.0005, {1: 4 * 4096 * 2.775}
    found = watch({"a": [sound(4096, factor=0.88)], "b": [sound(4096)]}, found_, RULE)
    assert names(found) == {"a": "lower", "b": "healthy"}
    assert (
        ": harder prompts may be why (spread each prompt's answers over the engines to tell); if they are not, so it "
        "has been from its first rounds: aux layers"
    ) in found.engines[0].text
    assert not found.engines[0].sick


def test_a_dead_engine_is_pushed_to_again_after_pauses_that_double() -> None:
    verdict = EngineVerdict("a", "dead", "", since=100.0)
    assert push_is_due(RULE, verdict, [], 100.0)
    assert not push_is_due(RULE, verdict, [90.0], 119.9), "a push before it died keeps the next one away as well"
    assert push_is_due(RULE, verdict, [90.0], 120.0)
    for failed, pause in (([110.0], 30.0), ([110.0, 140.0], 60.0), ([110.0 + n for n in range(9)], 1800.0)):
        assert failed_pushes(verdict, [100.0, *failed]) == failed
        assert not push_is_due(RULE, verdict, failed, failed[-1] + pause - 0.1)
        assert push_is_due(RULE, verdict, failed, failed[-1] + pause)
    assert push_is_due(RULE, verdict, [500.0], 400.0), "a clock was set back"
    assert failed_pushes(replace(verdict, since=None), [110.0]) == []
