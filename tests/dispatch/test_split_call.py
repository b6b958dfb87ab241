"""Calls that are divided over ranks and joined again, with the serialization between."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch
from etude.data.partition import partition_rollouts
from etude.dispatch.messages import deserialize, serialize
from etude.dispatch.split_call import split_call
from etude.errors import BatchError, TrainingError
from etude.observe import Last, Mean, Metrics, Sum
from etude.protocols import DispatchMode, Gather, Split
from tests.batches import batches, random_batch, same, with_extras


def through(spread: DispatchMode, ranks: int, work: Any, *args: Any, repeats: int = 1, **kwargs: Any) -> Any:
    """Make a call to this many ranks, in this process, with serialization."""
    division = split_call(spread, args, kwargs, ranks, partition_rollouts, repeats)
    bodies = [serialize(arguments) for arguments in division.arguments]
    answers = []
    for rank in range(ranks):
        given_args, given_kwargs = deserialize(bodies[rank * len(bodies) // ranks])
        answer = work(*given_args, **given_kwargs)
        answers.append(serialize(answer if division.uses_answer_of(rank) else None))
    return division.join([partial(deserialize, answer) for answer in answers])


@given(batch=batches, ranks=st.integers(1, 5), split=st.sampled_from([Split.ROLLOUTS, Split.GROUPS]))
def test_a_divided_batch_is_joined_unchanged(batch: Batch, ranks: int, split: Split) -> None:
    seen: list[Batch] = []

    def work(share: Batch, *, factor: float) -> Batch:
        seen.append(share)
        return share.replace(reward=share.require("reward") * factor)

    batch = with_extras(batch)
    joined = through(DispatchMode(split, Gather.CONCAT), ranks, work, batch, factor=2.0)
    assert same(joined, batch.replace(reward=batch.require("reward") * 2))
    assert len(seen) == ranks and sum(share.num_rollouts for share in seen) == batch.num_rollouts
    if split is Split.GROUPS:
        assert sum(share.group.unique().numel() for share in seen) == len(batch.group.unique())


@given(batch=batches, holders=st.integers(1, 3), repeats=st.integers(1, 3))
def test_ranks_of_one_part_get_the_same_data_and_one_of_them_answers(batch: Batch, holders: int, repeats: int) -> None:
    seen: list[Batch] = []

    def count(share: Batch) -> Metrics:
        seen.append(share)
        return Metrics({"rollouts": Sum.of(share.num_rollouts)})

    def double(share: Batch) -> Batch:
        return share.replace(reward=share.require("reward") * 2)

    ranks, batch = holders * repeats, with_extras(batch)
    metrics = through(DispatchMode(Split.GROUPS, Gather.METRICS), ranks, count, batch, repeats=repeats)
    assert metrics.reduce()["rollouts"] == batch.num_rollouts
    assert all(same(seen[rank], seen[rank - rank % repeats]) for rank in range(ranks))
    joined = through(DispatchMode(Split.GROUPS, Gather.CONCAT), ranks, double, batch, repeats=repeats)
    assert same(joined, double(batch))
    answers = through(
        DispatchMode(Split.GROUPS, Gather.ALL), ranks, lambda share: share.num_rollouts, batch, repeats=repeats
    )
    assert len(answers) == ranks and sum(answers) == repeats * batch.num_rollouts
    counts = through(
        DispatchMode(Split.SAME, Gather.METRICS), ranks, lambda: Metrics({"n": Sum.of(1)}), repeats=repeats
    )
    assert counts.reduce()["n"] == ranks, "what is not divided every rank says for itself"


def test_each_batch_of_a_list_is_divided_separately() -> None:
    parts = [random_batch(i, (2, 2)) for i in range(3)]
    counts = through(
        DispatchMode(Split.GROUPS, Gather.ALL), 2, lambda received: [b.num_rollouts for b in received], parts
    )
    assert counts == [[2, 2, 2]] * 2


def test_arguments_for_all_ranks_are_packed_once() -> None:
    batch = random_batch(0)
    division = split_call(DispatchMode(Split.SAME, Gather.ALL), [batch], {}, 4, partition_rollouts)
    assert len(division.arguments) == 1
    assert through(DispatchMode(Split.SAME, Gather.ALL), 4, lambda b: b.num_tokens, batch) == [batch.num_tokens] * 4
    assert through(DispatchMode(Split.SAME, Gather.FIRST), 4, lambda b: b.num_tokens, batch) == batch.num_tokens


def test_a_result_of_all_ranks_together_is_packed_once() -> None:
    batch = random_batch(0, (2, 1, 3))
    division = split_call(DispatchMode(Split.GROUPS, Gather.CONCAT), [batch], {}, 6, partition_rollouts, repeats=3)
    assert [args[0].num_rollouts for args, _ in division.arguments] == [3, 3]
    assert [rank for rank in range(6) if division.uses_answer_of(rank)] == [0, 3]


def test_metrics_and_empty_batches_are_serialized() -> None:
    metrics = Metrics({"mean": Mean.over(torch.tensor(3.0), 2), "sum": Sum.of(4), "last": Last.of(1), "none": Mean()})
    received = deserialize(serialize({"metrics": metrics}))["metrics"]
    assert received.reduce() == metrics.reduce() == {"mean": 1.5, "sum": 4, "last": 1}
    received.merge(metrics)
    assert received.reduce()["sum"] == 8
    nothing = deserialize(serialize(random_batch(0).select([])))
    assert (nothing.num_rollouts, nothing.num_rows, nothing.num_tokens, nothing.num_groups) == (0, 0, 0, 0)
    with pytest.raises(BatchError, match="An empty batch trains nothing"):
        random_batch(0).replace(group=torch.empty(0, dtype=torch.int64))


def test_errors_of_etude_are_serialized_with_their_notes() -> None:
    error = TrainingError("It went wrong.")
    error.add_note("And how.")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__notes__) == (TrainingError, "It went wrong.", ["And how."])
