"""The drafter's weights in one worker of vLLM: loads a drafter whole or not at all, and restores a lost one.

Its methods run between two steps, except `read_initial`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from torch import Tensor

from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.vllm.draft import RunningDraft

log = logging.getLogger("vllm.draftalign")


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """The loaded drafter. Its tensors stay in host memory, to be loaded again if the next swap fails half-way."""

    version: str | None
    sha256: str | None
    tensors: dict[str, Tensor] | None


class DrafterWeights:
    """The weights of `draft`; None: this worker has no drafter."""

    def __init__(self, draft: RunningDraft | None, ranks: LayerRanks) -> None:
        self._draft, self._ranks = draft, ranks
        self.served = LoadedDrafter(None, None, None)
        #: The drafter that vLLM loaded at its start; None until a swap has read it.
        self._initial: dict[str, Tensor] | None = None
        self.swaps = 0
        self.stall_seconds = 0.0
        #: Why the weights are not those of `served`; None: they are, as long as their fingerprint is `_marks`.
        self.broken: str | None = None
        #: Fingerprint of the weights when they were last loaded, or found to be broken.
        self._marks = None if draft is None else draft.fingerprint()

    def read_initial(self) -> None:
        """Read the drafter that vLLM started with, to be loaded again. Called before the first swap."""
        if self._draft is not None and self._initial is None and self.served.version is None:
            self._initial = self._draft.read_initial()

    def replace(self, wanted: LoadedDrafter) -> None:
        """Load `wanted`; if that fails, load the drafter before it again."""
        if self._draft is None:
            self.served = wanted
            self.swaps += 1
            return
        began = time.perf_counter()
        before = self.served
        try:
            with self._ranks.together():
                self._draft.load(wanted.tensors or {})
        except Exception as error:
            self._put_back(before, error)
            raise
        self.served, self.broken, self._initial = wanted, None, None
        self.swaps += 1
        self._marks = self._draft.fingerprint()
        self.stall_seconds = time.perf_counter() - began

    def _put_back(self, before: LoadedDrafter, error: Exception) -> None:
        """Restore after a failed load. The policy's output is right in any case: it verifies every draft."""
        assert self._draft is not None  # noqa: S101 - something was just loaded into it
        log.exception("draftalign: loading failed; putting %s back", before.version or "the initial drafter")
        tensors = before.tensors or self._initial
        try:
            if tensors is None:
                raise RuntimeError("no copy of it was kept")  # noqa: TRY301 - one way out for both
            self._draft.load(tensors)
            self.broken = None
        except Exception as second:  # noqa: BLE001 - reported in the state; the engine must go on
            self.broken = f"loading failed ({error}), putting back failed ({second}); push a drafter again"
            self.served = LoadedDrafter(None, None, None)
        self._marks = self._draft.fingerprint()

    def mend(self, *, lost: bool) -> None:
        """Restore the drafter if it is lost. Weights that another client has loaded stay, and are reported as such."""
        now = None if self._draft is None else self._draft.fingerprint()
        if self._draft is None or (now == self._marks and not (lost and self.broken)):
            return  # nothing has changed; after a failed restore, only another loss is a reason to try again
        if lost or self._draft.is_wiped():
            self._restore()
        elif self.served.version is None:  # it may be the policy's own module, which the trainer updates
            self._marks, self.broken = now, None
        else:
            if self.broken is None:
                log.warning("draftalign: another client has loaded other weights over %s", self.served.version)
            self._marks = now
            self.broken = f"other weights than those of {self.served.version} were loaded; push a drafter again"

    def _restore(self) -> None:
        """Load the served drafter again from host memory: a level-2 sleep discards it, and vLLM does not bring it back.

        The drafter that vLLM started with is read from its files, once.
        """
        assert self._draft is not None  # noqa: S101 - the caller has checked
        began = time.perf_counter()
        try:
            self._draft.check()
            tensors = self.served.tensors or self._initial or self._draft.read_initial()
            if tensors is None:
                raise RuntimeError("its files could not be read")  # noqa: TRY301 - one way out for both
            if self.served.version is None:
                self._initial = tensors  # the next restore does not read the disk between two steps
            self._draft.load(tensors)
        except Exception as error:  # noqa: BLE001 - the policy verifies every draft; its text is right in any case
            # The state says that it is not loaded, so a version is pushed.
            self.broken = f"the drafter's weights are lost and were not restored: {error!r}"
            log.warning("draftalign: %s", self.broken)
        else:
            self.broken, seconds = None, time.perf_counter() - began
            log.info("draftalign: restored drafter %s in %.4f s", self.served.version or "of the start", seconds)
        self._marks = self._draft.fingerprint()

    def are_intact(self, *, asleep: bool) -> bool:
        """False when the weights have changed since they were loaded: after a sleep, a refit or a weight sync.

        `asleep`: they cannot be read, and nothing drafts.
        """
        if self._draft is None or self.broken is not None:
            return False
        return self._marks is not None and (asleep or self._marks == self._draft.fingerprint())
