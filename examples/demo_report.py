"""What the demo leaves behind: a table, `steps.jsonl`, `summary.json` and `alpha.png`."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from examples.reference.decoders import NODES, compare_decoders
from service.errors import ServiceError

if TYPE_CHECKING:
    from examples.demo import LiveCount, Session

console = Console()
_EDGE_STEPS = 5
_DECODED_PROMPTS = 64
#: Replay and engine agree within 3 % (tests/examples/test_demo.py); wrong features cost many times that.
_LIVE_REPLAY_GAP = 0.1


@dataclass(frozen=True, slots=True)
class StepRow:
    """One RL step. α includes the bonus token; `alpha_served` and `alpha_frozen` are replay α before training on it.

    `alpha_frozen` and `publication_lag` are None for steps that the worker passed over, being behind.

    `alpha_served` is of `drafter_version`, the drafter that served the step's rollouts. It may be of a part of them:
    `alpha_served_reach` is half of the 95 % interval in which that of all of them lies, 0 where all were replayed.
    """

    step: int
    policy_version: int
    drafter_version: str
    reward: float | None
    entropy: float | None
    alpha_live: float | None
    alpha_live_low: float | None
    alpha_live_high: float | None
    alpha_served: float | None
    alpha_served_reach: float | None
    alpha_frozen: float | None
    alpha_ngram: float | None
    publication_lag: float | None
    live_rounds: int
    drafter_versions: int
    generation_seconds: float
    hook_overhead_seconds: float
    versions_published: int | None  # since the run began, when the step had been worked on; so the next two
    versions_refused: int | None
    tokens_trained: int | None
    action: str | None

    @classmethod
    def of(cls, version: int, live: LiveCount, logs: dict[str, float], point: dict[str, Any]) -> StepRow:
        """Join what the engine counted, what TRL logged and what the service scored."""
        low, high = live.interval()
        return cls(
            step=version,
            policy_version=version,
            drafter_version=live.drafter_version,
            reward=logs.get("reward"),
            entropy=logs.get("entropy", point.get("entropy")),
            alpha_live=live.alpha,
            alpha_live_low=low,
            alpha_live_high=high,
            alpha_served=point.get("alpha_served"),
            alpha_served_reach=_part_reach(point, rollouts=sum(rounds > 0 for _, rounds in live.per_rollout)),
            alpha_frozen=point.get("alpha_frozen"),
            alpha_ngram=point.get("alpha_ngram"),
            publication_lag=point.get("publication_lag"),
            live_rounds=live.rounds,
            drafter_versions=len(live.drafter_versions),
            generation_seconds=live.seconds,
            hook_overhead_seconds=live.hook_seconds,
            versions_published=_count(point.get("published_total")),
            versions_refused=_count(point.get("refused_total")),
            tokens_trained=_count(point.get("trained_tokens_total")),
            action=point.get("action"),
        )

    @property
    def replay_agrees(self) -> bool | None:
        """Whether replay α lies within the 95 % interval of live α, widened by what the rollouts not replayed may say.

        None for steps that several drafter versions served, and where either is not known.
        """
        live, low, high = self.alpha_live, self.alpha_live_low, self.alpha_live_high
        if self.drafter_versions != 1 or self.alpha_served is None or live is None or low is None or high is None:
            return None
        reach = self.alpha_served_reach or 0.0
        return live - math.hypot(live - low, reach) <= self.alpha_served <= live + math.hypot(high - live, reach)


def _part_reach(point: Mapping[str, Any], rollouts: int) -> float | None:
    """Half of the 95 % interval of the replay α of all `rollouts` about that of the part that was replayed.

    A mean of n out of N differs from that of all by (1 - n/N) of its own variance (Cochran 1977, Sampling Techniques,
    2.6).
    The service's interval is by prompt, and the part has answers of each prompt, so this is too wide if anything.
    """
    half, replayed = point.get("alpha_served_half_width"), point.get("rollouts_replayed")
    if half is None or not replayed or not rollouts:
        return None
    return float(half) * math.sqrt(max(1.0 - replayed / rollouts, 0.0))


def write_report(session: Session, rows: Sequence[StepRow], events: Sequence[dict[str, Any]]) -> None:
    """Print the table and write the files; ServiceError, once they are written, where the hook's features are wrong."""
    out = session.config.out
    composition, words = _composition(session, rows)
    decoders = _decoders(session)
    summary = _summary(session, rows, events)
    wrong = features_verdict(rows)
    summary |= {"decoders": decoders, "composition": composition, "explanation": words, "features_wrong": wrong}
    (out / "steps.jsonl").write_text("".join(json.dumps(_finite(asdict(row))) + "\n" for row in rows))
    (out / "summary.json").write_text(json.dumps(_finite(summary), indent=1) + "\n")
    draw(rows, out / "alpha.png", session.config.task.changes(len(rows)))
    console.print(_table(rows))
    console.print("\n" + words + "\n")
    console.print(
        f"The last drafter, decoded by the reference on {decoders['prompts']} prompts: α "
        f"{decoders['alpha_chain']:.2f} as a chain, {decoders['alpha_tree']:.2f} as a tree of {NODES} nodes; greedy "
        f"text the same with chain, tree and neither on {decoders['greedy_texts_equal']} of them.\n",
        highlight=False,
    )
    _print_summary(summary)
    console.print(f"\nwrote {out}/steps.jsonl, {out}/summary.json, {out}/alpha.png")
    if wrong:
        raise ServiceError(wrong)


def _composition(session: Session, rows: Sequence[StepRow]) -> tuple[dict[str, float | None], str]:
    from drafter.files.checkpoint import read_drafter
    from examples.composition import explain, take_apart
    from examples.policy import load

    initial_policy, tokenizer = load(session.config.task.base_policy)
    frozen = read_drafter(_first_drafter(session))
    versions = sorted(session.live)
    final_policy = session.trainer.accelerator.unwrap_model(session.trainer.model).eval()
    parts = take_apart(
        frozen,
        lambda rollout: session.config.task.is_worked(
            tokenizer.decode(list(rollout.prompt_ids)),
            tokenizer.decode(list(rollout.token_ids), skip_special_tokens=True),
        ),
        initial_policy=initial_policy,
        final_policy=final_policy,
        first=[r for v in versions[:2] for r in session.live[v].rollouts],
        last=[r for v in versions[-2:] for r in session.live[v].rollouts],
        depth=session.engine.drafter()["depth"],
        drafting=session.engine.drafter()["drafting"],
    )
    return parts, explain(parts, _mean(_known(rows[-2:], "alpha_served")))


def _first_drafter(session: Session) -> Path:
    """What the run began with: given to it, or the version that the service built from scratch, which it keeps."""
    from examples.demo import RUN
    from service.storage.layout import Layout

    return session.initial or min(Layout(session.state_dir).drafters(RUN).glob("v*"))


def _decoders(session: Session) -> dict[str, Any]:
    """The served drafter on the last policy, by chain and by tree."""
    from drafter.files.checkpoint import read_drafter
    from examples.demo import RUN
    from service.storage.layout import Layout
    from service.storage.registry import Registry

    layout = Layout(session.state_dir)
    served = Registry(layout).latest(RUN)
    if served is None:
        raise RuntimeError("the run serves no drafter, although it began with one")
    policy = session.trainer.accelerator.unwrap_model(session.trainer.model).eval()
    prompts = session.config.task.sample_prompts(_DECODED_PROMPTS, 1_000_000 + session.config.seed)
    return compare_decoders(
        policy,
        read_drafter(layout.drafter(RUN, served.version)),
        [session.tokenizer.encode(prompt) for prompt in prompts],
        depth=session.engine.drafter()["depth"],
        max_tokens=session.config.task.max_answer_tokens,
        eos_id=session.tokenizer.eos_token_id,
    )


def _summary(session: Session, rows: Sequence[StepRow], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    totals = session.service_totals()

    def first(name: str) -> float | None:
        return _mean(_known(rows[:_EDGE_STEPS], name))

    def last(name: str) -> float | None:
        return _mean(_known(rows, name)[-_EDGE_STEPS:])

    agree = [r.replay_agrees for r in rows if r.replay_agrees is not None]
    stats = session.attachment.stats()
    return {
        "steps": len(rows),
        "seed": session.config.seed,
        "depth": session.engine.drafter()["depth"],
        "reward_first": first("reward"),
        "reward_last": last("reward"),
        "alpha_served_first": first("alpha_served"),
        "alpha_served_last": last("alpha_served"),
        "alpha_live_last": last("alpha_live"),
        "alpha_frozen_first": first("alpha_frozen"),
        "alpha_frozen_last": last("alpha_frozen"),
        "alpha_ngram_last": last("alpha_ngram"),
        "publication_lag_last": last("publication_lag"),
        "publication_lag_mean": _mean(_known(rows, "publication_lag")),
        **reaching(rows, events),
        "live_within_interval": f"{sum(agree)} of {len(agree)} steps with one drafter version",
        "drift_share_of_limit": session.drift(),
        "versions_published": sum(e.get("event") == "published" for e in events),
        "versions_refused": sum(e.get("event") == "refused" for e in events),
        **kept_promises(events),
        "tokens_trained": _count(totals.get("draftalign_trained_tokens_total")),
        "train_seconds": totals.get("draftalign_train_seconds_total"),
        "hook_share_of_step": session.attachment.overhead_seconds / max(session.attachment.step_seconds, 1e-9),
        "hook": stats,
    }


def reaching(rows: Sequence[StepRow], events: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """How soon data reach the engine, in RL steps.

    `first_new_version_step`: the first step that was drafted by another version than the run began with.
    `steps_from_data_to_engine`: from the newest rollouts that a version was trained on to the first step that it
    drafted; median over versions, and the most.
    """
    first: dict[str, int] = {}
    for row in rows:
        first.setdefault(row.drafter_version, row.step)
    trained = {
        event["version"]: event["gate"]["trained_to"]
        for event in events
        if event.get("event") == "published" and "trained_to" in (event.get("gate") or {})
    }
    steps = [step - trained[version] for version, step in first.items() if version in trained]
    return {
        "first_new_version_step": min((step for version, step in first.items() if version in trained), default=None),
        "steps_from_data_to_engine": statistics.median(steps) if steps else None,
        "steps_from_data_to_engine_most": max(steps, default=None),
    }


def kept_promises(events: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What publishes promised beside what they brought on later rollouts, relative gains added up as logarithms.

    Of the versions whose gain was measured: those that served long enough to draft rollouts that did not choose them.
    """
    measured = [event for event in events if event.get("event") == "realised"]
    promised, realised = (sum(math.log1p(event[name]) for event in measured) for name in ("promised", "realised"))
    return {
        "promises_measured": len(measured),
        "promised_log_gain": promised,
        "realised_log_gain": realised,
        "realised_to_promised": realised / promised if promised > 0 else None,
    }


def _print_summary(summary: dict[str, Any]) -> None:
    console.print(
        f"  first, last: in mean over the first {_EDGE_STEPS} steps, and the last {_EDGE_STEPS} with that figure"
    )
    table = Table(show_header=False, box=None, padding=(0, 2))
    for key, value in summary.items():
        if key not in ("composition", "decoders", "drift_share_of_limit", "explanation", "features_wrong", "hook"):
            table.add_row(key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    if not summary["drift_share_of_limit"]:
        console.print("  drift: not watched yet, the monitor still learns the level that it would compare with")
    for lane, share in summary["drift_share_of_limit"].items():
        state = "alarm" if share > 1 else "no alarm"
        console.print(f"  drift, {lane} lane: {share:.0%} of its limit ({state})", highlight=False)


def _table(rows: Sequence[StepRow]) -> Table:
    """The steps that the worker compared all drafters on; those that it passed over know neither frozen nor lag."""
    compared = _compared(rows)
    headings = ("step", "ver", "reward", "entr.", "live", "served", "frozen", "n-gram", "lag")
    table = Table(
        title=f"{len(compared)} of {len(rows)} RL steps, on which all drafters were compared\n"
        "α = tokens per round, of that step alone; ktok trained; ms of hook",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in (*headings, "pub/ref", "ktok", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    stride = max(1, len(compared) // 30)
    for row in [r for i, r in enumerate(compared) if i % stride == 0 or i == len(compared) - 1]:
        numbers = (row.reward, row.entropy, row.alpha_live, row.alpha_served, row.alpha_frozen, row.alpha_ngram)
        cells = [f"{v:.2f}" if v is not None else "-" for v in (*numbers, row.publication_lag)]
        known = row.versions_published is not None and row.tokens_trained is not None
        cells.append(f"{row.versions_published}/{row.versions_refused}" if known else "-")
        cells.append(f"{(row.tokens_trained or 0) / 1000:.0f}" if known else "-")
        version = row.drafter_version.partition("-")[0].lstrip("v0")
        table.add_row(
            str(row.step), f"v{version}" if version else "-", *cells, f"{1000 * row.hook_overhead_seconds:.0f}"
        )
    return table


def plot_title(rows: Sequence[StepRow], changes: Sequence[int] = ()) -> str:
    """What the plot shows, in its own figures; `changes` are the steps at which the task asked for something else."""
    served = [(row.alpha_served, row.step) for row in rows if row.alpha_served is not None]
    if not served:
        return f"α over {len(rows)} RL steps"
    lows = [min(part) for part in _cut(served, changes) if part]
    text = f"α over {len(rows)} RL steps: {served[0][0]:.1f} at the start, {lows[0][0]:.1f} at its lowest"
    text += f" (step {lows[0][1]})" + "".join(f", {a:.1f} after the task changed (step {s})" for a, s in lows[1:])
    both = [row for row in _compared(rows) if row.alpha_served is not None][-_EDGE_STEPS:]
    means = [_mean(_known(both, name)) for name in ("alpha_served", "alpha_frozen")]
    if means[0] is None or means[1] is None:
        last = [alpha for alpha, _ in served[-_EDGE_STEPS:]]
        return f"{text}, {sum(last) / len(last):.1f} over the last {len(last)} with a figure"
    over = f"the last {len(both)} steps that compared both ({both[0].step} to {both[-1].step})"
    return f"{text}; over {over}: aligned {means[0]:.1f}, frozen {means[1]:.1f}"


def _compared(rows: Sequence[StepRow]) -> list[StepRow]:
    """The steps on which the worker compared all drafters: it passed over the others, being behind."""
    return [row for row in rows if row.alpha_frozen is not None and row.publication_lag is not None]


def _cut(served: Sequence[tuple[float, int]], changes: Sequence[int]) -> list[list[tuple[float, int]]]:
    """The (α, step) pairs before the first change, between two changes, and after the last."""
    edges = (-math.inf, *changes, math.inf)
    return [[p for p in served if low <= p[1] < high] for low, high in itertools.pairwise(edges)]


def features_verdict(rows: Sequence[StepRow]) -> str | None:
    """What is wrong with the features that the hook sent; None where replay on them agrees with the engine's count.

    Replay drafts from the hook's features, the engine from its own. Compared are the means over the later half of the
    steps that one drafter version served. Wrong features show although a drafter learns from them: it is the engine
    that cannot use it.
    """
    pure = [
        (row.alpha_served, row.alpha_live)
        for row in rows[len(rows) // 2 :]
        if row.drafter_versions == 1 and row.alpha_served is not None and row.alpha_live is not None
    ]
    if len(pure) < _EDGE_STEPS:
        return None
    replayed, live = (sum(column) / len(pure) for column in zip(*pure, strict=True))
    if abs(math.log(replayed / live)) <= _LIVE_REPLAY_GAP:
        return None
    return (
        f"the hook's features are not the engine's: over {len(pure)} steps α is {replayed:.2f} replayed on what the "
        f"hook sent, and {live:.2f} as the engine counts it; expected them to agree within {_LIVE_REPLAY_GAP:.0%}. "
        "Drafters trained on such features are not worth serving: mend the hook"
    )


def draw(rows: Sequence[StepRow], path: Path, changes: Sequence[int] = ()) -> None:
    """Draw α over RL steps, with reward and entropy below; a line where the task changes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row.step for row in rows]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7.2), sharex=True, height_ratios=(3, 1.2), constrained_layout=True
    )
    low = [r.alpha_live_low if r.alpha_live_low is not None else math.nan for r in rows]
    high = [r.alpha_live_high if r.alpha_live_high is not None else math.nan for r in rows]
    top.fill_between(steps, low, high, color="#7fb8e6", alpha=0.35, lw=0, label="live α, 95 % interval")
    compared = f"compared at {len(_known(rows, 'alpha_frozen'))} of {len(rows)} steps"
    series = (
        ("alpha_live", "live α (counted by the engine)", "#1f77b4", ":", 1.2),
        ("alpha_served", "aligned drafter, replay α", "#0b3d91", "-", 2.2),
        ("alpha_frozen", f"drafter frozen at the start, replay α, {compared}", "#c0392b", ".-", 2.0),
        ("alpha_ngram", "n-gram drafting on the same rollouts", "#7f8c8d", "--", 1.4),
    )
    for name, label, colour, style, width in series:
        drawn = [r for r in rows if getattr(r, name) is not None]
        figures = [getattr(r, name) for r in drawn]
        top.plot([r.step for r in drawn], figures, style, color=colour, lw=width, ms=8, label=label)
    published = [
        r.step for r, before in zip(rows[1:], rows, strict=False) if r.drafter_version != before.drafter_version
    ]
    for number, step in enumerate(published):
        top.axvline(step, ymax=0.03, color="#27ae60", lw=1.5, label=None if number else "a new version serves")
    for number, step in enumerate(changes):
        for panel in (top, bottom):
            first = panel is top and not number
            panel.axvline(step, color="#e67e22", ls="--", lw=1.2, label="the task changes" if first else None)
    top.set_ylabel("α: tokens per verification round")
    top.set_ylim(bottom=0.9)
    top.grid(alpha=0.25)
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=2, frameon=False, fontsize=8.5)
    title = textwrap.fill(plot_title(rows, changes), 105)
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=10)
    for name, label, colour in (("reward", "reward", "#27ae60"), ("entropy", "policy entropy (nats)", "#8e44ad")):
        values = [v if (v := getattr(r, name)) is not None else math.nan for r in rows]
        bottom.plot(steps, values, color=colour, label=label)
    bottom.set_xlabel("RL step (policy version)")
    bottom.grid(alpha=0.25)
    bottom.legend(loc="center right", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _known(rows: Sequence[StepRow], name: str) -> list[float]:
    """Values of the rows that have one: a worker that is behind scores what it passes over with one drafter alone."""
    return [value for row in rows if (value := getattr(row, name)) is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _finite(table: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in table.items()}
