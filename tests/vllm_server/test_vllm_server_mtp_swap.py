"""A policy's own MTP module, swapped while a real vLLM serves: the same function as ours, and nothing else moves.

GLM-4.5's form is held to every number. DeepSeek-V3's runs here without its latent-attention kernels, which a CPU lacks,
and vLLM's other path forgets to rotate the queries on a CPU: it is swapped under load, and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from helpers.engine.agent_fixtures import eventually, start_agent
from helpers.engine.engine_fixtures import EOS_ID
from helpers.engine.server_load import Load
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_server.mtp_policies import batch_of_texts, embedding_and_head, module, shared, write_module, write_policy
from vllm_server.vllm_conformance import TOLERANCE, calls, record
from vllm_server.vllm_process import DEPTH, FORKED, V2_RUNNER, VllmServer

from drafter.files.checkpoint import config_fingerprint
from drafter.model.pointwise import rms_norm
from drafter.mtp.module import MtpDrafter
from drafter.replay.replay import replay
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.engines.counting.counters import Counts

PROMPTS = [[2 + i, 5, 7 + i] for i in range(24)]
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": DEPTH}


@dataclass(frozen=True)
class Serving:
    """A server, and the directory that it takes modules from: `trained` and `random`, which it started with."""

    server: VllmServer
    modules: Path


@contextmanager
def serving_family(family: str, scratch: Path, **environment: Any) -> Iterator[Serving]:
    modules = scratch / "modules"
    modules.mkdir()
    write_module(family, modules / "trained")
    write_module(family, modules / "random", trained=False)
    policy = write_policy(family, scratch / "policy")
    started = FORKED | environment
    server = VllmServer(scratch / "vllm", modules, modules, speculative=SPECULATIVE, policy=policy, **started)
    try:
        server.wait_until_healthy()
        yield Serving(server, modules)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_family("glm4_moe", tmp_path_factory.mktemp("glm")) as serving:
        yield serving


def sampled(server: VllmServer, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], float, int]:
    """Completions of `prompts` at temperature 1; α as emitted and the rounds that vLLM counted meanwhile."""
    before = server.counters()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda i: server.generate(prompts[i], temperature=1.0, seed=i), range(len(prompts))))
    after = server.counters()
    assert after.emitted_tokens is not None
    assert before.emitted_tokens is not None
    rounds = after.rounds - before.rounds
    return texts, (after.emitted_tokens - before.emitted_tokens) / rounds, rounds


def check_swaps_under_load(serving: Serving) -> None:
    server = serving.server
    state, policy, addresses = server.state(), server.rpc("policy_digest"), server.rpc("storage")
    assert (state["takes"], state["problem"], state["method"]) == ("mtp", None, "mtp")
    alphas = {}
    for name in ("random", "trained"):
        assert server.swap(name, f"alone-{name}").status_code == 200
        alphas[name] = sampled(server)[1]
    load = Load(server, PROMPTS)
    with load.running():
        for number in range(4):
            load.wait_for(8)
            answer = server.swap(("random", "trained")[number % 2], f"under-load-{number}")
            assert answer.status_code == 200, answer.text
        load.wait_for(8)
    print(alphas, f"{load.served} requests, stall {server.state()['last_stall_seconds']:.4f} s")
    assert load.failures == []
    assert load.changed == {}
    assert server.rpc("policy_digest") == policy
    assert server.rpc("storage") == addresses
    assert (server.state()["version"], server.state()["swaps"] - state["swaps"]) == ("under-load-3", 6)
    assert alphas["random"] < 1.1
    assert alphas["trained"] > alphas["random"] + 0.5


def test_glms_module_is_swapped_under_load(glm: Serving) -> None:
    check_swaps_under_load(glm)


def test_deepseeks_module_is_swapped_under_load(tmp_path: Path) -> None:
    with serving_family("deepseek_v3", tmp_path, VLLM_MLA_DISABLE="1") as serving:
        check_swaps_under_load(serving)


class Mirror:
    """Our module with a cache by position, repeating the engine's calls for one sequence."""

    def __init__(self, drafter: MtpDrafter) -> None:
        self.drafter, (self.embed_tokens, self.head) = drafter, embedding_and_head()
        self.weights = drafter.weights(self.head)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """`pre` [T, H]; each row's key replaces an earlier, rejected one at its position."""
        m, w, eps = self.drafter, self.weights, self.drafter.config.rms_norm_eps
        embedded = F.embedding(input_ids, self.embed_tokens) * (positions != 0)[:, None]
        both = torch.cat([rms_norm(embedded, w.enorm, eps), rms_norm(hidden, w.hnorm, eps)], dim=-1)
        h = F.linear(both, w.eh)
        x = rms_norm(h, w.input_norm, eps)
        queries = m.self_attn.queries(x, positions, w.attention)  # [T, N, hd]
        for position, *pair in zip(
            positions.tolist(), *m.self_attn.keys_values(x, positions, w.attention), strict=True
        ):
            self.cache[position] = (pair[0], pair[1])
        rows = [self._attend(q, position) for q, position in zip(queries, positions.tolist(), strict=True)]
        return m.finish(h, torch.stack(rows), w)

    def _attend(self, query: Tensor, position: int) -> Tensor:
        keys, values = (torch.stack([self.cache[p][i] for p in range(position + 1)], dim=1) for i in (0, 1))
        shared = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)  # [N, position + 1, hd]
        scores = (keys @ query[:, :, None])[..., 0] / math.sqrt(query.shape[-1])
        return (scores.softmax(-1)[:, None] @ values)[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["trained", "random"])
def test_every_state_and_logit_is_that_of_our_module(glm: Serving, tmp_path: Path, name: str) -> None:
    assert glm.server.swap(name, f"conformance-{name}").status_code == 200
    record(glm.server, tmp_path / "calls", [3 + len(name), 11, 7])
    ours = module("glm4_moe", trained=name == "trained")
    mirror, worst, seen = Mirror(ours), 0.0, 0
    pre = torch.zeros(0)
    for kind, call in calls(tmp_path / "calls"):
        if kind == "forward":
            pre = mirror.forward(call["input_ids"], call["positions"], call["hidden_states"])
            worst = max(worst, float((call["pre"] - pre).abs().max()))
        else:  # the head reads one of the rows just made
            row = (call["hidden_states"] - pre).abs().sum(-1).argmin()
            normed = rms_norm(pre[row], ours.shared_head.norm.weight, ours.config.rms_norm_eps)
            worst = max(worst, float((call["logits"][0] - mirror.head @ normed).abs().max()))
            seen += 1
    print(f"{name}: {seen} drafts, largest difference {worst:.2e}")
    assert seen >= DEPTH * 3
    assert worst < TOLERANCE


def test_replay_gives_the_alpha_that_vllm_counted(glm: Serving) -> None:
    assert glm.server.swap("trained", "replayed").status_code == 200
    texts, live, rounds = sampled(glm.server)
    expected = replay(
        module("glm4_moe", trained=True),
        batch_of_texts(list(zip(PROMPTS, texts, strict=True))),
        shared(),
        depth=DEPTH,
        drafting="greedy",
    )
    low, high = expected.interval()
    print(f"live alpha {live:.4f}, replay {expected.alpha:.4f} [{low:.4f}, {high:.4f}], {rounds} rounds")
    assert sum(text[-1] == EOS_ID for text in texts) > 0
    assert live == pytest.approx(expected.alpha, rel=0.01)
    assert low <= live <= high


def poison_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(105, 64)


def poison_head(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.shared_head.head.weight"] = torch.zeros(105, 64)


def drop_an_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]


def insert_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.eh_proj.weight"][3, 5] = float("nan")


def nothing(_: dict[str, Tensor]) -> None:
    pass


REFUSALS: list[tuple[Callable[[dict[str, Tensor]], None], str, str, str]] = [
    (poison_embedding, "", "", "embed_tokens"),
    (poison_head, "", "", "shared_head.head"),
    (drop_an_expert, "", "", "experts.3.down_proj"),
    (insert_nan, "", "", "NaN"),
    (nothing, '"normed_feedback": false', '"normed_feedback": true', "normed_feedback is True"),
    (nothing, '"num_experts_per_tok": 2', '"num_experts_per_tok": 3', "experts.chosen"),
    (nothing, '"model_type": "glm4_moe"', '"model_type": "mimo"', "mimo"),
]


@pytest.mark.parametrize(("change", "text", "other", "says"), REFUSALS, ids=[says for *_, says in REFUSALS])
def test_a_bad_module_is_refused_and_the_old_one_serves_on(
    glm: Serving, change: Callable[[dict[str, Tensor]], None], text: str, other: str, says: str
) -> None:
    assert glm.server.swap("trained", "good").status_code == 200
    before, policy = glm.server.state(), glm.server.rpc("policy_digest")
    bad = glm.modules / f"bad-{says.replace(' ', '-')}"
    bad.mkdir()
    config = (glm.modules / "trained/config.json").read_text()
    assert text in config
    (bad / "config.json").write_text(config.replace(text, other) if text else config)
    tensors = load_file(glm.modules / "trained/model.safetensors")
    change(tensors)
    save_file(tensors, bad / "model.safetensors")
    answer = glm.server.swap(bad, "bad")
    assert (answer.status_code, says in answer.json()["detail"]) == (409, True), answer.text
    assert glm.server.state() == before
    assert glm.server.rpc("policy_digest") == policy


def test_a_module_that_lost_every_parameter_is_healed_by_a_push(glm: Serving) -> None:
    server = glm.server
    assert server.swap("trained", "alive").status_code == 200
    texts, alive, _ = sampled(server)
    assert server.rpc("wipe_drafter")
    assert server.state()["loaded"] is False
    assert sampled(server)[1] < 1.1
    assert server.swap("trained", "alive").status_code == 200
    assert server.state()["loaded"] is True
    again, healed, _ = sampled(server)
    assert again == texts
    assert healed == pytest.approx(alive, abs=0.05)


def test_a_load_that_breaks_half_way_is_undone_and_the_engine_serves_on(glm: Serving) -> None:
    assert glm.server.swap("trained", "before").status_code == 200
    texts, alpha, _ = sampled(glm.server)
    glm.server.rpc("fail_next_load")
    assert glm.server.swap("random", "broken").status_code == 503
    state = glm.server.state()
    assert (state["version"], state["loaded"], state["problem"]) == ("before", True, None)
    again, same, _ = sampled(glm.server)
    assert again == texts
    assert same == pytest.approx(alpha)


def test_the_v2_runner_counts_the_policys_own_module_and_then_a_runs_that_the_agent_brings(
    serve: Callable[..., RunningService], tmp_path: Path
) -> None:
    service = serve()
    service.register()
    with (
        serving_family("glm4_moe", tmp_path, **V2_RUNNER) as serving,
        start_agent(service.url, serving.server, cache=serving.modules / "agent", engine_kind="vllm") as agent,
    ):
        serving.server.client.timeout = 600  # the V2 runner's kernels are interpreted
        assert serving.server.state()["problem"] is None
        follower: EngineFollower = eventually(lambda: agent.followers.get(serving.server.url))
        eventually(lambda: follower.loaded_version == "mtp")
        own, _ = counted(serving.server, follower, "mtp", PROMPTS[:2])
        version = publish(service, serving.modules / "trained")
        eventually(lambda: follower.loaded_version == version, 60)
        live, texts = counted(serving.server, follower, version, PROMPTS[:6])
        eventually(lambda: reported(service, version) and reported(service, "mtp"))
    expected = replay(
        module("glm4_moe", trained=True),
        batch_of_texts(list(zip(PROMPTS, texts, strict=False))),
        shared(),
        depth=DEPTH,
        drafting="greedy",
    )
    print(f"the policy's own module {own:.3f}, the run's {live:.4f}, by replay {expected.alpha:.4f}")
    assert own < 1.1
    assert live == pytest.approx(expected.alpha, rel=0.01)
    assert live > own + 0.5


def counted(
    server: VllmServer, follower: EngineFollower, version: str, prompts: list[list[int]]
) -> tuple[float, list[list[int]]]:
    """α and texts of these requests, and the agent's books say the same."""
    before = follower.ledger.version_counts(version).rounds
    texts, alpha, rounds = sampled(server, prompts)
    counts: Counts = eventually(
        lambda: (c := follower.ledger.version_counts(version)).rounds >= before + rounds and c, 30
    )
    assert counts.alpha == pytest.approx(alpha, rel=0.1)
    return alpha, texts


def reported(service: RunningService, version: str) -> bool:
    document = service.client.get("/alpha").json()
    return any(
        version in (one.get("drafter_version"), one.get("method")) and one["rounds"] for one in document["servers"]
    )


def publish(service: RunningService, directory: Path) -> str:
    staged = service.registry.stage("default")
    for path in directory.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    drafter = module("glm4_moe", trained=True)
    return service.registry.publish(
        "default",
        staged,
        policy_version=0,
        parent=None,
        aux_layers=(),
        kind="mtp",
        config_fingerprint=config_fingerprint(drafter.config, drafter.vocabulary),
        d2t_sha256=drafter.vocabulary.digest,
    ).version
