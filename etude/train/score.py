"""A reward model in this process: it returns a score for each token sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from etude.batch import Batch, ColumnKind, Pack
from etude.data.pack import pack_prefix_tree
from etude.models import Model
from etude.protocols import Ids
from etude.records import Rollout, Sample
from etude.train.forward import ForwardPass
from etude.train.micro_batches import iterate_micro_batches


class ModelScorer:
    """A reward model: a model with a score head, whose weights stay as they were loaded.

    consumes       sequences, from any number of concurrent callers in one event loop
    produces       the score of each, read at its last token
    waits for      a thread that computes one batch at a time; requests that arrive meanwhile form the next batch
    unblocked by   the end of that batch, or its failure, which is raised in every caller that waits for it

    A prefix that several sequences share is computed once.
    """

    def __init__(
        self, model: Model, max_tokens_per_micro_batch: int, *, pack: Callable[[Batch], Pack] = pack_prefix_tree
    ) -> None:
        for weight in model.parameters():
            weight.requires_grad_(False)
        self._model = model
        self._max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self._forward = ForwardPass(model, pack, 1.0)
        self._waiting: list[tuple[Sequence[Ids], asyncio.Future[NDArray[np.float64]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def score(self, sequences: Sequence[Ids]) -> NDArray[np.float64]:
        """Return one score per sequence, in their order."""
        result: asyncio.Future[NDArray[np.float64]] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, result))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._score_queue())
        return await result

    def score_now(self, sequences: Sequence[Ids]) -> NDArray[np.float64]:
        """Compute the scores in this thread and return them."""
        rows, rollouts = list[Sample](), list[Rollout]()
        for index, ids in enumerate(sequences):
            zeros = np.zeros(len(ids), np.int32)
            rows.append(Sample(ids, zeros.astype(np.bool_), zeros.astype(np.float32), zeros, zeros, index))
            rollouts.append(Rollout(index, index, 0, 0.0))
        scores = torch.empty(len(sequences), dtype=torch.float64)
        for micro, at in iterate_micro_batches(
            Batch.from_records(rows, rollouts), self._max_tokens_per_micro_batch, "rollout", self._model.device
        ):
            with torch.no_grad():
                scores[at[ColumnKind.UNIT]] = self._forward(micro, frozenset({"score"})).columns["score"].to(scores)
        return scores.numpy()

    async def _score_queue(self) -> None:
        """Score the waiting requests, and those that arrive meanwhile, until none is left."""
        while self._waiting:
            waiting = [(sequences, result) for sequences, result in self._waiting if not result.done()]
            self._waiting.clear()
            if not waiting:
                continue
            flat = [sequence for sequences, _ in waiting for sequence in sequences]
            try:
                scores = await asyncio.to_thread(self.score_now, flat)
            except Exception as error:
                for _, result in waiting:
                    if not result.done():
                        result.set_exception(error)
                continue
            ends = np.cumsum([len(sequences) for sequences, _ in waiting])
            for (_, result), part in zip(waiting, np.split(scores, ends[:-1]), strict=True):
                if not result.done():
                    result.set_result(part)
