"""The part of the vLLM plugin inside the engine core: what runs between two steps, for `LLM`, `AsyncLLM` and servers.

`hook` wraps methods of vLLM's EngineCore, once per process. Before a step the wrapper looks at one flag and one clock.
If there is work, it is done there, because only the engine's own thread may call vLLM's workers:

* weights may have changed (any RPC, a wake-up, vLLM's weight version, every ten seconds): one RPC restores a drafter
  that a sleep has lost, and finds the policy's version;
* calls of the thread that follows the service: one of them is the swap.

The weights are also looked at once when the engine core has loaded its model. So an update before the first step is
noticed, and the draft vocabulary is on the host before the first sleep.

After a step that leaves no request unfinished, the tap is told which have ended: no further step may ever say so. When
the engine ends, what was collected is sent. An engine core in this process is told its end by the client that holds it,
because vLLM up to 0.30 does not shut it down.

A swap never falls between two calls of a trainer that updates weights: it runs only when a step is about to run, and
never inside vLLM's own weight update. No failure of ours reaches the engine: it is logged.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Final

from rl_hooks.engines.counting.counters import NO_VERSION, Snapshot
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.tap.feature_tap import MAX_TOKENS
from rl_hooks.engines.vllm import KNOWN_RELEASES
from rl_hooks.engines.vllm.rounds import RoundCounter
from rl_hooks.engines.vllm.steps import leaves_out_truncated, sampling_of, unlike_policy
from rl_hooks.engines.vllm.swapper import answered, joint_state
from rl_hooks.sending.sampling import sampling_position

log = logging.getLogger("vllm.draftalign")

_LOOK_SECONDS: Final = 10.0
#: What an engine that ends may take for us. vLLM kills a core that has not ended in five seconds.
_END_SECONDS: Final = 3.5
#: Where vLLM would not wait at all for a core to end, it waits so long.
_LEAST_SECONDS: Final = 5.0
#: Calls that read files and do not touch weights: they may also run while the engine is idle or asleep.
_HARMLESS: Final = frozenset({"draftalign_stage", "draftalign_staged"})
#: vLLM's weight version before anybody has set one.
_UNNAMED: Final = "default"

#: Methods of vLLM's EngineCore that are wrapped.
_WRAPPED: Final = (
    *("step", "step_with_batch_queue", "add_request", "sleep", "shutdown", "collective_rpc", "wake_up"),
    *("set_weight_version", "_initialize_kv_caches", "post_step"),
)

Begin = Callable[["CoreLink"], None]


class CoreLink:
    """One engine core, as the thread that follows the service sees it. `sample_fraction`: of requests to be tapped.

    `begin` starts that thread, `stop` tells it that the engine ends, and `join` waits for it, these seconds at most.
    """

    def __init__(
        self,
        core: Any,
        sample_fraction: float,
        begin: Begin,
        stop: Callable[[], None],
        join: Callable[[float], None],
    ) -> None:
        self.core, self.sample_fraction = core, sample_fraction
        self._pid = os.getpid()
        self._ends: tuple[Callable[[], None], Callable[[float], None]] | None = stop, join
        #: The joint state of the workers; empty until they were looked at.
        self.state: dict[str, Any] = {}
        self._begin: Begin | None = begin
        self._rounds: RoundCounter | None = None
        self._touched = True
        #: Whether a request that is tapped has come since the engine last had none.
        self._tapping = False
        self._look_at = 0.0
        self._calls: deque[tuple[str, tuple[Any, ...], Future[list[Any]]]] = deque()
        self._warned: set[str] = set()

    # --- called on the engine's thread
    def first_look(self) -> None:
        """Watch the weights from now on, where they are in memory. Nothing is asked of the service yet."""
        if not getattr(self.core.model_executor, "is_sleeping", False):
            self.guard("looking at the weights", self.look)

    def admit(self, request: Any) -> None:
        """Let a request that will be tapped compute its whole prompt: rows from the prefix cache would be missing."""
        begun = self._begin is None  # before that it is not known whether there will be a tap
        if (begun and self.state.get("tap") is None) or getattr(self.core.scheduler, "connector", None) is not None:
            return  # a KV connector's tokens come without rows, whatever the prefix cache does
        if sampling_position(request.request_id, "tap") >= self.sample_fraction:
            return
        if unlike_policy(request) or len(request.prompt_token_ids) > MAX_TOKENS:  # not tapped
            return
        if sampling_of(request.sampling_params).truncated and leaves_out_truncated(self.core.vllm_config):
            return
        request.skip_reading_prefix_cache = True
        self._tapping = True

    def before_step(self) -> None:
        """Do what there is to do between two steps."""
        now = time.monotonic()
        if not (self._touched or self._calls or now >= self._look_at):
            return
        if getattr(self.core.model_executor, "is_sleeping", False):  # a step without requests; no weights are there
            return
        if self._touched or now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self.guard("looking at the weights", self.settle)
        while self._calls:
            self._run(*self._calls.popleft())

    def after_step(self) -> None:
        """Tell the tap which requests have ended, where no other is left: the next step may be far away."""
        if not self._tapping or self.core.scheduler.has_unfinished_requests():
            return
        if getattr(self.core.model_executor, "is_sleeping", False):
            return
        self._tapping = False
        if self.state.get("tap") is not None:
            self._rpc("draftalign_rest", sorted(self.core.scheduler.finished_req_ids))

    def look(self) -> None:
        """Bring state and policy version up to date. The weights must be readable."""
        self._touched = False
        self._take(self._rpc("draftalign_settle", self._named()))
        self._watch_the_worker()

    def settle(self) -> None:
        """`look`; the first time, begin to follow as well: a step is about to run, so the weights are there."""
        self.look()
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self.guard("counting rounds", self._count)
            begin(self)

    def close(self) -> None:
        """The engine ends: send and report what there is, for `_END_SECONDS` at most. A second call does nothing.

        Nor does one in a forked child of a trainer that holds the engine: the engine goes on in the parent.
        """
        if self._ends is None or os.getpid() != self._pid:
            return
        (stop, join), self._ends = self._ends, None
        began = time.monotonic()
        stop()  # the last counts are reported while the workers send
        try:
            if self.state:
                answered(self.core.model_executor.collective_rpc("draftalign_end", _END_SECONDS))
        finally:
            join(max(0.0, began + _END_SECONDS - time.monotonic()))

    def touch(self) -> None:
        """Weights may have changed. Any thread."""
        self._touched = True

    def follow(self, settings: dict[str, Any], newest: int | None) -> None:
        """Start tap and policy versions; `newest`: the version that the service knows, None for a new run."""
        self._take(self._rpc("draftalign_follow", settings, self._named(), newest))

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        """Call `act`; returns whether it worked. Each kind of failure is logged once per `what`."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            if (kind := f"{what}: {type(error).__name__}") not in self._warned:
                self._warned.add(kind)
                log.warning("draftalign: %s failed; the engine goes on without: %r", what, error)
            return False
        return True

    def drain_harmless(self) -> None:
        """Run the calls that touch no weights, the engine being idle."""
        kept = deque[tuple[str, tuple[Any, ...], Future[list[Any]]]]()
        while self._calls:
            call = self._calls.popleft()
            if call[0] in _HARMLESS:
                self._run(*call)
            else:
                kept.append(call)
        self._calls.extendleft(reversed(kept))

    # --- called in the following thread
    def call(self, method: str, *args: Any) -> Future[list[Any]]:
        """Call a method of every worker between two steps; a `_HARMLESS` one also while the engine is idle."""
        future: Future[list[Any]] = Future()
        if method in _HARMLESS and self._in_this_process():
            self._run(method, args, future)
            return future
        self._calls.append((method, args, future))
        queue, callbacks = (getattr(self.core, name, None) for name in ("input_queue", "_idle_state_callbacks"))
        if method in _HARMLESS and queue is not None and callbacks is not None:
            from vllm.v1.engine import EngineCoreRequestType

            callbacks.append(lambda _: self.drain_harmless())
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        return future

    def join(self, settings: ServiceSettings, newest: int | None) -> Future[list[Any]]:
        """Start tap and policy versions between two steps; `newest`: as for `follow`."""
        return self.call("draftalign_follow", asdict(settings), newest)

    def snapshot(self) -> Snapshot | None:
        """Rounds so far, by drafter and policy version; None where this vLLM's scheduler is unknown."""
        return None if self._rounds is None or self._rounds.failed else self._rounds.read()

    # --- own
    def _run(self, method: str, args: tuple[Any, ...], future: Future[list[Any]]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        result: list[Any] = []
        failure: Exception | None = None
        try:
            if method == "draftalign_follow":
                self.follow(*args)
            else:
                result = self._rpc(method, *args)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            failure = error
        # After a failure as well: a swap that failed half-way may have left another drafter.
        if method == "draftalign_apply" and not self.guard("looking at a swapped drafter", self.look):
            self.touch()
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return answered(self.core.model_executor.collective_rpc(method, args=args))

    def _take(self, states: list[dict[str, Any]]) -> None:
        self.state = joint_state(states)
        self._serve()

    def _count(self) -> None:
        self._rounds = RoundCounter(self.core.scheduler)
        self._serve()

    def _serve(self) -> None:
        if self._rounds is not None:
            drafter = self.state["version"] if self.state["loaded"] else NO_VERSION
            self._rounds.serve(drafter, self.state["policy_version"])

    def _named(self) -> str | None:
        named = getattr(self.core, "_weight_version", None)
        return None if named == _UNNAMED else named

    def _in_this_process(self) -> bool:
        return (
            hasattr(self.core.model_executor, "driver_worker") and self.core.vllm_config.parallel_config.world_size == 1
        )

    def _watch_the_worker(self) -> None:
        # TRL loads weights into the model object itself, past every call of the engine core.
        if self._in_this_process():
            worker = self.core.model_executor.driver_worker
            worker = getattr(worker, "worker", None) or worker
            worker._draftalign_swap.watch.noticed = self.touch


def hook(link_of: Callable[[Any], CoreLink | None]) -> None:
    """Wrap vLLM's EngineCore, once per process. `link_of` makes a core's link when it has loaded its model.

    Not after `__init__`: a process of its own loads its plugins in there.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient

    if hasattr(EngineCore, "_draftalign"):
        return
    EngineCore._draftalign = None

    def linked(core: Any, *_: Any, **__: Any) -> CoreLink | None:
        if "_draftalign" not in vars(core):
            core._draftalign = None
            try:
                core._draftalign = link = link_of(core)
                if link is not None:
                    if missing := unknown_names(core):
                        names = ", ".join(missing)
                        log.warning("draftalign: this vLLM has no %s; the plugin knows %s", names, KNOWN_RELEASES)
                    link.first_look()
            except Exception as error:  # noqa: BLE001 - the engine must not feel this
                log.warning("draftalign: this engine does not follow a service: %s", error)
        found: CoreLink | None = core._draftalign
        return found

    def linked_if_made(core: Any, *_: Any, **__: Any) -> CoreLink | None:
        # vLLM's own `__init__` makes some of these calls while it sizes its cache, before the workers are ready.
        return linked(core) if hasattr(core, "scheduler") else None

    def step(core: Any, *_: Any, **__: Any) -> None:
        if (link := linked(core)) is not None:
            link.before_step()

    def add_request(core: Any, request: Any, *_: Any, **__: Any) -> None:
        if (link := linked(core)) is not None:
            link.admit(request)

    def post_step(core: Any) -> None:
        if (link := vars(core).get("_draftalign")) is not None:
            link.guard("sending the last requests", link.after_step)

    def shutdown(core: Any, *_: Any, **__: Any) -> None:
        if (link := vars(core).get("_draftalign")) is not None:
            link.guard("ending", link.close)

    def made(client: Any) -> None:  # when it is collected, or Python ends, so does its core
        weakref.finalize(client, shutdown, client.engine_core)

    def touch(core: Any, *_: Any) -> None:
        if (link := linked_if_made(core)) is not None:
            link.touch()

    for name, before in (("step", step), ("step_with_batch_queue", step), ("add_request", add_request)):
        _wrap(EngineCore, name, before=before)
    _wrap(EngineCore, "_initialize_kv_caches", done=linked)
    _wrap(EngineCore, "post_step", done=post_step)
    _wrap(EngineCore, "shutdown", before=shutdown)
    _wrap(InprocClient, "__init__", done=made)
    for name in ("sleep", "collective_rpc", "wake_up", "set_weight_version"):
        _wrap(EngineCore, name, before=linked_if_made, after=touch)


def wait_for_cores() -> None:
    """Let vLLM wait some seconds for engine cores that end, where it would kill them in the instant that it tells them.

    That is `vllm serve` without `--shutdown-timeout`. A core that ends sooner is not waited for any longer.
    """
    import vllm.v1.engine.utils as utils

    original = utils.shutdown
    if hasattr(original, "_draftalign"):
        return

    @functools.wraps(original)
    def shutdown(procs: Any, timeout: float | None = None) -> None:
        original(procs, None if timeout is None else max(timeout, _LEAST_SECONDS))

    shutdown._draftalign = True  # type: ignore[attr-defined]
    utils.shutdown = shutdown


def unknown_names(core: Any) -> list[str]:
    """Names of an engine core that the plugin uses and this vLLM lacks: what needs them does not work."""
    names = [f"EngineCore.{name}" for name in (*_WRAPPED, "_weight_version") if not hasattr(core, name)]
    return names + ([] if hasattr(core.model_executor, "is_sleeping") else ["Executor.is_sleeping"])


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., object] | None = None,
    done: Callable[[Any], object] | None = None,
    after: Callable[[Any], object] | None = None,
) -> None:
    """Wrap a method of this class: call `before` it, `done` if it returned, `after` it in any case."""
    original = getattr(owner, name, None)
    if original is None:  # an older vLLM
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            guarded(before, self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        finally:
            if after is not None:
                guarded(after, self)
        if done is not None:
            guarded(done, self)
        return result

    def guarded(act: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        try:
            act(*args, **kwargs)
        except Exception as error:
            if not failed:
                failed.append(error)
                log.exception("draftalign: a failure of ours around %s; the engine goes on", name)

    failed: list[Exception] = []
    setattr(owner, name, wrapped)
