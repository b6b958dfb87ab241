"""The micro-batches of a pass, equally many on every rank: a rank with fewer has empty frames at the end.

    rank 0   micro-batch   micro-batch, images   micro-batch     each column is a frame: ranks pass through it together,
    rank 1   micro-batch   micro-batch           (empty)         and one that lacks something passes a stand-in

Of a tower that ranks hold in shards, a stand-in is a small image: a rank without images passes it where others have
some. In a frame without images no rank passes the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from etude.algorithms.view import Ranks
from etude.batch import Batch, Column, ColumnKind
from etude.data.pack import micro_batches
from etude.models import Model

MicroBatch = tuple[Batch, dict[ColumnKind, Tensor]]
"""A micro-batch, with the indices of its tokens and of its rollouts in the batch."""

TOKEN_OF_BATCH = "_token_of_batch"
"""The column of a micro-batch that holds the index of each token in the batch."""


def iterate_micro_batches(
    batch: Batch, tokens: int, by: Literal["rollout", "group"], device: torch.device, *, image_weight: int = 1
) -> Iterator[MicroBatch]:
    """Yield micro-batches of about `tokens` tokens on a device, each with the batch indices of its tokens and rollouts.

    The order of rollouts may differ from the batch's. image_weight: as for `micro_batches`.
    """
    index_columns = {
        TOKEN_OF_BATCH: Column(ColumnKind.TOKEN, torch.arange(batch.num_tokens, device=batch.device)),
        "_rollout_of_batch": Column(ColumnKind.UNIT, torch.arange(batch.num_rollouts, device=batch.device)),
    }
    indexed = batch.replace(extra={**batch.extra, **index_columns})
    for micro in micro_batches(indexed, tokens, by, image_weight=image_weight):
        yield micro.to(device), {column.kind: micro.extra[name].tensor.cpu() for name, column in index_columns.items()}


def split_update(batch: Batch, tokens: int, by: Literal["rollout", "group"], model: Model) -> list[Batch]:
    """Return the micro-batches of an update that have rollouts, on the model's device.

    An image token counts twice if the tower is trained, because its activations are kept too.
    """
    found = iterate_micro_batches(batch, tokens, by, model.device, image_weight=1 + model.trains_tower)
    return [micro for micro, _ in found if micro.num_rollouts]


def iterate_passes(
    micros: Iterator[MicroBatch],
    empty: Batch,
    ranks: Ranks,
    frame: Callable[[bool], AbstractContextManager[None]],
) -> Iterator[MicroBatch]:
    """Yield each micro-batch within a frame, equally many on every rank.

    A rank with fewer micro-batches yields `empty`, a batch without rollouts, in the remaining frames. frame: it is
    given true if any rank has images in the frame.
    """
    no_positions = {kind: torch.empty(0, dtype=torch.int64) for kind in (ColumnKind.TOKEN, ColumnKind.UNIT)}
    while True:
        micro = next(micros, None)
        most = ranks.all_max(0 if micro is None else 2 if micro[0].images else 1)
        if not most:
            return
        with frame(most == 2):
            yield micro or (empty, no_positions)


def iterate_frames(
    micros: Sequence[Batch], ranks: Ranks, *, compares_images: bool
) -> Iterator[tuple[Batch | None, bool]]:
    """Yield each micro-batch, equally often on every rank: None on a rank that has no more.

    The second is true if any rank has images in the frame, as far as `compares_images` lets ranks ask each other.
    """
    for index in range(ranks.all_max(len(micros))):
        micro = micros[index] if index < len(micros) else None
        own = int(micro is not None and bool(micro.images))
        yield micro, bool(ranks.all_max(own) if compares_images else own)
