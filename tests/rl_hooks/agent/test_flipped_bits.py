"""One bit flips, at random, wherever a drafter's bytes are on their way to an engine: none of them is ever served.

`DRAFTALIGN_FLIPS` sets how many flips each way gets (100; `make chaos` 1,000), `DRAFTALIGN_CHAOS_SEED` where.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from helpers.drafter.formats_fixtures import ENGINES_CONFIG, ENGINES_VOCABULARY
from helpers.engine.agent_fixtures import Engine, Service, drafter_bytes, eventually, running_agent, settle
from safetensors.torch import load

from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import Eagle3Drafter
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.download import fetch_release
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.engines import protocol
from rl_hooks.engines.vllm import worker as module
from rl_hooks.engines.vllm.draft import RunningDraft
from rl_hooks.engines.vllm.engine import CoreEngine
from rl_hooks.engines.vllm.plugin import DrafterEndpoints
from rl_hooks.engines.vllm.worker import RPC_METHODS, DrafterSwap
from rl_hooks.errors import DigestError, DownloadError, OtherBytesError, SignatureError
from rl_hooks.format.release import (
    RECEIPT,
    PublicKeys,
    Release,
    SigningKey,
    VerifiedManifest,
    check_receipt,
    files_digest,
    new_key,
    new_nonce,
    parse_manifest,
)

FLIPS = int(os.environ.get("DRAFTALIGN_FLIPS", "100"))
RESTARTS = FLIPS if FLIPS >= 1000 else max(3, FLIPS // 20)  # half a second each
SEED = int(os.environ.get("DRAFTALIGN_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + FLIPS)]

FILES = ("model.safetensors", "config.json")
RPCS = {method.__name__: method for method in RPC_METHODS}


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(data)
    bit = rng.randrange(8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture
def rng() -> random.Random:
    print(f"DRAFTALIGN_CHAOS_SEED={SEED} DRAFTALIGN_FLIPS={FLIPS}")
    return random.Random(SEED)


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as made:
        yield made


def manifest_of(service: Service) -> VerifiedManifest:
    return parse_manifest(service.manifest, "default")


def is_published(service: Service, release: Release) -> bool:
    return all((release.path / name).read_bytes() == service.files[release.version, name] for name in FILES)


def test_a_bit_that_flips_in_a_download_is_refused(
    service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    version = service.publish(1)
    manifest = manifest_of(service)
    good = {name: service.files[version, name] for name in FILES}
    for number in range(FLIPS):
        name, cache = rng.choice(FILES), tmp_path / str(number)
        service.files[version, name] = flipped(good[name], rng)
        with pytest.raises(DigestError, match=name):
            fetch_release(client, manifest, cache)
        assert not (cache / "default" / version).exists()
        service.files[version, name] = good[name]
    assert is_published(service, fetch_release(client, manifest, cache))


def test_a_bit_that_flips_in_what_a_broken_download_left_is_not_resumed_from(
    service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    version = service.publish(1)
    manifest = manifest_of(service)
    for number in range(FLIPS):
        cache = tmp_path / str(number)
        name = rng.choice(FILES)
        data = service.files[version, name]
        staging = cache / "default" / f"{version}.part"
        staging.mkdir(parents=True)
        left = flipped(data[: rng.randrange(1, len(data) + 1)], rng)
        # Cut off under way, or complete and then rotten before the next start.
        (staging / (f"{name}.part" if number % 2 else name)).write_bytes(left)
        assert is_published(service, fetch_release(client, manifest, cache))


def test_a_file_that_was_cut_short_is_refused_in_a_download_and_replaced_in_the_cache(
    service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    version = service.publish(1)
    manifest = manifest_of(service)
    release = fetch_release(client, manifest, tmp_path / "cache")
    for number in range(FLIPS):
        name, cut = rng.choice(FILES), tmp_path / str(number)
        whole = service.files[version, name]
        service.files[version, name] = whole[: rng.randrange(len(whole))]
        with pytest.raises(DownloadError, match=name):
            fetch_release(client, manifest, cut)
        assert not (cut / "default" / version).exists()
        (release.path / name).write_bytes(service.files[version, name])
        service.files[version, name] = whole
        assert is_published(service, fetch_release(client, manifest, tmp_path / "cache"))


def test_a_bit_that_flips_in_the_cache_is_replaced_before_a_load(
    service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    service.publish(1)
    manifest = manifest_of(service)
    release = fetch_release(client, manifest, tmp_path)
    for _ in range(FLIPS):
        path = release.path / rng.choice((*FILES, RECEIPT))
        before, downloads = path.read_bytes(), len(service.ranges)
        path.write_bytes(flipped(before, rng))
        assert is_published(service, fetch_release(client, manifest, tmp_path))
        # A receipt may say the same in other bytes; a file of the drafter may not.
        assert path.name == RECEIPT or len(service.ranges) > downloads


def test_a_bit_that_flips_in_the_cache_is_refused_before_an_engine_loads_its_first_drafter(
    service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    """The check of both engines' plugins; of a receipt, a bit of what it says of the manifest changes no file."""
    service.publish(1)
    directory = fetch_release(client, manifest_of(service), tmp_path).path
    check_receipt(directory)
    check_receipt(tmp_path)  # of no cache
    for _ in range(FLIPS):
        path = directory / rng.choice(FILES)
        before = path.read_bytes()
        path.write_bytes(flipped(before, rng))
        with pytest.raises(DigestError, match=f"{path.name} has other bytes"):
            check_receipt(directory)
        path.write_bytes(before)
    for text in (b"", b"{", b"[]", b'{"sha256": 1}', b'{"sha256": {"other": ""}}', b'{"sha256": {}}', b"[" * 100_000):
        (directory / RECEIPT).write_bytes(text)
        with pytest.raises(DigestError, match="cannot be read"):
            check_receipt(directory)
    (directory / RECEIPT).unlink()
    (directory / RECEIPT).mkdir()
    with pytest.raises(DigestError, match="cannot be read"):
        check_receipt(directory)
    check_receipt(Path("x" * 300))  # no path that could be, but a model's name


def test_a_bit_that_flips_before_an_engine_restarts_is_replaced_by_the_agent(
    service: Service, engine: Engine, tmp_path: Path, rng: random.Random
) -> None:
    version = service.publish(1)
    published = {name: hashlib.sha256(service.files[version, name]).hexdigest() for name in FILES}
    with running_agent(service, engine, cache=tmp_path):
        for _ in range(RESTARTS):
            eventually(lambda: engine.version == version)
            settle(engine)
            engine.down()
            path = tmp_path / "default" / version / rng.choice(FILES)
            path.write_bytes(flipped(path.read_bytes(), rng))
            engine.restart()
        eventually(lambda: engine.version == version)
    assert len(engine.read) == RESTARTS + 1
    assert all(read.items() >= published.items() for read in engine.read)


# --- vLLM: the engine reads what the agent has just verified


class Vllm:
    """A vLLM whose plugin is real, and whose running model is not there: `loaded` is what would have come into it."""

    def __init__(self) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.restart()

    def restart(self) -> None:
        model = torch.nn.Linear(2, 2)
        runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: model)
        speculative = SimpleNamespace(method="eagle3")
        config = SimpleNamespace(
            speculative_config=speculative, parallel_config=SimpleNamespace(tensor_parallel_size=1)
        )
        self.worker = SimpleNamespace(model_runner=runner, vllm_config=config)

    def call(self, method: str, *args: Any) -> Future[list[Any]]:
        """As the engine core's link: calls go to one worker, at once."""
        future: Future[list[Any]] = Future()
        future.set_result([RPCS[method](self.worker, *args)])
        return future

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """As the engine client that vLLM gives to its endpoint plugins."""
        return self.call(method, *args).result()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm()
    monkeypatch.setattr(DrafterSwap, "_check_method", lambda _: None)
    monkeypatch.setattr(RunningDraft, "check", lambda _: ENGINES_CONFIG)
    monkeypatch.setattr(RunningDraft, "offsets", lambda _: ENGINES_VOCABULARY.d2t)
    monkeypatch.setattr(RunningDraft, "dtype", lambda _: torch.float32)
    monkeypatch.setattr(RunningDraft, "read_initial", lambda _: None)
    monkeypatch.setattr(RunningDraft, "load", lambda _, tensors: made.loaded.append(dict(tensors)))
    return made


@contextlib.asynccontextmanager
async def connected(kind: str, vllm: Vllm, cache: Path) -> AsyncIterator[protocol.Engine]:
    """The engine as the agent reaches it: inside it, or through the HTTP plugin."""
    if kind == "in process":
        yield CoreEngine("in-process:test", vllm, cache)  # type: ignore[arg-type]
        return
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DRAFTALIGN_DRAFTER_DIR", str(cache))
        plugin = DrafterEndpoints()
    app = FastAPI()
    plugin.attach_router(app)
    app.get("/metrics")(lambda: "")
    await plugin.init_state(vllm, None, Namespace())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        yield protocol.SwapEngine("http://engine", client)


def real_drafter(directory: Path) -> dict[str, bytes]:
    """The files of a drafter with real weights."""
    directory.mkdir()
    drafter = Eagle3Drafter(ENGINES_CONFIG, ENGINES_VOCABULARY)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    write_drafter(directory, drafter)
    return {name: (directory / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("kind", ["in process", "http"])
def test_a_bit_that_flips_between_the_agents_look_and_the_engines_is_not_swapped_in(
    kind: str, vllm: Vllm, tmp_path: Path, rng: random.Random
) -> None:
    """The files are read and checked by vLLM's plugin; only its running model is not there."""
    directory = tmp_path / "v1"
    good = real_drafter(directory)
    sha256s = {name: hashlib.sha256(data).hexdigest() for name, data in good.items()}
    manifest = VerifiedManifest("default", "v1", 1, "published", files_digest(sha256s), (), "f", "d")
    release = Release(manifest, directory, sha256s)

    async def swaps() -> None:
        async with connected(kind, vllm, tmp_path) as inside:
            if kind == "http":
                assert (await inside.state()).verifies
            for _ in range(FLIPS):
                path = directory / rng.choice(FILES)
                path.write_bytes(flipped(good[path.name], rng))
                with pytest.raises(OtherBytesError, match=f"{path.name} holds other bytes"):
                    await inside.swap(release)
                path.write_bytes(good[path.name])
            assert vllm.loaded == []
            assert await inside.swap(release) == release.sha256

    asyncio.run(swaps())
    assert vllm.loaded[0].keys() == load(good["model.safetensors"]).keys() - {"d2t", "t2d"}


def test_a_bit_that_flips_before_a_vllm_restarts_is_not_loaded_when_it_is_back(
    vllm: Vllm, service: Service, client: httpx.Client, tmp_path: Path, rng: random.Random
) -> None:
    """The agent's own step, the HTTP plugin and its loading code; a restart is a worker that knows nothing."""
    cache, files = tmp_path / "cache", real_drafter(tmp_path / "made")
    good = load(files["model.safetensors"])
    names = good.keys() - {"d2t", "t2d"}

    async def restarts() -> None:
        async with connected("http", vllm, cache) as engine:
            state = module._of(vllm.worker).state()
            service.publish(
                1, files=files, config_fingerprint=state["config_fingerprint"], d2t_sha256=state["d2t_sha256"]
            )
            offer = fetch_release(client, manifest_of(service), cache)

            def fetch(manifest: VerifiedManifest, again: bool) -> Release:
                return fetch_release(client, manifest, cache, again=again)

            follower = EngineFollower(engine, CanaryRule(), AgentMetrics(), cache, fetch)
            assert await follower.tick(offer)
            for number in range(FLIPS):
                path = offer.path / rng.choice((*FILES, RECEIPT))
                path.write_bytes(flipped(path.read_bytes(), rng))
                vllm.restart()
                assert await follower.tick(offer)
                assert is_published(service, offer)
                assert len(vllm.loaded) == number + 2

    asyncio.run(restarts())
    for loaded in vllm.loaded:
        assert loaded.keys() == names
        assert all(torch.equal(loaded[name], good[name]) for name in names)


def test_a_bit_that_flips_in_a_signed_manifest_is_refused(service: Service, tmp_path: Path, rng: random.Random) -> None:
    pytest.importorskip("cryptography", reason="signatures need the extra `signing`")
    private, public = new_key()
    (tmp_path / "key").write_bytes(private)
    signer, keys = SigningKey(tmp_path / "key"), PublicKeys.parse(public)
    service.publish(1, files={"model.safetensors": drafter_bytes(1)})
    body, nonce = repr(service.manifest).encode(), new_nonce()
    signature = signer.sign(nonce, body)
    keys.check(nonce, body, signature)
    for _ in range(FLIPS):
        with pytest.raises(SignatureError):
            keys.check(nonce, flipped(body, rng), signature)
