"""Hostile uploads: for each its maker, the status that must come, and a word that the answer must name."""
