"""A router that makes several engines look like one.

One engine answers a whole group, so that it computes the prompt once. A request goes where a request with the same
prompt went. It also follows a prompt that begins its own, as the turns of a conversation do. Any other request goes to
the engine with the fewest requests under way. If engines are deterministic, the answers do not depend on the routing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from etude.images import PromptImages, keyed_ids
from etude.protocols import Ids, TokenGenerator
from etude.records import Completion, SamplingParams

MAX_IDLE_PREFIXES = 64
"""Prompts without a request under way whose engine is remembered, since a conversation may continue."""


def prompt_keys(prompt: Ids, images: PromptImages | None) -> Ids:
    """Return the ids of a prompt, with numbers that tell its images apart in place of image tokens."""
    return prompt if images is None else keyed_ids(prompt, images.spans)


@dataclass
class _Affinity:
    """The engine of all requests that begin with a prompt."""

    engine: int
    active: int = 0


class Router:
    """A `TokenGenerator` over several others. All requests come from one event loop."""

    def __init__(self, engines: Sequence[TokenGenerator]) -> None:
        self._engines = engines
        self._load = [0] * len(engines)
        self._affinities: OrderedDict[bytes, _Affinity] = OrderedDict()  # by their prompts, the latest used last
        self._prefix_lengths: Counter[int] = Counter()  # of those prompts

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation, by one of the engines."""
        with self._choose_engine(prompt_keys(prompt, images)) as engine:
            return await self._engines[engine].generate(prompt, sampling, images=images, on_start=on_start)

    def _has_capacity(self, engine: int) -> bool:  # noqa: ARG002
        """Return True if this engine can take one more request."""
        return True

    @contextmanager
    def _choose_engine(self, keys: Ids) -> Iterator[int]:
        """Choose the engine of a prompt by its `prompt_keys`. The request counts as its load inside this context."""
        affinity = self._find_affinity(np.ascontiguousarray(keys, np.int32).tobytes())
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
        """Return the affinity of a known prompt that this one begins with, or a new one.

        An affinity without requests under way leaves an engine with over 1.5 times the load of another, plus one. It
        also leaves an engine without capacity.
        """
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
        """Return the longest known prompt that this one begins with."""
        lengths = sorted((length for length in self._prefix_lengths if length <= len(prompt)), reverse=True)
        return next((prompt[:length] for length in lengths if prompt[:length] in self._affinities), None)

    def _drop_idle_prefixes(self) -> None:
        """Forget the prompts that were idle for longest."""
        idle = [prompt for prompt, affinity in self._affinities.items() if not affinity.active]
        for prompt in idle[:-MAX_IDLE_PREFIXES]:
            del self._affinities[prompt]
            self._prefix_lengths[len(prompt)] -= 1
            if not self._prefix_lengths[len(prompt)]:
                del self._prefix_lengths[len(prompt)]
