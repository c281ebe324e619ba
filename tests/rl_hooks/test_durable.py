"""Files and directories appear complete or not at all, whatever step fails; their data is on the disk first."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from rl_hooks.durable import AtomicDirectory, replace_file


class StepError(OSError):
    """The disk, at the step that a test chose."""


def fail_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Fail at the `number`-th step; returns the steps with the names of their files, as they come."""
    done: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def step(what: Any, *args: Any, **named: Any) -> Any:
            path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what
            done.append(f"{name} {path.name.partition('-')[0]}")
            if len(done) == number:
                raise StepError
            return real(what, *args, **named)

        patch.setattr(owner, name, step)

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
        watch(owner, name)
    return done


def test_a_file_is_the_old_one_or_the_new_one_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    for number in itertools.count(1):
        replace_file(path, b"old")
        with pytest.MonkeyPatch.context() as patch:
            done = fail_at(patch, number)
            try:
                replace_file(path, b"new")
            except StepError:
                assert path.read_bytes() == (b"new" if done[-1].startswith("fsync") and len(done) > 2 else b"old")
        assert [p.name for p in tmp_path.iterdir()] == ["latest.json"], done
        if len(done) < number:
            break
    assert done == ["fsync .latest", "replace .latest", f"fsync {tmp_path.name.partition('-')[0]}"]
    assert path.read_bytes() == b"new"


def test_a_file_that_need_not_survive_a_power_cut_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fail_at(monkeypatch, 0)
    replace_file(tmp_path / "memory.json", b"x", durable=False)
    assert done == ["replace .memory"]


def test_a_directory_appears_once_all_that_is_in_it_is_on_the_disk(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for number in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            done = fail_at(patch, number)
            try:
                with AtomicDirectory.make(tmp_path, ".staged-") as staged:
                    (staged.path / "part").mkdir()
                    (staged.path / "part" / "file").write_bytes(b"data")
                    staged.commit(final)
            except StepError:
                assert final.exists() == (len(done) > 4)
                if final.exists():  # and only its name may be lost in a power cut
                    assert (final / "part" / "file").read_bytes() == b"data"
        if len(done) < number:
            break
        assert [p for p in tmp_path.iterdir() if p != final] == []
        if final.exists():
            (final / "part" / "file").unlink()
            (final / "part").rmdir()
            final.rmdir()
    assert sorted(done[:3]) == ["fsync .staged", "fsync file", "fsync part"]
    assert done[3:] == ["rename .staged", f"fsync {tmp_path.name.partition('-')[0]}"]
    assert (final / "part" / "file").read_bytes() == b"data"


def test_a_check_right_before_the_rename_can_give_up(tmp_path: Path) -> None:
    final = tmp_path / "final"

    def superseded() -> None:
        raise RuntimeError("another one is newer")

    with pytest.raises(RuntimeError), AtomicDirectory.make(tmp_path, ".staged-") as staged:
        staged.commit(final, check=superseded)
    assert list(tmp_path.iterdir()) == []
