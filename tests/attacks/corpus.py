"""The corpus of hostile uploads.

To add one: write a function that returns an `Attack`, decorated with `@attack`, in one of these files.
tests/service/api/test_attacks.py does the rest.
"""

from attacks import claims, headers, last_states, requests, tensors
from attacks.making import MAKERS, Attack

__all__ = ["MAKERS", "Attack", "claims", "headers", "last_states", "requests", "tensors"]
