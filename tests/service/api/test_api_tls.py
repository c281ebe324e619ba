"""TLS by the service itself: real handshakes, real certificates, and the bounds of connections under it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme
from helpers.engine.agent_fixtures import Engine, drafter_bytes, drafter_config, eventually, start_agent
from helpers.service.port_fixtures import DESCRIPTORS, FLOODS, GET, MIB, Process, places, pour
from helpers.service.service_fixtures import HEADERS, RunningService, rollout_file, run_file
from helpers.service.valkey_fixtures import OwnValkey
from pydantic import ValidationError
from typer.testing import CliRunner

from rl_hooks.sending.exchange import Origin, ReplyError, exchange, trusted, trusted_of_store
from service.api.app import make_server
from service.api.port import connections
from service.cli.main import app as command_line
from service.errors import ConfigurationError
from service.settings import Settings


class Authority:
    """A certificate authority of its own, and one certificate for this machine that it signed."""

    def __init__(self, directory: Path, name: str) -> None:
        self.file = directory / f"{name}.pem"
        self.certificate, self.key = directory / f"{name}-server.pem", directory / f"{name}-server.key"
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(self.file)
        server.private_key_pem.write_to_path(self.key)
        for part in server.cert_chain_pems:
            part.write_to_path(self.certificate, append=True)

    @property
    def context(self) -> ssl.SSLContext:
        """Trusts this authority alone."""
        return ssl.create_default_context(cafile=self.file)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "theirs")


@pytest.fixture
def secure(serve: Callable[..., RunningService], authority: Authority) -> RunningService:
    """The API by https, with the run `default`."""
    service = serve(tls_cert=authority.certificate, tls_key=authority.key)
    service.url = service.url.replace("http:", "https:")
    service.client.close()
    service.client = httpx.Client(base_url=service.url, verify=authority.context, timeout=60)
    service.register().raise_for_status()
    return service


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> Iterator[None]:
    """Clients in this process trust the authority."""
    monkeypatch.setenv("DRAFTALIGN_CA_FILE", str(authority.file))
    yield
    trusted.cache_clear()
    trusted_of_store.cache_clear()


# --- what passes


@pytest.mark.usefixtures("trusting")
def test_a_store_is_trusted_by_our_authority_and_by_the_systems(secure: RunningService, authority: Authority) -> None:
    """A store of one's own, or a public one, beside a service whose authority is one's own."""
    reply = exchange(Origin.parse(secure.url), "GET", "/healthz", {}, (), timeout_seconds=5, of_a_store=True)
    assert reply.status == 200
    system = ssl.create_default_context().get_ca_certs(binary_form=True)
    assert set(trusted_of_store(str(authority.file)).get_ca_certs(binary_form=True)) > set(system)
    assert len(trusted(str(authority.file)).get_ca_certs()) == 1, "the service by its own alone"


@pytest.mark.usefixtures("trusting")
def test_a_sender_gets_past_a_proxy_that_keeps_100_continue_to_itself(authority: Authority) -> None:
    """TLS 1.3 sends session tickets first: the socket has bytes to read, and they are no answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)

    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            received = b""
            while not received.endswith(b"body") and (more := connection.recv(1 << 16)):
                received += more
            connection.sendall(b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        origin = Origin.parse(f"https://127.0.0.1:{listener.getsockname()[1]}")
        reply = exchange(origin, "POST", "/rollouts", {"content-length": "4"}, [b"body"], timeout_seconds=3.0)
    assert reply.status == 202


def test_long_bodies_on_one_connection_are_the_files(secure: RunningService) -> None:
    files = [rollout_file((f"{n}a", f"{n}b"), lengths=(20_000, 20_000), policy_version=1) for n in "xyz"]
    for file in files:
        pieces = (file[at : at + 70_001] for at in range(0, len(file), 70_001))
        headers = HEADERS | {"Content-Length": str(len(file))}
        assert secure.client.post("/rollouts", content=pieces, headers=headers).status_code == 202
    assert {path.read_bytes() for path in secure.spooled()} == set(files)


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_client_that_leaves_in_a_long_body_leaves_nothing(
    secure: RunningService, authority: Authority, abrupt: bool
) -> None:
    """Wherever it leaves: at once after the header, the protocol that asyncio's TLS tells is still the HTTP one."""
    body = rollout_file(lengths=(20_000, 20_000))
    head = f"POST /rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {HEADERS['Content-Type']}\r\n"
    dice = random.Random(0)
    for _ in range(20):
        cut = dice.randint(3000, 2_500_000)
        with (
            socket.create_connection(("127.0.0.1", secure.port), timeout=60) as raw,
            authority.context.wrap_socket(raw, server_hostname="127.0.0.1") as client,
        ):
            if abrupt:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
    eventually(lambda: not secure.spooled(), 5)


@pytest.mark.usefixtures("trusting")
def test_uploads_long_polls_and_downloads_pass(secure: RunningService, tmp_path: Path) -> None:
    origin = Origin.parse(secure.url)
    body = rollout_file()
    reply = exchange(
        origin, "POST", "/rollouts", HEADERS | {"Content-Length": str(len(body))}, [body], timeout_seconds=10
    )
    assert reply.status == 202
    weights = np.random.default_rng(0).bytes(5 << 20)
    first = secure.publish(content=b"old").etag
    replies: list[httpx.Response] = []
    poll = threading.Thread(
        target=lambda: replies.append(
            secure.client.get("/drafter/latest", params={"wait": 20}, headers={"If-None-Match": first})
        )
    )
    poll.start()
    secure.wait_for_requests()
    version = secure.publish(content=weights).version
    poll.join(60)
    assert replies[0].json()["version"] == version
    assert secure.client.get(f"/drafter/{version}/model.safetensors").content == weights
    big = run_file(metadata={"note": "x" * 500_000})
    reply = exchange(origin, "PUT", "/runs/big", HEADERS | {"Content-Length": str(len(big))}, [big], timeout_seconds=60)
    assert reply.status == 201


def test_many_handshakes_at_once(secure: RunningService, authority: Authority) -> None:
    """Each on a connection of its own; none is lost between the accepted socket and the handshake."""
    context, found = authority.context, []

    def ask() -> None:
        for _ in range(25):
            found.append(httpx.get(f"{secure.url}/healthz", verify=context, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 200


@pytest.mark.usefixtures("trusting")
def test_the_agent_downloads_by_https(secure: RunningService, tmp_path: Path) -> None:
    engine = Engine()
    with start_agent(secure.url, engine, cache=tmp_path / "cache"):
        version = secure.publish(content=drafter_bytes(1), config=json.dumps(drafter_config())).version
        eventually(lambda: engine.version == version)
    engine.down()


# --- what does not


def test_a_certificate_of_another_authority_is_refused_with_what_to_do(
    secure: RunningService, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (str(stranger.file), ""):  # another one, and those of the system
        monkeypatch.setenv("DRAFTALIGN_CA_FILE", file)
        with pytest.raises(ReplyError, match=r"not trusted: .*; set DRAFTALIGN_CA_FILE"):
            exchange(Origin.parse(secure.url), "GET", "/healthz", {}, [], timeout_seconds=60)
        done = CliRunner().invoke(command_line, ["runs", "--service", secure.url])
        assert isinstance(done.exception, ConfigurationError)
        assert "set DRAFTALIGN_CA_FILE" in str(done.exception)
    trusted.cache_clear()


@pytest.mark.usefixtures("trusting")
def test_commands_speak_https(secure: RunningService) -> None:
    done = CliRunner().invoke(command_line, ["runs", "--service", secure.url])
    assert done.stdout.startswith("default  no drafter yet")


def test_a_file_of_authorities_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("nothing.pem", "empty.pem"):
        with pytest.raises(OSError, match=rf"DRAFTALIGN_CA_FILE .*{name}.*expected a PEM file"):
            trusted(str(tmp_path / name))


def test_plain_http_to_the_port_is_told_to_use_https(secure: RunningService) -> None:
    plain = secure.url.replace("https:", "http:")
    reply = httpx.get(f"{plain}/healthz", timeout=60)
    assert (reply.status_code, reply.text) == (400, "this port speaks TLS: begin the service's URL with https")
    body = rollout_file()
    headers = HEADERS | {"Content-Length": str(len(body))}
    refused = exchange(Origin.parse(plain), "POST", "/rollouts", headers, [body], timeout_seconds=60)
    assert (refused.status, refused.detail) == (400, reply.text)


@pytest.mark.usefixtures("trusting")
def test_https_to_a_plain_port_says_so(service: RunningService) -> None:
    with pytest.raises(ReplyError, match="does that port speak plain http"):
        exchange(Origin.parse(service.url.replace("http", "https")), "GET", "/", {}, [], timeout_seconds=60)


def test_old_tls_is_refused(secure: RunningService, authority: Authority) -> None:
    context = authority.context
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", secure.port), timeout=60) as raw,
        pytest.raises(OSError),  # noqa: PT011 - by this side or by the other
    ):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path, redis_url: str, authority: Authority) -> None:
    with pytest.raises(ValidationError, match="go together"):
        Settings(tls_cert=authority.certificate)
    for certificate, key in (
        (authority.certificate, authority.file),
        (tmp_path / "nothing", authority.key),
        (authority.file, authority.key),
    ):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            make_server(Settings(state_dir=tmp_path, redis_url=redis_url, tls_cert=certificate, tls_key=key))  # type: ignore[arg-type]


# --- the bounds of connections


class SecureProcess(Process):
    """`draftalign serve` by https as a process that may open few files."""

    def __init__(self, directory: Path, redis_url: str, authority: Authority) -> None:
        self.context = authority.context
        options = ["--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)]
        super().__init__(directory, redis_url, options)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            url = f"https://127.0.0.1:{self.port}/healthz"
            return httpx.get(url, timeout=10, verify=self.context).status_code == 200
        return False

    def connect(self) -> socket.socket:
        return self.context.wrap_socket(super().connect(), server_hostname="127.0.0.1")


@pytest.fixture
def process(tmp_path: Path, redis_url: str, authority: Authority) -> Iterator[SecureProcess]:
    made = SecureProcess(tmp_path, redis_url, authority)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def flooded(
    tmp_path_factory: pytest.TempPathFactory, valkey: OwnValkey, authority: Authority
) -> Iterator[SecureProcess]:
    """One for all floods: together they may not take what one may."""
    made = SecureProcess(tmp_path_factory.mktemp("flooded"), valkey.url, authority)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_on_one_connection_takes_no_memory_and_stalls_nobody(flooded: SecureProcess, flood: str) -> None:
    begin, piece = FLOODS[flood]
    closed = []
    with contextlib.suppress(OSError), flooded.connect() as connection:
        connection.sendall(begin)
        flooding = threading.Thread(target=lambda: closed.append(pour(connection, piece)))
        flooding.start()
        served = [flooded.answers() for _ in range(5)]
        flooding.join(60)
    assert served == [True] * 5
    assert closed == [True]
    assert flooded.peak_bytes() - flooded.fresh_bytes < 24 * MIB


@pytest.mark.parametrize("sent", [None, b"\x16", b"\x16\x03\x01\x02\x00" + b"\x01" * 60, b"", GET + b"a: b"])
def test_connections_that_send_no_request_shut_nobody_out(process: SecureProcess, sent: bytes | None) -> None:
    """Nothing at all, the beginning of a handshake, a handshake and nothing more, half a header."""
    in_the_clear = sent is None or sent.startswith(b"\x16")
    before = process.peak_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(DESCRIPTORS + 50):
            with contextlib.suppress(OSError):  # it may be closed for a newer one by now
                connect = super(SecureProcess, process).connect if in_the_clear else process.connect
                connection = stack.enter_context(connect())
                connection.sendall(sent or b"")
        assert [process.answers() for _ in range(5)] == [True] * 5
    assert process.peak_bytes() - before < 64 * MIB


def test_a_handshake_that_does_not_come_ends_the_connection(
    secure: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    for sent in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection(("127.0.0.1", secure.port), timeout=60) as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    secure.client.close()
    secure.wait_for_no_connections(5)
    assert places(secure).waiting == {}


def test_an_idle_client_does_not_keep_the_server_from_its_end(
    secure: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 600.0)
    secure.server.config.timeout_graceful_shutdown = 600
    with socket.create_connection(("127.0.0.1", secure.port), timeout=60):  # not even a handshake
        secure.client.get("/healthz").raise_for_status()
        secure.server.handle_exit(15, None)
        secure._thread.join(60)
        assert not secure._thread.is_alive(), "it ends although the client is still there"


def test_a_connection_given_up_before_its_handshake_began_leaves_its_place(
    secure: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the server ends, or makes room, in the turn of its event loop that accepted the connection."""
    secure.client.close()
    secure.wait_for_no_connections(5)
    made = connections.TlsDoor.connection_made

    def made_and_given_up(door: connections.TlsDoor, transport: asyncio.Transport) -> None:
        made(door, transport)
        door.give_up()

    monkeypatch.setattr(connections.TlsDoor, "connection_made", made_and_given_up)
    with socket.create_connection(("127.0.0.1", secure.port), timeout=60) as connection:
        assert connection.recv(1) == b""
    secure.wait_for_no_connections(5)
    assert places(secure).waiting == {}
