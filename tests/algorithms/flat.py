"""Batches written down by their action tokens: one token of context before each rollout, NaN in every column of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from etude.algorithms.view import Outputs, Ranks, SingleRank, View
from etude.batch import Batch
from etude.batch.batch import COLUMNS
from etude.batch.columns import ColumnKind


def float64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def flat_batch(lengths: Sequence[int], **columns: Any) -> Batch:
    """Rollouts with these numbers of action tokens; token columns are given at the action tokens [A], others whole."""
    action = torch.tensor([t > 0 for length in lengths for t in range(length + 1)])

    def spread(values: Any) -> Tensor:
        told = torch.as_tensor(values)
        whole = torch.full(action.shape, float("nan") if told.is_floating_point() else 0, dtype=told.dtype)
        whole[action] = told
        return whole

    given = {name: spread(v) if COLUMNS.get(name) is ColumnKind.TOKEN else v for name, v in columns.items()}
    return Batch(
        offsets=torch.tensor([0, *torch.tensor([n + 1 for n in lengths]).cumsum(0).tolist()]),
        unit=torch.arange(len(lengths)),
        ids=given.pop("ids", torch.zeros(len(action), dtype=torch.int32)),
        action=action,
        **{"group": torch.zeros(len(lengths), dtype=torch.int64), **given},
    )


def flat_view(lengths: Sequence[int], ranks: Ranks | None = None, outputs: Any = None, **columns: Any) -> View:
    """The view of a `flat_batch`; `outputs` are the model's columns at the action tokens, with their gradients."""
    batch = flat_batch(lengths, **columns)
    where = batch.action.nonzero()[:, 0]
    said = {
        name: torch.full((batch.num_tokens,), float("nan"), dtype=values.dtype).index_copy(0, where, values)
        for name, values in (outputs or {}).items()
    }
    return View(batch, Outputs(**said), ranks or SingleRank())
