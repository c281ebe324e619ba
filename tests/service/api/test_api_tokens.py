"""Tokens of a file: limited to runs on every call, hashed, and read again while the service runs."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest
from helpers.service.access_fixtures import OTHER, OWN, RULES, UNSATISFIED, TokenFile, ask, request_of
from helpers.service.service_fixtures import HEADERS, RunningService, rollout_file, run_file
from typer.testing import CliRunner

from service.access import tokens as access
from service.access.tokens import Token, TokenEntry, Tokens, hashed, new_secret, read_entries
from service.api.app import create_app
from service.api.auth import PUBLIC, named_runs
from service.cli.main import app as command_line
from service.errors import ConfigurationError
from service.settings import SCOPES, Settings

#: Name -> scopes and runs.
CREDENTIALS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "all-write": ("write", ("*",)),
    "all-read": ("read", ("*",)),
    "math-write": ("write", ("math-*",)),
    "math-read": ("read", ("math-?", "nothing")),
    "math-report": ("report", ("math-*",)),
    "math-admin": ("admin", (OWN,)),
    "all-admin": ("admin", ("*",)),
}


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    made = TokenFile(tmp_path / "tokens.jsonl")
    for name, (scopes, runs) in CREDENTIALS.items():
        made.add(name, scopes, runs)
    return made


@pytest.fixture
def guarded(serve: Callable[..., RunningService], tokens: TokenFile) -> RunningService:
    """The API with a token file, and two runs with a drafter each."""
    service = serve(token_file=tokens.path)
    for run in (OWN, OTHER):
        headers = HEADERS | tokens.headers("all-admin")
        service.client.put(f"/runs/{run}", content=run_file(), headers=headers).raise_for_status()
        service.publish(run)
    return service


def routes(service: RunningService) -> set[tuple[str, str]]:
    """Every call that the application answers."""
    app: Any = service.server.config.app
    found = {(method.upper(), path) for path, calls in app.openapi()["paths"].items() for method in calls}
    found |= {(method, route.path) for route in app.routes for method in getattr(route, "methods", ()) or ()}
    return {(method, path.replace(":path", "")) for method, path in found if method != "HEAD"}


def test_every_call_and_every_credential(guarded: RunningService, tokens: TokenFile) -> None:
    """Who may do what, of all calls: a token of some runs does nothing to others and learns nothing of them."""
    assert routes(guarded) == set(RULES), "a new call needs a row in RULES, and a line in service/api/auth.py"
    for (method, template), (wanted, place) in RULES.items():
        for run in (OTHER, OWN):
            for name, (scopes, patterns) in CREDENTIALS.items():
                granted = {"admin"} & {scopes} or set(wanted.split()) & {scopes, "public"}
                covered = place in ("none", "listed") or run == OWN or patterns == ("*",)
                reply = ask(guarded, request_of(guarded, method, template, run), tokens.headers(name))
                case = (method, template, run, name, reply.status_code, reply.text[:200])
                if granted and covered:
                    assert reply.status_code < 400 or reply.status_code in (404, 409, 422), case
                else:
                    assert reply.status_code == 403, case
                    assert reply.json()["type"] == ("urn:draftalign:run" if granted else "urn:draftalign:scope"), case
                if place == "listed" and reply.is_success:
                    assert OWN in reply.text, case
                    assert (OTHER in reply.text) == (patterns == ("*",)), case
        bare = ask(guarded, request_of(guarded, method, template, OWN), {})
        assert bare.status_code == (200 if template in PUBLIC else 401), (method, template)


def test_a_permitted_call_of_the_matrix_is_served(guarded: RunningService, tokens: TokenFile) -> None:
    """The matrix would also hold if all calls failed otherwise: most of them succeed."""
    succeeded = {
        (method, template)
        for method, template in RULES
        if ask(guarded, request_of(guarded, method, template, OWN), tokens.headers("math-admin")).is_success
    }
    assert set(RULES) - succeeded == UNSATISFIED


@pytest.mark.parametrize(
    "target",
    [
        "/alpha",  # of the run `default`
        "/alpha?run=math-1&run=chess",
        "/alpha?run=chess&run=math-1",
        "/alpha?run=math-1&r%75n=chess",
        "/alpha?run=math-1%00",
        "/alpha?run=",
        "/alpha?RUN=math-1",
        "/runs/",
        "/runs/chess/../math-1",
        "/runs/chess%2f..%2fmath-1",
        "/runs//math-1",
        "/runs/math-1/../chess",
        "/runs/math-1%2F..%2Fchess",
        "/runs/%63hess",
        "/dead/letters?run=math-1",
        "/metrics/",
        "//metrics",
        "//runs/chess",
    ],
)
def test_no_way_around_the_runs_of_a_token(guarded: RunningService, tokens: TokenFile, target: str) -> None:
    token = tokens.secrets["math-admin"]
    head = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    reply = guarded.raw(head.encode())
    assert reply.split()[1] in (b"403", b"404"), reply
    assert b"target_fingerprint" not in reply


def test_a_query_that_names_another_run_than_the_file(guarded: RunningService, tokens: TokenFile) -> None:
    headers = HEADERS | tokens.headers("math-write")
    for asked in (OWN, OTHER, None):
        params = {} if asked is None else {"run": asked}
        body = rollout_file(run=OTHER)
        reply = guarded.client.post("/rollouts", content=body, params=params, headers=headers)
        assert reply.status_code in (403, 422), (asked, reply.text)
    assert guarded.spooled() == []


def test_a_new_call_is_not_for_limited_tokens() -> None:
    assert named_runs("GET", "/new/call", b"run=math-1") is None
    assert named_runs("POST", "/alpha/x", b"run=a&run=b") == ["a", "b"]
    assert named_runs("GET", "/runs", b"") == []
    assert named_runs("GET", "/docs/static/swagger-ui.css", b"") == []
    assert named_runs("GET", "/downloads", b"") is None


def test_a_token_file_is_enough_to_bind_and_an_empty_one_lets_nobody_in(
    serve: Callable[..., RunningService], tmp_path: Path, redis_url: str
) -> None:
    file = tmp_path / "tokens.jsonl"
    given: dict[str, Any] = {"state_dir": tmp_path, "redis_url": redis_url, "token_file": file, "host": "0.0.0.0"}  # noqa: S104
    with pytest.raises(ConfigurationError, match="No such file"):
        create_app(Settings(**given))
    file.touch()
    create_app(Settings(**given))
    service = serve(token_file=file)
    assert service.client.get("/runs").status_code == 401
    assert service.client.get("/healthz").status_code == 200


@pytest.mark.parametrize(("name", "secret"), [("a", "other"), ("b", "one")], ids=["one name", "one secret"])
def test_a_token_that_file_and_variable_both_have_is_none(tmp_path: Path, name: str, secret: str) -> None:
    """Which scopes would it have, and who is it in the audit log?"""
    path = tmp_path / "tokens.jsonl"
    path.write_text(TokenEntry(name="a", scopes=frozenset({"read"}), sha256=hashed(b"one")).model_dump_json() + "\n")
    line = TokenEntry(name=name, scopes=frozenset({"admin"}), sha256=hashed(secret.encode())).model_dump_json()
    with pytest.raises(ConfigurationError, match="name 'a' or its hash is in DRAFTALIGN_TOKENS as well; delete one"):
        Tokens(Settings(tokens=line, token_file=path))  # type: ignore[arg-type]


def test_a_secret_that_the_variable_has_as_a_line_too_is_none() -> None:
    line = TokenEntry(name="a", scopes=frozenset({"read"}), sha256=hashed(b"one")).model_dump_json()
    with pytest.raises(ConfigurationError, match="DRAFTALIGN_TOKENS, entry 1: its hash is there as well; delete one"):
        Tokens(Settings(tokens=f"one:write;{line}"))  # type: ignore[arg-type]


def test_both_kinds_of_tokens_work_side_by_side(serve: Callable[..., RunningService], tokens: TokenFile) -> None:
    service = serve(tokens="plain:read", token_file=tokens.path)
    assert service.client.get("/runs", headers={"Authorization": "Bearer plain"}).status_code == 200
    assert service.client.get("/runs", headers=tokens.headers("math-read")).status_code == 200
    assert service.client.get("/runs", auth=("", tokens.secrets["math-read"])).status_code == 200


# --- rotation


def test_a_token_is_valid_as_soon_as_it_is_added_and_no_longer_once_its_line_is_gone(
    guarded: RunningService, tokens: TokenFile
) -> None:
    for number in range(20):
        name = f"passing-{number}"
        tokens.add(name, "read")
        assert guarded.client.get("/runs", headers=tokens.headers(name)).status_code == 200
        tokens.remove(name)
        assert guarded.client.get("/runs", headers=tokens.headers(name)).status_code == 401
    assert guarded.client.get("/runs", headers=tokens.headers("all-read")).status_code == 200


def test_a_broken_file_keeps_the_tokens_before_it_and_says_so(
    guarded: RunningService, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    good = tokens.path.read_bytes()

    def broken() -> bool:
        text = guarded.client.get("/metrics", headers=tokens.headers("all-read")).text
        [value] = [line.split()[-1] for line in text.splitlines() if line.startswith("draftalign_token_file_broken ")]
        return value == "1.0"

    assert not broken()
    for bad in (good + b"{\n", b'{"name": "x"}\n', good + good, b"\xff\xfe", b" " * (2 << 20), None):
        caplog.clear()
        if bad is None:
            tokens.path.unlink()
        else:
            tokens.path.write_bytes(bad)
        assert broken()
        assert guarded.client.get("/runs", headers=tokens.headers("math-read")).status_code == 200
        said = [record.getMessage() for record in caplog.records if "stay valid" in record.getMessage()]
        assert len(said) == 1, "said once for each change"
        assert str(tokens.path) in said[0]
        tokens.path.write_bytes(good)
        assert not broken()


def test_what_is_no_file_is_never_opened_in_its_place(tokens: TokenFile) -> None:
    """To open a pipe, or to read a terminal, would end all answers until somebody writes there."""
    tokens.add("boss", "admin")
    known, secret = Tokens(Settings(token_file=tokens.path)), tokens.secrets["boss"].encode()
    tokens.path.unlink()
    tokens.path.symlink_to("/dev/null")
    assert known.find(secret) is not None
    assert known.trouble == f"token file {tokens.path} is no regular file; name one, it is read more than once"


def test_a_file_that_could_not_be_read_for_a_moment_is_read_at_the_next_request(
    tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a token that was taken back while too many files were open would stay valid until somebody writes again."""
    tokens.add("boss", "admin")
    known, secret = Tokens(Settings(token_file=tokens.path)), tokens.secrets["boss"].encode()
    tokens.remove("boss")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert all(known.find(secret) is not None for _ in range(3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.text.count("Too many open files") == 1
    assert known.find(secret) is None
    assert known.trouble is None


def test_a_file_that_is_rewritten_in_place_refuses_nobody_and_one_that_stays_empty_everybody(
    guarded: RunningService, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> int:
        return guarded.client.get("/runs", headers=tokens.headers("math-read")).status_code

    now = 0.0
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: now))
    text = tokens.path.read_text()
    with tokens.path.open("w") as file:  # as `>` and editors do
        assert [status(), status()] == [200, 200]
        file.write(text)
    assert status() == 200
    tokens.path.write_text("\n")
    assert [status(), status()] == [200, 200]
    now = 4.9
    assert status() == 200
    now = 5.0
    assert [status(), status()] == [401, 401]
    tokens.path.write_text(text)
    assert status() == 200


def test_a_long_poll_whose_token_is_taken_back_learns_nothing(guarded: RunningService, tokens: TokenFile) -> None:
    first = guarded.client.get("/drafter/latest", params={"run": OWN}, headers=tokens.headers("math-read"))
    replies: dict[str, httpx.Response] = {}

    def poll(name: str) -> None:
        headers = tokens.headers(name) | {"If-None-Match": first.headers["etag"]}
        replies[name] = httpx.get(
            f"{guarded.url}/drafter/latest", params={"run": OWN, "wait": 30}, headers=headers, timeout=90
        )

    threads = [threading.Thread(target=poll, args=(name,)) for name in ("math-read", "all-read")]
    for thread in threads:
        thread.start()
    guarded.wait_for_requests(2)
    time.sleep(0.3)
    tokens.remove("math-read")
    guarded.publish(OWN, b"newer weights")
    for thread in threads:
        thread.join(60)
    assert replies["all-read"].status_code == 200
    assert replies["math-read"].status_code == 401
    assert "sha256" not in replies["math-read"].text


def test_a_token_whose_scopes_are_changed_has_the_new_ones(guarded: RunningService, tokens: TokenFile) -> None:
    text = tokens.path.read_text()
    tokens.path.write_text(text.replace('"math-?"', '"math-?", "chess"'))
    get = guarded.client.get("/alpha", params={"run": OTHER}, headers=tokens.headers("math-read"))
    assert get.status_code == 200


# --- the file itself


def test_the_file_holds_no_secret_and_only_its_owner_may_read_it(tokens: TokenFile, tmp_path: Path) -> None:
    text = tokens.path.read_text()
    assert all(secret not in text for secret in tokens.secrets.values())
    made = TokenFile(tmp_path / "sub.jsonl")
    made.path.unlink()
    made.add("a", "read")
    assert made.path.stat().st_mode & 0o777 == 0o600
    made.path.write_text(made.path.read_text().rstrip("\n"))
    made.add("b", "read")  # after a line without an end
    assert [entry.name for entry in read_entries(made.path)] == ["a", "b"]
    with pytest.raises(ConfigurationError, match="another name"):
        made.add("b", "read")


def test_the_command_adds_a_token_that_works_at_once_and_prints_it_once(
    guarded: RunningService, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_TOKEN_FILE", str(tokens.path))
    command = ["token", "new", "--scope", "read", "--run", "math-*"]
    done = CliRunner().invoke(command_line, command)
    secret = done.stdout.strip()
    assert secret not in tokens.path.read_text()
    headers = {"Authorization": f"Bearer {secret}"}
    assert [one["run"] for one in guarded.client.get("/runs", headers=headers).json()["runs"]] == [OWN]
    for wrong in (command, ["token", "x", "--scope", "fly"], ["token", "x", "--scope", "read", "--run", "../y"]):
        error = CliRunner().invoke(command_line, wrong).exception
        assert isinstance(error, ConfigurationError)
        assert repr("new" if wrong is command else wrong[-1]) in str(error), "what came"
    monkeypatch.delenv("DRAFTALIGN_TOKEN_FILE")
    done = CliRunner().invoke(command_line, ["token", "x", "--scope", "read"])
    assert "DRAFTALIGN_TOKEN_FILE" in str(done.exception)


def test_secrets_have_256_random_bits() -> None:
    drawn = {new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(secret) >= 43 for secret in drawn)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "DRAFTALIGN_TOKENS[1]"},
        {"name": "loopback"},
        {"scopes": []},
        {"scopes": ["fly"]},
        {"runs": []},
        {"runs": ["../x"]},
        {"runs": ["[a-z]"]},
        {"sha256": "A" * 64},
        {"sha256": "0" * 63},
        {"more": 1},
    ],
)
def test_an_entry_that_is_not_as_expected_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    entry = {"name": "a", "scopes": ["read"], "sha256": "0" * 64} | changes
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps(entry))
    with pytest.raises(ConfigurationError, match="line 1"):
        read_entries(path)


def test_a_token_covers_the_runs_that_its_patterns_match() -> None:
    token = Token("a", frozenset(), ("math-*", "x?"))
    assert [run for run in ("math-", "math-1", "math", "xy", "x", "xyz", "Math-1") if token.covers(run)] == [
        "math-",
        "math-1",
        "xy",
    ]
    assert token.is_limited
    assert not Token("a", frozenset()).is_limited


def test_of_the_settings_tokens_only_the_hash_is_kept() -> None:
    tokens = Tokens(Settings(tokens="hunter2:write"))  # type: ignore[arg-type]
    found = tokens.find(b"hunter2")
    assert found is not None
    assert found.name == "DRAFTALIGN_TOKENS[1]"
    assert "hunter2" not in repr(vars(tokens))
    assert tokens.find(b"hunter") is None


def test_the_lines_of_a_token_file_are_tokens_in_the_variable_too_and_plain_ones_beside_them(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.jsonl")
    file.add("trainer", "write", ("math-*",))
    file.add("boss", "admin")
    given = f"plain:read;{file.path.read_text()};also plain:report"
    settings = Settings(tokens=given)  # type: ignore[arg-type]
    assert not any(secret in settings.tokens.get_secret_value() for secret in file.secrets.values())
    tokens = Tokens(settings)
    assert tokens.required
    found = {name: tokens.find(secret.encode()) for name, secret in file.secrets.items()}
    assert found["trainer"] == Token("trainer", frozenset({"write"}), ("math-*",))
    assert found["boss"] == Token("boss", frozenset(SCOPES))
    assert tokens.share_of_runs(found["trainer"], 10) == 5
    for secret, name in ((b"plain", "DRAFTALIGN_TOKENS[1]"), (b"also plain", "DRAFTALIGN_TOKENS[4]")):
        plain = tokens.find(secret)
        assert plain is not None
        assert plain.name == name
    assert tokens.find(b"") is None


@pytest.mark.parametrize("entry", ["{", '{"name": "a", "scopes": ["read"], "sha256": "0"}', "{}", "twice"])
def test_a_broken_line_in_the_variable_ends_the_start_and_is_named_without_its_hash(tmp_path: Path, entry: str) -> None:
    file = TokenFile(tmp_path / "tokens.jsonl")
    file.add("first", "read")
    line = file.path.read_text()
    given = f"plain:read;{line};{line if entry == 'twice' else entry}"
    with pytest.raises(ConfigurationError, match="DRAFTALIGN_TOKENS, entry 3: ") as caught:
        Tokens(Settings(tokens=given))  # type: ignore[arg-type]
    assert json.loads(line)["sha256"] not in str(caught.value)
