"""Engines that sample: the embedded one, in this process, from the very weights that are trained; and servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import names_of

if TYPE_CHECKING:
    from etude.rollout.base import Rollout
    from etude.rollout.config import ENGINES, EngineConfig, ServerConfig, SglangConfig, VllmConfig
    from etude.rollout.request import Delta
    from etude.rollout.served import Served
    from etude.rollout.torch_engine import TorchEngine

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

__getattr__ = names_of(
    __name__,
    {
        "base": ("Rollout",),
        "config": ("ENGINES", "EngineConfig", "ServerConfig", "SglangConfig", "VllmConfig"),
        "request": ("Delta",),
        "served": ("Served",),
        "torch_engine": ("TorchEngine",),
    },
)
