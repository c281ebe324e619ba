"""What the service says of the run: what became of its batches, α, headroom, the served drafter.

The sender's thread asks between two jobs, and when it is flushed. A service that is away or slow, or answers nonsense,
costs that thread a few seconds every half minute. An answer expires after a minute.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from rl_hooks.errors import MAX_REASON, cut
from rl_hooks.sending.delivery import NO_SUCH_RUN
from rl_hooks.sending.exchange import RunService
from rl_hooks.sending.jobs import run_path
from rl_hooks.wire import is_finite_number

_ASK_SECONDS: Final = 10.0
#: A trainer that flushes after each step does not ask after each.
_SOONEST_SECONDS: Final = 1.0
#: After a question that was not answered.
_AWAY_SECONDS: Final = 30.0
_TIMEOUT_SECONDS: Final = 3.0
#: Bounds each wait of `newest_policy` for the service's next bytes.
_JOIN_SECONDS: Final = 5.0
#: What was heard longer ago is not known.
_OLD_SECONDS: Final = 60.0
_COUNTS: Final = {
    **{name: f"{name}_total" for name in ("trained", "dead", "skipped", "not_finite")},
    "waiting": "waiting",
}


def newest_policy(service: RunService) -> int | None:
    """The newest policy version of the run that the service has seen; None for a new run. Raises OSError.

    What is in between may answer too (a proxy, a login page): only the service's own answer says that a run is new.
    A head that has hardly moved is not sent again, so the newest head may be much older than the newest rollouts.
    """
    path = run_path(service.run)
    reply = service.ask("GET", path, {}, (), timeout_seconds=_JOIN_SECONDS)
    if reply.status == 404 and reply.fields.get("type") == NO_SUCH_RUN:
        return None
    known = [reply.fields.get(name) for name in ("policy_version", "latest_head", "latest_policy")]
    if reply.status != 200 or type(known[0]) is not int or known[0] < 0:
        raise OSError(
            f"GET {path}: expected a run, or a 404 of type {NO_SUCH_RUN}, got {reply.status}: {reply.detail}. It "
            "is asked again; is DRAFTALIGN_URL that of a draftalign service?"
        )
    return max(version for version in known if type(version) is int)


class Standing:
    """The newest answer. `ask` is called by one thread; all else by any."""

    def __init__(self, service: RunService) -> None:
        self._service = service
        self._due = time.monotonic() + _ASK_SECONDS
        self._soonest = -math.inf  # not asked before this, whoever hurries
        self._heard: tuple[float, dict[str, float | str]] = (-math.inf, {})

    @property
    def seconds_left(self) -> float:
        """Until the service is asked again."""
        return max(0.0, self._due - time.monotonic())

    def hurry(self) -> bool:
        """Ask the service soon; False where it was asked a moment ago, or did not answer then."""
        hurries = time.monotonic() >= self._soonest
        if hurries:
            self._due = time.monotonic()
        return hurries

    def ask(self) -> Mapping[str, object]:
        """Ask; returns what the worker refused, as far as it was heard. Never raises."""
        self._due = self._soonest = time.monotonic() + _AWAY_SECONDS
        try:
            reply = self._service.ask("GET", run_path(self._service.run), {}, (), timeout_seconds=_TIMEOUT_SECONDS)
            if reply.status != 200:
                return {}
            rollouts: Any = reply.fields["rollouts"]
            self._heard = time.monotonic(), _facts(reply.fields, rollouts)
        except Exception:  # noqa: BLE001 - whatever answers there, how the run stands is then not known
            return {}
        self._due, self._soonest = time.monotonic() + _ASK_SECONDS, time.monotonic() + _SOONEST_SECONDS
        return {name: rollouts.get(name) for name in ("dead_total", "last_dead_reason", "not_finite_total")}

    def facts(self) -> dict[str, float | str]:
        """How the run stands, of all its trainers; what is not known, or not known any more, is left out.

        `trained, dead, skipped, waiting` (batches), `not_finite` (rollouts left out of trained batches),
        `last_dead_reason`, `alpha` (replay, of the served drafter), `alpha_live`, `headroom` (relative gain in α),
        `drafter_version` and its number.
        """
        at, facts = self._heard
        return dict(facts) if time.monotonic() - at <= _OLD_SECONDS else {}


def _facts(said: Mapping[str, Any], rollouts: Mapping[str, Any]) -> dict[str, float | str]:
    numbers: dict[str, Any] = {name: rollouts.get(key) for name, key in _COUNTS.items()}
    numbers |= {name: said.get(name) for name in ("alpha", "alpha_live", "headroom")}
    facts: dict[str, float | str] = {name: value for name, value in numbers.items() if is_finite_number(value)}
    if isinstance(reason := rollouts.get("last_dead_reason"), str) and reason:
        facts["last_dead_reason"] = cut(reason, MAX_REASON)
    if isinstance(version := said.get("drafter"), str):
        facts["drafter_version"] = cut(version)
        if number := re.match(r"v([0-9]{1,12})-", version):
            facts["drafter_number"] = int(number[1])
    return facts
