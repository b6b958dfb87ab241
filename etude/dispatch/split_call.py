"""A call that is split over ranks, and whose results are joined, as the method's dispatch mode says.

    batch ──► shares of whole rollouts or groups, about equal ──► ranks ──► results ──► in the order of the batch

A rank may get no rollout at all. It is called like the others, because they may need to exchange tensors with it.
Several ranks in a row may compute the same share together. Each of them gets it, and one of their results is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etude.batch import Batch, BatchMeta
from etude.dispatch.remote_batch import RemoteBatch
from etude.observe import Metrics
from etude.protocols import DispatchMode, Gather, Split

Partitioner = Callable[[Batch | BatchMeta, int, Literal["rollout", "group"]], Sequence[Sequence[int]]]
"""A function that assigns the rollouts of a batch to ranks, by whole rollouts or whole groups, each rank's in order."""


@dataclass(frozen=True)
class SplitCall:
    """The arguments of each rank, and how the results are joined."""

    gather: Gather
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    """One entry for each share; one for all if all ranks get the same."""
    batch_split: tuple[Batch | RemoteBatch, Sequence[Sequence[int]]] | None = None
    """The one batch that was split, and the rollouts of each share."""
    repeats: int = 1
    """The number of ranks in a row that get the same share."""

    def uses_answer_of(self, rank: int) -> bool:
        """Return True if this rank's result is used."""
        if self.gather is Gather.FIRST:
            return rank == 0
        return self.gather is Gather.ALL or rank % self.repeats == 0

    def join(self, answers: Sequence[Callable[[], Any]]) -> Any:
        """Join the ranks' results. Each is read only if it is used."""
        if self.gather is Gather.FIRST:
            return answers[0]()
        if self.gather is Gather.ALL:
            return [answer() for answer in answers]
        results = [answer() for answer in answers[:: self.repeats]]
        if self.gather is Gather.METRICS:
            metrics = Metrics()
            for result in results:
                metrics.merge(result)
            return metrics
        assert self.batch_split is not None, "the one batch that was split gives the order of the results"
        batch, shares = self.batch_split
        order = [rollout for share in shares for rollout in share]
        joined = Batch.concat([result for result in results if result.num_rollouts] or results[:1])
        inverse = sorted(range(len(order)), key=order.__getitem__)
        group = batch.group if isinstance(batch, Batch) else batch.outline.group
        return joined.select(inverse).replace(group=group)


def split_call(
    mode: DispatchMode,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: int,
    partition: Partitioner,
    repeats: int = 1,
) -> SplitCall:
    """Split a call over ranks: batches are split, also those in a list; all other arguments go to every rank.

    `repeats` ranks in a row get the same share.
    """
    if mode.split is Split.SAME:
        return SplitCall(mode.gather, [(args, kwargs)])
    num_shares = ranks // repeats
    by: Literal["rollout", "group"] = "rollout" if mode.split is Split.ROLLOUTS else "group"
    batch_splits: list[tuple[Batch | RemoteBatch, Sequence[Sequence[int]]]] = []

    def split_value(value: Any) -> list[Any]:
        if isinstance(value, Batch | RemoteBatch):
            shares = partition(value.outline if isinstance(value, RemoteBatch) else value, num_shares, by)
            batch_splits.append((value, shares))
            return [value.select(item) for item in shares]
        if isinstance(value, list | tuple) and any(isinstance(item, Batch | RemoteBatch) for item in value):
            return [list(item) for item in zip(*(split_value(item) for item in value), strict=True)]
        return [value] * num_shares

    by_place = [split_value(value) for value in args]
    by_name = {name: split_value(value) for name, value in kwargs.items()}
    arguments = [
        ([item[holder] for item in by_place], {name: item[holder] for name, item in by_name.items()})
        for holder in range(num_shares)
    ]
    return SplitCall(mode.gather, arguments, batch_splits[0] if len(batch_splits) == 1 else None, repeats)
