"""Clients that keep a real engine busy with texts that must not change; drafters edited on disk, and published."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from helpers.engine.engine_fixtures import (
    base_policy,
    elicit_prompts,
    odd_prompts,
    random_drafter,
    trained_drafter,
    write,
)
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.files.checkpoint import config_fingerprint
from drafter.model.eagle3 import Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from examples.features import Rollout
from rl_hooks.engines.counting.counters import Counts
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE
from rl_hooks.format.release import RECEIPT, check_receipt

REPOSITORY = Path(__file__).parents[3]
PROMPTS = elicit_prompts(10, seed=3) + odd_prompts(10, seed=3)
_EDITS = 0


class Server(Protocol):
    """A real engine under test."""

    def generate(self, prompt: Sequence[int], *, max_tokens: int = 40) -> Any:
        """Token ids of one greedy completion; raises on any answer but 200."""
        ...

    def counters(self) -> Counts:
        """Its counters now."""
        ...

    def log_end(self) -> str:
        """What it printed last."""
        ...


class Load:
    """Four clients that ask for the same greedy texts again and again, each in an order of its own."""

    def __init__(self, server: Server, prompts: list[list[int]] = PROMPTS) -> None:
        self.server = server
        self.prompts = prompts
        self.alone = [tuple(server.generate(prompt, max_tokens=48)) for prompt in prompts]
        self.texts: list[set[tuple[int, ...]]] = [set() for _ in prompts]
        self.failures: list[BaseException] = []
        self.served = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @property
    def changed(self) -> dict[int, set[tuple[int, ...]]]:
        """Texts that differ from what the server said when it was alone, by prompt."""
        return {i: texts - {self.alone[i]} for i, texts in enumerate(self.texts) if texts - {self.alone[i]}}

    def _ask(self, client: int) -> None:
        order = random.Random(client)
        while not self._stop.is_set():
            index = order.randrange(len(self.prompts))
            try:
                text = tuple(self.server.generate(self.prompts[index], max_tokens=48))
            except BaseException as error:  # noqa: BLE001 - counted; the test asserts that there are none
                self.failures.append(error)
                continue
            with self._lock:
                self.texts[index].add(text)
                self.served += 1

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Clients run while the block does."""
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self._ask, i) for i in range(4)]
            try:
                yield self
            finally:
                self._stop.set()
        for future in asked:
            future.result()

    def wait_for(self, more: int) -> None:
        """Until `more` further requests were served."""
        goal = self.served + more
        while self.served < goal:
            assert not self.failures, f"{self.failures[0]!r}; the server's log ends:\n{self.server.log_end()}"
            threading.Event().wait(0.02)


def write_entry_points(directory: Path, name: str = "draftalign", text: str | None = None) -> Path:
    """Metadata of a distribution that is not installed, for PYTHONPATH; without `text` ours, from pyproject.toml."""
    if text is None:
        ours = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
        groups = ([f"[{group}]", *(f"{n} = {v}" for n, v in names.items())] for group, names in ours.items())
        text = "\n".join(chain(*groups))
    metadata = directory / f"{name}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(text)
    return directory


def write_drafters(directory: Path) -> Path:
    """What server and agent share: `random`, with which the server starts, and `trained`."""
    write(random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), directory / "random")
    write(trained_drafter(), directory / "trained")
    return directory


def damaged_in_a_cache(drafter: Path, directory: Path) -> Path:
    """A copy as an agent's cache holds it, whose weights have changed since by one bit."""
    shutil.copytree(drafter, directory)
    names = (CONFIG_FILE, MODEL_FILE)
    sha256 = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    (directory / RECEIPT).write_text(json.dumps({"digest": "d", "sha256": sha256}))
    check_receipt(directory)
    data = bytearray((directory / MODEL_FILE).read_bytes())
    data[-1] ^= 1
    (directory / MODEL_FILE).write_bytes(data)
    return directory


def alpha(server: Server, prompts: list[list[int]]) -> float:
    """Acceptance length over these prompts, drafts counted before trimming."""
    before = server.counters()
    for prompt in prompts:
        server.generate(prompt)
    after = server.counters()
    return 1 + (after.accepted_tokens - before.accepted_tokens) / (after.rounds - before.rounds)


def edited(drafters: Path, change: Callable[[dict[str, Tensor]], None], **config: object) -> Path:
    """A copy of the trained drafter with some tensors or fields changed."""
    global _EDITS  # noqa: PLW0603 - a fresh name for each
    _EDITS += 1
    directory = drafters / f"edited-{_EDITS}"
    shutil.copytree(drafters / "trained", directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    document = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def publish(service: RunningService, directory: Path, drafter: Eagle3Drafter, run: str = "default") -> str:
    """Publish the files as they are; the manifest says what they say of themselves, as the worker's would."""
    staged = service.registry.stage(run)
    for path in directory.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    d2t = load_file(directory / "model.safetensors")["d2t"]
    vocabulary = DraftVocabulary.from_d2t(d2t, drafter.config.vocab_size)
    aux_layers = json.loads((directory / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    facts: dict[str, Any] = {"policy_version": 0, "parent": None, "aux_layers": tuple(aux_layers)}
    facts["config_fingerprint"] = config_fingerprint(drafter.config, vocabulary)
    facts["d2t_sha256"] = vocabulary.digest
    return service.registry.publish(run, staged, **facts).version


@torch.no_grad()
def logged(model: object, prompt: list[int], text: list[int]) -> Rollout:
    """A rollout with the log-probabilities that a trainer would have logged."""
    logits: Tensor = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]  # type: ignore[operator]
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(text)[:, None])[:, 0]
    return Rollout(tuple(prompt), tuple(text), tuple(logprobs.tolist()))
