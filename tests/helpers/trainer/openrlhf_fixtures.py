"""What stands for an `Actor` of OpenRLHF where that is not installed."""

from __future__ import annotations

from typing import Any

from helpers.trainer.hooks_fixtures import tiny_qwen3


class Actor:
    """What the adapter reads of an Actor; `forward` has its signature."""

    packing_samples, temperature = False, 1.0

    def __init__(self) -> None:
        self.model = tiny_qwen3()

    def forward(
        self,
        sequences: Any,
        action_mask: Any = None,  # noqa: ARG002
        attention_mask: Any = None,
        ring_attn_group: Any = None,  # noqa: ARG002
        **_: Any,
    ) -> Any:
        return self.model(sequences, attention_mask=attention_mask).logits
