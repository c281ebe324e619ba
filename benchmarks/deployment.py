"""A deployment, simulated by events: what `benchmarks.capacity` compares `draftalign plan` with.

Ranks that make files, the hook's bounded queue (the shipped `JobQueue`), one sending thread each with the shipped
patience and `Retry-After`, heads that rank 0 sends before its files, a line each way, API cores, an object store where
the settings name one, a run's bounded queue with its 429, a worker that takes turns by the shipped `Turns`, passes
claims over and cuts trainings by the shipped constants, checkpoints between its claims, and engines that download.
Tensors are simulated: a file is its size. Metadata is real: jobs, versions, limits and tokens. What a GPU does, and how
long it waits for files from the object store, is the plan's own count at its own rate, so GPU figures are compared as
queueing, not as speed. CPU seconds of a request are the plan's; requests are counted here. The gate always agrees;
checkpoints, replays for the drift alarm and the draft vocabulary cost nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from rl_hooks.sending import delivery
from rl_hooks.sending.jobs import Job, JobQueue
from service.api.problems import RETRY_AFTER_SECONDS
from service.capacity import sizes
from service.capacity.estimate import (
    ANSWER_CPU,
    DIRECT_CPU,
    DIRECT_POST_CPU,
    DOWNLOAD_CPU,
    FETCH_CPU,
    FETCH_POST_CPU,
    HEAD_CPU,
    HEAD_POST_CPU,
    INGEST_CPU,
    POST_CPU,
    PUSH_CPU,
    REPORT_CPU,
    REPORT_SECONDS,
    STORE_CPU,
    STORE_HEAD_CPU,
    STORE_POST_CPU,
    estimate,
)
from service.capacity.sizes import Deployment
from service.capacity.work import Work
from service.monitor import controller
from service.settings import Settings
from service.worker import learner
from service.worker.process.turns import Turns

_STEPS: Final = 12
_WARM: Final = 3
#: The hook's sender gives a file up after so many seconds.
PATIENCE: Final = 120.0
#: A head is looked at in pieces of so much of a core: threads share it. Reports of engines come in such pieces.
_PIECE_SECONDS: Final = 0.05


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
    asked: bool = False  # an event is there that asks for a checkpoint
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
        self.inward, self.outward, self.store = Line(), Line(), Line()
        self.by_store = (settings.drafters_url or "").startswith(("s3://", "gs://", "az://"))
        self.publish_bytes = sizes.drafter_bytes(given.drafter)
        sent = 0.0 if self.by_store else self.publish_bytes / sizes.GIB * DOWNLOAD_CPU
        self.answer_cpu = PUSH_CPU + 2 * ANSWER_CPU + sent  # a drafter is two files
        self.rate = given.network_gbit * 1e9 / 8
        # Those of the plan, less what downloads take. Engines that need more than a step for one leave versions out.
        copies = given.runs * (1 if self.by_store else given.engines)
        each = max(given.step_seconds, copies * self.publish_bytes / self.rate)
        cores = estimate(given, settings, tflops=tflops, worker_gpus=gpus)["api_cores"].value
        downloads = given.runs * given.engines * self.answer_cpu / each
        self.cores = Line(max(1, math.ceil(cores) - math.floor(downloads)))
        self.runs = [Run(f"run-{i}") for i in range(given.runs)]
        for run in self.runs:
            run.ranks = [Rank(run, JobQueue(sizes.HOOK_BYTES)) for _ in range(given.ranks)]
        self.turns = Turns()
        self.by_name = {run.name: run for run in self.runs}
        self.posts = self.refused = 0
        self.bytes = 0
        self.worked = 0.0
        self.idle = True
        self.training: Claim | None = None
        self.waiting: list[Run] = []  # for a checkpoint that was due while the worker was at work
        self.has_store = bool(settings.rollouts_url or settings.state_url)
        self.tokens = sizes.tokens_a_file(given)
        R = max(1, round(self.tokens / given.tokens))
        size = sizes.file_bytes(given.drafter, R, given.tokens, given.dtype, given.prompt_share, given.group)
        self.a_token = size / (R * given.tokens)
        self.head_bytes = given.drafter.vocab_size * given.drafter.target_hidden_size * 2
        speed = 1.0
        if world in ("slow", "all"):  # one GPU of several at half speed: ranks wait for each other in each window
            speed = 0.5 if gpus <= 1 else 1 / (1 + 1 / gpus)
        self.speed = self.work.speed(gpus, given.runs) * speed

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self.events, (when, next(self.order), act))

    def run(self) -> Found:
        """Simulate; the first steps are left out of shares."""
        end = _STEPS * self.given.step_seconds
        start = _WARM * self.given.step_seconds
        for run in self.runs:
            self.at(float(self.rng.uniform(0, self.given.step_seconds)), partial(self.step, run, 0))
        reports = self.given.runs * self.given.engines * REPORT_CPU
        pieces = math.ceil(reports / _PIECE_SECONDS)
        for number in range(pieces):  # engines report at times of their own
            self.at(REPORT_SECONDS * number / pieces, partial(self.reported, reports / pieces))
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
        facts = {
            "busy": min(1.0, (self.worked - worked) / seconds),
            "trained": min(1.0, trained),
            "queue": float(max(run.peak for run in self.runs)),
            "lag": statistics.fmean(lags) / self.given.step_seconds if lags else math.nan,
            "api_cores": (self.cores.busy - cores) / seconds,
            "wire": (self.bytes - sent) * 8e-9 / seconds,
        }
        ranks = [rank for run in self.runs for rank in run.ranks]
        dropped = sum(rank.dropped for rank in ranks) / max(1, sum(rank.made for rank in ranks))
        return Found(facts, self.refused / max(1, self.posts), dropped)

    def reported(self, seconds: float) -> None:
        """Some engines report, and do so again."""
        self.cores.serve(self.now, seconds)
        self.at(self.now + REPORT_SECONDS, partial(self.reported, seconds))

    # --- the trainer
    def step(self, run: Run, version: int) -> None:
        """A step's generation ends; its files are made over a part of the next step."""
        run.made[version] = self.now
        tail = self.world in ("tail", "all")
        spread = 0.0 if self.world in ("burst", "all") else self.given.post_share * self.given.step_seconds
        if math.floor((version + 1) * self.given.head_share) > math.floor(version * self.given.head_share):
            run.ranks[0].queue.put(Job("PUT", f"/runs/{run.name}/head", list, self.head_bytes, keep=True))
            if not run.ranks[0].sending:
                self.send(run.ranks[0])
        W, sent = self.given.ranks, self.given.sent_tokens
        R = max(1, round(sent / self.given.tokens))
        for number, rank in enumerate(self.rng.permutation(W)[: min(R, W)]):  # who has most differs from step to step
            mine = R // W + (number < R % W)
            tokens = mine * sent / R
            if tail:  # lognormal lengths; the hook's cap holds
                lengths = self.rng.lognormal(-0.5, 1.0, mine) * sent / R
                tokens = min(float(lengths.sum()), float(sizes.HOOK_TOKENS))
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
        if job.keep:
            self.bytes += job.size_bytes
            there = self.inward.serve(self.now, job.size_bytes / self.rate)
            cpu = HEAD_POST_CPU + job.size_bytes / sizes.GIB * HEAD_CPU + self.copied(job.size_bytes)
            cpu += STORE_HEAD_CPU if self.settings.state_url else 0.0
            self.at(there, partial(self.check, rank, cpu))
            return
        self.posts += 1
        if self.full(rank.run, job.size_bytes):
            answered = self.cores.serve(self.now, POST_CPU)
            self.at(answered, partial(self.answer, rank, job, began, attempt, taken=False))
            return
        self.bytes += job.size_bytes
        if self.has_store and job.size_bytes >= delivery._SMALLEST_DIRECT_BYTES:
            cpu = DIRECT_POST_CPU + job.size_bytes / sizes.GIB * DIRECT_CPU
            told = self.cores.serve(self.now, cpu / 2)
            self.at(told, partial(self.put, rank, job, began, attempt, cpu / 2))
            return
        there = self.inward.serve(self.now, job.size_bytes / self.rate)
        cpu = POST_CPU + job.size_bytes / sizes.GIB * INGEST_CPU + self.copied(job.size_bytes)
        stored = self.cores.serve(there - job.size_bytes / self.rate, cpu)
        self.at(max(there, stored), partial(self.answer, rank, job, began, attempt, taken=True))

    def copied(self, size: int) -> float:
        """CPU seconds in which the API puts what came through it into the store that hosts share."""
        return STORE_POST_CPU + size / sizes.GIB * STORE_CPU if self.settings.state_url else 0.0

    def put(self, rank: Rank, job: Job, began: float, attempt: int, cpu: float) -> None:
        """Into the object store, which takes as much as the line would; then the API is asked again."""
        there = self.store.serve(self.now, job.size_bytes / self.rate)
        self.at(there, partial(self.ask_again, rank, job, began, attempt, cpu))

    def ask_again(self, rank: Rank, job: Job, began: float, attempt: int, cpu: float) -> None:
        """The file is in the store."""
        self.at(self.cores.serve(self.now, cpu), partial(self.answer, rank, job, began, attempt, taken=True))

    def check(self, rank: Rank, seconds: float) -> None:
        """A head is read, a piece at a time: other requests have their turns between."""
        piece = min(seconds, _PIECE_SECONDS)
        done = self.cores.serve(self.now, piece)
        self.at(done, partial(self.check, rank, seconds - piece) if seconds > piece else partial(self.next, rank))

    def next(self, rank: Rank) -> None:
        """The hook's thread is done with a request."""
        rank.queue.finish()
        self.send(rank)

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
            self.next(rank)
            self.cut(run)
            self.wake()
            return
        self.refused += 1
        pause = min(RETRY_AFTER_SECONDS, delivery._MAX_RETRY_AFTER_SECONDS)
        if self.now + pause - began > PATIENCE:
            rank.dropped += 1
            self.next(rank)
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
        late, self.waiting = self.waiting, []
        for run in late:
            self.save(run)
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
            self.acknowledge(run)
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
        self.save(run)
        self.worked += self.now - claim.began
        self.turns.asked(run.name, self.now - claim.began, at_work=True)
        self.turn()

    def save(self, run: Run) -> None:
        """A checkpoint, once the last one is old enough and no claim of this run is in hand.

        What was worked on is acknowledged, and its bytes leave the queue.
        """
        due = run.saved_at + self.settings.checkpoint_seconds
        if self.now >= due:
            self.acknowledge(run)
        elif not run.asked:
            run.asked = True
            self.at(due, partial(self.ask, run))

    def ask(self, run: Run) -> None:
        """The worker looks at a run that has nothing new; while it works, at the end of the claim."""
        run.asked = False
        if run.done and self.idle:
            self.save(run)
        elif run.done:
            self.waiting.append(run)

    def acknowledge(self, run: Run) -> None:
        """The checkpoint itself; before a publish one is written whatever the pause."""
        run.held -= run.done
        run.done, run.saved_at = 0, self.now

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
        engines, seconds = self.given.engines, self.publish_bytes / self.rate
        if self.settings.state_url:  # the API's host fetches it, too
            self.bytes += self.publish_bytes
            self.cores.busy += FETCH_POST_CPU + self.publish_bytes / sizes.GIB * FETCH_CPU
        self.cores.busy += engines * self.answer_cpu
        if self.by_store:  # the worker puts it; then all get it
            done = self.outward.serve(self.now, seconds) + seconds
        else:
            done = self.outward.serve(self.now, engines * seconds)
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
