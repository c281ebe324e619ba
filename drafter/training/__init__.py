"""Losses, optimizer and trainer."""
