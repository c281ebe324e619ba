"""A process that uses vLLM as a trainer does: `LLM`, generate, weights. It knows nothing of draftalign but `attach`.

Run by vLLM's own Python. Each line on stdin is a JSON list [function, arguments...]; its answer goes to the file of the
first argument, because vLLM writes to stdout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def make(policy: str, drafter: str, depth: int, ranks: int) -> Any:
    """`DRAFTALIGN_TESTS_DUMMY`: it starts without the policy's weights, as verl and NeMo-RL start it."""
    from vllm import LLM

    speculative: dict[str, Any] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": depth}
    dummy = os.environ.get("DRAFTALIGN_TESTS_DUMMY") == "1"
    if dummy:
        speculative["draft_load_config"] = {"load_format": "auto"}
    return LLM(
        policy,
        dtype="float32",
        tensor_parallel_size=ranks,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=512,
        generation_config="vllm",
        load_format="dummy" if dummy else "auto",
        weight_transfer_config={"backend": "files"},
        speculative_config=speculative,
    )


class Commands:
    """What the test asks for."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], temperature: float, max_tokens: int, stop: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=[stop], seed=1)
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    def metrics(self) -> dict[str, Any]:
        return {
            m.name: list(m.values) if hasattr(m, "values") else m.value
            for m in self.llm.get_metrics()
            if m.name.startswith("vllm:spec_decode")
        }

    def rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=tuple(args))[0]

    def rpc_all(self, method: str, *args: Any) -> list[Any]:
        """The answer of each rank."""
        return list(self.llm.collective_rpc(method, args=tuple(args)))

    def reload(self, path: str, version: str | None) -> bool:
        """What a trainer does: new weights, then the old prefix cache goes. Returns whether vLLM takes a version."""
        self.llm.collective_rpc("tests_load_policy", args=(path,))
        self.llm.reset_prefix_cache()
        takes = hasattr(self.llm, "update_weight_version")  # not in 0.25
        if takes and version is not None:
            self.llm.update_weight_version(version)
        return takes

    def start_update(self) -> None:
        self.llm.start_weight_update()

    def update(self, path: str, part: int, parts: int) -> None:
        self.llm.update_weights({"update_info": {"path": path, "part": part, "parts": parts}})

    def finish_update(self) -> None:
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def load_past_the_core(self, path: str) -> None:
        """As TRL does beside a trainer: into the worker's own objects, by no call of the engine."""
        executor = self.llm.llm_engine.model_executor
        executor.driver_worker.worker.tests_refit("buckets", path)
        self.llm.reset_prefix_cache()

    def let_go(self) -> None:
        """The engine is collected, and this process goes on."""
        self.llm = None
        gc.collect()

    def attach(self, url: str) -> str:
        """The explicit form; what it said where it was refused."""
        from rl_hooks.agent.vllm import attach

        try:
            attach(self.llm, url, run="attached", sample_fraction=1.0, tokens_per_minute=10**7)
        except Exception as error:  # noqa: BLE001 - from another process it is vLLM's own
            return str(error)
        return ""


def main() -> None:
    answers = Path(sys.argv[1])

    def answer(number: int, value: Any) -> None:
        part = answers / f"{number}.part"
        part.write_text(json.dumps(value))
        part.rename(answers / str(number))

    commands = Commands(make(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    answer(0, None)
    for number, line in enumerate(sys.stdin, 1):
        name, *arguments = json.loads(line)
        answer(number, getattr(commands, name)(*arguments))


if __name__ == "__main__":
    main()
