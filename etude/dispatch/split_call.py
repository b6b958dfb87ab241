"""A call divided over ranks, and their answers made one again, as the method's `spread` says.

    batch ──► shares of whole rollouts or groups, about equal ──► ranks ──► answers ──► in the order of the batch

A rank may get no rollout at all: it is called like the others, because they may want to exchange something with it.
Ranks in a row may compute the same share together: each of them is given it, and one answer of theirs counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etude.batch import Batch, BatchMeta
from etude.dispatch.remote_batch import RemoteBatch
from etude.observe import Metrics
from etude.protocols import DispatchMode, Gather, Split

__all__ = ["Partitioner", "SplitCall", "split_call"]

Partitioner = Callable[[Batch | BatchMeta, int, Literal["rollout", "group"]], Sequence[Sequence[int]]]
"""Which rollouts of a batch each of so many ranks gets, by whole rollouts or whole groups; each one's in order."""


@dataclass(frozen=True)
class SplitCall:
    """What each rank is called with, and whose answers count."""

    gather: Gather
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    """One for each share; where all get the same, one for all."""
    batch_split: tuple[Batch | RemoteBatch, Sequence[Sequence[int]]] | None = None
    """The one batch that was cut, and which of its rollouts went where."""
    repeats: int = 1
    """How many ranks in a row are given the same share."""

    def uses_answer_of(self, rank: int) -> bool:
        """Whether what this rank answers counts."""
        if self.gather is Gather.FIRST:
            return rank == 0
        return self.gather is Gather.ALL or rank % self.repeats == 0

    def join(self, answers: Sequence[Callable[[], Any]]) -> Any:
        """One answer of the ranks', each of which is read only if it is wanted."""
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
        assert self.batch_split is not None, "answers are put in order by the one batch that the call was cut from"
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
    """The call of each rank. Batches are cut, also those in a list, one share for as many ranks in a row as `repeats`
    says; everything else goes to all."""
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
