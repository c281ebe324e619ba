"""SGLang's side of a swap: a custom weight loader that reads a drafter from disk, and checks it before it copies.

    python -m sglang.launch_server ... --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER \
        --custom-weight-loader rl_hooks.engines.sglang.loader.load_drafter          (with DRAFTALIGN_DRAFTER_DIR set)

SGLang calls `load_drafter(model, named_tensors)` in every rank's scheduler process, between two steps, and passes what
the agent sent: one byte tensor that holds a JSON request. It ignores what the loader returns, and an exception would
end the scheduler and with it the server. So nothing is raised here: what happened is written to
`<outcome>/<process id>.json`, where the agent reads it. Before 0.5.21 SGLang calls it for its policy too, which is left
as it is.

All or nothing: the drafter's parameters are copied to the host first, and put back when loading fails half-way. They
are changed in place, so CUDA graphs stay valid. Written against SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from rl_hooks.durable import at_home, replace_file
from rl_hooks.engines.candidate import (
    DigestMismatchError,
    DrafterRefusedError,
    check_config,
    read_candidate,
    read_file,
    running_sizes,
)
from rl_hooks.engines.sglang.memory import MEMORY, REFUSAL
from rl_hooks.engines.sglang.rounds import COUNTER
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE, most_bytes
from rl_hooks.format.eagle3 import DrafterConfig

log = logging.getLogger("draftalign.sglang")

#: Name of the one tensor that carries the request.
REQUEST: Final = "draftalign.request"
_SAMPLED_ELEMENTS: Final = 1024


class SwapOwner:
    """Whether this process's server swaps its drafter by itself: then nobody else may."""

    def __init__(self) -> None:
        #: What it says to an agent that would swap; None: an agent may.
        self.refusal: str | None = None


#: This process's.
OWNER: Final = SwapOwner()


def load_drafter(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the drafter that the request names into SGLang's draft model. Never raises."""
    if not hasattr(getattr(model, "model", None), "fc"):  # every EAGLE-3 drafter has it, and no policy
        return
    told: dict[str, Any] = {}

    def load() -> dict[str, Any]:
        request = parse_request(named_tensors)
        home = _home()
        told["version"] = request["version"]
        told["path"] = path = _inside(home, request["outcome"]) / f"{os.getpid()}.json"
        # First: what is loaded and cannot be told would be counted as the drafter before it. The agent deletes the
        # directory when it waits no longer, as for a server that was paused.
        _write(path, {"ok": False, "failed": "the loader did not come to its end", "version": request["version"]})
        if OWNER.refusal is not None:
            raise DrafterRefusedError(OWNER.refusal)
        if MEMORY.released:
            raise RuntimeError(REFUSAL)
        weights, sha256 = read_drafter(model, _inside(home, request["path"]), request["sha256"])
        wait_for_steps(model)
        place(model, weights)
        wait_for_steps(model)
        COUNTER.drafter_changed()
        return {"sha256": sha256}

    outcome = outcome_of(load)
    if (path := told.pop("path", None)) is not None:
        try:
            _write(path, outcome | told)
        except OSError:
            log.exception("draftalign: the agent cannot be told what became of its drafter")


def outcome_of(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What became of something that one rank does: `ok`, with what it returns, or why it is refused or has failed."""
    outcome: dict[str, Any] = {"ok": False, "refused": None, "other_bytes": None, "failed": None}
    try:
        return outcome | {"ok": True} | act()
    except DrafterRefusedError as error:
        outcome["refused"] = str(error)
    except DigestMismatchError as error:
        outcome["other_bytes"] = str(error)
    except Exception as error:  # an exception would end the scheduler and abort every request
        log.exception("draftalign: the drafter was not loaded")
        outcome["failed"] = f"{type(error).__name__}: {error}"
    return outcome


def parse_request(named_tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """The JSON request inside the tensors; ValueError if they hold anything else, such as a trainer's weights."""
    if len(named_tensors) != 1 or named_tensors[0][0] != REQUEST:
        names = [name for name, _ in named_tensors][:3]
        raise ValueError(f"expected one tensor called {REQUEST}, got {names}; this loader takes requests, not weights")
    document = json.loads(bytes(named_tensors[0][1].to("cpu", torch.uint8).tolist()))
    if not isinstance(document, dict) or not all(
        isinstance(document.get(k), str) for k in ("path", "version", "outcome")
    ):
        raise ValueError("the request must name path, version and outcome")
    if not isinstance(document.get("sha256"), dict):
        raise ValueError("sha256 must give digests by file name")  # noqa: TRY004 - of what the request says
    return document


def _home() -> Path:
    home = os.environ.get("DRAFTALIGN_DRAFTER_DIR")
    if not home:
        raise ValueError("set DRAFTALIGN_DRAFTER_DIR to the directory that drafters come from, and restart the server")
    return at_home(home).resolve()


def _inside(home: Path, path: str) -> Path:
    resolved = (home / path).resolve()
    if not resolved.is_relative_to(home) or resolved == home:
        raise ValueError(f"{path} is not under DRAFTALIGN_DRAFTER_DIR")
    return resolved


def read_drafter(model: nn.Module, directory: Path, expected: Mapping[str, str]) -> tuple[dict[str, Tensor], str]:
    """Read and check a drafter for SGLang's draft model: its weights on the host, and the SHA-256 of its model file.

    `expected`: SHA-256 by file name. Touches nothing of the model's, and may run beside its steps. Raises
    DrafterRefusedError, DigestMismatchError or OSError.
    """
    running = running_drafter(model)
    d2t = running_d2t(model, running)
    check_config(directory, running, "sglang", expected.get(CONFIG_FILE))
    body, sha256 = read_file(directory / MODEL_FILE, most_bytes(running), expected.get(MODEL_FILE))
    return read_candidate(body, running, d2t, _dtype(model)), sha256


def place(
    model: nn.Module, weights: Mapping[str, Tensor], load: Callable[[list[tuple[str, Tensor]]], object] | None = None
) -> Callable[[], None]:
    """Load checked weights, or raise with the older ones back. Returns what puts the older ones back later.

    `load`: what loads them; by default the model itself.
    """
    own = _own_parameters(model)
    kept = {name: parameter.detach().to("cpu", copy=True) for name, parameter in own.items()}

    def put_back() -> None:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(kept[name])

    try:
        with torch.no_grad():
            (load or model.load_weights)(list(weights.items()))  # type: ignore[operator]
        _check_arrived(own, weights)
    except Exception:
        put_back()
        raise
    return put_back


def wait_for_steps(model: nn.Module) -> None:
    """Wait for the device: with overlapping schedules a step may still run, or the copies into the drafter may."""
    if next(model.parameters()).device.type != "cpu":
        torch.accelerator.synchronize()


def fingerprint(model: nn.Module) -> str:
    """Digest of up to 1024 elements of each of the drafter's own parameters."""
    digest = hashlib.sha256()
    for name, parameter in _own_parameters(model).items():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)][:_SAMPLED_ELEMENTS]
        digest.update(name.encode() + sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def running_drafter(model: nn.Module) -> DrafterConfig:
    """Sizes of SGLang's draft model, from the configuration that it was built with."""
    config = _attributes(getattr(model, "config", None))
    if getattr(model, "load_lm_head_from_target", False) or config.get("tie_word_embeddings"):
        raise DrafterRefusedError(
            "this server's drafter shares its lm_head with the policy or with the embedding, which a swap would "
            "overwrite. Start the server with a drafter that brings its own lm_head and names draft_vocab_size"
        )
    running = running_sizes(config, entered_layers(config))
    if running.norm_before_fc and getattr(model.model, "input_norm", None) is None:
        raise DrafterRefusedError(
            "this SGLang leaves out the norm before fc that this server's drafter asks for, so it drafts by another "
            "function; 0.5.17 and newer have it"
        )
    return running


def entered_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Captured layers as SGLang reads them: `eagle_config` names the layers whose *output* is taken, one less."""
    nested = config.get("eagle_config") or {}
    layers = nested.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(layers, list | tuple) or not layers or not all(type(i) is int for i in layers):
        raise DrafterRefusedError(
            "eagle_config.eagle_aux_hidden_state_layer_ids is missing, so nobody can tell which layers SGLang captures "
            "for this drafter; start the server with a drafter that names them"
        )
    return tuple(layer + 1 for layer in layers)


def running_d2t(model: nn.Module, running: DrafterConfig) -> Tensor:
    """Offsets int64[D] that SGLang has cached at its start; it never reads them again, whatever is loaded later.

    Zeros for a drafter over the whole vocabulary: its ids are the policy's own, and SGLang caches none.
    """
    hot: Any = getattr(model, "hot_token_id", None)
    if hot is None and running.draft_vocab_size == running.vocab_size:
        return torch.zeros(running.vocab_size, dtype=torch.int64)
    if hot is None:
        raise DrafterRefusedError("this server's drafter has no d2t; start the server with one that has")
    ids = hot.detach().to("cpu", torch.int64)
    return ids - torch.arange(ids.numel())  # type: ignore[no-any-return]


def _attributes(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")} if config else {}


def _own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All but the embedding, whose parameter is the policy's own."""
    return {name: p for name, p in model.named_parameters() if "embed_tokens" not in name}


def _dtype(model: nn.Module) -> torch.dtype:
    return next(iter(_own_parameters(model).values())).dtype


def _check_arrived(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Raise unless each weight that is neither stacked nor sharded holds what was sent: SGLang skips unknown names."""
    arrived = 0
    for name, weight in weights.items():
        theirs = (
            own.get("model." + name.replace("midlayer.", "layers.0.")) if name != "lm_head.weight" else own.get(name)
        )
        if theirs is None or theirs.shape != weight.shape:
            continue
        if not torch.equal(theirs.detach(), weight.to(theirs.device, theirs.dtype)):  # on the device: a swap waits
            raise RuntimeError(f"{name} did not arrive; this SGLang is unknown to the loader")
        arrived += 1
    if arrived < 4:  # fc and three norms are never stacked nor sharded
        raise RuntimeError(f"only {arrived} weights can be recognised in this draft model; it is of another family")


def _write(path: Path, document: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(document).encode(), durable=False)
