"""What the gate judges on: rollouts that came after the training, of prompts that nobody was trained on.

The world has nothing to learn that carries over: every prompt has a text of its own, and its features are noise that
only tells which prompt it is. A drafter can learn the texts that it is trained on by heart, and no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import FINGERPRINT, HIDDEN, LAYERS, VOCAB, Bench, World, joined
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.batch import RolloutBatch, load_batch, prompt_hashes
from drafter.replay.acceptance import Replay
from drafter.replay.gate import GainPosterior, Trial, compare
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.monitor.alpha import Compared
from service.monitor.controller import UNJUDGED
from service.settings import Settings
from service.storage.queue.deliveries import Entry
from service.storage.registry import Registry
from service.worker.inbox import Loaded
from service.worker.lineage import CANDIDATE
from service.worker.loop import RunWorker
from service.worker.promotion import training
from service.worker.promotion.evidence import Fresh
from service.worker.promotion.gate import Contest, Gate
from service.worker.scoring import Scores, _replayed, _segments, some_siblings

LENGTH, SIBLINGS = 20, 4
SETTINGS: dict[str, Any] = {
    "train_passes": 24.0,
    "train_step_tokens": 400,
    "learning_rate": 1e-2,
    "recent_tokens": 20_000,
    "claim_tokens": 100_000,
    "drafting": "greedy",
    "gate_min_gain": 0.005,
}


class Heart(World):
    """Texts that can only be learnt by heart."""

    def rollout_file(  # type: ignore[override]
        self, name: str, *, prompts: Sequence[int] = (), policy_version: int = 0, **metadata: Any
    ) -> bytes:
        """One rollout per entry of `prompts`; those of one prompt are the same but for a little noise."""
        noise = torch.Generator().manual_seed(int.from_bytes(name.encode()[-6:]))
        ids, aux = [], []
        for prompt in prompts:
            own = torch.Generator().manual_seed(prompt)
            ids.append(torch.randint(VOCAB, (LENGTH,), generator=own))
            features = torch.randn(LENGTH, len(LAYERS) * HIDDEN, generator=own)
            aux.append(features + 0.05 * torch.randn(features.shape, generator=noise))
        x = torch.cat(ids)
        last = torch.stack([2.0 * self.heads[0][token] for token in torch.roll(x, -1)]).bfloat16()
        logits = last.float() @ self.heads[0].T
        mask = (torch.arange(len(x)) % LENGTH >= 3).to(torch.uint8)  # a prompt of three tokens
        logprobs = torch.zeros(len(x))
        logprobs[1:] = torch.log_softmax(logits, -1)[:-1].gather(1, x[1:, None])[:, 0]
        tensors = {
            "input_ids": x.int(),
            "cu_seqlens": torch.arange(0, len(x) + 1, LENGTH).int(),
            "loss_mask": mask,
            "aux_hidden": torch.cat(aux).bfloat16(),
            "last_hidden": last,
            "logprobs": logprobs * mask,
            "logsumexp": torch.logsumexp(logits, -1),
        }
        facts: dict[str, Any] = {
            "run": "default",
            "policy_version": policy_version,
            "rollout_ids": [f"{name}/{i}" for i in range(len(prompts))],
            "target_fingerprint": FINGERPRINT,
            "aux_layers": LAYERS,
        }
        return joined(
            wire.encode({k: as_wire(v) for k, v in tensors.items()}, wire.rollout_metadata(**facts | metadata))
        )


def trained(bench: Bench) -> RunWorker:
    """A worker that has trained on 32 prompts of four siblings each; what is served is the first drafter still."""
    bench.world = Heart()
    bench.begin()
    worker = bench.worker(**SETTINGS)
    bench.post("first", prompts=[n for n in range(32) for _ in range(SIBLINGS)])
    bench.drain(worker)
    return worker


def judged(bench: Bench, worker: RunWorker, name: str, prompts: Sequence[int], policy_version: int = 0) -> Contest:
    """What the gate finds of the candidate on a batch that has just come."""
    learner = worker.learner
    fresh = Fresh.of([scored(bench, worker, name, prompts, policy_version)], learner.recent.prompts)
    return next(c for c in learner.judge.gate.judge(fresh, learner.lineage.served_version()) if c.version == CANDIDATE)


def scored(
    bench: Bench, worker: RunWorker, name: str, prompts: Sequence[int], policy_version: int = 0
) -> tuple[RolloutBatch, Scores]:
    """A batch that has just come, scored with all drafters."""
    path = bench.layout.spool("default") / f"{name}.safetensors"
    path.write_bytes(bench.world.rollout_file(name, prompts=prompts, policy_version=policy_version, offered=(99, 1234)))
    batch = load_batch(path)
    loaded = Loaded(Entry("1-1", name, path.name, 1, 1, batch.rollouts, policy_version, policy_version, 1), path, batch)
    scored = worker.learner.scorer.score(loaded, "all")
    assert scored is not None
    return batch, scored[1]


def siblings(prompts: range) -> list[int]:
    return [n for n in prompts for _ in range(2)]


def test_siblings_of_what_was_trained_on_are_no_evidence(bench: Bench) -> None:
    """They would promise a gain that other prompts do not have."""
    found = judged(bench, trained(bench), "again", siblings(range(32)))
    assert not found.verdict.promote
    assert found.look.prompts == 0
    assert found.verdict.reason.startswith("no evidence: all these prompts were trained on already")


def test_of_a_mixed_claim_the_new_prompts_count(bench: Bench) -> None:
    worker = trained(bench)
    found = judged(bench, worker, "mixed", siblings(range(16, 48)))
    assert found.look.prompts == 16
    assert found.look.rollouts == 32
    assert not found.verdict.promote
    assert abs(found.look.gain) < 0.08, "by heart: nothing that carries over"


def test_where_all_prompts_come_again_what_is_known_of_them_counts(bench: Bench) -> None:
    """An epoch of a small data set: the rollouts to come are of these prompts too."""
    found = judged(bench, trained(bench), "epoch", siblings(range(32)), policy_version=3)
    assert found.look.prompts == 32
    assert found.look.gain > 0.08
    assert found.verdict.promote


def test_while_newer_rollouts_wait_some_siblings_stand_for_all(bench: Bench) -> None:
    worker = trained(bench)
    prompts = [n for n in range(100, 116) for _ in range(8)]
    _, whole = scored(bench, worker, "whole", prompts)
    worker.learner.scorer.keeps_up = False
    batch, half = scored(bench, worker, "half", prompts)
    assert len(whole.looked) == 128
    assert half.looked == some_siblings(prompt_hashes(batch), batch.policy_version)
    assert {version: found.rollouts for version, found in half.versions.items()} == dict.fromkeys(whole.versions, 32)
    assert half.record.rollouts == 128, "what is counted is the batch"
    assert half.record.tokens == whole.record.tokens
    look = judged(bench, worker, "judged", prompts).look
    assert (look.prompts, look.rollouts) == (16, 32)


def test_a_score_tells_replay_by_prompt_as_engines_count_it_where_prompts_are_not_many(bench: Bench) -> None:
    worker = trained(bench)
    batch, few = scored(bench, worker, "few", siblings(range(100, 108)))
    prompts = prompt_hashes(batch)
    replayed = few.record.replayed
    assert replayed
    for one in replayed:
        replay = few.versions[one.version]
        assert one.by_prompt == {
            prompt[: wire.COUNTED_DIGITS]: tuple(
                round(math.fsum(counts[[n for n, p in enumerate(prompts) if p == prompt]]), 3)
                for counts in (replay.tokens, replay.rounds)
            )
            for prompt in set(prompts)
        }
    talk, pieces = batch.select([0, 1]), [0, *batch.cu_seqlens[1:3].tolist()]
    assert _segments(talk).tolist() == [1, 1]
    assert few.record.segments == batch.rollouts
    assert few.record.offered == (99, 1234), "as the file says"
    talk.loss_mask[pieces[1] - 2] = False  # a tool's answer, after which it goes on
    assert _segments(talk).tolist() == [2, 1], "an engine counts what follows for another prompt"
    talk.loss_mask[pieces[1] :] = False
    assert _segments(talk).tolist() == [2, 0], "a rollout without a response makes up for nothing"
    turns = _replayed("v", few.versions[replayed[0].version], prompts, told_apart=False)
    assert turns == replace(
        replayed[0], version="v", by_prompt={f"{prompt}+": counts for prompt, counts in replayed[0].by_prompt.items()}
    ), "no engine has a prompt of that name"
    whole = few.versions[replayed[0].version]
    spoiled = replace(whole, accepted=whole.accepted + np.where(np.arange(whole.rollouts) == 0, 1000.0, 0.0)[:, None])
    told, untold = (_replayed("v", found, prompts, told_apart=True) for found in (whole, spoiled))
    assert told == replace(replayed[0], version="v")
    assert untold == replace(told, accepted=(), reached=()), "one rollout's large weights make it"
    _, many = scored(bench, worker, "many", range(200, 300))
    assert [one.by_prompt for one in many.record.replayed or ()] == [{}] * len(replayed)
    assert [one.by_share for one in replayed] == [{}] * len(replayed)
    for one in many.record.replayed or ():
        assert one.by_share.keys() == {f"{n:x}" for n in range(16)}
        tokens, rounds = (math.fsum(column) for column in zip(*one.by_share.values(), strict=True))
        assert [tokens, rounds] == pytest.approx([one.sums.tokens, one.sums.rounds], abs=0.01)
    assert (found := Compared.of([many.record])) is not None
    assert found.low is not None, "one batch of many prompts is enough"


def test_rollouts_are_found_again_among_those_that_were_looked_at(bench: Bench) -> None:
    """The archive is asked about some of them: their replays must be of the same rollouts."""
    worker = trained(bench)
    worker.learner.scorer.keeps_up = False
    both = [scored(bench, worker, name, [n for n in range(100, 104) for _ in range(6)]) for name in ("one", "two")]
    fresh = Fresh.of(both, worker.learner.recent.prompts)
    version = worker.learner.lineage.served_version()
    assert version is not None
    chosen = [1, 4, 7, 8, 12, 15]
    parts = fresh.select(chosen)
    names = [f"{name}/{place}" for name in ("one", "two") for place in both[0][1].looked]
    assert [found for part in parts for found in part.rollout_ids] == [names[i] for i in chosen]
    alone = worker.learner.judge.gate.archive.replay(version, parts)
    torch.testing.assert_close(alone.rounds, fresh.replays[version].select(chosen).rounds)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcde"), max_size=80), st.integers(0, 50))
def test_a_quarter_of_the_siblings_and_two_at_least_stand_for_their_prompt(prompts: list[str], version: int) -> None:
    chosen = some_siblings(prompts, version)
    assert list(chosen) == sorted(set(chosen))
    for prompt in dict.fromkeys(prompts):
        own = [place for place, other in enumerate(prompts) if other == prompt]
        kept = [own.index(place) for place in chosen if prompts[place] == prompt]
        assert len(kept) == min(len(own), max(2, len(own) // 4))
        around = [(after - before) % len(own) for before, after in zip(kept, [*kept[1:], kept[0]], strict=True)]
        assert max(around) - min(around) <= 1, "evenly spaced"
        alone = some_siblings([prompt] * len(own), version)
        assert kept == list(alone), "whatever else is in the batch"


@pytest.mark.parametrize("siblings", [3, 5, 8, 13])
def test_no_sibling_is_looked_at_more_often_than_another(siblings: int) -> None:
    seen = np.zeros(siblings)
    for version in range(4000):
        seen[list(some_siblings(["prompt"] * siblings, version))] += 1
    expected = 4000 * max(2, siblings // 4) / siblings
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected))


def test_what_one_prompt_draws_says_nothing_of_another() -> None:
    """Of prompts with names of one length, too: a checksum that is linear moves all of their draws alike."""
    prompts = [f"{n:016x}" for n in range(60)]
    drawn = np.array([[some_siblings([p] * 8, version)[0] for p in prompts] for version in range(200)])  # of 4 places
    together = (drawn[:, :30, None] == drawn[:, None, 30:]).mean(axis=0)  # [30, 30]: share of versions
    assert np.all(np.abs(together - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 200))


@pytest.mark.parametrize("again", [False, True])
def test_where_siblings_are_sorted_an_equal_candidate_is_hardly_ever_published(again: bool) -> None:
    """It is 4 % better on every first sibling and 4 % worse on every second; each prompt is a batch of its own.

    `again`: there are but seven prompts, which every policy version is asked.
    """
    rng, published = np.random.default_rng(0), 0
    for _ in range(60):
        trial, few = Trial(promise=GainPosterior().known()), rng.integers(1 << 60, size=7).astype(str)
        for version in range(100):
            prompts = few if again else rng.integers(1 << 60, size=7).astype(str)
            looked = [
                place + 8 * number
                for number, prompt in enumerate(prompts)
                for place in some_siblings([prompt] * 8, version)
            ]
            served = rng.uniform(20, 40, 56)
            noise = 1.0 + 0.03 * np.repeat(rng.standard_normal(7), 8)
            rounds = served / np.where(np.arange(56) % 2, 0.96, 1.04) * noise
            pair = [Replay(np.full(56, 80.0), r, *np.zeros((2, 56, 4))) for r in (rounds, served)]
            groups = np.repeat(np.arange(7), 8)[looked]
            trial.trained()
            trial.take(compare(pair[0].select(looked), pair[1].select(looked), groups))
            if trial.verdict().promote:
                published += 1
                break
    assert published <= 6, "5 % of 60 are 3; more than 6 in one of 30 such tests"


def test_archived_versions_get_their_trials_in_the_order_of_their_names() -> None:
    """In any process: an earlier trial has a larger share of the error."""
    replay = Replay(np.full(8, 80.0), np.full(8, 30.0), *np.zeros((2, 8, 4)))
    rollouts, prompts = tuple(range(8)), tuple(map(str, range(8)))
    replays = dict.fromkeys((CANDIDATE, "v1", *(f"v{n}" for n in range(9, 1, -1))), replay)
    wider = Fresh((), (rollouts,), replays, prompts, rollouts, by_prompt=True)
    fresh = replace(wider, replays=dict.fromkeys((CANDIDATE, "v1"), replay))
    gate = Gate(Settings(), SimpleNamespace(archived=list, waiting=dict, existing=str))  # type: ignore[arg-type]
    gate.judge(fresh, "v1", wider)
    assert list(gate.state["trials"]) == [CANDIDATE, *(f"v{n}" for n in range(2, 10))]


def test_a_run_of_one_prompt_counts_rollouts(bench: Bench) -> None:
    bench.world = Heart()
    bench.begin()
    worker = bench.worker(**SETTINGS)
    bench.post("first", prompts=[7] * 32)
    bench.drain(worker)
    assert judged(bench, worker, "more", [7] * 32).look.prompts == 0, "the same group, for all that is known"
    found = judged(bench, worker, "epoch", [7] * 32, policy_version=3)
    assert found.look.prompts == 32


def test_siblings_of_one_prompt_are_one_observation_where_nothing_is_remembered(bench: Bench) -> None:
    """A run that has forgotten its rollouts, or lost them, does not know that it has but one prompt."""
    worker = trained(bench)
    worker.learner.recent.clear()
    contest = judged(bench, worker, "group", [7] * 32)
    assert contest.look.prompts == 0
    assert "1 prompts in 1 claims so far" in contest.look.fault


def test_what_a_version_gains_is_measured_on_rollouts_that_came_after_it(bench: Bench) -> None:
    bench.begin()
    worker = bench.worker(gate_min_gain=0.005, recent_tokens=100_000, learning_rate=5e-3)
    for number in range(24):
        bench.post(f"step{number}", rollouts=64)
        bench.drain(worker)
    history = told(Registry(bench.layout))
    published = [e for e in history if e["event"] == "published" and e.get("gate")]
    realised = [e for e in history if e["event"] == "realised"]
    assert realised
    assert {e["version"] for e in realised} <= {e["version"] for e in published}
    by_version = {e["version"]: e for e in published}
    for event in realised:
        assert event["promised"] == by_version[event["version"]]["gate"]["promised"]
        assert event["before"] == by_version[event["version"]]["parent"]
        assert event["low"] < event["realised"] < event["high"]
    promised, found = (sum(e[kind] for e in realised) for kind in ("promised", "realised"))
    assert 0.6 < promised / found < 1.4


def test_where_each_batch_holds_one_prompt_promises_are_measured_too(bench: Bench) -> None:
    bench.begin()
    worker = bench.worker(gate_min_gain=0.005, recent_tokens=100_000, learning_rate=5e-3)
    levels = list[Any]()
    for number in range(48):
        bench.post(f"group{number}", prompts=[1000 + number] * 32)
        bench.drain(worker)
        levels.append(worker.learner.judge.gate.state["level"])
    realised = [e for e in told(Registry(bench.layout)) if e["event"] == "realised"]
    assert realised
    assert any(level is not None for level in levels)
    for event in realised:
        assert event["low"] < event["realised"] < event["high"]
        assert event["rollouts"] >= 128, "four claims together at least"
    promised, found = (sum(e[kind] for e in realised) for kind in ("promised", "realised"))
    assert 0.6 < promised / found < 1.6


def test_claims_of_one_prompt_are_pooled(bench: Bench) -> None:
    """A trainer may send each group of rollouts as a batch of its own."""
    worker = trained(bench)
    looks = [judged(bench, worker, f"group{n}", [100 + n] * 8).look for n in range(4)]
    assert [look.prompts for look in looks] == [0, 0, 0, 4]
    assert [bool(look.fault) for look in looks] == [True, True, True, False]


def test_a_claim_that_comes_again_after_an_error_counts_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = trained(bench)
    gate = worker.learner.judge.gate
    before = gate.state

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(type(worker.learner.journal), "record", full)
    monkeypatch.setattr(type(worker.learner.lineage), "refuse", full)
    bench.post("again", prompts=[*range(500, 532)])
    with pytest.raises(OSError, match="no space"):
        bench.drain(worker)
    assert {**gate.state, "seconds": None} == {**before, "seconds": None}


def cycled(bench: Bench, worker: RunWorker, claims: int, prompts: int, first: int = 0) -> None:
    """Claims of half of the same few prompts in turns, all under policy version 0."""
    half = prompts // 2
    for number in range(first, first + claims):
        bench.post(f"turn{number}", prompts=[half * (number % 2) + n for n in range(half) for _ in range(SIBLINGS)])
        bench.drain(worker)


def test_where_the_same_prompts_come_again_under_one_policy_version_training_ends_and_the_state_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "UNJUDGED_TRAININGS", 4)
    bench.begin()
    worker = bench.worker(recent_tokens=20_000)
    cycled(bench, worker, 8, 24)
    gauges = bench.store.worker()
    assert gauges.unjudged
    assert (gauges.action, gauges.action_reason) == ("idle", UNJUDGED.reason)
    before = worker.learner.journal.totals.trained_tokens
    worker = bench.worker(recent_tokens=20_000)
    cycled(bench, worker, 2, 24, first=50)
    assert worker.learner.journal.totals.trained_tokens == before, "also after a restart"
    bench.post("new", prompts=siblings(range(100, 108)))
    bench.drain(worker)
    assert worker.learner.journal.totals.trained_tokens > before
    assert not bench.store.worker().unjudged


def test_trainings_while_a_person_holds_a_version_do_not_count_as_those_that_nothing_could_judge(bench: Bench) -> None:
    worker = trained(bench)
    worker.learner.judge.gate.training.unjudged = training.UNJUDGED_TRAININGS - 1
    registry = Registry(bench.layout)
    latest = registry.latest("default")
    assert latest is not None
    registry.hold("default", latest.version, "by hand", "somebody")
    bench.post("held", prompts=siblings(range(100, 108)))
    bench.drain(worker)
    assert worker.learner.judge.gate.training.unjudged <= 1


def test_a_candidate_that_does_the_same_is_known_to_gain_nothing(bench: Bench) -> None:
    """Greedy drafts that agree everywhere: without a measured gain a worker would train for ever."""
    bench.begin()
    worker = bench.worker(learning_rate=1e-12, drafting="greedy", recent_tokens=20_000, gate_min_gain=0.005)
    for number in range(8):
        bench.post(f"batch{number}", prompts=siblings(range(100 * number, 100 * number + 8)))
        bench.drain(worker)
    assert worker.learner.judge.controller.gain == pytest.approx(0.0, abs=0.002)
    assert bench.store.worker().action == "idle"
    assert bench.store.worker().headroom is not None
    assert not bench.store.worker().undrafted, "nobody says what engines draft"
    worker.learner.journal.engines.drafting.share = 0.0
    bench.post("undrafted", prompts=siblings(range(900, 908)))
    bench.drain(worker)
    assert (bench.store.worker().action, bench.store.worker().undrafted) == ("idle", True)
