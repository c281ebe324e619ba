"""What the taps of vLLM and SGLang are made of: rows of sampled requests, rollouts of them, the run they go to."""
