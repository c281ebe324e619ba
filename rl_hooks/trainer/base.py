"""The common parts of the hooks: their options, what each owns, and the guard that keeps failures out of the step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, TypedDict, TypeVar

from rl_hooks import wire
from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.sending.features import FeatureDtype, checked_dtype
from rl_hooks.sending.registration import RunRegistration
from rl_hooks.sending.sender import QUEUE_BYTES, RolloutSender
from rl_hooks.sending.tally import Tally, kind_of
from rl_hooks.trainer.plan import RolloutChoice, RolloutIds, checked_version
from rl_hooks.trainer.session import Session, rank_warning

#: Names of a hook's counters.
COUNTERS: Final = (
    *("captured_rollouts", "captured_tokens", "skipped_empty", "skipped_sampling", "skipped_budget", "cut_long"),
    *("head_updates", "failures"),
)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOptions:
    """Options of both hooks, by keyword. docs/reference/settings.md explains each."""

    run: str = "default"
    token: str | None = field(default=None, repr=False)  # of scope write; None: DRAFTALIGN_TOKEN of the environment
    aux_layers: Sequence[int] | Literal["eagle3"] = "eagle3"
    initial_drafter: Path | str | None = None
    draft_vocab_size: int | None = None
    policy_version: int = 0
    #: These two bound the tokens that each rank sends of a policy version.
    sample_fraction: float = 1.0
    max_tokens_per_step: int = 65_536
    #: How the auxiliary states are sent: "float8_e4m3" halves them, with one scale per token and layer.
    dtype: FeatureDtype = "bfloat16"
    #: The relative change of `lm_head` after which it is sent again.
    head_tolerance: float = 0.005
    #: Rank and number of the processes that see different rollouts. Rank 0 registers the run; the others wait for that.
    rank: int = 0
    world_size: int = 1
    queue_bytes: int = QUEUE_BYTES
    timeout_seconds: float = 30.0
    patience_seconds: float = 120.0
    #: Called at each capture. Returns the drafter version that drafted these rollouts; replay α is measured with it.
    drafter_version: Callable[[], str] | None = None
    #: How a model that this package does not know changes its logits after lm_head.
    logit_map: wire.LogitMap | None = None
    #: Raise failures instead of counting them: for tests.
    strict: bool = False

    def __post_init__(self) -> None:
        if not wire.RUN_NAME.fullmatch(self.run):
            raise ValueError(
                f"run: {self.run!r} is no run's name: 1 to 64 of A-Z a-z 0-9 . _ - after a letter or digit"
            )
        object.__setattr__(self, "policy_version", checked_version(self.policy_version))  # any kind of integer
        checked_dtype(self.dtype)


class AttachKeywords(TypedDict, total=False):
    """Names and types of the options of every `attach`: `HookOptions` without those that the trainer itself knows."""

    run: str
    token: str | None
    aux_layers: Sequence[int] | Literal["eagle3"]
    initial_drafter: Path | str | None
    draft_vocab_size: int | None
    sample_fraction: float
    max_tokens_per_step: int
    dtype: FeatureDtype
    head_tolerance: float
    queue_bytes: int
    timeout_seconds: float
    patience_seconds: float
    drafter_version: Callable[[], str] | None
    logit_map: wire.LogitMap | None
    strict: bool


class HookKeywords(AttachKeywords, total=False):
    """The names and types of `HookOptions`, by which editors and type checkers check a call with `**`."""

    policy_version: int
    rank: int
    world_size: int


#: How long the end of a `with` block waits after an error.
_AFTER_ERROR_SECONDS: Final = 5.0


class Closing:
    """Closed at the end of its `with` block; after an error within seconds, so that the error is seen soon."""

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Close. Returns False if requests were left that were not sent in time."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(None if raised[0] is None else _AFTER_ERROR_SECONDS)


class TrainerHook(Closing):
    """A hook's counters, sender and session."""

    def __init__(self, url: str, options: HookOptions, *, asks: bool, waits_for_run: bool) -> None:
        """`asks`: this rank asks the service how the run stands.

        `waits_for_run`: the run may be registered only later, by another rank or in a forward, so 404 is retried.
        """
        #: Counters, and the newest failure.
        self.tally = Tally(logging.getLogger("rl_hooks"), *COUNTERS)
        #: Runs our own work, times it, and keeps its failures from the trainer.
        self.guard = TrainerGuard(self.tally, strict=options.strict)
        #: Names rollouts.
        self.ids = RolloutIds(options.rank)
        self.sender = RolloutSender(
            url,
            run=options.run,
            token=options.token,
            queue_bytes=options.queue_bytes,
            timeout_seconds=options.timeout_seconds,
            patience_seconds=options.patience_seconds,
            retry_statuses=frozenset({404}) if waits_for_run else frozenset(),
            asks=asks,
        )
        #: By which the service knows this start of the trainer from others.
        self.session = Session(options.run, options.rank, options.world_size)
        if told := self.guard(rank_warning, options.rank, options.world_size):
            self.tally.warn("ranks", told)
        self._options = options
        self._choice = RolloutChoice(options.sample_fraction, options.max_tokens_per_step, self.tally)

    def _registration(self, model: Any, aux_layers: Sequence[int], logit_map: wire.LogitMap | None) -> RunRegistration:
        options = self._options
        registration = RunRegistration(
            model,
            aux_layers=aux_layers,
            policy_version=options.policy_version,
            draft_vocab_size=options.draft_vocab_size,
            initial_drafter=options.initial_drafter,
            logit_map=logit_map,
            registers=not options.rank,  # no other node needs the drafter's folder
        )
        registration.metadata |= self.session.of_run()
        return registration

    def stats(self) -> dict[str, Any]:
        """Counters of the hook and of its sender, and how the run stands (`run_stands`; rank 0 asks the service)."""
        own = {**self.tally.counts(), "last_failure": self.tally.last_error}
        return own | self.sender.stats() | {"run_stands": self.sender.standing()}

    def metrics(self) -> dict[str, float]:
        """Numbers for the trainer's own log, `draftalign/...`: `wandb.log(hook.metrics())`. It waits for nothing.

        Numbers of the service that are older than a minute, or that it does not know, are left out.
        """
        return self.sender.metrics()

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything captured was sent or dropped. Returns False if the time was over first.

        None: as long as files arrive, at most `patience_seconds` for the next one, and 300 s in all.
        """
        return self.sender.flush(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Capture nothing more, send what is queued as `flush` does, drop the rest. False if something was dropped."""
        return self.sender.close(timeout_seconds)


class TrainerGuard:
    """Runs our own work inside a training step. `seconds`: the wall time that all of it has taken."""

    def __init__(self, tally: Tally, *, strict: bool) -> None:
        self.seconds = 0.0
        self._tally = tally
        self._strict = strict

    def __call__(self, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result | None:
        """Do `work` and return its result. A failure is counted and logged, and returns None; `strict` raises it."""
        started = time.perf_counter()
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self._tally.add("failures")
            if self._strict:
                raise
            text = f"rollouts were not captured: {type(error).__name__}: {error}"
            self._tally.note(kind_of(text), text)
            return None
        finally:
            self.seconds += time.perf_counter() - started


def captured(hook: Any, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> AbstractContextManager[object]:
    """`hook.capture` with the arguments that `ask` returns; nothing without a hook or if `ask` fails or gives None."""
    told = None if hook is None else hook.guard(ask, *args, **kwargs)
    return nullcontext() if told is None else hook.capture(**told)


def left_out_for_images(tally: Tally) -> None:
    """Log once that rollouts with images are not sent."""
    tally.warn("images", "rollouts with images are left out: a drafter cannot embed them")


def one_temperature(said: Iterable[float]) -> float:
    """The one temperature of a micro-batch's rollouts; 1 without rollouts. UnsupportedTrainerError: several."""
    found = sorted(set(said))
    if len(found) > 1:
        raise UnsupportedTrainerError(f"rollouts of several temperatures in one micro-batch: {found}")
    return found[0] if found else 1.0
