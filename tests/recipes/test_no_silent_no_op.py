"""Every choice of an algorithm changes the gradient of the run that `etude train` assembles (the third law)."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import ADVANTAGES, KLS, LOSSES
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from tests.recipes.runs import REWARDS, run_of

SUMMED = {"loss.reduction": "seq-mean-token-sum"}
BASE: dict[str, Any] = {
    "reward.path": f"{REWARDS}:mixed",
    "collect.tasks": 6,
    "mini_batches": 2,
    "steps": 1,
    "train.precision": "bf16",  # sampler and trainer differ a little, as they do on a GPU
    "train.learning_rate": 0.003,
    "train.max_grad_norm": None,
}
OF_TURNS = {"step_rewards", "turn_baseline", "turn_baseline_biased", "gigpo", "mt_grpo"}
"""Advantages that differ from others only if an answer has several turns."""


def moment(world: Path, directory: Path, **options: Any) -> Tensor:
    """Return AdamW's first moments after a short run, joined to one vector."""
    with build(run_of(world, directory=directory, **BASE | {"train.max_grad_norm": 1e9} | options)) as parts:
        run_loop(parts)
        moments = parts.learners.crew.call(PolicyWorker.tensors)["exp_avg"]
        return torch.cat([value.flatten() for value in moments.values()])


def alike(moments: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Yield pairs of choices with the same gradient."""
    return [
        (one, other)
        for one, other in combinations(moments, 2)
        if float((moments[one] - moments[other]).norm()) <= 1e-4 * float(moments[one].norm())
    ]


def every(world: Path, directory: Path, choices: dict[str, dict[str, Any]]) -> None:
    result = {
        name: moment(world, directory / str(place), **options) for place, (name, options) in enumerate(choices.items())
    }
    assert all(float(value.norm()) > 0 for value in result.values())
    assert not alike(result)


def test_every_advantage_has_an_effect(world: Path, tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "opo": SUMMED,
        "distillation": {"teacher.path": world / "model", "train.precision": "fp32", "sampling.temperature": 1.0},
        "rae": {"steps": 2},
    }
    names = [name for name in ADVANTAGES if name not in OF_TURNS]
    names.remove("distillation")  # by the policy's own model it teaches nothing: see test_models_beside
    every(world, tmp_path, {name: {"advantage": name} | more.get(name, {}) for name in names})


def test_every_loss_has_an_effect(world: Path, tmp_path: Path) -> None:
    """With limits that are narrow enough for so few tokens."""
    more: dict[str, dict[str, Any]] = {
        "clip_cov": {"loss.share": 0.3, "loss.cov_low": 0.0},
        "kl_cov": {"loss.share": 0.3},
        "m2po": {"loss.bound": 1e-7},
        "dppo": {"loss.threshold_low": 0.002, "loss.threshold_high": 0.002},
        "ipo": {"loss.threshold": 0.002},
        "ppo": {"loss.clip_low": 0.02, "loss.clip_high": 0.02},
        "decoupled_ppo": {"loss.clip_low": 0.02, "loss.clip_high": 0.02},
    }
    names = [name for name in LOSSES if name != "gpg"]  # another name of `reinforce`
    every(world, tmp_path, {name: {"loss": name} | more.get(name, {}) for name in names})


def test_every_reduction_and_option_of_a_loss_has_an_effect(world: Path, tmp_path: Path) -> None:
    clip = {"loss.clip_low": 0.02, "loss.clip_high": 0.02}
    every(
        world,
        tmp_path,
        {
            "token-mean": clip,
            "token-sum": clip | {"loss.reduction": "token-sum"},
            "seq-mean-token-mean": clip | {"loss.reduction": "seq-mean-token-mean"},
            "seq-mean-token-sum": clip | SUMMED,
            "norm": clip | {"loss.reduction": "seq-mean-token-sum-norm", "loss.norm_length": 7},
            "dual clip": clip | {"loss.dual_clip": 1.03},
            "clip low": clip | {"loss.clip_low": 0.01},
            "clip high": clip | {"loss.clip_high": 0.01},
            "mini_batches": clip | {"mini_batches": 3},
            "ppo_epochs": clip | {"ppo_epochs": 2},
            "entropy": clip | {"entropy.coefficient": 0.1},
            "top entropy": clip | {"entropy.top_share": 0.3},
            "overlong": clip | {"overlong.max_length": 6, "overlong.buffer": 3},
            "truncated": clip | {"mask_truncated": "true"},
            "temperature": clip | {"sampling.temperature": 0.9},
        },
    )


def test_every_correction_has_an_effect(world: Path, tmp_path: Path) -> None:
    """Bounds are as narrow as the mismatch of a tiny model is small."""
    narrow = "{low: 0.9995, high: 1.0005}"
    clip = {
        "loss.clip_low": 0.01,
        "loss.clip_high": 0.01,
        "mini_batches": 6,
        "train.learning_rate": 0.01,
    }  # two policies are clipped around the sampler
    every(
        world,
        tmp_path,
        {
            "clipped": clip,
            "clipped, two policies": clip | {"correction.policies": "two"},
            "none": {},
            "truncate": {"correction.weight": "truncate"},
            "truncate low": {"correction.weight": "truncate", "correction.high": 1.0},
            "mask": {"correction.weight": "mask", "correction.low": 0.9995, "correction.high": 1.0005},
            "sequence": {"correction.weight": "truncate", "correction.level": "sequence"},
            "geometric": {"correction.weight": "truncate", "correction.level": "geometric"},
            "normalised": {"correction.weight": "truncate", "correction.high": 1.0, "correction.normalize": "tokens"},
            "reject": {"correction.reject": f"[{narrow}]"},
            "opsm": {"correction.opsm_delta": 1e-4},
        },
    )


ADAPTIVE = {"kl.controller": "adaptive", "kl.controller.target": 0.01, "kl.controller.horizon": 300}


@pytest.mark.parametrize("controller", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
def test_every_kl_and_its_controller_has_an_effect(controller: dict[str, Any], world: Path, tmp_path: Path) -> None:
    options = SUMMED | {"kl.coefficient": 0.3, "steps": 2} | controller
    more = {"weighted_reverse": {"kl.estimator": "k1"}}
    choices = {name: options | {"kl": name} | more.get(name, {}) for name in sorted(KLS)}
    every(world, tmp_path, {"free": SUMMED | {"steps": 2}} | choices)
