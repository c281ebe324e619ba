"""`examples/attach/megatron_core.py` by torchrun on two CPU processes: `python megatron_example.py OUT`.

Of the test's own: Megatron asks CUDA for the device of buffers, and for dropout's generator. OUT/found.json says what
came.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.trainer.hooks_fixtures import mapped, receiver


def rank() -> None:
    import torch
    from megatron.core.tensor_parallel import random as parallel_random

    from examples.attach import megatron_core

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    megatron_core.main()


def main(out: Path) -> None:
    with receiver() as service, TemporaryDirectory() as directory:
        launch = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        done = subprocess.run(
            [*launch, __file__, "--url", service.url, "--steps", "2"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        files: list[Any] = [mapped(one, Path(directory)) for one in service.rollouts()]
        found = {
            "asked": sorted({f"{one.method} {one.path}" for one in service.requests}),
            "versions": [int(file.header.metadata["policy_version"]) for file in files],
            "tokens": [len(file.array("input_ids")) for file in files],
            "printed": done.stdout.count("'captured_rollouts': 16"),
        }
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        main(Path(sys.argv[1]))
