"""Settings: what makes no sense is refused here, since what is made of settings checks nothing again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.settings import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("depth", 0),
        ("learning_rate", 0.0),
        ("learning_rate", -3e-4),
        ("learning_rate", float("inf")),
        ("learning_rate", float("nan")),
        ("warmup_steps", -1),
        ("optimizer", "sgd"),
        ("keep_versions", 0),
        ("drift_days_between_alarms", 0.0),
        ("drift_days_between_alarms", float("inf")),
        ("drift_days_between_alarms", float("nan")),
        ("drift_dead_band", -0.1),
        ("drift_dead_band", 1.0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


@pytest.mark.parametrize("name", ["token_file", "tls_cert", "tls_key", "signing_key_file"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {name: tmp_path / "pipe"}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValidationError, match=rf"(?s){name}.*pipe is no regular file; name one"):
        Settings(**given)


def test_a_file_that_cannot_be_looked_at_is_no_fault_of_the_settings(tmp_path: Path) -> None:
    """As one in a directory of root's: commands that do not read it must start, for whoever asks."""
    unseen = tmp_path / ("k" * 300)
    with pytest.raises(OSError, match="too long"):
        unseen.stat()
    assert Settings(token_file=unseen).token_file == unseen


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8400/"), ("::1", "http://[::1]:8400/"), ("node3", "http://node3:8400/")],
)
def test_the_address_is_one_that_a_browser_opens(host: str, url: str) -> None:
    assert Settings(host=host).url(8400) == url
