"""The commands that work on drafters as files."""
