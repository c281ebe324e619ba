"""The policy of a SGLang with tensor parallelism: its head, gathered from slices, and scores from its logits.

The first rank has all rows of states, and SGLang joins the logits of all ranks on each. So the first rank alone
collects, and no rank waits for another in a step. Embedding and head are gathered to its host when the policy is
loaded, and the head again at the end of an update that has moved a slice. These are collectives on SGLang's host group:
all ranks make them in the same call of SGLang's, whatever else has failed in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.sglang.steps import places_of, sampling_of, with_scores
from rl_hooks.engines.tap.collected import RequestSampling
from rl_hooks.engines.tap.rows import Step
from rl_hooks.engines.tap.served import HEAD_TOLERANCE, ServedPolicy
from rl_hooks.sending.copies import to_device
from rl_hooks.sending.registration import HeadWatch, head_weight


class SplitPolicy:
    """The policy of one rank, and on the first the whole one. The constructor and `renew` are collectives."""

    def __init__(self, own: Callable[[], ServedPolicy], ranks: LayerRanks) -> None:
        self._own, self._ranks = own, ranks
        self._written = self._ever_written = False
        with ranks.together():
            policy = own()
            self._heads = HeadWatch(head_weight(policy), HEAD_TOLERANCE, 0)
        #: With all of both matrices, on the first rank's host; None on the others.
        self.whole = policy.whole(ranks)
        self._batch: Any = None  # of a prefill that runs
        self._first: tuple[Any, Tensor] | None = None  # that batch, and the logits of its wanted requests

    # --- collectives
    def announce(self) -> None:
        """Weights of the policy are about to be written: `renew` has something to do."""
        self._written = True

    def renew(self) -> None:
        """Weights have been written: gather the head again if any slice has moved; the first time, the embedding too.

        Those of the start may have been made up.
        """
        if not self._written:
            return
        first, self._written, self._ever_written = not self._ever_written, False, True
        with self._ranks.together():  # a rank that cannot read its slice must not leave the others waiting
            policy = self._own()
            weight = head_weight(policy)
            due = first or self._heads.is_due(weight, 0)
        if self._ranks.all_agree(ok=not due):
            return
        with self._ranks.together():
            self._heads.mark(weight)
        self.whole = policy.whole(self._ranks) if first else policy.with_head(self.whole, self._ranks)

    # --- steps of the first rank
    def prefills(self, batch: Any) -> None:
        """A prefill is about to run."""
        self._batch, self._first = batch, None

    def samples(self, output: Any, wanted: Container[str]) -> None:
        """SGLang is about to draw the first tokens: keep the logits, which it turns into probabilities in place."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        places = places_of(batch.reqs, wanted)
        if len(places):
            logits: Tensor = output.next_token_logits
            self._first = batch, logits.index_select(0, to_device(logits.device, places))

    def prefilled(self, step: Step, batch: Any) -> Step:
        """A prefill's step with its scores."""
        if self._first is None or self._first[0] is not batch:
            raise RuntimeError("SGLang drew first tokens without a call of ModelRunner.sample")
        logits_NV, self._first = self._first[1], None
        return with_scores(step, logits_NV, step.told[:, 1], _samplings(step, batch))

    @staticmethod
    def verified(step: Step, batch: Any, result: Any) -> Step:
        """A round's step with its scores."""
        logits: Tensor = result.logits_output.next_token_logits
        places = to_device(logits.device, places_of(batch.reqs, set(step.request_ids)))
        R, V = len(batch.reqs), logits.shape[-1]
        logits_NV = logits.view(R, -1, V).index_select(0, places).view(-1, V)
        labels_N = result.next_token_ids.view(R, -1).index_select(0, places).flatten().long()
        return with_scores(step, logits_NV, labels_N, _samplings(step, batch))


def _samplings(step: Step, batch: Any) -> list[RequestSampling]:
    by_name = {one.rid: one.sampling_params for one in batch.reqs}
    return [sampling_of(by_name[name]) for name in step.request_ids]
