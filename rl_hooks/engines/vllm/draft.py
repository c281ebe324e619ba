"""The drafter inside a vLLM worker: what it is built of, whether it can be swapped, and loading weights.

Loads through vLLM's own layerwise reload: kernels repack weights (CPU, quantised layers) and CUDA graphs hold
addresses, so a plain copy is not enough.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rl_hooks.engines.candidate import DrafterRefusedError, drafter_files, read_candidate, read_file, running_sizes
from rl_hooks.engines.vllm.modules import (
    module_elements,
    read_own_module,
    running_module,
    shared_modules,
    unread_weights,
)
from rl_hooks.format.drafter import MODEL_FILE, Sizes, most_bytes
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.mtp import MtpConfig

log = logging.getLogger("vllm.draftalign")

_SAMPLED_ELEMENTS = 1024


def draft_model(runner: Any) -> nn.Module | None:
    """The module of a V1 or V2 model runner that proposes tokens; None where none does."""
    if hasattr(runner, "get_draft_model"):
        found: nn.Module | None = runner.get_draft_model()
        return found
    # Before vLLM 0.26: V1 runners keep it in `drafter`, V2 runners in `speculator`, perhaps inside a wrapper.
    model = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    unwrap = getattr(model, "unwrap", None)
    model = model if unwrap is None else unwrap()
    return model if isinstance(model, nn.Module) else None


class RunningDraft:
    """The module that proposes tokens in one worker. `shared`: its modules that are the policy's own, by name."""

    def __init__(self, worker: Any, module: nn.Module) -> None:
        self._worker = worker
        self.module = module
        self.shared = _shared_modules(self.module, worker.model_runner.get_model())
        offsets = getattr(self.module, "draft_id_to_target_id", None)
        # A copy: vLLM keeps it as a parameter, which a level-2 sleep discards, and no weight update brings it back.
        self._offsets = None if offsets is None else offsets.detach().to("cpu", torch.int64, copy=True)

    # --- what the engine runs
    def captured_layers(self) -> tuple[int, ...]:
        """The layers whose input the target passes to the drafter."""
        for module in self._worker.model_runner.get_model().modules():
            layers = getattr(module, "aux_hidden_state_layers", None)
            if isinstance(layers, list | tuple) and layers:
                return tuple(int(layer) for layer in layers)
        raise DrafterRefusedError("the target hands no layers to a drafter: this server does not run EAGLE-3")

    def sizes(self) -> Sizes:
        """The running drafter's sizes; of an EAGLE-3 drafter with the layers that the target really captures."""
        speculative = self._worker.vllm_config.speculative_config
        attributes = vars(speculative.draft_model_config.hf_config)
        config = {name: value for name, value in attributes.items() if not name.startswith("_")}
        return running_module(config) if speculative.method == "mtp" else running_sizes(config, self.captured_layers())

    def offsets(self) -> Tensor:
        """d2t, int64[D] on the CPU, as the engine loaded it; zeros where it drafts over the whole vocabulary."""
        return torch.zeros(self.sizes().vocab_size, dtype=torch.int64) if self._offsets is None else self._offsets

    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype = self._worker.vllm_config.speculative_config.draft_model_config.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the draft model's dtype is {dtype!r}; this vLLM is unknown to the plugin")
        return dtype

    def ends_early(self) -> str | None:
        """A warning if long requests stop drafting for the whole batch; None if they do not.

        vLLM's V1 model runner drafts nothing in a step in which a request is longer than the drafter's config allows.
        V2 has no such limit.
        """
        runner = self._worker.model_runner
        limit, served = (getattr(runner, name, None) for name in ("effective_drafter_max_model_len", "max_model_len"))
        if limit is None or served is None or limit >= served:
            return None
        return (
            f"this vLLM drafts for no request while one of the batch is longer than {limit} tokens, and it serves up "
            f"to {served}: write max_position_embeddings {served} into the config.json of the drafter that it starts "
            "with (it is a limit only, no weight depends on it), and restart it"
        )

    def check(self) -> Sizes:
        """The sizes. Refuses a drafter that shares a head with the policy, or has other modules than its sizes say."""
        sizes = self.sizes()
        others = sorted(set(self.shared) - shared_modules(sizes))
        if others:
            raise DrafterRefusedError(
                f"this server's drafter shares {', '.join(others)} with the policy, which a swap would overwrite. "
                "Start the server with a drafter that brings its own lm_head, not equal to the policy's"
            )
        if self._worker.vllm_config.parallel_config.tensor_parallel_size > 1:
            return sizes  # shards and padding differ by rank; names and shapes were checked against the configuration
        expected = module_elements(sizes)
        built = self._built_elements(expected)
        if odd := sorted(built.keys() ^ expected.keys()):
            raise DrafterRefusedError(f"this server's drafter is built of other modules than expected: {odd}")
        for name, count in expected.items():
            # The head's rows are padded to a multiple of 64.
            if built[name] != count and not (name == "lm_head" and built[name] > count):
                raise DrafterRefusedError(f"the engine holds {built[name]} elements in {name}, expected {count}")
        return sizes

    def read_initial(self) -> dict[str, Tensor] | None:
        """Read the drafter that vLLM started with, to load it again if the first swap fails."""
        directory = Path(self._worker.vllm_config.speculative_config.draft_model_config.model)
        sizes, d2t = self.sizes(), self.offsets()
        try:
            if isinstance(sizes, MtpConfig):
                return read_own_module(directory, sizes, self.dtype())
            directory = started_with(self._worker)
            body, _ = read_file(directory / MODEL_FILE, most_bytes(sizes), None)
            return read_candidate(body, sizes, d2t, self.dtype(), published=True)
        except (OSError, ValueError, SafetensorError, DrafterError, DrafterRefusedError) as error:
            log.info("draftalign: %s cannot be kept for a failed swap: %s", directory, error)
            return None

    def _built_elements(self, groups: Iterable[str]) -> dict[str, int]:
        """Parameter elements by module as vLLM recorded them when it loaded the drafter, without shared modules.

        Modules inside one of `groups` count for that group.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        counts: dict[str, int] = {}
        for name, module in self.module.named_modules():
            if not name or any(name == s or name.startswith(s + ".") for s in self.shared):
                continue
            parameters, _ = get_layerwise_info(module).restore_metadata
            if parameters:
                group = next((g for g in groups if name.startswith(g + ".")), name)
                counts[group] = counts.get(group, 0) + sum(p.numel() for p in parameters.values())
        return counts

    # --- its weights
    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these weights, named as in drafters' files. Shared modules are taken off the drafter during the load.

        An exception leaves some weights old and some new: load again.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        draft, config = self.module, self._worker.vllm_config
        unread = unread_weights(self.sizes())
        weights = [*tensors.items(), *((name, torch.ones(shape)) for name, shape in unread.items())]
        if self._offsets is not None:
            # The reload takes every parameter off the model, and a sleep may have lost this one.
            weights.append(("d2t", self._offsets))
        _synchronize(self._worker)
        with set_current_vllm_config(config), self._detached(), _repacked_experts(draft, self._worker):
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(iter(weights))  # type: ignore[operator]
                _check_complete(draft)
            finally:
                finalize_layerwise_reload(draft, config.speculative_config.draft_model_config)
        _synchronize(self._worker)

    @contextmanager
    def _detached(self) -> Iterator[None]:
        """Take shared modules off the drafter, and put them back in any case."""
        homes = []
        for name, module in self.shared.items():
            home = self.module.get_submodule(name.rpartition(".")[0])
            homes.append((home, name.rpartition(".")[2], module))
            delattr(*homes[-1][:2])
        try:
            yield
        finally:
            for home, attribute, module in homes:
                setattr(home, attribute, module)

    def fingerprint(self) -> str:
        """Digest of up to 1024 elements of each of the drafter's own parameters (on a CPU some are packed away)."""
        digest = hashlib.sha256()
        for name, sample in self._samples():
            digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def is_wiped(self) -> bool:
        """Whether all parameters are zero or not finite. No client loads such weights: their memory was lost."""
        samples = [sample.float() for _, sample in self._samples() if sample.is_floating_point()]
        return bool(samples) and not any((sample.isfinite() & (sample != 0)).any() for sample in samples)

    def _samples(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if any(name.startswith(shared + ".") for shared in self.shared) or not parameter.numel():
                continue
            flat = parameter.detach().reshape(-1)
            yield name, flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)][:_SAMPLED_ELEMENTS].cpu().contiguous()


def started_with(worker: Any) -> Path:
    """The directory of the drafter that this vLLM was started with. Raises OSError as `drafter_files`."""
    config = worker.vllm_config.speculative_config.draft_model_config
    return drafter_files(config.model, config.revision)


def _shared_modules(draft: nn.Module, target: nn.Module) -> dict[str, nn.Module]:
    """The drafter's modules that are the target's own, by name in the drafter.

    By identity of the module or of a parameter, not by address: packed weights on a CPU have none.
    """
    modules = {id(module) for module in target.modules()}
    parameters = {id(parameter) for parameter in target.parameters()}
    shared: dict[str, nn.Module] = {}
    for name, module in draft.named_modules(remove_duplicate=False):
        inside = any(name.startswith(outer + ".") for outer in shared)
        own = module.parameters(recurse=False)
        targets = id(module) in modules or any(id(parameter) in parameters for parameter in own)
        if name and not inside and targets and any(True for _ in module.parameters()):
            shared[name] = module
    return shared


def _check_complete(draft: nn.Module) -> None:
    """Raise if vLLM got no weights for a layer: it would keep the old ones and only log that."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer as is_deferred
    except ImportError:  # vLLM 0.27 and older
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        def is_deferred(layer: nn.Module) -> bool:
            return isinstance(layer, Attention | MLAAttention)

    for name, module in draft.named_modules():
        info = get_layerwise_info(module)
        if is_deferred(module) or not info.can_load():
            continue
        if any(True for _ in module.parameters(recurse=False)) and info.load_numel <= 0:
            raise RuntimeError(f"{name or 'the drafter'} got no weights")


@contextmanager
def _repacked_experts(draft: nn.Module, worker: Any) -> Iterator[None]:
    """On a CPU, make vLLM pack loaded experts as it did the first time.

    vLLM 0.32 and 0.33 pack them only while a layer has no kernel yet. Loaded a second time they stay as in the file but
    are read as if packed, which lowers α with no error. On GPUs a second load is right, and kernels must stay those
    that the CUDA graphs captured.
    """
    methods = {id(m): m for m in (getattr(module, "quant_method", None) for module in draft.modules()) if m is not None}
    kernels = [(m, m.moe_kernel) for m in methods.values() if getattr(m, "moe_kernel", None) is not None]
    if torch.device(getattr(worker, "device", None) or "cpu").type != "cpu":
        kernels = []
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # these experts were not loaded
                method.moe_kernel = kernel


def _synchronize(worker: Any) -> None:
    """Wait for the device: with asynchronous scheduling a step may still be running there."""
    device = getattr(worker, "device", None)
    if device is not None and torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
