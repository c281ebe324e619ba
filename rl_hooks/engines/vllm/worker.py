"""The part of the vLLM plugin inside each worker: stage a drafter beside the engine, then swap it in one call.

A swap is two RPCs. `draftalign_stage` starts a thread that reads and checks the file while the engine goes on.
`draftalign_apply` runs between two steps, and only it stalls the engine. It is all or nothing: if it fails, the drafter
that was served before is loaded again. Both are called on every worker, so a rank that cannot read its copy stops the
swap on all of them.

Uses only methods that V1 and V2 model runners both have (`get_model`, `get_draft_model`).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_hooks.engines.candidate import (
    DrafterRefusedError,
    OtherBytesError,
    check_config,
    max_model_bytes,
    read_candidate,
    read_file,
    vocabulary_digest,
)
from rl_hooks.engines.policy_watch import PolicyWatch, before_call
from rl_hooks.engines.vllm.draft import RunningDraft
from rl_hooks.engines.vllm.modules import float32_weights
from rl_hooks.engines.vllm.ranks import Ranks
from rl_hooks.engines.vllm.tap import ServiceSettings, VllmTap
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE, fingerprint
from rl_hooks.format.mtp import MtpConfig

log = logging.getLogger("vllm.draftalign")


@dataclass(slots=True)
class Staged:
    """A candidate that is being read: the staging thread fills it in."""

    path: str
    version: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sha256: str = ""
    refused: str | None = None
    other_bytes: str | None = None
    failed: str | None = None
    done: threading.Event = field(default_factory=threading.Event)
    #: SHA-256 by file name, where whoever asked knows them.
    expected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """The loaded drafter. Its tensors stay in host memory, to be loaded again if the next swap fails half-way."""

    version: str | None
    sha256: str | None
    tensors: dict[str, Tensor] | None


class DrafterSwap:
    """The drafter of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._ranks = worker, Ranks(worker)
        self._staged: Staged | None = None
        self._served = Served(None, None, None)
        #: The drafter that vLLM loaded at its start; None until a swap has read it.
        self._initial: dict[str, Tensor] | None = None
        self._swaps = 0
        self._stall_seconds = 0.0
        #: Why the weights are not those of what is served; None where they are, unless they differ from `_marks`.
        self._broken: str | None = None
        #: Fingerprint of the weights when they were last loaded, or found to be broken.
        self._marks: str | None = None
        #: What `follow` was told, while the weights are not yet the run's.
        self._waiting: tuple[ServiceSettings, int | None] | None = None
        self.tap: VllmTap | None = None
        self.watch: PolicyWatch | None = None
        has_draft = worker.model_runner.get_draft_model() is not None
        self.draft = RunningDraft(worker) if has_draft else None
        if self.draft is not None:
            self._marks = self.draft.fingerprint()

    # --- called by RPC
    def stage(self, path: str, version: str, expected: Mapping[str, str] | None = None) -> None:
        """Begin to read and check; `staged` tells when it is done. A later call replaces an earlier one."""
        staged = Staged(path, version, expected=expected or {})
        self._staged = staged
        threading.Thread(target=self._read, args=(staged,), name="draftalign-stage", daemon=True).start()

    def staged(self) -> dict[str, Any]:
        """Where the last `stage` stands."""
        staged = self._staged
        if staged is None:
            nothing = {"done": True, "refused": None, "other_bytes": None, "sha256": ""}
            return {**nothing, "failed": "nothing is staged"}
        return {
            "version": staged.version,
            "done": staged.done.is_set(),
            "refused": staged.refused,
            "other_bytes": staged.other_bytes,
            "failed": staged.failed,
            "sha256": staged.sha256,
        }

    def apply(self, version: str, sha256: str) -> dict[str, Any]:
        """Swap in the staged drafter, also if it is served already: its weights may have been lost unnoticed.

        All tensor-parallel ranks swap, or none: they agree before they load, and again when they have loaded.
        """
        with self._ranks.together():
            staged = self._ready(version, sha256)
        previous, self._staged = self._served, None
        self._replace(Served(version, sha256, staged.tensors))
        log.info("draftalign: drafter %s for %s in %.4f s", version, previous.version, self._stall_seconds)
        return {"previous": previous.version, "version": version}

    def _ready(self, version: str, sha256: str) -> Staged:
        """What is staged here, if it can be loaded now."""
        staged = self._staged
        if staged is None or staged.version != version:
            raise RuntimeError(f"{version} is not staged here; another swap came between. Ask again")
        if not staged.done.is_set():  # another API process has staged it again; the engine must not wait for a disk
            raise RuntimeError(f"{version} is still being read here; ask again")
        if staged.refused is not None:
            raise DrafterRefusedError(staged.refused)
        if fault := staged.other_bytes or staged.failed:
            raise RuntimeError(fault)
        if self._is_updated():
            raise RuntimeError("a trainer is updating this worker's weights; ask again")
        if self.watch is not None and self.watch.asleep:
            raise RuntimeError("this worker sleeps, and its weights are not in memory; ask again when it is awake")
        if self.draft is not None and staged.sha256 != sha256:
            raise RuntimeError(f"this worker read {staged.sha256} for {version}, another one read {sha256}")
        return staged

    def state(self) -> dict[str, Any]:
        """The loaded drafter, and whether its weights are still intact."""
        config = self._worker.vllm_config.speculative_config
        document: dict[str, Any] = {
            "version": self._served.version,
            "loaded": self.draft is not None and self._intact(),
            "swaps": self._swaps,
            "verifies": True,
            "depth": getattr(config, "num_speculative_tokens", 0) or 0,
            "drafting": str(getattr(config, "draft_sample_method", None) or "greedy"),
            "method": getattr(config, "method", None),
            "sha256": self._served.sha256,
            "last_stall_seconds": self._stall_seconds,
            "problem": self._broken,
            "tap": None if self.tap is None or self.tap.refused else self.tap.stats(),
            "takes": None,
        }
        if self.draft is not None:
            document["shared_modules"] = sorted(self.draft.shared)
            try:
                self._check_method()
                sizes, d2t = self.draft.check(), self.draft.offsets()
            except DrafterRefusedError as error:
                document["problem"] = document["problem"] or f"cannot be swapped: {error}"
            else:
                document["takes"] = "mtp" if isinstance(sizes, MtpConfig) else "eagle3"
                document["d2t_sha256"] = vocabulary_digest(d2t, sizes.vocab_size)
                document["config_fingerprint"] = fingerprint(sizes, document["d2t_sha256"])
                document["aux_layers"] = [] if isinstance(sizes, MtpConfig) else list(sizes.aux_layers)
        return document

    # --- where the engine itself follows the service
    def settle(self, named: str | None) -> dict[str, Any]:
        """Something may have changed weights: put a lost drafter back, and bring the policy's version up to date.

        `named`: vLLM's weight version. The weights must be readable. Returns the state, with `policy_version`.
        """
        watch = self._watched()
        if not self._is_updated() and not watch.asleep:
            with self._ranks.together():
                self._mend(watch)
            tainted = watch.settle(named)
            if self._waiting is not None:
                self._begin(*self._waiting, named, later=True)
            elif self.tap is not None:
                self.tap.settled(tainted=tainted)
        return {**self.state(), "policy_version": watch.version}

    def _watched(self) -> PolicyWatch:
        if self.watch is None:
            watch = self.watch = PolicyWatch(self._worker, lambda same: self._ranks.all_agree(ok=same))
            if self.draft is not None:  # a trainer that loads the drafter after a sleep has brought what was lost

                def found(*_: Any, **__: Any) -> None:
                    watch.lost = False

                before_call(self.draft.module, "load_weights", found)
        return self.watch

    def follow(self, settings: ServiceSettings, named: str | None, newest: int | None) -> dict[str, Any]:
        """Begin to number the policy's versions, and to send what is sampled; `newest`: None for a new run.

        Without sampling, the weights are numbered only if vLLM names them: the trainer's hook has numbers of its own.
        """
        watch = self._watched()
        if settings.sample_fraction > 0:
            self._begin(settings, newest, named, later=False)
        return {**self.state(), "policy_version": watch.version}

    def _begin(self, settings: ServiceSettings, newest: int | None, named: str | None, *, later: bool) -> None:
        """Number the versions and start the tap, unless the weights are not the run's yet.

        That is so where vLLM made them up (`load_format="dummy"`), and in an engine that joins a run whose policy has
        moved on from what it started with, until somebody brings or names others. `later`: they have come since.
        """
        watch, load = self._watched(), getattr(self._worker.vllm_config, "load_config", None)
        made_up = getattr(load, "load_format", None) == "dummy"
        waits = not watch.updated and bool(made_up or newest)
        if not self._ranks.all_agree(ok=not waits):
            if not later:
                why = "made up" if made_up else f"not version {newest}, which the run has come to"
                log.warning("draftalign: the policy's weights are %s; features wait for others, or a number", why)
            self._waiting = (settings, newest)
            return
        self._waiting = None
        watch.number(named, newest + later if newest else 0)
        if self.draft is not None and self.tap is None:
            try:
                with self._ranks.together():
                    layers = self.draft.captured_layers()
                self.tap = VllmTap(self._worker, settings, layers, watch, self._ranks, joined=newest is not None)
            except Exception as error:  # noqa: BLE001 - the engine must go on without its tap
                log.error("draftalign: no features are captured: %s", error)

    def end(self) -> None:
        """The engine shuts down."""
        if self.tap is not None:
            self.tap.close()

    def _is_updated(self) -> bool:
        """Whether a trainer is between vLLM's `start_weight_update` and `finish_weight_update`."""
        return bool(getattr(self._worker, "_weight_update_active", False))

    def _mend(self, watch: PolicyWatch) -> None:
        """Restore the drafter if it is lost. What somebody else has loaded into it stays, and is not called ours."""
        lost, watch.lost = watch.lost, False
        now = None if self.draft is None else self.draft.fingerprint()
        if self.draft is None or (now == self._marks and not (lost and self._broken)):
            return  # as it was; broken weights are not tried again until they are lost again
        if lost or self.draft.is_wiped():
            self._restore()
        elif self._served.version is None:  # the policy's own module, say, which the trainer refits
            self._marks, self._broken = now, None
        else:
            if self._broken is None:
                log.warning("draftalign: somebody has loaded other weights over %s", self._served.version)
            self._marks = now
            self._broken = f"other weights than those of {self._served.version} were loaded; push a drafter again"

    def _restore(self) -> None:
        """Load the served drafter again from host memory: a level-2 sleep discards it, and vLLM does not bring it back.

        The drafter that vLLM started with is read from its files, once.
        """
        assert self.draft is not None  # noqa: S101 - the caller has checked
        began = time.perf_counter()
        try:
            self.draft.check()
            tensors = self._served.tensors or self._initial or self.draft.read_initial()
            if tensors is None:
                raise RuntimeError("its files could not be read")  # noqa: TRY301 - one way out for both
            if self._served.version is None:
                self._initial = tensors  # the next loss costs no disk in the middle of a step
            self.draft.load(tensors)
        except Exception as error:  # noqa: BLE001 - the policy verifies every draft; its text is right in any case
            # The state says that it is not loaded, so a version is pushed.
            self._broken = f"the drafter's weights are lost and were not restored: {error!r}"
            log.warning("draftalign: %s", self._broken)
        else:
            self._broken, seconds = None, time.perf_counter() - began
            log.info("draftalign: restored drafter %s in %.4f s", self._served.version or "of the start", seconds)
        self._marks = self.draft.fingerprint()

    # --- staging
    def _read(self, staged: Staged) -> None:
        try:
            self._check_method()
            if self.draft is not None:  # other pipeline ranks have no drafter
                sizes, d2t = self.draft.check(), self.draft.offsets()
                directory, expected = Path(staged.path), staged.expected
                check_config(directory, sizes, "vllm", expected.get(CONFIG_FILE))
                model, limit = directory / MODEL_FILE, max_model_bytes(sizes)
                body, staged.sha256 = read_file(model, limit, expected.get(MODEL_FILE))
                staged.tensors = read_candidate(body, sizes, d2t, self.draft.dtype(), float32_weights(sizes))
                if self._initial is None and self._served.version is None:
                    self._initial = self.draft.read_initial()
        except DrafterRefusedError as error:
            staged.refused = str(error)
        except OtherBytesError as error:
            staged.other_bytes = str(error)
        except Exception as error:  # noqa: BLE001 - `staged` tells the caller
            staged.failed = f"{type(error).__name__}: {error}"
        finally:
            staged.done.set()

    def _check_method(self) -> None:
        """Refuse servers that draft by n-grams or not at all, and MTP modules whose weights are quantised."""
        speculative = self._worker.vllm_config.speculative_config
        method = getattr(speculative, "method", None)
        if method not in ("eagle3", "mtp"):
            raise DrafterRefusedError(
                f"this server speculates with {method or 'nothing'}; a drafter can be swapped only where the "
                'server was started with method "eagle3" or "mtp"'
            )
        if method != "mtp":
            return
        if (quantised := speculative.draft_model_config.quantization) is not None:
            raise DrafterRefusedError(f"this server's MTP module is quantised ({quantised}); serve it unquantised")
        if getattr(self._worker.vllm_config.parallel_config, "enable_eplb", False):
            raise DrafterRefusedError("this server moves the module's experts between GPUs (EPLB); turn it off")

    # --- the swap itself
    def _replace(self, wanted: Served) -> None:
        """Load `wanted`; if that fails, load the drafter before it again."""
        if self.draft is None:
            self._served = wanted
            self._swaps += 1
            return
        began = time.perf_counter()
        before = self._served
        try:
            with self._ranks.together():
                self.draft.load(wanted.tensors or {})
        except Exception as error:
            self._put_back(before, error)
            raise
        self._served, self._broken, self._initial = wanted, None, None
        self._swaps += 1
        self._marks = self.draft.fingerprint()
        self._stall_seconds = time.perf_counter() - began

    def _put_back(self, before: Served, error: Exception) -> None:
        """Restore after a failed load. The policy's output is right in any case: it verifies every draft."""
        assert self.draft is not None  # noqa: S101 - something was just loaded into it
        log.exception("draftalign: loading failed; putting %s back", before.version or "the initial drafter")
        tensors = before.tensors or self._initial
        try:
            if tensors is None:
                raise RuntimeError("no copy of it was kept")  # noqa: TRY301 - one way out for both
            self.draft.load(tensors)
            self._broken = None
        except Exception as second:  # noqa: BLE001 - reported in the state; the engine must go on
            self._broken = f"loading failed ({error}), putting back failed ({second}); push a drafter again"
            self._served = Served(None, None, None)
        self._marks = self.draft.fingerprint()

    # --- are its weights intact?
    def _intact(self) -> bool:
        """False when the weights have changed since they were loaded: after a sleep, a refit or a weight sync."""
        if self.draft is None:
            return True
        if self._broken is not None:
            return False
        asleep = self.watch is not None and self.watch.asleep  # then they cannot be read, and nothing drafts
        return self._marks is not None and (asleep or self._marks == self.draft.fingerprint())


# --- RPC methods, set on vLLM's WorkerBase by the general plugin


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose failure is an answer too: {"error", "refused"}, an exception by `swapper.answered`.

    vLLM raises at the first rank that failed and leaves the answers of the ranks after it unread (0.32). Every later
    call, the engine's own steps too, would then read the answer to the call before it.
    """

    @functools.wraps(method)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - `answered` raises it once all ranks have answered
            refused = isinstance(error, DrafterRefusedError)
            return {"error": str(error) if refused else f"{type(error).__name__}: {error}", "refused": refused}

    return answering


def _of(worker: Any) -> DrafterSwap:
    swap = getattr(worker, "_draftalign_swap", None)
    if swap is None:
        swap = worker._draftalign_swap = DrafterSwap(worker)
    return swap


@_answering
def draftalign_stage(self: Any, path: str, version: str, expected: Mapping[str, str] | None = None) -> None:
    """RPC: begin to read the drafter in `path`; `expected`: SHA-256 by file name, compared before all."""
    _of(self).stage(path, version, expected)


@_answering
def draftalign_staged(self: Any) -> dict[str, Any]:
    """RPC: the progress of `draftalign_stage`."""
    return _of(self).staged()


@_answering
def draftalign_apply(self: Any, version: str, sha256: str) -> dict[str, Any]:
    """RPC: the swap, between two steps."""
    return _of(self).apply(version, sha256)


@_answering
def draftalign_state(self: Any) -> dict[str, Any]:
    """RPC: the state of the drafter."""
    return _of(self).state()


@_answering
def draftalign_settle(self: Any, named: str | None) -> dict[str, Any]:
    """RPC: weights may have changed; see `DrafterSwap.settle`."""
    return _of(self).settle(named)


@_answering
def draftalign_follow(self: Any, settings: dict[str, Any], named: str | None, newest: int | None) -> dict[str, Any]:
    """RPC: the service was reached; see `DrafterSwap.follow`."""
    return _of(self).follow(ServiceSettings(**settings), named, newest)


@_answering
def draftalign_end(self: Any) -> None:
    """RPC: the engine shuts down; see `DrafterSwap.end`."""
    _of(self).end()


RPC_METHODS = (
    *(draftalign_stage, draftalign_staged, draftalign_apply, draftalign_state),
    *(draftalign_settle, draftalign_follow, draftalign_end),
)
