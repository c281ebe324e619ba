"""Files that tell which tokens older weights drew, the whole way: HTTP, queue, worker, training, gate, published.

The policy moved from version 0 to 1: its head did, and with it the law that engines verify by.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_reference import reference_steps
from helpers.drafter.drafter_worlds import cast
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.worker.worker_fixtures import HIDDEN, VOCAB, Bench, World, recorded_windows
from torch import Tensor

from drafter.batch import load_batch
from drafter.files.checkpoint import read_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from service.monitor.records import DrafterSums, ScoreRecord
from service.storage.drafters.versions import Manifest
from service.storage.registry import Registry
from service.worker.loop import RunWorker

DEPTH, LATE = 4, 3
LEARNS: dict[str, Any] = {
    "depth": DEPTH,
    "gate_min_gain": 0.005,
    "learning_rate": 5e-3,
    "train_passes": 6.0,
    "train_step_tokens": 600,
    "recent_tokens": 20_000,
    "claim_tokens": 100_000,
}


def moved() -> World:
    """Version 1 is 0.2 nats off version 0 in mean."""
    world = World()
    g = torch.Generator().manual_seed(5)
    world.heads[1] = world.heads[0] + 0.12 * torch.randn(VOCAB, HIDDEN, generator=g)
    return world


@cache
def taught(scratch: Path) -> Eagle3Drafter:
    """A drafter that knows the law of version 1 well."""
    world = moved()
    scratch.write_bytes(world.rollout_file("schooling", policy_version=1, lengths=[24] * 64))
    batch, trainer = load_batch(scratch), DrafterTrainer(drafter := world.drafter(), TrainConfig(learning_rate=1e-2))
    for _ in range(200):
        trainer.step([(batch, world.policy(1))])
    return drafter


class Way:
    """A run, its service, its worker, and files of version 1."""

    def __init__(self, bench: Bench, service: RunningService, first: Eagle3Drafter, *, head: bool) -> None:
        self.bench, self.client = bench, service.client
        self.put("/runs/default", bench.world.run_file(drafter=first))
        if head:
            self.put("/runs/default/head", bench.world.head_file(1))
        self.worker: RunWorker = bench.worker(**LEARNS)

    def put(self, path: str, body: bytes) -> None:
        reply = self.client.put(path, content=body, headers=HEADERS)
        assert reply.is_success, reply.text

    def send(self, name: str, **options: Any) -> ScoreRecord:
        """One file; its record, once the worker has nothing left to do."""
        body = self.bench.world.rollout_file(name, policy_version=1, **options)
        reply = self.client.post("/rollouts", content=body, headers=HEADERS)
        assert reply.status_code == 202, reply.text
        batch = reply.json()["batch_id"]
        self.bench.drain(self.worker)
        assert self.bench.state(batch) == "trained", self.bench.reason(batch)
        return self.bench.store.scores()[batch]

    def served(self) -> tuple[Manifest, Eagle3Drafter]:
        """What engines draft with now."""
        latest = Registry(self.bench.layout).latest("default")
        assert latest is not None
        drafter = read_drafter(self.bench.layout.drafter("default", latest.version))
        assert isinstance(drafter, Eagle3Drafter)
        return latest, drafter

    def alpha(self, drafter: Eagle3Drafter, scratch: Path) -> float:
        """What engines of version 1 would accept: on many rollouts that it drew itself."""
        scratch.write_bytes(self.bench.world.rollout_file("many", policy_version=1, lengths=[24] * 200))
        return replay(drafter, load_batch(scratch), self.bench.world.policy(1), depth=DEPTH).alpha


@pytest.fixture
def way(bench: Bench, serve: Callable[..., RunningService]) -> Callable[..., Way]:
    bench.world = moved()
    return lambda first, *, head: Way(bench, serve(), first, head=head)


# --- the same in float64, from the formulas


def alpha_in_float64(world: World, drafter: Eagle3Drafter, file: bytes, scratch: Path, *, weighed: bool) -> float:
    """Acceptance length on a file whose `late` tokens version 0 drew; by version 1's law where it is `weighed`."""
    scratch.write_bytes(file)
    batch = cast(load_batch(scratch), torch.float64)
    ids, starts = batch.input_ids, batch.cu_seqlens[:-1]
    answers: list[tuple[int, int]] = [(begin + 4, end) for begin, end in pairwise(batch.cu_seqlens.tolist())]
    laws = [torch.softmax(world.states.double() @ world.heads[version].double().T, -1) for version in (0, 1)]
    drew = torch.ones(len(ids), dtype=torch.int64)
    for place in range(3, 3 + LATE):
        drew[starts + place] = 0
    weights = {name: weight.detach().double() for name, weight in drafter.state_dict().items()}
    drafted, documents = drafter.vocabulary.ids.tolist(), [batch.select([i]) for i in range(batch.rollouts)]
    steps = reference_steps(
        weights, drafter.config, world.embed.double(), drafted, documents, DEPTH, world.heads[1].double(), 1.0
    )
    kept = torch.zeros(len(ids), DEPTH, dtype=torch.float64)  # of the round whose first draft is token t
    for j, step in enumerate(steps):
        for row, logits in zip(step.rows, step.logits, strict=True):
            t = row + 2 + j
            before, token = int(ids[t - 1]), int(ids[t])
            q = float(logits.softmax(0)[drafted.index(token)]) if token in drafted else 0.0
            drawn, now = (float(laws[version][before, token]) for version in (int(drew[t]), 1))
            kept[row + 2, j] = min(now, q) / drawn if weighed else min(1.0, q / drawn)
    found = [rounds(kept[begin:end], weighed=weighed) for begin, end in answers]
    return sum(end - begin for begin, end in answers) / math.fsum(found)


def rounds(kept: Tensor, *, weighed: bool) -> float:
    """Expected rounds that emit the tokens of one answer behind its first, [n, K]."""
    n, K = kept.shape
    begun, emitted = [1.0] + [0.0] * (n + K), 0.0
    for s in range(n):
        likely = told = 1.0
        for j in range(K):
            c = float(kept[s, j]) if s + j < n else 0.0
            emitted += begun[s] * told * (s + j < n)
            begun[s + j + 1] += begun[s] * likely * (1.0 - min(c, 1.0))
            likely, told = likely * min(c, 1.0), told * c
        emitted += begun[s] * told * (s + K < n)
        begun[s + K + 1] += begun[s] * likely
    found = math.fsum(begun[:n])
    return found * n / min(emitted, (K + 1) * found) if weighed else found


def alpha_of(sums: DrafterSums | None) -> float:
    assert sums is not None
    return sums.tokens / sums.rounds


# --- tests


@pytest.mark.parametrize("told", [True, False])
def test_alpha_training_and_gate_of_told_files_are_of_the_newest_policy(
    way: Callable[..., Way], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    """One token in fourteen is older: in the mean of all, which is what an untold file has, that hardly shows."""
    first = (world := moved()).trained_drafter(tmp_path, policy_version=0)
    windows = recorded_windows(monkeypatch)
    run = way(first, head=True)
    files = [run.send(f"file {n}", lengths=[44] * 48, late=LATE, told=told) for n in range(3)]
    chosen, drafter = run.served()
    assert (chosen.policy_version, chosen.parent is None) == (1, False), "published by what came after the training"
    assert run.alpha(drafter, tmp_path / "many") > 1.05 * run.alpha(first, tmp_path / "many")
    for version, policy in (batch for window in windows for batch in window):
        assert (version, policy.version) == (1, 1)
        assert torch.equal(policy.needed_head().lm_head, world.heads[1])
    small: dict[str, Any] = {"lengths": [44] * 16, "late": LATE, "told": told}
    files.append(run.send("small", **small))
    for record in files:
        assert record.policy_version == 1
        assert record.logprob_gap is not None
        assert 0.005 < record.logprob_gap < 0.02
        assert record.newest_gap == (pytest.approx(0.0, abs=1e-4) if told else None)
    body = world.rollout_file("small", policy_version=1, **small)
    both = [alpha_in_float64(world, drafter, body, tmp_path / "one", weighed=one) for one in (told, not told)]
    assert files[-1].drafter_version is not None
    assert alpha_of(files[-1].served) == pytest.approx(both[0], rel=1e-6)
    assert alpha_of(files[-1].served) != pytest.approx(both[1], rel=5e-4)


@pytest.mark.parametrize("told", [True, False])
def test_where_the_head_is_stale_told_files_publish_nothing_worse(
    way: Callable[..., Way], tmp_path: Path, *, told: bool
) -> None:
    """Version 1 drew all, and its head never came. Untold, that passes for rollouts of older weights."""
    run = way(copy.deepcopy(taught(tmp_path / "schooling")), head=False)
    first, drafter = run.served()
    files = [
        run.send(f"file {n}", lengths=[24] * 48, told=told, change=lambda tensors: tensors.pop("logsumexp"))
        for n in range(3)
    ]
    last, drafts_now = run.served()
    assert (last.version == first.version) == told
    alpha = [run.alpha(one, tmp_path / "many") for one in (drafter, drafts_now)]
    assert alpha[1] == alpha[0] if told else alpha[1] < 0.98 * alpha[0]
    for record in files:
        assert (record.newest_gap == record.logprob_gap) == told, "named as features that are wrong"
