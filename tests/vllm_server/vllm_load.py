"""Clients that keep a server busy with texts that must not change, and drafters edited on disk."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine_fixtures import elicit_prompts, odd_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_server.vllm_process import VllmServer

PROMPTS = elicit_prompts(10, seed=3) + odd_prompts(10, seed=3)
_EDITS = 0


class Load:
    """Four clients that ask for the same greedy texts again and again, each in an order of its own."""

    def __init__(self, server: VllmServer, prompts: list[list[int]] = PROMPTS) -> None:
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


def alpha(server: VllmServer, prompts: list[list[int]]) -> float:
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
