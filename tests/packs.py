"""Packs without anything shared, to compare shared ones with; and checks of both."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.batch import Batch, Pack

__all__ = ["attention_mask", "separate_rows", "unpack"]


def separate_rows(batch: Batch) -> Pack:
    """Pack one segment for each row, with nothing shared."""
    lengths = batch.offsets[1:] - batch.offsets[:-1]
    token = torch.arange(batch.num_tokens, device=batch.device)
    position = token - torch.repeat_interleave(batch.offsets[:-1], lengths)
    return Pack(
        ids=batch.ids,
        positions=position,
        offsets=batch.offsets,
        parent=torch.full_like(lengths, -1),
        source=torch.where(position > 0, token - 1, -1),
        row_ends=torch.where(lengths > 0, batch.offsets[1:] - 1, -1),
    )


def unpack(pack: Pack, values: Tensor) -> Tensor:
    """[P, …] → [T, …]: move values from each packed token to the batch tokens that it predicts; NaN for a first one."""
    first = pack.source < 0
    picked = values[pack.source.clamp(min=0)]
    return torch.where(first.reshape(-1, *[1] * (values.ndim - 1)), torch.full_like(picked, torch.nan), picked)


def attention_mask(pack: Pack) -> Tensor:
    """[P, P] bool: true where a packed token sees another."""
    count = len(pack.parent)
    segment = torch.repeat_interleave(torch.arange(count), pack.offsets[1:] - pack.offsets[:-1])
    above = torch.eye(count, dtype=torch.bool)
    for s in range(count):
        if int(pack.parent[s]) >= 0:
            above[s] |= above[int(pack.parent[s])]
    return above[segment][:, segment] & (pack.positions[:, None] >= pack.positions[None, :])
