"""Training: a model's weights, the optimizer that moves them, and the updates that it makes."""

from __future__ import annotations

from etude.train.config import Train
from etude.train.cost import matmul_rate
from etude.train.frozen import Frozen
from etude.train.fsdp import Learner, Objective, load_weights, read_weights
from etude.train.score import ModelScorer

__all__ = ["Frozen", "Learner", "ModelScorer", "Objective", "Train", "load_weights", "matmul_rate", "read_weights"]
