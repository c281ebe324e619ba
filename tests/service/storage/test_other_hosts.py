"""What another host did on a shared file system: it is seen once this host's client has been made to ask again.

An NFS client answers from its cache for up to a minute (docs/lab/shared_directory.md, where a real one was tried). Here
the other host's work is done when a directory is looked at again, and not before: who does not ask misses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.storage import layout as layout_module
from service.storage import registry as registry_module
from service.storage import runs as runs_module
from service.storage.history import lines as lines_module
from service.storage.history.lines import LineFile
from service.storage.layout import Layout, file_id, is_there
from service.storage.registry import Registry
from service.storage.runs import load_run, read_state

Elsewhere = Callable[[Path, str], None]
RECORD = {
    "run": "x", "target_fingerprint": "0" * 32, "aux_layers": [0, 1, 2], "vocab_size": 8, "hidden_size": 4,
    "policy_version": 0, "draft_vocab_size": None, "bytes": 1, "created": 0.0, "crc32": 1,
    "last_rows": "all",
}  # fmt: skip


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """`elsewhere(path, text)`: another host replaces a file."""
    waiting: dict[Path, str] = {}
    look = layout_module.revalidate

    def revalidate(directory: Path) -> None:
        for path in [path for path in waiting if path.parent == directory]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(waiting.pop(path))
            path.with_suffix(".new").replace(path)
        look(directory)

    for module in (layout_module, lines_module, registry_module, runs_module):
        monkeypatch.setattr(module, "revalidate", revalidate)
    return waiting.__setitem__


def test_a_file_that_another_host_made_or_replaced_is_another_file(tmp_path: Path, elsewhere: Elsewhere) -> None:
    path = tmp_path / "latest.json"
    elsewhere(path, "one")
    first = file_id(path)
    elsewhere(path, "two")
    assert first is not None
    assert file_id(path) not in (None, first)


def test_a_run_that_another_host_registered_is_found(tmp_path: Path, elsewhere: Elsewhere) -> None:
    layout = Layout(tmp_path)
    layout.make_run("x")
    assert layout.run_names() == []
    elsewhere(layout.run_json("x"), json.dumps(RECORD))
    assert load_run(layout, "x").run == "x"
    layout.make_run("y")
    elsewhere(layout.run_json("y"), json.dumps(RECORD))
    assert layout.run_names() == ["x", "y"]
    elsewhere(layout.withdrawn("y"), "{}")
    assert is_there(layout.withdrawn("y"))


def test_what_another_host_decided_of_a_run_is_obeyed(tmp_path: Path, elsewhere: Elsewhere) -> None:
    layout = Layout(tmp_path)
    layout.make_run("x")
    assert read_state(layout, "x").state == "active"
    elsewhere(layout.run_state("x"), json.dumps({"state": "paused", "reason": "there"}))
    assert read_state(layout, "x").state == "paused"
    held = {"sequence": 1, "version": "v000001-0a1b2c3d", "reason": "r", "held": {"reason": "there"}}
    elsewhere(layout.latest("x"), json.dumps(held))
    found = Registry(layout).held("x")
    assert found is not None
    assert found.reason == "there"


def test_a_directory_that_is_not_there_is_looked_for_in_the_one_above(tmp_path: Path) -> None:
    layout_module.revalidate(tmp_path / "no" / "such" / "directory")  # and nothing is raised
    assert file_id(tmp_path / "no" / "file") is None
    (tmp_path / "file").write_text("")
    layout_module.revalidate(tmp_path / "file")


def test_a_piece_that_another_host_has_just_begun_is_not_full(tmp_path: Path, elsewhere: Elsewhere) -> None:
    file = LineFile(tmp_path / "history.jsonl", max_bytes=100, kept=1)
    file.path.write_text(json.dumps({"old": "x" * 200}) + "\n")
    elsewhere(file.path, json.dumps({"their": "line"}) + "\n")
    file.append({"our": "line"})
    assert file.read() == [{"their": "line"}, {"our": "line"}]


def test_nothing_is_made_again_of_a_run_that_was_deleted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "gone" / "verdicts.jsonl", max_bytes=100, kept=1).append({"late": "verdict"})
    assert list(tmp_path.iterdir()) == []
