"""What shapes a run besides estimator and loss, restated: entropy bonus and mask, DAPO's penalty and filter."""

from __future__ import annotations

import numpy as np
import torch

from etude.algorithms import Algorithm, Denominators, Outputs, State, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.entropy import Entropy
from etude.algorithms.filters import Overlong, informative
from etude.algorithms.losses import LOSSES
from tests.conformance.fixtures import awkward
from tests.conformance.test_losses import VALUE, off_policy
from tests.conformance.twin import flat, tries


def test_entropy_bonus_is_reduced_as_the_loss_is() -> None:
    """−coefficient × entropy, here with the mean over rollouts of the mean over tokens."""
    batch, now = off_policy()
    loss = LOSSES["ppo"](reduction="seq-mean-token-mean")
    plain, bonus = (
        Algorithm(advantage=ADVANTAGES["rloo"](), loss=loss, entropy=Entropy(coefficient=c)) for c in (0.0, 0.3)
    )
    ready = plain.estimate(batch, State()).batch
    outputs = Outputs(logp=now.detach(), entropy=batch.entropy)
    whole = Denominators.of(View(ready))
    less, more = (float(a.objective(ready, outputs, whole, State()).loss) for a in (plain, bonus))
    means = [t["entropy"].mean() if len(t) else 0.0 for t in tries(batch)]
    np.testing.assert_allclose(more - less, -0.3 * np.mean(means), rtol=1e-9)


def test_top_entropy_keeps_the_most_uncertain_tokens() -> None:
    batch, _ = off_policy()
    algorithm = Algorithm(advantage=ADVANTAGES["rloo"](), entropy=Entropy(top_share=0.3))
    keep = algorithm.estimate(batch, State()).batch.need("keep")[View(batch).index].numpy()
    entropy = flat([t["entropy"] for t in tries(batch)])
    wanted = np.argsort(-entropy)[: round(0.3 * len(entropy))]
    assert {*keep.nonzero()[0]} == {*wanted}


def test_overlong_penalty() -> None:
    """min(−(len − (max − buffer)) / buffer · factor, 0), on the reward and not on the metric."""
    batch = awkward(3, longest=12)
    plain = Algorithm(advantage=ADVANTAGES["rloo"]())
    held = Algorithm(advantage=ADVANTAGES["rloo"](), overlong=Overlong(max_length=12, buffer=8, factor=0.5))
    before, after = (a.estimate(batch, State()).batch for a in (plain, held))
    lengths = np.array([len(t) for t in tries(batch)])
    wanted = np.minimum(-(lengths - 4) / 8 * 0.5, 0)
    assert (wanted < 0).any() and (wanted == 0).any()
    found = (after.need("reward") - before.need("reward")).numpy()
    np.testing.assert_allclose(found, wanted, rtol=VALUE, atol=VALUE)
    assert torch.equal(after.need("metric"), before.need("metric"))


def test_the_filter_keeps_groups_that_differ() -> None:
    """A group whose metric is all equal goes, a group of one stays."""
    metric = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 2])
    assert informative(metric, group).tolist() == [True, True, False, False, True]
