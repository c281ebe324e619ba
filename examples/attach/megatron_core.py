"""A GPTModel of Megatron-Core, tensor-parallel, in a loop of one's own, with the hook around the forward that happens.

> torchrun --nproc-per-node 2 -m examples.attach.megatron_core --url http://service:8400

Every rank runs the same lines: `attach` and `capture` are collective. The rollouts here are drawn at random, and the
loss stands for yours; take your own model, `config` (the transformers config of its checkpoint) and sampler.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlamaConfig

from rl_hooks.trainer.megatron.hook import attach

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
ROLLOUTS, PROMPT, LENGTH = 8, 8, 32


def main() -> None:
    """Train; print what the hook sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="of the service")
    parser.add_argument("--run", default="megatron")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if device == "cuda":
        model_parallel_cuda_manual_seed(0)
    config = LlamaConfig(vocab_size=256, intermediate_size=128, num_hidden_layers=4, **SIZES)
    theirs = TransformerConfig(
        num_layers=4, ffn_hidden_size=128, tensor_model_parallel_size=dist.get_world_size(), add_bias_linear=False,
        normalization="RMSNorm", gated_linear_unit=True, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, persist_layer_norm=False, gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32, **SIZES,
    )  # fmt: skip
    torch.manual_seed(0)  # the same rollouts on every rank
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(theirs, spec, vocab_size=256, max_sequence_length=LENGTH, position_embedding_type="rope")
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-4)
    # Four layers are too few for EAGLE-3's own choice: leave `aux_layers` out for your model.
    hook = attach(model, options.url, config=config, run=options.run, aux_layers=(1, 2, 3))
    future = torch.ones(1, 1, LENGTH, LENGTH, device=device).triu(1).bool()  # what a token does not see
    for step in range(options.steps):
        ids = torch.randint(0, 256, (ROLLOUTS, LENGTH)).to(device)  # [B, S]
        places = torch.arange(LENGTH, device=device).expand(ROLLOUTS, LENGTH)
        generated = (places >= PROMPT).long()  # 1 where the policy wrote the token
        with hook.capture(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=generated, policy_version=step):
            logits = model(ids, places, future)  # [B, S, V / ranks]
        loss = logits.float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hook.flush(30.0)
    print(hook.stats())
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
