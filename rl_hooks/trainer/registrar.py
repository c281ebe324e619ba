"""Registers the run with the policy's weights, once; then sends the head whenever it has moved.

One rank does this for all. Where the trainer shards the weights before the hook is attached, they are taken from the
first captured forward.

The run is registered before anything is known of `Agreement`, whose verdict needs a captured forward. In most trainers
rollouts are generated before that: engines have the first drafter by then, and other ranks and an engine's tap have a
run to send to. What the service refuses (another policy, a drafter that does not fit) is said before a step was paid
for. Where the verdict is bad, no rollout of this hook is sent. What an engine's tap sends is checked against this head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from rl_hooks.sending.jobs import Job
from rl_hooks.sending.registration import HeadWatch, RunRegistration, embedding_weight, head_job, head_weight, unwrap
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.plan import VersionOrder
from rl_hooks.trainer.session import Session
from rl_hooks.trainer.whole import WholeWeight

#: A run is not registered again within this time: it takes a copy of the weights, and two services behind one address,
#: each with a state of its own, would lose it at every step.
_RENEW_SECONDS: Final = 300.0


class HeadUpdates:
    """When the service needs the head again: it has moved, or the trainer went back to an earlier checkpoint."""

    def __init__(self, head_VH: Tensor, tolerance: float, policy_version: int) -> None:
        """`head_VH`, `policy_version`: as the run is registered with them."""
        self._watch = HeadWatch(head_VH, tolerance, policy_version)
        self._versions = VersionOrder()
        self._versions.went_back(policy_version)
        self._compared_version: int | None = None
        self._went_back = False  # in this very process; until the head was sent
        self._due = False

    def wants(self, policy_version: int) -> bool:
        """Whether it has not compared this version's head."""
        return policy_version != self._compared_version

    def is_due(self, head_VH: Tensor, policy_version: int, *, joined: bool) -> bool:
        """Whether the head is to be sent: of this version, or of one before that was not. `joined`: of `HeadWatch`."""
        if self.wants(policy_version):  # to ask again would make the host wait for the device
            self._compared_version = policy_version
            self._went_back |= self._versions.went_back(policy_version)
            self._due |= self._watch.is_due(head_VH, policy_version, joined=joined) or self._went_back
        return self._due

    def job(self, run: str, whole_VH: Tensor, policy_version: int, session: str) -> Job:
        """The request that sends it."""
        return head_job(run, whole_VH, policy_version, went_back=self._went_back, session=session)

    def sent(self, head_VH: Tensor) -> None:
        """The service has been sent this head, of which this may be a rank's part."""
        self._watch.mark(head_VH)
        self._due = self._went_back = False


class Renewal:
    """When to register again a run that was registered, and that the service has lost."""

    def __init__(self, sender: RolloutSender, tally: Tally) -> None:
        self._sender, self._tally = sender, tally
        self._at = -math.inf  # monotonic

    def is_due(self) -> bool:
        """Whether to register it now. True at most once in `_RENEW_SECONDS`."""
        now = time.monotonic()
        due = now - self._at >= _RENEW_SECONDS and self._sender.lost
        if due:
            self._at = now
            self._tally.warn("renewed", "the service has lost the run: it is being registered again")
        return due


class Registrar:
    """Registers the run, and sends its head again after a relative change of more than `tolerance`."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[], RunRegistration],
        registration: RunRegistration,
        sender: RolloutSender,
        tally: Tally,
        session: Session,
        tolerance: float,
    ) -> None:
        """`registration`: what `make` has returned; it is called again where the service has lost the run."""
        #: None once it is queued, because it holds the embedding, the head and the initial drafter.
        self._registration: RunRegistration | None = None
        self._model, self._make = model, make
        self._sender = sender
        self._tally = tally
        self._tolerance = tolerance
        self._session = session
        self._updates: HeadUpdates | None = None
        self._embedding: WholeWeight[None] | None = None
        self._renewal = Renewal(sender, tally)
        self._begin(registration, int(registration.metadata["policy_version"]))

    def renew(self, policy_version: int) -> None:
        """Register the run again, with the weights of now, if it was registered and is there no more."""
        if self._registration is None and self._renewal.is_due():
            self._begin(self._make(), policy_version)

    def _begin(self, registration: RunRegistration, policy_version: int) -> None:
        self._registration, self._updates = registration, None
        if registration.complete:
            self._register(registration, head_weight(self._model), policy_version)
        elif "embed_tokens" not in registration.tensors:
            inner: Any = unwrap(self._model)
            self._embedding = WholeWeight(partial(embedding_weight, self._model), [inner.get_input_embeddings()])

    def wants(self, policy_version: int) -> bool:
        """Whether it needs this version's head: to register the run, or because the head may have moved."""
        return self._updates is None or self._updates.wants(policy_version)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Take the embedding from the forward inside, if it is still needed."""
        waiting = self._registration
        if self._embedding is None or waiting is None or "embed_tokens" in waiting.tensors:
            yield
            return
        with self._embedding.armed(waiting.add_embedding):
            yield

    def check(self) -> None:
        """Raise the error of the forward. Call it where no failure of ours reaches the trainer."""
        if self._embedding is not None:
            self._embedding.pop()

    def saw(self, head_VH: Tensor, policy_version: int) -> None:
        """Register the run with the captured forward's whole head, or send the head if it has moved."""
        if (waiting := self._registration) is not None:
            waiting.add_head(head_VH)
            if waiting.complete:
                self._register(waiting, head_VH, policy_version)
                self.close()
            return
        updates = self._updates
        if updates is None or not updates.wants(policy_version):
            return
        if not updates.is_due(head_VH, policy_version, joined=self._sender.joined):
            return
        if self._sender.submit_job(updates.job(self._sender.run, head_VH, policy_version, self._session.id)):
            updates.sent(head_VH)
            self._tally.add("head_updates")

    def close(self) -> None:
        """Remove the remaining hooks."""
        if self._embedding is not None:
            self._embedding.close()

    def _register(self, complete: RunRegistration, head_VH: Tensor, policy_version: int) -> None:
        self._updates = HeadUpdates(head_VH, self._tolerance, policy_version)
        complete.metadata |= {"policy_version": str(policy_version), **self._session.of_run()}
        self._sender.submit_job(complete.job(self._sender.run))
        self._registration = None
