"""Training: a model's weights, the optimizer that moves them, and the updates that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import names_of

if TYPE_CHECKING:
    from etude.train.config import MeshConfig, Train
    from etude.train.cost import matmul_rate
    from etude.train.frozen import Frozen
    from etude.train.fsdp import Learner, Objective, load_weights, read_weights
    from etude.train.mesh import Mesh
    from etude.train.score import ModelScorer

__all__ = [
    "Frozen",
    "Learner",
    "Mesh",
    "MeshConfig",
    "ModelScorer",
    "Objective",
    "Train",
    "load_weights",
    "matmul_rate",
    "read_weights",
]

__getattr__ = names_of(
    __name__,
    {
        "config": ("MeshConfig", "Train"),
        "cost": ("matmul_rate",),
        "frozen": ("Frozen",),
        "fsdp": ("Learner", "Objective", "load_weights", "read_weights"),
        "mesh": ("Mesh",),
        "score": ("ModelScorer",),
    },
)
