"""Publishing within one process: only weights in other memory are copied.

An engine whose model shares storage with the trainer's already computes with the new weights; it receives only their
version. Any other engine has one copy. It refreshes this copy in place between two tokens, tensor by tensor: cast to
its own dtype, and in its own layout. There is never a second copy: weights that are gathered on request are released
one by one.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.observe import Metrics, Sum


class Weights(Protocol):
    """The weights that an engine computes with."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return every weight once, by its published name, as the tensor itself."""
        ...


class LocalEngine(Protocol):
    """An engine in this process, as `publish_to_engine` uses it."""

    @property
    def model(self) -> Weights:
        """The model that it computes with."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite the engine's weights between two tokens, and set their version.

        Caches computed under other weights are not used again. `weights` is empty where the engine's own memory holds
        the new values already. If the update fails halfway, the engine is out of service until one that succeeds.
        """
        ...


async def publish_to_engine(
    engine: LocalEngine,
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    shapes: Mapping[str, torch.Size] | None = None,
    *,
    kept: Container[str] = (),
) -> Metrics:
    """Update one engine in this process to these weights; return the bytes written and the time taken.

    Weights that do not fit are refused before anything is written. Frozen weights of the engine may be left out.
    shapes: the shapes of `weights`, if these are copies that are gathered as they are read. They are then read one
    at a time, on the engine's thread. kept: names of frozen weights that the engine has from the model's files.
    """
    begun = time.perf_counter()
    tensors: dict[str, Tensor] = {}
    weights = ((name, weight) for name, weight in weights if name not in kept)
    if shapes is None:
        weights = list(weights)
        tensors = dict(weights)
        shapes = {name: weight.shape for name, weight in weights}
    shapes = {name: shape for name, shape in shapes.items() if name not in kept}
    held = dict(engine.model.named_weights())
    trained = {name for name, weight in held.items() if weight.requires_grad}
    odd = sorted((shapes.keys() - held.keys()) | (trained - shapes.keys()))
    if odd:
        owner, other = ("trainer", "engine") if odd[0] in shapes else ("engine", "trainer")
        raise ConfigError(
            f"The weights were not published: the {owner} has `{odd[0]}` and the {other} has not ({len(odd)} names "
            f"differ). Give both the same model."
        )
    for name, shape in shapes.items():
        if held[name].shape != shape:
            raise ConfigError(
                f"The weights were not published: `{name}` is {list(shape)} in the trainer and "
                f"{list(held[name].shape)} in the engine. Give both the same model."
            )
    copied = [name for name in shapes if name not in tensors or not _same_memory(held[name], tensors[name])]
    written = sum(held[name].nbytes for name in copied)
    await engine.update_weights(weights if written else (), version)
    milliseconds = 1e3 * (time.perf_counter() - begun)
    return Metrics({"publish_bytes": Sum.of(written), "publish_ms": Sum.of(milliseconds)})


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return true if two tensors are the same memory, read with the same dtype and strides."""
    return (a.data_ptr(), a.dtype, a.device, a.stride()) == (b.data_ptr(), b.dtype, b.device, b.stride())
