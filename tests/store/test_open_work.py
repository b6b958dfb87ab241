"""The queue, the leases and the reminders, told any time one likes."""

from __future__ import annotations

from etude.store.desk import Key
from etude.store.limits import Limits
from etude.store.open_work import HAND_IN_S, SPARE, OpenWork

LIMITS = Limits(timeout_s=100.0, unresponsive_s=10.0, queue_timeout_s=50.0)


def passed(work: OpenWork, now: float) -> list[tuple[str, int]]:
    return [(due.cause, due.key.rollout) for due in work.due(now)]


def test_a_reminder_comes_at_its_time_and_once() -> None:
    work = OpenWork()
    work.wait(1, LIMITS, 0.0)
    work.lend(Key(2, 0), "a", LIMITS, 5.0)
    assert work.next_due() == 15.0 and passed(work, 14.9) == []
    assert passed(work, 15.0) == [("silence", 2)]
    assert passed(work, 49.9) == [] and passed(work, 50.0) == [("queue", 1)]
    over = 105.0 + HAND_IN_S
    assert passed(work, over - 0.1) == [] and passed(work, over) == [("time", 2)] and work.next_due() is None


def test_who_is_heard_is_looked_at_later() -> None:
    work, key = OpenWork(), Key(2, 0)
    work.lend(key, "a", LIMITS, 0.0)
    for now in range(1, 96, 9):
        work.heard(key, float(now))
        assert passed(work, now + 8.0) == []
    work.heard(Key(3, 0), 50.0)
    work.heard(key, 99.0)
    over = 100.0 + HAND_IN_S
    assert passed(work, over - 0.1) == [] and passed(work, over) == [("time", 2)]


def test_where_nobody_could_be_heard_nobody_was_silent() -> None:
    work = OpenWork()
    work.lend(Key(2, 0), "a", LIMITS, 0.0)
    work.forgive(60.0)
    assert passed(work, 69.9) == [] and passed(work, 70.0) == [("silence", 2)]


def test_what_is_over_is_not_reminded_of() -> None:
    work = OpenWork()
    work.wait(1, LIMITS, 0.0)
    work.lend(Key(2, 0), "a", LIMITS, 0.0)
    del work.queue[1], work.leases[Key(2, 0)]
    work.wait(1, LIMITS, 30.0)
    assert passed(work, 79.9) == [], "its first wait was over"
    assert passed(work, 80.0) == [("queue", 1)]


def test_reminders_are_no_more_than_the_work_that_is_open() -> None:
    work, most = OpenWork(), 0
    for id in range(20_000):
        work.wait(id, LIMITS, 0.0)
        del work.queue[id]
        work.lend(Key(id, 0), "a", LIMITS, 0.0)
        del work.leases[Key(id, 0)]
        most = max(most, len(work._due))
    assert most <= SPARE + 8
