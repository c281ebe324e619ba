"""TRL's GRPOTrainer beside a vLLM server that is a process of its own, in vLLM's environment; for a test.

    python trl_script.py SITE SERVER SERVICE DRAFTER WEIGHTS OUT

SITE is the site-packages that TRL is in; it comes after this environment's own. All is TRL's own but what carries the
weights: TRL has NCCL for that, and refuses to begin without a CUDA device. Here a file in WEIGHTS carries what it would
broadcast, to the backend `files` of the tests' plugin. Names, order, the calls around it (start, update, finish, the
prefix cache) and the times at which they are made are TRL's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: RL ends after the first number of steps with a drafter that was published while it ran; without one after the second.
_AFTER, _MOST = 3, 40


def main(site: str, server: str, service: str, drafter: str, weights: str, out: str) -> None:
    """Train until some steps were drafted by a published drafter; write what the test compares."""
    sys.path.append(site)
    import httpx
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.elicit import TASK
    from examples.policy import AUX_LAYERS
    from rl_hooks.engines.counting.counters import Snapshot
    from rl_hooks.trl import attach

    refused = carry_by_files(Path(weights))
    rows: list[dict[str, Any]] = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        """After each step: wait for its score, note what the engine counted and with which drafter."""

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            rows[-1] |= {name: value for name, value in logs.items() if "sampling" in name}

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            attachment.flush(30.0)
            policy = state.global_step - 1
            deadline = time.monotonic() + 120
            while policy not in scored() and time.monotonic() < deadline:
                time.sleep(0.1)
            counts = Snapshot.parse(httpx.get(f"{server}/metrics").text).counts
            found = httpx.get(f"{server}/drafter/state").json()
            rows.append(
                {
                    "policy": policy,
                    "rounds": counts.rounds,
                    "accepted": counts.accepted_tokens,
                    "drafter": found["version"],
                }
            )
            latest = {row["drafter"] for row in rows[-_AFTER:]}
            control.should_training_stop = len(rows) > _AFTER and len(latest) == 1 and rows[0]["drafter"] not in latest

    def scored() -> set[int]:
        points = httpx.get(f"{service}/alpha", params={"run": "trl"}).json().get("points", [])
        return {point["policy_version"] for point in points if point["alpha_served"] is not None}

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TASK.base_policy),
        reward_funcs=TASK.reward,
        args=GRPOConfig(
            output_dir=f"{out}/trl",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server,
            max_steps=_MOST,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=TASK.max_answer_tokens,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(dict(TASK.curriculum(_MOST, 8, 0))),
        processing_class=TASK.build_tokenizer(),
        callbacks=[Steps()],
    )
    attachment = attach(trainer, service, run="trl", aux_layers=AUX_LAYERS, initial_drafter=drafter)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    trainer.save_model(f"{out}/policy")
    found = {"rows": rows, "refused": refused, "stats": attachment.stats()}
    attachment.close()
    Path(out, "found.json").write_text(json.dumps(found))


def carry_by_files(weights: Path) -> list[str]:
    """Replace the two methods of TRL's client that need NCCL; the list gets what TRL itself says without CUDA."""
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    refused: list[str] = []
    own = VLLMClient.init_communicator

    def init_communicator(self: Any, device: Any = 0) -> None:
        try:
            own(self, device)
        except NotImplementedError as error:
            refused.append(str(error))
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self: Any, metadata: list[Any], named_params: Iterator[tuple[str, Any]]) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in named_params}
        assert [name for name, _, _ in metadata] == list(tensors)
        save_file(tensors, weights / "model.safetensors")
        self._start_weight_update()
        self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(weights)}})
        self._finish_weight_update()

    VLLMClient.init_communicator, VLLMClient.update_named_params = init_communicator, update_named_params
    return refused


if __name__ == "__main__":
    main(*sys.argv[1:])
