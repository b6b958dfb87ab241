"""The scheduler alone: order, budget, blocks, preemption. Scheduled tokens count as computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.records import SamplingParams
from etude.rollout.block_pool import NO_SLOT, BlockPool, KeptStates
from etude.rollout.request import Request
from etude.rollout.sampling import DrawnToken
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
        if work.request.append_token(DrawnToken(7, -1.0, -1.0, None, None, None), 0) is not None:
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
            if work.request.append_token(DrawnToken(7, -1.0, -1.0, None, None, None), 0) is not None:
                scheduler.finish(work.request)
    assert min(sizes) > 0 and max(sizes) == most
    assert scheduler.stats.finished == len(requests) and scheduler.stats.preemptions > 0


def recurrent_scheduler(kept: int = 2, **options: Any) -> Scheduler:
    """Return a scheduler of a model with states, in blocks of 16 tokens."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_total_tokens": 400, "has_states": True}
    return Scheduler(BlockPool(100, 16, KeptStates(range(4, 4 + kept))), **{**sizes, **options})


def test_a_prompt_of_a_recurrent_model_ends_its_parts_at_chunks_and_keeps_the_state_at_its_last_one() -> None:
    scheduler = recurrent_scheduler()
    first = request_of(150)
    scheduler.add(first)
    (work,) = step(scheduler)
    assert (work.start, work.stop, work.states.read) == (0, 128, NO_SLOT)
    assert (work.states.border, work.states.kept) == (128, 4)
    (rest,) = step(scheduler)
    assert (rest.start, rest.stop) == (128, 150)
    assert (rest.states.read, rest.states.kept) == (first.slot, NO_SLOT)
    scheduler.add(request_of(150))
    again = step(scheduler)[-1]
    assert (again.start, again.stop, again.states.read) == (128, 150, 4), "it continues from the kept state"


def test_a_kept_state_is_found_only_after_the_step_that_writes_it_and_goes_with_its_block() -> None:
    scheduler = recurrent_scheduler(max_num_batched_tokens=512)
    scheduler.add(request_of(140))
    other = request_of(200)
    other.tokens[:140] = scheduler.waiting[0].tokens[:140]
    scheduler.add(other)
    assert spans(step(scheduler)) == [(0, 140), (0, 200)], "the state of the first is not written yet"
    scheduler.clear()
    scheduler.add(request_of(140))
    assert spans(step(scheduler)) == [(0, 140)]


def test_the_state_unused_for_longest_is_given_up() -> None:
    states = KeptStates([7, 8])
    for node in (1, 2):
        states.keep(node, states.reserve(node))
    assert states.find(1) == 7
    assert states.reserve(1) == NO_SLOT, "it has one"
    assert states.reserve(3) == 8, "node 2 was unused for longest"
    assert states.find(2) == NO_SLOT
    states.keep(3, 8)
    states.forget(1)
    assert states.reserve(4) == 7
    assert KeptStates().reserve(1) == NO_SLOT


def test_drawn_tokens_of_a_preempted_recurrent_request_are_computed_one_by_one() -> None:
    for replays, wanted in ((True, [(0, 20), (20, 21), (21, 22), (22, 23)]), (False, [(0, 23)])):
        scheduler = recurrent_scheduler(replays=replays)
        request = request_of(20)
        scheduler.add(request)
        for _ in range(3):
            step(scheduler)
        scheduler._release_request(request)
        scheduler.waiting.appendleft(request)
        seen = []
        while request.computed < 23:
            (work,) = scheduler.schedule()
            scheduler.advance([work])
            seen.append((work.start, work.stop))
        assert seen == wanted


def test_a_recurrent_model_goes_on_in_steps_that_are_shorter_than_its_chunks() -> None:
    scheduler = recurrent_scheduler()
    scheduler.add(request_of(40))
    works = scheduler.schedule(16)
    scheduler.advance(works)
    assert spans(works) == [(0, 16)]
    assert spans(scheduler.schedule(16)) == [(16, 32)]
