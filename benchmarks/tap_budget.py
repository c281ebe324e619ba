"""Does a tap whose token budget is short send what the engine answers? A real vLLM, after `make vllm`.

    python -m benchmarks.tap_budget                  # half an hour on two busy cores
    python -m benchmarks.tap_budget --bursts 4 --shares 1 0.5

RL steps without an RL: bursts of requests, all at once, with a pause after each. Half of the prompts are of the task,
which the policy answers in some ten tokens; after the others it writes until it draws one of some stop tokens of the
request's own, or 200. So nobody knows an answer's length beforehand, and the drafter's α goes with it.

The budget is a share of what the engine answers in a minute, measured in the first part (which takes all). For each
share: mean answer of what is sent over that of all; replay α of what is sent over the α that vLLM counted of all.
Intervals are of 95 %: requests as clusters, drawn without replacement, and the chance of each round of vLLM's.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.drafter.decode_fixtures import policy_of  # noqa: E402 - after the path
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts, trained_drafter  # noqa: E402
from helpers.engine.server_load import write_drafters  # noqa: E402
from helpers.service.service_fixtures import RunningService  # noqa: E402
from helpers.service.valkey_fixtures import OwnValkey  # noqa: E402
from vllm_server.vllm_process import DEPTH, FORKED, VllmServer  # noqa: E402

from drafter.batch import load_batch  # noqa: E402
from drafter.replay.acceptance import Replay, log_ratio  # noqa: E402
from drafter.replay.replay import replay  # noqa: E402

LONGEST: Final = 200
#: Of the variance of log α that one round adds by chance, at most (tests/vllm_server/test_vllm_server_tap.py).
ROUND_VARIANCE: Final = 0.45
PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: Sequence[int]
    more: dict[str, Any]


def asks(count: int, seed: int) -> list[Ask]:
    """A burst."""
    random = np.random.default_rng(seed)
    short = [Ask(prompt, {}) for prompt in elicit_prompts(count // 2, seed)]
    long = [
        Ask(prompt, {"ignore_eos": True, "stop_token_ids": random.integers(2, 105, random.integers(1, 8)).tolist()})
        for prompt in odd_prompts(count - len(short), seed)
    ]
    both = [*short, *long]
    return [both[place] for place in random.permutation(len(both))]


@dataclass(frozen=True)
class Part:
    """What one server did with one budget."""

    answers: list[int]  # tokens of each request
    sent: list[int]
    replayed: Replay
    rounds: float
    emitted: float
    seconds: float
    counts: dict[str, Any]

    @property
    def tokens_per_minute(self) -> float:
        """What was answered."""
        return 60 * sum(self.answers) / self.seconds

    def row(self, share: float) -> str:
        """Of the table."""
        left = math.sqrt(max(0.0, 1 - len(self.sent) / len(self.answers)))  # drawn without replacement
        mean = float(np.mean(self.answers))
        lengths = 1.96 * left * float(np.std(self.sent)) / math.sqrt(len(self.sent)) / mean
        found = log_ratio(self.replayed.tokens, self.replayed.rounds)
        live = self.emitted / self.rounds
        off = 1.96 * math.hypot(left * found.error, math.sqrt(ROUND_VARIANCE / self.rounds))
        bias = math.log(self.replayed.alpha / live)
        long = self.replayed.tokens >= np.median(self.replayed.tokens)
        of_kinds = [self.replayed.tokens[one].sum() / self.replayed.rounds[one].sum() for one in (~long, long)]
        reasons = {name: number for name, number in self.counts.items() if name.startswith(("skip", "cut", "fail"))}
        return (
            f"| {share:g} | {len(self.answers)}, {mean:.1f} tokens | {len(self.sent)} "
            f"({100 * sum(self.sent) / sum(self.answers):.0f} % of the tokens) "
            f"| {np.mean(self.sent) / mean:.3f} ± {lengths:.3f} | {live:.4f} "
            f"| {self.replayed.alpha:.4f} ({of_kinds[0]:.2f} of the shorter half, {of_kinds[1]:.2f} of the longer) "
            f"| {100 * bias:+.2f} ± {100 * off:.2f} % | {reasons} |"
        )


def part(budget: int, bursts: int, requests: int, at_once: int) -> Part:
    """Serve these bursts with a budget of so many tokens a minute."""
    model, drafter = base_policy()[0], trained_drafter()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        valkey = OwnValkey(scratch / "valkey")
        valkey.start()
        stack.callback(valkey.stop)
        service = RunningService(state_dir=scratch / "state", redis_url=valkey.url, drafting="greedy", depth=DEPTH)
        stack.callback(service.stop)
        drafters = write_drafters(scratch / "drafters")
        told = {"URL": service.url, "SAMPLE_FRACTION": "1.0", "TOKENS_PER_MINUTE": str(budget)}
        environment: dict[str, Any] = {f"DRAFTALIGN_{name}": value for name, value in told.items()} | FORKED
        options = ("--max-num-seqs", str(at_once), "--num-gpu-blocks-override", "2048")
        server = VllmServer(scratch, drafters / "trained", drafters, options=options, **environment)
        stack.callback(server.stop)
        server.wait_until_healthy()
        server.generate([5], max_tokens=1)  # the tap begins with the first request
        answers: list[int] = []
        limits = httpx.Limits(max_connections=None)
        before: Any = server.counters()
        began = time.monotonic()
        with ThreadPoolExecutor(requests) as pool:
            for number in range(bursts):
                server.client.close()  # vLLM closes what was idle for 5 s: each burst has connections of its own
                server.client = httpx.Client(base_url=server.url, timeout=600, limits=limits)

                def ask(one: Ask) -> int:
                    return len(server.generate(one.prompt, max_tokens=LONGEST, temperature=1.0, **one.more))

                answers += pool.map(ask, asks(requests, seed=1000 + number))
                time.sleep(PAUSE_SECONDS)
        seconds = time.monotonic() - began
        after: Any = server.counters()
        time.sleep(8)  # the batcher's five seconds
        counts = server.state()["tap"]
        server.stop()
        batches = [load_batch(path) for path in service.spooled() if path.suffix == ".safetensors"]
        sent = [int(one) for batch in batches for one in _answers(batch)]
        sent.remove(1)  # of the request before the bursts
        replays = [replay(drafter, batch, policy_of(model), depth=DEPTH, drafting="greedy") for batch in batches]
    rounds, emitted = after.rounds - before.rounds, after.emitted_tokens - before.emitted_tokens
    return Part(answers, sent, Replay.concat(replays), rounds, emitted, seconds, counts)


def _answers(batch: Any) -> np.ndarray[Any, Any]:
    sums = np.concatenate([[0], np.cumsum(batch.loss_mask.numpy().astype(np.int64))])
    return np.diff(sums[batch.cu_seqlens.numpy()])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--requests", type=int, default=128, help="in each burst")
    parser.add_argument("--at-once", type=int, default=64, help="that the engine works on")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.1])
    asked = parser.parse_args()
    print("| budget | answered | sent | length, sent over all | α counted | α replayed | difference | left out |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rate = 0.0
    for share in asked.shares:
        budget = round(share * rate) if rate and share < 1 else 10_000_000
        found = part(budget, asked.bursts, asked.requests, asked.at_once)
        rate = rate or found.tokens_per_minute
        print(found.row(share), flush=True)
    print(f"{rate:.0f} tokens a minute with all of it; load {os.getloadavg()}")


if __name__ == "__main__":
    main()
