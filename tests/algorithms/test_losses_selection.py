"""The tokens that a loss picks from a whole rollout batch: their number, which ones, and independence of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms.base import PolicyLoss
from etude.algorithms.losses.covariance import ClipCov, KLCov, quota, select_lowest, splitmix64
from etude.algorithms.losses.trust_region import M2PO, outliers
from etude.algorithms.view import Ranks, SingleRank, View
from etude.batch import Batch
from tests.algorithms.losses import off_policy
from tests.thread_ranks import on_ranks

SELECTING_LOSSES = [ClipCov(share=0.1, cov_low=0.0, cov_high=2.0), KLCov(share=0.1), M2PO(bound=0.03)]


def picked_tokens(batch: Batch, picked: Tensor | None) -> set[tuple[int, int]]:
    """Return the picked tokens, each as (rollout id, index among its actions)."""
    assert picked is not None
    view = View(batch)
    rollout = batch.require("rollout_id")[view.rollouts.segment_ids][picked]
    return set(zip(rollout.tolist(), view.rollouts.position[picked].tolist(), strict=True))


def wide_batch(seed: int = 0) -> Batch:
    batch = off_policy(seed, (3, 4, 2, 5, 3, 4))
    rng = np.random.default_rng(seed)
    return batch.replace(rollout_id=torch.from_numpy(rng.permutation(10_000)[: batch.num_rollouts]))


@pytest.mark.parametrize("loss", SELECTING_LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_order_and_ranks_do_not_change_the_picked_tokens(loss: PolicyLoss, seed: int) -> None:
    batch = wide_batch(seed)
    expected = picked_tokens(batch, loss.choose_tokens(View(batch), seed=7, step=3))
    assert expected
    rng = np.random.default_rng(seed)
    shuffled = batch.select(rng.permutation(batch.num_rollouts).tolist())
    assert picked_tokens(shuffled, loss.choose_tokens(View(shuffled), seed=7, step=3)) == expected

    for count in (2, 3):
        shares = batch.split(count, by="group")

        def pick(rank: int, ranks: Ranks, shares: list[Batch] = shares) -> set[tuple[int, int]]:
            return picked_tokens(shares[rank], loss.choose_tokens(View(shares[rank], ranks=ranks), seed=7, step=3))

        assert set().union(*on_ranks(count, pick)) == expected


def test_ties_of_covariances_are_broken_by_the_hash() -> None:
    """All covariances are 0, so any tokens could be the highest, and all ranks must pick the same ones."""
    batch = wide_batch()
    batch = batch.replace(advantage=torch.where(batch.action, 1.0, batch.require("advantage")))
    loss = KLCov(share=0.25)
    expected = picked_tokens(batch, loss.choose_tokens(View(batch), seed=1, step=0))
    assert len(expected) == int(0.25 * len(View(batch).action_index))

    shares = batch.split(3, by="group")

    def pick(rank: int, ranks: Ranks) -> set[tuple[int, int]]:
        return picked_tokens(shares[rank], loss.choose_tokens(View(shares[rank], ranks=ranks), seed=1, step=0))

    assert set().union(*on_ranks(3, pick)) == expected


@pytest.mark.parametrize("changed", [{"seed": 8}, {"step": 4}])
def test_another_seed_or_step_picks_other_tokens(changed: dict[str, int]) -> None:
    batch = wide_batch()
    loss = ClipCov(share=0.1, cov_low=-9.0, cov_high=9.0)
    before = picked_tokens(batch, loss.choose_tokens(View(batch), seed=7, step=3))
    assert picked_tokens(batch, loss.choose_tokens(View(batch), **{"seed": 7, "step": 3, **changed})) != before


def test_a_share_is_rounded_down_to_at_least_one_token() -> None:
    assert [quota(2e-4, n) for n in (0, 10, 9_999, 10_000)] == [1, 1, 1, 2]
    batch = wide_batch()
    picked = KLCov().choose_tokens(View(batch), seed=0, step=0)
    assert int(picked.sum()) == 1


@pytest.mark.parametrize("loss", SELECTING_LOSSES, ids=lambda loss: type(loss).__name__)
def test_a_batch_without_actions_picks_nothing(loss: PolicyLoss) -> None:
    batch = wide_batch()
    picked = loss.choose_tokens(View(batch.replace(action=torch.zeros_like(batch.action))), seed=0, step=0)
    assert picked is not None
    assert picked.shape == (0,)


def test_a_band_without_tokens_picks_nothing() -> None:
    batch = wide_batch()
    assert not bool(ClipCov(cov_low=100.0, cov_high=101.0).choose_tokens(View(batch), seed=0, step=0).any())


def test_the_lowest_values_over_ranks_have_the_exact_number() -> None:
    """One rank has all of the lowest values."""
    keys = (torch.arange(6), torch.arange(100, 102))
    picked = on_ranks(2, lambda rank, ranks: select_lowest(keys[rank], 4, ranks))
    assert [p.sum().item() for p in picked] == [4, 0]
    assert bool(select_lowest(torch.arange(3), 5, SingleRank()).all())


def test_mix_is_splitmix64() -> None:
    """The first three outputs of the reference generator with seed 0 are mix(0), mix(γ) and mix(2γ)."""
    gamma = -0x61C8864680B583EB
    inputs = torch.tensor([0, gamma]).cumsum(0)
    inputs = torch.cat([inputs, inputs[-1:] + gamma])
    unsigned = [value % 2**64 for value in splitmix64(inputs).tolist()]
    assert unsigned == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("values", "bound", "dropped"),
    [
        ([0.0, 0.01, 0.02, 1.0, 3.0], 0.04, [False, False, False, True, True]),
        ([0.0, 0.0, 0.05], 0.04, [False, False, False]),
        ([0.5, 0.5, 0.01], 0.3, [True, True, False]),
        ([2.0, 3.0], 0.04, [True, True]),
        ([], 0.04, []),
    ],
)
def test_outliers(values: list[float], bound: float, dropped: list[bool]) -> None:
    """The fewest of the largest values are dropped. Equal values are dropped together, even if one could stay."""
    assert outliers(torch.tensor(values, dtype=torch.float64), bound, SingleRank()).tolist() == dropped
