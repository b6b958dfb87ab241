"""A batch keeps its rows through every operation, and names the row that breaks a rule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch, Column, ColumnKind, ranges
from etude.batch.split import _assign_evenly
from etude.errors import BatchError, MissingColumnError, RewardError
from etude.records import Rollout, Sample
from tests.batches import batches, random_batch, same, with_extras


def small(**changes: object) -> Batch:
    """Two rollouts of one group: rows [c A A] and [c A]."""
    columns: dict[str, object] = {
        "offsets": torch.tensor([0, 3, 5]),
        "unit": torch.tensor([0, 1]),
        "group": torch.tensor([0, 0]),
        "ids": torch.tensor([5, 6, 7, 5, 8], dtype=torch.int32),
        "action": torch.tensor([False, True, True, False, True]),
        "reward": torch.tensor([1.0, 0.0], dtype=torch.float64),
    }
    return Batch(**(columns | changes))  # type: ignore[arg-type]


def sample(rollout: int, ids: list[int], action: list[int], **changes: object) -> Sample:
    n = len(ids)
    columns: dict[str, object] = {"logp": np.zeros(n), "version": np.zeros(n, int), "turn": np.zeros(n, int)}
    return Sample(ids=ids, action=np.array(action, bool), rollout=rollout, **(columns | changes))  # type: ignore[arg-type]


@given(batches, st.data())
def test_selecting_keeps_the_chosen_rollouts(batch: Batch, data: st.DataObject) -> None:
    batch = with_extras(batch)
    wanted = data.draw(st.lists(st.integers(0, batch.num_rollouts - 1), min_size=1, max_size=6, unique=True))
    picked = batch.select(wanted)
    assert picked.num_rollouts == len(wanted)
    for place, u in enumerate(wanted):
        assert torch.equal(tokens_of(picked, place), tokens_of(batch, u))
    for name, column in picked.columns():
        if column.kind is ColumnKind.UNIT:
            assert torch.equal(column.tensor, dict(batch.columns())[name].tensor[wanted])
    together = [bool(batch.group[a] == batch.group[b]) for a, b in pairwise(wanted)]
    assert together == [bool(a == b) for a, b in pairwise(picked.group)]
    assert sorted(set(picked.group.tolist())) == list(range(picked.num_groups))


def tokens_of(batch: Batch, u: int) -> torch.Tensor:
    return batch.ids[int(batch.rollout_token_offsets[u]) : int(batch.rollout_token_offsets[u + 1])]


@given(batches, st.integers(1, 6), st.sampled_from(["rollout", "group"]))
def test_splitting_loses_nothing_and_cuts_no_unit(batch: Batch, parts: int, by: str) -> None:
    batch = with_extras(batch)
    pieces = batch.split(parts, by=by)
    assert len(pieces) == min(parts, batch.num_rollouts if by == "rollout" else len(batch.group.unique()))
    assert all(piece.num_rollouts for piece in pieces)
    ids = [int(i) for piece in pieces for i in piece.require("rollout_id")]
    assert sorted(ids) == sorted(batch.require("rollout_id").tolist())
    assert sum(piece.num_tokens for piece in pieces) == batch.num_tokens
    if by == "group":
        assert sum(piece.num_groups for piece in pieces) == batch.num_groups


@given(batches, batches)
def test_joining_and_selecting_are_inverse(a: Batch, b: Batch) -> None:
    a, b = with_extras(a), with_extras(b, 1)
    joined = Batch.concat([a, b])
    assert joined.num_groups == a.num_groups + b.num_groups
    assert same(joined.select(range(a.num_rollouts)), a)
    assert same(joined.select(range(a.num_rollouts, joined.num_rollouts)), b)


def test_a_split_is_balanced_by_tokens() -> None:
    batch = random_batch(0, (4,) * 16, longest=30)
    sizes = [piece.num_tokens for piece in batch.split(4)]
    assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes)


def test_a_split_leaves_no_part_out_however_unequal_the_rollouts() -> None:
    batch = Batch.from_records(
        [sample(u, [1] * length, [0] + [1] * (length - 1)) for u, length in enumerate([3] * 7 + [60])],
        [Rollout(id=u, task=u // 4, group=u // 4, reward=0.0) for u in range(8)],
    )
    assert [piece.num_rollouts for piece in batch.split(4)] == [2, 3, 2, 1]
    assert [piece.num_rollouts for piece in batch.split(8)] == [1] * 8
    assert [piece.num_rollouts for piece in batch.split(9)] == [1] * 8
    assert [piece.num_rollouts for piece in batch.split(4, by="group")] == [4, 4]


@given(st.lists(st.sampled_from([0.001, 0.25, 0.5, 1.001, 2.001, 50.0]), max_size=12), st.integers(1, 8))
def test_parts_are_ranges_of_units_and_none_is_empty(weights: list[float], parts: int) -> None:
    part = _assign_evenly(torch.tensor(weights, dtype=torch.float64), parts).tolist()
    assert part == sorted(part) and sorted(set(part)) == list(range(min(parts, len(weights))))


def test_records_become_rows_in_the_order_of_their_rollouts() -> None:
    rollouts = [Rollout(id=9, task=0, group=4, reward=1.0), Rollout(id=2, task=0, group=4, reward=0.0)]
    rows = [sample(2, [1, 2], [0, 1]), sample(9, [1, 3, 4], [0, 1, 1]), sample(9, [1, 5], [0, 1])]
    batch = Batch.from_records(rows, rollouts)
    assert batch.ids.tolist() == [1, 3, 4, 1, 5, 1, 2]
    assert batch.unit.tolist() == [0, 0, 1] and batch.group.tolist() == [0, 0]
    assert batch.require("rollout_id").tolist() == [9, 2] and batch.require("reward").dtype == torch.float64


def test_a_rollout_without_a_row_keeps_its_reward() -> None:
    rollouts = [Rollout(id=0, task=0, group=0, reward=1.0), Rollout(id=1, task=0, group=0, reward=0.0)]
    batch = Batch.from_records([sample(1, [1, 2], [0, 1])], rollouts)
    assert batch.num_rollouts == 2 and batch.rollout_token_offsets.tolist() == [0, 0, 2]


def test_a_reward_of_a_turn_stands_at_its_token() -> None:
    rollouts = [Rollout(id=0, task=0, group=0, reward=1.0), Rollout(id=1, task=0, group=0, reward=0.0)]
    rows = [sample(0, [1, 2], [0, 1]), sample(1, [1, 3], [0, 1], reward=[0.0, 0.25])]
    assert Batch.from_records(rows, rollouts).require("token_reward").tolist() == [0.0, 0.0, 0.0, 0.25]
    with pytest.raises(ValueError, match=r"The sample of rollout 1 .*reward 1"):
        sample(1, [1, 3], [0, 1], reward=[0.25])


def test_named_reward_parts_become_columns() -> None:
    rollouts = [Rollout(id=i, task=0, group=0, reward=1.0, parts={"b": i, "a": 2.0}) for i in range(2)]
    batch = Batch.from_records([], rollouts)
    assert batch.part_names == ("a", "b") and batch.require("reward_parts").tolist() == [[2.0, 0.0], [2.0, 1.0]]


def test_sources_stay_with_their_rollouts_when_batches_are_joined() -> None:
    made = [
        Batch.from_records([], [Rollout(n, task=n, group=n, reward=0.0, source=name) for n, name in enumerate(names)])
        for names in (["maths", "code"], ["", "maths"])
    ]
    assert made[0].source_names == ("code", "maths") and made[0].require("source").tolist() == [1, 0]
    joined = Batch.concat(made)
    names = [joined.source_names[place] for place in joined.require("source").tolist()]
    assert names == ["maths", "code", "", "maths"]


def test_a_batch_moves_whole() -> None:
    batch = with_extras(random_batch(3))
    moved = batch.to("meta")
    assert {c.tensor.device.type for _, c in moved.columns()} == {"meta"}
    assert same(batch.to("cpu"), batch)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group": torch.empty(0, dtype=torch.int64)}, "An empty batch trains nothing"),
        ({"offsets": torch.tensor([0, 5])}, "one entry more than there are rows (2)"),
        ({"offsets": torch.tensor([0, 6, 5])}, "Row 1 ends before it begins"),
        ({"offsets": torch.tensor([0, 3, 9])}, "The rows end at token 9, but `ids` has 5 tokens"),
        ({"unit": torch.tensor([0, 2])}, "Row 1 belongs to rollout 2; this batch has rollouts 0 to 1"),
        ({"unit": torch.tensor([1, 0])}, "Row 1 belongs to an earlier rollout than row 0"),
        ({"group": torch.tensor([0, 5])}, "Rollout 1 is in group 5, which is out of range"),
        ({"group": torch.tensor([-1, 0])}, "Rollout 0 is in group -1, which is out of range"),
        ({"action": torch.tensor([0, 1, 1, 0, 1])}, "`action` must be a bool column"),
        ({"old_logp": torch.zeros(4)}, "`old_logp` has 4 entries; as a token column it needs 5. Row 1 is the first"),
        ({"old_logp": torch.zeros(6)}, "`old_logp` has 6 entries; as a token column it needs 5."),
        ({"role": torch.zeros(3)}, "`role` has 3 entries; as a unit column it needs 2."),
        ({"teacher_topk_logp": torch.zeros(5)}, "must be [tokens, k]; its shape is (5,)"),
        (
            {"behavior_logp": torch.tensor([np.nan, -1.0, np.nan, 0.0, -1.0])},
            "Row 0 breaks the mask law: its token 2 is marked as an action but has no finite behavior log-prob",
        ),
        (
            {"version": torch.tensor([0, 0, 0, 0, -1])},
            "Row 1 breaks the mask law: its token 1 is marked as an action but does not say which policy version",
        ),
        ({"reward": torch.tensor([0.0, np.nan])}, "Rollout 1 has the reward nan"),
        (
            {"reward": torch.tensor([np.inf, 0.0]), "rollout_id": torch.tensor([70, 71])},
            "Rollout 70 has the reward inf",
        ),
        ({"reward_parts": torch.tensor([[0.0, 1.0], [0.0, -np.inf]])}, "Rollout 1 has the reward parts"),
        ({"ids": torch.zeros(5)}, "`ids` must be a flat column of integers; it is torch.float32"),
        ({"unit": torch.tensor([[0, 1]])}, "`unit` must be a flat column of integers"),
        ({"old_logp": torch.zeros(5, 2)}, "`old_logp` must be [tokens]; its shape is (5, 2)"),
        ({"old_logp": torch.zeros(5, dtype=torch.int64)}, "`old_logp` must hold floating-point numbers"),
        (
            {"turn": torch.tensor([-1, 1, 0, -1, 0])},
            "Row 0 breaks the order of time: its token 2 is of turn 0, after turn 1",
        ),
        ({"extra": {"ids": Column(ColumnKind.TOKEN, torch.zeros(5))}}, "A plug-in's column is called `ids`"),
        ({"extra": {"x": Column(ColumnKind.UNIT, torch.zeros(1))}}, "`x` has 1 entries; as a unit column it needs 2"),
    ],
)
def test_a_batch_that_breaks_a_rule_says_which(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises((BatchError, RewardError)) as raised:
        small(**changes)
    assert sentence in str(raised.value)


def test_context_tokens_may_have_any_value() -> None:
    small(behavior_logp=torch.tensor([np.nan, -1.0, -1.0, np.inf, -1.0]), version=torch.tensor([-9, 0, 0, -1, 0]))


def test_a_missing_column_is_named_with_who_needs_it() -> None:
    with pytest.raises(MissingColumnError, match=r"PPO needs the column `old_logp`.*it has ids, action, reward"):
        small().require("old_logp", needed_by="PPO")
    with pytest.raises(MissingColumnError, match="`anchor`"):
        small().require("anchor")


def test_a_replaced_column_is_checked_and_an_unknown_one_refused() -> None:
    batch = small()
    assert batch.replace(old_logp=torch.zeros(5)).require("old_logp").tolist() == [0] * 5
    with pytest.raises(BatchError, match="`old_logp` has 2 entries"):
        batch.replace(old_logp=torch.zeros(2))
    with pytest.raises(BatchError, match="`oldlogp` is not a column"):
        batch.replace(oldlogp=torch.zeros(5))
    with pytest.raises(RewardError, match="Rollout 0"):
        batch.replace(reward=torch.tensor([np.nan, 0.0]))
    with pytest.raises(BatchError, match="`mine` has 1 entries"):
        batch.replace(extra={"mine": Column(ColumnKind.TOKEN, torch.zeros(1))})


def test_joining_unlike_batches_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one is needed"):
        Batch.concat([])
    with pytest.raises(
        BatchError, match=r"Batches 0 and 1 cannot be joined: only one of them has the column `old_logp`"
    ):
        Batch.concat([small(), small(old_logp=torch.zeros(5))])
    with pytest.raises(BatchError, match="Batch 1 is of model `critic`"):
        Batch.concat([small(), small(model="critic")])


def test_impossible_selections_and_splits_are_refused() -> None:
    with pytest.raises(BatchError, match="this batch has 0 to 1"):
        small().select([2])
    with pytest.raises(BatchError, match="not 0 by `rollout`"):
        small().split(0)
    with pytest.raises(BatchError, match="not 2 by `row`"):
        small().split(2, by="row")


def test_a_mask_selects_where_it_is_true() -> None:
    batch = random_batch(0, (2, 2))
    names = batch.require("rollout_id").tolist()
    picked = batch.select(torch.tensor([True, False, False, True]))
    assert picked.require("rollout_id").tolist() == [names[0], names[3]]
    assert batch.select(torch.zeros(4, dtype=torch.bool)).num_rollouts == 0
    with pytest.raises(BatchError, match=r"A mask over rollouts needs 4 entries; its shape is \(3,\)"):
        batch.select(torch.ones(3, dtype=torch.bool))
    with pytest.raises(BatchError, match=r"a list of indices or a mask; float32"):
        batch.select(torch.tensor([0.7, 1.9]))
    with pytest.raises(BatchError, match=r"of shape \(1, 2\)"):
        batch.select(torch.tensor([[0, 1]]))


@pytest.mark.parametrize("column", ["greedy_reward", "metric", "reward"])
def test_a_number_added_later_must_be_finite_too(column: str) -> None:
    with pytest.raises(RewardError, match=r"Rollout 1 has the (greedy )?(reward|metric) nan"):
        small().replace(**{column: torch.tensor([0.0, np.nan])})


def test_behaviour_added_later_must_be_known_at_actions() -> None:
    with pytest.raises(BatchError, match="no finite behavior log-prob"):
        small().replace(behavior_logp=torch.full((5,), np.nan))
    with pytest.raises(BatchError, match="which policy version"):
        small().replace(version=torch.full((5,), -1))


def test_records_that_do_not_fit_are_refused() -> None:
    one = Rollout(id=0, task=0, group=0, reward=1.0)
    with pytest.raises(BatchError, match="at least one rollout"):
        Batch.from_records([], [])
    with pytest.raises(BatchError, match="Two rollouts have the id 0"):
        Batch.from_records([], [one, one])
    with pytest.raises(BatchError, match="Row 0 belongs to rollout 5"):
        Batch.from_records([sample(5, [1], [0])], [one])
    with pytest.raises(BatchError, match="these rows are of a and b"):
        Batch.from_records([sample(0, [1], [0], model="a"), sample(0, [1], [0], model="b")], [one])
    with pytest.raises(RewardError, match="Rollout 1 has reward parts"):
        Batch.from_records([], [Rollout(0, 0, 0, 1.0, {"a": 1.0}), Rollout(1, 0, 0, 1.0)])


def test_ranges() -> None:
    assert ranges(torch.tensor([3, 0, 7]), torch.tensor([2, 0, 1])).tolist() == [3, 4, 7]
