"""vLLM's source still has every name that the plugin uses; `vllm_api.py` can be pointed at any other version too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from vllm_server.vllm_api import differences
from vllm_server.vllm_process import PYTHON, REPOSITORY

from rl_hooks.engines.vllm.steps import V1_ARGUMENTS, V2_ARGUMENTS

#: bin/python of the environment, or of another one that a variable names.
SITE = next((PYTHON.parents[1] / "lib").glob("python3*")) / "site-packages"
RUNNER = Path("v1/worker/gpu_model_runner.py")


def test_the_installed_vllm_has_everything_that_the_plugin_uses() -> None:
    assert differences(SITE / "vllm") == []


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


#: Requests by what they say, and whether their tokens are drawn from the policy's own distribution.
REQUESTS = """
from types import SimpleNamespace
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from rl_hooks.engines.vllm.steps import is_plain

def plain(params):
    return is_plain(SimpleNamespace(
        sampling_params=params, prompt_token_ids=[1], mm_features=[], lora_request=None, prompt_embeds=None))

chat = ChatCompletionRequest(
    messages=[{"role": "user", "content": "2+2"}], stop=["x"], logprobs=True, seed=1, kv_transfer_params={"a": 1})
assert plain(chat.to_sampling_params(8, {"top_k": 20, "top_p": 0.95}))
assert plain(SamplingParams(n=4, ignore_eos=True, stop_token_ids=[3], prompt_logprobs=1))
assert plain(SamplingParams(temperature=0.0))
for said in (
    {"thinking_token_budget": 64}, {"thinking_token_budget": 0}, {"watermarking": True}, {"min_p": 0.1},
    {"trace_decode_token_ids": [1, 2]}, {"extra_args": {"a": 1}}, {"repetition_penalty": 1.1}, {"bad_words": ["x"]},
    {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [1]}, {"min_tokens": 2, "max_tokens": 4},
):
    if said.keys() <= set(SamplingParams.__struct_fields__):  # an older vLLM has no watermarks
        assert not plain(SamplingParams(**said)), said
"""


@pytest.mark.timeout(120)
def test_of_vllm_s_own_sampling_parameters_those_that_change_the_distribution_are_known() -> None:
    environment = dict(os.environ) | {"PYTHONPATH": str(REPOSITORY), "VLLM_PLUGINS": ""}
    done = subprocess.run([PYTHON, "-c", REQUESTS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
