"""Our training step against SpecForge 0.2.0: float32, same weights, loss per step and every gradient within 1e-5.

    python benchmarks/parity_specforge.py [--mutate]

What SpecForge does otherwise by design is arranged so that both must agree:

- its loss mask is not shifted with its tokens: it gets ours, moved to the row that predicts (`step_peers`);
- it divides by all rows of the batch, B*T: its losses are multiplied back;
- it drops rows whose target's argmax is outside the draft vocabulary: ours gets a mask without those tokens;
- its target is renormalised over the draft vocabulary: ours gets the log-sum-exp over the draft rows;
- its loss is the cross-entropy, ours KL(p || q): the target's entropy, which has no gradient, is added to ours;
- it packs no documents into a row: several go through it one by one, and the results are added.

Exit status 1 on a miss. `--mutate` gives ours features that are one row late, which every case must notice.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from parity_fixtures import DECAY, VOCAB, Case, Result, case, deviation, ours  # noqa: E402 - the path must be set first

from benchmarks import step_peers  # noqa: E402

LIMIT = 1e-5
DOCUMENTS = {"one": (96,), "packed": (40, 18, 64, 21)}


def countable(c: Case) -> Case:
    """Take those tokens out of the mask whose target has its argmax outside the draft vocabulary."""
    inside = torch.isin((c.batch.last_hidden @ c.head.T).argmax(-1), c.drafter.vocabulary.ids)
    scored = c.batch.loss_mask.clone()
    scored[1:] &= inside[:-1]
    return replace(c, batch=replace(c.batch, loss_mask=scored))


def with_entropy(result: Result, c: Case, scored: torch.Tensor) -> Result:
    """Add the target's entropy at every row that a step scores: the target of row r at step k is row r + 1 + k."""
    logp = (c.batch.last_hidden @ c.head[c.drafter.vocabulary.ids].T).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    sums = result.sums.clone()
    for begin, end in itertools.pairwise(c.batch.cu_seqlens.tolist()):
        counted = entropy[begin : end - 1] * scored[begin + 1 : end]
        sums += torch.stack([counted[1 + step :].sum() for step in range(sums.numel())])
    return Result(sums, result.gradients)


def theirs(c: Case, steps: int) -> Result:
    """Sums of its loss per step and gradients of their decayed sum, documents one by one."""
    starts = c.batch.cu_seqlens.tolist()
    results = [_document(c, begin, end, steps) for begin, end in itertools.pairwise(starts)]
    sums = torch.stack([r.sums for r in results]).sum(0)
    return Result(sums, {n: torch.stack([r.gradients[n] for r in results]).sum(0) for n in results[0].gradients})


def _document(c: Case, begin: int, end: int, steps: int) -> Result:
    b, per_token = c.batch, ("input_ids", "loss_mask", "aux_hidden", "logprobs", "last_hidden", "logsumexp")
    cut: dict[str, Any] = {name: getattr(b, name)[begin:end] for name in per_token}
    batch = replace(b, cu_seqlens=torch.tensor([0, end - begin]), **cut)
    model, draft, rows = step_peers.specforge_model(
        step_peers.Case(c.drafter, c.embed_tokens, c.head, batch, steps, True)
    )
    losses = torch.stack(list(model(**rows[0])[0])) * (end - begin)
    weighted = (losses * DECAY ** torch.arange(steps)).sum()
    trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(weighted, list(trained.values()))
    return Result(losses.detach(), dict(zip(trained, gradients, strict=True)))


def main() -> int:
    """Print one row per case; 1 if any misses."""
    parser = argparse.ArgumentParser(description="Parity of the training step with SpecForge 0.2.0.")
    parser.add_argument("--mutate", action="store_true", help="give ours wrong features: every case must miss")
    broken, missed = parser.parse_args().mutate, 0
    print("| steps | documents | response | draft vocabulary | largest relative error | |\n|---|---|---|---|---|---|")
    for steps, documents, response, draft in itertools.product((1, 3, 7), DOCUMENTS, (1.0, 0.5), (VOCAB, 23)):
        c = case(DOCUMENTS[documents], response=response, draft=draft)
        mine = countable(c)
        if broken:
            mine = replace(mine, batch=replace(mine.batch, aux_hidden=mine.batch.aux_hidden.roll(1, 0)))
        error = deviation(with_entropy(ours(mine, steps), c, mine.batch.loss_mask), theirs(c, steps))
        missed += not error < LIMIT
        verdict = "agrees" if error < LIMIT else "MISSES"
        print(f"| {steps} | {documents} | {response:.0%} | {draft} of {VOCAB} | {error:.1e} | {verdict} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
