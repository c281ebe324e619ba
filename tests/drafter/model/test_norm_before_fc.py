"""A norm over the features before fc, as published drafters of gpt-oss have it: every path of the drafter with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, World, expected, gradients, ours, world
from helpers.drafter.formats_fixtures import folder, rewrite

from drafter.errors import CheckpointError
from drafter.files.checkpoint import StoredDrafter, config_fingerprint, export_config, read_drafter, write_drafter
from drafter.files.formats import export_drafter, import_drafter
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.model.pointwise import rms_norm
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from examples.reference.cached import attend, embed, fuse
from rl_hooks.engines.candidate import running_sizes
from rl_hooks.format.drafter import differences
from rl_hooks.format.engines import limits

NORM = "input_norm.weight"


def normed(w: World, **form: Any) -> World:
    """The world with a drafter that has the norm, its weights those of a trained one: none is 1."""
    dtype = next(w.drafter.parameters()).dtype
    drafter = Eagle3Drafter(replace(w.drafter.config, norm_before_fc=True, **form), w.drafter.vocabulary).to(dtype)
    absent, unknown = drafter.load_state_dict(w.drafter.state_dict(), strict=False)
    assert (absent, unknown) == ([NORM], [])
    assert drafter.input_norm is not None
    gains = torch.randn(drafter.input_norm.weight.shape, generator=torch.Generator().manual_seed(5), dtype=dtype)
    drafter.input_norm.weight.data = 1 + 0.3 * gains
    return replace(w, drafter=drafter)


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_equal_the_float64_reference(shape: str) -> None:
    w = normed(world(SHAPES[shape]))
    want, got = expected(w, 3), ours(w, 3)
    assert got.kl_sums.tolist() == pytest.approx(want.kl, rel=1e-10)
    found = gradients(w, got.loss)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-8, atol=1e-11, msg=name)
    assert bool((found[NORM] != 0).all())
    assert ours(world(SHAPES[shape]), 3).kl_sums.tolist() != pytest.approx(want.kl, rel=1e-3), "the norm does something"


def test_its_gradient_is_the_numerical_one_with_features_that_have_none() -> None:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(5, 12, generator=g, dtype=torch.float64)
    gains = torch.randn(12, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda gains: rms_norm(features, gains, 1e-6), (gains,))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, gains.detach(), 1e-6), (features.clone().requires_grad_(),))


def test_decoding_with_a_cache_equals_the_unroll_at_every_row_and_step() -> None:
    w, steps = normed(world(SHAPES["one document, full response"])), 3
    d, ids, aux = w.drafter, w.batch.input_ids, w.batch.aux_hidden
    u = d.unroll(d.plan(w.batch, steps), w.batch, w.policy)
    want = {(int(t), j): d.logits(p) for j in range(steps) for t, p in zip(u.rows[j], u.pre[j], strict=True)}
    for t in range(7):
        rows = torch.arange(t + 1)
        pre, k, v = attend(d, embed(d, ids[rows + 1], w.embed_tokens)[None], fuse(d, aux[rows])[None], rows[None])
        torch.testing.assert_close(d.logits(pre[0, -1]), want[t, 0])
        r = pre[:, -1:]
        for j in range(1, steps):
            embedded = embed(d, ids[t + 1 + j], w.embed_tokens)[None, None]
            r, new_k, new_v = attend(d, embedded, r, torch.tensor([[t + j]]), k, v)
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
            torch.testing.assert_close(d.logits(r[0, 0]), want[t, j])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_it_trains_with_its_norm_and_is_scored(optimizer: Any) -> None:
    w = normed(world(SHAPES["packed, half response"], dtype=torch.float32))
    assert w.drafter.input_norm is not None
    before = w.drafter.input_norm.weight.detach().clone()
    trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2, optimizer=optimizer))
    reports = [trainer.step([(w.batch, w.policy)]) for _ in range(30)]
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert bool((w.drafter.input_norm.weight != before).all())
    assert 1.0 <= replay(w.drafter, w.batch, w.policy, depth=3).alpha <= 4.0


def stored(w: World) -> StoredDrafter:
    weights = {name: p.detach().clone() for name, p in w.drafter.named_parameters()}
    return StoredDrafter(w.drafter.config, w.drafter.vocabulary, weights)


def test_files_come_back_bit_for_bit_where_their_readers_have_the_norm(tmp_path: Path) -> None:
    w = normed(world(SHAPES["packed, half response"], dtype=torch.float32))
    write_drafter(tmp_path, w.drafter)
    again = read_drafter(tmp_path)
    assert again.config == w.drafter.config
    assert again.config.norm_before_fc
    for name, parameter in w.drafter.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
    export_drafter(folder(tmp_path / "speculators"), stored(w), "speculators")
    imported = import_drafter(tmp_path / "speculators").stored
    assert imported.config == w.drafter.config
    assert all(torch.equal(imported.weights[name], weight) for name, weight in stored(w).weights.items())
    with pytest.raises(CheckpointError, match=r"SpecForge's model does not have"):
        export_drafter(folder(tmp_path / "specforge"), stored(w), "specforge")
    rewrite(tmp_path, lambda document: document.pop("norm_before_fc"))
    with pytest.raises(CheckpointError, match=r"not part of the layout: input_norm\.weight"):
        read_drafter(tmp_path)


def test_it_is_part_of_the_identity_and_a_drafter_without_it_keeps_its_own() -> None:
    w = world(SHAPES["packed, half response"])
    plain, own = w.drafter.config, normed(w).drafter.config
    assert "norm_before_fc" not in plain.identity()
    assert config_fingerprint(plain, w.drafter.vocabulary) != config_fingerprint(own, w.drafter.vocabulary)
    assert differences(plain, own) == ["norm_before_fc is False here, True there"]
    assert not [*limits("vllm", own), *limits("sglang", own)]


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({"norm_before_fc": True}, True),
        ({"norm_before_fc": None}, False),
        ({"eagle_config": {"norm_before_fc": True}}, True),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": None}}, False),
        ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, True),
        ({"norm_before_fc": True, "eagle_config": {"use_aux_hidden_state": True}}, True),
    ],
)
def test_an_engines_own_config_is_read_as_the_engine_reads_it(config: dict[str, Any], on: bool) -> None:
    """VLLM and SGLang take what `eagle_config` says, and the field beside it where that says nothing."""
    document = export_config(DrafterConfig(16, 16, 24, 4, 2, 4, 40, 20, (2, 4, 5)))
    assert running_sizes({**document, **config}, (2, 4, 5)).norm_before_fc is on
