"""Drafters as others write them: layouts, names, archives; what is read, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.formats_fixtures import CONFIG, SOME, first, folder, retensor, rewrite, stored
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from drafter.errors import CheckpointError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    StoredDrafter,
    config_fingerprint,
    read_stored,
    write_stored,
)
from drafter.files.formats import export_drafter, import_drafter
from service.cli.main import app
from service.errors import ConfigurationError

EMBEDDING = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))


def safeailab(directory: Path) -> Path:
    """As the published EAGLE-3 checkpoints: few fields, no layer ids, an embedding, an int32 map."""
    write_stored(directory, stored(torch.float16))
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    rewrite(
        directory,
        lambda d: (
            d.update({name: ... for name in d if name not in (*kept, "draft_vocab_size", "rms_norm_eps", "head_dim")}),
            d.update(architectures=["LlamaForCausalLM"], max_position_embeddings=2048, tie_word_embeddings=False),
            d.update(rope_scaling=None, pretraining_tp=1),
        ),
    )
    return retensor(
        directory,
        lambda t: t.update({"embed_tokens.weight": EMBEDDING.half(), "d2t": t["d2t"].to(torch.int32)}),
    )


def test_a_safeailab_checkpoint_is_read_once_its_layers_are_named(tmp_path: Path) -> None:
    safeailab(tmp_path)
    with pytest.raises(CheckpointError, match=r"--aux-layers 2,18,33"):
        import_drafter(tmp_path)
    imported = import_drafter(tmp_path, aux_layers=(2, 3, 5))
    assert imported.stored.config == replace(CONFIG, rope_theta=1e4, max_position_embeddings=2048, model_type="llama")
    assert any("embed_tokens.weight is left out" in note for note in imported.notes)
    assert any("rope_theta: 10000 is assumed" in note for note in imported.notes)
    assert any(note.startswith("it says max_position_embeddings 2048: vLLM's V1") for note in imported.notes)
    for name, weight in stored(torch.float16).weights.items():
        assert torch.equal(imported.stored.weights[name], weight), name
    assert imported.stored.vocabulary == SOME


def test_a_limit_that_nobody_gave_is_told(tmp_path: Path) -> None:
    write_stored(tmp_path, stored())
    rewrite(tmp_path, lambda d: d.update(max_position_embeddings=32_768))
    assert import_drafter(tmp_path).notes == ()
    rewrite(tmp_path, lambda d: d.pop("max_position_embeddings"))
    (note,) = import_drafter(tmp_path).notes
    assert "gives no max_position_embeddings, so transformers assumes max_position_embeddings 2048" in note


def test_output_ids_alone_are_read_as_output_ids(tmp_path: Path) -> None:
    """SpecForge, TorchSpec and NeMo-RL write those only; taken for entering ids they would be one layer off."""
    write_stored(tmp_path, stored())
    rewrite(tmp_path, lambda d: d.update(eagle_aux_hidden_state_layer_ids=...))
    assert import_drafter(tmp_path).stored.config.aux_layers == (2, 3, 5)
    with pytest.raises(CheckpointError, match="you say"):
        import_drafter(tmp_path, aux_layers=(1, 2, 4))


def test_a_speculators_config_that_leaves_the_residual_open_is_not_guessed(tmp_path: Path) -> None:
    """Engines take it for true, speculators for false: 3.24 -> 2.49 on the same weights, and no error."""
    export_drafter(tmp_path, stored(), "speculators")
    rewrite(tmp_path, lambda d: d.update(norm_before_residual=...))
    with pytest.raises(CheckpointError, match="vLLM takes that for true"):
        import_drafter(tmp_path)
    assert import_drafter(tmp_path, norm_before_residual=False).stored.config.norm_before_residual is False
    assert import_drafter(tmp_path, norm_before_residual=True).stored.config.norm_before_residual is True


def test_a_normed_residual_is_imported_and_says_who_cannot_serve_it(tmp_path: Path) -> None:
    there, back = folder(tmp_path / "there"), folder(tmp_path / "back")
    export_drafter(there, stored(norm_before_residual=True), "speculators")
    imported = import_drafter(there)
    assert imported.stored.config.norm_before_residual is True
    assert any("SGLang" in note and "vLLM serves it" in note for note in imported.notes)
    for layout in ("sglang", "specforge"):
        with pytest.raises(CheckpointError, match="norm_before_residual is true"):
            export_drafter(back, imported.stored, layout)
    assert list(back.iterdir()) == [], "nothing is written of what is refused"
    with pytest.raises(CheckpointError, match="you say False"):
        import_drafter(there, norm_before_residual=False)


def pickled(directory: Path, file: str, change: Callable[[dict[str, Any]], Any] = dict) -> Path:
    """Put the tensors of model.safetensors into a pickle, as torch saves a state_dict or SpecForge's trainer a state.

    `change` gets what is about to be saved.
    """
    state: dict[str, Any] = load_file(directory / MODEL_FILE)
    (directory / MODEL_FILE).unlink()
    if file == "training_state.pt":  # specforge 0.2.0, training/controller.py; the optimizer is its biggest part
        moments = {"exp_avg": torch.zeros(6, 16), "step": 7}
        state = {"draft_state_dict": state, "global_step": 7, "epoch": 0, "strategy": "eagle3", "run_id": "a"}
        state["replicated_optimizer_state"] = {"state": {0: moments}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    change(state)
    torch.save(state, directory / file)
    return directory


def same(imported: StoredDrafter, want: StoredDrafter) -> bool:
    """Whether both hold the same bits under the same names."""
    return (
        imported.vocabulary == want.vocabulary
        and imported.weights.keys() == want.weights.keys()
        and all(t.dtype == want.dtype and torch.equal(t, want.weights[n]) for n, t in imported.weights.items())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "training_state.pt"])
def test_a_pickle_of_tensors_is_read_to_the_bit_where_a_person_names_it(
    tmp_path: Path, file: str, dtype: torch.dtype
) -> None:
    export_drafter(tmp_path, stored(dtype), "specforge")
    before = import_drafter(tmp_path, pickles=True, layout="specforge").stored
    pickled(tmp_path, file)
    with pytest.raises(CheckpointError, match=r"only safetensors is read; `draftalign convert --pickle`"):
        import_drafter(tmp_path)
    imported = import_drafter(tmp_path, pickles=True)
    assert imported.layout == ("specforge" if file == "training_state.pt" else "sglang")
    assert same(imported.stored, before)
    assert imported.stored.config == before.config
    again = folder(tmp_path / "again")
    write_stored(again, imported.stored)
    assert same(read_stored(again), stored(dtype)), "what was read can be written"


def test_safeailabs_published_layout_is_read_as_the_pickle_that_it_is(tmp_path: Path) -> None:
    safeailab(tmp_path)
    pickled(tmp_path, "pytorch_model.bin")
    imported = import_drafter(tmp_path, aux_layers=(2, 3, 5), pickles=True)
    assert same(imported.stored, stored(torch.float16))
    assert any("embed_tokens.weight is left out" in note for note in imported.notes)


def test_a_specforge_state_says_what_norm_output_means_and_takes_a_named_config(tmp_path: Path) -> None:
    """SpecForge's trainer writes no config beside its states."""
    there, elsewhere = folder(tmp_path / "run-step7"), tmp_path / "draft.json"
    export_drafter(there, stored(), "specforge")
    rewrite(there, lambda d: d.update(norm_output=True))
    pickled(there, "training_state.pt")
    assert import_drafter(there, pickles=True).stored.config == CONFIG
    with pytest.raises(CheckpointError, match=r"has its own config\.json, and you name"):
        import_drafter(there, pickles=True, config_file=there / CONFIG_FILE)
    (there / CONFIG_FILE).rename(elsewhere)
    with pytest.raises(
        CheckpointError, match=r"has no config\.json; put it there \(or name it: convert --draft-config FILE\)"
    ):
        import_drafter(there, pickles=True)
    with pytest.raises(CheckpointError, match=r"nowhere\.json is no file"):
        import_drafter(there, pickles=True, config_file=tmp_path / "nowhere.json")
    assert same(import_drafter(there, pickles=True, config_file=elsewhere).stored, stored())


def test_the_command_line_reads_pickles_of_tensors_and_refuses_others_in_one_line(tmp_path: Path) -> None:
    there, new, elsewhere = folder(tmp_path / "run-step7"), tmp_path / "new", tmp_path / "draft.json"
    export_drafter(there, stored(), "specforge")
    pickled(there, "training_state.pt")
    (there / CONFIG_FILE).rename(elsewhere)
    run = CliRunner().invoke
    named = [str(there), "--draft-config", str(elsewhere)]
    convert = ["convert", str(there), str(new), "--to", "sglang"]
    for unasked in ([*convert, *named[1:]], ["inspect", str(there)]):
        assert "draftalign convert --pickle" in str(run(app, unasked).exception), "never without being told to"
    assert "--draft-config" in str(run(app, [*convert, "--pickle"]).exception)
    run(app, [*convert, "--pickle", *named[1:]], catch_exceptions=False)
    assert same(read_stored(new), stored())
    facts = json.loads(run(app, ["inspect", str(new), "--json"], catch_exceptions=False).stdout)
    assert facts["config_fingerprint"] == config_fingerprint(CONFIG, SOME)
    torch.save(Trap(tmp_path / "ran"), there / "training_state.pt")
    refusal = run(
        app, ["convert", str(there), str(tmp_path / "more"), "--to", "sglang", "--pickle", *named[1:]]
    ).exception
    assert isinstance(refusal, ConfigurationError)
    assert "cannot be read as tensors alone" in str(refusal)
    assert not (tmp_path / "ran").exists()


class Trap:
    """What a pickle can do to whoever reads it without care."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (str(self.file), 0o700)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "training_state.pt", "model.pt"])
@pytest.mark.parametrize("how", ["pickle", "torch.save", "among tensors"])
def test_code_in_a_pickle_is_never_run(tmp_path: Path, file: str, how: str) -> None:
    ran, directory = tmp_path / "ran", folder(tmp_path / "drafter")
    export_drafter(directory, stored(), "specforge")
    pickled(directory, file, lambda state: state.update(trap=Trap(ran)) if how == "among tensors" else None)
    if how == "pickle":
        (directory / file).write_bytes(pickle.dumps(Trap(ran)))
    elif how == "torch.save":
        torch.save(Trap(ran), directory / file)
    for asked in (False, True):
        with pytest.raises(CheckpointError) as raised:
            import_drafter(directory, pickles=asked)
        one_line(raised.value, directory / file)
        assert not ran.exists()
    if how != "pickle":
        torch.load(directory / file, weights_only=False)
        assert ran.exists(), "the trap is one"


def one_line(error: CheckpointError, file: Path) -> None:
    """It names the file, does not pass on torch's advice to allow what it refused, and says what to do."""
    text = str(error)
    assert str(file) in text
    assert text.isprintable(), "one line, no escapes"
    assert "safe_globals" not in text
    assert "weights_only" not in text
    assert len(text) < 400 + 2 * len(str(file))
    assert any(word in text for word in ("save", "fetch", "expected", "convert", "leave"))


def old_format(directory: Path) -> None:
    file = directory / "pytorch_model.bin"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)


def zipped(directory: Path, *, squeeze: bool = False, cut: str = "", drop: str = "") -> None:
    """Pack the file again: compressed, one entry cut short, or one left out."""
    file = directory / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if squeeze else zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            if not drop or not name.endswith(drop):
                archive.writestr(name, content[: len(content) // 2] if cut and name.endswith(cut) else content)


def pickled_beside(directory: Path) -> None:
    torch.save({}, directory / "training_state.pt")


def truncated(directory: Path) -> None:
    file = directory / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "BadZipFile"),
        (old_format, "BadZipFile"),
        (lambda d: (d / "pytorch_model.bin").write_bytes(b""), "BadZipFile"),
        (lambda d: (d / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1"), "BadZipFile"),
        (lambda d: zipped(d, squeeze=True), "compressed"),
        (lambda d: zipped(d, cut="data.pkl"), "cannot be read as tensors alone"),
        (lambda d: zipped(d, drop="data/3"), "cannot be read as tensors alone"),
        (lambda d: zipped(d, drop="data.pkl"), "cannot be read as tensors alone"),
        (lambda d: torch.save(torch.zeros(3), d / "pytorch_model.bin"), "plain dense tensors by name"),
        (lambda d: torch.save([torch.zeros(3)], d / "pytorch_model.bin"), "plain dense tensors by name"),
        (lambda d: torch.save({3: torch.zeros(3)}, d / "pytorch_model.bin"), "plain dense tensors by name"),
        (lambda d: torch.save({"lr": 0.1}, d / "pytorch_model.bin"), "plain dense tensors by name"),
        (
            lambda d: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(d / "pytorch_model.bin")),
            "torch.save does not",
        ),
        (pickled_beside, "training_state.pt; leave only the one"),
    ],
)
def test_a_damaged_pickle_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    write_stored(tmp_path, stored())
    damage(pickled(tmp_path, "pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=words) as raised:
        import_drafter(tmp_path, pickles=True)
    one_line(raised.value, tmp_path)


@pytest.mark.filterwarnings("ignore:.*quantization")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: first(s, lambda t: t.to_sparse()), "plain dense tensors"),
        (lambda s: first(s, lambda t: t.to("meta")), "plain dense tensors"),
        (lambda s: first(s, torch._neg_view), "plain dense tensors"),
        (lambda s: first(s, lambda t: [t]), "plain dense tensors"),
        (lambda s: first(s, lambda t: t.reshape(4, 4)), r"norm.weight is \(4, 4\), its config says \(16,\)"),
        (lambda s: s.update(extra=torch.zeros(2)), "extra of this drafter is"),
        (lambda s: s.pop("fc.weight"), "fc.weight of this drafter is None"),
        (lambda s: s.update(huge=torch.zeros(1).expand(1 << 40)), "some share their elements"),
        (lambda s: s.update(t2d=s["t2d"][:-1]), r"t2d is \(19,\), its config says \(20,\)"),
        (lambda s: s.update({"lm_head.weight": torch.tensor(1.0)}), r"lm_head.weight is \(\)"),
    ],
)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "training_state.pt"])
def test_a_pickle_of_anything_but_the_configs_dense_tensors_is_refused(
    tmp_path: Path, file: str, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    export_drafter(tmp_path, stored(), "specforge")
    pickled(tmp_path, file, lambda state: change(state.get("draft_state_dict", state)))
    with pytest.raises(CheckpointError, match=words) as raised:
        import_drafter(tmp_path, pickles=True)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("draft_state_dict"), "has no draft_state_dict"),
        (lambda s: s.update(draft_state_dict=5), "plain dense tensors by name"),
        (lambda s: s.update(strategy="peagle"), "was trained as 'peagle'"),
        (lambda s: s["draft_state_dict"].update({"embed_tokens.weight": EMBEDDING}), "only where it was trained"),
    ],
)
def test_a_specforge_state_of_something_else_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    export_drafter(tmp_path, stored(), "specforge")
    pickled(tmp_path, "training_state.pt", change)
    with pytest.raises(CheckpointError, match=words) as raised:
        import_drafter(tmp_path, pickles=True)
    assert str(tmp_path / "training_state.pt") in str(raised.value)
    assert str(raised.value).isprintable()


def test_parameters_and_views_in_a_pickle_become_tensors_of_their_own(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["norm.weight"] = torch.nn.Parameter(state["norm.weight"])
        state["fc.weight"] = state["fc.weight"].t().contiguous().t()

    write_stored(tmp_path, stored())
    pickled(tmp_path, "pytorch_model.bin", change)
    read = import_drafter(tmp_path, pickles=True).stored
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert same(read, stored())
    assert not any(t.requires_grad for t in read.weights.values())
    assert all(t.is_contiguous() for t in read.weights.values())


def test_a_sharded_or_empty_directory_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        import_drafter(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="sharded"):
        import_drafter(tmp_path)
    with pytest.raises(CheckpointError, match=r"is no directory; expected one with model\.saf"):
        import_drafter(tmp_path / "nowhere")


def test_a_policy_is_not_taken_for_a_drafter(tmp_path: Path) -> None:
    save_file({"model.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match="holds a whole model, not a drafter"):
        import_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculators_model_type": "dflash"}, "must be eagle3, got 'dflash'"),
        ({"transformer_layer_config": ...}, "needs transformer_layer_config"),
        ({"norm_output": True}, "EAGLE 3.1"),
        ({"fc_norm": True}, "fc_norm must be false"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm must be false"),
        ({"norm_before_fc": True}, "input_norm.weight of this drafter is None"),
        ({"embed_requires_grad": True}, "embed_requires_grad must be false"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 2, 3]}, "ascending"),
        ({"architectures": ["PEagleDraftModel"]}, "not those of an EAGLE-3 drafter"),
        ({"speculators_config": 5}, "speculators_config must be an object"),
        ({"speculators_config": {"verifier": {"architectures": 5}}}, "verifier must be"),
        ({"speculators_config": {"verifier": "org/target"}}, "verifier must be"),
        ({"speculators_config": {"proposal_methods": 5}}, "proposal_methods must be"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": "5"}]}}, "speculative_tokens must be"),
    ],
)
def test_speculators_variants_that_compute_something_else_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    export_drafter(tmp_path, stored(), "speculators")
    rewrite(tmp_path, lambda d: d.update(change))
    with pytest.raises(CheckpointError, match=words):
        import_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight of this drafter is None"),
        (lambda t: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(8)}), "q_norm"),
        (lambda t: t.update({"d2t": SOME.ids.clone()}), "offsets"),
        (lambda t: t.update({"d2t": torch.zeros(6, dtype=torch.int64)}), "two exports"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.update({"t2d": t["t2d"][:-1].clone()}), r"t2d is \(19,\), its config says \(20,\)"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "not finite"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "one dtype"),
        (lambda t: t.update({n: w.double() for n, w in t.items() if n not in ("d2t", "t2d")}), "got torch.float64"),
        (lambda t: t.update({n: w.to(torch.float8_e4m3fn) for n, w in t.items() if "d" not in n}), "float8_e4m3fn"),
        (lambda t: t.update({n.replace("layers.0.", "midlayer."): w.clone() for n, w in t.items()}), "both midlayer"),
    ],
)
def test_tensors_that_engines_would_load_silently_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], words: str
) -> None:
    export_drafter(tmp_path, stored(), "speculators")
    retensor(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        import_drafter(tmp_path)
