"""What each event costs the API as a run grows, and the exponent of it: 0 is flat, 1 grows with the run.

    python benchmarks/growth.py [--axes reports engines scores verdicts queued runs waiters reconnect] [--sizes N ...]

An event is what happens all the time: a report, one more score and a look at its chart, a verdict and a look, a scrape,
a publish, a post of rollouts. Each is done many times at several sizes of a made-up run. Printed for each size:

    CPU ms     of the API's process, all threads, per event (of this process for a publish); medians of five parts
    commands   of Redis, those inside scripts included; kB: what Redis sent
    exponent   slope of log(CPU) on log(size), with its 95 % interval, from the parts

CPU seconds change little when another process is busy; commands and kB do not at all. `--root`: the checkout whose
service is measured. `waiters`: real connections, each with a long poll, on one event loop in this process.
`reconnect`: a process of agents that are all cut off, and a second later connect in one instant, five times. Meanwhile
this process sends a probe each 10 ms, whether the last is answered or not. On a busy machine read the API's CPU until
a probe's answer: it is how long the probe would have waited if the API had had a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import redis

ROOT = Path(sys.argv[sys.argv.index("--root") + 1] if "--root" in sys.argv else __file__).resolve()
ROOT = ROOT if ROOT.is_dir() else ROOT.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # fixtures that an older checkout lacks

from helpers.service.service_fixtures import HEADERS, publish, rollout_file, run_file  # noqa: E402
from helpers.service.valkey_fixtures import OwnValkey  # noqa: E402
from helpers.worker.record_fixtures import score  # noqa: E402 - after the path is set

from service.monitor.events import GateEvidence, Refused  # noqa: E402
from service.storage.layout import Layout  # noqa: E402
from service.storage.registry import Registry  # noqa: E402
from service.storage.reports.store import Store  # noqa: E402

_PARTS: Final = 5


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads, to the nanosecond where the kernel says so."""
    with contextlib.suppress(OSError):
        return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> str:
    """Slope of log cost on log size, and half of its 95 % interval (normal: a part is a point)."""
    x, y = [math.log(size) for size in sizes], [math.log(max(cost, 1e-6)) for cost in costs]
    slope, intercept = statistics.linear_regression(x, y)
    if len(x) < 5:
        return f"{slope:.2f}"
    rest = math.fsum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    error = math.sqrt(rest / math.fsum((a - statistics.fmean(x)) ** 2 for a in x))
    return f"{slope:.2f} ± {1.96 * error:.2f}"


class World:
    """A service of its own, with a run that is made larger."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self._valkey = OwnValkey(self.state)
        self._valkey.start()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")}
        environment |= {"DRAFTALIGN_STATE_DIR": str(self.state), "DRAFTALIGN_REDIS_URL": self._valkey.url}
        environment |= {"DRAFTALIGN_PORT": str(self.port), "DRAFTALIGN_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
        environment |= {"DRAFTALIGN_MAX_RUNS": "10000"}
        self._api = subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], env=environment, cwd=ROOT)
        self.pid = self._api.pid
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        while not self._answers():
            time.sleep(0.1)
        self.redis = redis.Redis.from_url(self._valkey.url)
        self.registry = Registry(Layout(self.state))
        self.begin("default")
        self.drafter = publish(self.registry).version
        self.store, self.scored, self.reported = Store(self.redis, "default"), 0, 0
        self._etags: dict[str, str] = {}

    def close(self) -> None:
        """Stop what was started."""
        self.client.close()
        self._api.terminate()
        self._api.wait()
        self._valkey.stop()

    def begin(self, run: str) -> None:
        """Register a run."""
        self.client.put(f"/runs/{run}", content=run_file(), headers=HEADERS).raise_for_status()

    def score(self, run: str = "default") -> None:
        """One more batch is scored, by five drafters; eight batches have one policy version."""
        self.scored += 1
        sums = {"tokens": 300.0, "rounds": 100.0, "rollouts": 8.0, "tokens_squared": 12000.0, "rounds_squared": 1300.0}
        sums["tokens_rounds"] = 3900.0
        replayed = {
            "version": self.drafter,
            "sums": sums,
            "accepted": [80.0, 60.0, 40.0],
            "reached": [99.0, 80.0, 60.0],
        }
        fields: dict[str, Any] = dict.fromkeys(("served", "candidate", "frozen", "ngram", "best"), sums)
        fields |= {"entry_id": f"{1_700_000_000_000 + 1000 * self.scored}-0", "policy_version": self.scored // 8}
        fields |= {"drafter_version": self.drafter, "best_version": self.drafter, "rollouts": 8, "tokens": 2000}
        fields |= {
            "created": 1.7e9 + self.scored,
            "replayed": [replayed],
            "logprob_sum": -900.5,
            "logprob_tokens": 2000,
        }
        store = self.store if run == "default" else Store(self.redis, run)
        store.put_score(f"{self.scored:032x}", score(fields))

    def report(self, engine: int, policy: int) -> None:
        """An engine reports."""
        self.reported += 1
        self.client.post("/acceptance", json=report(engine, policy, self.drafter)).raise_for_status()

    def verdict(self) -> None:
        """The gate refuses a candidate."""
        gate = GateEvidence(gain=0.0041, low=-0.0123, high=0.0205, rollouts=64)
        self.registry.history.record("default", Refused(reason="no gain that is beyond chance", gate=gate))

    def look(self, path: str) -> None:
        """As a page or a scraper that has the last answer."""
        reply = self.client.get(path, headers={"If-None-Match": self._etags.get(path, "")})
        assert reply.status_code in (200, 304), reply.text
        self._etags[path] = reply.headers.get("etag", "")

    def _answers(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False


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


class Table:
    """Costs by size of one axis, and the exponents of them."""

    def __init__(self, axis: str) -> None:
        self._axis = axis
        self._rows: dict[str, list[tuple[float, list[float], float, float]]] = {}

    def measure(self, size: float, world: World, events: Mapping[str, Callable[[], object]], times: int) -> None:
        """Do each event so many times in `_PARTS` parts, after one that is not measured."""
        for name, event in events.items():
            pid = os.getpid() if name == "publish" else world.pid
            event()
            event()
            parts, before = [], traffic(world.redis)
            for _ in range(_PARTS):
                begun = cpu_seconds(pid)
                for _ in range(max(1, times // _PARTS)):
                    event()
                parts.append(1000 * (cpu_seconds(pid) - begun) / max(1, times // _PARTS))
            after, number = traffic(world.redis), _PARTS * max(1, times // _PARTS)
            commands, sent = (b - a for a, b in zip(before, after, strict=True))
            row = (size, parts, commands / number, sent / number / 1000)
            self._rows.setdefault(name, []).append(row)

    def show(self) -> None:
        """Print it in Markdown."""
        sizes = [size for size, *_ in next(iter(self._rows.values()))]
        print(f"\n| {self._axis} | {' | '.join(f'{size:,.0f}' for size in sizes)} | exponent |")
        print(f"|---|{'---|' * len(sizes)}---|")
        for name, rows in self._rows.items():
            _, costs, commands, sent = zip(*rows, strict=True)
            points = [(size, cost) for size, parts, *_ in rows for cost in parts]
            slope = exponent([size for size, _ in points], [cost for _, cost in points])
            print(f"| {name}, CPU ms | {' | '.join(f'{statistics.median(c):.1f}' for c in costs)} | {slope} |")
            counts = " | ".join(f"{c:.0f} ({k:.0f})" for c, k in zip(commands, sent, strict=True))
            print(f"| … commands (kB) | {counts} | |")
        sys.stdout.flush()


def traffic(client: Any) -> tuple[float, float]:
    """Commands that Redis has done, those in scripts included, and bytes that it has sent."""
    done = sum(stats["calls"] for stats in client.info("commandstats").values())
    return done, client.info("stats")["total_net_output_bytes"]


def reports(world: World, sizes: Sequence[int]) -> None:
    """Records that ten engines wrote before: engines times policy versions."""
    table = Table("acceptance records, 10 engines")
    policy = 0
    for size in sizes:
        while world.reported < size:
            world.report(world.reported % 10, policy := policy + (world.reported % 10 == 0))
        table.measure(size, world, {"POST /acceptance": lambda: world.report(0, policy)}, 100)
    table.show()


def engines(world: World, sizes: Sequence[int]) -> None:
    """Engines, with three policy versions each."""
    table, known = Table("engines"), 0
    for size in sizes:
        for policy in range(3):
            for engine in range(known, size):
                world.report(engine, policy)
        known, number = size, itertools.cycle(range(size))

        def one(path: str = "", number: Iterator[int] = number) -> None:
            world.report(next(number), 3)
            if path:
                world.look(path)

        events = {"POST /acceptance": one}
        events |= {f"a report and {path}": functools.partial(one, path) for path in ("/alpha", "/metrics")}
        table.measure(size, world, events, 20)
    table.show()


def scores(world: World, sizes: Sequence[int]) -> None:
    """Batches that were scored before."""
    table = Table("scored batches")
    for path in ("/alpha", "/metrics"):
        world.look(path)
    memory = []
    for size in sizes:
        while world.scored < size:
            world.score()
            if world.scored % 64 == 0:  # as a page that is open all the time
                world.look("/alpha")

        def one(path: str) -> None:
            world.score()
            world.look(path)

        pages = ("/alpha", "/metrics")
        events = {f"a score and {path}": functools.partial(one, path) for path in pages}
        events |= {f"{path}, nothing new": functools.partial(world.look, path) for path in pages}
        table.measure(size, world, events, 20)
        memory.append(memory_mib(world.pid))
    table.show()
    said = ", ".join(f"{mib:.1f} at {size:,}" for mib, size in zip(memory, sizes, strict=True))
    print(f"\nAnonymous memory of the API, MiB: {said}")


def verdicts(world: World, sizes: Sequence[int]) -> None:
    """Lines in the run's history."""
    table, known = Table("verdicts"), 0
    for size in sizes:
        for _ in range(known, size):
            world.verdict()
        known = size

        def one(path: str) -> None:
            world.verdict()
            world.look(path)

        pages = ("/alpha", "/metrics", "/drafters")
        events: dict[str, Callable[[], object]] = {
            f"a verdict and {path}": functools.partial(one, path) for path in pages
        }
        events["publish"] = lambda: publish(world.registry, content=f"{time.time_ns()}".encode())
        table.measure(size, world, events, 10)
        world.registry.prune("default", 4)
    table.show()


def queued(world: World, sizes: Sequence[int]) -> None:
    """Batches that wait in the queue."""
    table, known = Table("queued batches"), 0

    def post() -> None:
        nonlocal known
        known += 1
        body = rollout_file((f"r{known}a", f"r{known}b"))
        world.client.post("/rollouts", content=body, headers=HEADERS).raise_for_status()

    for size in sizes:
        while known < size:
            post()
        table.measure(size, world, {"POST /rollouts": post}, 50)
    table.show()


def runs(world: World, sizes: Sequence[int]) -> None:
    """Runs, with 32 scored batches each. A worker that lives gives a sign of life for each between two scrapes."""
    table, known = Table("runs"), 0
    for size in sizes:
        for number in range(known, size):
            world.begin(f"r{number}")
            for _ in range(32):
                world.score(f"r{number}")
        known = size

        def one(path: str) -> None:
            world.score("r0")
            world.look(path)

        def alive(stores: Sequence[Store]) -> None:
            for store in stores:
                store.set_worker()
            world.look("/metrics")

        stores = [Store(world.redis, f"r{number}") for number in range(size)]
        events: dict[str, Callable[[], object]] = {
            "a score in one and /metrics": lambda: one("/metrics"),
            "/metrics, signs of life": functools.partial(alive, stores),
            "/metrics, nothing new": lambda: world.look("/metrics"),
            "/runs, nothing new": lambda: world.look("/runs"),
        }
        table.measure(size, world, events, 20)
    table.show()


def waiters(world: World, sizes: Sequence[int]) -> None:
    """Agents that wait for the next drafter."""
    rows = []
    for size in sizes:
        rows.append(asyncio.run(_wait(world, size)))
    print(f"\n| waiting agents | {' | '.join(f'{size:,}' for size in sizes)} | exponent |")
    print(f"|---|{'---|' * len(sizes)}---|")
    names = [
        *("idle, % of a core", "publish to the last answer, ms", "CPU ms of it per agent"),
        *("longest /healthz meanwhile, ms", "median /healthz while all connect, ms", "longest of these, ms"),
    ]
    for name, *costs in zip(names, *rows, strict=True):
        print(
            f"| {name} | {' | '.join(f'{c:.2f}' if c < 10 else f'{c:.0f}' for c in costs)} | {exponent(sizes, costs)} |"
        )


async def _wait(world: World, size: int) -> tuple[float, ...]:
    etag = world.client.get("/drafter/latest").headers["etag"]
    probes: list[float] = []
    stop = threading.Event()
    probing = threading.Thread(target=_probe, args=(world.port, probes, stop))  # not on the agents' event loop
    probing.start()
    links = await asyncio.gather(*(_ask(world.port, etag) for _ in range(size)))
    await asyncio.sleep(2.0 + size / 250)  # on a busy machine the service takes so long for all of them
    while len(probes) < 3:  # noqa: ASYNC110 - a thread fills it
        await asyncio.sleep(0.1)
    connecting = list(probes)
    begun = cpu_seconds(world.pid)
    await asyncio.sleep(4.0)
    idle = 100 * (cpu_seconds(world.pid) - begun) / 4.0
    probes.clear()
    begun = cpu_seconds(world.pid)
    manifest = await asyncio.to_thread(publish, world.registry, "default", f"{size} {time.time()}".encode())
    published = time.perf_counter()
    answers = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in links))
    took = time.perf_counter() - published
    assert all(b" 200 " in answer and manifest.version.encode() in answer for answer in answers)
    await asyncio.sleep(0.3)
    each = 1000 * (cpu_seconds(world.pid) - begun) / size
    stop.set()
    await asyncio.to_thread(probing.join)
    for _, writer in links:
        writer.close()
    await asyncio.sleep(0.5)
    return idle, 1000 * took, each, max(probes), statistics.median(connecting), max(connecting)


def reconnect(world: World, sizes: Sequence[int]) -> None:
    """Agents that come back together, while probes are sent."""
    names = [f"{name}, ms" for path in _PROBED for name in (f"{path}: median", "99 % within", "longest", *_OF_CPU)]
    rows = [_reconnect(world, size) for size in sizes]
    print(f"\n| agents that connect in one instant | {' | '.join(f'{size:,}' for size in sizes)} |")
    print(f"|---|{'---|' * len(sizes)}")
    for name, *costs in zip(names, *rows, strict=True):
        print(f"| {name} | {' | '.join(f'{c:.1f}' if c < 10 else f'{c:.0f}' for c in costs)} |")


_PROBED: Final = ("/healthz", "/readyz")
_OF_CPU: Final = ("CPU of the API until the answer: median", "99 %", "most")


def _reconnect(world: World, size: int) -> list[float]:
    etag = world.client.get("/drafter/latest").headers["etag"]
    here, there = multiprocessing.Pipe()
    agents = multiprocessing.get_context("fork").Process(target=_agents, args=(world.port, etag, size, there))
    agents.start()
    found = []
    for path in _PROBED:
        answers: list[tuple[float, float]] = []
        for _ in range(5):
            here.send("again")
            here.recv()  # they are away
            time.sleep(1.0)
            here.send("connect")
            answers += asyncio.run(_probes(world, path, 1.0))
            here.recv()  # all have asked
            time.sleep(1.0)
        for values in zip(*answers, strict=True):
            found += [statistics.median(values), float(np.quantile(values, 0.99)), max(values)]
    here.send("end")
    agents.join()
    return found


def _agents(port: int, etag: str, size: int, control: Any) -> None:
    """A process of agents, as they are told: end what they have, connect all at once, wait for a drafter."""
    links: list[socket.socket] = []
    asked = f"GET /drafter/latest?wait=60 HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: {etag}\r\n\r\n".encode()
    while control.recv() == "again":
        for link in links:
            link.close()
        control.send("away")
        control.recv()
        links = [socket.socket() for _ in range(size)]
        with selectors.DefaultSelector() as open_now:
            for link in links:
                link.setblocking(False)
                link.connect_ex(("127.0.0.1", port))
                open_now.register(link, selectors.EVENT_WRITE)
            while open_now.get_map():
                for key, _ in open_now.select():
                    open_now.unregister(key.fileobj)
                    key.fileobj.send(asked)  # type: ignore[union-attr]
        control.send("asked")


async def _probes(world: World, path: str, seconds: float) -> list[tuple[float, float]]:
    """Of each probe: milliseconds until its answer, and milliseconds of the API's CPU."""
    clock = (~world.pid << 3) | 2  # clock_getcpuclockid(3) of another process

    async def one() -> tuple[float, float]:
        begun, spent = time.perf_counter(), time.clock_gettime(clock)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        writer.close()
        return 1000 * (time.perf_counter() - begun), 1000 * (time.clock_gettime(clock) - spent)

    probes, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        probes.append(asyncio.create_task(one()))
        await asyncio.sleep(0.01)
    return list(await asyncio.gather(*probes))


async def _ask(port: int, etag: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /drafter/latest?wait=60 HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: {etag}\r\n\r\n".encode())
    return reader, writer


def _probe(port: int, milliseconds: list[float], stop: threading.Event) -> None:
    """Ask /healthz on a new connection each time, as a kubelet does; ten times a second."""
    while not stop.wait(0.1):
        begun = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
            link.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            while link.recv(4096):
                pass
        milliseconds.append(1000 * (time.perf_counter() - begun))


AXES: Final[dict[str, tuple[Callable[[World, Sequence[int]], None], tuple[int, ...]]]] = {
    "reports": (reports, (100, 1000, 10_000)),
    "engines": (engines, (10, 50, 250)),
    "scores": (scores, (256, 1024, 4096)),
    "verdicts": (verdicts, (500, 2000, 5000)),
    "queued": (queued, (30, 300, 1500)),
    "runs": (runs, (1, 10, 100)),
    "waiters": (waiters, (100, 300, 1000, 3000)),
    "reconnect": (reconnect, (100, 300, 1000)),
}


def main() -> None:
    """Print a table for each axis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--root", type=Path, help="checkout whose service is measured; by default this one")
    parser.add_argument("--sizes", type=int, nargs="+", help="instead of an axis's own; two at least")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in args.axes:
        axis, sizes = AXES[name]
        with tempfile.TemporaryDirectory() as directory:
            world = World(Path(directory))
            try:
                axis(world, args.sizes or sizes)
            finally:
                world.close()


if __name__ == "__main__":
    main()
