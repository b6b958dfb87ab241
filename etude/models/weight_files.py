"""The weight files of a Hugging Face directory, read in pieces: a rank reads its own rows and nothing else.

model.safetensors                      one file with every weight
model.safetensors.index.json           or many files, and the file of each weight
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import ConfigError
from etude.models.published_names import PublishedNames, StoredPiece

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes whose numbers are the weights; quantized weights need their scales too."""


def find_weights(directory: Path) -> dict[str, str]:
    """Return the file of each weight in a directory, by its name there."""
    with _readable(directory):
        if (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        table = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in table.items()}


class WeightFiles:
    """The weights of a model directory, by the names of a module's parameters."""

    def __init__(self, directory: Path, module: PreTrainedModel | None = None) -> None:
        """module: the model whose parameters' names are asked for. Files may leave out the name of its body, have it in
        front, or have the prefix of a larger model."""
        self.directory = directory
        self._file_of: Mapping[str, str] = find_weights(directory)
        self._published = None if module is None else PublishedNames(module, self._file_of)
        base = "" if module is None else module.base_model_prefix
        self._prefix = f"{base}." if base else ""
        self._pieces: dict[str, list[StoredPiece]] = {}
        """The blocks of weights that the files do not hold whole."""
        with self._readable():
            self._open: dict[str, Any] = {
                name: safe_open(directory / name, "pt") for name in sorted(set(self._file_of.values()))
            }

    @property
    def num_weights(self) -> int:
        """The number of all numbers in the files."""
        with self._readable():
            return sum(math.prod(self._open[file].get_slice(name).get_shape()) for name, file in self._file_of.items())

    def fit(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Return True if each of these weights is here, whole or in blocks, as plain floating-point numbers."""
        with self._readable():
            return all(self._fits(name, tuple(shape)) for name, shape in shapes.items())

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        expected = {name: shape}
        if name not in self:
            pieces = self._find_pieces(name, shape)
            expected = {piece.name: piece.stored_shape for piece in pieces}
        return bool(expected) and all(
            stored in self
            and tuple(self._slice(stored).get_shape()) == size
            and self._slice(stored).get_dtype() in PLAIN_DTYPES
            for stored, size in expected.items()
        )

    def _find_pieces(self, name: str, shape: tuple[int, ...]) -> list[StoredPiece]:
        """Return the blocks in which the files hold the experts of a layer; none for other weights."""
        if name not in self._pieces:
            has_blocks = self._published is not None and len(shape) == 3
            self._pieces[name] = (self._published.pieces(name, shape) if has_blocks and self._published else None) or []
        return self._pieces[name]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the block of a weight that begins at `offset` and has this shape; see `fit`."""
        if self._pieces.get(name):
            return self._read_pieces(self._pieces[name], offset, shape)
        with self._readable():
            found = self._slice(name)
            if not shape:
                whole: Tensor = found[...]
                return whole
            block: Tensor = found[
                tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))
            ]
            return block

    def _read_pieces(self, pieces: list[StoredPiece], offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a block of experts from the tensors that hold a part of it, one after the other."""
        block: Tensor | None = None
        for piece in pieces:
            starts = (*piece.offset, *[0] * (len(shape) - 2))
            spans = [
                (max(first, start), min(first + length, start + size))
                for first, length, start, size in zip(offset, shape, starts, piece.shape, strict=True)
            ]
            if any(first >= last for first, last in spans):
                continue
            stored = [slice(first - start, last - start) for (first, last), start in zip(spans, starts, strict=True)]
            with self._readable():
                part: Tensor = self._slice(piece.name)[tuple(stored[1:] if piece.is_single else stored)]
            if block is None:
                block = part.new_empty(tuple(shape))
            into = [slice(first - begin, last - begin) for (first, last), begin in zip(spans, offset, strict=True)]
            block[tuple(into)] = part
        assert block is not None, "the pieces cover the weight"
        return block

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) is not None or bool(self._pieces.get(name))

    def _stored_name(self, name: str) -> str | None:
        """Return the name that a parameter has in the files, or None if it is not there."""
        known = self._published
        published: tuple[str, ...] = () if known is None else (known(name), known.stored_name(name))
        for stored in (name, *published, name.removeprefix(self._prefix), self._prefix + name):
            if stored in self._file_of:
                return stored
        return None

    def _slice(self, name: str) -> Any:
        stored = self._stored_name(name)
        assert stored is not None, f"{name} was checked to be there"
        return self._open[self._file_of[stored]].get_slice(stored)

    def _readable(self) -> AbstractContextManager[None]:
        return _readable(self.directory)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turn an error of reading into a sentence."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"The weights in {directory} cannot be read: {error}") from error
