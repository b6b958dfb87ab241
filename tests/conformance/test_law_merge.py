"""Laws 5 and 6: how turns became rows changes nothing, and statistics count rollouts before anything is dropped."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import ADVANTAGES, AlgorithmConfig, AlgorithmState, View
from etude.algorithms.corrections import CorrectionConfig
from etude.batch import Batch, Column, ColumnKind
from tests.conformance.laws import every_algorithm, few, fixture, gradient, of_every_algorithm, said
from tests.sweeps import sweep

ALGORITHMS = every_algorithm()


def apart(batch: Batch, rng: np.random.Generator) -> tuple[Batch, torch.Tensor]:
    """The same rollouts with turns kept apart: each row is cut at random places, and every later piece repeats
    some of what came before it as context. Also, for each token of the new batch, which old token it repeats. What was
    chosen and what was observed is so in its own piece alone, as `etude.data.samples` has it."""
    rows: list[tuple[int, list[tuple[int, bool]]]] = []  # (rollout, its (old token, is it new here))
    for r in range(batch.num_rows):
        start, end = int(batch.offsets[r]), int(batch.offsets[r + 1])
        cuts = sorted(set(rng.integers(start, end + 1, 2).tolist())) if end > start else []
        for a, b in zip([start, *cuts], [*cuts, end], strict=True):
            before = range(int(rng.integers(start, a + 1)), a)
            row = [(t, False) for t in before] + [(t, True) for t in range(a, b)]
            rows.append((int(batch.unit[r]), row))
    old = torch.tensor([t for _, row in rows for t, _ in row], dtype=torch.int64)
    new = torch.tensor([own for _, row in rows for _, own in row], dtype=torch.bool)
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
    columns |= {"observation": new & batch.require("observation")[old], "part_names": batch.part_names, "extra": extra}
    lengths = [len(row) for _, row in rows]
    return Batch(
        offsets=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        unit=torch.tensor([u for u, _ in rows]),
        group=batch.group,
        **columns,  # type: ignore[arg-type]
    ), old


@of_every_algorithm
@few
@given(seed=st.integers(0, 50))
def test_merged_or_apart_the_gradient_is_the_same(name: str, seed: int) -> None:
    algorithm, merged = ALGORITHMS[name], fixture(seed)
    rows, _ = apart(merged, np.random.default_rng(seed))
    assert int(rows.action.sum()) == int(merged.action.sum())
    leaves = said(merged)
    a = gradient(algorithm, algorithm.estimate(merged, AlgorithmState()), leaves)
    b = gradient(algorithm, algorithm.estimate(rows, AlgorithmState()), leaves)
    assert b.close_to(a, 1e-10)


@sweep("name", [name for name in ADVANTAGES if name != "distillation"])
@settings(max_examples=6)
@given(seed=st.integers(0, 50))
def test_advantages_are_estimated_before_anything_is_dropped(name: str, seed: int) -> None:
    batch = fixture(seed)
    batch = batch.replace(truncated=torch.arange(batch.num_rollouts) % 2 == 0)
    gentle = AlgorithmConfig(advantage=ADVANTAGES[name]()).estimate(batch, AlgorithmState()).batch
    harsh = AlgorithmConfig(
        advantage=ADVANTAGES[name](),
        mask_truncated=True,
        correction=CorrectionConfig(weight="mask", low=0.95, high=1.05),
    )
    dropped = harsh.estimate(batch, AlgorithmState()).batch
    assert torch.equal(dropped.require("advantage"), gentle.require("advantage"))
    assert not bool(dropped.require("keep")[batch.action].all())


@settings(max_examples=12)
@given(seed=st.integers(0, 50))
def test_a_rollout_that_did_nothing_still_counts_in_its_group(seed: int) -> None:
    batch = fixture(seed, (3, 3), idle=False)
    idle = batch.replace(action=batch.action & ~(batch.unit[row_of(batch)] == 0))
    found = (
        AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]())
        .estimate(idle.replace(token_reward=None), AlgorithmState())
        .batch
    )
    mean = batch.require("reward")[:3].mean()
    view = View(found)
    first = view.column("advantage")[int(view.rollouts.offsets[1])]
    assert torch.allclose(first, batch.require("reward")[1] - mean)


def row_of(batch: Batch) -> torch.Tensor:
    return torch.searchsorted(batch.offsets, torch.arange(batch.num_tokens), right=True) - 1
