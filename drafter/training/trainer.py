"""The drafter's trainer: float32 masters, one global denominator per optimizer step, exact resume.

One `step` is one optimizer window: gradients of all its batches are summed and divided by the response tokens of the
whole window, so how rollouts are cut into batches changes nothing. A window whose loss or gradient is not finite
changes no parameter and no optimizer state; the report says so.

State on disk is safetensors and JSON; the parameters are in the drafter's own files. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.errors import CheckpointError
from drafter.model.draft_model import DraftModel
from drafter.policy import Policy
from drafter.training.loss import DraftLoss, draft_loss
from drafter.training.optimizer import HEAD, Method, Optimizer
from drafter.training.ranks import ALONE, Ranks
from drafter.training.target import DraftTarget, draft_target
from drafter.unroll.plan import Plan

log = logging.getLogger("draftalign.drafter")

_FORMAT = "draftalign.trainer.v2"
_DOCUMENT = "trainer.json"
_MOMENTS = "moments.safetensors"
_COUNTERS = ("windows", "warm_windows", "skipped_windows", "tokens_trained")


@dataclass(frozen=True)
class TrainConfig:
    """How to train; `service.settings` checks what people set of it.

    The learning rate is per optimizer window; the loss is per response token of that window.
    """

    steps_ahead: int = 4  # K
    learning_rate: float = 1e-4
    warmup_windows: int = 0  # learning rate rises linearly over these
    weight_decay: float = 0.0  # on matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    epsilon: float = 1e-8
    grad_clip: float = 0.5  # total norm; 0 turns clipping off
    step_decay: float = 0.8  # step j weighs step_decay**j
    optimizer: Method = "muon"  # of matrices; `drafter.training.optimizer`
    train_lm_head: bool = True
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"


@dataclass(frozen=True)
class StepReport:
    """What one optimizer window did. Per-step figures are means over that step's supervised rows (nan: none)."""

    loss: float  # weighted, in nats per response token of the window
    loss_per_step: tuple[float, ...]  # KL in nats
    acceptance_per_step: tuple[float, ...]  # sum_v min(p, q) with the target's true p
    entries_per_step: tuple[int, ...]
    response_tokens: int
    tokens: int
    grad_norm: float  # before clipping
    learning_rate: float
    seconds: float
    skipped: str | None  # why parameters were left alone; None: they moved


@dataclass(frozen=True)
class Prepared:
    """A batch that is planned, and on its way to the device; `DrafterTrainer.prepare` makes it."""

    batch: RolloutBatch  # on the device, once `copied`
    plan: Plan  # on the host
    response_tokens: int
    copied: torch.cuda.Event | None = None  # the end of the copy to CUDA, on the stream of whoever prepared it

    def taken(self) -> RolloutBatch:
        """The batch, for work on the current stream, which waits for the copy there. The caller does not wait."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batch.input_ids.device)
            stream.wait_event(self.copied)
            self.batch.used_on(stream)
        return self.batch


@dataclass(frozen=True)
class _Outcome:
    """What became of a window's gradients, and its figures as read from the device."""

    skipped: str | None
    loss: float
    grad_norm: float
    kl_sums: Sequence[float]  # K
    acceptance_sums: Sequence[float]  # K


_NOTHING_SUPERVISED: Final = _Outcome(
    "no supervised row: no batches, or responses are too short", math.nan, math.nan, [], []
)


class DrafterTrainer:
    """Trains `drafter` in place; its parameters become the float32 (or float64) masters."""

    def __init__(self, drafter: DraftModel, config: TrainConfig, ranks: Ranks = ALONE) -> None:
        """`ranks`: the processes that train it together; the drafter's parameters are the same on each."""
        self.drafter = drafter
        self.config = config
        self.ranks = ranks
        self.windows = 0  # optimizer steps taken
        self.warm_windows = 0  # of them since the optimizer began without moments
        self.skipped_windows = 0
        self.tokens_trained = 0  # response tokens
        self._dtype: torch.dtype = getattr(torch, config.compute_dtype)
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(torch.promote_types(self._dtype, torch.float32))
        parameters = dict(drafter.named_parameters())
        if HEAD in parameters:
            parameters[HEAD].requires_grad_(config.train_lm_head)
        self._named = {name: p for name, p in parameters.items() if p.requires_grad}
        self._optimizer = Optimizer(
            self._named,
            config.optimizer,
            weight_decay=config.weight_decay,
            betas=config.betas,
            epsilon=config.epsilon,
            ranks=ranks,
        )

    @property
    def device(self) -> torch.device:
        """Where the drafter lives."""
        return next(self.drafter.parameters()).device

    def prepare(self, batch: RolloutBatch) -> Prepared:
        """Plan a step and start its batch's copy to the device; another thread may do so during the step before.

        Raises `BatchRejected` where the batch does not fit the drafter.
        """
        plan = self.drafter.plan(batch, self.config.steps_ahead)
        if self.device.type != "cuda":
            return Prepared(batch.to(self.device), plan, batch.response_tokens)
        moved, copied = batch.to(self.device, self._dtype), torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        return Prepared(moved, plan, batch.response_tokens, copied)

    def step(self, window: Sequence[tuple[RolloutBatch | Prepared, Policy]]) -> StepReport:
        """One optimizer step on all the batches together, prepared ahead or not, each with the policy that wrote it.

        Each rank brings its share of the window, which may be empty; the report is of the whole window.
        """
        started = time.perf_counter()
        pairs = self.ranks.together(
            lambda: [(self.prepare(b) if isinstance(b, RolloutBatch) else b, policy) for b, policy in window]
        )
        response_tokens, tokens, *entries = self.ranks.add(
            [
                sum(p.response_tokens for p, _ in pairs),
                sum(p.batch.tokens for p, _ in pairs),
                *(sum(p.plan.entries[j] for p, _ in pairs) for j in range(self.config.steps_ahead)),
            ]
        )
        self._optimizer.forget_gradients()
        results = self.ranks.together(
            lambda: [
                result
                for prepared, policy in pairs
                if (result := self._accumulate(prepared, policy, max(response_tokens, 1))) is not None
            ]
        )
        learning_rate = self._learning_rate()
        outcome = self._update(results, learning_rate) if any(entries) else _NOTHING_SUPERVISED
        if outcome.skipped is None:
            self.windows += 1
            self.warm_windows += 1
            self.tokens_trained += response_tokens
        else:
            self.skipped_windows += 1
        self._optimizer.forget_gradients()
        return StepReport(
            loss=outcome.loss,
            loss_per_step=_means(outcome.kl_sums, entries),
            acceptance_per_step=_means(outcome.acceptance_sums, entries),
            entries_per_step=tuple(entries),
            response_tokens=response_tokens,
            tokens=tokens,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            seconds=time.perf_counter() - started,
            skipped=outcome.skipped,
        )

    def _loss(self, prepared: Prepared, policy: Policy, denominator: int) -> DraftLoss | None:
        if not any(prepared.plan.entries):
            return None
        plan, batch = prepared.plan.to(self.device), prepared.taken()
        # A GPU's matrix units sum half-precision products in float32; a CPU's do not hand such sums out.
        product = torch.promote_types(self._dtype, torch.float32) if self.device.type == "cpu" else self._dtype
        target = draft_target(batch, plan, self.drafter.vocabulary, policy.needed_head(), product)
        return self.loss_of(plan, batch, policy, target, denominator)

    def loss_of(
        self, plan: Plan, batch: RolloutBatch, policy: Policy, target: DraftTarget, denominator: float
    ) -> DraftLoss:
        """Give the loss of a plan, its batch and its target, all on the drafter's device. Never waits for it."""
        unrolled = self.drafter.unroll(plan, batch, policy, dtype=self._dtype)
        return draft_loss(self.drafter, unrolled, target, denominator=denominator, step_decay=self.config.step_decay)

    def _accumulate(self, prepared: Prepared, policy: Policy, denominator: int) -> DraftLoss | None:
        result = self._loss(prepared, policy, denominator)
        if result is not None:
            torch.autograd.backward(result.loss)
            result = replace(result, loss=result.loss.detach())
        return result

    @property
    def warming_up(self) -> bool:
        """Whether the learning rate is still rising."""
        return self.warm_windows < self.config.warmup_windows

    def _learning_rate(self) -> float:
        if not self.warming_up:
            return self.config.learning_rate
        return self.config.learning_rate * (self.warm_windows + 1) / self.config.warmup_windows

    def _update(self, results: Sequence[DraftLoss], learning_rate: float) -> _Outcome:
        """Clip and step, unless something is not finite.

        The window's only wait for the device is here: one copy of all its figures, once everything is queued.
        """
        parameters, steps = list(self._named.values()), self.config.steps_ahead
        figures = self.ranks.add_gradients(parameters, self._figures(results))
        moved = [p.grad for p in parameters if p.grad is not None]
        total = self.ranks.together(lambda: torch.nn.utils.get_total_norm(moved))
        loss, *sums, norm = torch.cat([figures, total.double()[None]]).tolist()
        kl_sums, acceptance_sums = sums[:steps], sums[steps:]
        skipped = None
        if not math.isfinite(loss):
            skipped = f"the loss is {loss}"
        elif not math.isfinite(norm):
            skipped = f"the gradient norm is {norm}"
        else:
            self.ranks.together(lambda: self._step(parameters, total, learning_rate))
            self._optimizer.exchange()
        return _Outcome(skipped, loss, norm, kl_sums, acceptance_sums)

    def _step(self, parameters: Sequence[torch.nn.Parameter], total: Tensor, learning_rate: float) -> None:
        if self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, total)
        self._optimizer.step(learning_rate)

    def _figures(self, results: Sequence[DraftLoss]) -> Tensor:
        """The loss and the sums of each draft step, [1 + 2K] on the device; of no rows, zeros."""
        if not results:
            return torch.zeros(1 + 2 * self.config.steps_ahead, dtype=torch.float64, device=self.device)
        rows = [torch.cat([r.loss[None].double(), r.kl_sums.double(), r.acceptance_sums.double()]) for r in results]
        return torch.stack(rows).sum(0)

    # --- state on disk ----------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write moments and counters into an existing `directory`, as two files.

        The parameters are the drafter's: `drafter.files.kinds.write_kind` writes them. To be atomic and durable the
        directory must be: `rl_hooks.durable.AtomicDirectory`.
        """
        save_file(self._optimizer.state(), directory / _MOMENTS)
        document = {
            "format": _FORMAT,
            "drafter": self._identity(),
            "config": asdict(self.config),
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        (directory / _DOCUMENT).write_text(json.dumps(document, indent=1))

    def load(self, directory: Path) -> None:
        """Continue from a saved state; hyperparameters stay those of this trainer, and parameters its drafter's.

        Moments of another optimizer are left out, with a warning: the learning rate then rises again.
        Raises `CheckpointError` before anything is changed: another drafter, other shapes, numbers that are not finite.
        """
        document = self._document(directory)
        theirs, ours = document["drafter"], self._identity()
        if theirs != ours:
            differing = {
                name: (theirs.get(name, "absent"), ours.get(name, "absent"))
                for name in sorted(theirs.keys() | ours.keys())
                if (name in theirs, theirs.get(name)) != (name in ours, ours.get(name))
            }
            if differing.keys() == {"vocabulary"}:
                raise CheckpointError(
                    f"{directory} holds the state of a drafter with another draft vocabulary "
                    f"({differing['vocabulary'][0]}, expected {differing['vocabulary'][1]}): the rows of its lm_head "
                    "stand for other tokens. Resume with the drafter that was saved beside it"
                )
            raise CheckpointError(f"{directory} holds the state of another drafter; (stored, expected): {differing}")
        path = directory / _MOMENTS
        try:
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        parameters = dict(self.drafter.named_parameters())
        expected = self._optimizer.expected(tensors)
        wrong = [n for n, s in expected.items() if n not in tensors or tensors[n].shape != s]
        if wrong:
            raise CheckpointError(f"{path}: {len(wrong)} tensors are missing or misshapen, first {wrong[0]!r}")
        for name in expected:
            kind, _, whose = name.partition(".")
            # Checked as what it becomes: a float64 can be infinite as float32.
            tensors[name] = tensors[name].to(torch.float32 if kind == "step" else parameters[whose].dtype)
            if not bool(torch.isfinite(tensors[name]).all()):
                raise CheckpointError(f"{path}: {name} holds NaN or infinity; go back to a copy with finite numbers")
            if kind in ("exp_avg_sq", "step") and bool((tensors[name] < 0).any()):
                raise CheckpointError(f"{path}: {name} is negative, which no step leaves; go back to a copy")
        # Nothing is refused from here on.
        self._optimizer.load(tensors)
        for name in _COUNTERS:
            setattr(self, name, document[name])
        if strays := tensors.keys() - expected.keys():
            log.warning(
                "%s holds %d moments of another optimizer: they are left out, and the learning rate rises again",
                path,
                len(strays),
            )
            self.warm_windows = 0

    def fingerprint(self) -> str:
        """Equal where training goes on alike: counters, configuration, the sum of each tensor of drafter and moments.

        Training moves every number, so states that differ have other sums, but for a coincidence in the last bits.
        """
        tensors = dict(self.drafter.named_parameters()) | self._optimizer.moments()
        sums = {name: float(tensor.detach().sum(dtype=torch.float64)) for name, tensor in sorted(tensors.items())}
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return json.dumps([self._identity(), asdict(self.config), counters, sums])

    def _identity(self) -> dict[str, Any]:
        """What a state must agree on to be loaded, as JSON gives it back."""
        return self.drafter.config.identity() | {"vocabulary": self.drafter.vocabulary.digest}

    @staticmethod
    def _document(directory: Path) -> dict[str, Any]:
        """trainer.json, its fields checked. Raises `CheckpointError`."""
        path = directory / _DOCUMENT
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        keys = {"format", "drafter", *_COUNTERS}
        if not isinstance(document, dict) or document.get("format") != _FORMAT or not keys <= document.keys():
            raise CheckpointError(
                f"{path} is not a {_FORMAT} state with {sorted(keys)}: another version wrote it. Go on with that "
                f"version, or move the whole checkpoint ({directory.parent}) away and begin with the drafter alone"
            )
        if not isinstance(document["drafter"], dict):
            raise CheckpointError(f"{path}: drafter must be an object, got {document['drafter']!r}")
        for name in _COUNTERS:
            if type(document[name]) is not int or document[name] < 0:
                raise CheckpointError(f"{path}: {name} must be a count, got {document[name]!r}")
        return document


def _means(sums: Sequence[float], entries: Sequence[int]) -> tuple[float, ...]:
    if not sums:
        return tuple(math.nan for _ in entries)
    return tuple(total / count if count else math.nan for total, count in zip(sums, entries, strict=True))
