"""The embedded demo: a small policy, its task, an inference server with real speculation, and the RL run."""

from __future__ import annotations

from typing import Final

from examples import elicit, recall
from examples.task import Task

#: The demo's tasks by name.
TASKS: Final[dict[str, Task]] = {task.name: task for task in (elicit.TASK, recall.TASK)}
