"""Does the service work on a shared file system? Two hosts' processes, each with a mount of its own, on one directory.

    python benchmarks/shared_directory.py /mnt/first /mnt/second [--batches 60]

`first` and `second` are two mounts of one volume on this machine: two clients, with a cache each, as two hosts have. An
API runs on each. The worker starts on the second, is killed with work in its hands, and another one goes on on the
first. That one is stopped (SIGSTOP) for longer than its lease while a third works on the second, and goes on. Rollouts
and heads go to both APIs in turn. A reader of each follows `latest` by long polls, downloads what it names and compares
it, and reads what pages and Prometheus read. Every candidate that is shown to gain anything is published. Then a person
rolls back twice, and deletes the run amid it all.

One directory for both shows what is due to the file system: nothing is, then. Figures: docs/lab/shared_directory.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

import httpx  # noqa: E402 - the path must be set first
from helpers.ports import free_port  # noqa: E402
from helpers.service.service_fixtures import HEADERS  # noqa: E402
from helpers.service.valkey_fixtures import OwnValkey  # noqa: E402
from helpers.worker.worker_fixtures import ONE_BY_ONE, World  # noqa: E402

RUN: Final = "default"
#: What pages, engines' agents and Prometheus read.
READ: Final = ("/runs", f"/runs/{RUN}", "/alpha", "/drafters", "/metrics")
#: Longer than a worker's lease.
ASLEEP_SECONDS: Final = 20.0
PATIENCE_SECONDS: Final = 180.0


class Hosts:
    """Processes of two hosts. `troubles`: what clients were answered that they should not be, and how often."""

    def __init__(self, mounts: tuple[Path, Path], redis_url: str, logs: Path) -> None:
        self._name = f"draftalign-{uuid.uuid4().hex[:8]}"
        self._mounts, self._logs = mounts, logs
        (mounts[0] / self._name).mkdir()
        changes = {f"DRAFTALIGN_{name.upper()}": str(value) for name, value in ONE_BY_ONE.items()}
        changes |= {"DRAFTALIGN_GATE_MIN_GAIN": "0", "DRAFTALIGN_GATE_CONFIDENCE": "0.51"}
        self._environment = os.environ | changes | {"DRAFTALIGN_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.troubles = Counter[str]()
        self.ports = (free_port(), free_port())
        for host in (0, 1):
            self.start("serve", host, f"api {host}")
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        for url in self.urls:
            wait(lambda url=url: self.ask("GET", f"{url}/readyz", expected=(200, 503)) == 200, f"{url} is ready")  # type: ignore[misc]

    def start(self, command: str, host: int, name: str) -> None:
        """Start `draftalign COMMAND` with that host's mount."""
        own = {"DRAFTALIGN_STATE_DIR": str(self._mounts[host] / self._name / "state")}
        own |= {"DRAFTALIGN_PORT": str(self.ports[host])}
        with (self._logs / name).open("wb") as log:
            argv = [sys.executable, "-m", "service.cli", command]
            self.processes[name] = subprocess.Popen(argv, env=self._environment | own, stderr=log, cwd=ROOT)

    def ask(self, method: str, url: str, expected: tuple[int, ...] = (200, 404), **options: Any) -> int:
        """Status of a request; 0: no answer. One that is not expected is a trouble."""
        try:
            reply = httpx.request(method, url, timeout=40, **options)
        except httpx.TransportError:
            return 0
        if reply.status_code not in expected:
            self.troubles[f"{method} {httpx.URL(url).path}: {reply.status_code} {reply.text[:160]}"] += 1
        return reply.status_code

    def end(self) -> None:
        """End all, and delete the directory."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        shutil.rmtree(self._mounts[0] / self._name, ignore_errors=True)

    def faults(self) -> list[str]:
        """Lines of the processes' logs that tell of an error, but for those that the kills caused."""
        lines = [(log.name, line) for log in sorted(self._logs.iterdir()) for line in log.read_text().splitlines()]
        return [f"{name}: {line[:200]}" for name, line in lines if " ERROR " in line or "Traceback" in line]


class Reader(threading.Thread):
    """Follows `latest` at one API, and compares what it names."""

    def __init__(self, hosts: Hosts, host: int) -> None:
        super().__init__(daemon=True)
        self._hosts, self._url = hosts, hosts.urls[host]
        self.seen: dict[int, float] = {}  # sequence -> when it was seen
        self.wrong = 0
        self.over = threading.Event()

    def run(self) -> None:
        """Until `over`."""
        etag = ""
        while not self.over.is_set():
            with contextlib.suppress(httpx.TransportError):
                asked = {"If-None-Match": etag} if etag else {}
                reply = httpx.get(f"{self._url}/drafter/latest", params={"wait": 5}, headers=asked, timeout=40)
                if reply.status_code == 200:
                    etag, manifest = reply.headers["etag"], reply.json()
                    self.seen[manifest["sequence"]] = time.monotonic()
                    self._compare(manifest)
                elif reply.status_code not in (304, 404):
                    self._hosts.troubles[f"GET /drafter/latest: {reply.status_code} {reply.text[:160]}"] += 1
            for path in READ:
                self._hosts.ask("GET", self._url + path)

    def _compare(self, manifest: dict[str, Any]) -> None:
        for file in manifest["files"]:
            reply = httpx.get(f"{self._url}/drafter/{manifest['version']}/{file['name']}", timeout=40)
            right = reply.status_code == 200 and hashlib.sha256(reply.content).hexdigest() == file["sha256"]
            self.wrong += reply.status_code != 404 and not right


def wait(condition: Callable[[], bool], what: str) -> None:
    """Ask until it holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.1)


def queue(hosts: Hosts, world: World, number: int) -> str:
    """Send a batch to one API, then to the other, until one acknowledges it; returns its id."""
    body = world.rollout_file(f"batch {number}")
    for turn in range(200):
        with contextlib.suppress(httpx.TransportError):
            url = f"{hosts.urls[(number + turn) % 2]}/rollouts?run={RUN}"
            reply = httpx.post(url, content=body, headers=HEADERS, timeout=40)
            if reply.status_code in (200, 202):
                return str(reply.json()["batch_id"])
            hosts.troubles[f"POST /rollouts: {reply.status_code} {reply.text[:160]}"] += 1
        time.sleep(0.1)
    raise SystemExit("no API took the batch")


def drive(hosts: Hosts, batches: int) -> list[str]:
    """Send everything, and move the worker from host to host meanwhile; returns the batches that were acknowledged."""
    world, sent = World(), list[str]()
    file = world.run_file(drafter=world.drafter())
    known = f"{hosts.urls[1]}/runs/{RUN}"
    wait(lambda: hosts.ask("GET", known) == 404, "the second API knows no run")  # its client may remember that
    put = hosts.ask("PUT", f"{hosts.urls[0]}/runs/{RUN}", expected=(200, 201), content=file, headers=HEADERS)
    if put != 201:
        raise SystemExit(f"the run was not registered: {put} {[*hosts.troubles]}")
    print(f"a run of one API is known to the other after {heard(lambda: hosts.ask('GET', known) == 200):.2f} s")
    hosts.ask("PUT", known, expected=(200, 201), content=file, headers=HEADERS)  # it finds what the first made
    hosts.start("worker", 1, "worker, then killed")
    asleep = threading.Timer(
        ASLEEP_SECONDS, lambda: hosts.processes["worker, then stopped"].send_signal(signal.SIGCONT)
    )
    for number in range(batches):
        sent.append(queue(hosts, world, number))
        if number % 7 == 3:
            world.heads[number] = world.heads[0] * (1.0 + 0.001 * number)
            head = f"{hosts.urls[number % 2]}/runs/{RUN}/head"
            hosts.ask("PUT", head, expected=(200, 201), content=world.head_file(number), headers=HEADERS)
        if number == batches // 3:
            hosts.processes["worker, then killed"].kill()
            hosts.start("worker", 0, "worker, then stopped")
        if number == 2 * batches // 3:
            hosts.processes["worker, then stopped"].send_signal(signal.SIGSTOP)
            asleep.start()
            hosts.start("worker", 1, "last worker")
        time.sleep(0.2)
    asleep.join()
    return sent


def states(hosts: Hosts, sent: list[str]) -> Counter[str]:
    """What became of the batches; 'lost': nobody knows it."""
    replies = [httpx.get(f"{hosts.urls[0]}/rollouts/{batch}?run={RUN}", timeout=40) for batch in sent]
    return Counter(reply.json()["state"] if reply.status_code == 200 else "lost" for reply in replies)


def heard(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    wait(condition, "the other API has heard of it")
    return time.monotonic() - began


def paused(hosts: Hosts) -> float:
    """Seconds until one API knows that a run was paused at the other."""
    first, second = (f"{url}/runs/{RUN}" for url in hosts.urls)
    httpx.patch(first, json={"state": "paused", "reason": "trial"}, timeout=40).raise_for_status()
    return heard(lambda: httpx.get(second, timeout=40).json()["state"] == "paused")


def rolled_back(hosts: Hosts, reader: Reader) -> list[float]:
    """Seconds from the answer to a rollback at one API until a long poll at the other has it, twice."""
    found = []
    for version in httpx.get(f"{hosts.urls[1]}/drafters?run={RUN}").json()["versions"][:2]:
        name = version if isinstance(version, str) else version["version"]
        reply = httpx.post(f"{hosts.urls[1]}/drafter/{name}/rollback?run={RUN}", json={"reason": "trial"}, timeout=40)
        reply.raise_for_status()
        moved, sequence = time.monotonic(), reply.json()["sequence"]
        wait(lambda sequence=sequence: sequence in reader.seen, "the other API serves it")  # type: ignore[misc]
        found.append(max(0.0, reader.seen[sequence] - moved))
    return found


def main() -> None:
    """Print what was acknowledged, trained, lost, seen late and answered wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path, help="a mount of the shared volume")
    parser.add_argument("second", type=Path, help="another mount of the same volume, or the same one")
    parser.add_argument("--batches", type=int, default=60)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        valkey = OwnValkey(Path(place) / "valkey")
        valkey.start()
        stack.callback(valkey.stop)
        (logs := Path(place) / "logs").mkdir()
        hosts = Hosts((asked.first, asked.second), valkey.url, logs)
        stack.callback(hosts.end)
        readers = [Reader(hosts, host) for host in (0, 1)]
        for reader in readers:
            reader.start()
        sent = drive(hosts, asked.batches)
        wait(lambda: not states(hosts, sent)["queued"], "all batches are worked on")
        fates = states(hosts, sent)
        print(f"acknowledged {len(sent)}: {', '.join(f'{n} {state}' for state, n in fates.items())}")
        late = rolled_back(hosts, readers[0])
        print(
            f"versions published and moved to: {max(readers[0].seen)}; seen at the APIs: "
            f"{len(readers[0].seen)} and {len(readers[1].seen)}; files that were wrong: {sum(r.wrong for r in readers)}"
        )
        print("a rollback at one API is served by the other after " + ", ".join(f"{s:.2f} s" for s in late))
        print(f"a pause at one API is known to the other after {paused(hosts):.2f} s")
        print(f"answers that were errors: {sum(hosts.troubles.values())}")
        before = hosts.troubles.copy()
        hosts.ask("DELETE", f"{hosts.urls[0]}/runs/{RUN}", expected=(202, 204))
        time.sleep(5.0)
        print(f"while the run is deleted: {sum((hosts.troubles - before).values())}")
        for trouble, times in hosts.troubles.most_common():
            print(f"  {times} x {trouble}")
        alive = [name for name, process in hosts.processes.items() if process.poll() is None]
        print(f"processes that live: {', '.join(alive)}")
        for reader in readers:
            reader.over.set()
        for fault in hosts.faults()[:10]:
            print(f"  {fault}")


if __name__ == "__main__":
    main()
