"""Are the figures of `draftalign plan` right? A simulation of whole deployments, and a real service on two cores.

    python -m benchmarks.capacity --seed 3 [--plot docs/lab/capacity.png]   simulated; two minutes of a core
    python -m benchmarks.capacity --largest even burst                      simulated at full size; a minute a world
    python -m benchmarks.capacity --real 100                                a real `draftalign up`; seconds of a part
    python -m benchmarks.capacity --api                                     CPU of a real API: `benchmarks.api_cpu`

The simulation is `benchmarks.deployment`. What a GPU does is the plan's own count there. `LARGEST` is the size that the
service is meant for: 1,000 ranks of each of 100 runs, 10,000 engines in all.

Worlds. `even`: the plan's own (equal rollouts, files spread over a part of a step); `told`: all files at a step's end,
and the plan is told so. The plan is not told of: `burst` (all files at a step's end), `slow` (one worker GPU at half
its speed), `tail` (lognormal lengths with sigma 1, step times with sigma 0.3), `all` (these three together).
Deployments whose `hook` does not fit by the plan are left out. A drafter is published once a policy version and run.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from benchmarks.api_cpu import api_cpu
from benchmarks.deployment import Found, World
from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.sending.features import as_wire
from service.capacity.estimate import BATCH_BYTES, FATE_BYTES, Traffic, estimate
from service.capacity.sizes import POLICIES, Deployment, batches
from service.capacity.work import GPU_TFLOPS
from service.settings import Settings

ROOT: Final = Path(__file__).parent.parent
WORLDS: Final = ("even", "told", "burst", "slow", "tail", "all")
COMPARED: Final = ("busy", "trained", "queue", "lag", "api_cores", "wire")


def deployments(count: int, seed: int) -> Iterable[tuple[Deployment, float, int]]:
    """Random deployments, the worker GPUs of each, and its seed. Sizes are log-uniform up to the issue's."""
    rng = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    for number in range(count):
        policy = POLICIES[("8b", "32b")[number % 2]]
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
        most = 120 / batches(given) / given.runs  # files a step of all runs, so that a world takes seconds
        given = replace(given, sampled_share=given.sampled_share * min(1.0, most))
        wanted = estimate(given, Settings())["worker_gpus"].value
        line = runs * given.sent_tokens * 40_960 / (given.network_gbit * 1e9 / 8)
        if line > given.step_seconds:  # more than the line: the trainer would be cut, plan says so at once
            given = replace(given, network_gbit=given.network_gbit * line / given.step_seconds * 2)
        late = estimate(given, Settings())["download"].load or 0.0
        given = replace(given, network_gbit=given.network_gbit * max(1.0, late / 1.5))  # as above
        yield given, wanted * between(0.4, 2.5), number


@functools.cache
def compare(given: Deployment, gpus: float, seed: int, world: str) -> tuple[dict[str, float], Found]:
    """The plan's figures and the simulation's, the latter with a queue large enough to be measured."""
    settings = Settings(queue_max_bytes=1 << 50)
    if world == "told":
        given = replace(given, post_share=0.0)
    facts = estimate(given, settings, worker_gpus=gpus)
    found = World(given, settings, world, gpus, GPU_TFLOPS, seed).run()
    return {name: facts[name].value for name in COMPARED}, found


def fits(given: Deployment) -> bool:
    """Whether the hooks can send all that they make, by the plan."""
    return (estimate(given, Settings())["hook"].load or 0.0) <= 1


def error(plan: float, true: float) -> float:
    """Relative error; of both next to nothing: none."""
    return abs(plan - true) / max(abs(true), 1e-12) if max(plan, true) > 1e-9 else 0.0


#: A rank sends one file a step: one rollout of the eight that it has.
LARGEST: Final = Deployment(
    DrafterConfig.from_target(POLICIES["8b"], (2, 18, 33), 32_000),
    step_seconds=300.0,
    rollouts=8000,
    tokens=1024,
    sampled_share=0.125,
    ranks=1000,
    runs=100,
    engines=100,
    network_gbit=400.0,
)
Rows = dict[str, list[tuple[Deployment, dict[str, float], Found]]]


def largest(worlds: Iterable[str]) -> Iterator[str]:
    """The plan beside the simulation at the full size."""
    yield "| plan, simulated | " + " | ".join(COMPARED) + " | dropped |"
    yield "|---" * (len(COMPARED) + 2) + "|"
    gpus = estimate(LARGEST, Settings())["worker_gpus"].value * 1.3
    for world in worlds:
        plan, found = compare(LARGEST, gpus, 0, world)
        cells = [f"{plan[name]:.3g}, {found.facts[name]:.3g}" for name in COMPARED]
        yield f"| {world} | " + " | ".join(cells) + f" | {found.dropped:.1%} |"


def report(count: int, seed: int) -> tuple[list[str], Rows]:
    """The table of errors by world, and all rows."""
    rows: Rows = {world: [] for world in WORLDS}
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
    """How the simulated figures grow along one axis of `LARGEST`, the others held: slopes in log-log."""
    lines = ["| axis | sizes | figure | exponent, simulated | of the plan |", "|---|---|---|---|---|"]
    curves = []
    axes: dict[str, tuple[str, list[int]]] = {
        "ranks": ("wire", [1, 10, 100, 1000]),
        "engines": ("lag", [100, 1000, 10_000]),  # of one run of 8 ranks
        "runs": ("busy", [1, 10, 100]),
    }
    for axis, (name, sizes) in axes.items():
        seen, said = [], []
        for size in sizes:
            given = replace(LARGEST, ranks=8, runs=1) if axis == "engines" else LARGEST
            given = replace(given, **{axis: size})  # type: ignore[arg-type]
            given = replace(given, rollouts=8 * given.ranks)
            gpus = estimate(given, Settings())["worker_gpus"].value * 1.3
            planned, found = compare(given, gpus, seed, "even")
            each = gpus if name == "busy" else 1.0  # GPUs at work
            seen.append(found.facts[name] * each)
            said.append(planned[name] * each)
        slopes = [np.polyfit(np.log(sizes), np.log(values), 1)[0] for values in (seen, said)]
        said_name = {"wire": "wire, Gbit/s", "lag": "lag, steps", "busy": "GPUs at work"}[name]
        lines.append(f"| {axis} | {', '.join(map(str, sizes))} | {said_name} | {slopes[0]:.2f} | {slopes[1]:.2f} |")
        curves.append((f"{said_name}, by {axis}: exponent {slopes[0]:.2f}", sizes, [*seen, *said]))
    return lines, curves


def draw(
    rows: Rows,
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
        scale = "linear" if name == "busy" else "log"  # a share: less than one decade
        axis.set(xscale=scale, yscale=scale, xlabel="draftalign plan", ylabel="simulated", title=title)
        axis.legend(fontsize=7)
    for axis, (title, sizes, values) in zip(axes[1], curves, strict=True):
        axis.plot(sizes, values[: len(sizes)], "o-", label="simulated")
        axis.plot(sizes, values[len(sizes) :], "x--", label="plan")
        axis.set(xscale="log", yscale="log", title=title)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=90)


#: Of a step of the real trial: seconds, files, and rollouts and tokens of one by part. The first part gives the rate.
_STEP, _RANKS, _POST_SHARE = 20.0, 4, 0.25
_REAL: Final = {"warm-up": (32, 200), "the rate is of this": (32, 200), "twice the rollouts": (64, 200)} | {
    "twice as long": (32, 400)
}


#: Of a step: policy version, head, and a file of each rank.
_Step = tuple[int, bytes, list[bytes]]


def real(seconds: float) -> list[str]:
    """A real service beside the plan, which is given what this machine does a second in the first part.

    The policy moves at each step and sends its head. So that training pays, and the worker does not rest, it learns
    fast; the gate's bounds are low, so that it agrees soon. All this the plan assumes.
    """
    from benchmarks import soak  # it makes tests/ importable

    world: Any = soak.World()  # type: ignore[attr-defined]
    steps = max(2, round(seconds / _STEP))
    work = _work(world, steps)  # all files first: making them takes the cores
    given = {"GATE_MIN_GAIN": "0", "GATE_CONFIDENCE": "0.51", "WORKER_COST": "0", "WARMUP_STEPS": "0"}
    given |= {"LEARNING_RATE": "0.01", "TRAIN_STEP_TOKENS": "1024"}
    found: dict[str, dict[str, float]] = {}
    made: dict[int, float] = {}
    came: list[tuple[float, int]] = []
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        soak.service(Path(folder), {f"DRAFTALIGN_{name}": value for name, value in given.items()}) as (process, url),
        httpx.Client(base_url=url, timeout=60, headers={"Content-Type": "application/x-safetensors"}) as sender,
    ):
        soak.ready(url, process)
        sender.put("/runs/default", content=world.run_file()).raise_for_status()
        pids = soak.processes(process.pid)
        engine = threading.Thread(target=_newest, args=(url, came, stop), daemon=True)
        engine.start()
        for part, of_steps in [("idle", []), *work.items()]:
            found[part] = _measured(of_steps, sender, pids, Path(folder), made)
        time.sleep(_STEP)  # for the last version
        stop.set()
        engine.join()
    lags: dict[str, list[float]] = {part: [] for part in work}
    seen = -1
    for when, trained_to in came:
        for part, of_steps in work.items():
            lags[part] += [when - made[version] for version, _, _ in of_steps if seen < version <= trained_to]
        seen = max(seen, trained_to)
    return _beside_the_plan(found, lags, steps)


def _work(world: Any, steps: int) -> dict[str, list[_Step]]:
    """What is sent in each part, while the policy moves."""
    from helpers.worker.worker_fixtures import HIDDEN, VOCAB

    rng, version = np.random.default_rng(0), 0
    work: dict[str, list[_Step]] = {part: [] for part in _REAL}
    for part, (rollouts, tokens) in _REAL.items():
        for _ in range(steps):
            version += 1
            moved = world.heads[0].new_tensor(rng.normal(size=(VOCAB, HIDDEN)))
            world.heads[version] = (0.9 * world.heads[version - 1] + 0.44 * moved).bfloat16().float()
            of_file = {"lengths": [tokens] * (rollouts // _RANKS), "policy_version": version, "last_rows": "predicting"}
            files = [world.rollout_file(f"{version}-{rank}", **of_file) for rank in range(_RANKS)]
            head = wire.encode(
                {"lm_head": as_wire(world.heads[version].bfloat16())},  # as of a policy of a usual size
                {"format": wire.HEAD_FORMAT, "policy_version": str(version)},
            )
            work[part].append((version, b"".join(bytes(one) for one in head), files))
    return work


def _measured(
    steps: list[_Step], sender: httpx.Client, pids: dict[str, int], folder: Path, made: dict[int, float]
) -> dict[str, float]:
    """Send one part, each step at its time, and measure; without steps one idle step. `made`: when versions came."""
    import redis as client

    from service.cli.valkey import EmbeddedValkey

    began, most, sent = time.monotonic(), 0, 0
    with client.Redis.from_url(EmbeddedValkey(folder / "state").url, decode_responses=True) as store:

        def wait(until: float) -> None:
            nonlocal most
            while time.monotonic() < until:
                most = max(most, int((store.get("da:{default}:held") or "0 0").split()[1]))
                time.sleep(0.1)

        before, memory = {name: _cpu(pids[name]) for name in ("api", "worker")}, store.info("memory")["used_memory"]
        for number, (version, head, files) in enumerate(steps):
            due = began + number * _STEP
            wait(due)
            made[version] = time.monotonic()
            sender.put("/runs/default/head", content=head).raise_for_status()
            sent += len(head)
            for place, body in enumerate(files):
                time.sleep(max(0.0, due + place * _STEP * _POST_SHARE / _RANKS - time.monotonic()))
                sender.post("/rollouts?run=default", content=body).raise_for_status()
                sent += len(body)
        wait(began + max(1, len(steps)) * _STEP)
        spent = time.monotonic() - began
        used = {name: (_cpu(pids[name]) - before[name]) / spent for name in before}
        kept = (store.info("memory")["used_memory"] - memory) / max(1, len(steps))
    wire = sent * 8e-9 / spent
    return {"busy": used["worker"], "queue": most, "api_cores": used["api"], "redis": kept, "wire": wire}


def _beside_the_plan(found: dict[str, dict[str, float]], lags: dict[str, list[float]], steps: int) -> list[str]:
    """Plan and measurement of each part. `lags`: seconds from a version to its drafter in the engine."""
    from helpers.worker.worker_fixtures import CONFIG, DRAFT, LAYERS

    drafter, settings = DrafterConfig.from_target(CONFIG, LAYERS, DRAFT), Settings(train_step_tokens=1024)
    idle, lines = found["idle"]["busy"], [f"without posts: worker {found['idle']['busy']:.3f}"]
    rate = 1.0  # TFLOP/s, by the seconds of the processor that the worker took
    for part, (rollouts, tokens) in _REAL.items():
        measured = found[part] | {"busy": found[part]["busy"] - idle}
        measured["lag"] = statistics.fmean(lags[part]) / _STEP if lags[part] else math.nan
        plan = Deployment(drafter, _STEP, rollouts, tokens, 3 / tokens, ranks=_RANKS, engines=1, post_share=_POST_SHARE)
        if part == list(_REAL)[1]:
            rate = (estimate(plan, settings, tflops=1.0, worker_gpus=1)["worker_gpus"].load or 0.0) / measured["busy"]
        said = {name: fact.value for name, fact in estimate(plan, settings, tflops=rate, worker_gpus=1).items()}
        said["redis"] = rollouts * FATE_BYTES + _RANKS * (
            BATCH_BYTES + Traffic(plan, settings).score_bytes
        )  # of a step
        cells = [f"{name} {said[name]:.4g}, {measured[name]:.4g}" for name in measured]
        lines.append(f"{part} (plan, measured): " + "; ".join(cells) + f"; {len(lags[part])} of {steps} versions came")
    return lines


def _cpu(pid: int) -> float:
    """Seconds of the processor that a process took, with threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _newest(url: str, came: list[tuple[float, int]], stop: threading.Event) -> None:
    """As an engine: when a drafter came, and to which policy version it was trained."""
    etag = ""
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            reply = client.get("/drafter/latest?run=default&wait=5", headers={"If-None-Match": etag})
            if reply.status_code == 200:
                etag, manifest = reply.headers["etag"], reply.json()
                client.get(f"/drafter/{manifest['version']}/model.safetensors?run=default").raise_for_status()
                came.append((time.monotonic(), (manifest.get("gate") or {}).get("trained_to") or -1))
            else:
                stop.wait(0.2)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--largest", nargs="+", choices=WORLDS, help="the full size alone, in these worlds")
    parser.add_argument("--real", type=float, metavar="SECONDS", help="of each part; 100 at least for five steps")
    parser.add_argument("--api", action="store_true", help="CPU of the API by size of a file, a head, a drafter")
    given = parser.parse_args()
    if given.api:
        for line in api_cpu():
            print(line, flush=True)
        return
    if given.real:
        print("\n".join(real(given.real)))
        return
    if given.largest:
        for line in largest(given.largest):
            print(line, flush=True)
        return
    lines, rows = report(given.deployments, given.seed)
    print("\n".join(lines), flush=True)
    grown, curves = exponents(given.seed)
    print("\n".join(["", *grown]))
    if given.plot is not None:
        draw(rows, curves, given.plot)


if __name__ == "__main__":
    main()
