"""Every family of targets: captured states, true probabilities, and a drafter that learns, on tiny real models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.target_families import COUSINS, FAMILIES, LAYERS, VOCAB, tiny
from helpers.service.service_fixtures import CONFIG, run_file
from helpers.trainer.hooks_fixtures import mapped, receiver
from torch import Tensor, nn

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.training.target import draft_target
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary
from rl_hooks import wire
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.tap.served import ServedPolicy
from rl_hooks.errors import UnsupportedModelError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import Captured, score_rows
from rl_hooks.sending.registration import (
    _LOGIT_RULES,
    RunRegistration,
    head_weight,
    known_logit_map,
    target_config,
)
from rl_hooks.trainer.capture import FeatureCapture, find_decoder
from rl_hooks.wire import LogitMap, WireError, parse_header
from service.storage.layout import Layout
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool
from service.worker.target import Target

AUX = (1, 3, 4)
ROLLOUTS, LENGTH, PROMPT = 6, 12, 3


@dataclass(frozen=True)
class Observed:
    """One forward over rollouts of equal length, and what capture and registration made of it."""

    model: nn.Module
    ids: Tensor  # [R, S]
    logits: Tensor  # [R, S, V], the model's own
    hidden_states: tuple[Tensor, ...]
    captured: Captured
    registration: RunRegistration


@pytest.fixture(scope="module")
def observed() -> Any:
    kept: dict[str, Observed] = {}

    def get(family: str) -> Observed:
        if family not in kept:
            kept[family] = observe(tiny(family))
        return kept[family]

    return get


def observe(model: Any, **capture_options: Any) -> Observed:
    ids = torch.randint(3, VOCAB, (ROLLOUTS, LENGTH), generator=torch.Generator().manual_seed(1))
    capture = FeatureCapture(model, AUX, **capture_options)
    with torch.no_grad(), capture.armed(shape=tuple(ids.shape)):
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    states = capture.pop()
    capture.close()
    registration = RunRegistration(model, aux_layers=AUX)
    return Observed(model, ids, out.logits, out.hidden_states, states, registration)


def rollouts(seen: Observed, temperature: float = 1.0) -> RolloutBatch:
    """The batch as the hook would send it, with log p of the *model's own* logits as the sampler's."""
    R, S = seen.ids.shape
    following = torch.cat([seen.ids[:, 1:], seen.ids[:, :1]], dim=1).reshape(-1)
    lse, _ = score_rows(
        seen.captured.last,
        head_weight(seen.model),
        following,
        temperature=temperature,
        logit_map=seen.registration.logit_map,
    )
    own = torch.log_softmax(seen.logits.float() / temperature, -1)
    logprobs = torch.zeros(R, S)
    logprobs[:, 1:] = own[:, :-1].gather(2, seen.ids[:, 1:, None])[..., 0]
    mask = torch.zeros(R, S, dtype=torch.bool)
    mask[:, PROMPT:] = True
    return RolloutBatch(
        input_ids=seen.ids.reshape(-1),
        cu_seqlens=torch.arange(0, R * S + 1, S),
        loss_mask=mask.reshape(-1),
        aux_hidden=torch.cat(seen.captured.aux, dim=-1),
        logprobs=logprobs.reshape(-1),
        last_hidden=seen.captured.last,
        logsumexp=lse,
        temperature=temperature,
        rollout_ids=tuple(f"r{i}" for i in range(R)),
    )


def registered(seen: Observed, directory: Path) -> Target:
    """What the worker makes of the registration's bytes."""
    layout, body = Layout(directory), b"".join(bytes(part) for part in seen.registration.encode())
    with Spool(layout).upload() as upload:
        upload.write(body)
        commit_run(layout, read_run_header("families", parse_header(body)), upload)
    return Target.open(layout, "families")


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_states_are_what_enters_the_layers_and_what_the_head_multiplies(family: str, observed: Any) -> None:
    seen: Observed = observed(family)
    H = seen.captured.last.shape[1]
    for layer, state in zip(AUX, seen.captured.aux, strict=True):
        assert torch.equal(state, seen.hidden_states[layer].reshape(-1, H)), layer
    assert len(find_decoder(seen.model)[0]) == LAYERS
    rebuilt = seen.registration.logit_map.apply(seen.captured.last @ head_weight(seen.model).T)
    assert torch.allclose(rebuilt, seen.logits.reshape(-1, VOCAB), rtol=1e-5, atol=1e-5)
    assert seen.logits.std() > 0.3  # far from uniform, or a mistake would not show


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_worker_sees_the_models_own_probabilities(
    family: str, temperature: float, observed: Any, tmp_path: Path
) -> None:
    seen: Observed = observed(family)
    batch = rollouts(seen, temperature)
    head = registered(seen, tmp_path).at(0).needed_head()
    gap, tokens = head.logprob_gap(batch)
    assert gap < 1e-5
    assert tokens == batch.response_tokens
    vocabulary = DraftVocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    plan = make_plan(batch.cu_seqlens, batch.loss_mask, 3)
    target = draft_target(batch, plan, vocabulary, head)
    own = torch.log_softmax(seen.logits.float() / temperature, -1).reshape(-1, VOCAB)
    expected = own[plan.target_rows][:, vocabulary.ids]
    assert torch.allclose(target.logprobs(0, plan.target_rows.numel(), torch.float32), expected, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_learns_from_it(family: str, observed: Any, tmp_path: Path) -> None:
    seen: Observed = observed(family)
    target = registered(seen, tmp_path)
    policy = target.at(0)
    config = DrafterConfig.from_target(target.config, AUX, 40)
    torch.manual_seed(0)
    drafter = Eagle3Drafter(config, DraftVocabulary(torch.arange(40), VOCAB))
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2))
    batch = rollouts(seen)
    losses = [trainer.step([(batch, policy)]).loss for _ in range(12)]
    assert losses[-1] < 0.75 * losses[0]
    assert all(b < a for a, b in pairwise(losses[2:]))


@pytest.mark.parametrize("family", ["gemma 4", "granite", "minicpm 3", "nanochat"])
def test_the_hook_sends_normalisers_and_the_map_that_belong_to_the_models_own_logits(
    family: str, observed: Any, tmp_path: Path
) -> None:
    seen: Observed = observed(family)
    mask = torch.ones_like(seen.ids)
    mask[:, :PROMPT] = 0
    with receiver() as service:
        hook = DrafterHook(seen.model, service.url, aux_layers=AUX, strict=True)
        with (
            torch.no_grad(),
            hook.capture(
                input_ids=seen.ids,
                attention_mask=torch.ones_like(seen.ids),
                loss_mask=mask,
                policy_version=0,
                temperature=0.7,
            ),
        ):
            seen.model(input_ids=seen.ids, attention_mask=torch.ones_like(seen.ids))
        assert hook.flush(20), hook.stats()
        run = next(r for r in service.requests if r.path == "/runs/default")
        metadata = wire.parse_header(run.body[: wire.header_size(run.body)]).metadata
        assert LogitMap.from_metadata(metadata) == seen.registration.logit_map
        file = mapped(service.rollouts()[-1], tmp_path)
        assert not hook._reader.agreement.wanted, "its logits were compared with the registered head's"
        hook.close()
    own = seen.logits / 0.7
    sent = torch.from_numpy(file.array("logsumexp").copy()).view(ROLLOUTS, LENGTH)[:, PROMPT - 1 : -1]
    assert torch.allclose(sent, own.logsumexp(-1)[:, PROMPT - 1 : -1], atol=1e-5)
    expected = own.log_softmax(-1)[:, :-1].gather(2, seen.ids[:, 1:, None])[..., 0][:, PROMPT - 1 :]
    logprobs = torch.from_numpy(file.array("logprobs").copy()).view(ROLLOUTS, LENGTH)[:, PROMPT:]
    assert torch.allclose(logprobs, expected, atol=1e-5)


def test_several_residual_streams_are_refused_by_shape() -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
            self.norm = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layers[1](self.layers[0](x)).mean(0))  # type: ignore[no-any-return]

    model = Streams()
    capture = FeatureCapture(model, (1,))
    with capture.armed(shape=(2, 3)):
        model(torch.zeros(4, 2, 3, 8))
    with pytest.raises(UnsupportedModelError, match=r"\[4, 2, 3, 8\]: several residual streams.*What works: .*n-grams"):
        capture.pop()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma 3", LogitMap()),
        ("gemma 3 soft-capped", LogitMap(softcap=5.0)),
        ("gemma 4", LogitMap(softcap=5.0)),
        ("gemma 4 nested", LogitMap(softcap=5.0)),
        ("cohere", LogitMap(scale=0.25)),
        ("granite", LogitMap(scale=0.25)),
        ("hyperclova", LogitMap(scale=0.5)),
        ("minicpm 3", LogitMap(scale=0.25)),
    ],
)
def test_the_same_field_means_what_the_model_makes_of_it(family: str, expected: LogitMap, observed: Any) -> None:
    assert observed(family).registration.logit_map == expected


def test_without_its_logit_map_a_soft_capped_target_is_caught_by_the_log_probability_check(
    observed: Any, tmp_path: Path
) -> None:
    seen: Observed = observed("gemma 4")
    head = registered(seen, tmp_path).at(0).needed_head()
    head.logit_map = LogitMap()
    assert head.logprob_gap(rollouts(seen))[0] > 0.05


@pytest.mark.parametrize("family", ["gemma 3", "gemma 4", "granite"])
def test_the_embedding_is_registered_without_the_models_factor_as_engines_drafters_read_it(
    family: str, observed: Any, tmp_path: Path
) -> None:
    seen: Observed = observed(family)
    table = seen.model.get_input_embeddings().weight  # type: ignore[operator]
    embedded = seen.hidden_states[0].reshape(-1, table.shape[1])
    target = registered(seen, tmp_path)
    assert torch.equal(target.embed_tokens, table)
    factor = embedded / target.embed_tokens[seen.ids.reshape(-1)]
    assert float(factor.median()) > 2  # the model's own layers read something larger
    assert torch.allclose(factor, factor.median(), rtol=1e-4)


def test_gemmas_rotary_base_is_that_of_full_attention(observed: Any) -> None:
    config = observed("gemma 3").registration.config
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1_000_000.0
    assert DrafterConfig.from_target(config, AUX, 40).rope_theta == 1_000_000.0


def test_an_unknown_architecture_is_refused_by_name_and_works_once_its_layers_and_norm_are_named() -> None:
    model = tiny("llama 3")
    tower = nn.Module()
    tower.blocks, tower.last_norm = model.model.layers, model.model.norm

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        config = model.config

        def get_input_embeddings(self) -> nn.Module:
            return model.get_input_embeddings()  # type: ignore[no-any-return]

        def get_output_embeddings(self) -> nn.Module:
            return model.get_output_embeddings()  # type: ignore[no-any-return]

        def forward(self, **inputs: Any) -> Any:
            return model(**inputs)

    strange = Strange()
    with pytest.raises(UnsupportedModelError, match=r"in Strange: .*layers_path="):
        FeatureCapture(strange, AUX)
    seen = observe(strange, layers_path="tower.blocks", norm_path="tower.last_norm")
    assert torch.equal(seen.captured.aux[0], seen.hidden_states[1].reshape(-1, 32))


@pytest.mark.parametrize(
    "metadata", [{"logit_scale": "0"}, {"logit_scale": "nan"}, {"logit_softcap": "-3"}, {"logit_softcap": "thirty"}]
)
def test_impossible_logit_maps_are_refused_by_field(metadata: dict[str, str]) -> None:
    with pytest.raises(WireError, match=next(iter(metadata))):
        LogitMap.from_metadata(metadata)


def test_the_service_refuses_a_run_whose_logit_map_is_impossible() -> None:
    sizes = CONFIG | {"intermediate_size": 8, "num_attention_heads": 2}
    header = wire.parse_header(run_file(sizes, metadata={"logit_softcap": "-30"}))
    with pytest.raises(WireError, match="logit_softcap"):
        read_run_header("default", header)


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.125), LogitMap(softcap=30.0), LogitMap(2.0, 30.0)])
def test_a_logit_map_survives_its_metadata(logit_map: LogitMap) -> None:
    assert LogitMap.from_metadata(logit_map.metadata()) == logit_map


def test_a_class_that_reads_the_field_otherwise_is_not_guessed_at() -> None:
    # transformers caps Gemma 3's logits in the text model, not in the multimodal one.
    model = tiny("gemma 3 nested")
    model.config.text_config.final_logit_softcapping = 5.0
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping = 5\.0.*Gemma3ForConditionalGeneration"):
        RunRegistration(model, aux_layers=AUX)
    said = RunRegistration(model, aux_layers=AUX, logit_map=LogitMap())
    assert said.logit_map == LogitMap()


@pytest.mark.parametrize("family", COUSINS)
def test_the_logits_of_a_familys_cousins_are_the_map_of_the_last_state_times_the_head(family: str) -> None:
    norms = {"falcon h1": "model.final_layernorm", "recurrent gemma": "model.final_norm"}
    paths = {"layers_path": "model.layers", "norm_path": norms[family]} if family in norms else {}
    seen = observe(tiny(family), **paths)
    rebuilt = seen.registration.logit_map.apply(seen.captured.last @ head_weight(seen.model).T)
    assert torch.allclose(rebuilt, seen.logits.reshape(-1, VOCAB), rtol=1e-5, atol=1e-5)
    assert seen.logits.std() > 0.3


def test_every_class_that_is_said_to_be_known_is_tried_with_a_field_that_changes_its_logits() -> None:
    tried = set()
    for family in FAMILIES | COUSINS:
        model = tiny(family)
        if known_logit_map(model, target_config(model)) != LogitMap():
            tried.add(type(model).__name__)
    known = {name for rule in _LOGIT_RULES for name in rule.classes}
    assert known - tried == {"MiniCPMForCausalLM"}, "it comes with the checkpoint, not with transformers"
    assert tried <= known


def test_minicpms_checkpoints_own_class_divides_as_transformers_minicpm_3_does() -> None:
    kind = type("MiniCPMForCausalLM", (nn.Module,), {})
    assert known_logit_map(kind(), {"hidden_size": 4096, "dim_model_base": 256}) == LogitMap(scale=0.0625)


def test_a_vllm_hands_out_minicpms_states_divided_and_granites_not() -> None:
    ranks = LayerRanks(None)
    for family, expected in (("minicpm 3", LogitMap()), ("granite", LogitMap(scale=0.25))):
        model = tiny(family)
        assert ServedPolicy.on(ranks, model.config, model).logit_map == expected
