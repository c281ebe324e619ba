"""What a SGLang server says of itself, to an agent beside it and to the one in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl_hooks.engines.protocol import TREES

#: The entry of `/server_info`'s first `internal_states` of a server that follows the service by itself, a text.
FOLLOWS: Final = "draftalign_follows"
_MAX_DIGITS: Final = 15


def internal(info: Mapping[str, Any], name: str) -> str | None:
    """A text among the internal states in what `/server_info` answered; None where it is not there."""
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    found = first.get(name) if isinstance(first, dict) else None
    return found if isinstance(found, str) else None


def version_number(named: object) -> int | None:
    """SGLang's weight version as the policy's; None where it is no whole number."""
    return int(named) if isinstance(named, str) and named.isdecimal() and len(named) <= _MAX_DIGITS else None


def drafting_of(rejection_sampling: object, topk: object) -> str:
    """How a server drafts. By default it takes the most probable tokens, also where answers are sampled."""
    if topk not in (None, 1):
        return TREES
    return "probabilistic" if rejection_sampling else "greedy"
