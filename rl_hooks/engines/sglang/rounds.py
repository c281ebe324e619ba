"""Counts SGLang's verification rounds step by step, on its own metrics page.

SGLang counts the rounds of a request when that request ends. A request that runs over a swap would then be counted
whole for the newer drafter. So a plugin of SGLang's own framework (`sglang.srt.plugins`) reads each request's count
before and after the step that it is in, and adds the difference to two counters of the scheduler's process.

A round counts where the request's step before it was launched after the last swap, too: SGLang drafts the first token
of a round at the end of the step before (with pipeline ranks, all of it). So one round of each request that runs over a
swap is left out, and one more where schedules overlap.

Where the server follows the service by itself (`rl_hooks.engines.sglang.inside`) the same rounds are kept by drafter,
policy version and prompt, whether SGLang shows metrics or not.

Written against 0.5.23; tests/helpers/trainer/contract_fixtures.py has what it reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from rl_hooks.engines.counting.rounds import RoundBooks, counted_prompt
from rl_hooks.engines.sglang import direct
from rl_hooks.engines.sglang.memory import MEMORY, UPDATER
from rl_hooks.format.release import check_receipt

log = logging.getLogger("draftalign.sglang")

ROUNDS: Final = "draftalign:spec_decode_rounds_total"
#: Accepted tokens after trimming, by position in the draft.
ACCEPTED: Final = "draftalign:spec_decode_round_accepted_tokens_total"
#: Present only if a fault of ours has ended the counting: the two above then stay on the page, and stand still.
FAULTS: Final = "draftalign:spec_decode_rounds_faults_total"
#: The class that processes the results of a step in SGLang's scheduler.
PROCESSOR: Final = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
#: The class that loads a model in it, the drafter's too.
RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
#: The oldest release that was run following the service by itself.
FIRST_TO_FOLLOW: Final = (0, 5, 23)
#: No draft is longer.
_MAX_DEPTH: Final = 64


class ServedRounds:
    """The rounds of a server that knows its drafter and its policy. All calls come from the scheduler's thread.

    `law`: returns the drafter and the policy version of a step that is launched now. `drafts`: tokens drafted in a
    round.
    """

    def __init__(self, law: Callable[[], tuple[str | None, int | None]], drafts: int) -> None:
        self.books = RoundBooks()
        self._law, self._drafts = law, drafts
        #: Of the newest steps, by when they were launched: with overlapping schedules results come a step later.
        self._launched: deque[tuple[float, tuple[str | None, int | None]]] = deque(maxlen=4)
        self._prompts: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()

    def launched(self, batch: Any) -> None:
        """A step is about to run."""
        self._launched.append((batch.launch_ts, self._law()))

    def book(self, batch: Any, rounds: Sequence[tuple[Any, int]], ended: int) -> None:
        """Rounds of a step, each with its request and the tokens that it emitted. `ended`: requests that it ended."""
        law = next((law for at, law in self._launched if at == batch.launch_ts), None) or self._law()
        if rounds:
            requests, emitted = zip(*rounds, strict=True)
            accepted = [max(tokens - 1, 0) for tokens in emitted]
            self.books.add(law, self._drafts * len(rounds), accepted, emitted, map(self._prompt, requests))
        self.books.tell(law, ended, sum(not request.finished() for request in batch.reqs))

    def _prompt(self, request: Any) -> str | None:
        if request not in self._prompts:
            self._prompts[request] = counted_prompt(request.origin_input_ids)
        return self._prompts[request]


class StepCounter:
    """The counters of one scheduler's process. All calls come from its thread."""

    def __init__(self) -> None:
        self.failed = False
        #: Where the server follows the service by itself, on its first rank.
        self.served: ServedRounds | None = None
        self._changed_at: float | None = None  # when the drafter was last loaded
        self._since: WeakSet[Any] = WeakSet()  # requests that have had a step which was launched after that
        self._rounds: Any = None
        self._accepted: Any = None
        self._faults: Any = None

    def drafter_changed(self) -> None:
        """The drafter has been loaded: steps that are launched from now on draft with it."""
        self._changed_at = time.monotonic()
        self._since = WeakSet()

    def launched(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """A step is about to run."""
        if self.served is not None:
            self._guarded(self.served.launched, batch)

    def prefilled(self, _: Any, processor: Any, batch: Any, *rest: Any, **named: Any) -> None:
        """SGLang has processed the results of a prefill."""
        del processor, rest, named
        self._guarded(self._see, batch, batch.reqs)

    def decoded(self, original: Callable[..., Any], processor: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        """Let SGLang process the results of a decoding step by `original`, and count its rounds.

        A fault of ours ends the counting, with a line in the log and a counter on the page. It is not raised: an
        exception here would end the scheduler.
        """
        before = self._guarded(self._read, processor, batch)
        answer = original(processor, batch, *rest, **named)
        if before is not None:
            self._guarded(self._count, processor, batch, before)
        return answer

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.failed:
            return None
        try:
            return call(*arguments)
        except Exception:
            self.failed = True
            log.exception("draftalign: rounds are no longer counted in this server")
            with contextlib.suppress(Exception):
                self._tell_fault()
            return None

    def _tell_fault(self) -> None:
        from prometheus_client import Counter  # as in `_open`

        self._faults = Counter(FAULTS, "Faults that have ended the counting of rounds.", registry=None)
        self._faults.inc()

    def _read(self, processor: Any, batch: Any) -> list[tuple[int, int]] | None:
        """Rounds and tokens of each request so far; None in a rank in which nobody counts."""
        if self.served is None and not _is_shown(processor):
            return None
        return [(request.spec_verify_ct, len(request.output_ids_through_stop)) for request in batch.reqs]

    def _see(self, batch: Any, requests: Sequence[Any]) -> None:
        """Remember requests of a step that was launched since the drafter was loaded, once one was."""
        if self._changed_at is not None and batch.launch_ts > self._changed_at:
            self._since.update(requests)

    def _count(self, processor: Any, batch: Any, before: Sequence[tuple[int, int]]) -> None:
        rounds, over_a_swap, ended = list[tuple[Any, int]](), [], 0
        for request, (rounds_before, tokens_before) in zip(batch.reqs, before, strict=True):
            if request.spec_verify_ct == rounds_before:  # it had ended before this step
                continue
            if self.served is not None:
                ended += request.finished()
            if self._changed_at is not None and request not in self._since:
                over_a_swap.append(request)
                continue
            rounds.append((request, len(request.output_ids_through_stop) - tokens_before))
        if _is_shown(processor):
            self._show([emitted for _, emitted in rounds])
        if self.served is not None:
            self.served.book(batch, rounds, ended)
        self._see(batch, over_a_swap)

    def _show(self, emitted: Sequence[int]) -> None:
        if self._rounds is None:
            self._open()
        self._rounds.inc(len(emitted))
        for position in range(min(max(emitted, default=0) - 1, _MAX_DEPTH)):
            self._accepted.labels(position=str(position)).inc(sum(tokens - 1 > position for tokens in emitted))

    def _open(self) -> None:
        """Make the counters. SGLang must have set the directory in which the processes of a server share theirs."""
        from prometheus_client import Counter  # it reads that setting when it is imported

        # SGLang's page reads the values of all processes from files, so no registry needs to know them.
        by = ["position"]
        self._accepted = Counter(ACCEPTED, "Draft tokens that were emitted, by position.", by, registry=None)
        self._rounds = Counter(ROUNDS, "Verification rounds, counted in the step that did them.", registry=None)


def _is_shown(processor: Any) -> bool:
    """Whether SGLang's metrics page has the counts of this rank."""
    reporter = getattr(processor, "metrics_reporter", processor)  # 0.5.12's scheduler is both
    return bool(reporter.current_scheduler_metrics_enabled and reporter.is_stats_logging_rank)


#: This process's counter: SGLang's scheduler calls it at each step, our loader when the drafter has changed.
COUNTER: Final = StepCounter()


def check_first_load(runner: Any, model_config: Any = None, *_: Any, **_named: Any) -> None:
    """Before SGLang loads a model: raise DigestError for a damaged drafter of an agent's cache. It ends the server."""
    del runner
    path = getattr(model_config, "model_path", None)
    if isinstance(path, str):
        check_receipt(Path(path))


def can_follow(version: str) -> bool:
    """Whether a SGLang of this version is 0.5.23 or newer; not where it does not know its version."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) >= FIRST_TO_FOLLOW


def register() -> str | None:
    """Have SGLang count, and tell when memory is released. Returns the class that processes a step's results.

    None in a release that cannot follow the service by itself.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    in_parts = importlib.util.find_spec("sglang.srt.managers.scheduler_components") is not None  # not so in 0.5.12
    processor, updater = (PROCESSOR, UPDATER) if in_parts else (direct.SCHEDULER, direct.SCHEDULER)
    HookRegistry.register(f"{RUNNER}.__init__", check_first_load, HookType.BEFORE)
    HookRegistry.register(f"{processor}.process_batch_result_prefill", COUNTER.prefilled, HookType.AFTER)
    HookRegistry.register(f"{processor}.process_batch_result_decode", COUNTER.decoded, HookType.AROUND)
    HookRegistry.register(f"{updater}.release_memory_occupation", MEMORY.changed, HookType.AFTER)
    HookRegistry.register(f"{updater}.resume_memory_occupation", MEMORY.changed, HookType.AFTER)
    older = direct.register()
    follows = not older and can_follow(_version())
    if os.environ.get("DRAFTALIGN_URL") and not follows:
        HookRegistry.register(f"{direct.SCHEDULER}.__init__", direct.sends_nothing, HookType.AFTER)
    return processor if follows else None


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)
