"""Which rollouts are sent: a fixed share of the ids, and no more tokens than a rate allows."""

from __future__ import annotations

import hashlib
import threading
import time


def sampling_position(rollout_id: str, salt: str) -> float:
    """Where a rollout falls in [0, 1): it is sampled if that is below the fraction.

    Each choice has its own salt, so that it is independent of every other choice that hashes the same id.
    """
    digest = hashlib.sha256(f"draftalign-{salt}:{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / float(1 << 48)


class TokenBudget:
    """Token bucket: refills at `tokens_per_minute`, holds at most one minute's tokens. Any thread."""

    def __init__(self, tokens_per_minute: int) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._lock = threading.Lock()
        self._left, self._filled_at = float(tokens_per_minute), time.monotonic()

    def spend(self, tokens: int) -> bool:
        """Take that many tokens if any are left, however many; returns whether. Less than nothing may then be left.

        Were they taken only where they fit, the few that are left would always go to the shortest texts.
        """
        with self._lock:
            now, limit = time.monotonic(), float(self.tokens_per_minute)
            self._left = min(limit, self._left + (now - self._filled_at) * limit / 60)
            self._filled_at = now
            if self._left <= 0:
                return False
            self._left -= tokens
            return True

    def correct(self, tokens: int) -> None:
        """So many more were used than were taken; fewer, if negative."""
        with self._lock:
            self._left -= tokens
