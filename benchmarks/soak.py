"""Does the service stay as it is under load? A real `draftalign up`, a steady sender, and what each process holds.

    python -m benchmarks.soak --minutes 60 --rate 640 [--tokens 200] [--json soak.json] [--plot soak.png]
    python -m benchmarks.soak --bounded                                     all that is bounded is full after minutes
    python -m benchmarks.soak --table soak.json --plot soak.png             draw and judge a run that was kept

`--rate` rollouts a minute come in files of 8 rollouts of `--tokens` tokens, on a clock: a POST that is late counts from
when it was due. Beside them one reader asks for /metrics, /alpha and /drafters every 5 s, and an engine reports. Every
2 s each process's resident memory and descriptors are read, Redis' memory, and the bytes under the state directory.

What is kept of ended batches (scores of 4,608; `remembered_bytes` in Redis) takes an hour and half a day to be full at
640 a minute, and grows until then; of policy versions 4,096 are kept. `--bounded` shows what comes after: each file is
of a policy version of its own, on which the engine reports, and 4 MiB are remembered. Before the clock starts, 5,000
small ones are sent as fast as the worker takes them, so all of this is full at any `--rate`.

The rule. The first quarter of the run (two minutes at least) is warm-up. The rest is cut into ten blocks; a line is
fitted to their means, with a 95 % t-interval of its slope (8 degrees of freedom). Blocks, because readings that are
seconds apart are not independent. The tolerance an hour is 5 % of the level, and at least 1 MiB, 1 descriptor, 10 ms
or 10 batches, so that a p50 of 5 ms is not asked to hold within 0.25 ms:
    flat         the slope's whole interval lies within the tolerance
    grows        the whole interval lies above it
    falls        the whole interval lies below it
    not settled  anything else: the run was too short, or too unsteady, to say
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import redis

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from helpers.worker.worker_fixtures import DRAFT, World  # noqa: E402 - after the path is set

from rl_hooks.wire import CONTENT_TYPE  # noqa: E402
from service.cli.valkey import EmbeddedValkey  # noqa: E402
from service.storage.queue.rollout_queue import COUNTERS, counts  # noqa: E402

ROLLOUTS: Final = 8
#: Tokens of the rollouts of a file that fills a bound. As many as in the files that come later: what is kept of a batch
#: grows with its rollouts and prompts, not with their tokens.
_LENGTHS_TO_FILL: Final = (10,) * ROLLOUTS
_REMEMBERED_BOUNDED: Final = 4 * 2**20
#: More than any bound holds: 4,608 scores, 4,096 policy versions, some 3,000 files remembered in 4 MiB.
_FILES_TO_FILL: Final = 5000
_QUEUED_WHILE_FILLING: Final = 256
_STUCK_SECONDS: Final = 300.0
BLOCKS: Final = 10
#: 97.5 % point of Student's t with BLOCKS - 2 degrees of freedom.
T_8: Final = 2.306
TOLERANCE: Final = 0.05
#: What an hour may change by, whatever the level: less than an operator would see in a day. By the reading's unit.
LEAST_TOLERANCE: Final = {"MiB": 1.0, "descriptors": 1.0, "ms": 10.0, "batches": 10.0}
_SAMPLE_SECONDS: Final = 2.0
_REPORT_SECONDS: Final = 5.0
_BATCHES_PER_POLICY: Final = 8


@dataclass
class Recording:
    """What was seen: `posts` are (due, seconds until the answer, status), `samples` one table of readings each."""

    rate: float
    minutes: float
    tokens: int
    posts: list[tuple[float, float, int]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)  # bytes in Redis in the end, by kind of key
    bounded: bool = False
    filled: int = 0  # files that were sent before the clock started

    @property
    def file_seconds(self) -> float:
        """From one file to the next."""
        return 60.0 * ROLLOUTS / self.rate


@dataclass(frozen=True)
class Trend:
    """One series after the warm-up, in its own unit: mean, growth an hour with the interval's ends, highest value."""

    level: float
    slope: float
    low: float
    high: float
    most: float = math.nan
    least_tolerance: float = 0.0

    @property
    def verdict(self) -> str:
        """The rule of this module."""
        bound = max(TOLERANCE * abs(self.level), self.least_tolerance)
        if -bound <= self.low and self.high <= bound:
            return "flat"
        return "grows" if self.low > bound else "falls" if self.high < -bound else "not settled"


def trend(hours: Sequence[float], values: Sequence[float], unit: str = "") -> Trend:
    """Fit a line to the means of ten blocks; `hours` are since the start, warm-up left out by the caller.

    `unit` is a key of `LEAST_TOLERANCE`, or one for which the tolerance is a share of the level alone.
    """
    first, last = hours[0], hours[-1]
    blocks: list[list[tuple[float, float]]] = [[] for _ in range(BLOCKS)]
    for hour, value in zip(hours, values, strict=True):
        blocks[min(BLOCKS - 1, int(BLOCKS * (hour - first) / (last - first)))].append((hour, value))
    if not all(blocks):
        raise ValueError(f"expected a reading in each of {BLOCKS} blocks; run longer")
    means = [(statistics.fmean(x for x, _ in b), statistics.fmean(y for _, y in b)) for b in blocks]
    slope, level = statistics.linear_regression([x for x, _ in means], [y for _, y in means])
    middle = statistics.fmean(x for x, _ in means)
    left = sum((y - level - slope * x) ** 2 for x, y in means) / (BLOCKS - 2)
    error = math.sqrt(left / sum((x - middle) ** 2 for x, _ in means))
    return Trend(
        statistics.fmean(y for _, y in means),
        slope,
        slope - T_8 * error,
        slope + T_8 * error,
        max(values),
        LEAST_TOLERANCE.get(unit, 0.0),
    )


def warm_up_seconds(seconds: float) -> float:
    """How much of a run of this length is left out."""
    return min(max(seconds / 4, 120.0), seconds / 2)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# --- what is running


def processes(root: int) -> dict[str, int]:
    """Names and ids of `up` and all that it started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, waiting = {"up": root}, [root]
    while waiting:
        pid = waiting.pop()
        children = [child for child, parent in parents.items() if parent == pid]
        waiting += children
        for child in children:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                names = {b"valkey-server": "valkey", b"serve\0": "api", b"worker\0": "worker"}
                found |= {name: child for mark, name in names.items() if mark in command}
    return found


def reading(pids: Mapping[str, int], client: Any, state: Path) -> dict[str, float]:
    """Memory in MiB and descriptors of each process, Redis' memory in MiB, MiB on disk by part, batches queued."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[f"{name} MiB"] = int(status["VmRSS"].split()[0]) / 1024
            found[f"{name} descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            found[f"{name} pid"] = pid
    found["redis MiB"] = client.info("memory")["used_memory"] / 2**20
    found["queued batches"] = client.xlen("da:{default}:queue")
    for part in ("valkey", "spool", "runs"):
        total = 0
        for folder, _, names in os.walk(state / part):
            for file in names:
                with contextlib.suppress(OSError):
                    total += (Path(folder) / file).stat().st_size
        found[f"disk {part} MiB"] = total / 2**20
    return found


@contextlib.contextmanager
def service(place: Path, settings: Mapping[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `draftalign up` with settings for so small a policy and these, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "service.cli", "up", "--state-dir", str(place / "state"), "--port", str(port)]
    tiny = {"DRAFTALIGN_VOCAB_MIN_TOKENS": "2000", "DRAFTALIGN_DRAFT_VOCAB_SIZE": str(DRAFT)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")} | tiny | dict(settings or {})
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(90)


def ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until it takes rollouts."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the service did not become ready")


def bodies(recording: Recording, first: int, lengths: Sequence[int]) -> Iterator[bytes]:
    """The files, from this number on: rollouts of these many tokens."""
    world = World()
    for number in itertools.count(first):
        version = number // (1 if recording.bounded else _BATCHES_PER_POLICY)
        yield world.rollout_file(f"batch-{number}", lengths=list(lengths), policy_version=version)


def post(client: httpx.Client, body: bytes) -> int:
    """The answer's status; 0 where none came."""
    with contextlib.suppress(httpx.HTTPError):
        answer = client.post("/rollouts?run=default", content=body, headers={"Content-Type": CONTENT_TYPE})
        return answer.status_code
    return 0


def fill(url: str, recording: Recording, queued: Callable[[], int]) -> None:
    """Send files, and a report with each, as fast as the worker takes them; return when it has taken all."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for body in itertools.islice(bodies(recording, 0, _LENGTHS_TO_FILL), _FILES_TO_FILL):
            _wait_for_queue(queued, _QUEUED_WHILE_FILLING - 1)
            if (status := post(client, body)) != 202:
                raise RuntimeError(f"expected 202 for file {recording.filled}, got {status}")
            recording.filled += 1
            report(client, recording.filled, 1.0)
    _wait_for_queue(queued, 0)


def _wait_for_queue(queued: Callable[[], int], most: int) -> None:
    deadline = time.monotonic() + _STUCK_SECONDS
    while (waiting := queued()) > most:
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected the worker to leave {most} batches at most, {waiting} wait: does it run?")
        time.sleep(0.05)


def send(url: str, recording: Recording, began: float) -> None:
    """Post files on a clock; each is made while the one before is due later."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        files = bodies(recording, recording.filled, [recording.tokens] * ROLLOUTS)
        for number, body in enumerate(files):
            due = number * recording.file_seconds
            if due >= 60 * recording.minutes:
                return
            time.sleep(max(0.0, began + due - time.monotonic()))
            status = post(client, body)
            recording.posts.append((due, time.monotonic() - began - due, status))


def read_along(url: str, stopped: threading.Event) -> None:
    """What a dashboard asks for, every 5 s."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        while not stopped.wait(5.0):
            with contextlib.suppress(httpx.HTTPError):
                for path in ("/metrics", "/alpha?run=default", "/drafters?run=default"):
                    client.get(path)


def report(client: httpx.Client, number: int, window_seconds: float) -> None:
    """What an engine reports the `number`th time: 1,000 rounds more, of the drafter that is served."""
    rounds = 1000 * number
    latest = client.get("/drafter/latest?run=default")
    if latest.status_code == 200:
        client.post(
            "/acceptance",
            json={
                "run": "default",
                "reporter": "soak engine",
                "engine": "http://engine:8000",
                "drafter_version": latest.json()["version"],
                "policy_version": None,
                "rounds": rounds,
                "accepted_tokens": rounds,
                "drafted_tokens": 4 * rounds,
                "accepted_per_position": [rounds, 0, 0, 0],
                "window_seconds": window_seconds,
            },
        ).raise_for_status()


def report_along(url: str, recording: Recording, stopped: threading.Event) -> None:
    """What an engine does: every 5 s, or once a file where each file is of another policy version."""
    every = recording.file_seconds if recording.bounded else _REPORT_SECONDS
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for number in itertools.count(recording.filled + 1):
            if stopped.wait(every):
                return
            with contextlib.suppress(httpx.HTTPError):
                report(client, number, every)


def soak(minutes: float, rate: float, tokens: int, *, bounded: bool = False) -> Recording:
    """Run it. `bounded`: with bounds that are reached within minutes."""
    recording = Recording(rate, minutes, tokens, bounded=bounded)
    # The draft vocabulary is found in fewer tokens than wait while the bounds are filled.
    full = {"DRAFTALIGN_REMEMBERED_BYTES": str(_REMEMBERED_BOUNDED), "DRAFTALIGN_VOCAB_MIN_TOKENS": "1000"}
    settings = full if bounded else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with service(place, settings) as (process, url):
            ready(url, process)
            headers = {"Content-Type": CONTENT_TYPE}
            httpx.put(f"{url}/runs/default", content=World().run_file(), headers=headers).raise_for_status()
            client = redis.Redis.from_url(EmbeddedValkey(place / "state").url, decode_responses=True)
            if bounded:
                fill(url, recording, lambda: int(client.xlen("da:{default}:queue")))
            began, stopped = time.monotonic(), threading.Event()
            threads = [
                threading.Thread(target=send, args=(url, recording, began)),
                threading.Thread(target=read_along, args=(url, stopped)),
                threading.Thread(target=report_along, args=(url, recording, stopped)),
            ]
            for thread in threads:
                thread.start()
            while threads[0].is_alive():
                sample = reading(processes(process.pid), client, place / "state")
                recording.samples.append({"seconds": time.monotonic() - began} | sample)
                threads[0].join(_SAMPLE_SECONDS)
            stopped.set()
            for thread in threads[1:]:
                thread.join()
            deadline = time.monotonic() + 120  # what is still queued has its turn
            while client.xlen("da:{default}:queue") and time.monotonic() < deadline:
                time.sleep(0.5)
            values = client.hmget("da:{default}:counters", COUNTERS)
            recording.ends = counts(values, client.get("da:{default}:held"))
            for key in client.scan_iter("da:{default}:*"):
                kind = key.removeprefix("da:{default}:").partition(":")[0]
                recording.keys[kind] = recording.keys.get(kind, 0) + (client.memory_usage(key) or 0)
            client.close()
    return recording


# --- what is said of it


def series(recording: Recording) -> dict[str, Trend]:
    """The trend of every reading after the warm-up."""
    first = warm_up_seconds(60 * recording.minutes)
    kept = [sample for sample in recording.samples if sample["seconds"] >= first]
    names = sorted({n for sample in kept for n in sample if n != "seconds" and not n.endswith(" pid")})
    hours = [sample["seconds"] / 3600 for sample in kept]
    found = {
        name: trend(hours, [sample.get(name, math.nan) for sample in kept], name.rpartition(" ")[2]) for name in names
    }
    late = [(due, 1000 * took) for due, took, _ in recording.posts if due >= first]
    return {f"POST p{share}, ms": trend(*_quantiles(late, share / 100), "ms") for share in (50, 99)} | found


def _quantiles(posts: Sequence[tuple[float, float]], share: float) -> tuple[list[float], list[float]]:
    """Hours and quantile of each tenth of (seconds, milliseconds), by time: what `trend` makes its blocks of."""
    first, span = posts[0][0], (posts[-1][0] - posts[0][0]) / BLOCKS
    blocks: list[list[float]] = [[] for _ in range(BLOCKS)]
    for due, took in posts:
        blocks[min(BLOCKS - 1, int((due - first) / span))].append(took)
    hours = [(first + number * span) / 3600 for number in range(BLOCKS)]
    return hours, [quantile(block, share) for block in blocks]


def table(recording: Recording) -> str:
    """The page's table, in Markdown."""
    seconds = [took for _, took, _ in recording.posts]
    refused = sum(status not in (200, 202) for _, _, status in recording.posts)
    rollouts = ROLLOUTS * len(recording.posts)
    pids = {name: {s[name] for s in recording.samples if name in s} for name in ("api pid", "worker pid", "valkey pid")}
    lines = [
        f"{recording.minutes:g} minutes, {recording.rate:g} rollouts a minute of {recording.tokens} tokens: "
        f"{len(recording.posts)} files, {rollouts} rollouts ({recording.filled} files before the clock started); "
        f"{refused} were not accepted; "
        f"{sum(max(0, len(found) - 1) for found in pids.values())} processes were restarted.",
        "",
        f"POST: p50 {1000 * quantile(seconds, 0.5):.0f} ms, p99 {1000 * quantile(seconds, 0.99):.0f} ms, "
        f"longest {1000 * max(seconds):.0f} ms. Batches in the end: {recording.ends}.",
        "",
        "| reading | mean | most | growth an hour (95 %) | verdict |",
        "|---|---|---|---|---|",
    ]
    for name, one in series(recording).items():
        lines.append(
            f"| {name} | {one.level:.1f} | {one.most:.1f} | {one.slope:+.1f} ({one.low:+.1f} to {one.high:+.1f}) "
            f"| {one.verdict} |"
        )
    kinds = sorted(recording.keys.items(), key=lambda kind: -kind[1])[:5]
    sent = rollouts + len(_LENGTHS_TO_FILL) * recording.filled
    lines += ["", "Redis, bytes a rollout: " + ", ".join(f"{kind} {size / sent:.0f}" for kind, size in kinds)]
    return "\n".join(lines)


def draw(recording: Recording, path: Path) -> None:
    """The page's plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    minutes = [sample["seconds"] / 60 for sample in recording.samples]
    groups = {
        "resident memory, MiB": [f"{name} MiB" for name in ("api", "worker", "valkey", "up")],
        "descriptors": [f"{name} descriptors" for name in ("api", "worker", "valkey")],
        "Redis' memory and disk, MiB": ["redis MiB", "disk valkey MiB", "disk runs MiB", "disk spool MiB"],
    }
    for axis, (title, names) in zip(axes.flat[1:], groups.items(), strict=True):
        for name in names:
            axis.plot(minutes, [sample.get(name, math.nan) for sample in recording.samples], label=name, lw=1)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    posts = axes.flat[0]
    posts.plot([due / 60 for due, _, _ in recording.posts], [1000 * took for _, took, _ in recording.posts], ".", ms=3)
    posts.set_yscale("log")
    posts.set_title("POST /rollouts, ms")
    for axis in axes[1]:
        axis.set_xlabel("minutes")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=640.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--bounded", action="store_true", help="fill all that is bounded before the clock starts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.table is not None:
        recording = Recording(**json.loads(args.table.read_text()))
    else:
        recording = soak(args.minutes, args.rate, args.tokens, bounded=args.bounded)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(recording)))
    print(table(recording))
    if args.plot is not None:
        draw(recording, args.plot)


if __name__ == "__main__":
    main()
