"""Dynamic draft trees: one tree-attention pass equals reading every path, and the text keeps its law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter.decode_fixtures import (
    EOS,
    chi_square_excess,
    exact_law,
    greedy_texts,
    log_rollouts,
    make_drafter,
    make_prompts,
    make_target,
    read_whole,
    seeded,
    train_lightly,
)
from helpers.drafter.target_families import FAMILIES, VOCAB, tiny
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from drafter.errors import DrafterError
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from examples.reference.cached import attend, embed
from examples.reference.decode import embedding, generate
from examples.reference.tree import DraftTree, _most_probable, _TreeDrafter, _TreeReader, generate_tree, walk


def paths(tree: DraftTree, row: int) -> list[list[int]]:
    """Tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def prefilled(
    target: Any, drafter: Eagle3Drafter, prompt: list[int]
) -> tuple[_TreeReader, _TreeDrafter, Tensor, Tensor]:
    """Readers that have read `prompt`, the token after it and its position."""
    reader = _TreeReader(target, drafter.config.aux_layers)
    ids, places = torch.tensor([prompt]), torch.arange(len(prompt))
    with torch.no_grad():
        logits, aux = reader.read(ids, places[None])
        latest = logits[:, -1].argmax(-1)
        chain = _TreeDrafter(drafter, embedding(target), temperature=1.0, generator=None)
        following = torch.cat([ids[:, 1:], latest[:, None]], dim=1)
        chain.read(aux, following, places, torch.ones_like(ids, dtype=torch.bool))
    return reader, chain, latest, torch.tensor([len(prompt)])


@torch.no_grad()
def test_one_tree_attention_pass_equals_reading_every_path(target: Any, trained: Eagle3Drafter) -> None:
    prompt = [5, 9, 2, 33]
    reader, chain, latest, position = prefilled(target, trained, prompt)
    tree = chain.grow(4, 3, 12)
    logits, aux = reader.read_tree(latest, tree, position)
    for node, path in enumerate(paths(tree, 0)):
        clean, features = read_whole(target, torch.tensor([[*prompt, int(latest), *path]]))
        torch.testing.assert_close(logits[0, node + 1], clean[0, -1], atol=2e-4, rtol=0)
        torch.testing.assert_close(aux[0, node + 1], features[0, -1], atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_tree_holds_the_likeliest_paths_of_the_drafter(target: Any, trained: Eagle3Drafter) -> None:
    """With enough branches nothing is pruned early, so the nodes are the best of all paths, scored one by one."""
    prompt = [5, 9, 2, 33]
    _, chain, _, _ = prefilled(target, trained, prompt)
    D, m = trained.config.draft_vocab_size, 10
    tree = chain.grow(2, D, m)
    assert chain.pre is not None
    first = torch.log_softmax(trained.logits(chain.pre)[0], -1)  # [D]
    scores: dict[tuple[int, ...], float] = {(int(trained.vocabulary.ids[i]),): float(first[i]) for i in range(D)}
    for i in first.topk(m).indices.tolist():
        token = trained.vocabulary.ids[i].view(1)
        _, again, _, _ = prefilled(target, trained, prompt)
        pre, _, _ = attend(
            trained,
            embed(trained, token, embedding(target))[None],
            chain.pre[:, None],
            again.position[:, None] + 1,  # type: ignore[index]
            again.keys,
            again.values,
        )
        second = torch.log_softmax(trained.logits(pre)[0, 0], -1) + first[i]
        scores |= {(int(token), int(trained.vocabulary.ids[j])): float(second[j]) for j in range(D)}
    best = sorted(scores, key=lambda path: -scores[path])[:m]
    assert {tuple(path) for path in paths(tree, 0)} == set(best)


def test_a_child_never_comes_without_its_parent() -> None:
    """Also where q = 1 to the last bit and both score the same."""
    tokens = torch.arange(5)[None]
    tree = _most_probable(
        tokens, torch.tensor([[-1.0, 0.0, 0.0, 0.0, -3.0]]), torch.tensor([[-1, -1, 1, 2, 0]]), nodes=3
    )
    assert tree.tokens.tolist() == [[1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.sees.tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]
    assert tree.depths.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 4}, {"depth": 3, "branches": 6, "nodes": 30}])
def test_greedy_text_is_identical_with_and_without_a_tree(
    target: Any, trained: Eagle3Drafter, options: dict[str, Any]
) -> None:
    prompts, plain = make_prompts(120, 64), greedy_texts()
    tree = generate_tree(target, trained, prompts, max_tokens=24, eos_id=EOS, temperature=0.0, **options)
    assert tree.tokens == plain.tokens
    assert tree.finished == plain.finished
    assert tree.alpha > 1.3


def test_a_tree_of_one_branch_is_the_greedy_chain(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(40, 64)
    chain = generate(target, trained, prompts, max_tokens=24, temperature=0.0, depth=3)
    tree = generate_tree(target, trained, prompts, max_tokens=24, temperature=0.0, depth=3, branches=1, nodes=3)
    assert tree.rounds == chain.rounds
    assert tree.accepted == chain.accepted


def test_a_tree_accepts_more_than_a_chain_of_the_same_depth(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(120, 64)
    chain = generate(target, trained, prompts, max_tokens=24, depth=3, generator=seeded(1))
    tree = generate_tree(target, trained, prompts, max_tokens=24, depth=3, branches=4, nodes=16, generator=seeded(1))
    assert tree.alpha > 1.1 * chain.alpha


def test_sampled_text_has_the_law_of_plain_sampling() -> None:
    target = make_target(vocab_size=8, sharpness=3.0)
    prompts, rows = [[3, 1, 4], [1]], 2000
    plain = generate(target, None, make_prompts(40, 8), max_tokens=12, generator=seeded(0))
    drafter = train_lightly(target, make_drafter(target, 6), log_rollouts(target, make_prompts(40, 8), plain), steps=15)
    made = generate_tree(
        target, drafter, prompts * rows, max_tokens=3, depth=2, branches=3, nodes=6, generator=seeded(7)
    )
    assert 1.3 < made.alpha < 2.9
    for which, prompt in enumerate(prompts):
        codes = np.array(made.tokens[which::2]) @ np.array([64, 8, 1])
        assert chi_square_excess(np.bincount(codes, minlength=8**3), rows * exact_law(target, prompt, 3)) < 4


def test_one_walk_has_the_law_of_the_target_and_a_faulty_one_does_not() -> None:
    """Fixed laws at every node, many walks: pairs of emitted tokens, those past the tree continued by hand."""
    V, rows = 4, 60_000
    tree = DraftTree(
        torch.tensor([[2, 0, 1]]).expand(rows, -1),
        torch.tensor([[-1, -1, 0]]).expand(rows, -1),
        torch.tensor([[[True, False, False], [False, True, False], [True, False, True]]]).expand(rows, -1, -1),
    )
    p = torch.randn(4, V, generator=seeded(3))  # after the root, after 2, after 0, after 2 then 1
    path, emitted, accepted = walk(tree, p.expand(rows, -1, -1), 2, 1.0, seeded(4))
    law = torch.softmax(p.double(), -1)
    counts = np.bincount(emitted[:, 0], minlength=V)
    assert chi_square_excess(counts, rows * law[0].numpy()) < 4
    went = accepted >= 1
    assert torch.equal(went, (emitted[:, 0] == 2) | (emitted[:, 0] == 0))
    after_two = emitted[emitted[:, 0] == 2, 1]
    assert chi_square_excess(np.bincount(after_two, minlength=V), len(after_two) * law[1].numpy()) < 4
    assert torch.equal(accepted == 2, (emitted[:, 0] == 2) & (emitted[:, 1] == 1))
    assert path[accepted == 2][0].tolist() == [0, 1, 3]
    # A verifier that prefers drafted tokens (takes the first child whenever p allows it) fails the same test.
    faulty = np.bincount(torch.where(emitted[:, 0] == 3, torch.tensor(2), emitted[:, 0]), minlength=V)
    assert chi_square_excess(faulty, rows * law[0].numpy()) > 20


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_clean_forward_pass(target: Any, trained: Eagle3Drafter, temperature: float) -> None:
    prompts = make_prompts(25, 64, seed=4)
    made = generate_tree(target, trained, prompts, max_tokens=16, temperature=temperature, generator=seeded(1))
    clean = log_rollouts(target, prompts, made, temperature)
    own = torch.tensor([value for row in made.logprobs for value in row])
    torch.testing.assert_close(own, clean.logprobs[clean.loss_mask], atol=2e-4, rtol=0)


def test_a_sequence_is_not_touched_by_those_beside_it(target: Any, trained: Eagle3Drafter) -> None:
    prompts = make_prompts(12, 64, seed=5)
    together = generate_tree(target, trained, prompts, max_tokens=16, temperature=0.0)
    for row in (0, 5, 11):
        alone = generate_tree(target, trained, [prompts[row]], max_tokens=16, temperature=0.0)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.rounds[0] == together.rounds[row]


def test_a_text_ends_with_any_of_several_tokens(target: Any, trained: Eagle3Drafter) -> None:
    prompts, ends = make_prompts(40, 64), [13, EOS]
    plain = generate(target, None, prompts, max_tokens=24, temperature=0.0, eos_id=ends)
    made = generate_tree(target, trained, prompts, max_tokens=24, temperature=0.0, eos_id=ends)
    assert made.tokens == plain.tokens
    assert {text[-1] for text, how in zip(made.tokens, made.finished, strict=True) if how == "eos"} == {*ends}
    assert set(made.finished) == {"eos", "length"}


def test_settings_that_cannot_work_are_refused(target: Any, trained: Eagle3Drafter) -> None:
    with pytest.raises(DrafterError, match="at least one token"):
        generate_tree(target, trained, [[]], max_tokens=4)
    wrongs: list[dict[str, Any]] = [{"depth": 0}, {"branches": 57}, {"nodes": 0}]
    for wrong in wrongs:
        with pytest.raises(DrafterError, match=str(next(iter(wrong)))):
            generate_tree(target, trained, [[1]], max_tokens=4, **wrong)


# --- every family of targets, by both decoders ----------------------------------------------------------------------

#: What has layers that do not go by the mask alone, and what the refusal names.
WINDOWED = {
    "llama 4 text": "chunked_attention layers, attention_chunk_size 8",
    "llama 4 nested": "chunked_attention layers, attention_chunk_size 8",
    "gpt-oss": "sliding_attention layers, sliding_window 4",
    "gemma 2": "sliding_attention layers, sliding_window 4",
    "gemma 3": "sliding_attention layers, sliding_window 4",
    "gemma 3 soft-capped": "sliding_attention layers, sliding_window 4",
    "gemma 3 nested": "sliding_attention layers, sliding_window 4",
    "gemma 4": "sliding_attention layers, sliding_window 4",
    "gemma 4 nested": "sliding_attention layers, sliding_window 4",
    "mistral": "sliding_window 4",
    "qwen3 next": "linear_attention layers",
}


def drafter_of(target: Any, seed: int = 1) -> Eagle3Drafter:
    """A random drafter, which is mostly wrong."""
    torch.manual_seed(seed)
    config = target.config.get_text_config()
    sizes = DrafterConfig.from_target(config.to_dict(), (1, 3, 4), VOCAB)
    return Eagle3Drafter(sizes, DraftVocabulary(torch.arange(VOCAB), VOCAB))


def three_ways(target: Any, drafter: Eagle3Drafter) -> list[list[list[int]]]:
    """Greedy text without a drafter, with a chain and with a tree."""
    prompts = make_prompts(8, VOCAB)
    same: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}
    return [
        generate(target, None, prompts, **same).tokens,
        generate(target, drafter, prompts, depth=3, **same).tokens,
        generate_tree(target, drafter, prompts, depth=3, branches=2, nodes=6, **same).tokens,
    ]


@torch.no_grad()
def is_argmax(target: Any, texts: list[list[int]]) -> bool:
    """Whether each response is the argmax of one pass without cache or padding over its whole text."""
    for prompt, response in zip(make_prompts(8, VOCAB), texts, strict=True):
        logits = target(input_ids=torch.tensor([prompt + response]), use_cache=False).logits
        if logits[0, len(prompt) - 1 : -1].argmax(dim=1).tolist() != response:
            return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_decoded_rightly_or_refused(family: str) -> None:
    target = tiny(family)
    drafter = drafter_of(target)
    if family not in WINDOWED:
        assert all(is_argmax(target, texts) for texts in three_ways(target, drafter))
        return
    named = f"{type(target).__name__} has {WINDOWED[family]}:"
    decoders: list[Callable[[], object]] = [
        lambda: generate(target, None, [[5]], max_tokens=4),
        lambda: generate(target, drafter, [[5]], max_tokens=4),
        lambda: generate_tree(target, drafter, [[5]], max_tokens=4),
    ]
    for decode in decoders:
        with pytest.raises(DrafterError, match=named):
            decode()


def test_a_window_that_is_written_down_but_not_in_use_is_no_reason_to_refuse() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    target = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.3)).eval()
    target.config.sliding_window = 4  # as older versions of transformers leave it
    assert target.config.use_sliding_window is False
    assert all(is_argmax(target, texts) for texts in three_ways(target, drafter_of(target)))
    target.config.use_sliding_window = True
    with pytest.raises(DrafterError, match="sliding_window 4"):
        generate(target, None, [[5]], max_tokens=4)
