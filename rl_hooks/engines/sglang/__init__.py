"""SGLang: the agent's adapter, and the loader that runs inside the engine."""
