"""An object store on loopback: moto's S3 behind a door that records every request and can misbehave."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET, SECRET = "drafters", "store-secret"
#: What answers a request in place of the store; None leaves it to the store.
Fault = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes] | None]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name
        """Print nothing."""


class Store:
    """A real HTTP server with one bucket."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Fault | None = None
        self._one_put = threading.Lock()  # moto looks at a put's condition, and puts, in two steps
        self.app = DomainDispatcherApplication(create_backend_app)
        self.port = 0
        self.up()

    def up(self) -> None:
        """Listen, on the port of before."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def down(self) -> None:
        """Refuse connections. What is stored stays."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        self.headers.append({name: value for name, value in environ.items() if name.startswith("HTTP_")})
        if self.fault is not None and (answer := self.fault(environ, start)) is not None:
            return answer
        with self._one_put if environ["REQUEST_METHOD"] == "PUT" else contextlib.nullcontext():
            answered: Iterable[bytes] = self.app(environ, start)
        return answered

    def count(self, method: str, end: str = "") -> int:
        """How many requests of a method ended their path so."""
        return sum(1 for asked, path in self.requests if asked == method and path.endswith(end))

    def client(self) -> Any:
        """A client of another library, to look and to meddle."""
        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1")

    def stored(self) -> list[str]:
        """Everything that is stored."""
        return sorted(one["Key"] for one in self.client().list_objects_v2(Bucket=BUCKET).get("Contents", []))


def failing(method: str, status: str = "500 Internal Server Error", end: str = "") -> Fault:
    """Every request of a method fails."""

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != method or not environ["PATH_INFO"].endswith(end):
            return None
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(status, [("Content-Length", "4")])
        return [b"fail"]

    return fault


def answering(body: Callable[[], Iterator[bytes]], length: int) -> Fault:
    """Every GET of a model is answered with these bytes."""

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith("model.safetensors"):
            return None
        start("200 OK", [("Content-Length", str(length))])
        return body()

    return fault


def losing_answers(store: Store, method: str, part: str, times: int = 1) -> Fault:
    """The store does what some requests ask, and their answers are lost."""
    left = [times]

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != method or part not in environ["PATH_INFO"] or not left[0]:
            return None
        left[0] -= 1
        b"".join(store.app(environ, lambda *_: None))
        start("500 Internal Server Error", [("Content-Length", "4")])
        return [b"lost"]

    return fault


def silent(seconds: float) -> Fault:
    """Every request is answered late."""

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        time.sleep(seconds)
        return None

    return fault


def signed_only() -> Fault:
    """No PUT but what its URL was signed for: a verifier of its own, by AWS' description of signature version 4.

    Every header that is signed came with that value, and the body has the digest and length that its headers say.
    """

    def fault(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != "PUT" or "X-Amz-Signature" not in environ["QUERY_STRING"]:
            return None
        query = dict(parse_qsl(environ["QUERY_STRING"], strict_parsing=True))
        signature, scope = query.pop("X-Amz-Signature"), query["X-Amz-Credential"].split("/")[1:]
        sent = {name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name[:5] == "HTTP_"}
        sent["content-length"] = environ.get("CONTENT_LENGTH", "")
        signed = query["X-Amz-SignedHeaders"].split(";")
        canonical = [
            "PUT",
            quote(environ["PATH_INFO"]),
            "&".join(f"{quote(name, '')}={quote(value, '')}" for name, value in sorted(query.items())),
            *(f"{name}:{sent.get(name, '')}" for name in signed),
            "",
            ";".join(signed),
            "UNSIGNED-PAYLOAD",
        ]
        request = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
        text = "\n".join([query["X-Amz-Algorithm"], query["X-Amz-Date"], "/".join(scope), request])
        key = b"AWS4" + SECRET.encode()
        for part in (*scope, text):
            key = hmac.digest(key, part.encode(), "sha256")
        body = environ["wsgi.input"].read(int(sent["content-length"] or 0))
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if key.hex() == signature and digest == sent.get("x-amz-checksum-sha256", digest):
            environ["wsgi.input"] = io.BytesIO(body)
            return None
        start("403 Forbidden" if key.hex() != signature else "400 Bad Request", [("Content-Length", "7")])
        return [b"refused"]

    return fault


def running_store(monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> Iterator[Store]:
    """A store with an empty bucket, and the environment that leads to it. `fault`: from then on."""
    store = Store()
    environment = {
        "AWS_ACCESS_KEY_ID": "store-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store.client().create_bucket(Bucket=BUCKET)
    store.fault = fault
    try:
        yield store
    finally:
        store.fault = None
        bucket = store.client()
        for key in store.stored():
            bucket.delete_object(Bucket=BUCKET, Key=key)
        bucket.delete_bucket(Bucket=BUCKET)
        store.down()
