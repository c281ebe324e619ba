"""Drafters as files: the versions of a run on disk, and their copies in an object store."""
