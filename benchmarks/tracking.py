"""Which recipe keeps a drafter closest to a policy that RL moves: replay one recorded run through many recipes.

    python -m benchmarks.tracking record --out DIR [--seeds 0 1] [--steps 40] [--learning-rate 1e-3]
    python -m benchmarks.tracking replay --out DIR [--only NAME ...]     # appends to DIR/results.jsonl; goes on from it
    python -m benchmarks.tracking report --out DIR [--plot FILE]   # the tables of docs/lab/recipes.md, as Markdown

Every recipe sees the same rollouts in the same order, as the worker does: a policy version's rollouts are *tested* on
(replay α of the drafter as it stands), then *trained* on through `DrafterTrainer`, in steps that the worker's own
`RecentRollouts` draws. Gate and publication are left out: what is scored is the candidate. Run with OMP_NUM_THREADS=1.

CPU seconds are of this process's training alone, without scoring. Gap: what the best recipe of the same scoring mode
has more of α at that version. Intervals are Student's t over blocks of consecutive versions (of which neighbours
resemble each other), paired with the reference recipe, over all seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import t as student

from benchmarks.aims import AimedTrainer
from benchmarks.parts import part_of
from benchmarks.recipes import FROZEN, NAMED, RECIPES, REFERENCE, REFERENCES, REPEATED, SERVING_DEPTH, Recipe
from benchmarks.recording import Recording, open_recording, record
from drafter.batch import RolloutBatch
from drafter.files.checkpoint import read_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from examples import TASKS
from examples.demo import PROMPTS_PER_STEP
from examples.initial_drafter import SEQUENCES_PER_STEP, save_drafter, train_initial_drafter
from examples.policy import load
from rl_hooks.sending.features import to_e4m3
from service.worker.recent import RecentRollouts, Task, taken

BLOCK_VERSIONS: Final = 2
#: Rollouts of the base policy that show what a drafter has forgotten at the end.
BASE_ROLLOUTS: Final = 256
DRAFTINGS: Final = ("probabilistic", "greedy")


@dataclass
class Track:
    """What one recipe did on one seed; one entry per policy version, scored before that version is trained on."""

    recipe: str
    seed: int
    versions: list[int]
    alpha: dict[str, list[float]] = field(default_factory=lambda: {d: [] for d in DRAFTINGS})
    cpu_seconds: list[float] = field(default_factory=list)  # spent on training before that version, in all
    windows: int = 0  # optimizer steps
    skipped: int = 0
    total_cpu_seconds: float = 0.0
    base_alpha: float = math.nan  # of the last drafter, on rollouts of the base policy


def follow(recipe: Recipe, recording: Recording) -> Track:
    """Test then train along the recorded versions."""
    drafter = copy.deepcopy(initial_drafter(recording.directory, recipe.from_scratch, recipe.extra_steps))
    config = TrainConfig(
        steps_ahead=recipe.steps_ahead,
        learning_rate=recipe.learning_rate,
        warmup_windows=recipe.warmup_windows,
        optimizer=recipe.optimizer,
        compute_dtype="bfloat16" if recipe.bfloat16 else "float32",
    )
    trainer = DrafterTrainer(drafter, config)
    if recipe.aim:
        trainer = AimedTrainer(drafter, config)
        trainer.aim = recipe.aim
    policies = {v: _policy(h, v) for v, h in zip(recording.versions, recording.heads, strict=True)}
    track = Track(recipe.name, recording.seed, list(recording.versions))
    with tempfile.TemporaryDirectory() as scratch:
        # The files stay where they are: it is never settled.
        recent = RecentRollouts(Path(scratch), capacity_tokens=recipe.recent_tokens, run=recipe.name)
        for index, (version, batch) in enumerate(zip(recording.versions, recording.batches, strict=True)):
            for drafting in DRAFTINGS:
                result = replay(drafter, batch, policies[version], depth=recipe.serving_depth, drafting=drafting)
                track.alpha[drafting].append(result.alpha)
            track.cpu_seconds.append(track.total_cpu_seconds)
            started = time.process_time()
            sent = part_of(as_sent(batch, policies[version].needed_head(), recipe), recipe.part)
            newest = recent.add(recording.files[index], sent)
            if recipe.passes and index % recipe.every == 0:
                older = recent.but([newest])
                task = Task([newest], older, recipe.passes, recipe.step_tokens, index, recipe.newest_share)
                for drawn in _substituted(map(taken, task.drawn()), recipe, recording, seed=index):
                    report = trainer.step([(b, policies[b.policy_version]) for b in drawn])
                    track.skipped += report.skipped is not None
                track.total_cpu_seconds += time.process_time() - started
    base = recording.base.select(range(min(BASE_ROLLOUTS, recording.base.rollouts)))
    track.base_alpha = replay(drafter, base, _policy(recording.heads[0]), depth=recipe.serving_depth).alpha
    track.windows = trainer.windows
    return track


def _policy(head: torch.Tensor, version: int = 0) -> Policy:
    """A policy whose embedding is its head, as the demo's."""
    return Policy(version, head, TargetHead(head))


def _substituted(
    draws: Iterator[list[RolloutBatch]], recipe: Recipe, recording: Recording, seed: int
) -> Iterator[list[RolloutBatch]]:
    """The worker's draws, some or all of them replaced by as many tokens of the base policy's rollouts."""
    rng = np.random.default_rng(1_000_000 + seed)
    for drawn in draws:
        if recipe.stale:
            yield [_draw_base(recording.base, recipe.step_tokens, rng)]
        elif recipe.reservoir and len(drawn) > 1 and rng.random() < recipe.reservoir:
            yield [drawn[0], _draw_base(recording.base, recipe.step_tokens // 2, rng)]
        else:
            yield drawn


def _draw_base(base: RolloutBatch, tokens: int, rng: np.random.Generator) -> RolloutBatch:
    """Random whole rollouts, on average of that many tokens."""
    count = max(1, round(tokens * base.rollouts / base.tokens))
    return base.select(sorted(int(i) for i in rng.choice(base.rollouts, size=count, replace=False)))


def as_sent(batch: RolloutBatch, head: TargetHead, recipe: Recipe) -> RolloutBatch:
    """The batch as it would have come in with fp8 features."""
    if recipe.fp8:
        layers = batch.aux_hidden.shape[1] // head.hidden_size
        values, scale = to_e4m3(batch.aux_hidden.view(batch.tokens * layers, -1))
        batch = replace(batch, aux_hidden=(values.float() * scale[:, None]).view(batch.tokens, -1))
    return batch


@lru_cache(maxsize=8)
def initial_drafter(directory: Path, from_scratch: bool = False, extra_steps: int = 0) -> Eagle3Drafter:
    """The drafter before RL: the demo's recipe on rollouts of the base policy, or without it, or with more steps.

    Kept beside the recording: every recipe starts from the very same one.
    """
    recording = open_recording(directory, until=1)
    steps = 0 if from_scratch else recording.task.initial_drafter.steps
    kept = directory / f"drafter-kl-{steps}"
    if extra_steps:
        kept = kept.with_name(f"{kept.name}-kl-{extra_steps}")
    if kept.exists():
        return read_drafter(kept)
    policy, _ = load(recording.task.base_policy)
    if extra_steps:
        drafter = copy.deepcopy(initial_drafter(directory, from_scratch))
        _train_on_base(drafter, recording, extra_steps, seed=1000 + recording.seed)
    else:
        drafter = train_initial_drafter(
            policy, recording.base, depth=SERVING_DEPTH, seed=recording.seed, task=recording.task, steps=0
        )
        _train_on_base(drafter, recording, steps, seed=recording.seed)
    save_drafter(drafter, kept)
    return drafter


def _train_on_base(drafter: Eagle3Drafter, recording: Recording, steps: int, seed: int) -> None:
    recipe = recording.task.initial_drafter
    trainer = DrafterTrainer(drafter, TrainConfig(SERVING_DEPTH, recipe.learning_rate, optimizer=recipe.optimizer))
    policy, rng = _policy(recording.heads[0]), np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(recording.base.rollouts, size=SEQUENCES_PER_STEP, replace=False)
        trainer.step([(recording.base.select([int(i) for i in chosen]), policy)])


# --- results --------------------------------------------------------------------------------------------------------


def read_tracks(path: Path) -> list[Track]:
    """What `replay` has appended so far."""
    return [Track(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Row:
    """One recipe over all its seeds. α are means over versions and seeds, the first version left out."""

    recipe: str
    seeds: int
    alpha: float
    gain: float  # to the reference, paired
    reach: float  # half the 95 % interval of it
    last_fifth: float
    gap: float  # to the best recipe, in α
    base_alpha: float
    windows: float
    cpu_seconds: float
    greedy: float
    greedy_gain: float
    greedy_reach: float


def rows_of(tracks: Sequence[Track], against: str = REFERENCE) -> list[Row]:
    """One row per recipe, in the order of `RECIPES`; compared with recipe `against` on the seeds that it has itself."""
    by: dict[str, dict[int, Track]] = {}
    for track in tracks:
        by.setdefault(track.recipe, {})[track.seed] = track
    rows = []
    for recipe in (r for r in RECIPES if r.name in by):
        name = recipe.name
        reference = by.get(against if recipe.serving_depth == SERVING_DEPTH else REFERENCES[recipe.serving_depth], {})
        of_seed = by[name]
        seeds = sorted(of_seed.keys() & reference.keys())
        if not seeds:
            continue
        peers = {r.name for r in RECIPES if r.serving_depth == recipe.serving_depth}
        best = best_alpha([t for t in tracks if t.recipe in peers])
        alpha, greedy = (_curves(of_seed, seeds, drafting) for drafting in DRAFTINGS)
        gain, reach = paired(alpha - _curves(reference, seeds, "probabilistic"))
        greedy_gain, greedy_reach = paired(greedy - _curves(reference, seeds, "greedy"))
        fifth = max(1, round(alpha.shape[1] / 5))
        rows.append(
            Row(
                recipe=name,
                seeds=len(seeds),
                alpha=float(alpha.mean()),
                gain=gain,
                reach=reach,
                last_fifth=float(alpha[:, -fifth:].mean()),
                gap=float(np.mean([best[s][1:] - of_seed[s].alpha["probabilistic"][1:] for s in seeds])),
                base_alpha=float(np.mean([of_seed[s].base_alpha for s in seeds])),
                windows=float(np.mean([of_seed[s].windows for s in seeds])),
                cpu_seconds=float(np.mean([of_seed[s].total_cpu_seconds for s in seeds])),
                greedy=float(greedy.mean()),
                greedy_gain=greedy_gain,
                greedy_reach=greedy_reach,
            )
        )
    return rows


def best_alpha(tracks: Sequence[Track]) -> dict[int, npt.NDArray[np.float64]]:
    """Per seed, the best recipe's α at each version."""
    seeds = {t.seed for t in tracks}
    return {s: np.max([t.alpha["probabilistic"] for t in tracks if t.seed == s], axis=0) for s in seeds}


def _curves(of_seed: dict[int, Track], seeds: Sequence[int], drafting: str) -> npt.NDArray[np.float64]:
    """α [seeds, versions - 1]: at the first version nothing has been trained yet."""
    return np.array([of_seed[s].alpha[drafting][1:] for s in seeds])


def paired(difference: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean of [seeds, versions] and half of its 95 % interval over blocks of consecutive versions."""
    blocks = max(1, difference.shape[1] // BLOCK_VERSIONS)
    means = np.concatenate([[part.mean() for part in np.array_split(row, blocks)] for row in difference])
    if len(means) < 2:
        return float(difference.mean()), math.nan
    return float(difference.mean()), float(student.ppf(0.975, len(means) - 1) * means.std(ddof=1) / len(means) ** 0.5)


def markdown(rows: Sequence[Row], against: str = REFERENCE) -> str:
    """The table."""
    lines = [
        "| recipe | seeds | α | to reference | last fifth | gap | base α | steps | CPU s | greedy α | to ref. |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        own = r.recipe == against
        gain = "" if own else f"{r.gain:+.3f} ± {r.reach:.3f}"
        greedy = "" if own else f"{r.greedy_gain:+.3f} ± {r.greedy_reach:.3f}"
        lines.append(
            f"| {r.recipe} | {r.seeds} | {r.alpha:.3f} | {gain} | {r.last_fifth:.3f} | {r.gap:.3f} | "
            f"{r.base_alpha:.2f} | {r.windows:.0f} | {r.cpu_seconds:.1f} | {r.greedy:.3f} | {greedy} |"
        )
    return "\n".join(lines)


def plot(tracks: Sequence[Track], rows: Sequence[Row], path: Path) -> None:
    """α per version, the gap against the CPU seconds spent by then, and each recipe's gain against its CPU seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    first = min(t.seed for t in tracks if t.recipe == REFERENCE)  # curves: the one seed that every recipe has
    by = {r.recipe: [t for t in tracks if t.recipe == r.recipe and t.seed == first] for r in rows}
    alpha = {name: np.mean([t.alpha["probabilistic"] for t in of_seed], axis=0) for name, of_seed in by.items()}
    best = best_alpha(tracks)[first]
    shown = [FROZEN, REFERENCE, "8 passes", "rate 6e-3, warm-up, 8 passes", "muon, 8 passes"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8), constrained_layout=True)
    for number, name in enumerate(n for n in shown if n in by):
        cpu = np.mean([t.cpu_seconds for t in by[name]], axis=0)
        left.plot(by[name][0].versions, alpha[name], color=f"C{number}", label=name)
        if cpu[-1]:
            middle.plot(cpu, best - alpha[name], color=f"C{number}", label=name)
    left.plot(by[REFERENCE][0].versions, best, ":", color="black", label="best recipe at each version")
    left.set(
        xlabel="policy version (RL steps)", ylabel="α: tokens per verification round", title=f"Tracking (seed {first})"
    )
    middle.set(
        xlabel="CPU seconds of training so far", ylabel="gap in α", title=f"Gap to the best recipe (seed {first})"
    )
    right.set(
        xlabel="CPU seconds of training",
        ylabel="mean α, less the reference's on the same seeds",
        title="What a recipe costs and gives",
    )
    recipes = {r.name: r for r in RECIPES}
    for row in (r for r in rows if recipes[r.recipe].serving_depth == SERVING_DEPTH):  # others have another reference
        color = "#c0392b" if recipes[row.recipe].optimizer == "muon" else "#0b3d91"
        right.plot(row.cpu_seconds, row.gain, "o", color=color, ms=4)
        if row.recipe in NAMED:
            right.annotate(
                row.recipe, (row.cpu_seconds, row.gain), fontsize=7, xytext=(5, -3), textcoords="offset points"
            )
    right.plot([], [], "o", color="#0b3d91", ms=4, label="AdamW")
    right.plot([], [], "o", color="#c0392b", ms=4, label="Muon")
    right.set_xlim(-3, 1.45 * max(row.cpu_seconds for row in rows))
    right.legend(fontsize=8, loc="lower right")
    left.legend(fontsize=8)
    middle.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "replay", "report"])
    parser.add_argument("--out", type=Path, required=True, help="directory of recordings and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--task", choices=TASKS, default="elicit")
    parser.add_argument("--steps", type=int, default=40, help="RL steps to record")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the RL run that is recorded")
    parser.add_argument("--prompts", type=int, default=PROMPTS_PER_STEP, help="of an RL step; 8 rollouts of each")
    parser.add_argument("--every", type=int, default=2, help="replay every n-th policy version")
    parser.add_argument("--until", type=int, default=30, help="first policy version that is left out")
    parser.add_argument("--only", nargs="*", default=[], help="names of recipes")
    parser.add_argument("--against", default=REFERENCE, help="name of the recipe that a report compares with")
    parser.add_argument("--plot", type=Path, help="where to draw the report")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.action == "record":
        for seed in options.seeds:
            record(
                options.out / f"seed-{seed}",
                TASKS[options.task],
                seed=seed,
                steps=options.steps,
                learning_rate=options.learning_rate,
                prompts=options.prompts,
            )
    elif options.action == "replay":
        _replay_all(options)
    else:
        tracks = read_tracks(options.out / "results.jsonl")
        for needed in {options.against, REFERENCE} if options.plot else {options.against}:
            if not any(t.recipe == needed for t in tracks):
                parser.error(f"{options.out} holds no results of {needed!r}; run `replay` first")
        rows = rows_of(tracks, options.against)
        print(markdown(rows, options.against))
        if options.plot:
            plot(tracks, rows, options.plot)


def _replay_all(options: Any) -> None:
    results = options.out / "results.jsonl"
    done = {(t.recipe, t.seed) for t in read_tracks(results)}
    recordings = [
        open_recording(options.out / f"seed-{seed}", every=options.every, until=options.until) for seed in options.seeds
    ]
    work = [(recipe, recording) for recipe in RECIPES[:REPEATED] for recording in recordings]
    work += [(recipe, recording) for recording in recordings for recipe in RECIPES[REPEATED:]]
    for recipe, recording in work:
        if (recipe.name, recording.seed) in done or (options.only and recipe.name not in options.only):
            continue
        track = follow(recipe, recording)
        with results.open("a") as file:
            file.write(json.dumps(asdict(track)) + "\n")
        mean, last = np.mean(track.alpha["probabilistic"][1:]), track.alpha["probabilistic"][-1]
        print(
            f"seed {track.seed} {recipe.name:34s} α {mean:.3f}, last {last:.2f}, {track.total_cpu_seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
