"""What the plugins take of the engine's own thread in one step, by the number of requests in it.

    python -m benchmarks.engine_step    # half a minute; needs no engine

No engine runs: a stand-in for vLLM's scheduler tells the round counter what vLLM tells, and the tap reads a step of
random states, as vLLM's V1 runner or a round of SGLang's has them. Every request has four drafts and takes 100 steps
(some 300 tokens at α 3), and another takes its place. So the figures are Python and the launches of small torch
operations, which a GPU's host has as well; the product with lm_head and the copies, which a device does, hardly count.

* `counter`: `RoundCounter`, over the same stand-in without it;
* `tap, P %`, and `SGLang's`: reading the step, and taking and scoring the rows of that share of the requests, one at
  least. 0 %: a trainer's hook sends the features.

Milliseconds of processor time of that thread a step: the median of five means of 32 steps, because the tap scores every
sixteenth.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rl_hooks.engines.policy_watch import WeightSample
from rl_hooks.engines.sglang.steps import round_step
from rl_hooks.engines.tap.collected import Collected, Request, RequestSampling
from rl_hooks.engines.tap.feature_tap import FeatureTap
from rl_hooks.engines.tap.rows import Head, Step
from rl_hooks.engines.vllm.rounds import RoundCounter
from rl_hooks.engines.vllm.steps import V1_ARGUMENTS, step_v1

DEPTH: Final = 4
HIDDEN: Final = 64
STEPS: Final = 32
BLOCKS: Final = 5
LIFE_STEPS: Final = 100
REQUESTS: Final = (24, 256, 1024)
SHARES: Final = (0.0, 0.05, 1.0)


class Scheduler:
    """Calls what vLLM's scheduler calls for a step of these requests."""

    def __init__(self, names: list[str], accepted: list[int]) -> None:
        self.requests = {n: SimpleNamespace(prompt_token_ids=[i // 8] * 50) for i, n in enumerate(names)}
        self._accepted = accepted

    def make_spec_decoding_stats(  # vLLM's own parameters, by which the counter knows it
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,  # noqa: ARG002
        num_accepted_tokens: int,  # noqa: ARG002
        num_invalid_spec_tokens: dict[str, int] | None,  # noqa: ARG002
        request_id: str,  # noqa: ARG002
    ) -> Any:
        """Nothing."""
        return spec_decoding_stats

    def schedule(self) -> Any:
        """Every request, with all its drafts."""
        return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(self.requests, DEPTH + 1))

    def update_from_output(self, scheduler_output: Any) -> dict[int, Any]:  # noqa: ARG002
        """Tell of each request's round."""
        outputs = []
        for name, accepted in zip(self.requests, self._accepted, strict=True):
            self.make_spec_decoding_stats(None, DEPTH, accepted, None, name)
            outputs.append(SimpleNamespace(request_id=name, new_token_ids=[1] * (accepted + 1)))
        return {0: SimpleNamespace(outputs=outputs)}


def milliseconds(act: Callable[[], object]) -> float:
    """Processor time of this thread in one call; the first ones are left out."""
    found = []
    for number in range(BLOCKS + 1):
        calls = STEPS if number else 5
        began = time.thread_time()
        for _ in range(calls):
            act()
        found.append(1000 * (time.thread_time() - began) / calls)
    return statistics.median(found[1:])


def counter_milliseconds(names: list[str], accepted: list[int]) -> float:
    """What counting adds to a step."""
    plain, counted = Scheduler(names, accepted), Scheduler(names, accepted)
    RoundCounter(counted).serve("v1", 1)
    alone, both = (milliseconds(functools.partial(_update, scheduler)) for scheduler in (plain, counted))
    return both - alone


def _update(scheduler: Scheduler) -> None:
    scheduler.update_from_output(scheduler.schedule())


def vllm_step(names: list[str], accepted: list[int]) -> Callable[[Collection[str]], Step | None]:
    """Reads a step of the V1 runner with all of these requests."""
    rows = len(names) * (DEPTH + 1)
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_id_to_index={name: place for place, name in enumerate(names)}),
        query_start_loc=SimpleNamespace(np=np.arange(len(names) + 1, dtype=np.int32) * (DEPTH + 1)),
        input_ids=torch.zeros(rows, dtype=torch.int32),
        positions=torch.arange(rows),
    )
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=dict.fromkeys(names, [1] * DEPTH))
    sampled = torch.tensor([[1] * (n + 1) + [-1] * (DEPTH - n) for n in accepted])
    hidden = torch.randn(rows, HIDDEN)
    given = dict(zip(V1_ARGUMENTS, (scheduled, sampled, hidden, [hidden] * 3), strict=True))
    return functools.partial(step_v1, runner, given)


def sglang_step(names: list[str], accepted: list[int]) -> Callable[[Collection[str]], Step | None]:
    """Reads a round of SGLang's with all of these requests."""
    rows = len(names) * (DEPTH + 1)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=name) for name in names])
    chains = SimpleNamespace(
        draft_token_num=DEPTH + 1, draft_token=torch.zeros(rows, dtype=torch.int64), positions=torch.arange(rows)
    )
    states = SimpleNamespace(hidden_states=torch.randn(rows, 3 * HIDDEN), last_hidden_states=torch.randn(rows, HIDDEN))
    lengths = torch.tensor(accepted, dtype=torch.int32) + 1
    result = SimpleNamespace(accept_lens=lengths, next_token_ids=torch.ones(rows).int(), logits_output=states)
    return functools.partial(round_step, batch, chains, result)


def tap_milliseconds(names: list[str], read: Callable[[Collection[str]], Step | None], share: float) -> float:
    """What the tap adds to a step."""
    weights = WeightSample(nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(40)))  # looked at before it sends
    head = Head(torch.randn(HIDDEN, HIDDEN))
    tap = FeatureTap(head, _throw_away, fraction=1.0, tokens_per_minute=10**9, weights=weights)
    chosen = names[: max(1, round(share * len(names)))] if share else []
    counter, sampling = itertools.count(1), RequestSampling(1.0, 1.0, 0)

    def begin(some: list[str]) -> None:
        for name in some:
            tap.begin(Request(name, tuple(range(50)), sampling, frozenset(), None))

    begin(chosen)

    def step() -> None:
        number = next(counter)
        ended = [name for i, name in enumerate(chosen) if (number + i * LIFE_STEPS // len(chosen)) % LIFE_STEPS == 0]
        tap.end(ended)
        begin(ended)
        tap.release()
        found = read(tap.collected) if tap.collected else None
        if found is not None:
            tap.step(found)

    taken = milliseconds(step)
    if tap.tally["failures"]:
        raise RuntimeError(f"expected every step to be taken, {tap.tally['failures']} failed: {tap.tally.last_error}")
    tap.close(10.0)
    return taken


def _throw_away(_: Collected) -> None:
    pass


def main() -> None:
    """Run from the command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as vLLM does when it has started
    print(f"load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; Python {sys.version.split()[0]}\n")
    kinds = [("tap", vllm_step, SHARES), ("SGLang's", sglang_step, SHARES[1:])]
    heads = [f"{name}, {100 * share:.0f} %" for name, _, shares in kinds for share in shares]
    print("| requests | counter | " + " | ".join(heads) + " |")
    print("|---" * (2 + len(heads)) + "|")
    for requests in REQUESTS:
        draw = random.Random(0)
        names, accepted = [f"request-{i}" for i in range(requests)], [draw.randint(0, DEPTH) for _ in range(requests)]
        cells = [counter_milliseconds(names, accepted)]
        cells += [tap_milliseconds(names, of(names, accepted), share) for _, of, shares in kinds for share in shares]
        print(f"| {requests} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
