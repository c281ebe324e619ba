"""vLLM: the plugin that swaps its drafter, and the tap that captures its features."""
