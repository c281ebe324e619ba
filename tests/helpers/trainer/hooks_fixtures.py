"""A tiny Qwen3, ragged padded batches, and a real HTTP receiver that can also misbehave."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_hooks import wire
from rl_hooks.hook import DrafterHook

VOCAB = 61
HIDDEN = 32
AUX = (1, 2, 3)
Answer = tuple[int, dict[str, str], Any]  # status, headers, JSON body


def tiny_qwen3(layers: int = 4, *, tied: bool = True, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3Config(
        num_hidden_layers=layers,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        attn_implementation="eager",
        **(sizes | changes),
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        # The usual initialisation makes every distribution nearly uniform, in which mistakes would drown.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@dataclass(frozen=True)
class Padded:
    """Ragged rollouts in one padded batch: prompts padded left, responses right, as TRL lays them out."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    sequences: list[list[int]]
    prompt_lengths: list[int]


def padded_batch(lengths: list[tuple[int, int]], seed: int = 0) -> Padded:
    rng = np.random.default_rng(seed)
    P, C = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids, mask, loss, sequences = [], [], [], []
    for prompt, response in lengths:
        tokens = rng.integers(2, VOCAB, prompt + response).tolist()
        ids.append([0] * (P - prompt) + tokens + [0] * (C - response))
        mask.append([0] * (P - prompt) + [1] * (prompt + response) + [0] * (C - response))
        loss.append([0] * P + [1] * response + [0] * (C - response))
        sequences.append(tokens)
    return Padded(torch.tensor(ids), torch.tensor(mask), torch.tensor(loss), sequences, [p for p, _ in lengths])


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """What arrived, and how to answer. `answer` maps a request to (status, headers, JSON body)."""

    url: str
    requests: list[Received] = field(default_factory=list)
    expects: int = 0
    #: Answer to `Expect: 100-continue`; None lets the body come.
    refuse: Callable[[], tuple[int, dict[str, str], Any] | None] = lambda: None
    answer: Callable[[Received], Answer] = lambda _request: (202, {}, {"duplicate": False})
    #: Answer to how the run stands; None: nobody answers that.
    stands: dict[str, Any] | None = None
    misbehave: str = ""  # "", "reset", "garbage", "slow", "silent", "foreign"

    def rollouts(self) -> list[Received]:
        return [r for r in self.requests if r.path.startswith("/rollouts")]

    def wait(self, count: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while len(self.requests) < count:
            assert time.monotonic() < deadline, f"{len(self.requests)} of {count} requests came"
            time.sleep(0.01)


def names_of(header: wire.RolloutHeader) -> tuple[str, ...]:
    """What the trainer called the rollouts of a file: their ids without the digest of their tokens."""
    return tuple(name.rpartition("-")[0] for name in header.rollout_ids)


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each body waits 40 ms for the acknowledgement of its headers

        def log_message(self, *args: Any) -> None:
            pass

        def handle_expect_100(self) -> bool:
            state.expects += 1
            if state.misbehave == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return False
            if state.misbehave == "garbage":
                self.wfile.write(b"\x00\xffnot http at all\r\n\r\n")
                self.close_connection = True
                return False
            if state.misbehave == "slow":
                time.sleep(20.0)
            refusal = state.refuse()
            if refusal is not None:
                self._reply(*refusal)
                self.close_connection = True
                return False
            if state.misbehave != "silent":
                return super().handle_expect_100()
            return True

        def _reply(self, status: int, headers: dict[str, str], body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if state.misbehave != "foreign" and wire.API_HEADER not in headers:
                self.send_header(wire.API_HEADER, str(wire.API_VERSION))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _take(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = Received(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            status, headers, reply = state.answer(request)
            state.requests.append(request)
            self._reply(status, headers, reply)

        def do_GET(self) -> None:
            self._reply(404 if state.stands is None else 200, {}, state.stands or {})

        do_POST = do_PUT = _take  # noqa: N815 - names that BaseHTTPRequestHandler looks for

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    state = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def mapped(request: Received, directory: Path) -> wire.MappedFile:
    """A received body, as the worker would see it."""
    path = directory / f"{len(list(directory.iterdir()))}.safetensors"
    path.write_bytes(request.body)
    return wire.MappedFile(path)


def as_float(file: wire.MappedFile, name: str) -> torch.Tensor:
    """A float tensor of a received file in float32, 8-bit features rescaled, `aux_hidden` with a row for each token."""
    info = file.header.tensors[name]
    raw = torch.from_numpy(file.array(name).copy())
    if info.dtype == "BF16":
        raw = raw.view(torch.bfloat16).float()
    if info.dtype == "F8_E4M3":
        scale = torch.from_numpy(file.array(f"{name}_scale").copy())  # [N, A]
        values = raw.view(torch.float8_e4m3fn).float()
        raw = (values.view(len(raw), scale.shape[1], -1) * scale[:, :, None]).view(len(raw), -1)
    if name == "aux_hidden" and "aux_rows" in file:
        raw = raw[torch.from_numpy(file.array("aux_rows").astype(np.int64))]
    return raw


def of_every_token(file: wire.MappedFile, name: str) -> torch.Tensor:
    """The same with a row for each token, NaN where the file has none: of the last states where few are wanted."""
    rows, mask = as_float(file, name), file.array("loss_mask")
    if len(rows) == len(mask):
        return rows
    found = rows.new_full((len(mask), *rows.shape[1:]), torch.nan)
    found[torch.from_numpy(wire.predicting_rows(mask))] = rows
    return found


def only_predicting_rows(_request: Received) -> Answer:
    """The answer of a service that reads no other last states, and takes all optional tensors."""
    return 202, {}, {"duplicate": False, "last_rows": "predicting", "optional_tensors": wire.OPTIONAL_TENSORS}


def step(
    hook: DrafterHook, model: Qwen3ForCausalLM, version: int, batch: Padded | None = None, *, wrong: float = 0.0
) -> torch.Tensor:
    """One forward under capture; `wrong`: nats taken from what would be the right log-probabilities."""
    batch = batch or padded_batch([(3, 9), (7, 4), (1, 12), (5, 6)], seed=version)
    logprobs = None
    if wrong:
        with torch.no_grad():
            law = model(batch.input_ids, attention_mask=batch.attention_mask).logits.log_softmax(-1)
        logprobs = torch.zeros(batch.input_ids.shape)
        logprobs[:, 1:] = law[:, :-1].gather(2, batch.input_ids[:, 1:, None])[:, :, 0] - wrong
    with hook.capture(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        loss_mask=batch.loss_mask,
        policy_version=version,
        logprobs=logprobs,
    ):
        logits: torch.Tensor = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert hook.flush(20), hook.stats()
    return logits


Attach = Callable[..., DrafterHook]


@contextmanager
def attaching(url: str) -> Iterator[Attach]:
    """Attach hooks to a service, each registered when it comes back; they are closed at the end."""
    hooks = list[DrafterHook]()

    def attach(model: Qwen3ForCausalLM, **options: Any) -> DrafterHook:
        hooks.append(DrafterHook(model, url, aux_layers=AUX, **options))
        assert hooks[-1].flush(20)
        return hooks[-1]

    yield attach
    for hook in hooks:
        hook.close(1.0)
