"""What the trainer's forward computes of its distribution anyway: with it, normalisers need no product with lm_head.

* **Logits.** Most trainers call lm_head on the final norm's output or on a slice of it. Which rows they are of is told
  by memory: the input must be a view of that output. So no value is compared, and the device need not wait.
* **Log-probabilities.** TRL's fused head never makes whole logits, and returns `log_probs` [B, S - 1] of the next
  tokens. Normaliser = logit of the token - its log-probability; that logit is one row of lm_head. Temperature and
  labels of `log_probs` cannot be checked here: whoever asks for them vouches that they are those of the capture.

Logits of lm_head, and those that a model returns, are also shown to `see`, which compares them with the head's.

What a forward gives is known only after it, when the head may be sharded again. So each forward is expected to give
what the one before gave; the first is scored by the product with lm_head. Where one gives something else, its rollouts
are left out, and later ones are scored by the product.

Legend: B batch, S padded length, n positions that logits are of, V vocabulary, H hidden size, M rows that are scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rl_hooks.errors import RolloutError
from rl_hooks.trainer.capture import Hooked, ModuleHook, writes

#: (normaliser, log p of the next token) of each row of a batch, [N] each.
Scores = tuple[Tensor, Tensor]
Kind = Literal["logits", "log_probs"]
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Logits or log-probabilities of the last states [B, S, H]: of positions `begin` to `begin + kept` of each row."""

    values: Tensor  # logits [B * n, V], or log-probabilities of the next tokens [B * n]; detached
    begin: int
    kept: int  # n
    length: int  # S

    def hold(self, rows_M: npt.NDArray[np.int64]) -> bool:
        """Whether these rows of the flattened [B * S] are among them."""
        position = rows_M % self.length - self.begin
        inside = (position >= 0) & (position < self.kept) & (rows_M // self.length * self.kept < len(self.values))
        return bool(inside.all())

    def at(self, rows_M: Tensor) -> Tensor:
        """Where in `values` these rows of the flattened [B * S] are."""
        return rows_M // self.length * self.kept + rows_M % self.length - self.begin


@dataclass(slots=True)
class _SeenForward:
    """What an armed forward is asked for, and what was seen of it so far."""

    rows: npt.NDArray[np.int64]
    score: Callable[[OwnRows], Scores]
    see: Callable[[OwnRows, bool], None]
    is_past_norm: Callable[[], bool]
    looking: bool  # until its scores were found, or cannot be
    norms: int = 0  # last states
    last: Tensor | None = None  # the last states, until rows of them are found
    writes: int | None = None  # how often these had been written to when the norm returned them
    place: OwnRows | None = None  # of which rows returned logits would be; without values

    def end(self) -> None:
        """Look for no scores any more, and hold no state."""
        self.looking, self.last = False, None


class OwnScores(Hooked):
    """Finds `OwnRows` in an armed forward: in lm_head's output, or in `log_probs` of what one of `models` returns.

    `log_probs`: the caller vouches that they are of the capture's temperature and labels.
    """

    def __init__(self, models: Sequence[nn.Module], norm: nn.Module, lm_head: nn.Module, *, log_probs: bool) -> None:
        super().__init__()
        #: Wall time of all work.
        self.seconds = 0.0
        #: What the next forward is expected to give: it does not pay to make the product for it.
        self.expected: Kind | None = None
        self._due: Kind | None = None  # what this one is expected to give
        self._trusted = True  # no forward did otherwise than the one before
        self._log_probs = log_probs
        self._forward: _SeenForward | None = None  # while one is armed
        self._made: Scores | OwnRows | None = None
        self._errors: list[Exception] = []
        ends = [(model, self._at_end) for model in dict.fromkeys(models)]
        for module, call in ((norm, self._at_norm), (lm_head, self._at_head), *ends):
            self._handles.append(module.register_forward_hook(ModuleHook(call)))

    @contextmanager
    def armed(
        self,
        rows_M: npt.NDArray[np.int64],
        score: Callable[[OwnRows], Scores],
        see: Callable[[OwnRows, bool], None],
        is_past_norm: Callable[[], bool],
    ) -> Iterator[None]:
        """Look for them in the forward that happens inside. `rows_M`: of the flattened [B * S], all must be there.

        `score` is called on logits at once, where they were expected: trainers change them in place later.
        `see` is shown lm_head's output, then what a model returned, with True: mapped by what it does after lm_head.
        `is_past_norm`: whether the norm's output is the last state by now (NanoChat's runs on the embedding first).
        """
        self.clear()
        self._forward = _SeenForward(rows_M, score, see, is_past_norm, self._trusted)
        self._due, self.expected = self.expected, None
        try:
            yield
        finally:
            self._forward = None

    def pop(self) -> Scores | OwnRows | None:
        """Scores of logits, or log-probabilities, where they were expected.

        Raises the error of `score`, and RolloutError where the forward did otherwise than expected.
        """
        made, errors, missed = self._made, self._errors, self._due is not None and self._made is None
        self.clear()
        if errors:
            raise errors.pop()  # as in `FeatureCapture.pop`
        if missed:
            self._trusted, self.expected = False, None
            raise RolloutError(
                "the forward made no logits or log-probabilities of all generated tokens, as the one before did: its "
                "rollouts are left out, and the next ones are scored with lm_head"
            )
        return made

    def clear(self) -> None:
        """Hold nothing of a forward any longer."""
        self._made = self._due = None
        self._errors = []

    def _at_norm(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        if forward is None or torch.compiler.is_compiling() or not forward.is_past_norm():
            return
        forward.norms += 1
        if forward.norms > 1:  # of another forward: whose the logits or log-probabilities are can't be told
            forward.end()
            forward.place = None
        if not forward.looking or not isinstance(output, Tensor) or output.ndim < 2:
            return
        # Where log-probabilities are expected its shape is enough, and its memory stays the trainer's to free.
        state = output.detach()
        forward.last, forward.writes = state, writes(output)
        if self._due == "log_probs":
            forward.last = state.new_empty((*state.shape[:-1], 0))
        length = state.shape[-2]
        forward.place = OwnRows(state.new_empty((state.shape[:-1].numel(), 0)), 0, length, length)

    def _at_head(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        if forward is not None and forward.last is not None and not torch.compiler.is_compiling():
            changed = writes(forward.last) != forward.writes  # by the model, in place
            given = args[0] if args and not changed else None
            self._look(forward, "logits", partial(_logits, forward.last, given, output))

    def _at_end(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        if forward is None or torch.compiler.is_compiling():
            return
        place, forward.place = forward.place, None
        if place is not None:
            try:
                returned = _returned(place, getattr(output, "logits", None))
                if returned is not None and returned.hold(forward.rows):
                    forward.see(returned, True)
            except Exception as error:  # noqa: BLE001 - as in `_look`
                self._errors.append(error.with_traceback(None))
        if self._log_probs and forward.last is not None:
            self._look(forward, "log_probs", partial(_log_probs, forward.last, getattr(output, "log_probs", None)))

    def _look(self, forward: _SeenForward, kind: Kind, find: Callable[[], OwnRows | None]) -> None:
        started = time.perf_counter()
        try:
            found = find()
            if found is None or not found.hold(forward.rows):
                return
            self.expected = kind
            if kind == "logits":
                forward.place = replace(found, values=found.values.new_empty((len(found.values), 0)))
                forward.see(found, False)
            if self._due == kind:
                # A copy: they are read after the loss, which may change them in place.
                self._made = forward.score(found) if kind == "logits" else replace(found, values=found.values.clone())
        except Exception as error:  # noqa: BLE001 - nothing of ours is raised into the trainer's forward; pop raises it
            self._errors.append(error.with_traceback(None))  # whose frames hold the trainer's tensors
        finally:
            forward.end()  # the first call of lm_head counts
            self.seconds += time.perf_counter() - started


def _logits(last: Tensor, given: Any, output: Any) -> OwnRows | None:
    """The logits that lm_head made of `given`, where that is a slice of the last states; None where it is none."""
    if not all(isinstance(one, Tensor) and not hasattr(one, "to_local") for one in (last, given, output)):
        return None
    if output.shape[:-1] != given.shape[:-1] or output.dtype not in _FLOATS:
        return None
    length, H = last.shape[-2:]
    same = given.untyped_storage().data_ptr() == last.untyped_storage().data_ptr() and last.is_contiguous()
    if not same or given.ndim not in (2, 3) or given.shape[-1] != H or given.stride(-1) != 1:
        return None
    shape, strides = (1, *given.shape)[-3:-1], (length * H, *given.stride())[-3:-1]
    begin, odd = divmod(int(given.storage_offset() - last.storage_offset()), H)
    rows = last.numel() // (length * H)
    in_step = (shape[0] == 1 or strides[0] == length * H) and (shape[1] == 1 or strides[1] == H)
    if given.ndim == 2 and rows > 1:  # [B * S, H]: as one long row
        length, rows = length * rows, 1
    if odd or not in_step or shape[0] != rows or begin < 0 or begin + shape[1] > length:
        return None
    return OwnRows(output.detach().reshape(-1, output.shape[-1]), begin, shape[1], length)


def _returned(place: OwnRows, logits: Any) -> OwnRows | None:
    """The logits that a model returned, where they are of as many rows as at that place."""
    if not isinstance(logits, Tensor) or hasattr(logits, "to_local") or logits.dtype not in _FLOATS or logits.ndim < 2:
        return None
    rows = logits.shape[:-1].numel()
    if rows != len(place.values) or logits.shape[-2] != place.kept or not logits.is_contiguous():
        return None
    return replace(place, values=logits.detach().view(rows, -1))


def _log_probs(last: Tensor, log_probs: Any) -> OwnRows | None:
    """`log_probs` [B, S - 1] of the tokens after these last states [B, S, H]; None where they are something else."""
    if not isinstance(log_probs, Tensor) or last.ndim != 3 or log_probs.dtype != torch.float32:
        return None
    B, S, _ = last.shape
    return OwnRows(log_probs.detach().reshape(-1), 0, S - 1, S) if log_probs.shape == (B, S - 1) else None
