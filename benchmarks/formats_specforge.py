"""There and back through SpecForge 0.2.0's own code: our export in its model, and all that it writes of that in ours.

    .venv-peers/bin/python benchmarks/formats_specforge.py [--mutate]

The model is loaded from our `specforge` export as its trainer starts from one (`model.draft_checkpoint_path`), and
written in every way that SpecForge has:

- `save_pretrained`: a model's directory, with the target's embedding in it;
- its trainer's checkpoint, `training_state.pt`, which has no config beside it: the export's own stands for it;
- `specforge export --to sglang` of that checkpoint, which rounds to bfloat16 whatever the checkpoint holds.

Each comes back by `import_drafter` and must have the bits that left (of the last: their bfloat16), the maps and the
config, in float32, bfloat16 and float16. Then its forward pass on our export is compared with ours, over three draft
steps that feed each other, in float32. Exit status 1 on a miss. `--mutate` moves one weight of theirs to the next
number of its dtype, and one by 0.01: every row must miss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from parity_fixtures import VOCAB, Case, _imported, case  # noqa: E402 - the path must be set first

from drafter.files.checkpoint import StoredDrafter  # noqa: E402
from drafter.files.formats import export_drafter, import_drafter  # noqa: E402
from drafter.model.eagle3_unroll import unroll  # noqa: E402
from drafter.unroll.plan import make_plan  # noqa: E402

LIMIT = 1e-5
EXPORT = "specforge export --to sglang"
STEPS = 3


def stored(c: Case, dtype: torch.dtype) -> StoredDrafter:
    """The case's drafter as files hold it."""
    weights = {name: p.detach().to(dtype) for name, p in c.drafter.named_parameters()}
    return StoredDrafter(c.drafter.config, c.drafter.vocabulary, weights)


def rounded(drafter: StoredDrafter) -> StoredDrafter:
    """The same in bfloat16."""
    return replace(drafter, weights={name: t.to(torch.bfloat16) for name, t in drafter.weights.items()})


def their_model(directory: Path, c: Case, dtype: torch.dtype) -> Any:
    """SpecForge's model with the weights of our files, and the embedding that it takes from the target."""
    auto = _imported("specforge.modeling.auto")
    config = auto.AutoDraftModelConfig.from_file(str(directory / "config.json"))
    model = auto.AutoDraftModel.from_config(config, torch_dtype=dtype)
    report = _imported("specforge.training.model_loading").warm_start_draft_model(
        model, str(directory), draft_config=config, strategy="eagle3", allow_missing_embedding=True
    )
    assert report.missing_keys == ("embed_tokens.weight",), report
    with torch.no_grad():
        model.embed_tokens.weight.copy_(c.embed_tokens)
    model.freeze_embedding()
    return model


def written(model: Any, config: Path, root: Path) -> Iterator[tuple[str, StoredDrafter]]:
    """What comes back of each way in which SpecForge writes this model."""
    model.save_pretrained(root / "saved")
    yield "save_pretrained", import_drafter(root / "saved", layout="specforge").stored
    checkpoint = trainers_checkpoint(model, root)
    yield "training_state.pt", import_drafter(checkpoint, pickles=True, config_file=config).stored
    _imported("specforge.export.to_sglang").export_to_sglang(str(checkpoint), str(config), str(root / "exported"))
    yield EXPORT, import_drafter(root / "exported", layout="specforge").stored


def trainers_checkpoint(model: Any, root: Path) -> Path:
    """As `TrainerController.save_checkpoint` writes one: its filter of the weights and its manager of the files."""
    strategy = _imported("specforge.training.strategies.base").Eagle3TrainStrategy
    online = torch.nn.ModuleDict({"draft_model": model})
    weights = strategy.checkpoint_state_filter(argparse.Namespace(eagle3_model=online), online.state_dict())
    state = {"draft_state_dict": weights, "global_step": 7, "epoch": 0, "strategy": strategy.name, "run_id": "run"}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state["replicated_optimizer_state"] = optimizer.state_dict()
    manager = _imported("specforge.training.checkpoint").CheckpointManager(str(root), "run")
    return Path(manager.save(state, 7, rank_state={"optimizer": None, "rng": {"torch": torch.get_rng_state()}}))


def same(got: StoredDrafter, want: StoredDrafter) -> bool:
    """Whether names, dtypes, bits, maps and config are those that left."""
    # Transformers writes the drafter's own kind of layer over the target's.
    configs = (replace(s.config, model_type="llama") for s in (got, want))
    return (
        len(set(configs)) == 1
        and got.vocabulary == want.vocabulary
        and got.weights.keys() == want.weights.keys()
        and all(t.dtype == want.dtype and torch.equal(t, want.weights[n]) for n, t in got.weights.items())
    )


def forward_error(model: Any, c: Case) -> float:
    """Largest error of its logits over three steps, relative to ours' largest logit of the step."""
    eagle = _imported("specforge.modeling.draft.llama3_eagle")
    b = c.batch.select([0])
    T = b.tokens
    plan = make_plan(b.cu_seqlens, torch.ones(T, dtype=torch.bool), STEPS)
    ours = unroll(c.drafter, plan, b.input_ids, b.aux_hidden, c.embed_tokens)
    mask = eagle.prepare_decoder_attention_mask(torch.ones(1, T, dtype=torch.bool), (1, T), b.aux_hidden[None], 0)
    h, errors = model.project_hidden_states(b.aux_hidden[None]), []
    cache: list[list[torch.Tensor]] = [[], []]
    for step in range(STEPS):
        tokens = torch.zeros(1, T, dtype=torch.int64)
        tokens[0, : T - 1 - step] = b.input_ids[1 + step :]
        h = model.backbone(model.embed_input_ids(tokens), h, cache, mask, torch.arange(T)[None], None, True)
        want = c.drafter.logits(ours.pre[step])
        errors.append(float((model.compute_logits(h)[0, ours.rows[step]] - want).abs().max() / want.abs().max()))
    return max(errors)


def spoil(model: Any) -> None:
    """Move one weight to the next number of its dtype, and one of the head by enough to show in the logits."""
    norm, head = model.norm.weight.data, model.lm_head.weight.data
    norm[0] = torch.nextafter(norm[0], norm.new_tensor(float("inf")))
    head[0, 0] += 0.01


def round_trips(dtype: torch.dtype, draft: int, *, broken: bool) -> tuple[list[tuple[str, bool]], float]:
    """Whether each way came back equal, and the error of the forward pass (of use in float32)."""
    c = case((60, 31), response=0.6, draft=draft)
    want = stored(c, dtype)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):  # theirs print
        ours = Path(name) / "ours"
        ours.mkdir()
        export_drafter(ours, want, "specforge")
        model = their_model(ours, c, dtype)
        if broken:
            spoil(model)
        ways = [
            (way, same(got, rounded(want) if way == EXPORT else want))
            for way, got in written(model, ours / "config.json", Path(name))
        ]
        return ways, forward_error(model, c) if dtype == torch.float32 else 0.0


def main() -> int:
    """Print one row per dtype, vocabulary and way back; 1 if any misses."""
    parser = argparse.ArgumentParser(description="Round trips through SpecForge 0.2.0's own model and files.")
    parser.add_argument("--mutate", action="store_true", help="spoil weights of theirs, which must be noticed")
    broken, missed, forward = parser.parse_args().mutate, 0, []
    warnings.simplefilter("ignore")  # of its dependencies
    logging = _imported("transformers").utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("| dtype | draft vocabulary | written by SpecForge as | bits and config |\n|---|---|---|---|")
    for dtype, draft in itertools.product((torch.float32, torch.bfloat16, torch.float16), (VOCAB, 23)):
        ways, error = round_trips(dtype, draft, broken=broken)
        for way, equal in ways:
            missed += not equal
            verdict = "DIFFER" if not equal else "equal" + ", as bfloat16" * (way == EXPORT)
            print(f"| {str(dtype).removeprefix('torch.')} | {draft} of {VOCAB} | {way} | {verdict} |", flush=True)
        if dtype == torch.float32:
            forward.append((draft, error))
    for draft, error in forward:
        missed += not error < LIMIT
        verdict = "agrees" if error < LIMIT else "MISSES"
        print(f"logits of {STEPS} steps, {draft} of {VOCAB}: largest relative error {error:.1e}, {verdict}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
