"""A real nginx with the page's own block, between clients and the API: uploads, long polls, refusals, the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.ports import free_port
from helpers.service.service_fixtures import CONFIG, HEADERS, LAYERS, RunningService, f32, joined, run_file

from rl_hooks import wire
from service.settings import Settings

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
PAGE = Path(__file__).parents[1] / "docs/guide/access.md"
TRAINER = {"Authorization": "Bearer both-secret"}
#: The one server of this configuration is the page's; nginx must write nowhere else.
AROUND = """
daemon off; master_process off; pid nginx.pid; error_log error.log warn;
events {{}}
http {{
    access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    {server}
}}
"""


@pytest.fixture
def api(serve: Callable[..., RunningService]) -> RunningService:
    return serve(tokens="both-secret:write,read")


@pytest.fixture
def proxied(api: RunningService, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of nginx, without TLS, in front of the API."""
    block = re.search(r"^server \{\n.*?^\}\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    port = free_port()
    server = block[0].replace("listen 443 ssl;", f"listen 127.0.0.1:{port};").replace(":8400", f":{api.port}")
    server = re.sub(r"ssl_certificate.*?;\n", "\n", server)
    (tmp_path / "nginx.conf").write_text(AROUND.format(server=server))
    assert NGINX is not None
    nginx = subprocess.Popen([NGINX, "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
    try:
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            while not _answers(client):
                assert nginx.poll() is None, (tmp_path / "error.log").read_text()
                assert time.monotonic() < deadline, "nginx did not start"
                time.sleep(0.01)
            yield client
    finally:
        nginx.terminate()
        nginx.wait(60)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.ConnectError:
        return False


def large_run() -> bytes:
    """Body of PUT /runs/{run} of 64 MiB."""
    config = CONFIG | {"hidden_size": 8192, "vocab_size": 2048, "num_attention_heads": 64, "intermediate_size": 8192}
    metadata = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(config),
        "aux_layers": json.dumps({"convention": "entering", "layers": list(LAYERS)}),
        "target_fingerprint": wire.target_fingerprint(config, LAYERS),
        "policy_version": "0",
    }
    return joined(wire.encode({"embed_tokens": f32(2048, 8192)}, metadata))


@pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian's package is enough)")
def test_uploads_polls_and_refusals_pass_the_documented_proxy(
    api: RunningService, proxied: httpx.Client, tmp_path: Path
) -> None:
    assert "text/html" in proxied.get("/", headers=TRAINER).headers["content-type"]
    assert proxied.get("/runs").status_code == 401
    body = large_run()
    assert len(body) > 64 << 20
    assert proxied.put("/runs/large", content=body, headers=HEADERS | TRAINER).status_code == 201
    wrong = HEADERS | {"Authorization": "Bearer wrong"}
    for client in (api.client, proxied):  # refused amid the upload: the answer is the service's own
        assert client.put("/runs/large", content=body, headers=wrong).json()["status"] == 401
    assert "buffered to a temporary file" not in (tmp_path / "error.log").read_text(), "nothing went to its disk first"
    origin = {"Origin": f"http://{proxied.base_url.netloc.decode()}"}  # as a browser on the page says it
    assert proxied.put("/runs/default", content=run_file(), headers=HEADERS | TRAINER | origin).status_code == 201
    publishing = threading.Timer(1.0, api.publish)
    publishing.start()
    polled = proxied.get("/drafter/latest", params={"run": "default", "wait": 30}, headers=TRAINER)
    publishing.join()
    assert (polled.status_code, polled.json()["version"][:7]) == (200, "v000001")
    file = proxied.get(
        f"/drafter/{polled.json()['version']}/model.safetensors", params={"run": "default"}, headers=TRAINER
    )
    assert file.content == b"weights"


def test_the_block_waits_longer_than_a_long_poll_and_takes_the_largest_upload(tmp_path: Path) -> None:
    text, settings = PAGE.read_text(), Settings(state_dir=tmp_path)
    waits = re.search(r"proxy_read_timeout (\d+)s;", text)
    takes = re.search(r"client_max_body_size (\d+)g;", text)
    assert waits is not None
    assert takes is not None
    assert int(waits[1]) > settings.long_poll_max_seconds
    assert int(takes[1]) << 30 >= max(settings.max_run_bytes, settings.max_body_bytes)
