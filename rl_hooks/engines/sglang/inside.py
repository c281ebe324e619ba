"""A SGLang that follows the service by itself: its drafter is swapped between two steps, on all ranks alike.

The swap agent (`rl_hooks.agent.in_process`) is a thread of the first rank's scheduler. What it wants of the ranks goes
with SGLang's requests: the first rank adds it to those that it has just received, SGLang broadcasts them, and each rank
takes it out again before SGLang looks at them. So all ranks do it in the same turn of their loops, between two steps.

A swap is two such orders, as in vLLM. `stage` starts a thread on each rank that reads and checks the files. `apply`
loads them: the ranks first tell each other whether they can, and again whether they have; where one has not, all put
the older drafter back. Nothing is read or loaded while memory is released or a trainer's weight-update session is open.
A step under way is waited for on the device. No failure of ours reaches the scheduler.

All ranks need this plugin and the same environment: the first agreement waits for all. Written against 0.5.23;
tests/helpers/trainer/contract_fixtures.py has what it reads. GPUs: read, not run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import torch.distributed as dist
from torch import Tensor

from rl_hooks.engines.candidate import vocabulary_digest
from rl_hooks.engines.counting.counters import NO_VERSION, Snapshot
from rl_hooks.engines.protocol import EngineState
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.sglang.adapter import judged
from rl_hooks.engines.sglang.facts import FOLLOWS, drafting_of, version_number
from rl_hooks.engines.sglang.loader import (
    OWNER,
    fingerprint,
    outcome_of,
    place,
    read_drafter,
    running_d2t,
    running_drafter,
    wait_for_steps,
)
from rl_hooks.engines.sglang.memory import UPDATER, hindered
from rl_hooks.engines.sglang.rounds import COUNTER, ServedRounds
from rl_hooks.errors import EngineError, MetricsError
from rl_hooks.format import drafter
from rl_hooks.format.release import Release

log = logging.getLogger("draftalign.sglang")

SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
#: The class that runs a step with its drafts, and the one that receives requests.
WORKER: Final = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
RECEIVER: Final = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
#: After these calls of SGLang's updater the drafter may be another.
_WRITTEN: Final = (
    *("end_weight_update", "update_weights_from_disk", "update_weights_from_ipc", "resume_memory_occupation"),
)
#: How often to look whether all ranks have read; each question to the others doubles it, up to the second.
_POLL_SECONDS: Final = 0.02
_MAX_POLL_SECONDS: Final = 1.0
_STAGE_TIMEOUT_SECONDS: Final = 600.0
_FOLLOWING: Final = "following the service at all"
#: What a server that ends waits for the last report. SGLang kills its schedulers after 15 s.
_END_SECONDS: Final = 3.5

Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """What all ranks are to do with one version: read it, or (`apply`) load what they have read."""

    version: str
    path: str
    sha256s: dict[str, str]
    apply: bool = False


@dataclass(slots=True)
class ReadDrafter:
    """A candidate that is being read: a thread fills it in."""

    order: SwapOrder
    weights: dict[str, Tensor] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


class RankDrafter:
    """The drafter of one rank. Its methods run on the scheduler's thread, those that exchange outcomes on all ranks."""

    def __init__(self, worker: Any, ranks: LayerRanks) -> None:
        ((_, runner),) = worker.weight_update_runners()
        self._runner, self._ranks = runner, ranks
        self.version: str | None = None
        self.sha256: str | None = None
        self.swaps = 0
        #: Whether the weights are still those that were loaded last.
        self.loaded = True
        self._marks = fingerprint(runner.model)
        self.staged: ReadDrafter | None = None
        #: What does not change while the server lives, as fields of `EngineState`.
        self.facts = _facts(worker, runner.model)

    @property
    def model(self) -> Any:
        """SGLang's draft model."""
        return self._runner.model

    def stage(self, order: SwapOrder, manager: Any) -> list[Outcome]:
        """Begin to read and check; returns why not, where nothing may be loaded now. It replaces an earlier one."""
        self.staged = None
        if (why := hindered(manager)) is not None:  # each try would read the whole drafter for nothing
            return [_not_now(why)]
        self.staged = ReadDrafter(order)
        threading.Thread(target=self._read, args=(self.staged,), name="draftalign-stage", daemon=True).start()
        return []

    def _read(self, staged: ReadDrafter) -> None:
        def read() -> Outcome:
            order = staged.order
            staged.weights, sha256 = read_drafter(self.model, Path(order.path), order.sha256s)
            return {"sha256": sha256}

        staged.outcome = outcome_of(read)
        staged.done.set()

    def apply(self, version: str, manager: Any) -> list[Outcome]:
        """Load what is staged on all ranks, or on none; returns what became of it on each.

        What is refused is dropped; while a rank still reads, all keep what they have.
        """
        said = self._tell(outcome_of(lambda: self._readiness(version, manager)))
        if not all(one["ok"] for one in said) or len({one["sha256"] for one in said}) > 1:
            if not any(one.get("reading") for one in said):
                self.staged = None
            return said
        assert self.staged is not None  # noqa: S101 - it is ready
        began, staged, self.staged = time.perf_counter(), self.staged, None
        put_back: list[Callable[[], None]] = []
        said = self._tell(outcome_of(lambda: self._load(staged, put_back)))
        taken = all(one["ok"] for one in said)
        whole = outcome_of(lambda: self._end(() if taken else put_back))["ok"]
        self.loaded = whole and (taken or self.loaded)
        if taken:
            self.version, self.sha256, self.swaps = version, staged.outcome["sha256"], self.swaps + 1
            log.info("draftalign: drafter %s in %.4f s", version, time.perf_counter() - began)
        COUNTER.drafter_changed()
        return said

    def look(self) -> None:
        """Note whether the weights are still those that were loaded last. They must be in their memory."""
        if self.loaded and fingerprint(self.model) != self._marks:
            log.warning(
                "draftalign: the weights of drafter %s are lost, or another client's", self.version or "at start"
            )
            self.loaded = False

    def _readiness(self, version: str, manager: Any) -> Outcome:
        staged = self.staged
        if staged is None or staged.order.version != version:
            return _not_now(f"{version} is not staged on this rank; it is asked again")
        if not staged.done.is_set():
            return {"ok": False, "reading": True}
        if not staged.outcome["ok"]:
            return staged.outcome
        why = hindered(manager)
        return staged.outcome if why is None else _not_now(why)

    def _load(self, staged: ReadDrafter, put_back: list[Callable[[], None]]) -> Outcome:
        updater = self._runner.weight_updater
        wait_for_steps(self.model)  # with overlapping schedules a step may still run
        updater.begin_weight_update()

        def load(weights: list[tuple[str, Tensor]]) -> None:
            for one in weights:  # SGLang first copies all of a call to the device
                done, message = updater.update_weights_from_tensor(named_tensors=[one])
                if not done:
                    _fail(message)

        put_back.append(place(self.model, staged.weights, load))
        return {"sha256": staged.outcome["sha256"]}

    def _end(self, put_back: Sequence[Callable[[], None]]) -> Outcome:
        for put in put_back:
            put()
        self._runner.weight_updater.end_weight_update(run_post_load=False)
        wait_for_steps(self.model)
        self._marks = fingerprint(self.model)
        return {}

    def _tell(self, outcome: Outcome) -> list[Outcome]:
        """The outcomes of all ranks."""
        if self._ranks.group is None:
            return [outcome]
        said: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(said, outcome, group=self._ranks.group.cpu_group)
        return said


def _not_now(text: str) -> Outcome:
    return {"ok": False, "failed": text}


def _fail(text: str) -> NoReturn:
    raise RuntimeError(text)


class EngineAgent(Protocol):
    """The agent in this process, as its server starts and ends it."""

    def start(self, link: SchedulerLink) -> None:
        """The server is about to run its first step."""

    def stop(self) -> None:
        """The server ends."""

    def join(self, timeout_seconds: float) -> None:
        """Wait for its end."""


class SchedulerLink:
    """The drafter of a server, on each of its ranks: hooks of SGLang's, and on the first rank what its agent needs.

    `numbered`: the version of the policy's weights where a tap numbers them. `tell`: hands the tap the newest version
    that the service knows. `has_begun`: whether the tap has begun to send, or never will.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        agent: Callable[[], EngineAgent],
        numbered: Callable[[], int | None] = lambda: None,
        tell: Callable[[int | None], None] = lambda _: None,
        has_begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings, self._make_agent = settings, agent
        self._numbered, self._tell, self._has_begun = numbered, tell, has_begun
        self.rank: RankDrafter | None = None  # None: this server does not follow
        self._agent: EngineAgent | None = None  # on the first rank
        self._orders: deque[tuple[SwapOrder, Future[list[Outcome]]]] = deque()
        self._sent: deque[Future[list[Outcome]]] = deque()
        self._joining: Future[None] | None = None
        self._touched = False
        self._said: set[str] = set()  # what has failed, as the log says once

    # --- hooks
    def made(self, _: Any, worker: Any, *__: Any, **___: Any) -> None:
        """SGLang has loaded policy and drafter. All ranks follow, or none: also where the agent cannot be made."""
        try:
            ranks = LayerRanks(tp_group())
            with ranks.together():
                if found := [*unknown_ways(worker.server_args), *quantized(worker)]:
                    _fail(f"not with {', '.join(found)}")
                rank = RankDrafter(worker, ranks)
                agent = self._make_agent() if ranks.first else None
        except Exception as error:  # noqa: BLE001 - the server must go on
            self._said.add(_FOLLOWING)
            log.error("draftalign: this server does not follow the service: %s", error)
            return
        self.rank, self._agent = rank, agent
        OWNER.refusal = f"this server follows run {self._settings.run!r} by itself (DRAFTALIGN_URL): end this agent"
        if agent is not None:
            COUNTER.served = ServedRounds(self.law, max(worker.speculative_num_draft_tokens - 1, 0))

    def workers_made(self, *_: Any, **__: Any) -> None:
        """SGLang has made its workers: where none of them was one that can follow, the log says so."""
        if self.rank is None and _FOLLOWING not in self._said:
            self._said.add(_FOLLOWING)
            log.warning(
                "draftalign: DRAFTALIGN_URL is set, and this server does not follow the service: it does not speculate "
                "with EAGLE-3 in SGLang's EAGLEWorkerV2"
            )

    def started(self, *_: Any, **__: Any) -> None:
        """The scheduler is about to run its loop."""
        if self._agent is not None:
            self._guarded("starting the agent", self._agent.start, self)

    def ended(self, *_: Any, **__: Any) -> None:
        """The scheduler's loop has ended: the last counts are reported."""
        if self._agent is not None:
            self._guarded("ending", self._agent.stop)
            self._guarded("ending", self._agent.join, _END_SECONDS)

    def pulled(self, requests: list[Any] | None, *_: Any, **__: Any) -> None:
        """The first rank has received requests: what the agent wants goes with them."""
        while self._orders and requests is not None:
            order, future = self._orders.popleft()
            if future.set_running_or_notify_cancel():
                requests.append(order)
                self._sent.append(future)

    def received(self, scheduler: Any, requests: list[Any], *_: Any, **__: Any) -> None:
        """All ranks have received the same requests."""
        if self._agent is not None and (self._touched or self._joining is not None):
            # First: after a swap that fails, what another has written would be taken for what was there.
            self._guarded("looking at the drafter", self._turn, scheduler)
        if ours := [one for one in requests if isinstance(one, SwapOrder)]:
            requests[:] = [one for one in requests if not isinstance(one, SwapOrder)]
        for order in ours:
            self._do(order, scheduler)

    def written(self, *_: Any, **__: Any) -> None:
        """Weights may have been written, or are back in their memory."""
        self._touched = True

    def described(self, answer: Any, *_: Any, **__: Any) -> None:
        """SGLang's scheduler has said how it stands: an agent beside the server reads there that it must not swap."""
        if OWNER.refusal is not None:
            self._guarded("saying so", lambda: answer.internal_state.update({FOLLOWS: OWNER.refusal}))

    # --- own
    def _guarded(self, what: str, call: Callable[..., object], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # an exception here would end the scheduler
            log.exception("draftalign: %s failed; the server goes on", what)

    def _do(self, order: SwapOrder, scheduler: Any) -> None:
        said: list[Outcome] = []
        failure: Exception | None = None
        try:
            manager = scheduler.weight_updater
            if self.rank is None:
                _fail("this rank has no drafter that can be swapped")
            elif order.apply:
                said = self.rank.apply(order.version, manager)
            else:
                said = self.rank.stage(order, manager)
        except Exception as error:
            log.exception("draftalign: a swap failed; the server goes on")
            failure = error
        if not self._sent:  # another rank
            return
        future = self._sent.popleft()
        if failure is None:
            future.set_result(said)
        else:
            future.set_exception(failure)

    def _turn(self, scheduler: Any) -> None:
        if self._touched and hindered(scheduler.weight_updater) is None and self.rank is not None:
            self._touched = False
            self.rank.look()
        if self._joining is not None and self._has_begun():
            joining, self._joining = self._joining, None
            if joining.set_running_or_notify_cancel():
                joining.set_result(None)

    # --- the agent's, in its thread
    def law(self) -> tuple[str | None, int | None]:
        """The drafter and the policy version that serve now; `NO_VERSION` for a drafter that is lost. Any thread."""
        rank, number = self.rank, self._numbered()
        assert rank is not None  # noqa: S101 - it follows
        if number is None:
            number = version_number(weight_version())
        return rank.version if rank.loaded else NO_VERSION, number

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        """Call `act`; returns whether it worked. It is tried again: each kind of failure is logged once per `what`."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as everywhere
            if (kind := f"{what}: {type(error).__name__}") not in self._said:
                self._said.add(kind)
                log.warning("draftalign: %s failed; the server goes on without: %r", what, error)
            return False
        return True

    def join(self, _: ServiceSettings, newest: int | None) -> Future[None]:
        """The service has answered: `newest` is the run's policy version; None for a new run, which a tap registers."""
        self._tell(newest)
        joined: Future[None] = Future()
        if newest is None:
            self._joining = joined
        else:
            joined.set_result(None)
        return joined

    def ask(self, order: SwapOrder) -> Future[list[Outcome]]:
        """Have all ranks do it between two steps; returns what became of it on each."""
        future: Future[list[Outcome]] = Future()
        self._orders.append((order, future))
        return future

    def state(self) -> EngineState:
        """What is loaded now."""
        rank = self.rank
        assert rank is not None  # noqa: S101 - it follows
        return EngineState(
            rank.version, rank.loaded, rank.swaps, policy_version=self.law()[1], sha256=rank.sha256, **rank.facts
        )


class SchedulerEngine:
    """A server as the agent in it uses it: `Engine` without HTTP."""

    def __init__(self, url: str, served: SchedulerLink) -> None:
        self.url, self._served = url, served

    async def state(self) -> EngineState:
        """What is loaded now."""
        return self._served.state()

    async def swap(self, release: Release) -> str | None:
        """Swap between two steps, of all ranks alike; returns the SHA-256 of what they read."""
        order = SwapOrder(release.version, str(release.path), dict(release.sha256s))
        apply, deadline = replace(order, apply=True), time.monotonic() + _STAGE_TIMEOUT_SECONDS
        if said := await self._ask(order):
            return judged("this server", release, said, len(said))
        seconds = _POLL_SECONDS
        while True:
            rank = self._served.rank
            staged = None if rank is None else rank.staged
            if staged is None or staged.done.is_set():
                said = await self._ask(apply)
                if not any(one.get("reading") for one in said):
                    return judged("this server", release, said, len(said))
                seconds = min(2 * seconds, _MAX_POLL_SECONDS)  # each question stops the schedulers of all ranks
            if time.monotonic() > deadline:
                raise EngineError(f"reading {release.version} took over {_STAGE_TIMEOUT_SECONDS:.0f} s")
            await asyncio.sleep(seconds)

    async def _ask(self, order: SwapOrder) -> list[Outcome]:
        try:
            return await asyncio.wrap_future(self._served.ask(order))
        except Exception as error:
            raise EngineError(f"{order.version}: {error!r}") from error

    async def snapshot(self) -> Snapshot:
        """Its rounds by drafter and policy version."""
        if COUNTER.served is None or COUNTER.failed:
            raise MetricsError("the counting of rounds in this server has ended by a fault; its log says which")
        return COUNTER.served.books.read(self._served.law()[1])


def _facts(worker: Any, model: Any) -> dict[str, Any]:
    """What does not change while the server lives, as fields of `EngineState`."""
    args = worker.server_args
    facts: dict[str, Any] = {
        "depth": worker.speculative_num_steps,
        "drafting": drafting_of(getattr(args, "speculative_use_rejection_sampling", None), worker.topk),
        "verifies": True,
    }
    outcome = outcome_of(lambda: _vocabulary(model))
    if not outcome["ok"]:  # the swap will be refused, with this reason
        log.warning("draftalign: this server's drafter cannot be swapped: %s", outcome["refused"] or outcome["failed"])
        return facts
    return {**facts, **outcome["facts"]}


def _vocabulary(model: Any) -> dict[str, Any]:
    running = running_drafter(model)
    digest = vocabulary_digest(running_d2t(model, running), running.vocab_size)
    named = drafter.fingerprint(running, digest)
    return {"facts": {"d2t_sha256": digest, "config_fingerprint": named, "aux_layers": running.aux_layers}}


def unknown_ways(args: Any) -> list[str]:
    """Ways to run SGLang with which neither swaps nor features were tried."""
    facts = {
        f"speculation by {args.speculative_algorithm} (only by EAGLE3)": args.speculative_algorithm != "EAGLE3",
        "pipeline parallelism (--pp-size)": args.pp_size > 1,
        "data parallelism (--dp-size, --attn-dp-size)": max(args.dp_size, getattr(args, "attn_dp_size", 1)) > 1,
        "context parallelism (--attn-cp-size)": getattr(args, "attn_cp_size", 1) > 1,
        "weights that come after the start (--startup-weight-load-mode overlap)": (
            getattr(args, "startup_weight_load_mode", "serial") == "overlap"
        ),
        "drafts whose number changes (--speculative-adaptive)": bool(getattr(args, "speculative_adaptive", False)),
        "prefill and decode in two servers (--disaggregation-mode)": args.disaggregation_mode != "null",
    }
    return [name for name, there in facts.items() if there]


def quantized(worker: Any) -> list[str]:
    """How SGLang has quantized the drafter, by default as the policy: it cannot load what is published into that."""
    option = "--speculative-draft-model-quantization"
    method = getattr(worker.server_args, "speculative_draft_model_quantization", None)
    if method not in (None, "unquant"):
        return [f"a quantized drafter ({option} {method})"]
    ((_, runner),) = worker.weight_update_runners()
    for name, module in runner.model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            return [f"a quantized drafter ({type(method).__name__} in {name}; {option} unquant leaves it as it is)"]
    return []


def tp_group() -> Any:
    """SGLang's group of tensor-parallel ranks."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


def weight_version() -> str | None:
    """SGLang's weight version."""
    from sglang.srt.runtime_context import get_serving

    version = get_serving().weight_version
    return None if version is None else str(version)


def register(registry: Any, kinds: Any, served: SchedulerLink) -> None:
    """Put the hooks on SGLang's classes; before those of the tap, which numbers a step's weights first."""
    registry.register(f"{WORKER}.__init__", served.made, kinds.AFTER)
    registry.register(f"{WORKER}.forward_batch_generation", COUNTER.launched, kinds.BEFORE)
    registry.register(f"{SCHEDULER}.init_model_worker", served.workers_made, kinds.AFTER)
    registry.register(f"{SCHEDULER}.run_event_loop", served.started, kinds.BEFORE)
    registry.register(f"{SCHEDULER}.run_event_loop", served.ended, kinds.AFTER)
    registry.register(f"{RECEIVER}._pull_raw_reqs", served.pulled, kinds.AFTER)
    registry.register(f"{SCHEDULER}.process_input_requests", served.received, kinds.BEFORE)
    registry.register(f"{SCHEDULER}.get_internal_state", served.described, kinds.AFTER)
    for method in _WRITTEN:
        registry.register(f"{UPDATER}.{method}", served.written, kinds.AFTER)
