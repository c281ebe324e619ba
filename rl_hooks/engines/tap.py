"""Features of live requests, collected step by step inside an inference engine, and sent as rollout files.

Engine-independent: an adapter (`rl_hooks.engines.vllm.tap`) describes each step as a `Step`, and says when requests
begin and end. Each step starts to copy its rows to the host, and does not wait for the copy: only the device knows yet
which drafts were rejected. The rows of a request are joined when it has ended.

Invariants
* The newest row of a position counts. The next step replaces the row of a rejected draft; a preempted request computes
  rows twice. Rows behind the last accepted token have the label -1.
* Only whole requests are sent, from their first computed position on. Tokens in the prefix cache have no rows; each
  rollout names its full prompt by its hash.
* Every rollout is of one policy version. When the policy is about to change, `cut` ends the rollouts that are under
  way: what the old weights drew is sent, what the new ones add is not collected. With `weights`, a request is sent
  after its end, and only if the weights are still those of its version; `moved` is called where they are not.
* The last token never goes through the target. It is a label; its own row is zeros, which nothing reads.
* Host memory is bounded: beyond `rows` of all requests together none begins, and beyond twice as many those that add
  to them are dropped.
* No failure of ours reaches the engine: it is counted and logged once, and that request is not collected.

Legend: N rows taken in a step, A aux layers, H hidden size, V vocabulary, T tokens of a rollout.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.engines.policy_watch import WeightSample
from rl_hooks.sending.copies import HostCopies
from rl_hooks.sending.features import as_wire, score_rows
from rl_hooks.sending.sampling import TokenBudget, sampling_position
from rl_hooks.sending.tally import Tally

log = logging.getLogger("draftalign.tap")

#: Longest prompt that is collected.
MAX_TOKENS: Final = 8192
_REJECTED: Final = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens were sampled. The requests of one file have the same."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def scored_at(self) -> float:
        """The temperature of log p: greedy (0) is scored at 1, as the rollout file says."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """The facts about a request that is collected."""

    request_id: str
    #: The whole prompt, with the part that the prefix cache holds.
    prompt_ids: Sequence[int]
    sampling: Sampling
    #: Generation ends with the first of these, or after `max_tokens`; engines emit no token behind that.
    stop_ids: frozenset[int]
    max_tokens: int | None

    @property
    def prompt_tokens(self) -> int:
        """Length of the full prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the target. Tensors on its device; `first_rows` and `row_counts` on the host, one per request."""

    request_ids: Sequence[str]
    first_rows: npt.NDArray[np.int64]
    row_counts: npt.NDArray[np.int64]
    input_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    aux: Sequence[Tensor]  # A tensors [rows, H], entering the aux layers
    last: Tensor  # [rows, H], after the final norm
    rejected: Tensor  # [requests]: how many of its last rows hold rejected drafts
    last_sampled: Tensor  # [requests]: the token that follows the last accepted row
    #: Where the head is split over ranks: waits for (logsumexp, log p of the label by `labelled_rows`) [2, rows] on the
    #: host, NaN where they are unknown. For the tap's thread.
    scores: Callable[[], Tensor] | None = None


def labelled_rows(step: Step, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows [N], labels [N]) of the requests at these places: the next token of each row, -1 behind the accepted."""
    device, counts = step.last.device, step.row_counts[chosen]
    rows = np.concatenate([np.arange(step.first_rows[i], step.first_rows[i] + step.row_counts[i]) for i in chosen])
    from_end = np.concatenate([np.arange(n - 1, -1, -1) for n in counts])
    rows_N, owner_N = _to(device, rows), _to(device, np.repeat(np.asarray(chosen), counts))
    behind_N = _to(device, from_end) - step.rejected[owner_N]  # 0: the last accepted row; below: rejected
    following = step.input_ids[(rows_N + 1).clamp(max=len(step.input_ids) - 1)].long()
    labels = torch.where(behind_N == 0, step.last_sampled[owner_N].long(), following)
    return rows_N, torch.where(behind_N < 0, torch.full_like(labels, _REJECTED), labels)


@dataclass(frozen=True, slots=True)
class Head:
    """The policy's head: logits = map(last @ weight^T)."""

    weight: Tensor  # [V, H]
    logit_map: wire.LogitMap = field(default_factory=wire.LogitMap)

    def score(self, last_NH: Tensor, labels_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        """(logsumexp [N], log p of the labels [N]) of softmax(logits / temperature), float32. A label of -1: any."""
        labels = labels_N.clamp(min=0)
        return score_rows(last_NH, self.weight, labels, temperature=temperature_N, logit_map=self.logit_map)


class _Scored:
    """Copies of a step whose scores come from several ranks, later."""

    def __init__(self, copies: HostCopies, scores: Callable[[], Tensor]) -> None:
        self._copies, self._scores = copies, scores
        self._host: dict[str, Tensor] | None = None

    def wait(self) -> dict[str, Tensor]:
        if self._host is None:
            host = dict(self._copies.wait())
            host["logsumexp"], host["logprob"] = self._scores()[:, host.pop("rows")]
            self._host = host
        return self._host


class _Chunk:
    """Rows of one request from one step, on their way to the host. Its methods are for the tap's thread."""

    def __init__(self, copies: HostCopies | _Scored, rows: slice) -> None:
        self._step: HostCopies | _Scored | None = copies
        self._rows = rows
        self._own: dict[str, Tensor] = {}

    def detach(self) -> None:
        """Keep the request's own rows only: those of its whole step would stay as long as its slowest request."""
        if self._step is not None:
            self._own = {name: tensor[self._rows].clone() for name, tensor in self._step.wait().items()}
            self._step = None

    def host(self) -> dict[str, Tensor]:
        self.detach()
        return self._own


def _detach(chunks: Iterable[_Chunk]) -> None:
    for chunk in chunks:
        chunk.detach()


@dataclass(slots=True)
class _Tracked:
    request: Request
    policy_version: int
    chunks: list[_Chunk] = field(default_factory=list)
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """One rollout: T tokens, T rows (the last one zeros where the engine never computed it)."""

    request: Request
    input_ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    aux: Tensor  # [T, A * H]
    last: Tensor  # [T, H]
    logsumexp: Tensor  # [T]
    first_position: int
    policy_version: int = 0


class FeatureTap:
    """Collects a sampled fraction of an engine's requests, at most `tokens_per_minute`, and delivers whole ones.

    `deliver` is called in the tap's own thread. `begin`, `step`, `end` and `release` are called by the engine's.
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
        #: Of what is begun now; None between `cut` and `turn`, when nothing is.
        self.policy_version: int | None = policy_version
        self.tally = Tally(log)
        self._budget = TokenBudget(tokens_per_minute)
        self._deliver = deliver
        self._weights, self._moved = weights, moved
        self._tracked: dict[str, _Tracked] = {}
        self._ended: list[_Tracked] = []
        self._finished: queue.SimpleQueue[tuple[list[_Tracked], Callable[[], bool]] | Callable[[], None] | None]
        self._finished = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="draftalign-tap", daemon=True)
        self._thread.start()

    # --- the engine's thread
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
            self._free(t for i in chosen if (t := self._tracked.pop(step.request_ids[i], None)) is not None)

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
            self._finished.put((ended, self._weights.look() if self._weights is not None else lambda: True))
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self._free(ended)
            self.note("sampling the weights", error)

    def cut(self) -> None:
        """The policy is about to change: rollouts end here, and none begins until `turn`. Reads no weights."""
        ended = [*self._ended, *self._tracked.values()]
        self.tally.add("cut", len(self._tracked))
        self._forget()
        if ended:
            self._finished.put((ended, lambda: True))

    def turn(self, policy_version: int, head: Head, ready: Callable[[], None]) -> None:
        """The policy is of this version from now on. What is still under way is dropped: either policy drew it.

        `ready` is called in the tap's thread, when all that was collected before has been delivered.
        """
        self._free([*self._ended, *self._tracked.values()])
        self._forget()
        self.head, self.policy_version = head, policy_version
        self._finished.put(ready)

    def close(self, timeout_seconds: float) -> None:
        """Collect nothing more; wait until what was collected has been delivered.

        A thread that is inside torch when the interpreter ends takes the whole process down with it.
        """
        self.cut()
        self._finished.put(None)
        self._thread.join(timeout_seconds)

    def _forget(self) -> None:
        self.policy_version = None
        self._tracked.clear()
        self._ended.clear()

    def _take(self, step: Step, chosen: Sequence[int]) -> None:
        counts = step.row_counts[chosen]
        rows_N, labels = labelled_rows(step, chosen)
        last = step.last[rows_N]
        taken = {
            "positions": step.positions[rows_N].long(),
            "input_ids": step.input_ids[rows_N].long(),
            "labels": labels,
            "aux": torch.cat([state[rows_N] for state in step.aux], dim=-1),
            "last": last,
        }
        copies: HostCopies | _Scored
        if step.scores is not None:
            copies = _Scored(HostCopies(taken | {"rows": rows_N}), step.scores)
        else:
            temperature = np.repeat([self._temperature(step.request_ids[i]) for i in chosen], counts)
            scores = self.head.score(last, labels, _to(last.device, temperature.astype(np.float32)))
            copies = HostCopies(taken | dict(zip(("logsumexp", "logprob"), scores, strict=True)))
        ends = np.cumsum(counts).tolist()
        chunks = [_Chunk(copies, slice(end - n, end)) for n, end in zip(counts.tolist(), ends, strict=True)]
        for i, chunk, count in zip(chosen, chunks, counts.tolist(), strict=True):
            self._append(step.request_ids[i], chunk, count)
        self._finished.put(lambda: _detach(chunks))

    def _append(self, name: str, chunk: _Chunk, rows: int) -> None:
        tracked = self._tracked[name]
        tracked.chunks.append(chunk)
        tracked.rows += rows
        self.tally.add("rows", rows)
        long = tracked.rows > 4 * self.max_tokens  # with all its rejected drafts
        if long or self.tally["rows"] > 2 * self._rows:
            self.tally.add("skipped_long" if long else "skipped_memory")
            self._free([self._tracked.pop(name)])

    def _free(self, dropped: Iterable[_Tracked]) -> None:
        self.tally.add("rows", -sum(tracked.rows for tracked in dropped))

    def _temperature(self, name: str) -> float:
        return self._tracked[name].request.sampling.scored_at

    # --- the tap's thread
    def _work(self) -> None:
        while (task := self._finished.get()) is not None:
            self._do(task)
            del task  # its rows must not stay until the next one comes

    def _do(self, task: tuple[list[_Tracked], Callable[[], bool]] | Callable[[], None]) -> None:
        ended = [] if callable(task) else task[0]
        try:
            if callable(task):
                task()
            elif task[1]():
                for tracked in ended:
                    self._send(tracked)
            else:
                self.tally.add("skipped_moved", len(ended))
                self._moved()
        except Exception as error:  # noqa: BLE001 - one failed comparison must not end the thread
            self.note("comparing the weights", error)
        finally:
            self._free(ended)

    def _send(self, tracked: _Tracked) -> None:
        try:
            collected = assemble(tracked.request, [chunk.host() for chunk in tracked.chunks])
            if collected is None or not self._budget.spend(int(collected.generated.sum())):
                self.tally.add("skipped_short" if collected is None else "skipped_budget")
                return
            self._deliver(replace(collected, policy_version=tracked.policy_version))
            self.tally.add("delivered")
        except UnscoredError as error:
            self.tally.add("skipped_unscored")
            self.tally.note("unscored", f"draftalign tap: {error}")
        except Exception as error:  # noqa: BLE001 - one bad request must not end the thread
            self.note("assemble", error)

    def note(self, kind: str, error: Exception) -> None:
        """Count a failure of ours; log it the first time that its kind comes up."""
        self.tally.add("failures")
        self.tally.note(kind, f"draftalign tap: {kind} failed, requests go uncollected: {error!r}")


class UnscoredError(ValueError):
    """A request has rows whose log p is not known."""


def assemble(request: Request, chunks: Sequence[Mapping[str, Tensor]]) -> Collected | None:
    """Put a request's rows in order; None when no token was generated, or rows are missing before it."""
    if not chunks:
        return None
    rows = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    positions = rows["positions"].numpy()
    first = int(positions.min())
    newest = np.full(int(positions.max()) - first + 1, -1)
    newest[positions - first] = np.arange(len(positions))  # NumPy assigns in order: the last one stays
    labels = rows["labels"].numpy()
    gaps = np.flatnonzero((newest < 0) | (labels[newest] == _REJECTED))
    held = newest[: int(gaps[0])] if len(gaps) else newest
    prompt = request.prompt_tokens - first  # prompt tokens that have rows
    if prompt < 1 or len(held) < prompt:
        return None
    tokens = np.append(rows["input_ids"].numpy()[held], labels[held[-1]])
    tokens = tokens[: prompt + generated_tokens(tokens[prompt:].tolist(), request)]
    T = len(tokens)
    generated = np.arange(T) >= prompt
    if T - prompt < 1:
        return None
    order = torch.from_numpy(held[:T].copy())
    if not bool(rows["logsumexp"][order].isfinite().all()):
        raise UnscoredError("a request is dropped, some of its rows were not scored: a rank failed, or they disagreed")
    logprobs = np.zeros(T, dtype=np.float32)
    logprobs[1:] = rows["logprob"][order].numpy()[: T - 1]
    return Collected(
        request=request,
        input_ids=tokens.astype(np.int32),
        generated=generated,
        logprobs=np.where(generated, logprobs, 0.0).astype(np.float32),
        aux=_filled(rows["aux"][order], T, 0.0),
        last=_filled(rows["last"][order], T, 0.0),
        logsumexp=_filled(rows["logsumexp"][order], T, 1.0),
        first_position=first,
    )


def generated_tokens(tokens: Sequence[int], request: Request) -> int:
    """How many of these the engine emitted: up to the first stop token, and at most `max_tokens`."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
    return end if request.max_tokens is None else min(end, request.max_tokens)


def rollout_file(
    batch: Sequence[Collected],
    *,
    run: str,
    target_fingerprint: str,
    aux_layers: Sequence[int],
    source: str = "",
    last_rows: wire.LastRows = "all",
) -> tuple[list[bytes | memoryview], str]:
    """Lay out rollouts of one policy version and one kind of sampling as a file; returns its parts and the batch id.

    `source`: unique to the engine's process, whose request ids may be another's too. A client may use a request id
    again, in a session or for the next policy; a rollout's id is its own.
    """
    lengths = [len(one.input_ids) for one in batch]
    policy_version = batch[0].policy_version
    of_engine = f"{run}/{source}/{policy_version}"
    names = [
        hashlib.sha256(f"{of_engine}/{one.request.request_id}/".encode() + one.input_ids.tobytes()).hexdigest()[:24]
        for one in batch
    ]
    generated = np.concatenate([one.generated for one in batch])
    last, logsumexp = torch.cat([one.last for one in batch]), torch.cat([one.logsumexp for one in batch])
    if last_rows == "predicting":
        rows = torch.from_numpy(wire.predicting_rows(generated))
        last, logsumexp = last[rows], logsumexp[rows]
    tensors = {
        "input_ids": wire.Tensor.of(np.concatenate([one.input_ids for one in batch]), "I32"),
        "cu_seqlens": wire.Tensor.of(np.cumsum([0, *lengths], dtype=np.int32), "I32"),
        "loss_mask": wire.Tensor.of(generated.astype(np.uint8), "U8"),
        "logprobs": wire.Tensor.of(np.concatenate([one.logprobs for one in batch]), "F32"),
        "aux_hidden": as_wire(torch.cat([one.aux for one in batch]).to(torch.bfloat16)),
        "last_hidden": as_wire(last.to(torch.bfloat16)),
        "logsumexp": as_wire(logsumexp.float()),
    }
    sampling = batch[0].request.sampling
    metadata = wire.rollout_metadata(
        run=run,
        policy_version=policy_version,
        rollout_ids=names,
        target_fingerprint=target_fingerprint,
        aux_layers=aux_layers,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        prompt_hashes=[wire.prompt_hash(one.request.prompt_ids) for one in batch],
        last_rows=last_rows,
        extra={"source": "engine", "first_positions": str([one.first_position for one in batch])},
    )
    return wire.encode(tensors, metadata), wire.batch_id(run, policy_version, names)


class Batcher:
    """Gathers rollouts of one policy version and kind of sampling until they fill a file.

    `add` is for one thread, `flush` for any.
    """

    def __init__(
        self, send: Callable[[Sequence[Collected]], None], *, tokens: int = 4096, seconds: float = 5.0
    ) -> None:
        self._send, self._tokens, self._seconds = send, tokens, seconds
        self._waiting: dict[tuple[int, Sampling], list[Collected]] = {}
        self._since = math.inf
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._clock, name="draftalign-tap-batcher", daemon=True)
        self._thread.start()

    def add(self, collected: Collected) -> None:
        """Take one rollout in; sends when those of its kind have enough tokens."""
        with self._lock:
            name = (collected.policy_version, collected.request.sampling)
            kind = self._waiting.setdefault(name, [])
            kind.append(collected)
            self._since = min(self._since, time.monotonic())
            if sum(len(one.input_ids) for one in kind) >= self._tokens:
                self._send(self._waiting.pop(name))

    def flush(self) -> None:
        """Send everything that waits."""
        with self._lock:
            waiting, self._waiting, self._since = self._waiting, {}, math.inf
            for batch in waiting.values():
                self._send(batch)

    def close(self, timeout_seconds: float) -> None:
        """Send everything that waits, and end the thread."""
        self._closed.set()
        self._thread.join(timeout_seconds)
        self.flush()

    def _clock(self) -> None:
        while not self._closed.wait(min(self._seconds, 1.0) / 2):
            if time.monotonic() - self._since > self._seconds:
                try:
                    self.flush()
                except Exception as error:  # noqa: BLE001 - one bad batch must not end the thread
                    log.warning("draftalign tap: a batch was not sent: %r", error)


def _to(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _filled(rows: Tensor, length: int, value: float) -> Tensor:
    """`rows`, and a row of `value` for the last token if it has none."""
    missing = length - len(rows)
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)]) if missing > 0 else rows
