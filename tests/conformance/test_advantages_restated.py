"""Family (b): estimators that are a formula and not a gradient, compared with the formula restated in numpy.

The batches are random and awkward: groups of one and of several, rollouts of no token and of one, several turns and
rows a rollout, rewards paid along the way (some of them on a tool's answer), NaN wherever a column means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import AdvantageEstimate, AlgorithmState, View
from etude.algorithms.advantages import ADVANTAGES
from etude.batch import Batch
from etude.errors import BatchError
from tests.conformance import restated_advantages as restated
from tests.conformance import restated_turns
from tests.conformance.fixtures import awkward
from tests.conformance.twin import Array, Try, tries

TIGHT = 1e-9
"""How far a float64 result may be from its restatement."""
GROUPS = (3, 1, 4, 2, 5)


def batch(seed: int, *, along_the_way: bool = True, groups: Sequence[int] = GROUPS, longest: int = 9) -> Batch:
    """Group 3 earned the same twice; the others did not."""
    made = awkward(seed, groups, longest=longest)
    reward = torch.as_tensor(np.random.default_rng(seed).normal(size=made.num_rollouts))
    if not along_the_way:
        reward[made.group == 3] = 100.1
    acted = made.action.long().cumsum(0)
    earlier = torch.cat([acted.new_zeros(1), acted])[made.rollout_token_offsets[:-1].clamp(max=made.num_tokens)]
    answered = ~made.action & (
        acted > earlier.repeat_interleave(made.rollout_token_offsets.diff())
    )  # a tool's, in any row
    amounts = torch.linspace(-1, 2, made.num_tokens, dtype=torch.float64)  # no two alike
    paid = torch.where(answered, amounts, made.require("token_reward"))
    return made.replace(reward=reward, token_reward=paid if along_the_way else torch.zeros_like(amounts))


def estimate(name: str, of: Batch, state: AlgorithmState | None = None, **knobs: Any) -> AdvantageEstimate:
    return ADVANTAGES[name](**knobs)(View(of), state or AlgorithmState())


def agrees(found: torch.Tensor, wanted: Array) -> None:
    assert len(wanted) and np.abs(wanted).max() > 1e-3, "nothing is compared"
    np.testing.assert_allclose(found.numpy(), wanted, rtol=TIGHT, atol=TIGHT)


def restates(name: str, formula: Callable[[Sequence[Try]], Array], **knobs: Any) -> None:
    """The estimator is the formula, on ten awkward batches, of which one has rollouts of hundreds of tokens."""
    for seed in range(5):
        for along_the_way in (True, False):
            made = batch(seed, along_the_way=along_the_way, longest=200 if seed == 4 and along_the_way else 9)
            agrees(estimate(name, made, **knobs).advantage, formula(tries(made)))


def test_grpo() -> None:
    restates("grpo", restated.grpo)


def test_dr_grpo() -> None:
    restates("dr_grpo", restated.dr_grpo)


def test_batch_mean() -> None:
    """All groups are compared with one mean, groups of one too."""
    restates("batch_mean", restated.batch_mean)


def test_batch_std() -> None:
    restates("batch_std", restated.batch_std)


def test_rloo() -> None:
    restates("rloo", restated.rloo)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(gamma: float) -> None:
    restates("reinforce++", lambda of: restated.reinforce_pp(of, gamma), gamma=gamma)


def test_reinforce_pp_baseline() -> None:
    restates("reinforce++_baseline", restated.reinforce_pp_baseline)


def test_remax() -> None:
    restates("remax", restated.remax)


def test_opo() -> None:
    restates("opo", restated.opo)


@pytest.mark.parametrize("f_norm", [1.0, 0.5])
def test_gpg(f_norm: float) -> None:
    restates("gpg", lambda of: restated.gpg(of, f_norm), f_norm=f_norm)


def test_maxrl() -> None:
    for seed in range(5):
        made = batch(seed).replace(token_reward=None)
        reward = (made.reward.abs() > 0.5).double() if made.reward is not None else None
        made = made.replace(reward=reward)
        agrees(estimate("maxrl", made).advantage, restated.maxrl(tries(made)))


def test_gdpo() -> None:
    for seed in range(5):
        made = batch(seed)
        found = estimate("gdpo", made, weights={"correct": 1.0, "format": 0.25})
        agrees(found.advantage, restated.gdpo(tries(made), [1.0, 0.25]))


@pytest.mark.parametrize("groups", [(2, 3, 5), (4,)])
def test_pass_at_k(groups: tuple[int, ...]) -> None:
    for seed in range(5):
        made = batch(seed, groups=groups)
        agrees(estimate("pass_at_k", made).advantage, restated.pass_at_k(tries(made)))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pkpo(k: int) -> None:
    for seed in range(5):
        made = batch(seed, groups=(4, 5, 6))
        agrees(estimate("pkpo", made, k=k).advantage, restated.pkpo(tries(made), k))


@pytest.mark.parametrize("divide", [False, True])
def test_opob(divide: bool) -> None:
    restates("opob", lambda of: restated.opob(of, divide=divide), normalize=divide)


def test_token_baseline() -> None:
    restates("token_baseline", restated.token_baseline)


def test_token_baseline_refuses_probabilities_of_two_policies() -> None:
    """No distribution has a Σπ² below the square of one of its probabilities, or above what all but one leave for it.
    What float32 rounds away is no reason."""
    made = batch(0)
    logp, squares = made.require("old_logp"), made.require("sum_pi_squared")
    estimate("token_baseline", made)
    first = int(made.action.nonzero()[2])
    most = logp.exp().square() + (1 - logp.exp()).square()
    for wrong in (logp.exp().square() * 0.99, most * 1.01):
        other = squares.clone()
        other[first] = wrong[first]
        assert re.search(r"no distribution has", refusal(made.replace(sum_pi_squared=other)))
    sure = torch.where(made.action, -1e-7, torch.nan).float()
    rounded = torch.where(made.action, 1 - 3e-7, torch.nan).float()
    found = estimate("token_baseline", made.replace(old_logp=sure, sum_pi_squared=rounded)).advantage
    assert bool(torch.isfinite(found).all())


def refusal(of: Batch) -> str:
    """The sentence that the token baseline refuses a batch with; nothing where it does not."""
    try:
        estimate("token_baseline", of)
    except BatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    for seed in range(5):
        made = batch(seed, longest=200 if seed == 4 else 9)
        found = estimate("gae", made, gamma=gamma, lam=lam, whiten=False)
        advantage, returns = restated.gae(tries(made), gamma, lam)
        agrees(found.advantage, advantage)
        assert found.returns is not None
        agrees(found.returns, returns)


def test_gae_whitened() -> None:
    made = batch(0)
    advantage, returns = restated.gae(tries(made), 1.0, 0.95)
    found = estimate("gae", made, gamma=1.0, lam=0.95, whiten=True)
    agrees(found.advantage, restated.whitened(advantage))
    assert found.returns is not None
    agrees(found.returns, returns)


def test_gae_bootstraps_what_was_cut_off() -> None:
    made = batch(0)
    worth = torch.linspace(-1, 1, made.num_rollouts, dtype=torch.float64)
    made = made.replace(final_value=worth)
    cut = made.require("truncated")
    assert 0 < int(cut.sum()) < made.num_rollouts
    found = estimate("gae", made, gamma=0.9, lam=0.8, bootstrap_truncated=True)
    agrees(found.advantage, restated.gae(tries(made), 0.9, 0.8, torch.where(cut, worth, 0.0).tolist())[0])


def test_distillation() -> None:
    restates("distillation", restated.distillation)


def test_rae() -> None:
    made, before = batch(0), {0: 0.7}
    found = estimate("rae", made, AlgorithmState(role_means=before), decay=0.9)
    advantage, means = restated.rae(tries(made), before, 0.9)
    agrees(found.advantage, advantage)
    assert found.state is not None and {*found.state.role_means} == {0, 1}
    for role, mean in means.items():
        assert abs(found.state.role_means[role] - mean) < TIGHT


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "gamma"), [("to_go", 1.0), ("to_go", 0.8), ("final_to_all", 1.0)])
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards(how: str, gamma: float, baseline: str) -> None:
    def formula(of: Sequence[Try]) -> Array:
        values = restated_turns.step_rewards(of, how, gamma)
        values = restated_turns.less_the_others(of, values) if baseline == "group" else values
        return restated_turns.over_tokens(of, values)

    restates("step_rewards", formula, how=how, gamma=gamma, baseline=baseline)


def test_turn_baseline() -> None:
    restates("turn_baseline", restated_turns.turn_baseline)


def test_turn_baseline_biased() -> None:
    restates("turn_baseline_biased", restated_turns.turn_baseline_biased)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_mt_grpo(weight: float) -> None:
    restates("mt_grpo", lambda of: restated_turns.mt_grpo(of, weight), turn_weight=weight)


@pytest.mark.parametrize(("weight", "gamma", "divide"), [(1.0, 0.95, False), (0.5, 1.0, True)])
def test_gigpo(weight: float, gamma: float, divide: bool) -> None:
    for seed in range(5):
        made = batch(seed, along_the_way=seed % 2 == 0)
        made = made.replace(anchor=made.ids.long() % 2)
        of = tries(made, anchor=made.require("anchor"))
        found = estimate("gigpo", made, step_weight=weight, gamma=gamma, normalize=divide)
        agrees(found.advantage, restated_turns.gigpo(of, weight, gamma, divide))
