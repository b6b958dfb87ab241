"""Static steps, launched one ahead: the host launches a step before it reads the tokens of the step before.

    consumes       the running requests of a scheduler, if all of them draw their next token
    produces       their tokens, one step later
    waits for      the device, when it reads
    unblocked by   the end of the step that it reads

A request that ends by its length is not in the step after. One that ends by a token or a string is in one more step,
and that row is drawn in vain. Its keys go to its own last block, which no other request can have found. A later owner
of the block writes after it, because all steps run on one stream.

What changes a request or the weights reads first: a command, a step of other work, a preemption.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from etude.rollout.device_sampling import can_draw_on_device, needs_filters
from etude.rollout.request import Request
from etude.rollout.sampling import SampledTokens, log_probabilities
from etude.rollout.scheduler import Scheduler
from etude.rollout.slot_state import NewBlock
from etude.rollout.static_step import StaticStep, StepKey
from etude.rollout.step_graphs import StepLauncher

MIN_BLOCKS = 4
"""The least number of blocks that the contexts of a step are bounded by. The next ones are twice as many each."""


class DrawnTokens(NamedTuple):
    """The tokens that a step drew."""

    requests: Sequence[Request]
    sampled: SampledTokens


class _Row(NamedTuple):
    """A row of a step: a request with its context at that time."""

    request: Request
    blocks: list[int]
    """The list of its blocks; another one since it was released."""
    length: int
    """The number of tokens of its context, with the newest, which the step computes."""


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that the device computes, or has computed."""

    rows: Sequence[_Row]
    results: Tensor
    """[3, rows] on the host, once the step has ended; see `StaticStep`."""
    ended: torch.cuda.Event | None
    """None if it has ended."""


class StepPipeline:
    """The static steps of one engine, of which at most one is under way between its turns."""

    def __init__(self, scheduler: Scheduler, step: StaticStep, launcher: StepLauncher) -> None:
        """launcher: of the steps of `step`."""
        self.model = step.model
        self.launcher = launcher
        self._scheduler = scheduler
        self._step = step
        self._state = step.state
        self._launched: deque[_LaunchedStep] = deque()
        self._joined: dict[int, _Row] = {}
        """The last owner of each slot's state on the device, with the length there."""

    @property
    def is_under_way(self) -> bool:
        """True if a step was launched and not read."""
        return bool(self._launched)

    def launch(self) -> bool:
        """Launch a step that draws a token for each running request. Return False if other work is next."""
        rows = self._next_rows()
        if not rows:
            return False
        scheduler = self._scheduler
        joining: list[Request] = []
        new_blocks: list[NewBlock] = []
        for row in rows:
            request = row.request
            held = len(row.blocks)
            scheduler.grow(request, row.length)
            if self._has_joined(row):
                new_blocks += [
                    NewBlock(request.slot, held + more, block) for more, block in enumerate(row.blocks[held:])
                ]
            else:
                joining.append(request)
            self._joined[request.slot] = row._replace(length=row.length + 1)
        if joining:
            self._state.join(joining)
        if new_blocks:
            self._state.grow(new_blocks)
        key = self._key(rows)
        slots = [row.request.slot for row in rows]
        self._step.set_rows(slots, [row.length for row in rows], key.rows, scheduler.table)
        self.launcher.run(key)
        self._launched.append(self._fetch_results(rows))
        scheduler.stats.steps += 1
        scheduler.stats.static_steps += 1
        return True

    def read(self, *, leave: int = 0) -> Iterator[DrawnTokens]:
        """Yield the tokens of each launched step, until so many are left. Append them before the next are taken."""
        while len(self._launched) > leave:
            yield self._read(self._launched.popleft())

    def _next_rows(self) -> list[_Row]:
        """Return the rows of the next step; none if a running request has other work, or a waiting one begins."""
        scheduler = self._scheduler
        if scheduler.starts_next:
            return []
        under_way = {id(row.request) for step in self._launched for row in step.rows}
        rows: list[_Row] = []
        missing = 0
        for request in scheduler.running:
            is_under_way = id(request) in under_way
            row = _Row(request, request.blocks, request.length + is_under_way)
            if row.length >= request.limit:
                continue  # it ends with the token that is under way
            if not is_under_way and not self._may_join(row):
                return []
            missing += -(-row.length // scheduler.blocks.size) - len(row.blocks)
            rows.append(row)
        return rows if missing <= scheduler.blocks.available else []

    def _may_join(self, row: _Row) -> bool:
        """Return True if the next work of a request is to draw a token, and the device can draw it."""
        request = row.request
        return request.length - request.computed == 1 and can_draw_on_device(request.sampling_state)

    def _has_joined(self, row: _Row) -> bool:
        """Return True if the device has the state of a request as it is in this row."""
        joined = self._joined.get(row.request.slot)
        return joined is not None and joined.blocks is row.blocks and joined.length == row.length

    def _key(self, rows: Sequence[_Row]) -> StepKey:
        """Return the shapes of a step with these rows: the next larger ones of a few."""
        size, widest = self._scheduler.blocks.size, self._state.table.shape[1]
        count = 1
        while count < len(rows):
            count *= 2
        needed = -(-max(row.length for row in rows) // size) if self._step.has_bound else widest
        blocks = MIN_BLOCKS
        while blocks < needed:
            blocks *= 2
        filtered = any(
            needs_filters(row.request.sampling_state, row.length - row.request.prompt_length) for row in rows
        )
        return StepKey(min(count, len(self._state.row_slots)), min(blocks, widest), filtered)

    def _fetch_results(self, rows: Sequence[_Row]) -> _LaunchedStep:
        """Begin to copy the results of the step that was launched last to the host."""
        results = self._step.results[:, : len(rows)]
        if results.device.type != "cuda":
            return _LaunchedStep(rows, results.clone(), None)
        copied = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        copied.copy_(results, non_blocking=True)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
        return _LaunchedStep(rows, copied, ended)

    def _read(self, step: _LaunchedStep) -> DrawnTokens:
        """Wait for a step, and return its tokens, without those of requests that have ended since."""
        stats = self._scheduler.stats
        if step.ended is not None:
            start = time.perf_counter()
            step.ended.synchronize()
            stats.host_seconds -= time.perf_counter() - start
        kept = [index for index, row in enumerate(step.rows) if row.request.blocks is row.blocks]
        stats.rows_in_vain += len(step.rows) - len(kept)
        requests = [step.rows[index].request for index in kept]
        ids, _, model_logp = step.results[:, kept].tolist()
        logp = log_probabilities(step.results[1, kept])
        raw_logp = []
        for place, index in enumerate(kept):
            request, _, length = step.rows[index]
            self._scheduler.mark_computed(request, length)
            unmodified = request.sampling_state.is_unmodified(request.generated)
            raw_logp.append(logp[place] if unmodified else model_logp[place])
        return DrawnTokens(requests, SampledTokens([int(token) for token in ids], logp, raw_logp, {}, {}, {}))
