"""What is published: which tensors, in which order, and how they lie in a bucket.

The names are those of the model's files in the Hugging Face layout, and each tensor is whole: a server fuses maps that
it computes as one, ties what the configuration ties and keeps its own share of each, just as it does when it loads a
file. So there is one layout on the way, whatever the trainer's ranks and the server's ranks are. A tensor that a
trainer holds in shards is gathered when its turn comes, and let go of when it lies in its bucket.

    weights ──► gathered, cast ──► │ q │ k │ v │ o │…  │   a bucket: tensors end to end, each at a multiple of 64 bytes
                                   │ gate │ up │ down │    a tensor is never cut in two

The first publish maps names to shapes, and every later one must bring the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from etude.errors import ConfigError

__all__ = [
    "ALIGNMENT",
    "TensorMeta",
    "WeightManifest",
    "WeightStream",
    "assign_replicas",
    "dtype_name",
    "gather_full_tensor",
]

ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple, so that any dtype may be read in place."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor in a bucket."""

    name: str
    dtype: str
    """As torch names it, such as `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the bucket."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize


class WeightManifest:
    """Which tensors one model's publishes bring: learned from the first whole one, and held to by those after it."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._whole = False

    @property
    def names(self) -> tuple[str, ...]:
        """In the order that they are published in."""
        return tuple(self._shapes)

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, each held to the plan as it passes, and all of them at the end."""
        seen: dict[str, tuple[int, ...]] = {}
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if name in seen:
                raise ConfigError(f"The weights were not published: `{name}` comes twice. Give each tensor one name.")
            if self._whole and self._shapes.get(name) != shape:
                known = f"was {list(self._shapes[name])}" if name in self._shapes else "was not there"
                raise ConfigError(
                    f"The weights were not published: `{name}` is {list(shape)} now and {known} at the first publish. "
                    f"A model keeps its shape while it is served; start the engines anew for another."
                )
            seen[name] = shape
            yield name, tensor
        missing = [name for name in self._shapes if name not in seen]
        if self._whole and missing:
            raise ConfigError(
                f"The weights were not published whole: `{missing[0]}` is missing ({len(missing)} names). Every "
                f"publish brings every tensor."
            )
        if not seen:
            raise ConfigError("There are no weights to publish. Give a model that has some.")
        self._shapes, self._whole = seen, True


class WeightStream:
    """Weights on their way, one tensor at a time, and one that may be looked at before it is taken."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        self._weights = iter(weights)
        self._dtype = dtype
        self._next: tuple[str, Tensor] | None = None
        self._ended = False

    def peek(self) -> tuple[str, Tensor, torch.dtype] | None:
        """The next tensor as it is held, and the dtype that it travels in; none at the end."""
        if self._next is None and not self._ended:
            self._next = next(self._weights, None)
            self._ended = self._next is None
        if self._next is None:
            return None
        name, tensor = self._next
        return name, tensor, self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def advance(self) -> None:
        """Let go of the tensor that was looked at."""
        self._next = None

    def next_nbytes(self) -> int:
        """What the next one takes; 0 at the end."""
        following = self.peek()
        return 0 if following is None else following[1].numel() * following[2].itemsize


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that ranks hold in shards; any other as it is. Ranks that share it ask together."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    full: Tensor = tensor.detach() if gather is None else gather()
    return full


def dtype_name(dtype: torch.dtype) -> str:
    """How both sides call a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def assign_replicas(replicas: int, ranks: int, rank: int) -> range:
    """Which replicas a trainer's rank brings the weights to: they are dealt in turn, so that ranks of several machines
    send at the same time. Every rank gathers, and one without a replica only gathers."""
    return range(rank, replicas, ranks)
