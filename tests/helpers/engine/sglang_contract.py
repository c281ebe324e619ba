"""A server that takes the one call of a swap as SGLang 0.5.23 does with our plugin, and lists all that would hurt.

Or as 0.5.16, which has no sessions. What is checked: names and types of fields, base64 and the unpickler's allow-list,
one payload per rank, no other call (a trainer's pause and session are its own), the cache flush (refused while requests
run). The weights are loaded for real: the custom loader that the server was started with is called on a module with
SGLang's parameter names and its `load_weights`.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers.engine.agent_fixtures import Peer
from safetensors.torch import load_file
from torch import Tensor, nn

from rl_hooks.engines.sglang.direct import LOADER, MARK

#: Of the unpickler's list, what can come from outside without a code path of SGLang's.
ALLOWED = {("builtins", "list"), ("builtins", "tuple"), ("torch", "ByteTensor")}
FIELDS: dict[str, dict[str, type]] = {
    "/update_weights_from_tensor": {
        "serialized_named_tensors": list,
        "load_format": str,
        "flush_cache": bool,
        "abort_all_requests": bool,
        "weight_version": str,
        "selector": str,
        "torch_empty_cache": bool,
    },
}


class Unpickler(pickle.Unpickler):
    """As SGLang's SafeUnpickler: nothing outside of the list."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"blocked: {module}.{name}")
        return super().find_class(module, name)


def _parameter(*shape: int) -> nn.Module:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.zeros(*shape))
    return holder


class DraftModel(nn.Module):
    """SGLang's `LlamaForCausalLMEagle3`: its names, stacking and `load_weights`. The embedding is the policy's."""

    def __init__(self, directory: Path, embedding: nn.Parameter) -> None:
        super().__init__()
        document = json.loads((directory / "config.json").read_text())
        self.config = SimpleNamespace(**document)
        self.load_lm_head_from_target = False
        H, inner, width = document["hidden_size"], document["intermediate_size"], document["head_dim"]
        heads, groups = document["num_attention_heads"], document["num_key_value_heads"]
        layers = len(document["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = embedding
        self.model.fc = _parameter(H, layers * document["target_hidden_size"])
        self.model.norm = _parameter(H)
        layer: Any = nn.Module()
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, _parameter(H))
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.qkv_proj = _parameter((heads + 2 * groups) * width, 2 * H)
        layer.self_attn.o_proj = _parameter(H, heads * width)
        layer.mlp.gate_up_proj = _parameter(2 * inner, H)
        layer.mlp.down_proj = _parameter(H, inner)
        self.model.layers = nn.ModuleList([layer])
        self.lm_head: Any = _parameter(document["draft_vocab_size"], H)
        sizes = {"q": heads * width, "k": groups * width, "v": groups * width, 0: inner, 1: inner}
        self._slices: dict[str | int, slice] = {}
        for group in (("q", "k", "v"), (0, 1)):
            begin = 0
            for part in group:
                self._slices[part] = slice(begin, begin + sizes[part])
                begin += sizes[part]
        self.hot_token_id: Tensor | None = None
        self.break_after: int | None = None  # fault: raise after this number of tensors, in one call or several
        self.load_weights(load_file(directory / "model.safetensors").items())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        stacked: list[tuple[str, str, str | int]] = [
            (".qkv_proj", ".q_proj", "q"),
            (".qkv_proj", ".k_proj", "k"),
            (".qkv_proj", ".v_proj", "v"),
            (".gate_up_proj", ".gate_proj", 0),
            (".gate_up_proj", ".up_proj", 1),
        ]
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if self.break_after == 0:
                self.break_after = None
                raise RuntimeError("the test broke this load half-way")
            if self.break_after is not None:
                self.break_after -= 1
            name = name.replace("midlayer", "layers.0")
            if "d2t" in name:
                self.hot_token_id = weight + torch.arange(weight.shape[0])
                continue
            if "t2d" in name:
                continue
            for whole, part, shard in stacked:
                if part in name:
                    with torch.no_grad():
                        parameters[f"model.{name.replace(part, whole)}"][self._slices[shard]] = weight
                    break
            else:
                found = parameters.get(name, parameters.get(f"model.{name}"))
                if found is not None:  # unknown names are skipped without a word
                    with torch.no_grad():
                        found.copy_(weight)

    def weights(self) -> dict[str, Tensor]:
        """A copy of everything but the embedding."""
        return {n: p.detach().clone() for n, p in self.named_parameters() if "embed_tokens" not in n}


class Policy(nn.Module):
    """What SGLang serves: as far as a loader may take it for a drafter."""

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=embedding.shape[1])
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = embedding
        self.model.norm = _parameter(embedding.shape[1])
        self.lm_head: Any = _parameter(*embedding.shape)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError(f"{[name for name, _ in weights]} would be written into the policy")


class RefusedError(Exception):
    """The call is answered with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SGLangServer(Peer):
    """`ranks` schedulers behind one HTTP server. `violations` lists what a correct client never does."""

    def __init__(self, drafter: Path, *, ranks: int = 1, sessions: bool = True) -> None:
        self.drafter, self.ranks, self.sessions = drafter, ranks, sessions
        self.plugin = True  # whether ours is installed beside it
        self.info: dict[str, Any] = {
            "version": "0.5.23" if sessions else "0.5.16",
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(drafter),
            "speculative_num_draft_tokens": 4,
            "dp_size": 1,
            "tp_size": ranks,
            "custom_weight_loader": ["rl_hooks.engines.sglang.loader.load_drafter"],
        }
        self.weight_version = "default"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.violations: list[str] = []
        self.fail: dict[str, int] = {}  # path -> how many of the next calls fail with 500
        self.starts = 0
        self.fault = False  # whether a fault has ended its counting
        self.released = False  # whether a trainer has had it release the memory of its weights
        self._start()
        super().__init__()

    def _start(self) -> None:
        self.starts += 1
        if self.sessions:
            self.info |= {"startup_time": {"scheduler_e2e": 10.0 + self.starts / 7}}
        # Nothing else of its own differs, where a seed is set.
        said = {MARK: f"life {self.starts}"} if self.plugin else {}
        self.info |= {"random_seed": 1000, "internal_states": [said]}
        embedding = nn.Parameter(torch.ones(8, 8))
        self.policy = Policy(embedding)
        self.models = [DraftModel(self.drafter, embedding) for _ in range(self.ranks)]
        self.paused = False
        self.session: str | None = None
        self.running_requests = 3
        self.counters = {"rounds": 0, "tokens": 0, "requests": 0}  # of requests that have ended
        self.steps = [0, 0, 0, 0]  # rounds, and tokens accepted at each position, as our plugin counts them

    def restart(self) -> None:
        """A new process: weights, counters and identity are those of a start."""
        self.down()
        self._start()
        self.up()

    def play(self, rounds: int, accepted: tuple[int, int, int]) -> None:
        """Do rounds of requests that go on."""
        with self.lock:
            self.steps = [a + b for a, b in zip(self.steps, (rounds, *accepted), strict=True)]

    def end(self, rounds: int, emitted: int, requests: int) -> None:
        """End requests after this number of rounds; each one's first token came from its prefill."""
        with self.lock:
            self.counters["rounds"] += rounds
            self.counters["tokens"] += emitted + requests
            self.counters["requests"] += requests

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        del query
        if path == "/server_info":
            self.send_json(handler, 200, self.info)
        elif path == "/model_info":
            self.send_json(handler, 200, {"weight_version": self.weight_version})
        elif path == "/metrics":
            self.send(handler, 200, self._metrics().encode())
        elif path in FIELDS and handler.command == "POST":
            self._update(handler, path, body)
        else:
            self.violations.append(f"{handler.command} {path}")
            self.send_json(handler, 404, {"detail": "Not Found"})

    def _update(self, handler: BaseHTTPRequestHandler, path: str, body: Any) -> None:
        with self.lock:
            self.calls.append((path, body))
            try:
                self._fail(path)
                self._check_fields(path, body)
                message = self._load(body)
            except RefusedError as refused:
                self.send_json(handler, refused.status, {"success": False, "message": str(refused)})
            else:
                self.send_json(handler, 200, message)

    def _fail(self, path: str) -> None:
        if self.fail.get(path, 0) > 0:
            self.fail[path] -= 1
            raise RefusedError(500, "Internal Server Error")

    def _check_fields(self, path: str, body: Any) -> None:
        fields = {name: kind for name, kind in FIELDS[path].items() if self.sessions or name != "selector"}
        for name, value in body.items():
            if name not in fields or type(value) is not fields[name]:
                self.violations.append(f"{path}: {name}={value!r}"[:200])
                raise RefusedError(422, f"{name}: not a field, or of another type")

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.plugin or body.get("load_format") != LOADER:
            self.violations.append("it waits for every running request")
        if self.session is not None:
            raise RefusedError(400, "a trainer's weight-update session is open; it is asked again")
        if "selector" in body:
            self.violations.append("the plugin says the selector, where SGLang knows one")
        if body.get("abort_all_requests"):
            self.violations.append("requests aborted")
        if body.get("weight_version") is not None:
            self.violations.append("weight_version is the trainer's")
        if len(body["serialized_named_tensors"]) != self.ranks:
            raise RefusedError(500, "IndexError: list index out of range")
        if body.get("load_format") not in self.info["custom_weight_loader"]:
            raise RefusedError(500, f"Unknown load_format={body.get('load_format')}")
        module, _, function = str(body["load_format"]).rpartition(".")
        loader = getattr(importlib.import_module(module), function)
        for rank, model in enumerate(self.models):
            raw = base64.b64decode(body["serialized_named_tensors"][rank], validate=True)
            tensors = [(name, tensor.to("cpu")) for name, tensor in Unpickler(io.BytesIO(raw)).load()]
            with _process(rank):
                loader(model, tensors)  # what it returns is ignored; what it raises would end the server
                if not self.sessions:
                    loader(self.policy, tensors)
        if body.get("flush_cache", True) and self.running_requests:
            raise RefusedError(
                400, "Weights were updated, but the cache was not flushed because requests are still running"
            )
        return {"success": True, "message": "Success"}

    def _metrics(self) -> str:
        with self.lock:
            counts, (rounds, *accepted) = dict(self.counters), self.steps
        label = 'model_name="m",engine_type="unified"'
        ours = [f"draftalign:spec_decode_rounds_total {float(rounds)}"]
        name = "draftalign:spec_decode_round_accepted_tokens_total"
        ours += [f'{name}{{position="{i}"}} {float(tokens)}' for i, tokens in enumerate(accepted) if tokens]
        ours += ["draftalign:spec_decode_rounds_faults_total 1.0"] * self.fault
        ours += [f"draftalign:weights_released {float(self.released)}"]
        return "".join(f"{line}\n" for line in ours if self.plugin) + (
            f"sglang:spec_verify_calls_total{{{label}}} {float(counts['rounds'])}\n"
            f'sglang:generation_tokens_total{{{label},is_streaming="false"}} {float(counts["tokens"])}\n'
            f'sglang:generation_tokens_total{{{label},is_streaming="true"}} 0.0\n'
            f'sglang:num_requests_total{{{label},is_streaming="false"}} {float(counts["requests"])}\n'
            f"sglang:spec_accept_length{{{label}}} 2.5\n"
        )


@contextmanager
def _process(rank: int) -> Iterator[None]:
    """Each rank is a process of its own: here, a process id of its own."""
    with mock.patch("os.getpid", return_value=70_000 + rank):
        yield
