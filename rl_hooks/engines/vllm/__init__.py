"""vLLM: the plugin that swaps its drafter, and the tap that captures its features."""

from __future__ import annotations

from typing import Final

#: The releases that all of this was written against: docs/guide/vllm.md says of each what was run, and what was read.
KNOWN_RELEASES: Final = "vLLM 0.22 to 0.33"
