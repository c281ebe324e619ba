"""Drafters on disk: our layout, and those of other projects."""
