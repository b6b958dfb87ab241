"""The queue, the leases and the reminders, at times that the test chooses."""

from __future__ import annotations

from etude.store.queue.lease_table import FINISH_GRACE_S, MAX_STALE_DEADLINES, LeaseTable
from etude.store.queue.rollout_limits import RolloutLimits
from etude.store.queue.rollout_queue import AttemptId

LIMITS = RolloutLimits(timeout_s=100.0, unresponsive_s=10.0, queue_timeout_s=50.0)


def passed(work: LeaseTable, now: float) -> list[tuple[str, int]]:
    return [(due.cause, due.attempt_id.rollout) for due in work.pop_due(now)]


def test_a_reminder_comes_at_its_time_and_once() -> None:
    work = LeaseTable()
    work.enqueue(1, "train", LIMITS, 0.0)
    work.start_lease(AttemptId(2, 0), "a", LIMITS, 5.0)
    assert work.next_deadline() == 15.0 and passed(work, 14.9) == []
    assert passed(work, 15.0) == [("silence", 2)]
    assert passed(work, 49.9) == [] and passed(work, 50.0) == [("queue", 1)]
    over = 105.0 + FINISH_GRACE_S
    assert passed(work, over - 0.1) == [] and passed(work, over) == [("time", 2)] and work.next_deadline() is None


def test_a_heartbeat_postpones_the_deadline() -> None:
    work, key = LeaseTable(), AttemptId(2, 0)
    work.start_lease(key, "a", LIMITS, 0.0)
    for now in range(1, 96, 9):
        work.record_heartbeat(key, float(now))
        assert passed(work, now + 8.0) == []
    work.record_heartbeat(AttemptId(3, 0), 50.0)
    work.record_heartbeat(key, 99.0)
    over = 100.0 + FINISH_GRACE_S
    assert passed(work, over - 0.1) == [] and passed(work, over) == [("time", 2)]


def test_ended_work_has_no_reminder() -> None:
    work = LeaseTable()
    work.enqueue(1, "train", LIMITS, 0.0)
    work.start_lease(AttemptId(2, 0), "a", LIMITS, 0.0)
    work.remove(1)
    del work.leases[AttemptId(2, 0)]
    work.enqueue(1, "train", LIMITS, 30.0)
    assert passed(work, 79.9) == [], "its first wait was over"
    assert passed(work, 80.0) == [("queue", 1)]


def test_the_number_of_reminders_is_bounded_by_open_work() -> None:
    work, most = LeaseTable(), 0
    for id in range(20_000):
        work.enqueue(id, "train", LIMITS, 0.0)
        work.start_lease(AttemptId(id, 0), "a", LIMITS, 0.0)
        del work.leases[AttemptId(id, 0)]
        most = max(most, len(work._deadlines))
    assert most <= MAX_STALE_DEADLINES + 8


def test_evaluations_are_next_each_use_in_its_order() -> None:
    work = LeaseTable()
    assert work.next_queued() is None and work.queued_since() is None
    for id, use in enumerate(("train", "val", "train", "val"), 1):
        work.enqueue(id, use, LIMITS, float(id))  # type: ignore[arg-type]  # mypy takes the uses for any text
    work.remove(2)
    work.enqueue(2, "val", LIMITS, 5.0)
    assert (work.num_queued, work.queued_since()) == (4, 1.0)
    order = []
    while (id := work.next_queued()) is not None:
        order.append(id)
        work.start_lease(AttemptId(id, 0), "a", LIMITS, 6.0)
    assert order == [4, 2, 1, 3] and work.num_queued == 0
    assert {due.cause for due in work.pop_due(56.0)} == {"silence"}, "nothing is queued any more"
