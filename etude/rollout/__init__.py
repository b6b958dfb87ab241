"""The engines that sample: the embedded engine of this process, and servers of vLLM or SGLang.

The embedded engine computes with the very weights that are trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.rollout.config import ENGINES, RolloutConfig, ServerConfig, SglangConfig, TorchEngineConfig, VllmConfig
    from etude.rollout.request import Delta
    from etude.rollout.server_pool import ServerPool
    from etude.rollout.torch_engine import TorchEngine

__all__ = [
    "ENGINES",
    "Delta",
    "RolloutConfig",
    "ServerConfig",
    "ServerPool",
    "SglangConfig",
    "TorchEngine",
    "TorchEngineConfig",
    "VllmConfig",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "config": ("ENGINES", "RolloutConfig", "TorchEngineConfig", "ServerConfig", "SglangConfig", "VllmConfig"),
        "request": ("Delta",),
        "server_pool": ("ServerPool",),
        "torch_engine": ("TorchEngine",),
    },
)
