"""What prompt-lookup drafting would have had: the baseline that costs no drafter at all.

The draft is whatever followed an earlier occurrence of the last few tokens of prompt and response. It depends on the
text alone, so its rounds along a finished rollout are not a matter of chance: walk the text and count them. The
counting convention is `drafter.replay.acceptance`'s, so the figures stand beside replay α. Pure NumPy and dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay, find_segments

Occurrence = Literal["latest", "earliest"]


class NgramIndex:
    """Where each run of `min_n`..`max_n` tokens was last (or first) seen. Grows with the text; no scan is repeated."""

    def __init__(self, max_n: int, min_n: int, occurrence: Occurrence = "latest") -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._latest = occurrence == "latest"
        self._following: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def propose(self, tokens: Sequence[int], length: int, depth: int) -> Sequence[int]:
        """Draft up to `depth` tokens to follow tokens[:length]; empty where nothing matches.

        `length` must not fall from one call to the next.
        """
        # A run that ends at the last token has nothing after it yet, so the index stops one short of the text.
        for end in range(self._seen + 1, length):
            for size in self._sizes:
                if size <= end:
                    key = tuple(tokens[end - size : end])
                    if self._latest:
                        self._following[key] = end
                    else:
                        self._following.setdefault(key, end)
        self._seen = max(self._seen, length - 1)
        for size in self._sizes:
            if size <= length:
                start = self._following.get(tuple(tokens[length - size : length]))
                if start is not None:
                    return tokens[start : min(start + depth, length)]
        return ()


def ngram_replay(
    input_ids: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    *,
    depth: int,
    max_n: int = 3,
    min_n: int = 1,
    occurrence: Occurrence = "latest",
) -> Replay:
    """Count the rounds that prompt-lookup drafting needs for each rollout, prompt included in the search.

    `input_ids` [T], `loss_mask` [T]: true where the policy generated the token, `cu_seqlens` [R+1].
    The longest match wins, from `max_n` down to `min_n` tokens, and among equals the most recent one; vLLM takes the
    first one in the text (`occurrence="earliest"`). A round without a proposal emits one token.
    """
    if depth < 0 or not 1 <= min_n <= max_n:
        raise ValueError(f"expected depth >= 0 and 1 <= min_n <= max_n, got {depth=}, {min_n=}, {max_n=}")
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    segments = find_segments(np.asarray(loss_mask, dtype=bool), bounds)
    ids = np.asarray(input_ids)
    R = segments.rollouts
    tokens, rounds = np.zeros(R), np.zeros(R)
    accepted, reached = np.zeros((R, depth)), np.zeros((R, depth))
    np.add.at(tokens, segments.rollout, segments.tokens)
    current, text, index = -1, [0], NgramIndex(max_n, min_n, occurrence)
    for first, count, rollout, document in zip(
        segments.first.tolist(),
        segments.tokens.tolist(),
        segments.rollout.tolist(),
        segments.document.tolist(),
        strict=True,
    ):
        if rollout != current:
            current, index = rollout, NgramIndex(max_n, min_n, occurrence)
            text = ids[document : int(bounds[rollout + 1])].tolist()
        begin = first - document + 1
        end = begin + count
        while begin < end:
            draft = index.propose(text, begin, min(depth, end - begin))
            hits = _common_prefix(draft, text, begin)
            rounds[rollout] += 1
            reached[rollout, : min(hits + 1, len(draft))] += 1
            accepted[rollout, :hits] += 1
            begin += hits + 1
    return Replay(tokens, rounds, accepted, reached)


def _common_prefix(draft: Sequence[int], text: Sequence[int], begin: int) -> int:
    for hits, token in enumerate(draft):
        if token != text[begin + hits]:
            return hits
    return len(draft)
