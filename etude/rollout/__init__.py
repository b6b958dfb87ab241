"""Engines that sample: the embedded one, in this process, from the very weights that are trained."""

from __future__ import annotations

from etude.rollout.request import Delta
from etude.rollout.torch_engine import EngineConfig, TorchEngine

__all__ = ["Delta", "EngineConfig", "TorchEngine"]
