"""The checks of a batch. Each error names the row or rollout that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from etude.batch.columns import Column, ColumnKind
from etude.errors import BatchError, RewardError

if TYPE_CHECKING:
    from etude.batch.batch import Batch

FLOAT_COLUMNS = frozenset(
    {"behavior_logp", "old_logp", "ref_logp", "teacher_logp", "entropy", "sum_pi_squared", "value", "token_reward"}
)
"""The columns that hold measurements, and so floating-point numbers."""

CHECKED = frozenset({"behavior_logp", "version", "turn", "reward", "metric", "reward_parts", "greedy_reward"})
"""The columns that are checked for their values, not only for their shapes."""


def check_layout(batch: Batch) -> None:
    """Check that rows cover the tokens, rollouts cover the rows, and groups are numbered within range."""
    for name, values in (("offsets", batch.offsets), ("unit", batch.unit), ("group", batch.group), ("ids", batch.ids)):
        if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise BatchError(
                f"`{name}` must be a flat column of integers; it is {values.dtype} of shape {tuple(values.shape)}."
            )
    taken = sorted(batch.extra.keys() & batch.__dict__.keys())
    if taken:
        raise BatchError(
            f"A plug-in's column is called `{taken[0]}`, a name that the batch has itself. Choose another."
        )
    if batch.num_rollouts == 0 and batch.num_rows:  # with neither it is a rank's share: fewer rollouts than ranks
        raise BatchError(
            f"An empty batch trains nothing: it has {batch.num_rows} rows and no rollout that they belong to. "
            f"Collect at least one before building it."
        )
    if (batch.support is None) != (batch.support_sets is None):
        raise BatchError("A batch has the column `support` and its table `support_sets` together, or neither.")
    _check_images(batch)
    _check_rows(batch)
    if batch.num_rows:
        wrong = ((batch.unit < 0) | (batch.unit >= batch.num_rollouts)).nonzero()
        if len(wrong):
            raise BatchError(
                f"Row {int(wrong[0])} belongs to rollout {int(batch.unit[wrong[0]])}; this batch has "
                f"rollouts 0 to {batch.num_rollouts - 1}."
            )
        back = (batch.unit[1:] < batch.unit[:-1]).nonzero()
        if len(back):
            raise BatchError(
                f"Row {int(back[0]) + 1} belongs to an earlier rollout than row {int(back[0])}: the rows "
                f"of a rollout must stand together, in time order."
            )
    wrong = ((batch.group < 0) | (batch.group >= batch.num_rollouts)).nonzero()
    if len(wrong):
        raise BatchError(
            f"Rollout {int(wrong[0])} is in group {int(batch.group[wrong[0]])}, which is out of range: "
            f"{batch.num_rollouts} rollouts have groups numbered from 0 to {batch.num_rollouts - 1} at most."
        )


def _check_images(batch: Batch) -> None:
    """Check that tokens name images that are there, each once."""
    if batch.image is None and batch.feature is None and not batch.images:
        return
    if batch.image is None or batch.feature is None or not batch.images:
        raise BatchError("A batch has the columns `image` and `feature` and its `images` together, or none of them.")
    digests = [image.digest for image in batch.images]
    if len(set(digests)) < len(digests):
        raise BatchError("`images` has an image twice. Give each once, by its digest, and have `image` name it.")
    if batch.image.dtype != torch.int32 or batch.feature.dtype != torch.int32:
        raise BatchError(f"`image` and `feature` must be int32; they are {batch.image.dtype}, {batch.feature.dtype}.")
    if len(batch.image) != batch.num_tokens or len(batch.feature) != batch.num_tokens:
        return  # the check of the column says so
    outside = (batch.image < -1) | (batch.image >= len(digests)) | ((batch.image >= 0) != (batch.feature >= 0))
    if bool(outside.any()):
        token = int(outside.nonzero()[0])
        raise BatchError(
            f"Token {token} takes feature {int(batch.feature[token])} of image {int(batch.image[token])}; this batch "
            f"has the images 0 to {len(digests) - 1}. Write -1 in both columns where a token takes none."
        )


def _check_rows(batch: Batch) -> None:
    if len(batch.offsets) != batch.num_rows + 1 or int(batch.offsets[0]) != 0:
        raise BatchError(
            f"`offsets` must have one entry more than there are rows ({batch.num_rows}) and begin with 0; "
            f"it has {len(batch.offsets)} and begins with {batch.offsets[:1].tolist()}."
        )
    down = (batch.offsets[1:] < batch.offsets[:-1]).nonzero()
    if len(down):
        raise BatchError(f"Row {int(down[0])} ends before it begins: `offsets` must never decrease.")
    if int(batch.offsets[-1]) != batch.num_tokens:
        raise BatchError(f"The rows end at token {int(batch.offsets[-1])}, but `ids` has {batch.num_tokens} tokens.")


def check_column(batch: Batch, name: str, column: Column) -> None:
    """Check that a column has as many entries as its kind requires, and the right shape and dtype."""
    needed = batch.num_rollouts if column.kind is ColumnKind.UNIT else batch.num_tokens
    entries = len(column.tensor)
    if entries != needed:
        message = f"The column `{name}` has {entries} entries; as a {column.kind.value} column it needs {needed}."
        if column.kind is not ColumnKind.UNIT and entries < needed:
            message += f" Row {_locate_token(batch, entries)[0]} is the first it does not cover."
        raise BatchError(message)
    wanted = {ColumnKind.TOKEN: 1, ColumnKind.TOKEN_K: 2}.get(column.kind)
    if wanted is not None and column.tensor.ndim != wanted:
        what = "[tokens]" if wanted == 1 else "[tokens, k]"
        raise BatchError(f"The column `{name}` must be {what}; its shape is {tuple(column.tensor.shape)}.")
    if name in FLOAT_COLUMNS and not column.tensor.is_floating_point():
        raise BatchError(f"The column `{name}` must hold floating-point numbers; it is {column.tensor.dtype}.")


def check_values(batch: Batch) -> None:
    """Check that action tokens carry the sampler's records, and that rewards are finite numbers."""
    if batch.action.dtype != torch.bool:
        raise BatchError(f"`action` must be a bool column; it is {batch.action.dtype}.")
    if batch.behavior_logp is not None:
        _refuse_tokens(batch, batch.action & ~torch.isfinite(batch.behavior_logp), "has no finite behavior log-prob")
    if batch.version is not None:
        _refuse_tokens(batch, batch.action & (batch.version < 0), "does not say which policy version sampled it")
    if batch.turn is not None:
        _check_turns(batch, batch.turn)
    if batch.image is not None:
        _refuse_tokens(batch, batch.action & (batch.image >= 0), "takes a feature of an image")
    rewards = {
        "reward": batch.reward,
        "metric": batch.metric,
        "reward parts": batch.reward_parts,
        "greedy reward": batch.greedy_reward,
    }
    for name, values in rewards.items():
        if values is not None and not bool(torch.isfinite(values).all()):
            u = int((~torch.isfinite(values)).reshape(batch.num_rollouts, -1).any(1).nonzero()[0])
            raise RewardError(
                f"Rollout {batch.get_rollout_id(u)} has the {name} {values[u].tolist()}; it must be a finite number. "
                f"Mend the reward function, or drop the rollout before it is compared with others."
            )


def _check_turns(batch: Batch, turn: Tensor) -> None:
    """Check that turns never decrease over a rollout's actions, in their stored order."""
    index = batch.action.nonzero()[:, 0]
    rollout = torch.searchsorted(batch.rollout_token_offsets, index, right=True)
    turns = turn[index]
    back = ((turns[1:] < turns[:-1]) & (rollout[1:] == rollout[:-1])).nonzero()
    if len(back):
        at = int(back[0])
        row, place = _locate_token(batch, int(index[at + 1]))
        raise BatchError(
            f"Row {row} breaks the order of time: its token {place} is of turn {int(turns[at + 1])}, after turn "
            f"{int(turns[at])} of the same rollout. Put a rollout's rows in the order in which they happened."
        )


def resolve_rollouts(batch: Batch, rollouts: Tensor | Sequence[int]) -> Tensor:
    """Return rollouts as indices [n] int64, from indices or from a mask over all of them."""
    index = torch.as_tensor(rollouts, device=batch.device)
    if index.dtype == torch.bool:
        if index.shape != (batch.num_rollouts,):
            raise BatchError(
                f"A mask over rollouts needs {batch.num_rollouts} entries; its shape is {tuple(index.shape)}."
            )
        return index.nonzero()[:, 0]
    if index.numel() == 0:
        return index.reshape(0).long()
    if index.ndim != 1 or index.is_floating_point():
        raise BatchError(
            f"Rollouts are selected by a list of indices or a mask; {str(index.dtype).removeprefix('torch.')} of shape "
            f"{tuple(index.shape)} was given."
        )
    if int(index.min()) < 0 or int(index.max()) >= batch.num_rollouts:
        raise BatchError(f"Rollouts {index.tolist()} were requested; this batch has 0 to {batch.num_rollouts - 1}.")
    return index.long()


def _refuse_tokens(batch: Batch, bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        row, place = _locate_token(batch, int(bad.nonzero()[0]))
        raise BatchError(
            f"Row {row} breaks the mask law: its token {place} is marked as an action but {what}. "
            f"Mark it as context, or record what the sampler reported."
        )


def _locate_token(batch: Batch, token: int) -> tuple[int, int]:
    """Return the row of a token, and its index in that row."""
    row = int(torch.searchsorted(batch.offsets, token, right=True)) - 1
    return row, token - int(batch.offsets[row])
