"""Score centering: what the sampler's own distribution does to the policy is taken out, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, View
from etude.algorithms.advantages.group import RLOO
from etude.algorithms.centering import expected_loss
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.logits import topk_logp_with_tail
from etude.algorithms.losses import LOSSES
from etude.batch import Batch
from etude.errors import BatchError, ConfigError
from tests.conformance.mdp import (
    MDP,
    PROMPTS,
    STATES,
    TOKENS,
    draw,
    gradient,
    logp,
    make_mdp,
    over_states,
    sum_along_paths,
    visits,
)

THETA = draw(1, STATES, TOKENS)
SAMPLER = (THETA / 0.5).round() * 0.5 / 0.8
"""Logits that were rounded, at a lower temperature."""
LATER = THETA + draw(9, STATES, TOKENS, scale=0.3)
TOKENWISE = sorted(name for name, loss in LOSSES.items() if loss.is_tokenwise)
CORRECTIONS = {
    "none": CorrectionConfig(),
    "truncated": CorrectionConfig(weight="truncate", high=1.1),
    "masked": CorrectionConfig(weight="mask", low=0.8, high=1.25),
    "rejected": CorrectionConfig(reject=(RejectionRule(low=0.8, high=1.25),)),
}


def algorithm_of(loss: str, correction: CorrectionConfig, *, center: bool = True) -> AlgorithmConfig:
    """Return the algorithm with a sum over tokens, so that each state counts as often as it is visited."""
    correction = CorrectionConfig(**{**dict(correction), "center": center})
    return AlgorithmConfig(advantage=RLOO(), loss=LOSSES[loss](reduction="seq-mean-token-sum"), correction=correction)


def recorded(mdp: MDP, batch: Batch, k: int) -> Batch:
    """Return the batch with the k likeliest tokens of the sampler at each token."""
    table = logp(mdp.mu).detach()
    state = batch.extra["state"].tensor
    ids = table.topk(k).indices
    old = logp(mdp.theta if mdp.old is None else mdp.old).detach()
    return batch.replace(
        alternative_ids=ids[state],
        alternative_logp=table.gather(1, ids)[state],
        old_alternative_logp=topk_logp_with_tail(old, ids)[state],
    )


def expected_gradient(
    mdp: MDP, algorithm: AlgorithmConfig, *, k: int = TOKENS, advantage: float | None = None
) -> Tensor:
    """Return Σ P(group) · ∇loss(group) over pairs, with one advantage for all tokens or the algorithm's own."""
    batch, probability = mdp.batch(2)
    batch = algorithm.estimate(recorded(mdp, batch, k), AlgorithmState()).batch
    if advantage is not None:
        batch = batch.replace(advantage=torch.full_like(batch.require("advantage"), advantage))
    share = (probability * len(probability))[batch.group].repeat_interleave(batch.rollout_token_offsets.diff())
    theta = mdp.theta.detach().clone().requires_grad_()
    state = batch.extra["state"].tensor
    alternatives = topk_logp_with_tail(logp(theta)[state], batch.require("alternative_ids"))
    view = View(batch, replace(mdp.outputs(batch, theta), alternative_logp=alternatives))
    terms, _ = algorithm.loss.per_token_loss(view)
    if batch.weight is not None:
        terms = terms * view.column("weight")
    if algorithm.correction.center:
        terms = terms - expected_loss(algorithm.loss, view, algorithm.correction)[0]
    terms = torch.where(view.column("keep"), terms, 0.0) * share[view.action_index]
    return gradient(algorithm.loss.reduce_terms(terms, view, Denominators.from_view(view)), theta)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", TOKENWISE)
def test_equal_advantages_move_nothing(loss: str, advantage: float) -> None:
    """With one advantage everywhere no token was better than another: any gradient is the sampler's own."""
    mdp = make_mdp(theta=LATER, old=THETA, mu=SAMPLER)
    for name, correction in CORRECTIONS.items():
        if correction.weight != "none" and "behavior_logp" in LOSSES[loss]().required_columns():
            continue  # refused: the loss compares with the sampler itself
        centered = expected_gradient(mdp, algorithm_of(loss, correction), advantage=advantage)
        plain = expected_gradient(mdp, algorithm_of(loss, correction, center=False), advantage=advantage)
        assert plain.abs().max() > 0.01 or loss == "ipo", f"{name}: without centering there is a drift"
        assert centered.abs().max() < 1e-14, name
        some = expected_gradient(mdp, algorithm_of(loss, correction), advantage=advantage, k=2)
        assert some.abs().max() < 1e-14, "with all but one token recorded, the rest is that one"


def test_the_rest_as_one_token_leaves_a_part_of_the_drift() -> None:
    mdp = make_mdp(theta=LATER, old=THETA, mu=SAMPLER)
    correction = CORRECTIONS["truncated"]
    left = expected_gradient(mdp, algorithm_of("reinforce", correction), advantage=1.0, k=1)
    plain = expected_gradient(mdp, algorithm_of("reinforce", correction, center=False), advantage=1.0)
    assert 1e-3 < left.abs().max() < 0.4 * plain.abs().max()


def test_what_is_left_is_the_covariance_of_value_and_score() -> None:
    """REINFORCE: Σ_s visits(s) · Cov_q(Q, ∇log p), the useful part alone."""
    mdp = make_mdp(mu=SAMPLER)
    centered = expected_gradient(mdp, algorithm_of("reinforce", CorrectionConfig()))
    q = logp(SAMPLER).exp()
    action_value = state_action_values(mdp)
    weight = q * (action_value - (q * action_value).sum(1, keepdim=True))
    exact = -over_states(mdp.theta, SAMPLER, lambda theta: (weight * logp(theta)).sum(1))
    torch.testing.assert_close(centered, exact, rtol=0, atol=1e-14)
    assert exact.abs().max() > 0.01


def state_action_values(mdp: MDP) -> Tensor:
    """[S, 3]: return Q of the sampler, as the derivative of the value by each token's probability."""
    table = logp(SAMPLER).exp().detach().requires_grad_()
    # J = Σ_paths Π q · R: its derivative by q(s, a) is the chance to reach s times Q(s, a)

    total = (sum_along_paths(table.log()).exp() * mdp.reward).sum() / PROMPTS
    return gradient(total, table) * PROMPTS / visits(SAMPLER)[:, None]


@pytest.mark.parametrize("loss", TOKENWISE)
def test_on_policy_it_changes_nothing(loss: str) -> None:
    mdp = make_mdp()
    for k in (1, TOKENS):
        centered = expected_gradient(mdp, algorithm_of(loss, CorrectionConfig()), k=k)
        plain = expected_gradient(mdp, algorithm_of(loss, CorrectionConfig(), center=False))
        torch.testing.assert_close(centered, plain, rtol=0, atol=1e-14)


def test_the_algorithm_subtracts_what_was_expected() -> None:
    mdp = make_mdp(theta=LATER, old=THETA, mu=SAMPLER)
    algorithm = algorithm_of("ppo", CORRECTIONS["truncated"])
    estimated = algorithm.estimate(recorded(mdp, mdp.batch(2)[0], 2), AlgorithmState())
    theta = mdp.theta.detach().clone().requires_grad_()
    state = estimated.batch.extra["state"].tensor
    alternatives = topk_logp_with_tail(logp(theta)[state], estimated.batch.require("alternative_ids"))
    outputs = replace(mdp.outputs(estimated.batch, theta), alternative_logp=alternatives)
    view = View(estimated.batch, outputs)
    denominators = Denominators.from_view(view)
    expected, _ = expected_loss(algorithm.loss, view, algorithm.correction)
    plain = algorithm.loss(view, denominators).loss
    value = algorithm.compute_loss(estimated.batch, outputs, denominators, estimated.state)
    torch.testing.assert_close(value.loss, plain - algorithm.loss.reduce_terms(expected, view, denominators))
    metrics = value.metrics.reduce()
    assert 0.5 < metrics["center/mass"] < 1
    assert metrics["center/drift"] > 0.01


def test_log_probs_of_two_distributions_are_refused() -> None:
    mdp = make_mdp(mu=SAMPLER)
    batch = recorded(mdp, mdp.batch(2)[0], 2)
    other = batch.replace(alternative_logp=batch.require("alternative_logp") - 0.01)
    with pytest.raises(BatchError, match=r"two log-probs of action token \d+ of rollout \d+.*differ by 0\.01"):
        algorithm_of("ppo", CorrectionConfig()).estimate(other, AlgorithmState())


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - set(TOKENWISE)))
def test_a_loss_of_more_than_one_token_is_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match=r"needs one loss for each token.*Choose `ppo`, `cispo`"):
        AlgorithmConfig(loss=LOSSES[loss](), correction=CorrectionConfig(center=True))


@pytest.mark.parametrize(
    "option",
    [
        {"weight": "truncate", "level": "sequence"},
        {"weight": "truncate", "normalize": "tokens"},
        {"reject": ({"over": "seq_mean", "high": 2.0},)},
        {"opsm_delta": 0.1},
    ],
)
def test_a_correction_of_whole_rollouts_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"weighs tokens, and `correction\.\w+.*rollouts"):
        CorrectionConfig.model_validate({"center": True, **option})
