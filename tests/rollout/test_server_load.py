"""The number of requests that a server gets: fewer as soon as its memory is full, more while it has room."""

from __future__ import annotations

from dataclasses import dataclass, field

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


# -- scripted servers -------------------------------------------------------------------------------------------------


@dataclass
class ScriptedServer:
    """A server in memory: one call of `tick` is a second. It always has as many requests as its limit allows."""

    slots: int = 1024
    """The most requests that it computes at once."""
    blocks: int = 1_000_000
    """The blocks of its cache. A request takes one more in each second, and ends after `length` seconds."""
    length: int = 40
    starts: int = 1024
    """The most prompts that it reads in a second."""
    running: list[int] = field(default_factory=list)
    """The blocks of each running request, the one that started last at the end."""
    waiting: int = 0
    preemptions: int = 0
    finished: int = 0

    def tick(self, limit: int) -> ServerLoad:
        """Serve so many requests for a second, and return the load."""
        self.waiting += max(limit - len(self.running) - self.waiting, 0)
        self.running = [each + 1 for each in self.running]
        self.finished += sum(each >= self.length for each in self.running)
        self.running = [each for each in self.running if each < self.length]
        room = min(self.waiting, self.slots - len(self.running), self.blocks - sum(self.running), self.starts)
        self.running += [1 + number % 7 for number in range(max(room, 0))]
        self.waiting -= max(room, 0)
        while sum(self.running) > self.blocks:
            self.running.pop()
            self.waiting += 1
            self.preemptions += 1
        return ServerLoad(len(self.running), self.waiting, sum(self.running) / self.blocks, self.preemptions)


def serve(server: ScriptedServer, pace: AdaptiveConcurrencyLimit, seconds: int) -> list[int]:
    """The limits over so many seconds."""
    return [pace.update(server.tick(pace.limit)) for _ in range(seconds)]


def test_without_a_limit_in_the_options_the_load_finds_one() -> None:
    server, pace = ScriptedServer(blocks=8_000), AdaptiveConcurrencyLimit(None)
    limits = serve(server, pace, 400)
    assert limits[0] <= 136, "it begins with 128 requests"
    assert max(limits) > 300, "and gets more while nothing waits there"
    preempted, finished = server.preemptions, server.finished
    serve(server, pace, 400)
    fixed = ScriptedServer(blocks=8_000)
    for _ in range(800):
        fixed.tick(1024)
    assert server.preemptions - preempted < 0.05 * fixed.preemptions, "it is not sent more than its cache holds"
    assert server.finished - finished > 0.4 * fixed.finished


def test_with_room_a_server_gets_all_that_it_computes_at_once() -> None:
    server, pace = ScriptedServer(), AdaptiveConcurrencyLimit(None)
    assert serve(server, pace, 60)[-1] == 1024 and not server.preemptions


def test_a_server_with_a_lower_limit_of_its_own_gets_no_more_than_that() -> None:
    server, pace = ScriptedServer(slots=48), AdaptiveConcurrencyLimit(128)
    limits = serve(server, pace, 600)
    assert min(limits) == 48, "the requests that wait there could go to another server"
    assert sum(limit > 52 for limit in limits[20:]) < 30, "it is tried with more only now and then"


def test_prompts_that_are_read_one_after_the_other_are_no_limit_of_the_server() -> None:
    server, pace = ScriptedServer(starts=4, length=400), AdaptiveConcurrencyLimit(128)
    assert set(serve(server, pace, 120)) == {128}


def test_the_preemptions_of_a_publish_and_the_figures_of_one_long_step_change_nothing() -> None:
    pace = AdaptiveConcurrencyLimit(64)
    pace.update(ServerLoad(running=64, waiting=0, kv_cache_usage=0.9, preemptions=0))
    pace.on_publish()
    assert pace.update(ServerLoad(running=8, waiting=56, kv_cache_usage=0.5, preemptions=64)) == 64
    for _ in range(20):
        assert pace.update(ServerLoad(running=8, waiting=56, kv_cache_usage=0.5, preemptions=64)) == 64
    assert pace.update(ServerLoad(running=60, waiting=4, kv_cache_usage=0.9, preemptions=68)) == 45


def test_an_old_report_of_retracted_requests_counts_once() -> None:
    pace = AdaptiveConcurrencyLimit(64)
    pace.update(ServerLoad(running=64, waiting=0, kv_cache_usage=0.9, preemptions=0, retracted=2))
    for running in (64, 64, 0, 0):
        assert pace.update(ServerLoad(running, 0, 0.1, preemptions=0, retracted=2)) <= 64
    assert pace.limit >= 48


def test_retracted_requests_count_as_preempted() -> None:
    pace = AdaptiveConcurrencyLimit(64)
    assert pace.update(ServerLoad(running=60, waiting=4, kv_cache_usage=0.9, preemptions=0, retracted=2)) == 45
    assert pace.reason == "60 run, 2 were preempted, 4 wait, 90% of its cache is in use"
