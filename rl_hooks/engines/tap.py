"""Features of live requests, collected step by step inside an inference engine.

Engine-independent: an adapter (`rl_hooks.engines.vllm.tap`) describes each step as a `Step`, and says when requests
begin and end. Each step starts to copy its rows to the host, and does not wait for the copy: only the device knows yet
which drafts were rejected. The rows of a request are joined when it has ended.

Invariants
* The next step computes the row of a rejected draft again, a preempted request all its rows: the newest row counts.
* Only whole requests are sent, from their first computed position on.
* Every rollout is of one policy version. When the policy is about to change, `cut` ends the rollouts that are under
  way: what the old weights drew is sent, what the new ones add is not collected. With `weights`, a request is sent
  after its end, and only if the weights are still those of its version; `moved` is called where they are not.
* Host memory is bounded: beyond `rows` of all requests together none begins, and beyond twice as many those that add
  to them are dropped.
* No failure of ours reaches the engine: it is counted and logged once, and that request is not collected.

Legend: N rows taken in a step, A aux layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.engines.collected import REJECTED, Collected, Request, RequestSampling, UnscoredError, assemble
from rl_hooks.engines.policy_watch import WeightSample
from rl_hooks.sending.copies import HostCopies, to_device
from rl_hooks.sending.features import score_rows
from rl_hooks.sending.sampling import TokenBudget, sampling_position
from rl_hooks.sending.tally import Tally

log = logging.getLogger("draftalign.tap")

#: Longest prompt that is collected.
MAX_TOKENS: Final = 8192
#: Rows of a request in a step that may predict generated tokens: the last token, and as many drafts as engines make.
_VERIFIED: Final = 65
#: What is taken of a step: tokens [N, 3] (position, input id, label), scores [N, 2] (logsumexp, log p of the label).
_TAKEN: Final = ("tokens", "scores", "aux", "last")
#: top_p and top_k where nothing is cut off.
_WHOLE: Final = (1.0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the target, and what it says of some requests: those that are collected, at least.

    Tensors on its device; `first_rows` and `row_counts` on the host, one per request.
    """

    request_ids: Sequence[str]
    first_rows: npt.NDArray[np.int64]
    row_counts: npt.NDArray[np.int64]
    input_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    aux: Sequence[Tensor]  # A tensors [rows, H], entering the aux layers
    last: Tensor  # [rows, H], after the final norm
    rejected: Tensor  # [requests]: how many of its last rows hold rejected drafts
    last_sampled: Tensor  # [requests]: the token that follows the last accepted row
    #: Where the head is split over ranks: returns (logsumexp, log p of the label by `labelled_rows`) [2, rows] on the
    #: host, NaN where they are unknown. It waits for other ranks, so only the tap's thread calls it.
    scores: Callable[[], Tensor] | None = None


def labelled_rows(step: Step, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows [N], labels [N]) of the requests at these places. A label is the row's next token, -1 at a rejected row."""
    counts = step.row_counts[chosen]
    from_end = _from_end(counts)
    rows = np.repeat(step.first_rows[chosen] + counts, counts) - 1 - from_end
    following = np.minimum(rows + 1, len(step.input_ids) - 1)
    owner = np.repeat(np.asarray(chosen), counts)
    rows_N, following_N, owner_N, from_end_N = to_device(step.last.device, np.stack([rows, following, owner, from_end]))
    behind_N = from_end_N - step.rejected[owner_N]  # 0: the last accepted row; below: rejected
    labels_N = torch.where(behind_N == 0, step.last_sampled[owner_N].long(), step.input_ids[following_N].long())
    return rows_N, labels_N.masked_fill_(behind_N < 0, REJECTED)


def _from_end(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N]: how many rows of the same request come after each."""
    ends = np.cumsum(counts)
    return np.repeat(ends, counts) - 1 - np.arange(ends[-1])


@dataclass(frozen=True, slots=True)
class Head:
    """The policy's head: logits = map(last @ weight^T)."""

    weight: Tensor  # [V, H]
    logit_map: wire.LogitMap = field(default_factory=wire.LogitMap)

    def score(
        self, last_NH: Tensor, labels_N: Tensor, temperature_N: float | Tensor, top_p: float = 1.0, top_k: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(logsumexp [N], log p of the labels [N]) as `score_rows` computes them, float32. A label of -1: any."""
        return score_rows(
            last_NH,
            self.weight,
            labels_N.clamp(min=0),
            temperature=temperature_N,
            top_p=top_p,
            top_k=top_k,
            logit_map=self.logit_map,
        )

    def score_step(
        self, last_NH: Tensor, labels_N: Tensor, samplings: Sequence[RequestSampling], counts: npt.NDArray[np.int64]
    ) -> Tensor:
        """`score` of a step's rows, [2, N]: `counts` rows of each request, one after another, and how each is drawn.

        With top_p or top_k, log p is computed only for rows that may predict a generated token: for the thousands of
        rows of a prompt it would cost the engine time. So log p is NaN in all but the last rows of such a request. A
        request that was preempted computes all its tokens again at once; `assemble` takes the earlier scores.
        """
        first = samplings[0]
        if first.scored_at == 1.0 and (first.top_p, first.top_k) == _WHOLE and set(samplings) == {first}:
            return torch.stack(self.score(last_NH, labels_N, 1.0))  # most steps of most RL runs
        device = last_NH.device
        temperature_N = to_device(device, np.repeat(np.array([one.scored_at for one in samplings], np.float32), counts))
        kinds = sorted({_WHOLE, *((one.top_p, one.top_k) for one in samplings)})
        kind_N = np.repeat([kinds.index((one.top_p, one.top_k)) for one in samplings], counts)
        early_N = _from_end(counts) >= _VERIFIED
        early_N &= kind_N != kinds.index(_WHOLE)
        kind_N[early_N] = kinds.index(_WHOLE)
        scores = torch.empty(2, len(kind_N), device=device)
        for number, (top_p, top_k) in enumerate(kinds):
            found = np.flatnonzero(kind_N == number)
            rows = to_device(device, found) if len(found) < len(kind_N) else slice(None)
            if len(found):
                scored = self.score(last_NH[rows], labels_N[rows], temperature_N[rows], top_p, top_k)
                scores[:, rows] = torch.stack(scored)
        scores[1, to_device(device, np.flatnonzero(early_N))] = torch.nan
        return scores


def _with_scores(copies: HostCopies, scores: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Wait for a step's copies, and for its scores, which come later and from several ranks."""
    host = dict(copies.wait())
    host["scores"] = scores()[:, host.pop("rows")].T.contiguous()
    return host


@dataclass(slots=True)
class _Tracked:
    request: Request
    policy_version: int
    rows: int = 0
    #: Its rows of each step, on the host: `_TAKEN` in this order. The tap's thread adds them as they arrive.
    parts: list[tuple[npt.NDArray[Any], ...]] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = ()
    #: Why some did not arrive. No exception, whose traceback would keep the rows of the step.
    failure: str | None = None

    def rows_in_order(self) -> list[dict[str, Tensor]]:
        """All rows, as `assemble` takes them."""
        if self.failure is not None:
            raise RuntimeError(f"rows of a step did not arrive: {self.failure}")
        if not self.parts:
            return []
        whole = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*self.parts, strict=True)]
        tokens, scores, aux, last = (rows.view(dtype) for rows, dtype in zip(whole, self.dtypes, strict=True))
        (positions, input_ids, labels), (logsumexp, logprob) = tokens.T, scores.T
        columns = {"positions": positions, "input_ids": input_ids, "labels": labels, "logsumexp": logsumexp}
        return [columns | {"logprob": logprob, "aux": aux, "last": last}]


def _place(step: Callable[[], dict[str, Tensor]], owners: Sequence[_Tracked], counts: Sequence[int]) -> None:
    """Give each request its rows of a step, which are copied: what others leave behind must not stay with them.

    As bytes: NumPy copies a few rows in a tenth of torch's time, and has no bfloat16.
    """
    try:
        taken = step()
        dtypes = tuple(taken[name].dtype for name in _TAKEN)
        whole = [taken[name].view(torch.uint8).numpy() for name in _TAKEN]
        begin = 0
        for tracked, count in zip(owners, counts, strict=True):
            rows, begin = slice(begin, begin + count), begin + count
            tracked.dtypes = dtypes
            tracked.parts.append(tuple(part[rows].copy() for part in whole))
    except Exception as error:
        for tracked in owners:
            tracked.failure = repr(error)
        raise


def _free(tally: Tally, dropped: Iterable[_Tracked]) -> None:
    tally.add("rows", -sum(tracked.rows for tracked in dropped))


class _Sender:
    """The tap's thread: joins the rows of requests that have ended, and delivers them if the weights are the same."""

    def __init__(
        self, deliver: Callable[[Collected], None], moved: Callable[[], None], budget: TokenBudget, tally: Tally
    ) -> None:
        self.deliver, self._moved, self._budget, self._tally = deliver, moved, budget, tally
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="draftalign-tap", daemon=True)
        self._thread.start()

    def send(self, ended: list[_Tracked], unchanged: Callable[[], bool]) -> None:
        """Deliver these requests, in the thread, if the weights are `unchanged`."""
        self._tasks.put(functools.partial(self._send_all, ended, unchanged))

    def call(self, task: Callable[[], object]) -> None:
        """Call it in the thread, after what came before."""
        self._tasks.put(task)

    def close(self, timeout_seconds: float) -> None:
        """Wait until all that came was done."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)

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
            _free(self._tally, ended)

    def _send(self, tracked: _Tracked) -> None:
        try:
            collected = assemble(tracked.request, tracked.rows_in_order())
            if collected is None or not self._budget.spend(int(collected.generated.sum())):
                self._tally.add("skipped_short" if collected is None else "skipped_budget")
                return
            self.deliver(replace(collected, policy_version=tracked.policy_version))
            self._tally.add("delivered")
        except UnscoredError as error:
            self._tally.add("skipped_unscored")
            self._tally.note("unscored", f"draftalign tap: {error}")
        except Exception as error:  # noqa: BLE001 - one bad request must not end the thread
            _note(self._tally, "assemble", error)


class FeatureTap:
    """Collects a sampled fraction of an engine's requests, at most `tokens_per_minute`, and delivers whole ones.

    `deliver` and `moved` are called in the tap's own thread; the engine's calls all methods here.
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
    ) -> None:
        self.head, self.fraction, self.max_tokens = head, fraction, max_tokens
        self._rows = max(tokens_per_minute, 4 * max_tokens)
        #: Version of the rollouts that begin now; None between `cut` and `turn`, when none begin.
        self.policy_version: int | None = policy_version
        self.tally = Tally(log)
        self._budget = TokenBudget(tokens_per_minute)
        self._sender = _Sender(deliver, moved, self._budget, self.tally)
        self._weights = weights
        self._tracked: dict[str, _Tracked] = {}
        self._ended: list[_Tracked] = []

    @property
    def collected(self) -> Collection[str]:
        """The requests that are collected now: a step needs to tell of these only."""
        return self._tracked.keys()

    def begin(self, request: Request) -> None:
        """A request was admitted; decide whether to collect it."""
        if request.request_id in self._tracked or sampling_position(request.request_id, "tap") >= self.fraction:
            return
        if self.policy_version is None:
            self.tally.add("skipped_update")
            return
        if request.prompt_tokens > self.max_tokens or not self._budget.spend(request.prompt_tokens):
            self.tally.add("skipped_budget")
            return
        if self.tally["rows"] >= self._rows:
            self.tally.add("skipped_memory")
            return
        self.tally.add("begun")
        # A copy: the engine may append to its own list when a session goes on.
        self._tracked[request.request_id] = _Tracked(
            replace(request, prompt_ids=tuple(request.prompt_ids)), self.policy_version
        )

    def step(self, step: Step) -> None:
        """Take the rows of collected requests: launches work on the device, and does not wait for it."""
        if not self._tracked:
            return
        chosen = [i for i, name in enumerate(step.request_ids) if name in self._tracked]
        if not chosen:
            return
        try:
            with torch.inference_mode():
                self._take(step, chosen)
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.note("step", error)
            dropped = (self._tracked.pop(step.request_ids[i], None) for i in chosen)
            _free(self.tally, (tracked for tracked in dropped if tracked is not None))

    def end(self, request_ids: Collection[str]) -> None:
        """These requests have ended, for whatever reason."""
        if self._tracked:
            self._ended += [t for name in request_ids if (t := self._tracked.pop(name, None)) is not None]
            if self._weights is None:
                self.release()

    def release(self) -> None:
        """Send the ended requests if the weights are unchanged. Call it when a forward is about to read the weights."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        try:
            self._sender.send(ended, self._weights.look() if self._weights is not None else lambda: True)
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            _free(self.tally, ended)
            self.note("sampling the weights", error)

    def cut(self) -> None:
        """End the rollouts here, since the policy is about to change; none begins until `turn`. Reads no weights."""
        ended = [*self._ended, *self._tracked.values()]
        self.tally.add("cut", len(self._tracked))
        self._forget()
        if ended:
            self._sender.send(ended, lambda: True)

    def turn(self, policy_version: int, head: Head, ready: Callable[[], None]) -> None:
        """Go on with a policy of this version. Rollouts under way are dropped: both policies drew parts of them.

        `ready` is called in the tap's thread, when all that was collected before has been delivered.
        """
        _free(self.tally, [*self._ended, *self._tracked.values()])
        self._forget()
        self.head, self.policy_version = head, policy_version
        self._sender.call(ready)

    def close(self, timeout_seconds: float) -> None:
        """Collect nothing more; wait until what was collected has been delivered.

        A thread that is inside torch when the interpreter ends takes the whole process down with it.
        """
        self.cut()
        self._sender.close(timeout_seconds)

    def _forget(self) -> None:
        self.policy_version = None
        self._tracked.clear()
        self._ended.clear()

    def _take(self, step: Step, chosen: Sequence[int]) -> None:
        counts = step.row_counts[chosen]
        rows_N, labels_N = labelled_rows(step, chosen)
        last = step.last[rows_N]
        own = (step.positions[rows_N].long(), step.input_ids[rows_N].long(), labels_N)
        taken = {
            "tokens": torch.stack(own, dim=1),
            "aux": torch.cat([state[rows_N] for state in step.aux], dim=-1),
            "last": last,
        }
        wait: Callable[[], dict[str, Tensor]]
        if step.scores is not None:
            wait = functools.cache(functools.partial(_with_scores, HostCopies(taken | {"rows": rows_N}), step.scores))
        else:
            samplings = [self._tracked[step.request_ids[i]].request.sampling for i in chosen]
            scores = self.head.score_step(last, labels_N, samplings, counts)
            wait = HostCopies(taken | {"scores": scores.T.contiguous()}).wait
        names, rows = [step.request_ids[i] for i in chosen], counts.tolist()
        owners = [self._tracked[name] for name in names]
        self._sender.call(functools.partial(_place, wait, owners, rows))
        held, dropped, long = self.tally["rows"], list[_Tracked](), list[str]()
        for name, tracked, count in zip(names, owners, rows, strict=True):
            tracked.rows += count
            held += count
            if held > 2 * self._rows:
                held -= tracked.rows
                dropped.append(self._tracked.pop(name))
            elif tracked.rows > 4 * self.max_tokens:  # as many as may wait, rejected drafts included
                long.append(name)
        self.tally.add("rows", len(rows_N))
        if dropped:
            self.tally.add("skipped_memory", len(dropped))
            _free(self.tally, dropped)
        if long:  # sent up to here
            self.tally.add("cut_long", len(long))
            self.end(long)

    def note(self, kind: str, error: Exception) -> None:
        """Count a failure of ours; log it the first time that its kind comes up."""
        _note(self.tally, kind, error)


def _note(tally: Tally, kind: str, error: Exception) -> None:
    tally.add("failures")
    tally.note(kind, f"draftalign tap: {kind} failed, requests go uncollected: {error!r}")
