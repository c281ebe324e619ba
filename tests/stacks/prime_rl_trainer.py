"""prime-rl's real RL trainer on two gloo processes, FSDP2: `prime_rl_trainer.py OUT CASE`, with PRIME_RL_SOURCE.

CASE is `float32`, `bfloat16` (prime-rl's default: mixed precision, compiled, layers checkpointed; with tied weights) or
`broken` (rank 1's hook fails in each forward). All of `train` runs, started as its users start it: configuration,
model, FSDP2, data loader, loss, optimizer, broadcasts of weights to a folder. Of the test's own, for want of CUDA:
flash attention's kernel, the names of devices, torchtitan's clipping, Dynamo's backend, and packages of CUDA that are
imported and not used here. Every rank writes OUT/<rank>.json: what was sent, against each rollout alone in
transformers' model in one process; the weights with and without us.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial, partialmethod
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, compare, small_policy, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

from rl_hooks.stacks import prime_rl as adapter
from rl_hooks.trainer import staging
from rl_hooks.trainer.hook import DrafterHook

STEPS, ROLLOUTS, ROW, PADDED_TO = 3, 10, 64, 16
TEMPERATURE = 0.7
AUX = (2, 4, 5)
VOCABULARY = 512
#: What prime-rl imports and a CPU has not, or has in another build.
ABSENT = (
    *("deep_ep", "dion", "fla", "flash_attn", "modelexpress", "nixl", "ring_flash_attn", "tilelang", "torchao"),
    *("torchtitan", "vllm", "wandb_gql", "wandb_workspaces"),
)


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of which any class or function may be imported, and none is used."""

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if self.has(fullname) else None

    @staticmethod
    def has(name: str) -> bool:
        return name.split(".")[0] in ABSENT

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            # A lone capital is a language's namespace (tilelang's T).
            return _Kind(name, (), {}) if name[0].isupper() and len(name) > 1 else MagicMock(name=name)

        module.__getattr__ = get
        return cast("types.ModuleType", module)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def varlen(q: Any, k: Any, v: Any, cu_q: Any, _cu_k: Any, _max_q: int, _max_k: int, *, causal: bool) -> torch.Tensor:
    """flash_attn's `flash_attn_varlen_func` over [T, N, hd]."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    places = torch.arange(q.shape[1])
    rollout = torch.bucketize(places, cu_q, right=True)  # as a mask: Dynamo traces this
    seen = (rollout[:, None] == rollout) & (places[:, None] >= places)
    assert causal
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def on_cpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where "cuda" means the CPU."""

    def called(*args: Any, **more: Any) -> Any:
        def cpu(value: Any) -> Any:
            return "cpu" if isinstance(value, str) and value == "cuda" else value

        return call(*(cpu(one) for one in args), **{name: cpu(one) for name, one in more.items()})

    return called


def call_the_cpu_cuda() -> None:
    tensor: Any = torch.Tensor
    move = on_cpu(tensor.to)

    def to(self: Any, *args: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo knows the builtin by its own name only
            return self.type(args[0]) if isinstance(args[0], torch.dtype) else self
        return move(self, *args, **more)

    for owner, name in ((torch, "tensor"), (torch, "empty"), (torch, "zeros"), (torch.nn.Module, "to_empty")):
        setattr(owner, name, on_cpu(getattr(owner, name)))
    tensor.to = to
    tensor.cuda = lambda self: self
    cuda: Any = torch.cuda
    cuda.reset_peak_memory_stats = cuda.empty_cache = cuda.synchronize = lambda *_: None
    cuda.max_memory_reserved = lambda *_: 0


def is_default(case: str) -> bool:
    return case == "bfloat16"


def clip(parameters: Any, max_norm: float, **_: Any) -> Any:
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor()


def prime_rl_on_a_cpu(case: str) -> Any:
    """prime-rl's module with its loop."""
    for asking in ("integrations.hub_kernels", "quantizers"):  # whether packages are there that stand in below
        importlib.import_module(f"transformers.{asking}")
    source = Path(os.environ["PRIME_RL_SOURCE"])
    sys.path += [str(source / "src"), str(source / "packages/prime-rl-configs/src")]  # one namespace package
    sys.meta_path.insert(0, StandIn())
    call_the_cpu_cuda()
    train: Any = importlib.import_module(adapter.TRAINER)
    names = ("models.layers.attn", "parallel_dims", "model", "perf", "utils")
    modules: list[Any] = [importlib.import_module(f"prime_rl.trainer.{name}") for name in names]
    attn, dims, model, perf, utils = modules
    perf.PerfCounter._mfu_from_tps = lambda *_: 0.0  # a CPU's peak is not known
    attn.FlashAttention._funcs = {2: varlen}
    dims.device_type = "cpu"
    if not is_default(case):
        model.MixedPrecisionPolicy = lambda **_: MixedPrecisionPolicy()
    utils.torch_clip_grad_norm_ = clip
    train.setup_torch_distributed = lambda **_: None  # the ranks have their group
    dist.destroy_process_group = lambda *_: None
    module: Any = torch.nn.Module
    module.compile = partialmethod(module.compile, backend="eager")
    return train


@torch.no_grad()
def samples(step: int, case: str) -> list[Any]:
    """Rollouts as prime-rl's orchestrator makes them, drawn by the first weights; a hole for what a tool said."""
    from prime_rl.transports.rollouts import TrainingSample

    generator, policy = torch.Generator().manual_seed(step), small_policy(VOCABULARY, tied=is_default(case))
    made = []
    for number in range(ROLLOUTS):
        length = 12 + 3 * number
        noise = torch.randn(length, generator=generator)
        mask = [t >= 5 and not (number % 2 and 7 <= t < 9) for t in range(length)]
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        logp = (policy(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
        made.append(
            TrainingSample(
                token_ids=ids.tolist(),
                mask=mask,
                logprobs=[one if drawn else 0.0 for one, drawn in zip([0.0, *logp], mask, strict=True)],
                temperatures=[TEMPERATURE] * length,
                env_name=f"task-{number % 3}",
                advantages=noise.tolist(),
            )
        )
    return made


def rollouts_of(row: Any) -> list[list[int]]:
    """The tokens of each rollout in prime-rl's packed row that the policy drew any of."""
    ends = list(accumulate(row.sequence_lengths, initial=0))
    parts = [range(a, b) for a, b in pairwise(ends)]
    real = [[t for t in part if row.position_ids[t] == t - part.start] for part in parts]
    return [[row.input_ids[t] for t in part] for part in real if any(row.loss_mask[t] for t in part)]


def write_batches(output: Path, case: str) -> None:
    """What prime-rl's orchestrator sends, by its own packing and its own sender."""
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender

    sender = FileSystemMicroBatchSender(output, 2, current_step=1)
    for step in range(1, STEPS + 1):
        rows = prepare_batch(samples(step, case), ROW, 2, build_bin_cost(None), pad_to_multiple_of=PADDED_TO)
        for rank, mine in enumerate(rows):
            tokens = [one for row in mine for one in rollouts_of(row)]
            (output.parent / f"rows{step}.{rank}.json").write_text(json.dumps(tokens))
        asyncio.run(sender.send(rows))


def configuration(case: str, policy: Path, output: Path) -> str:
    """TOML for prime-rl's trainer."""
    lines = [
        f'output_dir = "{output}"\nmax_steps = {STEPS}\nmatmul_precision = "highest"',
        f'[model]\nname = "{policy}"\nattn = "flash_attention_2"\nseq_len = {ROW}\noptim_cpu_offload = false',
        'ac_offloading = "None"' + ("" if is_default(case) else '\ncompile = "None"\nac = "None"'),
        # Weights drift from those that drew the tokens, by less than the service's limit.
        '[optim]\ntype = "adamw"\nlr = 0.0005',
        '[rollout_transport]\ntype = "filesystem"',
        '[monitors.file]\npath = "log.jsonl"',
    ]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def alone(whole: Any, sample: Any) -> Alone:
    """A rollout in a forward of its own."""
    out = whole(torch.tensor([sample.token_ids]), output_hidden_states=True, use_cache=False)
    normaliser = (out.logits[0].float() / TEMPERATURE).logsumexp(-1)
    known = torch.tensor(sample.mask).int(), torch.tensor(sample.logprobs)
    return Alone(states_alone(out, AUX), *known, logsumexp=normaliser, stratum=sample.env_name)


def no_score(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room for logits")


def train(
    rank: int, service: Receiver | None, found: dict[str, Any], loop: Any, out: Path, case: str
) -> list[torch.Tensor]:
    from prime_rl import monitors
    from prime_rl.transports.weights.filesystem import FileSystemWeightBroadcast

    output = out / ("own" if service is None else "hooked")
    weights: dict[int, dict[str, torch.Tensor]] = {}
    hooks: list[DrafterHook] = []
    send = FileSystemWeightBroadcast.broadcast_weights

    def broadcast(self: Any, model: Any, step: int) -> None:
        # The test gathers; the hook does not.
        named = ((name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters())
        weights[step] = {name: p.full_tensor().detach().clone() for name, p in named}
        send(self, model, step)

    class Hook(DrafterHook):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            hooks.append(self)

    if case == "broken" and rank == 1:
        vars(staging).update(score_rows=no_score, score_logits=no_score)
    if rank == 0:
        output.mkdir()
        write_batches(output, case)
    dist.barrier()
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    monitors.MONITORS.clear()
    names = ("setup_model", "DataLoader", "forward")
    own = {name: getattr(loop, name) for name in names}
    settings = out / f"trainer{rank}.toml"
    settings.write_text(configuration(case, out / "policy", output))
    sys.argv = ["trainer", "@", str(settings)]
    torch.manual_seed(7)
    FileSystemWeightBroadcast.broadcast_weights, vars(adapter)["DrafterHook"] = broadcast, Hook
    try:
        (loop.main if service is None else adapter.main)()
    finally:
        FileSystemWeightBroadcast.broadcast_weights = send
        found["extended"] = [getattr(loop, name) is not own[name] for name in names]
        for name in names:
            setattr(loop, name, own[name])
    if service is not None:
        (hook,) = hooks
        assert hook.flush(20), hook.stats()
        whole = small_policy(VOCABULARY, tied=is_default(case))
        expected: dict[tuple[int, ...], Alone] = {}
        for step in range(1, STEPS + 1):
            whole.float().load_state_dict(weights[step - 1], strict=not is_default(case))  # a tied head has no name
            whole = whole.bfloat16() if is_default(case) else whole
            mine = json.loads((out / f"rows{step}.{rank}.json").read_text())
            by_tokens = {tuple(one.token_ids): one for one in samples(step, case)}
            expected |= {tokens: alone(whole, by_tokens[tokens]) for tokens in map(tuple, mine)}
        found["expected"] = len(expected)
        found["sent"] = compare(service, found, expected, whole.lm_head.weight.float())
        counted = ("failures", "captured_rollouts", "skipped_empty", "last_failure")
        found["stats"] = {name: hook.stats()[name] for name in counted}
        hook.close()
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = len(counters["graph_break"]) + len(counters["unimplemented"])
    found["moved"] = any(not torch.equal(one, weights[STEPS][name]) for name, one in weights[0].items())
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    found["logged"] = sorted({name for row in log for name in row if name.startswith("draftalign/")})
    return list(weights[STEPS].values())


def work(rank: int, out: Path, case: str, loop: Any) -> None:
    found, own = with_and_without(rank, out, partial(train, loop=loop, out=out, case=case))
    found["own extended"] = own["extended"]
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    CASE = sys.argv[2]
    small_policy(VOCABULARY, tied=is_default(CASE)).save_pretrained(OUT / "policy")
    sys.exit(run_two_ranks(partial(work, out=OUT, case=CASE, loop=prime_rl_on_a_cpu(CASE))))
