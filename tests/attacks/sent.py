"""Hostile heads, drafters and reports of engines that the API takes: worker, readers and gate have to live with them.

Each table maps what is wrong to what is sent: `HEADS` and `DRAFTERS` to a change of a sound one's tensors, `REPORTS` to
fields of a POST /acceptance. What the API refuses, in these or other forms, is in the tests of the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

Change = Callable[[dict[str, Tensor]], None]
MOST: Final = (1 << 53) - 1  # what JSON's numbers hold, and so the most that a count may be


def _head(change: Callable[[Tensor], Tensor]) -> Change:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head"] = change(tensors["lm_head"].clone())

    return spoil


def _one_row(value: float) -> Change:
    def spoil(head: Tensor) -> Tensor:
        head[0] = value
        return head

    return _head(spoil)


def _rows(count: int, value: float) -> Change:
    """Rows of a few tokens only."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head"] = torch.full_like(tensors["lm_head"][:count], value)
        tensors["ids"] = torch.arange(count, dtype=torch.int32)

    return spoil


HEADS: Final[dict[str, Change]] = {
    "one token's row is huge": _one_row(3e38),
    "one token's row is zero": _one_row(0.0),
    "one token's row is as small as can be": _one_row(1e-45),
    "a thousand times the head": _head(lambda head: head * 1000),
    "next to nothing of the head": _head(lambda head: head * 1e-30),
    "the head turned round": _head(lambda head: -head),
    "all rows alike": _head(lambda head: head[:1].expand_as(head).contiguous()),
    "rows of other tokens": _head(lambda head: head.roll(1, 0)),
    "one row, huge": _rows(1, 3e38),
    "three rows of zero": _rows(3, 0.0),
    "every row but as rows, huge": _rows(40, 1e38),
}


def _all(value: float, part: str = "") -> Change:
    """Every floating-point weight whose name holds `part`."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and part in name:
                tensors[name] = torch.full_like(tensor, value)

    return spoil


DRAFTERS: Final[dict[str, Change]] = {
    "of zeros": _all(0.0),
    "of the largest numbers": _all(3e38),
    "of the smallest numbers": _all(1e-45),
    "whose norms are huge": _all(3e38, "norm"),
    "whose head is huge": _all(3e38, "lm_head"),
    "whose head is infinite once it is multiplied": _all(-1e38, "lm_head"),
    "whose input layer is huge": _all(3e38, "fc."),
}

NO_ROUND: Final[Mapping[str, Any]] = {"rounds": 0, "accepted_tokens": 0, "drafted_tokens": 0}
REPORTS: Final[dict[str, Mapping[str, Any]]] = {
    "the largest counts": {"rounds": MOST, "accepted_tokens": MOST, "drafted_tokens": MOST},
    "no round": NO_ROUND,
    "no round but positions": {**NO_ROUND, "accepted_per_position": [MOST] * 64},
    "no round but prompts": {**NO_ROUND, "by_prompt": {"0" * 8: (MOST, MOST)}},
    "no round but emitted tokens": {**NO_ROUND, "emitted_tokens": MOST},
    "no round but drafts": {**NO_ROUND, "drafted_tokens": MOST, "depth": 64},
    "no round in an endless window": {**NO_ROUND, "window_seconds": 1.7e308, "final": True},
    "no round of another reporter": {**NO_ROUND, "reporter": "idle", "life": "first", "policy_version": None},
    "fewer than before": {"rounds": 1, "accepted_tokens": 0, "drafted_tokens": 1},
    "64 positions of the largest counts": {"accepted_per_position": [MOST] * 64},
    "positions that rise": {"accepted_per_position": list(range(0, 400, 100))},
    "more at a position than rounds": {"accepted_per_position": [10**9]},
    "another version's name": {"drafter_version": "v999999-00000000"},
    "a version that looks like markup": {"drafter_version": '"} 1 <script>{{ . }}\\'},
    "a reporter that looks like markup": {"reporter": '"} 1 <script>{{ . }}\\'},
    "a reporter of a thousand bytes": {"reporter": "\U0001f9ea" * 200},
    "an engine that is no address": {"engine": "file:///etc/passwd"},
    "another method": {"method": '"} 1 {{ . }}'},
    "the newest policy of all": {"policy_version": MOST},
    "an endless window": {"window_seconds": 1.7e308},
    "a depth of nothing": {"depth": -(10**18)},
    "another way to draft": {"drafting": "\x00" * 100},
    "the slowest steps": {"step_times": [{"batch": 1, "depth": d, "steps": 10**9, "seconds": 1e12} for d in range(64)]},
    "the fastest steps": {"step_times": [{"batch": 65536, "depth": 64, "steps": MOST, "seconds": 1e12}]},
    "the same step twice": {"step_times": [{"batch": 1, "depth": 4, "steps": n, "seconds": n} for n in (1, 10**6)]},
    "a reason that looks like markup": {"withheld": '"} 1 <script>{{ . }}\\'},
    "a reason of controls": {"withheld": "\x00" * 400},
    "a life that looks like markup": {"life": '"} 1 <script>{{ . }}\\'},
    "a life of controls": {"life": "\x00" * 100},
    "another life at each report": {"life": "\U0001f9ea" * 200},
    "no steps": {"step_times": [{"batch": 1, "depth": 4, "steps": 0, "seconds": 0}]},
    "one step without drafts": {"step_times": [{"batch": 1, "depth": 0, "steps": 1, "seconds": 1000}]},
}  # fmt: skip


def report(run: str, version: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Body of POST /acceptance: a sound one, but for these fields."""
    sound = {"run": run, "reporter": "e", "drafter_version": version, "method": "drafter", "policy_version": 0}
    counts = {"rounds": 4000, "accepted_tokens": 4000, "drafted_tokens": 16000, "window_seconds": 5.0}
    return sound | counts | dict(fields)


def reports_by_prompt(prompts: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Fields of reports whose counts by prompt or of requests are hostile. `prompts`: tokens and rounds by replay."""
    rounds = {prompt: 1000 * max(1, round(r)) for prompt, (_, r) in prompts.items()}
    total = sum(rounds.values())

    def fields(by_prompt: object, accepted: int = 2 * total) -> dict[str, Any]:
        counts = {"rounds": total, "accepted_tokens": accepted, "drafted_tokens": 4 * total}
        return counts | {"emitted_tokens": total + accepted, "by_prompt": by_prompt}

    first, *others = rounds
    huge = {p: [MOST, MOST] for p in rounds}
    return {
        "no prompt accepts anything": fields({p: [r, r] for p, r in rounds.items()}, 0),
        "no prompt accepts anything, though rounds do": fields({p: [r, r] for p, r in rounds.items()}),
        "prompts accept more than was drafted": fields({p: [64 * r, r] for p, r in rounds.items()}, 4 * total),
        "one prompt has all tokens": fields({first: [3 * total, rounds[first]], **{p: [0, rounds[p]] for p in others}}),
        "one prompt has all rounds": fields({first: [3 * total, total]}),
        "tokens without a round": fields({p: [10**9, 0] for p in rounds}),
        "rounds without a token": fields({p: [0, r] for p, r in rounds.items()}),
        "the largest counts": fields(huge),
        "the largest counts, and sums as large": fields(huge, 0) | {"rounds": MOST, "drafted_tokens": MOST},
        "prompts that nobody has": fields({f"{n:08x}": [3, 1] for n in range(64)}),
        "half of them unlike the others": fields(
            {p: [r * (5 if n % 2 else 1), r] for n, (p, r) in enumerate(rounds.items())}
        ),
        "fewer than before": fields({p: [1, 1] for p in rounds}, 2),
        "none at all": fields({}),
        "of a policy that is to come": fields({p: [r, r] for p, r in rounds.items()}) | {"policy_version": MOST},
        "of another version": fields({p: [r, r] for p, r in rounds.items()}) | {"drafter_version": "v999999-00000000"},
        "nothing accepted of most requests": fields({}, 0) | {"finished_requests": MOST, "running_requests": MOST},
        "fewer requests than before": fields({}, 0) | {"finished_requests": 0, "running_requests": 0},
        "too many prompts": fields({f"{n:08x}": [3, 1] for n in range(65)}),
        "negative": fields({first: [-(10**6), 10]}),
        "fractions": fields({first: [1.5, 1]}),
        "three numbers": fields({first: [3, 1, 1]}),
        "beyond 53 bits": fields({first: [1 << 53, 1]}),
        "no digits": fields({"__proto__": [3, 1]}),
        "markup": fields({'"} 1 ': [3, 1]}),
        "a list": fields([[first, 3, 1]]),
        "nested": fields({first: {"tokens": 3, "rounds": 1}}),
        "requests below none": fields({}, 0) | {"finished_requests": -1, "running_requests": -1},
        "requests beyond 53 bits": fields({}, 0) | {"finished_requests": 1 << 53},
        "a part of a request": fields({}, 0) | {"running_requests": 0.5},
        "words for requests": fields({}, 0) | {"finished_requests": "many", "running_requests": [1]},
    }
