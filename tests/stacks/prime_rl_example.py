"""`examples/attach/prime_rl.py` by prime-rl's own launcher: `prime_rl_example.py OUT`, with PRIME_RL_SOURCE.

Its configuration is prime-rl's own example; the launcher reads it, writes the files of its processes and starts them.
In their place are commands that note how they were started, and two GPUs are told of that are not there. Then prime-rl
reads the trainer's file. OUT/found.json says what was started.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import prime_rl_trainer  # type: ignore[import-not-found] # beside this file

PROCESSES = ("inference", "env-server", "orchestrator", "torchrun")
#: The example's own is a package of prime-rl's.
TASKS = "import verifiers.v1 as vf\n\n\nclass Tasks(vf.Taskset): ...\n\n\n__all__ = ['Tasks']\n"
NOTES = """#!{python}
import json, os, sys
names = ("DRAFTALIGN_URL", "DRAFTALIGN_INITIAL_DRAFTER", "DRAFTALIGN_SAMPLE_FRACTION", "CUDA_VISIBLE_DEVICES")
told = [os.path.basename(sys.argv[0]), sys.argv[1:], {{name: os.environ.get(name) for name in names}}]
with open({out!r}, "a") as file:
    file.write(json.dumps(told) + "\\n")
"""


def main(out: Path) -> None:
    source = Path(os.environ["PRIME_RL_SOURCE"])
    sys.path += [str(source / "src"), str(source / "packages/prime-rl-configs/src"), str(out)]  # one namespace package
    (out / "reverse_text.py").write_text(TASKS)
    sys.meta_path.insert(0, prime_rl_trainer.StandIn())
    (out / "bin").mkdir()
    for name in PROCESSES:
        command = out / "bin" / name
        command.write_text(NOTES.format(python=sys.executable, out=str(out / "started")))
        command.chmod(0o755)
    os.environ |= {"PATH": f"{out / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"}
    drafts = '{"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4}'
    options = ["--model.name", str(out), "--output-dir", str(out / "runs"), "--run.name", "r"]
    configuration = source / "examples/basic/reverse-text/rl.toml"
    sys.argv = ["rl", "@", str(configuration), *options, "--inference.vllm.speculative_config", drafts]
    runpy.run_module("examples.attach.prime_rl", run_name="__main__")
    started = [json.loads(line) for line in (out / "started").read_text().splitlines()]
    (trainer,) = (told for name, told, _ in started if name == "torchrun")
    (engine,) = (told for name, told, _ in started if name == "inference")
    cli: Any = importlib.import_module("prime_rl.utils.config").cli
    kinds: Any = importlib.import_module("prime_rl.configs.trainer")
    sys.argv = ["trainer", *trainer[trainer.index("@") :]]
    taken = cli(kinds.TrainerConfig)
    found = {
        "started": sorted([name, given] for name, _, given in started),
        "module": trainer[trainer.index("-m") + 1],
        "ranks": [word for word in trainer if word.startswith("--nproc-per-node")],
        "policy": taken.model.name == str(out),
        "drafts": json.loads(Path(engine[1]).read_text())["vllm"]["speculative_config"],
    }
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
