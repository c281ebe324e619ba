"""Engines against replay: what each counted, what it should have, and what is the matter with it."""
