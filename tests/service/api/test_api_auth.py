"""Tokens, scopes, probes, problem documents: what every call has in common."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urljoin

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from helpers.service.service_fixtures import CONFIG, HEADERS, RunningService, rollout_file, run_file
from pydantic import SecretStr, ValidationError

from service.api.app import create_app, make_server
from service.api.auth import PUBLIC, allowed_scopes
from service.errors import ConfigurationError
from service.settings import SCOPES, Settings

TOKENS = "trainer-secret:write;reader-secret:read;engine-secret:read,report;boss-secret:admin;both-secret:write,read"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@pytest.fixture
def guarded(serve: Callable[..., RunningService]) -> RunningService:
    """The API with tokens, and the run `default` registered."""
    service = serve(tokens=TOKENS)
    service.client.headers["Authorization"] = "Bearer boss-secret"
    service.register().raise_for_status()
    service.publish()
    del service.client.headers["Authorization"]
    return service


def paths(service: RunningService) -> list[str]:
    """Every path that the application has a route for, and one that it has not."""
    document = service.server.config.app.openapi()  # type: ignore[union-attr]
    found = sorted({*document["paths"], "/docs", "/openapi.json", "/docs/static/swagger-ui.css"})
    assert len(found) >= 16
    version = service.registry.versions("default")[0]
    values = {"{run}": "default", "{version}": version, "{file}": "config.json", "{rollout_id}": "a"}
    for name, value in values.items():
        found = [path.replace(name, value) for path in found]
    return [*found, "/nothing/here"]


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer", "Basic !!", "Digest x", "boss-secret"])
def test_no_route_and_no_method_works_without_a_token(guarded: RunningService, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in paths(guarded):
        for method in METHODS:
            reply = guarded.client.request(method, path, headers=headers)
            if path in PUBLIC:
                assert reply.status_code in (200, 405), (method, path)
                continue
            assert reply.status_code == 401, (method, path)
            assert "Bearer" in reply.headers["www-authenticate"]
            if method != "HEAD":
                assert reply.headers["content-type"] == "application/problem+json"
                found = "no token came" if authorization is None else "this token is not known"
                assert reply.json()["detail"].startswith(f"{found}; send ")


def test_a_refusal_reads_no_body(guarded: RunningService) -> None:
    request = (
        "POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-safetensors\r\n"
        "Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    )
    assert guarded.raw(request.encode()).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/runs/default", {"trainer", "both", "boss"}),
        ("PUT", "/runs/default/head", {"trainer", "both", "boss"}),
        ("GET", "/runs/default", {"trainer", "reader", "engine", "both", "boss"}),
        ("POST", "/rollouts", {"trainer", "both", "boss"}),
        ("GET", "/rollouts/a", {"trainer", "reader", "engine", "both", "boss"}),
        ("GET", "/drafter/latest", {"reader", "engine", "both", "boss"}),
        ("GET", "/drafters", {"reader", "engine", "both", "boss"}),
        ("POST", "/drafter/v000001-00000000/rollback", {"boss"}),
        ("POST", "/runs/default/drift/reset", {"boss"}),
        ("POST", "/acceptance", {"trainer", "engine", "both", "boss"}),
        ("GET", "/alpha", {"reader", "engine", "both", "boss"}),
        ("GET", "/metrics", {"reader", "engine", "both", "boss"}),
        ("GET", "/openapi.json", {"reader", "engine", "both", "boss"}),
        ("DELETE", "/runs/default", {"boss"}),
    ],
)
def test_a_token_can_do_what_its_scopes_say(guarded: RunningService, method: str, path: str, allowed: set[str]) -> None:
    for name in ("trainer", "reader", "engine", "both", "boss"):
        reply = guarded.client.request(method, path, headers={"Authorization": f"Bearer {name}-secret"})
        assert (reply.status_code != 403) == (name in allowed), (name, reply.text)
        assert reply.status_code != 401
        assert name in allowed or method == "HEAD" or reply.json()["detail"].endswith("this token does not have it")


@pytest.mark.parametrize(
    ("line", "field", "status"),
    [
        ("OPTIONS * HTTP/1.1", "", 404),
        ("DELETE /runs/default HTTP/1.1", "Origin: http://[\r\n", 403),
        ("DELETE /runs/default HTTP/1.1", "Origin: null\r\n", 403),
    ],
)
def test_what_no_browser_sends_is_refused_and_is_no_fault_of_the_service(
    service: RunningService, line: str, field: str, status: int
) -> None:
    reply = service.raw(f"{line}\r\nHost: localhost\r\n{field}Connection: close\r\n\r\n".encode())
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())


def test_the_log_says_which_port_was_taken(
    serve: Callable[..., RunningService], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "draftalign.api")
    service = serve(port=0)
    assert f"serves http://127.0.0.1:{service.port}/" in caplog.text


def test_an_application_that_cannot_start_listens_nowhere_with_an_older_uvicorn_too(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn.Server, "startup", AsyncMock())  # 0.34 returns; later ones end the process there
    server = make_server(Settings(state_dir=tmp_path, redis_url=SecretStr(redis_url)))
    asyncio.run(server.startup())
    assert not server.started


def test_two_hosts_are_one_too_many(service: RunningService) -> None:
    request = b"GET /runs/default HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert service.raw(request).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/", "/docs", "/docs/static/swagger-ui-bundle.js", "/runs/none", "/nothing"])
def test_no_answer_can_be_framed_or_load_from_elsewhere(service: RunningService, path: str) -> None:
    headers = service.client.get(path).headers
    assert headers["x-frame-options"] == "DENY"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["frame-ancestors"] == "'none'"
    assert policy["default-src"] == "'self'"
    allowed = {source for sources in policy.values() for source in sources.split()}
    assert allowed == {"'self'", "'none'", "'unsafe-inline'", "data:"}, "no other host, and no script that is data"
    assert "data:" not in policy["script-src"]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_token_passes_as_the_password_of_basic_too(guarded: RunningService) -> None:
    assert guarded.client.get("/drafters", auth=("anyone", "engine-secret")).status_code == 200
    assert guarded.client.get("/drafters", auth=("engine-secret", "")).status_code == 401
    odd = base64.b64encode(b"\xff\xfe:\xff").decode()
    assert guarded.client.get("/drafters", headers={"Authorization": f"Basic {odd}"}).status_code == 401


def test_each_challenge_has_a_line_of_its_own_and_basic_comes_first(guarded: RunningService) -> None:
    """Chromium reads a line as one challenge, and asks for a password only where that one is Basic."""
    for request in (b"GET /", b"POST /rollouts"):
        reply = guarded.raw(request + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody")
        lines = [line for line in reply.split(b"\r\n") if line.lower().startswith(b"www-authenticate:")]
        assert [line.partition(b": ")[2] for line in lines] == [
            b'Basic realm="draftalign"',
            b'Bearer realm="draftalign"',
        ]


def settings_of(**given: Any) -> Settings:
    """From plain text, as the environment gives it."""
    return Settings(**given)


def test_what_is_not_listed_needs_admin() -> None:
    assert allowed_scopes("POST", "/new/call") == {"admin"}
    assert allowed_scopes("DELETE", "/rollouts/x") == {"admin"}
    assert allowed_scopes("PUT", "/drafter/x") == {"admin"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])  # noqa: S104
def test_without_tokens_only_loopback_is_bound(host: str, redis_url: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="DRAFTALIGN_TOKENS"):
        create_app(settings_of(state_dir=tmp_path, redis_url=redis_url, host=host))
    app = create_app(settings_of(state_dir=tmp_path, redis_url=redis_url, host=host, tokens="s:read"))
    assert TestClient(app).get("/runs").status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_may_be_bound_without_tokens(host: str, redis_url: str, tmp_path: Any) -> None:
    app = create_app(settings_of(state_dir=tmp_path, redis_url=redis_url, host=host))
    assert (
        TestClient(app, base_url=f"http://{f'[{host}]' if ':' in host else host}:8400").get("/healthz").status_code
        == 200
    )


def test_without_tokens_a_foreign_host_name_is_not_answered(service: RunningService) -> None:
    """DNS rebinding: a web page points its own name at 127.0.0.1."""
    reply = service.client.get("/drafters", headers={"Host": "evil.example"})
    assert (reply.status_code, reply.json()["type"]) == (421, "urn:draftalign:wrong-host")
    for host in (
        "",
        "127.0.0.2.evil.example",
        "127.0.0.2:8400.evil.example",
        "8.8.8.8",
        "[::2]:8400",
        "[evil]",
        ":8400",
    ):
        assert service.client.get("/drafters", headers={"Host": host}).status_code == 421, host
    for host in ("localhost", "localhost:8400", "127.0.0.1:1", "127.0.0.2:8400", "[::1]:8400", "[::1]"):
        assert service.client.get("/drafters", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "tokens",
    ["secret", "secret:", ":read", "secret:read,fly", "a:read;a:write", "sécret:read", "s:read:", "@file:read"],
)
def test_malformed_tokens_stop_the_start_and_are_not_printed(tokens: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings_of(tokens=tokens)
    assert "tokens" in str(caught.value)


def test_settings_never_print_secrets() -> None:
    settings = settings_of(tokens="hunter2:read", redis_url="redis://:hunter2@host/0")
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump_json()}"
    assert settings.token_scopes() == {"hunter2": {"read"}}
    assert settings_of(tokens="x:admin").token_scopes()["x"] == set(SCOPES)
    with pytest.raises(ValidationError) as caught:
        settings_of(tokens="hunter2", redis_url="redis://:hunter2@host/0", max_body_bytes=100, queue_max_bytes=50)
    assert "hunter2" not in str(caught.value)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTALIGN_DEPTH", "6")
    monkeypatch.setenv("DRAFTALIGN_REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("REDIS_URL", "redis://of.another.program")
    settings = settings_of()
    assert settings.depth == 6
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == "redis://elsewhere"
    with pytest.raises(ValidationError, match="queue_max_bytes"):
        settings_of(max_body_bytes=100, queue_max_bytes=50)


# --- problem documents and operations


def test_every_error_is_a_problem_document(service: RunningService) -> None:
    replies = {
        404: service.client.get("/nothing"),
        405: service.client.delete("/rollouts"),
        422: service.client.get("/drafter/latest", params={"wait": "long"}),
        415: service.client.post("/rollouts", content=b"x"),
        409: service.register(config=CONFIG | {"num_hidden_layers": 9}),
    }
    for status, reply in replies.items():
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/problem+json"
        document = reply.json()
        assert document.keys() >= {"type", "title", "status", "detail", "instance"}
        assert document["status"] == status
        assert document["type"].startswith("urn:draftalign:")
    assert replies[405].headers["allow"] == "POST"
    assert service.client.post("/runs/default").headers["allow"] == "DELETE, GET, PATCH, PUT"  # of four routes


def test_a_bug_is_a_500_that_tells_no_secrets(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: str) -> None:
        raise ValueError("internal detail")

    monkeypatch.setattr(service.server.config.app.state.context, "run", explode)  # type: ignore[union-attr]
    reply = service.client.get("/drafters")
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:draftalign:bug")
    assert "internal" not in reply.text


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_read_now_is_no_bug_and_may_be_asked_for_again(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: str) -> None:
        raise OSError(number, "of the file system")

    monkeypatch.setattr(service.server.config.app.state.context, "run", fail)  # type: ignore[union-attr]
    reply = service.client.get("/drafters")
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:disk")
    assert os.strerror(number) in reply.json()["detail"]
    assert reply.headers["retry-after"]


def test_a_refused_connection_is_closed_and_a_good_one_kept(service: RunningService) -> None:
    refused = service.client.post("/rollouts", content=b"x" * 5000, headers={"Content-Type": "text/plain"})
    assert refused.headers["connection"] == "close"
    good = service.client.post("/rollouts", content=rollout_file(), headers=HEADERS)
    assert good.headers.get("connection") != "close"


def test_a_large_refused_body_does_not_lose_the_answer(serve: Callable[..., RunningService]) -> None:
    """A client that sends all of it before it reads sees 413, not a reset connection."""
    service = serve(max_body_bytes=1 << 20)
    for _ in range(5):
        reply = httpx.post(f"{service.url}/rollouts", content=b"x" * (24 << 20), headers=HEADERS, timeout=60)
        assert reply.status_code == 413


def test_an_idle_connection_is_kept_longer_than_clients_reuse_it(service: RunningService) -> None:
    """Httpx reuses what was idle for 5 s at most: a service that hung up then would fail a request now and then."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        for pause in (0.0, 5.7):
            time.sleep(pause)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            reply = b""
            while not reply.endswith(b'{"status":"ok"}'):  # header and body may come apart
                part = connection.recv(4096)
                assert part, reply
                reply += part
            assert reply.startswith(b"HTTP/1.1 200")


def test_probes_and_documentation_answer(service: RunningService) -> None:
    assert service.client.get("/healthz").json() == {"status": "ok"}
    assert service.client.get("/readyz").json() == {"status": "ready"}
    assert service.client.get("/docs").status_code == 200
    document = service.client.get("/openapi.json").json()
    assert {"/rollouts", "/drafter/latest", "/acceptance", "/alpha", "/runs/{run}"} <= document["paths"].keys()


def test_the_description_and_its_calls_are_found_behind_a_proxy_that_takes_a_prefix_off(
    service: RunningService,
) -> None:
    page = "http://proxy/draft/docs"
    named = re.findall(r"""(?:src=|href=|\burl: )["']([^"']+)""", service.client.get("/docs").text)
    asked = [urljoin(page, name) for name in named]
    assert {"http://proxy/draft/docs/static/swagger-ui-bundle.js", "http://proxy/draft/openapi.json"} < {*asked}
    for url in asked:
        assert service.client.get(url.removeprefix("http://proxy/draft")).status_code == 200, url
    [server] = service.client.get("/openapi.json").json()["servers"]
    assert urljoin("http://proxy/draft/openapi.json", server["url"]) == "http://proxy/draft/"


def test_every_call_is_described(service: RunningService) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    assert paths["/rollouts"]["post"]["summary"] == "Queue one rollout file"
    assert len(paths) >= 13
    for path, calls in paths.items():
        for method, call in calls.items():
            assert call.get("description"), (method, path)


def test_metrics_are_served_for_every_run(service: RunningService) -> None:
    service.client.put("/runs/second", content=run_file(), headers=HEADERS).raise_for_status()
    service.publish()
    service.post(rollout_file()).raise_for_status()
    reply = service.client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'run="second"' in reply.text
    assert 'run="default"' in reply.text


def test_the_page_is_served(service: RunningService) -> None:
    reply = service.client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert "α" in reply.text


def test_a_page_of_another_site_changes_nothing(service: RunningService) -> None:
    """A form needs no permission to be sent: without tokens a browser on this machine is let in."""
    service.register()
    path = "/runs/default/drift/reset"
    crossed = service.client.post(path, headers={"Sec-Fetch-Site": "cross-site"})
    assert (crossed.status_code, crossed.json()["type"]) == (403, "urn:draftalign:cross-site")
    assert service.client.post(path, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 202
    assert service.client.post(path).status_code == 202
    assert service.client.get("/runs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "http://service:8401"])
def test_nor_where_a_browser_sends_an_origin_alone(service: RunningService, origin: str) -> None:
    """As it does to a plain http:// name, with a login that it keeps for that name."""
    service.register()
    path, here = "/runs/default/drift/reset", str(service.client.base_url).rstrip("/")
    crossed = service.client.post(path, headers={"Origin": origin})
    assert (crossed.status_code, crossed.json()["type"]) == (403, "urn:draftalign:cross-site")
    assert service.client.post(path, headers={"Origin": here}).status_code == 202
    assert service.client.post(path, headers={"Origin": origin, "Sec-Fetch-Site": "same-origin"}).status_code == 202
