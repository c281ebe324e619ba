"""Real engines, each wrong in its own way, report to a running service: it names what is wrong with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import (
    EOS_ID,
    base_policy,
    elicit_prompts,
    engine,
    random_drafter,
    randomize_drafter,
    rollouts,
    trained_drafter,
    write,
)
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from torch import Tensor

import examples.engine
from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.training.ranks import ALONE
from examples.elicit import MAX_ANSWER_TOKENS
from examples.engine import Engine
from examples.engine_drafting import Draft, Drafting, verify
from examples.engine_sequences import Counters, Sampling
from examples.features import batch_of
from service.worker.scoring import ScoreOrder, score, score_shared

PROMPTS = elicit_prompts(160, seed=5)
VERSION, OLD = "trained", "weak"


def other_order(features: Tensor) -> Tensor:
    """The three layers' states, last layer first."""
    first, second, third = features.chunk(3, dim=-1)
    return torch.cat([third, second, first], dim=-1)


@contextmanager
def features_changed(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """An engine that gives its drafter other states than it computed."""
    real = Drafting._catch_up

    def changed(self: Drafting, tokens: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        return real(self, tokens, change(features), lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "_catch_up", changed)
        yield


@contextmanager
def feedback_changed(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """An engine that feeds other states back from one draft to the next."""
    real_attend, real_catch_up, fused = Drafting._attend, Drafting._catch_up, [False]

    def catch_up(self: Drafting, *args: Any) -> Tensor:
        fused[0] = True
        try:
            return real_catch_up(self, *args)
        finally:
            fused[0] = False

    def attend(self: Drafting, tokens: Tensor, r: Tensor, start: Tensor) -> Tensor:
        return real_attend(self, tokens, r if fused[0] else change(r), start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "_catch_up", catch_up)
        patch.setattr(Drafting, "_attend", attend)
        yield


def weak_drafter() -> Eagle3Drafter:
    """What was served before: the same lineage, untrained."""
    return random_drafter(base_policy()[0], 0, draft_vocab_size=96)


def generate(
    directory: Path,
    *,
    fault: Any = None,
    break_it: Callable[[Engine], None] = lambda _: None,
    depth: int = 4,
    seed: int = 3,
) -> tuple[Counters, RolloutBatch]:
    model, _ = base_policy()
    with fault or nullcontext(), engine(model, directory, seed=seed, depth=depth) as served:
        break_it(served)
        done = served.submit(PROMPTS, Sampling(MAX_ANSWER_TOKENS, 1.0, EOS_ID)).result(timeout=100)
        return served.counters(), batch_of(model, rollouts(PROMPTS, done))


class Bench:
    """A running service, with what its worker would have scored."""

    def __init__(self, service: RunningService, redis_client: Redis) -> None:
        self.service, self._store = service, Store(redis_client, "default")

    def scored(self, batch: RolloutBatch, policy: int = 0) -> None:
        roles = {"served": (VERSION, trained_drafter()), "frozen": (OLD, weak_drafter())}
        writer = policy_of(base_policy()[0])
        order = ScoreOrder(range(batch.rollouts), 0, 4, "probabilistic", gap_nats=math.inf, served=VERSION)
        whole = dataclasses.replace(batch, policy_version=policy)
        shared = score_shared(ALONE, dict(roles.values()), writer, whole, order)
        found = score(roles, shared)
        batch_id, entry_id = f"{policy:032x}", f"{policy + 1}-0"
        record = dataclasses.replace(found.record, batch_id=batch_id, entry_id=entry_id, drafter_version=VERSION)
        self._store.put_score(batch_id, record)

    def report(self, reporter: str, counts: Counters, depth: int = 4, policy: int = 0) -> dict[str, Any]:
        document = {
            "reporter": reporter,
            "drafter_version": VERSION,
            "policy_version": policy,
            "rounds": counts.drafts,
            "accepted_tokens": sum(counts.accepted_per_position),
            "drafted_tokens": depth * counts.drafts,
            "emitted_tokens": counts.emitted_tokens,
            "accepted_per_position": list(counts.accepted_per_position),
        }
        reply: dict[str, Any] = self.service.client.post("/acceptance", json=document).raise_for_status().json()
        return reply

    def alpha(self) -> dict[str, Any]:
        found: dict[str, Any] = self.service.client.get("/alpha").raise_for_status().json()
        return found


@pytest.fixture
def bench(service: RunningService, redis_client: Redis) -> Bench:
    return Bench(service, redis_client)


def lax(p: Tensor, draft: Draft | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Verification that accepts whatever the policy gives a tenth to."""
    if draft is None:
        return verify(p, draft, generator)
    likely = p[:, :-1].exp().gather(2, draft.tokens[:, :, None])[:, :, 0] > 0.1
    accepted = likely.long().cumprod(1).sum(1)
    follow = torch.multinomial(p[torch.arange(len(p)), accepted].exp(), 1, generator=generator)
    return accepted, torch.cat([draft.tokens, follow], 1).scatter(1, accepted[:, None], follow)


@pytest.mark.parametrize(("rule", "biased"), [(verify, False), (lax, True)], ids=["lossless", "lax"])
def test_an_engine_that_accepts_too_freely_is_named_by_its_tokens(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any, biased: bool
) -> None:
    monkeypatch.setattr(examples.engine, "verify", rule)
    directory = write(trained_drafter(), tmp_path / "served")
    for policy in range(3):
        bench.scored(generate(directory, seed=policy)[1], policy)
    found = bench.alpha()
    assert found["current"]["tilt"]["tokens"] > 3000
    assert found["current"]["tilt"]["biased"] == biased, found["current"]["tilt"]
    texts = [found["headline"]["text"], *found["headline"]["also"]]
    assert any(text.startswith("Not lossless: what the drafter proposes comes at") for text in texts) == biased


def test_each_engine_that_is_wrong_is_named_beside_sound_ones(bench: Bench, tmp_path: Path) -> None:
    good, weak = write(trained_drafter(), tmp_path / "good"), write(weak_drafter(), tmp_path / "weak")
    sound, batch = generate(good)
    bench.scored(batch)
    wrong: dict[str, tuple[str, Any]] = {
        "other order": ("engine features", {"fault": features_changed(other_order)}),
        "zeros": ("engine features", {"fault": features_changed(torch.zeros_like)}),
        "feedback": ("engine features", {"fault": feedback_changed(lambda r: 3 * r)}),
        "lost": ("dead", {"break_it": lambda served: randomize_drafter(served, 1)}),
        "two": ("depth", {"depth": 2}),
    }
    bench.report("sound 1", sound)
    bench.report("sound 2", generate(good)[0])
    found, alone = {}, {}
    for reporter, (_, options) in wrong.items():
        counts, _ = generate(good, **options)
        alone[reporter] = bench.report(reporter, counts, options.get("depth", 4))["engine"]
        found[reporter] = counts
        assert counts.drafts > 600
    found["old"] = generate(weak)[0]
    alone["old"] = bench.report("old", found["old"])["engine"]
    # By itself each has answered all prompts of the batch. Beside the others it may have had the hardest eighth.
    assert alone == {reporter: name for reporter, (name, _) in wrong.items()} | {"old": "stale weights"}
    document = bench.alpha()
    named = {line["reporter"]: line["verdict"] for line in document["engines"]}
    explained = dict.fromkeys(("old", "other order", "zeros"), "lower")
    assert named == alone | {"sound 1": "healthy", "sound 2": "healthy"} | explained, document["engines"]
    evidence = {line["reporter"]: line["evidence"] for line in document["engines"]}
    assert "first drafts are accepted as in replay" in evidence["feedback"]
    assert f"accepts what {OLD} would" in evidence["old"]
    assert "drafts 2 tokens a round where the service replays and trains 4" in evidence["two"]
    # α of the engines is of all but those that are blamed; the shallow one is sound.
    kept = (sound, sound, found["two"], found["old"], found["other order"], found["zeros"])
    rounds = sum(counts.drafts for counts in kept)
    assert document["current"]["live_rounds"] == pytest.approx(rounds, rel=0.01)


def test_features_that_the_trainer_gets_wrong_hold_publishing(bench: Bench, tmp_path: Path) -> None:
    sound, batch = generate(write(trained_drafter(), tmp_path / "good"))
    bench.report("only", sound)
    bench.scored(dataclasses.replace(batch, aux_hidden=torch.zeros_like(batch.aux_hidden)))
    document = bench.alpha()
    assert [line["verdict"] for line in document["engines"]] == ["trainer features"]
    assert document["headline"]["state"] == "held"
    assert "more than the drafter could accept" in document["publishing_held"]
    bench.report("only", sound, policy=1)
    bench.scored(batch, policy=1)
    after = bench.alpha()
    assert ([line["verdict"] for line in after["engines"]], after["publishing_held"]) == (["healthy"], None)
