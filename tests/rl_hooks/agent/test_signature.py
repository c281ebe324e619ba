"""TUF's attacks on a real agent, which polls a real service through somebody who changes the answers on their way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import Engine, Peer, drafter_bytes, drafter_config, eventually, sha256, start_agent
from helpers.forked import ROOT, run_fork
from helpers.service.service_fixtures import RunningService
from pydantic import SecretStr

from rl_hooks.agent.agent import SwapAgent
from rl_hooks.errors import SignatureError
from rl_hooks.format.release import SIGNATURE_HEADER, PublicKeys, SigningKey, new_nonce
from service.api.app import create_app
from service.errors import ConfigurationError
from service.settings import Settings

pytest.importorskip("cryptography", reason="signatures need the extra `signing`")


def keygen(path: Path) -> str:
    """The command, as an operator runs it; returns the public key."""
    done = run_fork("command", "service.cli", "keygen", str(path), directory=ROOT, environment=os.environ)
    done.check_returncode()
    return done.stdout.strip()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Two keys: file of the private one, public one."""
    folder = tmp_path_factory.mktemp("keys")
    return {name: (folder / name, keygen(folder / name)) for name in ("old", "new")}


Answer = httpx.Response


class Between(Peer):
    """Forwards to the service, and puts other answers in place of its own."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.latest: Callable[[Answer], Answer] | None = None  # instead of the service's GET /drafter/latest
        self.files: dict[str, bytes] = {}  # instead of the service's
        self.seen: list[Answer] = []  # manifests, as the service answered them
        super().__init__()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        passed = {name: handler.headers[name] for name in ("If-None-Match", "Range") if handler.headers[name]}
        answer = httpx.request(
            handler.command, f"{self.service.url}{path}", params=query, headers=passed, json=body, timeout=30
        )
        if path == "/drafter/latest" and answer.status_code == 200:
            with self.lock:
                self.seen.append(answer)
        if path == "/drafter/latest" and self.latest is not None:
            answer = self.latest(answer)
        elif path in self.files:
            answer = Answer(200, content=self.files[path])
        names = ("ETag", "Content-Range", SIGNATURE_HEADER)
        headers = {name: answer.headers[name] for name in names if name in answer.headers}
        self.send(handler, answer.status_code, answer.content, headers)


@pytest.fixture
def service(serve: Callable[..., RunningService], keys: dict[str, tuple[Path, str]]) -> RunningService:
    started = serve(signing_key_file=keys["old"][0])
    started.register()
    return started


@pytest.fixture
def between(service: RunningService) -> Iterator[Between]:
    peer = Between(service)
    yield peer
    peer.latest = None
    peer.down()


def publish(service: RunningService, seed: int, run: str = "default") -> str:
    return service.publish(run, content=drafter_bytes(seed), config=json.dumps(drafter_config())).version


def trusting(between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]], **more: Any) -> Any:
    public = PublicKeys.parse(keys["old"][1])
    settings = {"wait_seconds": 0.3, "public_keys": public} | more
    return start_agent(between.url, engine, cache=tmp_path / "cache", **settings)


def value(agent: SwapAgent, name: str, **labels: str) -> float:
    return agent.metrics.registry.get_sample_value(name, labels) or 0.0


def refusals(agent: SwapAgent) -> float:
    return value(agent, "draftalign_agent_errors_total", peer="service", kind="SignatureError")


def contact(agent: SwapAgent) -> float:
    return value(agent, "draftalign_agent_last_contact_timestamp_seconds", peer="service")


def has_reported(agent: SwapAgent, version: str) -> bool:
    ledgers = [follower.ledger for follower in agent.followers.values()]
    return any(one.drafter_version == version and one.reported for ledger in ledgers for one in ledger.buckets())


def changed(answer: Answer, **fields: Any) -> Answer:
    """The same answer and signature with another manifest."""
    document = answer.json() | fields
    return Answer(200, content=json.dumps(document).encode(), headers=answer.headers)


def refused(agent: SwapAgent, engine: Engine, times: int = 2) -> None:
    """The agent refuses again and again, and the engine is asked for nothing."""
    swapped, before = list(engine.swapped), refusals(agent)
    eventually(lambda: refusals(agent) >= before + times)
    assert engine.swapped == swapped


def test_publish_rollback_and_quiet_polls_pass_with_a_signature(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    first = publish(service, 1)
    with trusting(between, engine, tmp_path, keys) as agent:
        eventually(lambda: engine.version == first)
        second = publish(service, 2)
        eventually(lambda: engine.version == second)
        service.client.post(f"/drafter/{first}/rollback?run=default", json={"reason": "worse"}).raise_for_status()
        eventually(lambda: engine.version == first)  # an older version, under a newer sequence
        before = contact(agent)
        eventually(lambda: contact(agent) > before + 1)  # nothing new, and each poll signed
        assert refusals(agent) == 0
    assert engine.swapped == [first, second, first]


@pytest.mark.parametrize(
    "forge",
    [
        lambda answer: Answer(200, content=answer.content, headers={"ETag": answer.headers["ETag"]}),
        lambda answer: Answer(200, content=answer.content, headers={**answer.headers, SIGNATURE_HEADER: "AAAA"}),
        lambda answer: Answer(200, content=answer.content, headers={**answer.headers, SIGNATURE_HEADER: "é?".encode()}),
        lambda answer: changed(answer, sequence=10**6),
        lambda answer: changed(answer, override_canary=True),  # would pass the canary by
        lambda answer: changed(answer, gate={"alpha_served": 1.0}),  # would ask nothing of it
        lambda answer: changed(answer, config_fingerprint="0" * 32),
        lambda answer: changed(answer, kind="mtp"),
        lambda answer: changed(answer, created=0.0),  # the agent does not even read it
    ],
)
def test_arbitrary_installation_a_manifest_that_is_not_as_signed_is_refused(
    service: RunningService,
    between: Between,
    engine: Engine,
    tmp_path: Path,
    keys: dict[str, tuple[Path, str]],
    forge: Callable[[Answer], Answer],
) -> None:
    between.latest = forge
    version = publish(service, 1)
    with trusting(between, engine, tmp_path, keys) as agent:
        refused(agent, engine)
        assert engine.version is None
        assert contact(agent) == 0
        between.latest = None
        eventually(lambda: engine.version == version)


def test_arbitrary_installation_a_drafter_of_another_key_is_refused(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    forger = SigningKey(keys["new"][0])
    publish(service, 1)

    def forge(answer: Answer) -> Answer:
        nonce = str(answer.request.url.params["nonce"])
        return Answer(200, content=answer.content, headers={SIGNATURE_HEADER: forger.sign(nonce, answer.content)})

    between.latest = forge
    with trusting(between, engine, tmp_path, keys) as agent:
        refused(agent, engine)
    assert engine.version is None


def test_rollback_an_older_manifest_that_was_truly_signed_is_refused(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    first = publish(service, 1)
    with trusting(between, engine, tmp_path, keys):
        eventually(lambda: engine.version == first)
    old = between.seen[0]
    second = publish(service, 2)
    between.latest = lambda _: old
    (tmp_path / "fresh").mkdir()
    engine.restart()
    with trusting(between, engine, tmp_path / "fresh", keys) as agent:  # an agent that remembers no sequence
        refused(agent, engine)
        assert engine.version is None
        between.latest = None
        eventually(lambda: engine.version == second)


def test_rollback_a_service_whose_state_went_back_is_not_followed(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    publish(service, 1)
    kept = service.layout.latest("default").read_bytes()
    second = publish(service, 2)
    with trusting(between, engine, tmp_path, keys) as agent:
        eventually(lambda: engine.version == second)
        service.layout.latest("default").write_bytes(kept)  # a backup was put back: freshly signed, and older
        eventually(lambda: value(agent, "draftalign_agent_errors_total", peer="service", kind="ManifestError") >= 2)
        assert engine.swapped == [second]


@pytest.mark.parametrize("status", [200, 304, 404])
def test_freeze_an_answer_that_is_sent_again_is_refused_at_the_next_poll_and_is_no_contact(
    service: RunningService,
    between: Between,
    engine: Engine,
    tmp_path: Path,
    keys: dict[str, tuple[Path, str]],
    status: int,
) -> None:
    first = publish(service, 1)
    with trusting(between, engine, tmp_path, keys) as agent:
        eventually(lambda: has_reported(agent, first))  # a contact as well, and the only one: the engine does nothing
        old = between.seen[-1]
        frozen = old if status == 200 else Answer(status, headers={"ETag": old.headers["ETag"]})
        between.latest = lambda _: frozen
        eventually(lambda: refusals(agent) >= 1)
        before = contact(agent)
        second = publish(service, 2)
        refused(agent, engine, times=3)
        # What DraftalignAgentLostPeer goes by stands still, while the engine keeps its drafter.
        assert contact(agent) == before
        assert engine.version == first
        between.latest = None
        eventually(lambda: engine.version == second)


def test_mix_and_match_files_of_another_version_are_refused(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    first, second = publish(service, 1), publish(service, 2)
    other = service.client.get(f"/drafter/{first}/model.safetensors").content
    between.files[f"/drafter/{second}/model.safetensors"] = other
    with trusting(between, engine, tmp_path, keys) as agent:
        eventually(lambda: value(agent, "draftalign_agent_errors_total", peer="service", kind="DigestError") >= 2)
        assert engine.swapped == []
        between.files.clear()
        eventually(lambda: engine.version == second)
    assert engine.read[-1]["model.safetensors"] == sha256(drafter_bytes(2))


def test_mix_and_match_a_manifest_of_another_run_is_refused_though_it_is_signed_for_this_request(
    service: RunningService, between: Between, engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    service.register("other")
    publish(service, 1)
    publish(service, 2, run="other")

    def mix(answer: Answer) -> Answer:
        nonce = str(answer.request.url.params["nonce"])
        return service.client.get("/drafter/latest", params={"run": "other", "nonce": nonce})

    between.latest = mix
    with trusting(between, engine, tmp_path, keys) as agent:
        eventually(lambda: value(agent, "draftalign_agent_errors_total", peer="service", kind="ManifestError") >= 2)
    assert engine.swapped == []


def test_an_agent_with_keys_takes_nothing_of_a_service_without_one(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    plain = serve()
    plain.register()
    version = publish(plain, 1)
    public = PublicKeys.parse(keys["old"][1])
    with start_agent(plain.url, engine, cache=tmp_path / "cache", public_keys=public) as agent:
        refused(agent, engine)
        assert engine.version is None
    with start_agent(plain.url, engine, cache=tmp_path / "cache"):  # without keys: as without signatures
        eventually(lambda: engine.version == version)


def test_keys_are_changed_in_steps_while_agents_follow(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, keys: dict[str, tuple[Path, str]]
) -> None:
    both = PublicKeys.parse(f"{keys['old'][1]},\n{keys['new'][1]}")
    for name in ("old", "new"):
        service = serve(signing_key_file=keys[name][0])
        service.register()
        version = publish(service, 1 if name == "old" else 2)
        with start_agent(service.url, engine, cache=tmp_path / "cache", public_keys=both) as agent:
            eventually(lambda version=version: engine.version == version)  # type: ignore[misc]
            assert refusals(agent) == 0


def test_a_restarted_service_or_a_second_one_with_the_key_is_the_same_to_an_agent(
    service: RunningService, serve: Callable[..., RunningService], keys: dict[str, tuple[Path, str]]
) -> None:
    publish(service, 1)
    second = serve(signing_key_file=keys["old"][0])
    for one in (service, second):
        nonce = new_nonce()
        answer = one.client.get("/drafter/latest", params={"nonce": nonce})
        PublicKeys.parse(keys["old"][1]).check(nonce, answer.content, answer.headers[SIGNATURE_HEADER])
        with pytest.raises(SignatureError):
            PublicKeys.parse(keys["old"][1]).check(new_nonce(), answer.content, answer.headers[SIGNATURE_HEADER])


def test_what_nobody_asked_to_be_signed_is_answered_as_before(service: RunningService) -> None:
    publish(service, 1)
    answer = service.client.get("/drafter/latest")
    assert SIGNATURE_HEADER not in answer.headers
    same = {"If-None-Match": answer.headers["ETag"]}
    assert service.client.get("/drafter/latest", headers=same).status_code == 304
    for nonce in ("", "short", "G" * 32, "a" * 65):
        assert service.client.get("/drafter/latest", params={"nonce": nonce}).status_code == 422


# --- keys and settings


def test_a_key_is_written_for_its_owner_alone_and_never_over_another(tmp_path: Path) -> None:
    file = tmp_path / "key"
    public = keygen(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert SigningKey(file).public == public
    kept = file.read_bytes()
    with pytest.raises(subprocess.CalledProcessError):
        keygen(file)
    assert file.read_bytes() == kept


@pytest.mark.parametrize("content", [b"", b"secret", b"\xff\xfe", None], ids=["empty", "text", "binary", "absent"])
def test_a_service_does_not_start_with_a_key_that_is_none(
    redis_url: str, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ConfigurationError, match="signing_key_file"):
        create_app(Settings(redis_url=SecretStr(redis_url), state_dir=tmp_path, signing_key_file=tmp_path / "bad"))


def test_the_log_of_the_service_tells_the_public_key_and_not_the_private_one(
    serve: Callable[..., RunningService], keys: dict[str, tuple[Path, str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        serve(signing_key_file=keys["old"][0])
    assert keys["old"][1] in caplog.text
    assert keys["old"][0].read_text().splitlines()[1] not in caplog.text
