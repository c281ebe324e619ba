"""What a claim's batches are scored with, and which of them cannot be used. Nothing is learnt here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

from drafter.batch import prompt_hashes
from drafter.errors import BatchRejected, NotFinite
from drafter.model.draft_model import DraftModel
from drafter.policy import Policy, unforeseen_seed
from service.monitor.records import arrival
from service.settings import Settings
from service.worker.inbox import RECENT_BATCHES, Inbox, Loaded
from service.worker.journal import Journal
from service.worker.lineage import Lineage
from service.worker.promotion.gate import Gate
from service.worker.scoring import ScoreOrder, Scores, SharedScore, score, score_shared, some_siblings
from service.worker.target import Target

#: A worker that is behind compares all drafters in one claim of this number, and the candidate alone in the others.
_CLAIMS_PER_COMPARISON = 4

#: What a batch is scored with; each includes those before.
Comparison = Literal["served", "candidate", "all"]

#: A batch that was scored.
Scored = tuple[Loaded, Scores]


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """What is done with the batches of a claim: all are scored and join the mix."""

    to_train: Sequence[Loaded]  # of these, the newest policy's usable batches; the others are passed over
    to_pass_over: Sequence[Loaded]
    newest: int  # policy version

    @classmethod
    def of(cls, fresh: Sequence[Loaded], *, isolated: bool) -> Self:
        """Train on all but belated batches, whose policies are gone; `isolated`: on all."""
        belated = [loaded for loaded in fresh if loaded.entry.belated and not isolated]
        to_train = [loaded for loaded in fresh if isolated or not loaded.entry.belated]
        newest = max(loaded.batch.policy_version for loaded in (to_train or belated)[-RECENT_BATCHES:])
        return cls(to_train, belated, newest)

    def without_training(self) -> Self:
        """Pass everything over: training goes to what waits in the queue."""
        return replace(self, to_train=[], to_pass_over=[*self.to_pass_over, *self.to_train])


class ClaimScorer:
    """Scores the batches of one run's claims. `keeps_up`: False after a training that ended early or was overdue."""

    def __init__(
        self, settings: Settings, target: Target, lineage: Lineage, journal: Journal, gate: Gate, inbox: Inbox
    ) -> None:
        self._settings, self._target, self._lineage = settings, target, lineage
        self._journal, self._gate, self._inbox = journal, gate, inbox
        self._uncompared = _CLAIMS_PER_COMPARISON  # claims since all drafters were compared
        self.keeps_up = True

    def score_claim(self, plan: ClaimPlan) -> tuple[list[Scored], list[Scored]]:
        """Score a claim. Returns what is to be trained on, and what is passed over."""
        newest, others = self._score_newest(plan.to_train) if plan.to_train else ([], [])
        tested = sum(len(scores.looked) for _, scores in newest)
        return newest, self._score_passed_over([*plan.to_pass_over, *others], tested)

    def _score_newest(self, fresh: Sequence[Loaded]) -> tuple[list[Scored], Sequence[Loaded]]:
        """Score the newest policy's batches. Returns them scored, and the batches of other policies.

        Newest among the last `RECENT_BATCHES`, not among all: a trainer that went back to a checkpoint counts on from
        lower versions. If none of that policy's batches can be used, the next lower version is taken: a trainer whose
        batches are all rejected must not keep the worker from the others'.
        """
        rest, comparison = fresh, self._comparison(fresh)
        for version in sorted({loaded.batch.policy_version for loaded in fresh[-RECENT_BATCHES:]}, reverse=True):
            scored = self._score_all([p for p in rest if p.batch.policy_version == version], comparison)
            rest = [p for p in rest if p.batch.policy_version != version]
            if scored:
                return scored, rest
        return [], rest

    def _score_passed_over(self, rest: Sequence[Loaded], tested: int) -> list[Scored]:
        """Score batches that are not trained on, the newest ones with the candidate as well.

        The candidate is scored until `gate_rollouts` of each training have judged it. `tested`: how many rollouts of
        this claim judge it already. It is never scored on a belated batch, whose policy is gone.
        """
        compared, found = set(), []
        for loaded in reversed(rest):
            if not loaded.entry.belated and self._gate.training.lacks(self._settings.gate_rollouts, tested):
                compared.add(loaded)
                tested += len(self._looked(loaded))
        for loaded in rest:
            found += self._score_all([loaded], "candidate" if loaded in compared else "served")
        return found

    def score(self, loaded: Loaded, comparison: Comparison) -> Scored | None:
        """Check a batch's features against its log-probabilities, and score it; None where it was rejected.

        The result has the batch with its normalisers.
        `comparison`: which drafters are scored. "served": the one that served the batch, or, where that is gone, the
        one that is served now (the candidate while none is), and those that the drift monitor compares. "candidate":
        the candidate and the one that is served now as well. "all": also the first version, sent drafters, and the
        version over which a gain is being measured.
        """
        batch = loaded.batch
        policy = self._target.at(batch.policy_version, batch=loaded.path)
        head_ns = self._target.later_head_ns(batch.policy_version, loaded.path)
        came = arrival(loaded.entry.arrived)[1]
        if head_ns is not None and self._journal.abandoned(self._inbox.unfinished()).has_not(head_ns, came):
            self._inbox.reject(
                loaded.entry,
                f"the trainer went back to an earlier policy version after this batch, and the head of policy version "
                f"{batch.policy_version} is that of its next attempt",
            )
            return None
        current = self._lineage.served_version()
        by = self._lineage.existing(batch.drafter_version) or current
        every, served_only = comparison == "all", comparison == "served"
        versions = {
            "served": by,
            "latest": None if served_only else current,
            "frozen": self._lineage.first() if every else None,
            "watched": None if by is None else self._lineage.existing(self._journal.drift.watched),
            "followed": None if by is None else self._lineage.existing(self._journal.drift.followed),
            "before": self._lineage.existing(self._gate.outcomes.watched) if every else None,
        }
        roles = self._lineage.roles(versions, candidate=by is None or not served_only)
        try:
            loaded, found = self._shared(loaded, roles, policy)
            scores = score(roles, found)
        except BatchRejected as error:
            self._inbox.reject(loaded.entry, str(error))
            return None
        except Exception as error:  # noqa: BLE001 - one batch's trouble is not the others'
            self._inbox.fail(loaded.entry, error, "cannot be scored")
            return None
        record = replace(
            scores.record,
            batch_id=loaded.entry.batch_id,
            entry_id=loaded.entry.arrived,
            attempt=loaded.entry.attempt,
            drafter_version=by,
        )
        sent = self._gate.replay_sent(found.part, policy) if every else {}
        scores = replace(scores, record=record, versions={**scores.versions, **sent})
        return replace(loaded, batch=found.batch), scores

    def _looked(self, loaded: Loaded) -> Sequence[int]:
        """Places of the rollouts that are replayed: all, or some of each prompt's where newer batches had to wait."""
        if self.keeps_up:
            return range(loaded.batch.rollouts)
        return some_siblings(prompt_hashes(loaded.batch), loaded.batch.policy_version)

    def _shared(
        self, loaded: Loaded, roles: Mapping[str, tuple[str, DraftModel]], policy: Policy
    ) -> tuple[Loaded, SharedScore]:
        """Check and replay the sound rollouts of the batch, with the other ranks if there are any."""
        # Before the ranks are led: what fails here fails on this one alone.
        looked, replayed = self._looked(loaded), self._lineage.replayed(dict(roles.values()))
        try:
            with self._lineage.needed_trainer.ranks.in_step():
                return loaded, self._led(loaded, looked, roles, replayed, policy)
        except NotFinite as found:  # several ranks screen as they score
            return self._shared(loaded.sound(found), roles, policy)

    def _led(
        self,
        loaded: Loaded,
        looked: Sequence[int],
        roles: Mapping[str, tuple[str, DraftModel]],
        replayed: Mapping[str, str],
        policy: Policy,
    ) -> SharedScore:
        """Check and replay the batch; other ranks are told to (`service.ranks.FollowedRun`)."""
        ranks, drafters = self._lineage.needed_trainer.ranks, dict(roles.values())
        order = ScoreOrder(
            looked=list(looked),
            seed=unforeseen_seed(),
            depth=self._settings.depth,
            drafting=self._settings.drafting,
            gap_nats=self._settings.logprob_gap_nats,
            served=roles["served"][0] if "served" in roles else None,
        )
        if ranks.world > 1:
            head = self._target.head_of(loaded.batch.policy_version, batch=loaded.path)
            file = {"file": loaded.path.name, "known": loaded.left_out, "head": head, "drafters": replayed}
            self._lineage.lead({"score": {"how": asdict(order), **file}})
        distinct = {name: drafters[equal] for name, equal in replayed.items()}
        return score_shared(ranks, distinct, policy, loaded.batch, order)

    def _comparison(self, fresh: Sequence[Loaded]) -> Comparison:
        """How a claim's newest rollouts are scored.

        By all drafters if the worker keeps up and one policy wrote them all; else by all only now and then, or while a
        gain is unmeasured.
        """
        self._uncompared += 1
        keeps_up = self.keeps_up and len({loaded.batch.policy_version for loaded in fresh}) == 1
        if keeps_up or self._gate.outcomes.unmeasured or self._uncompared >= _CLAIMS_PER_COMPARISON:
            self._uncompared = 0
            return "all"
        return "candidate"

    def _score_all(self, fresh: Sequence[Loaded], comparison: Comparison) -> list[Scored]:
        return [one for loaded in fresh if (one := self.score(loaded, comparison)) is not None]
