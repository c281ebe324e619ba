"""The worker's loop for one run: claim, load, learn, checkpoint, acknowledge.

Whose fault a failure is
* An exception while one batch is loaded, screened or scored is that batch's fault: it is a dead letter with the
  exception as its reason, and the others go on. One in training or at the gate cannot be laid to one batch. It leaves
  `cycle`, and the worker opens the run again from its last checkpoint. What was in hand has one more delivery, as after
  a death of the process. On its third delivery a batch is learnt from in isolation: trained on nothing but itself, and
  without the gate. What is raised then is its fault, and it is a dead letter, after `MAX_DELIVERIES` tries at most.
* Where training or the gate failed, and then nothing that was in hand fails in isolation, it is the fault of the recent
  rollouts that are mixed in. They are deleted: what was learnt from them stays.
* Redis, the disk, a lost lease and a drafter or head that does not fit are never a batch's fault, however often they
  fail: that delivery is not counted. A fault of the device ends the process, and counts as any death of it does.
* Where memory runs out while one batch is loaded or scored, that delivery is not counted either. The batch is put off,
  `MEMORY_TRIES` times at most (`Inbox`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from drafter.device import is_device_fault
from drafter.training.ranks import current
from service.errors import WorkerError
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue.deliveries import MAX_DELIVERIES, Entry, RolloutQueue
from service.storage.reports.drafting import Drafting
from service.storage.reports.store import Store
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.inbox import Inbox, Loaded, Phase, error_text, is_batch_fault
from service.worker.learner import Learner
from service.worker.recent import LengthLimit

log = logging.getLogger("draftalign.worker")

#: While there is work, at most a tenth of the time goes to checkpoints, unless they take longer than the second limit.
_CHECKPOINT_PAUSE = 9.0
_LONGEST_PAUSE_SECONDS = 120.0


class LeaseLost(WorkerError):  # noqa: N818 - reads as what happened
    """Another worker has this run now; what this one still holds of it must not be written down."""


class RegisteredAgain(WorkerError):  # noqa: N818
    """Another file has taken the place of the run's target; nothing of the old one may be written beside it."""


@dataclass
class Suspicion:
    """What of a run may be at fault. A failure ends its `RunWorker`, and not this.

    `recent`: whether its recent rollouts may be. `limit`: which are too long to be trained on.
    """

    recent: bool = False
    limit: LengthLimit = field(default_factory=LengthLimit)


@dataclass
class _Newest:
    """The newest checkpoint: when it was written (monotonic), how long that took, and whether it holds all there is."""

    written_at: float
    took_seconds: float = 0.0
    holds_all: bool = True


class RunWorker:
    """Joins one run's `Inbox` and `Learner`, and decides when to checkpoint."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        queue: RolloutQueue,
        store: Store,
        run: str,
        *,
        holds_lease: Callable[[], bool] = lambda: True,
        stopping: Callable[[], bool] = lambda: False,
        others_wait: Callable[[], bool] = lambda: False,
        suspicion: Suspicion | None = None,
        ends_for_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        """`settings`: with how the run's engines draft. `ends_for_memory`: see `Inbox`."""
        self.run = run
        self._store = store
        self._holds_lease = holds_lease
        self._suspicion = suspicion or Suspicion()
        self._settings = settings
        self._layout = layout
        self._target_file = layout.target_id(run)  # before it is read
        self.learner = Learner(settings, layout, store, run, stopping, others_wait)
        self.learner.recent.limit = self._suspicion.limit
        self._checkpoint = WorkerCheckpoint(layout, run)
        self._newest = _Newest(time.monotonic())
        queue.ensure_group()
        if self._checkpoint.newest() is None:
            self.learner.lineage.begin()
            self._newest.holds_all = False
            applied: Sequence[str] = ()
        else:
            state = self.learner.resume(self._checkpoint)
            # With engines that draft another way it measures from scratch.
            self._newest.holds_all = state["drafting"] == self.drafting.model_dump()
            applied = state["applied"]

        def screens() -> bool:  # several ranks screen when they score, and what waits for a vocabulary is scored late
            return current().world == 1 or not self.learner.begun

        self.inbox = Inbox(settings, layout, queue, self.learner.vocab_size, applied, ends_for_memory, screens)
        self.inbox.forget_brought()
        self.learner.report_vocabulary(0)

    @property
    def drafting(self) -> Drafting:
        """How the run's engines draft, as this worker supposes."""
        return Drafting.supposed(self._settings)

    def cycle(self) -> bool:
        """Do one claim's worth of work; False when there was nothing to do."""
        self.inbox.renew()
        try:
            if self.learner.journal.heed_people():
                self._newest.holds_all = False
                self.save()  # not to be done again after a restart
            entries = self._claim()
            with self._noted(entries):
                self._work_on(entries)
        except RedisError:
            self.inbox.interrupt()
            raise
        except (LeaseLost, CheckpointSuperseded):
            raise  # what is in hand is another worker's now, and what it counts there must stay
        except Exception as error:
            if not is_batch_fault(error) and not is_device_fault(error):
                self.inbox.interrupt()
                with contextlib.suppress(RedisError):
                    self.inbox.uncount()  # now: this worker may be dropped for the error
            raise
        finally:
            self.inbox.end_turn()
        return bool(entries)

    @contextlib.contextmanager
    def _noted(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Note that this run is worked on, until that has ended, well or by an error.

        A process that is killed, for memory say, on this rank or another, leaves the note. Without it a run
        whose every batch kills the process would keep the worker from all other runs.
        """
        if not entries or self._target_file is None:
            yield
            return
        deaths, _ = self._store.begun("working", self._target_file)
        self._store.begin("working", self._target_file, deaths + 1)
        try:
            yield
        except Exception as error:
            if is_device_fault(error):
                raise  # the process ends
            with contextlib.suppress(RedisError):
                self._store.end("working")
            raise
        self._store.end("working")

    def _claim(self) -> list[Entry]:
        if entries := self._claimed():
            self._layout.pull(self.run)  # a head that came before a batch may have come to another host
        return entries

    def _claimed(self) -> list[Entry]:
        if self.inbox.backlog:
            if entries := self.inbox.redeliver():
                return entries
            if self._suspicion.recent:
                self._forget_recent()
        return self.inbox.claim()

    def _forget_recent(self) -> None:
        self.save()  # it moves the newest out of the spool
        self._check_still_ours()
        log.warning("%s: the recent rollouts are dropped: training failed with them, and works without them", self.run)
        self.learner.recent.clear()
        self._suspicion.recent = self._newest.holds_all = False

    def _work_on(self, entries: Sequence[Entry]) -> None:
        fresh = self.inbox.load(entries)
        if not self.learner.begun:
            fresh = self._gather_vocabulary(fresh)
        suspects = [loaded for loaded in fresh if loaded.entry.suspect]
        # A suspect is not left unacknowledged while others are worked on: its next death would count against them.
        for group in [[loaded for loaded in fresh if not loaded.entry.suspect], *([s] for s in suspects)]:
            if group:
                self._learn_from(group, isolated=group[0].entry.suspect)
            if suspects and self.inbox.done:
                self.save()
        pause = self._settings.checkpoint_seconds
        if pause and entries:  # a large drafter's takes seconds, in which nothing is trained
            pause = max(pause, min(_CHECKPOINT_PAUSE * self._newest.took_seconds, _LONGEST_PAUSE_SECONDS))
        if self.inbox.done and (self.inbox.backlog or time.monotonic() - self._newest.written_at >= pause):
            self.save()

    def _gather_vocabulary(self, fresh: Sequence[Loaded]) -> list[Loaded]:
        """Count tokens of the first rollouts; once they are enough, begin from scratch and return all of them."""
        self.learner.count_tokens([loaded.batch for loaded in fresh])
        self.inbox.wait(fresh)
        if fresh:
            self.learner.report_vocabulary(self.inbox.waiting)
        if not self.learner.begin_from_scratch():
            return []
        resumed = self.inbox.resume()
        self.learner.report_vocabulary(0)
        return resumed

    def _learn_from(self, group: Sequence[Loaded], *, isolated: bool) -> None:
        try:
            outcome = self.learner.learn(
                group,
                self.inbox,
                before_publishing=self.save,
                newest_waiting=lambda: self.inbox.newest_waiting(after=group[-1]),
                version_seconds=self.inbox.versions.seconds_per_version,
                isolated=isolated,
            )
            if outcome is None:
                return
            if outcome.trained_with_recent:
                self._suspicion.recent = False
            self.learner.report(outcome)
        except Exception as error:
            if is_batch_fault(error) and isolated:
                self._suspicion.recent = False
                told = error_text(error)
                self.inbox.reject(group[0].entry, f"failed its worker {MAX_DELIVERIES} times, at last alone: {told}")
            elif is_batch_fault(error):
                self._suspicion.recent = True
            raise
        finally:
            self._newest.holds_all = False  # also where one was written before something was published

    # --- checkpoint, then acknowledge
    def save(self) -> None:
        """Write a checkpoint and acknowledge what it holds."""
        self._check_still_ours()
        if not self.learner.begun:
            return
        self.inbox.commit(self._write_checkpoint)
        self._newest.written_at, self._newest.holds_all = time.monotonic(), True
        self.learner.forget_heads(self.inbox.versions.newest)

    def _write_checkpoint(self, applied: Sequence[str]) -> None:
        started = time.monotonic()
        self.learner.save(self._checkpoint, applied)
        self._newest.took_seconds = time.monotonic() - started

    def _check_still_ours(self) -> None:
        """Raise unless this worker may write: it holds the lease, and the run's target is the one that it opened."""
        if not self._holds_lease():
            raise LeaseLost("its lease is gone")
        if self._layout.target_id(self.run) != self._target_file:
            raise RegisteredAgain(f"run {self.run} was registered again")

    def close(self) -> None:
        """Checkpoint before an orderly stop, and do not let what is still in hand count.

        Nothing is written where the newest checkpoint holds all: a large one takes seconds, and a stop of many runs
        would outlast the time that it is given.
        """
        try:
            if not self._newest.holds_all or self.inbox.done:  # what is done is acknowledged by a checkpoint
                self.save()
            else:
                self._check_still_ours()
                self.learner.journal.send()  # what a full Redis has not taken
            self.inbox.uncount(Phase.WAITING)
        except (LeaseLost, CheckpointSuperseded):
            raise  # as in `cycle`: another worker counts them now
        except Exception as error:
            if not is_batch_fault(error):  # a full disk, or no memory
                self.inbox.uncount(Phase.DONE)
            raise
