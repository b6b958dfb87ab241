"""The base of records with arrays: arrays are copied once, checked and read-only, also after pickling or a copy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class FrozenRecord:
    """A base class that pickles and copies a record by calling its constructor, so that its checks run again."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        record: Any = self
        return type(self), tuple(getattr(self, column.name) for column in fields(record))


def read_only_array(values: ArrayLike, dtype: type[np.generic], name: str, dimensions: int = 1) -> NDArray[Any]:
    """Return a read-only copy with the record's dtype and dimensions; refuse other shapes and lossy casts."""
    array = np.asarray(values)
    if array.ndim != dimensions:
        wanted = {1: "one-dimensional", 2: "two-dimensional", 3: "three-dimensional"}[dimensions]
        raise ValueError(f"{name} must be {wanted}; an array of shape {array.shape} was given.")
    if array.dtype == dtype:  # nothing to lose, and the checks take longer than the copy
        cast = array.copy()
        cast.setflags(write=False)
        return cast
    if array.size and not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(
            f"{name} must be {np.dtype(dtype).name}; {array.dtype.name} cannot be cast to it without loss."
        )
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    lost = array.dtype.kind in "iu" and not np.array_equal(cast, array)
    if lost or (array.dtype.kind == "f" and not np.array_equal(np.isinf(cast), np.isinf(array))):
        raise ValueError(f"{name} has values that do not fit into {np.dtype(dtype).name}.")
    cast.setflags(write=False)
    return cast


def check_same_length(owner: str, **columns: Any) -> None:
    """Refuse columns of different lengths: every column has one entry a token."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{owner} has columns of different lengths ({listed}); each must have one entry per token.")
