"""NeMo-RL's DTensor policy workers with the hook on them; `rl_hooks.stacks.on_ray` says how they get it.

Both of its FSDP2 workers: Automodel's (`dtensor_cfg._v2`), and the one before it. Written against NeMo-RL 7ea279ab.
Four questions are answered here:

- tokens and mask: the micro-batches of the pass, padded or packed, and their `token_mask`. Older weights may have drawn
  some where generation has GPUs of its own: then the sampler's log-probabilities are needed;
- version: the `train` calls that the weights have seen (their learning rate's schedule moves once in each);
- which forward: `get_logprobs` of a worker that trains. Not the reference's, not a teacher's;
- which rank sends: each its own rollouts, as data is parallel; rank 0 registers the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.base import captured, left_out_for_images
from rl_hooks.trainer.hook import DrafterHook

#: What gives a batch's micro-batches. A second call in a pass is for forwards that only keep the ranks in step.
ITERATORS: Final = tuple(
    f"make_microbatch_iterator{kind}" for kind in ("", "_with_dynamic_shapes", "_for_packable_sequences")
)
LEFT_OUT: Final = (
    "rollouts are left out: older weights may have drawn them, so the sampler's log-probabilities are needed, after "
    "its temperature (generation.vllm_cfg.logprobs_mode: processed_logprobs), and NeMo-RL's data_plane brings none"
)


def micro_batch_rollouts(batch: Any, *, packed: bool) -> dict[str, Any]:
    """What `DrafterHook.capture` is to be told of a micro-batch [B, S], padded at the right."""
    ids, lengths, logprobs = (batch.get(name) for name in ("input_ids", "input_lengths", "generation_logprobs"))
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    told = {"input_ids": ids, "loss_mask": (batch["token_mask"] > 0) & real, "logprobs": logprobs}
    if not packed:
        return told | {"attention_mask": real}
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # NeMo-RL pads the row at its end
    return {name: None if one is None else one[real] for name, one in told.items()} | {"cu_seqlens": bounds}


class _NemoPolicy:
    """One worker's hook."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        if worker.tp_size > 1 or worker.cp_size > 1:
            sizes = "tensor_parallel_size and context_parallel_size"
            raise UnsupportedTrainerError(f"only data parallelism: set {sizes} to 1, or {ENGINE_INSTEAD}")
        if missing := [name for name in ("optimizer", "_is_reward_model") if not hasattr(worker, name)]:
            raise UnsupportedTrainerError(f"this NeMo-RL's workers have no {' and no '.join(missing)}")
        self._worker, self.passes = worker, 0
        self.hook = DrafterHook(worker.model, **options, rank=dist.get_rank(), world_size=dist.get_world_size())

    def _told(self, batch: Any) -> dict[str, Any] | None:
        worker, sampling, tally = self._worker, self._worker.sampling_params, self.hook.tally
        if batch.get_multimodal_dict():
            left_out_for_images(tally)
            return None
        told = micro_batch_rollouts(batch, packed=worker.enable_seq_packing)
        temperature, top_p, top_k = (getattr(sampling, name, None) for name in ("temperature", "top_p", "top_k"))
        plain = temperature in (None, 1.0) and top_p in (None, 1.0) and top_k in (None, -1, 0)
        engine = (worker.cfg.get("generation") or {}).get("vllm_cfg") or {}
        given = told["logprobs"] is not None  # by asynchronous GRPO, but where its data plane brings batches
        if not plain and engine.get("logprobs_mode") != "processed_logprobs":
            told["logprobs"] = None  # those before temperature, top-p and top-k are not of what was drawn
        may_be_older = not worker.is_generation_colocated and (given or worker._dp_client is not None)
        if may_be_older and told["logprobs"] is None:
            tally.warn("logprobs", LEFT_OUT)
            return None
        told |= {"temperature": 1.0 if temperature is None else temperature, "top_p": top_p, "top_k": top_k}
        return {**told, "policy_version": int(worker.scheduler.last_epoch)}

    def _captured(self, batches: Iterator[Any]) -> Iterator[Any]:
        for one in batches:
            with captured(self.hook, self._told, one):
                yield one  # its forward comes before the next is asked for

    @contextmanager
    def capturing(self, data: Any) -> Iterator[None]:
        """Capture the forward of each micro-batch that `data` gives meanwhile."""
        given: list[Any] = []

        def iterate(make: Callable[..., Any], *args: Any, **more: Any) -> Any:
            made = make(*args, **more)
            if not given:
                made = self._captured(made)
                given.append(made)
                self.passes += 1
            return made

        with ExitStack() as after:
            after.callback(lambda: [one.close() for one in given])
            for name in (name for name in ITERATORS if hasattr(data, name)):
                setattr(data, name, functools.partial(iterate, getattr(data, name)))
                after.callback(delattr, data, name)
            yield

    def log(self, metrics: dict[str, Any]) -> None:
        """Put the hook's numbers into what an update returns. NeMo-RL sums what the ranks give, so one does."""
        if not self.passes:
            why = (
                "NeMo-RL updates without a pass for prev_logprobs (loss_fn.force_on_policy_ratio), or it is another one"
            )
            self.hook.tally.warn("no pass", f"nothing is captured: {why}")
        if dist.get_rank() == 0:
            metrics["all_mb_metrics"].update({name: [one] for name, one in self.hook.metrics().items()})


def extend(kind: Any) -> None:
    """Have a DTensor policy worker of NeMo-RL's send rollouts. In place: Ray looks methods up on the class."""
    init, score, update, reference = kind.__init__, kind.get_logprobs, kind.train, kind.get_reference_policy_logprobs

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        # Else a teacher, or the like. One that does not say is attached, and fails there: that is logged.
        if getattr(self, "optimizer", self) is not None and not getattr(self, "_is_reward_model", False):
            self.draftalign = attached("NeMo-RL", dist.get_rank(), functools.partial(_NemoPolicy, self))

    @functools.wraps(score)
    def get_logprobs(self: Any, data: Any, *args: Any, **more: Any) -> Any:
        with nullcontext() if self.draftalign is None else self.draftalign.capturing(data):
            return score(self, data, *args, **more)

    @functools.wraps(reference)
    def get_reference_policy_logprobs(self: Any, *args: Any, **more: Any) -> Any:
        policy, self.draftalign = self.draftalign, None  # the model has other weights meanwhile
        try:
            return reference(self, *args, **more)
        finally:
            self.draftalign = policy

    @functools.wraps(update)
    def train(self: Any, *args: Any, **more: Any) -> Any:
        made = update(self, *args, **more)
        if self.draftalign is not None:
            self.draftalign.hook.guard(self.draftalign.log, made)
        return made

    kind.draftalign = None  # of a worker that has not begun
    kind.__init__, kind.get_logprobs, kind.train = begin, get_logprobs, train
    kind.get_reference_policy_logprobs = get_reference_policy_logprobs
