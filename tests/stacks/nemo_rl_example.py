"""What `examples/attach/nemo_rl.sh` gives NeMo-RL, as its own `examples/run_grpo.py` reads it: `nemo_rl_example.py OUT
CONFIG OPTION...`, with NEMO_RL_SOURCE. OUT/found.json has what came of it; nothing is started.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemo_rl_trainer  # type: ignore[import-not-found] # beside this file
import typing_extensions
from omegaconf import OmegaConf  # type: ignore[import-not-found]

typing.TypedDict = typing_extensions.TypedDict  # pydantic's, before 3.12; NeMo-RL asks for 3.13
nemo_rl_trainer.ABSENT += ("scipy", "soundfile")  # of data sets with sound
nemo_rl_trainer.call_the_cpu_cuda("v2")


def main(out: Path, config: str, options: list[str]) -> None:
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers

    register_omegaconf_resolvers()
    composed: Any = OmegaConf.to_container(parse_hydra_overrides(load_config(config), options), resolve=True)
    taken = MasterConfig(**composed)
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    generation: Any = configure_generation_config(
        taken.policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(taken.policy["draft"]["enabled"]),
    )
    workers, engine = taken.policy["dtensor_cfg"], generation["vllm_cfg"]
    found = {
        "policy": taken.policy["model_name"],
        "worker": [workers[name] for name in ("enabled", "_v2", "tensor_parallel_size", "context_parallel_size")],
        "skips the pass": taken.loss_fn.force_on_policy_ratio,
        "drafts": generation["vllm_kwargs"]["speculative_config"],
        "engine": [generation["backend"], engine["logprobs_mode"], engine["load_format"]],
    }
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
