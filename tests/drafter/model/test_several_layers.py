"""EAGLE-3 drafters of two layers: unroll, decoding, replay, files; against loops in float64 and speculators 0.9.0."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.drafter import parity_fixtures
from helpers.drafter.drafter_reference import rms, turn
from helpers.drafter.drafter_worlds import SHAPES, World, mask_of, world
from helpers.drafter.parity_fixtures import Case, Result, case, deviation, theirs
from torch import Tensor

from drafter.errors import DrafterError
from drafter.files.checkpoint import StoredDrafter, config_fingerprint, read_drafter, write_drafter
from drafter.files.formats import export_drafter, import_drafter
from drafter.model import eagle3_unroll as unroll_module
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.policy import TargetHead
from drafter.replay.replay import replay
from drafter.training.loss import DraftLoss, draft_loss
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import make_plan
from examples.reference.cached import attend, cache_heads, embed, fuse


def deepened(one: Eagle3Drafter, layers: int = 2, dtype: torch.dtype = torch.float64) -> Eagle3Drafter:
    """A drafter of more layers with random weights, on the same vocabulary."""
    config = replace(one.config, num_hidden_layers=layers)
    drafter = Eagle3Drafter(config, one.vocabulary).to(dtype)
    g = torch.Generator().manual_seed(layers)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64).to(dtype)
        parameter.data = 0.25 * noise if parameter.ndim == 2 else 1 + 0.25 * noise
    return drafter


def deep_world(shape: str = "packed, awkward", layers: int = 2) -> World:
    w = world(SHAPES[shape])
    return replace(w, drafter=deepened(w.drafter, layers))


def ours(w: World, steps: int) -> DraftLoss:
    plan = w.drafter.plan(w.batch, steps)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)
    target = draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), w.head.dtype)
    return draft_loss(w.drafter, unrolled, target, denominator=7.0, step_decay=0.8)


class Node:
    """One row in one layer, one head at a time."""

    def __init__(self, w: dict[str, Tensor], c: DrafterConfig, layer: str, x: Tensor, r: Tensor, position: int) -> None:
        self.w, self.c, self.layer, self.r = w, c, layer, r
        hd, theta = c.head_dim, c.rope_theta
        q, k, v = (w[f"{layer}.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        self.q = [turn(part, position, theta) for part in torch.split(q, hd)]
        self.k = [turn(part, position, theta) for part in torch.split(k, hd)]
        self.v = list(torch.split(v, hd))

    def pre(self, visible: list[Node]) -> Tensor:
        c, w, heads = self.c, self.w, []
        for h, q in enumerate(self.q):
            g = h // (len(self.q) // len(self.k))
            p = torch.softmax(torch.stack([q @ n.k[g] for n in visible]) / math.sqrt(q.numel()), 0)
            heads.append(sum((p[i] * n.v[g] for i, n in enumerate(visible)), torch.zeros(())))
        h1 = self.r + w[f"{self.layer}.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = rms(h1, w[f"{self.layer}.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = (w[f"{self.layer}.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
        return h1 + w[f"{self.layer}.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)


def reference(w: World, weights: dict[str, Tensor], steps: int) -> list[Tensor]:
    """Sums of KL per step, row by row and layer by layer."""
    c, ids = w.drafter.config, w.drafter.vocabulary.ids
    names = ["midlayer", *(f"layers.{i}" for i in range(1, c.num_hidden_layers))]
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    for doc in w.documents:
        tokens, n = doc.input_ids.tolist(), doc.tokens
        shared: list[list[Node]] = [[] for _ in names]  # step-0 nodes by layer

        def through(t: int, j: int, r: Tensor, own: list[list[Node]], shared=shared, tokens=tokens) -> Tensor:  # type: ignore[no-untyped-def]
            for number, name in enumerate(names):
                if number:
                    x = rms(r, weights[f"{name}.input_layernorm.weight"], c.rms_norm_eps)
                else:
                    e = w.embed_tokens[tokens[t + 1 + j]]
                    e = rms(e, weights[f"{name}.input_layernorm.weight"], c.rms_norm_eps)
                    x = torch.cat([e, rms(r, weights[f"{name}.hidden_norm.weight"], c.rms_norm_eps)])
                node = Node(weights, c, name, x, r, t + j)
                (own if j else shared)[number].append(node)
                r = node.pre(shared[number][: t + 1] + own[number])
            return r

        nothing: list[list[Node]] = [[] for _ in names]
        first = [through(t, 0, weights["fc.weight"] @ doc.aux_hidden[t], nothing) for t in range(n - 1)]
        for t in range(n - 2):
            pre, own = first[t], [[] for _ in names]  # type: ignore[var-annotated]
            for j in range(min(steps, n - 2 - t)):
                pre = through(t, j, pre, own) if j else pre
                if not doc.loss_mask[t + 2 + j]:
                    continue
                z = weights["lm_head.weight"] @ rms(pre, weights["norm.weight"], c.rms_norm_eps)
                p = torch.softmax(w.head @ doc.last_hidden[t + 1 + j], -1)[ids]
                sums[j] = sums[j] + (p * (p / (p.sum() * torch.softmax(z, -1))).log()).sum()
    return sums


@pytest.mark.parametrize(("shape", "layers"), [("packed, awkward", 2), ("packed, half response", 3)])
def test_every_step_and_gradient_equals_the_reference(shape: str, layers: int) -> None:
    w = deep_world(shape, layers)
    weights = {n: p.detach().clone().requires_grad_() for n, p in w.drafter.named_parameters()}
    sums = reference(w, weights, 3)
    total = sum(0.8**j * s for j, s in enumerate(sums)) / 7.0
    assert isinstance(total, Tensor)
    wanted = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
    result = ours(w, 3)
    torch.testing.assert_close(result.kl_sums, torch.stack(sums).detach(), rtol=1e-10, atol=1e-12)
    named = dict(w.drafter.named_parameters())
    for name, gradient in zip(named, torch.autograd.grad(result.loss, list(named.values())), strict=True):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-11, msg=name)


def test_a_later_layer_without_its_own_diagonal_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = deep_world()
    right = ours(w, 3).kl_sums
    real = unroll_module._Later.run

    def forgetful(self: unroll_module._Later, step: int, r: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
        self._diagonal = []
        return real(self, step, r, turned)

    monkeypatch.setattr(unroll_module._Later, "run", forgetful)
    wrong = ours(w, 3).kl_sums
    torch.testing.assert_close(wrong[:2], right[:2])
    assert abs(float(wrong[2] / right[2]) - 1) > 1e-5  # the reference holds it to 1e-10


def test_a_plan_without_every_row_is_refused() -> None:
    w = deep_world("packed, half response")
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 2)
    with pytest.raises(DrafterError, match="plan of every row"):
        unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)


def test_decoding_with_a_cache_equals_the_unroll_at_every_row_and_step() -> None:
    base, steps = world((mask_of(9, 1),)), 3
    d = deepened(base.drafter)
    ids, aux = base.batch.input_ids, base.batch.aux_hidden
    u = d.unroll(d.plan(base.batch, steps), base.batch, base.policy)
    want = {(int(t), j): d.logits(p) for j in range(steps) for t, p in zip(u.rows[j], u.pre[j], strict=True)}
    for t in range(7):
        rows = torch.arange(t + 1)
        pre, k, v = attend(d, embed(d, ids[rows + 1], base.embed_tokens)[None], fuse(d, aux[rows])[None], rows[None])
        assert k.shape[1] == cache_heads(d) == 2 * d.config.num_key_value_heads
        torch.testing.assert_close(d.logits(pre[0, -1]), want[t, 0])
        r = pre[:, -1:]
        for j in range(1, min(steps, 7 - t)):
            embedded = embed(d, ids[t + 1 + j], base.embed_tokens)[None, None]
            r, new_k, new_v = attend(d, embedded, r, torch.tensor([[t + j]]), k, v)
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
            torch.testing.assert_close(d.logits(r[0, 0]), want[t, j])


def test_it_trains_and_is_scored() -> None:
    w = world(SHAPES["packed, half response"], dtype=torch.float32)
    drafter = deepened(w.drafter, dtype=torch.float32)
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2))
    reports = [trainer.step([(w.batch, w.policy)]) for _ in range(30)]
    assert reports[-1].loss < 0.5 * reports[0].loss
    for before, after in zip(reports[0].acceptance_per_step, reports[-1].acceptance_per_step, strict=True):
        assert after > before + 0.1
    assert 1.0 <= replay(drafter, w.batch, w.policy, depth=3).alpha <= 4.0


def test_files_come_back_bit_for_bit_in_every_layout(tmp_path: Path) -> None:
    w = world(SHAPES["packed, half response"], dtype=torch.float32)
    drafter = deepened(w.drafter, 3, torch.float32)
    write_drafter(tmp_path, drafter)
    again = read_drafter(tmp_path)
    assert again.config == drafter.config
    for name, parameter in drafter.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
    for layout in ("sglang", "speculators", "specforge"):
        directory = tmp_path / layout
        directory.mkdir()
        weights = {n: p.detach() for n, p in drafter.named_parameters()}
        if layout == "specforge":
            with pytest.raises(DrafterError, match="SpecForge"):
                export_drafter(directory, StoredDrafter(drafter.config, drafter.vocabulary, weights), layout)
            continue
        export_drafter(directory, StoredDrafter(drafter.config, drafter.vocabulary, weights), layout)
        imported = import_drafter(directory)
        assert imported.stored.config.num_hidden_layers == 3
        assert all(torch.equal(imported.stored.weights[n], t) for n, t in weights.items())
        assert any("SGLang" in note for note in imported.notes)


def test_one_layer_keeps_its_identity_and_several_have_another() -> None:
    drafter = world(SHAPES["packed, half response"]).drafter
    assert "num_hidden_layers" not in drafter.config.identity()
    deep = replace(drafter.config, num_hidden_layers=2)
    one, two = (config_fingerprint(c, drafter.vocabulary) for c in (drafter.config, deep))
    assert one != two


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("draft", [parity_fixtures.VOCAB, 23], ids=["whole vocabulary", "draft vocabulary"])
def test_losses_and_gradients_agree_with_speculators(steps: int, draft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hs_connectors", reason="pip install --no-deps -r tests/peers_requirements.txt")
    c = case((40, 18, 64, 21), response=0.5, draft=draft)
    c = replace(c, drafter=deepened(c.drafter, dtype=torch.float32))
    plan = c.drafter.plan(c.batch, steps)
    unrolled = unroll(c.drafter, plan, c.batch.input_ids, c.batch.aux_hidden, c.embed_tokens)
    target = draft_target(c.batch, plan, c.drafter.vocabulary, TargetHead(c.head))
    result = draft_loss(c.drafter, unrolled, target, denominator=1, step_decay=parity_fixtures.DECAY)
    named = dict(c.drafter.named_parameters())
    found = torch.autograd.grad(result.loss, list(named.values()))
    mine = Result(result.kl_sums, dict(zip(named, found, strict=True)))
    assert deviation(mine, theirs(c, steps, packed=True)) < 1e-5


def test_the_case_for_speculators_has_two_layers() -> None:
    c: Case = case((20,), response=0.5, draft=23)
    assert {n for n, _ in deepened(c.drafter).named_parameters() if n.startswith("layers.1.")}
