"""Laws 5 and 6: the split of turns into rows changes nothing, and statistics count rollouts before any is dropped."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import ADVANTAGES, AlgorithmConfig, AlgorithmState, View
from etude.algorithms.corrections import CorrectionConfig
from etude.batch import Batch, Column, ColumnKind
from tests.conformance.laws import every_algorithm, few_examples, fixture, gradient, model_outputs, of_every_algorithm
from tests.sweeps import sweep

ALGORITHMS = every_algorithm()


def split_rows(batch: Batch, rng: np.random.Generator) -> tuple[Batch, torch.Tensor]:
    """Cut each row of a batch at random places. Return the new batch, and the old index of each of its tokens.

    Every later piece repeats some of the tokens before it as context. An action or an observation counts only in its
    own piece, as in `etude.data.samples`.
    """
    rows: list[tuple[int, list[tuple[int, bool]]]] = []  # (rollout, its tokens as (old index, True if new here))
    for r in range(batch.num_rows):
        start, end = int(batch.offsets[r]), int(batch.offsets[r + 1])
        cuts = sorted(set(rng.integers(start, end + 1, 2).tolist())) if end > start else []
        for a, b in zip([start, *cuts], [*cuts, end], strict=True):
            before = range(int(rng.integers(start, a + 1)), a)
            row = [(t, False) for t in before] + [(t, True) for t in range(a, b)]
            rows.append((int(batch.unit[r]), row))
    old = torch.tensor([t for _, row in rows for t, _ in row], dtype=torch.int64)
    new = torch.tensor([is_new for _, row in rows for _, is_new in row], dtype=torch.bool)
    action = new & batch.action[old]
    columns: dict[str, object] = {}
    for name, column in batch.columns():
        if column.kind in (ColumnKind.TOKEN, ColumnKind.TOKEN_K) and name not in batch.extra:
            columns[name] = column.tensor[old]
        elif column.kind is ColumnKind.UNIT and name not in batch.extra:
            columns[name] = column.tensor
    extra = {
        name: Column(c.kind, c.tensor[old] if c.kind is ColumnKind.TOKEN else c.tensor)
        for name, c in batch.extra.items()
    }
    columns |= {"action": action, "token_reward": torch.where(action, batch.require("token_reward")[old], torch.nan)}
    columns |= {"observation": new & batch.require("observation")[old], "extra": extra}
    columns |= {"part_names": batch.part_names, "source_names": batch.source_names}
    lengths = [len(row) for _, row in rows]
    return Batch(
        offsets=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        unit=torch.tensor([u for u, _ in rows]),
        group=batch.group,
        **columns,  # type: ignore[arg-type]
    ), old


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 50))
def test_merged_and_split_rows_have_the_same_gradient(name: str, seed: int) -> None:
    algorithm, merged = ALGORITHMS[name], fixture(seed)
    rows, _ = split_rows(merged, np.random.default_rng(seed))
    assert int(rows.action.sum()) == int(merged.action.sum())
    leaves = model_outputs(merged)
    a = gradient(algorithm, algorithm.estimate(merged, AlgorithmState()), leaves)
    b = gradient(algorithm, algorithm.estimate(rows, AlgorithmState()), leaves)
    assert b.close_to(a, 1e-10)


@sweep("name", [name for name in ADVANTAGES if name != "distillation"])
@settings(max_examples=6)
@given(seed=st.integers(0, 50))
def test_advantages_are_estimated_before_tokens_are_dropped(name: str, seed: int) -> None:
    batch = fixture(seed)
    batch = batch.replace(truncated=torch.arange(batch.num_rollouts) % 2 == 0)
    without_dropping = AlgorithmConfig(advantage=ADVANTAGES[name]()).estimate(batch, AlgorithmState()).batch
    dropping = AlgorithmConfig(
        advantage=ADVANTAGES[name](),
        mask_truncated=True,
        correction=CorrectionConfig(weight="mask", low=0.95, high=1.05),
    )
    with_dropping = dropping.estimate(batch, AlgorithmState()).batch
    assert torch.equal(with_dropping.require("advantage"), without_dropping.require("advantage"))
    assert not bool(with_dropping.require("keep")[batch.action].all())


@settings(max_examples=12)
@given(seed=st.integers(0, 50))
def test_a_rollout_without_actions_counts_in_its_group(seed: int) -> None:
    batch = fixture(seed, (3, 3), idle=False)
    idle = batch.replace(action=batch.action & ~(batch.unit[row_of(batch)] == 0))
    estimated = (
        AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]())
        .estimate(idle.replace(token_reward=None), AlgorithmState())
        .batch
    )
    mean = batch.require("reward")[:3].mean()
    view = View(estimated)
    first = view.column("advantage")[int(view.rollouts.offsets[1])]
    assert torch.allclose(first, batch.require("reward")[1] - mean)


def row_of(batch: Batch) -> torch.Tensor:
    return torch.searchsorted(batch.offsets, torch.arange(batch.num_tokens), right=True) - 1
