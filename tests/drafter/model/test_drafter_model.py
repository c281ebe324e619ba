"""The model's names and shapes, the draft vocabulary, and decoding with a cache against the unroll."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.drafter.drafter_worlds import HIDDEN, SHAPES, VOCAB, config, mask_of, world
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config, Gemma3nTextConfig

from drafter.errors import DrafterError, VocabularyError
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary
from examples.reference.cached import attend, embed, fuse
from rl_hooks.format.run import check_run


def test_names_and_shapes_are_those_of_published_checkpoints() -> None:
    drafter = world(SHAPES["packed, half response"]).drafter
    shapes = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert shapes == {
        "fc.weight": (12, 36),
        "midlayer.hidden_norm.weight": (12,),
        "midlayer.input_layernorm.weight": (12,),
        "midlayer.self_attn.q_proj.weight": (24, 24),
        "midlayer.self_attn.k_proj.weight": (12, 24),
        "midlayer.self_attn.v_proj.weight": (12, 24),
        "midlayer.self_attn.o_proj.weight": (12, 24),
        "midlayer.post_attention_layernorm.weight": (12,),
        "midlayer.mlp.gate_proj.weight": (20, 12),
        "midlayer.mlp.up_proj.weight": (20, 12),
        "midlayer.mlp.down_proj.weight": (12, 20),
        "norm.weight": (12,),
        "lm_head.weight": (9, 12),
        "d2t": (9,),
        "t2d": (17,),
    }
    assert drafter.d2t.dtype == torch.int64
    assert drafter.t2d.dtype == torch.bool


def test_config_follows_the_target() -> None:
    target = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 500,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
    }
    c = DrafterConfig.from_target(target, [2, 4, 6], 100)
    assert (c.head_dim, c.rope_theta, c.rms_norm_eps, c.draft_vocab_size) == (32, 1e6, 1e-5, 100)
    assert (c.hidden_size, c.target_hidden_size, c.model_type, c.aux_layers) == (64, 64, "qwen3", (2, 4, 6))
    assert DrafterConfig.from_target(target, [2]).draft_vocab_size == 500
    with pytest.raises(DrafterError, match="lacks hidden_size"):
        DrafterConfig.from_target({k: v for k, v in target.items() if k != "hidden_size"}, [2])


def test_a_target_of_several_residual_streams_is_refused_with_what_works_before_anything_else() -> None:
    """DeepSeek-V4's own config, which also lacks what a drafter's sizes come from."""
    for target in (DeepseekV4Config().to_dict(), Gemma3nTextConfig().to_dict()):
        with pytest.raises(DrafterError, match=r"4 residual streams \(.*What works: .*n-grams.*draftalign-agent"):
            DrafterConfig.from_target(target, [2])
        with pytest.raises(DrafterError, match="4 residual streams"):
            check_run(target, [2], None, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 5}, "even"),
        ({"target_hidden_size": 8}, "shares the target's embedding"),
        ({"draft_vocab_size": 18}, "draft_vocab_size"),
        ({"aux_layers": (2, 1)}, "ascending"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        replace(config(), **change)  # type: ignore[arg-type]


def test_parts_that_do_not_fit_are_refused() -> None:
    vocabulary = DraftVocabulary(torch.arange(9), VOCAB)
    with pytest.raises(DrafterError, match="the vocabulary has 9 of 17"):
        Eagle3Drafter(config(8), vocabulary)
    drafter = Eagle3Drafter(config(), vocabulary)
    with pytest.raises(DrafterError, match="expected lm_head rows"):
        drafter.init_from_target(torch.zeros(VOCAB, HIDDEN))
    drafter.init_from_target(torch.ones(9, HIDDEN))
    assert bool((drafter.lm_head.weight == 1).all())


def test_an_embedding_of_another_target_is_refused() -> None:
    w = world((mask_of(11, 1),))
    plan = w.drafter.plan(w.batch, 2)
    with pytest.raises(DrafterError, match=r"embed_tokens must be \(17, 12\), got \(17, 13\)"):
        w.drafter.unroll(plan, w.batch, Policy(0, torch.zeros(VOCAB, HIDDEN + 1)))


# --- decoding with a cache ------------------------------------------------------------------------------------------


def test_decoding_with_a_cache_equals_the_unroll_at_every_row_and_step() -> None:
    w, steps = world((mask_of(11, 1),)), 4
    d, ids = w.drafter, w.batch.input_ids
    u = d.unroll(make_plan(w.batch.cu_seqlens, w.batch.loss_mask, steps), w.batch, w.policy)
    want = {(int(t), j): d.logits(p) for j in range(steps) for t, p in zip(u.rows[j], u.pre[j], strict=True)}
    for t in range(9):
        rows = torch.arange(t + 1)
        pre, k, v = attend(
            d, embed(d, ids[rows + 1], w.embed_tokens)[None], fuse(d, w.batch.aux_hidden[rows])[None], rows[None]
        )
        torch.testing.assert_close(d.logits(pre[0, -1]), want[t, 0])
        r = pre[:, -1:]
        for j in range(1, min(steps, 9 - t)):
            embedded = embed(d, ids[t + 1 + j], w.embed_tokens)[None, None]
            r, new_k, new_v = attend(d, embedded, r, torch.tensor([[t + j]]), k, v)
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
            torch.testing.assert_close(d.logits(r[0, 0]), want[t, j])


def test_a_padded_batch_decodes_as_its_sequences_do_alone() -> None:
    w = world((mask_of(11, 1),))
    d, ids, aux = w.drafter, w.batch.input_ids, w.batch.aux_hidden
    lengths, L = [3, 7], 7
    embedded = torch.stack([embed(d, ids[1 : L + 1], w.embed_tokens)] * 2)
    r = torch.stack([fuse(d, aux[:L])] * 2)
    positions = torch.arange(L).expand(2, L)
    visible = torch.ones(L, L, dtype=torch.bool).tril() & (torch.arange(L) < torch.tensor(lengths)[:, None])[:, None]
    visible |= torch.eye(L, dtype=torch.bool)  # padding rows look at themselves: no empty softmax
    pre, k, v = attend(d, embedded, r, positions, mask=visible)
    step_r = torch.stack([pre[b, n - 1 : n] for b, n in enumerate(lengths)])
    cached = (torch.arange(L) < torch.tensor(lengths)[:, None])[:, None]
    mask = torch.cat([cached, torch.ones(2, 1, 1, dtype=torch.bool)], dim=2)
    step_positions = torch.tensor(lengths)[:, None]
    step, _, _ = attend(d, embed(d, ids[step_positions + 1], w.embed_tokens), step_r, step_positions, k, v, mask)
    for b, n in enumerate(lengths):
        alone, ak, av = attend(d, embedded[b : b + 1, :n], r[b : b + 1, :n], positions[b : b + 1, :n])
        torch.testing.assert_close(pre[b, :n], alone[0])
        after, _, _ = attend(
            d, embed(d, ids[n + 1], w.embed_tokens)[None, None], alone[:, -1:], torch.tensor([[n]]), ak, av
        )
        torch.testing.assert_close(step[b], after[0])


def test_weights_change_dtype_and_keep_gradients() -> None:
    drafter = world(SHAPES["packed, half response"]).drafter.float()
    weights = drafter.weights(torch.bfloat16)
    assert {w.dtype for w in weights if isinstance(w, torch.Tensor)} == {torch.bfloat16}
    torch.autograd.backward(weights.qkv.sum())
    assert drafter.midlayer.self_attn.q_proj.weight.grad is not None


# --- vocabulary -----------------------------------------------------------------------------------------------------


def test_a_share_of_the_slots_is_kept_for_the_lowest_ids_whatever_was_seen() -> None:
    counts = torch.arange(200)  # the highest ids are the most frequent
    built = DraftVocabulary.build(counts, 64, always=[100, 2])
    assert {0, 1, 2, 3, 100} <= set(built.ids.tolist())
    assert set(built.ids.tolist()) - {0, 1, 2, 3, 100} == set(range(141, 200))
    assert counts.tolist() == list(range(200)), "the counts are not touched"
    assert len(DraftVocabulary.build(counts, 16, always=range(50, 66))) == 16


def test_the_most_frequent_tokens_are_kept_and_ties_go_to_the_lower_id() -> None:
    counts = torch.tensor([0, 5, 2, 5, 2, 9, 0])
    assert DraftVocabulary.build(counts, 4).ids.tolist() == [1, 2, 3, 5]
    assert DraftVocabulary.build(counts, 4, always=[6]).ids.tolist() == [1, 3, 5, 6]
    assert DraftVocabulary.build(counts, 4).coverage(counts) == pytest.approx(21 / 23)
    assert DraftVocabulary.build(counts, 7) == DraftVocabulary.full(7)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1))
def test_offsets_round_trip_and_describe_the_same_set_as_t2d(ids: set[int]) -> None:
    vocabulary = DraftVocabulary(torch.tensor(sorted(ids)), 61)
    assert torch.equal(torch.nonzero(vocabulary.t2d).flatten(), vocabulary.d2t + torch.arange(len(ids)))
    again = DraftVocabulary.from_d2t(vocabulary.d2t.to(torch.int32), 61)
    assert again == vocabulary
    assert (again.digest, hash(again)) == (vocabulary.digest, hash(vocabulary))
    assert torch.equal(vocabulary.to_draft[vocabulary.ids], torch.arange(len(ids)))
    assert int((vocabulary.to_draft < 0).sum()) == 61 - len(ids)


def test_absolute_ids_given_for_offsets_are_refused() -> None:
    with pytest.raises(VocabularyError, match="does not hold offsets"):
        DraftVocabulary.from_d2t(torch.tensor([2, 9, 12, 16]), 17)


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [2, 17]])
def test_what_is_not_a_set_of_ascending_ids_is_refused(ids: list[int]) -> None:
    with pytest.raises(VocabularyError):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 17)


def test_impossible_sizes_are_refused() -> None:
    counts = torch.ones(5)
    for size in (0, 6):
        with pytest.raises(VocabularyError, match="size must be"):
            DraftVocabulary.build(counts, size)
    with pytest.raises(VocabularyError, match="always"):
        DraftVocabulary.build(counts, 1, always=[0, 1])
    with pytest.raises(VocabularyError, match="5 entries"):
        DraftVocabulary.full(5).coverage(torch.ones(4))


def test_digests_tell_vocabularies_apart() -> None:
    digests = {DraftVocabulary(torch.tensor(i), v).digest for i, v in (([0, 1], 5), ([0, 2], 5), ([0, 1], 6))}
    assert len(digests) == 3
