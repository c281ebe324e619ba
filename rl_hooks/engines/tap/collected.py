"""One collected request: its rows in order as a rollout, and rollouts as a file.

Rows behind the last accepted token have the label `REJECTED`. The newest row of a position counts. Tokens in the prefix
cache have no rows; each rollout names its full prompt by its hash. The last token never goes through the target. It is
a label; its own row is zeros, which nothing reads.

Legend: N rows of a request, A aux layers, H hidden size, T tokens of a rollout.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.sending.features import as_wire, row_bytes
from rl_hooks.sending.tally import Tally

log = logging.getLogger("draftalign.tap")

REJECTED: Final = -1
#: What an engine without requests has collected waits so long for others to share its file.
_SOON_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How a request's tokens were sampled. The requests of one file have the same."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def scored_at(self) -> float:
        """The temperature of log p: greedy (0) is scored at 1, as the rollout file says."""
        return self.temperature or 1.0

    @property
    def truncated(self) -> bool:
        """Whether top_p or top_k cut tokens off."""
        return self.top_p < 1 or self.top_k > 0


#: Makes a `RequestSampling`; one object for equal ones: a step compares those of all its requests.
shared_sampling: Final = functools.lru_cache(RequestSampling)


@dataclass(frozen=True, slots=True)
class Request:
    """The facts about a request that is collected."""

    request_id: str
    #: The whole prompt, with the part that the prefix cache holds.
    prompt_ids: Sequence[int]
    sampling: RequestSampling
    #: Generation ends with the first of these, or after `max_tokens`: the engine emits no token after that.
    stop_ids: frozenset[int]
    max_tokens: int | None

    @property
    def prompt_tokens(self) -> int:
        """Length of the full prompt."""
        return len(self.prompt_ids)


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

    @property
    def row_bytes(self) -> int:
        """Bytes of one of its rows in a file, at most."""
        return row_bytes(self.aux.shape[1] // self.last.shape[1], self.last.shape[1], "bfloat16")

    def within(self, bytes_: float) -> Collected | None:
        """Its first tokens, as many as fit into a file of that size. None: none of these was generated."""
        tokens = int(min(bytes_ / self.row_bytes, len(self.input_ids)))
        if tokens == len(self.input_ids):
            return self
        if not self.generated[:tokens].any():
            return None
        names = ("input_ids", "generated", "logprobs", "aux", "last", "logsumexp")
        return replace(self, **{name: getattr(self, name)[:tokens] for name in names})


class UnscoredError(ValueError):
    """A request has rows whose log p is not known."""


def assemble(
    request: Request, chunks: Sequence[Mapping[str, Tensor]], *, answers_only: bool = False
) -> Collected | None:
    """Put a request's rows in order; None when no token was generated, or rows are missing before it.

    `answers_only`: of a prompt's rows, only the last is scored. The logsumexp of the others is NaN.
    """
    if not chunks:
        return None
    rows = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    positions = rows["positions"].numpy()
    first = int(positions.min())
    newest = np.full(int(positions.max()) - first + 1, -1)
    newest[positions - first] = np.arange(len(positions))  # NumPy assigns in order: the last one stays
    labels = rows["labels"].numpy()
    gaps = np.flatnonzero((newest < 0) | (labels[newest] == REJECTED))
    held = newest[: int(gaps[0])] if len(gaps) else newest
    prompt = request.prompt_tokens - first  # prompt tokens that have rows
    if prompt < 1 or len(held) < prompt:
        return None
    text = np.append(rows["input_ids"].numpy()[held], labels[held[-1]])
    tokens = text[: prompt + _generated_tokens(text[prompt:].tolist(), request)]
    T = len(tokens)
    generated = np.arange(T) >= prompt
    if T - prompt < 1:
        return None
    order = torch.from_numpy(held[:T].copy())
    logprob = rows["logprob"].numpy()
    # A row's score counts where its label is the token that follows. Where a chunk of a prompt ends it is not: engines
    # draw a token there and discard it, also inside the answer, which a preempted request computes again in chunks.
    # Such a row, and one that was not scored, has the score of the newest row before it that has one.
    follows = np.full(len(newest), REJECTED, labels.dtype)
    follows[: len(held)] = text[1:]
    known = np.flatnonzero(~np.isnan(logprob) & (labels != REJECTED) & (labels == follows[positions - first]))
    scored, is_scored = newest.copy(), np.zeros(len(newest), np.bool_)
    scored[positions[known] - first], is_scored[positions[known] - first] = known, True
    logprobs = np.zeros(T, dtype=np.float32)
    logprobs[1:] = np.where(is_scored, logprob[scored], np.nan)[: T - 1]
    logsumexp = rows["logsumexp"][torch.from_numpy(scored[: len(order)]) if answers_only else order]
    needed = logsumexp[prompt - 1 : T - 1] if answers_only else logsumexp
    if not bool(needed.isfinite().all()) or np.isnan(logprobs[generated]).any():
        raise UnscoredError("a request is dropped, some of its rows were not scored: a rank failed, or they disagreed")
    return Collected(
        request=request,
        input_ids=tokens.astype(np.int32),
        generated=generated,
        logprobs=np.where(generated, logprobs, 0.0).astype(np.float32),
        aux=_filled(rows["aux"][order], T, 0.0),
        last=_filled(rows["last"][order], T, 0.0),
        logsumexp=_filled(logsumexp, T, 1.0),
        first_position=first,
    )


def _generated_tokens(tokens: Sequence[int], request: Request) -> int:
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
    told: bool = False,
) -> tuple[list[bytes | memoryview], str]:
    """Lay out rollouts of one policy version and one kind of sampling as a file; returns its parts and the batch id.

    `source`: a name that only this process of an engine has. Rollout ids are made of it, of the policy version, the
    request id and the tokens: clients use request ids again, in a session or for the next policy. `told`: the file says
    that the features' own weights drew all tokens; only for a service that takes `versions_behind`.
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
    }
    if told:
        tensors["versions_behind"] = wire.Tensor.of(np.zeros(sum(lengths), np.int32), "I32")
    if not bool(logsumexp.isnan().any()):  # else the worker computes it
        tensors["logsumexp"] = as_wire(logsumexp.float())
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


def _filled(rows: Tensor, length: int, value: float) -> Tensor:
    """`rows`, and a row of `value` for the last token if it has none."""
    missing = length - len(rows)
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)]) if missing > 0 else rows


def _tokens(batch: Sequence[Collected]) -> int:
    return sum(len(one.input_ids) for one in batch)


class Batcher:
    """Gathers rollouts of one policy version and kind of sampling until they fill a file.

    `add` is for one thread, `flush` for any. `file_bytes`, `rollout_bytes`: those of `RolloutSender`. `tally` counts
    rollouts that are cut (`cut_long`) and left out (`skipped_long`).
    """

    def __init__(
        self,
        send: Callable[[Sequence[Collected]], None],
        *,
        tokens: int = 4096,
        seconds: float = 5.0,
        file_bytes: float = math.inf,
        rollout_bytes: float = math.inf,
    ) -> None:
        self._send, self._tokens, self._seconds = send, tokens, seconds
        self._file_bytes, self._rollout_bytes = file_bytes, rollout_bytes
        self.tally = Tally(log)
        self._waiting: dict[tuple[int, RequestSampling], list[Collected]] = {}
        self._since = math.inf
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._clock, name="draftalign-tap-batcher", daemon=True)
        self._thread.start()

    def add(self, collected: Collected) -> None:
        """Take one rollout in, or the beginning that a file holds; sends when those of its kind fill a file."""
        kept = collected.within(self._rollout_bytes)
        if kept is not collected:
            self.tally.add("skipped_long" if kept is None else "cut_long")
        if kept is None:
            return
        with self._lock:
            name = (kept.policy_version, kept.request.sampling)
            if (_tokens(self._waiting.get(name, ())) + len(kept.input_ids)) * kept.row_bytes > self._file_bytes:
                self._send_kind(name)
            self._waiting.setdefault(name, []).append(kept)
            self._since = min(self._since, time.monotonic())
            if _tokens(self._waiting[name]) >= self._tokens:
                self._send_kind(name)

    def _send_kind(self, name: tuple[int, RequestSampling]) -> None:
        if batch := self._waiting.pop(name, None):
            self._send(batch)

    def soon(self) -> None:
        """Nothing more is to come for now: send what waits within a second or so."""
        with self._lock:
            if self._waiting:
                self._since = min(self._since, time.monotonic() - self._seconds + _SOON_SECONDS)

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
