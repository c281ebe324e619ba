"""The command `draftalign`, run in this process."""

from __future__ import annotations

from helpers.worker.worker_fixtures import LAYERS
from typer.testing import CliRunner, Result

from service.cli.main import app
from service.errors import ConfigurationError

ENTERING = list(LAYERS)


def draftalign(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def worked(*arguments: object) -> str:
    result = draftalign(*arguments)
    assert result.exception is None, result.exception
    return result.stdout


def refused(*arguments: object) -> str:
    result = draftalign(*arguments)
    assert isinstance(result.exception, ConfigurationError), (result.exception, result.stdout)
    return str(result.exception)


#: What a DeepSeek-V3 config says beyond the fields of any other.
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
