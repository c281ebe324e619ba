"""prime-rl's own inference server on a CPU, by its own launcher: `python prime_rl_vllm.py CONFIG`, and PRIME_RL_SOURCE.

CONFIG: a JSON file with what an `inference.toml` says. No router is started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    source = Path(os.environ["PRIME_RL_SOURCE"])
    sys.path[:0] = [str(source / "src"), str(source / "packages/prime-rl-configs/src")]
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.entrypoints.inference import inference_local

    inference_local(InferenceConfig(**json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
