"""`python begun_demo.py DRAFTER ARGUMENTS...`: the command line `draftalign`, whose demo begins with that drafter.

The demo trains its first drafter for half a minute; who tests what comes after it brings one. A vLLM is a fork.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from vllm_server.vllm_process import SPAWNS, forking_demo

from examples import demo, vllm_engine
from service.cli.main import main

if __name__ == "__main__":
    drafter = Path(sys.argv.pop(1))

    def begin(_config: Any, _policy: Any, _tokenizer: Any, _engine: Any, out: Path) -> None:
        shutil.copytree(drafter, out)

    demo._make_initial_drafter = begin  # type: ignore[assignment]
    vllm_engine.subprocess = forking_demo(**SPAWNS)  # type: ignore[attr-defined, assignment]
    main()
