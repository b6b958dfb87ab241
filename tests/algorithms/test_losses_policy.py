"""Every policy loss: options, units, splits, extremes, empty rollouts, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms.base import PolicyLoss
from etude.algorithms.losses import LOSSES
from etude.algorithms.losses.clip import ppo
from etude.algorithms.losses.decoupled_ppo import log_linear
from etude.algorithms.losses.trust_region import dppo_drops, flash_drops, ipo_drops
from etude.algorithms.reduce import Denominators
from etude.algorithms.segments import Segments
from etude.algorithms.view import Outputs, View
from etude.batch import Batch
from etude.errors import BatchError, ConfigError, MissingColumnError
from tests.algorithms.losses import finite_differences, loss_and_gradient, model_outputs, off_policy, summed_over_parts
from tests.sweeps import sweep

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{"clip_low": 0.05}, {"clip_high": 0.05}, {"dual_clip": 1.21}],
    "gspo": [{"clip_low": 0.2}, {"clip_high": 0.2}],
    "cispo": [{"low": 0.9}, {"high": 1.1}],
    "sapo": [{"tau_positive": 2.0}, {"tau_negative": 2.0}],
    "gmpo": [{"clip": 0.1}],
    "dppo": [{"divergence": "kl"}, {"threshold_low": 0.05}, {"threshold_high": 0.05}, {"cap": 1.1}],
    "clip_cov": [{"clip_low": 0.05}, {"clip_high": 0.05}, {"share": 0.4}, {"cov_low": -9.0}, {"cov_high": 9.0}],
    "kl_cov": [{"share": 0.2}, {"coefficient": 3.0}],
    "dro": [{"beta": 2.0}],
    "reinforce": [{"cap": 1.1}],
    "gpg": [],
    "decoupled_ppo": [{"prox": "log_linear"}, {"clip_low": 0.05}, {"clip_high": 0.05}],
    "vespo": [{"power_positive": 1.0}, {"decay_positive": 1.0}, {"power_negative": 1.0}, {"decay_negative": 1.0}],
    "m2po": [{"bound": 0.01}],
    "ipo": [{"threshold": 0.1}],
    "flash_reinforce": [{"threshold": 0.3}],
}
COMMON_OPTIONS: list[dict[str, Any]] = [
    {"reduction": "token-sum"},
    {"reduction": "seq-mean-token-sum"},
    {"reduction": "seq-mean-token-sum-norm", "norm_length": 7.0},
]
BASE: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "clip_cov": {"share": 0.1, "cov_low": 0.1, "cov_high": 0.5},
    "flash_reinforce": {"threshold": 0.1},
}
"""Options of a loss with which each of its other options has an effect on a small batch."""


def make_loss(name: str, **options: Any) -> PolicyLoss:
    return LOSSES[name](**{**BASE.get(name, {}), **options})


def with_chosen_tokens(loss: PolicyLoss, batch: Batch) -> Batch:
    """Return the batch with the tokens that the loss picks."""
    view = View(batch)
    picked = loss.choose_tokens(view, seed=1, step=0)
    return batch if picked is None else batch.replace(chosen=view.scatter(picked, fill=False))


def test_every_option_of_a_policy_loss_is_tested() -> None:
    for name, kind in LOSSES.items():
        own_options = kind.model_fields.keys() - PolicyLoss.model_fields.keys()
        assert own_options == {option for options in OPTIONS[name] for option in options}, name
        assert all(field.description for field in kind.model_fields.values())


@pytest.mark.kept
@sweep(("name", "options"), [(n, o) for n in LOSSES for o in OPTIONS[n] + (COMMON_OPTIONS if n != "gmpo" else [])])
def test_every_knob_changes_the_gradient(name: str, options: dict[str, Any]) -> None:
    batch = off_policy(3, (4, 4, 5), drift=0.5)
    outputs = model_outputs(batch, drift=0.5)
    before, after = make_loss(name), make_loss(name, **options)
    _, first = loss_and_gradient(before, with_chosen_tokens(before, batch), outputs)
    _, second = loss_and_gradient(after, with_chosen_tokens(after, batch), outputs)
    assert float((first - second).abs().max()) > 1e-6


@sweep("name", LOSSES)
@sweep("unit", ["rollout", "turn"])
def test_a_split_into_micro_batches_changes_nothing(name: str, unit: str) -> None:
    batch = off_policy(5, (3, 2, 4, 1))
    outputs = model_outputs(batch)
    loss = make_loss(name, unit=unit, reduction="seq-mean-token-mean")
    value, gradient = loss_and_gradient(loss, batch, outputs)
    for parts in (2, 5, batch.num_rollouts):
        total, own_options = summed_over_parts(loss, batch, outputs, parts)
        assert total == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(own_options, gradient, rtol=1e-10, atol=1e-13)


@sweep("name", LOSSES)
@sweep("sign", [-1.0, 1.0])
@sweep("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_a_thousand_are_finite(name: str, sign: float, dtype: torch.dtype) -> None:
    batch = off_policy(1)
    columns_of_dtype = {n: batch.require(n).to(dtype) for n in ("old_logp", "behavior_logp", "advantage")}
    batch = batch.replace(**columns_of_dtype)
    outputs = {"logp": batch.require("old_logp") + sign * 1e3}
    value, gradient = loss_and_gradient(LOSSES[name](), batch, outputs)
    assert np.isfinite(value)
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[~batch.action] == 0).all())


@sweep("name", LOSSES)
def test_half_precision_is_widened(name: str) -> None:
    batch = off_policy(1)
    outputs = model_outputs(batch)
    half_precision = {n: batch.require(n).bfloat16() for n in ("old_logp", "behavior_logp", "advantage")}
    exact = batch.replace(**{n: column.float() for n, column in half_precision.items()})
    value, _ = loss_and_gradient(LOSSES[name](), batch.replace(**half_precision), {"logp": outputs["logp"].bfloat16()})
    expected, _ = loss_and_gradient(LOSSES[name](), exact, {"logp": outputs["logp"].bfloat16().float()})
    assert value == expected


@sweep("name", LOSSES)
def test_rollouts_without_actions_count_and_have_no_loss(name: str) -> None:
    """One of several rollouts contributes 0 and counts; a batch of only such rollouts has a loss of 0."""
    batch = off_policy(2, (2, 2))
    loss = LOSSES[name](reduction="seq-mean-token-mean")
    half_without_actions = batch.replace(
        action=batch.action & (torch.arange(batch.num_tokens) < int(batch.rollout_token_offsets[2]))
    )
    outputs = model_outputs(batch)
    value, _ = loss_and_gradient(loss, half_without_actions, outputs)
    loss_of_others, _ = loss_and_gradient(
        loss, half_without_actions.select([0, 1]), {"logp": outputs["logp"][: int(batch.rollout_token_offsets[2])]}
    )
    assert value == pytest.approx(loss_of_others / 2)
    without_actions = batch.replace(action=torch.zeros_like(batch.action))
    value_without_actions, gradient = loss_and_gradient(loss, without_actions, outputs)
    assert value_without_actions == 0
    assert bool((gradient == 0).all())


@sweep("name", LOSSES)
def test_rejected_tokens_have_no_gradient(name: str) -> None:
    batch = off_policy(4)
    keep = torch.from_numpy(np.random.default_rng(0).random(batch.num_tokens) < 0.6)
    _, gradient = loss_and_gradient(make_loss(name), batch.replace(keep=keep), model_outputs(batch))
    assert bool((gradient[~keep] == 0).all())
    assert bool((gradient[keep & batch.action] != 0).any())


@sweep("name", LOSSES)
def test_a_policy_loss_reads_exactly_its_declared_columns(name: str) -> None:
    loss = LOSSES[name]()
    batch = off_policy(0)
    outputs = model_outputs(batch)
    names = {n for n, _ in batch.columns()} & {"old_logp", "behavior_logp", "ref_logp", "version", "chosen", "turn"}
    bare = batch.replace(**dict.fromkeys(names - loss.required_columns()))
    assert loss_and_gradient(loss, bare, outputs)[0] == loss_and_gradient(loss, batch, outputs)[0]
    for column in names & loss.required_columns():
        with pytest.raises(MissingColumnError, match=column):
            view = View(batch.replace(**{column: None}), Outputs(logp=outputs["logp"]))
            loss.choose_tokens(view, seed=0, step=0)
            loss(view, Denominators.from_view(view))


# -- over turns -------------------------------------------------------------------------------------------------------


def turn_slices(batch: Batch) -> list[slice]:
    ends = np.cumsum(View(batch).turns.lengths.numpy())
    return [slice(int(b - n), int(b)) for b, n in zip(ends, View(batch).turns.lengths.tolist(), strict=True)]


def columns(batch: Batch, outputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    view = View(batch)
    names = ("old_logp", "behavior_logp", "advantage")
    return {n: view.column(n).numpy() for n in names} | {"logp": outputs["logp"][view.action_index].numpy()}


@pytest.mark.parametrize("name", ["gspo", "gmpo", "vespo"])
def test_losses_over_turns_equal_their_formulas(name: str) -> None:
    """Compare with the formula over turns, in which factors without a gradient are constant."""
    batch = off_policy(6)
    outputs = model_outputs(batch, drift=0.2)
    x, turns = columns(batch, outputs), turn_slices(batch)
    a, frozen = x["advantage"], x["logp"]

    def gspo(logp: np.ndarray, t: slice) -> np.ndarray:
        s = np.exp(np.mean(frozen[t] - x["old_logp"][t])) * np.exp(logp[t] - frozen[t])
        return np.maximum(-a[t] * s, -a[t] * np.clip(s, 1 - 0.05, 1 + 0.07))

    def gmpo(logp: np.ndarray, t: slice) -> np.ndarray:
        r = logp[t] - x["old_logp"][t]
        return -a[t] * np.exp(np.mean(np.where(a[t] > 0, np.minimum(r, 0.1), np.maximum(r, -0.1))))

    def vespo(logp: np.ndarray, t: slice) -> np.ndarray:
        w = np.exp(np.sum(frozen[t] - x["behavior_logp"][t]))
        k, decay = np.where(a[t] > 0, 2, 3), np.where(a[t] > 0, 3, 2)
        return -(w**k) * np.exp(decay * (1 - w)) * a[t] * logp[t]

    formulas: dict[str, tuple[Callable[[Any, slice], Any], dict[str, Any]]] = {
        "gspo": (gspo, {"clip_low": 0.05, "clip_high": 0.07}),
        "gmpo": (gmpo, {"clip": 0.1}),
        "vespo": (vespo, {"reduction": "seq-mean-token-mean"}),
    }
    formula, options = formulas[name]

    def formula_mean(logp: np.ndarray) -> float:
        return sum(float(formula(logp, t).mean()) for t in turns) / len(turns)

    value, gradient = loss_and_gradient(LOSSES[name](unit="turn", **options), batch, outputs)
    assert value == pytest.approx(formula_mean(frozen), abs=1e-12)
    np.testing.assert_allclose(gradient[batch.action].numpy(), finite_differences(formula_mean, frozen), atol=1e-8)


# -- parts of losses --------------------------------------------------------------------------------------------------


def test_ppo_by_hand() -> None:
    """The ratios are 2 and ½, with both signs of A; ε = 0.2 and c = 1.5."""
    logp = torch.tensor([2.0, 2.0, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss, is_clipped = ppo(logp, torch.zeros_like(logp), advantage, clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, 1.5, -0.5, 0.8], dtype=torch.float64))
    assert is_clipped.tolist() == [True, True, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -0.5, 0.0], dtype=torch.float64))


def test_the_proximal_policy_is_interpolated_by_its_version() -> None:
    logp, behavior = torch.tensor([-1.0] * 4).double(), torch.tensor([-3.0] * 4).double()
    loss_and_gradient = log_linear(
        logp.requires_grad_(),
        behavior,
        prox_version=torch.tensor([5, 5, 5, 5]),
        behavior_version=torch.tensor([5, 4, 2, 6]),
        version=torch.tensor([6, 6, 6, 6]),
    )
    torch.testing.assert_close(loss_and_gradient, torch.tensor([-3.0, -2.0, -1.5, -1.0]).double())
    assert not loss_and_gradient.requires_grad


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_drops_only_tokens_that_move_further_away(divergence: Any) -> None:
    mu = torch.tensor([0.3, 0.3, 0.3, 0.3, 1e-4, 0.3]).log()
    now = torch.tensor([0.8, 0.8, 0.02, 0.02, 5e-3, 0.8]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    threshold = 0.2 if divergence == "tv" else 0.05
    drop = dppo_drops(now, mu, advantage, divergence=divergence, low=threshold, high=threshold)
    assert drop.tolist() == [True, False, False, True, False, False]
    wide = dppo_drops(now, mu, advantage, divergence=divergence, low=threshold, high=1.0)
    assert wide.tolist() == [False, False, False, True, False, False], "only the upper threshold bounds a rise"


def test_ipo_drops_tokens_that_moved_far_in_either_direction() -> None:
    mu = torch.tensor([0.3, 0.3, 0.5, 0.5, 1e-4]).log()
    now = torch.tensor([0.7, 0.5, 0.1, 0.3, 0.2]).log()
    assert ipo_drops(now, mu, 0.3).tolist() == [True, False, True, False, False]


def test_flash_reinforce_drops_whole_rollouts() -> None:
    """One distant token drops its whole rollout; the same token in a long rollout does not."""
    mu, now = torch.tensor([0.5] * 12).log(), torch.tensor([0.9, *[0.5] * 2, 0.9, *[0.5] * 8]).log()
    units = Segments(torch.tensor([3, 0, 9]))
    far = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert flash_drops(now, mu, units, far / 5).tolist() == [True] * 3 + [False] * 9
    assert not flash_drops(now, mu, units, far / 2.9).any()


def test_weights_multiply_after_the_maximum() -> None:
    batch = off_policy(0)
    outputs = model_outputs(batch)
    weight = torch.full((batch.num_tokens,), 0.5, dtype=torch.float64)
    plain, _ = loss_and_gradient(LOSSES["ppo"](), batch, outputs)
    assert loss_and_gradient(LOSSES["ppo"](), batch.replace(weight=weight), outputs)[0] == pytest.approx(plain / 2)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"dual_clip": 1.1}, "within the ordinary clip"),
        ("cispo", {"low": 5.0}, "Set low < high"),
        ("gmpo", {"reduction": "token-mean"}, "one value for a whole rollout"),
        ("clip_cov", {"cov_low": 5.0}, "no covariance is between"),
        ("gspo", {"reduction": "seq-mean-token-sum-norm"}, "belong together"),
        ("sapo", {"norm_length": 5.0}, "belong together"),
        ("dppo", {"divergence": "js"}, "divergence"),
        ("m2po", {"bound": 0.0}, "bound"),
        ("ipo", {"threshold": 1.0}, "threshold"),
        ("flash_reinforce", {"threshold": 0.0}, "threshold"),
        ("vespo", {"power_positve": 1.0}, "power_positive"),
    ],
)
def test_contradictory_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LOSSES[name](**options)


def test_gmpo_takes_one_advantage_a_rollout() -> None:
    batch = off_policy(0, (2, 2))
    view = View(batch)
    advantage = view.column("advantage").clone()
    assert int(view.rollouts.lengths[2]) > 1
    advantage[int(view.rollouts.offsets[3]) - 1] += 1
    with_two_advantages = View(
        batch.replace(advantage=view.scatter(advantage)), Outputs(logp=model_outputs(batch)["logp"])
    )
    with pytest.raises(
        BatchError, match=f"Rollout {int(batch.require('rollout_id')[2])} has the advantages .* such as `ppo`"
    ):
        LOSSES["gmpo"]()(with_two_advantages, Denominators.from_view(with_two_advantages))


def test_gmpo_takes_weights_of_whole_rollouts_only() -> None:
    assert LOSSES["gmpo"].weight_levels == {"sequence", "geometric"}


def test_losses_that_read_the_samplers_log_probs_declare_it() -> None:
    comparing = {name for name, kind in LOSSES.items() if "behavior_logp" in kind().required_columns()}
    assert comparing == {"dppo", "decoupled_ppo", "vespo", "m2po", "ipo", "flash_reinforce"}
    assert "behavior_logp" in LOSSES["reinforce"](cap=2.0).required_columns()
    assert {name for name, kind in LOSSES.items() if "old_logp" not in kind().required_columns()} == {
        "dppo",
        "reinforce",
        "gpg",
        "vespo",
        "ipo",
        "flash_reinforce",
    }
    assert "old_logp" not in LOSSES["decoupled_ppo"](prox="log_linear").required_columns()
