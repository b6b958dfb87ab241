"""The scheduler alone: order, budget, blocks, preemption. Scheduled tokens count as computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.records import SamplingParams
from etude.rollout.block_pool import BlockPool
from etude.rollout.request import Request
from etude.rollout.scheduler import ScheduledWork, Scheduler


def request_of(length: int, max_tokens: int = 100, seed: int = 0) -> Request:
    prompt = np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(prompt, sampling, limit=1000, vocab_size=50, tokenizer=None)


def scheduler_of(blocks: int = 100, size: int = 4, **options: Any) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, size), **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_total_tokens": 400, **options}
    )


def step(scheduler: Scheduler) -> list[ScheduledWork]:
    """Schedule, and add a token to every request at the end of its context."""
    works = scheduler.schedule()
    drawing = [work for work in works if work.samples_token]
    scheduler.advance(works)
    for work in drawing:
        if work.request.append_token(7, -1.0, -1.0, 0, None) is not None:
            scheduler.finish(work.request)
    return works


def spans(works: list[ScheduledWork]) -> list[tuple[int, int]]:
    return [(work.start, work.stop) for work in works]


def test_a_long_prompt_is_computed_in_pieces_while_others_go_on() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(10, seed=1))
    scheduler.add(request_of(70, seed=2))
    assert spans(step(scheduler)) == [(0, 10), (0, 22)]
    assert spans(step(scheduler)) == [(10, 11), (22, 54)]
    assert spans(step(scheduler)) == [(11, 12), (54, 70)]
    assert spans(step(scheduler)) == [(12, 13), (70, 71)]


def test_a_group_that_comes_together_is_computed_once() -> None:
    scheduler = scheduler_of()
    for _ in range(3):
        scheduler.add(request_of(10))
    works = scheduler.schedule()
    assert spans(works) == [(0, 10), (10, 10), (10, 10)]
    assert works[1].duplicate_of is works[0] and all(work.samples_token for work in works)
    assert scheduler.blocks.in_use == 2 + 3  # two full blocks between them, and a half-full one each


def test_later_requests_compute_only_what_is_not_cached() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(10))
    step(scheduler)
    scheduler.add(request_of(10))
    assert spans(step(scheduler)) == [(10, 11), (8, 10)]


def test_other_weights_share_nothing_with_what_was_computed_before() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(10))
    step(scheduler)
    scheduler.set_version(1)
    for _ in range(8):  # the old request fills blocks during this, with the old keys before them
        step(scheduler)
    scheduler.add(request_of(10))
    assert spans(step(scheduler))[1] == (0, 10)


def test_recomputed_requests_run_again_in_their_order_and_before_new_ones() -> None:
    scheduler = scheduler_of(max_num_seqs=3)
    first, second, third = (request_of(9, seed=seed) for seed in range(3))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.add(third)
    scheduler.set_version(1, kv="recompute")
    assert scheduler.blocks.in_use == 0 and scheduler.stats.restarts == 0
    assert [work.request for work in step(scheduler)] == [first, second, third]
    assert first.length == second.length == 11 and spans(step(scheduler)) == [(10, 11)] * 2 + [(9, 10)]


def test_a_preempted_request_runs_again_while_new_ones_are_held() -> None:
    scheduler = scheduler_of(blocks=8, size=4)
    first, second, third = request_of(11, seed=1), request_of(11, seed=2), request_of(3, seed=3)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.stats.preemptions:
        step(scheduler)
    scheduler.add(third)
    scheduler.hold_new(True)
    first.limit, second.limit = first.length + 1, second.length + 1
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.stats.finished == 2 and not scheduler.has_started_requests and list(scheduler.waiting) == [third]
    scheduler.hold_new(False)
    assert [work.request for work in step(scheduler)] == [third]


def test_the_last_to_start_is_preempted_and_restarts_first() -> None:
    scheduler = scheduler_of(blocks=8, size=4)
    first, second, third = request_of(11, seed=1), request_of(11, seed=2), request_of(3, seed=3)
    for request in (first, second, third):
        scheduler.add(request)
    while not scheduler.stats.preemptions:
        step(scheduler)
    assert scheduler.running == [first] and list(scheduler.waiting) == [second, third]
    assert second.blocks == [] and second.length > 11
    first.limit = first.length + 1
    while second not in scheduler.running:
        works = step(scheduler)
    assert works[-1].request in (second, third)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_all_requests_finish_with_their_tokens_and_no_block_is_lost(seed: int) -> None:
    """Random lengths, arrivals and departures on little memory."""
    random = np.random.default_rng(seed)
    scheduler = scheduler_of(blocks=20, size=4, max_num_seqs=5, max_num_batched_tokens=16)
    lengths = random.integers(1, 39, (int(random.integers(1, 12)), 2))
    todo = [request_of(int(prompt), int(new), seed=int(random.integers(3))) for prompt, new in lengths]
    everybody, left = list(todo), set()
    for _ in range(3000):
        if todo and random.random() < 0.3:
            scheduler.add(todo.pop())
        if not todo and not scheduler.running and not scheduler.waiting:
            break
        if len(scheduler.running) > 1 and random.random() < 0.05:
            gone = scheduler.running[int(random.integers(len(scheduler.running)))]
            left.add(id(gone))
            assert scheduler.remove(gone) and not scheduler.remove(gone)
        works = step(scheduler)
        assert works or not scheduler.running
        assert sum(work.stop - work.start for work in works if work.stop - work.start > 1) <= 16
        assert len(scheduler.running) <= 5
        for request in scheduler.running:
            assert len(set(request.blocks)) == len(request.blocks) >= -(-request.computed // 4)
            assert scheduler.table[request.slot, : len(request.blocks)].tolist() == request.blocks
    assert not scheduler.running and not scheduler.waiting
    assert all(request.length == request.limit for request in everybody if id(request) not in left)
    assert scheduler.blocks.in_use == 0


def test_a_step_has_no_more_tokens_than_a_pass_may_compute() -> None:
    """This holds with all requests in their prompt, with all in their answer, and when memory runs out."""
    scheduler, most = scheduler_of(blocks=24, max_num_seqs=30), 12
    requests = [request_of(3 + 7 * (row % 5), max_tokens=25, seed=row // 2) for row in range(40)]
    for request in requests:
        scheduler.add(request)
    sizes = []
    while scheduler.running or scheduler.waiting:
        works = scheduler.schedule(most)
        sizes.append(sum(work.stop - work.start for work in works))
        drawing = [work for work in works if work.samples_token]
        scheduler.advance(works)
        for work in drawing:
            if work.request.append_token(7, -1.0, -1.0, 0, None) is not None:
                scheduler.finish(work.request)
    assert min(sizes) > 0 and max(sizes) == most
    assert scheduler.stats.finished == len(requests) and scheduler.stats.preemptions > 0
