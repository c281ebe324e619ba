"""What the feature tap costs a vLLM server: tokens per second without it and with 0, 5 and 100 % of requests sampled.

    python benchmarks/vllm_tap.py [--rounds 6]      # after `make vllm`; about two minutes on two cores

One server of the tests, whose tap is taken off and put on between short bursts of the same greedy requests; the four
settings take turns in each round, so that what else the machine does hits all of them. Prints tokens per second of the
median burst of each setting, and its ratio to the same round's burst without the tap (median, and the range).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "vllm_server")]

from engine_fixtures import base_policy, elicit_prompts, random_drafter, write  # noqa: E402 - after the path
from vllm_process import VllmServer  # noqa: E402

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

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def burst(server: VllmServer, prompts: list[list[int]]) -> float:
    """Tokens per second of these requests, six at a time, 64 tokens each."""
    began = time.perf_counter()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda p: server.generate(p, max_tokens=64, ignore_eos=True, stop_token_ids=[]), prompts))
    return sum(len(text) for text in texts) / (time.perf_counter() - began)


def measure(server: VllmServer, rounds: int) -> dict[float | None, list[float]]:
    """Tokens per second by setting, one figure a round; the first round warms up and is not kept."""
    speeds: dict[float | None, list[float]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds + 1):
        turn = number % len(SETTINGS)
        for setting in SETTINGS[turn:] + SETTINGS[:turn]:
            server.rpc("set_tap", setting)
            speed = burst(server, elicit_prompts(36, seed=7))
            if number:
                speeds[setting].append(speed)
    return speeds


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
        tap = {"URL": f"http://127.0.0.1:{sink.server_port}", "FRACTION": "1.0", "TOKENS_PER_MINUTE": "10000000"}
        environment = {f"DRAFTALIGN_TAP_{name}": value for name, value in tap.items()}
        server = VllmServer(Path(scratch), drafters / "random", drafters, **environment)
        try:
            server.wait_until_healthy()
            speeds = measure(server, rounds)
            (stats,) = server.client.post("/test/rpc", json={"method": "draftalign_tap"}).json()
        finally:
            server.stop()
    for setting, figures in speeds.items():
        ratios = [mine / bare for mine, bare in zip(figures, speeds[None], strict=True)]
        name = "no tap" if setting is None else f"fraction {setting:g}"
        print(
            f"{name:14} {statistics.median(figures):7.1f} tokens/s   {statistics.median(ratios):.3f} of no tap "
            f"[{min(ratios):.3f}, {max(ratios):.3f}], {len(ratios)} rounds"
        )
    print(f"what the tap counted: {stats}")


if __name__ == "__main__":
    main()
