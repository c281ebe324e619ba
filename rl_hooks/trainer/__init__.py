"""Captures hidden states in a trainer's own forward."""
