"""Published drafters in object storage: there before `latest` names them, fetched without our token, never believed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import Engine, drafter_bytes, drafter_config, eventually, start_agent

pytest.importorskip("obstore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, Fault, Store, answering, failing, silent
from helpers.service.service_fixtures import RunningService, publish
from pydantic import ValidationError

from rl_hooks.agent.download import fetch_release
from rl_hooks.format.release import parse_manifest
from service.api import drafters as service_drafters
from service.errors import ConfigurationError, ObjectStoreError
from service.monitor.events import GateEvidence
from service.settings import Settings
from service.storage.drafters import objects
from service.storage.drafters.objects import Objects
from service.storage.drafters.versions import Manifest
from service.storage.layout import Layout
from service.storage.registry import Registry

URL = f"s3://{BUCKET}/some/prefix"
MODEL = drafter_bytes(1)
CONFIG = json.dumps(drafter_config())
TOKEN = "of-the-engine"


@pytest.fixture
def registry(store: Store, tmp_path: Path) -> Registry:
    layout = Layout(tmp_path / "state")
    layout.make_run("default")
    return Registry(layout, URL)


@pytest.fixture
def service(store: Store, serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch) -> RunningService:
    """The API with the store and a token; its fixture's registry publishes to the store as the worker's does."""
    monkeypatch.setattr(service_drafters, "_STORE_SECONDS", 60.0)  # however slow this machine is
    served = serve(drafters_url=URL, tokens=f"{TOKEN}:admin")
    served.registry = Registry(served.layout, URL)
    served.client.headers["Authorization"] = f"Bearer {TOKEN}"
    served.register()
    return served


def keys(manifest: Manifest) -> list[str]:
    return [f"some/prefix/runs/{manifest.run}/{manifest.digest}/{file.name}" for file in manifest.files]


def fetch(service: RunningService, manifest: Manifest, cache: Path) -> bytes:
    """Fetch as the agent does; returns what it would give to an engine."""
    offered = parse_manifest(json.loads(manifest.model_dump_json()), manifest.run)
    return (fetch_release(service.client, offered, cache).path / "model.safetensors").read_bytes()


# --- publishing
def test_a_version_is_in_the_store_when_latest_names_it(
    store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    point = Registry._point

    def looked(*args: Any) -> None:
        found.append(store.stored())
        point(*args)

    monkeypatch.setattr(Registry, "_point", looked)
    manifest = publish(registry, content=b"weights")
    assert found == [keys(manifest)]
    (stored,) = (store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys(manifest)[1:])
    assert stored == b"weights"


def test_a_version_that_was_sent_is_stored_when_it_is_promoted(store: Store, registry: Registry) -> None:
    first = publish(registry)
    staged = registry.stage("default")
    (staged / "model.safetensors").write_bytes(b"sent")
    sent, _ = registry.archive("default", staged, like=first, reason="r", by=None, most_waiting=4)
    assert store.stored() == sorted(keys(first))
    registry.promote("default", sent.version, "better", GateEvidence(), instead_of=first.version)
    assert store.stored() == sorted(keys(first) + keys(sent))


@pytest.mark.parametrize("fault", [failing("PUT"), failing("PUT", "403 Forbidden"), failing("HEAD", "403 Forbidden")])
def test_a_store_that_fails_leaves_latest_as_it_is_and_the_next_attempt_publishes(
    store: Store, registry: Registry, fault: Fault
) -> None:
    before = publish(registry)
    store.fault = fault
    with pytest.raises(ObjectStoreError, match="the object store failed at runs/default/"):
        publish(registry, content=b"next")
    assert registry.latest("default") == before
    assert registry.versions("default") == [before.version]
    store.fault = None
    after = publish(registry, content=b"next")
    assert registry.latest("default") == after
    assert store.stored() == sorted(keys(before) + keys(after))


def test_a_store_that_is_away_is_an_os_error_and_publishes_when_it_is_back(store: Store, registry: Registry) -> None:
    store.down()
    with pytest.raises(OSError, match="the object store failed"):
        publish(registry)
    assert registry.latest("default") is None
    store.up()
    assert store.stored() == []
    assert keys(publish(registry)) == store.stored()


def test_a_store_that_does_not_answer_is_given_up(store: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store.fault = silent(4.0)
    with pytest.raises(ObjectStoreError):
        Objects(URL, request_seconds=0.2).put("default", "0" * 64, tmp_path / "config.json", 2)


def test_a_put_whose_answer_was_lost_recognises_its_own_write(store: Store, registry: Registry) -> None:
    lost: list[str] = []

    def lose(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes] | None:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "PUT" or path in lost:
            return None
        lost.append(path)
        b"".join(store.app(environ, lambda *_: None))  # stored
        start("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]

    store.fault = lose
    manifest = publish(registry)
    assert len(lost) == 2
    assert store.stored() == keys(manifest)


def test_an_object_of_another_length_is_neither_used_nor_overwritten(store: Store, registry: Registry) -> None:
    manifest = publish(registry)
    store.client().put_object(Bucket=BUCKET, Key=keys(manifest)[1], Body=b"meddled with")
    with pytest.raises(ObjectStoreError, match=r"holds 12 bytes as .* expected 7; delete that object"):
        publish(registry)
    assert registry.latest("default") == manifest


_KILLED = """
import os, signal, sys
from pathlib import Path
from service.storage.layout import Layout
from service.storage.registry import Registry
from helpers.service.service_fixtures import publish
Registry._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publish(Registry(Layout(Path(sys.argv[1])), sys.argv[2]))
"""


def test_a_publisher_killed_after_its_puts_leaves_nothing_that_is_not_used_or_deleted(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "state"), URL], env=_environment())
    assert done.returncode == -9
    assert registry.latest("default") is None
    left = store.stored()
    assert len(left) == 2
    other = publish(registry, content=b"another candidate")
    registry.prune("default", 1)
    assert store.stored() == sorted(left + keys(other)), "the killed one may be about to publish"
    puts = store.count("PUT")
    again = publish(registry)
    assert keys(again) == left
    assert store.count("PUT") == puts, "what was there was found"
    Registry._delete(registry, "default", other.version)  # a version that nothing names any more
    monkeypatch.setattr(objects, "_LEFTOVER_SECONDS", -3600.0)
    registry.prune("default", 1)
    assert store.stored() == left


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


_UPLOAD = """
import sys
from pathlib import Path
from service.storage.drafters.objects import Objects
objects, size = Objects(sys.argv[1]), int(sys.argv[3])
small = Path(sys.argv[2]).with_name("small")
small.write_bytes(b"x")
objects.put("default", "1" * 64, small, 1)
def peak():  # of this program alone: ru_maxrss may be the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
objects.put("default", "0" * 64, Path(sys.argv[2]), size)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_drafter_is_uploaded_in_parts_that_memory_holds_few_of(store: Store, tmp_path: Path) -> None:
    size = 160 << 20
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", _UPLOAD, URL, str(tmp_path / "model.safetensors"), str(size)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 << 10, "KiB"
    assert store.count("PUT", "model.safetensors") == size // objects._PART_BYTES


# --- deleting
def test_pruned_versions_and_deleted_runs_leave_no_object(store: Store, service: RunningService) -> None:
    service.register("default2")
    kept = service.publish("default2")
    first, second, third = (service.publish(content=content) for content in (b"1", b"2", b"3"))
    assert service.registry.prune("default", 1, protect={first.version}) == [second.version]
    assert store.stored() == sorted(keys(kept) + keys(first) + keys(third))
    store.fault = failing("GET", "403 Forbidden")
    reply = service.client.delete("/runs/default")
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:object-store-away")
    store.fault = None
    assert service.client.delete("/runs/default").is_success
    assert store.stored() == keys(kept)


def test_a_store_that_is_away_keeps_no_version_from_being_pruned(store: Store, registry: Registry) -> None:
    first, second = publish(registry), publish(registry, content=b"2")
    store.fault = failing("GET", "403 Forbidden")
    assert registry.prune("default", 1) == [first.version]
    store.fault = None
    assert registry.versions("default") == [second.version]


@pytest.mark.parametrize("gone", [False, True])
def test_no_object_is_deleted_while_a_manifest_is_damaged_and_versions_are_pruned_all_the_same(
    store: Store, registry: Registry, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    """Which objects are its version's, nobody knows then."""
    first, second, third = (publish(registry, content=content) for content in (b"1", b"2", b"3"))
    path = registry.path("default", second.version, "manifest.json")
    sound = path.read_bytes()
    path.unlink() if gone else path.write_bytes(b"{")
    assert registry.prune("default", 1, protect={second.version}) == [first.version]
    assert store.stored() == sorted(keys(first) + keys(second) + keys(third))
    assert "no object is deleted while manifests are damaged" in caplog.text
    path.write_bytes(sound)
    assert registry.prune("default", 1) == [second.version]
    assert not set(keys(second)) & set(store.stored())


# --- downloading
def test_a_download_is_redirected_to_a_url_that_needs_no_token(store: Store, service: RunningService) -> None:
    manifest = service.publish(content=b"weights")
    path = f"/drafter/{manifest.version}/model.safetensors"
    reply = service.client.get(path)
    assert (reply.status_code, reply.content, reply.headers["cache-control"]) == (307, b"", "no-store")
    location = reply.headers["location"]
    assert httpx.get(location).content == b"weights"
    part = httpx.get(location, headers={"Range": "bytes=3-"})
    assert (part.status_code, part.content) == (206, b"ghts")
    assert "X-Amz-Expires=900&" in location
    assert "X-Amz-Signature=" in location
    assert TOKEN not in location
    tag = f'"{hashlib.sha256(b"weights").hexdigest()}"'
    assert service.client.get(path, headers={"If-None-Match": tag}).status_code == 304
    assert httpx.get(service.url + path).status_code == 401
    direct = service.client.get(path, params={"direct": True})
    assert (direct.status_code, direct.content, direct.headers["etag"]) == (200, b"weights", tag)
    assert service.client.get(f"/drafter/{manifest.version}/manifest.json").status_code == 200


@pytest.mark.parametrize("fault", [failing("HEAD", "403 Forbidden"), failing("HEAD"), silent(4.0)])
def test_the_api_sends_its_own_bytes_while_the_store_fails(
    store: Store, service: RunningService, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_drafters, "_STORE_SECONDS", 1.0)
    manifest = service.publish(content=b"weights")
    store.fault = fault
    reply = service.client.get(f"/drafter/{manifest.version}/model.safetensors")
    assert (reply.status_code, reply.content) == (200, b"weights")


def test_a_version_of_before_the_setting_is_sent_by_the_api(store: Store, service: RunningService) -> None:
    manifest = publish(Registry(service.layout), content=b"weights")
    reply = service.client.get(f"/drafter/{manifest.version}/model.safetensors")
    assert (reply.status_code, reply.content) == (200, b"weights")


def test_a_directory_is_a_copy_that_nobody_is_redirected_to(
    serve: Callable[..., RunningService], tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'copies'}"
    service = serve(drafters_url=url)
    service.register()
    manifest = publish(Registry(service.layout, url), content=b"weights")
    copies = tmp_path / "copies" / "runs" / "default" / manifest.digest
    assert (copies / "model.safetensors").read_bytes() == b"weights"
    reply = service.client.get(f"/drafter/{manifest.version}/model.safetensors")
    assert (reply.status_code, reply.content) == (200, b"weights")
    service.client.delete("/runs/default")
    assert [path for path in copies.rglob("*") if path.is_file()] == []


def test_an_agent_fetches_from_the_store_which_never_sees_its_token(
    store: Store, service: RunningService, tmp_path: Path
) -> None:
    manifest = service.publish(content=MODEL, config=CONFIG)
    engine = Engine()
    try:
        with start_agent(service.url, engine, cache=tmp_path / "cache", token=TOKEN):
            eventually(lambda: engine.version == manifest.version)
        (read,) = engine.read
        assert read["model.safetensors"] == hashlib.sha256(MODEL).hexdigest()
    finally:
        engine.down()
    assert store.count("GET", "model.safetensors") == store.count("GET", "config.json") == 1
    fetched = [headers for (method, _), headers in zip(store.requests, store.headers, strict=True) if method == "GET"]
    assert all("HTTP_AUTHORIZATION" not in h or h["HTTP_AUTHORIZATION"].startswith("AWS4-") for h in fetched)
    assert TOKEN not in str(store.headers)


def test_a_client_that_redirects_by_itself_would_be_seen(store: Store, service: RunningService) -> None:
    """The recorder is no blind witness: it sees a token that is sent."""
    manifest = service.publish()
    location = service.client.get(f"/drafter/{manifest.version}/model.safetensors").headers["location"]
    httpx.get(location, headers={"Authorization": f"Bearer {TOKEN}"})
    assert TOKEN in str(store.headers)


def _wrong() -> Iterator[bytes]:
    yield MODEL[:-1] + bytes([MODEL[-1] ^ 1])


def _endless() -> Iterator[bytes]:
    yield MODEL + b"and more"


def _broken() -> Iterator[bytes]:
    yield MODEL[: len(MODEL) // 2]


@pytest.mark.parametrize(
    "fault",
    [
        answering(_wrong, len(MODEL)),
        answering(_endless, len(MODEL) + 8),
        answering(_broken, len(MODEL)),
        answering(_broken, len(MODEL) // 2),
        failing("GET", end="model.safetensors"),
        failing("GET", "307 Temporary Redirect", end="model.safetensors"),
        failing("GET", "404 Not Found", end="model.safetensors"),
    ],
    ids=["wrong", "longer", "breaks off", "shorter", "500", "redirects on", "gone"],
)
def test_wrong_bytes_of_the_store_are_refused_and_the_api_gives_the_right_ones(
    store: Store, service: RunningService, tmp_path: Path, fault: Fault
) -> None:
    manifest = service.publish(content=MODEL, config=CONFIG)
    store.fault = fault
    assert fetch(service, manifest, tmp_path / "cache") == MODEL
    assert store.count("GET", "model.safetensors") == 1, "it was asked, and not asked again"


def test_an_engine_that_cannot_reach_the_store_gets_the_apis_bytes(
    store: Store, service: RunningService, tmp_path: Path
) -> None:
    manifest = service.publish(content=MODEL, config=CONFIG)
    asked = store.port

    def elsewhere(request: httpx.Request) -> httpx.Response:
        """The API, which reaches the store by an address that means nothing here."""
        reply = httpx.get(request.url, headers={"Authorization": f"Bearer {TOKEN}"})
        headers = dict(reply.headers)
        if reply.status_code == 307:
            headers["location"] = headers["location"].replace(f":{asked}/", ":9/")
        return httpx.Response(reply.status_code, headers=headers, stream=httpx.ByteStream(reply.content))

    offered = parse_manifest(json.loads(manifest.model_dump_json()), "default")
    with httpx.Client(base_url=service.url, transport=httpx.MockTransport(elsewhere)) as client:
        release = fetch_release(client, offered, tmp_path / "cache")
    assert (release.path / "model.safetensors").read_bytes() == MODEL


def test_a_slow_store_is_given_up_for_the_api(store: Store, service: RunningService, tmp_path: Path) -> None:
    manifest = service.publish(content=MODEL, config=CONFIG)

    def slow() -> Iterator[bytes]:
        yield MODEL[:10]
        time.sleep(9)

    store.fault = answering(slow, len(MODEL))
    service.client.timeout = httpx.Timeout(4.0)
    assert fetch(service, manifest, tmp_path / "cache") == MODEL


# --- settings
@pytest.mark.parametrize("url", ["", "bucket", "http://bucket/x", "memory:///", "s3:bucket"])
def test_a_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="drafters_url must begin with one of s3://"):
        Settings(drafters_url=url)


def test_a_url_that_obstore_refuses_names_the_setting() -> None:
    with pytest.raises(ConfigurationError, match="drafters_url s3://"):
        Objects("s3://")


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[s3\]'"):
        Objects(URL)
