"""The content of a publish: its tensors, their order, and their layout in a bucket.

Names are those of the model's files in the Hugging Face layout, and each tensor is whole. As when it loads a file, a
server fuses linear maps, ties weights that the configuration ties, and keeps its own share of each tensor.
So there is one layout in transit, for any number of trainer ranks and server ranks.
A tensor that the trainer holds in shards is gathered when its turn comes, and released once it is in its bucket.

    weights ──► gathered, cast ──► │ q │ k │ v │ o │…  │   a bucket: tensors end to end, each at a multiple of 64 bytes
                                   │ gate │ up │ down │    a tensor is never cut in two

The first publish fixes names and shapes; every later one must have the same. It may leave out weights that do not
change, if all its servers have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.observe import get_logger

ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of this, so that any dtype can be read in place."""


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
        """The size of the tensor in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize

    def view_in(self, memory: Tensor) -> Tensor:
        """Return the tensor in a bucket's bytes."""
        return memory[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)


class WeightManifest:
    """The names and shapes of a model's published tensors: set by the first complete publish, checked by later ones."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._whole = False

    def check_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, partial: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights; check each against the manifest, and at the end that none is missing.

        partial: some are left out, which all servers have.
        """
        seen: dict[str, tuple[int, ...]] = {}
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if name in seen:
                raise ConfigError(f"The weights were not published: `{name}` comes twice. Give each tensor one name.")
            if self._whole and self._shapes.get(name) != shape:
                known = f"was {list(self._shapes[name])}" if name in self._shapes else "was not there"
                raise ConfigError(
                    f"The weights were not published: `{name}` is {list(shape)} now and {known} at the first publish. "
                    f"A model keeps its shape while it is served; start the engines again for another."
                )
            seen[name] = shape
            yield name, tensor
        missing = [name for name in self._shapes if name not in seen]
        if self._whole and missing and not partial:
            raise ConfigError(
                f"The weights were not published whole: `{missing[0]}` is missing ({len(missing)} names). Every "
                f"publish brings every tensor."
            )
        if not seen:
            raise ConfigError("There are no weights to publish. Give a model that has some.")
        if not partial:
            self._shapes = seen
            self._whole = True


class WeightStream:
    """A stream of weights, one tensor at a time, with a look at the next one."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        self._weights = iter(weights)
        self._dtype = dtype
        self._next: tuple[str, Tensor] | None = None
        self._ended = False

    def peek(self) -> tuple[str, Tensor, torch.dtype] | None:
        """Return the next name, its tensor as the trainer holds it, and the published dtype; None at the end."""
        if self._next is None and not self._ended:
            self._next = next(self._weights, None)
            self._ended = self._next is None
        if self._next is None:
            return None
        name, tensor = self._next
        if self._dtype is None or not tensor.is_floating_point():
            return name, tensor, tensor.dtype
        if self._dtype.itemsize < tensor.dtype.itemsize:
            _warn_of_rounding(tensor.dtype, self._dtype)
        return name, tensor, self._dtype

    def advance(self) -> None:
        """Release the current tensor and move to the next."""
        self._next = None

    def next_nbytes(self) -> int:
        """Return the bytes of the next tensor in the published dtype; 0 at the end."""
        following = self.peek()
        return 0 if following is None else following[1].numel() * following[2].itemsize


@cache
def _warn_of_rounding(trained: torch.dtype, published: torch.dtype) -> None:
    """Log once that weights are rounded on their way."""
    get_logger("sync").warning(
        "`dtype=%s` rounds weights of %s on their way. An engine that computes in %s then samples with other weights "
        "than the trainer has. Set `dtype=as_trained`, unless every engine computes in %s.",
        *map(dtype_name, (published, trained, trained, published)),
    )


def fill_bucket(memory: Tensor, stream: WeightStream) -> list[TensorMeta]:
    """Write tensors end to end into a bucket's bytes, cast to the published dtype, until the next does not fit.

    Return the name, dtype, shape and offset of each.
    """
    pieces: list[TensorMeta] = []
    end = 0
    while (following := stream.peek()) is not None and end + stream.next_nbytes() <= memory.nbytes:
        name, tensor, dtype = following
        piece = TensorMeta(name, dtype_name(dtype), tuple(tensor.shape), end)
        piece.view_in(memory).copy_(gather_full_tensor(tensor))
        stream.advance()
        pieces.append(piece)
        end = round_up(end + piece.nbytes)
    return pieces


def round_up(nbytes: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that ranks hold in shards; return any other as it is. All ranks that share it must call this."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    full: Tensor = tensor.detach() if gather is None else gather()
    return full


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype that both sides use, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
