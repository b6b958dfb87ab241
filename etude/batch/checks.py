"""What must hold of a batch. Each check names the row or rollout that broke it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from etude.batch.columns import Column, Kind
from etude.errors import BatchError, RewardError

if TYPE_CHECKING:
    from etude.batch.batch import Batch

__all__ = ["CHECKED", "layout", "shape", "values"]

CHECKED = frozenset({"behavior_logp", "version", "reward", "metric", "reward_parts", "greedy_reward"})
"""The columns whose values have to be something, and not only their shapes."""


def layout(batch: Batch) -> None:
    """Rows cover the tokens, rollouts cover the rows, groups are numbered within range."""
    if batch.rollouts == 0:
        raise BatchError("An empty batch trains nothing: it has no rollout. Collect at least one before building it.")
    _rows(batch)
    if batch.rows:
        wrong = ((batch.unit < 0) | (batch.unit >= batch.rollouts)).nonzero()
        if len(wrong):
            raise BatchError(
                f"Row {int(wrong[0])} belongs to rollout {int(batch.unit[wrong[0]])}; this batch has "
                f"rollouts 0 to {batch.rollouts - 1}."
            )
        back = (batch.unit[1:] < batch.unit[:-1]).nonzero()
        if len(back):
            raise BatchError(
                f"Row {int(back[0]) + 1} belongs to an earlier rollout than row {int(back[0])}: the rows "
                f"of a rollout must stand together, in time order."
            )
    wrong = ((batch.group < 0) | (batch.group >= batch.rollouts)).nonzero()
    if len(wrong):
        raise BatchError(
            f"Rollout {int(wrong[0])} is in group {int(batch.group[wrong[0]])}, which is out of range: "
            f"{batch.rollouts} rollouts have groups numbered from 0 to {batch.rollouts - 1} at most."
        )


def _rows(batch: Batch) -> None:
    if len(batch.offsets) != batch.rows + 1 or int(batch.offsets[0]) != 0:
        raise BatchError(
            f"`offsets` must have one entry more than there are rows ({batch.rows}) and begin with 0; "
            f"it has {len(batch.offsets)} and begins with {batch.offsets[:1].tolist()}."
        )
    down = (batch.offsets[1:] < batch.offsets[:-1]).nonzero()
    if len(down):
        raise BatchError(f"Row {int(down[0])} ends before it begins: `offsets` must never decrease.")
    if int(batch.offsets[-1]) != batch.tokens:
        raise BatchError(f"The rows end at token {int(batch.offsets[-1])}, but `ids` has {batch.tokens} tokens.")


def shape(batch: Batch, name: str, column: Column) -> None:
    """A column has as many entries as its kind asks for."""
    needed = {Kind.SEQUENCE: batch.rows, Kind.UNIT: batch.rollouts, Kind.BLOB: batch.rows}.get(
        column.kind, batch.tokens
    )
    found = len(column.values)
    if column.kind is Kind.RAGGED:
        if column.offsets is None or len(column.offsets) != batch.tokens + 1:
            raise BatchError(
                f"The ragged column `{name}` needs offsets with one entry more than there are tokens ({batch.tokens})."
            )
        needed = int(column.offsets[-1])
    if found != needed:
        message = f"The column `{name}` has {found} entries; as a {column.kind.value} column it needs {needed}."
        if column.kind in (Kind.TOKEN, Kind.TOKEN_K) and found < needed:
            message += f" Row {_row(batch, found)[0]} is the first it does not cover."
        raise BatchError(message)
    if column.kind is Kind.TOKEN_K and column.tensor.ndim != 2:
        raise BatchError(f"The column `{name}` must be [tokens, k]; its shape is {tuple(column.tensor.shape)}.")


def values(batch: Batch) -> None:
    """Action tokens carry what the sampler knew of them, and rewards are finite numbers."""
    if batch.action.dtype != torch.bool:
        raise BatchError(f"`action` must be a bool column; it is {batch.action.dtype}.")
    if batch.behavior_logp is not None:
        _refuse(batch, batch.action & ~torch.isfinite(batch.behavior_logp), "has no finite behaviour log-prob")
    if batch.version is not None:
        _refuse(batch, batch.action & (batch.version < 0), "does not say which policy version sampled it")
    rewards = {
        "reward": batch.reward,
        "metric": batch.metric,
        "reward parts": batch.reward_parts,
        "greedy reward": batch.greedy_reward,
    }
    for name, given in rewards.items():
        if given is not None and not bool(torch.isfinite(given).all()):
            u = int((~torch.isfinite(given)).reshape(batch.rollouts, -1).any(1).nonzero()[0])
            raise RewardError(
                f"Rollout {batch.name_of(u)} has the {name} {given[u].tolist()}; it must be a finite number. "
                f"Mend the reward function, or drop the rollout before it is compared with others."
            )


def _refuse(batch: Batch, bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        row, place = _row(batch, int(bad.nonzero()[0]))
        raise BatchError(
            f"Row {row} breaks the mask law: its token {place} is marked as an action but {what}. "
            f"Mark it as context, or record what the sampler reported."
        )


def _row(batch: Batch, token: int) -> tuple[int, int]:
    """The row that a token stands in, and its place there."""
    row = int(torch.searchsorted(batch.offsets, token, right=True)) - 1
    return row, token - int(batch.offsets[row])
