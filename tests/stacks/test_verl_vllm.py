"""verl's own GRPO, whole, by the script that the guide names: trainer, rollout server, sleep, refits, hook, plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, trained_drafter
from helpers.engine.engines_within import check_labels, engine_environment
from helpers.engine.server_load import publish, write_drafters
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.trainer.stacks_fixtures import HERE, ROOT, Stack
from redis import Redis

from examples import elicit
from examples.policy import BASE_POLICY, load

STACK = Stack("verl_vllm", "verl_reward.py", "a real verl with its vLLM")
STEPS, PROMPTS, ANSWERS = 6, 8, 2
#: Beside the script's own options: one process in place of 8 GPUs, a small policy in float32.
OPTIONS = {
    "trainer": ("n_gpus_per_node=1", "device=cpu", "logger=[console]", "val_before_train=False", "save_freq=1"),
    "data": (
        *(f"train_batch_size={PROMPTS}", "max_prompt_length=16", "max_response_length=44"),
        *("shuffle=False", "dataloader_num_workers=0"),
    ),
    "actor_rollout_ref.rollout": (
        *(f"n={ANSWERS}", "dtype=float32", "enforce_eager=True", "tensor_model_parallel_size=1", "max_model_len=128"),
        *("max_num_seqs=8", "max_num_batched_tokens=256", "agent.num_workers=1"),
        "checkpoint_engine.update_weights_bucket_megabytes=4",
    ),
    "+actor_rollout_ref.rollout.engine_kwargs.vllm": ("num_gpu_blocks_override=512",),
    "actor_rollout_ref.actor": (
        *(f"ppo_mini_batch_size={PROMPTS}", "ppo_max_token_len_per_gpu=512", "use_torch_compile=False"),
        *("fsdp_config.use_torch_compile=False", "optim.lr=1e-3", "checkpoint.save_contents=[hf_model]"),
    ),
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision": (
        *("param_dtype=fp32", "reduce_dtype=fp32", "buffer_dtype=fp32"),
    ),
    "+actor_rollout_ref.model.override_config": ("attn_implementation=sdpa",),
    "reward": ("num_workers=1", f"custom_reward_function.path={HERE / 'verl_reward.py'}"),
    "ray_kwargs.ray_init": ("num_cpus=16",),
    "+ray_kwargs.ray_init": ("num_gpus=1", "object_store_memory=80000000", "include_dashboard=False"),
}

pytestmark = [*STACK.marks, pytest.mark.timeout(900)]


def verls_policy(folder: Path) -> Path:
    """The demo's policy with what verl and vLLM ask of a Qwen3's tokenizer: a chat's template, ends of its turns."""
    shutil.copytree(BASE_POLICY, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    model["unk_token"] = "<pad>"
    for word, instead in (("dream", "\n"), ("told", "<|im_end|>")):  # words that no prompt has
        place = model["vocab"][instead] = model["vocab"].pop(word)
        added.append(added[0] | {"id": place, "content": instead, "special": False})
    added.sort(key=lambda one: one["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    return folder


class Training:
    """`examples/attach/verl.sh` in verl's environment."""

    def __init__(self, scratch: Path, drafter: Path, url: str) -> None:
        self.holds, self.log, self.checkpoints = scratch / "holds", scratch / "log", scratch / "checkpoints"
        self.cache = scratch / "cache"
        self.holds.mkdir()
        prompts = elicit.sample_prompts(PROMPTS * STEPS, seed=3)
        rows = [
            {
                "data_source": "elicit",
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "step": index // PROMPTS},
            }
            for index, prompt in enumerate(prompts)
        ]
        for name in ("train", "test"):
            Dataset.from_list(rows).to_parquet(scratch / f"{name}.parquet")
        options = [f"{of}.{option}" for of, given in OPTIONS.items() for option in given]
        options += [f"trainer.total_training_steps={STEPS}", f"trainer.default_local_dir={self.checkpoints}"]
        variables = engine_environment(scratch / "plugin", "0.32.0", "verl_vllm_plugin:register")
        variables |= {
            "PATH": f"{STACK.python.parent}{os.pathsep}{os.environ['PATH']}",
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
            "VLLM_LOGGING_LEVEL": "INFO",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "TESTS_HOLDS": str(self.holds),
            "DRAFTALIGN_URL": url,
            "DRAFTALIGN_DRAFTER_DIR": str(self.cache),
            "DRAFTALIGN_AUX_LAYERS": "1,2,3",
            "DRAFTALIGN_HOOK_OPTIONS": '{"head_tolerance": 0.0}',
            "DRAFTALIGN_INITIAL_DRAFTER": str(drafter),
            "POLICY": str(verls_policy(scratch / "policy")),
            "DRAFTER": str(drafter),
            "DATA": str(scratch),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", str(ROOT / "examples/attach/verl.sh"), *options],
                env=variables,
                cwd=scratch,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """Raise with the end of its log if it has ended by a fault."""
        assert self.process.poll() in (None, 0), self.text()[-6000:]

    def stop(self) -> None:
        """End verl's driver as a person would; Ray's processes end with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(60)


@pytest.fixture(name="service")
def _service(serve: Callable[..., RunningService]) -> RunningService:
    return serve()


@pytest.fixture(name="training")
def _training(service: RunningService, tmp_path: Path) -> Iterator[Training]:
    drafters = write_drafters(tmp_path / "drafters")
    scratch = tmp_path / "verl"
    scratch.mkdir()
    made = Training(scratch, drafters / "random", service.url)
    try:
        yield made
    finally:
        made.stop()
        print(made.text()[-20000:])


def test_verls_whole_grpo_sends_sleeps_refits_and_swaps(
    service: RunningService, training: Training, redis_url: str, tmp_path: Path
) -> None:
    """Each step the server wakes, gets the weights through verl's own buckets, answers, and sleeps at level 2, which
    takes the drafter as well.
    """

    def until(found: Callable[[], Any], seconds: float) -> Any:
        def look() -> Any:
            training.check()
            return found()

        return eventually(look, seconds)

    # Two steps wait: the second until a drafter was published and fetched, the last until its rounds were reported.
    (training.holds / "1").touch()
    (training.holds / str(STEPS - 1)).touch()
    until(lambda: service.client.get("/runs/default").status_code == 200, 500)
    version = publish(service, tmp_path / "drafters/trained", trained_drafter())
    until(lambda: list(training.cache.rglob(f"*{version}*/model.safetensors")), 60)
    (training.holds / "1").unlink()

    with Redis.from_url(redis_url) as redis:
        store = Store(redis, "default")

        def reported() -> tuple[float, float]:
            of_it = [one for one in store.acceptances() if one.drafter_version == version]
            return sum(one.rounds for one in of_it), sum(one.accepted_tokens or 0 for one in of_it)

        until(lambda: re.search(rf"step:{STEPS - 1} ", training.text()), 500)
        until(lambda: reported()[0] >= 3 * PROMPTS * ANSWERS, 60)
        (training.holds / str(STEPS - 1)).unlink()
        until(lambda: training.process.poll() == 0, 200)
        rounds, accepted = reported()
    text = training.text()
    alpha = 1 + accepted / rounds
    print(f"α {alpha:.3f} over {rounds} rounds of the published drafter")
    assert alpha > 1.5
    assert text.count(f"restored drafter {version}") >= STEPS - 4, "after each sleep but the first two"
    assert "draftalign: this engine follows run 'default'" in text
    # verl's own comparison of what its server and its trainer say of a token.
    apart = [float(one) for one in re.findall(r"training/rollout_probs_diff_max:([0-9.e-]+)", text)]
    assert len(apart) == STEPS
    assert max(apart) < 1e-5, apart

    saved = {step: load(training.checkpoints / f"global_step_{step}/actor/huggingface")[0] for step in range(1, STEPS)}
    each = PROMPTS * ANSWERS
    check_labels(service, {0: base_policy()[0]} | saved, dict.fromkeys(range(STEPS), each))
