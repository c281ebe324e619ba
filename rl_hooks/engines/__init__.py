"""Adapters and plugins for inference engines."""
