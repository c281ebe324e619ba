"""What of ours rests on other people's packages, read in the releases that `make stacks` pins."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.trainer.contract_fixtures import CONTRACTS, broken
from helpers.trainer.stacks_fixtures import environment, in_environment
from helpers.trainer.trl_fixtures import make_trainer

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.trl import attach

IN_UNSLOTHS, WITH_UNSLOTH = in_environment("unsloth", "Unsloth's trainers")


def packages_of(name: str) -> Path:
    return next(environment(name).glob("lib/python3*/site-packages"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=in_environment(one.environment, name)) for name, one in CONTRACTS.items()]
)
def test_what_we_rely_on_is_in_the_pinned_release(name: str) -> None:
    contract = CONTRACTS[name]
    lost = broken(contract, packages_of(contract.environment))
    assert not lost, "\n".join([f"{name}: {contract.rests}", *lost])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # TRL's
@IN_UNSLOTHS
@WITH_UNSLOTH
def test_unsloths_trainer_is_refused_when_attaching_by_what_its_loss_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own `compute_loss`, as it writes it into TRL's class. Else nothing would be sent, and nothing said."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = (packages_of("unsloth") / "unsloth/models/rl_replacements.py").read_text(encoding="utf-8")
    (outer,) = (one for one in ast.parse(text).body if getattr(one, "name", "") == "grpo_trainer_compute_loss")
    (inner,) = (one for one in ast.iter_child_nodes(outer) if getattr(one, "name", "") == "compute_loss")
    theirs: dict[str, object] = {}
    exec(ast.unparse(inner), theirs)  # noqa: S102 - a released package's source
    trainer = make_trainer(tmp_path)
    trainer.__class__ = type("UnslothGRPOTrainer", (type(trainer),), {"compute_loss": theirs["compute_loss"]})
    with pytest.raises(UnsupportedTrainerError, match=r"UnslothGRPOTrainer.compute_loss does not call _compute_loss"):
        attach(trainer, "http://127.0.0.1:1", aux_layers=(1, 2, 3))
    assert "_compute_loss" not in vars(trainer)
