"""Looks for what other hosts did with a run (`state_url`), before an answer says that there is no such thing.

A store that hangs delays no answer for long. It occupies none of asyncio's own threads, which uploads need.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from service.errors import RegistryBusy, RunNotFound, TreeDamaged
from service.reading.shared import Shared
from service.storage.layout import Layout
from service.storage.registry import Registry

log = logging.getLogger("draftalign.api")

#: Threads that ask the store.
_THREADS: Final = 4
#: Looks at a time; further calls are answered from what this host knows.
_MOST: Final = 64
#: A call waits for its look no longer, and is then answered from what this host knows.
_SECONDS: Final = 5.0
#: How long nobody asks after a failure.
_AWAY_SECONDS: Final = 5.0


class Looks:
    """Looks at the state that hosts share; without `share` it does nothing."""

    def __init__(self, layout: Layout, registry: Registry, answers: Shared, *, share: bool) -> None:
        self._layout, self._registry, self._answers, self._share = layout, registry, answers, share
        self._threads = ThreadPoolExecutor(_THREADS, "looks")
        self._running = set[asyncio.Task[None]]()
        self._away_until: dict[str, float] = {}  # by run; "": of all

    async def find(self, run: str, version: str | None = None) -> None:
        """Look for a run, or a version of it, that this host does not know: another host may just have made it."""
        if not self._share:
            return
        with contextlib.suppress(RunNotFound):
            known = self._layout.run_json(run).exists()
            if not known or (version is not None and version not in self._registry.versions(run)):
                await self.catch_up(run)

    async def catch_up(self, run: str) -> None:
        """Fetch what other hosts did with a run, unless the store is away or slow."""
        away_until = max(self._away_until.get("", 0.0), self._away_until.get(run, 0.0))
        if not self._share or time.monotonic() < away_until or len(self._running) >= _MOST:
            return
        look = asyncio.create_task(self._look(run))
        self._running.add(look)
        look.add_done_callback(self._running.discard)
        await asyncio.wait({look}, timeout=_SECONDS)  # it goes on, and what it finds is known then
        if look.done():
            look.result()
        else:
            log.warning("run %s may be out of date: the object store has not answered in %.0f s", run, _SECONDS)

    async def _look(self, run: str) -> None:
        loop, pull = asyncio.get_running_loop(), functools.partial(self._layout.pull, run)
        try:
            await self._answers.get(("pull", run), lambda: loop.run_in_executor(self._threads, pull))
        except OSError as error:
            of = run if isinstance(error, TreeDamaged) else ""  # damage of one run's state concerns that run only
            self._away_until[of] = time.monotonic() + _AWAY_SECONDS
            log.warning("run %s may be out of date: %s", run, error)
        except RegistryBusy as error:
            log.warning("run %s may be out of date: %s", run, error)
        except Exception:
            log.exception("run %s may be out of date", run)

    def close(self) -> None:
        """Shut the waiting threads down."""
        self._threads.shutdown(wait=False, cancel_futures=True)
