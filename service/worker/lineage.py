"""The drafters of one run as the worker holds them: candidate and its trainer, served, first, and archived versions."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from drafter.batch import RolloutBatch
from drafter.device import is_device_fault, is_out_of_memory, working_dtype
from drafter.errors import DrafterError
from drafter.files.checkpoint import config_fingerprint
from drafter.files.kinds import read_kind, write_kind
from drafter.model.draft_model import DraftModel, computes_alike
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy
from drafter.replay.acceptance import Replay
from drafter.replay.replay import replay
from drafter.training.ranks import current
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.durable import AtomicDirectory
from rl_hooks.format.drafter import kind_of
from rl_hooks.format.eagle3 import reaching, with_layers
from service.errors import RegistryError, RunDamaged, ServiceError, WorkerError
from service.monitor.events import Event, GateEvidence, Realised, Refused
from service.monitor.records import arrival
from service.settings import Settings
from service.storage.drafters.versions import Manifest
from service.storage.history.digest import SentDrafter
from service.storage.layout import Layout
from service.storage.registry import OFFERS, Registry
from service.worker.checkpoint import copy_to_ranks, full_disk_as_os_error
from service.worker.scoring import replay_each
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: Stands for the drafter in training where a version is asked for.
CANDIDATE: Final = "candidate"

#: Published drafters in memory: one for each of a claim's five roles, and one more that an older batch was drafted by.
_CACHED_VERSIONS = 6


class Lineage:
    """One lineage: all drafters share a configuration and a draft vocabulary, which engines cache."""

    def __init__(self, settings: Settings, layout: Layout, run: str, target: Target) -> None:
        self._settings = settings
        self._layout = layout
        self._run = run
        self._target = target
        self._registry = Registry(layout, settings.drafters_url)
        self._device = torch.device(settings.device)
        self._versions: OrderedDict[str, DraftModel] = OrderedDict()
        self._verified: dict[str, bool] = {}  # by version, as of when it was looked at
        self._equal: dict[tuple[str, str], tuple[int, bool]] = {}  # by two names: windows trained, equal weights
        self.trainer: DrafterTrainer | None = None
        self.token_counts = torch.zeros(target.vocab_size, dtype=torch.int64)  # [V], until there is a draft vocabulary

    # --- how a lineage begins
    @property
    def begun(self) -> bool:
        """Whether there is a candidate: not before the draft vocabulary of a run from scratch is known."""
        return self.trainer is not None

    def begin(self) -> None:
        """Begin with the newest published drafter, or with the initial one, if there is any."""
        manifest = self._registry.latest(self._run)
        if manifest is None:
            self._target.check()  # now, not once rollouts have been gathered: no drafter may fit it
            if (tensors := self._target.initial_drafter) is not None:
                manifest = self._publish_initial(tensors)
        if manifest is not None:
            self.set_candidate(self._read(manifest.version))

    def count_tokens(self, batches: Iterable[RolloutBatch]) -> None:
        """Count response tokens, from which the draft vocabulary will be chosen."""
        for batch in batches:
            tokens = batch.input_ids[batch.loss_mask]
            self.token_counts += torch.bincount(tokens, minlength=self._target.vocab_size)

    def begin_from_scratch(self) -> None:
        """Build and freeze the draft vocabulary from the token counts; random layers, the target's head."""
        counts = self.token_counts
        size = min(self._target.draft_vocab_size or self._settings.draft_vocab_size, int(counts.numel()))
        vocabulary = DraftVocabulary.build(counts, size, always=self._target.ending_tokens[:size])
        share = 100 * vocabulary.coverage(counts)
        log.info("%s: draft vocabulary: %d tokens cover %.2f%%", self._run, len(vocabulary), share)
        config = DrafterConfig.from_target(self._target.config, self._target.aux_layers, len(vocabulary))
        torch.manual_seed(self._settings.seed)
        drafter = Eagle3Drafter(config, vocabulary)
        # A scale is part of what the drafter learns; a soft cap is left for training to find.
        drafter.init_from_target(self._target.lm_head()[vocabulary.ids].float() * self._target.logit_map.scale)
        self.set_candidate(drafter)

    def _publish_initial(self, tensors: dict[str, torch.Tensor]) -> Manifest:
        """Publish what came with PUT /runs as the run's first version."""
        config = self._target.initial_drafter_config
        with AtomicDirectory(self._registry.stage(self._run)) as directory:
            staged = directory.path
            with full_disk_as_os_error():
                save_file(tensors, staged / "model.safetensors")
            if kind_of(config) == "eagle3":
                config = reaching(with_layers(config, self._target.aux_layers), self._target.config)
            (staged / "config.json").write_text(json.dumps(config, indent=1))
            drafter = read_kind(staged, self._target.registered)  # refuses the unservable
            self._try(self._scored(drafter))
            return self._announce(drafter, staged, self._target.policy_version, None, "initial drafter", None)

    def _try(self, drafter: DraftModel) -> None:
        """Raise `DrafterError` unless a drafter can draft: once published it would cost the run every batch."""
        vocabulary, policy, tokens = drafter.vocabulary, self._target.registered, self._settings.depth + 8
        width = policy.embed_tokens.shape[1]
        some = torch.Generator().manual_seed(0)
        made_up = RolloutBatch(
            input_ids=vocabulary.ids[torch.arange(tokens) % len(vocabulary)].cpu(),
            cu_seqlens=torch.tensor([0, tokens]),
            loss_mask=torch.arange(tokens) >= 2,
            aux_hidden=torch.randn(tokens, len(self._target.aux_layers) * width, generator=some),
            logprobs=torch.full((tokens,), -1.0),
            last_hidden=torch.randn(tokens, width, generator=some),
            logsumexp=torch.zeros(tokens),
        )
        try:
            replay(drafter, made_up, policy, depth=self._settings.depth)
        except Exception as error:
            if is_device_fault(error) or is_out_of_memory(error) or isinstance(error, OSError | ServiceError):
                raise
            raise DrafterError(
                f"the drafter that came with the run cannot draft {tokens} made-up tokens ({error}). Put its weights "
                "and its config's figures right, and PUT the run again"
            ) from error

    def set_candidate(self, drafter: DraftModel) -> DrafterTrainer:
        """Make a drafter the candidate, with a fresh trainer."""
        config = TrainConfig(
            steps_ahead=self._settings.depth,
            learning_rate=self._settings.learning_rate,
            warmup_windows=self._settings.warmup_steps,
            optimizer=self._settings.optimizer,
            compute_dtype="bfloat16" if working_dtype(self._device) is torch.bfloat16 else "float32",
        )
        self.trainer = DrafterTrainer(drafter.to(self._device), config, current())
        self._equal.clear()
        return self.trainer

    def check_vocabulary(self) -> None:
        """Raise `WorkerError` where the candidate's draft vocabulary is not the served drafter's: engines cache it."""
        served, own = self.served(), self.candidate.vocabulary
        if served is not None and served.d2t_sha256 != own.digest:
            raise WorkerError(
                f"the worker's checkpoint holds a drafter with another draft vocabulary ({len(own)} tokens, "
                f"{own.digest}) than {served.version} ({served.d2t_sha256}), which is served. A vocabulary is frozen "
                f"for the life of a run: move {self._layout.worker(self._run)} away to go on from {served.version}, or "
                "register another run"
            )

    # --- drafters by role
    @property
    def candidate(self) -> DraftModel:
        """The drafter that is being trained."""
        return self.needed_trainer.drafter

    @property
    def needed_trainer(self) -> DrafterTrainer:
        """What trains the candidate; an error before the lineage has begun."""
        if self.trainer is None:
            raise RuntimeError("the lineage has not begun")
        return self.trainer

    def lead(self, order: Mapping[str, Any]) -> None:
        """Have the other ranks do for this run what this one does next, with the candidate as it is here.

        `service.ranks.Follower` is their side of it. Call it `in_step`.
        """
        trainer = self.needed_trainer
        whole = {"run": self._run, "config": asdict(trainer.config), **order}
        trainer.ranks.shared(lambda: whole, idle=True)
        trainer.ranks.together(lambda: None)  # they map the files
        copy_to_ranks(trainer, self._layout.worker(self._run))

    def served(self) -> Manifest | None:
        """What `GET /drafter/latest` offers now."""
        return self._registry.latest(self._run)

    def served_version(self) -> str | None:
        """The version that engines are offered now."""
        manifest = self.served()
        return None if manifest is None else manifest.version

    def held(self) -> bool:
        """Whether a person holds what is served: nothing may be published, so nothing is looked at."""
        return self._registry.held(self._run) is not None

    def chosen_after(self, before: str | None) -> GateEvidence | None:
        """The gate's reasons for what is served now; None unless it won against `before` and serves by that."""
        offer, latest = self._registry.offer(self._run), self.served()
        if offer is None or latest is None or offer.version != latest.version:
            return None
        evidence = offer.gate
        if offer.event == "published":  # an earlier service may have died before it wrote the event
            evidence = latest.gate if evidence is None else evidence
        told = offer.written
        if told.get("previous", told.get("parent", latest.parent)) != before:
            return None
        return None if evidence is None or evidence.gain is None else evidence

    def existing(self, version: str | None) -> str | None:
        """The version if it is still on disk, as it was published, else None."""
        if version is None or version not in self._registry.versions(self._run):
            return None
        return version if self._is_sound(version) else None

    def _is_sound(self, version: str) -> bool:
        """Whether a version's files match its manifest, looked at once; said once where they do not.

        One that is served must: `version` raises for it.
        """
        if version in self._verified:
            return self._verified[version]
        try:
            self._registry.verify(self._run, version)
        except (RegistryError, RunDamaged) as error:  # RunDamaged: of its manifest
            log.error("%s: %s: %s; it is left out of all comparisons", self._run, version, error)
            self._verified[version] = False
        except OSError as error:  # it may be readable the next time
            log.error("%s: %s cannot be read: %s; it is left out of this comparison", self._run, version, error)
            return False
        else:
            self._verified[version] = True
        return self._verified[version]

    def waiting(self) -> dict[str, SentDrafter]:
        """The versions on disk that people sent and that the gate has not decided about, oldest first."""
        sent = self._registry.history.sent(self._run)
        on_disk = self._registry.versions(self._run) if sent else []
        return {version: sent[version] for version in sent if version in on_disk}

    @property
    def published(self) -> int:
        """How many versions were published so far."""
        return self._registry.history.digest(self._run).published

    def train_from(self, version: str) -> None:
        """Train on from a published version, with a fresh trainer."""
        self.set_candidate(self._read(version))

    def archived(self) -> list[str]:
        """All versions on disk whose files are as they were published, oldest first."""
        return [version for version in self._registry.versions(self._run) if self._is_sound(version)]

    def first(self) -> str | None:
        """The oldest version that is kept, if it is as it was published."""
        return self.existing(next(iter(self._registry.versions(self._run)), None))

    def roles(self, versions: Mapping[str, str | None], *, candidate: bool) -> dict[str, tuple[str, DraftModel]]:
        """What a batch is scored with: role -> (version, drafter). `versions`: by role. `candidate`: with that, too."""
        roles = {CANDIDATE: (CANDIDATE, self.candidate)} if candidate else {}
        return roles | {role: (one, self.version(one)) for role, one in versions.items() if one is not None}

    def replayed(self, drafters: Mapping[str, DraftModel]) -> dict[str, str]:
        """Of each drafter the name under which it is replayed: its own, or that of one before it with equal weights.

        The candidate comes last: until it is trained it is what was published.
        """
        found: dict[str, str] = {}
        for name in sorted(drafters, key=lambda name: name == CANDIDATE):
            distinct = (one for one in found.values() if self._are_equal(one, name, drafters))
            found[name] = next(distinct, name)
        return {name: found[name] for name in drafters}

    def _are_equal(self, one: str, other: str, drafters: Mapping[str, DraftModel]) -> bool:
        """Compared once for each state of the candidate: a failed training ends this lineage (`RunWorker`)."""
        windows = self.needed_trainer.windows if CANDIDATE in (one, other) else 0
        known = self._equal.get((one, other))
        if known is None or known[0] != windows:
            found = computes_alike(drafters[one], drafters[other], working_dtype(self._device))
            known = self._equal[one, other] = windows, found
        return known[1]

    def version(self, version: str) -> DraftModel:
        """A published drafter, from a small cache. Raises RegistryError where its files are not as published."""
        if version in self._versions:
            self._versions.move_to_end(version)
        else:
            self._versions[version] = self._scored(self._read(version))
            while len(self._versions) > _CACHED_VERSIONS:
                self._versions.popitem(last=False)
        return self._versions[version]

    def replay(self, version: str, batch: RolloutBatch, policy: Policy | None = None) -> Replay:
        """What a published drafter would have accepted of a batch. `policy`: None for the newest of its version."""
        policy, settings = policy or self._target.at(batch.policy_version), self._settings
        drafters = {version: self.version(version)}
        return replay_each(drafters, policy, batch, settings.depth, settings.drafting)[version]

    def _scored(self, drafter: DraftModel) -> DraftModel:
        """Make a drafter ready for scoring: on the worker's device, in the type that it computes in there."""
        drafter = drafter.to(self._device).eval().requires_grad_(False)
        for parameter in drafter.parameters():  # buffers stay as they are: engines keep a router's bias in float32
            parameter.data = parameter.data.to(working_dtype(self._device) or parameter.dtype)
        return drafter

    def _read(self, version: str) -> DraftModel:
        self._registry.verify(self._run, version)
        return read_kind(self._layout.drafter(self._run, version))

    # --- publishing
    def promote(
        self, version: str, served: str | None, policy_version: int, reason: str, evidence: GateEvidence
    ) -> Manifest:
        """Serve the candidate as a new version, or an archived version again (at no training cost).

        `served`: the version that it was judged against. Raises `LatestMoved` when another one is served by now.
        """
        if version != CANDIDATE and (sent := self.waiting().get(version)) is not None:
            reason = f"{sent.sender}: {reason}"
            return self._registry.promote(self._run, version, reason, evidence, instead_of=served)
        if version != CANDIDATE:
            reason = f"re-selected from the archive: {reason}"
            return self._registry.rollback(self._run, version, reason, instead_of=served, gate=evidence)
        with AtomicDirectory(self._registry.stage(self._run)) as staged:
            with full_disk_as_os_error():
                write_kind(staged.path, self.candidate)
            manifest = self._announce(self.candidate, staged.path, policy_version, served, reason, evidence)
        self._prune()
        return manifest

    def _prune(self) -> None:
        first = self._registry.versions(self._run)[0]
        self._registry.prune(self._run, self._settings.keep_versions, protect={first, *self.waiting()})

    def _announce(
        self,
        drafter: DraftModel,
        staged: Path,
        policy_version: int,
        parent: str | None,
        reason: str,
        evidence: GateEvidence | None,
    ) -> Manifest:
        manifest = self._registry.publish(
            self._run,
            staged,
            policy_version=policy_version,
            parent=parent,
            instead_of=parent,
            config_fingerprint=config_fingerprint(drafter.config, drafter.vocabulary),
            d2t_sha256=drafter.vocabulary.digest,
            aux_layers=drafter.aux_layers,
            kind=drafter.kind,
            gate=evidence,
            reason=reason,
        )
        log.info("%s: published %s (policy version %d): %s", self._run, manifest.version, policy_version, reason)
        return manifest

    def refuse(self, policy_version: int, reason: str, evidence: GateEvidence) -> None:
        """Record that the gate refused the candidate, once for what it was judged on.

        A worker that died between this and its checkpoint judges the same batches again. One that was judged on older
        batches than the last one, as after Redis' clock was set back, is counted and not written.
        """
        last = self._registry.history.last_of(self._run, ("refused",), version=None)  # a sent drafter's has one
        known = last.gate.judged_to if isinstance(last, Refused) and last.gate is not None else None
        if known is None or evidence.judged_to is None or arrival(evidence.judged_to) > arrival(known):
            self._record(Refused(policy_version=policy_version, reason=reason, gate=evidence))

    def refuse_sent(
        self, version: str, reason: str, evidence: GateEvidence | None = None, *, usable: bool = True
    ) -> None:
        """Record that a version which a person sent will not be served. It stays in the archive where it is usable."""
        sent = self.waiting()[version]
        policy_version = self._registry.get(self._run, version).policy_version
        log.warning("%s: %s, %s, is refused: %s", self._run, version, ascii(sent.sender), reason)
        why = f"{sent.sender}: {reason}"
        told = Refused(version=version, policy_version=policy_version, reason=why, by=sent.by, gate=evidence)
        self._record(told)
        if not usable:
            self._versions.pop(version, None)
            self._registry.discard(self._run, version)
        self._prune()

    def record_gain(self, event: Realised) -> None:
        """Write what a version was found to gain, once for each time that it was served.

        A worker that died between this and its checkpoint measures the same gain again.
        """
        last = self._registry.history.last_of(self._run, (*OFFERS, event.event), event.version)
        if not isinstance(last, Realised):
            self._record(event)

    def _record(self, event: Event) -> None:
        self._registry.history.record(self._run, event)
