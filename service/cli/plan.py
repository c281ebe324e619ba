"""What a deployment will need, before it is bought: bytes, queue, worker GPUs, lag, downloads, API cores, money.

Bytes come from the wire format's own writer and check, a drafter's sizes from its file layout, limits from the
settings. Each fact says whether it is arithmetic, was measured on two shared cores, or rests on an assumption that no
GPU has checked.
How wrong it is, beside a simulation and a real run: docs/guide/capacity.md.

Legend: H hidden, V vocabulary, D draft vocabulary, K draft depth, T tokens, R rollouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import typer

from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig, DrafterError, tensor_shapes
from service.errors import ConfigurationError
from service.monitor.worth import step_speedup
from service.settings import Settings

Basis = Literal["arithmetic", "measured on two cores", "assumed"]
FeatureDtype = Literal["bfloat16", "float8_e4m3"]
#: Targets by short name: their transformers configs' sizes.
POLICIES: Final[Mapping[str, Mapping[str, int]]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "vocab_size": 151_936}
    | {"num_key_value_heads": 8, "head_dim": 128},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_attention_heads": 64, "vocab_size": 151_936}
    | {"num_key_value_heads": 8, "head_dim": 128},
}
GIB: Final = 1 << 30
#: Three layers, whichever: only their number matters here.
_LAYERS: Final = (2, 18, 33)
#: What a GPU is taken to do: 55 % of 790 TFLOP/s. No GPU has run it.
GPU_TFLOPS: Final = 435.0
#: Drafters that score a rollout: candidate, served and frozen. One that is passed over: the served one.
SCORERS: Final = 3
#: Measured on two shared cores: CPU seconds of the API for a GiB, a post, a report of an engine, a push to one; idle.
INGEST_CPU: Final = 1.6
POST_CPU: Final = 0.0056
IDLE_CPU: Final = 0.003
REPORT_CPU: Final = 0.003
PUSH_CPU: Final = 0.00013
#: Measured (docs/lab/soak.md): Redis bytes of a rollout's fate and of a batch's, kept for 7 days; of a batch's scores,
#: of which 4,608 batches are kept.
FATE_BYTES: Final = 106
BATCH_BYTES: Final = 74 * 8
SCORE_BYTES: Final = 164 * 8
_SCORES_KEPT: Final = 4608
_KEPT_DAYS: Final = 7
_REPORT_SECONDS: Final = 5.0
#: The gap check of a batch reads at most so many tokens.
_GAP_TOKENS: Final = 16_384
_NEWTON_SCHULZ: Final = 5
#: Tokens that one rank's hook sends of a policy version, and bytes that it holds back, by its defaults.
HOOK_TOKENS: Final = 65_536
HOOK_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is planned for. Figures of a step are of one run; `runs` like it share API, worker and network."""

    drafter: DrafterConfig
    step_seconds: float
    rollouts: int  # of a step
    tokens: int  # of a rollout, its prompt included
    prompt_share: float = 0.25
    sampled_share: float = 1.0
    ranks: int = 8
    runs: int = 1
    engines: int = 8  # of a run
    network_gbit: float = 100.0
    dtype: FeatureDtype = "bfloat16"
    post_share: float = 0.25  # of a step, in which its files are made

    def __post_init__(self) -> None:
        numbers = {k: v for k, v in asdict(self).items() if isinstance(v, (int, float))}
        for name, value in numbers.items():
            least = 0.0 if name in ("prompt_share", "engines", "post_share") else math.ulp(0.0)
            most = 1.0 if name.endswith("_share") else 1e12
            if not least <= value <= most or (name == "prompt_share" and value == 1):
                raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value}")
        if self.tokens < 2:
            raise ValueError(f"tokens must be at least 2, a prompt's and a response's, got {self.tokens}")

    @property
    def sent_tokens(self) -> float:
        """Of a step of one run, after sampling and each rank's cap."""
        return min(self.rollouts * self.tokens * self.sampled_share, self.ranks * float(HOOK_TOKENS))


@dataclass(frozen=True, slots=True)
class Fact:
    """One line. `load`: the value over what can be had of it; above 1 it does not fit. None: nothing limits it."""

    value: float
    unit: str
    basis: Basis
    text: str
    load: float | None = None


def file_bytes(
    drafter: DrafterConfig, rollouts: int, tokens: int, dtype: FeatureDtype, prompt_share: float = 0.0
) -> int:
    """Bytes of a rollout file as the hook lays it out, for equal rollouts; the wire format's own writer and check."""

    def size(R: int, T: int, responses: int) -> int:
        H, A, N = drafter.target_hidden_size, len(drafter.aux_layers), R * T
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "input_ids": ((N,), "I32"),
            "cu_seqlens": ((R + 1,), "I32"),
            "loss_mask": ((N,), "U8"),
            "logprobs": ((N,), "F32"),
            "logsumexp": ((R * responses,), "F32"),
            "last_hidden": ((R * responses, H), "BF16"),
            "aux_hidden": ((N, A * H), "BF16" if dtype == "bfloat16" else "F8_E4M3"),
        }
        if dtype == "float8_e4m3":
            shapes["aux_hidden_scale"] = ((N, A), "F32")
        tensors = {n: wire.Tensor.of(np.zeros(s, wire.NUMPY_DTYPE[d]), d) for n, (s, d) in shapes.items()}
        parts = wire.encode(tensors, _metadata(drafter, R))
        wire.check_rollout_header(wire.parse_header(bytes(parts[0])))
        return wire.parts_bytes(parts[1:])

    # Linear in rollouts, in tokens and in those that were generated: so nothing of the file's true size need be held.
    two = size(1, 2, 1)
    a_response = size(1, 3, 2) - two
    a_prompt = size(1, 3, 1) - two
    a_rollout = size(2, 2, 1) - two - a_response - a_prompt
    prompt = round(prompt_share * tokens)
    header = wire.parts_bytes(wire.encode({}, _metadata(drafter, rollouts))) + 640
    fixed = header + two - a_response - a_prompt - a_rollout
    return fixed + rollouts * (a_rollout + prompt * a_prompt + (tokens - prompt) * a_response)


def _metadata(drafter: DrafterConfig, rollouts: int) -> dict[str, str]:
    return wire.rollout_metadata(
        run="default",
        policy_version=0,
        rollout_ids=[f"{number:024d}" for number in range(rollouts)],
        target_fingerprint="0" * 32,
        aux_layers=drafter.aux_layers,
        rewards=[0.0] * rollouts,
        last_rows="predicting",
    )


def drafter_bytes(drafter: DrafterConfig) -> int:
    """Bytes of a published drafter: bfloat16, and its two vocabulary maps."""
    width = {"d2t": 8, "t2d": 1}
    return sum(math.prod(shape) * width.get(name, 2) for name, shape in tensor_shapes(drafter).items())


def pass_flops(drafter: DrafterConfig, tokens: float, responses: float, documents: float, depth: int) -> float:
    """Operations of one training pass, least work: forward and both gradients, nothing recomputed; one-layer drafters.

    A multiply-add is two. The count of `benchmarks.step_peers.floating_point_operations`, from the file's shapes.
    """
    forward, backward = _row(drafter, tokens / documents, depth)
    context_forward, context = _context(drafter)
    return (forward + backward) * responses + (context_forward + context) * (tokens - responses)


def score_flops(drafter: DrafterConfig, tokens: float, responses: float, documents: float, depth: int) -> float:
    """Operations of one drafter's replay: the forward pass alone."""
    return _row(drafter, tokens / documents, depth)[0] * responses + _context(drafter)[0] * (tokens - responses)


def _row(drafter: DrafterConfig, length: float, depth: int) -> tuple[float, float]:
    """Of a row that predicts a response token: forward, backward. Attention counts its causal half."""
    sizes = {n.removeprefix("midlayer."): math.prod(s) for n, s in tensor_shapes(drafter).items()}
    K, q = depth, drafter.num_attention_heads * drafter.head_dim
    # qkv reads embedding and state: the embeddings' half of a token is made once for all steps.
    qkv = sum(sizes[f"self_attn.{n}_proj.weight"] for n in "qkv") * (K + 1) / 2
    rest = (sizes["self_attn.o_proj.weight"] + sum(sizes[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))) * K
    head, fc = sizes["lm_head.weight"], sizes["fc.weight"]
    forward = 2 * (fc + qkv + rest + K * head) + 2 * head + 2 * K * length * q + K * (K - 1) * q
    return forward, 2 * fc + 4 * (qkv + rest + K * head) + 5 * K * length * q + 2 * K * (K - 1) * q


def _context(drafter: DrafterConfig) -> tuple[float, float]:
    """Of a row that lends keys and values only: forward, backward."""
    shapes = tensor_shapes(drafter)
    fc = math.prod(shapes["fc.weight"])
    kv = math.prod(shapes["midlayer.self_attn.k_proj.weight"]) + math.prod(shapes["midlayer.self_attn.v_proj.weight"])
    return 2 * fc + 2 * kv, 2 * fc + 4 * kv


def muon_flops(drafter: DrafterConfig) -> float:
    """Operations of an optimizer step whatever its tokens: Newton and Schulz on every matrix but lm_head."""
    matrices = [s for n, s in tensor_shapes(drafter).items() if len(s) == 2 and n != "lm_head.weight"]
    return _NEWTON_SCHULZ * sum(4.0 * min(s) ** 2 * max(s) + 2.0 * min(s) ** 3 for s in matrices)


@dataclass(frozen=True, slots=True)
class Work:
    """GPU seconds of one step of one run: training, scoring what is trained on, scoring what is passed over."""

    train: float
    score: float
    passed_over: float

    @classmethod
    def of(cls, plan: Deployment, settings: Settings, tflops: float) -> Work:
        """At so many TFLOP/s that a GPU really does."""
        T, drafter = plan.sent_tokens, plan.drafter
        responses, documents = T * (1 - plan.prompt_share), max(1.0, T / plan.tokens)
        one = pass_flops(drafter, T, responses, documents, settings.depth)
        train = settings.train_passes * one
        if settings.optimizer == "muon":
            train += settings.train_passes * T / settings.train_step_tokens * muon_flops(drafter)
        replay = score_flops(drafter, T, responses, documents, settings.depth)
        checked = min(responses, batches(plan) * _GAP_TOKENS)
        gap = 2.0 * drafter.vocab_size * drafter.hidden_size * checked
        rate = tflops * 1e12
        return cls(train / rate, (SCORERS * replay + gap) / rate, (replay + gap) / rate)


def batches(plan: Deployment) -> float:
    """Files of a step of one run: a rank sends what it holds in files that its queue takes at least four of."""
    return max(1.0, plan.sent_tokens / tokens_a_file(plan))


def tokens_a_file(plan: Deployment) -> float:
    """Tokens of a file: a rank's share of a step, or a quarter of what its queue holds."""
    a_token = file_bytes(plan.drafter, 1, 10_000, plan.dtype, plan.prompt_share) / 10_000
    most = max(plan.tokens, HOOK_BYTES / 4 / a_token // plan.tokens * plan.tokens)
    return min(max(plan.tokens, plan.sent_tokens / plan.ranks), most)


def estimate(
    plan: Deployment, settings: Settings, *, tflops: float = GPU_TFLOPS, worker_gpus: float | None = None
) -> dict[str, Fact]:
    """Every fact but money, by name. `worker_gpus`: those there are; None: as many as it takes."""
    step, runs = plan.step_seconds, plan.runs
    files, per_file = batches(plan), tokens_a_file(plan)
    a_file = file_bytes(plan.drafter, max(1, round(per_file / plan.tokens)), plan.tokens, plan.dtype, plan.prompt_share)
    step_bytes = files * a_file
    line = plan.network_gbit * 1e9 / 8
    wire_load = runs * step_bytes / step / line
    cores = IDLE_CPU + runs * (
        step_bytes / GIB * INGEST_CPU / step
        + files * POST_CPU / step
        + plan.engines * (REPORT_CPU / _REPORT_SECONDS + PUSH_CPU / step)
    )
    # Bytes a second that a run's burst can have of the line and of the API's cores beside the other runs' mean load.
    intake = min(line, math.ceil(cores) * a_file / (POST_CPU + a_file / GIB * INGEST_CPU))
    intake = max(intake / runs, intake - (runs - 1) * step_bytes / step)
    arrive = max(plan.post_share * step, step_bytes / intake)
    work = Work.of(plan, settings, tflops)
    wanted = runs * (work.train + work.score) / step
    least = runs * work.passed_over / step
    gpus = float(math.ceil(wanted)) if worker_gpus is None else worker_gpus
    busy = min(1.0, wanted / gpus)
    # Behind, the worker trains on the share that fits and only scores the rest.
    each, cheap = runs * (work.train + work.score) / gpus, runs * work.passed_over / gpus
    trained = 1.0 if each <= step else max(0.0, min(1.0, (step - cheap) / max(each - cheap, 1e-12)))
    # Runs are in no step with each other: a run's burst has what the others leave, and its fair part at least.
    fair = max(1 / runs, 1 - busy * (runs - 1) / runs)
    drain = (work.train + work.score) / gpus / fair
    most = min(1.0, max(settings.claim_tokens, per_file) / plan.sent_tokens)  # share of a step that a claim takes
    hold = settings.checkpoint_seconds + most * drain
    held = 1 - max(0.0, arrive - hold) / drain if drain > arrive else hold / max(arrive, 1e-9)
    queued = step_bytes * (2.0 - trained if trained < 1.0 else min(1.0, held + 1 / files))
    most_queued = settings.queue_max_bytes
    rank_bytes = step_bytes / plan.ranks
    sent_meanwhile = plan.post_share * step * intake / plan.ranks
    hook_load = max(rank_bytes / (HOOK_BYTES + sent_meanwhile), a_file / HOOK_BYTES)
    publish = drafter_bytes(plan.drafter)
    download = runs * plan.engines * publish / line
    # Mean lag: the first file's way here, turns of other runs, older rollouts passed over, the claim that trains on it,
    # the next claim's scores, which judge it, and the download. A claim holds what came since the one before.
    behind = trained < 1.0
    share = most * (1 - trained / 2) if behind or drain > arrive else 1 / files  # in a claim of another run
    turns = share * (trained * each + (1 - trained) * cheap) / runs * _waiting(runs, wanted / gpus)
    before = (
        turns / (2 if wanted >= gpus else 1) + max(0.0, 1 - trained - most / 2) * cheap
    )  # half of the claim that was cut is no longer waiting

    def claimed(seconds: float) -> float:
        return min(most, max(1 / files, seconds / max(arrive, 1e-9)))

    here = arrive / (files + 1) + a_file / line + POST_CPU + a_file / GIB * INGEST_CPU
    first = min(claimed(before) * each / runs, step)  # it ends where rollouts of a newer policy wait
    following = max(arrive / files - first, turns)
    score = claimed(first + following) * work.score / gpus
    # Where one claim takes the whole step, the next step's judges it: always of one file, else after a wait this long.
    others = min(1.0, wanted / gpus) * (runs - 1) / runs
    whole = 1.0 if files < 2 else others * math.exp(-arrive * others / turns) if most >= 1 and turns > 0 else 0.0
    following += whole * (step - following)
    # An engine that downloads takes the newest drafter afterwards: what comes in between waits for the rest.
    sent_out = download / runs * (1 + _waiting(runs, download / step)) + max(0.0, download - step)
    lag = (here + before + first + following + score + sent_out) / step
    a_day = runs * 86_400 / step
    redis = _KEPT_DAYS * a_day * (plan.sent_tokens / plan.tokens * FATE_BYTES + files * BATCH_BYTES)
    redis += runs * min(_SCORES_KEPT, files * _KEPT_DAYS * 86_400 / step) * SCORE_BYTES
    gbit = runs * step_bytes * 8e-9 / step
    return {
        "worker_gpus": Fact(
            wanted,
            "GPUs",
            "assumed",
            f"{work.train:,.1f} GPU s of training and {work.score:,.1f} of scoring a step of a run, at {tflops:g}"
            f" TFLOP/s (no GPU has run it); with {gpus:g} GPUs it is busy {busy:.0%} and trains on {trained:.0%}",
            wanted / gpus,
        ),
        "busy": Fact(busy, "share", "assumed", "of the worker's time"),
        "trained": Fact(trained, "share", "assumed", "of what is sent that is trained on; the rest is scored"),
        "scoring": Fact(
            least, "GPUs", "assumed", "to score alone; below that the queue grows without end", least / gpus
        ),
        "wire": Fact(gbit, "Gbit/s", "arithmetic", f"{step_bytes / GIB:,.2f} GiB a step of a run", wire_load),
        "queue": Fact(
            queued,
            "bytes",
            "assumed",
            "largest queue and spool of a run; "
            + (
                f"DRAFTALIGN_QUEUE_MAX_BYTES is {most_queued / GIB:g} GiB"
                if most_queued
                else f"takes {runs * queued * 4 / 3 / GIB:,.0f} GiB of disk for all, of which it has three quarters"
            ),
            queued / most_queued if most_queued else None,
        ),
        "hook": Fact(
            rank_bytes,
            "bytes",
            "measured on two cores",
            "of a rank and step; its queue_bytes (256 MiB) and what line and API take meanwhile hold the rest back",
            hook_load,
        ),
        "lag": Fact(
            lag,
            "steps",
            "assumed",
            "from rollouts to engines with a drafter that saw them, if the gate agrees; below 0.2 hardly known",
        ),
        "download": Fact(
            download,
            "s",
            "arithmetic",
            f"{runs * plan.engines * publish / GIB:,.1f} GiB at a publish of each run; an engine {publish / GIB:.2f}",
            download / step,
        ),
        "api_cores": Fact(cores, "cores", "measured on two cores", "of the API; one process has one", cores),
        "redis": Fact(redis, "bytes", "measured on two cores", "of Redis after 7 days, without streams and page"),
    }


def _waiting(runs: int, load: float) -> float:
    """Pieces of work of other runs that one waits for: the Pollaczek-Khinchine mean of equal ones; all at full load."""
    others = load * (runs - 1) / runs
    return float(runs - 1) if load >= 1 else min((runs - 1) / 2, others / (2 * (1 - others)))


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
    faster = step_speedup(share, {(now + gain) / now: 1.0})
    saved = engine_gpus * 24 * gpu_hour_price * (1 - 1 / faster)
    found["cost_a_point"] = Fact(cost / (gain * 100), "money a day", "assumed", "for each 0.01 of α that is gained")
    found["saved"] = Fact(
        saved,
        "money a day",
        "assumed",
        f"α {now:g} to {now + gain:g}: a step takes {1 / faster:.1%} of its time on {engine_gpus} GPUs, where a round's"
        " time stays (`draftalign worth` measures that)",
        cost / saved if saved else None,
    )
    return found


def policy_config(policy: str) -> Mapping[str, Any]:
    """A short name's sizes, or a transformers config.json. Raises ConfigurationError."""
    if policy in POLICIES:
        return POLICIES[policy]
    try:
        found = json.loads(Path(policy).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--policy is {' or '.join(POLICIES)} or a config.json; {policy}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--policy {policy} must hold a JSON object, the policy's transformers config")
    return found.get("text_config", found) if isinstance(found.get("text_config", found), dict) else found


def plan(
    policy: Annotated[str, typer.Option(help="8b, 32b, or the path of the policy's config.json.")] = "8b",
    step_seconds: Annotated[float, typer.Option(help="Time of an RL step.")] = 120.0,
    rollouts_a_step: Annotated[int, typer.Option(help="Rollouts of a step.")] = 1024,
    tokens_a_rollout: Annotated[int, typer.Option(help="Tokens of a rollout, its prompt included.")] = 4096,
    prompt_share: Annotated[float, typer.Option(help="Share of them that is the prompt's.")] = 0.25,
    sampled_share: Annotated[float, typer.Option(help="The hook's sample_fraction.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the features: bfloat16 or float8_e4m3.")] = "bfloat16",
    post_share: Annotated[
        float, typer.Option(help="Share of a step in which they are made; 0: all at its end.")
    ] = 0.25,
    ranks: Annotated[int, typer.Option(help="Trainer ranks of a run that send.")] = 8,
    runs: Annotated[int, typer.Option(help="Runs like this that share the service.")] = 1,
    engines: Annotated[int, typer.Option(help="Inference engines of a run.")] = 8,
    network_gbit: Annotated[float, typer.Option(help="Line of the service, each way.")] = 100.0,
    worker_gpus: Annotated[float | None, typer.Option(help="GPUs of the worker; unset: as many as it takes.")] = None,
    gpu_tflops: Annotated[float, typer.Option(help="TFLOP/s that one really does.")] = GPU_TFLOPS,
    gpu_hour_price: Annotated[float | None, typer.Option(help="Price of a GPU hour, in any money.")] = None,
    step_gpus: Annotated[
        int | None, typer.Option(help="GPUs that an RL step occupies; unset: ranks + engines.")
    ] = None,
    alpha_now: Annotated[float | None, typer.Option(help="α without alignment.")] = None,
    alpha_gain: Annotated[float | None, typer.Option(help="What alignment adds to it.")] = None,
    generation_share: Annotated[float, typer.Option(help="Share of a step that generation takes now.")] = 0.7,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a deployment will need, worst fact first. Asks nobody; settings come from DRAFTALIGN_* variables."""
    settings = Settings()
    above_zero = {"worker-gpus": worker_gpus, "gpu-tflops": gpu_tflops, "gpu-hour-price": gpu_hour_price}
    above_zero |= {"step-gpus": step_gpus, "alpha-gain": alpha_gain}
    for name, value in above_zero.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"--{name} must be above 0, got {value}")
    if dtype not in ("bfloat16", "float8_e4m3"):
        raise ConfigurationError(f"--dtype must be bfloat16 or float8_e4m3, got {dtype!r}")
    if (alpha_now is None) != (alpha_gain is None) or (alpha_now is not None and gpu_hour_price is None):
        raise ConfigurationError("--alpha-now and --alpha-gain go together, and with --gpu-hour-price")
    if alpha_now is not None and not 1 <= alpha_now < math.inf:
        raise ConfigurationError(f"--alpha-now is tokens a verification round, at least 1; got {alpha_now}")
    try:
        drafter = DrafterConfig.from_target(policy_config(policy), _LAYERS, settings.draft_vocab_size)
        sizes = (step_seconds, rollouts_a_step, tokens_a_rollout, prompt_share, sampled_share, ranks, runs, engines)
        given = Deployment(drafter, *sizes, network_gbit, dtype, post_share)  # type: ignore[arg-type]
        facts = estimate(given, settings, tflops=gpu_tflops, worker_gpus=worker_gpus)
        if gpu_hour_price is not None:
            gpus = worker_gpus or math.ceil(facts["worker_gpus"].value)
            gain = None if alpha_now is None or alpha_gain is None else (alpha_now, alpha_gain, generation_share)
            facts |= money(gpus, gpu_hour_price, step_gpus or runs * (ranks + engines), gain)
    except (ValueError, DrafterError) as error:
        raise ConfigurationError(str(error)) from error
    if json_:
        typer.echo(json.dumps({name: asdict(fact) for name, fact in worst_first(facts)}, indent=1))
        return
    for name, fact in worst_first(facts):
        said = "" if fact.load is None else f"{fact.load:7.0%}{' DOES NOT FIT' if fact.load > 1 else ''}"
        amount = f"{fact.value / GIB:,.2f} GiB" if fact.unit == "bytes" else f"{fact.value:,.3g} {fact.unit}"
        typer.echo(f"{name:13} {amount:>22} {said:8}  [{fact.basis}] {fact.text}")
