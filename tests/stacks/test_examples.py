"""The scripts of examples/attach for stacks of their own, composed, parsed or run by the stack's own package."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.trainer.stacks_fixtures import ROOT, Stack, environment, in_environment

from rl_hooks.stacks.environment import VARIABLES

ATTACH = ROOT / "examples/attach"
URL = "http://127.0.0.1:8400"
AREAL = Stack("areal", "areal_example.py", "AReaL's example")
MEGATRON = Stack("megatron", "megatron_example.py", "Megatron-Core's example")
NEMO_RL = Stack("nemo_rl", "nemo_rl_example.py", "NeMo-RL's example")
FIRST = {"DRAFTALIGN_URL": URL, "DRAFTALIGN_INITIAL_DRAFTER": "/models/drafter"}  # as the script's text has them
PRIME_RL = Stack("prime_rl", "prime_rl_example.py", "prime-rl's example", FIRST)
OPENRLHF = in_environment("openrlhf", "OpenRLHF's example")
SKYRL = in_environment("skyrl", "SkyRL's example")
VERL = in_environment("verl", "verl's example")


def run(command: list[str], **variables: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/stacks")))
    environ = os.environ | {"PYTHONPATH": paths, "DRAFTALIGN_URL": URL, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def submitted(tmp_path: Path, script: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """The runtime environment and the command of the job that a script submits to Ray."""
    keep = f"for one; do case $one in --runtime-env=*) cp -p ${{one#*=}} {tmp_path}/given;; esac; done"
    (tmp_path / "ray").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\"\n{keep}\n")
    (tmp_path / "ray").chmod(0o755)
    told = run([str(ATTACH / script), *options], PATH=f"{tmp_path}:{os.environ['PATH']}").split("\0")[:-1]
    assert told[:2] == ["job", "submit"]
    (given,) = (one for one in told if one.startswith("--runtime-env="))
    assert not Path(given.partition("=")[2]).exists(), "a token may be in it"
    assert (tmp_path / "given").stat().st_mode & 0o077 == 0
    return yaml.safe_load((tmp_path / "given").read_text()), told[told.index("--") + 1 :]


@pytest.mark.parametrize("script", ["openrlhf.sh", "skyrl.sh", "slime.sh"])
def test_a_job_gets_all_that_trainers_and_engines_read_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    bare = submitted(tmp_path, script)[0]["env_vars"]
    given = {name: f'of {name}: a"b\\n\t' for name in VARIABLES if name not in bare}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert submitted(tmp_path, script)[0]["env_vars"] == bare | given
    assert not given.keys() & bare.keys()


def taken_by_ray(python: Path, given: dict[str, Any]) -> None:
    """Ray's own check of a runtime environment; and the function that it names is there."""
    run([str(python), "-c", f"from ray.runtime_env import RuntimeEnv; RuntimeEnv(**{given!r})"])
    module, _, name = given["worker_process_setup_hook"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert given["env_vars"] == {"DRAFTALIGN_URL": URL, "DRAFTALIGN_RUN": "default"}


@VERL[0]
@VERL[1]
@pytest.mark.slow
def test_verls_script_is_composed_by_its_own_configuration() -> None:
    path = f"{environment('verl') / 'bin'}:{os.environ['PATH']}"
    on_cpu = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
    printed = run([str(ATTACH / "verl.sh"), "trainer.nnodes=2", "--cfg", "job"], PATH=path, **on_cpu)
    found = yaml.safe_load(printed)
    actor = found["actor_rollout_ref"]
    assert found["algorithm"]["rollout_correction"]["bypass_mode"] is False
    assert (actor["actor"]["strategy"], actor["model"]["use_remove_padding"]) == ("fsdp2", True)
    assert actor["actor"]["ulysses_sequence_parallel_size"] == 1
    assert actor["rollout"]["calculate_log_probs"] is True
    drafts = actor["rollout"]["engine_kwargs"]["vllm"]["speculative_config"]
    own = {"draft_load_config": {"load_format": "auto"}}  # verl makes an engine's first weights up
    assert drafts == {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4} | own
    assert (found["trainer"]["nnodes"], found["trainer"]["v1"]["trainer_mode"]) == (2, "sync")


@OPENRLHF[0]
@OPENRLHF[1]
def test_openrlhfs_script_is_taken_by_ray_and_by_its_own_parser(tmp_path: Path) -> None:
    given, (python, _, module, *options) = submitted(
        tmp_path, "openrlhf.sh", "--actor.model_name_or_path", "/models/policy"
    )
    taken_by_ray(environment("openrlhf") / "bin/python", given)
    packages = next(environment("openrlhf").glob("lib/python3*/site-packages"))
    assert (python, module) == ("python3", "openrlhf.cli.train_ppo_ray")
    # Its parser is made where the module is run, after imports that ask for vLLM.
    source = ast.parse((packages / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (started,) = (one for one in source.body if isinstance(one, ast.If) and "__main__" in ast.unparse(one.test))
    lines = [ast.unparse(one) for one in started.body]
    made = [line for line in lines if line.startswith(("parser = ", "parser.add_argument"))]
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime, "os": os}
    exec("\n".join(made), names)  # noqa: S102 - a released package's source
    found = vars(names["parser"].parse_args(options))
    assert found["actor.model_name_or_path"] == "/models/policy"
    assert (found["ds.zero_stage"], found["ds.packing_samples"]) == (3, True)


@SKYRL[0]
@SKYRL[1]
def test_skyrls_script_is_taken_by_ray_and_composed_by_its_own_configuration(tmp_path: Path) -> None:
    given, (started, _, module, *options) = submitted(tmp_path, "skyrl.sh", "trainer.policy.model.path=/models/policy")
    python = environment("skyrl") / "bin/python"
    taken_by_ray(python, given)
    assert (started, module) == ("python3", "skyrl.train.entrypoints.main_base")
    compose = (
        "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict; "  # pydantic's, before 3.12
        "import json; from importlib.util import find_spec; from skyrl.train.config import SkyRLTrainConfig as Kind; "
        f"c = Kind.from_cli_overrides({options!r}); assert find_spec({module!r}); e = c.generator.inference_engine; "
        "print(json.dumps([c.trainer.strategy, c.trainer.policy.sequence_parallel_size, e.backend, "
        "dict(e.speculative_config), c.trainer.policy.model.path]))"
    )
    *_, printed = run([str(python), "-W", "ignore", "-c", compose]).strip().splitlines()
    drafts = {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4}
    assert json.loads(printed) == ["fsdp", 1, "vllm", drafts, "/models/policy"]


def test_slimes_script_gives_both_options_and_the_functions_are_there(tmp_path: Path) -> None:
    given, command = submitted(tmp_path, "slime.sh", "--hf-checkpoint", "/models/policy")
    assert given["env_vars"]["DRAFTALIGN_URL"] == URL
    assert command[:2] == ["python3", "train.py"]
    assert command[-2:] == ["--hf-checkpoint", "/models/policy"]
    adapter = ast.parse((ROOT / "rl_hooks/stacks/slime.py").read_text(encoding="utf-8"))
    functions = {one.name for one in adapter.body if isinstance(one, ast.FunctionDef)}
    for when in ("before-log-prob", "before-train-step"):
        path = command[command.index(f"--custom-megatron-{when}-hook-path") + 1]
        module, _, name = path.rpartition(".")
        assert module == "rl_hooks.stacks.slime"
        assert name in functions


@OPENRLHF[0]
@OPENRLHF[1]
@pytest.mark.slow
def test_a_driver_of_ones_own_has_the_hook_in_rays_workers() -> None:
    python = str(environment("openrlhf") / "bin/python")
    alone = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    printed = run([python, "-W", "ignore", "-m", "examples.attach.on_ray"], **alone)
    assert "the hook waits in a worker of Ray: True" in printed


class TestAreal:
    pytestmark = AREAL.marks

    def test_its_script_is_read_by_its_own_configuration_and_trainer(self, tmp_path: Path) -> None:
        AREAL.run(tmp_path)
        found = json.loads((tmp_path / "found.json").read_text())
        assert found == {"splits": ["train", "test"], "proximal pass": True, "backend": "fsdp:d1", "trained": True}


@pytest.mark.skipif("NEMO_RL_SOURCE" not in os.environ, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL")
class TestNemoRL:
    pytestmark = NEMO_RL.marks

    def test_nemo_rls_script_is_composed_by_its_own_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "uv").write_text(
            f"#!{sys.executable}\nimport json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
        )
        (tmp_path / "uv").chmod(0o755)
        printed = run(
            [str(ATTACH / "nemo_rl.sh"), "policy.model_name=/models/policy"], PATH=f"{tmp_path}:{os.environ['PATH']}"
        )
        (started, script, *options), environ = json.loads(printed)
        assert started == "run"
        assert environ["PYTHONPATH"].split(":")[0] == "/shared/draftalign"
        hook = {"worker_process_setup_hook": environ["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"]}
        variables = {name: environ[name] for name in ("DRAFTALIGN_URL", "DRAFTALIGN_RUN")}
        taken_by_ray(NEMO_RL.python, hook | {"env_vars": variables})
        source = Path(os.environ["NEMO_RL_SOURCE"])
        assert (source / script).is_file()
        NEMO_RL.run(tmp_path, str(source / "examples/configs/grpo_math_1B.yaml"), *options)
        assert json.loads((tmp_path / "found.json").read_text()) == {
            "policy": "/models/policy",
            "worker": [True, True, 1, 1],
            "skips the pass": False,
            "drafts": {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4},
            "engine": ["vllm", "processed_logprobs", "auto"],
        }


@pytest.mark.skipif("PRIME_RL_SOURCE" not in os.environ, reason="PRIME_RL_SOURCE names no checkout of prime-rl")
class TestPrimeRL:
    pytestmark = PRIME_RL.marks

    def test_its_script_starts_our_module_in_the_place_of_its_trainers_and_all_else_as_it_is(
        self, tmp_path: Path
    ) -> None:
        PRIME_RL.run(tmp_path)
        found = json.loads((tmp_path / "found.json").read_text())
        with_gpus = {"env-server": "0,1", "inference": "0", "orchestrator": "0,1", "torchrun": "1"}
        given = FIRST | {"DRAFTALIGN_SAMPLE_FRACTION": "0"}
        assert found["started"] == [[n, given | {"CUDA_VISIBLE_DEVICES": gpus}] for n, gpus in with_gpus.items()]
        assert found["module"] == "rl_hooks.stacks.prime_rl"
        assert (found["ranks"], found["policy"]) == (["--nproc-per-node=1"], True)
        assert found["drafts"] == {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4}


class TestMegatron:
    pytestmark = MEGATRON.marks

    def test_the_script_sends_every_rollout_of_each_step_once(self, tmp_path: Path) -> None:
        MEGATRON.run(tmp_path)
        found = json.loads((tmp_path / "found.json").read_text())
        asked = ["POST /rollouts?run=megatron", "PUT /runs/megatron"]
        assert [one for one in found["asked"] if not one.endswith("/head")] == asked
        assert (found["versions"], found["tokens"]) == ([0, 1], [8 * 32] * 2)
        assert found["printed"] == 1
