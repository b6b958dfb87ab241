"""Engines that sample: the embedded one, in this process, from the very weights that are trained; and servers."""

from __future__ import annotations

from etude.rollout.base import Rollout
from etude.rollout.config import ENGINES, ServerConfig, SglangConfig, VllmConfig
from etude.rollout.request import Delta
from etude.rollout.served import Served
from etude.rollout.torch_engine import EngineConfig, TorchEngine

__all__ = [
    "ENGINES",
    "Delta",
    "EngineConfig",
    "Rollout",
    "Served",
    "ServerConfig",
    "SglangConfig",
    "TorchEngine",
    "VllmConfig",
]
