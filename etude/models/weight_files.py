"""The weight files of a Hugging Face directory, read in pieces: a rank reads its own rows and nothing else.

model.safetensors                      one file with every weight
model.safetensors.index.json           or many files, and the file of each weight
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.errors import ConfigError
from etude.models.loading import refuse_missing_weights

__all__ = ["WeightFiles"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The weights of a model directory, by the names of a module's parameters."""

    def __init__(self, directory: Path, base_prefix: str = "") -> None:
        """base_prefix: the name of the body within the model. Files may leave it out, or have it in front."""
        self.directory, self._prefix = directory, f"{base_prefix}." if base_prefix else ""
        with self._readable():
            if (directory / INDEX).is_file():
                table = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
                self._file_of: Mapping[str, str] = {str(name): str(file) for name, file in table.items()}
            else:
                with safe_open(directory / SINGLE, "pt") as file:
                    self._file_of = dict.fromkeys(file.keys(), SINGLE)
            self._open: dict[str, Any] = {
                name: safe_open(directory / name, "pt") for name in sorted(set(self._file_of.values()))
            }

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse files that lack one of these weights, or hold one in another shape."""
        missing = sorted(name for name in shapes if self._stored_name(name) is None)
        present = [name for name in shapes if name not in missing]
        stored_shapes = [(name, self._shape(name), shape) for name, shape in shapes.items() if name in present]
        mismatched: list[object] = [
            (name, shape, tuple(expected)) for name, shape, expected in stored_shapes if shape != tuple(expected)
        ]
        refuse_missing_weights(self.directory, missing, mismatched)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Read the block of a weight that begins at `offset` and has this shape."""
        if not all(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        with self._readable():
            blocks = tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))
            piece: Tensor = self._slice(name)[blocks] if blocks else self._tensor(name)
        return piece.to(dtype)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def _stored_name(self, name: str) -> str | None:
        """Return the name that a parameter has in the files, or None if it is not there."""
        for stored in (name, name.removeprefix(self._prefix), self._prefix + name):
            if stored in self._file_of:
                return stored
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        with self._readable():
            return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        stored = self._stored_name(name)
        assert stored is not None, f"{name} was checked to be there"
        return self._open[self._file_of[stored]].get_slice(stored)

    def _tensor(self, name: str) -> Tensor:
        stored = self._stored_name(name)
        assert stored is not None, f"{name} was checked to be there"
        tensor: Tensor = self._open[self._file_of[stored]].get_tensor(stored)
        return tensor

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn an error of reading into a sentence."""
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"The weights in {self.directory} cannot be read: {error}") from error
