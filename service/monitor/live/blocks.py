"""What an engine counted, as stretches of rounds: the live side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from service.monitor.records import TREES, AcceptanceRecord

#: Prompts that a block tells apart: as many as a report (`rl_hooks.wire.COUNTED_PROMPTS`; this room imports nothing).
MOST_PROMPTS: Final = 64
#: A block is closed at so many rounds; a report with more is a block of its own.
_BLOCK_ROUNDS: Final = 256
#: Blocks kept per engine. Beyond them the oldest neighbours are joined, or the oldest is forgotten.
KEPT_BLOCKS: Final = 32
_JOINED_ROUNDS: Final = 4096
_NEWEST_APART: Final = 8
#: Draft positions that are kept; the service replays no more.
_POSITIONS: Final = 16
#: An engine that accepts less drafts nothing of use: whether it has done so without a break is kept with its blocks.
_NOTHING_ACCEPTED: Final = 1.05


@dataclass(frozen=True, slots=True)
class Block:
    """What one engine counted with one drafter and policy version over a stretch of rounds.

    `tokens`: emitted. `drafted`: None where it is not known. `accepted`: by position, empty where it is not known.
    `since`: Unix seconds; since when the engine has been `idle`, or not `idle`, without a break up to this block.
    """

    drafter_version: str
    policy_version: int
    rounds: int
    tokens: int
    drafted: int | None
    accepted: tuple[int, ...]
    since: float
    by_prompt: Mapping[str, Sequence[int]] = field(default_factory=dict)  # tokens and rounds; empty: not known

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
        """Whether both are of one drafter and policy version, and of one kind."""
        same = (self.drafter_version, self.policy_version, self.idle) == (
            other.drafter_version,
            other.policy_version,
            other.idle,
        )
        return (
            same and bool(self.accepted) == bool(other.accepted) and (self.drafted is None) == (other.drafted is None)
        )

    @property
    def idle(self) -> bool:
        """Whether nothing of use was accepted."""
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
        )


def counted(blocks: Sequence[Block], more: AcceptanceRecord) -> tuple[Block, ...]:
    """`blocks` (oldest first) with what a report counted more than the one before it. Never more than `KEPT_BLOCKS`."""
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
    """Whether one process cannot have counted this: the engine restarted, and passed what it had reported before.

    A guess, and not asked of a reporter that says in which life of its counts it counted.
    """
    if more.life is not None:
        return False
    accepted, kept = more.accepted_tokens or 0, more.accepted_per_position
    rising = sum(kept) == accepted and any(later > earlier for earlier, later in pairwise((more.rounds, *kept)))
    return rising or accepted > (accepted if more.drafted_tokens is None else more.drafted_tokens)


def _by_prompt(more: AcceptanceRecord, tokens: int) -> dict[str, tuple[int, int]]:
    """Counts by prompt; empty where they contradict the sums."""
    found = more.by_prompt or {}
    sums = [sum(column) for column in zip(*found.values(), strict=True)] or [0, 0]
    return found if sums[0] <= tokens and sums[1] <= more.rounds else {}


def _positions(more: AcceptanceRecord) -> tuple[int, ...]:
    """Counts by position; empty where they contradict the others."""
    found = more.accepted_per_position
    return found[:_POSITIONS] if sum(found) == more.accepted_tokens else ()


def _shorten(blocks: list[Block]) -> None:
    """Join the oldest neighbours that may be, of all but the newest blocks."""
    for at in range(len(blocks) - _NEWEST_APART - 1):
        if blocks[at].joins(blocks[at + 1]) and blocks[at].rounds + blocks[at + 1].rounds <= _JOINED_ROUNDS:
            blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
            return
