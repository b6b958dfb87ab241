"""Batches given by their action tokens. One context token precedes each rollout, with NaN in each of its columns."""

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
    """Return rollouts with these numbers of action tokens.

    Token columns are given at the action tokens [A], other columns as a whole.
    """
    action = torch.tensor([t > 0 for length in lengths for t in range(length + 1)])

    def at_actions(values: Any) -> Tensor:
        tensor = torch.as_tensor(values)
        column = torch.full(action.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)
        column[action] = tensor
        return column

    full_columns = dict[str, Any](columns)
    for name, values in columns.items():
        if COLUMNS.get(name) is ColumnKind.TOKEN:
            full_columns[name] = at_actions(values)
    return Batch(
        offsets=torch.tensor([0, *torch.tensor([n + 1 for n in lengths]).cumsum(0).tolist()]),
        unit=torch.arange(len(lengths)),
        ids=full_columns.pop("ids", torch.zeros(len(action), dtype=torch.int32)),
        action=action,
        group=full_columns.pop("group", torch.zeros(len(lengths), dtype=torch.int64)),
        **full_columns,
    )


def flat_view(lengths: Sequence[int], ranks: Ranks | None = None, outputs: Any = None, **columns: Any) -> View:
    """Return the view of a `flat_batch`. `outputs` are the model's columns at the action tokens, with gradients."""
    batch = flat_batch(lengths, **columns)
    action_index = batch.action.nonzero()[:, 0]
    full_outputs = {
        name: torch.full((batch.num_tokens,), float("nan"), dtype=values.dtype).index_copy(0, action_index, values)
        for name, values in (outputs or {}).items()
    }
    return View(batch, Outputs(**full_outputs), ranks or SingleRank())
