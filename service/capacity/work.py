"""What the worker computes: operations of a training pass, a replay and an optimizer step, from the file's true shapes.

Legend: K draft depth, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from rl_hooks.format.eagle3 import DrafterConfig, tensor_shapes
from service.capacity.sizes import DIRECT_BYTES, GIB, Deployment, batches, sent_file
from service.settings import Settings

#: What a GPU does of a training's operations in a worker: one H200 (docs/lab/gpu.md, "The whole worker").
GPU_TFLOPS: Final = 470.0
#: Of that rate, what it does of scoring: files are read and checked in that time.
_SCORING: Final = 0.35
#: Drafters that score a rollout: candidate, served and frozen. One that is passed over: the served one.
SCORERS: Final = 3
#: The gap check of a batch reads at most so many tokens.
_GAP_TOKENS: Final = 16_384
_NEWTON_SCHULZ: Final = 5
#: Assumed: bytes a second at which the GPUs of a host sum gradients and exchange matrices. Between hosts it is less.
EXCHANGE_BYTES: Final = 260e9
#: Ranks of one worker beyond which the plan does not look: exchange and rank 0's part have taken over.
MOST_RANKS: Final = 64
#: Of one GPU's time of scoring, what rank 0 does alone while the others wait: compares a file's digest,
#: judges, packs, writes checkpoints (docs/lab/machines.md, "Several GPUs").
_ALONE: Final = 0.24
#: Seconds of a processor for a GiB that the worker brings from an object store: its SHA-256, as the sender computes it
#: (docs/lab/uploads.md, "Rollouts by an object store").
DIGEST_CPU: Final = 0.58


def by_store(plan: Deployment, settings: Settings) -> bool:
    """Whether rollout files go by an object store, past the API: there is one, and a file is large enough."""
    return bool(settings.rollouts_url or settings.state_url) and sent_file(plan)[1] >= DIRECT_BYTES


def bring_seconds(plan: Deployment, settings: Settings) -> float:
    """How long a worker waits in a step of a run for files from the object store; hosts share no directory: for all.

    They come when they are claimed, at the line's rate at most, and nothing ahead of that.
    """
    if not (settings.state_url or by_store(plan, settings)):
        return 0.0
    return batches(plan) * sent_file(plan)[1] * (8e-9 / plan.network_gbit + DIGEST_CPU / GIB)


def pass_flops(drafter: DrafterConfig, tokens: float, responses: float, documents: float, depth: int) -> float:
    """Operations of one training pass, least work: forward and both gradients, nothing recomputed; one-layer drafters.

    A multiply-add is two. The count of `benchmarks.step_peers.floating_point_operations`, from the file's shapes.
    """
    forward, backward = _row(drafter, tokens / documents, depth)
    context_forward, context = _context(drafter)
    return (forward + backward) * responses + (context_forward + context) * (tokens - responses)


def score_flops(drafter: DrafterConfig, tokens: float, responses: float, documents: float, depth: int) -> float:
    """Operations of one drafter's replay: the forward pass alone."""
    return _row(drafter, tokens / documents, depth)[0] * responses + _context(drafter)[0] * (tokens - responses)


def _row(drafter: DrafterConfig, length: float, depth: int) -> tuple[float, float]:
    """Of a row that predicts a response token: forward, backward. Attention counts its causal half."""
    sizes = {n.removeprefix("midlayer."): math.prod(s) for n, s in tensor_shapes(drafter).items()}
    K, q = depth, drafter.num_attention_heads * drafter.head_dim
    # qkv reads embedding and state: the embeddings' half of a token is made once for all steps.
    qkv = sum(sizes[f"self_attn.{n}_proj.weight"] for n in "qkv") * (K + 1) / 2
    rest = (sizes["self_attn.o_proj.weight"] + sum(sizes[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))) * K
    head, fc = sizes["lm_head.weight"], sizes["fc.weight"]
    forward = 2 * (fc + qkv + rest + K * head) + 2 * head + 2 * K * length * q + K * (K - 1) * q
    return forward, 2 * fc + 4 * (qkv + rest + K * head) + 5 * K * length * q + 2 * K * (K - 1) * q


def _context(drafter: DrafterConfig) -> tuple[float, float]:
    """Of a row that lends keys and values only: forward, backward."""
    shapes = tensor_shapes(drafter)
    fc = math.prod(shapes["fc.weight"])
    kv = math.prod(shapes["midlayer.self_attn.k_proj.weight"]) + math.prod(shapes["midlayer.self_attn.v_proj.weight"])
    return 2 * fc + 2 * kv, 2 * fc + 4 * kv


def muon_flops(drafter: DrafterConfig) -> float:
    """Operations of an optimizer step whatever its tokens: Newton and Schulz on every matrix but lm_head."""
    return _NEWTON_SCHULZ * sum(_muon_matrices(drafter))


def _muon_matrices(drafter: DrafterConfig) -> list[float]:
    """Operations of one of Muon's iterations on each matrix that it moves, the largest first."""
    shapes = [s for n, s in tensor_shapes(drafter).items() if len(s) == 2 and n != "lm_head.weight"]
    return sorted((4.0 * min(s) ** 2 * max(s) + 2.0 * min(s) ** 3 for s in shapes), reverse=True)


@dataclass(frozen=True)
class Work:
    """GPU seconds of one step of one run: training, scoring what is trained on, scoring what is passed over."""

    train: float
    score: float
    passed_over: float
    drafter: DrafterConfig
    steps: float = 0.0  # of the optimizer
    muon: float = 0.0  # of `train`: what Muon takes, whose matrices ranks share out
    bring: float = 0.0  # of `score` and `passed_over`: files come from the object store, and the GPU waits
    _rates: dict[int, float] = field(init=False, default_factory=lambda: {1: 1.0}, repr=False, compare=False)

    @classmethod
    def of(cls, plan: Deployment, settings: Settings, tflops: float) -> Work:
        """At so many TFLOP/s that a GPU really does of training."""
        T, drafter = plan.sent_tokens, plan.drafter
        responses, documents = T * (1 - plan.prompt_share), max(1.0, T / plan.tokens)
        one = pass_flops(drafter, T, responses, documents, settings.depth)
        train = settings.train_passes * one
        steps = settings.train_passes * T / settings.train_step_tokens
        muon = steps * muon_flops(drafter) if settings.optimizer == "muon" else 0.0
        replay = score_flops(drafter, T, responses, documents, settings.depth)
        checked = min(responses, batches(plan) * _GAP_TOKENS)
        gap = 2.0 * drafter.vocab_size * drafter.hidden_size * checked
        rate = tflops * 1e12
        scoring = _SCORING * rate
        bring = bring_seconds(plan, settings)
        seconds = (train + muon) / rate, (SCORERS * replay + gap) / scoring + bring, (replay + gap) / scoring + bring
        return cls(*seconds, drafter, steps, muon / rate, bring)

    @cached_property
    def _muon_parts(self) -> list[float]:
        parts = _muon_matrices(self.drafter)
        return [part / sum(parts) * self.muon for part in parts]

    def rate(self, ranks: int) -> float:
        """How many times faster than one GPU so many ranks work on one run: what is exchanged, and done alone, stays.

        Where all that comes is trained on. One H200 was measured; several GPUs are arithmetic.
        """
        if ranks not in self._rates:
            weights = sum(math.prod(s) for s in tensor_shapes(self.drafter).values())
            moved = 4 * sum(math.prod(s) for n, s in tensor_shapes(self.drafter).items() if n != "lm_head.weight")
            exchanged = 2 * (ranks - 1) / ranks * 4 * weights + (moved if self.muon else 0)
            loads = [0.0] * ranks
            for part in self._muon_parts:  # the largest first, to the rank that has least: as the optimizer does
                loads[loads.index(min(loads))] += part
            alone = _ALONE * (self.score - self.bring) + self.bring
            shared = self.train - self.muon + self.score - alone
            seconds = shared / ranks + max(loads) + self.steps * exchanged / EXCHANGE_BYTES + alone
            self._rates[ranks] = (self.train + self.score) / seconds
        return self._rates[ranks]

    def speed(self, gpus: float, runs: int) -> float:
        """How many times faster than one GPU so many work on `runs` runs, each worker with its own.

        Up to as many GPUs as runs, each is a worker by itself, and loses nothing. Beyond that several train one
        drafter, as ranks.
        """
        if gpus <= runs:
            return gpus
        each, more = divmod(gpus, runs)
        return (runs - more) * self.rate(int(each)) + more * self.rate(int(each) + 1)

    def gpus(self, speed: float, runs: int) -> float:
        """The GPUs with which `runs` runs have that `speed`; `MOST_RANKS` of each where no number would do."""
        if speed <= runs:
            return speed
        found = (gpus for gpus in range(runs + 1, MOST_RANKS * runs + 1) if self.speed(gpus, runs) >= speed)
        return next(found, MOST_RANKS * runs)
