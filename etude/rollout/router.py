"""Several engines as one: whoever asks need not know which of them answers.

A group is answered by one engine, which then computes its prompt once: a request goes where one with the same prompt
went, or one whose prompt begins it, as the turns of a conversation do. Anything else goes to the engine with the fewest
requests under way. Where engines are deterministic, what is answered does not depend on any of this.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from etude.protocols import Ids, TokenGenerator
from etude.records import Completion, SamplingParams

__all__ = ["Router"]

MAX_IDLE_PREFIXES = 64
"""Prompts of which nothing is under way, and whose engine is remembered: a conversation may go on."""


@dataclass
class _Affinity:
    """Where the requests that begin with a prompt go."""

    engine: int
    active: int = 0


class Router:
    """A `TokenGenerator` over others. All requests come from one event loop."""

    def __init__(self, engines: Sequence[TokenGenerator]) -> None:
        self._engines = engines
        self._load = [0] * len(engines)
        self._affinities: OrderedDict[bytes, _Affinity] = OrderedDict()  # by their prompts, the latest used last
        self._prefix_lengths: Counter[int] = Counter()  # of those prompts

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation, by one of the engines."""
        with self._choose_engine(prompt) as engine:
            return await self._engines[engine].generate(prompt, sampling, on_start=on_start)

    def _has_capacity(self, engine: int) -> bool:  # noqa: ARG002
        """Whether this engine takes one request more."""
        return True

    @contextmanager
    def _choose_engine(self, prompt: Ids) -> Iterator[int]:
        """The engine that a prompt goes to, which has it to do within."""
        affinity = self._find_affinity(np.ascontiguousarray(prompt, np.int32).tobytes())
        engine = affinity.engine
        affinity.active += 1
        self._load[engine] += 1
        try:
            yield engine
        finally:
            affinity.active -= 1
            self._load[engine] -= 1
            self._drop_idle_prefixes()

    def _find_affinity(self, prompt: bytes) -> _Affinity:
        """The home of a prompt that this one begins with, or a new one. Where nothing of it is under way, it moves away
        from an engine that has half as much again to do as another; and away from one that takes none."""
        candidates = [engine for engine in range(len(self._engines)) if self._has_capacity(engine)]
        least_loaded = min(candidates, key=self._load.__getitem__)
        prefix = self._longest_known_prefix(prompt)
        if prefix is None:
            self._prefix_lengths[len(prompt)] += 1
            affinity = self._affinities[prompt] = _Affinity(least_loaded)
            return affinity
        self._affinities.move_to_end(prefix)
        affinity = self._affinities[prefix]
        overloaded = not affinity.active and self._load[affinity.engine] > 1.5 * self._load[least_loaded] + 1
        if overloaded or not self._has_capacity(affinity.engine):
            affinity.engine = least_loaded
        return affinity

    def _longest_known_prefix(self, prompt: bytes) -> bytes | None:
        """The longest known prompt that this one begins with."""
        lengths = sorted((length for length in self._prefix_lengths if length <= len(prompt)), reverse=True)
        return next((prompt[:length] for length in lengths if prompt[:length] in self._affinities), None)

    def _drop_idle_prefixes(self) -> None:
        """Let go of the prompts that nobody has come back to for long."""
        idle = [prompt for prompt, affinity in self._affinities.items() if not affinity.active]
        for prompt in idle[:-MAX_IDLE_PREFIXES]:
            del self._affinities[prompt]
            self._prefix_lengths[len(prompt)] -= 1
            if not self._prefix_lengths[len(prompt)]:
                del self._prefix_lengths[len(prompt)]
