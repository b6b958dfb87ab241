"""Weights, rejection, the mismatch and OPSM compared with plain numpy, rollout by rollout."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from etude.algorithms.corrections import (
    CorrectionConfig,
    RejectionRule,
    measure_mismatch,
    opsm_mask,
    rescale_to_mean_one,
)
from etude.algorithms.view import Outputs, View
from etude.batch import Batch
from etude.config.show import to_yaml
from etude.errors import ConfigError, MissingColumnError
from tests.algorithms.flat import flat_view, float64
from tests.batches import random_batch
from tests.thread_ranks import on_ranks


def log_ratios(batch: Batch) -> list[np.ndarray]:
    """Return log π_old − log μ of each rollout's action tokens."""
    assert batch.old_logp is not None and batch.behavior_logp is not None
    log_rho, action = (batch.old_logp - batch.behavior_logp).numpy(), batch.action.numpy()
    ends = batch.rollout_token_offsets.tolist()
    return [log_rho[a:b][action[a:b]] for a, b in pairwise(ends)]


def ratio(log_rho: np.ndarray, level: str) -> np.ndarray:
    log_ratio_of = {"token": log_rho, "sequence": np.full_like(log_rho, log_rho.sum())}
    log_ratio_of["geometric"] = log_ratio_of["sequence"] / max(len(log_rho), 1)
    return np.exp(np.clip(log_ratio_of[level], -20, 20))


@pytest.fixture(params=[0, 1, 2])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(request.param, (3, 1, 4), drift=0.8)


@pytest.mark.parametrize(("level", "ceiling"), [("token", 2.0), ("sequence", 5.0), ("geometric", 2.0)])
def test_weights_are_truncated_at_the_level(batch: Batch, level: Any, ceiling: float) -> None:
    result = CorrectionConfig(weight="truncate", level=level)(View(batch))
    expected = np.concatenate([np.minimum(ratio(x, level), ceiling) for x in log_ratios(batch)])
    assert result.weight is not None and result.keep is None
    np.testing.assert_allclose(result.weight.numpy(), expected, atol=1e-12)
    metrics = result.metrics.reduce()
    cut = np.concatenate([ratio(x, level) > ceiling for x in log_ratios(batch)])
    assert metrics["correction/truncated_share"] == pytest.approx(cut.mean())
    assert metrics["correction/weight"] == pytest.approx(expected.mean())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [(None, None), (0.9, 1.2), (0.0, 2.0)])
def test_a_mask_keeps_ratios_within_the_bounds_and_no_others(batch: Batch, level: Any, bounds: Any) -> None:
    result = CorrectionConfig(weight="mask", level=level, low=bounds[0], high=bounds[1])(View(batch))
    low, high = (0.5, 5.0) if bounds[0] is None else bounds
    rho = np.concatenate([ratio(x, level) for x in log_ratios(batch)])
    is_inside = (rho >= low) & (rho <= high)
    assert result.weight is not None
    np.testing.assert_allclose(result.weight.numpy(), np.where(is_inside, rho, 0), atol=1e-12)
    assert result.metrics.reduce()["correction/masked_share"] == pytest.approx(1 - is_inside.mean())


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_normalized_weights_have_mean_one_after_truncation(batch: Batch, over: Any) -> None:
    plain = CorrectionConfig(weight="truncate", high=1.5)(View(batch)).weight
    scaled = CorrectionConfig(weight="truncate", high=1.5, normalize=over)(View(batch)).weight
    assert plain is not None and scaled is not None
    rollouts = [part for part in scaled.split(View(batch).rollouts.lengths.tolist()) if len(part)]
    mean = scaled.mean() if over == "tokens" else torch.stack([part.mean() for part in rollouts]).mean()
    assert float(mean) == pytest.approx(1, abs=1e-12)
    ratios = scaled / plain
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-12, atol=0)


def test_weights_that_are_all_zero_stay_zero() -> None:
    view = flat_view([2])
    for over in ("tokens", "rollouts"):
        assert rescale_to_mean_one(float64([0, 0]), view.rollouts, over, view.ranks).tolist() == [0, 0]


def expected_keep(rule: RejectionRule, log_rho: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens of one rollout that a rule keeps."""
    if not len(log_rho):
        return np.zeros(0, bool)
    rho = np.exp(log_rho)
    if rule.statistic == "k1":
        value = {"seq_sum": np.exp(log_rho.sum()), "seq_mean": np.exp(log_rho.mean())}.get(rule.over, rho)
    else:
        each = log_rho**2 / 2 if rule.statistic == "k2" else rho - 1 - log_rho
        value = {"seq_sum": each.sum(), "seq_mean": each.mean()}.get(rule.over, each)
    is_inside = (value >= (rule.low or -math.inf)) & (value <= (rule.high or math.inf))
    return np.broadcast_to(is_inside.all() if rule.over == "seq_max" else is_inside, log_rho.shape)


RULES = [RejectionRule(over=over, low=0.8, high=1.3) for over in ("token", "seq_sum", "seq_mean", "seq_max")] + [
    RejectionRule(statistic=statistic, over=over, high=high)
    for statistic in ("k2", "k3")
    for over, high in (("token", 0.2), ("seq_sum", 2.0), ("seq_mean", 0.3), ("seq_max", 1.0))
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.statistic}-{rule.over}")
def test_a_rule_keeps_tokens_by_its_statistic(rule: RejectionRule) -> None:
    decisions = []
    for seed in range(4):
        batch = random_batch(seed, (3, 1, 4), drift=0.6)
        result = CorrectionConfig(reject=(rule,))(View(batch))
        expected = np.concatenate([expected_keep(rule, x) for x in log_ratios(batch)])
        assert result.weight is None and result.keep is not None
        assert result.keep.tolist() == expected.tolist()
        assert result.metrics.reduce()["correction/rejected_share"] == pytest.approx(1 - expected.mean())
        decisions += expected.tolist()
    assert {True, False} == set(decisions), "the rule keeps some tokens and rejects others"


def test_rules_and_a_weight_combine(batch: Batch) -> None:
    first, second = RejectionRule(low=0.8), RejectionRule(over="seq_mean", high=1.3)
    both = CorrectionConfig(reject=(first, second), weight="truncate")(View(batch))
    keeps = [CorrectionConfig(reject=(rule,))(View(batch)).keep for rule in (first, second)]
    assert both.keep is not None and keeps[0] is not None and keeps[1] is not None
    assert torch.equal(both.keep, keeps[0] & keeps[1])
    assert torch.equal(both.weight, CorrectionConfig(weight="truncate")(View(batch)).weight)  # type: ignore[arg-type]


def test_bounds_apply_to_the_trainers_probability_over_the_samplers() -> None:
    view = flat_view([2], old_logp=float64([0.1, 0.5]).log(), behavior_logp=float64([0.5, 0.1]).log())
    assert CorrectionConfig(reject=(RejectionRule(high=2),))(view).keep.tolist() == [True, False]  # type: ignore[union-attr]
    assert CorrectionConfig(reject=(RejectionRule(low=0.5),))(view).keep.tolist() == [False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_log_ratios_are_clamped_after_the_sum(dtype: torch.dtype) -> None:
    view = flat_view(
        [2, 1, 0, 1],
        old_logp=torch.tensor([-1e3, -1, -1e3, -1], dtype=dtype),
        behavior_logp=torch.tensor([-1, -1e3, -1, -1e3], dtype=dtype),
    )
    sequence = CorrectionConfig(weight="mask", level="sequence", low=0, high=1e9)(view)
    np.testing.assert_allclose(sequence.weight.numpy(), [1, 1, math.exp(-20), math.exp(20)], rtol=1e-5)  # type: ignore[union-attr]
    token = CorrectionConfig(weight="truncate", reject=RULES[:1])(view)
    assert token.weight is not None and token.weight[1] == 2 and 0 < token.weight[0] < 1e-8
    assert token.keep is not None and not token.keep.any()
    assert all(math.isfinite(value) for value in token.metrics.reduce().values())


def test_the_mismatch_is_measured_whenever_both_sides_are_known(batch: Batch) -> None:
    metrics = CorrectionConfig()(View(batch)).metrics.reduce()
    log_rho = np.concatenate(log_ratios(batch))
    view, rho = View(batch), np.exp(log_rho)
    behavior, old = view.column("behavior_logp").numpy(), view.column("old_logp").numpy()
    p, q = np.exp(behavior), np.exp(old)
    log_ratio_of = np.exp([each.sum() for each in log_ratios(batch) if len(each)])
    assert metrics == {
        "mismatch/k1": pytest.approx(-log_rho.mean()),
        "mismatch/k3": pytest.approx((rho - 1 - log_rho).mean()),
        "mismatch/chi2": pytest.approx((rho**2).mean() - 1),
        "mismatch/sampler_perplexity": pytest.approx(math.exp(-behavior.mean())),
        "mismatch/trainer_perplexity": pytest.approx(math.exp(-old.mean())),
        "mismatch/effective_sample_size": pytest.approx(rho.sum() ** 2 / (rho**2).sum() / len(rho)),
        "mismatch/rollout_effective_sample_size": pytest.approx(
            log_ratio_of.sum() ** 2 / (log_ratio_of**2).sum() / len(log_ratio_of)
        ),
        "mismatch/correlation": pytest.approx(np.corrcoef(p, q)[0, 1]),
        "mismatch/largest_gap": pytest.approx(np.abs(p - q).max()),
    }


def test_nothing_is_measured_if_one_side_is_unknown(batch: Batch) -> None:
    for missing in ("old_logp", "behavior_logp"):
        assert len(CorrectionConfig()(View(batch.replace(**{missing: None}))).metrics) == 0


def test_agreement_is_zero_mismatch_and_constant_probabilities_have_no_correlation() -> None:
    logp = float64([-1, -1, -1])
    metrics = measure_mismatch(flat_view([2, 1], behavior_logp=logp, old_logp=logp)).reduce()
    assert (
        metrics["mismatch/k1"]
        == metrics["mismatch/k3"]
        == metrics["mismatch/chi2"]
        == metrics["mismatch/largest_gap"]
        == 0
    )
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(1)
    assert "mismatch/correlation" not in metrics


def test_without_actions_nothing_is_measured_or_corrected() -> None:
    view = flat_view([0, 0], behavior_logp=float64([]), old_logp=float64([]))
    result = CorrectionConfig(weight="truncate", normalize="rollouts", reject=RULES[:2])(view)
    assert result.weight is not None and result.keep is not None
    assert (result.weight.shape, result.keep.shape) == ((0,), (0,))
    assert result.metrics.reduce() == {}


@pytest.mark.parametrize("normalize", ["none", "tokens", "rollouts"])
def test_corrections_do_not_depend_on_the_number_of_ranks(normalize: Any) -> None:
    batch = random_batch(5, (3, 2, 4), drift=0.8)
    correction = CorrectionConfig(weight="truncate", high=1.3, normalize=normalize, reject=RULES[2:3])
    one_rank = correction(View(batch))
    parts = [batch.select([0, 1, 2]), batch.select([3, 4]), batch.select([5, 6, 7, 8])]
    result = on_ranks(3, lambda rank, ranks: correction(View(parts[rank], ranks=ranks)))
    merged = result[0].metrics
    merged.merge(result[1].metrics)
    merged.merge(result[2].metrics)
    assert one_rank.weight is not None and one_rank.keep is not None
    weights = [each.weight for each in result if each.weight is not None]
    torch.testing.assert_close(torch.cat(weights), one_rank.weight, rtol=1e-12, atol=0)
    assert torch.equal(torch.cat([each.keep for each in result if each.keep is not None]), one_rank.keep)
    assert merged.reduce() == pytest.approx(one_rank.metrics.reduce(), rel=1e-9)


@pytest.mark.parametrize("unit", ["rollout", "turn"])
def test_opsm_drops_bad_units_that_have_drifted(unit: Any) -> None:
    decisions = []
    for seed in range(4):
        batch = random_batch(seed, (3, 1, 4))
        logp = (View(batch).column("old_logp") - 0.2).requires_grad_()
        view = View(batch, Outputs(logp=View(batch).scatter(logp, math.nan)))
        result = opsm_mask(view, 0.05, unit)
        lengths = view.units(unit).lengths.tolist()
        drift = (view.column("behavior_logp") - logp.detach()).split(lengths)
        advantage = view.column("advantage").split(lengths)
        expected = [
            not (float(a.mean()) < 0 and float(d.mean()) > 0.05)
            for a, d in zip(advantage, drift, strict=True)
            for _ in range(len(a))
        ]
        assert result.tolist() == expected
        decisions += expected
    assert {True, False} == set(decisions)


def test_a_correction_declares_the_columns_that_it_reads() -> None:
    assert CorrectionConfig().required_columns() == frozenset()
    assert CorrectionConfig(weight="mask").required_columns() == {"behavior_logp", "old_logp"}
    assert CorrectionConfig(reject=RULES[:1]).required_columns() == {"behavior_logp", "old_logp"}
    assert CorrectionConfig(policies="two").required_columns() == {"behavior_logp"}
    assert CorrectionConfig(opsm_delta=0.1).required_columns() == {"behavior_logp"}


def test_a_missing_column_of_a_correction_is_named(batch: Batch) -> None:
    with pytest.raises(MissingColumnError, match=r"The correction needs the column `old_logp`"):
        CorrectionConfig(weight="truncate")(View(batch.replace(old_logp=None)))


def test_two_policies_have_no_mismatch_and_no_weight(batch: Batch) -> None:
    result = CorrectionConfig(policies="two", opsm_delta=0.1)(View(batch))
    assert result.weight is None and result.keep is None and len(result.metrics) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policies": "two", "weight": "mask"}, r"ρ is 1 everywhere and `correction.weight=mask` would do nothing"),
        ({"policies": "two", "reject": RULES[:1]}, r"ρ is 1 everywhere and `correction.reject` would do nothing"),
        ({"level": "sequence"}, r"`correction.level=sequence` shapes a weight, and `correction.weight` is `none`"),
        ({"high": 3}, r"`correction.high=3.0` shapes a weight"),
        ({"low": 0.5}, r"`correction.low=0.5` shapes a weight"),
        ({"normalize": "tokens"}, r"`correction.normalize=tokens` shapes a weight"),
        ({"weight": "truncate", "low": 0.5}, r"`correction.low=0.5` would do nothing"),
        ({"weight": "mask", "low": 6}, r"`correction.low=6` must be below `correction.high=5`"),
    ],
)
def test_corrections_with_options_without_effect_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        CorrectionConfig(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"without a bound rejects nothing"),
        ({"statistic": "k3", "low": 0.1}, r"`low` = 0.1 would reject where trainer and sampler agree best"),
        ({"low": 2, "high": 1}, r"`low` = 2 must be below `high` = 1"),
    ],
)
def test_rules_with_contradictory_bounds_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RejectionRule(**options)


def test_rules_are_the_same_after_yaml() -> None:
    correction = CorrectionConfig(weight="mask", low=0.2, reject=tuple(RULES), opsm_delta=1e-4)
    assert CorrectionConfig.model_validate(yaml.safe_load(to_yaml(correction))) == correction
