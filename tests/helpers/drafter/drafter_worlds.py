"""Small random worlds for the drafter's tests: documents, a target head, a drafter, in float64 unless said."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from helpers.drafter.drafter_reference import reference_steps
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.training.loss import DraftLoss, draft_loss
from drafter.training.target import draft_target
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary

HIDDEN, VOCAB = 12, 17
AUX = (1, 2, 3)


def config(draft: int = 9, hidden: int = HIDDEN, vocab: int = VOCAB) -> DrafterConfig:
    return DrafterConfig(hidden, hidden, 20, 4, 2, 6, vocab, draft, AUX)


def mask_of(length: int, prompt: int, holes: tuple[int, ...] = ()) -> Tensor:
    """Response from `prompt` to the end, but for `holes` (tool output)."""
    mask = torch.arange(length) >= prompt
    mask[list(holes)] = False
    return mask


#: One document all of whose tokens but the first are response, one at 50 %, and a packed mix of every awkward case:
#: a response at once, holes, a two-token document, a one-token response, nothing supervisable, a long prompt.
SHAPES: dict[str, tuple[Tensor, ...]] = {
    "one document, full response": (mask_of(14, 1),),
    "one document, half response": (mask_of(16, 8),),
    "packed, full response": (mask_of(9, 1), mask_of(5, 1), mask_of(12, 1)),
    "packed, half response": (mask_of(12, 6), mask_of(7, 4), mask_of(10, 5)),
    "packed, awkward": (
        mask_of(9, 3),
        mask_of(5, 1, holes=(3,)),
        mask_of(2, 1),
        mask_of(3, 2),
        mask_of(4, 3),
        mask_of(15, 2, holes=(4, 5, 6, 7, 14)),
        mask_of(18, 12),
    ),
}


@dataclass
class World:
    """A drafter, the target's head, and rollouts, whose probabilities are the target's own."""

    drafter: Eagle3Drafter
    embed_tokens: Tensor
    head: Tensor
    batch: RolloutBatch

    @property
    def policy(self) -> Policy:
        return Policy(self.batch.policy_version, self.embed_tokens, TargetHead(self.head))

    @property
    def documents(self) -> list[RolloutBatch]:
        return [self.batch.select([i]) for i in range(self.batch.rollouts)]


def rollouts(masks: tuple[Tensor, ...], head: Tensor, temperature: float, seed: int) -> RolloutBatch:
    """Random tokens and features, with the logsumexp and log-probabilities that follow from them."""
    g = torch.Generator().manual_seed(seed)
    T, (V, H) = sum(m.numel() for m in masks), head.shape
    last = torch.randn(T, H, generator=g, dtype=head.dtype)
    logits = last @ head.T / temperature
    ids = torch.randint(V, (T,), generator=g)
    logprobs = torch.zeros(T, dtype=head.dtype)
    logprobs[1:] = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
    return RolloutBatch(
        input_ids=ids,
        cu_seqlens=torch.tensor([0] + [m.numel() for m in masks]).cumsum(0),
        loss_mask=torch.cat(masks),
        aux_hidden=torch.randn(T, len(AUX) * H, generator=g, dtype=head.dtype),
        logprobs=logprobs,
        last_hidden=last,
        logsumexp=logits.logsumexp(-1),
        temperature=temperature,
        rollout_ids=tuple(f"r{i}" for i in range(len(masks))),
        rewards=tuple(float(i) for i in range(len(masks))),
    )


def world(
    masks: tuple[Tensor, ...],
    *,
    draft: int = 9,
    temperature: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> World:
    """Weights large enough that every term of the formulas matters."""
    g = torch.Generator().manual_seed(1000 + seed)
    kept = torch.randperm(VOCAB, generator=g)[:draft].sort().values
    embed_tokens = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    drafter = Eagle3Drafter(config(draft), DraftVocabulary(kept, VOCAB)).to(torch.float64)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        parameter.data = 0.3 * noise if parameter.ndim == 2 else 1 + 0.3 * noise
    head = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64) * 0.7
    batch = rollouts(masks, head, temperature, seed)
    return World(drafter.to(dtype), embed_tokens.to(dtype), head.to(dtype), cast(batch, dtype))


def cast(batch: RolloutBatch, dtype: torch.dtype) -> RolloutBatch:
    return replace(batch.to("cpu", dtype), logsumexp=batch.logsumexp.to(dtype), logprobs=batch.logprobs.to(dtype))


def ours(w: World, steps: int, *, decay: float = 0.8, denominator: float = 7.0, chunk: int = 1 << 22) -> DraftLoss:
    """The production path: plan, unroll, fused loss."""
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, steps)
    unrolled = w.drafter.unroll(plan, w.batch, w.policy)
    target = draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), w.head.dtype)
    return draft_loss(w.drafter, unrolled, target, denominator=denominator, step_decay=decay, chunk_elements=chunk)


def gradients(w: World, loss: Tensor) -> dict[str, Tensor]:
    named = dict(w.drafter.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@dataclass
class Expected:
    """What the reference says: sums per step, the weighted loss's gradients, and entries per step."""

    kl: list[float]
    acceptance: list[float]
    entries: list[int]
    gradients: dict[str, Tensor]


def expected(w: World, steps: int, *, decay: float = 0.8, denominator: float = 7.0) -> Expected:
    """The reference, in float64 whatever the world's dtype."""
    weights = {n: p.detach().double().requires_grad_() for n, p in w.drafter.named_parameters()}
    documents = [cast(d, torch.float64) for d in w.documents]
    results = reference_steps(
        weights,
        w.drafter.config,
        w.embed_tokens.double(),
        w.drafter.vocabulary.ids.tolist(),
        documents,
        steps,
        w.head.double(),
        w.batch.temperature,
    )
    loss = torch.stack([decay**j * r.kl for j, r in enumerate(results)]).sum() / denominator
    grads = torch.autograd.grad(loss, list(weights.values()))
    return Expected(
        [float(r.kl.detach()) for r in results],
        [r.acceptance for r in results],
        [len(r.rows) for r in results],
        dict(zip(weights, grads, strict=True)),
    )


def deviation(got: DraftLoss, grads: dict[str, Tensor], want: Expected) -> float:
    """Largest relative error: per-step sums, and every parameter's gradient against that gradient's largest entry."""
    worst = 0.0
    for sums, reference in ((got.kl_sums, want.kl), (got.acceptance_sums, want.acceptance)):
        worst = max([worst, *(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(sums.tolist(), reference, strict=True))])
    for name, gradient in grads.items():
        scale = want.gradients[name].abs().max()
        worst = max(worst, float((gradient.double() - want.gradients[name]).abs().max() / scale))
    return worst
