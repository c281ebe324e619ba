"""Are the figures of `draftalign plan` right? A simulation of whole deployments, and a real service on two cores.

    python -m benchmarks.capacity [--deployments 30] [--plot docs/lab/capacity.png]   simulated; seeded; minutes
    python -m benchmarks.capacity --real 75                                           a real `draftalign up`
    python -m benchmarks.capacity --api                                               CPU of a real API by file size

The simulation is `benchmarks.deployment`. What a GPU does is the plan's own count there.

Worlds. `even`: the plan's own (equal rollouts, files spread over a part of a step); `told`: all files at a step's end,
and the plan is told so. The plan is not told of: `burst` (all files at a step's end), `slow` (one worker GPU at half
its speed), `tail` (lognormal lengths with sigma 1, step times with sigma 0.3), `all` (these three together).
Deployments whose `hook` does not fit by the plan are left out. A drafter is published once a policy version and run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.deployment import Found, World
from rl_hooks.format.eagle3 import DrafterConfig
from service.capacity.estimate import estimate
from service.capacity.sizes import POLICIES, Deployment, batches, file_bytes
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
    drafter = DrafterConfig.from_target(POLICIES["8b"], (2, 18, 33), 32_000)
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
        scale = "linear" if name == "busy" else "log"  # a share: less than one decade
        axis.set(xscale=scale, yscale=scale, xlabel="draftalign plan", ylabel="simulated", title=title)
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
                    name, lengths = f"b-{number}", [tokens] * ROLLOUTS
                    body = world.rollout_file(name, lengths=lengths, policy_version=number // 8, last_rows="predicting")
                    with contextlib.suppress(httpx.HTTPError):
                        sender.post("/rollouts?run=default", content=body, headers=headers)
                    number, size = number + 1, len(body)
                most = max(most, int((store.get("da:{default}:held") or b"0 0").split()[1]))
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
    planned = file_bytes(drafter, ROLLOUTS, tokens, "bfloat16", prompt_share=3 / tokens)
    lines = [f"bytes of a file: {size} measured, {planned} planned"]
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
