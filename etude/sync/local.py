"""Publishing within one process: nothing is moved where nothing has to be.

An engine whose model shares its storage with the trainer's computes with the new weights already; it is told their
version. Any other has one copy of its own, which it refreshes in place between two tokens, tensor by tensor: cast to
the dtype that it computes in, and laid out as it holds them. No second copy is ever made: weights that are brought
together as they are asked for are let go of one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from etude.errors import ConfigError
from etude.observe import Metrics, Sum

__all__ = ["LocalEngine", "LocalWeightSync"]


class Weights(Protocol):
    """What an engine computes with."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Each of them once, by its published name, as the tensor itself."""
        ...


class LocalEngine(Protocol):
    """An engine in this process, as its carrier sees it."""

    @property
    def model(self) -> Weights:
        """What it computes with."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Between two tokens, write these over its own and take their version; nothing cached under others is used
        again. None at all where its own memory was written already.

        If it fails halfway the engine is out of service until a swap that succeeds.
        """
        ...


class LocalWeightSync:
    """A `WeightSync` to one engine in this process."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, like: Iterable[tuple[str, Tensor]] | None = None
    ) -> Metrics:
        """Bring the engine to these weights; returns the bytes that were written for it and the time it took.

        Weights that do not fit are refused before anything is written. like: the tensors whose values they are, by the
        same names, where they are made as they are asked for, on the engine's thread; otherwise all of them are taken
        first.
        """
        begun = time.perf_counter()
        if like is None:
            like = weights = list(weights)
        written = self._bytes_to_write(dict(like))
        await self._engine.update_weights(weights if written else (), version)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        return Metrics({"publish_bytes": Sum.of(written), "publish_ms": Sum.of(milliseconds)})

    def _bytes_to_write(self, published: dict[str, Tensor]) -> int:
        """How many bytes of the engine's memory these weights are not in already."""
        held = dict(self._engine.model.named_weights())
        odd = sorted(held.keys() ^ published.keys())
        if odd:
            owner, other = ("trainer", "engine") if odd[0] in published else ("engine", "trainer")
            raise ConfigError(
                f"The weights were not published: the {owner} has `{odd[0]}` and the {other} has not ({len(odd)} names "
                f"differ). Give both the same model."
            )
        for name, new in published.items():
            if held[name].shape != new.shape:
                raise ConfigError(
                    f"The weights were not published: `{name}` is {list(new.shape)} in the trainer and "
                    f"{list(held[name].shape)} in the engine. Give both the same model."
                )
        return sum(held[name].nbytes for name, new in published.items() if not _same_memory(held[name], new))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same numbers at the same place, read the same way."""
    return (a.data_ptr(), a.dtype, a.device, a.stride()) == (b.data_ptr(), b.dtype, b.device, b.stride())
