"""How the engines of a run draft, which replay and training suppose: tokens a round, and how each is chosen.

A setting that is given (`DRAFTALIGN_DEPTH`, `DRAFTALIGN_DRAFTING`) holds for all runs. Else a run's is what all its
engines say in their reports, and the default until one has reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_hooks.durable import replace_file
from service.monitor.records import AcceptanceRecord
from service.settings import Settings
from service.storage.layout import Layout, revalidate
from service.storage.registry import locked
from service.storage.runs import load_run


class Drafting(BaseModel):
    """Tokens that an engine drafts a round, and how it chooses each of them."""

    model_config = ConfigDict(frozen=True)
    depth: int = Field(ge=1, le=16)
    drafting: Literal["probabilistic", "greedy"]

    @classmethod
    def supposed(cls, settings: Settings) -> Drafting:
        """What these settings suppose."""
        return cls(depth=settings.depth, drafting=settings.drafting)

    def but(self, depth: int | None, drafting: str | None) -> Drafting:
        """The same, with what an engine says; what is None, or nothing that an engine can do, stays."""
        found = self
        for said in ({"depth": depth}, {"drafting": drafting}):
            with contextlib.suppress(ValidationError):
                found = Drafting.model_validate(found.model_dump() | said, strict=True)
        return found

    def is_also(self, others: Iterable[AcceptanceRecord]) -> bool:
        """Whether the newest report of each of these engines says so too, or nothing of it."""
        newest = {record.reporter: record for record in sorted(others, key=lambda one: one.reported) if record.ours}
        return all(self.but(record.depth, record.drafting) == self for record in newest.values())


def settings_of(settings: Settings, layout: Layout, run: str) -> Settings:
    """The settings, with how the run's engines draft in place of the defaults. Raises OSError. Blocks."""
    path = layout.run_drafting(run)
    revalidate(path.parent)
    try:
        told = Drafting.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):  # nobody has said it; a damaged file is replaced by the next report
        return settings
    return settings.model_copy(update={n: v for n, v in told if n not in settings.model_fields_set})


def learn_drafting(layout: Layout, run: str, found: Drafting) -> None:
    """Write down what all engines of a run say; the worker follows within seconds. Raises RunNotFound. Blocks."""
    with locked(layout, run):
        load_run(layout, run)
        replace_file(layout.run_drafting(run), found.model_dump_json().encode())
