"""The number of requests that a server gets: fewer as soon as its memory is full, more while it has room."""

from __future__ import annotations

from etude.rollout.server_load import AdaptiveConcurrencyLimit, ServerLoad


def test_the_limit_shrinks_at_preemptions_and_grows_again_with_room() -> None:
    pace = AdaptiveConcurrencyLimit(64)
    assert pace.update(ServerLoad(running=64, waiting=0, kv_cache_usage=0.9, preemptions=0)) == 64
    assert pace.update(ServerLoad(running=60, waiting=4, kv_cache_usage=0.99, preemptions=3)) == 45
    # Neither full nor with room.
    assert pace.update(ServerLoad(running=45, waiting=0, kv_cache_usage=0.9, preemptions=3)) == 45
    limits = [
        pace.update(ServerLoad(running=pace.limit, waiting=0, kv_cache_usage=0.5, preemptions=3)) for _ in range(20)
    ]
    assert limits == sorted(limits) and limits[0] == 47 and limits[-1] == 64


def test_a_measurement_without_running_requests_shrinks_the_limit_gradually() -> None:
    pace = AdaptiveConcurrencyLimit(64)
    pace.update(ServerLoad(running=64, waiting=0, kv_cache_usage=0.9, preemptions=0))
    assert pace.update(ServerLoad(running=0, waiting=64, kv_cache_usage=0.9, preemptions=64)) == 48


def test_preemptions_before_the_first_measurement_do_not_count() -> None:
    assert (
        AdaptiveConcurrencyLimit(8).update(ServerLoad(running=8, waiting=0, kv_cache_usage=0.5, preemptions=100)) == 8
    )


def test_the_limit_does_not_grow_on_little_work_and_never_falls_to_zero() -> None:
    pace = AdaptiveConcurrencyLimit(16)
    pace.update(ServerLoad(running=1, waiting=3, kv_cache_usage=1.0, preemptions=0))
    assert pace.limit == 1
    assert pace.update(ServerLoad(running=0, waiting=0, kv_cache_usage=0.0, preemptions=0)) == 1
    assert pace.update(ServerLoad(running=1, waiting=0, kv_cache_usage=0.1, preemptions=0)) == 2
