"""The facts of a deployment: worker GPUs, queue, disk, lag, downloads, API cores, Redis, money.

Limits come from the settings. Each fact says whether it is arithmetic, was measured on two shared cores or on one
H200, or is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from service.capacity.sizes import (
    GIB,
    HOOK_BYTES,
    Deployment,
    batches,
    checkpoint_bytes,
    drafter_bytes,
    head_bytes,
    sent_file,
    tokens_a_file,
)
from service.capacity.work import GPU_TFLOPS, Work, bring_seconds, by_store
from service.monitor.worth import step_speedup
from service.settings import Settings

Basis = Literal["arithmetic", "measured on two cores", "measured on one H200", "assumed"]
#: Measured on two shared cores (docs/lab/uploads.md, docs/lab/events.md): CPU seconds of the API for a GiB, a post, a
#: report of an engine, a push to one; idle.
INGEST_CPU: Final = 1.0
POST_CPU: Final = 0.0025
IDLE_CPU: Final = 0.003
REPORT_CPU: Final = 0.003
PUSH_CPU: Final = 0.00013
#: Likewise of a file that goes by the object store, and a GiB of it.
DIRECT_POST_CPU: Final = 0.0123
DIRECT_CPU: Final = 0.11
#: Likewise of a head that has moved, and a GiB of it: it is searched for infinities, compared, and has a checksum.
HEAD_POST_CPU: Final = 0.04
HEAD_CPU: Final = 1.4
#: Likewise of a GiB of a drafter that an engine downloads, and of the answer for each of its files, which may be that
#: the object store has it.
DOWNLOAD_CPU: Final = 0.73
ANSWER_CPU: Final = 0.003
_DRAFTER_FILES: Final = 2
#: Likewise, where hosts share an object store and no directory: of a file or a head that the API then puts there, a GiB
#: of it, and what a head takes more; of a drafter that its host fetches, and a GiB of it.
STORE_POST_CPU: Final = 0.005
STORE_CPU: Final = 2.0
STORE_HEAD_CPU: Final = 0.02
FETCH_POST_CPU: Final = 0.035
FETCH_CPU: Final = 2.5
#: An engine reports so often.
REPORT_SECONDS: Final = 5.0
#: Measured (docs/lab/soak.md): Redis bytes of a rollout's fate and of a batch's, kept for 7 days within
#: `remembered_bytes`.
FATE_BYTES: Final = 106
BATCH_BYTES: Final = 94 * 8
#: Measured (docs/lab/capacity.md): of a batch's scores by three or four drafters, of which 4,608 batches are kept,
#: and for each prompt of it. Where it has more than 64 prompts, 16 shares of them are kept instead.
SCORE_BYTES: Final = 2600
PROMPT_BYTES: Final = 93
_PROMPTS: Final = 64
_SHARES: Final = 16
_SCORES_KEPT: Final = 4608
_KEPT_DAYS: Final = 7
#: `maxmemory` of the Redis that `draftalign up`, compose and Kubernetes start.
REDIS_BYTES: Final = 512 << 20
#: Room is planned for so many times the planned queue: simulated ones were larger in 1 of 60 (docs/lab/capacity.md).
_QUEUE_ROOM: Final = 2.0
_DAY_SECONDS: Final = 86_400
#: From this share of an API process' core on, what would take work off it is named.
_ADVISED_LOAD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Fact:
    """One line. `load`: the value over what can be had of it; above 1 it does not fit. None: nothing limits it."""

    value: float
    unit: str
    basis: Basis
    text: str
    load: float | None = None


class Traffic:
    """What a step of one run sends, and how long it takes to come in. Bytes and seconds."""

    def __init__(self, plan: Deployment, settings: Settings) -> None:
        self.plan = plan
        self.by_store = by_store(plan, settings)  # rollouts
        self.mirrored = settings.state_url is not None
        # Nothing of `file://` can be signed: the API sends its own bytes.
        self.drafters_by_store = not (settings.drafters_url or "file:").startswith("file:")
        self.files = batches(plan)
        self.file_tokens = tokens_a_file(plan)
        rollouts, self.file_bytes = sent_file(plan)
        prompts = math.ceil(rollouts / plan.group)
        self.score_bytes = SCORE_BYTES + PROMPT_BYTES * (prompts if prompts <= _PROMPTS else _SHARES)  # in Redis
        self.step_bytes = self.files * self.file_bytes
        self.line = plan.network_gbit * 1e9 / 8  # bytes a second

    @property
    def head_bytes(self) -> float:
        """Of the heads that a run sends, a step in mean."""
        return self.plan.head_share * head_bytes(self.plan.drafter)

    @property
    def inward_bytes(self) -> float:
        """All that comes in for a run in a step. Of hosts that share no directory, each fetches each drafter."""
        return self.step_bytes + self.head_bytes + (drafter_bytes(self.plan.drafter) if self.mirrored else 0)

    @property
    def file_cpu(self) -> float:
        """CPU seconds of the API for a file."""
        if self.by_store:
            return DIRECT_POST_CPU + self.file_bytes / GIB * DIRECT_CPU
        return POST_CPU + self.file_bytes / GIB * INGEST_CPU + self._copy_cpu(self.file_bytes)

    @property
    def head_cpu(self) -> float:
        """CPU seconds of the API for the heads of a run, a step in mean."""
        size = head_bytes(self.plan.drafter)
        put = self._copy_cpu(size) + (STORE_HEAD_CPU if self.mirrored else 0.0)
        return self.plan.head_share * (HEAD_POST_CPU + size / GIB * HEAD_CPU + put)

    def _copy_cpu(self, size: float) -> float:
        """CPU seconds in which the API puts what came into the store that hosts share, if they share one."""
        return STORE_POST_CPU + size / GIB * STORE_CPU if self.mirrored else 0.0

    @cached_property
    def cores_of(self) -> dict[str, float]:
        """API cores for all runs, in mean, by what they do."""
        plan, publish = self.plan, drafter_bytes(self.plan.drafter)
        download = _DRAFTER_FILES * ANSWER_CPU + (0 if self.drafters_by_store else publish / GIB * DOWNLOAD_CPU)
        fetch = FETCH_POST_CPU + publish / GIB * FETCH_CPU if self.mirrored else 0.0
        download *= min(1.0, plan.step_seconds / max(self.outward, 1e-9))  # engines that are late leave versions out
        seconds = {  # of a step of a run
            "rollouts": self.files * self.file_cpu,
            "heads": self.head_cpu,
            "downloads": plan.engines * download + fetch,
            "reports": plan.engines * (PUSH_CPU + REPORT_CPU / REPORT_SECONDS * plan.step_seconds),
        }
        return {name: plan.runs * value / plan.step_seconds for name, value in seconds.items()}

    @cached_property
    def cores(self) -> float:
        """API cores for all runs, in mean."""
        return IDLE_CPU + sum(self.cores_of.values())

    @cached_property
    def intake(self) -> float:
        """Bytes of rollouts a second that a run's burst has of line and API cores, beside other long work in mean."""
        runs, step = self.plan.runs, self.plan.step_seconds
        spare = math.ceil(self.cores) - self.cores_of["heads"] - self.cores_of["downloads"]
        by_line = _burst(self.line, runs, self.inward_bytes / step)
        return min(by_line, _burst(spare * self.file_bytes / self.file_cpu, runs, self.step_bytes / step))

    @cached_property
    def arrive(self) -> float:
        """Seconds from a step's first file to its last."""
        sending = self.step_bytes / self.intake + self.head_bytes / self.line
        return max(self.plan.post_share * self.plan.step_seconds, sending)

    @property
    def load(self) -> float:
        """Share of the line that all runs take."""
        return self.plan.runs * self.inward_bytes / self.plan.step_seconds / self.line

    @cached_property
    def outward(self) -> float:
        """Seconds in which a drafter of each run goes out: to all engines, or once to the object store."""
        copies = 1 if self.drafters_by_store else self.plan.engines
        return self.plan.runs * copies * drafter_bytes(self.plan.drafter) / self.line

    @property
    def copied_bytes(self) -> float:
        """What the API puts into the store that hosts share, of a step of a run: heads, files that come through it."""
        if not self.mirrored:
            return 0.0
        return self.head_bytes + (0.0 if self.by_store else self.step_bytes)

    @property
    def outward_load(self) -> float:
        """Share of the line that all runs take outward."""
        return (self.outward + self.plan.runs * self.copied_bytes / self.line) / self.plan.step_seconds

    @property
    def fetch(self) -> float:
        """Seconds in which an engine then has it from the object store, at the line's rate."""
        return drafter_bytes(self.plan.drafter) / self.line if self.drafters_by_store else 0.0


def _burst(most: float, runs: int, a_second: float) -> float:
    """What one run's burst has of `most`, where each of the others takes so much in mean."""
    return max(most / runs, most - (runs - 1) * a_second)


class WorkerLoad:
    """What all runs ask of the worker's GPUs. Seconds, and shares of its time."""

    def __init__(self, plan: Deployment, settings: Settings, tflops: float, gpus: float | None) -> None:
        step, runs = plan.step_seconds, plan.runs
        self.work = Work.of(plan, settings, tflops)
        self.runs = runs
        asked = runs * (self.work.train + self.work.score) / step  # of one GPU's time
        self.wanted = self.work.gpus(asked, runs)
        self.least = runs * self.work.passed_over / step  # of one GPU's time, to score alone
        self.gpus = float(math.ceil(self.wanted)) if gpus is None else gpus
        self.speed = self.work.speed(self.gpus, runs)
        self.load = asked / self.speed
        self.busy = min(1.0, self.load)
        # Of a step of all runs: trained on whole, and scored only.
        self.whole = runs * (self.work.train + self.work.score) / self.speed
        self.cheap = runs * self.work.passed_over / self.speed
        # Behind, the worker trains on the share that fits and only scores the rest.
        fitting = (step - self.cheap) / max(self.whole - self.cheap, 1e-12)
        self.trained = 1.0 if self.whole <= step else max(0.0, min(1.0, fitting))
        # Runs are in no step with each other: a run's burst has what the others leave, and its fair part at least.
        fair = max(1 / runs, 1 - self.busy * (runs - 1) / runs)
        self.drain = (self.work.train + self.work.score) / self.speed / fair


def estimate(
    plan: Deployment, settings: Settings, *, tflops: float = GPU_TFLOPS, worker_gpus: float | None = None
) -> dict[str, Fact]:
    """Every fact but money, by name. `worker_gpus`: those there are; None: as many as it takes."""
    traffic, worker = Traffic(plan, settings), WorkerLoad(plan, settings, tflops, worker_gpus)
    # Share of a step that a claim takes.
    claim = min(1.0, max(settings.claim_tokens, traffic.file_tokens) / plan.sent_tokens)
    queued, redis = _queued_bytes(traffic, worker, claim, settings.checkpoint_seconds), _redis_bytes(traffic, settings)
    return {
        **_of_worker(worker, tflops, plan, settings),
        "wire": _of_wire(traffic),
        "queue": _of_queue(queued, settings),
        "disk": _of_disk(traffic, queued, settings),
        "hook": _of_hook(traffic),
        "lag": Fact(
            _lag_seconds(traffic, worker, claim) / plan.step_seconds,
            "steps",
            "assumed",
            "from rollouts to engines with a drafter that saw them, if the gate agrees; below 0.2 hardly known",
        ),
        "download": _of_download(traffic),
        "api_cores": _of_api_cores(traffic, settings),
        "redis": Fact(
            redis,
            "bytes",
            "measured on two cores",
            f"of Redis after 7 days, without streams and page; the one that comes along has {REDIS_BYTES / GIB:g} GiB",
            redis / REDIS_BYTES,
        ),
    }


def _brought(worker: WorkerLoad) -> str:
    bring = worker.work.bring
    return f" ({bring:,.1f} of it waits for files from the object store)" if bring else ""


def _ranks(worker: WorkerLoad, tflops: float, plan: Deployment, settings: Settings) -> str:
    """What of several GPUs is lost, where a run has more than one, and what would lose less."""
    each = math.ceil(worker.gpus / worker.runs)
    if each <= 1:
        return "" if worker.gpus <= 1 else "; each GPU is a worker by itself"
    tokens = 4 * settings.train_step_tokens
    larger = Work.of(plan, settings.model_copy(update={"train_step_tokens": tokens}), tflops)
    hint = f"; with DRAFTALIGN_TRAIN_STEP_TOKENS={tokens} at {larger.rate(each):.1f}"
    return f"; one run on {each} GPUs (ranks) runs at {worker.work.rate(each):.1f} times one GPU's rate{hint}"


def _of_worker(worker: WorkerLoad, tflops: float, plan: Deployment, settings: Settings) -> dict[str, Fact]:
    # Several GPUs of one run (ranks) are computed: what they exchange, and what rank 0 does alone, was not measured.
    measured = tflops == GPU_TFLOPS and max(worker.gpus, worker.wanted) <= worker.runs and not worker.work.bring
    rate: Basis = "measured on one H200" if measured else "assumed"
    gpus = f"{worker.gpus:g} GPU{'' if worker.gpus == 1 else 's'}"
    return {
        "worker_gpus": Fact(
            worker.wanted,
            "GPUs",
            rate,
            f"{worker.work.train:,.1f} GPU s of training and {worker.work.score:,.1f} of scoring{_brought(worker)} a"
            f" step of a run, at {tflops:g} TFLOP/s of training; with {gpus} it is busy {worker.busy:.0%} and"
            f" trains on {worker.trained:.0%}{_ranks(worker, tflops, plan, settings)}",
            worker.load,
        ),
        "busy": Fact(worker.busy, "share", rate, "of the worker's time"),
        "trained": Fact(worker.trained, "share", "assumed", "of what is sent that is trained on; the rest is scored"),
        "scoring": Fact(
            worker.least,
            "GPUs",
            rate,
            "for scoring alone; with fewer the queue grows without end",
            worker.least / worker.speed,
        ),
    }


def _of_wire(traffic: Traffic) -> Fact:
    gbit = traffic.plan.runs * traffic.inward_bytes * 8e-9 / traffic.plan.step_seconds
    parts = {"rollouts": traffic.step_bytes, "heads": traffic.head_bytes}
    if traffic.mirrored:
        parts["a drafter that each host fetches"] = float(drafter_bytes(traffic.plan.drafter))
    text = f"{traffic.inward_bytes / GIB:,.2f} GiB a step of a run ({_listed(parts, GIB)})"
    if traffic.by_store:
        text += "; rollouts by the object store, from which the worker's hosts take them in, and not the API's"
    return Fact(gbit, "Gbit/s", "arithmetic", text, traffic.load)


def _of_api_cores(traffic: Traffic, settings: Settings) -> Fact:
    """With what an object store would take off, and cost, where the API has much to do."""
    text = f"of the API, of which one process takes one ({_listed(traffic.cores_of, 1)})"
    for name in ("rollouts_url", "drafters_url") if traffic.cores >= _ADVISED_LOAD else ():
        changed = settings.model_copy(update={name: "s3://"})
        other = Traffic(traffic.plan, changed)
        if other.cores < 0.95 * traffic.cores:
            text += f"; with DRAFTALIGN_{name.upper()} (an object store) {other.cores:,.3g}"
            if waits := bring_seconds(traffic.plan, changed) - bring_seconds(traffic.plan, settings):
                text += f", and the worker waits {waits:,.1f} s a step of a run for files"
    return Fact(traffic.cores, "cores", "measured on two cores", text, traffic.cores)


def _listed(parts: Mapping[str, float], unit: float) -> str:
    return ", ".join(f"{name} {value / unit:,.3g}" for name, value in parts.items())


def _of_queue(queued: float, settings: Settings) -> Fact:
    text, most = "largest queue and spool of a run, if the gate agrees", settings.queue_max_bytes
    if most is None:
        return Fact(queued, "bytes", "assumed", f"{text}; `disk` has room for {_QUEUE_ROOM:g} times that")
    limit = f"DRAFTALIGN_QUEUE_MAX_BYTES is {most / GIB:g} GiB, and should hold {_QUEUE_ROOM:g} times that"
    return Fact(queued, "bytes", "assumed", f"{text}; {limit}", _QUEUE_ROOM * queued / most)


def _of_disk(traffic: Traffic, queued: float, settings: Settings) -> Fact:
    """The disk on which no run's queue is refused: all that workers keep, room for all queues, and for others.

    What must be left for others is a third of a run's own files, or three times its queue (`Disk.queue_share_bytes`).
    """
    plan, drafter = traffic.plan, traffic.plan.drafter
    versions = settings.keep_versions + 2  # the first and the served one
    kept = {
        f"{versions} versions": versions * drafter_bytes(drafter),
        "recent rollouts": settings.recent_tokens * traffic.file_bytes / traffic.file_tokens,
        "a checkpoint, twice while it is written": 2 * checkpoint_bytes(drafter, settings.optimizer),
        "target and a head": 3 * drafter.vocab_size * drafter.target_hidden_size * 2,
    }
    queue = min(_QUEUE_ROOM * queued, settings.queue_max_bytes or math.inf)
    own = sum(kept.values()) + queue
    parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in kept.items())
    text = f"for all runs; the worker keeps {sum(kept.values()) / GIB:,.1f} GiB of each ({parts})"
    return Fact(plan.runs * own + min(own / 3, 3 * queue) + settings.spool_min_free_bytes, "bytes", "assumed", text)


def _of_hook(traffic: Traffic) -> Fact:
    plan = traffic.plan
    rank_bytes = traffic.step_bytes / plan.ranks
    sent_meanwhile = plan.post_share * plan.step_seconds * traffic.intake / plan.ranks
    return Fact(
        rank_bytes,
        "bytes",
        "measured on two cores",
        f"a rank's rollouts of a step; its hook holds {HOOK_BYTES / GIB:g} GiB back, and sends"
        f" {sent_meanwhile / GIB:,.2f} meanwhile",
        max(rank_bytes / (HOOK_BYTES + sent_meanwhile), traffic.file_bytes / HOOK_BYTES),
    )


def _of_download(traffic: Traffic) -> Fact:
    plan, publish = traffic.plan, drafter_bytes(traffic.plan.drafter)
    seconds, load = traffic.outward + traffic.fetch, traffic.outward_load
    put = f"; the API puts {traffic.copied_bytes / GIB:,.2f} GiB a step of a run into the store" * traffic.mirrored
    if traffic.drafters_by_store:
        text = f"the worker puts {publish / GIB:.2f} GiB of each run into the object store; engines have it from there"
        return Fact(seconds, "s", "assumed", f"{text}, at this line's rate if the store serves all at once{put}", load)
    text = (
        f"{plan.runs * plan.engines * publish / GIB:,.1f} GiB at a publish of each run; an engine {publish / GIB:.2f}"
    )
    return Fact(seconds, "s", "arithmetic", text + put, load)


def _queued_bytes(traffic: Traffic, worker: WorkerLoad, claim: float, pause: float) -> float:
    """The largest queue of a run: what came before the worker took it, and what no checkpoint has acknowledged.

    `pause`: from one checkpoint to the next, the least. Where the last one is older, the claim that ends acknowledges
    what it held at once.
    """
    step, files, arrive = traffic.plan.step_seconds, traffic.files, max(traffic.arrive, 1e-9)
    if worker.trained < 1.0:
        return traffic.step_bytes * (2.0 - worker.trained)
    hold, work = pause + claim * worker.drain, max(worker.drain, arrive)
    if hold >= step:  # a publish writes a checkpoint too: one a step, if the gate agrees
        return traffic.step_bytes * min(2.0, hold / step)
    held = hold / arrive if worker.drain <= arrive else 1 - max(0.0, arrive - hold) / worker.drain
    most = 1.0
    written = 0.0 if work <= pause else work  # when a step's checkpoint before its last is written
    if step - written >= 2 * pause:  # the last one is old when the next step's first claim ends
        before = _waiting(worker.runs, worker.load) * worker.drain * claim
        first = min(claim, max(1 / files, before / arrive))
        most = max(1 - first, (before + first * worker.drain) / arrive + 1 / files)
    return traffic.step_bytes * min(1.0, most, held + 1 / files)


def _lag_seconds(traffic: Traffic, worker: WorkerLoad, claim: float) -> float:
    """From rollouts to engines, in mean.

    The first file's way here, turns of other runs, older rollouts passed over, the claim that trains on it, the next
    claim's scores, which judge it, and the download. A claim holds what came since the one before.
    """
    step, runs, files, arrive = traffic.plan.step_seconds, worker.runs, traffic.files, traffic.arrive
    trained, cheap = worker.trained, worker.cheap
    fits = trained >= 1.0 and worker.drain <= arrive
    share = 1 / files if fits else claim * (1 - trained / 2)  # of a step, in a claim of another run
    turns = share * (trained * worker.whole + (1 - trained) * cheap) / runs * _waiting(runs, worker.load)
    cut = turns / (2 if worker.load >= 1 else 1)  # half of the claim that was cut is no longer waiting
    before = cut + max(0.0, 1 - trained - claim / 2) * cheap

    def claimed(seconds: float) -> float:
        return min(claim, max(1 / files, seconds / max(arrive, 1e-9)))

    here = arrive / (files + 1) + traffic.file_bytes / traffic.line + traffic.file_cpu
    if traffic.plan.ranks == 1:  # its head goes first; of several, another rank's file is here before
        here += traffic.head_bytes / traffic.line + traffic.head_cpu
    first = min(claimed(before) * worker.whole / runs, step)  # it ends where rollouts of a newer policy wait
    following = max(arrive / files - first, turns)
    score = claimed(first + following) * worker.work.score / worker.speed
    # Where one claim takes the whole step, the next step's judges it: always of one file, else after a wait this long.
    others = worker.busy * (runs - 1) / runs
    whole = 1.0 if files < 2 else math.exp(-arrive * others / turns) * others if claim >= 1 and turns > 0 else 0.0
    following += whole * (step - following)
    # An engine that downloads takes the newest drafter afterwards: what comes in between waits for the rest.
    out = traffic.outward
    sent_out = out / runs * (1 + _waiting(runs, out / step)) + max(0.0, out - step) + traffic.fetch
    return here + before + first + following + score + sent_out


def _redis_bytes(traffic: Traffic, settings: Settings) -> float:
    """Fates of a week's rollouts and batches, as far as they are remembered, and the scores that are kept."""
    plan, week = traffic.plan, _KEPT_DAYS * _DAY_SECONDS / traffic.plan.step_seconds  # steps of a run
    fates = plan.sent_tokens / plan.tokens * FATE_BYTES + traffic.files * BATCH_BYTES
    remembered = min(plan.runs * min(week * fates, settings.remembered_bytes), 2 * settings.remembered_bytes)
    return remembered + plan.runs * min(_SCORES_KEPT, traffic.files * week) * traffic.score_bytes


def _waiting(runs: int, load: float) -> float:
    """Pieces of work of other runs that one waits for; all at full load.

    Each run asks once a step, at a time of its own: the mean queue of N periodic streams, by a Brownian bridge (the
    N D / D / 1 queue in heavy traffic). Streams at random would wait far longer where the load is near 1.
    """
    others = runs - 1
    if load >= 1:
        return float(others)
    idle = (1 - load) * math.sqrt(others / 2)
    few = others / (others + 2)  # found by simulation: the bridge is of many
    # exp(x^2) erfc(x), and what it tends to: exp overflows at some 1,400 runs that do little
    tail = math.exp(idle**2) * math.erfc(idle) if idle < 20 else 1 / (idle * math.sqrt(math.pi))
    bridge = few * load * math.sqrt(math.pi * others / 8) * tail
    return max(load * others / runs / 2, bridge)  # at light load, half of the piece at work


def worst_first(facts: Mapping[str, Fact]) -> list[tuple[str, Fact]]:
    """What fits least comes first; what nothing limits last."""
    return sorted(facts.items(), key=lambda item: math.inf if item[1].load is None else -item[1].load)


def money(
    gpus: float, gpu_hour_price: float, engine_gpus: int, step: tuple[float, float, float] | None
) -> dict[str, Fact]:
    """What the worker costs, and what α brings. `step`: α now, its gain, and generation's share of a step's time."""
    cost = gpus * gpu_hour_price * 24
    found = {"cost": Fact(cost, "money a day", "arithmetic", f"{gpus:g} worker GPUs at {gpu_hour_price:g} an hour")}
    if step is None:
        return found
    now, gain, share = step
    faster = step_speedup(share, (now + gain) / now)
    saved = engine_gpus * 24 * gpu_hour_price * (1 - 1 / faster)
    found["cost_a_point"] = Fact(cost / (gain * 100), "money a day", "assumed", "for each 0.01 of α that is gained")
    found["saved"] = Fact(
        saved,
        "money a day",
        "assumed",
        f"the share is what the worker costs of it; α {now:g} to {now + gain:g}: a step takes {1 / faster:.1%} of its "
        f"time on {engine_gpus} GPUs, where a round's time stays (`draftalign worth` measures that)",
        cost / saved if saved else None,
    )
    return found
