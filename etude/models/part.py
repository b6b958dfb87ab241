"""A rank's part of a layer: some of its heads, and some of its inner width.

The linear maps of a layer come in pairs. The first of a pair (q, k, v; gate, up) is cut by what it gives, and the
second (o; down) by what it takes, so that between the two a rank needs nothing of the others:

    own tokens ──gathered──► all tokens · own outputs ──► heads, activation ──► · own inputs ──added──► own tokens

Weights are read where they lie, whole, as the engine beside the trainer reads them: a rank multiplies with a stretch
of each, and that stretch alone gets a gradient from it. An adapter is cut with its map: by outputs its second factor
is, by inputs its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from etude.errors import ConfigError
from etude.models.lora_layers import ADAPTER, adapters_disabled, get_base_layer, is_adapted
from etude.models.prepack import LinearWeight
from etude.models.strand import Side, added, gathered

__all__ = ["Columns", "Rows", "key_heads", "refuse_uneven"]


class Columns:
    """Linear maps of the same input, of which each rank computes some of the outputs for the tokens of all."""

    def __init__(self, side: Side, parts: Sequence[tuple[nn.Module, slice]]) -> None:
        """`parts`: each map, and which of its outputs are this rank's."""
        self._side, self._parts = side, parts

    def __call__(self, x: Tensor) -> Tensor:
        """[n, H] → [count · n, own outputs], side by side."""
        x = gathered(x, self._side)
        return torch.cat([_outputs(part, x, rows) for part, rows in self._parts], 1)

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`: none, because an engine multiplies with whole weights."""
        return []


class Rows:
    """A linear map of which each rank takes some of the inputs; what comes out is the sum over ranks."""

    def __init__(self, side: Side, part: nn.Module, columns: slice) -> None:
        """`columns`: which of the inputs are this rank's."""
        self._side, self._part, self._columns = side, part, columns

    def __call__(self, x: Tensor) -> Tensor:
        """[count · n, own inputs] → [n, H]."""
        base = get_base_layer(self._part)
        out = linear(x, base.weight[:, self._columns])
        if is_adapted(self._part) and not adapters_disabled():
            down, up, scale = _factors(self._part)
            out = out + scale * linear(linear(x, down[:, self._columns]), up)
        out = added(out, self._side)
        return out if base.bias is None else out + base.bias

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`: none, because an engine multiplies with whole weights."""
        return []


def _outputs(part: nn.Module, x: Tensor, rows: slice) -> Tensor:
    base = get_base_layer(part)
    out = linear(x, base.weight[rows], None if base.bias is None else base.bias[rows])
    if is_adapted(part) and not adapters_disabled():
        down, up, scale = _factors(part)
        out = out + scale * linear(linear(x, down), up[rows])
    return out


def _factors(part: Any) -> tuple[Tensor, Tensor, float]:
    """Of an adapter: what it multiplies first and then, and how often that counts."""
    return part.lora_A[ADAPTER].weight, part.lora_B[ADAPTER].weight, part.scaling[ADAPTER]


def key_heads(heads: int, side: Side) -> slice:
    """Which key heads a rank's query heads read: its own, or one that it shares with its neighbours."""
    if heads % side.count == 0:
        each = heads // side.count
        return slice(side.rank * each, (side.rank + 1) * each)
    shared = side.rank * heads // side.count
    return slice(shared, shared + 1)


def refuse_uneven(query: int, key: int, width: int, tensor: int) -> None:
    """Refuse a layer that so many ranks cannot have equal parts of."""
    why = ""
    if query % tensor:
        why = f"{query} query heads over {tensor} ranks are {query / tensor:.4g} each"
    elif key % tensor and tensor % key:
        why = f"{key} key heads over {tensor} ranks are {key / tensor:.4g} each"
    elif width % tensor:
        why = f"an inner width of {width} over {tensor} ranks is {width / tensor:.4g} each"
    if why:
        fit = [n for n in range(1, tensor) if query % n == 0 and not (key % n and n % key) and width % n == 0]
        raise ConfigError(
            f"`mesh.tensor={tensor}` gives each rank an equal part of every layer, and this model has no such parts: "
            f"{why}. Choose a number that divides them, such as {fit[-1]}."
        )
