"""The plugin's API side against an engine client that answers what a test says; needs no vLLM."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from rl_hooks.engines.vllm.draft import RunningDraft, draft_model, started_with
from rl_hooks.engines.vllm.plugin import DrafterEndpoints
from rl_hooks.engines.vllm.swapper import Swapper, SwapProblem
from rl_hooks.engines.vllm.worker import RPC_METHODS, DrafterSwap, Staged


class Client:
    """An engine client with workers that hold `versions`."""

    def __init__(self, *versions: str) -> None:
        self.versions = list(versions)
        self.model_config = SimpleNamespace(enable_sleep_mode=True)
        self.asleep_after: str | None = None  # falls asleep once it has answered this
        self.asleep = False
        self.broken = False
        self.calls: list[str] = []
        self.failures: dict[str, dict[str, Any]] = {}  # method -> what the last worker answers

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert not self.asleep or (method, args) == ("draftalign_state", (True,)), "memory that is not mapped was read"
        if self.broken:
            raise RuntimeError("no such method")
        self.calls.append(method)
        self.asleep = method == self.asleep_after
        if method == "draftalign_staged":
            answers: list[dict[str, Any]] = [{"done": True, "sha256": "aa"} for _ in self.versions]
            return [*answers[:-1], self.failures.get(method, answers[-1])]
        if method == "draftalign_state":
            return [
                {"version": v, "sha256": v, "loaded": True, "swaps": 3, "shared_modules": [], "problem": None}
                for v in self.versions
            ]
        answers = [{"previous": v} for v in self.versions]
        return [*answers[:-1], self.failures.get(method, answers[-1])]


def test_a_sleeping_engine_is_not_looked_into(tmp_path: Path) -> None:
    client = Client("v1")
    swapper = Swapper(client, tmp_path)
    assert asyncio.run(swapper.state())["loaded"] is True
    client.asleep = True
    state = asyncio.run(swapper.state())
    assert (state["version"], state["loaded"], state["swaps"]) == ("v1", True, 3)  # whose the counts are
    assert "sleeps" in state["problem"]
    client.asleep = False
    state = asyncio.run(swapper.state())
    assert (state["loaded"], state["problem"]) == (True, None)


def test_every_api_process_tells_of_a_sleeping_engine_what_another_one_swapped_in(tmp_path: Path) -> None:
    client = Client("v1")
    swapper = Swapper(client, tmp_path)
    asyncio.run(swapper.state())
    client.versions = ["v2"]  # through another process
    client.asleep = True
    assert asyncio.run(swapper.state())["version"] == "v2"
    client.asleep = True
    other = asyncio.run(Swapper(client, tmp_path).state())  # of a process that has not asked before
    assert (other["version"], other["swaps"]) == ("v2", 3), "no restart, which a lower count would be taken for"


def test_a_worker_that_was_never_looked_at_says_so_asleep_without_a_first_look_at_its_weights() -> None:
    def unmapped() -> None:
        raise AssertionError("memory that is not mapped was read")

    worker = SimpleNamespace(model_runner=SimpleNamespace(get_draft_model=unmapped, get_model=unmapped))
    client = Client()
    client.asleep = True

    async def ask(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [{one.__name__: one for one in RPC_METHODS}[method](worker, *args)]

    client.collective_rpc = ask  # type: ignore[method-assign]
    state = asyncio.run(Swapper(client, None).state())
    assert (state["version"], state["loaded"], state["swaps"]) == (None, False, 0)
    assert "sleeps" in state["problem"]


def test_an_engine_that_falls_asleep_while_the_file_is_read_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    client = Client("v1")
    client.asleep_after = "draftalign_staged"
    with pytest.raises(SwapProblem, match="sleeps"):
        asyncio.run(Swapper(client, tmp_path).swap("v2", "v2"))
    assert "draftalign_apply" not in client.calls


def test_other_bytes_than_were_downloaded_are_not_swapped_in(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    client = Client("v1")
    with pytest.raises(SwapProblem, match="read aa for v2, bb was asked for"):
        asyncio.run(Swapper(client, tmp_path).swap("v2", "v2", {"model.safetensors": "bb"}))
    assert "draftalign_apply" not in client.calls
    assert asyncio.run(Swapper(client, tmp_path).swap("v2", "v2", {"model.safetensors": "aa"}))["sha256"] == "aa"


DIGESTS = {"model.safetensors": "aa" * 32, "config.json": "bb" * 32}


@pytest.mark.parametrize(
    ("sha256", "status"),
    [
        ({}, 200),  # a person
        ({"sha256": DIGESTS}, 412),
        ({"sha256": DIGESTS | {"config.json": "BB"}}, 422),
        ({"sha256": {"model.safetensors": "aa" * 32}}, 422),
        ({"sha256": "aa" * 32}, 422),
        ({"digest": DIGESTS}, 422),
    ],
)
def test_a_swap_names_the_digests_of_both_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha256: dict[str, Any], status: int
) -> None:
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path))
    (tmp_path / "v2").mkdir()
    client, plugin, app = Client("v1"), DrafterEndpoints(), FastAPI()
    plugin.attach_router(app)

    async def ask() -> httpx.Response:
        await plugin.init_state(client, None, Namespace())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            return await http.post("/drafter/swap", json={"path": "v2", "version": "v2"} | sha256)

    reply = asyncio.run(ask())
    assert reply.status_code == status, reply.text
    assert ("draftalign_apply" in client.calls) == (status == 200)


@pytest.mark.parametrize(
    ("token", "given", "status"),
    [
        ("", None, 200),
        ("secret", None, 401),
        ("secret", "Bearer other", 401),
        ("secret", "Bearer secret", 200),
        (" secret\n", "Bearer secret", 200),  # as a secret's file has it
        (" ", None, 401),
        (" ", "Bearer ", 401),
    ],
)
@pytest.mark.parametrize("call", ["GET /drafter/state", "POST /drafter/swap"])
def test_both_calls_ask_for_the_servers_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, token: str, given: str | None, status: int
) -> None:
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path))
    monkeypatch.setenv("DRAFTALIGN_SWAP_TOKEN", token)
    (tmp_path / "v2").mkdir()
    client, plugin, app = Client("v1"), DrafterEndpoints(), FastAPI()
    plugin.attach_router(app)
    headers = {} if given is None else {"Authorization": given}

    async def ask() -> httpx.Response:
        await plugin.init_state(client, None, Namespace())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            method, path = call.split()
            return await http.request(method, path, json={"path": "v2", "version": "v2"}, headers=headers)

    reply = asyncio.run(ask())
    assert reply.status_code == status, reply.text
    assert status == 200 or "draftalign_apply" not in client.calls


@pytest.mark.parametrize(
    ("worker", "status", "detail"),
    [
        ({"error": "its shapes differ", "status": 409}, 409, "its shapes differ"),
        ({"error": "other bytes", "status": 412}, 412, "other bytes"),
        ({"error": "apply: OSError: no disk", "status": 503}, 503, "apply: OSError: no disk"),
    ],
)
@pytest.mark.parametrize("method", ["draftalign_staged", "draftalign_apply"])
def test_a_workers_failure_is_an_answer_and_becomes_a_problem(
    tmp_path: Path, method: str, worker: dict[str, Any], status: int, detail: str
) -> None:
    (tmp_path / "v2").mkdir()
    client = Client("v1", "v1")
    client.failures[method] = worker
    with pytest.raises(SwapProblem) as caught:
        asyncio.run(Swapper(client, tmp_path).swap("v2", "v2"))
    assert (caught.value.status, caught.value.detail) == (status, detail)


class CoreClient:
    """VLLM's client of data-parallel cores, which for `collective_rpc` returns the first core's answers alone."""

    def __init__(self, *cores: Client) -> None:
        self.core_engines = cores

    async def call_utility_all_async(self, name: str, *given: Any) -> list[Any]:
        method, timeout_seconds, args, kwargs = given
        assert (name, timeout_seconds, kwargs) == ("collective_rpc", None, None)
        return [await core.collective_rpc(method, args) for core in self.core_engines]


class ParallelClient(Client):
    """An engine client over several data-parallel cores."""

    def __init__(self, *cores: Client) -> None:
        super().__init__()
        self.engine_core: Any = CoreClient(*cores)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return await self.engine_core.core_engines[0].collective_rpc(method, args)  # type: ignore[no-any-return]


def test_a_swap_that_a_further_data_parallel_core_refuses_fails(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    first, second = Client("v1"), Client("v1")
    swapper = Swapper(ParallelClient(first, second), tmp_path)
    second.failures["draftalign_apply"] = {"error": "its shapes differ", "status": 409}
    with pytest.raises(SwapProblem, match="its shapes differ") as caught:
        asyncio.run(swapper.swap("v2", "v2"))
    assert caught.value.status == 409
    second.failures.clear()
    assert asyncio.run(swapper.swap("v2", "v2"))["version"] == "v2"
    assert first.calls == second.calls


def test_data_parallel_cores_that_hold_different_drafters_hold_none(tmp_path: Path) -> None:
    state = asyncio.run(Swapper(ParallelClient(Client("v2"), Client("v1")), tmp_path).state())
    assert state["loaded"] is False
    assert "different drafters (['v2', 'v1'])" in state["problem"]


def test_no_drafter_is_swapped_where_vllm_hides_what_further_cores_answer(tmp_path: Path) -> None:
    """VLLM 0.31."""
    (tmp_path / "v2").mkdir()
    client = ParallelClient(Client("v1"), Client("v1"))
    client.engine_core = SimpleNamespace(core_engines=client.engine_core.core_engines)
    with pytest.raises(SwapProblem, match=r"take vLLM 0\.32") as caught:
        asyncio.run(Swapper(client, tmp_path).swap("v2", "v2"))
    assert caught.value.status == 503
    client.engine_core.core_engines = (Client("v1"),)
    assert asyncio.run(Swapper(client, tmp_path).swap("v2", "v2"))["version"] == "v2"


def test_no_call_of_a_worker_raises() -> None:
    """The answers of the other ranks would be left unread in vLLM, and be taken for answers to later calls."""
    worker = SimpleNamespace()  # every call fails: it has no model
    for method in RPC_METHODS:
        required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        answer = method(worker, *("x" for _ in required[1:]))
        assert answer["status"] == 503
        assert "AttributeError" in answer["error"]
    begun = SimpleNamespace(_draftalign_swap=object())
    assert method(begun, "one argument too many")["error"].startswith("end: TypeError")


def worker_of(drafter: str) -> Any:
    config = SimpleNamespace(draft_model_config=SimpleNamespace(model=drafter, revision=None))
    return SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=config))


def test_the_files_of_a_drafter_are_found_by_its_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="has no model"):
        started_with(worker_of(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked: list[Any] = []

    def snapshot(name: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((name, revision, local_files_only))
        return str(tmp_path)

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert started_with(worker_of("org/eagle3")) == tmp_path
    assert asked == [("org/eagle3", None, True)]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="org/eagle3"):
        started_with(worker_of("org/eagle3"))


def undrafted(**more: Any) -> SimpleNamespace:
    """A worker of an engine on one device, without a drafter."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    return SimpleNamespace(model_runner=SimpleNamespace(get_draft_model=lambda: None), vllm_config=config, **more)


def test_no_swap_falls_into_a_trainers_weight_update() -> None:
    worker = undrafted(_weight_update_active=True)
    swap = DrafterSwap(worker)
    swap._staged = Staged("/x", "v1")
    swap._staged.done.set()
    with pytest.raises(RuntimeError, match="updating"):
        swap.apply("v1", "")
    worker._weight_update_active = False
    assert swap.apply("v1", "")["version"] == "v1"


def test_the_drafters_module_is_found_where_a_runner_of_any_release_keeps_it() -> None:
    module = torch.nn.Linear(2, 2)
    wrapped = SimpleNamespace(unwrap=lambda: module)
    for runner in (
        SimpleNamespace(get_draft_model=lambda: module, drafter=None),
        SimpleNamespace(drafter=SimpleNamespace(model=module)),
        SimpleNamespace(drafter=SimpleNamespace(model=wrapped)),
        SimpleNamespace(speculator=SimpleNamespace(model=module)),
    ):
        assert draft_model(runner) is module
    for runner in (
        SimpleNamespace(get_draft_model=lambda: None, drafter=SimpleNamespace(model=module)),
        SimpleNamespace(),
        SimpleNamespace(speculator=None),
        SimpleNamespace(drafter=SimpleNamespace(prompt_lookup_max=4)),
    ):
        assert draft_model(runner) is None


def test_the_draft_vocabulary_outlives_the_engines_own_copy() -> None:
    """VLLM keeps d2t as a parameter: a level-2 sleep takes it away with the weights, and nobody brings it back."""
    draft = torch.nn.Module()
    draft.draft_id_to_target_id = torch.nn.Parameter(torch.tensor([3, 3, 5]), requires_grad=False)
    runner = SimpleNamespace(get_draft_model=lambda: draft, get_model=torch.nn.Module)
    running = RunningDraft(SimpleNamespace(model_runner=runner), runner.get_draft_model())
    draft.draft_id_to_target_id.zero_()
    assert running.offsets().tolist() == [3, 3, 5]


def test_the_draft_vocabulary_is_kept_before_a_server_can_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTALIGN_DRAFTER_DIR", str(tmp_path))
    client = Client("v1")
    asyncio.run(DrafterEndpoints().init_state(client, None, Namespace()))
    assert client.calls == ["draftalign_state"]
    client.broken = True
    asyncio.run(DrafterEndpoints().init_state(client, None, Namespace()))  # a server starts without it all the same


def test_workers_that_hold_different_drafters_hold_none(tmp_path: Path) -> None:
    state = asyncio.run(Swapper(Client("v2", "v1"), tmp_path).state())
    assert state["loaded"] is False
    assert "different drafters (['v2', 'v1'])" in state["problem"]
    assert asyncio.run(Swapper(Client("v2", "v2"), tmp_path).state())["loaded"] is True


@pytest.mark.parametrize("path", ["\ud800", "a" * 5000, "nul\x00"])
def test_a_path_that_is_none_is_refused_in_words(tmp_path: Path, path: str) -> None:
    with pytest.raises(SwapProblem) as caught:
        asyncio.run(Swapper(Client("v1"), tmp_path).swap(path, "v2"))
    assert caught.value.status in (404, 422)


def test_a_path_elsewhere_names_the_two_directories_that_must_agree(tmp_path: Path) -> None:
    with pytest.raises(SwapProblem) as refused:
        asyncio.run(Swapper(Client("a"), tmp_path / "drafters").swap(str(tmp_path / "other" / "v1"), "v1"))
    assert refused.value.status == 403
    for named in (str(tmp_path / "drafters"), "DRAFTALIGN_DRAFTER_DIR", "--cache-dir"):
        assert named in str(refused.value)


def test_an_engine_waits_for_no_file_that_is_still_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another API process may have staged the same version again just before this one's apply, from a slow disk."""
    read = threading.Event()
    monkeypatch.setattr(DrafterSwap, "_check_method", lambda _: read.wait(60))
    swap = DrafterSwap(undrafted())
    swap.stage("/slow", "v1")
    with pytest.raises(RuntimeError, match="v1 is still being read"):
        swap.apply("v1", "")
    read.set()
    deadline = time.monotonic() + 60
    while not swap.staged()["done"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert swap.apply("v1", "") == {"previous": None, "version": "v1"}
