"""Takes the logits or log-probabilities that a trainer's forward makes, in place of a product with lm_head of our own.

Each scored row needs its normaliser, the logsumexp of its logits. Two things in a forward give it:

* **Logits.** Most trainers call lm_head on the final norm's output, or on a slice of it. The rows of the logits follow
  from memory: lm_head's input must be a view of the norm's output. So no value is compared, and the device need not
  wait.
* **Log-probabilities.** TRL's fused head never makes whole logits. It returns `log_probs` [B, S - 1] of the next
  tokens. The normaliser is the token's logit minus its log-probability, and that logit needs one row of lm_head. The
  temperature and labels of `log_probs` cannot be checked here: the caller vouches that they are those of the capture.

The logits of lm_head and of the model's output are also passed to `see`, which compares them with the head's.

Whether a forward makes either is known only at its end, when the head may be sharded again. So each forward is expected
to make what the one before made, and the first is scored by a product with lm_head. If a forward does not make what was
expected, its rollouts are left out, and later forwards are scored by the product.

Legend: B batch, S padded length, n positions with logits, V vocabulary, H hidden size, M rows that are scored.
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
    """Logits or log-probabilities of last states [B, S, H]: of `kept` positions of each row, from `begin` on."""

    values: Tensor  # logits [B * n, V], or log-probabilities of the next tokens [B * n]; detached
    begin: int
    kept: int  # n
    length: int  # S

    def hold(self, rows_M: npt.NDArray[np.int64]) -> bool:
        """Whether `values` has all of these rows of the flattened [B * S]."""
        position = rows_M % self.length - self.begin
        inside = (position >= 0) & (position < self.kept) & (rows_M // self.length * self.kept < len(self.values))
        return bool(inside.all())

    def at(self, rows_M: Tensor) -> Tensor:
        """The places in `values` of these rows of the flattened [B * S]."""
        return rows_M // self.length * self.kept + rows_M % self.length - self.begin


@dataclass(slots=True)
class _SeenForward:
    """What is wanted of an armed forward, and what it has made so far."""

    rows: npt.NDArray[np.int64]
    score: Callable[[OwnRows], Scores]
    see: Callable[[OwnRows, bool], None]
    is_past_norm: Callable[[], bool]
    looking: bool  # for scores; False once they are found, or cannot be
    norms: int = 0  # how often the final norm has returned the last states
    last: Tensor | None = None  # its output, the last states, until scores of them are found
    writes: int | None = None  # how often that tensor had been written to when the norm returned it
    place: OwnRows | None = None  # the rows that logits in the model's output would have; without values

    def end(self) -> None:
        """Stop looking for scores, and let go of the last states."""
        self.looking, self.last = False, None


class OwnScores(Hooked):
    """Finds `OwnRows` in an armed forward: in lm_head's output, or in `log_probs` of the output of one of `models`.

    `log_probs`: look for these too. The caller vouches that they have the capture's temperature and labels.
    """

    def __init__(self, models: Sequence[nn.Module], norm: nn.Module, lm_head: nn.Module, *, log_probs: bool) -> None:
        super().__init__()
        #: Wall time of all work.
        self.seconds = 0.0
        #: What the next forward is expected to make, so that it needs no product with lm_head.
        self.expected: Kind | None = None
        self._due: Kind | None = None  # what the armed forward is expected to make
        self._trusted = True  # every forward so far made what was expected of it
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
        """Look for scores of `rows_M` in the forward that happens inside; they count only if all rows are there.

        `rows_M`: rows of the flattened [B * S].
        `score`: called at once on logits that were expected, because trainers change them in place later.
        `see`: called with the logits of lm_head and False, then with those that a model returns and True. The model
        may have changed the latter after lm_head.
        `is_past_norm`: whether the norm's output is the last state by now. NanoChat's norm runs on the embedding first.
        """
        self.clear()
        self._forward = _SeenForward(rows_M, score, see, is_past_norm, self._trusted)
        self._due, self.expected = self.expected, None
        try:
            yield
        finally:
            self._forward = None

    def pop(self) -> Scores | OwnRows | None:
        """The scores from logits, or the log-probabilities, that were expected; None where nothing was.

        Raises the error of `score` or `see`, and RolloutError where the forward did not make what was expected.
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
        """Let go of everything from the last forward."""
        self._made = self._due = None
        self._errors = []

    def _at_norm(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        if forward is None or torch.compiler.is_compiling() or not forward.is_past_norm():
            return
        forward.norms += 1
        if forward.norms > 1:  # a second forward inside: nobody knows to which one the logits will belong
            forward.end()
            forward.place = None
        if not forward.looking or not isinstance(output, Tensor) or output.ndim < 2:
            return
        # For log-probabilities the shape is enough: the trainer may free the state's memory.
        state = output.detach()
        forward.last, forward.writes = state, writes(output)
        if self._due == "log_probs":
            forward.last = state.new_empty((*state.shape[:-1], 0))
        length = state.shape[-2]
        forward.place = OwnRows(state.new_empty((state.shape[:-1].numel(), 0)), 0, length, length)

    def _at_head(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        forward = self._forward
        if forward is not None and forward.last is not None and not torch.compiler.is_compiling():
            changed = writes(forward.last) != forward.writes  # the model changed the state in place
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
                # Log-probabilities are copied: they are read after the loss, which may change them in place.
                self._made = forward.score(found) if kind == "logits" else replace(found, values=found.values.clone())
        except Exception as error:  # noqa: BLE001 - nothing of ours is raised into the trainer's forward; pop raises it
            self._errors.append(error.with_traceback(None))  # whose frames hold the trainer's tensors
        finally:
            forward.end()  # the first call of lm_head counts
            self.seconds += time.perf_counter() - started


def _logits(last: Tensor, given: Any, output: Any) -> OwnRows | None:
    """lm_head's `output` as `OwnRows`, if `given`, its input, is a slice of the last states; else None."""
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
    """The logits that a model returned, if they have as many rows as `place`; else None."""
    if not isinstance(logits, Tensor) or hasattr(logits, "to_local") or logits.dtype not in _FLOATS or logits.ndim < 2:
        return None
    rows = logits.shape[:-1].numel()
    if rows != len(place.values) or logits.shape[-2] != place.kept or not logits.is_contiguous():
        return None
    return replace(place, values=logits.detach().view(rows, -1))


def _log_probs(last: Tensor, log_probs: Any) -> OwnRows | None:
    """`log_probs` as `OwnRows`, if it is float32 of [B, S - 1] for last states [B, S, H]; else None."""
    if not isinstance(log_probs, Tensor) or last.ndim != 3 or log_probs.dtype != torch.float32:
        return None
    B, S, _ = last.shape
    return OwnRows(log_probs.detach().reshape(-1), 0, S - 1, S) if log_probs.shape == (B, S - 1) else None
