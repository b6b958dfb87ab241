"""Who computes what in the next step of the embedded engine. Bookkeeping only; no tensor is touched.

Every running request has a *context*, its prompt and what it has generated, of which the cache already holds a part.
A step computes some of the rest for each: one token for a request that is generating, a piece of the prompt for one
that has just come, within a budget of tokens a step. Whoever reaches the end of its context draws its next token.
Requests that have come begin in their order. When blocks run out, the one that began last gives all of its blocks
back and waits in front of the queue; later its context is computed again, or found again if nobody needed the memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from etude.rollout.block_pool import ROOT, BlockPool
from etude.rollout.request import Request

__all__ = ["ScheduledWork", "Scheduler", "SchedulerStats"]


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """In this step compute tokens `start` to `stop` of a request's context; nothing if another computes the same."""

    request: Request
    start: int
    stop: int
    duplicate_of: ScheduledWork | None = None
    """The work of a request with the very same context in this step, whose last hidden state serves both."""

    @property
    def samples_token(self) -> bool:
        """Whether it reaches the end of the context, so that the next token can be drawn."""
        return self.stop == self.request.length


@dataclass
class SchedulerStats:
    """What has happened since the counts were last read."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    preemptions: int = 0


class Scheduler:
    """The queue and the running requests; `schedule`, then `advance` by what was computed."""

    def __init__(
        self, blocks: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_total_tokens: int
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.table = np.zeros((max_num_seqs, -(-max_total_tokens // blocks.size)), dtype=np.int64)
        """[slot, block]: the blocks of each running request."""
        self.stats = SchedulerStats()
        self.version = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """To the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Out of the queue or the running; whether it was there."""
        if request in self.running:
            self._release_request(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return False
        return True

    def clear(self) -> list[Request]:
        """Everybody out, and nothing known; returns who was there."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self.remove(request)
        self.blocks.reset_prefix_cache()
        return requests

    def set_version(self, version: int) -> None:
        """The weights are others now: what runs goes on with its old keys and values, and nobody new uses them."""
        self.blocks.reset_prefix_cache()
        self.version = version

    def schedule(self, max_tokens: int | None = None) -> list[ScheduledWork]:
        """The work of the next step; empty only if nothing is under way. `most`: it has no more tokens than these."""
        budget, max_num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if max_tokens is not None:
            generating = sum(request.length - request.computed == 1 for request in self.running)
            budget, max_num_seqs = min(budget, max_tokens - generating), min(max_num_seqs, max_tokens)
        works: list[ScheduledWork] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = request.length - request.computed
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count and self._allocate_blocks(request, request.computed + count):
                works.append(self._make_work(request, request.computed, request.computed + count))
            index += 1
        first_works: dict[bytes, ScheduledWork] = {}
        while self.waiting and budget > 0 and len(self.running) < max_num_seqs:
            request = self.waiting[0]
            duplicate_of = first_works.get(key := request.tokens[: request.length].tobytes())
            start = self._start_request(request, duplicate_of)
            if start is None:
                break
            stop = min(request.length, start + budget)
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
        """The work was done: the cache holds it."""
        for work in works:
            work.request.computed = work.stop

    def finish(self, request: Request) -> None:
        """A running request is through."""
        self.stats.finished += 1
        self._release_request(request)

    def _make_work(
        self, request: Request, start: int, stop: int, duplicate_of: ScheduledWork | None = None
    ) -> ScheduledWork:
        """Make the blocks that this work fills known at once: whoever computes in the same step may read them."""
        size = self.blocks.size
        if request.version == self.version:
            for block in range(request.registered_blocks, stop // size):
                tokens = request.tokens[block * size : (block + 1) * size]
                request.node = self.blocks.register(request.blocks[block], request.node, tokens)
            request.registered_blocks = max(request.registered_blocks, stop // size)
        return ScheduledWork(request, start, stop, duplicate_of)

    def _start_request(self, request: Request, duplicate_of: ScheduledWork | None) -> int | None:
        """Give a waiting request a slot and the blocks of its whole context; returns what of it is known, or None."""
        size, length = self.blocks.size, request.length
        cached_blocks, node = self.blocks.match_prefix(
            request.tokens[:length], length // size if duplicate_of else (length - 1) // size
        )
        assert duplicate_of is None or len(cached_blocks) == length // size, "a twin's full blocks are known"
        missing = -(-length // size) - len(cached_blocks)
        if missing + len(self.running) > self.blocks.available:  # who runs may soon need a block each
            self.blocks.release(cached_blocks)
            assert self.running, "a request that does not fit into the whole cache was let in"
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.slot = self._slots.pop()
        request.version, request.registered_blocks, request.node = self.version, len(cached_blocks), node
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

    def _allocate_blocks(self, request: Request, length: int) -> bool:
        """Give a running request the blocks for so many tokens, at the cost of those that began after it."""
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

    def _append_block(self, request: Request, block: int) -> None:
        self.table[request.slot, len(request.blocks)] = block
        request.blocks.append(block)

    def _release_request(self, request: Request) -> None:
        """Take everything back that a running request holds."""
        self.running.remove(request)
        self._slots.append(request.slot)
        self.blocks.release(request.blocks)
        request.blocks, request.computed, request.registered_blocks, request.node = [], 0, 0, ROOT
