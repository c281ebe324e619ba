"""The worker's loop for one run: claim, test, train, judge, publish, checkpoint, acknowledge.

Invariants
* A batch is scored before it is trained on.
* Entries are acknowledged only after a checkpoint that holds their effect, so a worker killed at any line goes on from
  its last checkpoint and sees the rest again: each rollout's effect is in the optimizer exactly once.
* An exception while one batch is loaded, screened or scored is that batch's fault: it is a dead letter with the
  exception as its reason, and the others go on. One in training or at the gate cannot be laid to one batch: it leaves
  `cycle`, the worker opens the run again from its last checkpoint, and what was in hand has one more delivery, as after
  a death of the process. On its third delivery a batch is worked on alone: trained on nothing but itself, and without
  the gate. What is raised then is its fault, and it dies of that, after `MAX_DELIVERIES` tries at most.
* Where training or the gate failed, and then nothing that was in hand fails alone, the recent rollouts that are mixed
  in are to blame. They are deleted: what was learnt from them stays, the held-out ones among them are gathered anew.
* Redis, the disk, memory, a lost lease and a drafter or head that does not fit are never a batch's fault, however often
  they fail: that delivery is not counted. A fault of the device ends the process, and counts as any death of it does.
* What is served changes only through the gate, an archived version that proved better, or a person. A candidate is
  published after the checkpoint that holds it, or a redelivered batch would be scored by what was trained on it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from redis.exceptions import RedisError

from drafter.batch import RolloutBatch, load_batch, screen
from drafter.device import ahead, is_device_fault, is_out_of_memory
from drafter.errors import BatchRejected, DrafterError
from drafter.kinds import Drafter, share
from rl_hooks.wire import WireError
from service.errors import LatestMoved, ServiceError, WorkerError
from service.monitor.controller import (
    DEFERRED,
    Action,
    Controller,
    Economy,
)
from service.settings import Settings
from service.storage.layout import Layout, file_id
from service.storage.queue import (
    MAX_DELIVERIES,
    EndState,
    Entry,
    RolloutQueue,
)
from service.storage.reports import Store
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.journal import Journal
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.promotion import Contest, contest
from service.worker.recent import KeptBatch, RecentRollouts
from service.worker.scoring import Scores, score
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: One consumer name per run: a restarted worker finds its own unfinished entries at once.
CONSUMER = "worker"
#: So many batches are skipped at most after a trainer went back to an earlier checkpoint.
_LATELY_BATCHES = 8
#: A batch so many policy versions late still finds its head, where `max_policy_lag` does not say how late one may be.
_LATE_VERSIONS = 64
#: While there is work, so many times as long as the last checkpoint took pass before the next.
_CHECKPOINT_PAUSE = 9.0
_LONGEST_PAUSE_SECONDS = 120.0


#: A batch that was scored.
Tested = tuple[Entry, RolloutBatch, Scores]


class LeaseLost(WorkerError):  # noqa: N818 - reads as what happened
    """Another worker has this run now; what this one still holds of it must not be written down."""


class RegisteredAnew(WorkerError):  # noqa: N818
    """Another file has taken the place of the run's target; nothing of the old one may be written beside it."""


class TrainingStopped(WorkerError):  # noqa: N818
    """Training ended half way: the candidate is of no use, and only the last checkpoint is without it."""


class RunWorker:
    """Everything that happens to one run."""

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
        doubted: set[str] | None = None,
    ) -> None:
        """`doubted`: runs whose recent rollouts may be to blame for failures; outlives this object, which they end."""
        self.run = run
        self._holds_lease = holds_lease
        self._stopping = stopping
        self._doubted = set() if doubted is None else doubted
        self._settings = settings
        self._layout = layout
        self._queue = queue
        self._target_file = file_id(layout.target(run))  # before it is read
        self._target = Target.open(layout, run, settings.device)
        self._lineage = Lineage(settings, layout, run, self._target)
        self._recent = self._empty_memory()
        self._checkpoint = WorkerCheckpoint(layout.worker(run))
        self._economy = Economy(worker_cost=settings.worker_cost)
        self._controller = Controller()
        self._journal = Journal(store, run)
        self._counts = torch.zeros(self._target.embed_tokens.shape[0], dtype=torch.int64)  # [V], until a vocabulary is
        self._waiting: list[tuple[Entry, RolloutBatch]] = []  # batches seen before the vocabulary exists
        self._in_hand: list[Entry] = []  # of the cycle that runs now
        self._innocent: list[Entry] = []  # in hand when Redis or the disk failed: not to be blamed for that
        self._put_off: set[str] = set()  # entries whose files could not be read; they come again once they are idle
        self._by_prompt: bool | None = None  # how the last evidence was split from what is trained on
        self._done: list[tuple[Entry, EndState]] = []  # processed, to be acknowledged by the next checkpoint
        self._applied: set[str] = set()  # unacknowledged batches whose effect the last checkpoint holds
        self._versions_seen: list[tuple[float, int]] = []  # (arrival seconds, policy version)
        self._lately: deque[int] = deque([0], maxlen=_LATELY_BATCHES)  # their policy versions
        self._last_checkpoint = time.monotonic()
        self._checkpoint_took = 0.0  # seconds
        self._backlog = True  # until nothing is left of what an earlier life of this worker had in hand
        self._blameless = False  # the backlog comes from Redis having been away, not from a death
        queue.ensure_group()
        self._resume()
        if self._lineage.trainer is None:
            self._tell_gathered()
        else:
            self._journal.vocabulary_known()

    def _empty_memory(self) -> RecentRollouts:
        return RecentRollouts(
            self._layout.worker(self.run) / "recent",
            capacity_tokens=self._settings.recent_tokens,
            holdout_one_in=self._settings.holdout_one_in,
        )

    @property
    def pending(self) -> list[str]:
        """Entries in hand, for the heartbeat."""
        held = [*self._in_hand, *(entry for entry, _ in self._done), *(entry for entry, _ in self._waiting)]
        return list(dict.fromkeys(entry.entry_id for entry in held))

    # --- start
    def _resume(self) -> None:
        if self._checkpoint.newest() is None:
            self._lineage.begin()
            self._know_vocabulary()
            return
        state = self._checkpoint.restore(self._lineage.take_up(self._stored_candidate()))
        self._controller = Controller.from_json(state["controller"])
        self._journal.restore(state)
        self._applied = set(state["applied"])
        self._lineage.check_vocabulary()
        self._know_vocabulary()
        self._recent.restore(state["recent"], self._layout.spool(self.run), state.get("first_prompts"))
        self._recent.settle()  # the checkpoint lists them: the crash came before it could be done
        log.info("%s: resumed after %d batches, %d tokens trained", self.run, self._journal.totals.batches,
                 self._journal.totals.trained_tokens)  # fmt: skip

    def _stored_candidate(self) -> Drafter:
        return self._checkpoint.drafter(self._target.embed_tokens, self._target.lm_head)

    def _know_vocabulary(self) -> None:
        """Heads that lack rows of the draft vocabulary are of no use from now on."""
        if self._lineage.trainer is not None:
            self._target.require_rows(self._lineage.candidate.vocabulary.ids)

    # --- one turn
    def cycle(self) -> bool:
        """Do one claim's worth of work; False when there was nothing to do."""
        if self.pending:  # what is in hand must not look abandoned to the claim, however long Redis was away
            self._queue.heartbeat(CONSUMER, self.pending)
        try:
            entries = self._in_hand = self._claim()
            self._work_on(entries)
        except RedisError:
            self._look_again()
            raise
        except (LeaseLost, CheckpointSuperseded):
            raise  # what is in hand is another worker's now, and what it counts there must stay
        except Exception as error:
            if not _is_the_batchs(error) and not is_device_fault(error):
                self._look_again()
                with contextlib.suppress(RedisError):
                    self._acquit()  # now: this worker may be dropped for the error
            raise
        finally:
            self._in_hand = []
        return bool(entries)

    def _look_again(self) -> None:
        """Look for entries that were dropped half way, or that are ours and never came with an answer."""
        self._innocent = [*self._in_hand, *(entry for entry, _ in self._done)]
        self._blameless = self._blameless or not self._backlog
        self._backlog = True

    def _acquit(self) -> None:
        """Do not count against entries that they were in hand when something else failed."""
        self._queue.release(CONSUMER, self._innocent)
        self._innocent = []

    def _work_on(self, entries: Sequence[Entry]) -> None:
        for entry in entries:  # all before any is admitted: the newest of a claim makes others stale
            self._note_arrival(entry)
        fresh: list[tuple[Entry, RolloutBatch]] = []
        for entry in entries:
            batch = self._admit(entry)
            if batch is not None:
                fresh.append((entry, batch))
        if self._lineage.trainer is None:
            fresh = self._gather_vocabulary(fresh)
        suspects = [pair for pair in fresh if pair[0].suspect]
        # A suspect is not left unacknowledged while others are worked on: its next death would count against them.
        for group in [[pair for pair in fresh if not pair[0].suspect], *([pair] for pair in suspects)]:
            alone = bool(group) and group[0][0].suspect
            try:
                self._learn_from(group, alone=alone)
            except Exception as error:
                if _is_the_batchs(error) and alone:
                    self._doubted.discard(self.run)
                    self._bury(group[0][0], f"failed its worker {MAX_DELIVERIES} times, at last alone: {_told(error)}")
                elif _is_the_batchs(error):
                    self._doubted.add(self.run)
                raise
            if self._done and suspects:
                self.save()
        pause = self._settings.checkpoint_seconds
        if pause and entries:  # a large drafter's takes seconds, in which nothing is trained
            pause = max(pause, min(_CHECKPOINT_PAUSE * self._checkpoint_took, _LONGEST_PAUSE_SECONDS))
        if self._done and (self._backlog or time.monotonic() - self._last_checkpoint >= pause):
            self.save()

    def _claim(self) -> list[Entry]:
        """What an earlier life of this worker, or a failing Redis, left unfinished; then what is new."""
        if self._backlog:
            self._acquit()
            entries = self._queue.own_pending(CONSUMER, skip={*self.pending, *self._put_off})
            if entries:
                if self._blameless:
                    self._queue.release(CONSUMER, entries)
                return entries
            if self.run in self._doubted:
                self._drop_recent()
            self._backlog = self._blameless = False
            self._applied.clear()  # each of them came again, and was acknowledged
        return self._queue.claim(
            CONSUMER, self._settings.claim_tokens, min_idle_seconds=self._settings.claim_idle_seconds
        )

    def _drop_recent(self) -> None:
        """Forget the recent rollouts: training failed with them, and without them none of those in hand did."""
        self.save()  # it moves the newest out of the spool
        self._check_still_ours()
        log.warning("%s: the recent rollouts are dropped: training failed with them, and works without them", self.run)
        memory = self._empty_memory()
        memory.restore([], self._layout.spool(self.run), self._recent.first_prompts)  # deletes their files
        self._recent = memory
        self._doubted.discard(self.run)

    def _admit(self, entry: Entry) -> RolloutBatch | None:
        """Load and screen one entry; None when it ended here (duplicate effect, stale, dead), or was put off."""
        self._put_off.discard(entry.entry_id)
        if entry.batch_id in self._applied:
            self._queue.ack(entry, "trained")
            self._applied.discard(entry.batch_id)
            return None
        lag = self._settings.max_policy_lag
        if lag is not None and (behind := self._newest_lately() - entry.policy_version_max) > lag:
            self._queue.ack(entry, "skipped", f"{behind} policy versions old; limit {lag}")
            self._layout.blob(self.run, entry.blob).unlink(missing_ok=True)
            return None
        try:
            path = self._layout.blob(self.run, entry.blob)
            batch = load_batch(path, vocab_size=self._target.embed_tokens.shape[0])
            screen(batch)
        except FileNotFoundError:
            self._bury(entry, "blob_missing")
            return None
        except (WireError, BatchRejected) as error:
            self._bury(entry, str(error))
            return None
        except OSError as error:  # too many open files, a bad sector: the others are not to wait for it
            log.error("%s: batch %s cannot be read and is put off: %s", self.run, entry.batch_id, error)
            self._put_off.add(entry.entry_id)
            self._queue.release(CONSUMER, [entry])
            return None
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            self._bury_for(entry, error, "cannot be loaded")
            return None
        return batch

    def _bury(self, entry: Entry, reason: str) -> None:
        log.warning("%s: batch %s is dead: %s", self.run, entry.batch_id, reason)
        self._queue.dead_letter(entry, reason)
        self._layout.blob(self.run, entry.blob).unlink(missing_ok=True)

    def _bury_for(self, entry: Entry, error: Exception, what: str) -> None:
        """End a batch for an exception that nobody foresaw; raises what is not the batch's fault again."""
        if not _is_the_batchs(error):
            raise error
        log.error("%s: batch %s %s", self.run, entry.batch_id, what, exc_info=error)
        self._bury(entry, f"{what}: {_told(error)}")

    def _note_arrival(self, entry: Entry) -> None:
        arrival = float(entry.entry_id.partition("-")[0]) / 1000.0  # stream ids begin with Unix milliseconds
        self._lately.append(entry.policy_version_max)
        if self._versions_seen and max(self._lately) < self._versions_seen[-1][1]:
            self._versions_seen = []  # the trainer went back to an earlier checkpoint
        if not self._versions_seen or entry.policy_version > self._versions_seen[-1][1]:
            self._versions_seen = [*self._versions_seen[-15:], (arrival, entry.policy_version)]

    def _newest_lately(self) -> int:
        """The newest policy version of the last batches, of those that still wait in the queue too.

        Not the newest ever: a trainer that goes on from an earlier checkpoint counts on from there.
        """
        return max(*self._lately, self._queue.newest_policy() or 0)

    def _version_seconds(self) -> float | None:
        """Mean time between policy versions, by the arrival of their rollouts."""
        if len(self._versions_seen) < 2:
            return None
        (t0, v0), (t1, v1) = self._versions_seen[0], self._versions_seen[-1]
        return max(0.0, t1 - t0) / (v1 - v0)

    def _gather_vocabulary(self, fresh: list[tuple[Entry, RolloutBatch]]) -> list[tuple[Entry, RolloutBatch]]:
        """Count tokens of the first rollouts; once they are enough, begin from scratch and hand all of them on."""
        for _, batch in fresh:
            self._counts += torch.bincount(batch.input_ids[batch.loss_mask], minlength=self._counts.numel())
        self._waiting += fresh
        # To wait does no harm: a worker that is killed meanwhile was not killed by them.
        self._queue.release(CONSUMER, [entry for entry, _ in fresh])
        if fresh:
            self._tell_gathered()
        if int(self._counts.sum()) < self._settings.vocab_min_tokens:
            return []
        self._lineage.begin_from_scratch(self._counts)
        self._know_vocabulary()
        waiting, self._waiting = self._waiting, []
        # From here on their delivery counts again.
        self._queue.release(CONSUMER, [replace(entry, deliveries=entry.deliveries + 1) for entry, _ in waiting])
        self._journal.vocabulary_known()
        return waiting

    def _tell_gathered(self) -> None:
        self._journal.gathered(int(self._counts.sum()), self._settings.vocab_min_tokens, len(self._waiting))

    # --- test, train, judge
    def _learn_from(self, fresh: Sequence[tuple[Entry, RolloutBatch]], *, alone: bool = False) -> None:
        """Score all; train on what the newest policy wrote, here or still in the queue. The rest joins the mix.

        A worker that is behind spends its time where it counts: not on updates towards policies that are gone.
        `alone`: nothing else is mixed in, and nothing is judged, so that what is raised is the doing of `fresh`.
        """
        if not fresh:
            return
        newest_version = max(entry.policy_version_max for entry, _ in fresh[-_LATELY_BATCHES:])
        waiting = self._queue.newest_policy(after=fresh[-1][0].entry_id)
        behind = self._controller.defers(newer_waits=waiting is not None and waiting > newest_version)
        tested, rest = ([], fresh) if behind else self._test_newest(fresh)
        passed_over = self._test_all(rest, compare=False)
        size = len(self._lineage.candidate.vocabulary)
        if passed_over:
            self._finish(passed_over, self._keep(passed_over))
            self._journal.record([(e, scores) for e, _, scores in passed_over], DEFERRED, latest=self._latest())
        if not tested:
            if passed_over:
                self._journal.report(passed_over[-1][2], DEFERRED, size)
            return
        newest, scores = self._keep(tested), tested[-1][2]
        decision = self._controller.decide(self._economy, scores.alpha("served"), warming_up=self._lineage.warming_up)
        trained = decision.action is not Action.IDLE
        try:
            with self._without_recent() if alone else contextlib.nullcontext():
                seconds = self._train(newest) if trained else 0.0
        except OSError as error:
            # Part of it is in the candidate now, which only the last checkpoint is without: go on from there.
            raise TrainingStopped(
                f"training stopped half way: {error}; it is done again from the last checkpoint"
            ) from error
        self._finish(tested, newest)
        self._journal.record([(e, scores) for e, _, scores in tested], decision, seconds, latest=self._latest())
        best_version = scores.record["best_version"]
        cut_short = trained and self._stopping()
        outcome = None
        if not (cut_short or alone):
            outcome = self._judge(newest, best_version, trained=trained, train_seconds=seconds)
            if trained:
                self._doubted.discard(self.run)  # the recent rollouts were mixed in
        self._journal.report(scores, decision, size, outcome)

    @contextlib.contextmanager
    def _without_recent(self) -> Iterator[None]:
        recent, self._recent = self._recent, self._empty_memory()
        try:
            yield
        finally:
            self._recent = recent

    def _test_newest(
        self, fresh: Sequence[tuple[Entry, RolloutBatch]]
    ) -> tuple[list[Tested], Sequence[tuple[Entry, RolloutBatch]]]:
        """Score what the newest policy wrote with all drafters; also returns what other policies wrote.

        Newest of what came last: a trainer that went back counts on from there. And of what is sound, or a trainer
        whose batches all die would keep the worker from the others' for ever.
        """
        rest = fresh
        for version in sorted({entry.policy_version_max for entry, _ in fresh[-_LATELY_BATCHES:]}, reverse=True):
            tested = self._test_all([p for p in rest if p[0].policy_version_max == version], compare=True)
            rest = [p for p in rest if p[0].policy_version_max != version]
            if tested:
                return tested, rest
        return [], rest

    def _test_all(self, fresh: Sequence[tuple[Entry, RolloutBatch]], *, compare: bool) -> list[Tested]:
        return [
            (entry, batch, scores)
            for entry, batch in fresh
            if (scores := self._test(entry, batch, compare=compare)) is not None
        ]

    def _keep(self, tested: Sequence[Tested]) -> list[KeptBatch]:
        return [self._recent.add(self._layout.blob(self.run, entry.blob), batch) for entry, batch, _ in tested]

    def _finish(self, tested: Sequence[Tested], kept: Sequence[KeptBatch]) -> None:
        """Leave batches to the next checkpoint, which acknowledges them: all that was to be done with them is done."""
        self._done += [
            (entry, "trained" if one.train else "held_out") for (entry, _, _), one in zip(tested, kept, strict=True)
        ]

    def _test(self, entry: Entry, batch: RolloutBatch, *, compare: bool) -> Scores | None:
        """Score a batch and check its features against its log-probabilities; None when it is dead.

        `compare`: with all drafters of the lineage, not with the one alone that served it.
        """
        policy = self._target.at(batch.policy_version, batch=self._layout.blob(self.run, entry.blob))
        try:
            # Top entries instead of hidden states leave nothing to recompute.
            gap, checked = (math.nan, 0) if batch.last_hidden is None else policy.head.logprob_gap(batch)
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            self._bury_for(entry, error, "cannot be compared with the policy's head")
            return None
        if checked and not gap <= self._settings.logprob_gap_nats:
            self._bury(entry, self._gap_reason(gap))
            return None
        current = self._latest()
        by = self._lineage.known(batch.drafter_version) or current
        roles = self._lineage.roles(by, current) if compare else self._lineage.role_served(by)
        if by is not None and (watched := self._lineage.known(self._journal.watched or "")) is not None:
            roles.setdefault("watched", (watched, self._lineage.version(watched)))
        try:
            scores = score(
                batch,
                roles,
                policy.embed_tokens,
                depth=self._settings.depth,
                drafting=self._settings.drafting,
                head=policy.head,
            )
        except BatchRejected as error:
            self._bury(entry, str(error))
            return None
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            self._bury_for(entry, error, "cannot be scored")
            return None
        scores.record.update(
            {
                "batch_id": entry.batch_id,
                "entry_id": entry.entry_id,
                "drafter_version": by,
                "logprob_gap": gap if checked else None,
            }
        )
        return scores

    def _latest(self) -> str | None:
        """The version that engines are offered now."""
        manifest = self._lineage.served()
        return None if manifest is None else manifest.version

    def _gap_reason(self, gap: float) -> str:
        return (
            f"log-probabilities disagree with the features by {gap:.3g} nats on average (limit "
            f"{self._settings.logprob_gap_nats:g}): a state taken before the final norm, a stale "
            "head, a wrong temperature or a shifted mask; compare logprobs[t] with last_hidden[t-1] @ lm_head"
        )

    def _train(self, newest: Sequence[KeptBatch]) -> float:
        """Train on the newest batches mixed with recent ones; returns the seconds it took."""
        trainer = self._lineage.trainer
        if trainer is None:
            raise RuntimeError("the lineage has not begun")
        started = time.perf_counter()
        drawn = self._recent.train_steps(
            newest,
            passes=self._settings.train_passes,
            step_tokens=self._settings.train_step_tokens,
            seed=self._settings.seed * 1_000_003 + self._journal.totals.batches,
        )
        for window in ahead(([trainer.prepare(b) for b in batches] for batches in drawn), trainer.device):
            heads = [self._target.at(prepared.batch.policy_version) for prepared in window]
            share(trainer.drafter, heads[0].embed_tokens, heads[0].head)
            report = trainer.step(window, [policy.head for policy in heads])
            if report.skipped is None:
                self._journal.totals.trained_tokens += report.response_tokens
            if self._stopping():  # what is learnt so far is kept; whoever asked waits neither for the rest nor the gate
                break
        seconds = time.perf_counter() - started
        self._journal.totals.train_seconds += seconds
        return seconds

    def _judge(
        self, newest: Sequence[KeptBatch], best_version: str | None, *, trained: bool, train_seconds: float
    ) -> Contest | None:
        """Let the gate compare candidate and, where it scored best, an archived version with the served drafter."""
        served = self._latest()
        versions = [CANDIDATE] if trained else []
        if best_version not in (None, CANDIDATE, served):
            versions.append(str(best_version))
        evidence = self._recent.held_out(self._settings.gate_rollouts)
        if not versions or not evidence.batches:
            return None
        self._say_how_evidence_is_split(evidence.by_prompt)
        policy_version = max(kept.policy_version for kept in newest)
        policy = self._target.at(policy_version)
        outcomes = contest(self._settings, self._lineage, evidence, policy.embed_tokens, versions, policy.head)
        winner = outcomes[0]
        if winner.verdict.promote:
            self._check_still_ours()
            if winner.version == CANDIDATE:
                self.save()
            try:
                self._lineage.promote(winner.version, served, policy_version, winner.verdict.reason, winner.facts)
            except LatestMoved as moved:  # a person, or an heir of this worker: the next contest is against theirs
                log.info("%s: %s", self.run, moved)
                return None
        candidate = next((o for o in outcomes if o.version == CANDIDATE), None)
        self._journal.judged(winner, refused=candidate is not None and not candidate.verdict.promote)
        if candidate is not None:
            if not candidate.verdict.promote:
                self._lineage.refuse(policy_version, candidate.verdict.reason, candidate.facts)
            gain = candidate.verdict.gain
            self._controller.learn(
                self._economy,
                gain=gain if math.isfinite(gain) else 0.0,
                train_seconds=train_seconds,
                version_seconds=self._version_seconds(),
            )
        return winner

    def _say_how_evidence_is_split(self, by_prompt: bool) -> None:
        """Say once where the prompts are too few to hold some out, and once when they are enough."""
        if by_prompt == self._by_prompt:
            return
        self._by_prompt = by_prompt
        if by_prompt:
            log.info("%s: candidates are judged on prompts that were never trained on", self.run)
        else:
            log.warning(
                "%s: too few prompts so far (%d) to hold some out: candidates are judged on groups of rollouts that "
                "were not trained on, whose prompts may have been; they may promise too much",
                self.run,
                len(self._recent.first_prompts),
            )

    # --- checkpoint, then acknowledge
    def save(self) -> None:
        """Write a checkpoint and acknowledge what it holds."""
        if self._lineage.trainer is None:
            return
        self._check_still_ours()
        self._journal.send()  # first: what a checkpoint holds is not scored again
        done = {entry.batch_id for entry, _ in self._done}
        self._applied |= done
        started = time.monotonic()
        self._checkpoint.save(
            self._lineage.trainer,
            {
                "controller": self._controller.to_json(),
                **self._journal.state,
                "applied": sorted(self._applied),
                "recent": self._recent.names(),
                "first_prompts": self._recent.first_prompts,
            },
        )
        self._checkpoint_took = time.monotonic() - started
        self._recent.settle()
        for entry, state in self._done:
            self._queue.ack(entry, state)
        self._applied -= done
        self._done.clear()
        self._last_checkpoint = time.monotonic()
        self._forget_heads()

    def _check_still_ours(self) -> None:
        """Raise unless this worker may write: it holds the lease, and the run's target is the one that it opened."""
        if not self._holds_lease():
            raise LeaseLost("its lease is gone")
        if file_id(self._layout.target(self.run)) != self._target_file:
            raise RegisteredAnew(f"run {self.run} was registered anew")

    def _forget_heads(self) -> None:
        """Delete heads that neither a kept batch nor one still to come can need."""
        kept = self._recent.oldest_policy_version()
        if kept is None:
            return
        lag, newest = self._settings.max_policy_lag, max(self._lately)
        still_to_come = newest - (_LATE_VERSIONS if lag is None else lag)
        self._target.forget_before(min(kept, still_to_come), newest=newest)

    def close(self) -> None:
        """Checkpoint before an orderly stop, and say that what is still in hand did no harm."""
        try:
            self.save()
        except OSError:  # a full disk, say: not the batches' doing either
            self._queue.release(CONSUMER, [entry for entry, _ in self._done])
            raise
        finally:
            self._queue.release(CONSUMER, [entry for entry, _ in self._waiting])


def _is_the_batchs(error: Exception) -> bool:
    """Whether a batch that was worked on alone may be blamed for what was raised."""
    if isinstance(error, BatchRejected):
        return True
    elsewhere = isinstance(error, RedisError | OSError | ServiceError | DrafterError)
    return not elsewhere and not is_out_of_memory(error) and not is_device_fault(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
