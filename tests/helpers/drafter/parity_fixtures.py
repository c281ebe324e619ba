"""A second opinion, speculators 0.9.0: the same weights and documents through its own EAGLE-3 model and loss.

Where it differs from ours by design, its input is arranged so that both must agree:

- its loss mask belongs to the token that a row *reads last*, ours to the token that is predicted: it gets ours, moved;
- it normalises each step by that step's own row count: its elementwise loss is multiplied back;
- its target is renormalised over the draft vocabulary: ours gets the log-sum-exp over the draft rows;
- it takes the target's last state *before* the final norm: ours gets the normed one;
- it scores packed rows across document boundaries, where the next document is supervised within its first rows: such
  documents go through it one by one, and the results are added.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.policy import TargetHead
from drafter.training.loss import draft_loss
from drafter.training.target import draft_target
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary

AUX = (1, 2, 3)
VOCAB, HIDDEN, DECAY = 61, 32, 0.8


@dataclass
class Result:
    """Sums of the loss per step, and the gradient of their decayed sum, by our parameter names."""

    sums: Tensor  # [K]
    gradients: dict[str, Tensor]


@dataclass
class Case:
    """Weights and documents for both implementations."""

    drafter: Eagle3Drafter
    embed_tokens: Tensor  # [V, H]
    head: Tensor  # [V, H]
    final_norm: Tensor  # [H]
    raw_last: Tensor  # [T, H], before the final norm
    batch: RolloutBatch


def case(lengths: tuple[int, ...], *, response: float, draft: int, seed: int = 0) -> Case:
    """Random documents of these lengths, the last `response` share of each generated; all in float32."""
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    config = DrafterConfig(HIDDEN, HIDDEN, 48, 4, 2, 8, VOCAB, draft, AUX)
    kept = torch.randperm(VOCAB, generator=g)[:draft].sort().values
    embed_tokens, drafter = drawn(VOCAB, HIDDEN), Eagle3Drafter(config, DraftVocabulary(kept, VOCAB))
    for parameter in drafter.parameters():
        parameter.data = 0.2 * drawn(*parameter.shape) if parameter.ndim == 2 else 1 + 0.2 * drawn(*parameter.shape)
    head, final_norm, T = 0.4 * drawn(VOCAB, HIDDEN), 1 + 0.2 * drawn(HIDDEN), sum(lengths)
    raw_last = 3 * drawn(T, HIDDEN)
    last = torch.nn.functional.rms_norm(raw_last, (HIDDEN,), final_norm, config.rms_norm_eps)
    masks = [torch.arange(n) >= max(1, round(n * (1 - response))) for n in lengths]
    batch = RolloutBatch(
        input_ids=torch.randint(VOCAB, (T,), generator=g),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.cat(masks),
        aux_hidden=drawn(T, len(AUX) * HIDDEN),
        logprobs=torch.zeros(T),
        last_hidden=last,
        logsumexp=(last @ head[kept].T).logsumexp(-1),
    )
    return Case(drafter, embed_tokens, head, final_norm, raw_last, batch)


def ours(c: Case, steps: int) -> Result:
    """The production path."""
    plan = make_plan(c.batch.cu_seqlens, c.batch.loss_mask, steps)
    unrolled = unroll(c.drafter, plan, c.batch.input_ids, c.batch.aux_hidden, c.embed_tokens)
    target = draft_target(c.batch, plan, c.drafter.vocabulary, TargetHead(c.head))
    result = draft_loss(c.drafter, unrolled, target, denominator=1, step_decay=DECAY)
    named = dict(c.drafter.named_parameters())
    gradients = torch.autograd.grad(result.loss, list(named.values()))
    return Result(result.kl_sums, dict(zip(named, gradients, strict=True)))


def theirs(c: Case, steps: int, *, packed: bool) -> Result:
    """Its own forward and eager KL, undoing its normaliser; documents packed, or one by one and added."""
    model = _model(c)
    documents = range(c.batch.rollouts)
    groups = [list(documents)] if packed else [[i] for i in documents]
    results = [_their_result(model, c, group, steps) for group in groups]
    sums = torch.stack([r.sums for r in results]).sum(0)
    return Result(sums, {n: torch.stack([r.gradients[n] for r in results]).sum(0) for n in results[0].gradients})


def _their_result(model: Any, c: Case, documents: list[int], steps: int) -> Result:
    rows = _rows(c, documents)
    eager, called = _imported("speculators.losses.eager"), list[None]()

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        """Elementwise KL times what the caller is about to divide by."""
        mask = rows["loss_mask"][:, len(called) :]
        called.append(None)
        weighted: Tensor = eager.kl_div_loss(logits, targets) * (mask.sum() + 1e-5)
        return weighted

    _, loss, metrics = model(**rows, ttt_steps=steps, ttt_step_loss_decay=DECAY, loss_config={"kl_div": (summed, 1.0)})
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    sums = torch.stack([metrics[f"loss_{j}_sum"] / DECAY**j for j in range(steps)])
    return Result(sums, {n.replace("layers.0.", "midlayer."): g for n, g in zip(trained, gradients, strict=True)})


def deviation(got: Result, want: Result) -> float:
    """Largest relative error over per-step losses and gradients, each gradient against its own largest entry."""
    assert got.gradients.keys() == want.gradients.keys()
    errors = [((got.sums - want.sums).abs() / want.sums.abs()).max()]
    errors += [(g - want.gradients[n]).abs().max() / want.gradients[n].abs().max() for n, g in got.gradients.items()]
    return float(torch.stack(errors).max())


def _imported(name: str) -> Any:
    with warnings.catch_warnings():  # of its dependencies, at import
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _model(c: Case) -> Any:
    """Its model with our weights: SDPA attention, since flex has no backward pass on a CPU; lm_head trained."""
    eagle3, config_module = _imported("speculators.models.eagle3"), _imported("speculators.config")
    greedy = _imported("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=1)
    ours_config = c.drafter.config
    layer = _imported("transformers").LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=ours_config.intermediate_size,
        num_attention_heads=ours_config.num_attention_heads,
        num_key_value_heads=ours_config.num_key_value_heads,
        head_dim=ours_config.head_dim,
        vocab_size=VOCAB,
        num_hidden_layers=ours_config.num_hidden_layers,
        rms_norm_eps=ours_config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours_config.rope_theta},
    )
    layer._attn_implementation = "sdpa"
    model = eagle3.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=ours_config.draft_vocab_size,
            norm_before_residual=False,  # ours has the residual of the published checkpoints
            eagle_aux_hidden_state_layer_ids=list(AUX),
            speculators_config=config_module.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[greedy],
                default_proposal_method="greedy",
                verifier=config_module.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    state = {n.replace("midlayer.", "layers.0."): t for n, t in c.drafter.state_dict().items()}
    state["embed_tokens.weight"] = c.embed_tokens
    state["verifier_lm_head.weight"] = c.head[c.drafter.vocabulary.ids]
    state["verifier_norm.weight"] = c.final_norm
    if not model.use_draft_vocab:
        del state["d2t"], state["t2d"]
    absent, unknown = model.load_state_dict(state, strict=False)
    assert not unknown, unknown
    assert all(name.startswith("rotary_emb") for name in absent), absent
    model.lm_head.weight.requires_grad_(True)
    return model


def _rows(c: Case, documents: list[int]) -> dict[str, Tensor]:
    """Its `shift_batch` convention, (x[r+1], g[r], y[r+1]) with our mask at x[r+2], packed into one row [1, n]."""
    b, starts = c.batch, c.batch.cu_seqlens.tolist()
    parts: dict[str, list[Tensor]] = {}
    for number in documents:
        begin, end = starts[number], starts[number + 1]
        piece = {
            "input_ids": b.input_ids[begin + 1 : end],
            "hidden_states": b.aux_hidden[begin : end - 1],
            "verifier_last_hidden_states": c.raw_last[begin + 1 : end],
            "loss_mask": torch.cat([b.loss_mask[begin + 2 : end], torch.zeros(1, dtype=torch.bool)]),
            "document_ids": torch.full((end - begin - 1,), number),
            "position_ids": torch.arange(1, end - begin),
        }
        for name, tensor in piece.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors)[None] for name, tensors in parts.items()}
