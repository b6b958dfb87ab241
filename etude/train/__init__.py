"""Training: a model's weights, the optimizer that moves them, and the updates that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.train.config import MeshConfig, PolicyTrainConfig, TrainConfig
    from etude.train.flops import measure_bf16_speedup, measure_matmul_flops
    from etude.train.frozen_model import FrozenModel, ScoringModel
    from etude.train.learner import Learner, Objective, load_weights, read_weights
    from etude.train.routed_models import RoutedModels
    from etude.train.score import ModelScorer

__all__ = [
    "FrozenModel",
    "Learner",
    "MeshConfig",
    "ModelScorer",
    "Objective",
    "PolicyTrainConfig",
    "RoutedModels",
    "ScoringModel",
    "TrainConfig",
    "load_weights",
    "measure_bf16_speedup",
    "measure_matmul_flops",
    "read_weights",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "config": ("MeshConfig", "PolicyTrainConfig", "TrainConfig"),
        "flops": ("measure_bf16_speedup", "measure_matmul_flops"),
        "frozen_model": ("FrozenModel", "ScoringModel"),
        "learner": ("Learner", "Objective", "load_weights", "read_weights"),
        "routed_models": ("RoutedModels",),
        "score": ("ModelScorer",),
    },
)
