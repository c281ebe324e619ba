"""Megatron-Core's real `GPTModel` at TP=2 on two gloo processes: `python megatron_trainer.py OUT CASE...`.

Two things of CUDA are replaced: Megatron asks it for the device of buffers, and for dropout's generator. Its norms of
torch refuse sequence parallelism, so a norm of our own stands in their place. Every rank writes OUT/<rank>.json: what
was sent, against transformers' Llama in one process with the gathered weights; and the weights with and without us.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.trainer.hooks_fixtures import as_float, mapped, of_every_token, only_predicting_rows, receiver
from helpers.trainer.sent_fixtures import keep
from helpers.worker.rank_fixtures import run_two_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

from rl_hooks import wire
from rl_hooks.errors import UnsupportedModelError
from rl_hooks.sending.delivery import NO_SUCH_RUN
from rl_hooks.trainer.megatron.hook import attach

AUX = (0, 2, 3)
#: The model pads its vocabulary; the config, and the tokenizer, know 61.
VOCAB, PADDED, HIDDEN, LAYERS, HEADS, GROUPS, FFN = 61, 72, 32, 4, 4, 2, 48
LENGTHS, T = (16, 13, 9, 15), 56  # T: of a packed row
S, PROMPT, STEPS, TEMPERATURE = 16, 5, 3, 0.7


class Norm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # Megatron then sums its gradient over the ranks


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed row: what Transformer Engine does, which has no CPU build."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        parts = []
        for a, b in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            query, key, value = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
            seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            parts.append(seen[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)


def llama(tied: bool, vocab: int = VOCAB) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        pad_token_id=0,
        attn_implementation="eager",
    )


def gpt(words: list[str]) -> Any:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel="sequence" in words,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.bfloat16 if "bfloat16" in words else torch.float32,
        pipeline_dtype=torch.float32,
        init_method_std=0.2,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if "packed" in words:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(0)
    return GPTModel(
        config,
        TransformerBlockSubmodules([spec] * LAYERS, Norm),
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights="tied" in words,
        parallel_output="gathered" not in words,
    )


def gathered(weight: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.detach().contiguous())
    return parts


def unsharded(model: Any, tied: bool) -> LlamaForCausalLM:
    """The same weights in one process. The test gathers them, on every rank."""
    whole = LlamaForCausalLM(llama(tied)).eval()
    wide = HIDDEN // HEADS
    with torch.no_grad():
        embedding = torch.cat(gathered(model.embedding.word_embeddings.weight))
        whole.model.embed_tokens.weight.copy_(embedding[:VOCAB])
        if not tied:
            whole.lm_head.weight.copy_(torch.cat(gathered(model.output_layer.weight))[:VOCAB])
        whole.model.norm.weight.copy_(model.decoder.final_layernorm.weight)
        for theirs, ours in zip(model.decoder.layers, whole.model.layers, strict=True):
            ours.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
            ours.post_attention_layernorm.weight.copy_(theirs.pre_mlp_layernorm.weight)
            qkv = torch.cat(gathered(theirs.self_attention.linear_qkv.weight)).view(GROUPS, -1, HIDDEN)
            q, k, v = torch.split(qkv, [HEADS // GROUPS * wide, wide, wide], dim=1)
            ours.self_attn.q_proj.weight.copy_(q.reshape(-1, HIDDEN))
            ours.self_attn.k_proj.weight.copy_(k.reshape(-1, HIDDEN))
            ours.self_attn.v_proj.weight.copy_(v.reshape(-1, HIDDEN))
            ours.self_attn.o_proj.weight.copy_(torch.cat(gathered(theirs.self_attention.linear_proj.weight), 1))
            gates = [part.chunk(2) for part in gathered(theirs.mlp.linear_fc1.weight)]
            ours.mlp.gate_proj.weight.copy_(torch.cat([gate for gate, _ in gates]))
            ours.mlp.up_proj.weight.copy_(torch.cat([up for _, up in gates]))
            ours.mlp.down_proj.weight.copy_(torch.cat(gathered(theirs.mlp.linear_fc2.weight), 1))
    return whole


def rollouts(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (len(LENGTHS), S), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()
    generated = mask * (torch.arange(S) >= PROMPT)
    return ids * mask, mask, generated


def told_and_given(
    ids: Any, mask: Any, generated: Any, words: list[str]
) -> tuple[dict[str, Any], tuple[Any, ...], Any]:
    """What `capture` is told, what the forward is given, and where in [B, S] each rollout lies.

    A packed row is padded at its end to an even length, with a sequence of its own.
    """
    places = [(b, torch.arange(n)) for b, n in enumerate(LENGTHS)]
    if "packed" not in words:
        positions = torch.arange(S)[None].expand(len(LENGTHS), -1)
        told = {"input_ids": ids, "attention_mask": mask, "loss_mask": generated}
        return told, (ids, positions, torch.ones(1, 1, S, S).tril() < 0.5), places
    ends = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    row, flags = (torch.cat([x[p] for p in places] + [x.new_zeros(T - ends[-1])])[None] for x in (ids, generated))
    bounds = torch.tensor([*ends, T], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=S, max_seqlen_kv=S
    )
    told = {"input_ids": row, "loss_mask": flags, "cu_seqlens": torch.tensor(ends)}
    if "seam" in words:
        told["cu_seqlens"] = torch.tensor([ends[0], *ends[2:]])  # two rollouts are called one
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds.tolist())])[None]
    return told, (row, positions, None, packing), [(0, torch.arange(a, b)) for a, b in pairwise(ends)]


class Watch:
    """The whole states that Megatron itself has in a forward, read by hooks of the test's own: [B, S, H] each."""

    def __init__(self, model: Any) -> None:
        self.states: dict[Any, torch.Tensor] = {}
        self.sliced = model.config.sequence_parallel
        self.handles = [
            model.decoder.layers[i].register_forward_pre_hook(
                lambda _m, a, k, i=i: self.keep(i, a[0] if a else k["hidden_states"]), with_kwargs=True
            )
            for i in AUX
        ]
        self.handles.append(model.decoder.final_layernorm.register_forward_hook(lambda _m, _a, o: self.keep("norm", o)))

    def keep(self, name: Any, state: torch.Tensor) -> None:
        self.states[name] = state.detach().clone()

    def rows(self) -> torch.Tensor:
        """[B, S, (A + 1) * H]."""
        for handle in self.handles:
            handle.remove()
        whole = [torch.cat(gathered(self.states[n])) if self.sliced else self.states[n] for n in (*AUX, "norm")]
        return torch.cat(whole, -1).transpose(0, 1).float()


def train(rank: int, words: list[str], service: Any, found: dict[str, Any]) -> list[torch.Tensor]:
    model = gpt(words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = None
    if service is not None:
        options: dict[str, Any] = {"run": "r", "aux_layers": AUX, "wait_seconds": 15.0 if "absent" in words else 60.0}
        if "unsent" in words:  # only the first head is due then: it is of a version that was not registered
            options["head_tolerance"] = 1e9
        hook = attach(model, service.url, config=llama("tied" in words), **options)
        if "unsent" in words:
            refuse_once(hook)
        if "lost" in words:
            service.answer = lose_once()
    for step in range(STEPS):
        ids, mask, generated = rollouts(step)
        if "foreign" in words:
            ids[1, PROMPT] = VOCAB + 3  # the model has a row for it, and the tokenizer no token
        told, given, places = told_and_given(ids, mask, generated, words)
        inputs, packing = given[:3], given[3] if len(given) > 3 else None
        whole = unsharded(model, "tied" in words)
        watch = Watch(model)
        with contextlib.ExitStack() as captured:
            if hook is not None and not ("absent" in words and rank == 1 and step == 1):
                failing = ("fails" in words and rank == 1) or ("plan" in words and rank == 0)
                if failing and step == 1:
                    break_it(hook, "plan" in words)
                captured.enter_context(
                    hook.capture(**told, policy_version=step + ("unsent" in words), temperature=TEMPERATURE)
                )
            with torch.no_grad():
                model(*inputs, packed_seq_params=packing)
        states = watch.rows()
        if hook is not None and rank == 0:
            assert hook.flush(20), hook.stats()
            found.setdefault("steps", []).append(
                compare(service, whole, ids, [states[p] for p in places], step, "bfloat16" in words)
            )
        labels = None if "gathered" in words else torch.roll(inputs[0], -1, 1)
        out = model(*inputs, packed_seq_params=packing, labels=labels)
        loss = out.float().pow(2).mean() if "gathered" in words else (out * told["loss_mask"]).mean()
        optimizer.zero_grad()
        loss.backward()
        if model.config.sequence_parallel:  # as Megatron's finalize_model_grads does
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    dist.all_reduce(parameter.grad)
        optimizer.step()
    if hook is not None:
        stats = hook.stats()
        found |= {name: stats[name] for name in ("captured_rollouts", "failures", "last_failure", "head_updates")}
        found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
        found["off"] = hook.ranks.off
        found["metrics"] = hook.metrics()
        hook.close()
    return [p.detach().clone() for p in model.parameters()]


def lose_once() -> Any:
    """What a service answers that has lost the run before its first rollouts."""
    lost = iter([True])

    def answer(request: Any) -> Any:
        if request.path.startswith("/rollouts") and next(lost, False):
            return 404, {}, {"type": NO_SUCH_RUN, "detail": "there is no run 'r'"}
        return 202, {}, {"duplicate": False}

    return answer


def refuse_once(hook: Any) -> None:
    """The next head is not queued."""
    kept = hook.sender.submit_job

    def refuse(job: Any) -> bool:
        if not job.path.endswith("/head"):
            return bool(kept(job))
        hook.sender.submit_job = kept
        return False

    hook.sender.submit_job = refuse


def break_it(hook: Any, plan: bool) -> None:
    """The next capture fails on this rank, and only that one."""
    target, name = (hook._choice, "choose") if plan else (hook._part.features, "pop")
    kept = getattr(target, name)

    def fail(*_: Any, **__: Any) -> None:
        setattr(target, name, kept)
        raise MemoryError("made by the test")

    setattr(target, name, fail)


@torch.no_grad()
def compare(service: Any, whole: Any, ids: Any, states: Any, step: int, exact: bool) -> dict[str, Any]:
    """The newest file against Megatron's own states, and against each rollout alone in one process."""
    result: dict[str, Any] = {"own": True, "first": True, "features": 0.0, "lse": 0.0, "logp": 0.0}
    sent = service.rollouts()
    result["files"] = len(sent)
    if len(sent) <= step:
        return result | {"missed": True}
    with tempfile.TemporaryDirectory() as directory:
        file = mapped(sent[-1], Path(directory))
        result["version"] = int(file.header.metadata["policy_version"])
        result["last_rows"] = wire.check_rollout_header(file.header).last_rows
        last_NH, lse_N = of_every_token(file, "last_hidden"), of_every_token(file, "logsumexp")
        for b, (begin, end) in enumerate(pairwise(file.array("cu_seqlens").tolist())):
            one = ids[b, : LENGTHS[b]]
            assert file.array("input_ids")[begin:end].tolist() == one.tolist()
            own = states[b].bfloat16().float()
            last = last_NH[begin:end]
            last = torch.where(last.isnan(), own[:, -HIDDEN:], last)  # what was not sent is expected of none
            rows = torch.cat([as_float(file, "aux_hidden")[begin:end], last], 1)
            result["own"] &= torch.equal(rows, own)
            out = whole(one[None], output_hidden_states=True)
            alone = torch.cat([out.hidden_states[i][0] for i in (*AUX, -1)], 1)
            # The embedding is looked up and not summed: bit for bit. Later layers sum two ranks' halves.
            result["first"] &= torch.equal(rows[:, :HIDDEN], alone[:, :HIDDEN].bfloat16().float())
            result["features"] = max(result["features"], float((rows - alone).abs().max() / alone.abs().max()))
            at = torch.from_numpy(file.array("loss_mask")[begin:end].copy()).long().nonzero()[:, 0]
            assert at.tolist() == list(range(PROMPT, LENGTHS[b]))
            logits = out.logits[0]
            if exact:  # one process sums bfloat16 in another order: from what was sent, then
                logits = (rows[:, -HIDDEN:].bfloat16() @ whole.lm_head.weight.bfloat16().T).float()
            logits = logits / TEMPERATURE
            lse = lse_N[begin:end][at - 1]
            result["lse"] = max(result["lse"], float((lse - logits.logsumexp(-1)[at - 1]).abs().max()))
            logp = torch.from_numpy(file.array("logprobs")[begin:end].copy())[at]
            expected = logits.log_softmax(-1)[at - 1, one[at]]
            result["logp"] = max(result["logp"], float((logp - expected).abs().max()))
        heads = [mapped(r, Path(directory)) for r in service.requests if r.method == "PUT"]
        name = "lm_head" if "lm_head" in heads[-1] else "embed_tokens"
        result["head"] = torch.equal(as_float(heads[-1], name), whole.lm_head.weight)
        result["head_version"] = int(heads[-1].header.metadata["policy_version"])
        if "embed_tokens" in heads[-1]:
            result["embedding"] = torch.equal(as_float(heads[-1], "embed_tokens"), whole.model.embed_tokens.weight)
    return result


def refused(rank: int, service: Any) -> str:
    """Attach where rank 1 alone is given a config that is not the model's."""
    try:
        attach(gpt([]), service.url, config=llama(tied=False, vocab=VOCAB + 100 * rank), run="r", aux_layers=AUX)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def work(rank: int, out: Path, cases: list[str]) -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    report: dict[str, Any] = {}
    for case in cases:
        found: dict[str, Any] = {}
        with receiver() as service:
            if "predicting" in case:
                service.answer = only_predicting_rows
            if case == "refused":
                found["refused"] = refused(rank, service)
            else:
                with_us = train(rank, case.split(), service, found)
                found["kept"] = keep(service.requests, out / case / f"sent{rank}")
        if case != "refused":
            without = train(rank, case.split(), None, {})
            found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
        report[case] = found
    (out / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    OUT, CASES = Path(sys.argv[1]), sys.argv[2:]
    sys.exit(run_two_ranks(partial(work, out=OUT, cases=CASES)))
