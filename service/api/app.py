"""The HTTP API: one FastAPI application over a state directory and a Redis. No torch in this process.

create_app(Settings(state_dir=..., redis_url=...))     the application
run_api(settings)                                       serve it with uvicorn until SIGTERM
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gc
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from starlette.responses import HTMLResponse, PlainTextResponse

from rl_hooks import wire
from service.access.audit import AuditLog
from service.api import acceptance as acceptance_api
from service.api import drafters as drafters_api
from service.api import problems
from service.api import runs as runs_api
from service.api.auth import Caller, Guard, check_binding
from service.api.context.answers import Status
from service.api.context.audited import Auditor
from service.api.context.context import Context, ServiceContext
from service.api.drafters import tagged
from service.api.port.connections import BoundedProtocol, Places, TlsDoor, tls_context
from service.api.port.free import check_port
from service.api.problems import Problem, in_units
from service.api.rollouts import batches as rollouts_api
from service.api.rollouts import dead as dead_api
from service.api.rollouts import direct as direct_api
from service.api.snapshot import log_damaged, read_parts, watch_headlines
from service.errors import ConfigurationError, ObjectStoreError
from service.memory import RETURN_MEMORY_SECONDS, return_freed_memory, share_one_heap
from service.monitor import metrics
from service.settings import Settings
from service.storage.ready import connect_async, memory_of

log = logging.getLogger("draftalign.api")

#: An idle connection is closed after this time. Clients and proxies keep one for less (httpx 5 s, nginx 60 s), so they
#: close it first: else a request could meet a connection that is just being closed.
IDLE_SECONDS = 75

router = APIRouter(tags=["operations"])

_PAGE = Path(__file__).with_name("page.html")
_REAP_SECONDS = 300.0
_NEVER: Final = 1_000_000
#: Least time between two sweeps for uploads that find no room.
_MAKE_ROOM_SECONDS = 5.0
#: Headers of every answer. A browser loads nothing from other hosts, and shows no answer in a frame (clickjacking).
#: FastAPI's page of the API needs inline script and styles; our page is stricter in its `meta` (`page_html`).
_HEADERS: Final = [
    (
        "Content-Security-Policy",
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    (wire.API_HEADER, str(wire.API_VERSION)),
]


def create_app(settings: Settings) -> FastAPI:
    """Build the application; raises ConfigurationError without a Redis, or when it would be open to the network."""
    check_binding(settings)
    if settings.redis_url is None:
        raise ConfigurationError("the API needs a Redis: set DRAFTALIGN_REDIS_URL, or use `draftalign up`")
    client = connect_async(
        settings.redis_url.get_secret_value(),
        socket_timeout=5.0,
        socket_connect_timeout=2.0,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), 2),
        max_connections=Places().to_redis,  # redis-py's own bound of 100 is reached by requests that come at once
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        works = _reap, _return_memory, watch_headlines
        tasks = [asyncio.create_task(work(app.state.context)) for work in works]
        yield
        for task in tasks:
            task.cancel()
        app.state.context.close()
        await client.aclose()

    app = FastAPIOffline(  # `describe` takes its script from here, not from a stranger's host
        static_url="/docs/static",
        title="draftalign",
        version=str(wire.API_VERSION),
        description="Keeps a speculative-decoding drafter in step with a policy that RL keeps changing.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": "."}],  # beside `/openapi.json`, also behind a proxy that takes a prefix off
    )
    context = app.state.context = ServiceContext(settings, client)
    auditor = Auditor(AuditLog(context.layout))
    app.add_middleware(Guard, tokens=context.access.tokens, auditor=auditor, find=context.looks.find)
    problems.install(app)
    app.get("/docs", include_in_schema=False)(describe)
    parts = [part.router for part in (rollouts_api, direct_api, runs_api, dead_api, drafters_api, acceptance_api)]
    for part in (*parts, router):
        for route in part.routes:
            if isinstance(route, APIRoute):  # FastAPI's own summary is the function's name
                route.summary = route.description.partition("\n")[0].partition(". ")[0].removesuffix(".")
                route.responses = problems.RESPONSES | route.responses
        # Not `include_router`: the first request would wait until it had made each route again, 30 ms.
        app.router.routes.extend(part.routes)
    return app


@contextlib.contextmanager
def _logged(failure: str) -> Iterator[None]:
    """Log whatever goes wrong, and go on: the next sweep must come."""
    try:
        yield
    except (RedisError, OSError) as error:
        log.warning("%s: %s", failure, error)
    except Exception:
        log.exception(failure)


async def _reap(context: ServiceContext) -> None:
    while True:
        with _logged("the spool was not swept"):
            gone = await context.reap()
            if gone:
                log.info("removed %d spooled files that no queue entry names", gone)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_SECONDS):
                await _make_room(context)


async def _make_room(context: ServiceContext) -> None:
    """Delete files of dead batches whenever uploads find no room. Runs until it is cancelled."""
    while True:
        await context.disk.room_wanted.wait()
        with _logged("no files of dead batches were deleted"):
            await context.disk.make_room()
        await asyncio.sleep(_MAKE_ROOM_SECONDS)


async def _return_memory(_context: ServiceContext) -> None:
    """Once a minute: collect all garbage, and return free memory to the system. Runs until it is cancelled.

    Requests leave no garbage. A full collection while 1,000 requests wait takes 20 to 100 ms, in which nothing is
    answered; Python alone would make two of them while 1,000 requests begin to wait.
    """
    while True:
        await asyncio.sleep(RETURN_MEMORY_SECONDS)
        gc.collect()
        await asyncio.to_thread(return_freed_memory)


@router.get("/healthz")
async def healthz() -> Status:
    """Answer while the process lives."""
    return Status(status="ok")


@router.get("/readyz")
async def readyz(context: Context) -> Status:
    """Answer while rollouts can be taken: Redis took a write within the last second, and the spool takes files.

    With `state_url` the object store answered, too, when it was last asked: it is asked once a second.
    """
    await context.redis.writes.check()
    if context.layout.away is not None:
        raise ObjectStoreError(context.layout.away)
    free, least = context.disk.spool.free_bytes(), context.settings.spool_min_free_bytes
    if free < least:
        found = f"{in_units(free)} are free on the spool's disk; at least {in_units(least)} must be"
        raise Problem(503, "spool-low", f"{found} (DRAFTALIGN_SPOOL_MIN_FREE_BYTES)", headers={"Retry-After": "10"})
    context.disk.spool.check_takes_files()
    return Status(status="ready")


@router.get("/metrics", response_class=PlainTextResponse, responses={304: {"description": "Still the same."}})
async def get_metrics(request: Request, context: Context, caller: Caller) -> Response:
    """Read the metrics, in Prometheus' text format: of the runs that the token is for."""
    runs = tuple(filter(caller.covers, await asyncio.to_thread(context.layout.run_names)))
    await context.redis.check()
    text = await context.answers.get(("metrics", runs), lambda: _metrics(context, runs))
    return tagged(request, text, metrics.CONTENT_TYPE)


async def _metrics(context: ServiceContext, runs: Sequence[str]) -> bytes:
    memory = await memory_of(context.redis.client)
    parts, damaged = await read_parts(context, runs)
    log_damaged(damaged)
    return await asyncio.to_thread(
        metrics.render,
        parts,
        redis_fill=None if memory is None else round(memory.fill, 2),
        unreadable=list(damaged),
        token_file_broken=None if context.settings.token_file is None else context.access.tokens.trouble is not None,
    )


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """Show the page that draws α live."""
    return HTMLResponse(await asyncio.to_thread(page_html))


def page_html() -> str:
    """The page. Its policy names the digest of its own script, so that the browser runs no other that got into it."""
    text = _PAGE.read_text("utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return text.replace("script-src 'unsafe-inline'", f"script-src 'sha256-{digest}'")


async def describe() -> HTMLResponse:
    """Show the API's calls. Addresses are relative, as on the page: a proxy may take a prefix off."""
    static = "docs/static/swagger-ui"
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="draftalign",
        swagger_js_url=f"{static}-bundle.js",
        swagger_css_url=f"{static}.css",
        swagger_favicon_url="docs/static/favicon.png",
    )


class Server(uvicorn.Server):
    """uvicorn that ends long polls when it is asked to stop, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, context: ServiceContext) -> None:
        super().__init__(config)
        self._context = context

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until it is asked to stop. Raises OSError where the state that hosts share cannot be read."""
        with self._context.layout.followed():
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log where: with port 0 only this process knows the port."""
        await super().startup(sockets)
        for listener in self.servers[:1] if self.started else ():  # uvicorn 0.34 goes on where the lifespan failed
            port = listener.sockets[0].getsockname()[1]
            log.info("process %d serves %s", os.getpid(), self._context.settings.url(port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop."""
        self._context.lifetime.stopping.set()
        super().handle_exit(sig, frame)


def make_server(settings: Settings) -> Server:
    """An unstarted server."""
    app = create_app(settings)
    places = Places()
    protocol: functools.partial[Any] = functools.partial(BoundedProtocol, places=places)
    if settings.tls_cert is not None and settings.tls_key is not None:
        protocol = functools.partial(TlsDoor, places=places, tls=tls_context(settings.tls_cert, settings.tls_key))
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        backlog=places.backlog,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        headers=_HEADERS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=15,
    )
    return Server(config, app.state.context)


def run_api(settings: Settings) -> None:
    """Serve in this process until SIGTERM or SIGINT."""
    share_one_heap()
    server = make_server(settings)
    check_port(settings.host, settings.port)
    gc.collect()
    gc.freeze()  # full collections pass over what lives as long as the process: 20 ms in which nothing is answered
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)  # `_return_memory` makes them
    # It would log http:// where `TlsDoor` does the TLS, and a line for each request of a stranger that is no HTTP.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server.run()
    if not server.started:
        raise ConfigurationError(f"could not listen on {settings.host}:{settings.port}; is the port taken?")
