"""Exact counts of vLLM's speculation by drafter version and policy version, from its scheduler.

A step verifies drafts that were made in the step before. After a swap, each running request still has drafts of the
old drafter once; they are counted as the old one's. The policy is the one whose step verified them.

All calls come from the engine's thread, except `read`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rl_hooks.engines.counting.counters import Snapshot
from rl_hooks.engines.counting.rounds import Law, RoundBooks, counted_prompt
from rl_hooks.engines.vllm import KNOWN_RELEASES

log = logging.getLogger("vllm.draftalign")

#: Parameters of the method that vLLM's scheduler calls for each request with drafts to verify.
_TOLD: Final = (
    *("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
)
_Round = tuple[str, int, int]  # request, drafts, accepted ones


class CountingUnsupportedError(Exception):
    """The scheduler of this vLLM is another than the one that was read; the message says what differs."""


class RoundCounter:
    """Counts the rounds of one scheduler. `serving` is the drafter and the policy of the steps from now on."""

    def __init__(self, scheduler: Any) -> None:
        self.serving: Law = (None, None)
        #: A fault of ours has ended the counting; the scheduler's methods pass through.
        self.failed = False
        self._books = RoundBooks()
        self._laws: dict[int, Law] = {}  # of the steps under way, by their scheduler output
        #: Request -> drafter of its drafts, while some are of an older one; None: all are of the present one.
        self._makers: dict[str, str | None] | None = None
        self._step: list[_Round] = []
        self._prompts: dict[str, str | None] = {}  # request -> its prompt, as it is counted; None: not known
        self._law: Law = self.serving
        self._scheduler = scheduler
        self._wrap(scheduler)

    def serve(self, drafter: str | None, policy: int | None) -> None:
        """The drafter and the policy from the next step on."""
        before, self.serving = self.serving[0], (drafter, policy)
        if before != drafter and self._makers is None:
            self._makers = dict.fromkeys(self._scheduler.requests, before)

    def read(self) -> Snapshot:
        """Cumulative counts of each (drafter version, policy version). Any thread."""
        return self._books.read(self.serving[1])

    # --- called in the scheduler
    def _wrap(self, scheduler: Any) -> None:
        found = tuple(inspect.signature(scheduler.make_spec_decoding_stats).parameters)
        if found != _TOLD:
            raise CountingUnsupportedError(
                f"make_spec_decoding_stats takes {', '.join(found)}; the counts know {KNOWN_RELEASES}, where it "
                f"takes {', '.join(_TOLD)}"
            )
        told, schedule, update = scheduler.make_spec_decoding_stats, scheduler.schedule, scheduler.update_from_output
        prompts, append = self._prompts, self._step.append

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._laws[id(output)] = self.serving
            return output

        def counted(
            spec_decoding_stats: Any,
            num_draft_tokens: int,
            num_accepted_tokens: int,
            num_invalid_spec_tokens: dict[str, int] | None,
            request_id: str,
        ) -> Any:
            # Called for each request of each step, hundreds of times between two forwards: `_end` does what can wait.
            drafted = num_draft_tokens
            if (num_invalid_spec_tokens or request_id not in prompts) and not self.failed:
                with self._guarded():
                    drafted -= (num_invalid_spec_tokens or {}).get(request_id, 0)
                    if request_id not in prompts:  # now: a request that ends in this step is not there after it
                        request = self._scheduler.requests.get(request_id)
                        prompts[request_id] = counted_prompt(getattr(request, "prompt_token_ids", None))
            append((request_id, drafted, num_accepted_tokens))
            return told(spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

        def counted_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._law = self._laws.pop(id(scheduler_output), self.serving)
            self._step.clear()  # of an update that raised
            outputs = update(scheduler_output, *args, **kwargs)
            if not self.failed:
                with self._guarded():
                    self._end(scheduler_output, outputs)
            return outputs

        scheduler.make_spec_decoding_stats = counted
        scheduler.schedule = counted_schedule
        scheduler.update_from_output = counted_update

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A fault of ours ends the counting, with a line in the log: an exception here would end the engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.failed = True
            log.warning("draftalign: rounds are no longer counted in this engine: %r", error)

    def _end(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        drafter, policy = self._law
        if self._step:
            emitted = {one.request_id: len(one.new_token_ids) for batch in outputs.values() for one in batch.outputs}
            if self._makers is None:
                self._book((drafter, policy), self._step, emitted)
            else:
                by_maker: dict[str | None, list[_Round]] = {}
                for round_ in self._step:
                    by_maker.setdefault(self._makers.get(round_[0], drafter), []).append(round_)
                for maker, rounds in by_maker.items():
                    self._book((maker, policy), rounds, emitted)
            requests = self._scheduler.requests  # those that wait too, thousands: what is walked is `_prompts`
            ended = [one for one in self._prompts if one not in requests]
            for request in ended:
                del self._prompts[request]
            self._books.tell((drafter, policy), len(ended), len(self._prompts))
            self._step.clear()
        if self._makers is not None:
            self._makers |= dict.fromkeys(scheduler_output.num_scheduled_tokens, drafter)
            requests = self._scheduler.requests
            self._makers = {request: maker for request, maker in self._makers.items() if request in requests}
            if all(maker == self.serving[0] for maker in self._makers.values()):
                self._makers = None

    def _book(self, law: Law, rounds: Sequence[_Round], emitted: Mapping[str, int]) -> None:
        requests, drafted, accepted = zip(*rounds, strict=True)
        tokens = [emitted.get(request, 0) for request in requests]
        self._books.add(law, sum(drafted), accepted, tokens, map(self._prompts.get, requests))
