"""What the feature tap costs a vLLM server, without it and with 0, 5 and 100 % of requests sampled.

    python benchmarks/vllm_tap.py [--rounds 6]      # after `make vllm`; about two minutes on two cores

One server of the tests, whose tap is taken off and put on between short bursts of the same greedy requests; the four
settings take turns in each round, so that what else the machine does hits all of them. Prints for each setting the
median burst's tokens per second and processor time per token (of all of the server's processes), and both over the
same round's burst without the tap: median and quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from engine_fixtures import base_policy, elicit_prompts, random_drafter, write  # noqa: E402 - after the path
from vllm_server.vllm_process import VllmServer  # noqa: E402

#: None: the model runner as vLLM made it.
SETTINGS: tuple[float | None, ...] = (None, 0.0, 0.05, 1.0)


class Sink(BaseHTTPRequestHandler):
    """Takes whatever the tap sends."""

    protocol_version = "HTTP/1.1"

    def _take(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_PUT = do_POST = _take  # noqa: N815 - their names

    def do_GET(self) -> None:
        """No run is known, and no drafter is published."""
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Burst:
    """One burst of requests."""

    tokens_per_second: float
    cpu_seconds_per_token: float


def cpu_seconds(server: VllmServer) -> float:
    """Processor time of all of the server's processes so far: one group, led by the one that was started."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == server.process.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def burst(server: VllmServer, prompts: list[list[int]]) -> Burst:
    """Ask for 64 tokens after each prompt, six at a time."""
    began, cpu = time.perf_counter(), cpu_seconds(server)
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda p: server.generate(p, max_tokens=64, ignore_eos=True, stop_token_ids=[]), prompts))
    tokens = sum(len(text) for text in texts)
    return Burst(tokens / (time.perf_counter() - began), (cpu_seconds(server) - cpu) / tokens)


def measure(server: VllmServer, rounds: int) -> dict[float | None, list[Burst]]:
    """Bursts by setting, one a round; the first round warms up and is not kept."""
    bursts: dict[float | None, list[Burst]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds + 1):
        turn = number % len(SETTINGS)
        for setting in SETTINGS[turn:] + SETTINGS[:turn]:
            server.rpc("set_tap", setting)
            found = burst(server, elicit_prompts(36, seed=7))
            if number:
                bursts[setting].append(found)
    return bursts


def quartiles(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Start the server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as scratch:
        drafters = Path(scratch) / "drafters"
        write(random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), drafters / "random")
        tap = {"URL": f"http://127.0.0.1:{sink.server_port}", "SAMPLE_FRACTION": "1.0", "TOKENS_PER_MINUTE": "10000000"}
        environment: dict[str, Any] = {f"DRAFTALIGN_{name}": value for name, value in tap.items()}
        server = VllmServer(Path(scratch), drafters / "random", drafters, **environment)
        try:
            server.wait_until_healthy()
            server.generate([5], max_tokens=1)  # the tap begins with the first request
            bursts = measure(server, rounds)
            stats = server.state()["tap"]
        finally:
            server.stop()
    for setting, found in bursts.items():
        pairs = list(zip(found, bursts[None], strict=True))
        speed = [mine.tokens_per_second / bare.tokens_per_second for mine, bare in pairs]
        cpu = [mine.cpu_seconds_per_token / bare.cpu_seconds_per_token for mine, bare in pairs]
        name = "no tap" if setting is None else f"fraction {setting:g}"
        tokens = statistics.median(one.tokens_per_second for one in found)
        milliseconds = 1e3 * statistics.median(one.cpu_seconds_per_token for one in found)
        print(f"{name:14} {tokens:6.0f} tokens/s, x {quartiles(speed)}", end="; ")
        print(f"{milliseconds:.3f} CPU ms/token, x {quartiles(cpu)}")
    print(f"what the tap counted: {stats}")


if __name__ == "__main__":
    main()
