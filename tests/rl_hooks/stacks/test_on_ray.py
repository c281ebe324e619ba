"""What Ray's setup hook does to OpenRLHF's module when it is imported. (tests/stacks runs both for real.)"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.trainer.hooks_fixtures import padded_batch, receiver
from helpers.trainer.openrlhf_fixtures import Actor

from rl_hooks import wire
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.stacks import on_ray

MODULE = "openrlhf.utils.deepspeed.deepspeed"
STRATEGY = """
class DeepspeedStrategy:
    world_size = 1
    def get_rank(self):
        return 0
    def prepare(self, *models):
        return models
    def load_ckpt(self, model, load_dir, tag=None):
        return load_dir, {"global_step": 7}
"""


@pytest.fixture(name="package")
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of OpenRLHF's name; returns the file of its strategy."""
    folder = tmp_path / "openrlhf/utils/deepspeed"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "openrlhf/models.py").write_text("class Actor:\n    pass\n")
    yield folder / "deepspeed.py"
    for name in [one for one in sys.modules if one.split(".")[0] == "openrlhf"]:
        del sys.modules[name]


def finders() -> int:
    return sum(type(one).__module__ == on_ray.__name__ for one in sys.meta_path)


def test_without_a_url_nothing_is_touched(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTALIGN_URL", raising=False)
    monkeypatch.delenv("DRAFTALIGN_SAMPLE_FRACTION", raising=False)
    on_ray.install()
    assert finders() == 0
    assert "DRAFTALIGN_SAMPLE_FRACTION" not in os.environ


def test_an_engine_in_one_of_its_processes_sends_nothing_of_its_own(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("DRAFTALIGN_SAMPLE_FRACTION", raising=False)
    on_ray.install()
    settings = ServiceSettings.read(os.environ)
    assert settings is not None
    assert settings.sample_fraction == 0.0


def test_it_is_installed_once_and_gone_once_the_module_was_imported(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:1")
    package.write_text(STRATEGY)
    on_ray.install()
    on_ray.install()
    assert finders() == 1
    strategy: Any = importlib.import_module(MODULE).DeepspeedStrategy()
    assert finders() == 0
    critic = object()
    assert strategy.prepare((critic, {}), critic) == ((critic, {}), critic)


def test_what_it_does_not_know_is_off_and_imported_all_the_same(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:1")
    package.write_text("class Strategy:\n    pass\n")
    on_ray.install()
    with caplog.at_level(logging.ERROR, "rl_hooks"):
        assert importlib.import_module(MODULE).Strategy
    assert "draftalign is OFF" in caplog.text


def test_an_actor_that_cannot_be_attached_to_is_prepared_all_the_same(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:1")
    package.write_text(STRATEGY)
    on_ray.install()
    strategy: Any = importlib.import_module(MODULE).DeepspeedStrategy()
    actor = importlib.import_module("openrlhf.models").Actor()
    with caplog.at_level(logging.ERROR, "rl_hooks"):
        assert strategy.prepare((actor, {})) == ((actor, {}),)
    assert "draftalign is OFF" in caplog.text


def test_a_policy_that_goes_on_from_a_checkpoint_goes_on_counting_there(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_text(STRATEGY)
    monkeypatch.setenv("DRAFTALIGN_AUX_LAYERS", "1,2,3")
    batch = padded_batch([(3, 9), (7, 4)])
    with receiver() as service:
        monkeypatch.setenv("DRAFTALIGN_URL", service.url)
        on_ray.install()
        strategy: Any = importlib.import_module(MODULE).DeepspeedStrategy()
        monkeypatch.setattr(importlib.import_module("openrlhf.models"), "Actor", Actor)
        actor = Actor()
        strategy.prepare((actor, {}))
        assert strategy.load_ckpt(object(), "critic") == ("critic", {"global_step": 7})
        for loads in (False, True, False):
            if loads:
                strategy.load_ckpt(actor.model, "actor")
            for trains in (False, True):
                with torch.set_grad_enabled(trains):
                    actor.forward(batch.input_ids, batch.loss_mask, batch.attention_mask)
        assert strategy.draftalign.hook.flush(20)
        sent = [int(wire.parse_header(one.body).metadata["policy_version"]) for one in service.rollouts()]
        strategy.draftalign.hook.close()
    assert sent == [0, 7, 8]


def test_an_actors_class_that_ray_has_copied_the_methods_into_inherits_the_extended_ones(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray 2.60's decorator leaves it; tests/stacks/test_ray.py has a real one."""
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:1")
    package.write_text(
        f"""
from types import SimpleNamespace
{STRATEGY}
class Made(DeepspeedStrategy):
    prepare = DeepspeedStrategy.prepare
    __init__ = DeepspeedStrategy.__init__
class Handle:
    __ray_metadata__ = SimpleNamespace(modified_class=Made)
"""
    )
    on_ray.install()
    module: Any = importlib.import_module(MODULE)
    assert module.Made.prepare is module.DeepspeedStrategy.prepare
    assert hasattr(module.Made.prepare, "__wrapped__")
    assert "__init__" in vars(module.Made), "which was not extended"
