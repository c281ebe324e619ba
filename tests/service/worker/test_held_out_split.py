"""What the gate promises where siblings of one prompt say nearly the same: it must hold for prompts nobody trained on.

The world has nothing to learn that carries over: every prompt has a text of its own, and its features are noise that
only tells which prompt it is. A drafter can learn the texts that it is trained on by heart, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_fixtures import FINGERPRINT, HIDDEN, LAYERS, VOCAB, Bench, World, joined

from drafter.batch import RolloutBatch, load_batch
from drafter.replay.gate import MIN_ROLLOUTS
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.worker import recent
from service.worker.lineage import CANDIDATE
from service.worker.loop import RunWorker
from service.worker.promotion import Contest, contest
from service.worker.recent import HeldOut

LENGTH, SIBLINGS = 20, 4
SETTINGS: dict[str, Any] = {
    "train_passes": 24.0,
    "train_step_tokens": 400,
    "learning_rate": 1e-2,
    "recent_tokens": 20_000,
    "claim_tokens": 100_000,
    "drafting": "greedy",
}


class Heart(World):
    """Texts that can only be learnt by heart."""

    def rollout_file(self, name: str, *, prompts: Sequence[int] = (), **metadata: Any) -> bytes:  # type: ignore[override]
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
            "policy_version": 0,
            "rollout_ids": [f"{name}/{i}" for i in range(len(prompts))],
            "target_fingerprint": FINGERPRINT,
            "aux_layers": LAYERS,
        }
        return joined(
            wire.encode({k: as_wire(v) for k, v in tensors.items()}, wire.rollout_metadata(**facts | metadata))
        )


def trained(bench: Bench) -> RunWorker:
    """A worker that has trained on 96 prompts of four siblings each; what is served is the first drafter still."""
    bench.world = Heart()
    bench.begin()
    bench.post("first", prompts=range(10_000, 10_000 + MIN_ROLLOUTS * 4))  # those that are split by group
    worker = bench.worker(**SETTINGS)
    bench.drain(worker)
    for step in range(3):
        bench.post(f"step{step}", prompts=[n for n in range(32 * step, 32 * step + 32) for _ in range(SIBLINGS)])
        bench.drain(worker)
    return worker


def judged(bench: Bench, worker: RunWorker, evidence: HeldOut) -> Contest:
    policy = worker.learner.target.at(0)
    settings = bench.settings.model_copy(update=SETTINGS | {"gate_min_gain": 0.0})
    (outcome,) = contest(settings, worker.learner.lineage, evidence, policy, [CANDIDATE])
    return outcome


def unseen(bench: Bench, tmp_path: Path) -> HeldOut:
    path = tmp_path / "unseen.safetensors"
    path.write_bytes(bench.world.rollout_file("unseen", prompts=range(50_000, 50_096)))
    return HeldOut([load_batch(path)], by_prompt=True)


def rollout_ids(batch: RolloutBatch) -> tuple[str, ...]:
    return batch.rollout_ids


def test_a_split_by_rollout_promises_a_gain_that_unseen_prompts_do_not_have(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recent, "prompt_hashes", rollout_ids)  # the split before: by rollout
    worker = trained(bench)
    promised = judged(bench, worker, worker.learner.recent.held_out(64)).verdict
    true = judged(bench, worker, unseen(bench, tmp_path)).verdict
    assert promised.promote
    assert promised.low > 0.1
    assert true.gain < promised.low - 0.1


def test_a_split_by_prompt_promises_what_unseen_prompts_have(bench: Bench, tmp_path: Path) -> None:
    worker = trained(bench)
    evidence = worker.learner.recent.held_out(64)
    outcome = judged(bench, worker, evidence)
    true = judged(bench, worker, unseen(bench, tmp_path)).verdict
    assert evidence.by_prompt
    assert outcome.prompts >= MIN_ROLLOUTS
    assert outcome.facts["held_out_by"] == "prompt"
    assert outcome.verdict.low - 0.05 < true.gain < outcome.verdict.high + 0.05
    assert abs(outcome.verdict.gain - true.gain) < 0.05
    assert np.isfinite(outcome.verdict.low)
