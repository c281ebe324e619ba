"""The tap scores the rows of several steps at once, always by the head that drew them."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.tap_fixtures import HEAD, PLAIN, STOP, VOCAB, Script, states, step
from torch import nn

from rl_hooks.engines.policy_watch import PolicyWatch, WeightSample
from rl_hooks.engines.tap.collected import Collected, RequestSampling
from rl_hooks.engines.tap.feature_tap import FeatureTap
from rl_hooks.engines.tap.rows import Head

KINDS = [PLAIN, RequestSampling(0.7, 0.6, 0), RequestSampling(1.0, 1.0, 4)]


def traffic(after_each_step: Callable[[FeatureTap], object], **changes: Any) -> dict[str, Collected]:
    """Twelve requests, some steps of each together, preempted now and then."""
    draw, collected = random.Random(5), list[Collected]()
    tap = FeatureTap(HEAD, collected.append, **({"fraction": 1.0, "tokens_per_minute": 10**6} | changes))
    scripts = [
        Script(f"r{i}", [draw.randrange(2, VOCAB) for _ in range(6)], [*[draw.randrange(2, VOCAB)] * 30, STOP])
        for i in range(12)
    ]
    for number, script in enumerate(scripts):
        tap.begin(script.request(sampling=KINDS[number % 3]))
    running = list(scripts)
    while running:
        parts = []
        for script in draw.sample(running, draw.randint(1, len(running))):
            if script.computed > script.prompt and draw.random() < 0.05:
                script.computed = 0
            start = script.computed
            parts.append((script, start, *script.rows(draw, 4, 3)))
        tap.step(step(parts))
        after_each_step(tap)
        tap.end([script.name for script in running if script.done])
        running = [script for script in running if not script.done]
    eventually(lambda: len(collected) == len(scripts))
    assert tap.tally["failures"] == 0
    tap.close(5.0)
    return {one.request.request_id: one for one in collected}


def test_rows_of_many_steps_at_once_are_those_of_each_step_by_itself() -> None:
    """All but the scores to the last bit. A product of another number of rows may round otherwise."""
    each, many = traffic(lambda tap: tap.flush()), traffic(lambda tap: tap.release())
    assert set(each) == set(many) == {f"r{i}" for i in range(12)}
    for name, one in each.items():
        other = many[name]
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.generated.tolist() == other.generated.tolist()
        assert torch.equal(one.aux, other.aux)
        assert torch.equal(one.last, other.last)
        assert torch.allclose(one.logsumexp, other.logsumexp, rtol=1e-6, atol=1e-6)
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=2e-6)


class Counted(Head):
    """A head that notes how many rows each of its products has."""

    def score_step(self, last_NH: torch.Tensor, *rest: Any) -> torch.Tensor:
        PRODUCTS.append(len(last_NH))
        return super().score_step(last_NH, *rest)


PRODUCTS: list[int] = []


def test_rows_wait_for_sixteen_steps_at_most_and_for_a_thousand_of_their_kind() -> None:
    """So many rows may lie on the device, which the engine counts as its own."""
    PRODUCTS.clear()
    tap = FeatureTap(Counted(HEAD.weight), lambda _: None, fraction=1.0, tokens_per_minute=10**6)
    script = Script("r", [2], [])
    tap.begin(script.request())
    for number in range(40):
        tap.release()
        tap.step(step([(script, number, [3], 0, 4)]))
    assert PRODUCTS == [16, 16]
    tap.flush()
    assert PRODUCTS == [16, 16, 8]
    for begin, rows in ((40, 400), (440, 400), (840, 400), (1240, 2000)):
        tap.step(step([(script, begin, [3] * rows, 0, 4)]))
        assert tap._unscored.rows <= 1024
    assert PRODUCTS == [16, 16, 8, 800, 400, 2000], "a step's rows stay together"
    tap.flush()
    assert len(PRODUCTS) == 6, "nothing waits"
    tap.close(5.0)


def test_the_last_requests_are_sent_without_a_further_step() -> None:
    collected, ready = list[Collected](), threading.Event()
    tap = FeatureTap(HEAD, collected.append, fraction=1.0, tokens_per_minute=10**6, weights=WeightSample(Policy()))
    script = Script("r", [2, 3], [5, STOP])
    tap.begin(script.request())
    tap.step(step([(script, 0, [2, 3, 5], 0, STOP)]))
    tap.rest(["r"], ready.set)
    assert ready.wait(60)
    assert [one.request.request_id for one in collected] == ["r"]
    tap.close(5.0)


def test_what_is_collected_and_not_delivered_at_the_end_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    held = threading.Event()
    tap = FeatureTap(HEAD, lambda _: None, fraction=1.0, tokens_per_minute=10**6)
    tap._sender.call(lambda: held.wait(60))  # the tap's thread is busy
    for name in ("r", "s"):
        script = Script(name, [2, 3], [5, STOP])
        tap.begin(script.request())
        tap.step(step([(script, 0, [2, 3, 5], 0, STOP)]))
    tap.end(["r"])
    with caplog.at_level("WARNING", "draftalign.tap"):
        tap.close(0.1)
    assert tap.tally["lost_at_end"] == 2
    assert "2 requests that were collected are lost" in caplog.text
    held.set()


def test_what_a_step_copied_is_freed_once_it_is_scored_whenever_the_taps_thread_comes_to_it() -> None:
    """On a GPU it is the engine's memory."""
    held = threading.Event()
    tap = FeatureTap(HEAD, lambda _: None, fraction=1.0, tokens_per_minute=10**6)
    tap._sender.call(lambda: held.wait(60))  # the thread is busy
    script = Script("r", [2], [])
    tap.begin(script.request())
    tap.step(step([(script, 0, [3] * 5, 0, 4)]))
    copied = [weakref.ref(state) for state in tap._unscored.parts[0].gathered.aux]
    assert all(state() is not None for state in copied)
    tap.flush()
    assert all(state() is None for state in copied)
    held.set()
    tap.close(5.0)


class Policy(nn.Module):
    """A policy whose head is loaded in place, as vLLM loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HEAD.weight.shape[1], VOCAB, bias=False)
        self.lm_head.weight = nn.Parameter(HEAD.weight.clone(), requires_grad=False)

    def load_weights(self, scale: float) -> None:
        self.lm_head.weight.mul_(scale)


class Worker:
    def __init__(self) -> None:
        self.policy = policy = Policy()
        self.model_runner = SimpleNamespace(get_model=lambda: policy)

    def sleep(self, level: int = 1) -> None:
        """Take the memory of the weights away, as vLLM does: what reads them then sees none."""
        assert level
        self.policy.lm_head.weight.fill_(torch.nan)


def attached() -> tuple[Worker, PolicyWatch, FeatureTap, list[Collected]]:
    worker, collected = Worker(), list[Collected]()
    watch = PolicyWatch(worker)
    watch.number(None, 3)
    head = Head(worker.policy.lm_head.weight)
    tap = FeatureTap(
        head, collected.append, fraction=1.0, tokens_per_minute=10**6, weights=watch.weights, policy_version=3
    )
    watch.changing, watch.leaving = tap.cut, tap.flush
    return worker, watch, tap, collected


def draw_some(tap: FeatureTap) -> Script:
    script = Script("r", [2, 3], [4, 5, STOP])
    tap.begin(script.request())
    tap.step(step([(script, 0, [2, 3], 0, 4)]))
    tap.step(step([(script, 2, [4, 9], 1, 5)]))
    return script


def check_scores(one: Collected, tokens: list[int]) -> None:
    """The log-probabilities are those of the head that drew the tokens."""
    law = (states(tokens, range(len(tokens))) @ HEAD.weight.T).log_softmax(-1)
    own = [float(law[t - 1, tokens[t]]) for t in range(2, len(tokens))]
    assert one.input_ids.tolist() == tokens
    assert one.logprobs.tolist()[2:] == pytest.approx(own, abs=1e-5)
    whole = (states(tokens, range(len(tokens))) @ HEAD.weight.T).logsumexp(-1)[:-1]
    assert one.logsumexp[:-1].tolist() == pytest.approx(whole.tolist(), abs=1e-5)


def test_rows_that_wait_are_scored_by_the_head_of_before_an_announced_update() -> None:
    worker, _, tap, collected = attached()
    draw_some(tap)
    worker.policy.load_weights(3.0)
    eventually(lambda: collected)
    check_scores(collected[0], [2, 3, 4, 5])
    assert collected[0].policy_version == 3
    assert tap.tally["failures"] == 0


@pytest.mark.parametrize("level", [1, 2])
def test_rows_that_wait_are_scored_before_a_sleep_takes_the_head(level: int) -> None:
    worker, _, tap, collected = attached()
    draw_some(tap)
    worker.sleep(level)
    tap.cut()  # as the update after a light sleep does: no weights can be read now
    eventually(lambda: collected)
    check_scores(collected[0], [2, 3, 4, 5])
    assert tap.tally["failures"] == 0


def test_rows_that_wait_when_an_unannounced_update_is_found_are_not_sent() -> None:
    """They may be scored by the new head: the look that follows tells, or they are dropped with their requests."""
    worker, watch, tap, collected = attached()
    draw_some(tap)
    tap.end(["r"])
    worker.policy.lm_head.weight.mul_(3.0)
    tap.release()
    eventually(lambda: tap.tally["skipped_moved"] == 1)
    assert watch.settle(None)
    draw_some(tap)
    PRODUCTS.clear()
    tap.turn(4, Counted(worker.policy.lm_head.weight), lambda: None)
    tap.flush()
    assert PRODUCTS == []
    eventually(lambda: not tap.tally["rows"])
    assert (collected, tap.tally["failures"]) == ([], 0)


@pytest.mark.parametrize("then", ["load_weights", "sleep", "close"])
def test_rows_that_wait_when_an_announced_update_follows_an_unannounced_one_are_not_sent(then: str) -> None:
    """An engine that idles keeps rows of its last steps. The next event may be another update, a sleep, or its end."""
    worker, _, tap, collected = attached()
    draw_some(tap)
    worker.policy.lm_head.weight.mul_(3.0)
    if then == "load_weights":
        worker.policy.load_weights(1.0)
    elif then == "sleep":
        worker.sleep(1)
        tap.cut()
    tap.close(10.0)
    assert (collected, tap.tally["skipped_moved"], tap.tally["rows"]) == ([], 1, 0)
    assert tap.tally["failures"] == 0


def test_scores_of_an_earlier_step_are_not_sent_where_the_weights_changed_before_them() -> None:
    """Sixteen steps were scored at once, the last ones by another head than drew the first; then an update comes."""
    worker, _, tap, collected = attached()
    draw_some(tap)
    worker.policy.lm_head.weight.mul_(3.0)
    for _ in range(16):
        tap.release()
    assert not tap._unscored.parts
    tap.cut()
    eventually(lambda: tap.tally["skipped_moved"] == 1)
    assert collected == []


def test_a_request_that_begins_in_a_sleep_reads_no_weights_at_the_update_that_follows() -> None:
    worker, watch, tap, _ = attached()
    draw_some(tap)
    worker.sleep(1)
    tap.cut()
    tap.turn(4, HEAD, lambda: None)
    tap.begin(Script("while it sleeps", [2, 3], []).request())
    watch.weights.look = lambda: pytest.fail("the weights are not in their memory")  # type: ignore[method-assign]
    tap.cut()
    assert (tap.tally["failures"], tap.tally["cut"]) == (0, 2)


def test_of_many_requests_one_look_at_the_weights_serves_those_that_end_within_sixteen_steps() -> None:
    """A look reads 32 parameters, and of a large batch one request ends in each step."""
    _, watch, tap, collected = attached()
    looks: list[int] = []
    look = watch.weights.look

    def noted() -> Callable[[], bool]:
        looks.append(len(collected))
        return look()

    watch.weights.look = noted  # type: ignore[method-assign]
    scripts = [Script(f"r{i}", [2, 3], [4, STOP]) for i in range(20)]
    for script in scripts:
        tap.begin(script.request())
        tap.step(step([(script, 0, [2, 3], 0, 4)]))
    for script in scripts:
        tap.release()
        tap.step(step([(script, 2, [4], 0, STOP)]))
        tap.end([script.name])
    assert len(looks) == 1, "those that ended in sixteen steps at once, while others go on"
    tap.begin(Script("of the next session", [2, 3], []).request())
    tap.release()
    assert len(looks) == 2, "none is under way: it waits for nothing"
    eventually(lambda: len(collected) == 20)
    assert tap.tally["failures"] == 0


def test_rows_that_cannot_be_scored_cost_their_requests_and_nothing_else() -> None:
    collected: list[Collected] = []
    tap = FeatureTap(Head(torch.zeros(VOCAB, 7)), collected.append, fraction=1.0, tokens_per_minute=10**6)
    draw_some(tap)
    tap.flush()
    assert (tap.tally["failures"], tap.tally["rows"], list(tap.collected)) == (1, 0, [])
    assert "scoring rows" in tap.tally.last_error or "mat1" in tap.tally.last_error
    script = draw_some(tap)
    tap.step(step([(script, 3, [5] * 1100, 0, 4)]))  # scored at once, and what waits before it
    assert (tap.tally["failures"], tap.tally["rows"], list(tap.collected)) == (3, 0, [])
    tap.head = HEAD
    script = draw_some(tap)
    tap.step(step([(script, 3, [5], 0, STOP)]))
    tap.end(["r"])
    eventually(lambda: collected)
    check_scores(collected[0], [2, 3, 4, 5, STOP])
    tap.close(5.0)
