"""Feature capture in a SGLang that speculates with EAGLE-3: its own requests train the drafter, without a trainer.

    DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_RUN=math python -m sglang.launch_server ...

The hooks below are put on SGLang's classes by its plugin framework. They run in the scheduler's process, on its thread:
before a step ended requests are sent and new ones begin; after the target's forward the rows of those that are
collected are copied on the device (`steps`). The service is asked and told in threads. A fault of ours ends the tap,
not the server.

A request that is sampled must compute its whole prompt: it gets a prefix cache of its own (`extra_key`). One that
begins behind tokens of the cache all the same is not collected.

The tap sends your users' text, as token ids and hidden states: sample with their consent.

Written against 0.5.23; tests/helpers/trainer/contract_fixtures.py has what it reads. CUDA graphs, GPUs: read, not run.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from rl_hooks.engines.candidate import drafter_files
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.sglang.inside import WORKER, tp_group, unknown_ways, weight_version
from rl_hooks.engines.sglang.memory import UPDATER
from rl_hooks.engines.sglang.split import SplitPolicy
from rl_hooks.engines.sglang.steps import (
    captured_layers,
    is_answered,
    keep_final_states,
    prefill_step,
    request_of,
    round_step,
    unlike_policy,
)
from rl_hooks.engines.sglang.updates import UPDATES, WRITTEN, PolicyUpdates
from rl_hooks.engines.tap.feature_tap import MAX_TOKENS, TapUnsupportedError
from rl_hooks.engines.tap.served import ServedPolicy, ServedRun
from rl_hooks.sending.sampling import sampling_position

log = logging.getLogger("draftalign.sglang")

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
#: The classes that run the policy, a round, and a model; the class of a request.
TARGET: Final = "sglang.srt.managers.tp_worker.TpModelWorker"
RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
REQUEST: Final = "sglang.srt.managers.schedule_batch.Req"
#: The entry of `/server_info`'s first `internal_states` with the tap's counts.
COUNTS: Final = "draftalign_tap"
#: What a process that ends waits for what was collected, and a second more.
_CLOSE_SECONDS: Final = 6.0


class SGLangTap:
    """The tap of one scheduler's process. All methods are hooks of SGLang's, on its thread.

    `follows`: whether this server follows the service, once its workers are made; what that answers begins the tap.
    """

    def __init__(self, settings: ServiceSettings, follows: Callable[[], bool] = lambda: True) -> None:
        self._settings, self._follows = settings, follows
        self._worker: Any = None
        self._draws = False
        self._updates: PolicyUpdates | None = None
        #: What the service has answered, on the first rank: (newest policy version,), None in it for a new run.
        self.newest: tuple[int | None] | None = None
        self._waits = False
        self._split: SplitPolicy | None = None  # with tensor parallelism
        self._requests: dict[str, weakref.ref[Any]] = {}  # those that are collected
        self.run: ServedRun | None = None
        #: It has ended, or never begun: a fault of ours, or a server that cannot be tapped.
        self.ended = False

    @property
    def has_begun(self) -> bool:
        """Whether it sends the run's registration, or cannot yet, or never will."""
        return self.run is not None or self._waits or self.ended

    @property
    def policy_version(self) -> int | None:
        """The version of the weights as this tap numbers them; None where it does not."""
        return None if self.run is None or self.ended else self.run.version

    # --- hooks: the server's start
    def made(self, _: Any, worker: Any, *__: Any, **___: Any) -> None:
        """SGLang has loaded policy and drafter, and has captured no graph yet."""
        try:
            _check(worker)
            runner = worker.target_worker.model_runner
            keep_final_states(runner.model)
            device = torch.device(runner.device)
            self._draws = device.type == "cuda" and torch.version.hip is None
            self._worker, ranks = worker, LayerRanks(tp_group())  # from here on requests are marked
            if ranks.size > 1:
                self._split = SplitPolicy(lambda: _served(runner, ranks), ranks)
            self._updates = PolicyUpdates(runner.model, weight_version)
        except Exception as error:  # noqa: BLE001 - the server must go on without its tap
            self._refuse(error)

    def started(self, *_: Any, **__: Any) -> None:
        """SGLang has made its workers."""
        if self.ended:
            return
        if self._worker is None:
            self._refuse("this server does not speculate with EAGLE-3 in SGLang's EAGLEWorkerV2")
        elif not self._follows():
            self._worker = None  # on all ranks alike: no request is marked
            self._refuse("this server does not follow the service, so nobody would say when to begin")

    def admitted(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """SGLang has made a request: one that will be sampled gets a prefix cache of its own.

        All ranks must cache alike, so this follows from the request and the settings, and from nothing else.
        """
        try:
            over = self.ended and self._split is None  # other ranks would not know
            if self._worker is not None and not over and self._samples(request):
                request.extra_key = f"{request.extra_key or ''}draftalign-{request.rid}"
        except Exception as error:  # noqa: BLE001 - as everywhere
            self._fault("marking a request", error)

    # --- hooks: a step
    def before_step(self, worker: Any, batch: Any, *_: Any, **__: Any) -> None:
        """A step is about to run."""
        del worker
        self._guarded("before a step", self._before_step, batch)

    def forwarded(self, result: Any, target: Any, batch: Any = None, *_: Any, **__: Any) -> None:
        """The policy has run. Rounds are read in `verified`, where it is known which drafts hold."""
        if batch is not None and self._worker is not None and target is self._worker.target_worker:
            self._guarded("reading a prefill", self._prefilled, batch, result)

    def samples(self, runner: Any, output: Any, *_: Any, **__: Any) -> None:
        """SGLang is about to draw first tokens."""
        if self._split is not None and self._requests and runner is self._worker.target_worker.model_runner:
            self._guarded("reading logits", self._keep_logits, output)

    def verified(self, original: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        """Let SGLang verify drafts by `original`, and take the rows of the round."""
        chains = batch.spec_info
        result = original(worker, batch, *rest, **named)
        self._guarded("reading a round", self._verified, batch, chains, result)
        return result

    def processed(self, *_: Any, **__: Any) -> None:
        """SGLang has processed a step's results. It drops a request that has ended before the next step begins."""
        self._guarded("ended requests", self._end_finished)

    def idle(self, *_: Any, **__: Any) -> None:
        """Nothing runs: send what has ended."""
        if self._requests or (self.run is not None and self.run.tap.pending):
            self._guarded("sending what has ended", self._idle)

    def described(self, answer: Any, *_: Any, **__: Any) -> None:
        """SGLang's scheduler has said how it stands: add what was sent and what was not, after the tap's end, too."""
        try:
            if self.run is not None:
                answer.internal_state[COUNTS] = self.run.counts()
        except Exception as error:  # noqa: BLE001 - as everywhere
            self._fault("telling the counts", error)

    # --- hooks: weights
    def update(self, updater: Any, request: Any, *_: Any, **__: Any) -> None:
        """Weights are about to be written."""
        if self._split is not None and getattr(request, "selector", "all") != "draft":
            self._split.announce()
        self._guarded("an update of the weights", self._change, lambda updates: updates.update(updater, request))

    def updated(self, result: Any, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """A call that may write weights has returned."""
        self._guarded("an update's result", self._change, lambda updates: updates.done(request, result))

    def written(self, *_: Any, **__: Any) -> None:
        """Weights have been written, or a session has ended: ranks gather a head that has moved, whatever failed."""
        try:
            if self._split is not None:
                self._split.renew()
        except Exception as error:  # noqa: BLE001 - as everywhere
            self._fault("gathering the head", error)

    def release(self, updater: Any, request: Any, *_: Any, **__: Any) -> None:
        """Memory is about to be released."""
        self._guarded("released memory", self._change, lambda updates: updates.release(updater, request))

    def resumed(self, _: Any, updater: Any, *__: Any, **___: Any) -> None:
        """Memory has been resumed."""
        self._guarded("resumed memory", self._change, lambda updates: updates.resume(updater))

    def named(self, *_: Any, **__: Any) -> None:
        """SGLang may have another weight version."""
        self._guarded("a weight version", self._change, lambda updates: updates.name())

    def close(self) -> None:
        """The process ends: send what was collected, for some seconds at most. Weights are not read any more."""
        if self.run is not None:
            self.run.tap.drop()
            self.run.close(_CLOSE_SECONDS)

    # --- own
    def _guarded(self, what: str, call: Callable[..., None], *arguments: Any) -> None:
        if self.ended or self._worker is None:
            return
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - an exception here would end the scheduler
            self._fault(what, error)

    def _fault(self, what: str, error: Exception) -> None:
        self.ended = True
        self._requests.clear()
        log.error("draftalign: no features are captured any more, the server goes on: %s failed", what, exc_info=error)
        if self.run is not None:
            self.run.tap.drop()

    def _change(self, change: Callable[[PolicyUpdates], None]) -> None:
        assert self._updates is not None  # noqa: S101 - it comes with the worker
        self._end_finished()
        change(self._updates)
        if self.run is not None:  # some were cut
            self._requests = {rid: one for rid, one in self._requests.items() if rid in self.run.tap.collected}

    def _before_step(self, batch: Any) -> None:
        updates = self._updates
        assert updates is not None  # noqa: S101 - it comes with the worker
        self._settle(updates)
        if self.run is None and self.newest is not None and updates.whole:
            self._begin(self.newest[0])
        if self.run is None:
            return
        if self.run.refused:
            self._refuse("the service has refused this policy for the run, or the run is closed")
            self.run.tap.drop()
            return
        if batch.forward_mode.is_extend():
            self._admit(batch)
            if self._split is not None:
                self._split.prefills(batch)
        self.run.tap.release()

    def _settle(self, updates: PolicyUpdates) -> None:
        """Note which requests have ended, and go on with the policy's version as it is now."""
        self._end_finished()
        if not updates.due:
            return
        version, tainted = updates.settle()
        if self.run is not None and version is not None:
            self.run.settled(version, tainted=tainted, again=True)
            self._requests = {rid: one for rid, one in self._requests.items() if rid in self.run.tap.collected}

    def _begin(self, newest: int | None) -> None:
        """Start to collect, unless the weights are not the run's yet.

        They are not where SGLang made them up (`--load-format dummy`), nor in a server that joins a run whose policy
        has moved on, until weights are written or named.
        """
        updates = self._updates
        assert updates is not None  # noqa: S101 - the caller has it
        made_up = str(self._worker.server_args.load_format) in ("dummy", "LoadFormat.DUMMY")
        if not updates.updated and (made_up or newest):
            if not self._waits:
                log.warning(
                    "draftalign: %s: no features are sent until weights are written, or SGLang's weight version is set",
                    "SGLang made the policy's weights up"
                    if made_up
                    else f"the run is at policy version {newest}, and this server has had no weights since its start",
                )
            self._waits = True
            return
        try:
            self.run = self._served_run(updates.number(newest + 1 if newest else 0), joined=newest is not None)
        except Exception as error:  # noqa: BLE001 - the server must go on without its tap
            self._refuse(error)
            return
        atexit.register(self.close)
        log.info("draftalign: this server sends features to run %r of %s", self._settings.run, self._settings.url)

    def _served_run(self, version: int, *, joined: bool) -> ServedRun:
        assert self._updates is not None  # noqa: S101 - it comes with the worker
        runner, args, split = self._worker.target_worker.model_runner, self._worker.server_args, self._split
        alone = LayerRanks(None)

        def policy() -> ServedPolicy:
            if split is None:
                return _served(runner, alone)
            assert split.whole is not None  # noqa: S101 - this is the first rank
            return split.whole

        run = ServedRun(
            self._settings,
            policy,
            alone,
            captured_layers(runner.model),
            lambda: drafter_files(args.speculative_draft_model_path, args.speculative_draft_model_revision),
            self._updates.weights,
            version,
            self._updates.notice,
            joined=joined,
            answers_only=split is not None,
        )
        self._updates.changing, self._updates.leaving = run.tap.cut, run.tap.flush
        run.send_head()
        return run

    def _refuse(self, error: Exception | str) -> None:
        self.ended = True
        self._requests.clear()
        log.error("draftalign: no features are captured: %s", error)

    def _admit(self, batch: Any) -> None:
        """Begin to collect the requests whose whole prompt is computed from this step on."""
        assert self.run is not None  # noqa: S101 - the caller has looked
        tap, running = self.run.tap, set(map(id, batch.decoding_reqs or ()))  # of a mixed batch
        for request, begin in zip(batch.reqs, batch.prefix_lens, strict=True):
            if request.extend_batch_idx > 1 or request.retracted_stain:  # a later chunk, or not its beginning
                continue
            if id(request) in running or request.rid in self._requests or not self._is_sampled(request):
                continue
            if why := unlike_policy(request, draws=self._draws):
                tap.tally.add("skipped_distribution")
                tap.tally.warn(
                    why, f"requests with {why} are not sent: only the policy's own distribution, of text, is"
                )
                continue
            if begin:
                tap.tally.add("skipped_cached")
                continue
            tap.begin(request_of(request))
            if request.rid in tap.collected:
                self._requests[request.rid] = weakref.ref(request)

    def _is_sampled(self, request: Any) -> bool:
        return sampling_position(request.rid, "tap") < self._settings.sample_fraction and is_answered(request)

    def _samples(self, request: Any) -> bool:
        """Whether this request is to be collected, if it can be."""
        fits = self._is_sampled(request) and len(request.origin_input_ids) <= MAX_TOKENS
        return fits and not unlike_policy(request, draws=self._draws)

    def _end_finished(self) -> None:
        """Tell the tap which requests have ended, and how many tokens they were answered."""
        if not self._requests or self.run is None:
            return
        gone, emitted = [], {}
        for rid, reference in self._requests.items():
            request = reference()
            if request is None:  # aborted while it waited, perhaps after it was preempted
                gone.append(rid)
            elif request.finished():
                emitted[rid] = len(request.output_ids_through_stop)
        if gone:
            self.run.tap.end(gone)
        if emitted:
            self.run.tap.end(emitted, emitted)
        for rid in (*gone, *emitted):
            del self._requests[rid]

    def _prefilled(self, batch: Any, result: Any) -> None:
        if self.run is None or not self._requests or not batch.forward_mode.is_extend():
            return
        if (step := prefill_step(batch, result, self.run.tap.collected)) is not None:
            self.run.tap.step(step if self._split is None else self._split.prefilled(step, batch))

    def _verified(self, batch: Any, chains: Any, result: Any) -> None:
        if self.run is None or not self._requests or batch.forward_mode.is_idle():
            return
        if (step := round_step(batch, chains, result, self.run.tap.collected)) is not None:
            self.run.tap.step(step if self._split is None else self._split.verified(step, batch, result))

    def _keep_logits(self, output: Any) -> None:
        assert self._split is not None  # noqa: S101 - the caller has looked
        if self.run is not None:
            self._split.samples(output, self.run.tap.collected)

    def _idle(self) -> None:
        updates, run = self._updates, self.run
        if updates is None or run is None or updates.released:
            return
        self._settle(updates)
        if run.tap.pending and not self._requests:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the rows were copied on another stream; nothing runs there now
            run.tap.release()
            log.debug("draftalign: %s", {name: value for name, value in run.counts().items() if value})


def _check(worker: Any) -> None:
    """Raise TapUnsupportedError for a server whose rows cannot be read."""
    args = worker.server_args
    facts = {
        "trees of drafts (--speculative-eagle-topk above 1)": worker.topk != 1,
        "thresholds that accept drafts beyond the policy's distribution (--speculative-accept-threshold-...)": (
            (args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc) != (1.0, 1.0)
        ),
        "made-up acceptance (SGLANG_SIMULATE_ACC_LEN)": float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0,
        "watermarks": bool(getattr(args, "enable_watermark", False)),
    }
    if found := [*unknown_ways(args), *(name for name, there in facts.items() if there)]:
        raise TapUnsupportedError(f"not with {', '.join(found)}")


def _served(runner: Any, ranks: LayerRanks) -> ServedPolicy:
    """The policy with what this rank holds of its matrices."""
    return ServedPolicy.on(ranks, runner.model_config.hf_text_config, runner.model)


def register(registry: Any, kinds: Any, processor: str, tap: SGLangTap) -> None:
    """Put the hooks on SGLang's classes. `processor`: the class that processes the results of a step."""
    registry.register(f"{WORKER}.__init__", tap.made, kinds.AFTER)
    registry.register(f"{WORKER}.forward_batch_generation", tap.before_step, kinds.BEFORE)
    registry.register(f"{WORKER}.verify", tap.verified, kinds.AROUND)
    registry.register(f"{TARGET}.forward_batch_generation", tap.forwarded, kinds.AFTER)
    registry.register(f"{RUNNER}.sample", tap.samples, kinds.BEFORE)
    registry.register(f"{REQUEST}.__init__", tap.admitted, kinds.AFTER)
    for kind in ("prefill", "decode"):
        registry.register(f"{processor}.process_batch_result_{kind}", tap.processed, kinds.AFTER)
    registry.register(f"{_SCHEDULER}.init_model_worker", tap.started, kinds.AFTER)
    registry.register(f"{_SCHEDULER}.on_idle", tap.idle, kinds.BEFORE)
    registry.register(f"{_SCHEDULER}.record_weight_version_change", tap.named, kinds.AFTER)
    registry.register(f"{_SCHEDULER}.get_internal_state", tap.described, kinds.AFTER)
    for method in UPDATES:
        registry.register(f"{UPDATER}.{method}", tap.update, kinds.BEFORE)
        registry.register(f"{UPDATER}.{method}", tap.updated, kinds.AFTER)
    for method in WRITTEN:
        registry.register(f"{UPDATER}.{method}", tap.written, kinds.AFTER)
    registry.register(f"{UPDATER}.release_memory_occupation", tap.release, kinds.BEFORE)
    registry.register(f"{UPDATER}.resume_memory_occupation", tap.resumed, kinds.AFTER)
