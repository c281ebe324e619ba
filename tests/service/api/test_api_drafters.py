"""What inference servers and operators ask of the registry over HTTP."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers.service.service_fixtures import RunningService, rollout_file

from service.monitor.events import GateEvidence
from service.storage.layout import locked


def test_before_the_first_publish_latest_is_a_404_that_says_so(service: RunningService) -> None:
    reply = service.client.get("/drafter/latest")
    assert (reply.status_code, reply.json()["type"]) == (404, "urn:draftalign:no-drafter-yet")


def test_latest_is_the_manifest_with_its_etag(service: RunningService) -> None:
    manifest = service.publish(content=b"abc", gate=GateEvidence(gain=0.1))
    reply = service.client.get("/drafter/latest", params={"run": "default"})
    assert reply.status_code == 200
    document = reply.json()
    assert document == manifest.model_dump(mode="json")
    assert document["aux_layers_convention"] == "entering"
    assert reply.headers["etag"] == f'"1-{manifest.version}"'
    same = service.client.get("/drafter/latest", headers={"If-None-Match": reply.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == reply.headers["etag"]
    service.registry.push_again("default", "lost")
    again = service.client.get("/drafter/latest", headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.json()["sequence"]) == (200, 2)


def test_a_long_poll_returns_when_a_drafter_is_published(service: RunningService) -> None:
    first = service.publish()
    timer = threading.Timer(0.4, service.publish, kwargs={"content": b"new"})
    timer.start()
    # An answer that comes only as the poll's time ends is too late.
    known = {"If-None-Match": first.etag}
    reply = service.client.get("/drafter/latest", params={"wait": 60}, headers=known, timeout=45.0)
    timer.join()
    assert reply.status_code == 200
    assert reply.json()["sequence"] == 2


def test_a_long_poll_also_waits_for_the_very_first_drafter(service: RunningService) -> None:
    timer = threading.Timer(0.2, service.publish)
    timer.start()
    assert service.client.get("/drafter/latest", params={"wait": 15}).status_code == 200
    timer.join()


def test_a_long_poll_ends_with_304_in_time(service: RunningService) -> None:
    etag = service.publish().etag
    started = time.monotonic()
    reply = service.client.get("/drafter/latest", params={"wait": 0.3}, headers={"If-None-Match": etag})
    assert reply.status_code == 304
    assert time.monotonic() - started > 0.25


def test_a_long_poll_does_not_hold_up_a_stop(service: RunningService) -> None:
    etag = service.publish().etag
    statuses: list[int] = []

    def poll() -> None:
        reply = httpx.get(
            f"{service.url}/drafter/latest", params={"wait": 60}, headers={"If-None-Match": etag}, timeout=90
        )
        statuses.append(reply.status_code)

    thread = threading.Thread(target=poll)
    thread.start()
    service.wait_for_requests()
    service.server.config.timeout_graceful_shutdown = 600
    service.server.handle_exit(15, None)
    thread.join(45)
    assert statuses == [304], "its own time is not over"


@pytest.mark.parametrize("wait", ["-1", "nan", "x"])
def test_a_bad_wait_is_a_422_that_names_it(service: RunningService, wait: str) -> None:
    service.publish()
    reply = service.client.get("/drafter/latest", params={"wait": wait})
    assert (reply.status_code, reply.json()["field"]) == (422, "wait")


def test_a_file_downloads_with_its_content_digest_as_etag(service: RunningService) -> None:
    content = bytes(range(256)) * 20_000
    manifest = service.publish(content=content)
    path = f"/drafter/{manifest.version}/model.safetensors"
    reply = service.client.get(path, params={"run": "default"})
    assert reply.content == content
    digest = hashlib.sha256(content)
    assert reply.headers["etag"] == f'"{digest.hexdigest()}"'
    assert reply.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert "immutable" in reply.headers["cache-control"]
    assert service.client.get(path, headers={"If-None-Match": reply.headers["etag"]}).status_code == 304
    assert service.client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_download_resumes_by_range(service: RunningService) -> None:
    content = b"0123456789" * 1000
    manifest = service.publish(content=content)
    path = f"/drafter/{manifest.version}/model.safetensors"
    part = service.client.get(path, headers={"Range": "bytes=9990-"})
    assert (part.status_code, part.content) == (206, b"0123456789")
    assert part.headers["content-range"] == "bytes 9990-9999/10000"
    etag = part.headers["etag"]
    same = service.client.get(path, headers={"Range": "bytes=5-9", "If-Range": etag})
    assert (same.status_code, same.content) == (206, b"56789")
    other = service.client.get(path, headers={"Range": "bytes=5-9", "If-Range": '"other"'})
    assert (other.status_code, len(other.content)) == (200, 10_000)
    for wrong, status in (("bytes=10000-", 416), ("bytes=x-y", 400), ("lines=1-2", 400)):
        reply = service.client.get(path, headers={"Range": wrong})
        assert (reply.status_code, reply.json()["field"]) == (status, "Range"), wrong
        assert reply.headers["content-type"] == "application/problem+json"
    past = service.client.get(path, headers={"Range": "bytes=10000-"})
    assert past.headers["content-range"] == "bytes */10000"


def test_only_files_of_the_manifest_can_be_had(service: RunningService) -> None:
    version = service.publish().version
    stray = service.layout.drafter("default", version) / "stray.bin"
    stray.write_bytes(b"x")
    for name in ("stray.bin", "..%2f..%2frun.json", "%2e%2e", "..%2flatest.json", "%2fetc%2fpasswd", "a%00b"):
        assert service.client.get(f"/drafter/{version}/{name}").status_code == 404, name
    for bad in ("v1", "..", "%2e%2e", "v000001-zzzzzzzz", "v999999-00000000", version + "%0a"):
        assert service.client.get(f"/drafter/{bad}/config.json").status_code == 404, bad
    assert service.client.get(f"/drafter/{version}/manifest.json").json()["version"] == version


def test_the_history_and_a_rollback(service: RunningService) -> None:
    first, second = service.publish(), service.publish(content=b"second")
    reply = service.client.post(f"/drafter/{first.version}/rollback?run=default", json={"reason": "second is slow"})
    assert reply.status_code == 200
    assert (reply.json()["version"], reply.json()["sequence"]) == (first.version, 3)
    again = service.client.post(f"/drafter/{first.version}/rollback?run=default", json={"reason": "second is slow"})
    assert (again.status_code, again.json()) == (200, reply.json()), "a call without an answer may be repeated"
    listing = service.client.get("/drafters").json()
    assert [v["version"] for v in listing["versions"]] == [first.version, second.version]
    assert listing["latest"]["version"] == first.version
    assert [e["event"] for e in listing["history"]] == ["published", "published", "rolled_back"]
    assert listing["history"][-1]["reason"] == "second is slow"


def test_a_rollback_that_says_anything_else_is_another_one(service: RunningService) -> None:
    first, second = service.publish(), service.publish(content=b"second")

    def rolled(version: str, **body: object) -> int:
        reply = service.client.post(f"/drafter/{version}/rollback?run=default", json={"reason": "slow"} | body)
        return int(reply.json()["sequence"])

    assert [rolled(first.version) for _ in range(2)] == [3, 3]
    assert rolled(first.version, by="ada") == 4
    assert rolled(first.version, by="ada", reason="slower") == 5
    assert [rolled(first.version, override_canary=True) for _ in range(2)] == [6, 6]
    assert [rolled(version) for version in (second.version, first.version)] == [7, 8]
    service.registry.push_again("default", "an engine lost it")
    assert rolled(first.version) == 10


def test_a_person_overrides_canaries_by_a_field_until_the_next_offer(service: RunningService) -> None:
    first, _ = service.publish(), service.publish(content=b"second")
    path = f"/drafter/{first.version}/rollback?run=default"

    def latest() -> bool:
        return bool(service.client.get("/drafter/latest").json()["override_canary"])

    service.client.post(path, json={"reason": "pushed again, says the reason"}).raise_for_status()
    assert not latest()
    answer = service.client.post(path, json={"reason": "x", "override_canary": True})
    assert (answer.json()["override_canary"], latest()) == (True, True)
    assert service.client.get("/drafters").json()["history"][-1]["override_canary"] is True
    service.registry.hold("default", first.version, "keep it")
    assert latest(), "the offer is the same"
    service.registry.release("default", first.version)
    service.registry.push_again("default", "an engine lost it")
    assert not latest(), "the service overrides no canary"
    assert service.client.post(path, json={"reason": "x", "override_canary": "yes"}).status_code == 422


def test_what_moves_a_runs_drafter_names_the_run(service: RunningService) -> None:
    version = service.publish().version
    for method, call in (("POST", "rollback"), ("PUT", "hold"), ("DELETE", "hold")):
        reply = service.client.request(method, f"/drafter/{version}/{call}", json={"reason": "x"})
        assert (reply.status_code, reply.json()["field"]) == (422, "run"), call
    assert service.client.post("/drafters", content=b"x").json()["field"] == "run"


def test_a_rollback_beside_a_stopped_publisher_says_who_is_in_the_way(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = service.publish().version
    monkeypatch.setattr("service.storage.layout.LOCK_SECONDS", 0.05)
    with locked(service.layout, "default"):
        reply = service.client.post(f"/drafter/{version}/rollback?run=default", json={"reason": "x"})
        assert service.client.get("/drafter/latest").json()["sequence"] == 1, "reading needs no lock"
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:registry-busy")
    assert "Retry-After" in reply.headers
    assert service.client.post(f"/drafter/{version}/rollback?run=default", json={"reason": "x"}).status_code == 200


def test_a_rollback_needs_a_known_version_and_a_reason(service: RunningService) -> None:
    version = service.publish().version
    unknown = service.client.post("/drafter/v000009-00000000/rollback?run=default", json={"reason": "x"})
    assert unknown.status_code == 404
    bodies: list[object] = [{}, {"reason": ""}, {"reason": 3}, {"reason": "x", "force": True}, []]
    for body in bodies:
        assert service.client.post(f"/drafter/{version}/rollback?run=default", json=body).status_code == 422, body
    form = service.client.post(f"/drafter/{version}/rollback?run=default", data={"reason": "x"})
    assert form.status_code == 415, "what a web page elsewhere could send without asking"
    service.registry.path("default", version, "model.safetensors").write_bytes(b"Weights")
    damaged = service.client.post(f"/drafter/{version}/rollback?run=default", json={"reason": "x"})
    assert damaged.status_code == 409


def test_uploads_do_not_wait_for_those_who_wait_for_the_registrys_lock(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is stopped keeps it, and every agent's dead drafter is to be pushed again."""
    monkeypatch.setattr("service.storage.layout.LOCK_SECONDS", 1.0)
    version = service.publish().version

    def roll_back() -> int:
        return service.client.post(
            f"/drafter/{version}/rollback?run=default", json={"reason": "x"}, timeout=60.0
        ).status_code

    with ThreadPoolExecutor(40) as threads:
        with locked(service.layout, "default"):
            waiting = [threads.submit(roll_back) for _ in range(40)]
            while not waiting[0].done():
                time.sleep(0.01)
            assert service.post(rollout_file()).status_code == 202
            assert sum(one.done() for one in waiting) < 20, "they still wait"
        assert {one.result() for one in waiting} == {200, 503}
