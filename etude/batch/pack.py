"""The pack: the input of one forward pass, built from a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.batch.batch import Batch
from etude.errors import BatchError

__all__ = ["Pack"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack:
    """The input of one forward pass: segments, each continuing its parent, so that a shared prompt is computed once.

    A token attends to the tokens before it in its own segment, and to all of its segment's ancestors. `source` maps
    back: the prediction of batch token t is read at packed token `source[t]`, the one before it on its path.
    """

    ids: Tensor  # [P] int32
    positions: Tensor  # [P] int64: the place on its path from the root
    offsets: Tensor  # [S + 1] int64: segment s is packed tokens offsets[s] to offsets[s + 1]
    parent: Tensor  # [S] int64: an earlier segment, or -1 for a root
    source: Tensor  # [T] int64: for each batch token, the packed token that predicts it; -1 for the first of a row
    row_ends: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[R] int64: the last packed token of each row of the batch, -1 for an empty row; [0] if not made from a batch."""

    def __post_init__(self) -> None:
        segments = torch.arange(len(self.parent), device=self.parent.device)
        wrong = ((self.parent >= segments) | (self.parent < -1)).nonzero()
        if len(wrong):
            raise BatchError(
                f"Segment {int(wrong[0])} has parent {int(self.parent[wrong[0]])}: a parent must come before "
                f"its children, or be -1."
            )
        if int(self.offsets[-1]) != len(self.ids) or len(self.offsets) != len(self.parent) + 1:
            raise BatchError(
                f"The segments end at token {int(self.offsets[-1])}, but the pack has {len(self.ids)} tokens."
            )

    @classmethod
    def from_batch(cls, batch: Batch) -> Pack:
        """Pack one segment for each row, with nothing shared."""
        lengths = batch.offsets[1:] - batch.offsets[:-1]
        token = torch.arange(batch.num_tokens, device=batch.device)
        position = token - torch.repeat_interleave(batch.offsets[:-1], lengths)
        return cls(
            ids=batch.ids,
            positions=position,
            offsets=batch.offsets,
            parent=torch.full_like(lengths, -1),
            source=torch.where(position > 0, token - 1, -1),
            row_ends=torch.where(lengths > 0, batch.offsets[1:] - 1, -1),
        )

    def unpack(self, values: Tensor, fill: float = float("nan")) -> Tensor:
        """[P, …] → [T, …]: move values from each packed token to the batch tokens that it predicts."""
        first = self.source < 0
        picked = values[self.source.clamp(min=0)]
        return torch.where(first.reshape(-1, *[1] * (values.ndim - 1)), torch.full_like(picked, fill), picked)

    def attention_mask(self) -> Tensor:
        """[P, P] bool: true where a packed token sees another. For checks; real attention never builds it."""
        count = len(self.parent)
        lengths = self.offsets[1:] - self.offsets[:-1]
        segment = torch.repeat_interleave(torch.arange(count, device=self.ids.device), lengths)
        above = torch.eye(count, dtype=torch.bool, device=self.ids.device)
        for s in range(count):
            if int(self.parent[s]) >= 0:
                above[s] |= above[int(self.parent[s])]
        return above[segment][:, segment] & (self.positions[:, None] >= self.positions[None, :])
