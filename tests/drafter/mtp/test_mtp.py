"""The MTP drafter: against a float64 reference, against transformers' own MTP, trained, replayed, exported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_reference import StepResult
from helpers.drafter.drafter_reference import rms as reference_rms
from helpers.drafter.drafter_reference import score as reference_score
from helpers.drafter.drafter_worlds import SHAPES, mask_of, rollouts
from helpers.drafter.mtp_reference import reference_pres
from helpers.drafter.mtp_worlds import CONFIGS, VARIANTS, VOCAB, YARN, drafter_for, glm_config, target_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from drafter.batch import RolloutBatch
from drafter.errors import CheckpointError, DrafterError
from drafter.files.kinds import write_kind
from drafter.files.mtp import extract_mtp, parse_mtp_config, prefix, read_mtp, write_mtp
from drafter.model.pointwise import rms_norm
from drafter.mtp.experts import Cast, Experts, ExpertSizes
from drafter.mtp.module import MtpConfig, MtpDrafter, unroll_mtp
from drafter.policy import Policy, TargetHead
from drafter.replay.replay import replay
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import Plan, make_plan
from drafter.unroll.unrolled import Unrolled
from rl_hooks.format.mtp import LatentSizes, mtp_shapes


def unrolled(drafter: MtpDrafter, policy: Policy, plan: Plan, ids: Tensor, last: Tensor) -> Unrolled:
    return unroll_mtp(drafter, plan, ids, last, policy.embed_tokens, policy.needed_head().lm_head)


@pytest.mark.parametrize(("zero_first", "normed"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_and_step_equals_the_reference(variant: str, zero_first: bool, normed: bool) -> None:
    config = target_config(**VARIANTS[variant])
    drafter, shared = drafter_for(config, zero_first_embedding=zero_first, normed_feedback=normed)
    masks = SHAPES["packed, awkward"]
    g = torch.Generator().manual_seed(7)
    T = sum(m.numel() for m in masks)
    ids = torch.randint(VOCAB, (T,), generator=g)
    last = torch.randn(T, config.hidden_size, generator=g, dtype=torch.float64)
    starts = torch.tensor([0] + [m.numel() for m in masks]).cumsum(0)
    got = unrolled(drafter, shared, make_plan(starts, torch.cat(masks), 3), ids, last)
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    compared = 0
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        expected = reference_pres(
            weights, config, shared.embed_tokens, ids[begin:end].tolist(), last[begin:end], 3, zero_first, normed
        )
        for step in range(3):
            for row, pre in zip(got.rows[step].tolist(), got.pre[step], strict=True):
                if begin <= row < end:
                    assert torch.allclose(pre, expected[row - begin, step], rtol=1e-9, atol=1e-9), (row, step)
                    compared += 1
    assert compared == sum(got.plan.entries) > 60


def transformers_twin(drafter: MtpDrafter, shared: Policy, config: Any) -> MtpModel:
    """MTP as transformers has it, with the same weights."""
    kind = Glm4MoeForCausalLM if config.model_type == "glm4_moe" else DeepseekV3ForCausalLM
    main = kind(config).double()
    main.model.embed_tokens.weight.data = shared.embed_tokens.clone()
    main.lm_head.weight.data = shared.needed_head().lm_head.clone()
    twin = MtpModel(main, 1).double()
    own = {name: tensor for name, tensor in drafter.state_dict().items() if "experts." not in name}
    renamed = {
        (name if name.split(".")[0] in ("enorm", "hnorm", "eh_proj") else f"mtp_block.{name}").replace(
            "mtp_block.shared_head.norm", "post_norm"
        ): tensor
        for name, tensor in own.items()
    }
    if drafter.config.experts is not None:
        full = drafter.state_dict()
        for name in ("gate_proj", "up_proj", "down_proj"):
            key = f"mlp.shared_experts.{name}.weight"
            renamed[f"mtp_block.{key}"] = full[key]
        parts = [
            [full[f"mlp.experts.{e}.{name}.weight"] for e in range(config.n_routed_experts)]
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
        renamed["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], dim=1)
        renamed["mtp_block.mlp.experts.down_proj"] = torch.stack(parts[2])
    twin.layers[0].load_state_dict(renamed)
    return twin.eval()


@torch.no_grad()
@pytest.mark.parametrize("variant", sorted(CONFIGS.keys() - {"dense"}))
def test_every_row_and_step_equals_transformers(variant: str) -> None:
    config = CONFIGS[variant]()
    drafter, shared = drafter_for(config, zero_first_embedding=False, normed_feedback=True)
    twin = transformers_twin(drafter, shared, config)
    n, steps = 11, 3
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (n,), generator=g)
    last = torch.randn(n, config.hidden_size, generator=g, dtype=torch.float64)
    got = unrolled(drafter, shared, make_plan(torch.tensor([0, n]), mask_of(n, 2), steps), ids, last)
    for step in range(steps):
        for row, pre in zip(got.rows[step].tolist(), got.pre[step], strict=True):
            # A round that began at `row` is one causal pass: true features up to it, then its own outputs.
            fed = last[: row + 1]
            for j in range(step + 1):
                out = twin.forward_layer(
                    0,
                    fed[None],
                    torch.arange(row + 1 + j)[None],
                    None,
                    input_ids=ids[1 : row + 2 + j][None],
                )[0]
                fed = torch.cat([fed, out[-1:]])
            normed = rms_norm(pre, drafter.shared_head.norm.weight, config.rms_norm_eps)
            # transformers computes rotary angles in float32
            assert torch.allclose(normed, out[-1], rtol=1e-5, atol=1e-5), (row, step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "lacks kv_lora_rank.*EAGLE-3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "YaRN"),
        ({"v_head_dim": 11}, "v_head_dim"),
        ({"scoring_func": "softmax"}, "sigmoid"),
        ({"n_group": 3}, "3 groups"),
        ({"num_experts_per_tok": 5}, "cannot give 5"),
        ({"num_nextn_predict_layers": 3}, "one module.*num_nextn_predict_layers is 3.*EAGLE-3"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers is True"),
        ({"num_mtp_layers": 2}, "num_mtp_layers is 2"),
        ({"index_topk": 2048}, "index_topk 2048.*EAGLE-3 drafter instead"),
        ({"index_topk": 2048, "hc_mult": 4}, "Nor does an EAGLE-3 drafter fit.* 4 residual.*What works: .*n-grams"),
        ({"first_k_dense_replace": 4}, "layer 3, is dense to vLLM by first_k_dense_replace 4"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ],
)
def test_configs_of_another_layout_are_refused_by_what_differs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        MtpConfig.from_target(target_config().to_dict() | changes)


@pytest.mark.parametrize("figures", [{}, {"mscale": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": None}])
def test_yarn_scales_as_vllm_does(figures: dict[str, Any]) -> None:
    """The law of vLLM's DeepseekScalingRotaryEmbedding, with its defaults."""
    given = {name: value for name, value in figures.items() if value is not None}
    rope = {name: value for name, value in YARN.items() if "mscale" not in name}
    attention = MtpConfig.from_target(target_config().to_dict() | {"rope_parameters": rope | figures}).attention
    assert isinstance(attention, LatentSizes)
    assert attention.yarn is not None
    over, under = (0.1 * given.get(n, d) * math.log(4.0) + 1 for n, d in (("mscale", 1.0), ("mscale_all_dim", 0.0)))
    assert attention.yarn.rotary_scale == pytest.approx(over / under)
    assert attention.yarn.softmax_scale == pytest.approx(under**2)


@pytest.mark.parametrize(
    "figures", [{"mscale": 0.7}, {"mscale_all_dim": 1.0}, {"mscale": 0, "mscale_all_dim": 1.0}, {"mscale": 0}]
)
def test_yarn_that_vllm_and_transformers_scale_differently_is_refused(figures: dict[str, Any]) -> None:
    rope = {name: value for name, value in YARN.items() if "mscale" not in name}
    with pytest.raises(DrafterError, match=r"cos and sin by .* in vLLM and by 1\.139 in transformers; give both"):
        MtpConfig.from_target(target_config().to_dict() | {"rope_parameters": rope | figures})


@pytest.mark.parametrize("family", [target_config, glm_config])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size must be a positive integer.*got 'x'"),
        ({"hidden_size": 24.0}, "hidden_size must be"),
        ({"vocab_size": 10**18}, "vocab_size must be a positive integer up to 16777216"),
        ({"routed_scaling_factor": 10**400}, "routed_scaling_factor must be"),
        ({"num_attention_heads": -1}, "num_attention_heads must be"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": 5}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}, "rope_theta": None}, "rope_theta must be"),
        ({"rope_parameters": {"rope_theta": 1e-300}, "rope_theta": None}, "rope_theta must be a number of 1 or more"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace must be"),
    ],
)
def test_a_field_that_is_no_number_is_named(family: Any, changes: dict[str, Any], message: str) -> None:
    document = family().to_dict() | changes
    with pytest.raises(DrafterError, match=message):
        MtpConfig.from_target(document)
    with pytest.raises(CheckpointError, match=message):
        parse_mtp_config(document)


def test_published_sizes_of_both_families_have_experts_in_their_module() -> None:
    for config, layer, first in ((DeepseekV3Config(), 61, 3), (Glm4MoeConfig(head_dim=128), 46, 1)):  # GLM-4.5-Air
        document = config.to_dict()
        assert (document["num_nextn_predict_layers"], document["first_k_dense_replace"]) == (1, first)
        read = MtpConfig.from_target(document)
        assert read.layer == layer
        assert read.experts is not None
        assert read.experts.routed == config.n_routed_experts
    shallow = target_config(n_routed_experts=0).to_dict() | {"first_k_dense_replace": 4}
    assert MtpConfig.from_target(shallow).experts is None


# --- trained and replayed by what trains and replays EAGLE-3 drafters


@torch.no_grad()
def policy(config: Any = None) -> Any:
    torch.manual_seed(0)
    config = config or target_config()
    model = (Glm4MoeForCausalLM if config.model_type == "glm4_moe" else DeepseekV3ForCausalLM)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=0.7 if "embed" in name or "lm_head" in name else 0.25)
    return model


@torch.no_grad()
def sampled(model: Any, rollouts: int = 24, length: int = 16, prompt: int = 2) -> RolloutBatch:
    """Rollouts drawn from the policy, with its own states and log-probabilities."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCAB, (rollouts, prompt), generator=g)
    while ids.shape[1] < length:
        p = model(input_ids=ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=g)], dim=1)
    out = model(input_ids=ids, output_hidden_states=True)
    logp = out.logits.log_softmax(-1)
    own = torch.zeros(rollouts, length)
    own[:, 1:] = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return RolloutBatch(
        input_ids=ids.flatten(),
        cu_seqlens=torch.arange(0, rollouts * length + 1, length),
        loss_mask=mask_of(length, prompt).repeat(rollouts),
        aux_hidden=torch.zeros(rollouts * length, 1),  # an MTP drafter reads none
        logprobs=own.flatten(),
        last_hidden=out.hidden_states[-1].flatten(0, 1),
        logsumexp=out.logits.logsumexp(-1).flatten(),
    )


def policy_of(model: Any) -> Policy:
    return Policy(0, model.get_input_embeddings().weight.detach(), TargetHead(model.lm_head.weight))


def fresh(model: Any) -> MtpDrafter:
    torch.manual_seed(1)
    config = MtpConfig.from_target(model.config.to_dict())
    return MtpDrafter(config)


@pytest.mark.parametrize("variant", ["experts", "glm"])
def test_the_worker_s_trainer_lowers_its_loss_and_replay_finds_it_better(variant: str) -> None:
    model = policy(CONFIGS[variant]())
    batch, drafter, shared = sampled(model), fresh(model), policy_of(model)
    assert shared.needed_head().logprob_gap(batch)[0] < 1e-5
    before = replay(drafter, batch, shared, depth=3)
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2))
    reports = [trainer.step([(batch, shared)]) for _ in range(25)]
    assert all(report.skipped is None for report in reports)
    assert reports[-1].loss < 0.7 * reports[0].loss
    after = replay(drafter, batch, shared, depth=3)
    assert after.alpha > before.alpha + 0.2


def test_half_precision_serves_it_too() -> None:
    model = policy()
    batch, shared = sampled(model, rollouts=8), policy_of(model)
    config = TrainConfig(steps_ahead=3, learning_rate=1e-2, compute_dtype="bfloat16")
    trainer = DrafterTrainer(fresh(model), config)
    first, *_, last = [trainer.step([(batch, shared)]) for _ in range(15)]
    assert sum(last.acceptance_per_step) > sum(first.acceptance_per_step) + 0.2


def test_an_experts_weights_are_cast_once_for_all_steps() -> None:
    drafter, shared = drafter_for(target_config())
    cast = drafter.float().weights(shared.needed_head().lm_head, torch.bfloat16).experts
    weight = next(drafter.mlp.parameters())
    assert cast(weight).dtype == torch.bfloat16
    assert cast(weight) is cast(weight)
    assert cast(weight).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_multiplied_in_one_call_give_what_they_give_one_by_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. Some experts are chosen by no row; those get a zero gradient in the place of none."""
    torch.manual_seed(3)
    experts = Experts(32, ExpertSizes(routed=8, chosen=3, shared=1, intermediate_size=16, groups=2, chosen_groups=1))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    experts.gate.e_score_correction_bias[[0, 4]] = -9.0  # one of each group's four: its rows choose the other three
    x = torch.randn(7, 32, dtype=dtype, requires_grad=True)
    found = []
    for one_call in (False, True):
        monkeypatch.setattr("drafter.mtp.experts.groups", lambda *_, one_call=one_call: one_call)
        out = experts(x, Cast(dtype))
        (out.float() * torch.arange(32)).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in experts.parameters()]
        found.append([out.detach(), x.grad, *grads])
        experts.zero_grad(set_to_none=True)
        x.grad = None
    assert sum(int(not bool(g.any())) for g in found[0]) >= 6  # three weights of two experts
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (0.05, 0.5)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("variant", ["experts", "glm"])
def test_a_step_never_waits_for_the_device(variant: str) -> None:
    # Reading a number from a meta tensor raises, as does mixing devices.
    config = target_config if variant == "experts" else glm_config
    model = policy(config(moe_intermediate_size=8))
    batch, shared = sampled(model, rollouts=4), policy_of(model)
    trainer = DrafterTrainer(fresh(model), TrainConfig(steps_ahead=3, compute_dtype="bfloat16"))
    drafter = trainer.drafter.to("meta")
    plan = drafter.plan(batch, 3).to("meta")
    shared = replace(shared, embed_tokens=shared.embed_tokens.to("meta"))
    target = draft_target(batch.to("meta"), plan, drafter.vocabulary, shared.needed_head(), torch.bfloat16)
    torch.autograd.backward(trainer.loss_of(plan, batch.to("meta"), shared, target, 1.0).loss)
    assert all(p.grad is not None for p in drafter.parameters())


def test_its_gradients_are_those_of_the_reference() -> None:
    config = target_config()
    drafter, shared = drafter_for(config)
    g = torch.Generator().manual_seed(2)
    ids, n = torch.randint(VOCAB, (9,), generator=g), 9
    last = torch.randn(n, config.hidden_size, generator=g, dtype=torch.float64)
    slope = torch.randn(3, n, config.hidden_size, generator=g, dtype=torch.float64)
    got = unrolled(drafter, shared, make_plan(torch.tensor([0, n]), mask_of(n, 1), 3), ids, last)
    ours = sum((pre * slope[j, got.rows[j]]).sum() for j, pre in enumerate(got.pre))
    named = dict(drafter.named_parameters())
    gradients = torch.autograd.grad(ours, list(named.values()), allow_unused=True)  # type: ignore[arg-type]
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}
    weights |= {name: tensor for name, tensor in drafter.named_buffers() if name.endswith("correction_bias")}
    expected = reference_pres(weights, config, shared.embed_tokens, ids.tolist(), last, 3, True)
    theirs = torch.stack([(pre * slope[j, t]).sum() for (t, j), pre in expected.items()]).sum()
    wanted = torch.autograd.grad(theirs, [weights[name] for name in named], allow_unused=True)
    for name, gradient, want in zip(named, gradients, wanted, strict=True):
        if want is None:  # an expert that no row chose
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None, name
            assert torch.allclose(gradient, want, rtol=1e-8, atol=1e-9), name


def test_gradients_of_grouped_attention_are_the_slopes_of_the_loss() -> None:
    """By differences of the loss along a random direction of each of its parameters."""
    drafter, shared = drafter_for(CONFIGS["glm with biases and head norms"]())
    head = shared.needed_head()
    batch = rollouts(SHAPES["one document, half response"], head.lm_head, 1.0, 3)
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=3, compute_dtype="float64"))
    plan = drafter.plan(batch, 3)
    target = draft_target(batch, plan, drafter.vocabulary, head, torch.float64)

    def loss() -> Tensor:
        return trainer.loss_of(plan, batch, shared, target, 7.0).loss

    named = {name: p for name, p in drafter.named_parameters() if name.startswith("self_attn.")}
    assert len(named) == 9
    g = torch.Generator().manual_seed(1)
    for (name, parameter), gradient in zip(
        named.items(), torch.autograd.grad(loss(), list(named.values())), strict=True
    ):
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        start, ends = parameter.detach().clone(), []
        for step in (1e-6, -1e-6):
            parameter.data = start + step * direction
            ends.append(float(loss().detach()))
        parameter.data = start
        slope = float((gradient * direction).sum())
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_window_of_two_policies_is_drafted_with_each_ones_embedding_and_head(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, masks, steps = target_config(), (mask_of(8, 2), mask_of(6, 1)), 3
    drafter, first = drafter_for(config)
    g = torch.Generator().manual_seed(11)
    sizes = (VOCAB, config.hidden_size)
    other = torch.randn(sizes, generator=g, dtype=torch.float64)
    policies = [first, Policy(1, other, TargetHead(torch.randn(sizes, generator=g, dtype=torch.float64)))]
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=steps, compute_dtype="float64", grad_clip=0.0))
    given: dict[str, Tensor] = {}

    def keep(_: float) -> None:
        given.update({n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None})

    monkeypatch.setattr(trainer._optimizer, "step", keep)
    weights = {name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()}
    buffers = {name: tensor for name, tensor in drafter.named_buffers() if name.endswith("correction_bias")}
    zero = torch.zeros((), dtype=torch.float64)
    results = [StepResult(zero, 0.0, [], []) for _ in range(steps)]
    window = []
    for index in order:
        shared = policies[index]
        head = shared.needed_head().lm_head
        batch = replace(rollouts(masks, head, 1.0, seed=index), policy_version=index)
        window.append((batch, shared))
        for document in (batch.select([i]) for i in range(batch.rollouts)):
            ids, last = document.input_ids.tolist(), document.last_hidden
            pres = reference_pres(weights | buffers, config, shared.embed_tokens, ids, last, steps, True)
            for (row, step), pre in pres.items():
                if row + 2 + step < len(ids) and document.loss_mask[row + 2 + step]:
                    z = head @ reference_rms(pre, weights["shared_head.norm.weight"], config.rms_norm_eps)
                    reference_score(results[step], z, head @ last[row + 1 + step], list(range(VOCAB)), 1.0)
                    results[step].rows.append(row)
    decay, tokens = trainer.config.step_decay, sum(batch.response_tokens for batch, _ in window)
    loss = torch.stack([decay**j * r.kl for j, r in enumerate(results)]).sum() / tokens
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    report = trainer.step(window)
    assert report.entries_per_step == tuple(len(r.rows) for r in results)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    for name, want in zip(weights, gradients, strict=True):
        if want is not None:  # None: of an expert that no row chose
            torch.testing.assert_close(given[name], want, rtol=1e-8, atol=1e-10)


def test_a_trainer_s_state_is_resumed_to_the_bit(tmp_path: Path) -> None:
    model = policy()
    batch, shared = sampled(model, rollouts=6), policy_of(model)
    config = TrainConfig(steps_ahead=2, learning_rate=1e-2)
    one = DrafterTrainer(fresh(model), config)
    one.step([(batch, shared)])
    one.save(tmp_path)
    write_kind(tmp_path, one.drafter)
    two = DrafterTrainer(read_mtp(tmp_path), config)
    two.load(tmp_path)
    for trainer in (one, two):
        trainer.step([(batch, shared)])
    for name, parameter in one.drafter.named_parameters():
        assert torch.equal(parameter, dict(two.drafter.named_parameters())[name]), name


@torch.no_grad()
def test_replay_of_greedy_drafts_counts_the_rounds_that_live_drafting_with_transformers_takes() -> None:
    model = policy()
    batch, depth, n = sampled(model, rollouts=6), 3, 16
    learner = DrafterTrainer(fresh(model), TrainConfig(steps_ahead=depth, learning_rate=1e-2))
    shared = policy_of(model)
    with torch.enable_grad():
        for _ in range(25):
            learner.step([(batch, shared)])
    assert isinstance(learner.drafter, MtpDrafter)
    drafter = MtpDrafter(replace(learner.drafter.config, zero_first_embedding=False))
    drafter.load_state_dict(learner.drafter.state_dict())
    twin = transformers_twin(drafter, shared, model.config).float()
    ids, last = batch.input_ids.view(-1, n), batch.last_hidden.view(-1, n, 24)
    rounds, accepted = [], 0
    for text, states in zip(ids, last, strict=True):
        emitted, count = 3, 0  # a prompt of two tokens, and the first response token, which the prefill gives
        while emitted < n:
            count += 1
            fed, drafts = states[: emitted - 1], text[1:emitted]
            for _ in range(min(depth, n - emitted)):
                out = twin.forward_layer(0, fed[None], torch.arange(len(fed))[None], None, input_ids=drafts[None])[0]
                guess = int(twin.shared_head(out[-1]).argmax())
                if guess != int(text[emitted]):
                    break
                fed, drafts = torch.cat([fed, out[-1:]]), torch.cat([drafts, torch.tensor([guess])])
                emitted, accepted = emitted + 1, accepted + 1
            emitted += 1  # the verified token that ends the round
        rounds.append(count)
    assert accepted > 10, "or nothing was tested"
    assert replay(drafter, batch, shared, depth=depth, drafting="greedy").rounds.tolist() == rounds


def break_halves(drafter: MtpDrafter) -> None:
    drafter.eh_proj.weight.data = drafter.eh_proj.weight.data.roll(24, dims=1)


def break_norms(drafter: MtpDrafter) -> None:
    drafter.enorm.weight.data, drafter.hnorm.weight.data = drafter.hnorm.weight.data, drafter.enorm.weight.data


def break_bias(drafter: MtpDrafter) -> None:
    dict(drafter.named_buffers())["mlp.gate.e_score_correction_bias"].mul_(-1)


def break_rotation(drafter: MtpDrafter) -> None:
    sizes = drafter.self_attn.sizes
    assert isinstance(sizes, LatentSizes)
    drafter.self_attn.sizes = replace(sizes, interleaved=False)


def break_first(drafter: MtpDrafter) -> None:
    drafter.config = replace(drafter.config, zero_first_embedding=False)


def break_norming(drafter: MtpDrafter) -> None:
    drafter.config = replace(drafter.config, normed_feedback=False)


def break_feedback(drafter: MtpDrafter) -> None:
    drafter.shared_head.norm.weight.data = drafter.shared_head.norm.weight.data.flip(0)


@pytest.mark.parametrize(
    "mutation", [break_halves, break_norms, break_bias, break_rotation, break_first, break_norming, break_feedback]
)
def test_a_broken_module_is_seen_by_the_comparison(mutation: Any) -> None:
    config = target_config()
    drafter, shared = drafter_for(config)
    n = 10
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (n,), generator=g)
    last = torch.randn(n, config.hidden_size, generator=g, dtype=torch.float64)
    weights = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    expected = reference_pres(weights, config, shared.embed_tokens, ids.tolist(), last, 2, True)

    def deviation() -> float:
        got = unrolled(drafter, shared, make_plan(torch.tensor([0, n]), mask_of(n, 1), 2), ids, last)
        return max(
            float((pre - expected[row, step]).abs().max().detach())
            for step in range(2)
            for row, pre in zip(got.rows[step].tolist(), got.pre[step], strict=True)
        )

    assert deviation() < 1e-9
    mutation(drafter)
    assert deviation() > 1e-3


# --- on disk, by DeepSeek-V3's names


@pytest.mark.parametrize("variant", CONFIGS)
def test_what_is_written_is_read_back_to_the_bit(variant: str, tmp_path: Path) -> None:
    drafter = drafter_for(CONFIGS[variant](), zero_first_embedding=variant != "dense")[0].float()
    write_mtp(tmp_path, drafter)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}
    back = read_mtp(tmp_path)
    assert back.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert mtp_shapes(back.config) == {name: tuple(t.shape) for name, t in drafter.state_dict().items()}


@torch.no_grad()
@pytest.mark.parametrize("variant", ["experts", "glm with biases and head norms"])
def test_transformers_loads_the_export_as_the_policys_mtp_layer_and_computes_the_same(
    variant: str, tmp_path: Path
) -> None:
    model = policy(CONFIGS[variant]())
    model.save_pretrained(tmp_path / "policy")
    drafter = replace_norms(fresh(model))
    exported = tmp_path / "mtp"
    exported.mkdir()
    write_mtp(exported, drafter)
    # As published: one checkpoint holds the policy's layers and the module's.
    merged = load_file(tmp_path / "policy/model.safetensors") | load_file(exported / "model.safetensors")
    save_file(merged, tmp_path / "policy/model.safetensors", metadata={"format": "pt"})
    main = type(model).from_pretrained(tmp_path / "policy", experts_implementation="eager").eval()
    main._keys_to_ignore_on_load_unexpected = [r"layers\.3\."]  # names layer 61, as the published model has
    twin = MtpModel.from_pretrained(main).eval()
    g = torch.Generator().manual_seed(1)
    ids, last = torch.randint(VOCAB, (8,), generator=g), torch.randn(8, 24, generator=g)
    theirs = twin.forward_layer(0, last[None, :7], torch.arange(7)[None], None, input_ids=ids[None, 1:])[0]
    plain = MtpDrafter(replace(drafter.config, zero_first_embedding=False))
    plain.load_state_dict(drafter.state_dict())
    got = unrolled(plain, policy_of(model), make_plan(torch.tensor([0, 8]), mask_of(8, 1), 1), ids, last)
    ours = rms_norm(got.pre[0], plain.shared_head.norm.weight, plain.config.rms_norm_eps)
    assert torch.allclose(ours, theirs[got.rows[0]], rtol=1e-4, atol=1e-5)


def replace_norms(drafter: MtpDrafter) -> MtpDrafter:
    """Gains away from 1, so that a norm in the wrong place shows."""
    g = torch.Generator().manual_seed(9)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape, generator=g)
        else:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=g)
    return drafter


def test_a_module_is_read_out_of_the_policys_sharded_checkpoint_and_the_copies_in_it_are_compared(
    tmp_path: Path,
) -> None:
    drafter, shared = drafter_for(target_config())
    write_mtp(tmp_path, drafter.float())
    tensors = load_file(tmp_path / "model.safetensors")
    embed_tokens, head = shared.embed_tokens.float(), shared.needed_head().lm_head.float()
    where = prefix(drafter.config)
    tensors |= {f"{where}embed_tokens.weight": embed_tokens, f"{where}shared_head.head.weight": head}
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(24)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i}.safetensors": names[i::2] for i in range(2)}
    for file, held in shards.items():
        save_file({name: tensors[name].clone() for name in held}, tmp_path / file)
    index = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    back = read_mtp(tmp_path, Policy(0, embed_tokens, TargetHead(head)))
    assert torch.equal(back.eh_proj.weight, drafter.eh_proj.weight)
    (tmp_path / "alone").mkdir()
    extract_mtp(tmp_path, tmp_path / "alone")
    alone = load_file(tmp_path / "alone/model.safetensors")
    assert alone.keys() == {where + name for name in drafter.state_dict()}
    assert all(torch.equal(alone[where + name], tensor) for name, tensor in drafter.state_dict().items())
    assert read_mtp(tmp_path / "alone").config == drafter.config
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight.*not the policy's head"):
        read_mtp(tmp_path, Policy(0, embed_tokens, TargetHead(head + 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.eh_proj.weight"), r"missing: eh_proj\.weight"),
        (lambda t: t.update({"model.layers.3.eh_proj.weight_scale_inv": torch.ones(1)}), "dequantised"),
        (lambda t: t.update({"model.layers.3.enorm.weight": torch.ones(5)}), r"enorm\.weight must be \(24,\)"),
        (lambda t: t["model.layers.3.hnorm.weight"].fill_(float("nan")), r"hnorm\.weight holds NaN"),
        (lambda t: [t.pop(n) for n in list(t)] and t.update(x=torch.ones(1)), "has no MTP module"),
    ],
)
def test_broken_files_are_refused_by_what_is_wrong(change: Any, message: str, tmp_path: Path) -> None:
    drafter = drafter_for(target_config())[0].float()
    write_mtp(tmp_path, drafter)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_mtp(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"weight_map": null}', "weight_map must be an object"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {"model.layers.3.eh_proj.weight": 5}}', "a file outside its directory: 5"),
        ('{"weight_map": {"model.layers.3.eh_proj.weight": "../x"}}', "a file outside its directory: '../x'"),
        (
            '{"weight_map": {"model.layers.3.eh_proj.weight": "absent.safetensors"}}',
            r"absent\.safetensors cannot be read",
        ),
        ('{"weight_map": {"model.layers.0.eh_proj.weight": "absent.safetensors"}}', "has no MTP module"),
    ],
)
def test_a_broken_index_is_refused_by_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    drafter = drafter_for(target_config())[0].float()
    write_mtp(tmp_path, drafter)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_mtp(tmp_path)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    drafter = drafter_for(target_config())[0].float()
    drafter.eh_proj.weight.data[0, 0] = 1e30
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight is not finite as torch\.float16"):
        write_mtp(tmp_path, drafter, dtype=torch.float16)


def test_the_switches_default_to_what_vllm_does_with_each_family_and_can_be_said(tmp_path: Path) -> None:
    assert MtpConfig.from_target(target_config().to_dict()).normed_feedback
    glm = glm_config().to_dict()
    assert not MtpConfig.from_target(glm).normed_feedback
    said = glm | {"draftalign": {"kind": "mtp", "normed_feedback": True, "zero_first_embedding": False}}
    assert parse_mtp_config(said) == MtpConfig.from_target(glm, zero_first_embedding=False, normed_feedback=True)
    with pytest.raises(CheckpointError, match="normed_feedback must be true or false"):
        parse_mtp_config(glm | {"draftalign": {"normed_feedback": "yes"}})
