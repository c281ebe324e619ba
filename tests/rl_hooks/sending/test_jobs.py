"""The queue's bound: which jobs go when there is no room, and what counts as queued."""

from __future__ import annotations

from rl_hooks.sending.jobs import Job, JobQueue


def rollout(size: int) -> Job:
    return Job("POST", "/rollouts", lambda: [], size)


def head(size: int) -> Job:
    return Job("PUT", "/head", lambda: [], size, keep=True)


def sizes(queue: JobQueue) -> list[int]:
    return [job.size_bytes for job in queue.waiting]


def test_the_oldest_rollouts_make_room_and_what_is_kept_takes_none() -> None:
    queue = JobQueue(100)
    assert queue.put(head(1000)) == 0
    assert [queue.put(rollout(size)) for size in (40, 41, 42)] == [0, 0, 1]
    assert (sizes(queue), queue.rollout_bytes, len(queue)) == ([1000, 41, 42], 83, 3)
    assert queue.put(rollout(100)) == 2
    assert sizes(queue) == [1000, 100]


def test_the_job_that_is_being_sent_counts_until_it_is_finished_and_is_never_dropped() -> None:
    queue = JobQueue(100)
    queue.put(rollout(60))
    assert queue.take().size_bytes == 60
    assert (len(queue), queue.rollout_bytes) == (1, 60)
    assert queue.put(rollout(30)) == 0
    assert queue.put(rollout(40)) == 1
    queue.finish()
    assert (len(queue), queue.rollout_bytes) == (1, 40)


def test_a_replaced_head_stays_while_a_rollout_needs_it() -> None:
    queue = JobQueue(100)
    for job in (head(1), rollout(50), head(2), head(3), rollout(50)):
        queue.put(job)
    assert sizes(queue) == [1, 50, 3, 50]
    queue.put(rollout(50))
    assert sizes(queue) == [3, 50, 50]


def test_replaced_heads_beyond_the_bound_go_with_their_rollouts() -> None:
    queue = JobQueue(100)
    dropped = [queue.put(job) for _ in range(3) for job in (head(60), rollout(10))]
    assert dropped == [0, 0, 0, 0, 1, 0]
    assert sizes(queue) == [60, 10, 60, 10]


def test_a_cleared_queue_is_empty_whatever_was_being_sent() -> None:
    queue = JobQueue(100)
    for size in (10, 20, 30):
        queue.put(rollout(size))
    queue.take()
    assert queue.clear() == 2
    queue.finish()
    assert (len(queue), queue.rollout_bytes) == (0, 0)
