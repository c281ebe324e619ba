"""What the hook takes of a TRL GRPO step, the tap of a vLLM's, and how many bytes of features a token is.

    python -m benchmarks.overhead --only bytes     # at once
    python -m benchmarks.overhead --only trl       # some three minutes on two cores
    python -m benchmarks.overhead --only engine    # after `make vllm`; as long (--engine-hidden 512: a wider policy)

**trl.** One process trains tiny policies with TRL. The steps alternate between the hook off and on (off on on off ...),
so that whatever else the machine does meets both. What is sent goes to a process that throws it away. Rollouts are
random tokens from a `rollout_func`: a step is here the trainer's part (forward, backward, optimizer) and has no
generation, which is most of a real step. For each setting:

* `own clock`: what the hook's own clock (`overhead_seconds`) counts in the trainer's thread, over a step with the hook
  off. Both in processor time of that thread, so other jobs hardly touch it: the figure to read;
* `thread`: processor time of the trainer's thread with the hook on over off, less 1;
* `process`: that of all threads, the sender's included, which competes with the step where cores are few;
* `wall`: wall time from step to step, without waiting for the sender.

Intervals are of 95 %, by a bootstrap over the pairs of neighbours. A tiny policy on a CPU is the unkind case: what the
hook does grows with tokens times hidden size, and with the head once (the normalisers); a forward and backward grows
with the depth too, and this one has 8 layers.

**engine.** One server of the tests (the demo's policy, whose steps take a millisecond), which follows a service by
itself. Its tap is taken off and put on between short bursts of the same greedy requests; the settings take turns in
each round. For each: tokens per second and processor time per token (of all of the server's processes), over the same
round's burst without the tap.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.trainer.hooks_fixtures import tiny_qwen3  # noqa: E402 - after the path
from helpers.trainer.trl_fixtures import make_trainer  # noqa: E402

from rl_hooks import wire  # noqa: E402
from rl_hooks.sending.features import Captured, FeatureDtype, PackedIndex, StagedRollouts  # noqa: E402
from rl_hooks.trainer import base, capture, own_scores, whole  # noqa: E402
from rl_hooks.trl import Attachment, attach  # noqa: E402

LAYERS: Final = 8
VOCAB: Final = 4096
TOKENS: Final = 48
#: Fractions of requests sampled by the engine's tap. None: the model runner as vLLM made it.
FRACTIONS: Final[tuple[float | None, ...]] = (None, 0.0, 0.05, 1.0)
PROMPTS: Final = 24
ROUNDS: Final = 8
DTYPES: Final[tuple[FeatureDtype, ...]] = get_args(FeatureDtype)
_FILE_TOKENS: Final = 1024  # of a rollout in the table of bytes


class Sink(BaseHTTPRequestHandler):
    """Takes whatever is sent, and knows no run."""

    protocol_version = "HTTP/1.1"

    def _take(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._say(200)

    do_PUT = do_POST = _take  # noqa: N815 - their names

    def do_GET(self) -> None:
        """No run is known, and no drafter is published."""
        self._say(404)

    def _say(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def sink() -> Iterator[str]:
    """A process of its own that takes everything; its address."""
    argv = [sys.executable, "-m", "benchmarks.overhead", "--serve"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def serve() -> None:
    """Be the sink."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


@dataclass(frozen=True)
class Setting:
    """What is captured of how large a policy."""

    hidden: int
    fraction: float
    dtype: FeatureDtype


@dataclass
class Step:
    """Seconds of one step; `hook` by the hook's own clock."""

    on: bool
    thread: float
    process: float
    wall: float
    hook: float


class Alternate:
    """Callback of the trainer: the hook is on in every other step, and each step is timed from its begin to the next's.

    What is still to be sent is waited for between the steps: it belongs to the step before, in processor time, and
    to none in wall time.
    """

    def __init__(self, attachment: Attachment, warm_up: int) -> None:
        self.steps: list[Step] = []
        self._attachment = attachment
        self._warm_up = warm_up
        self._begun = 0
        self._before: Step | None = None

    def _clocks(self, *, on: bool) -> Step:
        hook = self._attachment.overhead_seconds
        return Step(on, time.thread_time(), time.process_time(), time.perf_counter(), hook)

    def begin(self) -> None:
        """End the step before, and begin one."""
        now = self._clocks(on=False)
        self._attachment.flush()
        now.process = time.process_time()
        if self._before is not None and self._begun > self._warm_up:
            spent = [getattr(now, f.name) - getattr(self._before, f.name) for f in dataclasses.fields(Step)[1:]]
            self.steps.append(Step(self._before.on, *spent))
        on = self._begun % 4 in (1, 2)
        self._begun += 1
        self._attachment._active = on  # its own switch, which `close` turns off too
        self._before = self._clocks(on=on)


def wide(hidden: int) -> Any:
    """A random policy of that hidden size."""
    heads = hidden // 32
    return tiny_qwen3(
        LAYERS,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        vocab_size=VOCAB,
    )


def train(setting: Setting, url: str, pairs: int) -> tuple[list[Step], dict[str, Any]]:
    """Train for so many pairs of steps; returns the steps, and what was sent."""
    from transformers import PrinterCallback, TrainerCallback

    warm_up = 4
    for module in (base, capture, own_scores, whole):  # the hook's own clock counts processor time
        setattr(module, "time", types.SimpleNamespace(perf_counter=time.thread_time))  # noqa: B010 - mypy
    rng = np.random.default_rng(0)

    def rollout(prompts: list[str], *_: Any) -> dict[str, Any]:
        ids = rng.integers(2, VOCAB, (2, len(prompts), TOKENS))
        said = {"prompt_ids": [row[:6] for row in ids[0].tolist()], "completion_ids": ids[1].tolist()}
        return said | {"logprobs": [[-8.0] * TOKENS for _ in prompts]}

    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            Path(directory),
            steps=warm_up + 2 * pairs + 1,
            model=wide(setting.hidden),
            max_completion_length=TOKENS,
            rollout_func=rollout,
        )
        attachment = attach(trainer, url, sample_fraction=setting.fraction, dtype=setting.dtype)
        alternate = Alternate(attachment, warm_up)

        class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
                alternate.begin()

        trainer.add_callback(Clock())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        said = attachment.stats()
        attachment.close()
    assert not said["failures"], said["last_failure"]
    return alternate.steps, said


def share(steps: Sequence[Step], of: str) -> tuple[float, float, float]:
    """How much more of `of` a step takes with the hook on, in per cent, and its 95 % interval."""
    return _interval(*([getattr(s, of) for s in steps if s.on is side] for side in (True, False)), less=1.0)


def own_clock(steps: Sequence[Step]) -> tuple[float, float, float]:
    """What the hook's own clock counts, in per cent of a step with the hook off, and its 95 % interval."""
    return _interval([s.hook for s in steps if s.on], [s.thread for s in steps if not s.on], less=0.0)


def _interval(above: Sequence[float], below: Sequence[float], *, less: float) -> tuple[float, float, float]:
    """Ratio of the means less a constant, and quantiles of it over draws of pairs; per cent."""
    pairs = np.stack([above, below], axis=1)
    draws = pairs[np.random.default_rng(0).integers(0, len(pairs), (4000, len(pairs)))].mean(axis=1)  # [draws, 2]
    low, high = np.quantile(draws[:, 0] / draws[:, 1], (0.025, 0.975))
    ratio = float(pairs[:, 0].sum() / pairs[:, 1].sum())
    return 100 * (ratio - less), 100 * (float(low) - less), 100 * (float(high) - less)


def _cell(share_and_bounds: tuple[float, float, float]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*share_and_bounds)


def trl_table(hiddens: Sequence[int], pairs: int) -> None:
    """Print the shares of a GRPO step."""
    import trl

    kinds: tuple[tuple[float, FeatureDtype], ...] = ((0.1, "bfloat16"), (1.0, "bfloat16"), (1.0, "float8_e4m3"))
    settings = [Setting(hidden, fraction, dtype) for hidden in hiddens for fraction, dtype in kinds]
    print(
        f"TRL {trl.__version__}, torch {torch.__version__}, {LAYERS} layers, vocabulary {VOCAB}, {pairs} pairs of steps"
    )
    print(
        "| hidden | fraction | dtype | step, s of CPU | tokens sent a step | own clock, % "
        "| thread, % | process, % | wall, % |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with sink() as url:
        for setting in settings:
            steps, said = train(setting, url, pairs)
            off = float(np.mean([s.thread for s in steps if not s.on]))
            sent = said["captured_tokens"] / (pairs + 2)  # two were on while it warmed up
            cells = [_cell(own_clock(steps)), *(_cell(share(steps, of)) for of in ("thread", "process", "wall"))]
            row = [setting.hidden, setting.fraction, setting.dtype, f"{off:.2f}", f"{sent:.0f}", *cells]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


@dataclass(frozen=True)
class Burst:
    """One burst of requests to the engine."""

    tokens_per_second: float
    cpu_seconds_per_token: float


def group_cpu_seconds(leader: int) -> float:
    """Processor time so far of all processes of the group that `leader` leads."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == leader:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def burst(server: Any, prompts: Sequence[Sequence[int]]) -> Burst:
    """Ask for 64 tokens after each prompt, six at a time."""
    began, cpu = time.perf_counter(), group_cpu_seconds(server.process.pid)
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda p: server.generate(p, max_tokens=64, ignore_eos=True, stop_token_ids=[]), prompts))
    tokens = sum(len(text) for text in texts)
    return Burst(tokens / (time.perf_counter() - began), (group_cpu_seconds(server.process.pid) - cpu) / tokens)


def engine_table(hidden: int | None) -> None:
    """Print what the tap costs a vLLM server: of the demo's policy, or of a random one of that hidden size."""
    from helpers.engine.engine_fixtures import base_policy, elicit_prompts, random_drafter, write
    from vllm_server.vllm_process import VllmServer

    from examples.policy import BASE_POLICY

    bursts: dict[float | None, list[Burst]] = {fraction: [] for fraction in FRACTIONS}
    with tempfile.TemporaryDirectory() as scratch, sink() as url:
        drafters = Path(scratch) / "drafters"
        policy, draft_vocab_size, files = base_policy()[0], 96, BASE_POLICY
        if hidden is not None:
            policy, draft_vocab_size = wide(hidden), VOCAB // 2
            files = Path(scratch) / "policy"
            policy.save_pretrained(files)
        write(random_drafter(policy, seed=5, draft_vocab_size=draft_vocab_size), drafters / "random")
        told = {"URL": url, "SAMPLE_FRACTION": "1.0", "TOKENS_PER_MINUTE": "10000000"}
        environment: dict[str, Any] = {f"DRAFTALIGN_{name}": value for name, value in told.items()}
        server = VllmServer(Path(scratch), drafters / "random", drafters, policy=files, **environment)
        try:
            server.wait_until_healthy()
            server.generate([5], max_tokens=1)  # the tap begins with the first request
            for number in range(ROUNDS + 1):
                turn = number % len(FRACTIONS)
                for fraction in FRACTIONS[turn:] + FRACTIONS[:turn]:
                    server.rpc("set_tap", fraction)
                    found = burst(server, elicit_prompts(PROMPTS, seed=7))
                    if number:  # the first round warms up
                        bursts[fraction].append(found)
            counted = server.state()["tap"]
        finally:
            server.stop()
    print(f"{ROUNDS} rounds of {PROMPTS} requests of 64 tokens")
    print("| sampled | tokens per second | CPU ms a token | speed, % | CPU a token, % |")
    print("|---|---|---|---|---|")
    bare = bursts[None]
    for fraction, mine in bursts.items():
        speeds, costs = ([getattr(b, of) for b in mine] for of in ("tokens_per_second", "cpu_seconds_per_token"))
        speed = _cell(_interval(speeds, [b.tokens_per_second for b in bare], less=1.0))
        cost = _cell(_interval(costs, [b.cpu_seconds_per_token for b in bare], less=1.0))
        name = "no tap" if fraction is None else f"{100 * fraction:g} %"
        print(f"| {name} | {np.mean(speeds):.0f} | {1e3 * np.mean(costs):.2f} | {speed} | {cost} |")
    print(f"what the tap counted: {counted}")


def file_bytes(hidden: int, dtype: FeatureDtype, last_rows: wire.LastRows, prompt: float, group: int) -> int:
    """Bytes of a file of `group` rollouts of one prompt, their share `prompt`, written by the hook's own writer."""
    layers, N = 3, _FILE_TOKENS * group
    state = torch.zeros(N, hidden, dtype=torch.bfloat16)
    mask = np.tile((np.arange(_FILE_TOKENS) >= prompt * _FILE_TOKENS).astype(np.uint8), group)
    starts = np.arange(0, N + 1, _FILE_TOKENS, dtype=np.int32)
    index = PackedIndex(np.zeros(N, np.int32), starts, mask, logprobs=None)
    zeros = torch.zeros(N)
    predicting = torch.from_numpy(wire.predicting_rows(mask)) if last_rows == "predicting" else None
    captured = Captured((state,) * layers, state)
    staged = StagedRollouts(index, captured, (zeros, zeros), dtype=dtype, predicting=predicting)
    metadata = wire.rollout_metadata(
        run="default",
        policy_version=1,
        rollout_ids=[str(number) for number in range(group)],
        target_fingerprint="0" * 32,
        aux_layers=tuple(range(layers)),
    )
    return sum(memoryview(part).nbytes for part in staged.encode(metadata, takes=["aux_rows"]))


def bytes_table() -> None:
    """Print the bytes of a token by what is left out: nothing, prompts' last states, prompts of a group but for one."""
    forms: list[tuple[str, wire.LastRows, float, int]] = [("all rows", "all", 0.25, 1)]
    for prompt in (0.25, 0.5):
        forms += [(f"{100 * prompt:g} % prompt", "predicting", prompt, 1)]
        forms += [(f"{100 * prompt:g} % prompt, groups of 8", "predicting", prompt, 8)]
    print(f"| policy | hidden | dtype | {' | '.join(name for name, *_ in forms)} |")
    print("|" + "---|" * (3 + len(forms)))
    for name, hidden in (("Qwen3-0.6B", 1024), ("Qwen3-8B", 4096), ("Llama-3.3-70B", 8192)):
        for dtype in DTYPES:
            sizes = [
                file_bytes(hidden, dtype, rows, prompt, group) / (_FILE_TOKENS * group)
                for _, rows, prompt, group in forms
            ]
            print(f"| {name} | {hidden} | {dtype} | {' | '.join(f'{size:,.0f}' for size in sizes)} |")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("bytes", "trl", "engine"), help="one of the tables")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256], help="hidden sizes of the policies")
    parser.add_argument("--engine-hidden", type=int, help="of the engine's policy; unset: the demo's")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps, one with and one without the hook")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return
    torch.set_num_threads(1)
    if asked.only in (None, "bytes"):
        bytes_table()
    for only in ("trl", "engine"):
        if asked.only in (None, only):
            print(f"\nload of the machine before: {_load()}; cores: {os.cpu_count()}")
            if only == "trl":
                trl_table(asked.hidden, asked.pairs)
            else:
                engine_table(asked.engine_hidden)
            print(f"load of the machine after: {_load()}")


def _load() -> str:
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


if __name__ == "__main__":
    main()
