"""Drafters swapped on a real SGLang under load, and what it must refuse."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, odd_prompts, random_drafter, write
from helpers.engine.server_load import Load, alpha, edited, logged
from sglang_server.sglang_process import DEPTH, SGLangProcess
from torch import Tensor

from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from drafter.vocabulary import DraftVocabulary
from examples.features import batch_of
from rl_hooks.agent.download import strip_shared
from rl_hooks.engines.sglang.adapter import SGLangEngine
from rl_hooks.errors import EngineError, OtherBytesError, SwapRefusedError
from rl_hooks.format.eagle3 import Llama3Rope
from rl_hooks.format.release import Release, VerifiedManifest


def release(drafters: Path, source: Path, version: str, **digests: str) -> Release:
    """A copy of a checkpoint where the server may read, as the agent would have left it."""
    path = drafters / "default" / version
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    strip_shared(path / "model.safetensors")
    return Release(VerifiedManifest("default", version, 1, "", "", (), "", ""), path, digests)


def with_engine(server: SGLangProcess, call: Callable[[SGLangEngine], Any]) -> Any:
    """Call the adapter."""

    async def run() -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            cache = Path(server.environment["DRAFTALIGN_DRAFTER_DIR"]) / "default"
            return await call(SGLangEngine(server.url, client, cache))

    return asyncio.run(run())


def swap(server: SGLangProcess, drafters: Path, source: Path, version: str) -> None:
    """Swap a drafter in."""
    offered = release(drafters, source, version)
    with_engine(server, lambda engine: engine.swap(offered))


def replayed(server: SGLangProcess, drafter: Eagle3Drafter, prompts: list[list[int]]) -> tuple[int, int, int, int]:
    """(live tokens, live rounds, replayed tokens, replayed rounds) of greedy answers to prompts that are not cached."""
    server.flush_cache()
    answers = [server.ask(prompt) for prompt in prompts]
    model, _ = base_policy()
    texts = [answer["output_ids"] for answer in answers]
    for prompt, text in zip(prompts, texts, strict=True):
        assert model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == text
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    return sum(len(text) - 1 for text in texts), rounds, *replayed_of(drafter, prompts, texts)


def replayed_of(drafter: Eagle3Drafter, prompts: list[list[int]], texts: list[list[int]]) -> tuple[int, int]:
    """(tokens, rounds) by replay of these answers."""
    model, _ = base_policy()
    rollouts = [logged(model, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    total = replay(drafter, batch_of(model, rollouts), policy_of(model), depth=DEPTH, drafting="greedy").total()
    return int(total["tokens"]), int(total["rounds"])


@pytest.mark.parametrize("name", ["trained", "random"])
def test_its_rounds_are_those_of_replay_one_by_one(
    server: SGLangProcess, drafters: Path, trained: Eagle3Drafter, name: str
) -> None:
    """Both sides draft and verify greedily: the counts are equal, not only near, where the drafter is the same."""
    drafter = trained if name == "trained" else random_drafter(base_policy()[0], seed=5, draft_vocab_size=96)
    swap(server, drafters, drafters / name, f"measured-{name}")
    tokens, rounds, expected_tokens, expected_rounds = replayed(
        server, drafter, odd_prompts(40, seed=7) + elicit_prompts(40, seed=21)
    )
    print(f"{name}: alpha {tokens / rounds:.4f}, {rounds} rounds, replay {expected_rounds}")
    assert (tokens, rounds) == (expected_tokens, expected_rounds)


def test_a_drafter_with_scaled_positions_and_a_norm_before_fc_drafts_as_in_replay(
    trained: Eagle3Drafter, tmp_path: Path
) -> None:
    """SGLang has both, and counts what replay says; over the whole vocabulary too, of which the files have no map."""
    drafters = []
    for plain in (random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), trained):
        size = plain.config.vocab_size
        form = replace(
            plain.config, draft_vocab_size=size, norm_before_fc=True, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 32)
        )
        drafter = Eagle3Drafter(form, DraftVocabulary(torch.arange(size), size))
        head = torch.zeros_like(drafter.lm_head.weight)
        head[plain.vocabulary.ids] = plain.lm_head.weight.detach()
        drafter.load_state_dict(dict(plain.named_parameters()) | {"lm_head.weight": head}, strict=False)
        assert drafter.input_norm is not None
        # About the size that the features had, so that the trained weights still draft well.
        drafter.input_norm.weight.data = torch.linspace(2.0, 6.0, drafter.input_norm.weight.numel())
        drafters.append(drafter.eval().requires_grad_(False))
        write(drafter, tmp_path / "drafters" / str(len(drafters) - 1))
    server = SGLangProcess(tmp_path, tmp_path / "drafters" / "0", tmp_path / "drafters")
    prompts = odd_prompts(20, seed=7) + elicit_prompts(20, seed=21)
    try:
        server.wait_until_ready()
        if server.version < (0, 5, 17):
            with pytest.raises(SwapRefusedError, match="leaves out the norm before fc"):
                swap(server, tmp_path / "drafters", tmp_path / "drafters" / "1", "newer")
            return
        swap(server, tmp_path / "drafters", tmp_path / "drafters" / "1", "newer")
        tokens, rounds, expected_tokens, expected_rounds = replayed(server, drafters[1], prompts)
        texts = [server.ask(prompt)["output_ids"] for prompt in prompts]
    finally:
        server.stop()
    print(f"alpha {tokens / rounds:.4f}, {rounds} rounds, replay {expected_rounds}")
    assert (tokens, rounds) == (expected_tokens, expected_rounds)
    for other in ({"rope_scaling": None}, {"norm_before_fc": False}):
        changed = Eagle3Drafter(replace(drafters[1].config, **other), drafters[1].vocabulary)
        changed.load_state_dict(drafters[1].state_dict(), strict=False)
        assert replayed_of(changed.eval(), prompts, texts)[1] != rounds, "each of both shows in the rounds"


def test_swaps_under_load_fail_no_request_and_change_no_text(server: SGLangProcess, drafters: Path) -> None:
    prompts = elicit_prompts(24, seed=4)
    load = Load(server)
    alphas = {}
    with load.running():
        load.wait_for(8)
        for number, name in enumerate(["trained", "random", "trained", "random"]):
            swap(server, drafters, drafters / name, f"under-load-{number}")
            load.wait_for(8)
    for name in ("trained", "random"):
        swap(server, drafters, drafters / name, f"alone-{name}")
        server.flush_cache()
        alphas[name] = alpha(server, prompts)
    print(f"{alphas}, {load.served} requests")
    assert load.failures == []
    assert load.changed == {}
    assert alphas["random"] < 1.2 < 1.5 < alphas["trained"]


def nothing(tensors: dict[str, Tensor]) -> None:
    """The tensors stay."""


def nan(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][0] = float("nan")


def other_words(tensors: dict[str, Tensor]) -> None:
    """Another draft vocabulary of the same size."""
    tensors["d2t"] -= 1
    tensors["t2d"] = tensors["t2d"].roll(-1)


def cropped(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (nan, {}, "NaN"),
        (other_words, {}, "d2t"),
        (cropped, {}, "fc.weight"),
        (
            nothing,
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope",
        ),
        (nothing, {"norm_before_residual": True}, "norm_before_residual"),
    ],
    ids=["not finite", "other words", "cropped", "other positions", "another form"],
)
def test_a_bad_drafter_is_refused_and_the_old_one_serves_on(
    server: SGLangProcess,
    drafters: Path,
    trained: Eagle3Drafter,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, Any],
    message: str,
) -> None:
    swap(server, drafters, drafters / "trained", "before-the-bad-one")
    bad = release(drafters, edited(drafters, change, **config), "bad")
    with pytest.raises(SwapRefusedError, match=message):
        with_engine(server, lambda engine: engine.swap(bad))
    tokens, rounds, expected_tokens, expected_rounds = replayed(server, trained, elicit_prompts(8, seed=33))
    assert (tokens, rounds) == (expected_tokens, expected_rounds)


def test_damaged_bytes_are_not_loaded(server: SGLangProcess, drafters: Path) -> None:
    offered = release(drafters, drafters / "trained", "damaged", **{"model.safetensors": "0" * 64})
    with pytest.raises(OtherBytesError, match="damaged"):
        with_engine(server, lambda engine: engine.swap(offered))
    assert server.generate([1, 5, 9])


def test_nothing_is_swapped_in_a_trainers_weight_session_which_stays_open(
    server: SGLangProcess, drafters: Path
) -> None:
    """Whether it has paused or not; between its calls, while it is paused, a swap is done and the pause stands."""
    if not server.has_sessions:
        pytest.skip("this SGLang has no sessions")
    prompts = odd_prompts(6, seed=11)
    before = [server.generate(prompt) for prompt in prompts]
    for paused in (True, False):
        if paused:
            server.post("/pause_generation", mode="in_place")
        server.post("/begin_weight_update", selector="target")
        try:
            with pytest.raises(EngineError, match="session is open"):
                swap(server, drafters, drafters / "trained", "beside-a-trainer")
        finally:
            server.post("/end_weight_update")  # the trainer's: it is open still
            if paused:
                server.post("/continue_generation")
    assert [server.generate(prompt) for prompt in prompts] == before


def test_a_server_that_has_released_its_weights_takes_no_drafter_until_it_has_them_back(
    server: SGLangProcess, drafters: Path
) -> None:
    """As a trainer on the same GPU lets it. On a CPU nothing is released; SGLang itself would take the call."""
    prompts = odd_prompts(3, seed=12)
    before = [server.generate(prompt) for prompt in prompts]
    server.client.post("/release_memory_occupation", json={"tags": ["weights"]}).raise_for_status()
    try:
        with pytest.raises(EngineError, match="released the memory"):
            swap(server, drafters, drafters / "trained", "asleep")
        with pytest.raises(EngineError, match="ask again once it is resumed"):  # by one that has not looked
            with_engine(server, lambda engine: unlooked(engine).swap(release(drafters, drafters / "trained", "asleep")))
    finally:
        server.client.post("/resume_memory_occupation", json={"tags": ["weights"]}).raise_for_status()
    swap(server, drafters, drafters / "trained", "awake")
    assert [server.generate(prompt) for prompt in prompts] == before


def unlooked(engine: SGLangEngine) -> SGLangEngine:
    """One that does not look whether weights are released before it swaps."""

    async def not_released() -> bool:
        return False

    engine._is_released = not_released  # type: ignore[method-assign]
    return engine


def test_a_swap_waits_for_no_request_and_lets_a_trainers_pause_stand(server: SGLangProcess, drafters: Path) -> None:
    """A trainer writes the policy by several calls within its pause."""
    swap(server, drafters, drafters / "random", "before-a-long-answer")
    asked = server.stream([1, 5, 9], max_tokens=200)
    first = next(asked)["completion_tokens"]
    swap(server, drafters, drafters / "trained", "beside-a-running-request")
    server.post("/pause_generation", mode="in_place")
    swap(server, drafters, drafters / "random", "in-a-trainers-pause")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: [facts["completion_tokens"] for facts in asked][-1])
        try:
            with pytest.raises(TimeoutError):  # 200 tokens take a second
                ended.result(4.0)
            swap(server, drafters, drafters / "trained", "in-the-same-pause")
        finally:
            server.post("/continue_generation")
        assert first < ended.result(60) == 200
