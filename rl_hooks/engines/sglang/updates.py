"""Which version of the policy's weights a SGLang server holds: its scheduler's weight-update calls are watched.

Every call that may write the policy (`update_weights_from_*`, `begin_weight_update`, each with selector `all` or
`target`, and those from disk and by IPC, which have no selector) announces a change. A session of updates is one
change: no version begins before its end. The version is SGLang's `weight_version` where that is a whole number; else
changes are counted. Weights that are written past these calls are found by comparing some (`WeightSample`).

Written against 0.5.23; tests/helpers/trainer/contract_fixtures.py has what it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from rl_hooks.engines.policy_watch import PolicyVersions, WeightSample

log = logging.getLogger("draftalign.sglang")

#: Of SGLang's updater. The first ones carry a selector.
UPDATES: Final = (
    *("begin_weight_update", "update_weights_from_tensor", "update_weights_from_distributed"),
    *("update_weights_from_disk", "update_weights_from_ipc"),
)
#: At the end of these the weights are whole again.
WRITTEN: Final = ("end_weight_update", "update_weights_from_disk", "update_weights_from_ipc")
_WEIGHTS: Final = "weights"
#: SGLang's `weight_version` before anybody has set one.
_UNNAMED: Final = "default"


class PolicyUpdates:
    """Notices changes of the policy's weights in one scheduler's process, and numbers them once asked to.

    `named`: returns SGLang's weight version. `changing` is called before weights change, `leaving` before they leave
    their memory. All calls come from the scheduler's thread, but for `notice`.
    """

    def __init__(self, model: nn.Module, named: Callable[[], str | None]) -> None:
        self._named = named
        self.weights = WeightSample(model)
        self.changing: Callable[[], object] = lambda: None
        self.leaving: Callable[[], None] = lambda: None
        #: Whether the weights are not in their memory.
        self.released = False
        #: Since the server's start, weights have been written or named.
        self.updated = _is_named(named())
        self._versions: PolicyVersions | None = None
        self._moved = self._touched = False
        self._updater: Any = None

    # --- hooks on SGLang's updater and scheduler
    def update(self, updater: Any, request: Any) -> None:
        """A call that may write weights is about to be done."""
        if getattr(request, "selector", "all") == "draft":
            return
        self._updater, self._moved, self._touched = updater, True, True
        self.changing()

    def done(self, request: Any, result: Any) -> None:
        """Such a call has returned. One that SGLang refuses, as outside a session, has written nothing."""
        self.updated |= bool(result.success) and getattr(request, "selector", "all") != "draft"

    def release(self, updater: Any, request: Any) -> None:
        """Memory is about to be released."""
        if not request.tags or _WEIGHTS in request.tags:
            self._updater, self.released = updater, True
            self.leaving()

    def resume(self, updater: Any) -> None:
        """Memory has been resumed."""
        self.released = _WEIGHTS in updater.offload_tags

    def name(self) -> None:
        """SGLang's weight version may have changed: it says so after each update, the drafter's too."""
        self._touched = True
        self.updated |= _is_named(self._named())

    def notice(self) -> None:
        """Other weights were found, unannounced. Any thread."""
        self._touched = True

    # --- before a step
    @property
    def due(self) -> bool:
        """Whether `settle` has something to do: weights may have changed, and they are whole."""
        return self._touched and self.whole

    @property
    def whole(self) -> bool:
        """Whether the policy's weights can be read: they are in their memory, and no session writes them."""
        session = getattr(self._updater, "_session", None)
        return not self.released and (session is None or session.selector == "draft")

    def number(self, newest: int) -> int:
        """Number the weights from now on. They are `newest` of the service, or as SGLang names them."""
        self._versions = PolicyVersions.start(self._name_now(), newest)
        return self._versions.current

    def settle(self) -> tuple[int | None, bool]:
        """The version of the weights as they are now, None before `number`, and whether they changed unannounced."""
        self._touched = False
        found = self.weights.differed and not self._moved
        moved, self._moved = self._moved or found, False
        if moved:
            self.weights.retake()
        if self._versions is None:
            return None, found
        return self._versions.next(self._name_now(), moved=moved), found

    def _name_now(self) -> str | None:
        name = self._named()
        return name if _is_named(name) else None


def _is_named(name: str | None) -> bool:
    return name not in (None, _UNNAMED)
