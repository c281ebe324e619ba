"""The guide's example of sending rollouts by hand, as it is printed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.service.service_fixtures import RunningService
from helpers.trainer.hooks_fixtures import tiny_qwen3
from helpers.worker.worker_fixtures import Bench

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "trainers.md"


def test_what_the_guide_sends_by_hand_is_trained_on(bench: Bench, redis_url: str) -> None:
    snippet = (
        GUIDE.read_text("utf-8").partition("### Rollouts by hand")[2].partition("```python\n")[2].partition("```")[0]
    )
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    names: dict[str, Any] = {
        "model": tiny_qwen3(8, tied=False),
        "ids": torch.randint(2, 50, (24,), generator=torch.Generator().manual_seed(0)),
        "generated": torch.arange(24) >= 5,
        "temperature": 0.7,
    }
    snippet = snippet.replace("http://127.0.0.1:8400", service.url).replace("my-run", "default")
    try:
        exec(compile(snippet, str(GUIDE), "exec"), names)  # noqa: S102
        bench.drain(bench.worker())
        counts = service.client.get("/runs/default").json()["rollouts"]
        stats = names["sender"].stats()
        names["sender"].close()
    finally:
        service.stop()
    assert (stats["sent"], stats["last_error"]) == (2, "")
    assert (counts["trained_total"], counts["dead_total"]) == (1, 0), counts["last_dead_reason"]
