"""Where memory runs out, runs that are idle give theirs up to one that has work, and go on later as they were."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from redis import asyncio as aio
from redis.exceptions import ConnectionError as RedisConnectionError
from storage_fixtures import RolloutQueue, Store
from worker_fixtures import CONFIG, LAYERS, Bench, alive, joined, nest

import service.worker.process
from drafter.batch import load_batch
from drafter.device import RanksLost, is_out_of_memory
from drafter.errors import CheckpointError
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.storage.layout import Layout, file_id
from service.storage.lease import Leases
from service.storage.reports import AsyncStore
from service.storage.reports import Store as WorkersStore
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker
from service.worker.process import Worker, turns

RUNS = ["a", "b", "c", "d"]
NO_MEMORY: list[Exception] = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError("Cannot allocate memory (os error 12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in every turn."""
    monkeypatch.setattr(service.worker.process, "_LOOK_FOR_RUNS_SECONDS", 0.0)


@pytest.fixture(name="worker")
def _worker(bench: Bench) -> Iterator[Worker]:
    """A worker of its own connection; three runs are open, one after another was trained, and all are idle."""
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    for run in RUNS[:3]:
        register(bench, run)
        train(bench, worker, run, "first")
    yield worker
    worker._close()


def register(bench: Bench, run: str) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)


def post(bench: Bench, run: str, name: str) -> str:
    return bench.post_file(bench.world.rollout_file(f"{run}-{name}", run=run))


def is_trained(bench: Bench, run: str, batch: str) -> bool:
    record = RolloutQueue(bench.redis, run).batch(batch)
    return record is not None and record["state"] == "trained"


def until_trained(bench: Bench, worker: Worker, run: str, batch: str, most: int = 20) -> int:
    """Turns until a batch was trained."""
    for number in range(most):
        if is_trained(bench, run, batch):
            return number
        worker._turn()
    raise AssertionError(f"{run} was not trained: {error_of(bench, run)}")


def train(bench: Bench, worker: Worker, run: str, name: str) -> None:
    until_trained(bench, worker, run, post(bench, run, name))


def error_of(bench: Bench, run: str) -> Any:
    return Store(bench.redis, run).worker().error or None


def as_it_is(worker: Worker, run: str) -> Any:
    """Weights, moments and counters of an open run."""
    learner = worker.served[run].learner
    trainer, kept = learner.lineage.needed_trainer, learner.recent.names()
    return trainer.fingerprint(), learner.journal.state, learner.controller.to_json(), learner.gate.state, kept


def no_room(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, where: str, error: Exception, others: int = 3
) -> list[str]:
    """Have memory run out where a run is opened, or trained, while so many others are open. Returns who failed."""
    kind, name = (Lineage, "set_candidate") if where == "opened" else (Learner, "train")
    real, failed = getattr(kind, name), list[str]()

    def allocating(self: Any, *args: Any, **named: Any) -> Any:
        run = self._run if where == "opened" else self.run
        if len(worker.served.keys() - {run}) >= others:
            failed.append(run)
            raise error
        return real(self, *args, **named)

    monkeypatch.setattr(kind, name, allocating)
    return failed


@pytest.mark.parametrize("where", ["opened", "trained"])
@pytest.mark.parametrize("error", NO_MEMORY, ids=["cpu", "cuda", "python", "mmap"])
def test_who_was_idle_longest_gives_way_to_a_run_with_work_and_goes_on_later_as_it_was(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    failed = no_room(monkeypatch, worker, where, error)
    before = as_it_is(worker, "a")
    register(bench, "d")
    until_trained(bench, worker, "d", post(bench, "d", "x"))
    assert failed == ["d"]
    assert error_of(bench, "d") is None
    for _ in range(5):
        worker._turn()
    assert worker.served.keys() == {"b", "c", "d"}, "no more were closed than was needed, and a has nothing to do"
    assert bench.redis.get(Leases.key("a")) is None, "another worker may have it"
    seen: list[Any] = []
    opened = RunWorker

    def watched(*args: Any, **named: Any) -> RunWorker:
        made = opened(*args, **named)
        if made.run == "a":
            worker._runs["a"].worker = made
            seen.append(as_it_is(worker, "a"))
        return made

    monkeypatch.setattr(service.worker.process, "RunWorker", watched)
    train(bench, worker, "a", "later")
    assert seen[-1] == before
    assert worker.served["a"].learner.journal.totals.batches == 2
    assert worker.served.keys() == {"a", "c", "d"}, "now b was idle longest"
    assert failed == ["d", "a"]


@pytest.mark.parametrize("where", ["opened", "trained"])
@pytest.mark.parametrize("error", NO_MEMORY[:2], ids=["cpu", "cuda"])
def test_a_run_is_refused_only_where_no_other_is_idle_and_says_so(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    monkeypatch.setattr(turns, "AHEAD_SECONDS", 1e-6)
    monkeypatch.setattr(service.worker.process, "AHEAD_SECONDS", 1e-6)  # one claim in each turn
    worker._close_idle(2)
    assert worker.served.keys() == {"c"}
    failed = no_room(monkeypatch, worker, where, error, others=1)
    theirs = [post(bench, "c", f"flood{number}") for number in range(12)]
    register(bench, "d")
    honest = post(bench, "d", "x")
    for _ in range(4):
        worker._turn()
    assert "d" in failed
    assert not is_trained(bench, "c", theirs[-1])
    assert worker.served.keys() == {"c"}
    told = error_of(bench, "d")
    assert "memory ran out, and to close idle runs did not help, or none was idle" in told
    assert str(error) in told
    wait = worker._runs["d"].retry_at - time.monotonic()
    assert wait > 50 if isinstance(error, torch.OutOfMemoryError) else 0 < wait <= 1, "as it was before"
    until_trained(bench, worker, "c", theirs[-1])
    worker._runs["d"].retry_at = 0.0  # a minute later
    until_trained(bench, worker, "d", honest)
    assert worker.served.keys() == {"d"}
    assert error_of(bench, "d") is None


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cpu", "cuda", "python", "mmap"])
def test_who_is_idle_gives_way_also_where_a_batch_cannot_be_read_for_want_of_memory(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def loading(*args: Any, **named: Any) -> Any:
        if len(worker.served) > 2:
            raise error
        return load_batch(*args, **named)

    monkeypatch.setattr("service.worker.inbox.load_batch", loading)
    until_trained(bench, worker, "a", post(bench, "a", "x"))
    assert "a" in worker.served


def test_a_run_that_needs_more_than_there_is_closes_ever_more_at_once(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each try: beside a thousand small runs it would be tried a thousand times."""
    for run in ("e", "f", "g", "h"):
        register(bench, run)
        train(bench, worker, run, "first")
    batch = post(bench, "h", "x")
    open_then = list[int]()
    with monkeypatch.context() as patch:
        failed = no_room(patch, worker, "trained", NO_MEMORY[0], others=0)
        while error_of(bench, "h") is None:
            worker._turn()
            open_then.append(len(worker.served))
    assert failed == ["h"] * 4
    assert open_then[-1] == 0
    assert [few for few in dict.fromkeys(open_then) if few < 6] in ([5, 3, 0], [5, 4, 3, 1, 0]), open_then
    worker._runs["h"].retry_at = 0.0
    until_trained(bench, worker, "h", batch)
    assert worker._runs["h"].short == 0


def test_a_run_that_never_fits_is_refused_though_its_neighbours_have_a_batch_now_and_then(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are idle each time that it is tried, so there is always one that could be closed."""
    real, tries = Learner.train, 0

    def allocating(self: Learner, *args: Any) -> Any:
        nonlocal tries
        if self.run != "d":
            return real(self, *args)
        tries += 1
        raise NO_MEMORY[0]

    monkeypatch.setattr(Learner, "train", allocating)
    register(bench, "d")
    post(bench, "d", "x")
    for number in range(8):
        for run in RUNS[:3]:
            train(bench, worker, run, f"trickle{number}")
        if error_of(bench, "d"):
            break
    assert tries == 4, "1, 2 and 4 of them were closed for it, which is all"
    assert "did not help" in error_of(bench, "d")


def test_a_run_without_work_for_which_there_is_no_memory_waits_for_its_batch_and_takes_nobodys(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a start: where each took the place of another, none would gain, and all would be read again."""
    worker._close()
    again = Worker(bench.settings, Redis.from_url(bench.redis_url))
    failed = no_room(monkeypatch, again, "opened", NO_MEMORY[0], others=2)
    for _ in range(5):
        again._turn()
    assert (set(again.served), failed) == ({"a", "b"}, ["c"])
    assert error_of(bench, "c") is None
    train(bench, again, "c", "second")
    assert again.served.keys() == {"b", "c"}
    again._close()


def test_what_a_run_has_in_hand_for_its_vocabulary_comes_again_once_more_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is idle too: it waits for others' batches to come, and may hold a million tokens until then."""
    few = bench.settings.model_copy(update={"vocab_min_tokens": 200, "draft_vocab_size": 32})
    worker = Worker(few, Redis.from_url(bench.redis_url))
    bench.register(run="a")  # without a drafter
    first = post(bench, "a", "few")
    worker._turn()
    assert worker.served["a"].inbox.waiting == 1
    register(bench, "d")
    failed = no_room(monkeypatch, worker, "opened", NO_MEMORY[0], others=1)
    until_trained(bench, worker, "d", post(bench, "d", "x"))
    again: list[str] = []

    def watched(*args: Any, **named: Any) -> RunWorker:
        again.append(args[4])
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process, "RunWorker", watched)
    for _ in range(5):
        worker._turn()
    assert worker.served.keys() == {"d"}
    assert not again, "nothing has come for it"
    second = post(bench, "a", "more")
    until_trained(bench, worker, "a", second)
    assert is_trained(bench, "a", first)
    assert worker.served["a"].learner.journal.totals.batches == 2
    assert failed[0] == "d"
    worker._close()


def test_a_checkpoint_that_fails_when_a_run_is_closed_for_another_loses_no_batch(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._settings = bench.settings.model_copy(update={"checkpoint_seconds": 1e9})
    worker._close_idle()
    unsaved = post(bench, "a", "unsaved")
    while "a" not in worker.served or not worker.served["a"].inbox.done:
        worker._turn()
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", lambda *_: (_ for _ in ()).throw(MemoryError("no copy of the weights")))
        worker._close_idle()
    assert "a" not in worker.served
    assert not is_trained(bench, "a", unsaved)
    worker._settings = bench.settings
    until_trained(bench, worker, "a", unsaved)
    assert worker.served["a"].learner.journal.totals.batches == 2, "once"


def test_a_run_that_is_closed_for_others_has_somebody_who_looks_after_it_and_heeds_people(
    bench: Bench, worker: Worker
) -> None:
    worker._close_idle(2)

    def beat(run: str) -> float:
        return Store(bench.redis, run).worker().heartbeat or 0.0

    for run in RUNS[:2]:
        Store(bench.redis, run).set_worker({"heartbeat": 1.0})
    other = Leases(Redis.from_url(bench.redis_url))
    assert other.hold("b")
    worker._beat_once()
    assert beat("a") > time.time() - 20, "or people would be told that no worker is there"
    assert beat("b") == 1.0, "it is the other worker's"
    assert bench.redis.get(Leases.key("a")) is None
    bench.layout.run_json("a").rename(bench.layout.withdrawn("a"))  # as a deletion begins
    bench.redis.delete(WorkersStore(bench.redis, "a")._keys.worker)
    worker._beat_once()
    assert not bench.redis.exists(WorkersStore(bench.redis, "a")._keys.worker)
    bench.layout.withdrawn("a").rename(bench.layout.run_json("a"))

    async def ask() -> None:
        client = aio.Redis.from_url(bench.redis_url)
        await AsyncStore(client, "a").ask_of_drift("reset")
        await client.aclose()

    worker._turn()
    assert "a" not in worker.served
    asyncio.run(ask())
    for _ in range(2):
        worker._turn()
    assert "reset" in worker.served["a"].learner.journal.heeded
    worker._close_idle()
    for _ in range(2):
        worker._turn()
    assert not worker.served, "it was heeded once"


def test_a_closed_run_whose_heartbeat_fails_keeps_no_other_from_its_own(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker._close_idle()
    for run in RUNS[:3]:
        Store(bench.redis, run).set_worker({"heartbeat": 1.0})
    real = Layout.run_json

    def run_json(self: Layout, run: str) -> Path:
        if run == "a":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, run)

    monkeypatch.setattr(Layout, "run_json", run_json)
    worker._beat_once()
    beats = [Store(bench.redis, run).worker().heartbeat or 0.0 for run in RUNS[:3]]
    assert [beat > time.time() - 20 for beat in beats] == [False, True, True]
    assert "no heartbeat for run a" in caplog.text
    assert bench.redis.get(Leases.key("a")) is None, "another worker may have it"


def test_redis_that_went_away_while_a_run_was_opened_is_no_death(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody is closed for it: this very process lives."""
    register(bench, "d")
    with monkeypatch.context() as patch:
        patch.setattr(WorkersStore, "end", lambda *_: (_ for _ in ()).throw(RedisConnectionError("away")))
        with pytest.raises(RedisConnectionError):
            worker._turn()
    worker._runs["d"].worker = None
    worker._turn()
    assert worker.served.keys() == set(RUNS)
    assert not worker._sparing


def test_after_a_death_at_work_runs_without_work_are_not_open_beside_what_killed_it(
    bench: Bench, worker: Worker
) -> None:
    """The memory that ran out may have been theirs: a run is blamed for what it does without them."""
    worker._close()
    file = file_id(bench.layout.target("b"))
    assert file is not None
    WorkersStore(bench.redis, "b").set_worker({"working": [*file, 1, time.time()]})
    batch = post(bench, "b", "x")
    again = Worker(bench.settings, Redis.from_url(bench.redis_url))
    beside = list[set[str]]()
    learn = Learner.learn

    def watched(self: Learner, *args: Any, **named: Any) -> Any:
        beside.append(set(again.served))
        return learn(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", watched)
        until_trained(bench, again, "b", batch)
    assert beside == [{"b"}]
    for _ in range(3):
        again._turn()
    assert again.served.keys() == {"b"}
    assert [error_of(bench, run) for run in RUNS[:3]] == [None] * 3
    train(bench, again, "c", "later")
    register(bench, "d")
    again._turn()
    assert again.served.keys() == {"b", "c", "d"}, "the first drafter of a new one is to be served"
    again._close()


def test_memory_that_ran_out_is_known_by_its_cause_too_but_a_lost_rank_stays_one() -> None:
    wrapped = CheckpointError("moments cannot be read")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


def test_a_rank_that_is_lost_for_memory_ends_the_process(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = RanksLost("out of step")
    lost.__cause__ = MemoryError()
    no_room(monkeypatch, worker, "trained", lost, others=0)
    post(bench, "a", "x")
    with pytest.raises(RanksLost):
        worker._turn()


# --- a process whose memory is bounded --------------------------------------------------------------------------------

FAT = dict(CONFIG) | {"hidden_size": 256, "intermediate_size": 32_768, "vocab_size": 40}
FINGERPRINT = wire.target_fingerprint(FAT, LAYERS)
TOKENS = 20


def fat_run() -> tuple[bytes, torch.Tensor]:
    """Body of PUT /runs/{run} of some KiB, whose drafter takes 100 MB, and its moments as much again; and its head."""
    embed, head = torch.randn(40, 256) * 0.02, torch.randn(40, 256) * 0.02
    facts = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(FAT),
        "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
        "target_fingerprint": FINGERPRINT,
        "policy_version": "0",
    }
    return joined(wire.encode({"embed_tokens": as_wire(embed), "lm_head": as_wire(head)}, facts)), head


def fat_batch(run: str, name: str, head: torch.Tensor) -> bytes:
    ids = torch.randint(0, 40, (TOKENS,))
    mask = torch.ones(TOKENS, dtype=torch.uint8)
    mask[0] = 0
    last = torch.randn(TOKENS, 256).bfloat16()
    logits = last.float() @ head.T
    logprobs = torch.zeros(TOKENS)
    logprobs[1:] = torch.log_softmax(logits, -1)[torch.arange(TOKENS - 1), ids[1:]]
    tensors = {
        "input_ids": ids.int(),
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "loss_mask": mask,
        "aux_hidden": torch.randn(TOKENS, 3 * 256).bfloat16(),
        "last_hidden": last,
        "logprobs": logprobs,
        "logsumexp": torch.logsumexp(logits, -1),
    }
    facts: dict[str, Any] = {"run": run, "policy_version": 0, "rollout_ids": [name], "target_fingerprint": FINGERPRINT}
    metadata = wire.rollout_metadata(**facts, aux_layers=LAYERS)
    return joined(wire.encode({k: as_wire(v) for k, v in tensors.items()}, metadata))


@pytest.mark.timeout(300)
def test_an_honest_run_is_trained_beside_fat_idle_ones_in_a_process_whose_memory_is_bounded(
    bench: Bench, tmp_path: Path
) -> None:
    """A review: some registrations of 80 KiB held 200 MB each for ever, and the next honest run was refused."""
    body, head = fat_run()
    fat = [f"fat{number}" for number in range(2)]
    with nest(tmp_path / "log") as workers:
        pid = workers.start(bench, address_space=900 << 20, settings={"draft_vocab_size": 32})

        def trained(run: str, batch: str) -> None:
            bench.wait(lambda: is_trained(bench, run, batch) or not alive(pid), 60.0)
            assert alive(pid), "the process died"
            assert is_trained(bench, run, batch)

        for run in [*fat, "honest"]:
            bench.register(body, run=run)
            trained(run, bench.post_file(fat_batch(run, f"{run}-first", head)))
        states = {run: state_of(bench, run) for run in fat}
        for run in fat:
            trained(run, bench.post_file(fat_batch(run, f"{run}-second", head)))
            totals, windows = state_of(bench, run)
            assert totals["batches"] == 2
            assert windows > states[run][1] > 0
        assert not [run for run in [*fat, "honest"] if error_of(bench, run)]
    log = (tmp_path / "log").read_text()
    print(f"{log.count('is idle, and closed')} times an idle run was closed")
    assert "is idle, and closed" in log, "all fitted: the test shows nothing"


def state_of(bench: Bench, run: str) -> tuple[dict[str, Any], int]:
    """Totals and windows of a run's newest checkpoint."""
    newest = max(bench.layout.worker(run).glob("checkpoint-*"))
    windows = json.loads((newest / "trainer" / "trainer.json").read_text())["windows"]
    return json.loads((newest / "state.json").read_text())["totals"], windows
