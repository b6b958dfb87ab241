"""KL terms: gradients compared with exact ones by enumeration, huge log-ratios, and the controller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import ADVANTAGES, KLS, LOSSES, AlgorithmConfig
from etude.algorithms.base import AlgorithmState
from etude.algorithms.kl import (
    CONTROLLERS,
    AdaptiveKLController,
    FixedKLController,
    KLTerm,
    ReverseKL,
    RewardKL,
    adapt_coefficient,
    k3,
    list_warnings,
)
from etude.algorithms.view import Outputs, View
from etude.errors import BatchError, ConfigError, MissingColumnError
from etude.observe import Metrics
from tests.algorithms.flat import flat_view, float64
from tests.batches import random_batch
from tests.thread_ranks import on_ranks

EXACT = 1e-9
TOKENS = 5
POLICY, REF, SAMPLER = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DIVERGENCES = {
    "reverse": lambda p, q: (p * (p / q).log()).sum(),
    "forward": lambda p, q: (q * (q / p).log()).sum(),
    "twice the total variation": lambda p, q: (p - q).abs().sum(),
}


def one_token_gradient(kl: KLTerm, sampler: Tensor | None = None) -> Tensor:
    """Return the expected gradient of a term for one token in one state: over all tokens, by their probability under μ.

    Without a sampler, μ is the policy itself.
    """
    theta = POLICY.clone().requires_grad_()
    logp, ref = theta.log_softmax(0), REF.log_softmax(0)
    mu = logp.detach() if sampler is None else sampler.log_softmax(0)
    outputs = {"logp": logp}
    if "full_kl" in kl.forward_outputs():
        outputs["full_kl"] = DIVERGENCES["reverse"](logp.exp(), ref.exp()).expand(TOKENS)
    view = flat_view([1] * TOKENS, outputs=outputs, ref_logp=ref, behavior_logp=mu)
    return torch.autograd.grad((mu.exp() * kl.per_token_kl(view)).sum(), theta)[0]


def exact_gradient(divergence: str) -> Tensor:
    theta = POLICY.clone().requires_grad_()
    return torch.autograd.grad(DIVERGENCES[divergence](theta.softmax(0), REF.softmax(0)), theta)[0]


@pytest.mark.parametrize(
    ("name", "options", "divergence"),
    [
        ("reverse", {}, "reverse"),
        ("forward", {}, "forward"),
        ("total_variation", {}, "twice the total variation"),
        ("full", {}, "reverse"),
        ("weighted_reverse", {"estimator": "k1"}, "reverse"),
        ("weighted_reverse", {"estimator": "k3"}, "reverse"),
    ],
)
def test_a_term_has_the_gradient_of_its_divergence(name: str, options: dict[str, Any], divergence: str) -> None:
    torch.testing.assert_close(one_token_gradient(KLS[name](**options)), exact_gradient(divergence), rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("name", "options", "divergence"),
    [
        ("reverse", {}, "reverse"),
        ("total_variation", {}, "twice the total variation"),
        ("weighted_reverse", {"estimator": "k1"}, "reverse"),
        ("weighted_reverse", {"estimator": "k3"}, "reverse"),
    ],
)
def test_off_policy_the_weight_restores_the_gradient(name: str, options: dict[str, Any], divergence: str) -> None:
    kl = KLS[name](off_policy=True, **options)
    torch.testing.assert_close(one_token_gradient(kl, SAMPLER), exact_gradient(divergence), rtol=0, atol=EXACT)
    unweighted = one_token_gradient(KLS[name](**options), SAMPLER)
    assert (unweighted - exact_gradient(divergence)).abs().max() > 1e-2


def test_full_needs_no_weight_off_policy() -> None:
    torch.testing.assert_close(
        one_token_gradient(KLS["full"](), SAMPLER), exact_gradient("reverse"), rtol=0, atol=EXACT
    )


def test_attached_k3_has_the_gradient_of_detached_k2_for_each_token() -> None:
    batch = random_batch(11, (4, 3))
    result = []
    for kl in (KLS["weighted_reverse"](off_policy=True), ReverseKL(off_policy=True)):
        logp = View(batch).column("old_logp").requires_grad_()
        view = View(batch, Outputs(logp=View(batch).scatter(logp, torch.nan)))
        result.append(torch.autograd.grad(kl.per_token_kl(view).sum(), logp)[0])
    torch.testing.assert_close(result[0], result[1], rtol=0, atol=EXACT)


def two_token_gradients(kl: KLTerm, sampled_by: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the expected gradient of a term over all sequences of two tokens, and that of KL(π_θ ‖ π_ref)."""
    tables = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    theta, ref = tables[0].clone().requires_grad_(), tables[1]
    first, second = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
    first, second = first.flatten(), second.flatten()

    def sequence_logp(table: Tensor) -> Tensor:
        """Return log-probs [9, 2] from logits [4, 3], which are those of the start and after each first token."""
        logp = table.log_softmax(1)
        return torch.stack([logp[0, first], logp[1 + first, second]], 1)

    mu = sequence_logp(theta.detach() if sampled_by is None else sampled_by)
    logp, reference_logp = sequence_logp(theta), sequence_logp(ref)
    view = flat_view(
        [2] * 9,
        outputs={"logp": logp.flatten()},
        ref_logp=reference_logp.flatten(),
        behavior_logp=mu.flatten(),
        old_logp=mu.flatten(),
    )
    weight = mu.sum(1).exp()
    if kl.in_reward:
        batch, _ = kl.apply(view, AlgorithmState(), Metrics())
        cost = -batch.require("token_reward").index_select(0, view.action_index).view(9, 2).sum(1)
        loss = (weight * cost * logp.sum(1)).sum()
    else:
        loss = (weight * kl.per_token_kl(view).view(9, 2).sum(1)).sum()
    sequence = (sequence_logp(theta).sum(1).exp() * (sequence_logp(theta) - reference_logp).sum(1)).sum()
    return torch.autograd.grad(loss, theta)[0], torch.autograd.grad(sequence, theta)[0]


@pytest.mark.parametrize("kl", [KLS["sequence"](), RewardKL(coefficient=1)], ids=["sequence", "in_reward"])
def test_the_kl_of_sequences_is_exact(kl: KLTerm) -> None:
    torch.testing.assert_close(*two_token_gradients(kl), rtol=0, atol=EXACT)


def test_the_kl_of_sequences_is_exact_off_policy() -> None:
    sampler = torch.randn(4, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(*two_token_gradients(KLS["sequence"](off_policy=True), sampler), rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["reverse", "weighted_reverse", "forward"])
def test_summed_token_terms_are_not_the_kl_of_sequences(name: str) -> None:
    result, expected = two_token_gradients(KLS[name]())
    assert (result - expected).norm() / expected.norm() > 0.05


@pytest.mark.parametrize("name", sorted(set(KLS) - {"full", "in_reward"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_log_ratios_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    logp = torch.tensor([-1e3, -0.5, -1e3, -2, -3], dtype=dtype, requires_grad=True)
    ref = torch.tensor([-0.5, -1e3, -0.5, -2, -2.5], dtype=dtype)
    for options in ({}, {"off_policy": True}) if "off_policy" in KLS[name].model_fields else ({},):
        view = flat_view([2, 0, 1, 2], outputs={"logp": logp}, ref_logp=ref, behavior_logp=ref)
        terms = KLS[name](**options).per_token_kl(view)
        (grad,) = torch.autograd.grad(terms.sum(), logp)
        assert torch.isfinite(terms).all() and torch.isfinite(grad).all()


def test_k3_is_clamped_and_keeps_its_gradient() -> None:
    delta = float64([-1e3, -21, -3, 0, 3, 1e3]).requires_grad_()
    value = k3(delta)
    (gradient,) = torch.autograd.grad(value.sum(), delta)
    clamped = float64([-20, -20, -3, 0, 3, 20])
    torch.testing.assert_close(value, (-clamped).exp() - 1 + clamped, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, 1 - (-clamped).exp(), rtol=1e-12, atol=1e-12)


def restated_kl(batch: Any) -> float:
    """Return log π_old − log π_ref, averaged over each rollout's action tokens, then over rollouts."""
    means = []
    for u in range(batch.num_rollouts):
        positions = range(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1]))
        deltas = [float(batch.old_logp[t] - batch.ref_logp[t]) for t in positions if batch.action[t]]
        means.append(sum(deltas) / len(deltas) if deltas else 0.0)
    return sum(means) / len(means)


@pytest.mark.parametrize("name", sorted(KLS))
def test_every_kl_term_measures_the_same_kl(name: str) -> None:
    batch, metrics = random_batch(2, (4, 4)), Metrics()
    after, _ = KLS[name](coefficient=0.25).apply(View(batch), AlgorithmState(), metrics)
    assert metrics.reduce() == {"kl": pytest.approx(restated_kl(batch), abs=1e-12), "kl_coefficient": 0.25}
    assert (after is batch) == (name != "in_reward")


@pytest.mark.parametrize("has_token_rewards", [True, False])
def test_kl_in_the_reward_is_added_to_token_rewards(has_token_rewards: bool) -> None:
    batch = random_batch(6, (3, 3))
    batch = batch if has_token_rewards else batch.replace(token_reward=None)
    after, state = RewardKL(coefficient=0.5).apply(View(batch), AlgorithmState(), Metrics())
    token_reward, view = after.require("token_reward"), View(batch)
    before = (
        view.column("token_reward") if has_token_rewards else torch.zeros(len(view.action_index), dtype=torch.float64)
    )
    expected = before - 0.5 * (view.column("old_logp") - view.column("ref_logp"))
    torch.testing.assert_close(token_reward[view.action_index], expected, rtol=0, atol=1e-12)
    context = token_reward[~batch.action]
    assert torch.isnan(context).all() if has_token_rewards else (context == 0).all()
    assert state == AlgorithmState()


def test_the_coefficient_changes_by_at_most_a_fifth_per_horizon() -> None:
    coefficients = [
        adapt_coefficient(2.0, kl=kl, target=0.1, horizon=100, rollouts=50) for kl in (0, 0.09, 0.1, 0.11, 5)
    ]
    assert coefficients == pytest.approx([1.8, 1.9, 2.0, 2.1, 2.2])


def test_the_adaptive_coefficient_starts_as_configured_and_is_kept_in_the_state() -> None:
    kl = ReverseKL(coefficient=0.2, controller=AdaptiveKLController(target=0.05, horizon=40))
    state, expected = AlgorithmState(role_means={3: 0.5}), 0.2
    for seed in range(6):
        batch, metrics = random_batch(seed, (3, 2)), Metrics()
        assert kl.current_coefficient(state) == pytest.approx(expected, rel=1e-12)
        _, state = kl.apply(View(batch), state, metrics)
        assert metrics.reduce()["kl_coefficient"] == pytest.approx(expected, rel=1e-12)
        expected *= 1 + min(max(restated_kl(batch) / 0.05 - 1, -0.2), 0.2) * 5 / 40
    assert kl.current_coefficient(state) == pytest.approx(expected, rel=1e-12)
    assert state.role_means == {3: 0.5}
    assert ReverseKL(coefficient=0.2, controller=FixedKLController()).current_coefficient(state) == 0.2


def test_the_reward_uses_the_current_coefficient() -> None:
    batch = random_batch(6, (3, 3)).replace(token_reward=None)
    kl = RewardKL(coefficient=0.2, controller=AdaptiveKLController(target=10.0, horizon=10))
    after, state = kl.apply(View(batch), AlgorithmState(kl_value=0.7), Metrics())
    view = View(batch)
    expected = -0.7 * (view.column("old_logp") - view.column("ref_logp"))
    torch.testing.assert_close(after.require("token_reward")[view.action_index], expected, rtol=0, atol=1e-12)
    assert state.kl_value == pytest.approx(0.7 * (1 - 0.2 * 6 / 10))


def test_ranks_compute_the_same_coefficient_as_one_rank() -> None:
    batch = random_batch(8, (3, 2, 4))
    kl = ReverseKL(controller=AdaptiveKLController(target=0.01, horizon=30))
    one_rank = kl.apply(View(batch), AlgorithmState(), Metrics())[1].kl_value
    parts = [batch.select([0, 1, 2]), batch.select([3, 4]), batch.select([5, 6, 7, 8])]
    result = on_ranks(
        3, lambda rank, ranks: kl.apply(View(parts[rank], ranks=ranks), AlgorithmState(), Metrics())[1].kl_value
    )
    assert result == pytest.approx([one_rank] * 3, rel=1e-12)


def test_rollouts_without_actions_count_as_zero_kl() -> None:
    view = flat_view([1, 0], old_logp=float64([-1]), ref_logp=float64([-2]))
    metrics = Metrics()
    ReverseKL().apply(view, AlgorithmState(), metrics)
    assert metrics.reduce()["kl"] == 0.5


def test_an_infinite_kl_names_the_rollout() -> None:
    view = flat_view(
        [1, 2],
        old_logp=float64([-1, -1, -1]),
        ref_logp=float64([-1, -1, -torch.inf]),
        rollout_id=torch.tensor([40, 41]),
    )
    with pytest.raises(BatchError, match=r"not finite at action token 1 of rollout 41: log π_old − log π_ref = inf"):
        ReverseKL().apply(view, AlgorithmState(), Metrics())


def test_a_missing_reference_is_named() -> None:
    view = flat_view([1], old_logp=float64([-1]))
    with pytest.raises(MissingColumnError, match=r"The KL to the reference needs the column `ref_logp`"):
        ReverseKL().apply(view, AlgorithmState(), Metrics())


def test_each_kl_term_declares_columns_and_outputs() -> None:
    for name, kind in KLS.items():
        assert kind().required_columns() == {"old_logp", "ref_logp"}
        assert kind().forward_outputs() == ({"logp", "full_kl"} if name == "full" else {"logp"})
    supporting = {name for name, kind in KLS.items() if "off_policy" in kind.model_fields}
    assert supporting == {"reverse", "total_variation", "weighted_reverse", "sequence"}
    for name in supporting:
        assert KLS[name](off_policy=True).required_columns() == {"old_logp", "ref_logp", "behavior_logp"}


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_the_sequence_kl_refuses_reductions_that_divide_by_a_length(reduction: str) -> None:
    with pytest.raises(ConfigError, match=rf"`loss.reduction={reduction}` would divide by a length"):
        AlgorithmConfig(kl=KLS["sequence"](), loss=LOSSES["ppo"](reduction=reduction))
    assert AlgorithmConfig(kl=KLS["sequence"](), loss=LOSSES["ppo"](reduction="seq-mean-token-sum")).kl is not None


def test_a_kl_in_the_reward_under_grpo_is_warned_about() -> None:
    (warning,) = list_warnings(RewardKL(), ADVANTAGES["grpo"]())
    assert "a statistic of its group's rewards" in warning and "rloo" in warning
    assert list_warnings(RewardKL(), ADVANTAGES["rloo"]()) == []
    assert list_warnings(ReverseKL(), ADVANTAGES["grpo"]()) == []
    for scaling in (ADVANTAGES["mt_grpo"](), ADVANTAGES["gpg"](), ADVANTAGES["pass_at_k"](normalize=True)):
        assert len(list_warnings(RewardKL(), scaling)) == 1
    assert list_warnings(RewardKL(), ADVANTAGES["pass_at_k"]()) == []


def test_a_kl_in_the_reward_adds_nothing_to_the_loss() -> None:
    logp = float64([-1.0, -2.0]).requires_grad_()
    terms = RewardKL().per_token_kl(flat_view([2], outputs={"logp": logp}))
    assert terms.tolist() == [0, 0]


def test_a_coefficient_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="coefficient"):
        ReverseKL(coefficient=0)
    assert set(CONTROLLERS) == {"fixed", "adaptive"}
