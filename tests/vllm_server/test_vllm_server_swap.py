"""Hot swaps on a real vLLM under load: nothing fails, no text changes, bad drafters change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from helpers.engine.engine_fixtures import base_policy, elicit_prompts
from helpers.engine.server_load import PROMPTS, Load, alpha, edited
from torch import Tensor
from vllm_server.vllm_process import DEPTH, VllmServer

from drafter.files.checkpoint import config_fingerprint, read_drafter
from drafter.model.eagle3 import Eagle3Drafter


def nothing(_: dict[str, Tensor]) -> None:
    pass


def poison_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(105, 64)


def drop_a_tensor(tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.mlp.down_proj.weight"]


def crop_a_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def insert_nan(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][3, 5] = float("nan")


def move_vocabulary(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] - 1


def drop_vocabulary(tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"]


def add_a_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(32)


def integers_for_weights(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = torch.ones(64, dtype=torch.int64)


REFUSALS: list[tuple[Callable[[dict[str, Tensor]], None], dict[str, object], str]] = [
    (poison_embedding, {}, "embed_tokens"),
    (drop_a_tensor, {}, "down_proj"),
    (crop_a_tensor, {}, r"\(64, 191\)"),
    (insert_nan, {}, "NaN"),
    (move_vocabulary, {}, "d2t differs"),
    (drop_vocabulary, {}, "missing: d2t"),
    (add_a_tensor, {}, "q_norm"),
    (integers_for_weights, {}, "I64"),
    (nothing, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}, "rope_theta"),
    (nothing, {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "eagle_config": {}}, "aux_layers"),
    (nothing, {"norm_before_residual": True}, "norm_before_residual"),
    (nothing, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
]


def test_swaps_under_load_fail_no_request_and_change_no_text(server: VllmServer, drafters: Path) -> None:
    embedding, addresses = server.rpc("policy_digest"), server.rpc("storage")
    swaps = server.state()["swaps"]
    load = Load(server)
    with load.running():
        for number in range(6):
            load.wait_for(12)
            answer = server.swap(drafters / ("trained", "random")[number % 2], f"under-load-{number}")
            assert answer.status_code == 200, answer.text
        load.wait_for(12)
    assert load.failures == []
    assert load.served >= 84
    assert load.changed == {}
    state = server.state()
    assert (state["version"], state["loaded"], state["swaps"] - swaps) == ("under-load-5", True, 6)
    assert server.rpc("policy_digest") == embedding
    assert server.rpc("storage") == addresses  # captured graphs would go on reading the right memory


def test_the_greedy_text_is_the_policys_own(server: VllmServer, drafters: Path) -> None:
    assert server.swap("trained", "greedy").status_code == 200
    model, _ = base_policy()
    for prompt in PROMPTS:
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
        assert server.generate(prompt, max_tokens=40) == plain


def test_alpha_follows_the_drafter(server: VllmServer, drafters: Path) -> None:
    prompts = elicit_prompts(24, seed=8)
    measured = []
    for number, name in enumerate(("random", "trained", "random", "trained")):
        assert server.swap(name, f"alpha-{number}").status_code == 200
        measured.append(alpha(server, prompts))
    assert max(measured[0], measured[2]) < 1.2, measured
    assert min(measured[1], measured[3]) > 2.0, measured
    assert measured[1] == pytest.approx(measured[3], abs=0.15)  # the swap brought the whole drafter back


@pytest.mark.parametrize(("change", "config", "says"), REFUSALS, ids=[c.__name__ + "_".join(f) for c, f, _ in REFUSALS])
def test_a_bad_drafter_is_refused_and_the_old_one_serves_on(
    server: VllmServer,
    drafters: Path,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, object],
    says: str,
) -> None:
    assert server.swap("trained", "good").status_code == 200
    before, policy = server.state(), server.rpc("policy_digest")
    answer = server.swap(edited(drafters, change, **config), "bad")
    assert answer.status_code == 409, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    with pytest.raises(ValueError, match=says):
        raise ValueError(answer.json()["detail"])
    assert server.state() == before
    assert server.rpc("policy_digest") == policy
    assert alpha(server, PROMPTS[:5]) > 1.8


def test_a_damaged_file_is_refused(server: VllmServer, drafters: Path) -> None:
    directory = edited(drafters, nothing)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert server.swap(directory, "cut").status_code == 409
    path.write_bytes(b"\xff" * 4096)
    assert server.swap(directory, "noise").status_code == 409
    path.write_bytes(b"")
    assert server.swap(directory, "empty").status_code == 409


def test_the_same_version_is_loaded_anew_when_it_is_asked_for_again(server: VllmServer, drafters: Path) -> None:
    assert server.swap("trained", "once").status_code == 200
    swaps, good = server.state()["swaps"], alpha(server, PROMPTS[:6])
    server.rpc("rot_drafter")
    assert server.state()["loaded"] is True  # it looks alive, so only α tells
    assert alpha(server, PROMPTS[:6]) < 1.05
    assert server.swap(drafters / "trained", "once").json()["previous"] == "once"
    assert server.state()["swaps"] == swaps + 1
    assert alpha(server, PROMPTS[:6]) == pytest.approx(good)


def test_a_drafter_that_died_behind_our_back_is_noticed_and_comes_back(server: VllmServer, drafters: Path) -> None:
    """As after a level-2 sleep: every parameter of the drafter is lost, the draft vocabulary (d2t) among them."""
    assert server.swap("trained", "alive").status_code == 200
    alive, texts, whole = alpha(server, PROMPTS[:6]), greedy(server), server.state()
    assert "draft_id_to_target_id" in server.rpc("wipe_drafter")
    state = server.state()
    assert (state["version"], state["loaded"]) == ("alive", False)
    assert state["config_fingerprint"] == whole["config_fingerprint"]  # else an agent would refuse to push
    assert alpha(server, PROMPTS[:6]) == 1.0  # and yet every text is right: nobody would notice
    assert greedy(server) == texts
    answer = server.swap("trained", "alive")
    assert answer.status_code == 200, answer.text
    assert server.state()["loaded"] is True
    assert alpha(server, PROMPTS[:6]) == pytest.approx(alive, abs=0.1)
    assert greedy(server) == texts
    # and another version after another sleep, which is told apart by its vocabulary as before
    server.rpc("wipe_drafter")
    assert server.swap(edited(drafters, move_vocabulary), "other words").status_code == 409
    assert server.swap("trained", "alive again").status_code == 200
    assert alpha(server, PROMPTS[:6]) == pytest.approx(alive, abs=0.1)


def greedy(server: VllmServer) -> list[list[int]]:
    return [server.generate(prompt) for prompt in PROMPTS[:6]]


def test_a_load_that_breaks_half_way_puts_the_old_drafter_back(server: VllmServer, drafters: Path) -> None:
    assert server.swap("trained", "whole").status_code == 200
    good, policy = alpha(server, PROMPTS[:6]), server.rpc("policy_digest")
    server.rpc("fail_next_load")
    load = Load(server)
    with load.running():
        load.wait_for(4)
        answer = server.swap("random", "half")
        load.wait_for(4)
    assert answer.status_code == 503
    assert load.failures == []
    assert (server.state()["version"], server.state()["loaded"]) == ("whole", True)
    assert server.rpc("policy_digest") == policy
    assert alpha(server, PROMPTS[:6]) == pytest.approx(good, abs=0.1)


@pytest.mark.parametrize("path", ["/etc", "../..", "trained/../..", "/", "", ".", "trained\x00", "link"])
def test_no_path_leads_out_of_the_configured_directory(server: VllmServer, drafters: Path, path: str) -> None:
    if path == "link":
        (drafters / "link").symlink_to("/etc", target_is_directory=True)
    before = server.state()
    assert server.swap(path, "outside").status_code in (403, 422)
    assert server.state() == before


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"[]", 422),
        (b'{"path": 3, "version": "v"}', 422),
        (b'{"path": "trained", "version": ""}', 422),
        (b'{"path": "trained", "version": "a\\nb"}', 422),
        (b'{"path": "trained", "version": "v", "more": 1}', 422),
        (b'{"path": "nowhere", "version": "v"}', 404),
        (b" " * 100_000, 413),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_wrong(server: VllmServer, body: bytes, status: int) -> None:
    answer: httpx.Response = server.client.post("/drafter/swap", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["status"] == status


def test_the_state_names_what_the_service_names(server: VllmServer, trained: Eagle3Drafter, drafters: Path) -> None:
    assert server.swap("trained", "named").status_code == 200
    read = read_drafter(drafters / "trained")
    state = server.state()
    assert state["config_fingerprint"] == config_fingerprint(read.config, read.vocabulary)
    assert state["d2t_sha256"] == read.vocabulary.digest
    assert (state["depth"], state["drafting"], state["problem"]) == (DEPTH, "greedy", None)
    assert state["shared_modules"] == ["model.embed_tokens"]


def test_of_vllm_s_own_sampling_parameters_those_that_change_the_distribution_are_known(server: VllmServer) -> None:
    found = server.rpc("plain_requests")
    assert found.pop("none") == [True, True, True]
    assert len(found) >= 9
    assert not any(found.values()), found


def test_nothing_of_development_mode_is_open(server: VllmServer) -> None:
    for path in ("/collective_rpc", "/start_draft_weight_update", "/pause"):
        assert server.client.post(path, json={}).status_code == 404


def test_a_worker_sleeps_between_polls(server: VllmServer) -> None:
    """Else it takes a whole core for a second after each message, from all that runs beside it."""
    assert server.rpc("sleeps_between_polls") is True
