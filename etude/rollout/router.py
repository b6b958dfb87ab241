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

from etude.protocols import Generate, Ids
from etude.records import Completion, SamplingParams

__all__ = ["Router"]

REMEMBERED = 64
"""Prompts of which nothing is under way, and whose engine is remembered: a conversation may go on."""


@dataclass
class _Home:
    """Where the requests that begin with a prompt go."""

    engine: int
    under_way: int = 0


class Router:
    """A `Generate` over others. All requests come from one event loop."""

    def __init__(self, engines: Sequence[Generate]) -> None:
        self._engines = engines
        self._load = [0] * len(engines)
        self._homes: OrderedDict[bytes, _Home] = OrderedDict()  # by their prompts, the latest used last
        self._lengths: Counter[int] = Counter()  # of those prompts

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation, by one of the engines."""
        with self._chosen(prompt) as chosen:
            return await self._engines[chosen].generate(prompt, sampling, begun=begun)

    def _takes(self, engine: int) -> bool:  # noqa: ARG002
        """Whether this engine takes one request more."""
        return True

    @contextmanager
    def _chosen(self, prompt: Ids) -> Iterator[int]:
        """The engine that a prompt goes to, which has it to do within."""
        home = self._home(np.ascontiguousarray(prompt, np.int32).tobytes())
        chosen = home.engine
        home.under_way += 1
        self._load[chosen] += 1
        try:
            yield chosen
        finally:
            home.under_way -= 1
            self._load[chosen] -= 1
            self._forget()

    def _home(self, prompt: bytes) -> _Home:
        """The home of a prompt that this one begins with, or a new one. Where nothing of it is under way, it moves away
        from an engine that has half as much again to do as another; and away from one that takes none."""
        taking = [engine for engine in range(len(self._engines)) if self._takes(engine)]
        least = min(taking, key=self._load.__getitem__)
        opening = self._opening(prompt)
        if opening is None:
            self._lengths[len(prompt)] += 1
            home = self._homes[prompt] = _Home(least)
            return home
        self._homes.move_to_end(opening)
        home = self._homes[opening]
        crowded = not home.under_way and self._load[home.engine] > 1.5 * self._load[least] + 1
        if crowded or not self._takes(home.engine):
            home.engine = least
        return home

    def _opening(self, prompt: bytes) -> bytes | None:
        """The longest known prompt that this one begins with."""
        fitting = sorted((length for length in self._lengths if length <= len(prompt)), reverse=True)
        return next((prompt[:length] for length in fitting if prompt[:length] in self._homes), None)

    def _forget(self) -> None:
        """Let go of the prompts that nobody has come back to for long."""
        idle = [prompt for prompt, home in self._homes.items() if not home.under_way]
        for prompt in idle[:-REMEMBERED]:
            del self._homes[prompt]
            self._lengths[len(prompt)] -= 1
            if not self._lengths[len(prompt)]:
                del self._lengths[len(prompt)]
