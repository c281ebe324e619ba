"""What the worker and the engines report, kept in Redis."""
