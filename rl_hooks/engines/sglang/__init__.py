"""SGLang: the adapter of an agent beside it, and what runs inside its scheduler."""
