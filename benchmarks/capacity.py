"""Are the figures of `draftalign plan` right? A simulation of whole deployments, and a real service on two cores.

    python -m benchmarks.capacity [--deployments 30] [--plot docs/lab/capacity.png]   simulated; seeded; minutes
    python -m benchmarks.capacity --real 75                                           a real `draftalign up`
    python -m benchmarks.capacity --api                                               CPU of a real API by file size

Simulated, by events: ranks that make files, the hook's bounded queue (the shipped `JobQueue`), one sending thread each
with the shipped patience and `Retry-After`, a line each way, API cores, a run's bounded queue with its 429, a worker
that takes turns by the shipped `Turns`, passes claims over and cuts trainings by the shipped constants, and engines
that download. Tensors are simulated: a file is its size. Metadata is real: jobs, versions, limits and tokens. What a
GPU does is the plan's own count at its own rate, so GPU figures are compared as queueing, not as speed. The gate always
agrees; checkpoints, replays for the drift alarm and the draft vocabulary cost nothing.

Worlds. `even`: the plan's own (equal rollouts, files spread over a part of a step); `told`: all files at a step's end,
and the plan is told so. The plan is not told of: `burst` (all files at a step's end), `slow` (one worker GPU at half
its speed), `tail` (lognormal lengths with sigma 1, step times with sigma 0.3), `all` (these three together).
Deployments whose `hook` does not fit by the plan are left out. A drafter is published once a policy version and run.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.sending import delivery
from rl_hooks.sending.jobs import Job, JobQueue
from service.cli import plan as planned
from service.cli.plan import Deployment, Work, estimate
from service.monitor import controller
from service.settings import Settings
from service.worker import learner
from service.worker.process import Turns

ROOT: Final = Path(__file__).parent.parent
WORLDS: Final = ("even", "told", "burst", "slow", "tail", "all")
COMPARED: Final = ("busy", "trained", "queue", "lag", "api_cores", "wire")
_STEPS: Final = 12
_WARM: Final = 3
PATIENCE: Final = 120.0


class Line:
    """Something that serves one after the other, with `servers` servers."""

    def __init__(self, servers: int = 1) -> None:
        self.free = [0.0] * servers
        self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a piece of work that comes now is done."""
        done = max(now, heapq.heappop(self.free)) + seconds
        heapq.heappush(self.free, done)
        self.busy += seconds
        return done


@dataclass
class Run:
    """One run: its queue in the service."""

    name: str
    queue: deque[tuple[int, int, int]] = field(default_factory=deque)  # version, tokens, bytes
    held: int = 0  # bytes admitted and not acknowledged
    done: int = 0  # of them, bytes that the next checkpoint acknowledges
    peak: int = 0
    deferred: int = 0
    newest: int = -1
    made: dict[int, float] = field(default_factory=dict)  # version -> end of its generation
    trained_to: int | None = None  # the version that the candidate was trained to
    offered: int = -1  # the version of the last publish
    lags: list[float] = field(default_factory=list)  # seconds
    seen: int = -1
    trained: float = 0.0
    came: float = 0.0
    saved_at: float = -math.inf
    saving: bool = False
    ranks: list[Rank] = field(default_factory=list)
    published: int | None = None  # while engines download: -1, or the version that came meanwhile


@dataclass
class Rank:
    """A trainer's rank with the hook's own queue."""

    run: Run
    queue: JobQueue
    sending: bool = False
    dropped: int = 0
    made: int = 0
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)  # id of a job -> version, tokens


@dataclass
class Claim:
    """What the worker has in hand: tokens to train on, their version, bytes, and since when."""

    run: Run
    whole: int
    newest: int
    bytes: int
    began: float
    forced: bool  # it is trained whole
    start: float = 0.0  # of training
    seconds: float = 0.0  # that it takes whole


@dataclass
class Found:
    """What a simulation saw, by the plan's names; `refused`: share of posts answered 429; `dropped`: files by hooks."""

    facts: dict[str, float]
    refused: float
    dropped: float


class World:
    """One deployment, simulated."""

    def __init__(
        self, given: Deployment, settings: Settings, world: str, gpus: float, tflops: float, seed: int
    ) -> None:
        self.given, self.settings, self.world, self.gpus = given, settings, world, gpus
        self.rng = np.random.default_rng(seed)
        self.work = Work.of(given, settings, tflops)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.now = 0.0
        self.inward, self.outward = Line(), Line()
        self.cores = Line(
            max(1, math.ceil(estimate(given, settings, tflops=tflops, worker_gpus=gpus)["api_cores"].value))
        )
        self.rate = given.network_gbit * 1e9 / 8
        self.runs = [Run(f"run-{i}") for i in range(given.runs)]
        for run in self.runs:
            run.ranks = [Rank(run, JobQueue(planned.HOOK_BYTES)) for _ in range(given.ranks)]
        self.turns = Turns()
        self.by_name = {run.name: run for run in self.runs}
        self.posts = self.refused = 0
        self.bytes = 0
        self.worked = 0.0
        self.idle = True
        self.training: Claim | None = None
        self.tokens = planned.tokens_a_file(given)
        R = max(1, round(self.tokens / given.tokens))
        size = planned.file_bytes(given.drafter, R, given.tokens, given.dtype, given.prompt_share)
        self.a_token = size / (R * given.tokens)
        self.publish_bytes = planned.drafter_bytes(given.drafter)
        speed = 1.0
        if world in ("slow", "all"):  # one GPU of several at half speed: ranks wait for each other in each window
            speed = 0.5 if gpus <= 1 else 1 / (1 + 1 / gpus)
        self.speed = gpus * speed

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self.events, (when, next(self.order), act))

    def run(self) -> Found:
        """Simulate; the first steps are left out of shares."""
        end = _STEPS * self.given.step_seconds
        start = _WARM * self.given.step_seconds
        for run in self.runs:
            self.at(float(self.rng.uniform(0, self.given.step_seconds)), partial(self.step, run, 0))
        before: tuple[float, float, float] | None = None
        while self.events and self.events[0][0] < end:
            self.now, _, act = heapq.heappop(self.events)
            if before is None and self.now >= start:
                before = (self.worked, self.cores.busy, float(self.bytes))
                for run in self.runs:
                    run.peak, run.came, run.trained, run.lags = run.held, 0.0, 0.0, []
            act()
        worked, cores, sent = before or (0.0, 0.0, 0.0)
        seconds = end - start
        lags = [lag for run in self.runs for lag in run.lags]
        trained = sum(r.trained for r in self.runs) / max(1.0, sum(r.came for r in self.runs))
        polls = self.given.runs * self.given.engines * planned.REPORT_CPU / planned._REPORT_SECONDS
        facts = {
            "busy": min(1.0, (self.worked - worked) / seconds),
            "trained": min(1.0, trained),
            "queue": float(max(run.peak for run in self.runs)),
            "lag": statistics.fmean(lags) / self.given.step_seconds if lags else math.nan,
            "api_cores": (self.cores.busy - cores) / seconds + polls,
            "wire": (self.bytes - sent) * 8e-9 / seconds,
        }
        ranks = [rank for run in self.runs for rank in run.ranks]
        dropped = sum(rank.dropped for rank in ranks) / max(1, sum(rank.made for rank in ranks))
        return Found(facts, self.refused / max(1, self.posts), dropped)

    # --- the trainer
    def step(self, run: Run, version: int) -> None:
        """A step's generation ends; its files are made over a part of the next step."""
        run.made[version] = self.now
        tail = self.world in ("tail", "all")
        spread = 0.0 if self.world in ("burst", "all") else self.given.post_share * self.given.step_seconds
        W, sent = self.given.ranks, self.given.sent_tokens
        R = max(1, round(sent / self.given.tokens))
        for number, rank in enumerate(self.rng.permutation(W)[: min(R, W)]):  # who has most differs from step to step
            mine = R // W + (number < R % W)
            tokens = mine * sent / R
            if tail:  # lognormal lengths; the hook's cap holds
                lengths = self.rng.lognormal(-0.5, 1.0, mine) * sent / R
                tokens = min(float(lengths.sum()), float(planned.HOOK_TOKENS))
            files = max(1, round(tokens / self.tokens))
            for file, when in enumerate(self.rng.uniform(0, spread / files, files)):
                self.at(
                    self.now + spread * file / files + float(when),
                    partial(self.make, run.ranks[rank], version, max(1, int(tokens / files))),
                )
        wait = self.given.step_seconds * (float(self.rng.lognormal(-0.045, 0.3)) if tail else 1.0)
        self.at(self.now + wait, partial(self.step, run, version + 1))

    def make(self, rank: Rank, version: int, tokens: int) -> None:
        """The hook queues a file."""
        size = int(tokens * self.a_token)
        job = Job("POST", "/rollouts", list, size)
        rank.made += 1
        if size > rank.queue.limit_bytes:
            rank.dropped += 1
            return
        rank.versions[id(job)] = (version, tokens)
        rank.dropped += rank.queue.put(job)
        if not rank.sending:
            self.send(rank)

    def send(self, rank: Rank) -> None:
        """The hook's thread takes the oldest."""
        rank.sending = bool(rank.queue.waiting)
        if rank.sending:
            self.post(rank, rank.queue.take(), self.now, 0)

    def post(self, rank: Rank, job: Job, began: float, attempt: int) -> None:
        """Over the line, through the API; a full queue answers before the body comes (Expect: 100-continue)."""
        self.posts += 1
        if self.full(rank.run, job.size_bytes):
            answered = self.cores.serve(self.now, planned.POST_CPU)
            self.at(answered, partial(self.answer, rank, job, began, attempt, taken=False))
            return
        there = self.inward.serve(self.now, job.size_bytes / self.rate)
        cpu = planned.POST_CPU + job.size_bytes / planned.GIB * planned.INGEST_CPU
        stored = self.cores.serve(there - job.size_bytes / self.rate, cpu)
        self.at(max(there, stored), partial(self.answer, rank, job, began, attempt, taken=True))
        self.bytes += job.size_bytes

    def full(self, run: Run, size: int) -> bool:
        """What the enqueueing script decides."""
        return (
            run.held + size > (self.settings.queue_max_bytes or math.inf)
            or len(run.queue) >= self.settings.queue_max_items
        )

    def answer(self, rank: Rank, job: Job, began: float, attempt: int, *, taken: bool) -> None:
        """202, or 429 and the hook's pause."""
        run = rank.run
        if taken and not self.full(run, job.size_bytes):
            version, tokens = rank.versions.pop(id(job))
            run.queue.append((version, tokens, job.size_bytes))
            run.held += job.size_bytes
            run.peak = max(run.peak, run.held)
            run.came += tokens
            run.newest = max(run.newest, version)
            rank.queue.finish()
            self.send(rank)
            self.cut(run)
            self.wake()
            return
        self.refused += 1
        pause = min(max(self.settings.retry_after_seconds, 0.05), delivery._MAX_RETRY_AFTER_SECONDS)
        if self.now + pause - began > PATIENCE:
            rank.dropped += 1
            rank.queue.finish()
            self.send(rank)
            return
        self.at(self.now + pause, partial(self.post, rank, job, began, attempt + 1))

    # --- the worker
    def wake(self) -> None:
        """It looks, if it was idle."""
        if self.idle:
            self.idle = False
            self.turn()

    def turn(self) -> None:
        """One claim of the run whose turn it is: the first by the shipped order may always be asked."""
        waiting = self.turns.order([run.name for run in self.runs if run.queue])
        if waiting:
            self.claim(self.by_name[waiting[0]])
            return
        self.idle = True

    def claim(self, run: Run) -> None:
        """Take entries until the token budget is reached; score, judge, train."""
        taken, tokens = [], 0
        while run.queue and tokens < self.settings.claim_tokens:
            taken.append(run.queue.popleft())
            tokens += taken[-1][1]
        newest = max(version for version, _, _ in taken)
        newer = bool(run.queue) and run.newest > newest
        most = controller._MOST_DEFERRED
        behind = newer and run.deferred < most
        run.deferred = run.deferred + 1 if behind else 0
        whole = 0 if behind else sum(n for version, n, _ in taken if version == newest)
        share, rest = whole / self.given.sent_tokens, (tokens - whole) / self.given.sent_tokens
        scoring = (share * self.work.score + rest * self.work.passed_over) / self.speed
        claim = Claim(run, whole, newest, sum(b for _, _, b in taken), self.now, forced=newer)
        self.at(self.now + scoring, partial(self.judge, claim))

    def judge(self, claim: Claim) -> None:
        """What was trained before is judged on what was scored now, and published; then training begins."""
        run = claim.run
        if run.trained_to is not None and run.trained_to > run.offered:
            run.offered = run.trained_to
            self.publish(run, run.trained_to)
        claim.start = self.now
        claim.seconds = claim.whole / self.given.sent_tokens * self.work.train / self.speed
        self.training = claim
        self.at(self.now + claim.seconds, partial(self.trained, claim))
        self.cut(run)

    def cut(self, run: Run) -> None:
        """Training ends where rollouts of a newer policy wait, but an eighth is done, unless it was put off enough."""
        claim = self.training
        if claim is None or claim.run is not run or claim.forced or not run.queue or run.newest <= claim.newest:
            return
        claim.forced = True  # once
        self.at(max(self.now, claim.start + learner._LEAST_PART * claim.seconds), partial(self.trained, claim))

    def trained(self, claim: Claim) -> None:
        """The claim is done, as far as it got."""
        if claim is not self.training:  # it was cut before
            return
        self.training = None
        run, done = claim.run, min(1.0, (self.now - claim.start) / claim.seconds) if claim.whole else 0.0
        run.trained += claim.whole * done
        if done:
            run.trained_to = claim.newest
        run.done += claim.bytes
        if not run.saving:
            run.saving = True
            self.at(max(self.now, run.saved_at + self.settings.checkpoint_seconds), partial(self.save, run))
        self.worked += self.now - claim.began
        self.turns.asked(run.name, self.now - claim.began, at_work=True)
        self.turn()

    def save(self, run: Run) -> None:
        """A checkpoint: what was worked on is acknowledged, and its bytes leave the queue."""
        run.held -= run.done
        run.done, run.saved_at, run.saving = 0, self.now, False

    def publish(self, run: Run, version: int) -> None:
        """Every engine of the run downloads it; one that downloads takes the newest when it is done."""
        if not self.given.engines:
            return
        waits = run.published is not None
        run.published = version
        if not waits:
            self.download(run)

    def download(self, run: Run) -> None:
        """All engines of a run at once."""
        version, run.published = run.published, None
        if version is None:
            return
        run.published = -1
        done = self.outward.serve(self.now, self.given.engines * self.publish_bytes / self.rate)
        self.cores.busy += self.given.engines * planned.PUSH_CPU
        self.at(done, partial(self.arrived, run, version))

    def arrived(self, run: Run, version: int) -> None:
        """The engines have it."""
        for each in range(run.seen + 1, version + 1):
            if each in run.made:
                run.lags.append(self.now - run.made[each])
        run.seen = max(run.seen, version)
        if run.published == -1:
            run.published = None
        else:
            self.download(run)


def deployments(count: int, seed: int) -> Iterable[tuple[Deployment, float, int]]:
    """Random deployments, the worker GPUs of each, and its seed. Sizes are log-uniform up to the issue's."""
    rng = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    for number in range(count):
        policy = planned.POLICIES[("8b", "32b")[number % 2]]
        drafter = DrafterConfig.from_target(policy, (2, 18, 33), 32_000)
        ranks, runs = round(between(1, 1000)), round(between(1, 100))
        runs = min(runs, max(1, 1000 // ranks))
        given = Deployment(
            drafter,
            step_seconds=between(30, 400),
            rollouts=round(between(64, 8192)),
            tokens=round(between(512, 8192)),
            prompt_share=float(rng.uniform(0.05, 0.6)),
            sampled_share=between(0.05, 1.0),
            ranks=ranks,
            runs=runs,
            engines=round(between(1, 10_000) / runs) + 1,
            network_gbit=between(25, 400),
            dtype=("bfloat16", "float8_e4m3")[int(rng.integers(2))],
            post_share=float(rng.uniform(0.1, 0.5)),
        )
        most = 120 / planned.batches(given) / given.runs  # files a step of all runs, so that a world takes seconds
        given = replace(given, sampled_share=given.sampled_share * min(1.0, most))
        wanted = estimate(given, Settings())["worker_gpus"].value
        line = runs * given.sent_tokens * 40_960 / (given.network_gbit * 1e9 / 8)
        if line > given.step_seconds:  # more than the line: the trainer would be cut, plan says so at once
            given = replace(given, network_gbit=given.network_gbit * line / given.step_seconds * 2)
        late = estimate(given, Settings())["download"].load or 0.0
        given = replace(given, network_gbit=given.network_gbit * max(1.0, late / 1.5))  # as above
        yield given, wanted * between(0.4, 2.5), number


def compare(given: Deployment, gpus: float, seed: int, world: str) -> tuple[dict[str, float], Found]:
    """The plan's figures and the simulation's, the latter with a queue large enough to be measured."""
    settings = Settings(queue_max_bytes=1 << 50)
    if world == "told":
        given = replace(given, post_share=0.0)
    facts = estimate(given, settings, worker_gpus=gpus)
    found = World(given, settings, world, gpus, planned.GPU_TFLOPS, seed).run()
    return {name: facts[name].value for name in COMPARED}, found


def fits(given: Deployment) -> bool:
    """Whether the hooks can send all that they make, by the plan."""
    return (estimate(given, Settings())["hook"].load or 0.0) <= 1


def error(plan: float, true: float) -> float:
    """Relative error; of both next to nothing: none."""
    return abs(plan - true) / max(abs(true), 1e-12) if max(plan, true) > 1e-9 else 0.0


def report(count: int, seed: int) -> tuple[list[str], dict[str, list[tuple[Deployment, dict[str, float], Found]]]]:
    """The table of errors by world, and all rows."""
    rows: dict[str, list[tuple[Deployment, dict[str, float], Found]]] = {world: [] for world in WORLDS}
    for given, gpus, number in deployments(count, seed):
        for world in WORLDS:
            rows[world].append((given, *compare(given, gpus, seed * 1000 + number, world)))
    for world, found in rows.items():  # what the plan says loses rollouts on the way cannot be compared further
        rows[world] = [row for row in found if fits(replace(row[0], post_share=0.0) if world == "told" else row[0])]
    lines = [
        "| world | " + " | ".join(COMPARED) + " | deployments | refused | dropped |",
        "|---" * (len(COMPARED) + 4) + "|",
    ]
    for world, found in rows.items():
        cells = []
        for name in COMPARED:
            errors = [error(p[name], f.facts[name]) for _, p, f in found if not math.isnan(f.facts[name])]
            cells.append(f"{statistics.median(errors):.0%}, {np.quantile(errors, 0.9):.0%}, {max(errors):.0%}")
        refused = statistics.fmean(f.refused for _, _, f in found)
        lines.append(
            f"| {world} | "
            + " | ".join(cells)
            + f" | {len(found)} | {refused:.1%} | {statistics.fmean(f.dropped for _, _, f in found):.1%} |"
        )
    return lines, rows


def exponents(seed: int) -> tuple[list[str], list[tuple[str, list[int], list[float]]]]:
    """How the simulated figures grow along one axis, the others held: slopes in log-log."""
    drafter = DrafterConfig.from_target(planned.POLICIES["8b"], (2, 18, 33), 32_000)
    base = Deployment(drafter, 120.0, 256, 2048, sampled_share=0.25, engines=4, network_gbit=400.0)
    lines = ["| axis | sizes | figure | exponent, simulated | of the plan |", "|---|---|---|---|---|"]
    curves = []
    axes: dict[str, tuple[str, list[int]]] = {
        "ranks": ("wire", [1, 10, 100, 1000]),
        "engines": ("lag", [100, 1000, 10_000]),
        "runs": ("busy", [1, 10, 100]),
    }
    for axis, (name, sizes) in axes.items():
        seen, said = [], []
        for size in sizes:
            given = replace(base, **{axis: size})  # type: ignore[arg-type]
            if axis == "ranks":
                given = replace(given, rollouts=32 * size, sampled_share=0.1)
            gpus = estimate(replace(base, runs=100), Settings())["worker_gpus"].value * 1.3
            if axis != "runs":
                gpus = estimate(given, Settings())["worker_gpus"].value * 1.3
            p, found = compare(given, gpus, seed, "even")
            seen.append(found.facts[name])
            said.append(p[name])
        slopes = [np.polyfit(np.log(sizes), np.log(values), 1)[0] for values in (seen, said)]
        lines.append(f"| {axis} | {', '.join(map(str, sizes))} | {name} | {slopes[0]:.2f} | {slopes[1]:.2f} |")
        curves.append((f"{name} by {axis}: exponent {slopes[0]:.2f}", sizes, [*seen, *said]))
    return lines, curves


def draw(
    rows: dict[str, list[tuple[Deployment, dict[str, float], Found]]],
    curves: list[tuple[str, list[int], list[float]]],
    path: Path,
) -> None:
    """Plan against simulation, and growth along the axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
    titles = {"busy": "worker's busy share", "queue": "largest queue of a run, bytes", "lag": "lag, steps"}
    for axis, (name, title) in zip(axes[0], titles.items(), strict=True):
        values = []
        for world, found in rows.items():
            x, y = [p[name] for _, p, _ in found], [f.facts[name] for _, _, f in found]
            axis.plot(x, y, ".", label=world, ms=5)
            values += [v for v in [*x, *y] if v > 0]
        axis.plot([min(values), max(values)], [min(values), max(values)], "k-", lw=0.7)
        axis.set(xscale="log", yscale="log", xlabel="draftalign plan", ylabel="simulated", title=title)
        axis.legend(fontsize=7)
    for axis, (title, sizes, values) in zip(axes[1], curves, strict=True):
        axis.plot(sizes, values[: len(sizes)], "o-", label="simulated")
        axis.plot(sizes, values[len(sizes) :], "x--", label="plan")
        axis.set(xscale="log", yscale="log", title=title)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def real(seconds: float) -> list[str]:
    """A real service at two rates: what the plan says from the first about the second, and of bytes and Redis."""
    import httpx
    import redis as client

    from benchmarks import soak
    from benchmarks.soak import ROLLOUTS, processes, ready, service
    from service.cli.valkey import EmbeddedValkey

    tokens, ticks, seen = 200, os.sysconf("SC_CLK_TCK"), []
    world = soak.World()  # type: ignore[attr-defined]
    headers = {"Content-Type": "application/x-safetensors"}

    def cpu(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder)) as (process, url),
        httpx.Client(base_url=url, timeout=60) as sender,
    ):
        ready(url, process)
        httpx.put(f"{url}/runs/default", content=world.run_file(), headers=headers).raise_for_status()
        store = client.Redis.from_url(EmbeddedValkey(Path(folder) / "state").url, decode_responses=True)
        number = size = 0
        idle = dict.fromkeys(("api", "worker"), 0.0)
        for rate in (2.0, 0.0, 4.0, 1.0, 2.0):  # files of 8 rollouts a second: a warm-up, nothing, and three rates
            length = seconds / 5
            pids, began = processes(process.pid), time.monotonic()
            before = {name: cpu(pids[name]) for name in idle}
            memory, first, most, due = store.info("memory")["used_memory"], number, 0, began
            while time.monotonic() - began < length:
                if rate:
                    body = world.rollout_file(f"b-{number}", lengths=[tokens] * ROLLOUTS, policy_version=number // 8)
                    with contextlib.suppress(httpx.HTTPError):
                        sender.post("/rollouts?run=default", content=body, headers=headers)
                    number, size = number + 1, len(body)
                most = max(most, int(store.hget("da:{default}:counters", "bytes") or 0))
                due += 1 / (rate or 2.0)
                time.sleep(max(0.0, due - time.monotonic()))
            while store.xlen("da:{default}:queue") and time.monotonic() - began < length + 30:
                time.sleep(0.1)
            spent, files = time.monotonic() - began, number - first
            used = {name: (cpu(pids[name]) - before[name]) / spent for name in before}
            if not rate:
                idle = used
            else:
                kept = (store.info("memory")["used_memory"] - memory) / (files * ROLLOUTS)
                api = (used["api"] - idle["api"]) * spent / files
                seen.append((files / spent, used["worker"], api, most, kept))
        store.close()
    drafter = DrafterConfig(16, 16, 32, 2, 1, 8, 40, 30, (1, 2, 3))
    lines = [f"bytes of a file: {size} measured, {planned.file_bytes(drafter, ROLLOUTS, tokens, 'bfloat16')} planned"]
    lines.append(f"without posts: API {idle['api']:.4f} cores, worker {idle['worker']:.3f}")
    r0, w0, *_ = seen[1]
    for rate, busy, api, most, kept in seen[1:]:
        lines.append(
            f"{rate:.2f} files/s: worker busy {busy:.2f}, planned from the first rate {w0 * rate / r0:.2f},"
            f" with the idle share {idle['worker'] + (w0 - idle['worker']) * rate / r0:.2f};"
            f" API {1000 * api:.1f} ms a file;"
            f" largest queue {most} bytes = {most / size:.1f} files; Redis {kept:.0f} bytes a rollout"
        )
    return lines


def api_cpu() -> list[str]:
    """CPU of an API with no worker: without requests, and for files of several sizes; hidden size 4096."""
    from benchmarks import growth  # it makes tests/ importable

    # isort: split
    from service_fixtures import CONFIG, HEADERS, LAYERS, rollout_file, rollout_tensors, run_file

    from rl_hooks import wire

    config = CONFIG | {"hidden_size": 4096}
    metadata = {"run": "big", "target_fingerprint": wire.target_fingerprint(config, LAYERS)}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        world = growth.World(Path(folder))
        try:
            world.client.put("/runs/big", content=run_file(config), headers=HEADERS).raise_for_status()
            before, began = growth.cpu_seconds(world.pid), time.monotonic()
            time.sleep(10)
            idle = (growth.cpu_seconds(world.pid) - before) / (time.monotonic() - began)
            lines.append(f"without requests: {idle:.4f} cores")
            points = []
            for turn, (tokens, times) in itertools.product(range(2), ((7, 80), (128, 40), (1024, 12), (3072, 6))):
                lengths = (tokens // 2, tokens - tokens // 2)
                tensors = rollout_tensors(lengths, 4096)
                used = size = 0.0
                for number in range(times):
                    ids = (f"{turn}-{tokens}-{number}-a", f"{turn}-{tokens}-{number}-b")
                    body = rollout_file(ids, tensors=tensors, policy_version=0, raw_metadata=metadata)
                    size, before = float(len(body)), growth.cpu_seconds(world.pid)
                    answer = world.client.post("/rollouts?run=big", content=body, headers=HEADERS)
                    answer.raise_for_status()
                    used += growth.cpu_seconds(world.pid) - before
                points.append((size, used / times))
                lines.append(f"{size / 2**20:.2f} MiB: {1000 * used / times:.2f} ms of CPU a file")
            sizes, costs = np.array(points).T
            slope, post = np.polyfit(sizes, costs, 1, w=1 / costs)  # relative errors
            lines.append(f"fit: {1000 * post:.2f} ms a post, {slope * 2**30:.2f} s a GiB")
        finally:
            world.close()
    return lines


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--real", type=float, metavar="SECONDS")
    parser.add_argument("--api", action="store_true", help="CPU of the API by size of a file")
    given = parser.parse_args()
    if given.api:
        print("\n".join(api_cpu()))
        return
    if given.real:
        print("\n".join(real(given.real)))
        return
    lines, rows = report(given.deployments, given.seed)
    print("\n".join(lines), flush=True)
    grown, curves = exponents(given.seed)
    print("\n".join(["", *grown]))
    if given.plot is not None:
        draw(rows, curves, given.plot)


if __name__ == "__main__":
    main()
