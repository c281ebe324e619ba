"""The inference server of the demo: `examples.engine` behind HTTP on loopback.

    python -m examples.engine_server --policy DIR --port 8500 --depth 4 --drafting probabilistic

| call | what |
|---|---|
| `POST /generate` | `{prompts: [[ids]], n, max_tokens, temperature, eos_id}` -> `{completions, policy_version}` |
| `POST /policy?version=N` | whole policy weights as safetensors, loaded between two rounds |
| `POST /drafter/swap` | `{path, version}` -> `{version, previous}`; checked first, and no request stops |
| `GET /drafter/state` | which drafter is served, and how |
| `GET /metrics` | vLLM's counters by their names and meanings |
| `GET /healthz` | 200 while the engine's thread lives |

Errors are RFC 9457 problem documents. A top_p or top_k that cuts is refused: acceptance is exact for plain
temperature only.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from starlette.exceptions import HTTPException

from drafter.errors import DrafterError
from drafter.files.checkpoint import config_fingerprint
from examples.engine import Engine, EngineError, EngineStoppedError
from examples.engine_sequences import Sampling
from examples.policy import AUX_LAYERS

MAX_POLICY_BYTES: Final = 256 << 20
_MAX_COMPLETIONS: Final = 4096
_Samples = Mapping[tuple[str, ...], int]


class GenerateRequest(BaseModel):
    """Body of `POST /generate`."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[list[int]] = Field(min_length=1)
    n: int = Field(1, ge=1)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    eos_id: int | None = None
    top_p: float | None = Field(None, ge=1, le=1)
    top_k: Literal[0, -1] | None = None


class SwapRequest(BaseModel):
    """Body of `POST /drafter/swap`: a local directory with model.safetensors and config.json."""

    model_config = ConfigDict(extra="forbid")

    path: Path
    version: str = Field(min_length=1, max_length=128)


class EngineCollector(Collector):
    """The engine's counters as Prometheus metrics, all from one snapshot, so that ratios of them are exact."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"engine": "0", "model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        counters = self._engine.counters()
        running, waiting = self._engine.load()
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", counters.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", counters.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", counters.accepted_tokens),
            ("vllm:prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("vllm:generation_tokens", "Number of generation tokens processed.", counters.generation_tokens),
            (
                "draftalign:spec_decode_emitted_tokens",
                "Tokens emitted by drafted rounds, trimmed at the end of a response.",
                counters.emitted_tokens,
            ),
            ("draftalign:engine_rounds", "Rounds, each over all running sequences.", counters.rounds),
            ("draftalign:drafter_swaps", "Drafters swapped in.", counters.drafter_swaps),
            ("draftalign:policy_updates", "Policy weights loaded.", counters.policy_updates),
        ):
            yield self._filled(CounterMetricFamily(name, text, labels=[*self._labels]), {(): value})
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position."
        positions: _Samples = {(str(i),): count for i, count in enumerate(counters.accepted_per_position)}
        yield self._filled(CounterMetricFamily(name, text, labels=[*self._labels, "position"]), positions)
        name, text = "vllm:request_success", "Count of successfully processed requests."
        finished: _Samples = {("stop",): counters.finished_by_stop, ("length",): counters.finished_by_length}
        yield self._filled(CounterMetricFamily(name, text, labels=[*self._labels, "finished_reason"]), finished)
        for name, value in (("running", running), ("waiting", waiting)):
            gauge = GaugeMetricFamily(f"vllm:num_requests_{name}", f"Sequences {name}.", labels=[*self._labels])
            yield self._filled(gauge, {(): value})

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: _Samples) -> Metric:
        """The family with its samples. `values`: by the labels that not all families have."""
        for key, value in values.items():
            family.add_metric((*self._labels.values(), *key), value)
        return family


def problem(status: int, title: str, detail: str) -> JSONResponse:
    """An RFC 9457 problem document."""
    return JSONResponse(
        {"type": "about:blank", "title": title, "status": status, "detail": detail},
        status_code=status,
        media_type="application/problem+json",
    )


def create_app(engine: Engine, *, model_name: str = "policy") -> FastAPI:
    """The HTTP side of an engine, which starts and stops with the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.stop)

    app = FastAPI(title="draftalign example engine", lifespan=lifespan)
    _add_problems(app)
    _add_generation(app, engine)
    _add_drafter(app, engine)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model_name))
    ProcessCollector(registry=registry)  # tells since when it counts

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    def healthz() -> Response:
        if engine.failure:
            return problem(503, "Engine stopped", engine.failure)
        return JSONResponse({"status": "ok"})

    return app


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = [f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        return problem(422, "Invalid request", "; ".join(faults[:5]))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, "Request refused", str(error.detail))

    @app.exception_handler(EngineError)
    @app.exception_handler(DrafterError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        return problem(422, "Refused; nothing has changed", str(error))

    @app.exception_handler(EngineStoppedError)
    async def stopped(_: Request, error: EngineStoppedError) -> JSONResponse:
        return problem(503, "Engine stopped", str(error))


def _add_generation(app: FastAPI, engine: Engine) -> None:
    @app.post("/generate")
    async def generate(body: GenerateRequest) -> dict[str, Any]:
        if len(body.prompts) * body.n > _MAX_COMPLETIONS:
            raise EngineError(f"at most {_MAX_COMPLETIONS} completions a request, got {len(body.prompts) * body.n}")
        sampling = Sampling(body.max_tokens, body.temperature, body.eos_id)
        completions = await asyncio.wrap_future(engine.submit(body.prompts, sampling, body.n))
        return {"completions": [asdict(done) for done in completions], "policy_version": engine.policy_version}

    @app.post("/policy")
    async def update_policy(request: Request, version: Annotated[int, Query(ge=0)]) -> dict[str, int]:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_POLICY_BYTES:
                raise HTTPException(413, f"policy weights may take {MAX_POLICY_BYTES} bytes; this body is longer")

        def load() -> int:
            try:
                weights = load_safetensors(bytes(body))
            except SafetensorError as error:
                raise EngineError(f"the body must be a whole safetensors file: {error}") from error
            return engine.update_policy(weights, version)

        running = await run_in_threadpool(load)
        return {"policy_version": version, "running_sequences": running}


def _add_drafter(app: FastAPI, engine: Engine) -> None:
    @app.post("/drafter/swap")
    async def swap(body: SwapRequest) -> dict[str, str | None]:
        previous = await run_in_threadpool(engine.swap_drafter, body.path, body.version)
        return {"version": body.version, "previous": previous}

    @app.get("/drafter/state")
    def state() -> dict[str, Any]:
        served = engine.drafter
        return {
            "version": engine.drafter_version,
            "loaded": served is not None,
            "swaps": engine.counters().drafter_swaps,
            "depth": engine.depth,
            "drafting": engine.mode,
            "policy_version": engine.policy_version,
            "aux_layers": list(engine.aux_layers),
            "aux_layers_convention": "entering",
            "config_fingerprint": None if served is None else config_fingerprint(served.config, served.vocabulary),
        }


def main() -> None:
    """Serve a policy on loopback until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.engine_server", description=main.__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="directory of a transformers causal LM")
    parser.add_argument("--policy-version", type=int, default=0)
    parser.add_argument("--drafter", type=Path, help="directory of a drafter to start with (default: none)")
    parser.add_argument("--drafter-version", default="initial", help="its version")
    parser.add_argument("--port", type=int, default=8500, help="0 takes a free one, which is printed")
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted per round")
    parser.add_argument("--drafting", choices=("probabilistic", "greedy"), default="probabilistic")
    parser.add_argument("--aux-layers", type=int, nargs="+", default=list(AUX_LAYERS), help="layers entered")
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(arguments.threads)
    from transformers import AutoModelForCausalLM

    listener = _listen(parser, arguments.port)
    engine = Engine(
        AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=torch.float32, local_files_only=True),
        arguments.aux_layers,
        depth=arguments.depth,
        drafting=arguments.drafting,
        max_sequences=arguments.max_sequences,
        seed=arguments.seed,
        policy_version=arguments.policy_version,
    )
    if arguments.drafter is not None:
        engine.swap_drafter(arguments.drafter, arguments.drafter_version)
    app = create_app(engine, model_name=arguments.policy.name)
    print(f"the example engine serves {arguments.policy} on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=75))
    # uvicorn raises the signal again once it has shut down; for Ctrl-C that is a traceback nobody needs.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _listen(parser: argparse.ArgumentParser, port: int) -> socket.socket:
    """Bind before the slow part, so that a taken port is told at once."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # clients who come before the engine is ready wait, and are not turned away
    except OSError as error:
        parser.error(f"cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another --port")
    return listener


if __name__ == "__main__":
    main()
