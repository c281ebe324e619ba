"""One training step, forward and backward, of each implementation on the same weights, documents and supervision.

Each builder returns a function that runs one step on the case's batch of the given number (default: 0) and returns the
gradients by our parameter names. Peers run their own model and loss code as installed; what had to be replaced to run
it at all is said at each builder.

Legend: T tokens, K steps, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.device import prefetch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.policy import Policy, TargetHead
from drafter.training.loss import draft_loss
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary

Step = Callable[..., dict[str, Tensor]]
STEP_DECAY = 0.8
AUX = (1, 2, 3)


@dataclass(frozen=True)
class Size:
    """Sizes of a drafter and its target's vocabulary."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft: int

    def config(self) -> DrafterConfig:
        """The drafter's, whose target is as wide as itself."""
        widths = (self.hidden, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim)
        return DrafterConfig(*widths, self.vocab, self.draft, AUX)


#: S, D and M fit a CPU; 8B is the drafter of a Qwen3-8B.
SIZES = {
    "S": Size(256, 768, 4, 2, 64, 16_384, 4096),
    "D": Size(256, 768, 4, 2, 64, 32_768, 8192),
    "M": Size(512, 1536, 8, 2, 64, 32_768, 8000),
    "8B": Size(4096, 12_288, 32, 8, 128, 151_936, 32_000),
}


@dataclass(frozen=True, eq=False)
class Case:
    """Weights and documents that every implementation gets. Several batches: for steps of changing shapes."""

    drafter: Eagle3Drafter
    embed_tokens: Tensor  # [V, H]
    head: Tensor  # [V, H]
    batch: RolloutBatch
    steps: int  # K
    train_head: bool
    others: tuple[RolloutBatch, ...] = ()

    @property
    def batches(self) -> tuple[RolloutBatch, ...]:
        """All of them, `batch` first."""
        return (self.batch, *self.others)


def make_case(
    size: Size,
    *,
    tokens: int,
    response: float,
    steps: int,
    train_head: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    documents: int = 1,
    batches: int = 1,
) -> Case:
    """Random documents of equal length whose last `response` share is generated.

    Of several batches each has documents shorter by 1/67 of the first one's. The head favours the draft vocabulary, so
    that peers which drop rows whose target leaves it keep nearly all.
    """
    g = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).mul_(scale)

    ids = torch.randperm(size.vocab, generator=g, device=device)[: size.draft].sort().values.cpu()
    with torch.device(device):
        embed_tokens = drawn(size.vocab, size.hidden, scale=0.5).to(dtype)
        drafter = Eagle3Drafter(size.config(), DraftVocabulary(ids, size.vocab)).to(device, dtype)
    drafter.lm_head.weight.requires_grad_(train_head)
    head = drawn(size.vocab, size.hidden, scale=size.hidden**-0.5)
    head[ids.to(device), 0] += 2.0

    def rollouts(length: int) -> RolloutBatch:
        tokens = documents * length
        last = drawn(tokens, size.hidden)
        last[:, 0] = 4.0
        chunks = [torch.logsumexp(x @ head.T, -1) for x in torch.split(last, 1024)]
        mask = torch.arange(length) >= max(2, round(length * (1 - response)))
        return RolloutBatch(
            input_ids=torch.randint(size.vocab, (tokens,), generator=g, device=device),
            cu_seqlens=torch.arange(documents + 1) * length,
            loss_mask=mask.repeat(documents),
            aux_hidden=drawn(tokens, len(AUX) * size.hidden).to(dtype),
            logprobs=torch.zeros(tokens),
            last_hidden=last.to(dtype),
            logsumexp=torch.cat(chunks),
        )

    length = tokens // documents
    first, *others = [rollouts(length - i * length // 67) for i in range(batches)]
    return Case(drafter, embed_tokens, head.to(dtype), first, steps, train_head, tuple(others))


def ours(case: Case, *, full_vocabulary: bool = False) -> Step:
    """The trainer's step without its optimizer: plan, unroll, fused loss, backward.

    `full_vocabulary` also reduces the target's logits over the whole vocabulary, row by row, as SpecForge has to. Ours
    does not need it (rollouts carry their log-sum-exp); it is charged so that both do the same.
    """
    drafter, head = case.drafter, TargetHead(case.head)

    def step(which: int = 0) -> dict[str, Tensor]:
        batch = case.batches[which]
        plan = make_plan(batch.cu_seqlens, batch.loss_mask, case.steps).to(batch.input_ids.device)
        unrolled = unroll(drafter, plan, batch.input_ids, batch.aux_hidden, case.embed_tokens)
        if full_vocabulary:
            for rows in torch.split(batch.last_hidden[plan.target_rows], 128):
                (rows @ case.head.T).float().max(-1)
        product = torch.float32 if batch.input_ids.device.type == "cpu" else batch.aux_hidden.dtype  # as the trainer
        target = draft_target(batch, plan, drafter.vocabulary, head, product)
        result = draft_loss(drafter, unrolled, target, denominator=max(plan.entries[0], 1), step_decay=STEP_DECAY)
        return _gradients(drafter, result.loss)

    return step


def ours_trainer(case: Case) -> Step:
    """What the worker does for an optimizer window: float32 masters, bfloat16 compute, batch and head on the host.

    Copies, casts, clipping and the optimizer included; the next batch is prepared meanwhile, as in the worker, so steps
    must ask for the batches in order, round and round. The head's rows go to the device once, as for a policy version.
    """
    settings = TrainConfig(
        steps_ahead=case.steps,
        step_decay=STEP_DECAY,
        train_lm_head=case.train_head,
        compute_dtype="bfloat16" if case.head.dtype == torch.bfloat16 else "float32",
    )
    trainer = DrafterTrainer(case.drafter, settings)
    policy = Policy(0, case.embed_tokens, TargetHead(case.head.cpu()))
    batches = [batch.to("cpu") for batch in case.batches]
    numbered = cycle(range(len(batches)))
    prepared = prefetch(((i, trainer.prepare(batches[i])) for i in numbered), trainer.device)

    def step(which: int = 0) -> dict[str, Tensor]:
        number, batch = next(prepared)
        if number != which:
            raise ValueError(f"expected batches in order, of which {number} is the next, got {which}")
        report = trainer.step([(batch, policy)])
        if report.skipped is not None:
            raise RuntimeError(f"the trainer skipped the step: {report.skipped}")
        return {}

    return step


def speculators(case: Case) -> Step:
    """Run speculators 0.9.0: SDPA attention (its flex attention has no backward pass on a CPU), eager KL there.

    On a GPU, what it does by default: flex attention, its Triton loss, the forward pass compiled.
    """
    eagle3, config = _imported("speculators.models.eagle3"), _imported("speculators.config")
    losses = _imported("speculators.losses")
    size = case.drafter.config
    cpu = case.batch.input_ids.device.type == "cpu"
    layer = _imported("transformers").LlamaConfig(**_layer_settings(size))
    layer._attn_implementation = "sdpa" if cpu else "simple_flex_attention"
    greedy = _imported("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=case.steps)
    model = eagle3.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=size.draft_vocab_size,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=list(AUX),
            speculators_config=config.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[greedy],
                default_proposal_method="greedy",
                verifier=config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    ).to(case.head.device, case.head.dtype)
    rotary = model.rotary_emb.inv_freq.float()  # kept wide, as transformers keeps it
    state = {n.replace("midlayer.", "layers.0."): t for n, t in case.drafter.state_dict().items()}
    state["embed_tokens.weight"] = case.embed_tokens
    state["verifier_lm_head.weight"] = case.head[case.drafter.vocabulary.ids.to(case.head.device)]
    state["verifier_norm.weight"] = case.head.new_ones(size.hidden_size)
    model.load_state_dict(state, strict=False)
    model.rotary_emb.inv_freq = rotary
    model.verifier_norm = torch.nn.Identity()  # our states are normed already
    model.lm_head.weight.requires_grad_(case.train_head)

    def layout(b: RolloutBatch) -> dict[str, Tensor]:
        T = b.tokens
        document = torch.repeat_interleave(torch.arange(b.rollouts), b.cu_seqlens.diff())
        return {
            "input_ids": b.input_ids[None, 1:],
            "hidden_states": b.aux_hidden[None, :-1],
            "verifier_last_hidden_states": b.last_hidden[None, 1:],
            "loss_mask": _predicted(b)[None, : T - 1],
            "document_ids": document[None, : T - 1].to(b.input_ids.device),
            "position_ids": torch.arange(1, T, device=b.input_ids.device)[None],
        }

    rows = [layout(batch) for batch in case.batches]
    loss_config = losses.resolve_loss_config("kl_div", "eager" if cpu else "fused")

    def step(which: int = 0) -> dict[str, Tensor]:
        _, loss, _ = model(
            **rows[which], ttt_steps=case.steps, ttt_step_loss_decay=STEP_DECAY, loss_config=loss_config, use_cache=True
        )
        found = _gradients(model, loss)
        return {n.replace("layers.0.", "midlayer."): gradient for n, gradient in found.items()}

    return step


def specforge_model(case: Case) -> tuple[Any, Any, list[dict[str, Any]]]:
    """SpecForge 0.2.0's training model, its drafter and the batches in its layout: documents, which are equal, as rows.

    Its compact teacher; on a CPU SDPA attention, and its eager loss for its Triton one.
    """
    model_module = _imported("specforge.algorithms.eagle3.model")
    llama = _imported("specforge.modeling.draft.llama3_eagle")
    size = case.drafter.config
    cpu = case.batch.input_ids.device.type == "cpu"
    if cpu:
        reference = _imported("specforge.core.loss")._compute_loss
        model_module.LogSoftmaxLoss = type("EagerLoss", (), {"apply": staticmethod(reference)})
    settings = _layer_settings(size) | {"draft_vocab_size": size.draft_vocab_size, "pad_token_id": 0}
    backend = "sdpa" if cpu else "flex_attention"
    draft = llama.LlamaForCausalLMEagle3(_imported("transformers").LlamaConfig(**settings), attention_backend=backend)
    draft = draft.to(case.head.device, case.head.dtype)
    draft.load_state_dict({**case.drafter.state_dict(), "embed_tokens.weight": case.embed_tokens}, strict=False)
    draft.embed_tokens.weight.requires_grad_(False)
    draft.lm_head.weight.requires_grad_(case.train_head)
    model = model_module.OnlineEagle3Model(draft, length=case.steps, attention_backend=backend)

    def layout(b: RolloutBatch) -> dict[str, Any]:
        shape = b.rollouts, b.tokens // b.rollouts
        return {
            "input_ids": _left(b.input_ids).view(shape),
            "attention_mask": torch.ones(shape, dtype=torch.bool, device=b.input_ids.device),
            "target": None,
            "loss_mask": _predicted(b).view(*shape, 1).int(),
            "hidden_states": b.aux_hidden.view(*shape, -1),
            "target_hidden_for_compact": _left(b.last_hidden).view(*shape, -1),
            "target_head_weight": case.head,
        }

    return model, draft, [layout(batch) for batch in case.batches]


def specforge(case: Case) -> Step:
    """Run SpecForge 0.2.0, see `specforge_model`."""
    model, draft, rows = specforge_model(case)

    def step(which: int = 0) -> dict[str, Tensor]:
        losses, *_ = model(**rows[which])
        loss = torch.stack([STEP_DECAY**i * x for i, x in enumerate(losses)]).sum()
        return _gradients(draft, loss)

    return step


PEERS: dict[str, Callable[[Case], Step]] = {"specforge-0.2.0": specforge, "speculators-0.9.0": speculators}


def agreement(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Cosine of two sets of gradients: normalisers differ, so only the direction can agree."""
    names = sorted(left.keys() & right.keys())
    a, b = (torch.cat([side[n].double().flatten() for n in names]) for side in (left, right))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def floating_point_operations(
    size: Size, *, tokens: int, responses: int, steps: int, train_head: bool, documents: int = 1
) -> float:
    """Least work of one step over equal documents: a MAC is two, forward, both gradients, nothing recomputed.

    `tokens` and `responses` are of all documents together. Rows that only lend keys and values pay for fc, k and v;
    attention counts its causal half of a document.
    """
    H, q, kv = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    row: float = 4 * 3 * H * H + 6 * (steps + 1) * H * (q + 2 * kv) + 6 * steps * (q * H + 3 * H * size.intermediate)
    row += 7 * steps * (tokens / documents) * q + 3 * q * steps * (steps - 1)
    row += (6 if train_head else 4) * steps * H * size.draft + 2 * H * size.draft
    context = 4 * 3 * H * H + 12 * H * 2 * kv
    return float(row * responses + context * (tokens - responses))


def _gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def _layer_settings(config: DrafterConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def _left(x: Tensor) -> Tensor:
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def _predicted(batch: RolloutBatch) -> Tensor:
    """Row t counts iff x[t+2] is a response token of its document: our supervision, in their layout."""
    mask = torch.zeros(batch.tokens, dtype=torch.bool)
    mask[:-2] = batch.loss_mask.cpu()[2:]
    for end in batch.cu_seqlens[1:].tolist():
        mask[max(end - 2, 0) : end] = False
    return mask.to(batch.input_ids.device)


def _imported(name: str) -> Any:
    with warnings.catch_warnings():  # of their dependencies, at import
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
