"""Parts are whole, and cost about the same to compute."""

from __future__ import annotations

import numpy as np
import pytest

from etude.batch import Batch, BatchMeta
from etude.data.pack import pack_prefix_tree
from etude.data.partition import _token_costs, partition_rollouts
from tests.train.tasks import answered, rollouts

ASKED, SAID = (4000, [100] * 8), (100, [4000] * 8)
"""A long prompt and short answers; a short prompt and long answers. Both have as many tokens."""


def computed(batch: Batch, parts: list[list[int]]) -> list[int]:
    """Count the tokens of each part that a model computes."""
    return [len(pack_prefix_tree(batch.select(part)).ids) for part in parts]


def imbalance(costs: list[int]) -> float:
    return max(costs) / (sum(costs) / len(costs)) - 1


def test_parts_are_whole_groups_of_about_the_same_cost() -> None:
    batch = rollouts(groups=9, size=5)
    for ranks in (1, 2, 4, 12):
        parts = partition_rollouts(batch, ranks)
        assert sorted(place for part in parts for place in part) == list(range(batch.num_rollouts))
        owners = [{int(batch.group[place]) for place in part} for part in parts]
        assert sum(map(len, owners)) == 9, "a group was divided"
    assert imbalance(computed(batch, partition_rollouts(batch, 3))) < 0.1


def test_a_prompt_that_is_computed_once_counts_once() -> None:
    two, eight = answered(ASKED, SAID), answered(SAID, *[ASKED] * 7)
    parts = partition_rollouts(two, 2)
    assert (
        parts == [[*range(8, 16)], [*range(8)]] and two.select(parts[0]).num_tokens == two.select(parts[1]).num_tokens
    )
    assert computed(two, parts) == [32_100, 4_800]
    assert imbalance([32_100, 4_800]) == pytest.approx(0.7398, abs=1e-4)  # two groups have no better division
    parts = partition_rollouts(eight, 2)
    assert parts == [[*range(8, 64)], [*range(8)]]
    assert computed(eight, parts) == [33_600, 32_100] and imbalance([33_600, 32_100]) < 0.023


def test_in_parts_of_rollouts_a_prompt_counts_once_for_each_rank() -> None:
    batch = answered(ASKED, SAID)
    parts = partition_rollouts(batch, 2, "rollout")
    assert computed(batch, parts) == [20_500, 20_500]
    assert [sum(place < 8 for place in part) for part in parts] == [4, 4]


def test_the_cost_of_a_group_is_its_computed_tokens() -> None:
    """Also if its rollouts begin differently, or one has no token."""
    for batch in (rollouts(seed=3, groups=5), answered((7, [3, 2, 5]), (4, [1]))):
        weighed = np.bincount(batch.group, weights=_token_costs(BatchMeta.from_batch(batch), 1))
        members = [np.flatnonzero(batch.group == group).tolist() for group in range(batch.num_groups)]
        assert weighed.tolist() == [len(pack_prefix_tree(batch.select(places)).ids) + len(places) for places in members]
    roles = answered((7, [3, 2]), (4, [1, 1])).replace(group=batch.group.new_zeros(4))
    assert _token_costs(BatchMeta.from_batch(roles), 1).sum() == len(pack_prefix_tree(roles).ids) + 4


def test_batch_metadata_is_partitioned_as_its_batch() -> None:
    batch = rollouts(seed=1, groups=6)
    chosen = [3, 17, 4, 5, 0, 11, 12]
    assert partition_rollouts(BatchMeta.from_batch(batch), 3) == partition_rollouts(batch, 3)
    assert partition_rollouts(BatchMeta.from_batch(batch).select(chosen), 2, "rollout") == partition_rollouts(
        batch.select(chosen), 2, "rollout"
    )
