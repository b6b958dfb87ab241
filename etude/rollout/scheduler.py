"""The scheduler of the embedded engine: the work of each request in the next step. It touches no tensor.

Every running request has a *context*: its prompt and its generated tokens. The cache already holds a part of it. A step
computes some of the rest of each context. It computes one token of a request that is generating, or a chunk of a prompt
within the step's token budget. A request at the end of its context draws its next token. Requests start in their order.
If blocks run out, the request that started last is preempted: it releases all its blocks and waits at the front of the
queue. Later its context is computed again, or found in the cache if its blocks were not reused.

A model with recurrent layers also has *states*: one slot for each running request, and some for states that are kept at
a border of a prompt's blocks. A context can continue cached blocks only from such a state. Parts of a prompt end at
borders of the recurrences' own chunks, so that a state has the same bits however the prompt was divided.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.observe import Mean, Metrics, Sum
from etude.protocols import KvPolicy, RunningPolicy
from etude.rollout.block_pool import NO_SLOT, ROOT, BlockPool
from etude.rollout.request import Request

STATE_CHUNK = 64
"""The number of tokens of which recurrences compute whole chunks."""
KEPT_STATES = 16
"""The number of states that are kept for later requests."""


@dataclass(frozen=True, slots=True)
class StateWork:
    """The states of recurrent layers that a work begins with, and the one that it leaves for later requests."""

    read: int
    """The slot of the states before the first token."""
    kept: int = NO_SLOT
    """The slot that gets the states after the first `border` tokens of the context."""
    border: int = 0
    node: int = ROOT
    """The node that ends there."""


NO_STATES = StateWork(NO_SLOT)
"""The states of a model without recurrent layers."""


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """The tokens `start` to `stop` of a request's context, for one step; none if another work computes the same."""

    request: Request
    start: int
    stop: int
    duplicate_of: ScheduledWork | None = None
    """The work of a request with the same context in this step, whose last hidden state serves both."""
    states: StateWork = NO_STATES

    @property
    def samples_token(self) -> bool:
        """True if the work reaches the end of the context, so that the next token can be drawn."""
        return self.stop == self.request.length


@dataclass
class SchedulerStats:
    """Counts since they were last read."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    restarts: int = 0
    static_steps: int = 0
    rows_in_vain: int = 0
    """Rows of static steps whose request had ended."""
    host_seconds: float = 0.0
    """Seconds of static steps in which the host did not wait for the device."""

    def metrics(self) -> Metrics:
        """Return the counts, and the rates that follow from them."""
        return Metrics(
            {
                "engine/steps": Sum.of(self.steps),
                "engine/prompt_tokens": Sum.of(self.prompt_tokens),
                "engine/new_tokens": Sum.of(self.new_tokens),
                "engine/finished": Sum.of(self.finished),
                "engine/preemptions": Sum.of(self.preemptions),
                "engine/requests_restarted": Sum.of(self.restarts),
                "engine/cache_hit_rate": Mean.over(self.cached_tokens, self.prompt_tokens),
                "engine/new_tokens_per_step": Mean.over(self.new_tokens, self.steps),
                "engine/static_steps": Sum.of(self.static_steps),
                "engine/rows_in_vain": Sum.of(self.rows_in_vain),
                "engine/host_ms": Mean.over(1000 * self.host_seconds, self.static_steps),
            }
        )


class Scheduler:
    """The queue and the running requests. Call `schedule`, compute, then `advance`."""

    def __init__(
        self,
        blocks: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_total_tokens: int,
        has_states: bool = False,
        replays: bool = False,
        is_ready: Callable[[Request], bool] | None = None,
    ) -> None:
        """has_states: the model has recurrent layers. replays: after a preemption, compute their drawn tokens one by
        one, as when they were drawn, because a chunk of them rounds otherwise. is_ready: returns True for a request
        that may begin; with None every request may.
        """
        self.blocks = blocks
        self._has_states = has_states
        self._replays = has_states and replays
        self._is_ready = is_ready
        self._unit = math.lcm(STATE_CHUNK, blocks.size) if has_states else 1
        """Parts of a context end at multiples of this number of tokens, and states are kept there."""
        self._aligns = True  # in a step that may compute so many tokens
        self._budget = max_num_batched_tokens  # of the step; an image that must be whole may be larger
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.table = np.zeros((max_num_seqs, -(-max_total_tokens // blocks.size)), dtype=np.int64)
        """[slot, block]: the blocks of each running request."""
        self.stats = SchedulerStats()
        self.version = 0
        self._holds_new = False
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def keeps_to_chunks(self) -> bool:
        """True if the parts of a prompt end at borders of the recurrences' chunks; always for a model without them."""
        return self.max_num_batched_tokens >= self._unit

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Remove a waiting or running request. Return False if it was neither."""
        if request in self.running:
            self._release_request(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return False
        return True

    def clear(self) -> list[Request]:
        """Remove and return all requests, and reset the prefix cache."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self.remove(request)
        self.blocks.reset_prefix_cache()
        return requests

    @property
    def has_started_requests(self) -> bool:
        """True if a request runs, or waits after a preemption."""
        return bool(self.running) or any(request.has_started for request in self.waiting)

    @property
    def has_work(self) -> bool:
        """True if `schedule` would return work."""
        return bool(self.running) or bool(self.waiting and self._may_begin(self.waiting[0]))

    @property
    def starts_next(self) -> bool:
        """True if the next step begins a waiting request, which has a slot and enough blocks then."""
        if not self.waiting or len(self.running) >= min(self.max_num_seqs, self.blocks.available):
            return False
        request = self.waiting[0]
        if not self._may_begin(request):
            return False
        size, length = self.blocks.size, request.length
        cached_blocks, _ = self.blocks.match_prefix(request.keys[:length], (length - 1) // size)
        starts = -(-length // size) - len(cached_blocks) + len(self.running) <= self.blocks.available
        self.blocks.release(cached_blocks)
        return starts

    def hold_new(self, hold: bool) -> None:
        """Begin no request that has not begun before, until this is called with False."""
        self._holds_new = hold

    def set_version(self, version: int, running: RunningPolicy = "continue", kv: KvPolicy = "keep") -> None:
        """Record that the weights have changed. No later request uses keys and values of the old ones.

        running: `restart` begins running requests anew, where they may be. kv: the others keep their keys and values,
        or are computed again, first in the queue and in their order.
        """
        self.blocks.reset_prefix_cache()
        self.version = version
        for request in [request for request in self.waiting if request.has_started]:
            self._restart(request, running)
        for request in self.running[::-1]:
            if self._restart(request, running) or kv == "recompute":
                self._release_request(request)
                self.waiting.appendleft(request)

    def _restart(self, request: Request, running: RunningPolicy) -> bool:
        """Begin a started request anew, if that is the policy and it may be."""
        before = request.generated
        restarted = running == "restart" and request.restart()
        self.stats.restarts += restarted and before > 0
        return restarted

    def _may_begin(self, request: Request) -> bool:
        if self._holds_new and not request.has_started:
            return False
        return self._is_ready is None or self._is_ready(request)

    def schedule(self, max_tokens: int | None = None) -> list[ScheduledWork]:
        """Return the work of the next step, of at most `max_tokens` tokens; empty only if nothing is under way."""
        budget, max_num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if max_tokens is not None:
            generating = sum(request.length - request.computed == 1 for request in self.running)
            budget, max_num_seqs = min(budget, max_tokens - generating), min(max_num_seqs, max_tokens)
        self._aligns = budget >= self._unit
        self._budget = budget
        works: list[ScheduledWork] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = request.length - request.computed
            if count > 1:
                count = self._end(request, request.computed, budget) - request.computed
                budget -= count
            if count and self.grow(request, request.computed + count):
                works.append(self._make_work(request, request.computed, request.computed + count))
            index += 1
        first_works: dict[bytes, ScheduledWork] = {}
        least = self._unit if self._aligns else 1
        while (
            self.waiting and budget >= least and len(self.running) < max_num_seqs and self._may_begin(self.waiting[0])
        ):
            request = self.waiting[0]
            duplicate_of = first_works.get(key := request.keys[: request.length].tobytes())
            start = self._start_request(request, duplicate_of)
            if start is None:
                break
            stop = self._end(request, start, budget)
            budget -= stop - start
            work = self._make_work(request, start, stop, duplicate_of)
            works.append(work)
            if (
                duplicate_of is None
                and work.samples_token
                and start <= request.length // self.blocks.size * self.blocks.size
            ):
                first_works[key] = work
        self.stats.steps += 1
        return works

    def advance(self, works: list[ScheduledWork]) -> None:
        """Record that this work is done: the cache holds its keys and values."""
        for work in works:
            work.request.computed = work.stop
            if work.states.kept != NO_SLOT:
                self.blocks.states.keep(work.states.node, work.states.kept)

    def grow(self, request: Request, length: int) -> bool:
        """Allocate blocks for so many tokens to a running request; preempt those that started after it if needed."""
        while len(request.blocks) * self.blocks.size < length:
            if self.blocks.available:
                self._append_block(request, self.blocks.allocate())
                continue
            last = self.running[-1]
            self._release_request(last)
            self.waiting.appendleft(last)
            self.stats.preemptions += 1
            if last is request:
                return False
        return True

    def mark_computed(self, request: Request, length: int) -> None:
        """Record that the cache holds the keys and values of the first `length` tokens, and register the full blocks.

        It is for steps that are computed without a `ScheduledWork`, by a model without states.
        """
        self._register_filled(request, length)
        request.computed = length

    def finish(self, request: Request) -> None:
        """Remove a running request that has finished."""
        self.stats.finished += 1
        self._release_request(request)

    def _make_work(
        self, request: Request, start: int, stop: int, duplicate_of: ScheduledWork | None = None
    ) -> ScheduledWork:
        """Create the work, and register the blocks that it fills at once, for other requests in the same step."""
        states = self._register_filled(request, stop)
        request.state_slot = request.slot
        return ScheduledWork(request, start, stop, duplicate_of, states)

    def _register_filled(self, request: Request, stop: int) -> StateWork:
        """Register the blocks that the first `stop` tokens of a context fill. Return its states."""
        size = self.blocks.size
        states = StateWork(request.state_slot) if self._has_states else NO_STATES
        filled = stop // size
        if filled <= request.registered_blocks or request.version != self.version:
            return states
        border = request.prompt_length // self._unit * self._unit
        for block in range(request.registered_blocks, filled):
            keys = request.keys[block * size : (block + 1) * size]
            request.node = self.blocks.register(request.blocks[block], request.node, keys)
            if (block + 1) * size == border and self._has_states:
                kept = self.blocks.states.reserve(request.node)
                states = StateWork(request.state_slot, kept, border, request.node)
        request.registered_blocks = filled
        return states

    def _end(self, request: Request, start: int, budget: int) -> int:
        """Return where the next work of a context ends, which begins at `start` and has at most `budget` tokens."""
        end = request.length
        if self._replays and start < end:
            end = request.prompt_length if start < request.prompt_length else start + 1
        stop = min(end, start + budget)
        if request.images is not None:
            stop = request.images.end_whole(start, stop, room=budget >= self._budget)
        if stop == end or not self._aligns:
            return stop
        return max(stop // self._unit * self._unit, start)

    def _start_request(self, request: Request, duplicate_of: ScheduledWork | None) -> int | None:
        """Give a waiting request a slot and the blocks of its whole context.

        Returns how many tokens the cache holds already; None if there are too few blocks.
        """
        size, length = self.blocks.size, request.length
        cached_blocks, node = self.blocks.match_prefix(
            request.keys[:length], length // size if duplicate_of else (length - 1) // size
        )
        request.state_slot = NO_SLOT
        if self._has_states and duplicate_of is None:
            cached_blocks, node, request.state_slot = self.blocks.cut_to_state(cached_blocks)
        assert duplicate_of is None or len(cached_blocks) == length // size, (
            "the full blocks of a duplicate are registered"
        )
        missing = -(-length // size) - len(cached_blocks)
        if missing + len(self.running) > self.blocks.available:  # each running request may soon need one more
            self.blocks.release(cached_blocks)
            assert self.running, "a request that does not fit into the whole cache was accepted"
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.slot = self._slots.pop()
        request.version = self.version
        request.registered_blocks = len(cached_blocks)
        request.node = node
        request.mark_started()
        request.blocks = []
        for block in cached_blocks:
            self._append_block(request, block)
        for _ in range(missing):
            self._append_block(request, self.blocks.allocate())
        start = length if duplicate_of else len(cached_blocks) * size
        self.stats.prompt_tokens += length
        self.stats.cached_tokens += start
        return start

    def _append_block(self, request: Request, block: int) -> None:
        self.table[request.slot, len(request.blocks)] = block
        request.blocks.append(block)

    def _release_request(self, request: Request) -> None:
        """Release the slot and the blocks of a running request."""
        self.running.remove(request)
        self._slots.append(request.slot)
        self.blocks.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.registered_blocks = 0
        request.node = ROOT
