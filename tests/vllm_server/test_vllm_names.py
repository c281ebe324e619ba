"""The list of what the plugin uses of vLLM is compared with the plugin's code, without a vLLM."""

from __future__ import annotations

from pathlib import Path

from vllm_server.vllm_api import unlisted


def test_each_name_that_the_plugin_asks_of_vllm_is_in_the_list() -> None:
    assert unlisted() == []


def test_a_name_that_is_not_in_the_list_is_found_however_it_is_asked(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "from typing import Final\n"
        "from vllm.somewhere import imported_thing\n"
        "_USED: Final = ('in_a_constant',)\n"
        "def read(runner):\n"
        "    if hasattr(runner, 'asked_with_hasattr') and runner.plain_attribute:\n"
        "        runner.max_model_len, runner._draftalign_swap, runner.requests\n"
        "    found = (getattr(runner, name, None) for name in ('in_a_loop', 'max_model_len'))\n"
        "    return found, [name for name in _USED if not hasattr(runner, name)]\n"
    )
    names = ("asked_with_hasattr", "imported_thing", "in_a_constant", "in_a_loop", "plain_attribute")
    assert unlisted([code]) == [f"code.py: {name}" for name in names]
