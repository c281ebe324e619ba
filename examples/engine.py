"""A small inference engine: EAGLE-3 chain speculation with continuous batching, one thread, plain PyTorch.

A round covers every running sequence: the drafter proposes K tokens for each, the policy verifies them all in one
forward of K + 1 tokens per sequence, and rejection sampling keeps a prefix and adds one token. Sequences join and
leave between rounds. Without a drafter a round emits one token, and is not counted as a draft.

Drafters and policy weights change between two rounds, and no request stops for it:
- A new drafter is read and checked in the caller's thread before anything is touched. Its cache for the running
  sequences is computed again from their features, so no stale entry lowers its acceptance. Output depends on the
  drafter in no way but speed.
- New policy weights are copied in place. Keys and values of running sequences stay as the old weights made them (what
  engines call `keep`), so update while idle for text that one policy wrote; a completion names the versions it saw.

Counting is vLLM's: accepted tokens count before they are trimmed at the end of a response, generated tokens after.

Legend: S slots, B running sequences, K draft depth, T positions of a slot, V vocabulary, F features of a token.
p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafter.files.checkpoint import config_fingerprint, read_drafter
from drafter.model.eagle3 import Eagle3Drafter
from examples.engine_cache import Target
from examples.engine_drafting import Draft, Drafting, DraftingMode, draw, log_law, token_logprobs, verify
from examples.engine_sequences import Completion, CompletionGroup, Counters, RunningSequence, Sampling

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class EngineError(ValueError):
    """A request, a drafter or weights that the engine refuses; nothing has changed."""


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended: by `stop`, or by a fault that the message names."""


class Engine:
    """Serves one policy. All public methods may be called from any thread."""

    def __init__(
        self,
        model: Any,
        aux_layers: Sequence[int],
        *,
        depth: int = 4,
        drafting: DraftingMode = "probabilistic",
        max_sequences: int = 64,
        seed: int = 0,
        policy_version: int = 0,
    ) -> None:
        if depth < 1 or max_sequences < 1:
            raise EngineError(f"depth and max_sequences must be at least 1, got {depth} and {max_sequences}")
        self.depth, self.mode = depth, drafting
        self.max_model_tokens = int(model.config.max_position_embeddings)
        self._positions = self.max_model_tokens + depth + 1  # room for the drafts of a last round
        self._target = Target(model, aux_layers, max_sequences, self._positions)
        #: The layers whose input the drafter reads.
        self.aux_layers = self._target.aux_layers
        # Shared, not copied: drafters read the policy's live embedding, as in vLLM and SGLang. The service's replay
        # follows it through the heads that the hook sends.
        self._embedding = self._target.embedding().detach()
        self._drafting: Drafting | None = None
        #: Version of the policy's weights.
        self.policy_version = policy_version
        self._generator = torch.Generator().manual_seed(seed)
        self._max_sequences = max_sequences
        self._tokens = torch.zeros(max_sequences, self._positions, dtype=torch.long)
        self._features = torch.zeros(max_sequences, self._positions, self._target.feature_size)
        self._lengths = torch.zeros(max_sequences, dtype=torch.long)
        self._temperatures = torch.zeros(max_sequences)
        self._running: list[RunningSequence] = []  # index = slot
        self._waiting: deque[RunningSequence] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._counters = Counters(accepted_per_position=[0] * depth)
        self._wake = threading.Condition()
        self._swap_lock = threading.Lock()
        self._stopping = False
        #: The fault that ended the engine's thread, if one did.
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current round; requests that are not finished fail with `EngineStoppedError`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int = 1) -> Future[list[Completion]]:
        """Queue n completions of each prompt; the result has them prompt by prompt. Refusals raise `EngineError`."""
        self._check_request(prompts, sampling, n)
        total = len(prompts) * n
        future: Future[list[Completion]] = Future()
        group = CompletionGroup(future, [None] * total, total)
        with self._wake:
            self._check_alive()
            for index in range(total):
                self._waiting.append(RunningSequence(list(prompts[index // n]), sampling, group, index))
            self._wake.notify()
        return future

    def swap_drafter(self, directory: Path, version: str) -> str | None:
        """Serve the drafter in `directory` from the next round on; return the version that was served before.

        Anything wrong with the files raises `DrafterError` or `EngineError` before the engine is touched.
        """
        with self._swap_lock:
            candidate = read_drafter(directory)
            self._check_drafter(candidate)
            fresh = Drafting(candidate, self._embedding, version, self._max_sequences, self._positions)

            def apply() -> str | None:
                previous = self.drafter_version
                self._drafting = fresh
                self._counters.drafter_swaps += 1
                return previous

            return self._between_rounds(apply)

    def update_policy(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Load whole policy weights between two rounds; return how many sequences were running meanwhile."""
        try:
            self._target.check(weights)
        except ValueError as error:
            raise EngineError(str(error)) from error

        def apply() -> int:
            self._target.load(weights)
            self.policy_version = version
            self._counters.policy_updates += 1
            return len(self._running)

        return self._between_rounds(apply)

    @property
    def drafter_version(self) -> str | None:
        """Version of the served drafter, None if there is none."""
        served = self._drafting
        return None if served is None else served.version

    @property
    def drafter(self) -> Eagle3Drafter | None:
        """The served drafter, to look at."""
        served = self._drafting
        return None if served is None else served.drafter

    def counters(self) -> Counters:
        """A consistent copy of the counters: of one moment between two rounds."""
        with self._wake:
            return replace(self._counters, accepted_per_position=list(self._counters.accepted_per_position))

    def load(self) -> tuple[int, int]:
        """How many sequences are running and waiting."""
        with self._wake:
            return len(self._running), len(self._waiting)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._stopping or self.failure:
            raise EngineStoppedError(self.failure or "the engine is stopped")

    def _check_request(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> None:
        V = self._target.vocab_size
        if not prompts or n < 1 or sampling.max_tokens < 1:
            raise EngineError(f"expected prompts, n >= 1 and max_tokens >= 1, got {len(prompts)} prompts, n = {n}")
        if not 0 <= sampling.temperature <= 100:
            raise EngineError(f"temperature must be from 0 (greedy) to 100, got {sampling.temperature}")
        for prompt in prompts:
            if not prompt or len(prompt) + sampling.max_tokens > self.max_model_tokens:
                raise EngineError(
                    f"a prompt and its answer must have 1 to {self.max_model_tokens} tokens; this one has "
                    f"{len(prompt)} and max_tokens is {sampling.max_tokens}"
                )
            if not all(0 <= token < V for token in prompt):
                raise EngineError(f"token ids must be from 0 to {V - 1}, got {[t for t in prompt if not 0 <= t < V]}")

    def _check_drafter(self, candidate: Eagle3Drafter) -> None:
        if candidate.config.aux_layers != self._target.aux_layers:
            raise EngineError(
                f"the drafter reads the states entering layers {candidate.config.aux_layers}, this engine captures "
                f"{self._target.aux_layers}; serve a drafter of the same run"
            )
        served = self.drafter
        if served is not None and served.vocabulary != candidate.vocabulary:
            raise EngineError("d2t differs from the served drafter's; it must stay the same, restart to change it")
        if served is not None and _fingerprint(served) != _fingerprint(candidate):
            raise EngineError(f"expected the served drafter's config {served.config}, got {candidate.config}")

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _between_rounds(self, apply: Callable[[], _Result]) -> _Result:
        """Have the engine's thread call `apply` between two rounds; wait for its result."""
        done: Future[_Result] = Future()

        def command() -> None:
            try:
                done.set_result(apply())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, who is waiting for it
                done.set_exception(error)

        if not self._thread.is_alive() and not self.failure and not self._stopping:
            command()  # not started yet: nothing runs
            return done.result()
        with self._wake:
            self._check_alive()
            self._commands.append(command)
            self._wake.notify()
        return done.result()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting callers must hear of it
            _log.exception("the engine failed")
            self.failure = f"the engine failed: {error}"
        self._abandon()

    def _turn(self) -> bool:
        """One step of the loop: commands, new sequences, one round. False: stop."""
        with self._wake:
            while not (self._stopping or self._commands or self._waiting or self._running):
                self._wake.wait()
            if self._stopping:
                return False
            while self._commands:
                self._commands.popleft()()
            free = min(self._max_sequences - len(self._running), len(self._waiting))
            joining = [self._waiting.popleft() for _ in range(free)]
        if joining:
            self._prefill(joining)
        if self._running:
            self._round()
        return True

    def _abandon(self) -> None:
        with self._wake:
            reason = EngineStoppedError(self.failure or "the engine was stopped")
            groups = {id(sequence.group): sequence.group for sequence in (*self._running, *self._waiting)}
            self._running.clear()
            self._waiting.clear()
            commands, self._stopping = list(self._commands), True
            self._commands.clear()
        for group in groups.values():
            if not group.future.done():
                group.future.set_exception(reason)
        for command in commands:
            command()  # harmless: nothing runs any more, and its caller is waiting

    def _prefill(self, joining: list[RunningSequence]) -> None:
        """Consume the prompts of new sequences in one forward, and emit the first token of each."""
        first = len(self._running)
        slots = torch.arange(first, first + len(joining))
        lengths = torch.tensor([len(sequence.prompt) for sequence in joining])
        rows = int(lengths.max())
        tokens = torch.zeros(len(joining), rows, dtype=torch.long)
        for row, sequence in zip(tokens, joining, strict=True):
            row[: len(sequence.prompt)] = torch.tensor(sequence.prompt)
        hidden, features = self._target.forward(tokens, slots, torch.zeros_like(slots))
        self._tokens[slots, :rows] = tokens
        self._features[slots, :rows] = features
        self._lengths[slots] = lengths
        self._temperatures[slots] = torch.tensor([sequence.sampling.temperature for sequence in joining])
        if self._drafting is not None:
            self._drafting.filled[slots] = 0
        logits = self._target.logits(hidden[torch.arange(len(joining)), lengths - 1])  # [B, V]
        emitted = draw(log_law(logits, self._temperatures[slots]), self._generator)  # [B, 1]
        logprobs = token_logprobs(logits[:, None], emitted, self._temperatures[slots])
        self._tokens[slots, lengths] = emitted[:, 0]
        self._lengths[slots] += 1
        with self._wake:
            self._running.extend(joining)
            self._counters.prompt_tokens += int(lengths.sum())
            for sequence, token, logprob in zip(joining, emitted.tolist(), logprobs.tolist(), strict=True):
                self._counters.generation_tokens += sequence.take(token, logprob, self.policy_version)
        self._retire()

    def _round(self) -> None:
        """Draft, verify and emit for every running sequence."""
        B = len(self._running)
        slots = torch.arange(B)
        tokens, lengths, temperatures = self._tokens[:B], self._lengths[:B], self._temperatures[:B]
        draft: Draft | None = None
        chain = tokens.gather(1, (lengths - 1)[:, None])  # [B, 1]: the last token, not consumed yet
        if self._drafting is not None:
            draft = self._drafting.propose(
                tokens, self._features[:B], lengths, temperatures, self.depth, self.mode, self._generator
            )
            chain = torch.cat([chain, draft.tokens], dim=1)  # [B, K+1]
        hidden, features = self._target.forward(chain, slots, lengths - 1)
        logits = self._target.logits(hidden)  # [B, K+1, V]
        accepted, emitted = verify(log_law(logits, temperatures), draft, self._generator)
        logprobs = token_logprobs(logits, emitted, temperatures)
        rows = lengths[:, None] + torch.arange(chain.shape[1])
        # Rows past the accepted ones hold what was rejected, and are overwritten before they are read.
        tokens.scatter_(1, rows, emitted)
        self._features[slots[:, None], rows - 1] = features
        lengths += accepted + 1
        self._record(draft is not None, accepted.tolist(), emitted.tolist(), logprobs.tolist())
        self._retire()

    def _record(
        self, drafted: bool, accepted: list[int], emitted: list[list[int]], logprobs: list[list[float]]
    ) -> None:
        """Hand each running sequence its tokens and count."""
        version = self.drafter_version or ""
        with self._wake:
            counters = self._counters
            counters.rounds += 1
            for index, sequence in enumerate(self._running):
                count = accepted[index] + 1
                fitted = sequence.take(emitted[index][:count], logprobs[index][:count], self.policy_version)
                counters.generation_tokens += fitted
                if not drafted:
                    continue
                sequence.rounds += 1
                sequence.accepted_tokens += accepted[index]
                sequence.emitted_tokens += fitted
                if version not in sequence.drafter_versions:
                    sequence.drafter_versions.append(version)
                counters.drafts += 1
                counters.draft_tokens += self.depth
                counters.accepted_tokens += accepted[index]
                counters.emitted_tokens += fitted
                for position in range(accepted[index]):
                    counters.accepted_per_position[position] += 1

    def _retire(self) -> None:
        """Complete the sequences that have ended; move others so that running slots stay 0..B-1."""
        done: list[RunningSequence] = []
        with self._wake:
            for slot in range(len(self._running) - 1, -1, -1):
                sequence = self._running[slot]
                if not sequence.finish_reason:
                    continue
                self._counters.finished_by_stop += sequence.finish_reason == "stop"
                self._counters.finished_by_length += sequence.finish_reason == "length"
                done.append(sequence)
                last = self._running.pop()
                if last is not sequence:
                    self._running[slot] = last
                    self._move(len(self._running), slot)
        for sequence in done:
            sequence.group.finish(sequence.index, sequence.completion())

    def _move(self, source: int, destination: int) -> None:
        length = int(self._lengths[source])
        self._tokens[destination, :length] = self._tokens[source, :length]
        self._features[destination, :length] = self._features[source, :length]
        self._lengths[destination] = length
        self._temperatures[destination] = self._temperatures[source]
        self._target.cache.move(source, destination, length)
        if self._drafting is not None:
            self._drafting.move(source, destination)


def _fingerprint(drafter: Eagle3Drafter) -> str:
    return config_fingerprint(drafter.config, drafter.vocabulary)
