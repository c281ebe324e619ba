"""Takes the fall of a frozen drafter's α apart: other text against other features.

RL changes what the policy writes (composition) and the hidden states with which it writes the same words (drift). Both
are measured by replaying the frozen drafter: on the first and the last rollouts, split by style, and on the last
rollouts with the *initial* policy's features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy
from drafter.replay.replay import replay
from examples.features import Rollout, batch_of


def take_apart(
    frozen: Eagle3Drafter,
    is_worked: Callable[[Rollout], bool],
    *,
    initial_policy: Any,
    final_policy: Any,
    first: Sequence[Rollout],
    last: Sequence[Rollout],
    depth: int,
    drafting: Literal["probabilistic", "greedy"] = "probabilistic",
) -> dict[str, float | None]:
    """Replay α of `frozen` for each slice, drafting as the engine does; None where a slice has no round."""

    def alpha(policy: Any, rollouts: Sequence[Rollout]) -> float | None:
        kept = [r for r in rollouts if len(r.token_ids) > 1]
        if not kept:
            return None
        shared = Policy(0, policy.get_input_embeddings().weight.detach().float())
        return replay(frozen, batch_of(policy, kept), shared, depth=depth, drafting=drafting).alpha

    def split(rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        worked = [r for r in rollouts if is_worked(r)]
        return worked, [r for r in rollouts if r not in worked]

    first_worked, first_guess = split(first)
    last_worked, last_guess = split(last)
    return {
        "first_all": alpha(initial_policy, first),
        "first_worked": alpha(initial_policy, first_worked),
        "first_guess": alpha(initial_policy, first_guess),
        "first_worked_share": len(first_worked) / len(first),
        "last_all": alpha(final_policy, last),
        "last_worked": alpha(final_policy, last_worked),
        "last_guess": alpha(final_policy, last_guess),
        "last_worked_share": len(last_worked) / len(last),
        "last_with_initial_features": alpha(initial_policy, last),
    }


def explain(parts: dict[str, float | None], aligned: float | None) -> str:
    """Say in words what the numbers of `take_apart` mean for this run.

    `aligned` is the mean α of the last two steps, by the drafters that served them; None where neither was scored.
    """
    first, last, worked = parts["first_all"], parts["last_all"], parts["first_worked"]
    if first is None or last is None:
        return "Too few rollouts to take the frozen drafter's change apart."
    text = (
        f"The frozen drafter's α is {first:.2f} on the rollouts of the first two steps, {last:.2f} on the last two's. "
    )
    before, after = (f"{parts[name]:.0%}" for name in ("first_worked_share", "last_worked_share"))
    if before == after:
        text += f"Answers that work the task out stayed at {before}"
    else:
        text += f"What is written changed: answers that work the task out went from {before} to {after}"
    if worked is not None:
        text += f", and on those the first drafter had {'only ' if worked < first else ''}{worked:.2f} from the start"
    text += ". "
    initial = parts["last_with_initial_features"]
    if initial is not None:
        text += (
            f"Drift of the features: with the initial policy's features on the last rollouts it would have "
            f"{initial:.2f} instead of {last:.2f}. "
        )
    if aligned is not None:
        text += f"On the last two steps' rollouts the drafters that served them had {aligned:.2f}. "
    return text + (
        "A frozen drafter's α does not always fall: RL also sharpens a policy, and on text that the drafter knows that "
        "raises α. Robust is the publication lag, the gap to the best drafter that could be served."
    )
