"""What the engine's drafter computed, call by call, against our drafter and a plain forward of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts
from safetensors.torch import load_file
from torch import Tensor
from vllm_server.vllm_process import DEPTH, VllmServer

from drafter.files.checkpoint import read_drafter
from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import AUX_LAYERS
from examples.reference.cached import attend, cache_heads, embed, fuse

TOLERANCE = 1e-4


class Mirror:
    """Our drafter with a cache by position, repeating the engine's calls for one sequence."""

    def __init__(self, drafter: Eagle3Drafter, policy: Any) -> None:
        self.drafter, self.embed_tokens = drafter, policy_of(policy).embed_tokens
        self.keys = torch.zeros(256, cache_heads(drafter), drafter.config.head_dim)
        self.values = torch.zeros_like(self.keys)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """`pre` [n, H] of rows [T]; each row's key replaces an earlier, rejected one at its position.

        n = T with the V1 runner. The V2 runner leaves old positions in the rows after those of rejected drafts: rows
        count as long as positions go on.
        """
        start = int(positions[0])
        n = int((positions == start + torch.arange(len(positions))).int().cumprod(0).sum())
        input_ids, positions, hidden = input_ids[:n], positions[:n], hidden[:n]
        embedding = embed(self.drafter, input_ids, self.embed_tokens)[None]
        keys, values = (x[:start].transpose(0, 1)[None] for x in (self.keys, self.values))
        pre, keys, values = attend(self.drafter, embedding, hidden[None], positions[None], keys, values)
        for store, new in ((self.keys, keys), (self.values, values)):
            store[start : start + len(positions)] = new[0].transpose(0, 1)
        return pre[0]


def calls(path: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The recorded calls in order."""
    grouped: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in load_file(path).items():
        number, kind, field = name.split(".")
        grouped.setdefault((number, kind), {})[field] = tensor
    for (_, kind), tensors in sorted(grouped.items()):
        yield kind, tensors


def record(server: VllmServer, path: Path, prompt: list[int]) -> list[int]:
    server.rpc("start_recording")
    try:
        text: list[int] = server.generate(prompt, max_tokens=24, ignore_eos=True, stop_token_ids=[])
    finally:
        assert server.rpc("stop_recording", str(path)) > 10
    return text


@torch.no_grad()
def features(token_ids: list[int], policy: Any, layers: Sequence[int]) -> Tensor:
    """The states entering the aux layers, [T, A*H], by a plain forward of the policy."""
    states = policy(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def check_conformance(server: VllmServer, drafters: Path, tmp_path: Path, name: str, *, every_row: bool = True) -> None:
    """Swap to `drafters / name`, and hold what the engine's drafter then computes against ours."""
    assert server.swap(name, f"conformance-{name}").status_code == 200
    # A prompt that no other test begins with: rows found in the prefix cache never reach the drafter.
    prompt, ours = odd_prompts(1, seed=len(name))[0] + elicit_prompts(1, seed=11)[0], read_drafter(drafters / name)
    check_calls(server, ours, tmp_path, prompt, base_policy()[0], AUX_LAYERS, every_row=every_row)


@torch.no_grad()
def check_calls(
    server: VllmServer,
    ours: Eagle3Drafter,
    tmp_path: Path,
    prompt: list[int],
    policy: Any,
    layers: Sequence[int],
    *,
    every_row: bool = True,
) -> None:
    """Record a request, and repeat every call of the engine's drafter with ours."""
    text = record(server, tmp_path / "calls.safetensors", prompt)
    mirror, expected = Mirror(ours, policy), features(prompt + text, policy, layers)
    seen = {"combine": 0, "forward": 0, "logits": 0}
    worst = dict.fromkeys(("features", "fuse", "pre", "logits"), 0.0)

    def compare(what: str, theirs: Tensor, own: Tensor) -> None:
        worst[what] = max(worst[what], float((theirs - own).abs().max()))

    recorded = list(calls(tmp_path / "calls.safetensors"))
    starts = _round_starts(recorded)
    for number, (kind, call) in enumerate(recorded):
        seen[kind] += 1
        if kind == "combine":
            compare("fuse", call["fused"], fuse(ours, call["aux"]))
            position, rows = starts[number]
            if rows:
                compare("features", call["aux"][:rows], expected[position : position + rows])
        elif kind == "forward":
            pre = mirror.forward(call["input_ids"], call["positions"], call["hidden_states"])
            assert len(pre) == len(call["pre"]) or not every_row
            compare("pre", call["pre"][: len(pre)], pre)
        else:
            own = ours.logits(_pre_of(call["hidden_states"], recorded[number - 1][1]))
            compare("logits", call["logits"][:, ours.vocabulary.ids], own)
            outside = ~ours.vocabulary.t2d
            assert bool((call["logits"][:, outside] == -torch.inf).all())
    assert seen["combine"] >= 3
    assert seen["logits"] >= DEPTH * 3
    print(f"{seen}, largest differences {worst}")
    assert max(worst.values()) < TOLERANCE, worst


def _round_starts(recorded: list[tuple[str, dict[str, Tensor]]]) -> dict[int, tuple[int, int]]:
    """Position of the first row, and number of valid rows, of each round, by the index of its `combine` call.

    A round's rows end with rejected drafts, kept for a fixed shape; the next round begins where the valid ones ended.
    The last round has no next: none of its rows count.
    """
    begins = [i for i, (kind, _) in enumerate(recorded) if kind == "combine"]
    starts = [int(recorded[i + 1][1]["positions"][0]) for i in begins]
    return {
        i: (start, following - start)
        for i, start, following in zip(begins, starts, [*starts[1:], starts[-1]], strict=True)
    }


def _pre_of(normed: Tensor, forward: dict[str, Tensor]) -> Tensor:
    """The `pre` rows [B, H] behind the normed states [B, H] that the head was given."""
    rows = [int((forward["normed"] == row).all(-1).nonzero()[0]) for row in normed]
    return forward["pre"][rows]
