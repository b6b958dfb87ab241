"""The pack: the input of one forward pass, built from a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.batch.images import PackImages
from etude.errors import BatchError


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack:
    """The input of one forward pass: segments, each continuing its parent, so that a shared prompt is computed once.

    A token attends to the tokens before it in its own segment, and to all of its segment's ancestors. `source` maps
    back: the prediction of batch token t is read at packed token `source[t]`, the one before it on its path.

    `offsets` and `parent` are always on the CPU: passes are planned there, without waiting for a device.
    """

    ids: Tensor  # [P] int32
    positions: Tensor  # [P] int64: the place on its path from the root
    offsets: Tensor  # [S + 1] int64: segment s is packed tokens offsets[s] to offsets[s + 1]
    parent: Tensor  # [S] int64: an earlier segment, or -1 for a root
    source: Tensor  # [T] int64: for each batch token, the packed token that predicts it; -1 for the first of a row
    row_ends: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[R] int64: the last packed token of each row of the batch, -1 for an empty row; [0] if not made from a batch."""
    both_ways: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """[S] bool on the CPU: the segment's tokens attend to each other both ways; [0] if those of none do."""
    in_windows: bool = False
    """Segments attend both ways only in layers with a window, and within it."""
    images: PackImages | None = None
    """The images, if any token takes a feature of one."""

    def places(self, rows: Tensor) -> Tensor:
        """[T]: return the packed token of each batch token. rows: [R + 1], the batch's `offsets`."""
        places = self.source.roll(-1)  # the token before the next one of its row
        filled = rows[1:] > rows[:-1]
        places[rows[1:][filled] - 1] = self.row_ends[filled]
        return places

    def __post_init__(self) -> None:
        for name in ("offsets", "parent"):
            object.__setattr__(self, name, getattr(self, name).cpu())
        segments = torch.arange(len(self.parent))
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
