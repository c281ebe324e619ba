"""A worker that is behind: what it passes over, what it trains on, what becomes of batches when something fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.worker.worker_fixtures import Bench
from redis.exceptions import ConnectionError as RedisAwayError
from torch import Tensor

from drafter.training.trainer import DrafterTrainer
from service.errors import WorkerError
from service.monitor.controller import Economy
from service.monitor.records import SamplingSettings
from service.storage.queue.deliveries import RolloutQueue
from service.worker import learner
from service.worker.claim import ClaimPlan, ClaimScorer, Scored
from service.worker.inbox import RECENT_BATCHES
from service.worker.learner import Learner
from service.worker.loop import RunWorker
from service.worker.promotion.evidence import Fresh
from service.worker.promotion.gate import Gate
from service.worker.scoring import Scores


def spoil(t: dict[str, Tensor]) -> None:
    """Log-probabilities that the features contradict."""
    t["logprobs"][t["loss_mask"].bool()] -= 5.0


def scored_and_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, worker: RunWorker
) -> tuple[dict[str, set[str]], list[set[str]]]:
    """Drain; by batch, the drafters it was scored with; by training, whose new rollouts it was about."""
    train, about = Learner.train, []

    def watched(self: Learner, newest: Any, older: Any, ends: Any) -> tuple[float, float]:
        about.append({kept.name.partition(".")[0][:32] for kept in newest})
        return train(self, newest, older, ends)

    monkeypatch.setattr(Learner, "train", watched)
    bench.drain(worker)
    roles = {"served", "candidate", "frozen", "best"}
    return {
        batch: {role for role in roles if getattr(record, role) is not None}
        for batch, record in bench.store.scores().items()
    }, about


def loaded(policy_version: int, *, belated: bool = False) -> Any:
    batch, entry = SimpleNamespace(policy_version=policy_version), SimpleNamespace(belated=belated)
    return SimpleNamespace(batch=batch, entry=entry)


NEW, OLD, BACK, BACK_TOO = loaded(7), loaded(6), loaded(9, belated=True), loaded(2, belated=True)


@pytest.mark.parametrize(
    ("fresh", "isolated", "to_train", "to_pass_over", "newest_policy"),
    [
        ([OLD, NEW], False, [OLD, NEW], [], 7),
        ([NEW, OLD], False, [NEW, OLD], [], 7),
        ([BACK, OLD, BACK_TOO, NEW], False, [OLD, NEW], [BACK, BACK_TOO], 7),
        ([BACK_TOO, BACK], False, [], [BACK_TOO, BACK], 9),
        ([BACK], True, [BACK], [], 9),
        ([NEW], True, [NEW], [], 7),
        ([NEW, *[OLD] * RECENT_BATCHES], False, [NEW, *[OLD] * RECENT_BATCHES], [], 6),
        ([NEW, *[OLD] * (RECENT_BATCHES - 1)], False, [NEW, *[OLD] * (RECENT_BATCHES - 1)], [], 7),
    ],
    ids=["two policies", "out of order", "some put back", "all put back", "put back, isolated", "isolated",
         "the trainer went back", "and not yet"],
)  # fmt: skip
def test_what_is_put_back_is_passed_over_unless_it_is_worked_on_alone(
    fresh: list[Any], isolated: bool, to_train: list[Any], to_pass_over: list[Any], newest_policy: int
) -> None:
    plan = ClaimPlan.of(fresh, isolated=isolated)
    assert (plan.to_train, plan.to_pass_over, plan.newest) == (to_train, to_pass_over, newest_policy)
    plan = plan.without_training()
    assert (plan.to_train, plan.to_pass_over, plan.newest) == ([], [*to_pass_over, *to_train], newest_policy)


ALL = {"served", "candidate", "frozen", "best"}


def test_a_worker_that_is_behind_trains_on_the_newest_policy_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    batches = {v: bench.post(f"v{v}", policy_version=v) for v in range(6)}
    worker = bench.worker(recent_tokens=10_000)
    scored, about = scored_and_trained(bench, monkeypatch, worker)
    assert about == [{batches[5]}]
    assert scored == {batches[v]: ALL if v == 5 else {"served"} for v in range(6)}
    records = bench.store.scores()
    assert [records[batches[v]].action for v in range(6)] == ["defer"] * 5 + ["train"]
    assert {records[batches[v]].best_version for v in range(5)} == {None}
    assert [records[batches[v]].train_seconds for v in range(5)] == [0.0] * 5
    totals = worker.learner.journal.totals
    served = {b: r.served for b, r in records.items() if r.served is not None}
    assert served.keys() == records.keys()
    assert totals.rounds["served"] == pytest.approx(sum(sums.rounds for sums in served.values()))
    compared = served[batches[5]]
    assert (totals.rounds["served_compared"], totals.round_tokens["served_compared"]) == pytest.approx(
        (compared.rounds, compared.tokens)
    )
    assert {bench.state(b) for b in batches.values()} == {"trained"}
    assert len(worker.learner.recent.names()) == 6, "what was passed over is in the mix"


def test_of_one_claim_only_the_newest_policy_is_trained_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin()
    names = [("a", 1), ("b", 2), ("c", 1), ("d", 2)]
    batches = {name: bench.post(name, policy_version=version) for name, version in names}
    scored, about = scored_and_trained(bench, monkeypatch, bench.worker(claim_tokens=10_000, recent_tokens=10_000))
    assert about == [{batches["b"], batches["d"]}]
    assert scored == {batches[name]: ALL if version == 2 else {"served"} for name, version in names}


def test_a_worker_that_never_catches_up_trains_now_and_then(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin()
    batches = [bench.post(f"v{v}", policy_version=v) for v in range(20)]
    _, about = scored_and_trained(bench, monkeypatch, bench.worker(recent_tokens=10_000))
    assert about == [{batches[8]}, {batches[17]}, {batches[19]}]


def test_while_nothing_is_served_what_is_passed_over_is_scored_by_the_candidate(bench: Bench) -> None:
    bench.register(bench.world.run_file())
    batches = [bench.post(f"v{v}", policy_version=v) for v in range(3)]
    bench.drain(bench.worker(vocab_min_tokens=1, recent_tokens=10_000))
    records = bench.store.scores()
    assert {bench.state(b) for b in batches} == {"trained"}
    assert all(records[b].candidate is not None and records[b].served is None for b in batches)
    assert all((records[b].draftable_tokens or 0) > 0 for b in batches)


def test_a_worker_that_is_behind_says_so(bench: Bench) -> None:
    bench.begin()
    for version in range(3):
        bench.post(f"v{version}", policy_version=version)
    worker = bench.worker()
    worker.cycle()
    told = bench.store.worker()
    assert told.action == "defer"
    assert "newer policy" in (told.action_reason or "")
    assert told.rounds_total["served"] > 0
    bench.drain(worker)
    assert bench.store.worker().action == "train"


@pytest.mark.parametrize("claim_tokens", [1, 10_000])
def test_rollouts_that_turn_out_dead_do_not_keep_the_worker_from_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, claim_tokens: int
) -> None:
    """Two trainers, and the one that is ahead sends what cannot be used."""
    bench.begin()
    worker = bench.worker(claim_tokens=claim_tokens)
    good = []
    for number in range(10):
        good.append(bench.post(f"good{number}", policy_version=2 * number))
        bench.post(f"bad{number}", policy_version=2 * number + 1, change=spoil)
        worker.cycle()
        if claim_tokens == 1:
            worker.cycle()
    assert worker.learner.judge.gate.training.seconds is not None, "it has trained"
    _, about = scored_and_trained(bench, monkeypatch, worker)
    # The last training is judged on what comes next.
    assert worker.learner.judge.controller.trainings >= (0 if claim_tokens == 1 else 9)
    assert about == []
    assert {bench.state(b) for b in good} == {"trained"}


def test_a_trainer_that_goes_back_is_judged_on_what_it_writes_now(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker(recent_tokens=100_000)
    for version in range(200, 206):
        bench.post(f"before{version}", policy_version=version)
    bench.drain(worker)
    judged: list[list[int]] = []
    judge = Gate.judge

    def watched(self: Gate, fresh: Fresh, served: str | None, wider: Fresh) -> Any:
        judged.append([batch.policy_version for batch in fresh.batches])
        return judge(self, fresh, served, wider)

    monkeypatch.setattr(Gate, "judge", watched)
    for version in range(100, 112):
        bench.post(f"after{version}", policy_version=version, rollouts=32)
        bench.drain(worker)
    assert judged == [[version] for version in range(100, 112)]


# --- a training is cut into parts where newer rollouts come
def stepped(monkeypatch: pytest.MonkeyPatch, then: Any) -> list[list[int]]:
    """For each training, the newest policy version of each step; `then` is called at its first step."""
    train, step = Learner.train, DrafterTrainer.step
    parts: list[list[int]] = []

    def trained(self: Learner, newest: Any, older: Any, ends: Any) -> tuple[float, float]:
        parts.append([])
        return train(self, newest, older, ends)

    def counted(self: DrafterTrainer, window: Any) -> Any:
        if not parts[-1]:
            then(len(parts))
        parts[-1].append(max(prepared.batch.policy_version for prepared, _ in window))
        return step(self, window)

    monkeypatch.setattr(Learner, "train", trained)
    monkeypatch.setattr(DrafterTrainer, "step", counted)
    return parts


def test_a_training_ends_where_newer_rollouts_come_and_they_judge_what_it_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker(train_passes=16.0)
    parts = stepped(monkeypatch, lambda n: bench.post("newer", policy_version=1) if n == 1 else None)
    bench.post("first", policy_version=0)
    bench.drain(worker)
    assert len(parts) == 2
    cut, whole = (len(part) for part in parts)
    assert 1 <= cut <= whole // 6, "an eighth is done in any case, and all of it where nothing newer comes"
    newer = bench.store.scores()[bench.posted[0]]
    assert newer.candidate is not None, "judged on"
    assert [bench.state(b) for b in bench.posted] == ["trained"] * 2


GROUPS: dict[str, Any] = {"prompts": [n for n in range(100, 108) for _ in range(8)]}
GROUPS |= {"rewards": [float(i % 8) for i in range(64)], "strata": [f"kind {i % 3}" for i in range(64)]}


def all_scores(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """What is said of each batch from now on."""
    found, real = list[Scores](), ClaimScorer.score

    def noted(self: ClaimScorer, *arguments: Any) -> Scored | None:
        scored = real(self, *arguments)
        if scored is not None:
            found.append(scored[1])
        return scored

    monkeypatch.setattr(ClaimScorer, "score", noted)
    return found


def test_after_a_training_that_was_cut_some_siblings_are_looked_at_and_all_are_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin()
    worker = bench.worker(train_passes=16.0, recent_tokens=100_000)
    parts = stepped(monkeypatch, lambda n: bench.post("cuts", policy_version=1, **GROUPS) if n == 1 else None)
    found = all_scores(monkeypatch)
    bench.post("first", policy_version=0, **GROUPS)
    bench.drain(worker)
    bench.post("after", policy_version=2, **GROUPS)
    bench.drain(worker)
    assert [len(scores.looked) for scores in found] == [64, 16, 64], "whole again after a training that was not cut"
    assert len(parts) == 3
    for scores in found:
        looked = len(scores.looked)
        assert {name: replay.rollouts for name, replay in scores.versions.items()} == dict.fromkeys(
            scores.versions, looked
        )
        assert len(scores.prompts) == len(scores.strata) == len(scores.entropies) == looked
        assert scores.strata == tuple(f"kind {place % 3}" for place in scores.looked)
        assert (scores.record.rollouts, scores.record.reward_count) == (64, 64)
        assert scores.record.reward_sum == 8 * sum(range(8))
        assert scores.record.logprob_tokens == scores.record.tokens
        assert scores.record.served is not None
        assert scores.record.served.rounds == pytest.approx(scores.replays["served"].rounds.sum())
        assert scores.replays["ngram"].rollouts == looked
    assert "drift" not in caplog.text, "its monitor takes what it is told"
    kept = worker.learner.recent._kept.values()
    assert sum(one.batch.rollouts for one in kept) == 3 * 64, "all of it is trained on"


@pytest.mark.parametrize(
    ("strata", "temperature", "kinds"),
    [
        (None, 1.0, set()),
        (None, 0.0, {"greedy"}),
        (GROUPS["strata"], 0.0, {"kind 0 greedy", "kind 1 greedy", "kind 2 greedy"}),
    ],
)
def test_greedy_answers_are_kinds_of_their_own_to_the_drift_monitor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, strata: list[str] | None, temperature: float, kinds: set[str]
) -> None:
    bench.begin()
    found = all_scores(monkeypatch)
    bench.post("one", **GROUPS | {"strata": strata, "temperature": temperature})
    worker = bench.worker()
    bench.drain(worker)
    assert [set(scores.strata) for scores in found] == [kinds]
    assert set(worker.learner.journal.drift.monitor.state.levels.names) == (kinds or {""})
    assert [scores.sampling for scores in found] == [SamplingSettings(temperature) if temperature else None]
    assert worker.learner.journal.drift.monitor.state.evidence.sampling == found[0].sampling


def test_while_batches_are_passed_over_some_siblings_are_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training after eight claims that were passed over is not cut, and the worker is behind all the same."""
    bench.begin()
    found = all_scores(monkeypatch)
    worker = bench.worker(recent_tokens=100_000)
    for version in range(20):
        bench.post(f"v{version}", policy_version=version, **GROUPS)
    bench.drain(worker)
    looked = [len(scores.looked) for scores in found]
    assert looked[:9] == [64] * 9, "nothing is known of a worker that begins"
    assert looked[9:] == [16] * 11
    bench.post("caught up", policy_version=20, **GROUPS)
    bench.drain(worker)
    assert len(found[-1].looked) == 64


def test_what_is_looked_at_counts_towards_gate_rollouts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a claim of five policy versions the newest is judged on, and others until there are 48 rollouts."""
    bench.begin()
    worker = bench.worker(recent_tokens=100_000, claim_tokens=100_000, gate_rollouts=48)
    bench.post("trained on", policy_version=0)
    bench.drain(worker)
    worker.learner.scorer.keeps_up = False
    found = all_scores(monkeypatch)
    for version in range(1, 6):
        bench.post(f"v{version}", policy_version=version, **GROUPS)
    bench.drain(worker)
    judged = {scores.record.policy_version: len(scores.looked) for scores in found if "candidate" in scores.replays}
    assert judged == {5: 16, 4: 16, 3: 16}


def test_rollouts_of_the_same_policy_cut_no_training(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin()
    worker = bench.worker(train_passes=16.0)
    parts = stepped(monkeypatch, lambda n: bench.post("sibling", policy_version=0) if n == 1 else None)
    bench.post("first", policy_version=0)
    bench.drain(worker)
    assert len(parts) == 2
    assert len(parts[0]) > 0.6 * len(parts[1])


def test_a_look_of_an_idle_worker_goes_on_in_parts_until_it_is_a_whole_training(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training gains is asked of a whole one. Engines need not wait for all of it after a fall."""
    bench.begin()
    worker = bench.worker(train_passes=16.0)
    for number in range(8):
        bench.post(f"known {number}", policy_version=0)
        bench.drain(worker)
    controller = worker.learner.judge.controller
    monkeypatch.setattr(learner, "Economy", lambda *_, **__: Economy(min_gain=0.2))  # nothing ever gains so much
    controller.gain, controller.variance, controller.probes, controller.idle = 0.0, 0.15**2, 2.0, True
    parts = stepped(monkeypatch, lambda n: bench.post(f"newer {n}", policy_version=n) if n < 4 else None)
    bench.post("first", policy_version=0)
    bench.drain(worker)
    records = sorted(bench.store.scores().values(), key=lambda one: one.arrival)
    assert [one.action for one in records[8:]] == ["probe"] * 4
    cut, whole = [len(part) for part in parts[:3]], len(parts[3])
    assert max(cut) <= whole // 5, "an eighth is done in any case"
    assert controller.probes < 1.2, "one look was paid for"
    assert controller.idle


def test_a_worker_that_is_behind_compares_all_drafters_now_and_then(bench: Bench) -> None:
    bench.begin()
    worker = bench.worker(claim_tokens=100_000)
    for claim in range(9):
        for version in (2 * claim, 2 * claim + 1):
            bench.post(f"v{version}", policy_version=version)
        bench.drain(worker)
    scores = bench.store.scores().values()
    newest = [one for one in scores if (one.policy_version or 0) % 2]
    assert len(newest) == 9
    assert all(one.candidate is not None and one.best is not None for one in newest)
    compared = [one for one in newest if one.frozen is not None]
    assert len(compared) == 3, "of the first claim, and of every fourth"
    rounds = worker.learner.journal.totals.rounds
    for counted, role in (("served_compared", "served"), ("best", "best"), ("frozen", "frozen")):
        sums = (getattr(one, role) for one in compared)
        assert rounds[counted] == pytest.approx(sum(one.rounds for one in sums)), "of the same rollouts"


def test_who_trains_in_one_claim_of_nine_does_all_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer rollouts wait then by definition."""
    bench.begin()
    train, shares = Learner.train, []

    def watched(self: Learner, newest: Any, older: Any, ends: Any) -> tuple[float, float]:
        seconds, share = train(self, newest, older, ends)
        shares.append(share)
        return seconds, share

    monkeypatch.setattr(Learner, "train", watched)
    for version in range(10):
        bench.post(f"v{version}", policy_version=version)
    bench.drain(bench.worker(train_passes=16.0))
    assert shares == [1.0, 1.0]


# --- nothing is acknowledged that was not scored and trained on
def test_a_redis_that_goes_away_between_two_batches_of_a_claim_loses_neither(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    good, bad = bench.post("good"), bench.post("bad", change=spoil)
    dead_letter, asked = RolloutQueue.dead_letter, []

    def away(self: RolloutQueue, *arguments: Any, **named: Any) -> bool:
        asked.append(arguments)
        if len(asked) == 1:
            raise RedisAwayError("away")
        return dead_letter(self, *arguments, **named)

    monkeypatch.setattr(RolloutQueue, "dead_letter", away)
    worker = bench.worker(claim_tokens=10_000)
    with pytest.raises(RedisAwayError):
        worker.cycle()
    scored, about = scored_and_trained(bench, monkeypatch, worker)
    assert (bench.state(good), bench.state(bad)) == ("trained", "dead")
    assert scored == {good: ALL}
    assert about == [{good}]
    assert bench.totals()["batches"] == 1


def test_a_training_that_fails_half_way_is_done_again_from_the_last_checkpoint(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker()
    bench.post("before")
    bench.drain(worker)
    batch = bench.post("a")
    step, steps = DrafterTrainer.step, []

    def failing(self: DrafterTrainer, *arguments: Any, **options: Any) -> Any:
        steps.append(arguments)
        if len(steps) == 2:
            raise OSError(5, "Input/output error")
        return step(self, *arguments, **options)

    monkeypatch.setattr(DrafterTrainer, "step", failing)
    with pytest.raises(WorkerError, match="from the last checkpoint"):  # the worker drops the run for that
        worker.cycle()
    assert bench.state(batch) == "queued"
    again = bench.worker()
    bench.drain(again)
    assert bench.state(batch) == "trained"
    with Bench(bench.settings.state_dir / "calm", bench.redis_url) as calm:
        calm.redis.flushdb()
        calm.begin()
        undisturbed = calm.worker()
        for name in ("before", "a"):
            calm.post(name)
            calm.drain(undisturbed)
    for ours, theirs in zip(
        again.learner.lineage.candidate.parameters(), undisturbed.learner.lineage.candidate.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
