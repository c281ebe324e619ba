"""Features of live requests, collected step by step inside an inference engine.

An adapter (`tap.py` of vLLM and of SGLang) describes each step as a `Step`, and says when requests begin and end. Each
step copies its rows on the device. Every 16 steps, and whenever 1,024 rows wait, these are scored and start to be
copied to the host; no step waits for that, and only the device knows yet which drafts were rejected. Their rows are
dropped on the host. The rows of a request are joined when it has ended.

Invariants
* The next step computes the row of a rejected draft again, a preempted request all its rows: the newest row counts.
* Only whole requests are sent, from their first computed position on.
* What is sent was scored by the head that drew it: `cut` and `flush` score what waits before that head changes or
  leaves its memory. Where it changed unannounced, the look at the weights that follows each score tells.
* Every rollout is of one policy version. When the policy is about to change, `cut` ends the rollouts that are under
  way: what the old weights drew is sent, what the new ones add is not collected. With `weights`, a request is sent
  after its end, and only if the weights are still those of its version; `moved` is called where they are not.
* Host memory is bounded: beyond `rows` of all requests together none begins, and beyond twice as many those that add
  to them are dropped.
* No failure of ours reaches the engine: it is counted and logged once, and that request is not collected.

Legend: N rows, A aux layers, H hidden size.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks.engines.policy_watch import WeightSample
from rl_hooks.engines.tap.collected import REJECTED, Collected, Request, UnscoredError, assemble
from rl_hooks.engines.tap.rows import Gathered, Head, Step, gather, joined, labels_of
from rl_hooks.sending.copies import HostCopies
from rl_hooks.sending.sampling import TokenBudget, sampling_position
from rl_hooks.sending.tally import Tally

log = logging.getLogger("draftalign.tap")

#: Longest prompt that is collected.
MAX_TOKENS: Final = 8192
#: Rows wait on the device to be scored for this number of steps at most.
_STEPS: Final = 16
#: Rows that wait at most; the rows of one step are not split. They are 32 MiB of an 8B policy.
_ROWS: Final = 1024
#: The length that is expected of an answer is the mean of about so many.
_ANSWERS: Final = 256
#: What is taken of rows: tokens [N, 3] (position, input id, label), scores [N, 2] (logsumexp, log p of the label).
_TAKEN: Final = ("tokens", "scores", "aux", "last")


@dataclass(slots=True)
class _Tracked:
    request: Request
    policy_version: int
    reserved: int  # tokens of the budget, when it began
    sent: int = 0  # tokens
    rows: int = 0
    rejected: int = 0  # rows that were copied and are not kept
    freed: bool = False  # nothing more of it is kept
    #: Its rows as they were scored, on the host: `_TAKEN` in this order. The tap's thread adds them as they arrive.
    parts: list[tuple[npt.NDArray[Any], ...]] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = ()
    #: Why some did not arrive. No exception, whose traceback would keep the rows of the step.
    failure: str | None = None

    @property
    def held(self) -> int:
        """Rows that take memory."""
        return self.rows - self.rejected

    def rows_in_order(self) -> list[dict[str, Tensor]]:
        """All rows, as `assemble` takes them."""
        if self.failure is not None:
            raise RuntimeError(f"rows of a step did not arrive: {self.failure}")
        if not self.held:
            return []
        whole = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*self.parts, strict=True)]
        tokens, scores, aux, last = (rows.view(dtype) for rows, dtype in zip(whole, self.dtypes, strict=True))
        (positions, input_ids, labels), (logsumexp, logprob) = tokens.T, scores.T
        columns = {"positions": positions, "input_ids": input_ids, "labels": labels, "logsumexp": logsumexp}
        return [columns | {"logprob": logprob, "aux": aux, "last": last}]


@dataclass(frozen=True, slots=True)
class _UnscoredStep:
    """Rows of one step that are not scored yet."""

    gathered: Gathered
    owners: Sequence[_Tracked]  # of each segment


@dataclass(slots=True)
class _Unscored:
    """The rows that wait to be scored."""

    parts: list[_UnscoredStep] = field(default_factory=list)
    rows: int = 0
    steps: int = 0  # of the engine, since `release` has scored
    unchanged: bool | None = None  # whether `flush` found the weights as they were; None: no flush since the last step


def _late(scores: Callable[[], Tensor], rows: npt.NDArray[np.int64]) -> Tensor:
    return scores()[:, rows].T


class _Sender:
    """The tap's thread: joins the rows of requests that have ended, and delivers them if the weights are the same."""

    def __init__(
        self,
        deliver: Callable[[Collected], None],
        moved: Callable[[], None],
        budget: TokenBudget,
        tally: Tally,
        *,
        answers_only: bool,
    ) -> None:
        self._answers_only = answers_only
        self.deliver, self._moved, self._budget, self._tally = deliver, moved, budget, tally
        #: Mean length of the answers that were sent last; the engine's thread reads it.
        self.answer_tokens = 0.0
        self._answers = 0
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._holding = threading.Lock()  # what a request holds, and the sum of all
        self._given = self._done = 0  # requests: the engine's thread writes the first, the tap's the second
        self._thread = threading.Thread(target=self._work, name="draftalign-tap", daemon=True)
        self._thread.start()

    def send(self, ended: list[_Tracked], unchanged: Callable[[], bool]) -> None:
        """Deliver these requests, in the thread, if the weights are `unchanged`."""
        self._given += len(ended)
        self._tasks.put(functools.partial(self._send_all, ended, unchanged))

    def call(self, task: Callable[[], object]) -> None:
        """Call it in the thread, after what came before."""
        self._tasks.put(task)

    def place(
        self,
        copies: HostCopies,
        owners: Sequence[_Tracked],
        counts: npt.NDArray[np.int64],
        late: Sequence[Callable[[], Tensor]],
    ) -> None:
        """Give each request its rows, which are copied: what others leave behind must not stay with them.

        `owners`, `counts`: of each segment. `late`: the scores [n, 2] of each step, where the head is split over ranks.
        Rows of rejected drafts are dropped: where few are accepted these are most, and what the bound of memory leaves
        out are the longest answers. As bytes: NumPy copies a few rows in a tenth of torch's time, and has no bfloat16.
        """
        try:
            taken = copies.wait()
            if "scores" not in taken:
                taken = taken | {"scores": torch.cat([scores() for scores in late])}
            dtypes = tuple(taken[name].dtype for name in _TAKEN)
            whole = [taken[name].view(torch.uint8).numpy() for name in _TAKEN]
            each = {id(owner): owner for owner in owners}
            numbers = {name: number for number, name in enumerate(each)}
            owner_N = np.repeat([numbers[id(owner)] for owner in owners], counts)
            kept = np.flatnonzero(taken["tokens"][:, 2].numpy() != REJECTED)
            copied, held = (np.bincount(of, minlength=len(each)) for of in (owner_N, owner_N[kept]))
            # Of each request's rows, the newest stay the last.
            order, begin = kept[np.argsort(owner_N[kept], kind="stable")], 0
            for tracked, end, rejected in zip(each.values(), np.cumsum(held), (copied - held).tolist(), strict=True):
                own = tuple(part[order[begin:end]] for part in whole)
                begin = end
                with self._holding:
                    if not tracked.freed:
                        tracked.dtypes = dtypes
                        tracked.parts.append(own)
                        tracked.rejected += rejected
                        self._tally.add("rows", -rejected)
        except Exception as error:
            for tracked in owners:
                tracked.failure = repr(error)
            raise

    def free(self, ended: Iterable[_Tracked]) -> None:
        """Count the rows of these no more, and give the budget what was reserved for them and not sent."""
        for tracked in ended:
            with self._holding:
                tracked.freed = True
                tracked.parts.clear()  # a step that waits to be scored still has the request
                self._tally.add("rows", -tracked.held)
            self._budget.correct(tracked.sent - tracked.reserved)

    def close(self, timeout_seconds: float) -> int:
        """Wait until all that came was done; returns the requests for which the time was too short."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)
        return self._given - self._done

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - one failed task must not end the thread
                _note(self._tally, "copying rows or comparing the weights", error)
            del task  # its rows must not stay until the next one comes

    def _send_all(self, ended: list[_Tracked], unchanged: Callable[[], bool]) -> None:
        try:
            if unchanged():
                for tracked in ended:
                    self._send(tracked)
            else:
                self._tally.add("skipped_moved", len(ended))
                self._moved()
        finally:
            self._done += len(ended)
            self.free(ended)

    def _send(self, tracked: _Tracked) -> None:
        try:
            collected = assemble(tracked.request, tracked.rows_in_order(), answers_only=self._answers_only)
            if collected is None:
                self._tally.add("skipped_short")
                return
            self.deliver(replace(collected, policy_version=tracked.policy_version))
            self._tally.add("delivered")
            answer = int(collected.generated.sum())
            tracked.sent = tracked.request.prompt_tokens + answer
            self._answers += 1
            self.answer_tokens += (answer - self.answer_tokens) / min(self._answers, _ANSWERS)
        except UnscoredError as error:
            self._tally.add("skipped_unscored")
            self._tally.note("unscored", f"draftalign tap: {error}")
        except Exception as error:  # noqa: BLE001 - one bad request must not end the thread
            _note(self._tally, "assemble", error)


class TapUnsupportedError(Exception):
    """Features cannot be captured in this server; the message says why."""


class FeatureTap:
    """Collects a sampled fraction of an engine's requests, at most `tokens_per_minute`, and delivers whole ones.

    The budget is asked when a request begins, for as many tokens as answers have on average (before the first, for as
    many as this one may have): else it would go to the shortest answers, which end first. `deliver` and `moved` are
    called in the tap's own thread; the engine's calls all methods here. `answers_only`: the steps bring scores of the
    rows that predict answers, and of no others.
    """

    def __init__(
        self,
        head: Head,
        deliver: Callable[[Collected], None],
        *,
        fraction: float,
        tokens_per_minute: int,
        max_tokens: int = MAX_TOKENS,
        weights: WeightSample | None = None,
        policy_version: int = 0,
        moved: Callable[[], None] = lambda: None,
        answers_only: bool = False,
    ) -> None:
        self.head, self.fraction, self.max_tokens = head, fraction, max_tokens
        self._rows = max(tokens_per_minute, 4 * max_tokens)
        #: Version of the rollouts that begin now; None between `cut` and `turn`, when none begin.
        self.policy_version: int | None = policy_version
        self.tally = Tally(log)
        self._budget = TokenBudget(tokens_per_minute)
        self._sender = _Sender(deliver, moved, self._budget, self.tally, answers_only=answers_only)
        self._weights = weights
        self._tracked: dict[str, _Tracked] = {}
        self._ended: list[_Tracked] = []
        self._unscored = _Unscored()

    @property
    def collected(self) -> Collection[str]:
        """The requests that are collected now: a step needs to tell of these only."""
        return self._tracked.keys()

    @property
    def pending(self) -> bool:
        """Whether `release` has something to do."""
        return bool(self._ended or self._unscored.parts)

    def samples(self, request_id: str) -> bool:
        """Whether a request of that name is among those that are sampled."""
        return sampling_position(request_id, "tap") < self.fraction

    def begin(self, request: Request) -> None:
        """A request was admitted; decide whether to collect it."""
        if request.request_id in self._tracked or not self.samples(request.request_id):
            return
        if self.policy_version is None:
            self.tally.add("skipped_update")
            return
        if self.tally["rows"] >= self._rows:
            self.tally.add("skipped_memory")
            return
        longest = min(request.max_tokens or 0, self.max_tokens - request.prompt_tokens)
        answer_tokens = round(self._sender.answer_tokens) or longest
        reserved = request.prompt_tokens + answer_tokens
        if request.prompt_tokens > self.max_tokens or not self._budget.spend(reserved):
            self.tally.add("skipped_budget")
            return
        self.tally.add("begun")
        # A copy: the engine may append to its own list when a session goes on.
        self._tracked[request.request_id] = _Tracked(
            replace(request, prompt_ids=tuple(request.prompt_ids)), self.policy_version, reserved
        )

    def step(self, step: Step) -> None:
        """Take the rows of collected requests: launches copies on the device, and does not wait for them."""
        if not self._tracked:
            return
        chosen = [i for i, name in enumerate(step.request_ids) if name in self._tracked]
        if not chosen:
            return
        try:
            with torch.inference_mode():
                gathered = gather(step, chosen)
            self._take(gathered, [step.request_ids[i] for i in chosen])
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.note("step", error)
            dropped = (self._tracked.pop(step.request_ids[i], None) for i in chosen)
            self._sender.free(tracked for tracked in dropped if tracked is not None)

    def end(self, request_ids: Collection[str], emitted: Mapping[str, int] | None = None) -> None:
        """These requests have ended, for whatever reason.

        `emitted`: how many tokens each was answered, where the engine tells: then nothing behind them is sent.
        """
        if self._tracked:
            for name in request_ids:
                if (tracked := self._tracked.pop(name, None)) is None:
                    continue
                if emitted is not None:
                    tracked.request = replace(tracked.request, max_tokens=emitted[name])
                self._ended.append(tracked)
            if self._weights is None and self._ended:
                self._send_ended()

    def release(self) -> None:
        """Send the ended requests if the weights are unchanged. Call it when a forward is about to read the weights.

        Does nothing before the `_STEPS`-th call after the last time, unless no request is under way: in a session's
        first step all of the last session go out. Then it scores what waits.
        """
        if not self.pending:
            return
        self._unscored.steps += 1
        under_way = any(tracked.rows for tracked in self._tracked.values())  # the oldest one comes first
        if under_way and self._unscored.steps < _STEPS:
            return
        self._send_ended()

    def _send_ended(self) -> None:
        self._score()  # before the look: then rows that other weights have scored are not sent
        self._unscored.steps = 0
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        try:
            self._sender.send(ended, self._weights.look() if self._weights is not None else lambda: True)
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self._sender.free(ended)
            self.note("sampling the weights", error)

    def rest(self, request_ids: Collection[str], ready: Callable[[], None]) -> None:
        """No request is under way any more, these have ended: send them, whether a step follows or not.

        `ready` is called in the tap's thread once they have been delivered. Reads the weights, as `flush` does.
        """
        self.end(request_ids)
        self._send_ended()
        self._sender.call(ready)

    def cut(self) -> int:
        """End the rollouts here, since the policy is about to change; none begins until `turn`.

        What they have is sent, if the weights are still those that drew it. Reads the weights, as `flush` does.
        Returns how many could not be scored, and are lost.
        """
        self.flush()
        unchanged, ended = self._unscored.unchanged, [*self._ended, *self._tracked.values()]
        self.tally.add("cut", len(self._tracked))
        self._forget()
        if unchanged is None:  # no rows, or they could not be scored
            self._sender.free(ended)
            return sum(tracked.rows > 0 for tracked in ended)
        if ended:
            self._sender.send(ended, lambda: unchanged)
        return 0

    def flush(self) -> None:
        """Score the rows that wait, and look whether the weights are those of before.

        Returns once the device has: from then on the weights may change, or leave their memory. Call it before they do.
        A second call reads nothing, if no step came between.
        """
        if self._unscored.unchanged is not None or not any(one.rows for one in (*self._ended, *self._tracked.values())):
            return
        try:
            if self._unscored.parts:
                last = self._unscored.parts[0].gathered.last
                if last.is_cuda:  # whatever stream this is called on, the steps' rows are there
                    torch.cuda.synchronize(last.device)
                if (copies := self._score()) is not None:
                    copies.wait()
            self._unscored.unchanged = True if self._weights is None else self._weights.look()()
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.note("scoring rows before an update", error)

    def turn(self, policy_version: int, head: Head, ready: Callable[[], None]) -> None:
        """Go on with a policy of this version. Rollouts under way are dropped: both policies drew parts of them.

        `ready` is called in the tap's thread, when all that was collected before has been delivered.
        """
        self.drop()
        self.head, self.policy_version = head, policy_version
        self._sender.call(ready)

    def drop(self) -> None:
        """Forget what is under way, and collect nothing more until `turn`. What was handed to the thread goes out."""
        self._sender.free([*self._ended, *self._tracked.values()])
        self._forget()

    def close(self, timeout_seconds: float) -> None:
        """Collect nothing more; wait until what was collected has been delivered. `lost_at_end` counts what was not.

        A thread that is inside torch when the interpreter ends takes the whole process down with it.
        """
        if lost := self.cut() + self._sender.close(timeout_seconds):
            self.tally.add("lost_at_end", lost)
            self.tally.warn("end", f"the engine ends, and {lost} requests that were collected are lost")

    def _forget(self) -> None:
        self.policy_version = None
        self._tracked.clear()
        self._ended.clear()
        self._unscored = _Unscored()

    def _take(self, gathered: Gathered, names: Sequence[str]) -> None:
        owners = [self._tracked[name] for name in names]
        count = len(gathered.rows)
        self._unscored.unchanged = None
        held, dropped, long = self.tally["rows"], list[_Tracked](), list[str]()
        for name, tracked, rows in zip(names, owners, gathered.counts.tolist(), strict=True):
            tracked.rows += rows
            held += rows
            if held > 2 * self._rows:
                held -= tracked.held
                dropped.append(self._tracked.pop(name))
            elif tracked.held > 4 * self.max_tokens:  # as many as may wait
                long.append(name)
        self.tally.add("rows", count)  # before anything is scored: a failure frees the rows of its requests
        if self._unscored.rows + count > _ROWS:
            self._score()
        self._unscored.parts.append(_UnscoredStep(gathered, owners))
        self._unscored.rows += count
        if self._unscored.rows >= _ROWS:
            self._score()
        if dropped:
            self.tally.add("skipped_memory", len(dropped))
            self._sender.free(dropped)
        if long:  # sent up to here
            self.tally.add("cut_long", len(long))
            self.end(long)

    def _score(self) -> HostCopies | None:
        """Label and score the rows that wait, and start to copy them to the host. None: that failed."""
        parts, self._unscored = self._unscored.parts, _Unscored(steps=self._unscored.steps)
        if not parts:
            return None
        owners = [owner for part in parts for owner in part.owners]
        counts = np.concatenate([part.gathered.counts for part in parts])
        try:
            with torch.inference_mode():
                copies = HostCopies(self._scored([part.gathered for part in parts], owners, counts))
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.note("scoring rows", error)
            self._lose(owners, error)
            return None
        steps = [(part.gathered.scores, part.gathered.rows) for part in parts]
        late = [functools.partial(_late, scores, rows) for scores, rows in steps if scores is not None]
        # Not the parts themselves: they would hold the rows on the device until the tap's thread comes to it.
        self._sender.call(functools.partial(self._sender.place, copies, owners, counts, late))
        return copies

    def _scored(
        self, each: Sequence[Gathered], owners: Sequence[_Tracked], counts: npt.NDArray[np.int64]
    ) -> dict[str, Tensor]:
        labels_N, last = labels_of(each), joined([one.last for one in each])
        positions, input_ids = (joined([getattr(one, name) for one in each]) for name in ("positions", "input_ids"))
        aux = [joined(states) for states in zip(*(one.aux for one in each), strict=True)]
        taken = {
            "tokens": torch.stack((positions.long(), input_ids.long(), labels_N), dim=1),
            "aux": torch.cat(aux, dim=-1),
            "last": last,
        }
        if each[0].scores is None:
            samplings = [owner.request.sampling for owner in owners]
            taken["scores"] = self.head.score_step(last, labels_N, samplings, counts).T.contiguous()
        return taken

    def _lose(self, owners: Sequence[_Tracked], error: Exception) -> None:
        """Drop these requests, of which rows are missing."""
        for owner in owners:
            owner.failure = repr(error)
        for name in [name for name, tracked in self._tracked.items() if tracked.failure is not None]:
            self._sender.free([self._tracked.pop(name)])

    def note(self, kind: str, error: Exception) -> None:
        """Count a failure of ours; log it the first time that its kind comes up."""
        _note(self.tally, kind, error)


def _note(tally: Tally, kind: str, error: Exception) -> None:
    tally.add("failures")
    tally.note(kind, f"draftalign tap: {kind} failed, requests go uncollected: {error!r}")
