"""What adapters that are put into a trainer read from its environment."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.hook import DrafterKeywords
from rl_hooks.trainer.megatron.hook import MegatronKeywords


def told(monkeypatch: pytest.MonkeyPatch, keywords: Any = None, **environment: str) -> list[dict[str, Any]]:
    """The options that an adapter is given; none where it is not attached."""
    for name in ("URL", "RUN", "INITIAL_DRAFTER", "AUX_LAYERS", "HOOK_OPTIONS"):
        monkeypatch.delenv(f"DRAFTALIGN_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"DRAFTALIGN_{name}", value)
    found: list[dict[str, Any]] = []
    attached("a trainer", 0, found.append, keywords)
    return found


def test_the_hooks_options_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, URL="http://s") == [{"url": "http://s", "run": "default"}]
    drafter = {"INITIAL_DRAFTER": "/drafters/first", "AUX_LAYERS": "2, 14,25"}
    assert told(monkeypatch, URL="http://s", RUN="r", **drafter) == [
        {
            "url": "http://s",
            "run": "r",
            "initial_drafter": "/drafters/first",
            "aux_layers": (2, 14, 25),
        }
    ]


def test_other_options_are_given_as_json_and_engines_beside_a_hook_send_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DRAFTALIGN_SAMPLE_FRACTION", raising=False)
    assert told(monkeypatch, URL="http://s", HOOK_OPTIONS="[]") == []
    assert "DRAFTALIGN_SAMPLE_FRACTION" not in os.environ, "the hook is off: somebody must send"
    caplog.clear()
    (options,) = told(monkeypatch, URL="http://s", HOOK_OPTIONS='{"dtype": "float8_e4m3", "queue_bytes": 5}')
    assert (options["dtype"], options["queue_bytes"], options["url"]) == ("float8_e4m3", 5, "http://s")
    assert os.environ["DRAFTALIGN_SAMPLE_FRACTION"] == "0"
    monkeypatch.setenv("DRAFTALIGN_SAMPLE_FRACTION", "0.2")
    for bad in ("[1]", "{", "dtype=float8_e4m3", "3"):
        assert told(monkeypatch, URL="http://s", HOOK_OPTIONS=bad) == []
        assert "DRAFTALIGN_HOOK_OPTIONS must be like" in caplog.text
        caplog.clear()
    assert os.environ["DRAFTALIGN_SAMPLE_FRACTION"] == "0.2", "who says it is heard"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sample_fractoin", "'sample_fractoin', which is none of draft_vocab_size, dtype, head_tolerance, "),
        ("rank", "'rank', which is none of draft_vocab_size, dtype, head_tolerance, "),
        ("logit_map", "'logit_map', which is none of draft_vocab_size, dtype, head_tolerance, "),
        ("wait_seconds", "'wait_seconds', which is none of draft_vocab_size, dtype, head_tolerance, "),
        ("run", "'run': set DRAFTALIGN_RUN instead"),
        ("url", "'url': set DRAFTALIGN_URL instead"),
        ("aux_layers", "'aux_layers': set DRAFTALIGN_AUX_LAYERS instead"),
    ],
)
def test_an_option_that_the_hook_does_not_take_from_there_is_named_and_so_are_those_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, says: str
) -> None:
    assert told(monkeypatch, URL="http://s", RUN="mine", HOOK_OPTIONS=f'{{"dtype": "bfloat16", "{name}": 1}}') == []
    assert f"DRAFTALIGN_HOOK_OPTIONS has {says}" in caplog.text
    assert "draftalign is OFF" in caplog.text


@pytest.mark.parametrize("keywords", [DrafterKeywords, MegatronKeywords])
def test_every_other_option_of_a_hook_is_taken_from_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keywords: Any
) -> None:
    own = {"run", "token", "initial_drafter", "aux_layers"}  # these have variables
    given = {"rank", "world_size", "own_log_probs", "drafter_version", "logit_map"}  # by the adapter, or in code
    for name in keywords.__optional_keys__ - own - given:
        (options,) = told(monkeypatch, keywords, URL="http://s", HOOK_OPTIONS=f'{{"{name}": 1}}')
        assert options[name] == 1
    assert told(monkeypatch, keywords, URL="http://s", HOOK_OPTIONS='{"no_option": 1}') == []
    listed = caplog.text.rpartition("which is none of ")[2].partition("\n")[0].split(", ")
    assert set(listed) == keywords.__optional_keys__ - own - given
    assert ("wait_seconds" in listed) == (keywords is MegatronKeywords)


def test_what_is_wrong_there_leaves_the_trainer_alone_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(monkeypatch) == []
    assert "draftalign is OFF: DRAFTALIGN_URL=http://host:port is not set" in caplog.text
    assert told(monkeypatch, URL="http://s", AUX_LAYERS="the usual ones") == []
    assert "DRAFTALIGN_AUX_LAYERS must be numbers like 2,14,25, got 'the usual ones'" in caplog.text
