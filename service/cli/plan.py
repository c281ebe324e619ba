"""`draftalign plan`: what a deployment will need, before it is bought."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_hooks.format.eagle3 import DrafterConfig, DrafterError
from service.capacity.estimate import Fact, estimate, money, worst_first
from service.capacity.sizes import GIB, LAYERS, POLICIES, Deployment, FeatureDtype
from service.capacity.work import GPU_TFLOPS
from service.errors import ConfigurationError
from service.settings import Settings


def policy_config(policy: str) -> Mapping[str, Any]:
    """A short name's sizes, or those of a directory's (or file's) transformers config. Raises ConfigurationError."""
    if policy in POLICIES:
        return POLICIES[policy]
    path = Path(policy) / "config.json" if Path(policy).is_dir() else Path(policy)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--policy is {' or '.join(POLICIES)}, a policy's directory, or its config.json; {path}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--policy {policy} must hold a JSON object, the policy's transformers config")
    return found.get("text_config", found) if isinstance(found.get("text_config", found), dict) else found


def plan(
    policy: Annotated[str, typer.Option(help="The policy's size: 8b, 32b, its directory, or its config.json.")] = "8b",
    step_seconds: Annotated[float, typer.Option(help="Time of an RL step.")] = 120.0,
    rollouts_a_step: Annotated[int, typer.Option(help="Rollouts of an RL step.")] = 1024,
    tokens_a_rollout: Annotated[int, typer.Option(help="Tokens of a rollout, its prompt included.")] = 4096,
    prompt_share: Annotated[float, typer.Option(help="Share of a rollout's tokens that is its prompt.")] = 0.25,
    group: Annotated[
        int, typer.Option(min=1, help="Rollouts of one prompt in a file: they share the prompt's states.")
    ] = 1,
    sampled_share: Annotated[
        float, typer.Option(help="Share of the rollouts that is sent: the hook's `sample_fraction`.")
    ] = 1.0,
    dtype: Annotated[FeatureDtype, typer.Option(help="How the hook sends features: its `dtype`.")] = "bfloat16",
    post_share: Annotated[
        float, typer.Option(help="Share of a step over which its files are sent; 0: all at its end.")
    ] = 0.25,
    head_share: Annotated[
        float, typer.Option(help="Share of steps after which the policy's head is sent again; 0: it does not move.")
    ] = 1.0,
    ranks: Annotated[int, typer.Option(help="Trainer ranks of a run that send rollouts.")] = 8,
    runs: Annotated[int, typer.Option(help="Runs of this kind that share the service.")] = 1,
    engines: Annotated[int, typer.Option(help="Inference engines of a run.")] = 8,
    network_gbit: Annotated[float, typer.Option(help="Network of the service in Gbit/s, each way.")] = 100.0,
    worker_gpus: Annotated[float | None, typer.Option(help="GPUs of the worker. Default: as many as it takes.")] = None,
    gpu_tflops: Annotated[float, typer.Option(help="TFLOP/s that one GPU really reaches.")] = GPU_TFLOPS,
    gpu_hour_price: Annotated[float | None, typer.Option(help="Price of a GPU hour, in any money.")] = None,
    step_gpus: Annotated[
        int | None, typer.Option(help="GPUs that an RL step occupies. Default: ranks + engines.")
    ] = None,
    alpha_now: Annotated[float | None, typer.Option(help="α of a drafter that is not kept in step.")] = None,
    alpha_gain: Annotated[float | None, typer.Option(help="What draftalign adds to that α.")] = None,
    generation_share: Annotated[float, typer.Option(help="Share of an RL step that generation takes now.")] = 0.7,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute what a deployment will need, worst fact first. No service need run; settings: DRAFTALIGN_* variables."""
    settings = Settings()
    above_zero = {"worker-gpus": worker_gpus, "gpu-tflops": gpu_tflops, "gpu-hour-price": gpu_hour_price}
    _check(above_zero | {"step-gpus": step_gpus, "alpha-gain": alpha_gain}, generation_share, alpha_now)
    try:
        given = Deployment(
            drafter=_drafter(policy, settings),
            step_seconds=step_seconds,
            rollouts=rollouts_a_step,
            tokens=tokens_a_rollout,
            prompt_share=prompt_share,
            sampled_share=sampled_share,
            ranks=ranks,
            runs=runs,
            engines=engines,
            network_gbit=network_gbit,
            dtype=dtype,
            post_share=post_share,
            group=group,
            head_share=head_share,
        )
        facts = estimate(given, settings, tflops=gpu_tflops, worker_gpus=worker_gpus)
        if gpu_hour_price is not None:
            gpus = worker_gpus or math.ceil(facts["worker_gpus"].value)
            gain = None if alpha_now is None or alpha_gain is None else (alpha_now, alpha_gain, generation_share)
            facts |= money(gpus, gpu_hour_price, step_gpus or runs * (ranks + engines), gain)
    except (ValueError, DrafterError) as error:
        raise ConfigurationError(str(error)) from error
    if json_:
        typer.echo(json.dumps({name: asdict(fact) for name, fact in worst_first(facts)}, indent=1))
    else:
        _print(policy, given, facts)


def _check(above_zero: Mapping[str, float | None], generation_share: float, alpha_now: float | None) -> None:
    """Raise ConfigurationError for an option that `Deployment` does not check. `above_zero`: by name."""
    for name, value in above_zero.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"--{name} must be above 0, got {value}")
    if not 0 <= generation_share <= 1:
        raise ConfigurationError(f"--generation-share is a share, from 0 to 1, got {generation_share}")
    alone = (alpha_now is None) != (above_zero["alpha-gain"] is None)
    if alone or (alpha_now is not None and above_zero["gpu-hour-price"] is None):
        raise ConfigurationError("--alpha-now and --alpha-gain go together, and with --gpu-hour-price")
    if alpha_now is not None and not 1 <= alpha_now < math.inf:
        raise ConfigurationError(f"--alpha-now is tokens a verification round, at least 1; got {alpha_now}")


def _drafter(policy: str, settings: Settings) -> DrafterConfig:
    """The drafter that a policy's run would train. A small policy's draft vocabulary is all of its tokens."""
    config = policy_config(policy)
    whole = config.get("vocab_size")
    draft_vocab_size = min(settings.draft_vocab_size, whole) if type(whole) is int else settings.draft_vocab_size
    return DrafterConfig.from_target(config, LAYERS, draft_vocab_size)


def _print(policy: str, given: Deployment, facts: Mapping[str, Fact]) -> None:
    """Print the deployment in a sentence, and a line for each fact, worst first."""
    parts = f"{given.ranks} rank(s) and {given.engines} engine(s)"
    step = f"a step of {given.step_seconds:g} s, {given.rollouts:,} rollouts of {given.tokens:,} tokens"
    sent = f"{given.sampled_share:.0%} of them sent, as {given.dtype}"
    typer.echo(f"{policy}: {given.runs} run(s) of {parts}; {step}, {sent}. Each is an option (--help).")
    typer.echo(f"{'':13} {'needed':>22} {'of limit':8}  [rests on]")
    for name, fact in worst_first(facts):
        over = " DOES NOT PAY" if name == "saved" else " DOES NOT FIT"
        said = "" if fact.load is None else f"{fact.load:7.0%}{over if fact.load > 1 else ''}"
        amount = f"{fact.value / GIB:,.2f} GiB" if fact.unit == "bytes" else f"{fact.value:,.3g} {fact.unit}"
        typer.echo(f"{name:13} {amount:>22} {said:8}  [{fact.basis}] {fact.text}")
