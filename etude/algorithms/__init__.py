"""All advantages, losses, KL terms and corrections, a module for each family, and `AlgorithmConfig` that joins them."""

from __future__ import annotations

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.algorithm import AlgorithmConfig, EstimatedBatch
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState, Loss, LossValue, PolicyLoss
from etude.algorithms.kl import KLS, KLTerm
from etude.algorithms.losses import LOSSES
from etude.algorithms.reduce import Denominators, Reduction
from etude.algorithms.segments import Segments
from etude.algorithms.view import Outputs, Ranks, SingleRank, Unit, View

__all__ = [
    "ADVANTAGES",
    "KLS",
    "LOSSES",
    "Advantage",
    "AdvantageEstimate",
    "AlgorithmConfig",
    "AlgorithmState",
    "Denominators",
    "EstimatedBatch",
    "KLTerm",
    "Loss",
    "LossValue",
    "Outputs",
    "PolicyLoss",
    "Ranks",
    "Reduction",
    "Segments",
    "SingleRank",
    "Unit",
    "View",
]
