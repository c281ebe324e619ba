"""The swap agent and SGLang, against a server that takes every call as SGLang 0.5.23 does, or refuses it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from helpers.drafter.formats_fixtures import ENGINES_CONFIG, ENGINES_VOCABULARY
from helpers.engine.agent_fixtures import Service, eventually, running_agent
from helpers.engine.sglang_contract import SGLangServer, Unpickler
from safetensors.torch import load, load_file, save
from torch import Tensor

from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from rl_hooks.agent.agent import SwapAgent
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.engines.candidate import DrafterRefusedError
from rl_hooks.engines.protocol import TREES
from rl_hooks.engines.sglang import direct, rounds
from rl_hooks.engines.sglang.adapter import SGLangEngine, process_identity, request_payload
from rl_hooks.engines.sglang.loader import (
    entered_layers,
    load_drafter,
    parse_request,
    running_d2t,
    running_drafter,
)
from rl_hooks.engines.sglang.memory import MEMORY
from rl_hooks.errors import EngineError, MetricsError, OtherBytesError, SwapRefusedError
from rl_hooks.format.release import Release, VerifiedManifest
from service.monitor import records

#: Bits that flip before a load; `make chaos` 1,000.
FLIPS = int(os.environ.get("DRAFTALIGN_FLIPS", "20"))
CALL = "/update_weights_from_tensor"


def drafter_files(
    directory: Path,
    seed: int,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    *,
    whole: bool = False,
    **config: Any,
) -> dict[str, bytes]:
    """The files of a small drafter, over the `whole` vocabulary or half of it, with tensors or fields changed."""
    torch.manual_seed(seed)
    if whole:
        drafter = Eagle3Drafter(replace(ENGINES_CONFIG, draft_vocab_size=16), DraftVocabulary.full(16))
    else:
        drafter = Eagle3Drafter(ENGINES_CONFIG, ENGINES_VOCABULARY)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    directory.mkdir(parents=True, exist_ok=True)
    write_drafter(directory, drafter)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        (directory / "model.safetensors").write_bytes(save(tensors))
    return {name: (directory / name).read_bytes() for name in ("model.safetensors", "config.json")}


@pytest.fixture
def service() -> Iterator[Service]:
    peer = Service()
    yield peer
    peer.down()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that agent and server share."""
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=[1, 2])
def server(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Iterator[SGLangServer]:
    drafter_files(tmp_path / "initial", seed=0)
    peer = SGLangServer(tmp_path / "initial", ranks=request.param)
    yield peer
    peer.down()
    assert peer.violations == []
    assert peer.session is None
    assert not peer.paused


def agent(service: Service, server: SGLangServer, home: Path, **changes: Any) -> Any:
    return running_agent(service, server, cache=home, engine_kind="sglang", **changes)  # type: ignore[arg-type]


def serves(server: SGLangServer, files: dict[str, bytes]) -> bool:
    """Whether every rank has these weights."""
    sent = load(files["model.safetensors"])
    return all(
        torch.equal(model.lm_head.weight, sent["lm_head.weight"])
        and torch.equal(model.model.fc.weight, sent["fc.weight"])
        and torch.equal(model.model.layers[0].self_attn.qkv_proj.weight[-4:], sent["midlayer.self_attn.v_proj.weight"])
        for model in server.models
    )


def follower_of(running: SwapAgent, server: SGLangServer, version: str) -> EngineFollower:
    """Of this server, once it has that version."""
    eventually(lambda: server.url in running.followers and running.followers[server.url].loaded_version == version)
    return running.followers[server.url]


def test_a_drafter_is_swapped_by_one_call_and_no_other(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    files = [drafter_files(tmp_path / str(n), seed=n) for n in (1, 2)]
    with agent(service, server, home) as running:
        first = service.publish(1, files=files[0])
        follower_of(running, server, first)
        assert serves(server, files[0])
        second = service.publish(2, files=files[1])
        eventually(lambda: running.followers[server.url].loaded_version == second)
        assert serves(server, files[1])
        assert running.followers[server.url].seen.drafting == "greedy"
    assert [path for path, _ in server.calls] == [CALL] * 2
    body = server.calls[1][1]
    assert body.keys() == {"serialized_named_tensors", "load_format", "flush_cache"}
    assert bool((server.models[0].model.embed_tokens.weight == 1).all())  # the policy's
    assert not list((home / "default" / "engines").glob("swap-*"))


def test_a_server_that_drafts_trees_gets_drafters_and_the_service_is_told(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    server.info |= {"speculative_eagle_topk": 4}
    with agent(service, server, home) as running:
        version = service.publish(1, files=drafter_files(tmp_path / "1", seed=1))
        follower_of(running, server, version)
        assert running.followers[server.url].seen.drafting == TREES
        assert TREES == records.TREES, "and the service knows the word"


def test_a_restarted_server_gets_its_drafter_back_and_a_restarted_agent_leaves_it_alone(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    files = drafter_files(tmp_path / "1", seed=1)
    with agent(service, server, home) as running:
        version = service.publish(1, files=files)
        follower_of(running, server, version)
        server.restart()
        eventually(lambda: len(server.calls) == 2)
        eventually(lambda: serves(server, files))
        eventually(lambda: running.followers[server.url].loaded_version == version)
    with agent(service, server, home) as again:
        eventually(lambda: server.url in again.followers and again.followers[server.url].loaded_version)
    assert len(server.calls) == 2


def test_a_trainers_session_is_waited_for(service: Service, server: SGLangServer, home: Path, tmp_path: Path) -> None:
    files = drafter_files(tmp_path / "1", seed=1)
    server.paused, server.session = True, "target"  # the trainer brings a policy
    with agent(service, server, home):
        service.publish(1, files=files)
        eventually(lambda: len(server.calls) >= 2)
        assert not serves(server, files)
        with server.lock:
            server.session = None
        eventually(lambda: serves(server, files))
        assert server.paused, "the pause is the trainer's"
    server.paused = False


@pytest.fixture
def older(tmp_path: Path, home: Path) -> Iterator[SGLangServer]:
    """A server without weight-update sessions, as RL stacks install it. A trainer has paused it."""
    drafter_files(tmp_path / "initial", seed=0)
    peer = SGLangServer(tmp_path / "initial", ranks=2, sessions=False)
    peer.paused = True
    yield peer
    peer.down()
    assert peer.violations == []
    assert peer.paused


@pytest.mark.parametrize("paused", [True, False])
def test_without_sessions_one_call_swaps_and_neither_the_policy_nor_a_pause_is_touched(
    service: Service, older: SGLangServer, home: Path, tmp_path: Path, paused: bool
) -> None:
    files = drafter_files(tmp_path / "1", seed=1)
    older.paused = paused
    with agent(service, older, home) as running:
        version = service.publish(1, files=files)
        follower_of(running, older, version)
        assert serves(older, files)
    assert older.paused is paused
    older.paused = True
    ((path, body),) = older.calls
    assert path == "/update_weights_from_tensor"
    assert body.keys() == {"serialized_named_tensors", "load_format", "flush_cache"}
    assert not older.policy.lm_head.weight.any()
    assert bool((older.policy.model.embed_tokens.weight == 1).all())


def test_without_sessions_a_restarted_server_gets_its_drafter_back(
    service: Service, older: SGLangServer, home: Path, tmp_path: Path
) -> None:
    """The mark alone differs between its starts: seed and options are the same."""
    files = drafter_files(tmp_path / "1", seed=1)
    with agent(service, older, home) as running:
        version = service.publish(1, files=files)
        follower_of(running, older, version)
        older.restart()
        older.paused = True
        eventually(lambda: serves(older, files))
        eventually(lambda: running.followers[older.url].loaded_version == version)
    with agent(service, older, home) as again:
        eventually(lambda: older.url in again.followers and again.followers[older.url].loaded_version)
    assert len(older.calls) == 2


def test_without_our_plugin_nothing_is_swapped_and_the_agent_says_what_to_install(
    older: SGLangServer, server: SGLangServer, home: Path
) -> None:
    for one in (older, server):
        one.plugin = False
        one.restart()
        with pytest.raises(SwapRefusedError, match=r"plugin is not loaded in this SGLang 0\.5\..*Install rl_hooks"):
            swap(one, release(home, "one", 1))
    older.paused = True
    with pytest.raises(EngineError, match=r"no mark of our plugin.*install rl_hooks"):
        asyncio.run(state(older, home))
    assert older.calls == server.calls == []


async def state(server: SGLangServer, home: Path) -> Any:
    """What the adapter says of it."""
    async with httpx.AsyncClient() as client:
        return await SGLangEngine(server.url, client, home).state()


def test_a_drafter_that_the_loader_refuses_without_sessions_is_not_hidden_by_the_policys_call(
    older: SGLangServer, home: Path
) -> None:
    before = older.models[0].weights()
    with pytest.raises(SwapRefusedError, match="NaN"):
        swap(older, release(home, "bad", 1, refuse_later))
    assert all(torch.equal(now, before[name]) for name, now in older.models[0].weights().items())


def test_the_loader_touches_nothing_while_the_memory_of_the_weights_is_released(
    older: SGLangServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sessions our plugin cannot refuse one."""
    monkeypatch.setattr(MEMORY, "released", True)
    before = older.models[0].weights()
    with pytest.raises(EngineError, match="ask again once it is resumed"):
        swap(older, release(home, "one", 1))
    assert all(torch.equal(now, before[name]) for name, now in older.models[0].weights().items())
    monkeypatch.setattr(MEMORY, "released", False)
    assert swap(older, release(home, "one", 1))


class Manager:
    """SGLang's tokenizer manager, as far as an update asks it."""

    is_pause = False
    server_args = SimpleNamespace(speculative_algorithm="EAGLE3", custom_weight_loader=[direct.LOADER])

    def update(self, request: Any, http: Any = None) -> tuple[bool, Any, Any, Any]:
        return self.is_pause, self.known(), request.load_format, http

    def known(self) -> int:
        return id(self)


def test_only_our_update_finds_generation_paused_which_it_is_not() -> None:
    manager = Manager()
    ours, theirs = (update_of(load_format) for load_format in (direct.LOADER, None))
    assert direct.updated(Manager.update, manager, ours, "http") == (True, id(manager), direct.LOADER, "http")
    assert direct.updated(Manager.update, manager, theirs, http="http") == (False, id(manager), None, "http")
    assert manager.is_pause is False
    assert ours.disable_draft_model is None
    newer = SimpleNamespace(load_format=direct.LOADER, selector="all")
    direct.updated(Manager.update, manager, newer)
    assert newer.selector == "draft"


def test_an_update_of_ours_opens_and_ends_its_own_session_and_none_beside_a_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's messages are stood in for; the tests on the real server have them."""
    names = ("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput", "UpdateWeightsFromTensorReqOutput")
    io_struct = SimpleNamespace(**dict.fromkeys(names, SimpleNamespace))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    calls: list[str] = []

    def load(manager: Any, request: Any) -> str:
        calls.append(f"load in {manager._session}")
        if request.breaks:
            raise RuntimeError("broken")
        return "loaded"

    manager = SimpleNamespace(_session=None)
    manager.begin_weight_update = lambda request: setattr(manager, "_session", request.selector)
    manager.end_weight_update = lambda _: setattr(manager, "_session", None)
    ours = SimpleNamespace(load_format=direct.LOADER, breaks=False)
    assert direct.in_session(load, manager, ours) == "loaded"
    with pytest.raises(RuntimeError, match="broken"):
        direct.in_session(load, manager, SimpleNamespace(load_format=direct.LOADER, breaks=True))
    assert direct.in_session(load, manager, SimpleNamespace(load_format=None, breaks=False)) == "loaded"
    assert (calls, manager._session) == (["load in draft", "load in draft", "load in None"], None)

    manager._session = "target"
    refused: Any = direct.in_session(load, manager, ours)
    assert (refused.success, manager._session, len(calls)) == (False, "target", 3)
    assert "session is open" in refused.message
    manager._session = None
    monkeypatch.setattr(MEMORY, "released", True)
    refused = direct.in_session(load, manager, ours)
    assert (refused.success, len(calls)) == (False, 3)
    assert "ask again once it is resumed" in refused.message


def update_of(load_format: str | None, disable_draft_model: bool | None = None) -> Any:
    """What a client has posted."""
    return SimpleNamespace(load_format=load_format, disable_draft_model=disable_draft_model)


def test_a_trainers_update_that_names_no_model_leaves_an_eagle_3_drafter_alone() -> None:
    manager, ours = Manager(), [direct.LOADER]
    for said, method, loaders, expected in (
        (None, "EAGLE3", ours, True),
        (False, "EAGLE3", ours, False),  # a trainer that says so trains the drafter as well
        (None, "EAGLE3", None, None),  # no agent swaps here
        (None, "EAGLE", ours, None),  # the policy's own module
        (None, None, ours, None),
    ):
        manager.server_args = SimpleNamespace(speculative_algorithm=method, custom_weight_loader=loaders)
        request = update_of("flattened_bucket", said)
        direct.updated(Manager.update, manager, request)
        assert request.disable_draft_model is expected


def test_a_step_says_when_it_was_launched_and_its_copy_says_the_same() -> None:
    batch, copy = SimpleNamespace(), SimpleNamespace()
    direct.copied(copy, batch)
    assert copy.launch_ts is None
    direct.launched(None, batch)
    direct.copied(copy, batch)
    assert copy.launch_ts == batch.launch_ts <= time.monotonic()


def test_a_release_of_another_shape_loses_no_step_by_our_hooks(caplog: pytest.LogCaptureFixture) -> None:
    other: Any = object()  # takes no attribute
    for _ in range(2):
        direct.launched(None, other)
        direct.copied(other, other)
        direct.described(other)
    for name in ("launched", "copied", "described"):
        assert caplog.text.count(f"({name}: ") == 1


def test_that_an_older_server_sends_no_features_is_said_where_its_scheduler_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = dict[str, Any]()
    kinds = SimpleNamespace(BEFORE=1, AFTER=2, AROUND=3)
    registry = SimpleNamespace(register=lambda target, hook, _: hooks.setdefault(target, hook))
    name = "sglang.srt.plugins.hook_registry"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(HookRegistry=registry, HookType=kinds))
    monkeypatch.setattr(direct, "register", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("DRAFTALIGN_URL", "http://127.0.0.1:9")
    assert rounds.register() is None  # in each process of a server
    assert "sends no features" not in caplog.text
    hooks[f"{direct.SCHEDULER}.__init__"](None)
    assert "sends no features" in caplog.text
    monkeypatch.setattr(direct, "register", lambda: False)  # it has sessions
    for version, follows in (("0.5.22.post1", False), ("0.5.23", True), ("0.6.0rc1", True), ("0.0.0.dev0", False)):
        hooks.clear()
        monkeypatch.setattr(rounds, "_version", lambda version=version: version)
        assert (rounds.register() is not None) is follows
        assert (f"{direct.SCHEDULER}.__init__" in hooks) is not follows


def test_the_process_is_named_in_what_its_scheduler_says_and_the_mark_is_a_text() -> None:
    answer = SimpleNamespace(internal_state={"last_gen_throughput": 1.0})
    direct.described(answer, None, None)
    mark = direct.mark_of({"internal_states": [answer.internal_state]})
    assert mark
    others: list[Any] = [None, [], {}, ["draftalign"], [{"draftalign": 1}], [{}]]
    for states in others:
        assert direct.mark_of({"internal_states": states}) is None
    assert process_identity({"internal_states": [answer.internal_state]}) == mark


def test_a_drafter_over_the_whole_vocabulary_is_swapped(service: Service, home: Path, tmp_path: Path) -> None:
    """SGLang reads no d2t of one, and neither is there any in what is published."""
    drafter_files(tmp_path / "initial", seed=0, whole=True)
    files = drafter_files(tmp_path / "1", seed=1, whole=True)
    assert "d2t" not in load(files["model.safetensors"])
    server = SGLangServer(tmp_path / "initial")
    try:
        with agent(service, server, home) as running:
            version, followers = service.publish(1, files=files), running.followers
            eventually(lambda: server.url in followers and followers[server.url].loaded_version == version)
        assert serves(server, files)
    finally:
        server.down()


def test_a_drafter_without_a_vocabulary_of_the_size_that_runs_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["d2t"], tensors["t2d"]

    drafter_files(tmp_path / "initial", 0, change)
    server = SGLangServer(tmp_path / "initial")
    server.down()
    (model,) = server.models
    with pytest.raises(DrafterRefusedError, match="has no d2t"):
        running_d2t(model, running_drafter(model))


def change_vocabulary(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.arange(8) + 1
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (None, {"norm_before_residual": True}, "norm_before_residual"),
        (change_vocabulary, {}, "d2t differs"),
    ],
)
def test_what_sglang_cannot_serve_is_refused_before_anything_is_asked_of_it(
    service: Service,
    server: SGLangServer,
    home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Any,
    config: dict[str, Any],
    reason: str,
) -> None:
    before = server.models[0].weights()
    with agent(service, server, home):
        service.publish(1, files=drafter_files(tmp_path / "1", 1, change, **config))
        eventually(lambda: reason in caplog.text)
    assert server.calls == []
    assert all(torch.equal(now, before[name]) for name, now in server.models[0].weights().items())


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"dp_size": 2}, "--dp-size 1"),
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"custom_weight_loader": None}, "--custom-weight-loader"),
    ],
)
def test_a_server_that_cannot_take_drafters_says_how_to_start_it(
    service: Service,
    server: SGLangServer,
    home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fact: dict[str, Any],
    reason: str,
) -> None:
    server.info |= fact
    with agent(service, server, home):
        service.publish(1, files=drafter_files(tmp_path / "1", 1))
        eventually(lambda: reason in caplog.text)
    assert server.calls == []


def test_a_server_that_speculates_by_another_method_is_counted_and_left_alone(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    server.info |= {"speculative_algorithm": "NGRAM"}
    server.plugin = False  # not needed without swaps
    with agent(service, server, home) as running:
        service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower_of(running, server, "ngram")
        server.end(rounds=100, emitted=120, requests=1)
        eventually(lambda: service.last_report("ngram").get("rounds") == 100)
    assert server.calls == []
    with pytest.raises(SwapRefusedError, match="NGRAM"):
        swap(server, release(home, "one", 1))


def test_the_digest_of_what_every_rank_read_is_answered(server: SGLangServer, home: Path) -> None:
    offered = release(home, "one", 1)
    assert swap(server, offered) == hashlib.sha256((offered.path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_were_asked_for_are_not_loaded(server: SGLangServer, home: Path, name: str) -> None:
    before = [model.weights() for model in server.models]
    offered = release(home, "one", 1)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in offered.path.iterdir()}
    offered = replace(offered, sha256s=digests)
    good = (offered.path / name).read_bytes()
    (offered.path / name).write_bytes(good[:-2] + bytes([good[-2] ^ 4]) + good[-1:])
    with pytest.raises(OtherBytesError, match=rf"{name} (holds other bytes.*downloads this|is not what was downl)"):
        swap(server, offered)
    for model, old in zip(server.models, before, strict=True):
        assert all(torch.equal(now, old[key]) for key, now in model.weights().items())
    (offered.path / name).write_bytes(good)
    assert swap(server, offered) == digests["model.safetensors"]


@pytest.mark.chaos
@pytest.mark.timeout(900 + FLIPS)
def test_random_bits_that_flip_before_a_load_are_refused(server: SGLangServer, home: Path) -> None:
    """`DRAFTALIGN_FLIPS` sets how many; one in both files."""
    rng = random.Random(14)
    before = [model.weights() for model in server.models]
    offered = release(home, "one", 1)
    good = {path.name: path.read_bytes() for path in offered.path.iterdir()}
    offered = replace(offered, sha256s={name: hashlib.sha256(data).hexdigest() for name, data in good.items()})
    for _ in range(FLIPS):
        name = rng.choice(sorted(good))
        data = bytearray(good[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (offered.path / name).write_bytes(data)
        with pytest.raises(OtherBytesError):
            swap(server, offered)
        (offered.path / name).write_bytes(good[name])
    for model, old in zip(server.models, before, strict=True):
        assert all(torch.equal(now, old[key]) for key, now in model.weights().items())
    assert swap(server, offered)


def test_an_answer_that_is_no_json_is_the_engines_fault_and_no_bug_of_the_agent(tmp_path: Path) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"<html>")))
    with pytest.raises(EngineError, match="/server_info: the answer is not JSON: '<html>'"):
        asyncio.run(SGLangEngine("http://engine", httpx.AsyncClient(transport=transport), tmp_path).state())


def swap(server: SGLangServer, release: Release) -> str | None:
    async def once() -> str | None:
        async with httpx.AsyncClient() as client:
            cache = release.path.parent
            engine = SGLangEngine(server.url, client, cache)
            return await engine.swap(release)

    return asyncio.run(once())


def release(home: Path, name: str, seed: int, change: Any = None, **config: Any) -> Release:
    path = home / "default" / name
    drafter_files(path, seed, change, **config)
    (path.parent / "engines").mkdir(exist_ok=True)
    return Release(VerifiedManifest("default", name, 1, "", "", (), "", ""), path)


_IDS = "eagle_aux_hidden_state_layer_ids"


def refuse_later(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][0] = torch.nan


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (refuse_later, {}, "norm.weight"),
        (drop, {}, "down_proj"),
        (None, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta"),
        (None, {_IDS: [2, 3, 4], "eagle_config": {_IDS: [1, 2, 3]}}, "aux_layers"),
    ],
)
def test_the_loader_refuses_a_drafter_before_it_copies_and_generation_goes_on(
    server: SGLangServer, home: Path, change: Any, config: dict[str, Any], reason: str
) -> None:
    before = [model.weights() for model in server.models]
    with pytest.raises(SwapRefusedError, match=reason):
        swap(server, release(home, "bad", 1, change, **config))
    assert [path for path, _ in server.calls] == [CALL]
    for model, old in zip(server.models, before, strict=True):
        assert all(torch.equal(now, old[name]) for name, now in model.weights().items())


def test_a_load_that_breaks_half_way_puts_the_old_drafter_back(server: SGLangServer, home: Path) -> None:
    before = [model.weights() for model in server.models]
    for model in server.models:
        model.break_after = 5
    with pytest.raises(EngineError, match="half-way"):
        swap(server, release(home, "one", 1))
    for model, old in zip(server.models, before, strict=True):
        assert all(torch.equal(now, old[name]) for name, now in model.weights().items())
    swap(server, release(home, "two", 2))  # and nothing is left open
    assert not any(
        torch.equal(m.lm_head.weight, o["lm_head.weight"]) for m, o in zip(server.models, before, strict=True)
    )


def test_a_server_with_another_directory_is_told_apart_from_one_that_refuses(
    server: SGLangServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path / "elsewhere"))
    before = server.models[0].weights()
    with pytest.raises(EngineError, match="DRAFTALIGN_DRAFTER_DIR"):
        swap(server, release(home, "one", 1))
    assert all(torch.equal(now, before[name]) for name, now in server.models[0].weights().items())


def test_a_call_that_fails_is_asked_again(server: SGLangServer, home: Path) -> None:
    server.fail[CALL] = 1
    with pytest.raises(EngineError, match="500"):
        swap(server, release(home, "one", 1))
    assert swap(server, release(home, "one", 1))


def test_counters_are_booked_under_the_version_and_the_trainers_policy(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    server.weight_version = "7"
    with agent(service, server, home, canary=CanaryRule(rounds=0)) as running:
        version = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower_of(running, server, version)
        server.play(rounds=100, accepted=(80, 50, 20))
        eventually(lambda: service.last_report(version, 7).get("rounds") == 100)
    report = service.last_report(version, 7)
    assert (report["emitted_tokens"], report["accepted_tokens"], report["drafted_tokens"]) == (250, 150, 300)
    assert report["accepted_per_position"] == [80, 50, 20]
    server.play(rounds=10, accepted=(8, 5, 2))  # while there is no agent
    with agent(service, server, home, canary=CanaryRule(rounds=0)):
        eventually(lambda: service.last_report(version, 7).get("rounds") == 110)
    assert service.last_report(version, 7)["drafted_tokens"] == 330, "the next agent's first look knows the depth too"


def test_a_request_that_runs_over_a_swap_is_booked_in_parts(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    """SGLang counts it when it ends: all its rounds would be the newer drafter's."""
    with agent(service, server, home, canary=CanaryRule(rounds=0)) as running:
        old = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower = follower_of(running, server, old)
        server.play(rounds=100, accepted=(10, 0, 0))
        eventually(lambda: follower.ledger.version_counts(old).rounds == 100)
        new = service.publish(2, files=drafter_files(tmp_path / "2", 2))
        eventually(lambda: follower.loaded_version == new)
        server.end(rounds=150, emitted=285, requests=1)
        server.play(rounds=50, accepted=(50, 40, 35))
        eventually(lambda: follower.ledger.version_counts(new).rounds == 50)
    counts = [follower.ledger.version_counts(version) for version in (old, new)]
    assert [(one.rounds, one.emitted_tokens) for one in counts] == [(100, 110), (50, 175)]


def test_a_canary_decides_while_the_requests_of_before_still_run(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path
) -> None:
    with agent(service, server, home, canary=CanaryRule(rounds=50)) as running:
        old = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower = follower_of(running, server, old)
        for counted in (50, 100):
            server.play(rounds=50, accepted=(40, 30, 20))
            eventually(lambda: follower.ledger.version_counts(old).rounds == counted)  # noqa: B023 - called at once
        dead = service.publish(2, files=drafter_files(tmp_path / "2", 2))
        eventually(lambda: follower.loaded_version == dead)
        server.play(rounds=60, accepted=(0, 0, 0))
        eventually(lambda: follower.loaded_version == old)
    assert server.counters["requests"] == 0


def test_a_server_that_was_swapped_and_started_again_with_another_method_is_counted_without_the_plugin(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(service, server, home, canary=CanaryRule(rounds=0)) as running:
        version = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower_of(running, server, version)
        server.plugin = False
        server.restart()
        server.info |= {"speculative_algorithm": "NGRAM"}
        eventually(lambda: running.followers[server.url].loaded_version == "ngram")
        server.end(rounds=100, emitted=120, requests=1)
        eventually(lambda: service.last_report("ngram").get("rounds") == 100)
    assert "Install rl_hooks" not in caplog.text


def test_a_plugin_that_a_fault_has_ended_is_told_of_and_the_server_still_gets_its_drafters(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it had counted stays on the page: the server looked idle."""
    with agent(service, server, home, canary=CanaryRule(rounds=0)) as running:
        version = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        follower_of(running, server, version)
        server.play(rounds=100, accepted=(80, 50, 20))
        server.fault = True
        eventually(lambda: "has ended by a fault" in caplog.text)
        newer = service.publish(2, files=drafter_files(tmp_path / "2", 2))
        eventually(lambda: running.followers[server.url].loaded_version == newer)


def test_a_server_that_has_released_its_weights_is_left_alone_and_asked_again(
    service: Service, server: SGLangServer, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.released = True
    with agent(service, server, home) as running:
        version = service.publish(1, files=drafter_files(tmp_path / "1", 1))
        eventually(lambda: "has released the memory of its weights" in caplog.text)
        assert server.calls == []
        server.released = False
        follower_of(running, server, version)
    assert [path for path, _ in server.calls] == [CALL]


def test_metrics_that_are_off_are_an_error_that_says_so(tmp_path: Path) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"other 1\n")))
    with pytest.raises(MetricsError, match="--enable-metrics"):
        asyncio.run(SGLangEngine("http://engine", httpx.AsyncClient(transport=transport), tmp_path).snapshot())


@pytest.mark.parametrize("value", ["+Inf", "NaN", "-1", "1e300"])
@pytest.mark.parametrize("name", ["draftalign:spec_decode_rounds_total", "sglang:generation_tokens_total"])
def test_a_count_that_no_counter_can_have_is_a_metrics_error(tmp_path: Path, name: str, value: str) -> None:
    body = httpx.ByteStream(f"{name} {value}\n".encode())
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=body)))
    with pytest.raises(MetricsError, match="expected a number from 0"):
        asyncio.run(SGLangEngine("http://engine", client, tmp_path).snapshot())


@pytest.mark.parametrize(
    ("ended", "runs", "told"),
    [("9", "3", (9, 3)), ("NaN", "-1", (None, None)), ("1e300", "2", (None, 2)), ("7", "+Inf", (7, None))],
)
def test_requests_are_told_where_a_counter_can_have_that_value_and_rounds_count_either_way(
    tmp_path: Path, ended: str, runs: str, told: tuple[int | None, int | None]
) -> None:
    page = "draftalign:spec_decode_rounds_total 20\n"
    page += f"sglang:num_requests_total {ended}\nsglang:num_running_reqs {runs}\n"
    body = httpx.ByteStream(page.encode())
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=body)))
    engine = SGLangEngine("http://engine", client, tmp_path)
    engine._depth = 3  # as `state` has found it
    counts = asyncio.run(engine.snapshot()).counts
    assert (counts.rounds, counts.finished_requests, counts.running_requests) == (20, *told)


def test_the_request_passes_the_unpickler_as_a_byte_tensor() -> None:
    request = {"path": "/somewhere/ä", "version": "v1", "outcome": "/else", "sha256": {}}
    ((name, tensor),) = Unpickler(io.BytesIO(base64.b64decode(request_payload(request)))).load()
    assert name == "draftalign.request"
    assert tensor.dtype == torch.uint8
    assert parse_request([(name, tensor)]) == request


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("model.fc.weight", torch.zeros(2))],
        [("draftalign.request", torch.tensor([1, 2, 3], dtype=torch.uint8))],
        [("draftalign.request", torch.tensor(list(b'{"path": 1}'), dtype=torch.uint8))],
    ],
)
def test_the_loader_never_raises_whatever_it_is_given(server: SGLangServer, tensors: Any) -> None:
    before = server.models[0].weights()
    load_drafter(server.models[0], tensors)
    assert all(torch.equal(now, before[name]) for name, now in server.models[0].weights().items())


def test_the_loader_reads_and_writes_only_where_it_may(server: SGLangServer, home: Path, tmp_path: Path) -> None:
    inside = release(home, "good", 1)
    drafter_files(tmp_path / "outside", 1)
    before = server.models[0].weights()
    for path, outcome in ((tmp_path / "outside", home / "o"), (inside.path, tmp_path / "o")):
        outcome.mkdir()
        request = {"path": str(path), "version": "v", "outcome": str(outcome), "sha256": {}}
        load_drafter(server.models[0], Unpickler(io.BytesIO(base64.b64decode(request_payload(request)))).load())
    assert list((tmp_path / "o").iterdir()) == []
    said = json.loads(next((home / "o").iterdir()).read_text())
    assert "not under DRAFTALIGN_DRAFTER_DIR" in said["failed"]
    assert all(torch.equal(now, before[name]) for name, now in server.models[0].weights().items())


def test_layers_are_read_as_sglang_reads_them() -> None:
    assert entered_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}) == (1, 2, 3)
    with pytest.raises(DrafterRefusedError, match="eagle_config"):
        entered_layers({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})


def test_two_starts_are_told_apart() -> None:
    info = {"startup_time": {"scheduler_e2e": 1.5}, "random_seed": 1, "launch_command": "x"}
    assert process_identity(info) == process_identity(dict(info))
    assert process_identity(info) != process_identity(info | {"random_seed": 2})
    with pytest.raises(EngineError, match="startup_time"):
        process_identity({})


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow meanwhile: neither the agent's, nor those of the server's loader."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_leaves_server_and_agent_with_what_they_have(server: SGLangServer, home: Path) -> None:
    """What cannot be told is not loaded: its rounds would be booked for the drafter before it."""
    offered = release(home, "one", 1)
    before = server.models[0].weights()

    async def run() -> None:
        async with httpx.AsyncClient() as client:
            engine = SGLangEngine(server.url, client, home / "default")
            with full_disk():
                with pytest.raises(EngineError, match=r"wrote an outcome; .* and has room"):
                    await engine.swap(offered)
                assert not (await engine.state()).loaded
            assert all(torch.equal(now, before[name]) for name, now in server.models[0].weights().items())
            assert await engine.swap(offered) is not None
            assert (await engine.state()).version == "one"

    asyncio.run(run())


def test_a_load_that_comes_when_its_agent_waits_no_longer_changes_nothing(server: SGLangServer, home: Path) -> None:
    """A server that was paused does what it was asked minutes ago, and by then the agent may have swapped again."""
    model, offered = server.models[0], release(home, "one", 1)
    before = {name: weight.clone() for name, weight in model.weights().items()}
    gone = home / "default/engines/swap-gone"
    request = {"path": str(offered.path), "version": "one", "outcome": str(gone), "sha256": {}}
    load_drafter(model, Unpickler(io.BytesIO(base64.b64decode(request_payload(request)))).load())
    assert all(torch.equal(now, before[name]) for name, now in model.weights().items())
    assert not gone.exists()
