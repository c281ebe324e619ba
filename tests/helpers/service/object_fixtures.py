"""An object store on loopback: moto's S3 behind a door that records every request and can misbehave.

`DRAFTALIGN_TEST_S3=http://127.0.0.1:7480` with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` puts another store
behind that door (CONTRIBUTING.md). It sees each request as it was sent, `Host` too, so it checks our signatures. A
store of `https://` answers to its own name alone: it is used without the door, and tests that need one are skipped.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import hmac
import http.client
import io
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

OTHER = os.environ.get("DRAFTALIGN_TEST_S3", "")
#: Another store's is made for this process, and deleted at its end.
BUCKET = f"draftalign-test-{uuid.uuid4().hex[:12]}" if OTHER else "drafters"
SECRET = os.environ.get("AWS_SECRET_ACCESS_KEY", "") if OTHER else "store-secret"
#: What answers a request in place of the store; None leaves it to the store.
Fault = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes] | None]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name
        """Print nothing."""


def _forwarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """What the other store answers to this request."""
    headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
    if (size := environ.get("CONTENT_LENGTH")) is not None:
        headers["Content-Length"] = size
    if kind := environ.get("CONTENT_TYPE"):
        headers["Content-Type"] = kind
    body = None if size is None else environ["wsgi.input"].read(int(size))
    headers.pop("EXPECT", None)  # it has been answered: the body is here
    connection = http.client.HTTPConnection(urlsplit(OTHER).netloc, timeout=60.0)
    with contextlib.closing(connection):
        connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body=body, headers=headers)
        reply = connection.getresponse()
        content = reply.read()
    hop = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
    found = [(name, value) for name, value in reply.getheaders() if name.lower() not in hop]
    if reply.getheader("Content-Length") is None:
        found.append(("Content-Length", str(len(content))))
    start(f"{reply.status} {reply.reason}", found)
    return [content]


class Store:
    """A real HTTP server with one bucket."""

    def __init__(self) -> None:
        self._door = not OTHER.startswith("https://")
        self._requests: list[tuple[str, str]] = []
        self._headers: list[dict[str, str]] = []
        self._fault: Fault | None = None
        self._one_put = threading.Lock()  # moto looks at a put's condition, and puts, in two steps
        self.app: Any = _forwarded if OTHER else DomainDispatcherApplication(create_backend_app)
        self.port = 0
        if self._door:
            self.up()

    def _at_the_door(self) -> None:
        if not self._door:
            pytest.skip("it needs a door before the store, and a store of https:// is used without")

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Method and path of each request so far."""
        self._at_the_door()
        return self._requests

    @property
    def headers(self) -> list[dict[str, str]]:
        """Their headers."""
        self._at_the_door()
        return self._headers

    @property
    def fault(self) -> Fault | None:
        """What is asked before the store."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        if fault is not None:
            self._at_the_door()
        self._fault = fault

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}" if self._door else OTHER

    def up(self) -> None:
        """Listen, on the port of before."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def down(self) -> None:
        """Refuse connections. What is stored stays."""
        self._at_the_door()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        self._requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        self._headers.append({name: value for name, value in environ.items() if name.startswith("HTTP_")})
        if self.fault is not None and (answer := self.fault(environ, start)) is not None:
            return answer
        with self._one_put if environ["REQUEST_METHOD"] == "PUT" and not OTHER else contextlib.nullcontext():
            answered: Iterable[bytes] = self.app(environ, start)
        return answered

    def count(self, method: str, end: str = "") -> int:
        """How many requests of a method ended their path so."""
        return sum(1 for asked, path in self.requests if asked == method and path.endswith(end))

    def client(self) -> Any:
        """A client of another library, to look and to meddle."""
        return boto3.client("s3", endpoint_url=self.url)

    def stored(self) -> list[str]:
        """Everything that is stored."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", []))


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
        told: list[tuple[str, Any]] = []
        content = b"".join(store.app(environ, lambda *answer: told.append(answer[:2])))
        if not told[0][0].startswith("2"):  # nothing was done
            start(*told[0])
            return [content]
        left[0] -= 1
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


@functools.cache
def _make_bucket() -> None:
    """Make the bucket, once for this process."""
    client = boto3.client("s3", **({"endpoint_url": OTHER} if OTHER else {}))
    client.create_bucket(Bucket=BUCKET)
    if OTHER:

        def delete() -> None:
            for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
                client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
            client.delete_bucket(Bucket=BUCKET)

        atexit.register(delete)


def running_store(monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> Iterator[Store]:
    """A store with an empty bucket, and the environment that leads to it. `fault`: from then on."""
    store = Store()
    if not OTHER:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "store-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", region := os.environ.get("AWS_REGION", "us-east-1"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    try:
        _make_bucket()
        store.fault = fault
        yield store
    finally:
        store.fault = None
        bucket = store.client()
        for key in store.stored():
            bucket.delete_object(Bucket=BUCKET, Key=key)
        if store.port:
            store.down()
