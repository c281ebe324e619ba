"""What is planned for, and how many bytes it makes.

Bytes come from the wire format's own writer and check, a drafter's sizes from its file layout.

Legend: H hidden, A auxiliary layers, R rollouts, T tokens of one, N tokens of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np

from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig, tensor_shapes

FeatureDtype = Literal["bfloat16", "float8_e4m3", "float8_e4m3_all"]
#: Targets by short name: their transformers configs' sizes.
POLICIES: Final[Mapping[str, Mapping[str, int]]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "vocab_size": 151_936}
    | {"num_key_value_heads": 8, "head_dim": 128},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_attention_heads": 64, "vocab_size": 151_936}
    | {"num_key_value_heads": 8, "head_dim": 128},
}
GIB: Final = 1 << 30
#: Bytes of an element of a drafter's two vocabulary maps.
_MAPS: Final[Mapping[str, int]] = {"d2t": 8, "t2d": 1}
#: Three layers, whichever: only their number matters here.
LAYERS: Final = (2, 18, 33)
#: A hook puts files from this size on into the object store, where the service has one.
DIRECT_BYTES: Final = 8 << 20
#: Tokens that one rank's hook sends of a policy version, and bytes that it holds back, by its defaults.
HOOK_TOKENS: Final = 65_536
HOOK_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is planned for. Figures of a step are of one run; `runs` like it share API, worker and network."""

    drafter: DrafterConfig
    step_seconds: float
    rollouts: int  # of a step
    tokens: int  # of a rollout, its prompt included
    prompt_share: float = 0.25
    sampled_share: float = 1.0
    ranks: int = 8
    runs: int = 1
    engines: int = 8  # of a run
    network_gbit: float = 100.0
    dtype: FeatureDtype = "bfloat16"
    post_share: float = 0.25  # of a step, in which its files are made
    group: int = 1  # rollouts of a prompt in one file, which share its states
    head_share: float = 1.0  # of steps, after which the head has moved and is sent again

    def __post_init__(self) -> None:
        numbers = {k: v for k, v in asdict(self).items() if isinstance(v, (int, float))}
        for name, value in numbers.items():
            least = 0.0 if name in ("prompt_share", "engines", "post_share", "head_share") else math.ulp(0.0)
            most = 1.0 if name.endswith("_share") else 1e12
            if not least <= value <= most:
                bounds = f"from 0 to {most:g}" if least == 0 else f"above 0 and at most {most:g}"
                raise ValueError(f"{name} must be {bounds}, got {value}")
        if self.prompt_share == 1:
            raise ValueError("prompt_share must be below 1: nothing is left for the response")
        if self.tokens < 2:
            raise ValueError(f"tokens must be at least 2, a prompt's and a response's, got {self.tokens}")

    @property
    def sent_tokens(self) -> float:
        """Of a step of one run, after sampling and each rank's cap."""
        return min(self.rollouts * self.tokens * self.sampled_share, self.ranks * float(HOOK_TOKENS))


def file_bytes(
    drafter: DrafterConfig, rollouts: int, tokens: int, dtype: FeatureDtype, prompt_share: float = 0.0, group: int = 1
) -> int:
    """Bytes of a rollout file as the hook lays it out, for equal rollouts; the wire format's own writer and check.

    `group`: rollouts of one prompt, whose states are there once.
    """

    def size(R: int, T: int, responses: int) -> int:
        H, A, N = drafter.target_hidden_size, len(drafter.aux_layers), R * T
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "input_ids": ((N,), "I32"),
            "cu_seqlens": ((R + 1,), "I32"),
            "loss_mask": ((N,), "U8"),
            "logprobs": ((N,), "F32"),
            "logsumexp": ((R * responses,), "F32"),
            "last_hidden": ((R * responses, H), "F8_E4M3" if dtype == "float8_e4m3_all" else "BF16"),
            "aux_hidden": ((N, A * H), "BF16" if dtype == "bfloat16" else "F8_E4M3"),
        }
        if dtype != "bfloat16":
            shapes["aux_hidden_scale"] = ((N, A), "F32")
        if dtype == "float8_e4m3_all":
            shapes["last_hidden_scale"] = ((R * responses, 1), "F32")
        tensors = {n: wire.Tensor.of(np.zeros(s, wire.NUMPY_DTYPE[d]), d) for n, (s, d) in shapes.items()}
        parts = wire.encode(tensors, _metadata(drafter, R))
        wire.check_rollout_header(wire.parse_header(bytes(parts[0])))
        return wire.parts_bytes(parts[1:])

    # Linear in rollouts, in tokens and in those that were generated: so nothing of the file's true size need be held.
    two = size(1, 2, 1)
    a_response = size(1, 3, 2) - two
    a_prompt = size(1, 3, 1) - two
    a_rollout = size(2, 2, 1) - two - a_response - a_prompt
    prompt = round(prompt_share * tokens)
    header = wire.parts_bytes(wire.encode({}, _metadata(drafter, rollouts))) + 640
    fixed = header + two - a_response - a_prompt - a_rollout
    whole = fixed + rollouts * (a_rollout + prompt * a_prompt + (tokens - prompt) * a_response)
    if group == 1:
        return whole
    width, scale = (2, 0) if dtype == "bfloat16" else (1, 4)
    a_state = len(drafter.aux_layers) * (drafter.target_hidden_size * width + scale)
    return whole + 4 * rollouts * tokens - (rollouts - math.ceil(rollouts / group)) * prompt * a_state


def _metadata(drafter: DrafterConfig, rollouts: int) -> dict[str, str]:
    return wire.rollout_metadata(
        run="default",
        policy_version=0,
        rollout_ids=[f"{number:024d}" for number in range(rollouts)],
        target_fingerprint="0" * 32,
        aux_layers=drafter.aux_layers,
        rewards=[0.0] * rollouts,
        last_rows="predicting",
    )


def drafter_bytes(drafter: DrafterConfig) -> int:
    """Bytes of a published drafter: bfloat16, and its two vocabulary maps."""
    return sum(math.prod(shape) * _MAPS.get(name, 2) for name, shape in tensor_shapes(drafter).items())


def head_bytes(drafter: DrafterConfig) -> int:
    """Bytes of the policy's head as a trainer sends it again: bfloat16."""
    return drafter.vocab_size * drafter.target_hidden_size * 2


def checkpoint_bytes(drafter: DrafterConfig, optimizer: str) -> int:
    """Bytes of a worker's checkpoint: float32 weights with one moment of each that Muon moves, two of AdamW's."""
    shapes = {name: shape for name, shape in tensor_shapes(drafter).items() if name not in _MAPS}
    by_muon = {n for n, shape in shapes.items() if optimizer == "muon" and len(shape) == 2 and n != "lm_head.weight"}
    return sum(4 * math.prod(shape) * (2 if name in by_muon else 3) for name, shape in shapes.items())


def batches(plan: Deployment) -> float:
    """How many files one run sends in a step. A file has at most a quarter of what a rank's queue takes."""
    return max(1.0, plan.sent_tokens / tokens_a_file(plan))


def sent_file(plan: Deployment) -> tuple[int, int]:
    """Rollouts and bytes of a file of a step."""
    rollouts = max(1, round(tokens_a_file(plan) / plan.tokens))
    return rollouts, file_bytes(plan.drafter, rollouts, plan.tokens, plan.dtype, plan.prompt_share, plan.group)


def tokens_a_file(plan: Deployment) -> float:
    """Tokens of a file: a rank's share of a step, or a quarter of what its queue holds."""
    group, tokens = plan.group, 10_000
    a_token = file_bytes(plan.drafter, group, tokens, plan.dtype, plan.prompt_share, group) / (group * tokens)
    most = max(plan.tokens, HOOK_BYTES / 4 / a_token // plan.tokens * plan.tokens)
    return min(max(plan.tokens, plan.sent_tokens / plan.ranks), most)
