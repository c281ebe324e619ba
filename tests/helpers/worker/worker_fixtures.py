"""A tiny world for the worker: a Markov policy whose next token a drafter can learn, its files, and worker processes.

`World` makes run, head and rollout files and puts them where the API would. `Nest` starts workers as processes: one
Python that has imported torch forks all of a test process, so that killing a dozen workers costs a dozen forks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import ctypes
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np
import pytest
import redis.asyncio
import torch
from helpers.service.service_fixtures import with_last_rows
from helpers.service.storage_fixtures import RolloutQueue, Store
from redis import Redis
from torch import Tensor

from drafter.batch import load_batch
from drafter.files.checkpoint import export_config, write_drafter
from drafter.files.mtp import export_mtp_config
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.mtp.module import MtpDrafter
from drafter.policy import Policy, TargetHead
from drafter.training.trainer import DrafterTrainer, Prepared, StepReport, TrainConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks import wire
from rl_hooks.format.mtp import prefix
from rl_hooks.sending.features import as_wire
from service.settings import Settings
from service.storage.drafters.versions import Manifest
from service.storage.mirror import state_of
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch
from service.storage.registry import Registry
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool
from service.worker.loop import RunWorker

if TYPE_CHECKING:
    import pytest

VOCAB, HIDDEN, DRAFT, LAYERS = 40, 16, 32, (2, 4, 5)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
FINGERPRINT = wire.target_fingerprint(CONFIG, LAYERS)
#: Every batch its own claim, a checkpoint after each, no promotion that would change what is served meanwhile.
ONE_BY_ONE: dict[str, Any] = {
    "claim_tokens": 1,
    "checkpoint_seconds": 0.0,
    "worker_cost": 0.0,
    "gate_min_gain": 1e6,
    "learning_rate": 1e-3,
    "train_step_tokens": 64,
    "train_passes": 1.0,
    "warmup_steps": 0,
    "recent_tokens": 400,
    "vocab_min_tokens": 1,
    "draft_vocab_size": DRAFT,
}


def settings(state_dir: Path, redis_url: str, **changes: Any) -> Settings:
    """Settings of a worker on `state_dir`; ONE_BY_ONE unless changed."""
    return Settings(**{"state_dir": state_dir, "redis_url": redis_url, **ONE_BY_ONE, **changes})


def joined(parts: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(bytes(part) for part in parts)


@dataclass
class World:
    """A policy in which `last_hidden` after token x is `states[x]`, so the next token depends on x alone.

    `heads[v]` is the head in force from policy version v on; sampling always uses the newest not newer than asked.
    `rollouts`: in a batch that says no number. A worker takes 60 ms for eight, 43 for four.
    """

    tied: bool = False
    seed: int = 0
    rollouts: int = 8
    heads: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=g)
        self.states = torch.randn(VOCAB, HIDDEN, generator=g).bfloat16()
        self.aux = torch.randn(VOCAB, len(LAYERS) * HIDDEN, generator=g).bfloat16()
        first = self.embed if self.tied else torch.randn(VOCAB, HIDDEN, generator=g)
        self.heads = {0: first, **self.heads}

    def head_at(self, policy_version: int) -> Tensor:
        return self.heads[max(v for v in self.heads if v <= policy_version)]

    def policy(self, policy_version: int = 0) -> Policy:
        """What the worker takes the policy of this version for."""
        head = self.head_at(policy_version)
        return Policy(policy_version, head if self.tied else self.embed, TargetHead(head))

    def move_head(self, policy_version: int, seed: int = 1) -> Tensor:
        """A new head from this policy version on."""
        g = torch.Generator().manual_seed(1000 + seed)
        self.heads[policy_version] = torch.randn(VOCAB, HIDDEN, generator=g)
        return self.heads[policy_version]

    # --- files
    def run_file(self, *, drafter: Eagle3Drafter | MtpDrafter | None = None, metadata: dict[str, str] | None = None,
                 drafter_config: dict[str, Any] | None = None) -> bytes:  # fmt: skip
        """Body of PUT /runs/{run}."""
        meta = {
            "format": wire.RUN_FORMAT,
            "config": json.dumps(CONFIG),
            "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
            "target_fingerprint": FINGERPRINT,
            "policy_version": "0",
        }
        tensors = {"embed_tokens": as_wire(self.embed)}
        if not self.tied:
            tensors["lm_head"] = as_wire(self.heads[0])
        if drafter is not None:
            if isinstance(drafter, MtpDrafter):
                where, own = prefix(drafter.config), export_mtp_config(drafter.config)
            else:
                where, own = "", export_config(drafter.config)
            tensors |= {f"drafter.{where}{n}": as_wire(t.detach()) for n, t in drafter.state_dict().items()}
            meta["drafter_config"] = json.dumps(drafter_config or own)
        return joined(wire.encode(tensors, meta | (metadata or {})))

    def head_file(self, policy_version: int, **extra: str) -> bytes:
        """Body of PUT /runs/{run}/head."""
        meta = {"format": wire.HEAD_FORMAT, "policy_version": str(policy_version), **extra}
        return joined(wire.encode({"lm_head": as_wire(self.heads[policy_version])}, meta))

    def rollout_file(
        self,
        name: str,
        *,
        policy_version: int = 0,
        rollouts: int | None = None,
        lengths: Sequence[int] | None = None,
        temperature: float = 1.0,
        change: Callable[[dict[str, Tensor]], None] | None = None,
        prompts: Sequence[int] | None = None,
        late: int = 0,
        told: bool = False,
        **metadata: Any,
    ) -> bytes:
        """One batch of sampled rollouts named `<name>/<i>`; `change` may spoil its tensors.

        `prompts`: numbers of the prompts that they answer, one for each; without them every rollout has its own.
        `late`: so many of each rollout's first response tokens were drawn by the weights of the version before.
        `told`: the file says which.
        """
        rng = np.random.default_rng([self.seed, *name.encode()])
        lengths = lengths or [int(n) for n in rng.integers(10, 20, len(prompts or range(rollouts or self.rollouts)))]
        both = (self.states.float() @ self.head_at(v).T for v in (policy_version, policy_version - bool(late)))
        logits, before = (one / (temperature or 1.0) for one in both)  # [V, V]: of the next token, by the last one
        laws = [torch.softmax(one.double(), -1).numpy() for one in (logits, before)]
        ids: list[int] = []
        for index, length in enumerate(lengths):
            token = int(rng.integers(VOCAB))
            given = (
                [] if prompts is None else np.random.default_rng([7, prompts[index]]).integers(VOCAB, size=3).tolist()
            )
            for place in range(length):
                token = given[place] if place < len(given) else token
                ids.append(token)
                law = laws[place + 1 < 3 + late][token]
                token = int(rng.choice(VOCAB, p=law / law.sum()))
        bounds = np.cumsum([0, *lengths])
        x = torch.tensor(ids)
        mask = torch.ones(len(ids), dtype=torch.uint8)
        logprobs = torch.zeros(len(ids))
        logprobs[1:] = torch.log_softmax(logits, -1)[x[:-1], x[1:]]
        older = torch.zeros(len(ids), dtype=torch.int32)
        for start in bounds[:-1]:  # a prompt of three tokens
            older[start + 3 : start + 3 + late] = 1
            mask[start : start + 3] = 0
            logprobs[start : start + 3] = 0.0
        said = torch.nonzero(older).flatten()
        logprobs[said] = torch.log_softmax(before, -1)[x[said - 1], x[said]]
        tensors = {
            "input_ids": x.int(),
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
            "loss_mask": mask,
            "aux_hidden": self.aux[x],
            "last_hidden": self.states[x],
            "logprobs": logprobs,
            "logsumexp": torch.logsumexp(logits, -1)[x],
        }
        if told:
            tensors["versions_behind"] = older
        if change is not None:
            change(tensors)
        facts: dict[str, Any] = {
            "run": "default",
            "policy_version": policy_version,
            "rollout_ids": [f"{name}/{i}" for i in range(len(lengths))],
            "target_fingerprint": FINGERPRINT,
            "aux_layers": LAYERS,
            "temperature": temperature,
        }
        file = with_last_rows({k: as_wire(v) for k, v in tensors.items()}, metadata.get("last_rows", "all"))
        return joined(wire.encode(file, wire.rollout_metadata(**facts | metadata)))

    # --- drafters
    def drafter(self, seed: int = 0, *, vocabulary: Tensor | None = None) -> Eagle3Drafter:
        """A random drafter."""
        ids = torch.arange(DRAFT) if vocabulary is None else vocabulary
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(DrafterConfig.from_target(CONFIG, LAYERS, ids.numel()), DraftVocabulary(ids, VOCAB))
        drafter.init_from_target(self.heads[0][ids])
        return drafter

    def trained_drafter(self, tmp_path: Path, steps: int = 60, policy_version: int = 0) -> Eagle3Drafter:
        """A drafter that knows this world well; trained once in a process."""
        heads = (bytes(as_wire(self.heads[0]).data), bytes(as_wire(self.head_at(policy_version)).data))
        key = (self.tied, self.seed, steps, policy_version, heads)
        if key not in _TRAINED:
            drafter = self.drafter()
            path = tmp_path / "schooling.safetensors"
            path.write_bytes(self.rollout_file("schooling", policy_version=policy_version, rollouts=48))
            batch = load_batch(path)
            trainer = DrafterTrainer(drafter, TrainConfig(learning_rate=1e-2))
            for _ in range(steps):
                trainer.step([(batch, self.policy(policy_version))])
            _TRAINED[key] = drafter
        return copy.deepcopy(_TRAINED[key])


_TRAINED: dict[object, Eagle3Drafter] = {}


def recorded_windows(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, Policy]]]:
    """Every window that trainers are given from now on: policy version and policy of each batch."""
    windows: list[list[tuple[int, Policy]]] = []
    step = DrafterTrainer.step

    def recorded(self: DrafterTrainer, window: Sequence[tuple[Prepared, Policy]]) -> StepReport:
        windows.append([(prepared.batch.policy_version, policy) for prepared, policy in window])
        return step(self, window)

    monkeypatch.setattr(DrafterTrainer, "step", recorded)
    return windows


@functools.cache
def _runner(_pid: int) -> asyncio.Runner:
    """The main thread's event loop, for all benches of this process: one for each batch takes 3 ms of CPU."""
    return asyncio.Runner()


@functools.cache
def _client(url: str, _pid: int) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(url)


async def _enqueue(client: redis.asyncio.Redis, run: str, batch: Batch) -> str:
    outcome = await AsyncRolloutQueue(client, run).enqueue(batch, max_items=10_000, max_bytes=1 << 34)
    return outcome.outcome


class Bench:
    """A state directory and a Redis, with what the API does to them done directly."""

    def __init__(self, state_dir: Path, redis_url: str, world: World | None = None, **changes: Any) -> None:
        self.world = world or World()
        self.redis_url = redis_url
        self.settings = settings(state_dir, redis_url, **changes)
        self.layout = state_of(self.settings)
        self.redis: Any = Redis.from_url(redis_url)
        self.spool = Spool(self.layout)
        self.posted: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.redis.close()

    @property
    def queue(self) -> RolloutQueue:
        return RolloutQueue(self.redis, "default")

    @property
    def store(self) -> Store:
        return Store(self.redis, "default")

    def register(self, body: bytes | None = None, run: str = "default", *, checked: bool = True) -> None:
        """`checked=False`: as a service did that did not ask yet whether the worker can begin the run."""
        body = self.world.run_file() if body is None else body
        with contextlib.nullcontext() if checked else mock.patch("service.storage.runs._check_for_worker"):
            record = read_run_header(run, wire.parse_header(body))
        with self.spool.upload() as upload:
            upload.write(body)
            commit_run(self.layout, record, upload)
        RolloutQueue(self.redis, run).ensure_group()

    def begin(self) -> None:
        """Register the run with a random drafter."""
        self.register(self.world.run_file(drafter=self.world.drafter()))

    def put_head(self, policy_version: int) -> None:
        self.layout.head("default", policy_version).write_bytes(self.world.head_file(policy_version))

    def post(self, name: str, **options: Any) -> str:
        """Queue one batch of the world; returns its id."""
        return self.post_file(self.world.rollout_file(name, **options))

    def post_file(self, body: bytes) -> str:
        header = wire.check_rollout_header(wire.parse_header(body))
        with self.spool.upload() as upload:
            upload.write(body)
            blob = self.spool.new_blob(header.batch_id, upload.digest)
            upload.keep(self.layout.blob(header.run, blob))
        assert self.enqueue(header.run, self._spooled(header, blob, len(body))) == "accepted"
        self.posted.append(header.batch_id)
        return header.batch_id

    def _spooled(self, header: wire.RolloutHeader, blob: str, size: int) -> Batch:
        return Batch(
            header.batch_id,
            blob,
            size,
            header.tokens,
            header.rollouts,
            header.policy_version,
            header.policy_version_max,
            header.rollout_ids,
            header.session,
            header.session_began,
        )

    def enqueue(self, run: str, batch: Batch) -> str:
        """Queue a file of the spool as the API does; says what became of it."""
        if threading.current_thread() is threading.main_thread():
            return _runner(os.getpid()).run(_enqueue(_client(self.redis_url, os.getpid()), run, batch))

        async def alone() -> str:
            async with redis.asyncio.Redis.from_url(self.redis_url) as client:
                return await _enqueue(client, run, batch)

        return asyncio.run(alone())

    def worker(self, **changes: Any) -> RunWorker:
        """The run's worker in this process."""
        chosen = self.settings.model_copy(update=changes)
        return RunWorker(chosen, self.layout, self.queue, self.store, "default")

    def drain(self, worker: RunWorker) -> None:
        """Cycle until nothing is left to do."""
        for _ in range(200):
            if not worker.cycle():
                return
        raise AssertionError("the worker never ran out of work")

    def state(self, batch_id: str) -> str:
        record = self.queue.batch(batch_id)
        return "unknown" if record is None else record["state"]

    def reason(self, batch_id: str) -> str:
        record = self.queue.batch(batch_id)
        return "unknown" if record is None else record["reason"]

    def code(self, batch_id: str) -> str | None:
        return (self.queue.batch(batch_id) or {}).get("code")

    def spooled(self) -> list[str]:
        return sorted(p.name for p in self.layout.spool("default").iterdir())

    def checkpoint(self, run: str = "default") -> Path:
        """The newest worker checkpoint."""
        return max(self.layout.worker(run).glob("checkpoint-*"), key=lambda p: p.name)

    def totals(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkpoint() / "state.json").read_text())["totals"]
        return found

    def trainer_counts(self, run: str = "default") -> dict[str, int]:
        pointer = json.loads((self.checkpoint(run) / "trainer" / "trainer.json").read_text())
        return {k: pointer[k] for k in ("windows", "skipped_windows", "tokens_trained")}

    def wait(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Poll until `condition`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
            time.sleep(0.02)


# --- worker processes ------------------------------------------------------------------------------------------------


def published(bench: Bench, drafter: Eagle3Drafter) -> Manifest:
    """Publish another drafter of the lineage by hand."""
    registry = Registry(bench.layout)
    staged = registry.stage("default")
    write_drafter(staged, drafter)
    return registry.publish(
        "default",
        staged,
        policy_version=0,
        parent=None,
        config_fingerprint="f" * 32,
        d2t_sha256=drafter.vocabulary.digest,
        aux_layers=LAYERS,
        reason="by hand",
    )


def states(bench: Bench) -> list[str]:
    """What became of every batch that was posted."""
    return [bench.state(b) for b in bench.posted]


def final_state(bench: Bench) -> dict[str, Any]:
    """All that must not depend on how often a worker died."""
    assert states(bench) == ["trained"] * len(bench.posted)
    assert bench.queue.depth() == (0, 0)
    assert bench.spooled() == []
    scores = bench.store.scores()
    assert set(scores) == set(bench.posted)
    parts = ("drafter/model.safetensors", "trainer/moments.safetensors")
    totals = {k: v for k, v in bench.totals().items() if k != "train_seconds"}
    kept = ("candidate", "served", "policy_version", "action", "best_version")
    return {
        "weights": [(bench.checkpoint() / part).read_bytes() for part in parts],
        "counts": bench.trainer_counts(),
        "totals": totals,
        "scores": {b: {k: getattr(r, k) for k in kept} for b, r in scores.items()},
    }


class _Forker:
    """One Python that has imported torch, for all nests of this process: it ends when its standard input does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:4][::-1])),
            },
        )
        atexit.register(self._end)

    def ask(self, request: dict[str, Any]) -> int:
        """The process id of the worker that it forked."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 300.0)  # to import torch takes a loaded machine long
        assert ready, "no worker was forked"
        return int(self.process.stdout.readline())

    def _end(self) -> None:
        self.process.communicate()


_forker = functools.cache(_Forker)


class Nest:
    """Forks workers on demand; they write to its own log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.touch()
        self._pids: list[int] = []

    def start(self, bench: Bench, **options: Any) -> int:
        """Start a worker; returns its process id. Options: see `_become_worker`."""
        given = json.loads(bench.settings.model_dump_json(exclude_unset=True)) | {
            "redis_url": bench.redis_url,
            "tokens": "",
        }
        given |= options.pop("settings", {})
        options |= {"log": str(self.log), "environment": dict(os.environ) | {"OMP_NUM_THREADS": "1"}}
        pid = _forker().ask({"settings": given, **options})
        self._pids.append(pid)
        return pid

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            wait_until_gone(pid)

    def kill_all(self) -> None:
        """Kill every worker that still runs."""
        for pid in self._pids:
            if alive(pid):
                self.kill(pid)
        self._pids.clear()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.01)


def _nest() -> None:
    """Fork a worker for every line of options on standard input; answer with its process id."""
    import service.worker.process.worker  # noqa: F401 - imported once, before the forks

    gc.freeze()  # no fork looks for garbage in what was imported
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its nest
                _become_worker(**json.loads(line))
                status = 0
            except BaseException:  # noqa: BLE001 - a fork must never fall back into its parent's loop
                import traceback

                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _become_worker(
    settings: dict[str, Any],
    log: str,
    environment: dict[str, str],
    lease_seconds: float = 0.5,
    beat_seconds: float = 0.1,
    dies_of: str = "",
    dies_opening: str = "",
    dies_training: str = "",
    largest_file: int = 0,
    largest_file_while: str = "",
    address_space: int = 0,
    clock_ahead: float = 0.0,
) -> None:
    """Run a worker with short leases.

    `dies_of`: a rollout id that kills it on sight, as a fault in native code would. `dies_opening`: a run that kills
    it when it is opened, as the kernel does for memory. `dies_training`: one of which every batch does that, once it is
    trained on. `largest_file`: bytes beyond which
    a write fails, while the path `largest_file_while` exists (a disk that is full, and then is not). `address_space`:
    bytes that it may map beyond what it has when it starts. `clock_ahead`: seconds by which its host's clock is wrong.
    """
    import logging
    import resource

    with Path(log).open("ab") as output:
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)

    import drafter.batch
    import service.storage.queue.lease
    import service.worker.inbox
    import service.worker.loop
    import service.worker.process.worker

    logging.basicConfig(
        level="INFO", stream=sys.stderr, format=f"{os.getpid()} %(levelname)s %(message)s (%(asctime)s)", force=True
    )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    service.storage.queue.lease.LEASE_SECONDS = lease_seconds
    service.worker.process.heartbeat._BEAT_SECONDS = beat_seconds
    service.worker.process.worker._LOOK_FOR_RUNS_SECONDS = 0.05
    service.worker.process.worker._RETRY_SECONDS = 0.05
    service.worker.process.worker._DISK_SECONDS = 0.5
    if clock_ahead:
        right = time.time
        vars(time)["time"] = lambda: right() + clock_ahead
    if dies_of:
        admitted = drafter.batch.screen

        def screen(batch: Any) -> None:
            if dies_of in batch.rollout_ids:
                os.kill(os.getpid(), signal.SIGKILL)
            admitted(batch)

        vars(service.worker.inbox)["screen"] = screen
    if dies_opening:
        opened = vars(service.worker.process.worker)["RunWorker"]

        def open_run(*args: Any, **named: Any) -> Any:
            if dies_opening in args:
                os.kill(os.getpid(), signal.SIGKILL)
            return opened(*args, **named)

        vars(service.worker.process.worker)["RunWorker"] = open_run
    if dies_training:
        learn = vars(service.worker.loop)["Learner"].learn

        def learn_or_die(self: Any, *args: Any, **named: Any) -> Any:
            if self.run == dies_training:
                os.kill(os.getpid(), signal.SIGKILL)
            return learn(self, *args, **named)

        vars(service.worker.loop)["Learner"].learn = learn_or_die
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

        def lift() -> None:
            while Path(largest_file_while).exists():
                time.sleep(0.02)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        threading.Thread(target=lift, daemon=True).start()
    if address_space:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space, resource.RLIM_INFINITY))
    service.worker.process.worker.run_worker(Settings(**settings))


@contextlib.contextmanager
def nest(log: Path) -> Iterator[Nest]:
    """A nest that is emptied at the end."""
    found = Nest(log)
    try:
        yield found
    finally:
        found.kill_all()


if __name__ == "__main__":
    _nest()
