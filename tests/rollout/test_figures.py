"""How many requests a server is given: fewer as soon as its memory is full, more while it has room."""

from __future__ import annotations

from etude.rollout.figures import Figures, Pace


def test_it_shrinks_where_answers_are_put_off_and_grows_again_where_there_is_room() -> None:
    pace = Pace(64)
    assert pace.see(Figures(running=64, waiting=0, cache=0.9, preempted=0)) == 64
    assert pace.see(Figures(running=60, waiting=4, cache=0.99, preempted=3)) == 45
    assert pace.see(Figures(running=45, waiting=0, cache=0.9, preempted=3)) == 45  # neither full nor roomy
    found = [pace.see(Figures(running=pace.limit, waiting=0, cache=0.5, preempted=3)) for _ in range(20)]
    assert found == sorted(found) and found[0] == 47 and found[-1] == 64


def test_a_moment_at_which_none_runs_says_nothing_of_how_many_could() -> None:
    pace = Pace(64)
    pace.see(Figures(running=64, waiting=0, cache=0.9, preempted=0))
    assert pace.see(Figures(running=0, waiting=64, cache=0.9, preempted=64)) == 48


def test_what_was_put_off_before_it_was_watched_does_not_count() -> None:
    assert Pace(8).see(Figures(running=8, waiting=0, cache=0.5, preempted=100)) == 8


def test_it_does_not_grow_on_little_work_and_never_ends_at_none() -> None:
    pace = Pace(16)
    pace.see(Figures(running=1, waiting=3, cache=1.0, preempted=0))
    assert pace.limit == 1
    assert pace.see(Figures(running=0, waiting=0, cache=0.0, preempted=0)) == 1
    assert pace.see(Figures(running=1, waiting=0, cache=0.1, preempted=0)) == 2
