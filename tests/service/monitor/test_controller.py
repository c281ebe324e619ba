"""Train or idle: the controller trains while it pays, stops when it does not, and notices when it pays again."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from service.monitor.controller import Action, Controller, Economy

ECONOMY = Economy(worker_cost=0.1, generation_share=0.7, versions_served=5.0, min_gain=0.002, wake_drop=0.02)


def run(gains: list[float], *, train_seconds: float = 1.0, version_seconds: float = 3.0) -> list[Action]:
    """Actions on a stream of batches; the n-th training brings the n-th gain, the last one from then on."""
    controller = Controller()
    actions = []
    trained = 0
    for _ in range(40):
        action = controller.decide(ECONOMY, 3.0).action
        actions.append(action)
        if action is not Action.IDLE:
            gain = gains[min(trained, len(gains) - 1)]
            controller.learn(ECONOMY, gain=gain, train_seconds=train_seconds, version_seconds=version_seconds)
            trained += 1
    return actions


def test_while_the_learning_rate_rises_no_gain_is_too_small() -> None:
    controller = Controller()
    for _ in range(8):
        decision = controller.decide(ECONOMY, 3.0, warming_up=True)
        assert decision.action is Action.TRAIN
        controller.learn(ECONOMY, gain=0.0, train_seconds=1.0, version_seconds=1.0)
    assert "still rising" in decision.reason
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE


def test_trains_on_while_gains_pay() -> None:
    assert set(run([0.05])) == {Action.TRAIN}


def test_idles_when_training_buys_nothing() -> None:
    actions = run([0.0])
    assert actions.count(Action.TRAIN) == 4
    assert actions.count(Action.IDLE) > actions.count(Action.PROBE) > 0


def test_negative_gains_are_never_paid_for() -> None:
    assert run([-0.03]).count(Action.TRAIN) == 4


def test_idles_when_the_gain_is_real_but_costs_more_than_it_saves() -> None:
    assert Action.IDLE in run([0.01], train_seconds=1000.0, version_seconds=3.0)


def test_probes_come_less_and_less_often() -> None:
    actions = run([0.0])
    probes = [i for i, action in enumerate(actions) if action is Action.PROBE]
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 2 * gaps[0]


def test_a_probe_that_finds_a_gain_resumes_training_at_once() -> None:
    actions = run([0.0, 0.0, 0.0, 0.0, 0.08])
    first_probe = actions.index(Action.PROBE)
    assert set(actions[first_probe + 1 :]) == {Action.TRAIN}


def test_a_fall_of_served_alpha_ends_idling() -> None:
    controller = Controller(trainings=5, gain=0.0, train_seconds=1.0, version_seconds=3.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE
    decision = controller.decide(ECONOMY, 2.9)
    assert decision.action is Action.PROBE
    assert "fell by 3.3%" in decision.reason


def test_no_served_drafter_always_trains() -> None:
    controller = Controller(trainings=9, gain=0.0)
    assert controller.decide(ECONOMY, None).action is Action.TRAIN


def test_a_claim_is_passed_over_while_newer_rollouts_wait_but_not_for_ever() -> None:
    controller = Controller()
    assert not controller.defers(newer_waits=False)
    for _ in range(2):
        assert [controller.defers(newer_waits=True) for _ in range(9)] == [True] * 8 + [False]
        controller.decide(ECONOMY, 3.0)


def test_that_a_claim_had_nothing_to_decide_about_does_not_begin_the_count_anew() -> None:
    """Say the newer rollouts that others were passed over for were dead."""
    controller = Controller()
    found = []
    for _ in range(9):
        found.append(controller.defers(newer_waits=True))
        assert not controller.defers(newer_waits=False)
    assert found == [True] * 8 + [False]


def test_an_idle_controller_passes_nothing_over() -> None:
    controller = Controller(trainings=5, gain=0.0, train_seconds=1.0, version_seconds=3.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE
    assert not controller.defers(newer_waits=True)


def test_state_survives_json() -> None:
    controller = Controller()
    for gain in (0.0, 0.0, 0.0, 0.0, 0.0):
        controller.decide(ECONOMY, 2.0)
        controller.learn(ECONOMY, gain=gain, train_seconds=0.5, version_seconds=2.0)
    restored = Controller.from_json(json.loads(json.dumps(controller.to_json())))
    assert restored == controller
    assert restored.decide(ECONOMY, 2.0) == controller.decide(ECONOMY, 2.0)


@pytest.mark.parametrize("gain", [0.0, 0.1, 1.0])
def test_worth_is_what_the_rounds_save(gain: float) -> None:
    """Generation time goes as 1/α, so a gain g leaves 1/(1+g) of it."""
    seconds = 10.0
    before = ECONOMY.generation_share * seconds
    after = before / (1 + gain)
    assert ECONOMY.worth(gain, seconds) == pytest.approx(ECONOMY.versions_served * (before - after))
