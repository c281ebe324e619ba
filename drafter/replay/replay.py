"""Replay a drafter on logged rollouts: the unroll on the true path, then the recursion of `drafter.replay.acceptance`.

Given the token x that was emitted, draft step j of a round that began at row t was accepted with probability

    probabilistic drafts    min(1, q[t,j](x) / p(x))        p(x) from the log-probability that the trainer logged
    greedy drafts           1 if x = argmax q[t,j] else 0   also whenever the target was greedy (temperature 0)

Of asynchronous rollouts older weights drew x than the features are of: with s, the law that x was drawn from, that
probability is multiplied by the weight p(x) / s(x) (`TargetHead.weighed`), so that its mean is that of the features'
policy, for which engines draft now: Σ_x s(x)·min(1, q(x) / p(x))·p(x) / s(x) = Σ_x min(p(x), q(x)). Both together are
min(p(x), q(x)) / s(x), which needs no p where p = s. Without weights a drafter that fits the older policy looks better.

The true path is exactly the path that accepted drafts have, so the training unroll gives every q that live decoding
would have computed. Tokens outside the draft vocabulary have q = 0. Valid for chains; `logprobs` must be of the
distribution that tokens were drawn from (temperature, top-p and top-k applied). The drafter's logits
are divided by the same temperature, as engines divide them, and as the loss does.

Legend: T tokens, R rollouts, N tokens emitted by rounds, K depth, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.device import working_dtype
from drafter.errors import BatchRejected, DrafterError
from drafter.model.draft_model import DraftModel
from drafter.model.matmul import times_wide
from drafter.model.pointwise import rms_norm
from drafter.policy import Policy
from drafter.replay.acceptance import Ints, Replay, Segments, find_segments, replay_rounds
from drafter.unroll.unrolled import Unrolled

Drafting = Literal["probabilistic", "greedy"]
Judge = Callable[[Unrolled, RolloutBatch, Tensor, Tensor], Tensor]

#: Tokens whose features are on the device at once.
TOKENS_AT_ONCE = 65_536
#: Logits held at once, in elements: 128 MiB of float32, on a CPU 16 MiB, whose pages are not new to each chunk.
_LOGITS_ELEMENTS = 1 << 25
_LOGITS_ELEMENTS_ON_CPU = 1 << 22


def replay(
    drafter: DraftModel,
    batch: RolloutBatch,
    policy: Policy,
    *,
    depth: int,
    drafting: Drafting = "probabilistic",
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> Replay:
    """Expected rounds that `drafter`, drafting `depth` tokens, would have needed for each rollout of `batch`.

    `policy` wrote the rollouts: the drafter uses its embedding, and an MTP module its head. Runs on the drafter's
    device in its own precision, without gradients, on groups of whole rollouts of about `tokens_at_once` tokens.
    Raises `BatchRejected` where the features or log-probabilities give no probability.
    """
    if depth < 1 or drafting not in ("probabilistic", "greedy"):
        raise DrafterError(f"expected depth >= 1 and a drafting mode, got {depth=} and {drafting=}")
    greedy = drafting == "greedy" or batch.temperature == 0
    parts = [_replay_group(drafter, group, policy, depth, greedy=greedy) for group in batch.groups(tokens_at_once)]
    return Replay.concat(parts)


@torch.no_grad()
def along_the_text(
    drafter: DraftModel, batch: RolloutBatch, policy: Policy, segments: Segments, depth: int, judge: Judge
) -> Tensor:
    """What `judge` says of each draft that rounds make along the text: [N, K], of draft j of a round begun at each.

    `judge(unrolled, batch, pre, emitted)`: of hidden states pre [n, H] and the rows [n] of the tokens emitted there.
    Zero where a round has no features to draft from (a response that begins at the first token of its document).
    """
    device = next(drafter.parameters()).device
    plan, batch = drafter.plan(batch, depth).to(device), batch.to(device)
    unrolled = drafter.unroll(plan, batch, policy, dtype=working_dtype(device))
    first_draft = torch.from_numpy(segments.rows()).to(device)  # [N] row of the token that a round drafts first
    place = torch.full((batch.tokens,), -1, device=device)
    place[first_draft] = torch.arange(first_draft.numel(), device=device)
    result = torch.zeros(first_draft.numel(), depth, device=device)
    for step in range(depth):
        rows = unrolled.rows[step]
        # A round drafts x[row + 2] first; rows whose x[row + 2] came from a prompt or a prefill begin none.
        begins = place[rows + 2] >= 0
        rows, pre = rows[begins], unrolled.pre[step][begins]
        result[place[rows + 2], step] = judge(unrolled, batch, pre, rows + 2 + step)
    return result


def conditional_acceptance(
    drafter: DraftModel, batch: RolloutBatch, policy: Policy, segments: Segments, *, depth: int, greedy: bool
) -> Tensor:
    """Probability [N, K] that draft j of a round begun at each emitted token was accepted, given the emitted text."""
    to_draft = drafter.vocabulary.to_draft.to(next(drafter.parameters()).device)

    def accepted(unrolled: Unrolled, batch: RolloutBatch, pre: Tensor, emitted: Tensor) -> Tensor:
        draft_id, log_p = to_draft[batch.input_ids[emitted]], batch.logprobs[emitted]
        log_weight = torch.zeros_like(log_p) if batch.log_weights is None else batch.log_weights[emitted]
        return _acceptance(drafter, unrolled, pre, draft_id, log_p, log_weight, greedy, batch.divisor)

    return along_the_text(drafter, batch, policy, segments, depth, accepted)


def numbered(prompts: Sequence[str]) -> Ints:
    """The number of each prompt, int64[R], in the order in which they come first."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)


def _replay_group(drafter: DraftModel, batch: RolloutBatch, policy: Policy, depth: int, *, greedy: bool) -> Replay:
    segments = find_segments(batch.loss_mask.cpu().numpy(), batch.cu_seqlens.numpy())
    acceptance = conditional_acceptance(drafter, batch, policy, segments, depth=depth, greedy=greedy)
    if not bool(torch.isfinite(acceptance).all()):
        raise BatchRejected("replay gives NaN: features or log-probabilities of this batch, or the drafter, are broken")
    return replay_rounds(acceptance.cpu().numpy(), segments, weighted=batch.log_weights is not None)


def _acceptance(
    drafter: DraftModel,
    unrolled: Unrolled,
    pre: Tensor,
    draft_id: Tensor,
    log_p: Tensor,
    log_weight: Tensor,
    greedy: bool,
    divisor: float,
) -> Tensor:
    """Conditional acceptance [n] of the emitted tokens, from `pre` [n, H]; draft_id is -1 outside the vocabulary.

    `log_p` and `log_weight`: of the sampler, and of the policy over the sampler.
    """
    weights = unrolled.weights
    elements = _LOGITS_ELEMENTS if pre.is_cuda else _LOGITS_ELEMENTS_ON_CPU
    chunk = max(1, elements // weights.lm_head.shape[0])
    parts = [log_p.new_zeros(0)]
    for begin in range(0, pre.shape[0], chunk):
        part = slice(begin, begin + chunk)
        normed = rms_norm(pre[part], weights.norm, drafter.config.rms_norm_eps)
        logits = times_wide(normed, weights.lm_head).float().div_(divisor)
        known = draft_id[part] >= 0
        if greedy:
            # A NaN must not pass for a wrong guess.
            right = (logits.argmax(dim=1) == draft_id[part]).float() + 0.0 * logits.amax(dim=1)
            right *= log_weight[part].exp()
        else:
            log_q = logits.gather(1, draft_id[part].clamp(min=0)[:, None])[:, 0] - logits.logsumexp(dim=1)
            right = torch.minimum(log_q - log_p[part], log_weight[part]).exp()
        parts.append(torch.where(known, right, torch.zeros_like(right)))
    return torch.cat(parts)
