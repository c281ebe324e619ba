"""Peak memory of one whole training step on a device, found without one: shapes run, nothing is computed.

    python -m benchmarks.step_memory                       # a Qwen3-8B's drafter, 16k tokens
    python -m benchmarks.step_memory --tokens 4096 --documents 4 --steps 3

Every tensor lives on torch's `meta` device, which has shapes and no data: a device's code runs as it would, and waiting
for the device (reading a number from it) is an error. Counted is every storage alive at once: parameters (float32
masters), the optimizer's moments, gradients, the policy's embedding and the head's rows of the draft vocabulary,
features and everything between; the optimizer's own step is left out, which needs less. Not counted are
the allocator's fragments, workspaces of the kernels, and the CUDA context (about 0.5 GB).
"""

from __future__ import annotations

import argparse
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.step_peers import AUX, SIZES, Size
from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy
from drafter.training.target import DraftTarget
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary

GIB = 1 << 30


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def hold(self, tensors: Any) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor) or tensor.device.type == "cpu":
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                continue
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        self.hold(result)
        return result


@dataclass(frozen=True)
class Peak:
    """GiB of one step."""

    resident: float  # parameters, moments, embedding, head: before the step
    step: float  # the most alive during it


def peak_of(size: Size, *, tokens: int, documents: int = 1, response: float = 1.0, steps: int = 3) -> Peak:
    """Peak of one trainer step in bfloat16 on `documents` equal rollouts whose last `response` share was generated."""
    length = tokens // documents
    mask = (torch.arange(length) >= max(1, round(length * (1 - response)))).repeat(documents)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    vocabulary = DraftVocabulary(torch.arange(size.draft), size.vocab)
    with LiveBytes() as memory:
        with torch.device("meta"):
            drafter = Eagle3Drafter(size.config(), vocabulary).to("meta")
        policy = Policy(0, made(size.vocab, size.hidden))
        trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=steps, compute_dtype="bfloat16"))
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer._optimizer.step(0.0)  # makes its moments
        trainer._optimizer.forget_gradients()
        head_rows = made(size.draft, size.hidden)  # the draft vocabulary's, gathered once per policy version
        memory.hold([list(drafter.parameters()), policy.embed_tokens, trainer._optimizer.moments(), head_rows])
        resident = memory.live
        batch = RolloutBatch(
            input_ids=made(tokens, dtype=torch.int64),
            cu_seqlens=torch.arange(documents + 1) * length,
            loss_mask=mask,
            aux_hidden=made(tokens, len(AUX) * size.hidden),
            logprobs=made(tokens, dtype=torch.float32),
            last_hidden=made(tokens, size.hidden),
            logsumexp=made(tokens, dtype=torch.float32),
        )
        plan = make_plan(batch.cu_seqlens, mask, steps).to("meta")
        rows = plan.target_rows
        target = DraftTarget(
            1.0,
            hidden=batch.last_hidden.index_select(0, rows),
            head_rows=head_rows,
            logsumexp=made(rows.numel(), dtype=torch.float32),
        )
        result = trainer.loss_of(plan, batch, policy, target, max(int(mask.sum()), 1))
        torch.autograd.backward(result.loss)
        if any(p.grad is None for p in drafter.parameters()):
            raise AssertionError("a parameter got no gradient")
        return Peak(resident / GIB, memory.peak / GIB)


def main() -> int:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8B", choices=SIZES)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--documents", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--steps", nargs="*", type=int, default=[3, 7])
    options = parser.parse_args()
    print("| steps | documents | response | resident, GiB | peak, GiB |\n|---|---|---|---|---|")
    for steps in options.steps:
        for documents in options.documents:
            for response in (1.0, 0.5):
                case = {"tokens": options.tokens, "documents": documents, "response": response, "steps": steps}
                found = peak_of(SIZES[options.size], **case)
                row = f"| {steps} | {documents} | {response:.0%} "
                print(row + f"| {found.resident:.1f} | **{found.step:.1f}** |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
