"""The recipes that `benchmarks/tracking.py` compares: each differs from the reference in what its name says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from benchmarks.aims import Aim
from benchmarks.parts import Part
from drafter.training.optimizer import Method

SERVING_DEPTH: Final = 4
REFERENCE: Final = "reference"
FROZEN: Final = "static, kl"


@dataclass(frozen=True)
class Recipe:
    """One way to keep a drafter in step."""

    name: str
    optimizer: Method = "adamw"  # of matrices
    learning_rate: float = 3e-3
    warmup_windows: int = 0  # optimizer steps over which the learning rate rises
    steps_ahead: int = SERVING_DEPTH  # training depth
    passes: float = 4.0  # 0: never trained after its start
    step_tokens: int = 900
    recent_tokens: int = 8000  # 1: only the newest policy's rollouts
    every: int = 1  # train after every n-th policy version
    from_scratch: bool = False  # not trained before RL
    extra_steps: int = 0  # more of that training, with a fresh optimizer
    fp8: bool = False
    bfloat16: bool = False  # what the trainer computes in; masters stay float32
    stale: bool = False  # train on the base policy's rollouts alone
    newest_share: float = 0.5  # of a step's tokens, where there are older ones
    reservoir: float = 0.0  # share of steps whose older half comes from the base policy
    aim: Aim = ""  # an experimental loss in the place of the trainer's
    part: Part = ""  # of the rollouts that is sent
    serving_depth: int = SERVING_DEPTH


def _muon(name: str, **changes: Any) -> Recipe:
    """Muon at a rate that suits it, with a warm-up and 8 passes: what the demo does."""
    recipe: dict[str, Any] = {"optimizer": "muon", "learning_rate": 1e-2, "warmup_windows": 30, "passes": 8}
    return Recipe(name, **(recipe | changes))


#: Most telling first. The leading `REPEATED` run on every seed, then all the others on the first, then on the rest.
RECIPES: Final = (
    Recipe(REFERENCE),
    Recipe(FROZEN, passes=0),
    Recipe("rate 1e-2", learning_rate=1e-2),
    Recipe("stale rollouts", stale=True),
    Recipe("depth 1", steps_ahead=1),
    Recipe("newest only", recent_tokens=1),
    Recipe("every 2nd version", every=2),
    Recipe("static, kl, as many steps", passes=0, extra_steps=100),
    Recipe("fp8 features", fp8=True),
    Recipe("from scratch", from_scratch=True),
    Recipe("rate 1e-3", learning_rate=1e-3),
    Recipe("8 passes", passes=8),
    Recipe("warm-up", warmup_windows=30),
    Recipe("every 4th version, 4x the passes", every=4, passes=16),
    Recipe("reservoir 25 %", reservoir=0.25),
    Recipe("depth 7", steps_ahead=7),
    Recipe("every 4th version", every=4),
    Recipe("depth 3", steps_ahead=3),
    Recipe("2 passes", passes=2),
    Recipe("steps of 1800 tokens", step_tokens=1800, passes=8),
    Recipe("recent 3000 tokens", recent_tokens=3000),
    Recipe("depth 5", steps_ahead=5),
    Recipe("steps of 450 tokens", step_tokens=450, passes=2),
    Recipe("recent 32000 tokens", recent_tokens=32000),
    Recipe("rejected positions", aim="rejected"),
    Recipe("kl and greedy", aim="greedy"),
    Recipe("depth 3, served at 3", steps_ahead=3, serving_depth=3),
    Recipe("depth 7, served at 3", steps_ahead=7, serving_depth=3),
    Recipe("depth 1, served at 3", steps_ahead=1, serving_depth=3),
    Recipe("depth 5, served at 3", steps_ahead=5, serving_depth=3),
    Recipe("first rejected position", aim="first rejected"),
    Recipe("only greedy", aim="only greedy"),
    Recipe("warm-up, 8 passes", warmup_windows=30, passes=8),
    Recipe("warm-up, 16 passes", warmup_windows=30, passes=16),
    Recipe("warm-up, 32 passes", warmup_windows=30, passes=32),
    Recipe("rate 1e-3, 8 passes", learning_rate=1e-3, passes=8),
    Recipe("warm-up, 8 passes, depth 3", warmup_windows=30, passes=8, steps_ahead=3),
    Recipe("warm-up, 8 passes, recent 32000", warmup_windows=30, passes=8, recent_tokens=32000),
    Recipe("16 passes", passes=16),
    Recipe("rate 6e-3, warm-up, 8 passes", learning_rate=6e-3, warmup_windows=30, passes=8),
    _muon("muon, 8 passes"),
    _muon("muon, 4 passes", passes=4),
    _muon("muon, 2 passes", passes=2),
    _muon("muon, 16 passes", passes=16),
    _muon("muon, rate 3e-3, 8 passes", learning_rate=3e-3),
    _muon("muon, rate 2e-2, 8 passes", learning_rate=2e-2),
    _muon("muon, no warm-up, 8 passes", warmup_windows=0),
    _muon("muon, depth 3, 8 passes", steps_ahead=3),
    _muon("muon, recent 32000, 8 passes", recent_tokens=32000),
    _muon("muon, newest only, 8 passes", recent_tokens=1),
    _muon("muon, every 2nd version, 16 passes", every=2, passes=16),
    _muon("muon, fp8 features, 8 passes", fp8=True),
    _muon("muon, bfloat16, 8 passes", bfloat16=True),
    _muon("muon, reservoir 25 %, 8 passes", reservoir=0.25),
    _muon("muon, depth 5, 8 passes", steps_ahead=5),
    _muon("muon, depth 7, 8 passes", steps_ahead=7),
    _muon("muon, a quarter newest, 8 passes", newest_share=0.25),
    _muon("muon, three quarters newest, 8 passes", newest_share=0.75),
    _muon("muon, fronts of a third, 8 passes", part="fronts"),
    _muon("muon, windows of a third, 8 passes", part="windows"),
    _muon("muon, all of fewer, 8 passes", part="fewer"),
)
#: What recipes of a serving depth are compared with.
REFERENCES: Final = {SERVING_DEPTH: REFERENCE, 3: "depth 3, served at 3"}
REPEATED: Final = 4
#: Dots that bear a name in the plot: what each tells, and what it costs.
NAMED: Final = (
    *("static, kl", "depth 1", "from scratch", "only greedy", "2 passes"),
    *("warm-up, 8 passes", "warm-up, 16 passes", "warm-up, 32 passes", "rate 6e-3, warm-up, 8 passes"),
    *("muon, 2 passes", "muon, 4 passes", "muon, 8 passes", "muon, 16 passes", "muon, newest only, 8 passes"),
)
