"""How the engines of a run draft, which replay and training suppose: tokens a round, and how each is chosen.

A setting that is given (`DRAFTALIGN_DEPTH`, `DRAFTALIGN_DRAFTING`) holds for all runs. Else a run's is what all its
engines say in their reports, and the default until one has reported.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_hooks.durable import replace_file
from service.monitor.records import AcceptanceRecord
from service.settings import Settings
from service.storage.layout import Layout, revalidate
from service.storage.runs import load_run

#: How long what is supposed of a run stays. Else two engines that report under one name would make the worker open the
#: run again and again.
CHANGE_SECONDS: Final = 600.0


class Drafting(BaseModel):
    """Tokens that an engine drafts a round, and how it chooses each of them."""

    model_config = ConfigDict(frozen=True)
    depth: int = Field(ge=1, le=16)
    drafting: Literal["probabilistic", "greedy"]

    @classmethod
    def supposed(cls, settings: Settings) -> Drafting:
        """What these settings suppose."""
        return cls(depth=settings.depth, drafting=settings.drafting)

    def with_reported(self, depth: int | None, drafting: str | None) -> Drafting:
        """The same, with what an engine says; None, and what no engine can do, changes nothing."""
        found = self
        for said in ({"depth": depth}, {"drafting": drafting}):
            with contextlib.suppress(ValidationError):
                found = Drafting.model_validate(found.model_dump() | said, strict=True)
        return found

    def agrees_with(self, others: Iterable[AcceptanceRecord]) -> bool:
        """Whether the newest report of each of these engines says the same, or nothing of it."""
        newest = {record.reporter: record for record in sorted(others, key=lambda one: one.reported) if record.ours}
        said = {(record.depth, record.drafting) for record in newest.values()}
        return all(self.with_reported(*one) == self for one in said)


def settings_of(settings: Settings, layout: Layout, run: str) -> Settings:
    """The settings, with how the run's engines draft in place of the defaults. Raises OSError, of a disk. Blocks."""
    path = layout.run_drafting(run)
    revalidate(path.parent)
    try:
        told = Drafting.model_validate_json(path.read_bytes())
    # Nobody has said it; what is damaged is replaced by a later report.
    except (FileNotFoundError, IsADirectoryError, PermissionError, ValidationError):
        return settings
    return settings.model_copy(update={n: v for n, v in told if n not in settings.model_fields_set})


def is_settled(layout: Layout, run: str) -> bool:
    """Whether `learn_drafting` changed what is supposed of a run a short time ago: then it is left alone. Blocks."""
    try:
        changed = layout.run_drafting(run).stat().st_mtime
    except FileNotFoundError:
        return False
    return abs(time.time() - changed) < CHANGE_SECONDS


def learn_drafting(layout: Layout, run: str, found: Drafting) -> None:
    """Write down what all engines of a run say; the worker follows within seconds. Raises RunNotFound. Blocks."""

    def work(now: Layout) -> None:
        load_run(now, run)
        replace_file(now.run_drafting(run), found.model_dump_json().encode())

    layout.change(run, work)
