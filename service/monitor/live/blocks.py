"""The live side: what an engine counted, as blocks of verification rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from service.monitor.records import TREES, AcceptanceRecord

#: A block counts at most so many prompts apart: as many as a report. `monitor` may not import the constant,
#: `rl_hooks.wire.COUNTED_PROMPTS`.
MOST_PROMPTS: Final = 64
#: The newest block takes in reports until it has so many rounds.
_BLOCK_ROUNDS: Final = 256
#: Blocks kept per engine. One more joins the oldest two neighbours that `_shorten` may join, or drops the oldest block.
KEPT_BLOCKS: Final = 32
#: Old blocks are joined up to so many rounds; the newest blocks stay apart.
_JOINED_ROUNDS: Final = 4096
_NEWEST_APART: Final = 8
#: Draft positions that are kept; the service replays no more.
_POSITIONS: Final = 16
#: Up to this α an engine is `idle`: its drafts are of no use.
_NOTHING_ACCEPTED: Final = 1.05


@dataclass(frozen=True, slots=True)
class Block:
    """What one engine counted with one drafter and policy version over a stretch of rounds.

    `tokens`: emitted. `drafted`: None where it is not known. `accepted`: by position, empty where it is not known.
    `since`: the report with which the engine last became `idle`, or ceased to be it, in Unix seconds.
    `named`: whether the engine named the policy version; else it is the newest of which a batch had come.
    """

    drafter_version: str
    policy_version: int
    rounds: int
    tokens: int
    drafted: int | None
    accepted: tuple[int, ...]
    since: float
    by_prompt: Mapping[str, Sequence[int]] = field(default_factory=dict)  # tokens and rounds; empty: not known
    finished: int | None = None  # requests that ended in it
    running: int | None = None  # requests at its end
    most_running: int | None = None  # at the end of any report in it
    named: bool = True

    @property
    def alpha(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds

    @property
    def depth(self) -> float | None:
        """Tokens drafted per round; None where nobody knows."""
        if self.drafted:
            return self.drafted / self.rounds
        return float(len(self.accepted)) if self.accepted else None

    def joins(self, other: Block) -> bool:
        """Whether both may become one block: same versions, both idle or neither, and the same counts known."""
        same = (self.drafter_version, self.policy_version, self.idle, self.named) == (
            other.drafter_version,
            other.policy_version,
            other.idle,
            other.named,
        )
        known, also = ((bool(one.accepted), one.drafted is None, one.finished is None) for one in (self, other))
        return same and known == also

    @property
    def idle(self) -> bool:
        """Whether hardly a draft was accepted."""
        return self.alpha <= _NOTHING_ACCEPTED

    def __add__(self, newer: Block) -> Block:
        long, short = sorted((self.accepted, newer.accepted), key=len, reverse=True)
        by_prompt = {**self.by_prompt, **newer.by_prompt}
        for prompt in self.by_prompt.keys() & newer.by_prompt.keys():
            by_prompt[prompt] = [a + b for a, b in zip(self.by_prompt[prompt], newer.by_prompt[prompt], strict=True)]
        padded = (*short, *[0] * (len(long) - len(short)))
        drafted = None if self.drafted is None or newer.drafted is None else self.drafted + newer.drafted
        return replace(
            self,
            rounds=self.rounds + newer.rounds,
            tokens=self.tokens + newer.tokens,
            drafted=drafted,
            accepted=tuple(a + b for a, b in zip(long, padded, strict=True)),
            by_prompt=by_prompt if len(by_prompt) <= MOST_PROMPTS else {},
            finished=None if self.finished is None or newer.finished is None else self.finished + newer.finished,
            running=newer.running,
            most_running=max(self.most_running or 0, newer.most_running or 0),
        )


def counted(blocks: Sequence[Block], more: AcceptanceRecord, *, named: bool = True) -> tuple[Block, ...]:
    """Add `more`, the growth of counts since the report before, to `blocks` (oldest first). At most `KEPT_BLOCKS`.

    `named`: as of a `Block`.
    """
    tokens, compared = more.emitted, more.ours and more.drafting != TREES
    if not compared or more.rounds <= 0 or tokens is None or more.policy_version is None or _is_of_two(more):
        return tuple(blocks)
    if more.accepted_tokens is not None:
        tokens = min(tokens, more.accepted_tokens + more.rounds)  # no engine emits more
    new = Block(
        str(more.drafter_version),
        more.policy_version,
        more.rounds,
        tokens,
        more.drafted_tokens,
        _positions(more),
        more.reported,
        _by_prompt(more, tokens),
        more.finished_requests,
        more.running_requests,
        more.running_requests,
        named,
    )
    last = blocks[-1] if blocks else None
    if last is not None and last.idle == new.idle:
        new = replace(new, since=last.since)
    if last is not None and last.rounds < _BLOCK_ROUNDS and last.joins(new):
        return (*blocks[:-1], last + new)
    kept = [*blocks, new]
    if len(kept) > KEPT_BLOCKS:
        _shorten(kept)
    return tuple(kept[-KEPT_BLOCKS:])


def _is_of_two(more: AcceptanceRecord) -> bool:
    """Whether the growth mixes the counts of two processes: no single one can have counted it.

    So it is where an engine restarted, and its counts passed the last ones before its next report. A reporter that
    names the life of its counts needs no such guess.
    """
    if more.life is not None:
        return False
    accepted, kept = more.accepted_tokens or 0, more.accepted_per_position
    rising = sum(kept) == accepted and any(later > earlier for earlier, later in pairwise((more.rounds, *kept)))
    return rising or accepted > (accepted if more.drafted_tokens is None else more.drafted_tokens)


def _by_prompt(more: AcceptanceRecord, tokens: int) -> dict[str, tuple[int, int]]:
    """Counts by prompt; empty where they contradict the sums."""
    found = more.by_prompt or {}
    emitted, rounds = sum(own for own, _ in found.values()), sum(took for _, took in found.values())
    return found if emitted <= tokens and rounds <= more.rounds else {}


def _positions(more: AcceptanceRecord) -> tuple[int, ...]:
    """Counts by position; empty where they contradict the others."""
    found = more.accepted_per_position
    return found[:_POSITIONS] if sum(found) == more.accepted_tokens else ()


def _shorten(blocks: list[Block]) -> None:
    """Join the oldest two neighbours that may be joined; the newest blocks stay apart."""
    for at in range(len(blocks) - _NEWEST_APART - 1):
        if blocks[at].joins(blocks[at + 1]) and blocks[at].rounds + blocks[at + 1].rounds <= _JOINED_ROUNDS:
            blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
            return
