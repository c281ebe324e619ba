"""Our exports in the models of speculators and SpecForge, and what they save in ours: same bits, same figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter import parity_fixtures
from helpers.drafter.parity_fixtures import VOCAB, Case, case, deviation, ours, theirs
from safetensors.torch import load_file

from drafter.files.checkpoint import StoredDrafter
from drafter.files.formats import Verifier, export_drafter, import_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.unroll.plan import make_plan
from rl_hooks.format.eagle3 import Llama3Rope

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def drafted(*, draft: int, **form: Any) -> Case:
    c = case((60, 31), response=0.6, draft=draft)
    config = replace(c.drafter.config, **form)
    with torch.random.fork_rng(devices=[]):
        drafter = Eagle3Drafter(config, c.drafter.vocabulary)
    drafter.load_state_dict(c.drafter.state_dict(), strict=False)
    if drafter.input_norm is not None:
        drafter.input_norm.weight.data = torch.linspace(0.5, 2.0, drafter.input_norm.weight.numel())
    c.drafter = drafter
    return c


#: What a drafter may be beside the plain one.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "scaled rotary positions": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 32)},
    "a norm before fc": {"norm_before_fc": True},
}


def stored(c: Case) -> StoredDrafter:
    weights = {name: p.detach().clone() for name, p in c.drafter.named_parameters()}
    return StoredDrafter(c.drafter.config, c.drafter.vocabulary, weights)


def loaded(directory: Path, c: Case) -> Any:
    """Their model from our files, with what it takes from the verifier filled in."""
    pytest.importorskip("hs_connectors", reason="pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0")
    eagle3 = parity_fixtures._imported("speculators.models.eagle3")
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "sdpa"
    with pytest.MonkeyPatch.context() as patch:  # it would look the verifier up by its name
        patch.setattr(eagle3.Eagle3DraftModel, "load_verifier_weights", lambda _: None)
        model = eagle3.Eagle3DraftModel.from_pretrained(directory, config=config)
    verifiers = {
        "embed_tokens.weight": c.embed_tokens,
        "verifier_lm_head.weight": c.head[c.drafter.vocabulary.ids],
        "verifier_norm.weight": c.final_norm,
    }
    model.load_state_dict(verifiers, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in verifiers)
    return model


@pytest.mark.parametrize("draft", [VOCAB, 23], ids=["whole vocabulary", "draft vocabulary"])
@pytest.mark.parametrize("form", FORMS)
def test_their_model_computes_from_our_files_what_ours_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, draft: int
) -> None:
    c = drafted(draft=draft, **FORMS[form])
    export_drafter(tmp_path, stored(c), "speculators", verifier=Verifier(None, ("LlamaForCausalLM",)))
    monkeypatch.setattr(parity_fixtures, "_model", lambda case: loaded(tmp_path, case))
    got = theirs(c, 4, packed=True)
    assert deviation(ours(c, 4), got) < 1e-5
    other = ours(drafted(draft=draft, **FORMS["plain" if FORMS[form] else "normed residual"]), 4)
    assert float((other.sums / got.sums - 1).abs().max()) > 1e-3, "the switch is in their config as well"


@pytest.mark.parametrize("form", FORMS)
def test_what_their_model_saves_comes_back_bit_for_bit(tmp_path: Path, form: str) -> None:
    c = drafted(draft=23, **FORMS[form])
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    export_drafter(first, stored(c), "speculators")
    loaded(first, c).save_pretrained(second)
    imported = import_drafter(second)
    assert imported.stored.vocabulary == c.drafter.vocabulary
    assert replace(imported.stored.config, model_type="llama", max_position_embeddings=1) == replace(
        c.drafter.config, model_type="llama", max_position_embeddings=1
    )
    for name, weight in stored(c).weights.items():
        assert torch.equal(imported.stored.weights[name], weight), name
    assert any("embed_tokens.weight is left out" in note for note in imported.notes)
    assert any("SGLang" in note for note in imported.notes) == (form == "normed residual")


def test_specforges_own_model_computes_from_our_export_what_ours_computes(tmp_path: Path) -> None:
    """Three steps, each fed by the last. Our canonical config, whose `norm_output` is false, would not do there."""
    eagle = pytest.importorskip(
        "specforge.modeling.draft.llama3_eagle", reason="pip install --no-deps specforge==0.2.0"
    )
    transformers, c = parity_fixtures._imported("transformers"), drafted(draft=23)
    b = c.batch.select([0])
    T = b.tokens
    plan = make_plan(b.cu_seqlens, torch.ones(T, dtype=torch.bool), 3)
    unrolled = unroll(c.drafter, plan, b.input_ids, b.aux_hidden, c.embed_tokens)
    agrees = {}
    for layout in ("specforge", "sglang"):
        directory = tmp_path / layout
        directory.mkdir()
        export_drafter(directory, stored(c), layout)
        model = eagle.LlamaForCausalLMEagle3(transformers.LlamaConfig.from_pretrained(directory)).float()
        absent, unknown = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
        assert (absent, unknown) == (["embed_tokens.weight"], [])
        model.embed_tokens.weight.data.copy_(c.embed_tokens)
        mask = eagle.prepare_decoder_attention_mask(torch.ones(1, T, dtype=torch.bool), (1, T), b.aux_hidden[None], 0)
        h, errors = model.project_hidden_states(b.aux_hidden[None]), []
        cache: list[list[torch.Tensor]] = [[], []]
        for step in range(3):
            tokens = torch.zeros(1, T, dtype=torch.int64)
            tokens[0, : T - 1 - step] = b.input_ids[1 + step :]
            h = model.backbone(model.embed_input_ids(tokens), h, cache, mask, torch.arange(T)[None], None, True)
            want = c.drafter.logits(unrolled.pre[step])
            errors.append(
                float((model.compute_logits(h)[0, unrolled.rows[step]] - want).abs().max() / want.abs().max())
            )
        agrees[layout] = max(errors) < 1e-5
    assert agrees == {"specforge": True, "sglang": False}
