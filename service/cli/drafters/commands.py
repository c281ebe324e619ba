"""The commands that work on drafters as files: convert, inspect, eval. torch is imported when one of them runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.checks import given_path
from service.cli.drafters.policy import open_policy
from service.cli.drafters.told import facts_of, mtp_facts, table
from service.errors import ConfigurationError
from service.settings import Settings

if TYPE_CHECKING:
    from drafter.batch import RolloutBatch
    from drafter.files.formats import Imported
    from drafter.model.draft_model import DraftModel
    from drafter.policy import Policy

_NORM: Final = "What norm_before_residual is, where the config does not say."

Source = Annotated[Path, typer.Argument(help="Directory with a drafter's weights and config.json, in any layout.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="Layout of the files, if it is not recognised: sglang, specforge or speculators."),
]
AuxLayers = Annotated[
    str | None, typer.Option(help="Layers whose input the drafter reads, e.g. 2,18,33, if config.json does not say.")
]
Norm = Annotated[bool | None, typer.Option("--norm-before-residual/--no-norm-before-residual", help=_NORM)]


def convert(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="Directory to write; it must not hold files yet.")],
    to: Annotated[str, typer.Option(help="Layout to write: sglang, specforge or speculators; mtp for an MTP module.")],
    from_: From = None,
    aux_layers: AuxLayers = None,
    norm_before_residual: Norm = None,
    verifier: Annotated[str | None, typer.Option(help="Name or path of the policy, for a speculators config.")] = None,
    pickle: Annotated[
        bool, typer.Option("--pickle", help="Read a pickle of tensors too, by torch's restricted unpickler.")
    ] = False,
    draft_config: Annotated[
        Path | None,
        typer.Option(help="The drafter's config.json, if its directory has none.", callback=given_path),
    ] = None,
) -> None:
    """Rewrite a drafter in another project's layout. The weights stay the same, bit for bit.

    With `--to mtp`, take the MTP module out of a policy's checkpoint (DeepSeek-V3, GLM-4.5), sharded or not.
    """
    with _explained():
        from drafter.files.checkpoint import CONFIG_FILE, MODEL_FILE
        from drafter.files.formats import Verifier, export_drafter
        from drafter.files.mtp import extract_mtp
        from rl_hooks.format.release import sha256_of

        imported = None
        if to == "mtp" and (pickle or draft_config is not None):
            raise ConfigurationError("--pickle and --draft-config are for EAGLE-3 drafters, not for --to mtp")
        if to != "mtp":
            imported = _read(source, from_, aux_layers, norm_before_residual, draft_config, pickles=pickle)
        check_free(destination)
        created = not destination.exists()
        destination.mkdir(parents=True, exist_ok=True)
        try:
            if imported is None:
                extract_mtp(source, destination)
            else:
                own = imported.verifier
                export_drafter(
                    destination,
                    imported.stored,
                    to,  # type: ignore[arg-type]
                    verifier=own if verifier in (None, own.name_or_path) else Verifier(verifier),
                    speculative_tokens=imported.speculative_tokens,
                )
        except Exception:
            if created and not any(destination.iterdir()):
                destination.rmdir()
            raise
        for note in () if imported is None else imported.notes:
            typer.echo(f"note: {note}")
        for path in (destination / MODEL_FILE, destination / CONFIG_FILE):
            typer.echo(f"{path}  {path.stat().st_size} bytes  sha256 {sha256_of(path)}")


def inspect(
    source: Source,
    from_: From = None,
    aux_layers: AuxLayers = None,
    norm_before_residual: Norm = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a drafter's files and say what it is: layout, sizes, layers, vocabulary, and who cannot serve it."""
    with _explained():
        if _is_mtp(source):
            facts = mtp_facts(source)
        else:
            facts = facts_of(_read(source, from_, aux_layers, norm_before_residual))
        if as_json:
            typer.echo(json.dumps(facts, indent=1))
            return
        notes = facts.pop("notes")
        width = max(map(len, facts))
        for name, value in facts.items():
            typer.echo(f"{name.replace('_', ' '):<{width}}  {value}")
        for note in notes:
            typer.echo(f"note: {note}")


def evaluate(
    drafter: Source,
    rollouts: Annotated[list[Path], typer.Argument(help="Rollout files, or directories of them.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Where the target's embedding is: a run of --state-dir, a safetensors file or a model; unset: the "
            "only run there is, or `default`.",
            show_default=False,
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Tokens drafted per round.")] = 4,
    drafting: Annotated[str, typer.Option(help="How drafts are sampled: probabilistic or greedy.")] = "probabilistic",
    state_dir: Annotated[str | None, typer.Option(metavar="PATH", help="The service's state directory.")] = None,
    from_: From = None,
    aux_layers: AuxLayers = None,
    norm_before_residual: Norm = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a drafter would have accepted of rollout files (replay α), by position, beside n-gram drafting."""
    with _explained():
        from drafter.files.checkpoint import build_drafter
        from drafter.files.mtp import read_mtp
        from drafter.replay.evaluate import evaluate as replay_all

        files = _rollout_files(rollouts)
        mtp = _is_mtp(drafter)
        policy = open_policy(target, state_dir, with_head=mtp)
        model: DraftModel
        if mtp:
            model = read_mtp(drafter, policy.registered)
        else:
            model = build_drafter(_read(drafter, from_, aux_layers, norm_before_residual).stored)
        gaps: list[tuple[float, int]] = []
        result = replay_all(
            model.eval(),
            (_compared(_load(path, model.config.vocab_size), policy.at, gaps) for path in files),
            policy.at,
            depth=depth,
            drafting=drafting,  # type: ignore[arg-type]
        )
        gap = _mean_gap(gaps)
        if as_json:
            told = {"files": len(files), **result.summary(), "logprob_gap_nats": gap}
            typer.echo(json.dumps(told, indent=1))
            return
        if gap is not None and not gap <= (limit := Settings().logprob_gap_nats):
            typer.echo(
                "These figures mean nothing: log-probabilities as sent and as the features give them differ by "
                f"{gap:.2f} nats on average (limit {limit:g}). The worker ends such batches as dead letters."
            )
        for line in table(result, len(files)):
            typer.echo(line)


def _compared(batch: RolloutBatch, at: Callable[[int], Policy], gaps: list[tuple[float, int]]) -> RolloutBatch:
    """The batch; its log-probabilities are compared with its features where the policy's head is there."""
    head = at(batch.policy_version).head
    if head is not None and batch.normalised:
        gaps.append(head.logprob_gap(batch))
    return batch


def _mean_gap(gaps: Sequence[tuple[float, int]]) -> float | None:
    tokens = sum(n for _, n in gaps)
    return sum(gap * n for gap, n in gaps if n) / tokens if tokens else None


# --- reading --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn errors that a user can act on into a `ConfigurationError`, which ends the command in one line."""
    from drafter.errors import DrafterError
    from rl_hooks.wire import WireError

    try:
        yield
    except (DrafterError, WireError) as error:
        raise ConfigurationError(str(error)) from error


def _read(
    source: Path,
    layout: str | None,
    aux_layers: str | None,
    norm_before_residual: bool | None,
    draft_config: Path | None = None,
    *,
    pickles: bool = False,
) -> Imported:
    from drafter.files.formats import LAYOUTS, import_drafter

    if layout is not None and layout not in LAYOUTS:
        raise ConfigurationError(f"a layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    return import_drafter(
        source,
        layout=layout,
        aux_layers=None if aux_layers is None else layer_numbers(aux_layers),
        norm_before_residual=norm_before_residual,
        config_file=draft_config,
        pickles=pickles,
    )


def layer_numbers(aux_layers: str) -> list[int]:
    """What --aux-layers names. Raises ConfigurationError."""
    parts = aux_layers.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigurationError(f"--aux-layers must be numbers such as 2,18,33, got {aux_layers!r}")
    return [int(part) for part in parts]


def write_body(
    file: Path, source: Path, layout: str | None, aux_layers: str | None, norm_before_residual: bool | None
) -> None:
    """Write a drafter's directory as the body of POST /drafters."""
    from safetensors.torch import save_file

    from drafter.files.checkpoint import CONFIG_FILE, export_config, read_config
    from drafter.files.mtp import prefix, read_stored_mtp
    from rl_hooks.wire import DRAFTER_FORMAT

    with _explained():
        if _is_mtp(source):
            sizes, weights = read_stored_mtp(source)
            tensors = {prefix(sizes) + name: tensor for name, tensor in weights.items()}
            config = dict(read_config(source / CONFIG_FILE))
        else:
            stored = _read(source, layout, aux_layers, norm_before_residual).stored
            tensors, config = stored.tensors(), export_config(stored.config, stored.dtype)
        save_file(tensors, file, metadata={"format": DRAFTER_FORMAT, "drafter_config": json.dumps(config)})


def check_free(destination: Path) -> None:
    """Raise a ConfigurationError unless this directory is empty or does not exist."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigurationError(f"{destination} holds something already; name a new directory")


def _is_mtp(source: Path) -> bool:
    from drafter.files.checkpoint import read_config
    from drafter.files.formats import is_mtp

    return (source / "config.json").is_file() and is_mtp(read_config(source / "config.json"))


def _rollout_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not found:
            raise ConfigurationError(f"{path} holds no files; name rollout files or a directory of them")
        files += found
    return files


def _load(path: Path, vocab_size: int) -> RolloutBatch:
    from drafter.batch import load_batch
    from rl_hooks.wire import WireError

    try:
        return load_batch(path, vocab_size=vocab_size)
    except WireError as error:
        raise ConfigurationError(f"{path}: {error}") from error
