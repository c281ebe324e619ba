"""`draftalign hold`, `release` and `state` against a served API: what an operator types, and what then is."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from helpers.service.service_fixtures import RunningService, rollout_file
from redis import Redis
from typer.testing import CliRunner

from rl_hooks import wire
from service.cli.main import app
from service.cli.remote import client
from service.cli.remote.client import call, whoami
from service.errors import ConfigurationError, RunNotFound
from service.monitor.events import GateEvidence
from service.storage.registry import Registry


def typed(service: RunningService, *words: str) -> str:
    """The command's output; it must end well."""
    told = CliRunner().invoke(app, [*words, "--service", service.url])
    assert told.exit_code == 0, (told.output, told.exception)
    return told.output


def test_a_version_is_held_and_released(service: RunningService) -> None:
    first, second = service.publish(), service.publish(content=b"second")
    said = typed(service, "hold", first.version, "--reason", "the second is odd")
    assert said == f"run default serves {first.version} until it is released\n"
    held = service.client.get("/runs/default").json()["held"]
    assert (held["version"], held["reason"]) == (first.version, "the second is odd")
    assert held["by"]
    assert typed(service, "drafters").endswith("* is served by run default, and held until `draftalign release`\n")
    assert service.client.get("/drafter/latest").json()["version"] == first.version != second.version
    assert typed(service, "release") == f"run default: {first.version} is released\n"
    assert service.client.get("/runs/default").json()["held"] is None
    nothing = CliRunner().invoke(app, ["release", "--service", service.url])
    assert isinstance(nothing.exception, ConfigurationError)
    assert "holds no version" in str(nothing.exception)


def test_versions_are_listed_and_an_earlier_one_is_served_again(service: RunningService) -> None:
    first = service.publish(gate=GateEvidence(alpha_candidate=3.25))
    second = service.publish(content=b"second", gate=None)
    newest, oldest, said = typed(service, "drafters").splitlines()
    assert newest.startswith(f"* {second.version}  ")
    assert oldest.startswith(f"  {first.version}  ")
    assert oldest.endswith("policy 1  α 3.25 when it was published")
    assert said == "* is served by run default"
    told = typed(service, "rollback", first.version, "--reason", "the second is odd")
    assert told == f"run default serves {first.version}\n"
    assert service.client.get("/drafter/latest").json()["reason"] == "the second is odd"
    again = typed(service, "rollback", first.version)
    assert again == f"run default serves {first.version}, as before: its engines load it again\n"
    repeated = typed(service, "rollback", first.version)
    assert repeated == (
        f"run default serves {first.version}, as before: nothing was changed, for the last rollback was to it and for "
        "the same reason; with another --reason its engines load it again\n"
    )
    over = typed(service, "rollback", first.version, "--override-canary")
    assert over.endswith(": its engines load it again\n")
    assert service.client.get("/drafter/latest").json()["override_canary"] is True
    events = service.client.get("/drafters").json()["history"]
    assert [event["by"] for event in events if event["event"] == "rolled_back"] == [whoami()] * 3


def test_a_rollback_that_takes_long_to_verify_is_waited_for(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large drafter on a network disk."""
    first, _ = service.publish(), service.publish(content=b"second")
    verify = Registry.verify

    def slow(self: Registry, run: str, version: str) -> None:
        time.sleep(5.5)
        verify(self, run, version)

    monkeypatch.setattr(Registry, "verify", slow)
    assert typed(service, "rollback", first.version).endswith(f"run default serves {first.version}\n")


def test_who_gives_up_on_a_change_is_told_that_it_may_be_done_all_the_same(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, done = service.publish().version, threading.Event()
    monkeypatch.setattr(Registry, "verify", lambda *_: done.wait(60))
    try:
        with pytest.raises(ConfigurationError, match="timed out; it may do what was asked all the same"):
            call("POST", service.url, f"/drafter/{version}/rollback?run=default", 0.2, json={"reason": "r"})
        known = {"If-None-Match": service.client.get("/drafter/latest").headers["ETag"]}
        with pytest.raises(ConfigurationError, match=r"timed out$"):
            call("GET", service.url, "/drafter/latest", 0.2, params={"wait": "20"}, headers=known)
    finally:
        done.set()


def test_who_gives_up_before_the_change_was_asked_for_is_not_told_that_it_may_be_done() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigurationError, match=r"timed out$"),
    ):
        call("POST", f"http://127.0.0.1:{silent.getsockname()[1]}", "/x", 0.2)


def test_a_version_is_named_as_the_page_names_it(service: RunningService) -> None:
    first, second = service.publish(), service.publish(content=b"second")
    short = first.version.partition("-")[0]
    assert typed(service, "rollback", short) == f"run default serves {first.version}\n"
    assert typed(service, "hold", short) == f"run default serves {first.version} until it is released\n"
    typed(service, "release")
    told = CliRunner().invoke(app, ["hold", "v000009", "--service", service.url])
    assert isinstance(told.exception, ConfigurationError)
    assert str(told.exception) == (
        f"run default has no version v000009; expected one of: {first.version}, {second.version}"
    )
    assert typed(service, "rollback", "v1").startswith(f"run default serves {first.version}")


def test_a_rollback_by_a_name_that_is_too_long_changes_nothing(service: RunningService) -> None:
    version = service.publish().version
    for by in ("x" * 81, "", 7):
        body = {"reason": "r", "by": by}
        assert service.client.post(f"/drafter/{version}/rollback?run=default", json=body).status_code == 422
    assert service.client.get("/drafter/latest").json()["sequence"] == 1


def test_a_refusal_says_what_helps(
    serve: Callable[..., RunningService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(tokens="boss:admin")

    def refused(*words: str) -> str:
        told = CliRunner().invoke(app, [*words, "--service", service.url])
        assert isinstance(told.exception, ConfigurationError)
        return str(told.exception)

    monkeypatch.delenv("DRAFTALIGN_TOKEN", raising=False)
    assert "no token came; send one as `Auth" in (said := refused("state"))
    assert said.endswith(" (set DRAFTALIGN_TOKEN)")
    monkeypatch.setenv("DRAFTALIGN_TOKEN", "stranger")
    assert "this token is not known; send a known one as `Auth" in refused("state")
    monkeypatch.setenv("DRAFTALIGN_TOKEN", " boss\n")  # as files and secrets have it
    said = refused("state", "--run", "other")
    assert said.endswith("a trainer's hook or an engine registers it (`draftalign runs` lists those that are)")
    service.client.headers["Authorization"] = "Bearer boss"
    service.register()
    assert refused("download", str(tmp_path / "drafter")).endswith(
        "run 'default' has published no drafter yet (`draftalign state` says what the run waits for)"
    )
    assert refused("hold", "v000001") == "run default has no drafter version yet"
    first, second = service.publish(), service.publish(content=b"second")
    typed(service, "hold", second.version)
    assert refused("rollback", first.version).endswith(
        "nothing was changed. Release it first (`draftalign release`, or "
        f"DELETE /drafter/{second.version}/hold?run=default)"
    )


def test_without_a_name_the_only_run_is_meant(serve: Callable[..., RunningService]) -> None:
    service = serve()

    def refused() -> str:
        told = CliRunner().invoke(app, ["state", "--service", service.url])
        assert isinstance(told.exception, ConfigurationError)
        return str(told.exception)

    assert "has no run" in refused()
    service.register("math")
    assert typed(service, "state").startswith("run math is active: ")
    service.register("code")
    assert refused() == "which run? Give --run: code, math"
    service.register("default")
    assert typed(service, "state").startswith("run default is active: ")


@pytest.mark.parametrize("run", ["", ".", "..", "a/b"])
def test_what_is_no_runs_name_is_refused_before_the_service_is_asked(run: str) -> None:
    for command in (["state", "--run", run], ["dead", "--run", run], ["runs", "--yes", "--delete", run]):
        told = CliRunner().invoke(app, [*command, "--service", "http://127.0.0.1:1"])
        assert isinstance(told.exception, RunNotFound)
        assert f"{run!r} is not a run's name" in str(told.exception)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8400", "is no URL; expected one like http://127.0.0.1:8400"),
        ("http://127.0.0.1:1", "is `draftalign up` running?"),
        ("https://{}", "it speaks http there, not https"),
        ("http://{}/other", "(is it a draftalign service?)"),
    ],
)
def test_a_wrong_address_is_said_to_be_one(service: RunningService, url: str, words: str) -> None:
    place = service.url.removeprefix("http://")
    told = CliRunner().invoke(app, ["runs", "--service", url.format(place)])
    assert isinstance(told.exception, ConfigurationError)
    assert str(told.exception).endswith(words)


def test_a_service_of_another_contract_is_said_to_be_one(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.register()
    monkeypatch.setattr(wire, "API_VERSION", 2)

    def refused(*command: str) -> str:
        told = CliRunner().invoke(app, [*command, "--service", service.url])
        assert isinstance(told.exception, ConfigurationError)
        return str(told.exception)

    other = "expected Draftalign-Api: 2, got '1'; use the draftalign command of the service's version"
    assert refused("runs") == f"{service.url} answered 200: {other}"
    for change in (("state", "paused", "--run", "default"), ("runs", "--delete", "default", "--yes")):
        assert refused(*change) == f"{service.url} answered 200: {other}"
    assert service.client.get("/runs/default").json()["state"] == "active", "it was not asked"
    told = refused("state", "--run", "other")  # a call that another contract does not have is answered 404
    assert "answered 404: " in told
    assert told.endswith(f"; {other}")


def test_a_change_by_a_replica_of_another_contract_is_to_be_looked_for(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While replicas are replaced one after the other, that one need not be the one that was asked for its number."""
    service.register()
    monkeypatch.setattr(wire, "other_api", lambda _headers, client: client and "another contract")
    told = CliRunner().invoke(app, ["state", "paused", "--run", "default", "--service", service.url])
    assert str(told.exception).endswith(
        "another contract; it may have done what was asked all the same: look before you ask again"
    )
    assert service.client.get("/runs/default").json()["state"] == "paused"


def test_a_service_whose_number_a_proxy_removes_is_used_with_one_warning(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.register()
    monkeypatch.setattr(wire, "API_HEADER", "X-Other")
    told = CliRunner().invoke(app, ["state", "--service", service.url])
    assert (told.exit_code, told.stdout.startswith("run default is active: ")) == (0, True)
    assert told.stderr == (
        f"warning: {service.url} answers without X-Other: a proxy removes it, or this is no draftalign of today\n"
    )


def test_a_page_is_no_answer(service: RunningService) -> None:
    """Of a proxy before the service: a login, or that it is down for maintenance. Here it is the service's own page."""
    with pytest.raises(ConfigurationError, match=r"answered 200: <!doctype html>(?s:.*)is it a draftalign service\?"):
        call("GET", service.url, "/")
    with pytest.raises(ConfigurationError, match=r"answered 200: # HELP (?s:.*)is it a draftalign service\?"):
        call("GET", service.url, "/metrics")  # text, as "OK" is


def test_a_service_that_restarts_is_asked_again_for_as_long_as_the_command_has_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status := answers.pop(0))
            self.send_header(wire.API_HEADER, str(wire.API_VERSION))
            self.send_header("Content-Type", "text/plain" if status == 203 else "application/json")  # 203: of a proxy
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    monkeypatch.setattr(client, "_PAUSE_SECONDS", 0.01)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            answers += [503, 429, 203, 200]
            assert call("GET", url, "/runs", patience=60.0).json() == {}
            for refusal, patience in ((404, 60.0), (503, 0.0)):
                answers += [refusal, 200]
                with pytest.raises(ConfigurationError, match=f"answered {refusal}"):
                    call("GET", url, "/runs", patience=patience)
                assert answers.pop() == 200, "it was asked once"
        finally:
            server.shutdown()
            thread.join()


def test_runs_in_trouble_are_listed_first(service: RunningService, redis_client: Redis) -> None:
    for run in ("code", "math"):
        service.register(run)
    for version, session in enumerate(("1" * 32, "2" * 32, "1" * 32)):
        told = {"session": session, "session_began": "0"}
        file = rollout_file(policy_version=version, run="math", raw_metadata=told)
        assert service.post(file).status_code == 202
    key = "da:{math}:outdated"
    since, last, session = redis_client.get(key).decode().split()  # type: ignore[union-attr]
    redis_client.set(key, f"{int(since) - 60} {last} {session}", keepttl=True)  # as if that had been a minute ago
    first, *others = typed(service, "runs").splitlines()
    assert first.startswith("math  no drafter yet  A trainer's rollouts are not used: ")
    assert [line.split()[0] for line in others] == ["code", "default"]


@pytest.mark.parametrize("state", ["paused", "draining", "archived", "active"])
def test_a_run_s_state_is_said_and_changed(service: RunningService, state: str) -> None:
    service.publish()
    assert typed(service, "state").startswith("run default is active: ")
    assert typed(service, "state", state, "--reason", "a test").startswith(f"run default is {state}: ")
    told = service.client.get("/runs/default").json()["headline"]
    lines = typed(service, "state").rstrip("\n").splitlines()
    assert len(lines) == 1 + len(told["also"]), "and all else that is true of it"
    said = service.client.get("/runs/default").json()
    found = said["state_change"]
    assert (said["state"], found["reason"]) == (state, "a test")
    assert typed(service, "state").startswith(f"run default is {state}: ")
    assert ("[" in typed(service, "runs")) == (state != "active")
    typed(service, "state", state, "--reason", "another")
    again = service.client.get("/runs/default").json()["state_change"]
    assert again == found | {"reason": "another"}, "since as before"


def test_what_the_service_answers_is_printed_for_scripts(service: RunningService) -> None:
    service.publish()
    for words, path in (
        (("runs",), "/runs"),
        (("state",), "/runs/default"),
        (("drafters",), "/drafters"),
        (("dead",), "/runs/default/dead"),
        (("worth",), "/runs/default/worth"),
    ):
        printed, answer = json.loads(typed(service, *words, "--json")), service.client.get(path).json()
        assert type(printed) is type(answer)
        first, second = (one[0] if isinstance(one, list) else one for one in (printed, answer))
        assert first.keys() == second.keys(), words


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_service_that_hangs_is_said_to_be_waited_for(
    scheme: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel takes its connections; nobody answers on them."""
    for name, seconds in (("_QUIET", 0.01), ("_CONNECT", 0.5), ("_READ", 0.5)):
        monkeypatch.setattr(client, f"{name}_SECONDS", seconds)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"{scheme}://127.0.0.1:{hanging.getsockname()[1]}"
        with pytest.raises(ConfigurationError) as refused:
            call("GET", url, "/runs")
    assert capsys.readouterr().err == f"waiting for {url} ...\n"
    why = "does not answer: timed out" if scheme == "http" else "takes no connection within 0.5 s: does it hang, or"
    assert str(refused.value).startswith(f"{url} {why}")
