"""What α owes to the features that a hook sends, and published claims that a CPU can show, on `examples.recall`.

    python -m benchmarks.claims --out DIR [--seeds 0 1 2] [--steps 48]     # records each seed's RL run once, into DIR
    python -m benchmarks.claims --quick --seeds 0 [--depth 7]              # base policy only; a minute a seed

For the base policy ("start") and for the policy that RL ended with ("after RL"), on its rollouts: three in four train a
drafter from scratch (the project's `DrafterTrainer`), the others are replayed (`drafter.replay`, depth 4, so α is 5
at most). Prompts are all different, so no prompt is in both. Three columns:

* *trained and served*: the drafter learnt from these features and drafts from them: all that they hold.
* *served alone*: a drafter that learnt from the right features drafts from these: what a broken engine counts.
* *trained alone*: a drafter that learnt from these drafts from the right ones: what a broken hook does to engines.

Every figure is least and most over the seeds; a seed is an RL run, its rollouts and the drafters' initial weights. All
share the shipped base policy.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.recipes import Recipe
from benchmarks.recording import LAST_FILE, STALE_FILE, open_recording, record
from benchmarks.tracking import follow
from drafter.batch import RolloutBatch, load_batch
from drafter.files.checkpoint import read_drafter
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from examples import recall
from examples.features import Rollout, batch_of
from examples.initial_drafter import save_drafter
from examples.policy import AUX_LAYERS, load

DEPTH: Final = 4
SEQUENCES_PER_STEP: Final = 32
TRAIN_STEPS: Final = 250
LEARNING_RATE: Final = 1e-2
RL_LEARNING_RATE: Final = 1e-3
#: Bars of issue 12: α with three layers, over α with something less.
BARS: Final = {"zeros": 1.5, "last layer alone": 1.05}

Table = dict[str, dict[str, float]]  # row -> column -> α


@dataclass(frozen=True)
class Stage:
    """Rollouts of one policy, with what is needed to train and to score drafters on them."""

    train: RolloutBatch
    test: RolloutBatch
    policy: Policy
    stale: tuple[RolloutBatch, RolloutBatch] | None = None  # the same, with the base policy's features

    @classmethod
    def of(cls, batch: RolloutBatch, head: Tensor, stale: RolloutBatch | None = None) -> Stage:
        """Every fourth rollout is kept for the test."""
        test = list(range(0, batch.rollouts, 4))
        train = sorted(set(range(batch.rollouts)) - set(test))
        halves = None if stale is None else (stale.select(train), stale.select(test))
        # The policy's embedding is its head.
        return cls(
            batch.select(train), batch.select(test), Policy(batch.policy_version, head, TargetHead(head)), halves
        )


# --- what a hook could send ---------------------------------------------------------------------------------------


def last_layer(batch: RolloutBatch) -> RolloutBatch:
    """The last of the auxiliary layers alone."""
    return replace(batch, aux_hidden=_layers(batch)[:, -1].contiguous(), aux_layers=AUX_LAYERS[-1:])


def final_state(batch: RolloutBatch) -> RolloutBatch:
    """The state that the policy's head reads."""
    return replace(batch, aux_hidden=batch.last_hidden.clone(), aux_layers=AUX_LAYERS[-1:])


def zeros(batch: RolloutBatch) -> RolloutBatch:
    """Nothing."""
    return replace(batch, aux_hidden=torch.zeros_like(batch.aux_hidden))


def wrong_order(batch: RolloutBatch) -> RolloutBatch:
    """The right layers, the first and the last exchanged."""
    return replace(batch, aux_hidden=_layers(batch).flip(1).flatten(1))


def shuffled(batch: RolloutBatch) -> RolloutBatch:
    """Those of the next rollout, place by place (its last place is repeated where it is shorter)."""
    starts, lengths = batch.cu_seqlens[:-1], batch.cu_seqlens.diff()
    rows = [
        starts[(r + 1) % batch.rollouts] + torch.arange(int(n)).clamp(max=int(lengths[(r + 1) % batch.rollouts]) - 1)
        for r, n in enumerate(lengths)
    ]
    return replace(batch, aux_hidden=batch.aux_hidden[torch.cat(rows)])


def _layers(batch: RolloutBatch) -> Tensor:
    return batch.aux_hidden.view(batch.tokens, len(AUX_LAYERS), -1)


#: By row of the table; with one layer there is no other to serve or to have trained on.
ONE_LAYER: Final[Mapping[str, Callable[[RolloutBatch], RolloutBatch]]] = {
    "last layer alone": last_layer,
    "final state": final_state,
}
BROKEN: Final[Mapping[str, Callable[[RolloutBatch], RolloutBatch]]] = {
    "zeros": zeros,
    "shuffled": shuffled,
    "wrong order": wrong_order,
}


# --- drafters -------------------------------------------------------------------------------------------------------


def train(
    batch: RolloutBatch, policy: Policy, *, layers: int, seed: int, depth: int = DEPTH, steps: int = TRAIN_STEPS
) -> Eagle3Drafter:
    """From scratch, by the optimizer that ships (Muon)."""
    task = recall.TASK
    head = policy.needed_head().lm_head
    counts = torch.bincount(batch.input_ids[batch.loss_mask], minlength=head.shape[0])
    vocabulary = DraftVocabulary.build(counts, task.draft_vocabulary, always=[task.eos_id])
    config = DrafterConfig.from_target(_base_policy().config.to_dict(), AUX_LAYERS[-layers:], len(vocabulary))
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, vocabulary)
    drafter.init_from_target(head[vocabulary.ids])
    trainer = DrafterTrainer(drafter, TrainConfig(depth, LEARNING_RATE, warmup_windows=30))
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(batch.rollouts, size=min(SEQUENCES_PER_STEP, batch.rollouts), replace=False)
        trainer.step([(batch.select([int(i) for i in chosen]), policy)])
    return drafter


def alpha(drafter: Eagle3Drafter, batch: RolloutBatch, policy: Policy, depth: int = DEPTH) -> float:
    """Replay α, of chains of 4 drafts unless said otherwise."""
    return replay(drafter, batch, policy, depth=depth).alpha


@cache
def _base_policy() -> Any:
    return load(recall.TASK.base_policy)[0]


def features_table(
    stage: Stage,
    right: Eagle3Drafter,
    *,
    seed: int,
    rows: Collection[str] = (*ONE_LAYER, *BROKEN),
    steps: int = TRAIN_STEPS,
    depth: int = DEPTH,
) -> Table:
    """α by what the hook sends; `right` was trained on `stage.train` as it is. Each row is a training."""

    def trained(batch: RolloutBatch, layers: int = len(AUX_LAYERS)) -> Eagle3Drafter:
        return train(batch, stage.policy, layers=layers, seed=seed, steps=steps, depth=depth)

    def scored(drafter: Eagle3Drafter, batch: RolloutBatch) -> float:
        return alpha(drafter, batch, stage.policy, depth)

    table: Table = {"three layers": {"both": scored(right, stage.test)}}
    for name, of in ((name, of) for name, of in ONE_LAYER.items() if name in rows):
        table[name] = {"both": scored(trained(of(stage.train), layers=1), of(stage.test))}
    wrong = {name: (of(stage.train), of(stage.test)) for name, of in BROKEN.items() if name in rows}
    if stage.stale is not None:
        wrong["stale (base policy's)"] = stage.stale
    for name, (to_train, to_serve) in wrong.items():
        drafter = trained(to_train)
        table[name] = {
            "both": scored(drafter, to_serve),
            "served": scored(right, to_serve),
            "trained": scored(drafter, stage.test),
        }
    test = stage.test
    lookup = ngram_replay(test.input_ids, test.loss_mask, test.cu_seqlens, depth=depth)
    table["n-gram, no drafter"] = {"both": lookup.alpha}
    return table


def start_claims(stage: Stage, right: Eagle3Drafter, *, seed: int) -> dict[str, float]:
    """α at the start by how the drafter was trained: depth of the unroll, and the text it learnt from."""
    shallow = train(stage.train, stage.policy, layers=len(AUX_LAYERS), seed=seed, depth=1)
    elsewhere = train(other_text(stage.train.rollouts, seed), stage.policy, layers=len(AUX_LAYERS), seed=seed)
    return {
        "trained 4 deep (training-time test), on the policy's own answers": alpha(right, stage.test, stage.policy),
        "trained 1 deep": alpha(shallow, stage.test, stage.policy),
        "trained on random words (out of domain)": alpha(elsewhere, stage.test, stage.policy),
    }


def other_text(count: int, seed: int) -> RolloutBatch:
    """Random keys and letters, run through the base policy: what a general corpus is to this task."""
    rng = random.Random(seed)
    words = {word: i for i, word in enumerate(recall.VOCABULARY)}
    used = [words[x] for x in (*recall.KEY_NAMES, *recall.LETTERS)]
    prompt, answer = recall.TASK.prompt_tokens, recall.ANSWER_TOKENS
    texts = [rng.choices(used, k=prompt + answer) for _ in range(count)]
    return batch_of(_base_policy(), [Rollout(tuple(t[:prompt]), tuple(t[prompt:]), (0.0,) * answer) for t in texts])


#: Along an RL run: never, at a fixed interval, at every version; the same work in all but the first.
TRACKERS: Final = (
    Recipe("never trained after its start", passes=0),
    Recipe(
        "every 5th version, 5x the passes", optimizer="muon", learning_rate=1e-2, warmup_windows=30, every=5, passes=20
    ),
    Recipe("every version", optimizer="muon", learning_rate=1e-2, warmup_windows=30, passes=4),
)


# --- the run --------------------------------------------------------------------------------------------------------


def quick_stage(count: int, seed: int) -> Stage:
    """Rollouts of the base policy by plain generation: no server, no RL."""
    policy, tokenizer = _base_policy(), recall.TASK.build_tokenizer()
    ids = torch.tensor([tokenizer.encode(text) for text in recall.sample_prompts(count, seed)])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        texts = policy.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=recall.TASK.max_answer_tokens,
        )  # fmt: skip
        logprobs = policy(input_ids=texts).logits.float().log_softmax(-1)
    rollouts = []
    for row, text in enumerate(texts.tolist()):
        answer = text[ids.shape[1] :]
        answer = answer[: answer.index(recall.TASK.eos_id) + 1] if recall.TASK.eos_id in answer else answer
        taken = [float(logprobs[row, ids.shape[1] + j - 1, token]) for j, token in enumerate(answer)]
        rollouts.append(Rollout(tuple(text[: ids.shape[1]]), tuple(answer), tuple(taken)))
    return Stage.of(batch_of(policy, [r for r in rollouts if len(r.token_ids) > 1]), policy.lm_head.weight.detach())


def quick_table(
    rows: Collection[str] = (*ONE_LAYER, *BROKEN),
    seed: int = 0,
    *,
    steps: int = TRAIN_STEPS,
    depth: int = DEPTH,
    rollouts: int = 400,
) -> Table:
    """The table of the base policy, on few rollouts."""
    stage = quick_stage(rollouts, seed)
    right = train(stage.train, stage.policy, layers=len(AUX_LAYERS), seed=seed, steps=steps, depth=depth)
    return features_table(stage, right, seed=seed, rows=rows, steps=steps, depth=depth)


def measure(directory: Path, *, seed: int, steps: int, every: int) -> dict[str, Any]:
    """Everything for one seed; its RL run is recorded first, unless it lies there."""
    recorded = directory / f"seed-{seed}"
    if not (recorded / "recording.json").exists():
        record(recorded, recall.TASK, seed=seed, steps=steps, learning_rate=RL_LEARNING_RATE)
    recording = open_recording(recorded, every=every)
    if recording.last_head is None:
        raise SystemExit(f"{recorded} lacks the last policy's head; delete it and it is recorded again")
    start = Stage.of(recording.base, recording.heads[0])
    after = Stage.of(load_batch(recorded / LAST_FILE), recording.last_head, load_batch(recorded / STALE_FILE))
    of_start, of_after = (
        _kept(
            recorded / f"drafter-of-{name}",
            partial(train, stage.train, stage.policy, layers=len(AUX_LAYERS), seed=seed),
        )
        for name, stage in (("start", start), ("last", after))
    )
    parts: dict[str, Callable[[], Any]] = {
        "start": lambda: features_table(start, of_start, seed=seed),
        "after RL": lambda: features_table(after, of_after, seed=seed),
        "claims": lambda: (
            start_claims(start, of_start, seed=seed)
            | {"the same drafter after RL": alpha(of_start, after.test, after.policy)}
        ),
        "tracking": lambda: {r.name: float(np.mean(follow(r, recording).alpha["probabilistic"][1:])) for r in TRACKERS},
    }
    found: dict[str, Any] = {"rewards": [recording.rewards[v] for v in sorted(recording.rewards)]}
    for name, part in parts.items():
        found[name] = _known(recorded / f"claims-{name.replace(' ', '-')}.json", part)
    return found


def _known(path: Path, part: Callable[[], Any]) -> Any:
    """What was measured and written before, or what is measured now and written."""
    if not path.exists():
        path.write_text(json.dumps(part(), indent=1))
    return json.loads(path.read_text())


def _kept(directory: Path, make: Callable[[], Eagle3Drafter]) -> Eagle3Drafter:
    if not directory.exists():
        save_drafter(make(), directory)
    return read_drafter(directory)


def show(title: str, tables: Sequence[Table]) -> None:
    """Print least and most over the tables, and whether the bars hold."""
    columns = {"both": "trained and served", "served": "served alone", "trained": "trained alone"}
    print(f"\n{title}\n| features | {' | '.join(columns.values())} |\n|---|---|---|---|")
    for row in tables[0]:
        cells = [_span([t[row][c] for t in tables]) if c in tables[0][row] else "" for c in columns]
        print(f"| {row} | {' | '.join(cells)} |")
    for row, bar in ((row, bar) for row, bar in BARS.items() if row in tables[0]):
        ratios = [t["three layers"]["both"] / t[row]["both"] for t in tables]
        print(f"three layers / {row}: {_span(ratios)} (bar {bar}: {'holds' if min(ratios) >= bar else 'MISSED'})")


def _span(values: Sequence[float]) -> str:
    low, high = (f"{v:.2f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory of recordings and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=48, help="RL steps; the task shifts half-way")
    parser.add_argument("--every", type=int, default=4, help="policy versions between two that trackers see")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--depth", type=int, default=DEPTH, help="drafts of a chain, with --quick")
    parser.add_argument("--rollouts", type=int, default=400, help="with --quick")
    parser.add_argument("--rows", nargs="+", default=[*ONE_LAYER, *BROKEN], help="with --quick")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        few = {"depth": options.depth, "rollouts": options.rollouts}
        show("start", [quick_table(options.rows, seed, **few) for seed in options.seeds])
        return
    if options.out is None:
        parser.error("--out is needed, or --quick")
    found = [measure(options.out, seed=s, steps=options.steps, every=options.every) for s in options.seeds]
    rewards = [f"{f['rewards'][0]:.2f} to {f['rewards'][-1]:.2f}" for f in found]
    print(f"{len(found)} seeds; reward over {options.steps} RL steps: {', '.join(rewards)}")
    for stage in ("start", "after RL"):
        show(stage, [f[stage] for f in found])
    for part in ("claims", "tracking"):
        print(f"\n{part}")
        for row in found[0][part]:
            print(f"| {row} | {_span([f[part][row] for f in found])} |")


if __name__ == "__main__":
    main()
