"""Who did what: each call that changes something is on the disk before it is done, and what came of it too."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.service.access_fixtures import OTHER, OWN, RULES, UNSATISFIED, TokenFile, ask, request_of
from helpers.service.failover_fixtures import until
from helpers.service.service_fixtures import HEADERS, RunningService, head_file, run_file
from typer.testing import CliRunner

from service.access import audit
from service.access.audit import AuditLog
from service.api.auth import brings_data
from service.api.context import audited
from service.cli.main import app as command_line
from service.storage.layout import Layout


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    made = TokenFile(tmp_path / "tokens.jsonl")
    made.add("boss", "admin")
    made.add("trainer", "write", ("math-*",))
    made.add("engine", "read")
    return made


@pytest.fixture
def guarded(serve: Callable[..., RunningService], tokens: TokenFile) -> RunningService:
    service = serve(token_file=tokens.path)
    service.client.put(f"/runs/{OWN}", content=run_file(), headers=HEADERS | tokens.headers("boss")).raise_for_status()
    service.publish(OWN)
    return service


def logged(service: RunningService, run: str | None = None) -> list[dict[str, Any]]:
    return list(AuditLog(service.layout).read(run))


def lines(service: RunningService) -> list[dict[str, Any]]:
    """In the order in which they were written."""
    texts = [path.read_text() for path in service.layout.audit.glob("*.jsonl")]
    found = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted(found, key=lambda entry: entry.get("ended", entry["time"]))


def test_every_call_that_changes_something_is_written_down(guarded: RunningService, tokens: TokenFile) -> None:
    """All calls of the application: a new one that changes something is here by itself, and must say what it does."""
    for method, template in RULES:
        before = len(lines(guarded))
        call = request_of(guarded, method, template, OWN)
        reply = ask(guarded, call, tokens.headers("boss"))
        new = lines(guarded)[before:]
        if method == "GET" or (method, template) in {
            ("POST", "/rollouts"),
            ("POST", "/rollouts/direct"),
            ("POST", "/acceptance"),
            ("PUT", "/runs/{run}/head"),
        }:
            assert new == [], (method, template)
            continue
        asked, answered = new
        assert asked.keys() == {"time", "id", "token", "client", "run", "call"}
        assert answered.items() >= asked.items()
        assert answered["status"] == reply.status_code, (method, template, reply.text)
        assert (reply.status_code < 300) != ((method, template) in UNSATISFIED), (method, template, reply.text)
        assert (answered["token"], answered["run"], answered["client"]) == ("boss", OWN, "127.0.0.1")
        assert answered["call"] == f"{method} {call['url']}"
        assert answered["action"], "the handler of a call that changes something calls service.api.auth.audit"
        assert abs(answered["ended"] - time.time()) < 60


def test_the_log_says_what_was_done_to_what_and_survives_the_run(guarded: RunningService, tokens: TokenFile) -> None:
    version = guarded.registry.versions(OWN)[0]
    path = f"/drafter/{version}/rollback"
    body = {"reason": "worse on long prompts"}
    guarded.client.post(path, params={"run": OWN}, json=body, headers=tokens.headers("boss")).raise_for_status()
    guarded.client.delete(f"/runs/{OWN}", headers=tokens.headers("boss")).raise_for_status()
    register, rollback, delete = logged(guarded, OWN)
    assert (register["action"], register["status"]) == ("register", 201)
    assert rollback["action"] == "rollback"
    assert (rollback["version"], rollback["reason"]) == (version, "worse on long prompts")
    assert (delete["action"], delete["status"]) == ("delete", 204)
    assert logged(guarded, OTHER) == []


def test_what_failed_is_written_down_with_its_status(guarded: RunningService, tokens: TokenFile) -> None:
    client, boss = guarded.client, tokens.headers("boss")
    assert client.delete("/runs/nothing", headers=boss).status_code == 404
    assert client.put("/runs/new", content=b"x", headers=HEADERS | boss).status_code == 422
    assert [(entry["run"], entry["status"]) for entry in logged(guarded)[1:]] == [("nothing", 404), ("new", 422)]


def test_who_may_not_is_not_written_down(guarded: RunningService, tokens: TokenFile) -> None:
    """A stranger, or a token of other runs, cannot fill the log."""
    before = lines(guarded)
    for headers in ({}, {"Authorization": "Bearer wrong"}, tokens.headers("engine"), tokens.headers("trainer")):
        for method, path in (("DELETE", "/runs/chess"), ("POST", "/healthz"), ("PUT", "/nothing"), ("PUT", "/runs/x")):
            assert guarded.client.request(method, path, headers=headers).status_code in (401, 403, 405)
    assert lines(guarded) == before


def test_without_tokens_the_caller_is_loopback(service: RunningService) -> None:
    service.client.post("/runs/default/drift/reset").raise_for_status()
    register, drift = logged(service)
    assert (register["token"], drift["token"], drift["action"]) == ("loopback", "loopback", "drift reset")


def test_nothing_is_done_that_cannot_be_written_down(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(lines(service))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")  # a full one: test_disk_shares.py

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "append", broken)
        reply = service.client.delete("/runs/default")
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:audit")
        assert service.register("second").status_code == 503
        head = service.client.put("/runs/default/head", content=head_file(1), headers=HEADERS)
        assert head.status_code == 201, "data goes on"
    assert service.client.get("/runs/default").status_code == 200
    assert service.client.get("/runs/second").status_code == 404
    assert len(lines(service)) == before
    service.client.delete("/runs/default").raise_for_status()


def test_a_line_that_is_written_too_late_says_that_nothing_was_done(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, answered = AuditLog.append, threading.Event()

    def slow(audit_log: AuditLog, entry: Mapping[str, Any]) -> None:
        answered.wait(60)
        write(audit_log, entry)

    with monkeypatch.context() as patch:
        patch.setattr(audited, "_AUDIT_SECONDS", 0.05)
        patch.setattr(AuditLog, "append", slow)
        reply = service.client.patch("/runs/default", json={"state": "paused", "reason": "x"})
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:audit")
        answered.set()
        until(lambda: len(lines(service)) == 4, "both lines of the late call")
    (late,) = logged(service)[1:]
    assert (late["call"], late["status"]) == ("PATCH /runs/default", 503)
    assert service.client.get("/runs/default").json()["state"] == "active"


def test_a_slow_disk_keeps_only_what_is_written_down_waiting(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    append = AuditLog.append

    def slow(self: AuditLog, entry: dict[str, Any]) -> None:
        assert let_go.wait(60)
        append(self, entry)

    monkeypatch.setattr(AuditLog, "append", slow)
    waiting = threading.Thread(target=lambda: httpx.post(f"{service.url}/runs/default/drift/reset", timeout=60))
    waiting.start()
    service.wait_for_requests(1)
    for _ in range(5):
        assert service.client.get("/runs/default").status_code == 200
    assert waiting.is_alive(), "the disk has not answered yet"
    let_go.set()
    waiting.join(60)
    assert logged(service)[-1]["status"] == 202


def test_a_process_that_ended_in_between_leaves_what_was_asked(service: RunningService) -> None:
    (path,) = service.layout.audit.glob("*.jsonl")
    text = path.read_text().splitlines(keepends=True)
    path.write_text(text[0] + text[1][:20])  # and a torn line
    service.client.post("/runs/default/drift/reset").raise_for_status()
    asked, answered = logged(service)
    assert (answered["action"], answered["status"]) == ("drift reset", 202)
    assert asked["call"] == "PUT /runs/default"
    assert "status" not in asked


def test_full_files_are_set_aside_and_the_oldest_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_PIECE_BYTES", 1000)
    log = AuditLog(Layout(tmp_path))
    for number in range(200):
        said = {"time": number, "id": str(number), "token": "a" * 50, "run": "r", "call": "DELETE /runs/r"}
        log.append(said | {"status": 200})
    files = sorted((tmp_path / "audit").glob("*.jsonl"))
    assert len(files) == 8
    assert all(path.stat().st_size < 1200 for path in files)
    numbers = [int(entry["id"]) for entry in log.read()]
    assert numbers == list(range(numbers[0], 200)), "oldest first, without a gap"
    assert 45 < len(numbers) < 150


def test_no_token_pushes_out_what_another_did_and_registrations_push_out_nothing_else(
    guarded: RunningService, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write token can register as often as it likes; an admin of some runs can try to delete as often as it likes."""
    tokens.add("helper", "admin", ("math-*",))
    version = guarded.registry.versions(OWN)[0]
    hold = f"/drafter/{version}/hold"
    boss, trainer, helper = (tokens.headers(name) for name in ("boss", "trainer", "helper"))
    guarded.client.put(hold, params={"run": OWN}, json={"reason": "good"}, headers=boss).raise_for_status()
    monkeypatch.setattr(audit, "_PIECE_BYTES", 1000)
    for _ in range(40):
        assert guarded.client.put("/runs/math-9", content=b"x", headers=HEADERS | trainer).status_code == 422
        assert guarded.client.put("/runs/math-9", content=b"x", headers=HEADERS | boss).status_code == 422
        assert guarded.client.delete("/runs/math-8", headers=helper).status_code == 404
    done = [(entry["token"], entry["action"], entry["status"]) for entry in logged(guarded)]
    assert ("boss", "hold", 200) in done
    assert done.count(("trainer", "register", 422)) < 10
    assert done.count(("helper", "delete", 404)) < 30
    assert max(entry["time"] for entry in logged(guarded)) == logged(guarded)[-1]["time"], "oldest first"


def test_several_processes_lose_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_PIECE_BYTES", 4000)
    monkeypatch.setattr(audit, "_KEPT", {"acts": 1000})

    def write(name: str) -> None:
        log = AuditLog(Layout(tmp_path))
        for number in range(100):
            said = {"time": 0, "id": f"{name}{number}", "token": "a", "call": "DELETE /runs/r", "run": "r"}
            log.append(said | {"status": 200})

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(AuditLog(Layout(tmp_path)).read())) == 400


def test_the_command_prints_it(guarded: RunningService, tokens: TokenFile) -> None:
    guarded.client.post(f"/runs/{OWN}/drift/reset", headers=tokens.headers("boss")).raise_for_status()
    state = str(guarded.settings.state_dir)
    printed = CliRunner().invoke(command_line, ["audit", "--state-dir", state])
    first, second = printed.stdout.splitlines()
    (audit_files := guarded.settings.state_dir / "audit").joinpath("notes.jsonl").write_text("{}")
    assert {path.stat().st_mode & 0o077 for path in audit_files.glob("*_*")} == {0}, "its locks too"
    assert f"  boss  {OWN}  register  201  client='127.0.0.1'" in first
    assert f"  boss  {OWN}  drift reset  202" in second
    none = CliRunner().invoke(command_line, ["audit", "--state-dir", state, "--run", "chess"])
    assert (none.stdout, none.stderr) == ("", "the audit log has no entry about a run 'chess'\n")


def test_only_what_comes_all_the_time_is_left_out() -> None:
    assert brings_data("POST", "/rollouts")
    assert not brings_data("POST", "/rollouts/x")
    assert not brings_data("DELETE", "/runs/x/head")
    assert not brings_data("PUT", "/runs/x")
