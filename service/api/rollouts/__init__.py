"""Rollouts over HTTP: `batches` comes and tells their fate, `dead` is what people do with dead ones."""
