"""A policy, drafters of it on disk, and engines, for the tests of the example engine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.made_once import made_once

from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from examples import elicit, policy
from examples.engine import Engine
from examples.engine_drafting import Drafting
from examples.engine_sequences import Completion, Sampling
from examples.features import Rollout, batch_of
from examples.initial_drafter import train_initial_drafter
from examples.task import DrafterRecipe

EOS_ID = elicit.TASK.eos_id


@functools.cache
def base_policy() -> tuple[Any, Any]:
    """The shipped policy and its tokenizer. Engines only read it, unless a test updates the weights: then copy it."""
    return policy.load()


def elicit_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts of the task."""
    ids: list[list[int]] = base_policy()[1](elicit.sample_prompts(count, seed))["input_ids"]
    return ids


def odd_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 30 random words, whose greedy continuations differ far more than those of the task."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 31, (count,), generator=generator).tolist()
    return [torch.randint(2, len(elicit.VOCABULARY), (n,), generator=generator).tolist() for n in lengths]


def random_drafter(model: Any, seed: int, draft_vocab_size: int | None = None) -> Eagle3Drafter:
    """An untrained drafter whose lm_head is the policy's: bad, but not hopeless."""
    config = DrafterConfig.from_target(model.config.to_dict(), policy.AUX_LAYERS, draft_vocab_size)
    vocabulary = DraftVocabulary(
        torch.arange(config.vocab_size - config.draft_vocab_size, config.vocab_size), config.vocab_size
    )
    head = model.get_output_embeddings().weight.detach()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config, vocabulary)
    drafter.init_from_target(head[vocabulary.ids])
    return drafter


def randomize_drafter(engine: Engine, seed: int) -> None:
    """Overwrite the served drafter's weights with noise, as a broken weight sync would."""
    served = engine._drafting
    assert served is not None
    dead = Eagle3Drafter(served.drafter.config, served.drafter.vocabulary)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dead.parameters():
            parameter.normal_(generator=generator)
    fresh = Drafting(dead, engine._embedding, served.version, engine._max_sequences, engine._positions)

    def apply() -> None:
        engine._drafting = fresh

    engine._between_rounds(apply)


def write(drafter: Eagle3Drafter, directory: Path) -> Path:
    """The drafter's checkpoint on disk."""
    directory.mkdir(parents=True)
    write_drafter(directory, drafter)
    return directory


@functools.cache
def trained_drafter() -> Eagle3Drafter:
    """A drafter trained for some seconds on the shipped policy's own rollouts; 96 of the policy's 105 words."""
    return made_once("trained_drafter", _train_drafter)


def _train_drafter() -> Eagle3Drafter:
    model, _ = base_policy()
    prompts = elicit_prompts(384, seed=99)
    with engine(model) as plain:
        done = plain.submit(prompts, Sampling(elicit.MAX_ANSWER_TOKENS, eos_id=EOS_ID)).result(timeout=60)
    batch = batch_of(model, rollouts(prompts, done))
    drafter = random_drafter(model, seed=0, draft_vocab_size=96)
    trainer = DrafterTrainer(drafter, TrainConfig(steps_ahead=4, learning_rate=2e-3, optimizer="adamw"))
    shared = policy_of(model)
    for step in range(48):
        trainer.step([(batch.select([(step * 40 + i) % batch.rollouts for i in range(40)]), shared)])
    return drafter.eval().requires_grad_(False)


@functools.cache
def demo_drafter() -> Eagle3Drafter:
    """One as good as what the demo makes to begin with (α 3.8 of 5, the demo's own 4.1), in half of the time."""
    return made_once("demo_drafter", _train_demo_drafter)


def _train_demo_drafter() -> Eagle3Drafter:
    model, _ = base_policy()
    prompts = elicit_prompts(896, seed=10_003)
    with engine(model) as plain:
        done = plain.submit(prompts, Sampling(elicit.MAX_ANSWER_TOKENS, eos_id=EOS_ID)).result(timeout=600)
    task = replace(elicit.TASK, initial_drafter=DrafterRecipe(steps=70, learning_rate=1e-2, optimizer="muon"))
    batch = batch_of(model, rollouts(prompts, done))
    return train_initial_drafter(model, batch, depth=4, seed=3, task=task).eval().requires_grad_(False)


def rollouts(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Rollout]:
    """Completions (one for each prompt) as the rollouts that `examples.features` packs."""
    return [
        Rollout(tuple(prompt), tuple(done.token_ids), tuple(done.logprobs))
        for prompt, done in zip(prompts, completions, strict=True)
    ]


@contextmanager
def engine(model: Any, directory: Path | None = None, **options: Any) -> Iterator[Engine]:
    """A started engine, with the drafter of `directory` if given."""
    served = Engine(model, policy.AUX_LAYERS, **options)
    if directory is not None:
        served.swap_drafter(directory, "v1")
    served.start()
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Repeat `action` in a thread while the block runs; the list holds what it raised."""
    over = threading.Event()
    raised: list[BaseException] = []

    def repeat() -> None:
        try:
            while not over.is_set():
                action()
        except BaseException as error:  # noqa: BLE001 - the test asserts on it
            raised.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield raised
    finally:
        over.set()
        thread.join()
