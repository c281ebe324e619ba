"""Sample runs, and a small server that shows them through the shipped page.

By hand: `PYTHONPATH=.:tests python -m helpers.service.page_fixtures [PORT]`.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from helpers.worker.record_fixtures import stored
from helpers.worker.whole_fixtures import run_document

from service.api.app import page_html
from service.api.snapshot import facts_of
from service.monitor.headline import headline
from service.monitor.metrics import CONTENT_TYPE, RunSnapshot, render
from service.monitor.records import DrafterSums
from service.settings import Settings

PAGE = Path(__file__).resolve().parents[3] / "service" / "api" / "page.html"


def sample_run(
    policies: int, seed: int = 0, *, live: bool = True, others: Mapping[str, float] | None = None
) -> RunSnapshot:
    """A run like the demo's: the frozen drafter falls as the policy learns to reason, the served one follows.

    `others`: α of further engines by the method that they draft by.
    """
    rng = random.Random(seed)
    now = time.time()
    scores: list[dict[str, Any]] = []
    acceptances: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    version, sequence = 0, 0
    for policy in range(policies):
        age = now - 12.0 * (policies - policy)
        turn = 1 / (1 + math.exp(-(policy - 0.35 * policies) / max(1.0, 0.1 * policies)))
        levels = {
            "frozen": 2.4 - 0.7 * turn,
            "ngram": 1.15 + 0.25 * turn,
            "served": 2.4 + 1.5 * turn - 0.25 * math.sin(min(1.0, 2.5 * turn) * math.pi) ** 2,
        }
        levels["best"] = levels["served"] + abs(rng.gauss(0, 0.02))
        record: dict[str, Any] = {"policy_version": policy, "rollouts": 32, "tokens": 4100, "created": age}
        shared = rng.gauss(0, 0.03)
        rounds, noise = [rng.uniform(15, 60) for _ in range(32)], [rng.gauss(0, 0.25) + shared for _ in range(32)]
        for name, level in levels.items():  # the same rollouts: what differs is the drafter
            tokens = [max(r, r * (level + n)) for r, n in zip(rounds, noise, strict=True)]
            record[name] = DrafterSums.of(tokens, rounds)
        sequence, version = _event(history, rng, policy, age, sequence, version, policies)
        record |= {
            "drafter_version": f"v{version:06d}-{version:08x}",
            "best_version": f"v{version:06d}-{version:08x}",
            "action": "idle" if policy % 9 == 8 else "train",
            "logprob_sum": -4100 * (1.1 - 0.7 * turn + abs(rng.gauss(0, 0.03))),
            "logprob_tokens": 4100,
            "reward_sum": 32 * min(1.0, 0.2 + 0.7 * turn + rng.gauss(0, 0.03)),
            "reward_count": 32,
        }
        scores.append(record)
        if live:
            alpha = levels["served"] + rng.gauss(0, 0.04)
            acceptances.append(
                {
                    "reporter": "engine-0",
                    "drafter_version": record["drafter_version"],
                    "policy_version": policy,
                    "rounds": 1200,
                    "accepted_tokens": round(1200 * (alpha - 1)) + 40,
                    "emitted_tokens": round(1200 * alpha),
                    "accepted_per_position": [round(1200 * (alpha - 1) * share) for share in (0.31, 0.27, 0.23, 0.19)],
                    "created": age,
                }
            )
        for method, level in (others or {}).items():
            alpha = level + rng.gauss(0, 0.03)
            acceptances.append(
                {
                    "reporter": f"agent http://{method}:8000",
                    "engine": f"http://{method}:8000",
                    "method": method,
                    "drafter_version": method,
                    "policy_version": policy,
                    "rounds": 900,
                    "accepted_tokens": round(900 * (alpha - 1)),
                    "emitted_tokens": round(900 * alpha),
                    "accepted_per_position": [round(900 * (alpha - 1))],
                    "created": age,
                }
            )
    worker: dict[str, Any] = {}
    if policies:
        worker = {
            "heartbeat": now,
            "action": "train",
            "trained_tokens_total": 8200 * policies,
            "train_seconds_total": 3.1 * policies,
            "drift": {"fast": {"statistic": 2.1, "limit": 9.5}, "slow": {"statistic": 4.0, "limit": 36.1}},
        }
    counters = {"items": 2, "bytes": 9_400_000, "accepted_total": policies} if policies else {"items": 0, "bytes": 0}
    latest = {"version": f"v{version:06d}-{version:08x}", "sequence": sequence, "created": now} if version else None
    return stored(scores, acceptances, history, counters, worker, latest, queue_limit_bytes=16 << 30)


def _event(
    history: list[dict[str, Any]], rng: random.Random, policy: int, age: float, sequence: int, version: int, total: int
) -> tuple[int, int]:
    """Maybe add a verdict of this policy version; returns the new sequence and drafter version."""
    event: dict[str, Any] = {"time": age, "policy_version": policy}
    if total > 20 and policy in (total // 2, (3 * total) // 4):
        kind = "rolled_back" if policy == total // 2 else "pushed_again"
        reason = "live α 2.10 fell short of 2.71" if kind == "rolled_back" else "engine-0 emits 1.00 tokens per round"
        sequence += 1
        name = f"v{version:06d}-{version:08x}"
        history.append(event | {"event": kind, "version": name, "sequence": sequence, "reason": reason})
    elif policy == 0 or rng.random() < 0.3:
        version, sequence = version + 1, sequence + 1
        gate = {"gain": abs(rng.gauss(0.1, 0.05)), "low": 0.02, "rollouts": 32}
        name = f"v{version:06d}-{version:08x}"
        history.append(
            event | {"event": "published", "version": name, "sequence": sequence, "reason": "published", "gate": gate}
        )
    elif rng.random() < 0.25:
        reason = "the bound on its gain is -0.012, below 0: not shown to be better"
        history.append(event | {"event": "refused", "reason": reason, "gate": {"gain": 0.004, "low": -0.012}})
    return sequence, version


@contextlib.contextmanager
def serving(
    runs: Mapping[str, RunSnapshot],
    *,
    status: int = 200,
    port: int = 0,
    answers: float = math.inf,
    asked: list[str] | None = None,
) -> Iterator[str]:
    """Serve the page, `/alpha`, `/runs` and `/metrics` of these runs on loopback; yields the URL.

    Any other path that was asked for is an error at the end. `answers`: the number that `/alpha` gets; then the service
    is gone. `asked`: collects what was asked for.
    """
    left = answers

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal left
            url = urlsplit(self.path)
            if asked is not None:
                asked.append(self.path)
            left -= url.path == "/alpha"
            if left < 0:
                self.connection.shutdown(socket.SHUT_RDWR)
            elif url.path == "/":
                self._answer(200, "text/html; charset=utf-8", page_html().encode())
            elif url.path == "/alpha" and status != 200:
                problem = {"title": "no", "detail": "a token with the scope read is needed"}
                self._answer(status, "application/problem+json", json.dumps(problem).encode())
            elif url.path == "/alpha" and (run := parse_qs(url.query).get("run", ["default"])[0]) not in runs:
                self._answer(404, "application/problem+json", b'{"detail": "no such run"}')
            elif url.path == "/alpha":
                attempt = parse_qs(url.query).get("attempt", [None])[0]
                document = run_document(run, runs[run], Settings(), None if attempt is None else int(attempt))
                self._answer(200, "application/json", json.dumps(document, allow_nan=False).encode())
            elif url.path == "/metrics":
                self._answer(200, CONTENT_TYPE, render(runs))
            elif url.path == "/runs":
                said = {run: headline(facts_of(snapshot, Settings())) for run, snapshot in runs.items()}
                found = [{"run": run, "headline": asdict(one)} for run, one in said.items()]
                self._answer(200, "application/json", json.dumps({"runs": found}).encode())
            else:
                server.unexpected.append(self.path)  # type: ignore[attr-defined]
                self._answer(404, "text/plain", b"")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the browser may leave first
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.unexpected = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        if server.unexpected:  # type: ignore[attr-defined]
            raise AssertionError(f"the page asked for {server.unexpected}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    samples = {"sixty": sample_run(60), "three": sample_run(3), "five-hundred": sample_run(500), "new": sample_run(0)}
    with serving(samples, port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as url:
        print(url, flush=True)
        threading.Event().wait()
