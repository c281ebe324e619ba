"""Processes are killed, stopped, starved of disk and cut off from Redis; nothing that was acknowledged is lost.

`DRAFTALIGN_CHAOS_KILLS` sets how many times the worker is killed (default 12), `DRAFTALIGN_CHAOS_SEED` when.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.worker_fixtures import Bench, Nest, World, alive, final_state, nest, states, wait_until_gone
from torch import Tensor

from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch, Enqueued

KILLS = int(os.environ.get("DRAFTALIGN_CHAOS_KILLS", "12"))
SEED = int(os.environ.get("DRAFTALIGN_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + 10 * KILLS)]


@pytest.fixture(scope="module")
def shared_nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with nest(tmp_path_factory.mktemp("nest") / "log") as made:
        yield made


@pytest.fixture
def workers(shared_nest: Nest) -> Iterator[Nest]:
    yield shared_nest
    shared_nest.kill_all()


def finished(bench: Bench) -> int:
    return sum(s != "queued" for s in states(bench))


def settled(bench: Bench) -> bool:
    """Every batch has ended, and the worker has gone on to its next turn."""
    return finished(bench) == len(bench.posted) and not bench.spooled()


def test_sigkill_at_random_moments_leaves_the_state_of_an_undisturbed_run(
    bench: Bench, workers: Nest, tmp_path: Path
) -> None:
    """Weights, optimizer, counters and scores bit for bit, after a dozen kills while batches keep coming."""
    print(f"DRAFTALIGN_CHAOS_SEED={SEED} DRAFTALIGN_CHAOS_KILLS={KILLS}")
    rng = random.Random(SEED)
    bench.begin()
    names = [f"batch{i}" for i in range(KILLS + 4)]
    coming = iter(names)
    for _ in range(3):
        bench.post(next(coming))
    for _ in range(KILLS):
        before = finished(bench)
        pid = workers.start(bench, lease_seconds=0.3)
        # Some progress between kills: an entry that is there at every one of three deaths counts as their cause.
        bench.wait(lambda before=before: finished(bench) > before)  # type: ignore[misc]
        time.sleep(rng.random() * 0.15)
        workers.kill(pid)
        bench.post(next(coming))
    for name in coming:
        bench.post(name)
    pid = workers.start(bench, lease_seconds=0.3)
    bench.wait(lambda: settled(bench))
    workers.kill(pid, signal.SIGTERM)
    found = final_state(bench)

    bench.redis.flushall()
    with Bench(tmp_path / "calm", bench.redis_url) as calm:
        calm.begin()
        for name in names:
            calm.post(name)
        calm.drain(calm.worker())
        assert found == final_state(calm)


def test_an_entry_that_kills_its_worker_is_dead_after_three_deliveries_and_its_neighbours_live(
    bench: Bench, workers: Nest
) -> None:
    """All in one claim, so that the neighbours are in hand at every death."""
    bench.begin()
    names = ["a", "b", "killer", "c", "d"]
    batches = {name: bench.post(name) for name in names}
    deaths = 0
    many = {"claim_tokens": 100_000, "checkpoint_seconds": 60.0}
    while True:
        pid = workers.start(bench, settings=many, dies_of="killer/0", lease_seconds=0.3)
        bench.wait(lambda pid=pid: not alive(pid) or finished(bench) == len(names))  # type: ignore[misc]
        if alive(pid):
            break
        deaths += 1
    workers.kill(pid, signal.SIGTERM)
    assert deaths == 3
    (left,) = bench.spooled()
    assert left.startswith(batches["killer"]), "only the reaper takes it, so there is time to look at it"
    assert {n: bench.state(b) for n, b in batches.items()} == dict.fromkeys(names, "trained") | {"killer": "dead"}
    assert bench.reason(batches["killer"]) == "killed its worker 3 times"
    assert [letter["batch_id"] for letter in bench.queue.dead_letters()] == [batches["killer"]]
    assert set(bench.store.scores()) == set(batches.values()) - {batches["killer"]}
    assert bench.totals()["batches"] == 4
    assert bench.queue.depth() == (0, 0)


def test_a_second_worker_waits_and_takes_over_when_the_first_dies(bench: Bench, workers: Nest) -> None:
    bench.begin()
    first = workers.start(bench)
    bench.post("a")
    bench.wait(lambda: settled(bench))
    holder = bench.redis.get("da:{default}:lease")
    second = workers.start(bench)
    bench.post("b")
    bench.wait(lambda: settled(bench))
    assert bench.redis.get("da:{default}:lease") == holder, "the first still has it"
    workers.kill(first)
    bench.post("c")
    bench.wait(lambda: settled(bench))
    assert bench.redis.get("da:{default}:lease") not in (holder, None)
    workers.kill(second, signal.SIGTERM)
    assert states(bench) == ["trained"] * 3
    assert bench.totals()["batches"] == 3
    assert bench.redis.get("da:{default}:lease") is None, "an orderly stop gives the lease back"


def test_a_stopped_worker_drops_the_run_when_it_wakes_up_after_its_lease(bench: Bench, workers: Nest) -> None:
    bench.begin()
    sleeper = workers.start(bench)
    bench.post("a")
    bench.wait(lambda: settled(bench))
    os.kill(sleeper, signal.SIGSTOP)
    try:
        successor = workers.start(bench)
        bench.post("b")
        bench.wait(lambda: settled(bench))
        holder = bench.redis.get("da:{default}:lease")
    finally:
        os.kill(sleeper, signal.SIGCONT)
    bench.wait(lambda: f"{sleeper} WARNING run default is another worker's now" in workers.log.read_text())
    bench.post("c")
    bench.wait(lambda: settled(bench))
    assert bench.redis.get("da:{default}:lease") == holder
    workers.kill(sleeper, signal.SIGTERM)
    assert bench.redis.get("da:{default}:lease") == holder, "it does not give back what is another's"
    newest = bench.checkpoint()
    assert bench.totals()["batches"] == 3, "its orderly stop wrote no checkpoint over the successor's"
    workers.kill(successor, signal.SIGTERM)
    assert bench.checkpoint() >= newest
    assert states(bench) == ["trained"] * 3
    assert bench.totals()["batches"] == 3


def test_a_worker_that_is_stopped_in_the_middle_of_a_batch_does_not_undo_its_heirs_work(
    bench: Bench, workers: Nest
) -> None:
    """SIGSTOP at a random moment while batches flow, the successor finishes them, then the sleeper wakes up."""
    bench.begin()
    rng = random.Random(SEED)
    for round_number in range(3):
        for i in range(4):
            bench.post(f"{round_number}/{i}")
        sleeper = workers.start(bench, lease_seconds=0.3)
        bench.wait(lambda: finished(bench) % 4 == 1)
        time.sleep(rng.random() * 0.1)
        os.kill(sleeper, signal.SIGSTOP)
        successor = workers.start(bench, lease_seconds=0.3)
        bench.wait(lambda: settled(bench))
        os.kill(sleeper, signal.SIGCONT)
        time.sleep(0.3)
        workers.kill(sleeper, signal.SIGTERM)
        workers.kill(successor, signal.SIGTERM)
    assert states(bench) == ["trained"] * 12
    assert bench.totals()["batches"] == 12
    assert set(bench.store.scores()) == set(bench.posted)


def test_a_full_disk_loses_nothing_and_the_worker_goes_on_when_there_is_room(bench: Bench, tmp_path: Path) -> None:
    """Also the worker that is restarted meanwhile."""
    with nest(tmp_path / "log") as workers:  # a log of its own: the limit is one for every file
        full = tmp_path / "full"
        bench.begin()
        full.touch()
        # The drafter of a checkpoint has 16,712 bytes.
        limits: dict[str, Any] = {"largest_file": 10_000, "largest_file_while": str(full)}
        bench.worker()  # publishes the initial drafter while there is room
        batches = [bench.post("a"), bench.post("b")]

        def failures(pid: int) -> int:
            return sum(
                line.startswith(f"{pid} ERROR") and "nothing was acknowledged, trying again" in line
                for line in workers.log.read_text().splitlines()
            )

        for _ in range(5):
            pid = workers.start(bench, **limits)
            bench.wait(lambda pid=pid: failures(pid) >= 2)  # type: ignore[misc]
            assert alive(pid)
            workers.kill(pid, signal.SIGTERM)
        assert [bench.state(b) for b in batches] == ["queued", "queued"]
        pid = workers.start(bench, **limits)
        bench.post("c")
        bench.wait(lambda: failures(pid))
        assert finished(bench) == 0
        full.unlink()
        bench.wait(lambda: settled(bench))
        workers.kill(pid, signal.SIGTERM)
        assert states(bench) == ["trained"] * 3
        assert bench.totals()["batches"] == 3
        assert set(bench.store.scores()) == set(bench.posted)


def test_redis_and_api_killed_while_rollouts_flow_lose_nothing_that_was_acknowledged(
    tmp_path: Path, workers: Nest
) -> None:
    """A trainer that tries again until it gets its 2xx; the server under it dies three times, the API once."""
    world = World()
    state_dir = tmp_path / "state"
    server = OwnValkey(state_dir)
    server.start()
    service = RunningService(state_dir=state_dir, redis_url=server.url)
    bench = Bench(state_dir, server.url, world)
    pid = 0
    try:
        body = world.run_file(drafter=world.drafter())
        assert service.client.put("/runs/default", content=body, headers=HEADERS).status_code == 201
        pid = workers.start(bench)
        sent = 24
        acknowledged: list[str] = []

        def post_all() -> None:
            for i in range(sent):
                file = world.rollout_file(f"r{i}", rollouts=4)
                while True:
                    try:
                        reply = service.post(file)
                    except Exception:  # noqa: BLE001 - the API itself is being restarted: anything may happen
                        time.sleep(0.05)
                        continue
                    if reply.status_code in (200, 202):
                        acknowledged.append(reply.json()["batch_id"])
                        break
                    assert reply.status_code == 503, reply.text
                    time.sleep(0.05)

        poster = threading.Thread(target=post_all)
        poster.start()
        for _ in range(3):
            reached = len(acknowledged) + 4
            bench.wait(lambda reached=reached: len(acknowledged) >= min(reached, sent))  # type: ignore[misc]
            os.kill(server.process.pid, signal.SIGKILL)
            wait_until_gone(server.process.pid)
            time.sleep(0.2)
            server.stop()
            server.start()
        old, service = service, RunningService(state_dir=state_dir, redis_url=server.url)
        old.stop()
        poster.join(60)
        assert not poster.is_alive()
        assert len(set(acknowledged)) == sent
        bench.posted = acknowledged
        bench.wait(lambda: finished(bench) == sent, seconds=60)
        dead = [bench.reason(b) for b in acknowledged if bench.state(b) != "trained"]
        assert dead == []
        assert set(bench.store.scores()) == set(acknowledged)
        for batch_id in acknowledged[:3]:
            assert service.client.get(f"/rollouts/{batch_id}").json()["state"] == "trained"
        workers.kill(pid, signal.SIGTERM)
        assert bench.totals()["batches"] == sent
        named = {(bench.queue.batch(b) or {}).get("blob") for b in acknowledged}
        assert not named & set(bench.spooled()), "the reaper gets only what Redis never heard of"
        assert bench.queue.counters()["accepted_total"] == sent
    finally:
        if pid:
            workers.kill(pid)
        service.stop()
        bench.redis.close()
        server.stop()


def test_the_reason_of_a_dead_batch_can_be_read_from_the_api(
    serve: Callable[..., RunningService], workers: Nest
) -> None:
    """By the batch's id and by that of any rollout in it."""
    world, service = World(), serve()
    with Bench(service.settings.state_dir, str(service.settings.redis_url.get_secret_value()), world) as bench:  # type: ignore[union-attr]

        def spoil(tensors: dict[str, Tensor]) -> None:
            tensors["aux_hidden"].fill_(float("nan"))

        reply = service.client.put("/runs/mine", content=world.run_file(drafter=world.drafter()), headers=HEADERS)
        assert reply.status_code == 201
        file = world.rollout_file("x", run="mine", change=spoil)
        reply = service.post(file)
        assert reply.status_code == 202
        batch_id = reply.json()["batch_id"]
        pid = workers.start(bench)

        def fate(name: str) -> dict[str, Any]:
            found: dict[str, Any] = service.client.get(f"/rollouts/{name}", params={"run": "mine"}).json()
            return found

        bench.wait(lambda: fate(batch_id)["state"] == "dead")
        workers.kill(pid, signal.SIGTERM)
        assert "aux_hidden holds NaN" in fate("x/0")["reason"]


def test_an_upload_whose_first_answer_from_redis_was_lost_keeps_its_file(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library tries again and hears of a duplicate: that is the upload itself."""
    world, service = World(), serve()
    assert service.client.put("/runs/default", content=world.run_file(), headers=HEADERS).status_code == 201
    real = AsyncRolloutQueue.enqueue

    async def twice(self: AsyncRolloutQueue, batch: Batch, **limits: Any) -> Enqueued:
        await real(self, batch, **limits)
        return await real(self, batch, **limits)

    monkeypatch.setattr(AsyncRolloutQueue, "enqueue", twice)
    first = service.post(world.rollout_file("a"))
    assert first.status_code in (200, 202)
    (kept,) = service.spooled()
    assert service.post(world.rollout_file("a")).status_code == 200
    assert service.spooled() == [kept], "a real duplicate still leaves nothing"
