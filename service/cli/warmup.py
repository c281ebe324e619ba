"""`draftalign warmup`: a run's first drafter, from the policy's own answers, before RL begins."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from rl_hooks.sending.jobs import run_path
from service.cli.checks import given_path
from service.cli.drafters.commands import layer_numbers
from service.cli.remote.client import LOCAL, Service, call
from service.cli.remote.drafters import fetch_to, require_free
from service.errors import ConfigurationError
from service.memory import importing

if TYPE_CHECKING:
    from rl_hooks.hook import DrafterHook
    from service.cli.drafters.answers import Sent

_POLL_SECONDS: Final = 0.5
#: How many batches the policy answers ahead of the worker: a training is judged on rollouts that came after it.
_BATCHES_AHEAD: Final = 2
#: A batch of a large policy fits. The hook's default is for a trainer that must not be slowed down.
_QUEUE_BYTES: Final = 4 << 30
#: A worker that gathers its draft vocabulary, and has not ended a batch after this time, needs more rollouts for it.
_READ_SECONDS: Final = 20.0
#: How long a service may be away, or a worker in trouble.
_TROUBLE_SECONDS: Final = 120.0
#: Counters of the hook that tell of rollouts which were not sent.
_LOST: Final = frozenset({"dropped_full", "dropped_error", "dropped_closed", "skipped_budget", "failures"})


def warmup(
    policy: Annotated[str, typer.Argument(help="The policy that RL will train: a directory, or its name on the hub.")],
    prompts: Annotated[
        Path,
        typer.Option(
            help="The RL run's prompts: a .jsonl file with `prompt` or `messages` a line, or a text file, one a line.",
            callback=given_path,
        ),
    ],
    chat_template_kwargs: Annotated[
        str, typer.Option(help="""JSON for the chat template, as in the RL run, e.g. '{"enable_thinking": false}'.""")
    ] = "{}",
    rollouts: Annotated[int, typer.Option(min=2, help="Most answers to draw; it ends sooner once converged.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature, as in the RL run.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Answers drawn at once.")] = 16,
    aux_layers: Annotated[
        str | None, typer.Option(help="Layers whose input the drafter reads, e.g. 2,18,33. Default: EAGLE-3's three.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the policy runs: cpu, cuda, ...")] = "cpu",
    drafter: Annotated[
        Path | None,
        typer.Option(help="Directory of a drafter to begin with. Default: from scratch.", callback=given_path),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write the drafter to; start the engine with it.", callback=given_path),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' order and of the answers.")] = 0,
    service: Service = LOCAL,
    run: Annotated[str, typer.Option(help="Name that the RL run will have.")] = "default",
) -> None:
    """Train a run's first drafter on the policy's own answers, before RL begins.

    The service must be running (`draftalign up`). The RL run then goes on under the same name. DRAFTALIGN_TOKEN: token
    for the service, of scopes write and read.
    """
    with importing():
        from service.cli.drafters.answers import Sampling, send_rollouts

    if out is not None:
        require_free(out)
    template = _template_kwargs(chat_template_kwargs)
    call("GET", service, "/runs")  # before a large policy is loaded: it answers, and takes the token
    model, texts = _load(policy, device, prompts, template)
    typer.echo(f"{len(texts):,} prompts, {rollouts:,} answers at most; the page: {service}")
    hook = _attach(model, service, run, drafter, "eagle3" if aux_layers is None else layer_numbers(aux_layers))
    watch = _Watch(service, run, rollouts, typer.echo)
    try:
        sampling = Sampling(batch, max_new_tokens, temperature)
        for sent in send_rollouts(model, hook, texts, rollouts, sampling, seed=seed):
            _check_sent(hook)
            if watch.add(sent):
                break
        watch.settle()
    finally:
        hook.close()
    version = _ask(service, run_path(run))["drafter"]
    if version is None:
        raise ConfigurationError(watch.no_drafter())
    if out is not None:
        version = f"{fetch_to(out, service, run)}, written to {out}"
    typer.echo(f"run {run} begins with {version}")


class _Watch:
    """Follows what the worker does with the rollouts, and prints what is new."""

    def __init__(self, service: str, run: str, rollouts: int, say: Callable[[str], None]) -> None:
        self.said = ""
        self._service = service
        self._run = run
        self._rollouts = rollouts
        self._say = say
        self._waiting: list[str] = []  # one rollout of each batch that the worker has not ended
        self._answered = 0
        self._trained = 0  # batches of this warm-up

    def add(self, sent: Sent) -> bool:
        """Wait until few batches wait for the worker; True once it has nothing left to learn from this policy."""
        self._waiting.append(sent.rollout_id)
        self._answered += sent.rollouts
        self._wait(_BATCHES_AHEAD)
        # Before this warm-up's batches were trained on, the headroom is that of an earlier one.
        return self._report() in ("converged", "resting") and self._trained > _BATCHES_AHEAD

    def settle(self) -> None:
        """Wait until the worker is done with all of it."""
        self._wait(0)
        self._report()

    def no_drafter(self) -> str:
        """Why there is none, as the run's headline says it, and what to do."""
        return f"no drafter yet: {self.said.removesuffix('.') or 'nothing was heard of the run'}; raise --rollouts"

    def _wait(self, ahead: int) -> None:
        """Wait until at most `ahead` batches wait for the worker, or the worker needs further ones."""
        moved = time.monotonic()
        while len(self._waiting) > ahead:
            fate = _ask(self._service, f"/rollouts/{self._waiting[0]}", run=self._run)
            if fate["state"] == "dead":
                raise ConfigurationError(f"the worker refused the rollouts: {fate['reason']}")
            if fate["state"] != "queued":
                self._waiting.pop(0)
                self._trained += 1
                moved = time.monotonic()
                continue
            found = _ask(self._service, run_path(self._run))
            now = found["headline"]["text"]
            gathering = any("draft vocabulary" in text for text in (now, *found["headline"]["also"]))
            if now != self.said:
                self._tell(now)
                moved = time.monotonic()
            waited = time.monotonic() - moved
            if gathering and (ahead or waited > _READ_SECONDS):
                return  # further ones are still to be drawn
            if found["headline"]["level"] == "bad" and waited > _TROUBLE_SECONDS:
                raise ConfigurationError(f"the worker makes no progress: {now}")
            time.sleep(_POLL_SECONDS)

    def _report(self) -> str:
        """Print the run's headline if it has changed; returns the headroom's state."""
        found = _ask(self._service, "/alpha", run=self._run)
        state: str = found["headroom"]["state"]
        if found["headline"]["text"] != self.said:
            self._tell(found["headline"]["text"])
        return state

    def _tell(self, text: str) -> None:
        self.said = text
        self._say(f"{self._answered:>7,} of {self._rollouts:,} answers: {text}")


def _attach(
    model: Any, service: str, run: str, drafter: Path | None, layers: Sequence[int] | Literal["eagle3"]
) -> DrafterHook:
    """Register the run, and capture all that is sent: warm-up has no trainer that must not be slowed down."""
    from rl_hooks.errors import HookError
    from rl_hooks.hook import DrafterHook

    try:
        return DrafterHook(
            model,
            service,
            run=run,
            token=os.environ.get("DRAFTALIGN_TOKEN"),
            initial_drafter=drafter,
            aux_layers=layers,
            max_tokens_per_step=1 << 62,  # all of it is of one policy version
            queue_bytes=_QUEUE_BYTES,
        )
    except (HookError, ValueError) as error:
        raise ConfigurationError(f"the policy cannot be captured: {error}") from error


def _check_sent(hook: DrafterHook) -> None:
    """Wait until the service has the rollouts. Raises ConfigurationError, with the reason, where it lacks some."""
    flushed, found = hook.flush(_TROUBLE_SECONDS), hook.stats()
    lost = {name: count for name, count in found.items() if count and name in _LOST}
    if lost or not flushed:
        why = found["last_failure"] or found["last_error"] or "it does not answer"
        raise ConfigurationError(f"the rollouts do not reach the service ({lost or 'they wait'}): {why}")


def _template_kwargs(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f'--chat-template-kwargs must be a JSON object like {{"a": false}}, got {given!r}')
    return found


def _load(policy: str, device: str, prompts: Path, template: Mapping[str, Any]) -> tuple[Any, list[list[int]]]:
    """The policy and the prompts' tokens. The prompts are read first: a fault in them is found without the policy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl_hooks.errors import HookError
    from service.cli.drafters.answers import read_prompts

    if (
        policy.startswith(("/", "./", "../")) and not Path(policy).is_dir()
    ):  # transformers would take it for a hub's name
        raise ConfigurationError(f"the policy {policy} is no directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(policy)
    except (OSError, ValueError) as error:
        absent = "" if Path(policy).is_dir() else " (there is no such directory here)"
        raise ConfigurationError(f"the policy {policy}{absent} cannot be loaded: {error}") from error
    try:
        texts = read_prompts(prompts, tokenizer, template)
    except (HookError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    try:
        return AutoModelForCausalLM.from_pretrained(policy, dtype="auto").to(device).eval(), texts
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"the policy {policy} cannot be loaded: {error}") from error


def _ask(service: str, path: str, **query: str) -> Any:
    """The answer. A service that restarts is waited for."""
    return call("GET", service, path, timeout=60.0, patience=_TROUBLE_SECONDS, params=query).json()
