"""`draftalign download` against a served API: a directory that an engine can load, complete or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import drafter_bytes, drafter_config
from helpers.service.service_fixtures import RunningService
from typer.testing import CliRunner

from rl_hooks.format.release import new_key
from service.cli.main import app
from service.errors import ConfigurationError


def published(service: RunningService, seed: int) -> str:
    """The version that a real drafter got."""
    return service.publish(content=drafter_bytes(seed), config=json.dumps(drafter_config())).version


def download(service: RunningService, *words: str) -> str:
    """The command's output, or what it refused with."""
    told = CliRunner().invoke(app, ["download", *words, "--service", service.url])
    if told.exit_code != 0:
        assert isinstance(told.exception, ConfigurationError), told.exception
        return str(told.exception)
    return told.output


def test_a_version_is_downloaded_as_a_directory(service: RunningService, tmp_path: Path) -> None:
    first, second = published(service, 1), published(service, 2)
    new, empty = tmp_path / "deep" / "new", tmp_path / "empty"
    assert download(service, str(new)) == f"{second} of run default is in {new}\n"
    empty.mkdir()
    download(service, str(empty), "--version", first.partition("-")[0])
    for directory, version in ((new, second), (empty, first)):
        assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
        for file in service.registry.get("default", version).files:
            assert hashlib.sha256((directory / file.name).read_bytes()).hexdigest() == file.sha256
    left = sorted(path.name for path in tmp_path.iterdir() if path != service.layout.root)
    assert left == ["deep", "empty"], "nothing is left beside them"


def test_the_directory_may_be_the_working_one_or_behind_a_link(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount point is, they cannot be replaced by another directory."""
    version = published(service, 1)
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    download(service, str(link))
    assert sorted(path.name for path in real.iterdir()) == ["config.json", "model.safetensors"]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert download(service, ".") == f"{version} of run default is in .\n"
    assert sorted(path.name for path in here.iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_had_leaves_nothing(service: RunningService, tmp_path: Path) -> None:
    version = published(service, 1)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    assert download(service, str(full)) == f"{full} holds something already; name a new directory"
    assert download(service, str(tmp_path / "other"), "--version", "v000009-00000000") == (
        f"run default has no v000009-00000000; expected one of: {version}"
    )
    path = next(service.layout.root.rglob(f"{version}/model.safetensors"))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "nothing was swapped" in download(service, str(tmp_path / "other"))
    assert sorted(path.name for path in tmp_path.iterdir() if path != service.layout.root) == ["full"]
    assert [path.name for path in full.iterdir()] == ["notes"]


def test_keys_are_asked_for_a_signature(
    serve: Callable[..., RunningService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = new_key()
    key = tmp_path / "key"
    key.write_bytes(private)
    service = serve(signing_key_file=key)
    service.register()
    version = published(service, 1)
    monkeypatch.setenv("DRAFTALIGN_PUBLIC_KEYS", new_key()[1])
    assert "signature" in download(service, str(tmp_path / "wrong"))
    monkeypatch.setenv("DRAFTALIGN_PUBLIC_KEYS", public)
    assert "only the version that is served is signed" in download(
        service, str(tmp_path / "wrong"), "--version", version
    )
    assert not (tmp_path / "wrong").exists()
    assert download(service, str(tmp_path / "right")).startswith(version)
