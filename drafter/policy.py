"""The policy of one version, as far as a drafter is concerned: its embedding, and its lm_head.

Engines share the live embedding with the drafter (with an MTP module the lm_head as well), so drafts depend on them.
A batch of policy version v is unrolled, scored and trained with the `Policy` of version v.

Legend: T tokens, V target vocabulary, D draft vocabulary, H drafter hidden size, Ht target hidden size.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from drafter.batch import Fill, RolloutBatch, fill_alone
from drafter.errors import DrafterError, TargetHeadError
from drafter.vocabulary import DraftVocabulary
from rl_hooks.wire import LogitMap

#: A token's weight is at most 10: one log-probability that makes no sense must not outweigh all other tokens.
_MOST_LOG_WEIGHT = math.log(10.0)
#: Rows of the head, and tokens, that are multiplied at once: several ranks share such pieces out.
_HEAD_ROWS = 4096
_TOKENS_AT_ONCE = 1024
_GAP_TOKENS = 16_384
#: Of as many tokens the whole distribution is formed.
_WHOLE_TOKENS = 32
_LOGITS_AT_ONCE = 1 << 25
_PLAIN = LogitMap()
_UNFORESEEN = random.SystemRandom()


class TargetHead:
    """The policy's lm_head [V, Ht]. It may lie on any device."""

    def __init__(self, lm_head: Tensor, logit_map: LogitMap = _PLAIN) -> None:
        if lm_head.ndim != 2 or not lm_head.numel():
            raise TargetHeadError(f"lm_head must be [tokens, hidden] and not empty, got shape {tuple(lm_head.shape)}")
        largest = [part.abs().amax() for part in torch.split(lm_head, _HEAD_ROWS)]  # NaN, if any is
        if not bool(torch.isfinite(torch.stack(largest)).all()):
            raise TargetHeadError("lm_head holds NaN or infinity; keep the head that was used before")
        self.lm_head = lm_head.detach()
        self.logit_map = logit_map
        self._slices: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return self.lm_head.shape[1]

    def _places(self, tokens: Tensor) -> Tensor:
        """Row of each target token, int64 on the CPU; -1 where the head has none."""
        tokens = tokens.to("cpu", torch.int64)
        return torch.where((tokens >= 0) & (tokens < self.lm_head.shape[0]), tokens, -1)

    def rows(
        self, vocabulary: DraftVocabulary, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The draft vocabulary's rows [D, Ht], cached per vocabulary, device and dtype."""
        device = device or self.lm_head.device
        key = (vocabulary.digest, device, dtype)
        if key not in self._slices:
            places = self._places(vocabulary.ids)
            missing = int((places < 0).sum())
            if missing:
                raise TargetHeadError(
                    f"{missing} of {len(vocabulary)} draft tokens have no row in this head; send the whole lm_head"
                )
            self._slices[key] = self.lm_head[places.to(self.lm_head.device)].to(device=device, dtype=dtype)
        return self._slices[key]

    def token_logprobs(self, batch: RolloutBatch, rows: Tensor | None = None, fill: Fill = fill_alone) -> Tensor:
        """Recomputed log p of every token, f32[T]: f(W[x[t]].last_hidden[t-1]) / tau - logsumexp[t-1].

        nan where a token is the first of its rollout, the head has no row of it, the row of the state was not sent, or
        `rows` bool[T] is not true. Infinite where features overflow. Compare with `batch.logprobs`.
        """
        if batch.last_hidden.shape[1] != self.hidden_size:
            raise TargetHeadError(f"last_hidden is {batch.last_hidden.shape[1]} wide, the head {self.hidden_size}")
        places = self._places(batch.input_ids)
        places[batch.cu_seqlens[:-1]] = -1
        if not batch.every_last_row:
            places[~batch.loss_mask.cpu()] = -1
        wanted = places >= 0 if rows is None else (places >= 0) & rows.cpu()
        known = torch.nonzero(wanted).flatten()
        table = torch.zeros(batch.tokens)

        def compute(t: Tensor) -> None:
            weight = self.lm_head[places[t].to(self.lm_head.device)].to(batch.last_hidden.device, torch.float32)
            before = t.to(batch.last_hidden.device) - 1
            logits = self.logit_map.apply(torch.linalg.vecdot(weight, batch.last_rows(before).float()))
            found = logits / batch.divisor - batch.logsumexp[before].float()
            table[t] = torch.where(found.isfinite(), found, math.inf).cpu()  # not nan, which is nobody's fault

        out = fill(table, [partial(compute, t) for t in torch.split(known, _TOKENS_AT_ONCE)])
        return torch.where(wanted, out, math.nan).to(batch.last_hidden.device)

    @torch.no_grad()
    def normalise(self, batch: RolloutBatch, fill: Fill = fill_alone) -> RolloutBatch:
        """The batch with logsumexp in the rows that predict a response token, where its sender did not know it.

        This multiplies those rows by the whole head: once, before a batch is scored and kept.
        """
        if batch.normalised:
            return batch
        table = torch.zeros(batch.tokens)
        rows = torch.nonzero(batch.loss_mask).flatten() - 1
        step = max(1, _LOGITS_AT_ONCE // len(self.lm_head))

        def compute(part: Tensor) -> None:
            hidden = batch.last_rows(part).to(self.lm_head.device, self.lm_head.dtype)
            logits = self.logit_map.apply((hidden @ self.lm_head.T).float())
            table[part.cpu()] = (logits / batch.divisor).logsumexp(-1).cpu()

        found = fill(table, [partial(compute, part) for part in torch.split(rows, step)]).to(batch.logsumexp)
        rest = torch.ones_like(batch.loss_mask)
        rest[rows] = False
        found = found.masked_fill(rest, 1.0)  # any finite number: nobody reads it
        return replace(batch, logsumexp=found, normalised=True)

    def weighed(self, batch: RolloutBatch, fill: Fill = fill_alone) -> RolloutBatch:
        """The batch with the weights of its tokens: this policy's probability over the sampler's, at most 10.

        Older weights drew them, as in asynchronous RL; what these weights drew (`batch.older`) weighs 1. Where that law
        is not known (greedy or truncated sampling, or a head without the token's row) nothing is weighed.
        """
        if batch.warped or batch.temperature == 0:
            return batch
        weights = self.token_logprobs(batch, batch.loss_mask, fill) - batch.logprobs
        if batch.older is not None:
            weights = weights.masked_fill(~batch.older, 0.0)
        return replace(batch, log_weights=weights.nan_to_num(nan=0.0).clamp(max=_MOST_LOG_WEIGHT))

    def gaps_by_age(self, batch: RolloutBatch, fill: Fill = fill_alone) -> tuple[float | None, float | None]:
        """Mean |recomputed - logged| log p of what these weights drew, and of what older ones may have drawn, in nats.

        None where nobody tells which is which, of fewer than 32 tokens, and of greedy or truncated sampling.
        """
        if batch.older is None or batch.warped or batch.temperature == 0:
            return None, None
        off = (self.token_logprobs(batch, batch.loss_mask, fill) - batch.logprobs).abs().double()
        known = ~off.isnan()
        newest, older = off[known & ~batch.older], off[known & batch.older]
        return _mean_of_enough(newest), _mean_of_enough(older)

    def logprob_gap(
        self, batch: RolloutBatch, limit: float = 0.0, *, fill: Fill = fill_alone, seed: int | None = None
    ) -> tuple[float, int]:
        """Mean |recomputed - logged| log p in nats over the response tokens, and their number.

        One figure that catches a pre-norm state, a stale head, a wrong temperature and a shifted mask. Truncated
        sampling (`batch.warped`) raises log p by the probability that was cut off, and no more: what is above that on
        32 tokens is added. The sender's logsumexp is recomputed on those 32 as well, and the larger of the two gaps is
        returned. That reads the whole head in its own dtype. Where the gap is more than half of `limit`, it is read in
        float32 too, which takes ten times as long as bfloat16 on a CPU.
        Of long batches 16,384 tokens are compared. Which ones is drawn each time, and the 32 as well: a sender that
        knew them could be honest there alone. (nan, 0) when no token could be. `seed`: what they are drawn by, where
        several processes draw the same.
        """
        rng = random.Random(unforeseen_seed() if seed is None else seed)  # noqa: S311 - nobody sees what it draws
        rows = torch.zeros_like(batch.loss_mask)
        said = torch.nonzero(batch.loss_mask).flatten()
        rows[said if said.numel() <= _GAP_TOKENS else said[_drawn(said.numel(), _GAP_TOKENS, rng)]] = True
        recomputed = self.token_logprobs(batch, rows, fill)
        compared = rows & ~recomputed.isnan()
        tokens = int(compared.sum())
        if not tokens:
            return float("nan"), 0
        gap = (recomputed[compared] - batch.logprobs[compared].float()).double()
        found = float((gap.clamp(min=0) if batch.warped else gap.abs()).mean())
        some = torch.nonzero(compared).flatten()
        some = some[_drawn(tokens, min(tokens, _WHOLE_TOKENS), rng)]
        logits = self._logits(batch, some, self.lm_head.dtype, fill)
        if not _off(logits, batch, some) <= limit / 2:
            logits = self._logits(batch, some, torch.float32, fill)
        if batch.warped:
            most = recomputed[some] - _kept_mass(logits, batch).log().to(recomputed.device)
            found += float((batch.logprobs[some].float() - most).double().clamp(min=0).mean())
        return max(found, _off(logits, batch, some)), tokens

    def _logits(self, batch: RolloutBatch, t: Tensor, dtype: torch.dtype, fill: Fill) -> Tensor:
        """Tempered logits f32[n, V] of what tokens t int64[n] were drawn from; the product is in `dtype`.

        Where nothing was cut off, [n, parts of the head]: the logsumexp of each part, which is all that is needed then.
        """
        hidden = batch.last_rows(t - 1).to(self.lm_head.device, dtype)
        parts = torch.split(self.lm_head, _HEAD_ROWS)
        table = torch.zeros(len(t), len(self.lm_head) if batch.warped else len(parts))

        def compute(number: int, part: Tensor) -> None:
            logits = self.logit_map.apply((hidden @ part.to(dtype).T).float()) / batch.divisor
            if batch.warped:
                table[:, number * _HEAD_ROWS : number * _HEAD_ROWS + len(part)] = logits.cpu()
            else:
                table[:, number] = logits.logsumexp(-1).cpu()

        return fill(table, [partial(compute, number, part) for number, part in enumerate(parts)])


def _mean_of_enough(off: Tensor) -> float | None:
    """Mean, each token's part bounded as its weight is: one infinite row is not all. None of fewer than 32 tokens."""
    return float(off.clamp(max=_MOST_LOG_WEIGHT).mean()) if off.numel() >= _WHOLE_TOKENS else None


def _off(logits: Tensor, batch: RolloutBatch, t: Tensor) -> float:
    """Mean |logsumexp of logits [n, ...] - the sender's for tokens t int64[n]|; infinite where one is not finite."""
    off = (logits.logsumexp(-1) - batch.logsumexp[t - 1].to(logits)).abs().double()
    return float(torch.where(off.isfinite(), off, math.inf).mean())


def _kept_mass(logits: Tensor, batch: RolloutBatch) -> Tensor:
    """Probability [n] that top-k, then top-p, leave of softmax(logits [n, V])."""
    p = logits.softmax(-1)
    kept = p.topk(min(batch.top_k or p.shape[1], p.shape[1])).values  # [n, k], the largest first
    total = kept.cumsum(-1)
    last = (total < batch.top_p * total[:, -1:]).sum(-1, keepdim=True).clamp(max=kept.shape[1] - 1)
    left: Tensor = total.gather(1, last)[:, 0]
    return left


def unforeseen_seed() -> int:
    """A seed that nobody can foresee."""
    return _UNFORESEEN.getrandbits(64)


def _drawn(numbers: int, wanted: int, rng: random.Random) -> list[int]:
    """One of each of `wanted` equal parts of the first `numbers` numbers."""
    edges = [part * numbers // wanted for part in range(wanted + 1)]
    return [rng.randrange(low, high) for low, high in pairwise(edges)]


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """What drafters need of the policy of one version. Immutable: a policy that moved is another `Policy`."""

    version: int
    embed_tokens: Tensor  # [V, H], on the drafter's device
    head: TargetHead | None = None  # None: enough to replay a drafter that has a head of its own

    def needed_head(self) -> TargetHead:
        """The head. Raises `TargetHeadError` where there is none."""
        if self.head is None:
            raise TargetHeadError(f"the lm_head of policy version {self.version} is needed; send it")
        return self.head

    def embedding(self, vocab_size: int, hidden_size: int) -> Tensor:
        """embed_tokens. Raises `DrafterError` unless it is [vocab_size, hidden_size]."""
        if tuple(self.embed_tokens.shape) != (vocab_size, hidden_size):
            found = tuple(self.embed_tokens.shape)
            raise DrafterError(f"embed_tokens must be {(vocab_size, hidden_size)}, got {found}")
        return self.embed_tokens
