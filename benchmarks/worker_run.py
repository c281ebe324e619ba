"""One run of the shipped worker in this process, with an embedded Valkey. A benchmark gives it batches as RL would.

`WorkerRun.post` queues a batch; `WorkerRun.worker.cycle()` does one claim's work.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import redis.asyncio
from pydantic import SecretStr
from redis import Redis
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.service.valkey_fixtures import OwnValkey

from benchmarks.recording import rollout_tensors
from drafter.batch import RolloutBatch
from drafter.files.checkpoint import export_config
from drafter.model.eagle3 import Eagle3Drafter
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.queue.deliveries import RolloutQueue
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch
from service.storage.registry import Registry
from service.storage.reports.store import Store
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool
from service.worker.loop import RunWorker

NAME: Final = "bench"


class WorkerRun:
    """A registered run with its queue and its worker; `settings` are the service's."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        aux_layers: Sequence[int],
        *,
        embed: Tensor,
        head: Tensor | None,
        drafter: Eagle3Drafter,
        **settings: Any,
    ) -> None:
        """`head` None: the embedding's. `drafter`: the one that the run begins with."""
        self._aux_layers = tuple(aux_layers)
        self._fingerprint = wire.target_fingerprint(config, self._aux_layers)
        self._tied = head is None
        self.settings = Settings(state_dir=directory, **settings)
        self.layout = Layout(directory)
        self.registry = Registry(self.layout)
        tensors = {"embed_tokens": as_wire(embed)} | ({} if head is None else {"lm_head": as_wire(head)})
        tensors |= {f"drafter.{n}": as_wire(t.detach()) for n, t in drafter.state_dict().items()}
        facts = {
            "format": wire.RUN_FORMAT,
            "config": json.dumps(dict(config)),
            "aux_layers": json.dumps({"convention": wire.AUX_CONVENTION, "layers": list(aux_layers)}),
            "target_fingerprint": self._fingerprint,
            "policy_version": "0",
            "drafter_config": json.dumps(export_config(drafter.config)),
        }
        self._body = _joined(wire.encode(tensors, facts))
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        valkey = OwnValkey(self.settings.state_dir)
        valkey.start()
        self._closing.callback(valkey.stop)
        self._url = valkey.url
        self.settings = self.settings.model_copy(update={"redis_url": SecretStr(valkey.url)})
        self.redis: Any = Redis.from_url(valkey.url)
        self._closing.callback(self.redis.close)
        self._spool = Spool(self.layout)
        record = read_run_header(NAME, wire.parse_header(self._body))
        with self._spool.upload() as upload:
            upload.write(self._body)
            commit_run(self.layout, record, upload)
        self.store = Store(self.redis, NAME)
        self.worker = RunWorker(self.settings, self.layout, RolloutQueue(self.redis, NAME), self.store, NAME)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def served(self) -> str:
        """The version that engines are offered."""
        manifest = self.registry.latest(NAME)
        return "" if manifest is None else manifest.version

    @property
    def sequence(self) -> int:
        """Changes whenever engines are offered something to load."""
        manifest = self.registry.latest(NAME)
        return -1 if manifest is None else manifest.sequence

    def put_head(self, policy_version: int, head: Tensor) -> None:
        """Store the head from this policy version on, as `PUT /runs/{run}/head` does."""
        facts = {"format": wire.HEAD_FORMAT, "policy_version": str(policy_version)}
        self.layout.head(NAME, policy_version).write_bytes(_joined(wire.encode({"lm_head": as_wire(head)}, facts)))

    def post(self, batch: RolloutBatch, *, drafter_version: str | None = None) -> None:
        """Queue a batch; `drafter_version` served it, by default the one that is served now."""
        facts = wire.rollout_metadata(
            run=NAME,
            policy_version=batch.policy_version,
            rollout_ids=[f"v{batch.policy_version}/{one}" for one in batch.rollout_ids],
            target_fingerprint=self._fingerprint,
            aux_layers=self._aux_layers,
            drafter_version=self.served if drafter_version is None else drafter_version,
        )
        body = _joined(wire.encode(rollout_tensors(batch), facts))
        header = wire.check_rollout_header(wire.parse_header(body))
        with self._spool.upload() as upload:
            upload.write(body)
            blob = self._spool.new_blob(header.batch_id, upload.digest)
            upload.keep(self._spool.path(NAME, blob))
        queued = Batch(
            header.batch_id, blob, len(body), header.tokens, header.rollouts,
            header.policy_version, header.policy_version_max, header.rollout_ids,
        )  # fmt: skip
        asyncio.run(self._enqueue(queued))

    async def _enqueue(self, batch: Batch) -> None:
        client = redis.asyncio.Redis.from_url(self._url)
        try:
            outcome = await AsyncRolloutQueue(client, NAME).enqueue(batch, max_items=10_000, max_bytes=1 << 34)
        finally:
            await client.aclose()
        if outcome.outcome != "accepted":
            raise RuntimeError(f"expected the queue to take the batch, it answered {outcome.outcome}")

    def events(self) -> list[dict[str, Any]]:
        """The run's history."""
        return [dict(event.written) for event in self.registry.history.events(NAME)]


def _joined(parts: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(bytes(part) for part in parts)
