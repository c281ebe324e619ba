"""Files and directories appear complete or not at all, whatever step fails; their data is on the disk first."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from rl_hooks.durable import AtomicDirectory, append_line, at_home, replace_file


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
            if name == "fsync" and path.is_file():
                assert path.stat().st_size, "what is synced has its bytes"
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
            opened = len(list(Path("/proc/self/fd").iterdir()))
            try:
                replace_file(path, b"new")
                assert len(done) < number, "what fails is told"
            except StepError:
                assert path.read_bytes() == (b"new" if done[-1].startswith("fsync") and len(done) > 2 else b"old")
        assert [p.name for p in tmp_path.iterdir()] == ["latest.json"], done
        assert len(list(Path("/proc/self/fd").iterdir())) == opened
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
                    assert not staged.renamed
                    (staged.path / "part").mkdir()
                    (staged.path / "part" / "file").write_bytes(b"data")
                    staged.commit(final)
                    assert len(done) < number, "what fails is told"
            except StepError:
                assert final.exists() == (len(done) > 4)
                if final.exists():  # and only its name may be lost in a power cut
                    assert (final / "part" / "file").read_bytes() == b"data"
            assert staged.renamed == final.exists()
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


def test_a_directory_is_made_with_those_that_lead_to_it(tmp_path: Path) -> None:
    with AtomicDirectory.make(tmp_path / "a" / "b", ".staged-") as staged:
        staged.commit(tmp_path / "a" / "b" / "final")
    assert (tmp_path / "a" / "b" / "final").is_dir()


def test_a_line_that_is_added_begins_after_a_torn_one_and_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    synced = fail_at(monkeypatch, 0)
    append_line(path, b"first", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    append_line(path, b"second")
    path.write_bytes(path.read_bytes() + b"to")  # a writer was killed
    append_line(path, b"third")
    assert path.read_bytes() == b"first\nsecond\nto\nthird\n"
    assert synced == ["fsync lines"] * 3
    path.write_bytes(b"t")
    append_line(path, b"only")
    assert path.read_bytes() == b"t\nonly\n"


def test_a_line_of_which_the_disk_takes_a_part_is_told(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))
        with pytest.raises(OSError, match="the disk took only a part of the line") as told:
            append_line(tmp_path / "lines", b"too long")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(tmp_path / "lines"))


def test_a_home_is_put_for_the_tilde_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert [at_home(path) for path in ("~/state", "/a/~")] == [Path("/home/x/state"), Path("/a/~")]
    assert at_home("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
