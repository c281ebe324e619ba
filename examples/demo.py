"""`draftalign demo`: real RL on a small policy whose drafter is kept in step through the service.

TRL's own GRPOTrainer, unmodified, trains the policy; its rollouts come from an inference server with genuine EAGLE-3
speculation; `rl_hooks.trl.attach` sends features; the service scores, trains, gates and publishes; the swap agent
brings what is published into the running server. Everything runs as separate processes on loopback.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples import TASKS
from examples.demo_report import StepRow, write_report
from examples.engine_client import EngineClient
from examples.features import Rollout
from examples.task import EOS, PAD, Task
from examples.vllm_engine import VllmClient, check_installed, vllm_server
from service.api.port.free import check_port
from service.cli.checks import check_redis
from service.cli.supervisor import spawn, stop
from service.errors import ConfigurationError, ServiceError

log = logging.getLogger("draftalign.demo")
console = Console()

DEPTH: Final = 4
PROMPTS_PER_STEP: Final = 8
GENERATIONS: Final = 8
RL_LEARNING_RATE: Final = 5e-4
WARM_UP_ROLLOUTS: Final = 1024
#: What the first drafter is trained on before RL: the policy's answers to the run's kind of prompts, its answers to
#: random words (a general corpus), or nothing.
STARTS: Final = ("in-domain", "general", "scratch")
RUN: Final = "demo"
_PATIENCE_SECONDS: Final = 180.0  # with no further step scored
#: The service's settings, sized for rollouts of thirty tokens. Everything else is the default.
SERVICE_SETTINGS: Final[Mapping[str, str]] = {
    "DRAFTALIGN_DEPTH": str(DEPTH),
    "DRAFTALIGN_TRAIN_STEP_TOKENS": "900",
    "DRAFTALIGN_LEARNING_RATE": "1e-2",
    "DRAFTALIGN_RECENT_TOKENS": "8000",
    "DRAFTALIGN_CHECKPOINT_SECONDS": "5",
    "DRAFTALIGN_WORKER_COST": "0.02",
    "DRAFTALIGN_VOCAB_MIN_TOKENS": "4000",  # of a drafter from scratch: those of two or three RL steps
    "DRAFTALIGN_GATE_ROLLOUTS": "64",  # those of one RL step: a part of a training takes no longer than scoring more
}


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the command line gave."""

    steps: int = 150
    seed: int = 0
    out: Path = Path("demo-out")
    port: int = 8400
    redis_url: str | None = None
    engine: str = "example"
    keep: bool = False
    task_name: str = "elicit"
    start: str = "in-domain"
    prompts: int = PROMPTS_PER_STEP

    @property
    def task(self) -> Task:
        """What the policy is asked."""
        return TASKS[self.task_name]


@dataclass
class LiveCount:
    """What the engine counted while it generated one RL step's rollouts."""

    rounds: int = 0
    emitted: int = 0
    seconds: float = 0.0
    hook_seconds: float = 0.0  # wall time that the hook took from this RL step
    drafter_versions: dict[str, int] = field(default_factory=dict)  # version -> rounds
    rollouts: list[Rollout] = field(default_factory=list)
    per_rollout: list[tuple[int, int]] = field(default_factory=list)  # tokens emitted by rounds, rounds

    @property
    def alpha(self) -> float | None:
        """Tokens per round, None without a round."""
        return self.emitted / self.rounds if self.rounds else None

    def interval(self) -> tuple[float | None, float | None]:
        """95 % interval of α: ratio of sums, clustered by rollout."""
        import numpy as np

        from drafter.replay.acceptance import log_ratio

        if not self.per_rollout:
            return None, None
        tokens, rounds = np.array(self.per_rollout, dtype=np.float64).T
        ratio = log_ratio(tokens, rounds)
        reach = ratio.reach(0.975)
        return float(np.exp(ratio.centre - reach)), float(np.exp(ratio.centre + reach))

    @property
    def drafter_version(self) -> str:
        """The version that drafted most of the step's rounds."""
        return max(self.drafter_versions, key=lambda v: self.drafter_versions[v], default="")


def run_demo(config: DemoConfig) -> None:
    """Run the whole loop and write `--out`; ends every process that it started, also on Ctrl-C."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"})
    if config.start not in STARTS:
        raise ConfigurationError(f"--start must be one of {', '.join(STARTS)}, got {config.start!r}")
    if config.engine == "vllm":
        if config.start == "scratch":
            raise ConfigurationError("--engine vllm starts with a drafter; expected --start in-domain or general")
        check_installed()
    elif config.engine != "example" and not config.engine.startswith("http"):
        raise ConfigurationError(f"--engine must be `example`, `vllm` or a URL, got {config.engine!r}")
    if config.task_name not in TASKS:
        raise ConfigurationError(f"--task must be one of {', '.join(TASKS)}, got {config.task_name!r}")
    check_port("127.0.0.1", config.port)
    if config.redis_url:
        check_redis(config.redis_url)
    import torch

    torch.set_num_threads(1)  # two busy processes share two cores; threads that wait for each other would halve both
    config.out.mkdir(parents=True, exist_ok=True)
    state_dir = Path(tempfile.mkdtemp(prefix="state-", dir=config.out))  # never a directory that was there before
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            _run(config, state_dir, stack)
            console.print(f"[dim]{time.monotonic() - started:.0f} s in all[/dim]")
            if config.keep:
                console.print(f"Still serving at http://127.0.0.1:{config.port}/ from {state_dir}; Ctrl-C ends it")
                signal.pause()
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        if not config.keep:
            shutil.rmtree(state_dir, ignore_errors=True)
            if config.redis_url:
                forget_run(config.redis_url)


def _run(config: DemoConfig, state_dir: Path, stack: ExitStack) -> None:
    from transformers.utils import logging as transformers_logging

    from examples.policy import load

    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    policy, tokenizer = load(config.task.base_policy)
    initial = state_dir / "initial-drafter"
    service_url = f"http://127.0.0.1:{config.port}"
    up = ["service.cli", "up", "--state-dir", str(state_dir), "--port", str(config.port)]
    redis_url = {"DRAFTALIGN_REDIS_URL": config.redis_url} if config.redis_url else {}  # not where `ps` would show it
    drafting = {"DRAFTALIGN_DRAFTING": "greedy"} if config.engine == "vllm" else {}  # vLLM drafts no other way
    environment = {**SERVICE_SETTINGS, **redis_url, **drafting, "DRAFTALIGN_LOG_LEVEL": "WARNING"}
    stack.enter_context(child("up", up, environment))
    engine, engine_url = _engine(config, state_dir, initial, policy, tokenizer, stack)
    agent = ["service.cli", "agent", "--url", engine_url, "--service", service_url, "--run", RUN]
    agent += ["--cache-dir", str(state_dir / "agent"), "--report-seconds", "1"]
    stack.enter_context(child("agent", agent, {"DRAFTALIGN_LOG_LEVEL": "WARNING"}))
    console.print(f"Service, worker, engine and agent run. Watch α live at [bold]{service_url}/[/bold]")
    session = Session(config, state_dir, engine, service_url, policy, tokenizer)
    session.train()
    session.finish()


def _engine(
    config: DemoConfig, state_dir: Path, initial: Path, policy: Any, tokenizer: Any, stack: ExitStack
) -> tuple[EngineClient, str]:
    """Start or find the inference server, and train the initial drafter on what it generates."""
    if config.engine not in ("example", "vllm"):
        engine = EngineClient(config.engine)
        engine.wait(None)
        _make_initial_drafter(config, policy, tokenizer, engine, initial)
        return engine, config.engine
    with ExitStack() as own:
        url = f"http://127.0.0.1:{free_port()}"
        arguments = ["--policy", str(config.task.base_policy), "--port", url.rpartition(":")[2], "--depth", str(DEPTH)]
        process = own.enter_context(child("engine", ["examples.engine_server", *arguments, "--seed", str(config.seed)]))
        engine = EngineClient(url)
        engine.wait(process)
        _make_initial_drafter(config, policy, tokenizer, engine, initial)
        if config.engine == "example":
            stack.enter_context(own.pop_all())
            return engine, url
    # vLLM wants a drafter to start with, so the built-in engine generated what that is trained on.
    port = free_port()
    base = config.task.base_policy
    server = stack.enter_context(vllm_server(state_dir, initial, port, depth=DEPTH, seed=config.seed, policy=base))
    client = VllmClient(f"http://127.0.0.1:{port}", state_dir)
    with console.status("vLLM starts (a minute or two on two cores)"):
        client.wait(server)
    return client, f"http://127.0.0.1:{port}"


def _make_initial_drafter(config: DemoConfig, policy: Any, tokenizer: Any, engine: EngineClient, out: Path) -> None:
    """Generate with the base policy, without speculation, and train the drafter that the run begins with."""
    from examples.features import batch_of
    from examples.initial_drafter import save_drafter, train_initial_drafter

    if config.start == "scratch":
        return
    prompts = _warm_up_prompts(config, tokenizer)
    rollouts: list[Rollout] = []
    with progress() as bar:
        task = bar.add_task("rollouts of the base policy", total=len(prompts))
        for start in range(0, len(prompts), 128):
            part = prompts[start : start + 128]
            rollouts += as_rollouts(part, engine.generate(part, config.task))
            bar.update(task, completed=len(rollouts))
        task = bar.add_task("initial drafter", total=config.task.initial_drafter.steps)
        drafter = train_initial_drafter(
            policy,
            batch_of(policy, [r for r in rollouts if len(r.token_ids) > 1]),
            depth=DEPTH,
            seed=config.seed,
            task=config.task,
            report=lambda step: bar.update(task, completed=step),
        )
    save_drafter(drafter, out)


def _warm_up_prompts(config: DemoConfig, tokenizer: Any) -> list[list[int]]:
    seed = 10_000 + config.seed
    if config.start == "in-domain":
        return [tokenizer.encode(text) for text in config.task.sample_prompts(WARM_UP_ROLLOUTS, seed)]
    rng = random.Random(seed)  # noqa: S311 - words for a demo, not a secret
    words = [word for word in config.task.vocabulary if word not in (PAD, EOS)]
    texts = (rng.choices(words, k=config.task.prompt_tokens) for _ in range(WARM_UP_ROLLOUTS))
    return [tokenizer.encode(" ".join(text)) for text in texts]


class Session:
    """One RL run attached to the service, and what was counted along it."""

    def __init__(
        self, config: DemoConfig, state_dir: Path, engine: EngineClient, service_url: str, policy: Any, tokenizer: Any
    ) -> None:
        self.config = config
        self.state_dir = state_dir
        self.engine = engine
        self.service = httpx.Client(base_url=service_url, timeout=30.0, trust_env=False)
        self.tokenizer = tokenizer
        self.policy = policy
        self.initial = state_dir / "initial-drafter" if config.start != "scratch" else None
        self.live: dict[int, LiveCount] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self._loaded_version = 0
        self._hook_seconds = 0.0
        self._current = ""
        self.trainer = self._make_trainer()
        from examples.policy import AUX_LAYERS
        from rl_hooks.trl import attach

        self.attachment = attach(
            self.trainer,
            service_url,
            run=RUN,
            aux_layers=AUX_LAYERS,
            initial_drafter=self.initial,
            draft_vocab_size=config.task.draft_vocabulary if self.initial is None else None,
            drafter_version=lambda: self._current,
        )

    def _make_trainer(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from datasets import Dataset
            from transformers import PrinterCallback
            from trl import GRPOConfig, GRPOTrainer

        task = self.config.task
        rows = task.curriculum(self.config.steps, self.config.prompts, self.config.seed)
        arguments = GRPOConfig(
            output_dir=str(self.state_dir / "trl"),
            per_device_train_batch_size=self.config.prompts * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=task.max_answer_tokens,
            max_steps=self.config.steps,
            learning_rate=RL_LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=self.config.seed,
            shuffle_dataset=task.shuffled,
        )
        trainer = GRPOTrainer(
            model=self.policy,
            reward_funcs=task.reward,
            args=arguments,
            train_dataset=Dataset.from_dict(dict(rows)),
            processing_class=self.tokenizer,
            rollout_func=self._rollouts,
            callbacks=[_progress_callback(self._on_log)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _rollouts(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: the policy's weights go to the server, its completions come back."""
        step = int(trainer.state.global_step)
        if step != self._loaded_version:
            self.engine.load_policy(trainer.accelerator.unwrap_model(trainer.model), step)
            self._loaded_version = step
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        begun = time.perf_counter()
        completions = self.engine.generate(ids, self.config.task)
        count = self.live.setdefault(step, LiveCount())
        count.seconds += time.perf_counter() - begun
        for completion in completions:
            count.rounds += completion["rounds"]
            count.emitted += completion["emitted_tokens"]
            count.per_rollout.append((completion["emitted_tokens"], completion["rounds"]))
            for version in completion["drafter_versions"]:
                share = completion["rounds"] // len(completion["drafter_versions"])
                count.drafter_versions[version] = count.drafter_versions.get(version, 0) + share
        count.rollouts += as_rollouts(ids, completions)
        self._current = count.drafter_version
        return {
            "prompt_ids": ids,
            "completion_ids": [c["token_ids"] for c in completions],
            "logprobs": [c["logprobs"] for c in completions],
        }

    def _on_log(self, step: int, logs: dict[str, float]) -> None:
        """TRL logs step n after its update, so the rollouts were those of policy version n - 1."""
        version = step - 1
        if "reward" not in logs or version not in self.live:
            return
        self.logged[version] = logs
        live = self.live[version]
        taken = self.attachment.overhead_seconds
        live.hook_seconds, self._hook_seconds = taken - self._hook_seconds, taken
        drafted = f"live α {live.alpha:.2f}  drafter {live.drafter_version}" if live.alpha else None
        console.print(
            f"step {version:3d}  reward {logs['reward']:.2f}  entropy {logs.get('entropy', float('nan')):.2f}  "
            f"{drafted or f'no drafter yet. {self._headline()}'}",
            highlight=False,
        )

    def _headline(self) -> str:
        """What the service says: in a run from scratch, how far it is with the first drafter."""
        return str(self.service.get(f"/runs/{RUN}").raise_for_status().json()["headline"]["text"])

    def train(self) -> None:
        """Wait until the initial drafter is live in the engine, then run RL. From scratch there is none to wait for."""
        if self.initial is None:
            self.trainer.train()
            return
        deadline = time.monotonic() + 60.0
        while not self.engine.drafter()["version"]:
            if time.monotonic() > deadline:
                raise ConfigurationError("the initial drafter did not reach the engine; see the log above")
            time.sleep(0.1)
        self.trainer.train()

    def finish(self) -> None:
        """Wait for the worker to have scored every step, then write the table, the plot and the files."""
        self.attachment.flush(30.0)
        document: dict[str, Any] = {"points": [], "events": []}
        points: dict[int, dict[str, Any]] = {}
        # What no drafter drafted has no served α: the steps of a run from scratch before its first version.
        awaited = {version for version, live in self.live.items() if live.drafter_version}
        if not awaited:
            steps = f"No drafter was there for any of {len(self.live)} steps"
            raise ServiceError(f"{steps}, so there is nothing to report; expected more --steps. {self._headline()}")
        moved = time.monotonic()
        with console.status("waiting for the worker to finish the queue"):
            while awaited - set(points) and time.monotonic() - moved < _PATIENCE_SECONDS:
                time.sleep(0.5)
                document = self.service.get("/alpha", params={"run": RUN}).raise_for_status().json()
                before, points = len(points), scored_points(document)
                if len(points) > before:
                    moved = time.monotonic()
        if missing := sorted(awaited - set(points)):
            console.print(f"[yellow]the worker did not score policy versions {missing}[/yellow]")
        rows = [StepRow.of(v, self.live[v], self.logged.get(v, {}), points.get(v, {})) for v in sorted(self.live)]
        write_report(self, rows, document["events"])

    def drift(self) -> dict[str, float]:
        """The drift monitor's statistic per lane, as a share of its limit; above 1 is an alarm. Empty: it warms up."""
        families = {family.name: family.samples for family in self._metrics()}
        statistic, limit = (
            {sample.labels["lane"]: sample.value for sample in families.get(name, ())}
            for name in ("draftalign_drift_statistic", "draftalign_drift_limit")
        )
        return {lane: value / limit[lane] for lane, value in statistic.items()}

    def _metrics(self) -> Iterator[Any]:
        yield from text_string_to_metric_families(self.service.get("/metrics").raise_for_status().text)

    def service_totals(self) -> dict[str, float]:
        """The service's counters for this run, by metric name."""
        return {
            sample.name: sample.value
            for family in self._metrics()
            for sample in family.samples
            if set(sample.labels) == {"run"}
        }


def forget_run(redis_url: str) -> None:
    """Leave nothing of the demo's run in a Redis that is not its own."""
    from service.storage.queue.keys import Keys
    from service.storage.ready import connect

    with connect(redis_url) as client:
        for key in client.scan_iter(match=f"{Keys(RUN).prefix}*"):
            client.delete(key)
        client.srem(Keys.RUNS, RUN)


def scored_points(document: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Points of `GET /alpha` by policy version; those that only an engine has counted so far have no replay α yet."""
    return {p["policy_version"]: p for p in document["points"] if p["alpha_served"] is not None}


def as_rollouts(prompts: Sequence[Sequence[int]], completions: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    """Pair prompts with the engine's completions."""
    return [
        Rollout(tuple(p), tuple(c["token_ids"]), tuple(c["logprobs"]))
        for p, c in zip(prompts, completions, strict=True)
    ]


def _progress_callback(on_log: Callable[[int, dict[str, float]], None]) -> Any:
    from transformers import TrainerCallback

    class Progressing(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            on_log(int(state.global_step), dict(logs or {}))

    return Progressing()


@contextmanager
def child(name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    process = spawn(name, argv, {"OMP_NUM_THREADS": "1", **(env or {})})
    try:
        yield process
    finally:
        stop(process, patience_seconds=60.0)  # `up` ends three children in turn, the worker after a checkpoint


def free_port() -> int:
    """A TCP port on loopback that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def progress() -> Progress:
    """A progress bar with counts and elapsed time."""
    return Progress(
        TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
