"""The worker's loop for one run: claim, load, learn, checkpoint, acknowledge.

What a failure is blamed on
* An exception while one batch is loaded, screened or scored: on that batch. It ends as a dead letter with the exception
  as its reason, and the others go on.
* An exception in training or at the gate: on no single batch yet. It leaves `cycle`, and the worker opens the run again
  from its last checkpoint. All claimed batches have one more delivery, as after a death of the process. On its third
  delivery a batch is learnt from in isolation: it is trained on alone, and the gate does not look. An exception then is
  blamed on the batch, which ends as a dead letter after `MAX_DELIVERIES` tries at most.
* If training or the gate failed, and no batch then fails in isolation: on the recent rollouts, which are mixed in. They
  are deleted; what was learnt from them stays.
* Redis, the disk, a lost lease, a drafter or head that does not fit: never on a batch, however often they fail. The
  delivery does not count. A fault of the device ends the process, and counts like any death of it.
* Memory that runs out while one batch is loaded or scored: the delivery does not count either. The batch is put off,
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
from service.monitor.records import Vocabulary
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue.deliveries import MAX_DELIVERIES, Entry, RolloutQueue
from service.storage.reports.drafting import Drafting
from service.storage.reports.store import Store
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.inbox import Inbox, Loaded, Phase, error_text, is_batch_fault
from service.worker.learner import Learner
from service.worker.recent import LengthLimit
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: While there is work, the pause after a checkpoint is at least this multiple of the time that it took, up to
#: `_LONGEST_PAUSE_SECONDS`. So checkpoints take a tenth of the time at most.
_CHECKPOINT_PAUSE = 9.0
_LONGEST_PAUSE_SECONDS = 120.0


class LeaseLost(WorkerError):  # noqa: N818 - reads as what happened
    """Another worker has this run now. This one must not write what it still holds of it."""


class RegisteredAgain(WorkerError):  # noqa: N818
    """The file of the run's target was replaced. Nothing that was made with the old target may be written."""


@dataclass
class Suspicion:
    """What is suspected after a failure of a run. A failure ends the `RunWorker`; this outlives it.

    `recent`: whether the recent rollouts may be the cause. `limit`: which rollouts are too long to train on.
    """

    recent: bool = False
    limit: LengthLimit = field(default_factory=LengthLimit)


@dataclass
class _Newest:
    """The newest checkpoint: when it was written (monotonic), how long that took, and whether it is still complete."""

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
        """`settings`: including how the run's engines draft. `ends_for_memory`: see `Inbox`."""
        self.run = run
        self._store = store
        self._holds_lease = holds_lease
        self._suspicion = suspicion or Suspicion()
        self._settings = settings
        self._layout = layout
        self._target_file = layout.target_id(run)  # before it is read
        target = Target.open(layout, run, settings.device)
        self.inbox = Inbox(settings, layout, queue, target.vocab_size, ends_for_memory)
        self.learner = Learner(settings, layout, store, run, target, self.inbox, self.save, stopping, others_wait)
        self.learner.recent.limit = self._suspicion.limit
        self.learner.journal.before_sending = self._check_still_ours
        self._checkpoint = WorkerCheckpoint(layout, run)
        self._newest = _Newest(time.monotonic())
        queue.ensure_group()
        if self._checkpoint.newest() is None:
            self.learner.lineage.begin()
            self._newest.holds_all = False
        else:
            state = self.learner.resume(self._checkpoint)
            # If engines draft in another way since, it measures from scratch, which is in no checkpoint yet.
            self._newest.holds_all = state["drafting"] == self.drafting.model_dump()
            self.inbox.applied |= {*state["applied"]}
        self.inbox.forget_brought()
        self._report_vocabulary()

    @property
    def drafting(self) -> Drafting:
        """How the run's engines draft, as this worker assumes."""
        return Drafting.supposed(self._settings)

    def cycle(self) -> bool:
        """Work on one claim. Returns False if there was nothing to do."""
        self.inbox.renew()
        try:
            if self.learner.journal.heed_people():
                self._newest.holds_all = False
                self.save()  # so that the request is not done again after a restart
            entries = self._claim()
            with self._noted(entries):
                self._work_on(entries)
        except RedisError:
            self.inbox.interrupt()
            raise
        except (LeaseLost, CheckpointSuperseded):
            raise  # another worker has the claimed batches now, and its counts must stay
        except Exception as error:
            if not is_batch_fault(error) and not is_device_fault(error):
                self.inbox.interrupt()
                with contextlib.suppress(RedisError):
                    self.inbox.uncount()  # at once, because the error may end this worker
            raise
        finally:
            self.inbox.end_turn()
        return bool(entries)

    @contextlib.contextmanager
    def _noted(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Note that this run is worked on, and delete the note at the end, also after an error.

        A process that is killed leaves the note, on whichever rank that happens. The notes count a run's deaths. Else
        a run whose every batch kills the process would keep the worker from all other runs.
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
        entries = self.inbox.redeliver() if self.inbox.backlog else []
        if not entries:
            if self.inbox.backlog and self._suspicion.recent:
                self._forget_recent()
            entries = self.inbox.claim()
        if entries:
            self._layout.pull(self.run)  # another host may have received a batch's head
        return entries

    def _forget_recent(self) -> None:
        self.save()  # moves the newest files out of the spool
        self._check_still_ours()
        log.warning("%s: the recent rollouts are dropped: training failed with them, and works without them", self.run)
        self.learner.recent.clear()
        self._suspicion.recent = self._newest.holds_all = False

    def _work_on(self, entries: Sequence[Entry]) -> None:
        begun = self.learner.lineage.begun
        # Several ranks screen as they score; batches that wait for a vocabulary do so unscored.
        fresh = self.inbox.load(entries, screened=current().world == 1 or not begun)
        if not begun:
            fresh = self._gather_vocabulary(fresh)
        suspects = [loaded for loaded in fresh if loaded.entry.suspect]
        # Others are acknowledged before a suspect is worked on: if that kills the process, it must not count for them.
        for group in [[loaded for loaded in fresh if not loaded.entry.suspect], *([s] for s in suspects)]:
            if group:
                self._learn_from(group, isolated=group[0].entry.suspect)
            if suspects and self.inbox.done:
                self.save()
        pause = self._settings.checkpoint_seconds
        if pause and entries:  # a large drafter's checkpoint takes seconds, in which nothing is trained
            pause = max(pause, min(_CHECKPOINT_PAUSE * self._newest.took_seconds, _LONGEST_PAUSE_SECONDS))
        if self.inbox.done and (self.inbox.backlog or time.monotonic() - self._newest.written_at >= pause):
            self.save()

    def _gather_vocabulary(self, fresh: Sequence[Loaded]) -> list[Loaded]:
        """Count tokens of the first rollouts. Once they are enough, begin from scratch and return all batches."""
        lineage = self.learner.lineage
        lineage.count_tokens(loaded.batch for loaded in fresh)
        self.inbox.wait(fresh)
        if fresh:
            self._report_vocabulary()
        if int(lineage.token_counts.sum()) < self._settings.vocab_min_tokens:
            return []
        lineage.begin_from_scratch()
        resumed = self.inbox.resume()
        self._report_vocabulary()
        return resumed

    def _report_vocabulary(self) -> None:
        lineage = self.learner.lineage
        so_far = Vocabulary(tokens=int(lineage.token_counts.sum()), wanted=self._settings.vocab_min_tokens)
        self.learner.journal.gathered(None if lineage.begun else so_far, self.inbox.waiting)

    def _learn_from(self, group: Sequence[Loaded], *, isolated: bool) -> None:
        try:
            outcome = self.learner.learn(group, isolated=isolated)
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
            self._newest.holds_all = False  # also if a checkpoint was written during this, before a publish

    # --- checkpoint, then acknowledge
    def save(self) -> None:
        """Write a checkpoint and acknowledge what it holds."""
        self._check_still_ours()
        if not self.learner.lineage.begun:
            return
        self.inbox.commit(self._write_checkpoint)
        self._newest.written_at, self._newest.holds_all = time.monotonic(), True
        self.learner.forget_heads(self.inbox.versions.newest)

    def _write_checkpoint(self, applied: Sequence[str]) -> None:
        started = time.monotonic()
        self.learner.save(self._checkpoint, applied)
        self._newest.took_seconds = time.monotonic() - started

    def _check_lease(self) -> None:
        if not self._holds_lease():
            raise LeaseLost("its lease is gone")

    def _check_still_ours(self) -> None:
        """Raise unless this worker may write: it must hold the lease, and the target's file be the one it opened."""
        self._check_lease()
        if self._layout.target_id(self.run) != self._target_file:
            raise RegisteredAgain(f"run {self.run} was registered again")

    def close(self) -> None:
        """Checkpoint before an orderly stop. Deliveries that did not end do not count.

        Nothing is written if the newest checkpoint is complete: a large one takes seconds, and the stop of many runs
        would take longer than it may.
        """
        try:
            if not self._newest.holds_all or self.inbox.done:  # only a checkpoint acknowledges what is done
                self.save()
            else:
                self._check_still_ours()
                self.learner.journal.send()  # score records that a full Redis did not take
            self.inbox.uncount(Phase.WAITING)
        except (LeaseLost, CheckpointSuperseded):
            raise  # as in `cycle`: another worker has the batches now
        except Exception as error:
            if not is_batch_fault(error):  # a full disk, or no memory
                self.inbox.uncount(Phase.DONE)
            raise
