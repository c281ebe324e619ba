"""A scheduler with the calls of vLLM's that are counted: schedules and accepts at random, and keeps the truth."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

DEPTH = 3


@dataclass
class Output:
    """What vLLM's scheduler hands to a step, and (`made_by`) what the test knows of its drafts."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_invalid_spec_tokens: dict[str, int] | None = None
    policy: int = 0


class Scheduler:
    """Schedules and accepts at random; keeps the truth about each round."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.requests: dict[str, Any] = {}
        self.named = 0  # no name comes twice: vLLM makes each its own
        self.unfinished = 0
        self.drafts: dict[str, str | None] = {}  # request -> who made the drafts that it has now
        self.drafter: str | None = None
        self.policy = 0
        self.truth: Counter[tuple[str | None, int]] = Counter()
        self.accepted: Counter[tuple[str | None, int]] = Counter()
        self.prompts = 5
        self.of_prompt: Counter[tuple[str | None, int, int, str]] = Counter()
        self.emitted = 0
        self.told = 0

    def has_unfinished_requests(self) -> bool:
        return self.unfinished > 0

    def schedule(self, _throttle: bool = False) -> Output:
        for _ in range(self.draw.randint(0, 2)):
            self.named += 1
            prompt = self.draw.randrange(self.prompts)
            self.requests[f"request {self.named}"] = SimpleNamespace(prompt_token_ids=[prompt])
        output = Output(policy=self.policy)
        for request in list(self.requests):
            if self.draw.random() < 0.7:
                output.num_scheduled_tokens[request] = 1
                if request in self.drafts:
                    output.scheduled_spec_decode_tokens[request] = [1] * DEPTH
        return output

    def execute(self, output: Output) -> dict[str, str | None]:
        """The step on the device: verifies drafts, makes new ones. Returns who had made the verified ones."""
        makers = {request: self.drafts[request] for request in output.scheduled_spec_decode_tokens}
        self.drafts |= dict.fromkeys(output.num_scheduled_tokens, self.drafter)
        return makers

    def update_from_output(self, scheduler_output: Output, makers: dict[str, str | None]) -> dict[int, Any]:
        outputs = []
        for request in scheduler_output.num_scheduled_tokens:
            if request not in self.requests:
                continue  # aborted meanwhile
            accepted = 0
            if request in makers:
                accepted = self.draw.randint(0, DEPTH)
                law = (makers[request], scheduler_output.policy)
                self.truth[law] += 1
                self.accepted[law] += accepted
                prompt = self.requests[request].prompt_token_ids[0]
                self.of_prompt[*law, prompt, "tokens"] += accepted + 1
                self.of_prompt[*law, prompt, "rounds"] += 1
                self.make_spec_decoding_stats(
                    None,
                    num_draft_tokens=DEPTH,
                    num_accepted_tokens=accepted,
                    num_invalid_spec_tokens=None,
                    request_id=request,
                )
                self.emitted += accepted + 1
            outputs.append(SimpleNamespace(request_id=request, new_token_ids=[1] * (accepted + 1)))
            if self.draw.random() < 0.1:
                del self.requests[request]
                self.drafts.pop(request, None)
        return {0: SimpleNamespace(outputs=outputs)}

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,  # noqa: ARG002 - vLLM's signature
        num_draft_tokens: int,
        num_accepted_tokens: int,  # noqa: ARG002
        num_invalid_spec_tokens: dict[str, int] | None,  # noqa: ARG002
        request_id: str,  # noqa: ARG002
    ) -> None:
        self.told += num_draft_tokens
