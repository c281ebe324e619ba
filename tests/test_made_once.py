"""What is made once in a run is one file for all of its processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from helpers import made_once


def test_two_processes_make_it_once_and_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(made_once.VARIABLE, str(tmp_path))
    made = tmp_path / "by"

    def make() -> torch.Tensor:
        with made.open("a") as log:
            log.write(f"{os.getpid()}\n")
        return torch.randn(3)

    def other() -> None:
        torch.save(made_once.made_once("numbers", make), tmp_path / "theirs")

    process = multiprocessing.get_context("fork").Process(target=other)
    process.start()
    ours = made_once.made_once("numbers", make)
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(torch.load(tmp_path / "theirs"), ours)
    assert len(made.read_text().splitlines()) == 1


def test_what_failed_to_be_made_is_made_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(made_once.VARIABLE, str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        made_once.made_once("number", lambda: 1 / 0)
    assert made_once.made_once("number", lambda: 7.0) == 7.0
    assert made_once.made_once("number", lambda: 8.0) == 7.0
    monkeypatch.delenv(made_once.VARIABLE)
    assert made_once.made_once("number", lambda: 8.0) == 8.0
