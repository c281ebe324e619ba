"""What the scripts of packed trainers share: a run with the hook and one without, and what came of the first."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from helpers.trainer.hooks_fixtures import (
    Received,
    Receiver,
    as_float,
    mapped,
    of_every_token,
    only_predicting_rows,
    receiver,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from rl_hooks import wire

#: What one run finds, as JSON.
Found = dict[str, Any]
#: Trains on this rank, with the service or without; returns the weights that it ends with.
Train = Callable[[int, Receiver | None, Found], list[torch.Tensor]]


class Alone(NamedTuple):
    """A rollout as it should come: T tokens, from a forward of it alone."""

    states: torch.Tensor  # [T, ...], those of the auxiliary layers and the last
    generated: torch.Tensor  # int[T], 1 where the weights of now drew the token
    logprobs: torch.Tensor  # [T]
    reward: float | None = None
    logsumexp: torch.Tensor | None = None  # [T], compared where the token after is generated
    stratum: str | None = None


def small_config(vocabulary: int, *, tied: bool = False) -> Qwen3Config:
    """Of the policy that these scripts train."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
        attn_implementation="sdpa",
    )


def small_policy(vocabulary: int, *, tied: bool = False) -> Any:
    """The policy that these scripts train."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(small_config(vocabulary, tied=tied)).eval()


def each_alone(module: Any, q: Any, k: Any, v: Any, bounds: Sequence[int]) -> tuple[torch.Tensor, None]:
    """Flash attention's varlen kernel on a packed row [1, N, T, hd]: causal, each rollout for itself."""
    k, v = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (k, v))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def states_alone(out: Any, layers: Sequence[int]) -> torch.Tensor:
    """States [T, ...] of a forward of one sequence, of these layers and after the last."""
    return torch.cat([out.hidden_states[i][0] for i in (*layers, -1)], 1)


@torch.no_grad()
def compare(service: Receiver, found: Found, expected: dict[tuple[int, ...], Alone], head: torch.Tensor) -> Found:
    """Every rollout that came since the last call beside `expected`, by its tokens; `head` is the policy's."""
    result: Found = {"rollouts": 0, "features": 0.0, "mask": True, "logp": 0.0, "rewards": True, "strata": True}
    result |= {"versions": [], "packed": [], "last_rows": [], "behind": []}
    directory = Path(found["directory"])
    for request in service.rollouts()[found.setdefault("read", 0) :]:
        file = mapped(request, directory)
        bounds = file.array("cu_seqlens").tolist()
        rewards = json.loads(file.header.metadata.get("rewards", "null")) or [None] * (len(bounds) - 1)
        strata = wire.check_rollout_header(file.header).strata or [None] * (len(bounds) - 1)
        for (begin, end), reward, stratum in zip(pairwise(bounds), rewards, strata, strict=True):
            alone = expected.pop(tuple(file.array("input_ids")[begin:end].tolist()))
            last = of_every_token(file, "last_hidden")[begin:end]
            # What was not sent is expected of none.
            last = torch.where(last.isnan(), alone.states[:, -last.shape[1] :], last)
            sent = torch.cat([as_float(file, "aux_hidden")[begin:end], last], 1)
            gap = float((sent - alone.states).abs().max() / alone.states.abs().max())
            said = torch.from_numpy(file.array("logprobs")[begin:end].copy())
            result["features"] = max(result["features"], gap)
            result["mask"] &= file.array("loss_mask")[begin:end].tolist() == alone.generated.tolist()
            result["logp"] = max(result["logp"], float(((said - alone.logprobs) * alone.generated).abs().max()))
            result["rewards"] &= reward == alone.reward
            result["strata"] &= stratum == alone.stratum
            if alone.logsumexp is not None:
                predicting = alone.generated.roll(-1) * (torch.arange(end - begin) < end - begin - 1)
                gaps = (of_every_token(file, "logsumexp")[begin:end] - alone.logsumexp)[predicting > 0]
                normaliser = float(gaps.abs().max())
                result["normaliser"] = max(result.get("normaliser", 0.0), normaliser)
            if "versions_behind" in file.header.tensors:
                result["behind"].append(file.array("versions_behind")[begin:end].tolist())
            result["rollouts"] += 1
        result["packed"].append(len(bounds) - 1)
        result["last_rows"].append(wire.check_rollout_header(file.header).last_rows)
        result["versions"].append(int(file.header.metadata["policy_version"]))
        result["temperature"] = float(file.header.metadata["temperature"])
    if heads := [r for r in service.requests if r.method == "PUT"]:
        result["head"] = torch.equal(as_float(mapped(heads[-1], directory), "lm_head"), head)
    found["read"] = len(service.rollouts())
    result["left"] = len(expected)
    return result


def first_drafter(directory: Path, target: Any = None, layers: Sequence[int] = (2, 4, 5)) -> str:
    """Write an untrained first drafter of half the vocabulary; returns its folder, for DRAFTALIGN_INITIAL_DRAFTER.

    `target`: the policy's transformers config; None: `small_config` of 512 tokens.
    """
    sizes = (target or small_config(512)).to_dict()
    vocabulary = DraftVocabulary(torch.arange(sizes["vocab_size"] // 2), sizes["vocab_size"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = Eagle3Drafter(DrafterConfig.from_target(sizes, layers, len(vocabulary)), vocabulary)
    directory.mkdir()
    write_drafter(directory, drafter)
    return str(directory)


def brought_the_first_drafter(requests: Sequence[Received], directory: Path, drafter: str) -> bool:
    """Whether the run was registered with the drafter in that folder, to the bit."""
    run = mapped(requests[0], directory)
    weights = safetensors.numpy.load_file(Path(drafter) / "model.safetensors")
    config = json.loads((Path(drafter) / "config.json").read_text())
    same = all(np.array_equal(run.array(f"drafter.{name}"), weight) for name, weight in weights.items())
    return same and json.loads(run.header.metadata["drafter_config"]) == config


def keep(requests: Sequence[Received], directory: Path) -> str:
    """Write what came for `learnt` of stacks_fixtures, which another Python runs; returns the folder."""
    directory.mkdir(parents=True)
    for number, request in enumerate(requests):
        about = {
            "method": request.method,
            "path": request.path,
            "headers": {"Content-Type": request.headers["content-type"]},
        }
        (directory / f"{number:04}.json").write_text(json.dumps(about))
        (directory / f"{number:04}.body").write_bytes(request.body)
    return str(directory)


def with_and_without(
    rank: int, out: Path, train: Train, target: Any = None, layers: Sequence[int] = (2, 4, 5)
) -> tuple[Found, Found]:
    """Train with a service that wants few last states, then without one; what each found.

    `target`, `layers`: of `first_drafter`. The first also has `weights`, whether both end with the same,
    `first_drafter`, whether the run was registered with the one in the environment, what the hook's package has `said`,
    and `kept`, the folder of what it has sent.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rl_hooks").addHandler(handler)
    files = out / f"files{rank}"
    files.mkdir()
    found: Found = {"directory": str(files)}
    with receiver() as service:
        service.answer = only_predicting_rows
        drafter = os.environ["DRAFTALIGN_INITIAL_DRAFTER"] = first_drafter(out / f"first{rank}", target, layers)
        with_us = train(rank, service, found)
        puts = [r for r in service.requests if r.method == "PUT"]
        found["heads"] = [r.path for r in puts]
        found["first_drafter"] = brought_the_first_drafter(puts, files, drafter) if puts else None
        found["kept"] = keep(service.requests, out / f"sent{rank}")
    own: Found = {}
    without = train(rank, None, own)
    found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
    found["said"] = said
    return found, own
