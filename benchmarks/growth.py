"""What one `POST /acceptance` costs the API as a run grows: CPU milliseconds at so many acceptance records.

    python benchmarks/growth.py [--records 100 1000 10000 40000] [--engines 10] [--reports 200]

A run is made up: `--engines` reporters, one record for each policy version, written to Redis as they lay there before
sums were kept. Each report that is measured names a new policy version, as in a run that goes on. What comes first is
not measured: the service takes older records over with the first report, and adds them up over the next ones.
CPU seconds are of the API process alone (user and system), so another busy process changes them little; ratios are
what to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import redis

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from service_fixtures import HEADERS, publish, run_file  # noqa: E402 - after the path is set

from service.cli.valkey import EmbeddedValkey  # noqa: E402
from service.storage.layout import Layout  # noqa: E402
from service.storage.registry import Registry  # noqa: E402


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(engine: int, policy: int, drafter: str) -> dict[str, Any]:
    """A report of a drafter that is alive."""
    return {
        "run": "default",
        "reporter": f"agent http://engine-{engine}:8000",
        "engine": f"http://engine-{engine}:8000",
        "method": "drafter",
        "drafter_version": drafter,
        "policy_version": policy,
        "rounds": 1200,
        "accepted_tokens": 2400,
        "drafted_tokens": 4800,
        "emitted_tokens": 3600,
        "accepted_per_position": [1000, 700, 450, 250],
        "window_seconds": 5.0,
        "depth": 4,
        "drafting": "greedy",
        "final": False,
    }


def measure(service: httpx.Client, pid: int, client: Any, drafter: str, records: int, args: argparse.Namespace) -> None:
    """One row."""
    client.delete("none", *client.scan_iter("da:{default}:*"))
    policies = records // args.engines
    table = {}
    for policy in range(policies):
        for engine in range(args.engines):
            record = report(engine, policy, drafter) | {"created": time.time() - policies + policy}
            table[f"{record['reporter']}/{drafter}/{policy}"] = json.dumps(record)
    client.hset("da:{default}:acceptance", mapping=table)
    number, left, before = 0, records, records + 1
    while left < before:
        for _ in range(args.engines):
            post(service, report(number % args.engines, policies + number // args.engines, drafter))
            number += 1
        before, left = left, client.hlen("da:{default}:acceptance")
    parts = []
    for _ in range(5):
        begun = cpu_seconds(pid)
        for _ in range(args.reports // 5):
            post(service, report(number % args.engines, policies + number // args.engines, drafter))
            number += 1
        parts.append(1000 * (cpu_seconds(pid) - begun) / (args.reports // 5))
    left = client.hlen("da:{default}:acceptance")
    print(f"{records:>8} {statistics.median(parts):>12.2f} {left:>13}", flush=True)


def post(service: httpx.Client, document: dict[str, Any]) -> None:
    """Send one report."""
    service.post("/acceptance", json=document).raise_for_status()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[100, 1000, 10_000, 40_000])
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--reports", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "state"
        valkey = EmbeddedValkey(state)
        valkey.start()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")}
        environment |= {"DRAFTALIGN_STATE_DIR": str(state), "DRAFTALIGN_REDIS_URL": valkey.url}
        environment |= {"DRAFTALIGN_PORT": str(port), "DRAFTALIGN_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
        api = subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], env=environment)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as service:
                while not answers(service):
                    time.sleep(0.1)
                service.put("/runs/default", content=run_file(), headers=HEADERS).raise_for_status()
                drafter = publish(Registry(Layout(state))).version
                print(" records  CPU ms/report  records left", flush=True)
                for records in args.records:
                    measure(service, api.pid, redis.Redis.from_url(valkey.url), drafter, records, args)
        finally:
            api.terminate()
            api.wait()
            valkey.stop()


def answers(service: httpx.Client) -> bool:
    """Whether the API is up."""
    try:
        return service.get("/healthz").status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
