"""A process whose memory is bounded: an honest run is trained beside fat idle ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.worker.room_fixtures import error_of, is_trained
from helpers.worker.worker_fixtures import CONFIG, LAYERS, Bench, alive, joined, nest

from rl_hooks import wire
from rl_hooks.sending.features import as_wire

FAT = dict(CONFIG) | {"hidden_size": 256, "intermediate_size": 32_768, "vocab_size": 40}
FINGERPRINT = wire.target_fingerprint(FAT, LAYERS)
TOKENS = 20


def fat_run() -> tuple[bytes, torch.Tensor]:
    """Body of PUT /runs/{run} of some KiB, whose drafter takes 100 MB, and its moments as much again; and its head."""
    embed, head = torch.randn(40, 256) * 0.02, torch.randn(40, 256) * 0.02
    facts = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(FAT),
        "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
        "target_fingerprint": FINGERPRINT,
        "policy_version": "0",
    }
    return joined(wire.encode({"embed_tokens": as_wire(embed), "lm_head": as_wire(head)}, facts)), head


def fat_batch(run: str, name: str, head: torch.Tensor) -> bytes:
    ids = torch.randint(0, 40, (TOKENS,))
    mask = torch.ones(TOKENS, dtype=torch.uint8)
    mask[0] = 0
    last = torch.randn(TOKENS, 256).bfloat16()
    logits = last.float() @ head.T
    logprobs = torch.zeros(TOKENS)
    logprobs[1:] = torch.log_softmax(logits, -1)[torch.arange(TOKENS - 1), ids[1:]]
    tensors = {
        "input_ids": ids.int(),
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "loss_mask": mask,
        "aux_hidden": torch.randn(TOKENS, 3 * 256).bfloat16(),
        "last_hidden": last,
        "logprobs": logprobs,
        "logsumexp": torch.logsumexp(logits, -1),
    }
    facts: dict[str, Any] = {"run": run, "policy_version": 0, "rollout_ids": [name], "target_fingerprint": FINGERPRINT}
    metadata = wire.rollout_metadata(**facts, aux_layers=LAYERS)
    return joined(wire.encode({k: as_wire(v) for k, v in tensors.items()}, metadata))


def test_an_honest_run_is_trained_beside_fat_idle_ones_in_a_process_whose_memory_is_bounded(
    bench: Bench, tmp_path: Path
) -> None:
    """A review: some registrations of 80 KiB held 200 MB each for ever, and the next honest run was refused."""
    body, head = fat_run()
    fat = [f"fat{number}" for number in range(2)]
    with nest(tmp_path / "log") as workers:
        pid = workers.start(bench, address_space=900 << 20, settings={"draft_vocab_size": 32})

        def trained(run: str, batch: str) -> None:
            bench.wait(lambda: is_trained(bench, run, batch) or not alive(pid), 400.0)
            assert alive(pid), "the process died"
            assert is_trained(bench, run, batch)

        for run in [*fat, "honest"]:
            bench.register(body, run=run)
            trained(run, bench.post_file(fat_batch(run, f"{run}-first", head)))
        states = {run: state_of(bench, run) for run in fat}
        for run in fat:
            trained(run, bench.post_file(fat_batch(run, f"{run}-second", head)))
            totals, windows = state_of(bench, run)
            assert totals["batches"] == 2
            assert windows > states[run][1] > 0
        assert not [run for run in [*fat, "honest"] if error_of(bench, run)]
    log = (tmp_path / "log").read_text()
    print(f"{log.count('is idle, and closed')} times an idle run was closed")
    assert "is idle, and closed" in log, "all fitted: the test shows nothing"


def state_of(bench: Bench, run: str) -> tuple[dict[str, Any], int]:
    """Totals and windows of a run's newest checkpoint."""
    newest = max(bench.layout.worker(run).glob("checkpoint-*"))
    windows = json.loads((newest / "trainer" / "trainer.json").read_text())["windows"]
    return json.loads((newest / "state.json").read_text())["totals"], windows
