"""Replay of 16 prompts, and blocks of an engine beside it, for tests of `service/monitor/live`."""

from __future__ import annotations

from typing import Any

from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.records import DrafterSums, Replayed, ScoreRecord

VERSION, RULE = "v000001-0a1b2c3d", LiveRule()
#: Tokens and rounds of 16 replayed prompts, in two batches of policy versions 1 and 2.
ALPHAS = [2.6 + 0.05 * n for n in range(16)]


def score(
    policy: int, alphas: list[float], *, version: str = VERSION, parts: tuple[float, ...] = (4, 3, 2, 1), **more: Any
) -> ScoreRecord:
    """A batch of one prompt of eight answers for each α, a hundred rounds each."""
    each = {f"{policy:04x}{n:04x}": (100.0 * alpha, 100.0) for n, alpha in enumerate(alphas)}
    sums = DrafterSums.of(*zip(*each.values(), strict=True))
    kept = [(sums.tokens - sums.rounds) * part / sum(parts) for part in parts]
    told = Replayed(version, sums, tuple(kept), (sums.rounds, *kept[:-1]), each)
    rollouts = 8 * len(alphas)
    record: dict[str, Any] = {"served": sums, "replayed": (told,), "drafter_version": version, "policy_version": policy}
    record |= {"rollouts": rollouts, "tokens": round(sums.tokens) + rollouts, "entry_id": f"{policy}-0"}
    return ScoreRecord(**record | more)


def known(**more: Any) -> Replays:
    """Replay of `ALPHAS`, half in each of two policy versions."""
    return Replays([score(1, ALPHAS[:8], **more), score(2, ALPHAS[8:], **more)])


def block(rounds: int, kept: tuple[int, ...], *, drafted: int | None = None, policy: int = 1, **more: Any) -> Block:
    """An engine's rounds: how many kept the first draft, the first two, ..."""
    depth = len(kept) if drafted is None else drafted
    given: dict[str, Any] = {"since": 0.0} | more
    return Block(VERSION, policy, rounds, rounds + sum(kept), depth * rounds if depth else None, kept, **given)


def sound(rounds: int, policy: int = 1, factor: float = 1.0, **more: Any) -> Block:
    """Rounds that accept `factor` times what `known` expects."""
    replay = known()._replays[VERSION, policy]
    return block(
        rounds, tuple(round(factor * rounds * k / replay.rounds) for k in replay.accepted), policy=policy, **more
    )
