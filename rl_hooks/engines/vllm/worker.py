"""The part of the vLLM plugin inside each worker: stage a drafter beside the engine, then swap it in one call.

A swap is two RPCs. `draftalign_stage` starts a thread that reads and checks the file while the engine goes on.
`draftalign_apply` runs between two steps, and only it stalls the engine. It is all or nothing: if it fails, the drafter
that was served before is loaded again. Both are called on every worker, so a rank that cannot read its copy stops the
swap on all of them.

Uses only what V1 and V2 model runners both have (`get_model`, `draft_model`).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from rl_hooks.engines.candidate import (
    DigestMismatchError,
    DrafterRefusedError,
    check_config,
    read_candidate,
    read_file,
    vocabulary_digest,
)
from rl_hooks.engines.policy_watch import PolicyWatch, before_call
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.vllm.draft import RunningDraft, draft_model
from rl_hooks.engines.vllm.modules import float32_weights
from rl_hooks.engines.vllm.tap import VllmTap
from rl_hooks.engines.vllm.weights import DrafterWeights, LoadedDrafter
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE, fingerprint, most_bytes
from rl_hooks.format.mtp import MtpConfig
from rl_hooks.format.release import check_receipt

log = logging.getLogger("vllm.draftalign")


@dataclass(slots=True)
class Staged:
    """A candidate that is being read: the staging thread fills it in."""

    path: str
    version: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sha256: str = ""
    #: Why it cannot be loaded.
    fault: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)
    #: SHA-256 by file name, where the caller knows them.
    expected: Mapping[str, str] = field(default_factory=dict)


class DrafterSwap:
    """The drafter of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._ranks = worker, LayerRanks(_layer_group(worker))
        self._staged: Staged | None = None
        self._reading = threading.Lock()
        self._ended = False
        #: What `follow` was told, while the weights are not yet the run's.
        self._waiting: tuple[ServiceSettings, int | None] | None = None
        self.tap: VllmTap | None = None
        self.watch: PolicyWatch | None = None
        module = draft_model(worker.model_runner)
        self.draft = None if module is None else RunningDraft(worker, module)
        if self.draft is not None and (early := self.draft.ends_early()) is not None:
            log.warning("draftalign: %s", early)
        self.weights = DrafterWeights(self.draft, self._ranks)
        # Of several ranks each is a process, which a signal to all of them ends before the engine core asks for it.
        before_call(worker, "shutdown", self.end)

    # --- called by RPC
    def stage(self, path: str, version: str, expected: Mapping[str, str] | None = None) -> None:
        """Begin to read and check; `staged` tells when it is done. A later call replaces an earlier one."""
        staged = Staged(path, version, expected=expected or {})
        self._staged = staged
        threading.Thread(target=self._read, args=(staged,), name="draftalign-stage", daemon=True).start()

    def staged(self) -> dict[str, Any]:
        """Whether the last `stage` is done, and what it read. Raises what it found wrong."""
        staged = self._staged
        if staged is None:
            raise RuntimeError("nothing is staged")
        done = staged.done.is_set()
        if staged.fault is not None:
            raise staged.fault
        return {"version": staged.version, "done": done, "sha256": staged.sha256}

    def apply(self, version: str, sha256: str) -> dict[str, Any]:
        """Swap in the staged drafter, also if it is served already: its weights may have been lost unnoticed.

        All tensor-parallel ranks swap, or none: they agree before they load, and again when they have loaded.
        """
        with self._ranks.together():
            staged = self._ready(version, sha256)
        previous, self._staged = self.weights.served, None
        self.weights.replace(LoadedDrafter(version, sha256, staged.tensors))
        old = previous.version or "that of the start"
        log.info("draftalign: drafter %s in place of %s in %.4f s", version, old, self.weights.stall_seconds)
        return {"previous": previous.version, "version": version}

    def _ready(self, version: str, sha256: str) -> Staged:
        """What is staged here, if it can be loaded now."""
        staged = self._staged
        if staged is None or staged.version != version:
            raise RuntimeError(f"{version} is not staged here; another swap came between. Ask again")
        if not staged.done.is_set():  # another API process has staged it again; the engine must not wait for a disk
            raise RuntimeError(f"{version} is still being read here; ask again")
        if staged.fault is not None:
            raise staged.fault
        if self._is_updated():
            raise RuntimeError("a trainer is updating this worker's weights; ask again")
        if self.watch is not None and self.watch.asleep:
            raise RuntimeError("this worker sleeps, and its weights are not in memory; ask again when it is awake")
        if self.draft is not None and staged.sha256 != sha256:
            raise RuntimeError(f"this worker read {staged.sha256} for {version}, another one read {sha256}")
        return staged

    def state(self, asleep: bool = False) -> dict[str, Any]:
        """The loaded drafter, and whether its weights are still intact. `asleep`: they must not be read."""
        config = self._worker.vllm_config.speculative_config
        asleep = asleep or (self.watch is not None and self.watch.asleep)
        document: dict[str, Any] = {
            "version": self.weights.served.version,
            "loaded": self.weights.are_intact(asleep=asleep),
            "swaps": self.weights.swaps,
            "verifies": True,
            "depth": getattr(config, "num_speculative_tokens", 0) or 0,
            "drafting": str(getattr(config, "draft_sample_method", None) or "greedy"),
            "method": getattr(config, "method", None),
            "sha256": self.weights.served.sha256,
            "last_stall_seconds": self.weights.stall_seconds,
            "problem": self.weights.broken,
            "tap": None if self.tap is None or self.tap.run.refused else self.tap.run.counts(),
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
                document["problem"] = document["problem"] or self.draft.ends_early()
        return document

    # --- where the engine itself follows the service
    def settle(self, named: str | None) -> dict[str, Any]:
        """Restore a lost drafter, and bring the policy's version up to date. Called when weights may have changed.

        `named`: vLLM's weight version. The weights must be readable. Returns the state, with `policy_version`.
        """
        watch = self._watched()
        if not self._is_updated() and not watch.asleep:
            with self._ranks.together():
                lost, watch.lost = watch.lost, False
                self.weights.mend(lost=lost)
            tainted = watch.settle(named)
            if self._waiting is not None:
                self._begin(*self._waiting, named)
            elif self.tap is not None:
                self.tap.settled(tainted=tainted)
        return {**self.state(), "policy_version": watch.version}

    def _watched(self) -> PolicyWatch:
        if self.watch is None:
            watch = self.watch = PolicyWatch(self._worker, lambda same: self._ranks.all_agree(ok=same))
            if self.draft is not None:  # a trainer may load the lost drafter itself, after a sleep

                def restored(*_: Any, **__: Any) -> None:
                    watch.lost = False

                before_call(self.draft.module, "load_weights", restored)
        return self.watch

    def follow(self, settings: dict[str, Any], named: str | None, newest: int | None) -> dict[str, Any]:
        """Begin to number the policy's versions, and to send what is sampled.

        `settings`: the fields of `ServiceSettings`. `newest`: the run's policy version, None for a new run. Without
        sampling, the weights are numbered only if vLLM names them: the trainer's hook has numbers of its own.
        """
        watch, service = self._watched(), ServiceSettings(**settings)
        if service.sample_fraction > 0:
            self._begin(service, newest, named)
        return {**self.state(), "policy_version": watch.version}

    def _begin(self, settings: ServiceSettings, newest: int | None, named: str | None) -> None:
        """Number the versions and start the tap, unless the weights are not the run's yet.

        They are not where vLLM made them up (`load_format="dummy"`), and in an engine that joins a run whose policy has
        moved on: until weights are loaded or named. Weights that come to such a run get a number above the newest that
        the service knows, because they may be others.
        """
        watch, load = self._watched(), getattr(self._worker.vllm_config, "load_config", None)
        made_up = getattr(load, "load_format", None) == "dummy"
        waits = not watch.updated and bool(made_up or newest)
        if not self._ranks.all_agree(ok=not waits):
            if self._waiting is None:
                why = f"the run is at policy version {newest}, and this engine has had no new weights since its start"
                log.warning(
                    "draftalign: %s: no features are sent until weights are loaded, or vLLM's weight version is set to "
                    "their policy version (`update_weight_version`)",
                    "vLLM made the policy's weights up" if made_up else why,
                )
            self._waiting = (settings, newest)
            return
        self._waiting = None
        watch.number(named, newest + 1 if newest else 0)
        if self.draft is not None and self.tap is None:
            try:
                with self._ranks.together():
                    layers = self.draft.captured_layers()
                self.tap = VllmTap(self._worker, settings, layers, watch, self._ranks, joined=newest is not None)
            except Exception as error:  # noqa: BLE001 - the engine must go on without its tap
                log.error("draftalign: no features are captured: %s", error)

    def rest(self, ended: Sequence[str]) -> None:
        """No request is under way any more. `ended`: those that no step has told of."""
        if self.tap is not None and self.watch is not None and not self.watch.asleep:
            self.tap.rest(ended)

    def end(self) -> None:
        """The engine shuts down, or this worker alone. A second call does nothing."""
        if self.tap is not None and not self._ended:
            self._ended = True
            self.tap.close()

    def _is_updated(self) -> bool:
        """Whether a trainer is between vLLM's `start_weight_update` and `finish_weight_update`."""
        return bool(getattr(self._worker, "_weight_update_active", False))

    # --- staging
    def _read(self, staged: Staged) -> None:
        # A swap that failed at another rank may be asked for again while this one still reads: only one file is held.
        with self._reading:
            if self._staged is staged:
                self._read_now(staged)

    def _read_now(self, staged: Staged) -> None:
        try:
            self._check_method()
            if self.draft is not None:  # other pipeline ranks have no drafter
                sizes, d2t = self.draft.check(), self.draft.offsets()
                directory, expected = Path(staged.path), staged.expected
                check_config(directory, sizes, "vllm", expected.get(CONFIG_FILE))
                model, limit = directory / MODEL_FILE, most_bytes(sizes)
                body, staged.sha256 = read_file(model, limit, expected.get(MODEL_FILE))
                staged.tensors = read_candidate(body, sizes, d2t, self.draft.dtype(), float32_weights(sizes))
                self.weights.read_initial()
        except (DrafterRefusedError, DigestMismatchError) as error:
            staged.fault = type(error)(str(error))  # without the frames, which hold the file's bytes
        except Exception as error:  # noqa: BLE001 - `staged` tells the caller
            staged.fault = RuntimeError(f"{type(error).__name__}: {error}")
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


def _layer_group(worker: Any) -> Any:
    """The ranks over which vLLM has split this worker's layers; None where it has not."""
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


# --- RPC methods, set on vLLM's WorkerBase by the general plugin
_NEVER_SWAPPED: Final[Mapping[str, Any]] = {"version": None, "loaded": False, "swaps": 0, "problem": None}


def _of(worker: Any) -> DrafterSwap:
    swap = getattr(worker, "_draftalign_swap", None)
    if swap is None:
        swap = worker._draftalign_swap = DrafterSwap(worker)
    return swap


def _rpc(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `DrafterSwap` as one of vLLM's worker, `draftalign_<name>`.

    Its failure is an answer too: {"error", "status"}, an exception by `swapper.answered`. vLLM raises at the first
    rank that failed and leaves the answers of the ranks after it unread (0.32). Every later call, the engine's own
    steps too, would then read the answer to the call before it.
    """

    @functools.wraps(method)
    def answering(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if method is DrafterSwap.state and args == (True,) and not hasattr(worker, "_draftalign_swap"):
            return dict(_NEVER_SWAPPED)  # it sleeps, and making a `DrafterSwap` reads weights, which may be unmapped
        try:
            return method(_of(worker), *args, **kwargs)
        except DrafterRefusedError as error:
            return {"error": str(error), "status": 409}
        except DigestMismatchError as error:
            return {"error": str(error), "status": 412}
        except Exception as error:  # noqa: BLE001 - `answered` raises it once all ranks have answered
            return {"error": f"{method.__name__}: {type(error).__name__}: {error}", "status": 503}

    answering.__name__ = f"draftalign_{method.__name__}"
    return answering


RPC_METHODS = tuple(
    _rpc(method)
    for method in (
        *(DrafterSwap.stage, DrafterSwap.staged, DrafterSwap.apply, DrafterSwap.state),
        *(DrafterSwap.settle, DrafterSwap.follow, DrafterSwap.rest, DrafterSwap.end),
    )
)


def check_first_load(base: Any) -> None:
    """Let no worker of this class (vLLM's `WorkerBase`) start with a damaged drafter of an agent's cache.

    vLLM's own code loads the first drafter, after this. Raises DigestError in the worker, which ends the engine.
    """
    if hasattr(base, "_draftalign_checks"):
        return
    base._draftalign_checks = True
    original = base.__init__

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        drafter = getattr(self.vllm_config.speculative_config, "draft_model_config", None)
        if isinstance(path := getattr(drafter, "model", None), str):
            check_receipt(Path(path))

    base.__init__ = checked
