"""Every advantage, loss, KL form and correction, a page for each family, and the `Algorithm` that joins them."""

from __future__ import annotations

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.algorithm import Algorithm, Estimated
from etude.algorithms.base import Advantage, Estimate, Loss, LossValue, PolicyLoss, State
from etude.algorithms.kl import KLS, KLTerm
from etude.algorithms.losses import LOSSES
from etude.algorithms.reduce import Denominators, Reduction, reduce
from etude.algorithms.segments import Segments
from etude.algorithms.view import Alone, Outputs, Ranks, Unit, View

__all__ = [
    "ADVANTAGES",
    "KLS",
    "LOSSES",
    "Advantage",
    "Algorithm",
    "Alone",
    "Denominators",
    "Estimate",
    "Estimated",
    "KLTerm",
    "Loss",
    "LossValue",
    "Outputs",
    "PolicyLoss",
    "Ranks",
    "Reduction",
    "Segments",
    "State",
    "Unit",
    "View",
    "reduce",
]
