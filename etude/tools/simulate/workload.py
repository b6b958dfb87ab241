"""The rollouts of a simulation: how long each one is sampled and waits, and how it ends.

A rollout follows from its task and its sample alone. So every staleness bound, split and cluster sees the same
rollouts, and their results differ by these alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.tools.simulate.options import SimulateOptions

BLOCK = 64
"""Tasks whose rollouts are generated at once."""
BLOCKS_KEPT = 4
MAX_TURNS = 256


class Turn(NamedTuple):
    """One call to the model, and the time until the next call."""

    work: float
    """The sampled tokens; in a replay the seconds of sampling."""
    wait: float
    """Seconds of a tool or an environment behind it, in which no engine works for the rollout."""


class SimulatedRollout(NamedTuple):
    """A rollout that can be simulated."""

    turns: tuple[Turn, ...]
    tokens: int
    metric: float
    failures: int = 0
    """Number of attempts that fail before one succeeds."""
    before: float = 0.0
    """Seconds from the start of an attempt to its first turn, in which an agent prepares."""


class Workload(Protocol):
    """The source of simulated rollouts."""

    def draw(self, task: int, sample: int) -> SimulatedRollout:
        """Return a rollout; the same one for the same numbers."""
        ...


@dataclass(frozen=True)
class _Block:
    """The rollouts of a block of tasks, in flat arrays. The turns of a rollout follow each other."""

    tokens: Sequence[int]
    waits: Sequence[float]
    first: Sequence[int]
    """Index of the first turn of each rollout, and the number of turns behind the last one."""
    metrics: Sequence[float]
    failures: Sequence[int]


class SyntheticWorkload:
    """Rollouts from distributions: lognormal tokens and waits, and a geometric number of turns."""

    def __init__(self, options: SimulateOptions) -> None:
        self._options = options
        self._block = lru_cache(BLOCKS_KEPT)(self._draw_block)

    def draw(self, task: int, sample: int) -> SimulatedRollout:
        """Return a rollout; the same one for the same numbers."""
        number, within = divmod(task, BLOCK)
        block = self._block(number)
        index = within * self._options.group_size + sample
        first, end = block.first[index], block.first[index + 1]
        turns = tuple(Turn(block.tokens[turn], block.waits[turn]) for turn in range(first, end))
        drawn = block.tokens[first] if end == first + 1 else sum(block.tokens[first:end])
        return SimulatedRollout(turns, drawn, block.metrics[index], block.failures[index])

    def _draw_block(self, number: int) -> _Block:
        options = self._options
        draws = np.random.default_rng([options.seed, number])
        rollouts = BLOCK * options.group_size
        counts = np.ones(rollouts, np.int64)
        if options.turns > 1:
            counts = np.minimum(draws.geometric(1 / options.turns, rollouts), MAX_TURNS)
        first = np.concatenate([[0], np.cumsum(counts)])
        tokens = np.maximum(draws.lognormal(np.log(options.tokens), options.spread, first[-1]), 1).astype(np.int64)
        counts, tokens = self._cut_off(counts, first, tokens)
        first = np.concatenate([[0], np.cumsum(counts)])
        waits = np.zeros(first[-1])
        if options.wait_s:
            waits = draws.lognormal(np.log(options.wait_s), options.wait_spread, first[-1])
            waits[first[1:] - 1] = 0.0  # nothing follows the last turn
        level = np.repeat(draws.random(BLOCK) < options.zero_variance, options.group_size)
        metrics = np.where(level, 0.5, draws.random(rollouts))
        failures = (
            draws.geometric(1 - options.failing, rollouts) - 1 if options.failing else np.zeros(rollouts, np.int64)
        )
        return _Block(tokens.tolist(), waits.tolist(), first.tolist(), metrics.tolist(), failures.tolist())

    def _cut_off(
        self, counts: NDArray[np.int64], first: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of turns and the tokens of rollouts that end at the token limit."""
        rollout = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(tokens) - tokens
        before -= before[first[:-1]][rollout]  # earlier tokens of the same rollout
        kept = before < self._options.max_tokens
        tokens = np.minimum(tokens, self._options.max_tokens - before)[kept]
        return np.bincount(rollout[kept], minlength=len(counts)), tokens


class TraceWorkload:
    """The rollouts of a run that was recorded. A task beyond its last one gets the rollouts of an earlier task."""

    def __init__(self, groups: Mapping[int, Mapping[int, SimulatedRollout]]) -> None:
        """groups: the rollouts of each task by sample, the tasks from 0 on."""
        self._groups = groups
        self._whole = sorted(task for task, group in groups.items() if group)
        self.exhausted = 0
        """Number of rollouts that were taken from an earlier task."""

    def draw(self, task: int, sample: int) -> SimulatedRollout:
        """Return a rollout; the same one for the same numbers."""
        group = self._groups.get(task, {})
        if sample in group:
            return group[sample]
        self.exhausted += 1
        group = self._groups[self._whole[task % len(self._whole)]]
        return group[sorted(group)[sample % len(group)]]
