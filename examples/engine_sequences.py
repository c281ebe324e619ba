"""What the engine knows about a request while it runs and when it is done, and what it counts. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. Rounds are those of a drafter; tokens of plain rounds belong to none."""

    token_ids: list[int]
    #: log p of each token at the request's temperature (at temperature 0: at 1), in nats.
    logprobs: list[float]
    rounds: int
    #: Accepted drafts before trimming at the end of the response, as vLLM counts them.
    accepted_tokens: int
    #: Tokens that rounds emitted, after trimming; the first token of an answer comes from the prefill.
    emitted_tokens: int
    #: Drafters that proposed for this answer, in order of appearance.
    drafter_versions: list[str]
    #: Lowest and highest policy version that wrote this answer.
    policy_versions: tuple[int, int]
    #: `stop` (end of sequence) or `length`.
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue a prompt. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    eos_id: int | None = None


@dataclass(slots=True)
class Counters:
    """What the engine has done since its start; never reset, not even by a swap."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    #: After trimming, tokens that drafted rounds emitted (vLLM has no such counter).
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished_by_stop: int = 0
    finished_by_length: int = 0
    rounds: int = 0
    drafter_swaps: int = 0
    policy_updates: int = 0


@dataclass(slots=True)
class CompletionGroup:
    """The completions of one call, which resolve together."""

    future: Future[list[Completion]]
    completions: list[Completion | None]
    remaining: int

    def finish(self, index: int, completion: Completion) -> None:
        """Hand in one completion; the last one resolves the call."""
        self.completions[index] = completion
        self.remaining -= 1
        if self.remaining == 0 and not self.future.cancelled():
            self.future.set_result([done for done in self.completions if done is not None])


@dataclass(slots=True)
class RunningSequence:
    """A sequence from its submission to its completion."""

    prompt: list[int]
    sampling: Sampling
    group: CompletionGroup
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    drafter_versions: list[str] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], policy_version: int) -> int:
        """Append tokens up to the end of the response; return how many fitted."""
        if policy_version not in self.policy_versions:
            self.policy_versions.append(policy_version)
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if token == self.sampling.eos_id:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.sampling.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)

    def completion(self) -> Completion:
        """The finished answer."""
        return Completion(
            self.token_ids,
            self.logprobs,
            self.rounds,
            self.accepted_tokens,
            self.emitted_tokens,
            self.drafter_versions,
            (min(self.policy_versions), max(self.policy_versions)),
            self.finish_reason,
        )
