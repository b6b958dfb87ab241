"""Law 3: no option silently does nothing. Each is changed, and the gradient of the run must change.

A test checks that the table is complete: an option without a row fails. A row has the new value of the option. Some
options have an effect only together with others, which the row sets on both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from etude.algorithms import ADVANTAGES, KLS, LOSSES, AlgorithmConfig, AlgorithmState, View
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import CONTROLLERS, AdaptiveKLController
from etude.algorithms.overlong import OverlongPenalty
from etude.batch import Batch
from etude.errors import ConfigError
from tests.conformance.laws import WIDE, LossAndGradient, fixture, gradient, model_outputs
from tests.sweeps import sweep

SUM = "seq-mean-token-sum"
UNITS = ("rollout", "turn")


@dataclass(frozen=True)
class Flip:
    """The new value of an option, and the options that are set beside it."""

    to: Any
    beside: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """Other parts of the algorithm that the option needs to have an effect."""


LOSS = {
    "reduction": Flip("token-sum"),
    "norm_length": Flip(100.0, {"reduction": "seq-mean-token-sum-norm", "norm_length": 50.0}),
    "unit": Flip("turn", {"reduction": "seq-mean-token-mean"}),
}
"""The options of every policy loss."""

FLIPS: dict[str, dict[str, Flip]] = {
    "advantage=gae": {
        "gamma": Flip(0.9),
        "lam": Flip(0.8),
        "whiten": Flip(True),
        "bootstrap_truncated": Flip(True),
    },
    "advantage=reinforce++": {"gamma": Flip(0.9)},
    "advantage=gpg": {"f_norm": Flip(2.0)},
    "advantage=gdpo": {"weights": Flip({"correct": 3.0, "format": 1.0})},
    "advantage=distillation": {"weights": Flip({"math": 0.5})},
    "advantage=pass_at_k": {"normalize": Flip(True)},
    "advantage=pkpo": {"k": Flip(3)},
    "advantage=step_rewards": {
        "how": Flip("final_to_all"),
        "gamma": Flip(0.5),
        "baseline": Flip("group"),
    },
    "advantage=gigpo": {"step_weight": Flip(0.3), "gamma": Flip(0.5), "normalize": Flip(True)},
    "advantage=opob": {"normalize": Flip(True)},
    "advantage=mt_grpo": {"turn_weight": Flip(0.3)},
    "advantage=rae": {"decay": Flip(0.5)},
    "loss=ppo": {"clip_low": Flip(0.5), "clip_high": Flip(0.5), "dual_clip": Flip(1.3)},
    "loss=gspo": {"clip_low": Flip(0.3), "clip_high": Flip(0.3)},
    "loss=cispo": {"low": Flip(0.9), "high": Flip(1.1)},
    "loss=sapo": {"tau_positive": Flip(2.0), "tau_negative": Flip(2.0)},
    "loss=gmpo": {"clip": Flip(0.05)},
    "loss=dppo": {
        "divergence": Flip("kl"),
        "threshold_low": Flip(0.01),
        "threshold_high": Flip(0.01),
        "cap": Flip(0.8),
    },
    "loss=clip_cov": {
        "clip_low": Flip(0.5),
        "clip_high": Flip(0.5),
        "share": Flip(0.9, {"share": 0.1, "cov_low": 0.01}),
        "cov_low": Flip(0.01, {"share": 0.9}),
        "cov_high": Flip(0.5, {"share": 0.9, "cov_low": 0.01}),
    },
    "loss=kl_cov": {"share": Flip(0.5), "coefficient": Flip(3.0, {"share": 0.5})},
    "loss=dro": {"beta": Flip(0.3)},
    "loss=reinforce": {"cap": Flip(0.8)},
    "loss=decoupled_ppo": {"prox": Flip("log_linear"), "clip_low": Flip(0.5), "clip_high": Flip(0.5)},
    "loss=vespo": {
        "power_positive": Flip(1.0),
        "decay_positive": Flip(1.0),
        "power_negative": Flip(1.0),
        "decay_negative": Flip(1.0),
    },
    "loss=m2po": {"bound": Flip(0.5)},
    "loss=ipo": {"threshold": Flip(0.1)},
    "loss=flash_reinforce": {"threshold": Flip(0.05)},
    "kl=reverse": {"off_policy": Flip(True)},
    "kl=total_variation": {"off_policy": Flip(True)},
    "kl=weighted_reverse": {"off_policy": Flip(True), "estimator": Flip("k1")},
    "kl=sequence": {"off_policy": Flip(True)},
}
KL = {"coefficient": Flip(0.7), "controller": Flip(AdaptiveKLController(target=1e-3, horizon=5))}
"""The options of every KL term."""

PARTS: dict[str, tuple[type[BaseModel], dict[str, Flip]]] = {
    "correction": (
        CorrectionConfig,
        {
            "policies": Flip("two"),
            "weight": Flip("truncate"),
            "level": Flip("sequence", {"weight": "truncate"}),
            "low": Flip(0.9, {"weight": "mask"}),
            "high": Flip(0.7, {"weight": "truncate"}),
            "normalize": Flip("rollouts", {"weight": "truncate"}),
            "reject": Flip((RejectionRule(low=0.8, high=1.2),)),
            "opsm_delta": Flip(0.0),
            "center": Flip(True),
        },
    ),
    "entropy": (EntropyConfig, {"coefficient": Flip(0.1), "top_share": Flip(0.3)}),
    "overlong": (
        OverlongPenalty,
        {
            "max_length": Flip(8, {"max_length": 12, "buffer": 6}),
            "buffer": Flip(3, {"max_length": 12, "buffer": 6}),
            "factor": Flip(0.2, {"max_length": 12, "buffer": 6}),
        },
    ),
}
REJECTION = {
    "statistic": Flip("k3", {"high": 0.01}),
    "over": Flip("seq_mean", {"low": 0.8, "high": 1.2}),
    "low": Flip(0.95, {"low": 0.5}),
    "high": Flip(1.05, {"high": 2.0}),
}
STEP_OPTIONS = {"step_scaling": "sqrt_ess"}
"""Options of the corrections that change the optimizer step, but not the gradient."""
SAMPLER_OPTIONS = {"alternatives"}
"""Options of the corrections that say what the sampler records."""
ALGORITHM_OPTIONS: dict[str, Any] = {"mask_truncated": True, "echo": 0.5}


def registered_classes() -> Iterator[tuple[str, str, type[BaseModel], dict[str, Flip]]]:
    """Yield every registered class: its part, its name, the class, and the flips of its own and inherited options."""
    for part, table, common in (("advantage", ADVANTAGES, {}), ("loss", LOSSES, LOSS), ("kl", KLS, KL)):
        for name, kind in table.items():
            yield part, name, kind, common | FLIPS.get(f"{part}={name}", {})


CASES = [(part, name, option) for part, name, kind, _ in registered_classes() for option in kind.model_fields]
ROWS = {(part, name): (kind, flips) for part, name, kind, flips in registered_classes()}


def make_batch() -> Batch:
    """Return an off-policy batch in which every option has an effect. One group has equal rewards."""
    batch = fixture(11, (4, 4, 4, 3), longest=14)
    has_equal_rewards = batch.group == 3
    tokens = torch.repeat_interleave(has_equal_rewards, torch.diff(batch.rollout_token_offsets))
    behavior, old = batch.require("behavior_logp"), batch.require("old_logp")
    return batch.replace(
        alternative_ids=batch.ids[:, None],  # the drawn token, and all others
        alternative_logp=behavior[:, None],
        old_alternative_logp=torch.stack([old, (1 - old.exp()).log()], 1),
        ref_logp=batch.require("ref_logp") - 0.3,  # so that the KL is positive, and above a target
        reward=torch.where(has_equal_rewards, 1.0, batch.require("reward")),
        token_reward=torch.where(tokens, 0.0, batch.require("token_reward")),
    )


RUNS: dict[str, LossAndGradient] = {}
"""The result of each algorithm, because most options are compared with the same default."""


def run(algorithm: AlgorithmConfig) -> LossAndGradient:
    """Estimate two steps, so that a state that is kept from step to step has an effect."""
    if (key := repr(algorithm)) not in RUNS:
        RUNS[key] = _compute(algorithm)
    return RUNS[key]


def _compute(algorithm: AlgorithmConfig) -> LossAndGradient:
    data = make_batch()
    leaves = model_outputs(data)
    drawn = leaves["logp"].detach().clamp(max=-1e-3)
    leaves["alternative_logp"] = torch.stack([drawn, (1 - drawn.exp()).log()], 1).requires_grad_()
    first = algorithm.estimate(data, AlgorithmState(), seed=1, step=1)
    second = algorithm.estimate(data, first.next_state, seed=1, step=2)
    return gradient(algorithm, second, leaves)


def differs(a: LossAndGradient, b: LossAndGradient) -> bool:
    for results in (a, b):
        assert all(bool(torch.isfinite(grad).all()) for grad in results.grads.values())
    return any(not torch.allclose(a.grads[key], b.grads[key], rtol=1e-6, atol=1e-12) for key in a.grads)


def companions(part: str, name: str) -> dict[str, Any]:
    """Return the other parts of the algorithm: ordinary ones that are accepted beside this choice."""
    if part == "loss":
        return {"advantage": ADVANTAGES["rloo"]()}
    if (part, name) == ("kl", "sequence"):
        return {"loss": LOSSES["ppo"](reduction=SUM)}
    return {}


def with_option(part: str, name: str, changes: dict[str, Any]) -> AlgorithmConfig:
    kind, _ = ROWS[part, name]
    base = {"coefficient": 0.3} if part == "kl" else WIDE.get(name, {}) if part == "loss" else {}
    return AlgorithmConfig(**companions(part, name), **{part: kind(**(base | changes))})


@sweep(("part", "name", "option"), CASES)
def test_every_option_of_every_choice_changes_the_gradient_or_is_refused(part: str, name: str, option: str) -> None:
    _, flips = ROWS[part, name]
    assert option in flips, f"{part}={name} has the option `{option}`, which no test changes"
    flip = flips[option]
    try:
        flipped = with_option(part, name, flip.beside | {option: flip.to})
    except ConfigError as refusal:
        names = (option, *flip.beside)
        assert any(f"`{name}" in str(refusal) for name in names), "the refusal names another option"
        return
    assert differs(run(with_option(part, name, flip.beside)), run(flipped))


def test_every_row_is_of_an_option_that_exists() -> None:
    for (part, name), (kind, _) in ROWS.items():
        own_flips = FLIPS.get(f"{part}={name}", {})
        assert own_flips.keys() <= kind.model_fields.keys(), f"{part}={name}"
    assert FLIPS.keys() <= {f"{part}={name}" for part, name in ROWS}


@sweep(
    ("part", "option"),
    [
        (part, option)
        for part, (kind, _) in PARTS.items()
        for option in kind.model_fields.keys() - STEP_OPTIONS.keys() - SAMPLER_OPTIONS
    ],
)
def test_every_option_of_the_other_parts_changes_the_gradient(part: str, option: str) -> None:
    kind, flips = PARTS[part]
    assert option in flips, f"{part} has the option `{option}`, which no test changes"
    flip = flips[option]
    before = run(AlgorithmConfig(**{part: kind(**flip.beside)}))
    after = run(AlgorithmConfig(**{part: kind(**(flip.beside | {option: flip.to}))}))
    assert differs(before, after)


@sweep(("option", "value"), STEP_OPTIONS.items())
def test_an_option_of_the_step_changes_the_step_but_not_the_gradient(option: str, value: str) -> None:
    changed = CorrectionConfig(**{option: value})
    assert not differs(run(AlgorithmConfig()), run(AlgorithmConfig(correction=changed)))
    assert CorrectionConfig().step_scale(View(make_batch())) == 1 and changed.step_scale(View(make_batch())) < 0.9
    with pytest.raises(ConfigError, match=f"`correction.{option}={value}` would do nothing"):
        CorrectionConfig(policies="two", **{option: value})


@sweep("option", RejectionRule.model_fields)
def test_every_option_of_a_rejection_changes_the_gradient(option: str) -> None:
    flip = REJECTION[option]
    before = run(AlgorithmConfig(correction=CorrectionConfig(reject=(RejectionRule(**flip.beside),))))
    after = run(
        AlgorithmConfig(correction=CorrectionConfig(reject=(RejectionRule(**(flip.beside | {option: flip.to})),)))
    )
    assert differs(before, after)


@sweep("option", ALGORITHM_OPTIONS)
def test_every_switch_of_the_algorithm_changes_the_gradient(option: str) -> None:
    assert differs(run(AlgorithmConfig()), run(AlgorithmConfig(**{option: ALGORITHM_OPTIONS[option]})))


def test_every_option_of_the_algorithm_is_in_one_of_these_tables() -> None:
    key = {"advantage", "loss", "kl"} | PARTS.keys() | ALGORITHM_OPTIONS.keys()
    assert AlgorithmConfig.model_fields.keys() == key


@sweep(("option", "value"), [("target", 100.0), ("horizon", 50.0)])
def test_every_option_of_the_adaptive_controller_changes_the_gradient(option: str, value: float) -> None:
    assert CONTROLLERS.keys() == {"fixed", "adaptive"}
    assert AdaptiveKLController.model_fields.keys() == {"target", "horizon"}
    plain = {"target": 1e-3, "horizon": 5.0}
    before, after = AdaptiveKLController(**plain), AdaptiveKLController(**(plain | {option: value}))
    kls = [KLS["reverse"](coefficient=0.3, controller=controller) for controller in (before, after)]
    assert differs(*(run(AlgorithmConfig(kl=kl)) for kl in kls))


@sweep("loss", [name for name, kind in LOSSES.items() if not kind.is_sequence_level])
def test_a_unit_that_would_do_nothing_is_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match=r"`unit=turn` has no effect under `reduction=token-mean`"):
        LOSSES[loss](unit="turn", reduction="token-mean")


@sweep("loss", ["gspo", "vespo"])
def test_the_unit_of_sequence_level_losses_acts_under_any_reduction(loss: str) -> None:
    run_of = {unit: run(with_option("loss", loss, {"unit": unit, "reduction": "token-mean"})) for unit in UNITS}
    assert differs(*run_of.values())


def test_a_change_of_the_reward_is_refused_if_nothing_reads_the_reward() -> None:
    with pytest.raises(ConfigError, match=r"does not read the reward, and `overlong` changes nothing else"):
        AlgorithmConfig(advantage=ADVANTAGES["distillation"](), overlong=OverlongPenalty(max_length=12, buffer=6))
    with pytest.raises(ConfigError, match=r"`kl=in_reward` changes nothing else"):
        AlgorithmConfig(advantage=ADVANTAGES["gdpo"](), kl=KLS["in_reward"]())


@sweep("part", ["advantage", "loss", "kl"])
def test_every_choice_differs_from_every_other(part: str) -> None:
    """No two names give the same gradient, except the pairs here, which are equal by definition."""
    same_gradient = {
        frozenset({"loss=gpg", "loss=reinforce"}),
        frozenset({"loss=clip_cov", "loss=ppo"}),  # it picks one token, which may have no covariance
        frozenset(
            {"kl=reverse", "kl=weighted_reverse"}
        ),  # on each token, w·k3 with w attached has the gradient of w·½δ² with w constant
    }
    results = {f"{part}={name}": run(with_option(part, name, {})) for p, name in ROWS if p == part}
    names = list(results)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert differs(results[a], results[b]) or frozenset({a, b}) in same_gradient, (
                f"{a} and {b} give one gradient"
            )
